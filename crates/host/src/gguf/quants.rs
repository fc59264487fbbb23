//! The types of a GGUF file's elements, and their dequantisation to f32: the arithmetic of ggml in the same order, so
//! that results have the same bits.
//!
//! A row consists of blocks. A block contains scales and, for each element, a few bits.

use std::fmt;

use half::{bf16, f16};

/// A type of elements, named as in ggml.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[allow(missing_docs, non_camel_case_types)] // ggml's names
pub enum Quant {
    F32,
    F16,
    BF16,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q4_K,
    Q5_K,
    Q6_K,
}

use Quant::{BF16, F16, F32, Q4_0, Q4_1, Q4_K, Q5_0, Q5_1, Q5_K, Q6_K, Q8_0};

/// ggml's numbers of the implemented types, the elements of a block, and its bytes.
const TYPES: [(u32, Quant, usize, usize); 11] = [
    (0, F32, 1, 4),
    (1, F16, 1, 2),
    (2, Q4_0, 32, 18),
    (3, Q4_1, 32, 20),
    (6, Q5_0, 32, 22),
    (7, Q5_1, 32, 24),
    (8, Q8_0, 32, 34),
    (12, Q4_K, 256, 144),
    (13, Q5_K, 256, 176),
    (14, Q6_K, 256, 210),
    (30, BF16, 1, 2),
];

/// Other types that files contain, for messages.
const OTHERS: [(u32, &str); 14] = [
    (10, "Q2_K"),
    (11, "Q3_K"),
    (16, "IQ2_XXS"),
    (17, "IQ2_XS"),
    (18, "IQ3_XXS"),
    (19, "IQ1_S"),
    (20, "IQ4_NL"),
    (21, "IQ3_S"),
    (22, "IQ2_S"),
    (23, "IQ4_XS"),
    (29, "IQ1_M"),
    (34, "TQ1_0"),
    (35, "TQ2_0"),
    (39, "MXFP4"),
];

impl fmt::Display for Quant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

impl Quant {
    /// Returns the type with ggml's number.
    ///
    /// # Errors
    /// The type is not implemented.
    pub(super) fn new(number: u32) -> Result<Self, String> {
        if let Some((_, quant, ..)) = TYPES.iter().find(|(other, ..)| *other == number) {
            return Ok(*quant);
        }
        let name = OTHERS.iter().find(|(other, _)| *other == number);
        let name = name.map_or_else(|| format!("type {number}"), |(_, name)| (*name).to_owned());
        let all = TYPES.map(|(_, quant, ..)| quant.to_string()).join(", ");
        Err(format!("{name} is not implemented, only {all}"))
    }

    /// Returns the elements of a block, and its bytes.
    pub(super) fn block(self) -> (usize, usize) {
        let (.., len, bytes) = TYPES.iter().find(|(_, quant, ..)| *quant == self).expect("listed");
        (*len, *bytes)
    }

    /// Dequantises whole blocks.
    pub fn decode(self, bytes: &[u8], numbers: &mut [f32]) {
        let (len, size) = self.block();
        for (block, numbers) in bytes.chunks_exact(size).zip(numbers.chunks_exact_mut(len)) {
            match self {
                F32 => numbers[0] = f32::from_le_bytes([block[0], block[1], block[2], block[3]]),
                F16 => numbers[0] = half(block),
                BF16 => numbers[0] = bf16::from_le_bytes([block[0], block[1]]).to_f32(),
                Q4_0 => nibbles(&block[2..], 0, numbers, |q| half(block) * (q - 8.0)),
                Q4_1 => nibbles(&block[4..], 0, numbers, |q| half(block) * q + half(&block[2..])),
                Q5_0 => nibbles(&block[6..], high(&block[2..]), numbers, |q| half(block) * (q - 16.0)),
                Q5_1 => nibbles(&block[8..], high(&block[4..]), numbers, |q| half(block) * q + half(&block[2..])),
                Q8_0 => {
                    let q = block[2..].iter().map(|&q| f32::from(q as i8));
                    numbers.iter_mut().zip(q).for_each(|(x, q)| *x = q * half(block));
                }
                Q4_K => decode_k(block, (&block[16..], None), numbers),
                Q5_K => decode_k(block, (&block[48..], Some(&block[16..48])), numbers),
                Q6_K => decode_q6_k(block, numbers),
            }
        }
    }
}

/// Returns the f16 number at the start of the bytes.
fn half(bytes: &[u8]) -> f32 {
    f16::from_le_bytes([bytes[0], bytes[1]]).to_f32()
}

fn high(bytes: &[u8]) -> u32 {
    u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
}

/// Computes 32 elements: those of the low nibbles, then those of the high ones. `high` contains their fifth bits.
fn nibbles(bytes: &[u8], high: u32, numbers: &mut [f32], number: impl Fn(f32) -> f32) {
    for (i, x) in numbers.iter_mut().enumerate() {
        let low = bytes[i % 16] >> (i / 16 * 4) & 15;
        *x = number(f32::from(low | ((high >> i & 1) as u8) << 4));
    }
}

/// Dequantises 256 elements of Q4_K or Q5_K: eight groups of 32, each with a scale and a minimum of six bits. `fifth`
/// has the fifth bits of Q5_K; bit j of a byte belongs to group j.
fn decode_k(block: &[u8], (low, fifth): (&[u8], Option<&[u8]>), numbers: &mut [f32]) {
    let packed = &block[4..16];
    for (group, numbers) in numbers.chunks_exact_mut(32).enumerate() {
        let (scale, min) = match group {
            0..4 => (packed[group] & 63, packed[group + 4] & 63),
            _ => {
                (packed[group + 4] & 15 | packed[group - 4] >> 6 << 4, packed[group + 4] >> 4 | packed[group] >> 6 << 4)
            }
        };
        let (scale, min) = (half(block) * f32::from(scale), half(&block[2..]) * f32::from(min));
        for (i, x) in numbers.iter_mut().enumerate() {
            let q = low[group / 2 * 32 + i] >> (group % 2 * 4) & 15;
            let bit = fifth.map_or(0, |fifth| fifth[i] >> group & 1);
            *x = scale * f32::from(q | bit << 4) - min;
        }
    }
}

/// Dequantises 256 elements of Q6_K: four low bits, two high bits, and a scale for 16 elements.
fn decode_q6_k(block: &[u8], numbers: &mut [f32]) {
    let (low, high, scales) = (&block[..128], &block[128..192], &block[192..208]);
    for (i, x) in numbers.iter_mut().enumerate() {
        // Each half of the block has four runs of 32 elements.
        let (part, run, at) = (i / 128, i % 128 / 32, i % 32);
        let four = low[part * 64 + run % 2 * 32 + at] >> (run / 2 * 4) & 15;
        let two = high[part * 32 + at] >> (run * 2) & 3;
        let scale = half(&block[208..]) * f32::from(scales[i / 16] as i8);
        *x = scale * (f32::from(four | two << 4) - 32.0);
    }
}
