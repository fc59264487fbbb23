//! A naive plan maker: sequences with random pages, so that a backend can be driven without an engine.
//!
//! It shares pages only where told to (`fork`), knows no prefixes and no fence, and hands out pages, chunks and rows in
//! random order, so that nothing in a plan is where a backend might guess it to be.

use super::rng::Rng;
use super::spans::Spans;
use crate::id::{PageId, RowId, SlotId, StepId, TokenId};
use crate::layout::{PoolLayout, TableShape};
use crate::plan::{
    BatchPlan, BatchRow, Compaction, DRAFT_MAX, DraftTree, MaskRow, OwnedPlan, PageCopy,
    SlotMapping, TableWrite,
};

/// One sequence of a [`Planner`].
#[derive(Clone, Debug)]
pub struct Planned {
    /// Its row in the page tables.
    pub row: RowId,
    /// Its pages in order.
    pub pages: Vec<PageId>,
    /// Its tokens.
    pub len: u32,
    /// Chunks of the page tables that its row uses.
    chunks: Vec<u32>,
    /// Leading pages that it does not own.
    shared: usize,
}

impl Planned {
    /// The first place in it that is on a page of its own.
    pub fn own_from(&self, page_size: u32) -> u32 {
        self.shared as u32 * page_size
    }
}

/// One item of a batch.
#[derive(Clone, Copy, Debug)]
pub enum Item {
    /// New tokens of a sequence.
    Extend {
        /// Index of the sequence.
        sequence: usize,
        /// Tokens, at least 1.
        len: u32,
    },
    /// The last tokens of a sequence once more: queries that attend, without K and V to store.
    Again {
        /// Index of the sequence.
        sequence: usize,
        /// Tokens, at most those it has.
        len: u32,
    },
    /// A padding row.
    Padding {
        /// Its padding tokens.
        len: u32,
    },
}

/// Makes plans over one pool. Sequences are named by their index, which is never reused.
#[derive(Debug)]
pub struct Planner {
    layout: PoolLayout,
    table: TableShape,
    rng: Rng,
    free_pages: Vec<PageId>,
    free_chunks: Vec<u32>,
    free_rows: Vec<RowId>,
    sequences: Vec<Option<Planned>>,
    /// Changes that no plan has carried yet.
    writes: Vec<TableWrite>,
    step: u64,
    wide_slots: bool,
}

impl Planner {
    /// A planner over an empty pool.
    pub fn new(layout: &PoolLayout, table: &TableShape, seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        let mut free_pages: Vec<_> = (0..layout.page_count()).map(PageId::new).collect();
        let mut free_chunks: Vec<_> = (0..table.chunk_count).collect();
        let mut free_rows: Vec<_> = (0..table.rows).map(RowId::new).collect();
        shuffle(&mut rng, &mut free_pages);
        shuffle(&mut rng, &mut free_chunks);
        shuffle(&mut rng, &mut free_rows);
        Self {
            layout: *layout,
            table: *table,
            wide_slots: !layout.slots_fit_i32() || rng.one_in(4),
            rng,
            free_pages,
            free_chunks,
            free_rows,
            sequences: Vec::new(),
            writes: Vec::new(),
            step: 0,
        }
    }

    /// A live sequence.
    pub fn sequence(&self, index: usize) -> Option<&Planned> {
        self.sequences.get(index)?.as_ref()
    }

    /// Whether plans have carried all changes of the page tables.
    pub fn is_sent(&self) -> bool {
        self.writes.is_empty()
    }

    /// Indices of the live sequences.
    pub fn live(&self) -> Vec<usize> {
        (0..self.sequences.len()).filter(|&i| self.sequences[i].is_some()).collect()
    }

    /// A new sequence without tokens; none if all rows are taken.
    pub fn admit(&mut self) -> Option<usize> {
        let row = self.free_rows.pop()?;
        let (pages, chunks) = (Vec::new(), Vec::new());
        self.sequences.push(Some(Planned { row, pages, len: 0, chunks, shared: 0 }));
        Some(self.sequences.len() - 1)
    }

    /// Gives tokens to a sequence that no step computes: their K and V are brought in otherwise.
    ///
    /// # Panics
    /// If the pool or the page tables are full, or the sequence is finished.
    pub fn grow(&mut self, index: usize, len: u32) {
        let sequence = self.sequences[index].as_mut().expect("a live sequence");
        sequence.len += len;
        while (sequence.pages.len() as u32) < sequence.len.div_ceil(self.layout.page_size()) {
            let page = self.free_pages.pop().expect("a free page");
            push_page(sequence, page, &self.table, &mut self.free_chunks, &mut self.writes);
        }
    }

    /// A sequence with the same tokens: shares the whole pages and wants a copy of the last, partial one; none if all
    /// rows are taken. What it shares must outlive it: finish the child first.
    ///
    /// # Panics
    /// As [`Planner::grow`].
    pub fn fork(&mut self, index: usize) -> Option<(usize, Option<PageCopy>)> {
        let parent = self.sequence(index)?.clone();
        let child = self.admit()?;
        let partial = parent.len % self.layout.page_size() != 0;
        let sequence = self.sequences[child].as_mut().expect("just admitted");
        sequence.len = parent.len;
        sequence.shared = parent.pages.len() - usize::from(partial);
        for &page in &parent.pages[..sequence.shared] {
            push_page(sequence, page, &self.table, &mut self.free_chunks, &mut self.writes);
        }
        if !partial {
            return Some((child, None));
        }
        let source = parent.pages[sequence.shared];
        let target = self.free_pages.pop().expect("a free page");
        push_page(sequence, target, &self.table, &mut self.free_chunks, &mut self.writes);
        Some((child, Some(PageCopy { source, target })))
    }

    /// Keeps of a sequence's last tokens those of `keep`, from place `first` on, and gives back the pages behind.
    ///
    /// # Panics
    /// If the sequence is finished.
    pub fn compact(&mut self, index: usize, first: u32, keep: u64) -> Compaction {
        let sequence = self.sequences[index].as_mut().expect("a live sequence");
        sequence.len = first + keep.count_ones();
        let pages = sequence.len.div_ceil(self.layout.page_size()) as usize;
        while sequence.pages.len() > pages {
            self.free_pages.extend(sequence.pages.pop());
            if sequence.pages.len().is_multiple_of(self.table.chunk_pages as usize) {
                self.free_chunks.extend(sequence.chunks.pop());
            }
        }
        Compaction { row: sequence.row, first, keep }
    }

    /// Gives a sequence's row, chunks and own pages back, to be reused at once.
    pub fn finish(&mut self, index: usize) {
        let Some(sequence) = self.sequences[index].take() else { return };
        self.free_rows.push(sequence.row);
        self.free_chunks.extend(sequence.chunks);
        self.free_pages.extend(&sequence.pages[sequence.shared..]);
        shuffle(&mut self.rng, &mut self.free_pages);
        shuffle(&mut self.rng, &mut self.free_chunks);
    }

    /// The slot of a position.
    pub fn slot(&self, sequence: &Planned, position: u32) -> SlotId {
        let size = self.layout.page_size();
        self.layout.slot(sequence.pages[(position / size) as usize], position % size)
    }

    /// The plan of a batch; sequences grow by it. Carries all changes of the page tables since the last plan.
    ///
    /// # Panics
    /// As [`Planner::grow`].
    pub fn plan(&mut self, items: &[Item]) -> OwnedPlan {
        self.plan_trees(items, &[])
    }

    /// [`Planner::plan`], where an item of up to 64 tokens for which `is_tree` says so is a random tree, or sees
    /// whatever random masks let it.
    ///
    /// # Panics
    /// As [`Planner::grow`].
    pub fn plan_trees(&mut self, items: &[Item], is_tree: &[bool]) -> OwnedPlan {
        let (mut rows, mut positions, mut slots) = (Vec::new(), Vec::new(), Vec::new());
        let mut tables = Vec::new();
        for item in items {
            let qo_start = positions.len() as u32;
            let (sequence, extend_len) = match *item {
                Item::Extend { sequence, len } => {
                    self.grow(sequence, len);
                    (self.sequence(sequence), len)
                }
                Item::Again { sequence, len } => (self.sequence(sequence), len),
                Item::Padding { len } => (None, len),
            };
            let (row, kv_len) = match sequence {
                Some(sequence) => (sequence.row, sequence.len),
                // A row that does not exist: nobody may look at it.
                None => (RowId::new(u32::MAX), 0),
            };
            tables.push(sequence.map_or(Vec::new(), |sequence| sequence.pages.clone()));
            rows.push(BatchRow { row, qo_start, extend_len, kv_len });
            for i in 0..extend_len {
                let position = (kv_len + i).saturating_sub(extend_len);
                positions.push(position);
                slots.push(match (item, sequence) {
                    (Item::Extend { .. }, Some(sequence)) => {
                        self.slot(sequence, position).raw() as i64
                    }
                    _ => -1,
                });
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

    /// A random tree for a row, or random masks.
    fn draw_tree(&mut self, row: &BatchRow, positions: &mut [u32], masks: &mut [u64]) {
        let start = row.kv_len - row.extend_len;
        if self.rng.one_in(2) {
            let parent = |token: u32| match self.rng.below(4) {
                0 => self.rng.below(u64::from(token) + 1) as u32,
                _ => token.saturating_sub(self.rng.within(1, 3) as u32),
            };
            let parents: Vec<_> = (0..row.extend_len).map(parent).collect();
            let mut tree = DraftTree::new();
            tree.set(start, &parents).expect("parents stand before");
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
        slots: &[i64],
        shared: &Spans,
        masks: &[u64],
    ) -> OwnedPlan {
        self.step += 1;
        let tokens: Vec<_> = positions.iter().map(|&p| TokenId::new(p + 7)).collect();
        let narrow: Vec<_> = slots.iter().map(|&slot| slot as i32).collect();
        let writes = latest(std::mem::take(&mut self.writes));
        OwnedPlan::from(&BatchPlan {
            step: StepId::new(self.step),
            rows,
            tokens: &tokens,
            positions,
            slot_mapping: match self.wide_slots {
                true => SlotMapping::I64(slots),
                false => SlotMapping::I32(&narrow),
            },
            track_slots: SlotMapping::I32(&[]),
            table_writes: &writes,
            shared: shared.plan(),
            masks,
        })
    }
}

/// Adds a page to a sequence and to its row.
fn push_page(
    sequence: &mut Planned,
    page: PageId,
    table: &TableShape,
    free_chunks: &mut Vec<u32>,
    writes: &mut Vec<TableWrite>,
) {
    let index = sequence.pages.len() as u32;
    if index.is_multiple_of(table.chunk_pages) {
        let chunk = free_chunks.pop().expect("a free chunk");
        sequence.chunks.push(chunk);
        writes.push(TableWrite { index: table.directory_word(sequence.row, index), value: chunk });
    }
    let chunk = sequence.chunks[(index / table.chunk_pages) as usize];
    writes.push(TableWrite { index: table.page_word(chunk, index), value: page.raw() });
    sequence.pages.push(page);
}

/// The last write of each word, so that their order does not matter.
fn latest(mut writes: Vec<TableWrite>) -> Vec<TableWrite> {
    writes.reverse();
    writes.sort_by_key(|write| write.index);
    writes.dedup_by_key(|write| write.index);
    writes
}

/// A random order.
pub fn shuffle<T>(rng: &mut Rng, items: &mut [T]) {
    for i in (1..items.len()).rev() {
        items.swap(i, rng.below(i as u64 + 1) as usize);
    }
}
