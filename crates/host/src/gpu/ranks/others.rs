//! The threads of the other ranks: each repeats the work of rank 0 on its own GPU.
//!
//! If a rank fails or panics, the others would wait for its sum forever. The rank therefore prints the cause and ends
//! the program ([`or_end`]): unwinding would drop values that wait for the other ranks.

use std::ffi::c_int;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, JoinHandle};

use kvarena::Backend;
use kvarena::backend::cuda::Cuda;

use super::WeightSource;
use crate::config::ModelConfig;
use crate::error::{Error, Result};
use crate::gpu::device::Device;
use crate::gpu::error::GpuError;
use crate::gpu::runner::{GpuOptions, GpuRunner};
use crate::gpu::sums::Link;
use crate::gpu::weights::Share;

/// A rank's part of the model, in the rank's thread.
pub struct Rank {
    pub runner: GpuRunner,
    /// The pool, once it is open.
    pub backend: Option<Cuda>,
    /// Shape of the whole model.
    pub model: ModelConfig,
    pub share: Share,
}

impl Rank {
    pub fn pool(&mut self) -> Result<&mut Cuda> {
        self.parts().map(|(_, backend)| backend)
    }

    pub fn parts(&mut self) -> Result<(&mut GpuRunner, &mut Cuda)> {
        let backend = self.backend.as_mut().ok_or_else(|| Error::run("the pool is not open"))?;
        Ok((&mut self.runner, backend))
    }
}

/// Work that rank 0 sends to another rank.
type Job = Box<dyn FnOnce(&mut Rank) -> Result<()> + Send>;

/// The progress of a rank's moves, and the number of its swap pages. Rank 0 reads both at any time.
#[derive(Default)]
pub struct Progress {
    pub swap_pages: AtomicU32,
    pub saved: AtomicU64,
    pub loaded: AtomicU64,
}

impl Progress {
    fn publish(&self, backend: &mut Cuda) -> Result<()> {
        let moved = backend.moved().map_err(GpuError::from)?;
        self.saved.store(moved.saved.raw(), Ordering::Release);
        self.loaded.store(moved.loaded.raw(), Ordering::Release);
        self.swap_pages.store(backend.swap_pages(), Ordering::Release);
        Ok(())
    }
}

/// Rank 0's handles to the threads of the other ranks.
pub struct OtherRanks {
    senders: Vec<Sender<Job>>,
    threads: Vec<JoinHandle<()>>,
    pub progress: Vec<Arc<Progress>>,
    /// The minimum of the other GPUs' free memory after they have read their weights, in bytes.
    pub free: u64,
}

/// The inputs from which a rank's thread creates its part of the model.
struct Seed {
    config: ModelConfig,
    source: WeightSource,
    options: GpuOptions,
    link: Link,
}

impl OtherRanks {
    /// Starts a thread for each rank but the first, and waits until all have read their weights.
    ///
    /// # Errors
    /// A GPU that cannot be used, weights that cannot be read, or too little memory.
    pub fn start(links: Vec<Link>, config: &ModelConfig, source: &WeightSource, options: GpuOptions) -> Result<Self> {
        let (mut senders, mut threads, mut ready) = (Vec::new(), Vec::new(), Vec::new());
        let progress: Vec<_> = links.iter().map(|_| Arc::new(Progress::default())).collect();
        for (link, progress) in links.into_iter().zip(&progress) {
            let (sender, jobs) = channel();
            let (ready_sender, ready_receiver) = channel();
            let options = GpuOptions { keep_logits: false, keep_times: false, ..options };
            let seed = Seed { config: config.clone(), source: source.clone(), options, link };
            let progress = Arc::clone(progress);
            threads.push(thread::spawn(move || run_rank(seed, &jobs, &ready_sender, &progress)));
            senders.push(sender);
            ready.push(ready_receiver);
        }
        let mut free = u64::MAX;
        for receiver in ready {
            free = free.min(receiver.recv().map_err(|_| lost())??);
        }
        Ok(Self { senders, threads, progress, free })
    }

    /// Sends a job to all.
    pub fn send(&self, job: impl FnOnce(&mut Rank) -> Result<()> + Clone + Send + 'static) {
        for sender in &self.senders {
            // A rank that has failed has ended the program.
            let _ = sender.send(Box::new(job.clone()));
        }
    }

    /// Sends a job to all. Returns a receiver of each rank's result, in the order of the ranks.
    pub fn ask<T, J>(&self, job: J) -> Vec<Receiver<T>>
    where
        T: Send + 'static,
        J: FnOnce(&mut Rank) -> Result<T> + Clone + Send + 'static,
    {
        let ask = |sender: &Sender<Job>| {
            let ((reply, answer), job) = (channel(), job.clone());
            // A rank that has failed has ended the program. A receiver that rank 0 has dropped needs no result.
            let _ = sender.send(Box::new(move |rank| job(rank).map(|result| drop(reply.send(result)))));
            answer
        };
        self.senders.iter().map(ask).collect()
    }

    /// Sends a job to all, and waits for the results.
    pub fn request<T, J>(&self, job: J) -> Result<Vec<T>>
    where
        T: Send + 'static,
        J: FnOnce(&mut Rank) -> Result<T> + Clone + Send + 'static,
    {
        self.ask(job).into_iter().map(|answer| answer.recv().map_err(|_| lost())).collect()
    }
}

unsafe extern "C" {
    safe fn _exit(code: c_int) -> !;
}

/// The exit code of a program that panics.
const PANICKED: c_int = 101;

/// Runs a rank's part of the ranks' common work. If the part fails or panics, prints the cause and ends the program.
/// The exit code is that of the error, or [`PANICKED`]. Exit handlers do not run, because those of a driver may wait
/// for the other ranks' kernels.
pub fn or_end<T>(rank: usize, part: impl FnOnce() -> Result<T>) -> T {
    let code = match catch_unwind(AssertUnwindSafe(part)) {
        Ok(Ok(done)) => return done,
        Ok(Err(error)) => {
            eprintln!("kvarena-server: rank {rank}: {error}");
            error.fault as c_int
        }
        Err(_) => {
            eprintln!("kvarena-server: rank {rank} panicked; the message is above");
            PANICKED
        }
    };
    _exit(code)
}

fn lost() -> Error {
    Error::run("a rank's thread has ended")
}

/// Runs the thread of a rank, which repeats the work of rank 0 on the rank's own GPU.
fn run_rank(seed: Seed, jobs: &Receiver<Job>, ready: &Sender<Result<u64>>, progress: &Progress) {
    let number = seed.link.rank();
    let share = Share { rank: number, ranks: seed.link.ranks() };
    let begin = || -> Result<(Rank, u64)> {
        let device = Rc::new(Device::open_number(number as u32)?);
        let weights = Rc::new(seed.source.weights(&device, &seed.config, share)?);
        let config = share.of(&seed.config)?;
        let runner = GpuRunner::of_rank(device, config, weights, seed.options, Some(seed.link))?;
        let free = runner.device().gpu.free_memory().map_err(GpuError::from)?;
        Ok((Rank { runner, backend: None, model: seed.config, share }, free))
    };
    let mut rank = match or_end(number, || Ok(begin())) {
        Ok((rank, free)) => {
            let _ = ready.send(Ok(free));
            rank
        }
        Err(error) => {
            let _ = ready.send(Err(error));
            return;
        }
    };
    for job in jobs {
        or_end(number, || {
            job(&mut rank)?;
            rank.backend.as_mut().map_or(Ok(()), |backend| progress.publish(backend))
        });
    }
    let _ = rank.runner.device().stream.synchronize();
}

impl Drop for OtherRanks {
    fn drop(&mut self) {
        self.senders.clear();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}
