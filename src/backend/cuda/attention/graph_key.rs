//! The key that decides which steps a captured graph serves.
//!
//! A step's kernels depend on its rows: whether spans are read once, whether a row has more new tokens than a decode
//! kernel takes, and whether partial sums of latent rows must be joined. A capture contains the kernels of the staged
//! step. It serves all steps that use the same kernels; their lengths, page tables and spans may differ.
//!
//! Not here: capturing (`driver/stream.rs`), the choice of kernels (`variants.rs`, `latent.rs`).

/// Variants of attention that a key distinguishes: the maximum over one pool.
pub(in crate::backend::cuda) const KEY_VARIANTS: usize = 16;

/// Steps with equal keys can replay each other's graphs. [`Cuda::stage`](crate::backend::cuda::Cuda::stage) returns a
/// step's key.
///
/// A key contains the numbers of tokens and rows, the width of the slots, and the kernels of attention. Decode steps of
/// one size have two keys, with and without spans that are read once; drafts add a few. A variant of attention that is
/// created later changes the key.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct GraphKey {
    pub(in crate::backend::cuda) tokens: usize,
    pub(in crate::backend::cuda) rows: usize,
    pub(in crate::backend::cuda) slot_bytes: usize,
    /// Code of the kernels of each variant of attention.
    pub(in crate::backend::cuda) kernels: [u8; KEY_VARIANTS],
}
