// select_top: of each row with lists and each kv head the `top` positions with the greatest scores, ascending: the own one always, of equals
// the later. Those of other rows name nothing.
// Twin:    src/backend/cpu/labels.rs list      (the specification)
// Params:  SelectParams, 272 bytes             (ptx/params.cuh, src/backend/cuda/params.rs); q, tables, labels, listed, counts unused
// Shapes:  keys as starts says; positions u32 [batch, kv_heads, top]
// Grid:    x = batch * kv_heads, block 1024
// Needs:   keys of every position that such a row sees but its own; a row past key_chunks gets its own alone
// Build:   ptx/build.py
#include "select.cuh"

#define WARPS 32

// The least key of the best `wanted` of the keys from first to end, by digits of 8 bits from the highest on; and how many keys that are
// equal to it are too many.
struct Least {
    u32 key, skipped;
};
DEVICE Least find_least(u64 keys, u32 first, u32 end, u32 wanted, u32* histogram, u32* sums, u32* found) {
    const u32 thread = threadIdx.x, lane = thread % 32;
    u32 known = 0, mask = 0, equal = 0;
    for (int shift = 24; shift >= 0; shift -= 8) {
        // A column for each lane, so that lanes of a warp never wait for one another.
        for (u32 i = thread; i < 256 * 32; i += 1024) histogram[i] = 0;
        __syncthreads();
        for (u32 at = first + thread; at < end; at += 1024) {
            const u32 key = load_written_u32(keys + 4ull * at);
            if ((key & mask) == known) atomicAdd(&histogram[(key >> shift & 255) * 32 + lane], 1u);
        }
        __syncthreads();
        u32 sum = 0;
#pragma unroll
        for (u32 i = 0; i < 8; ++i) sum += histogram[thread / 4 * 32 + (thread % 4 + i * 4)];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        if (thread % 4 == 0) sums[thread / 4] = sum;
        __syncthreads();
        // Lane i has the digits 255 - 8 * i down to 248 - 8 * i.
        if (thread < 32) {
            u32 mine = 0;
#pragma unroll
            for (u32 i = 0; i < 8; ++i) mine += sums[255 - lane * 8 - i];
            u32 above = mine;
#pragma unroll
            for (u32 i = 1; i < 32; i *= 2) {
                const u32 other = __shfl_up_sync(~0u, above, i);
                if (lane >= i) above += other;
            }
            above -= mine;
            if (above < wanted && above + mine >= wanted) {
                u32 digit = 255 - lane * 8;
                while (above + sums[digit] < wanted) above += sums[digit], --digit;
                found[0] = digit, found[1] = wanted - above, found[2] = sums[digit];
            }
        }
        __syncthreads();
        known |= found[0] << shift, mask |= 255u << shift;
        wanted = found[1], equal = found[2];
        __syncthreads();
    }
    return {known, equal - wanted};
}

extern "C" __global__ void __launch_bounds__(1024) select_top(const __grid_constant__ SelectParams params) {
    __shared__ u32 histogram[256 * 32], sums[256], found[3], greater[WARPS], equal[WARPS];
    const AttendParams& p = params.attend;
    const u32 thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    const u32 index = blockIdx.x / p.kv_heads, head = blockIdx.x % p.kv_heads;
    const Seeing row = seeing(p, index);
    const Chunks chunks = chunks_of(params, index);
    wait_for_previous();
    const u64 list = params.positions + 4ull * blockIdx.x * params.top;
    u32 chosen = 0;
    if (row.lists) {
        const u32 first = chunks.end <= params.key_chunks ? row.first : row.own, end = row.own;
        const u32 others = params.top - 1;
        const u64 keys = keys_of(params, chunks, head);
        const bool all = end - first <= others;
        const Least least = all || others == 0 ? Least{~0u, ~0u} : find_least(keys, first, end, others, histogram, sums, found);
        // Warps have pieces of the positions, in order, and find where theirs go by counting first.
        const u32 piece = ((end - first + 1023) / 1024) * 32, from = first + min(warp * piece, end - first), to = min(end, from + piece);
        u32 more = 0, same = 0;
        for (u32 at = from + lane; at < to && !all; at += 32) {
            const u32 key = load_written_u32(keys + 4ull * at);
            more += key > least.key, same += key == least.key;
        }
#pragma unroll
        for (u32 i = 16; i > 0; i /= 2) more += __shfl_xor_sync(~0u, more, i), same += __shfl_xor_sync(~0u, same, i);
        if (lane == 0) greater[warp] = all ? to - from : more, equal[warp] = same;
        __syncthreads();
        more = same = 0;
        u32 all_more = 0, all_same = 0;
        for (u32 i = 0; i < WARPS; ++i) {
            if (i == warp) more = all_more, same = all_same;
            all_more += greater[i], all_same += equal[i];
        }
        for (u32 begin = from; begin < to; begin += 32) {
            const u32 at = begin + lane;
            const u32 key = at < to && !all ? load_written_u32(keys + 4ull * at) : 0;
            const bool is_more = at < to && (all || key > least.key), is_same = at < to && !all && key == least.key;
            const u32 mores = __ballot_sync(~0u, is_more), sames = __ballot_sync(~0u, is_same);
            const u32 place = more + before(mores, lane), rank = same + before(sames, lane);
            const u32 taken = rank > least.skipped ? rank - least.skipped : 0;  // of the equals before
            if (is_more || (is_same && rank >= least.skipped)) store_u32(list + 4ull * (place + taken), at);
            more += __popc(mores), same += __popc(sames);
        }
        chosen = all ? end - first : others;
        if (thread == 0) store_u32(list + 4ull * chosen, row.own);
        ++chosen;
    }
    for (u32 i = chosen + thread; i < params.top; i += 1024) store_u32(list + 4ull * i, NO_POSITION);
}
