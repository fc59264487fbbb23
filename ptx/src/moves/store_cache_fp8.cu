// store_cache_fp8, store_cache_fp8_any: store row i of k and v in slot slots[i] of one layer as bytes of E4M3. A row with a
// negative slot is not stored. With scales by token, the kernels compute and store the scale of each head.
// Twin:    src/backend/cpu store_cache         (the specification: src/backend/cpu/scales.rs, bit for bit)
// Params:  StoreFp8Params (src/common, src/backend/cuda/kernels/params/moves.rs)
// Shapes:  k, v [tokens, kv_heads, head_dim], rows k_stride and v_stride apart; slots [tokens]: i32; any: i32 or i64
// Grid:    store_cache_fp8: block (x, y): x = kv_heads * head_dim / 16, at most 256, y tokens a block; grid x = ceil(tokens / y)
//          any: block 256, grid x = ceil(tokens * kv_heads / 8)
// Needs:   slots distinct and below the pool's slot count. store_cache_fp8: rows of f16 or bf16, 16-byte addresses and strides,
//          head_dim 64, 128 or 256
// Build:   ptx/build.py
#include "pdl.cuh"
#include "store_fp8.cuh"

// ---- 16 numbers a thread ----------------------------------------------------------------------------------------------

// Returns the maximum; NaN if one is NaN.
DEVICE float greater(float a, float b) {
    float c;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
}
DEVICE void unpack(bool half, const u32 (&words)[8], float (&x)[16]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        x[2 * i] = half ? low_half(words[i]) : __uint_as_float(words[i] << 16);
        x[2 * i + 1] = half ? high_half(words[i]) : __uint_as_float(words[i] & 0xffff0000);
    }
}
// Returns the maximum over a head, whose numbers are in `abreast` neighbouring lanes.
template <class Max> DEVICE float most_of_head(float most, u32 abreast, Max max) {
    const u32 lane = (threadIdx.y * blockDim.x + threadIdx.x) % 32;
    const u32 head = ((1u << abreast) - 1) << lane / abreast * abreast;
#pragma unroll 1
    for (u32 i = 1; i < abreast; i *= 2) most = max(most, __shfl_xor_sync(head, most, i));
    return most;
}

// Returns the bytes of 16 numbers of a head, whose scale is at `at`.
DEVICE uint4 quantise(const StoreFp8Params& p, const u32 (&words)[8], u64 at, bool store) {
    float x[16];
    if (p.rows == ROWS_F16) unpack(true, words, x);
    else unpack(false, words, x);
    float most = 0.f;
#pragma unroll
    for (int i = 0; i < 16; ++i) most = greater(most, fabsf(x[i]));
    const u32 abreast = p.head_dim / 16;
    float scale;
    if (p.by_token) {
        most = most_of_head(most, abreast, greater);
        if (!is_finite(most)) {
            float finite = 0.f;
#pragma unroll
            for (int i = 0; i < 16; ++i) finite = fmaxf(finite, is_finite(x[i]) ? fabsf(x[i]) : 0.f);
            finite = most_of_head(finite, abreast, [](float a, float b) { return fmaxf(a, b); });
            scale = token_scale(finite);
        } else {
            scale = token_scale(most);
        }
        if (store && threadIdx.x % abreast == 0) store_scale(at, scale);
    } else {
        scale = load_scale(at);
    }
    u32 bytes[4];
    const u32 bits = __float_as_uint(scale);
    // Away from the limits of f32, the reciprocal gives a quotient, and the remainder rounds the quotient correctly.
    // Exceptions are scales whose reciprocal is rounded too far. Comparisons are false for NaN.
    const bool plain = bits >= 0x21800000 && bits < 0x5d800000 && (bits & 0x7fffff) != 0x7fffff && most < 1.15e18f;
    if (plain) {
        const float inverse = __frcp_rn(scale);
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            const float near = __fmul_rn(x[i], inverse);
            x[i] = __fmaf_rn(__fmaf_rn(-near, scale, x[i]), inverse, near);
        }
    } else {
#pragma unroll
        for (int i = 0; i < 16; ++i) x[i] = __fdiv_rn(x[i], scale);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        bytes[i] = narrow(x[4 * i], x[4 * i + 1]) | narrow(x[4 * i + 2], x[4 * i + 3]) << 16;
        // The remainder loses the sign of -0.
        if (plain) bytes[i] |= __byte_perm(words[2 * i], words[2 * i + 1], 0x7531) & 0x80808080;
    }
    return make_uint4(bytes[0], bytes[1], bytes[2], bytes[3]);
}

extern "C" __global__ void __launch_bounds__(256) store_cache_fp8(const __grid_constant__ StoreFp8Params params) {
    wait_for_previous();
    const StoreFp8Params& p = params;
    const u32 wanted = blockIdx.x * blockDim.y + threadIdx.y, token = min(wanted, p.tokens - 1), unit = threadIdx.x;
    int slot;
    asm volatile("ld.global.s32 %0, [%1];" : "=r"(slot) : "l"(p.slots + 4ull * token));
    uint4 k0, k1, v0, v1;
    const u64 k = p.k + static_cast<u64>(token) * p.k_stride + unit * 32, v = p.v + static_cast<u64>(token) * p.v_stride + unit * 32;
    load_unit(Direct(), k0, k), load_unit(Direct(), k1, k + 16);
    load_unit(Direct(), v0, v), load_unit(Direct(), v1, v + 16);
    const bool store = wanted < p.tokens && slot >= 0;
    const Place to = place(p, store ? slot : 0);
    const u32 head = unit / (p.head_dim / 16);
    const u64 scale = to.scale + head * p.scale_head_stride;
    const u64 row = to.row + static_cast<u64>(head) * (p.head_stride - p.head_dim) + unit * 16;
    const uint4 k_bytes = quantise(p, {k0.x, k0.y, k0.z, k0.w, k1.x, k1.y, k1.z, k1.w}, p.k_scales + scale, store);
    if (store) store_unit(Direct(), p.k_pool + row, k_bytes);
    const uint4 v_bytes = quantise(p, {v0.x, v0.y, v0.z, v0.w, v1.x, v1.y, v1.z, v1.w}, p.v_scales + scale, store);
    if (store) store_unit(Direct(), p.v_pool + row, v_bytes);
    let_next_start();
}

// ---- any rows: one warp for each head ---------------------------------------------------------------------------------

extern "C" __global__ void __launch_bounds__(256) store_cache_fp8_any(const __grid_constant__ StoreFp8Params params) {
    wait_for_previous();
    const StoreFp8Params& p = params;
    const u64 of = blockIdx.x * 8ull + threadIdx.x / 32;
    const u32 token = static_cast<u32>(of / p.kv_heads), head = static_cast<u32>(of % p.kv_heads);
    if (token >= p.tokens) return;
    const long long slot = load_slot(p, token);
    if (slot < 0) return;
    const Place to = place(p, slot);
    const u64 row = to.row + static_cast<u64>(head) * p.head_stride, scale = to.scale + static_cast<u64>(head) * p.scale_head_stride;
    const u64 from = static_cast<u64>(head) * p.head_dim * (p.rows == ROWS_F32 ? 4 : 2);
    store_head(p, p.k + static_cast<u64>(token) * p.k_stride + from, p.k_pool + row, p.k_scales + scale);
    store_head(p, p.v + static_cast<u64>(token) * p.v_stride + from, p.v_pool + row, p.v_scales + scale);
    let_next_start();
}
