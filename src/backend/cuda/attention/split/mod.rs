//! Splits a step's attention into equal shares for a fixed number of CTAs. Pure arithmetic.
//!
//! Two kernels share a step. A decode kernel (`decode.rs`) takes sequences with few query rows: `extend_len * group` up
//! to one of [`DECODE_ROWS`], by the step's [width](SplitShape::width). It reads each token once for all query rows of
//! a kv head, and is memory-bound. The extend kernel (`extend.rs`) takes the other sequences, and draft trees that the
//! decode kernel does not support; it is compute-bound. Both kernels have a fixed grid and read this module's output
//! from memory, so a captured graph can be replayed for other lengths and page tables. The cost is O(batch + CTAs + new
//! query tiles), independent of the context.
//!
//! * K1. Each (query tile, kv head, visible token) is in exactly one share. For the decode kernel, a sequence is one
//!   query tile.
//! * K2. A CTA has at most two partial sums of the decode plan: at the start and at the end of its work chunk.
//! * K3. Each cut extend item has a run of slots in the memory of partials, one for each of its parts. Runs do not
//!   overlap and end within `SplitShape::extend_slots`.
//!
//! Latent rows have a kernel for both kinds of sequences (`latent.rs`). Rows with lists have a kernel like decode that
//! reads the listed positions (`selected.rs`).

mod decode;
mod extend;
mod latent;
mod selected;
mod shared;

use crate::backend::cuda::kernels::params::TREE_ROW;
use crate::backend::cuda::kernels::{DECODE_ROWS, GROUP_MAX};
use crate::plan::{BatchPlan, BatchRow};
use decode::DecodeSplit;
pub use decode::{DECODE_EXTRA, DECODE_UNIT, decode_extra};
use extend::ExtendSplit;
pub use latent::{LatentItems, LatentSplit};
pub use shared::{
    ITEM_ROWS, ITEMS_MAX, RowAssignment, SHARED_ROWS_MAX, SPANS_MAX, SharedGrid, SharedSplit, SpanCosts, SpanWork,
};

/// The inputs of a split that do not change from step to step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SplitShape {
    /// Number of kv heads.
    pub kv_heads: u32,
    /// Number of query heads of one kv head, 1 to [`GROUP_MAX`].
    pub group: u32,
    /// Elements of a head.
    pub head_dim: u32,
    /// Maximum number of packed query rows of an extend item, and the tokens at whose multiples extend items are cut.
    pub extend_rows: u32,
    pub extend_tokens: u32,
    /// Sliding window; 0 for none.
    pub window: u32,
    /// Length of a list for attention over lists; else 0.
    pub top: u32,
    /// Extra units of each sequence and kv head ([`decode_extra`]).
    pub extra: u32,
    /// Grids of the decode kernels of [`DECODE_ROWS`]: multiprocessors times resident CTAs; 0 without a kernel.
    pub decode_ctas: [u32; DECODE_ROWS.len()],
    /// Grid of the extend kernel; 0 until a step uses it.
    pub extend_ctas: u32,
    /// Maximum number of batch rows.
    pub batch_max: u32,
    /// Maximum number of tokens of a step.
    pub tokens_max: u32,
}

impl SplitShape {
    #[cfg(test)]
    pub const PLAIN: Self = Self {
        kv_heads: 8,
        group: 4,
        head_dim: 128,
        extend_rows: 128,
        extend_tokens: 64,
        window: 0,
        top: 0,
        extra: DECODE_EXTRA,
        decode_ctas: [264; 3],
        extend_ctas: 264,
        batch_max: 300,
        tokens_max: 4096,
    };

    /// Returns whether the extend kernel may have rows of a plan. The plan's trees are not yet marked ([`TREE_ROW`]).
    pub fn has_extend(&self, plan: &BatchPlan<'_>) -> bool {
        let width = self.width(plan.token_count(), plan.rows.len());
        let decoded = if self.top > 0 { DecodeFilter::new(1, false) } else { self.decoded(width) };
        // A kernel that reads spans once gives each of its rows a suffix or items of its own (`RowAssignment`). The
        // extend kernel takes longer rows without such items, such as padding.
        let mut longest = decoded.longest;
        if !plan.shared.spans.is_empty() {
            longest = longest.min(self.decoded(self.narrowest()).longest);
        }
        plan.rows.iter().any(|row| {
            let is_tree = decoded.last_row < u32::MAX && plan.tree(row).is_some();
            row.extend_len > longest || is_tree
        })
    }

    /// Returns the first position that the query at `position` sees.
    const fn first_seen(&self, position: u32) -> u32 {
        if self.window == 0 { 0 } else { (position + 1).saturating_sub(self.window) }
    }
}

/// Filter of the sequences that a decode kernel takes. The extend kernel takes all others.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct DecodeFilter {
    /// Maximum number of new tokens.
    longest: u32,
    /// Rows above this number are marked as trees, which the kernel does not support.
    last_row: u32,
}

impl DecodeFilter {
    /// Returns the filter for sequences of up to `longest` new tokens, with or without trees.
    const fn new(longest: u32, trees: bool) -> Self {
        Self { longest, last_row: if trees { u32::MAX } else { TREE_ROW - 1 } }
    }

    /// Returns whether the decode kernel has units of a sequence. A sequence without new tokens is in neither kernel.
    fn has(self, row: &BatchRow) -> bool {
        (1..=self.longest).contains(&row.extend_len) & (row.row.raw() <= self.last_row)
    }

    /// Returns whether the extend kernel has items of a sequence.
    const fn goes_to_extend(self, row: &BatchRow) -> bool {
        row.extend_len > self.longest || row.row.raw() > self.last_row
    }
}

/// The result of a step's split. A kernel without work need not be launched.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SplitCount {
    /// The decode kernel, an index of [`DECODE_ROWS`].
    pub width: usize,
    /// Number of units of the decode kernel.
    pub decode_units: u32,
    /// Number of items of the extend kernel.
    pub extend_items: u32,
}

/// Builds the words of the two kernels for each step, in reused memory.
#[derive(Clone, Debug)]
pub struct Split {
    shape: SplitShape,
    decode: DecodeSplit,
    extend: ExtendSplit,
}

impl Split {
    /// Allocates the memory for every split of this shape.
    pub fn new(shape: SplitShape) -> Self {
        assert!(shape.kv_heads > 0 && shape.decode_ctas[shape.narrowest()] > 0);
        assert!((1..=GROUP_MAX).contains(&shape.group) && shape.extend_rows > 0);
        Self { shape, decode: DecodeSplit::new(&shape), extend: ExtendSplit::new(&shape) }
    }

    /// Allocates the memory for steps with an extend kernel on a grid of `ctas` CTAs.
    pub fn add_extend(&mut self, ctas: u32) {
        self.shape.extend_ctas = ctas;
        self.extend = ExtendSplit::new(&self.shape);
    }

    /// Returns the shape of this split.
    pub const fn shape(&self) -> &SplitShape {
        &self.shape
    }

    /// Splits a step for a decode kernel of a [width](SplitShape::width), without allocation. The step's trees are
    /// marked ([`TREE_ROW`]). `decode`, for `AttendParams::plan` of `attend_decode_*`, has
    /// [`SplitShape::decode_words`] words, enough for any width. The function writes only the words of this width.
    pub fn plan(&mut self, rows: &[BatchRow], width: usize, decode: &mut [u32]) -> SplitCount {
        assert!(rows.len() <= self.shape.batch_max as usize, "more rows than the split has room for");
        assert_eq!(decode.len(), self.shape.decode_words());
        let decode_units = self.decode.plan(&self.shape, width, rows, decode);
        let decoded = self.shape.decoded(width);
        let extend_items = self.extend.plan(&self.shape, rows, |row| decoded.goes_to_extend(row));
        SplitCount { width, decode_units, extend_items }
    }

    /// Splits a step whose spans another kernel reads once. The extend kernel takes the rows that the other kernel does
    /// not take, and the decode kernel takes none.
    pub fn plan_left(&mut self, rows: &[BatchRow], taken: &RowAssignment) -> SplitCount {
        let extend_items = self.extend.plan(&self.shape, rows, |row| taken.goes_to_extend(row));
        SplitCount { extend_items, ..SplitCount::default() }
    }

    /// Returns the extend kernel's words, for `AttendParams::plan` of `attend_extend_*`.
    pub fn extend_words(&self) -> &[u32] {
        &self.extend.words
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::decode::DECODE_WORDS;
    use super::extend::{EXTEND_WORDS, HEAD_WORDS};
    use super::*;
    use crate::backend::cuda::kernels::HEAD_DIMS;
    use crate::backend::cuda::kernels::params::is_tree;
    use crate::id::RowId;
    use crate::testkit::rng::Rng;

    /// Sequence, kv head and tokens of one share, and the owner of the share.
    #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
    struct Share {
        qo_start: u32,
        q_begin: u32,
        head: u32,
        begin: u32,
        end: u32,
        cta: u32,
    }

    fn shape() -> SplitShape {
        SplitShape { tokens_max: 70_000, ..SplitShape::PLAIN }
    }

    fn batch(lens: &[(u32, u32)]) -> Vec<BatchRow> {
        let mut qo_start = 0;
        let row = |(i, &(extend_len, kv_len)): (usize, &(u32, u32))| {
            qo_start += extend_len;
            // Padding rows may have no row number.
            let row = if kv_len == 0 && i % 2 == 1 { u32::MAX } else { i as u32 };
            let (row, qo_start) = (RowId::new(row), qo_start - extend_len);
            BatchRow { row, qo_start, extend_len, kv_len }
        };
        lens.iter().enumerate().map(row).collect()
    }

    fn decodes(shape: &SplitShape, width: usize, row: &BatchRow) -> bool {
        let may_be_tree = DECODE_ROWS[width] == 64;
        row.extend_len * shape.group <= DECODE_ROWS[width] && (!is_tree(row) || may_be_tree)
    }

    /// Reads the decode plan in the order of the decode kernel. Parts of a sum are counted, written and found as in
    /// `ptx/src/decode/decode_parts.cuh`.
    fn decode_shares(shape: &SplitShape, width: usize, words: &[u32], rows: &[BatchRow]) -> Vec<Share> {
        let stripes = shape.decode_stripes(width);
        let heads = shape.kv_heads / stripes;
        assert!(shape.kv_heads.is_multiple_of(stripes));
        let mut starts = vec![0];
        for row in rows {
            let units = match row.extend_len {
                1.. if decodes(shape, width, row) => shape.units(row) * heads,
                _ => 0,
            };
            starts.push(starts[starts.len() - 1] + units);
        }
        let (mut shares, mut joins) = (Vec::new(), BTreeMap::new());
        for cta in 0..shape.decode_ctas[width] {
            let chunk = cta / stripes;
            let work = &words[chunk as usize * DECODE_WORDS..][..DECODE_WORDS];
            let (mut unit, end) = (chunk * work[0], work[1]);
            let mut index = work[2] as usize;
            let mut partial = 0;
            if unit < end {
                let row = &rows[index];
                assert_eq!(work[3], starts[index]);
                let seen = [row.row.raw(), row.qo_start, row.extend_len, row.kv_len];
                assert_eq!(work[4..], seen);
            }
            while unit < end {
                while starts[index + 1] <= unit {
                    index += 1;
                }
                let row = &rows[index];
                let units = (starts[index + 1] - starts[index]) / heads;
                let (turn, at) = ((unit - starts[index]) / units, (unit - starts[index]) % units);
                let stop = (at + end - unit).min(units);
                partial += u32::from(at > 0 || stop < units);
                let (begin, some) = (unit - at, (units - shape.extra).max(1));
                let (first, last) = (begin / work[0], (begin + some - 1) / work[0]);
                if at < some && first < last {
                    let first_cta = first * stripes + cta % stripes;
                    // A part that ends before its work chunk does is the last of its sum, so it is not the first.
                    // `finish` stores it in the CTA's first slot.
                    assert!(unit + stop - at == end || cta > first_cta);
                    let join = joins.entry(first_cta).or_insert((begin, last - first + 1, vec![]));
                    assert_eq!(join.0, begin, "C4: a counter serves one sum");
                    join.2.push(2 * cta + u32::from(cta == first_cta));
                }
                let first = shape.first_seen(row.kv_len.saturating_sub(row.extend_len));
                shares.push(Share {
                    qo_start: row.qo_start,
                    q_begin: 0,
                    head: turn * stripes + cta % stripes,
                    begin: row.kv_len.min(first + at * DECODE_UNIT),
                    end: row.kv_len.min(first + stop * DECODE_UNIT),
                    cta,
                });
                unit += stop - at;
            }
            assert!(partial <= 2, "K2: two partial sums a CTA");
        }
        for (first_cta, (_, parts, slots)) in joins {
            // The slots in which `join` finds the parts.
            let slot = |part| 2 * (first_cta + part * stripes) + u32::from(part == 0);
            assert!(slots.into_iter().eq((0..parts).map(slot)), "C4: each part arrives once");
        }
        shares
    }

    fn extend_shares(shape: &SplitShape, split: &Split) -> Vec<Share> {
        let words = split.extend_words();
        assert_eq!(words.len(), HEAD_WORDS + words[0] as usize * EXTEND_WORDS);
        let mut shares = Vec::new();
        let mut slots = std::collections::BTreeSet::new();
        for work in words[HEAD_WORDS..].chunks_exact(EXTEND_WORDS) {
            let (slot, index, parts) = (work[7] >> 16, work[7] >> 8 & 255, work[7] & 255);
            assert!(index < parts);
            if parts > 1 {
                assert!(slots.insert(slot + index), "K3: slots do not overlap");
                assert!(slot + parts <= shape.extend_slots(), "K3: slots end in range");
            }
            for head in 0..shape.kv_heads {
                let [qo_start, q_begin, begin, end] = [work[1], work[4], work[5], work[6]];
                shares.push(Share { qo_start, q_begin, head, begin, end, cta: 0 });
            }
        }
        shares
    }

    /// Checks K1 by enumeration: the shares of each (sequence, query tile, kv head) cover the tokens that it sees.
    fn check(shape: SplitShape, lens: &[(u32, u32)]) -> (Split, SplitCount, Vec<u32>) {
        check_trees(shape, lens, &[])
    }

    /// Runs [`check`] with some rows marked as trees.
    fn check_trees(shape: SplitShape, lens: &[(u32, u32)], trees: &[usize]) -> (Split, SplitCount, Vec<u32>) {
        let mut rows = batch(lens);
        for &tree in trees {
            rows[tree].row = RowId::new(rows[tree].row.raw() | TREE_ROW);
        }
        let mut split = Split::new(shape);
        let mut words = vec![u32::MAX; shape.decode_words()];
        let tokens = rows.iter().map(|row| row.extend_len as usize).sum();
        let width = split.shape.width(tokens, rows.len());
        let count = split.plan(&rows, width, &mut words);
        let mut shares = decode_shares(&shape, count.width, &words, &rows);
        let decoded = shares.len();
        shares.extend(extend_shares(&shape, &split));
        assert_eq!(shares.len() - decoded, count.extend_items as usize);
        assert!(split.extend_words().len() <= shape.extend_words());
        shares.sort_unstable();
        let mut left = shares.as_slice();
        for row in rows.iter().filter(|row| row.extend_len > 0) {
            let cached_len = row.kv_len.saturating_sub(row.extend_len);
            let size = if decodes(&shape, count.width, row) { 64 } else { shape.extend_rows };
            for q_begin in (0..row.extend_len * shape.group).step_by(size as usize) {
                let last = ((q_begin + size - 1) / shape.group).min(row.extend_len - 1);
                let seen = cached_len + last + 1;
                let stop = if row.kv_len == 0 { 0 } else { seen };
                for head in 0..shape.kv_heads {
                    let mut at = shape.first_seen(cached_len + q_begin / shape.group);
                    if row.kv_len == 0 {
                        at = 0;
                    }
                    loop {
                        let share = left[0];
                        left = &left[1..];
                        let [q, h] = [share.q_begin, share.head];
                        assert_eq!((share.qo_start, q, h), (row.qo_start, q_begin, head), "K1");
                        assert_eq!(share.begin, at, "K1: no gap, no overlap");
                        at = share.end;
                        // Shares without tokens may follow.
                        let same = |next: &&Share| {
                            let key = (next.qo_start, next.q_begin, next.head);
                            key == (row.qo_start, q_begin, head) && next.begin == stop
                        };
                        if at == stop && left.first().filter(same).is_none() {
                            break;
                        }
                    }
                }
            }
        }
        assert!(left.is_empty(), "K1: no other shares");
        (split, count, words)
    }

    #[test]
    fn every_token_once() {
        check(shape(), &[]);
        check(shape(), &[(1, 0)]);
        check(shape(), &[(1, 1), (0, 0), (4, 4), (5, 5), (1, 8192), (37, 0), (512, 8192)]);
        let mut rng = Rng::new(7);
        let mut draw = |below: u32| rng.below(below.into()) as u32;
        for round in 0..400 {
            let head_dim = HEAD_DIMS[draw(3) as usize];
            let shape = SplitShape {
                kv_heads: [1, 2, 8, 32][draw(4) as usize],
                group: 1 + draw(16),
                head_dim,
                extend_rows: if head_dim == 256 { 64 } else { 128 },
                extend_tokens: if head_dim == 256 { 32 } else { 64 },
                window: [0, 0, 1, 100, 4096][draw(5) as usize],
                extra: decode_extra(draw(2) == 1),
                decode_ctas: [1 + draw(300), 1 + draw(300), draw(2) * (1 + draw(300))],
                extend_ctas: 1 + draw(300),
                ..shape()
            };
            let longest = [4, 10, 3000][draw(3) as usize];
            let lens: Vec<_> = (0..draw(40))
                .map(|_| {
                    let extend_len = [1, 1, draw(8), draw(longest)][draw(4) as usize];
                    let cached_len = [0, draw(100), draw(20_000)][draw(3) as usize];
                    let padding = extend_len > 0 && draw(10) == 0;
                    (extend_len, if padding { 0 } else { extend_len + cached_len })
                })
                .collect();
            println!("round {round}: {shape:?} {lens:?}");
            check(shape, &lens);
            let may = |(extend_len, kv_len): (u32, u32)| extend_len <= 64 && kv_len > 0;
            let trees: Vec<_> = (0..lens.len()).filter(|&i| may(lens[i]) && draw(3) == 0).collect();
            check_trees(shape, &lens, &trees);
        }
    }

    #[test]
    fn decode_shares_are_equal() {
        let lens: Vec<_> = (0..64).map(|i| (1, 32_768 / (i + 1))).collect();
        let (_, count, words) = check(shape(), &lens);
        assert_eq!(words[0], (count.decode_units / 8).div_ceil(264 / 8));
    }

    #[test]
    fn few_query_tiles_are_cut() {
        // 16 tiles of 8 heads fill 264 CTAs only if they are cut.
        let (split, ..) = check(shape(), &[(512, 8192)]);
        assert_eq!(split.extend_words()[0], 32);
        // 64 tiles of 8 heads fill the device without cuts.
        let (split, ..) = check(shape(), &[(2048, 32_768)]);
        assert_eq!(split.extend_words()[0], 64);
    }

    #[test]
    fn a_warm_split_does_not_allocate() {
        let mut split = Split::new(shape());
        let mut words = vec![0; shape().decode_words()];
        let room = |split: &Split| (split.decode.ends.capacity(), split.extend.capacities());
        let before = room(&split);
        split.plan(&batch(&[(60_000, 131_072)]), shape().width(60_000, 1), &mut words);
        split.plan(&batch(&[(512, 8192), (1, 100)]), shape().width(513, 2), &mut words);
        split.plan(&batch(&[(8, 8192), (6, 100)]), shape().width(14, 2), &mut words);
        assert_eq!(room(&split), before);
    }
}
