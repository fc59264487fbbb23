// store_cache: row i of k and v goes to slot slots[i] of one layer; a negative slot writes nothing.
// Twin:    src/backend/cpu.rs store_cache      (the specification)
// Params:  StoreCacheParams, 104 bytes         (ptx/params.cuh, src/backend/cuda/params.rs)
// Shapes:  k, v [tokens, kv_heads, head_dim], rows k_stride and v_stride apart; slots i32 or i64 [tokens]
// Grid:    block (x, y): x threads share a token's rows, y tokens a block; grid x = ceil(tokens / y)
// Needs:   unit_bytes divides addresses, strides and rows; slots distinct and below the pool's slot count
// Build:   ptx/build.py
#include "move.cuh"

// Four units of K and four of V are in flight in each thread before the first is stored, and the slot is fetched beside
// them, not before them.
template <class Unit> DEVICE void store_rows(const StoreCacheParams& p, u32 token) {
    const u64 k = p.k + token * p.k_stride, v = p.v + token * p.v_stride;
    long long slot;
    if (p.slot_bytes == 4) {
        int narrow;
        asm volatile("ld.global.nc.s32 %0, [%1];" : "=r"(narrow) : "l"(p.slots + 4ull * token));
        slot = narrow;
    } else {
        asm volatile("ld.global.nc.s64 %0, [%1];" : "=l"(slot) : "l"(p.slots + 8ull * token));
    }
    for (u32 first = threadIdx.x; first < p.row_units; first += 4 * blockDim.x) {
        Unit k_units[4], v_units[4];
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            const u32 unit = first + i * blockDim.x;
            if (unit < p.row_units) {
                load_unit(k_units[i], k + static_cast<u64>(unit) * sizeof(Unit));
                load_unit(v_units[i], v + static_cast<u64>(unit) * sizeof(Unit));
            }
        }
        if (slot < 0) return;
        const u64 page = divide(slot, p.page_magic);
        const u64 offset = page * p.page_stride + (slot - page * p.page_size) * p.slot_stride;
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            const u32 unit = first + i * blockDim.x;
            if (unit < p.row_units) {
                store_unit(p.k_pool + offset + static_cast<u64>(unit) * sizeof(Unit), k_units[i]);
                store_unit(p.v_pool + offset + static_cast<u64>(unit) * sizeof(Unit), v_units[i]);
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(256) store_cache(const __grid_constant__ StoreCacheParams params) {
    const u32 token = blockIdx.x * blockDim.y + threadIdx.y;
    if (token >= params.tokens) return;
    if (params.unit_bytes == 16) {
        store_rows<uint4>(params, token);
    } else if (params.unit_bytes == 4) {
        store_rows<u32>(params, token);
    } else {
        store_rows<u16>(params, token);
    }
}
