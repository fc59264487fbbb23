// Decode attention over pages: few query rows against many tokens, memory-bound.
//
// In each stripe of heads the units of all sequences are numbered consecutively (see DecodeWork), and each CTA has an equal
// work chunk of them. Within a chunk, the tokens of one (sequence, kv head) are a segment. Warps take the segment's tiles of 16
// tokens in turn. Each warp fills its own ring in shared memory, across segments, so that loads do not pause at the end of a
// sequence. At the end of a segment, warp 0 joins the warps' sums while the others continue; at the end of the work chunk all
// warps join them. If several CTAs share a (sequence, head), each writes its part to `partial`. It signals the part at the end of
// its chunk; in a long chunk it signals the first part at once. The last CTA to arrive joins the parts at the end of its chunk.
// decode_cursor.cuh walks through a chunk; decode_parts.cuh writes results and parts.
#pragma once
#include "pdl.cuh"
#include "decode_parts.cuh"

// The products are transposed, tokens by query rows: scores = K * Q^T, output^T = V^T * weights^T. Tokens fill the 16 rows of
// the tensor core, and query rows fill columns by eights: NT is 1 for up to 8 rows, 2 for up to 16.
template <class T, int D, int NT, int WARPS, int STAGES, class Parts = DecodeParts<T, D, NT, WARPS>> struct Decode : Parts {
    using Cursor = typename Parts::Cursor;
    using Parts::ROW, Parts::ROWS, Parts::FRAGMENTS, Parts::LONG_WORK, Parts::p, Parts::warp, Parts::lane, Parts::work_units;
    using Parts::head_of, Parts::finish, Parts::finish_last, Parts::join_pending, Parts::store_sum, Parts::add_sum;

    static constexpr int LINE = 128;               // bytes of a prefetch
    static constexpr int CHUNKS = D / 8;           // 16-byte pieces of a row
    static constexpr int HALF = 16 * ROW;          // K (or V) of a tile
    static constexpr int SLOT = 2 * HALF;          // also 16 rows of D floats
    static constexpr int STEP = 16 * WARPS;        // tokens from one of a warp's tiles to its next
    static constexpr int TOKENS_PER_COPY = 32 / CHUNKS;
    static constexpr bool Q_SHARED = D * NT > Parts::Q_REGISTERS; // whether query fragments do not fit the registers

    static constexpr int SUM = FRAGMENTS * 512;      // bytes of a warp's output sum
    static constexpr int BYTES = WARPS * STAGES * SLOT + (WARPS - 1) * SUM;  // dynamic shared memory

    struct Shared {
        // `tops` has an entry for each warp but the first. `last_tops`, for the end of the work chunk, has one for each
        // warp. For each query row, an entry contains the maximum to which the warp's sums are relative, and the sum of
        // its weights.
        float4 tops[WARPS > 1 ? WARPS - 1 : 1][NT][4], last_tops[WARPS][NT][4];
        typename Parts::Pendings pending;
        u32 pages[WARPS][STAGES][16];   // of each warp's tiles
        alignas(Q_SHARED ? 512 : 16) u8 q[Q_SHARED ? ROWS * ROW : 16];  // the segment's query rows, swizzled
    };

    // A tile whose copy is not issued yet, for this lane's token. `token_bits` has the token's slot in its page, VALID if the token
    // exists, SOME if the tile exists, and from bit 16 on the tile's head.
    struct Tile {
        u32 token_bits, directory, in_leaf;
    };
    static constexpr u32 VALID = 1 << 10, SOME = 1 << 11, HEAD = 16;
    static_assert(PAGE_TOKENS_MAX <= VALID && SOME < 1 << HEAD && KV_HEADS_MAX <= ~0u >> HEAD, "a field of `token_bits` is too narrow");

    Shared& shared;
    u32 rings;  // of all warps
    u32 ring;   // this warp's
    u32 sums;   // the other warps' output sums, warp 1's first
    u32 pages;  // this warp's pending page numbers
    u32 heads;  // number of kv heads of a stripe
    Cursor fetch;
    u32 fetch_at, fetch_end;
    bool fetch_more;
    __device__ __forceinline__ Decode(const AttendParams& p, Shared& shared, u32 memory)
        : Parts(p), shared(shared), rings(memory), ring(memory + Parts::thread() / 32 * STAGES * SLOT),
          sums(memory + WARPS * STAGES * SLOT), pages(shared_address(shared.pages[Parts::thread() / 32])) {}

    // The lists of attend_selected_* contain slots, and the previous launch writes the lists. With lists, `directory`
    // of a tile is the index of a list, `in_leaf` is an entry of that list, and a slot replaces the page number.
    __device__ __forceinline__ const Lists& lists() const { return reinterpret_cast<const AttendSelectedParams*>(&p)->lists; }

    __device__ __forceinline__ Tile next_tile() {
        while (fetch_more && fetch_at >= fetch_end) {
            fetch_more = fetch.next<ROWS>(p, heads);
            fetch_at = fetch.begin_of(warp), fetch_end = fetch.end();
        }
        const u32 position = fetch_at + lane % 16;
        const bool valid = fetch_more && position < fetch_end;
        if constexpr (is_listed(T())) {
            fetch_at += STEP;
            const u32 head = head_of(fetch);
            return {(valid ? VALID : 0) + (fetch_more ? SOME : 0) + (head << HEAD), fetch.index * p.kv_heads + head, position};
        }
        const Look look = look_up(p, fetch.row, position);
        const u32 token_bits = look.slot + (valid ? VALID : 0) + (fetch_more ? SOME : 0) + (head_of(fetch) << HEAD);
        const Tile tile = {token_bits, valid ? load_directory(p, look) : 0, look.in_leaf};
        fetch_at += STEP;
        return tile;
    }
    __device__ __forceinline__ u64 page_at(const Tile& tile) const {
        if constexpr (is_listed(T())) return lists().listed + 4 * (static_cast<u64>(tile.directory) * lists().top + tile.in_leaf);
        return p.table + 4 * (p.leaf_base + static_cast<u64>(tile.directory) * p.leaf_pages + tile.in_leaf);
    }
    // Copies the tile's page numbers to shared memory, together with the copies of an earlier tile.
    __device__ __forceinline__ void copy_pages(const Tile& tile, u32 turn) {
        if (lane < 16) copy4(pages + turn * 64 + lane * 4, page_at(tile), (tile.token_bits & VALID) != 0);
    }
    __device__ __forceinline__ u32 copied_page(u32 turn) const {
        u32 page;
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(page) : "r"(pages + turn * 64 + lane % 16 * 4) : "memory");
        return page;
    }

    // Returns the byte offset of a slot of the pool.
    __device__ __forceinline__ u64 slot_bytes(u32 slot) const {
        const u64 page = p.page_size == 1 ? slot : __umul64hi(slot, lists().page_magic);
        return page * p.page_stride + (slot - page * p.page_size) * p.slot_stride;
    }
    __device__ __forceinline__ void copy_tile(u32 token_bits, u32 page, u32 slot) {
        if (token_bits & SOME) {
            if constexpr (is_listed(T())) token_bits &= page == NO_POSITION ? ~VALID : ~0u;
            const u64 mine = is_listed(T()) ? slot_bytes(page) : page * p.page_stride + token_bits % VALID * p.slot_stride;
            const u64 base = (token_bits >> HEAD) * p.head_stride + (lane % CHUNKS) * 16;
            const u64 k = p.k + base, v = p.v + base;
            const u32 valid = __ballot_sync(~0u, (token_bits & VALID) != 0);
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

    // Prefetches the tile into the L2 cache. This may precede the wait for the previous launch, which writes through that
    // cache.
    __device__ __forceinline__ void prefetch_tile(u32 token_bits, u32 page) const {
        if (token_bits & SOME) {
            const u64 mine = page * p.page_stride + token_bits % VALID * p.slot_stride;
            const u64 base = (token_bits >> HEAD) * p.head_stride;
            const u32 valid = __ballot_sync(~0u, (token_bits & VALID) != 0);
#pragma unroll
            for (int i = 0; i < 16 * ROW / LINE; i += 32) {
                const u32 token = (i + lane) / (ROW / LINE) % 16, at = (i + lane) % (ROW / LINE) * LINE;
                const u64 offset = __shfl_sync(~0u, mine, token) + base + at;
                if (valid >> token & 1) prefetch(p.k + offset), prefetch(p.v + offset);
            }
        }
    }

    __device__ __forceinline__ void run(const DecodeWork& work, u32 unit_begin) {
        const u32 group = p.group;
        heads = p.kv_heads / p.stripes, work_units = work.work_units;
        Cursor c;
        c.begin(p, work, unit_begin);

        // Locates the first tiles together, while the previous launch still runs. The page numbers of a tile are copied with the
        // tile STAGES before it (here before all copies), so they have arrived when they are needed. Directory words are loaded
        // one tile earlier.
        fetch = c, fetch_at = c.begin_of(warp), fetch_end = c.end(), fetch_more = true;
        u32 token_bits[STAGES];  // of the tiles whose page numbers are pending
        Tile next;
        {
            Tile tiles[2 * STAGES];
            u32 words[STAGES];
#pragma unroll
            for (int i = 0; i < 2 * STAGES; ++i) tiles[i] = next_tile();
#pragma unroll
            for (int i = 0; i < STAGES; ++i) words[i] = tiles[i].token_bits & VALID ? load_page_word(T(), page_at(tiles[i])) : 0;
#pragma unroll
            for (int i = 0; i < STAGES; ++i) copy_pages(tiles[STAGES + i], i);
            next = next_tile();
            if (!is_listed(T()) && work_units < LONG_WORK) {
#pragma unroll
                for (int i = 0; i < STAGES; ++i) prefetch_tile(tiles[i].token_bits, words[i]);
            }
            if constexpr (!is_listed(T())) wait_for_previous();
#pragma unroll
            for (int i = 0; i < STAGES; ++i) {
                copy_tile(tiles[i].token_bits, words[i], i);
                copy_commit();
                token_bits[i] = tiles[STAGES + i].token_bits;
            }
        }
        auto refill = [&](u32 slot) {
            copy_tile(token_bits[0], copied_page(slot), slot);
            __syncwarp();
            copy_pages(next, slot);
            copy_commit();
#pragma unroll
            for (int i = 1; i < STAGES; ++i) token_bits[i - 1] = token_bits[i];
            token_bits[STAGES - 1] = next.token_bits;
            next = next_tile();
        };

        const Logits logits = Logits::make(p);
        // In a score fragment, this thread has tokens lane / 4 and lane / 4 + 8, and query rows column and column + 1.
        const u32 column = lane % 4 * 2;
        // ldmatrix addresses in a slot: K unchanged, V transposed; pieces are swizzled by token % 8.
        const u32 k_lane = lane % 16 * ROW + ((lane / 16) ^ lane % 8) * 16;
        const u32 v_lane = HALF + (lane / 16 * 8 + lane % 8) * ROW + ((lane / 8 % 2) ^ lane % 8) * 16;
        const u32 q_lane = shared_address(shared.q) + (lane / 16 * 8 + lane % 8) % ROWS * ROW + ((lane / 8 % 2) ^ lane % 8) * 16;

        Parts::clear(shared.pending);
        Parts::sync();
        u32 slot = 0;
        bool more, again = false;
        do {
            const u32 rows = c.extend_len * group;
            const u64 q_head = p.q + head_of(c) * group * ROW;
            // Fragments of Q^T: row n * 8 + lane / 4, dims k * 16 + column, + 1, + 8, + 9.
            u32 q[Q_SHARED ? 1 : D / 16][NT][2];
            if constexpr (Q_SHARED) {
                Parts::sync();
                for (u32 i = Parts::thread(); i < ROWS * CHUNKS; i += WARPS * 32) {
                    const u32 row = i / CHUNKS, piece = i % CHUNKS, query = row / group;
                    const u64 from = q_head + (c.qo_start + query) * p.q_stride + (row - query * group) * ROW + piece * 16;
                    reinterpret_cast<uint4*>(shared.q)[row * CHUNKS + (piece ^ row % 8)] = row < rows ? load_written_uint4(from) : make_uint4(0, 0, 0, 0);
                }
                Parts::sync();
            } else {
#pragma unroll
                for (int n = 0; n < NT; ++n) {
                    const u32 row = n * 8 + lane / 4, query = row / group;
                    const u64 from = q_head + (c.qo_start + query) * p.q_stride + (row - query * group) * ROW + column * 2;
#pragma unroll
                    for (int k = 0; k < D / 16; ++k) {
                        q[k][n][0] = row < rows ? load_written_u32(from + k * 32) : 0;
                        q[k][n][1] = row < rows ? load_written_u32(from + k * 32 + 16) : 0;
                    }
                }
            }
            float o[NT][D / 16][4];
            float top[NT][2], sum[NT][2];  // for two query rows: maxima to which weights are relative, sums of this thread's weights
#pragma unroll
            for (int n = 0; n < NT; ++n) {
                top[n][0] = top[n][1] = MINUS_INF, sum[n][0] = sum[n][1] = 0.f;
#pragma unroll
                for (int m = 0; m < D / 16; ++m) o[n][m][0] = o[n][m][1] = o[n][m][2] = o[n][m][3] = 0.f;
            }

            const u32 end = c.end();
            const u32 position0 = c.kv_len - c.extend_len;  // position of the first query; there is no tile if kv_len is 0
            u32 named = 0;  // number of tokens in the list
            if constexpr (is_listed(T())) named = load_written_u32(lists().counts + 4ull * (c.index * p.kv_heads + head_of(c)));
            u32 at = c.begin_of(warp);
            while (at < end) {
                copy_wait<STAGES - 1>();
                __syncwarp();
                const u32 base = ring + slot * SLOT;

                // Two alternating sums, so that no product waits for the one before it.
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
                        s[n][i] = logits.of(s[n][i]);
                    }
                if constexpr (is_listed(T())) {
                    if (at + 16 > named) {
#pragma unroll
                        for (int n = 0; n < NT; ++n)
#pragma unroll
                            for (int i = 0; i < 4; ++i)
                                if (at + lane / 4 + i / 2 * 8 >= named) s[n][i] = MINUS_INF;
                    }
                } else if (at + 15 > position0 || p.window != 0) {
#pragma unroll
                    for (int n = 0; n < NT; ++n)
#pragma unroll
                        for (int i = 0; i < 4; ++i) {
                            const u32 token = at + lane / 4 + i / 2 * 8, query = position0 + (n * 8 + column + i % 2) / group;
                            if (token > query || token >= c.kv_len || (p.window != 0 && token + p.window <= query)) s[n][i] = MINUS_INF;
                        }
                }
                // Weights are relative to an earlier maximum logit. The maximum is raised only when a weight would exceed 2^8.
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
                            // A row that has seen no token must not subtract minus infinity from itself.
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

            more = end_segment<WARPS, STAGES * SLOT>(*this, c, rows, again, o, top, sum);
            again = true;
            c.next<ROWS>(p, heads);
        } while (more);
        join_pending(shared.pending);
    }
};

template <class T, int D, int NT, int WARPS, int STAGES> DEVICE void attend_decode(const AttendParams& p) {
    extern __shared__ __align__(1024) u8 memory[];
    __shared__ typename Decode<T, D, NT, WARPS, STAGES>::Shared shared;
    const u32 work_index = blockIdx.x / p.stripes;
    const DecodeWork work = load_work(p.plan + sizeof(DecodeWork) * work_index);
    const u32 unit_begin = work_index * work.work_units;
    // Every CTA waits for the previous launch, even if it has no work: when this launch ends, all earlier ones have ended. With
    // lists, it waits before it reads them, because the previous launch writes them.
    if constexpr (is_listed(T())) {
        wait_for_previous();
        if (unit_begin >= work.unit_end) return;
    } else if (unit_begin >= work.unit_end) return wait_for_previous();
    Decode<T, D, NT, WARPS, STAGES>(p, shared, shared_address(memory)).run(work, unit_begin);
}
