// The end of a segment in the decode kernel: its sums become the result, or this CTA's part, and parts are joined.
#pragma once
#include "decode_cursor.cuh"

// NT eights of query rows, as in attend_decode.cuh. Fragments of a sum have the layout of the tensor core's products. Row i of a
// fragment is dim i. Over fp8, rows i and i + 8 are dims 2 * i and 2 * i + 1.
template <class T, int D, int NT, int WARPS> struct DecodeParts {
    using Cursor = DecodeCursor<typename WholeRowsOf<over_fp8(T())>::Type>;
    using Fp8Params = AttendFp8Params;  // parameters of a kernel over fp8
    static constexpr int ROW = D * 2;  // bytes
    static constexpr int ROWS = 8 * NT;
    enum { Q_REGISTERS = 256 };  // D * NT up to which query fragments fit the registers
    static constexpr u32 LONG_WORK = 256;  // units; in shorter work chunks, latency at both ends matters more than throughput
    static constexpr int FRAGMENTS = NT * (D / 16);  // fragments of a warp's output sum, 16 bytes in each lane

    // A segment of which this CTA has only a part.
    struct Pending {
        u32 parts;      // 0: none
        bool complete;  // all parts have arrived, and this CTA joins them
        u32 first_cta;  // the CTA with the first part
        u32 qo_start, rows, head;
    };
    using Pendings = Pending[2];  // at the begin and at the end of the work chunk
    static __device__ __forceinline__ void clear(Pendings& pending) {
        if (threadIdx.x < 2) pending[threadIdx.x].parts = 0;
    }

    const AttendParams& p;
    const u32 warp, lane;
    u32 work_units;  // of a work chunk
    __device__ __forceinline__ explicit DecodeParts(const AttendParams& p, u32 thread = threadIdx.x) : p(p), warp(thread / 32), lane(thread % 32) {}

    // The threads that share a work chunk: here a whole CTA.
    static __device__ __forceinline__ u32 thread() { return threadIdx.x; }
    static __device__ __forceinline__ void sync() { __syncthreads(); }
    // A named barrier of warp 0 and one other warp.
    static __device__ __forceinline__ void sync_pair(u32 id) { asm volatile("barrier.cta.sync %0, 64;" ::"r"(id) : "memory"); }

    template <class At> __device__ __forceinline__ u32 head_of(const At& c) const { return c.head * p.stripes + blockIdx.x % p.stripes; }

    __device__ __forceinline__ float* part_output(u32 slot) const { return reinterpret_cast<float*>(p.partial) + slot * u64(ROWS * D); }
    __device__ __forceinline__ float* part_tops(u32 slot) const { return part_output(2 * gridDim.x) + slot * u64(2 * ROWS); }

    // A warp's sum keeps the order of its lanes: each lane reads what the same lane of another warp wrote.
    __device__ __forceinline__ void store_sum(u32 to, float4 (&tops)[NT][4], const float (&o)[NT][D / 16][4], const float (&top)[NT][2],
                                              const float (&sum)[NT][2]) {
#pragma unroll
        for (int n = 0; n < NT; ++n) {
#pragma unroll
            for (int m = 0; m < D / 16; ++m) store_shared_float4(to + (n * (D / 16) + m) * 512 + lane * 16, o[n][m]);
            if (lane < 4) tops[n][lane] = make_float4(top[n][0], sum[n][0], top[n][1], sum[n][1]);
        }
    }
    // Adds a warp's sum to this one's.
    __device__ __forceinline__ void add_sum(u32 from, const float4 (&tops)[NT][4], float (&o)[NT][D / 16][4], float (&top)[NT][2],
                                            float (&sum)[NT][2]) {
#pragma unroll
        for (int n = 0; n < NT; ++n) {
            const float4 of = tops[n][lane % 4];
            const float above0 = fmaxf(top[n][0], of.x), above1 = fmaxf(top[n][1], of.z);
            const float base0 = above0 == MINUS_INF ? 0.f : above0, base1 = above1 == MINUS_INF ? 0.f : above1;
            const float old0 = exp2_fast(top[n][0] - base0), old1 = exp2_fast(top[n][1] - base1);
            const float new0 = exp2_fast(of.x - base0), new1 = exp2_fast(of.z - base1);
            top[n][0] = above0, top[n][1] = above1;
            sum[n][0] = sum[n][0] * old0 + of.y * new0, sum[n][1] = sum[n][1] * old1 + of.w * new1;
#pragma unroll
            for (int m = 0; m < D / 16; ++m) {
                const float4 x = load_shared_float4(from + (n * (D / 16) + m) * 512 + lane * 16);
                float(&y)[4] = o[n][m];
                y[0] = y[0] * old0 + x.x * new0, y[1] = y[1] * old1 + x.y * new1;
                y[2] = y[2] * old0 + x.z * new0, y[3] = y[3] * old1 + x.w * new1;
            }
        }
    }

    // The target of a segment's sums.
    struct Target {
        u32 parts;      // work chunks with tokens of the (sequence, head); 1: the sum is the result; 0: no token here
        u32 first_cta;  // the CTA with the first part
    };
    template <class At> __device__ __forceinline__ Target target(const At& c) const {
        const u32 begin = c.start + c.head * c.units;
        const u32 some = max(1u, c.units - At::EXTRA);  // units with tokens; the others add nothing
        if (c.at >= some) return {0, 0};
        const u32 first = begin / work_units;
        return {(begin + some - 1) / work_units - first + 1, first * p.stripes + blockIdx.x % p.stripes};
    }
    __device__ __forceinline__ u32* counter(u32 first_cta) const { return reinterpret_cast<u32*>(p.counters) + first_cta; }

    // Writes fragments of a segment's sum from `at` on, of one eight of query rows, to their target.
    template <int COUNT> __device__ __forceinline__ void put(const Target& target, const Cursor& c, u32 rows, u32 at,
                                                             const float (&o)[COUNT][4], const float (&top)[2], const float (&sum)[2]) {
        const u32 n = at / (D / 16), m = at % (D / 16);
        if (target.parts == 1) {
            const Ended ended(*this, n, head_of(c), top, sum);
            if (m == 0) write_lse(n, c.qo_start, rows, head_of(c), ended, c.kv_len > 0);
#pragma unroll
            for (int k = 0; k < COUNT; ++k) write(n, m + k, c.qo_start, rows, head_of(c), o[k], ended);
            return;
        }
        const u32 slot = 2 * blockIdx.x + (blockIdx.x == target.first_cta);
        float* const to = part_output(slot) + at * 128 + lane * 4;
#pragma unroll
        for (int k = 0; k < COUNT; ++k) *reinterpret_cast<float4*>(to + k * 128) = make_float4(o[k][0], o[k][1], o[k][2], o[k][3]);
        if (lane < 4 && m == 0) reinterpret_cast<float4*>(part_tops(slot))[n * 4 + lane] = make_float4(top[0], sum[0], top[1], sum[1]);
    }

    // Warp 0: ends a segment that is not the work chunk's last. If the segment has several parts, this CTA has the last one.
    __device__ __forceinline__ void finish(const Cursor& c, u32 rows, const float (&o)[NT][D / 16][4], const float (&top)[NT][2],
                                           const float (&sum)[NT][2], Pendings& pendings) {
        Pending& pending = pendings[0];
        const Target to = target(c);
        if (to.parts == 0) return;
#pragma unroll
        for (int n = 0; n < NT; ++n) put(to, c, rows, n * (D / 16), o[n], top[n], sum[n]);
        if (to.parts == 1) return;
        __syncwarp();
        if (lane == 0) {
            // In long work chunks, this signals at once, so that another CTA can join the parts before this chunk's
            // end.
            const bool now = work_units >= LONG_WORK, last = now && arrive_last_fenced(counter(to.first_cta), to.parts);
            if (!now || last) pending = {to.parts, last, to.first_cta, c.qo_start, rows, head_of(c)};
        }
    }

    // All warps: ends the work chunk. Each warp adds some fragments of all warps' sums, which are `apart` bytes apart.
    __device__ __forceinline__ void finish_last(const Cursor& c, u32 rows, u32 sums, u32 apart, const float4 (&tops)[WARPS][NT][4],
                                                Pending (&pending)[2]) {
        constexpr int PER = FRAGMENTS / WARPS;
        static_assert(FRAGMENTS % WARPS == 0 && (D / 16) % PER == 0);
        const Target to = target(c);
        if (to.parts == 0) return;
        const u32 at = warp * PER;
        float top[2] = {MINUS_INF, MINUS_INF}, sum[2] = {0.f, 0.f}, o[PER][4] = {};
        float4 of[WARPS];
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            of[w] = tops[w][at / (D / 16)][lane % 4];
            top[0] = fmaxf(top[0], of[w].x), top[1] = fmaxf(top[1], of[w].z);
        }
        const float base0 = top[0] == MINUS_INF ? 0.f : top[0], base1 = top[1] == MINUS_INF ? 0.f : top[1];
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            const float scale0 = exp2_fast(of[w].x - base0), scale1 = exp2_fast(of[w].z - base1);
            sum[0] += of[w].y * scale0, sum[1] += of[w].w * scale1;
#pragma unroll
            for (int k = 0; k < PER; ++k) {
                const float4 x = load_shared_float4(sums + w * apart + (at + k) * 512 + lane * 16);
                o[k][0] += x.x * scale0, o[k][1] += x.y * scale1, o[k][2] += x.z * scale0, o[k][3] += x.w * scale1;
            }
        }
        put(to, c, rows, at, o, top, sum);
        if (threadIdx.x == 0 && to.parts > 1)
            pending[blockIdx.x == to.first_cta] = {to.parts, false, to.first_cta, c.qo_start, rows, head_of(c)};
    }

    // All warps: signals that all parts of this CTA are written, and joins the segments of which this CTA's part arrived last.
    __device__ __forceinline__ void join_pending(const Pending (&pending)[2]) {
        __syncthreads();
        bool last = false;
        if (threadIdx.x < 2) {
            const Pending& mine = pending[threadIdx.x];
            last = mine.parts > 0 && (mine.complete || arrive_last_fenced(counter(mine.first_cta), mine.parts));
        }
#pragma unroll 1
        for (int i = 0; i < 2; ++i)
            if (__syncthreads_or(last && threadIdx.x == i)) join(pending[i]);
    }

    // Loads fragments of a part; zeros if `some` is false.
    template <int PER, int AT = 0> __device__ __forceinline__ void load_fragments(float4 (&x)[PER], u64 from, bool some) const {
        x[AT] = make_float4(0.f, 0.f, 0.f, 0.f);
        load_float4_shared<AT * 512>(x[AT], from, some);
        if constexpr (AT + 1 < PER) load_fragments<PER, AT + 1>(x, from, some);
    }

    // All warps: joins the parts of a segment; each warp takes some of the fragments.
    __device__ __forceinline__ void join(const Pending& pending) {
        constexpr int PER = D == 128 ? 4 : (D / 16) / WARPS < 2 ? 1 : 2;  // fragments at a time
        constexpr int BATCH = D * NT > 256 ? 2 : D == 128 && NT == 1 ? 9 : 8;  // parts whose loads are in flight together
#pragma unroll 1
        for (u32 i = warp * PER; i < FRAGMENTS; i += WARPS * PER) {
            const u32 n = i / (D / 16);
            // Only `wide` of four lanes have query rows here. The others take other parts, so `abreast` parts are added at
            // once.
            const u32 rows = pending.rows - min(n * 8, pending.rows), wide = rows > 4 ? 4 : rows > 2 ? 2 : 1, abreast = 4 / wide;
            const u32 mine = lane % 4 / wide, column = lane % wide;
            // Part 0 is in its CTA's slot for the last segment of a work chunk, the other parts in the slots for the
            // first segment.
            const u32 slot = 2 * pending.first_cta, apart = 2 * p.stripes;
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
            const Ended ended(*this, n, pending.head, top, sum);
            if (i % (D / 16) == 0) write_lse(n, pending.qo_start, pending.rows, pending.head, ended);
#pragma unroll
            for (int k = 0; k < PER; ++k) write(n, i % (D / 16) + k, pending.qo_start, pending.rows, pending.head, o[k], ended);
        }
    }

    // The sums of this lane's two query rows of an eight, with all parts and the sink.
    struct Ended {
        float top[2], sum[2], inverse[2];
        __device__ __forceinline__ Ended(const DecodeParts& d, u32 n, u32 head, const float (&top_of)[2], const float (&sum_of)[2]) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                top[h] = top_of[h], sum[h] = sum_of[h];
                const float worth = enter_sink(d.p, head * d.p.group + (n * 8 + d.lane % 4 * 2 + h) % d.p.group, top[h], sum[h]);
                inverse[h] = sum[h] > 0.f ? worth * (1.f / sum[h]) : 0.f;
            }
        }
    };

    // Writes a finished fragment: dims m * 16 .. + 16 of query rows n * 8 .. + 8.
    __device__ __forceinline__ void write(u32 n, u32 m, u32 qo_start, u32 rows, u32 head, const float (&o)[4], const Ended& ended) {
        const float inverse0 = ended.inverse[0], inverse1 = ended.inverse[1];
        if constexpr (over_fp8(T())) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const u32 row = n * 8 + lane % 4 * 2 + h, query = row / p.group;
                const float inverse = h ? inverse1 : inverse0;
                if (row < rows)
                    store_u32(p.out + (qo_start + query) * p.out_stride + (head * p.group + (row - query * p.group)) * ROW + m * 32 + lane / 4 * 4,
                              pack(T(), o[h] * inverse, o[h + 2] * inverse));
            }
            return;
        }
        const u32 low = transpose(pack(T(), o[0] * inverse0, o[1] * inverse1)), high = transpose(pack(T(), o[2] * inverse0, o[3] * inverse1));
        const u32 row = n * 8 + lane / 4, query = row / p.group;
        if (row >= rows) return;
        const u64 to = p.out + (qo_start + query) * p.out_stride + (head * p.group + (row - query * p.group)) * ROW + m * 32 + lane % 4 * 4;
        store_u32(to, low);
        store_u32(to + 16, high);
    }
    // If a list is empty, the log-sum-exp is the sink. `sees` is false for padding.
    __device__ __forceinline__ void write_lse(u32 n, u32 qo_start, u32 rows, u32 head, const Ended& ended, bool sees = true) {
        if (p.lse == 0 || lane >= 4) return;
        if constexpr (is_listed(T())) {
            if (sees && p.sinks != 0) {
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const u32 row = n * 8 + lane * 2 + h, q_head = head * p.group + row;
                    if (row < rows)
                        store_float(p.lse + (qo_start * static_cast<u64>(p.q_heads) + q_head) * 4,
                                    ended.sum[h] > 0.f ? (ended.top[h] + log2_fast(ended.sum[h])) * LN_2
                                                       : __int_as_float(load_written_u32(p.sinks + 4ull * q_head)));
                }
                return;
            }
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const u32 row = n * 8 + lane * 2 + h, query = row / p.group;
            if (row < rows)
                store_float(p.lse + ((qo_start + query) * static_cast<u64>(p.q_heads) + head * p.group + (row - query * p.group)) * 4,
                            ended.sum[h] > 0.f ? (ended.top[h] + log2_fast(ended.sum[h])) * LN_2 : MINUS_INF);
        }
    }
};

// Ends a segment in a decode kernel: joins the sums of its WARPS warps and writes them to their target. Returns whether the
// work chunk continues. RING_BYTES: bytes of a warp's tiles, which are free at the end of the chunk. `again`: this is not the
// CTA's first segment, so the other warps first wait until warp 0 has read their previous sums.
template <int WARPS, int RING_BYTES, class Kernel, int NT, int DIMS>
DEVICE bool end_segment(Kernel& k, const typename Kernel::Cursor& c, u32 rows, bool again, float (&o)[NT][DIMS][4], float (&top)[NT][2],
                        float (&sum)[NT][2]) {
    auto& shared = k.shared;
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
            for (int i = 4; i < 32; i *= 2) sum[n][h] += __shfl_xor_sync(~0u, sum[n][h], i);
    const bool more = c.unit + (c.stop - c.at) < c.unit_end;
    if constexpr (WARPS == 1) {
        if (!more) let_next_start();
        k.finish(c, rows, o, top, sum, shared.pending);
    } else if (!more) {
        copy_wait<0>();
        let_next_start();
        k.store_sum(k.ring, shared.last_tops[k.warp], o, top, sum);
        Kernel::sync();
        Kernel::sync();  // racecheck does not track the barriers of pairs; one barrier suffices
        k.finish_last(c, rows, k.rings, RING_BYTES, shared.last_tops, shared.pending);
    } else if (k.warp > 0) {
        if (again) Kernel::sync_pair(WARPS - 1 + k.warp);
        k.store_sum(k.sums + (k.warp - 1) * Kernel::SUM, shared.tops[k.warp - 1], o, top, sum);
        Kernel::sync_pair(k.warp);
    } else {
#pragma unroll 1
        for (u32 w = 1; w < WARPS; ++w) {
            if (again) Kernel::sync_pair(WARPS - 1 + w);
            Kernel::sync_pair(w);
            k.add_sum(k.sums + (w - 1) * Kernel::SUM, shared.tops[w - 1], o, top, sum);
        }
        k.finish(c, rows, o, top, sum, shared.pending);
    }
    return more;
}
