// Gated DeltaNet: layers that keep a state of fixed size for each sequence (src/delta in Rust has the same steps in f32).
//
// delta_conv: the short convolution of q, k and v over KERNEL tokens, then silu; advances the convolution's part of the states.
// delta_update_K: the recurrence of heads with K elements of q and k; advances the recurrent part of the states. A column
// of a state depends on no other column, so a warp computes 16 columns for all tokens of a row. It keeps them in registers.
// delta_gate: the RMSNorm of each head of the recurrence's output, times silu(z).
// gate: attention's output times the sigmoid of its gates.
// Twin:    tests/gpu_delta.rs (the specification, in f64)
// Params:  DeltaConvParams, 80 bytes; DeltaUpdateParams, 112 bytes; DeltaGateParams, 48 bytes; GateParams, 24 bytes
// Shapes:  see params.cuh
// Grid:    delta_conv: x = ceil(channels / 8 / 128), y = ceil(tokens / tile), block 128;
//          delta_update_K: block 32 to 256, x = value_heads * value_dim / (block / 2), y = rows;
//          delta_gate: x = ceil(tokens * value_heads / 4), block 128; gate: x = ceil(width / 8 / 128), y = tokens, block 128
// Needs:   channels, width and value_dim multiples of 8, value_dim % (block / 2) == 0, value_dim <= 256; strides and
//          offsets of states are multiples of 16 bytes. No row writes a slot that another row reads or writes. Rows with
//          a negative slot to write are skipped, and their output is undefined
// Build:   build.py
#include "common.cuh"

#define KERNEL 4
// Tokens whose inputs are in shared memory at a time.
#define TOKENS 16
#define EPS 1e-6f

// Accesses to global memory of up to 16 bytes. The compiler does not see the address space in an integer.
DEVICE u32 load_word(u64 at) {
    u32 x;
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(x) : "l"(at) : "memory");
    return x;
}
DEVICE Eight load(u64 address, u64 element) {
    Eight x;
    asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x.pair[0]), "=r"(x.pair[1]), "=r"(x.pair[2]), "=r"(x.pair[3])
                 : "l"(address + 2 * element)
                 : "memory");
    return x;
}
DEVICE void store(u64 address, u64 element, const Eight& x) {
    const u32* const x4 = x.pair;
    asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(address + 2 * element), "r"(x4[0]), "r"(x4[1]), "r"(x4[2]), "r"(x4[3])
                 : "memory");
}
DEVICE float4 load_floats(u64 at) {
    float4 x;
    asm volatile("ld.global.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "l"(at) : "memory");
    return x;
}
DEVICE void store_floats(u64 at, const float4& x) {
    asm volatile("st.global.v4.f32 [%0], {%1,%2,%3,%4};" ::"l"(at), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w) : "memory");
}
DEVICE float number(u64 address, u64 element) {
    u16 x;
    asm volatile("ld.global.u16 %0, [%1];" : "=h"(x) : "l"(address + 2 * element) : "memory");
    return wide(x);
}
DEVICE float float_of(u64 address, u32 element) { return __uint_as_float(load_word(address + 4 * element)); }
DEVICE int slot_of(u64 slots, u32 row) { return static_cast<int>(load_word(slots + 4 * row)); }
DEVICE u32 start_of(u64 starts, u32 row) { return load_word(starts + 4 * row); }
DEVICE float silu(float x) { return x / (1.0f + __expf(-x)); }
DEVICE float sigmoid(float x) { return 1.0f / (1.0f + __expf(-x)); }

// Eight channels of a convolution: the weights, and the latest KERNEL - 1 inputs.
struct Channels {
    float weight[KERNEL][8];
    Eight old[KERNEL - 1];

    __device__ __forceinline__ void weights(u64 address, u32 channel) {
#pragma unroll
        for (int i = 0; i < KERNEL / 2; ++i) {  // two channels have 8 numbers
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float both[8];
                widen(load(address, KERNEL * channel + 16 * i + 8 * half), both);
#pragma unroll
                for (int j = 0; j < 8; ++j) weight[j % KERNEL][4 * i + 2 * half + j / KERNEL] = both[j];
            }
        }
    }
    __device__ __forceinline__ void read(u64 address, u64 element, u64 stride) {
#pragma unroll
        for (int i = 0; i < KERNEL - 1; ++i) old[i] = load(address, element + i * stride);
    }
    // Computes the output of one more input.
    __device__ __forceinline__ Eight next(Eight input) {
        float sums[8] = {}, x[8];
#pragma unroll
        for (int i = 0; i < KERNEL; ++i) {
            widen(i < KERNEL - 1 ? old[i] : input, x);
#pragma unroll
            for (int j = 0; j < 8; ++j) sums[j] += x[j] * weight[i][j];
        }
#pragma unroll
        for (int i = 0; i < KERNEL - 2; ++i) old[i] = old[i + 1];
        old[KERNEL - 2] = input;
#pragma unroll
        for (int j = 0; j < 8; ++j) sums[j] = silu(sums[j]);
        return narrowed(sums);
    }
};

// The CTA of a row's first token reads the old state, computes the tokens that depend on it and writes the new state. So
// a row may read and write one slot.
DEVICE void begin_row(const DeltaConvParams& p, Channels& c, u32 row, u32 channel, u32 start, u32 end) {
    const u64 read = p.states + static_cast<u64>(slot_of(p.reads, row)) * p.stride;
    const u64 write = p.states + static_cast<u64>(slot_of(p.writes, row)) * p.stride;
    c.read(read, channel, p.channels);
    const u32 dependent = end - start < KERNEL - 1 ? end - start : KERNEL - 1;
    for (u32 t = start; t < start + dependent; ++t)
        store(p.out, static_cast<u64>(t) * p.channels + channel, c.next(load(p.x, static_cast<u64>(t) * p.width + channel)));
    if (dependent < end - start) c.read(p.x, static_cast<u64>(end - (KERNEL - 1)) * p.width + channel, p.width);
#pragma unroll
    for (int i = 0; i < KERNEL - 1; ++i) store(write, static_cast<u64>(i) * p.channels + channel, c.old[i]);
}

extern "C" __global__ void __launch_bounds__(128) delta_conv(const __grid_constant__ DeltaConvParams p) {
    let_next_start();
    wait_for_previous();
    const u32 channel = 8 * (blockIdx.x * 128 + threadIdx.x);
    if (channel >= p.channels) return;
    const u32 first = blockIdx.y * p.tile;
    if (first >= start_of(p.starts, p.rows)) return;
    // The row of the first token is the last one that starts at or before it. If all rows have one token, that row has the
    // token's number, and a search would be slower.
    u32 row = 0, above = p.rows;
    if (first < p.rows && start_of(p.starts, first) == first && start_of(p.starts, first + 1) > first) row = above = first;
    while (above > row + 1) {
        const u32 middle = (row + above) / 2;
        if (start_of(p.starts, middle) <= first) row = middle;
        else above = middle;
    }
    Channels c;
    c.weights(p.weight, channel);
    u32 start = start_of(p.starts, row), end = start_of(p.starts, row + 1);
    bool follows = false;  // whether c.old has the inputs before token t
    for (u32 t = first; t < first + p.tile; ++t) {
        while (t >= end) {
            if (++row == p.rows) return;
            start = end;
            end = start_of(p.starts, row + 1);
        }
        if (slot_of(p.writes, row) < 0) continue;
        if (t == start) begin_row(p, c, row, channel, start, end);
        if (t < start + KERNEL - 1) {
            follows = false;
            continue;
        }
        if (!follows) c.read(p.x, static_cast<u64>(t - (KERNEL - 1)) * p.width + channel, p.width);
        follows = true;
        store(p.out, static_cast<u64>(t) * p.channels + channel, c.next(load(p.x, static_cast<u64>(t) * p.width + channel)));
    }
}

// Inputs of some tokens for one head. The keys of row group g (rows g, g + 8, ..) are adjacent. Groups are STEP apart, so
// that they lie in different banks.
template <u32 KEY> struct Staged {
    static constexpr u32 ROWS = KEY / 8, STEP = ROWS + 4;
    float4 k[TOKENS][8 * STEP / 4], q[TOKENS][8 * STEP / 4];
    float v[TOKENS][128];
    float decay[TOKENS], beta[TOKENS];
    float kq[TOKENS];  // product of k and q
};

// Reads the inputs of `count` tokens, and norms q and k.
template <u32 KEY>
DEVICE void stage(Staged<KEY>& s, const DeltaUpdateParams& p, u32 head, u32 column, u32 slice, u32 first, u32 count) {
    constexpr u32 LANES = KEY / 8, STEP = Staged<KEY>::STEP;
    const u32 lane = threadIdx.x % LANES;
    const u32 key = head / (p.value_heads / p.key_heads) * KEY + 8 * lane;
    // All lanes take part in the sums, also those beyond the tokens.
    for (u32 i = threadIdx.x / LANES; i < TOKENS; i += blockDim.x / LANES) {
        const u64 row = static_cast<u64>(first + (i < count ? i : 0)) * p.channels;
        float q[8], k[8], qq = 0, kk = 0, kq = 0;
        widen(load(p.x, row + key), q);
        widen(load(p.x, row + p.key_heads * KEY + key), k);
#pragma unroll
        for (int j = 0; j < 8; ++j) qq += q[j] * q[j], kk += k[j] * k[j], kq += k[j] * q[j];
#pragma unroll
        for (int step = LANES / 2; step > 0; step /= 2) {
            qq += __shfl_xor_sync(0xffffffffu, qq, step);
            kk += __shfl_xor_sync(0xffffffffu, kk, step);
            kq += __shfl_xor_sync(0xffffffffu, kq, step);
        }
        const float q_scale = rsqrtf(qq + EPS) * p.scale, k_scale = rsqrtf(kk + EPS);
#pragma unroll
        for (u32 j = 0; j < 8; ++j) {  // row 8 * lane + j
            reinterpret_cast<float*>(s.q[i])[j * STEP + lane] = q[j] * q_scale;
            reinterpret_cast<float*>(s.k[i])[j * STEP + lane] = k[j] * k_scale;
        }
        if (lane == 0) s.kq[i] = kq * q_scale * k_scale;
    }
    const u32 value = 2 * p.key_heads * KEY + head * p.value_dim + column;
    for (u32 i = threadIdx.x; i < count * slice / 2; i += blockDim.x) {
        const u32 t = i / (slice / 2), at = i % (slice / 2) * 2;
        const u32 pair = load_word(p.x + 2 * (static_cast<u64>(first + t) * p.channels + value + at));
        s.v[t][at] = wide_low(pair);
        s.v[t][at + 1] = wide_high(pair);
    }
    for (u32 t = threadIdx.x; t < count; t += blockDim.x) {
        const u64 row = static_cast<u64>(first + t) * p.width + head;
        const float a = number(p.a, row) + float_of(p.bias, head);
        const float step = fmaxf(a, 0.0f) + log1pf(expf(-fabsf(a)));
        s.decay[t] = expf(float_of(p.rate, head) * step);
        s.beta[t] = sigmoid(number(p.b, row));
    }
}

DEVICE float sum_groups(float x) {
#pragma unroll
    for (int step = 4; step < 32; step *= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
}

// A lane's part of a state: rows group + 8 * i of four columns.
template <u32 KEY> struct Part {
    static constexpr u32 ROWS = KEY / 8;
    float4 row[ROWS];

    // Advances the part by a token, and returns the output of its columns.
    __device__ __forceinline__ float4 advance(const Staged<KEY>& s, u32 t, u32 group, u32 column) {
        const float4* const ks = s.k[t] + group * (Staged<KEY>::STEP / 4);
        const float4* const qs = s.q[t] + group * (Staged<KEY>::STEP / 4);
        float recalled[4] = {}, out[4] = {};
        float k[ROWS];
#pragma unroll
        for (u32 i = 0; i < ROWS; i += 4) {
            const float4 k4 = ks[i / 4], q4 = qs[i / 4];
            k[i] = k4.x, k[i + 1] = k4.y, k[i + 2] = k4.z, k[i + 3] = k4.w;
            const float q[4] = {q4.x, q4.y, q4.z, q4.w};
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float4 x = row[i + j];
                recalled[0] += x.x * k[i + j], recalled[1] += x.y * k[i + j];
                recalled[2] += x.z * k[i + j], recalled[3] += x.w * k[i + j];
                out[0] += x.x * q[j], out[1] += x.y * q[j], out[2] += x.z * q[j], out[3] += x.w * q[j];
            }
        }
        const float4 v = *reinterpret_cast<const float4*>(&s.v[t][column]);
        const float values[4] = {v.x, v.y, v.z, v.w}, decay = s.decay[t], beta = s.beta[t], kq = s.kq[t];
        float change[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            change[j] = beta * (values[j] - decay * sum_groups(recalled[j]));
            out[j] = decay * sum_groups(out[j]) + kq * change[j];
        }
#pragma unroll
        for (u32 i = 0; i < ROWS; ++i) {
            float4& x = row[i];
            x.x = decay * x.x + k[i] * change[0], x.y = decay * x.y + k[i] * change[1];
            x.z = decay * x.z + k[i] * change[2], x.w = decay * x.w + k[i] * change[3];
        }
        return make_float4(out[0], out[1], out[2], out[3]);
    }
};

template <u32 KEY> DEVICE void update(const DeltaUpdateParams& p) {
    __shared__ Staged<KEY> staged;
    let_next_start();
    wait_for_previous();
    const int write = slot_of(p.writes, blockIdx.y), from = slot_of(p.reads, blockIdx.y);
    const u32 start = start_of(p.starts, blockIdx.y), end = start_of(p.starts, blockIdx.y + 1);
    if (write < 0) return;
    const u32 slice = blockDim.x / 2, slices = p.value_dim / slice;
    const u32 head = blockIdx.x / slices, column = blockIdx.x % slices * slice;
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4;
    const u32 own = 16 * warp + 4 * (lane % 4);  // the lane's first column in the slice
    const u64 place = 4 * (static_cast<u64>(head * KEY + group) * p.value_dim + column + own);
    const u64 read = p.states + static_cast<u64>(from) * p.stride + place;
    Part<KEY> part;
#pragma unroll
    for (u32 i = 0; i < KEY / 8; ++i) part.row[i] = load_floats(read + static_cast<u64>(32 * i) * p.value_dim);
    for (u32 first = start; first < end; first += TOKENS) {
        const u32 count = end - first < TOKENS ? end - first : TOKENS;
        __syncthreads();
        stage(staged, p, head, column, slice, first, count);
        __syncthreads();
        for (u32 t = 0; t < count; ++t) {
            const float4 out = part.advance(staged, t, group, own);
            if (group != 0) continue;
            const u64 element = static_cast<u64>(first + t) * p.value_heads * p.value_dim + head * p.value_dim + column + own;
            const u32 low = narrow(out.x, out.y), high = narrow(out.z, out.w);
            asm volatile("st.global.v2.u32 [%0], {%1,%2};" ::"l"(p.out + 2 * element), "r"(low), "r"(high) : "memory");
        }
    }
    const u64 target = p.states + static_cast<u64>(write) * p.stride + place;
#pragma unroll
    for (u32 i = 0; i < KEY / 8; ++i) store_floats(target + static_cast<u64>(32 * i) * p.value_dim, part.row[i]);
}

extern "C" __global__ void __launch_bounds__(256, 2) delta_update_32(const __grid_constant__ DeltaUpdateParams p) { update<32>(p); }
extern "C" __global__ void __launch_bounds__(256, 2) delta_update_128(const __grid_constant__ DeltaUpdateParams p) { update<128>(p); }

extern "C" __global__ void __launch_bounds__(128) delta_gate(const __grid_constant__ DeltaGateParams p) {
    let_next_start();
    wait_for_previous();
    const u64 head = static_cast<u64>(blockIdx.x) * 4 + threadIdx.x / 32;
    if (head >= static_cast<u64>(p.tokens) * p.value_heads) return;
    const u32 at = 8 * (threadIdx.x % 32);
    const u64 token = head / p.value_heads, z = token * p.width + head % p.value_heads * p.value_dim + at;
    float x[8] = {}, weight[8], gates[8];
    if (at < p.value_dim) widen(load(p.x, head * p.value_dim + at), x);
    float sum = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) sum += x[i] * x[i];
    const float scale = rsqrtf(warp_sum(sum) / static_cast<float>(p.value_dim) + p.eps);
    if (at >= p.value_dim) return;
    widen(load(p.weight, at), weight);
    widen(load(p.z, z), gates);
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] *= scale * weight[i] * silu(gates[i]);
    store(p.x, head * p.value_dim + at, narrowed(x));
}

extern "C" __global__ void __launch_bounds__(128) gate(const __grid_constant__ GateParams p) {
    let_next_start();
    wait_for_previous();
    const u32 at = 8 * (blockIdx.x * 128 + threadIdx.x);
    if (at >= p.width) return;
    const u64 place = static_cast<u64>(blockIdx.y) * p.width + at;
    float x[8], gates[8];
    widen(load(p.x, place), x);
    widen(load(p.gates, static_cast<u64>(blockIdx.y) * p.stride + at), gates);
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] *= sigmoid(gates[i]);
    store(p.x, place, narrowed(x));
}
