//! Parameters of kernels over latent rows.

use bytemuck::{Pod, Zeroable};

use super::StoreFp8Params;
#[cfg(doc)]
use super::{AttendParams, LayerScales};

/// The first words of a plan over latent rows, for `attend_latent_join_*`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Pod, Zeroable)]
#[repr(C)]
pub struct LatentHead {
    /// Number of joins.
    pub joins: u32,
    /// Maximum number of rows of a join.
    pub rows_max: u32,
    /// Maximum number of parts of a join.
    pub parts_max: u32,
    /// Rows of `partial` from one part of a join to the next.
    pub part_rows: u32,
}

records! {
    /// Parts of an item that `attend_latent_join_*` joins.
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Pod, Zeroable)]
    pub struct LatentJoin: 16 {
        /// The sequence's first query row.
        0 qo_start: u32,
        /// The item's first packed query row.
        4 q_begin: u32,
        /// Number of packed query rows of the sequence.
        8 rows: u32,
        /// `slot << 16 | parts`: the slot of the first part, and the number of consecutive parts.
        12 part: u32,
    }

    /// The unquantised part of one layer's latent rows of fp8. Kernels take it after [`LayerScales`], which has the
    /// scales of K and V.
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Pod, Zeroable)]
    pub struct LayerRope: 24 {
        /// Device address of bf16. The numbers of page p, slot s are at `at + p * page_stride + s * slot_stride`.
        0 at: u64,
        /// Bytes from page to page.
        8 page_stride: u64,
        /// Bytes from slot to slot.
        16 slot_stride: u32,
        /// Number of elements of a token.
        20 elements: u32,
    }
}

/// A tensor map of `cuTensorMapEncodeTiled`: a tensor in device memory, for the TMA.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(C, align(64))]
pub struct TensorMap {
    /// The driver's opaque format.
    pub words: [u64; 16],
}

records! {
    /// Latent rows of one layer for the TMA. `attend_latent_DTYPE_sm90a` takes it after [`AttendParams`].
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Pod, Zeroable)]
    pub struct RowBoxes: 176 {
        /// Rows of a box, a power of two up to 32 that divides a page; 0 without a map.
        0 rows: u32,
        /// 0.
        4 reserved: [u32; 11],
        /// [`TensorMap::words`] of `[pages, slots, 576]` in boxes of `[1, rows, 64]`, swizzled by 128 bytes.
        48 map: [u64; 16],
    }

    /// The parameters of `store_latent_fp8`, by value: rows of K alone.
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    pub struct StoreLatentFp8Params: 152 {
        /// The store of the quantised part: one head, which is the first `head_dim` numbers of a row.
        0 store: StoreFp8Params,
        /// Where the other numbers of a row are stored.
        128 rope: LayerRope,
    }
}
