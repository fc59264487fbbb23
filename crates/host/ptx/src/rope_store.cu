// rope_store_d64, _d128, _d256: norms (where there is a weight) and rotates each head of q and k; q stays where it is, k and
// v go to their slots of one layer's pool.
// Twin:    src/gpu/twin.rs rope_store          (the specification)
// Params:  RopeStoreParams, 112 bytes
// Shapes:  see params.cuh; pair i of a head is elements i and i + head_dim / 2
// Grid:    x = ceil(tokens * ceil(heads / heads_each) / 4), block 128: a warp takes heads_each heads of one token
// Needs:   slots below the pool's slot count; a negative slot stores nothing
// Build:   build.py
#include "common.cuh"

template <int N> struct __align__(2 * N) Piece {
    u16 x[N];
};

template <int D> DEVICE void rope_store(const RopeStoreParams& p) {
    constexpr int N = D / 64;  // pairs of a lane
    let_next_start();
    wait_for_previous();
    const u32 warp = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x % 32;
    const u32 heads = p.q_heads + 2 * p.kv_heads, groups = (heads + p.heads_each - 1) / p.heads_each;
    const u32 token = warp / groups, first = warp % groups * p.heads_each;
    if (token >= p.tokens) return;
    const float position = static_cast<float>(reinterpret_cast<const u32*>(p.positions)[token]);
    float cosine[N], sine[N];
#pragma unroll
    for (int i = 0; i < N; ++i) sincosf(position * reinterpret_cast<const float*>(p.frequencies)[lane * N + i], &sine[i], &cosine[i]);
    long long slot;
    u64 place;
    if (p.slot_bytes == 4) {
        const int number = reinterpret_cast<const int*>(p.slots)[token];
        slot = number;
        place = static_cast<u32>(number) / p.page_size * p.page_stride + static_cast<u32>(number) % p.page_size * p.slot_stride;
    } else {
        slot = reinterpret_cast<const long long*>(p.slots)[token];
        place = static_cast<u64>(slot) / p.page_size * p.page_stride + static_cast<u64>(slot) % p.page_size * p.slot_stride;
    }
    const u32 end = first + p.heads_each < heads ? first + p.heads_each : heads;
    for (u32 head = first; head < end; ++head) {
        const u64 at = p.qkv + 2 * ((static_cast<u64>(token) * heads + head) * D + lane * N);
        Piece<N> low = *reinterpret_cast<Piece<N>*>(at), high = *reinterpret_cast<Piece<N>*>(at + D);
        if (head < p.q_heads + p.kv_heads) {
            float a[N], b[N], sum = 0;
#pragma unroll
            for (int i = 0; i < N; ++i) {
                a[i] = wide(low.x[i]), b[i] = wide(high.x[i]);
                sum += a[i] * a[i] + b[i] * b[i];
            }
            const u64 weight = head < p.q_heads ? p.q_norm : p.k_norm;
            if (weight) {
                const float scale = rsqrtf(warp_sum(sum) / D + p.eps);
                const Piece<N> w_low = *reinterpret_cast<const Piece<N>*>(weight + 2 * lane * N);
                const Piece<N> w_high = *reinterpret_cast<const Piece<N>*>(weight + D + 2 * lane * N);
#pragma unroll
                for (int i = 0; i < N; ++i) a[i] *= scale * wide(w_low.x[i]), b[i] *= scale * wide(w_high.x[i]);
            }
#pragma unroll
            for (int i = 0; i < N; ++i) {
                const u32 pair = narrow(a[i] * cosine[i] - b[i] * sine[i], b[i] * cosine[i] + a[i] * sine[i]);
                low.x[i] = static_cast<u16>(pair), high.x[i] = static_cast<u16>(pair >> 16);
            }
        }
        u64 to = at;
        if (head >= p.q_heads) {
            if (slot < 0) continue;
            const bool is_k = head < p.q_heads + p.kv_heads;
            const u32 kv_head = head - p.q_heads - (is_k ? 0 : p.kv_heads);
            to = (is_k ? p.k_pool : p.v_pool) + place + 2 * (static_cast<u64>(kv_head) * D + lane * N);
        }
        *reinterpret_cast<Piece<N>*>(to) = low;
        *reinterpret_cast<Piece<N>*>(to + D) = high;
    }
}

#define ROPE_STORE(D) \
    extern "C" __global__ void __launch_bounds__(128) rope_store_d##D(const __grid_constant__ RopeStoreParams p) { rope_store<D>(p); }
ROPE_STORE(64)
ROPE_STORE(128)
ROPE_STORE(256)
