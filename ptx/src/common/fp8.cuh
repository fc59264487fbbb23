// Shared by attention kernels over fp8: E4M3 numbers and rows of q as operands of tensor-core products.
#pragma once
#include "attend.cuh"
#include "e4m3.cuh"

DEVICE void load_written_two(u64 at, u32& a, u32& b) {
    asm volatile("ld.global.v2.u32 {%0,%1}, [%2];" : "=r"(a), "=r"(b) : "l"(at) : "memory");
}

// Widens four bytes, two for each of two tokens, to pairs of tokens: `low` has the first byte of each, `high` the second.
DEVICE void widen_pairs(u32 bytes, u32& low, u32& high) { widen(__byte_perm(bytes, 0, 0x3120), low, high); }

// Widens four bytes of a row to T, times a scale if the row has its own.
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
// Converts two numbers of bf16 to T. Numbers that came from f16 rows fit f16, except those that bf16 rounded up past
// f16's maximum. These become the maximum.
DEVICE u32 from_bf16(bf16, u32 two) { return two; }
DEVICE u32 from_bf16(f16, u32 two) {
    const float low = __uint_as_float(two << 16), high = __uint_as_float(two & 0xffff0000);
    auto held = [](float x) { return fabsf(x) == 65536.f ? copysignf(65504.f, x) : x; };
    return pack(f16(), held(low), held(high));
}
// Loads 16 bytes that other CTAs also read, from the L2 cache.
DEVICE void load_bytes(u32 (&v)[4], u64 at) {
    asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "l"(at) : "memory");
}
DEVICE void store_shared_uint4(u32 at, const u32* v) {
    asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(at), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]) : "memory");
}

// Returns the parameters of a kernel over fp8, which begin with `p`.
DEVICE const AttendFp8Params& fp8_of(const AttendParams& p) { return reinterpret_cast<const AttendFp8Params&>(p); }
// Returns a head's scale; 1 if tokens have their own scales.
template <class Params> DEVICE float head_scale(const Params& p, u64 scales, u32 head) {
    return p.scales.by_token ? 1.f : load_float(scales + static_cast<u64>(head) * p.scales.head_stride);
}
// Clamps a factor of scores to normal, finite numbers, because 0 times infinity is NaN.
DEVICE float finite_factor(float factor) { return fminf(fmaxf(factor, 0x1p-126f), 0x1.fffffep127f); }

// ---- rows of q as f16 -------------------------------------------------------------------------------------------------

// Returns the maximum of the absolute values of four numbers, as bits of f32; 0 for f16, which `finest` does not scale.
DEVICE u32 largest(f16, u32, u32) { return 0; }
DEVICE u32 largest(bf16, u32 a, u32 b) {
    return max(max(a << 16 & 0x7fffffff, a & 0x7fff0000), max(b << 16 & 0x7fffffff, b & 0x7fff0000));
}
// Returns the power of two that scales a row's maximum to at least 2^14, below f16's maximum. A maximum below 2^-109
// stays smaller. f16 stays unscaled.
DEVICE float finest(f16, u32) { return 1.f; }
DEVICE float finest(bf16, u32 most) {
    const u32 exponent = most >> 23;  // 0: all numbers are (nearly) 0; 255: a number is not finite, and no factor changes it
    return __uint_as_float(min(268 - exponent, 250u) << 23);
}
DEVICE float inverse_power(float power) { return __uint_as_float((254u << 23) - __float_as_uint(power)); }
DEVICE u32 to_f16(f16, u32 two, float) { return two; }
DEVICE u32 to_f16(bf16, u32 two, float up) { return pack(f16(), __uint_as_float(two << 16) * up, __uint_as_float(two & 0xffff0000) * up); }

// ---- weights as f16 ---------------------------------------------------------------------------------------------------

// V is f16 in products, so weights are f16 for rows of any type. Weights are relative to an earlier maximum logit and
// are at most 2^8. Times 2^6 (-LIFT) they stay below 2^15, within f16, which then still represents a weight of 2^-30.
#define LIFT -6.f
// With scales by token, a weight is multiplied by the scale of its V. Weights are then also relative to a power of two near the
// maximum scale so far. The lift is the sum of this power's logarithm and LIFT. Each lane has one or more of a warp's scales.
// Scales below 2^-80 count as 2^-80, so that sums of weights stay in f32.
DEVICE float lift_of(float scale) {
    const u32 power = __reduce_max_sync(~0u, __float_as_uint(scale)) >> 23;
    return static_cast<float>(static_cast<int>(max(power, 47u)) - 127) + LIFT;
}

// ---- weights times scales ---------------------------------------------------------------------------------------------

// bf16 represents a weight times any scale.
template <class T> struct Range {
    __device__ __forceinline__ float of(float scale) const { return scale; }
    __device__ __forceinline__ float unit() const { return 1.f; }
};
// f16 does not, so scales are relative to a power of two slightly below their maximum so far.
template <> struct Range<f16> {
    float base = 0.f;  // 0: all are 0 so far
    // Includes a warp's scales, one for each lane, and returns the factor of the sums so far.
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
