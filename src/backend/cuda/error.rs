//! The errors of the GPU backend.

use std::fmt;

use crate::backend::{Operand, PlanError};
use crate::id::{StepId, SwapPageId};
use crate::layout::{Dtype, KvDtype, KvShape, LabelError, ScaleError};

/// The reason why the GPU backend rejected a call or failed.
#[derive(Clone, PartialEq, Debug)]
#[non_exhaustive]
pub enum CudaError {
    /// A plan or another argument does not fit the pool.
    Plan(PlanError),
    /// The machine has no CUDA driver: `libcuda.so.1` cannot be opened.
    NoDriver,
    /// The driver has no device of this ordinal.
    NoDevice {
        /// The requested ordinal.
        ordinal: u32,
    },
    /// The driver is older than the kernels' PTX allows.
    DriverTooOld {
        /// CUDA version of the driver, as 1000 * major + 10 * minor.
        version: i32,
        /// The minimum version.
        wanted: i32,
    },
    /// The GPU is older than the kernels' target, sm_80.
    DeviceTooOld {
        /// Compute capability of the device, as 10 * major + minor.
        capability: u32,
    },
    /// The driver rejected a kernel's PTX.
    Ptx {
        /// The kernel.
        kernel: &'static str,
        /// The device's compute capability, as 10 * major + minor.
        capability: u32,
        /// The driver's code.
        code: u32,
        /// The compiler's log; may be empty.
        log: Box<str>,
    },
    /// The archive of a kernel's PTX is corrupt, or does not contain the kernel.
    Archive {
        /// The kernel.
        kernel: &'static str,
        /// The device's compute capability, as 10 * major + minor.
        capability: u32,
    },
    /// The kernel may not run on devices of this compute capability.
    Capability {
        /// The kernel.
        kernel: &'static str,
        /// The device's compute capability, as 10 * major + minor.
        capability: u32,
    },
    /// An allocation failed, on the device or on the host, or no thread could be started.
    OutOfMemory {
        /// The requested bytes; 0 for a thread.
        bytes: u64,
    },
    /// Another failure of the driver. The next call of any kind returns an asynchronous failure.
    Driver {
        /// The driver's function.
        call: &'static str,
        /// Code of the driver.
        code: u32,
    },
    /// A number is above a limit.
    Limit {
        /// What is limited.
        what: Limit,
        /// The number.
        value: u64,
        /// The maximum.
        max: u64,
    },
    /// The page size does not divide a group's chunk size, so some chunks would begin inside a page.
    ChunkPages {
        /// Number of tokens of a chunk.
        chunk: u32,
        /// Number of tokens of a page.
        page_size: u32,
    },
    /// No group of the pool reads chunks of this size, or the pool has latent rows, which have no kernel for chunks.
    Chunk {
        /// The size of the chunks.
        chunk: u32,
    },
    /// The scales do not fit the pool.
    Scales(ScaleError),
    /// Rows have another type than the pool, which is not quantised.
    RowsDtype {
        /// Type of the rows.
        rows: Dtype,
        /// Type of the pool.
        pool: KvDtype,
    },
    /// An argument at a raw address has another element type than the call expects.
    Element {
        /// The argument.
        operand: Operand,
        /// Type of the elements; `None` for positions.
        actual: Option<Dtype>,
        /// The expected type; `None` for positions.
        wanted: Option<Dtype>,
    },
    /// The stream is `CU_STREAM_PER_THREAD` (handle 2), which differs between threads and cannot order work.
    PerThreadStream,
    /// No kernel supports the shape of the pool.
    PoolShape {
        /// The pool's shape.
        shape: KvShape,
    },
    /// The label channels do not fit the pool.
    Labels(LabelError),
    /// No kernel supports labels in the pool, or lists over it: latent rows, fp8, f32, or at least 2^32 - 1 slots.
    Lists {
        /// Element type of the pool.
        dtype: KvDtype,
    },
    /// Pages of the two pools have different sizes or pieces.
    PageShape,
    /// The bytes of pages have different meanings in the two pools: see
    /// [`PoolLayout::page_fingerprint`](crate::PoolLayout::page_fingerprint).
    PageFingerprint {
        /// Fingerprint of the source.
        source: u64,
        /// Fingerprint of the target.
        target: u64,
    },
    /// A pool, rows or a stream belong to another device than the backend.
    OtherDevice {
        /// The other device.
        ordinal: u32,
    },
    /// A captured copy uses a page with an unfinished save or load, for which a capture cannot wait.
    PageInUse {
        /// The page.
        page: u32,
    },
    /// The swap page is not pinned yet.
    NotPinned {
        /// The page.
        page: SwapPageId,
        /// Number of pinned pages.
        ready: u32,
    },
    /// The machine, or the process's container, has too little memory for the swap pages.
    SwapMemory {
        /// Bytes of all swap pages.
        bytes: u64,
        /// Bytes that are available.
        available: u64,
    },
    /// The driver could not pin swap memory.
    Pinning {
        /// The driver's code.
        code: u32,
        /// Bytes of all swap pages.
        bytes: u64,
        /// Bytes that are pinned and remain usable.
        pinned: u64,
        /// The limit on locked memory (`RLIMIT_MEMLOCK`) in bytes, if all swap pages exceed it.
        limit: Option<u64>,
    },
    /// A kv head has more query heads than kernels support: 16, or 128 for latent rows.
    Heads {
        /// Number of query heads.
        q_heads: u32,
        /// Number of kv heads.
        kv_heads: u32,
    },
    /// No kernel supports a scale of 0.
    ZeroScale,
    /// No kernel supports the head_dim. `ptx/README.md` lists those of 16-bit rows; attention with f32 rows supports
    /// multiples of 32 up to 256.
    HeadDim {
        /// The pool's head_dim.
        head_dim: u32,
    },
    /// The address or stride of rows is not a multiple of the kernel's access size.
    RowsAlignment {
        /// Required alignment in bytes.
        align: u32,
    },
    /// During a capture, a call would have to send its plan to the device. Begin or stage the plan before the capture.
    NotStaged {
        /// The plan's step.
        step: StepId,
    },
    /// During a capture, a call needed a kernel that is not compiled, a variant of attention without memory, or a save
    /// or load of pages. [`prepare`](super::Cuda::prepare) compiles kernels.
    NotPrepared,
}

/// A number that the backend or its kernels limit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Limit {
    /// Rows of a step: [`CudaOptions::max_step_rows`](super::CudaOptions::max_step_rows).
    StepRows,
    /// Tokens that the rows of a step see together, with an overhead for each row.
    SeenTokens,
    /// Tokens that rows of one new token see together, rounded up for each row:
    /// [`CudaOptions::select_tokens`](super::CudaOptions::select_tokens).
    SelectTokens,
    /// Bytes of a page, or of a token's slot in all layers, that a kernel copies at once.
    PageBytes,
    /// Bytes from one row of K or V to the next.
    RowStride,
    /// Tokens of a page table row, for the pool's page size.
    RowTokens,
    /// Directory words of the page tables, in a pool with chunks.
    DirectoryWords,
    /// KV heads of a pool with 16-bit rows.
    KvHeads,
    /// Variants of attention. Variants differ in shape, query heads, window, chunk, list length or the sign of the
    /// scale.
    Variants,
}

impl Limit {
    /// Rejects a value above the maximum.
    pub(super) fn check(self, value: u64, max: u64) -> Result<(), CudaError> {
        if value <= max { Ok(()) } else { Err(CudaError::Limit { what: self, value, max }) }
    }
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::StepRows => "rows of a step",
            Self::SeenTokens => "tokens that the rows of a step see together",
            Self::SelectTokens => "tokens of a selection",
            Self::PageBytes => "bytes of a page or slot",
            Self::RowStride => "bytes from row to row of K or V",
            Self::RowTokens => "tokens of a page table row",
            Self::DirectoryWords => "directory words of the page tables",
            Self::KvHeads => "kv heads",
            Self::Variants => "variants of attention",
        })
    }
}

/// A compute capability for messages.
struct Capability(u32);

impl fmt::Display for Capability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "for compute capability {}.{}", self.0 / 10, self.0 % 10)
    }
}

/// The name of an element type for messages; `None` for positions.
struct ElementName(Option<Dtype>);

impl fmt::Display for ElementName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.map_or(write!(f, "position"), |dtype| write!(f, "{dtype:?}"))
    }
}

impl fmt::Display for CudaError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Plan(error) => error.fmt(f),
            Self::NoDriver => write!(f, "this machine has no CUDA driver"),
            Self::NoDevice { ordinal } => write!(f, "there is no CUDA device {ordinal}"),
            Self::DriverTooOld { version, wanted } => {
                write!(f, "the driver's CUDA version {version} is below {wanted}")
            }
            Self::DeviceTooOld { capability } => {
                write!(f, "the device's compute capability {capability} is below 80")
            }
            Self::Ptx { kernel, capability, code, ref log } => {
                let colon = if log.is_empty() { "" } else { ": " };
                let device = Capability(capability);
                write!(f, "the driver refused the PTX of {kernel} {device} with code {code}{colon}{log}")
            }
            Self::Archive { kernel, capability } => {
                write!(f, "the archive with the PTX of {kernel} {} is corrupt", Capability(capability))
            }
            Self::Capability { kernel, capability } => {
                write!(f, "there is no PTX of {kernel} {}", Capability(capability))
            }
            Self::OutOfMemory { bytes } => write!(f, "an allocation of {bytes} bytes failed"),
            Self::Driver { call, code } => write!(f, "{call} failed with code {code}"),
            Self::Limit { what, value, max } => write!(f, "{value} {what} are above the limit of {max}"),
            Self::ChunkPages { chunk, page_size } => {
                write!(f, "pages of {page_size} tokens do not divide chunks of {chunk} tokens")
            }
            Self::Chunk { chunk } => {
                write!(f, "no group of the pool has a kernel for chunks of {chunk} tokens")
            }
            Self::Labels(error) => error.fmt(f),
            Self::Lists { dtype } => {
                write!(f, "there are no kernels for selections over this pool of {dtype:?}")
            }
            Self::Element { operand, actual, wanted } => {
                let [actual, wanted] = [actual, wanted].map(ElementName);
                write!(f, "{operand} has elements of type {actual} where {wanted} is expected")
            }
            Self::PerThreadStream => write!(f, "stream 2 is a different stream in each thread"),
            Self::PoolShape { shape } => write!(f, "there are no kernels for pools of {shape:?}"),
            Self::Scales(error) => error.fmt(f),
            Self::RowsDtype { rows, pool } => {
                write!(f, "rows of {rows:?} do not fit a pool of {pool:?}")
            }
            Self::PageShape => write!(f, "the two pools' pages differ in shape"),
            Self::PageFingerprint { source, target } => {
                write!(f, "pages of fingerprint {source:#x} do not fit those of {target:#x}")
            }
            Self::OtherDevice { ordinal } => {
                write!(f, "a pool, rows or a stream are on another device, {ordinal}")
            }
            Self::PageInUse { page } => write!(f, "a save or load of page {page} is not done"),
            Self::NotPinned { page, ready } => {
                write!(f, "swap page {} is not among the {ready} that are pinned", page.raw())
            }
            Self::SwapMemory { bytes, available } => {
                write!(f, "swap pages of {bytes} bytes are above the {available} available bytes")
            }
            Self::Pinning { code, bytes, pinned, limit } => {
                write!(f, "the driver pinned {pinned} of {bytes} bytes, then failed with code {code}")?;
                match limit {
                    Some(limit) => write!(f, "; RLIMIT_MEMLOCK is {limit} bytes"),
                    None => Ok(()),
                }
            }
            Self::Heads { q_heads, kv_heads } => {
                write!(f, "{q_heads} query heads cannot share {kv_heads} kv heads")
            }
            Self::ZeroScale => write!(f, "no attention kernel takes a scale of 0"),
            Self::HeadDim { head_dim } => {
                write!(f, "there is no attention kernel for head_dim {head_dim}")
            }
            Self::RowsAlignment { align } => {
                write!(f, "the rows' address or stride is not a multiple of {align} bytes")
            }
            Self::NotStaged { step } => {
                write!(f, "the plan of step {} was not staged before the capture", step.raw())
            }
            Self::NotPrepared => {
                write!(f, "this variant of attention or copy was not prepared before the capture")
            }
        }
    }
}

impl std::error::Error for CudaError {}

impl From<ScaleError> for CudaError {
    fn from(error: ScaleError) -> Self {
        Self::Scales(error)
    }
}

impl From<LabelError> for CudaError {
    fn from(error: LabelError) -> Self {
        Self::Labels(error)
    }
}

impl From<PlanError> for CudaError {
    fn from(error: PlanError) -> Self {
        Self::Plan(error)
    }
}

/// Converts a result of the driver to an error.
pub(super) fn check(call: &'static str, result: u32) -> Result<(), CudaError> {
    match result {
        0 => Ok(()),
        34 => Err(CudaError::NoDriver),
        code => Err(CudaError::Driver { call, code }),
    }
}

/// Converts the result of an allocation.
pub(super) fn check_alloc(call: &'static str, bytes: u64, result: u32) -> Result<(), CudaError> {
    match check(call, result) {
        Err(CudaError::Driver { code: 2, .. }) => Err(CudaError::OutOfMemory { bytes }),
        other => other,
    }
}
