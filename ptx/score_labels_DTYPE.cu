// score_labels_DTYPE: the score of each position that a row with lists sees but its own, for each kv head, as a number that orders
// like it.
// DTYPE:   bf16 or f16: a file and an entry of each
// Twin:    src/backend/cpu/labels.rs score, order (the specification, bit by bit)
// Params:  SelectParams, 272 bytes             (ptx/params.cuh, src/backend/cuda/params.rs); positions, listed, counts unused
// Shapes:  q [tokens, q_heads, head_dim]; channels u32 [kv_heads, channel_count]; labels as K, channel_count wide; keys as starts says
// Grid:    x = any (warps share the positions), y = ceil(kv_heads / heads of a CTA: 8, of 32 channels 4),
//          block 128, 71,680 bytes of dynamic shared memory
// Needs:   q 2-byte aligned; channel_count up to 256; labels 2-byte aligned. Rows past key_chunks are left out
// Build:   ptx/build.py
#include "select.cuh"

// Each warp goes through a run of pieces of 32 positions by itself: a lane has a position of each. Labels of 16 or 32 channels that are
// aligned to 16 bytes are copied to shared memory a piece ahead, 256 bytes of each token in a row, since lanes that load them for
// themselves touch a line of the cache each and get no more than a third of the memory's bandwidth (measured on an H200).
constexpr u32 PIECE = 32, PIECES = SCORE_TOKENS / PIECE;
constexpr u32 UNITS = 16;                    // of 16 bytes, that a token has for the heads of a CTA
constexpr u32 ROW_PITCH = (UNITS + 1) * 16;  // so that lanes' rows begin in different banks
constexpr u32 STAGE_BYTES = PIECE * ROW_PITCH, WARP_BYTES = 2 * STAGE_BYTES + 512;  // and a row's queries

DEVICE float load_number(u64 at) {
    u16 bits;
    asm volatile("ld.global.u16 %0, [%1];" : "=h"(bits) : "l"(at));
    return widen(DTYPE(), bits);
}
// A channel's number, of which the compiler may load several at a time.
DEVICE u32 load_channel(u64 at) {
    u32 channel;
    asm("ld.global.nc.u32 %0, [%1];" : "=r"(channel) : "l"(at));
    return channel;
}
DEVICE uint4 load_shared_uint4(u32 at) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at) : "memory");
    return v;
}

// Greater where the score is: 0 and -0 are equal, NaN is below all others.
DEVICE u32 order(float score) {
    if (score != score) return 0;
    const u32 bits = __float_as_int(__fadd_rn(score, 0.f));
    return bits >> 31 ? ~bits : bits | 1u << 31;
}

// A piece of a row, and where this lane's labels are.
struct Piece {
    u32 index;     // of the row in the batch
    u32 position;  // of this lane
    bool scored;   // whether the row sees it, and it is not the own one
    u64 labels;    // of the CTA's first head
};
DEVICE Piece piece_at(const SelectParams& params, u32 index, u32 number, u32 first_head) {
    const AttendParams& p = params.attend;
    const Seeing row = seeing(p, index);
    Piece piece = {index, (number - PIECES * chunks_of(params, index).begin) * PIECE + threadIdx.x % 32, false, 0};
    piece.scored = piece.position >= row.first && piece.position < row.own;
    if (piece.scored) {
        const Look look = look_up(p, row.row, piece.position);
        piece.labels = p.k + slot_offset(p, look, load_page(p, look, load_directory(p, look))) + first_head * p.head_stride;
    }
    return piece;
}

// Begins to copy the labels of a piece.
template <u32 EIGHTS> DEVICE void copy_labels(const Piece& piece, u32 heads, u64 head_stride, u32 to) {
    const u32 lane = threadIdx.x % 32, unit = lane % UNITS, head = unit / EIGHTS;
    const u64 in_row = head * head_stride + unit % EIGHTS * 16;
#pragma unroll
    for (u32 i = 0; i < PIECE; i += 2) {
        const u32 token = i + lane / UNITS;
        const u64 labels = __shfl_sync(~0u, piece.labels, token);
        if (labels != 0 && head < heads) copy16(to + token * ROW_PITCH + unit * 16, labels + in_row, true);
    }
}

// The sums of the kv heads' queries of a row, in their labels' channels, [heads, channel_count]. Loads wait for no others but a channel's.
DEVICE void sum_queries(const SelectParams& params, u64 row, u32 first_head, u32 heads, float* queries) {
    const AttendParams& p = params.attend;
    const u32 count = params.channel_count;
    __syncwarp();
#pragma unroll 4
    for (u32 i = threadIdx.x % 32; i < heads * count; i += 32) {
        const u32 head = first_head + i / count, channel = load_channel(params.channels + 4ull * (first_head * count + i));
        float sum = 0.f;
        for (u32 of = 0; of < p.group; of += 4) {
            float some[4];
#pragma unroll
            for (u32 j = 0; j < 4; ++j) some[j] = of + j < p.group ? load_number(row + 2ull * ((head * p.group + of + j) * params.head_dim + channel)) : 0.f;
#pragma unroll
            for (u32 j = 0; j < 4; ++j)
                if (of + j < p.group) sum = __fadd_rn(sum, some[j]);
        }
        queries[i] = sum;
    }
    __syncwarp();
}

// The scores of a piece go to their keys, products in the order of channels.
template <u32 EIGHTS> DEVICE void score(const SelectParams& params, const Piece& piece, u32 first_head, u32 heads, const float* queries, u32 staged) {
    const u32 count = params.channel_count;
    const Chunks chunks = chunks_of(params, piece.index);
    const u64 keys = keys_of(params, chunks, first_head) + 4ull * piece.position, key_stride = 4ull * SCORE_TOKENS * (chunks.end - chunks.begin);
    for (u32 head = 0; head < heads; ++head) {
        const float* const query = queries + head * count;
        float score = 0.f;
        if constexpr (EIGHTS == 0) {
            const u64 labels = piece.labels + head * params.attend.head_stride;
            for (u32 i = 0; i < count && piece.scored; ++i) score = __fmaf_rn(query[i], load_number(labels + 2ull * i), score);
        } else {
#pragma unroll
            for (u32 i = 0; i < EIGHTS; ++i) {
                const uint4 words = load_shared_uint4(staged + threadIdx.x % 32 * ROW_PITCH + (head * EIGHTS + i) * 16);
                const u32 pairs[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
                for (u32 k = 0; k < 4; ++k) {
                    score = __fmaf_rn(query[i * 8 + k * 2], widen(DTYPE(), pairs[k] & 0xffff), score);
                    score = __fmaf_rn(query[i * 8 + k * 2 + 1], widen(DTYPE(), pairs[k] >> 16), score);
                }
            }
        }
        if (piece.scored) store_u32(keys + head * key_stride, order(score));
    }
}

// EIGHTS: the labels of a head are so many times 8 channels, which are copied ahead; 0: of any number, and read where they are.
template <u32 EIGHTS, u32 HEADS> DEVICE void score_pieces(const SelectParams& params, char* shared) {
    const AttendParams& p = params.attend;
    const u32 first_head = blockIdx.y * HEADS;
    if (first_head >= p.kv_heads) return;
    const u32 heads = min(HEADS, p.kv_heads - first_head);
    const u32 warp = blockIdx.x * 4 + threadIdx.x / 32, warps = gridDim.x * 4;
    const u32 all = PIECES * min(load_u32(params.starts + 4ull * p.batch), params.key_chunks);
    const u32 per = (all + warps - 1) / warps, begin = min(all, warp * per), end = min(all, begin + per);
    if (begin == end) return;
    char* const own = shared + threadIdx.x / 32 * WARP_BYTES;
    float* const queries = reinterpret_cast<float*>(EIGHTS == 0 ? own : own + 2 * STAGE_BYTES);
    // The row with the first piece: the last of those that begin there or before, of which the others have none.
    u32 index = 0;
    for (u32 step = 1u << 31; step > 0; step /= 2)
        if (index + step < p.batch && load_u32(params.starts + 4ull * (index + step)) <= begin / PIECES) index += step;
    Piece last = {};
    u32 summed = ~0u;
    for (u32 number = begin; number <= end; ++number) {
        Piece next = {};
        bool more = number < end;
        while (more && number / PIECES >= chunks_of(params, index).end) ++index;
        more = more && chunks_of(params, index).end <= params.key_chunks;
        if (more) next = piece_at(params, index, number, first_head);
        const u32 staged = shared_address(own), turn = (number - begin) % 2 * STAGE_BYTES;
        if constexpr (EIGHTS > 0) {
            // Lanes read the stage that is written now a piece ago.
            __syncwarp();
            copy_labels<EIGHTS>(next, heads, p.head_stride, staged + turn);
            copy_commit();
            copy_wait<1>();
            __syncwarp();
        }
        if (__any_sync(~0u, last.scored)) {
            if (summed != last.index) sum_queries(params, p.q + seeing(p, last.index).qo_start * p.q_stride, first_head, heads, queries);
            summed = last.index;
            score<EIGHTS>(params, last, first_head, heads, queries, staged + STAGE_BYTES - turn);
        }
        last = next;
    }
}

extern "C" __global__ void __launch_bounds__(128, 3) score_labels_DTYPE(const __grid_constant__ SelectParams params) {
    extern __shared__ __align__(16) char shared[];
    const AttendParams& p = params.attend;
    wait_for_previous();
    let_next_start();
    const bool whole = ((p.k | p.page_stride | p.slot_stride | p.head_stride) & 15) == 0;
    if (params.channel_count == 32) {
        whole ? score_pieces<4, 4>(params, shared) : score_pieces<0, 4>(params, shared);
    } else if (params.channel_count == 16 && whole) {
        score_pieces<2, 8>(params, shared);
    } else {
        score_pieces<0, 8>(params, shared);
    }
}
