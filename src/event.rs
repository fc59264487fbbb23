//! Events about the cached prefixes: pages that are stored and removed, as plain records.
//!
//! Replaying all events reproduces the set of cached prefixes of the present generation. They have no page ids and no
//! locks.
//!
//! Not here: the buffer of events (`prefix/events.rs`), their transport (the host's; `crates/events` has the wire
//! formats of vLLM and SGLang).

use crate::hash::{NamespaceNames, PageHash, PageHashes};
use crate::id::{Namespace, StepId, TokenId};

/// A change of the cached prefixes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Event<'a> {
    /// Pages became matchable.
    Stored(Stored<'a>),
    /// Pages are no longer cached. The deepest page comes first. The hashes are those of the `Stored` event.
    Removed {
        /// Hash of each page.
        hashes: PageHashes<'a>,
    },
    /// No page is cached. Replaying the events that follow reproduces the current state.
    Cleared,
}

/// Consecutive pages of a prefix that became matchable.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Stored<'a> {
    /// Namespace of the prefix.
    pub namespace: Namespace,
    /// Names of the namespace.
    pub names: &'a NamespaceNames,
    /// Hash of the page before them, which was stored earlier; `None` for the first page of a prefix.
    pub parent: Option<PageHash>,
    /// Hash of each page.
    pub hashes: PageHashes<'a>,
    /// Tokens of the pages, `page_size` for each.
    pub tokens: &'a [TokenId],
    /// Step that computes the pages. Readers outside the order of the backend's stream read K and V after it is
    /// complete.
    pub step: StepId,
}
