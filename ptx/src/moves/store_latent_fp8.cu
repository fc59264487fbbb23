// store_latent_fp8: stores row i of k in slot slots[i] of one layer. The first head_dim numbers are stored as bytes of E4M3
// with a computed scale, the others as bf16. If the slot is negative, the row is not stored.
// Twin:    src/backend/cpu store_cache         (the specification: src/backend/cpu/scales.rs, bit for bit)
// Params:  StoreLatentFp8Params (src/common, src/backend/cuda/kernels/params/latent.rs); v, v_pool, v_scales unused
// Shapes:  k [tokens, head_dim + rope.elements], rows k_stride apart; slots i32 or i64 [tokens]; kv_heads 1, by_token 1
// Grid:    x = ceil(tokens / 8), block 256: one warp for each token
// Needs:   slots distinct and below the pool's slot count
// Build:   ptx/build.py
#include "pdl.cuh"
#include "store_fp8.cuh"

// Returns a number as bits of f32. NaN keeps its bits, as on the CPU; the instruction would turn each NaN of f16 into the
// same NaN.
DEVICE u32 load_bits(u32 rows, u64 row, u32 i) {
    if (rows == ROWS_F32) return __float_as_uint(load_scale(row + 4ull * i));
    u16 bits;
    load_unit(Direct(), bits, row + 2ull * i);
    const u32 wide = bits;
    if (rows == ROWS_BF16) return wide << 16;
    const bool nan = (wide & 0x7fff) > 0x7c00;
    return nan ? (wide & 0x8000) << 16 | 0x7f800000 | (wide & 0x3ff) << 13 : __float_as_uint(low_half(wide));
}
// Rounds to nearest even; NaN stays NaN.
DEVICE u16 round_to_bf16(u32 bits) {
    const bool nan = (bits & 0x7fffffff) > 0x7f800000;
    return static_cast<u16>((nan ? bits | 0x400000 : bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

extern "C" __global__ void __launch_bounds__(256) store_latent_fp8(const __grid_constant__ StoreLatentFp8Params params) {
    wait_for_previous();
    const StoreFp8Params& p = params.store;
    const LayerRope& rope = params.rope;
    const u32 token = blockIdx.x * 8 + threadIdx.x / 32;
    if (token >= p.tokens) return;
    const long long slot = load_slot(p, token);
    if (slot < 0) return;
    const u64 from = p.k + static_cast<u64>(token) * p.k_stride, page = page_of(p, slot);
    const Place to = place(p, slot);
    store_head(p, from, p.k_pool + to.row, p.k_scales + to.scale);
    const u64 rope_to = rope.at + page * rope.page_stride + (slot - page * p.page_size) * rope.slot_stride;
    for (u32 i = threadIdx.x % 32; i < rope.elements; i += 32)
        store_unit(Direct(), rope_to + 2ull * i, round_to_bf16(load_bits(p.rows, from, p.head_dim + i)));
    let_next_start();
}
