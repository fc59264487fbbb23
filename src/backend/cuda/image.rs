//! The staged plan as launches know it: how large it may be, and where it lies on the device.
//!
//! Not here: what is in it, and how it comes there (`stage.rs`).

/// How large a step may be, and what is said of all of them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct StepLimits {
    pub(super) tokens: u32,
    pub(super) rows: u32,
    /// For tests: every span is read once, be it cheaper or not.
    pub(super) all_spans: bool,
}

/// Where the staged plan lies on the device: all that a launch knows of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Image {
    pub(super) slots: u64,
    pub(super) positions: u64,
    pub(super) rows: u64,
    /// Where rows' scores begin, in pools that keep labels.
    pub(super) starts: u64,
    /// The decode splits of each variant of attention.
    pub(super) splits: u64,
    /// Masks of trees.
    pub(super) masks: u64,
    /// Whether rows are trees.
    pub(super) trees: bool,
    pub(super) token_count: usize,
    pub(super) row_count: usize,
    /// Of one entry of `slots`.
    pub(super) slot_bytes: usize,
}
