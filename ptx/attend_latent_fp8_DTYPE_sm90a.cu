// attend_latent_fp8_DTYPE_sm90a: attention over latent rows of 512 of fp8 + 64 of bf16, up to 128 heads, on compute capability 9.0.
// DTYPE:   bf16 or f16: a file and an entry of each
// Twin:    src/backend/cpu attend              (the specification; here sums are f32, weights are rounded to the dtype)
// Params:  AttendLatentFp8Params, 264 bytes    (ptx/params.cuh, src/backend/cuda/params.rs); counters: f32 [slots, 64, 2]
// Shapes:  q [tokens, q_heads, 576], out [tokens, q_heads, 512]; k: rows of 512 bytes, which are V too; rope: rows of 64 of bf16;
//          plan: latent_plan.cuh; partial f32 [slots, 64, 512]
// Grid:    x = multiprocessors, an even number, block 384, 229,376 bytes of dynamic shared memory; clusters of 2
// Needs:   q, out, k, rope and all their strides 16-byte aligned, a scale for each token; the plan made for this grid, group and window
// Build:   ptx/build.py
#include "attend_latent_bytes_sm90a.cuh"

extern "C" __global__ void __launch_bounds__(384, 1) __cluster_dims__(2, 1, 1)
    attend_latent_fp8_DTYPE_sm90a(const __grid_constant__ AttendLatentFp8Params params) {
    attend_latent_hopper<DTYPE, true, LatentBytes<DTYPE>>(params);
}
