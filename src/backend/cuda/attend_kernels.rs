//! Which attention kernels serve a pool: by its rows and its head_dim, whether it holds fp8, whether lists are read,
//! and what only compute capability 9.0 runs.
//!
//! Not here: their memory and their launches (`attend.rs`), the kernels (`ptx/attend_*.cu`).

use super::error::CudaError;
use super::gpu::Gpu;
use super::kernels::Attention;
use super::launch::Start;
use super::params::{
    AttendFp8Params, AttendLatentFp8Params, AttendLatentRowsParams, AttendParams,
    AttendSelectedParams, LayerRope, LayerScales, Lists, RowBoxes,
};
use super::raw::RawStream;
use super::split::DECODE_ROWS;
use crate::layout::{Dtype, Scaling};

/// A kernel over pools that hold rows as they are, or over fp8, or over lists, or over latent rows of fp8 or for the
/// copy engine.
#[derive(Clone, Copy, Debug)]
pub(super) enum AttentionKernel {
    Plain(Attention),
    Fp8(Attention<AttendFp8Params>),
    Selected(Attention<AttendSelectedParams>),
    LatentFp8(Attention<AttendLatentFp8Params>),
    LatentRows(Attention<AttendLatentRowsParams>),
}

/// What some kernels take beside [`AttendParams`].
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Beside {
    pub scales: LayerScales,
    pub lists: Lists,
    pub rope: LayerRope,
    pub boxes: RowBoxes,
}

impl From<Attention> for AttentionKernel {
    fn from(attention: Attention) -> Self {
        Self::Plain(attention)
    }
}

impl From<Attention<AttendFp8Params>> for AttentionKernel {
    fn from(attention: Attention<AttendFp8Params>) -> Self {
        Self::Fp8(attention)
    }
}

impl From<Attention<AttendLatentFp8Params>> for AttentionKernel {
    fn from(attention: Attention<AttendLatentFp8Params>) -> Self {
        Self::LatentFp8(attention)
    }
}

impl From<Attention<AttendLatentRowsParams>> for AttentionKernel {
    fn from(attention: Attention<AttendLatentRowsParams>) -> Self {
        Self::LatentRows(attention)
    }
}

impl AttentionKernel {
    /// Blocks that one multiprocessor holds at a time.
    pub(super) fn resident(&self, gpu: &Gpu) -> Result<u32, CudaError> {
        match self {
            Self::Plain(Attention { kernel, threads }) => gpu.resident(kernel, *threads),
            Self::Fp8(Attention { kernel, threads }) => gpu.resident(kernel, *threads),
            Self::Selected(Attention { kernel, threads }) => gpu.resident(kernel, *threads),
            Self::LatentFp8(Attention { kernel, threads }) => gpu.resident(kernel, *threads),
            Self::LatentRows(Attention { kernel, threads }) => gpu.resident(kernel, *threads),
        }
    }

    /// Loads it now rather than at its first launch.
    pub(super) fn load(&self, gpu: &Gpu) -> Result<(), CudaError> {
        match self {
            Self::Plain(Attention { kernel, .. }) => gpu.load(kernel),
            Self::Fp8(Attention { kernel, .. }) => gpu.load(kernel),
            Self::Selected(Attention { kernel, .. }) => gpu.load(kernel),
            Self::LatentFp8(Attention { kernel, .. }) => gpu.load(kernel),
            Self::LatentRows(Attention { kernel, .. }) => gpu.load(kernel),
        }
    }

    /// Launches it on so many blocks.
    ///
    /// # Safety
    /// As of [`Gpu::launch`], of the parameters and of what stands beside them.
    pub(super) unsafe fn launch(
        &self,
        gpu: &Gpu,
        blocks: u32,
        attend: AttendParams,
        Beside { scales, lists, rope, boxes }: Beside,
        start: Start,
        stream: RawStream,
    ) -> Result<(), CudaError> {
        let grid = (blocks, 1);
        match self {
            Self::Plain(Attention { kernel, threads }) => {
                // SAFETY: the caller's.
                unsafe { gpu.launch(kernel, grid, (*threads, 1), stream, &attend, start) }
            }
            Self::Fp8(Attention { kernel, threads }) => {
                let params = AttendFp8Params { attend, scales };
                // SAFETY: the caller's.
                unsafe { gpu.launch(kernel, grid, (*threads, 1), stream, &params, start) }
            }
            Self::Selected(Attention { kernel, threads }) => {
                let params = AttendSelectedParams { attend, lists };
                // SAFETY: the caller's.
                unsafe { gpu.launch(kernel, grid, (*threads, 1), stream, &params, start) }
            }
            Self::LatentFp8(Attention { kernel, threads }) => {
                let params = AttendLatentFp8Params { attend, scales, rope };
                // SAFETY: the caller's.
                unsafe { gpu.launch(kernel, grid, (*threads, 1), stream, &params, start) }
            }
            Self::LatentRows(Attention { kernel, threads }) => {
                let (box_rows, rows, reserved) = (boxes.rows, boxes.map, [0; 11]);
                let params = AttendLatentRowsParams { attend, box_rows, reserved, rows };
                // SAFETY: the caller's.
                unsafe { gpu.launch(kernel, grid, (*threads, 1), stream, &params, start) }
            }
        }
    }
}

/// A kernel of attention, by its name: `attention!(name, threads, bytes of shared memory)`.
macro_rules! attention {
    ($name:expr, $threads:literal, $shared:literal) => {
        $crate::backend::cuda::kernels::Attention {
            kernel: $crate::backend::cuda::kernels::Kernel::new(
                $name,
                include_str!(concat!("../../../ptx/", $name, ".ptx")),
                $shared,
            ),
            threads: $threads,
        }
    };
}

pub(super) use attention;

const ATTEND_F32: Attention = attention!("attend_f32", 128, 0);
const ATTEND_FP8_F32: Attention<AttendFp8Params> = attention!("attend_fp8_f32", 128, 0);

/// The kernel for rows of f32.
pub(super) fn plain(fp8: bool) -> AttentionKernel {
    if fp8 { ATTEND_FP8_F32.into() } else { ATTEND_F32.into() }
}

/// The decode kernels of [`DECODE_ROWS`]; the last is there on compute capability 9.0 alone ([`hopper_decode`]).
pub(super) type Decodes = [Option<AttentionKernel>; DECODE_ROWS.len()];

/// A `match` over dtype of rows and head_dim with the decode kernels and the extend kernel of each.
macro_rules! attentions {
    (
        $key:expr, $params:ty,
        $($dtype:ident $name:literal $head_dim:literal:
            $extend_threads:literal $extend:literal, $threads:literal $($rows:literal $shared:literal)*;)*
    ) => {
        match $key {
            $(
                (Dtype::$dtype, $head_dim) => {
                    let mut decodes = Decodes::default();
                    let mut places = decodes.iter_mut();
                    $({
                        const DECODE: Attention<$params> = attention!(
                            concat!("attend_decode_", $name, "_d", $head_dim, "_r", $rows),
                            $threads,
                            $shared
                        );
                        *places.next().expect("there is a place for each") = Some(DECODE.into());
                    })*
                    const EXTEND: Attention<$params> = attention!(
                        concat!("attend_extend_", $name, "_d", $head_dim),
                        $extend_threads,
                        $extend
                    );
                    Some((decodes, EXTEND.into()))
                }
            )*
            _ => None,
        }
    };
}

/// The decode kernels and the extend kernel for rows of 16 bits. Threads and shared memory are those of the kernels'
/// headers.
pub(super) fn kernels(fp8: bool, rows: Dtype, head_dim: u32) -> Option<(Decodes, AttentionKernel)> {
    let key = (rows, head_dim);
    if fp8 {
        return attentions! { key, AttendFp8Params,
            Bf16 "fp8_bf16" 64: 128 49_152, 128 8 71_680 16 77_824;
            Bf16 "fp8_bf16" 128: 256 98_304, 128 8 77_824 16 90_112;
            Bf16 "fp8_bf16" 256: 128 98_304, 64 8 57_344 16 49_152;
            F16 "fp8_f16" 64: 128 49_152, 128 8 71_680 16 77_824;
            F16 "fp8_f16" 128: 256 98_304, 128 8 77_824 16 90_112;
            F16 "fp8_f16" 256: 128 98_304, 64 8 57_344 16 49_152;
        };
    }
    attentions! { key, AttendParams,
        Bf16 "bf16" 64: 128 49_152, 128 8 71_680 16 77_824;
        Bf16 "bf16" 128: 128 98_304, 128 8 77_824 16 90_112;
        Bf16 "bf16" 256: 128 98_304, 64 8 73_728 16 81_920;
        F16 "f16" 64: 128 49_152, 128 8 71_680 16 77_824;
        F16 "f16" 128: 128 98_304, 128 8 77_824 16 90_112;
        F16 "f16" 256: 128 98_304, 64 8 73_728 16 81_920;
    }
}

/// The kernels over lists, for rows of 16 bits: as many as there are decode kernels, of the same threads and memory.
pub(super) fn selected(rows: Dtype, head_dim: u32) -> Option<Decodes> {
    macro_rules! selected {
        ($($dtype:ident $name:literal $head_dim:literal: $threads:literal $($rows:literal $shared:literal)*;)*) => {
            match (rows, head_dim) {
                $((Dtype::$dtype, $head_dim) => Some([$({
                    const KERNEL: Attention<AttendSelectedParams> = attention!(
                        concat!("attend_selected_", $name, "_d", $head_dim, "_r", $rows),
                        $threads,
                        $shared
                    );
                    Some(AttentionKernel::Selected(KERNEL))
                },)* None]),)*
                _ => None,
            }
        };
    }
    selected! {
        Bf16 "bf16" 64: 128 8 71_680 16 77_824;
        Bf16 "bf16" 128: 128 8 77_824 16 90_112;
        Bf16 "bf16" 256: 64 8 73_728 16 81_920;
        F16 "f16" 64: 128 8 71_680 16 77_824;
        F16 "f16" 128: 128 8 77_824 16 90_112;
        F16 "f16" 256: 64 8 73_728 16 81_920;
    }
}

/// The decode kernel for the most query rows, which only compute capability 9.0 runs, where there is one.
pub(super) fn hopper_decode(fp8: bool, rows: Dtype, head_dim: u32) -> Option<AttentionKernel> {
    const BF16: Attention = attention!("attend_decode_bf16_d128_r64_sm90a", 256, 114_688);
    const F16: Attention = attention!("attend_decode_f16_d128_r64_sm90a", 256, 114_688);
    Some(match (fp8, rows, head_dim) {
        (false, Dtype::Bf16, 128) => BF16.into(),
        (false, Dtype::F16, 128) => F16.into(),
        _ => return None,
    })
}

/// The extend kernel that only compute capability 9.0 runs, where there is one.
pub(super) fn hopper(
    scaling: Option<Scaling>,
    rows: Dtype,
    head_dim: u32,
) -> Option<AttentionKernel> {
    const BF16: Attention = attention!("attend_extend_bf16_d128_sm90a", 384, 204_800);
    const F16: Attention = attention!("attend_extend_f16_d128_sm90a", 384, 204_800);
    const FP8_BF16: Attention<AttendFp8Params> =
        attention!("attend_extend_fp8_bf16_d128_sm90a", 384, 196_608);
    const FP8_F16: Attention<AttendFp8Params> =
        attention!("attend_extend_fp8_f16_d128_sm90a", 384, 196_608);
    const FP8_TOKEN_BF16: Attention<AttendFp8Params> =
        attention!("attend_extend_fp8_token_bf16_d128_sm90a", 384, 196_608);
    const FP8_TOKEN_F16: Attention<AttendFp8Params> =
        attention!("attend_extend_fp8_token_f16_d128_sm90a", 384, 196_608);
    Some(match (scaling, rows, head_dim) {
        (None, Dtype::Bf16, 128) => BF16.into(),
        (None, Dtype::F16, 128) => F16.into(),
        (Some(Scaling::Static), Dtype::Bf16, 128) => FP8_BF16.into(),
        (Some(Scaling::Static), Dtype::F16, 128) => FP8_F16.into(),
        (Some(Scaling::ByToken), Dtype::Bf16, 128) => FP8_TOKEN_BF16.into(),
        (Some(Scaling::ByToken), Dtype::F16, 128) => FP8_TOKEN_F16.into(),
        _ => return None,
    })
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::kernels::tests::MOVES;
    use super::super::split::{DECODE_EXTRA, SplitShape};
    use super::super::{attend_latent, attend_shared};
    use super::*;

    /// A kernel's name, its PTX, its bytes of dynamic shared memory, and its threads.
    pub(in super::super) type Parts = (&'static str, &'static str, u32, u32);

    pub(in super::super) fn parts(kernel: &AttentionKernel) -> Parts {
        match kernel {
            AttentionKernel::Plain(Attention { kernel, threads }) => {
                (kernel.name, kernel.ptx, kernel.shared, *threads)
            }
            AttentionKernel::Fp8(Attention { kernel, threads }) => {
                (kernel.name, kernel.ptx, kernel.shared, *threads)
            }
            AttentionKernel::Selected(Attention { kernel, threads }) => {
                (kernel.name, kernel.ptx, kernel.shared, *threads)
            }
            AttentionKernel::LatentFp8(Attention { kernel, threads }) => {
                (kernel.name, kernel.ptx, kernel.shared, *threads)
            }
            AttentionKernel::LatentRows(Attention { kernel, threads }) => {
                (kernel.name, kernel.ptx, kernel.shared, *threads)
            }
        }
    }

    /// What a kernel's source says of itself.
    pub(in super::super) fn source(name: &str) -> String {
        let of_both = name.replace("_bf16", "_DTYPE").replace("_f16", "_DTYPE");
        let path = |file: &str| format!("{}/ptx/{file}.cu", env!("CARGO_MANIFEST_DIR"));
        let text = std::fs::read_to_string(path(&of_both));
        text.or_else(|_| std::fs::read_to_string(path(name))).expect("every kernel has a source")
    }

    fn thousands(n: u32) -> String {
        format!("{},{:03}", n / 1000, n % 1000)
    }

    #[test]
    fn kernels_are_launched_as_they_say() {
        for (fp8, dtype) in
            [false, true].into_iter().flat_map(|fp8| [(fp8, Dtype::F16), (fp8, Dtype::Bf16)])
        {
            for head_dim in [64, 128, 256] {
                let shape = SplitShape {
                    kv_heads: 1,
                    group: 1,
                    head_dim,
                    window: 0,
                    top: 0,
                    extra: DECODE_EXTRA,
                    decode_ctas: [1; DECODE_ROWS.len()],
                    extend_ctas: 1,
                    batch_max: 1,
                    tokens_max: 1,
                };
                let (mut decodes, extend) = kernels(fp8, dtype, head_dim).expect("a served shape");
                assert!(decodes[0].is_some() && decodes[1].is_some(), "every group is served");
                decodes[2] = hopper_decode(fp8, dtype, head_dim);
                for (width, decode) in decodes.iter().enumerate() {
                    let Some(decode) = decode else { continue };
                    let rows = DECODE_ROWS[width];
                    let target = if width == 2 { "_sm90a" } else { "" };
                    assert!(parts(decode).0.ends_with(&format!("d{head_dim}_r{rows}{target}")));
                    let slots = shape.width_partial_bytes(width) / 8 / (head_dim + 2) as usize;
                    check(decode, format!("[2 * grid, {slots}, {}]", head_dim + 2));
                }
                let listed = selected(dtype, head_dim).expect("a served shape");
                for (width, listed) in listed.iter().take(2).enumerate() {
                    let slots = shape.width_partial_bytes(width) / 8 / (head_dim + 2) as usize;
                    let listed = listed.as_ref().expect("every group is served");
                    check(listed, format!("[2 * grid, {slots}, {}]", head_dim + 2));
                }
                let rows = shape.extend_rows();
                let scalings: &[_] =
                    if fp8 { &[Some(Scaling::Static), Some(Scaling::ByToken)] } else { &[None] };
                let late = scalings.iter().filter_map(|&scaling| hopper(scaling, dtype, head_dim));
                for extend in late.chain([extend]) {
                    check(&extend, format!("[slots, kv_heads, {rows}, {}]", head_dim + 2));
                }
            }
        }
    }

    /// The kernels that a device of this compute capability may be asked to run, but those of spans and of latent rows.
    fn offered(capability: u32) -> Vec<Parts> {
        let mut offered = vec![plain(false), plain(true)];
        for (rows, head_dim) in
            [Dtype::F16, Dtype::Bf16].into_iter().flat_map(|r| [64, 128, 256].map(|dim| (r, dim)))
        {
            for fp8 in [false, true] {
                let (decodes, extend) = kernels(fp8, rows, head_dim).expect("a served shape");
                offered.extend(decodes.into_iter().flatten().chain([extend]));
                let late = hopper_decode(fp8, rows, head_dim);
                offered.extend(late.filter(|_| capability == 90));
            }
            for scaling in [None, Some(Scaling::Static), Some(Scaling::ByToken)] {
                let late = hopper(scaling, rows, head_dim);
                offered.extend(late.filter(|_| capability == 90));
            }
            let listed = selected(rows, head_dim).expect("a served shape");
            offered.extend(listed.into_iter().flatten());
        }
        offered.iter().map(parts).collect()
    }

    /// Bytes of shared memory of a CTA, of which `dynamic` are asked for at its launch: arrays stand in the order of
    /// the text, the dynamic one behind them, each at a multiple of its alignment.
    fn shared_bytes(ptx: &str, dynamic: u32) -> u32 {
        let aligned = |line: &str, declared: &str| -> Option<(u32, String)> {
            let (align, rest) = line.trim().strip_prefix(declared)?.split_once(' ')?;
            Some((align.parse().expect("a number"), rest.to_owned()))
        };
        let (mut bytes, mut dynamic_align) = (0_u32, 1);
        for line in ptx.lines() {
            if let Some((align, rest)) = aligned(line, ".shared .align ") {
                let (_, size) = rest.split_once('[').expect("an array");
                let size: u32 = size.trim_end_matches("];").parse().expect("a number");
                bytes = bytes.next_multiple_of(align) + size;
            } else if let Some((align, _)) = aligned(line, ".extern .shared .align ") {
                dynamic_align = align.max(dynamic_align);
            } else {
                assert!(!line.contains(".shared ."), "{line}");
            }
        }
        if dynamic > 0 { bytes.next_multiple_of(dynamic_align) + dynamic } else { bytes }
    }

    /// Bytes of shared memory that a CTA may have are those of the CUDA programming guide.
    #[test]
    fn every_kernel_has_the_shared_memory_that_its_devices_have() {
        let mut most = 0;
        for (capability, kib) in
            [(80, 163), (86, 99), (87, 163), (89, 99), (90, 227), (100, 227), (120, 99)]
        {
            let latent = attend_latent::tests::offered(capability);
            let spans = attend_shared::tests::offered(capability);
            let others = MOVES.map(|(name, ptx, shared)| (name, ptx, shared, 0));
            let all = offered(capability).into_iter().chain(latent).chain(spans).chain(others);
            for (name, ptx, dynamic, _) in all {
                let bytes = shared_bytes(ptx, dynamic);
                assert!(
                    bytes <= kib << 10,
                    "{capability}: {name} has {bytes} of {} bytes",
                    kib << 10
                );
                let target =
                    if name.ends_with("_sm90a") { ".target sm_90a" } else { ".target sm_80" };
                assert!(ptx.contains(target) && (capability == 90 || target == ".target sm_80"));
                most = most.max(bytes);
            }
        }
        assert!(most > 200 << 10, "kernels of Hopper were looked at");
    }

    fn check(kernel: &AttentionKernel, partial: String) {
        let (name, ptx, shared, threads) = parts(kernel);
        let text = source(name);
        let launch = format!("block {threads}, {} bytes of dynamic", thousands(shared));
        for wanted in [launch, format!("partial f32 {partial}")] {
            assert!(text.contains(&wanted), "{name}: {wanted}");
        }
        let entry = format!(".entry {name}(");
        let (_, after) = ptx.split_once(&entry).expect("the entry is in the PTX");
        assert!(!after.contains(".entry"), "{name}: nothing else is compiled with it");
        assert!(after.contains(&format!(".maxntid {threads}, 1, 1")), "{name}");
    }
}
