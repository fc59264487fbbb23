//! Where tensors come from: a checkpoint, or a generator of random numbers.

use half::bf16;

use crate::checkpoint::Checkpoint;
use crate::error::Result;
use crate::matrix::{Matrix, Numbers};
use crate::sample::splitmix;

/// Provides the tensors of a model by name.
pub trait Source {
    /// A matrix `[rows, cols]`.
    ///
    /// # Errors
    /// It is missing or of another shape.
    fn matrix(&mut self, name: &str, rows: usize, cols: usize) -> Result<Matrix>;

    /// The weight of a norm, or a bias.
    ///
    /// # Errors
    /// It is missing or of another shape.
    fn vector(&mut self, name: &str, len: usize) -> Result<Vec<f32>>;

    /// `count` matrices `[rows, cols]` of one tensor, one below the other.
    ///
    /// # Errors
    /// It is missing or of another shape.
    fn stack(&mut self, name: &str, count: usize, rows: usize, cols: usize) -> Result<Matrix> {
        self.matrix(name, count * rows, cols)
    }
}

impl Source for Checkpoint {
    fn matrix(&mut self, name: &str, rows: usize, cols: usize) -> Result<Matrix> {
        Checkpoint::matrix(self, name, rows, cols)
    }

    fn vector(&mut self, name: &str, len: usize) -> Result<Vec<f32>> {
        Checkpoint::vector(self, name, len)
    }

    fn stack(&mut self, name: &str, count: usize, rows: usize, cols: usize) -> Result<Matrix> {
        Checkpoint::stack(self, name, count, rows, cols)
    }
}

/// Random weights, for measuring a shape without its checkpoint: for each name another stretch of the SplitMix64 sequence,
/// so that whoever makes a tensor (`ptx/src/fill.cu` does on a GPU) makes the same.
#[derive(Clone, Copy, Debug)]
pub struct Random {
    /// Of all names' seeds.
    pub seed: u64,
}

impl Random {
    /// Where the sequence of a tensor starts.
    pub fn seed_of(&self, name: &str) -> u64 {
        // FNV-1a.
        let hash = name.bytes().fold(0xCBF2_9CE4_8422_2325, |hash: u64, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01B3)
        });
        splitmix(&mut (hash ^ self.seed))
    }

    /// Width of the uniform distribution of a matrix with so many columns: its variance is 1 / cols, so that
    /// activations neither grow nor vanish.
    pub fn scale(cols: usize) -> f32 {
        (12.0 / cols as f32).sqrt()
    }
}

impl Source for Random {
    fn matrix(&mut self, name: &str, rows: usize, cols: usize) -> Result<Matrix> {
        let (mut state, scale) = (self.seed_of(name), Self::scale(cols));
        let mut number = || {
            let unit = splitmix(&mut state) >> 40; // 24 bits
            bf16::from_f32((unit as f32 / (1 << 24) as f32 - 0.5) * scale)
        };
        let numbers = (0..rows * cols).map(|_| number()).collect();
        Ok(Matrix::new(rows, cols, Numbers::Bf16(numbers)))
    }

    fn vector(&mut self, _: &str, len: usize) -> Result<Vec<f32>> {
        Ok(vec![1.0; len])
    }
}
