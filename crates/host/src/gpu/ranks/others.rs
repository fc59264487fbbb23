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

use kvarena::backend::cuda::{Cuda, CudaError, CudaRead, CudaWrite};
use kvarena::{
    Backend, Compaction, MoveId, OpenBackend, PageCopy, PageMove, PoolLayout, StepBounds, StepEnd, SwapMemory,
    SwapPageId, TableShape,
};

use super::WeightSource;
use crate::clock::Clock;
use crate::config::ModelConfig;
use crate::error::{Error, Result};
use crate::gpu::device::Device;
use crate::gpu::error::GpuError;
use crate::gpu::runner::{GpuOptions, GpuRunner};
use crate::gpu::sparse::Reading;
use crate::gpu::sums::Link;
use crate::gpu::weights::Share;
use crate::runner::{Runner, Work};

/// Messages from rank 0 to the others.
pub enum Message {
    /// Open the pool. The `Reading`, if any, contains the whole model's channels.
    Open(Option<Reading>, Box<PoolLayout>, TableShape, StepBounds, Sender<Result<()>>),
    /// Choose the implementations for steps of these numbers of streams.
    Warm(Vec<usize>),
    /// Launch a planned step.
    Launch(Work),
    /// Wait for the oldest launched step, which rank 0 collects.
    Collect,
    /// Wait for all launched steps, and forget them.
    Settle(Sender<()>),
    /// Steps have ended.
    End(StepEnd),
    /// Copy pages.
    Copy(Vec<PageCopy>),
    /// Compact accepted drafts.
    Compact(Vec<Compaction>),
    /// Save pages to swap memory, or load them.
    Move(Direction, MoveId, Vec<PageMove>, Sender<Moving>),
    /// Lease a swap page to a reader.
    Lease(SwapPageId, Sender<CudaRead>),
    /// Lease a swap page to a writer.
    LeaseMut(SwapPageId, Sender<CudaWrite>),
    /// Publish the progress of moves.
    Moved,
}

/// The direction of moves between device and swap pages.
#[derive(Clone, Copy)]
pub enum Direction {
    Save,
    Load,
}

/// Whether a rank began its part of a batch of moves.
pub type Moving = std::result::Result<(), CudaError>;

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
    pub(super) senders: Vec<Sender<Message>>,
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
            let (sender, messages) = channel();
            let (ready_sender, ready_receiver) = channel();
            let options = GpuOptions { keep_logits: false, keep_times: false, ..options };
            let seed = Seed { config: config.clone(), source: source.clone(), options, link };
            let progress = Arc::clone(progress);
            threads.push(thread::spawn(move || run_rank(seed, &messages, &ready_sender, &progress)));
            senders.push(sender);
            ready.push(ready_receiver);
        }
        let mut free = u64::MAX;
        for receiver in ready {
            free = free.min(receiver.recv().map_err(|_| lost())??);
        }
        Ok(Self { senders, threads, progress, free })
    }

    pub fn send(&self, message: impl Fn() -> Message) {
        for sender in &self.senders {
            // A rank that has failed has ended the program.
            let _ = sender.send(message());
        }
    }

    /// Sends a message to all, and waits for their replies. Returns them in the order of the ranks.
    pub fn request<T>(&self, message: impl Fn(Sender<T>) -> Message) -> Result<Vec<T>> {
        let ask = |rank: &Sender<Message>| {
            let (reply, answer) = channel();
            // A rank that has failed has ended the program.
            let _ = rank.send(message(reply));
            answer
        };
        let answers: Vec<_> = self.senders.iter().map(ask).collect();
        answers.into_iter().map(|answer| answer.recv().map_err(|_| lost())).collect()
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
fn run_rank(seed: Seed, messages: &Receiver<Message>, ready: &Sender<Result<u64>>, progress: &Progress) {
    let (rank, model) = (seed.link.rank(), seed.config.clone());
    let share = Share { rank, ranks: seed.link.ranks() };
    let begin = || -> Result<(GpuRunner, u64)> {
        let device = Rc::new(Device::open_number(rank as u32)?);
        let weights = Rc::new(seed.source.weights(&device, &seed.config, share)?);
        let config = share.of(&seed.config)?;
        let runner = GpuRunner::of_rank(device, config, weights, seed.options, Some(seed.link))?;
        let free = runner.device().gpu.free_memory().map_err(GpuError::from)?;
        Ok((runner, free))
    };
    let mut runner = match or_end(rank, || Ok(begin())) {
        Ok((runner, free)) => {
            let _ = ready.send(Ok(free));
            runner
        }
        Err(error) => {
            let _ = ready.send(Err(error));
            return;
        }
    };
    let mut backend = None;
    for message in messages {
        or_end(rank, || {
            handle(&mut runner, &mut backend, (&model, share), message)?;
            backend.as_mut().map_or(Ok(()), |backend| progress.publish(backend))
        });
    }
    let _ = runner.device().stream.synchronize();
}

fn handle(
    runner: &mut GpuRunner,
    backend: &mut Option<Cuda>,
    (model, share): (&ModelConfig, Share),
    message: Message,
) -> Result<()> {
    let mut clock = Clock::default();
    match message {
        Message::Open(reading, layout, table, bounds, opened) => {
            if let Some(reading) = reading {
                runner.read_sparsely(reading.of_rank(model, share)?)?;
            }
            let open = runner.backend().open(&layout, &table, bounds);
            let open = open.map(|open| *backend = Some(open));
            let _ = opened.send(open.map_err(|error| GpuError::from(error).into()));
        }
        Message::Warm(streams) => runner.warm(pool(backend)?, &streams)?,
        Message::Launch(work) => {
            let backend = pool(backend)?;
            runner.before_plan()?;
            backend.begin(&work.plan.plan()).map_err(GpuError::from)?;
            runner.launch(backend, &work, &mut clock)?;
        }
        Message::Collect => {
            // Only rank 0 chooses tokens, so this rank drops the tokens that it collects.
            let (work, mut tokens) = (Work::default(), Vec::new());
            runner.collect(pool(backend)?, &work, false, &mut tokens, &mut clock)?;
        }
        Message::Settle(settled) => {
            runner.settle(pool(backend)?)?;
            let _ = settled.send(());
        }
        Message::End(end) => pool(backend)?.end(end),
        Message::Copy(copies) => pool(backend)?.copy_pages(&copies).map_err(GpuError::from)?,
        Message::Compact(moves) => pool(backend)?.compact(&moves).map_err(GpuError::from)?,
        Message::Move(direction, id, moves, begun) => {
            // Rank 0 reports the failure.
            let _ = begun.send(begin_moves(pool(backend)?, direction, id, &moves));
        }
        Message::Lease(page, leased) => {
            let _ = leased.send(pool(backend)?.lease(page));
        }
        Message::LeaseMut(page, leased) => {
            let _ = leased.send(pool(backend)?.lease_mut(page));
        }
        Message::Moved => {}
    }
    Ok(())
}

pub fn begin_moves(backend: &mut Cuda, direction: Direction, id: MoveId, moves: &[PageMove]) -> Moving {
    match direction {
        Direction::Save => backend.save_pages(id, moves),
        Direction::Load => backend.load_pages(id, moves),
    }
}

/// Returns the pool of a rank that has opened it.
fn pool(backend: &mut Option<Cuda>) -> Result<&mut Cuda> {
    backend.as_mut().ok_or_else(|| Error::run("the pool is not open"))
}

impl Drop for OtherRanks {
    fn drop(&mut self) {
        self.senders.clear();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}
