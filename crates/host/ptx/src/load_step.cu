// load_step: copies two ranges from pinned memory. One launch copies draws and tokens, another copies shapes and edits.
// Twin:    none                                (the kernel only copies)
// Params:  LoadStepParams, 32 bytes            (params.cuh, src/gpu/kernels.rs)
// Shapes:  source, target: units of 16 bytes
// Grid:    x = ceil((first + second) / 256)
// Build:   build.py
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(256) load_step(const __grid_constant__ LoadStepParams p) {
    u32 i = blockIdx.x * 256 + threadIdx.x;
    if (i >= p.first + p.second) return;
    if (i >= p.first) i += p.second_at - p.first;
    uint4 unit;
    asm volatile("ld.volatile.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(unit.x), "=r"(unit.y), "=r"(unit.z), "=r"(unit.w)
                 : "l"(p.source + 16ull * i));
    reinterpret_cast<uint4*>(p.target)[i] = unit;
}
