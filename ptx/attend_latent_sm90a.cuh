// Attention over latent rows for Hopper: decode and extend by one kernel, on warpgroup matrix products.
//
// An item is a tile of 64 packed query rows (all heads of a query side by side) and a range of positions; each CTA has a list of
// them, about equally long together, and an item that is cut between CTAs leaves sums in `partial` for attend_latent_join_*. Of three
// warpgroups one scores tiles of 64 tokens and makes weights; two multiply weights with V, which is K's tile, 256 columns each, and
// gather the tile after the next with cp.async as soon as they are done with a place, as [9][64][64 columns] in the 128-byte swizzled
// layout that wgmma reads. So the next tile is scored and softened under this one's outputs.
//
// Where all sequences of a step have 32 query rows or fewer, its items are those of attend_latent_few_sm90a.cuh.
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
// c[64, 64] = a[64, 16] * b[64, 16]^T, or += where `add`.
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
WG_LATENT_SCORES(bf16, "bf16")
WG_LATENT_SCORES(f16, "f16")
WG_LATENT_OUTPUT(bf16, "bf16")
WG_LATENT_OUTPUT(f16, "f16")
DEVICE void wgmma_wait_scores(float (&c)[8][4]) { asm volatile("wgmma.wait_group.sync.aligned 0;" : WG_32(c)::"memory"); }
DEVICE void wgmma_wait_outputs(float (&c)[32][4]) { asm volatile("wgmma.wait_group.sync.aligned 0;" : WG_64(c, 0), WG_64(c, 16)::"memory"); }

template <class T> struct LatentHopper {
    static constexpr int RANK = 512, ROPE = 64, BM = 64, BN = 64, WARPS = 4, GROUP = 128;  // warps and threads of a warpgroup
    static constexpr int ROW = (RANK + ROPE) * 2;        // bytes
    static constexpr int BLOCK = 64 * 128;               // bytes of 64 columns of a tile
    static constexpr int BLOCKS = (RANK + ROPE) / 64;
    static constexpr int TILE = BLOCKS * BLOCK;
    static constexpr int Q = 0, K = TILE, P = 3 * TILE;  // offsets in dynamic shared memory
    static constexpr int BYTES = P + BLOCK;
    static constexpr u32 SCORES = 2;                     // the warpgroup that scores

    struct Shared {
        u64 k_full[2];            // tiles of the ring
        u64 q_full, q_empty;
        u64 scored;               // a tile
        u64 p_full, p_empty;      // a tile's weights, and what belongs to them
        float scale[BM];          // what sums before it are multiplied by
        u32 grows[WARPS];         // whether that is anything but 1 in a warp's rows
        float top[BM], sum[BM];   // of the item that ends
    };

    // ---- copies: by the warpgroups that make outputs, 4 blocks of columns each, and half of the rows' last ----------------------

    // Of rows 32 PART .. + 32 warp w copies 8 w .. + 8; a lane holds the `offset` of the row that `row_of` says.
    static __device__ __forceinline__ u32 row_of(u32 warp, u32 lane) { return lane / 8 % 2 * 32 + warp * 8 + lane % 8; }
    template <int PART> static __device__ __forceinline__ void copy(u32 to, u64 base, u64 offset, u32 half, u32 warp, u32 lane, u32 rows) {
        base += lane % 8 * 16 + half * 512;
#pragma unroll 1
        for (u32 i = 0; i < 2; ++i) {
            const u32 row = PART * 32 + warp * 8 + i * 4 + lane / 8;
            const u64 from = base + __shfl_sync(~0u, offset, PART * 8 + i * 4 + lane / 8);
            if (row >= rows) continue;
            const u32 at = to + half * 4 * BLOCK + row * 128 + (lane % 8 ^ row % 8) * 16;
#pragma unroll
            for (int b = 0; b < 4; ++b) copy16(at + b * BLOCK, from + b * 128, true);
            if (PART == half) copy16(at + (8 - 4 * half) * BLOCK, from + (8 - 4 * half) * 128, true);
        }
    }

    // ---- scores: one warpgroup ------------------------------------------------------------------------------------------

    static __device__ __forceinline__ void score(const AttendParams& p, u32 memory, Shared& shared, u32 index, u32 end) {
        const u32 warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, column = lane % 4 * 2, row0 = warp * 16 + lane / 4;
        const Logits logits = Logits::make(p);
        const u64 q_matrix = matrix_descriptor(memory + Q, 16), k_matrix = matrix_descriptor(memory + K, 16);
        float s[8][4];
        u32 n = 0;  // tiles of all items
        wait_for_previous();
        for (u32 turn = 0; index < end; ++index) {
            const ExtendWork work = load_latent_work(p, index);
            if (work.kv_begin == work.kv_end) continue;
            const bool tree = work.row >= TREE_ROW;
            u32 first_seen = work.kv_len - work.extend_len + work.q_begin / p.group + 1;
            if (tree) first_seen = min(first_seen, work.kv_len - min(work.kv_len, 64));
            float top[2] = {MINUS_INF, MINUS_INF}, sum[2] = {0.f, 0.f};
            barrier_wait(shared_address(&shared.q_full), turn % 2);
            for (u32 begin = work.kv_begin; begin < work.kv_end; begin += BN, ++n) {
                barrier_wait(shared_address(shared.k_full + n % 2), n / 2 % 2);
                fence_async();
                wgmma_fence();
                const u64 k = further(k_matrix, n % 2 * TILE >> 4);
#pragma unroll
                for (int i = 0; i < (RANK + ROPE) / 16; ++i) {
                    const u32 step = (i / 4 * BLOCK + i % 4 * 32) >> 4;
                    wgmma_latent_scores(T(), s, further(q_matrix, step), further(k, step), i > 0);
                }
                wgmma_commit();
                wgmma_wait_scores(s);
                const bool last = begin + BN >= work.kv_end;
                if (lane == 0) barrier_arrive(shared_address(&shared.scored));
                if (last && lane == 0) barrier_arrive(shared_address(&shared.q_empty));
#pragma unroll
                for (int i = 0; i < 32; ++i) s[i / 4][i % 4] = logits.of(s[i / 4][i % 4]);
                if (begin + BN > min(first_seen, work.kv_end) || p.window != 0) {
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        // Of this thread's columns, counted from its first.
                        const u32 seen = work.kv_len - work.extend_len + (work.q_begin + row0 + 8 * h) / p.group + 1, at = begin + column;
                        const int to = static_cast<int>(min(seen, work.kv_end) - at);
                        const int from = p.window != 0 && seen > p.window ? static_cast<int>(seen - p.window - at) : 0;
#pragma unroll
                        for (int i = 0; i < 16; ++i)
                            if (i / 2 * 8 + i % 2 < from || i / 2 * 8 + i % 2 >= to) s[i / 2][2 * h + i % 2] = MINUS_INF;
                        if (!tree) continue;
                        // Rows past the last are as the last.
                        const u32 query = min((work.q_begin + row0 + 8 * h) / p.group, work.extend_len - 1);
                        const uint2 mask = tree_mask(p, work.qo_start + query);
#pragma unroll
                        for (int n = 0; n < 8; n += 4) {
                            const u32 some = tree_sees(mask, work.kv_len, begin + n * 8) >> column;
#pragma unroll
                            for (int i = 0; i < 8; ++i)
                                if (!(some >> (i / 2 * 8 + i % 2) & 1)) s[n + i / 2][2 * h + i % 2] = MINUS_INF;
                        }
                    }
                }
                float above[2];
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    above[h] = top[h];
#pragma unroll
                    for (int i = 0; i < 8; ++i) above[h] = fmaxf(above[h], fmaxf(s[i][2 * h], s[i][2 * h + 1]));
                    above[h] = fmaxf(above[h], __shfl_xor_sync(~0u, above[h], 1));
                    above[h] = fmaxf(above[h], __shfl_xor_sync(~0u, above[h], 2));
                }
                // Weights are relative to a logit that was the greatest once, and moves only when a weight would pass 2^8.
                const bool grow = __any_sync(~0u, above[0] > top[0] + 8.f || above[1] > top[1] + 8.f);
                float scale[2] = {1.f, 1.f};
                if (grow) {
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        scale[h] = above[h] == MINUS_INF ? 1.f : exp2_fast(top[h] - above[h]);
                        sum[h] *= scale[h], top[h] = above[h];
                    }
                }
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    // A row that has seen nothing yet must not subtract minus infinity from itself.
                    const float less = top[h] == MINUS_INF ? 0.f : top[h];
#pragma unroll
                    for (int i = 0; i < 8; ++i) {
                        s[i][2 * h] = exp2_fast(s[i][2 * h] - less), s[i][2 * h + 1] = exp2_fast(s[i][2 * h + 1] - less);
                        sum[h] += s[i][2 * h] + s[i][2 * h + 1];
                    }
                }
                barrier_wait(shared_address(&shared.p_empty), n % 2 ^ 1);
                if (lane == 0) shared.grows[warp] = grow;
                if (lane % 4 == 0) shared.scale[row0] = scale[0], shared.scale[row0 + 8] = scale[1];
                const u32 weights = memory + P;
#pragma unroll
                for (int i = 0; i < 8; i += 2) {
                    auto two = [&](int i, int h) { return pack(T(), s[i][2 * h], s[i][2 * h + 1]); };
                    const u32 row = warp * 16 + lane % 16, piece = i + lane / 16;
                    store_matrix(weights + row * 128 + (piece ^ row % 8) * 16, two(i, 0), two(i, 1), two(i + 1, 0), two(i + 1, 1));
                }
                if (last) {
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        sum[h] += __shfl_xor_sync(~0u, sum[h], 1);
                        sum[h] += __shfl_xor_sync(~0u, sum[h], 2);
                        if (lane % 4 == 0) shared.top[row0 + 8 * h] = top[h], shared.sum[row0 + 8 * h] = sum[h];
                    }
                }
                fence_async();
                barrier_arrive(shared_address(&shared.p_full));
            }
            ++turn;
        }
    }

    // ---- outputs: two warpgroups ------------------------------------------------------------------------------------------

    // The tiles that are still to be copied, of this item and those after it.
    struct Copies {
        const AttendParams& p;
        u32 index, end, begin, page, slot;  // of the item; of its next tile
        ExtendWork work;
        // Goes on to an item that has tokens.
        __device__ __forceinline__ void item() {
            for (; index < end; ++index) {
                work = load_latent_work(p, index);
                if (work.kv_begin < work.kv_end) break;
            }
            begin = work.kv_begin;
        }
        // Begins to look for a token of the tile; those past the end are the last one again.
        __device__ __forceinline__ void look(u32 row) {
            if (index >= end) return;
            const Look at = look_up(p, work.row & ~TREE_ROW, min(begin + row, work.kv_end - 1));
            page = load_page(p, at, load_directory(p, at)), slot = at.slot;
        }
    };

    static __device__ __forceinline__ void output(const AttendParams& p, u32 memory, Shared& shared, u32 index, u32 end) {
        const u32 warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, half = __shfl_sync(~0u, threadIdx.x / GROUP, 0), row0 = warp * 16 + lane / 4;
        const u32 mine = row_of(warp, lane);
        const u64 v_matrix = matrix_descriptor(memory + K + half * 4 * BLOCK, BLOCK), weights_matrix = matrix_descriptor(memory + P, 16);
        Copies next{p, index, end, 0, 0, 0, {}};
        next.item();
        next.look(mine);
        wait_for_previous();
        u32 copied = 0, turns = 0;
        // Copies half of the next tile's rows to their place, which is free.
        auto copy_first = [&]() {
            if (next.index >= end) return;
            copy<0>(memory + K + copied % 2 * TILE, p.k, next.page * p.page_stride + next.slot * p.slot_stride, half, warp, lane, BN);
        };
        // The other half, and before its item's first tile the queries; goes on to the tile after it.
        auto copy_second = [&]() {
            if (next.index >= end) return;
            copy<1>(memory + K + copied % 2 * TILE, p.k, next.page * p.page_stride + next.slot * p.slot_stride, half, warp, lane, BN);
            barrier_arrive_copied(shared_address(shared.k_full + copied % 2));
            if (next.begin == next.work.kv_begin) {
                const ExtendWork& work = next.work;
                const u32 rows = min(work.extend_len * p.group - work.q_begin, static_cast<u32>(BM));
                const u32 packed = work.q_begin + min(mine, rows - 1), query = packed / p.group;
                const u64 offset = (work.qo_start + query) * p.q_stride + (packed - query * p.group) * static_cast<u64>(ROW);
                barrier_wait(shared_address(&shared.q_empty), turns % 2 ^ 1);
                copy<0>(memory + Q, p.q, offset, half, warp, lane, rows), copy<1>(memory + Q, p.q, offset, half, warp, lane, rows);
                barrier_arrive_copied(shared_address(&shared.q_full));
                ++turns;
            }
            ++copied;
            next.begin += BN;
            if (next.begin >= next.work.kv_end) ++next.index, next.item();
            next.look(mine);
        };
        copy_first(), copy_second();
        copy_first(), copy_second();
        float o[32][4];
        u32 n = 0;  // tiles of all items
        for (; index < end; ++index) {
            const ExtendWork work = load_latent_work(p, index);
            float top[2] = {MINUS_INF, MINUS_INF}, sum[2] = {0.f, 0.f};
#pragma unroll
            for (int i = 0; i < 32; ++i) o[i][0] = o[i][1] = o[i][2] = o[i][3] = 0.f;
            for (u32 begin = work.kv_begin; begin < work.kv_end; begin += BN, ++n) {
                barrier_wait(shared_address(&shared.p_full), n % 2);
                fence_async();
                if (shared.grows[warp]) {
                    const float scale0 = shared.scale[row0], scale1 = shared.scale[row0 + 8];
#pragma unroll
                    for (int i = 0; i < 32; ++i) o[i][0] *= scale0, o[i][1] *= scale0, o[i][2] *= scale1, o[i][3] *= scale1;
                }
                if (begin + BN >= work.kv_end) {
#pragma unroll
                    for (int h = 0; h < 2; ++h) top[h] = shared.top[row0 + 8 * h], sum[h] = shared.sum[row0 + 8 * h];
                }
                // Where the next tile is there, its scores come first, so that it is softened under these outputs.
                if (begin + BN < work.kv_end && barrier_is_over(shared_address(shared.k_full + (n + 1) % 2), (n + 1) / 2 % 2))
                    barrier_wait(shared_address(&shared.scored), (n + 1) % 2);
                const u64 v = further(v_matrix, n % 2 * TILE >> 4);
                wgmma_fence();
#pragma unroll
                for (int i = 0; i < BN / 16; ++i) {
                    wgmma_latent_output(T(), o, further(weights_matrix, i * 32 >> 4), further(v, i * 2048 >> 4));
                    if (i % 2 == 1) wgmma_commit();
                }
                // The tile after the next is copied to its place by halves, as soon as all four warps are done with their columns there.
                asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
                named_sync(1 + half, GROUP);
                copy_first();
                wgmma_wait_outputs(o);
                if (lane == 0) barrier_arrive(shared_address(&shared.p_empty));
                named_sync(1 + half, GROUP);
                copy_second();
            }
            if (index + 1 == end) let_next_start();
            finish(p, work, half, o, top, sum);
        }
    }

    static __device__ __forceinline__ void finish(const AttendParams& p, const ExtendWork& work, u32 half, const float (&o)[32][4],
                                                  const float (&top)[2], const float (&sum)[2]) {
        const u32 warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, group = p.group, rows = work.extend_len * group - work.q_begin;
        const u32 parts = work.part & 255, slot = (work.part >> 16) + (work.part >> 8 & 255);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const u32 row = warp * 16 + lane / 4 + 8 * h;
            float relative = top[h], all = sum[h];
            if (row >= rows) continue;
            if (parts > 1) {
                float* const to = reinterpret_cast<float*>(p.partial) + (slot * u64(BM) + row) * RANK + half * 256 + lane % 4 * 2;
#pragma unroll
                for (int i = 0; i < 32; ++i) *reinterpret_cast<float2*>(to + i * 8) = make_float2(o[i][2 * h], o[i][2 * h + 1]);
                if (half == 0 && lane % 4 == 0) reinterpret_cast<float2*>(p.counters)[slot * BM + row] = make_float2(relative, all);
                continue;
            }
            const u32 packed = work.q_begin + row, query = packed / group, head = packed - query * group;
            const float worth = enter_sink(p, head, relative, all), inverse = all > 0.f ? worth * (1.f / all) : 0.f;
            const u64 token = work.qo_start + query, to = p.out + token * p.out_stride + head * (RANK * 2) + half * 512 + lane % 4 * 4;
#pragma unroll
            for (int i = 0; i < 32; ++i) store_u32(to + i * 16, pack(T(), o[i][2 * h] * inverse, o[i][2 * h + 1] * inverse));
            if (half == 0 && lane % 4 == 0 && p.lse != 0)
                store_float(p.lse + (token * p.q_heads + head) * 4, all > 0.f ? (relative + log2_fast(all)) * LN_2 : MINUS_INF);
        }
    }
};

// A CTA of items of few query rows: one warpgroup copies, one multiplies.
template <class Few> DEVICE void attend_latent_few(const AttendParams& p, u32 memory, typename Few::Shared& shared, u32 index, u32 end) {
    if (threadIdx.x == 0) shared.init(Few::THREADS);
    __syncthreads();
    const u32 role = threadIdx.x / Few::THREADS;
    if (role == 2) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 120;");
        Few::produce(p, memory, shared, index, end);
    } else if (role == 0) {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 216;");
        Few::consume(p, memory, shared, index, end);
    } else wait_for_previous();
}

template <class T> DEVICE void attend_latent_wide(const AttendParams& p, u32 memory, typename LatentHopper<T>::Shared& shared, u32 index, u32 end) {
    using E = LatentHopper<T>;
    if (threadIdx.x == 0) {
        // All threads that copy arrive; those that make weights; a lane of each warp that is done with something.
        barrier_init(shared_address(shared.k_full), 2 * E::GROUP), barrier_init(shared_address(shared.k_full + 1), 2 * E::GROUP);
        barrier_init(shared_address(&shared.q_full), 2 * E::GROUP), barrier_init(shared_address(&shared.q_empty), E::WARPS);
        barrier_init(shared_address(&shared.scored), E::WARPS);
        barrier_init(shared_address(&shared.p_full), E::GROUP), barrier_init(shared_address(&shared.p_empty), 2 * E::WARPS);
    }
    __syncthreads();
    if (threadIdx.x / E::GROUP == E::SCORES) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 104;");
        E::score(p, memory, shared, index, end);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 200;");
        E::output(p, memory, shared, index, end);
    }
}

template <class T> DEVICE void attend_latent_hopper(const AttendParams& p) {
    using Few = LatentFew<T, 16>;
    using More = LatentFew<T, 32>;
    extern __shared__ __align__(1024) u8 memory[];
    // Of one kind of items only.
    __shared__ union {
        typename LatentHopper<T>::Shared wide;
        typename Few::Shared few;
        typename More::Shared more;
    } state;
    const u32 index = latent_begin(p), end = latent_end(p), width = latent_width(p), at = shared_address(memory);
    // Every CTA waits, those without work too: the end of this launch stands for the end of the ones before it.
    if (index >= end) return wait_for_previous();
    // Apart from the begin on, or else the compiler spills.
    if (width == 16) attend_latent_few<Few>(p, at, state.few, index, end);
    else if (width == 32) attend_latent_few<More>(p, at, state.more, index, end);
    else attend_latent_wide<T>(p, at, state.wide, index, end);
}

// Joins the parts of items that were cut, 128 columns of a row at a time: a warp each, or where some have more than BATCH parts four,
// which share them.
template <class T> DEVICE void attend_latent_join(const AttendParams& p) {
    constexpr int RANK = 512, BATCH = 8, WARPS = 4;
    __shared__ float2 tops[WARPS];
    __shared__ float4 sums[WARPS][32];
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const uint4 head = load_uint4(p.plan);
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
        const u64 data = p.partial + ((slot * u64(LATENT_ROWS) + row) * RANK + columns + lane * 4) * 4;
        const u64 of_row = p.counters + (slot * u64(LATENT_ROWS) + row) * 8;
        const u32 share = shared ? (parts + WARPS - 1) / WARPS : parts, begin = shared ? warp * share : 0, end = min(parts, begin + share);
        for (u32 from = begin; from < end; from += BATCH) {
            float4 x[BATCH];
            float2 of[BATCH];
#pragma unroll
            for (int k = 0; k < BATCH; ++k) {
                const bool is = from + k < end;
                of[k] = make_float2(MINUS_INF, 0.f), x[k] = make_float4(0.f, 0.f, 0.f, 0.f);
                load_float2_shared(of[k], of_row + (from + k) * u64(LATENT_ROWS * 8), is);
                load_float4_shared<0>(x[k], data + (from + k) * u64(LATENT_ROWS * RANK * 4), is);
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
