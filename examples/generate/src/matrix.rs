//! A weight matrix in its own element type, and its product with rows of f32.
//!
//! Sums are made in f32. A few rows (decode) are bound by reading the weights once: each core dots its share of the
//! matrix with them. Many rows (prefill) are bound by arithmetic: each core widens a panel of the matrix and hands it
//! to `gemm`.
//!
//! Not here: everything that is not a product (`ops.rs`).

use std::cell::RefCell;

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use rayon::prelude::*;

/// Up to so many rows are dotted directly.
const FEW_ROWS: usize = 16;
/// Matrix rows that one task takes at least: more of them where a row is short, since waking a core takes a while.
const DOT_ROWS: usize = 64;
const DOT_NUMBERS: usize = 1 << 15;
const PANEL_ROWS: usize = 128;
/// Columns that are widened at a time: 8 KiB of f32, which stay in the innermost cache.
const COLS: usize = 2048;

/// Elements in one of the types that models come in.
#[derive(Clone, PartialEq, Debug)]
pub enum Numbers {
    /// IEEE binary32.
    F32(Vec<f32>),
    /// IEEE binary16.
    F16(Vec<f16>),
    /// bfloat16.
    Bf16(Vec<bf16>),
}

impl Numbers {
    /// Number of elements.
    pub fn len(&self) -> usize {
        match self {
            Self::F32(x) => x.len(),
            Self::F16(x) => x.len(),
            Self::Bf16(x) => x.len(),
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes of one element.
    pub fn size(&self) -> usize {
        if matches!(self, Self::F32(_)) { 4 } else { 2 }
    }

    /// All of them in f32.
    pub fn to_f32(&self) -> Vec<f32> {
        let mut wide = vec![0.0; self.len()];
        self.widen(0, &mut wide);
        wide
    }

    /// Elements from `start` on, in f32.
    fn widen(&self, start: usize, wide: &mut [f32]) {
        let range = start..start + wide.len();
        match self {
            Self::F32(x) => wide.copy_from_slice(&x[range]),
            Self::F16(x) => x[range].convert_to_f32_slice(wide),
            Self::Bf16(x) => widen_bf16(&x[range], wide),
        }
    }
}

/// `[rows, cols]`, row-major.
#[derive(Clone, PartialEq, Debug)]
pub struct Matrix {
    rows: usize,
    cols: usize,
    numbers: Numbers,
}

impl Matrix {
    /// A matrix of these elements.
    ///
    /// # Panics
    /// If there are not `rows * cols` of them.
    pub fn new(rows: usize, cols: usize, numbers: Numbers) -> Self {
        assert_eq!(
            Some(numbers.len()),
            rows.checked_mul(cols),
            "a matrix has rows * cols elements"
        );
        Self { rows, cols, numbers }
    }

    /// Rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Columns.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Bytes of its elements.
    pub fn bytes(&self) -> usize {
        self.numbers.len() * self.numbers.size()
    }

    /// Row `row` in f32.
    pub fn row(&self, row: usize, wide: &mut [f32]) {
        self.numbers.widen(row * self.cols, &mut wide[..self.cols]);
    }

    /// `out[t] = matrix * x[t]` for each of `x`'s rows: `x` is `[tokens, cols]`, `out` is `[tokens, rows]`.
    ///
    /// `turned` is scratch that grows to the size of `out`. Uses all cores.
    ///
    /// # Panics
    /// If the lengths do not fit.
    pub fn multiply(&self, x: &[f32], out: &mut [f32], turned: &mut Vec<f32>) {
        let tokens = x.len() / self.cols;
        assert_eq!((x.len(), out.len()), (tokens * self.cols, tokens * self.rows));
        match tokens {
            0 => {}
            1 => self.dot_all(x, 1, out),
            _ => {
                turned.resize(turned.len().max(out.len()), 0.0);
                let turned = &mut turned[..out.len()]; // [rows, tokens]: a task's share is contiguous
                if tokens <= FEW_ROWS {
                    self.dot_all(x, tokens, turned);
                } else {
                    self.gemm_all(x, tokens, turned);
                }
                transpose(turned, tokens, out);
            }
        }
    }

    fn dot_all(&self, x: &[f32], tokens: usize, turned: &mut [f32]) {
        let rows = DOT_ROWS.max(DOT_NUMBERS / (self.cols * tokens));
        let tasks = turned.par_chunks_mut(rows * tokens).enumerate();
        tasks.for_each(|(task, out)| {
            let first = task * rows;
            pulp::Arch::new().dispatch(
                #[inline(always)]
                || {
                    for (i, out) in out.chunks_exact_mut(tokens).enumerate() {
                        let start = (first + i) * self.cols;
                        self.dot_row(start, x, out);
                    }
                },
            );
        });
    }

    /// One matrix row with every row of x.
    #[inline(always)]
    fn dot_row(&self, start: usize, x: &[f32], out: &mut [f32]) {
        out.fill(0.0);
        let mut wide = [0.0; COLS];
        for first in (0..self.cols).step_by(COLS) {
            let cols = COLS.min(self.cols - first);
            let from = start + first;
            let w = match &self.numbers {
                Numbers::F32(w) => &w[from..from + cols],
                Numbers::F16(w) => {
                    w[from..from + cols].convert_to_f32_slice(&mut wide[..cols]);
                    &wide[..cols]
                }
                Numbers::Bf16(w) if out.len() == 1 => {
                    out[0] += dot_bf16(&w[from..from + cols], &x[first..first + cols]);
                    continue;
                }
                Numbers::Bf16(w) => {
                    for (wide, w) in wide[..cols].iter_mut().zip(&w[from..from + cols]) {
                        *wide = f32::from_bits(u32::from(w.to_bits()) << 16);
                    }
                    &wide[..cols]
                }
            };
            dot_tokens(w, &x[first..], self.cols, out);
        }
    }

    fn gemm_all(&self, x: &[f32], tokens: usize, turned: &mut [f32]) {
        thread_local! {
            static PANEL: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
        }
        let tasks = turned.par_chunks_mut(PANEL_ROWS * tokens).enumerate();
        tasks.for_each(|(task, out)| {
            let (start, len) = (task * PANEL_ROWS * self.cols, out.len() / tokens * self.cols);
            if let Numbers::F32(w) = &self.numbers {
                return gemm(&w[start..start + len], x, self.cols, tokens, out);
            }
            PANEL.with_borrow_mut(|panel| {
                panel.resize(panel.len().max(len), 0.0);
                self.numbers.widen(start, &mut panel[..len]);
                gemm(&panel[..len], x, self.cols, tokens, out);
            });
        });
    }
}

/// `out[r, t] = sum over c of w[r, c] * x[t, c]`, on this thread.
fn gemm(w: &[f32], x: &[f32], cols: usize, tokens: usize, out: &mut [f32]) {
    let rows = w.len() / cols;
    assert!(w.len() == rows * cols && x.len() == tokens * cols && out.len() == rows * tokens);
    let (c, t) = (cols as isize, tokens as isize);
    // SAFETY: the assert above holds the three slices to the sizes that these strides reach, and `out` is borrowed
    // mutably, so it overlaps neither input.
    #[allow(unsafe_code)]
    unsafe {
        gemm::gemm(
            rows,
            tokens,
            cols,
            out.as_mut_ptr(),
            1,
            t,
            false,
            w.as_ptr(),
            1,
            c,
            x.as_ptr(),
            c,
            1,
            0.0_f32,
            1.0_f32,
            false,
            false,
            false,
            gemm::Parallelism::None,
        );
    }
}

/// `[rows, tokens]` to `[tokens, rows]`.
fn transpose(turned: &[f32], tokens: usize, out: &mut [f32]) {
    let rows = out.len() / tokens;
    out.par_chunks_mut(rows).enumerate().for_each(|(t, out)| {
        for (out, column) in out.iter_mut().zip(turned.chunks_exact(tokens)) {
            *out = column[t];
        }
    });
}

fn widen_bf16(x: &[bf16], wide: &mut [f32]) {
    pulp::Arch::new().dispatch(
        #[inline(always)]
        || {
            for (wide, x) in wide.iter_mut().zip(x) {
                *wide = f32::from_bits(u32::from(x.to_bits()) << 16);
            }
        },
    );
}

/// Adds the dot products of one piece of a matrix row with the same piece of each row of x, four rows at a time.
#[inline(always)]
fn dot_tokens(w: &[f32], x: &[f32], stride: usize, out: &mut [f32]) {
    let mut fours = out.chunks_exact_mut(4);
    let mut t = 0;
    for out in &mut fours {
        let row = |i: usize| &x[(t + i) * stride..][..w.len()];
        let sums = dot_four(w, [row(0), row(1), row(2), row(3)]);
        out.iter_mut().zip(sums).for_each(|(out, sum)| *out += sum);
        t += 4;
    }
    for out in fours.into_remainder() {
        *out += dot(w, &x[t * stride..][..w.len()]);
        t += 1;
    }
}

// The loops below add into arrays of independent lanes, which the compiler keeps in vector registers.

#[inline(always)]
fn dot_four(w: &[f32], x: [&[f32]; 4]) -> [f32; 4] {
    const LANES: usize = 16;
    let mut lanes = [[0.0_f32; LANES]; 4];
    let whole = w.len() / LANES * LANES;
    for at in (0..whole).step_by(LANES) {
        let w: &[f32; LANES] = w[at..at + LANES].try_into().expect("LANES elements");
        for (lanes, x) in lanes.iter_mut().zip(x) {
            let x: &[f32; LANES] = x[at..at + LANES].try_into().expect("LANES elements");
            for i in 0..LANES {
                lanes[i] += w[i] * x[i];
            }
        }
    }
    let mut sums = lanes.map(|lanes| lanes.iter().sum::<f32>());
    for at in whole..w.len() {
        for (sum, x) in sums.iter_mut().zip(x) {
            *sum += w[at] * x[at];
        }
    }
    sums
}

#[inline(always)]
fn dot(w: &[f32], x: &[f32]) -> f32 {
    const LANES: usize = 64;
    let mut lanes = [0.0_f32; LANES];
    let (w_chunks, x_chunks) = (w.chunks_exact(LANES), x.chunks_exact(LANES));
    let tail =
        w_chunks.remainder().iter().zip(x_chunks.remainder()).map(|(w, x)| w * x).sum::<f32>();
    for (w, x) in w_chunks.zip(x_chunks) {
        for i in 0..LANES {
            lanes[i] += w[i] * x[i];
        }
    }
    lanes.iter().sum::<f32>() + tail
}

#[inline(always)]
fn dot_bf16(w: &[bf16], x: &[f32]) -> f32 {
    const LANES: usize = 64;
    let widen = |w: bf16| f32::from_bits(u32::from(w.to_bits()) << 16);
    let mut lanes = [0.0_f32; LANES];
    let (w_chunks, x_chunks) = (w.chunks_exact(LANES), x.chunks_exact(LANES));
    let tail = w_chunks
        .remainder()
        .iter()
        .zip(x_chunks.remainder())
        .map(|(w, x)| widen(*w) * x)
        .sum::<f32>();
    for (w, x) in w_chunks.zip(x_chunks) {
        for i in 0..LANES {
            lanes[i] += widen(w[i]) * x[i];
        }
    }
    lanes.iter().sum::<f32>() + tail
}

#[cfg(test)]
mod test {
    use super::*;

    /// Every path against f64, with sizes that leave remainders everywhere.
    #[test]
    fn multiply_equals_f64() {
        for (rows, cols) in [(1, 1), (3, 130), (130, 67), (257, 2500)] {
            let value = |i: usize| ((i * 37 % 101) as f32 - 50.0) / 64.0; // exact in bf16 and f16
            let wide: Vec<f32> = (0..rows * cols).map(value).collect();
            let kinds = [
                Numbers::F32(wide.clone()),
                Numbers::F16(wide.iter().map(|&x| f16::from_f32(x)).collect()),
                Numbers::Bf16(wide.iter().map(|&x| bf16::from_f32(x)).collect()),
            ];
            for (kind, tokens) in kinds.iter().flat_map(|k| [1, 2, 5, 16, 17, 40].map(|t| (k, t))) {
                let matrix = Matrix::new(rows, cols, kind.clone());
                let x: Vec<f32> = (0..tokens * cols).map(|i| value(i * 7 + 3)).collect();
                let mut out = vec![f32::NAN; tokens * rows];
                matrix.multiply(&x, &mut out, &mut Vec::new());
                for (i, out) in out.iter().enumerate() {
                    let (t, r) = (i / rows, i % rows);
                    let exact: f64 = (0..cols)
                        .map(|c| f64::from(wide[r * cols + c]) * f64::from(x[t * cols + c]))
                        .sum();
                    assert!((f64::from(*out) - exact).abs() < 1e-3, "{rows}x{cols}, {tokens}: {i}");
                }
            }
        }
    }
}
