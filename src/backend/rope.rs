//! Norm and rotation of q and k: the parameters of [`Backend::rope_store`](super::Backend::rope_store).

use super::PlanError;
use crate::layout::{KvShape, PoolLayout};

/// Norm and rotary position embedding of the heads of q and k.
///
/// A head `x` of a layer with a norm becomes `x / sqrt(mean(x^2) + eps) * weight` first. Then pair `i` of it, elements
/// `i` and `i + head_dim / 2`, is rotated by `position * frequencies[i]` radians. Backends compute in f32.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Rope<R, F> {
    /// Query heads on this rank.
    pub q_heads: u32,
    /// Weights of the norm of q's heads, `[head_dim]` in the rows' type; `None`: no norm.
    pub q_norm: Option<R>,
    /// Weights of the norm of k's heads.
    pub k_norm: Option<R>,
    /// Added to the mean of squares.
    pub eps: f32,
    /// f32 `[head_dim / 2]`: radians from one position to the next, of each pair.
    pub frequencies: F,
}

/// Rejects pools without heads of pairs.
pub(super) fn check(layout: &PoolLayout) -> Result<(), PlanError> {
    match layout.shape() {
        shape @ KvShape::Latent { .. } => Err(PlanError::Rope { shape }),
        shape if !layout.head_dim().is_multiple_of(2) => Err(PlanError::Rope { shape }),
        _ => Ok(()),
    }
}
