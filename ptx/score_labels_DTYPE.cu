// score_labels_DTYPE: the score of each position that a row with lists sees but its own, for each kv head, as a number that orders
// like it.
// DTYPE:   bf16 or f16: a file and an entry of each
// Twin:    src/backend/cpu/labels.rs score, order (the specification, bit by bit)
// Params:  SelectParams, 272 bytes             (ptx/params.cuh, src/backend/cuda/params.rs); positions, listed, counts unused
// Shapes:  q [tokens, q_heads, head_dim]; channels u32 [kv_heads, channel_count]; labels as K, channel_count wide; keys as starts says
// Grid:    x = any (CTAs share the key chunks), y = ceil(kv_heads / 8), block 256
// Needs:   q 2-byte aligned; channel_count up to 256; labels 2-byte aligned. Rows past key_chunks are left out
// Build:   ptx/build.py
#include "select.cuh"

DEVICE float load_number(u64 at) {
    u16 bits;
    asm volatile("ld.global.u16 %0, [%1];" : "=h"(bits) : "l"(at) : "memory");
    return widen(DTYPE(), bits);
}

// Greater where the score is: 0 and -0 are equal, NaN is below all others.
DEVICE u32 order(float score) {
    if (score != score) return 0;
    const u32 bits = __float_as_int(__fadd_rn(score, 0.f));
    return bits >> 31 ? ~bits : bits | 1u << 31;
}

// The scores of the labels of some heads, products in the order of channels, go to their keys. EIGHTS: of so many times eight channels,
// which are loaded together, some heads at a time; 0: of any number, one by one.
template <int EIGHTS> DEVICE void score_heads(const float* queries, u32 count, u32 heads, u64 labels, u64 label_stride, u64 keys, u64 key_stride) {
    if constexpr (EIGHTS == 0) {
        for (u32 head = 0; head < heads; ++head) {
            float score = 0.f;
            for (u32 i = 0; i < count; ++i) score = __fmaf_rn(queries[head * count + i], load_number(labels + head * label_stride + 2ull * i), score);
            store_u32(keys + head * key_stride, order(score));
        }
    } else {
        constexpr u32 ABREAST = 8 / EIGHTS;
        for (u32 first = 0; first < heads; first += ABREAST) {
            uint4 words[ABREAST][EIGHTS];
#pragma unroll
            for (u32 j = 0; j < ABREAST; ++j)
#pragma unroll
                for (u32 i = 0; i < EIGHTS; ++i) words[j][i] = load_uint4(labels + min(first + j, heads - 1) * label_stride + i * 16);
#pragma unroll
            for (u32 j = 0; j < ABREAST; ++j) {
                if (first + j >= heads) break;
                const float* const query = queries + (first + j) * count;
                float score = 0.f;
#pragma unroll
                for (u32 i = 0; i < EIGHTS; ++i) {
                    const u32 pairs[4] = {words[j][i].x, words[j][i].y, words[j][i].z, words[j][i].w};
#pragma unroll
                    for (u32 k = 0; k < 4; ++k) {
                        score = __fmaf_rn(query[i * 8 + k * 2], widen(DTYPE(), pairs[k] & 0xffff), score);
                        score = __fmaf_rn(query[i * 8 + k * 2 + 1], widen(DTYPE(), pairs[k] >> 16), score);
                    }
                }
                store_u32(keys + (first + j) * key_stride, order(score));
            }
        }
    }
}

template <int EIGHTS> DEVICE void score_chunks(const SelectParams& params, float* queries) {
    const AttendParams& p = params.attend;
    const u32 count = params.channel_count;
    const u32 first_head = blockIdx.y * SCORE_HEADS, heads = min(static_cast<u32>(SCORE_HEADS), p.kv_heads - first_head);
    const u32 all = min(load_u32(params.starts + 4ull * p.batch), params.key_chunks);
    const u32 per = (all + gridDim.x - 1) / gridDim.x, begin = min(all, blockIdx.x * per), end = min(all, begin + per);
    if (begin == end) return;
    // The row with this CTA's first chunk: the last of those that begin there or before, of which the others have none.
    u32 index = 0;
    for (u32 step = 1u << 31; step > 0; step /= 2)
        if (index + step < p.batch && load_u32(params.starts + 4ull * (index + step)) <= begin) index += step;
    Chunks chunks = chunks_of(params, index);
    bool fresh = true;
    for (u32 chunk = begin; chunk < end; ++chunk) {
        while (chunk >= chunks.end) chunks = chunks_of(params, ++index), fresh = true;
        if (chunks.end > params.key_chunks) return;
        const Seeing row = seeing(p, index);
        if (fresh) {
            // The sums of the kv heads' queries, in their labels' channels.
            __syncthreads();
            for (u32 i = threadIdx.x; i < heads * count; i += 256) {
                const u32 head = first_head + i / count, channel = load_u32(params.channels + 4ull * (first_head * count + i));
                float sum = 0.f;
                for (u32 of = head * p.group; of < (head + 1) * p.group; ++of)
                    sum = __fadd_rn(sum, load_number(p.q + row.qo_start * p.q_stride + 2ull * (of * params.head_dim + channel)));
                queries[i] = sum;
            }
            __syncthreads();
            fresh = false;
        }
        const u32 position = (chunk - chunks.begin) * SCORE_TOKENS + threadIdx.x;
        if (position < row.first || position >= row.own) continue;
        const Look look = look_up(p, row.row, position);
        const u64 labels = p.k + slot_offset(p, look, load_page(p, look, load_directory(p, look))) + first_head * p.head_stride;
        const u64 keys = keys_of(params, chunks, first_head) + 4ull * position, key_stride = 4ull * SCORE_TOKENS * (chunks.end - chunks.begin);
        score_heads<EIGHTS>(queries, count, heads, labels, p.head_stride, keys, key_stride);
    }
}

extern "C" __global__ void __launch_bounds__(256, 4) score_labels_DTYPE(const __grid_constant__ SelectParams params) {
    __shared__ float queries[SCORE_HEADS * 256];
    const AttendParams& p = params.attend;
    wait_for_previous();
    const bool whole = ((p.k | p.page_stride | p.slot_stride | p.head_stride) & 15) == 0;
    if (whole && params.channel_count == 16) {
        score_chunks<2>(params, queries);
    } else if (whole && params.channel_count == 32) {
        score_chunks<4>(params, queries);
    } else {
        score_chunks<0>(params, queries);
    }
}
