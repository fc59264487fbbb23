//! A weight matrix in its own element type, and its product with rows of f32.
//!
//! Sums are in f32. Products of a few rows (decode) are memory-bound and read the weights once: each core computes the
//! dot products of its share of the matrix. Products of many rows (prefill) are compute-bound: each core widens a panel
//! of the matrix and calls `gemm`.

use std::cell::RefCell;
use std::ops::{Range, RangeInclusive};

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use pulp::{Simd, WithSimd};
use rayon::prelude::*;

/// Maximum number of rows of x that are multiplied by direct dot products.
const FEW_ROWS: usize = 16;
/// Minimum number of matrix rows of a task of dot products.
const DOT_ROWS: usize = 64;
/// Minimum number of multiplications of a task. Fewer take less time than waking a core.
const TASK_NUMBERS: usize = 1 << 17;
/// Minimum number of elements of a task of a transposition.
const TRANSPOSED: usize = 1 << 15;
/// Minimum and maximum number of rows of a panel. Within these bounds and that of a task, each core has one panel,
/// because `gemm` packs all of x again for each panel.
const PANEL_ROWS: RangeInclusive<usize> = 64..=1024;
/// Number of matrix rows, and of rows of x, whose products are computed together.
const TILE: usize = 4;
/// Columns that are widened at a time: a tile of 16 KiB of f32, which fits the L1 cache.
const COLS: usize = 1024;

/// Elements in one of the types of model files.
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
    /// Returns the number of elements.
    pub fn len(&self) -> usize {
        match self {
            Self::F32(x) => x.len(),
            Self::F16(x) => x.len(),
            Self::Bf16(x) => x.len(),
        }
    }

    /// Returns whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the elements at the given indices.
    fn pick(&self, places: impl Iterator<Item = usize>) -> Self {
        match self {
            Self::F32(x) => Self::F32(places.map(|i| x[i]).collect()),
            Self::F16(x) => Self::F16(places.map(|i| x[i]).collect()),
            Self::Bf16(x) => Self::Bf16(places.map(|i| x[i]).collect()),
        }
    }

    /// Returns all elements in f32.
    pub fn to_f32(&self) -> Vec<f32> {
        let mut wide = vec![0.0; self.len()];
        self.widen(0, &mut wide);
        wide
    }

    /// Returns all elements in bf16, rounded if necessary.
    pub fn into_bf16(self) -> Vec<bf16> {
        match self {
            Self::F32(x) => x.into_iter().map(bf16::from_f32).collect(),
            Self::F16(x) => x.into_iter().map(|x| bf16::from_f32(x.to_f32())).collect(),
            Self::Bf16(x) => x,
        }
    }

    /// Does the same as [`Numbers::widen`], inlined into a caller that is compiled for the chosen vector instructions.
    #[inline(always)]
    fn widen_here(&self, start: usize, wide: &mut [f32]) {
        match self {
            Self::Bf16(x) => widen_bf16(&x[start..start + wide.len()], wide),
            other => other.widen(start, wide),
        }
    }

    /// Writes the elements from `start` on in f32.
    fn widen(&self, start: usize, wide: &mut [f32]) {
        let range = start..start + wide.len();
        match self {
            Self::F32(x) => wide.copy_from_slice(&x[range]),
            Self::F16(x) => x[range].convert_to_f32_slice(wide),
            Self::Bf16(x) => pulp::Arch::new().dispatch(
                #[inline(always)]
                || widen_bf16(&x[range], wide),
            ),
        }
    }
}

/// A matrix `[rows, cols]`, row-major.
#[derive(Clone, PartialEq, Debug)]
pub struct Matrix {
    rows: usize,
    cols: usize,
    numbers: Numbers,
}

impl Matrix {
    /// Creates a matrix from its elements.
    ///
    /// # Panics
    /// If `numbers` does not have `rows * cols` elements.
    pub fn new(rows: usize, cols: usize, numbers: Numbers) -> Self {
        assert_eq!(Some(numbers.len()), rows.checked_mul(cols), "a matrix has rows * cols elements");
        Self { rows, cols, numbers }
    }

    /// Returns the number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Returns the number of columns.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Writes row `row` in f32.
    pub fn row(&self, row: usize, wide: &mut [f32]) {
        self.numbers.widen(row * self.cols, &mut wide[..self.cols]);
    }

    /// Returns a range of rows.
    ///
    /// # Panics
    /// If the range exceeds the matrix.
    pub fn part(&self, rows: Range<usize>) -> Self {
        let places = rows.start * self.cols..rows.end * self.cols;
        Self::new(rows.len(), self.cols, self.numbers.pick(places))
    }

    /// Returns every second row, from row `first` on.
    pub fn every_other(&self, first: usize) -> Self {
        let rows = (first..self.rows).step_by(2);
        let places = rows.clone().flat_map(|row| row * self.cols..(row + 1) * self.cols);
        Self::new(rows.len(), self.cols, self.numbers.pick(places))
    }

    /// Returns the transpose.
    pub fn transpose(&self) -> Self {
        let places = (0..self.cols).flat_map(|col| (0..self.rows).map(move |row| row * self.cols + col));
        Self::new(self.cols, self.rows, self.numbers.pick(places))
    }

    /// Computes `out[t] = matrix * x[t]` for each row of x: `x` is `[tokens, cols]`, `out` is `[tokens, rows]`.
    ///
    /// `transposed` is scratch that grows to the size of `out` if there are several rows. The function uses all cores.
    ///
    /// # Panics
    /// If the lengths do not match.
    pub fn multiply(&self, x: &[f32], out: &mut [f32], transposed: &mut Vec<f32>) {
        let tokens = x.len() / self.cols;
        assert_eq!((x.len(), out.len()), (tokens * self.cols, tokens * self.rows));
        match tokens {
            0 => {}
            1 => self.dot_all(x, 1, out),
            _ => {
                transposed.resize(transposed.len().max(out.len()), 0.0);
                let transposed = &mut transposed[..out.len()]; // `[rows, tokens]`: a task's share is contiguous
                if tokens <= FEW_ROWS {
                    self.dot_all(x, tokens, transposed);
                } else {
                    self.gemm_all(x, tokens, transposed);
                }
                transpose(transposed, tokens, out);
            }
        }
    }

    fn dot_all(&self, x: &[f32], tokens: usize, transposed: &mut [f32]) {
        let rows = DOT_ROWS.max(TASK_NUMBERS / (self.cols * tokens));
        let tasks = transposed.par_chunks_mut(rows * tokens).enumerate();
        tasks.for_each(|(task, out)| {
            let first = task * rows;
            pulp::Arch::new().dispatch(DotRows { matrix: self, first, x, tokens, out });
        });
    }

    fn gemm_all(&self, x: &[f32], tokens: usize, transposed: &mut [f32]) {
        thread_local! {
            static PANEL: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
        }
        let share = self.rows.div_ceil(rayon::current_num_threads());
        let least = (*PANEL_ROWS.start()).max(TASK_NUMBERS / (self.cols * tokens));
        let rows = share.max(least).min(*PANEL_ROWS.end());
        let tasks = transposed.par_chunks_mut(rows * tokens).enumerate();
        tasks.for_each(|(task, out)| {
            let (start, len) = (task * rows * self.cols, out.len() / tokens * self.cols);
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

/// Computes `out[r, t] = sum over c of w[r, c] * x[t, c]` on this thread.
fn gemm(w: &[f32], x: &[f32], cols: usize, tokens: usize, out: &mut [f32]) {
    let rows = w.len() / cols;
    assert!(w.len() == rows * cols && x.len() == tokens * cols && out.len() == rows * tokens);
    let (c, t) = (cols as isize, tokens as isize);
    // SAFETY: the assert above checks that each slice has exactly the elements that its size and strides address. `out`
    // is borrowed mutably, so it overlaps neither input.
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

/// Transposes `[rows, tokens]` to `[tokens, rows]`.
fn transpose(transposed: &[f32], tokens: usize, out: &mut [f32]) {
    let rows = out.len() / tokens;
    let tasks = out.par_chunks_mut(rows).enumerate().with_min_len(TRANSPOSED.div_ceil(rows));
    tasks.for_each(|(t, out)| {
        for (out, column) in out.iter_mut().zip(transposed.chunks_exact(tokens)) {
            *out = column[t];
        }
    });
}

#[inline(always)]
fn widen_bf16(x: &[bf16], wide: &mut [f32]) {
    for (wide, x) in wide.iter_mut().zip(x) {
        *wide = f32::from_bits(u32::from(x.to_bits()) << 16);
    }
}

/// Task: some rows of a matrix times every row of x.
struct DotRows<'a> {
    matrix: &'a Matrix,
    first: usize,
    x: &'a [f32],
    tokens: usize,
    /// `[rows, tokens]`
    out: &'a mut [f32],
}

impl WithSimd for DotRows<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { matrix, first, x, tokens, out } = self;
        let cols = matrix.cols;
        if let (Numbers::Bf16(w), 1) = (&matrix.numbers, tokens) {
            // One row of x: elements of the matrix are widened in registers.
            let rows = w[first * cols..].chunks_exact(cols);
            return out.iter_mut().zip(rows).for_each(|(out, w)| *out = dot_bf16(w, x));
        }
        let mut wide = [[0.0; COLS]; TILE];
        for (i, out) in out.chunks_mut(TILE * tokens).enumerate() {
            let start = (first + i * TILE) * cols;
            let rows = out.len() / tokens;
            out.fill(0.0);
            for at in (0..cols).step_by(COLS) {
                let len = COLS.min(cols - at);
                let mut w: [&[f32]; TILE] = [&[]; TILE];
                for (r, (w, wide)) in w.iter_mut().zip(&mut wide).enumerate().take(rows) {
                    let from = start + r * cols + at;
                    *w = match &matrix.numbers {
                        Numbers::F32(numbers) => &numbers[from..from + len],
                        narrow => {
                            narrow.widen_here(from, &mut wide[..len]);
                            &wide[..len]
                        }
                    };
                }
                let x = &x[at..];
                if rows == TILE {
                    dot_rows(simd, w, x, cols, tokens, out);
                } else {
                    for (w, out) in w.iter().zip(out.chunks_exact_mut(tokens)) {
                        dot_rows(simd, [*w], x, cols, tokens, out);
                    }
                }
            }
        }
    }
}

/// Adds to `out` the dot products of a part of `R` matrix rows with the same part of each row of x.
#[inline(always)]
fn dot_rows<S: Simd, const R: usize>(
    simd: S,
    w: [&[f32]; R],
    x: &[f32],
    stride: usize,
    tokens: usize,
    out: &mut [f32],
) {
    let mut t = 0;
    while t + TILE <= tokens {
        dot_tile::<S, R, TILE>(simd, w, x, stride, (t, tokens), out);
        t += TILE;
    }
    while t < tokens {
        dot_tile::<S, R, 1>(simd, w, x, stride, (t, tokens), out);
        t += 1;
    }
}

/// Multiplies `R` matrix rows with `T` rows of x from row `t` on; each loaded vector serves several products.
#[inline(always)]
fn dot_tile<S: Simd, const R: usize, const T: usize>(
    simd: S,
    w: [&[f32]; R],
    x: &[f32],
    stride: usize,
    (t, tokens): (usize, usize),
    out: &mut [f32],
) {
    let len = w[0].len();
    let w = w.map(|w| S::as_simd_f32s(&w[..len]));
    let x: [_; T] = std::array::from_fn(|i| S::as_simd_f32s(&x[(t + i) * stride..][..len]));
    // All slices have the length of the first, so the loop below needs no bounds checks.
    let vectors = w[0].0.len();
    let w_vectors = w.map(|w| &w.0[..vectors]);
    let x_vectors = x.map(|x| &x.0[..vectors]);
    let mut sums = [[simd.splat_f32s(0.0); T]; R];
    for i in 0..vectors {
        for r in 0..R {
            for t in 0..T {
                sums[r][t] = simd.mul_add_f32s(w_vectors[r][i], x_vectors[t][i], sums[r][t]);
            }
        }
    }
    for r in 0..R {
        for i in 0..T {
            let tail: f32 = w[r].1.iter().zip(x[i].1).map(|(w, x)| w * x).sum();
            out[r * tokens + t + i] += simd.reduce_sum_f32s(sums[r][i]) + tail;
        }
    }
}

/// Returns a dot product. The compiler keeps the lanes in vector registers and widens the elements there.
#[inline(always)]
fn dot_bf16(w: &[bf16], x: &[f32]) -> f32 {
    const LANES: usize = 64;
    let widen = |w: bf16| f32::from_bits(u32::from(w.to_bits()) << 16);
    let mut lanes = [0.0_f32; LANES];
    let (w_chunks, x_chunks) = (w.chunks_exact(LANES), x[..w.len()].chunks_exact(LANES));
    let tail = w_chunks.remainder().iter().zip(x_chunks.remainder());
    let tail = tail.map(|(w, x)| widen(*w) * x).sum::<f32>();
    for (w, x) in w_chunks.zip(x_chunks) {
        for i in 0..LANES {
            lanes[i] += widen(w[i]) * x[i];
        }
    }
    lanes.iter().sum::<f32>() + tail
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Compares every path with f64, with sizes that leave remainders in every loop.
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
                    let exact: f64 =
                        (0..cols).map(|c| f64::from(wide[r * cols + c]) * f64::from(x[t * cols + c])).sum();
                    assert!((f64::from(*out) - exact).abs() < 1e-3, "{rows}x{cols}, {tokens}: {i}");
                }
            }
        }
    }
}
