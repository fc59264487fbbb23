// Sums in parts where spans are read once: which parts a (row, kv head) has, where they stand, and their join.
//
// A part is rows of dims, and of each row what its sum is relative to and the weights' sum.
#pragma once
#include "decode_parts.cuh"

DEVICE RowShare load_share(const AttendSharedParams& p, u32 index) {
    const u64 at = p.shares + sizeof(RowShare) * static_cast<u64>(index);
    const uint4 a = load_uint4(at), b = load_uint4(at + 16);
    return {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
}

// What all kernels read of the spans' items in the plan. TAILS: warps of a CTA that work on tails.
template <int TAILS> struct SpanPlan {
    enum { SPANS = 1 };
    DEVICE const AttendSharedParams& all(const AttendParams& p) { return reinterpret_cast<const AttendSharedParams&>(p); }
    DEVICE SharedHead plan(const AttendParams& p) {
        const uint4 head = load_uint4(p.plan);
        return {head.x, head.y, head.z, head.w};
    }
    DEVICE u32 count(const AttendParams& p) { return load_u32(p.plan) * p.kv_heads; }
    // The CTA's number among those that work on spans, which stand behind the others.
    DEVICE u32 cta(const AttendParams& p) { return blockIdx.x - load_u32(p.plan + 8) / TAILS; }
    DEVICE u32 cta_count(const AttendParams& p) { return load_u32(p.plan + 4); }
    DEVICE ExtendWork load(const AttendParams& p, u32 item) {
        const u64 at = all(p).works + sizeof(ExtendWork) * (item / p.kv_heads);
        const uint4 a = load_uint4(at), b = load_uint4(at + 16);
        return {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
    }
    DEVICE u32* tickets(const AttendParams& p) { return reinterpret_cast<u32*>(all(p).tickets); }
    DEVICE u32 token(const AttendParams& p, u32 place) { return load_u32(all(p).members + sizeof(SpanMember) * place); }
};

// The parts of a (row, kv head) that are of its own tokens: work chunks that its units lie in.
struct OwnParts {
    u32 count;
    u32 first_warp;  // that has the first
    DEVICE OwnParts of(u32 start, u32 units, u32 head, u32 stripes, u32 work_units) {
        const u32 begin = start + head / stripes * units, some = max(1u, units - DECODE_EXTRA), first = begin / work_units;
        return {(begin + some - 1) / work_units - first + 1, first * stripes + head % stripes};
    }
};

// Who arrives for a (row, kv head): its own parts, and of each part of its spans each of its new tokens, which may lie in two items.
DEVICE u32 arrivals(const OwnParts& own, const RowShare& share) { return own.count + share.parts * share.extend_len; }

// The slot of part `part` of them. A row that lies in one work chunk has a slot of its own.
DEVICE u32 own_slot(const AttendSharedParams& p, const SharedHead& head, const OwnParts& own, u32 part, u32 index, u32 kv_head) {
    if (own.count == 1) return 2 * head.decode_warps + index * p.attend.kv_heads + kv_head;
    return 2 * (own.first_warp + part * p.attend.stripes) + (part == 0);
}

DEVICE u32* row_counter(const AttendSharedParams& p, u32 index, u32 kv_head) {
    return reinterpret_cast<u32*>(p.attend.counters) + index * p.attend.kv_heads + kv_head;
}

// (row, kv head)s whose sums are in parts, by index * kv_heads + kv head.
template <u32 MOST> struct ListedSums {
    u32 count;
    u16 listed[MOST];
    __device__ __forceinline__ void add(u32 sum) { listed[atomicAdd(&count, 1)] = static_cast<u16>(sum); }
};

// A row's share of a lane's, 128 bytes apart; where `some` is false x stays.
template <int COUNT, int AT = 0> DEVICE void load_row(float4 (&x)[COUNT], u64 from, bool some) {
    load_float4_shared<AT * 128>(x[AT], from, some);
    if constexpr (AT + 1 < COUNT) load_row<COUNT, AT + 1>(x, from, some);
}

// Joins the parts of one (row, kv head): a warp, eight lanes to a query row, four query rows at a time. ROWS: query rows that an own
// part has room for; TILE: query rows of an item. Each launch runs this code cold, so that it is short matters more than what it does.
template <class T, int D, int ROWS, int TILE> struct SharedJoin {
    enum { BATCH = D > 128 ? 4 : 8, FOURS = D / 32 };  // parts whose loads are in flight together; float4 of a lane

    // Warp `warp` of `warps` joins its share of what is listed, whose records are loaded side by side.
    template <u32 MOST>
    static __device__ __forceinline__ void join_all(const AttendSharedParams& p, const SharedHead& plan, const ListedSums<MOST>& sums, u32 warp, u32 warps) {
        const u32 count = sums.count, lane = threadIdx.x % 32;
#pragma unroll 1
        for (u32 from = warp; from < count; from += 32 * warps) {
            const u32 mine = from + lane * warps, sum = mine < count ? sums.listed[mine] : 0;
            const RowShare share = load_share(p, sum / p.attend.kv_heads);
#pragma unroll 1
            for (u32 i = 0; i < 32 && from + i * warps < count; ++i) {
                auto of = [&](u32 field) { return __shfl_sync(~0u, field, i); };
                const RowShare one = {0, of(share.place), of(share.span), of(share.parts), of(share.start), of(share.units), of(share.qo_start), of(share.extend_len)};
                join(p, plan, one, of(sum) / p.attend.kv_heads, of(sum) % p.attend.kv_heads);
            }
        }
    }

    static __device__ __forceinline__ void join(const AttendSharedParams& p, const SharedHead& plan, const RowShare& share, u32 index, u32 kv_head) {
        const u32 lane = threadIdx.x % 32, group = p.attend.group, rows = share.extend_len * group;
        const OwnParts own = OwnParts::of(share.start, share.units, kv_head, p.attend.stripes, plan.work_units);
        const u32 total = own.count + share.parts;
#pragma unroll 1
        for (u32 row = lane / 8; row - lane / 8 < rows; row += 4) {
            const bool there = row < rows;
            const u32 query = row / group;
            float top = MINUS_INF, sum = 0.f, o[FOURS][4] = {};
#pragma unroll 1
            for (u32 from = 0; from < total; from += BATCH) {
                // Where the sums of part from + lane % 8 stand for this lane's query, and what they are relative to.
                const u32 part = from + lane % 8;
                u64 data = 0, tops = 0;
                if (part < own.count) {
                    const u32 slot = own_slot(p, plan, own, part, index, kv_head);
                    data = p.attend.partial + slot * u64(ROWS * D * 4), tops = p.tops + slot * u64(ROWS * 8);
                } else if (part < total) {
                    u32 piece = part - own.count;
                    uint4 span = load_uint4(p.spans + sizeof(SpanParts) * share.span);
                    for (u32 at = share.span; piece >= span.y;) {
                        piece -= span.y;
                        at = load_u32(p.spans + sizeof(SpanParts) * at + 16);
                        span = load_uint4(p.spans + sizeof(SpanParts) * at);
                    }
                    const u32 members = span.w, whole = TILE / group, nth = share.place - span.z, before = (nth + query) / whole * whole;
                    const u32 at = span.x + ((piece * members + before) * p.attend.kv_heads + kv_head * min(whole, members - before) + nth - before) * group;
                    data = p.span_partial + at * u64(D * 4), tops = p.span_tops + at * 8ull;
                }
                float4 x[BATCH][FOURS];
                float2 of[BATCH];
#pragma unroll
                for (int k = 0; k < BATCH; ++k) {
                    const u64 of_data = __shfl_sync(~0u, data, k, 8) + row * (D * 4) + lane % 8 * 16, of_tops = __shfl_sync(~0u, tops, k, 8) + row * 8;
                    const bool is = there && from + k < total;
                    of[k] = make_float2(MINUS_INF, 0.f);
                    load_float2_shared(of[k], of_tops, is);
#pragma unroll
                    for (int i = 0; i < FOURS; ++i) x[k][i] = make_float4(0.f, 0.f, 0.f, 0.f);
                    load_row(x[k], of_data, is);
                }
                float above = top;
#pragma unroll
                for (int k = 0; k < BATCH; ++k) above = fmaxf(above, of[k].x);
                const float base = above == MINUS_INF ? 0.f : above, old = exp2_fast(top - base);
                top = above, sum *= old;
#pragma unroll
                for (int i = 0; i < FOURS; ++i) o[i][0] *= old, o[i][1] *= old, o[i][2] *= old, o[i][3] *= old;
#pragma unroll
                for (int k = 0; k < BATCH; ++k) {
                    const float weight = exp2_fast(of[k].x - base);
                    sum += of[k].y * weight;
#pragma unroll
                    for (int i = 0; i < FOURS; ++i)
                        o[i][0] += x[k][i].x * weight, o[i][1] += x[k][i].y * weight, o[i][2] += x[k][i].z * weight, o[i][3] += x[k][i].w * weight;
                }
            }
            if (!there) continue;
            const u32 q_head = kv_head * group + row - query * group;
            const float worth = enter_sink(p.attend, q_head, top, sum), inverse = sum > 0.f ? worth * (1.f / sum) : 0.f;
            const u64 token = share.qo_start + query, to = p.attend.out + token * p.attend.out_stride + q_head * (D * 2) + lane % 8 * 8;
#pragma unroll
            for (int i = 0; i < FOURS; ++i)
                store_uint2(to + i * 64, pack(T(), o[i][0] * inverse, o[i][1] * inverse), pack(T(), o[i][2] * inverse, o[i][3] * inverse));
            if (p.attend.lse != 0 && lane % 8 == 0)
                store_float(p.attend.lse + (token * p.attend.q_heads + q_head) * 4, sum > 0.f ? (top + log2_fast(sum)) * LN_2 : MINUS_INF);
        }
    }
};

// Rows whose units begin behind their spans.
struct TailRows {
    static constexpr bool WHOLE = false;
    enum : u32 { EXTRA = DECODE_EXTRA };
    static __device__ __forceinline__ u32 first(const AttendParams& p, u32 index) {
        return load_u32(reinterpret_cast<const AttendSharedParams&>(p).shares + sizeof(RowShare) * static_cast<u64>(index));
    }
};

// The decode kernel's parts for warps that have a work chunk each, TAILS of a CTA. Tails are short: what the end of one costs, other
// warps hide. TILE: query rows of an item.
template <class T, int D, int NT, int TAILS = TAIL_WARPS, int TILE = SPAN_ROWS> struct SharedDecodeParts : DecodeParts<T, D, NT, 1> {
    using Base = DecodeParts<T, D, NT, 1>;
    using Base::ROWS, Base::p, Base::lane, Base::work_units, Base::write, Base::write_lse;
    using Cursor = DecodeCursor<TailRows>;
    using Join = SharedJoin<T, D, ROWS, TILE>;
    enum { Q_REGISTERS = 128 };

    const AttendSharedParams& all;
    SharedHead plan;
    u32 number;  // of all warps that decode
    __device__ __forceinline__ explicit SharedDecodeParts(const AttendParams& p)
        : Base(p, thread()), all(reinterpret_cast<const AttendSharedParams&>(p)) {
        const uint4 head = load_uint4(p.plan);
        plan = {head.x, head.y, head.z, head.w};
        number = blockIdx.x * TAILS + threadIdx.x / 32;
    }

    static __device__ __forceinline__ u32 thread() { return threadIdx.x % 32; }
    static __device__ __forceinline__ void sync() { __syncwarp(); }

    using Pendings = ListedSums<LISTED_TAILS>;
    static __device__ __forceinline__ void clear(Pendings& pendings) {
        if (thread() == 0) pendings.count = 0;
    }

    __device__ __forceinline__ u32 head_of(const Cursor& c) const { return c.head * p.stripes + number % p.stripes; }

    // The end of a segment: its sum is the result, or a part of it, or of no tokens.
    __device__ __forceinline__ void finish(const Cursor& c, u32 rows, const float (&o)[NT][D / 16][4], const float (&top)[NT][2],
                                           const float (&sum)[NT][2], Pendings& pendings) {
        if (c.at >= max(1u, c.units - DECODE_EXTRA)) return;
        const u32 head = head_of(c);
        const OwnParts own = OwnParts::of(c.start, c.units, head, p.stripes, work_units);
        const u32 parts = own.count + load_u32(all.shares + sizeof(RowShare) * static_cast<u64>(c.index) + 12);
        const u32 slot = own.count == 1 ? 2 * plan.decode_warps + c.index * p.kv_heads + head : 2 * number + (number == own.first_warp);
#pragma unroll
        for (int n = 0; n < NT; ++n) {
            if (parts == 1) put_result(c, rows, head, n, o[n], top[n], sum[n]);
            else put_part(slot, rows, n, o[n], top[n], sum[n]);
        }
        if (parts > 1 && lane == 0) pendings.add(c.index * p.kv_heads + head);
    }

    // Of one eight of query rows.
    __device__ __forceinline__ void put_result(const Cursor& c, u32 rows, u32 head, u32 n, const float (&o)[D / 16][4], const float (&top)[2],
                                               const float (&sum)[2]) {
        const typename Base::Ended ended(*this, n, head, top, sum);
        write_lse(n, c.qo_start, rows, head, ended);
#pragma unroll
        for (int m = 0; m < D / 16; ++m) write(n, m, c.qo_start, rows, head, o[m], ended);
    }
    __device__ __forceinline__ void put_part(u32 slot, u32 rows, u32 n, const float (&o)[D / 16][4], const float (&top)[2], const float (&sum)[2]) {
        const u32 row = n * 8 + lane % 4 * 2;
        float* const data = reinterpret_cast<float*>(p.partial) + (slot * u64(ROWS) + row) * D + lane / 4;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            if (row + h >= rows) continue;
#pragma unroll
            for (int m = 0; m < D / 16; ++m) data[h * D + m * 16] = o[m][h], data[h * D + m * 16 + 8] = o[m][h + 2];
            if (lane < 4) reinterpret_cast<float2*>(all.tops)[slot * u64(ROWS) + row + h] = make_float2(top[h], sum[h]);
        }
    }

    // All parts of this warp are written: says so, and joins those sums of which it was the last to. Arrivals at the end, side by
    // side, cost the memory less than one at each segment's end.
    __device__ __forceinline__ void join_pending(Pendings& pendings) {
        sync();
        const u32 count = pendings.count;
        sync();
        if (thread() == 0) pendings.count = 0;
        for (u32 from = 0; from < count; from += 32) {
            const u32 i = from + thread();
            bool last = false;
            u32 sum = 0;
            if (i < count) {
                sum = pendings.listed[i];
                const u32 index = sum / p.kv_heads, head = sum % p.kv_heads;
                const RowShare share = load_share(all, index);
                const OwnParts own = OwnParts::of(share.start, share.units, head, p.stripes, work_units);
                last = arrive_last_fenced(row_counter(all, index, head), arrivals(own, share));
            }
            sync();  // what stood in the list up to here has been read
            if (last) pendings.add(sum);
        }
        sync();
        __threadfence();
        Join::join_all(all, plan, pendings, 0, 1);
    }
};
