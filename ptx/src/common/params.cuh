// Parameters of the attention kernels and of store_labels, passed by value, one struct each; move_params.cuh has those
// of the other kernels that move bytes. The Rust counterpart is src/backend/cuda/kernels/params.rs and its folder.
// Both sides assert the same sizes and offsets, and `ptx/build.py --check` compares the numbers.
//
// There is no padding and no bool: fields are u64, u32, u16, float, or structs of these.
#pragma once

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

#define KV_SIZE(type, bytes) static_assert(sizeof(type) == bytes, #type)
#ifdef __CUDACC_RTC__
#define KV_OFFSET(type, field) __INTADDR__(&static_cast<type*>(nullptr)->field)
#else
#define KV_OFFSET(type, field) __builtin_offsetof(type, field)
#endif
#define KV_AT(type, field, at) static_assert(KV_OFFSET(type, field) == at, #type "." #field)

// One sequence of a step (src/plan/mod.rs BatchRow), or its tokens in one chunk (src/backend/cuda/plan/chunk_rows.rs).
#define TREE_ROW 0x80000000u  // flag of `row`, here and in ExtendWork: a draft tree, which has masks
struct BatchRow {
    u32 row;         // its page table row, | TREE_ROW; with chunks, the index of its first directory word
    u32 qo_start;    // its first query row
    u32 extend_len;  // number of its query rows; row qo_start + i has position kv_len - extend_len + i
    u32 kv_len;      // number of tokens with K and V; 0 marks padding, whose out is 0 and lse -inf
};
KV_SIZE(BatchRow, 16);
KV_AT(BatchRow, row, 0);
KV_AT(BatchRow, qo_start, 4);
KV_AT(BatchRow, extend_len, 8);
KV_AT(BatchRow, kv_len, 12);

// Limits of the fields that attend_decode_* packs into one word for each token: its slot in the page, and its head.
#define PAGE_TOKENS_MAX 1024
#define KV_HEADS_MAX 65535

// Parameters of attend_decode_*, attend_extend_*, attend_f32, attend_latent_tiles_*, attend_latent_f32 and
// attend_latent_join_*. The structs of other kernels (over fp8, latent rows on Hopper, shared spans, sparse reads
// except store_labels) begin with it.
struct AttendParams {
    u64 q;              // [tokens, q_heads, head_dim], rows q_stride apart, 16-byte aligned (f32: 4-byte)
    u64 out;            // [tokens, q_heads, head_dim] (over latent rows [.., 512]), rows out_stride apart, aligned like q
    u64 lse;            // f32 [tokens, q_heads], natural logarithm; 0: none
    u64 k;              // this layer's K: page p, slot s, head h at k + p * page_stride + s * slot_stride + h * head_stride
    u64 v;              // this layer's V, same strides
    u64 page_stride;    // bytes
    u64 slot_stride;    // bytes
    u64 head_stride;    // bytes
    u64 q_stride;       // bytes from one token's q to the next
    u64 out_stride;     // bytes from one token's out to the next
    u64 table;          // u32: directories [rows, leaves_per_row], then leaves [.., leaf_pages]
    u64 batch_rows;     // BatchRow[batch]
    u64 plan;           // u32: the planner's words for this kernel (src/backend/cuda/attention/split/), 16-byte aligned
    u64 partial;        // f32 scratch for split sums, 16-byte aligned
    u64 counters;       // u32, zero before the first launch; each launch leaves them zero. attend_latent_* except *_f32, and their join:
                        // f32 [slots, rows, 2]: for each row of a part, the logit to which its weights are relative, and their sum
    u64 page_magic;     // ceil(2^32 / page_size): position / page_size == position * page_magic >> 32
    u64 leaf_magic;     // ceil(2^32 / leaf_pages)
    u32 page_size;      // tokens of a page, 1..=PAGE_TOKENS_MAX
    u32 leaf_pages;     // pages of a leaf
    u32 leaves_per_row; // words of one row's directory; 1 for attention with chunks
    u32 leaf_base;      // index of the track's first word in the first leaf; all directories (rows * leaves_per_row words) precede it
    u32 q_heads;
    u32 kv_heads;       // attend_decode_*: at most KV_HEADS_MAX
    u32 group;          // q_heads / kv_heads, 1..=16; 1..=128 for latent rows
    u32 batch;          // batch rows, padding included
    u32 window;         // sliding window: a query at p sees positions above p - window; 0: none
    float scale;        // factor of the logits
    float soft_cap;     // logits become soft_cap * tanh(logits / soft_cap); 0: none
    u32 negate_q;       // attend_extend_* only: 1: the scale is negative, so the kernel negates q, and `scale` is the absolute value
    u32 stripes;        // attend_decode_*, attend_selected_* and attend_shared_*: stripes of kv heads
    u32 head_dim;       // elements of a head; attend_f32 and attend_fp8_f32 take any multiple of 32 up to 256
    u64 sinks;          // f32 [q_heads]; -inf: no sink; 0: no head has one
    u64 masks;          // u64 [tokens], only for trees. If bit i is set, the query sees slot kv_len - 1 - i of the row; it sees all slots before the last 64
};
KV_SIZE(AttendParams, 208);
KV_AT(AttendParams, q, 0);
KV_AT(AttendParams, out, 8);
KV_AT(AttendParams, lse, 16);
KV_AT(AttendParams, k, 24);
KV_AT(AttendParams, v, 32);
KV_AT(AttendParams, page_stride, 40);
KV_AT(AttendParams, slot_stride, 48);
KV_AT(AttendParams, head_stride, 56);
KV_AT(AttendParams, q_stride, 64);
KV_AT(AttendParams, out_stride, 72);
KV_AT(AttendParams, table, 80);
KV_AT(AttendParams, batch_rows, 88);
KV_AT(AttendParams, plan, 96);
KV_AT(AttendParams, partial, 104);
KV_AT(AttendParams, counters, 112);
KV_AT(AttendParams, page_magic, 120);
KV_AT(AttendParams, leaf_magic, 128);
KV_AT(AttendParams, page_size, 136);
KV_AT(AttendParams, leaf_pages, 140);
KV_AT(AttendParams, leaves_per_row, 144);
KV_AT(AttendParams, leaf_base, 148);
KV_AT(AttendParams, q_heads, 152);
KV_AT(AttendParams, kv_heads, 156);
KV_AT(AttendParams, group, 160);
KV_AT(AttendParams, batch, 164);
KV_AT(AttendParams, window, 168);
KV_AT(AttendParams, scale, 172);
KV_AT(AttendParams, soft_cap, 176);
KV_AT(AttendParams, negate_q, 180);
KV_AT(AttendParams, stripes, 184);
KV_AT(AttendParams, head_dim, 188);
KV_AT(AttendParams, sinks, 192);
KV_AT(AttendParams, masks, 200);

// The scales of one layer of fp8.
struct LayerScales {
    u64 k;            // f32: scale of head h at k + h * head_stride; by token, the scale of page p, slot s is at
                      // k + h * head_stride + p * page_stride + s * 4
    u64 v;            // the same for V
    u64 page_stride;  // bytes
    u32 head_stride;  // bytes
    u32 by_token;     // 1: each token has its own scale
};
KV_SIZE(LayerScales, 32);
KV_AT(LayerScales, k, 0);
KV_AT(LayerScales, v, 8);
KV_AT(LayerScales, page_stride, 16);
KV_AT(LayerScales, head_stride, 24);
KV_AT(LayerScales, by_token, 28);

// Attention over fp8: attend_decode_fp8_*, attend_extend_fp8_* and attend_fp8_f32. K and V are bytes (E4M3).
struct AttendFp8Params {
    AttendParams attend;
    LayerScales scales;
};
KV_SIZE(AttendFp8Params, 240);
KV_AT(AttendFp8Params, attend, 0);
KV_AT(AttendFp8Params, scales, 208);

// The unquantised part of one layer's latent rows of fp8.
struct LayerRope {
    u64 at;           // bf16 [elements] of page p, slot s: address `at` + p * page_stride + s * slot_stride
    u64 page_stride;  // bytes
    u32 slot_stride;  // bytes
    u32 elements;
};
KV_SIZE(LayerRope, 24);
KV_AT(LayerRope, at, 0);
KV_AT(LayerRope, page_stride, 8);
KV_AT(LayerRope, slot_stride, 16);
KV_AT(LayerRope, elements, 20);

// Attention over latent rows of fp8: attend_latent_fp8_*, attend_latent_tiles_fp8_*. V shares K's bytes and scales.
struct AttendLatentFp8Params {
    AttendParams attend;
    LayerScales scales;
    LayerRope rope;
};
KV_SIZE(AttendLatentFp8Params, 264);
KV_AT(AttendLatentFp8Params, attend, 0);
KV_AT(AttendLatentFp8Params, scales, 208);
KV_AT(AttendLatentFp8Params, rope, 240);

// Attention over latent rows of 16 bits: attend_latent_*_sm90a. `rows` is the tensor map of the layer's rows, which
// cuTensorMapEncodeTiled writes: [pages, slots, 576] in boxes of [1, box_rows, 64], swizzled by 128 bytes.
struct alignas(64) TensorMap {
    u64 words[16];
};
struct AttendLatentRowsParams {
    AttendParams attend;
    u32 box_rows;  // a power of two up to 32 that divides a page; 0: there is no map
    u32 reserved[11];
    TensorMap rows;
};
KV_SIZE(AttendLatentRowsParams, 384);
KV_AT(AttendLatentRowsParams, attend, 0);
KV_AT(AttendLatentRowsParams, box_rows, 208);
KV_AT(AttendLatentRowsParams, rows, 256);

// The decode plan: DecodeWork[ceil(gridDim.x / stripes)].
//
// A unit is DECODE_UNIT tokens of one kv head of one sequence. Stripe s of the kv heads has heads s, s + stripes, s + 2 *
// stripes and so on. In each stripe the units are numbered by (sequence, head, tokens) and cut into equal work chunks. CTA c
// works on chunk c / stripes of stripe c % stripes. CTAs of different stripes thus read neighbouring heads of the same tokens
// at about the same time, and share one DecodeWork.
//
// The extend kernel takes sequences with more query rows (extend_len * group) than the decode kernel's 8, 16 or 64. It
// also takes trees, unless the decode kernel is attend_decode_*_r64_sm90a. Sequences of the extend kernel, or without
// query rows, have no units.
//
// The last DECODE_EXTRA units of a head have no tokens: they represent the fixed cost of a sequence. Over fp8, whose units take
// half the time, there are twice as many, except in attend_shared_fp8_*.
#define DECODE_UNIT 16
#define DECODE_EXTRA 6
#define DECODE_EXTRA_FP8 12
struct DecodeWork {
    u32 work_units;     // units of a work chunk, the same for all: chunk i begins at unit i * work_units
    u32 unit_end;       // end of the chunk's units; not above the chunk's begin if it has no units
    u32 batch_index;    // sequence of its first unit
    u32 unit_start;     // that sequence's first unit
    u32 row;            // batch_rows[batch_index].row, which saves a load before the first tokens
    u32 qo_start;
    u32 extend_len;
    u32 kv_len;
};
KV_SIZE(DecodeWork, 32);
KV_AT(DecodeWork, work_units, 0);
KV_AT(DecodeWork, unit_end, 4);
KV_AT(DecodeWork, batch_index, 8);
KV_AT(DecodeWork, unit_start, 12);
KV_AT(DecodeWork, row, 16);
KV_AT(DecodeWork, qo_start, 20);
KV_AT(DecodeWork, extend_len, 24);
KV_AT(DecodeWork, kv_len, 28);

// The extend plan: ExtendHead, then ExtendWork[work_count], roughly longest first. An item is one ExtendWork of one kv
// head: item i is work i / kv_heads, head i % kv_heads. CTAs take items in order; the first item of a CTA has the CTA's
// number.
struct ExtendHead {
    u32 work_count;
    u32 reserved[3];  // 0
};
KV_SIZE(ExtendHead, 16);
KV_AT(ExtendHead, work_count, 0);

struct ExtendWork {
    u32 row;         // as in BatchRow
    u32 qo_start;    // first query row of the sequence
    u32 extend_len;
    u32 kv_len;
    u32 q_begin;     // first packed query row: packed row r is query r / group, head r % group of the kv head's group
    u32 kv_begin;    // positions this item reads
    u32 kv_end;
    u32 part;        // slot << 16 | index << 8 | parts: part `index` of `parts`, which share slots slot..slot + parts
};
KV_SIZE(ExtendWork, 32);
KV_AT(ExtendWork, row, 0);
KV_AT(ExtendWork, qo_start, 4);
KV_AT(ExtendWork, extend_len, 8);
KV_AT(ExtendWork, kv_len, 12);
KV_AT(ExtendWork, q_begin, 16);
KV_AT(ExtendWork, kv_begin, 20);
KV_AT(ExtendWork, kv_end, 24);
KV_AT(ExtendWork, part, 28);

// ---- attention that reads shared spans once: attend_shared_* ------------------------------------------------------------
//
// The last `span_ctas` of gridDim.x CTAs work on the items of spans, as products of gathered query rows. The other CTAs
// work on suffixes: the tokens of each row after its spans. They follow attend_decode_*, with one work chunk for each
// warp. If a (row, kv head) has several parts, the kernel counts them, and the last part to arrive joins all of them.
//
// A query tile has up to 128 query rows of a span's members, which see the whole span. It has one tile for each
// 128 tokens of the span. The tiles of all query tiles, head by head, are divided into equal shares: CTA c for spans
// has tiles c * work_tiles.. (c + 1) * work_tiles, and one item for each query tile of these tiles. Extra tiles after
// each query tile represent the fixed cost of an item.

// The plan: SharedHead, then DecodeWork[ceil(decode_warps / stripes)].
struct SharedHead {
    u32 decode_warps;   // warps that work on suffixes: those of each CTA without span items (column `suffixes`)
    u32 work_units;     // as in DecodeWork
    u32 span_ctas;
    u32 work_tiles;     // tiles of a CTA
    u32 head_tiles;     // tiles of all query tiles of one kv head, including the extra ones
    u32 head_rows;      // query rows of all query tiles of one kv head
    u32 reserved[2];
};
KV_SIZE(SharedHead, 32);
KV_AT(SharedHead, decode_warps, 0);
KV_AT(SharedHead, work_units, 4);
KV_AT(SharedHead, span_ctas, 8);
KV_AT(SharedHead, work_tiles, 12);
KV_AT(SharedHead, head_tiles, 16);
KV_AT(SharedHead, head_rows, 20);

// The spans of a row of the batch, and the place of its own units.
struct RowShare {
    u32 begin;       // first position after its spans
    u32 place;       // place of its first new token among the members
    u32 span;        // its deepest span
    u32 depth;       // number of its spans
    u32 start;       // its first unit in each stripe
    u32 units;       // number of its units of one head
    u32 qo_start;    // its first query row
    u32 extend_len;  // number of its new tokens; 0 if the extend kernel takes it
};
KV_SIZE(RowShare, 32);
KV_AT(RowShare, begin, 0);
KV_AT(RowShare, place, 4);
KV_AT(RowShare, span, 8);
KV_AT(RowShare, depth, 12);
KV_AT(RowShare, start, 16);
KV_AT(RowShare, units, 20);
KV_AT(RowShare, qo_start, 24);
KV_AT(RowShare, extend_len, 28);

// A query tile has up to ROWS query rows (column `rows` of kernels.toml). The part of CTA c is at row 2 * c * ROWS of the spans'
// sums, or ROWS later if it is the first part. A whole sum of one CTA is at row 2 * span_ctas * ROWS + head * head_rows + the query
// rows of earlier query tiles.
// Marks the absence of a span.
#define NO_SPAN 0xffffffffu
// Maximum number of (row, kv head)s: LISTED_SUMS of a step, LISTED_SUFFIXES of a stripe.
#define LISTED_SUMS 4096
#define LISTED_SUFFIXES 512
struct SpanParts {
    u32 tile_at;       // number of its first query tile's first tile among the tiles of one kv head
    u32 tiles;         // tiles of one of its query tiles
    u32 member_start;  // place of its first member
    u32 member_count;
    u32 parent;        // its parent span, or NO_SPAN
    u32 row_at;        // query rows of earlier query tiles
    u32 stride;        // tiles from one of its query tiles to the next, including the extra ones
    u32 reserved;
};
KV_SIZE(SpanParts, 32);
KV_AT(SpanParts, tile_at, 0);
KV_AT(SpanParts, tiles, 4);
KV_AT(SpanParts, member_start, 8);
KV_AT(SpanParts, member_count, 12);
KV_AT(SpanParts, parent, 16);
KV_AT(SpanParts, row_at, 20);
KV_AT(SpanParts, stride, 24);

// A barrier of the CTAs that write parts of one query tile's sum. After it, each of these CTAs joins some of the tile's members.
// The barrier has the index of the first of these CTAs.
struct SpanMeeting {
    u64 state;  // number of parts that have arrived; bit 16 + piece: the CTA of this piece no longer waits for the others
    u32 left;   // number of CTAs that no longer poll
    u32 reserved;
};
KV_SIZE(SpanMeeting, 16);
KV_AT(SpanMeeting, state, 0);
KV_AT(SpanMeeting, left, 8);

// Tiles of one query tile: of a span, or of a row's own tokens if it has more query rows than fit a suffix. CTA c's first item
// has index c.
struct SpanItem {
    u32 row;           // page table row
    u32 member_start;  // place of the query tile's first member
    u16 head;
    u16 parts;         // number of items of the query tile, each of another CTA
    u16 next;          // index of the CTA's next item; 0: there is none
    u16 piece;         // index among the query tile's items: if CTA c has this item, CTA c - piece has the first one
    u16 member_count;
    u16 behind;        // for a row's own tokens, 1 + number of tokens from kv_end on, at most 65535; 0: members see all tokens
    u32 kv_begin;
    u32 kv_end;
    u32 part;          // first row of its sums among the spans' sums
};
KV_SIZE(SpanItem, 32);
KV_AT(SpanItem, row, 0);
KV_AT(SpanItem, member_start, 4);
KV_AT(SpanItem, head, 8);
KV_AT(SpanItem, parts, 10);
KV_AT(SpanItem, next, 12);
KV_AT(SpanItem, piece, 14);
KV_AT(SpanItem, member_count, 16);
KV_AT(SpanItem, behind, 18);
KV_AT(SpanItem, kv_begin, 20);
KV_AT(SpanItem, kv_end, 24);
KV_AT(SpanItem, part, 28);

// A member of spans: one new token of a row. The new tokens of a row are consecutive.
struct SpanMember {
    u32 qo_start;     // its query row
    u32 batch_index;
};
KV_SIZE(SpanMember, 8);
KV_AT(SpanMember, qo_start, 0);
KV_AT(SpanMember, batch_index, 4);

struct AttendSharedParams {
    AttendParams attend;  // partial: f32 [2 * decode_warps + batch * kv_heads, rows, head_dim]; counters: u32 [batch, kv_heads]
    u64 shares;           // RowShare[batch]
    u64 spans;            // SpanParts[..]
    u64 items;            // SpanItem[..]
    u64 members;          // SpanMember[..]
    u64 meetings;         // SpanMeeting[span_ctas], zero between launches
    u64 tops;             // f32 [as partial, rows, 2]
    u64 span_partial;     // f32 [.., head_dim]
    u64 span_tops;        // f32 [.., 2]
};
KV_SIZE(AttendSharedParams, 272);
KV_AT(AttendSharedParams, attend, 0);
KV_AT(AttendSharedParams, shares, 208);
KV_AT(AttendSharedParams, spans, 216);
KV_AT(AttendSharedParams, items, 224);
KV_AT(AttendSharedParams, members, 232);
KV_AT(AttendSharedParams, meetings, 240);
KV_AT(AttendSharedParams, tops, 248);
KV_AT(AttendSharedParams, span_partial, 256);
KV_AT(AttendSharedParams, span_tops, 264);

// The same over fp8: attend_shared_fp8_*.
struct AttendSharedFp8Params {
    AttendSharedParams shared;
    LayerScales scales;
};
KV_SIZE(AttendSharedFp8Params, 304);
KV_AT(AttendSharedFp8Params, shared, 0);
KV_AT(AttendSharedFp8Params, scales, 272);

// ---- sparse reads: store_labels, score_labels_*, select_top, resolve_selection, attend_selected_* -------------------------

// Number of tokens of a chunk of keys.
#define SCORE_TOKENS 256

struct StoreLabelsParams {
    u64 k;             // rows to store: [tokens, kv_heads, head_dim] of 16 bits, k_stride bytes apart
    u64 slots;         // i32 or i64 [tokens]; nothing is written for a negative slot
    u64 channels;      // u32 [kv_heads, channel_count] of this layer
    u64 labels;        // of this layer: page p, slot s, head h at labels + p * page_stride + s * slot_stride + h * head_stride
    u64 page_stride;   // bytes
    u64 slot_stride;   // bytes
    u64 head_stride;   // bytes
    u64 k_stride;      // bytes
    u64 page_magic;    // slot / page_size is the high half of slot * page_magic, unless page_size is 1
    u32 page_size;     // slots of a page
    u32 tokens;
    u32 kv_heads;
    u32 head_dim;
    u32 channel_count;
    u32 slot_bytes;    // 4 or 8
};
KV_SIZE(StoreLabelsParams, 96);
KV_AT(StoreLabelsParams, k, 0);
KV_AT(StoreLabelsParams, slots, 8);
KV_AT(StoreLabelsParams, channels, 16);
KV_AT(StoreLabelsParams, labels, 24);
KV_AT(StoreLabelsParams, page_stride, 32);
KV_AT(StoreLabelsParams, slot_stride, 40);
KV_AT(StoreLabelsParams, head_stride, 48);
KV_AT(StoreLabelsParams, k_stride, 56);
KV_AT(StoreLabelsParams, page_magic, 64);
KV_AT(StoreLabelsParams, page_size, 72);
KV_AT(StoreLabelsParams, tokens, 76);
KV_AT(StoreLabelsParams, kv_heads, 80);
KV_AT(StoreLabelsParams, head_dim, 84);
KV_AT(StoreLabelsParams, channel_count, 88);
KV_AT(StoreLabelsParams, slot_bytes, 92);

// Parameters of score_labels_*, select_top and resolve_selection. A batch row has lists if it has one query row and is not a
// tree. Its scores begin at key chunk starts[b]. The keys of head h begin at index (starts[b] * kv_heads + h * (starts[b + 1] -
// starts[b])) * SCORE_TOKENS, one for each position; they have the order of the scores.
struct SelectParams {
    AttendParams attend;  // q, tables, batch and window are used; score_labels_*: k is this layer's labels, with their strides
    u64 channels;         // u32 [kv_heads, channel_count] of this layer
    u64 starts;           // u32 [batch + 1]: number of chunks of SCORE_TOKENS positions in the rows with lists before each row, then in all
    u64 keys;             // u32 [key_chunks, kv_heads, SCORE_TOKENS]
    u64 positions;        // u32 [batch, kv_heads, top]: ascending, then NO_POSITION
    u64 listed;           // u32 [batch, kv_heads, top]: slots of the positions that a row sees, then NO_POSITION
    u64 counts;           // u32 [batch, kv_heads]: number of these slots
    u64 gathered;         // [batch * kv_heads, CANDIDATES] (key, position) of u32, for lists that several CTAs of select_top share
    u64 gather_counters;  // u32 [batch * kv_heads, 2]: zero between launches
    u32 channel_count;
    u32 head_dim;
    u32 top;
    u32 key_chunks;
};
#define NO_POSITION 4294967295
// Maximum number of candidate keys of a list.
#define CANDIDATES 4096
KV_SIZE(SelectParams, 288);
KV_AT(SelectParams, attend, 0);
KV_AT(SelectParams, channels, 208);
KV_AT(SelectParams, starts, 216);
KV_AT(SelectParams, keys, 224);
KV_AT(SelectParams, positions, 232);
KV_AT(SelectParams, listed, 240);
KV_AT(SelectParams, counts, 248);
KV_AT(SelectParams, gathered, 256);
KV_AT(SelectParams, gather_counters, 264);
KV_AT(SelectParams, channel_count, 272);
KV_AT(SelectParams, head_dim, 276);
KV_AT(SelectParams, top, 280);
KV_AT(SelectParams, key_chunks, 284);

// Lists of slots, the output of resolve_selection.
struct Lists {
    u64 listed;      // as in SelectParams
    u64 counts;
    u64 page_magic;  // slot / page_size is the high half of slot * page_magic, unless page_size is 1
    u32 top;
    u32 reserved;    // 0
};
KV_SIZE(Lists, 32);
KV_AT(Lists, listed, 0);
KV_AT(Lists, counts, 8);
KV_AT(Lists, page_magic, 16);
KV_AT(Lists, top, 24);
KV_AT(Lists, reserved, 28);

// attend_selected_*: decode over lists. The tokens of a row are the entries of its lists: kv_len of batch_rows is the
// length of the row's longest list. A row without lists has 0 query rows.
struct AttendSelectedParams {
    AttendParams attend;  // window 0
    Lists lists;
};
KV_SIZE(AttendSelectedParams, 240);
KV_AT(AttendSelectedParams, attend, 0);
KV_AT(AttendSelectedParams, lists, 208);

// ---- latent rows: attend_latent_* ----------------------------------------------------------------------------------------
//
// latent_plan.cuh describes the plan: its items are ExtendWork of up to 16, 32, 64 or 128 packed query rows, with `part`
// as in the extend plan. The plan of the join: number of records, maximum rows of a record, maximum parts of a record,
// rows of `partial` from one part of a record to the next, then the records:
struct LatentJoin {
    u32 qo_start;
    u32 q_begin;
    u32 rows;  // packed query rows of the sequence
    u32 part;  // slot << 16 | parts
};
KV_SIZE(LatentJoin, 16);
KV_AT(LatentJoin, qo_start, 0);
KV_AT(LatentJoin, q_begin, 4);
KV_AT(LatentJoin, rows, 8);
KV_AT(LatentJoin, part, 12);
