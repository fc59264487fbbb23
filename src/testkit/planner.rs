//! A naive planner: sequences with random pages, to drive a backend without an engine.
//!
//! It has no prefix tree and no fence, and shares pages only on `fork`. It allocates pages, leaves and rows in random
//! order, so that a backend cannot rely on an order.

use super::rng::Rng;
use super::spans::Spans;
use crate::id::{PageId, RowId, SlotId, StepId, TokenId};
use crate::layout::{PoolLayout, TableShape};
use crate::plan::{
    BatchPlan, BatchRow, Compaction, DRAFT_MAX, DraftTree, MaskRow, OwnedPlan, PageCopy, SlotMapping, TableWrite,
};

/// One sequence of a [`Planner`].
#[derive(Clone, Debug)]
pub struct Planned {
    /// Row in the page tables.
    pub row: RowId,
    /// Pages in order, in the first track.
    pub pages: Vec<PageId>,
    /// Pages of the other tracks in order; `None` where the page was released.
    further: Vec<Vec<Option<PageId>>>,
    /// Number of tokens.
    pub len: u32,
    /// Number of leading tokens that no later step computes again.
    pub fixed_len: u32,
    /// Leaves of the page tables that the row uses.
    leaves: Vec<u32>,
    /// Number of leading places whose pages belong to another sequence.
    shared: usize,
}

impl Planned {
    /// Returns the first position on one of the sequence's own pages.
    pub fn own_from(&self, page_size: u32) -> u32 {
        self.shared as u32 * page_size
    }

    /// Returns the pages of all tracks.
    pub fn all_pages(&self) -> impl Iterator<Item = PageId> + use<'_> {
        self.pages.iter().copied().chain(self.further.iter().flatten().flatten().copied())
    }

    /// Returns the pages at places that are full of tokens, in all tracks.
    pub fn whole_pages(&self, page_size: u32) -> impl Iterator<Item = PageId> + use<'_> {
        let whole = (self.len / page_size) as usize;
        let further = self.further.iter().flat_map(move |pages| &pages[..whole]);
        self.pages[..whole].iter().copied().chain(further.flatten().copied())
    }

    fn own_pages(&self) -> impl Iterator<Item = PageId> + use<'_> {
        let further = self.further.iter().flat_map(|pages| &pages[self.shared..]);
        self.pages[self.shared..].iter().copied().chain(further.flatten().copied())
    }

    /// Returns the page of a track at a place, if any.
    fn page(&self, track: u32, place: usize) -> Option<PageId> {
        match track.checked_sub(1) {
            None => Some(self.pages[place]),
            Some(index) => self.further[index as usize][place],
        }
    }
}

/// One item of a batch.
#[derive(Clone, Copy, Debug)]
pub enum Item {
    /// New tokens of a sequence.
    Extend {
        /// Index of the sequence.
        sequence: usize,
        /// Number of tokens, at least 1.
        len: u32,
    },
    /// Queries of a sequence's last tokens once more, without K and V to store.
    Requery {
        /// Index of the sequence.
        sequence: usize,
        /// Number of tokens, at most those of the sequence.
        len: u32,
    },
    /// A padding row.
    Padding {
        /// Number of padding tokens.
        len: u32,
    },
}

/// Makes plans over one pool. A sequence is identified by its index, which is never reused.
#[derive(Debug)]
pub struct Planner {
    layout: PoolLayout,
    table: TableShape,
    rng: Rng,
    free_pages: Vec<PageId>,
    free_leaves: Vec<u32>,
    free_rows: Vec<RowId>,
    sequences: Vec<Option<Planned>>,
    /// Table writes that no plan contains yet.
    writes: Vec<TableWrite>,
    step: u64,
    wide_slots: bool,
}

impl Planner {
    /// Creates a planner over an empty pool.
    pub fn new(layout: &PoolLayout, table: &TableShape, seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        let mut free_pages: Vec<_> = (0..layout.page_count()).map(PageId::new).collect();
        let mut free_leaves: Vec<_> = (0..table.leaf_count).collect();
        let mut free_rows: Vec<_> = (0..table.rows).map(RowId::new).collect();
        shuffle(&mut rng, &mut free_pages);
        shuffle(&mut rng, &mut free_leaves);
        shuffle(&mut rng, &mut free_rows);
        Self {
            layout: *layout,
            table: *table,
            wide_slots: !layout.slots_fit_i32() || rng.one_in(4),
            rng,
            free_pages,
            free_leaves,
            free_rows,
            sequences: Vec::new(),
            writes: Vec::new(),
            step: 0,
        }
    }

    /// Returns a live sequence.
    pub fn sequence(&self, index: usize) -> Option<&Planned> {
        self.sequences.get(index)?.as_ref()
    }

    /// Returns whether plans have contained all table writes.
    pub fn is_sent(&self) -> bool {
        self.writes.is_empty()
    }

    /// Returns the pages without a sequence.
    pub fn free_pages(&self) -> &[PageId] {
        &self.free_pages
    }

    /// Returns the indices of the live sequences.
    pub fn live(&self) -> Vec<usize> {
        (0..self.sequences.len()).filter(|&i| self.sequences[i].is_some()).collect()
    }

    /// Adds an empty sequence; `None` if all rows are in use.
    pub fn admit(&mut self) -> Option<usize> {
        let row = self.free_rows.pop()?;
        let further = vec![Vec::new(); self.layout.tracks() as usize - 1];
        let (pages, leaves) = (Vec::new(), Vec::new());
        let (len, fixed_len, shared) = (0, 0, 0);
        self.sequences.push(Some(Planned { row, pages, further, len, fixed_len, leaves, shared }));
        Some(self.sequences.len() - 1)
    }

    /// Adds tokens to a sequence, and the pages that these tokens need. Tests that write K and V without a step call
    /// this method directly.
    ///
    /// # Panics
    /// If the pool or the page tables are full, or the sequence is finished.
    pub fn grow(&mut self, index: usize, len: u32) {
        let sequence = self.sequences[index].as_mut().expect("it is live");
        sequence.len += len;
        while (sequence.pages.len() as u32) < sequence.len.div_ceil(self.layout.page_size()) {
            let free = &mut self.free_pages;
            let page = |_| Some(free.pop().expect("a free page"));
            push_place(sequence, page, &self.table, &mut self.free_leaves, &mut self.writes);
        }
    }

    /// Releases and returns the sequence's own pages that no token after the first `fixed_len` reads. The page tables
    /// still contain these pages.
    ///
    /// # Panics
    /// If the sequence is finished.
    pub fn release_unread(&mut self, index: usize, fixed_len: u32) -> Vec<PageId> {
        let sequence = self.sequences[index].as_mut().expect("it is live");
        sequence.fixed_len = fixed_len;
        let mut track = 1;
        let mut given = Vec::new();
        for (group, reach) in self.layout.groups().limited() {
            let first = (reach.first(fixed_len) / self.layout.page_size()) as usize;
            for _ in 0..self.layout.tracks_of(group) {
                let pages = &mut sequence.further[track - 1];
                let places = pages.iter_mut().enumerate().take(first);
                let own = places.filter_map(|(place, page)| Some((place, page.take()?)));
                given.extend(own.filter(|&(place, _)| place >= sequence.shared).map(|(_, page)| page));
                track += 1;
            }
        }
        self.free_pages.extend(&given);
        given
    }

    /// Adds a sequence with the same tokens; `None` if all rows are in use or the sequence is finished. The child
    /// shares the whole pages and needs a copy of each track's partial last page. Finish the child before the parent,
    /// which owns the shared pages.
    ///
    /// # Panics
    /// As [`Planner::grow`].
    pub fn fork(&mut self, index: usize) -> Option<(usize, Vec<PageCopy>)> {
        let parent = self.sequence(index)?.clone();
        let child = self.admit()?;
        let partial = parent.len % self.layout.page_size() != 0;
        let sequence = self.sequences[child].as_mut().expect("just admitted");
        (sequence.len, sequence.fixed_len) = (parent.len, parent.fixed_len);
        sequence.shared = parent.pages.len() - usize::from(partial);
        for place in 0..sequence.shared {
            let page = |track| parent.page(track, place);
            push_place(sequence, page, &self.table, &mut self.free_leaves, &mut self.writes);
        }
        let mut copies = Vec::new();
        if partial {
            let (free, place) = (&mut self.free_pages, sequence.shared);
            let page = |track| {
                let source = parent.page(track, place)?;
                let target = free.pop().expect("a free page");
                copies.push(PageCopy { source, target });
                Some(target)
            };
            push_place(sequence, page, &self.table, &mut self.free_leaves, &mut self.writes);
        }
        Some((child, copies))
    }

    /// Drops token `first + i` of a sequence if bit `i` of `keep` is not set, for all its tokens from `first` on.
    /// Releases the pages that are then empty.
    ///
    /// # Panics
    /// If the sequence is finished.
    pub fn compact(&mut self, index: usize, first: u32, keep: u64) -> Compaction {
        let sequence = self.sequences[index].as_mut().expect("it is live");
        sequence.len = first + keep.count_ones();
        let pages = sequence.len.div_ceil(self.layout.page_size()) as usize;
        while sequence.pages.len() > pages {
            self.free_pages.extend(sequence.pages.pop());
            let further = sequence.further.iter_mut().filter_map(|pages| pages.pop().flatten());
            self.free_pages.extend(further);
            if sequence.pages.len().is_multiple_of(self.table.leaf_pages as usize) {
                self.free_leaves.extend(sequence.leaves.pop());
            }
        }
        Compaction { row: sequence.row, first, keep }
    }

    /// Releases a sequence's row, leaves and own pages for immediate reuse.
    pub fn finish(&mut self, index: usize) {
        let Some(sequence) = self.sequences[index].take() else { return };
        self.free_rows.push(sequence.row);
        self.free_pages.extend(sequence.own_pages());
        self.free_leaves.extend(sequence.leaves);
        shuffle(&mut self.rng, &mut self.free_pages);
        shuffle(&mut self.rng, &mut self.free_leaves);
    }

    /// Returns the slot of a position in the first track.
    pub fn slot(&self, sequence: &Planned, position: u32) -> SlotId {
        self.track_slot(sequence, 0, position)
    }

    /// Returns the slot of a position in a track.
    ///
    /// # Panics
    /// If the position's page was released.
    pub fn track_slot(&self, sequence: &Planned, track: u32, position: u32) -> SlotId {
        let size = self.layout.page_size();
        let page = sequence.page(track, (position / size) as usize);
        self.layout.slot(page.expect("the sequence has the page"), position % size)
    }

    /// Extends the sequences of a batch, and returns its plan. The plan contains all table writes since the last plan.
    ///
    /// # Panics
    /// As [`Planner::grow`].
    pub fn plan(&mut self, items: &[Item]) -> OwnedPlan {
        self.plan_trees(items, &[])
    }

    /// Returns the plan of a batch with draft trees. An item of up to 64 tokens with `is_tree` becomes a random tree,
    /// or gets random masks.
    ///
    /// # Panics
    /// As [`Planner::grow`].
    pub fn plan_trees(&mut self, items: &[Item], is_tree: &[bool]) -> OwnedPlan {
        let (mut rows, mut positions) = (Vec::new(), Vec::new());
        let mut slots = vec![Vec::new(); self.layout.tracks() as usize];
        let mut tables = Vec::new();
        for item in items {
            let qo_start = positions.len() as u32;
            let (sequence, extend_len) = match *item {
                Item::Extend { sequence, len } => {
                    self.grow(sequence, len);
                    (self.sequence(sequence), len)
                }
                Item::Requery { sequence, len } => (self.sequence(sequence), len),
                Item::Padding { len } => (None, len),
            };
            let (row, kv_len) = match sequence {
                Some(sequence) => (sequence.row, sequence.len),
                // This row does not exist, so a backend must not read it.
                None => (RowId::new(u32::MAX), 0),
            };
            tables.push(sequence.map_or(Vec::new(), |sequence| sequence.pages.clone()));
            rows.push(BatchRow { row, qo_start, extend_len, kv_len });
            for i in 0..extend_len {
                let position = (kv_len + i).saturating_sub(extend_len);
                positions.push(position);
                let stored = sequence.filter(|_| matches!(item, Item::Extend { .. }));
                for (track, slots) in (0..).zip(&mut slots) {
                    let slot = |sequence| self.track_slot(sequence, track, position).raw() as i64;
                    slots.push(stored.map_or(-1, slot));
                }
            }
        }
        let page_size = self.layout.page_size();
        let whole = |(row, pages): (&BatchRow, &Vec<PageId>)| {
            let computed = row.kv_len.saturating_sub(row.extend_len) / page_size;
            pages[..pages.len().min(computed as usize)].to_vec()
        };
        let tables: Vec<_> = rows.iter().zip(&tables).map(whole).collect();
        let tables: Vec<_> = tables.iter().map(Vec::as_slice).collect();
        let mut masks = vec![0; positions.len()];
        for (row, _) in rows.iter().zip(is_tree).filter(|(_, is_tree)| **is_tree) {
            if row.kv_len > 0 && (1..=DRAFT_MAX).contains(&row.extend_len) {
                let new = row.qo_start as usize..(row.qo_start + row.extend_len) as usize;
                self.draw_tree(row, &mut positions[new.clone()], &mut masks[new]);
            }
        }
        if masks.iter().all(|&mask| mask == 0) {
            masks.clear();
        }
        self.own(&rows, &positions, &slots, &Spans::of(&tables, page_size), &masks)
    }

    /// Makes a random tree for a row, or random masks.
    fn draw_tree(&mut self, row: &BatchRow, positions: &mut [u32], masks: &mut [u64]) {
        let start = row.kv_len - row.extend_len;
        if self.rng.one_in(2) {
            let parent = |token: u32| match self.rng.below(4) {
                0 => self.rng.below(u64::from(token) + 1) as u32,
                _ => token.saturating_sub(self.rng.within(1, 3) as u32),
            };
            let parents: Vec<_> = (0..row.extend_len).map(parent).collect();
            let mut tree = DraftTree::new();
            tree.set(start, &parents).expect("parents precede children");
            positions.copy_from_slice(tree.positions());
            masks.copy_from_slice(tree.masks());
            return;
        }
        let bits = MaskRow::new(row.kv_len, row.extend_len);
        for (token, mask) in (0..).zip(masks) {
            let (some, few) = (self.rng.bits(), self.rng.bits());
            let drawn = some & self.rng.pick(&[u64::MAX, few, 0]);
            *mask = drawn & bits.most(token) | bits.own(token);
        }
    }

    fn own(
        &mut self,
        rows: &[BatchRow],
        positions: &[u32],
        slots: &[Vec<i64>],
        shared: &Spans,
        masks: &[u64],
    ) -> OwnedPlan {
        self.step += 1;
        let tokens: Vec<_> = positions.iter().map(|&p| TokenId::new(p + 7)).collect();
        let slots = slots.concat();
        let narrow: Vec<_> = slots.iter().map(|&slot| slot as i32).collect();
        let (first, narrow_first) = (slots.split_at(tokens.len()), narrow.split_at(tokens.len()));
        let [slot_mapping, track_slots] = if self.wide_slots {
            [first.0, first.1].map(SlotMapping::I64)
        } else {
            [narrow_first.0, narrow_first.1].map(SlotMapping::I32)
        };
        let writes = latest(std::mem::take(&mut self.writes));
        OwnedPlan::from(&BatchPlan {
            step: StepId::new(self.step),
            rows,
            tokens: &tokens,
            positions,
            slot_mapping,
            track_slots,
            table_writes: &writes,
            shared: shared.plan(),
            masks,
        })
    }
}

/// Adds a place to a sequence and to its row. `page` returns a track's page at this place, if the track has one.
fn push_place(
    sequence: &mut Planned,
    mut page: impl FnMut(u32) -> Option<PageId>,
    table: &TableShape,
    free_leaves: &mut Vec<u32>,
    writes: &mut Vec<TableWrite>,
) {
    let index = sequence.pages.len() as u32;
    if index.is_multiple_of(table.leaf_pages) {
        let leaf = free_leaves.pop().expect("a free leaf");
        sequence.leaves.push(leaf);
        let (index, value) = (table.directory_word(sequence.row, index), leaf * table.tracks);
        writes.push(TableWrite { index, value });
    }
    let block = sequence.leaves[(index / table.leaf_pages) as usize] * table.tracks;
    for track in 0..table.tracks {
        let page = page(track);
        if let Some(page) = page {
            let index = table.page_word(block + track, index);
            writes.push(TableWrite { index, value: page.raw() });
        }
        match track.checked_sub(1) {
            None => sequence.pages.push(page.expect("the first track keeps every page")),
            Some(index) => sequence.further[index as usize].push(page),
        }
    }
}

/// Returns the last write of each word.
fn latest(mut writes: Vec<TableWrite>) -> Vec<TableWrite> {
    writes.reverse();
    writes.sort_by_key(|write| write.index);
    writes.dedup_by_key(|write| write.index);
    writes
}

/// Shuffles items.
pub fn shuffle<T>(rng: &mut Rng, items: &mut [T]) {
    for i in (1..items.len()).rev() {
        items.swap(i, rng.below(i as u64 + 1) as usize);
    }
}
