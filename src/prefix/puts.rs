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
use crate::id::{MoveId, SwapPageId};
use crate::memory::{Memory, OutOfMemory};
use crate::moves::{Put, PutId};
use crate::plan::PageMove;
use crate::swap::SwapPool;

use super::PrefixTree;
use super::residency::NO_SWAP_PAGE;
use super::span::SpanStore;

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
    of: Option<Version>,
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

    /// Records the entry before an entry. If `is_new`, queues the entry to be put.
    pub fn attach(&mut self, entry: u32, before: Option<u32>, is_new: bool) {
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
    fn push(&mut self, of: Version) {
        if self.queue.len() == self.versions.len() {
            self.queue.pop_front();
            self.round = self.round.saturating_sub(1);
        }
        self.queue.push_back(of);
    }

    /// Returns the next entry of the round, and removes it from the queue.
    fn pop(&mut self) -> Option<Version> {
        self.round = self.round.checked_sub(1)?;
        self.queue.pop_front()
    }

    fn is_present(&self, of: Version) -> bool {
        self.versions[of.entry as usize] == of.count
    }

    /// Returns the entry of an open put, if it still has the put's page and its generation has not ended.
    fn entry_of(&self, put: &OpenPut) -> Option<u32> {
        put.of.filter(|&of| self.is_present(of)).map(|of| of.entry)
    }

    /// Ends the generation of all pages. No store receives them from now on, and no page is queued again.
    pub fn end_generation(&mut self) {
        self.queue.clear();
        self.round = 0;
        self.open.iter_mut().for_each(|put| put.of = None);
    }

    /// Checks a part of M1, for the pages that puts read, and a part of M3. O(entries and open puts).
    pub fn check(
        &self,
        pool: &SwapPool,
        spans: &SpanStore,
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
        match entries.any(|entry| self.is_stored(entry) && spans.is_free(entry)) {
            true => Err("M3: a stored entry has a page"),
            false => Ok(()),
        }
    }
}

impl PrefixTree {
    /// Opens puts of the next pages to be put, at most `max`; saves to the stage are collected in `staged`. If the
    /// round has no page to put, begins the next round.
    pub(crate) fn begin_puts(&mut self, max: usize) {
        let Self { swap: Some(swap), spans, chain: Some(chain), .. } = self else { return };
        let next_move = swap.next_move();
        let (puts, pool) = (&mut swap.puts, &mut swap.pool);
        puts.staged.clear();
        let (before, end) = (puts.open.len(), PUTS_MAX.min(puts.open.len().saturating_add(max)));
        while puts.open.len() < end {
            let Some(of) = puts.pop() else { break };
            if !puts.is_present(of) || puts.is_stored(of.entry) {
                continue;
            }
            let mut page = swap.of_entry[of.entry as usize];
            let is_staged = page == NO_SWAP_PAGE;
            let save;
            if is_staged {
                let Some(stage) = puts.stage.pop() else {
                    puts.queue.push_front(of);
                    puts.round += 1;
                    return;
                };
                puts.staged.push(PageMove { device: spans.pages_of_run(of.entry, 1)[0], swap: stage });
                (page, save) = (stage, next_move);
            } else {
                pool.begin_read(page);
                save = pool.last_save(page);
            }
            puts.last += 1;
            let id = PutId(puts.last);
            puts.open.push_back(OpenPut {
                id,
                of: Some(of),
                key: chain.of(of.entry),
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

    /// Returns the saves to the stage that the backend has to make, and the number of their batch.
    pub(crate) fn staged(&mut self) -> Option<(MoveId, &[PageMove])> {
        let swap = self.swap.as_mut()?;
        if swap.puts.staged.is_empty() {
            return None;
        }
        swap.last_move = swap.next_move();
        Some((swap.last_move, &swap.puts.staged))
    }

    /// Cancels the puts whose saves to the stage have failed, and queues their entries again.
    pub(crate) fn fail_staged(&mut self) {
        let Some(swap) = &mut self.swap else { return };
        let puts = &mut swap.puts;
        let failed = |put: &OpenPut| put.is_staged && put.save == swap.last_move;
        for put in puts.open.iter().rev().filter(|put| failed(put)) {
            puts.stage.push(put.page);
            puts.queue.push_front(put.of.expect("this call opened the put"));
            puts.round += 1;
        }
        puts.open.retain(|put| !failed(put));
        puts.staged.clear();
    }

    /// Calls `sink` with the puts whose pages the store can read. All saves up to `saved` are done. Returns the number
    /// of calls.
    pub(crate) fn give_puts(&mut self, saved: MoveId, mut sink: impl FnMut(Put<'_>)) -> usize {
        let Self { swap: Some(swap), spans, chain: Some(chain), .. } = self else { return 0 };
        let (puts, mut given) = (&mut swap.puts, 0);
        for index in 0..puts.open.len() {
            let put = puts.open[index];
            // If the entry has been freed, the put's bytes are still valid, but the entry may have other tokens.
            let Some(entry) = puts.entry_of(&put).filter(|_| !put.is_given && put.save <= saved) else {
                continue;
            };
            puts.open[index].is_given = true;
            given += 1;
            let before = puts.before[entry as usize];
            let parent = (before != NONE).then(|| chain.of(before));
            let OpenPut { id, key, page, .. } = put;
            sink(Put { id, key, parent, tokens: spans.tokens_of(entry), page });
        }
        self.drop_gone_puts();
        given
    }

    /// Ends the puts that the store has not received and whose entries were freed or are of an earlier generation.
    fn drop_gone_puts(&mut self) {
        while let Some(swap) = &self.swap
            && let puts = &swap.puts
            && let Some(gone) = puts.open.iter().find(|put| !put.is_given && puts.entry_of(put).is_none())
        {
            self.end_put(gone.id, false);
        }
    }

    /// Ends a put. `ok` is set if the store has the page; otherwise its entry is queued for the next round. Returns
    /// whether the put was open.
    pub(crate) fn end_put(&mut self, id: PutId, ok: bool) -> bool {
        let Some(swap) = &mut self.swap else { return false };
        let (puts, pool) = (&mut swap.puts, &mut swap.pool);
        let Ok(index) = puts.open.binary_search_by_key(&id, |put| put.id) else { return false };
        let put = puts.open.remove(index).expect("it was found");
        match put.is_staged {
            true => puts.stage.push(put.page),
            false => pool.end_read(put.page),
        }
        if let Some(of) = put.of.filter(|&of| puts.is_present(of)) {
            match ok {
                true => puts.set_stored(of.entry),
                false => puts.push(of),
            }
        }
        puts.done += u64::from(ok);
        true
    }
}
