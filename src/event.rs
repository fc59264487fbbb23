//! Events: cached pages that were stored and removed, as plain records without page ids.
//!
//! Replaying all events reproduces the set of cached prefixes of the present generation. `prefix/events.rs` is their
//! buffer. The host transports them; `crates/events` has the wire formats of vLLM and SGLang.

use crate::hash::{NamespaceNames, PageHash, PageHashes};
use crate::id::{Namespace, StepId, TokenId};

/// A change of the cached prefixes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Event<'a> {
    /// Pages became matchable.
    Stored(Stored<'a>),
    /// Pages are no longer cached, the deepest page first. The hashes are those of the `Stored` event.
    Removed {
        /// Hash of each page.
        hashes: PageHashes<'a>,
    },
    /// No page is cached any more. The events that follow reproduce the current state.
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
    /// Hash of the page before the first of these pages, stored by an earlier event; `None` at the start of a prefix.
    pub parent: Option<PageHash>,
    /// Hash of each page.
    pub hashes: PageHashes<'a>,
    /// Tokens of the pages, `page_size` for each.
    pub tokens: &'a [TokenId],
    /// Step that computes the pages. A reader outside the order of the backend's stream must wait for its completion.
    pub step: StepId,
}
