// Definitions that the kernels of a selection share: the rows with lists, and the positions that these rows see.
#pragma once
#include "pdl.cuh"
#include "attend.cuh"

DEVICE float widen(bf16, u32 bits) { return __int_as_float(bits << 16); }
DEVICE float widen(f16, u32 bits) {
    float x;
    asm("{ .reg .b16 h; cvt.u16.u32 h, %1; cvt.f32.f16 %0, h; }" : "=f"(x) : "r"(bits));
    return x;
}

// A row of the batch. If `lists` is set, the row has one new token, at position `own`. This token sees the positions
// from `first` to `own`, both included.
struct Seeing {
    u32 row, qo_start;
    u32 first, own;
    bool lists;
};
DEVICE Seeing seeing(const AttendParams& p, u32 index) {
    const uint4 r = load_uint4(p.batch_rows + 16ull * index);
    const u32 own = r.w - 1, first = p.window != 0 && r.w > p.window ? r.w - p.window : 0;
    return {r.x, r.y, first, own, r.w > 0 && r.z == 1 && r.x < TREE_ROW};
}

// The chunks of SCORE_TOKENS keys of a row: from `begin` on, before `end`, counted over all rows. A row without lists
// has none.
struct Chunks {
    u32 begin, end;
};
DEVICE Chunks chunks_of(const SelectParams& p, u32 index) {
    return {load_u32(p.starts + 4ull * index), load_u32(p.starts + 4ull * index + 4)};
}
// Returns the address of a row's keys for one head: an array of u32. The key of position i is at index i.
DEVICE u64 keys_of(const SelectParams& p, const Chunks& chunks, u32 head) {
    return p.keys + 4ull * SCORE_TOKENS * (static_cast<u64>(chunks.begin) * p.attend.kv_heads + static_cast<u64>(head) * (chunks.end - chunks.begin));
}

// Returns the number of lower lanes in a ballot.
DEVICE u32 before(u32 ballot, u32 lane) { return __popc(ballot & ((1u << lane) - 1)); }
