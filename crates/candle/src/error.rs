//! [`Error`]: the cause of a failed call.

use candle_core::{DType, DeviceLocation};
use kvarena::backend::Operand;
use kvarena::{Backend, EngineError};

use crate::Pool;

/// The cause of a failed call. Its conversion to candle's error keeps the text.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The engine or its backend rejected the call, or the backend failed.
    #[error(transparent)]
    Engine(#[from] EngineError<<Pool as Backend>::Error>),
    /// A call of candle failed.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
    /// No backend supports the device, or a tensor is on another device or stream than the arena.
    #[error("{location:?} is not a device of this arena")]
    Device {
        /// The device.
        location: DeviceLocation,
    },
    /// The device tracks uses of tensors by events, and a capture cannot wait for events.
    #[error("graphs need a device without event tracking")]
    EventTracking,
    /// The step belongs to another arena than the graphs.
    #[error("the step is of another arena than the graphs")]
    OtherArena,
    /// A tensor's shape is not `[rows, heads, dim]` of the step and the pool, or `[q_heads]` for sinks.
    #[error("{operand} has shape {actual:?} where {wanted:?} is expected")]
    Shape {
        /// The argument.
        operand: Operand,
        /// The tensor's shape.
        actual: Vec<usize>,
        /// The expected shape.
        wanted: Vec<usize>,
    },
    /// The rows of a tensor, or the sinks, are not contiguous, so attention would have to copy them.
    #[error("{operand} has strides {strides:?}: its rows are not contiguous")]
    Strides {
        /// The argument.
        operand: Operand,
        /// The tensor's strides, in elements.
        strides: Vec<usize>,
    },
    /// The backend does not read the tensor's type, or the types of q, k and v differ on a GPU.
    #[error("{operand} has type {dtype:?}, which the backend does not read")]
    Dtype {
        /// The argument.
        operand: Operand,
        /// The tensor's type.
        dtype: DType,
    },
}

#[cfg(feature = "cuda")]
impl From<kvarena::backend::cuda::CudaError> for Error {
    fn from(error: kvarena::backend::cuda::CudaError) -> Self {
        EngineError::Backend(kvarena::backend::EitherError::Right(error)).into()
    }
}

impl From<Error> for candle_core::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::Candle(error) => error,
            error => Self::wrap(error),
        }
    }
}
