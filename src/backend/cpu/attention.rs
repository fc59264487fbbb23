//! Attention over pages: the specification of the attention kernels.
//!
//! A unit of work is a block of query tokens of one sequence, with the query heads that share some kv heads
//! (grouped-query attention, arXiv:2305.13245). It goes through the K and V that it sees a tile at a time. The portable
//! path, and units of many query rows, widen a tile to f32 once for all of the unit's queries; the vector paths widen
//! numbers in registers for few query rows. The softmax is made online (Milakov and Gimelshein 2018,
//! arXiv:1805.02867): for each query row, over the tiles of a segment,
//!
//! ```text
//! m' = max(m, max s_j)    l' = l e^(m - m') + sum e^(s_j - m')    o' = o e^(m - m') + sum e^(s_j - m') v_j
//! ```
//!
//! and at the end the output is `o / l`, the log-sum-exp `m + ln l`. A sink is one more logit there, without a value. A
//! query reads only the V that it sees; later positions have no effect. Segments are joined in order by the same rule.
//!
//! Tiles and segments start at multiples of their sizes, so on one path a query row's result depends on nothing but the
//! row and what it sees, bit by bit: neither on the batch and the chunks of a prefill, nor on the pool, nor on the
//! threads, which take units as they come. A token of a tree gets the same bits as the last token of its branch alone.
//!
//! Not here: checks, and how the work is cut.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use bytemuck::{cast_slice, cast_slice_mut};
use half::bf16;

use super::fold::{Fold, Rows, Tile, Widen};
use super::math::{self, F32x8, LANES, Line, NOTHING, Softmax, TILE, accumulate, dots, exp};
use super::number::Number;
use super::scales::{Row, byte, side_count};
use super::threads;
use super::unit::{Job, Unit};
use crate::backend::Attend;

/// Most query rows of a kv head for which numbers are widened in registers.
const NARROW_ROWS: usize = 8;

/// Units still to do, and where their results go.
struct Queue<'a, U> {
    units: U,
    /// `[query rows, value lines]` of every unit.
    out: &'a mut [Line],
    /// `[query rows]` of every unit.
    softmax: &'a mut [Softmax],
}

/// Computes all units; `out` and `softmax` get their results, unit after unit, one scratch a thread.
pub(super) fn run<T: Number>(
    job: &Job<'_, T>,
    scratch: &mut [Scratch],
    out: &mut [Line],
    softmax: &mut [Softmax],
) {
    let queue = Mutex::new(Queue { units: job.units(), out, softmax });
    threads::share(scratch, |scratch| {
        let mut rest = queue.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(unit) = rest.units.next() else { return false };
        let rows = unit.row_count(job.group());
        let out = rest.out.split_off_mut(..rows * job.value_lines());
        let softmax = rest.softmax.split_off_mut(..rows);
        drop(rest);
        let (out, softmax) = out.zip(softmax).expect("the results have room for all units");
        scratch.compute(job, unit, out, softmax);
        true
    });
}

/// What one thread computes with; kept between calls.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    /// `[query rows, lines]`
    q: Vec<Line>,
    /// `[kv heads, TILE, lines]`
    k: Vec<Line>,
    /// `[kv heads, TILE, lines]`; unused where K has V in it.
    v: Vec<Line>,
    /// `[query rows, TILE]`
    logits: Vec<f32>,
    /// `[query rows]`: factors of the sums so far.
    factors: Vec<f32>,
    /// A unit's results over a segment that is not its first: `[query rows, value lines]`, `[query rows]`.
    part: Vec<Line>,
    part_softmax: Vec<Softmax>,
    /// The tile that is computed, and the next one, which is prefetched meanwhile.
    places: Places,
    ahead: Places,
    /// What a unit that has a list reads.
    listed: Vec<u32>,
}

/// The place of a tile in the pool.
#[derive(Debug, Default)]
struct Places {
    /// Elements of the pool where its slots begin, of K and of V.
    starts: [[usize; TILE]; 2],
    /// `[kv heads]`: its scales of K and of V; used where products are scaled instead of numbers.
    scales: Vec<[[f32; TILE]; 2]>,
}

impl Scratch {
    /// Bytes held.
    pub fn bytes(&self) -> usize {
        [&self.q, &self.k, &self.v, &self.part].map(Vec::capacity).iter().sum::<usize>()
            * size_of::<Line>()
            + (self.logits.capacity() + self.factors.capacity()) * size_of::<f32>()
            + self.part_softmax.capacity() * size_of::<Softmax>()
            + (self.places.scales.capacity() + self.ahead.scales.capacity())
                * size_of::<[[f32; TILE]; 2]>()
            + self.listed.capacity() * size_of::<u32>()
    }

    /// One unit, from its queries to its results.
    fn compute<T: Number>(
        &mut self,
        job: &Job<'_, T>,
        unit: Unit,
        out: &mut [Line],
        softmax: &mut [Softmax],
    ) {
        self.load_queries(job, unit);
        out.fill(Line::default());
        softmax.fill(NOTHING);
        if let Some(listed) = job.listed(unit) {
            self.attend_listed(job, unit, listed, out, softmax);
        } else {
            for (i, segment) in unit.segments().enumerate() {
                if i == 0 {
                    self.attend_seen(job, unit, segment, out, softmax);
                    continue;
                }
                let mut part = std::mem::take(&mut self.part);
                let mut part_softmax = std::mem::take(&mut self.part_softmax);
                part.clear();
                part.resize(out.len(), Line::default());
                part_softmax.clear();
                part_softmax.resize(softmax.len(), NOTHING);
                self.attend_seen(job, unit, segment, &mut part, &mut part_softmax);
                join_parts((out, softmax), (&part, &part_softmax));
                (self.part, self.part_softmax) = (part, part_softmax);
            }
        }
        if unit.continues || unit.goes_on {
            return;
        }
        finish(job, unit, out, softmax);
        if unit.has_list() && self.listed.is_empty() {
            out.fill(Line::default()); // the sum of no values, 0, over that of no weights
        }
    }

    /// What the unit's queries see of a segment.
    fn attend_seen<T: Number>(
        &mut self,
        job: &Job<'_, T>,
        unit: Unit,
        seen: Range<u32>,
        out: &mut [Line],
        softmax: &mut [Softmax],
    ) {
        let tiles = seen.start / TILE as u32..seen.end.div_ceil(TILE as u32);
        let mut tiles = tiles.map(|tile| {
            let start = tile * TILE as u32;
            // The last tile of 2^32 positions, and its last page, end past them.
            start.max(seen.start)..seen.end.min(start.saturating_add(TILE as u32))
        });
        let in_place = computes_in_place(job, unit);
        let mut next = tiles.next();
        if let Some(first) = next.clone().filter(|_| in_place) {
            self.load_tile(job, unit, first);
        }
        while let Some(tile) = next {
            if !in_place {
                self.load_tile(job, unit, tile.clone());
            }
            std::mem::swap(&mut self.places, &mut self.ahead);
            next = tiles.next();
            let mut ahead = 0;
            if let Some(next) = next.clone().filter(|_| in_place) {
                ahead = next.len();
                self.load_tile(job, unit, next);
            }
            self.fold_tile(job, unit, (tile, ahead), (out, softmax));
        }
    }

    /// The positions of a list, of which a unit of one query and one kv head sees each.
    fn attend_listed<T: Number>(
        &mut self,
        job: &Job<'_, T>,
        unit: Unit,
        listed: impl Iterator<Item = u32>,
        out: &mut [Line],
        softmax: &mut [Softmax],
    ) {
        let mut positions = std::mem::take(&mut self.listed);
        positions.clear();
        positions.extend(listed);
        for tile in positions.chunks(TILE) {
            for (row, &position) in tile.iter().enumerate() {
                self.load_slots(job, unit, position..position + 1, row);
            }
            std::mem::swap(&mut self.places, &mut self.ahead);
            self.fold_rows(job, unit, (out, softmax), (tile.len(), 0), |_| 0..tile.len());
        }
        self.listed = positions;
    }

    /// Widens the unit's queries, and makes room for its tiles.
    fn load_queries<T: Number>(&mut self, job: &Job<'_, T>, unit: Unit) {
        let (group, lines) = (job.group(), job.lines());
        let head_dim = job.layout.head_dim() as usize;
        let rows = unit.row_count(group);
        // What pads a head to whole lines is zeroed here and never written.
        grow(&mut self.q, rows * lines);
        let tiles = if computes_in_place(job, unit) { 0 } else { unit.heads as usize * TILE };
        grow(&mut self.k, tiles * lines);
        if !job.layout.is_latent() {
            grow(&mut self.v, tiles * lines);
        }
        grow(&mut self.logits, rows * TILE);
        grow(&mut self.factors, rows);
        grow(&mut self.places.scales, unit.heads as usize);
        grow(&mut self.ahead.scales, unit.heads as usize);
        for ((token, head), wide) in unit.rows(group).zip(self.q.chunks_exact_mut(lines)) {
            let start = token * job.q_stride + head * head_dim;
            let wide: &mut [f32] = cast_slice_mut(wide);
            let wide = &mut wide[..head_dim];
            job.q.elements.slice(start..start + head_dim).convert_into(wide);
        }
    }

    /// Widens K and V of the positions in `tile`, page by page.
    fn load_tile<T: Number>(&mut self, job: &Job<'_, T>, unit: Unit, tile: Range<u32>) {
        let page_size = job.layout.page_size();
        let mut at = tile.start;
        while at < tile.end {
            // Slot by slot where some may be left out.
            let first = unit.table_index(at);
            let run = if unit.is_tree() { 1 } else { page_size - first % page_size };
            let end = tile.end.min(at.saturating_add(run));
            self.load_slots(job, unit, first..first + (end - at), (at - tile.start) as usize);
            at = end;
        }
    }

    /// Widens K and V of positions of one page, from row `row` of their tiles on, slot by slot: as they lie in memory.
    /// Where rows are latent, V is in K's tile. For a unit that computes in place, only the places are stored.
    fn load_slots<T: Number>(
        &mut self,
        job: &Job<'_, T>,
        unit: Unit,
        positions: Range<u32>,
        row: usize,
    ) {
        let (page_size, first) = (job.layout.page_size(), positions.start);
        let width = unit.heads as usize * stored_dim(job);
        let page =
            job.table.track_page(job.words, unit.row.row, job.place.track, first / page_size);
        let in_place = computes_in_place(job, unit);
        let sides = [(&job.k, &mut self.k), (&job.v, &mut self.v)];
        for (side, (strides, tiles)) in sides.into_iter().enumerate().take(side_count(job.layout)) {
            let head = u64::from(unit.first_head) * strides.head;
            for position in positions.clone() {
                let (offset, row) = (position % page_size, row + (position - first) as usize);
                let byte = strides.row(job.place.lane, page, offset) + head;
                let start = byte as usize / size_of::<T>();
                self.ahead.starts[side][row] = start;
                if !in_place {
                    widen_slot(&job.pool[start..start + width], tiles, row, job);
                }
                let slot = Row { side, layer: job.layer, lane: job.place.lane, page, offset };
                if scales_products(job) {
                    let heads = unit.first_head..unit.first_head + unit.heads;
                    for (head, scales) in heads.zip(&mut self.ahead.scales) {
                        scales[side][row] = job.scales.of(job.numbers, slot, head);
                    }
                } else if T::QUANTISED {
                    scale_slot(slot, unit, tiles, row, job);
                    widen_rope(slot, tiles, row, job);
                }
            }
        }
    }

    /// Takes the tile into the softmax and the sum of every query row that sees something of it.
    fn fold_tile<T: Number>(
        &mut self,
        job: &Job<'_, T>,
        unit: Unit,
        (tile, ahead): (Range<u32>, usize),
        results: (&mut [Line], &mut [Softmax]),
    ) {
        self.fold_rows(job, unit, results, (tile.len(), ahead), |query| {
            let seen = unit.sees(query, job.attend.window);
            let (start, end) = (seen.start.max(tile.start), seen.end.min(tile.end));
            start.saturating_sub(tile.start) as usize..end.saturating_sub(tile.start) as usize
        });
    }

    /// Takes a tile of `len` positions into the softmax and the sum of every query row; `sees` says what of the tile a
    /// query token sees.
    fn fold_rows<T: Number>(
        &mut self,
        job: &Job<'_, T>,
        unit: Unit,
        (out, softmax): (&mut [Line], &mut [Softmax]),
        (len, ahead): (usize, usize),
        sees: impl Fn(u32) -> Range<usize>,
    ) {
        if job.isa.is_vector() {
            return self.fold_vectors(job, unit, (out, softmax), (len, ahead), sees);
        }
        let (group, vectors) = (job.group(), job.lines() * LINE_VECTORS);
        let value_vectors = job.value_lines() * LINE_VECTORS;
        let rows = unit.rows_per_head(group);
        let v = if job.layout.is_latent() { &self.k } else { &self.v };
        let [q, k, v]: [&[F32x8]; 3] = [&self.q, &self.k, v].map(|lines| cast_slice(lines));
        let out: &mut [F32x8] = cast_slice_mut(out);
        let tiles = k.chunks_exact(TILE * vectors).zip(v.chunks_exact(TILE * vectors));
        let queries = q.chunks_exact(rows * vectors).zip(softmax.chunks_exact_mut(rows));
        let heads = tiles.zip(queries.zip(out.chunks_exact_mut(rows * value_vectors)));
        for ((k, v), ((q, softmax), out)) in heads {
            let logits = &mut self.logits[..rows * TILE];
            multiply(q, k, vectors, len, logits);
            let rows = softmax.iter_mut().zip(logits.chunks_exact_mut(TILE));
            let outs = out.chunks_exact_mut(value_vectors);
            for (i, ((softmax, logits), out)) in rows.zip(outs).enumerate() {
                let seen = sees((i / group) as u32);
                if seen.is_empty() {
                    continue;
                }
                let weights = &mut logits[seen.clone()];
                let factor = fold_logits(job.attend, softmax, weights);
                let values = &v[seen.start * vectors..seen.end * vectors];
                accumulate(out, factor, weights, values, vectors);
            }
        }
    }

    /// [`Scratch::fold_rows`] with vectors.
    fn fold_vectors<T: Number>(
        &mut self,
        job: &Job<'_, T>,
        unit: Unit,
        (out, softmax): (&mut [Line], &mut [Softmax]),
        (len, ahead_len): (usize, usize),
        sees: impl Fn(u32) -> Range<usize>,
    ) {
        let group = job.group();
        let widths = [job.lines(), job.value_lines()].map(|lines| lines * Line::NUMBERS);
        let (heads, width) = (unit.heads as usize, widths[0]);
        let rows = Rows {
            attend: job.attend,
            heads,
            count: unit.rows_per_head(group),
            widths,
            q: cast_slice(&self.q),
            scales: if scales_products(job) { &self.places.scales[..heads] } else { &[] },
            sees: |row| sees((row / group) as u32),
            logits: &mut self.logits,
            softmax,
            factors: &mut self.factors,
            out: cast_slice_mut(out),
        };
        let v_side = side_count(job.layout) - 1;
        if computes_in_place(job, unit) {
            let slot = |start| job.pool.get(start..start + heads * width).unwrap_or(&[]);
            let [keys, values] = [0, v_side].map(|side| self.places.starts[side].map(slot));
            let ahead = self.ahead.starts[0].map(slot);
            let (keys, values) = (&keys[..len], &values[..len]);
            let tile = Tile { keys, values, apart: width, ahead: Some(&ahead[..ahead_len]) };
            job.isa.run(Fold { rows, tile });
        } else {
            let tiles: [&[f32]; 2] = [cast_slice(&self.k), cast_slice(&self.v)];
            let [keys, values] = [0, v_side]
                .map(|side| std::array::from_fn::<_, TILE, _>(|row| &tiles[side][row * width..]));
            let (keys, values) = (&keys[..len], &values[..len]);
            job.isa
                .run(Fold { rows, tile: Tile { keys, values, apart: TILE * width, ahead: None } });
        }
    }
}

/// [`F32x8`] in a [`Line`].
const LINE_VECTORS: usize = Line::NUMBERS / LANES;

/// Whether the numbers of a unit are widened in registers: its query rows are few, and its heads are whole lines.
fn computes_in_place<T: Number>(job: &Job<'_, T>, unit: Unit) -> bool {
    let whole = job.layout.head_dim().is_multiple_of(Line::NUMBERS as u32) && job.rope.is_none();
    job.isa.is_vector() && whole && unit.rows_per_head(job.group()) <= NARROW_ROWS
}

/// Whether logits and weights are scaled instead of K and V. It depends on no chunk, so chunks change no bit.
fn scales_products<T: Number>(job: &Job<'_, T>) -> bool {
    T::QUANTISED && job.isa.is_vector() && job.rope.is_none()
}

/// Adds results over a later segment to the results of the same query rows over the segments before.
pub(super) fn join_parts(
    (out, softmax): (&mut [Line], &mut [Softmax]),
    (more, more_softmax): (&[Line], &[Softmax]),
) {
    let lines = out.len() / softmax.len();
    let rows = softmax.iter_mut().zip(out.chunks_exact_mut(lines));
    for ((softmax, out), (later, more)) in
        rows.zip(more_softmax.iter().zip(more.chunks_exact(lines)))
    {
        math::join((softmax, cast_slice_mut(out)), (*later, cast_slice(more)));
    }
}

/// Adds the sinks to the softmax of a unit's query rows, and divides their sums.
pub(super) fn finish<T: Number>(
    job: &Job<'_, T>,
    unit: Unit,
    out: &mut [Line],
    softmax: &mut [Softmax],
) {
    let rows = unit.rows(job.group()).zip(out.chunks_exact_mut(job.value_lines())).zip(softmax);
    for (((_, head), out), softmax) in rows {
        let out: &mut [f32] = cast_slice_mut(out);
        if let Some(sinks) = job.sinks {
            enter_sink(sinks[head], softmax, out);
        }
        out.iter_mut().for_each(|x| *x /= softmax.1);
    }
}

/// At least `len` elements, the new ones 0.
fn grow<T: Copy + Default>(buffer: &mut Vec<T>, len: usize) {
    if buffer.len() < len {
        buffer.resize(len, T::default());
    }
}

/// Numbers of one head that lie side by side: all of K's but where latent rows are quantised.
fn stored_dim<T: Number>(job: &Job<'_, T>) -> usize {
    let dim = if T::QUANTISED { job.layout.value_dim() } else { job.layout.head_dim() };
    dim as usize
}

/// Widens one slot's heads, each to row `row` of its tile.
fn widen_slot<T: Number>(slot: &[T], tiles: &mut [Line], row: usize, job: &Job<'_, T>) {
    let (lines, dim) = (job.lines(), stored_dim(job));
    let tiles = tiles.chunks_exact_mut(TILE * lines);
    for (head, tile) in slot.chunks_exact(dim).zip(tiles) {
        let wide = &mut cast_slice_mut(&mut tile[row * lines..(row + 1) * lines])[..dim];
        if let Some(Widen(head, wide)) = job.isa.run(Widen(head, wide)) {
            T::widen(head, wide);
        }
    }
}

/// Widens what of a latent row is not quantised, behind what is.
fn widen_rope<T: Number>(slot: Row, tiles: &mut [Line], row: usize, job: &Job<'_, T>) {
    let Some((strides, pool)) = job.rope else { return };
    let (lines, dim, row_len) = (job.lines(), stored_dim(job), job.layout.head_dim() as usize);
    let start = byte(strides, slot, 0) as usize / size_of::<bf16>();
    let wide: &mut [f32] = cast_slice_mut(&mut tiles[row * lines..(row + 1) * lines]);
    bf16::widen(&pool[start..start + row_len - dim], &mut wide[dim..row_len]);
}

/// Multiplies row `row` of each head's tile by the head's scale in one slot, and nothing of what pads it.
fn scale_slot<T: Number>(slot: Row, unit: Unit, tiles: &mut [Line], row: usize, job: &Job<'_, T>) {
    let (lines, dim) = (job.lines(), stored_dim(job));
    let heads = unit.first_head..unit.first_head + unit.heads;
    for (head, tile) in heads.zip(tiles.chunks_exact_mut(TILE * lines)) {
        let scale = job.scales.of(job.numbers, slot, head);
        let wide: &mut [f32] = cast_slice_mut(&mut tile[row * lines..(row + 1) * lines]);
        for x in &mut wide[..dim] {
            *x *= scale;
        }
    }
}

/// Products of all queries with a tile's first `len` keys: `logits`, `[queries, TILE]`. What it makes of queries and
/// keys that do not see each other, and of what an earlier tile left past `len`, nobody reads.
fn multiply(q: &[F32x8], k: &[F32x8], vectors: usize, len: usize, logits: &mut [f32]) {
    let mut queries = q.chunks_exact(2 * vectors);
    let mut logits = logits.chunks_exact_mut(2 * TILE);
    for (pair, logits) in (&mut queries).zip(&mut logits) {
        let (q0, q1) = pair.split_at(vectors);
        let (s0, s1) = logits.split_at_mut(TILE);
        for (at, keys) in k.chunks_exact(2 * vectors).enumerate().take(len.div_ceil(2)) {
            let (k0, k1) = keys.split_at(vectors);
            let [products0, products1] = dots([q0, q1], [k0, k1]);
            s0[2 * at..2 * at + 2].copy_from_slice(&products0);
            s1[2 * at..2 * at + 2].copy_from_slice(&products1);
        }
    }
    let (q, s) = (queries.remainder(), logits.into_remainder());
    if q.is_empty() {
        return;
    }
    for (at, keys) in k.chunks_exact(4 * vectors).enumerate().take(len.div_ceil(4)) {
        let (low, high) = keys.split_at(2 * vectors);
        let ((k0, k1), (k2, k3)) = (low.split_at(vectors), high.split_at(vectors));
        let [products] = dots([q], [k0, k1, k2, k3]);
        s[4 * at..4 * at + 4].copy_from_slice(&products);
    }
}

/// Products to weights `e^(s - m')`; returns `e^(m - m')`, what earlier sums are worth now.
fn fold_logits(attend: &Attend, (max, sum): &mut (f32, f32), logits: &mut [f32]) -> f32 {
    for x in &mut *logits {
        *x *= attend.scale;
    }
    if let Some(cap) = attend.soft_cap {
        for x in &mut *logits {
            *x = cap * (*x / cap).tanh();
        }
    }
    let new_max = math::max(*max, logits);
    // As long as every logit is minus infinity, every weight is 0, not NaN.
    let base = if new_max == f32::NEG_INFINITY { 0.0 } else { new_max };
    let factor = exp(*max - base);
    for x in &mut *logits {
        *x = exp(*x - base);
    }
    *sum = *sum * factor + math::sum(logits);
    *max = new_max;
    factor
}

/// A logit of no value beside all that a row has seen.
fn enter_sink(sink: f32, (max, sum): &mut (f32, f32), out: &mut [f32]) {
    if sink == f32::NEG_INFINITY {
        return;
    }
    let new_max = math::max(*max, &[sink]);
    let factor = exp(*max - new_max);
    for x in out {
        *x *= factor;
    }
    *sum = *sum * factor + exp(sink - new_max);
    *max = new_max;
}

#[cfg(test)]
mod tests {
    use super::{enter_sink, fold_logits};
    use crate::backend::Attend;

    const LOW: f32 = f32::NEG_INFINITY;

    fn plain() -> Attend {
        Attend { scale: 1.0, ..Attend::new(1, 1) }
    }

    #[test]
    fn a_sink_takes_weight_and_gives_no_value() {
        // Two tokens of logit 2, each of weight 1, and a sink as large: a third of the weight.
        let (mut softmax, mut out) = ((2.0, 2.0), [4.0, -2.0]);
        enter_sink(2.0, &mut softmax, &mut out);
        assert_eq!((softmax, out), ((2.0, 3.0), [4.0, -2.0]));
        enter_sink(LOW, &mut softmax, &mut out);
        assert_eq!((softmax, out), ((2.0, 3.0), [4.0, -2.0]), "none is as if nothing were said");
        enter_sink(1000.0, &mut softmax, &mut out);
        assert_eq!((softmax, out), ((1000.0, 1.0), [0.0, -0.0]));
        // Beside tokens of no weight at all it has all of it.
        let (mut softmax, mut out) = ((LOW, 0.0), [0.0; 2]);
        enter_sink(-3.0, &mut softmax, &mut out);
        assert_eq!((softmax, out), ((-3.0, 1.0), [0.0; 2]));
    }

    #[test]
    fn logits_of_minus_infinity_weigh_nothing_wherever_they_stand() {
        let mut softmax = (LOW, 0.0);
        let mut none = [LOW; 3];
        assert_eq!(fold_logits(&plain(), &mut softmax, &mut none), 0.0);
        assert_eq!((softmax, none), ((LOW, 0.0), [0.0; 3]), "no weight, and no NaN");
        // A tile that has something begins from there as from the start.
        let mut some = [LOW, 2.0, LOW, 2.0];
        assert_eq!(fold_logits(&plain(), &mut softmax, &mut some), 0.0);
        assert_eq!((softmax, some), ((2.0, 2.0), [0.0, 1.0, 0.0, 1.0]));
        // And one that has nothing changes nothing.
        let mut none = [LOW; 9];
        assert_eq!(fold_logits(&plain(), &mut softmax, &mut none), 1.0);
        assert_eq!((softmax, none), ((2.0, 2.0), [0.0; 9]));
    }
}
