// rope_store: norms (if there is a weight) and rotates each head of q and k in place. Unless k_pool is 0, it stores k and v in
// their slots of one layer.
// Twin:    src/backend/cpu/rope.rs             (the specification)
// Params:  RopeStoreParams
// Shapes:  see move_params.cuh; pair i of a head is elements i and i + head_dim / 2
// Grid:    x = ceil(tokens * ceil(heads / heads_each) / 4), block 128: a warp takes heads_each heads of one token
// Needs:   slots below the pool's slot count; a negative slot stores nothing; rows are aligned to a lane's elements
#pragma once
#include "attend.cuh"
#include "e4m3.cuh"
#include "move_params.cuh"
#include "pdl.cuh"

struct f32 {};

// N elements of a row as numbers.
template <class T, int N> struct __align__(2 * N) Piece {
    u16 x[N];
};
template <int N> struct __align__(4 * N) Piece<f32, N> {
    float x[N];
};
template <class Lane> DEVICE Lane load_lane(u64 at) {
    if constexpr (sizeof(Lane) == 2) {
        u32 bits;
        asm volatile("ld.global.u16 %0, [%1];" : "=r"(bits) : "l"(at) : "memory");
        return {{static_cast<u16>(bits)}};
    } else if constexpr (sizeof(Lane) == 4) {
        return __builtin_bit_cast(Lane, load_written_u32(at));
    } else if constexpr (sizeof(Lane) == 8) {
        uint2 bits;
        asm volatile("ld.global.v2.u32 {%0,%1}, [%2];" : "=r"(bits.x), "=r"(bits.y) : "l"(at) : "memory");
        return __builtin_bit_cast(Lane, bits);
    } else return __builtin_bit_cast(Lane, load_written_uint4(at));
}
template <class Lane> DEVICE void store_lane(u64 at, const Lane& lane) {
    if constexpr (sizeof(Lane) == 2) {
        asm volatile("st.global.u16 [%0], %1;" ::"l"(at), "r"(static_cast<u32>(lane.x[0])) : "memory");
    } else if constexpr (sizeof(Lane) == 4) {
        store_u32(at, __builtin_bit_cast(u32, lane));
    } else if constexpr (sizeof(Lane) == 8) {
        const uint2 bits = __builtin_bit_cast(uint2, lane);
        store_uint2(at, bits.x, bits.y);
    } else {
        const uint4 bits = __builtin_bit_cast(uint4, lane);
        store_uint4(at, bits.x, bits.y, bits.z, bits.w);
    }
}
DEVICE float wide(f32, float x) { return x; }
DEVICE float wide(bf16, u16 x) { return __uint_as_float(static_cast<u32>(x) << 16); }
DEVICE float wide(f16, u16 x) { return low_half(x); }
DEVICE float narrow_to(f32, float x) { return x; }
template <class T> DEVICE u16 narrow_to(T, float x) { return static_cast<u16>(pack(T(), x, 0.f)); }

// Sine and cosine to 2^-22, for angles below 2^22: polynomials of the remainder of x by pi / 2. The product with the first part of
// pi / 2 is not rounded. sincosf has a slow path that needs a stack.
DEVICE void sine_cosine(float x, float& sine, float& cosine) {
    const int quarter = __float2int_rn(x * 0.63661977f);
    const float n = static_cast<float>(quarter);
    float r = fmaf(n, -0x1.921fb6p+0f, x);
    r = fmaf(n, 0x1.777a5cp-25f, r);
    const float square = r * r;
    const float s = fmaf(r * square, fmaf(square, fmaf(square, -1.9515296e-4f, 8.3321609e-3f), -1.6666655e-1f), r);
    const float c = fmaf(square * square, fmaf(square, fmaf(square, 2.4433157e-5f, -1.3887316e-3f), 4.1666646e-2f), fmaf(square, -0.5f, 1.f));
    const float a = quarter & 1 ? c : s, b = quarter & 1 ? s : c;
    sine = quarter & 2 ? -a : a, cosine = (quarter + 1) & 2 ? -b : b;
}

template <class T, int D> DEVICE void rope_store(const RopeStoreParams& p) {
    constexpr int N = D / 64;                             // pairs of a lane
    constexpr u64 SIZE = sizeof(Piece<T, 1>), HALF = D / 2 * SIZE;  // bytes
    using Lane = Piece<T, N>;
    let_next_start();
    wait_for_previous();
    const u32 warp = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x % 32;
    const u32 rotated = p.q_heads + p.kv_heads, heads = rotated + (p.k_pool ? p.kv_heads : 0);
    const u32 groups = (heads + p.heads_each - 1) / p.heads_each;
    const u32 token = warp / groups, first = warp % groups * p.heads_each;
    if (token >= p.tokens) return;
    const float position = static_cast<float>(load_u32(p.positions + 4ull * token));
    float cosine[N], sine[N];
#pragma unroll
    for (int i = 0; i < N; ++i) sine_cosine(position * __uint_as_float(load_written_u32(p.frequencies + 4ull * (lane * N + i))), sine[i], cosine[i]);
    long long slot = -1;
    u64 place = 0;
    if (p.k_pool && p.slot_bytes == 4) {
        const int number = static_cast<int>(load_u32(p.slots + 4ull * token));
        slot = number;
        place = static_cast<u32>(number) / p.page_size * p.page_stride + static_cast<u32>(number) % p.page_size * static_cast<u64>(p.slot_stride);
    } else if (p.k_pool) {
        const uint2 number = load_uint2(p.slots + 8ull * token);
        slot = static_cast<long long>(static_cast<u64>(number.y) << 32 | number.x);
        place = static_cast<u64>(slot) / p.page_size * p.page_stride + static_cast<u64>(slot) % p.page_size * p.slot_stride;
    }
    const u32 end = min(first + p.heads_each, heads);
    for (u32 head = first; head < end; ++head) {
        const u64 at = p.qkv + token * p.qkv_stride + (head * static_cast<u64>(D) + lane * N) * SIZE;
        Lane low = load_lane<Lane>(at), high = load_lane<Lane>(at + HALF);
        if (head < rotated) {
            float a[N], b[N], sum = 0.f;
#pragma unroll
            for (int i = 0; i < N; ++i) {
                a[i] = wide(T(), low.x[i]), b[i] = wide(T(), high.x[i]);
                sum += a[i] * a[i] + b[i] * b[i];
            }
            const u64 weight = head < p.q_heads ? p.q_norm : p.k_norm;
            if (weight) {
#pragma unroll
                for (int i = 16; i > 0; i /= 2) sum += __shfl_xor_sync(~0u, sum, i);
                const float scale = rsqrtf(sum / D + p.eps);
                const u64 from = weight + lane * N * SIZE;
                const Lane w_low = load_lane<Lane>(from), w_high = load_lane<Lane>(from + HALF);
#pragma unroll
                for (int i = 0; i < N; ++i) a[i] *= scale * wide(T(), w_low.x[i]), b[i] *= scale * wide(T(), w_high.x[i]);
            }
#pragma unroll
            for (int i = 0; i < N; ++i) {
                low.x[i] = narrow_to(T(), a[i] * cosine[i] - b[i] * sine[i]);
                high.x[i] = narrow_to(T(), b[i] * cosine[i] + a[i] * sine[i]);
            }
            store_lane(at, low), store_lane(at + HALF, high);
        }
        if (head < p.q_heads || slot < 0) continue;
        const bool is_k = head < rotated;
        const u32 kv_head = head - (is_k ? p.q_heads : rotated);
        const u64 to = (is_k ? p.k_pool : p.v_pool) + place + kv_head * static_cast<u64>(p.head_stride) + lane * N * SIZE;
        store_lane(to, low), store_lane(to + HALF, high);
    }
}
