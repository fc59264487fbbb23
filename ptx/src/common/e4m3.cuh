// Conversions of fp8 E4M3. Widening is exact; narrowing is the same as in src/backend/cpu/e4m3.rs, bit for bit.
//
// In PTX ISA 8.0, the conversion instructions of E4M3 need compute capability 9.0. PTX for capability 8.0 contains two
// versions of each conversion. One uses the instructions; its lines are comments that start with `// sm_90: `. The
// other does not use them; its lines end with `// sm_80`. src/backend/cuda/kernels/marks.rs selects one of the two.
#pragma once
#include "params.cuh"

#define DEVICE static __device__ __forceinline__

struct bf16;
struct f16;

// Widens four bytes to f16: `low` has the two low bytes, `high` the others.
DEVICE void widen(u32 bytes, u32& low, u32& high) {
#if __CUDA_ARCH__ >= 900
    asm("{ .reg .b16 a, b; mov.b32 {a, b}, %2; cvt.rn.f16x2.e4m3x2 %0, a; cvt.rn.f16x2.e4m3x2 %1, b; }" : "=r"(low), "=r"(high) : "r"(bytes));
#else
    // Sign, exponent and mantissa are shifted to their places in f16, which yields 2^-8 of the number. E4M3 encodes NaN
    // as the bits of 480. Only these bits make `z` infinite, so that `z * 0 + m` is NaN.
    asm("{ .reg .b16 a, b; .reg .b32 m, s, z, c, d, e;\n"
        "// sm_90: mov.b32 {a, b}, %2;\n"
        "// sm_90: cvt.rn.f16x2.e4m3x2 %0, a;\n"
        "// sm_90: cvt.rn.f16x2.e4m3x2 %1, b;\n"
        "mov.b32 c, 0x78607860; mov.b32 d, 0x5c005c00; mov.b32 e, 0; // sm_80\n"
        "prmt.b32 m, %2, 0, 0x1404; and.b32 s, m, 0x80008000; shr.u32 m, m, 1; // sm_80\n"
        "lop3.b32 m, m, 0x3f803f80, s, 0xea; mul.rn.f16x2 z, m, c; mul.rn.f16x2 m, m, d; fma.rn.f16x2 %0, z, e, m; // sm_80\n"
        "prmt.b32 m, %2, 0, 0x3424; and.b32 s, m, 0x80008000; shr.u32 m, m, 1; // sm_80\n"
        "lop3.b32 m, m, 0x3f803f80, s, 0xea; mul.rn.f16x2 z, m, c; mul.rn.f16x2 m, m, d; fma.rn.f16x2 %1, z, e, m; // sm_80\n"
        "}" : "=&r"(low), "=&r"(high) : "r"(bytes));
#endif
}

DEVICE float low_half(u32 two) {
    float x;
    asm("{ .reg .b16 a, b; mov.b32 {a, b}, %1; cvt.f32.f16 %0, a; }" : "=f"(x) : "r"(two));
    return x;
}
DEVICE float high_half(u32 two) {
    float x;
    asm("{ .reg .b16 a, b; mov.b32 {a, b}, %1; cvt.f32.f16 %0, b; }" : "=f"(x) : "r"(two));
    return x;
}

// Returns the byte of a number, computed as on the CPU.
DEVICE u32 narrow_one(float x) {
    const u32 bits = __float_as_uint(x), sign = bits >> 24 & 0x80, size = bits & 0x7fffffff;
    if (size > 0x7f800000) return 0x7f;
    const u32 most = min(size, 0x43e00000u);  // 448
    const u32 normal = ((most + 0x7ffff + (most >> 20 & 1)) >> 20) - (120 << 3);
    // Numbers below 2^-6 become multiples of 2^-9. From 2^14 on, f32 numbers are 2^-9 apart, so adding 2^14 rounds.
    const u32 subnormal = __float_as_uint(__fadd_rn(__uint_as_float(most), 16384.f)) - 0x46800000;
    return sign | (most < 0x3c800000 ? subnormal : normal);
}
// Returns the bytes of two numbers, the first in the low byte.
DEVICE u32 narrow(float first, float second) {
    u32 native, bytes;
    asm("mov.u32 %0, 0; // sm_80\n"
        "// sm_90: mov.u32 %0, 1;" : "=r"(native));
    if (!native) return narrow_one(first) | narrow_one(second) << 8;
    asm("{ .reg .b16 a;\n"
        "// sm_90: cvt.rn.satfinite.e4m3x2.f32 a, %2, %1;\n"
        "mov.b16 a, 0; // sm_80\n"
        "cvt.u32.u16 %0, a; }" : "=r"(bytes) : "f"(first), "f"(second));
    return bytes;
}
