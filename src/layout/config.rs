//! The configuration of a pool, and its checks.

use std::ops::Range;

use super::dtype::{KvDtype, Scaling};
use super::format::{self, Format};
use super::groups::{GROUPS_MAX, GroupShape, Groups, StatePart};
#[cfg(any(test, feature = "testkit"))]
use super::plane::Plane;
use super::planes::Planes;
use super::pool::{Layout, PoolLayout};
use super::shape::KvShape;
use super::state::{self, StateLayout};
use crate::error::ConfigError;

/// Maximum of [`PoolConfig::page_size`].
pub const PAGE_SIZE_MAX: u32 = 1024;

/// The size of a pool.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
pub enum Capacity {
    /// A number of pages.
    Pages(u32),
    /// A number of bytes on one rank. The pool has as many whole pages as fit.
    Bytes(u64),
}

/// The configuration of a pool of K and V. [`PoolConfig::layout`] checks it and computes the layout.
///
/// `PoolConfig::from_hf` (feature `serde`) reads a model's `config.json`. Fields that a serialised config omits have
/// their defaults.
#[derive(Clone, Copy, PartialEq, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(default, deny_unknown_fields))]
pub struct PoolConfig {
    /// Number of layers of the model. Default: 1.
    pub layers: u32,
    /// Groups of layers by the tokens that they read. Default: [`Groups::ONE`].
    pub groups: Groups,
    /// Shape of K and V of each token in each layer of the whole model, before tensor parallelism. A group may have
    /// [its own shape and dtype](Groups::with_shape). Default: one head of 64.
    pub shape: KvShape,
    /// Element type of K and V. Default: f32.
    pub dtype: KvDtype,
    /// Source of the scales of quantised dtypes; [`Scaling::Static`] if no dtype is quantised. Default:
    /// [`Scaling::Static`].
    pub scaling: Scaling,
    /// Number of channels of K that each token also stores as *labels*, for sparse reads; 0 for none.
    /// [`LabelChannels`](super::LabelChannels) selects the channels. At most the elements of a head, and 0 for latent
    /// rows. Groups with their own shape have no labels. Default: 0.
    pub label_channels: u32,
    /// Number of tokens of a page, 1 to [`PAGE_SIZE_MAX`]. Default: 16.
    #[doc(alias = "block_size")]
    pub page_size: u32,
    /// Size of the pool. Default: 1,024 pages.
    pub capacity: Capacity,
    /// Number of pages of swap memory to which evicted pages of all groups move. With 0, evicted pages are lost. A cell
    /// needs as many swap pages as its group has tracks. Without groups, each swap page also takes 253 to 609 bytes of
    /// tables at pages of 16 to 64 tokens ([`EngineConfig::bytes`](crate::EngineConfig::bytes)). Default: 0.
    pub swap_pages: u32,
    /// Number of additional pages of swap memory. [`Engine::puts`](crate::Engine::puts) copies pages that are on the
    /// device alone to them, for an external store. At least the pages of a record, or 0. Default: 0.
    pub stage_pages: u32,
    /// Number of bytes of each page of group 0 that the host fills, such as the hidden state of the page's last token,
    /// with which a drafter continues after a hit. They move with the page; [`PoolLayout::extra`] returns their place.
    /// Only PageFirst pools have them. Default: 0.
    pub extra_bytes: u32,
    /// Physical order of the pool. Default: [`Layout::PageFirst`].
    pub layout: Layout,
    /// Number of ranks that share the model's heads. Either number must divide the other; with more ranks than heads,
    /// each rank stores a replica of one head. Default: 1.
    pub tp_size: u32,
    /// This rank, below `tp_size`. Default: 0.
    pub tp_rank: u32,
}

impl Default for PoolConfig {
    /// Returns one layer, one head of 64 x f32, 1,024 pages of 16 tokens, PageFirst, one rank.
    fn default() -> Self {
        Self {
            layers: 1,
            groups: Groups::ONE,
            shape: KvShape::heads(1, 64),
            dtype: KvDtype::F32,
            scaling: Scaling::Static,
            label_channels: 0,
            page_size: 16,
            capacity: Capacity::Pages(1024),
            swap_pages: 0,
            stage_pages: 0,
            extra_bytes: 0,
            layout: Layout::PageFirst,
            tp_size: 1,
            tp_rank: 0,
        }
    }
}

impl PoolConfig {
    /// Returns the number of bytes that one token stores on one rank, in all planes of all layers. Padding may make a
    /// page larger than its tokens: see [`PoolLayout::page_bytes`].
    ///
    /// ```
    /// # use kvarena::*;
    /// let (shape, dtype) = (KvShape::heads(8, 128), KvDtype::Bf16);
    /// let qwen3_8b = PoolConfig { layers: 36, shape, dtype, ..Default::default() };
    /// assert_eq!(qwen3_8b.bytes_per_token(), Ok(147_456)); // 2 * 8 * 128 * 36 * 2
    /// ```
    ///
    /// # Errors
    /// [`ConfigError`] for an overflow, for 0 layers, and for shapes, scales, labels or ranks that
    /// [`PoolConfig::layout`] rejects.
    pub fn bytes_per_token(&self) -> Result<u64, ConfigError> {
        let shape = self.checked_shape()?;
        self.token_bytes(&self.formats(shape, self.planes(shape))?)
    }

    /// Returns the number of kv heads on this rank; 1 for latent rows, which all heads read.
    ///
    /// # Errors
    /// [`ConfigError::Zero`], [`ConfigError::HeadSplit`] if neither number divides the other, [`ConfigError::Rank`] if
    /// the rank is not below the number of ranks.
    pub fn local_kv_heads(&self) -> Result<u32, ConfigError> {
        Ok(self.local(self.shape)?.kv_heads())
    }

    /// Returns the index of the first of the model's kv heads on this rank. The rank has
    /// [`PoolConfig::local_kv_heads`] consecutive heads.
    ///
    /// # Errors
    /// As [`PoolConfig::local_kv_heads`].
    pub fn first_kv_head(&self) -> Result<u32, ConfigError> {
        Ok(self.heads_of(self.shape)?.start)
    }

    /// Returns the heads of a model's shape that are on this rank.
    pub(super) fn heads_of(&self, shape: KvShape) -> Result<Range<u32>, ConfigError> {
        let (local, heads) = (self.local(shape)?.kv_heads(), shape.kv_heads());
        let first = if heads >= self.tp_size { self.tp_rank * local } else { self.tp_rank / (self.tp_size / heads) };
        Ok(first..first + local)
    }

    /// Returns the shape of a group's layers in the model.
    pub(super) fn shape_of(&self, group: u32) -> KvShape {
        self.groups.shape(group).map_or(self.shape, |own| own.shape)
    }

    /// Checks the config and computes strides, sizes and the number of pages.
    ///
    /// # Errors
    /// A [`ConfigError`] that names the value.
    pub fn layout(&self) -> Result<PoolLayout, ConfigError> {
        let shape = self.checked_shape()?;
        self.layout_of(shape, self.planes(shape))
    }

    /// Returns the planes of a shape on one rank.
    fn planes(&self, shape: KvShape) -> Planes {
        shape.planes(self.dtype, self.scaling).with_labels(self.label_channels)
    }

    /// The same as [`PoolConfig::layout`], but with these planes instead of the shape's. For tests.
    ///
    /// # Errors
    /// As [`PoolConfig::layout`].
    #[cfg(any(test, feature = "testkit"))]
    pub(crate) fn layout_with(&self, planes: &[Plane]) -> Result<PoolLayout, ConfigError> {
        self.layout_of(self.checked_shape()?, Planes::new(planes))
    }

    fn layout_of(&self, shape: KvShape, planes: Planes) -> Result<PoolLayout, ConfigError> {
        let mut formats = self.formats(shape, planes)?;
        self.token_bytes(&formats)?;
        let Self { groups, layers, .. } = *self;
        if groups.count() > 1 && groups.layers() != layers {
            return Err(ConfigError::GroupedLayers { layers, grouped: groups.layers() });
        }
        let contents = self.contents()?;
        // A page has up to one piece for each plane and layer, counted in 32 bits.
        let layers_max = u32::MAX / planes.count();
        if self.layers > layers_max {
            let (value, max) = (self.layers.into(), layers_max.into());
            return Err(ConfigError::Limit { name: "layers", value, max });
        }
        if self.page_size == 0 {
            return Err(ConfigError::Zero { name: "page_size" });
        }
        if self.page_size > PAGE_SIZE_MAX {
            return Err(ConfigError::PageSize { page_size: self.page_size, max: PAGE_SIZE_MAX });
        }
        let groups = self.local_parts(groups)?;
        let page_bytes_of = |page_size| format::fit(&mut formats.clone(), &contents, page_size).map(|fitted| fitted.0);
        state::check(&groups, self.page_size, page_bytes_of)?;
        let fitted = format::fit(&mut formats, &contents, self.page_size);
        let (page_bytes, extra_start) = fitted.ok_or(ConfigError::Overflow { name: "page_bytes" })?;
        let page_count = self.page_count(page_bytes)?;
        self.check_swap_region(page_bytes, page_count)?;
        let tracks = |group: u32| groups.layers_of(group).div_ceil(formats[group as usize].lanes);
        Ok(PoolLayout {
            layers,
            groups: own_shapes(groups, &formats),
            tracks: 1 + groups.limited().map(|(group, _)| tracks(group)).sum::<u32>(),
            state: groups.state_group().map(|group| StateLayout::new(&groups, group, page_bytes)),
            format: formats[0],
            formats,
            page_size: self.page_size,
            page_bytes,
            extra_start,
            extra_bytes: self.extra_bytes,
            page_count,
            swap_pages: self.swap_pages,
            stage_pages: self.stage_pages,
            layout: self.layout,
        })
    }

    /// Returns what a page of group 0 holds.
    fn contents(&self) -> Result<format::Contents, ConfigError> {
        let Self { groups, extra_bytes, .. } = *self;
        let mut layers = [0; GROUPS_MAX];
        layers[0] = if groups.count() == 1 { self.layers } else { groups.layers_of(0) };
        for group in (1..groups.count()).filter(|&group| groups.shares_pages(group)) {
            layers[group as usize] = groups.layers_of(group);
        }
        let by_layer = self.layout == Layout::LayerFirst;
        if let Some(group) = (1..groups.count()).find(|&group| by_layer && groups.shares_pages(group)) {
            return Err(ConfigError::LayerFirst { group });
        }
        if by_layer && extra_bytes > 0 {
            return Err(ConfigError::Limit { name: "extra_bytes of LayerFirst", value: extra_bytes.into(), max: 0 });
        }
        Ok(format::Contents { layers, extra_bytes })
    }

    /// Returns the groups with this rank's parts of a state.
    fn local_parts(&self, mut groups: Groups) -> Result<Groups, ConfigError> {
        let Some(group) = groups.state_group() else { return Ok(groups) };
        if self.layout == Layout::LayerFirst {
            return Err(ConfigError::LayerFirst { group });
        }
        for part in groups.parts.iter_mut().filter(|part| part.heads > 0) {
            let KvShape::Heads { kv_heads: heads, .. } = self.local(KvShape::heads(part.heads, 1))? else {
                unreachable!("heads are split into heads")
            };
            *part = StatePart { heads, ..*part };
        }
        Ok(groups)
    }

    /// Returns the least page size, in multiples of `multiple` tokens, whose pages hold the state of a layer;
    /// `multiple` if no group keeps a state. Larger pages waste less of each state, but match prompts more coarsely.
    ///
    /// # Errors
    /// [`ConfigError::Zero`] for a multiple of 0, [`ConfigError::PageSize`] if the size is above [`PAGE_SIZE_MAX`], and
    /// as [`PoolConfig::layout`] for other fields than `page_size` and `capacity`.
    pub fn state_page_size(&self, multiple: u32) -> Result<u32, ConfigError> {
        if multiple == 0 {
            return Err(ConfigError::Zero { name: "multiple" });
        }
        let smallest = Self { page_size: 1, capacity: Capacity::Pages(1), swap_pages: 0, stage_pages: 0, ..*self };
        let min = match smallest.layout() {
            Err(ConfigError::StatePage { min, .. }) => min,
            other => other.map(|_| 1)?,
        };
        let page_size = min.saturating_add(multiple - 1) / multiple * multiple;
        if page_size > PAGE_SIZE_MAX {
            return Err(ConfigError::PageSize { page_size, max: PAGE_SIZE_MAX });
        }
        Ok(page_size)
    }

    /// Returns the format of every group on this rank, without lanes. Missing groups have the format of group 0.
    fn formats(&self, shape: KvShape, planes: Planes) -> Result<[Format; GROUPS_MAX], ConfigError> {
        let mut formats = [Format::new(shape, self.dtype, planes); GROUPS_MAX];
        for group in 1..self.groups.count() {
            let Some(GroupShape { shape: own, dtype }) = self.groups.shape(group) else { continue };
            let dtype = dtype.unwrap_or(self.dtype);
            if (own, dtype) == (self.shape, self.dtype) {
                continue;
            }
            if self.layout == Layout::LayerFirst {
                return Err(ConfigError::LayerFirst { group });
            }
            own.check(dtype, self.scaling)?;
            let own = self.local(own)?;
            formats[group as usize] = Format::new(own, dtype, own.planes(dtype, self.scaling));
        }
        Ok(formats)
    }

    /// Returns the number of bytes of a token in all planes of all layers.
    fn token_bytes(&self, formats: &[Format; GROUPS_MAX]) -> Result<u64, ConfigError> {
        let bytes = |(group, format): (u32, &Format)| match self.groups.count() {
            1 if group == 0 => format.planes.token_bytes(self.layers),
            count if group < count && self.groups.state_group() != Some(group) => {
                format.planes.token_bytes(self.groups.layers_of(group))
            }
            _ => Some(0),
        };
        let mut all = (0..).zip(formats);
        let sum = all.try_fold(0_u64, |sum, format| sum.checked_add(bytes(format)?));
        sum.ok_or(ConfigError::Overflow { name: "bytes per token" })
    }

    /// Returns the number of pages of `page_bytes` bytes. Their total fits 64 bits.
    fn page_count(&self, page_bytes: u64) -> Result<u32, ConfigError> {
        let page_count = match self.capacity {
            Capacity::Pages(pages) => u64::from(pages),
            Capacity::Bytes(bytes) if bytes < page_bytes => {
                return Err(ConfigError::Budget { bytes, page_bytes });
            }
            Capacity::Bytes(bytes) => bytes / page_bytes,
        };
        if page_count == 0 {
            return Err(ConfigError::Zero { name: "page_count" });
        }
        // The prefix tree uses u32::MAX for "no page".
        if page_count >= u64::from(u32::MAX) {
            return Err(ConfigError::PageCount { page_count });
        }
        page_bytes.checked_mul(page_count).ok_or(ConfigError::Overflow { name: "pool bytes" })?;
        Ok(page_count as u32)
    }

    /// Checks that all pages, on the device and on the host, have 32-bit ids, and that the host's bytes fit 64 bits.
    fn check_swap_region(&self, page_bytes: u64, page_count: u32) -> Result<(), ConfigError> {
        let pages = u64::from(self.swap_pages) + u64::from(self.stage_pages);
        let max = u64::from(u32::MAX - 1 - page_count);
        if pages > max {
            return Err(ConfigError::Limit { name: "swap_pages + stage_pages", value: pages, max });
        }
        let bytes = page_bytes.checked_mul(pages);
        bytes.map(|_| ()).ok_or(ConfigError::Overflow { name: "host bytes" })
    }

    /// Checks the number of layers, the shape, the scales and the labels, and returns this rank's shape.
    fn checked_shape(&self) -> Result<KvShape, ConfigError> {
        if self.layers == 0 {
            return Err(ConfigError::Zero { name: "layers" });
        }
        self.shape.check(self.dtype, self.scaling)?;
        let own = self.groups.shapes.iter().flatten().filter_map(|own| own.dtype);
        let is_quantised = own.chain([self.dtype]).any(KvDtype::is_quantised);
        if self.scaling != Scaling::Static && !is_quantised {
            return Err(ConfigError::Scaling { dtype: self.dtype });
        }
        let most = self.shape.labels_max();
        if self.label_channels > most {
            let (value, max) = (self.label_channels.into(), most.into());
            return Err(ConfigError::Limit { name: "label_channels", value, max });
        }
        self.local(self.shape)
    }

    /// Returns a model's shape on this rank.
    fn local(&self, shape: KvShape) -> Result<KvShape, ConfigError> {
        let Self { tp_size, tp_rank, .. } = *self;
        if tp_size == 0 {
            return Err(ConfigError::Zero { name: "tp_size" });
        }
        if tp_rank >= tp_size {
            return Err(ConfigError::Rank { tp_rank, tp_size });
        }
        shape.split(tp_size)
    }
}

/// Returns the groups with their shapes on this rank; groups with the format of group 0 have no shape of their own.
fn own_shapes(mut groups: Groups, formats: &[Format; GROUPS_MAX]) -> Groups {
    for (shape, format) in groups.shapes.iter_mut().zip(&formats[1..]) {
        let Format { shape: own, dtype, .. } = *format;
        *shape = (!format.is_like(&formats[0])).then_some(GroupShape { shape: own, dtype: Some(dtype) });
    }
    groups
}
