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
use pulp::{Simd, WithSimd};
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
            Self::Bf16(x) => pulp::Arch::new().dispatch(
                #[inline(always)]
                || widen_bf16(&x[range], wide),
            ),
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
            pulp::Arch::new().dispatch(DotRows { matrix: self, first, x, tokens, out });
        });
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

#[inline(always)]
fn widen_bf16(x: &[bf16], wide: &mut [f32]) {
    for (wide, x) in wide.iter_mut().zip(x) {
        *wide = f32::from_bits(u32::from(x.to_bits()) << 16);
    }
}

/// A task: some rows of a matrix with every row of x.
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
        let mut wide = [0.0; COLS];
        for (i, out) in out.chunks_exact_mut(tokens).enumerate() {
            let start = (first + i) * matrix.cols;
            out.fill(0.0);
            for at in (0..matrix.cols).step_by(COLS) {
                let range = start + at..start + matrix.cols.min(at + COLS);
                let x = &x[at..];
                match &matrix.numbers {
                    Numbers::F32(w) => dot_tokens(simd, &w[range], x, matrix.cols, out),
                    // One row of x: widened in registers.
                    Numbers::Bf16(w) if tokens == 1 => out[0] += dot_bf16(&w[range], x),
                    narrow => {
                        let wide = &mut wide[..range.len()];
                        match narrow {
                            Numbers::Bf16(w) => widen_bf16(&w[range], wide),
                            other => other.widen(range.start, wide),
                        }
                        dot_tokens(simd, wide, x, matrix.cols, out);
                    }
                }
            }
        }
    }
}

/// Adds the dot products of a piece of a matrix row with the same piece of each row of x.
#[inline(always)]
fn dot_tokens<S: Simd>(simd: S, w: &[f32], x: &[f32], stride: usize, out: &mut [f32]) {
    let mut t = 0;
    while t < out.len() {
        let (x, out) = (&x[t * stride..], &mut out[t..]);
        t += match out.len() {
            8.. => dot_group::<S, 8>(simd, w, x, stride, out),
            4.. => dot_group::<S, 4>(simd, w, x, stride, out),
            _ => dot_group::<S, 1>(simd, w, x, stride, out),
        };
    }
}

/// As [`dot_tokens`], for the first `T` rows of x, so that each piece of `w` is loaded once for all of them.
#[inline(always)]
fn dot_group<S: Simd, const T: usize>(
    simd: S,
    w: &[f32],
    x: &[f32],
    stride: usize,
    out: &mut [f32],
) -> usize {
    let (w_vectors, w_tail) = S::as_simd_f32s(w);
    let mut x_vectors: [&[S::f32s]; T] = [&[]; T];
    for t in 0..T {
        let row = S::as_simd_f32s(&x[t * stride..][..w.len()]);
        x_vectors[t] = row.0;
        out[t] += w_tail.iter().zip(row.1).map(|(w, x)| w * x).sum::<f32>();
    }
    // All as long as w's, so that the loop below needs no checks.
    let x_vectors = x_vectors.map(|x| &x[..w_vectors.len()]);
    let mut sums = [simd.splat_f32s(0.0); T];
    for (i, &w) in w_vectors.iter().enumerate() {
        for t in 0..T {
            sums[t] = simd.mul_add_f32s(w, x_vectors[t][i], sums[t]);
        }
    }
    for t in 0..T {
        out[t] += simd.reduce_sum_f32s(sums[t]);
    }
    T
}

/// The compiler keeps the lanes in vector registers, and widens there.
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
mod test {
    use super::*;

    /// Not a test: `cargo test --release speed -- --ignored --nocapture`
    #[test]
    #[ignore = "prints speeds"]
    fn speed() {
        let (rows, cols) = (3072, 1024);
        let wide: Vec<f32> = (0..rows * cols).map(|i| (i % 97) as f32).collect();
        let numbers = Numbers::Bf16(wide.iter().map(|&x| bf16::from_f32(x)).collect());
        let matrix = Matrix::new(rows, cols, numbers);
        for tokens in [1, 2, 4, 8, 16, 17, 32, 64, 128, 512] {
            let x = vec![1.0; tokens * cols];
            let mut out = vec![0.0; tokens * rows];
            let mut turned = Vec::new();
            let mut best = f64::MAX;
            for _ in 0..20 {
                let begun = std::time::Instant::now();
                matrix.multiply(&x, &mut out, &mut turned);
                best = best.min(begun.elapsed().as_secs_f64());
            }
            let flops = 2.0 * (rows * cols * tokens) as f64 / best / 1e9;
            let bytes = (rows * cols * 2) as f64 / best / 1e9;
            println!(
                "{tokens:4} tokens: {:8.1} us, {flops:6.1} GFLOP/s, {bytes:5.1} GB/s",
                best * 1e6
            );
        }
    }

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
