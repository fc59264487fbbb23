// The plan of attention over latent rows (src/backend/cuda/attention/split/latent.rs): the first item of each CTA, and the
// number of items; the maximum number of query rows of an item: 16, 32, 64 or 128; ExtendWork[..], 16-byte aligned. Items of
// 128 rows belong to pairs: the lists are then those of clusters, and each CTA of a cluster has 64 rows of an item.
#pragma once
#include "attend.cuh"

// Rows between a part's slots on Hopper, for items of so many or fewer rows; items of pairs have two such places each.
#define LATENT_ROWS 64
#define LATENT_PAIR_ROWS 128

// Read at each use, because the compiler would otherwise keep it in a register that products need.
DEVICE u32 latent_ctas() {
    u32 count;
    asm volatile("mov.u32 %0, %%nctaid.x;" : "=r"(count));
    return count;
}
// The first item of list `list`, of a CTA or a pair, and that of the next list.
DEVICE u32 latent_begin(const AttendParams& p, u32 list = blockIdx.x) { return load_u32(p.plan + list * 4ull); }
DEVICE u32 latent_end(const AttendParams& p, u32 list = blockIdx.x) { return load_u32(p.plan + list * 4ull + 4); }
DEVICE u32 latent_width(const AttendParams& p) { return load_u32(p.plan + (latent_ctas() + 1) * 4ull); }
DEVICE ExtendWork load_latent_work(const AttendParams& p, u32 index) {
    const u64 at = p.plan + ((latent_ctas() + 2) * 4 + 15 & ~15u) + sizeof(ExtendWork) * static_cast<u64>(index);
    const uint4 a = load_uint4(at), b = load_uint4(at + 16);
    return {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
}
