//! Parameters of the kernels that move bytes: the counterpart of `ptx/src/common/move_params.cuh`.

use core::mem::{offset_of, size_of};

use super::layout_is;
use crate::plan::{Compaction, PageCopy, TableWrite};

/// The parameters of `store_cache` and its variants, by value. The fields that the first instructions read come first.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(C)]
pub struct StoreCacheParams {
    /// Device address of the rows of K to store, `k_stride` apart.
    pub k: u64,
    /// The same for V, `v_stride` apart.
    pub v: u64,
    /// Device address of i32 or i64 `[tokens]`; nothing is written for a negative slot.
    pub slots: u64,
    /// Device address of this layer's K: page p, slot s of it at `k_pool + p * page_stride + s * slot_stride`.
    pub k_pool: u64,
    /// Device address of this layer's V, same strides.
    pub v_pool: u64,
    /// Bytes from page to page.
    pub page_stride: u64,
    /// Bytes from row to row of K.
    pub k_stride: u32,
    /// Bytes from row to row of V.
    pub v_stride: u32,
    /// Number of rows.
    pub tokens: u32,
    /// Slots of a page; 1 if the layer's pages are contiguous: `page_stride` is then the stride of a slot.
    pub page_size: u32,
    /// [`wide_magic`](super::wide_magic) of `page_size`.
    pub page_magic: u64,
    /// Bytes from slot to slot.
    pub slot_stride: u32,
    /// Bytes of a slot number: 4 or 8.
    pub slot_bytes: u32,
    /// Number of units of a row.
    pub row_units: u32,
    /// Bytes that a thread moves at once: 16, 4 or 2.
    pub unit_bytes: u32,
}

/// The parameters of `rope_store` and its variants, by value.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
#[repr(C)]
pub struct RopeStoreParams {
    /// Device address of `[tokens, q_heads + 2 * kv_heads, head_dim]`, rows `qkv_stride` apart.
    pub qkv: u64,
    /// Device address of u32 `[tokens]`.
    pub positions: u64,
    /// Device address of i32 or i64 `[tokens]`; nothing is stored for a negative slot.
    pub slots: u64,
    /// Device address of the weights of q's norm, `[head_dim]`; 0 for no norm.
    pub q_norm: u64,
    /// The same for k.
    pub k_norm: u64,
    /// Device address of f32 `[head_dim / 2]`.
    pub frequencies: u64,
    /// Device address of this layer's K: page p, slot s of it at `k_pool + p * page_stride + s * slot_stride`; 0:
    /// nothing is stored.
    pub k_pool: u64,
    /// Device address of this layer's V, same strides.
    pub v_pool: u64,
    /// Bytes from page to page.
    pub page_stride: u64,
    /// Bytes from row to row.
    pub qkv_stride: u64,
    /// Bytes from slot to slot.
    pub slot_stride: u32,
    /// Bytes of a slot number: 4 or 8.
    pub slot_bytes: u32,
    /// Slots of a page.
    pub page_size: u32,
    /// Number of rows.
    pub tokens: u32,
    /// Number of query heads.
    pub q_heads: u32,
    /// Number of heads of k, and of v.
    pub kv_heads: u32,
    /// Number of heads of a warp.
    pub heads_each: u32,
    /// Epsilon of the norms.
    pub eps: f32,
}

/// Type f32 of rows for `store_cache_fp8_any`.
pub const ROWS_F32: u32 = 0;
/// Type f16.
pub const ROWS_F16: u32 = 1;
/// Type bf16.
pub const ROWS_BF16: u32 = 2;

/// The parameters of `store_cache_fp8` and its variants, by value.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(C)]
pub struct StoreFp8Params {
    /// Device address of the rows of K to store, `k_stride` apart.
    pub k: u64,
    /// The same for V, `v_stride` apart.
    pub v: u64,
    /// Device address of i32 or i64 `[tokens]`; nothing is written for a negative slot.
    pub slots: u64,
    /// Device address of this layer's K: page p, slot s of it at `k_pool + p * page_stride + s * slot_stride`.
    pub k_pool: u64,
    /// Device address of this layer's V, same strides.
    pub v_pool: u64,
    /// As in [`LayerScales`](super::LayerScales); written if scales are by token, otherwise read.
    pub k_scales: u64,
    /// The same for V.
    pub v_scales: u64,
    /// Bytes from page to page.
    pub page_stride: u64,
    /// Bytes from one page's scales to the next page's.
    pub scale_page_stride: u64,
    /// [`wide_magic`](super::wide_magic) of `page_size`.
    pub page_magic: u64,
    /// Bytes from row to row of K.
    pub k_stride: u32,
    /// Bytes from row to row of V.
    pub v_stride: u32,
    /// Number of rows.
    pub tokens: u32,
    /// Slots of a page.
    pub page_size: u32,
    /// Bytes from slot to slot.
    pub slot_stride: u32,
    /// Bytes from one head's scales to the next head's.
    pub scale_head_stride: u32,
    /// Bytes of a slot number: 4 or 8.
    pub slot_bytes: u32,
    /// Number of kv heads.
    pub kv_heads: u32,
    /// Number of elements of a head.
    pub head_dim: u32,
    /// Type of the rows: [`ROWS_F32`], [`ROWS_F16`] or [`ROWS_BF16`].
    pub rows: u32,
    /// 1: each token has its own scale.
    pub by_token: u32,
    /// 0.
    pub reserved: u32,
}

/// Maximum number of pages of one launch of `copy_pages`.
pub const COPY_PAGES_MAX: usize = 448;

/// The parameters of `copy_pages`, by value. They contain the pages, so nothing is uploaded.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct CopyPagesParams {
    /// Device address: piece i of page p at `source + p * source_page_stride + i * source_piece_stride`.
    pub source: u64,
    /// Device address of the target, with its strides.
    pub target: u64,
    /// Bytes from page to page.
    pub source_page_stride: u64,
    /// Bytes from piece to piece.
    pub source_piece_stride: u64,
    /// Bytes from page to page.
    pub target_page_stride: u64,
    /// Bytes from piece to piece.
    pub target_piece_stride: u64,
    /// [`wide_magic`](super::wide_magic) of `piece_units`.
    pub piece_magic: u64,
    /// Units of one piece.
    pub piece_units: u32,
    /// Units of one page.
    pub page_units: u32,
    /// Bytes that a thread moves at once: 16, 4 or 2.
    pub unit_bytes: u32,
    /// 0.
    pub reserved: u32,
    /// The copies; their number is the grid's y.
    pub copies: [PageCopy; COPY_PAGES_MAX],
}

/// Maximum number of rows of one launch of `compact_slots`.
pub const COMPACTIONS_MAX: usize = 200;

/// The parameters of `compact_slots`, by value. They contain the rows, so nothing is uploaded.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct CompactSlotsParams {
    /// Device address: layer l, page p, slot s, run r at
    /// `pool + l * layer_stride + p * page_stride + s * slot_stride + r * run_stride`.
    pub pool: u64,
    /// Bytes from layer to layer.
    pub layer_stride: u64,
    /// Bytes from page to page.
    pub page_stride: u64,
    /// Bytes from slot to slot.
    pub slot_stride: u64,
    /// Bytes from run to run.
    pub run_stride: u64,
    /// Device address of the page tables.
    pub table: u64,
    /// Tokens of a page.
    pub page_size: u32,
    /// Pages of a chunk.
    pub chunk_pages: u32,
    /// Words of one row's directory.
    pub chunks_per_row: u32,
    /// As in [`AttendParams`](super::AttendParams).
    pub chunk_base: u32,
    /// Number of layers, over all planes of the same shape.
    pub layers: u32,
    /// Number of contiguous runs of a slot in a layer.
    pub runs: u32,
    /// Number of units of one run.
    pub run_units: u32,
    /// Bytes that a thread moves at once: 16, 4 or 2.
    pub unit_bytes: u32,
    /// The compactions; their number is the grid's y.
    pub compactions: [Compaction; COMPACTIONS_MAX],
}

/// The parameters of `load_plan`, by value.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(C)]
pub struct LoadPlanParams {
    /// Device address of pinned memory.
    pub source: u64,
    /// Device address of the image.
    pub image: u64,
    /// Device address of the page tables.
    pub words: u64,
    /// Device address of a u32 that is zero between launches.
    pub counter: u64,
    /// Device address of a u64 in pinned memory. It becomes `ticket` when the host may rewrite the source.
    pub done: u64,
    /// The value for `done`.
    pub ticket: u64,
    /// Number of 16-byte units of the image.
    pub units: u32,
    /// Bytes from the source to `TableWrite[writes]`.
    pub writes_at: u32,
    /// Number of table writes.
    pub writes: u32,
    /// 0.
    pub reserved: u32,
}

layout_is! {
    StoreCacheParams 88 {
        k 0 v 8 slots 16 k_pool 24 v_pool 32 page_stride 40 k_stride 48 v_stride 52 tokens 56
        page_size 60 page_magic 64 slot_stride 72 slot_bytes 76 row_units 80 unit_bytes 84
    }
    RopeStoreParams 112 {
        qkv 0 positions 8 slots 16 q_norm 24 k_norm 32 frequencies 40 k_pool 48 v_pool 56
        page_stride 64 qkv_stride 72 slot_stride 80 slot_bytes 84 page_size 88 tokens 92 q_heads 96
        kv_heads 100 heads_each 104 eps 108
    }
    StoreFp8Params 128 {
        k 0 v 8 slots 16 k_pool 24 v_pool 32 k_scales 40 v_scales 48 page_stride 56
        scale_page_stride 64 page_magic 72 k_stride 80 v_stride 84 tokens 88 page_size 92
        slot_stride 96 scale_head_stride 100 slot_bytes 104 kv_heads 108 head_dim 112 rows 116
        by_token 120 reserved 124
    }
    PageCopy 8 { source 0 target 4 }
    CopyPagesParams 3656 {
        source 0 target 8 source_page_stride 16 source_piece_stride 24 target_page_stride 32
        target_piece_stride 40 piece_magic 48 piece_units 56 page_units 60 unit_bytes 64 reserved 68
        copies 72
    }
    Compaction 16 { row 0 first 4 keep 8 }
    CompactSlotsParams 3280 {
        pool 0 layer_stride 8 page_stride 16 slot_stride 24 run_stride 32 table 40 page_size 48
        chunk_pages 52 chunks_per_row 56 chunk_base 60 layers 64 runs 68 run_units 72 unit_bytes 76
        compactions 80
    }
    TableWrite 8 { index 0 value 4 }
    LoadPlanParams 64 {
        source 0 image 8 words 16 counter 24 done 32 ticket 40 units 48 writes_at 52 writes 56
        reserved 60
    }
}
