// copy_pages: copies whole pages, inside a pool, between pools of either layout, and to and from mapped swap memory.
// Twin:    src/backend/cpu copy_pages          (the specification)
// Params:  CopyPagesParams (src/common, src/backend/cuda/kernels/params/moves.rs)
// Shapes:  a page is pieces of piece_units units each, ordered by plane, then by lane; a launch copies pieces of one size
// Grid:    x = ceil(page_units / 1024), y = copies (at most COPY_PAGES_MAX), block 256; each thread moves up to 4 units
// Needs:   unit_bytes divides addresses, strides and pieces; sources and targets disjoint
// Build:   ptx/build.py
#include "move.cuh"

template <class Unit> DEVICE void copy_page(const CopyPagesParams& p) {
    const PageCopy copy = p.copies[blockIdx.y];
    const u64 source = p.source + copy.source * p.source_page_stride;
    const u64 target = p.target + copy.target * p.target_page_stride;
    const u32 first = blockIdx.x * 1024 + threadIdx.x;
    Unit units[4];
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        const u32 unit = first + i * 256;
        if (unit < p.page_units) {
            const u64 piece = divide(unit, p.piece_magic);
            load_unit(Streaming(), units[i], source + piece * p.source_piece_stride + (unit - piece * p.piece_units) * sizeof(Unit));
        }
    }
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        const u32 unit = first + i * 256;
        if (unit < p.page_units) {
            const u64 piece = divide(unit, p.piece_magic);
            store_unit(Streaming(), target + piece * p.target_piece_stride + (unit - piece * p.piece_units) * sizeof(Unit), units[i]);
        }
    }
}

extern "C" __global__ void __launch_bounds__(256) copy_pages(const __grid_constant__ CopyPagesParams params) {
    if (params.unit_bytes == 16) {
        copy_page<uint4>(params);
    } else if (params.unit_bytes == 4) {
        copy_page<u32>(params);
    } else {
        copy_page<u16>(params);
    }
}
