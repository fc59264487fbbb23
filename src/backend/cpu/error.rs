//! Errors of the CPU backend.

use std::fmt;

use super::path::{CpuPath, PATH_VARIABLE};
use crate::backend::PlanError;
use crate::error::Count;
use crate::layout::{LabelError, PlaneName, ScaleError};

/// The reason why the CPU backend rejected a call. Nothing was written.
#[derive(Clone, PartialEq, Debug)]
#[non_exhaustive]
pub enum CpuError {
    /// A plan or its parameters do not fit the pool.
    Plan(PlanError),
    /// The system cannot allocate the memory.
    OutOfMemory {
        /// Requested bytes.
        bytes: u64,
    },
    /// Pages do not have this contiguous piece.
    Piece {
        /// The piece.
        piece: u32,
        /// Number of pieces of a page.
        pieces: u32,
    },
    /// The scales do not fit the pool.
    Scales(ScaleError),
    /// The label channels do not fit the pool.
    Labels(LabelError),
    /// The pool does not have the plane, or the plane has no unquantised rows by slot.
    Plane {
        /// The plane.
        plane: PlaneName,
    },
    /// The bytes of pages have different meanings in the two pools: see [`PoolLayout::page_fingerprint`].
    ///
    /// [`PoolLayout::page_fingerprint`]: crate::PoolLayout::page_fingerprint
    PageFingerprint {
        /// Fingerprint of the source.
        source: u64,
        /// Fingerprint of the target.
        target: u64,
    },
    /// The machine lacks the instructions of this path.
    Path {
        /// The path.
        path: CpuPath,
    },
    /// The value of the environment variable [`PATH_VARIABLE`] is not the name of a path.
    PathName {
        /// The value, with replacements for characters that are not Unicode.
        name: String,
    },
    /// The buffer does not have the size of a page.
    PageBytes {
        /// Bytes of the buffer.
        actual: usize,
        /// Bytes of one page.
        wanted: u64,
    },
}

impl From<PlanError> for CpuError {
    fn from(error: PlanError) -> Self {
        Self::Plan(error)
    }
}

impl From<ScaleError> for CpuError {
    fn from(error: ScaleError) -> Self {
        Self::Scales(error)
    }
}

impl From<LabelError> for CpuError {
    fn from(error: LabelError) -> Self {
        Self::Labels(error)
    }
}

impl fmt::Display for CpuError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Plan(error) => error.fmt(f),
            Self::OutOfMemory { bytes } => {
                write!(f, "the swap has no memory for {}", Count(*bytes, "byte"))
            }
            Self::Piece { piece, pieces } => {
                write!(f, "there is no piece {piece} in a page of {pieces} pieces")
            }
            Self::Scales(error) => error.fmt(f),
            Self::Labels(error) => error.fmt(f),
            Self::PageFingerprint { source, target } => {
                write!(f, "pages of fingerprint {source:016x} do not fit those of {target:016x}")
            }
            Self::Plane { plane } => write!(f, "the pool has no rows of {plane:?} by slot"),
            Self::Path { path } => {
                write!(f, "this machine has no instructions for the path {}", path.name())
            }
            Self::PathName { name } => {
                let names = CpuPath::ALL.map(CpuPath::name).join(", ");
                write!(f, "{PATH_VARIABLE} is {name:?}, which is none of {names}")
            }
            Self::PageBytes { actual, wanted } => {
                write!(f, "a buffer of {actual} bytes does not fit a page of {wanted}")
            }
        }
    }
}

impl std::error::Error for CpuError {}
