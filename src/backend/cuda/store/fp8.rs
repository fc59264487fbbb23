//! Launches the kernels that store K and V in quantised pools. The kernels convert rows to bytes. With scales by token,
//! they also compute the scales.

use super::pool::Pool;
use crate::backend::Operand;
use crate::backend::cuda::check::store_stride;
use crate::backend::cuda::driver::gpu::Gpu;
use crate::backend::cuda::driver::launch::Start;
use crate::backend::cuda::driver::memory::DeviceRows;
use crate::backend::cuda::driver::raw::RawStream;
use crate::backend::cuda::error::CudaError;
use crate::backend::cuda::kernels::params::{
    LayerScales, ROWS_BF16, ROWS_F16, ROWS_F32, StoreFp8Params, StoreLatentFp8Params, wide_magic,
};
use crate::backend::cuda::kernels::{Kernel, STORE_CACHE_FP8, STORE_CACHE_FP8_ANY, STORE_LATENT_FP8};
use crate::backend::cuda::plan::image::Image;
use crate::id::LayerId;
use crate::layout::{Dtype, PoolLayout};

const THREADS: u32 = 256;
/// Number of elements that a thread of the fast kernels stores, and the maximum number of threads for a head.
const UNIT: u32 = 16;
const HEAD_UNITS_MAX: u32 = 16;

/// Returns all kernels that a store may use. A store selects one by the alignment of the host's rows and the bytes of a
/// slot number.
pub fn kernels(layout: &PoolLayout, rows: Dtype) -> Vec<&'static Kernel> {
    if layout.is_latent() {
        return vec![STORE_LATENT_FP8];
    }
    let mut kernels = vec![STORE_CACHE_FP8_ANY];
    kernels.extend(has_fast(layout, rows).then_some(STORE_CACHE_FP8));
    kernels
}

/// Returns whether a fast kernel supports aligned rows of this type. The kernel reduces over the threads of a head.
fn has_fast(layout: &PoolLayout, rows: Dtype) -> bool {
    let (units, head_units) = (layout.store_widths()[0] as u32 / UNIT, layout.value_dim() / UNIT);
    let is_reduced = head_units.is_power_of_two() && head_units <= HEAD_UNITS_MAX;
    rows != Dtype::F32 && layout.value_dim().is_multiple_of(UNIT) && is_reduced && units <= THREADS
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
    let (layout, tokens, dtype) = (pool.layout(), image.token_count, pool.rows());
    // For latent rows, these describe the quantised part.
    let (kv_heads, head_dim) = (layout.kv_heads(), layout.value_dim());
    let [width, v_width] = layout.store_widths();
    let k_stride = store_stride(Operand::K, &k, tokens, width, dtype)?;
    let v_stride = store_stride(Operand::V, &v, tokens, v_width, dtype)?;
    let multiples = [u64::from(k_stride), k.extent.address, u64::from(v_stride), v.extent.address];
    let multiples = if layout.is_latent() { &multiples[..2] } else { &multiples };
    let aligned = |bytes: u64| multiples.iter().all(|n| n.is_multiple_of(bytes));
    if !aligned(dtype.size().into()) {
        return Err(CudaError::RowsAlignment { align: dtype.size() });
    }
    let [k_pool, v_pool] = pool.origins(layer)?;
    if tokens == 0 {
        return Ok(());
    }
    let LayerScales { k: k_scales, v: v_scales, page_stride, head_stride, by_token } = pool.scales(layer);
    let params = StoreFp8Params {
        k: k.extent.address,
        v: v.extent.address,
        slots: image.slots_of(layout.place(layer).track),
        k_pool,
        v_pool,
        k_scales,
        v_scales,
        page_stride: pool.strides().page,
        scale_page_stride: page_stride,
        page_magic: wide_magic(layout.page_size().into()),
        k_stride,
        v_stride,
        tokens: tokens as u32,
        page_size: layout.page_size(),
        slot_stride: pool.strides().slot as u32,
        scale_head_stride: head_stride,
        slot_bytes: image.slot_bytes as u32,
        kv_heads,
        head_dim,
        rows: match dtype {
            Dtype::F32 => ROWS_F32,
            Dtype::F16 => ROWS_F16,
            Dtype::Bf16 => ROWS_BF16,
        },
        by_token,
        head_stride: pool.strides().head as u32,
    };
    if let Some(rope) = pool.rope(layer) {
        let params = StoreLatentFp8Params { store: params, rope };
        // A warp for each token.
        let (grid, block) = ((params.store.tokens.div_ceil(8), 1), (THREADS, 1));
        // SAFETY: slots are in the pool (checked when staged), rows are long enough (checked above), planes belong to
        // the pool.
        return unsafe { gpu.launch(STORE_LATENT_FP8, grid, block, stream, &params, Start::Pdl) };
    }
    let units = width as u32 / UNIT;
    let fast = has_fast(layout, dtype) && aligned(16) && params.slot_bytes == 4;
    let (kernel, grid, block) = if fast {
        let y = THREADS / units;
        (STORE_CACHE_FP8, params.tokens.div_ceil(y), (units, y))
    } else {
        // A warp for each head.
        let warps = u64::from(params.tokens) * u64::from(kv_heads);
        let grid = u32::try_from(warps.div_ceil(8)).expect("a grid of 32 bits");
        (STORE_CACHE_FP8_ANY, grid, (THREADS, 1))
    };
    // SAFETY: slots are in the pool (checked when staged), rows are long enough (checked above), scales belong to the
    // pool.
    unsafe { gpu.launch(kernel, (grid, 1), block, stream, &params, Start::Pdl) }
}
