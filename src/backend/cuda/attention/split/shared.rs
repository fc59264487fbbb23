//! Splits steps whose rows share spans: chooses the spans to read once, and divides the work among CTAs.
//!
//! A span is accepted if reading it once is cheaper than a read by each row. The tokens of a rejected span go to its
//! accepted children. The rest of a row is its *suffix*, which the row reads alone. Some CTAs work on the items of
//! spans, as the extend kernel does. The others work on suffixes, as the decode kernel does, with one work chunk for
//! each warp ([`SharedGrid`]). Both groups end at about the same time, so computation and memory access overlap.
//!
//! The query rows of a span form query tiles, each over all tokens of the span. CTAs for spans receive equal shares of
//! all tiles, head by head, so a CTA has partial sums of at most two query tiles.
//!
//! The new tokens of a row are consecutive members, because a span ends before the first of them and each sees all of
//! it. A row with more query rows than fit a suffix, up to 64, has *own items* over its own tokens. These tokens are
//! cut like one more span, below the row's other spans, with this row as the only member. The extend kernel takes
//! longer rows and draft trees.
//!
//! * K4. Each (row, kv head, token) is in exactly one span's item or one work chunk; partial sums do not overlap.
//!
//! The cost is O(rows + members of all spans + CTAs + items). `plan/spans.rs` defines spans, `shared/accept.rs` chooses
//! them, `shared/cost.rs` models their cost, and `shared/grid.rs` describes the kernels.

mod accept;
mod cost;
mod grid;

use super::decode::work_chunks;
use super::{DECODE_EXTRA, DECODE_UNIT, SplitShape};
use crate::backend::cuda::kernels::params::{
    DecodeWork, LISTED_SUFFIXES, LISTED_SUMS, RowShare, SharedHead, SpanItem, SpanMember, SpanParts,
};
use crate::plan::{BatchRow, SharedSpans};
use accept::{Before, Eligible};
pub use cost::{SpanCosts, SpanWork};
pub use grid::{ITEM_ROWS, RowAssignment, SharedGrid};

/// Maximum number of rows for which spans are read once, over all shapes.
pub const SHARED_ROWS_MAX: u32 = 512;
/// Maximum number of accepted spans of a step.
pub const SPANS_MAX: u32 = 64;
/// Number of tokens of a tile.
const SPAN_TOKENS: u32 = 128;
/// Maximum number of items of a step.
pub const ITEMS_MAX: u32 = 4096;
/// Number of share lengths that [`SharedSplit::deal`] tries. It tries more only if none of these fits.
const SHARES_TRIED: u32 = 16;
/// Maximum number of query rows of all query tiles of a step.
pub const PARTIAL_ROWS: u32 = 1 << 16;

/// A span that is read once, or a row's own tokens.
#[derive(Clone, Copy, Debug)]
struct Accepted {
    member_start: u32,
    member_count: u32,
    /// Number of query tiles of the members' new tokens.
    query_tiles: u32,
    begin: u32,
    end: u32,
    parent: u32,
    /// Number of accepted spans that contain it, itself included.
    depth: u32,
    /// The page table row of a member.
    row: u32,
    /// Whether these are the own tokens of one row, including its new ones.
    own: bool,
}

impl Accepted {
    /// Returns 1 plus the number of a row's own tokens from `end` on, up to the kernel's maximum; 0 for a span.
    fn behind(&self, end: u32) -> u16 {
        if self.own { (self.end - end).saturating_add(1).min(0xffff) as u16 } else { 0 }
    }
}

/// The division of a step's spans among CTAs.
#[derive(Clone, Copy, Debug)]
struct Deal {
    /// The work of the step.
    work: SpanWork,
    /// Number of CTAs that work on spans.
    ctas: u32,
    /// Number of tiles of each of these CTAs.
    tiles: u32,
}

/// Builds the shared kernel's plan of each step, in reused memory.
#[derive(Clone, Debug)]
pub struct SharedSplit {
    shape: SplitShape,
    grid: SharedGrid,
    costs: SpanCosts,
    ignore_cost: bool,
    /// The rows that the step's kernel takes.
    taken: RowAssignment,
    pub head: SharedHead,
    pub works: Vec<DecodeWork>,
    pub shares: Vec<RowShare>,
    pub members: Vec<SpanMember>,
    pub spans: Vec<SpanParts>,
    pub items: Vec<SpanItem>,
    /// The work of the step, if spans are read once.
    pub work: SpanWork,
    accepted: Vec<Accepted>,
    /// Numbers of eligible rows and tokens before each member of the step's spans, and in total.
    eligible: Vec<Eligible>,
    /// The input of the last acceptance.
    before: Before,
    /// Whether `items` and `spans` belong to the accepted spans.
    is_cut: bool,
    /// Number of units of all suffixes, of one kv head.
    units: u32,
    /// The accepted spans that contain the current one: `(end of its members, index in accepted)`.
    around: Vec<(u32, u32)>,
}

impl SharedSplit {
    /// Allocates the memory for every split of this shape, which has no window. With `ignore_cost`, all spans that fit
    /// are accepted, whatever their cost.
    pub fn new(shape: SplitShape, grid: SharedGrid, ignore_cost: bool) -> Self {
        assert!(shape.window == 0 && grid.serves(&shape));
        let rows = Self::rows_max(&shape) as usize;
        Self {
            shape,
            grid,
            costs: grid.costs[shape.narrowest()],
            ignore_cost,
            taken: RowAssignment::new(&shape, &grid, shape.narrowest()),
            head: SharedHead::default(),
            works: Vec::with_capacity(grid.work_count(&shape)),
            shares: Vec::with_capacity(rows),
            members: Vec::with_capacity(shape.members_max(shape.tokens_max as usize, rows)),
            spans: Vec::with_capacity(SPANS_MAX as usize + rows),
            items: Vec::with_capacity(ITEMS_MAX as usize),
            work: SpanWork::default(),
            accepted: Vec::with_capacity(SPANS_MAX as usize + rows),
            eligible: Vec::with_capacity(rows + 1),
            before: Before::new(rows),
            is_cut: false,
            units: 0,
            around: Vec::with_capacity(rows),
        }
    }

    /// Returns the maximum number of rows for which spans are read once. In larger batches each row reads separately.
    pub fn rows_max(shape: &SplitShape) -> u32 {
        let striped = shape.kv_heads / shape.decode_stripes(shape.narrowest());
        let listed = (LISTED_SUMS / shape.kv_heads).min(LISTED_SUFFIXES / striped);
        shape.batch_max.min(SHARED_ROWS_MAX).min(listed)
    }

    /// Splits a step for a kernel that takes these rows. Returns false if it accepts no span, if the batch has too many
    /// rows, or if reading spans once is not faster by the model's margin.
    pub fn plan(&mut self, rows: &[BatchRow], shared: &SharedSpans<'_>, taken: RowAssignment) -> bool {
        if rows.len() as u32 > Self::rows_max(&self.shape) {
            return false;
        }
        self.accept(rows, shared, taken);
        if self.accepted.is_empty() {
            return false;
        }
        let row_tokens = self.measure_suffixes(rows);
        let deal = self.deal();
        self.work = SpanWork { row_bytes: row_tokens * self.token_bytes(), ..deal.work };
        if !self.ignore_cost && !self.costs.is_better_once(&self.work) {
            return false;
        }
        self.cut_spans(&deal);
        self.cut_suffixes(rows);
        true
    }

    /// Returns the bytes of all suffixes and own items, and of all accepted spans.
    fn distinct_bytes(&self) -> (f64, f64) {
        let with_suffixes = self.shares.iter().filter(|share| share.units > 0).count() as u32;
        let units = self.units - with_suffixes * DECODE_EXTRA;
        let accepted = |own| self.accepted.iter().filter(move |span| span.own == own);
        let [spans, items] = [false, true].map(|own| accepted(own).map(|span| span.end - span.begin).sum::<u32>());
        let bytes = |tokens: u32| f64::from(tokens) * self.token_bytes();
        (bytes(units * DECODE_UNIT + items), bytes(spans))
    }

    /// Returns the bytes of K and V of a token in all heads.
    fn token_bytes(&self) -> f64 {
        f64::from(2 * self.grid.number_bytes * self.shape.kv_heads * self.shape.head_dim)
    }

    fn tile_members(&self) -> u32 {
        self.grid.rows / self.shape.group
    }

    fn query_tiles(&self, members: u32) -> u32 {
        members.div_ceil(self.tile_members())
    }

    /// Writes the first unit of each row's suffix in a stripe, and its number of units of one kv head. Returns the
    /// number of tokens that the kernel's rows would read without shared reads.
    fn measure_suffixes(&mut self, rows: &[BatchRow]) -> f64 {
        let heads = self.shape.kv_heads / self.stripes();
        let (mut units, mut row_tokens) = (0, 0_u64);
        for (row, share) in rows.iter().zip(&mut self.shares) {
            share.start = units * heads;
            if self.taken.has_suffix(row) {
                let tokens = row.kv_len - share.begin.min(row.kv_len);
                share.units = tokens.div_ceil(DECODE_UNIT) + DECODE_EXTRA;
                units += share.units;
            }
            row_tokens += u64::from(if share.extend_len > 0 { row.kv_len } else { 0 });
        }
        self.units = units;
        row_tokens as f64
    }

    /// Cuts the accepted spans into items, unless they are cut already.
    fn cut_spans(&mut self, deal: &Deal) {
        if self.is_cut && (self.head.span_ctas, self.head.work_tiles) == (deal.ctas, deal.tiles) {
            return;
        }
        self.is_cut = true;
        self.items.clear();
        self.spans.clear();
        self.head = SharedHead::default();
        let heads = self.shape.kv_heads;
        self.head.span_ctas = deal.ctas;
        self.head.work_tiles = deal.tiles;
        self.list_spans();
        self.items.resize(deal.ctas as usize, SpanItem::default());
        let mut last = None;
        for head in 0..heads {
            for span in 0..self.spans.len() {
                for query_tile in 0..self.accepted[span].query_tiles {
                    self.cut_query_tile(head, span, query_tile, &mut last);
                }
            }
        }
        assert!(self.items.len() <= ITEMS_MAX as usize, "K4: there is room for items");
    }

    fn list_spans(&mut self) {
        for span in &self.accepted {
            let tiles = Self::token_tiles(span);
            let stride = self.stride(tiles, self.head.work_tiles);
            self.spans.push(SpanParts {
                tile_at: self.head.head_tiles,
                tiles,
                member_start: span.member_start,
                member_count: span.member_count,
                parent: span.parent,
                row_at: self.head.head_rows,
                stride,
                reserved: 0,
            });
            self.head.head_tiles += stride * span.query_tiles;
            self.head.head_rows += span.member_count * self.shape.group;
        }
        assert!(self.head.head_rows * self.shape.kv_heads <= PARTIAL_ROWS, "K4: sums have room");
    }

    /// Writes the items of a query tile, one for each of its CTAs. `last` is the previous item and its CTA.
    fn cut_query_tile(&mut self, head: u32, span: usize, query_tile: u32, last: &mut Option<(usize, u32)>) {
        let (parts, accepted) = (self.spans[span], self.accepted[span]);
        let (whole, per, rows) = (self.tile_members(), self.head.work_tiles, self.grid.rows);
        let first_member = query_tile * whole;
        let begin = head * self.head.head_tiles + parts.tile_at + query_tile * parts.stride;
        let end = begin + parts.tiles;
        // Query tiles are in the order of their CTAs.
        let mut first = last.map_or(0, |(_, cta)| cta);
        while (first + 1) * per <= begin {
            first += 1;
        }
        let last_cta = if end <= (first + 1) * per { first } else { (end - 1) / per };
        let alone = 2 * self.head.span_ctas * rows
            + head * self.head.head_rows
            + parts.row_at
            + first_member * self.shape.group;
        for cta in first..=last_cta {
            let (from, to) = ((cta * per).max(begin) - begin, ((cta + 1) * per).min(end) - begin);
            let is_whole = from == 0 && to == parts.tiles;
            let kv_end = accepted.end.min(accepted.begin + to * SPAN_TOKENS);
            let item = SpanItem {
                row: accepted.row,
                member_start: parts.member_start + first_member,
                head: head as u16,
                parts: (last_cta - first + 1) as u16,
                next: 0,
                piece: (cta - first) as u16,
                member_count: whole.min(parts.member_count - first_member) as u16,
                behind: accepted.behind(kv_end),
                kv_begin: accepted.begin + from * SPAN_TOKENS,
                kv_end,
                part: if is_whole { alone } else { (2 * cta + u32::from(cta == first)) * rows },
            };
            let place = match *last {
                Some((before, same)) if same == cta => {
                    self.items[before].next = self.items.len() as u16;
                    self.items.push(item);
                    self.items.len() - 1
                }
                _ => {
                    self.items[cta as usize] = item;
                    cta as usize
                }
            };
            *last = Some((place, cta));
        }
    }

    fn stripes(&self) -> u32 {
        self.shape.decode_stripes(self.shape.narrowest())
    }

    fn token_tiles(span: &Accepted) -> u32 {
        (span.end - span.begin).div_ceil(SPAN_TOKENS)
    }

    /// Returns the number of tiles from one query tile of `tiles` tiles to the next, if each CTA has `per` tiles. If a
    /// few extra tiles fill whole CTAs, they are added, so that no CTA has two items. Otherwise the extra tiles
    /// represent the fixed cost of an item.
    fn stride(&self, tiles: u32, per: u32) -> u32 {
        let up = tiles.next_multiple_of(per);
        up.min(tiles + self.grid.item_tiles)
    }

    /// Returns the number of tiles of all query tiles, including the extra ones between them.
    fn all_tiles(&self, per: u32) -> u32 {
        let mut strides = self.accepted.iter().map(|span| {
            let tiles = Self::token_tiles(span);
            (tiles, self.stride(tiles, per), span.query_tiles)
        });
        let of_head = strides.clone().map(|(_, stride, query_tiles)| stride * query_tiles).sum::<u32>();
        let behind = strides.next_back().map_or(0, |(tiles, stride, _)| stride - tiles);
        of_head * self.shape.kv_heads - behind
    }

    /// Returns the step's work with `ctas` CTAs for spans.
    fn dealt(&self, work: &SpanWork, tiles: u32, ctas: u32) -> SpanWork {
        SpanWork { work_tiles: f64::from(tiles.div_ceil(ctas)), suffix_ctas: f64::from(self.grid.ctas - ctas), ..*work }
    }

    /// Returns the number of CTAs for spans at which the step ends soonest. One more CTA never makes spans later or
    /// suffixes sooner, so the best number is at the crossing of both times, or one before it.
    fn balance(&self, work: &SpanWork, tiles: u32) -> u32 {
        let sides = |ctas| self.costs.sides(&self.dealt(work, tiles, ctas));
        let later = |ctas| sides(ctas).into_iter().fold(0.0, f64::max);
        let (mut low, mut high) = (1, self.grid.span_ctas_max(&self.shape).min(tiles));
        while low < high {
            let middle = low.midpoint(high);
            let [spans, suffixes] = sides(middle);
            if spans <= suffixes { high = middle } else { low = middle + 1 }
        }
        let other = (low - 1).max(1);
        if later(other) < later(low) { other } else { low }
    }

    /// Chooses the number of CTAs that work on spans.
    fn deal(&self) -> Deal {
        let unit_bytes = f64::from(self.units * DECODE_UNIT) * self.token_bytes();
        let (own_bytes, span_bytes) = self.distinct_bytes();
        let work = SpanWork { unit_bytes, own_bytes, span_bytes, ..SpanWork::default() };
        let all = self.all_tiles(1);
        let least = all.div_ceil(self.balance(&work, all));
        // A longer share may suit the memory, and another length may fit the query tiles better.
        let mut best: Option<(f64, Deal)> = None;
        for more in 0.. {
            if more >= SHARES_TRIED && best.is_some() {
                break;
            }
            let tiles = least + (least * more).div_ceil(8);
            let all = self.all_tiles(tiles);
            let ctas = all.div_ceil(tiles);
            if ctas <= self.grid.span_ctas_max(&self.shape) {
                let work = self.dealt(&work, all, ctas);
                let once = self.costs.once(&work);
                if best.as_ref().is_none_or(|best| once < best.0) {
                    best = Some((once, Deal { work, ctas, tiles }));
                }
            }
        }
        best.expect("one CTA has room").1
    }

    /// Cuts the suffixes into work chunks.
    fn cut_suffixes(&mut self, rows: &[BatchRow]) {
        let (stripes, span_ctas) = (self.stripes(), self.head.span_ctas);
        self.head.decode_warps = self.grid.warps * (self.grid.ctas - span_ctas);
        let heads = self.shape.kv_heads / stripes;
        let total = self.units * heads;
        let chunks = (self.head.decode_warps / stripes).max(1);
        let per = total.div_ceil(chunks).max((total / 32).clamp(1, 16));
        self.head.work_units = per;
        let units = |i: usize| self.shares[i].start..self.shares[i].start + self.shares[i].units * heads;
        let works = work_chunks(rows, per, total, units).take(self.grid.work_count(&self.shape));
        self.works.clear();
        self.works.extend(works);
    }
}

#[cfg(test)]
mod tests;
