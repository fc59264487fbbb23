//! [`Prepare`]: the work that a host names before its first step.
//!
//! Not here: loading of kernels (`calls_prepare.rs`).

use crate::backend::Attend;

/// The host's future work with a [`Cuda`](super::Cuda). [`Cuda::prepare`](super::Cuda::prepare) loads the kernels for
/// this work and no others.
#[derive(Clone, Copy, Debug)]
pub struct Prepare<'a> {
    /// The distinct attention parameters of the layers. In a pool of several shapes, parameters with the window or the
    /// chunk of a group belong to its layers, and all others to those of group 0.
    pub attend: &'a [Attend],
    /// The distinct attention parameters of layers that attend over lists, with the lists' lengths. Default: none.
    pub lists: &'a [(Attend, u32)],
    /// Most new tokens of a row in decode steps, drafts included. A graph's size of `tokens` for `rows`, padding
    /// included, counts as `tokens.div_ceil(rows)`. Default: 1.
    pub decode_tokens: u32,
    /// Rows of some steps have any number of new tokens, as prompts have. Default: `true`.
    pub extend: bool,
    /// Some rows are trees of drafts. Default: `false`.
    pub trees: bool,
    /// Plans name [spans](crate::SharedSpans) that rows share. Default: `true`.
    pub spans: bool,
    /// Pages are copied. Default: `true`.
    pub copies: bool,
    /// q and k are rotated by [`rope_store`](crate::Backend::rope_store). Default: `false`.
    pub rope_store: bool,
    /// Slots are [compacted](crate::Backend::compact). Default: `false`.
    pub compactions: bool,
}

impl<'a> Prepare<'a> {
    /// Returns the preparation for prompts, decode steps of one new token a row, and page copies, with these attention
    /// parameters.
    pub const fn new(attend: &'a [Attend]) -> Self {
        Self {
            attend,
            lists: &[],
            decode_tokens: 1,
            extend: true,
            trees: false,
            spans: true,
            copies: true,
            rope_store: false,
            compactions: false,
        }
    }
}
