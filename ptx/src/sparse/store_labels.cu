// store_labels: stores the labels of each row of k, which are some channels of each head. The labels of row i go to
// slot slots[i] of one layer; nothing is stored for a negative slot.
// Twin:    src/backend/cpu/labels.rs store     (the specification)
// Params:  StoreLabelsParams (src/common, src/backend/cuda/kernels/params/sparse.rs)
// Shapes:  k [tokens, kv_heads, head_dim] of 16 bits, rows k_stride apart; channels u32 [kv_heads, channel_count]
// Grid:    x = ceil(tokens * kv_heads * channel_count / 256)
// Needs:   k and all strides 2-byte aligned; slots distinct and below the pool's slot count; channels below head_dim
// Build:   ptx/build.py
#include "pdl.cuh"
#include "attend.cuh"
#include "move.cuh"

extern "C" __global__ void __launch_bounds__(256) store_labels(const __grid_constant__ StoreLabelsParams params) {
    const StoreLabelsParams& p = params;
    wait_for_previous();
    const u64 at = blockIdx.x * 256ull + threadIdx.x;
    const u32 row_labels = p.kv_heads * p.channel_count;
    const u64 token = at / row_labels;
    if (token >= p.tokens) return;
    const u32 label = static_cast<u32>(at - token * row_labels), head = label / p.channel_count;
    long long slot;
    if (p.slot_bytes == 4) {
        slot = static_cast<int>(load_written_u32(p.slots + 4 * token));
    } else {
        asm volatile("ld.global.s64 %0, [%1];" : "=l"(slot) : "l"(p.slots + 8 * token));
    }
    if (slot < 0) return;
    const u32 channel = load_u32(p.channels + 4ull * label);
    u16 number;
    load_unit(Direct(), number, p.k + token * p.k_stride + 2ull * (head * p.head_dim + channel));
    const u64 page = p.page_size == 1 ? slot : __umul64hi(slot, p.page_magic);
    const u64 to = p.labels + page * p.page_stride + (slot - page * p.page_size) * p.slot_stride + head * p.head_stride;
    store_unit(Direct(), to + 2ull * (label - head * p.channel_count), number);
}
