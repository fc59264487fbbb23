// attend_latent_fp8_f32: attention over latent rows of 512 of fp8 + 64 of bf16, one warp a query and four heads; for every GPU.
// Here with q and out of f32, for checking
// Twin:    src/backend/cpu attend              (the specification)
// Params:  AttendLatentFp8Params, 264 bytes    (ptx/params.cuh, src/backend/cuda/params.rs); v, head_stride, plan, partial, counters unused
// Shapes:  q [tokens, q_heads, 576], out [tokens, q_heads, 512]; k: rows of 512 bytes, which are V too; rope: rows of 64
// Grid:    x = any (CTAs stride over queries and heads), block 128, no dynamic shared memory
// Needs:   q, out, rope, scales and their strides 4-byte aligned, k and its strides 2-byte; a scale for each token
// Build:   ptx/build.py
#include "attend_latent_fp8.cuh"

extern "C" __global__ void __launch_bounds__(128, 2) attend_latent_fp8_f32(const __grid_constant__ AttendLatentFp8Params params) {
    attend_latent<f32, 4>(params.attend, CachedLatentFp8{params});
}
