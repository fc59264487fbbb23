//! The element types, and conversions of slices.

use std::any::TypeId;

use bytemuck::{Pod, cast_slice};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use super::e4m3::E4m3;
use super::simd::{Isa, Lanes, Op, load};

/// An element type of pools and rows.
pub(super) trait Number: Pod + Send + Sync {
    /// Whether a pool's numbers are multiples of a scale.
    const QUANTISED: bool = false;

    /// Widens exactly.
    fn widen(source: &[Self], target: &mut [f32]);
    /// Rounds to nearest, ties to even.
    fn narrow(source: &[f32], target: &mut [Self]);
    /// Widens one vector, exactly.
    fn load<S: Lanes>(s: S, source: &[Self]) -> S::f32s;

    /// Widens `N` vectors, exactly.
    #[inline(always)]
    fn load_all<S: Lanes, const N: usize>(s: S, source: &[Self]) -> [S::f32s; N] {
        let mut wide = [s.splat_f32s(0.0); N];
        for n in 0..N {
            wide[n] = Self::load(s, &source[n * S::F32_LANES..][..S::F32_LANES]);
        }
        wide
    }
}

impl Number for f32 {
    fn widen(source: &[Self], target: &mut [f32]) {
        target.copy_from_slice(source);
    }

    fn narrow(source: &[f32], target: &mut [Self]) {
        target.copy_from_slice(source);
    }

    #[inline(always)]
    fn load<S: Lanes>(_: S, source: &[Self]) -> S::f32s {
        load(source)
    }
}

impl Number for f16 {
    fn widen(source: &[Self], target: &mut [f32]) {
        source.convert_to_f32_slice(target);
    }

    fn narrow(source: &[f32], target: &mut [Self]) {
        target.convert_from_f32_slice(source);
    }

    #[inline(always)]
    fn load<S: Lanes>(s: S, source: &[Self]) -> S::f32s {
        s.f16(source)
    }
}

impl Number for bf16 {
    // Unlike the conversion of `half`, this loop is vectorised, and signalling NaNs stay signalling.
    #[inline(always)]
    fn widen(source: &[Self], target: &mut [f32]) {
        assert_eq!(source.len(), target.len());
        for (x, y) in source.iter().zip(target) {
            *y = f32::from_bits(u32::from(x.to_bits()) << 16);
        }
    }

    // Returns the same bits as `half`, but has no branches.
    #[inline(always)]
    fn narrow(source: &[f32], target: &mut [Self]) {
        assert_eq!(source.len(), target.len());
        for (x, y) in source.iter().zip(target) {
            let bits = x.to_bits();
            let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
            *y = bf16::from_bits(if x.is_nan() { bits >> 16 | 0x40 } else { rounded } as u16);
        }
    }

    #[inline(always)]
    fn load<S: Lanes>(s: S, source: &[Self]) -> S::f32s {
        let high = s.wrapping_dyn_shl_u32s(s.widen_u16(cast_slice(source)), s.splat_u32s(16));
        s.transmute_f32s_u32s(high)
    }
}

impl Number for E4m3 {
    const QUANTISED: bool = true;

    #[inline(always)]
    fn widen(source: &[Self], target: &mut [f32]) {
        assert_eq!(source.len(), target.len());
        for (x, y) in source.iter().zip(target) {
            *y = x.to_f32();
        }
    }

    #[inline(always)]
    fn narrow(source: &[f32], target: &mut [Self]) {
        assert_eq!(source.len(), target.len());
        for (x, y) in source.iter().zip(target) {
            *y = Self::from_f32(*x);
        }
    }

    #[inline(always)]
    fn load<S: Lanes>(s: S, source: &[Self]) -> S::f32s {
        s.e4m3::<1>(source)[0]
    }

    #[inline(always)]
    fn load_all<S: Lanes, const N: usize>(s: S, source: &[Self]) -> [S::f32s; N] {
        s.e4m3(source)
    }
}

/// Converts through f32, which represents every value exactly. Equal types are copied bit by bit.
pub(super) fn convert<A: Number, B: Number>(source: &[A], target: &mut [B]) {
    if TypeId::of::<A>() == TypeId::of::<B>() {
        target.copy_from_slice(cast_slice(source));
        return;
    }
    assert_eq!(source.len(), target.len());
    if let Some(op) = Isa::of_process().run(Convert(source, target)) {
        op.convert();
    }
}

/// A conversion that yields the same bits with any instruction set.
struct Convert<'a, A, B>(&'a [A], &'a mut [B]);

impl<A: Number, B: Number> Convert<'_, A, B> {
    #[inline(always)]
    fn convert(self) {
        let mut wide = [0.0; 64];
        for (from, to) in self.0.chunks(wide.len()).zip(self.1.chunks_mut(wide.len())) {
            let wide = &mut wide[..from.len()];
            A::widen(from, wide);
            B::narrow(wide, to);
        }
    }
}

impl<A: Number, B: Number> Op for Convert<'_, A, B> {
    #[inline(always)]
    fn go<S: Lanes>(self, _: S) {
        self.convert();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testkit::rng::Rng;

    #[test]
    fn numbers_become_the_nearest_bf16() {
        let mut rng = Rng::new(1);
        let special = [0, 0x7f7f_7fff, 0x7f7f_8000, 0x7f80_0000, 0x7f80_0001, 0x7fff_ffff, 1];
        let special = special.into_iter().flat_map(|bits: u32| [bits, bits | 1 << 31]);
        let ties = (0..=u16::MAX).map(|high| u32::from(high) << 16 | 0x8000);
        let any = std::iter::repeat_with(|| rng.bits() as u32).take(1 << 16);
        let ties = ties.flat_map(|bits| [bits - 1, bits, bits + 1]);
        let all: Vec<f32> = special.chain(ties).chain(any).map(f32::from_bits).collect();
        let [mut vectors, mut plain] = [(); 2].map(|()| vec![bf16::ZERO; all.len()]);
        convert(&all, &mut vectors);
        Convert(&all, &mut plain).convert();
        for (x, y) in all.iter().zip(vectors.iter().zip(plain)) {
            let wanted = bf16::from_f32(*x).to_bits();
            assert_eq!([y.0.to_bits(), y.1.to_bits()], [wanted; 2], "{:#x}", x.to_bits());
        }
    }
}
