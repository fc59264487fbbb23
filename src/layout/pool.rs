//! A checked pool: the contents of one rank and their byte ranges.

use std::fmt;
use std::ops::Range;

use super::dtype::{KvDtype, Scaling};
use super::format::Format;
use super::groups::{GROUPS_MAX, Groups, LayerPlace};
use super::plane::{Plane, PlaneName, PlaneOrder};
use super::shape::KvShape;
use super::state::StateLayout;
use crate::id::{LayerId, PageId, SlotId};

/// Physical order of a pool.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
pub enum Layout {
    /// `[plane, L, P, piece]`: for attention of one layer.
    LayerFirst,
    /// `[P, plane, L, piece]`: for copies of pages, as in offload and moves between pools.
    PageFirst,
}

/// The strides of a plane: its first byte, and the distances in bytes along each axis.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Strides {
    /// First byte of lane 0, page 0, slot 0, head 0.
    pub origin: u64,
    /// Bytes from one lane to the next.
    pub lane: u64,
    /// Bytes from one page to the next.
    pub page: u64,
    /// Bytes from one slot to the next in its page.
    pub slot: u64,
    /// Bytes from one head to the next.
    pub head: u64,
}

impl Strides {
    /// Returns the first byte of a lane's page 0.
    pub const fn lane_origin(&self, lane: u32) -> u64 {
        self.origin + self.lane * lane as u64
    }

    /// Returns the first byte of head 0 of a slot, given its page and its offset in the page.
    pub const fn row(&self, lane: u32, page: PageId, offset: u32) -> u64 {
        self.lane_origin(lane) + self.page * page.raw() as u64 + self.slot * offset as u64
    }
}

/// A checked pool: the contents of one rank and their byte ranges, from
/// [`PoolConfig::layout`](crate::PoolConfig::layout).
///
/// If groups have their own shapes, methods without a group return the values of group 0. [`PoolLayout::of_group`]
/// returns the same pool for another group.
#[derive(Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct PoolLayout {
    pub(super) layers: u32,
    pub(super) groups: Groups,
    /// Number of page tables of a sequence.
    pub(super) tracks: u32,
    #[cfg_attr(feature = "serde", serde(skip_serializing_if = "Option::is_none"))]
    pub(super) state: Option<StateLayout>,
    #[cfg_attr(feature = "serde", serde(flatten))]
    pub(super) format: Format,
    #[cfg_attr(feature = "serde", serde(skip_serializing_if = "all_equal"))]
    pub(super) formats: [Format; GROUPS_MAX],
    pub(super) page_size: u32,
    pub(super) page_bytes: u64,
    /// First byte of the host's in a page, and their number.
    #[cfg_attr(feature = "serde", serde(skip))]
    pub(super) extra_start: u64,
    pub(super) extra_bytes: u32,
    pub(super) page_count: u32,
    pub(super) swap_pages: u32,
    pub(super) stage_pages: u32,
    pub(super) layout: Layout,
}

impl fmt::Debug for PoolLayout {
    /// Writes one format if all groups have the same, else all formats.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { layers, tracks, page_size, page_bytes, page_count, layout, .. } = *self;
        let formats = &self.formats[..if self.has_one_shape() { 1 } else { GROUPS_MAX }];
        f.debug_struct("PoolLayout")
            .field("layers", &layers)
            .field("groups", &self.groups)
            .field("tracks", &tracks)
            .field("state", &self.state)
            .field("formats", &formats)
            .field("page_size", &page_size)
            .field("page_bytes", &page_bytes)
            .field("page_count", &page_count)
            .field("layout", &layout)
            .finish()
    }
}

fn all_equal(formats: &[Format; GROUPS_MAX]) -> bool {
    formats.iter().all(|format| *format == formats[0])
}

impl PoolLayout {
    /// Returns the number of layers of the model.
    pub const fn layers(&self) -> u32 {
        self.layers
    }

    /// Returns the groups of the layers.
    pub const fn groups(&self) -> &Groups {
        &self.groups
    }

    /// Returns the layout of the pool for the layers of a group: their shape, dtype, planes, lanes and strides. Layers
    /// that keep a state have none of these; their layout is [`PoolLayout::state`].
    ///
    /// # Panics
    /// If there is no such group.
    pub fn of_group(&self, group: u32) -> Self {
        Self { format: self.formats[..self.groups.count() as usize][group as usize], ..*self }
    }

    /// Returns [`PoolLayout::of_group`] for each group.
    pub fn views(&self) -> impl Iterator<Item = Self> + use<'_> {
        (0..self.groups.count()).map(|group| self.of_group(group))
    }

    /// Returns the first group that has the same format as `group`.
    pub(crate) fn first_alike(&self, group: u32) -> u32 {
        let own = &self.formats[group as usize];
        self.formats.iter().position(|format| format == own).expect("a group has a format") as u32
    }

    /// Returns whether the layers of all groups have the same format.
    pub fn has_one_shape(&self) -> bool {
        all_equal(&self.formats)
    }

    /// Returns the number of lanes of a page: the layers of group 0, or as many layers of a group's own shape as fit.
    pub const fn lanes(&self) -> u32 {
        self.format.lanes
    }

    /// Returns the number of lanes of a group; for a group that shares the pages of group 0, its layers. For a group
    /// with its own shape it is the bytes of a page divided by those of a layer, rounded down, at most 256. For a group
    /// that keeps a state it is [`StateLayout::lanes`].
    ///
    /// # Panics
    /// If the group is not below [`GROUPS_MAX`].
    pub fn lanes_of(&self, group: u32) -> u32 {
        self.state_of(group).map_or(self.formats[group as usize].lanes, |state| state.lanes)
    }

    /// Returns the number of bytes of a page outside of a group's lanes. Groups that share the pages of group 0, and
    /// the host, use some of them.
    ///
    /// # Panics
    /// If the group is not below [`GROUPS_MAX`].
    pub fn unused_bytes(&self, group: u32) -> u64 {
        match self.state_of(group) {
            Some(state) => self.page_bytes - u64::from(state.lanes) * state.lane_bytes,
            None => self.formats[group as usize].unused_bytes,
        }
    }

    /// Returns the layout of the state that layers of a group keep; `None` if no group keeps a state.
    pub const fn state(&self) -> Option<StateLayout> {
        self.state
    }

    /// Returns the number of pages of a sequence's state; 0 if no group keeps a state.
    pub const fn state_pages(&self) -> u32 {
        match self.state {
            Some(state) => state.pages,
            None => 0,
        }
    }

    /// Returns the layout of the state of a group, if the group keeps a state.
    fn state_of(&self, group: u32) -> Option<StateLayout> {
        self.state.filter(|_| self.groups.state_group() == Some(group))
    }

    /// Returns the number of page tables of a sequence, over all groups. The first belongs to group 0.
    pub const fn tracks(&self) -> u32 {
        self.tracks
    }

    /// Returns the number of page tables of a group; 0 for a group that keeps a state or shares the pages of group 0.
    ///
    /// # Panics
    /// If the group is not below [`GROUPS_MAX`].
    pub fn tracks_of(&self, group: u32) -> u32 {
        match group {
            0 => 1,
            _ if self.state_of(group).is_some() || self.groups.shares_pages(group) => 0,
            _ => self.groups.layers_of(group).div_ceil(self.lanes_of(group)),
        }
    }

    /// Returns the page tables that name a group's pages: those of group 0 for a group that shares its pages, none for
    /// a state.
    pub(crate) fn track_range(&self, group: u32) -> Range<u32> {
        if self.groups.shares_pages(group) {
            return 0..1;
        }
        let first = (0..group).map(|group| self.tracks_of(group)).sum();
        first..first + self.tracks_of(group)
    }

    /// Returns the number of bytes of the pages that a sequence of `tokens` computed tokens keeps in a group; at most
    /// `u64::MAX`. A state has the same bytes after any number of tokens. A group that shares the pages of group 0 has
    /// none of its own.
    ///
    /// ```
    /// # use kvarena::{KvDtype, KvShape, PoolConfig};
    /// # use kvarena::layout::{Groups, Reach};
    /// // Gemma 3 27B in bf16: every sixth layer reads everything.
    /// let layers: Vec<u8> = (1..=62).map(|layer| u8::from(layer % 6 > 0)).collect();
    /// let groups = Groups::new(&[Reach::All, Reach::Window(1024)], &layers)?;
    /// let (shape, dtype) = (KvShape::heads(16, 128), KvDtype::Bf16);
    /// let layout = PoolConfig { layers: 62, groups, shape, dtype, ..Default::default() }.layout()?;
    /// assert_eq!([0, 1].map(|group| layout.sequence_bytes(group, 8192) / 1_000_000), [671, 503]);
    /// # Ok::<(), kvarena::ConfigError>(())
    /// ```
    ///
    /// # Panics
    /// If there is no such group.
    pub fn sequence_bytes(&self, group: u32, tokens: u32) -> u64 {
        if let Some(state) = self.state_of(group) {
            let pages = if tokens > 0 { state.pages } else { 0 };
            return self.page_bytes.saturating_mul(pages.into());
        }
        let (places, published) = (tokens.div_ceil(self.page_size), tokens / self.page_size);
        let first = self.groups.reach(group).first(published * self.page_size) / self.page_size;
        let pages = u64::from(places - first) * u64::from(self.tracks_of(group));
        pages.saturating_mul(self.page_bytes)
    }

    /// Returns the place of a layer's K and V, or of its state: the track is then the index of the page among those of
    /// the state. O(layers / 64).
    ///
    /// # Panics
    /// If there are several groups and the layer is above [`GROUPED_LAYERS_MAX`](super::GROUPED_LAYERS_MAX).
    pub fn place(&self, layer: LayerId) -> LayerPlace {
        if self.groups.count() == 1 {
            return LayerPlace { group: 0, track: 0, lane: layer.raw() };
        }
        let group = self.groups.group(layer);
        let index = self.groups.before(group, layer.raw());
        let tracks = self.track_range(group);
        let (first, lanes) = (if tracks.is_empty() { 0 } else { tracks.start }, self.lanes_of(group));
        LayerPlace { group, track: first + index / lanes, lane: index % lanes }
    }

    /// Returns the shape of K and V on this rank.
    pub const fn shape(&self) -> KvShape {
        self.format.shape
    }

    /// Returns the number of kv heads on this rank; 1 for latent rows, which all heads read.
    pub const fn kv_heads(&self) -> u32 {
        self.format.shape.kv_heads()
    }

    /// Returns the maximum number of kv heads on this rank over all groups.
    pub fn most_kv_heads(&self) -> u32 {
        let heads = self.formats.iter().map(|format| format.shape.kv_heads());
        heads.max().expect("there is a group")
    }

    /// Returns the number of elements of one head of K and of q; for latent rows, of a whole row.
    pub const fn head_dim(&self) -> u32 {
        self.format.shape.head_dim()
    }

    /// Returns the number of elements of one head of V and of attention's output: [`PoolLayout::head_dim`], or the rank
    /// of latent rows.
    pub const fn value_dim(&self) -> u32 {
        self.format.shape.value_dim()
    }

    /// Returns whether K and V are latent rows, so that stores take no V.
    pub const fn is_latent(&self) -> bool {
        matches!(self.format.shape, KvShape::Latent { .. })
    }

    /// Returns the number of elements of one token's row of k and of v in a store.
    pub(crate) const fn store_widths(&self) -> [usize; 2] {
        let k = self.kv_heads() as usize * self.head_dim() as usize;
        [k, if self.is_latent() { 0 } else { k }]
    }

    /// Returns the element type of K and V.
    pub const fn dtype(&self) -> KvDtype {
        self.format.dtype
    }

    /// Returns the source of the scales; `None` without scales. O(planes).
    pub fn scaling(&self) -> Option<Scaling> {
        let made = self.planes().iter().any(|plane| plane.name == PlaneName::KScales);
        let scaling = if made { Scaling::ByToken } else { Scaling::Static };
        self.format.dtype.is_quantised().then_some(scaling)
    }

    /// Returns the planes in physical order.
    pub fn planes(&self) -> &[Plane] {
        self.format.planes.as_slice()
    }

    /// Returns the number of tokens of a page.
    pub const fn page_size(&self) -> u32 {
        self.page_size
    }

    /// Returns the number of pages.
    pub const fn page_count(&self) -> u32 {
        self.page_count
    }

    /// Returns the number of pages of swap memory to which evicted pages move.
    pub const fn swap_pages(&self) -> u32 {
        self.swap_pages
    }

    /// Returns the number of additional pages of swap memory; puts of the pool's pages go through them.
    pub const fn stage_pages(&self) -> u32 {
        self.stage_pages
    }

    /// Returns the number of pages of swap memory.
    pub const fn swap_region_pages(&self) -> u32 {
        self.swap_pages + self.stage_pages
    }

    /// Returns the physical order.
    pub const fn layout(&self) -> Layout {
        self.layout
    }

    /// Returns the number of tokens that fit in the pool.
    pub const fn slot_count(&self) -> u64 {
        self.page_count as u64 * self.page_size as u64
    }

    /// Returns the number of bytes of a page: all planes of all lanes, padding and unused bytes.
    pub const fn page_bytes(&self) -> u64 {
        self.page_bytes
    }

    /// Returns the number of bytes of the pool.
    pub const fn total_bytes(&self) -> u64 {
        self.page_bytes * self.page_count as u64
    }

    /// Returns whether every slot fits a signed 32-bit number. Plans then have 32-bit slot mappings.
    pub const fn slots_fit_i32(&self) -> bool {
        self.slot_count() <= i32::MAX as u64 + 1
    }

    /// Returns the number of bytes of each page that the host fills.
    pub const fn extra_bytes(&self) -> u32 {
        self.extra_bytes
    }

    /// Returns the bytes of a page that the host fills ([`PoolConfig::extra_bytes`](crate::PoolConfig::extra_bytes)).
    pub fn extra(&self, page: PageId) -> Range<u64> {
        debug_assert!(page.raw() < self.page_count);
        let start = u64::from(page.raw()) * self.page_bytes + self.extra_start;
        start..start + u64::from(self.extra_bytes)
    }

    /// Returns the slot at `offset` of `page`.
    pub fn slot(&self, page: PageId, offset: u32) -> SlotId {
        debug_assert!(offset < self.page_size && page.raw() < self.page_count);
        SlotId::new(u64::from(page.raw()) * u64::from(self.page_size) + u64::from(offset))
    }

    /// Returns the page of a slot, and the slot's offset in the page.
    pub fn page_of(&self, slot: SlotId) -> (PageId, u32) {
        let size = u64::from(self.page_size);
        debug_assert!(slot.raw() < self.slot_count());
        (PageId::new((slot.raw() / size) as u32), (slot.raw() % size) as u32)
    }

    /// Returns the strides of a plane; `None` if the pool does not have it. O(planes).
    pub fn strides(&self, name: PlaneName) -> Option<Strides> {
        self.strides_in(self.layout, name)
    }

    /// Returns the strides of a plane in pages that were read from the pool, which have the order `[plane, L, piece]`
    /// in every layout. O(planes).
    pub fn page_strides(&self, name: PlaneName) -> Option<Strides> {
        self.strides_in(Layout::PageFirst, name)
    }

    /// Returns the byte range of all heads of one slot in a plane; `None` if the pool does not have the plane, or if
    /// its order is [`PlaneOrder::ByPage`]. O(planes).
    pub fn row(&self, name: PlaneName, layer: LayerId, slot: SlotId) -> Option<Range<u64>> {
        debug_assert!(layer.raw() < self.layers);
        let plane = self.planes().iter().find(|plane| plane.name == name)?;
        let (page, offset) = self.page_of(slot);
        let start = self.strides(name)?.row(self.place(layer).lane, page, offset);
        match plane.order {
            PlaneOrder::BySlot => Some(start..start + plane.row_bytes() as u64),
            PlaneOrder::ByPage => None,
        }
    }

    /// Returns the number of contiguous byte ranges of a page: 1 in PageFirst, one for each plane and lane in
    /// LayerFirst.
    pub const fn pieces_per_page(&self) -> u32 {
        match self.layout {
            Layout::LayerFirst => self.format.planes.count() * self.format.lanes,
            Layout::PageFirst => 1,
        }
    }

    /// Returns one contiguous byte range of a page. The ranges are ordered by plane, then by lane, so in every layout
    /// their concatenation has the order `[plane, L, piece]`. O(planes).
    pub fn piece(&self, page: PageId, piece: u32) -> Range<u64> {
        debug_assert!(piece < self.pieces_per_page() && page.raw() < self.page_count);
        match self.layout {
            Layout::LayerFirst => {
                let plane = &self.planes()[(piece / self.lanes()) as usize];
                let strides = self.strides(plane.name).expect("the plane is the pool's");
                let start = strides.row(piece % self.lanes(), page, 0);
                start..start + self.piece_bytes(plane)
            }
            Layout::PageFirst => {
                let start = u64::from(page.raw()) * self.page_bytes;
                start..start + self.page_bytes
            }
        }
    }

    /// Returns the bytes of a piece of a plane, including padding.
    pub(crate) fn piece_bytes(&self, plane: &Plane) -> u64 {
        self.format.planes.piece_bytes(plane, self.page_size) as u64
    }

    fn strides_in(&self, layout: Layout, name: PlaneName) -> Option<Strides> {
        let index = self.planes().iter().position(|plane| plane.name == name)?;
        let plane = &self.planes()[index];
        let before: u64 = self.planes()[..index].iter().map(|plane| self.piece_bytes(plane)).sum();
        let (piece, lanes) = (self.piece_bytes(plane), u64::from(self.lanes()));
        let pages = u64::from(self.page_count);
        let (origin, lane, page) = match layout {
            Layout::LayerFirst => (before * lanes * pages, piece * pages, piece),
            Layout::PageFirst => (self.format.start + before * lanes, piece, self.page_bytes),
        };
        let (slot, head) = match plane.order {
            PlaneOrder::BySlot => (plane.row_bytes() as u64, plane.head_bytes()),
            PlaneOrder::ByPage => (plane.head_bytes(), plane.head_bytes() * u64::from(self.page_size)),
        };
        Some(Strides { origin, lane, page, slot, head })
    }
}
