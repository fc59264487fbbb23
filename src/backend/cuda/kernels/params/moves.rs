//! Parameters of the kernels that move bytes: the counterpart of `ptx/src/common/move_params.cuh`.

use crate::plan::{Compaction, PageCopy, TableWrite};

records! {
    /// The parameters of `store_cache` and its variants, by value. The fields that the first instructions read come
    /// first.
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    pub struct StoreCacheParams: 96 {
        /// Device address of the rows of K to store, `k_stride` apart.
        0 k: u64,
        /// The same for V, `v_stride` apart.
        8 v: u64,
        /// Device address of i32 or i64 `[tokens]`; nothing is written for a negative slot.
        16 slots: u64,
        /// Device address of this layer's K: page p, slot s, run r at
        /// `k_pool + p * page_stride + s * slot_stride + r * run_stride`.
        24 k_pool: u64,
        /// Device address of this layer's V, same strides.
        32 v_pool: u64,
        /// Bytes from page to page.
        40 page_stride: u64,
        /// Bytes from row to row of K.
        48 k_stride: u32,
        /// Bytes from row to row of V.
        52 v_stride: u32,
        /// Number of rows.
        56 tokens: u32,
        /// Slots of a page; 1 if the layer's pages are contiguous: `page_stride` is then the stride of a slot.
        60 page_size: u32,
        /// [`wide_magic`](super::wide_magic) of `page_size`.
        64 page_magic: u64,
        /// Bytes from slot to slot.
        72 slot_stride: u32,
        /// Bytes of a slot number: 4 or 8.
        76 slot_bytes: u32,
        /// Number of units of a run, which is a row (or half a latent row), or one head of it.
        80 row_units: u32,
        /// Bytes that a thread moves at once: 16, 4 or 2.
        84 unit_bytes: u32,
        /// Bytes from run to run of the rows to store.
        88 run_bytes: u32,
        /// Bytes from run to run of a slot; the grid's y is the number of runs.
        92 run_stride: u32,
    }

    /// The parameters of `rope_store` and its variants, by value.
    #[derive(Clone, Copy, PartialEq, Debug, Default)]
    pub struct RopeStoreParams: 120 {
        /// Device address of `[tokens, q_heads + 2 * kv_heads, head_dim]`, rows `qkv_stride` apart.
        0 qkv: u64,
        /// Device address of u32 `[tokens]`.
        8 positions: u64,
        /// Device address of i32 or i64 `[tokens]`; nothing is stored for a negative slot.
        16 slots: u64,
        /// Device address of the weights of q's norm, `[head_dim]`; 0 for no norm.
        24 q_norm: u64,
        /// The same for k.
        32 k_norm: u64,
        /// Device address of f32 `[head_dim / 2]`.
        40 frequencies: u64,
        /// Device address of this layer's K: page p, slot s, head h at
        /// `k_pool + p * page_stride + s * slot_stride + h * head_stride`; 0: nothing is stored.
        48 k_pool: u64,
        /// Device address of this layer's V, same strides.
        56 v_pool: u64,
        /// Bytes from page to page.
        64 page_stride: u64,
        /// Bytes from row to row.
        72 qkv_stride: u64,
        /// Bytes from slot to slot.
        80 slot_stride: u32,
        /// Bytes of a slot number: 4 or 8.
        84 slot_bytes: u32,
        /// Slots of a page.
        88 page_size: u32,
        /// Number of rows.
        92 tokens: u32,
        /// Number of query heads.
        96 q_heads: u32,
        /// Number of heads of k, and of v.
        100 kv_heads: u32,
        /// Number of heads of a warp.
        104 heads_each: u32,
        /// Epsilon of the norms.
        108 eps: f32,
        /// Bytes from head to head.
        112 head_stride: u32,
        /// 0.
        116 reserved: u32,
    }
}

/// Type f32 of rows for `store_cache_fp8_any`.
pub const ROWS_F32: u32 = 0;
/// Type f16.
pub const ROWS_F16: u32 = 1;
/// Type bf16.
pub const ROWS_BF16: u32 = 2;

records! {
    /// The parameters of `store_cache_fp8` and its variants, by value.
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    pub struct StoreFp8Params: 128 {
        /// Device address of the rows of K to store, `k_stride` apart.
        0 k: u64,
        /// The same for V, `v_stride` apart.
        8 v: u64,
        /// Device address of i32 or i64 `[tokens]`; nothing is written for a negative slot.
        16 slots: u64,
        /// Device address of this layer's K: page p, slot s, head h at
        /// `k_pool + p * page_stride + s * slot_stride + h * head_stride`.
        24 k_pool: u64,
        /// Device address of this layer's V, same strides.
        32 v_pool: u64,
        /// As in [`LayerScales`](super::LayerScales); written if scales are by token, otherwise read.
        40 k_scales: u64,
        /// The same for V.
        48 v_scales: u64,
        /// Bytes from page to page.
        56 page_stride: u64,
        /// Bytes from one page's scales to the next page's.
        64 scale_page_stride: u64,
        /// [`wide_magic`](super::wide_magic) of `page_size`.
        72 page_magic: u64,
        /// Bytes from row to row of K.
        80 k_stride: u32,
        /// Bytes from row to row of V.
        84 v_stride: u32,
        /// Number of rows.
        88 tokens: u32,
        /// Slots of a page.
        92 page_size: u32,
        /// Bytes from slot to slot.
        96 slot_stride: u32,
        /// Bytes from one head's scales to the next head's.
        100 scale_head_stride: u32,
        /// Bytes of a slot number: 4 or 8.
        104 slot_bytes: u32,
        /// Number of kv heads.
        108 kv_heads: u32,
        /// Number of elements of a head.
        112 head_dim: u32,
        /// Type of the rows: [`ROWS_F32`], [`ROWS_F16`] or [`ROWS_BF16`].
        116 rows: u32,
        /// 1: each token has its own scale.
        120 by_token: u32,
        /// Bytes from head to head.
        124 head_stride: u32,
    }
}

/// Maximum number of pages of one launch of `copy_pages`.
pub const COPY_PAGES_MAX: usize = 448;

records! {
    /// The parameters of `copy_pages`, by value. They contain the pages, so nothing is uploaded.
    #[derive(Clone, Copy, Debug)]
    pub struct CopyPagesParams: 3656 {
        /// Device address: piece i of page p at `source + p * source_page_stride + i * source_piece_stride`.
        0 source: u64,
        /// Device address of the target, with its strides.
        8 target: u64,
        /// Bytes from page to page.
        16 source_page_stride: u64,
        /// Bytes from piece to piece.
        24 source_piece_stride: u64,
        /// Bytes from page to page.
        32 target_page_stride: u64,
        /// Bytes from piece to piece.
        40 target_piece_stride: u64,
        /// [`wide_magic`](super::wide_magic) of `piece_units`.
        48 piece_magic: u64,
        /// Units of one piece.
        56 piece_units: u32,
        /// Units of one page.
        60 page_units: u32,
        /// Bytes that a thread moves at once: 16, 4 or 2.
        64 unit_bytes: u32,
        /// 0.
        68 reserved: u32,
        /// The copies; their number is the grid's y.
        72 copies: [PageCopy; COPY_PAGES_MAX],
    }
}

records! {
    /// The addresses of pages for `copy_heads`: head h of slot s of piece i of page p at
    /// `address + i * piece_stride + p * page_stride + s * slot_stride + h * head_stride`.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub struct HeadPlaces: 48 {
        /// Device address.
        0 address: u64,
        /// Device address of u64 `[pieces]`, the addresses of the pieces; 0: piece i is at
        /// `address + i * piece_stride`.
        8 table: u64,
        /// Bytes from piece to piece.
        16 piece_stride: u64,
        /// Bytes from page to page.
        24 page_stride: u64,
        /// Bytes from slot to slot.
        32 slot_stride: u64,
        /// Bytes from head to head.
        40 head_stride: u64,
    }

    /// The parameters of `copy_heads`, by value. They contain the pages, so nothing is uploaded.
    #[derive(Clone, Copy, Debug)]
    pub struct CopyHeadsParams: 3696 {
        /// The sources.
        0 source: HeadPlaces,
        /// The targets.
        48 target: HeadPlaces,
        /// Units of 16 bytes of one page.
        96 page_units: u32,
        /// Units of one piece.
        100 piece_units: u32,
        /// Units of the heads of one slot of a piece.
        104 slot_units: u32,
        /// Units of one head.
        108 head_units: u32,
        /// The copies; their number is the grid's y.
        112 copies: [PageCopy; COPY_PAGES_MAX],
    }
}

/// Maximum number of rows of one launch of `compact_slots`.
pub const COMPACTIONS_MAX: usize = 200;

records! {
    /// The parameters of `compact_slots`, by value. They contain the rows, so nothing is uploaded.
    #[derive(Clone, Copy, Debug)]
    pub struct CompactSlotsParams: 3288 {
        /// Device address: layer l, page p, slot s, run r at
        /// `pool + l * layer_stride + p * page_stride + s * slot_stride + r * run_stride`.
        0 pool: u64,
        /// Bytes from layer to layer.
        8 layer_stride: u64,
        /// Device address of u64 `[layers]`, the addresses of the layers; 0: layer l is at `pool + l * layer_stride`.
        16 layer_table: u64,
        /// Bytes from page to page.
        24 page_stride: u64,
        /// Bytes from slot to slot.
        32 slot_stride: u64,
        /// Bytes from run to run.
        40 run_stride: u64,
        /// Device address of the page tables.
        48 table: u64,
        /// Tokens of a page.
        56 page_size: u32,
        /// Pages of a leaf.
        60 leaf_pages: u32,
        /// Words of one row's directory.
        64 leaves_per_row: u32,
        /// As in [`AttendParams`](super::AttendParams).
        68 leaf_base: u32,
        /// Number of layers, over all planes of the same shape.
        72 layers: u32,
        /// Number of contiguous runs of a slot in a layer.
        76 runs: u32,
        /// Number of units of one run.
        80 run_units: u32,
        /// Bytes that a thread moves at once: 16, 4 or 2.
        84 unit_bytes: u32,
        /// The compactions; their number is the grid's y.
        88 compactions: [Compaction; COMPACTIONS_MAX],
    }

    /// The parameters of `load_plan`, by value.
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    pub struct LoadPlanParams: 64 {
        /// Device address of pinned memory.
        0 source: u64,
        /// Device address of the image.
        8 image: u64,
        /// Device address of the page tables.
        16 words: u64,
        /// Device address of a u32 that is zero between launches.
        24 counter: u64,
        /// Device address of a u64 in pinned memory. It becomes `ticket` when the host may rewrite the source.
        32 done: u64,
        /// The value for `done`.
        40 ticket: u64,
        /// Number of 16-byte units of the image.
        48 units: u32,
        /// Bytes from the source to `TableWrite[writes]`.
        52 writes_at: u32,
        /// Number of table writes.
        56 writes: u32,
        /// 0.
        60 reserved: u32,
    }
}

layout_is! {
    PageCopy 8 { source 0 target 4 }
    Compaction 16 { row 0 first 4 keep 8 }
    TableWrite 8 { index 0 value 4 }
}
