//! Launches `store_cache` into unquantised pools: selects one of three kernels, and the threads for each row.

use super::pool::Pool;
use crate::backend::Operand;
use crate::backend::cuda::check::store_stride;
use crate::backend::cuda::driver::gpu::Gpu;
use crate::backend::cuda::driver::launch::Start;
use crate::backend::cuda::driver::memory::DeviceRows;
use crate::backend::cuda::driver::raw::RawStream;
use crate::backend::cuda::error::CudaError;
use crate::backend::cuda::kernels::params::{StoreCacheParams, wide_magic};
use crate::backend::cuda::kernels::{Kernel, STORE_CACHE, STORE_CACHE_ANY, STORE_CACHE_STREAMING};
use crate::backend::cuda::moves::copy::unit_bytes;
use crate::backend::cuda::plan::image::Image;
use crate::id::LayerId;

/// Steps with these numbers of tokens use the kernel with streaming loads and stores, if units have 16 bytes and slot
/// numbers 4. Each thread loads four units of K and four of V before it stores them. These steps are large enough to
/// fill the device, and too small to replace the contents of L1 and L2 (measured on an H200 with rows of 2 KiB).
const STREAMING_TOKENS: std::ops::RangeInclusive<u32> = 513..=8192;

/// Returns the kernels that steps of up to `tokens` tokens may use. A store selects one by the tokens of the step, the
/// alignment of the host's rows and the bytes of a slot number.
pub fn kernels(pool: &Pool, tokens: u32) -> Vec<&'static Kernel> {
    let (_, run_bytes) = runs(pool);
    let mut kernels = vec![STORE_CACHE_ANY];
    if run_bytes.is_multiple_of(16) {
        kernels.extend((run_bytes / 16 <= 256).then_some(STORE_CACHE));
        kernels.extend((tokens >= *STREAMING_TOKENS.start()).then_some(STORE_CACHE_STREAMING));
    }
    kernels
}

/// Returns the number of runs of a token's row of K, and the bytes of each: contiguous bytes of a slot. A run is a row,
/// or a head if the heads of a slot are not contiguous. The kernels store two rows for each token; for latent rows
/// these are the two halves of one row.
fn runs(pool: &Pool) -> (u32, u64) {
    let (layout, head_stride) = (pool.layout(), pool.strides().head);
    let row_bytes = layout.store_widths()[0] as u64 * u64::from(layout.dtype().rows().size());
    let head_bytes = row_bytes / u64::from(layout.kv_heads());
    match layout.kv_heads() {
        _ if layout.is_latent() => (1, row_bytes / 2),
        heads if heads > 1 && head_stride != head_bytes => (heads, head_bytes),
        _ => (1, row_bytes),
    }
}

/// Stores the rows of the staged plan.
pub fn store(
    gpu: &Gpu,
    pool: &Pool,
    image: &Image,
    layer: LayerId,
    [k, v]: [DeviceRows<'_>; 2],
    stream: RawStream,
) -> Result<(), CudaError> {
    let (layout, tokens) = (pool.layout(), image.token_count);
    let ([width, v_width], dtype) = (layout.store_widths(), layout.dtype().rows());
    let k_stride = store_stride(Operand::K, &k, tokens, width, dtype)?;
    let mut v_stride = store_stride(Operand::V, &v, tokens, v_width, dtype)?;
    let ((runs, run_bytes), mut v_address) = (runs(pool), v.extent.address);
    let [k_pool, mut v_pool] = pool.origins(layer)?;
    if layout.is_latent() {
        (v_stride, v_address) = (k_stride, k.extent.address.saturating_add(run_bytes));
        v_pool += run_bytes;
    }
    let unit_bytes = unit_bytes(&[run_bytes, k_stride.into(), v_stride.into(), k.extent.address, v_address]);
    if unit_bytes < dtype.size().min(4) {
        return Err(CudaError::RowsAlignment { align: dtype.size() });
    }
    if tokens == 0 {
        return Ok(());
    }
    let (page_stride, slot_stride) = (pool.strides().page, pool.strides().slot);
    // If pages are contiguous, each slot can count as a page of one token.
    let linear = page_stride == slot_stride * u64::from(layout.page_size());
    let page_size = if linear { 1 } else { layout.page_size() };
    let params = StoreCacheParams {
        k: k.extent.address,
        v: v_address,
        slots: image.slots_of(layout.place(layer).track),
        k_pool,
        v_pool,
        page_stride: if linear { slot_stride } else { page_stride },
        k_stride,
        v_stride,
        tokens: tokens as u32,
        page_size,
        page_magic: wide_magic(page_size.into()),
        slot_stride: slot_stride as u32,
        slot_bytes: image.slot_bytes as u32,
        row_units: (run_bytes / u64::from(unit_bytes)) as u32,
        unit_bytes,
        run_bytes: run_bytes as u32,
        run_stride: pool.strides().head as u32,
    };
    let narrow = unit_bytes == 16 && params.slot_bytes == 4;
    let (kernel, x, threads) = match params.row_units {
        units if narrow && STREAMING_TOKENS.contains(&params.tokens) => {
            (STORE_CACHE_STREAMING, units.div_ceil(4).next_power_of_two().min(256), 512)
        }
        units if narrow && units <= 256 => (STORE_CACHE, units, 256),
        units => (STORE_CACHE_ANY, units.next_power_of_two().min(256), 256),
    };
    let y = threads / x;
    let grid = (params.tokens.div_ceil(y), runs);
    // SAFETY: slots are in the pool (checked when staged), rows are long enough (checked above).
    unsafe { gpu.launch(kernel, grid, (x, y), stream, &params, Start::Pdl) }
}
