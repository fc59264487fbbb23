//! Errors of the CPU backend.

use super::path::{CpuPath, PATH_VARIABLE};
use crate::backend::PlanError;
use crate::error::{Count, displayed};
use crate::layout::{LabelError, PlaneName, ScaleError};

displayed! {
    /// The reason why the CPU backend rejected a call. Nothing was written.
    #[derive(Clone, PartialEq, Debug)]
    #[non_exhaustive]
    pub enum CpuError {
        /// A plan or its parameters do not fit the pool.
        Plan(error: PlanError) => "{error}";
        /// The system cannot allocate the memory.
        OutOfMemory { bytes: u64 } => "the host has no memory for {}", Count(bytes, "byte");
        /// Pages do not have this contiguous piece.
        Piece {
            piece: u32,
            /// Number of pieces of a page.
            pieces: u32,
        } => "there is no piece {piece} in a page of {pieces} pieces";
        /// The scales do not fit the pool.
        Scales(error: ScaleError) => "{error}";
        /// The label channels do not fit the pool.
        Labels(error: LabelError) => "{error}";
        /// The pool does not have the plane, or the plane has no unquantised rows by slot.
        Plane { plane: PlaneName } => "the pool has no rows of {plane:?} by slot";
        /// The bytes of pages have different meanings in the two pools: see [`PoolLayout::page_fingerprint`].
        ///
        /// [`PoolLayout::page_fingerprint`]: crate::layout::PoolLayout::page_fingerprint
        PageFingerprint { source: u64, target: u64 }
            => "pages of fingerprint {source:016x} do not fit those of {target:016x}";
        /// The machine lacks the instructions of this path.
        Path { path: CpuPath } => "this machine has no instructions for the path {}", path.name();
        /// The value of the environment variable [`PATH_VARIABLE`] is not the name of a path.
        PathName {
            /// The value, with replacements for characters that are not Unicode.
            name: String,
        } => "{PATH_VARIABLE} is {name:?}, which is none of {}", CpuPath::ALL.map(CpuPath::name).join(", ");
        /// The buffer does not have the size of a page.
        PageBytes {
            /// Bytes of the buffer.
            actual: usize,
            /// Bytes of one page.
            wanted: u64,
        } => "a buffer of {actual} bytes does not fit a page of {wanted}";
    }
}

impl std::error::Error for CpuError {}

wraps_errors!(CpuError: Plan(PlanError), Scales(ScaleError), Labels(LabelError));
