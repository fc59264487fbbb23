//! [`Prepare`]: the work of a host, for preparation before its first step.

use crate::backend::Attend;

/// A host's future work with a [`Cuda`](super::Cuda). [`Cuda::prepare`](super::Cuda::prepare) compiles the kernels of
/// this work.
#[derive(Clone, Copy, Debug)]
pub struct Prepare<'a> {
    /// The distinct attention parameters of the layers. In a pool of several shapes, parameters with the window or
    /// chunks of a group belong to the layers of that group, and all others to group 0.
    pub attend: &'a [Attend],
    /// The distinct attention parameters of layers with lists, each with its list length. Default: none.
    pub lists: &'a [(Attend, u32)],
    /// Maximum number of new tokens of a row in decode steps, including drafts. A graph of `tokens` tokens and `rows`
    /// rows, including padding, counts as `tokens.div_ceil(rows)`. Default: 1.
    pub decode_tokens: u32,
    /// Whether rows of some steps have any number of new tokens, as prompts do. Default: `true`.
    pub extend: bool,
    /// Whether some rows are draft trees. Default: `false`.
    pub trees: bool,
    /// Whether plans have [spans](crate::plan::SharedSpans) that rows share. Default: `true`.
    pub spans: bool,
    /// Whether pages are copied. Default: `true`.
    pub copies: bool,
    /// Whether [`rope_store`](crate::Backend::rope_store) rotates q and k. Default: `false`.
    pub rope_store: bool,
    /// Whether slots are [compacted](crate::Backend::compact). Default: `false`.
    pub compactions: bool,
}

impl<'a> Prepare<'a> {
    /// Returns the preparation for prompts, decode steps of one token for each row, shared spans, and page copies, with
    /// these attention parameters.
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
