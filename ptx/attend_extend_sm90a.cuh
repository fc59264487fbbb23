// Extend attention for Hopper: the items of attend_extend.cuh, on warpgroup matrix products.
//
// Two warpgroups of 64 query rows each share the K and V tiles, which cp.async gathers into the 128-byte swizzled layout that
// wgmma reads. While a tile's weights are made, the tile before is multiplied with V: so K runs a tile ahead of V.
#pragma once
#include "attend_extend.cuh"

// Of a tile in shared memory as [.., rows, 64] with swizzled rows of 128 bytes; lead: bytes between blocks of 64 columns.
DEVICE u64 matrix_descriptor(u32 at, u32 lead) {
    return static_cast<u64>(at >> 4 & 0x3fff) | static_cast<u64>(lead >> 4) << 16 | static_cast<u64>(1024 >> 4) << 32 | 1ull << 62;
}
DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> DEVICE void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }
DEVICE void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

#define WG_OUT \
    "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31," \
    "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61," \
    "%62,%63}"
#define WG_FOUR(c) "+f"((c)[0]), "+f"((c)[1]), "+f"((c)[2]), "+f"((c)[3])
#define WG_REGISTERS(c) \
    WG_FOUR(c[0]), WG_FOUR(c[1]), WG_FOUR(c[2]), WG_FOUR(c[3]), WG_FOUR(c[4]), WG_FOUR(c[5]), WG_FOUR(c[6]), WG_FOUR(c[7]), \
        WG_FOUR(c[8]), WG_FOUR(c[9]), WG_FOUR(c[10]), WG_FOUR(c[11]), WG_FOUR(c[12]), WG_FOUR(c[13]), WG_FOUR(c[14]), WG_FOUR(c[15])
// c[64, 128] = a[64, 16] * b[128, 16]^T, or += where `add`; both in shared memory.
#define WG_SCORES(type, name) \
    DEVICE void wgmma_scores(type, float (&c)[16][4], u64 a, u64 b, int add) { \
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %66, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32." name "." name " " WG_OUT \
                     ", %64, %65, p, 1, 1, 0, 0; }" : WG_REGISTERS(c) : "l"(a), "l"(b), "r"(add)); \
    }
// c[64, 128] += a[64, 16] * b[16, 128]; a in registers.
#define WG_OUTPUT(type, name) \
    DEVICE void wgmma_output(type, float (&c)[16][4], const u32 (&a)[4], u64 b) { \
        asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." name "." name " " WG_OUT ", {%64,%65,%66,%67}, %68, 1, 1, 1, 1;" \
                     : WG_REGISTERS(c) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)); \
    }
WG_SCORES(Bf16, "bf16")
WG_SCORES(F16, "f16")
WG_OUTPUT(Bf16, "bf16")
WG_OUTPUT(F16, "f16")

// head_dim 128; tiles of 128 query rows and 128 tokens.
template <class T> struct ExtendHopper {
    static constexpr int D = 128, BM = 128, BN = 128, WARPS = 8, THREADS = 256;
    static constexpr int ROW = D * 2;
    static constexpr int TILE = BN * ROW, HALF = TILE / 2;  // bytes of a tile, of its 64 columns
    static constexpr int BYTES = 5 * TILE;
    static constexpr u64 NONE = 1ull << 63;

    struct Shared {
        u64 offsets[4][BN];  // of the tokens of a tile; bit 63: not there
        u32 ticket;
        u32 last;
    };

    // Where 16 bytes of a row stand in a tile.
    static __device__ __forceinline__ u32 place(u32 row, u32 piece) { return piece / 8 * HALF + row * 128 + (piece % 8 ^ row % 8) * 16; }

    static __device__ __forceinline__ void one(const AttendParams& p, u8* memory, Shared& shared, u32 item) {
        ExtendWork work = load_work(p, item);
        u32 head = item % p.kv_heads;
        const u32 thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
        const u32 group = p.group;
        const u32 q_tile = shared_address(memory), k_tile = q_tile + TILE, v_tile = k_tile + 2 * TILE;
        const u32 tiles = (work.kv_end - work.kv_begin + BN - 1) / BN;

        // Look-ups: thread i < BN looks for token i of a tile, a tile before its offset is published.
        auto look = [&](u32 tile) { return look_up(p, work.row, work.kv_begin + tile * BN + thread); };
        auto there = [&](u32 tile) { return thread < BN && work.kv_begin + tile * BN + thread < work.kv_end; };
        auto page = [&](u32 tile) { return there(tile) ? load_page(p, look(tile), load_directory(p, look(tile))) : 0; };
        auto publish = [&](u32 tile, u32 page) {
            if (thread < BN) shared.offsets[tile % 4][thread] = there(tile) ? slot_offset(p, look(tile), page) : NONE;
        };
        const u32 piece = thread % 16, first = thread / 16;
        const u64 in_slot = head * p.head_stride + piece * 16;
        const u32 mine = place(first, piece);
        auto copy_tile = [&](u32 to, u64 base, u32 tile) {
#pragma unroll
            for (int i = 0; i < BN / 16; ++i) {
                const u64 offset = shared.offsets[tile % 4][first + i * 16];
                const bool is = !(offset & NONE);
                copy16(to + mine + i * 16 * 128, base + in_slot + (is ? offset : 0), is);
            }
        };

        const u32 page0 = page(0), page1 = page(1);
        u32 next_page = page(2);
        const u32 rows = work.extend_len * group;
#pragma unroll 4
        for (int i = 0; i < BM / 16; ++i) {
            const u32 row = first + i * 16, packed = work.q_begin + row, query = packed / group;
            const u64 from = p.q + (work.qo_start + query) * p.q_stride + (head * group + packed - query * group) * ROW + piece * 16;
            copy16(q_tile + mine + i * 16 * 128, packed < rows ? from : p.q, packed < rows);
        }
        publish(0, page0), publish(1, page1);
        __syncthreads();
        if (tiles > 0) copy_tile(k_tile, p.k, 0);
        copy_commit();
        if (p.turn_q != 0) {
            copy_wait<0>();
            __syncthreads();
            for (u32 at = q_tile + thread * 16; at < q_tile + TILE; at += THREADS * 16) {
                u32 a, b, c, d;
                asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "r"(at));
                a ^= 0x80008000, b ^= 0x80008000, c ^= 0x80008000, d ^= 0x80008000;
                asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(at), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
            }
        }

        const Logits logits = Logits::make(p);
        const bool capped = logits.cap > 0.f;
        const float factor = capped ? 1.f : logits.scale;
        const u32 position0 = work.kv_len - work.extend_len;  // no tile where kv_len is 0
        const u32 warp_row = work.q_begin + warp * 16;
        const u32 warp_first = position0 + warp_row / group, warp_last = position0 + (warp_row + 15) / group;
        const u32 column = lane % 4 * 2;
        const u64 q_matrix = matrix_descriptor(q_tile + thread / 128 * 64 * 128, 16);

        float o[1][16][4], s[16][4];
        u32 weights[BN / 16][4];
        float top[1][2] = {{MINUS_INF, MINUS_INF}}, sum[1][2] = {{0.f, 0.f}};
#pragma unroll
        for (int n = 0; n < 16; ++n) o[0][n][0] = o[0][n][1] = o[0][n][2] = o[0][n][3] = 0.f;

        float scale[2];
        // Waits for what tile needs, and sets the copies of the next going.
        auto turn = [&](u32 tile) {
            copy_wait<0>();
            fence_async();
            __syncthreads();
            if (tile + 1 < tiles) copy_tile(k_tile + (tile + 1) % 2 * TILE, p.k, tile + 1);
            if (tile < tiles) copy_tile(v_tile + tile % 2 * TILE, p.v, tile);
            copy_commit();
            publish(tile + 2, next_page);
            next_page = page(tile + 3);
        };
        auto scores = [&](u32 tile) {
            const u64 k_matrix = matrix_descriptor(k_tile + tile % 2 * TILE, 16);
#pragma unroll
            for (int k = 0; k < D / 16; ++k) {
                const u32 step = (k / 4 * HALF + k % 4 * 32) >> 4;
                wgmma_scores(T(), s, q_matrix + step, k_matrix + step, k > 0);
            }
            wgmma_commit();
        };
        auto outputs = [&](u32 tile) {
            const u64 v_matrix = matrix_descriptor(v_tile + tile % 2 * TILE, HALF);
#pragma unroll
            for (int k = 0; k < BN / 16; ++k) wgmma_output(T(), o[0], weights[k], v_matrix + (k * 2048 >> 4));
            wgmma_commit();
        };
        // Turns a tile's scores into weights, and finds what sums so far are to be scaled by.
        auto soften = [&](u32 tile) {
            const u32 begin = work.kv_begin + tile * BN;
            if (capped) {
#pragma unroll
                for (int i = 0; i < 64; ++i) s[i / 4][i % 4] = logits.capped(s[i / 4][i % 4]);
            }
            if (begin + BN - 1 > warp_first || begin + BN > work.kv_end || (p.window != 0 && begin + p.window <= warp_last)) {
                const u32 low = position0 + (warp_row + lane / 4) / group, high = position0 + (warp_row + lane / 4 + 8) / group;
#pragma unroll
                for (int i = 0; i < 64; ++i) {
                    const u32 token = begin + i / 4 * 8 + column + i % 2, query = i % 4 < 2 ? low : high;
                    if (token > query || token >= work.kv_end || (p.window != 0 && token + p.window <= query)) s[i / 4][i % 4] = MINUS_INF;
                }
            }
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float above = top[0][h];
#pragma unroll
                for (int n = 0; n < 16; ++n) above = fmaxf(above, fmaxf(s[n][2 * h], s[n][2 * h + 1]));
                above = fmaxf(above, __shfl_xor_sync(~0u, above, 1));
                above = fmaxf(above, __shfl_xor_sync(~0u, above, 2));
                // A row that has seen nothing yet must not subtract minus infinity from itself.
                const float less = above == MINUS_INF ? 0.f : -above * factor;
                scale[h] = above == MINUS_INF ? 1.f : exp2_fast(fmaf(top[0][h], factor, less));
                top[0][h] = above;
                float more = 0.f;
#pragma unroll
                for (int n = 0; n < 16; ++n) {
                    s[n][2 * h] = exp2_fast(fmaf(s[n][2 * h], factor, less)), s[n][2 * h + 1] = exp2_fast(fmaf(s[n][2 * h + 1], factor, less));
                    more += s[n][2 * h] + s[n][2 * h + 1];
                }
                sum[0][h] = sum[0][h] * scale[h] + more;
            }
        };
        auto round = [&]() {
#pragma unroll
            for (int k = 0; k < BN / 16; ++k) {
                weights[k][0] = pack(T(), s[2 * k][0], s[2 * k][1]), weights[k][1] = pack(T(), s[2 * k][2], s[2 * k][3]);
                weights[k][2] = pack(T(), s[2 * k + 1][0], s[2 * k + 1][1]), weights[k][3] = pack(T(), s[2 * k + 1][2], s[2 * k + 1][3]);
            }
        };

        if (tiles > 0) {
            turn(0);
            wgmma_fence();
            scores(0);
            wgmma_wait<0>();
            soften(0);
            round();
            for (u32 tile = 1; tile < tiles; ++tile) {
                turn(tile);
                wgmma_fence();
                scores(tile);
                outputs(tile - 1);
                wgmma_wait<1>();
                soften(tile);
                wgmma_wait<0>();
#pragma unroll
                for (int n = 0; n < 16; ++n) o[0][n][0] *= scale[0], o[0][n][1] *= scale[0], o[0][n][2] *= scale[1], o[0][n][3] *= scale[1];
                round();
            }
            turn(tiles);
            wgmma_fence();
            outputs(tiles - 1);
            wgmma_wait<0>();
        }
        copy_wait<0>();
        work = load_work(p, item), head = item % p.kv_heads;
        Finish<T, D, 1, WARPS>::run(p, reinterpret_cast<float*>(memory + TILE), shared.last, work, head, factor, o, top, sum);
    }
};

template <class T> DEVICE void attend_extend_hopper(const AttendParams& p) {
    extern __shared__ __align__(1024) u8 memory[];
    __shared__ typename ExtendHopper<T>::Shared shared;
    run_items<ExtendHopper<T>>(p, memory, shared);
}
