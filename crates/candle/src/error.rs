//! [`Error`]: the cause of a failed call.

use std::fmt;

use candle_core::{DType, DeviceLocation};
use kvarena::backend::Operand;
use kvarena::{Backend, EngineError};

use crate::Pool;

/// The cause of a failed call. Its conversion to candle's error keeps the text.
#[derive(Debug)]
#[non_exhaustive]
pub enum Error {
    /// The engine or its backend rejected the call, or the backend failed.
    Engine(EngineError<<Pool as Backend>::Error>),
    /// A call of candle failed.
    Candle(candle_core::Error),
    /// No backend supports the device, or a tensor is on another device or stream than the arena.
    Device {
        /// The device.
        location: DeviceLocation,
    },
    /// The device tracks uses of tensors by events, and a capture cannot wait for events.
    EventTracking,
    /// The step belongs to another arena than the graphs.
    OtherArena,
    /// A tensor's shape is not `[rows, heads, dim]` of the step and the pool, or `[q_heads]` for sinks.
    Shape {
        /// The argument.
        operand: Operand,
        /// The tensor's shape.
        actual: Vec<usize>,
        /// The expected shape.
        wanted: Vec<usize>,
    },
    /// The rows of a tensor, or the sinks, are not contiguous, so attention would have to copy them.
    Strides {
        /// The argument.
        operand: Operand,
        /// The tensor's strides, in elements.
        strides: Vec<usize>,
    },
    /// The backend does not read the tensor's type, or the types of q, k and v differ on a GPU.
    Dtype {
        /// The argument.
        operand: Operand,
        /// The tensor's type.
        dtype: DType,
    },
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Engine(error) => error.fmt(f),
            Self::Candle(error) => error.fmt(f),
            Self::Device { location } => write!(f, "{location:?} is not a device of this arena"),
            Self::EventTracking => write!(f, "graphs need a device without event tracking"),
            Self::OtherArena => write!(f, "the step is of another arena than the graphs"),
            Self::Shape { operand, actual, wanted } => {
                write!(f, "{operand} has shape {actual:?} where {wanted:?} is expected")
            }
            Self::Strides { operand, strides } => {
                write!(f, "{operand} has strides {strides:?}: its rows are not contiguous")
            }
            Self::Dtype { operand, dtype } => {
                write!(f, "{operand} has type {dtype:?}, which the backend does not read")
            }
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Engine(error) => error.source(),
            Self::Candle(error) => error.source(),
            _ => None,
        }
    }
}

impl From<EngineError<<Pool as Backend>::Error>> for Error {
    fn from(error: EngineError<<Pool as Backend>::Error>) -> Self {
        Self::Engine(error)
    }
}

#[cfg(feature = "cuda")]
impl From<kvarena::backend::cuda::CudaError> for Error {
    fn from(error: kvarena::backend::cuda::CudaError) -> Self {
        EngineError::Backend(kvarena::backend::EitherError::Right(error)).into()
    }
}

impl From<candle_core::Error> for Error {
    fn from(error: candle_core::Error) -> Self {
        Self::Candle(error)
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
