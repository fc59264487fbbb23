//! The errors of the GPU backend.

use std::fmt;

use crate::backend::{Operand, PlanError};
use crate::error::{Count, displayed};
use crate::id::{StepId, SwapPageId};
use crate::layout::{Dtype, KvDtype, KvShape, LabelError, PlaneName, ScaleError};

displayed! {
    /// The reason why the GPU backend rejected a call or failed. Compute capabilities are 10 * major + minor.
    #[derive(Clone, PartialEq, Debug)]
    #[non_exhaustive]
    pub enum CudaError {
        /// A plan or another argument does not fit the pool.
        Plan(error: PlanError) => "{error}";
        /// The machine has no CUDA driver: `libcuda.so.1` cannot be opened.
        NoDriver => "this machine has no CUDA driver";
        /// The driver has no device of this ordinal.
        NoDevice { ordinal: u32 } => "there is no CUDA device {ordinal}";
        /// The driver is older than the kernels' PTX allows. Versions are 1000 * major + 10 * minor.
        DriverTooOld { version: i32, wanted: i32 } => "the driver's CUDA version {version} is below {wanted}";
        /// The GPU is older than the kernels' target, sm_80.
        DeviceTooOld { capability: u32 } => "the device's compute capability {capability} is below 80";
        /// The driver rejected a kernel's PTX.
        Ptx {
            kernel: &'static str,
            capability: u32,
            /// The driver's code.
            code: u32,
            /// The compiler's log; may be empty.
            log: Box<str>,
        } => "the driver refused the PTX of {kernel} {} with code {code}{}{log}",
            Capability(capability), if log.is_empty() { "" } else { ": " };
        /// The archive of a kernel's PTX is corrupt, or does not contain the kernel.
        Archive { kernel: &'static str, capability: u32 }
            => "the archive with the PTX of {kernel} {} is corrupt", Capability(capability);
        /// The kernel may not run on devices of this compute capability.
        Capability { kernel: &'static str, capability: u32 }
            => "there is no PTX of {kernel} {}", Capability(capability);
        /// An allocation failed, on the device or on the host, or no thread could be started.
        OutOfMemory {
            /// The requested bytes; 0 for a thread.
            bytes: u64,
        } => "an allocation of {bytes} bytes failed";
        /// Another failure of the driver, which every call that returns a `Result` may report. The next call of any
        /// kind returns an asynchronous failure.
        Driver {
            /// The driver's function.
            call: &'static str,
            code: u32,
        } => "{call} failed with code {code}";
        /// A number is above a limit.
        Limit { what: Limit, value: u64, max: u64 } => "{value} {what} are above the limit of {max}";
        /// The page size does not divide a group's chunk size, so some chunks would begin inside a page.
        ChunkPages {
            /// Number of tokens of a chunk.
            chunk: u32,
            page_size: u32,
        } => "pages of {page_size} tokens do not divide chunks of {chunk} tokens";
        /// No group of the pool reads chunks of this size, or the pool has latent rows, which have no kernel for
        /// chunks.
        Chunk { chunk: u32 } => "no group of the pool has a kernel for chunks of {chunk} tokens";
        /// The scales do not fit the pool.
        Scales(error: ScaleError) => "{error}";
        /// Rows have another type than the pool, which is not quantised.
        RowsDtype { rows: Dtype, pool: KvDtype } => "rows of {rows:?} do not fit a pool of {pool:?}";
        /// An argument at a raw address has another element type than the call expects. `None` stands for positions.
        Element { operand: Operand, actual: Option<Dtype>, wanted: Option<Dtype> }
            => "{operand} has elements of type {} where {} is expected", ElementName(actual), ElementName(wanted);
        /// The stream is `CU_STREAM_PER_THREAD` (handle 2), which differs between threads and cannot order work.
        PerThreadStream => "stream 2 is a different stream in each thread";
        /// No kernel supports the shape of the pool.
        PoolShape { shape: KvShape } => "there are no kernels for pools of {shape:?}";
        /// The memory that the host gave cannot be the pool.
        Given(error: GivenError) => "{error}";
        /// The label channels do not fit the pool.
        Labels(error: LabelError) => "{error}";
        /// No kernel supports labels in the pool, or lists over it: latent rows, fp8, f32, or at least 2^32 - 1 slots.
        Lists { dtype: KvDtype } => "there are no kernels for selections over this pool of {dtype:?}";
        /// Pages of the two pools have different sizes or pieces.
        PageShape => "the two pools' pages differ in shape";
        /// The bytes of pages have different meanings in the two pools: see
        /// [`PoolLayout::page_fingerprint`](crate::layout::PoolLayout::page_fingerprint).
        PageFingerprint { source: u64, target: u64 }
            => "pages of fingerprint {source:#x} do not fit those of {target:#x}";
        /// A pool, rows or a stream belong to another device than the backend.
        OtherDevice { ordinal: u32 } => "a pool, rows or a stream are on another device, {ordinal}";
        /// A captured copy uses a page with an unfinished save or load, for which a capture cannot wait.
        PageInUse { page: u32 } => "a save or load of page {page} is not done";
        /// The swap page is not pinned yet.
        NotPinned {
            page: SwapPageId,
            /// Number of pinned pages.
            ready: u32,
        } => "swap page {} is not among the {ready} that are pinned", page.raw();
        /// The machine, or the process's container, has too little memory for the swap pages.
        SwapMemory {
            /// Bytes of all swap pages.
            bytes: u64,
            available: u64,
        } => "swap pages of {bytes} bytes are above the {available} available bytes";
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
        } => "the driver pinned {pinned} of {bytes} bytes, then failed with code {code}{}", LockedMemory(limit);
        /// A kv head has more query heads than kernels support: 16, or 128 for latent rows.
        Heads { q_heads: u32, kv_heads: u32 } => "{q_heads} query heads cannot share {kv_heads} kv heads";
        /// No kernel supports a scale of 0.
        ZeroScale => "no attention kernel takes a scale of 0";
        /// No kernel supports the head_dim. `ptx/README.md` lists those of 16-bit rows; attention with f32 rows
        /// supports multiples of 32 up to 256.
        HeadDim { head_dim: u32 } => "there is no attention kernel for head_dim {head_dim}";
        /// The address or stride of rows is not a multiple of the kernel's access size.
        RowsAlignment {
            /// Required alignment in bytes.
            align: u32,
        } => "the rows' address or stride is not a multiple of {align} bytes";
        /// During a capture, a call would have to send its plan to the device. Begin or stage the plan before the
        /// capture.
        NotStaged { step: StepId } => "the plan of step {} was not staged before the capture", step.raw();
        /// The states of a plan were to be copied during a capture. A replay would copy the same pages again. Copy them
        /// before the replay.
        CapturedStates { step: StepId } => "the states of step {} were to be copied in a capture", step.raw();
        /// During a capture, a call needed a kernel that is not compiled, a variant of attention without memory, or a
        /// save or load of pages. [`prepare`](super::Cuda::prepare) compiles kernels.
        NotPrepared => "this variant of attention or copy was not prepared before the capture";
    }
}

displayed! {
    /// The reason why memory of the host cannot be a pool.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    #[non_exhaustive]
    pub enum GivenError {
        /// A region begins at address 0 or has no bytes.
        Empty { address: u64, bytes: u64 } => "a region of {} at address {address:#x} is empty", Count(bytes, "byte");
        /// A region's end does not fit 64 bits.
        Wraps { address: u64, bytes: u64 }
            => "a region of {} at address {address:#x} exceeds 64 bits", Count(bytes, "byte");
        /// The driver has no memory at the address, which may have been freed.
        NotAllocated { address: u64 } => "the driver has no memory at address {address:#x}";
        /// The pool has other planes than K and V, such as latent rows, labels or scales by token.
        Planes { planes: usize }
            => "given memory has planes K and V alone, but the pool has {} of other contents", Count(planes, "plane");
        /// Groups of the pool have their own shapes.
        Shapes { groups: u32 } => "given memory has one shape, but the pool's {groups} groups have several";
        /// Layers keep a state, whose pages must be contiguous.
        States => "given memory has no states, but layers of the pool keep them";
        /// A head of K or V is not a multiple of 16 bytes.
        HeadBytes { bytes: u64 } => "a head of {} is not a multiple of 16 bytes", Count(bytes, "byte");
        /// The given layers are not the layers of the pool, or with groups those of group 0.
        Layers { actual: usize, wanted: u32 } => "{} given where the pool has {wanted}", Count(actual, "layer");
        /// A plane names a region that was not given.
        Region { region: usize, regions: usize } => "region {region} is not among {}", Count(regions, "region");
        /// An address or a stride is not a multiple of 16 bytes.
        Alignment { value: u64 } => "the address or stride {value:#x} is not a multiple of 16 bytes";
        /// A stride is smaller than the bytes that it passes, so heads overlap.
        Stride { stride: u64, bytes: u64 }
            => "a stride of {} is below the {bytes} that it passes", Count(stride, "byte");
        /// A stride of slots or heads does not fit 32 bits.
        WideStride { stride: u64 } => "a stride of {stride} bytes from slot to slot or head to head exceeds 32 bits";
        /// A plane ends after its region. An end above 64 bits counts as `u64::MAX`.
        End { layer: u32, plane: PlaneName, end: u64, bytes: u64 }
            => "{plane:?} of layer {layer} ends at byte {end} of a region of {}", Count(bytes, "byte");
        /// Two planes have bytes in common.
        Overlap { layers: [u32; 2], planes: [PlaneName; 2] }
            => "{:?} of layer {} overlaps {:?} of layer {}", planes[0], layers[0], planes[1], layers[1];
    }
}

impl std::error::Error for GivenError {}

displayed! {
    /// A number that the backend or its kernels limit.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    #[non_exhaustive]
    pub enum Limit {
        /// Rows of a step: [`CudaOptions::max_step_rows`](super::CudaOptions::max_step_rows).
        StepRows => "rows of a step";
        /// Tokens that the rows of a step see together, with an overhead for each row.
        SeenTokens => "tokens that the rows of a step see together";
        /// Tokens that rows of one new token see together, rounded up for each row:
        /// [`CudaOptions::select_tokens`](super::CudaOptions::select_tokens).
        SelectTokens => "tokens of a selection";
        /// Bytes of a page, or of a token's slot in all layers, that a kernel copies at once.
        PageBytes => "bytes of a page or slot";
        /// Bytes from one row of K or V to the next.
        RowStride => "bytes from row to row of K or V";
        /// Tokens of a page table row, for the pool's page size.
        RowTokens => "tokens of a page table row";
        /// Directory words of the page tables, in a pool with chunks.
        DirectoryWords => "directory words of the page tables";
        /// KV heads of a pool with 16-bit rows.
        KvHeads => "kv heads";
        /// Variants of attention. Variants differ in shape, query heads, window, chunk, list length or the sign of the
        /// scale.
        Variants => "variants of attention";
    }
}

impl Limit {
    /// Rejects a value above the maximum.
    pub(super) fn check(self, value: u64, max: u64) -> Result<(), CudaError> {
        if value <= max { Ok(()) } else { Err(CudaError::Limit { what: self, value, max }) }
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

/// The limit on locked memory for messages, if there is one.
struct LockedMemory(Option<u64>);

impl fmt::Display for LockedMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.map_or(Ok(()), |limit| write!(f, "; RLIMIT_MEMLOCK is {limit} bytes"))
    }
}

impl std::error::Error for CudaError {}

wraps_errors!(CudaError: Plan(PlanError), Scales(ScaleError), Labels(LabelError), Given(GivenError));

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
