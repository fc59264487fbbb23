//! Drafts without a model: what followed the last words of a text where they stood before ("prompt lookup").
//!
//! ```text
//! history     a text, and what followed its end where that stood before
//! drafts      guesses at what follows a token, as a tree, and the branch that came true
//! ```
//!
//! Not here: how they are checked (`server/drafts.rs`).

mod drafts;
mod history;

use kvarena::{DRAFT_MAX, Draft, DraftTree, SeqKey};

pub use drafts::Drafts;
pub use history::History;

/// Most drafts of a stream: with the token that they follow they are the most that a step checks at once.
pub const DRAFTS_MAX: u32 = DRAFT_MAX - 1;

/// How streams are to be drafted for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Drafting {
    /// Most drafts of a stream in a step: 1 to [`DRAFTS_MAX`].
    pub tokens: u32,
    /// Several continuations at a time, merged where they begin alike.
    pub tree: bool,
}

/// What a stream knows of its drafts.
#[derive(Clone, Debug, Default)]
pub struct Drafter {
    /// What is predicted of it, its prompt, and what it has said.
    pub history: History,
    /// What the step in flight checks of it; none where that has none.
    pub drafts: Drafts,
    /// Their masks, where they branch.
    pub tree: DraftTree,
}

impl Drafter {
    /// The drafts as a plan takes them, if there are any.
    pub fn planned(&self, seq: SeqKey) -> Option<Draft<'_>> {
        match (self.drafts.is_empty(), self.drafts.is_chain()) {
            (true, _) => None,
            (false, true) => Some(Draft::chain(seq)),
            (false, false) => Some(self.tree.draft(seq)),
        }
    }
}
