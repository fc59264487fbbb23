//! Static scales of a quantised pool, which the host gives. A quantised number is the value of a byte times a scale.

use super::config::PoolConfig;
use super::dtype::Scaling;
use super::labels::head_of;
use super::plane::PlaneName;
use super::pool::PoolLayout;
use crate::error::{ConfigError, Count, displayed};
use crate::id::LayerId;

/// Static scales, `[layers, kv_heads, K and V]`: finite and above 0.
///
/// ```
/// # use kvarena::{KvDtype, KvShape, LayerId, PoolConfig};
/// # use kvarena::layout::KvScales;
/// let shape = KvShape::heads(4, 64);
/// let pool = PoolConfig { layers: 2, shape, dtype: KvDtype::Fp8E4M3, tp_size: 2, tp_rank: 1, ..Default::default() };
/// let model = KvScales::new(2, 4, (1..=16).map(|x| x as f32).collect())?;
/// let rank = model.local(&pool)?; // for `CpuOptions::scales`
/// assert_eq!((rank.kv_heads(), rank.get(LayerId::new(1), 0)), (2, [13.0, 14.0]));
/// # Ok::<(), kvarena::layout::ScaleError>(())
/// ```
#[derive(Clone, PartialEq, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(try_from = "Unchecked"))]
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

const PLANES: [PlaneName; 2] = [PlaneName::K, PlaneName::V];

impl KvScales {
    /// Creates scales of a model or of one rank from values in the order `[layers, kv_heads, K and V]`. O(scales).
    ///
    /// # Errors
    /// [`ScaleError::Count`] for a wrong number of values; [`ScaleError::Value`] for a scale that is not finite or not
    /// above 0.
    pub fn new(layers: u32, kv_heads: u32, values: Vec<f32>) -> Result<Self, ScaleError> {
        // The saturated product exceeds the length of any vector.
        let wanted = (u64::from(layers) * u64::from(kv_heads)).saturating_mul(2);
        if values.len() as u64 != wanted {
            return Err(ScaleError::Count { actual: values.len(), wanted });
        }
        let sound = |scale: f32| scale.is_finite() && scale > 0.0;
        if let Some(at) = values.iter().position(|&scale| !sound(scale)) {
            let (row, plane) = (at / 2, PLANES[at % 2]);
            let (layer, head) = head_of(row, kv_heads);
            return Err(ScaleError::Value { layer, head, plane, scale: values[at] });
        }
        Ok(Self { layers, kv_heads, values: values.into() })
    }

    /// Returns the number of layers.
    pub const fn layers(&self) -> u32 {
        self.layers
    }

    /// Returns the number of kv heads.
    pub const fn kv_heads(&self) -> u32 {
        self.kv_heads
    }

    /// Returns all scales, `[layers, kv_heads, K and V]`.
    pub const fn values(&self) -> &[f32] {
        &self.values
    }

    /// Returns the scales of K and V of one head.
    ///
    /// # Panics
    /// If there is no such layer or head.
    pub fn get(&self, layer: LayerId, head: u32) -> [f32; 2] {
        assert!(layer.raw() < self.layers && head < self.kv_heads);
        let row = layer.index() * self.kv_heads as usize + head as usize;
        [self.values[2 * row], self.values[2 * row + 1]]
    }

    /// Returns the scales of a rank's heads, from those of the model. O(scales).
    ///
    /// If groups have their own shapes, every layer has as many scales as the layer with the most heads. Scales beyond
    /// a layer's heads are unused, and 1 in the result.
    ///
    /// # Errors
    /// [`ScaleError::Size`] if the pool has other numbers of layers or heads; [`ScaleError::Config`] for invalid heads
    /// or ranks of the pool.
    pub fn local(&self, pool: &PoolConfig) -> Result<Self, ScaleError> {
        let groups = 0..pool.groups.count();
        let shapes: Vec<_> = groups.map(|group| pool.shape_of(group)).collect();
        let heads: Result<Vec<_>, _> = shapes.iter().map(|&shape| pool.heads_of(shape)).collect();
        let heads = heads?;
        let most = |counts: &mut dyn Iterator<Item = u32>| counts.max().expect("there is a group");
        self.check_size(pool.layers, most(&mut shapes.iter().map(|shape| shape.kv_heads())))?;
        let kv_heads = most(&mut heads.iter().map(|heads| heads.end - heads.start));
        let mut values = Vec::with_capacity(2 * self.layers as usize * kv_heads as usize);
        for layer in (0..self.layers).map(LayerId::new) {
            let own = heads[pool.groups.group(layer) as usize].clone();
            values.extend(own.flat_map(|head| self.get(layer, head)));
            values.resize(2 * (layer.index() + 1) * kv_heads as usize, 1.0);
        }
        Ok(Self { layers: self.layers, kv_heads, values: values.into() })
    }

    /// Rejects scales that do not fit a rank's pool.
    pub(crate) fn check_pool(&self, pool: &PoolLayout) -> Result<(), ScaleError> {
        if !pool.views().any(|group| group.scaling() == Some(Scaling::Static)) {
            return Err(ScaleError::NotStatic);
        }
        self.check_size(pool.layers(), pool.most_kv_heads())
    }

    /// Returns whether all scales are 1, the default.
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

displayed! {
    /// The reason why scales are invalid.
    #[derive(Clone, Copy, PartialEq, Debug)]
    #[non_exhaustive]
    pub enum ScaleError {
        /// The number of values does not match the layers and heads.
        Count {
            /// Values given.
            actual: usize,
            /// Number of values that the layers and heads need.
            wanted: u64,
        } => "{}, expected {wanted}", Count(actual, "scale");
        /// A scale is not finite, or not above 0.
        Value { layer: LayerId, head: u32, plane: PlaneName, scale: f32 } =>
            "scale {scale} of {plane:?}, {layer:?}, head {head}, is not above 0 and finite";
        /// The pool has another number of layers or heads.
        Size {
            /// Layers of the scales.
            layers: u32,
            /// Heads of the scales.
            kv_heads: u32,
            pool_layers: u32,
            /// Maximum number of kv heads of the pool's layers: of the model for [`KvScales::local`], of the rank for a
            /// backend.
            pool_kv_heads: u32,
        } => "scales of {} and {} for a pool of {} and {}", Count(layers, "layer"), Count(kv_heads, "kv head"),
            Count(pool_layers, "layer"), Count(pool_kv_heads, "kv head");
        /// The pool computes its scales, or has none.
        NotStatic => "the pool takes no static scales";
        /// The pool's config is invalid.
        Config(error: ConfigError) => "{error}";
    }
}

impl From<ConfigError> for ScaleError {
    fn from(error: ConfigError) -> Self {
        Self::Config(error)
    }
}

impl std::error::Error for ScaleError {}
