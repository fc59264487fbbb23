//! Parameters of the attention kernels: the counterpart of `ptx/src/common/params.cuh`. `params/moves.rs` has those of
//! the kernels that move bytes.
//!
//! Every struct is passed or uploaded as its bytes. Both sides assert sizes and offsets, and `ptx/build.py --check`
//! compares both lists.

use bytemuck::{Pod, Zeroable};

/// Asserts a struct's size and offsets. `ptx/src/common/params.cuh` asserts the same, and `ptx/build.py --check`
/// compares the numbers.
macro_rules! layout_is {
    ($($name:ident $bytes:literal { $($field:ident $offset:literal)* })*) => {
        const _: () = {$(
            assert!(size_of::<$name>() == $bytes);
            $(assert!(core::mem::offset_of!($name, $field) == $offset);)*
        )*};
        $(impl $crate::backend::cuda::kernels::params::KernelParams for $name {
            const NAME: &'static str = stringify!($name);
        })*
    };
}

/// Declares structs that kernels read, each with its size. The offset of a field precedes it.
macro_rules! records {
    ($(
        $(#[$meta:meta])*
        pub struct $name:ident: $bytes:literal {
            $($(#[$note:meta])* $($offset:literal)? $field:ident: $kind:ty,)+
        }
    )+) => {$(
        $(#[$meta])*
        #[repr(C)]
        pub struct $name {
            $($(#[$note])* pub $field: $kind,)+
        }

        layout_is! { $name $bytes { $($($field $offset)?)+ } }
    )+};
}

mod latent;
mod moves;
mod sparse;

pub use latent::{LatentHead, LatentJoin, LayerRope, RowBoxes, StoreLatentFp8Params, TensorMap};
pub use moves::{
    COMPACTIONS_MAX, COPY_PAGES_MAX, CompactSlotsParams, CopyHeadsParams, CopyPagesParams, HeadPlaces, LoadPlanParams,
    ROWS_BF16, ROWS_F16, ROWS_F32, RopeStoreParams, StoreCacheParams, StoreFp8Params,
};
pub use sparse::{CANDIDATES, Lists, SCORE_TOKENS, SelectParams, StoreLabelsParams};

use crate::layout::PAGE_SIZE_MAX;
use crate::plan::BatchRow;

/// Maximum number of tokens of a page: `attend_decode_*` stores a slot of a page in ten bits of a word.
pub const PAGE_TOKENS_MAX: u32 = 1024;

/// Maximum number of kv heads for 16-bit rows, also over fp8: `attend_decode_*` stores a head in 16 bits of a word.
pub const KV_HEADS_MAX: u32 = 65535;

const _: () = assert!(PAGE_SIZE_MAX <= PAGE_TOKENS_MAX, "attend_decode.cuh has no bits for the slot");

records! {
    /// The parameters of all attention kernels except `attend_shared_*`, by value. [`AttendSharedParams`] and
    /// [`SelectParams`] begin with it.
    #[derive(Clone, Copy, PartialEq, Debug, Default, Pod, Zeroable)]
    pub struct AttendParams: 208 {
        /// Device address of `[tokens, q_heads, head_dim]`, rows `q_stride` apart, 16-byte aligned (f32: 4-byte).
        0 q: u64,
        /// Device address of the output, same shape (over latent rows `[.., 512]`), rows `out_stride` apart, aligned
        /// like q.
        8 out: u64,
        /// Device address of f32 `[tokens, q_heads]` for the log-sum-exp, natural logarithm; 0: none.
        16 lse: u64,
        /// Device address of this layer's K: page p, slot s, head h at
        /// `k + p * page_stride + s * slot_stride + h * head_stride`.
        24 k: u64,
        /// Device address of this layer's V, same strides.
        32 v: u64,
        /// Bytes from page to page.
        40 page_stride: u64,
        /// Bytes from slot to slot.
        48 slot_stride: u64,
        /// Bytes from kv head to kv head.
        56 head_stride: u64,
        /// Bytes from one token's q to the next.
        64 q_stride: u64,
        /// Bytes from one token's output to the next.
        72 out_stride: u64,
        /// Device address of the page tables: directories `[rows, leaves_per_row]`, then leaves.
        80 table: u64,
        /// Device address of `BatchRow[batch]`.
        88 batch_rows: u64,
        /// Device address of the planner's words for this kernel, 16-byte aligned.
        96 plan: u64,
        /// Device address of f32 scratch for partial sums, 16-byte aligned.
        104 partial: u64,
        /// Device address of u32 counters: zero before the first launch; each launch leaves them zero. For
        /// `attend_latent_*` except `*_f32`, and for their join: device address of f32 `[slots, rows, 2]`. For each row
        /// of a part, these are the logit to which the weights are relative, and the sum of the weights.
        112 counters: u64,
        /// `ceil(2^32 / page_size)`: see [`magic`].
        120 page_magic: u64,
        /// `ceil(2^32 / leaf_pages)`: see [`magic`].
        128 leaf_magic: u64,
        /// Tokens of a page, 1 to [`PAGE_TOKENS_MAX`].
        136 page_size: u32,
        /// Pages of a leaf.
        140 leaf_pages: u32,
        /// Words of one row's directory.
        144 leaves_per_row: u32,
        /// Index of the track's first word in the first leaf. All directories, of `rows * leaves_per_row` words,
        /// precede it.
        148 leaf_base: u32,
        /// Query heads.
        152 q_heads: u32,
        /// K and V heads.
        156 kv_heads: u32,
        /// `q_heads / kv_heads`, at most `GROUP_MAX`; for latent rows up to 128.
        160 group: u32,
        /// Batch rows, padding included.
        164 batch: u32,
        /// Sliding window; 0: none.
        168 window: u32,
        /// Factor of the logits.
        172 scale: f32,
        /// Soft cap of the logits; 0: none.
        176 soft_cap: f32,
        /// `attend_extend_*` only. 1: the scale is negative, so the kernel negates q, and `scale` is the absolute
        /// value.
        180 negate_q: u32,
        /// Stripes of kv heads in the decode plan; CTA c, or warp c of suffixes in `attend_shared_*`, is in stripe `c %
        /// stripes`.
        184 stripes: u32,
        /// Elements of a head, for `attend_f32` and `attend_fp8_f32`, which take several numbers of elements.
        188 head_dim: u32,
        /// Device address of f32 `[q_heads]` (minus infinity: no sink); 0: no head has one.
        192 sinks: u64,
        /// Device address of u64 `[tokens]`, for trees only: see [`BatchPlan::masks`](crate::BatchPlan::masks).
        200 masks: u64,
    }
}

/// Flag of a page table row in the staged rows and in [`ExtendWork`]: the sequence is a draft tree. These kernels
/// support trees: `attend_decode_*_r64_sm90a`, those over latent or f32 rows, and `attend_extend_*`. Exceptions are
/// `attend_extend_fp8_*_sm90a`.
pub const TREE_ROW: u32 = 1 << 31;

/// Returns whether a row is marked as a draft tree.
pub const fn is_tree(row: &BatchRow) -> bool {
    row.row.raw() >= TREE_ROW
}

records! {
    /// The scales of one layer of a quantised pool; kernels over fp8 take this struct after their own.
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Pod, Zeroable)]
    pub struct LayerScales: 32 {
        /// Device address of f32. The scale of head h is at `k + h * head_stride`. With scales by token, the scale of
        /// page p, slot s is another `p * page_stride + s * 4` bytes further.
        0 k: u64,
        /// Device address of the scales of V, like `k`.
        8 v: u64,
        /// Bytes from page to page.
        16 page_stride: u64,
        /// Bytes from head to head.
        24 head_stride: u32,
        /// 1: each token has its own scale.
        28 by_token: u32,
    }

    /// One work chunk of `attend_decode_*`, for a CTA in each stripe: see `ptx/src/common/params.cuh`.
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Pod, Zeroable)]
    pub struct DecodeWork: 32 {
        /// Units of a work chunk, the same for all: chunk `i` begins at unit `i * work_units`.
        0 work_units: u32,
        /// End of this chunk's units; equal to or below its start if the chunk has none.
        4 unit_end: u32,
        /// Batch index of the sequence that has the chunk's first unit.
        8 batch_index: u32,
        /// The first unit of that sequence.
        12 unit_start: u32,
        /// Row of that sequence in the page tables.
        16 row: u32,
        /// First query row of that sequence.
        20 qo_start: u32,
        /// Query rows of that sequence.
        24 extend_len: u32,
        /// Tokens of that sequence with K and V.
        28 kv_len: u32,
    }

    /// The extend plan's first words.
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Pod, Zeroable)]
    pub struct ExtendHead: 16 {
        /// Items that follow.
        0 work_count: u32,
        /// 0.
        reserved: [u32; 3],
    }

    /// Queries and tokens of one item of `attend_extend_*` for each kv head, or of one item over latent rows.
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Pod, Zeroable)]
    pub struct ExtendWork: 32 {
        /// The sequence's row in the page tables, plus [`TREE_ROW`] for a draft tree.
        0 row: u32,
        /// The sequence's first query row.
        4 qo_start: u32,
        /// The sequence's query rows.
        8 extend_len: u32,
        /// The sequence's tokens with K and V.
        12 kv_len: u32,
        /// First packed query row: packed row r is query `r / group`, head `r % group` of the kv head's group.
        16 q_begin: u32,
        /// First position to read.
        20 kv_begin: u32,
        /// End of the positions to read.
        24 kv_end: u32,
        /// `slot << 16 | index << 8 | parts`. The item is part `index` of `parts` parts, which use `parts` slots from
        /// `slot` on.
        28 part: u32,
    }
}

/// Marks the absence of a span.
pub const NO_SPAN: u32 = u32::MAX;
/// Maximum number of (row, kv head)s of a step of `attend_shared_*`.
pub const LISTED_SUMS: u32 = 4096;
/// Maximum number of (row, kv head)s in a stripe.
pub const LISTED_SUFFIXES: u32 = 512;

records! {
    /// The first words of the plan of `attend_shared_*`; `DecodeWork`s follow. See `ptx/src/common/params.cuh`.
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Pod, Zeroable)]
    pub struct SharedHead: 32 {
        /// Number of warps that work on suffixes, over all CTAs that do not work on spans.
        0 decode_warps: u32,
        /// See [`DecodeWork`].
        4 work_units: u32,
        /// Number of CTAs that work on spans.
        8 span_ctas: u32,
        /// Number of tiles of each CTA that works on spans.
        12 work_tiles: u32,
        /// Number of tiles of all query tiles of one kv head, including the extra tiles between query tiles.
        16 head_tiles: u32,
        /// Number of query rows of all query tiles of one kv head.
        20 head_rows: u32,
        /// 0.
        reserved: [u32; 2],
    }

    /// A row's spans, and its own units.
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Pod, Zeroable)]
    pub struct RowShare: 32 {
        /// First position after its spans.
        0 begin: u32,
        /// Place of its first new token among the members.
        4 place: u32,
        /// Its deepest span.
        8 span: u32,
        /// Number of its spans.
        12 depth: u32,
        /// Its first unit in each stripe.
        16 start: u32,
        /// Number of its units of one head.
        20 units: u32,
        /// Its first query row.
        24 qo_start: u32,
        /// Number of its new tokens; 0 if the extend kernel takes it.
        28 extend_len: u32,
    }

    /// The places of a span's partial sums: see `ptx/src/common/params.cuh`.
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Pod, Zeroable)]
    pub struct SpanParts: 32 {
        /// Index of the span's first tile among the tiles of a kv head.
        0 tile_at: u32,
        /// Number of tiles of each of its query tiles.
        4 tiles: u32,
        /// Place of its first member.
        8 member_start: u32,
        /// Number of its members.
        12 member_count: u32,
        /// The span's parent, or [`NO_SPAN`].
        16 parent: u32,
        /// Number of query rows of earlier query tiles.
        20 row_at: u32,
        /// Number of tiles from the start of one of the span's query tiles to the start of the next. The extra tiles
        /// between them count as work.
        24 stride: u32,
        /// 0.
        reserved: u32,
    }

    /// A barrier of the CTAs that write parts of one query tile's sum: see `ptx/src/common/params.cuh`.
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    pub struct SpanMeeting: 16 {
        /// Number of parts that have arrived. Bit `16 + piece` is set if the CTA of this piece no longer waits.
        0 state: u64,
        /// Number of CTAs that no longer poll.
        8 left: u32,
        /// 0.
        reserved: u32,
    }

    /// Tiles of one query tile. The query tile belongs to a span or to a row's own tokens. A CTA's first item has the
    /// index of the CTA.
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Pod, Zeroable)]
    pub struct SpanItem: 32 {
        /// Page table row.
        0 row: u32,
        /// Place of the query tile's first member.
        4 member_start: u32,
        /// The kv head.
        8 head: u16,
        /// Number of items of the query tile. Each item belongs to a different CTA.
        10 parts: u16,
        /// Index of the CTA's next item; 0 for none.
        12 next: u16,
        /// Index among the items of the query tile.
        14 piece: u16,
        /// Number of members of the query tile.
        16 member_count: u16,
        /// For a row's own tokens, 1 + the number of the row's tokens from `kv_end` on, at most 65,535; 0 if members
        /// see all tokens.
        18 behind: u16,
        /// First position to read.
        20 kv_begin: u32,
        /// End of the positions to read.
        24 kv_end: u32,
        /// First row of its sums among the sums of spans.
        28 part: u32,
    }

    /// A member of spans: one new token of a row. The new tokens of a row are consecutive.
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Pod, Zeroable)]
    pub struct SpanMember: 8 {
        /// Its query row.
        0 qo_start: u32,
        /// Its row in the batch.
        4 batch_index: u32,
    }

    /// The parameters of `attend_shared_*`, by value.
    #[derive(Clone, Copy, PartialEq, Debug, Default, Pod, Zeroable)]
    pub struct AttendSharedParams: 272 {
        /// `plan`: [`SharedHead`]. `partial`: f32 `[2 * decode_warps + batch * kv_heads, rows, head_dim]`. `counters`:
        /// u32 `[batch, kv_heads]`.
        0 attend: AttendParams,
        /// Device address of `RowShare[batch]`.
        208 shares: u64,
        /// Device address of `SpanParts[..]`.
        216 spans: u64,
        /// Device address of `SpanItem[..]`.
        224 items: u64,
        /// Device address of `SpanMember[..]`.
        232 members: u64,
        /// Device address of [`SpanMeeting`]s, one for each CTA that works on spans; zero between launches.
        240 meetings: u64,
        /// Device address of f32 `[2 * decode_warps + batch * kv_heads, rows, 2]`, in the order of `partial`.
        248 tops: u64,
        /// Device address of f32 `[.., head_dim]`.
        256 span_partial: u64,
        /// Device address of f32 `[.., 2]`.
        264 span_tops: u64,
    }
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

layout_is! {
    BatchRow 16 { row 0 qo_start 4 extend_len 8 kv_len 12 }
}
