//! Errors of the host on a GPU: unsupported machines and models, steps above a limit, and failed calls.

use kvarena::backend::cuda::CudaError;

use crate::error::{Error, Fault};

/// The result of functions that fail only on a GPU.
pub type GpuResult<T> = Result<T, GpuError>;

/// An error of the host on a GPU.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the texts name the fields
#[non_exhaustive]
pub enum GpuError {
    /// An error of `kvarena`'s CUDA backend, such as a missing driver, an old device or too little memory.
    #[error("{}{_0}", if lacks_gpu(_0) { "no GPU can be used: " } else { "" })]
    Cuda(#[source] CudaError),
    /// A call to the driver failed.
    #[error("{call} failed with CUDA error {code}")]
    Driver { call: &'static str, code: u32 },
    /// cublasLt is not installed or cannot be opened; `why` has the names that the search did not find, or the error.
    #[error("cannot use cublasLt: {why}")]
    NoCublasLt { why: String },
    /// A call to cublasLt failed.
    #[error("{call} failed with status {status}")]
    CublasLt { call: &'static str, status: u32 },
    /// NCCL, which a model on several GPUs needs, is not installed or cannot be opened.
    #[error("cannot use NCCL: {why}")]
    NoNccl { why: String },
    /// A call to NCCL failed.
    #[error("{call} failed: {what}")]
    Nccl { call: &'static str, what: String },
    /// A GPU cannot access the memory of a peer.
    #[error("GPU {gpu} cannot reach the memory of GPU {peer}: sums must use NCCL")]
    NoPeer { gpu: u32, peer: u32 },
    /// A size of the model is not a multiple of the number of GPUs.
    #[error("cannot split the model over {ranks} GPUs: {ranks} does not divide its {what}")]
    Ranks { ranks: usize, what: &'static str },
    /// cublasLt has no algorithm for a product of x `[m, k]` and w `[k, n]`.
    #[error("cublasLt has no algorithm for a product of {} x {} and {} x {}", shape[0], shape[2], shape[2], shape[1])]
    NoProduct { shape: [usize; 3] },
    /// Weights or activations need more bytes than are free.
    #[error("the model does not fit the GPU: it needs {wanted} bytes, and {free} are free")]
    Memory { wanted: u64, free: u64 },
    /// No attention kernel supports the elements of a head, or the query heads for each head of K and V.
    #[error(
        "no attention kernel supports head_dim {head_dim} with {group} query heads for each kv head: head_dim must be \
         64, 128 or 256, with at most 16 query heads"
    )]
    Heads { head_dim: usize, group: usize },
    /// The kernels do not support a width of the model; `wanted` is the condition, such as "a multiple of 8".
    #[error("{name} {value} is not supported on a GPU: it must be {wanted}")]
    Width { name: &'static str, value: usize, wanted: &'static str },
    /// The model has a property that only the CPU supports.
    #[error("{what} is not supported on a GPU, only on the CPU")]
    Missing { what: &'static str },
    /// A step has more draws than its buffers can contain.
    #[error("a step has {draws} draws, but at most {max} are possible")]
    Draws { draws: usize, max: usize },
    /// A step has more edits of logits than its buffer can contain: none if the vocabulary is too large for edits.
    #[error("a step has {edits} edits of logits, but at most {max} are possible")]
    Edits { edits: usize, max: usize },
}

impl From<CudaError> for GpuError {
    fn from(error: CudaError) -> Self {
        match error {
            CudaError::Driver { call, code } => Self::Driver { call, code },
            other => Self::Cuda(other),
        }
    }
}

impl GpuError {
    /// Returns whether the cause is the machine or the model, and not a single run.
    pub fn is_unfit(&self) -> bool {
        match self {
            Self::Cuda(CudaError::HeadDim { .. } | CudaError::OutOfMemory { .. }) => true,
            Self::Cuda(error) => lacks_gpu(error),
            Self::NoCublasLt { .. }
            | Self::NoNccl { .. }
            | Self::NoPeer { .. }
            | Self::Ranks { .. }
            | Self::Memory { .. }
            | Self::Heads { .. }
            | Self::Width { .. }
            | Self::Missing { .. } => true,
            _ => false,
        }
    }
}

impl From<GpuError> for Error {
    fn from(error: GpuError) -> Self {
        let fault = if error.is_unfit() { Fault::Model } else { Fault::Run };
        Self { fault, message: error.to_string() }
    }
}

/// Returns whether the machine has no GPU that the backend supports.
fn lacks_gpu(error: &CudaError) -> bool {
    matches!(
        error,
        CudaError::NoDriver
            | CudaError::NoDevice { .. }
            | CudaError::DriverTooOld { .. }
            | CudaError::DeviceTooOld { .. }
    )
}

/// Converts the driver's result of `call`.
pub(super) fn driver(call: &'static str, result: cudarc::driver::sys::CUresult) -> Result<(), GpuError> {
    match result as u32 {
        0 => Ok(()),
        code => Err(GpuError::Driver { call, code }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_machine_without_a_gpu_is_reported_as_one() {
        let message = |error| GpuError::from(error).to_string();
        assert_eq!(message(CudaError::NoDriver), "no GPU can be used: this machine has no CUDA driver");
        assert_eq!(message(CudaError::OutOfMemory { bytes: 8 }), "an allocation of 8 bytes failed");
        let launch = CudaError::Driver { call: "cuLaunchKernelEx", code: 700 };
        assert_eq!(message(launch), "cuLaunchKernelEx failed with CUDA error 700");
    }
}
