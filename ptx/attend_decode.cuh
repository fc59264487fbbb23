// Decode attention over pages: few query rows against many tokens, bound by memory.
//
// The units of all sequences stand in one line for each lane of heads (see DecodeWork) and each CTA has an equal stretch of
// it. Within a stretch the tokens of one (sequence, kv head) are a segment. Warps take the segment's tiles of 16 tokens in turn;
// each warp feeds a ring of its own in shared memory, which runs on across segments, so that the memory never waits for the end
// of a sequence. At a segment's end warp 0 joins the warps' sums while the others go on. If the (sequence, head) is spread over
// several CTAs, each leaves its sum in `partial`; when a CTA is done with its stretch it says so, and the last to arrive joins
// the parts.
#pragma once
#include "attend.cuh"
#include "chain.cuh"

// A place in the line of units: which sequence, which head, which of its units.
struct DecodeCursor {
    u32 index, row, qo_start, extend_len, kv_len;  // the sequence
    u32 start, units, first;                       // its first unit, its units of one head, the first position it sees
    u32 head, at, stop;                            // the segment: units at..stop of the lane's `head`
    u32 unit, unit_end;                            // global number of `at`; end of this CTA's stretch

    __device__ __forceinline__ void measure(const AttendParams& p) {
        const u32 position = kv_len > extend_len ? kv_len - extend_len : 0;
        first = p.window != 0 && position + 1 > p.window ? position + 1 - p.window : 0;
        units = (kv_len - min(first, kv_len) + DECODE_UNIT - 1) / DECODE_UNIT + DECODE_EXTRA;
    }
    __device__ __forceinline__ void open() { stop = min(units, at + (unit_end - unit)); }
    // The next segment, or false at the end of the stretch.
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
            } while (extend_len == 0 || extend_len * p.group > ROWS);
            measure(p);
        }
        open();
        return true;
    }
    // The segment's positions for one warp.
    __device__ __forceinline__ u32 begin_of(u32 warp) const { return first + at * DECODE_UNIT + warp * 16; }
    __device__ __forceinline__ u32 end() const { return min(kv_len, first + stop * DECODE_UNIT); }
};

// The products are made transposed, tokens by query rows: scores = K * Q^T, output^T = V^T * weights^T. So the tokens fill
// the tensor core's 16 rows, and query rows take columns by eights: NT is 1 for up to 8 rows, 2 for up to 16.
template <class T, int D, int NT, int WARPS, int STAGES> struct Decode {
    static constexpr int CHUNKS = D / 8;           // 16-byte pieces of a row
    static constexpr int ROW = D * 2;              // bytes
    static constexpr int HALF = 16 * ROW;          // K (or V) of a tile
    static constexpr int SLOT = 2 * HALF;          // also 16 rows of D floats
    static constexpr int STEP = 16 * WARPS;        // tokens between one warp's tiles
    static constexpr int TOKENS_PER_COPY = 32 / CHUNKS;
    static constexpr int ROWS = 8 * NT;
    static constexpr bool Q_SHARED = D * NT > 256; // where registers do not hold the query fragments

    static constexpr int FRAGMENTS = NT * (D / 16);  // of a warp's output sum, 16 bytes a lane each
    static constexpr int SUM = FRAGMENTS * 512;      // bytes of such a sum
    static constexpr int BYTES = WARPS * STAGES * SLOT + (WARPS - 1) * SUM;  // dynamic shared memory

    // A segment of which this CTA has a part only.
    struct Pending {
        u32 parts;      // 0: none
        u32 first_cta;  // the CTA with the first part
        u32 qo_start, rows, head;
    };
    struct Shared {
        float4 tops[WARPS - 1][NT][4];  // of each warp but the first: what its sums are relative to, and the weights' sums
        Pending pending[2];             // at the stretch's begin, at its end
        u32 pages[WARPS][STAGES][16];   // of each warp's tiles
        alignas(Q_SHARED ? 512 : 16) u8 q[Q_SHARED ? ROWS * ROW : 16];  // the segment's query rows, swizzled
    };

    // A tile whose copy is still to be issued. `rest`, of this lane's token: its slot in the page, VALID if it exists, SOME if
    // the tile does, and from bit 16 on the tile's head.
    struct Tile {
        u32 rest, directory, in_chunk;
    };
    static constexpr u32 VALID = 1 << 8, SOME = 1 << 9, HEAD = 16;

    const AttendParams& p;
    Shared& shared;
    u32 ring;   // this warp's
    u32 sums;   // the other warps' output sums, warp 1's first
    u32 pages;  // this warp's page numbers on their way
    const u32 warp, lane;
    u32 lanes, heads, per;  // of the plan: lanes, heads of each, units of each CTA
    DecodeCursor fetch;
    u32 fetch_at, fetch_end;
    bool fetch_more;
    __device__ __forceinline__ Decode(const AttendParams& p, Shared& shared, u32 memory)
        : p(p), shared(shared), ring(memory + threadIdx.x / 32 * STAGES * SLOT), sums(memory + WARPS * STAGES * SLOT),
          pages(shared_address(shared.pages[threadIdx.x / 32])), warp(threadIdx.x / 32), lane(threadIdx.x % 32) {}

    __device__ __forceinline__ u32 head_of(const DecodeCursor& c) const { return c.head * lanes + blockIdx.x % lanes; }

    __device__ __forceinline__ Tile next_tile() {
        while (fetch_more && fetch_at >= fetch_end) {
            fetch_more = fetch.next<ROWS>(p, heads);
            fetch_at = fetch.begin_of(warp), fetch_end = fetch.end();
        }
        const u32 position = fetch_at + lane % 16;
        const bool valid = fetch_more && position < fetch_end;
        const Look look = look_up(p, fetch.row, position);
        const u32 rest = look.slot + (valid ? VALID : 0) + (fetch_more ? SOME : 0) + (head_of(fetch) << HEAD);
        const Tile tile = {rest, valid ? load_directory(p, look) : 0, look.in_chunk};
        fetch_at += STEP;
        return tile;
    }
    __device__ __forceinline__ u64 page_at(const Tile& tile) const {
        return p.table + 4 * (p.chunk_base + static_cast<u64>(tile.directory) * p.chunk_pages + tile.in_chunk);
    }
    // The tile's page numbers, on their way to shared memory with the copies of an earlier tile.
    __device__ __forceinline__ void copy_pages(const Tile& tile, u32 turn) {
        if (lane < 16) copy4(pages + turn * 64 + lane * 4, page_at(tile), (tile.rest & VALID) != 0);
    }
    __device__ __forceinline__ u32 copied_page(u32 turn) const {
        u32 page;
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(page) : "r"(pages + turn * 64 + lane % 16 * 4) : "memory");
        return page;
    }

    __device__ __forceinline__ void copy_tile(u32 rest, u32 page, u32 slot) {
        if (rest & SOME) {
            const u64 mine = page * p.page_stride + rest % VALID * p.slot_stride;
            const u64 base = (rest >> HEAD) * p.head_stride + (lane % CHUNKS) * 16;
            const u64 k = p.k + base, v = p.v + base;
            const u32 valid = __ballot_sync(~0u, (rest & VALID) != 0);
            const u32 at = ring + slot * SLOT + (lane / CHUNKS) * ROW;
#pragma unroll(Q_SHARED ? 2 : 16)
            for (int i = 0; i < 16 / TOKENS_PER_COPY; ++i) {
                const u32 token = i * TOKENS_PER_COPY + lane / CHUNKS;
                const u64 offset = __shfl_sync(~0u, mine, token);
                const u32 to = at + i * TOKENS_PER_COPY * ROW + ((lane % CHUNKS ^ token % 8) * 16);
                const bool is = valid >> token & 1;
                copy16_once(to, k + offset, is);
                copy16_once(to + HALF, v + offset, is);
            }
        }
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

        // The first tiles, their look-ups side by side. Page numbers travel with the copies of the tile STAGES before theirs, so
        // that they are there when the ring comes to them, and a directory word is loaded a tile before it is needed.
        fetch = c, fetch_at = c.begin_of(warp), fetch_end = c.end(), fetch_more = true;
        u32 rest[STAGES];  // of the tiles whose page numbers are on their way
        Tile next;
        {
            Tile tiles[2 * STAGES];
            u32 words[STAGES];
#pragma unroll
            for (int i = 0; i < 2 * STAGES; ++i) tiles[i] = next_tile();
#pragma unroll
            for (int i = 0; i < STAGES; ++i) words[i] = tiles[i].rest & VALID ? load_u32(page_at(tiles[i])) : 0;
            next = next_tile();
#pragma unroll
            for (int i = 0; i < STAGES; ++i) {
                copy_tile(tiles[i].rest, words[i], i);
                copy_pages(tiles[STAGES + i], i);
                copy_commit();
                rest[i] = tiles[STAGES + i].rest;
            }
        }
        auto refill = [&](u32 slot) {
            copy_tile(rest[0], copied_page(slot), slot);
            __syncwarp();
            copy_pages(next, slot);
            copy_commit();
#pragma unroll
            for (int i = 1; i < STAGES; ++i) rest[i - 1] = rest[i];
            rest[STAGES - 1] = next.rest;
            next = next_tile();
        };

        const Logits logits = Logits::make(p);
        // In a score fragment this thread has tokens lane / 4 and lane / 4 + 8, query rows column and column + 1.
        const u32 column = lane % 4 * 2;
        // ldmatrix addresses in a slot: K as it stands, V transposed; pieces are swizzled by token % 8.
        const u32 k_lane = lane % 16 * ROW + ((lane / 16) ^ lane % 8) * 16;
        const u32 v_lane = HALF + (lane / 16 * 8 + lane % 8) * ROW + ((lane / 8 % 2) ^ lane % 8) * 16;
        const u32 q_lane = shared_address(shared.q) + (lane / 16 * 8 + lane % 8) % ROWS * ROW + ((lane / 8 % 2) ^ lane % 8) * 16;

        if (threadIdx.x < 2) shared.pending[threadIdx.x].parts = 0;
        __syncthreads();
        u32 slot = 0;
        bool more, again = false;
        do {
            const u32 rows = c.extend_len * group;
            const u64 q_head = p.q + head_of(c) * group * ROW;
            // Fragments of Q^T: row n * 8 + lane / 4, dims k * 16 + column, + 1, + 8, + 9.
            u32 q[Q_SHARED ? 1 : D / 16][NT][2];
            if constexpr (Q_SHARED) {
                __syncthreads();
                for (u32 i = threadIdx.x; i < ROWS * CHUNKS; i += WARPS * 32) {
                    const u32 row = i / CHUNKS, piece = i % CHUNKS, query = row / group;
                    const u64 from = q_head + (c.qo_start + query) * p.q_stride + (row - query * group) * ROW + piece * 16;
                    reinterpret_cast<uint4*>(shared.q)[row * CHUNKS + (piece ^ row % 8)] = row < rows ? load_uint4(from) : make_uint4(0, 0, 0, 0);
                }
                __syncthreads();
            } else {
#pragma unroll
                for (int n = 0; n < NT; ++n) {
                    const u32 row = n * 8 + lane / 4, query = row / group;
                    const u64 from = q_head + (c.qo_start + query) * p.q_stride + (row - query * group) * ROW + column * 2;
#pragma unroll
                    for (int k = 0; k < D / 16; ++k) {
                        q[k][n][0] = row < rows ? load_u32(from + k * 32) : 0;
                        q[k][n][1] = row < rows ? load_u32(from + k * 32 + 16) : 0;
                    }
                }
            }
            float o[NT][D / 16][4];
            float top[NT][2], sum[NT][2];  // of the thread's two query rows: what weights are relative to; this thread's tokens
#pragma unroll
            for (int n = 0; n < NT; ++n) {
                top[n][0] = top[n][1] = MINUS_INF, sum[n][0] = sum[n][1] = 0.f;
#pragma unroll
                for (int m = 0; m < D / 16; ++m) o[n][m][0] = o[n][m][1] = o[n][m][2] = o[n][m][3] = 0.f;
            }

            const u32 end = c.end();
            const u32 position0 = c.kv_len - c.extend_len;  // of the first query; no tile where kv_len is 0
            u32 at = c.begin_of(warp);
            while (at < end) {
                copy_wait<STAGES - 1>();
                __syncwarp();
                const u32 base = ring + slot * SLOT;

                // Two sums in turn, so that no product waits for the one before it.
                float s[NT][4] = {}, s2[NT][4] = {};
#pragma unroll
                for (int k = 0; k < D / 16; ++k) {
                    u32 a[4];
                    load_matrix(a, base + (k_lane ^ (k * 32)));
                    if constexpr (Q_SHARED) {
                        u32 b[4];
                        load_matrix(b, q_lane ^ (k * 32));
#pragma unroll
                        for (int n = 0; n < NT; ++n) q[0][n][0] = b[2 * n], q[0][n][1] = b[2 * n + 1];
                    }
#pragma unroll
                    for (int n = 0; n < NT; ++n) mma(T(), k % 2 && !Q_SHARED ? s2[n] : s[n], a, q[Q_SHARED ? 0 : k][n][0], q[Q_SHARED ? 0 : k][n][1]);
                }
#pragma unroll
                for (int n = 0; n < NT; ++n)
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        s[n][i] += s2[n][i];
                        s[n][i] = logits.cap > 0.f ? logits.capped(s[n][i]) : s[n][i] * logits.scale;
                    }
                if (at + 15 > position0 || p.window != 0) {
#pragma unroll
                    for (int n = 0; n < NT; ++n)
#pragma unroll
                        for (int i = 0; i < 4; ++i) {
                            const u32 token = at + lane / 4 + i / 2 * 8, query = position0 + (n * 8 + column + i % 2) / group;
                            if (token > query || token >= c.kv_len || (p.window != 0 && token + p.window <= query)) s[n][i] = MINUS_INF;
                        }
                }
                // Weights are relative to a logit that was the greatest once, and moves only when a weight would pass 2^8.
                bool grew = false;
#pragma unroll
                for (int n = 0; n < NT; ++n)
#pragma unroll
                    for (int h = 0; h < 2; ++h) grew |= fmaxf(s[n][h], s[n][h + 2]) > top[n][h] + 8.f;
                if (__any_sync(~0u, grew)) {
#pragma unroll
                    for (int n = 0; n < NT; ++n)
#pragma unroll
                        for (int h = 0; h < 2; ++h) {
                            float above = fmaxf(s[n][h], s[n][h + 2]);
                            above = fmaxf(above, __shfl_xor_sync(~0u, above, 4));
                            above = fmaxf(above, __shfl_xor_sync(~0u, above, 8));
                            above = fmaxf(top[n][h], fmaxf(above, __shfl_xor_sync(~0u, above, 16)));
                            // A row that has seen nothing yet must not subtract minus infinity from itself.
                            const float scale = above == MINUS_INF ? 1.f : exp2_fast(top[n][h] - above);
                            sum[n][h] *= scale, top[n][h] = above;
#pragma unroll
                            for (int m = 0; m < D / 16; ++m) o[n][m][h] *= scale, o[n][m][h + 2] *= scale;
                        }
                }
                u32 w[NT][2];
#pragma unroll
                for (int n = 0; n < NT; ++n) {
                    const float less0 = top[n][0] == MINUS_INF ? 0.f : top[n][0], less1 = top[n][1] == MINUS_INF ? 0.f : top[n][1];
                    s[n][0] = exp2_fast(s[n][0] - less0), s[n][1] = exp2_fast(s[n][1] - less1);
                    s[n][2] = exp2_fast(s[n][2] - less0), s[n][3] = exp2_fast(s[n][3] - less1);
                    sum[n][0] += s[n][0] + s[n][2], sum[n][1] += s[n][1] + s[n][3];
                    w[n][0] = transpose(pack(T(), s[n][0], s[n][1])), w[n][1] = transpose(pack(T(), s[n][2], s[n][3]));
                }
#pragma unroll
                for (int m = 0; m < D / 16; ++m) {
                    u32 a[4];
                    load_matrix_transposed(a, base + (v_lane ^ (m * 32)));
#pragma unroll
                    for (int n = 0; n < NT; ++n) mma(T(), o[n][m], a, w[n][0], w[n][1]);
                }
                __syncwarp();
                at += STEP;
                refill(slot);
                slot = slot + 1 == STAGES ? 0 : slot + 1;
            }

            // The segment's end. A warp's sum stays in its lanes' order: what a lane writes, the same lane of warp 0 reads.
#pragma unroll
            for (int n = 0; n < NT; ++n)
#pragma unroll
                for (int h = 0; h < 2; ++h)
#pragma unroll
                    for (int i = 4; i < 32; i *= 2) sum[n][h] += __shfl_xor_sync(~0u, sum[n][h], i);
            more = c.unit + (c.stop - c.at) < c.unit_end;
            if (warp > 0) {
                if (again) barrier_wait(WARPS - 1 + warp);
                const u32 to = sums + (warp - 1) * SUM + lane * 16;
#pragma unroll
                for (int n = 0; n < NT; ++n) {
#pragma unroll
                    for (int m = 0; m < D / 16; ++m) {
                        const float(&x)[4] = o[n][m];
                        asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(to + (n * (D / 16) + m) * 512), "f"(x[0]), "f"(x[1]), "f"(x[2]),
                                     "f"(x[3]) : "memory");
                    }
                    if (lane < 4) shared.tops[warp - 1][n][lane] = make_float4(top[n][0], sum[n][0], top[n][1], sum[n][1]);
                }
                barrier_wait(warp);
            } else {
#pragma unroll 1
                for (u32 w = 1; w < WARPS; ++w) {
                    if (again) barrier_wait(WARPS - 1 + w);
                    barrier_wait(w);
                    const u32 from = sums + (w - 1) * SUM + lane * 16;
#pragma unroll
                    for (int n = 0; n < NT; ++n) {
                        const float4 of = shared.tops[w - 1][n][lane % 4];
                        const float above0 = fmaxf(top[n][0], of.x), above1 = fmaxf(top[n][1], of.z);
                        const float base0 = above0 == MINUS_INF ? 0.f : above0, base1 = above1 == MINUS_INF ? 0.f : above1;
                        const float old0 = exp2_fast(top[n][0] - base0), old1 = exp2_fast(top[n][1] - base1);
                        const float new0 = exp2_fast(of.x - base0), new1 = exp2_fast(of.z - base1);
                        top[n][0] = above0, top[n][1] = above1;
                        sum[n][0] = sum[n][0] * old0 + of.y * new0, sum[n][1] = sum[n][1] * old1 + of.w * new1;
#pragma unroll
                        for (int m = 0; m < D / 16; ++m) {
                            float4 x;
                            asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];"
                                         : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "r"(from + (n * (D / 16) + m) * 512) : "memory");
                            float(&y)[4] = o[n][m];
                            y[0] = y[0] * old0 + x.x * new0, y[1] = y[1] * old1 + x.y * new1;
                            y[2] = y[2] * old0 + x.z * new0, y[3] = y[3] * old1 + x.w * new1;
                        }
                    }
                }
                finish(c, rows, o, top, sum);
            }
            again = true;
            c.next<ROWS>(p, heads);
        } while (more);
        copy_wait<0>();
        let_next_start();

        // The end of the stretch: the parts it holds are written.
        __syncthreads();
        if (threadIdx.x < 2) {
            Pending& mine = shared.pending[threadIdx.x];
            if (mine.parts > 0 && !arrive_last_fenced(reinterpret_cast<u32*>(p.counters) + mine.first_cta, mine.parts)) mine.parts = 0;
        }
        __syncthreads();
        for (int i = 0; i < 2; ++i)
            if (shared.pending[i].parts > 0) join(shared.pending[i]);
    }

    // Named barriers of warp 0 and one other warp.
    static __device__ __forceinline__ void barrier_wait(u32 id) { asm volatile("barrier.cta.sync %0, 64;" ::"r"(id) : "memory"); }

    __device__ __forceinline__ float* part_output(u32 slot) const { return reinterpret_cast<float*>(p.partial) + slot * u64(ROWS * D); }
    __device__ __forceinline__ float* part_tops(u32 slot) const { return part_output(2 * gridDim.x) + slot * u64(2 * ROWS); }

    // Warp 0: writes a segment's result, or this CTA's part of it.
    __device__ __forceinline__ void finish(const DecodeCursor& c, u32 rows, const float (&o)[NT][D / 16][4], const float (&top)[NT][2],
                                           const float (&sum)[NT][2]) {
        const u32 begin = c.start + c.head * c.units;
        const u32 some = max(1u, c.units - DECODE_EXTRA);  // units with tokens; the rest has nothing to add
        if (c.at >= some) return;
        const u32 first = begin / per, parts = (begin + some - 1) / per - first + 1;  // the stretches it lies in
        if (parts == 1) {
#pragma unroll
            for (int n = 0; n < NT; ++n) {
                write_lse(n, c.qo_start, rows, head_of(c), top[n], sum[n]);
#pragma unroll
                for (int m = 0; m < D / 16; ++m) write(n, m, c.qo_start, rows, head_of(c), o[n][m], sum[n]);
            }
            return;
        }
        const u32 first_cta = first * lanes + blockIdx.x % lanes;
        const bool begins = blockIdx.x == first_cta;
        const u32 slot = 2 * blockIdx.x + begins;
        float* const to = part_output(slot) + lane * 4;
#pragma unroll
        for (int n = 0; n < NT; ++n) {
#pragma unroll
            for (int m = 0; m < D / 16; ++m)
                *reinterpret_cast<float4*>(to + (n * (D / 16) + m) * 128) = make_float4(o[n][m][0], o[n][m][1], o[n][m][2], o[n][m][3]);
            if (lane < 4) reinterpret_cast<float4*>(part_tops(slot))[n * 4 + lane] = make_float4(top[n][0], sum[n][0], top[n][1], sum[n][1]);
        }
        if (lane == 0) shared.pending[begins] = {parts, first_cta, c.qo_start, rows, head_of(c)};
    }

    // Fragments of a part; zeros where `some` is false.
    template <int PER, int AT = 0> __device__ __forceinline__ void load_fragments(float4 (&x)[PER], u64 from, bool some) const {
        x[AT] = make_float4(0.f, 0.f, 0.f, 0.f);
        load_float4_shared<AT * 512>(x[AT], from, some);
        if constexpr (AT + 1 < PER) load_fragments<PER, AT + 1>(x, from, some);
    }

    // All warps: joins the parts of a segment, each warp some of the fragments.
    __device__ __forceinline__ void join(const Pending& pending) {
        constexpr int PER = D == 128 && NT == 1 ? 4 : (D / 16) / WARPS < 2 ? 1 : 2;  // fragments at a time
        constexpr int BATCH = Q_SHARED ? 2 : D == 128 && NT == 1 ? 9 : 8;  // parts whose loads are in flight together
#pragma unroll 1
        for (u32 i = warp * PER; i < FRAGMENTS; i += WARPS * PER) {
            const u32 n = i / (D / 16);
            // Of four lanes only `wide` have query rows here. The others take parts of their own, so `abreast` parts go at once.
            const u32 rows = pending.rows - min(n * 8, pending.rows), wide = rows > 4 ? 4 : rows > 2 ? 2 : 1, abreast = 4 / wide;
            const u32 mine = lane % 4 / wide, column = lane % wide;
            // Part 0 lies in the slot for what a stretch ends with, the others in those for what one begins with.
            const u32 slot = 2 * pending.first_cta, apart = 2 * lanes;
            const u64 outputs = reinterpret_cast<u64>(part_output(slot)) + i * 512 + (lane / 4 * 4 + column) * 16;
            const u64 tops = reinterpret_cast<u64>(part_tops(slot)) + (n * 4 + column) * 16;
            float top[2] = {MINUS_INF, MINUS_INF}, sum[2] = {0.f, 0.f}, o[PER][4] = {};
#pragma unroll 1
            for (u32 from = 0; from < pending.parts; from += BATCH * abreast) {
                float4 of[BATCH], x[BATCH][PER];
#pragma unroll
                for (int j = 0; j < BATCH; ++j) {
                    const u32 part = from + j * abreast + mine, on = part * apart + (j == 0 && part == 0);
                    const bool some = part < pending.parts;
                    of[j] = make_float4(MINUS_INF, 0.f, MINUS_INF, 0.f);
                    load_float4_shared<0>(of[j], tops + on * u64(2 * ROWS * 4), some);
                    load_fragments(x[j], outputs + on * u64(ROWS * D * 4), some);
                }
                float above0 = top[0], above1 = top[1];
#pragma unroll
                for (int j = 0; j < BATCH; ++j) above0 = fmaxf(above0, of[j].x), above1 = fmaxf(above1, of[j].z);
                const float base0 = above0 == MINUS_INF ? 0.f : above0, base1 = above1 == MINUS_INF ? 0.f : above1;
                const float old0 = exp2_fast(top[0] - base0), old1 = exp2_fast(top[1] - base1);
                top[0] = above0, top[1] = above1, sum[0] *= old0, sum[1] *= old1;
#pragma unroll
                for (int k = 0; k < PER; ++k) o[k][0] *= old0, o[k][1] *= old1, o[k][2] *= old0, o[k][3] *= old1;
#pragma unroll
                for (int j = 0; j < BATCH; ++j) {
                    const float new0 = exp2_fast(of[j].x - base0), new1 = exp2_fast(of[j].z - base1);
                    sum[0] += of[j].y * new0, sum[1] += of[j].w * new1;
#pragma unroll
                    for (int k = 0; k < PER; ++k)
                        o[k][0] += x[j][k].x * new0, o[k][1] += x[j][k].y * new1, o[k][2] += x[j][k].z * new0, o[k][3] += x[j][k].w * new1;
                }
            }
#pragma unroll 1
            for (u32 other = wide; other < 4; other *= 2) {
                const float above0 = fmaxf(top[0], __shfl_xor_sync(~0u, top[0], other)), base0 = above0 == MINUS_INF ? 0.f : above0;
                const float above1 = fmaxf(top[1], __shfl_xor_sync(~0u, top[1], other)), base1 = above1 == MINUS_INF ? 0.f : above1;
                const float old0 = exp2_fast(top[0] - base0), old1 = exp2_fast(top[1] - base1);
                top[0] = above0, top[1] = above1, sum[0] *= old0, sum[1] *= old1;
                sum[0] += __shfl_xor_sync(~0u, sum[0], other), sum[1] += __shfl_xor_sync(~0u, sum[1], other);
#pragma unroll
                for (int k = 0; k < PER; ++k)
#pragma unroll
                    for (int e = 0; e < 4; ++e) {
                        o[k][e] *= e % 2 ? old1 : old0;
                        o[k][e] += __shfl_xor_sync(~0u, o[k][e], other);
                    }
            }
            if (i % (D / 16) == 0) write_lse(n, pending.qo_start, pending.rows, pending.head, top, sum);
#pragma unroll
            for (int k = 0; k < PER; ++k) write(n, i % (D / 16) + k, pending.qo_start, pending.rows, pending.head, o[k], sum);
        }
    }

    // A finished fragment: dims m * 16 .. + 16 of query rows n * 8 .. + 8.
    __device__ __forceinline__ void write(u32 n, u32 m, u32 qo_start, u32 rows, u32 head, const float (&o)[4], const float (&sum)[2]) {
        const float inverse0 = sum[0] > 0.f ? 1.f / sum[0] : 0.f, inverse1 = sum[1] > 0.f ? 1.f / sum[1] : 0.f;
        const u32 low = transpose(pack(T(), o[0] * inverse0, o[1] * inverse1)), high = transpose(pack(T(), o[2] * inverse0, o[3] * inverse1));
        const u32 row = n * 8 + lane / 4, query = row / p.group;
        if (row >= rows) return;
        const u64 to = p.out + (qo_start + query) * p.out_stride + (head * p.group + (row - query * p.group)) * ROW + m * 32 + lane % 4 * 4;
        store_u32(to, low);
        store_u32(to + 16, high);
    }
    __device__ __forceinline__ void write_lse(u32 n, u32 qo_start, u32 rows, u32 head, const float (&top)[2], const float (&sum)[2]) {
        if (p.lse == 0 || lane >= 4) return;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const u32 row = n * 8 + lane * 2 + h, query = row / p.group;
            if (row < rows)
                store_float(p.lse + ((qo_start + query) * static_cast<u64>(p.q_heads) + head * p.group + (row - query * p.group)) * 4,
                            sum[h] > 0.f ? (top[h] + log2_fast(sum[h])) * LN_2 : MINUS_INF);
        }
    }
};

template <class T, int D, int NT, int WARPS, int STAGES> DEVICE void attend_decode(const AttendParams& p) {
    extern __shared__ __align__(1024) u8 memory[];
    __shared__ typename Decode<T, D, NT, WARPS, STAGES>::Shared shared;
    wait_for_previous();
    const u64 at = p.plan + sizeof(DecodeWork) * blockIdx.x;
    const uint4 a = load_uint4(at), b = load_uint4(at + 16), c = load_uint4(at + 32);
    const DecodeWork work = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w, c.x, c.y};
    if (work.unit_begin >= work.unit_end) return;
    Decode<T, D, NT, WARPS, STAGES>(p, shared, shared_address(memory)).run(work);
}
