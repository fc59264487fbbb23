// attend_decode_DTYPE_d128_r64_sm90a: attention over paged K and V of up to 64 query rows a kv head, head_dim 128, on wgmma.
// DTYPE:   bf16 or f16: a file and an entry of each
// Twin:    src/backend/cpu attend              (the specification; here sums are f32, weights are rounded to the dtype)
// Params:  AttendParams, 208 bytes             (ptx/params.cuh, src/backend/cuda/params.rs)
// Shapes:  q, out [tokens, q_heads, 128]; plan DecodeWork[ceil(grid / stripes)]; partial f32 [2 * grid, 64, 130]; counters u32 [grid]
// Grid:    x = SplitShape::decode_ctas, block 256, 114,688 bytes of dynamic shared memory
// Needs:   compute capability 9.0; q, out, k, v and all strides 16-byte aligned; group 1..=16; the plan made for this grid, group and
//          window; serves trees of drafts too
// Build:   ptx/build.py
#include "attend_decode_sm90a.cuh"

extern "C" __global__ void __launch_bounds__(256, 2) attend_decode_DTYPE_d128_r64_sm90a(const __grid_constant__ AttendParams params) {
    attend_decode_hopper<DTYPE>(params);
}
