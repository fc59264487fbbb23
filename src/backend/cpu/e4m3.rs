//! Numbers of fp8 E4M3: a sign, 4 bits of exponent with bias 7, 3 bits of mantissa. There are no infinities. In a NaN,
//! all bits except the sign are 1. The conversion uses integer arithmetic, because most CPUs have no instruction for
//! it.

use bytemuck::{Pod, Zeroable};

#[derive(Clone, Copy, Pod, Zeroable, PartialEq, Eq, Debug, Default)]
#[repr(transparent)]
pub(super) struct E4m3(u8);

const MAX: u32 = 448.0_f32.to_bits();
const MIN_NORMAL: u32 = 0x3c80_0000; // 2^-6
const NAN: u8 = 0x7f;

impl E4m3 {
    /// Rounds to nearest, ties to even. Numbers beyond 448 and infinities become 448 with their sign; NaN becomes 0x7f.
    #[inline(always)]
    pub const fn from_f32(x: f32) -> Self {
        let bits = x.to_bits();
        let (sign, size) = ((bits >> 24) as u8 & 0x80, bits & 0x7fff_ffff);
        if size > f32::INFINITY.to_bits() {
            return Self(NAN);
        }
        let size = if size > MAX { MAX } else { size };
        let rounded = if size >= MIN_NORMAL {
            // The three highest bits of the mantissa stay; a carry increments the exponent.
            ((size + 0x7_ffff + (size >> 20 & 1)) >> 20) - (120 << 3)
        } else {
            // Subnormal numbers are multiples of 2^-9: the mantissa, with its leading 1, is shifted to this unit. At
            // the maximum shift the result is 0.
            let shift = 141 - (size >> 23);
            let shift = if shift > 31 { 31 } else { shift };
            let mantissa = size & 0x7f_ffff | 0x80_0000;
            (mantissa + (1 << (shift - 1)) - 1 + (mantissa >> shift & 1)) >> shift
        };
        Self(sign | rounded as u8)
    }

    #[cfg(target_arch = "x86_64")]
    pub const fn from_bits(bits: u8) -> Self {
        Self(bits)
    }

    /// Converts exactly.
    #[inline(always)]
    pub const fn to_f32(self) -> f32 {
        let size = (self.0 & 0x7f) as u32;
        // Both cases are computed without a branch, so that loops are vectorised.
        let normal = (size << 20) + (120 << 23);
        let subnormal = (size as f32 * (1.0 / 512.0)).to_bits();
        let bits = if size < 8 { subnormal } else { normal };
        let bits = if size == NAN as u32 { f32::NAN.to_bits() } else { bits };
        f32::from_bits(bits | ((self.0 & 0x80) as u32) << 24)
    }
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};

    use super::*;
    use crate::testkit::quantised::{nearest, value};
    use crate::testkit::rng::Rng;

    fn check(x: f32) {
        let (got, want) = (E4m3::from_f32(x).0, nearest(x));
        assert_eq!(got, want, "{x:e}, {:#x}", x.to_bits());
    }

    #[test]
    fn every_byte_has_its_value_and_is_written_back_unchanged() {
        for byte in 0..=u8::MAX {
            let (got, want) = (E4m3(byte).to_f32(), value(byte));
            assert_eq!(got.is_nan(), want.is_nan(), "{byte:#x}");
            let back = E4m3::from_f32(got).0;
            if got.is_nan() {
                assert_eq!(back, 0x7f);
            } else {
                assert_eq!(f64::from(got).to_bits(), want.to_bits(), "{byte:#x}");
                assert_eq!(back, byte);
            }
        }
    }

    #[test]
    fn every_number_of_16_bits_becomes_the_nearest() {
        for bits in 0..=u16::MAX {
            check(f16::from_bits(bits).to_f32());
            check(bf16::from_bits(bits).to_f32());
        }
    }

    #[test]
    fn numbers_of_32_bits_become_the_nearest() {
        let mut rng = Rng::new(1);
        for _ in 0..1 << 20 {
            check(f32::from_bits(rng.bits() as u32));
            // In this range not all results are 0 or 448.
            check(f32::from_bits(rng.within(0x3a00_0000, 0x4400_0000) as u32));
        }
        // Numbers halfway between two neighbours, and the numbers next to these.
        for byte in 0..0x7e {
            let middle = ((value(byte) + value(byte + 1)) / 2.0) as f32;
            for near in [middle, value(byte) as f32, 464.0, f32::MIN_POSITIVE, 0.0] {
                for off in -2..=2 {
                    let x = f32::from_bits(near.to_bits().saturating_add_signed(off));
                    check(x);
                    check(-x);
                }
            }
        }
        for x in [f32::INFINITY, f32::MAX, f32::NAN, f32::from_bits(0x7f80_0001), f32::from_bits(1)] {
            check(x);
            check(-x);
        }
    }
}
