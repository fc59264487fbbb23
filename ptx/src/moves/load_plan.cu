// load_plan: reads a step's plan from pinned memory: copies its image, applies its table writes, and signals the end.
// Twin:    src/backend/cpu begin               (the specification of the table writes)
// Params:  LoadPlanParams (src/common, src/backend/cuda/kernels/params/moves.rs)
// Shapes:  source: 16-byte units of the image; at writes_at TableWrite[writes]; words u32 [TableShape::words]
// Grid:    x = ceil(max(units, writes) / 256)
// Needs:   indices of the writes distinct, and in range (the range is checked on the host); counter zero, and left zero
// Build:   ptx/build.py
#include "move.cuh"

extern "C" __global__ void __launch_bounds__(256) load_plan(const __grid_constant__ LoadPlanParams params) {
    const u32 i = blockIdx.x * 256 + threadIdx.x;
    if (i < params.units) {
        uint4 unit;
        load_unit(Direct(), unit, params.source + 16ull * i);
        store_unit(Direct(), params.image + 16ull * i, unit);
    }
    if (i < params.writes) {
        u32 index, value;
        asm volatile("ld.volatile.global.v2.u32 {%0,%1}, [%2];" : "=r"(index), "=r"(value) : "l"(params.source + params.writes_at + 8ull * i));
        reinterpret_cast<u32*>(params.words)[index] = value;
    }
    // All reads have been stored, so the source is free once all blocks have arrived.
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        if (atomicInc(reinterpret_cast<u32*>(params.counter), gridDim.x - 1) == gridDim.x - 1) {
            __threadfence_system();
            *reinterpret_cast<volatile u64*>(params.done) = params.ticket;
        }
    }
}
