// attend_latent_DTYPE: attention over latent rows of 512 + 64, one warp a query and four heads; for every GPU.
// DTYPE:   bf16 or f16: a file and an entry of each
// Twin:    src/backend/cpu attend              (the specification)
// Params:  AttendParams, 208 bytes             (ptx/params.cuh, src/backend/cuda/params.rs); v, head_stride, plan, partial, counters unused
// Shapes:  q [tokens, q_heads, 576], out [tokens, q_heads, 512]; k: rows of 576, of which V is the first 512
// Grid:    x = any (CTAs stride over queries and heads), block 128, no dynamic shared memory
// Needs:   q, out, k and all strides 4-byte aligned
// Build:   ptx/build.py
#include "attend_latent.cuh"

extern "C" __global__ void __launch_bounds__(128, 2) attend_latent_DTYPE(const __grid_constant__ AttendParams params) {
    attend_latent<DTYPE, 2>(params, CachedLatent<DTYPE>());
}
