// The template argument `Copies` of attend_latent_sm90a.cuh for latent rows of fp8, in items of many query rows. A
// warpgroup loads bytes into registers, multiplies them by their tokens' scales and writes them to shared memory as T.
// The products then use them like rows of T. The additional rounding to T is much finer than the rounding to fp8.
//
// The warpgroup copies 32 rows at a time, each warp 8 of them. A warp prefetches its rows into the L2 cache one tile
// ahead; its registers hold half of their columns. In a pair, each CTA widens one half of a tile's rows, and the TMA
// copies this half to the other CTA. So each byte is read and widened once for all 128 query rows. A single CTA widens
// both halves, one after the other.
#pragma once
#include "attend_latent_sm90a.cuh"

template <class T> struct LatentBytes {
    using E = LatentHopper<T>;
    using Few = LatentFew<T, 16, true>;
    using Found = typename Few::Found;
    static constexpr u32 ROWS = 32, MINE = 8;  // rows that a CTA, and a warp, copies at a time
    static constexpr int REGISTERS = 88;

    // Returns the number of arrivals for half of a tile's columns. All threads arrive once for each 32 rows that their
    // CTA widens: once in a pair, twice in a single CTA.
    static __device__ __forceinline__ u32 fillers(u32 ctas) { return E::GROUP * 2 / ctas; }

    // A lane's share of its warp's MINE rows: of every second row, 16 bytes in half of V's columns; of every fourth row, 16 bytes of
    // the rotary part; the scale of row lane % 8.
    struct Bytes {
        uint4 half[MINE / 2], rope[MINE / 4];
        float scale;
    };

    static __device__ __forceinline__ u64 rope_at(const LayerRope& rope, u32 page, u32 slot) {
        return rope.at + page * rope.page_stride + slot * static_cast<u64>(rope.slot_stride);
    }
    // Prefetches half of the V columns of the lane's row; the lower 16 lanes also prefetch the rotary part.
    static __device__ __forceinline__ void ask(const AttendLatentFp8Params& all, const Found& tile, u32 lane) {
        if (tile.left == 0) return;
        const u64 from = all.attend.k + Few::offset(all.attend, tile) + lane / 16 * 256;
        prefetch(from), prefetch(from + 128);
        if (lane < 16) prefetch(rope_at(all.rope, tile.page, tile.slot));
    }
    // Loads half of the columns, and the scales, of the rows that lanes `from` to `from + 7` have looked up. `half` is
    // 0 or 1; the warp stores this half first.
    static __device__ __forceinline__ void load_first(const AttendLatentFp8Params& all, Bytes& bytes, const Found& tile, u32 from, u32 half, u32 lane) {
        load_half(all, bytes, tile, from, half, lane);
        const u32 row = from + lane % 8, page = __shfl_sync(~0u, tile.page, row), slot = __shfl_sync(~0u, tile.slot, row);
        bytes.scale = __uint_as_float(load_written_u32(all.scales.k + page * all.scales.page_stride + slot * 4));
    }
    // Loads the other half, and the rotary part.
    static __device__ __forceinline__ void load_second(const AttendLatentFp8Params& all, Bytes& bytes, const Found& tile, u32 from, u32 half, u32 lane) {
        load_half(all, bytes, tile, from, half, lane);
#pragma unroll
        for (u32 i = 0; i < MINE / 4; ++i) {
            const u32 row = from + i * 4 + lane / 8, page = __shfl_sync(~0u, tile.page, row), slot = __shfl_sync(~0u, tile.slot, row);
            bytes.rope[i] = Few::load_once(rope_at(all.rope, page, slot) + lane % 8 * 16);
        }
    }
    static __device__ __forceinline__ void load_half(const AttendLatentFp8Params& all, Bytes& bytes, const Found& tile, u32 from, u32 half, u32 lane) {
        const AttendParams& p = all.attend;
#pragma unroll
        for (u32 i = 0; i < MINE / 2; ++i) {
            const u32 row = from + i * 2 + lane / 16, page = __shfl_sync(~0u, tile.page, row), slot = __shfl_sync(~0u, tile.slot, row);
            bytes.half[i] = Few::load_once(p.k + page * p.page_stride + slot * p.slot_stride + half * (E::RANK / 2) + lane % 16 * 16);
        }
    }

    static __device__ __forceinline__ void store_eight(u32 to, u32 low, u32 high, float scale) {
        uint4 wide;
        widen_row<true>(T(), low, scale, wide.x, wide.y), widen_row<true>(T(), high, scale, wide.z, wide.w);
        Few::store(to, wide);
    }
    // Stores 4 blocks of columns. `rows` is the address of this warp's rows in the first block. All addresses derive
    // from one address by XOR with constants and by constant offsets, which saves registers.
    static __device__ __forceinline__ void store_half(u32 rows, const Bytes& bytes, u32 lane) {
        // Each lane writes two groups of eight numbers. Half of the lanes write the second group first, so that eight
        // lanes at a time use all banks.
        const u32 second = lane / 4 % 2, at = rows + lane % 16 / 4 * E::BLOCK + Few::within(lane / 16, lane % 4 * 2 + second);
#pragma unroll
        for (u32 i = 0; i < MINE / 2; ++i) {
            const uint4& b = bytes.half[i];
            const float scale = __shfl_sync(~0u, bytes.scale, i * 2 + lane / 16);
            store_eight((at ^ i * 32) + i * 256, second ? b.z : b.x, second ? b.w : b.y, scale);
            store_eight((at ^ i * 32 ^ 16) + i * 256, second ? b.x : b.z, second ? b.y : b.w, scale);
        }
    }
    static __device__ __forceinline__ void store_rope(u32 rows, const Bytes& bytes, u32 lane) {
        const u32 at = rows + Few::within(lane / 8, lane % 8);
#pragma unroll
        for (u32 i = 0; i < MINE / 4; ++i) Few::store((at ^ i * 64) + i * 512, Few::rope_of(bytes.rope[i]));
    }

    // Copies rows from this CTA's shared memory, where this warp has written them, to the other CTA, and signals that CTA's barrier.
    // Copies half of the columns, and the rotary part if `with_rope`.
    static __device__ __forceinline__ void share(u32 blocks, u32 rope, bool with_rope, u32 full, u32 lane) {
        __syncwarp();
        if (lane >= E::HALF + with_rope) return;
        const u32 rows = lane < E::HALF ? blocks + lane * E::BLOCK : rope, other = cluster_rank() ^ 1;
        copy_there(address_of(rows, other), rows, MINE * 128, address_of(full, other));
    }

    // Returns the thread's index, read again at each use. Otherwise the compiler would keep values derived from it in registers, which
    // the bytes need.
    static __device__ __forceinline__ u32 thread() {
        u32 at;
        asm volatile("mov.u32 %0, %%tid.x;" : "=r"(at));
        return at;
    }

    static __device__ __forceinline__ void copy(const AttendLatentFp8Params& all, u32 memory, typename E::Shared& shared, u32 index, u32 end, u32 ctas) {
        const AttendParams& p = all.attend;
        const u32 warp = __shfl_sync(~0u, threadIdx.x / 32 % 4, 0), lane = threadIdx.x % 32, rank = ctas == 2 ? cluster_rank() : 0;
        // A CTA of a pair looks up only its half of a tile. In a single CTA, lanes 0 to 7 look up rows of the first
        // half, and lanes 8 to 15 rows of the second. The upper 16 lanes look up the same rows.
        const u32 mine = (ctas == 2 ? rank : lane / 8 % 2) * ROWS + warp * MINE + lane % 8;
        typename Few::Walk walk{p, index, end, 0, {}};
        walk.item();
        Found tile = Few::look(walk, mine, E::BN);
        // The prefetch may precede the wait, because it loads only into the L2 cache, through which the previous launch writes.
        ask(all, tile, lane);
        wait_for_previous();
        if (tile.left == 0) return;
        Bytes bytes;
        load_first(all, bytes, tile, 0, 0, lane);
        Found next = Few::look(walk, mine, E::BN);
        u32 turns = 0;
        for (u32 n = 0;; ++n) {
            const u32 place = n % 2;
            ask(all, next, thread() % 32);
#pragma unroll 1
            for (u32 i = 0; i < 3 - ctas; ++i) {
                const u32 rows = memory + E::K + place * E::TILE + ((rank + i) * ROWS + warp * MINE) * 128, rope = rows + (E::BLOCKS - 1) * E::BLOCK;
#pragma unroll
                for (u32 part = 0; part < 2; ++part) {
                    const u32 half = place ^ part, full = shared_address(&shared.full[place][half]), blocks = rows + half * E::HALF * E::BLOCK;
                    barrier_wait(shared_address(&shared.empty[place][half]), n / 2 % 2 ^ 1);
                    store_half(blocks, bytes, thread() % 32);
                    if (part == 1) store_rope(rope, bytes, thread() % 32);
                    fence_async();
                    if (ctas == 2 && threadIdx.x % E::GROUP == 0) barrier_arrive_expecting(full, ROWS * (E::RANK + part * E::ROPE * 2));
                    else barrier_arrive(full);
                    if (ctas == 2) share(blocks, rope, part == 1, full, thread() % 32);
                    if (part == 0) load_second(all, bytes, tile, i * MINE, half ^ 1, thread() % 32);
                }
                if (i + ctas < 2) load_first(all, bytes, tile, MINE, place, thread() % 32);
            }
            if (tile.first != 0) {
                barrier_wait(shared_address(&shared.q_empty), turns++ % 2 ^ 1);
                E::copy_queries(p, memory, tile.first - 1, ctas, thread() / 32 % 4, thread() % 32);
                barrier_arrive_copied(shared_address(&shared.q_full));
            }
            tile = next;
            if (tile.left == 0) {
                // Each warp waits for both halves of the columns, because it writes both.
                E::wait_emptied(shared, n + 1, 0), E::wait_emptied(shared, n + 1, 1);
                return;
            }
            load_first(all, bytes, tile, 0, place ^ 1, thread() % 32);
            next = Few::look(walk, mine, E::BN);
            if (next.first != 0) E::ask_queries(p, next.first - 1, ctas, thread() / 32 % 4, thread() % 32);
        }
    }
};
