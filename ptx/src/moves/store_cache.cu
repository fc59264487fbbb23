// store_cache, store_cache_streaming, store_cache_any: store row i of k and v in slot slots[i] of one layer. A row with a
// negative slot is not stored.
// Twin:    src/backend/cpu store_cache         (the specification)
// Params:  StoreCacheParams (src/common, src/backend/cuda/kernels/params/moves.rs)
// Shapes:  k, v [tokens, kv_heads, head_dim], rows k_stride and v_stride apart; slots [tokens]: i32; any: i32 or i64
// Grid:    block (x, y): x threads share a token's runs, y tokens a block; grid x = ceil(tokens / y), y = runs of a row: 1, or
//          the heads if those of a slot are not contiguous
// Needs:   store_cache: 16-byte units, x = units of a run; streaming: 16-byte units; any: unit_bytes 16, 4 or 2.
//          Addresses, strides and run sizes are multiples of a unit. Slots that are not negative are distinct and
//          below the pool's slot count
// Build:   ptx/build.py
#include "pdl.cuh"
#include "move.cuh"

DEVICE u64 slot_offset(const StoreCacheParams& p, u64 slot) {
    if (p.page_size == 1) return slot * p.page_stride;
    const u64 page = __umul64hi(slot, p.page_magic);
    return page * p.page_stride + (slot - page * p.page_size) * p.slot_stride;
}
DEVICE int load_slot(const StoreCacheParams& p, u32 token) {
    int slot;
    asm volatile("ld.global.s32 %0, [%1];" : "=r"(slot) : "l"(p.slots + 4ull * token));
    return slot;
}

// The fastest kernel for token counts outside STREAMING_TOKENS (src/backend/cuda/store/rows.rs). A thread copies one
// unit of K and one of V. It issues the loads of the slot and of both units together.
extern "C" __global__ void __launch_bounds__(256) store_cache(const __grid_constant__ StoreCacheParams params) {
    wait_for_previous();
    const u32 token = blockIdx.x * blockDim.y + threadIdx.y, at = threadIdx.x * 16;
    if (token >= params.tokens) return;
    const int slot = load_slot(params, token);
    uint4 k, v;
    const u64 from = static_cast<u64>(blockIdx.y) * params.run_bytes + at;
    load_unit(Direct(), k, params.k + static_cast<u64>(token) * params.k_stride + from);
    load_unit(Direct(), v, params.v + static_cast<u64>(token) * params.v_stride + from);
    if (slot < 0) return;
    const u64 to = slot_offset(params, slot) + static_cast<u64>(blockIdx.y) * params.run_stride + at;
    store_unit(Direct(), params.k_pool + to, k);
    store_unit(Direct(), params.v_pool + to, v);
    let_next_start();
}

// Stores a run. A thread first loads UNITS units of K and UNITS of V, and then stores them.
template <class Way, int UNITS, class Unit> DEVICE void store_rows(const StoreCacheParams& p, u32 token, long long slot) {
    const u64 from = static_cast<u64>(blockIdx.y) * p.run_bytes;
    const u64 k = p.k + static_cast<u64>(token) * p.k_stride + from, v = p.v + static_cast<u64>(token) * p.v_stride + from;
    for (u32 first = threadIdx.x; first < p.row_units; first += UNITS * blockDim.x) {
        Unit k_units[UNITS], v_units[UNITS];
#pragma unroll
        for (u32 i = 0; i < UNITS; i++) {
            const u32 unit = first + i * blockDim.x;
            if (unit < p.row_units) load_unit(Way(), k_units[i], k + static_cast<u64>(unit) * sizeof(Unit));
        }
#pragma unroll
        for (u32 i = 0; i < UNITS; i++) {
            const u32 unit = first + i * blockDim.x;
            if (unit < p.row_units) load_unit(Way(), v_units[i], v + static_cast<u64>(unit) * sizeof(Unit));
        }
        if (slot < 0) return;
        const u64 to = slot_offset(p, slot) + static_cast<u64>(blockIdx.y) * p.run_stride;
#pragma unroll
        for (u32 i = 0; i < UNITS; i++) {
            const u32 unit = first + i * blockDim.x;
            if (unit < p.row_units) store_unit(Way(), p.k_pool + to + static_cast<u64>(unit) * sizeof(Unit), k_units[i]);
        }
#pragma unroll
        for (u32 i = 0; i < UNITS; i++) {
            const u32 unit = first + i * blockDim.x;
            if (unit < p.row_units) store_unit(Way(), p.v_pool + to + static_cast<u64>(unit) * sizeof(Unit), v_units[i]);
        }
    }
}

// Loads and stores with the hint `.cs`, so L1 and L2 evict these bytes first.
// A thread loads four units of K and four of V before it stores them.
extern "C" __global__ void __launch_bounds__(512) store_cache_streaming(const __grid_constant__ StoreCacheParams params) {
    wait_for_previous();
    const u32 token = blockIdx.x * blockDim.y + threadIdx.y;
    if (token < params.tokens) store_rows<Streaming, 4, uint4>(params, token, load_slot(params, token));
    let_next_start();
}

// Supports rows of any width, and slots of 32 or 64 bits.
extern "C" __global__ void __launch_bounds__(256) store_cache_any(const __grid_constant__ StoreCacheParams params) {
    wait_for_previous();
    const u32 token = blockIdx.x * blockDim.y + threadIdx.y;
    if (token >= params.tokens) return;
    long long slot;
    if (params.slot_bytes == 4) {
        slot = load_slot(params, token);
    } else {
        asm volatile("ld.global.s64 %0, [%1];" : "=l"(slot) : "l"(params.slots + 8ull * token));
    }
    if (params.unit_bytes == 16) {
        store_rows<Direct, 1, uint4>(params, token, slot);
    } else if (params.unit_bytes == 4) {
        store_rows<Direct, 1, u32>(params, token, slot);
    } else {
        store_rows<Direct, 1, u16>(params, token, slot);
    }
}
