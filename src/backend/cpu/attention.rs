//! Attention over pages: the specification of the attention kernels.
//!
//! A unit of work is a block of query tokens of one sequence, with the query heads of some kv heads (grouped-query
//! attention, arXiv:2305.13245). It processes the visible K and V in tiles. Vector paths widen numbers in registers if
//! the unit has few query rows and its heads fill whole lines. Otherwise a tile is widened to f32 once for all queries
//! of the unit. The softmax is online (Milakov and Gimelshein 2018, arXiv:1805.02867). For each query row, over the
//! tiles of a segment:
//!
//! ```text
//! m' = max(m, max s_j)    l' = l e^(m - m') + sum e^(s_j - m')    o' = o e^(m - m') + sum e^(s_j - m') v_j
//! ```
//!
//! Finally the output is `o / l`, and the log-sum-exp is `m + ln l`. A sink is an additional logit without a value. A
//! query reads only visible V. Segments are joined in order by the same rule.
//!
//! Positions are split into tiles and segments at multiples of their sizes. On one path, the bits of a row's result
//! therefore depend only on the row and its visible K and V. The batch, the chunks of a prefill, the pool and the
//! threads do not change them. A token of a draft tree gets the same bits as the last token of a plain sequence with
//! the same visible tokens.
//!
//! `attention/load.rs` loads tiles, and `attention/softmax.rs` folds them.

mod load;
mod softmax;

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use super::math::{Line, NOTHING, Softmax, TILE};
use super::number::Number;
use super::threads;
use super::unit::{Job, Unit};
use load::Places;
pub(super) use softmax::{finish, join_parts};

/// Maximum number of query rows of a kv head for which numbers are widened in registers.
const NARROW_ROWS: usize = 8;

/// The remaining units, and the memory for their results.
struct Queue<'a, U> {
    units: U,
    /// The output of each remaining unit: `[query rows, value lines]`.
    out: &'a mut [Line],
    /// The softmax of each remaining unit: `[query rows]`.
    softmax: &'a mut [Softmax],
}

/// Computes all units, and writes their results to `out` and `softmax` in the order of units. Each thread has its own
/// scratch.
pub(super) fn run<T: Number>(job: &Job<'_, T>, scratch: &mut [Scratch], out: &mut [Line], softmax: &mut [Softmax]) {
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

/// The buffers of one thread, reused in later calls.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    /// Elements of a head in the last unit.
    head_dim: usize,
    /// `[query rows, lines]`
    q: Vec<Line>,
    /// `[kv heads, TILE, lines]`
    k: Vec<Line>,
    /// `[kv heads, TILE, lines]`; unused if K contains V.
    v: Vec<Line>,
    /// `[query rows, TILE]`
    logits: Vec<f32>,
    /// `[query rows]`: factors of the earlier sums.
    factors: Vec<f32>,
    /// `[query tokens]`: the positions of the current tile that each token sees.
    seen: Vec<Range<usize>>,
    /// Results of a unit for a later segment: `[query rows, value lines]`, `[query rows]`.
    part: Vec<Line>,
    part_softmax: Vec<Softmax>,
    /// The current tile, and the next one, which is prefetched.
    places: Places,
    ahead: Places,
    /// The positions in a unit's list.
    listed: Vec<u32>,
}

impl Scratch {
    /// Returns the number of allocated bytes.
    pub fn bytes(&self) -> usize {
        [&self.q, &self.k, &self.v, &self.part].map(Vec::capacity).iter().sum::<usize>() * size_of::<Line>()
            + (self.logits.capacity() + self.factors.capacity()) * size_of::<f32>()
            + self.part_softmax.capacity() * size_of::<Softmax>()
            + (self.places.scales.capacity() + self.ahead.scales.capacity()) * size_of::<[[f32; TILE]; 2]>()
            + self.listed.capacity() * size_of::<u32>()
            + self.seen.capacity() * size_of::<Range<usize>>()
    }

    fn compute<T: Number>(&mut self, job: &Job<'_, T>, unit: Unit, out: &mut [Line], softmax: &mut [Softmax]) {
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
            out.fill(Line::default()); // the sum of no values
        }
    }

    /// Attends to the visible part of a segment.
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
            // The end of the last tile, 2^32, does not fit in u32.
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

    /// Attends to the positions of a list. Units with a list have one query token and one kv head.
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
            self.seen.clear();
            self.seen.push(0..tile.len());
            self.fold_rows(job, unit, (out, softmax), (tile.len(), 0));
        }
        self.listed = positions;
    }
}

/// Returns whether a unit widens numbers in registers: the path has vectors, the unit has few query rows, and its heads
/// fill whole lines without a separate rotary part.
fn computes_in_place<T: Number>(job: &Job<'_, T>, unit: Unit) -> bool {
    let whole = job.layout.head_dim().is_multiple_of(Line::NUMBERS as u32) && job.rope.is_none();
    job.isa.is_vector() && whole && unit.rows_per_head(job.group()) <= NARROW_ROWS
}

/// Returns whether logits and weights are scaled instead of K and V. This choice does not depend on prefill chunks, so
/// the bits of a row do not depend on them either.
fn scales_products<T: Number>(job: &Job<'_, T>) -> bool {
    T::QUANTISED && job.isa.is_vector() && job.rope.is_none()
}
