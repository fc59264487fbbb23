//! Which steps a captured graph serves.
//!
//! A step's kernels depend on its rows: whether spans are read once, whether some row has more new tokens than a decode
//! kernel takes, whether sums of latent rows have parts to join. A capture holds those of the step that was staged, as
//! launches without a graph do, and serves all steps that take the same; their lengths, tables and spans differ.
//!
//! Not here: capturing (`driver/stream.rs`), who chooses the kernels (`variants.rs`, `latent.rs`).

/// Variants of attention that a key tells apart: all there can be over one pool.
pub(in crate::backend::cuda) const KEY_VARIANTS: usize = 16;

/// Steps with equal keys can replay each other's graphs. [`Cuda::stage`](crate::backend::cuda::Cuda::stage) gives a
/// step's.
///
/// It stands for the number of tokens and rows, the width of the slots, and the kernels that attention takes. Decode
/// steps of one size come to two keys, with spans read once and without; where rows have drafts, too, to a few more.
/// Variants of attention that are made later change it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct GraphKey {
    pub(in crate::backend::cuda) tokens: usize,
    pub(in crate::backend::cuda) rows: usize,
    pub(in crate::backend::cuda) slot_bytes: usize,
    /// Of each variant of attention, in the backend's own terms.
    pub(in crate::backend::cuda) kernels: [u8; KEY_VARIANTS],
}
