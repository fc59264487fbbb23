// Attention over latent rows for Hopper, in steps whose sequences have at most ROWS query rows each (16 or 32). Such steps are
// memory-bound.
//
// Products are transposed: tokens are the 64 rows of a matrix product, and query rows are its columns. This wastes few products on
// missing query rows. q and the weights take little shared memory, and the output fits the registers of one warpgroup. This
// warpgroup computes scores, weights and the products with V. K and V are the same tile. One of the others (over
// fp8 both) copies latent rows into a ring of three places, so that two tiles are always in flight.
//
// In shared memory a group of 8 rows is [9][8][64 columns], swizzled for wgmma. All groups are contiguous: first those of the three
// places, which have 64, 64 and 64 - ROWS tokens, then those of q. A product of 64 rows over the last place extends into q; its
// results for the rows of q are ignored.
#pragma once
#include "fp8.cuh"
#include "hopper.cuh"
#include "latent_plan.cuh"
#include "pdl.cuh"

#define WG_16(c) WG_FOUR((c)[0]), WG_FOUR((c)[1])
#define WG_32(c) WG_16(c), WG_FOUR((c)[2]), WG_FOUR((c)[3])
#define WG_OUT_16 "{%0,%1,%2,%3,%4,%5,%6,%7}"
#define WG_OUT_32 "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}"
// wgmma_few_scores: c[64 tokens, n] = a[64, 16] * b[n, 16]^T; it adds to c if `add` is not 0.
// wgmma_few_output: c[64 columns, n] += a[16 tokens, 64]^T * b[n, 16]^T.
#define WG_FEW(type, name, n, blocks, out, registers, a_at, b_at, add_at) \
    DEVICE void wgmma_few_scores(type, float (&c)[blocks][4], u64 a, u64 b, int add) { \
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %" add_at ", 0; wgmma.mma_async.sync.aligned.m64n" n "k16.f32." name "." name " " out \
                     ", %" a_at ", %" b_at ", p, 1, 1, 0, 0; }" : registers(c) : "l"(a), "l"(b), "r"(add)); \
    } \
    DEVICE void wgmma_few_output(type, float (&c)[blocks][4], u64 a, u64 b) { \
        asm volatile("wgmma.mma_async.sync.aligned.m64n" n "k16.f32." name "." name " " out ", %" a_at ", %" b_at ", 1, 1, 1, 1, 0;" \
                     : registers(c) : "l"(a), "l"(b)); \
    }
WG_FEW(bf16, "bf16", "16", 2, WG_OUT_16, WG_16, "8", "9", "10")
WG_FEW(f16, "f16", "16", 2, WG_OUT_16, WG_16, "8", "9", "10")
WG_FEW(bf16, "bf16", "32", 4, WG_OUT_32, WG_32, "16", "17", "18")
WG_FEW(f16, "f16", "32", 4, WG_OUT_32, WG_32, "16", "17", "18")
#undef WG_FEW
DEVICE void wgmma_wait_few(float (&c)[2][4]) { asm volatile("wgmma.wait_group.sync.aligned 0;" : WG_16(c)::"memory"); }
DEVICE void wgmma_wait_few(float (&c)[4][4]) { asm volatile("wgmma.wait_group.sync.aligned 0;" : WG_32(c)::"memory"); }
// Waits for two sums at once; otherwise ptxas waits for each product.
DEVICE void wgmma_wait_few(float (&c)[2][4], float (&d)[2][4]) { asm volatile("wgmma.wait_group.sync.aligned 0;" : WG_16(c), WG_16(d)::"memory"); }
DEVICE void wgmma_wait_few(float (&c)[4][4], float (&d)[4][4]) { asm volatile("wgmma.wait_group.sync.aligned 0;" : WG_32(c), WG_32(d)::"memory"); }
DEVICE void wgmma_wait_few(float (&c)[8][2][4]) {
    asm volatile("wgmma.wait_group.sync.aligned 0;" : WG_16(c[0]), WG_16(c[1]), WG_16(c[2]), WG_16(c[3]), WG_16(c[4]), WG_16(c[5]), WG_16(c[6]),
                 WG_16(c[7])::"memory");
}
DEVICE void wgmma_wait_few(float (&c)[8][4][4]) {
    asm volatile("wgmma.wait_group.sync.aligned 0;" : WG_32(c[0]), WG_32(c[1]), WG_32(c[2]), WG_32(c[3]), WG_32(c[4]), WG_32(c[5]), WG_32(c[6]),
                 WG_32(c[7])::"memory");
}
#undef WG_16
#undef WG_32
#undef WG_OUT_16
#undef WG_OUT_32
// Moves a matrix descriptor by `units` of 16 bytes. A 32-bit addition suffices, because addresses do not overflow.
DEVICE u64 further(u64 matrix, u32 units) {
    u64 there;
    asm("{ .reg .b32 low, high; mov.b64 {low, high}, %1; add.u32 low, low, %2; mov.b64 %0, {low, high}; }" : "=l"(there) : "l"(matrix), "r"(units));
    return there;
}
// Stores four 8x8 matrices like store_matrix, but transposed.
DEVICE void store_matrix_transposed(u32 at, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(at), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

// Whether fp8 numbers are multiplied without their tokens' scales, which are then applied to logits and weights. In f16 a weight
// times a scale may exceed the range, so f16 kernels scale the numbers before the products.
template <class T> constexpr bool UNSCALED = false;
template <> constexpr bool UNSCALED<bf16> = true;

// The scales of the tokens in each place.
template <bool IS> struct PlaceScales {};
template <> struct PlaceScales<true> {
    float scales[3][64];
};

template <class T, int ROWS, bool FP8 = false> struct LatentFew {
    static constexpr int RANK = 512, ROPE = 64, WARPS = 4, THREADS = 128;  // warps and threads of a warpgroup
    static constexpr int BLOCKS = (RANK + ROPE) / 64, N = ROWS / 8;        // blocks of 64 columns; blocks of 8 query rows
    static constexpr int GROUP = BLOCKS * 1024, PLACE = 8 * GROUP;         // bytes of 8 rows, of 64 rows
    static constexpr int PLACES = 3, Q = (24 - N) * GROUP, P = 24 * GROUP; // offsets in dynamic shared memory
    static constexpr int BYTES = P + ROWS * 128;
    static constexpr int PRODUCERS = FP8 ? 2 : 1;                         // warpgroups that copy
    static constexpr bool APART = FP8 && UNSCALED<T>;                     // whether scales are applied to logits and weights
    // Number of tokens of a place.
    static __device__ __forceinline__ u32 size(u32 place) { return place + 1 == PLACES ? 64 - ROWS : 64; }

    struct Shared : PlaceScales<APART> {
        u64 full[PLACES], empty[PLACES];
        u64 q_full, q_empty;
        uint4 grows;                           // for each warp, whether a row's maximum must be raised
        float top[WARPS][ROWS], sum[WARPS][ROWS];  // over each warp's tokens
        // All `producers` threads arrive after their copies. One lane of each computing warp arrives after the warp's
        // last read.
        __device__ __forceinline__ void init(u32 producers) {
            for (u32 i = 0; i < PLACES; ++i) barrier_init(shared_address(full + i), producers), barrier_init(shared_address(empty + i), WARPS);
            barrier_init(shared_address(&q_full), producers), barrier_init(shared_address(&q_empty), WARPS);
        }
    };

    // Descriptor of consecutive groups of 8 rows.
    static __device__ __forceinline__ u64 groups(u32 at) {
        return static_cast<u64>(at >> 4 & 0x3fff) | 1ull << 16 | static_cast<u64>(GROUP >> 4) << 32 | 1ull << 62;
    }
    // Returns the place of 16 bytes in a group: row `row`, piece `piece` of 8 in 64 columns.
    static __device__ __forceinline__ u32 within(u32 row, u32 piece) { return row * 128 + (piece ^ row) * 16; }

    // ---- copies: one warpgroup ------------------------------------------------------------------------------------------
    //
    // Warp w copies rows 8 w to 8 w + 7 and 8 w + 32 to 8 w + 39 of a tile.

    // The tiles that are not looked up yet. Each lane looks up one row of a tile.
    struct Walk {
        const AttendParams& p;
        u32 index, end, begin;
        ExtendWork work;
        // Moves to an item that has tokens.
        __device__ __forceinline__ void item() {
            for (; index < end; ++index) {
                work = load_latent_work(p, index);
                if (work.kv_begin < work.kv_end) break;
            }
            begin = work.kv_begin;
        }
    };
    struct Found {
        u32 page, slot;  // of the lane's row
        u32 left;        // tokens from the tile's first to the item's last; 0: no tile
        u32 first;       // if this is an item's first tile, the item's index + 1; else 0
    };
    // Looks up the next tile. Rows past the item's last token repeat this token.
    static __device__ __forceinline__ Found look(Walk& walk, u32 row, u32 size) {
        Found found{0, 0, 0, 0};
        if (walk.index >= walk.end) return found;
        const ExtendWork& work = walk.work;
        const Look at = look_up(walk.p, work.row & ~TREE_ROW, min(walk.begin + row, work.kv_end - 1));
        found.page = load_page(walk.p, at, load_directory(walk.p, at)), found.slot = at.slot;
        found.left = work.kv_end - walk.begin, found.first = walk.begin == work.kv_begin ? walk.index + 1 : 0;
        walk.begin += size;
        if (walk.begin >= work.kv_end) ++walk.index, walk.item();
        return found;
    }
    static __device__ __forceinline__ u64 offset(const AttendParams& p, const Found& found) {
        return found.page * p.page_stride + found.slot * p.slot_stride;
    }

    // Copies an item's queries, with zeros for rows past the last one. Each warp copies 4 rows at a time.
    static __device__ __forceinline__ void copy_queries(const AttendParams& p, u32 memory, u32 index, u32 warp, u32 warps, u32 lane) {
        const ExtendWork work = load_latent_work(p, index);
        const u32 rows = work.extend_len * p.group - work.q_begin;
        for (u32 row = warp * 4 + lane / 8; row < ROWS; row += 4 * warps) {
            const u32 packed = work.q_begin + min(row, rows - 1), query = packed / p.group;
            const u64 from = p.q + (work.qo_start + query) * p.q_stride + (packed - query * p.group) * static_cast<u64>((RANK + ROPE) * 2) + lane % 8 * 16;
            const u32 to = memory + Q + row / 8 * GROUP + within(row % 8, lane % 8);
#pragma unroll
            for (int b = 0; b < BLOCKS; ++b) copy16(to + b * 1024, from + b * 128, row < rows);
        }
    }

    static __device__ __forceinline__ void produce(const AttendParams& p, u32 memory, Shared& shared, u32 index, u32 end) {
        const u32 warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, mine = warp * 8 + lane % 16 / 8 * 32 + lane % 8;
        Walk walk{p, index, end, 0, {}};
        walk.item();
        Found found[PLACES];
#pragma unroll
        for (int place = 0; place < PLACES; ++place) found[place] = look(walk, mine, size(place));
        // Prefetches may precede the wait for the previous launch, because they load only into the L2 cache, through which that
        // launch writes. In items of more than 192 tokens, prefetches cost more time than they save.
#pragma unroll
        for (int place = 0; place < PLACES; ++place) {
            if (found[place].left == 0 || found[0].left > 192) break;
            for (u32 b = lane / 16; b < BLOCKS; b += 2) prefetch(p.k + offset(p, found[place]) + b * 128);
        }
        wait_for_previous();
        u32 turns = 0;
        for (u32 round = 0;; ++round) {
#pragma unroll
            for (int place = 0; place < PLACES; ++place) {
                const Found tile = found[place];
                if (tile.left == 0) return;
                const u64 base = offset(p, tile);
                barrier_wait(shared_address(shared.empty + place), round % 2 ^ 1);
#pragma unroll
                for (u32 i = 0; i < 2; ++i) {
                    // A product covers 16 tokens. The warps copy whole groups of 16, so a product reads no undefined
                    // number.
                    if (warp / 2 * 16 + i * 32 >= min(tile.left, size(place))) continue;
                    const u32 group = memory + place * PLACE + (warp + 4 * i) * GROUP;
#pragma unroll
                    for (int row = 0; row < 8; ++row) {
                        const u64 from = p.k + __shfl_sync(~0u, base, i * 8 + row) + lane * 16;
                        const u32 at = group + lane / 8 * 1024 + within(row, lane % 8);
                        copy16_once(at, from, true), copy16_once(at + 4096, from + 512, true);
                    }
#pragma unroll
                    for (int row = lane / 8; row < 8; row += 4)
                        copy16_once(group + 8192 + within(row, lane % 8), p.k + __shfl_sync(~0u, base, i * 8 + row) + 1024 + lane % 8 * 16, true);
                }
                barrier_arrive_copied(shared_address(shared.full + place));
                if (tile.first != 0) {
                    barrier_wait(shared_address(&shared.q_empty), turns++ % 2 ^ 1);
                    copy_queries(p, memory, tile.first - 1, warp, WARPS, lane);
                    barrier_arrive_copied(shared_address(&shared.q_full));
                }
                found[place] = look(walk, mine, size(place));
            }
        }
    }

    // ---- copies of fp8: two warpgroups ----------------------------------------------------------------------------------
    //
    // Warp w copies rows 8 w to 8 w + 7 of a tile. In its registers a lane holds 16 fp8 numbers of each of these rows, and 8 of the
    // 64 bf16 numbers of two of them.

    struct Bytes {
        uint4 row[8], rope[2];
        float scale;  // the scale of row `lane % 8`
    };
    static __device__ __forceinline__ uint4 load_once(u64 at) {
        uint4 v;
        asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at) : "memory");
        return v;
    }
    // Loads this warp's rows of a tile.
    static __device__ __forceinline__ void load_tile(const AttendParams& p, Bytes& bytes, const Found& tile, u32 lane) {
        const auto& [attend, scales, rope] = reinterpret_cast<const AttendLatentFp8Params&>(p);
#pragma unroll
        for (int row = 0; row < 8; ++row) {
            const u32 page = __shfl_sync(~0u, tile.page, row), slot = __shfl_sync(~0u, tile.slot, row);
            bytes.row[row] = load_once(p.k + page * p.page_stride + slot * p.slot_stride + lane * 16);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const u32 page = __shfl_sync(~0u, tile.page, i * 4 + lane / 8), slot = __shfl_sync(~0u, tile.slot, i * 4 + lane / 8);
            bytes.rope[i] = load_once(rope.at + page * rope.page_stride + slot * static_cast<u64>(rope.slot_stride) + lane % 8 * 16);
        }
        bytes.scale = __uint_as_float(load_written_u32(scales.k + tile.page * scales.page_stride + tile.slot * 4));
    }
    static __device__ __forceinline__ void store(u32 at, const uint4& v) {
        asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
    }
    static __device__ __forceinline__ uint4 rope_of(const uint4& v) {
        return make_uint4(from_bf16(T(), v.x), from_bf16(T(), v.y), from_bf16(T(), v.z), from_bf16(T(), v.w));
    }
    static __device__ __forceinline__ void store_row(u32 group, const Bytes& bytes, int row, u32 lane) {
        const u32 words[4] = {bytes.row[row].x, bytes.row[row].y, bytes.row[row].z, bytes.row[row].w};
        const float scale = APART ? 1.f : __shfl_sync(~0u, bytes.scale, row);
        u32 wide[8];
#pragma unroll
        for (int i = 0; i < 4; ++i) widen_row<!APART>(T(), words[i], scale, wide[2 * i], wide[2 * i + 1]);
        const uint4 a = make_uint4(wide[0], wide[1], wide[2], wide[3]), b = make_uint4(wide[4], wide[5], wide[6], wide[7]);
        // Half of the lanes write their second piece first, so that eight lanes at a time use all banks.
        const bool second = lane / 4 % 2 != 0;
        const u32 to = group + lane / 4 * 1024, piece = lane % 4 * 2;
        store(to + within(row, piece + second), second ? b : a), store(to + within(row, piece + !second), second ? a : b);
    }

    static __device__ __forceinline__ void produce_fp8(const AttendParams& p, u32 memory, Shared& shared, u32 index, u32 end) {
        const u32 warp = threadIdx.x / 32 - WARPS, lane = threadIdx.x % 32;
        const LayerRope& rope = reinterpret_cast<const AttendLatentFp8Params&>(p).rope;
        Walk walk{p, index, end, 0, {}};
        walk.item();
        Found found[PLACES];
        // Prefetches this warp's rows of a tile into the L2 cache, through which the previous launch writes.
        auto ask = [&](const Found& tile) {
            if (tile.left == 0) return;
            prefetch(p.k + offset(p, tile) + lane / 8 * 128);
            if (lane < 8) prefetch(rope.at + tile.page * rope.page_stride + tile.slot * static_cast<u64>(rope.slot_stride));
        };
        // A product covers 16 tokens. The warps copy whole groups of 16, so a product reads no undefined number.
        auto has = [&](const Found& tile, u32 place) { return warp / 2 * 16 < min(tile.left, size(place)); };
#pragma unroll
        for (int place = 0; place < PLACES; ++place) found[place] = look(walk, warp * 8 + lane % 8, size(place));
#pragma unroll
        for (int place = 0; place < PLACES; ++place) ask(found[place]);
        wait_for_previous();
        Bytes bytes;
        if (has(found[0], 0)) load_tile(p, bytes, found[0], lane);
        u32 turns = 0;
        for (u32 round = 0;; ++round) {
#pragma unroll
            for (int place = 0; place < PLACES; ++place) {
                const Found tile = found[place], next = found[(place + 1) % PLACES];
                if (tile.left == 0) return;
                const bool here = has(tile, place), then = has(next, (place + 1) % PLACES);
                const u32 group = memory + place * PLACE + warp * GROUP;
                barrier_wait(shared_address(shared.empty + place), round % 2 ^ 1);
                if (here) {
#pragma unroll
                    for (int i = 0; i < 2; ++i) store(group + 8 * 1024 + within(i * 4 + lane / 8, lane % 8), rope_of(bytes.rope[i]));
                    if constexpr (APART) {
                        if (lane < 8) shared.scales[place][warp * 8 + lane] = bytes.scale;
                    }
#pragma unroll
                    for (int row = 0; row < 8; ++row) store_row(group, bytes, row, lane);
                }
                fence_async();
                barrier_arrive(shared_address(shared.full + place));
                // The next loads start after the fence, because the fence would wait for them.
                if (then) load_tile(p, bytes, next, lane);
                if (tile.first != 0) {
                    barrier_wait(shared_address(&shared.q_empty), turns++ % 2 ^ 1);
                    copy_queries(p, memory, tile.first - 1, warp, 2 * WARPS, lane);
                    barrier_arrive_copied(shared_address(&shared.q_full));
                }
                ask(found[(place + 2) % PLACES]);
                found[place] = look(walk, warp * 8 + lane % 8, size(place));
            }
        }
    }

    // ---- products: one warpgroup ----------------------------------------------------------------------------------------

    // Sets logits of invisible and missing tokens to minus infinity.
    static __device__ __forceinline__ void mask(const AttendParams& p, const ExtendWork& work, u32 begin, u32 token, u32 column, float (&s)[N][4]) {
        const bool tree = work.row >= TREE_ROW;
#pragma unroll
        for (int i = 0; i < 2 * N; ++i) {
            const u32 query = (work.q_begin + i / 2 * 8 + column + i % 2) / p.group, seen = work.kv_len - work.extend_len + query + 1;
            const u32 to = min(seen, work.kv_end), from = p.window != 0 && seen > p.window ? seen - p.window : 0;
            // Rows past the last one use the mask of the last query.
            const uint2 bits = tree ? tree_mask(p, work.qo_start + min(query, work.extend_len - 1)) : make_uint2(0, 0);
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const u32 at = begin + token + 8 * h;
                if (at < from || at >= to || (tree && !(tree_sees(bits, work.kv_len, at) & 1))) s[i / 2][2 * h + i % 2] = MINUS_INF;
            }
        }
    }

    static __device__ __forceinline__ void consume(const AttendParams& p, u32 memory, Shared& shared, u32 index, u32 end) {
        const u32 warp = __shfl_sync(~0u, threadIdx.x / 32 % 4, 0), lane = threadIdx.x % 32, column = lane % 4 * 2, token = warp * 16 + lane / 4;
        const Logits logits = Logits::make(p);
        const u64 k_matrix = groups(memory), q_matrix = groups(memory + Q), p_matrix = matrix_descriptor(memory + P, 16);
        float o[8][N][4];
        u32 place = 0, round = 0, turns = 0;
        wait_for_previous();
        for (; index < end; ++index) {
            const ExtendWork work = load_latent_work(p, index);
            u32 first_seen = work.kv_len - work.extend_len + work.q_begin / p.group + 1;
            if (work.row >= TREE_ROW) first_seen = min(first_seen, work.kv_len - min(work.kv_len, 64));
            float top[N][2], sum[N][2];
#pragma unroll
            for (int i = 0; i < N; ++i) top[i][0] = top[i][1] = MINUS_INF, sum[i][0] = sum[i][1] = 0.f;
#pragma unroll
            for (int i = 0; i < 32 * N; ++i) o[i / (4 * N)][i / 4 % N][i % 4] = 0.f;
            if (work.kv_begin < work.kv_end) barrier_wait(shared_address(&shared.q_full), turns++ % 2);
            for (u32 begin = work.kv_begin; begin < work.kv_end;) {
                const u32 tokens = min(size(place), work.kv_end - begin), matrix = place * (PLACE >> 4);
                const bool last = begin + tokens == work.kv_end;
                // The rotary numbers of a row have no scale. Their products are kept apart until the others are scaled.
                float s[N][4], apart[N][4], scale[2] = {1.f, 1.f};
                barrier_wait(shared_address(shared.full + place), round % 2);
                fence_async();
                wgmma_fence();
#pragma unroll
                for (int i = 0; i < (RANK + ROPE) / 16; ++i) {
                    const u32 step = (i / 4 * 1024 + i % 4 * 32) >> 4;
                    const bool rope = APART && i >= RANK / 16;
                    wgmma_few_scores(T(), rope ? apart : s, further(k_matrix, matrix + step), further(q_matrix, step), rope ? i > RANK / 16 : i > 0);
                }
                wgmma_commit();
                if constexpr (APART) {
                    wgmma_wait_few(s, apart);
#pragma unroll
                    for (int h = 0; h < 2; ++h) scale[h] = shared.scales[place][token + 8 * h];
#pragma unroll
                    for (int i = 0; i < 4 * N; ++i) s[i / 4][i % 4] = s[i / 4][i % 4] * scale[i % 4 / 2] + apart[i / 4][i % 4];
                } else wgmma_wait_few(s);
                if (last && lane == 0) barrier_arrive(shared_address(&shared.q_empty));
#pragma unroll
                for (int i = 0; i < 4 * N; ++i) s[i / 4][i % 4] = logits.of(s[i / 4][i % 4]);
                if (begin + tokens > first_seen || tokens < size(place) || p.window != 0) mask(p, work, begin, token, column, s);
                if (warp * 16 >= tokens) {
#pragma unroll
                    for (int i = 0; i < 4 * N; ++i) s[i / 4][i % 4] = MINUS_INF;
                }
                soften(shared, warp, lane, column, s, o, top, sum);
                if (warp * 16 < tokens) {
#pragma unroll
                    for (int i = 0; i < N; i += 2) {
                        auto two = [&](int i, int h) { return pack(T(), s[i][2 * h] * scale[h], s[i][2 * h + 1] * scale[h]); };
                        const u32 row = i * 8 + lane / 16 * 8 + lane % 8, piece = warp * 2 + lane / 8 % 2;
                        store_matrix_transposed(memory + P + row * 128 + (piece ^ row % 8) * 16, two(i, 0), two(i, 1), two(i + 1, 0), two(i + 1, 1));
                    }
                }
                fence_async();
                named_sync(1, THREADS);
                wgmma_fence();
#pragma unroll 1
                for (u32 k = 0; k < (tokens + 15) / 16; ++k) {
#pragma unroll
                    for (int b = 0; b < 8; ++b) wgmma_few_output(T(), o[b], further(k_matrix, matrix + k * (2 * GROUP >> 4) + b * (1024 >> 4)), further(p_matrix, k * 2));
                }
                wgmma_commit();
                wgmma_wait_few(o);
                if (lane == 0) barrier_arrive(shared_address(shared.empty + place));
                begin += tokens;
                if (++place == PLACES) place = 0, ++round;
            }
            if (index + 1 == end) let_next_start();
            finish(p, work, shared, o, top, sum);
        }
    }

    // Converts a tile's logits to weights, relative to an earlier maximum of their row. The maximum is raised only when a weight
    // would exceed 2^8.
    static __device__ __forceinline__ void soften(Shared& shared, u32 warp, u32 lane, u32 column, float (&s)[N][4], float (&o)[8][N][4],
                                                  float (&top)[N][2], float (&sum)[N][2]) {
        bool above = false;
#pragma unroll
        for (int i = 0; i < 2 * N; ++i) above |= fmaxf(s[i / 2][i % 2], s[i / 2][2 + i % 2]) > top[i / 2][i % 2] + 8.f;
        above = __any_sync(~0u, above);
        if (lane == 0) (&shared.grows.x)[warp] = above;
        named_sync(1, THREADS);
        const uint4 grows = shared.grows;
        if (grows.x | grows.y | grows.z | grows.w) {
            float most[N][2];
#pragma unroll
            for (int i = 0; i < 2 * N; ++i) {
                float& of = most[i / 2][i % 2];
                of = fmaxf(s[i / 2][i % 2], s[i / 2][2 + i % 2]);
#pragma unroll
                for (int n = 4; n < 32; n *= 2) of = fmaxf(of, __shfl_xor_sync(~0u, of, n));
                if (lane < 4) shared.top[warp][i / 2 * 8 + column + i % 2] = of;
            }
            named_sync(1, THREADS);
#pragma unroll
            for (int i = 0; i < 2 * N; ++i) {
                float& of = top[i / 2][i % 2];
                const float before = of;
#pragma unroll
                for (int w = 0; w < WARPS; ++w) of = fmaxf(of, shared.top[w][i / 2 * 8 + column + i % 2]);
                const float scale = of == MINUS_INF ? 1.f : exp2_fast(before - of);
                sum[i / 2][i % 2] *= scale;
#pragma unroll
                for (int b = 0; b < 8; ++b) o[b][i / 2][i % 2] *= scale, o[b][i / 2][2 + i % 2] *= scale;
            }
        }
#pragma unroll
        for (int i = 0; i < 2 * N; ++i) {
            // A row that has seen no token must not subtract minus infinity from itself.
            const float less = top[i / 2][i % 2] == MINUS_INF ? 0.f : top[i / 2][i % 2];
            float &a = s[i / 2][i % 2], &b = s[i / 2][2 + i % 2];
            a = exp2_fast(a - less), b = exp2_fast(b - less);
            sum[i / 2][i % 2] += a + b;
        }
    }

    static __device__ __forceinline__ void finish(const AttendParams& p, const ExtendWork& work, Shared& shared, const float (&o)[8][N][4],
                                                  float (&top)[N][2], float (&sum)[N][2]) {
        const u32 warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, column = lane % 4 * 2, group = p.group;
        const u32 rows = work.extend_len * group - work.q_begin, parts = work.part & 255, slot = (work.part >> 16) + (work.part >> 8 & 255);
        if (work.kv_begin < work.kv_end) {
#pragma unroll
            for (int i = 0; i < 2 * N; ++i) {
                float& of = sum[i / 2][i % 2];
#pragma unroll
                for (int n = 4; n < 32; n *= 2) of += __shfl_xor_sync(~0u, of, n);
                if (lane < 4) shared.sum[warp][i / 2 * 8 + column + i % 2] = of;
            }
            named_sync(1, THREADS);
#pragma unroll
            for (int i = 0; i < 2 * N; ++i) {
                const u32 row = i / 2 * 8 + column + i % 2;
                sum[i / 2][i % 2] = (shared.sum[0][row] + shared.sum[1][row]) + (shared.sum[2][row] + shared.sum[3][row]);
            }
        }
        const bool first = warp == 0 && lane < 4;  // these four lanes have the sums of all rows
        if (parts > 1) {
#pragma unroll
            for (int i = 0; i < 2 * N; ++i) {
                const u32 row = i / 2 * 8 + column + i % 2;
                if (row >= rows) continue;
                float* const to = reinterpret_cast<float*>(p.partial) + (slot * u64(LATENT_ROWS) + row) * RANK + warp * 16 + lane / 4;
#pragma unroll
                for (int b = 0; b < 8; ++b) to[b * 64] = o[b][i / 2][i % 2], to[b * 64 + 8] = o[b][i / 2][2 + i % 2];
                if (first) reinterpret_cast<float2*>(p.counters)[slot * LATENT_ROWS + row] = make_float2(top[i / 2][i % 2], sum[i / 2][i % 2]);
            }
            return;
        }
        float inverse[N][2];
#pragma unroll
        for (int i = 0; i < 2 * N; ++i) {
            const u32 packed = work.q_begin + min(i / 2 * 8 + column + i % 2, rows - 1), query = packed / group, head = packed - query * group;
            float relative = top[i / 2][i % 2], all = sum[i / 2][i % 2];
            const float worth = enter_sink(p, head, relative, all);
            inverse[i / 2][i % 2] = all > 0.f ? worth * (1.f / all) : 0.f;
            if (first && i / 2 * 8 + column + i % 2 < rows && p.lse != 0)
                store_float(p.lse + ((work.qo_start + query) * static_cast<u64>(p.q_heads) + head) * 4,
                            all > 0.f ? (relative + log2_fast(all)) * LN_2 : MINUS_INF);
        }
#pragma unroll
        for (int i = 0; i < N; ++i) {
            // Transposed, so that a lane has neighbouring columns of one row.
            const u32 row = i * 8 + lane / 4, packed = work.q_begin + min(row, rows - 1), query = packed / group, head = packed - query * group;
            const u64 to = p.out + (work.qo_start + query) * p.out_stride + head * (RANK * 2) + warp * 32 + column * 2;
#pragma unroll
            for (int b = 0; b < 16; ++b) {
                const u32 two = transpose(pack(T(), o[b / 2][i][b % 2 * 2] * inverse[i][0], o[b / 2][i][b % 2 * 2 + 1] * inverse[i][1]));
                if (row < rows) store_u32(to + b / 2 * 128 + b % 2 * 16, two);
            }
        }
    }
};
