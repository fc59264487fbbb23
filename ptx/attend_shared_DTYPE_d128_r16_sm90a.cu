// attend_shared_DTYPE_d128_r16_sm90a: decode attention that reads spans shared by several sequences once, on wgmma, head_dim 128.
// DTYPE:   bf16 or f16: a file and an entry of each
// Twin:    src/backend/cpu attend              (the specification; here sums are f32, weights are rounded to the dtype)
// Params:  AttendSharedParams, 272 bytes       (ptx/params.cuh, src/backend/cuda/params.rs)
// Shapes:  q, out [tokens, q_heads, 128]; the rest stands at AttendSharedParams
// Grid:    x = multiprocessors, block 384, 196,608 bytes of dynamic shared memory
// Needs:   compute capability 9.0; no window; group 1..=16; sequences with extend_len * group above 16 are left out; else as
//          attend_decode_DTYPE_d128_r16
// Build:   ptx/build.py
#include "attend_shared_sm90a.cuh"

extern "C" __global__ void __launch_bounds__(384, 1) attend_shared_DTYPE_d128_r16_sm90a(const __grid_constant__ AttendSharedParams params) {
    attend_shared_hopper<DTYPE, 2>(params);
}
