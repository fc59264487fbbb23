//! Passes candle's stream and GPU memory to the backend of kvarena.

use std::sync::Arc;

use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::CudaDType;
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, DevicePtr, DevicePtrMut};
use candle_core::{CudaDevice, CudaStorage, DType, Device, Layout, Storage, Tensor};
use half::{bf16, f16};
use kvarena::KvDtype;
use kvarena::backend::cuda::{Cuda, CudaOptions, CudaStream, DeviceRegion, DeviceRows, DeviceRowsMut, GivenPool, Gpu};
use kvarena::backend::{Either, Operand};
use kvarena::layout::{Dtype, PoolLayout};

use crate::Error;
use crate::operation::{Operation, elements, row_stride};

/// Returns options for a backend on candle's stream. The backend keeps the stream alive.
pub(crate) fn options(device: &CudaDevice) -> Result<CudaOptions, Error> {
    let stream = device.cuda_stream();
    let gpu = Gpu::new(stream.context().ordinal() as u32)?;
    let raw = stream.cu_stream() as usize as u64;
    // SAFETY: candle's context is the device's primary one, and the stream lives as long as its `Arc`.
    let stream = unsafe { CudaStream::from_raw(&gpu, raw, stream) }?;
    Ok(CudaOptions { stream: Some(stream), ..CudaOptions::new(&gpu) })
}

/// Describes tensors of K and V of each layer as a pool.
pub(crate) fn given(
    gpu: &Gpu,
    device: &Device,
    layout: &PoolLayout,
    layers: &[[Tensor; 2]],
) -> Result<GivenPool, Error> {
    let regions = layers
        .iter()
        .map(|[k, v]| Ok([region(gpu, device, layout, Operand::K, k)?, region(gpu, device, layout, Operand::V, v)?]));
    Ok(GivenPool::nhd(layout, regions.collect::<Result<_, Error>>()?))
}

/// Describes the memory of one tensor, which the region keeps alive.
fn region(
    gpu: &Gpu,
    device: &Device,
    layout: &PoolLayout,
    operand: Operand,
    tensor: &Tensor,
) -> Result<DeviceRegion, Error> {
    let (pages, slots) = (layout.page_count() as usize, layout.page_size() as usize);
    let wanted = vec![pages, slots, layout.kv_heads() as usize, layout.head_dim() as usize];
    if tensor.dims() != wanted {
        return Err(Error::Shape { operand, actual: tensor.dims().to_vec(), wanted });
    }
    if !tensor.is_contiguous() {
        return Err(Error::Strides { operand, strides: tensor.stride().to_vec() });
    }
    let stream_of = |device: &Device| match device {
        Device::Cuda(device) => Some(device.cuda_stream().cu_stream() as usize),
        _ => None,
    };
    if stream_of(tensor.device()) != stream_of(device) {
        return Err(Error::Device { location: tensor.device().location() });
    }
    let (storage, at) = tensor.storage_and_layout();
    let Storage::Cuda(storage) = &*storage else { return Err(Error::Device { location: device.location() }) };
    let wrong = Error::Dtype { operand, dtype: tensor.dtype() };
    let address = match (layout.dtype(), tensor.dtype()) {
        (KvDtype::F32, DType::F32) => address::<f32>(operand, storage)?,
        (KvDtype::F16, DType::F16) => address::<f16>(operand, storage)?,
        (KvDtype::Bf16, DType::BF16) => address::<bf16>(operand, storage)?,
        (KvDtype::Fp8E4M3, DType::U8) => address::<u8>(operand, storage)?,
        _ => return Err(wrong),
    };
    let size = u64::from(layout.dtype().size());
    let (first, bytes) = (address + at.start_offset() as u64 * size, tensor.elem_count() as u64 * size);
    // SAFETY: the tensor keeps the memory allocated. Its stream, which is the backend's, orders the uses of candle.
    Ok(unsafe { DeviceRegion::from_raw(gpu, first, bytes, Arc::new(tensor.clone())) }?)
}

fn address<T: CudaDType + candle_core::cuda_backend::cudarc::driver::DeviceRepr>(
    operand: Operand,
    storage: &CudaStorage,
) -> Result<u64, Error> {
    Ok(slice::<T>(operand, storage)?.device_ptr(&storage.device().cuda_stream()).0)
}

/// Returns whether the backend's stream orders all work on tensors of this device.
pub(crate) fn is_on(cuda: &Cuda, device: &Device) -> bool {
    let Device::Cuda(device) = device else { return false };
    device.cuda_stream().cu_stream() as usize as u64 == cuda.stream().raw()
        && device.cuda_stream().context().ordinal() as u32 == cuda.gpu().ordinal()
}

/// Computes attention on the GPU, into memory that candle allocates.
pub(crate) fn run(op: &Operation<'_>, qkv: [(&CudaStorage, &Layout); 3]) -> Result<CudaStorage, Error> {
    match qkv[0].0.dtype() {
        DType::F32 => run_of::<f32>(op, qkv, Dtype::F32),
        DType::F16 => run_of::<f16>(op, qkv, Dtype::F16),
        DType::BF16 => run_of::<bf16>(op, qkv, Dtype::Bf16),
        dtype => Err(Error::Dtype { operand: Operand::Q, dtype }),
    }
}

fn run_of<T: CudaDType + candle_core::cuda_backend::cudarc::driver::DeviceRepr>(
    op: &Operation<'_>,
    [q, k, v]: [(&CudaStorage, &Layout); 3],
    dtype: Dtype,
) -> Result<CudaStorage, Error> {
    let device = q.0.device().clone();
    let stream = device.cuda_stream();
    let len = q.1.shape().elem_count();
    // SAFETY: the backend writes every element of the result.
    let mut out: CudaSlice<T> = unsafe { device.alloc(len) }?;
    // When the guards are dropped, after the launches, they record the use of the memory.
    let (k_slice, v_slice) = (slice::<T>(Operand::K, k.0)?, slice::<T>(Operand::V, v.0)?);
    let (q_at, _q) = slice::<T>(Operand::Q, q.0)?.device_ptr(&stream);
    let (k_at, _k) = k_slice.device_ptr(&stream);
    let (v_at, _v) = v_slice.device_ptr(&stream);
    let held = op.sinks.map(Tensor::storage_and_layout);
    let sinks = held.as_ref().map(|(storage, layout)| sinks_of(storage, layout)).transpose()?;
    let sinks_at = sinks.as_ref().map(|(slice, from)| (slice.device_ptr(&stream), *from));
    let (to, written) = out.device_ptr_mut(&stream);
    let size = size_of::<T>() as u64;
    let rows = |at: u64, layout: &Layout| {
        let range = elements(layout);
        let (first, stride) = (at + range.start as u64 * size, row_stride(layout));
        // SAFETY: the tensor's memory outlives the launches, because its stream orders them before any reuse.
        unsafe { DeviceRows::from_raw(first, dtype, range.len(), stride) }
    };
    let qkv = [rows(q_at, q.1), rows(k_at, k.1), rows(v_at, v.1)];
    let sinks = sinks_at.as_ref().map(|((at, _guard), from)| {
        // SAFETY: the stream also orders the launches before any reuse of the sinks' memory.
        Either::Right(unsafe {
            DeviceRows::from_raw(at + 4 * *from as u64, Dtype::F32, op.attend.q_heads as usize, None)
        })
    });
    // SAFETY: the same holds for `out`, and nothing else accesses it.
    let to = unsafe { DeviceRowsMut::from_raw(to, dtype, len, None) };
    op.run(qkv.map(Either::Right), sinks, Either::Right(to))?;
    drop(written);
    Ok(CudaStorage::wrap_cuda_slice(out, device))
}

fn slice<T: CudaDType>(operand: Operand, x: &CudaStorage) -> Result<&CudaSlice<T>, Error> {
    x.as_cuda_slice::<T>().map_err(|_| Error::Dtype { operand, dtype: x.dtype() })
}

/// Returns sinks in f32, and the index of their first element.
fn sinks_of<'a>(storage: &'a Storage, at: &Layout) -> Result<(&'a CudaSlice<f32>, usize), Error> {
    match storage {
        Storage::Cuda(storage) => Ok((slice(Operand::Sinks, storage)?, at.start_offset())),
        other => Err(Error::Dtype { operand: Operand::Sinks, dtype: other.dtype() }),
    }
}
