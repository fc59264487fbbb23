//! The staged plan as launches know it: how large it may be, and where it lies on the device.
//!
//! Not here: what is in it, and how it comes there (`stage.rs`).

/// How large a step may be, and what is said of all of them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::backend::cuda) struct StepLimits {
    pub(in crate::backend::cuda) tokens: u32,
    pub(in crate::backend::cuda) rows: u32,
    /// For tests: every span is read once, be it cheaper or not.
    pub(in crate::backend::cuda) all_spans: bool,
}

/// Where the staged plan lies on the device: all that a launch knows of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::backend::cuda) struct Image {
    pub(in crate::backend::cuda) slots: u64,
    pub(in crate::backend::cuda) positions: u64,
    pub(in crate::backend::cuda) rows: u64,
    /// Where rows' scores begin, in pools that keep labels.
    pub(in crate::backend::cuda) starts: u64,
    /// The decode splits of each variant of attention.
    pub(in crate::backend::cuda) splits: u64,
    /// Masks of trees.
    pub(in crate::backend::cuda) masks: u64,
    /// Whether rows are trees.
    pub(in crate::backend::cuda) trees: bool,
    pub(in crate::backend::cuda) token_count: usize,
    pub(in crate::backend::cuda) row_count: usize,
    /// Of one entry of `slots`.
    pub(in crate::backend::cuda) slot_bytes: usize,
}
