//! The source of tensors: a checkpoint, a GGUF file, or a generator of random numbers.

use half::bf16;

use crate::error::Result;
use crate::matrix::{Matrix, Numbers};
use crate::sample::splitmix;

/// Provides the tensors of a model by name, in F32, F16 or BF16. A model requests each tensor once, so a source reads
/// and dequantises a tensor at the request and does not keep it. Functions that build parts of a model return the
/// errors of [`Source::numbers`].
pub trait Source {
    /// Returns the elements of a tensor, row-major.
    ///
    /// # Errors
    /// The tensor is missing or cannot be read, or has another shape or an unsupported element type.
    fn numbers(&mut self, name: &str, shape: &[usize]) -> Result<Numbers>;

    /// Returns a matrix `[rows, cols]`.
    fn matrix(&mut self, name: &str, rows: usize, cols: usize) -> Result<Matrix> {
        Ok(Matrix::new(rows, cols, self.numbers(name, &[rows, cols])?))
    }

    /// Returns a vector `[len]`, such as the weight of a norm or a bias.
    fn vector(&mut self, name: &str, len: usize) -> Result<Vec<f32>> {
        Ok(self.numbers(name, &[len])?.to_f32())
    }

    /// Returns `count` matrices `[rows, cols]` of one tensor, stacked by rows.
    fn stack(&mut self, name: &str, count: usize, rows: usize, cols: usize) -> Result<Matrix> {
        Ok(Matrix::new(count * rows, cols, self.numbers(name, &[count, rows, cols])?))
    }
}

/// Random matrices, and vectors of ones, to measure a shape without its checkpoint. Each name has its own part of the
/// SplitMix64 sequence, so every generator (`ptx/src/fill.cu` on a GPU) produces equal tensors.
#[derive(Clone, Copy, Debug)]
pub struct Random {
    /// The seed for all names.
    pub seed: u64,
}

impl Random {
    /// Returns the initial state of a tensor's sequence.
    pub fn seed_of(&self, name: &str) -> u64 {
        // FNV-1a.
        let hash = name
            .bytes()
            .fold(0xCBF2_9CE4_8422_2325, |hash: u64, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01B3));
        splitmix(&mut (hash ^ self.seed))
    }

    /// Returns the width of the uniform distribution for a matrix with this many columns. Its variance is 1 / cols, so
    /// activations neither grow nor vanish.
    pub fn scale(cols: usize) -> f32 {
        (12.0 / cols as f32).sqrt()
    }
}

impl Source for Random {
    fn numbers(&mut self, name: &str, shape: &[usize]) -> Result<Numbers> {
        let count = shape.iter().product();
        let [_, .., cols] = *shape else { return Ok(Numbers::F32(vec![1.0; count])) };
        let (mut state, scale) = (self.seed_of(name), Self::scale(cols));
        let mut number = || {
            let unit = splitmix(&mut state) >> 40; // 24 bits
            bf16::from_f32((unit as f32 / (1 << 24) as f32 - 0.5) * scale)
        };
        Ok(Numbers::Bf16((0..count).map(|_| number()).collect()))
    }
}
