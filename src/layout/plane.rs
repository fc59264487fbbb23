//! Planes: the buffers of a pool, such as K and V. `pool.rs` computes their addresses.

use super::dtype::KvDtype;

/// The contents of a plane.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize), serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum PlaneName {
    /// Keys.
    K,
    /// Values.
    V,
    /// Scales of K, computed at the store: one f32 for each token and head. For latent rows, scales of the numbers that
    /// K and V share.
    KScales,
    /// Scales of V, computed at the store.
    VScales,
    /// Latent rows, from which all heads derive K and V ([`KvShape::Latent`](crate::KvShape::Latent)). In a quantised
    /// pool, only the numbers that K and V share.
    Latent,
    /// The rotary numbers of latent rows in a quantised pool; they stay bf16.
    Rope,
    /// Copies of some channels of K, from which sparse reads compute the scores of tokens.
    Labels,
    /// An unused plane, for tests of pools with more planes than K and V.
    #[cfg(any(test, feature = "testkit"))]
    Spare,
}

/// Order of the numbers in a piece, which is one page of one plane of one layer.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize), serde(rename_all = "snake_case"))]
pub enum PlaneOrder {
    /// `[page_size, heads, elements]`: the numbers of one token are contiguous.
    BySlot,
    /// `[heads, page_size, elements]`, padded to a multiple of 16 bytes: the numbers of one head in a page are
    /// contiguous.
    ByPage,
}

/// A plane: one buffer of the pool, in which each token stores `[heads, elements]` numbers in each layer.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Plane {
    /// Contents of the plane.
    pub name: PlaneName,
    /// Number of heads on this rank.
    pub heads: u32,
    /// Number of elements of one head.
    pub elements: u32,
    /// Type of the elements.
    pub dtype: KvDtype,
    /// Order of the numbers in a piece.
    pub order: PlaneOrder,
}

impl Plane {
    /// Returns the bytes of one head of one token.
    pub(crate) const fn head_bytes(&self) -> u64 {
        self.elements as u64 * self.dtype.size() as u64
    }

    /// Returns the bytes of one token in one layer, at most 2^67.
    pub(super) const fn row_bytes(&self) -> u128 {
        self.heads as u128 * self.head_bytes() as u128
    }

    /// Returns the alignment of the plane's pieces in bytes. Kernels load scales and labels 16 bytes at a time; other
    /// planes need the alignment of their element type. [`Planes`](super::planes::Planes) aligns every piece to the
    /// maximum.
    pub(super) const fn align(&self) -> u64 {
        match (self.name, self.order) {
            (PlaneName::Labels, _) | (_, PlaneOrder::ByPage) => 16,
            (_, PlaneOrder::BySlot) => self.dtype.size() as u64,
        }
    }
}
