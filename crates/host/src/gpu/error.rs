//! Errors of the host on a GPU: unsupported machines and models, steps above a limit, and failed calls.

use std::fmt;

use kvarena::backend::cuda::CudaError;

use crate::error::{Error, Fault};

/// The result of functions that fail only on a GPU.
pub type GpuResult<T> = Result<T, GpuError>;

/// An error of the host on a GPU.
#[derive(Debug)]
#[non_exhaustive]
pub enum GpuError {
    /// An error of `kvarena`'s CUDA backend, such as a missing driver, an old device or too little memory.
    Cuda(CudaError),
    /// A call to the driver failed.
    Driver {
        /// Name of the call.
        call: &'static str,
        /// The driver's `CUresult`.
        code: u32,
    },
    /// cublasLt is not installed or cannot be loaded.
    NoCublasLt {
        /// The names that the search did not find, or the loader's error.
        why: String,
    },
    /// A call to cublasLt failed.
    CublasLt {
        /// Name of the call.
        call: &'static str,
        /// The library's `cublasStatus_t`.
        status: u32,
    },
    /// NCCL is not installed or cannot be loaded. A model on several GPUs needs it.
    NoNccl {
        /// The names that the search did not find, or the loader's error.
        why: String,
    },
    /// A call to NCCL failed.
    Nccl {
        /// Name of the call.
        call: &'static str,
        /// The library's message.
        what: String,
    },
    /// A GPU cannot access the memory of a peer.
    NoPeer {
        /// The GPU.
        gpu: u32,
        /// The peer.
        peer: u32,
    },
    /// A size of the model is not a multiple of the number of GPUs.
    Ranks {
        /// Number of GPUs.
        ranks: usize,
        /// Name of the size.
        what: &'static str,
    },
    /// cublasLt has no algorithm for a product.
    NoProduct {
        /// `[m, n, k]` of the product of x `[m, k]` and w `[k, n]`.
        shape: [usize; 3],
    },
    /// Weights or activations need more memory than is free.
    Memory {
        /// Bytes needed.
        wanted: u64,
        /// Bytes free.
        free: u64,
    },
    /// No attention kernel supports the size of the heads or the number of query heads.
    Heads {
        /// Elements of a head.
        head_dim: usize,
        /// Query heads for each head of K and V.
        group: usize,
    },
    /// The kernels do not support a width of the model.
    Width {
        /// Name of the field in `config.json`.
        name: &'static str,
        /// Value of the field.
        value: usize,
        /// The condition on the value, such as "a multiple of 8".
        wanted: &'static str,
    },
    /// The model has a property that only the CPU supports.
    Missing {
        /// The property.
        what: &'static str,
    },
    /// A step has more draws than its buffers can contain.
    Draws {
        /// Number of draws.
        draws: usize,
        /// The maximum.
        max: usize,
    },
    /// A step has more edits of logits than its buffer can contain.
    Edits {
        /// Edits of all draws.
        edits: usize,
        /// The maximum; 0 if the vocabulary is too large for edits and min-p.
        max: usize,
    },
}

impl fmt::Display for GpuError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cuda(error) if lacks_gpu(error) => write!(f, "no GPU can be used: {error}"),
            Self::Cuda(error) => write!(f, "{error}"),
            Self::Driver { call, code } => write!(f, "{call} failed with CUDA error {code}"),
            Self::NoCublasLt { why } => write!(f, "cannot use cublasLt: {why}"),
            Self::CublasLt { call, status } => write!(f, "{call} failed with status {status}"),
            Self::NoNccl { why } => write!(f, "cannot use NCCL: {why}"),
            Self::Nccl { call, what } => write!(f, "{call} failed: {what}"),
            Self::NoPeer { gpu, peer } => {
                write!(f, "GPU {gpu} cannot reach the memory of GPU {peer}: sums must use NCCL")
            }
            Self::Ranks { ranks, what } => {
                write!(f, "cannot split the model over {ranks} GPUs: {ranks} does not divide its {what}")
            }
            Self::NoProduct { shape: [m, n, k] } => {
                write!(f, "cublasLt has no algorithm for a product of {m} x {k} and {k} x {n}")
            }
            Self::Memory { wanted, free } => {
                write!(f, "the model does not fit the GPU: it needs {wanted} bytes, and {free} are free")
            }
            Self::Heads { head_dim, group } => write!(
                f,
                "no attention kernel supports head_dim {head_dim} with {group} query heads for each kv head: \
                 head_dim must be 64, 128 or 256, with at most 16 query heads"
            ),
            Self::Width { name, value, wanted } => {
                write!(f, "{name} {value} is not supported on a GPU: it must be {wanted}")
            }
            Self::Missing { what } => {
                write!(f, "{what} is not supported on a GPU, only on the CPU")
            }
            Self::Draws { draws, max } => {
                write!(f, "a step has {draws} draws, but at most {max} are possible")
            }
            Self::Edits { edits, max } => {
                write!(f, "a step has {edits} edits of logits, but at most {max} are possible")
            }
        }
    }
}

impl std::error::Error for GpuError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Cuda(error) => Some(error),
            _ => None,
        }
    }
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
