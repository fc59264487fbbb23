// ceiling_copy, ceiling_read: measure the memory bandwidth that plain kernels reach. benches/gpu uses them, the backend does not.
// Twin:    none
// Params:  plain arguments
// Shapes:  copy: n 16-byte units; read: rows of 2,048 bytes. rows[i] is the index of a row, both in k and in v
// Grid:    x = any, block 256. copy: in each iteration a thread moves 4 units; read: a warp reads a row of k and of v
// Needs:   16-byte aligned addresses
// Build:   ptx/build.py
#include "move.cuh"

extern "C" __global__ void __launch_bounds__(256) ceiling_copy(u64 source, u64 target, u64 n) {
    const u64 step = 1024ull * gridDim.x;
    for (u64 first = 1024ull * blockIdx.x + threadIdx.x; first < n; first += step) {
        uint4 units[4];
#pragma unroll
        for (u32 i = 0; i < 4; i++)
            if (first + 256 * i < n) load_unit(Streaming(), units[i], source + 16 * (first + 256 * i));
#pragma unroll
        for (u32 i = 0; i < 4; i++)
            if (first + 256 * i < n) store_unit(Streaming(), target + 16 * (first + 256 * i), units[i]);
    }
}

extern "C" __global__ void __launch_bounds__(256) ceiling_read(u64 k, u64 v, u64 rows, u32 count, u64 sink) {
    const u32 warps = gridDim.x * 8, lane = threadIdx.x % 32;
    u32 sum = 0;
    for (u32 row = blockIdx.x * 8 + threadIdx.x / 32; row < count; row += warps) {
        const u64 at = 2048ull * reinterpret_cast<const u32*>(rows)[row] + 16 * lane;
        uint4 units[8];
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            load_unit(Streaming(), units[2 * i], k + at + 512 * i);
            load_unit(Streaming(), units[2 * i + 1], v + at + 512 * i);
        }
#pragma unroll
        for (u32 i = 0; i < 8; i++) sum += units[i].x ^ units[i].y ^ units[i].z ^ units[i].w;
    }
    // The result must look used, or the compiler would remove the loads.
    if (sum == 0x12345678) *reinterpret_cast<u32*>(sink) = sum;
}
