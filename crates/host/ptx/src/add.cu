// add_bias: y += bias, in every row.
// norm_add: x += RMSNorm(y), row by row.
// Twin:    tests/common/twin.rs add_bias, norm_add (the specification)
// Params:  BiasParams, 24 bytes; NormAddParams, 32 bytes
// Shapes:  see params.cuh
// Grid:    add_bias: x = ceil(width / 8 / 128), y = rows, block 128; norm_add: x = rows, block hidden / 8 rounded up to 32
// Needs:   width % 8 == 0; hidden % 8 == 0, hidden <= 8,192
// Build:   build.py
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(128) add_bias(const __grid_constant__ BiasParams p) {
    let_next_start();
    wait_for_previous();
    const u32 at = 8 * (blockIdx.x * 128 + threadIdx.x);
    if (at >= p.width) return;
    const u64 place = static_cast<u64>(blockIdx.y) * p.width + at;
    float y[8], bias[8];
    widen(eight(p.y, place), y);
    widen(eight(p.bias, at), bias);
#pragma unroll
    for (int i = 0; i < 8; ++i) y[i] += bias[i];
    eight(p.y, place) = narrowed(y);
}

extern "C" __global__ void __launch_bounds__(1024) norm_add(const __grid_constant__ NormAddParams p) {
    let_next_start();
    wait_for_previous();
    const u32 at = 8 * threadIdx.x;
    const u64 place = static_cast<u64>(blockIdx.x) * p.hidden + at;
    float y[8] = {};
    if (at < p.hidden) widen(eight(p.y, place), y);
    float sum = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) sum += y[i] * y[i];
    const float scale = rsqrtf(block_sum(sum) / static_cast<float>(p.hidden) + p.eps);
    if (at >= p.hidden) return;
    float x[8], weight[8];
    widen(eight(p.x, place), x);
    widen(eight(p.weight, at), weight);
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] += y[i] * scale * weight[i];
    eight(p.x, place) = narrowed(x);
}
