// attend_extend_DTYPE_d128_sm90a: attend_extend_DTYPE_d128 for Hopper, on wgmma.
// DTYPE:   bf16 or f16: a file and an entry of each
// Twin:    src/backend/cpu attend              (the specification; here sums are f32, weights are rounded to the dtype)
// Params:  AttendParams, 208 bytes             (ptx/params.cuh, src/backend/cuda/params.rs)
// Shapes:  q, out [tokens, q_heads, 128]; plan ExtendHead, ExtendWork[..]; partial f32 [slots, kv_heads, 128, 130];
//          counters u32 [1 + slots * kv_heads]
// Grid:    x = SplitShape::extend_ctas, block 384, 204,800 bytes of dynamic shared memory
// Needs:   compute capability 9.0; else as attend_extend_DTYPE_d128
// Build:   ptx/build.py
#include "attend_extend_sm90a.cuh"

extern "C" __global__ void __launch_bounds__(384, 1) attend_extend_DTYPE_d128_sm90a(const __grid_constant__ AttendParams params) {
    attend_extend_hopper<DTYPE>(params);
}
