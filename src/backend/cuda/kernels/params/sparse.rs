//! Parameters of the kernels for sparse reads.

use core::mem::{offset_of, size_of};

use bytemuck::{Pod, Zeroable};

use super::AttendParams;

/// Number of tokens of a chunk of keys.
pub const SCORE_TOKENS: u32 = 256;
/// Maximum number of candidate keys of a list that `select_top` gathers.
pub const CANDIDATES: u32 = 4096;
/// Equals [`crate::backend::NO_POSITION`].
const NO_POSITION: u32 = 4294967295;

const _: () = assert!(NO_POSITION == crate::backend::NO_POSITION);

/// The parameters of `store_labels`, by value.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(C)]
pub struct StoreLabelsParams {
    /// Device address of the 16-bit rows of K to store, `k_stride` apart.
    pub k: u64,
    /// Device address of i32 or i64 `[tokens]`; nothing is written for a negative slot.
    pub slots: u64,
    /// Device address of this layer's u32 `[kv_heads, channel_count]`.
    pub channels: u64,
    /// Device address of this layer's labels: page p, slot s, head h at
    /// `labels + p * page_stride + s * slot_stride + h * head_stride`.
    pub labels: u64,
    /// Bytes from page to page.
    pub page_stride: u64,
    /// Bytes from slot to slot.
    pub slot_stride: u64,
    /// Bytes from head to head.
    pub head_stride: u64,
    /// Bytes from row to row of K.
    pub k_stride: u64,
    /// [`wide_magic`](super::wide_magic) of `page_size`.
    pub page_magic: u64,
    /// Slots of a page.
    pub page_size: u32,
    /// Number of rows.
    pub tokens: u32,
    /// Heads of K.
    pub kv_heads: u32,
    /// Elements of a head.
    pub head_dim: u32,
    /// Number of labels of a head.
    pub channel_count: u32,
    /// Bytes of a slot number: 4 or 8.
    pub slot_bytes: u32,
}

/// The parameters of `score_labels_*`, `select_top` and `resolve_selection`, by value.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
#[repr(C)]
pub struct SelectParams {
    /// The kernels use q, tables, batch and window of these fields. For `score_labels_*`, `k` is the address of this
    /// layer's labels, with their strides.
    pub attend: AttendParams,
    /// Device address of this layer's u32 `[kv_heads, channel_count]`.
    pub channels: u64,
    /// Device address of u32 `[batch + 1]`: for each row the number of chunks of [`SCORE_TOKENS`] positions in earlier
    /// rows with lists, then their total.
    pub starts: u64,
    /// Device address of u32 `[key_chunks, kv_heads, SCORE_TOKENS]`.
    pub keys: u64,
    /// Device address of u32 `[batch, kv_heads, top]`.
    pub positions: u64,
    /// Device address of u32 `[batch, kv_heads, top]`: slots of the listed positions that a row sees.
    pub listed: u64,
    /// Device address of u32 `[batch, kv_heads]`: the number of those slots.
    pub counts: u64,
    /// Device address of (key, position) of u32 `[batch * kv_heads, CANDIDATES]`, for lists that several CTAs of
    /// `select_top` share.
    pub gathered: u64,
    /// Device address of u32 `[batch * kv_heads, 2]`, zero between launches.
    pub gather_counters: u64,
    /// Number of labels of a head.
    pub channel_count: u32,
    /// Elements of a head.
    pub head_dim: u32,
    /// Length of a list.
    pub top: u32,
    /// Maximum number of chunks for which `keys` has memory.
    pub key_chunks: u32,
}

/// Lists of slots from `resolve_selection`. `attend_selected_*` takes it after [`AttendParams`]. For this kernel, the
/// tokens of a row are the entries of its lists, `kv_len` in `batch_rows` counts entries, and the window is 0.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Pod, Zeroable)]
#[repr(C)]
pub struct Lists {
    /// See [`SelectParams`].
    pub listed: u64,
    /// See [`SelectParams`].
    pub counts: u64,
    /// [`wide_magic`](super::wide_magic) of the page size.
    pub page_magic: u64,
    /// Length of a list.
    pub top: u32,
    /// 0.
    pub reserved: u32,
}

super::layout_is! {
    StoreLabelsParams 96 {
        k 0 slots 8 channels 16 labels 24 page_stride 32 slot_stride 40 head_stride 48 k_stride 56
        page_magic 64 page_size 72 tokens 76 kv_heads 80 head_dim 84 channel_count 88 slot_bytes 92
    }
    SelectParams 288 {
        attend 0 channels 208 starts 216 keys 224 positions 232 listed 240 counts 248 gathered 256 gather_counters 264
        channel_count 272 head_dim 276 top 280 key_chunks 284
    }
    Lists 32 { listed 0 counts 8 page_magic 16 top 24 reserved 28 }
}
