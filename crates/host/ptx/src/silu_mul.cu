// silu_mul: out = silu(gate) * up
// gelu_mul: out = gelu(gate) * up, with the tanh approximation of GeLU
// Twin:    tests/common/twin.rs activate (the specification)
// Params:  SiluMulParams, 24 bytes
// Shapes:  gate_up bf16 [tokens, 2, width], out bf16 [tokens, width]
// Grid:    x = ceil(width / 8 / 128), y = tokens
// Needs:   width % 8 == 0
// Build:   build.py
#include "common.cuh"

DEVICE float silu(float x) { return x / (1.0f + __expf(-x)); }
// x / 2 * (1 + tanh(u)) is x * sigmoid(2 u).
DEVICE float gelu(float x) { return x / (1.0f + __expf(-1.5957691216f * (x + 0.044715f * x * x * x))); }

template <float (*ACTIVATION)(float)> DEVICE void multiply(const SiluMulParams& p) {
    let_next_start();
    wait_for_previous();
    const u32 at = 8 * (blockIdx.x * 128 + threadIdx.x);
    if (at >= p.width) return;
    const u64 row = static_cast<u64>(blockIdx.y) * p.width;
    float gate[8], up[8];
    widen(eight(p.gate_up, 2 * row + at), gate);
    widen(eight(p.gate_up, 2 * row + p.width + at), up);
#pragma unroll
    for (int i = 0; i < 8; ++i) gate[i] = ACTIVATION(gate[i]) * up[i];
    eight(p.out, row + at) = narrowed(gate);
}

extern "C" __global__ void __launch_bounds__(128) silu_mul(const __grid_constant__ SiluMulParams p) { multiply<silu>(p); }
extern "C" __global__ void __launch_bounds__(128) gelu_mul(const __grid_constant__ SiluMulParams p) { multiply<gelu>(p); }
