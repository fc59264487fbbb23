//! Parameters of the kernels for sparse reads.

use bytemuck::{Pod, Zeroable};

use super::AttendParams;

/// Number of tokens of a chunk of keys.
pub const SCORE_TOKENS: u32 = 256;
/// Maximum number of candidate keys of a list that `select_top` gathers.
pub const CANDIDATES: u32 = 4096;
/// Equals [`crate::backend::NO_POSITION`].
const NO_POSITION: u32 = 4294967295;

const _: () = assert!(NO_POSITION == crate::backend::NO_POSITION);

records! {
    /// The parameters of `store_labels`, by value.
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    pub struct StoreLabelsParams: 96 {
        /// Device address of the 16-bit rows of K to store, `k_stride` apart.
        0 k: u64,
        /// Device address of i32 or i64 `[tokens]`; nothing is written for a negative slot.
        8 slots: u64,
        /// Device address of this layer's u32 `[kv_heads, channel_count]`.
        16 channels: u64,
        /// Device address of this layer's labels: page p, slot s, head h at
        /// `labels + p * page_stride + s * slot_stride + h * head_stride`.
        24 labels: u64,
        /// Bytes from page to page.
        32 page_stride: u64,
        /// Bytes from slot to slot.
        40 slot_stride: u64,
        /// Bytes from head to head.
        48 head_stride: u64,
        /// Bytes from row to row of K.
        56 k_stride: u64,
        /// [`wide_magic`](super::wide_magic) of `page_size`.
        64 page_magic: u64,
        /// Slots of a page.
        72 page_size: u32,
        /// Number of rows.
        76 tokens: u32,
        /// Heads of K.
        80 kv_heads: u32,
        /// Elements of a head.
        84 head_dim: u32,
        /// Number of labels of a head.
        88 channel_count: u32,
        /// Bytes of a slot number: 4 or 8.
        92 slot_bytes: u32,
    }

    /// The parameters of `score_labels_*`, `select_top` and `resolve_selection`, by value.
    #[derive(Clone, Copy, PartialEq, Debug, Default)]
    pub struct SelectParams: 288 {
        /// The kernels use q, tables, batch and window of these fields. For `score_labels_*`, `k` is the address of
        /// this layer's labels, with their strides.
        0 attend: AttendParams,
        /// Device address of this layer's u32 `[kv_heads, channel_count]`.
        208 channels: u64,
        /// Device address of u32 `[batch + 1]`: for each row the number of chunks of [`SCORE_TOKENS`] positions in
        /// earlier rows with lists, then their total.
        216 starts: u64,
        /// Device address of u32 `[key_chunks, kv_heads, SCORE_TOKENS]`.
        224 keys: u64,
        /// Device address of u32 `[batch, kv_heads, top]`.
        232 positions: u64,
        /// Device address of u32 `[batch, kv_heads, top]`: slots of the listed positions that a row sees.
        240 listed: u64,
        /// Device address of u32 `[batch, kv_heads]`: the number of those slots.
        248 counts: u64,
        /// Device address of (key, position) of u32 `[batch * kv_heads, CANDIDATES]`, for lists that several CTAs of
        /// `select_top` share.
        256 gathered: u64,
        /// Device address of u32 `[batch * kv_heads, 2]`, zero between launches.
        264 gather_counters: u64,
        /// Number of labels of a head.
        272 channel_count: u32,
        /// Elements of a head.
        276 head_dim: u32,
        /// Length of a list.
        280 top: u32,
        /// Maximum number of chunks for which `keys` has memory.
        284 key_chunks: u32,
    }

    /// Lists of slots from `resolve_selection`. `attend_selected_*` takes it after [`AttendParams`]. For this kernel,
    /// the tokens of a row are the entries of its lists, `kv_len` in `batch_rows` counts entries, and the window is 0.
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Pod, Zeroable)]
    pub struct Lists: 32 {
        /// See [`SelectParams`].
        0 listed: u64,
        /// See [`SelectParams`].
        8 counts: u64,
        /// [`wide_magic`](super::wide_magic) of the page size.
        16 page_magic: u64,
        /// Length of a list.
        24 top: u32,
        /// 0.
        28 reserved: u32,
    }
}
