//! Attention over latent rows: which pools are served, the memory that each variant of it keeps, and its launches.
//!
//! On compute capability 9.0 16-bit pools have a kernel whose work is split on the host; all others have a plain one.
//!
//! Not here: the split (`split/latent.rs`), the kernels (`ptx/attend_latent*`).

use super::error::CudaError;
use super::gpu::Gpu;
use super::image::StepLimits;
use super::kernels::{Attention, Kernel};
use super::launch::Start;
use super::memory::DeviceBuffer;
use super::params::AttendParams;
use super::raw::{RawStream, is_capturing};
use super::ring::{Load, UploadRing};
use super::split::{LATENT_ROWS, LatentSplit};
use crate::backend::Attend;
use crate::layout::{KvDtype, KvShape, PoolLayout};
use crate::plan::BatchPlan;

/// Numbers of a row that kernels serve.
const SERVED: KvShape = KvShape::Latent { rank: 512, rope: 64 };
/// Variants that there may be.
const VARIANTS_MAX: usize = 8;
/// Most query heads over latent rows.
pub(super) const LATENT_HEADS_MAX: u32 = 128;

macro_rules! plain {
    ($name:literal) => {
        Attention {
            kernel: Kernel::new($name, include_str!(concat!("../../../ptx/", $name, ".ptx")), 0),
            threads: 128,
        }
    };
}

const F32: Attention = plain!("attend_latent_f32");
const BF16: Attention = plain!("attend_latent_bf16");
const F16: Attention = plain!("attend_latent_f16");

/// Refuses latent rows of other lengths than kernels serve.
pub(super) fn check_shape(layout: &PoolLayout) -> Result<(), CudaError> {
    let shape = layout.shape();
    let served = !layout.is_latent() || shape == SERVED;
    if served { Ok(()) } else { Err(CudaError::PoolShape { shape }) }
}

/// The kernel of every GPU.
fn plain(dtype: KvDtype) -> Attention {
    match dtype {
        KvDtype::F32 => F32,
        KvDtype::Bf16 => BF16,
        KvDtype::F16 => F16,
        KvDtype::Fp8E4M3 => unreachable!("latent rows are not quantised"),
    }
}

/// The kernel of compute capability 9.0, and that which joins what it left in parts.
fn hopper(dtype: KvDtype) -> Option<[Attention; 2]> {
    macro_rules! of {
        ($name:literal, $shared:literal, $threads:literal) => {
            Attention {
                kernel: Kernel::new(
                    $name,
                    include_str!(concat!("../../../ptx/", $name, ".ptx")),
                    $shared,
                ),
                threads: $threads,
            }
        };
    }
    match dtype {
        KvDtype::Bf16 => Some([
            of!("attend_latent_bf16_sm90a", 229_376, 384),
            of!("attend_latent_join_bf16_sm90a", 0, 128),
        ]),
        KvDtype::F16 => Some([
            of!("attend_latent_f16_sm90a", 229_376, 384),
            of!("attend_latent_join_f16_sm90a", 0, 128),
        ]),
        KvDtype::F32 | KvDtype::Fp8E4M3 => None,
    }
}

/// One variant of attention over latent rows, where a step is split for it.
#[derive(Debug)]
struct Variant {
    /// Query heads, and window (0: none).
    key: (u32, u32),
    kernels: [Attention; 2],
    split: LatentSplit,
    /// Items of the staged step that were cut.
    cut: u32,
    /// The plan on the device.
    plan: DeviceBuffer,
    /// `[slots, 64, 512]`, and what the sums of each row are relative to, `[slots, 64, 2]`.
    partial: DeviceBuffer,
    tops: DeviceBuffer,
}

/// The variants met so far.
#[derive(Debug, Default)]
pub(super) struct LatentVariants {
    list: Vec<Variant>,
}

impl LatentVariants {
    pub(super) fn len(&self) -> usize {
        self.list.len()
    }

    /// Bytes of the largest plan.
    pub(super) fn plan_bytes(gpu: &Gpu, layout: &PoolLayout, limits: StepLimits) -> usize {
        if !layout.is_latent() {
            return 0;
        }
        let sizes = (limits.rows, limits.tokens);
        4 * LatentSplit::words_max(LATENT_HEADS_MAX, gpu.multiprocessors(), sizes)
    }

    /// The variant's index, making its memory where it is new; nothing where the plain kernel serves.
    pub(super) fn prepare(
        &mut self,
        gpu: &Gpu,
        dtype: KvDtype,
        attend: &Attend,
        limits: StepLimits,
        stream: RawStream,
    ) -> Result<Option<usize>, CudaError> {
        let Some(kernels) = hopper(dtype).filter(|_| gpu.capability() == 90) else {
            gpu.load(&plain(dtype).kernel)?;
            return Ok(None);
        };
        let key = (attend.q_heads, attend.window.unwrap_or(0));
        if let Some(index) = self.list.iter().position(|variant| variant.key == key) {
            return Ok(Some(index));
        }
        if self.list.len() == VARIANTS_MAX {
            return Err(CudaError::Variants { max: VARIANTS_MAX });
        }
        if is_capturing(stream)? {
            return Err(CudaError::NotPrepared);
        }
        for Attention { kernel, .. } in &kernels {
            gpu.load(kernel)?;
        }
        let ctas = gpu.multiprocessors();
        let split = LatentSplit::new(key.0, key.1, ctas, (limits.rows, limits.tokens));
        let rows = u64::from(split.slots()) * u64::from(LATENT_ROWS);
        let words =
            LatentSplit::words_max(key.0, ctas, (limits.rows, limits.tokens)).next_multiple_of(4);
        self.list.push(Variant {
            key,
            kernels,
            split,
            cut: 0,
            plan: DeviceBuffer::lasting(gpu, 4 * words as u64)?,
            partial: DeviceBuffer::lasting(gpu, rows * 512 * 4)?,
            tops: DeviceBuffer::lasting(gpu, rows * 8)?,
        });
        Ok(Some(self.list.len() - 1))
    }

    /// Splits a step for every variant.
    pub(super) fn split(&mut self, plan: &BatchPlan<'_>) {
        for variant in &mut self.list {
            variant.cut = variant.split.plan(plan.rows);
        }
    }

    /// Sends the plans of the step that was split last.
    pub(super) fn send(
        &self,
        gpu: &Gpu,
        ring: &mut UploadRing,
        stream: RawStream,
    ) -> Result<(), CudaError> {
        for variant in &self.list {
            let bytes: &[u8] = bytemuck::cast_slice(variant.split.words());
            let mut upload = ring.acquire(gpu, stream)?;
            upload.bytes()[..bytes.len()].copy_from_slice(bytes);
            let (image_bytes, image) = (bytes.len(), variant.plan.address());
            let load = Load { image_bytes, image, writes_at: 0, writes: 0, words: 0 };
            upload.send(gpu, &load, stream)?;
        }
        Ok(())
    }

    /// Launches attention of the staged step; while capturing, all that a step can need.
    ///
    /// # Safety
    /// The addresses in `params` are those of rows for every token of the staged step.
    pub(super) unsafe fn launch(
        &self,
        gpu: &Gpu,
        index: usize,
        mut params: AttendParams,
        stream: RawStream,
    ) -> Result<(), CudaError> {
        let Variant { kernels: [main, join], split, cut, plan, partial, tops, .. } =
            &self.list[index];
        let ctas = gpu.multiprocessors();
        params.partial = partial.address();
        params.counters = tops.address();
        params.plan = plan.address() + 4 * split.lists_at() as u64;
        // SAFETY: the caller answers for the rows; plan and sums are this variant's, for this grid.
        unsafe {
            let threads = (main.threads, 1);
            gpu.launch(&main.kernel, (ctas, 1), threads, stream, &params, Start::InOrder)
        }?;
        if *cut == 0 && !is_capturing(stream)? {
            return Ok(());
        }
        params.plan = plan.address();
        // SAFETY: as above.
        unsafe {
            let threads = (join.threads, 1);
            gpu.launch(&join.kernel, (8 * ctas, 1), threads, stream, &params, Start::InOrder)
        }
    }
}

/// Launches the kernel of every GPU.
///
/// # Safety
/// The addresses in `params` are those of rows for every token of the staged step.
pub(super) unsafe fn launch_plain(
    gpu: &Gpu,
    dtype: KvDtype,
    params: &AttendParams,
    stream: RawStream,
) -> Result<(), CudaError> {
    let Attention { kernel, threads } = plain(dtype);
    let grid = (8 * gpu.multiprocessors(), 1);
    // SAFETY: the caller answers for the rows.
    unsafe { gpu.launch(&kernel, grid, (threads, 1), stream, params, Start::InOrder) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_are_launched_as_they_say() {
        for dtype in [KvDtype::F16, KvDtype::Bf16] {
            let [main, join] = hopper(dtype).expect("it has one");
            for Attention { kernel, threads } in [main, join, plain(dtype)] {
                let file = kernel.name.replace("_bf16", "_DTYPE").replace("_f16", "_DTYPE");
                let path = format!("{}/ptx/{file}.cu", env!("CARGO_MANIFEST_DIR"));
                let text = std::fs::read_to_string(path).expect("every kernel has a source");
                let bytes = match kernel.shared {
                    0 => "no".into(),
                    bytes => format!("{},{:03} bytes of", bytes / 1000, bytes % 1000),
                };
                let launch = format!("block {threads}, {bytes} dynamic shared memory");
                assert!(text.contains(&launch), "{}: {launch}", kernel.name);
                assert!(kernel.ptx.contains(&format!(".entry {}(", kernel.name)));
                assert!(kernel.ptx.contains(&format!(".maxntid {threads}, 1, 1")));
            }
        }
    }
}
