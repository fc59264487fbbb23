//! The items of attention over latent rows.
//!
//! An item is a tile of query rows, with all heads of a query adjacent, and the tokens that it sees. Few query rows
//! have their own schedule (`attend_latent_few_sm90a.cuh`), so the width of tiles depends on the step's sequences. CTAs
//! receive items in order, with about equal units of tokens. Parts of an item cost memory and a join, so items are cut
//! only if whole items would end noticeably later. The cost is O(items + CTAs), independent of the context.
//!
//! Tiles of one sequence read the same rows and should run at the same time. Cut tiles do. Whole tiles do if the first
//! tiles of all sequences precede their second tiles. If the CTAs of a cluster share an item ([`PAIR`]), two adjacent
//! tiles form one item, and each cluster has one list.
//!
//! * K5. Each (query row, visible token) is in exactly one part; parts of an item have consecutive slots.

use core::ops::Range;

use bytemuck::Pod;

use crate::backend::cuda::kernels::params::{ExtendWork, LatentHead, LatentJoin, words_of};
use crate::plan::BatchRow;

/// Maximum number of query rows of a CTA's item in the kernels for compute capability 9.0.
const LATENT_ROWS: u32 = 64;

/// The family of kernels that computes the items.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LatentItems {
    /// The kernels of compute capability 9.0 only.
    Hopper,
    /// The kernels of every GPU (`attend_latent_tiles.cuh`).
    Tiles,
}

impl LatentItems {
    const fn shapes(self) -> &'static [TileShape] {
        match self {
            Self::Hopper => &TILE_SHAPES,
            Self::Tiles => &[TILE],
        }
    }

    /// Returns the maximum number of query rows of a CTA's item. The memory for sums has this many rows for each slot.
    pub const fn rows(self) -> u32 {
        let shapes = self.shapes();
        shapes[shapes.len() - 1].rows
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct TileShape {
    /// Maximum number of query rows of an item.
    rows: u32,
    /// Number of tokens of a unit, at which items are cut.
    tokens: u32,
    /// Fixed cost of an item, in units of tokens: its queries and results.
    extra: u32,
    /// Minimum number of units for a CTA.
    least: u32,
    /// Number of CTAs that share an item: a cluster. They read the same tokens. Each takes up to 64 of the rows.
    ctas: u32,
}

/// Narrow items are memory-bound; wide items are compute-bound.
const TILE_SHAPES: [TileShape; 3] = [
    TileShape { rows: 16, tokens: 16, extra: 9, least: 8, ctas: 1 },
    TileShape { rows: 32, tokens: 16, extra: 9, least: 8, ctas: 1 },
    TileShape { rows: LATENT_ROWS, tokens: 64, extra: 3, least: 2, ctas: 1 },
];
/// Two wide items over the same tokens as one item of a cluster.
const PAIR: TileShape = TileShape { rows: 2 * LATENT_ROWS, tokens: 64, extra: 3, least: 2, ctas: 2 };
/// Items of [`LatentItems::Tiles`].
const TILE: TileShape = TileShape { rows: 16, tokens: 32, extra: 3, least: 2, ctas: 1 };
/// Maximum number of turns in which the tiles of the sequences are dealt.
const TURNS: usize = 4;
const HEAD_WORDS: usize = size_of::<LatentHead>() / 4;
const WORK_WORDS: usize = size_of::<ExtendWork>() / 4;
const JOIN_WORDS: usize = size_of::<LatentJoin>() / 4;

/// Splits steps for one number of query heads and one window, in reused memory.
#[derive(Clone, Debug)]
pub struct LatentSplit {
    items: LatentItems,
    heads: u32,
    window: u32,
    ctas: u32,
    /// Whether items of [`PAIR`] are available.
    pairs: bool,
    /// Items begin at multiples of this number, a divisor of the page size. So kernels read no page before a window's
    /// first page.
    align: u32,
    /// `LatentHead | LatentJoin[ctas] | first item of each CTA or pair of CTAs, number of items, rows of an item |
    /// ExtendWork[..]`
    words: Vec<u32>,
    used: usize,
    /// The number of turns in which the items were dealt.
    turns: usize,
}

impl LatentSplit {
    /// Allocates the memory for steps. `limits` are the maximum numbers of rows and tokens; `window` is 0 for none.
    pub fn new(items: LatentItems, (heads, window): (u32, u32), ctas: u32, limits: (u32, u32)) -> Self {
        assert!(heads > 0 && ctas > 0);
        let words = vec![0; Self::words_max(items, heads, ctas, limits)];
        Self { items, heads, window, ctas, pairs: false, align: 1, words, used: 0, turns: 1 }
    }

    /// Sets the alignment of items of Hopper's kernels.
    pub fn aligned(self, align: u32) -> Self {
        let align = if self.items == LatentItems::Hopper { align } else { 1 };
        Self { align, ..self }
    }

    /// Sets whether two CTAs may share an item. The number of CTAs is then even.
    pub fn in_pairs(self, pairs: bool) -> Self {
        assert!(!pairs || self.ctas.is_multiple_of(2));
        Self { pairs: pairs && self.items == LatentItems::Hopper, ..self }
    }

    /// Returns the maximum number of words of a plan, a multiple of 4.
    pub const fn words_max(items: LatentItems, heads: u32, ctas: u32, (rows, tokens): (u32, u32)) -> usize {
        // The last tile of each sequence may be partly empty; each CTA may cut an item.
        let tiles = tokens as u64 * heads as u64 / items.rows() as u64;
        let tiles = tiles + rows as u64 + ctas as u64;
        Self::works_at(ctas) + tiles as usize * WORK_WORDS
    }

    /// Returns the number of slots for the parts of a step; a part of a pair takes two.
    pub const fn slots(&self) -> u32 {
        2 * self.ctas
    }

    /// Returns the index of the lists' first word.
    pub const fn lists_at(&self) -> usize {
        Self::lists(self.ctas)
    }

    const fn lists(ctas: u32) -> usize {
        HEAD_WORDS + ctas as usize * JOIN_WORDS
    }

    const fn works_at(ctas: u32) -> usize {
        Self::lists(ctas) + (ctas as usize + 2).next_multiple_of(4)
    }

    /// Returns the used part of the step's plan.
    pub fn words(&self) -> &[u32] {
        &self.words[..self.used]
    }

    /// Returns the kind of a step's items: the narrowest that fits each sequence's query rows, or else the widest.
    /// Pairs are used if few of their CTAs have no rows.
    fn tile(&self, rows: &[BatchRow]) -> TileShape {
        let rows = rows.iter().map(|row| row.extend_len.saturating_mul(self.heads));
        let most = rows.clone().max().unwrap_or(0);
        let shapes = self.items.shapes();
        let widest = shapes[shapes.len() - 1];
        let found = *shapes.iter().find(|tile| tile.rows >= most).unwrap_or(&widest);
        let tiles = |rows_of: u32| rows.clone().map(|rows| u64::from(rows.div_ceil(rows_of))).sum();
        let (alone, paired): (u64, u64) = (tiles(LATENT_ROWS), 2 * tiles(PAIR.rows));
        let pays = self.pairs && found == widest && paired <= alone + alone / 8;
        if pays { PAIR } else { found }
    }

    /// Splits a step, without allocation, and returns the number of items that were cut.
    pub fn plan(&mut self, rows: &[BatchRow]) -> u32 {
        let schedule = self.schedule(rows);
        let tile = schedule.items.tile;
        let mut dealt = Dealt { cta: 0, left: schedule.share, count: 0 };
        let mut head = LatentHead { part_rows: self.items.rows() * tile.ctas, ..LatentHead::default() };
        let mut slot = 0;
        self.list(0, 0);
        for work in schedule.items.all(rows, schedule.turns) {
            let first = dealt.count;
            self.deal(&schedule, &work, &mut dealt);
            if dealt.count - first > 1 {
                self.join(&schedule, &work, first..dealt.count, slot, &mut head);
                slot += dealt.count - first;
            }
        }
        let fit = slot * tile.ctas <= self.slots() && head.joins <= schedule.ctas;
        assert!(fit, "K5: parts have slots");
        (dealt.cta + 1..=self.ctas).for_each(|cta| self.list(cta, dealt.count));
        self.list(self.ctas + 1, tile.rows);
        self.put(0, &head);
        self.turns = schedule.turns;
        self.used = self.work_at(dealt.count);
        head.joins
    }

    /// Decides whether items are cut. A cut item costs memory and a join, so whole items are preferred if they take up
    /// to a twelfth more, or if the longest takes up to an eighth more.
    fn schedule(&self, rows: &[BatchRow]) -> Schedule {
        let tile = self.tile(rows);
        let (heads, ctas, extra) = (self.heads, self.ctas / tile.ctas, tile.extra);
        let items = Items { tile, heads, window: self.window, align: self.align };
        let costs = |turns| items.all(rows, turns).map(move |work| items.units(&work) + extra);
        let total: u64 = costs(1).map(u64::from).sum();
        let longest = costs(1).max().unwrap_or(0);
        let tiles = rows.iter().map(|row| (row.extend_len * heads).div_ceil(tile.rows) as usize);
        let turns = tiles.max().unwrap_or(0).clamp(1, TURNS);
        // Every CTA may cut an item, which adds its fixed cost.
        let share = (total.div_ceil(ctas.into()) as u32 + extra).max(tile.least + extra);
        let whole = (share + share / 12).max(longest);
        let cuts = whole > share + share / 8 + 4 || !fits(costs(turns), whole, ctas);
        let (share, turns) = if cuts { (share, 1) } else { (whole, turns) };
        Schedule { items, ctas, share, turns, cuts }
    }

    /// Deals an item to the next CTA with capacity, and if items are cut, the rest to the CTAs after it. The last CTA
    /// takes all that is left, so rounding loses nothing.
    fn deal(&mut self, schedule: &Schedule, work: &ExtendWork, dealt: &mut Dealt) {
        let &Schedule { items, ctas, share, cuts, .. } = schedule;
        let extra = items.tile.extra;
        let (mut rest, mut begin) = (items.units(work), work.kv_begin);
        loop {
            let full = if cuts { dealt.left <= extra } else { dealt.left < share && rest + extra > dealt.left };
            if full && dealt.cta + 1 < ctas {
                (dealt.cta, dealt.left) = (dealt.cta + 1, share);
                self.list(dealt.cta, dealt.count);
            }
            let last = !cuts || dealt.cta + 1 == ctas;
            let take = if last { rest } else { rest.min(dealt.left.saturating_sub(extra).max(1)) };
            let end = work.kv_end.min(begin.saturating_add(take.saturating_mul(items.tile.tokens)));
            self.put(self.work_at(dealt.count), &ExtendWork { kv_begin: begin, kv_end: end, part: 1, ..*work });
            (begin, rest, dealt.count) = (end, rest - take, dealt.count + 1);
            dealt.left = dealt.left.saturating_sub(take + extra);
            if rest == 0 {
                return;
            }
        }
    }

    /// Numbers the parts of a cut item, from `slot` on, and records their join. Slots are consecutive, because the join
    /// computes the places of the parts from the first one.
    fn join(&mut self, schedule: &Schedule, work: &ExtendWork, parts: Range<u32>, slot: u32, head: &mut LatentHead) {
        let (places, count) = (self.work_at(parts.start)..self.work_at(parts.end), parts.end - parts.start);
        let works: &mut [ExtendWork] = bytemuck::cast_slice_mut(&mut self.words[places]);
        (0..).zip(works).for_each(|(i, work)| work.part = slot << 16 | i << 8 | count);
        let rows = work.extend_len * self.heads;
        let join = LatentJoin { qo_start: work.qo_start, q_begin: work.q_begin, rows, part: slot << 16 | count };
        self.put(HEAD_WORDS + head.joins as usize * JOIN_WORDS, &join);
        head.joins += 1;
        head.rows_max = head.rows_max.max(schedule.items.tile.rows.min(rows - work.q_begin));
        head.parts_max = head.parts_max.max(count);
    }

    fn list(&mut self, cta: u32, first: u32) {
        let at = self.lists_at() + cta as usize;
        self.words[at] = first;
    }

    const fn work_at(&self, index: u32) -> usize {
        Self::works_at(self.ctas) + index as usize * WORK_WORDS
    }

    fn put<T: Pod>(&mut self, at: usize, record: &T) {
        let words = words_of(record);
        self.words[at..at + words.len()].copy_from_slice(words);
    }
}

/// How the items of a step are dealt.
#[derive(Clone, Copy)]
struct Schedule {
    items: Items,
    /// Number of lists: of CTAs or of pairs.
    ctas: u32,
    /// Units of a list, including fixed costs.
    share: u32,
    turns: usize,
    cuts: bool,
}

/// The list that receives the next item, its remaining units, and the number of parts in all lists.
struct Dealt {
    cta: u32,
    left: u32,
    count: u32,
}

/// Returns whether whole items, in order, fit `ctas` CTAs of capacity `share`.
fn fits(costs: impl Iterator<Item = u32>, share: u32, ctas: u32) -> bool {
    let (mut used, mut count) = (0_u32, 1_u32);
    for cost in costs {
        if used > 0 && used.saturating_add(cost) > share {
            (used, count) = (0, count + 1);
        }
        used = used.saturating_add(cost);
    }
    count <= ctas
}

/// Converts sequences to items.
#[derive(Clone, Copy)]
struct Items {
    tile: TileShape,
    heads: u32,
    window: u32,
    align: u32,
}

impl Items {
    /// Returns the items of a step: every `turns`th tile of each sequence from the first on, then from the second on,
    /// and so on.
    fn all(self, rows: &[BatchRow], turns: usize) -> impl Iterator<Item = ExtendWork> {
        let in_turn = move |row, turn| self.of_row(row).skip(turn).step_by(turns);
        (0..turns).flat_map(move |turn| rows.iter().flat_map(move |row| in_turn(row, turn)))
    }

    /// Returns the uncut items of a sequence; items of padding have no tokens.
    fn of_row(self, row: &BatchRow) -> impl Iterator<Item = ExtendWork> + use<> {
        let Self { tile, heads, window, align } = self;
        let BatchRow { row, qo_start, extend_len, kv_len } = *row;
        let rows = extend_len * heads;
        (0..rows).step_by(tile.rows as usize).map(move |q_begin| {
            let last = (q_begin + tile.rows).min(rows) - 1;
            // Positions of the first and the last query, counted from 1.
            let seen = |packed: u32| kv_len.saturating_sub(extend_len) + packed / heads + 1;
            let kv_end = if kv_len == 0 { 0 } else { seen(last) };
            let first = if window == 0 { 0 } else { seen(q_begin).saturating_sub(window) };
            let kv_begin = if kv_len == 0 { 0 } else { first / align * align };
            let row = row.raw();
            ExtendWork { row, qo_start, extend_len, kv_len, q_begin, kv_begin, kv_end, part: 1 }
        })
    }

    const fn units(&self, work: &ExtendWork) -> u32 {
        (work.kv_end - work.kv_begin).div_ceil(self.tile.tokens)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::RowId;
    use crate::testkit::rng::Rng;

    fn batch(lens: &[(u32, u32)]) -> Vec<BatchRow> {
        let mut qo_start = 0;
        let row = |(i, &(extend_len, kv_len)): (usize, &(u32, u32))| {
            qo_start += extend_len;
            let row = RowId::new(i as u32);
            BatchRow { row, qo_start: qo_start - extend_len, extend_len, kv_len }
        };
        lens.iter().enumerate().map(row).collect()
    }

    fn dealt(items: LatentItems, heads: u32) -> LatentSplit {
        LatentSplit::new(items, (heads, 0), 132, (256, 8192))
    }

    /// Returns the items of each CTA in the order of the kernel, and the joins.
    fn read(split: &LatentSplit) -> (Vec<Vec<ExtendWork>>, Vec<LatentJoin>) {
        let (words, ctas) = (split.words(), split.ctas as usize);
        assert_eq!(words[3], split.items.rows().max(words[split.lists_at() + ctas + 1]));
        let lists = &words[split.lists_at()..][..ctas + 1];
        let works: &[ExtendWork] = bytemuck::cast_slice(&words[LatentSplit::works_at(split.ctas)..]);
        let cta = |i: usize| works[lists[i] as usize..lists[i + 1] as usize].to_vec();
        let rows_max = words[split.lists_at() + ctas + 1];
        let rows = |join: &LatentJoin| rows_max.min(join.rows - join.q_begin);
        let joins: &[LatentJoin] = bytemuck::cast_slice(&words[4..4 + ctas * JOIN_WORDS]);
        assert_eq!(lists[ctas] as usize, works.len());
        let joins = joins[..words[0] as usize].to_vec();
        assert_eq!(joins.iter().map(rows).max().unwrap_or(0), words[1]);
        assert_eq!(joins.iter().map(|join| join.part & 65535).max().unwrap_or(0), words[2]);
        ((0..ctas).map(cta).collect(), joins)
    }

    /// Checks K5, and returns the units of the busiest CTA, including fixed costs.
    fn check(split: &mut LatentSplit, rows: &[BatchRow]) -> u32 {
        let cut = split.plan(rows);
        let (ctas, joins) = read(split);
        assert_eq!(joins.len(), cut as usize);
        let mut parts = ctas.iter().flatten();
        let (mut joined, mut slot) = (joins.iter(), 0);
        let tile = split.tile(rows);
        let most = rows.iter().map(|row| row.extend_len * split.heads).max().unwrap_or(0);
        let widest = split.items.rows();
        assert!(tile.rows >= most.min(widest) && (tile.rows == 16 || most > tile.rows / 2));
        assert!(tile.rows != PAIR.rows || split.pairs);
        // The CTAs of a cluster have one list.
        assert!(ctas[(split.ctas / tile.ctas) as usize..].iter().all(Vec::is_empty));
        assert_eq!(split.words()[split.lists_at() + split.ctas as usize + 1], tile.rows);
        let (heads, window, align) = (split.heads, split.window, split.align);
        let items = Items { tile, heads, window, align };
        let all = rows.iter().flat_map(|row| items.of_row(row)).count();
        assert_eq!(items.all(rows, split.turns).count(), all);
        for whole in items.all(rows, split.turns) {
            let first = parts.next().expect("each item has a part");
            let count = first.part & 255;
            let mut at = whole.kv_begin;
            for index in 0..count {
                let part = if index == 0 { first } else { parts.next().expect("a part") };
                let wanted = if count == 1 { 1 } else { slot << 16 | index << 8 | count };
                let (kv_begin, kv_end) = (at, part.kv_end);
                assert_eq!(*part, ExtendWork { kv_begin, kv_end, part: wanted, ..whole });
                assert!(count == 1 || kv_begin < kv_end);
                at = part.kv_end;
            }
            assert_eq!(at, whole.kv_end);
            if count > 1 {
                let (rows, part) = (whole.extend_len * split.heads, slot << 16 | count);
                let ExtendWork { qo_start, q_begin, .. } = whole;
                assert_eq!(joined.next(), Some(&LatentJoin { qo_start, q_begin, rows, part }));
                slot += count;
            }
        }
        assert_eq!((parts.next(), joined.next()), (None, None));
        assert!(slot * tile.ctas <= split.slots());
        let load = |works: &Vec<ExtendWork>| works.iter().map(|w| items.units(w) + tile.extra).sum();
        ctas.iter().map(load).max().expect("there are CTAs")
    }

    #[test]
    fn every_token_of_every_query_is_in_one_part() {
        let mut rng = Rng::new(11);
        for _ in 0..2000 {
            let (heads, ctas) = (rng.within(1, 128) as u32, rng.within(1, 140) as u32);
            let window = rng.pick(&[0, 0, 1, 63, 64, 65, 1000]);
            let pairs = ctas % 2 == 0 && rng.one_in(2);
            let items = rng.pick(&[LatentItems::Hopper, LatentItems::Tiles]);
            let split = LatentSplit::new(items, (heads, window), ctas, (40, 4000));
            let mut split = split.in_pairs(pairs).aligned(rng.pick(&[1, 8, 32]));
            let rows = (0..rng.below(40)).map(|_| {
                let extend_len = rng.pick(&[0, 1, 1, 1, 2, 4, 17, 90]) as u32;
                let most = rng.pick(&[1, 70, 5000]);
                let kv_len = extend_len + rng.below(most) as u32;
                (extend_len, if rng.one_in(9) { 0 } else { kv_len })
            });
            let rows: Vec<_> = rows.collect();
            check(&mut split, &batch(&rows));
        }
    }

    #[test]
    fn whole_tiles_of_a_sequence_run_at_the_same_time() {
        let mut split = dealt(LatentItems::Hopper, 128);
        assert_eq!(split.plan(&batch(&vec![(1, 2048); 128])), 0);
        let (ctas, _) = read(&split);
        for (first, second) in ctas[..64].iter().zip(&ctas[64..128]) {
            let rows = |works: &[ExtendWork]| works.iter().map(|work| work.row).collect::<Vec<_>>();
            assert_eq!((rows(first), first.len()), (rows(second), 2));
        }
    }

    #[test]
    fn a_pair_has_both_tiles_of_a_sequence() {
        let mut split = dealt(LatentItems::Hopper, 128).in_pairs(true);
        assert_eq!(split.plan(&batch(&vec![(1, 2048); 128])), 0);
        let (lists, _) = read(&split);
        assert!(lists[..64].iter().all(|works| works.len() == 2 && works[0].q_begin == 0));
        assert!(lists[64..].iter().all(Vec::is_empty));
        // If a sequence had one or three tiles, one CTA of each pair, or of every second pair, would have no rows.
        for (heads, rows) in [(64, LATENT_ROWS), (96, 128), (128, 128), (40, 128)] {
            let mut split = dealt(LatentItems::Hopper, heads).in_pairs(true);
            split.plan(&batch(&[(1 + u32::from(heads == 40), 2048); 9]));
            assert_eq!(split.words()[split.lists_at() + 133], rows, "{heads} heads");
        }
        let mut split = dealt(LatentItems::Hopper, 64).in_pairs(true);
        split.plan(&batch(&[(3, 2048); 9]));
        assert_eq!(split.words()[split.lists_at() + 133], LATENT_ROWS);
    }

    #[test]
    fn work_is_dealt_about_equally() {
        for (rows, heads, most) in [
            (vec![(1, 4096); 64], 16, 140),
            (vec![(1, 4096); 64], 128, 67),
            (vec![(1, 2048); 128], 128, 70),
            (vec![(1, 2048); 128], 16, 137),
            (vec![(1, 2048); 128], 32, 137),
            (vec![(1, 4096); 16], 128, 26),
            (vec![(1, 8192)], 16, 17),
        ] {
            for pairs in [false, true] {
                let split = dealt(LatentItems::Hopper, heads);
                let load = check(&mut split.in_pairs(pairs), &batch(&rows));
                assert!(load <= most, "{} x {:?}, {heads} heads: {load}", rows.len(), rows[0]);
            }
        }
        // An item has 16 query rows; a unit has 32 tokens, and an item costs 3 units more. Four whole items of 128
        // units take 524, and 8 items of the last row share its 2,048 units.
        for (rows, heads, most) in [
            (vec![(1, 4096); 64], 16, 67),
            (vec![(1, 4096); 64], 128, 524),
            (vec![(1, 8192)], 16, 5),
            (vec![(1, 8192)], 128, 19),
        ] {
            let load = check(&mut dealt(LatentItems::Tiles, heads), &batch(&rows));
            assert!(load <= most, "{} x {:?}, {heads} heads: {load}", rows.len(), rows[0]);
        }
    }
}
