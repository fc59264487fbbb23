// score_labels_DTYPE: computes keys for the rows with lists. A key is a u32; keys have the order of their scores. Each
// kv head has a key for each position that the row's new token sees, except the token's own position.
// DTYPE:   bf16 or f16; each has its own text and entry point
// Twin:    src/backend/cpu/labels.rs score, order (the specification, bit by bit)
// Params:  SelectParams (src/common, src/backend/cuda/kernels/params/sparse.rs); positions, listed, counts, gathered unused
// Shapes:  q [tokens, q_heads, head_dim]; channels u32 [kv_heads, channel_count]; labels as K, channel_count wide; keys: see SelectParams
// Grid:    x = kv_heads or more (warps share positions and heads)
// Needs:   q 2-byte aligned; channel_count up to 256; labels 2-byte aligned. Rows past key_chunks are skipped
// Build:   ptx/build.py
#include "select.cuh"

// A piece is 32 positions. Each warp processes a run of pieces for a few kv heads: a lane scores one position of each piece, and
// holds the summed queries of all these heads. If labels have 16 or 32 channels and 16-byte alignment, they are copied to shared
// memory a few pieces ahead, 128 consecutive bytes of each token. Loads into registers instead would touch one cache line in each
// lane, and reach only a third of the memory bandwidth (measured on an H200).
constexpr u32 PIECE = 32, PIECES = SCORE_TOKENS / PIECE;
constexpr u32 STAGES = 4;
constexpr u32 UNITS = 8;  // 16-byte units that a warp's heads have of each token
constexpr u32 STAGE_BYTES = PIECE * UNITS * 16;
constexpr u32 NO_SLOT = ~0u;

// A warp's shared memory.
struct Own {
    char stages[STAGES][STAGE_BYTES];  // unit u of token t is in place u ^ t % 8, so that lanes' tokens are in different banks
    float queries[UNITS * 8];
    u32 pages[STAGES][PIECE], slots[STAGES][PIECE];  // of pieces to copy; NO_SLOT: nothing to copy
};

static_assert(4 * sizeof(Own) == 70656);

DEVICE float load_number(u64 at) {
    u16 bits;
    asm volatile("ld.global.u16 %0, [%1];" : "=h"(bits) : "l"(at));
    return widen(DTYPE(), bits);
}
// Loads a channel number; the compiler may combine several loads.
DEVICE u32 load_channel(u64 at) {
    u32 channel;
    asm("ld.global.nc.u32 %0, [%1];" : "=r"(channel) : "l"(at));
    return channel;
}
DEVICE uint4 load_shared_uint4(u32 at) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at) : "memory");
    return v;
}

// Returns a number of the same order as the score: 0 and -0 are equal, and NaN is below all others.
DEVICE u32 order(float score) {
    const int bits = __float_as_int(__fadd_rn(score, 0.f));
    return score != score ? 0 : bits ^ (bits >> 31 | 1 << 31);
}

// A piece, counted over all rows, and its row.
struct Cursor {
    u32 number, index;
    u32 begin, end;  // pieces of the row
    Seeing row;      // a row past key_chunks sees nothing

    // Creates a cursor at an existing piece. The piece belongs to the last row that begins at it or before it. Earlier rows that
    // begin at the same piece are empty.
    static __device__ __forceinline__ Cursor make(const SelectParams& params, u32 number) {
        u32 begun = 0;
#pragma unroll 4
        for (u32 i = threadIdx.x % 32; i < params.attend.batch; i += 32) begun += load_u32(params.starts + 4ull * i) <= number / PIECES;
        Cursor cursor = {number, __reduce_add_sync(~0u, begun) - 1, 0, 0, {}};
        cursor.read_row(params);
        return cursor;
    }
    __device__ __forceinline__ void read_row(const SelectParams& params) {
        const Chunks chunks = chunks_of(params, index);
        begin = chunks.begin * PIECES, end = chunks.end * PIECES;
        row = seeing(params.attend, index);
        if (chunks.end > params.key_chunks) row.own = row.first;
    }
    // Moves to the next piece before `last`, if there is one; returns whether it belongs to another row.
    __device__ __forceinline__ bool next(const SelectParams& params, u32 last) {
        if (++number >= last || number < end) return false;
        do {
            ++index;
        } while (load_u32(params.starts + 4ull * index + 4) * PIECES <= number);
        read_row(params);
        return true;
    }
    // Position of this lane, and whether its row sees it.
    __device__ __forceinline__ u32 position() const { return (number - begin) * PIECE + threadIdx.x % 32; }
    __device__ __forceinline__ bool sees(u32 position) const { return position >= row.first && position < row.own; }
    // Returns whether the row sees any position of the piece.
    __device__ __forceinline__ bool some() const {
        const u32 from = (number - begin) * PIECE;
        return max(from, row.first) < min(from + PIECE, row.own);
    }
};

// The kv heads that a warp scores.
struct Heads {
    u32 first, count;
};

// Begins to look up the pages of a piece, if the piece exists. Lanes with an invisible position look up a visible one.
DEVICE void look_ahead(const AttendParams& p, const Cursor& at, u32 last, Own& own, u32 stage) {
    const u32 lane = threadIdx.x % 32;
    u32 slot = NO_SLOT;
    if (at.number < last && at.some()) {
        const Look found = look_up(p, at.row.row, min(max(at.position(), at.row.first), at.row.own - 1));
        const u64 page = p.table + 4 * (p.leaf_base + static_cast<u64>(load_directory(p, found)) * p.leaf_pages + found.in_leaf);
        copy4(shared_address(&own.pages[stage][lane]), page, true);
        slot = found.slot;
    }
    own.slots[stage][lane] = slot;
}

// Begins to copy the labels of a piece whose pages are known.
template <u32 EIGHTS> DEVICE void copy_labels(const AttendParams& p, const Heads& heads, Own& own, u32 stage) {
    const u32 lane = threadIdx.x % 32, slot = own.slots[stage][lane], unit = lane % UNITS, head = unit / EIGHTS;
    if (__shfl_sync(~0u, slot, 0) == NO_SLOT) return;
    const u64 labels = p.k + own.pages[stage][lane] * p.page_stride + slot * p.slot_stride;
    const u64 in_row = (heads.first + head) * p.head_stride + unit % EIGHTS * 16;
    const u32 to = shared_address(own.stages[stage]);
#pragma unroll
    for (u32 i = 0; i < PIECE; i += 32 / UNITS) {
        const u32 token = i + lane / UNITS;
        copy16_once(to + token * (UNITS * 16) + (unit ^ token % 8) * 16, __shfl_sync(~0u, labels, token) + in_row, head < heads.count);
    }
}

// For each kv head, sums the queries of its group in the channels of its labels: [heads, channel_count]. Loads of q depend only on
// the load of a channel number, not on each other.
DEVICE void sum_queries(const SelectParams& params, u64 row, const Heads& heads, float* queries) {
    const AttendParams& p = params.attend;
    const u32 count = params.channel_count;
    __syncwarp();
#pragma unroll 2
    for (u32 i = threadIdx.x % 32; i < heads.count * count; i += 32) {
        const u32 head = heads.first + i / count, channel = load_channel(params.channels + 4ull * (heads.first * count + i));
        float sum = 0.f;
        for (u32 of = 0; of < p.group; of += 4) {
            float some[4];
#pragma unroll
            for (u32 j = 0; j < 4; ++j) some[j] = of + j < p.group ? load_number(row + 2ull * ((head * p.group + of + j) * params.head_dim + channel)) : 0.f;
#pragma unroll
            for (u32 j = 0; j < 4; ++j)
                if (of + j < p.group) sum = __fadd_rn(sum, some[j]);
        }
        queries[i] = sum;
    }
    __syncwarp();
}

// The address of the key of this lane's position, for the warp's first head, and the distance in bytes to the next head's key.
struct Keys {
    u64 first, stride;
    static __device__ __forceinline__ Keys make(const SelectParams& params, const Cursor& at, const Heads& heads) {
        const Chunks chunks = {at.begin / PIECES, at.end / PIECES};
        Keys keys = {keys_of(params, chunks, heads.first) + 4ull * at.position(), 4ull * SCORE_TOKENS * (chunks.end - chunks.begin)};
        // Otherwise the compiler multiplies again for each head and piece.
        asm volatile("" : "+l"(keys.first), "+l"(keys.stride));
        return keys;
    }
};

// Products are added in the order of channels.
template <u32 EIGHTS> DEVICE void score_staged(const Keys& keys, const Heads& heads, bool seen, const float (&queries)[UNITS * 8], u32 staged) {
    const u32 lane = threadIdx.x % 32, row = staged + lane * (UNITS * 16) + lane % 8 * 16;
    u64 key = keys.first;
#pragma unroll
    for (u32 head = 0; head < UNITS / EIGHTS; ++head) {
        float score = 0.f;
#pragma unroll
        for (u32 unit = head * EIGHTS; unit < (head + 1) * EIGHTS; ++unit) {
            const uint4 words = load_shared_uint4(row ^ unit * 16);
            const u32 pairs[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
            for (u32 i = 0; i < 4; ++i) {
                score = __fmaf_rn(queries[unit * 8 + i * 2], widen(DTYPE(), pairs[i] & 0xffff), score);
                score = __fmaf_rn(queries[unit * 8 + i * 2 + 1], widen(DTYPE(), pairs[i] >> 16), score);
            }
        }
        if (seen && head < heads.count) store_u32(key, order(score));
        key += keys.stride;
    }
}

// Scores a lane's position with labels from global memory.
DEVICE void score_read(const SelectParams& params, const Cursor& at, const Keys& keys, const Heads& heads, const float* queries) {
    const AttendParams& p = params.attend;
    if (!at.sees(at.position())) return;
    const Look found = look_up(p, at.row.row, at.position());
    const u64 labels = p.k + slot_offset(p, found, load_page(p, found, load_directory(p, found)));
    for (u32 head = 0; head < heads.count; ++head) {
        const u64 from = labels + (heads.first + head) * p.head_stride;
        float score = 0.f;
        for (u32 i = 0; i < params.channel_count; ++i) score = __fmaf_rn(queries[head * params.channel_count + i], load_number(from + 2ull * i), score);
        store_u32(keys.first + head * keys.stride, order(score));
    }
}

// The work of a warp: pieces begin..end, for some kv heads.
struct Run {
    u32 begin, end;
    Heads heads;
    static __device__ __forceinline__ Run make(const SelectParams& params, u32 heads) {
        const u32 warp = blockIdx.x * 4 + threadIdx.x / 32, warps = gridDim.x * 4, kv_heads = params.attend.kv_heads;
        const u32 parts = (kv_heads + heads - 1) / heads, runs = warps / parts, run = warp / parts, first = warp % parts * heads;
        const u32 all = PIECES * min(load_u32(params.starts + 4ull * params.attend.batch), params.key_chunks);
        const u32 per = (all + runs - 1) / runs;
        return {min(all, run * per), min(all, (run + 1) * per), {first, min(heads, kv_heads - first)}};
    }
};

// Looks up the pages of the next piece, and moves to the one after it.
DEVICE void look_next(const SelectParams& params, const Run& run, Cursor& ahead, Own& own, u32 stage) {
    look_ahead(params.attend, ahead, run.end, own, stage);
    ahead.next(params, run.end);
}

// EIGHTS is the number of channels of a head's labels, divided by 8. The labels of a piece are copied while the three
// pieces before it are processed. Its pages are looked up three pieces before its labels are copied. The caller has
// looked up the pages of the first three pieces.
template <u32 EIGHTS> DEVICE void score_copied(const SelectParams& params, const Run& run, Cursor& at, Cursor& ahead, Own& own) {
    const AttendParams& p = params.attend;
    copy_wait<0>();
    auto copy_next = [&](u32 stage) {
        copy_labels<EIGHTS>(p, run.heads, own, stage);
        look_next(params, run, ahead, own, (stage + STAGES - 1) % STAGES);
        copy_commit();
    };
#pragma unroll 1
    for (u32 stage = 0; stage < STAGES - 1; ++stage) copy_next(stage);
    float queries[UNITS * 8];
    Keys keys = {};
    bool other_row = true;
    for (u32 stage = 0; at.number < run.end; stage = (stage + 1) % STAGES) {
        if (other_row) {
            sum_queries(params, p.q + at.row.qo_start * p.q_stride, run.heads, own.queries);
#pragma unroll
            for (u32 i = 0; i < UNITS * 8; ++i) queries[i] = own.queries[i];
            keys = Keys::make(params, at, run.heads);
        }
        copy_wait<STAGES - 2>();
        // Each lane has copied its part of this piece, and read its part of the previous one, whose stage is now overwritten.
        __syncwarp();
        copy_next((stage + STAGES - 1) % STAGES);
        if (at.some()) score_staged<EIGHTS>(keys, run.heads, at.sees(at.position()), queries, shared_address(own.stages[stage]));
        other_row = at.next(params, run.end);
        keys.first += 4 * PIECE;
    }
}

// Scores labels of any number of channels, without copying them to shared memory.
DEVICE void score_in_place(const SelectParams& params, const Run& run, Cursor& at, float* queries) {
    const AttendParams& p = params.attend;
    for (bool other_row = true; at.number < run.end; other_row = at.next(params, run.end)) {
        if (other_row) sum_queries(params, p.q + at.row.qo_start * p.q_stride, run.heads, queries);
        score_read(params, at, Keys::make(params, at, run.heads), run.heads, queries);
    }
}

extern "C" __global__ void __launch_bounds__(128, 3) score_labels_DTYPE(const __grid_constant__ SelectParams params) {
    extern __shared__ __align__(128) char shared[];
    Own& own = reinterpret_cast<Own*>(shared)[threadIdx.x / 32];
    const AttendParams& p = params.attend;
    let_next_start();
    const bool whole = ((p.k | p.page_stride | p.slot_stride | p.head_stride) & 15) == 0, copied = whole && (params.channel_count == 16 || params.channel_count == 32);
    const Run run = Run::make(params, copied && params.channel_count == 32 ? 2 : 4);
    if (run.begin == run.end) return wait_for_previous();
    Cursor at = Cursor::make(params, run.begin), ahead = at;
    if (copied) {
#pragma unroll 1
        for (u32 stage = 0; stage < STAGES - 1; ++stage) look_next(params, run, ahead, own, stage);
        copy_commit();
    }
    wait_for_previous();
    if (!copied) score_in_place(params, run, at, reinterpret_cast<float*>(own.stages));
    else if (params.channel_count == 32) score_copied<4>(params, run, at, ahead, own);
    else score_copied<2>(params, run, at, ahead, own);
}
