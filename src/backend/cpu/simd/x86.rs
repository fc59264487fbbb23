//! The vectors of AVX2 and of AVX-512.
//!
//! Three instructions are in assembly, because `pulp` does not enable their extensions, and an intrinsic is only
//! inlined with its extension enabled. `Isa::new` checks that the machine has them.

#![allow(unsafe_code)]

use std::arch::asm;
use std::arch::x86_64::{__m128i, __m256, __m512i};

use bytemuck::cast;
use half::f16;
use pulp::Simd;
use pulp::x86::{V3, V4};

use super::{E4m3, Lanes, load};

impl Lanes for V3 {
    const ROW_VECTORS: usize = 2;

    #[inline(always)]
    fn widen_u16(self, numbers: &[u16]) -> Self::u32s {
        cast(self.avx2._mm256_cvtepu16_epi32(load(numbers)))
    }

    #[inline(always)]
    fn f16(self, numbers: &[f16]) -> Self::f32s {
        cast(widen_f16(self, load(numbers)))
    }

    // A number becomes an f16 with the same bits of exponent and mantissa, which is 2^-8 of its value. After the
    // multiplication, NaN is 480.
    #[inline(always)]
    fn e4m3<const N: usize>(self, numbers: &[E4m3]) -> [Self::f32s; N] {
        let nan = self.splat_f32s(480.0);
        let mut vectors = [nan; N];
        for n in 0..N {
            let bytes: u64 = load(&numbers[8 * n..8 * n + 8]);
            let signed = self.sse4_1._mm_cvtepi8_epi16(cast([bytes, 0]));
            let fields = self.sse2._mm_set1_epi16(!0x4000);
            let half = self.sse2._mm_and_si128(self.sse2._mm_slli_epi16::<7>(signed), fields);
            let wide = self.mul_f32s(cast(widen_f16(self, half)), self.splat_f32s(256.0));
            let is_nan = self.greater_than_or_equal_f32s(self.abs_f32s(wide), nan);
            vectors[n] = self.select_f32s(is_nan, self.splat_f32s(f32::NAN), wide);
        }
        vectors
    }

    #[inline(always)]
    fn sums(self, [a, b, c, d]: [Self::f32s; 4]) -> [f32; 4] {
        let avx = self.avx;
        let (ab, cd) = (avx._mm256_hadd_ps(cast(a), cast(b)), avx._mm256_hadd_ps(cast(c), cast(d)));
        let halves = avx._mm256_hadd_ps(ab, cd);
        let (low, high) = (avx._mm256_castps256_ps128(halves), avx._mm256_extractf128_ps::<1>(halves));
        cast(self.sse._mm_add_ps(low, high))
    }
}

impl Lanes for V4 {
    const ROW_VECTORS: usize = 4;

    #[inline(always)]
    fn widen_u16(self, numbers: &[u16]) -> Self::u32s {
        cast(self.avx512f._mm512_cvtepu16_epi32(load(numbers)))
    }

    #[inline(always)]
    fn f16(self, numbers: &[f16]) -> Self::f32s {
        cast(self.avx512f._mm512_cvtph_ps(load(numbers)))
    }

    // Two look-ups convert 64 numbers to bf16, in two registers. In each, the low halves of the 32-bit words are one
    // vector, and the high halves are the next vector.
    #[inline(always)]
    fn e4m3<const N: usize>(self, numbers: &[E4m3]) -> [Self::f32s; N] {
        let avx = self.avx512bw;
        let bytes = if N == 4 {
            load(numbers)
        } else {
            let mut all = [E4m3::default(); 64];
            all[..16 * N].copy_from_slice(numbers);
            load(&all)
        };
        let bytes = permute(self, bytes, &E4M3_ORDER);
        let low = look_up(self, bytes, &E4M3_LOW);
        let sign = self.avx512f._mm512_and_si512(bytes, cast([0x80_u8; 64]));
        let high = self.avx512f._mm512_or_si512(look_up(self, bytes, &E4M3_HIGH), sign);
        let words = [avx._mm512_unpacklo_epi8(low, high), avx._mm512_unpackhi_epi8(low, high)];
        let mut vectors = [self.splat_f32s(0.0); N];
        for n in 0..N {
            let words: Self::u32s = cast(words[n / 2]);
            vectors[n] = cast(match n % 2 {
                0 => self.wrapping_dyn_shl_u32s(words, self.splat_u32s(16)),
                _ => self.and_u32s(words, self.splat_u32s(0xffff_0000)),
            });
        }
        vectors
    }

    #[inline(always)]
    fn sums(self, vectors: [Self::f32s; 4]) -> [f32; 4] {
        let v3: V3 = *self;
        let [a, b, c, d]: [[pulp::f32x8; 2]; 4] = cast(vectors);
        v3.sums([
            Simd::add_f32s(v3, a[0], a[1]),
            Simd::add_f32s(v3, b[0], b[1]),
            Simd::add_f32s(v3, c[0], c[1]),
            Simd::add_f32s(v3, d[0], d[1]),
        ])
    }
}

/// Widens eight numbers of f16.
#[inline(always)]
fn widen_f16(_: V3, numbers: __m128i) -> __m256 {
    #[inline]
    #[target_feature(enable = "avx")]
    fn widen(numbers: __m128i) -> __m256 {
        let wide;
        // SAFETY: the instruction of F16C, which the path requires, only writes its operand.
        unsafe {
            asm!("vcvtph2ps {}, {}", lateout(ymm_reg) wide, in(xmm_reg) numbers,
                options(pure, nomem, nostack, preserves_flags));
        }
        wide
    }
    // SAFETY: the machine has AVX, as the token proves.
    unsafe { widen(numbers) }
}

/// Looks up the low seven bits of each byte.
#[inline(always)]
fn look_up(_: V4, bytes: __m512i, table: &[u8; 128]) -> __m512i {
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn look_up(mut bytes: __m512i, low: __m512i, high: __m512i) -> __m512i {
        // SAFETY: the instruction of VBMI, which the path requires, only writes its operand.
        unsafe {
            asm!("vpermi2b {}, {}, {}", inout(zmm_reg) bytes, in(zmm_reg) low, in(zmm_reg) high,
                options(pure, nomem, nostack, preserves_flags));
        }
        bytes
    }
    // SAFETY: the machine has AVX-512, as the token proves.
    unsafe { look_up(bytes, load(&table[..64]), load(&table[64..])) }
}

/// Writes byte `order[i]` to place `i`.
#[inline(always)]
fn permute(_: V4, bytes: __m512i, order: &[u8; 64]) -> __m512i {
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn permute(bytes: __m512i, order: __m512i) -> __m512i {
        let placed;
        // SAFETY: the instruction of VBMI, which the path requires, only writes its operand.
        unsafe {
            asm!("vpermb {}, {}, {}", lateout(zmm_reg) placed, in(zmm_reg) order, in(zmm_reg) bytes,
                options(pure, nomem, nostack, preserves_flags));
        }
        placed
    }
    // SAFETY: the machine has AVX-512, as the token proves.
    unsafe { permute(bytes, load(order)) }
}

/// The low and the high byte of each non-negative E4M3 number as bf16.
static E4M3_LOW: [u8; 128] = e4m3_bytes(2);
static E4M3_HIGH: [u8; 128] = e4m3_bytes(3);

const fn e4m3_bytes(byte: usize) -> [u8; 128] {
    let mut bytes = [0; 128];
    let mut number = 0;
    while number < 128 {
        bytes[number] = E4m3::from_bits(number as u8).to_f32().to_le_bytes()[byte];
        number += 1;
    }
    bytes
}

/// For each place before the look-ups, the index of the number that goes there. The order compensates for two later
/// steps. Unpacking makes 8 words from each half of a 16-byte lane. Then the low and the high words of the 32-bit lanes
/// go to different vectors.
static E4M3_ORDER: [u8; 64] = {
    let mut order = [0; 64];
    let mut at = 0;
    while at < 64 {
        let (lane, half, word) = (at / 16, at / 8 % 2, at % 8);
        order[at] = (32 * half + 16 * (word % 2) + 4 * lane + word / 2) as u8;
        at += 1;
    }
    order
};
