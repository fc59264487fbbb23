//! What the kernels over latent rows of fp8 are given.

use core::mem::{offset_of, size_of};

use super::{AttendParams, LayerScales, StoreFp8Params};

/// Where what is not quantised of one layer's latent rows of fp8 is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(C)]
pub struct LayerRope {
    /// Device address of bf16 `[elements]`: of page p, slot s at `+ p * page_stride + s * slot_stride`.
    pub at: u64,
    /// Bytes from page to page.
    pub page_stride: u64,
    /// Bytes from slot to slot.
    pub slot_stride: u32,
    /// Numbers of a token.
    pub elements: u32,
}

/// What `attend_latent_fp8_*` take, by value.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
#[repr(C)]
pub struct AttendLatentFp8Params {
    /// K's bytes are V's too, and so are their strides.
    pub attend: AttendParams,
    /// K's scales are V's too; each token has one.
    pub scales: LayerScales,
    /// What K has behind its bytes.
    pub rope: LayerRope,
}

/// What `store_latent_fp8` takes, by value: rows of K alone.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(C)]
pub struct StoreLatentFp8Params {
    /// Of one head, the first `head_dim` numbers of a row.
    pub store: StoreFp8Params,
    /// Where the others go.
    pub rope: LayerRope,
}

super::layout_is! {
    LayerRope 24 { at 0 page_stride 8 slot_stride 16 elements 20 }
    AttendLatentFp8Params 264 { attend 0 scales 208 rope 240 }
    StoreLatentFp8Params 152 { store 0 rope 128 }
}
