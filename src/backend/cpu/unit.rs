//! Splits a call of attention into units of work, and contains the data that the units share.

use std::num::NonZeroUsize;
use std::ops::Range;

use half::bf16;

use super::math::Line;
use super::rows::CpuRows;
use super::scales::Scales;
use super::simd::Isa;
use crate::backend::{Attend, Selection, sparse};
use crate::id::LayerId;
use crate::layout::{LayerPlace, PoolLayout, Strides, TableShape};
use crate::plan::{BatchPlan, BatchRow};

/// Approximate number of query rows of a unit.
const UNIT_ROWS: u32 = 32;

/// Number of positions of a segment. Each segment is summed separately, and segments are joined in order, so several
/// threads can share the row of one long context without changing its bits.
const SEGMENT: u32 = 1024;

/// Number of multiplications that justify a thread. They take about 100 us.
const THREAD_WORK: u64 = 1 << 21;

/// One call of attention: the data that all units share.
pub(super) struct Job<'a, T> {
    pub pool: &'a [T],
    /// The whole pool as f32, for reading the scales that it contains.
    pub numbers: &'a [f32],
    /// Rotary part of quantised latent rows: its strides, and the whole pool as bf16.
    pub rope: Option<(&'a Strides, &'a [bf16])>,
    pub scales: &'a Scales,
    pub layout: &'a PoolLayout,
    pub layer: LayerId,
    pub place: LayerPlace,
    /// Strides of K, or of latent rows.
    pub k: Strides,
    pub v: Strides,
    pub table: &'a TableShape,
    pub words: &'a [u32],
    pub plan: &'a BatchPlan<'a>,
    pub attend: &'a Attend,
    /// `[q_heads]`
    pub sinks: Option<&'a [f32]>,
    /// Lists of positions for rows with one new token, if reads are sparse.
    pub selection: Option<Selection<&'a [u32]>>,
    pub q: CpuRows<'a>,
    pub q_stride: usize,
    /// Maximum number of threads.
    pub threads: NonZeroUsize,
    pub isa: Isa,
}

/// A unit of work: some query tokens of one sequence, with the query heads of some kv heads. Its query rows are ordered
/// by kv head, then by token, then by query head.
#[derive(Clone, Copy)]
pub(super) struct Unit {
    pub row: BatchRow,
    /// First query token, relative to the sequence's first one in this step.
    first: u32,
    /// Number of query tokens.
    pub tokens: u32,
    /// First kv head.
    pub first_head: u32,
    /// Number of kv heads; 1 if the unit has a list.
    pub heads: u32,
    /// Start and end of the slots that the unit reads, numbered as in [`Unit::sees`]: all that its tokens see, or one
    /// segment.
    pub reads: [u32; 2],
    /// Whether the previous unit has the same query rows.
    pub continues: bool,
    /// Whether the next unit has the same query rows.
    pub goes_on: bool,
    /// Index of the unit's list of positions, if it has one.
    list: Option<usize>,
    /// Mask of the unit's only token, if the row is a draft tree; else 0.
    mask: u64,
}

impl Unit {
    /// Returns the index of the unit's first row in q and out.
    pub fn first_row(&self) -> usize {
        self.row.qo_start as usize + self.first as usize
    }

    /// Returns the slots that query token `i` of the unit sees. The range counts only visible slots, in order. A token
    /// of a draft tree does not see all slots of the row; [`Unit::table_index`] returns the position of a visible one.
    pub fn sees(&self, i: u32, attend: &Attend) -> Range<u32> {
        if self.mask != 0 {
            return 0..self.row.kv_len.saturating_sub(u64::BITS) + self.mask.count_ones();
        }
        let end = self.row.kv_len - self.row.extend_len + self.first + i + 1;
        attend.first_seen(end - 1)..end
    }

    pub fn is_tree(&self) -> bool {
        self.mask != 0
    }

    /// Returns the position of visible slot `n` in the row's page table.
    pub fn table_index(&self, n: u32) -> u32 {
        let masked = self.row.kv_len.saturating_sub(u64::BITS);
        if self.mask == 0 || n < masked {
            return n;
        }
        // The oldest slots have the highest bits.
        let mut rest = self.mask;
        for _ in masked..n {
            rest &= !(1 << rest.ilog2());
        }
        self.row.kv_len - 1 - rest.ilog2()
    }

    /// Returns the slots that the unit reads, split into segments.
    pub fn segments(&self) -> impl Iterator<Item = Range<u32>> + use<> {
        segments(self.reads[0]..self.reads[1])
    }

    /// Returns the range from the first to the last slot that some query token of the unit sees.
    fn sees_in_all(&self, attend: &Attend) -> Range<u32> {
        self.sees(0, attend).start..self.sees(self.tokens - 1, attend).end
    }

    /// Returns the number of query rows for each kv head.
    pub fn rows_per_head(&self, group: usize) -> usize {
        self.tokens as usize * group
    }

    pub fn row_count(&self, group: usize) -> usize {
        self.heads as usize * self.rows_per_head(group)
    }

    pub fn has_list(&self) -> bool {
        self.list.is_some()
    }

    /// Returns each query row: the index of its token in q and out, and its query head.
    pub fn rows(self, group: usize) -> impl Iterator<Item = (usize, usize)> {
        let tokens = self.first_row()..self.first_row() + self.tokens as usize;
        let heads = self.first_head as usize..(self.first_head + self.heads) as usize;
        heads.flat_map(move |kv_head| {
            tokens
                .clone()
                .flat_map(move |token| (kv_head * group..(kv_head + 1) * group).map(move |head| (token, head)))
        })
    }
}

/// Splits a range at multiples of [`SEGMENT`].
fn segments(range: Range<u32>) -> impl Iterator<Item = Range<u32>> {
    let first = range.start / SEGMENT..range.end.div_ceil(SEGMENT);
    first.map(move |at| {
        let start = at * SEGMENT;
        start.max(range.start)..range.end.min(start.saturating_add(SEGMENT))
    })
}

impl<T> Job<'_, T> {
    /// Returns the number of query heads of one kv head.
    pub fn group(&self) -> usize {
        (self.attend.q_heads / self.layout.kv_heads()) as usize
    }

    /// Returns the number of [`Line`]s of a head of K.
    pub fn lines(&self) -> usize {
        (self.layout.head_dim() as usize * size_of::<f32>()).div_ceil(size_of::<Line>())
    }

    /// Returns the number of [`Line`]s of a head of V.
    pub fn value_lines(&self) -> usize {
        (self.layout.value_dim() as usize * size_of::<f32>()).div_ceil(size_of::<Line>())
    }

    /// Returns all units except those of padding rows, in the order of query rows. In a draft tree each token has its
    /// own units.
    ///
    /// A unit of few query tokens has several kv heads, because the heads of a slot are adjacent and sequential reads
    /// are fastest. It has fewer heads if some threads would otherwise have no work. If a row of few query tokens is a
    /// large part of the work, each of its segments is a unit, so several threads share the row. The results are the
    /// same in all cases.
    pub fn units(&self) -> impl Iterator<Item = Unit> + Send + use<'_, T> {
        let (group, kv_heads) = (self.group() as u32, self.layout.kv_heads());
        let block = (UNIT_ROWS / group).max(1);
        let (plan, attend) = (self.plan, self.attend);
        let rows = plan.rows.iter().enumerate().filter(|(_, row)| row.kv_len > 0);
        let rows = rows.map(move |(index, row)| {
            let masks = plan.tree(row);
            (index, row, masks.unwrap_or_default(), if masks.is_some() { 1 } else { block })
        });
        let pairs = move |row: &BatchRow| u64::from(row.extend_len) * u64::from(row.kv_len.min(attend.reach()));
        let all_pairs = rows.clone().fold(0_u64, |sum, (_, row, ..)| sum.saturating_add(pairs(row)));
        let shares = 2 * self.threads() as u64;
        let is_cut = move |row: &BatchRow| {
            let is_large = pairs(row).saturating_mul(2 * shares) > all_pairs;
            shares > 2 && row.extend_len.saturating_mul(group) <= UNIT_ROWS && is_large
        };
        let blocks = rows.clone().map(|(_, row, _, block)| {
            // All tokens of a unit share one read of a segment, so their pairs count as one segment.
            let segments = pairs(row) / u64::from(SEGMENT * row.extend_len.clamp(1, block));
            let parts = if is_cut(row) { segments } else { 0 };
            u64::from(row.extend_len.div_ceil(block)).max(parts)
        });
        let blocks: u64 = blocks.sum();
        let most = match shares {
            2 => kv_heads,
            _ => (blocks * u64::from(kv_heads) / shares).clamp(1, kv_heads.into()) as u32,
        };
        let has_selection = self.selection.is_some();
        rows.flat_map(move |(index, &row, masks, block)| {
            let selects = has_selection && sparse::has_lists(plan, &row);
            let most = if selects { 1 } else { most };
            (0..row.extend_len).step_by(block as usize).flat_map(move |first| {
                let mask = masks.get(first as usize).copied().unwrap_or(0);
                let tokens = block.min(row.extend_len - first);
                let step = (UNIT_ROWS / (tokens * group)).clamp(1, most);
                (0..kv_heads).step_by(step as usize).flat_map(move |first_head| {
                    let heads = step.min(kv_heads - first_head);
                    let list = index * kv_heads as usize + first_head as usize;
                    let list = selects.then_some(list);
                    let (reads, continues, goes_on) = ([0; 2], false, false);
                    let whole = Unit { row, first, tokens, first_head, heads, reads, continues, goes_on, mask, list };
                    let all = whole.sees_in_all(attend);
                    let is_cut = !selects && is_cut(&row);
                    let parts = segments(if is_cut { all.clone() } else { 0..0 });
                    parts.chain((!is_cut).then_some(all.clone())).map(move |part| Unit {
                        reads: [part.start, part.end],
                        continues: part.start > all.start,
                        goes_on: part.end < all.end,
                        ..whole
                    })
                })
            })
        })
    }

    /// Returns the visible positions of a unit's list, if it has one.
    pub fn listed(&self, unit: Unit) -> Option<impl Iterator<Item = u32>> {
        let (selection, list) = (self.selection?, unit.list?);
        let top = selection.top as usize;
        let seen = unit.sees(0, self.attend);
        let listed = &selection.positions[list * top..(list + 1) * top];
        Some(listed.iter().copied().filter(move |position| seen.contains(position)))
    }

    /// Returns the number of threads that the work justifies.
    pub fn threads(&self) -> usize {
        let dims = u64::from(self.layout.head_dim()) + u64::from(self.layout.value_dim());
        let row_work = u64::from(self.attend.q_heads) * dims;
        let work = self.plan.rows.iter().fold(0_u64, |sum, row| {
            let seen = row.kv_len.min(self.attend.reach());
            let pairs = u64::from(row.extend_len) * u64::from(seen);
            sum.saturating_add(pairs.saturating_mul(row_work))
        });
        let worth = usize::try_from(work / THREAD_WORK).unwrap_or(usize::MAX);
        worth.clamp(1, self.threads.get())
    }
}
