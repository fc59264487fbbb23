//! Pages that stores read and write: [`Put`] and [`Fetch`], as plain records.

// `prefix/puts.rs` and `prefix/fetches.rs` select the pages; `backend/swap_memory.rs` defines the leases of their
// bytes.

use crate::hash::PageHash;
use crate::id::{SwapPageId, TokenId};

/// Identifies a put until it is done.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct PutId(pub(crate) u64);

/// Identifies a fetch until it is done.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct FetchId(pub(crate) u64);

/// A cached page for a store to read. It does not change before [`Engine::put_done`](crate::Engine::put_done).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Put<'a> {
    /// Identifies the put until it is done.
    pub id: PutId,
    /// Hash of the page: its key in the store.
    pub key: PageHash,
    /// Hash of the page before it; `None` for the first page of a prefix.
    pub parent: Option<PageHash>,
    /// Tokens of the page.
    pub tokens: &'a [TokenId],
    /// The swap page to read: [`SwapMemory::lease`](crate::backend::SwapMemory::lease).
    pub page: SwapPageId,
}

/// Swap pages for a store to write: the next pages of a prompt after the cached ones.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Fetch<'a> {
    /// Identifies the fetch until it is done.
    pub id: FetchId,
    /// Number of cached pages of the prompt; the first swap page is for the page after them.
    pub cached_pages: u32,
    /// The swap pages to write, in the order of the prompt:
    /// [`SwapMemory::lease_mut`](crate::backend::SwapMemory::lease_mut).
    pub pages: &'a [SwapPageId],
}
