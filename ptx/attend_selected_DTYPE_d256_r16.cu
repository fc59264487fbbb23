// attend_selected_DTYPE_d256_r16: attention over listed slots of K and V, one token a row, up to 16 query heads a kv head, head_dim 256.
// DTYPE:   bf16 or f16: a file and an entry of each
// Twin:    src/backend/cpu attend_selected     (the specification; here sums are f32, weights are rounded to the dtype)
// Params:  AttendSelectedParams, 240 bytes     (ptx/params.cuh, src/backend/cuda/params.rs)
// Shapes:  q, out [tokens, q_heads, 256]; plan DecodeWork[ceil(grid / stripes)]; partial f32 [2 * grid, 16, 258]; counters u32 [grid]
// Grid:    x = SplitShape::decode_ctas, block 64, 81,920 bytes of dynamic shared memory
// Needs:   q, out, k, v and all strides 16-byte aligned; group 1..=16; the plan made for this grid and group, over lists of these lengths
// Build:   ptx/build.py
#include "attend_decode.cuh"

extern "C" __global__ void __launch_bounds__(64, 2) attend_selected_DTYPE_d256_r16(const __grid_constant__ AttendSelectedParams params) {
    attend_decode<Listed<DTYPE>, 256, 2, 2, 2>(params.attend);
}
