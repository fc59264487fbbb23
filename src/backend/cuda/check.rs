//! Checks that the host's rows and attention fit the kernels. `backend/check.rs` has the checks of every backend.

use super::error::{CudaError, Limit};
use crate::backend::cuda::attention::latent::LATENT_HEADS_MAX;
use crate::backend::cuda::driver::memory::{DeviceRows, DeviceRowsMut, Element, Extent};
use crate::backend::cuda::kernels::params::KV_HEADS_MAX;
use crate::backend::cuda::kernels::{GROUP_MAX, HEAD_DIMS};
use crate::backend::cuda::store::pool::Pool;
use crate::backend::{Attend, Operand, PlanError, check, sparse};
use crate::layout::{Dtype, PoolLayout};

/// Returns the stride in bytes of rows of `width` elements, if they fit.
pub(super) fn row_stride(
    operand: Operand,
    rows: &Extent,
    tokens: usize,
    width: usize,
    dtype: Dtype,
) -> Result<u64, CudaError> {
    check_element(operand, rows, Element::Number(dtype))?;
    let size = u64::from(dtype.size());
    let len = (rows.bytes / size) as usize;
    let stride = check::row_stride(operand, len, rows.stride, tokens, width)?;
    // A stride beyond 64 bits exceeds any memory, so there is at most one row. The stride is then unused.
    Ok((stride as u64).saturating_mul(size))
}

/// Rejects elements of another type than `wanted`. Bytes of a buffer match every type.
fn check_element(operand: Operand, rows: &Extent, wanted: Element) -> Result<(), CudaError> {
    let number = |element| match element {
        Element::Number(dtype) => Some(dtype),
        Element::Bytes | Element::Position => None,
    };
    match rows.element {
        Element::Bytes => Ok(()),
        actual if actual == wanted => Ok(()),
        actual => Err(CudaError::Element { operand, actual: number(actual), wanted: number(wanted) }),
    }
}

/// Returns the stride in bytes of rows to store, in 32 bits as kernels need it.
pub(super) fn store_stride(
    operand: Operand,
    rows: &DeviceRows<'_>,
    tokens: usize,
    width: usize,
    dtype: Dtype,
) -> Result<u32, CudaError> {
    let stride = row_stride(operand, &rows.extent, tokens, width, dtype)?;
    Limit::RowStride.check(stride, u32::MAX.into())?;
    Ok(stride as u32)
}

/// Returns the strides in bytes of q and of the output, if both and the log-sum-exp fit.
pub(super) fn attend_strides(
    attend: &Attend,
    pool: &Pool,
    tokens: usize,
    q: &DeviceRows<'_>,
    out: &DeviceRowsMut<'_>,
    lse: Option<&DeviceRowsMut<'_>>,
) -> Result<(u64, u64), CudaError> {
    let (heads, dtype) = (attend.q_heads as usize, pool.rows());
    let q_width = heads * pool.layout().head_dim() as usize;
    let width = heads * pool.layout().value_dim() as usize;
    let (q, out) = (&q.extent, &out.extent);
    let q_stride = row_stride(Operand::Q, q, tokens, q_width, dtype)?;
    let out_stride = row_stride(Operand::Out, out, tokens, width, dtype)?;
    let align = if dtype == Dtype::F32 { 4 } else { 16 };
    if [q.address, out.address, q_stride, out_stride].iter().any(|x| x % align != 0) {
        return Err(CudaError::RowsAlignment { align: align as u32 });
    }
    if let Some(lse) = lse {
        check_packed(Operand::Lse, &lse.extent, tokens, heads, Element::Number(Dtype::F32))?;
    }
    Ok((q_stride, out_stride))
}

/// Rejects sinks or frequencies that are not f32, not packed, not exactly `count` or not aligned.
pub(super) fn check_vector(operand: Operand, vector: &DeviceRows<'_>, count: usize) -> Result<(), CudaError> {
    check_packed(operand, &vector.extent, 1, count, Element::Number(Dtype::F32))?;
    Ok(check::length(operand, (vector.extent.bytes / 4) as usize, count)?)
}

/// Rejects rows of words that are of another type than `element`, not packed, too few or not aligned.
pub(super) fn check_packed(
    operand: Operand,
    words: &Extent,
    rows: usize,
    width: usize,
    element: Element,
) -> Result<(), CudaError> {
    check_element(operand, words, element)?;
    check::row_stride(operand, (words.bytes / 4) as usize, words.stride, rows, width)?;
    if let Some(stride) = words.stride.filter(|&stride| stride != width) {
        return Err(PlanError::Stride { operand, stride, width }.into());
    }
    if words.address.is_multiple_of(4) { Ok(()) } else { Err(CudaError::RowsAlignment { align: 4 }) }
}

/// Rejects lists that are empty or longer than a sequence, and pools that attention over lists does not support.
pub(super) fn check_pool(top: u32, layout: &PoolLayout, longest_row: u64) -> Result<(), CudaError> {
    sparse::check_top(top, longest_row)?;
    let dtype = layout.dtype();
    let served = !layout.is_latent() && !dtype.is_quantised() && dtype.size() == 2;
    // In a list, slot number `u32::MAX` marks an empty place, so no slot may have it.
    let counted = layout.slot_count() < u64::from(u32::MAX);
    if served && counted { Ok(()) } else { Err(CudaError::Lists { dtype }) }
}

/// Checks that the kernels support this attention, and returns it with the window that kernels take. A window of at
/// least `longest_row` tokens becomes `None`, so that kernels can add windows to positions without overflow.
pub(super) fn check_attend(attend: &Attend, pool: &Pool, longest_row: u64) -> Result<Attend, CudaError> {
    served(attend, pool.layout(), pool.rows(), longest_row)
}

/// Performs [`check_attend`] for a pool's layout and type of rows.
fn served(attend: &Attend, layout: &PoolLayout, rows: Dtype, longest_row: u64) -> Result<Attend, CudaError> {
    check::attend(attend, layout)?;
    if attend.first > 0 {
        return Err(PlanError::First { first: attend.first }.into());
    }
    let (q_heads, kv_heads, head_dim) = (attend.q_heads, layout.kv_heads(), layout.head_dim());
    let most = if layout.is_latent() { LATENT_HEADS_MAX } else { GROUP_MAX };
    if q_heads / kv_heads > most {
        return Err(CudaError::Heads { q_heads, kv_heads });
    }
    if rows != Dtype::F32 {
        Limit::KvHeads.check(kv_heads.into(), KV_HEADS_MAX.into())?;
    }
    let served = match rows {
        _ if layout.is_latent() => true,
        Dtype::F32 => head_dim % 32 == 0 && head_dim <= 256,
        Dtype::F16 | Dtype::Bf16 => HEAD_DIMS.contains(&head_dim),
    };
    if !served {
        return Err(CudaError::HeadDim { head_dim });
    }
    if attend.scale == 0.0 {
        return Err(CudaError::ZeroScale);
    }
    Ok(Attend { window: attend.window.filter(|&window| u64::from(window) < longest_row), ..*attend })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::{Capacity, KvDtype, KvShape, PoolConfig};

    fn check_attend(attend: &Attend, layout: &PoolLayout, longest_row: u64) -> Result<Attend, CudaError> {
        served(attend, layout, layout.dtype().rows(), longest_row)
    }

    /// Bytes of a buffer.
    fn extent(address: u64, stride: Option<usize>, bytes: u64) -> Extent {
        Extent { address, stride, bytes, element: Element::Bytes }
    }

    #[test]
    fn rows_are_measured_in_bytes() {
        let rows = |stride, bytes| row_stride(Operand::Q, &extent(4096, stride, bytes), 3, 8, Dtype::F16);
        let length = PlanError::Length { operand: Operand::Q, actual: 27, wanted: 28 };
        assert_eq!(rows(None, 48), Ok(16));
        assert_eq!(rows(Some(10), 56), Ok(20));
        assert_eq!(rows(Some(10), 55), Err(length.into()));
        // Two strides of 2^62 f16 elements are 2^64 bytes, as is one stride of 2^63 elements. Both would wrap to 0.
        for stride in [1 << 62, 1 << 63, usize::MAX] {
            assert!(rows(Some(stride), 1 << 40).is_err());
        }
        let one = row_stride(Operand::Q, &extent(4096, Some(1 << 63), 16), 1, 8, Dtype::F16);
        assert_eq!(one, Ok(u64::MAX));
    }

    #[test]
    fn raw_rows_are_checked_for_type_and_length() {
        // SAFETY: nothing is launched.
        let rows = |dtype, len| unsafe { DeviceRows::from_raw(4096, dtype, len, None) };
        let check = |rows: DeviceRows<'_>| row_stride(Operand::K, &rows.extent, 3, 8, Dtype::F16);
        assert_eq!(check(rows(Dtype::F16, 24)), Ok(16));
        let length = PlanError::Length { operand: Operand::K, actual: 23, wanted: 24 };
        assert_eq!(check(rows(Dtype::F16, 23)), Err(length.into()));
        let wanted = Some(Dtype::F16);
        let element = |actual| Err(CudaError::Element { operand: Operand::K, actual, wanted });
        for dtype in [Dtype::F32, Dtype::Bf16] {
            assert_eq!(check(rows(dtype, 24)), element(Some(dtype)));
        }
        // The length in bytes saturates.
        assert_eq!(check(rows(Dtype::F16, usize::MAX)), Ok(16));
        // SAFETY: nothing is launched.
        let lists = unsafe { DeviceRows::positions_from_raw(4096, 24) };
        assert_eq!(check(lists), element(None));
        let selection = |rows: DeviceRows<'_>| check_packed(Operand::Selection, &rows.extent, 3, 8, Element::Position);
        assert_eq!(selection(lists), Ok(()));
        let (operand, actual) = (Operand::Selection, Some(Dtype::F32));
        let floats = Err(CudaError::Element { operand, actual, wanted: None });
        assert_eq!(selection(rows(Dtype::F32, 24)), floats);
    }

    #[test]
    fn sums_and_lists_are_packed_and_aligned() {
        let packed = |operand, extent| check_packed(operand, &extent, 3, 8, Element::Number(Dtype::F32));
        let sums = |address, stride| packed(Operand::Lse, extent(address, stride, 96));
        assert_eq!(sums(4096, None), Ok(()));
        assert_eq!(sums(4096, Some(8)), Ok(()));
        let wide = packed(Operand::Lse, extent(4096, Some(9), 1 << 20));
        let stride = PlanError::Stride { operand: Operand::Lse, stride: 9, width: 8 };
        assert_eq!(wide, Err(stride.into()));
        assert_eq!(sums(4098, None), Err(CudaError::RowsAlignment { align: 4 }));
        let operand = Operand::Selection;
        let short = PlanError::Length { operand, actual: 23, wanted: 24 };
        assert_eq!(packed(operand, extent(4096, None, 95)), Err(short.into()));
    }

    #[test]
    fn vectors_have_one_length_and_are_aligned() {
        let operand = Operand::Sinks;
        // SAFETY: nothing is launched.
        let vector = |address, len| unsafe { DeviceRows::from_raw(address, Dtype::F32, len, None) };
        let check = |address, len| check_vector(operand, &vector(address, len), 8);
        assert_eq!(check(4096, 8), Ok(()));
        for actual in [7, 9] {
            let length = PlanError::Length { operand, actual, wanted: 8 };
            assert_eq!(check(4096, actual), Err(length.into()));
        }
        assert_eq!(check(4098, 8), Err(CudaError::RowsAlignment { align: 4 }));
    }

    #[test]
    fn attention_is_checked_and_far_windows_are_none() {
        let capacity = Capacity::Pages(4);
        let config = PoolConfig { shape: KvShape::heads(2, 64), capacity, ..PoolConfig::default() };
        let layout = config.layout().expect("a small pool");
        let plain = Attend::new(8, 64);
        let window = |window| {
            let attend = Attend { window: Some(window), ..plain };
            check_attend(&attend, &layout, 100).map(|attend| attend.window)
        };
        assert_eq!(window(1), Ok(Some(1)));
        assert_eq!(window(99), Ok(Some(99)));
        // Kernels add windows to positions, and the last two windows would wrap.
        for none in [100, u32::MAX - 1, u32::MAX] {
            assert_eq!(window(none), Ok(None), "{none}");
        }
        assert_eq!(window(0), Err(PlanError::EmptyWindow.into()));
        for cap in [0.0, -1.0, f32::NAN, f32::INFINITY] {
            let attend = Attend { soft_cap: Some(cap), ..plain };
            let refused = check_attend(&attend, &layout, 100);
            assert!(matches!(refused, Err(CudaError::Plan(PlanError::SoftCap { .. }))), "{cap}");
        }
        for scale in [f32::NAN, f32::INFINITY] {
            let refused = check_attend(&Attend { scale, ..plain }, &layout, 100);
            assert!(matches!(refused, Err(CudaError::Plan(PlanError::Scale { .. }))), "{scale}");
        }
        let zero = check_attend(&Attend { scale: 0.0, ..plain }, &layout, 100);
        assert_eq!(zero, Err(CudaError::ZeroScale));
        let heads = PlanError::Heads { q_heads: 7, kv_heads: 2 };
        assert_eq!(check_attend(&Attend::new(7, 64), &layout, 100), Err(heads.into()));
        for (kv_heads, served) in [(KV_HEADS_MAX, true), (KV_HEADS_MAX + 1, false)] {
            let (shape, dtype) = (KvShape::heads(kv_heads, 64), KvDtype::Bf16);
            let config = PoolConfig { shape, dtype, ..config };
            let wide = config.layout().expect("a small pool");
            let (what, value, max) = (Limit::KvHeads, kv_heads.into(), KV_HEADS_MAX.into());
            let heads = CudaError::Limit { what, value, max };
            let answer = check_attend(&Attend::new(kv_heads, 64), &wide, 100).map(|_| ());
            assert_eq!(answer, if served { Ok(()) } else { Err(heads) });
        }
    }
}
