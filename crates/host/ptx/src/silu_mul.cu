// silu_mul: out = silu(gate) * up
// Twin:    src/gpu/twin.rs silu_mul            (the specification)
// Params:  SiluMulParams, 24 bytes
// Shapes:  gate_up bf16 [tokens, 2, width], out bf16 [tokens, width]
// Grid:    x = ceil(width / 8 / 128), y = tokens
// Needs:   width % 8 == 0
// Build:   build.py
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(128) silu_mul(const __grid_constant__ SiluMulParams p) {
    let_next_start();
    wait_for_previous();
    const u32 at = 8 * (blockIdx.x * 128 + threadIdx.x);
    if (at >= p.width) return;
    const u64 row = static_cast<u64>(blockIdx.y) * p.width;
    float gate[8], up[8];
    widen(eight(p.gate_up, 2 * row + at), gate);
    widen(eight(p.gate_up, 2 * row + p.width + at), up);
#pragma unroll
    for (int i = 0; i < 8; ++i) gate[i] = gate[i] / (1.0f + __expf(-gate[i])) * up[i];
    eight(p.out, row + at) = narrowed(gate);
}
