//! The kernels of `ptx/` and what they are given: the structs of `ptx/params.cuh`, and how each is launched.
//!
//! Not here: what they compute (`ptx/*.cu`, `twin.rs`).

use std::ffi::{CString, c_void};
use std::marker::PhantomData;
use std::ptr::{from_ref, null_mut};

use bytemuck::{Pod, Zeroable};
use cudarc::driver::sys;

use super::error::{GpuError, driver};
use super::gemm::{GEMMS, SHARED_MAX};

macro_rules! params {
    ($($(#[$doc:meta])* $name:ident $bytes:literal { $($field:ident: $type:ty),* $(,)? })*) => {
        $(
            $(#[$doc])*
            #[derive(Clone, Copy, Default, PartialEq, Debug, Pod, Zeroable)]
            #[repr(C)]
            #[allow(missing_docs)] // told in ptx/params.cuh
            pub struct $name { $(pub $field: $type),* }
            const _: () = assert!(size_of::<$name>() == $bytes);
        )*
    };
}

params! {
    /// A token to sample, as `sample` and the kernels that gather its row know it.
    DeviceDraw 32 { row: u32, inverse_temperature: f32, top_p: f32, top_k: u32, key: u64, reserved: u64 }
    /// Of `load_step`.
    LoadStepParams 32 {
        source: u64, target: u64, first: u32, second_at: u32, second: u32, reserved: u32,
    }
    /// Of `embed`.
    EmbedParams 56 {
        table: u64, tokens: u64, sampled: u64, x: u64, weight: u64, normed: u64, hidden: u32, eps: f32,
    }
    /// Of `rms_norm`.
    NormParams 40 { x: u64, weight: u64, normed: u64, draws: u64, hidden: u32, eps: f32 }
    /// Of `rope_store_d*`.
    RopeStoreParams 112 {
        qkv: u64, positions: u64, slots: u64, q_norm: u64, k_norm: u64, frequencies: u64,
        k_pool: u64, v_pool: u64, page_stride: u64, slot_stride: u64,
        slot_bytes: u32, page_size: u32, tokens: u32, q_heads: u32, kv_heads: u32, heads_each: u32,
        eps: f32, reserved: u32,
    }
    /// Of `silu_mul`.
    SiluMulParams 24 { gate_up: u64, out: u64, width: u32, reserved: u32 }
    /// Of `sample` and `sample_filter`.
    SampleParams 64 {
        logits: u64, draws: u64, thresholds: u64, best: u64, counters: u64, sampled: u64, host: u64,
        vocab: u32, first: u32,
    }
    /// Of `sum_ranks`.
    SumRanksParams 112 {
        x: u64, y: u64, inboxes: [u64; RANKS_MAX], turns: u64, reserved: u64,
        units: u32, capacity: u32, rank: u32, ranks: u32,
    }
    /// Of `fill`.
    FillParams 32 { out: u64, count: u64, seed: u64, scale: f32, offset: f32 }
    /// Of `skinny_*`.
    SkinnyParams 72 {
        weight: u64, x: u64, y: u64, norm: u64, draws: u64, next: u64,
        outs: u32, ins: u32, tokens: u32, mode: u32, eps: f32, next_lines: u32,
    }
    /// Of `fold`.
    FoldParams 32 { matrix: u64, weight: u64, count: u64, cols: u32, reserved: u32 }
    /// Of `gemm_*`.
    GemmParams 320 {
        weight: TensorMap, x: TensorMap, y: u64, outs: u32, ins: u32, tokens: u32, mode: u32, norm: u32, eps: f32,
        stages: u32, reserved: [u32; 7],
    }
}

/// What the copy engine knows of a matrix.
#[derive(Clone, Copy, Default, PartialEq, Debug, Pod, Zeroable)]
#[repr(C, align(64))]
#[allow(missing_docs)] // told in ptx/params.cuh
pub struct TensorMap {
    pub words: [u64; 16],
}

/// The skinny kernels, and how many tiles of eight columns of y a block of each makes.
pub const SKINNY: [(&str, usize); 6] = [
    ("skinny_1_2", 1),
    ("skinny_1_4", 1),
    ("skinny_2_1", 2),
    ("skinny_2_2", 2),
    ("skinny_4_1", 4),
    ("skinny_4_2", 4),
];

/// Most blocks of `sum_ranks`, and most ranks: as in ptx/params.cuh.
pub const SUM_BLOCKS: usize = 64;
/// As there.
pub const RANKS_MAX: usize = 8;

/// What a product does with its sums.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ProductMode {
    /// y = sum
    Set = 0,
    /// y += sum
    Add = 1,
    /// y = silu(gate) * up
    Silu = 2,
}

/// A launch's shape.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Launch {
    /// CTAs.
    pub grid: (u32, u32),
    /// Threads of a CTA.
    pub block: u32,
    /// Bytes of dynamic shared memory.
    pub shared: u32,
    /// CTAs of a cluster, side by side in x.
    pub cluster: u32,
}

/// A loaded kernel that takes a `P`.
#[derive(Debug)]
pub struct Kernel<P> {
    function: sys::CUfunction,
    /// Whether it waits by itself for the kernel before it, and may be set up while that one runs (programmatic dependent
    /// launch).
    pdl: bool,
    params: PhantomData<fn(P)>,
}

/// Comments in the PTX, and the instructions of compute capability 9.0 that they stand for (the core's
/// `ptx/pdl.cuh`).
const MARKS: [(&str, &str); 2] = [
    ("// pdl: wait", "griddepcontrol.wait;"),
    ("// pdl: launch dependents", "griddepcontrol.launch_dependents;"),
];

/// Has the driver compile a PTX file. It stays loaded, since graphs keep using it.
fn module(ptx: &str, capability: u32) -> Result<(sys::CUmodule, bool), GpuError> {
    let mut text = ptx.to_owned();
    let marked = capability >= 90 && text.contains(MARKS[0].0);
    if marked {
        text = text.replace(".target sm_80", ".target sm_90");
        for (mark, instruction) in MARKS {
            text = text.replace(mark, instruction);
        }
    }
    let pdl = text.contains(MARKS[0].1);
    let text = CString::new(text).expect("PTX is text");
    let mut module = null_mut();
    // SAFETY: `module` is valid memory for one handle, the text ends with a zero, and there are no options.
    let result = unsafe {
        let image = text.as_ptr().cast();
        sys::cuModuleLoadDataEx(&mut module, image, 0, null_mut(), null_mut())
    };
    driver("cuModuleLoadDataEx", result).map(|()| (module, pdl))
}

impl<P> Kernel<P> {
    fn load((module, pdl): (sys::CUmodule, bool), name: &str) -> Result<Self, GpuError> {
        let name = CString::new(name).expect("a name is text");
        let mut function = null_mut();
        // SAFETY: `function` is valid memory for one handle, the module is loaded, the name ends with a zero.
        let result = unsafe { sys::cuModuleGetFunction(&mut function, module, name.as_ptr()) };
        driver("cuModuleGetFunction", result)?;
        Ok(Self { function, pdl, params: PhantomData })
    }

    /// Lets launches ask for so much dynamic shared memory.
    fn with_shared(self, bytes: usize) -> Result<Self, GpuError> {
        use sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES as MOST;
        // SAFETY: the function is loaded.
        let result = unsafe { sys::cuFuncSetAttribute(self.function, MOST, bytes as i32) };
        driver("cuFuncSetAttribute", result).map(|()| self)
    }
}

impl<P: Pod> Kernel<P> {
    /// Launches it; nothing is waited for.
    ///
    /// # Errors
    /// The driver's.
    ///
    /// # Safety
    /// The kernel's needs (its source says which) are met by grid, block and parameters, whose addresses are valid for
    /// what it does until it is done. The stream lives, and its context is current.
    pub unsafe fn launch(
        &self,
        stream: u64,
        grid: (u32, u32),
        block: u32,
        params: &P,
    ) -> Result<(), GpuError> {
        // SAFETY: the caller's.
        unsafe { self.launch_as(stream, Launch { grid, block, shared: 0, cluster: 1 }, params) }
    }

    /// Launches it with shared memory and clusters of its own.
    ///
    /// # Errors
    /// The driver's.
    ///
    /// # Safety
    /// As [`Kernel::launch`].
    pub unsafe fn launch_as(
        &self,
        stream: u64,
        launch: Launch,
        params: &P,
    ) -> Result<(), GpuError> {
        use sys::CUlaunchAttributeID::{
            CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION as CLUSTER,
            CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION as PDL,
        };
        let Launch { grid, block, shared, cluster } = launch;
        let attribute = |id| sys::CUlaunchAttribute {
            id,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue { pad: [0; 64] },
        };
        let mut attributes = [attribute(PDL), attribute(CLUSTER)];
        attributes[0].value.programmaticStreamSerializationAllowed = 1;
        attributes[1].value.clusterDim.x = cluster;
        attributes[1].value.clusterDim.y = 1;
        attributes[1].value.clusterDim.z = 1;
        // Kernels without clusters need not know of them, nor devices.
        let own = &mut attributes[usize::from(!self.pdl)..if cluster > 1 { 2 } else { 1 }];
        let config = sys::CUlaunchConfig {
            gridDimX: grid.0,
            gridDimY: grid.1,
            gridDimZ: 1,
            blockDimX: block,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: shared,
            hStream: stream as usize as sys::CUstream,
            attrs: own.as_mut_ptr(),
            numAttrs: own.len() as u32,
        };
        let mut arguments = [from_ref(params).cast_mut().cast::<c_void>()];
        // SAFETY: config and attributes outlive the call; the function takes one `P` by value, which the driver copies
        // before it returns; the caller answers for the rest.
        let result = unsafe {
            sys::cuLaunchKernelEx(&config, self.function, arguments.as_mut_ptr(), null_mut())
        };
        driver("cuLaunchKernelEx", result)
    }
}

/// All of them.
#[derive(Debug)]
#[allow(missing_docs)] // by the names in ptx/
pub struct Kernels {
    pub load_step: Kernel<LoadStepParams>,
    pub embed: Kernel<EmbedParams>,
    pub rms_norm: Kernel<NormParams>,
    /// Of head_dim 64, 128 and 256.
    pub rope_store: [Kernel<RopeStoreParams>; 3],
    pub silu_mul: Kernel<SiluMulParams>,
    pub sample: Kernel<SampleParams>,
    pub sample_filter: Kernel<SampleParams>,
    pub sum_ranks: Kernel<SumRanksParams>,
    pub fill: Kernel<FillParams>,
    pub fold: Kernel<FoldParams>,
    /// As [`SKINNY`] lists them.
    pub skinny: Vec<Kernel<SkinnyParams>>,
    /// As [`GEMMS`] lists them; none where the device has not what they need.
    pub gemm: Vec<Kernel<GemmParams>>,
}

macro_rules! ptx {
    ($stem:literal) => {
        include_str!(concat!("../../ptx/", $stem, ".ptx"))
    };
}

impl Kernels {
    /// Loads all, for a device of this compute capability. Its context is current.
    pub(super) fn load(capability: u32) -> Result<Self, GpuError> {
        let load_step = module(ptx!("load_step"), capability)?;
        let norm = module(ptx!("norm"), capability)?;
        let rope = module(ptx!("rope_store"), capability)?;
        let silu = module(ptx!("silu_mul"), capability)?;
        let sample = module(ptx!("sample"), capability)?;
        let sum_ranks = module(ptx!("sum_ranks"), capability)?;
        let fill = module(ptx!("fill"), capability)?;
        let skinny = module(ptx!("skinny"), capability)?;
        let mut gemm = Vec::new();
        if capability == 90 {
            let loaded = module(ptx!("gemm_sm90a"), capability)?;
            for kernel in &GEMMS {
                gemm.push(Kernel::load(loaded, kernel.name)?.with_shared(SHARED_MAX)?);
            }
        }
        Ok(Self {
            load_step: Kernel::load(load_step, "load_step")?,
            embed: Kernel::load(norm, "embed")?,
            rms_norm: Kernel::load(norm, "rms_norm")?,
            rope_store: [
                Kernel::load(rope, "rope_store_d64")?,
                Kernel::load(rope, "rope_store_d128")?,
                Kernel::load(rope, "rope_store_d256")?,
            ],
            silu_mul: Kernel::load(silu, "silu_mul")?,
            sample: Kernel::load(sample, "sample")?,
            sample_filter: Kernel::load(sample, "sample_filter")?,
            sum_ranks: Kernel::load(sum_ranks, "sum_ranks")?,
            fill: Kernel::load(fill, "fill")?,
            fold: Kernel::load(fill, "fold")?,
            skinny: SKINNY
                .iter()
                .map(|(name, _)| Kernel::load(skinny, name))
                .collect::<Result<_, _>>()?,
            gemm,
        })
    }
}
