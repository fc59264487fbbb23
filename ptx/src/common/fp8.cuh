// What attention over fp8 shares: numbers of E4M3 as factors of tensor-core products, and rows of q beside them.
#pragma once
#include "attend.cuh"
#include "e4m3.cuh"

DEVICE void load_written_two(u64 at, u32& a, u32& b) {
    asm volatile("ld.global.v2.u32 {%0,%1}, [%2];" : "=r"(a), "=r"(b) : "l"(at) : "memory");
}

// Four bytes, two of each of two tokens, as pairs of tokens: low is of the first byte of each, high of the second.
DEVICE void widen_pairs(u32 bytes, u32& low, u32& high) { widen(__byte_perm(bytes, 0, 0x3120), low, high); }

// Four bytes of a row as numbers of T, times a scale where they have one of their own.
template <bool SCALED> DEVICE void widen_row(f16, u32 bytes, float scale, u32& low, u32& high) {
    widen(bytes, low, high);
    if (SCALED) low = pack(f16(), low_half(low) * scale, high_half(low) * scale), high = pack(f16(), low_half(high) * scale, high_half(high) * scale);
}
template <bool SCALED> DEVICE void widen_row(bf16, u32 bytes, float scale, u32& low, u32& high) {
    u32 first, second;
    widen(bytes, first, second);
    if (!SCALED) scale = 1.f;
    low = pack(bf16(), low_half(first) * scale, high_half(first) * scale), high = pack(bf16(), low_half(second) * scale, high_half(second) * scale);
}
// Two numbers of bf16 as T. f16 holds those that were stored of f16 rows: but that what was rounded up past its end is the end.
DEVICE u32 from_bf16(bf16, u32 two) { return two; }
DEVICE u32 from_bf16(f16, u32 two) {
    const float low = __uint_as_float(two << 16), high = __uint_as_float(two & 0xffff0000);
    auto held = [](float x) { return fabsf(x) == 65536.f ? copysignf(65504.f, x) : x; };
    return pack(f16(), held(low), held(high));
}
// 16 bytes that other CTAs read as well, from the L2 cache.
DEVICE void load_bytes(u32 (&v)[4], u64 at) {
    asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "l"(at) : "memory");
}
DEVICE void store_shared_uint4(u32 at, const u32* v) {
    asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(at), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]) : "memory");
}

// The parameters around those of a kernel over fp8.
DEVICE const AttendFp8Params& fp8_of(const AttendParams& p) { return reinterpret_cast<const AttendFp8Params&>(p); }
// A head's scale among `scales`; 1 where tokens have scales of their own.
template <class Params> DEVICE float head_scale(const Params& p, u64 scales, u32 head) {
    return p.scales.by_token ? 1.f : load_float(scales + static_cast<u64>(head) * p.scales.head_stride);
}
// What makes logits of scores, from the smallest normal number on: 0 makes no number of minus infinity, nor does infinity of 0.
DEVICE float finite_factor(float factor) { return fminf(fmaxf(factor, 0x1p-126f), 0x1.fffffep127f); }

// ---- rows of q as f16 -------------------------------------------------------------------------------------------------

// Of four numbers the greatest, without sign, as bits of f32.
DEVICE u32 largest(f16, u32, u32) { return 0; }
DEVICE u32 largest(bf16, u32 a, u32 b) {
    return max(max(a << 16 & 0x7fffffff, a & 0x7fff0000), max(b << 16 & 0x7fffffff, b & 0x7fff0000));
}
// The power of two by which the greatest number of a row comes to 2^14 or more, below f16's end. f16 stays as it is.
DEVICE float finest(f16, u32) { return 1.f; }
DEVICE float finest(bf16, u32 most) {
    const u32 exponent = most >> 23;  // 0: all are 0, or nearly; 255: not finite, which no factor changes
    return __uint_as_float(min(268 - exponent, 250u) << 23);
}
DEVICE float inverse_power(float power) { return __uint_as_float((254u << 23) - __float_as_uint(power)); }
DEVICE u32 to_f16(f16, u32 two, float) { return two; }
DEVICE u32 to_f16(bf16, u32 two, float up) { return pack(f16(), __uint_as_float(two << 16) * up, __uint_as_float(two & 0xffff0000) * up); }

// ---- weights as f16 ---------------------------------------------------------------------------------------------------

// V is multiplied as f16, so weights are f16 too, whatever the rows' dtype. They are relative to a logit that others may pass by 2^8; times
// 2^6 (-LIFT) they stay below 2^15, which f16 holds, as it holds those 2^-30 as great as that logit's.
#define LIFT -6.f
// By token a weight is multiplied by its V's scale, so weights are relative to more: this logarithm of a power of two near the greatest scale
// met, and LIFT. Of a warp's scales, one or more of each lane; none counts as less than 2^-80, so that sums of weights stay in f32.
DEVICE float lift_of(float scale) {
    const u32 power = __reduce_max_sync(~0u, __float_as_uint(scale)) >> 23;
    return static_cast<float>(static_cast<int>(max(power, 47u)) - 127) + LIFT;
}

// ---- weights times scales ---------------------------------------------------------------------------------------------

// bf16 holds a weight times any scale.
template <class T> struct Range {
    __device__ __forceinline__ float of(float scale) const { return scale; }
    __device__ __forceinline__ float unit() const { return 1.f; }
};
// f16 does not: scales are relative to a power of two that is not far below the greatest met.
template <> struct Range<f16> {
    float base = 0.f;  // 0: all are 0 so far
    // Takes in a warp's scales, one of each lane; gives what sums so far are to be multiplied by.
    __device__ __forceinline__ float include(float scale) {
        const u32 most = __reduce_max_sync(~0u, __float_as_uint(scale)) & 0x7f800000;
        if (most <= __float_as_uint(base)) return 1.f;
        const float old = base;
        base = __uint_as_float(most);
        return old * inverse_power(base);
    }
    __device__ __forceinline__ float of(float scale) const { return scale * inverse_power(base); }
    __device__ __forceinline__ float unit() const { return base > 0.f ? base : 1.f; }
};
