//! The products of `ptx/src/gemm_sm90a.cu`: the kernels, the implementations of a product, and their launch.
//!
//! `products/tuning.rs` chooses an implementation.

use std::ffi::c_void;

use cudarc::driver::sys;

use super::device::Device;
use super::error::{GpuError, driver};
use super::kernels::{GEMMS, GemmKernel, GemmParams, Launch, ProductMode, TensorMap};

/// Maximum bytes of dynamic shared memory of a CTA. The device allows 227 KiB together with the kernels' static shared
/// memory.
pub(super) const SHARED_MAX: usize = 224 << 10;
/// Maximum bytes of dynamic shared memory of a CTA if a multiprocessor runs three, two or one CTAs.
const BUDGETS: [usize; 3] = [72 << 10, 110 << 10, SHARED_MAX];
const STAGES_MAX: usize = 24;
/// Columns of a piece.
const PIECE: usize = 64;
/// Additional bytes of shared memory, because a kernel aligns the start of its memory to 1,024 bytes.
const SLACK: usize = 1024;
/// Maximum number of rows of x; more rows would read the matrix too often.
const ROWS_MAX: usize = 256;
/// Threads of a CTA that does not norm x.
const THREADS: u32 = 160;
/// Additional threads of a CTA that norms x.
const SQUARERS: u32 = 64;

/// An implementation of a product: a kernel, a split of the columns, and a length of the ring.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GemmMethod {
    /// Index in [`GEMMS`].
    pub kernel: usize,
    /// Number of CTAs that share the columns of a tile.
    pub split: usize,
    /// Number of pieces in the ring.
    pub stages: usize,
}

/// A product for these kernels.
#[derive(Clone, Copy, Debug)]
pub struct Gemm {
    /// `[outs, ins]`; silu: `[2, outs, ins]`.
    pub weight: u64,
    /// `[tokens, ins]`
    pub x: u64,
    /// `[tokens, outs]`
    pub y: u64,
    /// Columns of y.
    pub outs: usize,
    /// Columns of x.
    pub ins: usize,
    /// Rows of x and y.
    pub tokens: usize,
    /// The operation on the sums.
    pub mode: ProductMode,
    /// Epsilon of the norm of x before the product, an RMSNorm without a weight; `None`: no norm.
    pub norm: Option<f32>,
}

impl GemmMethod {
    /// Returns all implementations of a product of this many rows.
    pub fn all(outs: usize, ins: usize, rows: usize) -> Vec<Self> {
        let pieces = ins.div_ceil(PIECE);
        let mut methods = Vec::new();
        if rows > ROWS_MAX || !ins.is_multiple_of(8) || !outs.is_multiple_of(8) {
            return methods;
        }
        // Uses the kernels with the smallest `tokens` that holds all rows, or else with the largest.
        let tokens = GEMMS.iter().map(|kernel| kernel.tokens).find(|&tokens| rows <= tokens);
        let tokens = tokens.unwrap_or(GEMMS[GEMMS.len() - 1].tokens);
        for (index, kernel) in GEMMS.iter().enumerate() {
            let fits = tokens == kernel.tokens;
            for split in [1, 2, 4, 8].into_iter().filter(|&split| fits && split <= pieces) {
                let most = pieces.div_ceil(split).min(STAGES_MAX);
                for budget in BUDGETS {
                    let stages = ((budget - SLACK) / kernel.stage()).min(most);
                    let method = Self { kernel: index, split, stages };
                    // The kernel releases a piece after the next one has arrived, so several pieces need two stages.
                    let runs = stages >= 2 || stages == most;
                    if runs && method.shared() <= budget && !methods.contains(&method) {
                        methods.push(method);
                    }
                }
            }
        }
        methods
    }

    /// Returns whether an implementation can be fast: it has enough CTAs to occupy most of the device and, if it splits
    /// the columns, not too many CTAs.
    pub fn is_sensible(self, mode: ProductMode, outs: usize) -> bool {
        let ctas = self.ctas(mode, outs);
        ctas >= 60 && (self.split == 1 || ctas <= 800)
    }

    /// Returns the name of the implementation, for reports.
    pub fn name(self) -> String {
        let Self { kernel, split, stages } = self;
        format!("{}, split {split}, {stages} stages", GEMMS[kernel].entry.name())
    }

    fn ctas(self, mode: ProductMode, outs: usize) -> usize {
        self.split * (matrices(mode) * outs).div_ceil(GEMMS[self.kernel].outs)
    }

    fn shared(self) -> usize {
        let kernel = GEMMS[self.kernel];
        let sums = 4 * kernel.tokens * (kernel.outs + 4);
        (self.stages * kernel.stage()).max(sums) + SLACK
    }

    /// Submits a product.
    ///
    /// # Safety
    /// The addresses are valid for that many rows until the work is done.
    pub unsafe fn launch(self, device: &Device, gemm: &Gemm) -> Result<(), GpuError> {
        let Gemm { weight, x, y, outs, ins, tokens, mode, norm } = *gemm;
        let kernel = GEMMS[self.kernel];
        let matrices = matrices(mode) as u64;
        let row = 2 * ins as u64;
        let weights = Tensor {
            address: weight,
            dims: [ins as u64, 8, matrices, outs as u64 / 8],
            strides: [row, outs as u64 * row, 8 * row],
            window: [PIECE as u32, 8, matrices as u32, (kernel.outs / 8) as u32 / matrices as u32],
        };
        let rows = Tensor {
            address: x,
            dims: [ins as u64, tokens as u64],
            strides: [row],
            window: [PIECE as u32, kernel.tokens as u32],
        };
        let params = GemmParams {
            weight: weights.map()?,
            x: rows.map()?,
            y,
            outs: outs as u32,
            ins: ins as u32,
            tokens: tokens as u32,
            mode: mode as u32,
            norm: u32::from(norm.is_some()),
            eps: norm.unwrap_or_default(),
            stages: self.stages as u32,
            reserved: [0; 7],
        };
        let launch = Launch {
            grid: (self.ctas(mode, outs) as u32, tokens.div_ceil(kernel.tokens) as u32),
            block: if norm.is_some() { THREADS + SQUARERS } else { THREADS },
            shared: self.shared() as u32,
            cluster: self.split as u32,
        };
        // SAFETY: grid, block, clusters and shared memory meet the requirements in the kernel's source; the caller
        // guarantees the addresses.
        unsafe { device.kernels.gemm[self.kernel].launch_as(device.raw(), launch, &params) }
    }
}

impl GemmKernel {
    /// Returns the bytes of a stage: a piece of the matrix and a piece of x.
    fn stage(&self) -> usize {
        2 * PIECE * (self.outs + self.tokens)
    }
}

fn matrices(mode: ProductMode) -> usize {
    if mode == ProductMode::Silu { 2 } else { 1 }
}

/// A bf16 tensor in device memory, innermost dimension first. The TMA copies boxes of it, with zeros past its ends.
struct Tensor<const DIMS: usize, const STRIDES: usize> {
    address: u64,
    dims: [u64; DIMS],
    /// Strides in bytes of all dimensions except the innermost.
    strides: [u64; STRIDES],
    window: [u32; DIMS],
}

impl<const DIMS: usize, const STRIDES: usize> Tensor<DIMS, STRIDES> {
    fn map(&self) -> Result<TensorMap, GpuError> {
        let mut map = sys::CUtensorMap { opaque: [0; 16] };
        let steps = [1_u32; DIMS];
        // SAFETY: all arrays live during the call and have as many elements as there are dimensions (strides: 1 less).
        let result = unsafe {
            sys::cuTensorMapEncodeTiled(
                &mut map,
                sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                DIMS as u32,
                self.address as usize as *mut c_void,
                self.dims.as_ptr(),
                self.strides.as_ptr(),
                self.window.as_ptr(),
                steps.as_ptr(),
                sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
                sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        };
        driver("cuTensorMapEncodeTiled", result)?;
        Ok(TensorMap { words: map.opaque })
    }
}
