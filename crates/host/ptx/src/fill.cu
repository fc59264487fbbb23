// fill: writes the SplitMix64 sequence as bf16 numbers, uniform around offset.
// fold: multiplies each row of a matrix with a norm's weights.
// Twin:    src/source.rs Random                (the specification of fill)
// Params:  FillParams, FoldParams, 32 bytes
// Grid:    any, block 256 (a grid-stride loop)
// Build:   build.py
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(256) fill(const __grid_constant__ FillParams p) {
    for (u64 i = blockIdx.x * 256ull + threadIdx.x; i < p.count; i += gridDim.x * 256ull) {
        u64 z = p.seed + (i + 1) * 0x9E3779B97F4A7C15ull;
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
        z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
        z ^= z >> 31;
        const float unit = static_cast<float>(static_cast<u32>(z >> 40)) * 0x1p-24f - 0.5f;  // exact
        reinterpret_cast<u16*>(p.out)[i] = static_cast<u16>(narrow(unit * p.scale + p.offset, 0.0f));
    }
}

extern "C" __global__ void __launch_bounds__(256) fold(const __grid_constant__ FoldParams p) {
    for (u64 i = blockIdx.x * 256ull + threadIdx.x; i < p.count; i += gridDim.x * 256ull) {
        u16& x = reinterpret_cast<u16*>(p.matrix)[i];
        x = static_cast<u16>(narrow(wide(x) * wide(reinterpret_cast<const u16*>(p.weight)[i % p.cols]), 0.0f));
    }
}
