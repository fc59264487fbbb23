// skinny_TILES_AHEAD: multiplies up to 16 rows of x with a matrix, and fuses the operations before and after the product.
//
// Before the product: an optional RMSNorm, which is linear except for one factor for each row. The factor is known only after
// the whole row has been read, so the kernel multiplies the sums by it at the end. After the product: y = sum, y += sum, or
// y = silu(gate) * up, where the rows of gate and up are in one matrix.
//
// A block computes 8 * TILES rows of the matrix. In each round each of its 8 warps multiplies 64 columns. Threads share nothing
// until the end: each thread loads only numbers that it multiplies itself, 16 of a row in each round. The order of columns in a
// product does not matter, as long as x and the matrix have the same order, so these 16 numbers are contiguous in memory.
//
// No kernel of a step writes the matrix, so each block loads AHEAD rounds of it before the previous kernel has ended. The
// blocks also prefetch the start of the next product's matrix into the L2 cache. Thus the memory is also busy between products.
//
// Twin:    tests/common/twin.rs skinny (the specification)
// Params:  SkinnyParams, 72 bytes
// Shapes:  see params.cuh
// Grid:    x = outs / (8 * TILES), silu: outs / (4 * TILES)
// Needs:   ins % 64 == 0, tokens <= 16, outs a multiple of the outs of a block (see Grid); silu: TILES is even
// Build:   build.py
#include "common.cuh"

DEVICE uint4 load_weight(u64 address) {
    uint4 w;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(w.x), "=r"(w.y), "=r"(w.z), "=r"(w.w) : "l"(address));
    return w;
}

// sums[16, 8] += a[16, 16] * b[16, 8]
DEVICE void multiply(float (&sums)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Multiplies eight numbers with the norm's weights. Returns the sum of the squares of the original numbers.
DEVICE float weigh(uint4& x, const uint4& weight) {
    float sum = 0;
    u32* pairs = reinterpret_cast<u32*>(&x);
    const u32* weights = reinterpret_cast<const u32*>(&weight);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float low = wide_low(pairs[i]), high = wide_high(pairs[i]);
        sum += low * low + high * high;
        pairs[i] = narrow(low * wide_low(weights[i]), high * wide_high(weights[i]));
    }
    return sum;
}

template <int TILES, int AHEAD> DEVICE void skinny(const SkinnyParams& p) {
    constexpr u32 OUTS = 8 * TILES, WARPS = 8, COLUMNS = 64 * WARPS;
    __shared__ float parts[WARPS][16][OUTS];
    __shared__ float squares[WARPS][16];
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, place = lane % 4;
    const u32 side = p.mode == PRODUCT_SILU ? TILES / 2 : TILES;  // tiles of different columns of y; silu needs two tiles for each
    const u32 first = blockIdx.x * side * 8, rounds = (p.ins + COLUMNS - 1) / COLUMNS;
    u64 rows[TILES];
#pragma unroll
    for (u32 tile = 0; tile < TILES; ++tile) {
        const bool up = tile >= side;
        rows[tile] = p.weight + 2ull * p.ins * (first + 8 * (up ? tile - side : tile) + group + (up ? p.outs : 0));
    }
    uint4 w[AHEAD][TILES][2];
    const uint4 zeros = make_uint4(0, 0, 0, 0);
    const auto fetch = [&](u32 round, uint4 (&to)[TILES][2]) {
        const u32 k = round * COLUMNS + warp * 64 + place * 16;
#pragma unroll
        for (u32 tile = 0; tile < TILES; ++tile) {
            to[tile][0] = k < p.ins ? load_weight(rows[tile] + 2 * k) : zeros;
            to[tile][1] = k < p.ins ? load_weight(rows[tile] + 2 * k + 16) : zeros;
        }
    };
#pragma unroll
    for (u32 i = 0; i < AHEAD; ++i) fetch(i, w[i]);
    // Each thread prefetches one line of 128 bytes at a time.
    for (u64 line = blockIdx.x * 256ull + threadIdx.x; line < p.next_lines; line += gridDim.x * 256ull)
        asm volatile("prefetch.global.L2 [%0];" ::"l"(p.next + 128 * line));
    let_next_start();
    wait_for_previous();

    u64 x[2];
    bool there[2];
#pragma unroll
    for (u32 half = 0; half < 2; ++half) {
        const u32 token = group + 8 * half;
        there[half] = token < p.tokens;
        const u32 row = p.draws && there[half] ? reinterpret_cast<const Draw*>(p.draws)[token].row : token;
        x[half] = p.x + 2ull * p.ins * row;
    }
    float sums[TILES][4] = {}, square[2] = {};
    for (u32 base = 0; base < rounds; base += AHEAD) {
#pragma unroll
        for (u32 i = 0; i < AHEAD; ++i) {
            const u32 k = (base + i) * COLUMNS + warp * 64 + place * 16;
            if (k < p.ins) {
                uint4 a[2][2];
#pragma unroll
                for (u32 half = 0; half < 2; ++half) {
                    a[half][0] = there[half] ? *reinterpret_cast<const uint4*>(x[half] + 2 * k) : zeros;
                    a[half][1] = there[half] ? *reinterpret_cast<const uint4*>(x[half] + 2 * k + 16) : zeros;
                }
                if (p.norm) {
#pragma unroll
                    for (u32 piece = 0; piece < 2; ++piece) {
                        const uint4 weight = *reinterpret_cast<const uint4*>(p.norm + 2 * k + 16 * piece);
                        square[0] += weigh(a[0][piece], weight);
                        square[1] += weigh(a[1][piece], weight);
                    }
                }
#pragma unroll
                for (u32 piece = 0; piece < 2; ++piece) {
#pragma unroll
                    for (u32 tile = 0; tile < TILES; ++tile) {
                        const uint4& b = w[i][tile][piece];
                        multiply(sums[tile], a[0][piece].x, a[1][piece].x, a[0][piece].y, a[1][piece].y, b.x, b.y);
                        multiply(sums[tile], a[0][piece].z, a[1][piece].z, a[0][piece].w, a[1][piece].w, b.z, b.w);
                    }
                }
            }
            fetch(base + i + AHEAD, w[i]);
        }
    }

#pragma unroll
    for (u32 tile = 0; tile < TILES; ++tile) {
#pragma unroll
        for (u32 i = 0; i < 4; ++i) parts[warp][group + i / 2 * 8][8 * tile + 2 * place + i % 2] = sums[tile][i];
    }
#pragma unroll
    for (u32 half = 0; half < 2; ++half) {
        square[half] += __shfl_xor_sync(0xffffffffu, square[half], 1);
        square[half] += __shfl_xor_sync(0xffffffffu, square[half], 2);
        if (place == 0) squares[warp][group + 8 * half] = square[half];
    }
    __syncthreads();
    const u32 width = 8 * side;
    u16* y = reinterpret_cast<u16*>(p.y);
    for (u32 i = threadIdx.x; i < width * p.tokens; i += 256) {
        const u32 token = i / width, column = i % width;
        float sum = 0, second = 0, scale = 0;
#pragma unroll
        for (u32 part = 0; part < WARPS; ++part) {
            sum += parts[part][token][column];
            scale += squares[part][token];
            if (p.mode == PRODUCT_SILU) second += parts[part][token][column + width];
        }
        scale = p.norm ? rsqrtf(scale / static_cast<float>(p.ins) + p.eps) : 1.0f;
        sum *= scale;
        if (p.mode == PRODUCT_SILU) sum = sum / (1.0f + __expf(-sum)) * (second * scale);
        u16& out = y[static_cast<u64>(token) * p.outs + first + column];
        if (p.mode == PRODUCT_ADD) sum += wide(out);
        out = static_cast<u16>(narrow(sum, 0.0f));
    }
}

#define SKINNY(TILES, AHEAD, RESIDENT)                                                                                           \
    extern "C" __global__ void __launch_bounds__(256, RESIDENT) skinny_##TILES##_##AHEAD(const __grid_constant__ SkinnyParams p) { \
        skinny<TILES, AHEAD>(p);                                                                                                \
    }
SKINNY(1, 2, 2)
SKINNY(1, 4, 2)
SKINNY(2, 1, 2)
SKINNY(2, 2, 2)
SKINNY(4, 1, 2)
SKINNY(4, 2, 1)
