//! Scales that are given for a quantised pool.
//!
//! A quantised number is the value of a byte times a scale.
//!
//! Not here: how a backend makes bytes and scales, and the planes of scales made at the store (`shape.rs`).

use std::fmt;

use super::config::PoolConfig;
use super::dtype::Scaling;
use super::plane::PlaneName;
use super::pool::PoolLayout;
use crate::error::{ConfigError, Count};
use crate::id::LayerId;

/// Given scales, `[layers, kv_heads, K and V]`: finite and above 0.
///
/// ```
/// # use kvarena::{KvDtype, KvScales, KvShape, LayerId, PoolConfig};
/// let shape = KvShape::heads(4, 64);
/// let pool = PoolConfig { layers: 2, shape, dtype: KvDtype::Fp8E4M3, tp_size: 2, tp_rank: 1, ..Default::default() };
/// let model = KvScales::new(2, 4, (1..=16).map(|x| x as f32).collect())?;
/// let rank = model.local(&pool)?; // for `CpuOptions::scales`
/// assert_eq!((rank.kv_heads(), rank.get(LayerId::new(1), 0)), (2, [13.0, 14.0]));
/// # Ok::<(), kvarena::ScaleError>(())
/// ```
#[derive(Clone, PartialEq, Debug)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(try_from = "Unchecked")
)]
pub struct KvScales {
    layers: u32,
    kv_heads: u32,
    values: Box<[f32]>,
}

/// The serialised form of [`KvScales`].
#[cfg(feature = "serde")]
#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct Unchecked {
    layers: u32,
    kv_heads: u32,
    values: Vec<f32>,
}

#[cfg(feature = "serde")]
impl TryFrom<Unchecked> for KvScales {
    type Error = ScaleError;

    fn try_from(read: Unchecked) -> Result<Self, ScaleError> {
        Self::new(read.layers, read.kv_heads, read.values)
    }
}

/// K and V.
const PLANES: [PlaneName; 2] = [PlaneName::K, PlaneName::V];

impl KvScales {
    /// Creates scales from values in the order `[layers, kv_heads, K and V]`, of a model or of one rank. O(scales).
    ///
    /// # Errors
    /// Another number of values, or one that is not finite or not above 0.
    pub fn new(layers: u32, kv_heads: u32, values: Vec<f32>) -> Result<Self, ScaleError> {
        // Twice two 32-bit numbers; what is more than that is no vector's length either.
        let wanted = (u64::from(layers) * u64::from(kv_heads)).saturating_mul(2);
        if values.len() as u64 != wanted {
            return Err(ScaleError::Count { actual: values.len(), wanted });
        }
        let sound = |scale: f32| scale.is_finite() && scale > 0.0;
        if let Some(at) = values.iter().position(|&scale| !sound(scale)) {
            let (row, plane) = (at / 2, PLANES[at % 2]);
            let layer = LayerId::new((row / kv_heads as usize) as u32);
            let head = (row % kv_heads as usize) as u32;
            return Err(ScaleError::Value { layer, head, plane, scale: values[at] });
        }
        Ok(Self { layers, kv_heads, values: values.into() })
    }

    /// Returns the layers.
    pub const fn layers(&self) -> u32 {
        self.layers
    }

    /// Returns the heads of K, and of V.
    pub const fn kv_heads(&self) -> u32 {
        self.kv_heads
    }

    /// Returns all of them, `[layers, kv_heads, K and V]`.
    pub const fn values(&self) -> &[f32] {
        &self.values
    }

    /// Returns the scales of K and V of one head.
    ///
    /// # Panics
    /// Past the layers or heads.
    pub fn get(&self, layer: LayerId, head: u32) -> [f32; 2] {
        assert!(layer.raw() < self.layers && head < self.kv_heads);
        let row = layer.index() * self.kv_heads as usize + head as usize;
        [self.values[2 * row], self.values[2 * row + 1]]
    }

    /// Returns the scales of the heads of a pool's rank, from those of the model. O(scales).
    ///
    /// # Errors
    /// A pool of other layers or heads than the model's, or that is refused itself.
    pub fn local(&self, pool: &PoolConfig) -> Result<Self, ScaleError> {
        let [first, count] = [pool.first_kv_head()?, pool.local_kv_heads()?].map(|x| x as usize);
        self.check_size(pool.layers, pool.shape.kv_heads())?;
        let layers = self.values.chunks_exact(2 * self.kv_heads as usize);
        let values = layers.flat_map(|layer| &layer[2 * first..2 * (first + count)]);
        Ok(Self { layers: self.layers, kv_heads: count as u32, values: values.copied().collect() })
    }

    /// Rejects scales that do not fit a pool's rank.
    pub(crate) fn check_pool(&self, pool: &PoolLayout) -> Result<(), ScaleError> {
        if pool.scaling() != Some(Scaling::Static) {
            return Err(ScaleError::NotStatic);
        }
        self.check_size(pool.layers(), pool.kv_heads())
    }

    /// Returns whether all of them are 1, as they are where none are given.
    pub(super) fn are_ones(&self) -> bool {
        self.values.iter().all(|&scale| scale == 1.0)
    }

    fn check_size(&self, pool_layers: u32, pool_kv_heads: u32) -> Result<(), ScaleError> {
        let Self { layers, kv_heads, .. } = *self;
        if (layers, kv_heads) == (pool_layers, pool_kv_heads) {
            Ok(())
        } else {
            Err(ScaleError::Size { layers, kv_heads, pool_layers, pool_kv_heads })
        }
    }
}

/// The reason why scales are not valid.
#[derive(Clone, Copy, PartialEq, Debug)]
#[non_exhaustive]
pub enum ScaleError {
    /// Another number of values than layers and heads have.
    Count {
        /// Values given.
        actual: usize,
        /// The values that the layers and heads need.
        wanted: u64,
    },
    /// A scale that is not finite, or not above 0.
    Value {
        /// The layer.
        layer: LayerId,
        /// The head.
        head: u32,
        /// K or V.
        plane: PlaneName,
        /// The scale.
        scale: f32,
    },
    /// Scales of other layers or heads than the pool's.
    Size {
        /// Layers of the scales.
        layers: u32,
        /// Heads of the scales.
        kv_heads: u32,
        /// Layers of the pool.
        pool_layers: u32,
        /// Heads of the pool: the model's for [`KvScales::local`], those of its rank for a backend.
        pool_kv_heads: u32,
    },
    /// Scales for a pool that makes its own, or has none.
    NotStatic,
    /// The pool's config is refused.
    Config(ConfigError),
}

impl From<ConfigError> for ScaleError {
    fn from(error: ConfigError) -> Self {
        Self::Config(error)
    }
}

impl fmt::Display for ScaleError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Count { actual, wanted } => {
                write!(f, "{} where {wanted} belong", Count(actual as u64, "scale"))
            }
            Self::Value { layer, head, plane, scale } => {
                write!(f, "scale {scale} of {plane:?}, {layer:?}, head {head}, ")?;
                f.write_str("is not above 0 and finite")
            }
            Self::Size { layers, kv_heads, pool_layers, pool_kv_heads } => {
                let size = |layers: u32, heads: u32| {
                    (Count(layers.into(), "layer"), Count(heads.into(), "kv head"))
                };
                let (layers, heads) = size(layers, kv_heads);
                let (pool_layers, pool_heads) = size(pool_layers, pool_kv_heads);
                write!(
                    f,
                    "scales of {layers} and {heads} for a pool of {pool_layers} and {pool_heads}"
                )
            }
            Self::NotStatic => write!(f, "the pool has no scales that are given"),
            Self::Config(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for ScaleError {}
