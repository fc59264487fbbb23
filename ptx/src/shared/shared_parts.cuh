// The partial sums of kernels that read spans once. The sum of a (row, kv head) consists of parts, which CTAs write for spans and
// for the row's own tokens. This file computes where the parts are, counts them and joins them.
//
// A part has for each query row a weighted sum of V [D], the maximum logit to which its weights are relative (top), and the sum of
// the weights.
#pragma once
#include "decode_parts.cuh"

// The most query rows of a query tile in any kernel, and the warps of a CTA of Hopper's kernels that work on suffixes.
#define SPAN_ROWS 128
#define SUFFIX_WARPS 8

DEVICE RowShare load_share(const AttendSharedParams& p, u32 index) {
    const u64 at = p.shares + sizeof(RowShare) * static_cast<u64>(index);
    const uint4 a = load_uint4(at), b = load_uint4(at + 16);
    return {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
}

DEVICE SharedHead load_shared_head(const AttendParams& p) {
    const uint4 a = load_uint4(p.plan), b = load_uint4(p.plan + 16);
    return {a.x, a.y, a.z, a.w, b.x, b.y, {}};
}

DEVICE SpanParts load_span(const AttendSharedParams& p, u32 span) {
    const u64 at = p.spans + sizeof(SpanParts) * static_cast<u64>(span);
    const uint4 a = load_uint4(at), b = load_uint4(at + 16);
    return {a.x, a.y, a.z, a.w, b.x, b.y, b.z};
}

// The items of spans in the plan, as all kernels read them. SUFFIXES: warps of a CTA that work on suffixes.
template <int SUFFIXES> struct SpanPlan {
    enum { SPANS = 1 };
    DEVICE const AttendSharedParams& all(const AttendParams& p) { return reinterpret_cast<const AttendSharedParams&>(p); }
    DEVICE const AttendSharedFp8Params& fp8(const AttendParams& p) { return reinterpret_cast<const AttendSharedFp8Params&>(p); }
    // Returns this CTA's number among the CTAs for spans, which follow the CTAs for suffixes. It is the index of its first item.
    DEVICE u32 cta(const AttendParams& p) { return blockIdx.x - load_u32(p.plan) / SUFFIXES; }
    // Returns an item of a span as an extend item. If `behind` is 0, the item's sequence is so long that it sees all
    // tokens. Otherwise the item reads the own tokens of a row, and kv_len is that row's, at most kv_end + 65,534.
    DEVICE ExtendWork load(const AttendParams& p, u32 item) {
        const u64 at = place(p, item);
        const uint2 a = load_uint2(at);
        const uint4 b = load_uint4(at + 16);
        const u32 behind = b.x >> 16;
        return {a.x, a.y, b.x & 0xffff, behind == 0 ? 1u << 30 : b.z + behind - 1, 0, b.y, b.z, b.w};
    }
    // The number of items of a query tile, and the index of one among them.
    struct Piece {
        u32 parts, piece;
    };
    DEVICE Piece piece(const AttendParams& p, u32 item) {
        const uint2 a = load_uint2(place(p, item) + 8);
        return {a.x >> 16, a.y >> 16};
    }
    DEVICE u32 head(const AttendParams& p, u32 item) { return load_u32(place(p, item) + 8) & 0xffff; }
    DEVICE u32 next(const AttendParams& p, u32 item) { return load_u32(place(p, item) + 12) & 0xffff; }
    DEVICE u64 place(const AttendParams& p, u32 item) { return all(p).items + sizeof(SpanItem) * static_cast<u64>(item); }
    DEVICE u32 token(const AttendParams& p, u32 place) { return load_u32(all(p).members + sizeof(SpanMember) * place); }
};

// The parts of a (row, kv head)'s own tokens: one for each work chunk that contains some of its units. A row without units has
// items for its own tokens.
struct OwnParts {
    u32 count;
    u32 first_warp;  // warp with the first part
    DEVICE OwnParts of(u32 start, u32 units, u32 head, u32 stripes, u32 work_units) {
        const u32 begin = start + head / stripes * units, some = max(1, int(units) - int(DECODE_EXTRA)), first = begin / work_units;
        return {units == 0 ? 0 : (begin + some - 1) / work_units - first + 1, first * stripes + head % stripes};
    }
};

DEVICE u32* row_counter(const AttendSharedParams& p, u32 index, u32 kv_head) {
    return reinterpret_cast<u32*>(p.attend.counters) + index * p.attend.kv_heads + kv_head;
}

// Returns the number of arrivals for a (row, kv head): one for each own part, and one for each span and new token. The new tokens
// are counted separately, because they may be in two query tiles.
DEVICE u32 arrivals(const OwnParts& own, const RowShare& share) { return own.count + share.depth * share.extend_len; }
// Signals that all parts of a query tile's sum are written for one of its members.
struct Arrival {
    u32* counter;
    u32 of;
    u32 sum;  // the (row, kv head): index * kv_heads + kv head
    DEVICE Arrival of_member(const AttendSharedParams& p, const SharedHead& plan, u32 place, u32 head) {
        const u32 index = load_u32(p.members + sizeof(SpanMember) * place + 4);
        const RowShare share = load_share(p, index);
        const OwnParts own = OwnParts::of(share.start, share.units, head, p.attend.stripes, plan.work_units);
        return {row_counter(p, index, head), arrivals(own, share), index * p.attend.kv_heads + head};
    }
    // Signals the arrival, and returns whether it is the last of the member's row.
    __device__ __forceinline__ bool is_last() const { return arrive_last_fenced(counter, of); }
};

// Returns the slot of own part `part`. If all units of a (row, kv head) are in one work chunk, it has a slot of its own.
DEVICE u32 own_slot(const AttendSharedParams& p, const SharedHead& head, const OwnParts& own, u32 part, u32 sum) {
    if (own.count == 1) return 2 * head.decode_warps + sum;
    return 2 * (own.first_warp + part * p.attend.stripes) + (part == 0);
}

// The parts of a span's sum for one member (a new token): one for each CTA that has tiles of the member's query tile.
template <int TILE> struct QueryTileParts {
    u32 count;
    u32 row;  // row of the first part in the spans' sums
    DEVICE QueryTileParts of(const SharedHead& plan, const SpanParts& span, u32 place, u32 head, u32 group) {
        const u32 whole = TILE / group, nth = place - span.member_start, query_tile = nth / whole, in_tile = (nth - query_tile * whole) * group;
        const u32 begin = head * plan.head_tiles + span.tile_at + query_tile * span.stride, first = begin / plan.work_tiles;
        const u32 count = (begin + span.tiles - 1) / plan.work_tiles - first + 1;
        const u32 alone = 2 * plan.span_ctas * TILE + head * plan.head_rows + span.row_at + nth * group;
        return {count, count == 1 ? alone : (2 * first + 1) * TILE + in_tile};
    }
    __device__ __forceinline__ u32 row_of(u32 part) const { return part == 0 ? row : row + (2 * part - 1) * TILE; }
};

// A list of (row, kv head)s whose sums consist of parts. Each is listed as index * kv_heads + kv head.
template <u32 MOST> struct ListedSums {
    static_assert(LISTED_SUMS <= 1 << 16, "a (row, kv head) is listed as a u16");
    u32 count;
    u16 listed[MOST];
    __device__ __forceinline__ void add(u32 sum) { listed[atomicAdd(&count, 1)] = static_cast<u16>(sum); }
};

// A barrier of the CTAs that write parts of one query tile's sum. After it each CTA joins some of the tile's members,
// because one CTA would need as long for all of them as for four tiles. A CTA waits for the others after its items. It
// stops waiting after some polls, since the others may not run at the same time. The last CTA to arrive then also joins
// the members of such a CTA.
struct Meeting {
    enum : u32 { LISTED = 48, TRIES = 96 };  // pieces for which the state can record that they stopped waiting; number of polls
    u32 parts, piece;
    bool mine, last;  // whether this CTA joins its own members; whether it was the last to arrive
    u64 before;  // the state before this CTA arrived

    DEVICE u64 at(const AttendSharedParams& p, u32 cta, u32 piece) { return p.meetings + sizeof(SpanMeeting) * static_cast<u64>(cta - piece); }
    DEVICE u64 add(u64 at, u64 amount) {
        u64 before;
        asm volatile("atom.acq_rel.gpu.global.add.u64 %0, [%1], %2;" : "=l"(before) : "l"(at), "l"(amount) : "memory");
        return before;
    }
    // Signals that this CTA's part is written, and returns the previous state. One thread calls it.
    DEVICE u64 come(const AttendSharedParams& p, u32 cta, u32 piece) { return add(at(p, cta, piece), 1); }
    // Waits for the other CTAs, after all items. One thread calls it; `came` is the result of `come`.
    DEVICE Meeting wait(const AttendSharedParams& p, u32 cta, u32 parts, u32 piece, u64 came) {
        const u64 state = at(p, cta, piece);
        auto all = [&](u64 seen) { return static_cast<u32>(seen & 0xffff) == parts; };
        const bool last = all(came + 1);
        bool mine = last;
        for (u32 i = 0; piece < LISTED && !mine && i < TRIES; ++i) {
            u64 seen;
            asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(seen) : "l"(state) : "memory");
            mine = all(seen);
        }
        if (piece < LISTED && !mine) mine = all(add(state, 1ull << (16 + piece)));
        if (arrive_last_fenced(reinterpret_cast<u32*>(state + 8), parts)) store_uint2(state, 0, 0);
        return {parts, piece, mine, last, came};
    }
    // Returns whether this CTA joins a member of the query tile.
    __device__ __forceinline__ bool has(u32 member) const {
        const u32 of = member % parts;
        return of == piece ? mine : last && (of >= LISTED || (before >> (16 + of) & 1));
    }
};

// Loads a lane's share of a row: float4s that are 128 bytes apart. Leaves x unchanged if `some` is false.
template <int COUNT, int AT = 0> DEVICE void load_row(float4 (&x)[COUNT], u64 from, bool some) {
    load_float4_shared<AT * 128>(x[AT], from, some);
    if constexpr (AT + 1 < COUNT) load_row<COUNT, AT + 1>(x, from, some);
}

// Joins the parts of (row, kv head)s. A warp joins four query rows at a time, with eight lanes for each. ROWS: query rows for which
// an own part has space; TILE: query rows of a query tile; BATCH: parts whose loads are in flight together. The code is short,
// because at each launch it is not yet in the instruction cache.
template <class T, int D, int ROWS, int TILE, int BATCH> struct SharedJoin {
    enum { FOURS = D / 32 };  // float4 of a lane

    // Up to BATCH parts of this lane's query row. `data` and `tops` are the addresses of part lane % 8.
    struct Turn {
        u64 data, tops;
        u32 token, q_head;
        bool there, ends;  // whether the row exists; whether the sums of the warp's four rows end with these parts
    };

    // The values of a query row of a (row, kv head) that locating its parts needs.
    struct Place {
        OwnParts own;
        u32 sum, kv_head, row, head_row;  // row: of the (row, kv head); head_row: of its token
        u32 token, member, span, rows;
        DEVICE Place of(const AttendParams& p, const SharedHead& plan, const RowShare& share, u32 sum, u32 row) {
            const u32 kv_head = sum % p.kv_heads, query = row / p.group;
            const OwnParts own = OwnParts::of(share.start, share.units, kv_head, p.stripes, plan.work_units);
            const u32 rows = share.extend_len * p.group;
            return {own, sum, kv_head, row, row - query * p.group, share.qo_start + query, share.place + query, share.span, rows};
        }
    };

    // Locates the parts of a query row from `from` on.
    static __device__ __forceinline__ Turn locate(const AttendSharedParams& p, const SharedHead& plan, const Place& of, u32 from) {
        const u32 group = p.attend.group, part = from + threadIdx.x % 8;
        const bool there = of.row < of.rows;
        Turn turn = {0, 0, of.token, of.kv_head * group + of.head_row, there, false};
        if (there && part < of.own.count) {
            const u64 at = own_slot(p, plan, of.own, part, of.sum) * u64(ROWS) + of.row;
            turn.data = p.attend.partial + at * (D * 4), turn.tops = p.tops + at * 8;
        }
        u32 count = of.own.count;
        for (u32 at = of.span; there && at != NO_SPAN;) {
            const SpanParts span = load_span(p, at);
            const auto parts = QueryTileParts<TILE>::of(plan, span, of.member, of.kv_head, group);
            if (part >= count && part < count + parts.count) {
                const u64 at = parts.row_of(part - count) + of.head_row;
                turn.data = p.span_partial + at * (D * 4), turn.tops = p.span_tops + at * 8;
            }
            count += parts.count, at = span.parent;
        }
        turn.ends = !__any_sync(~0u, there && from + BATCH < count);
        return turn;
    }

    // Joins the listed sums that belong to warp `warp` of `warps`. The warp loads the records of 32 sums together.
    // While it loads parts, it locates the next ones.
    template <u32 MOST>
    static __device__ __forceinline__ void join_all(const AttendSharedParams& p, const SharedHead& plan, const ListedSums<MOST>& sums, u32 warp, u32 warps) {
        const u32 count = sums.count, lane = threadIdx.x % 32;
#pragma unroll 1
        for (u32 first = warp; first < count; first += 32 * warps) {
            const u32 mine = first + lane * warps, listed = mine < count ? sums.listed[mine] : 0;
            const RowShare share = load_share(p, listed / p.attend.kv_heads);
            float top = MINUS_INF, sum = 0.f, o[FOURS][4] = {};
            Turn turn = {};
            bool is = false;
            Place place = {};
            u32 i = 0, row = lane / 8, from = 0;  // of the next turn
#pragma unroll 1
            for (;;) {
                float4 x[BATCH][FOURS];
                float2 of[BATCH];
#pragma unroll
                for (int k = 0; k < BATCH; ++k) {
                    const u64 data = __shfl_sync(~0u, turn.data, k, 8), tops = __shfl_sync(~0u, turn.tops, k, 8);
                    of[k] = make_float2(MINUS_INF, 0.f);
                    load_float2_shared(of[k], tops, data != 0);
#pragma unroll
                    for (int n = 0; n < FOURS; ++n) x[k][n] = make_float4(0.f, 0.f, 0.f, 0.f);
                    load_row(x[k], data + lane % 8 * 16, data != 0);
                }
                const bool more = i < 32 && first + i * warps < count;
                Turn next = {};
                if (more) {
                    auto of = [&](u32 field) { return __shfl_sync(~0u, field, i); };
                    if (from == 0) {
                        const RowShare one = {0, of(share.place), of(share.span), 0, of(share.start), of(share.units), of(share.qo_start), of(share.extend_len)};
                        place = Place::of(p.attend, plan, one, of(listed), row);
                    }
                    next = locate(p, plan, place, from);
                    from += BATCH;
                    if (next.ends) from = 0, row += 4;
                    if (row - lane / 8 >= place.rows) row = lane / 8, ++i;
                }
                if (is) add(x, of, top, sum, o);
                if (is && turn.ends) {
                    if (turn.there) put(p.attend, turn, top, sum, o);
                    top = MINUS_INF, sum = 0.f;
#pragma unroll
                    for (int n = 0; n < FOURS; ++n) o[n][0] = o[n][1] = o[n][2] = o[n][3] = 0.f;
                }
                if (!more) break;
                turn = next, is = true;
            }
        }
    }

    // Adds parts to a sum. The weights of part k are relative to `of[k].x`.
    static __device__ __forceinline__ void add(const float4 (&x)[BATCH][FOURS], const float2 (&of)[BATCH], float& top, float& sum, float (&o)[FOURS][4]) {
        float above = top;
#pragma unroll
        for (int k = 0; k < BATCH; ++k) above = fmaxf(above, of[k].x);
        const float base = above == MINUS_INF ? 0.f : above, old = exp2_fast(top - base);
        top = above, sum *= old;
#pragma unroll
        for (int n = 0; n < FOURS; ++n) o[n][0] *= old, o[n][1] *= old, o[n][2] *= old, o[n][3] *= old;
#pragma unroll
        for (int k = 0; k < BATCH; ++k) {
            const float weight = exp2_fast(of[k].x - base);
            sum += of[k].y * weight;
#pragma unroll
            for (int n = 0; n < FOURS; ++n)
                o[n][0] += x[k][n].x * weight, o[n][1] += x[k][n].y * weight, o[n][2] += x[k][n].z * weight, o[n][3] += x[k][n].w * weight;
        }
    }

    // Writes a query row's result, of which each of eight lanes has a share.
    static __device__ __forceinline__ void put(const AttendParams& p, const Turn& turn, float top, float sum, const float (&o)[FOURS][4]) {
        const u32 lane = threadIdx.x % 8;
        const float worth = enter_sink(p, turn.q_head, top, sum), inverse = sum > 0.f ? worth * (1.f / sum) : 0.f;
        const u64 token = turn.token, to = p.out + token * p.out_stride + turn.q_head * (D * 2) + lane * 8;
#pragma unroll
        for (int n = 0; n < FOURS; ++n)
            store_uint2(to + n * 64, pack(T(), o[n][0] * inverse, o[n][1] * inverse), pack(T(), o[n][2] * inverse, o[n][3] * inverse));
        if (p.lse != 0 && lane == 0)
            store_float(p.lse + (token * p.q_heads + turn.q_head) * 4, sum > 0.f ? (top + log2_fast(sum)) * LN_2 : MINUS_INF);
    }
};

// Signals the ends of a CTA's items, and joins the sums that become complete.
struct SpanEnds : ListedSums<SPAN_ROWS> {
    u64 came[2];  // results of `come`: for an item with earlier pieces in other CTAs, and for one that begins its query tile
    Meeting meeting;

    // Signals the end of an item. One thread calls it, after a barrier of all threads that wrote the part.
    template <class Of> __device__ __forceinline__ void tell(const AttendSharedParams& p, u32 cta, const Of& of) {
        if (of.parts == 1) return;
        __threadfence();
        came[of.piece == 0] = Meeting::come(p, cta, of.piece);
    }
    // Joins complete sums. All threads of `warps` warps call it; `sync` is their barrier.
    template <class Items, class Join, class Sync> __device__ __forceinline__ void meet(const AttendSharedParams& p, u32 thread, u32 warps, Sync sync) {
        const SharedHead plan = load_shared_head(p.attend);
        const u32 cta = Items::cta(p.attend);
        for (u32 item = cta;;) {
            const ExtendWork work = Items::load(p.attend, item);
            const auto [parts, piece] = Items::piece(p.attend, item);
            const u32 next = Items::next(p.attend, item);
            Arrival arrival;
            if (thread < work.extend_len) arrival = Arrival::of_member(p, plan, work.qo_start + thread, Items::head(p.attend, item));
            if (thread == 0) {
                count = 0;
                meeting = parts == 1 ? Meeting{1, 0, true, false, 0} : Meeting::wait(p, cta, parts, piece, came[piece == 0]);
            }
            sync();
            if (thread < work.extend_len && meeting.has(thread) && arrival.is_last()) add(arrival.sum);
            sync();
            __threadfence();
            Join::join_all(p, plan, *this, thread / 32, warps);
            if (next == 0) return;
            item = next;
            sync();
        }
    }
};

// Rows of the decode cursor: a row's units begin after its spans.
struct TailRows {
    static constexpr bool WHOLE = false;
    enum : u32 { EXTRA = DECODE_EXTRA };
    static __device__ __forceinline__ u32 first(const AttendParams& p, u32 index) {
        return load_u32(reinterpret_cast<const AttendSharedParams&>(p).shares + sizeof(RowShare) * static_cast<u64>(index));
    }
};

// DecodeParts for suffixes. A CTA has SUFFIXES warps, and each warp has a work chunk of its own. Suffixes are short, and while a warp ends
// one, the other warps keep the multiprocessor busy. TILE and BATCH are those of SharedJoin.
template <class T, int D, int NT, int SUFFIXES = SUFFIX_WARPS, int TILE = SPAN_ROWS, int BATCH = 8> struct SharedDecodeParts : DecodeParts<T, D, NT, 1> {
    using Base = DecodeParts<T, D, NT, 1>;
    using Base::ROWS, Base::p, Base::lane, Base::work_units, Base::write, Base::write_lse;
    using Cursor = DecodeCursor<TailRows>;
    using Fp8Params = AttendSharedFp8Params;
    using Join = SharedJoin<T, D, ROWS, TILE, BATCH>;
    enum { Q_REGISTERS = 128 };

    const AttendSharedParams& all;
    u32 decode_warps;  // unused over fp8, whose loop has no register for it
    u32 number;        // this warp's index among all warps that work on suffixes
    __device__ __forceinline__ explicit SharedDecodeParts(const AttendParams& p)
        : Base(p, thread()), all(reinterpret_cast<const AttendSharedParams&>(p)) {
        if constexpr (!over_fp8(T())) decode_warps = load_u32(p.plan);
        number = blockIdx.x * SUFFIXES + threadIdx.x / 32;
    }

    static __device__ __forceinline__ u32 thread() { return threadIdx.x % 32; }
    static __device__ __forceinline__ void sync() { __syncwarp(); }

    using Pendings = ListedSums<LISTED_SUFFIXES>;
    static __device__ __forceinline__ void clear(Pendings& pendings) {
        if (thread() == 0) pendings.count = 0;
    }

    __device__ __forceinline__ u32 head_of(const Cursor& c) const { return c.head * p.stripes + number % p.stripes; }

    // Ends a segment: writes its sum as a result or as a part. Segments of only extra units have no sum.
    __device__ __forceinline__ void finish(const Cursor& c, u32 rows, const float (&o)[NT][D / 16][4], const float (&top)[NT][2],
                                           const float (&sum)[NT][2], Pendings& pendings) {
        if (c.at >= max(1u, c.units - DECODE_EXTRA)) return;
        const u32 head = head_of(c);
        const OwnParts own = OwnParts::of(c.start, c.units, head, p.stripes, work_units);
        const u32 parts = own.count + load_u32(all.shares + sizeof(RowShare) * static_cast<u64>(c.index) + 12);
        const u32 warps = over_fp8(T()) ? load_u32(p.plan) : decode_warps;
        const u32 slot = own.count == 1 ? 2 * warps + c.index * p.kv_heads + head : 2 * number + (number == own.first_warp);
#pragma unroll
        for (int n = 0; n < NT; ++n) {
            if (parts == 1) put_result(c, rows, head, n, o[n], top[n], sum[n]);
            else put_part(slot, rows, n, o[n], top[n], sum[n]);
        }
        if (parts > 1 && lane == 0) pendings.add(c.index * p.kv_heads + head);
    }

    // Writes the results of a block of eight query rows.
    __device__ __forceinline__ void put_result(const Cursor& c, u32 rows, u32 head, u32 n, const float (&o)[D / 16][4], const float (&top)[2],
                                               const float (&sum)[2]) {
        const typename Base::Ended ended(*this, n, head, top, sum);
        write_lse(n, c.qo_start, rows, head, ended);
#pragma unroll
        for (int m = 0; m < D / 16; ++m) {
            // Hides `at` from the compiler, which would otherwise keep an address for each m in a register.
            u32 at = m;
            asm volatile("" : "+r"(at));
            write(n, at, c.qo_start, rows, head, o[m], ended);
        }
    }
    __device__ __forceinline__ void put_part(u32 slot, u32 rows, u32 n, const float (&o)[D / 16][4], const float (&top)[2], const float (&sum)[2]) {
        const u32 row = n * 8 + lane % 4 * 2;
        // A lane's second number is of the next dim over fp8, otherwise of the eighth dim after the first.
        constexpr u32 NEXT = over_fp8(T()) ? 1 : 8;
        float* const data = reinterpret_cast<float*>(p.partial) + (slot * u64(ROWS) + row) * D + lane / 4 * (over_fp8(T()) ? 2 : 1);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            if (row + h >= rows) continue;
#pragma unroll
            for (int m = 0; m < D / 16; ++m) data[h * D + m * 16] = o[m][h], data[h * D + m * 16 + NEXT] = o[m][h + 2];
            if (lane < 4) reinterpret_cast<float2*>(all.tops)[slot * u64(ROWS) + row + h] = make_float2(top[h], sum[h]);
        }
    }

    // Signals that all parts of this warp are written, and joins the sums of which a part of this warp was the last.
    // Arrivals all together at the end take less memory time than an arrival at the end of each segment.
    __device__ __forceinline__ void join_pending(Pendings& pendings) {
        const SharedHead plan = load_shared_head(p);
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
            sync();  // the previous contents of the list have been read
            if (last) pendings.add(sum);
        }
        sync();
        __threadfence();
        Join::join_all(all, plan, pendings, 0, 1);
    }
};
