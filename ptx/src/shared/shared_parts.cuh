// Partial sums if spans are read once: the parts of a (row, kv head), their places, and their join.
//
// A part consists of rows of dims, and for each row the reference of its sum and the sum of its weights.
#pragma once
#include "decode_parts.cuh"

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

// The part of the plan with the spans' items, for all kernels. TAILS: warps of a CTA that work on tails.
template <int TAILS> struct SpanPlan {
    enum { SPANS = 1 };
    DEVICE const AttendSharedParams& all(const AttendParams& p) { return reinterpret_cast<const AttendSharedParams&>(p); }
    DEVICE const AttendSharedFp8Params& fp8(const AttendParams& p) { return reinterpret_cast<const AttendSharedFp8Params&>(p); }
    // Index of this CTA's first item: CTAs for spans come after the others.
    DEVICE u32 cta(const AttendParams& p) { return blockIdx.x - load_u32(p.plan) / TAILS; }
    // A query tile as an extend item: of a sequence so long that it sees all tokens, or of the row whose own tokens it reads.
    DEVICE ExtendWork load(const AttendParams& p, u32 item) {
        const u64 at = place(p, item);
        const uint2 a = load_uint2(at);
        const uint4 b = load_uint4(at + 16);
        const u32 behind = b.x >> 16;
        return {a.x, a.y, b.x & 0xffff, behind == 0 ? 1u << 30 : b.z + behind - 1, 0, b.y, b.z, b.w};
    }
    // Its index among its query tile's items, and their number.
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

// The parts of a (row, kv head)'s own tokens: work chunks with its units. A row without units has items instead.
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

// Number of arrivals for a (row, kv head): its own parts, and one for each span of each new token, which may be in two query
// tiles.
DEVICE u32 arrivals(const OwnParts& own, const RowShare& share) { return own.count + share.depth * share.extend_len; }
// The arrival of a member of a query tile, when all parts of its sum are present.
struct Arrival {
    u32* counter;
    u32 of;
    u32 sum;  // index * kv_heads + kv head
    DEVICE Arrival of_member(const AttendSharedParams& p, const SharedHead& plan, u32 place, u32 head) {
        const u32 index = load_u32(p.members + sizeof(SpanMember) * place + 4);
        const RowShare share = load_share(p, index);
        const OwnParts own = OwnParts::of(share.start, share.units, head, p.attend.stripes, plan.work_units);
        return {row_counter(p, index, head), arrivals(own, share), index * p.attend.kv_heads + head};
    }
    // Signals the arrival, and returns whether it is the last of the member's row.
    __device__ __forceinline__ bool is_last() const { return arrive_last_fenced(counter, of); }
};

// The slot of part `part`. A row with units in one work chunk has its own slot.
DEVICE u32 own_slot(const AttendSharedParams& p, const SharedHead& head, const OwnParts& own, u32 part, u32 sum) {
    if (own.count == 1) return 2 * head.decode_warps + sum;
    return 2 * (own.first_warp + part * p.attend.stripes) + (part == 0);
}

// The parts of a span for one of its members' new tokens: those of the CTAs with tiles of its query tile.
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

// The (row, kv head)s whose sums are in parts, by index * kv_heads + kv head.
template <u32 MOST> struct ListedSums {
    static_assert(LISTED_SUMS <= 1 << 16, "a sum's number is a u16");
    u32 count;
    u16 listed[MOST];
    __device__ __forceinline__ void add(u32 sum) { listed[atomicAdd(&count, 1)] = static_cast<u16>(sum); }
};

// The CTAs with parts of one query tile's sum divide its members among themselves, because joining all of them takes one CTA as
// long as four tiles. Each waits for the others after its items, but not for long, since they may not run at the same time. The
// last to arrive also joins the members of those that no longer wait.
struct Meeting {
    enum : u32 { LISTED = 48, TRIES = 96 };  // pieces that can be recorded as left; number of polls
    u32 parts, piece;
    bool mine, last;
    u64 before;  // the state when the last one arrived

    DEVICE u64 at(const AttendSharedParams& p, u32 cta, u32 piece) { return p.meetings + sizeof(SpanMeeting) * static_cast<u64>(cta - piece); }
    DEVICE u64 add(u64 at, u64 amount) {
        u64 before;
        asm volatile("atom.acq_rel.gpu.global.add.u64 %0, [%1], %2;" : "=l"(before) : "l"(at), "l"(amount) : "memory");
        return before;
    }
    // One thread, when a part has been written: returns the previous state.
    DEVICE u64 come(const AttendSharedParams& p, u32 cta, u32 piece) { return add(at(p, cta, piece), 1); }
    // One thread, when all items are done. `came` is the result of `come`.
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

// Loads a lane's share of a row, in pieces 128 bytes apart; leaves x unchanged if `some` is false.
template <int COUNT, int AT = 0> DEVICE void load_row(float4 (&x)[COUNT], u64 from, bool some) {
    load_float4_shared<AT * 128>(x[AT], from, some);
    if constexpr (AT + 1 < COUNT) load_row<COUNT, AT + 1>(x, from, some);
}

// Joins the parts of (row, kv head)s: a warp takes four query rows at a time, with eight lanes each. ROWS: query rows that an own part
// has space for; TILE: query rows of a query tile; BATCH: parts whose loads are in flight together. The code is short, because each
// launch runs it cold.
template <class T, int D, int ROWS, int TILE, int BATCH> struct SharedJoin {
    enum { FOURS = D / 32 };  // float4 of a lane

    // Up to BATCH parts of this lane's query row: the place and the reference of part lane % 8.
    struct Turn {
        u64 data, tops;
        u32 token, q_head;
        bool there, ends;  // whether the row exists; whether its sum ends with these parts
    };

    // A query row of a (row, kv head): the values that stay while its parts are located.
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

    // Locates its parts from `from` on.
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

    // Warp `warp` of `warps` joins its share of the listed sums, whose records are loaded together. While parts are in flight,
    // the next ones are located.
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

    // Adds parts, which are relative to `of[..].x`, to a sum.
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

    // Writes a query row's result; each of eight lanes has a part of it.
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

// The ends of a CTA's items.
struct SpanEnds : ListedSums<SPAN_ROWS> {
    u64 came[2];  // of the CTA's first item, and of its last
    Meeting meeting;

    // One thread, after a barrier of all writers: signals the end of an item.
    template <class Of> __device__ __forceinline__ void tell(const AttendSharedParams& p, u32 cta, const Of& of) {
        if (of.parts == 1) return;
        __threadfence();
        came[of.piece == 0] = Meeting::come(p, cta, of.piece);
    }
    // All threads of `warps` warps: joins complete sums. `sync` is their barrier.
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

// Rows whose units begin after their spans.
struct TailRows {
    static constexpr bool WHOLE = false;
    enum : u32 { EXTRA = DECODE_EXTRA };
    static __device__ __forceinline__ u32 first(const AttendParams& p, u32 index) {
        return load_u32(reinterpret_cast<const AttendSharedParams&>(p).shares + sizeof(RowShare) * static_cast<u64>(index));
    }
};

// The decode kernel's parts for warps with a work chunk each, TAILS in a CTA. Tails are short; other warps hide the cost of
// their ends. TILE and BATCH are those of SharedJoin.
template <class T, int D, int NT, int TAILS = TAIL_WARPS, int TILE = SPAN_ROWS, int BATCH = 8> struct SharedDecodeParts : DecodeParts<T, D, NT, 1> {
    using Base = DecodeParts<T, D, NT, 1>;
    using Base::ROWS, Base::p, Base::lane, Base::work_units, Base::write, Base::write_lse;
    using Cursor = DecodeCursor<TailRows>;
    using Fp8Params = AttendSharedFp8Params;
    using Join = SharedJoin<T, D, ROWS, TILE, BATCH>;
    enum { Q_REGISTERS = 128 };

    const AttendSharedParams& all;
    u32 decode_warps;  // unused over fp8, whose loop has no register for it
    u32 number;        // among all warps that decode
    __device__ __forceinline__ explicit SharedDecodeParts(const AttendParams& p)
        : Base(p, thread()), all(reinterpret_cast<const AttendSharedParams&>(p)) {
        if constexpr (!over_fp8(T())) decode_warps = load_u32(p.plan);
        number = blockIdx.x * TAILS + threadIdx.x / 32;
    }

    static __device__ __forceinline__ u32 thread() { return threadIdx.x % 32; }
    static __device__ __forceinline__ void sync() { __syncwarp(); }

    using Pendings = ListedSums<LISTED_TAILS>;
    static __device__ __forceinline__ void clear(Pendings& pendings) {
        if (thread() == 0) pendings.count = 0;
    }

    __device__ __forceinline__ u32 head_of(const Cursor& c) const { return c.head * p.stripes + number % p.stripes; }

    // Ends a segment: its sum is the result, a part of it, or empty.
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

    // Writes one eight of query rows.
    __device__ __forceinline__ void put_result(const Cursor& c, u32 rows, u32 head, u32 n, const float (&o)[D / 16][4], const float (&top)[2],
                                               const float (&sum)[2]) {
        const typename Base::Ended ended(*this, n, head, top, sum);
        write_lse(n, c.qo_start, rows, head, ended);
#pragma unroll
        for (int m = 0; m < D / 16; ++m) {
            // Hidden from the compiler, which would otherwise keep an address for each.
            u32 at = m;
            asm volatile("" : "+r"(at));
            write(n, at, c.qo_start, rows, head, o[m], ended);
        }
    }
    __device__ __forceinline__ void put_part(u32 slot, u32 rows, u32 n, const float (&o)[D / 16][4], const float (&top)[2], const float (&sum)[2]) {
        const u32 row = n * 8 + lane % 4 * 2;
        // The second number of a fragment is of the next dim over fp8, otherwise of the eighth next.
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

    // Signals that all parts of this warp are written, and joins the sums whose last part this was. Arrivals together at the
    // end cost less memory time than one at each segment's end.
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
