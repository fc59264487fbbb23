// Shared by stores into pools of fp8: the place of a token's row, the scale of a head, and the store of a head by one
// warp.
#pragma once
#include "move.cuh"
#include "e4m3.cuh"

// Returns the slot of a token; negative: nothing is stored.
DEVICE long long load_slot(const StoreFp8Params& p, u32 token) {
    long long slot;
    if (p.slot_bytes == 4) {
        int narrow;
        asm volatile("ld.global.s32 %0, [%1];" : "=r"(narrow) : "l"(p.slots + 4ull * token));
        slot = narrow;
    } else {
        asm volatile("ld.global.s64 %0, [%1];" : "=l"(slot) : "l"(p.slots + 8ull * token));
    }
    return slot;
}

DEVICE u64 page_of(const StoreFp8Params& p, u64 slot) { return p.page_size == 1 ? slot : __umul64hi(slot, p.page_magic); }

// Byte offsets of a token: `row` in the pool of K or of V, `scale` of head 0 in the scales of K or of V.
struct Place {
    u64 row, scale;
};
DEVICE Place place(const StoreFp8Params& p, u64 slot) {
    const u64 page = page_of(p, slot), offset = slot - page * p.page_size;
    return {page * p.page_stride + offset * p.slot_stride, p.by_token ? page * p.scale_page_stride + offset * 4 : 0};
}
DEVICE float load_scale(u64 at) {
    float scale;
    asm volatile("ld.global.f32 %0, [%1];" : "=f"(scale) : "l"(at));
    return scale;
}
DEVICE void store_scale(u64 at, float scale) { asm volatile("st.global.f32 [%0], %1;" ::"l"(at), "f"(scale) : "memory"); }

DEVICE bool is_finite(float x) { return (__float_as_uint(x) & 0x7fffffff) < 0x7f800000; }
// Returns the scale of a head with this maximum of finite absolute values.
DEVICE float token_scale(float most) { return most == 0.f ? 1.f : fmaxf(__fdiv_rn(most, 448.f), __uint_as_float(0x00800000)); }

DEVICE float load_number(u32 rows, u64 row, u32 i) {
    if (rows == ROWS_F32) return load_scale(row + 4ull * i);
    u16 bits;
    load_unit(Direct(), bits, row + 2ull * i);
    return rows == ROWS_F16 ? low_half(bits) : __uint_as_float(static_cast<u32>(bits) << 16);
}
DEVICE void store_head(const StoreFp8Params& p, u64 from, u64 to, u64 scale_at) {
    const u32 lane = threadIdx.x % 32;
    float scale;
    if (p.by_token) {
        float most = 0.f;
        for (u32 i = lane; i < p.head_dim; i += 32) {
            const float x = load_number(p.rows, from, i);
            most = fmaxf(most, is_finite(x) ? fabsf(x) : 0.f);
        }
#pragma unroll
        for (int i = 16; i > 0; i /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, i));
        scale = token_scale(most);
        if (lane == 0) store_scale(scale_at, scale);
    } else {
        scale = load_scale(scale_at);
    }
    for (u32 i = lane; i < p.head_dim; i += 32) {
        const u32 byte = narrow(__fdiv_rn(load_number(p.rows, from, i), scale), 0.f);
        asm volatile("st.global.u8 [%0], %1;" ::"l"(to + i), "r"(byte) : "memory");
    }
}
