//! The driver's handles as integers, which any thread may hold.

use super::sys;
use crate::backend::cuda::error::{CudaError, check};

pub type RawContext = u64;

/// The host's raw `CUstream` as an integer; 0 is the default stream.
pub type RawStream = u64;

pub fn raw(stream: RawStream) -> sys::CUstream {
    stream as usize as sys::CUstream
}

/// Returns whether the stream is being captured.
pub fn is_capturing(stream: RawStream) -> Result<bool, CudaError> {
    let mut status = 0;
    // SAFETY: `status` is valid memory for one status; the stream is the host's.
    let result = unsafe { sys::cuStreamIsCapturing(raw(stream), &mut status) };
    check("cuStreamIsCapturing", result)?;

    Ok(status != 0)
}
