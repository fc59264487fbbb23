// attend_extend_fp8_DTYPE_d64: attention of many query rows over paged K and V of fp8, head_dim 64.
// DTYPE:   bf16 or f16, of q and out: a file and an entry of each
// Twin:    src/backend/cpu attend              (the specification; here sums are f32, weights and, by token, K and V are rounded to the dtype)
// Params:  AttendFp8Params, 240 bytes          (ptx/params.cuh, src/backend/cuda/params.rs)
// Shapes:  q, out [tokens, q_heads, 64]; plan ExtendHead, ExtendWork[..]; partial f32 [slots, kv_heads, 128, 66];
//          counters u32 [1 + slots * kv_heads]
// Grid:    x = SplitShape::extend_ctas, block 128, 49,152 bytes of dynamic shared memory
// Needs:   q, out, k, v and all strides 16-byte aligned; group 1..=16; the plan made for this group and window
// Build:   ptx/build.py
#include "attend_extend.cuh"

extern "C" __global__ void __launch_bounds__(128, 2) attend_extend_fp8_DTYPE_d64(const __grid_constant__ AttendFp8Params params) {
    attend_extend<Fp8<DTYPE>, 64, 2, 4, 64>(params.attend);
}
