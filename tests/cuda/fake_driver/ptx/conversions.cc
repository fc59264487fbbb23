/* Conversions between types, and moves between a wide register and several narrow ones. */
#include <tuple>
#include "forms.h"
#include "numbers.h"

namespace ptx {
namespace {
/* Splits a wide register (mov.b64 {a, b}, c); `pack` joins narrow ones. A column contains the lanes in order. */
template <class Wide, class Narrow> Outcome unpack(Warp& warp, const Instruction& in) {
    constexpr u32 PARTS = sizeof(Wide) / sizeof(Narrow);
    const Wide* from = column<Wide>(warp, in.at[PARTS]);
    for (u32 part = 0; part < PARTS; ++part)
        each_lane(warp, column<Narrow>(warp, in.at[part]), [=](u32 i) { return Narrow(from[i] >> part * 8 * sizeof(Narrow)); });
    return Outcome::NEXT;
}
template <class Wide, class Narrow> Outcome pack(Warp& warp, const Instruction& in) {
    const Narrow *low = column<Narrow>(warp, in.at[1]), *high = column<Narrow>(warp, in.at[2]);
    each_lane(warp, column<Wide>(warp, in.at[0]), [=](u32 i) { return Wide(Wide(high[i]) << 8 * sizeof(Narrow) | low[i]); });
    return Outcome::NEXT;
}
}  // namespace

void add_conversions(Forms& forms) {
    forms.insert(forms.end(), {
        lanes("cvt.u64.u32", [](u32 x) { return u64(x); }),
        lanes("cvt.u32.u64", [](u64 x) { return u32(x); }),
        lanes("cvt.s64.s32", [](i32 x) { return i64(x); }),
        lanes("cvt.u64.s32", [](i32 x) { return i64(x); }),
        lanes("cvt.u16.u32", [](u32 x) { return u16(x); }),
        lanes("cvt.u32.u16", [](u16 x) { return u32(x); }),
        lanes("cvt.u64.u16", [](u16 x) { return u64(x); }),
        lanes("cvt.s32.s16", [](i16 x) { return i32(x); }),
        lanes("cvt.u16.u8", [](u16 x) { return u16(x & 255); }),
        lanes("cvt.rn.f32.s32", [](i32 x) { return float(x); }),
        lanes("cvt.rn.f32.u32", [](u32 x) { return float(x); }),
        lanes("cvt.rn.f32.u64", [](u64 x) { return float(x); }),
        lanes("cvt.rn.f64.u64", [](u64 x) { return double(x); }),
        lanes("cvt.rn.f64.s64", [](i64 x) { return double(x); }),
        lanes("cvt.rn.f32.f64", [](double x) { return float(x); }),
        lanes("cvt.f64.f32", [](float x) { return double(x); }),
        lanes("cvt.rni.s32.f32", [](float x) { return x != x ? 0 : x < -0x1p31f ? i32(0x80000000) : x >= 0x1p31f ? 0x7fffffff : i32(rintf(x)); }),
        lanes("cvt.rzi.s32.f32", [](float x) { return x != x ? 0 : x < -0x1p31f ? i32(0x80000000) : x >= 0x1p31f ? 0x7fffffff : i32(x); }),
        lanes("cvt.rzi.u32.f32", [](float x) { return !(x > 0) ? 0u : x >= 0x1p32f ? ~0u : u32(x); }),
        lanes("cvt.rzi.u64.f32", [](float x) { return !(x > 0) ? u64(0) : x >= 0x1p64f ? ~u64(0) : u64(x); }),
        lanes("cvt.rzi.u64.f64", [](double x) { return !(x > 0) ? u64(0) : x >= 0x1p64 ? ~u64(0) : u64(x); }),
        lanes("cvt.rni.f32.f32", [](float x) { return rintf(x); }),
        lanes("cvt.rmi.f32.f32", [](float x) { return floorf(x); }),
        lanes("cvt.sat.f32.f32", [](float x) { return x > 0.f ? x < 1.f ? x : 1.f : 0.f; }),
        lanes("cvt.f32.f16", [](u16 x) { return half_to_float(x); }),
        lanes("cvt.f32.bf16", [](u16 x) { return bf16_to_float(x); }),
        lanes("cvt.rn.f16.f32", [](float x) { return u16(float_to_half(x)); }),
        lanes("cvt.rn.bf16.f32", [](float x) { return u16(float_to_bf16(x)); }),
        // The first of two operands becomes the upper half.
        lanes("cvt.rn.f16x2.f32", [](float high, float low) { return float_to_half(high) << 16 | float_to_half(low); }),
        lanes("cvt.rn.bf16x2.f32", [](float high, float low) { return float_to_bf16(high) << 16 | float_to_bf16(low); }),
        lanes("cvt.rn.f16x2.e4m3x2", [](u16 x) { return e4m3_to_half(x >> 8) << 16 | e4m3_to_half(x & 255); }),
        lanes("cvt.rn.satfinite.e4m3x2.f32", [](float high, float low) { return u16(float_to_e4m3(high) << 8 | float_to_e4m3(low)); }),
        lanes("cvta.to.global.u64", [](u64 x) { return x; }),
        lanes("cvta.param.u64", [](u64 x) { return x; }),
        lanes("cvta.to.shared.u64", [](u64 x) { return x; }),
        {"mov.b64 {}", "=4*2 8", unpack<u64, u32>},
        {"mov.b32 {}", "=2*2 4", unpack<u32, u16>},
        {"mov.b64 = {}", "=8 4*2", pack<u64, u32>},
        {"mov.b32 = {}", "=4 2*2", pack<u32, u16>},
    });
}
}  // namespace ptx
