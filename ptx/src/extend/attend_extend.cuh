// Extend attention over pages. Tensor cores multiply tiles of query rows with the tokens that these rows see.
//
// An item is a tile of packed query rows and a range of positions. Rows are query-major: the `group` query heads of one kv head
// are adjacent, so that each gathered token serves all of them. CTAs take roughly the longest items first. Tiles of K and V are
// double-buffered: while one is processed, the next is copied, and the page numbers of later tiles are looked up. An item may be
// cut into parts over its tokens. Then each part writes its sum to `partial`, and the last part to arrive joins all of them.
//
// Over fp8, T is Fp8<type of q>. Tiles of K and V are copied as bytes and widened to numbers of that type, which the tensor
// cores take.
#pragma once
#include "attend.cuh"
#include "fp8.cuh"

DEVICE u32 items(const AttendParams& p) { return load_u32(p.plan) * p.kv_heads; }
DEVICE ExtendWork load_work(const AttendParams& p, u32 item) {
    const u64 at = p.plan + sizeof(ExtendHead) + sizeof(ExtendWork) * (item / p.kv_heads);
    const uint4 a = load_uint4(at), b = load_uint4(at + 16);
    return {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
}

// Items of single sequences: the query rows of an item are adjacent. An item writes results, unless it is a part.
struct SequenceTiles {
    enum { SPANS = 0 };
    struct Lasts {};
    DEVICE u32 count(const AttendParams& p) { return items(p); }
    DEVICE ExtendWork load(const AttendParams& p, u32 item) { return load_work(p, item); }
    DEVICE u32 head(const AttendParams& p, u32 item) { return item % p.kv_heads; }
    DEVICE u32 cta(const AttendParams&) { return blockIdx.x; }
    DEVICE u32 cta_count(const AttendParams&) { return gridDim.x; }
    DEVICE const AttendFp8Params& fp8(const AttendParams& p) { return fp8_of(p); }
    DEVICE u32* tickets(const AttendParams& p) { return reinterpret_cast<u32*>(p.counters); }
};
// The kind of items that a kernel for T computes.
template <class T> struct ItemsOf {
    using Type = SequenceTiles;
};

// Runs a CTA's items, one after another.
template <class E> DEVICE void run_items(const AttendParams& p, u8* memory, typename E::Shared& shared) {
    using Items = typename E::Items;
    for (u32 item = Items::cta(p); item < Items::count(p);) {
        // The CTA draws one ticket for each item that it computes. A launch therefore draws as many tickets as there are items,
        // and the counter wraps to 0 for the next launch.
        if (threadIdx.x == 0) shared.ticket = atomicInc(Items::tickets(p), Items::count(p) - 1);
        E::one(p, memory, shared, item);
        __syncthreads();
        item = min(Items::count(p), Items::cta_count(p)) + shared.ticket;
        __syncthreads();
    }
}

// Writes the result of an item or of a part. A warp has MT fragments of 16 rows. A lane has two rows of each fragment, lane / 4
// and lane / 4 + 8, and two of every 8 columns, lane % 4 * 2 and the next one. `BARRIER` is the named barrier of the threads that
// call `run`; 0 if all threads of the CTA call it.
template <class T, int D, int MT, int WARPS, int BARRIER = 0> struct Finish {
    static constexpr int THREADS = WARPS * 32;
    static constexpr int BM = 16 * MT * WARPS;
    static constexpr int ROW = D * 2;

    static __device__ __forceinline__ void sync() { asm volatile("bar.sync %0, %1;" ::"n"(BARRIER), "n"(THREADS) : "memory"); }

    // Adds the sums of a row's four lanes.
    static __device__ __forceinline__ void add_up(float (&sum)[MT][2]) {
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                sum[m][h] += __shfl_xor_sync(~0u, sum[m][h], 1);
                sum[m][h] += __shfl_xor_sync(~0u, sum[m][h], 2);
            }
    }

    // `factors` is shared memory that the item no longer needs. `o` and `sum` are in units of 2^(top * factor).
    static __device__ __forceinline__ void run(const AttendParams& p, float* factors, u32& last, const ExtendWork& work, u32 head, float factor,
                                               const float (&o)[MT][D / 8][4], const float (&top)[MT][2], float (&sum)[MT][2]) {
        add_up(sum);
        if ((work.part & 255) == 1) {
            whole(p, work, head, factor, o, top, sum);
        } else {
            part(p, factors, last, work, head, factor, o, top, sum);
        }
    }

    static __device__ __forceinline__ void whole(const AttendParams& p, const ExtendWork& work, u32 head, float factor,
                                                 const float (&o)[MT][D / 8][4], const float (&top)[MT][2], const float (&sum)[MT][2]) {
        const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, column = lane % 4 * 2;
        const u32 group = p.group, rows = work.extend_len * group, warp_row = work.q_begin + warp * 16 * MT;
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const u32 packed = warp_row + m * 16 + lane / 4 + 8 * h;
                if (packed >= rows) continue;
                const u32 query = packed / group;
                const u64 token = work.qo_start + query, q_head = head * group + (packed - query * group);
                float relative = top[m][h] * factor, all = sum[m][h];
                const float worth = enter_sink(p, q_head, relative, all), inverse = all > 0.f ? worth * (1.f / all) : 0.f;
                const u64 to = p.out + token * p.out_stride + q_head * ROW + column * 2;
#pragma unroll
                for (int n = 0; n < D / 8; ++n) store_u32(to + n * 16, pack(T(), o[m][n][2 * h] * inverse, o[m][n][2 * h + 1] * inverse));
                if (lane % 4 == 0 && p.lse != 0)
                    store_float(p.lse + (token * p.q_heads + q_head) * 4, all > 0.f ? (relative + log2_fast(all)) * LN_2 : MINUS_INF);
            }
    }

    static __device__ __forceinline__ void part(const AttendParams& p, float* factors, u32& last, const ExtendWork& work, u32 head, float factor,
                                                const float (&o)[MT][D / 8][4], const float (&top)[MT][2], const float (&sum)[MT][2]) {
        const u32 thread = threadIdx.x, warp = thread / 32, lane = thread % 32, column = lane % 4 * 2;
        const u32 group = p.group, rows = work.extend_len * group, parts = work.part & 255;
        float* const outputs = reinterpret_cast<float*>(p.partial);
        // Each part writes its sum. The last part to arrive then joins all of them.
        const u32 first = work.part >> 16, index = work.part >> 8 & 255;
        const u64 stride = static_cast<u64>(p.kv_heads) * (BM * (D + 2));  // floats from one part to the next
        float* const group_at = outputs + (static_cast<u64>(first) * p.kv_heads + head) * (BM * (D + 2));
        float* const own = group_at + index * stride;
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const u32 row = warp * 16 * MT + m * 16 + lane / 4 + 8 * h;
                float* const to = own + row * D + column;
#pragma unroll
                for (int n = 0; n < D / 8; ++n) *reinterpret_cast<float2*>(to + n * 8) = make_float2(o[m][n][2 * h], o[m][n][2 * h + 1]);
                if (lane % 4 == 0) *reinterpret_cast<float2*>(own + BM * D + row * 2) = make_float2(top[m][h] * factor, sum[m][h]);
            }
        __threadfence();
        sync();
        if (thread == 0) last = arrive_last(reinterpret_cast<u32*>(p.counters) + 1 + first * p.kv_heads + head, parts);
        sync();
        if (!last) return;
        __threadfence();
        // First one thread a row writes the factor of each part to `factors`. Then all threads add up the elements of
        // the parts.
        for (u32 row = thread; row < BM; row += THREADS) {
            const float* const sums = group_at + BM * D + row * 2;
            float most = MINUS_INF, all = 0.f;
            for (u32 i = 0; i < parts; ++i) most = fmaxf(most, load_float2_shared(sums + i * stride).x);
            const float base = most == MINUS_INF ? 0.f : most;
            for (u32 i = 0; i < parts; ++i) {
                const float2 of = load_float2_shared(sums + i * stride);
                const float scale = exp2_fast(of.x - base);
                all += of.y * scale;
                factors[i * BM + row] = scale;
            }
            const u32 packed = work.q_begin + row, query = packed / group;
            const float worth = enter_sink(p, head * group + (packed - query * group), most, all), inverse = all > 0.f ? worth * (1.f / all) : 0.f;
            for (u32 i = 0; i < parts; ++i) factors[i * BM + row] *= inverse;
            if (packed < rows && p.lse != 0)
                store_float(p.lse + ((work.qo_start + query) * static_cast<u64>(p.q_heads) + head * group + (packed - query * group)) * 4,
                            all > 0.f ? (most + log2_fast(all)) * LN_2 : MINUS_INF);
        }
        sync();
        constexpr int FOURS = D / 4;
#pragma unroll 8
        for (u32 i = thread; i < BM * FOURS; i += THREADS) {
            const u32 row = i / FOURS, four = i % FOURS;
            float4 x = make_float4(0.f, 0.f, 0.f, 0.f);
            for (u32 j = 0; j < parts; ++j) {
                const float4 of = load_float4_shared(group_at + j * stride + row * D + four * 4);
                const float scale = factors[j * BM + row];
                x.x += of.x * scale, x.y += of.y * scale, x.z += of.z * scale, x.w += of.w * scale;
            }
            const u32 packed = work.q_begin + row, query = packed / group;
            if (packed < rows)
                store_uint2(p.out + (work.qo_start + query) * p.out_stride + (head * group + (packed - query * group)) * ROW + four * 8,
                            pack(T(), x.x, x.y), pack(T(), x.z, x.w));
        }
    }
};

// Scales of the tokens of two tiles of K and V. `Lasts` is a base class, not a field, and each class has one base at most. A cast
// to a first base does not move the pointer, so the compiler adds no test for a null pointer.
template <int BN, int LOOKS, class Lasts> struct TileScales : Lasts {
    float scales[2][2][BN];
    u64 scale_offsets[LOOKS][BN];  // of the tokens, for head 0
    u64 scale_head;  // offset of the item's head
    float factor;  // of the item's logits in base 2; 1 if they have a soft cap
    float capped;  // of the item's logits before the soft cap
};
template <int LOOKS, class Lasts> struct TileScales<0, LOOKS, Lasts> : Lasts {};

template <class T, int D, int MT, int WARPS, int BN> struct Extend {
    using Items = typename ItemsOf<T>::Type;
    static constexpr int THREADS = WARPS * 32;
    static constexpr int BM = 16 * MT * WARPS;  // query rows
    static constexpr int CHUNKS = D / 8;        // 16-byte pieces of a row
    static constexpr int ROW = D * 2;           // bytes
    static constexpr int TILE = BN * ROW;       // bytes of a K (or V) tile
    static constexpr int ROWS_PER_COPY = THREADS / CHUNKS;
    static constexpr int BYTES = BM * ROW + 4 * TILE;  // dynamic shared memory
    enum { FP8 = over_fp8(T()) };
    // Number of tiles for which shared memory holds the offsets of the tokens. Items of sequences over fp8 have space
    // for one: the other arrays take nearly all shared memory that a CTA may have on compute capability 8.6, 8.9 and
    // 12.0. One suffices, because a barrier separates the copies of a tile from the offsets of the next.
    enum { LOOKS = FP8 && !Items::SPANS ? 1 : 2 };

    struct Shared : TileScales<FP8 ? BN : 0, LOOKS, typename Items::Lasts> {
        u64 offsets[LOOKS][BN];  // of the tokens of a tile; bit 63: no token
        u64 head_offset;     // of the item's head within a slot
        uint2 masks[64];       // of the queries of a draft tree
        u8 queries[BM];      // the query of each row in a draft tree; rows past the last one repeat its query
        u32 tree;            // kv_len of a draft tree; 0 if the queries are not a draft tree
        u32 kv_end;          // of the item
        uint4 spans[WARPS];  // of each warp's rows: first and last position, first query's position, first packed row
        u32 row;             // of the item's sequence
        u32 item;
        u32 ticket;
        u32 last;
    };
    static constexpr u64 NONE = 1ull << 63;

    // Masks the tokens of a tile that a tree's queries do not see, 32 at a time, because the loop has few registers.
    static __device__ __forceinline__ void hide(float (&s)[MT][BN / 8][4], const Shared& shared, u32 tree, u32 begin) {
        u32 thread, masks = shared_address(shared.masks);
        asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
        const u32 lane = thread % 32, queries = shared_address(shared.queries) + thread / 32 * 16 * MT + lane / 4;
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int h = 0; h < 2; ++h)
#pragma unroll
                for (int n = 0; n < BN / 8; n += 4) {
                    u32 query;
                    uint2 mask;
                    asm volatile("ld.shared.u8 %0, [%1];" : "=r"(query) : "r"(queries + m * 16 + 8 * h));
                    asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(mask.x), "=r"(mask.y) : "r"(masks + query * 8));
                    const u32 seen = tree_sees(mask, tree, begin + n * 8) >> lane % 4 * 2;
#pragma unroll
                    for (int i = 0; i < 8; ++i)
                        if (!(seen >> (i / 2 * 8 + i % 2) & 1)) s[m][n + i / 2][2 * h + i % 2] = MINUS_INF;
                }
    }

    // Widens the bytes of a tile: K's first, then V's.
    template <class Params>
    static __device__ __forceinline__ void widen_tile(const Params& fp8, Shared& shared, u32 tile, u32 from, u32 to) {
        constexpr int PIECES = D / 16;
#pragma unroll 1
        for (u32 i = threadIdx.x; i < 2 * BN * PIECES; i += THREADS) {
            const u32 row = i / PIECES, token = row % BN, piece = i % PIECES * 2;
            // Scales of K are applied to the logits instead. Rounding scaled numbers of K here would add an error as
            // large as that of all products.
            const bool scaled = fp8.scales.by_token && row >= BN;
            const float scale = scaled ? shared.scales[tile % 2][1][token] : 1.f;
            u32 bytes[4], wide[8];
            asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(bytes[0]), "=r"(bytes[1]), "=r"(bytes[2]), "=r"(bytes[3]) : "r"(from + i * 16) : "memory");
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                if (scaled) widen_row<true>(typename RowsOf<T>::Type(), bytes[j], scale, wide[2 * j], wide[2 * j + 1]);
                else widen_row<false>(typename RowsOf<T>::Type(), bytes[j], 1.f, wide[2 * j], wide[2 * j + 1]);
            }
#pragma unroll
            for (int j = 0; j < 2; ++j) store_shared_uint4(to + row * ROW + ((piece + j) ^ token % 8) * 16, wide + 4 * j);
        }
    }

    static __device__ __forceinline__ void one(const AttendParams& p, u8* memory, Shared& shared, u32 item) {
        ExtendWork work = Items::load(p, item);
        u32 head = Items::head(p, item);
        const u32 thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
        const u32 group = p.group;
        const u32 q_tile = shared_address(memory), k_tile = q_tile + BM * ROW, v_tile = k_tile + (FP8 ? 1 : 2) * TILE;
        u32 kv_end = work.kv_end;
        auto is_tile = [&](u32 tile) { return work.kv_begin + tile * BN < kv_end; };

        // Look-ups: thread i < BN looks up token i of a tile, one tile before its offset is published.
        u32 row = work.row & ~TREE_ROW;
        auto look = [&](u32 tile) { return look_up(p, row, work.kv_begin + tile * BN + thread); };
        auto there = [&](u32 tile) { return thread < BN && work.kv_begin + tile * BN + thread < kv_end; };
        // The directory word is the same for many tiles and comes from the L1 cache.
        auto page = [&](u32 tile) { return there(tile) ? load_page(p, look(tile), load_directory(p, look(tile))) : 0; };
        auto publish = [&](u32 tile, u32 page, u64 head_offset) {
            if (thread < BN) shared.offsets[tile % LOOKS][thread] = there(tile) ? slot_offset(p, look(tile), page) + head_offset : NONE;
            if constexpr (FP8) {
                if (thread < BN && Items::fp8(p).scales.by_token)
                    shared.scale_offsets[tile % LOOKS][thread] = page * Items::fp8(p).scales.page_stride + look(tile).slot * 4;
            }
        };
        const bool tree = !Items::SPANS && work.row >= TREE_ROW;
        if (thread == 0) {
            shared.head_offset = head * p.head_stride, shared.row = row, shared.item = item;
            shared.tree = tree ? work.kv_len : 0, shared.kv_end = kv_end;
        }
        if (tree) {
            if (thread < work.extend_len) shared.masks[thread] = tree_mask(p, work.qo_start + thread);
            for (u32 r = thread; r < BM; r += THREADS) shared.queries[r] = min((work.q_begin + r) / group, work.extend_len - 1);
        }
        if constexpr (FP8)
            if (thread == 0) shared.scale_head = static_cast<u64>(head) * Items::fp8(p).scales.head_stride;
        const u32 piece = thread % CHUNKS;
        auto copy_tile = [&](u32 tile) {
            if constexpr (FP8) {
                constexpr int PIECES = D / 16, TOKENS = THREADS / PIECES;
                // Reads the thread's number again: the loop has no registers for addresses.
                u32 thread;
                asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
                const u32 to = q_tile + BM * ROW + 2 * TILE + tile % 2 * TILE + thread * 16;
#pragma unroll
                for (int i = 0; i < BN / TOKENS; ++i) {
                    const u64 offset = shared.offsets[tile % LOOKS][thread / PIECES + i * TOKENS];
                    const bool is = !(offset & NONE);
                    const u64 from = thread % PIECES * 16 + (is ? offset : 0);
                    copy16(to + i * THREADS * 16, p.k + from, is);
                    copy16(to + i * THREADS * 16 + TILE / 2, p.v + from, is);
                }
                if (Items::fp8(p).scales.by_token && thread < BN) {
                    const bool is = !(shared.offsets[tile % LOOKS][thread] & NONE);
                    const u64 at = (is ? shared.scale_offsets[tile % LOOKS][thread] : 0) + shared.scale_head;
                    const u32 scales = shared_address(&shared.scales[tile % 2][0][thread]);
                    copy4(scales, Items::fp8(p).scales.k + at, is), copy4(scales + BN * 4, Items::fp8(p).scales.v + at, is);
                }
                return;
            }
            const u32 buffer = tile % 2 * TILE;
#pragma unroll
            for (int i = 0; i < BN / ROWS_PER_COPY; ++i) {
                const u32 token = thread / CHUNKS + i * ROWS_PER_COPY;
                const u64 offset = shared.offsets[tile % LOOKS][token];
                const bool is = !(offset & NONE);
                const u64 from = piece * 16 + (is ? offset : 0);
                const u32 to = buffer + token * ROW + (piece ^ token % 8) * 16;
                copy16(k_tile + to, p.k + from, is);
                copy16(v_tile + to, p.v + from, is);
            }
        };

        const u32 page0 = page(0), page1 = page(1);
        u32 next_page = page(2);
        // Copies Q, with zeros for rows past the sequence's last one.
        const u32 rows = work.extend_len * group;
#pragma unroll 4
        for (int i = 0; i < BM / ROWS_PER_COPY; ++i) {
            const u32 row = thread / CHUNKS + i * ROWS_PER_COPY, packed = work.q_begin + row;
            const u32 query = packed / group;
            u32 token = work.qo_start + query;
            if constexpr (Items::SPANS) token = packed < rows ? Items::token(p, token) : 0;
            const u64 from = p.q + token * p.q_stride + (head * group + packed - query * group) * ROW + piece * 16;
            copy16(q_tile + row * ROW + (piece ^ row % 8) * 16, packed < rows ? from : p.q, packed < rows);
        }
        publish(0, page0, head * p.head_stride);
        if constexpr (LOOKS == 2) publish(1, page1, head * p.head_stride);
        __syncthreads();
        if (is_tile(0)) copy_tile(0);
        copy_commit();
        if constexpr (LOOKS == 1) {
            __syncthreads();
            publish(1, page1, head * p.head_stride);
        }

        if (p.negate_q != 0) {
            copy_wait<0>();
            __syncthreads();
            for (u32 at = q_tile + thread * 16; at < q_tile + BM * ROW; at += THREADS * 16) {
                u32 a, b, c, d;
                asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "r"(at));
                a ^= 0x80008000, b ^= 0x80008000, c ^= 0x80008000, d ^= 0x80008000;
                asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(at), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
            }
        }
        float factor = p.soft_cap > 0.f ? 1.f : Logits::make(p).scale;
        if constexpr (FP8 && Items::SPANS) {
            // Hides `scale` from the compiler, which would otherwise compute two numbers before the first item and keep them in
            // registers.
            float scale = p.scale;
            asm volatile("" : "+f"(scale));
            factor = finite_factor(Logits::make(p, scale).scale * head_scale(Items::fp8(p), Items::fp8(p).scales.k, head));
            if (thread == 0) shared.factor = p.soft_cap > 0.f ? 1.f : factor, shared.capped = factor;
        } else if constexpr (FP8) {
            const float scale = head_scale(Items::fp8(p), Items::fp8(p).scales.k, head);
            if (!(p.soft_cap > 0.f)) factor = finite_factor(factor * scale);
            if (thread == 0) shared.factor = factor, shared.capped = Logits::make(p).scale * scale;
        }
        // Positions of the warp's rows, in shared memory, because the loop has no registers for them.
        const u32 span = shared_address(&shared.spans[warp]);
        {
            const u32 position0 = work.kv_len - work.extend_len;  // there is no tile if kv_len is 0
            const u32 warp_row = work.q_begin + warp * 16 * MT;
            // In a tree, the last 64 tokens are always checked.
            const u32 first = tree ? min(position0 + warp_row / group, work.kv_len - min(work.kv_len, 65)) : position0 + warp_row / group;
            if constexpr (Items::SPANS) {
                // A span ends before its members' first queries, so the tile that contains this end needs masks too. The store
                // computes its address here, so that no register keeps it from item to item.
                const u32 rows[4] = {min(first, work.kv_end - 1), position0 + (warp_row + 16 * MT - 1) / group, position0, warp_row};
                if (lane == 0) store_shared_uint4(span, rows);
            } else if (lane == 0) {
                shared.spans[warp] = make_uint4(first, position0 + (warp_row + 16 * MT - 1) / group, position0, warp_row);
            }
            __syncwarp();
        }
        float o[MT][D / 8][4];
        float top[MT][2], sum[MT][2];
#pragma unroll
        for (int m = 0; m < MT; ++m) {
            top[m][0] = top[m][1] = MINUS_INF, sum[m][0] = sum[m][1] = 0.f;
#pragma unroll
            for (int n = 0; n < D / 8; ++n) o[m][n][0] = o[m][n][1] = o[m][n][2] = o[m][n][3] = 0.f;
        }

        for (u32 tile = 0; is_tile(tile); ++tile) {
            copy_wait<0>();
            __syncthreads();
            if (is_tile(tile + 1)) copy_tile(tile + 1);
            copy_commit();
            if constexpr (FP8) {
                widen_tile(Items::fp8(p), shared, tile, k_tile + 2 * TILE + tile % 2 * TILE, k_tile);
                __syncthreads();
                asm volatile("ld.shared.f32 %0, [%1];" : "=f"(factor) : "r"(shared_address(&shared.factor)));
            }
            // Publishes the offsets of tile + 2 over those of a tile whose copy has begun. Values for which the loop
            // has no registers come from shared memory.
            asm volatile("ld.shared.u32 %0, [%1];" : "=r"(kv_end) : "r"(shared_address(&shared.kv_end)));
            asm volatile("ld.shared.u32 %0, [%1];" : "=r"(row) : "r"(shared_address(&shared.row)));
            u64 head_offset;
            asm volatile("ld.shared.u64 %0, [%1];" : "=l"(head_offset) : "r"(shared_address(&shared.head_offset)));
            publish(tile + 2, next_page, head_offset);
            next_page = page(tile + 3);

            // ldmatrix addresses, computed for each tile, because the loop has no registers for them.
            u32 lane;
            asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
            const u32 column = lane % 4 * 2;
            const u32 q_lane = q_tile + (warp * 16 * MT + lane % 16) * ROW + ((lane / 16) ^ lane % 8) * 16;
            const u32 k_lane = (lane / 16 * 8 + lane % 8) * ROW + ((lane / 8 % 2) ^ lane % 8) * 16;
            const u32 v_lane = (lane / 8 % 2 * 8 + lane % 8) * ROW + ((lane / 16) ^ lane % 8) * 16;
            const u32 begin = work.kv_begin + tile * BN;
            u32 warp_first, warp_last;
            asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(warp_first), "=r"(warp_last) : "r"(span));
            if (begin > warp_last) continue;
            bool cut = begin + BN - 1 > warp_first || (p.window != 0 && begin + p.window <= warp_last);
            const u32 place = FP8 ? 0 : tile % 2 * TILE, kb = k_tile + place, vb = v_tile + place;
            float s[MT][BN / 8][4];
#pragma unroll
            for (int m = 0; m < MT; ++m)
#pragma unroll
                for (int n = 0; n < BN / 8; ++n) s[m][n][0] = s[m][n][1] = s[m][n][2] = s[m][n][3] = 0.f;
#pragma unroll(FP8 ? 2 : 4)
            for (int k = 0; k < D / 16; ++k) {
                u32 q[MT][4];
#pragma unroll
                for (int m = 0; m < MT; ++m) load_matrix(q[m], (q_lane + m * 16 * ROW) ^ (k * 32));
#pragma unroll
                for (int n = 0; n < BN / 16; ++n) {
                    u32 b[4];
                    load_matrix(b, kb + n * 16 * ROW + (k_lane ^ (k * 32)));
#pragma unroll
                    for (int m = 0; m < MT; ++m) mma(T(), s[m][2 * n], q[m], b[0], b[1]), mma(T(), s[m][2 * n + 1], q[m], b[2], b[3]);
                }
            }
            if constexpr (FP8) {
                if (Items::fp8(p).scales.by_token) {
                    const u32 scales = shared_address(shared.scales[tile % 2][0]) + column * 4;
#pragma unroll
                    for (int n = 0; n < BN / 8; ++n) {
                        float even, odd;
                        asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];" : "=f"(even), "=f"(odd) : "r"(scales + n * 32));
#pragma unroll
                        for (int m = 0; m < MT; ++m) s[m][n][0] *= even, s[m][n][1] *= odd, s[m][n][2] *= even, s[m][n][3] *= odd;
                    }
                }
            }
            if (p.soft_cap > 0.f) {
                Logits logits = Logits::make(p);
                if constexpr (FP8) asm volatile("ld.shared.f32 %0, [%1];" : "=f"(logits.scale) : "r"(shared_address(&shared.capped)));
#pragma unroll
                for (int m = 0; m < MT; ++m)
#pragma unroll
                    for (int i = 0; i < BN / 2; ++i) s[m][i / 4][i % 4] = logits.capped(s[m][i / 4][i % 4]);
            }
            if (cut) {
                u32 position0, warp_row;
                asm volatile("ld.shared.v2.u32 {%0,%1}, [%2 + 8];" : "=r"(position0), "=r"(warp_row) : "r"(span));
                u32 tree;
                if constexpr (!Items::SPANS) asm volatile("ld.shared.u32 %0, [%1];" : "=r"(tree) : "r"(shared_address(&shared.tree)));
                if constexpr (Items::SPANS) {
                    u32 end;
                    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(end) : "r"(shared_address(&shared.kv_end)));
#pragma unroll
                    for (int i = 0; i < 2 * MT; ++i) {
                        const u32 query = position0 + (warp_row + lane / 4 + 8 * i) / group;
                        const int to = min(query + 1, end) - begin - column;
#pragma unroll
                        for (int n = 0; n < BN / 4; ++n)
                            if (n / 2 * 8 + n % 2 >= to) s[i / 2][n / 2][i % 2 * 2 + n % 2] = MINUS_INF;
                    }
                } else if (tree != 0) {
                    hide(s, shared, tree, begin);
                } else
#pragma unroll
                for (int m = 0; m < MT; ++m) {
                    const u32 low = position0 + (warp_row + m * 16 + lane / 4) / group, high = position0 + (warp_row + m * 16 + lane / 4 + 8) / group;
#pragma unroll
                    for (int i = 0; i < BN / 2; ++i) {
                        const u32 token = begin + i / 4 * 8 + column + i % 2, query = i % 4 < 2 ? low : high;
                        if (token > query || (p.window != 0 && token + p.window <= query)) s[m][i / 4][i % 4] = MINUS_INF;
                    }
                }
            }
            u32 weights[MT][BN / 8][2];
#pragma unroll
            for (int m = 0; m < MT; ++m) {
                float above[2];
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    float most = top[m][h];
#pragma unroll
                    for (int n = 0; n < BN / 8; ++n) most = fmaxf(most, fmaxf(s[m][n][2 * h], s[m][n][2 * h + 1]));
                    most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
                    above[h] = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
                }
                if (__any_sync(~0u, above[0] > top[m][0] || above[1] > top[m][1])) {
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        const float scale = above[h] == MINUS_INF ? 1.f : exp2_fast((top[m][h] - above[h]) * factor);
                        sum[m][h] *= scale, top[m][h] = above[h];
#pragma unroll
                        for (int n = 0; n < D / 8; ++n) o[m][n][2 * h] *= scale, o[m][n][2 * h + 1] *= scale;
                    }
                }
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    // A row that has seen no token must not subtract minus infinity from itself.
                    const float less = top[m][h] == MINUS_INF ? 0.f : -top[m][h] * factor;
#pragma unroll
                    for (int n = 0; n < BN / 8; ++n) {
                        const float x = exp2_fast(fmaf(s[m][n][2 * h], factor, less)), y = exp2_fast(fmaf(s[m][n][2 * h + 1], factor, less));
                        sum[m][h] += x + y;
                        weights[m][n][h] = pack(T(), x, y);
                    }
                }
            }
#pragma unroll
            for (int k = 0; k < BN / 16; ++k) {
#pragma unroll
                for (int n = 0; n < D / 16; ++n) {
                    u32 b[4];
                    load_matrix_transposed(b, vb + k * 16 * ROW + (v_lane ^ (n * 32)));
#pragma unroll
                    for (int m = 0; m < MT; ++m) {
                        const u32 a[4] = {weights[m][2 * k][0], weights[m][2 * k][1], weights[m][2 * k + 1][0], weights[m][2 * k + 1][1]};
                        mma(T(), o[m][2 * n], a, b[0], b[1]), mma(T(), o[m][2 * n + 1], a, b[2], b[3]);
                    }
                }
            }
        }
        copy_wait<0>();
        // Loaded again, because the loop has no register for it.
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(item) : "r"(shared_address(&shared.item)));
        work = Items::load(p, item), head = Items::head(p, item);
        if constexpr (FP8) {
            const float scale = head_scale(Items::fp8(p), Items::fp8(p).scales.v, head);
#pragma unroll
            for (int i = 0; i < MT * (D / 8) * 4; ++i) o[i / 4 / (D / 8)][i / 4 % (D / 8)][i % 4] *= scale;
        }

        if constexpr (Items::SPANS) {
            Finish<T, D, MT, WARPS>::add_up(sum);
            Items::part(p, shared, work, head, factor, o, top, sum);
        } else {
            Finish<T, D, MT, WARPS>::run(p, reinterpret_cast<float*>(memory + BM * ROW), shared.last, work, head, factor, o, top, sum);
        }
    }
};

template <class T, int D, int MT, int WARPS, int BN> DEVICE void attend_extend(const AttendParams& p) {
    extern __shared__ __align__(1024) u8 memory[];
    __shared__ typename Extend<T, D, MT, WARPS, BN>::Shared shared;
    run_items<Extend<T, D, MT, WARPS, BN>>(p, memory, shared);
}
