//! The arithmetic of the portable path, which the compiler vectorises for its target, and definitions that all paths
//! share. `fold.rs` is the counterpart with explicit vectors.

use bytemuck::{Pod, Zeroable};

/// A vector of eight numbers.
pub(super) type F32x8 = [f32; LANES];

pub(super) const LANES: usize = 8;

/// Number of positions that are processed at a time. With head_dim 128, a head's two widened tiles fit a first-level
/// cache.
pub(super) const TILE: usize = 32;

/// A cache line. Rows are aligned and padded to lines, so no vector crosses a line.
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
#[repr(C, align(64))]
pub(super) struct Line([F32x8; 2]);

impl Line {
    /// Number of elements.
    pub const NUMBERS: usize = 2 * LANES;
}

/// The state of a row's online softmax: the largest logit, and the sum of `e^(logit - largest)`.
pub(super) type Softmax = (f32, f32);

/// The [`Softmax`] of no logits.
pub(super) const NOTHING: Softmax = (f32::NEG_INFINITY, 0.0);

/// `sum + a * b`, fused only if the target has the instruction, because libm's function is far slower.
#[inline(always)]
fn multiply_add(sum: f32, a: f32, b: f32) -> f32 {
    if cfg!(target_feature = "fma") { a.mul_add(b, sum) } else { sum + a * b }
}

/// Computes dot products of each of `A` rows with each of `B` rows. Blocks of rows share their loads.
#[inline(always)]
pub(super) fn dots<const A: usize, const B: usize>(a: [&[F32x8]; A], b: [&[F32x8]; B]) -> [[f32; B]; A] {
    let len = a[0].len();
    let (a, b) = (a.map(|row| &row[..len]), b.map(|row| &row[..len]));
    let mut sums = [[[0.0; LANES]; B]; A];
    for at in 0..len {
        for i in 0..A {
            for j in 0..B {
                for lane in 0..LANES {
                    sums[i][j][lane] = multiply_add(sums[i][j][lane], a[i][at][lane], b[j][at][lane]);
                }
            }
        }
    }
    // A separate copy keeps `sums` in registers.
    let mut stored = [[[0.0; LANES]; B]; A];
    for i in 0..A {
        for j in 0..B {
            for lane in 0..LANES {
                stored[i][j][lane] = sums[i][j][lane];
            }
        }
    }
    across(&stored)
}

/// Sums the lanes in a fixed order. It is not inlined. Otherwise the compiler would vectorise the caller's loop across
/// products, which takes a shuffle for each number.
#[inline(never)]
fn across<const A: usize, const B: usize>(sums: &[[F32x8; B]; A]) -> [[f32; B]; A] {
    let mut products = [[0.0; B]; A];
    for (products, sums) in products.iter_mut().zip(sums) {
        for (product, x) in products.iter_mut().zip(sums) {
            *product = ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7]));
        }
    }
    products
}

/// Computes `out = factor * out + weights * rows`. `rows` has the shape `[weights.len(), apart]`; only the first
/// `out.len()` vectors of each row are used.
#[inline(always)]
pub(super) fn accumulate(out: &mut [F32x8], factor: f32, weights: &[f32], rows: &[F32x8], apart: usize) {
    let len = out.len();
    let whole = len - len % 4;
    for at in (0..whole).step_by(4) {
        accumulate_part::<4>(&mut out[at..], factor, weights, rows, at, apart);
    }
    for at in whole..len {
        accumulate_part::<1>(&mut out[at..], factor, weights, rows, at, apart);
    }
}

/// Computes `N` vectors of [`accumulate`]. Their sums stay in registers over all rows.
#[inline(always)]
fn accumulate_part<const N: usize>(
    out: &mut [F32x8],
    factor: f32,
    weights: &[f32],
    rows: &[F32x8],
    at: usize,
    apart: usize,
) {
    let mut sums = [[0.0; LANES]; N];
    for i in 0..N {
        for lane in 0..LANES {
            sums[i][lane] = factor * out[i][lane];
        }
    }
    for (&weight, row) in weights.iter().zip(rows.chunks_exact(apart)) {
        let row = &row[at..at + N];
        for i in 0..N {
            for lane in 0..LANES {
                sums[i][lane] = multiply_add(sums[i][lane], weight, row[i][lane]);
            }
        }
    }
    for i in 0..N {
        for lane in 0..LANES {
            out[i][lane] = sums[i][lane];
        }
    }
}

/// Returns the maximum of `start` and `numbers`, ignoring NaN.
#[inline(always)]
pub(super) fn max(start: f32, numbers: &[f32]) -> f32 {
    fold(start, numbers, |a, b| if b > a { b } else { a })
}

/// Returns the sum of `numbers`, in a fixed order.
#[inline(always)]
pub(super) fn sum(numbers: &[f32]) -> f32 {
    fold(0.0, numbers, |a, b| a + b)
}

/// Folds along the lanes first, so that the loop is vectorised.
#[inline(always)]
fn fold(start: f32, numbers: &[f32], mut f: impl FnMut(f32, f32) -> f32) -> f32 {
    let mut lanes = [start; LANES];
    let whole = numbers.chunks_exact(LANES);
    let rest = whole.remainder().iter();
    for x in whole {
        for lane in 0..LANES {
            lanes[lane] = f(lanes[lane], x[lane]);
        }
    }
    lanes.iter().chain(rest).fold(start, |a, &b| f(a, b))
}

/// Adds a later segment to a query row: joins its state and its weighted sum with those of all earlier segments.
pub(super) fn join((softmax, out): (&mut Softmax, &mut [f32]), later: (Softmax, &[f32])) {
    let ((max, sum), more) = later;
    // A segment without visible positions must not change a bit.
    if (max, sum) == NOTHING {
        return;
    }
    if *softmax == NOTHING {
        *softmax = (max, sum);
        return out.copy_from_slice(more);
    }
    let new_max = self::max(softmax.0, &[max]);
    let base = if new_max == f32::NEG_INFINITY { 0.0 } else { new_max };
    let factors = (exp(softmax.0 - base), exp(max - base));
    for (x, y) in out.iter_mut().zip(more) {
        *x = *x * factors.0 + y * factors.1;
    }
    *softmax = (new_max, softmax.1 * factors.0 + sum * factors.1);
}

/// Below this number, `exp` returns 0. At this number, its result is close to the smallest normal f32.
pub(super) const EXP_LOW: f32 = -87.0;
/// Adding 1.5 * 2^23 rounds a number to a whole one. The low bits of the sum are then the whole number.
pub(super) const EXP_ROUND: f32 = 12_582_912.0;
/// ln 2 in two parts; the first is short enough that its product with n is exact.
pub(super) const LN_2: [f32; 2] = [0.693_359_4, -2.121_944_4e-4];
/// Coefficients of the Taylor series up to `r^7 / 7!`, highest power first.
pub(super) const EXP_TERMS: [f32; 8] = [1.0 / 5040.0, 1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0];

/// Returns `e^x` for `x <= 0`, with a relative error below `2^-22`; 0 below -87.
///
/// `e^x = 2^n e^r` with whole `n` and `|r| <= ln 2 / 2`. The Taylor series of `e^r` up to `r^7 / 7!` has a relative
/// error below `8e-9`. The function has no branches and no calls, so loops over it are vectorised.
#[inline(always)]
pub(super) fn exp(x: f32) -> f32 {
    let y = if x < EXP_LOW { EXP_LOW } else { x }; // Unlike `max`, this keeps NaN.
    let shifted = y * std::f32::consts::LOG2_E + EXP_ROUND;
    let n = shifted - EXP_ROUND;
    let r = (y - n * LN_2[0]) - n * LN_2[1];
    let mut sum = EXP_TERMS[0];
    for term in &EXP_TERMS[1..] {
        sum = multiply_add(*term, sum, r);
    }
    let power = f32::from_bits((shifted.to_bits() << 23).wrapping_add(127 << 23));
    if x < EXP_LOW { 0.0 } else { sum * power }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_within_two_units_in_the_last_place() {
        let mut worst = 0.0_f64;
        for i in 0..2_000_000 {
            let x = -87.0 * (i as f32 / 2_000_000.0);
            let exact = f64::from(x).exp();
            worst = worst.max((f64::from(exp(x)) - exact).abs() / exact);
        }
        assert!(worst < 2.0 * f64::from(f32::EPSILON), "relative error {worst:e}");
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(-88.0), 0.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert!(exp(f32::NAN).is_nan());
    }

    #[test]
    fn sum_and_max_of_any_length() {
        for len in 0..40 {
            let numbers: Vec<f32> = (0..len).map(|i| ((i * 7) % 13) as f32 - 20.0).collect();
            assert_eq!(sum(&numbers), numbers.iter().sum::<f32>());
            let largest = numbers.iter().copied().fold(-15.0, f32::max);
            assert_eq!(max(-15.0, &numbers), largest);
            for at in 0..numbers.len() {
                let mut with_nan = numbers.clone();
                with_nan.insert(at, f32::NAN);
                assert_eq!(max(-15.0, &with_nan), largest);
            }
        }
    }

    #[test]
    fn dots_and_accumulate_follow_their_definition() {
        let row = |seed: usize| -> Vec<F32x8> {
            (0..5).map(|i| std::array::from_fn(|j| ((seed * 7 + i * 3 + j) % 11) as f32)).collect()
        };
        let (a, b, c, d) = (row(1), row(2), row(3), row(4));
        let flat = |x: &[F32x8]| x.as_flattened().to_vec();
        let dot = |x: &[F32x8], y: &[F32x8]| -> f32 { flat(x).iter().zip(flat(y)).map(|(x, y)| x * y).sum() };
        let sums = dots([&a, &b], [&c, &d]);
        assert_eq!(sums, [[dot(&a, &c), dot(&a, &d)], [dot(&b, &c), dot(&b, &d)]]);

        let mut out = a.clone();
        accumulate(&mut out, 0.5, &[2.0, 3.0], &[b.clone(), c.clone()].concat(), 5);
        for (i, x) in flat(&out).into_iter().enumerate() {
            assert_eq!(x, 0.5 * flat(&a)[i] + 2.0 * flat(&b)[i] + 3.0 * flat(&c)[i]);
        }
        let mut short = a[..3].to_vec();
        accumulate(&mut short, 0.5, &[2.0, 3.0], &[b.clone(), c.clone()].concat(), 5);
        assert_eq!(short, out[..3]);
    }
}
