// route: chooses the experts of each token by the best logits, and computes their weights: the softmax of these logits.
// experts_up: computes gate and up of each token's experts, clamps both and applies the activation of gpt-oss:
// gate * sigmoid(1.702 gate) * (up + 1).
// experts_down: computes the weighted sum of the outputs of each token's experts.
// Twin:    tests/common/twin.rs route, expert_up, expert_down (the specification)
// Params:  RouteParams, 48 bytes; ExpertsParams, 56 bytes
// Shapes:  see params.cuh; the experts' matrices are [ins, outs], so that neighbouring threads read neighbouring columns
// Grid:    route: x = tokens, block 128; experts_up: x = tokens * per_token, y = ceil(outs / 128), block 128;
//          experts_down: x = tokens, y = ceil(outs / 256), block 128
// Needs:   hidden and outs even; experts <= ROUTED_MAX, per_token <= experts
// Build:   build.py
#include "common.cuh"

#define SWIGLU_LIMIT 7.0f
#define SWIGLU_ALPHA 1.702f

DEVICE u32 pair_at(u64 address, u64 pair) { return reinterpret_cast<const u32*>(address)[pair]; }
DEVICE float number_at(u64 address, u64 element) { return wide(reinterpret_cast<const u16*>(address)[element]); }

extern "C" __global__ void __launch_bounds__(128) route(const __grid_constant__ RouteParams p) {
    __shared__ float logits[ROUTED_MAX];
    let_next_start();
    wait_for_previous();
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, pairs = p.hidden / 2;
    const u64 x = static_cast<u64>(blockIdx.x) * pairs;
    for (u32 expert = warp; expert < p.experts; expert += 4) {
        float sum = 0;
        for (u32 i = lane; i < pairs; i += 32) {
            const u32 a = pair_at(p.x, x + i), b = pair_at(p.weight, static_cast<u64>(expert) * pairs + i);
            sum += wide_low(a) * wide_low(b) + wide_high(a) * wide_high(b);
        }
        sum = warp_sum(sum);
        if (lane == 0) logits[expert] = sum + number_at(p.bias, expert);
    }
    __syncthreads();
    if (threadIdx.x != 0) return;
    Route* routes = reinterpret_cast<Route*>(p.routes) + static_cast<u64>(blockIdx.x) * p.per_token;
    float best = 0, sum = 0;
    for (u32 n = 0; n < p.per_token; ++n) {
        u32 expert = 0;
        for (u32 i = 1; i < p.experts; ++i)
            if (logits[i] > logits[expert]) expert = i;
        if (n == 0) best = logits[expert];
        const float weight = expf(logits[expert] - best);
        sum += weight;
        routes[n].expert = expert;
        routes[n].weight = weight;
        logits[expert] = __int_as_float(0xff800000);
    }
    for (u32 n = 0; n < p.per_token; ++n) routes[n].weight /= sum;
}

extern "C" __global__ void __launch_bounds__(128) experts_up(const __grid_constant__ ExpertsParams p) {
    let_next_start();
    wait_for_previous();
    const u32 out = blockIdx.y * 128 + threadIdx.x;
    if (out >= p.outs) return;
    const u64 expert = reinterpret_cast<const Route*>(p.routes)[blockIdx.x].expert;
    const u64 x = static_cast<u64>(blockIdx.x / p.per_token) * p.ins;
    const u64 weight = p.weight + 4 * (expert * p.ins * p.outs + out);
    float gate = 0, up = 0;
#pragma unroll 8
    for (u32 i = 0; i < p.ins; ++i) {
        const float number = number_at(p.x, x + i);
        const u32 both = pair_at(weight, static_cast<u64>(i) * p.outs);
        gate += number * wide_low(both);
        up += number * wide_high(both);
    }
    const u32 bias = pair_at(p.bias, expert * p.outs + out);
    gate = fminf(gate + wide_low(bias), SWIGLU_LIMIT);
    up = fminf(fmaxf(up + wide_high(bias), -SWIGLU_LIMIT), SWIGLU_LIMIT);
    const float y = gate / (1.0f + __expf(-SWIGLU_ALPHA * gate)) * (up + 1.0f);
    reinterpret_cast<u16*>(p.y)[static_cast<u64>(blockIdx.x) * p.outs + out] = static_cast<u16>(narrow(y, 0.0f));
}

extern "C" __global__ void __launch_bounds__(128) experts_down(const __grid_constant__ ExpertsParams p) {
    let_next_start();
    wait_for_previous();
    const u32 pair = blockIdx.y * 128 + threadIdx.x, pairs = p.outs / 2;
    if (pair >= pairs) return;
    float low = 0, high = 0;
    for (u32 n = 0; n < p.per_token; ++n) {
        const u64 chosen = static_cast<u64>(blockIdx.x) * p.per_token + n;
        const Route route = reinterpret_cast<const Route*>(p.routes)[chosen];
        const u64 weight = p.weight + 4 * (static_cast<u64>(route.expert) * p.ins * pairs + pair);
        const u32 bias = p.bias ? pair_at(p.bias, static_cast<u64>(route.expert) * pairs + pair) : 0;
        float a = wide_low(bias), b = wide_high(bias);
#pragma unroll 8
        for (u32 i = 0; i < p.ins; ++i) {
            const float number = number_at(p.x, chosen * p.ins + i);
            const u32 both = pair_at(weight, static_cast<u64>(i) * pairs);
            a += number * wide_low(both);
            b += number * wide_high(both);
        }
        low += route.weight * a;
        high += route.weight * b;
    }
    u32& y = reinterpret_cast<u32*>(p.y)[static_cast<u64>(blockIdx.x) * pairs + pair];
    if (p.add) low += wide_low(y), high += wide_high(y);
    y = narrow(low, high);
}
