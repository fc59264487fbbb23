// Extend attention for Hopper: the items of attend_extend.cuh, with warpgroup matrix products.
//
// A producer warpgroup gathers Q, K and V with cp.async into rings of two tiles each, in the 128-byte swizzled layout of wgmma. It
// continues from item to item. Two consumer warpgroups of 64 query rows each compute products, with Q in registers. A consumer
// issues the scores of the next tile together with the outputs of this tile. While the outputs are computed, it computes the next
// tile's weights, also across the ends of items. The consumers alternate in issuing, so that the softmax of one overlaps with the
// products of the other.
//
// Over fp8 the producers load bytes into registers, one tile of K or V ahead, and write them to the rings as numbers. Products
// with K and V are in f16, which represents all numbers of fp8, so Q is converted to f16 (fp8.cuh). With scales by token, V is
// multiplied by its scales and has the type of the rows of q, because f16 does not represent all such products.
//
// ptxas determines half of the speed. NOTES.md, "Extend", lists what to check in the machine code.
#pragma once
#include "attend_extend.cuh"
#include "fp8.cuh"
#include "hopper.cuh"

// Items of single sequences: the query rows of an item are adjacent. An item writes results, unless it is a part.
struct SequenceItems {
    static constexpr bool SPANS = false;
    struct Lasts {};
    DEVICE u32 count(const AttendParams& p) { return items(p); }
    DEVICE ExtendWork load(const AttendParams& p, u32 item) { return load_work(p, item); }
    DEVICE u32 cta_count(const AttendParams&) { return gridDim.x; }
    DEVICE u32* tickets(const AttendParams& p) { return reinterpret_cast<u32*>(p.counters); }
};

// The scales of K and V.
enum class Scales { NONE, STATIC, BY_TOKEN };
template <Scales> struct SharedScales {};
template <> struct SharedScales<Scales::STATIC> {
    float head_scales[2];  // for each item whose Q is in the ring: the scale of K of its head
};
// Scales of the rows of each producer warp: K's of four tiles, which the consumers read after K, and V's of three. A
// consumer lane reads scales of one producer warp, and its neighbours those of other warps. 36 columns put these scales
// in different banks.
template <> struct SharedScales<Scales::BY_TOKEN> {
    float k_scales[4][4][36], v_scales[4][3][32];
};

template <bool, class A, class B> struct Either {
    using Type = A;
};
template <class A, class B> struct Either<false, A, B> {
    using Type = B;
};

// head_dim 128; tiles of 128 query rows and 128 tokens.
template <class T, Scales SCALES = Scales::NONE, class Items = SequenceItems> struct ExtendHopper {
    enum { FP8 = over_fp8(T()), BY_TOKEN = SCALES == Scales::BY_TOKEN };
    static_assert((SCALES != Scales::NONE) == (FP8 != 0));
    using Rows = typename RowsOf<T>::Type;
    // Types of the products with K, and with V.
    using Keys = typename Either<FP8, f16, Rows>::Type;
    using Values = typename Either<FP8 && !BY_TOKEN, f16, Rows>::Type;
    static constexpr int D = 128, BM = 128, BN = 128, WARPS = 8, CONSUMERS = 256, PRODUCERS = 128;
    static constexpr int ROW = D * 2;
    static constexpr int TILE = BN * ROW, HALF = TILE / 2;  // bytes of a tile, of its 64 columns
    static constexpr int Q = 0, K = 2 * TILE, V = 4 * TILE, FACTORS = 6 * TILE;  // offsets in dynamic shared memory
    enum { FINISH = 1, PRODUCE = 2, TURN = 3, ROWS = 5 };  // named barriers; TURN + w and ROWS + w belong to warpgroup w

    struct Shared : SharedScales<SCALES> {
        Ring q, k, v;
        ExtendWork work[2];  // of the items whose Q is in the ring
        u32 item[2];
        u32 ticket[2];  // for spans, which draw no tickets, the index of the item
        u32 last;
        typename Items::Lasts lasts;
        float4 ended[CONSUMERS];  // of each consumer thread: top and sum of the ending item
        uint4 offsets[PRODUCERS / 32][3][16];  // of each producer warp's rows: of two tiles of K and V, and of Q
    };

    // ---- producers: gather Q, K and V ---------------------------------------------------------------------------------
    //
    // Warp w copies rows r with r / 2 % 4 == w of every tile. Half of its lanes copy a row, each lane one of 16 pieces.
    // A lane has the offset of one row.

    struct Producer {
        const AttendParams& p;
        Shared& shared;
        u32 memory, thread, warp, lane;

        // Returns this thread's producer. Over fp8 the thread's number is read again, because no registers keep derived values.
        __device__ __forceinline__ Producer again() const {
            if constexpr (!FP8) return *this;
            u32 thread;
            asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
            thread -= CONSUMERS;
            return {p, shared, memory, thread, thread / 32, thread % 32};
        }
        __device__ __forceinline__ u32 row() const { return lane % 16 * 8 + warp * 2 + lane / 16; }
        __device__ __forceinline__ void publish(u32 list, u64 offset) const {
            __syncwarp();  // the previous contents have been read
            reinterpret_cast<u64*>(shared.offsets[warp][list])[lane] = offset;
            __syncwarp();
        }
        // Copies this warp's rows of a tile, from `base` + the offsets in `list`.
        __device__ __forceinline__ void copy(u32 to, u64 base, u32 list) const {
            const u32 piece = lane % 16, row = warp * 2 + lane / 16;
            const u32 mine = to + piece / 8 * HALF + row * 128 + (piece % 8 ^ row) * 16;
            const uint4* const offsets = shared.offsets[warp][list] + lane / 16 * 8;
            base += piece * 16;
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const uint4 two = offsets[i];
                copy16(mine + i * 2048, base + (static_cast<u64>(two.y) << 32 | two.x), true);
                copy16(mine + i * 2048 + 1024, base + (static_cast<u64>(two.w) << 32 | two.z), true);
            }
        }
        // Copies a quarter of this warp's rows of a tile of fp8 through registers. A lane has 16 bytes of each of two
        // rows. In a store, eight lanes write every second piece of an even and of an odd row; the swizzle puts these
        // in different banks.
        static __device__ __forceinline__ u32 quarter_row(u32 lane) { return lane / 4 % 2 * 16 + lane / 16 * 8; }  // the first, among the lanes' rows
        // The place of these rows' offsets in shared memory, and their base.
        struct From {
            u32 offsets;
            u64 base;
        };
        __device__ __forceinline__ From from(u64 base, u32 list) const {
            return {shared_address(shared.offsets[warp][list] + quarter_row(lane) / 2), base + (lane % 4 * 16 + lane / 8 % 2 * 64)};
        }
        static __device__ __forceinline__ void load_quarter(u32 (&bytes)[2][4], const From& from, u32 quarter) {
            u64 first, second;
            asm volatile("ld.shared.v2.u64 {%0,%1}, [%2];" : "=l"(first), "=l"(second) : "r"(from.offsets + quarter * 16) : "memory");
            load_bytes(bytes[0], from.base + first);
            load_bytes(bytes[1], from.base + second);
        }
        // Returns where a lane writes, relative to the tile.
        __device__ __forceinline__ u32 quarter_at() const {
            const u32 row = warp * 2 + lane / 4 % 2;
            return lane / 8 % 2 * HALF + lane / 16 * 8192 + row * 128 + (lane % 4 * 2 ^ row) * 16;
        }
        // Writes the bytes to their tile as numbers. The consumers' fence before their products also covers these writes.
        template <class N, bool SCALED> __device__ __forceinline__ void widen_quarter(const u32 (&bytes)[2][4], u32 to, u32 quarter, const float* scales) const {
            float2 scale = make_float2(1.f, 1.f);
            if (SCALED) scale = *reinterpret_cast<const float2*>(scales + quarter_row(lane) + quarter * 2);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                u32 wide[4];
#pragma unroll
                for (int k = 0; k < 2; ++k)
                    widen_row<SCALED>(N(), bytes[i / 2][i % 2 * 2 + k], i < 2 ? scale.x : scale.y, wide[2 * k], wide[2 * k + 1]);
                store_shared_uint4((to ^ i % 2 * 16) + quarter * 2048 + i / 2 * 1024, wide);
            }
        }
        // Writes the result of an item without tokens.
        __device__ __forceinline__ void blank(const ExtendWork& work, u32 head) const {
            for (u32 i = thread; i < BM * 16; i += PRODUCERS) {
                const u32 packed = work.q_begin + i / 16, query = packed / p.group, q_head = head * p.group + (packed - query * p.group);
                if (packed >= work.extend_len * p.group) continue;
                store_uint4(p.out + (work.qo_start + query) * p.out_stride + q_head * ROW + i % 16 * 16, 0, 0, 0, 0);
                if (i % 16 == 0 && p.lse != 0) store_float(p.lse + ((work.qo_start + query) * static_cast<u64>(p.q_heads) + q_head) * 4, MINUS_INF);
            }
        }
    };

    // Produces K and V of an item of fp8: the first K, then each K and the V before it, then the last V.
    template <class Look> static __device__ __forceinline__ void produce_fp8(const Producer& producer, const ExtendWork& work, u32 head, u32& filled,
                                                                             u32& page, Look& look) {
        const AttendParams& p = producer.p;
        Shared& shared = producer.shared;
        const u32 tiles = (work.kv_end - work.kv_begin + BN - 1) / BN, last = 2 * tiles - 1;
        u32 bytes[4][2][4];  // of each quarter of a tile of K or V
        auto publish = [&](u32 tile) {
            const Producer again = producer.again();
            // Looks up the token's slot again, because no register keeps it.
            const u32 slot = look_up(p, 0, min(work.kv_begin + tile * BN + again.row(), work.kv_end - 1)).slot;
            again.publish(tile % 2, page * p.page_stride + slot * p.slot_stride + head * p.head_stride);
            if constexpr (BY_TOKEN) {
                const LayerScales& scales = fp8_of(p).scales;
                const u64 at = page * scales.page_stride + static_cast<u64>(head) * scales.head_stride + slot * 4;
                copy4(shared_address(&shared.k_scales[(filled + tile) % 4][again.warp][again.lane]), scales.k + at, true);
                copy4(shared_address(&shared.v_scales[again.warp][tile % 3][again.lane]), scales.v + at, true);
                copy_commit();
            }
            if (tile + 1 < tiles) look(work.kv_begin + (tile + 1) * BN);
        };
        publish(0);
#pragma unroll
        for (u32 quarter = 0; quarter < 4; ++quarter) Producer::load_quarter(bytes[quarter], producer.again().from(p.k, 0), quarter);
        bool v = false;
        for (u32 part = 0, tile = 0; part <= last; ++part) {
            // Meanwhile the loop loads the next tile. After the last tile it loads that tile again without using it,
            // because conditional loads take registers.
            const u32 next = min(part + 1, last), n = filled + tile, to = producer.memory + (v ? V : K) + n % 2 * TILE + producer.again().quarter_at();
            const bool next_v = next == last || next % 2 == 0;
            const u32 next_tile = next == last ? tiles - 1 : next_v ? part / 2 : part / 2 + 1;
            Ring& ring = v ? shared.v : shared.k;
            if constexpr (BY_TOKEN) {
                copy_wait<0>();
                __syncwarp();
            }
            typename Producer::From from;
            ring.wait_empty(n);
#pragma unroll
            for (u32 quarter = 0; quarter < 4; ++quarter) {
                if constexpr (BY_TOKEN) {
                    // V is multiplied by its scales here and rounded. K is not: the rounding would add an error to a
                    // logit as large as that of all products.
                    const Producer again = producer.again();
                    if (v) again.template widen_quarter<Values, true>(bytes[quarter], to, quarter, shared.v_scales[again.warp][tile % 3]);
                    else again.template widen_quarter<Keys, false>(bytes[quarter], to, quarter, nullptr);
                } else {
                    producer.template widen_quarter<f16, false>(bytes[quarter], to, quarter, nullptr);
                }
                if (quarter == 0) {
                    if (!next_v) publish(next_tile);
                    from = producer.again().from(next_v ? p.v : p.k, next_tile % 2);
                }
                Producer::load_quarter(bytes[quarter], from, quarter);
            }
            barrier_arrive(shared_address(ring.full + n % 2));
            v = next_v, tile = next_tile;
        }
        filled += tiles;
        __syncwarp();
    }

    static __device__ __forceinline__ void produce(const AttendParams& p, u32 memory, Shared& shared, ExtendWork work) {
        const u32 thread = threadIdx.x % PRODUCERS;
        const Producer producer{p, shared, memory, thread, thread / 32, thread % 32};
        const u32 all = Items::count(p);
        u32 item = blockIdx.x, filled = 0;  // number of tiles of K
        u32 listed = 0;                     // for spans: the item's index; `item` is then its kv head
        if constexpr (Items::SPANS) listed = Items::cta(p), item = Items::head(p, listed);
        u32 page = 0, slot = 0;
        auto ask = [&](u32 turn) {
            // A CTA draws one ticket for each item that it computes. A launch therefore draws items(p) tickets, and the counter
            // wraps to 0.
            if constexpr (!Items::SPANS)
                if (thread == 0) shared.ticket[turn % 2] = atomicInc(Items::tickets(p), all - 1);
        };
        // Begins to look up this lane's token of a tile; rows past the end repeat the last token.
        auto look = [&](u32 begin) {
            const Look at = look_up(p, work.row & ~TREE_ROW, min(begin + producer.again().row(), work.kv_end - 1));
            page = load_page(p, at, load_directory(p, at)), slot = at.slot;
        };
        // Moves to the next item.
        auto answer = [&](u32 turn) {
            if constexpr (Items::SPANS) {
                listed = Items::next(p, listed), item = all;
                if (listed != 0) work = Items::load(p, listed), item = Items::head(p, listed);
            } else {
                named_sync(PRODUCE, PRODUCERS);
                item = min(all, Items::cta_count(p)) + shared.ticket[turn % 2];
                if (item < all) work = Items::load(p, item);
            }
        };
        // Skips items without tokens, and begins the look-ups of the next one.
        auto skip = [&](u32 turn) {
            while (!Items::SPANS && item < all && work.kv_begin == work.kv_end) {
                producer.blank(work, item % p.kv_heads);
                named_sync(PRODUCE, PRODUCERS);
                ask(turn);
                answer(turn);
            }
            if (item < all) look(work.kv_begin);
        };
        skip(1);
        for (u32 turn = 0;; ++turn) {
            const bool is = item < all;
            const u32 head = item % p.kv_heads;
            shared.q.wait_empty(turn);
            if (is) {
                ask(turn);
                const u32 group = p.group, packed = min(work.q_begin + producer.again().row(), work.extend_len * group - 1), query = packed / group;
                u32 token = work.qo_start + query;
                if constexpr (Items::SPANS) token = Items::token(p, token);
                producer.again().publish(2, token * p.q_stride + (head * group + packed - query * group) * ROW);
                // Q is the first data that the previous launch may write.
                if constexpr (Items::SPANS)
                    if (turn == 0) Items::begin();
                producer.again().copy(memory + Q + turn % 2 * TILE, p.q, 2);
            }
            if (thread == 0) {
                shared.work[turn % 2] = work, shared.item[turn % 2] = item;
                if constexpr (Items::SPANS) shared.ticket[turn % 2] = listed;
                if constexpr (SCALES == Scales::STATIC) shared.head_scales[turn % 2] = head_scale(fp8_of(p), fp8_of(p).scales.k, head);
                barrier_arrive(shared_address(shared.q.full + turn % 2));
            }
            shared.q.fill(turn);
            if (!is) return;

            if constexpr (FP8) {
                produce_fp8(producer, work, head, filled, page, look);
                answer(turn);
                skip(turn);
                continue;
            }
            const u32 before = filled;
            auto copy_v = [&](u32 n) {
                shared.v.wait_empty(n);
                producer.copy(memory + V + n % 2 * TILE, p.v, n % 2);
                shared.v.fill(n);
            };
            for (u32 begin = work.kv_begin; begin < work.kv_end; begin += BN) {
                producer.publish(filled % 2, page * p.page_stride + slot * p.slot_stride + head * p.head_stride);
                shared.k.wait_empty(filled);
                producer.copy(memory + K + filled % 2 * TILE, p.k, filled % 2);
                shared.k.fill(filled);
                if (begin + BN < work.kv_end) look(begin + BN);
                if (filled > before) copy_v(filled - 1);
                ++filled;
            }
            // If the last V must wait for its place in the ring, the look-ups of the next item come first.
            const bool at_once = __all_sync(~0u, shared.v.is_empty(filled - 1));
            if (at_once) copy_v(filled - 1);
            answer(turn);
            skip(turn);
            if (!at_once) copy_v(filled - 1);
        }
    }

    // ---- consumers: two warpgroups of 64 query rows each --------------------------------------------------------------

    // A warp's values for its rows of an item.
    struct Item {
        u32 kv_end;
        u32 first;  // position of the first row, which sees everything up to it
    };

    // Returns the place of 16 bytes of a row in a tile.
    static __device__ __forceinline__ u32 place(u32 row, u32 piece) { return piece / 8 * HALF + row * 128 + (piece % 8 ^ row % 8) * 16; }

    // Writes the result of an uncut item. It goes through the shared memory of the item's Q, so that stores cover whole rows.
    static __device__ __forceinline__ void write(const AttendParams& p, const ExtendWork& work, u32 head, u32 tile, float factor,
                                                 const float (&o)[16][4], const float (&top)[2], const float (&sum)[2]) {
        const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = p.group, rows = work.extend_len * group;
        auto row_of = [&](u32 i) { return work.q_begin + warp * 16 + i; };
        float inverse[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const u32 packed = row_of(lane / 4 + 8 * h), query = packed / group, q_head = head * group + (packed - query * group);
            float relative = top[h] * factor, all = sum[h];
            const float worth = enter_sink(p, q_head, relative, all);
            inverse[h] = all > 0.f ? worth * (1.f / all) : 0.f;
            if (lane % 4 == 0 && p.lse != 0 && packed < rows)
                store_float(p.lse + ((work.qo_start + query) * static_cast<u64>(p.q_heads) + q_head) * 4,
                            all > 0.f ? (relative + log2_fast(all)) * LN_2 : MINUS_INF);
        }
        const u32 packed = row_of(lane % 16), query = packed / group;
        const u64 to = packed < rows ? p.out + (work.qo_start + query) * p.out_stride + (head * group + (packed - query * group)) * ROW : 0;
        // Each warp has read its own rows of Q and writes there. Only ptxas needs this barrier (NOTES.md, "Extend").
        named_sync(ROWS + warp / 4, 128);
#pragma unroll
        for (int n = 0; n < 16; n += 2) {
            auto two = [&](int n, int h) { return pack(T(), o[n][2 * h] * inverse[h], o[n][2 * h + 1] * inverse[h]); };
            store_matrix(tile + place(warp * 16 + lane % 16, n + lane / 16), two(n, 0), two(n, 1), two(n + 1, 0), two(n + 1, 1));
        }
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 16; i += 2) {
            u32 a, b, c, d;
            const u32 row = i + lane / 16, piece = lane % 16;
            asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "r"(tile + place(warp * 16 + row, piece)));
            const u64 at = __shfl_sync(~0u, to, row);
            if (at != 0) store_uint4(at + piece * 16, a, b, c, d);
        }
    }

    static __device__ __forceinline__ void consume(const AttendParams& p, u8* memory, Shared& shared) {
        const u32 thread = threadIdx.x, warp = thread / 32, lane = thread % 32, warpgroup = thread / 128;
        const u32 tiles_at = shared_address(memory), all = Items::count(p);
        const u32 column = lane % 4 * 2, group = p.group;
        Logits logits = Logits::make(p);
        // Over fp8 Q itself is negated.
        if (!FP8 && p.negate_q != 0) logits.scale = -logits.scale;
        // Whether the maximum score gives the maximum logit, so that the scale can be applied after the search.
        const bool plain = logits.cap <= 0.f && (FP8 || logits.scale > 0.f);
        const float factor = plain ? logits.scale : 1.f;

        float o[1][16][4], s[16][4];
        u32 weights[BN / 16][4];
        float top[1][2] = {{MINUS_INF, MINUS_INF}}, sum[1][2] = {{0.f, 0.f}}, scale[2];
        u32 queries[D / 16][4];
        const u64 k_matrix = matrix_descriptor(tiles_at + K, 16), v_matrix = matrix_descriptor(tiles_at + V, HALF);

        // Over fp8: the factors from scores to logits of this thread's two rows. They include the head's scale of K and
        // the powers of two of Q.
        float factors[2] = {factor, factor};
        auto factor_of = [&](int h) -> float { return !FP8 ? factor : plain ? factors[h] : 1.f; };
        u32 turn = 0;  // index of the item among this CTA's items
        auto widen_queries = [&]() {
            if (p.negate_q != 0) {
#pragma unroll
                for (int i = 0; i < D / 16 * 4; ++i) queries[i / 4][i % 4] ^= 0x80008000;
            }
            u32 most[2] = {0, 0};
#pragma unroll
            for (int i = 0; i < D / 16 * 2; ++i) most[i % 2] = max(most[i % 2], largest(Rows(), queries[i / 2][i % 2], queries[i / 2][i % 2 + 2]));
            float by = logits.scale;
            if constexpr (SCALES == Scales::STATIC) {
                float scale;
                asm volatile("ld.shared.f32 %0, [%1];" : "=f"(scale) : "r"(shared_address(shared.head_scales + turn % 2)) : "memory");
                by *= scale;
            }
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                most[h] = max(most[h], __shfl_xor_sync(~0u, most[h], 1));
                most[h] = max(most[h], __shfl_xor_sync(~0u, most[h], 2));
                const float up = finest(Rows(), most[h]);
                factors[h] = fmaxf(by * inverse_power(up), 0x1p-126f);  // never 0: minus infinity times 0 is NaN
#pragma unroll
                for (int i = 0; i < D / 16 * 2; ++i) queries[i / 2][i % 2 * 2 + h] = to_f16(Rows(), queries[i / 2][i % 2 * 2 + h], up);
            }
        };
        // Moves to the next item, and returns whether there is one.
        Item item;
        auto next = [&]() -> bool {
            shared.q.wait_full(turn);
            if (shared.item[turn % 2] >= all) return false;
            const ExtendWork& work = shared.work[turn % 2];
            item = {work.kv_end, work.kv_len - work.extend_len + (work.q_begin + warp * 16) / group};
            // In a tree, the last 64 tokens are always checked.
            if (!FP8 && !Items::SPANS && work.row >= TREE_ROW) item.first = min(item.first, work.kv_len - min(work.kv_len, 65));
#pragma unroll
            for (int k = 0; k < D / 16; ++k) load_matrix(queries[k], tiles_at + Q + turn % 2 * TILE + place(warp * 16 + lane % 16, 2 * k + lane / 16));
            if constexpr (FP8) widen_queries();
            return true;
        };
        // Products of tile n, counted over all items: Q with K, and weights with V.
        auto scores = [&](u32 n) {
            const u64 k = k_matrix + (n % 2 * TILE >> 4);
#pragma unroll
            for (int i = 0; i < D / 16; ++i) {
                const u32 step = (i / 4 * HALF + i % 4 * 32) >> 4;
                wgmma_scores(Keys(), s, queries[i], k + step, i > 0);
            }
            wgmma_commit();
        };
        auto outputs = [&](u32 n) {
            const u64 v = v_matrix + (n % 2 * TILE >> 4);
#pragma unroll
            for (int i = 0; i < BN / 16; ++i) wgmma_output(Values(), o[0], weights[i], v + (i * 2048 >> 4));
            wgmma_commit();
        };
        // Masks the tokens that a tree's query does not see. Rows past the last one use the mask of the last query.
        auto hide = [&](const ExtendWork& work, u32 begin, u32 row) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const uint2 mask = tree_mask(p, work.qo_start + min((row + 8 * h) / group, work.extend_len - 1));
#pragma unroll
                for (int n = 0; n < 16; n += 4) {
                    const u32 at = begin + n * 8, left = work.kv_end - min(work.kv_end, at), there = left < 32 ? (1u << left) - 1 : ~0u;
                    const u32 seen = (tree_sees(mask, work.kv_len, at) & there) >> column;
#pragma unroll
                    for (int i = 0; i < 8; ++i)
                        if (!(seen >> (i / 2 * 8 + i % 2) & 1)) s[n + i / 2][2 * h + i % 2] = MINUS_INF;
                }
            }
        };
        // Masks the tokens that a query does not see, in tiles with such tokens.
        auto mask = [&](u32 begin) {
            if (begin + BN - 1 <= item.first && begin + BN <= item.kv_end && p.window == 0) return;
            const ExtendWork& work = shared.work[turn % 2];
            const u32 position0 = work.kv_len - work.extend_len, row = work.q_begin + warp * 16 + lane / 4;
            if (!FP8 && !Items::SPANS && work.row >= TREE_ROW) return hide(work, begin, row);
            // A row sees the tokens from..to, counted from this lane's first column.
            int from[2], to[2];
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const u32 end = position0 + (row + 8 * h) / group + 1;
                to[h] = static_cast<int>(min(end, item.kv_end) - begin - column);
                from[h] = p.window != 0 && end > p.window ? static_cast<int>(end - p.window - begin - column) : 0;
            }
#pragma unroll
            for (int i = 0; i < 64; ++i) {
                const int at = i / 4 * 8 + i % 2;
                if (at < from[i % 4 / 2] || at >= to[i % 4 / 2]) s[i / 4][i % 4] = MINUS_INF;
            }
        };
        // Converts the scores of the tile at `begin` to weights. Returns true if the sums so far must be scaled, because a
        // weight would exceed 2^8.
        auto soften = [&](u32 n, u32 begin) -> bool {
            if constexpr (BY_TOKEN) {
                // Token 8 * i + column is row i of the warp that copied it; the token after it is row 16 + i.
                const u32 scales = shared_address(shared.k_scales[n % 4][lane % 4]);
#pragma unroll
                for (int i = 0; i < 16; i += 4) {
                    const float4 even = load_shared_float4(scales + i * 4), odd = load_shared_float4(scales + 64 + i * 4);
                    s[i][0] *= even.x, s[i][1] *= odd.x, s[i][2] *= even.x, s[i][3] *= odd.x;
                    s[i + 1][0] *= even.y, s[i + 1][1] *= odd.y, s[i + 1][2] *= even.y, s[i + 1][3] *= odd.y;
                    s[i + 2][0] *= even.z, s[i + 2][1] *= odd.z, s[i + 2][2] *= even.z, s[i + 2][3] *= odd.z;
                    s[i + 3][0] *= even.w, s[i + 3][1] *= odd.w, s[i + 3][2] *= even.w, s[i + 3][3] *= odd.w;
                }
            }
            if (!plain) {
#pragma unroll
                for (int i = 0; i < 64; ++i) {
                    const Logits of_row = {FP8 ? factors[i % 4 / 2] : logits.scale, logits.cap};
                    s[i / 4][i % 4] = of_row.of(s[i / 4][i % 4]);
                }
            }
            mask(begin);
            float above[2];
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                above[h] = top[0][h];
#pragma unroll
                for (int n = 0; n < 16; ++n) above[h] = fmaxf(above[h], fmaxf(s[n][2 * h], s[n][2 * h + 1]));
                above[h] = fmaxf(above[h], __shfl_xor_sync(~0u, above[h], 1));
                above[h] = fmaxf(above[h], __shfl_xor_sync(~0u, above[h], 2));
            }
            const bool grow = __any_sync(~0u, (above[0] - top[0][0]) * factor_of(0) > 8.f || (above[1] - top[0][1]) * factor_of(1) > 8.f);
            if (grow) {
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    scale[h] = above[h] == MINUS_INF ? 1.f : exp2_fast((top[0][h] - above[h]) * factor_of(h));
                    sum[0][h] *= scale[h], top[0][h] = above[h];
                }
            }
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                // A row that has seen no token must not subtract minus infinity from itself.
                const float factor = factor_of(h), less = top[0][h] == MINUS_INF ? 0.f : -top[0][h] * factor;
#pragma unroll
                for (int n = 0; n < 16; ++n) {
                    s[n][2 * h] = exp2_fast(fmaf(s[n][2 * h], factor, less)), s[n][2 * h + 1] = exp2_fast(fmaf(s[n][2 * h + 1], factor, less));
                    sum[0][h] += s[n][2 * h] + s[n][2 * h + 1];
                }
            }
            return grow;
        };
        auto round = [&]() {
#pragma unroll
            for (int k = 0; k < BN / 16; ++k) {
                weights[k][0] = pack(Values(), s[2 * k][0], s[2 * k][1]), weights[k][1] = pack(Values(), s[2 * k][2], s[2 * k][3]);
                weights[k][2] = pack(Values(), s[2 * k + 1][0], s[2 * k + 1][1]), weights[k][3] = pack(Values(), s[2 * k + 1][2], s[2 * k + 1][3]);
            }
        };
        auto finish = [&](u32 turn, const float (&top)[1][2], float (&sum)[1][2]) {
            const ExtendWork work = shared.work[turn % 2];
            const u32 head = shared.item[turn % 2] % p.kv_heads;
            using End = Finish<T, D, 1, WARPS, FINISH>;
            End::add_up(sum);
            if constexpr (SCALES == Scales::STATIC) {
                const float scale = head_scale(fp8_of(p), fp8_of(p).scales.v, head);
#pragma unroll
                for (int i = 0; i < 64; ++i) o[0][i / 4][i % 4] *= scale;
            }
            if constexpr (Items::SPANS) {
                Items::template part<T>(p, shared.lasts, work, shared.ticket[turn % 2], factor, o[0], top[0], sum[0]);
            } else if ((work.part & 255) == 1) {
                write(p, work, head, tiles_at + Q + turn % 2 * TILE, FP8 ? 1.f : factor, o[0], top[0], sum[0]);
            } else {
                // Over fp8 the factors go to the memory of the item's Q, which all threads have read.
                u8* const factors = memory + (FP8 ? Q + turn % 2 * TILE : FACTORS);
                End::part(p, reinterpret_cast<float*>(factors), shared.last, work, head, FP8 ? 1.f : factor, o, top, sum);
            }
            __syncwarp();
            shared.q.release(turn);
        };
        auto clear = [&]() {
#pragma unroll
            for (int n = 0; n < 16; ++n) o[0][n][0] = o[0][n][1] = o[0][n][2] = o[0][n][3] = 0.f;
        };

        // Stores the ending item's maxima (over fp8 in base 2) and its sums of weights, and resets both.
        auto put_away = [&]() {
            shared.ended[thread] = FP8 ? make_float4(top[0][0] * factor_of(0), top[0][1] * factor_of(1), sum[0][0], sum[0][1])
                                       : make_float4(top[0][0], top[0][1], sum[0][0], sum[0][1]);
            top[0][0] = top[0][1] = MINUS_INF, sum[0][0] = sum[0][1] = 0.f;
        };

        if (warpgroup == 1) named_arrive(TURN, CONSUMERS);
        if (!next()) return;
        clear();
        shared.k.wait_full(0);
        fence_async();
        named_sync(TURN + warpgroup, CONSUMERS);
        wgmma_fence();
        scores(0);
        named_arrive(TURN + 1 - warpgroup, CONSUMERS);
        wgmma_wait<0>(s);
        shared.k.release(0);
        soften(0, shared.work[turn % 2].kv_begin);
        shared.v.wait_full(0);
        round();
        // At the loop's head, tile n, counted over all items, belongs to item `turn`, begins at token `begin` and has
        // weights; no product is in flight. The next tile, of this item or the next, is scored while tile n is
        // multiplied with V.
        for (u32 n = 0, begin = shared.work[turn % 2].kv_begin;; ++n) {
            begin += BN;
            const bool ends = begin >= item.kv_end;
            bool more = true;
            if (ends) {
                // The next item has other factors.
                if constexpr (FP8) put_away();
                ++turn;
                more = next();
                turn -= !more;  // the last item's number stays
                begin = shared.work[turn % 2].kv_begin;
            }
            // Without a next tile, the old contents are scored and never used.
            if (more) shared.k.wait_full(n + 1);
            fence_async();
            named_sync(TURN + warpgroup, CONSUMERS);
            wgmma_fence();
            scores(n + 1);
            outputs(n);
            named_arrive(TURN + 1 - warpgroup, CONSUMERS);
            wgmma_wait<1>(s);
            if (more) shared.k.release(n + 1);
            if (ends) {
                if constexpr (!FP8) put_away();
            }
            const bool grow = soften(n + 1, begin);
            // A loop here prevents ptxas from waiting for the outputs before the softmax.
            if (more) shared.v.wait_full(n + 1);
            wgmma_wait<0>(o[0]);
            shared.v.release(n);
            if (ends) {
                const float4 was = shared.ended[thread];
                const float top_ended[1][2] = {{was.x, was.y}};
                float sum_ended[1][2] = {{was.z, was.w}};
                finish(turn - more, top_ended, sum_ended);
                if (!more) return;
                clear();
            } else if (grow) {
#pragma unroll
                for (int i = 0; i < 16; ++i) o[0][i][0] *= scale[0], o[0][i][1] *= scale[0], o[0][i][2] *= scale[1], o[0][i][3] *= scale[1];
            }
            round();
        }
    }
};

template <class T, Scales SCALES = Scales::NONE> DEVICE void attend_extend_hopper(const AttendParams& p) {
    using E = ExtendHopper<T, SCALES>;
    extern __shared__ __align__(1024) u8 memory[];
    __shared__ typename E::Shared shared;
    const ExtendWork first = load_work(p, blockIdx.x);  // may be past the last item; its load overlaps with that of items(p)
    if (blockIdx.x >= items(p)) return;
    if (threadIdx.x == 0) {
        // Each producer thread arrives, and one arrival is for the item's record; one lane of each consumer warp arrives.
        Ring::init(shared.q, E::PRODUCERS + 1, E::WARPS);
        Ring::init(shared.k, E::PRODUCERS, E::WARPS), Ring::init(shared.v, E::PRODUCERS, E::WARPS);
    }
    __syncthreads();
    if (threadIdx.x >= E::CONSUMERS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(E::FP8 ? 56 : 40));
        E::produce(p, shared_address(memory), shared, first);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(E::FP8 ? 224 : 232));
        E::consume(p, memory, shared);
    }
}
