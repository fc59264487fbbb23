//! The kernels of `ptx/src`, their parameters (the structs of `ptx/src/params.cuh`), and their launches.
//!
//! `tests/common/twin.rs` computes the same as most of them in Rust.

pub(super) mod table;

use std::marker::PhantomData;

use bytemuck::{Pod, Zeroable};
pub use kvarena::backend::cuda::Launch;
use kvarena::backend::cuda::{Function, Gpu, Kernel as Entry};

use super::error::GpuError;

macro_rules! params {
    ($($(#[$doc:meta])* $name:ident $bytes:literal { $($field:ident: $type:ty),* $(,)? })*) => {
        $(
            $(#[$doc])*
            #[derive(Clone, Copy, Default, PartialEq, Debug, Pod, Zeroable)]
            #[repr(C)]
            #[allow(missing_docs)] // documented in ptx/src/params.cuh
            pub struct $name { $(pub $field: $type),* }
            const _: () = assert!(size_of::<$name>() == $bytes);
        )*
    };
}

params! {
    /// A token to sample. Kernels read it to choose the token, or to gather its row of x.
    DeviceDraw 32 { row: u32, inverse_temperature: f32, top_p: f32, top_k: u32, key: u64, shape: u64 }
    /// The edits of a draw's logits, and its min-p.
    DeviceShape 16 { start: u32, count: u32, only: u32, depth: f32 }
    /// Parameters of `load_step`.
    LoadStepParams 32 {
        source: u64, target: u64, first: u32, second_at: u32, second: u32, reserved: u32,
    }
    /// Parameters of `embed`.
    EmbedParams 64 {
        table: u64, tokens: u64, sampled: u64, x: u64, weight: u64, normed: u64, hidden: u32, eps: f32,
        scale: f32, reserved: u32,
    }
    /// Parameters of `add_bias`.
    BiasParams 24 { y: u64, bias: u64, width: u32, reserved: u32 }
    /// Parameters of `norm_add`.
    NormAddParams 32 { x: u64, y: u64, weight: u64, hidden: u32, eps: f32 }
    /// An expert of a token, as `route` writes it.
    Route 8 { expert: u32, weight: f32 }
    /// Parameters of `route`.
    RouteParams 48 {
        x: u64, weight: u64, bias: u64, routes: u64, hidden: u32, experts: u32, per_token: u32, reserved: u32,
    }
    /// Parameters of `experts_up` and `experts_down`.
    ExpertsParams 56 {
        x: u64, weight: u64, bias: u64, routes: u64, y: u64, ins: u32, outs: u32, per_token: u32, add: u32,
    }
    /// Parameters of `rms_norm`.
    NormParams 40 { x: u64, weight: u64, normed: u64, draws: u64, hidden: u32, eps: f32 }
    /// Parameters of `silu_mul` and `gelu_mul`.
    SiluMulParams 24 { gate_up: u64, out: u64, width: u32, reserved: u32 }
    /// Parameters of `delta_conv`.
    DeltaConvParams 80 {
        x: u64, weight: u64, out: u64, states: u64, stride: u64, reads: u64, writes: u64, starts: u64,
        width: u32, channels: u32, rows: u32, tile: u32,
    }
    /// Parameters of `delta_update_*`.
    DeltaUpdateParams 112 {
        x: u64, a: u64, b: u64, rate: u64, bias: u64, states: u64, stride: u64, reads: u64, writes: u64, starts: u64,
        out: u64, width: u32, channels: u32, key_heads: u32, value_heads: u32, value_dim: u32, scale: f32,
    }
    /// Parameters of `delta_gate`.
    DeltaGateParams 48 {
        x: u64, z: u64, weight: u64, tokens: u32, width: u32, value_heads: u32, value_dim: u32, eps: f32, reserved: u32,
    }
    /// Parameters of `gate`.
    GateParams 24 { x: u64, gates: u64, width: u32, stride: u32 }
    /// Parameters of `sample` and `sample_filter`. Their logits must not be NaN. Finite weights give finite logits,
    /// unless a sum exceeds bf16's range; no kernel checks this. `sample` chooses a positive NaN before all numbers.
    /// [`Sampling::choose`](crate::sample::Sampling::choose) and `sample_shaped` skip NaN.
    SampleParams 64 {
        logits: u64, draws: u64, thresholds: u64, best: u64, counters: u64, sampled: u64, host: u64,
        vocab: u32, first: u32,
    }
    /// Parameters of `sample_shaped`.
    ShapedParams 56 {
        logits: u64, draws: u64, shapes: u64, edits: u64, sampled: u64, host: u64, vocab: u32, first: u32,
    }
    /// Parameters of `sum_ranks`.
    SumRanksParams 112 {
        x: u64, y: u64, inboxes: [u64; RANKS_MAX], turns: u64, reserved: u64,
        units: u32, capacity: u32, rank: u32, ranks: u32,
    }
    /// Parameters of `fill`.
    FillParams 32 { out: u64, count: u64, seed: u64, scale: f32, offset: f32 }
    /// Parameters of `skinny_*`.
    SkinnyParams 72 {
        weight: u64, x: u64, y: u64, norm: u64, draws: u64, next: u64,
        outs: u32, ins: u32, tokens: u32, mode: u32, eps: f32, next_lines: u32,
    }
    /// Parameters of `fold`.
    FoldParams 32 { matrix: u64, weight: u64, count: u64, cols: u32, reserved: u32 }
    /// Parameters of `gemm_*`.
    GemmParams 320 {
        weight: TensorMap, x: TensorMap, y: u64, outs: u32, ins: u32, tokens: u32, mode: u32, norm: u32, eps: f32,
        stages: u32, reserved: [u32; 7],
    }
}

/// A tensor map of a matrix, for the TMA.
#[derive(Clone, Copy, Default, PartialEq, Debug, Pod, Zeroable)]
#[repr(C, align(64))]
#[allow(missing_docs)] // documented in ptx/src/params.cuh
pub struct TensorMap {
    pub words: [u64; 16],
}

/// The skinny kernels, and the number of tiles (eight rows of the matrix) that a block of each computes.
pub const SKINNY: [(&Entry, usize); 6] = [
    (table::SKINNY_1_2, 1),
    (table::SKINNY_1_4, 1),
    (table::SKINNY_2_1, 2),
    (table::SKINNY_2_2, 2),
    (table::SKINNY_4_1, 4),
    (table::SKINNY_4_2, 4),
];

/// Maximum number of experts that `route` supports; equals the constant of ptx/src/params.cuh.
pub const ROUTED_MAX: usize = 256;

/// The largest vocabulary that `sample_shaped` supports; equals the constant of ptx/src/params.cuh.
pub const SHAPED_VOCAB_MAX: usize = 327680;

/// Maximum number of blocks of `sum_ranks`; equals the constant of ptx/src/params.cuh.
pub const SUM_BLOCKS: usize = 64;
/// Maximum number of ranks; equals the constant of ptx/src/params.cuh.
pub const RANKS_MAX: usize = 8;

/// The operation of a product on its sums.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ProductMode {
    /// y = sum
    Set = 0,
    /// y += sum
    Add = 1,
    /// y = silu(gate) * up
    Silu = 2,
}

/// A kernel on the device that takes a `P`.
#[derive(Debug)]
pub struct Kernel<P> {
    function: Function,
    params: PhantomData<fn(P)>,
}

impl<P> Kernel<P> {
    fn open(gpu: &Gpu, kernel: &'static Entry) -> Result<Self, GpuError> {
        Ok(Self { function: gpu.compile(kernel)?, params: PhantomData })
    }
}

impl<P: Pod> Kernel<P> {
    /// Launches the kernel without waiting.
    ///
    /// # Safety
    /// Grid, block and parameters meet the kernel's requirements (see its source), and the addresses are valid for its
    /// accesses until it is done. The stream lives, and its context is current.
    pub unsafe fn launch(&self, stream: u64, grid: (u32, u32), block: u32, params: &P) -> Result<(), GpuError> {
        // SAFETY: the caller guarantees the conditions.
        unsafe { self.launch_as(stream, Launch { grid, block, shared: 0, cluster: 1 }, params) }
    }

    /// Launches the kernel with dynamic shared memory and clusters.
    ///
    /// # Safety
    /// See [`Kernel::launch`].
    pub unsafe fn launch_as(&self, stream: u64, launch: Launch, params: &P) -> Result<(), GpuError> {
        // SAFETY: the function takes one `P`; the caller guarantees the rest.
        Ok(unsafe { self.function.launch(stream, launch, params) }?)
    }
}

/// A kernel of products, and the tile of a CTA.
#[derive(Clone, Copy, Debug)]
pub struct GemmKernel {
    /// Entry of the kernel.
    pub entry: &'static Entry,
    /// Rows of x.
    pub tokens: usize,
    /// Rows of the matrix.
    pub outs: usize,
}

const fn gemm(entry: &'static Entry, tokens: usize, outs: usize) -> GemmKernel {
    GemmKernel { entry, tokens, outs }
}

/// All kernels of `ptx/src/gemm_sm90a.cu`.
pub const GEMMS: [GemmKernel; 6] = [
    gemm(table::GEMM_16_64, 16, 64),
    gemm(table::GEMM_16_128, 16, 128),
    gemm(table::GEMM_32_64, 32, 64),
    gemm(table::GEMM_32_128, 32, 128),
    gemm(table::GEMM_64_64, 64, 64),
    gemm(table::GEMM_64_128, 64, 128),
];

macro_rules! kernels {
    ($($field:ident: $params:ident = $entry:ident,)*) => {
        /// All kernels.
        #[derive(Debug)]
        #[allow(missing_docs)] // each field has the name of its kernel in ptx/
        pub struct Kernels {
            $(pub $field: Kernel<$params>,)*
            /// Kernels of [`SKINNY`], in its order.
            pub skinny: Vec<Kernel<SkinnyParams>>,
            /// Kernels of [`GEMMS`], in its order; empty if the device does not support them.
            pub gemm: Vec<Kernel<GemmParams>>,
        }

        impl Kernels {
            /// Opens all kernels that the device supports.
            pub(super) fn open(gpu: &Gpu) -> Result<Self, GpuError> {
                let runs = |kernel: &&Entry| kernel.runs_on(gpu.capability());
                gpu.compile_all(&table::KERNELS.iter().filter(runs).collect::<Vec<_>>())?;
                let gemms = GEMMS.iter().filter(|kernel| runs(&kernel.entry));
                Ok(Self {
                    $($field: Kernel::open(gpu, table::$entry)?,)*
                    skinny: SKINNY.iter().map(|(entry, _)| Kernel::open(gpu, entry)).collect::<Result<_, _>>()?,
                    gemm: gemms.map(|kernel| Kernel::open(gpu, kernel.entry)).collect::<Result<_, _>>()?,
                })
            }
        }
    };
}

kernels! {
    load_step: LoadStepParams = LOAD_STEP,
    embed: EmbedParams = EMBED,
    rms_norm: NormParams = RMS_NORM,
    silu_mul: SiluMulParams = SILU_MUL,
    gelu_mul: SiluMulParams = GELU_MUL,
    add_bias: BiasParams = ADD_BIAS,
    norm_add: NormAddParams = NORM_ADD,
    route: RouteParams = ROUTE,
    experts_up: ExpertsParams = EXPERTS_UP,
    experts_down: ExpertsParams = EXPERTS_DOWN,
    delta_conv: DeltaConvParams = DELTA_CONV,
    delta_update_32: DeltaUpdateParams = DELTA_UPDATE_32,
    delta_update_128: DeltaUpdateParams = DELTA_UPDATE_128,
    delta_gate: DeltaGateParams = DELTA_GATE,
    gate: GateParams = GATE,
    sample: SampleParams = SAMPLE,
    sample_filter: SampleParams = SAMPLE_FILTER,
    sample_shaped: ShapedParams = SAMPLE_SHAPED,
    sum_ranks: SumRanksParams = SUM_RANKS,
    fill: FillParams = FILL,
    fold: FoldParams = FOLD,
}
