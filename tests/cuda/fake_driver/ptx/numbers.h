/* Numbers as the device has them: halves, bf16, e4m3, and approximate functions. They have no branches and no library
 * calls, so that the compiler vectorises loops over lanes. */
#pragma once
#include <math.h>
#include <string.h>
#include <bit>
#include "program.h"

namespace ptx {
inline float float_of(u32 bits) { return std::bit_cast<float>(bits); }
inline u32 bits_of(float value) { return std::bit_cast<u32>(value); }

inline float half_to_float(u32 half) {
    const u32 rest = (half & 0x7fff) << 13;
    const float size = float_of(rest) * 0x1p112f;  // subnormals are exact, too
    const u32 bits = (half & 0x7fff) >= 0x7c00 ? rest | 0x7f800000 : bits_of(size);
    return float_of(bits | (half & 0x8000) << 16);
}
inline u32 float_to_half(float value) {
    const u32 bits = bits_of(value), size = bits & 0x7fffffff, sign = bits >> 16 & 0x8000;
    const u32 normal = (size + 0xfff + (size >> 13 & 1) - (112u << 23)) >> 13;
    const u32 subnormal = bits_of(float_of(size) + 0.5f) - bits_of(0.5f);  // the sum rounds to steps of 2^-24
    const u32 finite = size < (113u << 23) ? subnormal : normal;
    const u32 large = size > 0x7f800000 ? 0x7fff : 0x7c00;
    return sign | (size >= 0x477ff000 ? large : finite);
}
inline float bf16_to_float(u32 narrow) { return float_of(narrow << 16); }
inline u32 float_to_bf16(float value) {
    const u32 bits = bits_of(value);
    return (bits & 0x7fffffff) > 0x7f800000 ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline u32 e4m3_to_half(u32 byte) {
    const u32 sign = (byte & 0x80) << 8, rest = (byte & 0x7f) << 7;  // a half whose exponent is 8 too small
    return sign | ((byte & 0x7f) == 0x7f ? 0x7fff : float_to_half(half_to_float(rest) * 256.f));
}
inline u32 float_to_e4m3(float value) {
    const u32 sign = bits_of(value) >> 24 & 0x80;
    const float size = fminf(fabsf(value), 448.f);
    const u32 bits = bits_of(size), normal = (bits + 0x7ffff + (bits >> 20 & 1) - (120u << 23)) >> 20;
    const u32 subnormal = bits_of(size + 0x1p14f) - bits_of(0x1p14f);  // steps of 2^-9
    return sign | (value != value ? 0x7f : size < 0x1p-6f ? subnormal : normal);
}

inline float flush(float value) { return fabsf(value) < 0x1p-126f ? value * 0.f : value; }
/* 2^x within 2 units of the last place; the device's is no better. */
inline float exp2_approx(float x) {
    const float clamped = x < -252.f ? -252.f : x > 252.f ? 252.f : x;
    const float whole = __builtin_rintf(clamped), r = clamped - whole;
    float y = 1.535336188e-4f;
    y = __builtin_fmaf(y, r, 1.339887440e-3f), y = __builtin_fmaf(y, r, 9.618437357e-3f), y = __builtin_fmaf(y, r, 5.550332471e-2f);
    y = __builtin_fmaf(y, r, 2.402264791e-1f), y = __builtin_fmaf(y, r, 6.931472028e-1f), y = __builtin_fmaf(y, r, 1.f);
    const i32 n = static_cast<i32>(whole), half = n / 2;
    y = y * float_of(static_cast<u32>(half + 127) << 23) * float_of(static_cast<u32>(n - half + 127) << 23);
    return x != x ? x : y;
}
}  // namespace ptx
