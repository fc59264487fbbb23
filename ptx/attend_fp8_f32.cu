// attend_fp8_f32: attention over paged K and V of fp8 with rows of f32, for checking: slow and plain.
// Twin:    src/backend/cpu attend              (the specification)
// Params:  AttendFp8Params, 240 bytes          (ptx/params.cuh, src/backend/cuda/params.rs)
// Shapes:  q, out [tokens, q_heads, head_dim]; head_dim a multiple of 32, at most 256; plan, partial, counters unused
// Grid:    any x (CTAs stride over sequences and heads), block 128, no dynamic shared memory
// Needs:   q, out and their strides 4-byte aligned; group 1..=16
// Build:   ptx/build.py
#include "attend_plain.cuh"
#include "fp8.cuh"

struct CachedFp8 {
    enum : u32 { BYTES = 1 };
    const AttendFp8Params& p;
    DEVICE float load(u64 at) {
        u32 byte, low, high;
        asm volatile("ld.global.u8 %0, [%1];" : "=r"(byte) : "l"(at));
        widen(byte, low, high);
        return low_half(low);
    }
    __device__ __forceinline__ float2 scales(u32 kv_head, u32 page, u32 slot) const {
        const u64 at = static_cast<u64>(kv_head) * p.scales.head_stride + (p.scales.by_token ? page * p.scales.page_stride + slot * 4 : 0);
        return make_float2(load_float(p.scales.k + at), load_float(p.scales.v + at));
    }
};

extern "C" __global__ void __launch_bounds__(128, 4) attend_fp8_f32(const __grid_constant__ AttendFp8Params params) {
    attend_plain(params.attend, CachedFp8{params});
}
