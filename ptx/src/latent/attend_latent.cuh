// Attention over latent rows by queries of f32: exact, not fast.
//
// A warp takes one query and HEADS of its heads, which read the same rows, one token after another. A lane has numbers 2 i and
// 2 i + 1 of a row for i = lane, lane + 32, ...; the first RANK numbers are also V. `Cached` loads the numbers of a row:
// load(parameters, look-up, lane, numbers).
#pragma once
#include "attend.cuh"

enum : int { RANK = 512, ROPE = 64, PAIRS = (RANK + ROPE) / 64, VALUES = RANK / 64 };

struct f32 {};

DEVICE float2 load_pair(f32, u64 at, u32 i) {
    const u64 from = at + i * 8ull;
    return make_float2(__int_as_float(load_written_u32(from)), __int_as_float(load_written_u32(from + 4)));
}
DEVICE float2 load_pair(bf16, u64 at, u32 i) {
    const u32 bits = load_written_u32(at + i * 4ull);
    return make_float2(__int_as_float(bits << 16), __int_as_float(bits & 0xffff0000));
}
DEVICE void store_pair(f32, u64 at, u32 i, float x, float y) { store_float(at + i * 8ull, x), store_float(at + i * 8ull + 4, y); }

// Unquantised rows of T.
template <class T> struct CachedLatent {
    DEVICE void load(const AttendParams& p, const Look& look, u32 lane, float2 (&k)[PAIRS]) {
        const u64 from = p.k + slot_offset(p, look, load_page(p, look, load_directory(p, look)));
#pragma unroll
        for (int i = 0; i < PAIRS; ++i) k[i] = load_pair(T(), from, lane + i * 32);
    }
};

template <class T, int SIZE, class Cached> DEVICE void attend_latent(const AttendParams& p, const Cached& cached) {
    constexpr int HEADS = 4;
    const u32 lane = threadIdx.x % 32, warp = blockIdx.x * 4 + threadIdx.x / 32, warps = gridDim.x * 4;
    const u32 groups = (p.q_heads + HEADS - 1) / HEADS;
    u32 passed = 0;  // number of (query, heads) of earlier sequences
    for (u32 b = 0; b < p.batch; ++b) {
        const uint4 row = load_uint4(p.batch_rows + 16ull * b);
        const u32 qo_start = row.y, extend_len = row.z, kv_len = row.w, count = extend_len * groups;
        for (u32 at = (warp + warps - passed % warps) % warps; at < count; at += warps) {
            const u32 query = at / groups, first = at % groups * HEADS;
            const u32 end = kv_len == 0 ? 0 : kv_len - extend_len + query + 1;
            const u32 begin = p.window != 0 && end > p.window ? end - p.window : 0;
            const bool tree = row.x >= TREE_ROW;
            const uint2 mask = tree ? tree_mask(p, qo_start + query) : make_uint2(0, 0);
            float2 q[HEADS][PAIRS], o[HEADS][VALUES];
            float top[HEADS], sum[HEADS];
#pragma unroll
            for (int h = 0; h < HEADS; ++h) {
                // Heads past the last repeat it.
                const u64 from = p.q + (qo_start + query) * p.q_stride + min(first + h, p.q_heads - 1) * static_cast<u64>((RANK + ROPE) * SIZE);
#pragma unroll
                for (int i = 0; i < PAIRS; ++i) q[h][i] = load_pair(T(), from, lane + i * 32);
#pragma unroll
                for (int i = 0; i < VALUES; ++i) o[h][i] = make_float2(0.f, 0.f);
                top[h] = MINUS_INF, sum[h] = 0.f;
            }
            for (u32 position = begin; position < end; ++position) {
                if (tree && !(tree_sees(mask, kv_len, position) & 1)) continue;
                const Look look = look_up(p, row.x & ~TREE_ROW, position);
                float2 k[PAIRS];
                cached.load(p, look, lane, k);
#pragma unroll
                for (int h = 0; h < HEADS; ++h) {
                    float s = 0.f;
#pragma unroll
                    for (int i = 0; i < PAIRS; ++i) s += q[h][i].x * k[i].x + q[h][i].y * k[i].y;
#pragma unroll
                    for (int i = 16; i > 0; i /= 2) s += __shfl_xor_sync(~0u, s, i);
                    s *= p.scale;
                    if (p.soft_cap > 0.f) s = p.soft_cap * tanhf(s / p.soft_cap);
                    const float above = fmaxf(top[h], s), old = expf(top[h] - above), weight = expf(s - above);
                    sum[h] = sum[h] * old + weight, top[h] = above;
#pragma unroll
                    for (int i = 0; i < VALUES; ++i) o[h][i].x = o[h][i].x * old + weight * k[i].x, o[h][i].y = o[h][i].y * old + weight * k[i].y;
                }
            }
#pragma unroll
            for (int h = 0; h < HEADS; ++h) {
                const u32 head = first + h;
                if (head >= p.q_heads) continue;
                float worth = 1.f;
                if (p.sinks != 0 && sum[h] > 0.f) {
                    const float sink = __int_as_float(load_written_u32(p.sinks + head * 4ull)), above = fmaxf(top[h], sink);
                    worth = expf(top[h] - above), sum[h] = sum[h] * worth + expf(sink - above), top[h] = above;
                }
                const float inverse = sum[h] > 0.f ? worth / sum[h] : 0.f;
                const u64 to = p.out + (qo_start + query) * p.out_stride + head * static_cast<u64>(RANK * SIZE);
#pragma unroll
                for (int i = 0; i < VALUES; ++i) store_pair(T(), to, lane + i * 32, o[h][i].x * inverse, o[h][i].y * inverse);
                if (lane == 0 && p.lse != 0)
                    store_float(p.lse + ((qo_start + query) * static_cast<u64>(p.q_heads) + head) * 4, sum[h] > 0.f ? top[h] + logf(sum[h]) : MINUS_INF);
            }
        }
        passed += count;
    }
}
