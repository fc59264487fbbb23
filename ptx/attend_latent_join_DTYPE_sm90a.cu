// attend_latent_join_DTYPE_sm90a: joins what attend_latent_DTYPE_sm90a or attend_latent_fp8_DTYPE_sm90a left in parts, and enters sinks.
// DTYPE:   bf16 or f16: a file and an entry of each
// Params:  AttendParams, 208 bytes             (ptx/params.cuh, src/backend/cuda/params.rs); counters: f32 [slots, 64, 2]
// Shapes:  out [tokens, q_heads, 512]; plan: their number, the most rows and parts of one, a zero, LatentJoin[..]; partial f32 [slots, 64, 512]
// Grid:    x = any, block 128, no dynamic shared memory
// Build:   ptx/build.py
#include "attend_latent_sm90a.cuh"

extern "C" __global__ void __launch_bounds__(128) attend_latent_join_DTYPE_sm90a(const __grid_constant__ AttendParams params) {
    attend_latent_join<DTYPE>(params);
}
