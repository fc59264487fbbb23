// Decode attention that reads shared spans once: one launch with two kinds of CTAs (AttendSharedParams).
//
// The last CTAs work on the spans' items like attend_extend.cuh, with query rows gathered from the whole batch. In the other
// CTAs each of SUFFIXES warps has a work chunk of suffixes, like attend_decode.cuh. Multiprocessors run up to two CTAs, of one kind or
// of both; the host divides the CTAs (src/backend/cuda/attention/split/shared.rs). shared_parts.cuh joins parts;
// attend_shared_sm90a.cuh has the kernels of Hopper for head_dim 128.
#pragma once
#include "attend_decode.cuh"
#include "attend_extend.cuh"
#include "shared_parts.cuh"

// The tile shapes of both kinds of CTAs for each head_dim: column `traits` of kernels.toml. TILE: query rows of an item; SUFFIXES:
// warps that work on suffixes; JOINED: BATCH of SharedJoin.
template <int D> struct SharedTiles;

// The type that replaces T in the extend kernel for items of spans. ROWS: query rows of a suffix.
template <class T, int ROWS, int SUFFIXES> struct Gathered {};
template <class T, int ROWS, int SUFFIXES> struct RowsOf<Gathered<T, ROWS, SUFFIXES>> {
    using Type = typename RowsOf<T>::Type;
};
template <class T, int ROWS, int SUFFIXES> DEVICE constexpr bool over_fp8(Gathered<T, ROWS, SUFFIXES>) { return over_fp8(T()); }
template <class T, int ROWS, int SUFFIXES> DEVICE u32 pack(Gathered<T, ROWS, SUFFIXES>, float low, float high) { return pack(T(), low, high); }
template <class T, int ROWS, int SUFFIXES> DEVICE void mma(Gathered<T, ROWS, SUFFIXES>, float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    mma(T(), c, a, b0, b1);
}

// The items of spans, which write sums.
template <class T, int ROWS, int SUFFIXES> struct SpanTiles : SpanPlan<SUFFIXES> {
    using Plan = SpanPlan<SUFFIXES>;
    struct Lasts {
        SpanEnds lasts;
    };

    // Ends an item: writes its sums to their rows of `span_partial`.
    template <class Shared, int MT, int EIGHTS>
    static __device__ __forceinline__ void part(const AttendParams& p, Shared& shared, const ExtendWork& work, u32 head, float factor,
                                                const float (&o)[MT][EIGHTS][4], const float (&top)[MT][2], const float (&sum)[MT][2]) {
        constexpr int D = EIGHTS * 8;
        const AttendSharedParams& s = Plan::all(p);
        const u32 thread = threadIdx.x, warp = thread / 32, lane = thread % 32, rows = work.extend_len * p.group;
        const u64 first = work.part;
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const u32 row = (warp * MT + m) * 16 + lane / 4 + 8 * h;
                if (row >= rows) continue;
                float* const to = reinterpret_cast<float*>(s.span_partial) + (first + row) * D + lane % 4 * 2;
#pragma unroll
                for (int n = 0; n < EIGHTS; ++n) *reinterpret_cast<float2*>(to + n * 8) = make_float2(o[m][n][2 * h], o[m][n][2 * h + 1]);
                if (lane % 4 == 0) reinterpret_cast<float2*>(s.span_tops)[first + row] = make_float2(top[m][h] * factor, sum[m][h]);
            }
        __syncthreads();
        if (thread == 0) shared.lasts.tell(s, Plan::cta(p), Plan::piece(p, shared.item));
    }

    // After the last item: joins complete sums.
    template <int D, class Shared> static __device__ __forceinline__ void join_listed(const AttendParams& p, Shared& shared) {
        using Join = SharedJoin<T, D, ROWS, SharedTiles<D>::TILE, SharedTiles<D>::JOINED>;
        shared.lasts.template meet<Plan, Join>(Plan::all(p), threadIdx.x, 4, [] { __syncthreads(); });
    }
};
template <class T, int ROWS, int SUFFIXES> struct ItemsOf<Gathered<T, ROWS, SUFFIXES>> {
    using Type = SpanTiles<T, ROWS, SUFFIXES>;
};

// Runs a CTA's items, one after another.
template <class Span, int D> DEVICE void run_listed(const AttendParams& p, u8* memory, typename Span::Shared& shared) {
    using Items = typename Span::Items;
    for (u32 item = Items::cta(p);;) {
        Span::one(p, memory, shared, item);
        // Loaded again, because no register keeps it.
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(item) : "r"(shared_address(&shared.item)));
        item = Items::next(p, item);
        if (item == 0) break;
        __syncthreads();
    }
    Items::template join_listed<D>(p, shared);
}

// Runs a CTA of either kind. BYTES: dynamic shared memory, enough for both kinds.
template <class Span, class Suffix, int D, int BYTES> DEVICE void run_shared(const AttendParams& p) {
    constexpr int SUFFIXES = SharedTiles<D>::SUFFIXES;
    static_assert(Span::BM == SharedTiles<D>::TILE && Span::BYTES + sizeof(typename Span::Shared) <= BYTES);
    static_assert(SUFFIXES * (Suffix::BYTES + sizeof(typename Suffix::Shared)) <= BYTES);
    static_assert(Span::BYTES % 512 == 0 && Suffix::BYTES % 512 == 0);
    extern __shared__ __align__(1024) u8 memory[];
    if (blockIdx.x * SUFFIXES >= load_u32(p.plan)) {
        wait_for_previous();
        return run_listed<Span, D>(p, memory, reinterpret_cast<typename Span::Shared&>(memory[Span::BYTES]));
    }
    const u32 warp = threadIdx.x / 32, chunk = (blockIdx.x * SUFFIXES + warp) / p.stripes;
    if (warp >= SUFFIXES) return wait_for_previous();
    const DecodeWork work = load_work(p.plan + sizeof(SharedHead) + sizeof(DecodeWork) * chunk);
    const u32 unit_begin = chunk * work.work_units;
    if (unit_begin >= work.unit_end) return wait_for_previous();
    typename Suffix::Shared* const state = reinterpret_cast<typename Suffix::Shared*>(memory + SUFFIXES * Suffix::BYTES);
    Suffix(p, state[warp], shared_address(memory) + warp * Suffix::BYTES).run(work, unit_begin);
}

// NT: eights of query rows of a suffix.
template <class T, int D, int NT, int BYTES> DEVICE void attend_shared(const AttendSharedParams& s) {
    using Of = SharedTiles<D>;
    using Span = Extend<Gathered<T, 8 * NT, Of::SUFFIXES>, D, Of::MT, 4, Of::BN>;
    using Suffix = Decode<T, D, NT, 1, Of::STAGES, SharedDecodeParts<T, D, NT, Of::SUFFIXES, Of::TILE, Of::JOINED>>;
    run_shared<Span, Suffix, D, BYTES>(s.attend);
}
