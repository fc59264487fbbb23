/* Instructions on integers, floats and predicates that each lane executes by itself. */
#include <tuple>
#include "forms.h"
#include "numbers.h"

namespace ptx {
namespace {
template <class T> void add_integers(Forms& forms, const std::string& u, const std::string& s, const std::string& b) {
    using S = std::make_signed_t<T>;
    constexpr u32 BITS = 8 * sizeof(T);
    for (const std::string& type : {u, s}) {
        forms.push_back(lanes("add." + type, [](T x, T y) { return T(x + y); }));
        forms.push_back(lanes("sub." + type, [](T x, T y) { return T(x - y); }));
        forms.push_back(lanes("mul.lo." + type, [](T x, T y) { return T(u64(x) * y); }));
        forms.push_back(lanes("mad.lo." + type, [](T x, T y, T z) { return T(u64(x) * y + z); }));
        forms.push_back(lanes("neg." + type, [](T x) { return T(-x); }));
    }
    // PTX does not define the result of a division by zero.
    forms.push_back(lanes("div." + u, [](T x, T y) { return y ? T(x / y) : T(~T(0)); }));
    forms.push_back(lanes("rem." + u, [](T x, T y) { return y ? T(x % y) : x; }));
    forms.push_back(lanes("div." + s, [](S x, S y) { return y == 0 || y == -1 ? S(-T(x)) : S(x / y); }));
    forms.push_back(lanes("rem." + s, [](S x, S y) { return y == 0 || y == -1 ? S(0) : S(x % y); }));
    forms.push_back(lanes("min." + u, [](T x, T y) { return x < y ? x : y; }));
    forms.push_back(lanes("max." + u, [](T x, T y) { return x > y ? x : y; }));
    forms.push_back(lanes("min." + s, [](S x, S y) { return x < y ? x : y; }));
    forms.push_back(lanes("max." + s, [](S x, S y) { return x > y ? x : y; }));
    forms.push_back(lanes("abs." + s, [](S x) { return x < 0 ? S(-T(x)) : x; }));
    forms.push_back(lanes("and." + b, [](T x, T y) { return T(x & y); }));
    forms.push_back(lanes("or." + b, [](T x, T y) { return T(x | y); }));
    forms.push_back(lanes("xor." + b, [](T x, T y) { return T(x ^ y); }));
    forms.push_back(lanes("not." + b, [](T x) { return T(~x); }));
    forms.push_back(lanes("shl." + b, [](T x, u32 n) { return n < BITS ? T(x << n) : T(0); }));
    for (const std::string& type : {u, b}) forms.push_back(lanes("shr." + type, [](T x, u32 n) { return n < BITS ? T(x >> n) : T(0); }));
    forms.push_back(lanes("shr." + s, [](S x, u32 n) { return S(x >> (n < BITS ? n : BITS - 1)); }));
    for (const std::string& type : {u, b}) {
        forms.push_back(compare("setp.lt." + type, [](T x, T y) { return x < y; }));
        forms.push_back(compare("setp.le." + type, [](T x, T y) { return x <= y; }));
        forms.push_back(compare("setp.gt." + type, [](T x, T y) { return x > y; }));
        forms.push_back(compare("setp.ge." + type, [](T x, T y) { return x >= y; }));
    }
    forms.push_back(compare("setp.lt." + s, [](S x, S y) { return x < y; }));
    forms.push_back(compare("setp.le." + s, [](S x, S y) { return x <= y; }));
    forms.push_back(compare("setp.gt." + s, [](S x, S y) { return x > y; }));
    forms.push_back(compare("setp.ge." + s, [](S x, S y) { return x >= y; }));
    for (const std::string& type : {u, s, b}) {
        forms.push_back(compare("setp.eq." + type, [](T x, T y) { return x == y; }));
        forms.push_back(compare("setp.ne." + type, [](T x, T y) { return x != y; }));
        forms.push_back(lanes("mov." + type, [](T x) { return x; }));
    }
}

/* Adds floating-point instructions. Unordered comparisons are true if an operand is NaN. */
template <class T> void add_floats(Forms& forms, const std::string& type) {
    for (const char* round : {"", "rn."}) {
        forms.push_back(lanes("add." + std::string(round) + type, [](T x, T y) { return x + y; }));
        forms.push_back(lanes("sub." + std::string(round) + type, [](T x, T y) { return x - y; }));
        forms.push_back(lanes("mul." + std::string(round) + type, [](T x, T y) { return x * y; }));
    }
    for (const std::string name : {"div.rn.", "div.approx.", "div.full."}) forms.push_back(lanes(name + type, [](T x, T y) { return x / y; }));
    forms.push_back(lanes("rcp.rn." + type, [](T x) { return T(1) / x; }));
    forms.push_back(lanes("sqrt.rn." + type, [](T x) { return T(sqrt(x)); }));
    forms.push_back(lanes("abs." + type, [](T x) { return T(fabs(x)); }));
    forms.push_back(lanes("neg." + type, [](T x) { return -x; }));
    forms.push_back(lanes("mov." + type, [](T x) { return x; }));
    forms.push_back(lanes("min." + type, [](T x, T y) { return x != x ? y : y != y || x < y ? x : y; }));
    forms.push_back(lanes("max." + type, [](T x, T y) { return x != x ? y : y != y || x > y ? x : y; }));
    forms.push_back(lanes("max.NaN." + type, [](T x, T y) { return x != x || y != y ? T(NAN) : x > y ? x : y; }));
    forms.push_back(lanes("min.NaN." + type, [](T x, T y) { return x != x || y != y ? T(NAN) : x < y ? x : y; }));
    forms.push_back(compare("setp.eq." + type, [](T x, T y) { return x == y; }));
    forms.push_back(compare("setp.ne." + type, [](T x, T y) { return x < y || x > y; }));
    forms.push_back(compare("setp.lt." + type, [](T x, T y) { return x < y; }));
    forms.push_back(compare("setp.le." + type, [](T x, T y) { return x <= y; }));
    forms.push_back(compare("setp.gt." + type, [](T x, T y) { return x > y; }));
    forms.push_back(compare("setp.ge." + type, [](T x, T y) { return x >= y; }));
    forms.push_back(compare("setp.equ." + type, [](T x, T y) { return !(x < y || x > y); }));
    forms.push_back(compare("setp.neu." + type, [](T x, T y) { return x != y; }));
    forms.push_back(compare("setp.ltu." + type, [](T x, T y) { return !(x >= y); }));
    forms.push_back(compare("setp.leu." + type, [](T x, T y) { return !(x > y); }));
    forms.push_back(compare("setp.gtu." + type, [](T x, T y) { return !(x <= y); }));
    forms.push_back(compare("setp.geu." + type, [](T x, T y) { return !(x < y); }));
    forms.push_back(compare("setp.num." + type, [](T x, T y) { return x == x && y == y; }));
    forms.push_back(compare("setp.nan." + type, [](T x, T y) { return x != x || y != y; }));
}

template <class T> Outcome select(Warp& warp, const Instruction& in) {
    const T *x = column<T>(warp, in.at[1]), *y = column<T>(warp, in.at[2]);
    const u32 which = warp.predicates[in.at[3]];
    each_lane(warp, column<T>(warp, in.at[0]), [=](u32 i) { return which >> i & 1 ? x[i] : y[i]; });
    return Outcome::NEXT;
}
template <auto F> Outcome predicates(Warp& warp, const Instruction& in) {
    const u32* p = warp.predicates;
    set_predicate(warp, in.at[0], F(p[in.at[1]], p[in.at[2]]));
    return Outcome::NEXT;
}
Outcome move_predicate(Warp& warp, const Instruction& in) { return set_predicate(warp, in.at[0], warp.predicates[in.at[1]]), Outcome::NEXT; }
Outcome not_predicate(Warp& warp, const Instruction& in) { return set_predicate(warp, in.at[0], ~warp.predicates[in.at[1]]), Outcome::NEXT; }

u32 permute(u32 x, u32 y, u32 which) {
    const u64 bytes = u64(y) << 32 | x;
    u32 result = 0;
    for (u32 i = 0; i < 4; ++i) {
        const u32 selected = which >> 4 * i & 15, byte = u32(bytes >> (selected & 7) * 8) & 255;
        result |= (selected & 8 ? (byte & 128 ? 255u : 0u) : byte) << 8 * i;
    }
    return result;
}
u32 reverse(u32 x) {
    x = (x >> 1 & 0x55555555) | (x & 0x55555555) << 1, x = (x >> 2 & 0x33333333) | (x & 0x33333333) << 2;
    x = (x >> 4 & 0x0f0f0f0f) | (x & 0x0f0f0f0f) << 4;
    return __builtin_bswap32(x);
}
u32 logic(u32 x, u32 y, u32 z, u32 table) {
    u32 result = 0;
    for (u32 i = 0; i < 8; ++i)
        if (table >> i & 1) result |= (i & 4 ? x : ~x) & (i & 2 ? y : ~y) & (i & 1 ? z : ~z);
    return result;
}
template <class T> T insert_bits(T x, T y, u32 at, u32 count) {
    at &= 255, count &= 255;
    const T mask = at >= 8 * sizeof(T) ? 0 : (count >= 8 * sizeof(T) ? ~T(0) : (T(1) << count) - 1) << at;
    return (y & ~mask) | (at >= 8 * sizeof(T) ? 0 : x << at & mask);
}
u32 two_halves(u32 x, u32 y, u32 z, bool with_sum) {
    auto one = [&](u32 shift) {
        const double product = double(half_to_float(x >> shift & 0xffff)) * half_to_float(y >> shift & 0xffff);
        return float_to_half(float(with_sum ? product + half_to_float(z >> shift & 0xffff) : product));
    };
    return one(0) | one(16) << 16;
}
float fma_down(float x, float y, float z) {
    const double exact = double(x) * y + z;
    const float nearest = float(exact);
    return nearest > exact ? nextafterf(nearest, -INFINITY) : nearest;
}
/* Returns the sum, rounded towards zero. A double must represent the sum exactly. */
float add_to_zero(float x, float y) {
    const double exact = double(x) + y;
    const float nearest = float(exact);
    return fabs(double(nearest)) > fabs(exact) ? nextafterf(nearest, 0) : nearest;
}
}  // namespace

void add_arithmetic(Forms& forms) {
    add_integers<u16>(forms, "u16", "s16", "b16");
    add_integers<u32>(forms, "u32", "s32", "b32");
    add_integers<u64>(forms, "u64", "s64", "b64");
    add_floats<float>(forms, "f32");
    add_floats<double>(forms, "f64");
    forms.insert(forms.end(), {
        lanes("mul.wide.u32", [](u32 x, u32 y) { return u64(x) * y; }),
        lanes("mul.wide.s32", [](i32 x, i32 y) { return i64(x) * y; }),
        lanes("mul.wide.u16", [](u16 x, u16 y) { return u32(x) * y; }),
        lanes("mad.wide.u32", [](u32 x, u32 y, u64 z) { return u64(x) * y + z; }),
        lanes("mad.wide.s32", [](i32 x, i32 y, i64 z) { return i64(u64(i64(x) * y) + u64(z)); }),
        lanes("mul.hi.u32", [](u32 x, u32 y) { return u32(u64(x) * y >> 32); }),
        lanes("mul.hi.u64", [](u64 x, u64 y) { return u64(static_cast<unsigned __int128>(x) * y >> 64); }),
        lanes("clz.b32", [](u32 x) { return u32(x ? __builtin_clz(x) : 32); }),
        lanes("clz.b64", [](u64 x) { return u32(x ? __builtin_clzll(x) : 64); }),
        lanes("popc.b32", [](u32 x) { return u32(__builtin_popcount(x)); }),
        lanes("popc.b64", [](u64 x) { return u32(__builtin_popcountll(x)); }),
        lanes("brev.b32", [](u32 x) { return reverse(x); }),
        lanes("brev.b64", [](u64 x) { return u64(reverse(u32(x))) << 32 | reverse(u32(x >> 32)); }),
        lanes("prmt.b32", [](u32 x, u32 y, u32 z) { return permute(x, y, z); }),
        lanes("lop3.b32", [](u32 x, u32 y, u32 z, u32 table) { return logic(x, y, z, table); }),
        lanes("bfi.b32", [](u32 x, u32 y, u32 at, u32 count) { return insert_bits(x, y, at, count); }),
        lanes("bfi.b64", [](u64 x, u64 y, u32 at, u32 count) { return insert_bits(x, y, at, count); }),
        lanes("shf.r.wrap.b32", [](u32 low, u32 high, u32 n) { return u32((u64(high) << 32 | low) >> (n & 31)); }),
        lanes("shf.l.wrap.b32", [](u32 low, u32 high, u32 n) { return u32((u64(high) << 32 | low) << (n & 31) >> 32); }),
        lanes("add.rz.f32", [](float x, float y) { return add_to_zero(x, y); }),
        lanes("fma.rn.f32", [](float x, float y, float z) { return __builtin_fmaf(x, y, z); }),
        lanes("fma.rm.f32", [](float x, float y, float z) { return fma_down(x, y, z); }),
        lanes("mul.rn.f16x2", [](u32 x, u32 y) { return two_halves(x, y, 0, false); }),
        lanes("fma.rn.f16x2", [](u32 x, u32 y, u32 z) { return two_halves(x, y, z, true); }),
        lanes("ex2.approx.ftz.f32", [](float x) { return flush(exp2_approx(flush(x))); }),
        lanes("ex2.approx.f32", [](float x) { return exp2_approx(x); }),
        lanes("lg2.approx.ftz.f32", [](float x) { return log2f(flush(x)); }),
        lanes("lg2.approx.f32", [](float x) { return log2f(x); }),
        lanes("rcp.approx.ftz.f32", [](float x) { return 1.f / flush(x); }),
        lanes("rsqrt.approx.f32", [](float x) { return 1.f / sqrtf(x); }),
        lanes("tanh.approx.f32", [](float x) { return tanhf(x); }),
        lanes("sin.approx.f32", [](float x) { return sinf(x); }),
        lanes("cos.approx.f32", [](float x) { return cosf(x); }),
        {"and.pred", "=p p p", predicates<[](u32 x, u32 y) { return x & y; }>},
        {"or.pred", "=p p p", predicates<[](u32 x, u32 y) { return x | y; }>},
        {"xor.pred", "=p p p", predicates<[](u32 x, u32 y) { return x ^ y; }>},
        {"not.pred", "=p p", not_predicate},
        {"mov.pred", "=p p", move_predicate},
    });
    for (const char* type : {"u16", "s16", "b16"}) forms.push_back({std::string("selp.") + type, "=2 2 2 p", select<u16>});
    for (const char* type : {"u32", "s32", "b32", "f32"}) forms.push_back({std::string("selp.") + type, "=4 4 4 p", select<u32>});
    for (const char* type : {"u64", "s64", "b64", "f64"}) forms.push_back({std::string("selp.") + type, "=8 8 8 p", select<u64>});
}
}  // namespace ptx
