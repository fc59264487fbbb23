// attend_latent_DTYPE_sm90a: attention over latent rows of 512 + 64, up to 128 heads, on compute capability 9.0.
// DTYPE:   bf16 or f16: a file and an entry of each
// Twin:    src/backend/cpu attend              (the specification; here sums are f32, weights are rounded to the dtype)
// Params:  AttendLatentRowsParams, 384 bytes   (ptx/params.cuh, src/backend/cuda/params.rs); counters: f32 [slots, 64, 2]
// Shapes:  q [tokens, q_heads, 576], out [tokens, q_heads, 512]; k: rows of 576, of which V is the first 512;
//          plan: latent_plan.cuh; partial f32 [slots, 64, 512]
// Grid:    x = multiprocessors, an even number, block 384, 229,376 bytes of dynamic shared memory; clusters of 2
// Needs:   q, out, k and all strides 16-byte aligned; the plan made for this grid, group and window
// Build:   ptx/build.py
#include "attend_latent_sm90a.cuh"

extern "C" __global__ void __launch_bounds__(384, 1) __cluster_dims__(2, 1, 1)
    attend_latent_DTYPE_sm90a(const __grid_constant__ AttendLatentRowsParams params) {
    attend_latent_hopper<DTYPE, false, LatentHopper<DTYPE>>(params);
}
