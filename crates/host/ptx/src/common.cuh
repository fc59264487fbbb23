// Functions that kernels of this folder share: conversions of bf16, sums, RMSNorm. A bf16 is the upper half of an f32.
#pragma once
#include "params.cuh"
#include "../../../../ptx/src/common/pdl.cuh"

DEVICE float wide(u16 x) { return __uint_as_float(static_cast<u32>(x) << 16); }
DEVICE float wide_low(u32 pair) { return __uint_as_float(pair << 16); }
DEVICE float wide_high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

// Returns two f32 as bf16, rounded to nearest even.
DEVICE u32 narrow(float low, float high) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

struct __align__(16) Eight {
    u32 pair[4];
};
DEVICE void widen(const Eight& from, float (&to)[8]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        to[2 * i] = wide_low(from.pair[i]);
        to[2 * i + 1] = wide_high(from.pair[i]);
    }
}
DEVICE Eight narrowed(const float (&from)[8]) {
    Eight to;
#pragma unroll
    for (int i = 0; i < 4; ++i) to.pair[i] = narrow(from[2 * i], from[2 * i + 1]);
    return to;
}
DEVICE Eight& eight(u64 address, u64 element) { return *reinterpret_cast<Eight*>(address + 2 * element); }

DEVICE float warp_sum(float x) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
}

// Returns the sum over a block to every thread. The block has at most 1,024 threads, a multiple of 32.
DEVICE float block_sum(float x) {
    __shared__ float sums[32];
    x = warp_sum(x);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = x;
    __syncthreads();
    return warp_sum(threadIdx.x % 32 < blockDim.x / 32 ? sums[threadIdx.x % 32] : 0.0f);
}

// Writes the RMSNorm of a row to `out`. Each thread passes eight elements of the row, or zeros beyond the row's end.
DEVICE void norm_row(const float (&x)[8], u64 weight, u64 out, u32 hidden, float eps) {
    const u32 at = 8 * threadIdx.x;
    float sum = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) sum += x[i] * x[i];
    const float scale = rsqrtf(block_sum(sum) / static_cast<float>(hidden) + eps);
    if (at >= hidden) return;
    float w[8], y[8];
    widen(eight(weight, at), w);
#pragma unroll
    for (int i = 0; i < 8; ++i) y[i] = x[i] * scale * w[i];
    eight(out, at) = narrowed(y);
}
