//! Steps whose rows share spans: which spans are read once, and who works on what then.
//!
//! A span is accepted where reading it once is cheaper than reading it by each row; a refused one is left to the spans
//! below it that are accepted, so that what a row reads by itself is always one tail. Some CTAs work on the spans'
//! items, as the extend kernel does; the others on the rows' tails, as the decode kernel does, a work chunk a warp
//! ([`SharedGrid`]). They are dealt so that both are done at about the same time: products and memory then overlap.
//!
//! A row's new tokens are members side by side, as a span ends before the first of them: each sees all of it. Rows with
//! more query rows than a tail has room for, and trees of drafts, are left to the extend kernel.
//!
//! * K4. Each (row, kv head, token) is in exactly one span's item or one work chunk; parts of sums do not overlap.
//!
//! Cost: O(rows, members of all spans, CTAs, items).
//!
//! Not here: how spans are found (`plan/spans.rs`), what they cost (`shared/cost.rs`), which kernel reads them
//! (`shared/grid.rs`), steps without (`decode.rs`).

mod cost;
mod grid;

use super::super::params::{
    DecodeWork, ExtendWork, LISTED_SUMS, LISTED_TAILS, RowShare, SharedHead, SpanMember, SpanParts,
    TREE_ROW,
};
use super::{DECODE_EXTRA, DECODE_UNIT, Decoded, SplitShape};
use crate::plan::{BatchRow, SharedSpan, SharedSpans};
pub use cost::{SpanCosts, SpanWork};
pub use grid::{SharedGrid, TAIL_ROWS};

/// Tokens of a tile: items are cut at multiples of it.
const SPAN_TOKENS: u32 = 128;
/// No shape has more rows that spans are read once for.
pub const SHARED_ROWS_MAX: u32 = 512;
/// Accepted spans of a step.
pub const SPANS_MAX: u32 = 64;
/// Items of a step, of one kv head each.
pub const ITEMS_MAX: u32 = 512;
/// Query rows that the partial sums of spans have room for.
pub const PARTIAL_ROWS: u32 = 1 << 16;
/// Most parts that the longest span is cut into.
const PARTS_MAX: u32 = 12;
/// `ExtendWork::kv_len` of an item: no query stands in a span.
const NO_MASK: u32 = 1 << 30;
/// No such span.
const NONE: u32 = u32::MAX;

/// Eligible rows, and their new tokens.
#[derive(Clone, Copy, Debug, Default)]
struct Eligible {
    rows: u32,
    tokens: u32,
}

/// A span that is read once: its eligible members' new tokens, and the positions that it covers.
#[derive(Clone, Copy, Debug)]
struct Accepted {
    member_start: u32,
    member_count: u32,
    begin: u32,
    end: u32,
    parent: u32,
    /// A member's row of the page tables.
    row: u32,
}

/// How a step's spans are dealt out.
#[derive(Clone, Copy, Debug)]
struct Deal {
    /// What the step's time is made of.
    work: SpanWork,
    /// Nanoseconds that it is thought to take.
    time: f64,
    /// CTAs that work on spans.
    ctas: u32,
    /// Tokens of a piece.
    chunk: u32,
}

/// What the shared kernel is given of a step, made anew for each, in memory that stays.
#[derive(Clone, Debug)]
pub struct SharedSplit {
    shape: SplitShape,
    grid: SharedGrid,
    costs: SpanCosts,
    spans_max: u32,
    free: bool,
    /// Rows that the kernel of the step takes.
    taken: Decoded,
    pub head: SharedHead,
    pub works: Vec<DecodeWork>,
    pub shares: Vec<RowShare>,
    pub members: Vec<SpanMember>,
    pub spans: Vec<SpanParts>,
    pub items: Vec<ExtendWork>,
    /// What the step's time is made of, if spans were to be read once.
    pub work: SpanWork,
    accepted: Vec<Accepted>,
    /// Of each place of the plan's members, the eligible ones before it.
    eligible: Vec<Eligible>,
    /// Where each row's tail ends, in units of one kv head.
    ends: Vec<u32>,
    /// Ends of the accepted spans around the one at hand: `(end of their members, accepted)`.
    around: Vec<(u32, u32)>,
}

impl SharedSplit {
    /// Takes the memory for every split of this shape, whose window is none.
    /// `spans_max`: most spans that are accepted.
    /// `free`: all that fit are, whatever they cost.
    pub fn new(shape: SplitShape, grid: SharedGrid, spans_max: u32, free: bool) -> Self {
        assert!(shape.window == 0 && grid.serves(&shape));
        let rows = Self::rows_max(&shape) as usize;
        Self {
            shape,
            grid,
            costs: grid.costs[shape.narrowest()],
            free,
            taken: shape.decoded(shape.narrowest()),
            spans_max: spans_max.min(SPANS_MAX),
            head: SharedHead::default(),
            works: Vec::with_capacity(grid.work_count(&shape)),
            shares: Vec::with_capacity(rows),
            members: Vec::with_capacity(shape.members_max(
                TAIL_ROWS.len() - 1,
                shape.tokens_max as usize,
                rows,
            )),
            spans: Vec::with_capacity(SPANS_MAX as usize),
            items: Vec::with_capacity(ITEMS_MAX as usize),
            work: SpanWork::default(),
            accepted: Vec::with_capacity(SPANS_MAX as usize),
            eligible: Vec::with_capacity(rows + 1),
            ends: Vec::with_capacity(rows),
            around: Vec::with_capacity(rows),
        }
    }

    /// Most rows of a batch that spans are read once for; where there are more, each row is read by itself.
    pub fn rows_max(shape: &SplitShape) -> u32 {
        let striped = shape.kv_heads / shape.decode_stripes(shape.narrowest());
        let listed = (LISTED_SUMS / shape.kv_heads).min(LISTED_TAILS / striped);
        shape.batch_max.min(SHARED_ROWS_MAX).min(listed)
    }

    /// Whether a row's queries may be gathered.
    fn is_eligible(&self, row: &BatchRow) -> bool {
        self.taken.has(row) && row.kv_len > 0
    }

    /// Splits a step for the kernel of `tails` ([`TAIL_ROWS`]). `always`: also where no span is accepted, for graphs
    /// that hold that kernel. False where each row is better read by itself, with nothing made unless `always`.
    pub fn plan(
        &mut self,
        rows: &[BatchRow],
        shared: &SharedSpans<'_>,
        tails: usize,
        always: bool,
    ) -> bool {
        self.accepted.clear();
        self.taken = self.shape.decoded(tails);
        self.costs = self.grid.costs[tails];
        if rows.len() as u32 > Self::rows_max(&self.shape) {
            return false;
        }
        if self.span_ctas_max() > 0 {
            self.accept(rows, shared);
        }
        if !self.accepted.is_empty() {
            self.share(rows, shared);
            self.measure_tails(rows);
            let deal = self.deal();
            self.work = SpanWork { row_bytes: self.row_bytes(rows), ..deal.work };
            if self.free || self.costs.is_better_once(&self.work) {
                self.cut_spans(&deal);
                self.cut_tails(rows);
                return true;
            }
            self.accepted.clear();
        }
        if always {
            self.share(rows, shared);
            self.measure_tails(rows);
            self.clear_spans();
            self.cut_tails(rows);
        }
        false
    }

    /// Decides which spans are read once, parents first: a child takes over what its parent was refused.
    fn accept(&mut self, rows: &[BatchRow], shared: &SharedSpans<'_>) {
        self.eligible.clear();
        let mut count = Eligible::default();
        self.eligible.push(count);
        for &member in shared.members {
            let row = &rows[member as usize];
            if self.is_eligible(row) {
                count.rows += 1;
                count.tokens += row.extend_len;
            }
            self.eligible.push(count);
        }
        self.around.clear();
        let (mut items, mut partial_rows) = (0, 0);
        for span in shared.spans {
            let (first, last) = (span.range().start, span.range().end);
            while self.around.pop_if(|around| around.0 <= first as u32).is_some() {}
            let parent = self.around.last().map_or(NONE, |around| around.1);
            let begin = self.accepted.get(parent as usize).map_or(0, |parent| parent.end);
            let (before, up_to) = (self.eligible[first], self.eligible[last]);
            let (member_rows, members) = (up_to.rows - before.rows, up_to.tokens - before.tokens);
            let gain = self.gain(member_rows, members, span.end - begin);
            let (more_items, more_rows) = (self.tiles(members), members * self.shape.group);
            let room = items + more_items <= ITEMS_MAX
                && (partial_rows + more_rows) * self.shape.kv_heads <= PARTIAL_ROWS
                && self.accepted.len() < self.spans_max as usize;
            if gain <= 0.0 || !room {
                continue;
            }
            (items, partial_rows) = (items + more_items, partial_rows + more_rows);
            self.around.push((last as u32, self.accepted.len() as u32));
            self.accepted.push(Accepted {
                member_start: before.tokens,
                member_count: members,
                begin,
                end: span.end,
                parent,
                row: Self::table_row(rows, shared, span),
            });
        }
    }

    /// Any member's row of the page tables.
    fn table_row(rows: &[BatchRow], shared: &SharedSpans<'_>, span: &SharedSpan) -> u32 {
        rows[shared.members[span.range().start] as usize].row.raw() & !TREE_ROW
    }

    /// Nanoseconds that the step gains if `rows` rows' next `len` tokens are read once for all their new tokens.
    fn gain(&self, rows: u32, members: u32, len: u32) -> f64 {
        if rows < 2 {
            return 0.0;
        }
        if self.free {
            return f64::INFINITY;
        }
        let bytes = f64::from(len) * self.token_bytes();
        let tiles = self.tiles(members) * len.div_ceil(SPAN_TOKENS) * self.shape.kv_heads;
        let tiles = f64::from(tiles) / f64::from(self.grid.ctas);
        let parts = f64::from(members * self.shape.kv_heads);
        self.costs.gain(f64::from(rows), bytes, tiles, parts)
    }

    /// Bytes that the rows read, each by itself.
    fn row_bytes(&self, rows: &[BatchRow]) -> f64 {
        let shown = rows.iter().zip(&self.shares).filter(|(_, share)| share.extend_len > 0);
        shown.map(|(row, _)| f64::from(row.kv_len)).sum::<f64>() * self.token_bytes()
    }

    /// Bytes of tails, and of accepted spans.
    fn distinct_bytes(&self) -> (f64, f64) {
        let units: u32 =
            self.shares.iter().map(|share| share.units.saturating_sub(DECODE_EXTRA)).sum();
        let spans: u32 = self.accepted.iter().map(|span| span.end - span.begin).sum();
        let bytes = |tokens: u32| f64::from(tokens) * self.token_bytes();
        (bytes(units * DECODE_UNIT), bytes(spans))
    }

    /// K and V of a token, all heads.
    fn token_bytes(&self) -> f64 {
        f64::from(4 * self.shape.kv_heads * self.shape.head_dim)
    }

    /// Members of a tile of query rows.
    fn tile_members(&self) -> u32 {
        self.grid.rows / self.shape.group
    }

    fn tiles(&self, members: u32) -> u32 {
        members.div_ceil(self.tile_members())
    }

    /// Each row's share of the accepted spans, and the members in their order.
    fn share(&mut self, rows: &[BatchRow], shared: &SharedSpans<'_>) {
        let taken = self.taken;
        self.shares.clear();
        self.shares.extend(rows.iter().map(|row| RowShare {
            begin: 0,
            place: 0,
            span: NONE,
            parts: 0,
            start: 0,
            units: 0,
            qo_start: row.qo_start,
            extend_len: if taken.leaves(row) { 0 } else { row.extend_len },
        }));
        self.members.clear();
        if self.accepted.is_empty() {
            return;
        }
        for &member in shared.members {
            let row = &rows[member as usize];
            if self.is_eligible(row) {
                self.shares[member as usize].place = self.members.len() as u32;
                let queries = row.qo_start..row.qo_start + row.extend_len;
                let of = |qo_start| SpanMember { qo_start, batch_index: member };
                self.members.extend(queries.map(of));
            }
        }
        // Parents stand first, so that a member's last span is its deepest.
        for (i, span) in self.accepted.iter().enumerate() {
            let range =
                span.member_start as usize..(span.member_start + span.member_count) as usize;
            for member in &self.members[range] {
                let share = &mut self.shares[member.batch_index as usize];
                (share.begin, share.span) = (span.end, i as u32);
            }
        }
    }

    /// Where each row's tail ends, in units of one kv head.
    fn measure_tails(&mut self, rows: &[BatchRow]) {
        self.ends.clear();
        let mut end = 0;
        for (row, share) in rows.iter().zip(&mut self.shares) {
            if share.extend_len > 0 {
                let tokens = row.kv_len - share.begin.min(row.kv_len);
                share.units = tokens.div_ceil(DECODE_UNIT) + DECODE_EXTRA;
                end += share.units;
            }
            self.ends.push(end);
        }
    }

    fn clear_spans(&mut self) {
        self.items.clear();
        self.spans.clear();
        self.head = SharedHead::default();
    }

    /// Cuts the accepted spans into items.
    fn cut_spans(&mut self, &Deal { ctas, chunk, .. }: &Deal) {
        self.clear_spans();
        let (heads, group, whole) = (self.shape.kv_heads, self.shape.group, self.tile_members());
        let mut partial_at = 0;
        for span in &self.accepted {
            let pieces = (span.end - span.begin).div_ceil(chunk);
            self.spans.push(SpanParts {
                partial_at,
                pieces,
                member_start: span.member_start,
                member_count: span.member_count,
                parent: span.parent,
                reserved: [0; 3],
            });
            for kv_begin in (span.begin..span.end).step_by(chunk as usize) {
                for first in (0..span.member_count).step_by(whole as usize) {
                    let members = whole.min(span.member_count - first);
                    self.items.push(ExtendWork {
                        row: span.row,
                        qo_start: span.member_start + first,
                        extend_len: members,
                        kv_len: NO_MASK,
                        q_begin: 0,
                        kv_begin,
                        kv_end: span.end.min(kv_begin + chunk),
                        part: partial_at,
                    });
                    partial_at += members * group * heads;
                }
            }
        }
        assert!(partial_at <= PARTIAL_ROWS, "K4: sums of spans have room");
        // Longest first; those of one length as they are: at work together they read the same tokens.
        let length = |item: &ExtendWork| (item.kv_end - item.kv_begin).div_ceil(SPAN_TOKENS);
        self.items.sort_unstable_by_key(|item| (u32::MAX - length(item), item.part));
        for share in &mut self.shares {
            let mut at = share.span;
            while let Some(span) = self.spans.get(at as usize) {
                share.parts += span.pieces;
                at = span.parent;
            }
        }
        self.head.work_count = self.items.len() as u32;
        self.head.span_ctas = ctas.min(self.head.work_count * heads);
    }

    /// Stripes of kv heads that the tails are cut in.
    const fn stripes(&self) -> u32 {
        self.shape.decode_stripes(self.shape.narrowest())
    }

    /// Most CTAs that work on spans: tails want a warp of the others for each stripe.
    const fn span_ctas_max(&self) -> u32 {
        self.grid.ctas.saturating_sub(self.stripes().div_ceil(self.grid.warps))
    }

    /// Tiles of an accepted span's tokens.
    fn token_tiles(span: &Accepted) -> u32 {
        (span.end - span.begin).div_ceil(SPAN_TOKENS)
    }

    /// What the accepted spans are, cut in pieces of `chunk` tiles, or `None` where there is no room for it.
    fn cut(&self, chunk: u32) -> Option<SpanWork> {
        let (heads, group) = (self.shape.kv_heads, self.shape.group);
        let (mut items, mut whole, mut tiles, mut parts) = (0, 0, 0, 0);
        for span in &self.accepted {
            let (high, long) = (self.tiles(span.member_count), Self::token_tiles(span));
            let pieces = long.div_ceil(chunk);
            items += pieces * high;
            whole += long / chunk * high;
            tiles += long * high;
            parts += pieces * span.member_count * heads;
        }
        let fits = items <= ITEMS_MAX && parts * group <= PARTIAL_ROWS;
        let float = |number: u32| f64::from(number);
        fits.then_some(SpanWork {
            items: float(items * heads),
            tiles: float(tiles * heads),
            longest: float(chunk),
            whole: float(whole * heads),
            parts: float(parts),
            ..SpanWork::default()
        })
    }

    /// How many CTAs work on spans so that spans and tails end soonest. With one more, spans end no later and
    /// tails no sooner, so the best number is where they change places, or the one before.
    fn balance(&self, work: &SpanWork) -> (u32, SpanWork) {
        let dealt = |ctas: u32| SpanWork {
            span_ctas: f64::from(ctas),
            tail_ctas: f64::from(self.grid.ctas - ctas),
            ..*work
        };
        let (mut low, mut high) = (1, self.span_ctas_max());
        while low < high {
            let middle = low.midpoint(high);
            let [spans, tails] = self.costs.sides(&dealt(middle));
            if spans <= tails { high = middle } else { low = middle + 1 }
        }
        let [one, other] = [low, (low - 1).max(1)].map(|ctas| (ctas, dealt(ctas)));
        if self.costs.once(&other.1) < self.costs.once(&one.1) { other } else { one }
    }

    /// How many CTAs work on spans, and the length of a piece, so that spans and tails end soonest.
    fn deal(&self) -> Deal {
        let units = self.ends.last().copied().unwrap_or(0) * DECODE_UNIT;
        let unit_bytes = f64::from(units) * self.token_bytes();
        let (own_bytes, span_bytes) = self.distinct_bytes();
        let longest = self.accepted.iter().map(Self::token_tiles).max();
        let longest = longest.expect("a span is accepted");
        let mut best: Option<Deal> = None;
        let mut last = 0;
        for pieces in 1..=PARTS_MAX.min(longest) {
            let chunk = longest.div_ceil(pieces);
            let Some(spans) = self.cut(chunk).filter(|_| chunk != last) else { continue };
            last = chunk;
            let (ctas, work) =
                self.balance(&SpanWork { unit_bytes, own_bytes, span_bytes, ..spans });
            let time = self.costs.once(&work);
            if best.is_none_or(|best| time < best.time) {
                best = Some(Deal { work, time, ctas, chunk: chunk * SPAN_TOKENS });
            }
        }
        best.expect("whole spans that are accepted have room")
    }

    /// Cuts the tails into work chunks, as `decode.rs` cuts whole rows.
    fn cut_tails(&mut self, rows: &[BatchRow]) {
        let (stripes, span_ctas) = (self.stripes(), self.head.span_ctas);
        self.head.decode_warps = self.grid.warps * (self.grid.ctas - span_ctas);
        let heads = self.shape.kv_heads / stripes;
        for (i, share) in self.shares.iter_mut().enumerate() {
            share.start = self.ends[i].saturating_sub(share.units) * heads;
        }
        let total = self.ends.last().copied().unwrap_or(0) * heads;
        let chunks = (self.head.decode_warps / stripes).max(1);
        let per = total.div_ceil(chunks).max((total / 32).clamp(1, 16));
        self.head.work_units = per;
        self.works.clear();
        let mut index = 0;
        for i in 0..self.grid.work_count(&self.shape) as u32 {
            let begin = i * per;
            let mut work = DecodeWork { work_units: per, ..DecodeWork::default() };
            if begin < total && i < chunks {
                while self.ends[index] * heads <= begin {
                    index += 1;
                }
                let row = &rows[index];
                work.unit_end = (begin + per).min(total);
                work.batch_index = index as u32;
                work.unit_start = self.shares[index].start;
                (work.row, work.qo_start) = (row.row.raw(), row.qo_start);
                (work.extend_len, work.kv_len) = (row.extend_len, row.kv_len);
            }
            self.works.push(work);
        }
    }
}

#[cfg(test)]
mod tests;
