// attend_f32: attention in f32, one warp a query row and head; for checking, not for speed.
// Twin:    src/backend/cpu attend              (the specification)
// Params:  AttendParams, 208 bytes             (ptx/params.cuh, src/backend/cuda/params.rs); plan, partial, counters unused
// Shapes:  q, out f32 [tokens, q_heads, head_dim]; head_dim = head_stride / 4, a multiple of 32, at most 256
// Grid:    x = any (CTAs stride over sequences and heads), block 128, no dynamic shared memory
// Needs:   q, out, k, v and all strides 4-byte aligned; group 1..=16
// Build:   ptx/build.py
#include "attend_plain.cuh"

struct CachedF32 {
    enum : u32 { BYTES = 4 };
    DEVICE float load(u64 at) { return load_float(at); }
    __device__ __forceinline__ float2 scales(u32, u32, u32) const { return make_float2(1.f, 1.f); }
};

extern "C" __global__ void __launch_bounds__(128, 4) attend_f32(const __grid_constant__ AttendParams params) {
    attend_plain(params, CachedF32());
}
