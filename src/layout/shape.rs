//! The shape of K and V: the planes that each token stores, and their division among ranks.

use super::dtype::{KvDtype, Scaling};
use super::plane::{Plane, PlaneName, PlaneOrder};
use super::planes::Planes;
use crate::error::ConfigError;

/// The shape of a model's K and V.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(rename_all = "snake_case", deny_unknown_fields)
)]
#[non_exhaustive]
pub enum KvShape {
    /// Heads of K and as many of V, for multi-head, grouped-query and multi-query attention.
    Heads {
        /// Number of heads of K, and of V.
        kv_heads: u32,
        /// Number of elements of one head.
        head_dim: u32,
    },
    /// Latent rows, from which all heads derive K and V (multi-head latent attention, arXiv:2405.04434).
    ///
    /// The plane [`PlaneName::Latent`] has `rank + rope` numbers for each token: K is the whole row, V its first `rank`
    /// numbers. The host folds the up-projections of K and V into its queries and outputs. Then q is
    /// `[tokens, q_heads, rank + rope]`, and the output is `[tokens, q_heads, rank]`. The scale of attention is that of
    /// the model's heads before folding. Every tensor-parallel rank stores all rows.
    ///
    /// In a quantised pool, the first `rank` numbers are bytes times a scale of the token ([`Scaling::ByToken`] only).
    /// The others are bf16 in the plane [`PlaneName::Rope`].
    ///
    /// ```
    /// # use kvarena::*;
    /// let shape = KvShape::Latent { rank: 512, rope: 64 };
    /// let deepseek_v3 = PoolConfig { layers: 61, shape, dtype: KvDtype::Bf16, tp_size: 8, ..Default::default() };
    /// assert_eq!(deepseek_v3.bytes_per_token(), Ok(61 * 1_152));
    /// ```
    #[doc(alias = "mla")]
    Latent {
        /// Number of elements that K and V share.
        #[doc(alias = "kv_lora_rank")]
        rank: u32,
        /// Number of further elements, of K alone, with rotary positions.
        #[doc(alias = "qk_rope_head_dim")]
        rope: u32,
    },
}

impl KvShape {
    /// Creates a shape of heads.
    pub const fn heads(kv_heads: u32, head_dim: u32) -> Self {
        Self::Heads { kv_heads, head_dim }
    }

    pub(super) fn planes(self, dtype: KvDtype, scaling: Scaling) -> Planes {
        match self {
            Self::Heads { kv_heads: heads, head_dim: elements } => {
                let order = PlaneOrder::BySlot;
                let plane = |name| Plane { name, heads, elements, dtype, order };
                let [k, v] = [PlaneName::K, PlaneName::V].map(plane);
                if !dtype.is_quantised() || scaling == Scaling::Static {
                    return Planes::new(&[k, v]);
                }
                let scale = Plane { elements: 1, dtype: KvDtype::F32, order: PlaneOrder::ByPage, ..k };
                let scales = [PlaneName::KScales, PlaneName::VScales];
                let [k_scales, v_scales] = scales.map(|name| Plane { name, ..scale });
                Planes::new(&[k, v, k_scales, v_scales])
            }
            Self::Latent { rank, rope } => {
                let (name, elements) = (PlaneName::Latent, self.head_dim());
                let row = Plane { name, heads: 1, elements, dtype, order: PlaneOrder::BySlot };
                if !dtype.is_quantised() {
                    return Planes::new(&[row]);
                }
                let dtype = dtype.rows().into();
                let scale = Plane {
                    name: PlaneName::KScales,
                    elements: 1,
                    dtype: KvDtype::F32,
                    order: PlaneOrder::ByPage,
                    ..row
                };
                let rope = Plane { name: PlaneName::Rope, elements: rope, dtype, ..row };
                Planes::new(&[Plane { elements: rank, ..row }, rope, scale])
            }
        }
    }

    /// Rejects shapes without elements, latent rows of 2^32 or more elements, and static scales of quantised latent
    /// rows.
    pub(super) fn check(self, dtype: KvDtype, scaling: Scaling) -> Result<(), ConfigError> {
        match self {
            Self::Heads { kv_heads: 0, .. } => Err(ConfigError::Zero { name: "kv_heads" }),
            Self::Heads { head_dim: 0, .. } => Err(ConfigError::Zero { name: "head_dim" }),
            Self::Heads { .. } => Ok(()),
            Self::Latent { rank: 0, .. } => Err(ConfigError::Zero { name: "rank" }),
            Self::Latent { rope: 0, .. } => Err(ConfigError::Zero { name: "rope" }),
            Self::Latent { rank, rope } if rank.checked_add(rope).is_none() => {
                Err(ConfigError::Overflow { name: "rank + rope" })
            }
            Self::Latent { .. } if dtype.is_quantised() && scaling == Scaling::Static => {
                Err(ConfigError::LatentScaling { dtype })
            }
            Self::Latent { .. } => Ok(()),
        }
    }

    /// Returns the shape on each of `ranks` ranks.
    pub(super) fn split(self, ranks: u32) -> Result<Self, ConfigError> {
        match self {
            Self::Heads { kv_heads, head_dim } => {
                if kv_heads == 0 {
                    Err(ConfigError::Zero { name: "kv_heads" })
                } else if kv_heads.is_multiple_of(ranks) {
                    Ok(Self::heads(kv_heads / ranks, head_dim))
                } else if ranks.is_multiple_of(kv_heads) {
                    Ok(Self::heads(1, head_dim))
                } else {
                    Err(ConfigError::HeadSplit { kv_heads, tp_size: ranks })
                }
            }
            Self::Latent { .. } => Ok(self),
        }
    }

    pub(super) const fn kv_heads(self) -> u32 {
        match self {
            Self::Heads { kv_heads, .. } => kv_heads,
            Self::Latent { .. } => 1,
        }
    }

    /// Returns the number of elements of one head of K. `check` rejects a sum beyond 32 bits.
    pub(super) const fn head_dim(self) -> u32 {
        match self {
            Self::Heads { head_dim, .. } => head_dim,
            Self::Latent { rank, rope } => rank.saturating_add(rope),
        }
    }

    pub(super) const fn value_dim(self) -> u32 {
        match self {
            Self::Heads { head_dim, .. } => head_dim,
            Self::Latent { rank, .. } => rank,
        }
    }

    /// Returns the maximum number of labels of one head of K. Latent rows have none.
    pub(super) const fn labels_max(self) -> u32 {
        match self {
            Self::Heads { head_dim, .. } => head_dim,
            Self::Latent { .. } => 0,
        }
    }
}
