// gemm_TOKENS_OUTS: the product of up to 256 rows of x with a matrix, for Hopper. It includes the norm before the product and
// the operation after it.
//
// One instruction multiplies 64 rows of the matrix with TOKENS rows of x, so a few rows of x suffice to use the matrix units. A
// CTA multiplies OUTS rows of the matrix with TOKENS rows of x. One thread starts the copies of both to a ring in shared
// memory, in pieces of 64 columns. A warpgroup multiplies the pieces there. The copies of the matrix start before the previous
// kernel has ended, because no kernel of a step writes the matrix. Thus the memory is also busy between products.
//
// A cluster of up to eight CTAs shares the columns of a tile, so narrow products have work for the whole device. The CTAs add
// their sums through shared memory, always in the same order. Each CTA finishes a part: y = sum, y += sum, or
// y = silu(gate) * up. In the last case, the rows of a CTA's matrix are eight of gate, eight of up, and so on.
//
// RMSNorm before a product is linear except for one factor for each row. The kernel multiplies the sums by this factor at the
// end. The matrix already contains the weights of the norm (src/gpu/weights.rs). Two more warps sum the squares of each row for
// the factor, while x is in shared memory.
//
// Twin:    tests/common/twin.rs skinny (the specification)
// Params:  GemmParams, 320 bytes
// Shapes:  see params.cuh
// Grid:    x = split * ceil(outs / OUTS), for silu split * ceil(outs / (OUTS / 2)); y = ceil(tokens / TOKENS); block 160, with
//          norm 224; clusters of `split` CTAs along x, 1 to 8; dynamic shared memory: see GemmParams
// Needs:   compute capability 9.0; ins % 8 == 0, outs % 8 == 0; split <= pieces of 64 columns; 2 <= stages <= 24, or
//          1 if no CTA has more than one piece
// Build:   build.py
#include "common.cuh"
#include "hopper.cuh"

DEVICE float squares_of(const uint4& x) {
    const u32 pairs[4] = {x.x, x.y, x.z, x.w};
    float sum = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) sum += wide_low(pairs[i]) * wide_low(pairs[i]) + wide_high(pairs[i]) * wide_high(pairs[i]);
    return sum;
}

template <u32 TOKENS, u32 TILES> struct Gemm {
    static constexpr u32 OUTS = 64 * TILES, STAGES_MAX = 24;
    static constexpr u32 WEIGHT = 128 * OUTS, STAGE = WEIGHT + 128 * TOKENS;  // bytes of a piece of the matrix; bytes of this piece and one of x
    static constexpr u32 PITCH = OUTS + 4;                                   // row length of the sums [TOKENS, PITCH]; avoids bank conflicts
    static constexpr u32 SHARERS = 64 / TOKENS;                              // threads that sum the squares of one row of x
    enum { MULTIPLIERS = 128, PRODUCERS = 32, SQUARERS = 64 };               // numbers of threads, in the order of threadIdx.x

    struct Shared {
        u64 full[STAGES_MAX], empty[STAGES_MAX];
        float squares[TOKENS];
    };

    // The place of the next piece in the ring.
    struct Place {
        u32 stage = 0, parity = 0;
        __device__ __forceinline__ void next(u32 stages) {
            if (++stage == stages) stage = 0, parity ^= 1;
        }
    };

    // The work of this CTA: a tile, the first row of x, and a range of the pieces of 64 columns.
    struct Part {
        u32 tile, token, begin, count;
        __device__ __forceinline__ explicit Part(const GemmParams& p) {
            const u32 all = (p.ins + 63) / 64, rank = cluster_rank(), size = cluster_size();
            tile = blockIdx.x / size, token = blockIdx.y * TOKENS, begin = all * rank / size, count = all * (rank + 1) / size - begin;
        }
    };

    static __device__ __forceinline__ void produce(const GemmParams& p, const Part& part, Shared& shared, u32 memory) {
        const u32 eight = part.tile * (OUTS / 8) / (p.mode == PRODUCT_SILU ? 2 : 1);
        fetch_map(p.weight);
        fetch_map(p.x);
        const u32 early = part.count < p.stages ? part.count : p.stages;
        for (u32 n = 0; n < early; ++n) {
            const u32 full = shared_address(shared.full + n);
            barrier_expect(full, STAGE);
            copy_box_of_eights(memory + n * STAGE, p.weight, full, 64 * (part.begin + n), eight);
        }
        let_next_start();
        wait_for_previous();
        for (u32 n = 0; n < early; ++n) copy_box(memory + n * STAGE + WEIGHT, p.x, shared_address(shared.full + n), 64 * (part.begin + n), part.token);
        Place place;
        for (u32 n = early; n < part.count; ++n) {
            const u32 full = shared_address(shared.full + place.stage), at = memory + place.stage * STAGE;
            barrier_wait(shared_address(shared.empty + place.stage), place.parity);
            barrier_expect(full, STAGE);
            copy_box_of_eights(at, p.weight, full, 64 * (part.begin + n), eight);
            copy_box(at + WEIGHT, p.x, full, 64 * (part.begin + n), part.token);
            place.next(p.stages);
        }
    }

    static __device__ __forceinline__ void multiply(const GemmParams& p, const Part& part, Shared& shared, u32 memory) {
        const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        float sums[TILES][TOKENS / 2] = {};
        Place place;
        u32 before = 0;
        for (u32 n = 0; n < part.count; ++n) {
            barrier_wait(shared_address(shared.full + place.stage), place.parity);
            const u32 at = memory + place.stage * STAGE;
            wgmma_fence();
#pragma unroll
            for (u32 k = 0; k < 4; ++k) {
#pragma unroll
                for (u32 tile = 0; tile < TILES; ++tile)
                    wgmma(sums[tile], matrix_descriptor(at + tile * 8192) + 2 * k, matrix_descriptor(at + WEIGHT) + 2 * k);
            }
            wgmma_commit();
            wgmma_wait<1>();
            if (n > 0 && lane == 0) barrier_arrive(shared_address(shared.empty + before));
            before = place.stage;
            place.next(p.stages);
        }
        wgmma_wait<0>();
        named_sync(1, p.norm ? MULTIPLIERS + SQUARERS : MULTIPLIERS);  // the sums overwrite the ring
#pragma unroll
        for (u32 tile = 0; tile < TILES; ++tile) {
#pragma unroll
            for (u32 i = 0; i < TOKENS / 2; ++i) {
                const u32 out = 64 * tile + 16 * warp + lane / 4 + i / 2 % 2 * 8, token = i / 4 * 8 + lane % 4 * 2 + i % 2;
                asm volatile("st.shared.f32 [%0], %1;" ::"r"(memory + 4 * (token * PITCH + out)), "f"(sums[tile][i]) : "memory");
            }
        }
    }

    // Sums up the squares of each row of x. SHARERS neighbouring lanes share a row.
    static __device__ __forceinline__ void square(const GemmParams& p, const Part& part, Shared& shared, u32 memory) {
        const u32 thread = threadIdx.x - MULTIPLIERS - PRODUCERS, row = thread / SHARERS, sharer = thread % SHARERS;
        float sum = 0;
        Place place;
        for (u32 n = 0; n < part.count; ++n) {
            barrier_wait(shared_address(shared.full + place.stage), place.parity);
            const u32 x = memory + place.stage * STAGE + WEIGHT + 128 * row;
#pragma unroll
            for (u32 i = 0; i < 8 / SHARERS; ++i) {
                // This order avoids bank conflicts.
                const u32 at = x + 16 * ((sharer * (8 / SHARERS) + i) ^ row % 8);
                uint4 eight;
                asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(eight.x), "=r"(eight.y), "=r"(eight.z), "=r"(eight.w) : "r"(at) : "memory");
                sum += squares_of(eight);
            }
            __syncwarp();
            if (thread % 32 == 0) barrier_arrive(shared_address(shared.empty + place.stage));
            place.next(p.stages);
        }
        named_sync(1, MULTIPLIERS + SQUARERS);
#pragma unroll
        for (u32 step = SHARERS / 2; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
        if (sharer == 0) shared.squares[row] = sum;
    }

    // Returns eight sums, added over all CTAs of the cluster.
    static __device__ __forceinline__ void gather(u32 at, u32 size, float (&sums)[8]) {
#pragma unroll
        for (u32 rank = 0; rank < 8; ++rank) {
            if (rank >= size) continue;
            const u32 there = of_rank(at, rank);
            const float4 low = load_far4(there), high = load_far4(there + 16);
            const float eight[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
            for (int i = 0; i < 8; ++i) sums[i] += eight[i];
        }
    }

    // Finishes this CTA's part of y.
    static __device__ __forceinline__ void finish(const GemmParams& p, const Part& part, Shared& shared, u32 memory) {
        const bool silu = p.mode == PRODUCT_SILU;
        const u32 size = cluster_size(), width = silu ? OUTS / 2 : OUTS;
        const u32 tokens = p.tokens - part.token < TOKENS ? p.tokens - part.token : TOKENS;
        for (u32 i = cluster_rank() * MULTIPLIERS + threadIdx.x; i < tokens * (width / 8); i += size * MULTIPLIERS) {
            const u32 token = i / (width / 8), column = i % (width / 8) * 8, out = part.tile * width + column;
            if (out >= p.outs) continue;
            Eight& y = eight(p.y, static_cast<u64>(part.token + token) * p.outs + out);
            float sums[8] = {}, old[8] = {}, scale = 1;
            if (p.mode == PRODUCT_ADD) widen(y, old);
            if (p.norm) {
                float square = 0;
                for (u32 rank = 0; rank < size; ++rank) square += load_far(of_rank(shared_address(shared.squares + token), rank));
                scale = rsqrtf(square / static_cast<float>(p.ins) + p.eps);
            }
            const u32 at = memory + 4 * (token * PITCH + column * (silu ? 2 : 1));
            gather(at, size, sums);
            if (silu) {
                float up[8] = {};
                gather(at + 32, size, up);
#pragma unroll
                for (int j = 0; j < 8; ++j) sums[j] *= scale, sums[j] = sums[j] / (1.0f + __expf(-sums[j])) * (up[j] * scale);
            } else {
#pragma unroll
                for (int j = 0; j < 8; ++j) sums[j] = sums[j] * scale + old[j];
            }
            y = narrowed(sums);
        }
    }

    static __device__ __forceinline__ void run(const GemmParams& p) {
        extern __shared__ u8 dynamic[];
        __shared__ Shared shared;
        const u32 memory = (shared_address(dynamic) + 1023) / 1024 * 1024;
        if (threadIdx.x == 0) {
            for (u32 n = 0; n < p.stages; ++n) {
                barrier_init(shared_address(shared.full + n), 1);
                barrier_init(shared_address(shared.empty + n), (p.norm ? MULTIPLIERS + SQUARERS : MULTIPLIERS) / 32);
            }
            barriers_made();
        }
        __syncthreads();
        const Part part(p);
        if (threadIdx.x < MULTIPLIERS) {
            wait_for_previous();
            multiply(p, part, shared, memory);
        } else if (threadIdx.x >= MULTIPLIERS + PRODUCERS) {
            square(p, part, shared, memory);
        } else if (threadIdx.x == MULTIPLIERS) {
            produce(p, part, shared, memory);
        }
        __syncwarp();
        cluster_sync();
        if (threadIdx.x < MULTIPLIERS) finish(p, part, shared, memory);
        cluster_sync();  // no CTA may end while others read its sums
    }
};

#define GEMM(TOKENS, OUTS, RESIDENT)                                                                                                \
    extern "C" __global__ void __launch_bounds__(224, RESIDENT) gemm_##TOKENS##_##OUTS(const __grid_constant__ GemmParams p) { \
        Gemm<TOKENS, OUTS / 64>::run(p);                                                                                        \
    }
GEMM(16, 64, 3)
GEMM(16, 128, 3)
GEMM(32, 64, 3)
GEMM(32, 128, 3)
GEMM(64, 64, 3)
GEMM(64, 128, 2)
