// Joins the results of attention over latent rows for items that were cut into parts (latent_plan.cuh).
#pragma once
#include "attend.cuh"
#include "pdl.cuh"

// Joins the parts of all cut items. A warp joins 128 columns of one row. If some item has more than BATCH parts, four warps share
// the parts of each item.
template <class T> DEVICE void attend_latent_join(const AttendParams& p) {
    constexpr int RANK = 512, BATCH = 8, WARPS = 4;
    __shared__ float2 tops[WARPS];
    __shared__ float4 sums[WARPS][32];
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const uint4 head = load_uint4(p.plan);
    const u64 between = head.w;  // rows of `partial` from one part's slot to the next part's
    const u32 most = head.y, count = head.x * most * 4;
    const bool shared = head.z > BATCH;
    let_next_start();
    wait_for_previous();
    const u32 stride = shared ? gridDim.x : gridDim.x * WARPS;
    for (u32 at = shared ? blockIdx.x : blockIdx.x * WARPS + warp; at < count; at += stride) {
        const uint4 join = load_uint4(p.plan + 16 + 16ull * (at / (most * 4)));
        const u32 row = at / 4 % most, columns = at % 4 * 128, packed = join.y + row, parts = join.w & 65535, slot = join.w >> 16;
        if (packed >= join.z) continue;
        float top = MINUS_INF, sum = 0.f;
        float4 o = make_float4(0.f, 0.f, 0.f, 0.f);
        const u64 data = p.partial + ((slot * between + row) * RANK + columns + lane * 4) * 4;
        const u64 of_row = p.counters + (slot * between + row) * 8;
        const u32 share = shared ? (parts + WARPS - 1) / WARPS : parts, begin = shared ? warp * share : 0, end = min(parts, begin + share);
        for (u32 from = begin; from < end; from += BATCH) {
            float4 x[BATCH];
            float2 of[BATCH];
#pragma unroll
            for (int k = 0; k < BATCH; ++k) {
                const bool is = from + k < end;
                of[k] = make_float2(MINUS_INF, 0.f), x[k] = make_float4(0.f, 0.f, 0.f, 0.f);
                load_float2_shared(of[k], of_row + (from + k) * (between * 8), is);
                load_float4_shared<0>(x[k], data + (from + k) * (between * (RANK * 4)), is);
            }
            float above = top;
#pragma unroll
            for (int k = 0; k < BATCH; ++k) above = fmaxf(above, of[k].x);
            const float base = above == MINUS_INF ? 0.f : above, old = exp2_fast(top - base);
            top = above, sum *= old, o.x *= old, o.y *= old, o.z *= old, o.w *= old;
#pragma unroll
            for (int k = 0; k < BATCH; ++k) {
                const float weight = exp2_fast(of[k].x - base);
                sum += of[k].y * weight;
                o.x += x[k].x * weight, o.y += x[k].y * weight, o.z += x[k].z * weight, o.w += x[k].w * weight;
            }
        }
        if (shared) {
            __syncthreads();
            if (lane == 0) tops[warp] = make_float2(top, sum);
            sums[warp][lane] = o;
            __syncthreads();
            if (warp != 0) continue;
            top = fmaxf(fmaxf(tops[0].x, tops[1].x), fmaxf(tops[2].x, tops[3].x));
            const float base = top == MINUS_INF ? 0.f : top;
            sum = 0.f, o = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
            for (int w = 0; w < WARPS; ++w) {
                const float weight = exp2_fast(tops[w].x - base);
                const float4 x = sums[w][lane];
                sum += tops[w].y * weight;
                o.x += x.x * weight, o.y += x.y * weight, o.z += x.z * weight, o.w += x.w * weight;
            }
        }
        const u32 query = packed / p.group, head = packed - query * p.group;
        const float worth = enter_sink(p, head, top, sum), inverse = sum > 0.f ? worth * (1.f / sum) : 0.f;
        const u64 token = join.x + query;
        store_uint2(p.out + token * p.out_stride + head * (RANK * 2) + (columns + lane * 4) * 2, pack(T(), o.x * inverse, o.y * inverse),
                    pack(T(), o.z * inverse, o.w * inverse));
        if (columns == 0 && lane == 0 && p.lse != 0)
            store_float(p.lse + (token * p.q_heads + head) * 4, sum > 0.f ? (top + log2_fast(sum)) * LN_2 : MINUS_INF);
    }
}
