// Shared by the kernels that move bytes: loads and stores of one unit (16, 4 or 2 bytes), and division by a constant.
#pragma once
#include "move_params.cuh"

#define DEVICE static __device__ __forceinline__

// Two ways to move a unit of 16 bytes; smaller units ignore the way. `Direct` is faster for few bytes. `Streaming` is
// faster for many; its bytes are evicted first from the caches. For one row, plain loads take 10 % longer than the
// volatile loads of `Direct`.
struct Direct {};
struct Streaming {};

DEVICE void load_unit(Direct, uint4& v, u64 at) {
    asm volatile("ld.volatile.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at));
}
DEVICE void load_unit(Streaming, uint4& v, u64 at) {
    asm volatile("ld.global.cs.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at));
}
template <class Way> DEVICE void load_unit(Way, u32& v, u64 at) {
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(v) : "l"(at));
}
template <class Way> DEVICE void load_unit(Way, u16& v, u64 at) {
    asm volatile("ld.global.u16 %0, [%1];" : "=h"(v) : "l"(at));
}

DEVICE void store_unit(Direct, u64 at, const uint4& v) {
    asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
DEVICE void store_unit(Streaming, u64 at, const uint4& v) {
    asm volatile("st.global.cs.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
template <class Way> DEVICE void store_unit(Way, u64 at, const u32& v) {
    asm volatile("st.global.u32 [%0], %1;" ::"l"(at), "r"(v) : "memory");
}
template <class Way> DEVICE void store_unit(Way, u64 at, const u16& v) {
    asm volatile("st.global.u16 [%0], %1;" ::"l"(at), "h"(v) : "memory");
}

// n / d, given magic = ceil(2^64 / d); magic 0 means d = 1. Exact for n * d < 2^64.
DEVICE u64 divide(u64 n, u64 magic) { return magic == 0 ? n : __umul64hi(n, magic); }
