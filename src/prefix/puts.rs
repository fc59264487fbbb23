//! Puts: cached pages that a store outside the engine reads. They are selected in the order in which they were
//! published.
//!
//! An entry whose page a store has is not put again. If an entry has a swap page, the store reads that page. Otherwise
//! the device page is first copied to a page of the *stage*, a reserved part of swap memory. If the entry is freed
//! during the put, the page stays until the put is done.
//!
//! * M1. No writer touches a page that a put reads: the store receives the put after the last save to the page. A page
//!   that a fetch writes has no other user, and no unfinished save or load.
//! * M3. `stored` is set only for an entry whose hash is the key of the page in the store.
//!
//! Not here: fetches (`fetches.rs`), the states of swap pages (`swap/`).

use std::collections::{HashSet, VecDeque};

use crate::bitmap::{Bitmap, Bits};
use crate::hash::PageHash;
use crate::id::{MoveId, NodeKey, SwapPageId};
use crate::memory::{Memory, OutOfMemory};
use crate::moves::{Put, PutId};
use crate::plan::PageMove;
use crate::swap::SwapPool;

use super::PrefixTree;
use super::chain::Chain;
use super::entry_list::EntryLists;
use super::nodes::{NO_SWAP_PAGE, Nodes};

/// Maximum number of open puts.
const PUTS_MAX: usize = 1024;
/// No entry.
const NONE: u32 = u32::MAX;

/// An entry, and the number of times that it was freed before. While the number is current, the entry has the same
/// page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Version {
    entry: u32,
    count: u32,
}

#[derive(Clone, Copy, Debug)]
struct OpenPut {
    id: PutId,
    /// The entry; `None` once its generation has ended.
    version: Option<Version>,
    key: PageHash,
    page: SwapPageId,
    /// The save to the page.
    save: MoveId,
    is_staged: bool,
    /// Whether the store has received the put.
    is_given: bool,
}

/// The open puts, and the entries that stores have or will get.
pub(super) struct Puts {
    /// Entries whose page a store has.
    stored: Bitmap,
    /// How often each entry was freed.
    versions: Vec<u32>,
    /// By entry, the entry of the page before it.
    before: Vec<u32>,
    /// Entries to put, in the order of publishing. Entries whose put failed are queued again.
    queue: VecDeque<Version>,
    /// Number of entries at the front of the queue that belong to the present round. An entry that a store refused
    /// belongs to the next round, which begins after a call that selected nothing. So a loop over a store that refuses
    /// all pages ends.
    round: usize,
    /// The open puts, by rising ids.
    open: VecDeque<OpenPut>,
    last: u64,
    /// Free pages of the stage, once they are ready.
    stage: Vec<SwapPageId>,
    stage_pages: u32,
    /// Saves to the stage.
    pub staged: Vec<PageMove>,
    pub done: u64,
}

impl Puts {
    /// Creates the records of puts; with 0 entries, nothing is put.
    pub fn new(entries: u32, stage_pages: u32, memory: &mut Memory) -> Result<Self, OutOfMemory> {
        Ok(Self {
            stored: Bitmap::new(entries, false, memory)?,
            versions: memory.zeroed(entries.into())?,
            before: memory.zeroed(entries.into())?,
            queue: memory.queue(entries.into())?,
            round: 0,
            open: memory.queue(if entries > 0 { PUTS_MAX as u64 } else { 0 })?,
            last: 0,
            stage: memory.reserved(stage_pages.into())?,
            stage_pages,
            staged: memory.reserved(stage_pages.into())?,
            done: 0,
        })
    }

    /// Makes the stage usable. Its first page is `first`.
    pub fn set_ready(&mut self, first: u32) {
        let pages = std::mem::take(&mut self.stage_pages);
        self.stage.extend((first..first + pages).rev().map(SwapPageId::new));
    }

    /// Returns whether nothing is put, because pages have no hashes or there are groups.
    pub fn is_off(&self) -> bool {
        self.versions.is_empty()
    }

    /// Records that an entry was freed, so that an open put of its old page does not concern its next page.
    pub fn forget(&mut self, entry: u32) {
        let Some(version) = self.versions.get_mut(entry as usize) else { return };
        *version += 1;
        if self.stored.contains(entry) {
            self.stored.remove(Bits::one(entry as usize));
        }
    }

    pub fn is_stored(&self, entry: u32) -> bool {
        !self.is_off() && self.stored.contains(entry)
    }

    /// Records that a store has an entry's page.
    pub fn set_stored(&mut self, entry: u32) {
        if !self.stored.contains(entry) {
            self.stored.insert(Bits::one(entry as usize));
        }
    }

    /// Records the entry before each of the last `count` entries of a node, unless nothing is put. If `are_new`, queues
    /// these entries to be put.
    pub fn attach(&mut self, nodes: &Nodes, node: NodeKey, count: u32, are_new: bool) {
        if self.is_off() {
            return;
        }
        let mut before = nodes.entry_before(node, count);
        for (start, len) in nodes.lists.last_runs(&nodes.link[node].list, count) {
            for entry in start..start + len {
                self.attach_entry(entry, before, are_new);
                before = Some(entry);
            }
        }
    }

    /// Records the entry before an entry. If `is_new`, queues the entry to be put.
    pub fn attach_entry(&mut self, entry: u32, before: Option<u32>, is_new: bool) {
        self.before[entry as usize] = before.unwrap_or(NONE);
        if is_new {
            let is_one_round = self.round == self.queue.len();
            self.push(Version { entry, count: self.versions[entry as usize] });
            if is_one_round {
                self.round = self.queue.len();
            }
        }
    }

    /// Queues an entry for the next round.
    fn push(&mut self, version: Version) {
        if self.queue.len() == self.versions.len() {
            self.queue.pop_front();
            self.round = self.round.saturating_sub(1);
        }
        self.queue.push_back(version);
    }

    /// Returns the next entry of the round, and removes it from the queue.
    fn pop(&mut self) -> Option<Version> {
        self.round = self.round.checked_sub(1)?;
        self.queue.pop_front()
    }

    fn is_present(&self, version: Version) -> bool {
        self.versions[version.entry as usize] == version.count
    }

    /// Returns the entry of an open put, if it still has the put's page and its generation has not ended.
    fn entry_of(&self, put: &OpenPut) -> Option<u32> {
        put.version.filter(|&version| self.is_present(version)).map(|version| version.entry)
    }

    /// Ends the generation of all pages. No store receives them from now on, and no page is queued again.
    pub fn end_generation(&mut self) {
        self.queue.clear();
        self.round = 0;
        self.open.iter_mut().for_each(|put| put.version = None);
    }

    /// Calls `sink` with the puts whose pages the store can read. All saves up to `saved` are done. Returns the number
    /// of calls.
    fn give(
        &mut self,
        lists: &EntryLists,
        chain: &Chain,
        pool: &mut SwapPool,
        saved: MoveId,
        mut sink: impl FnMut(Put<'_>),
    ) -> usize {
        let mut given = 0;
        for index in 0..self.open.len() {
            let put = self.open[index];
            // If the entry has been freed, the put's bytes are still valid, but the entry may have other tokens.
            let Some(entry) = self.entry_of(&put).filter(|_| !put.is_given && put.save <= saved) else {
                continue;
            };
            self.open[index].is_given = true;
            given += 1;
            let before = self.before[entry as usize];
            let parent = (before != NONE).then(|| chain.of(before));
            let OpenPut { id, key, page, .. } = put;
            sink(Put { id, key, parent, tokens: lists.tokens_of(entry), page });
        }
        // Ends the puts that the store has not received and whose entries were freed or are of an earlier generation.
        while let Some(gone) = self.open.iter().find(|put| !put.is_given && self.entry_of(put).is_none()) {
            self.end(pool, gone.id, false);
        }
        given
    }

    /// Ends the puts whose saves to the stage, in the batch `save`, failed. Queues their entries again.
    pub fn fail_staged(&mut self, save: MoveId) {
        let failed = |put: &OpenPut| put.is_staged && put.save == save;
        for put in self.open.iter().rev().filter(|put| failed(put)) {
            self.stage.push(put.page);
            self.queue.push_front(put.version.expect("this call opened the put"));
            self.round += 1;
        }
        self.open.retain(|put| !failed(put));
        self.staged.clear();
    }

    /// Ends a put, as [`Engine::put_done`](crate::Engine::put_done).
    pub fn end(&mut self, pool: &mut SwapPool, id: PutId, ok: bool) -> bool {
        let Ok(index) = self.open.binary_search_by_key(&id, |put| put.id) else { return false };
        let put = self.open.remove(index).expect("it was found");
        if put.is_staged {
            self.stage.push(put.page);
        } else {
            pool.end_read(put.page);
        }
        if let Some(version) = put.version.filter(|&version| self.is_present(version)) {
            if ok {
                self.set_stored(version.entry);
            } else {
                self.push(version);
            }
        }
        self.done += u64::from(ok);
        true
    }

    /// Checks a part of M1, for the pages that puts read, and a part of M3. O(entries and open puts).
    pub fn check(
        &self,
        pool: &SwapPool,
        lists: &EntryLists,
        key_of: impl Fn(u32) -> Option<PageHash>,
    ) -> Result<(), &'static str> {
        let (staged, read): (Vec<&OpenPut>, Vec<_>) = self.open.iter().partition(|put| put.is_staged);
        let stage = self.stage.iter().chain(staged.iter().map(|put| &put.page));
        let apart = stage.collect::<HashSet<_>>().len() == self.stage.len() + staged.len();
        let unwritten = |put: &&OpenPut| pool.is_read(put.page) && pool.last_save(put.page) == put.save;
        if !apart || !read.iter().all(unwritten) {
            return Err("M1: no writer touches a page that a put reads");
        }
        let keeps = |put| self.entry_of(put).is_none_or(|entry| key_of(entry) == Some(put.key));
        if !self.open.iter().all(keeps) {
            return Err("M3: an entry has the hash that its put has");
        }
        let mut entries = 0..self.versions.len() as u32;
        match entries.any(|entry| self.is_stored(entry) && lists.is_free(entry)) {
            true => Err("M3: a stored entry has a page"),
            false => Ok(()),
        }
    }
}

impl PrefixTree {
    /// Opens puts of the next pages to be put, at most `max`; saves to the stage are collected in `staged`. If the
    /// round has no page to put, begins the next round.
    pub(crate) fn begin_puts(&mut self, max: usize) {
        let Self { nodes, swap: Some(swap), chain: Some(chain), .. } = self else { return };
        let next_move = swap.next_move();
        let (puts, pool) = (&mut swap.puts, &mut swap.pool);
        puts.staged.clear();
        let (before, end) = (puts.open.len(), PUTS_MAX.min(puts.open.len().saturating_add(max)));
        while puts.open.len() < end {
            let Some(version) = puts.pop() else { break };
            if !puts.is_present(version) || puts.is_stored(version.entry) {
                continue;
            }
            let mut page = swap.of_entry[version.entry as usize];
            let is_staged = page == NO_SWAP_PAGE;
            let save;
            if is_staged {
                let Some(stage) = puts.stage.pop() else {
                    puts.queue.push_front(version);
                    puts.round += 1;
                    return;
                };
                puts.staged.push(PageMove { device: nodes.lists.pages_of_run(version.entry, 1)[0], swap: stage });
                (page, save) = (stage, next_move);
            } else {
                pool.begin_read(page);
                save = pool.last_save(page);
            }
            puts.last += 1;
            let id = PutId(puts.last);
            puts.open.push_back(OpenPut {
                id,
                version: Some(version),
                key: chain.of(version.entry),
                page,
                save,
                is_staged,
                is_given: false,
            });
        }
        if puts.round == 0 && puts.open.len() == before {
            puts.round = puts.queue.len();
        }
    }

    /// Calls `sink` with the puts whose pages the store can read. All saves up to `saved` are done. Returns the number
    /// of calls.
    pub(crate) fn give_puts(&mut self, saved: MoveId, sink: impl FnMut(Put<'_>)) -> usize {
        let Self { nodes, swap: Some(swap), chain: Some(chain), .. } = self else { return 0 };
        swap.puts.give(&nodes.lists, chain, &mut swap.pool, saved, sink)
    }
}
