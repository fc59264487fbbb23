// attend_extend_DTYPE_d128: attention of many query rows over paged K and V, head_dim 128.
// DTYPE:   bf16 or f16: a file and an entry of each
// Twin:    src/backend/cpu attend              (the specification; here sums are f32, weights are rounded to the dtype)
// Params:  AttendParams, 208 bytes             (ptx/params.cuh, src/backend/cuda/params.rs)
// Shapes:  q, out [tokens, q_heads, 128]; plan ExtendHead, ExtendWork[..]; partial f32 [slots, kv_heads, 128, 130];
//          counters u32 [1 + slots * kv_heads]
// Grid:    x = SplitShape::extend_ctas, block 128, 98,304 bytes of dynamic shared memory
// Needs:   q, out, k, v and all strides 16-byte aligned; group 1..=16; the plan made for this group and window
// Build:   ptx/build.py
#include "attend_extend.cuh"

extern "C" __global__ void __launch_bounds__(128, 2) attend_extend_DTYPE_d128(const __grid_constant__ AttendParams params) {
    attend_extend<DTYPE, 128, 2, 4, 64>(params);
}
