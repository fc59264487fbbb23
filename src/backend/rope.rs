//! Norm and rotation of q and k: the parameters of [`Backend::rope_store`](super::Backend::rope_store).

use super::PlanError;
use crate::layout::{KvShape, PoolLayout};

/// Norm and rotary position embedding of the heads of q and k.
///
/// In a layer with a norm, a head `x` first becomes `x / sqrt(mean(x^2) + eps) * weight`. Then each pair of elements
/// `i` and `i + head_dim / 2` is rotated by `position * frequencies[i]` radians. Backends compute in f32.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Rope<R, F> {
    /// Number of query heads on this rank.
    pub q_heads: u32,
    /// Weights of the norm of q's heads, `[head_dim]` in the rows' type; `None` for no norm.
    pub q_norm: Option<R>,
    /// Weights of the norm of k's heads.
    pub k_norm: Option<R>,
    /// Added to the mean of squares.
    pub eps: f32,
    /// f32 `[head_dim / 2]`: radians per position for each pair.
    pub frequencies: F,
}

/// Rejects pools without heads, and heads with an odd number of elements.
pub(super) fn check(layout: &PoolLayout) -> Result<(), PlanError> {
    match layout.shape() {
        shape @ KvShape::Latent { .. } => Err(PlanError::Rope { shape }),
        shape if !layout.head_dim().is_multiple_of(2) => Err(PlanError::Rope { shape }),
        _ => Ok(()),
    }
}
