//! Attention as one of candle's custom operations: it stores K and V, then computes attention of
//! the queries.
//!
//! The operation borrows the tensors' memory. It allocates only the result, and no temporary copies.

use std::cell::{Cell, RefCell};

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp3, Layout, Shape, Storage, Tensor, WithDType};
use half::{bf16, f16};
use kvarena::backend::{CpuRows, CpuRowsMut, Either, Elements, Operand};
use kvarena::layout::PoolLayout;
use kvarena::{Attend, BatchPlan, LayerId};

use crate::operation::{Operation, elements, row_stride};
use crate::{Error, Pool};

/// Checks all shapes, stores k and v, and returns attention of q.
pub(crate) fn attend(
    pool: &mut Pool,
    layout: &PoolLayout,
    (plan, layer): (&BatchPlan<'_>, LayerId),
    parameters: &Attend,
    [q, k, v]: [&Tensor; 3],
    sinks: Option<&Tensor>,
) -> Result<Tensor, Error> {
    let (rows, dim) = (plan.token_count(), layout.head_dim() as usize);
    let kv_dims = [rows, layout.kv_heads() as usize, dim];
    check_rows(pool, Operand::Q, q, [rows, parameters.q_heads as usize, dim])?;
    check_rows(pool, Operand::K, k, kv_dims)?;
    check_rows(pool, Operand::V, v, kv_dims)?;
    if let Some(sinks) = sinks {
        check_device(pool, sinks)?;
        check_dims(Operand::Sinks, sinks, &[parameters.q_heads as usize])?;
        check_contiguous(Operand::Sinks, sinks, sinks.is_contiguous())?;
    }
    let (pool, failed) = (RefCell::new(pool), Cell::new(None));
    let op = Operation { pool, plan, layer, attend: parameters, sinks, failed };
    q.apply_op3_no_bwd(k, v, &op).map_err(|error| op.failed.take().unwrap_or(error.into()))
}

/// Checks that a tensor is on the pool's device and has the wanted shape and contiguous rows.
fn check_rows(pool: &Pool, operand: Operand, x: &Tensor, wanted: [usize; 3]) -> Result<(), Error> {
    check_device(pool, x)?;
    check_dims(operand, x, &wanted)?;
    let [_, heads, dim] = wanted;
    let strides = x.stride();
    check_contiguous(operand, x, strides[2] == 1 && (heads == 1 || strides[1] == dim))
}

fn check_device(pool: &Pool, x: &Tensor) -> Result<(), Error> {
    let is_same = match pool {
        Either::Left(_) => x.device().is_cpu(),
        #[cfg(feature = "cuda")]
        Either::Right(cuda) => crate::gpu::is_on(cuda, x.device()),
        #[cfg(not(feature = "cuda"))]
        Either::Right(_) => false,
    };
    if is_same { Ok(()) } else { Err(Error::Device { location: x.device().location() }) }
}

fn check_dims(operand: Operand, x: &Tensor, wanted: &[usize]) -> Result<(), Error> {
    if x.dims() == wanted {
        return Ok(());
    }
    Err(Error::Shape { operand, actual: x.dims().to_vec(), wanted: wanted.to_vec() })
}

fn check_contiguous(operand: Operand, x: &Tensor, is_contiguous: bool) -> Result<(), Error> {
    if is_contiguous { Ok(()) } else { Err(Error::Strides { operand, strides: x.stride().to_vec() }) }
}

impl Operation<'_> {
    fn on_cpu(&self, [q, k, v]: [(&CpuStorage, &Layout); 3]) -> Result<CpuStorage, Error> {
        let rows = [cpu_rows(Operand::Q, q)?, cpu_rows(Operand::K, k)?, cpu_rows(Operand::V, v)?];
        match q.0 {
            CpuStorage::F32(_) => self.on_cpu_of::<f32>(rows, q.1),
            CpuStorage::F16(_) => self.on_cpu_of::<f16>(rows, q.1),
            _ => self.on_cpu_of::<bf16>(rows, q.1),
        }
    }

    fn on_cpu_of<T>(&self, rows: [CpuRows<'_>; 3], q: &Layout) -> Result<CpuStorage, Error>
    where
        T: WithDType,
        for<'a> CpuRowsMut<'a>: From<&'a mut [T]>,
    {
        let mut out = vec![T::zero(); q.shape().elem_count()];
        let to = Either::Left(CpuRowsMut::from(&mut out[..]));
        let held = self.sinks.map(Tensor::storage_and_layout);
        let sinks = held.as_ref().map(|(storage, layout)| cpu_sinks(storage, layout)).transpose()?;
        self.run(rows.map(Either::Left), sinks.map(Either::Left), to)?;
        Ok(T::to_cpu_storage_owned(out))
    }
}

/// Returns the rows in the memory of a tensor.
fn cpu_rows<'a>(operand: Operand, (x, at): (&'a CpuStorage, &Layout)) -> Result<CpuRows<'a>, Error> {
    let range = elements(at);
    let elements = match x {
        CpuStorage::F32(x) => Elements::F32(&x[range]),
        CpuStorage::F16(x) => Elements::F16(&x[range]),
        CpuStorage::BF16(x) => Elements::Bf16(&x[range]),
        other => return Err(Error::Dtype { operand, dtype: other.dtype() }),
    };
    Ok(CpuRows { elements, stride: row_stride(at) })
}

fn cpu_sinks<'a>(storage: &'a Storage, at: &Layout) -> Result<&'a [f32], Error> {
    let range = at.start_offset()..at.start_offset() + at.shape().elem_count();
    match storage {
        Storage::Cpu(CpuStorage::F32(sinks)) => Ok(&sinks[range]),
        other => Err(Error::Dtype { operand: Operand::Sinks, dtype: other.dtype() }),
    }
}

impl CustomOp3 for Operation<'_> {
    fn name(&self) -> &'static str {
        "kvarena-attend"
    }

    fn cpu_fwd(
        &self,
        q: &CpuStorage,
        q_at: &Layout,
        k: &CpuStorage,
        k_at: &Layout,
        v: &CpuStorage,
        v_at: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        let out = self.on_cpu([(q, q_at), (k, k_at), (v, v_at)]).map_err(|error| self.fail(error))?;
        Ok((out, self.shape(q_at)))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        q: &candle_core::CudaStorage,
        q_at: &Layout,
        k: &candle_core::CudaStorage,
        k_at: &Layout,
        v: &candle_core::CudaStorage,
        v_at: &Layout,
    ) -> candle_core::Result<(candle_core::CudaStorage, Shape)> {
        let qkv = [(q, q_at), (k, k_at), (v, v_at)];
        let out = crate::gpu::run(self, qkv).map_err(|error| self.fail(error))?;
        Ok((out, self.shape(q_at)))
    }
}
