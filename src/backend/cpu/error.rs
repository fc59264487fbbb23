//! What the CPU backend refuses, by name and value.

use std::fmt;

use super::path::{CpuPath, PATH_VARIABLE};
use crate::backend::PlanError;
use crate::error::Count;
use crate::layout::{LabelError, PlaneName, ScaleError};

/// Why the CPU backend refused a call. Nothing was written.
#[derive(Clone, PartialEq, Debug)]
#[non_exhaustive]
pub enum CpuError {
    /// A plan, or what was asked with it, does not fit the pool.
    Plan(PlanError),
    /// The machine does not give the memory.
    OutOfMemory {
        /// Bytes asked for.
        bytes: u64,
    },
    /// A contiguous piece that pages do not have.
    Piece {
        /// The piece.
        piece: u32,
        /// Pieces of a page.
        pieces: u32,
    },
    /// Scales that are not for this pool.
    Scales(ScaleError),
    /// Label channels that are not for this pool.
    Labels(LabelError),
    /// A plane that the pool does not have, or that holds no rows of numbers by slot.
    Plane {
        /// The plane.
        plane: PlaneName,
    },
    /// Pages of two pools that do not mean the same bytes: see [`PoolLayout::page_fingerprint`].
    ///
    /// [`PoolLayout::page_fingerprint`]: crate::PoolLayout::page_fingerprint
    PageFingerprint {
        /// The source's.
        source: u64,
        /// The target's.
        target: u64,
    },
    /// The machine lacks the instructions of this path.
    Path {
        /// The path.
        path: CpuPath,
    },
    /// The environment variable [`PATH_VARIABLE`] names no path.
    PathName {
        /// Its value, with characters replaced that are not Unicode.
        name: String,
    },
    /// A buffer of another size than one page.
    PageBytes {
        /// Its bytes.
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
                write!(f, "the host has no memory for {}", Count(*bytes, "byte"))
            }
            Self::Piece { piece, pieces } => {
                write!(f, "piece {piece} is not among {pieces} of a page")
            }
            Self::Scales(error) => error.fmt(f),
            Self::Labels(error) => error.fmt(f),
            Self::PageFingerprint { source, target } => {
                write!(f, "pages of fingerprint {source:016x} are not those of {target:016x}")
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
                write!(f, "a buffer of {actual} bytes for a page of {wanted}")
            }
        }
    }
}

impl std::error::Error for CpuError {}
