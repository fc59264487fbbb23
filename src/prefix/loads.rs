//! Loads: entries and cells in use, whose pages are in swap memory alone, get device pages.
//!
//! A sequence whose lock's path has swap-only entries waits: its page table lacks their pages until they are loaded. A
//! [`LoadBatch`] is the load that one call makes. `system/load.rs` builds and ends it; in between, the engine passes
//! its moves to the backend. Entries and cells also get device pages from a sequence that has computed them.
//!
//! Not here: which pages a load gets (`system/load.rs`), moves to swap memory (`evict.rs`, `saves.rs`).

use crate::event::Medium;
use crate::id::{CellId, MoveId, NodeKey, PageId, PrefixLock, SeqKey};
use crate::memory::{Memory, OutOfMemory};
use crate::plan::PageMove;

use super::PrefixTree;
use super::nodes::{NO_PAGE, Sides};

/// What a load brings to the device.
#[derive(Clone, Copy)]
pub(crate) enum Part {
    /// The last entries of a node, which are in swap memory alone, and their number.
    Entries(NodeKey, u32),
    Cell(CellId),
}

/// The sequences that wait for a load, the entries and cells that they lack, and the moves of the pages.
pub(crate) struct LoadBatch {
    /// Identifies the load in the nodes and cells that belong to it.
    number: u64,
    /// Each sequence, with the end of its parts. A part belongs to the first sequence that lacks it.
    seqs: Vec<(SeqKey, u32)>,
    parts: Vec<Part>,
    moves: Vec<PageMove>,
}

impl LoadBatch {
    /// Creates an empty batch for at most `rows` sequences and `page_count` pages.
    ///
    /// # Errors
    /// The allocation that failed.
    pub fn new(page_count: u32, rows: u32, memory: &mut Memory) -> Result<Self, OutOfMemory> {
        let (parts, moves) = (memory.reserved(page_count.into())?, memory.reserved(page_count.into())?);
        Ok(Self { number: 0, seqs: memory.reserved(rows.into())?, parts, moves })
    }

    /// Removes everything, and sets the number of the next load.
    fn restart(&mut self, number: u64) {
        self.number = number;
        self.seqs.clear();
        self.parts.clear();
        self.moves.clear();
    }

    pub fn is_empty(&self) -> bool {
        self.seqs.is_empty()
    }

    /// Adds a part. A load of more parts than pages is only counted, because no device has the pages for it.
    fn push_part(&mut self, part: Part) {
        if self.parts.len() < self.parts.capacity() {
            self.parts.push(part);
        }
    }

    /// Adds a sequence, whose parts are those after the last sequence.
    pub fn push_sequence(&mut self, seq: SeqKey) {
        self.seqs.push((seq, self.parts.len() as u32));
    }

    /// Returns the moves for the backend.
    pub fn moves(&self) -> &[PageMove] {
        &self.moves
    }

    /// Returns the device pages that the load fills.
    pub fn device_pages(&self) -> impl Iterator<Item = PageId> {
        self.moves.iter().map(|load| load.device)
    }

    /// Returns each sequence with its parts.
    pub fn sequences(&self) -> impl Iterator<Item = (SeqKey, &[Part])> {
        let mut start = 0;
        self.seqs
            .iter()
            .map(move |&(seq, end)| (seq, &self.parts[std::mem::replace(&mut start, end as usize)..end as usize]))
    }
}

impl PrefixTree {
    /// Begins a load. O(1).
    pub(crate) fn begin_load(&mut self, load: &mut LoadBatch) {
        load.restart(self.ages.as_mut().expect("there is swap memory").next(1));
    }

    /// Adds the swap-only entries of a lock's path of `pages` pages to a load, then the swap-only cells in its tails,
    /// unless the load has them. Returns the number of pages added. O(nodes with swap-only entries, and tails).
    pub(crate) fn claim(&mut self, lock: &PrefixLock, pages: u32, load: &mut LoadBatch) -> u32 {
        let Self { nodes, ages: Some(ages), cells, .. } = self else { return 0 };
        let mut count = 0;
        for (node, swap_only) in nodes.swap_only(nodes.end_of(lock.node())) {
            if !ages.claim(node, load.number) {
                break;
            }
            load.push_part(Part::Entries(node, swap_only));
            count += swap_only;
        }
        let Some(cells) = cells else { return count };
        let limits = *cells.limits();
        for tail in nodes.lock_tails(&limits, lock, pages) {
            let cell = cells.at(tail.held.group, tail.entry);
            if cells.claim(cell, load.number) {
                load.push_part(Part::Cell(cell));
                count += cells.tracks(cell);
            }
        }
        count
    }

    /// Assigns device pages to the parts of a load, the deepest entry of a node first, and writes the moves. O(pages).
    pub(crate) fn assign(&mut self, load: &mut LoadBatch, mut pages: &[PageId]) {
        let LoadBatch { parts, moves, .. } = load;
        for part in parts {
            match *part {
                Part::Entries(node, count) => {
                    let Self { nodes, swap: Some(swap), .. } = self else { return };
                    let entries = nodes.entries(node);
                    nodes.each_entry_back(node, entries - count..entries, |entry, page| {
                        *page = *pages.split_off_first().expect("they were counted");
                        moves.push(PageMove { device: *page, swap: swap.of_entry[entry as usize] });
                    });
                }
                Part::Cell(cell) => self.cells_mut().assign(cell, &mut pages, moves),
            }
        }
    }

    /// Ends the load of some parts, which lie on the path of a lock and in its tails: frees their swap pages. If the
    /// load failed, detaches the assigned device pages instead. O(pages).
    pub(crate) fn end_load(&mut self, lock: &PrefixLock, parts: &[Part], failed: bool) {
        for part in parts {
            match *part {
                Part::Entries(node, count) if failed => {
                    let entries = self.nodes.entries(node);
                    self.nodes.each_entry_back(node, entries - count..entries, |_, page| *page = NO_PAGE);
                }
                Part::Entries(node, count) => {
                    self.swap_mut().counts.loaded += u64::from(count);
                    self.set_loaded(node, count);
                }
                Part::Cell(cell) if failed => self.cells_mut().unassign(cell),
                Part::Cell(cell) => {
                    let Self { cells: Some(cells), swap: Some(swap), .. } = self else { return };
                    swap.counts.loaded += u64::from(cells.tracks(cell));
                    cells.set_loaded(cell, swap);
                    self.epoch += 1;
                }
            }
        }
        self.emit_loaded(lock);
    }

    /// Emits that entries have moved to the device, and clears the list of their nodes. The list begins with the
    /// deepest node.
    fn emit_loaded(&mut self, lock: &PrefixLock) {
        let mut nodes = std::mem::take(&mut self.swap_mut().loaded_nodes);
        if lock.scope().generation == self.generation {
            let places = |tree: &Self, (node, count): (NodeKey, u32)| {
                let end = tree.nodes.entries(node);
                (node, end - count..end)
            };
            for &one in nodes.iter().rev() {
                let (node, places) = places(self, one);
                self.emit_copied(node, Medium::Device, places);
            }
            for &one in &nodes {
                let (node, places) = places(self, one);
                self.emit_removed(node, Medium::Swap, places);
            }
        }
        nodes.clear();
        self.swap_mut().loaded_nodes = nodes;
    }

    /// Records that the last `count` entries of a node in use, which were swap-only, are on the device. Their device
    /// pages are already attached.
    fn set_loaded(&mut self, node: NodeKey, count: u32) {
        let Self { nodes, swap: Some(swap), size, .. } = self else { return };
        assert!(swap.saves.is_empty(), "the backend has received the saves");
        let entries = nodes.entries(node);
        *nodes.sides_mut(node) = Sides { device: entries, swap_start: entries };
        nodes.each_entry_back(node, entries - count..entries, |entry, _| swap.drop_page(entry));
        swap.loaded_nodes.push((node, count));
        size.protected += count;
        self.epoch += 1;
    }

    /// Attaches a sequence's pages to the swap-only entries of a lock's path. The last of `pages` is for the last entry
    /// of the path. Returns the number of these entries. O(entries).
    pub(super) fn load_computed(&mut self, lock: &PrefixLock, pages: &[PageId]) -> u32 {
        let (mut at, mut rest) = (self.nodes.end_of(lock.node()), pages);
        loop {
            let Some((node, count)) = self.nodes.swap_only(at).next() else { break };
            let entries = self.nodes.entries(node);
            self.nodes.each_entry_back(node, entries - count..entries, |_, page| {
                *page = *rest.split_off_last().expect("the path was walked");
            });
            self.set_loaded(node, count);
            at = self.nodes.end_of(self.nodes.link[node].parent);
        }
        self.emit_loaded(lock);
        (pages.len() - rest.len()) as u32
    }

    /// Returns the last load of these pages, of the pages of a lock's path of `pages` pages, and of the cells in its
    /// tails; `None` if all these loads are known to be done. O(pages).
    pub(crate) fn last_load(
        &self,
        lock: &PrefixLock,
        pages: u32,
        others: impl Iterator<Item = PageId>,
    ) -> Option<MoveId> {
        let end = self.nodes.end_of(lock.node());
        let path = self.nodes.up(end).flat_map(|(node, _)| self.nodes.pages(node)).flat_map(|(_, pages)| pages);
        let tails = self.tails(end, pages).filter(|cell| cell.is_some());
        let tails = tails.flat_map(|cell| self.cells().pages(cell));
        self.swap().last_load(others.chain(path.chain(tails).copied()))
    }
}
