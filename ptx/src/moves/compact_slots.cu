// compact_slots: makes the kept slots of each row contiguous, in all layers of one plane, or of several planes of equal shape.
// Twin:    src/backend/cpu compact             (the specification)
// Params:  CompactSlotsParams (src/common, src/backend/cuda/kernels/params/moves.rs)
// Shapes:  layer l, page p, slot s, run r of a slot at pool + l * layer_stride + p * page_stride + s * slot_stride + r * run_stride
// Grid:    x = ceil(layers * runs * run_units / 256), y = compactions (at most COMPACTIONS_MAX)
// Needs:   unit_bytes divides addresses, strides and runs; rows distinct; places within the rows (checked on the host)
// Build:   ptx/build.py
#include "move.cuh"

// Number of slots that a thread loads before it stores them.
#define ABREAST 4

// A thread moves its bytes of every slot of a row, in order. The n-th kept slot moves to place n, from which no later slot is
// read. So the thread reads each place before it may write there.
template <class Unit> DEVICE void compact(const CompactSlotsParams& p) {
    const u32 unit = blockIdx.x * 256 + threadIdx.x;
    if (unit >= p.layers * p.runs * p.run_units) return;
    const u32 run = unit / p.run_units, layer = run / p.runs;
    const u64 of_layer = p.layer_table != 0 ? reinterpret_cast<const u64*>(p.layer_table)[layer] : p.pool + layer * p.layer_stride;
    const u64 base = of_layer + (run - layer * p.runs) * p.run_stride + (unit - run * p.run_units) * sizeof(Unit);
    const Compaction c = p.compactions[blockIdx.y];
    const u32* const words = reinterpret_cast<const u32*>(p.table);
    auto at = [&](u32 place) {
        const u32 page = place / p.page_size, leaf = page / p.leaf_pages;
        const u32 number = words[p.leaf_base + static_cast<u64>(words[c.row * p.leaves_per_row + leaf]) * p.leaf_pages + page % p.leaf_pages];
        return base + number * p.page_stride + place % p.page_size * p.slot_stride;
    };
    if (~c.keep == 0) return;
    // A kept prefix does not move.
    const u32 stay = __ffsll(static_cast<long long>(~c.keep)) - 1;
    u64 keep = c.keep >> stay << stay;
    for (u32 to = stay; keep != 0; to += ABREAST) {
        Unit units[ABREAST];
        u64 rest = keep;
#pragma unroll
        for (u32 i = 0; i < ABREAST; ++i) {
            // After the last slot, the first is read again and not stored.
            load_unit(Streaming(), units[i], at(c.first + __ffsll(static_cast<long long>(rest != 0 ? rest : keep)) - 1));
            rest &= rest - 1;
        }
#pragma unroll
        for (u32 i = 0; i < ABREAST; ++i) {
            if (keep != 0) store_unit(Streaming(), at(c.first + to + i), units[i]);
            keep &= keep - 1;
        }
    }
}

extern "C" __global__ void __launch_bounds__(256) compact_slots(const __grid_constant__ CompactSlotsParams params) {
    if (params.unit_bytes == 16) {
        compact<uint4>(params);
    } else if (params.unit_bytes == 4) {
        compact<u32>(params);
    } else {
        compact<u16>(params);
    }
}
