//! The element types, and conversion between them a slice at a time.

use std::any::TypeId;

use bytemuck::Pod;
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

/// An element type of pools and rows.
pub(super) trait Number: Pod + Send + Sync {
    /// Whether numbers of a pool are multiples of a scale.
    const QUANTISED: bool = false;

    /// Exactly.
    fn widen(source: &[Self], target: &mut [f32]);
    /// To nearest, ties to even.
    fn narrow(source: &[f32], target: &mut [Self]);
}

impl Number for f32 {
    fn widen(source: &[Self], target: &mut [f32]) {
        target.copy_from_slice(source);
    }

    fn narrow(source: &[f32], target: &mut [Self]) {
        target.copy_from_slice(source);
    }
}

impl Number for f16 {
    fn widen(source: &[Self], target: &mut [f32]) {
        source.convert_to_f32_slice(target);
    }

    fn narrow(source: &[f32], target: &mut [Self]) {
        target.convert_from_f32_slice(source);
    }
}

impl Number for bf16 {
    // `half` turns signalling NaNs quiet here, which keeps its loop from being vectorised.
    fn widen(source: &[Self], target: &mut [f32]) {
        assert_eq!(source.len(), target.len());
        for (x, y) in source.iter().zip(target) {
            *y = f32::from_bits(u32::from(x.to_bits()) << 16);
        }
    }

    fn narrow(source: &[f32], target: &mut [Self]) {
        target.convert_from_f32_slice(source);
    }
}

/// Converts by way of f32, which holds every value of the others. The same type is copied bit by bit.
pub(super) fn convert<A: Number, B: Number>(source: &[A], target: &mut [B]) {
    if TypeId::of::<A>() == TypeId::of::<B>() {
        target.copy_from_slice(bytemuck::cast_slice(source));
        return;
    }
    assert_eq!(source.len(), target.len());
    let mut wide = [0.0; 64];
    for (from, to) in source.chunks(wide.len()).zip(target.chunks_mut(wide.len())) {
        let wide = &mut wide[..from.len()];
        A::widen(from, wide);
        B::narrow(wide, to);
    }
}
