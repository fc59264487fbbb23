// Parameters of the kernels of attention, by value, one struct each; those that move bytes have theirs in move_params.cuh. The Rust
// mirror is src/backend/cuda/kernels/params.rs and its folder; both sides assert the same sizes and offsets, and `ptx/build.py --check`
// compares the two lists of numbers.
//
// No padding, no bool; device addresses and byte strides are u64, everything else is 32-bit.
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

// One sequence of a step (src/plan/mod.rs BatchRow).
#define TREE_ROW 0x80000000u  // beside `row`, here and in ExtendWork: a tree of drafts, which has masks
struct BatchRow {
    u32 row;         // its row in the page tables, | TREE_ROW
    u32 qo_start;    // first of its query rows
    u32 extend_len;  // its query rows; row qo_start + i stands at position kv_len - extend_len + i
    u32 kv_len;      // tokens with K and V; 0 marks padding: out 0, lse -inf
};
KV_SIZE(BatchRow, 16);
KV_AT(BatchRow, row, 0);
KV_AT(BatchRow, qo_start, 4);
KV_AT(BatchRow, extend_len, 8);
KV_AT(BatchRow, kv_len, 12);

// What attend_decode_* keeps in one word of a token: its slot in the page, its head.
#define PAGE_TOKENS_MAX 1024
#define KV_HEADS_MAX 65535

// Attention: the kernels attend_decode_*, attend_extend_*, attend_f32, attend_latent_* and attend_latent_join_* take the same struct;
// others have it in front of their own (over fp8, shared spans, sparse reads).
struct AttendParams {
    u64 q;              // [tokens, q_heads, head_dim], rows q_stride apart, 16-byte aligned
    u64 out;            // [tokens, q_heads, head_dim], rows out_stride apart, 16-byte aligned
    u64 lse;            // f32 [tokens, q_heads], natural logarithm; 0: none
    u64 k;              // this layer's K: page p, slot s, head h at k + p * page_stride + s * slot_stride + h * head_stride
    u64 v;              // this layer's V, same strides
    u64 page_stride;    // bytes
    u64 slot_stride;    // bytes
    u64 head_stride;    // bytes
    u64 q_stride;       // bytes from one token's q to the next
    u64 out_stride;     // bytes from one token's out to the next
    u64 table;          // u32: directories [rows, chunks_per_row], then chunks [.., chunk_pages]
    u64 batch_rows;     // BatchRow[batch]
    u64 plan;           // u32: the planner's words for this kernel (src/backend/cuda/attention/split/), 16-byte aligned
    u64 partial;        // f32 scratch for split sums, 16-byte aligned
    u64 counters;       // u32, zero before the first launch; each launch leaves them zero. attend_latent_* of 16 bits and their join:
                        // f32 [slots, rows, 2]: what each row of a part is relative to, and the sum of its weights
    u64 page_magic;     // ceil(2^32 / page_size): position / page_size == position * page_magic >> 32
    u64 chunk_magic;    // ceil(2^32 / chunk_pages)
    u32 page_size;      // tokens of a page, 1..=PAGE_TOKENS_MAX
    u32 chunk_pages;    // pages of a chunk
    u32 chunks_per_row; // words of one row's directory
    u32 chunk_base;     // words of all directories: rows * chunks_per_row
    u32 q_heads;
    u32 kv_heads;       // attend_decode_*: at most KV_HEADS_MAX
    u32 group;          // q_heads / kv_heads, 1..=16, of latent rows 1..=128
    u32 batch;          // batch rows, padding included
    u32 window;         // sliding window: a query at p sees positions above p - window; 0: none
    float scale;        // factor of the logits
    float soft_cap;     // logits become soft_cap * tanh(logits / soft_cap); 0: none
    u32 negate_q;       // attend_extend_* only: 1: q is negated, and `scale` with it; it must be above 0 there
    u32 stripes;        // attend_decode_* only: stripes of kv heads
    u32 reserved;       // 0
    u64 sinks;          // f32 [q_heads], -inf: none; 0: no head has one
    u64 masks;          // u64 [tokens], of trees alone: bit i: the query sees slot kv_len - 1 - i; it sees those before the last 64
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
KV_AT(AttendParams, chunk_magic, 128);
KV_AT(AttendParams, page_size, 136);
KV_AT(AttendParams, chunk_pages, 140);
KV_AT(AttendParams, chunks_per_row, 144);
KV_AT(AttendParams, chunk_base, 148);
KV_AT(AttendParams, q_heads, 152);
KV_AT(AttendParams, kv_heads, 156);
KV_AT(AttendParams, group, 160);
KV_AT(AttendParams, batch, 164);
KV_AT(AttendParams, window, 168);
KV_AT(AttendParams, scale, 172);
KV_AT(AttendParams, soft_cap, 176);
KV_AT(AttendParams, negate_q, 180);
KV_AT(AttendParams, stripes, 184);
KV_AT(AttendParams, reserved, 188);
KV_AT(AttendParams, sinks, 192);
KV_AT(AttendParams, masks, 200);

// Where the scales of one layer of fp8 are.
struct LayerScales {
    u64 k;            // f32: head h's at k + h * head_stride; by token that of page p, slot s at + p * page_stride + s * 4
    u64 v;            // the same of V
    u64 page_stride;  // bytes
    u32 head_stride;  // bytes
    u32 by_token;     // 1: each token has a scale of its own
};
KV_SIZE(LayerScales, 32);
KV_AT(LayerScales, k, 0);
KV_AT(LayerScales, v, 8);
KV_AT(LayerScales, page_stride, 16);
KV_AT(LayerScales, head_stride, 24);
KV_AT(LayerScales, by_token, 28);

// Attention over fp8: attend_decode_fp8_*, attend_extend_fp8_* and attend_fp8_f32. K and V are bytes, and so are their strides.
struct AttendFp8Params {
    AttendParams attend;
    LayerScales scales;
};
KV_SIZE(AttendFp8Params, 240);
KV_AT(AttendFp8Params, attend, 0);
KV_AT(AttendFp8Params, scales, 208);

// Where what is not quantised of one layer's latent rows of fp8 is.
struct LayerRope {
    u64 at;           // bf16 [elements]: of page p, slot s at + p * page_stride + s * slot_stride
    u64 page_stride;  // bytes
    u32 slot_stride;  // bytes
    u32 elements;
};
KV_SIZE(LayerRope, 24);
KV_AT(LayerRope, at, 0);
KV_AT(LayerRope, page_stride, 8);
KV_AT(LayerRope, slot_stride, 16);
KV_AT(LayerRope, elements, 20);

// Attention over latent rows of fp8: attend_latent_fp8_*. K's bytes are V's too, and so are K's scales.
struct AttendLatentFp8Params {
    AttendParams attend;
    LayerScales scales;
    LayerRope rope;
};
KV_SIZE(AttendLatentFp8Params, 264);
KV_AT(AttendLatentFp8Params, attend, 0);
KV_AT(AttendLatentFp8Params, scales, 208);
KV_AT(AttendLatentFp8Params, rope, 240);

// Attention over latent rows of 16 bits: attend_latent_*_sm90a. `rows` is what cuTensorMapEncodeTiled makes of the layer's rows as [pages,
// slots, 576], in boxes of [1, box_rows, 64], swizzled by 128 bytes.
struct alignas(64) TensorMap {
    u64 words[16];
};
struct AttendLatentRowsParams {
    AttendParams attend;
    u32 box_rows;  // a power of two up to 32 of which a page has a multiple; 0: there is no map
    u32 reserved[11];
    TensorMap rows;
};
KV_SIZE(AttendLatentRowsParams, 384);
KV_AT(AttendLatentRowsParams, attend, 0);
KV_AT(AttendLatentRowsParams, box_rows, 208);
KV_AT(AttendLatentRowsParams, rows, 256);

// The decode plan: DecodeWork[ceil(gridDim.x / stripes)].
//
// A unit is DECODE_UNIT tokens of one kv head of one sequence. The kv heads are striped: stripe s has heads s, s + stripes,
// s + 2 * stripes, .. In each stripe the units are numbered by (sequence, head, tokens) and cut into equal work chunks; CTA c works
// on chunk c / stripes of stripe c % stripes. So CTAs of different stripes read neighbouring heads of the same tokens at about the
// same time, and one DecodeWork serves them all.
//
// A sequence of more query rows (extend_len * group) than the kernel takes (8, 16 or 64) has no units: it belongs to the extend kernel,
// and so does a tree, which attend_decode_*_r64_sm90a alone serves here; one without query rows has none either.
//
// The last DECODE_EXTRA units of a head have no tokens: they stand for what a sequence costs beside its tokens. That is as long over
// fp8, whose units take half the time.
#define DECODE_UNIT 16
#define DECODE_EXTRA 6
#define DECODE_EXTRA_FP8 12
struct DecodeWork {
    u32 work_units;     // of a work chunk, the same for all: chunk i begins at unit i * work_units
    u32 unit_end;       // not above its begin where it has no units
    u32 batch_index;    // sequence of its first unit
    u32 unit_start;     // that sequence's first unit
    u32 row;            // batch_rows[batch_index], so that the first tokens are found with one load less
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

// The extend plan: ExtendHead, then ExtendWork[work_count], the longest about first. An item is one ExtendWork of one kv head;
// item i is work i / kv_heads, head i % kv_heads. CTAs take items in order; the first gridDim.x by their own number.
struct ExtendHead {
    u32 work_count;
    u32 reserved[3];  // 0
};
KV_SIZE(ExtendHead, 16);
KV_AT(ExtendHead, work_count, 0);

struct ExtendWork {
    u32 row;         // row in the page tables, | TREE_ROW
    u32 qo_start;    // first query row of the sequence
    u32 extend_len;
    u32 kv_len;
    u32 q_begin;     // first packed query row: packed row r is query r / group, head r % group of the kv head's group
    u32 kv_begin;    // positions this item reads
    u32 kv_end;
    u32 part;        // slot << 16 | index << 8 | parts: this is part `index` of `parts`, which share slots slot..slot + parts
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
// Of gridDim.x CTAs the last `span_ctas` work on the spans' items, products of gathered query rows; the others on what each row has
// behind its spans, as attend_decode_* does, a work chunk a warp. Sums of a (row, kv head) in several parts meet by a counter: the last
// part to arrive joins all of them.
//
// A query tile is up to SPAN_ROWS query rows of a span's members, which see all of it: as many tiles as it has 128 tokens. All query
// tiles' tiles, head by head, are dealt in equal shares: CTA c for spans has tiles c * work_tiles.. (c + 1) * work_tiles, and an item for
// each query tile that these lie in. What an item takes beside its tiles counts as some behind each query tile.

// The plan: SharedHead, then DecodeWork[ceil(decode_warps / stripes)].
struct SharedHead {
    u32 decode_warps;   // TAIL_WARPS of each other CTA, or as many as its kernel has
    u32 work_units;     // as in DecodeWork
    u32 span_ctas;
    u32 work_tiles;     // of a CTA
    u32 head_tiles;     // of all query tiles, and between them, of one kv head
    u32 head_rows;      // query rows of all query tiles, of one kv head
    u32 reserved[2];
};
KV_SIZE(SharedHead, 32);
KV_AT(SharedHead, decode_warps, 0);
KV_AT(SharedHead, work_units, 4);
KV_AT(SharedHead, span_ctas, 8);
KV_AT(SharedHead, work_tiles, 12);
KV_AT(SharedHead, head_tiles, 16);
KV_AT(SharedHead, head_rows, 20);

// What a row of the batch takes from spans, and where its own units are.
struct RowShare {
    u32 begin;       // first position behind its spans
    u32 place;       // its first new token's place among the members
    u32 span;        // the last of its spans
    u32 depth;       // its spans
    u32 start;       // first of its units in each stripe
    u32 units;       // its units of one head
    u32 qo_start;    // its first query row
    u32 extend_len;  // its new tokens
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

// Query rows of a query tile, at most. The part that CTA c has of its sum stands at row (2 * c + whether it is the first) * SPAN_ROWS of
// the spans' sums; where one CTA has all of it, at row 2 * span_ctas * SPAN_ROWS + head * head_rows + the query rows of those before it.
#define SPAN_ROWS 128
// The place of no span.
#define NO_SPAN 0xffffffffu
// The same of head_dim 256.
#define SPAN_ROWS_256 64
// Most (row, kv head)s of a step, and of a stripe.
#define LISTED_SUMS 4096
#define LISTED_TAILS 512
#define TAIL_WARPS 8
// The same of the kernels for any device, and of those for head_dim 256.
#define TAIL_WARPS_ANY 4
#define TAIL_WARPS_256 2
struct SpanParts {
    u32 tile_at;       // the first tile of its first query tile, of each kv head
    u32 tiles;         // of one of its query tiles
    u32 member_start;  // its first member's place
    u32 member_count;
    u32 parent;        // the span before it on the way to the root, where there is one
    u32 row_at;        // query rows of query tiles before it
    u32 stride;        // tiles from one of its query tiles to the next: those between count as work
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

// Where the CTAs that have parts of one query tile's sum meet, so that each joins some of its rows; the first of them names it.
struct SpanMeeting {
    u64 state;  // parts that are there; from bit 16 on, by piece, those whose CTAs have ceased to wait for the others
    u32 left;   // CTAs that look no more
    u32 reserved;
};
KV_SIZE(SpanMeeting, 16);
KV_AT(SpanMeeting, state, 0);
KV_AT(SpanMeeting, left, 8);

// Tiles of one query tile: of a span, or of a row's own tokens, where it has more query rows than a tail has room for. CTA c's first stands at place c.
struct SpanItem {
    u32 row;           // of the page tables
    u32 member_start;  // the query tile's first member's place
    u16 head;
    u16 parts;         // items of the query tile, each of another CTA
    u16 next;          // the CTA's next item's place; 0: there is none
    u16 piece;         // which of them it is: CTA c's is of the CTAs from c - piece on
    u16 member_count;
    u16 behind;        // of a row's own tokens: one more than there are behind kv_end, or 65535; 0: members see all
    u32 kv_begin;
    u32 kv_end;
    u32 part;          // row of the spans' sums where its own stand
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

// A member of spans: one of a row's new tokens, which stand side by side.
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

// Tokens of a chunk of keys.
#define SCORE_TOKENS 256

struct StoreLabelsParams {
    u64 k;             // rows to store: [tokens, kv_heads, head_dim] of 16 bits, k_stride bytes apart
    u64 slots;         // i32 or i64 [tokens]; negative: nothing is written
    u64 channels;      // u32 [kv_heads, channel_count]: this layer's
    u64 labels;        // this layer's: page p, slot s, head h at labels + p * page_stride + s * slot_stride + h * head_stride
    u64 page_stride;   // bytes
    u64 slot_stride;   // bytes
    u64 head_stride;   // bytes
    u64 k_stride;      // bytes
    u64 page_magic;    // slot / page_size is the high half of slot * page_magic, where page_size is not 1
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

// What score_labels_*, select_top and resolve_selection take. A batch row has lists if it has one query row and is no tree. Its
// scores begin at key chunk starts[b]: those of head h at keys + ((starts[b] * kv_heads + h * (starts[b + 1] - starts[b])) * SCORE_TOKENS,
// one for each position, greater where the score is.
struct SelectParams {
    AttendParams attend;  // its q, tables, batch and window; k: this layer's labels, with their strides
    u64 channels;         // u32 [kv_heads, channel_count]: this layer's
    u64 starts;           // u32 [batch + 1]: chunks of SCORE_TOKENS positions of the rows with lists, before each row and in all
    u64 keys;             // u32 [key_chunks, kv_heads, SCORE_TOKENS]
    u64 positions;        // u32 [batch, kv_heads, top]: ascending, NO_POSITION behind the last
    u64 listed;           // u32 [batch, kv_heads, top]: slots of the positions that a row sees, NO_POSITION behind the last
    u64 counts;           // u32 [batch, kv_heads]: how many
    u64 gathered;         // [batch * kv_heads, CANDIDATES] (key, position) of u32, where lists have several CTAs of select_top
    u64 gather_counters;  // u32 [batch * kv_heads, 2]: 0 before and after
    u32 channel_count;
    u32 head_dim;
    u32 top;
    u32 key_chunks;
};
#define NO_POSITION 4294967295
// Keys of a list that may be wanted, at most.
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

// Lists of slots, as resolve_selection makes them.
struct Lists {
    u64 listed;      // as in SelectParams
    u64 counts;
    u64 page_magic;  // slot / page_size is the high half of slot * page_magic, where page_size is not 1
    u32 top;
    u32 reserved;    // 0
};
KV_SIZE(Lists, 32);
KV_AT(Lists, listed, 0);
KV_AT(Lists, counts, 8);
KV_AT(Lists, page_magic, 16);
KV_AT(Lists, top, 24);
KV_AT(Lists, reserved, 28);

// attend_selected_*: decode over lists. A row's tokens are places in its lists: kv_len of batch_rows is the most that one has, and
// 0 query rows mean that it has none.
struct AttendSelectedParams {
    AttendParams attend;  // window 0
    Lists lists;
};
KV_SIZE(AttendSelectedParams, 240);
KV_AT(AttendSelectedParams, attend, 0);
KV_AT(AttendSelectedParams, lists, 208);

// ---- latent rows: attend_latent_* ----------------------------------------------------------------------------------------
//
// The plan stands in latent_plan.cuh: its items are ExtendWork of up to 16, 32 or 64 packed query rows, with `part` as in the extend plan.
// That of the join: its number of records, the most rows and the most parts of one, rows from a part's slot to the next, then

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
