// attend_shared_DTYPE_d256_r16: decode attention that reads spans shared by several sequences once, head_dim 256.
// DTYPE:   bf16 or f16: a file and an entry of each
// Twin:    src/backend/cpu attend              (the specification; here sums are f32, weights are rounded to the dtype)
// Params:  AttendSharedParams, 272 bytes       (ptx/params.cuh, src/backend/cuda/params.rs)
// Shapes:  q, out [tokens, q_heads, 256]; the rest stands at AttendSharedParams
// Grid:    x = multiprocessors * resident CTAs, block 128, 99,840 bytes of dynamic shared memory
// Needs:   no window; group 1..=16; sequences with extend_len * group above 16 are left out; else as
//          attend_decode_DTYPE_d256_r16
// Build:   ptx/build.py
#include "attend_shared.cuh"

extern "C" __global__ void __launch_bounds__(128, 2) attend_shared_DTYPE_d256_r16(const __grid_constant__ AttendSharedParams params) {
    attend_shared<DTYPE, 256, 2, 99840>(params);
}
