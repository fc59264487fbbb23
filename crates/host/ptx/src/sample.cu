// sample_filter: computes for each row the least logit that top-k and top-p keep.
// sample: chooses each row's token, the one with the greatest logit * inverse_temperature + Gumbel noise. If
// inverse_temperature is 0, it chooses the token with the greatest logit.
// Twin:    src/sample.rs                       (the specification)
// Params:  SampleParams, 64 bytes
// Shapes:  see params.cuh; logits are compared as integers of the same order (`ordered`)
// Grid:    sample_filter: x = rows, block 1,024; sample: x = parts of the vocabulary, y = rows
// Needs:   vocab % 8 == 0; best and counters are zero, and the kernel leaves them zero
// Build:   build.py
#include "draw.cuh"

DEVICE u16 logit_of(u32 order) { return order & 0x8000 ? order & 0x7fff : static_cast<u16>(~order); }

extern "C" __global__ void __launch_bounds__(256) sample(const __grid_constant__ SampleParams p) {
    wait_for_previous();
    const u32 row = blockIdx.y, pieces = p.vocab / 8;
    const Draw draw = reinterpret_cast<const Draw*>(p.draws)[row];
    const u32 least = p.thresholds ? reinterpret_cast<const u32*>(p.thresholds)[row] : 0;
    u64 best = 0;
    float top = __int_as_float(0xff800000);
    for (u32 piece = blockIdx.x * 256 + threadIdx.x; piece < pieces; piece += gridDim.x * 256) {
        const Eight read = eight(p.logits, static_cast<u64>(row) * p.vocab + 8ull * piece);
#pragma unroll
        for (u32 i = 0; i < 8; ++i) {
            const u16 logit = static_cast<u16>(read.pair[i / 2] >> (i % 2 * 16));
            const u32 token = 8 * piece + i;
            if (ordered(logit) < least) continue;
            float score = wide(logit);
            if (draw.inverse_temperature > 0) {
                score *= draw.inverse_temperature;
                // The noise is at most -log(unit). Most tokens lose even with this bound, and checking that needs no logarithm.
                // The factor is a margin for rounding.
                const float unit = uniform(draw.key, token);
                if (unit > __expf(score - top) * 1.001f) continue;
                score += gumbel(unit);
                top = fmaxf(top, score);
            }
            // Of tokens with equal scores the one with the lowest number wins.
            const u64 found = static_cast<u64>(ordered(score)) << 32 | (0xffffffffu - token);
            best = found > best ? found : best;
        }
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
        const u64 other = __shfl_xor_sync(0xffffffffu, best, step);
        best = other > best ? other : best;
    }
    __shared__ u64 found[8];
    if (threadIdx.x % 32 == 0) found[threadIdx.x / 32] = best;
    __syncthreads();
    if (threadIdx.x != 0) return;
    for (int i = 1; i < 8; ++i) best = found[i] > best ? found[i] : best;
    u64* row_best = reinterpret_cast<u64*>(p.best) + row;
    u32* row_counter = reinterpret_cast<u32*>(p.counters) + row;
    atomicMax(row_best, best);
    __threadfence();
    if (atomicInc(row_counter, gridDim.x - 1) != gridDim.x - 1) return;
    __threadfence();
    const u32 token = 0xffffffffu - static_cast<u32>(atomicExch(row_best, 0ull));
    reinterpret_cast<u32*>(p.sampled)[row] = token;
    u32* host = *reinterpret_cast<u32* const*>(p.host);
    *reinterpret_cast<volatile u32*>(host + p.first + row) = token;
}

// Computes a histogram of one row's logits: their number in each bin, or if MASS the sum of their unnormalised probabilities.
// If `high`, the bin is the upper byte of `ordered(logit)`. Otherwise only logits with the upper byte `bin` count, and the bin
// is the lower byte. Logits below `least` do not count. Masses are integers, so sums do not depend on the order of threads.
template <bool MASS> DEVICE void histogram(const SampleParams& p, u64 (&bins)[256], u32 row, bool high, u32 bin, u32 least, float top, float scale) {
    if (threadIdx.x < 256) bins[threadIdx.x] = 0;
    __syncthreads();
    const u16* logits = reinterpret_cast<const u16*>(p.logits) + static_cast<u64>(row) * p.vocab;
    for (u32 i = threadIdx.x; i < p.vocab; i += 1024) {
        const u32 order = ordered(logits[i]);
        if (order < least || (!high && order >> 8 != bin)) continue;
        u64 weight = 1;
        if (MASS) weight = static_cast<u64>(expf((wide(logits[i]) - top) * scale) * 0x1p32f);
        if (weight) atomicAdd(&bins[high ? order >> 8 : order & 255], weight);
    }
    __syncthreads();
}

template <bool MASS> DEVICE u32 select(const SampleParams& p, u64 (&bins)[256], u64 (&words)[2], u32 row, u64 wanted, u32 least, float top, float scale) {
    histogram<MASS>(p, bins, row, true, 0, least, top, scale);
    if (threadIdx.x == 0) {
        if (MASS) {
            u64 total = 0;
            for (u32 i = 0; i < 256; ++i) total += bins[i];
            const Draw& draw = reinterpret_cast<const Draw*>(p.draws)[row];
            wanted = static_cast<u64>(static_cast<double>(draw.top_p) * static_cast<double>(total));
            wanted = wanted ? wanted : 1;
        }
        words[0] = reach(bins, wanted), words[1] = wanted;
    }
    __syncthreads();
    const u32 bin = static_cast<u32>(words[0]);
    histogram<MASS>(p, bins, row, false, bin, least, top, scale);
    if (threadIdx.x == 0) {
        wanted = words[1];
        words[0] = reach(bins, wanted);
    }
    __syncthreads();
    const u32 order = bin << 8 | static_cast<u32>(words[0]);
    __syncthreads();
    return order;
}

extern "C" __global__ void __launch_bounds__(1024) sample_filter(const __grid_constant__ SampleParams p) {
    wait_for_previous();
    __shared__ u64 bins[256], words[2];
    __shared__ u32 greatest;
    const u32 row = blockIdx.x;
    const Draw draw = reinterpret_cast<const Draw*>(p.draws)[row];
    const bool few = draw.top_k > 0 && draw.top_k < p.vocab, part = draw.top_p < 1.0f;
    u32 least = 0;
    if (draw.inverse_temperature > 0 && (few || part)) {
        if (few) least = select<false>(p, bins, words, row, draw.top_k, 0, 0, 0);
        if (part) {
            if (threadIdx.x == 0) greatest = 0;
            __syncthreads();
            const u16* logits = reinterpret_cast<const u16*>(p.logits) + static_cast<u64>(row) * p.vocab;
            u32 mine = 0;
            for (u32 i = threadIdx.x; i < p.vocab; i += 1024) mine = max(mine, ordered(logits[i]));
            atomicMax(&greatest, mine);
            __syncthreads();
            const float top = wide(logit_of(greatest));
            least = select<true>(p, bins, words, row, 0, least, top, draw.inverse_temperature);
        }
    }
    if (threadIdx.x == 0) reinterpret_cast<u32*>(p.thresholds)[row] = least;
}
