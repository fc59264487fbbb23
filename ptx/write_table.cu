// write_table: words[writes[i].index] = writes[i].value.
// Twin:    src/backend/cpu.rs begin            (the specification)
// Params:  WriteTableParams, 24 bytes          (ptx/params.cuh, src/backend/cuda/params.rs)
// Shapes:  words u32 [TableShape::words]; writes [count] {index, value} u32
// Grid:    x = ceil(count / 256), block 256
// Needs:   indices distinct and in range (checked on the host)
// Build:   ptx/build.py
#include "params.cuh"

extern "C" __global__ void __launch_bounds__(256) write_table(const __grid_constant__ WriteTableParams params) {
    const u32 i = blockIdx.x * 256 + threadIdx.x;
    if (i < params.count) {
        const TableWrite write = reinterpret_cast<const TableWrite*>(params.writes)[i];
        reinterpret_cast<u32*>(params.words)[write.index] = write.value;
    }
}
