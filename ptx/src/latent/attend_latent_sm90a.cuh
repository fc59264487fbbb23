// Attention over latent rows for Hopper: one kernel for decode and extend, with warpgroup matrix products.
//
// An item is a tile of 64 packed query rows (all heads of a query are adjacent) and a range of positions. The CTAs have lists
// of items of about equal total length. An item that is cut between CTAs writes sums to `partial` for attend_latent_join_*.
//
// Two of three warpgroups compute. Each has half of the output's columns. Each computes scores and softmax of every second tile
// of 64 tokens, so the products of one overlap with the softmax of the other. K and V are the same tile. A warpgroup
// multiplies its weights with its own half of V's columns from registers. It also writes them to shared memory, from where the
// other warpgroup multiplies them with the other half. The third warpgroup gathers rows with cp.async, as [9][64][64 columns] in
// the 128-byte swizzled layout of wgmma. It fills each half of a tile's columns as soon as the computing warpgroups have released
// this half.
//
// If the plan's items have 128 query rows, the two CTAs of a cluster (a pair) share one item. Each has 64 of its query rows, and
// both process the same tiles. Each CTA requests half of the rows of a tile from the TMA. The TMA writes them to both
// CTAs, so that the L2 cache reads a row once. A place is free when both CTAs have released it. If a tile is not full, each CTA
// gathers its rows itself, because a box would contain rows that were never stored.
//
// If all sequences of a step have at most 32 query rows, its items are those of attend_latent_few_sm90a.cuh.
#pragma once
#include "attend_latent_few_sm90a.cuh"

#define WG_64(c, at) \
    WG_FOUR((c)[at]), WG_FOUR((c)[at + 1]), WG_FOUR((c)[at + 2]), WG_FOUR((c)[at + 3]), WG_FOUR((c)[at + 4]), WG_FOUR((c)[at + 5]), \
        WG_FOUR((c)[at + 6]), WG_FOUR((c)[at + 7]), WG_FOUR((c)[at + 8]), WG_FOUR((c)[at + 9]), WG_FOUR((c)[at + 10]), WG_FOUR((c)[at + 11]), \
        WG_FOUR((c)[at + 12]), WG_FOUR((c)[at + 13]), WG_FOUR((c)[at + 14]), WG_FOUR((c)[at + 15])
#define WG_OUT_256 \
    "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31," \
    "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61," \
    "%62,%63,%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91," \
    "%92,%93,%94,%95,%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117," \
    "%118,%119,%120,%121,%122,%123,%124,%125,%126,%127}"
#define WG_32(c) \
    WG_FOUR((c)[0]), WG_FOUR((c)[1]), WG_FOUR((c)[2]), WG_FOUR((c)[3]), WG_FOUR((c)[4]), WG_FOUR((c)[5]), WG_FOUR((c)[6]), WG_FOUR((c)[7])
#define WG_OUT_64 \
    "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}"
// c[64, 64] = a[64, 16] * b[64, 16]^T; it adds to c if `add` is not 0.
#define WG_LATENT_SCORES(type, name) \
    DEVICE void wgmma_latent_scores(type, float (&c)[8][4], u64 a, u64 b, int add) { \
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %34, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32." name "." name " " WG_OUT_64 \
                     ", %32, %33, p, 1, 1, 0, 0; }" : WG_32(c) : "l"(a), "l"(b), "r"(add)); \
    }
// c[64, 256] += a[64, 16] * b[16, 256]
#define WG_LATENT_OUTPUT(type, name) \
    DEVICE void wgmma_latent_output(type, float (&c)[32][4], u64 a, u64 b) { \
        asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32." name "." name " " WG_OUT_256 ", %128, %129, 1, 1, 1, 0, 1;" \
                     : WG_64(c, 0), WG_64(c, 16) : "l"(a), "l"(b)); \
    }
// The same with a in registers.
#define WG_LATENT_OUTPUT_OWN(type, name) \
    DEVICE void wgmma_latent_output(type, float (&c)[32][4], const u32 (&a)[4], u64 b) { \
        asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32." name "." name " " WG_OUT_256 ", {%128,%129,%130,%131}, %132, 1, 1, 1, 1;" \
                     : WG_64(c, 0), WG_64(c, 16) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)); \
    }
WG_LATENT_SCORES(bf16, "bf16")
WG_LATENT_SCORES(f16, "f16")
WG_LATENT_OUTPUT(bf16, "bf16")
WG_LATENT_OUTPUT(f16, "f16")
WG_LATENT_OUTPUT_OWN(bf16, "bf16")
WG_LATENT_OUTPUT_OWN(f16, "f16")
DEVICE void wgmma_wait_scores(float (&c)[8][4]) { asm volatile("wgmma.wait_group.sync.aligned 0;" : WG_32(c)::"memory"); }
// Waits until at most N groups are unfinished.
template <int N = 0> DEVICE void wgmma_wait_outputs(float (&c)[32][4]) {
    asm volatile("wgmma.wait_group.sync.aligned %128;" : WG_64(c, 0), WG_64(c, 16) : "n"(N) : "memory");
}

template <class T> struct LatentHopper {
    static constexpr int RANK = 512, ROPE = 64, BM = 64, BN = 64, WARPS = 4, GROUP = 128;  // warps and threads of a warpgroup
    static constexpr int ROW = (RANK + ROPE) * 2;        // bytes
    static constexpr int BLOCK = 64 * 128;               // bytes of 64 columns of a tile
    static constexpr int BLOCKS = (RANK + ROPE) / 64, HALF = 4;  // blocks of a tile, of half of V's columns
    static constexpr int TILE = BLOCKS * BLOCK;
    static constexpr int Q = 0, K = TILE, P = 3 * TILE;  // offsets in dynamic shared memory
    static constexpr int BYTES = P + BLOCK;
    static constexpr u32 COPIES = 2;                     // the warpgroup that copies

    // Tile n of all items is in place n % 2, and warpgroup n % 2 computes its scores.
    struct Shared {
        u64 full[2][2], empty[2][2];  // [place][half of V's columns]; the rotary part: in half `place`, over fp8 in the other
        u64 q_full, q_empty;
        u64 weighed[2];               // for each warpgroup's tile: its weights and `top` are ready
        float top[BM];                // the maxima to which the weights are relative
        float sum[2][2][BM];          // [item % 2][warpgroup]: sums of the weights of the warpgroup's tiles
        // `fillers` threads arrive when half of a tile is copied, and a warpgroup's threads when their weights are written. One
        // lane of each warp arrives to release q or a place. For a place, it arrives in all `ctas` CTAs that write the place.
        __device__ __forceinline__ void init(u32 ctas, u32 fillers) {
            for (u32 i = 0; i < 4; ++i) barrier_init(shared_address(full[0] + i), fillers), barrier_init(shared_address(empty[0] + i), ctas * WARPS);
            barrier_init(shared_address(&q_full), GROUP), barrier_init(shared_address(&q_empty), 2 * WARPS);
            barrier_init(shared_address(weighed), GROUP), barrier_init(shared_address(weighed + 1), GROUP);
        }
    };

    // ---- copies: one warpgroup; two warps copy each half of V's columns ----------------------------------------------------

    static constexpr int REGISTERS = 72;  // of a copying thread; those of one thread of each of three warpgroups add up to 504
    // Returns the number of arrivals for half of a tile.
    static __device__ __forceinline__ u32 fillers(u32) { return GROUP / 2; }

    // Copies a half's columns of COUNT rows from row `first` on. Lane i holds the offset of row first + i. An instruction of the
    // warp copies 128 bytes of each of 4 rows; 512 bytes of one row are slower.
    template <int COUNT> static __device__ __forceinline__ void copy_half(u32 tile, u64 base, u64 offset, u32 first, u32 half, u32 lane) {
        base += half * (HALF * 128) + lane % 8 * 16;
#pragma unroll
        for (u32 i = 0; i < COUNT; i += 8) {
            // Both addresses are loaded before the copies; otherwise the second load waits until the copies have read their
            // addresses.
            u64 from[2];
#pragma unroll
            for (int k = 0; k < 2; ++k) from[k] = base + __shfl_sync(~0u, offset, i + k * 4 + lane / 8);
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                const u32 row = first + i + k * 4 + lane / 8, to = tile + half * HALF * BLOCK + row * 128 + (lane % 8 ^ row % 8) * 16;
#pragma unroll
                for (int b = 0; b < HALF; ++b) copy16(to + b * BLOCK, from[k] + b * 128, true);
            }
        }
    }
    template <int COUNT> static __device__ __forceinline__ void copy_rope(u32 tile, u64 base, u64 offset, u32 first, u32 lane) {
        base += RANK * 2 + lane % 8 * 16;
        u64 from[COUNT / 4];
#pragma unroll
        for (u32 i = 0; i < COUNT / 4; ++i) from[i] = base + __shfl_sync(~0u, offset, i * 4 + lane / 8);
#pragma unroll
        for (u32 i = 0; i < COUNT / 4; ++i) {
            const u32 row = first + i * 4 + lane / 8;
            copy16(tile + (BLOCKS - 1) * BLOCK + row * 128 + (lane % 8 ^ row % 8) * 16, from[i], true);
        }
    }

    // Loads an item. In a pair, the result begins with this CTA's query rows, of which there may be none.
    static __device__ __forceinline__ ExtendWork load_own_work(const AttendParams& p, u32 index, u32 ctas) {
        ExtendWork work = load_latent_work(p, index);
        if (ctas == 2) work.q_begin += cluster_rank() * BM;
        return work;
    }

    // Copies an item's queries. Rows past the last one repeat it.
    static __device__ __forceinline__ void copy_queries(const AttendParams& p, u32 memory, u32 index, u32 ctas, u32 warp, u32 lane) {
        const ExtendWork work = load_own_work(p, index, ctas);
        const u32 rows = work.extend_len * p.group, first = warp * (BM / WARPS);
        const u32 packed = min(work.q_begin + first + lane % (BM / WARPS), rows - 1), query = packed / p.group;
        const u64 offset = (work.qo_start + query) * p.q_stride + (packed - query * p.group) * static_cast<u64>(ROW);
        copy_half<BM / WARPS>(memory + Q, p.q, offset, first, 0, lane), copy_half<BM / WARPS>(memory + Q, p.q, offset, first, 1, lane);
        copy_rope<BM / WARPS>(memory + Q, p.q, offset, first, lane);
    }

    // Prefetches the queries that are copied next.
    static __device__ __forceinline__ void ask_queries(const AttendParams& p, u32 index, u32 ctas, u32 warp, u32 lane) {
        const ExtendWork work = load_own_work(p, index, ctas);
        const u32 packed = min(work.q_begin + warp * (BM / WARPS) + lane % (BM / WARPS), work.extend_len * p.group - 1), query = packed / p.group;
        const u64 from = p.q + (work.qo_start + query) * p.q_stride + (packed - query * p.group) * static_cast<u64>(ROW);
        for (u32 b = lane / (BM / WARPS); b < BLOCKS; b += 2) prefetch(from + b * 128);
    }

    // Copies the rows of a full tile for both CTAs. Each CTA requests one half of the rows, with one warp for each half of the
    // columns. The lane of a box's first row requests the box. Every thread arrives at `full`, as after cp.async.
    template <class Found> static __device__ __forceinline__ void copy_boxes(const AttendLatentRowsParams& all, u32 tile, u32 full, const Found& found,
                                                                             u32 half, u32 warp, u32 lane, bool rope, u64 policy) {
        if (warp % 2 != cluster_rank()) return barrier_arrive(full);
        if (lane == 0) barrier_arrive_expecting(full, (HALF + rope) * BLOCK);
        else barrier_arrive(full);
        if (lane % all.box_rows != 0) return;
        const u32 to = tile + (warp % 2 * 32 + lane) * 128;
#pragma unroll
        for (u32 b = 0; b < HALF; ++b)
            copy_box_to_both(to + (half * HALF + b) * BLOCK, all.rows, full, (half * HALF + b) * 64, found.slot, found.page, policy);
        if (rope) copy_box_to_both(to + (BLOCKS - 1) * BLOCK, all.rows, full, RANK, found.slot, found.page, policy);
    }

    static __device__ __forceinline__ void copy(const AttendLatentRowsParams& all, u32 memory, Shared& shared, u32 index, u32 end, u32 ctas) {
        const AttendParams& p = all.attend;
        u64 policy;
        asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
        const u32 warp = __shfl_sync(~0u, threadIdx.x / 32 % 4, 0), lane = threadIdx.x % 32, half = warp / 2, first = warp % 2 * 32;
        using Looks = LatentFew<T, 16>;
        typename Looks::Walk walk{p, index, end, 0, {}};
        walk.item();
        typename Looks::Found tile = Looks::look(walk, first + lane, BN), next = Looks::look(walk, first + lane, BN);
        wait_for_previous();
        u32 turns = 0, n = 0;
        for (; tile.left != 0; ++n) {
            const u32 place = n % 2, to = memory + K + place * TILE;
            barrier_wait(shared_address(&shared.empty[place][half]), n / 2 % 2 ^ 1);
            const u32 full = shared_address(&shared.full[place][half]);
            if (ctas == 2 && tile.left >= BN) copy_boxes(all, to, full, tile, half, warp, lane, place == half, policy);
            else {
                const u64 offset = Looks::offset(p, tile);
                copy_half<32>(to, p.k, offset, first, half, lane);
                if (place == half) copy_rope<32>(to, p.k, offset, first, lane);
                barrier_arrive_copied(full);
            }
            if (tile.first != 0) {
                barrier_wait(shared_address(&shared.q_empty), turns++ % 2 ^ 1);
                copy_queries(p, memory, tile.first - 1, ctas, warp, lane);
                barrier_arrive_copied(shared_address(&shared.q_full));
            }
            tile = next;
            next = Looks::look(walk, first + lane, BN);
            if (next.first != 0) ask_queries(p, next.first - 1, ctas, warp, lane);
        }
        wait_emptied(shared, n, half);
    }

    // Waits, after `n` tiles, until this half of both places is empty again. A CTA of a pair must not end earlier: the
    // other CTA still arrives at its barriers, and the TMA still writes its memory.
    static __device__ __forceinline__ void wait_emptied(Shared& shared, u32 n, u32 half) {
#pragma unroll
        for (u32 i = 0; i < 2; ++i) barrier_wait(shared_address(&shared.empty[(n + i) % 2][half]), (n + i) / 2 % 2 ^ 1);
    }

    // ---- products: two warpgroups -----------------------------------------------------------------------------------------

    // A thread's sums of an item, for two query rows: its share of half of V's columns (o), the maxima to which the weights are
    // relative (top), and the sums of weights.
    struct Sums {
        float o[32][4], top[2], sum[2];
        __device__ __forceinline__ void clear() {
            top[0] = top[1] = MINUS_INF, sum[0] = sum[1] = 0.f;
#pragma unroll
            for (int i = 0; i < 32; ++i) o[i][0] = o[i][1] = o[i][2] = o[i][3] = 0.f;
        }
        // Makes the sums relative to the maxima `above`, which are not below the present ones.
        __device__ __forceinline__ void raise(const float (&above)[2]) {
            float scale[2];
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                scale[h] = above[h] == MINUS_INF ? 1.f : exp2_fast(top[h] - above[h]);
                sum[h] *= scale[h], top[h] = above[h];
            }
#pragma unroll
            for (int i = 0; i < 32; ++i) o[i][0] *= scale[0], o[i][1] *= scale[0], o[i][2] *= scale[1], o[i][3] *= scale[1];
        }
    };

    // Sets logits of invisible and missing tokens to minus infinity.
    static __device__ __forceinline__ void mask(const AttendParams& p, const ExtendWork& work, u32 begin, u32 row0, u32 column, float (&s)[8][4]) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            // The row sees the tokens from..to, counted from this thread's first column.
            const u32 seen = work.kv_len - work.extend_len + (work.q_begin + row0 + 8 * h) / p.group + 1, at = begin + column;
            const int to = static_cast<int>(min(seen, work.kv_end) - at);
            const int from = p.window != 0 && seen > p.window ? static_cast<int>(seen - p.window - at) : 0;
#pragma unroll
            for (int i = 0; i < 16; ++i)
                if (i / 2 * 8 + i % 2 < from || i / 2 * 8 + i % 2 >= to) s[i / 2][2 * h + i % 2] = MINUS_INF;
            if (work.row < TREE_ROW) continue;
            // Rows past the last one use the mask of the last query.
            const u32 query = min((work.q_begin + row0 + 8 * h) / p.group, work.extend_len - 1);
            const uint2 bits = tree_mask(p, work.qo_start + query);
#pragma unroll
            for (int n = 0; n < 8; n += 4) {
                const u32 some = tree_sees(bits, work.kv_len, begin + n * 8) >> column;
#pragma unroll
                for (int i = 0; i < 8; ++i)
                    if (!(some >> (i / 2 * 8 + i % 2) & 1)) s[n + i / 2][2 * h + i % 2] = MINUS_INF;
            }
        }
    }

    static __device__ __forceinline__ float most(const float (&s)[8][4], int h) {
        float most = s[0][2 * h];
#pragma unroll
        for (int i = 0; i < 8; ++i) most = fmaxf(most, fmaxf(s[i][2 * h], s[i][2 * h + 1]));
        return most;
    }
    // Weights are relative to an earlier maximum of their row. The maximum is raised only when a weight would exceed 2^8. Returns
    // whether a weight would exceed it in any of the warp's rows. Logits are `factor` times s.
    static __device__ __forceinline__ bool grows(const float (&s)[8][4], float factor, const Sums& sums) {
        const bool first = most(s, 0) * factor > sums.top[0] + 8.f, second = most(s, 1) * factor > sums.top[1] + 8.f;
        return __any_sync(~0u, first | second);
    }
    // Makes the sums relative to the present maximum logit.
    static __device__ __forceinline__ void grow(const float (&s)[8][4], float factor, Sums& sums) {
        float above[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float all = most(s, h);
            all = fmaxf(all, __shfl_xor_sync(~0u, all, 1));
            above[h] = fmaxf(sums.top[h], fmaxf(all, __shfl_xor_sync(~0u, all, 2)) * factor);
        }
        sums.raise(above);
    }
    // Converts s to weights, and to operands of products.
    static __device__ __forceinline__ void weigh(float (&s)[8][4], float factor, const Sums& sums, u32 (&weights)[BN / 16][4]) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            // A row that has seen no token must not subtract minus infinity from itself.
            const float less = sums.top[h] == MINUS_INF ? 0.f : sums.top[h];
#pragma unroll
            for (int i = 0; i < 16; ++i) s[i / 2][2 * h + i % 2] = exp2_fast(s[i / 2][2 * h + i % 2] * factor - less);
        }
#pragma unroll
        for (int i = 0; i < BN / 4; ++i) weights[i / 4][i % 4] = pack(T(), s[i / 2][i % 2 * 2], s[i / 2][i % 2 * 2 + 1]);
    }

    // Waits for a part of the columns of the warpgroup's tile, and begins to multiply the queries with it. Part 0 is the half that
    // arrives first, because only this warpgroup's own products with V used it. Part 1 is the other half and the rotary part.
    template <int PART> static __device__ __forceinline__ void score(Shared& shared, u32 half, u32 round, u64 q_matrix, u64 k_matrix, float (&s)[8][4]) {
        const u32 of = half ^ PART, blocks = of * (HALF * BLOCK >> 4);
        barrier_wait(shared_address(&shared.full[half][of]), round);
        fence_async();
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < RANK / 32; ++i) {
            const u32 step = blocks + ((i / 4 * BLOCK + i % 4 * 32) >> 4);
            wgmma_latent_scores(T(), s, further(q_matrix, step), further(k_matrix, step), PART + i > 0);
        }
        if constexpr (PART == 1) {
#pragma unroll
            for (int i = 0; i < ROPE / 16; ++i) {
                const u32 step = ((BLOCKS - 1) * BLOCK + i * 32) >> 4;
                wgmma_latent_scores(T(), s, further(q_matrix, step), further(k_matrix, step), 1);
            }
        }
        wgmma_commit();
    }

    // Releases a place: signals all CTAs that write the place that this warp has read it.
    static __device__ __forceinline__ void release(u64& empty, u32 ctas) {
        const u32 lane = threadIdx.x % 32;
        if (ctas == 2 && lane == 1) barrier_arrive_of(shared_address(&empty), cluster_rank() ^ 1);
        if (lane == 0) barrier_arrive(shared_address(&empty));
    }

    static __device__ __forceinline__ void multiply(const AttendParams& p, u32 memory, Shared& shared, u32 index, u32 end, u32 ctas) {
        const u32 warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, column = lane % 4 * 2, row0 = warp * 16 + lane / 4;
        const u32 half = __shfl_sync(~0u, threadIdx.x / GROUP, 0);
        const Logits logits = Logits::make(p);
        // Without a soft cap, logits are products times the scale. `weigh` multiplies by the scale if the scale is
        // positive.
        const bool scaled = !(logits.cap > 0.f) && logits.scale > 0.f;
        const float factor = scaled ? logits.scale : 1.f;
        const u64 q_matrix = matrix_descriptor(memory + Q, 16), weights_matrix = matrix_descriptor(memory + P, 16);
        const u64 k_matrix = matrix_descriptor(memory + K + half * TILE, 16);
        // This warpgroup's half of V's columns, in the tiles that it scores and in those that the other warpgroup scores.
        const u64 own_matrix = matrix_descriptor(memory + K + half * (TILE + HALF * BLOCK), BLOCK);
        const u64 other_matrix = matrix_descriptor(memory + K + (1 - half) * TILE + half * (HALF * BLOCK), BLOCK);
        const u32 weights = memory + P + (warp * 16 + lane % 16) * 128;
        Sums sums;
        u32 before = 0, turns = 0;  // number of tiles of earlier items; number of earlier items with tokens
        wait_for_previous();
        for (u32 item = 0; index < end; ++index, ++item) {
            const ExtendWork work = load_own_work(p, index, ctas);
            const u32 tiles = (work.kv_end - work.kv_begin + BN - 1) / BN;
            u32 first_seen = work.kv_len - work.extend_len + work.q_begin / p.group + 1;
            if (work.row >= TREE_ROW) first_seen = min(first_seen, work.kv_len - min(work.kv_len, 64));
            sums.clear();
            if (tiles > 0) barrier_wait(shared_address(&shared.q_full), turns++ % 2);
            // Each iteration scores a tile of this warpgroup, and adds the output of the tile before it, which the
            // other warpgroup scored. If the other warpgroup scored the item's last tile, one more iteration only adds
            // that tile's output.
            u32 i = (before + half) % 2;
            if (tiles == 1 && i == 1 && lane == 0) barrier_arrive(shared_address(&shared.q_empty));
            for (; i <= tiles; i += 2) {
                const u32 round = (before + i) / 2 % 2;
                // Multiplies the other warpgroup's weights with this warpgroup's half of V in the other's tile.
                auto outputs = [&]() {
                    barrier_wait(shared_address(shared.weighed + (1 - half)), (before + i - 1) / 2 % 2);
                    fence_async();
                    const float above[2] = {shared.top[row0], shared.top[row0 + 8]};
                    if (__any_sync(~0u, above[0] != sums.top[0] || above[1] != sums.top[1])) sums.raise(above);
                    wgmma_fence();
#pragma unroll
                    for (int k = 0; k < BN / 16; ++k) wgmma_latent_output(T(), sums.o, further(weights_matrix, k * 32 >> 4), further(other_matrix, k * 2048 >> 4));
                    wgmma_commit();
                };
                auto release_other = [&]() { release(shared.empty[1 - half][half], ctas); };
                if (i == tiles) {
                    if (i > 0) outputs(), wgmma_wait_outputs(sums.o), release_other();
                    break;
                }
                // Computes the first half of the scores while the other warpgroup computes its weights. Then it multiplies these
                // weights, which releases a place, and computes the second half of the scores while the other's next tile is copied.
                float s[8][4];
                score<0>(shared, half, round, q_matrix, k_matrix, s);
                if (i > 0) outputs();
                score<1>(shared, half, round, q_matrix, k_matrix, s);
                if (i > 0) wgmma_wait_outputs<1>(sums.o), release_other();
                wgmma_wait_scores(s);
                if (i + 2 >= tiles && lane == 0) barrier_arrive(shared_address(&shared.q_empty));
                const u32 begin = work.kv_begin + i * BN;
                if (!scaled || begin + BN > min(first_seen, work.kv_end) || p.window != 0) {
                    if (!scaled) {
#pragma unroll
                        for (int k = 0; k < 32; ++k) s[k / 4][k % 4] = logits.of(s[k / 4][k % 4]);
                    }
                    mask(p, work, begin, row0, column, s);
                }
                if (grows(s, factor, sums)) grow(s, factor, sums);
                u32 packed[BN / 16][4];
                weigh(s, factor, sums, packed);
#pragma unroll
                for (int k = 0; k < BN / 16; ++k)
                    store_matrix(weights + ((2 * k + lane / 16) ^ lane % 8) * 16, packed[k][0], packed[k][1], packed[k][2], packed[k][3]);
                if (lane % 4 == 0) shared.top[row0] = sums.top[0], shared.top[row0 + 8] = sums.top[1];
                fence_async();
                barrier_arrive(shared_address(shared.weighed + half));
                wgmma_fence();
#pragma unroll
                for (int k = 0; k < BN / 16; ++k) wgmma_latent_output(T(), sums.o, packed[k], further(own_matrix, k * 2048 >> 4));
                wgmma_commit();
#pragma unroll
                for (int k = 0; k < 32; ++k) sums.sum[k % 4 / 2] += s[k / 4][k % 4];
                wgmma_wait_outputs(sums.o);
                release(shared.empty[half][half], ctas);
            }
            before += tiles;
            if (index + 1 == end) let_next_start();
            // The sums of rows include both warpgroups' tiles.
            float sum[2];
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                sum[h] = sums.sum[h] + __shfl_xor_sync(~0u, sums.sum[h], 1);
                sum[h] += __shfl_xor_sync(~0u, sum[h], 2);
                if (lane % 4 == 0) shared.sum[item % 2][half][row0 + 8 * h] = sum[h];
            }
            named_sync(1, 2 * GROUP);
#pragma unroll
            for (int h = 0; h < 2; ++h) sum[h] = shared.sum[item % 2][0][row0 + 8 * h] + shared.sum[item % 2][1][row0 + 8 * h];
            finish(p, work, ctas, half, sums.o, sums.top, sum);
        }
    }

    // Exchanges words between two lanes whose numbers differ by `bit`: b of the lower lane, and a of the upper lane.
    static __device__ __forceinline__ void swap_between_lanes(u32& a, u32& b, u32 bit, u32 lane) {
        const bool upper = (lane & bit) != 0;
        const u32 other = __shfl_xor_sync(~0u, upper ? a : b, bit);
        if (upper) a = other;
        else b = other;
    }

    static __device__ __forceinline__ void finish(const AttendParams& p, const ExtendWork& work, u32 ctas, u32 half, const float (&o)[32][4],
                                                  const float (&top)[2], const float (&sum)[2]) {
        const u32 warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, group = p.group, rows = work.extend_len * group;
        const u32 parts = work.part & 255, slot = ((work.part >> 16) + (work.part >> 8 & 255)) * ctas + (ctas == 2 ? cluster_rank() : 0);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const u32 row = warp * 16 + lane / 4 + 8 * h;
            float relative = top[h], all = sum[h];
            const bool is = work.q_begin + row < rows;
            if (parts > 1) {
                if (!is) continue;
                float* const to = reinterpret_cast<float*>(p.partial) + (slot * u64(BM) + row) * RANK + half * 256 + lane % 4 * 2;
#pragma unroll
                for (int i = 0; i < 32; ++i) *reinterpret_cast<float2*>(to + i * 8) = make_float2(o[i][2 * h], o[i][2 * h + 1]);
                if (half == 0 && lane % 4 == 0) reinterpret_cast<float2*>(p.counters)[slot * BM + row] = make_float2(relative, all);
                continue;
            }
            const u32 packed = min(work.q_begin + row, rows - 1), query = packed / group, head = packed - query * group;
            const float worth = enter_sink(p, head, relative, all), inverse = all > 0.f ? worth * (1.f / all) : 0.f;
            const u64 token = work.qo_start + query, to = p.out + token * p.out_stride + head * (RANK * 2) + half * 512 + lane % 4 * 16;
            // Each of four lanes has two columns of every eight of a row. After the swaps each lane has eight consecutive columns.
#pragma unroll
            for (int i = 0; i < 32; i += 4) {
                u32 words[4];
#pragma unroll
                for (int k = 0; k < 4; ++k) words[k] = pack(T(), o[i + k][2 * h] * inverse, o[i + k][2 * h + 1] * inverse);
                swap_between_lanes(words[0], words[1], 1, lane), swap_between_lanes(words[2], words[3], 1, lane);
                swap_between_lanes(words[0], words[2], 2, lane), swap_between_lanes(words[1], words[3], 2, lane);
                if (is) store_uint4(to + i * 16, words[0], words[1], words[2], words[3]);
            }
            if (is && half == 0 && lane % 4 == 0 && p.lse != 0)
                store_float(p.lse + (token * p.q_heads + head) * 4, all > 0.f ? (relative + log2_fast(all)) * LN_2 : MINUS_INF);
        }
    }
};

// Runs a CTA's items of few query rows. One warpgroup computes. One of the others copies rows of 16 bits, or both copy
// rows of fp8.
template <class Few> DEVICE void attend_latent_few(const AttendParams& p, u32 memory, typename Few::Shared& shared, u32 index, u32 end) {
    if (threadIdx.x == 0) shared.init(Few::PRODUCERS * Few::THREADS);
    __syncthreads();
    const u32 role = threadIdx.x / Few::THREADS;
    // The registers of one thread of each warpgroup add up to at most 504, as at launch. A request for more would wait forever.
    if (role >= 3 - Few::PRODUCERS) {
        if constexpr (Few::PRODUCERS == 2) {
            asm volatile("setmaxnreg.dec.sync.aligned.u32 144;");
            Few::produce_fp8(p, memory, shared, index, end);
        } else {
            asm volatile("setmaxnreg.dec.sync.aligned.u32 120;");
            Few::produce(p, memory, shared, index, end);
        }
    } else if (role == 0) {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 216;");
        Few::consume(p, memory, shared, index, end);
    } else wait_for_previous();
}

// Runs a CTA's items of many query rows. `Copies` loads latent rows; `ctas` CTAs share an item.
template <class T, class Copies, class Params>
DEVICE void attend_latent_wide(const Params& all, u32 memory, typename LatentHopper<T>::Shared& shared, u32 index, u32 end, u32 ctas) {
    using E = LatentHopper<T>;
    if (threadIdx.x == 0) shared.init(ctas, Copies::fillers(ctas)), barriers_made();
    __syncthreads();
    // Neither CTA arrives or writes before the other's barriers are initialised.
    if (ctas == 2) cluster_sync();
    if (threadIdx.x / E::GROUP == E::COPIES) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Copies::REGISTERS));
        Copies::copy(all, memory, shared, index, end, ctas);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"((504 - Copies::REGISTERS) / 2));
        E::multiply(all.attend, memory, shared, index, end, ctas);
    }
}

// The kernel: rows of q have type T, and latent rows are of T or fp8. `Copies` loads the latent rows of wide items.
template <class T, bool FP8, class Copies, class Params> DEVICE void attend_latent_hopper(const Params& all) {
    const AttendParams& p = all.attend;
    using Few = LatentFew<T, 16, FP8>;
    using More = LatentFew<T, 32, FP8>;
    extern __shared__ __align__(1024) u8 memory[];
    // All items of a launch are of one kind.
    __shared__ union {
        typename LatentHopper<T>::Shared wide;
        typename Few::Shared few;
        typename More::Shared more;
    } state;
    // Loads the lists of the CTA and of its pair together.
    const u32 width = latent_width(p), ctas = width == LATENT_PAIR_ROWS ? 2 : 1, at = shared_address(memory);
    const u32 own[2] = {latent_begin(p), latent_end(p)}, pair[2] = {latent_begin(p, blockIdx.x / 2), latent_end(p, blockIdx.x / 2)};
    const u32 index = ctas == 2 ? pair[0] : own[0], end = ctas == 2 ? pair[1] : own[1];
    // A CTA without work waits too, so that the end of this launch implies the end of all earlier ones.
    if (index >= end) return wait_for_previous();
    // Each kind of item has a function of its own from here on. Otherwise the compiler spills registers.
    if (width == 16) attend_latent_few<Few>(p, at, state.few, index, end);
    else if (width == 32) attend_latent_few<More>(p, at, state.more, index, end);
    else attend_latent_wide<T, Copies>(all, at, state.wide, index, end, ctas);
}
