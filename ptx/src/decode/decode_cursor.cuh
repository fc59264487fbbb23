// The position of a CTA in its work chunk of the decode plan (DecodeWork).
#pragma once
#include "attend.cuh"

// A sequence's units begin at the first position that it sees.
struct WholeRows {
    static constexpr bool WHOLE = true;
    enum : u32 { EXTRA = DECODE_EXTRA };  // units without tokens
};
struct WholeFp8Rows : WholeRows {
    enum : u32 { EXTRA = DECODE_EXTRA_FP8 };
};
template <bool FP8> struct WholeRowsOf {
    using Type = WholeRows;
};
template <> struct WholeRowsOf<true> {
    using Type = WholeFp8Rows;
};

DEVICE DecodeWork load_work(u64 at) {
    const uint4 a = load_uint4(at), b = load_uint4(at + 16);
    return {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
}

// Returns whether draft trees have units. A type `Rows` may overload this function.
template <class Rows> DEVICE constexpr bool supports_trees(Rows) { return false; }

// A unit: its sequence, head, and index within the head. `Rows` determines where a sequence's units begin.
template <class Rows> struct DecodeCursor {
    enum : u32 { EXTRA = Rows::EXTRA };
    u32 index, row, qo_start, extend_len, kv_len;  // the sequence
    u32 start, units, first;                       // its first unit, the number of its units of one head, the first position that it sees
    u32 head, at, stop;                            // the segment: units at..stop of the stripe's `head`
    u32 unit, unit_end;                            // number of `at` in the stripe; end of this CTA's work chunk

    __device__ __forceinline__ void measure(const AttendParams& p) {
        const u32 position = kv_len > extend_len ? kv_len - extend_len : 0;
        if constexpr (Rows::WHOLE) first = p.window != 0 && position + 1 > p.window ? position + 1 - p.window : 0;
        else first = Rows::first(p, index);
        units = (kv_len - min(first, kv_len) + DECODE_UNIT - 1) / DECODE_UNIT + EXTRA;
    }
    // Moves to the first unit of a work chunk.
    __device__ __forceinline__ void begin(const AttendParams& p, const DecodeWork& work, u32 unit_begin) {
        index = work.batch_index, row = work.row, qo_start = work.qo_start;
        extend_len = work.extend_len, kv_len = work.kv_len;
        start = work.unit_start;
        unit = unit_begin, unit_end = work.unit_end;
        measure(p);
        head = (unit - start) / units, at = (unit - start) % units;
        open();
    }
    __device__ __forceinline__ void open() { stop = min(units, at + (unit_end - unit)); }
    // Moves to the next segment, or returns false at the end of the work chunk.
    template <u32 ROWS> __device__ __forceinline__ bool next(const AttendParams& p, u32 heads) {
        unit += stop - at;
        if (unit >= unit_end) return false;
        at = 0;
        if (++head == heads) {
            head = 0;
            start += units * heads;
            do {
                ++index;
                const uint4 r = load_uint4(p.batch_rows + 16ull * index);
                row = r.x, qo_start = r.y, extend_len = r.z, kv_len = r.w;
            } while (extend_len == 0 || extend_len * p.group > ROWS || (!supports_trees(Rows()) && row >= TREE_ROW));
            measure(p);
        }
        open();
        return true;
    }
    // Returns the first position that a warp reads, and the end of the segment's positions.
    __device__ __forceinline__ u32 begin_of(u32 warp) const { return first + at * DECODE_UNIT + warp * 16; }
    __device__ __forceinline__ u32 end() const { return min(kv_len, first + stop * DECODE_UNIT); }
};
