//! Drafts without a model: the tokens that followed earlier occurrences of the text's end ("prompt lookup").
//!
//! ```text
//! history     a text, and a search for earlier occurrences of its end
//! drafts      a tree of guesses, and its accepted branch
//! ```
//!
//! `server/drafts.rs` adds drafts to steps and keeps the accepted ones.

mod drafts;
mod history;

use kvarena::SeqKey;
use kvarena::plan::{DRAFT_MAX, Draft, DraftTree};

pub use drafts::Drafts;
pub use history::History;

/// Maximum number of drafts of a stream: a step checks at most `DRAFT_MAX` tokens, which include the token before the
/// drafts.
pub const DRAFTS_MAX: u32 = DRAFT_MAX - 1;

/// Options of drafting.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Drafting {
    /// Maximum number of drafts of a stream in a step: 1 to [`DRAFTS_MAX`].
    pub tokens: u32,
    /// Whether drafts form a tree of several continuations, merged at common prefixes; otherwise they form a chain.
    pub tree: bool,
}

/// The drafting state of a stream.
#[derive(Clone, Debug, Default)]
pub struct Drafter {
    /// The prediction, the prompt and the new tokens of the stream.
    pub history: History,
    /// The drafts that the step in flight checks; empty if there are none.
    pub drafts: Drafts,
    /// Masks of the drafts, if they branch.
    pub tree: DraftTree,
}

impl Drafter {
    /// Returns the drafts in a plan's form, if there are any.
    pub fn planned(&self, seq: SeqKey) -> Option<Draft<'_>> {
        if self.drafts.is_empty() {
            return None;
        }
        Some(if self.drafts.is_chain() { Draft::chain(seq) } else { self.tree.draft(seq) })
    }
}
