//! The key of a captured graph, which determines the steps that the graph serves.
//!
//! A step's kernels depend on its rows. A kernel that reads spans once may replace the decode kernel. The extend kernel
//! runs if rows are left: rows with too many new tokens, or draft trees that the decode kernel does not support. A
//! further kernel may join partial sums of latent rows.
//! A captured graph contains the kernels of the staged step. It serves all steps with the same key; their lengths, page
//! tables and spans may differ.

/// Maximum number of attention variants in a key.
pub(in crate::backend::cuda) const KEY_VARIANTS: usize = 16;

/// A key of captured graphs: steps with equal keys can replay each other's graphs.
/// [`Cuda::stage`](crate::backend::cuda::Cuda::stage) returns a step's key.
///
/// A key contains the numbers of tokens and rows, the width of slots, and a code of the kernels of each variant of
/// attention. In decode steps, a variant has two codes. They distinguish steps that read a span once or, over latent
/// rows, join partial sums. In steps with drafts, a variant has a few more. The key of a step changes if the backend
/// prepares a new variant.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct GraphKey {
    pub(in crate::backend::cuda) tokens: usize,
    pub(in crate::backend::cuda) rows: usize,
    pub(in crate::backend::cuda) slot_bytes: usize,
    /// Code of the kernels of each variant of attention.
    pub(in crate::backend::cuda) kernels: [u8; KEY_VARIANTS],
}
