//! Attention over one tile with vectors, the counterpart of the portable code in `math.rs` and `attention/softmax.rs`.
//!
//! Numbers that are not widened yet are widened in registers. Keys are read slot by slot in the order of memory, while
//! the slots' values are prefetched. The order of a row's sums depends only on the instruction set and the tile, so
//! neither other rows nor the place of K and V change a bit.

#![allow(clippy::needless_range_loop)] // Blocks are indexed by constants, so that they stay in registers.

use std::array;
use std::ops::Range;

use super::math::{self, EXP_LOW, EXP_ROUND, EXP_TERMS, LN_2, Softmax, TILE};
use super::number::Number;
use super::simd::{Lanes, Op, load};
use crate::backend::Attend;
use crate::memory::prefetch_far;

/// Folds one tile into the softmax and the sum of every query row of some kv heads.
pub(super) struct Fold<'a, T> {
    pub rows: Rows<'a>,
    pub tile: Tile<'a, T>,
}

pub(super) struct Rows<'a> {
    pub attend: &'a Attend,
    /// Number of kv heads, and of query rows for each.
    pub heads: usize,
    pub count: usize,
    /// Number of query heads of a kv head, which are the rows of one query token.
    pub group: usize,
    /// Number of elements of a row of `q` and of `out`: whole vectors.
    pub widths: [usize; 2],
    /// `[heads, count, width]`
    pub q: &'a [f32],
    /// Scales of K and V for each head; empty unless products are scaled.
    pub scales: &'a [[[f32; TILE]; 2]],
    /// The positions of the tile that each query token sees. They are data instead of a closure, because each closure
    /// type would compile all vector code again.
    pub seen: &'a [Range<usize>],
    /// `[heads, count, TILE]`
    pub logits: &'a mut [f32],
    /// `[heads, count]`
    pub softmax: &'a mut [Softmax],
    pub factors: &'a mut [f32],
    /// `[heads, count, width]`
    pub out: &'a mut [f32],
}

impl Rows<'_> {
    /// Returns the positions of the tile that a row of a kv head sees.
    #[inline(always)]
    fn seen(&self, row: usize) -> Range<usize> {
        self.seen[row / self.group].clone()
    }
}

/// The heads of K and V at each position of a tile.
pub(super) struct Tile<'a, T> {
    pub keys: &'a [&'a [T]],
    pub values: &'a [&'a [T]],
    /// Number of elements from one head to the next.
    pub apart: usize,
    /// The keys of the next tile, if both tiles are in the pool; `None` if this tile is widened.
    pub ahead: Option<&'a [&'a [T]]>,
}

impl<T: Number> Op for Fold<'_, T> {
    #[inline(always)]
    fn go<S: Lanes>(mut self, s: S) {
        let (len, heads, count) = (self.tile.keys.len(), self.rows.heads, self.rows.count);
        let step = match count {
            1 => 8,
            2 => 4,
            _ => 2,
        };
        for first in (0..len).step_by(step) {
            for head in 0..heads {
                self.prefetch(head, first..(first + step).min(len));
                let mut row = 0;
                while row < count {
                    let block = block_of(count - row);
                    match (block, step) {
                        (4, _) => self.multiply::<S, 4, 2>(s, head, row, first),
                        (3, _) => self.multiply::<S, 3, 2>(s, head, row, first),
                        (2, 2) => self.multiply::<S, 2, 2>(s, head, row, first),
                        (2, _) => self.multiply::<S, 2, 4>(s, head, row, first),
                        _ => self.multiply::<S, 1, 8>(s, head, row, first),
                    }
                    row += block;
                }
            }
        }
        for head in 0..heads {
            for row in 0..count {
                let seen = self.rows.seen(row);
                if !seen.is_empty() {
                    self.weigh(s, head * count + row, seen);
                }
            }
        }
        for head in 0..heads {
            let mut row = 0;
            while row < count {
                let block = block_of(count - row);
                let (seen, mut alike) = (self.rows.seen(row), true);
                for i in 1..block {
                    alike &= self.rows.seen(row + i) == seen;
                }
                match block {
                    4 if alike => self.accumulate::<S, 4>(s, head, row, seen),
                    3 if alike => self.accumulate::<S, 3>(s, head, row, seen),
                    2 if alike => self.accumulate::<S, 2>(s, head, row, seen),
                    _ => {
                        for i in 0..block {
                            let seen = self.rows.seen(row + i);
                            self.accumulate::<S, 1>(s, head, row + i, seen);
                        }
                    }
                }
                row += block;
            }
        }
    }
}

/// Returns how many of `rows` remaining rows are computed together next; 1 only if `rows` is 1.
#[inline(always)]
fn block_of(rows: usize) -> usize {
    match rows {
        5 => 3,
        4.. => 4,
        _ => rows,
    }
}

impl<T: Number> Fold<'_, T> {
    /// Prefetches a head's values, and its keys of the next tile.
    #[inline(always)]
    fn prefetch(&self, head: usize, positions: Range<usize>) {
        let Some(ahead) = self.tile.ahead else { return };
        let own = head * self.tile.apart..(head + 1) * self.tile.apart;
        for position in positions {
            prefetch_far(&self.tile.values[position][own.clone()]);
            if let Some(key) = ahead.get(position) {
                prefetch_far(&key[own.clone()]);
            }
        }
    }

    /// Computes products of `R` queries with `P` keys.
    #[inline(always)]
    fn multiply<S: Lanes, const R: usize, const P: usize>(&mut self, s: S, head: usize, row: usize, first: usize) {
        let (lanes, width, last) = (S::F32_LANES, self.rows.widths[0], self.tile.keys.len() - 1);
        let row = head * self.rows.count + row;
        // Positions after the last one repeat its key; `weigh` masks their products.
        let keys: [&[T]; P] =
            array::from_fn(|p| &self.tile.keys[(first + p).min(last)][head * self.tile.apart..][..width]);
        let queries: [&[f32]; R] = array::from_fn(|r| &self.rows.q[(row + r) * width..][..width]);
        let zero = s.splat_f32s(0.0);
        let mut sums = [[zero; P]; R];
        let whole = width - width % (4 * lanes);
        for at in (0..whole).step_by(4 * lanes) {
            let mut k = [[zero; 4]; P];
            for p in 0..P {
                k[p] = T::load_all(s, &keys[p][at..at + 4 * lanes]);
            }
            for v in 0..4 {
                for r in 0..R {
                    let q = load(&queries[r][at + v * lanes..][..lanes]);
                    for p in 0..P {
                        sums[r][p] = s.mul_add_f32s(q, k[p][v], sums[r][p]);
                    }
                }
            }
        }
        for at in (whole..width).step_by(lanes) {
            for r in 0..R {
                let q = load(&queries[r][at..at + lanes]);
                for p in 0..P {
                    let k = T::load(s, &keys[p][at..at + lanes]);
                    sums[r][p] = s.mul_add_f32s(q, k, sums[r][p]);
                }
            }
        }
        for i in (0..R * P).step_by(4) {
            let mut four = [zero; 4];
            for j in 0..4 {
                if i + j < R * P {
                    four[j] = sums[(i + j) / P][(i + j) % P];
                }
            }
            let products = s.sums(four);
            for j in 0..4 {
                if i + j < R * P {
                    self.rows.logits[(row + (i + j) / P) * TILE + first + (i + j) % P] = products[j];
                }
            }
        }
    }

    /// Converts a row's products to weights `e^(s - m')`, and sets its factor to `e^(m - m')`.
    #[inline(always)]
    fn weigh<S: Lanes>(&mut self, s: S, row: usize, seen: Range<usize>) {
        let (lanes, head) = (S::F32_LANES, row / self.rows.count);
        let logits = &mut self.rows.logits[row * TILE..(row + 1) * TILE];
        let scales = self.rows.scales.get(head);
        let scale = s.splat_f32s(self.rows.attend.scale);
        for at in (0..TILE).step_by(lanes) {
            let mut x = s.mul_f32s(load(&logits[at..at + lanes]), scale);
            if let Some([keys, _]) = scales {
                x = s.mul_f32s(x, load(&keys[at..at + lanes]));
            }
            store::<S>(&mut logits[at..at + lanes], x);
        }
        if let Some(cap) = self.rows.attend.soft_cap {
            for x in &mut logits[seen.clone()] {
                *x = cap * (*x / cap).tanh();
            }
        }
        // Invisible positions get weight 0.
        logits[..seen.start].fill(f32::NEG_INFINITY);
        logits[seen.end..].fill(f32::NEG_INFINITY);

        let (max, sum) = self.rows.softmax[row];
        let mut largest = s.splat_f32s(max);
        for at in (0..TILE).step_by(lanes) {
            let x: S::f32s = load(&logits[at..at + lanes]);
            // The comparison ignores NaN.
            largest = s.select_f32s(s.greater_than_f32s(x, largest), x, largest);
        }
        let new_max = s.reduce_max_f32s(largest);
        // As long as every logit is minus infinity, every weight is 0, not NaN.
        let base = if new_max == f32::NEG_INFINITY { 0.0 } else { new_max };
        let mut total = s.splat_f32s(0.0);
        for at in (0..TILE).step_by(lanes) {
            let x = s.sub_f32s(load(&logits[at..at + lanes]), s.splat_f32s(base));
            let mut weight = exp(s, x);
            total = s.add_f32s(total, weight);
            if let Some([_, values]) = scales {
                weight = s.mul_f32s(weight, load(&values[at..at + lanes]));
            }
            store::<S>(&mut logits[at..at + lanes], weight);
        }
        let factor = math::exp(max - base);
        self.rows.softmax[row] = (new_max, sum * factor + s.reduce_sum_f32s(total));
        self.rows.factors[row] = factor;
    }

    /// Computes `out = factor * out + weights * values` for `R` rows that see the same positions.
    #[inline(always)]
    fn accumulate<S: Lanes, const R: usize>(&mut self, s: S, head: usize, row: usize, seen: Range<usize>) {
        if seen.is_empty() {
            return;
        }
        let (width, block) = (self.rows.widths[1], S::ROW_VECTORS * S::F32_LANES);
        let whole = width - width % block;
        for at in (0..whole).step_by(block) {
            match S::ROW_VECTORS {
                2 => self.accumulate_part::<S, R, 2>(s, head, row, seen.clone(), at),
                _ => self.accumulate_part::<S, R, 4>(s, head, row, seen.clone(), at),
            }
        }
        for at in (whole..width).step_by(S::F32_LANES) {
            self.accumulate_part::<S, R, 1>(s, head, row, seen.clone(), at);
        }
    }

    /// Computes `V` vectors of each row from element `at` on. Their sums stay in registers over all positions.
    #[inline(always)]
    fn accumulate_part<S: Lanes, const R: usize, const V: usize>(
        &mut self,
        s: S,
        head: usize,
        row: usize,
        seen: Range<usize>,
        at: usize,
    ) {
        let (lanes, width) = (S::F32_LANES, self.rows.widths[1]);
        let row = head * self.rows.count + row;
        let zero = s.splat_f32s(0.0);
        let mut sums = [[zero; V]; R];
        for r in 0..R {
            let out = &self.rows.out[(row + r) * width + at..][..V * lanes];
            for v in 0..V {
                let x = load(&out[v * lanes..][..lanes]);
                sums[r][v] = s.mul_f32s(s.splat_f32s(self.rows.factors[row + r]), x);
            }
        }
        let weights: [&[f32]; R] =
            array::from_fn(|r| &self.rows.logits[(row + r) * TILE..(row + r + 1) * TILE][seen.clone()]);
        let start = head * self.tile.apart + at;
        for (p, values) in self.tile.values[seen].iter().enumerate() {
            let values = &values[start..][..V * lanes];
            let x = T::load_all::<S, V>(s, values);
            for r in 0..R {
                let weight = s.splat_f32s(weights[r][p]);
                for v in 0..V {
                    sums[r][v] = s.mul_add_f32s(weight, x[v], sums[r][v]);
                }
            }
        }
        for r in 0..R {
            let out = &mut self.rows.out[(row + r) * width + at..][..V * lanes];
            for v in 0..V {
                store::<S>(&mut out[v * lanes..][..lanes], sums[r][v]);
            }
        }
    }
}

pub(super) struct Widen<'a, T>(pub &'a [T], pub &'a mut [f32]);

impl<T: Number> Op for Widen<'_, T> {
    #[inline(always)]
    fn go<S: Lanes>(self, s: S) {
        let lanes = S::F32_LANES;
        let mut whole = self.0.chunks_exact(lanes);
        let mut wide = self.1.chunks_exact_mut(lanes);
        for (x, y) in (&mut whole).zip(&mut wide) {
            store::<S>(y, T::load(s, x));
        }
        T::widen(whole.remainder(), wide.into_remainder());
    }
}

#[inline(always)]
fn store<S: Lanes>(target: &mut [f32], x: S::f32s) {
    target.copy_from_slice(bytemuck::cast_slice(std::slice::from_ref(&x)));
}

/// Returns `e^x` of each lane by the method of [`math::exp`]; fused multiply-adds may round differently.
#[inline(always)]
fn exp<S: Lanes>(s: S, x: S::f32s) -> S::f32s {
    let low = s.splat_f32s(EXP_LOW);
    let is_low = s.less_than_f32s(x, low);
    let y = s.select_f32s(is_low, low, x);
    let round = s.splat_f32s(EXP_ROUND);
    let shifted = s.mul_add_f32s(y, s.splat_f32s(std::f32::consts::LOG2_E), round);
    let n = s.sub_f32s(shifted, round);
    let r = s.mul_add_f32s(n, s.splat_f32s(-LN_2[0]), y);
    let r = s.mul_add_f32s(n, s.splat_f32s(-LN_2[1]), r);
    let mut sum = s.splat_f32s(EXP_TERMS[0]);
    for term in &EXP_TERMS[1..] {
        sum = s.mul_add_f32s(sum, r, s.splat_f32s(*term));
    }
    let bits = s.wrapping_dyn_shl_u32s(s.transmute_u32s_f32s(shifted), s.splat_u32s(23));
    let power = s.transmute_f32s_u32s(s.add_u32s(bits, s.splat_u32s(127 << 23)));
    s.select_f32s(is_low, s.splat_f32s(0.0), s.mul_f32s(sum, power))
}

#[cfg(test)]
mod tests {
    use bytemuck::cast_slice;
    use half::{bf16, f16};

    use super::*;
    use crate::backend::cpu::e4m3::E4m3;
    use crate::backend::cpu::path::CpuPath;
    use crate::backend::cpu::simd::Isa;

    fn check<T: Number>(numbers: &[T]) {
        let mut plain = vec![0.0; numbers.len()];
        T::widen(numbers, &mut plain);
        for path in CpuPath::available().filter(|&path| path != CpuPath::Portable) {
            let mut wide = vec![1.0; numbers.len()];
            let isa = Isa::choose(Some(path)).expect("the machine has it");
            assert!(isa.run(Widen(numbers, &mut wide)).is_none(), "{path:?} has vectors");
            for (i, (x, y)) in wide.iter().zip(&plain).enumerate() {
                let alike = x.to_bits() == y.to_bits() || x.is_nan() && y.is_nan();
                assert!(alike, "{path:?}, number {i:#x}: {x} for {y}");
            }
        }
    }

    #[test]
    fn every_number_is_widened_exactly_on_every_path() {
        let halves: Vec<u16> = (0..=u16::MAX).chain(0..5).collect();
        check::<f16>(cast_slice(&halves));
        check::<bf16>(cast_slice(&halves));
        let bytes: Vec<u8> = (0..=u8::MAX).chain(0..5).collect();
        check::<E4m3>(cast_slice(&bytes));
    }
}
