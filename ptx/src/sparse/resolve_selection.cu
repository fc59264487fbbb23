// resolve_selection: writes, for each list, the slots of the positions that the list's row sees, in order, and the
// number of these slots. It skips rows without lists.
// Twin:    src/backend/cpu/unit.rs listed      (the specification)
// Params:  SelectParams (src/common, src/backend/cuda/kernels/params/sparse.rs); q, labels, keys, starts unused
// Shapes:  positions, listed u32 [batch, kv_heads, top]; counts u32 [batch, kv_heads]
// Grid:    x = batch * kv_heads
// Needs:   fewer than 2^32 - 1 slots
// Build:   ptx/build.py
#include "select.cuh"

#define WARPS 8

extern "C" __global__ void __launch_bounds__(256) resolve_selection(const __grid_constant__ SelectParams params) {
    __shared__ u32 counts[WARPS];
    const AttendParams& p = params.attend;
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const Seeing row = seeing(p, blockIdx.x / p.kv_heads);
    wait_for_previous();
    if (!row.lists) return;
    const u64 list = params.positions + 4ull * blockIdx.x * params.top, slots = params.listed + 4ull * blockIdx.x * params.top;
    // Each warp has a piece of the list, in order.
    const u32 piece = (params.top + 255) / 256 * 32, from = min(warp * piece, params.top), to = min(params.top, from + piece);
    auto sees = [&](u32 position) { return position >= row.first && position <= row.own; };
    u32 count = 0;
    for (u32 at = from + lane; at < to; at += 32) count += sees(load_written_u32(list + 4ull * at));
#pragma unroll
    for (u32 i = 16; i > 0; i /= 2) count += __shfl_xor_sync(~0u, count, i);
    if (lane == 0) counts[warp] = count;
    __syncthreads();
    u32 place = 0, all = 0;
    for (u32 i = 0; i < WARPS; ++i) {
        if (i == warp) place = all;
        all += counts[i];
    }
    for (u32 begin = from; begin < to; begin += 32) {
        const u32 at = begin + lane, position = at < to ? load_written_u32(list + 4ull * at) : NO_POSITION;
        const bool is = sees(position);
        const u32 some = __ballot_sync(~0u, is);
        if (is) {
            const Look look = look_up(p, row.row, position);
            store_u32(slots + 4ull * (place + before(some, lane)), load_page(p, look, load_directory(p, look)) * p.page_size + look.slot);
        }
        place += __popc(some);
    }
    for (u32 i = all + threadIdx.x; i < params.top; i += 256) store_u32(slots + 4ull * i, NO_POSITION);
    if (threadIdx.x == 0) store_u32(params.counts + 4ull * blockIdx.x, all);
}
