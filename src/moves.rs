//! Pages that stores read and write: [`Put`] and [`Fetch`], as plain records.
//!
//! Not here: which pages are put and fetched (`prefix/puts.rs`, `prefix/fetches.rs`), bytes and their leases
//! (`backend/host_memory.rs`).

use crate::hash::PageHash;
use crate::id::{HostPageId, TokenId};

/// A put that is not done.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct PutId(pub(crate) u64);

/// A fetch that is not done.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct FetchId(pub(crate) u64);

/// A cached page for a store to read. It does not change before [`Engine::put_done`](crate::Engine::put_done).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Put<'a> {
    /// Names it until it is done.
    pub id: PutId,
    /// Hash of the page, which is the record's key.
    pub key: PageHash,
    /// Hash of the page before it; `None` for the first page of a prefix.
    pub parent: Option<PageHash>,
    /// Tokens of the page.
    pub tokens: &'a [TokenId],
    /// The host page to read: [`HostMemory::lease`](crate::HostMemory::lease).
    pub page: HostPageId,
}

/// Host pages for a store to write, behind the cached pages of a prompt.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Fetch<'a> {
    /// Names it until it is done.
    pub id: FetchId,
    /// Pages of the prompt that are cached: the first host page is for the page behind them.
    pub cached_pages: u32,
    /// The host pages to write, in the order of the prompt:
    /// [`HostMemory::lease_mut`](crate::HostMemory::lease_mut).
    pub pages: &'a [HostPageId],
}

impl<'a> Put<'a> {
    pub(crate) fn new(
        id: PutId,
        key: PageHash,
        parent: Option<PageHash>,
        tokens: &'a [TokenId],
        page: HostPageId,
    ) -> Self {
        Self { id, key, parent, tokens, page }
    }
}

impl<'a> Fetch<'a> {
    pub(crate) fn new(id: FetchId, cached_pages: u32, pages: &'a [HostPageId]) -> Self {
        Self { id, cached_pages, pages }
    }
}
