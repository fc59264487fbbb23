// Loads latent rows of fp8 for attend_latent.cuh. A row has RANK bytes, each to be multiplied by the token's scale, and ROPE
// numbers of bf16 in a plane of their own.
#pragma once
#include "attend_latent.cuh"
#include "e4m3.cuh"

struct CachedLatentFp8 {
    const AttendLatentFp8Params& p;
    __device__ __forceinline__ void load(const AttendParams& attend, const Look& look, u32 lane, float2 (&k)[PAIRS]) const {
        const u32 page = load_page(attend, look, load_directory(attend, look));
        const u64 from = attend.k + slot_offset(attend, look, page) + lane * 2;
        const u64 rope = p.rope.at + page * p.rope.page_stride + look.slot * static_cast<u64>(p.rope.slot_stride);
        const float scale = __uint_as_float(load_written_u32(p.scales.k + page * p.scales.page_stride + look.slot * 4));
#pragma unroll
        for (int i = 0; i < VALUES; ++i) {
            u32 bytes, low, high;
            asm volatile("ld.global.u16 %0, [%1];" : "=r"(bytes) : "l"(from + i * 64) : "memory");
            widen(bytes, low, high);
            k[i] = make_float2(low_half(low) * scale, high_half(low) * scale);
        }
#pragma unroll
        for (int i = VALUES; i < PAIRS; ++i) k[i] = load_pair(bf16(), rope, lane + (i - VALUES) * 32);
    }
};
