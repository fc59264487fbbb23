//! Parameters of the attention kernels: the counterpart of `ptx/src/common/params.cuh`. `params/moves.rs` has those of
//! the kernels that move bytes.
//!
//! Every struct is passed or uploaded as its bytes. Both sides assert sizes and offsets, and `ptx/build.py --check`
//! compares both lists.

use bytemuck::{Pod, Zeroable};
use core::mem::{offset_of, size_of};

mod latent;
mod moves;
mod sparse;

pub use latent::{LatentHead, LatentJoin, LayerRope, RowBoxes, StoreLatentFp8Params, TensorMap};
pub use moves::{
    COMPACTIONS_MAX, COPY_PAGES_MAX, CompactSlotsParams, CopyPagesParams, LoadPlanParams, ROWS_BF16, ROWS_F16,
    ROWS_F32, RopeStoreParams, StoreCacheParams, StoreFp8Params,
};
pub use sparse::{CANDIDATES, Lists, SCORE_TOKENS, SelectParams, StoreLabelsParams};

use crate::layout::PAGE_SIZE_MAX;
use crate::plan::BatchRow;

/// Maximum number of tokens of a page: `attend_decode_*` stores a slot of a page in ten bits of a word.
pub const PAGE_TOKENS_MAX: u32 = 1024;

/// Maximum number of kv heads for 16-bit rows, also over fp8: `attend_decode_*` stores a head in 16 bits of a word.
pub const KV_HEADS_MAX: u32 = 65535;

const _: () = assert!(PAGE_SIZE_MAX <= PAGE_TOKENS_MAX, "attend_decode.cuh has no bits for the slot");

/// The parameters of all attention kernels except `attend_shared_*`, by value. [`AttendSharedParams`] and
/// [`SelectParams`] begin with it.
#[derive(Clone, Copy, PartialEq, Debug, Default, Pod, Zeroable)]
#[repr(C)]
pub struct AttendParams {
    /// Device address of `[tokens, q_heads, head_dim]`, rows `q_stride` apart, 16-byte aligned (f32: 4-byte).
    pub q: u64,
    /// Device address of the output, same shape (over latent rows `[.., 512]`), rows `out_stride` apart, aligned like
    /// q.
    pub out: u64,
    /// Device address of f32 `[tokens, q_heads]` for the log-sum-exp, natural logarithm; 0: none.
    pub lse: u64,
    /// Device address of this layer's K: page p, slot s, head h at
    /// `k + p * page_stride + s * slot_stride + h * head_stride`.
    pub k: u64,
    /// Device address of this layer's V, same strides.
    pub v: u64,
    /// Bytes from page to page.
    pub page_stride: u64,
    /// Bytes from slot to slot.
    pub slot_stride: u64,
    /// Bytes from kv head to kv head.
    pub head_stride: u64,
    /// Bytes from one token's q to the next.
    pub q_stride: u64,
    /// Bytes from one token's output to the next.
    pub out_stride: u64,
    /// Device address of the page tables: directories `[rows, chunks_per_row]`, then chunks.
    pub table: u64,
    /// Device address of `BatchRow[batch]`.
    pub batch_rows: u64,
    /// Device address of the planner's words for this kernel, 16-byte aligned.
    pub plan: u64,
    /// Device address of f32 scratch for partial sums, 16-byte aligned.
    pub partial: u64,
    /// Device address of u32 counters: zero before the first launch; each launch leaves them zero. For
    /// `attend_latent_*` except `*_f32`, and for their join: device address of f32 `[slots, rows, 2]`. For each row of
    /// a part, these are the logit to which the weights are relative, and the sum of the weights.
    pub counters: u64,
    /// `ceil(2^32 / page_size)`: see [`magic`].
    pub page_magic: u64,
    /// `ceil(2^32 / chunk_pages)`: see [`magic`].
    pub chunk_magic: u64,
    /// Tokens of a page, 1 to [`PAGE_TOKENS_MAX`].
    pub page_size: u32,
    /// Pages of a chunk.
    pub chunk_pages: u32,
    /// Words of one row's directory.
    pub chunks_per_row: u32,
    /// Index of the track's first word in the first chunk. All directories, of `rows * chunks_per_row` words, precede
    /// it.
    pub chunk_base: u32,
    /// Query heads.
    pub q_heads: u32,
    /// K and V heads.
    pub kv_heads: u32,
    /// `q_heads / kv_heads`, at most `GROUP_MAX`; for latent rows up to 128.
    pub group: u32,
    /// Batch rows, padding included.
    pub batch: u32,
    /// Sliding window; 0: none.
    pub window: u32,
    /// Factor of the logits.
    pub scale: f32,
    /// Soft cap of the logits; 0: none.
    pub soft_cap: f32,
    /// `attend_extend_*` only. 1: the scale is negative, so the kernel negates q, and `scale` is the absolute value.
    pub negate_q: u32,
    /// Stripes of kv heads in the decode plan; CTA c, or warp c of suffixes in `attend_shared_*`, is in stripe `c %
    /// stripes`.
    pub stripes: u32,
    /// 0.
    pub reserved: u32,
    /// Device address of f32 `[q_heads]` (minus infinity: no sink); 0: no head has one.
    pub sinks: u64,
    /// Device address of u64 `[tokens]`, for trees only: see [`BatchPlan::masks`](crate::BatchPlan::masks).
    pub masks: u64,
}

/// Flag of a page table row in the staged rows and in [`ExtendWork`]: the sequence is a draft tree. These kernels
/// support trees: `attend_decode_*_r64_sm90a`, those over latent or f32 rows, and `attend_extend_*`. Exceptions are
/// `attend_extend_fp8_*_sm90a`.
pub const TREE_ROW: u32 = 1 << 31;

/// Returns whether a row is marked as a draft tree.
pub const fn is_tree(row: &BatchRow) -> bool {
    row.row.raw() >= TREE_ROW
}

/// The scales of one layer of a quantised pool; kernels over fp8 take this struct after their own.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Pod, Zeroable)]
#[repr(C)]
pub struct LayerScales {
    /// Device address of f32. The scale of head h is at `k + h * head_stride`. With scales by token, the scale of page
    /// p, slot s is another `p * page_stride + s * 4` bytes further.
    pub k: u64,
    /// Device address of the scales of V, like `k`.
    pub v: u64,
    /// Bytes from page to page.
    pub page_stride: u64,
    /// Bytes from head to head.
    pub head_stride: u32,
    /// 1: each token has its own scale.
    pub by_token: u32,
}

/// One work chunk of `attend_decode_*`, for a CTA in each stripe: see `ptx/src/common/params.cuh`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Pod, Zeroable)]
#[repr(C)]
pub struct DecodeWork {
    /// Units of a work chunk, the same for all: chunk `i` begins at unit `i * work_units`.
    pub work_units: u32,
    /// End of this chunk's units; equal to or below its start if the chunk has none.
    pub unit_end: u32,
    /// Batch index of the sequence that has the chunk's first unit.
    pub batch_index: u32,
    /// The first unit of that sequence.
    pub unit_start: u32,
    /// Row of that sequence in the page tables.
    pub row: u32,
    /// First query row of that sequence.
    pub qo_start: u32,
    /// Query rows of that sequence.
    pub extend_len: u32,
    /// Tokens of that sequence with K and V.
    pub kv_len: u32,
}

/// The extend plan's first words.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Pod, Zeroable)]
#[repr(C)]
pub struct ExtendHead {
    /// Items that follow.
    pub work_count: u32,
    /// 0.
    pub reserved: [u32; 3],
}

/// Queries and tokens of one item of `attend_extend_*` for each kv head, or of one item over latent rows.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Pod, Zeroable)]
#[repr(C)]
pub struct ExtendWork {
    /// The sequence's row in the page tables, plus [`TREE_ROW`] for a draft tree.
    pub row: u32,
    /// The sequence's first query row.
    pub qo_start: u32,
    /// The sequence's query rows.
    pub extend_len: u32,
    /// The sequence's tokens with K and V.
    pub kv_len: u32,
    /// First packed query row: packed row r is query `r / group`, head `r % group` of the kv head's group.
    pub q_begin: u32,
    /// First position to read.
    pub kv_begin: u32,
    /// End of the positions to read.
    pub kv_end: u32,
    /// `slot << 16 | index << 8 | parts`. The item is part `index` of `parts` parts, which use `parts` slots from
    /// `slot` on.
    pub part: u32,
}

/// Marks the absence of a span.
pub const NO_SPAN: u32 = u32::MAX;
/// Maximum number of (row, kv head)s of a step of `attend_shared_*`.
pub const LISTED_SUMS: u32 = 4096;
/// Maximum number of (row, kv head)s in a stripe.
pub const LISTED_SUFFIXES: u32 = 512;

/// The first words of the plan of `attend_shared_*`; `DecodeWork`s follow. See `ptx/src/common/params.cuh`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Pod, Zeroable)]
#[repr(C)]
pub struct SharedHead {
    /// Number of warps that work on suffixes, over all CTAs that do not work on spans.
    pub decode_warps: u32,
    /// See [`DecodeWork`].
    pub work_units: u32,
    /// Number of CTAs that work on spans.
    pub span_ctas: u32,
    /// Number of tiles of each CTA that works on spans.
    pub work_tiles: u32,
    /// Number of tiles of all query tiles of one kv head, including the extra tiles between query tiles.
    pub head_tiles: u32,
    /// Number of query rows of all query tiles of one kv head.
    pub head_rows: u32,
    /// 0.
    pub reserved: [u32; 2],
}

/// A row's spans, and its own units.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Pod, Zeroable)]
#[repr(C)]
pub struct RowShare {
    /// First position after its spans.
    pub begin: u32,
    /// Place of its first new token among the members.
    pub place: u32,
    /// Its deepest span.
    pub span: u32,
    /// Number of its spans.
    pub depth: u32,
    /// Its first unit in each stripe.
    pub start: u32,
    /// Number of its units of one head.
    pub units: u32,
    /// Its first query row.
    pub qo_start: u32,
    /// Number of its new tokens; 0 if the extend kernel takes it.
    pub extend_len: u32,
}

/// The places of a span's partial sums: see `ptx/src/common/params.cuh`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Pod, Zeroable)]
#[repr(C)]
pub struct SpanParts {
    /// Index of the span's first tile among the tiles of a kv head.
    pub tile_at: u32,
    /// Number of tiles of each of its query tiles.
    pub tiles: u32,
    /// Place of its first member.
    pub member_start: u32,
    /// Number of its members.
    pub member_count: u32,
    /// The span's parent, or [`NO_SPAN`].
    pub parent: u32,
    /// Number of query rows of earlier query tiles.
    pub row_at: u32,
    /// Number of tiles from the start of one of the span's query tiles to the start of the next. The extra tiles
    /// between them count as work.
    pub stride: u32,
    /// 0.
    pub reserved: u32,
}

/// A barrier of the CTAs that write parts of one query tile's sum: see `ptx/src/common/params.cuh`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(C)]
pub struct SpanMeeting {
    /// Number of parts that have arrived. Bit `16 + piece` is set if the CTA of this piece no longer waits.
    pub state: u64,
    /// Number of CTAs that no longer poll.
    pub left: u32,
    /// 0.
    pub reserved: u32,
}

/// Tiles of one query tile. The query tile belongs to a span or to a row's own tokens. A CTA's first item has the index
/// of the CTA.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Pod, Zeroable)]
#[repr(C)]
pub struct SpanItem {
    /// Page table row.
    pub row: u32,
    /// Place of the query tile's first member.
    pub member_start: u32,
    /// The kv head.
    pub head: u16,
    /// Number of items of the query tile. Each item belongs to a different CTA.
    pub parts: u16,
    /// Index of the CTA's next item; 0 for none.
    pub next: u16,
    /// Index among the items of the query tile.
    pub piece: u16,
    /// Number of members of the query tile.
    pub member_count: u16,
    /// For a row's own tokens, 1 + the number of the row's tokens from `kv_end` on, at most 65,535; 0 if members see
    /// all tokens.
    pub behind: u16,
    /// First position to read.
    pub kv_begin: u32,
    /// End of the positions to read.
    pub kv_end: u32,
    /// First row of its sums among the sums of spans.
    pub part: u32,
}

/// A member of spans: one new token of a row. The new tokens of a row are consecutive.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Pod, Zeroable)]
#[repr(C)]
pub struct SpanMember {
    /// Its query row.
    pub qo_start: u32,
    /// Its row in the batch.
    pub batch_index: u32,
}

/// The parameters of `attend_shared_*`, by value.
#[derive(Clone, Copy, PartialEq, Debug, Default, Pod, Zeroable)]
#[repr(C)]
pub struct AttendSharedParams {
    /// `plan`: [`SharedHead`]. `partial`: f32 `[2 * decode_warps + batch * kv_heads, rows, head_dim]`. `counters`: u32
    /// `[batch, kv_heads]`.
    pub attend: AttendParams,
    /// Device address of `RowShare[batch]`.
    pub shares: u64,
    /// Device address of `SpanParts[..]`.
    pub spans: u64,
    /// Device address of `SpanItem[..]`.
    pub items: u64,
    /// Device address of `SpanMember[..]`.
    pub members: u64,
    /// Device address of [`SpanMeeting`]s, one for each CTA that works on spans; zero between launches.
    pub meetings: u64,
    /// Device address of f32 `[2 * decode_warps + batch * kv_heads, rows, 2]`, in the order of `partial`.
    pub tops: u64,
    /// Device address of f32 `[.., head_dim]`.
    pub span_partial: u64,
    /// Device address of f32 `[.., 2]`.
    pub span_tops: u64,
}

/// Returns the factor for division by `divisor`: `n / divisor == n * magic >> 32`.
///
/// It is exact for all 32-bit `n` if `divisor` is a power of two, otherwise for `n < 2^32 / divisor`.
pub const fn magic(divisor: u32) -> u64 {
    (1_u64 << 32).div_ceil(divisor as u64)
}

/// Returns the factor for division by `divisor`: `n / divisor` is the high half of the 128-bit `n * wide_magic`. The
/// factor is 0 for divisor 1.
///
/// It is exact for `n * divisor < 2^64`.
pub const fn wide_magic(divisor: u64) -> u64 {
    // For d > 1, ceil(2^64 / d) is floor((2^64 - 1) / d) + 1.
    if divisor == 1 { 0 } else { u64::MAX / divisor + 1 }
}

/// Returns a record of a plan as words.
pub fn words_of<T: Pod>(record: &T) -> &[u32] {
    bytemuck::cast_slice(core::slice::from_ref(record))
}

/// A struct that kernels take by value, with its name in the kernels' table.
pub trait KernelParams: Copy {
    /// The struct's name.
    const NAME: &'static str;
}

/// Asserts a struct's size and offsets. `ptx/src/common/params.cuh` asserts the same, and `ptx/build.py --check`
/// compares the numbers.
macro_rules! layout_is {
    ($($name:ident $bytes:literal { $($field:ident $offset:literal)* })*) => {
        const _: () = {$(
            assert!(size_of::<$name>() == $bytes);
            $(assert!(offset_of!($name, $field) == $offset);)*
        )*};
        $(impl $crate::backend::cuda::kernels::params::KernelParams for $name {
            const NAME: &'static str = stringify!($name);
        })*
    };
}

use layout_is;

layout_is! {
    BatchRow 16 { row 0 qo_start 4 extend_len 8 kv_len 12 }
    AttendParams 208 {
        q 0 out 8 lse 16 k 24 v 32 page_stride 40 slot_stride 48 head_stride 56 q_stride 64
        out_stride 72 table 80 batch_rows 88 plan 96 partial 104 counters 112 page_magic 120
        chunk_magic 128 page_size 136 chunk_pages 140 chunks_per_row 144 chunk_base 148 q_heads 152
        kv_heads 156 group 160 batch 164 window 168 scale 172 soft_cap 176 negate_q 180 stripes 184
        reserved 188 sinks 192 masks 200
    }
    LayerScales 32 { k 0 v 8 page_stride 16 head_stride 24 by_token 28 }
    DecodeWork 32 {
        work_units 0 unit_end 4 batch_index 8 unit_start 12 row 16 qo_start 20 extend_len 24
        kv_len 28
    }
    ExtendHead 16 { work_count 0 }
    ExtendWork 32 {
        row 0 qo_start 4 extend_len 8 kv_len 12 q_begin 16 kv_begin 20 kv_end 24 part 28
    }
    SharedHead 32 {
        decode_warps 0 work_units 4 span_ctas 8 work_tiles 12 head_tiles 16 head_rows 20
    }
    RowShare 32 { begin 0 place 4 span 8 depth 12 start 16 units 20 qo_start 24 extend_len 28 }
    SpanParts 32 { tile_at 0 tiles 4 member_start 8 member_count 12 parent 16 row_at 20 stride 24 }
    SpanItem 32 {
        row 0 member_start 4 head 8 parts 10 next 12 piece 14 member_count 16 behind 18 kv_begin 20
        kv_end 24 part 28
    }
    SpanMember 8 { qo_start 0 batch_index 4 }
    SpanMeeting 16 { state 0 left 8 }
    AttendSharedParams 272 {
        attend 0 shares 208 spans 216 items 224 members 232 meetings 240 tops 248 span_partial 256
        span_tops 264
    }
}
