//! One tensor of a model: its address, and the elements that a rank stores of it.

use std::ops::Range;
use std::ptr::{null, null_mut};

use cudarc::driver::sys;
use half::bf16;
use kvarena::backend::cuda::DeviceBuffer;

use super::share::Share;
use crate::error::Result;
use crate::gpu::device::Device;
use crate::gpu::error::{GpuError, GpuResult, driver};
use crate::source::Source;

/// Part of a tensor that a rank stores.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Cut {
    Whole,
    /// A part of the rows.
    Rows,
    /// A part of each row.
    Cols,
}

/// The elements that the device stores of a tensor.
pub(super) enum Form {
    /// All, in bf16.
    All,
    /// The rows with these numbers, in bf16.
    Rows(Vec<usize>),
    /// A function of each of these elements of a vector, in f32.
    Wide(fn(f32) -> f32, Range<usize>),
}

/// A tensor and its address.
pub(super) struct NamedTensor {
    pub name: String,
    /// Shape of the whole tensor.
    pub shape: Vec<usize>,
    /// The tensor as a matrix of rows and columns, which the cut divides.
    pub view: [usize; 2],
    pub cut: Cut,
    pub at: u64,
    /// Number that is added to each element.
    pub offset: f32,
    pub form: Form,
}

impl NamedTensor {
    pub fn elements(&self) -> usize {
        match &self.form {
            Form::Rows(rows) => rows.len() * self.view[1],
            Form::Wide(_, range) => range.len(),
            Form::All => self.shape.iter().product(),
        }
    }

    /// Reads the tensor from `source` and writes it to `memory`.
    pub fn copy(&self, source: &mut dyn Source, memory: &mut DeviceBuffer, at: u64) -> Result<()> {
        let numbers = source.numbers(&self.name, &self.shape)?;
        if let Form::Wide(f, range) = &self.form {
            let wide: Vec<f32> = numbers.to_f32()[range.clone()].iter().map(|&x| f(x)).collect();
            return Ok(memory.write(at, &wide).map_err(GpuError::from)?);
        }
        let mut numbers = numbers.into_bf16();
        if let Form::Rows(rows) = &self.form {
            let cols = self.view[1];
            numbers = rows.iter().flat_map(|row| &numbers[row * cols..(row + 1) * cols]).copied().collect();
        }
        if self.offset != 0.0 {
            numbers.iter_mut().for_each(|x| *x = bf16::from_f32(x.to_f32() + self.offset));
        }
        Ok(memory.write(at, &numbers).map_err(GpuError::from)?)
    }
}

/// Copies a rank's part of the whole tensor at `source` to `target`, and waits for the copy.
pub(super) fn part(device: &Device, tensor: &NamedTensor, share: Share, source: u64, target: u64) -> GpuResult<()> {
    let [rows, cols] = tensor.view;
    let (rows, width, first) = match tensor.cut {
        Cut::Rows => (rows / share.ranks, cols, share.rank * (rows / share.ranks) * cols),
        _ => (rows, cols / share.ranks, share.rank * (cols / share.ranks)),
    };
    let device_memory = sys::CUmemorytype::CU_MEMORYTYPE_DEVICE;
    let copy = sys::CUDA_MEMCPY2D {
        srcXInBytes: 0,
        srcY: 0,
        srcMemoryType: device_memory,
        srcHost: null(),
        srcDevice: source + 2 * first as u64,
        srcArray: null_mut(),
        srcPitch: 2 * cols,
        dstXInBytes: 0,
        dstY: 0,
        dstMemoryType: device_memory,
        dstHost: null_mut(),
        dstDevice: target,
        dstArray: null_mut(),
        dstPitch: 2 * width,
        WidthInBytes: 2 * width,
        Height: rows,
    };
    let stream = device.raw() as usize as sys::CUstream;
    // SAFETY: `source` contains the whole tensor, and `target` has memory for the part; the struct outlives the call.
    driver("cuMemcpy2DAsync", unsafe { sys::cuMemcpy2DAsync_v2(&copy, stream) })?;
    Ok(device.stream.synchronize()?)
}
