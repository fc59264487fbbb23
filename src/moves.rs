//! Records that stores read and write: [`Put`], [`Fetch`] and [`Lookup`].
//!
//! A *record* is what a store has under one key: consecutive pages of group 0
//! ([`record_pages`](crate::EngineConfig::record_pages)), or one cell of another group. Its *place* is the index of
//! its last page in the prompt, and the hash of this page is its key, together with the group.

// `prefix/puts.rs` and `prefix/fetches.rs` select the pages; `backend/swap_memory.rs` defines the leases of their
// bytes.

mod lookup;

use crate::hash::{NamespaceNames, PageHash};
use crate::id::{Namespace, SwapPageId, TokenId};

pub use lookup::Lookup;

/// Identifies a put until it is done.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct PutId(pub(crate) u64);

/// Identifies a fetch until it is done.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct FetchId(pub(crate) u64);

/// A record for a store to read. It does not change before [`Engine::put_done`](crate::Engine::put_done).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Put<'a> {
    /// Identifies the put until it is done.
    pub id: PutId,
    /// Namespace of the prefix.
    pub namespace: Namespace,
    /// Names of the namespace, which the hashes include. The host may have forgotten the namespace since.
    pub names: &'a NamespaceNames,
    /// The group of layers.
    pub group: u32,
    /// Hash of the record's last page: its key in the store, together with the group.
    pub key: PageHash,
    /// Hash of the page before the first one; `None` at the start of a prefix.
    pub parent: Option<PageHash>,
    /// Index of the record's first page in the prompt.
    pub first: u32,
    /// Tokens of the record.
    pub tokens: &'a [TokenId],
    /// The swap pages to read: [`SwapMemory::lease`](crate::backend::SwapMemory::lease). In group 0, a page for each
    /// `page_size` tokens; in another group, the pages of the cell.
    pub pages: &'a [SwapPageId],
}

/// Swap pages for a store to write: the records that a prompt's prefix lacks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Fetch<'a> {
    /// Identifies the fetch until it is done.
    pub id: FetchId,
    /// Number of pages of the prefix that group 0 has cached. The records of group 0 begin after them.
    pub cached_pages: u32,
    pub(crate) records: &'a [FetchedRecord],
    pub(crate) pages: &'a [SwapPageId],
}

impl<'a> Fetch<'a> {
    /// Returns the number of records.
    #[expect(clippy::len_without_is_empty, reason = "a fetch has a record")]
    pub fn len(&self) -> usize {
        self.records.len()
    }

    /// Returns the records: those of group 0 in the order of the prompt, then those of each other group.
    pub fn records(&self) -> impl Iterator<Item = FetchRecord<'a>> + use<'a> {
        let mut rest = self.pages;
        self.records.iter().map(move |&FetchedRecord { group, place, first, pages }| {
            let pages = rest.split_off(..pages as usize).expect("the records have all pages");
            FetchRecord { group, place, first, pages }
        })
    }
}

/// A record for a store to write to swap pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct FetchRecord<'a> {
    /// The group of layers.
    pub group: u32,
    /// Index of the record's last page in the prompt, whose hash is the key.
    pub place: u32,
    /// Index in the prompt of the first page to write. A record of several pages may begin before it and end after the
    /// last one.
    pub first: u32,
    /// The swap pages to write: [`SwapMemory::lease_mut`](crate::backend::SwapMemory::lease_mut). In group 0, those of
    /// consecutive pages of the prompt; in another group, those of the cell.
    pub pages: &'a [SwapPageId],
}

/// A record of an open fetch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct FetchedRecord {
    pub group: u32,
    pub place: u32,
    pub first: u32,
    /// Number of swap pages.
    pub pages: u32,
}
