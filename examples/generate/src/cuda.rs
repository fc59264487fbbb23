//! K and V on a GPU, the model on the host: q, k and v are narrowed to the pool's type and copied to the device, where
//! they are stored and attended to; the result is copied back.
//!
//! The copies cost far more than the attention, so this is for checking, not for speed: a host with its model on the
//! device hands over its own addresses instead.

use bytemuck::Pod;
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use kvarena::backend::cuda::{Cuda, CudaError, CudaOptions, DeviceBuffer, Gpu};
use kvarena::{Attend, Backend, BatchPlan, Dtype, LayerId};

use crate::memory::Memory;

/// Buffers on a GPU for one layer's rows.
pub struct CudaMemory {
    gpu: Gpu,
    dtype: Dtype,
    q: DeviceBuffer,
    k: DeviceBuffer,
    v: DeviceBuffer,
    out: DeviceBuffer,
    /// Rows of f32 narrowed to two bytes.
    narrow: Vec<u16>,
}

/// Takes the first GPU into use, for a pool of this type and steps of at most so many tokens.
///
/// # Errors
/// There is none that serves.
pub fn open(dtype: Dtype, max_step_tokens: u32) -> Result<(Cuda, CudaMemory), CudaError> {
    let gpu = Gpu::new(0)?;
    let empty = || DeviceBuffer::new(&gpu, 0);
    let (q, k, v, out) = (empty()?, empty()?, empty()?, empty()?);
    let cuda = Cuda::new(&gpu, CudaOptions { max_step_tokens, ..CudaOptions::default() });
    Ok((cuda, CudaMemory { gpu, dtype, q, k, v, out, narrow: Vec::new() }))
}

impl Memory for CudaMemory {
    type Backend = Cuda;

    fn layer(
        &mut self,
        backend: &mut Cuda,
        plan: &BatchPlan<'_>,
        layer: LayerId,
        attend: &Attend,
        [q, k, v]: [&[f32]; 3],
        out: &mut [f32],
    ) -> Result<(), CudaError> {
        let Self { gpu, dtype, narrow, .. } = self;
        send(gpu, *dtype, &mut self.q, q, narrow)?;
        send(gpu, *dtype, &mut self.k, k, narrow)?;
        send(gpu, *dtype, &mut self.v, v, narrow)?;
        grow(gpu, &mut self.out, size_of_val(out) as u64)?;
        backend.store_cache(plan, layer, self.k.rows(0, None), self.v.rows(0, None))?;
        let (q, rows) = (self.q.rows(0, None), self.out.rows_mut(0, None));
        backend.attend(plan, layer, attend, q, rows, None)?;
        match dtype {
            Dtype::F32 => out.copy_from_slice(&self.out.read::<f32>(0, out.len())?),
            Dtype::F16 => self.out.read::<f16>(0, out.len())?.convert_to_f32_slice(out),
            Dtype::Bf16 => self.out.read::<bf16>(0, out.len())?.convert_to_f32_slice(out),
        }
        Ok(())
    }
}

/// Copies rows to the device in the pool's type, and waits for it.
fn send(
    gpu: &Gpu,
    dtype: Dtype,
    buffer: &mut DeviceBuffer,
    rows: &[f32],
    narrow: &mut Vec<u16>,
) -> Result<(), CudaError> {
    narrow.resize(rows.len(), 0);
    match dtype {
        Dtype::F32 => return write(gpu, buffer, rows),
        Dtype::F16 => {
            bytemuck::cast_slice_mut::<u16, f16>(narrow).convert_from_f32_slice(rows);
        }
        Dtype::Bf16 => {
            bytemuck::cast_slice_mut::<u16, bf16>(narrow).convert_from_f32_slice(rows);
        }
    }
    write(gpu, buffer, narrow)
}

fn write<T: Pod>(gpu: &Gpu, buffer: &mut DeviceBuffer, items: &[T]) -> Result<(), CudaError> {
    grow(gpu, buffer, size_of_val(items) as u64)?;
    buffer.write(0, items)
}

/// Makes a buffer at least so large; what it held is lost.
fn grow(gpu: &Gpu, buffer: &mut DeviceBuffer, bytes: u64) -> Result<(), CudaError> {
    if buffer.bytes() < bytes {
        *buffer = DeviceBuffer::new(gpu, bytes.next_power_of_two())?;
    }
    Ok(())
}
