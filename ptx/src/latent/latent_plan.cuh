// The plan of attention over latent rows (src/backend/cuda/attention/split/latent.rs). It consists of the index of the first item
// of each CTA's list, the number of items, the maximum number of query rows of an item (16, 32, 64 or 128), and ExtendWork[..],
// 16-byte aligned. If items have 128 rows, the two CTAs of a cluster (a pair) share an item, with 64 rows each. Then the lists
// belong to pairs.
#pragma once
#include "attend.cuh"

// On Hopper, a slot (memory for the sums of a part) has this number of rows. An item outside pairs has at most as many.
// A part of a pair's item has two slots.
#define LATENT_ROWS 64
#define LATENT_PAIR_ROWS 128

// Returns the number of CTAs, read again at each use. Otherwise the compiler would keep it in a register that products need.
DEVICE u32 latent_ctas() {
    u32 count;
    asm volatile("mov.u32 %0, %%nctaid.x;" : "=r"(count));
    return count;
}
// Return the index of the first item of list `list`, which belongs to a CTA or a pair, and that of the next list.
DEVICE u32 latent_begin(const AttendParams& p, u32 list = blockIdx.x) { return load_u32(p.plan + list * 4ull); }
DEVICE u32 latent_end(const AttendParams& p, u32 list = blockIdx.x) { return load_u32(p.plan + list * 4ull + 4); }
DEVICE u32 latent_width(const AttendParams& p) { return load_u32(p.plan + (latent_ctas() + 1) * 4ull); }
DEVICE ExtendWork load_latent_work(const AttendParams& p, u32 index) {
    const u64 at = p.plan + ((latent_ctas() + 2) * 4 + 15 & ~15u) + sizeof(ExtendWork) * static_cast<u64>(index);
    const uint4 a = load_uint4(at), b = load_uint4(at + 16);
    return {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
}
