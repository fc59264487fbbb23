//! Launches `rope_store`, which normalises and rotates q and k, and stores k and v in unquantised pools.

use super::pool::Pool;
use crate::backend::cuda::check::{check_vector, row_stride};
use crate::backend::cuda::driver::gpu::Gpu;
use crate::backend::cuda::driver::launch::Start;
use crate::backend::cuda::driver::memory::{DeviceRows, DeviceRowsMut};
use crate::backend::cuda::driver::raw::RawStream;
use crate::backend::cuda::error::CudaError;
use crate::backend::cuda::kernels::Kernel;
use crate::backend::cuda::kernels::params::RopeStoreParams;
use crate::backend::cuda::plan::image::Image;
use crate::backend::rope::check as check_rope;
use crate::backend::{Operand, Rope};
use crate::id::LayerId;

/// Number of heads that fill the device. With twice as many or more, a warp takes several heads and reuses the angles
/// of their token.
const FILLING_HEADS: usize = 16384;

/// Returns the kernel of a pool's rows.
pub fn kernel(pool: &Pool) -> Result<&'static Kernel, CudaError> {
    check_rope(pool.layout())?;
    pool.rotates().ok_or(CudaError::HeadDim { head_dim: pool.layout().head_dim() })
}

/// Rotates the rows of the staged plan, and stores k and v if the pool has the type of the rows. Returns the rows of k
/// and of v.
pub fn rotate<'a>(
    gpu: &Gpu,
    pool: &Pool,
    image: &Image,
    layer: LayerId,
    rope: &Rope<DeviceRows<'_>, DeviceRows<'_>>,
    qkv: DeviceRowsMut<'a>,
    stream: RawStream,
) -> Result<[DeviceRows<'a>; 2], CudaError> {
    let kernel = kernel(pool)?;
    let (layout, dtype, tokens) = (pool.layout(), pool.rows(), image.token_count);
    let (dim, size) = (layout.head_dim() as usize, u64::from(dtype.size()));
    let (q_heads, kv_heads) = (rope.q_heads as usize, layout.kv_heads() as usize);
    let width = (q_heads + 2 * kv_heads) * dim;
    let qkv_stride = row_stride(Operand::Qkv, &qkv.extent, tokens, width, dtype)?;
    let norms = [rope.q_norm, rope.k_norm];
    for norm in norms.iter().flatten() {
        row_stride(Operand::Norm, &norm.extent, 1, dim, dtype)?;
    }
    check_vector(Operand::Frequencies, &rope.frequencies, dim / 2)?;
    let [q_norm, k_norm] = norms.map(|norm| norm.map_or(0, |norm| norm.extent.address));
    let align = layout.head_dim() / 64 * dtype.size();
    let addresses = [qkv.extent.address, qkv_stride, q_norm, k_norm];
    if addresses.iter().any(|at| at % u64::from(align) != 0) {
        return Err(CudaError::RowsAlignment { align });
    }
    let part = |heads: usize| qkv.part((heads * dim) as u64 * size, qkv_stride / size);
    let parts = [part(q_heads), part(q_heads + kv_heads)];
    let [k_pool, v_pool] = if layout.dtype().is_quantised() { [0; 2] } else { pool.origins(layer)? };
    if tokens == 0 {
        return Ok(parts);
    }
    let heads = q_heads + if k_pool == 0 { kv_heads } else { 2 * kv_heads };
    let heads_each = (tokens * heads / FILLING_HEADS).clamp(1, heads);
    let params = RopeStoreParams {
        qkv: qkv.extent.address,
        positions: image.positions,
        slots: image.slots_of(layout.place(layer).track),
        q_norm,
        k_norm,
        frequencies: rope.frequencies.extent.address,
        k_pool,
        v_pool,
        page_stride: pool.strides().page,
        qkv_stride,
        slot_stride: pool.strides().slot as u32,
        slot_bytes: image.slot_bytes as u32,
        page_size: layout.page_size(),
        tokens: tokens as u32,
        q_heads: rope.q_heads,
        kv_heads: layout.kv_heads(),
        heads_each: heads_each as u32,
        eps: rope.eps,
        head_stride: pool.strides().head as u32,
        reserved: 0,
    };
    let warps = tokens * heads.div_ceil(heads_each);
    let grid = u32::try_from(warps.div_ceil(4)).expect("a grid of 32 bits");
    // SAFETY: slots are in the pool (checked when staged); rows, weights and frequencies are long enough (checked
    // above).
    unsafe { gpu.launch(kernel, (grid, 1), (kernel.threads(), 1), stream, &params, Start::Pdl) }?;
    Ok(parts)
}
