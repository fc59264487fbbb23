//! What the tree says to others: which pages it takes in and gives out, as plain records.
//!
//! Who follows all of them knows which prefixes of the present generation are cached, and nothing else: no page ids, no
//! locks. Not here: where records wait (`prefix/events.rs`), how they are sent (the host's; `crates/events` speaks
//! the wire of vLLM and SGLang).

use crate::hash::{NamespaceNames, PageHash, PageHashes};
use crate::id::{Namespace, StepId, TokenId};

/// What has happened to the cached prefixes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Event<'a> {
    /// Pages became matchable.
    Stored(Stored<'a>),
    /// Pages are cached no more. The deepest come first; their hashes are those that they were stored with.
    Removed {
        /// Of each page, what it is called.
        hashes: PageHashes<'a>,
    },
    /// Nothing is cached any more: of what follows alone, the present is made.
    Cleared,
}

/// Neighbouring pages that became matchable.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Stored<'a> {
    /// Whose prefix it is.
    pub namespace: Namespace,
    /// What that namespace is called.
    pub names: &'a NamespaceNames,
    /// The page before them, which was stored earlier; none for a first page.
    pub parent: Option<PageHash>,
    /// Of each page, what it is called.
    pub hashes: PageHashes<'a>,
    /// Their tokens, `page_size` for each.
    pub tokens: &'a [TokenId],
    /// When this step is complete, the bytes of K and V may be read by whoever is not in the order of the backend's
    /// stream.
    pub step: StepId,
}
