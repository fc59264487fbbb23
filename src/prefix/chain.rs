//! Hashes of cached pages, for routers and other callers that identify prefixes by hashes. Only engines whose config
//! sets `hashing` have them.
//!
//! A column stores the hash of each page by the number of its entry (`span.rs`). So a split moves no hash, and the hash
//! of a freed entry is no longer read. A page is hashed when it is added, if its prefix is of the present generation. A
//! second child table finds nodes by the hash of their first page. Nodes of an old generation stay in it until they are
//! despawned. No walk reaches them, since walks begin at prefixes of the present generation.
//!
//! * T9. Every page of the present generation has the hash of its prefix. The hash of a node's first page finds the
//!   node.
//!
//! Not here: how a hash is computed (`hash/`), events (`events.rs`).

mod check;

use std::sync::Arc;

use crate::error::Error;
use crate::hash::{Hashing, Names, NamespaceNames, PageHash, PageHashes};
use crate::id::{Namespace, NodeKey, PageId, PrefixLock, Scope};
use crate::memory::{Memory, OutOfMemory};

use super::child_table::ChildTable;
use super::column::RareColumn;
use super::span::SpanStore;
use super::walk::Cursor;
use super::{PrefixMatch, PrefixTree};

/// Bit that is set in the hash of each node in the table, so that 0 stands for no hash.
const LISTED: u32 = 1 << 31;

/// The column of hashes, and the table that finds nodes by them.
pub(super) struct Chain {
    pub hashing: Hashing,
    pub names: Names,
    hashes: Hashes,
    /// Nodes by the hash of their first page.
    firsts: ChildTable,
    /// A node's hash in `firsts`, or 0.
    listed: RareColumn<u32>,
}

/// A hash for each entry of the spans' slab.
struct Hashes {
    width: usize,
    bytes: Vec<u8>,
}

impl Hashes {
    fn get(&self, entry: u32) -> PageHash {
        let start = entry as usize * self.width;
        PageHash::from_bytes(&self.bytes[start..start + self.width])
    }

    fn set(&mut self, entry: u32, hash: PageHash) {
        let start = entry as usize * self.width;
        self.bytes[start..start + self.width].copy_from_slice(hash.bytes(self.width));
    }

    fn of_run(&self, start: u32, len: u32) -> &[u8] {
        &self.bytes[start as usize * self.width..(start + len) as usize * self.width]
    }
}

impl Chain {
    pub fn new(page_count: u32, hash_bits: u32, hashing: Hashing, memory: &mut Memory) -> Result<Self, OutOfMemory> {
        let (width, entries) = (hashing.width(), SpanStore::entry_count(page_count));
        Ok(Self {
            hashing,
            names: Names::new(hashing, memory)?,
            hashes: Hashes { width, bytes: memory.zeroed(u64::from(entries) * width as u64)? },
            firsts: ChildTable::new(page_count, hash_bits, memory)?,
            listed: RareColumn::new(page_count, memory)?,
        })
    }

    /// Returns the hashes of a run of entries.
    pub fn of_run(&self, start: u32, len: u32) -> PageHashes<'_> {
        PageHashes::new(self.hashing, self.hashes.of_run(start, len))
    }

    /// Returns the hash of an entry's page.
    pub fn of(&self, entry: u32) -> PageHash {
        self.hashes.get(entry)
    }

    /// Returns the names of a namespace whose prefixes are hashed.
    pub fn names_of(&self, namespace: Namespace) -> &Arc<NamespaceNames> {
        &self.names.get(namespace).expect("an admitted namespace has names").names
    }

    fn list(&mut self, node: NodeKey, first: u32) {
        let hash = self.firsts.hash_number(self.of(first).to_u64()) | LISTED;
        self.listed[node] = hash;
        self.firsts.insert(hash, node);
    }

    /// Returns the node that the table lists under a hash and that `is_it` accepts.
    fn find(&self, hash: PageHash, mut is_it: impl FnMut(NodeKey) -> bool) -> Option<NodeKey> {
        self.firsts.find(self.firsts.hash_number(hash.to_u64()) | LISTED, &mut is_it)
    }
}

impl PrefixTree {
    /// Turns hashing on, for an empty tree.
    pub(crate) fn keep_hashes(
        &mut self,
        hashing: Hashing,
        hash_bits: u32,
        memory: &mut Memory,
    ) -> Result<(), OutOfMemory> {
        assert!(self.link.is_empty(), "T9: every page has its hash");
        self.chain = Some(Chain::new(self.most_pages, hash_bits, hashing, memory)?);
        Ok(())
    }

    /// Returns whether a namespace has the names that hashing needs; true without hashing.
    pub(crate) fn is_named(&self, namespace: Namespace) -> bool {
        self.chain.as_ref().is_none_or(|chain| chain.names.is_named(namespace))
    }

    /// Names a namespace, if prefixes are hashed.
    ///
    /// # Errors
    /// [`Error::NamespaceNamed`], [`Error::NamesTaken`].
    pub(crate) fn name(&mut self, namespace: Namespace, names: NamespaceNames) -> Result<(), Error> {
        self.chain.as_mut().map_or(Ok(()), |chain| chain.names.name(namespace, names))
    }

    /// Marks a namespace as forgotten, if prefixes are hashed. Its names are dropped once they have no users.
    ///
    /// # Errors
    /// [`Error::UnnamedNamespace`].
    pub(crate) fn forget_names(&mut self, namespace: Namespace) -> Result<(), Error> {
        self.chain.as_mut().map_or(Ok(()), |chain| chain.names.forget(namespace))
    }

    /// Counts one more user of a namespace's names: a sequence, a node at the start of a prefix or a fetch. Does
    /// nothing without hashing.
    pub(crate) fn hold_names(&mut self, namespace: Namespace) {
        if let Some(chain) = &mut self.chain {
            chain.names.hold(namespace);
        }
    }

    /// Undoes one call of [`PrefixTree::hold_names`]. Does nothing without hashing.
    pub(crate) fn release_names(&mut self, namespace: Namespace) {
        if let Some(chain) = &mut self.chain {
            chain.names.release(namespace);
        }
    }

    /// Returns the longest cached prefix of a chain of hashes, and calls `each` with its device pages in order, run by
    /// run. O(hashes matched).
    ///
    /// The match considers group 0 alone. A prompt matches less if other groups lack pages that its next token reads.
    pub fn match_hashes(&self, chain: &[PageHash], mut each: impl FnMut(&[PageId])) -> PrefixMatch {
        let scope = self.present_scope(Namespace::default());
        let none = self.match_at(scope, Cursor::START, 0);
        let Some(column) = &self.chain else { return none };
        let (mut found, mut rest) = (none, chain);
        while let Some(&first) = rest.first() {
            let node = column.find(first, |node| {
                let link = &self.link[node];
                let present = || self.scope[node].generation == self.generation;
                link.parent == found.node
                    && (link.parent.is_some() || present())
                    && column.of(SpanStore::first_entry(&link.span)) == first
            });
            let Some(node) = node else { break };
            if found.node.is_none() {
                found.scope = self.scope[node];
            }
            let mut here = 0;
            for (start, len) in self.spans.runs(&self.link[node].span) {
                let same = column.of_run(start, len).iter().zip(&rest[here as usize..]);
                let same = same.take_while(|(cached, wanted)| cached == *wanted).count() as u32;
                let on_device = self.device_pages(node, here + same).saturating_sub(here);
                found.swap_pages += same - on_device;
                each(self.spans.pages_of_run(start, on_device));
                here += same;
                if same < len {
                    break;
                }
            }
            (found.node, found.pages_in_node) = (Some(node), here);
            found.pages += here;
            found.full_pages += here;
            rest = &rest[here as usize..];
            if here < self.link[node].span.pages() {
                break;
            }
        }
        found
    }

    /// Returns the entry of the page before the last `count` pages of a node.
    pub(super) fn entry_before(&self, node: NodeKey, count: u32) -> Option<u32> {
        let link = &self.link[node];
        if count < link.span.pages() {
            return self.spans.last_runs(&link.span, count + 1).next().map(|(start, _)| start);
        }
        link.parent.map(|parent| self.spans.last_entry(&self.link[parent].span))
    }

    /// Hashes the last `count` pages of a lock's node, which were just added.
    pub(super) fn insert_hashes(&mut self, lock: &PrefixLock, count: u32) {
        let Scope { namespace, generation } = lock.scope();
        if generation != self.generation {
            return;
        }
        let node = lock.node().expect("the lock moved to the new pages");
        let before = self.entry_before(node, count);
        let Self { chain: Some(chain), spans, link, .. } = self else { return };
        let span = &link[node].span;
        let Chain { hashing, names, hashes, .. } = &mut *chain;
        let named = names.get(namespace).expect("an admitted namespace has names");
        let mut hash = before.map(|entry| hashes.get(entry));
        for (start, len) in spans.last_runs(span, count) {
            for entry in start..start + len {
                let page = hashing.page(named, hash, spans.tokens_of(entry));
                hashes.set(entry, page);
                hash = Some(page);
            }
        }
        if count == span.pages() {
            chain.list(node, SpanStore::first_entry(span));
        }
    }

    /// Removes a node from the table of hashes if all its pages are about to be removed. `count` is the number of its
    /// last pages that are about to be removed.
    pub(super) fn remove_hashes(&mut self, node: NodeKey, count: u32) {
        let Some(chain) = &mut self.chain else { return };
        if count == self.link[node].span.pages() && chain.listed[node] > 0 {
            let hash = std::mem::take(&mut chain.listed[node]);
            chain.firsts.remove(hash, node);
        }
    }

    /// Updates the table of hashes after a split. `prefix`, the new parent of `node`, has the node's first pages and
    /// takes over its hash. `node` gets the hash of its new first page. Returns `prefix`.
    #[cold]
    #[inline(never)]
    pub(super) fn hash_split(&mut self, node: NodeKey, prefix: NodeKey) -> NodeKey {
        let Some(chain) = &mut self.chain else { return prefix };
        let hash = chain.listed[node];
        if hash > 0 {
            chain.firsts.replace(hash, node, prefix);
            chain.listed[prefix] = hash;
            chain.list(node, SpanStore::first_entry(&self.link[node].span));
        }
        prefix
    }
}

#[cfg(all(test, any(feature = "sha256", feature = "xxhash")))]
impl Chain {
    /// Changes the hash of an entry, for tests of the audit.
    pub fn spoil(&mut self, entry: u32) {
        let hash = self.of(entry).to_u64();
        self.hashes.set(entry, PageHash::from(!hash));
    }

    /// Removes a node from the table of hashes, for tests of the audit.
    pub fn unlist(&mut self, node: NodeKey) {
        self.firsts.remove(self.listed[node], node);
    }
}
