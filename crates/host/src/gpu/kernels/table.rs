//! The kernels of crates/host/ptx/kernels.toml. ptx/build.py generates this file.

use kvarena::backend::cuda::{Archive, Kernel};

macro_rules! archive {
    ($name:literal) => {
        Archive::new($name, include_bytes!(concat!("../../../ptx/out/", $name, ".zst")))
    };
}

static DELTA: Archive = archive!("delta");
static GEMM: Archive = archive!("gemm");
static SKINNY: Archive = archive!("skinny");
static SMALL: Archive = archive!("small");

/// All kernels, in the order of the table.
#[rustfmt::skip]
pub static KERNELS: [Kernel; 33] = [
    Kernel::new("load_step", &SMALL, 256, 0).takes("LoadStepParams"),
    Kernel::new("embed", &SMALL, 1024, 0).of("norm").pdl().takes("EmbedParams"),
    Kernel::new("rms_norm", &SMALL, 1024, 0).of("norm").pdl().takes("NormParams"),
    Kernel::new("silu_mul", &SMALL, 128, 0).pdl().takes("SiluMulParams"),
    Kernel::new("gelu_mul", &SMALL, 128, 0).of("silu_mul").pdl().takes("SiluMulParams"),
    Kernel::new("add_bias", &SMALL, 128, 0).of("add").pdl().takes("BiasParams"),
    Kernel::new("norm_add", &SMALL, 1024, 0).of("add").pdl().takes("NormAddParams"),
    Kernel::new("route", &SMALL, 128, 0).of("experts").pdl().takes("RouteParams"),
    Kernel::new("experts_up", &SMALL, 128, 0).of("experts").pdl().takes("ExpertsParams"),
    Kernel::new("experts_down", &SMALL, 128, 0).of("experts").pdl().takes("ExpertsParams"),
    Kernel::new("delta_conv", &DELTA, 128, 0).of("delta").pdl().takes("DeltaConvParams"),
    Kernel::new("delta_update_32", &DELTA, 256, 0).of("delta").pdl().takes("DeltaUpdateParams"),
    Kernel::new("delta_update_128", &DELTA, 256, 0).of("delta").pdl().takes("DeltaUpdateParams"),
    Kernel::new("delta_gate", &DELTA, 128, 0).of("delta").pdl().takes("DeltaGateParams"),
    Kernel::new("gate", &DELTA, 128, 0).of("delta").pdl().takes("GateParams"),
    Kernel::new("sample", &SMALL, 256, 0).pdl().takes("SampleParams"),
    Kernel::new("sample_filter", &SMALL, 1024, 0).of("sample").pdl().takes("SampleParams"),
    Kernel::new("sample_shaped", &SMALL, 1024, 0).pdl().takes("ShapedParams"),
    Kernel::new("sum_ranks", &SMALL, 512, 0).pdl().takes("SumRanksParams"),
    Kernel::new("fill", &SMALL, 256, 0).takes("FillParams"),
    Kernel::new("fold", &SMALL, 256, 0).of("fill").takes("FoldParams"),
    Kernel::new("skinny_1_2", &SKINNY, 256, 0).of("skinny").pdl().takes("SkinnyParams"),
    Kernel::new("skinny_1_4", &SKINNY, 256, 0).of("skinny").pdl().takes("SkinnyParams"),
    Kernel::new("skinny_2_1", &SKINNY, 256, 0).of("skinny").pdl().takes("SkinnyParams"),
    Kernel::new("skinny_2_2", &SKINNY, 256, 0).of("skinny").pdl().takes("SkinnyParams"),
    Kernel::new("skinny_4_1", &SKINNY, 256, 0).of("skinny").pdl().takes("SkinnyParams"),
    Kernel::new("skinny_4_2", &SKINNY, 256, 0).of("skinny").pdl().takes("SkinnyParams"),
    Kernel::new("gemm_16_64", &GEMM, 224, 229_376).of("gemm_sm90a").sm90a().pdl().takes("GemmParams"),
    Kernel::new("gemm_16_128", &GEMM, 224, 229_376).of("gemm_sm90a").sm90a().pdl().takes("GemmParams"),
    Kernel::new("gemm_32_64", &GEMM, 224, 229_376).of("gemm_sm90a").sm90a().pdl().takes("GemmParams"),
    Kernel::new("gemm_32_128", &GEMM, 224, 229_376).of("gemm_sm90a").sm90a().pdl().takes("GemmParams"),
    Kernel::new("gemm_64_64", &GEMM, 224, 229_376).of("gemm_sm90a").sm90a().pdl().takes("GemmParams"),
    Kernel::new("gemm_64_128", &GEMM, 224, 229_376).of("gemm_sm90a").sm90a().pdl().takes("GemmParams"),
];

pub const LOAD_STEP: &Kernel = &KERNELS[0];
pub const EMBED: &Kernel = &KERNELS[1];
pub const RMS_NORM: &Kernel = &KERNELS[2];
pub const SILU_MUL: &Kernel = &KERNELS[3];
pub const GELU_MUL: &Kernel = &KERNELS[4];
pub const ADD_BIAS: &Kernel = &KERNELS[5];
pub const NORM_ADD: &Kernel = &KERNELS[6];
pub const ROUTE: &Kernel = &KERNELS[7];
pub const EXPERTS_UP: &Kernel = &KERNELS[8];
pub const EXPERTS_DOWN: &Kernel = &KERNELS[9];
pub const DELTA_CONV: &Kernel = &KERNELS[10];
pub const DELTA_UPDATE_32: &Kernel = &KERNELS[11];
pub const DELTA_UPDATE_128: &Kernel = &KERNELS[12];
pub const DELTA_GATE: &Kernel = &KERNELS[13];
pub const GATE: &Kernel = &KERNELS[14];
pub const SAMPLE: &Kernel = &KERNELS[15];
pub const SAMPLE_FILTER: &Kernel = &KERNELS[16];
pub const SAMPLE_SHAPED: &Kernel = &KERNELS[17];
pub const SUM_RANKS: &Kernel = &KERNELS[18];
pub const FILL: &Kernel = &KERNELS[19];
pub const FOLD: &Kernel = &KERNELS[20];
pub const SKINNY_1_2: &Kernel = &KERNELS[21];
pub const SKINNY_1_4: &Kernel = &KERNELS[22];
pub const SKINNY_2_1: &Kernel = &KERNELS[23];
pub const SKINNY_2_2: &Kernel = &KERNELS[24];
pub const SKINNY_4_1: &Kernel = &KERNELS[25];
pub const SKINNY_4_2: &Kernel = &KERNELS[26];
pub const GEMM_16_64: &Kernel = &KERNELS[27];
pub const GEMM_16_128: &Kernel = &KERNELS[28];
pub const GEMM_32_64: &Kernel = &KERNELS[29];
pub const GEMM_32_128: &Kernel = &KERNELS[30];
pub const GEMM_64_64: &Kernel = &KERNELS[31];
pub const GEMM_64_128: &Kernel = &KERNELS[32];
