//! The interface between bookkeeping and bytes: K and V move only behind [`Backend`].
//!
//! `Cpu` (feature `cpu`) is the reference and specifies the kernels. `Cuda` (feature `cuda`) uses device memory, and is
//! the only module that uses `cust`. [`Outbox`] and [`Null`] store no bytes.

/// Implements `From` for a backend's error, whose variants contain other errors.
macro_rules! wraps_errors {
    ($error:ident: $($variant:ident($inner:ty)),+) => {$(
        impl From<$inner> for $error {
            fn from(error: $inner) -> Self {
                Self::$variant(error)
            }
        }
    )+};
}

mod by_shape;
mod check;
#[cfg(feature = "cpu")]
mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
mod either;
mod null;
mod open;
mod open_steps;
mod outbox;
mod plan_error;
mod rope;
mod sparse;
mod state;
pub(crate) mod step_states;
mod swap_memory;

#[cfg(feature = "cpu")]
pub use cpu::{
    Cpu, CpuError, CpuOptions, CpuPath, CpuRead, CpuRows, CpuRowsMut, CpuState, CpuWrite, Elements, ElementsMut,
    PATH_VARIABLE,
};
pub use either::{Either, EitherError};
pub use null::Null;
pub use open::OpenBackend;
pub use open_steps::OpenSteps;
pub use outbox::{Outbox, OutboxError, OutboxOptions, SlotMove, Work};
pub use plan_error::{Operand, PlanError};
pub use rope::Rope;
pub use sparse::{NO_POSITION, Select, Selection, SparseBackend};
pub use state::StateBackend;
pub use swap_memory::{Moved, SwapMemory};

use crate::id::{LayerId, MoveId};
use crate::layout::Reach;
use crate::plan::{BatchPlan, Compaction, PageCopy, PageMove, StepEnd};

/// Parameters of attention that are equal for all rows of a step.
///
/// Attention is `softmax(cap(scale * q k)) v` with `cap(x) = soft_cap * tanh(x / soft_cap)`. Query head `h` reads kv
/// head `h / (q_heads / kv_heads)`; in a latent pool every query head reads the single row. Backends sum in f32.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Attend {
    /// Number of query heads on this rank: a multiple of its kv heads.
    pub q_heads: u32,
    /// Factor of the logits, finite, usually `1 / sqrt(head_dim)`. Latent pools reject `1 / sqrt(rank + rope)`, which
    /// no model uses. `Cuda` rejects 0.
    pub scale: f32,
    /// Sliding window in tokens, at least 1: a query at position `p` reads only positions above `p - window`.
    pub window: Option<u32>,
    /// Size of chunks, a power of two: a query reads only positions of its own chunk. `Cuda` accepts only sizes that a
    /// group of the pool has.
    #[doc(alias = "attention_chunk_size")]
    pub chunk: Option<u32>,
    /// First position that queries read; a query before it reads its own position alone. It is 1 for layers whose K and
    /// V are stored one place later, such as those of a drafter: place `p + 1` depends on token `p + 1` and on the
    /// model's hidden state at `p`, so nothing is at place 0. `Cuda` rejects others than 0.
    pub first: u32,
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
    /// The scale is `1 / sqrt(head_dim)` of the heads that the rows compress, times the model's factor for long
    /// contexts.
    pub fn latent(q_heads: u32, scale: f32) -> Self {
        Self { q_heads, scale, window: None, chunk: None, first: 0, soft_cap: None }
    }

    /// Returns the maximum number of positions that a query reads.
    pub(crate) fn reach(&self) -> u32 {
        self.window.unwrap_or(u32::MAX).min(self.chunk.unwrap_or(u32::MAX))
    }

    /// Returns the first position that a query at `position` reads.
    pub(crate) fn first_seen(&self, position: u32) -> u32 {
        let window = self.window.map_or(0, |size| Reach::Window(size).first(position));
        let chunk = self.chunk.map_or(0, |size| Reach::Chunk(size).first(position));
        window.max(chunk).max(self.first.min(position))
    }
}

/// Query rows with optional sinks, the input of [`Backend::attend_queries`].
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Queries<R, S> {
    /// `[tokens, q_heads, head_dim]`; for a latent pool `[tokens, q_heads, rank + rope]`.
    pub rows: R,
    /// Attention sinks: one logit for each query head of this rank, f32 `[q_heads]`.
    ///
    /// The exponential of a head's sink, neither scaled nor capped, is added to the denominator of the head's softmax.
    /// A sink contributes no value. Minus infinity means no sink. `Cpu` rejects NaN and plus infinity.
    #[doc(alias = "attention_sink")]
    pub sinks: Option<S>,
}

/// Owner of the bytes of K and V. Each rank opens one backend, by an [`OpenBackend`]. Calls return the backend's error.
///
/// `testkit::contract` checks these rules for every implementation:
///
/// * B1. Calls take effect in the order in which they are made. Asynchronous backends order them on one stream.
/// * B2. [`begin`](Backend::begin) is the first call for a plan, and is called once. Step numbers rise. At most
///   `max_steps` steps are open at a time (B8).
/// * B3. [`store_cache`](Backend::store_cache) writes row `i` of k and v to the slot of token `i` in the layer's
///   [track](BatchPlan::slots_of), and nothing else. A negative slot writes nothing. Slots of one plan are distinct.
/// * B4. [`attend`](Backend::attend) reads the slots of positions `0..=p` through the page tables of the last `begin`.
///   A draft tree reads the slots in its [`masks`](BatchPlan::masks), without a window. The call writes every row of
///   `out` and of the log-sum-exp, which includes sinks. Padding rows become 0 and minus infinity.
/// * B5. [`copy_pages`](Backend::copy_pages) copies whole pages, all planes of all lanes. Sources and targets are
///   disjoint.
/// * B6. An asynchronous call may fail after it has returned. [`synchronize`](Backend::synchronize) waits for all
///   earlier calls and returns such a failure.
/// * B7. After an error the caller relies on no effect of the failed call. The next plan sends what is missing.
/// * B8. A step is open from its `begin` until an [`end`](Backend::end) covers it. The backend rejects plans of other
///   steps, because their pages may belong to another sequence. Calls made while the step was open still take effect,
///   so a step may end right after its last call. A backend without bytes need not reject plans.
/// * B11. [`compact`](Backend::compact) moves the kept slots of each row to the places from `first` on, in all planes
///   of all layers, in every track, through the page tables of the last `begin`. The effect is as if the backend read
///   all slots of a row before it writes one. It writes nothing else. Rows are distinct.
/// * B12. [`save_pages`](Backend::save_pages) and [`load_pages`](Backend::load_pages) copy whole pages, all planes of
///   all lanes. A swap page has the order `[plane, lane, piece]` in every layout. Targets of one call are distinct. A
///   save reads the effects of all earlier calls; later calls read the effects of a load. The next call may use sources
///   and targets again.
/// * B13. A load takes effect after all earlier calls except those of open steps, which never use its targets.
/// * B14. [`moved`](Backend::moved) returns a watermark for each direction: all saves up to `saved` and all loads up to
///   `loaded` are complete. A watermark never falls, and the call never waits.
/// * B15. If a save or load fails, all its targets are undefined, and its sources are unchanged.
/// * B16. No call writes a swap page with a [read lease](SwapMemory::lease), and no call uses one with a [write
///   lease](SwapMemory::lease_mut).
/// * B17. A layer of a group with a window or chunks accepts exactly this window or these chunks. Lists of positions
///   are for layers of group 0.
/// * B18. In a group with a window or chunks, page table words that no new token of the row reads are undefined, and
///   the backend does not use them.
/// * B19. [`rope_store`](Backend::rope_store) normalises and rotates the heads of q and k of each token in place,
///   rounded to the rows' type, and changes nothing else in the rows. It stores this k, and v, as in B3.
pub trait Backend {
    /// The backend's error.
    type Error: std::error::Error + Send + Sync + 'static;
    /// Rows of q, k or v to read: `[tokens, heads, head_dim]`. Each row is contiguous.
    type Rows<'a>: Copy;
    /// Rows to write: the output `[tokens, q_heads, head_dim]`, for a latent pool `[tokens, q_heads, rank]`.
    /// [`rope_store`](Backend::rope_store) reads and writes rows of q, k and v.
    type RowsMut<'a>;
    /// Sinks to read: `[q_heads]` in f32.
    type Sinks<'a>: Copy;
    /// Log-sum-exp to write: `[tokens, q_heads]` in f32, natural logarithm.
    type Lse<'a>;

    /// Begins a step: applies the plan's changes of the page tables.
    ///
    /// # Errors
    /// The backend's error, for example for a plan that does not fit its tables or the pool.
    fn begin(&mut self, plan: &BatchPlan<'_>) -> Result<(), Self::Error>;

    /// Ends steps: the backend rejects their plans from now on. O(steps that end).
    ///
    /// The call does not wait. It ignores steps that never began or have already ended. The engine calls it in every
    /// `complete` and `abort`; a host with several ranks calls it on the other ranks' backends.
    fn end(&mut self, end: StepEnd);

    /// Stores K and V of a step's new tokens, `[tokens, kv_heads, head_dim]` each.
    ///
    /// For a latent pool the rows of k are `[tokens, rank + rope]`, and v is empty. Every backend quantises to the same
    /// bits: see [`KvDtype::Fp8E4M3`](crate::KvDtype) and [`Scaling`](crate::layout::Scaling).
    fn store_cache(
        &mut self,
        plan: &BatchPlan<'_>,
        layer: LayerId,
        k: Self::Rows<'_>,
        v: Self::Rows<'_>,
    ) -> Result<(), Self::Error>;

    /// Normalises and rotates q and k of a step's new tokens in place, and stores k and v as
    /// [`store_cache`](Backend::store_cache) does (B19).
    ///
    /// `qkv` is `[tokens, q_heads + 2 * kv_heads, head_dim]`: for each token the heads of q, then k, then v. Latent
    /// pools reject the call.
    fn rope_store(
        &mut self,
        plan: &BatchPlan<'_>,
        layer: LayerId,
        rope: &Rope<Self::Rows<'_>, Self::Sinks<'_>>,
        qkv: Self::RowsMut<'_>,
    ) -> Result<(), Self::Error>;

    /// Computes attention of a step's query rows over the cached tokens of their sequences, including this step's.
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
    fn copy_pages(&mut self, copies: &[PageCopy]) -> Result<(), Self::Error>;

    /// Makes the kept slots of rows contiguous (B11).
    fn compact(&mut self, compactions: &[Compaction]) -> Result<(), Self::Error>;

    /// Returns the number of swap pages that are ready for saves, loads and leases. Their ids are all the ids below
    /// this number.
    ///
    /// The number grows while a backend prepares its memory in the background, up to
    /// [`PoolLayout::swap_region_pages`](crate::layout::PoolLayout::swap_region_pages). A backend without swap memory
    /// returns 0; a backend without bytes may return any larger number.
    fn swap_pages(&self) -> u32 {
        0
    }

    /// Copies pages of the pool to swap pages (B12). Move numbers rise over both directions.
    ///
    /// # Errors
    /// The backend's error, for example for pages that do not exist. [`PlanError::Leased`] if a target has a lease
    /// (B16); the backend checks all targets before it writes one.
    ///
    /// # Panics
    /// The default method, for backends without swap memory, always panics.
    fn save_pages(&mut self, id: MoveId, moves: &[PageMove]) -> Result<(), Self::Error> {
        panic!("{id:?} saves {} pages to a backend without swap memory", moves.len())
    }

    /// Copies swap pages to pages of the pool (B12, B13). Move numbers rise over both directions.
    ///
    /// # Errors
    /// The backend's error, for example for pages that do not exist. [`PlanError::Leased`] if a source has a write
    /// lease (B16).
    ///
    /// # Panics
    /// The default method, for backends without swap memory, always panics.
    fn load_pages(&mut self, id: MoveId, moves: &[PageMove]) -> Result<(), Self::Error> {
        panic!("{id:?} loads {} pages from a backend without swap memory", moves.len())
    }

    /// Returns the last complete save and load (B14), without waiting.
    ///
    /// # Errors
    /// A failure of an earlier call (B6).
    fn moved(&mut self) -> Result<Moved, Self::Error> {
        Ok(Moved::default())
    }

    /// Waits until all calls so far are complete, including moves.
    ///
    /// # Errors
    /// The first failure since the last call (B6).
    fn synchronize(&mut self) -> Result<(), Self::Error>;
}
