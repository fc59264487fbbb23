//! Errors of a GPU host: missing parts and failures.

use std::fmt;

use kvarena::backend::cuda::CudaError;

use crate::error::{Error, Fault};

/// The result of functions that fail only on a GPU.
pub type GpuResult<T> = Result<T, GpuError>;

/// Reason why the GPU cannot serve.
#[derive(Debug)]
#[non_exhaustive]
pub enum GpuError {
    /// Error of `kvarena`: no driver, no device, a device or driver that is too old, out of memory, a failed call.
    Cuda(CudaError),
    /// A call of the driver failed.
    Driver {
        /// Name of the call.
        call: &'static str,
        /// The driver's code.
        code: u32,
    },
    /// No folder contains cublasLt.
    NoCublasLt {
        /// Result of the search.
        why: String,
    },
    /// A call of cublasLt failed.
    CublasLt {
        /// Name of the call.
        call: &'static str,
        /// The library's status.
        status: u32,
    },
    /// No folder contains NCCL, which several GPUs require.
    NoNccl {
        /// Result of the search.
        why: String,
    },
    /// A call of NCCL failed.
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
    /// The model cannot be spread over this many GPUs.
    Ranks {
        /// Requested GPUs.
        ranks: usize,
        /// Size that the GPUs do not divide.
        what: &'static str,
    },
    /// cublasLt has no algorithm for a product.
    NoProduct {
        /// Rows of x, columns of y, columns of x.
        shape: [usize; 3],
    },
    /// Weights and activations need more memory than is free.
    Memory {
        /// Bytes needed.
        wanted: u64,
        /// Bytes free.
        free: u64,
    },
    /// No attention kernel supports the heads.
    Heads {
        /// Elements of a head.
        head_dim: usize,
        /// Query heads for each head of K and V.
        group: usize,
    },
    /// A width that the kernels do not support.
    Width {
        /// The field.
        name: &'static str,
        /// Value of the field.
        value: usize,
        /// The required value.
        wanted: &'static str,
    },
    /// The model has a property that only the CPU supports.
    Missing {
        /// The property.
        what: &'static str,
    },
    /// A step chooses more tokens than its memory allows.
    Draws {
        /// Tokens to choose.
        draws: usize,
        /// The maximum.
        max: usize,
    },
    /// A step has more edits of logits than its memory allows.
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
            Self::Cuda(error) => write!(f, "no GPU can be used: {error}"),
            Self::Driver { call, code } => write!(f, "{call} failed with CUDA error {code}"),
            Self::NoCublasLt { why } => write!(f, "no cublasLt can be used: {why}"),
            Self::CublasLt { call, status } => write!(f, "{call} failed with status {status}"),
            Self::NoNccl { why } => write!(f, "no NCCL can be used: {why}"),
            Self::Nccl { call, what } => write!(f, "{call} failed: {what}"),
            Self::NoPeer { gpu, peer } => {
                write!(
                    f,
                    "GPU {gpu} cannot reach the memory of GPU {peer}: sums have to go through NCCL"
                )
            }
            Self::Ranks { ranks, what } => {
                write!(
                    f,
                    "the model cannot be spread over {ranks} GPUs: they do not divide its {what}"
                )
            }
            Self::NoProduct { shape: [m, n, k] } => {
                write!(f, "cublasLt has no product of {m} x {k} with {k} x {n}")
            }
            Self::Memory { wanted, free } => write!(
                f,
                "the model does not fit the GPU: it needs {wanted} bytes, and {free} are free"
            ),
            Self::Heads { head_dim, group } => write!(
                f,
                "no attention kernel serves head_dim {head_dim} with {group} query heads for each of K and V \
                 (head_dim 64, 128 or 256, at most 16 query heads)"
            ),
            Self::Width { name, value, wanted } => {
                write!(f, "{name} {value} is not supported on a GPU: it must be {wanted}")
            }
            Self::Missing { what } => {
                write!(f, "{what} is not supported on a GPU, only on the CPU")
            }
            Self::Draws { draws, max } => {
                write!(f, "{draws} samples begin in one step, and there is room for {max}")
            }
            Self::Edits { edits, max } => {
                write!(f, "a step edits {edits} logits, and there is room for {max}")
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
        Self::Cuda(error)
    }
}

impl GpuError {
    /// Returns whether the machine or the model is the cause, rather than the run.
    pub fn is_unfit(&self) -> bool {
        match self {
            Self::Cuda(error) => matches!(
                error,
                CudaError::NoDriver
                    | CudaError::NoDevice { .. }
                    | CudaError::DriverTooOld { .. }
                    | CudaError::DeviceTooOld { .. }
                    | CudaError::HeadDim { .. }
                    | CudaError::OutOfMemory { .. }
            ),
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

/// Converts a result of the driver.
pub(super) fn driver(
    call: &'static str,
    result: cudarc::driver::sys::CUresult,
) -> Result<(), GpuError> {
    match result as u32 {
        0 => Ok(()),
        code => Err(GpuError::Driver { call, code }),
    }
}
