//! A model spread over several GPUs (tensor parallel). Each rank has its part of the heads and of the MLP's width, and
//! its own pool for the K and V of its heads.
//!
//! ```text
//! main thread     Server, Engine, GpuRunner of rank 0 ---- Job ----> threads of the others: GpuRunner, Cuda
//!                 plan, launch, collect                                launch the same plan on their GPU
//! GPUs            a sum over all ranks after attention's output and after the MLP; rank 0 chooses the tokens
//! ```
//!
//! One engine plans for all ranks: pages and slots are equal on every rank, so the others need no engine. They receive
//! each plan, the ends of steps, and the copies, compactions and moves of pages, in the engine's order (the core's
//! guide, `ranks`). Each rank's thread launches the sums in its own stream or captures them in its graphs. `peers.rs`
//! and NCCL synchronise the ranks.

mod others;

use std::iter;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use kvarena::backend::cuda::{Cuda, CudaError, CudaOptions, CudaRead, CudaWrite};
use kvarena::backend::{Moved, OpenBackend, Queries, Rope, SwapMemory};
use kvarena::config::StepBounds;
use kvarena::id::{MoveId, SwapPageId};
use kvarena::layout::{PoolLayout, TableShape};
use kvarena::plan::{Compaction, OwnedPlan, PageCopy, PageMove, PlanSize, StepEnd};
use kvarena::{Attend, Backend, BatchPlan, Extend, LayerId};
use kvarena_tiers::tier::RankMemory;

use super::device::Device;
use super::error::{GpuError, GpuResult};
use super::runner::{GpuOptions, GpuRunner, OnGpu, injected_failure};
use super::shape::check_shape;
use super::sparse::Reading;
use super::sums::Link;
use super::weights::{Share, Weights};
use crate::checkpoint::Checkpoint;
use crate::clock::Clock;
use crate::config::ModelConfig;
use crate::error::Result;
use crate::model_files::ModelFiles;
use crate::runner::{Runner, Work};
use crate::source::Random;
use others::{OtherRanks, Progress, Rank, or_end};

/// The source of a model's weights.
#[derive(Clone)]
pub enum WeightSource {
    /// The files of a model.
    Files(ModelFiles),
    /// A `model.safetensors` in memory.
    InMemory(&'static [u8]),
    /// Random numbers of this seed.
    Random(u64),
}

impl WeightSource {
    /// Reads or generates a share of the weights on a device.
    ///
    /// # Errors
    /// As [`ModelFiles::weights`], [`Weights::read`] and [`Weights::random`].
    pub fn weights(&self, device: &Device, config: &ModelConfig, share: Share) -> Result<Weights> {
        match self {
            Self::Files(files) => Weights::read(device, config, share, &mut *files.weights()?),
            Self::InMemory(content) => {
                let mut checkpoint = Checkpoint::in_memory(Path::new("built-in"), content)?;
                Weights::read(device, config, share, &mut checkpoint)
            }
            Self::Random(seed) => Weights::random(device, config, share, Random { seed: *seed }),
        }
    }
}

/// The options of the backend over all ranks. They open the pool of rank 0; [`RanksRunner::warm`] opens the others.
pub struct RanksOptions {
    own: CudaOptions,
    others: Rc<OtherRanks>,
}

/// The pools of all ranks: that of rank 0, and the connection to the others.
pub struct Ranks {
    own: Cuda,
    others: Rc<OtherRanks>,
    /// The other ranks open their pools with this shape and these bounds.
    table: TableShape,
    bounds: StepBounds,
}

impl Ranks {
    /// Begins to move each rank's part of the pages. Returns an error if a rank cannot begin its moves.
    fn move_pages(&mut self, begin: Begin, id: MoveId, moves: &[PageMove]) -> Moving {
        let owned = moves.to_vec();
        let answers = self.others.ask(move |rank| Ok(begin(rank.pool()?, id, &owned)));
        let own = begin(&mut self.own, id, moves);
        answers.iter().flatten().fold(own, Moving::and)
    }

    /// Leases pages on each rank. One request brings all, because each request waits for the other ranks' threads.
    fn leases<T: Send + 'static>(&mut self, pages: &[SwapPageId], lease: Lease<T>) -> Vec<RankLeases<T>> {
        let of_rank = move |pool: &mut Cuda, pages: &[SwapPageId]| -> Vec<T> {
            pages.iter().map(|&page| lease(pool, page)).collect()
        };
        let owned = pages.to_vec();
        let others = or_end(0, || self.others.request(move |rank| Ok(of_rank(rank.pool()?, &owned))));
        let ranks = iter::once(of_rank(&mut self.own, pages)).chain(others);
        let mut ranks: Vec<_> = ranks.map(Vec::into_iter).collect();
        pages.iter().map(|_| RankLeases(ranks.iter_mut().filter_map(Iterator::next).collect())).collect()
    }
}

/// Leases a page on a rank.
type Lease<T> = fn(&mut Cuda, SwapPageId) -> T;

/// Whether a rank began its part of a batch of moves.
type Moving = std::result::Result<(), CudaError>;

/// Begins to save or to load pages.
type Begin = fn(&mut Cuda, MoveId, &[PageMove]) -> Moving;

impl OpenBackend for RanksOptions {
    type Backend = Ranks;

    fn open(
        self,
        layout: &PoolLayout,
        table: &TableShape,
        bounds: impl Into<StepBounds>,
    ) -> std::result::Result<Ranks, CudaError> {
        let bounds = bounds.into();
        let own = self.own.open(layout, table, bounds)?;
        Ok(Ranks { own, others: self.others, table: *table, bounds })
    }
}

impl Backend for Ranks {
    type Error = CudaError;
    // Rows are on each rank's own GPU, where the rank's backend stores K and V and computes attention.
    type Rows<'a> = ();
    type RowsMut<'a> = ();
    type Sinks<'a> = ();
    type Lse<'a> = ();

    fn begin(&mut self, plan: &BatchPlan<'_>) -> std::result::Result<(), CudaError> {
        // The other ranks begin the step when they launch it.
        self.own.begin(plan)
    }

    fn end(&mut self, end: StepEnd) {
        self.others.send(move |rank| rank.pool().map(|pool| pool.end(end)));
        self.own.end(end);
    }

    fn store_cache(&mut self, _: &BatchPlan<'_>, _: LayerId, (): (), (): ()) -> std::result::Result<(), CudaError> {
        unreachable!("each rank stores its own rows")
    }

    fn rope_store(
        &mut self,
        _: &BatchPlan<'_>,
        _: LayerId,
        _: &Rope<(), ()>,
        (): (),
    ) -> std::result::Result<(), CudaError> {
        unreachable!("each rank rotates its own rows")
    }

    fn attend_queries(
        &mut self,
        _: &BatchPlan<'_>,
        _: LayerId,
        _: &Attend,
        _: Queries<(), ()>,
        (): (),
        _: Option<()>,
    ) -> std::result::Result<(), CudaError> {
        unreachable!("each rank attends for its own rows")
    }

    fn copy_pages(&mut self, copies: &[PageCopy]) -> std::result::Result<(), CudaError> {
        let owned = copies.to_vec();
        self.others.send(move |rank| Ok(rank.pool()?.copy_pages(&owned).map_err(GpuError::from)?));
        self.own.copy_pages(copies)
    }

    fn compact(&mut self, compactions: &[Compaction]) -> std::result::Result<(), CudaError> {
        let owned = compactions.to_vec();
        self.others.send(move |rank| Ok(rank.pool()?.compact(&owned).map_err(GpuError::from)?));
        self.own.compact(compactions)
    }

    /// Returns the minimum of all ranks' swap pages.
    fn swap_pages(&self) -> u32 {
        let others = self.others.progress.iter();
        let others = others.map(|progress| progress.swap_pages.load(Ordering::Acquire));
        others.fold(self.own.swap_pages(), u32::min)
    }

    fn save_pages(&mut self, id: MoveId, moves: &[PageMove]) -> Moving {
        self.move_pages(Cuda::save_pages, id, moves)
    }

    fn load_pages(&mut self, id: MoveId, moves: &[PageMove]) -> Moving {
        self.move_pages(Cuda::load_pages, id, moves)
    }

    /// Returns the minimum of all ranks' progress. For the other ranks, it is the progress that they published after
    /// their last job.
    fn moved(&mut self) -> std::result::Result<Moved, CudaError> {
        // Each rank publishes its progress after a job.
        self.others.send(|_| Ok(()));
        let least = |all: Moved, rank: &Arc<Progress>| Moved {
            saved: all.saved.min(MoveId::new(rank.saved.load(Ordering::Acquire))),
            loaded: all.loaded.min(MoveId::new(rank.loaded.load(Ordering::Acquire))),
        };
        Ok(self.others.progress.iter().fold(self.own.moved()?, least))
    }

    fn synchronize(&mut self) -> std::result::Result<(), CudaError> {
        self.own.synchronize()
    }
}

/// A lease of each rank, in order: a swap page has a part on each rank.
pub struct RankLeases<T>(Vec<T>);

impl SwapMemory for Ranks {
    type Read = RankLeases<CudaRead>;
    type Write = RankLeases<CudaWrite>;

    fn lease(&mut self, page: SwapPageId) -> RankLeases<CudaRead> {
        self.lease_all(&[page]).remove(0)
    }

    fn lease_mut(&mut self, page: SwapPageId) -> RankLeases<CudaWrite> {
        self.lease_all_mut(&[page]).remove(0)
    }
}

impl RankMemory for Ranks {
    fn ranks(&self) -> usize {
        1 + self.others.progress.len()
    }

    fn lease_all(&mut self, pages: &[SwapPageId]) -> Vec<RankLeases<CudaRead>> {
        self.leases(pages, Cuda::lease)
    }

    fn lease_all_mut(&mut self, pages: &[SwapPageId]) -> Vec<RankLeases<CudaWrite>> {
        self.leases(pages, Cuda::lease_mut)
    }

    fn part(lease: &RankLeases<CudaRead>, rank: usize) -> &[u8] {
        lease.0[rank].as_ref()
    }

    fn part_mut(lease: &mut RankLeases<CudaWrite>, rank: usize) -> &mut [u8] {
        lease.0[rank].as_mut()
    }
}

/// Runs a model on several GPUs.
pub struct RanksRunner {
    own: GpuRunner,
    others: Rc<OtherRanks>,
    /// The selection of the positions that generating streams read, for the whole model. `None`: they read all
    /// positions.
    reading: Option<Reading>,
}

impl RanksRunner {
    /// Opens a GPU for each rank, and reads each rank's share of the weights.
    ///
    /// # Errors
    /// Too few GPUs, no NCCL, no requested peer access, or too little memory. A model that the kernels do not support,
    /// or that cannot be read or spread over the GPUs.
    pub fn new(config: &ModelConfig, source: &WeightSource, options: GpuOptions, ranks: usize) -> Result<Self> {
        let share = Share { rank: 0, ranks };
        let own_config = share.of(config)?;
        check_shape(&own_config)?;
        let mut links = Link::connect(ranks, options.sums)?;
        let others = OtherRanks::start(links.split_off(1), config, source, options)?;
        let device = Rc::new(Device::open()?);
        let weights = Rc::new(source.weights(&device, config, share)?);
        let own = GpuRunner::of_rank(device, own_config, weights, options, links.pop())?;
        Ok(Self { own, others: Rc::new(others), reading: None })
    }

    /// Makes generating streams read the positions that labels find; `reading` is for the whole `model`. Call this
    /// before the pools are opened.
    ///
    /// # Errors
    /// Channels of another model, or too little memory.
    pub fn read_sparsely(&mut self, model: &ModelConfig, reading: Reading) -> Result<()> {
        let ranks = model.kv_heads / self.config().kv_heads;
        self.own.read_sparsely(reading.of_rank(model, Share { rank: 0, ranks })?)?;
        self.reading = Some(reading);
        Ok(())
    }

    /// Returns the smallest free memory of the GPUs, in bytes. For rank 0 it is the present free memory; for the
    /// others, the free memory after they read their weights.
    pub fn free_memory(&self) -> GpuResult<u64> {
        Ok(self.own.device().gpu.free_memory()?.min(self.others.free))
    }

    /// Returns the options of the backend over all ranks.
    pub fn backend(&self) -> RanksOptions {
        RanksOptions { own: self.own.backend(), others: Rc::clone(&self.others) }
    }

    /// Opens the pools of the other ranks with the shape and bounds of rank 0's pool, and chooses implementations as
    /// [`GpuRunner::warm`] does.
    ///
    /// # Errors
    /// A rank cannot open its pool. A later failure ends the program, because the other ranks wait for the failed one.
    pub fn warm(&mut self, backend: &mut Ranks, streams: &[usize]) -> Result<()> {
        let Ranks { own, table, bounds, .. } = backend;
        let (layout, table, bounds) = (*own.layout(), *table, *bounds);
        let reading = self.reading.clone();
        let open = move |rank: &mut Rank| {
            if let Some(reading) = reading {
                rank.runner.read_sparsely(reading.of_rank(&rank.model, rank.share)?)?;
            }
            rank.backend = Some(rank.runner.backend().open(&layout, &table, bounds).map_err(GpuError::from)?);
            Ok(())
        };
        let opened = self.others.request(move |rank| Ok(open(rank)))?;
        opened.into_iter().collect::<Result<()>>()?;
        let owned = streams.to_vec();
        self.others.send(move |rank| {
            let (runner, pool) = rank.parts()?;
            Ok(runner.warm(pool, &owned)?)
        });
        or_end(0, || Ok(self.own.warm(own, streams)?));
        // The other ranks may take longer to choose.
        self.others.request(settle).map(|_| ())
    }
}

impl OnGpu for RanksRunner {
    fn gpu(&self) -> &GpuRunner {
        &self.own
    }

    fn gpu_mut(&mut self) -> &mut GpuRunner {
        &mut self.own
    }

    fn late_modules(&self, backend: &Ranks) -> usize {
        backend.own.modules_after_prepare()
    }
}

fn settle(rank: &mut Rank) -> Result<()> {
    let (runner, pool) = rank.parts()?;
    runner.settle(pool)
}

/// Returns a copy of a step's work without edits, for a rank that chooses no tokens.
fn copy(work: &Work) -> Work {
    let mut plan = OwnedPlan::new();
    plan.copy_from(&work.plan.plan());
    Work { plan, inputs: work.inputs.clone(), draws: work.draws.clone(), edits: Vec::new() }
}

impl Runner for RanksRunner {
    type Backend = Ranks;

    fn config(&self) -> &ModelConfig {
        self.own.config()
    }

    fn step_size(&self, items: &[Extend]) -> Option<PlanSize> {
        self.own.step_size(items)
    }

    fn before_plan(&mut self) -> Result<()> {
        self.own.before_plan()
    }

    fn launch(&mut self, backend: &mut Ranks, work: &Work, clock: &mut Clock) -> Result<()> {
        let owned = Arc::new(copy(work));
        self.others.send(move |rank| {
            let (runner, pool) = rank.parts()?;
            runner.before_plan()?;
            pool.begin(&owned.plan.plan()).map_err(GpuError::from)?;
            runner.launch(pool, &owned, &mut Clock::default())
        });
        or_end(0, || self.own.launch(&mut backend.own, work, clock));
        Ok(())
    }

    fn collect(
        &mut self,
        backend: &mut Ranks,
        work: &Work,
        fail: bool,
        tokens: &mut Vec<u32>,
        clock: &mut Clock,
    ) -> Result<()> {
        // Only rank 0 chooses tokens, so the others drop the tokens that they collect.
        self.others.send(|rank| {
            let (runner, pool) = rank.parts()?;
            runner.collect(pool, &Work::default(), false, &mut Vec::new(), &mut Clock::default())
        });
        or_end(0, || self.own.collect(&mut backend.own, work, false, tokens, clock));
        injected_failure(fail)
    }

    fn settle(&mut self, backend: &mut Ranks) -> Result<()> {
        or_end(0, || self.own.settle(&mut backend.own));
        self.others.request(settle).map(|_| ())
    }

    fn draws_max(&self) -> usize {
        self.own.draws_max()
    }

    fn edits_max(&self) -> usize {
        self.own.edits_max()
    }

    fn keeps_logits(&self) -> bool {
        self.own.keeps_logits()
    }

    fn logits(&self, draw: usize) -> &[f32] {
        self.own.logits(draw)
    }
}
