// copy_heads: copies whole pages head by head, between memories whose planes have their own addresses and strides: from or to a
// pool in memory of the host.
// Twin:    src/backend/cpu copy_pages          (the specification)
// Params:  CopyHeadsParams (src/common, src/backend/cuda/kernels/params/moves.rs)
// Shapes:  a page is pieces of [slots, heads, head_units] units of 16 bytes
// Grid:    x = ceil(page_units / 1024), y = copies (at most COPY_PAGES_MAX), block 256; each thread moves up to 4 units
// Needs:   addresses, strides and heads are multiples of 16 bytes; sources and targets disjoint
// Build:   ptx/build.py
#include "move.cuh"

// Returns the address of a unit of a page.
DEVICE u64 address_of(const CopyHeadsParams& p, const HeadPlaces& of, u32 page, u32 unit) {
    const u32 piece = unit / p.piece_units, in_piece = unit - piece * p.piece_units;
    const u32 slot = in_piece / p.slot_units, in_slot = in_piece - slot * p.slot_units;
    const u32 head = in_slot / p.head_units, in_head = in_slot - head * p.head_units;
    const u64 base = of.table != 0 ? reinterpret_cast<const u64*>(of.table)[piece] : of.address + piece * of.piece_stride;
    return base + page * of.page_stride + slot * of.slot_stride + head * of.head_stride + in_head * 16ull;
}

extern "C" __global__ void __launch_bounds__(256) copy_heads(const __grid_constant__ CopyHeadsParams params) {
    const PageCopy copy = params.copies[blockIdx.y];
    const u32 first = blockIdx.x * 1024 + threadIdx.x;
    uint4 units[4];
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        const u32 unit = first + i * 256;
        if (unit < params.page_units) load_unit(Streaming(), units[i], address_of(params, params.source, copy.source, unit));
    }
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        const u32 unit = first + i * 256;
        if (unit < params.page_units) store_unit(Streaming(), address_of(params, params.target, copy.target, unit), units[i]);
    }
}
