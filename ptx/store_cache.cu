// store_cache, store_cache_streaming: row i of k and v goes to slot slots[i] of one layer; a negative slot writes nothing.
// Twin:    src/backend/cpu.rs store_cache      (the specification)
// Params:  StoreCacheParams, 104 bytes         (ptx/params.cuh, src/backend/cuda/params.rs)
// Shapes:  k, v [tokens, kv_heads, head_dim], rows k_stride and v_stride apart; slots i32 or i64 [tokens]
// Grid:    block (x, y): x threads share a token's rows, y tokens a block; grid x = ceil(tokens / y); streaming: four units
//          of K and of V a thread rather than one
// Needs:   unit_bytes divides addresses, strides and rows, streaming: it is 16; slots distinct and below the pool's slot count
// Build:   ptx/build.py
#include "move.cuh"

// All of a thread's loads, the slot's too, are in flight before the first store: UNITS units of K and of V.
template <class Way, int UNITS, class Unit> DEVICE void store_rows(const StoreCacheParams& p, u32 token) {
    const u64 k = p.k + token * p.k_stride, v = p.v + token * p.v_stride;
    long long slot;
    if (p.slot_bytes == 4) {
        int narrow;
        asm volatile("ld.global.s32 %0, [%1];" : "=r"(narrow) : "l"(p.slots + 4ull * token));
        slot = narrow;
    } else {
        asm volatile("ld.global.s64 %0, [%1];" : "=l"(slot) : "l"(p.slots + 8ull * token));
    }
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
        const u64 page = divide(slot, p.page_magic);
        const u64 offset = page * p.page_stride + (slot - page * p.page_size) * p.slot_stride;
#pragma unroll
        for (u32 i = 0; i < UNITS; i++) {
            const u32 unit = first + i * blockDim.x;
            if (unit < p.row_units) store_unit(Way(), p.k_pool + offset + static_cast<u64>(unit) * sizeof(Unit), k_units[i]);
        }
#pragma unroll
        for (u32 i = 0; i < UNITS; i++) {
            const u32 unit = first + i * blockDim.x;
            if (unit < p.row_units) store_unit(Way(), p.v_pool + offset + static_cast<u64>(unit) * sizeof(Unit), v_units[i]);
        }
    }
}

extern "C" __global__ void __launch_bounds__(256) store_cache(const __grid_constant__ StoreCacheParams params) {
    const u32 token = blockIdx.x * blockDim.y + threadIdx.y;
    if (token >= params.tokens) return;
    if (params.unit_bytes == 16) {
        store_rows<Direct, 1, uint4>(params, token);
    } else if (params.unit_bytes == 4) {
        store_rows<Direct, 1, u32>(params, token);
    } else {
        store_rows<Direct, 1, u16>(params, token);
    }
}

extern "C" __global__ void __launch_bounds__(512) store_cache_streaming(const __grid_constant__ StoreCacheParams params) {
    const u32 token = blockIdx.x * blockDim.y + threadIdx.y;
    if (token < params.tokens) store_rows<Streaming, 4, uint4>(params, token);
}
