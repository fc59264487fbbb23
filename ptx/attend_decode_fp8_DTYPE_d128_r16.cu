// attend_decode_fp8_DTYPE_d128_r16: attention over paged K and V of fp8, of up to 16 query rows a kv head, head_dim 128.
// DTYPE:   bf16 or f16, of q and out: a file and an entry of each
// Twin:    src/backend/cpu attend              (the specification; here sums are f32, weights are rounded to the dtype)
// Params:  AttendFp8Params, 240 bytes          (ptx/params.cuh, src/backend/cuda/params.rs)
// Shapes:  q, out [tokens, q_heads, 128]; plan DecodeWork[ceil(grid / stripes)]; partial f32 [2 * grid, 16, 130]; counters u32 [grid]
// Grid:    x = SplitShape::decode_ctas, block 128, 90,112 bytes of dynamic shared memory
// Needs:   q, out, k, v and all strides 16-byte aligned; group 1..=16; the plan made for this grid, group and window
// Build:   ptx/build.py
#include "attend_decode_fp8.cuh"

extern "C" __global__ void __launch_bounds__(128, 2) attend_decode_fp8_DTYPE_d128_r16(const __grid_constant__ AttendFp8Params params) {
    attend_decode_fp8<DTYPE, 128, 2, 4, 32, 2>(params);
}
