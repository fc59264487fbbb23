//! Which steps a captured graph serves.
//!
//! A step's kernels depend on its rows: whether spans are read once, whether some row has more new tokens than a decode
//! kernel takes, whether sums of latent rows have parts to join. A graph holds either all that steps of a size may need,
//! some of which then find nothing to do, or just what the captured step needs.
//!
//! Not here: capturing (`stream.rs`), who chooses the kernels (`attend.rs`, `attend_latent.rs`).

/// Variants of attention that a key tells apart: all there can be over one pool.
pub(super) const KEY_VARIANTS: usize = 16;

/// What a capture holds: chosen when the backend is opened.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum GraphScope {
    /// Every kernel that a step of as many tokens and rows may need: one graph serves them all. Each row reads shared
    /// spans by itself.
    #[default]
    Size,
    /// The kernels that the captured step is launched with where there is no graph: it serves the steps of its
    /// [`GraphKey`]. Spans are read once where that is cheaper, and no kernel is launched that has nothing to do.
    Kernels,
}

/// Steps with equal keys can replay each other's graphs. [`Cuda::stage`](super::Cuda::stage) gives a step's.
///
/// With [`GraphScope::Size`] it is the number of tokens and rows, and the width of the slots. With
/// [`GraphScope::Kernels`] also which kernels attention takes: for decode steps of one size that comes to two keys,
/// with spans read once and without; where rows have drafts, too, to a few more.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct GraphKey {
    pub(super) tokens: usize,
    pub(super) rows: usize,
    pub(super) slot_bytes: usize,
    /// Of each variant of attention, in the backend's own terms.
    pub(super) kernels: [u8; KEY_VARIANTS],
}
