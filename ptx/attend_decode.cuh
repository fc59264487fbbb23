// Decode attention over pages: few query rows against many tokens, bound by memory.
//
// The units of all sequences stand in one line for each lane of heads (see DecodeWork) and each CTA has an equal stretch of
// it. Within a stretch the tokens of one (sequence, kv head) are a segment. Warps take the segment's tiles of 16 tokens in turn; each warp
// feeds a ring of its own in shared memory, which runs on across segments, so that the memory never waits for the end of
// a sequence. A segment ends with the warps' sums joined; if the (sequence, head) is spread over several CTAs, each leaves
// its sum in `partial`, and the last to arrive joins them.
#pragma once
#include "attend.cuh"

// A place in the line of units: which sequence, which head, which of its units.
struct DecodeCursor {
    u32 index, row, qo_start, extend_len, kv_len;  // the sequence
    u32 start, units, first;                       // its first unit, its units of one head, the first position it sees
    u32 head, at, stop;                            // the segment: units at..stop of the lane's `head`
    u32 unit, unit_end;                            // global number of `at`; end of this CTA's stretch

    __device__ __forceinline__ void measure(const AttendParams& p) {
        const u32 position = kv_len > extend_len ? kv_len - extend_len : 0;
        first = p.window != 0 && position + 1 > p.window ? position + 1 - p.window : 0;
        units = max(1u, (kv_len - min(first, kv_len) + DECODE_UNIT - 1) / DECODE_UNIT);
    }
    __device__ __forceinline__ void open() { stop = min(units, at + (unit_end - unit)); }
    // The next segment, or false at the end of the stretch.
    __device__ __forceinline__ bool next(const AttendParams& p, u32 heads) {
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
            } while (extend_len == 0 || extend_len * p.group > DECODE_ROWS);
            measure(p);
        }
        open();
        return true;
    }
    // The segment's positions for one warp.
    __device__ __forceinline__ u32 begin_of(u32 warp) const { return first + at * DECODE_UNIT + warp * 16; }
    __device__ __forceinline__ u32 end() const { return min(kv_len, first + stop * DECODE_UNIT); }
};

template <class T, int D, int WARPS, int STAGES> struct Decode {
    static constexpr int CHUNKS = D / 8;           // 16-byte pieces of a row
    static constexpr int ROW = D * 2;              // bytes
    static constexpr int HALF = 16 * ROW;          // K (or V) of a tile
    static constexpr int SLOT = 2 * HALF;          // also 16 rows of D floats
    static constexpr int STEP = 16 * WARPS;        // tokens between one warp's tiles
    static constexpr int TOKENS_PER_COPY = 32 / CHUNKS;
    static constexpr bool Q_SHARED = D > 128;      // where registers do not hold the query fragments

    struct Shared {
        float2 sums[WARPS][16];  // of each warp and row: greatest logit, sum
        u32 slots[WARPS];        // where each warp left its output sum
        u32 last;
        alignas(Q_SHARED ? 512 : 16) u8 q[Q_SHARED ? 16 * ROW : 16];  // the segment's query rows, swizzled
    };

    // A tile whose copy is still to be issued.
    struct Tile {
        bool some;   // false past the end of the stretch
        bool valid;  // this lane's token exists
        u32 head;
        Look look;
    };

    const AttendParams& p;
    Shared& shared;
    u32 ring;  // this warp's
    const u32 warp, lane;
    u32 lanes, heads, per;  // of the plan: lanes, heads of each, units of each CTA
    DecodeCursor fetch;
    u32 fetch_at, fetch_end;
    bool fetch_more;

    __device__ __forceinline__ Decode(const AttendParams& p, Shared& shared, u32 ring)
        : p(p), shared(shared), ring(ring), warp(threadIdx.x / 32), lane(threadIdx.x % 32) {}

    __device__ __forceinline__ u32 head_of(const DecodeCursor& c) const { return c.head * lanes + blockIdx.x % lanes; }

    __device__ __forceinline__ Tile next_tile() {
        while (fetch_more && fetch_at >= fetch_end) {
            fetch_more = fetch.next(p, heads);
            fetch_at = fetch.begin_of(warp), fetch_end = fetch.end();
        }
        Tile tile;
        tile.some = fetch_more;
        const u32 position = fetch_at + lane % 16;
        tile.valid = fetch_more && position < fetch_end;
        tile.head = head_of(fetch);
        tile.look = look_up(p, fetch.row, position);
        fetch_at += STEP;
        return tile;
    }
    __device__ __forceinline__ u32 directory(const Tile& tile) { return tile.valid ? load_directory(p, tile.look) : 0; }
    __device__ __forceinline__ u32 page(const Tile& tile, u32 chunk) { return tile.valid ? load_page(p, tile.look, chunk) : 0; }

    __device__ __forceinline__ void copy_tile(const Tile& tile, u32 page, u32 slot) {
        if (tile.some) {
            const u64 mine = slot_offset(p, tile.look, page);
            const u64 base = tile.head * p.head_stride + (lane % CHUNKS) * 16;
            const u64 k = p.k + base, v = p.v + base;
            const u32 valid = __ballot_sync(~0u, tile.valid);
            const u32 at = ring + slot * SLOT + (lane / CHUNKS) * ROW;
#pragma unroll
            for (int i = 0; i < 16 / TOKENS_PER_COPY; ++i) {
                const u32 token = i * TOKENS_PER_COPY + lane / CHUNKS;
                const u64 offset = __shfl_sync(~0u, mine, token);
                const u32 to = at + i * TOKENS_PER_COPY * ROW + ((lane % CHUNKS ^ token % 8) * 16);
                const bool is = valid >> token & 1;
                copy16(to, k + offset, is);
                copy16(to + HALF, v + offset, is);
            }
        }
        copy_commit();
    }

    __device__ __forceinline__ void run(const DecodeWork& work) {
        const u32 group = p.group;
        lanes = work.lanes, heads = p.kv_heads / lanes, per = work.units_per_cta;
        DecodeCursor c;
        c.index = work.batch_index, c.row = work.row, c.qo_start = work.qo_start;
        c.extend_len = work.extend_len, c.kv_len = work.kv_len;
        c.start = work.unit_start;
        c.unit = work.unit_begin, c.unit_end = work.unit_end;
        c.measure(p);
        c.head = (c.unit - c.start) / c.units, c.at = (c.unit - c.start) % c.units;
        c.open();

        // The first tiles, their look-ups side by side.
        fetch = c, fetch_at = c.begin_of(warp), fetch_end = c.end(), fetch_more = true;
        Tile pending_page, pending_directory;  // their words are being loaded
        u32 page_word, directory_word;
        {
            Tile tiles[STAGES];
            u32 words[STAGES];
#pragma unroll
            for (int i = 0; i < STAGES; ++i) tiles[i] = next_tile(), words[i] = directory(tiles[i]);
            pending_page = next_tile(), page_word = directory(pending_page);
#pragma unroll
            for (int i = 0; i < STAGES; ++i) words[i] = page(tiles[i], words[i]);
            page_word = page(pending_page, page_word);
            pending_directory = next_tile(), directory_word = directory(pending_directory);
#pragma unroll
            for (int i = 0; i < STAGES; ++i) copy_tile(tiles[i], words[i], i);
        }
        auto refill = [&](u32 slot) {
            copy_tile(pending_page, page_word, slot);
            pending_page = pending_directory, page_word = page(pending_directory, directory_word);
            pending_directory = next_tile(), directory_word = directory(pending_directory);
        };

        const Logits logits = Logits::make(p);
        // This thread's two rows of the score and output fragments, and their queries.
        const u32 row0 = lane / 4, row1 = row0 + 8;
        const u32 query0 = row0 / group, query1 = row1 / group;
        const u32 column = lane % 4 * 2;
        // ldmatrix addresses in a slot: K as it stands, V transposed; pieces are swizzled by token % 8.
        const u32 k_lane = (lane / 16 * 8 + lane % 8) * ROW + ((lane / 8 % 2) ^ lane % 8) * 16;
        const u32 v_lane = HALF + (lane / 8 % 2 * 8 + lane % 8) * ROW + ((lane / 16) ^ lane % 8) * 16;
        const u32 q_lane = shared_address(shared.q) + lane % 16 * ROW + ((lane / 16) ^ lane % 8) * 16;

        u32 slot = 0;
        do {
            const u32 rows = c.extend_len * group;
            const u64 q_head = p.q + head_of(c) * group * ROW;
            u32 q[Q_SHARED ? 1 : D / 16][4];
            if constexpr (Q_SHARED) {
                for (u32 i = threadIdx.x; i < 16 * CHUNKS; i += WARPS * 32) {
                    const u32 row = i / CHUNKS, piece = i % CHUNKS, query = row / group;
                    const u64 from = q_head + (c.qo_start + query) * p.q_stride + (row - query * group) * ROW + piece * 16;
                    reinterpret_cast<uint4*>(shared.q)[row * CHUNKS + (piece ^ row % 8)] = row < rows ? load_uint4(from) : make_uint4(0, 0, 0, 0);
                }
                __syncthreads();
            } else {
                const u64 q0 = q_head + (c.qo_start + query0) * p.q_stride + (row0 - query0 * group) * ROW + column * 2;
                const u64 q1 = q_head + (c.qo_start + query1) * p.q_stride + (row1 - query1 * group) * ROW + column * 2;
#pragma unroll
                for (int k = 0; k < D / 16; ++k) {
                    q[k][0] = row0 < rows ? load_u32(q0 + k * 32) : 0;
                    q[k][1] = row1 < rows ? load_u32(q1 + k * 32) : 0;
                    q[k][2] = row0 < rows ? load_u32(q0 + k * 32 + 16) : 0;
                    q[k][3] = row1 < rows ? load_u32(q1 + k * 32 + 16) : 0;
                }
            }
            float o[D / 8][4];
#pragma unroll
            for (int n = 0; n < D / 8; ++n) o[n][0] = o[n][1] = o[n][2] = o[n][3] = 0.f;
            float max0 = MINUS_INF, max1 = MINUS_INF, sum0 = 0.f, sum1 = 0.f;

            const u32 end = c.end();
            const u32 position0 = c.kv_len - c.extend_len;  // of the first query; no tile where kv_len is 0
            u32 at = c.begin_of(warp);
            const bool some = at < end;
            while (at < end) {
                copy_wait<STAGES - 1>();
                __syncwarp();
                const u32 base = ring + slot * SLOT;

                float s[2][4] = {};
#pragma unroll
                for (int k = 0; k < D / 16; ++k) {
                    u32 b[4];
                    load_matrix(b, base + (k_lane ^ (k * 32)));
                    if constexpr (Q_SHARED) load_matrix(q[0], q_lane ^ (k * 32));
                    mma(T(), s[0], q[Q_SHARED ? 0 : k], b[0], b[1]);
                    mma(T(), s[1], q[Q_SHARED ? 0 : k], b[2], b[3]);
                }
                if (logits.cap > 0.f) {
#pragma unroll
                    for (int i = 0; i < 8; ++i) s[i / 4][i % 4] = logits.capped(s[i / 4][i % 4]);
                } else {
#pragma unroll
                    for (int i = 0; i < 8; ++i) s[i / 4][i % 4] *= logits.scale;
                }
                if (at + 15 > position0 || p.window != 0) {
#pragma unroll
                    for (int i = 0; i < 8; ++i) {
                        const u32 token = at + i / 4 * 8 + column + i % 2;
                        const u32 query = position0 + (i % 4 < 2 ? query0 : query1);
                        if (token > query || token >= c.kv_len || (p.window != 0 && token + p.window <= query))
                            s[i / 4][i % 4] = MINUS_INF;
                    }
                }
                float new0 = fmaxf(fmaxf(s[0][0], s[0][1]), fmaxf(s[1][0], s[1][1]));
                float new1 = fmaxf(fmaxf(s[0][2], s[0][3]), fmaxf(s[1][2], s[1][3]));
                new0 = fmaxf(new0, __shfl_xor_sync(~0u, new0, 1));
                new1 = fmaxf(new1, __shfl_xor_sync(~0u, new1, 1));
                new0 = fmaxf(max0, fmaxf(new0, __shfl_xor_sync(~0u, new0, 2)));
                new1 = fmaxf(max1, fmaxf(new1, __shfl_xor_sync(~0u, new1, 2)));
                // A row that has seen nothing yet keeps minus infinity, and must not subtract it from itself.
                const float from0 = new0 == MINUS_INF ? 0.f : new0, from1 = new1 == MINUS_INF ? 0.f : new1;
                if (__any_sync(~0u, new0 > max0 || new1 > max1)) {
                    const float scale0 = exp2_fast(max0 - from0), scale1 = exp2_fast(max1 - from1);
                    sum0 *= scale0, sum1 *= scale1, max0 = new0, max1 = new1;
#pragma unroll
                    for (int n = 0; n < D / 8; ++n) o[n][0] *= scale0, o[n][1] *= scale0, o[n][2] *= scale1, o[n][3] *= scale1;
                }
#pragma unroll
                for (int n = 0; n < 2; ++n) {
                    s[n][0] = exp2_fast(s[n][0] - from0), s[n][1] = exp2_fast(s[n][1] - from0);
                    s[n][2] = exp2_fast(s[n][2] - from1), s[n][3] = exp2_fast(s[n][3] - from1);
                    sum0 += s[n][0] + s[n][1], sum1 += s[n][2] + s[n][3];
                }
                const u32 a[4] = {pack(T(), s[0][0], s[0][1]), pack(T(), s[0][2], s[0][3]), pack(T(), s[1][0], s[1][1]),
                                  pack(T(), s[1][2], s[1][3])};
#pragma unroll
                for (int n = 0; n < D / 16; ++n) {
                    u32 b[4];
                    load_matrix_transposed(b, base + (v_lane ^ (n * 32)));
                    mma(T(), o[2 * n], a, b[0], b[1]);
                    mma(T(), o[2 * n + 1], a, b[2], b[3]);
                }
                __syncwarp();
                at += STEP;
                if (at < end) {
                    refill(slot);
                    slot = slot + 1 == STAGES ? 0 : slot + 1;
                }
            }

            // The segment's end: the warp's last slot, not yet refilled, takes its output sum.
            sum0 += __shfl_xor_sync(~0u, sum0, 1);
            sum1 += __shfl_xor_sync(~0u, sum1, 1);
            sum0 += __shfl_xor_sync(~0u, sum0, 2);
            sum1 += __shfl_xor_sync(~0u, sum1, 2);
            if (some) {
                const u32 base = ring + slot * SLOT;
#pragma unroll
                for (int n = 0; n < D / 8; ++n) {
                    // Pairs of floats, swizzled by row so that the eight rows of a store meet different banks.
                    const u32 to = base + (((n * 4 + lane % 4) ^ (row0 % 8 * 4)) * 8);
                    if (row0 < rows)
                        asm volatile("st.shared.v2.f32 [%0], {%1,%2};" ::"r"(to + row0 * D * 4), "f"(o[n][0]), "f"(o[n][1]) : "memory");
                    if (row1 < rows)
                        asm volatile("st.shared.v2.f32 [%0], {%1,%2};" ::"r"(to + row1 * D * 4), "f"(o[n][2]), "f"(o[n][3]) : "memory");
                }
                if (lane == 0) shared.slots[warp] = base;
            }
            if (lane % 4 == 0) {
                shared.sums[warp][row0] = make_float2(max0, sum0);
                shared.sums[warp][row1] = make_float2(max1, sum1);
            }
            __syncthreads();
            finish(c, rows);
            __syncthreads();
            if (some) {
                refill(slot);
                slot = slot + 1 == STAGES ? 0 : slot + 1;
            }
        } while (c.next(p, heads));
        copy_wait<0>();
    }

    // Joins the warps' sums and writes the result, or this CTA's part of it.
    __device__ __forceinline__ void finish(const DecodeCursor& c, u32 rows) {
        const u32 begin = c.start + c.head * c.units;
        const u32 first = begin / per, parts = (begin + c.units - 1) / per - first + 1;  // the stretches it lies in
        const bool whole = parts == 1;
        const u32 first_cta = first * lanes + blockIdx.x % lanes;
        const u32 own = blockIdx.x == first_cta ? 2 * blockIdx.x + 1 : 2 * blockIdx.x;
        float* const outputs = reinterpret_cast<float*>(p.partial);
        float* const sums = outputs + 2ull * gridDim.x * 16 * D;
        for (u32 i = threadIdx.x; i < rows * (D / 4); i += WARPS * 32) {
            const u32 r = i / (D / 4), four = i % (D / 4);
            float top = MINUS_INF;
#pragma unroll
            for (int w = 0; w < WARPS; ++w) top = fmaxf(top, shared.sums[w][r].x);
            float sum = 0.f;
            float4 o = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
            for (int w = 0; w < WARPS; ++w) {
                const float2 of = shared.sums[w][r];
                if (of.x == MINUS_INF) continue;
                const float scale = exp2_fast(of.x - top);
                float4 x;
                asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];"
                             : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                             : "r"(shared.slots[w] + r * D * 4 + (four ^ (r % 8 * 2)) * 16));
                sum += of.y * scale;
                o.x += x.x * scale, o.y += x.y * scale, o.z += x.z * scale, o.w += x.w * scale;
            }
            if (whole) {
                write(c, r, four * 4, o, top, sum);
            } else {
                *reinterpret_cast<float4*>(outputs + (own * 16ull + r) * D + four * 4) = o;
                if (four == 0) *reinterpret_cast<float2*>(sums + (own * 16ull + r) * 2) = make_float2(top, sum);
            }
        }
        if (whole) return;
        __syncthreads();
        if (threadIdx.x == 0) {
            __threadfence();
            shared.last = arrive_last(reinterpret_cast<u32*>(p.counters) + first_cta, parts);
            __threadfence();
        }
        __syncthreads();
        if (!shared.last) return;
        for (u32 r = warp; r < rows; r += WARPS) join(c, r, outputs, sums, first_cta, parts);
    }

    // One warp joins the parts of one row.
    __device__ __forceinline__ void join(const DecodeCursor& c, u32 r, const float* outputs, const float* sums, u32 first_cta, u32 parts) {
        auto slot_of = [&](u32 part) { return part == 0 ? 2 * first_cta + 1 : 2 * (first_cta + part * lanes); };
        constexpr int WIDTH = D >= 128 ? 4 : 2;       // columns a lane loads at once: lane * WIDTH + 32 * WIDTH * i
        constexpr int PIECES = D / (32 * WIDTH);
        constexpr int BATCH = 16 / PIECES;            // parts whose loads are in flight together
        float top = MINUS_INF, sum = 0.f;
        float o[PIECES][WIDTH] = {};
        for (u32 from = 0; from < parts; from += BATCH) {
            float x[BATCH][PIECES][WIDTH];
            float2 of = make_float2(MINUS_INF, 0.f);
            if (lane < BATCH && from + lane < parts) of = load_float2_shared(sums + (slot_of(from + lane) * 16ull + r) * 2);
#pragma unroll
            for (int j = 0; j < BATCH; ++j) {
                const float* const row = outputs + (slot_of(min(from + j, parts - 1)) * 16ull + r) * D + lane * WIDTH;
#pragma unroll
                for (int i = 0; i < PIECES; ++i) {
                    if constexpr (WIDTH == 4) {
                        const float4 y = load_float4_shared(row + 32 * WIDTH * i);
                        x[j][i][0] = y.x, x[j][i][1] = y.y, x[j][i][2] = y.z, x[j][i][3] = y.w;
                    } else {
                        const float2 y = load_float2_shared(row + 32 * WIDTH * i);
                        x[j][i][0] = y.x, x[j][i][1] = y.y;
                    }
                }
            }
            float above = fmaxf(top, of.x);
#pragma unroll
            for (int i = 16; i > 0; i /= 2) above = fmaxf(above, __shfl_xor_sync(~0u, above, i));
            const float base = above == MINUS_INF ? 0.f : above;
            const float old = exp2_fast(top - base), scale = exp2_fast(of.x - base);
            float more = of.y * scale;
#pragma unroll
            for (int i = 16; i > 0; i /= 2) more += __shfl_xor_sync(~0u, more, i);
            sum = sum * old + more, top = above;
#pragma unroll
            for (int i = 0; i < PIECES; ++i)
#pragma unroll
                for (int k = 0; k < WIDTH; ++k) o[i][k] *= old;
#pragma unroll
            for (int j = 0; j < BATCH; ++j) {
                const float factor = __shfl_sync(~0u, scale, j);  // 0 past the last part
#pragma unroll
                for (int i = 0; i < PIECES; ++i)
#pragma unroll
                    for (int k = 0; k < WIDTH; ++k) o[i][k] += x[j][i][k] * factor;
            }
        }
        const float inverse = sum > 0.f ? 1.f / sum : 0.f;
        const u32 query = r / p.group;
        const u64 token = c.qo_start + query, head = head_of(c) * p.group + (r - query * p.group);
        const u64 to = p.out + token * p.out_stride + head * ROW + lane * WIDTH * 2;
#pragma unroll
        for (int i = 0; i < PIECES; ++i) {
#pragma unroll
            for (int k = 0; k < WIDTH; k += 2)
                store_u32(to + 64 * WIDTH * i + 2 * k, pack(T(), o[i][k] * inverse, o[i][k + 1] * inverse));
        }
        if (lane == 0 && p.lse != 0) store_float(p.lse + (token * p.q_heads + head) * 4, sum > 0.f ? (top + log2_fast(sum)) * LN_2 : MINUS_INF);
    }

    // Four columns of a finished row.
    __device__ __forceinline__ void write(const DecodeCursor& c, u32 r, u32 column, const float4& o, float top, float sum) {
        const float inverse = sum > 0.f ? 1.f / sum : 0.f;
        const u32 query = r / p.group;
        const u64 token = c.qo_start + query, head = head_of(c) * p.group + (r - query * p.group);
        store_uint2(p.out + token * p.out_stride + head * ROW + column * 2, pack(T(), o.x * inverse, o.y * inverse),
                    pack(T(), o.z * inverse, o.w * inverse));
        if (column == 0 && p.lse != 0) store_float(p.lse + (token * p.q_heads + head) * 4, sum > 0.f ? (top + log2_fast(sum)) * LN_2 : MINUS_INF);
    }
};

template <class T, int D, int WARPS, int STAGES> DEVICE void attend_decode(const AttendParams& p) {
    extern __shared__ __align__(1024) u8 ring[];
    __shared__ typename Decode<T, D, WARPS, STAGES>::Shared shared;
    const u64 at = p.plan + sizeof(DecodeWork) * blockIdx.x;
    const uint4 a = load_uint4(at), b = load_uint4(at + 16), c = load_uint4(at + 32);
    const DecodeWork work = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w, c.x, c.y};
    if (work.unit_begin >= work.unit_end) return;
    const u32 own = shared_address(ring) + threadIdx.x / 32 * STAGES * Decode<T, D, WARPS, STAGES>::SLOT;
    Decode<T, D, WARPS, STAGES>(p, shared, own).run(work);
}
