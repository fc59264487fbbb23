// The plan of attention over latent rows (src/backend/cuda/attention/split/latent.rs): the first item of each CTA, and their number; how many
// query rows an item has at most, 16, 32, 64 or 128; ExtendWork[..], 16-byte aligned. Items of 128 rows are those of pairs: the lists are
// of clusters then, and a cluster's CTAs have 64 rows of an item each.
#pragma once
#include "attend.cuh"

// Rows between a part's slots on Hopper where items have that many or fewer; those of pairs have two such places each.
#define LATENT_ROWS 64
#define LATENT_PAIR_ROWS 128

// Read where it is wanted, or else the compiler keeps it in a register that products want.
DEVICE u32 latent_ctas() {
    u32 count;
    asm volatile("mov.u32 %0, %%nctaid.x;" : "=r"(count));
    return count;
}
// The first item of a list, that of CTA or pair `list`, and that of the next.
DEVICE u32 latent_begin(const AttendParams& p, u32 list = blockIdx.x) { return load_u32(p.plan + list * 4ull); }
DEVICE u32 latent_end(const AttendParams& p, u32 list = blockIdx.x) { return load_u32(p.plan + list * 4ull + 4); }
DEVICE u32 latent_width(const AttendParams& p) { return load_u32(p.plan + (latent_ctas() + 1) * 4ull); }
DEVICE ExtendWork load_latent_work(const AttendParams& p, u32 index) {
    const u64 at = p.plan + ((latent_ctas() + 2) * 4 + 15 & ~15u) + sizeof(ExtendWork) * static_cast<u64>(index);
    const uint4 a = load_uint4(at), b = load_uint4(at + 16);
    return {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
}
