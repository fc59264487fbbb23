//! The expected contents of a quantised pool, computed by the definition of fp8 in the simplest way.

use std::sync::LazyLock;

use crate::layout::KvScales;

/// Values of the non-negative bytes up to the largest value, ascending.
static SIZES: LazyLock<[f64; 127]> = LazyLock::new(|| std::array::from_fn(|i| value(i as u8)));

/// Returns the value of an E4M3 byte.
pub fn value(byte: u8) -> f64 {
    let (exponent, mantissa) = (i32::from(byte >> 3 & 15), f64::from(byte & 7));
    let size = match (exponent, byte & 7) {
        (15, 7) => f64::NAN,
        (0, _) => mantissa / 8.0 * 2_f64.powi(-6),
        _ => (1.0 + mantissa / 8.0) * 2_f64.powi(exponent - 7),
    };
    if byte & 0x80 == 0 { size } else { -size }
}

/// Returns the byte with the nearest value; in a tie the one with the even mantissa. Numbers beyond the largest value
/// become the largest value with their sign; NaN becomes 0x7f.
pub fn nearest(x: f32) -> u8 {
    if x.is_nan() {
        return 0x7f;
    }
    let (size, sizes) = (f64::from(x.abs()), &*SIZES);
    let above = sizes[..126].partition_point(|&value| value <= size);
    let below = above - 1;
    let (under, over) = (size - sizes[below], sizes[above] - size);
    let even = if below % 2 == 0 { below } else { above };
    let byte = match under.total_cmp(&over) {
        std::cmp::Ordering::Less => below,
        std::cmp::Ordering::Equal => even,
        std::cmp::Ordering::Greater => above,
    };
    byte as u8 | if x.is_sign_negative() { 0x80 } else { 0 }
}

/// Returns the scale that the store computes for one token's head.
pub fn token_scale(head: &[f32]) -> f32 {
    let finite = head.iter().filter(|x| x.is_finite()).map(|x| x.abs());
    match finite.fold(0.0, f32::max) {
        0.0 => 1.0,
        largest => (largest / 448.0).max(2_f32.powi(-126)),
    }
}

/// Returns one token's head in a quantised pool: a byte for each element, and the scale.
pub fn quantise(head: &[f32], given: Option<f32>) -> (Vec<u8>, f32) {
    let scale = given.unwrap_or_else(|| token_scale(head));
    (head.iter().map(|x| nearest(x / scale)).collect(), scale)
}

/// Returns seeded random scales for each layer and head, and for K and V. Some are so small that their reciprocal
/// exceeds the largest value of a byte.
pub fn scales(layers: u32, kv_heads: u32, seed: u64) -> KvScales {
    let mut rng = super::rng::Rng::new(seed);
    let count = 2 * layers as usize * kv_heads as usize;
    let values = (0..count).map(|_| (1 + rng.below(64)) as f32 / 4096.0).collect();
    KvScales::new(layers, kv_heads, values).expect("scales above 0")
}
