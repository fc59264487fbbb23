//! The seam between bookkeeping and bytes: K and V move only behind [`Backend`].
//!
//! [`Cpu`] is the reference and the specification of the kernels. [`Null`] holds no bytes. `Cuda` (feature `cuda`)
//! holds device memory and is the only module that names `cust`.
//!
//! Not here: which sequence owns which page (`world.rs`).

mod by_shape;
mod check;
mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
mod either;
mod host_memory;
mod null;
mod open;
mod open_steps;
mod plan_error;
mod rope;
mod sparse;

pub use cpu::{
    Cpu, CpuError, CpuOptions, CpuPath, CpuRead, CpuRows, CpuRowsMut, CpuWrite, Elements,
    ElementsMut, PATH_VARIABLE,
};
pub use either::{Either, EitherError};
pub use host_memory::{HostMemory, Moved};
pub use null::Null;
pub use open::OpenBackend;
pub use open_steps::OpenSteps;
pub use plan_error::{Operand, PlanError};
pub use rope::Rope;
pub use sparse::{NO_POSITION, Select, Selection, SparseBackend};

use crate::id::{LayerId, MoveId};
use crate::layout::Reach;
use crate::plan::{BatchPlan, Compaction, PageCopy, PageMove, StepEnd};

/// Parameters of attention that are the same for all rows of a step.
///
/// Attention is `softmax(cap(scale * q k)) v` with `cap(x) = soft_cap * tanh(x / soft_cap)`. Query head `h` reads kv
/// head `h / (q_heads / kv_heads)`; in a latent pool every query head reads the single row. Backends sum in f32.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Attend {
    /// Query heads on this rank: a multiple of its kv heads.
    pub q_heads: u32,
    /// Factor of the logits, finite, usually `1 / sqrt(head_dim)`. Latent pools reject `1 / sqrt(rank + rope)`, which
    /// is never a model's scale. `Cuda` rejects 0, which [`Cpu`] accepts (every logit is 0).
    pub scale: f32,
    /// Sliding window in tokens, at least 1: a query at position `p` reads positions above `p - window` only.
    pub window: Option<u32>,
    /// Chunked attention: a query reads positions of its own chunk only. Chunks begin at multiples of this size, which
    /// is a power of two. `Cuda` serves the chunks that the layer's group reads, and no others.
    #[doc(alias = "attention_chunk_size")]
    pub chunk: Option<u32>,
    /// Soft cap of the logits, above 0 and finite.
    pub soft_cap: Option<f32>,
}

impl Attend {
    /// Returns causal attention with `q_heads` query heads, scaled by `1 / sqrt(head_dim)`. For latent rows use
    /// [`Attend::latent`].
    pub fn new(q_heads: u32, head_dim: u32) -> Self {
        Self::latent(q_heads, 1.0 / (head_dim as f32).sqrt())
    }

    /// Returns causal attention over latent rows with the model's `scale`.
    ///
    /// The scale does not follow from a row's length. It is `1 / sqrt(head_dim)` of the heads that the rows compress,
    /// times the model's factor for long contexts.
    pub fn latent(q_heads: u32, scale: f32) -> Self {
        Self { q_heads, scale, window: None, chunk: None, soft_cap: None }
    }

    /// Returns the most positions that a query reads.
    pub(crate) fn reach(&self) -> u32 {
        self.window.unwrap_or(u32::MAX).min(self.chunk.unwrap_or(u32::MAX))
    }

    /// Returns the first position that a query at `position` reads.
    pub(crate) fn first_seen(&self, position: u32) -> u32 {
        let window = self.window.map_or(0, |size| Reach::Window(size).first(position));
        window.max(self.chunk.map_or(0, |size| Reach::Chunk(size).first(position)))
    }
}

/// Query rows with optional sinks, the input of [`Backend::attend_queries`].
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Queries<R, S> {
    /// `[tokens, q_heads, head_dim]`; for a latent pool `[tokens, q_heads, rank + rope]`.
    pub rows: R,
    /// Attention sinks: one logit for each query head of this rank, f32 `[q_heads]`.
    ///
    /// The softmax denominator of each row gains the exponential of its head's sink, neither scaled nor capped. A sink
    /// contributes no value. Minus infinity means that the head has none. [`Cpu`] rejects NaN and plus infinity.
    #[doc(alias = "attention_sink")]
    pub sinks: Option<S>,
}

/// Owner of the bytes of K and V. A rank has one backend, opened by an [`OpenBackend`].
///
/// `testkit::contract` checks these rules for every implementation:
///
/// * B1. Calls take effect in the order in which they are made. Asynchronous backends order them on one stream.
/// * B2. [`begin`](Backend::begin) is the first call for a plan and is called once. Numbers of steps rise. Up to
///   `max_steps` steps are open at a time (B8).
/// * B3. [`store_cache`](Backend::store_cache) writes row `i` of k and v to the slot of token `i` in the layer's
///   [track](BatchPlan::slots_of), and nothing else. A negative slot writes nothing. Slots of one plan are distinct.
/// * B4. [`attend`](Backend::attend) reads the slots of positions `0..=p` through the page tables as `begin` last wrote
///   them. A row that is a tree of drafts reads the slots that [`masks`](BatchPlan::masks) name, without a window.
///   The call writes every row of `out` and of the log-sum-exp. Padding rows become 0 and minus infinity, with or
///   without sinks; the log-sum-exp of all other rows includes their sink.
/// * B5. [`copy_pages`](Backend::copy_pages) copies whole pages, all planes of all lanes. Sources and targets are
///   disjoint.
/// * B6. An asynchronous call that returned without an error may fail later. [`synchronize`](Backend::synchronize)
///   reports such a failure, and returns only when all calls before it are done.
/// * B7. After an error the caller relies on no effect of the failed call. The next plan sends what is still missing.
/// * B8. A step is open from its `begin` until an [`end`](Backend::end) covers it. The backend rejects plans of other
///   steps and writes nothing, because their pages may belong to another sequence by then. Calls made while the step
///   was open still take effect, so a step may end as soon as its last call is made. A backend without bytes need not
///   reject.
/// * B11. [`compact`](Backend::compact) moves the kept slots of each row to the places from `first` on, all planes of
///   all layers, in every track, and writes nothing else. It finds them through the row's page table as `begin` last
///   wrote it. All slots of a row are read before one is written. Rows are distinct.
/// * B12. [`save_pages`](Backend::save_pages) and [`load_pages`](Backend::load_pages) copy whole pages, all planes of
///   all lanes; a host page has the order `[plane, layer, piece]`, whatever the pool's layout. Targets of one call are
///   distinct. A save reads the effects of all earlier calls, later calls read those of a load, and the next call may
///   use both sides again.
/// * B13. A load takes effect after all earlier calls except those of open steps, which never use its targets.
/// * B14. [`moved`](Backend::moved) is a watermark in each direction: all saves up to its `saved` are done, and all
///   loads up to its `loaded`. It never falls and never waits.
/// * B15. If a save or load fails, the contents of all its targets are undefined, and its sources are unchanged.
/// * B16. No call writes a host page that a [read lease](HostMemory::lease) covers, and no call uses one that a
///   [write lease](HostMemory::lease_mut) covers.
/// * B17. A layer of a group that reads a window or a chunk takes exactly that; the backend rejects any other and none.
///   Lists of positions belong to layers of group 0.
/// * B18. In a group that reads a window or a chunk, page table words that no new token of the row reads are undefined,
///   and the backend does not follow them.
/// * B19. [`rope_store`](Backend::rope_store) writes the heads of q and k of each token normed and rotated, rounded to
///   the rows' type, in their place, and nothing else in the rows. It stores these k, and v, as B3 does.
pub trait Backend {
    /// The backend's error.
    type Error: std::error::Error + Send + Sync + 'static;
    /// Rows of q, k or v to read: `[tokens, heads, head_dim]`, contiguous within a row.
    type Rows<'a>: Copy;
    /// Output rows to write: `[tokens, q_heads, head_dim]`; for a latent pool `[tokens, q_heads, rank]`.
    type RowsMut<'a>;
    /// Sinks to read: `[q_heads]` in f32.
    type Sinks<'a>: Copy;
    /// Log-sum-exp to write: `[tokens, q_heads]` in f32, natural logarithm.
    type Lse<'a>;

    /// Begins a step: applies the plan's changes of the page tables.
    ///
    /// # Errors
    /// The backend's own, among them a plan that its tables or the pool cannot hold.
    fn begin(&mut self, plan: &BatchPlan<'_>) -> Result<(), Self::Error>;

    /// Ends steps: the backend rejects their plans from now on. O(steps that end).
    ///
    /// The call waits for nothing. Steps that never began or that have ended already are ignored. An engine makes this
    /// call in every `complete` and `abort`; a host with several ranks makes it on the other ranks' backends.
    fn end(&mut self, end: StepEnd);

    /// Stores K and V of a step's new tokens, `[tokens, kv_heads, head_dim]` each.
    ///
    /// For a latent pool k has the rows, `[tokens, rank + rope]`, and the rows of v are empty. Every backend quantises
    /// to the same bits: see [`KvDtype::Fp8E4M3`](crate::KvDtype) and [`Scaling`](crate::Scaling).
    ///
    /// # Errors
    /// The backend's own.
    fn store_cache(
        &mut self,
        plan: &BatchPlan<'_>,
        layer: LayerId,
        k: Self::Rows<'_>,
        v: Self::Rows<'_>,
    ) -> Result<(), Self::Error>;

    /// Norms and rotates q and k of a step's new tokens in place, and stores k and v as
    /// [`store_cache`](Backend::store_cache) does (B19).
    ///
    /// `qkv`: `[tokens, q_heads + 2 * kv_heads, head_dim]`, the heads of q, k and v of a token one after another. Pools
    /// of latent rows have no such heads.
    ///
    /// # Errors
    /// The backend's own.
    fn rope_store(
        &mut self,
        plan: &BatchPlan<'_>,
        layer: LayerId,
        rope: &Rope<Self::Rows<'_>, Self::Sinks<'_>>,
        qkv: Self::RowsMut<'_>,
    ) -> Result<(), Self::Error>;

    /// Computes attention of a step's query rows over the cached tokens of their sequences, including this step's.
    ///
    /// # Errors
    /// The backend's own.
    fn attend(
        &mut self,
        plan: &BatchPlan<'_>,
        layer: LayerId,
        attend: &Attend,
        q: Self::Rows<'_>,
        out: Self::RowsMut<'_>,
        lse: Option<Self::Lse<'_>>,
    ) -> Result<(), Self::Error> {
        self.attend_queries(plan, layer, attend, Queries { rows: q, sinks: None }, out, lse)
    }

    /// Computes [`attend`](Backend::attend) with optional sinks.
    ///
    /// # Errors
    /// The backend's own.
    fn attend_queries(
        &mut self,
        plan: &BatchPlan<'_>,
        layer: LayerId,
        attend: &Attend,
        q: Queries<Self::Rows<'_>, Self::Sinks<'_>>,
        out: Self::RowsMut<'_>,
        lse: Option<Self::Lse<'_>>,
    ) -> Result<(), Self::Error>;

    /// Copies pages within the pool.
    ///
    /// # Errors
    /// The backend's own.
    fn copy_pages(&mut self, copies: &[PageCopy]) -> Result<(), Self::Error>;

    /// Moves the kept slots of rows together (B11).
    ///
    /// # Errors
    /// The backend's own.
    fn compact(&mut self, compactions: &[Compaction]) -> Result<(), Self::Error>;

    /// Returns how many host pages are ready for saves, loads and leases: numbers below this.
    ///
    /// The number grows while a backend prepares its memory in the background, up to
    /// [`PoolLayout::host_region_pages`](crate::PoolLayout::host_region_pages). A backend without host memory returns
    /// 0; one without bytes returns any larger number.
    fn host_pages(&self) -> u32 {
        0
    }

    /// Copies pages of the pool to host pages (B12). Numbers of moves rise over both directions.
    ///
    /// # Errors
    /// The backend's own, among them pages that do not exist.
    ///
    /// # Panics
    /// If a lease covers a target (B16), or if the backend has no host memory.
    fn save_pages(&mut self, id: MoveId, moves: &[PageMove]) -> Result<(), Self::Error> {
        panic!("{id:?} saves {} pages to a backend without host memory", moves.len())
    }

    /// Copies host pages to pages of the pool (B12, B13). Numbers of moves rise over both directions.
    ///
    /// # Errors
    /// The backend's own, among them pages that do not exist.
    ///
    /// # Panics
    /// If a write lease covers a source (B16), or if the backend has no host memory.
    fn load_pages(&mut self, id: MoveId, moves: &[PageMove]) -> Result<(), Self::Error> {
        panic!("{id:?} loads {} pages from a backend without host memory", moves.len())
    }

    /// Returns the last save and the last load that are done (B14). Never waits.
    ///
    /// # Errors
    /// A failure of an earlier call (B6).
    fn moved(&mut self) -> Result<Moved, Self::Error> {
        Ok(Moved::default())
    }

    /// Waits until all calls so far are done, moves included.
    ///
    /// # Errors
    /// The first failure since the last call (B6).
    fn synchronize(&mut self) -> Result<(), Self::Error>;
}
