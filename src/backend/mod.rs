//! The seam: who owns and moves bytes. Bytes of K and V move only behind [`Backend`].
//!
//! [`Cpu`] is the reference and the specification of the kernels, [`Null`] holds no bytes, `Cuda` (feature `cuda`)
//! holds device memory and is the only place that names `cust`.
//!
//! Not here: which pages are whose.

mod check;
mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
mod null;
mod open;
mod open_steps;
mod plan_error;
mod sparse;

pub use cpu::{Cpu, CpuError, CpuOptions, CpuRows, CpuRowsMut, Elements, ElementsMut};
pub use null::Null;
pub use open::OpenBackend;
pub use open_steps::OpenSteps;
pub use plan_error::{Operand, PlanError};
pub use sparse::{NO_POSITION, Select, Selection, SparseBackend};

use crate::id::LayerId;
use crate::plan::{BatchPlan, Compaction, PageCopy, StepEnd};

/// What attention computes, beside the plan.
///
/// `softmax(cap(scale * q k)) v`, where `cap(x) = soft_cap * tanh(x / soft_cap)`; query head `h` reads kv head
/// `h / (q_heads / kv_heads)`, all of them the one row of a latent pool; sums are made in f32 (f64 never).
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Attend {
    /// Query heads on this rank: a multiple of its kv heads.
    pub q_heads: u32,
    /// Factor of the logits, usually `1 / sqrt(head_dim)`; over latent rows that of a row's length is refused. Finite;
    /// [`Cpu`] takes 0 (every logit is 0), `Cuda` does not.
    pub scale: f32,
    /// Sliding window: a query at position p sees positions above `p - window` only. At least 1.
    pub window: Option<u32>,
    /// Soft cap of the logits, above 0 and finite.
    pub soft_cap: Option<f32>,
}

impl Attend {
    /// Plain causal attention with `q_heads` query heads, scaled by `1 / sqrt(head_dim)`. Over latent rows see
    /// [`Attend::latent`].
    pub fn new(q_heads: u32, head_dim: u32) -> Self {
        Self { q_heads, scale: 1.0 / (head_dim as f32).sqrt(), window: None, soft_cap: None }
    }

    /// Plain causal attention over latent rows, which do not tell the scale: it is that of the heads whose K and V they
    /// stand for, `1 / sqrt(head_dim)` of those, times what the model adds for long contexts.
    pub fn latent(q_heads: u32, scale: f32) -> Self {
        Self { q_heads, scale, window: None, soft_cap: None }
    }
}

/// Query rows, and what their heads have beside the tokens: what [`Backend::attend_queries`] takes.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Queries<R, S> {
    /// `[tokens, q_heads, head_dim]`; of a latent pool `[tokens, q_heads, rank + rope]`
    pub rows: R,
    /// A logit for each query head of this rank, f32 `[q_heads]`, which takes weight and gives no value: its
    /// exponential is added to the sum that the weights are divided by, once for each row, whatever the row sees.
    /// Neither scaled nor capped; minus infinity: the head has none. [`Cpu`] refuses NaN and infinity.
    #[doc(alias = "attention_sink")]
    pub sinks: Option<S>,
}

/// Who owns the bytes of K and V, and moves them. One rank has one, opened by an [`OpenBackend`].
///
/// The contract, checked for every implementation by `testkit::contract`:
///
/// * B1. Calls take effect in the order they are made; asynchronous backends order them on one stream.
/// * B2. [`begin`](Backend::begin) comes first for a plan, once, and steps' numbers rise. Up to `max_steps` steps are
///   open at a time (B8).
/// * B3. [`store_cache`](Backend::store_cache) writes row `i` of k and v to the slot of token `i` in the
///   layer's [track](BatchPlan::slots_of), and nothing else; a negative slot writes nothing. Slots of one plan are
///   distinct.
/// * B4. [`attend`](Backend::attend) reads the slots of positions `0..=p` through the page tables, as last written
///   by `begin`; of a row that is a tree of drafts those that [`masks`](BatchPlan::masks) name, and no window then. It
///   writes every row of `out` (and of the log-sum-exp): padding rows get 0 and minus infinity, sinks or none. The
///   log-sum-exp of all other rows holds their sink.
/// * B5. [`copy_pages`](Backend::copy_pages) copies whole pages, all planes of all lanes. Sources and targets are
///   disjoint.
/// * B6. What an asynchronous call returned without error may fail later; [`synchronize`](Backend::synchronize)
///   reports it, and returns only when everything asked for is done.
/// * B7. After an error nothing of the failed call is relied upon; the next plan sends what is still missing.
/// * B8. A step is open from its `begin` until an [`end`](Backend::end) covers it. Plans of a step that is not open are
///   refused, and nothing is written: by then their pages may be another sequence's. What was asked for while the step
///   was open takes effect all the same, so a step may end as soon as all of it is asked for. A backend that holds no
///   bytes need not refuse.
/// * B18. Of a group that reads a window or a chunk, words of the page tables are of no meaning where no new token of
///   the row reads, and nothing is read there.
/// * B17. A layer of a group that reads a window is attended to through that window; any other, and none, is refused.
///   So is every window for a group that reads chunks. Lists of positions are of group 0's layers.
/// * B11. [`compact`](Backend::compact) moves the slots that are kept of each row, found through its page table as last
///   written by `begin`, to the places from `first` on, all planes of all layers, in every track; nothing else is
///   written. All of a row's are read before one is written; rows are distinct.
pub trait Backend {
    /// What can go wrong.
    type Error: std::error::Error + 'static;
    /// Rows of q, k or v to read: `[tokens, heads, head_dim]`, contiguous within a row.
    type Rows<'a>: Copy;
    /// Rows of attention's output to write: `[tokens, q_heads, head_dim]`; of a latent pool `[tokens, q_heads, rank]`.
    type RowsMut<'a>;
    /// Sinks to read: `[q_heads]` in f32.
    type Sinks<'a>: Copy;
    /// Log-sum-exp to write: `[tokens, q_heads]` in f32, natural logarithm.
    type Lse<'a>;

    /// Begins a step: takes over the plan's changes of the page tables.
    ///
    /// # Errors
    /// The backend's own.
    fn begin(&mut self, plan: &BatchPlan<'_>) -> Result<(), Self::Error>;

    /// Ends steps: their plans are refused from now on. Nothing is waited for; steps that never began, or have ended,
    /// do no harm. An engine calls it with every `complete` and `abort`; a host tells its other ranks' backends.
    /// O(steps that end).
    fn end(&mut self, end: StepEnd);

    /// Stores K and V of a step's new tokens, `[tokens, kv_heads, head_dim]` each; of a latent pool k is the rows,
    /// `[tokens, rank + rope]`, and v rows of no elements. What a quantised pool makes of them is the same on every
    /// backend, bit by bit: see [`KvDtype::Fp8E4M3`](crate::KvDtype) and [`Scaling`](crate::Scaling).
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

    /// Attention of a step's query rows over their sequences' cached tokens, those of this step included.
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

    /// [`attend`](Backend::attend), for heads that may have sinks.
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

    /// Moves slots of rows together, all planes of all layers.
    ///
    /// # Errors
    /// The backend's own.
    fn compact(&mut self, compactions: &[Compaction]) -> Result<(), Self::Error>;

    /// Waits for everything asked for.
    ///
    /// # Errors
    /// Whatever failed since the last call.
    fn synchronize(&mut self) -> Result<(), Self::Error>;
}
