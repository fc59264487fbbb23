//! The kernels of ptx/kernels.toml. ptx/build.py generates this file.

use super::{Archive, Cache, Extra, Kernel, Step};
use crate::layout::Dtype;

macro_rules! archive {
    ($name:literal) => {
        Archive::new($name, include_bytes!(concat!("../../../../ptx/out/", $name, ".zst")))
    };
}

static ATTEND_DECODE_D128: Archive = archive!("attend_decode_d128");
static ATTEND_DECODE_D256: Archive = archive!("attend_decode_d256");
static ATTEND_DECODE_D64: Archive = archive!("attend_decode_d64");
static ATTEND_DECODE_FP8_D128: Archive = archive!("attend_decode_fp8_d128");
static ATTEND_DECODE_FP8_D256: Archive = archive!("attend_decode_fp8_d256");
static ATTEND_DECODE_FP8_D64: Archive = archive!("attend_decode_fp8_d64");
static ATTEND_EXTEND_D128: Archive = archive!("attend_extend_d128");
static ATTEND_EXTEND_D256: Archive = archive!("attend_extend_d256");
static ATTEND_EXTEND_D64: Archive = archive!("attend_extend_d64");
static ATTEND_EXTEND_FP8_D128: Archive = archive!("attend_extend_fp8_d128");
static ATTEND_EXTEND_FP8_D256: Archive = archive!("attend_extend_fp8_d256");
static ATTEND_EXTEND_FP8_D64: Archive = archive!("attend_extend_fp8_d64");
static ATTEND_LATENT: Archive = archive!("attend_latent");
static ATTEND_LATENT_FP8: Archive = archive!("attend_latent_fp8");
static ATTEND_PLAIN: Archive = archive!("attend_plain");
static ATTEND_SELECTED_D128: Archive = archive!("attend_selected_d128");
static ATTEND_SELECTED_D256: Archive = archive!("attend_selected_d256");
static ATTEND_SELECTED_D64: Archive = archive!("attend_selected_d64");
static ATTEND_SHARED_D128: Archive = archive!("attend_shared_d128");
static ATTEND_SHARED_D256: Archive = archive!("attend_shared_d256");
static ATTEND_SHARED_D64: Archive = archive!("attend_shared_d64");
static ATTEND_SHARED_FP8_D128: Archive = archive!("attend_shared_fp8_d128");
static ATTEND_SHARED_FP8_D256: Archive = archive!("attend_shared_fp8_d256");
static ATTEND_SHARED_FP8_D64: Archive = archive!("attend_shared_fp8_d64");
static MOVES: Archive = archive!("moves");
static ROPE_STORE: Archive = archive!("rope_store");
static SPARSE: Archive = archive!("sparse");

/// All kernels, in the order of the table.
#[rustfmt::skip]
pub static KERNELS: [Kernel; 122] = [
    Kernel::new("attend_decode_bf16_d128_r16", &ATTEND_DECODE_D128, 128, 90_112).pdl().takes("AttendParams")
        .serves(Step::Decode, Cache::Rows, Dtype::Bf16, 128, 16),
    Kernel::new("attend_decode_f16_d128_r16", &ATTEND_DECODE_D128, 128, 90_112).pdl().takes("AttendParams")
        .serves(Step::Decode, Cache::Rows, Dtype::F16, 128, 16),
    Kernel::new("attend_decode_bf16_d128_r8", &ATTEND_DECODE_D128, 128, 77_824).pdl().takes("AttendParams")
        .serves(Step::Decode, Cache::Rows, Dtype::Bf16, 128, 8),
    Kernel::new("attend_decode_f16_d128_r8", &ATTEND_DECODE_D128, 128, 77_824).pdl().takes("AttendParams")
        .serves(Step::Decode, Cache::Rows, Dtype::F16, 128, 8),
    Kernel::new("attend_decode_bf16_d256_r16", &ATTEND_DECODE_D256, 64, 81_920).pdl().takes("AttendParams")
        .serves(Step::Decode, Cache::Rows, Dtype::Bf16, 256, 16),
    Kernel::new("attend_decode_f16_d256_r16", &ATTEND_DECODE_D256, 64, 81_920).pdl().takes("AttendParams")
        .serves(Step::Decode, Cache::Rows, Dtype::F16, 256, 16),
    Kernel::new("attend_decode_bf16_d256_r8", &ATTEND_DECODE_D256, 64, 73_728).pdl().takes("AttendParams")
        .serves(Step::Decode, Cache::Rows, Dtype::Bf16, 256, 8),
    Kernel::new("attend_decode_f16_d256_r8", &ATTEND_DECODE_D256, 64, 73_728).pdl().takes("AttendParams")
        .serves(Step::Decode, Cache::Rows, Dtype::F16, 256, 8),
    Kernel::new("attend_decode_bf16_d64_r16", &ATTEND_DECODE_D64, 128, 77_824).pdl().takes("AttendParams")
        .serves(Step::Decode, Cache::Rows, Dtype::Bf16, 64, 16),
    Kernel::new("attend_decode_f16_d64_r16", &ATTEND_DECODE_D64, 128, 77_824).pdl().takes("AttendParams")
        .serves(Step::Decode, Cache::Rows, Dtype::F16, 64, 16),
    Kernel::new("attend_decode_bf16_d64_r8", &ATTEND_DECODE_D64, 128, 71_680).pdl().takes("AttendParams")
        .serves(Step::Decode, Cache::Rows, Dtype::Bf16, 64, 8),
    Kernel::new("attend_decode_f16_d64_r8", &ATTEND_DECODE_D64, 128, 71_680).pdl().takes("AttendParams")
        .serves(Step::Decode, Cache::Rows, Dtype::F16, 64, 8),
    Kernel::new("attend_decode_bf16_d128_r64_sm90a", &ATTEND_DECODE_D128, 256, 114_688).sm90a().pdl()
        .takes("AttendParams").serves(Step::Decode, Cache::Rows, Dtype::Bf16, 128, 64),
    Kernel::new("attend_decode_f16_d128_r64_sm90a", &ATTEND_DECODE_D128, 256, 114_688).sm90a().pdl()
        .takes("AttendParams").serves(Step::Decode, Cache::Rows, Dtype::F16, 128, 64),
    Kernel::new("attend_decode_fp8_bf16_d128_r16", &ATTEND_DECODE_FP8_D128, 128, 90_112).pdl()
        .takes("AttendParams").then(&[Extra::LayerScales]).serves(Step::Decode, Cache::Fp8, Dtype::Bf16, 128, 16),
    Kernel::new("attend_decode_fp8_f16_d128_r16", &ATTEND_DECODE_FP8_D128, 128, 90_112).pdl().takes("AttendParams")
        .then(&[Extra::LayerScales]).serves(Step::Decode, Cache::Fp8, Dtype::F16, 128, 16),
    Kernel::new("attend_decode_fp8_bf16_d128_r8", &ATTEND_DECODE_FP8_D128, 128, 77_824).pdl().takes("AttendParams")
        .then(&[Extra::LayerScales]).serves(Step::Decode, Cache::Fp8, Dtype::Bf16, 128, 8),
    Kernel::new("attend_decode_fp8_f16_d128_r8", &ATTEND_DECODE_FP8_D128, 128, 77_824).pdl().takes("AttendParams")
        .then(&[Extra::LayerScales]).serves(Step::Decode, Cache::Fp8, Dtype::F16, 128, 8),
    Kernel::new("attend_decode_fp8_bf16_d256_r16", &ATTEND_DECODE_FP8_D256, 64, 49_152).pdl().takes("AttendParams")
        .then(&[Extra::LayerScales]).serves(Step::Decode, Cache::Fp8, Dtype::Bf16, 256, 16),
    Kernel::new("attend_decode_fp8_f16_d256_r16", &ATTEND_DECODE_FP8_D256, 64, 49_152).pdl().takes("AttendParams")
        .then(&[Extra::LayerScales]).serves(Step::Decode, Cache::Fp8, Dtype::F16, 256, 16),
    Kernel::new("attend_decode_fp8_bf16_d256_r8", &ATTEND_DECODE_FP8_D256, 64, 57_344).pdl().takes("AttendParams")
        .then(&[Extra::LayerScales]).serves(Step::Decode, Cache::Fp8, Dtype::Bf16, 256, 8),
    Kernel::new("attend_decode_fp8_f16_d256_r8", &ATTEND_DECODE_FP8_D256, 64, 57_344).pdl().takes("AttendParams")
        .then(&[Extra::LayerScales]).serves(Step::Decode, Cache::Fp8, Dtype::F16, 256, 8),
    Kernel::new("attend_decode_fp8_bf16_d64_r16", &ATTEND_DECODE_FP8_D64, 128, 77_824).pdl().takes("AttendParams")
        .then(&[Extra::LayerScales]).serves(Step::Decode, Cache::Fp8, Dtype::Bf16, 64, 16),
    Kernel::new("attend_decode_fp8_f16_d64_r16", &ATTEND_DECODE_FP8_D64, 128, 77_824).pdl().takes("AttendParams")
        .then(&[Extra::LayerScales]).serves(Step::Decode, Cache::Fp8, Dtype::F16, 64, 16),
    Kernel::new("attend_decode_fp8_bf16_d64_r8", &ATTEND_DECODE_FP8_D64, 128, 71_680).pdl().takes("AttendParams")
        .then(&[Extra::LayerScales]).serves(Step::Decode, Cache::Fp8, Dtype::Bf16, 64, 8),
    Kernel::new("attend_decode_fp8_f16_d64_r8", &ATTEND_DECODE_FP8_D64, 128, 71_680).pdl().takes("AttendParams")
        .then(&[Extra::LayerScales]).serves(Step::Decode, Cache::Fp8, Dtype::F16, 64, 8),
    Kernel::new("attend_selected_bf16_d128_r16", &ATTEND_SELECTED_D128, 128, 90_112).pdl().takes("AttendParams")
        .then(&[Extra::Lists]).serves(Step::Selected, Cache::Rows, Dtype::Bf16, 128, 16),
    Kernel::new("attend_selected_f16_d128_r16", &ATTEND_SELECTED_D128, 128, 90_112).pdl().takes("AttendParams")
        .then(&[Extra::Lists]).serves(Step::Selected, Cache::Rows, Dtype::F16, 128, 16),
    Kernel::new("attend_selected_bf16_d128_r8", &ATTEND_SELECTED_D128, 128, 77_824).pdl().takes("AttendParams")
        .then(&[Extra::Lists]).serves(Step::Selected, Cache::Rows, Dtype::Bf16, 128, 8),
    Kernel::new("attend_selected_f16_d128_r8", &ATTEND_SELECTED_D128, 128, 77_824).pdl().takes("AttendParams")
        .then(&[Extra::Lists]).serves(Step::Selected, Cache::Rows, Dtype::F16, 128, 8),
    Kernel::new("attend_selected_bf16_d256_r16", &ATTEND_SELECTED_D256, 64, 81_920).pdl().takes("AttendParams")
        .then(&[Extra::Lists]).serves(Step::Selected, Cache::Rows, Dtype::Bf16, 256, 16),
    Kernel::new("attend_selected_f16_d256_r16", &ATTEND_SELECTED_D256, 64, 81_920).pdl().takes("AttendParams")
        .then(&[Extra::Lists]).serves(Step::Selected, Cache::Rows, Dtype::F16, 256, 16),
    Kernel::new("attend_selected_bf16_d256_r8", &ATTEND_SELECTED_D256, 64, 73_728).pdl().takes("AttendParams")
        .then(&[Extra::Lists]).serves(Step::Selected, Cache::Rows, Dtype::Bf16, 256, 8),
    Kernel::new("attend_selected_f16_d256_r8", &ATTEND_SELECTED_D256, 64, 73_728).pdl().takes("AttendParams")
        .then(&[Extra::Lists]).serves(Step::Selected, Cache::Rows, Dtype::F16, 256, 8),
    Kernel::new("attend_selected_bf16_d64_r16", &ATTEND_SELECTED_D64, 128, 77_824).pdl().takes("AttendParams")
        .then(&[Extra::Lists]).serves(Step::Selected, Cache::Rows, Dtype::Bf16, 64, 16),
    Kernel::new("attend_selected_f16_d64_r16", &ATTEND_SELECTED_D64, 128, 77_824).pdl().takes("AttendParams")
        .then(&[Extra::Lists]).serves(Step::Selected, Cache::Rows, Dtype::F16, 64, 16),
    Kernel::new("attend_selected_bf16_d64_r8", &ATTEND_SELECTED_D64, 128, 71_680).pdl().takes("AttendParams")
        .then(&[Extra::Lists]).serves(Step::Selected, Cache::Rows, Dtype::Bf16, 64, 8),
    Kernel::new("attend_selected_f16_d64_r8", &ATTEND_SELECTED_D64, 128, 71_680).pdl().takes("AttendParams")
        .then(&[Extra::Lists]).serves(Step::Selected, Cache::Rows, Dtype::F16, 64, 8),
    Kernel::new("attend_extend_bf16_d128", &ATTEND_EXTEND_D128, 128, 98_304).takes("AttendParams")
        .serves(Step::Extend, Cache::Rows, Dtype::Bf16, 128, 0).items(128, 64),
    Kernel::new("attend_extend_f16_d128", &ATTEND_EXTEND_D128, 128, 98_304).takes("AttendParams")
        .serves(Step::Extend, Cache::Rows, Dtype::F16, 128, 0).items(128, 64),
    Kernel::new("attend_extend_bf16_d256", &ATTEND_EXTEND_D256, 128, 98_304).takes("AttendParams")
        .serves(Step::Extend, Cache::Rows, Dtype::Bf16, 256, 0).items(64, 32),
    Kernel::new("attend_extend_f16_d256", &ATTEND_EXTEND_D256, 128, 98_304).takes("AttendParams")
        .serves(Step::Extend, Cache::Rows, Dtype::F16, 256, 0).items(64, 32),
    Kernel::new("attend_extend_bf16_d64", &ATTEND_EXTEND_D64, 128, 49_152).takes("AttendParams")
        .serves(Step::Extend, Cache::Rows, Dtype::Bf16, 64, 0).items(128, 64),
    Kernel::new("attend_extend_f16_d64", &ATTEND_EXTEND_D64, 128, 49_152).takes("AttendParams")
        .serves(Step::Extend, Cache::Rows, Dtype::F16, 64, 0).items(128, 64),
    Kernel::new("attend_extend_bf16_d128_sm90a", &ATTEND_EXTEND_D128, 384, 204_800).sm90a().takes("AttendParams")
        .serves(Step::Extend, Cache::Rows, Dtype::Bf16, 128, 0).items(128, 64),
    Kernel::new("attend_extend_f16_d128_sm90a", &ATTEND_EXTEND_D128, 384, 204_800).sm90a().takes("AttendParams")
        .serves(Step::Extend, Cache::Rows, Dtype::F16, 128, 0).items(128, 64),
    Kernel::new("attend_extend_fp8_bf16_d128", &ATTEND_EXTEND_FP8_D128, 256, 98_304).takes("AttendParams")
        .then(&[Extra::LayerScales]).serves(Step::Extend, Cache::Fp8, Dtype::Bf16, 128, 0).items(128, 64),
    Kernel::new("attend_extend_fp8_f16_d128", &ATTEND_EXTEND_FP8_D128, 256, 98_304).takes("AttendParams")
        .then(&[Extra::LayerScales]).serves(Step::Extend, Cache::Fp8, Dtype::F16, 128, 0).items(128, 64),
    Kernel::new("attend_extend_fp8_bf16_d256", &ATTEND_EXTEND_FP8_D256, 128, 98_304).takes("AttendParams")
        .then(&[Extra::LayerScales]).serves(Step::Extend, Cache::Fp8, Dtype::Bf16, 256, 0).items(64, 32),
    Kernel::new("attend_extend_fp8_f16_d256", &ATTEND_EXTEND_FP8_D256, 128, 98_304).takes("AttendParams")
        .then(&[Extra::LayerScales]).serves(Step::Extend, Cache::Fp8, Dtype::F16, 256, 0).items(64, 32),
    Kernel::new("attend_extend_fp8_bf16_d64", &ATTEND_EXTEND_FP8_D64, 128, 49_152).takes("AttendParams")
        .then(&[Extra::LayerScales]).serves(Step::Extend, Cache::Fp8, Dtype::Bf16, 64, 0).items(128, 64),
    Kernel::new("attend_extend_fp8_f16_d64", &ATTEND_EXTEND_FP8_D64, 128, 49_152).takes("AttendParams")
        .then(&[Extra::LayerScales]).serves(Step::Extend, Cache::Fp8, Dtype::F16, 64, 0).items(128, 64),
    Kernel::new("attend_extend_fp8_bf16_d128_sm90a", &ATTEND_EXTEND_FP8_D128, 384, 196_608).sm90a()
        .takes("AttendParams").then(&[Extra::LayerScales]).without_trees()
        .serves(Step::Extend, Cache::Fp8Static, Dtype::Bf16, 128, 0).items(128, 64),
    Kernel::new("attend_extend_fp8_f16_d128_sm90a", &ATTEND_EXTEND_FP8_D128, 384, 196_608).sm90a()
        .takes("AttendParams").then(&[Extra::LayerScales]).without_trees()
        .serves(Step::Extend, Cache::Fp8Static, Dtype::F16, 128, 0).items(128, 64),
    Kernel::new("attend_extend_fp8_token_bf16_d128_sm90a", &ATTEND_EXTEND_FP8_D128, 384, 196_608).sm90a()
        .takes("AttendParams").then(&[Extra::LayerScales]).without_trees()
        .serves(Step::Extend, Cache::Fp8Token, Dtype::Bf16, 128, 0).items(128, 64),
    Kernel::new("attend_extend_fp8_token_f16_d128_sm90a", &ATTEND_EXTEND_FP8_D128, 384, 196_608).sm90a()
        .takes("AttendParams").then(&[Extra::LayerScales]).without_trees()
        .serves(Step::Extend, Cache::Fp8Token, Dtype::F16, 128, 0).items(128, 64),
    Kernel::new("attend_shared_bf16_d128_r16", &ATTEND_SHARED_D128, 128, 100_480).pdl().takes("AttendSharedParams")
        .serves(Step::Shared, Cache::Rows, Dtype::Bf16, 128, 16).items(128, 0).suffixes(4),
    Kernel::new("attend_shared_f16_d128_r16", &ATTEND_SHARED_D128, 128, 100_480).pdl().takes("AttendSharedParams")
        .serves(Step::Shared, Cache::Rows, Dtype::F16, 128, 16).items(128, 0).suffixes(4),
    Kernel::new("attend_shared_bf16_d128_r8", &ATTEND_SHARED_D128, 128, 100_480).pdl().takes("AttendSharedParams")
        .serves(Step::Shared, Cache::Rows, Dtype::Bf16, 128, 8).items(128, 0).suffixes(4),
    Kernel::new("attend_shared_f16_d128_r8", &ATTEND_SHARED_D128, 128, 100_480).pdl().takes("AttendSharedParams")
        .serves(Step::Shared, Cache::Rows, Dtype::F16, 128, 8).items(128, 0).suffixes(4),
    Kernel::new("attend_shared_bf16_d256_r16", &ATTEND_SHARED_D256, 128, 99_840).pdl().takes("AttendSharedParams")
        .serves(Step::Shared, Cache::Rows, Dtype::Bf16, 256, 16).items(64, 0).suffixes(2),
    Kernel::new("attend_shared_f16_d256_r16", &ATTEND_SHARED_D256, 128, 99_840).pdl().takes("AttendSharedParams")
        .serves(Step::Shared, Cache::Rows, Dtype::F16, 256, 16).items(64, 0).suffixes(2),
    Kernel::new("attend_shared_bf16_d256_r8", &ATTEND_SHARED_D256, 128, 99_840).pdl().takes("AttendSharedParams")
        .serves(Step::Shared, Cache::Rows, Dtype::Bf16, 256, 8).items(64, 0).suffixes(2),
    Kernel::new("attend_shared_f16_d256_r8", &ATTEND_SHARED_D256, 128, 99_840).pdl().takes("AttendSharedParams")
        .serves(Step::Shared, Cache::Rows, Dtype::F16, 256, 8).items(64, 0).suffixes(2),
    Kernel::new("attend_shared_bf16_d64_r16", &ATTEND_SHARED_D64, 128, 81_920).pdl().takes("AttendSharedParams")
        .serves(Step::Shared, Cache::Rows, Dtype::Bf16, 64, 16).items(128, 0).suffixes(4),
    Kernel::new("attend_shared_f16_d64_r16", &ATTEND_SHARED_D64, 128, 81_920).pdl().takes("AttendSharedParams")
        .serves(Step::Shared, Cache::Rows, Dtype::F16, 64, 16).items(128, 0).suffixes(4),
    Kernel::new("attend_shared_bf16_d64_r8", &ATTEND_SHARED_D64, 128, 75_776).pdl().takes("AttendSharedParams")
        .serves(Step::Shared, Cache::Rows, Dtype::Bf16, 64, 8).items(128, 0).suffixes(4),
    Kernel::new("attend_shared_f16_d64_r8", &ATTEND_SHARED_D64, 128, 75_776).pdl().takes("AttendSharedParams")
        .serves(Step::Shared, Cache::Rows, Dtype::F16, 64, 8).items(128, 0).suffixes(4),
    Kernel::new("attend_shared_bf16_d128_r16_sm90a", &ATTEND_SHARED_D128, 384, 196_608).sm90a().pdl()
        .takes("AttendSharedParams").serves(Step::Shared, Cache::Rows, Dtype::Bf16, 128, 16).items(128, 0)
        .suffixes(8),
    Kernel::new("attend_shared_f16_d128_r16_sm90a", &ATTEND_SHARED_D128, 384, 196_608).sm90a().pdl()
        .takes("AttendSharedParams").serves(Step::Shared, Cache::Rows, Dtype::F16, 128, 16).items(128, 0)
        .suffixes(8),
    Kernel::new("attend_shared_bf16_d128_r8_sm90a", &ATTEND_SHARED_D128, 384, 204_800).sm90a().pdl()
        .takes("AttendSharedParams").serves(Step::Shared, Cache::Rows, Dtype::Bf16, 128, 8).items(128, 0)
        .suffixes(8),
    Kernel::new("attend_shared_f16_d128_r8_sm90a", &ATTEND_SHARED_D128, 384, 204_800).sm90a().pdl()
        .takes("AttendSharedParams").serves(Step::Shared, Cache::Rows, Dtype::F16, 128, 8).items(128, 0)
        .suffixes(8),
    Kernel::new("attend_shared_fp8_bf16_d128_r16", &ATTEND_SHARED_FP8_D128, 128, 75_136).pdl()
        .takes("AttendSharedParams").then(&[Extra::LayerScales])
        .serves(Step::Shared, Cache::Fp8, Dtype::Bf16, 128, 16).items(128, 0).suffixes(4),
    Kernel::new("attend_shared_fp8_f16_d128_r16", &ATTEND_SHARED_FP8_D128, 128, 75_136).pdl()
        .takes("AttendSharedParams").then(&[Extra::LayerScales])
        .serves(Step::Shared, Cache::Fp8, Dtype::F16, 128, 16).items(128, 0).suffixes(4),
    Kernel::new("attend_shared_fp8_bf16_d128_r8", &ATTEND_SHARED_FP8_D128, 128, 74_496).pdl()
        .takes("AttendSharedParams").then(&[Extra::LayerScales])
        .serves(Step::Shared, Cache::Fp8, Dtype::Bf16, 128, 8).items(128, 0).suffixes(4),
    Kernel::new("attend_shared_fp8_f16_d128_r8", &ATTEND_SHARED_FP8_D128, 128, 74_496).pdl()
        .takes("AttendSharedParams").then(&[Extra::LayerScales])
        .serves(Step::Shared, Cache::Fp8, Dtype::F16, 128, 8).items(128, 0).suffixes(4),
    Kernel::new("attend_shared_fp8_bf16_d256_r16", &ATTEND_SHARED_FP8_D256, 128, 100_864).pdl()
        .takes("AttendSharedParams").then(&[Extra::LayerScales])
        .serves(Step::Shared, Cache::Fp8, Dtype::Bf16, 256, 16).items(64, 0).suffixes(2),
    Kernel::new("attend_shared_fp8_f16_d256_r16", &ATTEND_SHARED_FP8_D256, 128, 100_864).pdl()
        .takes("AttendSharedParams").then(&[Extra::LayerScales])
        .serves(Step::Shared, Cache::Fp8, Dtype::F16, 256, 16).items(64, 0).suffixes(2),
    Kernel::new("attend_shared_fp8_bf16_d256_r8", &ATTEND_SHARED_FP8_D256, 128, 100_864).pdl()
        .takes("AttendSharedParams").then(&[Extra::LayerScales])
        .serves(Step::Shared, Cache::Fp8, Dtype::Bf16, 256, 8).items(64, 0).suffixes(2),
    Kernel::new("attend_shared_fp8_f16_d256_r8", &ATTEND_SHARED_FP8_D256, 128, 100_864).pdl()
        .takes("AttendSharedParams").then(&[Extra::LayerScales])
        .serves(Step::Shared, Cache::Fp8, Dtype::F16, 256, 8).items(64, 0).suffixes(2),
    Kernel::new("attend_shared_fp8_bf16_d64_r16", &ATTEND_SHARED_FP8_D64, 128, 78_208).pdl()
        .takes("AttendSharedParams").then(&[Extra::LayerScales])
        .serves(Step::Shared, Cache::Fp8, Dtype::Bf16, 64, 16).items(128, 0).suffixes(4),
    Kernel::new("attend_shared_fp8_f16_d64_r16", &ATTEND_SHARED_FP8_D64, 128, 78_208).pdl()
        .takes("AttendSharedParams").then(&[Extra::LayerScales])
        .serves(Step::Shared, Cache::Fp8, Dtype::F16, 64, 16).items(128, 0).suffixes(4),
    Kernel::new("attend_shared_fp8_bf16_d64_r8", &ATTEND_SHARED_FP8_D64, 128, 77_568).pdl()
        .takes("AttendSharedParams").then(&[Extra::LayerScales])
        .serves(Step::Shared, Cache::Fp8, Dtype::Bf16, 64, 8).items(128, 0).suffixes(4),
    Kernel::new("attend_shared_fp8_f16_d64_r8", &ATTEND_SHARED_FP8_D64, 128, 77_568).pdl()
        .takes("AttendSharedParams").then(&[Extra::LayerScales])
        .serves(Step::Shared, Cache::Fp8, Dtype::F16, 64, 8).items(128, 0).suffixes(4),
    Kernel::new("attend_f32", &ATTEND_PLAIN, 128, 0).takes("AttendParams")
        .serves(Step::Check, Cache::Rows, Dtype::F32, 0, 0),
    Kernel::new("attend_fp8_f32", &ATTEND_PLAIN, 128, 0).takes("AttendParams").then(&[Extra::LayerScales])
        .serves(Step::Check, Cache::Fp8, Dtype::F32, 0, 0),
    Kernel::new("attend_latent_bf16_sm90a", &ATTEND_LATENT, 384, 229_376).sm90a().pdl().takes("AttendParams")
        .then(&[Extra::RowBoxes]).serves(Step::Latent, Cache::Rows, Dtype::Bf16, 0, 0),
    Kernel::new("attend_latent_f16_sm90a", &ATTEND_LATENT, 384, 229_376).sm90a().pdl().takes("AttendParams")
        .then(&[Extra::RowBoxes]).serves(Step::Latent, Cache::Rows, Dtype::F16, 0, 0),
    Kernel::new("attend_latent_fp8_bf16_sm90a", &ATTEND_LATENT_FP8, 384, 229_376).sm90a().pdl()
        .takes("AttendParams").then(&[Extra::LayerScales, Extra::LayerRope])
        .serves(Step::Latent, Cache::Fp8, Dtype::Bf16, 0, 0),
    Kernel::new("attend_latent_fp8_f16_sm90a", &ATTEND_LATENT_FP8, 384, 229_376).sm90a().pdl()
        .takes("AttendParams").then(&[Extra::LayerScales, Extra::LayerRope])
        .serves(Step::Latent, Cache::Fp8, Dtype::F16, 0, 0),
    Kernel::new("attend_latent_tiles_bf16", &ATTEND_LATENT, 256, 74_752).pdl().takes("AttendParams")
        .serves(Step::Latent, Cache::Rows, Dtype::Bf16, 0, 0),
    Kernel::new("attend_latent_tiles_f16", &ATTEND_LATENT, 256, 74_752).pdl().takes("AttendParams")
        .serves(Step::Latent, Cache::Rows, Dtype::F16, 0, 0),
    Kernel::new("attend_latent_tiles_fp8_bf16", &ATTEND_LATENT_FP8, 256, 78_336).pdl().takes("AttendParams")
        .then(&[Extra::LayerScales, Extra::LayerRope]).serves(Step::Latent, Cache::Fp8, Dtype::Bf16, 0, 0),
    Kernel::new("attend_latent_tiles_fp8_f16", &ATTEND_LATENT_FP8, 256, 78_336).pdl().takes("AttendParams")
        .then(&[Extra::LayerScales, Extra::LayerRope]).serves(Step::Latent, Cache::Fp8, Dtype::F16, 0, 0),
    Kernel::new("attend_latent_join_bf16", &ATTEND_LATENT, 128, 0).pdl().takes("AttendParams")
        .serves(Step::LatentJoin, Cache::Any, Dtype::Bf16, 0, 0),
    Kernel::new("attend_latent_join_f16", &ATTEND_LATENT, 128, 0).pdl().takes("AttendParams")
        .serves(Step::LatentJoin, Cache::Any, Dtype::F16, 0, 0),
    Kernel::new("attend_latent_f32", &ATTEND_LATENT, 128, 0).takes("AttendParams")
        .serves(Step::Latent, Cache::Rows, Dtype::F32, 0, 0),
    Kernel::new("attend_latent_fp8_f32", &ATTEND_LATENT_FP8, 128, 0).takes("AttendParams")
        .then(&[Extra::LayerScales, Extra::LayerRope]).serves(Step::Latent, Cache::Fp8, Dtype::F32, 0, 0),
    Kernel::new("store_labels", &SPARSE, 256, 0).pdl().takes("StoreLabelsParams"),
    Kernel::new("score_labels_bf16", &SPARSE, 128, 70_656).pdl().takes("SelectParams")
        .serves(Step::Score, Cache::Rows, Dtype::Bf16, 0, 0),
    Kernel::new("score_labels_f16", &SPARSE, 128, 70_656).pdl().takes("SelectParams")
        .serves(Step::Score, Cache::Rows, Dtype::F16, 0, 0),
    Kernel::new("select_top", &SPARSE, 512, 66_816).pdl().takes("SelectParams"),
    Kernel::new("resolve_selection", &SPARSE, 256, 0).pdl().takes("SelectParams"),
    Kernel::new("store_cache", &MOVES, 256, 0).pdl().takes("StoreCacheParams"),
    Kernel::new("store_cache_streaming", &MOVES, 512, 0).of("store_cache").pdl().takes("StoreCacheParams"),
    Kernel::new("store_cache_any", &MOVES, 256, 0).of("store_cache").pdl().takes("StoreCacheParams"),
    Kernel::new("store_cache_fp8", &MOVES, 256, 0).pdl().takes("StoreFp8Params"),
    Kernel::new("store_cache_fp8_any", &MOVES, 256, 0).of("store_cache_fp8").pdl().takes("StoreFp8Params"),
    Kernel::new("store_latent_fp8", &MOVES, 256, 0).pdl().takes("StoreLatentFp8Params"),
    Kernel::new("rope_store_f32_d128", &ROPE_STORE, 128, 0).pdl().takes("RopeStoreParams")
        .serves(Step::Rope, Cache::Any, Dtype::F32, 128, 0),
    Kernel::new("rope_store_bf16_d128", &ROPE_STORE, 128, 0).pdl().takes("RopeStoreParams")
        .serves(Step::Rope, Cache::Any, Dtype::Bf16, 128, 0),
    Kernel::new("rope_store_f16_d128", &ROPE_STORE, 128, 0).pdl().takes("RopeStoreParams")
        .serves(Step::Rope, Cache::Any, Dtype::F16, 128, 0),
    Kernel::new("rope_store_f32_d256", &ROPE_STORE, 128, 0).pdl().takes("RopeStoreParams")
        .serves(Step::Rope, Cache::Any, Dtype::F32, 256, 0),
    Kernel::new("rope_store_bf16_d256", &ROPE_STORE, 128, 0).pdl().takes("RopeStoreParams")
        .serves(Step::Rope, Cache::Any, Dtype::Bf16, 256, 0),
    Kernel::new("rope_store_f16_d256", &ROPE_STORE, 128, 0).pdl().takes("RopeStoreParams")
        .serves(Step::Rope, Cache::Any, Dtype::F16, 256, 0),
    Kernel::new("rope_store_f32_d64", &ROPE_STORE, 128, 0).pdl().takes("RopeStoreParams")
        .serves(Step::Rope, Cache::Any, Dtype::F32, 64, 0),
    Kernel::new("rope_store_bf16_d64", &ROPE_STORE, 128, 0).pdl().takes("RopeStoreParams")
        .serves(Step::Rope, Cache::Any, Dtype::Bf16, 64, 0),
    Kernel::new("rope_store_f16_d64", &ROPE_STORE, 128, 0).pdl().takes("RopeStoreParams")
        .serves(Step::Rope, Cache::Any, Dtype::F16, 64, 0),
    Kernel::new("copy_pages", &MOVES, 256, 0).takes("CopyPagesParams"),
    Kernel::new("copy_heads", &MOVES, 256, 0).takes("CopyHeadsParams"),
    Kernel::new("compact_slots", &MOVES, 256, 0).takes("CompactSlotsParams"),
    Kernel::new("load_plan", &MOVES, 256, 0).takes("LoadPlanParams"),
];

pub const STORE_LABELS: &Kernel = &KERNELS[98];
pub const SELECT_TOP: &Kernel = &KERNELS[101];
pub const RESOLVE_SELECTION: &Kernel = &KERNELS[102];
pub const STORE_CACHE: &Kernel = &KERNELS[103];
pub const STORE_CACHE_STREAMING: &Kernel = &KERNELS[104];
pub const STORE_CACHE_ANY: &Kernel = &KERNELS[105];
pub const STORE_CACHE_FP8: &Kernel = &KERNELS[106];
pub const STORE_CACHE_FP8_ANY: &Kernel = &KERNELS[107];
pub const STORE_LATENT_FP8: &Kernel = &KERNELS[108];
pub const COPY_PAGES: &Kernel = &KERNELS[118];
pub const COPY_HEADS: &Kernel = &KERNELS[119];
pub const COMPACT_SLOTS: &Kernel = &KERNELS[120];
pub const LOAD_PLAN: &Kernel = &KERNELS[121];

/// The head_dims of the kernels over rows of 16 bits and over fp8.
pub const HEAD_DIMS: [u32; 3] = [64, 128, 256];
/// The maximum number of query rows of one sequence and kv head in each decode kernel, such as `attend_decode_*_r8`.
pub const DECODE_ROWS: [u32; 3] = [8, 16, 64];
/// The maximum number of query rows of a suffix in each kernel that reads spans once.
pub const SUFFIX_ROWS: [u32; 2] = [8, 16];
/// The maximum number of query heads of a kv head.
pub const GROUP_MAX: u32 = 16;
