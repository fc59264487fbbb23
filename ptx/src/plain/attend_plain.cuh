// Attention with rows of f32 over paged K and V, one warp for each query row and head; for checks, not for speed. `Cached`
// describes an element of the pool: BYTES, load(address), and scales(kv head, page, slot) of K and V.
#pragma once
#include "attend.cuh"
#include "e4m3.cuh"

template <typename Cached>
DEVICE void attend_plain(const AttendParams& p, const Cached& cached) {
    const u32 lane = threadIdx.x % 32, dims = p.head_dim / 32;  // dims of one lane
    const u32 warp = blockIdx.x * 4 + threadIdx.x / 32, warps = gridDim.x * 4;
    u32 passed = 0;  // number of (query, head) pairs of earlier sequences
    for (u32 b = 0; b < p.batch; ++b) {
        const uint4 row = load_uint4(p.batch_rows + 16ull * b);
        const u32 qo_start = row.y, extend_len = row.z, kv_len = row.w;
        const u32 pairs = extend_len * p.q_heads;
        for (u32 pair = (warp + warps - passed % warps) % warps; pair < pairs; pair += warps) {
            const u32 query = pair / p.q_heads, head = pair % p.q_heads;
            const u32 end = kv_len == 0 ? 0 : kv_len - extend_len + query + 1;
            const u32 begin = p.window != 0 && end > p.window ? end - p.window : 0;
            const bool tree = row.x >= TREE_ROW;
            const uint2 mask = tree ? tree_mask(p, qo_start + query) : make_uint2(0, 0);
            const u64 q_at = p.q + (qo_start + query) * p.q_stride + head * (dims * 128);
            const u64 in_slot = head / p.group * p.head_stride;
            float q[8], o[8];
#pragma unroll
            for (u32 i = 0; i < 8; ++i) q[i] = i < dims ? load_float(q_at + (lane + i * 32) * 4) : 0.f, o[i] = 0.f;
            float top = MINUS_INF, sum = 0.f;
            for (u32 position = begin; position < end; ++position) {
                if (tree && !(tree_sees(mask, kv_len, position) & 1)) continue;
                const Look look = look_up(p, row.x & ~TREE_ROW, position);
                const u32 page = load_page(p, look, load_directory(p, look));
                const u64 at = in_slot + slot_offset(p, look, page);
                const float2 scales = cached.scales(head / p.group, page, look.slot);
                float s = 0.f;
#pragma unroll
                for (u32 i = 0; i < 8; ++i) s += i < dims ? q[i] * Cached::load(p.k + at + (lane + i * 32) * Cached::BYTES) : 0.f;
#pragma unroll
                for (int i = 16; i > 0; i /= 2) s += __shfl_xor_sync(~0u, s, i);
                s *= scales.x * p.scale;
                if (p.soft_cap > 0.f) s = p.soft_cap * tanhf(s / p.soft_cap);
                const float above = fmaxf(top, s), old = expf(top - above), weight = expf(s - above);
                sum = sum * old + weight, top = above;
#pragma unroll
                for (u32 i = 0; i < 8; ++i) o[i] = o[i] * old + (i < dims ? weight * scales.y * Cached::load(p.v + at + (lane + i * 32) * Cached::BYTES) : 0.f);
            }
            float worth = 1.f;
            if (p.sinks != 0 && sum > 0.f) {
                const float sink = load_float(p.sinks + head * 4), above = fmaxf(top, sink);
                worth = expf(top - above), sum = sum * worth + expf(sink - above), top = above;
            }
            const u64 to = p.out + (qo_start + query) * p.out_stride + head * (dims * 128);
#pragma unroll
            for (u32 i = 0; i < 8; ++i)
                if (i < dims) store_float(to + (lane + i * 32) * 4, sum != 0.f ? o[i] * worth / sum : 0.f);
            if (lane == 0 && p.lse != 0)
                store_float(p.lse + ((qo_start + query) * static_cast<u64>(p.q_heads) + head) * 4, sum != 0.f ? top + logf(sum) : MINUS_INF);
        }
        passed += pairs;
    }
}

struct CachedF32 {
    enum : u32 { BYTES = 4 };
    DEVICE float load(u64 at) { return load_float(at); }
    __device__ __forceinline__ float2 scales(u32, u32, u32) const { return make_float2(1.f, 1.f); }
};

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
