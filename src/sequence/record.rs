//! The lengths and flags of one sequence: [`Sequence`]. `mod.rs` states the invariants (S1 to S7, S9); `row.rs` adds
//! tokens and pages.

use crate::id::{Namespace, PrefixLock, RowId, Scope, StepId, TokenId};

/// Kind of a sequence's admission, until a commit has counted it in the statistics. Four bytes, so that a row fits two
/// cache lines.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct AdmissionKind(u32);

impl AdmissionKind {
    /// The admission is counted, or the sequence is a fork.
    pub const COUNTED: Self = Self(0);
    /// The sequence was resumed when its kind was [`AdmissionKind::COUNTED`].
    pub const RESUMED: Self = Self(u32::MAX);

    /// Describes an admission with a prompt of `prompt_len` tokens.
    pub fn admitted(prompt_len: u32) -> Self {
        Self(prompt_len)
    }

    /// Returns the number of tokens of the prompt.
    pub fn prompt_len(self) -> u32 {
        self.0
    }
}

/// Cuts of a sequence: calls that dropped known tokens. They are in a separate table, because [`Sequence`] has no spare
/// bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Cuts {
    /// Number of cuts.
    pub count: u32,
    /// Minimum number of tokens after a cut.
    pub shortest: u32,
}

impl Cuts {
    /// No cut.
    pub const NONE: Self = Self { count: 0, shortest: u32::MAX };
}

/// First page of a row that the next plan must send, and whether the row is *steady* (`states.rs`), so that this plan
/// need not look at its state. One number, so that the plan of a decoding row compares both with the row's pages at
/// once, which saves 350 instructions of a row with a state (benchmark `plan_state`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DirtyFrom(u32);

impl DirtyFrom {
    /// The bit of a row that is not steady. Sequences have at most 2^30 tokens.
    const STATE: u32 = 1 << 31;

    /// Describes a row without pages.
    pub(super) fn new(has_state: bool) -> Self {
        Self(if has_state { Self::STATE } else { 0 })
    }

    /// Describes a steady row whose first `page_len` pages are sent.
    pub(crate) fn sent(page_len: u32) -> Self {
        Self(page_len)
    }

    /// Returns the first page that the next plan must send.
    pub fn page(self) -> u32 {
        self.0 & !Self::STATE
    }

    /// Sets the first page that the next plan must send.
    pub(super) fn set_page(&mut self, page: u32) {
        self.0 = self.0 & Self::STATE | page;
    }

    /// Makes the next plan send the pages from `page` on, beside those that it must send already.
    pub(crate) fn lower(&mut self, page: u32) {
        self.set_page(self.page().min(page));
    }

    pub(crate) fn is_steady(self) -> bool {
        self.0 & Self::STATE == 0
    }

    /// Sets whether a row with a state is steady.
    pub(crate) fn set_steady(&mut self, is_steady: bool) {
        *self = Self(self.page() | Self::new(!is_steady).0);
    }
}

/// Value of [`Sequence::last_plan`] while drafts wait for `accept`. It is larger than every plan number, so the check
/// for sequences that a plan contains twice also finds sequences with waiting drafts.
pub(super) const DRAFTED: u64 = u64::MAX;

/// The numbers of one sequence. Lengths are in tokens unless their name contains `page`.
#[derive(Debug)]
pub struct Sequence {
    /// Row in the page tables.
    pub row: RowId,
    /// Number of known tokens.
    pub token_len: u32,
    /// Number of tokens with K and V: those of the matched prefix and of committed steps.
    pub cached_len: u32,
    /// `cached_len` plus the tokens of open plans, which are neither committed nor aborted.
    pub planned_len: u32,
    /// Number of places in the page tables. Track 0 has a page at each place; other tracks only at places that they
    /// keep.
    pub page_len: u32,
    /// Number of pages of group 0 that belong to the tree.
    pub published: u32,
    /// First page that the next plan must send to the backends, and whether the row's state is steady.
    pub dirty_from: DirtyFrom,
    /// Number of pages whose leaves the row shares with its parent.
    pub inherited: u32,
    /// Number of places whose pages are promised, including places that have their pages; 0 while preempted.
    pub promised: u32,
    /// Kind of admission, until a commit counts it in [`Stats`](crate::stats::Stats).
    pub(crate) admission_kind: AdmissionKind,
    /// Number of leaves of tokens.
    pub(super) leaves: u32,
    /// Entry of the last page (`page_table.rs`), if any.
    pub(super) last_entry: u32,
    /// Last known token, if any.
    pub last_token: TokenId,
    /// Counts preemptions. Commits and aborts skip items that were planned in an earlier epoch.
    pub preemption_epoch: u32,
    /// Last step that planned or copied the sequence; 0 if there is none since the last preemption.
    pub last_step: StepId,
    /// Number of the last plan item in the step log; 0 for none.
    pub last_item: u64,
    /// Number of the last plan with the sequence; `u64::MAX` while drafts wait for `accept`. A plan uses it to find a
    /// repeated sequence.
    pub last_plan: u64,
    pub namespace: Namespace,
    /// Lock on the prefix; none while preempted.
    pub lock: Option<PrefixLock>,
}

// With its version, a slot of the arena has 128 bytes: two cache lines.
const _: () = assert!(size_of::<Sequence>() <= 120);

impl Sequence {
    /// Returns the number of tokens that still fit in the last page (S1).
    pub(crate) fn room(&self, page_size: u32) -> u32 {
        self.page_len * page_size - self.planned_len
    }

    /// Returns the number of missing pages for `len` more tokens.
    pub(crate) fn pages_lacking(&self, len: u32, page_size: u32) -> u32 {
        let room = self.room(page_size);
        if len <= room { 0 } else { (len - room).div_ceil(page_size) }
    }

    /// Returns the number of promised places without pages.
    pub(crate) fn outstanding(&self) -> u32 {
        self.promised.saturating_sub(self.page_len)
    }

    /// Returns the scope of the prefix, unless the sequence is preempted.
    pub(crate) fn scope(&self) -> Option<Scope> {
        self.lock.as_ref().map(PrefixLock::scope)
    }

    /// Returns whether the last plan has waiting drafts.
    pub(crate) fn is_drafted(&self) -> bool {
        self.last_plan == DRAFTED
    }

    pub(crate) fn end_draft(&mut self) {
        self.last_plan = 0;
    }

    /// Returns whether the sequence waits to be resumed. It then has only tokens.
    pub fn is_preempted(&self) -> bool {
        self.lock.is_none()
    }
}
