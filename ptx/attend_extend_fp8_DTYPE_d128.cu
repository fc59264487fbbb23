// attend_extend_fp8_DTYPE_d128: attention of many query rows over paged K and V of fp8, head_dim 128.
// DTYPE:   bf16 or f16, of q and out: a file and an entry of each
// Twin:    src/backend/cpu attend              (the specification; here sums are f32, weights and, by token, K and V are rounded to the dtype)
// Params:  AttendFp8Params, 240 bytes          (ptx/params.cuh, src/backend/cuda/params.rs)
// Shapes:  q, out [tokens, q_heads, 128]; plan ExtendHead, ExtendWork[..]; partial f32 [slots, kv_heads, 128, 130];
//          counters u32 [1 + slots * kv_heads]
// Grid:    x = SplitShape::extend_ctas, block 256, 98,304 bytes of dynamic shared memory
// Needs:   q, out, k, v and all strides 16-byte aligned; group 1..=16; the plan made for this group and window
// Build:   ptx/build.py
#include "attend_extend.cuh"

extern "C" __global__ void __launch_bounds__(256, 1) attend_extend_fp8_DTYPE_d128(const __grid_constant__ AttendFp8Params params) {
    attend_extend<Fp8<DTYPE>, 128, 1, 8, 64>(params.attend);
}
