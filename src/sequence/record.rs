//! One sequence's numbers: [`Sequence`], a record of the table.
//!
//! Not here: its tokens and pages (`row.rs`), the invariants of its numbers (S1 to S7, `mod.rs`).

use crate::id::{Namespace, PrefixLock, RowId, Scope, StepId, TokenId};

/// How a sequence was admitted, until a commit has counted it in the statistics. Four bytes, since a row fits two cache
/// lines.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct AdmissionKind(u32);

impl AdmissionKind {
    /// The admission is counted, or the sequence is a fork.
    pub const COUNTED: Self = Self(0);
    /// The sequence was resumed after a commit had counted its prompt.
    pub const RESUMED: Self = Self(u32::MAX);

    /// Describes an admission with a prompt of `prompt_len` tokens.
    pub fn admitted(prompt_len: u32) -> Self {
        Self(prompt_len)
    }

    /// Returns the tokens of the prompt.
    pub fn prompt_len(self) -> u32 {
        self.0
    }
}

/// The cuts of a sequence's tokens, outside its record, which is full.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Cuts {
    /// How often tokens were forgotten.
    pub count: u32,
    /// The fewest that were left then.
    pub shortest: u32,
}

impl Cuts {
    /// No token was forgotten.
    pub const NONE: Self = Self { count: 0, shortest: u32::MAX };
}

/// Stands in [`Sequence::last_plan`] while the last plan is of drafts that wait to be accepted: above every number of a
/// plan, so that the look for repeats finds those too.
pub(super) const DRAFTED: u64 = u64::MAX;

/// The numbers of one sequence. Lengths are in tokens unless they are named pages.
#[derive(Debug)]
pub struct Sequence {
    /// Its row in the page tables.
    pub row: RowId,
    /// Known tokens.
    pub token_len: u32,
    /// Tokens with K and V, by committed steps.
    pub cached_len: u32,
    /// `cached_len` plus the tokens of unfinished plans.
    pub planned_len: u32,
    /// Places of its page tables: pages of each.
    pub page_len: u32,
    /// Pages of group 0 that are the tree's.
    pub published: u32,
    /// First page that no plan has sent to the backends.
    pub dirty_from: u32,
    /// Pages that it shares with the sequence it was forked from, down to the chunks that name them.
    pub inherited: u32,
    /// Places for which its page tables are promised pages, those that have pages already included; 0 while preempted.
    pub promised: u32,
    /// What the next commit counts in [`Stats`](crate::Stats).
    pub(crate) admission_kind: AdmissionKind,
    /// Its chunks of tokens.
    pub(super) chunks: u32,
    /// Entry of its last page (`page_table.rs`), if it has one.
    pub(super) tail: u32,
    /// Its last known token, if it has one.
    pub last_token: TokenId,
    /// Counts preemptions. Commits and aborts skip items that were planned in an earlier epoch.
    pub preemption_epoch: u32,
    /// The last step that planned it or copied for it; 0: none since the last preemption.
    pub last_step: StepId,
    /// Its last plan item, in the numbering of the step log; 0: none.
    pub last_item: u64,
    /// The last plan that named it, to find repeats; `u64::MAX` while its drafts wait to be accepted.
    pub last_plan: u64,
    /// The host's namespace.
    pub namespace: Namespace,
    /// Its prefix; none while preempted.
    pub lock: Option<PrefixLock>,
}

// With its version a slot of 128 bytes: two lines of memory.
const _: () = assert!(size_of::<Sequence>() <= 120);

impl Sequence {
    /// Returns the tokens that fit in its last page still, by S1.
    pub(crate) fn room(&self, page_size: u32) -> u32 {
        self.page_len * page_size - self.planned_len
    }

    /// Returns the pages that it lacks to compute `len` more tokens.
    pub(crate) fn pages_lacking(&self, len: u32, page_size: u32) -> u32 {
        let room = self.room(page_size);
        if len <= room { 0 } else { (len - room).div_ceil(page_size) }
    }

    /// Returns the places without pages that are promised pages.
    pub(crate) fn outstanding(&self) -> u32 {
        self.promised.saturating_sub(self.page_len)
    }

    /// Returns the namespace and generation of its prefix, if it is not preempted.
    pub(crate) fn scope(&self) -> Option<Scope> {
        self.lock.as_ref().map(PrefixLock::scope)
    }

    /// Returns whether its last plan is of drafts of which no branch is kept yet.
    pub(crate) fn is_drafted(&self) -> bool {
        self.last_plan == DRAFTED
    }

    /// Marks that no drafts of it wait.
    pub(crate) fn end_draft(&mut self) {
        self.last_plan = 0;
    }

    /// Returns whether it waits to be resumed, and so has tokens and nothing else.
    pub fn is_preempted(&self) -> bool {
        self.lock.is_none()
    }
}
