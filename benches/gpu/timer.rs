//! Measures time on the device between two events: of replayed graphs, or of launched calls.

use kvarena::backend::cuda::{CudaError, CudaEvent, CudaOptions, CudaStream, Gpu};

use crate::Outcome;

/// A stream and two events.
pub struct Timer {
    pub stream: CudaStream,
    /// Number of microseconds that the calls of one measurement should take together.
    pub together: f64,
    start: CudaEvent,
    end: CudaEvent,
}

impl Timer {
    pub fn new(gpu: &Gpu) -> Outcome<Self> {
        let stream = CudaStream::new(gpu)?;
        let (start, end) = (CudaEvent::new(gpu, true)?, CudaEvent::new(gpu, true)?);
        Ok(Self { stream, together: 10_000.0, start, end })
    }

    /// Returns the options of a backend on the stream.
    pub fn options(&self, gpu: &Gpu) -> CudaOptions {
        CudaOptions { stream: Some(self.stream.clone()), ..CudaOptions::new(gpu) }
    }

    /// Returns the microseconds of `work` on the stream.
    pub fn once(&mut self, work: impl FnOnce() -> Result<(), CudaError>) -> Outcome<f64> {
        self.start.record(&self.stream)?;
        work()?;
        self.end.record(&self.stream)?;
        self.end.synchronize()?;
        Ok(f64::from(self.end.elapsed_ms(&self.start)?) * 1e3)
    }

    /// Returns the median microseconds of 7 runs of `work`, after one run that is not counted.
    pub fn median(&mut self, mut work: impl FnMut() -> Result<(), CudaError>) -> Outcome<f64> {
        self.once(&mut work)?;
        let mut times = (0..7).map(|_| self.once(&mut work)).collect::<Outcome<Vec<_>>>()?;
        times.sort_by(f64::total_cmp);
        Ok(times[3])
    }

    /// Returns the microseconds per call of consecutive calls that use `sets` input sets in turn. The host launches the
    /// calls one by one, without a graph. The device must take longer for them than the host.
    pub fn launches(&mut self, sets: usize, mut launch: impl FnMut(usize) -> Result<(), CudaError>) -> Outcome<f64> {
        let calls = self.calls(sets, &mut launch)?;
        let all = || (0..calls).try_for_each(|i| launch(i % sets));
        Ok(self.median(all)? / calls as f64)
    }

    /// Returns the microseconds of one call in a graph of calls that use `sets` input sets in turn.
    pub fn graph(&mut self, sets: usize, mut launch: impl FnMut(usize) -> Result<(), CudaError>) -> Outcome<f64> {
        let calls = self.calls(sets, &mut launch)?;
        let graph = self.stream.capture(|| (0..calls).try_for_each(|i| launch(i % sets)))?;
        let stream = self.stream.clone();
        Ok(self.median(|| {
            // SAFETY: `launch` still borrows the memory of the calls, and no other plan was staged since.
            unsafe { graph.launch(&stream) }
        })? / calls as f64)
    }

    /// Returns the number of calls that take `together` microseconds, after a warm-up: a multiple of `sets`, at most
    /// 2,000 before it is rounded up.
    fn calls(&mut self, sets: usize, mut launch: impl FnMut(usize) -> Result<(), CudaError>) -> Outcome<usize> {
        for _ in 0..2 {
            (0..sets).try_for_each(&mut launch)?;
        }
        self.stream.synchronize()?;
        let estimate = self.once(|| (0..sets).try_for_each(&mut launch))? / sets as f64;
        let calls = ((self.together / estimate).ceil() as usize).clamp(sets, 2_000);
        Ok(calls.div_ceil(sets) * sets)
    }
}
