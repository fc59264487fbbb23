// Decode attention for up to 64 query rows, for Hopper: the work chunks of attend_decode.cuh, with warpgroup matrix products.
//
// Half of a CTA's threads are producers. With cp.async they gather a segment's Q, and then its tiles of K and V into a ring, in the
// 128-byte swizzled layout of wgmma. They continue across segments. The other half, a warpgroup, computes products and the
// softmax tile by tile. A multiprocessor runs two CTAs, so the softmax of one overlaps with the products of the other.
// Instructions and products still matter: they take nearly as long as the loads of a tile. decode_cursor.cuh walks through a
// chunk; decode_parts.cuh places parts.
#pragma once
#include "attend_extend_sm90a.cuh"
#include "decode_parts.cuh"
#include "pdl.cuh"

#define WG_HALF "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}"
#define WG_HALF_REGISTERS(c) \
    WG_FOUR((c)[0]), WG_FOUR((c)[1]), WG_FOUR((c)[2]), WG_FOUR((c)[3]), WG_FOUR((c)[4]), WG_FOUR((c)[5]), WG_FOUR((c)[6]), WG_FOUR((c)[7])
// c[64, 64] = a[64, 16] * b[64, 16]^T, added to c if `add` is not 0; a is in registers.
#define WG_HALF_SCORES(type, name) \
    DEVICE void wgmma_half_scores(type, float (&c)[8][4], const u32 (&a)[4], u64 b, int add) { \
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %37, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32." name "." name " " WG_HALF \
                     ", {%32,%33,%34,%35}, %36, p, 1, 1, 0; }" : WG_HALF_REGISTERS(c) \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add)); \
    }
WG_HALF_SCORES(bf16, "bf16")
WG_HALF_SCORES(f16, "f16")
DEVICE void wgmma_wait_half(float (&c)[8][4]) { asm volatile("wgmma.wait_group.sync.aligned 0;" : WG_HALF_REGISTERS(c)::"memory"); }

// Adds to a counter for which other CTAs wait, and publishes this thread's earlier writes.
DEVICE void add_released(u32* at, u32 some) { asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(at), "r"(some) : "memory"); }
DEVICE u32 load_acquired(const u32* at) {
    u32 value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
    return value;
}

// All rows, including draft trees.
struct TreeRows : WholeRows {};
DEVICE constexpr bool supports_trees(TreeRows) { return true; }

// head_dim 128; tiles of 64 query rows and 64 tokens.
template <class T> struct DecodeHopper : DecodeParts<T, 128, 8, 4> {
    using Parts = DecodeParts<T, 128, 8, 4>;
    using Cursor = DecodeCursor<TreeRows>;
    using Pending = typename Parts::Pending;
    using Target = typename Parts::Target;
    using Parts::ROW, Parts::ROWS, Parts::LONG_WORK, Parts::p, Parts::warp, Parts::lane, Parts::work_units;
    using Parts::head_of, Parts::target, Parts::counter, Parts::part_output, Parts::part_tops;

    static constexpr int D = 128, BN = 64, WARPS = 4, CONSUMERS = 128, PRODUCERS = 128;
    static constexpr int TILE = BN * ROW, HALF = TILE / 2;  // bytes of a tile (also of Q), of its 64 columns
    static constexpr u32 PLACES = 3;                        // places of the ring, each for a tile of K and one of V
    static constexpr u32 RING = TILE;                       // offset of the ring in dynamic shared memory, after Q
    static constexpr u32 FEW_ROWS = 32;                     // up to this number of query rows, a warp uses 8 of its 16 (`row_of`)
    static constexpr u32 FEW_PARTS = 4;                     // maximum number of parts of a segment that `meet` joins
    enum { MEET = 1 };                                      // the consumers' named barrier

    struct Shared {
        u64 full[PLACES], empty[PLACES], q_full, q_empty;
        typename Parts::Pendings pending;
        u32 came[2];  // for two segments of few parts in turn: the number of parts that arrived before this CTA's
        __device__ __forceinline__ void init() {
            for (u32 i = 0; i < PLACES; ++i) barrier_init(shared_address(full + i), PRODUCERS), barrier_init(shared_address(empty + i), WARPS);
            barrier_init(shared_address(&q_full), PRODUCERS), barrier_init(shared_address(&q_empty), WARPS);
        }
    };

    // A place of the ring, and the parity of its rounds.
    struct Place {
        u32 at = 0, round = 0;
        __device__ __forceinline__ void next() {
            if (++at == PLACES) at = 0, round ^= 1;
        }
    };

    Shared& shared;
    const u32 memory;
    u32 heads;  // number of kv heads of a stripe
    Cursor c;
    __device__ __forceinline__ DecodeHopper(const AttendParams& p, Shared& shared, u32 memory, const DecodeWork& work, u32 unit_begin)
        : Parts(p, threadIdx.x % CONSUMERS), shared(shared), memory(memory), heads(p.kv_heads / p.stripes) {
        work_units = work.work_units;
        c.begin(p, work, unit_begin);
    }

    // With up to 32 query rows, each warp multiplies eight query rows, in rows 0 to 7 of its sixteen. So all warps share the work
    // of the softmax, and no thread has two query rows. The other rows are zeros.
    __device__ __forceinline__ u32 rows() const { return c.extend_len * p.group; }
    __device__ __forceinline__ bool has_few() const { return rows() <= FEW_ROWS; }
    // Returns a warp's first query row, and the query row at `at` in a tile of Q, or ROWS if there is none.
    __device__ __forceinline__ u32 first_row() const { return warp * (has_few() ? 8 : 16); }
    __device__ __forceinline__ u32 query_row(u32 at) const { return !has_few() ? at : at % 16 < 8 ? at / 16 * 8 + at % 8 : ROWS; }

    // ---- producers ----------------------------------------------------------------------------------------------------
    //
    // Warp w copies the rows r with r % 4 == w of each tile, with half of its lanes for each row. It looks up two tiles
    // together: each lane holds the offset of one row of one of the two.

    __device__ __forceinline__ void produce() {
        const u32 piece = lane % 16, row = lane / 16 * 4 + warp;  // of the first rows of a tile
        const u32 mine = memory + piece / 8 * HALF + row * 128 + (piece % 8 ^ row) * 16;
        const u64 k = p.k + piece * 16, v = p.v + piece * 16;
        u32 page = 0, slot = 0;
        // Begins to look up this lane's token; rows past the end repeat the last token.
        auto look = [&](u32 begin) {
            const Look at = look_up(p, c.row & ~TREE_ROW, min(begin + lane / 16 * BN + lane % 16 * 4 + warp, c.end() - 1));
            page = load_page(p, at, load_directory(p, at)), slot = at.slot;
        };
        auto found = [&]() -> u64 { return page * p.page_stride + slot * p.slot_stride + head_of(c) * p.head_stride; };
        // Skips segments without tokens, and begins the look-ups of the next one.
        auto skip = [&](bool more) -> bool {
            while (more && c.begin_of(0) >= c.end()) more = c.template next<ROWS>(p, heads);
            if (more) look(c.begin_of(0));
            return more;
        };
        auto copy_q = [&](u32 turn) {
            const u32 group = p.group, packed = query_row(lane % 16 * 4 + warp), query = packed / group;
            const u64 offset = (c.qo_start + query) * p.q_stride + (head_of(c) * group + packed - query * group) * ROW;
            const u32 some = __ballot_sync(~0u, packed < rows());
            barrier_wait(shared_address(&shared.q_empty), turn % 2 ^ 1);
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const u32 of = i * 2 + lane / 16;
                copy16(mine + i * 1024, p.q + piece * 16 + __shfl_sync(~0u, offset, of), some >> of & 1);
            }
            barrier_arrive_copied(shared_address(&shared.q_full));
        };
        Place place;
        auto copy = [&](u64 offset, u32 half) {
            barrier_wait(shared_address(shared.empty + place.at), place.round ^ 1);
            const u32 to = mine + RING + place.at * (2 * TILE);
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const u64 at = __shfl_sync(~0u, offset, half * 16 + i * 2 + lane / 16);
                copy16_once(to + i * 1024, k + at, true);
                copy16_once(to + TILE + i * 1024, v + at, true);
            }
            barrier_arrive_copied(shared_address(shared.full + place.at));
            place.next();
        };
        bool more = skip(true);
        if (more && work_units < LONG_WORK) {
            const u64 offset = found();
            prefetch(p.k + offset), prefetch(p.k + offset + 128), prefetch(p.v + offset), prefetch(p.v + offset + 128);
        }
        wait_for_previous();
        for (u32 turn = 0; more; ++turn) {
            const u32 end = c.end();
            copy_q(turn);
            for (u32 begin = c.begin_of(0); begin < end; begin += 2 * BN) {
                const u64 offset = found();
                if (begin + 2 * BN < end) look(begin + 2 * BN);
                else more = skip(c.template next<ROWS>(p, heads));
                copy(offset, 0);
                if (begin + BN < end) copy(offset, 1);
            }
        }
    }

    // ---- consumers ----------------------------------------------------------------------------------------------------
    //
    // In a tile's scores, a thread has query rows row_of(0) and row_of(1), and tokens column and column + 1 of every eight.

    __device__ __forceinline__ u32 row_of(u32 h) const { return has_few() && h == 1 ? ROWS : first_row() + lane / 4 + 8 * h; }

    // Masks the tokens of the tile at `begin` that queries do not see.
    template <int H> __device__ __forceinline__ void mask(float (&s)[8][4], u32 begin, u32 end) const {
        const bool tree = c.row >= TREE_ROW;
        const u32 position0 = c.kv_len - c.extend_len, group = p.group, column = lane % 4 * 2;
        // The queries see all tokens up to `first`; in a tree the last 64 tokens are always checked.
        const u32 first = tree ? min(position0, c.kv_len - min(c.kv_len, 65)) : position0 + first_row() / group;
        if (begin + BN - 1 <= first && begin + BN <= end && p.window == 0) return;
#pragma unroll
        for (int h = 0; h < H; ++h) {
            const u32 query = (first_row() + lane / 4 + 8 * h) / group;
            if (tree) {
                const uint2 mask = tree_mask(p, c.qo_start + min(query, c.extend_len - 1));
#pragma unroll
                for (int n = 0; n < 8; n += 4) {
                    const u32 at = begin + n * 8, left = end - min(end, at), there = left < 32 ? (1u << left) - 1 : ~0u;
                    const u32 seen = (tree_sees(mask, c.kv_len, at) & there) >> column;
#pragma unroll
                    for (int i = 0; i < 8; ++i)
                        if (!(seen >> (i / 2 * 8 + i % 2) & 1)) s[n + i / 2][2 * h + i % 2] = MINUS_INF;
                }
                continue;
            }
            // The row sees the tokens from..to, counted from this thread's first column.
            const u32 seen = position0 + query + 1;
            const int to = static_cast<int>(min(seen, end) - begin - column);
            const int from = p.window != 0 && seen > p.window ? static_cast<int>(seen - p.window - begin - column) : 0;
#pragma unroll
            for (int i = 0; i < 16; ++i) {
                const int at = i / 2 * 8 + i % 2;
                if (at < from || at >= to) s[i / 2][2 * h + i % 2] = MINUS_INF;
            }
        }
    }

    // Converts scores to weights, for H rows of a thread. `factor` converts scores to logits. Sums are relative to an earlier
    // maximum score. The maximum is raised only when a weight would exceed 2^8.
    template <int H> __device__ __forceinline__ void soften(float (&s)[8][4], float factor, float (&o)[16][4], float (&top)[2], float (&sum)[2],
                                                            u32 (&weights)[4][4]) const {
        float above[H];
        bool grow = false;
#pragma unroll
        for (int h = 0; h < H; ++h) {
            above[h] = top[h];
#pragma unroll
            for (int n = 0; n < 8; ++n) above[h] = fmaxf(above[h], fmaxf(s[n][2 * h], s[n][2 * h + 1]));
            above[h] = fmaxf(above[h], __shfl_xor_sync(~0u, above[h], 1));
            above[h] = fmaxf(above[h], __shfl_xor_sync(~0u, above[h], 2));
            grow |= (above[h] - top[h]) * factor > 8.f;
        }
        if (__any_sync(~0u, grow)) {
#pragma unroll
            for (int h = 0; h < H; ++h) {
                const float scale = above[h] == MINUS_INF ? 1.f : exp2_fast((top[h] - above[h]) * factor);
                sum[h] *= scale, top[h] = above[h];
#pragma unroll
                for (int n = 0; n < 16; ++n) o[n][2 * h] *= scale, o[n][2 * h + 1] *= scale;
            }
        }
#pragma unroll
        for (int h = 0; h < H; ++h) {
            // A row that has seen no token must not subtract minus infinity from itself.
            const float less = top[h] == MINUS_INF ? 0.f : -top[h] * factor;
#pragma unroll
            for (int n = 0; n < 8; ++n) {
                s[n][2 * h] = exp2_fast(fmaf(s[n][2 * h], factor, less)), s[n][2 * h + 1] = exp2_fast(fmaf(s[n][2 * h + 1], factor, less));
                sum[h] += s[n][2 * h] + s[n][2 * h + 1];
                weights[n / 2][n % 2 * 2 + h] = pack(T(), s[n][2 * h], s[n][2 * h + 1]);
            }
        }
    }

    // `top` is in base 2.
    __device__ __forceinline__ void write_lse(u64 token, u32 q_head, float top, float sum) const {
        if (p.lse != 0) store_float(p.lse + (token * p.q_heads + q_head) * 4, sum > 0.f ? (top + log2_fast(sum)) * LN_2 : MINUS_INF);
    }

    // Writes a segment's sums as result rows.
    __device__ __forceinline__ void write(const float (&o)[16][4], const float (&top)[2], const float (&sum)[2]) const {
        const u32 group = p.group;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const u32 row = row_of(h), query = row / group, q_head = head_of(c) * group + row - query * group;
            if (row >= rows()) continue;
            const u64 token = c.qo_start + query, to = p.out + token * p.out_stride + q_head * ROW + lane % 4 * 4;
            float relative = top[h], all = sum[h];
            const float worth = enter_sink(p, q_head, relative, all), inverse = all > 0.f ? worth * (1.f / all) : 0.f;
#pragma unroll
            for (int n = 0; n < 16; ++n) store_u32(to + n * 16, pack(T(), o[n][2 * h] * inverse, o[n][2 * h + 1] * inverse));
            if (lane % 4 == 0) write_lse(token, q_head, relative, all);
        }
    }

    // Writes this CTA's part of a segment's sums.
    __device__ __forceinline__ void write_part(const Target& target, const float (&o)[16][4], const float (&top)[2], const float (&sum)[2]) const {
        const u32 slot = 2 * blockIdx.x + (blockIdx.x == target.first_cta);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const u32 row = row_of(h);
            if (row >= rows()) continue;
            float* const to = part_output(slot) + row * D + lane % 4 * 2;
#pragma unroll
            for (int n = 0; n < 16; ++n) *reinterpret_cast<float2*>(to + n * 8) = make_float2(o[n][2 * h], o[n][2 * h + 1]);
            if (lane % 4 == 0) reinterpret_cast<float2*>(part_tops(slot))[row] = make_float2(top[h], sum[h]);
        }
    }

    // This thread's values of a row of another CTA's part: the maximum logit, the sum of weights, and its columns of the output.
    struct PartRow {
        float2 of, o[16];
    };
    // Threads without a query row read the last one.
    __device__ __forceinline__ PartRow load_part(const Target& target, u32 part, int h) const {
        // Part 0 is in its CTA's slot for the last segment of a work chunk, the other parts in the slots for the first
        // segment.
        const u32 slot = 2 * (target.first_cta + part * p.stripes) + (part == 0), row = min(row_of(h), rows() - 1);
        const float* const from = part_output(slot) + row * D + lane % 4 * 2;
        PartRow x;
        x.of = load_float2_shared(part_tops(slot) + 2 * row);
#pragma unroll
        for (int n = 0; n < 16; ++n) x.o[n] = load_float2_shared(from + n * 8);
        return x;
    }
    // The sum of two parts. It is bitwise commutative: no product is fused with the addition.
    struct Both {
        float top, first, second;
        __device__ __forceinline__ Both(float a, float b) : top(fmaxf(a, b)) {
            const float base = top == MINUS_INF ? 0.f : top;
            first = exp2_fast(a - base), second = exp2_fast(b - base);
        }
        __device__ __forceinline__ float sum(float a, float b) const { return __fadd_rn(__fmul_rn(a, first), __fmul_rn(b, second)); }
    };
    static __device__ __forceinline__ void add_part(PartRow& to, const PartRow& x) {
        const Both both(to.of.x, x.of.x);
        to.of = make_float2(both.top, both.sum(to.of.y, x.of.y));
#pragma unroll
        for (int n = 0; n < 16; ++n) to.o[n] = make_float2(both.sum(to.o[n].x, x.o[n].x), both.sum(to.o[n].y, x.o[n].y));
    }
    static __device__ __forceinline__ void add_part(int h, float (&o)[16][4], float (&top)[2], float (&sum)[2], const PartRow& x) {
        const Both both(top[h], x.of.x);
        top[h] = both.top, sum[h] = both.sum(sum[h], x.of.y);
#pragma unroll
        for (int n = 0; n < 16; ++n) o[n][2 * h] = both.sum(o[n][2 * h], x.o[n].x), o[n][2 * h + 1] = both.sum(o[n][2 * h + 1], x.o[n].y);
    }
    // Adds the other parts to this CTA's part, which stays in registers. The order is (0 + 1) + (2 + 3), so the result
    // does not depend on the order of arrival.
    __device__ __forceinline__ void add_parts(const Target& target, float (&o)[16][4], float (&top)[2], float (&sum)[2]) const {
        static_assert(FEW_PARTS == 4);
        const u32 own = (blockIdx.x - target.first_cta) / p.stripes, beside = own ^ 1, first = (own & 2) ^ 2;
        if (beside < target.parts) {
            const PartRow x[2] = {load_part(target, beside, 0), load_part(target, beside, 1)};
            add_part(0, o, top, sum, x[0]), add_part(1, o, top, sum, x[1]);
        }
        if (target.parts == 2) return;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            if (h == 1 && has_few()) break;
            PartRow x = load_part(target, first, h);
            if (first + 1 < target.parts) add_part(x, load_part(target, first + 1, h));
            add_part(h, o, top, sum, x);
        }
    }

    // The end of a segment of few parts. The lower half of its counter counts arrivals, the upper half written parts. The last
    // CTA to arrive keeps its own part, waits until the others are written, and adds them. Writing and reading its own part
    // again would delay the end of the launch.
    __device__ __forceinline__ void meet(const Target& target, u32 turn, float (&o)[16][4], float (&top)[2], float (&sum)[2]) {
        u32* const at = counter(target.first_cta);
        u32& came = shared.came[turn % 2];
        if (threadIdx.x == 0) came = atomicAdd(at, 1) & 0xffff;
        named_sync(MEET, CONSUMERS);
        if (came + 1 < target.parts) {
            write_part(target, o, top, sum);
            named_sync(MEET, CONSUMERS);
            if (threadIdx.x == 0) add_released(at, 0x10000);
            return;
        }
        if (threadIdx.x == 0) {
            while (load_acquired(at) >> 16 != target.parts - 1) continue;
            *at = 0;
        }
        named_sync(MEET, CONSUMERS);
        add_parts(target, o, top, sum);
        write(o, top, sum);
    }

    // The end of a segment of many parts. The CTA whose arrival is the last joins them at the end of its work chunk.
    __device__ __forceinline__ void leave_part(const Target& target, bool more, const float (&o)[16][4], const float (&top)[2], const float (&sum)[2]) {
        write_part(target, o, top, sum);
        named_sync(MEET, CONSUMERS);
        if (threadIdx.x != 0) return;
        // If the work chunk continues, this signals at once, so that another CTA can join the parts before this chunk's
        // end.
        const bool last = more && arrive_last_fenced(counter(target.first_cta), target.parts);
        if (!more || last)
            shared.pending[blockIdx.x == target.first_cta] = {target.parts, last, target.first_cta, c.qo_start, rows(), head_of(c)};
    }

    __device__ __forceinline__ void consume() {
        const u32 ring = memory + RING, thread = threadIdx.x;
        const u64 k_matrix = matrix_descriptor(ring, 16), v_matrix = matrix_descriptor(ring + TILE, HALF);
        const Logits logits = Logits::make(p);
        // Whether the maximum score gives the maximum logit, so that the scale can be applied after the search.
        const bool plain = logits.cap <= 0.f && logits.scale > 0.f;
        const float factor = plain ? logits.scale : 1.f;
        if (thread == 0) shared.pending[0].parts = shared.pending[1].parts = 0;
        Place place;
        u32 turn = 0, meetings = 0;
        bool more;
        do {
            float o[16][4], top[2] = {MINUS_INF, MINUS_INF}, sum[2] = {0.f, 0.f};
#pragma unroll
            for (int n = 0; n < 16; ++n) o[n][0] = o[n][1] = o[n][2] = o[n][3] = 0.f;
            const u32 end = c.end();
            u32 begin = c.begin_of(0);
            if (begin < end) {
                const bool few = has_few(), mine = first_row() < rows();
                u32 queries[D / 16][4], weights[BN / 16][4] = {};
                barrier_wait(shared_address(&shared.q_full), turn++ % 2);
                const u32 row = warp * 16 + lane % 16;
#pragma unroll
                for (int k = 0; k < D / 16; ++k) load_matrix(queries[k], memory + row * 128 + k / 4 * HALF + ((2 * k + lane / 16) % 8 ^ row % 8) * 16);
                __syncwarp();
                if (lane == 0) barrier_arrive(shared_address(&shared.q_empty));
                for (; begin < end; begin += BN) {
                    float s[8][4];
                    barrier_wait(shared_address(shared.full + place.at), place.round);
                    fence_async();
                    wgmma_fence();
                    const u64 k_tile = k_matrix + (place.at * (2 * TILE) >> 4), v_tile = v_matrix + (place.at * (2 * TILE) >> 4);
#pragma unroll
                    for (int i = 0; i < D / 16; ++i) wgmma_half_scores(T(), s, queries[i], k_tile + ((i / 4 * HALF + i % 4 * 32) >> 4), i > 0);
                    wgmma_commit();
                    wgmma_wait_half(s);
                    if (mine) {
                        if (!plain) {
#pragma unroll
                            for (int i = 0; i < 32; ++i) s[i / 4][i % 4] = logits.of(s[i / 4][i % 4]);
                        }
                        if (few) mask<1>(s, begin, end), soften<1>(s, factor, o, top, sum, weights);
                        else mask<2>(s, begin, end), soften<2>(s, factor, o, top, sum, weights);
                    }
                    wgmma_fence();
#pragma unroll
                    for (int i = 0; i < BN / 16; ++i) wgmma_output(T(), o, weights[i], v_tile + (i * 2048 >> 4));
                    wgmma_commit();
                    wgmma_wait<0>(o);
                    __syncwarp();
                    if (lane == 0) barrier_arrive(shared_address(shared.empty + place.at));
                    place.next();
                }
                top[0] *= factor, top[1] *= factor;  // in base 2 from here on
            }
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                sum[h] += __shfl_xor_sync(~0u, sum[h], 1);
                sum[h] += __shfl_xor_sync(~0u, sum[h], 2);
            }
            const Target to = target(c);
            more = c.unit + (c.stop - c.at) < c.unit_end;
            if (to.parts == 1) write(o, top, sum);
            else if (to.parts > FEW_PARTS) leave_part(to, more, o, top, sum);
            else if (to.parts > 0) meet(to, meetings++, o, top, sum);
            c.template next<ROWS>(p, heads);
        } while (more);
        let_next_start();
        join_pending();
    }

    // ---- parts --------------------------------------------------------------------------------------------------------

    // Signals that all parts of this CTA are written, and joins the segments of which this CTA's part arrived last.
    __device__ __forceinline__ void join_pending() {
        named_sync(MEET, CONSUMERS);
        if (threadIdx.x < 2) {
            Pending& mine = shared.pending[threadIdx.x];
            if (mine.parts > 0 && !mine.complete) mine.complete = arrive_last_fenced(counter(mine.first_cta), mine.parts);
        }
        named_sync(MEET, CONSUMERS);
#pragma unroll 1
        for (int i = 0; i < 2; ++i)
            if (shared.pending[i].parts > 0 && shared.pending[i].complete) join(shared.pending[i]);
    }

    // Joins the parts of a segment. A warp joins four query rows at a time; a lane has four dims of each.
    __device__ __forceinline__ void join(const Pending& pending) const {
        constexpr int FEW = 4, BATCH = 4;  // rows; parts whose loads are in flight together
        // Part 0 is in its CTA's slot for the last segment of a work chunk, the other parts in the slots for the first
        // segment.
        const u32 slot = 2 * pending.first_cta, apart = 2 * p.stripes, group = p.group;
#pragma unroll 1
        for (u32 first = warp * FEW; first < pending.rows; first += WARPS * FEW) {
            const u64 outputs = reinterpret_cast<u64>(part_output(slot)) + first * (D * 4) + lane * 16;
            const u64 tops = reinterpret_cast<u64>(part_tops(slot)) + first * 8;
            float top[FEW], sum[FEW] = {}, o[FEW][4] = {};
#pragma unroll
            for (int r = 0; r < FEW; ++r) top[r] = MINUS_INF;
#pragma unroll 1
            for (u32 from = 0; from < pending.parts; from += BATCH) {
                float4 x[BATCH][FEW], of[BATCH][FEW / 2];
#pragma unroll
                for (int j = 0; j < BATCH; ++j) {
                    const u32 part = from + j, on = part * apart + (part == 0);
                    const bool some = part < pending.parts;
#pragma unroll
                    for (int r = 0; r < FEW / 2; ++r) of[j][r] = make_float4(MINUS_INF, 0.f, MINUS_INF, 0.f);
                    load_float4_shared<0>(of[j][0], tops + on * u64(2 * ROWS * 4), some);
                    load_float4_shared<16>(of[j][1], tops + on * u64(2 * ROWS * 4), some);
                    this->load_fragments(x[j], outputs + on * u64(ROWS * D * 4), some);
                }
#pragma unroll
                for (int r = 0; r < FEW; ++r) {
                    auto top_of = [&](int j) { return r % 2 ? of[j][r / 2].z : of[j][r / 2].x; };
                    auto sum_of = [&](int j) { return r % 2 ? of[j][r / 2].w : of[j][r / 2].y; };
                    float above = top[r];
#pragma unroll
                    for (int j = 0; j < BATCH; ++j) above = fmaxf(above, top_of(j));
                    const float base = above == MINUS_INF ? 0.f : above, old = exp2_fast(top[r] - base);
                    top[r] = above, sum[r] *= old;
                    o[r][0] *= old, o[r][1] *= old, o[r][2] *= old, o[r][3] *= old;
#pragma unroll
                    for (int j = 0; j < BATCH; ++j) {
                        const float weight = exp2_fast(top_of(j) - base);
                        sum[r] += sum_of(j) * weight;
                        o[r][0] += x[j][r].x * weight, o[r][1] += x[j][r].y * weight, o[r][2] += x[j][r].z * weight, o[r][3] += x[j][r].w * weight;
                    }
                }
            }
#pragma unroll
            for (int r = 0; r < FEW; ++r) {
                const u32 row = first + r, query = row / group, q_head = pending.head * group + row - query * group;
                if (row >= pending.rows) continue;
                const u64 token = pending.qo_start + query;
                const float worth = enter_sink(p, q_head, top[r], sum[r]), inverse = sum[r] > 0.f ? worth * (1.f / sum[r]) : 0.f;
                store_uint2(p.out + token * p.out_stride + q_head * ROW + lane * 8, pack(T(), o[r][0] * inverse, o[r][1] * inverse),
                            pack(T(), o[r][2] * inverse, o[r][3] * inverse));
                if (lane == 0) write_lse(token, q_head, top[r], sum[r]);
            }
        }
    }
};

template <class T> DEVICE void attend_decode_hopper(const AttendParams& p) {
    using Decode = DecodeHopper<T>;
    extern __shared__ __align__(1024) u8 memory[];
    __shared__ typename Decode::Shared shared;
    const u32 work_index = blockIdx.x / p.stripes;
    const DecodeWork work = load_work(p.plan + sizeof(DecodeWork) * work_index);
    const u32 unit_begin = work_index * work.work_units;
    // A CTA without work waits too, so that the end of this launch implies the end of all earlier ones.
    if (unit_begin >= work.unit_end) return wait_for_previous();
    if (threadIdx.x == 0) shared.init();
    __syncthreads();
    Decode decode(p, shared, shared_address(memory), work, unit_begin);
    if (threadIdx.x >= Decode::CONSUMERS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
        decode.produce();
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 200;");
        wait_for_previous();
        decode.consume();
    }
}
