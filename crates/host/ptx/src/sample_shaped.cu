// sample_shaped: chooses the tokens of the rows that have a shape (edits or min-p). They replace the tokens of `sample`.
// Twin:    src/shaping.rs, src/sample.rs       (the specification)
// Params:  ShapedParams, 56 bytes              (params.cuh, src/gpu/kernels.rs)
// Shapes:  see params.cuh; edited logits are f32, because bf16 would round them; `ordered` compares them
// Grid:    x = rows, block 1,024
// Needs:   vocab <= SHAPED_VOCAB_MAX; tokens of edits below vocab, at most one edit of a token in a shape
// Build:   build.py
#include "draw.cuh"

struct Row {
    const u16* logits;
    const Edit* edits;
    const u32* edited;  // a bit for each token
    Shape shape;
    u32 vocab;
};

// Uses no fused operations, so that results round as in the specification.
DEVICE float apply(const Edit& edit, float logit) {
    logit = __fadd_rn(logit, edit.before);
    const float scaled = logit > 0 ? __fdiv_rn(logit, edit.repetition) : __fmul_rn(logit, edit.repetition);
    return __fadd_rn(scaled, edit.after);
}

// Calls `f` with each allowed token and its edited logit. Skips NaN and passes -0 as 0. The threads of the block share the
// tokens.
template <class F> DEVICE void each(const Row& row, F f) {
    const auto call = [&](u32 token, float logit) {
        if (logit == logit) f(token, logit == 0 ? 0.0f : logit);
    };
    for (u32 token = threadIdx.x; !row.shape.only && token < row.vocab; token += 1024)
        if (!(row.edited[token / 32] >> token % 32 & 1)) call(token, wide(row.logits[token]));
    for (u32 i = threadIdx.x; i < row.shape.count; i += 1024) {
        const Edit edit = row.edits[i];
        call(edit.token, apply(edit, wide(row.logits[edit.token])));
    }
}

// Returns the lowest `ordered` logit to keep. Logits below `least` do not count. Without MASS, the filter keeps the `wanted`
// greatest logits. With MASS, it keeps the greatest logits whose mass reaches the share `top_p` of all mass. A mass is an
// unnormalised probability as an integer, so sums do not depend on the order of additions.
template <bool MASS> DEVICE u32 select(const Row& row, u64 (&bins)[256], u64 (&words)[2], u32 least, u64 wanted, float top, float scale, float top_p) {
    u32 high = 0;
    for (u32 shift = 24;; shift -= 8) {
        if (threadIdx.x < 256) bins[threadIdx.x] = 0;
        __syncthreads();
        each(row, [&](u32, float logit) {
            const u32 order = ordered(logit);
            if (order < least || (shift < 24 && order >> (shift + 8) != high)) return;
            u64 weight = 1;
            if (MASS) weight = static_cast<u64>(expf((logit - top) * scale) * 0x1p32f);
            if (weight) atomicAdd(&bins[order >> shift & 255], weight);
        });
        __syncthreads();
        if (threadIdx.x == 0) {
            if (shift == 24) {
                u64 total = 0;
                for (u32 i = 0; i < 256; ++i) total += bins[i];
                if (MASS) wanted = static_cast<u64>(static_cast<double>(top_p) * static_cast<double>(total));
                wanted = wanted < 1 ? 1 : wanted > total ? total : wanted;
            }
            words[0] = reach(bins, wanted), words[1] = wanted;
        }
        __syncthreads();
        high = high << 8 | static_cast<u32>(words[0]);
        wanted = words[1];
        __syncthreads();
        if (shift == 0) return high;
    }
}

extern "C" __global__ void __launch_bounds__(1024) sample_shaped(const __grid_constant__ ShapedParams p) {
    wait_for_previous();
    __shared__ u32 edited[SHAPED_VOCAB_MAX / 32];
    __shared__ u64 bins[256], words[2], best;
    __shared__ u32 greatest;
    const Draw draw = reinterpret_cast<const Draw*>(p.draws)[blockIdx.x];
    if (draw.shape == 0) return;
    const Shape shape = reinterpret_cast<const Shape*>(p.shapes)[draw.shape - 1];
    const u16* logits = reinterpret_cast<const u16*>(p.logits) + static_cast<u64>(blockIdx.x) * p.vocab;
    const Row row = {logits, reinterpret_cast<const Edit*>(p.edits) + shape.start, edited, shape, p.vocab};
    const float infinity = __int_as_float(0x7f800000);
    if (threadIdx.x == 0) {
        greatest = ordered(-infinity);
        // Token 0 remains if no allowed token has a logit above minus infinity.
        best = static_cast<u64>(ordered(-infinity)) << 32 | 0xffffffffu;
    }
    for (u32 i = threadIdx.x; i < (p.vocab + 31) / 32; i += 1024) edited[i] = 0;
    __syncthreads();
    for (u32 i = threadIdx.x; i < shape.count; i += 1024) atomicOr(&edited[row.edits[i].token / 32], 1u << row.edits[i].token % 32);
    __syncthreads();
    u32 least = 0;
    const bool draws = draw.inverse_temperature > 0, part = draw.top_p < 1;
    if (draws && (draw.top_k > 0 || part || shape.depth < infinity)) {
        u32 mine = 0;
        each(row, [&](u32, float logit) { mine = max(mine, ordered(logit)); });
        atomicMax(&greatest, mine);
        __syncthreads();
        const float top = __uint_as_float(greatest & 0x80000000u ? greatest & 0x7fffffffu : ~greatest);
        if (shape.depth < infinity) {
            const float lowest = __fsub_rn(top, shape.depth);
            least = ordered(lowest == 0 ? 0.0f : lowest);
        }
        if (draw.top_k > 0) least = select<false>(row, bins, words, least, draw.top_k, 0, 0, 0);
        if (part) least = select<true>(row, bins, words, least, 0, top, draw.inverse_temperature, draw.top_p);
    }
    u64 mine = 0;
    each(row, [&](u32 token, float logit) {
        if (ordered(logit) < least || !(logit > -infinity)) return;
        float score = logit;
        if (draws) {
            score = __fadd_rn(__fmul_rn(logit, draw.inverse_temperature), gumbel(uniform(draw.key, token)));
            score = score == 0 ? 0.0f : score;
        }
        // Of tokens with equal scores, the one with the lowest number wins.
        const u64 found = static_cast<u64>(ordered(score)) << 32 | (0xffffffffu - token);
        mine = found > mine ? found : mine;
    });
    atomicMax(&best, mine);
    __syncthreads();
    if (threadIdx.x != 0) return;
    const u32 token = 0xffffffffu - static_cast<u32>(best);
    reinterpret_cast<u32*>(p.sampled)[blockIdx.x] = token;
    u32* host = *reinterpret_cast<u32* const*>(p.host);
    asm volatile("st.volatile.global.u32 [%0], %1;" ::"l"(host + p.first + blockIdx.x), "r"(token) : "memory");
}
