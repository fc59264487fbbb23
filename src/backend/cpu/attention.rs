//! Attention over pages: the specification of the attention kernels.
//!
//! A unit of work is a block of query tokens of one sequence, with the query heads that share some kv heads
//! (grouped-query attention, arXiv:2305.13245). It goes through the K and V that it sees a tile at a time, so that each
//! number of them is widened to f32 once for all of the unit's queries. The softmax is made online (Milakov and
//! Gimelshein 2018, arXiv:1805.02867): for each query row, over the tiles,
//!
//! ```text
//! m' = max(m, max s_j)    l' = l e^(m - m') + sum e^(s_j - m')    o' = o e^(m - m') + sum e^(s_j - m') v_j
//! ```
//!
//! and at the end the output is `o / l`, the log-sum-exp `m + ln l`. A sink is one more logit there, without a value. A
//! query reads no V but what it sees: what lies past its position has no effect, whatever it is.
//!
//! Tiles start at multiples of their size, so a query row's result depends on nothing but the row and what it sees, bit
//! by bit: neither on the batch and the chunks of a prefill, nor on the pool, nor on the threads, which take units as
//! they come. A token of a tree goes through what it sees as if nothing lay between: so it too gets what it would get
//! as the last token of its branch alone.
//!
//! Not here: checks, and how the work is cut.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};
use std::thread;

use half::bf16;

use super::math::{self, F32x8, LANES, accumulate, dots, exp};
use super::number::Number;
use super::scales::{Row, byte, side_count};
use super::unit::{Job, Unit};
use crate::backend::Attend;

/// Positions of K and V that are widened at a time: with head_dim 128 a head's two tiles fit a first-level cache.
const TILE: usize = 32;

/// Units still to do, and where their results go.
struct Queue<'a, U> {
    units: U,
    /// `[query rows, value vectors]` of every unit.
    out: &'a mut [F32x8],
    /// `[query rows]` of every unit.
    lse: &'a mut [f32],
}

/// Computes all units; `out` and `lse` get their results, unit after unit, one scratch a thread.
pub(super) fn run<T: Number>(
    job: &Job<'_, T>,
    scratch: &mut [Scratch],
    out: &mut [F32x8],
    lse: &mut [f32],
) {
    let queue = Mutex::new(Queue { units: job.units(), out, lse });
    let (first, others) = scratch.split_first_mut().expect("there is at least one thread");
    if others.is_empty() {
        return work(job, &queue, first);
    }
    thread::scope(|scope| {
        for scratch in others {
            // Where no thread can be had, the others do the work.
            let _ = thread::Builder::new().spawn_scoped(scope, || work(job, &queue, scratch));
        }
        work(job, &queue, first);
    });
}

/// Takes units from the queue until there are none.
fn work<T: Number, U: Iterator<Item = Unit>>(
    job: &Job<'_, T>,
    queue: &Mutex<Queue<'_, U>>,
    scratch: &mut Scratch,
) {
    loop {
        let mut rest = queue.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(unit) = rest.units.next() else { return };
        let rows = unit.row_count(job.group());
        let out =
            rest.out.split_off_mut(..rows * job.value_vectors()).expect("out holds all units");
        let lse = rest.lse.split_off_mut(..rows).expect("lse holds all units");
        drop(rest);
        scratch.compute(job, unit, out, lse);
    }
}

/// What one thread computes with; kept between calls.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    /// `[query rows, vectors]`
    q: Vec<F32x8>,
    /// `[kv heads, TILE, vectors]`
    k: Vec<F32x8>,
    /// `[kv heads, TILE, vectors]`; unused where K has V in it.
    v: Vec<F32x8>,
    /// `[query rows of a kv head, TILE]`
    logits: Vec<f32>,
    /// `[query rows]`: m and l of the online softmax.
    softmax: Vec<(f32, f32)>,
    /// What a unit that has a list reads.
    listed: Vec<u32>,
}

impl Scratch {
    /// Bytes held.
    pub fn bytes(&self) -> usize {
        (self.q.capacity() + self.k.capacity() + self.v.capacity()) * size_of::<F32x8>()
            + self.logits.capacity() * size_of::<f32>()
            + self.softmax.capacity() * size_of::<(f32, f32)>()
            + self.listed.capacity() * size_of::<u32>()
    }

    /// One unit, from its queries to its results.
    fn compute<T: Number>(
        &mut self,
        job: &Job<'_, T>,
        unit: Unit,
        out: &mut [F32x8],
        lse: &mut [f32],
    ) {
        self.load_queries(job, unit);
        out.fill([0.0; LANES]);
        match job.listed(unit) {
            Some(listed) => self.attend_listed(job, unit, listed, out),
            None => self.attend_seen(job, unit, out),
        }
        if let Some(sinks) = job.sinks {
            let heads = unit.rows(job.group()).map(|(_, head)| sinks[head]);
            let rows = out.chunks_exact_mut(job.value_vectors()).zip(&mut self.softmax);
            for ((out, softmax), sink) in rows.zip(heads) {
                enter_sink(sink, softmax, out.as_flattened_mut());
            }
        }
        let rows = out.chunks_exact_mut(job.value_vectors()).zip(lse);
        let nothing = unit.has_list() && self.listed.is_empty();
        for ((out, lse), (max, sum)) in rows.zip(&self.softmax) {
            *lse = max + sum.ln();
            if nothing {
                continue; // the sum of no values, 0, over that of no weights
            }
            for x in out.as_flattened_mut() {
                *x /= sum;
            }
        }
    }

    /// All that the unit's queries see.
    fn attend_seen<T: Number>(&mut self, job: &Job<'_, T>, unit: Unit, out: &mut [F32x8]) {
        let seen = unit.sees_in_all(job.attend.window);
        let tiles = seen.start / TILE as u32..seen.end.div_ceil(TILE as u32);
        for start in tiles.map(|tile| tile * TILE as u32) {
            // The last tile of 2^32 positions, and its last page, end past them.
            let tile = start.max(seen.start)..seen.end.min(start.saturating_add(TILE as u32));
            self.load_tile(job, unit, tile.clone());
            self.fold_tile(job, unit, tile, out);
        }
    }

    /// The positions of a list, of which a unit of one query and one kv head sees each.
    fn attend_listed<T: Number>(
        &mut self,
        job: &Job<'_, T>,
        unit: Unit,
        listed: impl Iterator<Item = u32>,
        out: &mut [F32x8],
    ) {
        let mut positions = std::mem::take(&mut self.listed);
        positions.clear();
        positions.extend(listed);
        for tile in positions.chunks(TILE) {
            for (row, &position) in tile.iter().enumerate() {
                self.load_slots(job, unit, position..position + 1, row);
            }
            self.fold_rows(job, unit, out, tile.len(), |_| 0..tile.len());
        }
        self.listed = positions;
    }

    /// Widens the unit's queries, and starts their softmax.
    fn load_queries<T: Number>(&mut self, job: &Job<'_, T>, unit: Unit) {
        let (group, vectors) = (job.group(), job.vectors());
        let head_dim = job.layout.head_dim() as usize;
        let rows = unit.row_count(group);
        // What pads a head to whole vectors is zeroed here and never written.
        grow(&mut self.q, rows * vectors);
        grow(&mut self.k, unit.heads as usize * TILE * vectors);
        if !job.layout.is_latent() {
            grow(&mut self.v, unit.heads as usize * TILE * vectors);
        }
        grow(&mut self.logits, unit.rows_per_head(group) * TILE);
        self.softmax.clear();
        self.softmax.resize(rows, (f32::NEG_INFINITY, 0.0));
        for ((token, head), wide) in unit.rows(group).zip(self.q.chunks_exact_mut(vectors)) {
            let start = token * job.q_stride + head * head_dim;
            let wide = &mut wide.as_flattened_mut()[..head_dim];
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
    /// Where rows are latent, V is in K's tile.
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
        let sides = [(&job.k, &mut self.k), (&job.v, &mut self.v)];
        for (side, (strides, tiles)) in sides.into_iter().enumerate().take(side_count(job.layout)) {
            let head = u64::from(unit.first_head) * strides.head;
            for position in positions.clone() {
                let (offset, row) = (position % page_size, row + (position - first) as usize);
                let byte = strides.row(job.place.lane, page, offset) + head;
                let start = byte as usize / size_of::<T>();
                widen_slot(&job.pool[start..start + width], tiles, row, job);
                if T::QUANTISED {
                    let slot = Row { side, layer: job.layer, lane: job.place.lane, page, offset };
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
        tile: Range<u32>,
        out: &mut [F32x8],
    ) {
        self.fold_rows(job, unit, out, tile.len(), |query| {
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
        out: &mut [F32x8],
        len: usize,
        sees: impl Fn(u32) -> Range<usize>,
    ) {
        let (group, vectors, value_vectors) = (job.group(), job.vectors(), job.value_vectors());
        let rows = unit.rows_per_head(group);
        let v = if job.layout.is_latent() { &self.k } else { &self.v };
        let tiles = self.k.chunks_exact(TILE * vectors).zip(v.chunks_exact(TILE * vectors));
        let queries = self.q.chunks_exact(rows * vectors).zip(self.softmax.chunks_exact_mut(rows));
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
fn widen_slot<T: Number>(slot: &[T], tiles: &mut [F32x8], row: usize, job: &Job<'_, T>) {
    let (vectors, dim) = (job.vectors(), stored_dim(job));
    let tiles = tiles.chunks_exact_mut(TILE * vectors);
    for (head, tile) in slot.chunks_exact(dim).zip(tiles) {
        let wide = tile[row * vectors..(row + 1) * vectors].as_flattened_mut();
        T::widen(head, &mut wide[..dim]);
    }
}

/// Widens what of a latent row is not quantised, behind what is.
fn widen_rope<T: Number>(slot: Row, tiles: &mut [F32x8], row: usize, job: &Job<'_, T>) {
    let Some((strides, pool)) = job.rope else { return };
    let (vectors, dim, row_len) = (job.vectors(), stored_dim(job), job.layout.head_dim() as usize);
    let start = byte(strides, slot, 0) as usize / size_of::<bf16>();
    let wide = tiles[row * vectors..(row + 1) * vectors].as_flattened_mut();
    bf16::widen(&pool[start..start + row_len - dim], &mut wide[dim..row_len]);
}

/// Multiplies row `row` of each head's tile by the head's scale in one slot, and nothing of what pads it.
fn scale_slot<T: Number>(slot: Row, unit: Unit, tiles: &mut [F32x8], row: usize, job: &Job<'_, T>) {
    let (vectors, dim) = (job.vectors(), stored_dim(job));
    let heads = unit.first_head..unit.first_head + unit.heads;
    for (head, tile) in heads.zip(tiles.chunks_exact_mut(TILE * vectors)) {
        let scale = job.scales.of(job.numbers, slot, head);
        let wide = tile[row * vectors..(row + 1) * vectors].as_flattened_mut();
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
