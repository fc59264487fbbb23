//! Folds tiles into the online softmax and the sums of query rows, joins segments, and adds sinks.

use std::ops::Range;

use bytemuck::{cast_slice, cast_slice_mut};

use super::{Scratch, computes_in_place, scales_products};
use crate::backend::Attend;
use crate::backend::cpu::fold::{Fold, Rows, Tile};
use crate::backend::cpu::math::{self, F32x8, LANES, Line, Softmax, TILE, accumulate, dots, exp};
use crate::backend::cpu::number::Number;
use crate::backend::cpu::scales::side_count;
use crate::backend::cpu::unit::{Job, Unit};

/// Number of vectors ([`F32x8`]) in a [`Line`].
const LINE_VECTORS: usize = Line::NUMBERS / LANES;

impl Scratch {
    /// Folds the tile into the softmax and the sum of every query row that sees a part of it.
    pub(super) fn fold_tile<T: Number>(
        &mut self,
        job: &Job<'_, T>,
        unit: Unit,
        (tile, ahead): (Range<u32>, usize),
        results: (&mut [Line], &mut [Softmax]),
    ) {
        self.seen.clear();
        self.seen.extend((0..unit.tokens).map(|query| {
            let seen = unit.sees(query, job.attend);
            let (start, end) = (seen.start.max(tile.start), seen.end.min(tile.end));
            start.saturating_sub(tile.start) as usize..end.saturating_sub(tile.start) as usize
        }));
        self.fold_rows(job, unit, results, (tile.len(), ahead));
    }

    /// Folds a tile of `len` positions into the softmax and the sum of every query row. [`Scratch::seen`] contains
    /// the part of the tile that each query token sees.
    pub(super) fn fold_rows<T: Number>(
        &mut self,
        job: &Job<'_, T>,
        unit: Unit,
        (out, softmax): (&mut [Line], &mut [Softmax]),
        (len, ahead): (usize, usize),
    ) {
        if job.isa.is_vector() {
            return self.fold_vectors(job, unit, (out, softmax), (len, ahead));
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
                let seen = self.seen[i / group].clone();
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

    /// [`Scratch::fold_rows`] with vector instructions.
    fn fold_vectors<T: Number>(
        &mut self,
        job: &Job<'_, T>,
        unit: Unit,
        (out, softmax): (&mut [Line], &mut [Softmax]),
        (len, ahead_len): (usize, usize),
    ) {
        let group = job.group();
        let widths = [job.lines(), job.value_lines()].map(|lines| lines * Line::NUMBERS);
        let (heads, width) = (unit.heads as usize, widths[0]);
        let rows = Rows {
            attend: job.attend,
            heads,
            count: unit.rows_per_head(group),
            group,
            widths,
            q: cast_slice(&self.q),
            scales: if scales_products(job) { &self.places.scales[..heads] } else { &[] },
            seen: &self.seen,
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
            let [keys, values] =
                [0, v_side].map(|side| std::array::from_fn::<_, TILE, _>(|row| &tiles[side][row * width..]));
            let (keys, values) = (&keys[..len], &values[..len]);
            job.isa.run(Fold { rows, tile: Tile { keys, values, apart: TILE * width, ahead: None } });
        }
    }
}

/// Joins the results for a later segment with those of the same query rows for earlier segments.
pub(in crate::backend::cpu) fn join_parts(
    (out, softmax): (&mut [Line], &mut [Softmax]),
    (more, more_softmax): (&[Line], &[Softmax]),
) {
    let lines = out.len() / softmax.len();
    let rows = softmax.iter_mut().zip(out.chunks_exact_mut(lines));
    for ((softmax, out), (later, more)) in rows.zip(more_softmax.iter().zip(more.chunks_exact(lines))) {
        math::join((softmax, cast_slice_mut(out)), (*later, cast_slice(more)));
    }
}

/// Adds the sinks to the softmax of a unit's query rows, then divides the rows of `out` by their sums of weights.
pub(in crate::backend::cpu) fn finish<T: Number>(
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

/// Writes the products of all queries with a tile's first `len` keys to `logits`, `[queries, TILE]`. Products with
/// invisible keys, and with stale keys after `len`, are not read.
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

/// Converts products to weights `e^(s - m')`, and returns `e^(m - m')`, the factor of the earlier sums.
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
    // While every logit is minus infinity, every weight is 0, not NaN.
    let base = if new_max == f32::NEG_INFINITY { 0.0 } else { new_max };
    let factor = exp(*max - base);
    for x in &mut *logits {
        *x = exp(*x - base);
    }
    *sum = *sum * factor + math::sum(logits);
    *max = new_max;
    factor
}

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
        // Two tokens with logit 2 and an equal sink: each has a third of the weight.
        let (mut softmax, mut out) = ((2.0, 2.0), [4.0, -2.0]);
        enter_sink(2.0, &mut softmax, &mut out);
        assert_eq!((softmax, out), ((2.0, 3.0), [4.0, -2.0]));
        enter_sink(LOW, &mut softmax, &mut out);
        assert_eq!((softmax, out), ((2.0, 3.0), [4.0, -2.0]), "without a sink");
        enter_sink(1000.0, &mut softmax, &mut out);
        assert_eq!((softmax, out), ((1000.0, 1.0), [0.0, -0.0]));
        // The sink has all weight if the tokens have none.
        let (mut softmax, mut out) = ((LOW, 0.0), [0.0; 2]);
        enter_sink(-3.0, &mut softmax, &mut out);
        assert_eq!((softmax, out), ((-3.0, 1.0), [0.0; 2]));
    }

    #[test]
    fn logits_of_minus_infinity_have_no_weight_at_any_place() {
        let mut softmax = (LOW, 0.0);
        let mut none = [LOW; 3];
        assert_eq!(fold_logits(&plain(), &mut softmax, &mut none), 0.0);
        assert_eq!((softmax, none), ((LOW, 0.0), [0.0; 3]), "no weight, and no NaN");
        // A later tile with finite logits begins like the first one.
        let mut some = [LOW, 2.0, LOW, 2.0];
        assert_eq!(fold_logits(&plain(), &mut softmax, &mut some), 0.0);
        assert_eq!((softmax, some), ((2.0, 2.0), [0.0, 1.0, 0.0, 1.0]));
        // A tile without finite logits changes nothing.
        let mut none = [LOW; 9];
        assert_eq!(fold_logits(&plain(), &mut softmax, &mut none), 1.0);
        assert_eq!((softmax, none), ((2.0, 2.0), [0.0; 9]));
    }
}
