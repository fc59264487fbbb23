// attend_shared_fp8_DTYPE_d64_r8: decode attention that reads spans of fp8 shared by several sequences once, head_dim 64.
// DTYPE:   bf16 or f16, of q and out: a file and an entry of each
// Twin:    src/backend/cpu attend              (the specification; here sums are f32, weights and, by token, V of spans are rounded to the dtype)
// Params:  AttendSharedFp8Params, 304 bytes    (ptx/params.cuh, src/backend/cuda/params.rs)
// Shapes:  q, out [tokens, q_heads, 64]; the rest stands at AttendSharedParams
// Grid:    x = multiprocessors * resident CTAs, block 128, 77,568 bytes of dynamic shared memory
// Needs:   no window; group 1..=8; sequences with extend_len * group above 8 are left out; else as
//          attend_decode_fp8_DTYPE_d64_r8
// Build:   ptx/build.py
#include "attend_shared_fp8.cuh"

extern "C" __global__ void __launch_bounds__(128, 2) attend_shared_fp8_DTYPE_d64_r8(const __grid_constant__ AttendSharedFp8Params params) {
    attend_shared_fp8<DTYPE, 64, 1, 77568>(params);
}
