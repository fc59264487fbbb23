// attend_extend_fp8_DTYPE_d128_sm90a: attend_extend_fp8_DTYPE_d128 for Hopper, on wgmma, where heads have scales.
// DTYPE:   bf16 or f16, of q and out: a file and an entry of each
// Twin:    src/backend/cpu attend              (the specification; here sums are f32, weights and q are rounded to f16, q times a power of two a row)
// Params:  AttendFp8Params, 240 bytes          (ptx/params.cuh, src/backend/cuda/params.rs)
// Shapes:  q, out [tokens, q_heads, 128]; plan ExtendHead, ExtendWork[..]; partial f32 [slots, kv_heads, 128, 130];
//          counters u32 [1 + slots * kv_heads]
// Grid:    x = SplitShape::extend_ctas, block 384, 196,608 bytes of dynamic shared memory
// Needs:   compute capability 9.0; scales.by_token 0; no trees; else as attend_extend_fp8_DTYPE_d128
// Build:   ptx/build.py
#include "attend_extend_sm90a.cuh"

extern "C" __global__ void __launch_bounds__(384, 1) attend_extend_fp8_DTYPE_d128_sm90a(const __grid_constant__ AttendFp8Params params) {
    attend_extend_hopper<Fp8<DTYPE>, Scales::STATIC>(params.attend);
}
