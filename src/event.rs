//! Events: cached pages that were stored and removed, as plain records without page ids.
//!
//! Replaying all events reproduces the set of cached prefixes of the present generation, and with
//! [`EngineConfig::event_cells`](crate::EngineConfig::event_cells) that of their cells. The host transports events;
//! `crates/events` has the wire format of vLLM and SGLang.

// `prefix/events.rs` contains the event buffer.

use crate::hash::{NamespaceNames, PageHash, PageHashes};
use crate::id::{Namespace, StepId, TokenId};

/// The memory that has a page.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Medium {
    /// The pool of the backend's device.
    Device,
    /// Swap memory.
    Swap,
}

/// A change of the cached prefixes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Event<'a> {
    /// Pages became matchable, or were copied to another medium.
    Stored(Stored<'a>),
    /// A medium no longer has these pages. In group 0, the deepest page of a prefix comes first; cells have no order.
    /// The hashes are those of the `Stored` events. A page that moves is stored in one medium before it is removed from
    /// the other.
    Removed {
        /// The group of layers of the pages, as in [`Stored::group`].
        group: u32,
        /// The medium that had the pages.
        medium: Medium,
        /// Hash of each page.
        hashes: PageHashes<'a>,
    },
    /// No page is cached any more. The events that follow reproduce the current state.
    Cleared,
}

/// Consecutive pages of a prefix that a medium has from now on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Stored<'a> {
    /// Namespace of the prefix.
    pub namespace: Namespace,
    /// Names of the namespace.
    pub names: &'a NamespaceNames,
    /// The group of layers that the pages belong to. The pages of another group than 0 are cells: those of a window or
    /// a chunk, or the state behind the last token of each page. A cell is stored after the page of group 0 with the
    /// same hash, in any medium, and removed before that page is in no medium. Apart from that, an event about cells
    /// may come after later changes of group 0.
    pub group: u32,
    /// The medium that now has the pages.
    pub medium: Medium,
    /// Hash of the page before the first of these pages, stored by an earlier event; `None` at the start of a prefix.
    /// Pages in swap memory may follow a page that is only on the device.
    pub parent: Option<PageHash>,
    /// Hash of each page.
    pub hashes: PageHashes<'a>,
    /// Tokens of the pages, `page_size` for each.
    pub tokens: &'a [TokenId],
    /// The step that computes the pages, or a later one. A reader outside the order of the backend's stream must wait
    /// until this step is complete.
    pub step: StepId,
}
