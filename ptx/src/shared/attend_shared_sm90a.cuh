// Decode attention that reads shared spans once, for Hopper: one launch with two kinds of CTAs (AttendSharedParams).
//
// The last CTAs work on the spans' items like attend_extend_sm90a.cuh, with query rows gathered from the whole batch.
// The CTAs before them work on suffixes: each of their first eight warps computes at most one work chunk, like a CTA of
// attend_decode.cuh. Each CTA occupies a whole multiprocessor. Multiprocessors with spans compute products while those
// with suffixes read memory. The host chooses how many CTAs work on spans (src/backend/cuda/attention/split/shared.rs).
// shared_parts.cuh joins parts.
#pragma once
#include "attend_decode.cuh"
#include "attend_extend_sm90a.cuh"
#include "shared_parts.cuh"

// The plan's items of spans. An item writes partial sums, not results.
template <int ROWS> struct SpanItems : SpanPlan<SUFFIX_WARPS> {
    // Producers and consumers number an item by its kv head, so the number of kv heads marks the end of the items.
    DEVICE u32 count(const AttendParams& p) { return p.kv_heads; }
    DEVICE void begin() { wait_for_previous(); }
    using Lasts = SpanEnds;

    // Ends an item: writes its sums to their rows of `span_partial`.
    template <class T> static __device__ __forceinline__ void part(const AttendParams& p, Lasts& lasts, const ExtendWork& work, u32 item, float factor,
                                                                   const float (&o)[16][4], const float (&top)[2], const float (&sum)[2]) {
        constexpr int D = 128, CONSUMERS = 256, FINISH = 1;
        const AttendSharedParams& s = all(p);
        const u32 thread = threadIdx.x, warp = thread / 32, lane = thread % 32, rows = work.extend_len * p.group;
        const u64 first = work.part;
        const auto piece = SpanItems::piece(p, item);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const u32 row = warp * 16 + lane / 4 + 8 * h;
            if (row >= rows) continue;
            float* const to = reinterpret_cast<float*>(s.span_partial) + (first + row) * D + lane % 4 * 2;
#pragma unroll
            for (int n = 0; n < 16; ++n) *reinterpret_cast<float2*>(to + n * 8) = make_float2(o[n][2 * h], o[n][2 * h + 1]);
            if (lane % 4 == 0) reinterpret_cast<float2*>(s.span_tops)[first + row] = make_float2(top[h] * factor, sum[h]);
        }
        named_sync(FINISH, CONSUMERS);
        if (thread == 0) lasts.tell(s, SpanItems::cta(p), piece);
    }

    // Joins complete sums. All consumer threads call it after the CTA's last item.
    template <class T> static __device__ __forceinline__ void join_listed(const AttendParams& p, Lasts& lasts) {
        lasts.template meet<SpanItems, SharedJoin<T, 128, ROWS, SPAN_ROWS, 8>>(all(p), threadIdx.x, 8, [] { named_sync(1, 256); });
    }
};

template <class T, int NT> DEVICE void attend_shared_hopper(const AttendSharedParams& s) {
    constexpr int STAGES = 2, D = 128;
    using Suffix = Decode<T, D, NT, 1, STAGES, SharedDecodeParts<T, D, NT>>;
    using Span = ExtendHopper<T, Scales::NONE, SpanItems<8 * NT>>;
    static_assert(Span::CONSUMERS == 32 * SUFFIX_WARPS);
    static_assert(Suffix::BYTES % 1024 == 0 && SUFFIX_WARPS * (Suffix::BYTES + sizeof(typename Suffix::Shared)) <= Span::FACTORS);
    extern __shared__ __align__(1024) u8 memory[];
    __shared__ typename Span::Shared shared;
    const AttendParams& p = s.attend;
    const bool spans = SUFFIX_WARPS * blockIdx.x >= load_u32(p.plan);
    if (spans) {
        if (threadIdx.x == 0) {
            Ring::init(shared.q, Span::PRODUCERS + 1, Span::WARPS);
            Ring::init(shared.k, Span::PRODUCERS, Span::WARPS), Ring::init(shared.v, Span::PRODUCERS, Span::WARPS);
        }
        __syncthreads();
    }
    if (threadIdx.x >= Span::CONSUMERS) {
        if (NT > 1 && !spans) {
            // With 16 query rows, a suffix needs all registers that it can get.
            asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
            return wait_for_previous();
        }
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (!spans) return wait_for_previous();
        // Each CTA for spans has an item. `produce` waits for the previous launch just before it reads Q.
        Span::produce(p, shared_address(memory), shared, SpanItems<8 * NT>::load(p, SpanItems<8 * NT>::cta(p)));
    } else {
        if (NT > 1 && !spans) asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
        else asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        if (spans) {
            wait_for_previous();
            Span::consume(p, memory, shared);
            SpanItems<8 * NT>::template join_listed<T>(p, shared.lasts);
        } else {
            const u32 warp = threadIdx.x / 32, chunk = (blockIdx.x * SUFFIX_WARPS + warp) / p.stripes;
            const DecodeWork work = load_work(p.plan + sizeof(SharedHead) + sizeof(DecodeWork) * chunk);
            const u32 unit_begin = chunk * work.work_units;
            if (unit_begin >= work.unit_end) return wait_for_previous();
            typename Suffix::Shared* const state = reinterpret_cast<typename Suffix::Shared*>(memory + SUFFIX_WARPS * Suffix::BYTES);
            Suffix(p, state[warp], shared_address(memory) + warp * Suffix::BYTES).run(work, unit_begin);
        }
    }
}
