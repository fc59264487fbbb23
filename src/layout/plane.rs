//! A plane: what each token stores in each layer.
//!
//! Not here: where planes are (`pool.rs`).

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
    /// Scales of K that are made at the store: one f32 for each token and head. For latent rows, the scales of the
    /// quantised numbers.
    KScales,
    /// The same for V.
    VScales,
    /// Rows of which K and V are made: see [`KvShape::Latent`](crate::KvShape::Latent). Where they are quantised, the
    /// numbers that K and V share.
    Latent,
    /// The numbers of latent rows that turn with the position, where the others are quantised.
    Rope,
    /// Some channels of K once more, which sparse reads score tokens by.
    Labels,
    /// Nothing that anyone reads: tests of pools with more planes than K and V.
    #[cfg(any(test, feature = "testkit"))]
    #[doc(hidden)]
    Spare,
}

/// Order of a piece: one page of one plane of one layer.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize), serde(rename_all = "snake_case"))]
pub enum PlaneOrder {
    /// `[S, heads, elements]`: all that a token stores is contiguous.
    BySlot,
    /// `[heads, S, elements]`, padded to 16 bytes: all that a head stores in a page is contiguous.
    ByPage,
}

/// What each token stores in each layer: `[heads, elements]` numbers.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Plane {
    /// Its contents.
    pub name: PlaneName,
    /// Heads, on this rank.
    pub heads: u32,
    /// Elements of one head.
    pub elements: u32,
    /// Type of the elements.
    pub dtype: KvDtype,
    /// Order of a page.
    pub order: PlaneOrder,
}

impl Plane {
    /// Returns the bytes of one head of one token.
    pub(super) const fn head_bytes(&self) -> u64 {
        self.elements as u64 * self.dtype.size() as u64
    }

    /// Returns the bytes of one token in one layer: at most 2^67.
    pub(super) const fn row_bytes(&self) -> u128 {
        self.heads as u128 * self.head_bytes() as u128
    }

    /// Returns the alignment of a page block, so that every plane starts aligned for its element type. Blocks of few
    /// numbers a head are aligned to the width of a kernel's load, and so are K and V next to them.
    pub(super) const fn align(&self) -> u64 {
        match (self.name, self.order) {
            (PlaneName::Labels, _) | (_, PlaneOrder::ByPage) => 16,
            (_, PlaneOrder::BySlot) => self.dtype.size() as u64,
        }
    }
}
