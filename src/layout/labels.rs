//! Label channels: the channels of K from which sparse reads compute the scores of tokens.
//!
//! Double Sparsity (Yang et al. 2024, arXiv:2408.07092) selects offline, for each head, the few channels that
//! contribute most to the logits. `planes.rs` places the labels, and `backend/` computes the scores.

use super::config::PoolConfig;
use super::plane::PlaneName;
use super::pool::PoolLayout;
use crate::error::{ConfigError, Count, displayed};
use crate::id::LayerId;

/// The label channels of each head, `[layers, kv_heads, channels]`, strictly ascending. [`LabelChannels::local`] and
/// backends reject channels that are not below `head_dim`.
///
/// ```
/// # use kvarena::{KvShape, LayerId, PoolConfig};
/// # use kvarena::layout::LabelChannels;
/// let shape = KvShape::heads(4, 64);
/// let pool = PoolConfig { layers: 1, shape, label_channels: 2, tp_size: 2, tp_rank: 1, ..Default::default() };
/// let model = LabelChannels::new(1, 4, 2, vec![0, 1, 8, 40, 3, 63, 16, 17])?;
/// let rank = model.local(&pool)?; // for `CpuOptions::labels`
/// assert_eq!((rank.kv_heads(), rank.get(LayerId::new(0), 0)), (2, &[3, 63][..]));
/// # Ok::<(), kvarena::layout::LabelError>(())
/// ```
#[derive(Clone, PartialEq, Eq, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(try_from = "Unchecked"))]
pub struct LabelChannels {
    layers: u32,
    kv_heads: u32,
    channels: u32,
    values: Box<[u32]>,
}

/// The serialised form of [`LabelChannels`].
#[cfg(feature = "serde")]
#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct Unchecked {
    layers: u32,
    kv_heads: u32,
    channels: u32,
    values: Vec<u32>,
}

#[cfg(feature = "serde")]
impl TryFrom<Unchecked> for LabelChannels {
    type Error = LabelError;

    fn try_from(read: Unchecked) -> Result<Self, LabelError> {
        Self::new(read.layers, read.kv_heads, read.channels, read.values)
    }
}

impl LabelChannels {
    /// Creates channels of a model or of one rank from values in the order `[layers, kv_heads, channels]`. O(values).
    ///
    /// # Errors
    /// [`LabelError::Count`] for a wrong number of values; [`LabelError::Order`] if the channels of a head do not
    /// ascend.
    pub fn new(layers: u32, kv_heads: u32, channels: u32, values: Vec<u32>) -> Result<Self, LabelError> {
        // The saturated product exceeds the length of any vector.
        let heads = u64::from(layers) * u64::from(kv_heads);
        let wanted = heads.saturating_mul(channels.into());
        if values.len() as u64 != wanted {
            return Err(LabelError::Count { actual: values.len(), wanted });
        }
        let of_heads = values.chunks_exact((channels as usize).max(1));
        for (row, head) in of_heads.enumerate() {
            if let Some(at) = head.windows(2).position(|pair| pair[0] >= pair[1]) {
                let (layer, kv_head) = head_of(row, kv_heads);
                return Err(LabelError::Order { layer, kv_head, channel: head[at + 1] });
            }
        }
        Ok(Self { layers, kv_heads, channels, values: values.into() })
    }

    /// Returns the number of layers.
    pub const fn layers(&self) -> u32 {
        self.layers
    }

    /// Returns the number of kv heads.
    pub const fn kv_heads(&self) -> u32 {
        self.kv_heads
    }

    /// Returns the number of channels of each head.
    pub const fn channels(&self) -> u32 {
        self.channels
    }

    /// Returns all channels, `[layers, kv_heads, channels]`.
    pub const fn values(&self) -> &[u32] {
        &self.values
    }

    /// Returns the channels of one head.
    ///
    /// # Panics
    /// If there is no such layer or head.
    pub fn get(&self, layer: LayerId, head: u32) -> &[u32] {
        assert!(layer.raw() < self.layers && head < self.kv_heads);
        let row = layer.index() * self.kv_heads as usize + head as usize;
        let channels = self.channels as usize;
        &self.values[row * channels..(row + 1) * channels]
    }

    /// Returns the channels of a rank's heads, from those of the model. O(values).
    ///
    /// # Errors
    /// [`LabelError::Size`] if the pool has other numbers of layers, heads or channels; [`LabelError::Channel`] for a
    /// channel that a head lacks; [`LabelError::Config`] for invalid heads or ranks of the pool.
    pub fn local(&self, pool: &PoolConfig) -> Result<Self, LabelError> {
        let [first, count] = [pool.first_kv_head()?, pool.local_kv_heads()?].map(|x| x as usize);
        self.check_size([pool.layers, pool.shape.kv_heads(), pool.label_channels])?;
        self.check_head_dim(pool.shape.head_dim())?;
        let channels = self.channels as usize;
        let layers = self.values.chunks_exact((self.kv_heads as usize * channels).max(1));
        let values = layers.flat_map(|layer| &layer[first * channels..(first + count) * channels]);
        Ok(Self { kv_heads: count as u32, values: values.copied().collect(), ..*self })
    }

    /// Rejects channels that do not fit a rank's pool, and missing channels of a pool with labels.
    pub(crate) fn check_pool(given: Option<&Self>, pool: &PoolLayout) -> Result<(), LabelError> {
        let channels = pool.label_channels();
        match given {
            None if channels == 0 => Ok(()),
            None => Err(LabelError::Missing { channels }),
            Some(_) if channels == 0 => Err(LabelError::NoLabels),
            Some(given) => {
                given.check_size([pool.layers(), pool.kv_heads(), channels])?;
                given.check_head_dim(pool.head_dim())
            }
        }
    }

    fn check_size(&self, pool: [u32; 3]) -> Result<(), LabelError> {
        let given = [self.layers, self.kv_heads, self.channels];
        if given == pool { Ok(()) } else { Err(LabelError::Size { given, pool }) }
    }

    fn check_head_dim(&self, head_dim: u32) -> Result<(), LabelError> {
        let Some(at) = self.values.iter().position(|&channel| channel >= head_dim) else {
            return Ok(());
        };
        let (layer, kv_head) = head_of(at / self.channels as usize, self.kv_heads);
        Err(LabelError::Channel { layer, kv_head, channel: self.values[at], head_dim })
    }
}

pub(super) fn head_of(row: usize, kv_heads: u32) -> (LayerId, u32) {
    let heads = kv_heads as usize;
    (LayerId::new((row / heads) as u32), (row % heads) as u32)
}

impl PoolLayout {
    /// Returns the number of channels of K that each token stores as labels; 0 for none. O(planes).
    pub fn label_channels(&self) -> u32 {
        let labels = self.planes().iter().find(|plane| plane.name == PlaneName::Labels);
        labels.map_or(0, |plane| plane.elements)
    }
}

displayed! {
    /// The reason why channels are invalid.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    #[non_exhaustive]
    pub enum LabelError {
        /// The number of values does not match the layers, heads and channels.
        Count {
            /// Values given.
            actual: usize,
            /// Number of values that the layers, heads and channels need.
            wanted: u64,
        } => "{}, expected {wanted}", Count(actual, "channel");
        /// A channel is not above the one before it.
        Order { layer: LayerId, kv_head: u32, channel: u32 } =>
            "channel {channel} of {layer:?}, head {kv_head}, is not above the channel before it";
        /// A channel is not below the number of a head's elements.
        Channel { layer: LayerId, kv_head: u32, channel: u32, head_dim: u32 } =>
            "channel {channel} of {layer:?}, head {kv_head}, is past a head of {}", Count(head_dim, "element");
        /// The pool has another number of layers, heads or channels. Both fields are `[layers, kv_heads, channels]`.
        Size {
            /// The numbers of the channels.
            given: [u32; 3],
            /// The numbers of the pool: those of the model for [`LabelChannels::local`], those of the rank for a
            /// backend.
            pool: [u32; 3],
        } => "labels of {} for a pool of {}", size(given), size(pool);
        /// The pool has labels, but no channels are given.
        Missing {
            /// Channels of each head.
            channels: u32,
        } => "the pool has {} for each head, but no channels are given", Count(channels, "label channel");
        /// Channels are given, but the pool has no labels.
        NoLabels => "channels are given, but the pool has no labels";
        /// The pool's config is invalid.
        Config(error: ConfigError) => "{error}";
    }
}

fn size([layers, heads, channels]: [u32; 3]) -> String {
    format!("{}, {}, {}", Count(layers, "layer"), Count(heads, "kv head"), Count(channels, "channel"))
}

impl From<ConfigError> for LabelError {
    fn from(error: ConfigError) -> Self {
        Self::Config(error)
    }
}

impl std::error::Error for LabelError {}
