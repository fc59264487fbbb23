//! The store of nodes' tokens and page ids: runs of entries in one slab. Entries never move.
//!
//! ```text
//! entry     0    1    2    3    4    5    6    7        one entry a cached page:
//! tokens  [tttt|tttt|tttt|    |tttt|tttt|    |    ]     page_size tokens
//! pages   [ p9 | p2 | p3 |    | p7 | p8 |    |    ]     and the page that holds their K and V
//! list A   = run 0..3                                   a list is a run of entries,
//! list B   = run 4..6                                   or a list of them
//! ```
//!
//! A list takes exactly one entry for each of its pages, so entries cannot run out before pages do. The store has an
//! eighth more entries than pages, so that free entries are easy to find in a full cache.
//!
//! Not here: which node owns which list, which entries a list gets (`free_entries.rs`).

use std::ops::Range;

use bytemuck::{Pod, Zeroable};

use crate::bitmap::WORD;
use crate::id::{PageId, TokenId};
use crate::memory::{Memory, OutOfMemory, prefetch_items};

use super::free_entries::FreeEntries;

/// No extent.
const NONE: u32 = u32::MAX;

/// Maximum number of page ids that are prefetched before a list is trimmed.
const AHEAD: usize = 256;

/// A run of neighbouring entries after a list's first run.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Extent {
    start: u32,
    len: u32,
    next: u32,
    /// Index of the previous extent; [`NONE`] if the previous run is the list's first one.
    prev: u32,
}

/// A node's pages: a run of entries, and a list of further extents if one run was not enough. 20 bytes.
#[derive(Clone, Copy)]
pub(super) struct EntryList {
    /// The first run is stored here, so that most walks need not follow the list of extents.
    start: u32,
    len: u32,
    /// First and last further extent.
    more: u32,
    last: u32,
    pages: u32,
}

impl EntryList {
    /// A list without pages. Only a node that is being created or removed has it.
    pub const EMPTY: EntryList = EntryList { start: 0, len: 0, more: NONE, last: NONE, pages: 0 };

    /// Returns the number of pages of the list.
    pub fn pages(&self) -> u32 {
        self.pages
    }
}

/// All lists' entries.
pub(super) struct EntryLists {
    page_size: usize,
    tokens: Vec<TokenId>,
    pages: Vec<PageId>,
    free: FreeEntries,
    extents: Vec<Extent>,
    /// Vacant extents, linked by `next`.
    vacant: u32,
    extent_count: u32,
}

impl EntryLists {
    /// Returns the number of entries for `page_count` pages.
    pub fn entry_count(page_count: u32) -> u32 {
        page_count.saturating_add(page_count / 8)
    }

    pub fn new(page_count: u32, page_size: u32, memory: &mut Memory) -> Result<Self, OutOfMemory> {
        let entries = Self::entry_count(page_count);
        Ok(Self {
            page_size: page_size as usize,
            // Zeroed memory is not touched before it is used.
            tokens: memory.zeroed(u64::from(entries) * u64::from(page_size))?,
            pages: memory.zeroed(entries.into())?,
            free: FreeEntries::new(entries, memory)?,
            extents: memory.reserved(page_count.into())?,
            vacant: NONE,
            extent_count: 0,
        })
    }

    #[cfg(any(test, feature = "testkit"))]
    pub fn live_bytes(&self) -> u64 {
        u64::from(self.taken_count()) * (self.page_size as u64 * 4 + 4)
            + u64::from(self.extent_count) * size_of::<Extent>() as u64
    }

    /// Returns the number of entries that lists have taken.
    pub fn taken_count(&self) -> u32 {
        self.pages.len() as u32 - self.free.free_count()
    }

    /// Returns a new list of these pages. O(pages).
    ///
    /// # Panics
    /// If `pages` is empty, or has more pages than entries are free.
    pub fn create(&mut self, tokens: &[TokenId], pages: &[PageId]) -> EntryList {
        assert!(!pages.is_empty(), "T1: no list is empty");
        let mut list = EntryList::EMPTY;
        self.push(&mut list, tokens, pages, pages.len() < WORD);
        list
    }

    /// Returns a new list of these tokens, whose entries all have the same page id. O(tokens).
    ///
    /// # Panics
    /// If there are no tokens, or more pages than free entries.
    pub fn create_equal(&mut self, tokens: &[TokenId], page: PageId) -> EntryList {
        assert!(!tokens.is_empty(), "T1: no list is empty");
        let (mut list, mut rest) = (EntryList::EMPTY, tokens);
        let pack = tokens.len() / self.page_size < WORD;
        while !rest.is_empty() {
            let (start, len) = self.free.take_run(rest.len() / self.page_size, pack);
            self.link_extent(&mut list, start, len);
            let own = rest.split_off(..len * self.page_size).expect("a run is not longer");
            self.tokens[start * self.page_size..][..own.len()].copy_from_slice(own);
            self.pages[start..start + len].fill(page);
        }
        list
    }

    /// Appends pages to a list. O(pages).
    pub fn grow(&mut self, list: &mut EntryList, tokens: &[TokenId], pages: &[PageId]) {
        let end = self.end(list);
        let taken = self.free.take_from(end, pages.len());
        match list.last {
            NONE => list.len += taken as u32,
            last => self.extents[last as usize].len += taken as u32,
        }
        list.pages += taken as u32;
        let (tokens, more_tokens) = tokens.split_at(taken * self.page_size);
        let (pages, more_pages) = pages.split_at(taken);
        self.write(end, tokens, pages);
        if !more_pages.is_empty() {
            self.push(list, more_tokens, more_pages, false);
        }
    }

    /// Adds extents for all of `pages`. `pack` is set for a small list, which shares a word of entries with others.
    fn push(&mut self, list: &mut EntryList, tokens: &[TokenId], pages: &[PageId], pack: bool) {
        let (mut tokens, mut pages) = (tokens, pages);
        while !pages.is_empty() {
            let (start, len) = self.free.take_run(pages.len(), pack);
            self.link_extent(list, start, len);
            self.write(start, &tokens[..len * self.page_size], &pages[..len]);
            (tokens, pages) = (&tokens[len * self.page_size..], &pages[len..]);
        }
    }

    /// Returns the entry after a list's last one.
    fn end(&self, list: &EntryList) -> usize {
        let (start, len) = match list.last {
            NONE => (list.start, list.len),
            last => (self.extents[last as usize].start, self.extents[last as usize].len),
        };
        (start + len) as usize
    }

    /// Writes pages and their tokens to entries from `entry` on.
    fn write(&mut self, entry: usize, tokens: &[TokenId], pages: &[PageId]) {
        self.pages[entry..entry + pages.len()].copy_from_slice(pages);
        let token = entry * self.page_size;
        self.tokens[token..token + tokens.len()].copy_from_slice(tokens);
    }

    fn link_extent(&mut self, list: &mut EntryList, start: usize, len: usize) {
        let (start, len) = (start as u32, len as u32);
        list.pages += len;
        if list.len == 0 {
            (list.start, list.len) = (start, len);
            return;
        }
        let index = self.add_extent(Extent { start, len, next: NONE, prev: list.last });
        match list.last {
            NONE => list.more = index,
            last => self.extents[last as usize].next = index,
        }
        list.last = index;
    }

    fn add_extent(&mut self, extent: Extent) -> u32 {
        self.extent_count += 1;
        if self.vacant == NONE {
            assert!(self.extents.len() < self.extents.capacity(), "T6: there is room for an extent");
            self.extents.push(extent);
            return (self.extents.len() - 1) as u32;
        }
        let index = self.vacant;
        self.vacant = self.extents[index as usize].next;
        self.extents[index as usize] = extent;
        index
    }

    /// Cuts a list after `at` pages and returns the rest. No entry moves. O(extents before the cut).
    pub fn split(&mut self, list: &mut EntryList, at: u32) -> EntryList {
        assert!(0 < at && at < list.pages, "a split leaves pages on both sides");
        let rest_pages = list.pages - at;
        if at < list.len {
            let rest = EntryList { start: list.start + at, len: list.len - at, pages: rest_pages, ..*list };
            *list = EntryList { len: at, more: NONE, last: NONE, pages: at, ..*list };
            return rest;
        }
        let (mut index, mut before) = (list.more, list.len);
        while before + self.extents[index as usize].len <= at {
            before += self.extents[index as usize].len;
            index = self.extents[index as usize].next;
        }
        // The rest of this extent becomes the run that the other list begins with.
        let extent = self.extents[index as usize];
        let keep = at - before;
        let last = if extent.next == NONE { NONE } else { list.last };
        let (start, len) = (extent.start + keep, extent.len - keep);
        let rest = EntryList { start, len, more: extent.next, last, pages: rest_pages };
        if extent.next != NONE {
            self.extents[extent.next as usize].prev = NONE;
        }
        (list.last, list.pages) = (index, at);
        self.extents[index as usize].len = keep;
        self.extents[index as usize].next = NONE;
        if keep == 0 {
            self.drop_last(list);
        }
        rest
    }

    /// Takes an empty last extent off a list.
    fn drop_last(&mut self, list: &mut EntryList) {
        let index = list.last;
        list.last = self.extents[index as usize].prev;
        match list.last {
            NONE => list.more = NONE,
            last => self.extents[last as usize].next = NONE,
        }
        self.extent_count -= 1;
        self.extents[index as usize].next = self.vacant;
        self.vacant = index;
    }

    /// Takes `count` entries off the end of a list and appends their pages to `out`, in an unspecified order. `out` is
    /// `None` if the entries have no device pages. O(count).
    pub fn trim(&mut self, list: &mut EntryList, count: u32, mut out: Option<&mut Vec<PageId>>) {
        list.pages -= count;
        let mut count = count as usize;
        while count > 0 {
            let end = self.end(list);
            let len = match list.last {
                NONE => &mut list.len,
                last => &mut self.extents[last as usize].len,
            };
            let cut = count.min(*len as usize);
            *len -= cut as u32;
            let emptied = *len == 0 && list.last != NONE;
            if let Some(out) = &mut out {
                out.extend_from_slice(&self.pages[end - cut..end]);
            }
            self.free.release(end - cut, cut);
            if emptied {
                self.drop_last(list);
            }
            count -= cut;
        }
    }

    /// Calls `each` with each entry at some places of a list, the last one first. `each` may rewrite the entry's page.
    /// O(entries, and for each of their runs the runs before it).
    pub fn each_entry_back(&mut self, list: &EntryList, places: Range<u32>, mut each: impl FnMut(u32, &mut PageId)) {
        let mut end = places.end;
        while end > places.start {
            let (_, start, len) = self.run_of(list, end);
            let count = len.min(end - places.start);
            for entry in (start + len - count..start + len).rev() {
                each(entry, &mut self.pages[entry as usize]);
            }
            end -= count;
        }
    }

    /// Prefetches the data that a trim of the whole list will read, if the list is a single run. It prefetches only the
    /// end of a long run; the processor's own prefetcher reads the rest ahead.
    pub fn prefetch(&self, list: &EntryList) {
        if list.last == NONE {
            let end = self.end(list);
            let len = (list.len as usize).min(AHEAD);
            prefetch_items(&self.pages[end - len..end]);
            self.free.prefetch(end - 1);
        }
    }

    /// Returns the tokens of a list's first page.
    pub fn first_page(&self, list: &EntryList) -> &[TokenId] {
        let entry = list.start as usize;
        &self.tokens[entry * self.page_size..(entry + 1) * self.page_size]
    }

    /// Returns the tokens and pages of a list, run by run.
    pub fn pieces(&self, list: &EntryList) -> impl Iterator<Item = (&[TokenId], &[PageId])> {
        self.runs(list).map(|(start, len)| {
            let entries = start as usize..(start + len) as usize;
            let tokens = entries.start * self.page_size..entries.end * self.page_size;
            (&self.tokens[tokens], &self.pages[entries])
        })
    }

    /// Returns the entry of a list's first page.
    pub fn first_entry(list: &EntryList) -> u32 {
        list.start
    }

    /// Returns the entry of a list's last page.
    pub fn last_entry(&self, list: &EntryList) -> u32 {
        self.end(list) as u32 - 1
    }

    /// Returns the tokens of an entry's page.
    pub fn tokens_of(&self, entry: u32) -> &[TokenId] {
        self.tokens_of_run(entry, 1)
    }

    /// Returns the tokens of a run of entries.
    pub fn tokens_of_run(&self, start: u32, len: u32) -> &[TokenId] {
        &self.tokens[start as usize * self.page_size..(start + len) as usize * self.page_size]
    }

    /// Returns the pages of a run of entries.
    pub fn pages_of_run(&self, start: u32, len: u32) -> &[PageId] {
        &self.pages[start as usize..(start + len) as usize]
    }

    /// Returns the first entry and length of each run of a list's last `count` pages, in order. O(runs).
    pub fn last_runs(&self, list: &EntryList, count: u32) -> impl Iterator<Item = (u32, u32)> {
        let (mut index, mut lacking) = (list.last, count);
        let (mut start, mut len) = self.run_at(list, index);
        while lacking > len {
            lacking -= len;
            index = self.extents[index as usize].prev;
            (start, len) = self.run_at(list, index);
        }
        let next = if index == NONE { list.more } else { self.extents[index as usize].next };
        self.runs_from((start + len - lacking, lacking), next)
    }

    /// Returns the first entry and length of each run of a list's last `count` pages, the last run first.
    pub fn last_runs_back(&self, list: &EntryList, count: u32) -> impl Iterator<Item = (u32, u32)> {
        let (mut index, mut lacking) = (list.last, count);
        std::iter::from_fn(move || {
            if lacking == 0 {
                return None;
            }
            let (start, len) = self.run_at(list, index);
            let here = len.min(lacking);
            lacking -= here;
            if lacking > 0 {
                index = self.extents[index as usize].prev;
            }
            Some((start + len - here, here))
        })
    }

    /// Returns the run that contains page `pages - 1` of a list: its extent, its first entry, and the number of its
    /// pages up to this one. O(runs before this run).
    pub fn run_of(&self, list: &EntryList, pages: u32) -> (u32, u32, u32) {
        let (mut index, mut rest) = (NONE, pages);
        if pages == list.pages && list.last != NONE {
            let (start, len) = self.run_at(list, list.last);
            return (list.last, start, len);
        }
        loop {
            let (start, len) = self.run_at(list, index);
            if rest <= len {
                return (index, start, rest);
            }
            rest -= len;
            index = if index == NONE { list.more } else { self.extents[index as usize].next };
        }
    }

    /// Returns the run before that of extent `index`, in the form of [`EntryLists::run_of`].
    pub fn run_before(&self, list: &EntryList, index: u32) -> Option<(u32, u32, u32)> {
        let extent = self.extents.get(index as usize)?;
        let (start, len) = self.run_at(list, extent.prev);
        Some((extent.prev, start, len))
    }

    /// Returns the run of a further extent, or for [`NONE`] the list's first run.
    fn run_at(&self, list: &EntryList, index: u32) -> (u32, u32) {
        match self.extents.get(index as usize) {
            Some(extent) => (extent.start, extent.len),
            None => (list.start, list.len),
        }
    }

    /// Returns the first entry and length of each run of a list.
    pub fn runs(&self, list: &EntryList) -> impl Iterator<Item = (u32, u32)> {
        self.runs_from((list.start, list.len), list.more)
    }

    /// Returns a run, and those of the extents from `next` on.
    #[inline]
    fn runs_from(&self, first: (u32, u32), mut next: u32) -> impl Iterator<Item = (u32, u32)> {
        let mut run = Some(first);
        std::iter::from_fn(move || {
            let found = run?;
            run = self.extents.get(next as usize).map(|extent| {
                next = extent.next;
                (extent.start, extent.len)
            });
            Some(found)
        })
    }

    /// Returns the entries of a list, for audits.
    pub fn entries(&self, list: &EntryList) -> impl Iterator<Item = u32> {
        self.runs(list).flat_map(|(start, len)| start..start + len)
    }

    /// Returns whether an entry is free, for audits.
    pub fn is_free(&self, entry: u32) -> bool {
        self.free.is_free(entry)
    }

    /// Returns the number of extents in use, for audits.
    pub fn extent_count(&self) -> u32 {
        self.extent_count
    }

    /// Returns the number of further extents of one list, for audits.
    pub fn extents_of(&self, list: &EntryList) -> u32 {
        self.runs(list).count() as u32 - 1
    }
}

#[cfg(test)]
mod tests {
    use super::EntryLists;
    use crate::id::{PageId, TokenId};
    use crate::memory::Memory;

    impl EntryLists {
        /// Counts an extent that does not exist, for tests of the audit.
        pub(in crate::prefix) fn lose_an_extent(&mut self) {
            self.extent_count += 1;
        }
    }

    #[test]
    fn live_bytes_are_those_of_taken_entries_and_extents() {
        let mut store = EntryLists::new(64, 2, &mut Memory::new(false)).expect("it is small");
        assert_eq!(store.live_bytes(), 0);
        // The entry after the first list is taken, so the first list's next page takes an extent.
        let mut lists = [0, 1].map(|_| store.create(&[TokenId::new(7); 6], &[PageId::new(0); 3]));
        let of_entries = 6 * (2 * 4 + 4);
        assert_eq!(store.live_bytes(), of_entries);
        store.grow(&mut lists[0], &[TokenId::new(7); 2], &[PageId::new(0)]);
        let extent = size_of::<super::Extent>() as u64;
        assert_eq!(store.live_bytes(), of_entries + 12 + extent * u64::from(store.extent_count()));
        assert!(store.extent_count() > 0);
    }

    #[test]
    fn large_spans_follow_one_another() {
        let (count, len) = (10, 96);
        let mut store = EntryLists::new(count * len, 1, &mut Memory::new(false)).expect("it is small");
        let tokens = vec![TokenId::new(7); len as usize];
        let pages: Vec<PageId> = (0..len).map(PageId::new).collect();
        for i in 0..count {
            let list = store.create(&tokens, &pages);
            assert!(store.entries(&list).eq(i * len..(i + 1) * len), "list {i} is one run behind the last");
        }
    }
}
