//! Attention over pages: the specification of the attention kernels.
//!
//! The work is cut into units: a block of query tokens of one sequence, with the query heads that share one kv head
//! (grouped-query attention, arXiv:2305.13245). A unit goes through the K and V that it sees a tile at a time, so that
//! each number of them is widened to f32 once for all of the unit's queries. The softmax is made online (Milakov and
//! Gimelshein 2018, arXiv:1805.02867): for each query row, over the tiles,
//!
//! ```text
//! m' = max(m, max s_j)    l' = l e^(m - m') + sum e^(s_j - m')    o' = o e^(m - m') + sum e^(s_j - m') v_j
//! ```
//!
//! and at the end the output is `o / l`, the log-sum-exp `m + ln l`. A query reads no K and V but what it sees: what
//! lies past its position has no effect, whatever it is. Threads take units as they come; each unit is computed by one
//! thread in one order, so results do not depend on the number of threads.
//!
//! Not here: checks.

use std::num::NonZeroUsize;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};
use std::thread;

use super::math::{LANES, Lanes, accumulate, dots, exp};
use super::number::Number;
use super::rows::CpuRows;
use crate::backend::Attend;
use crate::layout::{PoolLayout, Strides, TableShape};
use crate::plan::BatchRow;

/// Positions of K and V that are widened at a time: with head_dim 128 both tiles fit a first-level cache.
const TILE: usize = 32;

/// Query rows that a unit has, about.
const UNIT_ROWS: usize = 32;

/// Multiplications that are worth a thread, about 100 us.
const THREAD_WORK: u64 = 1 << 21;

/// One call of attention: what all units share.
pub(super) struct Job<'a, T> {
    pub pool: &'a [T],
    pub layout: &'a PoolLayout,
    pub strides: Strides,
    /// First element of the layer's K and V.
    pub k_origin: u64,
    pub v_origin: u64,
    pub table: &'a TableShape,
    pub words: &'a [u32],
    pub rows: &'a [BatchRow],
    pub attend: &'a Attend,
    pub q: CpuRows<'a>,
    pub q_stride: usize,
}

/// Some query tokens of one sequence, with the query heads of one kv head.
#[derive(Clone, Copy)]
pub(super) struct Unit {
    row: BatchRow,
    /// First query token, counted from the sequence's first in this step.
    first: u32,
    /// Query tokens.
    pub tokens: u32,
    pub kv_head: u32,
}

impl Unit {
    /// First of its rows in q and out.
    pub fn first_row(&self) -> usize {
        self.row.qo_start as usize + self.first as usize
    }

    /// Positions that query token `i` of the unit sees.
    fn sees(&self, i: u32, window: Option<u32>) -> Range<u32> {
        let end = self.row.kv_len - self.row.extend_len + self.first + i + 1;
        end.saturating_sub(window.unwrap_or(end))..end
    }
}

impl<T> Job<'_, T> {
    /// Query heads of one kv head.
    pub fn group(&self) -> usize {
        (self.attend.q_heads / self.layout.kv_heads()) as usize
    }

    /// [`Lanes`] of one head.
    pub fn lanes(&self) -> usize {
        (self.layout.head_dim() as usize).div_ceil(LANES)
    }

    /// All units but those of padding rows, in the order of the query rows.
    pub fn units(&self) -> impl Iterator<Item = Unit> + Send + use<'_, T> {
        let block = (UNIT_ROWS / self.group()).max(1) as u32;
        let kv_heads = self.layout.kv_heads();
        self.rows.iter().filter(|row| row.kv_len > 0).flat_map(move |&row| {
            (0..row.extend_len).step_by(block as usize).flat_map(move |first| {
                let tokens = block.min(row.extend_len - first);
                (0..kv_heads).map(move |kv_head| Unit { row, first, tokens, kv_head })
            })
        })
    }

    /// Threads that the work is worth, by its multiplications.
    pub fn threads(&self, max: NonZeroUsize) -> usize {
        let row_work = u64::from(self.attend.q_heads) * u64::from(self.layout.head_dim()) * 2;
        let work = self.rows.iter().fold(0_u64, |sum, row| {
            let seen = row.kv_len.min(self.attend.window.unwrap_or(u32::MAX));
            let pairs = u64::from(row.extend_len) * u64::from(seen);
            sum.saturating_add(pairs.saturating_mul(row_work))
        });
        usize::try_from(work / THREAD_WORK).unwrap_or(usize::MAX).clamp(1, max.get())
    }
}

/// Units still to do, and where their results go.
struct Queue<'a, U> {
    units: U,
    /// `[query rows, lanes]` of every unit.
    out: &'a mut [Lanes],
    /// `[query rows]` of every unit.
    lse: &'a mut [f32],
}

/// Computes all units; `out` and `lse` get their results, unit after unit, one scratch a thread.
pub(super) fn run<T: Number>(
    job: &Job<'_, T>,
    scratch: &mut [Scratch],
    out: &mut [Lanes],
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
        let rows = unit.tokens as usize * job.group();
        let out = rest.out.split_off_mut(..rows * job.lanes()).expect("out holds all units");
        let lse = rest.lse.split_off_mut(..rows).expect("lse holds all units");
        drop(rest);
        scratch.compute(job, unit, out, lse);
    }
}

/// What one thread computes with; kept between calls.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    /// `[query rows, lanes]`
    q: Vec<Lanes>,
    /// `[TILE, lanes]`
    k: Vec<Lanes>,
    /// `[TILE, lanes]`
    v: Vec<Lanes>,
    /// `[query rows, TILE]`
    logits: Vec<f32>,
    /// `[query rows]`: m and l of the online softmax.
    softmax: Vec<(f32, f32)>,
}

impl Scratch {
    /// Bytes held.
    pub fn bytes(&self) -> usize {
        (self.q.capacity() + self.k.capacity() + self.v.capacity()) * size_of::<Lanes>()
            + self.logits.capacity() * size_of::<f32>()
            + self.softmax.capacity() * size_of::<(f32, f32)>()
    }

    /// One unit, from its queries to its results.
    fn compute<T: Number>(
        &mut self,
        job: &Job<'_, T>,
        unit: Unit,
        out: &mut [Lanes],
        lse: &mut [f32],
    ) {
        self.load_queries(job, unit);
        out.fill([0.0; LANES]);
        let window = job.attend.window;
        let seen = unit.sees(0, window).start..unit.sees(unit.tokens - 1, window).end;
        for start in seen.clone().step_by(TILE) {
            let tile = start..seen.end.min(start + TILE as u32);
            self.load_tile(job, unit, tile.clone());
            self.multiply_keys(job.lanes(), tile.len());
            self.fold_tile(job, unit, tile, out);
        }
        let lanes = job.lanes();
        for ((out, lse), (max, sum)) in
            out.chunks_exact_mut(lanes).zip(lse).zip(self.softmax.iter())
        {
            for x in out.as_flattened_mut() {
                *x /= sum;
            }
            *lse = max + sum.ln();
        }
    }

    /// Widens the unit's queries, token by token, and starts their softmax.
    fn load_queries<T: Number>(&mut self, job: &Job<'_, T>, unit: Unit) {
        let (group, lanes) = (job.group(), job.lanes());
        let head_dim = job.layout.head_dim() as usize;
        let rows = unit.tokens as usize * group;
        // What pads a head to whole lanes is zeroed here and never written.
        self.q.resize(rows * lanes, [0.0; LANES]);
        self.k.resize(TILE * lanes, [0.0; LANES]);
        self.v.resize(TILE * lanes, [0.0; LANES]);
        self.logits.resize(rows * TILE, 0.0);
        self.softmax.clear();
        self.softmax.resize(rows, (f32::NEG_INFINITY, 0.0));
        for (i, wide) in self.q.chunks_exact_mut(lanes).enumerate() {
            let head = unit.kv_head as usize * group + i % group;
            let start = (unit.first_row() + i / group) * job.q_stride + head * head_dim;
            let wide = &mut wide.as_flattened_mut()[..head_dim];
            job.q.elements.slice(start..start + head_dim).convert_into(wide);
        }
    }

    /// Widens K and V of the positions in `tile`, page by page.
    fn load_tile<T: Number>(&mut self, job: &Job<'_, T>, unit: Unit, tile: Range<u32>) {
        let (lanes, head_dim) = (job.lanes(), job.layout.head_dim() as usize);
        let page_size = job.layout.page_size();
        let head = u64::from(unit.kv_head) * job.strides.head;
        let mut keys = self.k.chunks_exact_mut(lanes);
        let mut values = self.v.chunks_exact_mut(lanes);
        let mut at = tile.start;
        while at < tile.end {
            let page = job.table.page(job.words, unit.row.row, at / page_size);
            let offsets = at % page_size..page_size.min(at % page_size + tile.end - at);
            at += offsets.len() as u32;
            let page = u64::from(page.raw()) * job.strides.page + head;
            for ((offset, k), v) in offsets.zip(&mut keys).zip(&mut values) {
                let start = page + u64::from(offset) * job.strides.slot;
                for (origin, wide) in [(job.k_origin, k), (job.v_origin, v)] {
                    let start = (origin + start) as usize;
                    let wide = &mut wide.as_flattened_mut()[..head_dim];
                    T::widen(&job.pool[start..start + head_dim], wide);
                }
            }
        }
    }

    /// Products of all queries with the tile's keys. What it makes of queries and keys that do not see each other, and
    /// of what an earlier tile left past `len`, nobody reads.
    fn multiply_keys(&mut self, lanes: usize, len: usize) {
        let mut queries = self.q.chunks_exact(2 * lanes);
        let mut logits = self.logits.chunks_exact_mut(2 * TILE);
        for (pair, logits) in (&mut queries).zip(&mut logits) {
            let (q0, q1) = pair.split_at(lanes);
            let (s0, s1) = logits.split_at_mut(TILE);
            for (at, keys) in self.k.chunks_exact(2 * lanes).enumerate().take(len.div_ceil(2)) {
                let (k0, k1) = keys.split_at(lanes);
                let [products0, products1] = dots([q0, q1], [k0, k1]);
                s0[2 * at..2 * at + 2].copy_from_slice(&products0);
                s1[2 * at..2 * at + 2].copy_from_slice(&products1);
            }
        }
        let (q, s) = (queries.remainder(), logits.into_remainder());
        if q.is_empty() {
            return;
        }
        for (at, keys) in self.k.chunks_exact(4 * lanes).enumerate().take(len.div_ceil(4)) {
            let ((k0, k1), (k2, k3)) = {
                let (low, high) = keys.split_at(2 * lanes);
                (low.split_at(lanes), high.split_at(lanes))
            };
            let [products] = dots([q], [k0, k1, k2, k3]);
            s[4 * at..4 * at + 4].copy_from_slice(&products);
        }
    }

    /// Takes the tile into the softmax and the sum of each query row that sees something of it.
    fn fold_tile<T: Number>(
        &mut self,
        job: &Job<'_, T>,
        unit: Unit,
        tile: Range<u32>,
        out: &mut [Lanes],
    ) {
        let (group, lanes) = (job.group(), job.lanes());
        let rows = self.softmax.iter_mut().zip(self.logits.chunks_exact_mut(TILE));
        for (i, ((softmax, logits), out)) in rows.zip(out.chunks_exact_mut(lanes)).enumerate() {
            let seen = unit.sees((i / group) as u32, job.attend.window);
            let (start, end) = (seen.start.max(tile.start), seen.end.min(tile.end));
            if start >= end {
                continue;
            }
            let seen = (start - tile.start) as usize..(end - tile.start) as usize;
            let weights = &mut logits[seen.clone()];
            let factor = fold_logits(job.attend, softmax, weights);
            accumulate(out, factor, weights, &self.v[seen.start * lanes..seen.end * lanes]);
        }
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
    let new_max = logits.iter().fold(*max, |max, &x| if x > max { x } else { max });
    // As long as every logit is minus infinity, every weight is 0, not NaN.
    let base = if new_max == f32::NEG_INFINITY { 0.0 } else { new_max };
    let factor = exp(*max - base);
    for x in &mut *logits {
        *x = exp(*x - base);
    }
    *sum = *sum * factor + logits.iter().sum::<f32>();
    *max = new_max;
    factor
}
