// Parameters of the kernels that move bytes: store_cache*, store_latent_fp8, rope_store*, copy_pages, copy_heads, compact_slots,
// load_plan.
// The Rust counterpart is src/backend/cuda/kernels/params/moves.rs, and latent.rs there for store_latent_fp8. The rules
// are those of params.cuh.
#pragma once
#include "params.cuh"

struct StoreCacheParams {
    u64 k;            // rows to store: [tokens, kv_heads, head_dim], k_stride bytes apart; or the first halves of latent rows
    u64 v;            // the same, v_stride bytes apart; or the second halves of latent rows
    u64 slots;        // i32 or i64 [tokens]; nothing is written for a negative slot
    u64 k_pool;       // this layer's K: run r of slot s of page p is at k_pool + p * page_stride + s * slot_stride + r * run_stride
    u64 v_pool;       // this layer's V, same strides
    u64 page_stride;  // bytes
    u32 k_stride;     // bytes
    u32 v_stride;     // bytes
    u32 tokens;
    u32 page_size;    // slots of a page; 1 if the layer's pages are contiguous: page_stride is then the stride of a slot
    u64 page_magic;   // slot / page_size is the high half of slot * page_magic, unless page_size is 1
    u32 slot_stride;  // bytes
    u32 slot_bytes;   // 4 or 8
    u32 row_units;    // units of a run: its bytes / unit_bytes. A run is a row (or half a latent row), or one head of it
    u32 unit_bytes;   // bytes that a thread moves at once: 16, 4 or 2
    u32 run_bytes;    // bytes from run to run of the rows to store
    u32 run_stride;   // bytes from run to run of a slot; the grid's y is the number of runs
};
KV_SIZE(StoreCacheParams, 96);
KV_AT(StoreCacheParams, k, 0);
KV_AT(StoreCacheParams, v, 8);
KV_AT(StoreCacheParams, slots, 16);
KV_AT(StoreCacheParams, k_pool, 24);
KV_AT(StoreCacheParams, v_pool, 32);
KV_AT(StoreCacheParams, page_stride, 40);
KV_AT(StoreCacheParams, k_stride, 48);
KV_AT(StoreCacheParams, v_stride, 52);
KV_AT(StoreCacheParams, tokens, 56);
KV_AT(StoreCacheParams, page_size, 60);
KV_AT(StoreCacheParams, page_magic, 64);
KV_AT(StoreCacheParams, slot_stride, 72);
KV_AT(StoreCacheParams, slot_bytes, 76);
KV_AT(StoreCacheParams, row_units, 80);
KV_AT(StoreCacheParams, unit_bytes, 84);
KV_AT(StoreCacheParams, run_bytes, 88);
KV_AT(StoreCacheParams, run_stride, 92);

// Parameters of rope_store*.
struct RopeStoreParams {
    u64 qkv;          // [tokens, q_heads + 2 * kv_heads, head_dim], rows qkv_stride apart: q and k are rotated in place
    u64 positions;    // u32 [tokens]
    u64 slots;        // i32 or i64 [tokens]; nothing is stored for a negative slot
    u64 q_norm;       // [head_dim]; 0: no norm
    u64 k_norm;       // the same for k
    u64 frequencies;  // f32 [head_dim / 2]
    u64 k_pool;       // this layer's K: head h of slot s of page p is at k_pool + p * page_stride + s * slot_stride + h * head_stride;
                      // 0: nothing is stored
    u64 v_pool;       // this layer's V, same strides
    u64 page_stride;  // bytes
    u64 qkv_stride;   // bytes
    u32 slot_stride;  // bytes
    u32 slot_bytes;   // 4 or 8
    u32 page_size;    // slots of a page
    u32 tokens;
    u32 q_heads;
    u32 kv_heads;
    u32 heads_each;   // heads of a warp
    float eps;        // of the norms
    u32 head_stride;  // bytes
    u32 reserved;     // 0
};
KV_SIZE(RopeStoreParams, 120);
KV_AT(RopeStoreParams, qkv, 0);
KV_AT(RopeStoreParams, positions, 8);
KV_AT(RopeStoreParams, slots, 16);
KV_AT(RopeStoreParams, q_norm, 24);
KV_AT(RopeStoreParams, k_norm, 32);
KV_AT(RopeStoreParams, frequencies, 40);
KV_AT(RopeStoreParams, k_pool, 48);
KV_AT(RopeStoreParams, v_pool, 56);
KV_AT(RopeStoreParams, page_stride, 64);
KV_AT(RopeStoreParams, qkv_stride, 72);
KV_AT(RopeStoreParams, slot_stride, 80);
KV_AT(RopeStoreParams, slot_bytes, 84);
KV_AT(RopeStoreParams, page_size, 88);
KV_AT(RopeStoreParams, tokens, 92);
KV_AT(RopeStoreParams, q_heads, 96);
KV_AT(RopeStoreParams, kv_heads, 100);
KV_AT(RopeStoreParams, heads_each, 104);
KV_AT(RopeStoreParams, eps, 108);
KV_AT(RopeStoreParams, head_stride, 112);
KV_AT(RopeStoreParams, reserved, 116);

// Parameters of store_cache_fp8*. The rows to store are [tokens, kv_heads, head_dim] of type `rows`. The kernel quantises them
// to bytes. If scales are by token, it also computes and stores the scales.
#define ROWS_F32 0
#define ROWS_F16 1
#define ROWS_BF16 2
struct StoreFp8Params {
    u64 k;                  // rows to store, k_stride bytes apart
    u64 v;                  // the same, v_stride bytes apart
    u64 slots;              // i32 or i64 [tokens]; nothing is written for a negative slot
    u64 k_pool;             // this layer's K: head h of slot s of page p is at k_pool + p * page_stride + s * slot_stride + h * head_stride
    u64 v_pool;             // this layer's V, same strides
    u64 k_scales;           // as in LayerScales; written if scales are by token, otherwise read
    u64 v_scales;
    u64 page_stride;        // bytes
    u64 scale_page_stride;  // bytes
    u64 page_magic;         // slot / page_size is the high half of slot * page_magic, unless page_size is 1
    u32 k_stride;           // bytes
    u32 v_stride;           // bytes
    u32 tokens;
    u32 page_size;          // slots of a page
    u32 slot_stride;        // bytes
    u32 scale_head_stride;  // bytes
    u32 slot_bytes;         // 4 or 8
    u32 kv_heads;
    u32 head_dim;
    u32 rows;               // ROWS_F32, ROWS_F16 or ROWS_BF16
    u32 by_token;
    u32 head_stride;        // bytes
};
KV_SIZE(StoreFp8Params, 128);
KV_AT(StoreFp8Params, k, 0);
KV_AT(StoreFp8Params, v, 8);
KV_AT(StoreFp8Params, slots, 16);
KV_AT(StoreFp8Params, k_pool, 24);
KV_AT(StoreFp8Params, v_pool, 32);
KV_AT(StoreFp8Params, k_scales, 40);
KV_AT(StoreFp8Params, v_scales, 48);
KV_AT(StoreFp8Params, page_stride, 56);
KV_AT(StoreFp8Params, scale_page_stride, 64);
KV_AT(StoreFp8Params, page_magic, 72);
KV_AT(StoreFp8Params, k_stride, 80);
KV_AT(StoreFp8Params, v_stride, 84);
KV_AT(StoreFp8Params, tokens, 88);
KV_AT(StoreFp8Params, page_size, 92);
KV_AT(StoreFp8Params, slot_stride, 96);
KV_AT(StoreFp8Params, scale_head_stride, 100);
KV_AT(StoreFp8Params, slot_bytes, 104);
KV_AT(StoreFp8Params, kv_heads, 108);
KV_AT(StoreFp8Params, head_dim, 112);
KV_AT(StoreFp8Params, rows, 116);
KV_AT(StoreFp8Params, by_token, 120);
KV_AT(StoreFp8Params, head_stride, 124);

// Parameters of store_latent_fp8. Rows have only k. The kernel stores the first `store.head_dim` numbers of a row as bytes and
// the next `rope.elements` numbers as bf16.
struct StoreLatentFp8Params {
    StoreFp8Params store;
    LayerRope rope;
};
KV_SIZE(StoreLatentFp8Params, 152);
KV_AT(StoreLatentFp8Params, store, 0);
KV_AT(StoreLatentFp8Params, rope, 128);

// The parameters contain the list of pages to copy, so nothing is uploaded. CUDA 12.0 allows 4,096 bytes of parameters.
#define COPY_PAGES_MAX 448
struct PageCopy {
    u32 source;
    u32 target;
};
struct CopyPagesParams {
    u64 source;               // piece i of page p at source + p * source_page_stride + i * source_piece_stride
    u64 target;
    u64 source_page_stride;   // bytes
    u64 source_piece_stride;  // bytes
    u64 target_page_stride;   // bytes
    u64 target_piece_stride;  // bytes
    u64 piece_magic;          // n / piece_units is the high half of n * piece_magic; 0: a piece has one unit
    u32 piece_units;          // units of one piece
    u32 page_units;           // units of one page
    u32 unit_bytes;           // 16, 4 or 2
    u32 reserved;             // 0
    PageCopy copies[COPY_PAGES_MAX];
};
KV_SIZE(PageCopy, 8);
KV_AT(PageCopy, source, 0);
KV_AT(PageCopy, target, 4);
KV_SIZE(CopyPagesParams, 3656);
KV_AT(CopyPagesParams, source, 0);
KV_AT(CopyPagesParams, target, 8);
KV_AT(CopyPagesParams, source_page_stride, 16);
KV_AT(CopyPagesParams, source_piece_stride, 24);
KV_AT(CopyPagesParams, target_page_stride, 32);
KV_AT(CopyPagesParams, target_piece_stride, 40);
KV_AT(CopyPagesParams, piece_magic, 48);
KV_AT(CopyPagesParams, piece_units, 56);
KV_AT(CopyPagesParams, page_units, 60);
KV_AT(CopyPagesParams, unit_bytes, 64);
KV_AT(CopyPagesParams, reserved, 68);
KV_AT(CopyPagesParams, copies, 72);

// Head h of slot s of piece i of page p: address + i * piece_stride + p * page_stride + s * slot_stride + h * head_stride.
struct HeadPlaces {
    u64 address;
    u64 table;         // u64 [pieces]: piece i is at table[i]; 0: at address + i * piece_stride
    u64 piece_stride;  // bytes
    u64 page_stride;   // bytes
    u64 slot_stride;   // bytes
    u64 head_stride;   // bytes
};
struct CopyHeadsParams {
    HeadPlaces source;
    HeadPlaces target;
    u32 page_units;   // units of 16 bytes of one page
    u32 piece_units;  // units of one piece
    u32 slot_units;   // units of the heads of one slot of a piece
    u32 head_units;   // units of one head
    PageCopy copies[COPY_PAGES_MAX];
};
KV_SIZE(HeadPlaces, 48);
KV_AT(HeadPlaces, address, 0);
KV_AT(HeadPlaces, table, 8);
KV_AT(HeadPlaces, piece_stride, 16);
KV_AT(HeadPlaces, page_stride, 24);
KV_AT(HeadPlaces, slot_stride, 32);
KV_AT(HeadPlaces, head_stride, 40);
KV_SIZE(CopyHeadsParams, 3696);
KV_AT(CopyHeadsParams, source, 0);
KV_AT(CopyHeadsParams, target, 48);
KV_AT(CopyHeadsParams, page_units, 96);
KV_AT(CopyHeadsParams, piece_units, 100);
KV_AT(CopyHeadsParams, slot_units, 104);
KV_AT(CopyHeadsParams, head_units, 108);
KV_AT(CopyHeadsParams, copies, 112);

#define COMPACTIONS_MAX 200
struct Compaction {
    u32 row;    // page table row
    u32 first;  // place in the row that receives the first kept slot; the others follow
    u64 keep;   // bit i: place first + i is kept
};
struct CompactSlotsParams {
    u64 pool;            // layer l, page p, slot s, run r: pool + l * layer_stride + p * page_stride + s * slot_stride + r * run_stride
    u64 layer_stride;    // bytes
    u64 layer_table;     // u64 [layers]: layer l is at layer_table[l]; 0: at pool + l * layer_stride
    u64 page_stride;     // bytes
    u64 slot_stride;     // bytes
    u64 run_stride;      // bytes
    u64 table;           // as in AttendParams
    u32 page_size;
    u32 leaf_pages;
    u32 leaves_per_row;
    u32 leaf_base;
    u32 layers;
    u32 runs;            // contiguous runs of memory of a slot in a layer
    u32 run_units;       // units of one run
    u32 unit_bytes;      // 16, 4 or 2
    Compaction compactions[COMPACTIONS_MAX];
};
KV_SIZE(Compaction, 16);
KV_AT(Compaction, row, 0);
KV_AT(Compaction, first, 4);
KV_AT(Compaction, keep, 8);
KV_SIZE(CompactSlotsParams, 3288);
KV_AT(CompactSlotsParams, pool, 0);
KV_AT(CompactSlotsParams, layer_stride, 8);
KV_AT(CompactSlotsParams, layer_table, 16);
KV_AT(CompactSlotsParams, page_stride, 24);
KV_AT(CompactSlotsParams, slot_stride, 32);
KV_AT(CompactSlotsParams, run_stride, 40);
KV_AT(CompactSlotsParams, table, 48);
KV_AT(CompactSlotsParams, page_size, 56);
KV_AT(CompactSlotsParams, leaf_pages, 60);
KV_AT(CompactSlotsParams, leaves_per_row, 64);
KV_AT(CompactSlotsParams, leaf_base, 68);
KV_AT(CompactSlotsParams, layers, 72);
KV_AT(CompactSlotsParams, runs, 76);
KV_AT(CompactSlotsParams, run_units, 80);
KV_AT(CompactSlotsParams, unit_bytes, 84);
KV_AT(CompactSlotsParams, compactions, 88);

struct TableWrite {
    u32 index;
    u32 value;
};
struct LoadPlanParams {
    u64 source;     // pinned memory
    u64 image;      // device memory, `units` long
    u64 words;      // u32: the page tables
    u64 counter;    // u32 in device memory, zero between launches
    u64 done;       // u64 in pinned memory: becomes `ticket` when the host may rewrite the source
    u64 ticket;
    u32 units;      // 16-byte units of the image
    u32 writes_at;  // bytes from the source to TableWrite[writes]
    u32 writes;
    u32 reserved;   // 0
};
KV_SIZE(TableWrite, 8);
KV_AT(TableWrite, index, 0);
KV_AT(TableWrite, value, 4);
KV_SIZE(LoadPlanParams, 64);
KV_AT(LoadPlanParams, source, 0);
KV_AT(LoadPlanParams, image, 8);
KV_AT(LoadPlanParams, words, 16);
KV_AT(LoadPlanParams, counter, 24);
KV_AT(LoadPlanParams, done, 32);
KV_AT(LoadPlanParams, ticket, 40);
KV_AT(LoadPlanParams, units, 48);
KV_AT(LoadPlanParams, writes_at, 52);
KV_AT(LoadPlanParams, writes, 56);
KV_AT(LoadPlanParams, reserved, 60);
