//! Fetches: a store outside the engine writes pages of a prompt to swap pages. These pages follow the prompt's cached
//! prefix.
//!
//! * M2. Fetched pages match once all have arrived, up to the first failure.
//!
//! The tokens of an open fetch are in a list without a node. Each page that a fetch writes has one entry, so there are
//! still enough entries for all pages.
//!
//! Not here: puts, and the rules for pages that stores touch (`puts.rs`).

use std::mem::take;

use crate::event::Medium;
use crate::fence::Fence;
use crate::id::{MoveId, Namespace, PageId, PrefixLock, SwapPageId, TokenId};
use crate::layout::saturated;
use crate::memory::{Memory, OutOfMemory};
use crate::moves::{Fetch, FetchId};

use super::cursors::Seek;
use super::entry_list::EntryList;
use super::evict::Oldest;
use super::nodes::{Cursor, Link, NO_PAGE, Sides};
use super::{PrefixMatch, PrefixTree};

/// Maximum number of open fetches.
const FETCHES_MAX: usize = 256;

struct OpenFetch {
    id: FetchId,
    lock: PrefixLock,
    /// Entries with the tokens of the fetched pages. They become entries of the tree once the pages have arrived.
    list: EntryList,
}

/// The open fetches.
pub(super) struct Fetches {
    open: Vec<OpenFetch>,
    /// Pages that the open fetches write, in the order of the fetches.
    pub pages: Vec<SwapPageId>,
    last: u64,
    pub fetched: u64,
}

impl Fetches {
    /// Creates the records of fetches; with 0 pages, nothing is fetched.
    pub fn new(swap_pages: u32, memory: &mut Memory) -> Result<Self, OutOfMemory> {
        Ok(Self {
            open: memory.reserved(if swap_pages > 0 { FETCHES_MAX as u64 } else { 0 })?,
            pages: memory.reserved(swap_pages.into())?,
            last: 0,
            fetched: 0,
        })
    }

    /// Returns the locks of fetches, for audits.
    pub fn locks(&self) -> impl Iterator<Item = &PrefixLock> {
        self.open.iter().map(|fetch| &fetch.lock)
    }

    /// Returns the lists of fetches, for audits.
    pub fn lists(&self) -> impl Iterator<Item = &EntryList> {
        self.open.iter().map(|fetch| &fetch.list)
    }

    /// Checks a part of M2: there are as many pages as entries of the open fetches. O(open fetches).
    pub fn check(&self) -> Result<(), &'static str> {
        if self.pages.len() == self.lists().map(|list| list.pages() as usize).sum::<usize>() {
            Ok(())
        } else {
            Err("M2: a fetched page waits with its tokens until all have arrived")
        }
    }
}

impl PrefixTree {
    /// Locks the cached prefix of these tokens, and takes at most `most` swap pages for the whole pages after it.
    /// `moved` contains the last completed save and load. O(prompt + pages + free swap pages with unfinished moves),
    /// and O(idle nodes) if only pages of the prefix could make room.
    ///
    /// Returns `None` without any change in these cases: there is no hashing, too many fetches are open, `most` is 0,
    /// no whole page follows the prefix, no swap page without unfinished moves can be taken, or the lock would use more
    /// than `available` idle pages (W4).
    pub(crate) fn begin_fetch(
        &mut self,
        namespace: Namespace,
        tokens: &[TokenId],
        most: u32,
        available: u32,
        moved: [MoveId; 2],
        fence: &mut Fence,
    ) -> Option<Fetch<'_>> {
        // No call below frees device pages: a dropped entry frees only those of its cells.
        assert!(self.cells.is_none(), "stores exclude groups, so entries have no cells");
        if self.swap().fetches.open.len() == FETCHES_MAX || self.chain.is_none() {
            return None;
        }
        let found = self.match_prefix(namespace, tokens);
        let cached_pages = found.pages();
        let page_size = self.nodes.page_size as usize;
        let wanted = most.min(saturated((tokens.len() / page_size) as u64) - cached_pages);
        if wanted == 0 || self.idle_pages(&found, None) > available || !self.can_fill(&found, moved) {
            return None;
        }
        let lock = self.lock(&found, fence).expect("nothing changed since the match");
        self.names.hold(namespace);
        let start = self.swap().fetches.pages.len();
        let end = start + wanted as usize;
        let swap = self.swap_mut();
        let (pool, fetches) = (&mut swap.pool, &mut swap.fetches);
        while fetches.pages.len() < end
            && let Some(page) = pool.next_idle(moved[0], moved[1])
        {
            pool.begin_fill(page);
            fetches.pages.push(page);
        }
        // No dropped entry makes a free page idle, so the pool is not searched again.
        while self.swap().fetches.pages.len() < end
            && let Some(page) = self.drop_for_page(moved)
        {
            self.swap_mut().fetches.pages.push(page);
        }
        let page_count = self.swap().fetches.pages.len() - start;
        let tokens = &tokens[cached_pages as usize * page_size..][..page_count * page_size];
        let list = self.nodes.lists.create_equal(tokens, NO_PAGE);
        let fetches = &mut self.swap_mut().fetches;
        fetches.last += 1;
        let id = FetchId(fetches.last);
        fetches.open.push(OpenFetch { id, lock, list });
        Some(Fetch { id, cached_pages, pages: &fetches.pages[start..] })
    }

    /// Returns whether a page is left for a fetch once `found` is locked: a free swap page, the page of a clean entry
    /// that the lock frees, or the page of the oldest swap-only entry that is not locked.
    fn can_fill(&mut self, found: &PrefixMatch, [saved, loaded]: [MoveId; 2]) -> bool {
        if self.swap().pool.next_idle(saved, loaded).is_some() {
            return true;
        }
        let mut at = found.end();
        while let Some(node) = at.node.filter(|&node| self.usage[node].lock_count == 0) {
            let Sides { device, swap_start } = self.nodes.sides_of(node);
            let clean = swap_start.min(at.pages_in_node)..device.min(at.pages_in_node);
            let mut frees = false;
            let Self { nodes, swap: Some(swap), .. } = self else { return false };
            nodes.each_entry_back(node, clean, |entry, _| frees |= swap.is_droppable(entry, saved, loaded));
            if frees {
                return true;
            }
            at = nodes.end_of(nodes.link[node].parent);
        }
        let Some(Oldest::Node(first)) = self.oldest(Seek::SwapOnly) else { return false };
        let mut next = Some(first);
        while let Some(node) = next {
            let (entries, is_leaf) = (self.nodes.entries(node), self.usage[node].child_count == 0);
            let stays = found.node == Some(node) && found.pages_in_node == entries;
            if is_leaf && !stays && Seek::SwapOnly.finds(self.nodes.sides_of(node), entries) {
                return self.swap().is_droppable(self.nodes.last_entry(node), saved, loaded);
            }
            next = self.order.after(&self.usage, node);
        }
        false
    }

    /// Drops the oldest swap-only entry for its swap page, which a fetch takes; `None` if there is none, or if the page
    /// has unfinished moves.
    fn drop_for_page(&mut self, [saved, loaded]: [MoveId; 2]) -> Option<SwapPageId> {
        let Oldest::Node(node) = self.oldest(Seek::SwapOnly)? else { return None };
        let last = self.nodes.last_entry(node);
        let swap = self.swap_mut();
        if !swap.is_droppable(last, saved, loaded) {
            return None;
        }
        swap.counts.evicted += 1;
        let page = swap.of_entry[last as usize];
        self.drop_entries(node, 1, &mut Vec::new());
        self.swap_mut().pool.begin_fill(page);
        Some(page)
    }

    /// Ends a fetch. Its first `count` pages have arrived; they match from now on, unless the tree was reset since the
    /// fetch began. Returns whether the fetch was open. `tokens` is a buffer. O(pages of open fetches).
    pub(crate) fn end_fetch(
        &mut self,
        id: FetchId,
        count: u32,
        fence: &mut Fence,
        freed: &mut Vec<PageId>,
        tokens: &mut Vec<TokenId>,
    ) -> bool {
        let fetches = &mut self.swap_mut().fetches;
        let Some(index) = fetches.open.iter().position(|fetch| fetch.id == id) else {
            return false;
        };
        let start: usize = fetches.lists().take(index).map(|list| list.pages() as usize).sum();
        let OpenFetch { mut lock, mut list, .. } = fetches.open.remove(index);
        let mut pages = take(&mut fetches.pages);
        let own = start..start + list.pages() as usize;
        let mut count = count.min(list.pages());
        if lock.scope().generation != self.generation {
            count = 0;
        }
        let lacking = list.pages() - count;
        self.nodes.lists.trim(&mut list, lacking, None);
        tokens.clear();
        self.nodes.lists.pieces(&list).for_each(|(piece, _)| tokens.extend_from_slice(piece));
        let (arrived, others) = pages[own.clone()].split_at(count as usize);
        let known = self.insert_fetched(&mut lock, tokens, list, arrived, fence);
        let swap = self.swap_mut();
        let unused = arrived[..known].iter().chain(others);
        unused.for_each(|page| swap.pool.end_fill(*page, false));
        swap.fetches.fetched += (arrived.len() - known) as u64;
        pages.drain(own);
        swap.fetches.pages = pages;
        let namespace = lock.scope().namespace;
        self.unlock(lock, fence, freed);
        self.names.release(namespace);
        true
    }

    /// Inserts fetched pages after a lock's prefix. Skips the first ones, if the tree has received them since the fetch
    /// began. Returns the number of skipped pages. `list` contains the `tokens`, and has an entry for each page.
    fn insert_fetched(
        &mut self,
        lock: &mut PrefixLock,
        tokens: &[TokenId],
        mut list: EntryList,
        pages: &[SwapPageId],
        fence: &mut Fence,
    ) -> usize {
        let start = Cursor { node: lock.node(), pages_in_node: 0 };
        let (cursor, known) = self.nodes.walk_from(start, lock.scope(), tokens);
        if known > 0
            && let Some(node) = cursor.node
        {
            let node = self.split(node, cursor.pages_in_node);
            self.move_lock(lock, node, fence);
        }
        if known == list.pages() {
            self.nodes.lists.trim(&mut list, known, None);
            return known as usize;
        }
        if known > 0 {
            let rest = self.nodes.lists.split(&mut list, known);
            self.nodes.lists.trim(&mut list, known, None);
            list = rest;
        }
        let (known, pages) = (known as usize, &pages[known as usize..]);
        let mut before = lock.node().map(|node| self.nodes.last_entry(node));
        let node = self.spawn(Link { parent: lock.node(), list }, lock.scope());
        self.adopt(lock, node);
        let Self { nodes, swap: Some(swap), .. } = self else { return known };
        *nodes.sides_mut(node) = Sides::default();
        let mut rest = pages.iter();
        for (start, len) in nodes.lists.runs(&list) {
            for entry in start..start + len {
                let page = *rest.next().expect("an entry for each page");
                swap.of_entry[entry as usize] = page;
                swap.pool.end_fill(page, true);
                swap.puts.attach_entry(entry, before, false);
                swap.puts.set_stored(entry);
                before = Some(entry);
            }
        }
        self.chain_attached(lock, Medium::Swap, pages.len() as u32);
        known
    }
}
