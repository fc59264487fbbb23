// Attention over latent rows of 16 bits or fp8, for every GPU from compute capability 8.0 on.
//
// A CTA computes items of 16 query rows (latent_plan.cuh), for 32 tokens at a time: a tile. The warps form four pairs. Each
// pair computes the scores of 8 tokens; each warp of a pair reads half of the columns of K. Query rows stay in registers. Then
// each warp reads all scores, computes all weights, and multiplies them with 64 columns of V, which are the first columns of K.
// Meanwhile the tokens of the next tile are copied. In fp8 pools the copies are bytes, which are then widened to a tile of T.
#pragma once
#include "fp8.cuh"
#include "latent_join.cuh"
#include "latent_plan.cuh"

template <class T, bool FP8> struct LatentTiles {
    static constexpr int RANK = 512, ROPE = 64, ROWS = 16, BN = 32, WARPS = 8, THREADS = WARPS * 32;
    static constexpr int STEPS = (RANK + ROPE) / 32;       // steps of 16 columns in half of K's columns
    static constexpr int PITCH = (RANK + ROPE) * 2 + 16;   // bytes from row to row, so that 8 rows are in different banks
    static constexpr int TILE = BN * PITCH;
    // Copies of a tile's bytes: RANK bytes and the rope of each token.
    static constexpr int RAW_ROPE = BN * RANK, RAW = RAW_ROPE + BN * ROPE * 2;
    static constexpr int BYTES = FP8 ? TILE + 2 * RAW : 2 * TILE;  // dynamic shared memory
    static constexpr int MINE = BN / WARPS;                // number of tokens that a warp copies

    struct Shared {
        float scores[2][ROWS][BN + 8];  // partial scores: one for each half of the columns
        float scales[2][BN];            // scales of the tokens of both fp8 copies
    };
    // The place of a token whose row is copied next. A lane has that of token `lane % MINE` of its warp.
    struct Found {
        u32 page, slot;
        bool valid;
    };

    const AttendParams& p;
    Shared& shared;
    u32 memory, warp, lane;
    ExtendWork work;

    __device__ __forceinline__ Found look(u32 begin) const {
        const u32 position = begin + warp * MINE + lane % MINE;
        const Look at = look_up(p, work.row & ~TREE_ROW, min(position, work.kv_end - 1));
        return {load_page(p, at, load_directory(p, at)), at.slot, position < work.kv_end};
    }
    // Copies the warp's rows of BYTES bytes, in pieces of 16 bytes, to rows PITCH bytes apart.
    template <int BYTES, int PITCH> __device__ __forceinline__ void copy_rows(u32 to, u64 from, const Found& found) const {
        constexpr int PIECES = BYTES / 16;
        const u32 valid = __ballot_sync(~0u, found.valid);
#pragma unroll
        for (int i = 0; i < MINE * PIECES / 32; ++i) {
            const u32 at = i * 32 + lane, row = at / PIECES, piece = at % PIECES;
            const u64 source = __shfl_sync(~0u, from, row);
            copy16(to + (warp * MINE + row) * PITCH + piece * 16, source + piece * 16, valid >> row & 1);
        }
    }
    // Copies a tile. Missing tokens become zeros: their weights are 0, but 0 times an old NaN would be NaN.
    __device__ __forceinline__ void copy_tile(u32 place, const Found& found) const {
        const u64 row = p.k + found.page * p.page_stride + found.slot * p.slot_stride;
        if constexpr (FP8) {
            const auto& [attend, scales, rope] = reinterpret_cast<const AttendLatentFp8Params&>(p);
            const u32 raw = memory + TILE + place * RAW;
            copy_rows<RANK, RANK>(raw, row, found);
            copy_rows<ROPE * 2, ROPE * 2>(raw + RAW_ROPE, rope.at + found.page * rope.page_stride + found.slot * u64(rope.slot_stride), found);
            if (lane < MINE)
                copy4(shared_address(&shared.scales[place][warp * MINE + lane]), scales.k + found.page * scales.page_stride + found.slot * 4, found.valid);
        } else copy_rows<(RANK + ROPE) * 2, PITCH>(memory + place * TILE, row, found);
        copy_commit();
    }
    __device__ __forceinline__ void load_shared(u32 (&v)[4], u32 at) const {
        asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"(at) : "memory");
    }
    // Widens a copy to a tile of T, and multiplies all numbers except the rope's by their token's scale.
    __device__ __forceinline__ void widen_tile(u32 place) const {
        const u32 raw = memory + TILE + place * RAW;
#pragma unroll
        for (int row = 0; row < MINE; ++row) {
            const u32 token = warp * MINE + row;
            const u32 to = memory + token * PITCH + lane * 32;
            const float scale = shared.scales[place][token];
            u32 v[4], wide[8];
            load_shared(v, raw + token * RANK + lane * 16);
#pragma unroll
            for (int i = 0; i < 4; ++i) widen_row<true>(T(), v[i], scale, wide[2 * i], wide[2 * i + 1]);
            store_shared_uint4(to, wide), store_shared_uint4(to + 16, wide + 4);
        }
        const u32 token = warp * MINE + lane / 8;
        u32 v[4];
        load_shared(v, raw + RAW_ROPE + token * (ROPE * 2) + lane % 8 * 16);
#pragma unroll
        for (int i = 0; i < 4; ++i) v[i] = from_bf16(T(), v[i]);
        store_shared_uint4(memory + token * PITCH + RANK * 2 + lane % 8 * 16, v);
    }

    // Copies the item's query rows. Rows past the last become zeros.
    __device__ __forceinline__ void copy_queries(u32 to) const {
        constexpr int PIECES = (RANK + ROPE) / 8;
        const u32 rows = work.extend_len * p.group - work.q_begin;
        for (u32 at = threadIdx.x; at < ROWS * PIECES; at += THREADS) {
            const u32 row = at / PIECES, piece = at % PIECES, packed = work.q_begin + min(row, rows - 1), query = packed / p.group;
            const u64 from = p.q + (work.qo_start + query) * p.q_stride + (packed - query * p.group) * u64((RANK + ROPE) * 2);
            copy16(to + row * PITCH + piece * 16, from + piece * 16, row < rows);
        }
    }

    // Sets logits of invisible tokens to minus infinity, for rows lane / 4 and lane / 4 + 8, and for the tokens of `token_of`.
    __device__ __forceinline__ void mask(u32 begin, float (&s)[2][BN / 4]) const {
        const bool tree = work.row >= TREE_ROW;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            // Rows past the last one use the last row's query.
            const u32 packed = min(work.q_begin + lane / 4 + 8 * h, work.extend_len * p.group - 1), query = packed / p.group;
            const u32 seen = work.kv_len - work.extend_len + query + 1, to = min(seen, work.kv_end);
            const u32 from = p.window != 0 && seen > p.window ? seen - p.window : 0;
            const uint2 bits = tree ? tree_mask(p, work.qo_start + query) : make_uint2(0, 0);
#pragma unroll
            for (int i = 0; i < BN / 4; ++i) {
                const u32 at = begin + token_of(i);
                if (at < from || at >= to || (tree && !(tree_sees(bits, work.kv_len, at) & 1))) s[h][i] = MINUS_INF;
            }
        }
    }
    // Returns the token of the thread's logit number i of a row. The order is that of products over 16 tokens.
    __device__ __forceinline__ u32 token_of(u32 i) const { return i / 2 * 8 + lane % 4 * 2 + i % 2; }

    // Multiplies the pair's 8 tokens of a tile of T with this warp's half of the columns.
    __device__ __forceinline__ void score(u32 tile, const u32 (&q)[STEPS][4]) const {
        const u32 half = warp / 4, token = warp % 4 * 8;
        const u32 from = tile + (token + lane % 8) * PITCH + half * (STEPS * 32) + lane / 8 * 16;
        float s[2][4] = {};  // two sums in turn, so that no product waits for the previous one
#pragma unroll
        for (int k = 0; k < STEPS; k += 2) {
            u32 b[4];
            load_matrix(b, from + k * 32);
            mma(T(), s[0], q[k], b[0], b[1]), mma(T(), s[1], q[k + 1], b[2], b[3]);
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float* const to = &shared.scores[half][lane / 4 + 8 * h][token + lane % 4 * 2];
            *reinterpret_cast<float2*>(to) = make_float2(s[0][2 * h] + s[1][2 * h], s[0][2 * h + 1] + s[1][2 * h + 1]);
        }
    }

    __device__ __forceinline__ void item() {
        const Logits logits = Logits::make(p);
        u32 q[STEPS][4];
        float o[8][4], top[2] = {MINUS_INF, MINUS_INF}, sum[2] = {0.f, 0.f};
#pragma unroll
        for (int i = 0; i < 32; ++i) o[i / 4][i % 4] = 0.f;
        // All queries see all tokens before `all_see`. In trees, the last 64 tokens are always checked.
        u32 all_see = work.kv_len - work.extend_len + work.q_begin / p.group + 1;
        if (work.row >= TREE_ROW) all_see = min(all_see, work.kv_len - min(work.kv_len, 64));
        if (work.kv_begin < work.kv_end) {
            // Queries are first copied to memory that a tile uses later.
            const u32 through = FP8 ? memory : memory + TILE;
            copy_queries(through);
            copy_tile(0, look(work.kv_begin));
            copy_wait<0>();
            __syncthreads();
#pragma unroll
            for (int k = 0; k < STEPS; ++k) load_matrix(q[k], through + lane % 16 * PITCH + warp / 4 * (STEPS * 32) + k * 32 + lane / 16 * 16);
        }
        Found next = {0, 0, false};
        if (work.kv_begin + BN < work.kv_end) next = look(work.kv_begin + BN);
        u32 place = 0;
        for (u32 begin = work.kv_begin; begin < work.kv_end; begin += BN, place ^= 1) {
            copy_wait<0>();
            __syncthreads();
            u32 tile = memory + place * TILE;
            if constexpr (FP8) {
                widen_tile(place);
                tile = memory;
                __syncthreads();
            }
            if (begin + BN < work.kv_end) copy_tile(place ^ 1, next);
            if (begin + 2 * BN < work.kv_end) next = look(begin + 2 * BN);
            score(tile, q);
            __syncthreads();
            float s[2][BN / 4];
#pragma unroll
            for (int h = 0; h < 2; ++h)
#pragma unroll
                for (int i = 0; i < BN / 4; i += 2) {
                    const float2 a = *reinterpret_cast<const float2*>(&shared.scores[0][lane / 4 + 8 * h][token_of(i)]);
                    const float2 b = *reinterpret_cast<const float2*>(&shared.scores[1][lane / 4 + 8 * h][token_of(i)]);
                    s[h][i] = logits.of(a.x + b.x), s[h][i + 1] = logits.of(a.y + b.y);
                }
            if (begin + BN > min(all_see, work.kv_end) || p.window != 0) mask(begin, s);
            u32 weights[BN / 16][4];
            soften(s, o, top, sum, weights);
            const u32 v = tile + lane % 16 * PITCH + warp * 128 + lane / 16 * 16;
#pragma unroll
            for (int k = 0; k < BN / 16; ++k)
#pragma unroll
                for (int n = 0; n < 4; ++n) {
                    u32 b[4];
                    load_matrix_transposed(b, v + k * 16 * PITCH + n * 32);
                    mma(T(), o[2 * n], weights[k], b[0], b[1]), mma(T(), o[2 * n + 1], weights[k], b[2], b[3]);
                }
        }
        finish(o, top, sum);
        // The next item's copies overwrite this item's tiles.
        __syncthreads();
    }

    // Converts a tile's logits to weights relative to the row's maximum logit so far, and scales earlier sums to this maximum.
    __device__ __forceinline__ void soften(float (&s)[2][BN / 4], float (&o)[8][4], float (&top)[2], float (&sum)[2],
                                           u32 (&weights)[BN / 16][4]) const {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float most = top[h];
#pragma unroll
            for (int i = 0; i < BN / 4; ++i) most = fmaxf(most, s[h][i]);
            most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
            most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
            // If a row has seen no token, minus infinity minus itself would be NaN.
            const float less = most == MINUS_INF ? 0.f : most, scale = exp2_fast(top[h] - less);
            top[h] = most, sum[h] *= scale;
#pragma unroll
            for (int n = 0; n < 8; ++n) o[n][2 * h] *= scale, o[n][2 * h + 1] *= scale;
#pragma unroll
            for (int i = 0; i < BN / 4; i += 2) {
                const float x = exp2_fast(s[h][i] - less), y = exp2_fast(s[h][i + 1] - less);
                sum[h] += x + y;
                weights[i / 4][i / 2 % 2 * 2 + h] = pack(T(), x, y);
            }
        }
    }

    // Writes the item's results. If the item is a part, writes its partial sums instead.
    __device__ __forceinline__ void finish(const float (&o)[8][4], float (&top)[2], float (&sum)[2]) const {
        const u32 rows = work.extend_len * p.group - work.q_begin, parts = work.part & 255, slot = (work.part >> 16) + (work.part >> 8 & 255);
        const u32 column = warp * 64 + lane % 4 * 2;
        const bool first = warp == 0 && lane % 4 == 0;  // writes a row's sums
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const u32 row = lane / 4 + 8 * h, packed = work.q_begin + row, query = packed / p.group, head = packed - query * p.group;
            float all = sum[h], relative = top[h];
            all += __shfl_xor_sync(~0u, all, 1), all += __shfl_xor_sync(~0u, all, 2);
            if (row >= rows) continue;
            if (parts > 1) {
                float* const to = reinterpret_cast<float*>(p.partial) + (slot * u64(ROWS) + row) * RANK + column;
#pragma unroll
                for (int n = 0; n < 8; ++n) *reinterpret_cast<float2*>(to + n * 8) = make_float2(o[n][2 * h], o[n][2 * h + 1]);
                if (first) reinterpret_cast<float2*>(p.counters)[slot * ROWS + row] = make_float2(relative, all);
                continue;
            }
            const float worth = enter_sink(p, head, relative, all), inverse = all > 0.f ? worth * (1.f / all) : 0.f;
            const u64 token = work.qo_start + query, to = p.out + token * p.out_stride + head * (RANK * 2) + column * 2;
#pragma unroll
            for (int n = 0; n < 8; ++n) store_u32(to + n * 16, pack(T(), o[n][2 * h] * inverse, o[n][2 * h + 1] * inverse));
            if (first && p.lse != 0) store_float(p.lse + (token * p.q_heads + head) * 4, all > 0.f ? (relative + log2_fast(all)) * LN_2 : MINUS_INF);
        }
    }
};

template <class T, bool FP8> DEVICE void attend_latent_tiles(const AttendParams& p) {
    extern __shared__ __align__(128) u8 memory[];
    __shared__ typename LatentTiles<T, FP8>::Shared shared;
    LatentTiles<T, FP8> tiles{p, shared, shared_address(memory), threadIdx.x / 32, threadIdx.x % 32, {}};
    const u32 end = latent_end(p);
    u32 index = latent_begin(p);
    wait_for_previous();
    for (; index < end; ++index) tiles.work = load_latent_work(p, index), tiles.item();
    let_next_start();
}
