//! Groups of layers, by the tokens that they read: all, a window, a chunk, or none, because they keep a state.
//!
//! A page contains `page_size` tokens of `lanes` layers; `lanes` is the number of layers of group 0, which reads all
//! tokens. A group of n layers has `ceil(n / lanes)` *tracks*, each with its own page table. Layer i of the group is
//! lane `i % lanes` of its track `i / lanes`. All groups share one pool of pages.
//!
//! A group with another shape or dtype has as many lanes as fit in the bytes of a page. `limits.rs` computes the pages
//! that a sequence keeps. Layers that keep a state have no page table (`state.rs`). A further group that reads all
//! tokens has none either: its layers lie in group 0's pages, behind group 0's, so their K and V come and go together.

use std::fmt;

use super::dtype::KvDtype;
use super::shape::KvShape;
use crate::error::ConfigError;
use crate::id::LayerId;

/// Maximum number of groups.
pub const GROUPS_MAX: usize = 4;

/// Maximum number of layers in groups.
pub const GROUPED_LAYERS_MAX: usize = 256;

/// Maximum number of parts of a state.
pub const STATE_PARTS_MAX: usize = 4;

const WORD: u32 = u64::BITS;

/// The range of tokens that a token reads.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum Reach {
    /// All tokens up to itself.
    All,
    /// The last tokens, this many including itself; at least 1.
    #[doc(alias = "sliding_window")]
    Window(u32),
    /// The tokens of its chunk up to itself. Chunks begin at multiples of this size, a power of two.
    #[doc(alias = "attention_chunk_size")]
    Chunk(u32),
    /// No earlier token: the layers keep a state of fixed size, such as that of Mamba or Gated DeltaNet
    /// ([`Groups::with_state`]). A cached state stands for all tokens before it.
    #[doc(alias = "linear_attention")]
    #[doc(alias = "mamba")]
    State,
}

impl Reach {
    /// Returns the first position that a token at `position` reads. It never falls as `position` rises.
    ///
    /// ```
    /// # use kvarena::layout::Reach;
    /// assert_eq!([99, 100].map(|at| Reach::Window(100).first(at)), [0, 1]);
    /// assert_eq!([63, 64, 65].map(|at| Reach::Chunk(64).first(at)), [0, 64, 64]);
    /// assert_eq!(Reach::All.first(1000), 0);
    /// ```
    pub const fn first(self, position: u32) -> u32 {
        match self {
            Self::All => 0,
            Self::Window(size) => position.saturating_sub(size.saturating_sub(1)),
            Self::Chunk(size) => position & !size.wrapping_sub(1),
            // The state behind the token before, which is cached with that token's page.
            Self::State => position.saturating_sub(1),
        }
    }

    /// Returns whether a group may have this reach: group 0 reads all tokens, other groups too, or a valid window or
    /// chunk, or they keep a state.
    const fn fits(self, group: usize) -> bool {
        match self {
            Self::All => true,
            Self::Window(size) => group > 0 && size > 0,
            Self::Chunk(size) => group > 0 && size.is_power_of_two(),
            Self::State => group > 0,
        }
    }
}

impl fmt::Display for Reach {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::All => write!(f, "everything"),
            Self::Window(size) => write!(f, "a window of {size}"),
            Self::Chunk(size) => write!(f, "a chunk of {size}"),
            Self::State => write!(f, "a state"),
        }
    }
}

/// The shape and dtype of a group that differ from the pool's.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(deny_unknown_fields))]
pub struct GroupShape {
    /// Shape of K and V in each layer of the group.
    pub shape: KvShape,
    /// Element type of K and V; `None` for the pool's.
    #[cfg_attr(feature = "serde", serde(default, skip_serializing_if = "Option::is_none"))]
    pub dtype: Option<KvDtype>,
}

/// One part of a layer's state, such as a recurrent matrix for each head, or the last inputs of a convolution.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(deny_unknown_fields))]
pub struct StatePart {
    /// Number of heads of the whole model. Ranks share them as they share kv heads.
    pub heads: u32,
    /// Number of bytes of a head. The host chooses the element type and the order of the elements.
    pub head_bytes: u32,
}

impl StatePart {
    pub(super) const NONE: Self = Self { heads: 0, head_bytes: 0 };

    pub(super) fn bytes(self) -> u64 {
        u64::from(self.heads) * u64::from(self.head_bytes)
    }
}

/// The groups of a model's layers. With [`Groups::ONE`] every layer reads all tokens. Group 0 reads all tokens. Further
/// groups that do are the last ones, and share the pages of group 0.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Groups {
    reaches: [Reach; GROUPS_MAX],
    /// Shapes of the groups after group 0; `None` for the pool's.
    pub(super) shapes: [Option<GroupShape>; GROUPS_MAX - 1],
    /// Parts of a layer's state; empty ones have no heads.
    pub(super) parts: [StatePart; STATE_PARTS_MAX],
    count: u32,
    /// Number of layers in groups; 0 for [`Groups::ONE`], which fits any number.
    layers: u32,
    /// Bit 0 and bit 1 of each layer's group.
    bits: [[u64; GROUPED_LAYERS_MAX / WORD as usize]; 2],
}

/// The place of a layer's K and V.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LayerPlace {
    /// Group of the layer.
    pub group: u32,
    /// Index of the layer's page table among the tables of all groups, or of its page among those of a state.
    pub track: u32,
    /// Lane of the layer in a page.
    pub lane: u32,
}

impl Groups {
    /// Length of [`Groups::to_words`].
    pub(crate) const WORDS: usize = GROUPS_MAX + 2 * GROUPED_LAYERS_MAX / WORD as usize;

    /// One group of any number of layers, which read all tokens.
    pub const ONE: Self = Self {
        reaches: [Reach::All; GROUPS_MAX],
        shapes: [None; GROUPS_MAX - 1],
        parts: [StatePart::NONE; STATE_PARTS_MAX],
        count: 1,
        layers: 0,
        bits: [[0; 4]; 2],
    };

    /// Creates groups from the reach of each group and the group of each layer. O(layers).
    ///
    /// ```
    /// # use kvarena::layout::{Groups, Reach};
    /// // Every other one of four layers reads 128 tokens.
    /// let groups = Groups::new(&[Reach::All, Reach::Window(128)], &[1, 0, 1, 0])?;
    /// assert_eq!(groups.layers_of(1), 2);
    /// # Ok::<(), kvarena::ConfigError>(())
    /// ```
    ///
    /// # Errors
    /// [`ConfigError::Limit`] for more than 4 groups or 256 layers. [`ConfigError::Reach`] if group 0 is not
    /// [`Reach::All`], for a group of another reach behind a further one of [`Reach::All`], for a window of 0, a chunk
    /// that is not a power of two, and a second [`Reach::State`]. [`ConfigError::LayerGroup`] for a layer of a group
    /// that does not exist. [`ConfigError::EmptyGroup`] for a group without layers.
    pub fn new(reaches: &[Reach], layers: &[u8]) -> Result<Self, ConfigError> {
        let limits = [("groups", reaches.len(), GROUPS_MAX), ("layers", layers.len(), GROUPED_LAYERS_MAX)];
        if let Some((name, value, max)) = limits.into_iter().find(|&(_, value, max)| value > max) {
            return Err(ConfigError::Limit { name, value: value as u64, max: max as u64 });
        }
        if let Some(group) = (0..reaches.len()).find(|&group| !reaches[group].fits(group)) {
            return Err(ConfigError::Reach { group: group as u32, reach: reaches[group] });
        }
        // Groups with cells are numbered without gaps.
        let has_cells = |group: &usize| reaches[*group] != Reach::All;
        let sharing = (1..reaches.len()).find(|group| !has_cells(group)).unwrap_or(reaches.len());
        if let Some(group) = (sharing..reaches.len()).find(has_cells) {
            return Err(ConfigError::Reach { group: group as u32, reach: reaches[group] });
        }
        if let Some((group, _)) = (0..).zip(reaches).filter(|&(_, &reach)| reach == Reach::State).nth(1) {
            return Err(ConfigError::Reach { group, reach: Reach::State });
        }
        let mut groups = Self { count: reaches.len() as u32, layers: layers.len() as u32, ..Self::ONE };
        groups.reaches[..reaches.len()].copy_from_slice(reaches);
        for (layer, &group) in (0..).zip(layers) {
            if u32::from(group) >= groups.count {
                let (layer, group) = (LayerId::new(layer), group.into());
                return Err(ConfigError::LayerGroup { layer, group, groups: groups.count });
            }
            for (bit, words) in groups.bits.iter_mut().enumerate() {
                words[(layer / WORD) as usize] |= u64::from(group >> bit & 1) << (layer % WORD);
            }
        }
        if let Some(group) = (0..groups.count.max(1)).find(|&group| groups.layers_of(group) == 0) {
            return Err(ConfigError::EmptyGroup { group });
        }
        Ok(if groups.count == 1 { Self::ONE } else { groups })
    }

    /// Sets the shape of a group other than group 0, and its element type (`None` for the pool's). The pool must use
    /// [`Layout::PageFirst`](super::Layout).
    ///
    /// ```
    /// # use kvarena::{KvDtype, KvShape, PoolConfig};
    /// # use kvarena::layout::{Groups, Reach};
    /// // Five layers with 2 heads of 512 read everything; 25 layers with 8 heads of 256 read a window.
    /// let layers: Vec<u8> = (1..=30).map(|layer| u8::from(layer % 6 > 0)).collect();
    /// let groups = Groups::new(&[Reach::All, Reach::Window(1024)], &layers)?
    ///     .with_shape(1, KvShape::heads(8, 256), None)?;
    /// let (shape, dtype) = (KvShape::heads(2, 512), KvDtype::Bf16);
    /// let layout = PoolConfig { layers: 30, groups, shape, dtype, ..Default::default() }.layout()?;
    /// // Two layers of the window fit in a page, and leave space for half a layer.
    /// assert_eq!((layout.lanes_of(1), layout.tracks_of(1)), (2, 13));
    /// assert_eq!(layout.unused_bytes(1), 16 * 2 * 8 * 256 * 2 / 2);
    /// # Ok::<(), kvarena::ConfigError>(())
    /// ```
    ///
    /// # Errors
    /// [`ConfigError::GroupShape`] for group 0, a group that keeps a state, or one that does not exist.
    pub fn with_shape(
        mut self,
        group: u32,
        shape: KvShape,
        dtype: impl Into<Option<KvDtype>>,
    ) -> Result<Self, ConfigError> {
        if group == 0 || group >= self.count || self.state_group() == Some(group) {
            return Err(ConfigError::GroupShape { group, groups: self.count });
        }
        self.shapes[group as usize - 1] = Some(GroupShape { shape, dtype: dtype.into() });
        Ok(self)
    }

    /// Sets the parts of a layer's state in the group with [`Reach::State`]: up to 4, part 0 first. The pool must use
    /// [`Layout::PageFirst`](super::Layout).
    ///
    /// ```
    /// # use kvarena::{KvDtype, KvShape, PoolConfig};
    /// # use kvarena::layout::{Groups, Reach, StatePart};
    /// // Qwen3-Next: three of four layers keep 32 heads of 128 x 128 in f32, and 3 inputs of 8,192 channels in bf16.
    /// let layers: Vec<u8> = (1..=48).map(|layer| u8::from(layer % 4 > 0)).collect();
    /// let parts = [StatePart { heads: 32, head_bytes: 65_536 }, StatePart { heads: 16, head_bytes: 3 * 512 * 2 }];
    /// let groups = Groups::new(&[Reach::All, Reach::State], &layers)?.with_state(1, &parts)?;
    /// let (shape, dtype) = (KvShape::heads(2, 256), KvDtype::Bf16);
    /// let pool = PoolConfig { layers: 48, groups, shape, dtype, ..PoolConfig::default() };
    /// let pool = PoolConfig { page_size: pool.state_page_size(16)?, ..pool };
    /// let state = pool.layout()?.state().expect("a group keeps a state");
    /// assert_eq!((pool.page_size, state.pages, state.lane_bytes), (96, 36, 2_146_304));
    /// # Ok::<(), kvarena::ConfigError>(())
    /// ```
    ///
    /// # Errors
    /// [`ConfigError::StateGroup`] for a group that keeps no state or does not exist. [`ConfigError::Limit`] for more
    /// than 4 parts. [`ConfigError::Zero`] for no parts, or for a part without heads or bytes.
    pub fn with_state(mut self, group: u32, parts: &[StatePart]) -> Result<Self, ConfigError> {
        if self.state_group() != Some(group) {
            return Err(ConfigError::StateGroup { group });
        }
        if parts.len() > STATE_PARTS_MAX {
            let (value, max) = (parts.len() as u64, STATE_PARTS_MAX as u64);
            return Err(ConfigError::Limit { name: "parts of a state", value, max });
        }
        if parts.is_empty() || parts.iter().any(|part| part.heads == 0 || part.head_bytes == 0) {
            return Err(ConfigError::Zero { name: "bytes of a state's part" });
        }
        self.parts = [StatePart::NONE; STATE_PARTS_MAX];
        self.parts[..parts.len()].copy_from_slice(parts);
        Ok(self)
    }

    /// Returns the parts of a layer's state; empty if no group keeps a state.
    pub fn state_parts(&self) -> &[StatePart] {
        let count = self.parts.iter().take_while(|part| part.heads > 0).count();
        &self.parts[..count]
    }

    /// Returns the group whose layers keep a state.
    pub fn state_group(&self) -> Option<u32> {
        (1..self.count).find(|&group| self.reach(group) == Reach::State)
    }

    /// Returns a group's own shape; `None` if the group has none or does not exist. In a
    /// [`PoolLayout`](crate::layout::PoolLayout), a group with the pool's shape and dtype has none.
    pub fn shape(&self, group: u32) -> Option<GroupShape> {
        self.shapes.get((group as usize).checked_sub(1)?).copied()?
    }

    /// Returns the number of groups.
    pub const fn count(&self) -> u32 {
        self.count
    }

    /// Returns the reach of a group.
    ///
    /// # Panics
    /// If there is no such group.
    pub fn reach(&self, group: u32) -> Reach {
        self.reaches[..self.count as usize][group as usize]
    }

    /// Returns the groups that read a window or a chunk, each with its reach.
    pub fn limited(&self) -> impl Iterator<Item = (u32, Reach)> + use<'_> {
        let of_group = (1..self.count).map(|group| (group, self.reach(group)));
        of_group.filter(|(_, reach)| matches!(reach, Reach::Window(_) | Reach::Chunk(_)))
    }

    /// Returns whether the layers of a group lie in the pages of group 0: it is another group that reads all tokens.
    pub fn shares_pages(&self, group: u32) -> bool {
        (1..self.count).contains(&group) && self.reach(group) == Reach::All
    }

    /// Returns the number of layers of a group; 0 for a group that does not exist, and for [`Groups::ONE`], which fits
    /// any number.
    pub fn layers_of(&self, group: u32) -> u32 {
        if group < self.count { self.before(group, self.layers) } else { 0 }
    }

    /// Returns the number of layers in groups; 0 for [`Groups::ONE`].
    pub const fn layers(&self) -> u32 {
        self.layers
    }

    /// Returns a layer's group; 0 for a layer that is in none, such as every layer of [`Groups::ONE`].
    pub fn group(&self, layer: LayerId) -> u32 {
        let (word, bit) = ((layer.raw() / WORD) as usize, layer.raw() % WORD);
        let bits = self.bits.map(|words| words.get(word).map_or(0, |word| (word >> bit & 1) as u32));
        bits[0] | bits[1] << 1
    }

    /// Returns the number of a group's layers among the first `layers` layers. O(layers / 64).
    pub(super) fn before(&self, group: u32, layers: u32) -> u32 {
        let same = |bit: usize, word: u32| {
            let bits = self.bits[bit][word as usize];
            if group >> bit & 1 == 1 { bits } else { !bits }
        };
        let count = |word: u32| {
            let rest = layers - word * WORD;
            let mask = if rest < WORD { (1 << rest) - 1 } else { u64::MAX };
            (same(0, word) & same(1, word) & mask).count_ones()
        };
        (0..layers.div_ceil(WORD)).map(count).sum()
    }

    /// Returns the groups as words; [`Groups::ONE`] is 1 and zeros. Word 0: number of groups + 2^32 * layers. A word
    /// for each further group: its size + 2^32 * (1 for a window, 2 for a chunk, 3 for a state). Then bit 0 of the
    /// groups of all layers, then bit 1.
    pub(crate) fn to_words(self) -> [u64; Self::WORDS] {
        let mut words = [0; Self::WORDS];
        words[0] = u64::from(self.count) | u64::from(self.layers) << 32;
        for (word, reach) in words[1..].iter_mut().zip(&self.reaches[1..self.count as usize]) {
            *word = match *reach {
                Reach::All => 0,
                Reach::Window(size) => u64::from(size) | 1 << 32,
                Reach::Chunk(size) => u64::from(size) | 2 << 32,
                Reach::State => 3 << 32,
            };
        }
        words[GROUPS_MAX..].copy_from_slice(self.bits.as_flattened());
        words
    }

    /// Inverts [`Groups::to_words`]; `None` for invalid groups. It ignores some invalid bits, so the caller compares
    /// the words of the result with `words`.
    pub(crate) fn from_words(words: [u64; Self::WORDS]) -> Option<Self> {
        let (count, layers) = (words[0] as u32 as usize, (words[0] >> 32) as usize);
        if count > GROUPS_MAX || layers > GROUPED_LAYERS_MAX {
            return None;
        }
        if (count, layers) == (1, 0) {
            return Some(Self::ONE);
        }
        let limited = words[1..GROUPS_MAX].iter().map(|word| match (word >> 32, *word as u32) {
            (1, size) => Reach::Window(size),
            (2, size) => Reach::Chunk(size),
            (3, 0) => Reach::State,
            _ => Reach::All,
        });
        let reaches: Vec<_> = std::iter::once(Reach::All).chain(limited).take(count).collect();
        let mut groups = Self::ONE;
        groups.bits.as_flattened_mut().copy_from_slice(&words[GROUPS_MAX..]);
        groups.layers = layers as u32;
        Self::new(&reaches, &groups.of_layers()).ok()
    }

    fn of_layers(&self) -> Vec<u8> {
        (0..self.layers).map(|layer| self.group(LayerId::new(layer)) as u8).collect()
    }
}

impl Default for Groups {
    fn default() -> Self {
        Self::ONE
    }
}

impl fmt::Debug for Groups {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let reaches = &self.reaches[..self.count as usize];
        let mut fields = f.debug_struct("Groups");
        fields.field("reaches", &reaches).field("layers", &self.of_layers());
        if self.state_group().is_some() {
            fields.field("state", &self.state_parts());
        }
        fields.finish()
    }
}

/// The serialised form of [`Groups`]: the arguments of [`Groups::new`], the groups' own shapes up to the last one, and
/// the parts of a state.
#[cfg(feature = "serde")]
#[derive(serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields, rename = "Groups")]
struct Written {
    reaches: Vec<Reach>,
    layers: Vec<u8>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    shapes: Vec<Option<GroupShape>>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    state: Vec<StatePart>,
}

#[cfg(feature = "serde")]
impl serde::Serialize for Groups {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let reaches = self.reaches[..self.count as usize].to_vec();
        let last = self.shapes.iter().rposition(Option::is_some);
        let shapes = self.shapes[..last.map_or(0, |last| last + 1)].to_vec();
        let state = self.state_parts().to_vec();
        Written { reaches, layers: self.of_layers(), shapes, state }.serialize(serializer)
    }
}

#[cfg(feature = "serde")]
impl<'de> serde::Deserialize<'de> for Groups {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        use serde::de::Error;
        let Written { reaches, layers, shapes, state } = Written::deserialize(deserializer)?;
        let one = reaches == [Reach::All] && layers.is_empty();
        let groups = if one { Ok(Self::ONE) } else { Self::new(&reaches, &layers) };
        let own = (1..).zip(shapes).filter_map(|(group, own)| Some((group, own?)));
        let with = |groups: Self, (group, own): (u32, GroupShape)| groups.with_shape(group, own.shape, own.dtype);
        let groups = groups.and_then(|groups| own.into_iter().try_fold(groups, with)).map_err(D::Error::custom)?;
        if state.is_empty() {
            return Ok(groups);
        }
        let group = groups.state_group().ok_or_else(|| D::Error::custom("no group keeps a state"))?;
        groups.with_state(group, &state).map_err(D::Error::custom)
    }
}
