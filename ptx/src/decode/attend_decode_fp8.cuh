// Decode attention over pages of fp8 (E4M3). It follows attend_decode.cuh, but a tile has TOKENS (16 or 32) tokens.
//
// ldmatrix gives a lane four bytes of a row instead of two numbers. The dims of K and Q in a product are therefore permuted. Of
// each 16 dims, 4 * i and 4 * i + 1 are at places 2 * i and 2 * i + 1. Dims 4 * i + 2 and 4 * i + 3 are at places 2 * i + 8 and
// 2 * i + 9. A register of transposed V contains two dims of each of two tokens. Rows i and i + 8 of an output fragment are
// therefore dims 2 * i and 2 * i + 1.
//
// The products take K and V as f16, which represents every E4M3 number exactly. Q and the weights are therefore also
// f16. A power of two scales each bf16 row of Q close to the maximum of f16. Another one scales the weights into the
// range of f16 (fp8.cuh). A head's scales are applied to logits and outputs, a token's scales to its logit and its
// weight.
#pragma once
#include "pdl.cuh"
#include "decode_parts.cuh"
#include "fp8.cuh"

template <class T, int D, int NT, int WARPS, int TOKENS, int STAGES, class Parts = DecodeParts<Fp8<T>, D, NT, WARPS>> struct DecodeFp8 : Parts {
    using Cursor = typename Parts::Cursor;
    using Parts::ROW, Parts::ROWS, Parts::FRAGMENTS, Parts::LONG_WORK, Parts::p, Parts::warp, Parts::lane, Parts::work_units;
    using Parts::head_of, Parts::finish, Parts::finish_last, Parts::join_pending, Parts::store_sum, Parts::add_sum;

    static constexpr int BLOCKS = TOKENS / 16;     // blocks of a tile
    static constexpr int LINE = D < 128 ? D : 128; // bytes of a prefetch
    static constexpr int CHUNKS = D / 16;          // 16-byte pieces of a row
    static constexpr int HALF = TOKENS * D;        // K (or V) of a tile
    static constexpr int SLOT = 2 * HALF;
    static constexpr int STEP = TOKENS * WARPS;    // tokens from one of a warp's tiles to its next
    static constexpr int TOKENS_PER_COPY = 32 / CHUNKS;
    static constexpr bool Q_SHARED = D * NT > 256; // whether query fragments do not fit the registers

    static constexpr int SUM = FRAGMENTS * 512;    // bytes of a warp's output sum; a chunk's last sum overwrites tiles
    static_assert(SUM <= STAGES * SLOT);
    static constexpr int BYTES = WARPS * STAGES * SLOT + (WARPS - 1) * SUM;  // dynamic shared memory

    struct Shared {
        // `tops` has an entry for each warp but the first. `last_tops`, for the end of the work chunk, has one for each
        // warp. For each query row, an entry contains the maximum to which the warp's sums are relative, and the sum of
        // its weights.
        float4 tops[WARPS > 1 ? WARPS - 1 : 1][NT][4], last_tops[WARPS][NT][4];
        typename Parts::Pendings pending;
        alignas(16) u64 offsets[WARPS][TOKENS]; // of each warp's next tile to copy
        u32 pages[WARPS][STAGES][TOKENS];       // of each warp's tiles
        float scales[WARPS][STAGES][2][TOKENS]; // of each tile's K and V, if by token
        alignas(Q_SHARED ? 512 : 16) u8 q[Q_SHARED ? ROWS * ROW : 16];  // the segment's query rows, swizzled
        float q_scales[ROWS];                   // factors by which query rows were divided
    };

    // A tile whose copy is not issued yet, for this lane's token. `token_bits` has the token's slot in its page, VALID if the token
    // exists, SOME if the tile exists, and from bit 16 on the tile's head.
    struct Tile {
        u32 token_bits, directory, in_leaf;
    };
    static constexpr u32 VALID = 1 << 10, SOME = 1 << 11, HEAD = 16;
    static_assert(PAGE_TOKENS_MAX <= VALID && SOME < 1 << HEAD && KV_HEADS_MAX <= ~0u >> HEAD, "a field of `token_bits` is too narrow");

    Shared& shared;
    const typename Parts::Fp8Params& fp8;
    u32 rings;   // of all warps
    u32 ring;    // this warp's
    u32 sums;    // the other warps' output sums, warp 1's first
    u32 pages;   // this warp's pending page numbers
    u32 scales;  // this warp's scales
    u32 offsets; // this warp's offsets
    u32 heads;   // number of kv heads of a stripe
    Cursor fetch;
    u32 fetch_at, fetch_end;
    bool fetch_more;
    __device__ __forceinline__ DecodeFp8(const AttendParams& p, Shared& shared, u32 memory)
        : Parts(p), shared(shared), fp8(reinterpret_cast<const typename Parts::Fp8Params&>(p)), rings(memory),
          ring(memory + Parts::thread() / 32 * STAGES * SLOT),
          sums(memory + WARPS * STAGES * SLOT), pages(shared_address(shared.pages[Parts::thread() / 32])),
          scales(shared_address(shared.scales[Parts::thread() / 32])), offsets(shared_address(shared.offsets[Parts::thread() / 32])) {}

    // Returns x. If a warp works alone, this hides from the compiler that the result is x. The compiler would otherwise
    // keep values derived from x across segments, and there are too few registers for them.
    static __device__ __forceinline__ u32 anew(u32 x) {
        if constexpr (WARPS == 1) asm volatile("" : "+r"(x));
        return x;
    }
    static __device__ __forceinline__ float anew(float x) {
        if constexpr (WARPS == 1) asm volatile("" : "+f"(x));
        return x;
    }

    // Pieces of a row are permuted by XOR with this number, so that the eight rows of an ldmatrix are in different banks.
    static __device__ __forceinline__ u32 swizzle(u32 token) { return D == 64 ? token / 2 % 4 : token % 8; }

    __device__ __forceinline__ u32 first_of(const Cursor& c) const { return c.begin_of(BLOCKS * warp); }
    __device__ __forceinline__ Tile next_tile() {
        while (fetch_more && fetch_at >= fetch_end) {
            fetch_more = fetch.template next<ROWS>(p, heads);
            fetch_at = first_of(fetch), fetch_end = fetch.end();
        }
        const u32 position = fetch_at + lane % TOKENS;
        const bool valid = fetch_more && position < fetch_end;
        const Look look = look_up(p, fetch.row, position);
        const u32 token_bits = look.slot + (valid ? VALID : 0) + (fetch_more ? SOME : 0) + (head_of(fetch) << HEAD);
        const Tile tile = {token_bits, valid ? load_directory(p, look) : 0, look.in_leaf};
        fetch_at += STEP;
        return tile;
    }
    __device__ __forceinline__ u64 page_at(const Tile& tile) const {
        return p.table + 4 * (p.leaf_base + static_cast<u64>(tile.directory) * p.leaf_pages + tile.in_leaf);
    }
    // Begins to copy the tile's page numbers to shared memory, in the same group as the copies of an earlier tile.
    __device__ __forceinline__ void copy_pages(const Tile& tile, u32 turn) {
        if (lane < TOKENS) copy4(pages + turn * (4 * TOKENS) + lane * 4, page_at(tile), (tile.token_bits & VALID) != 0);
    }
    __device__ __forceinline__ u32 copied_page(u32 turn) const {
        u32 page;
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(page) : "r"(pages + turn * (4 * TOKENS) + lane % TOKENS * 4) : "memory");
        return page;
    }

    // A lane copies one piece of two neighbouring rows in every PER rows. The distances of a lane's rows are constants, and one load
    // from the warp's list gives the offsets of two rows.
    static constexpr int PER = 2 * TOKENS_PER_COPY;
    __device__ __forceinline__ void copy_tile(u32 token_bits, u32 page, u32 slot) {
        if (token_bits & SOME) {
            const u32 piece = lane % CHUNKS, first = lane / CHUNKS * 2;
            // The first TOKENS lanes have the tile's tokens. If TOKENS is 16, the other lanes repeat them and are left out.
            const u32 valid = __ballot_sync(~0u, (token_bits & VALID) != 0) & (~0u >> (32 - TOKENS));
            const int left = __popc(valid) - static_cast<int>(first);
            const u64 base = (token_bits >> HEAD) * p.head_stride + piece * 16, k = p.k + base, v = p.v + base;
            __syncwarp();  // the previous contents have been read
            if (TOKENS == 32 || lane < TOKENS) put_offset(lane, page * p.page_stride + token_bits % VALID * p.slot_stride);
            __syncwarp();
            const u32 at = ring + slot * SLOT + first * D;
            const u32 to[2] = {at + (piece ^ swizzle(first)) * 16, at + D + (piece ^ swizzle(first + 1)) * 16};
            // COUNT: pairs of rows of a lane. BATCH: pairs whose offsets the lane loads before it copies these pairs.
            constexpr int COUNT = TOKENS / PER, BATCH = COUNT < 4 ? COUNT : WARPS == 1 ? 2 : 4;
#pragma unroll 1
            for (int begin = 0; begin < COUNT; begin += BATCH) {
                u64 offset[BATCH][2];
#pragma unroll
                for (int i = 0; i < BATCH; ++i) two_offsets((begin + i) * PER + first, offset[i]);
#pragma unroll
                for (int i = 0; i < BATCH * 2; ++i) {
                    const int row = (begin + i / 2) * PER + i % 2;
                    const u32 here = (to[i % 2] ^ (swizzle((begin + i / 2) * PER) * 16)) + (begin + i / 2) * (PER * D);
                    copy16_once(here, k + offset[i / 2][i % 2], left > row);
                    copy16_once(here + HALF, v + offset[i / 2][i % 2], left > row);
                }
            }
            if (fp8.scales.by_token && lane < TOKENS) {
                const u64 scale = page * fp8.scales.page_stride + static_cast<u64>(token_bits >> HEAD) * fp8.scales.head_stride + token_bits % VALID * 4;
                const u32 to = scales + slot * (8 * TOKENS) + lane * 4;
                copy4(to, fp8.scales.k + scale, (token_bits & VALID) != 0);
                copy4(to + 4 * TOKENS, fp8.scales.v + scale, (token_bits & VALID) != 0);
            }
        }
    }

    // Stores the offset of a token of the warp's next tile in the warp's list. Each lane has looked up one token.
    __device__ __forceinline__ void put_offset(u32 token, u64 offset) const {
        asm volatile("st.shared.u64 [%0], %1;" ::"r"(offsets + token * 8), "l"(offset) : "memory");
    }
    __device__ __forceinline__ void two_offsets(u32 token, u64 (&offset)[2]) const {
        asm volatile("ld.shared.v2.u64 {%0,%1}, [%2];" : "=l"(offset[0]), "=l"(offset[1]) : "r"(offsets + token * 8) : "memory");
    }

    // Prefetches the tile into the L2 cache. This may precede the wait for the previous launch, which writes through that
    // cache.
    __device__ __forceinline__ void prefetch_tile(u32 token_bits, u32 page) const {
        if (token_bits & SOME) {
            const u64 mine = page * p.page_stride + token_bits % VALID * p.slot_stride;
            const u64 base = (token_bits >> HEAD) * p.head_stride;
            const u32 valid = __ballot_sync(~0u, (token_bits & VALID) != 0);
#pragma unroll
            for (int i = 0; i < TOKENS * D / LINE; i += 32) {
                const u32 token = (i + lane) / (D / LINE) % TOKENS, at = (i + lane) % (D / LINE) * LINE;
                const u64 offset = __shfl_sync(~0u, mine, token) + base + at;
                if (valid >> token & 1) prefetch(p.k + offset), prefetch(p.v + offset);
            }
        }
    }

    __device__ __forceinline__ float token_scale(u32 slot, u32 side, u32 token) const {
        float scale;
        asm volatile("ld.shared.f32 %0, [%1];" : "=f"(scale) : "r"(scales + slot * (8 * TOKENS) + side * (4 * TOKENS) + token * 4) : "memory");
        return scale;
    }

    // Stores dims 8 * piece to 8 * piece + 7 of a row of q at their permuted places.
    __device__ __forceinline__ void put_query(u32 row, u32 piece, const uint4& words) const {
        const u32 at = shared_address(shared.q) + row * ROW, first = piece / 2 * 2, half = piece % 2 * 8;
        const u32 low = at + (first ^ row % 8) * 16 + half, high = at + (first + 1 ^ row % 8) * 16 + half;
        asm volatile("st.shared.v2.u32 [%0], {%1,%2};" ::"r"(low), "r"(words.x), "r"(words.z) : "memory");
        asm volatile("st.shared.v2.u32 [%0], {%1,%2};" ::"r"(high), "r"(words.y), "r"(words.w) : "memory");
    }

    __device__ __forceinline__ void run(const DecodeWork& work, u32 unit_begin) {
        const u32 group = p.group;
        heads = p.kv_heads / p.stripes, work_units = work.work_units;
        Cursor c;
        c.begin(p, work, unit_begin);

        // The same order as in attend_decode.cuh. The first tiles are looked up before the wait for the previous launch. The page
        // numbers of a tile are copied together with the tile STAGES before it.
        fetch = c, fetch_at = first_of(c), fetch_end = c.end(), fetch_more = true;
        u32 token_bits[STAGES];  // of the tiles whose page numbers are pending
        Tile next;
        {
            Tile tiles[2 * STAGES];
            u32 words[STAGES];
#pragma unroll
            for (int i = 0; i < 2 * STAGES; ++i) tiles[i] = next_tile();
#pragma unroll
            for (int i = 0; i < STAGES; ++i) words[i] = tiles[i].token_bits & VALID ? load_u32(page_at(tiles[i])) : 0;
#pragma unroll
            for (int i = 0; i < STAGES; ++i) copy_pages(tiles[STAGES + i], i);
            next = next_tile();
            if (work_units < LONG_WORK) {
#pragma unroll
                for (int i = 0; i < STAGES; ++i) prefetch_tile(tiles[i].token_bits, words[i]);
            }
            wait_for_previous();
#pragma unroll
            for (int i = 0; i < STAGES; ++i) {
                copy_tile(tiles[i].token_bits, words[i], i);
                copy_commit();
                token_bits[i] = tiles[STAGES + i].token_bits;
            }
        }
        auto refill = [&](u32 slot) {
            copy_tile(token_bits[0], copied_page(slot), slot);
            __syncwarp();
            copy_pages(next, slot);
            copy_commit();
#pragma unroll
            for (int i = 1; i < STAGES; ++i) token_bits[i - 1] = token_bits[i];
            token_bits[STAGES - 1] = next.token_bits;
            next = next_tile();
        };

        const Logits logits = Logits::make(p);
        // In a score fragment, this thread has tokens lane / 4 and lane / 4 + 8, and query rows column and column + 1.
        const u32 column = lane % 4 * 2;
        // ldmatrix addresses in a slot: 16 tokens of two pieces of K, all tokens of one or two pieces of V.
        const u32 k_lane = lane % 16 * D + ((lane / 16) ^ swizzle(lane % 16)) * 16;
        const u32 v_lane = HALF + lane % TOKENS * D + ((lane / TOKENS) ^ swizzle(lane % TOKENS)) * 16;
        const u32 q_lane = shared_address(shared.q) + (lane / 16 * 8 + lane % 8) % ROWS * ROW + ((lane / 8 % 2) ^ lane % 8) * 16;

        Parts::clear(shared.pending);
        Parts::sync();
        u32 slot = 0;
        bool more, again = false;
        do {
            const u32 rows = c.extend_len * group;
            const u64 q_head = p.q + head_of(c) * group * ROW;
            const float k_scale = head_scale(fp8, fp8.scales.k, head_of(c)), v_scale = head_scale(fp8, fp8.scales.v, head_of(c));
            // Fragments of Q^T: row n * 8 + lane / 4, four dims from k * 16 + 4 * (lane % 4) on.
            u32 q[Q_SHARED ? 1 : D / 16][NT][2];
            float factor[NT][2];  // of the thread's two query rows: factor from products to logits
            if constexpr (Q_SHARED) {
                static_assert(D / 8 == 32);
                Parts::sync();
                const u32 piece = anew(lane);
                for (u32 row = warp; row < ROWS; row += WARPS) {
                    const u32 query = row / group;
                    const u64 from = q_head + (c.qo_start + query) * p.q_stride + (row - query * group) * ROW + piece * 16;
                    uint4 words = row < rows ? load_written_uint4(from) : make_uint4(0, 0, 0, 0);
                    u32 most = max(largest(T(), words.x, words.y), largest(T(), words.z, words.w));
#pragma unroll
                    for (int i = 16; i > 0; i /= 2) most = max(most, __shfl_xor_sync(~0u, most, i));
                    const float up = finest(T(), most);
                    words = make_uint4(to_f16(T(), words.x, up), to_f16(T(), words.y, up), to_f16(T(), words.z, up), to_f16(T(), words.w, up));
                    put_query(row, lane, words);
                    if (lane == 0) shared.q_scales[row] = inverse_power(up);
                }
                Parts::sync();
#pragma unroll
                for (int n = 0; n < NT; ++n)
#pragma unroll
                    for (int h = 0; h < 2; ++h) factor[n][h] = shared.q_scales[n * 8 + column + h];
            } else {
#pragma unroll
                for (int n = 0; n < NT; ++n) {
                    const u32 row = n * 8 + lane / 4, query = row / group;
                    const u64 from = q_head + (c.qo_start + query) * p.q_stride + (row - query * group) * ROW + lane % 4 * 8;
                    u32 most = 0;
#pragma unroll
                    for (int k = 0; k < D / 16; ++k) {
                        q[k][n][0] = q[k][n][1] = 0;
                        if (row < rows) load_written_two(from + k * 32, q[k][n][0], q[k][n][1]);
                        most = max(most, largest(T(), q[k][n][0], q[k][n][1]));
                    }
                    most = max(most, __shfl_xor_sync(~0u, most, 1));
                    most = max(most, __shfl_xor_sync(~0u, most, 2));
                    const float up = finest(T(), most), down = inverse_power(up);
#pragma unroll
                    for (int k = 0; k < D / 16; ++k) q[k][n][0] = to_f16(T(), q[k][n][0], up), q[k][n][1] = to_f16(T(), q[k][n][1], up);
#pragma unroll
                    for (int h = 0; h < 2; ++h) factor[n][h] = __shfl_sync(~0u, down, (column + h) * 4);
                }
            }
            const float scale = WARPS == 1 ? Logits::make(p, anew(p.scale)).scale : logits.scale;
#pragma unroll
            for (int n = 0; n < NT; ++n) factor[n][0] *= scale * k_scale, factor[n][1] *= scale * k_scale;
            float o[NT][D / 16][4];
            float top[NT][2], sum[NT][2];  // for two query rows: maxima to which weights are relative, sums of this thread's weights
            const bool by_token = fp8.scales.by_token;
            // Logarithm of the divisor that brings weights into the range of f16.
            float lift = by_token ? MINUS_INF : anew(LIFT);
#pragma unroll
            for (int n = 0; n < NT; ++n) {
                top[n][0] = top[n][1] = MINUS_INF, sum[n][0] = sum[n][1] = 0.f;
#pragma unroll
                for (int m = 0; m < D / 16; ++m) o[n][m][0] = o[n][m][1] = o[n][m][2] = o[n][m][3] = 0.f;
            }

            const u32 end = c.end();
            const u32 position0 = c.kv_len - c.extend_len;  // position of the first query; there is no tile if kv_len is 0
            u32 at = first_of(c);
            while (at < end) {
                copy_wait<STAGES - 1>();
                __syncwarp();
                const u32 base = ring + slot * SLOT;

                float s[BLOCKS][NT][4] = {};
#pragma unroll
                for (int k = 0; k < D / 32; ++k) {
                    if constexpr (Q_SHARED) {
                        u32 b[4];
#pragma unroll
                        for (int i = 0; i < 2; ++i) {
                            load_matrix(b, q_lane ^ ((2 * k + i) * 32));
#pragma unroll
                            for (int block = 0; block < BLOCKS; ++block) {
                                u32 bytes[4], a[4];
                                load_matrix(bytes, base + block * 16 * D + (k_lane ^ (k * 32)));
                                widen(bytes[2 * i], a[0], a[2]), widen(bytes[2 * i + 1], a[1], a[3]);
#pragma unroll
                                for (int n = 0; n < NT; ++n) mma(f16(), s[block][n], a, b[2 * n], b[2 * n + 1]);
                            }
                        }
                    } else {
#pragma unroll
                        for (int block = 0; block < BLOCKS; ++block) {
                            u32 bytes[4];
                            load_matrix(bytes, base + block * 16 * D + (k_lane ^ (k * 32)));
#pragma unroll
                            for (int i = 0; i < 2; ++i) {
                                u32 a[4];
                                widen(bytes[2 * i], a[0], a[2]), widen(bytes[2 * i + 1], a[1], a[3]);
#pragma unroll
                                for (int n = 0; n < NT; ++n) mma(f16(), s[block][n], a, q[2 * k + i][n][0], q[2 * k + i][n][1]);
                            }
                        }
                    }
                }
                if (by_token) {
#pragma unroll
                    for (int block = 0; block < BLOCKS; ++block)
#pragma unroll
                        for (int half = 0; half < 2; ++half) {
                            const float scale = token_scale(slot, 0, block * 16 + half * 8 + lane / 4);
#pragma unroll
                            for (int n = 0; n < NT; ++n)
#pragma unroll
                                for (int h = 0; h < 2; ++h) s[block][n][2 * half + h] = s[block][n][2 * half + h] * factor[n][h] * scale;
                        }
                } else {
#pragma unroll
                    for (int i = 0; i < BLOCKS * NT * 4; ++i) s[i / 4 / NT][i / 4 % NT][i % 4] *= factor[i / 4 % NT][i % 2];
                }
                if (logits.cap > 0.f) {
                    const Logits unit = {1.f, logits.cap};
#pragma unroll
                    for (int i = 0; i < BLOCKS * NT * 4; ++i) s[i / 4 / NT][i / 4 % NT][i % 4] = unit.capped(s[i / 4 / NT][i / 4 % NT][i % 4]);
                }
                if (at + TOKENS > end || at + TOKENS - 1 > position0 || p.window != 0) {
#pragma unroll
                    for (int block = 0; block < BLOCKS; ++block)
#pragma unroll
                        for (int n = 0; n < NT; ++n)
#pragma unroll
                            for (int i = 0; i < 4; ++i) {
                                const u32 token = at + block * 16 + lane / 4 + i / 2 * 8, query = position0 + (n * 8 + column + i % 2) / group;
                                if (token > query || token >= end || (p.window != 0 && token + p.window <= query)) s[block][n][i] = MINUS_INF;
                            }
                }
                // Weights are relative to an earlier maximum logit. The warp raises the maximum only when a weight
                // would exceed 2^8, or when the lift grows.
                bool grew = false;
                float most[NT][2];
#pragma unroll
                for (int n = 0; n < NT; ++n)
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        most[n][h] = fmaxf(s[0][n][h], s[0][n][h + 2]);
                        if constexpr (BLOCKS == 2) most[n][h] = fmaxf(most[n][h], fmaxf(s[1][n][h], s[1][n][h + 2]));
                        grew |= most[n][h] > top[n][h] + 8.f;
                    }
                const float lifted = by_token ? fmaxf(lift, lift_of(token_scale(slot, 1, lane % TOKENS))) : lift;
                if (__any_sync(~0u, grew) || lifted != lift) {
#pragma unroll
                    for (int n = 0; n < NT; ++n)
#pragma unroll
                        for (int h = 0; h < 2; ++h) {
                            float above = most[n][h];
                            above = fmaxf(above, __shfl_xor_sync(~0u, above, 4));
                            above = fmaxf(above, __shfl_xor_sync(~0u, above, 8));
                            above = fmaxf(top[n][h], fmaxf(above, __shfl_xor_sync(~0u, above, 16)));
                            // A row that has seen no token must not subtract minus infinity from itself.
                            const float scale = above == MINUS_INF ? 1.f : exp2_fast(top[n][h] + (by_token ? lift - lifted : 0.f) - above);
                            sum[n][h] *= scale, top[n][h] = above;
#pragma unroll
                            for (int m = 0; m < D / 16; ++m) o[n][m][h] *= scale, o[n][m][h + 2] *= scale;
                        }
                    lift = lifted;
                }
                u32 w[BLOCKS][NT][2];
#pragma unroll
                for (int n = 0; n < NT; ++n) {
                    const float less0 = top[n][0] == MINUS_INF ? 0.f : top[n][0] + lift, less1 = top[n][1] == MINUS_INF ? 0.f : top[n][1] + lift;
#pragma unroll
                    for (int block = 0; block < BLOCKS; ++block) {
                        float(&x)[4] = s[block][n];
                        x[0] = exp2_fast(x[0] - less0), x[1] = exp2_fast(x[1] - less1);
                        x[2] = exp2_fast(x[2] - less0), x[3] = exp2_fast(x[3] - less1);
                        sum[n][0] += x[0] + x[2], sum[n][1] += x[1] + x[3];
                    }
                }
                if (by_token) {
#pragma unroll
                    for (int block = 0; block < BLOCKS; ++block)
#pragma unroll
                        for (int half = 0; half < 2; ++half) {
                            const float scale = token_scale(slot, 1, block * 16 + half * 8 + lane / 4);
#pragma unroll
                            for (int n = 0; n < NT; ++n) s[block][n][2 * half] *= scale, s[block][n][2 * half + 1] *= scale;
                        }
                }
#pragma unroll
                for (int block = 0; block < BLOCKS; ++block)
#pragma unroll
                    for (int n = 0; n < NT; ++n) {
                        w[block][n][0] = transpose(pack(f16(), s[block][n][0], s[block][n][1]));
                        w[block][n][1] = transpose(pack(f16(), s[block][n][2], s[block][n][3]));
                    }
#pragma unroll
                for (int m = 0; m < D / 16; m += 2 / BLOCKS) {
                    u32 bytes[4], a[4][2];
                    load_matrix_transposed(bytes, base + (v_lane ^ (m * 16)));
#pragma unroll
                    for (int i = 0; i < 4; ++i) widen_pairs(bytes[i], a[i][0], a[i][1]);
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        const u32 v[4] = {a[2 * i][0], a[2 * i][1], a[2 * i + 1][0], a[2 * i + 1][1]};
                        const int block = BLOCKS == 2 ? i : 0, piece = BLOCKS == 2 ? m : m + i;
#pragma unroll
                        for (int n = 0; n < NT; ++n) mma(f16(), o[n][piece], v, w[block][n][0], w[block][n][1]);
                    }
                }
                __syncwarp();
                at += STEP;
                refill(slot);
                slot = slot + 1 == STAGES ? 0 : slot + 1;
            }

            // Undoes the factors of V and of the weights.
#pragma unroll
            for (int i = 0; i < NT * (D / 16) * 4; ++i) o[i / 4 / (D / 16)][i / 4 % (D / 16)][i % 4] *= v_scale;
#pragma unroll
            for (int n = 0; n < NT; ++n)
#pragma unroll
                for (int h = 0; h < 2; ++h) top[n][h] += lift;  // now the logit whose weight is 1
            more = end_segment<WARPS, STAGES * SLOT>(*this, c, rows, again, o, top, sum);
            again = true;
            c.template next<ROWS>(p, heads);
        } while (more);
        join_pending(shared.pending);
    }
};

template <class T, int D, int NT, int WARPS, int TOKENS, int STAGES> DEVICE void attend_decode_fp8(const AttendFp8Params& fp8) {
    extern __shared__ __align__(1024) u8 memory[];
    using Kernel = DecodeFp8<T, D, NT, WARPS, TOKENS, STAGES>;
    __shared__ typename Kernel::Shared shared;
    const AttendParams& p = fp8.attend;
    const u32 work_index = blockIdx.x / p.stripes;
    const DecodeWork work = load_work(p.plan + sizeof(DecodeWork) * work_index);
    const u32 unit_begin = work_index * work.work_units;
    // A CTA without work waits too, so that the end of this launch implies the end of all earlier ones.
    if (unit_begin >= work.unit_end) return wait_for_previous();
    Kernel(p, shared, shared_address(memory)).run(work, unit_begin);
}
