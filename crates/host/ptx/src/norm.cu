// embed: computes each token's embedding times a factor, and its RMSNorm for the first layer.
// rms_norm: computes the RMSNorm of the rows of x, or of the rows that draws select.
// Twin:    tests/common/twin.rs rms_norm (the specification)
// Params:  EmbedParams, 64 bytes; NormParams, 40 bytes
// Shapes:  see params.cuh
// Grid:    x = rows, block hidden / 8 rounded up to 32
// Needs:   hidden % 8 == 0, hidden <= 8,192; tokens below the vocabulary
// Build:   build.py
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(1024) embed(const __grid_constant__ EmbedParams p) {
    let_next_start();
    wait_for_previous();
    int token = reinterpret_cast<const int*>(p.tokens)[blockIdx.x];
    if (token < 0) token = reinterpret_cast<const int*>(p.sampled)[-1 - token];
    const u32 at = 8 * threadIdx.x;
    const u64 row = static_cast<u64>(blockIdx.x) * p.hidden;
    float x[8] = {};
    if (at < p.hidden) {
        Eight read = eight(p.table, static_cast<u64>(token) * p.hidden + at);
        if (p.scale != 1.0f) {
            widen(read, x);
#pragma unroll
            for (int i = 0; i < 8; ++i) x[i] *= p.scale;
            read = narrowed(x);
        }
        eight(p.x, row + at) = read;
        widen(read, x);
    }
    norm_row(x, p.weight, p.normed + 2 * row, p.hidden, p.eps);
}

extern "C" __global__ void __launch_bounds__(1024) rms_norm(const __grid_constant__ NormParams p) {
    let_next_start();
    wait_for_previous();
    const u32 source = p.draws ? reinterpret_cast<const Draw*>(p.draws)[blockIdx.x].row : blockIdx.x;
    const u32 at = 8 * threadIdx.x;
    float x[8] = {};
    if (at < p.hidden) widen(eight(p.x, static_cast<u64>(source) * p.hidden + at), x);
    norm_row(x, p.weight, p.normed + 2 * static_cast<u64>(blockIdx.x) * p.hidden, p.hidden, p.eps);
}
