//! Where K and V lie: [`PoolConfig`] to an immutable [`PoolLayout`] of strides and byte ranges.
//!
//! Logical view of a pool, in both layouts: `[2 (K, V), layer, page, slot in page, kv head, head_dim]`.
//!
//! ```text
//! LayerFirst  [2, L, P, S, H, D]   attention of one layer reads one region
//! PageFirst   [P, 2, L, S, H, D]   a page is one contiguous piece: K and V of all layers
//! ```
//!
//! Pure arithmetic, all of it checked. Not here: memory.

use std::ops::Range;

use crate::error::ConfigError;
use crate::id::{LayerId, PageId, RowId, SlotId};

/// Largest `page_size`.
pub const PAGE_SIZE_MAX: u32 = 1024;

/// Element type of K and V.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Dtype {
    /// IEEE binary32, 4 bytes.
    F32,
    /// IEEE binary16, 2 bytes.
    F16,
    /// bfloat16, 2 bytes.
    Bf16,
}

impl Dtype {
    /// Bytes of one element.
    pub const fn size(self) -> u32 {
        match self {
            Dtype::F32 => 4,
            Dtype::F16 | Dtype::Bf16 => 2,
        }
    }
}

/// Physical order of a pool.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Layout {
    /// `[2, L, P, S, H, D]`: for attention of one layer.
    LayerFirst,
    /// `[P, 2, L, S, H, D]`: for page copies, offload, moving pages between pools.
    PageFirst,
}

/// How large a pool is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Capacity {
    /// This many pages.
    Pages(u32),
    /// As many whole pages as fit into this many bytes of K and V (of one rank).
    Bytes(u64),
}

/// K or V.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kv {
    /// Keys.
    K,
    /// Values.
    V,
}

/// What a pool of K and V is made for. [`PoolConfig::layout`] checks it and computes the rest.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct PoolConfig {
    /// Layers of the model.
    pub layers: u32,
    /// Heads of K and V in the whole model, before tensor parallelism.
    pub kv_heads: u32,
    /// Elements of one head.
    pub head_dim: u32,
    /// Element type of K and V.
    pub dtype: Dtype,
    /// Tokens of one page, 1 to [`PAGE_SIZE_MAX`].
    #[doc(alias = "block_size")]
    pub page_size: u32,
    /// Size of the pool.
    pub capacity: Capacity,
    /// Physical order.
    pub layout: Layout,
    /// Ranks that share the model's heads. Either number divides the other: with more ranks than heads, each rank
    /// holds one replicated head.
    pub tp_size: u32,
    /// This rank, below `tp_size`.
    pub tp_rank: u32,
}

impl Default for PoolConfig {
    /// One layer, one head of 64 x f32, 1,024 pages of 16 tokens, PageFirst, one rank.
    fn default() -> Self {
        Self {
            layers: 1,
            kv_heads: 1,
            head_dim: 64,
            dtype: Dtype::F32,
            page_size: 16,
            capacity: Capacity::Pages(1024),
            layout: Layout::PageFirst,
            tp_size: 1,
            tp_rank: 0,
        }
    }
}

impl PoolConfig {
    /// Bytes of K and V that one token takes on one rank.
    ///
    /// ```
    /// # use kvarena::*;
    /// let qwen3_8b = PoolConfig { layers: 36, kv_heads: 8, head_dim: 128, dtype: Dtype::Bf16, ..Default::default() };
    /// assert_eq!(qwen3_8b.bytes_per_token(), Ok(147_456)); // 2 * 8 * 128 * 36 * 2
    /// ```
    ///
    /// # Errors
    /// A zero, an overflow, or heads and ranks that do not divide.
    pub fn bytes_per_token(&self) -> Result<u64, ConfigError> {
        for (name, value) in [
            ("layers", self.layers),
            ("kv_heads", self.kv_heads),
            ("head_dim", self.head_dim),
            ("tp_size", self.tp_size),
        ] {
            if value == 0 {
                return Err(ConfigError::Zero { name });
            }
        }
        let token = [self.layers, self.head_dim, self.dtype.size(), 2]
            .iter()
            .try_fold(u64::from(self.local_kv_heads()?), |product, &x| {
                product.checked_mul(u64::from(x))
            });
        token.ok_or(ConfigError::Overflow { name: "bytes per token" })
    }

    /// Heads of K and V that this rank holds.
    ///
    /// # Errors
    /// [`ConfigError::Zero`], [`ConfigError::HeadSplit`] where neither number divides the other, [`ConfigError::Rank`]
    /// past the ranks.
    pub fn local_kv_heads(&self) -> Result<u32, ConfigError> {
        let (heads, ranks) = (self.kv_heads, self.tp_size);
        for (name, value) in [("kv_heads", heads), ("tp_size", ranks)] {
            if value == 0 {
                return Err(ConfigError::Zero { name });
            }
        }
        if self.tp_rank >= ranks {
            return Err(ConfigError::Rank { tp_rank: self.tp_rank, tp_size: ranks });
        }
        if heads % ranks == 0 {
            Ok(heads / ranks)
        } else if ranks % heads == 0 {
            Ok(1)
        } else {
            Err(ConfigError::HeadSplit { kv_heads: heads, tp_size: ranks })
        }
    }

    /// First of the model's kv heads that this rank holds; it holds [`PoolConfig::local_kv_heads`] from there on.
    ///
    /// # Errors
    /// As [`PoolConfig::local_kv_heads`].
    pub fn first_kv_head(&self) -> Result<u32, ConfigError> {
        let local = self.local_kv_heads()?;
        if self.kv_heads >= self.tp_size {
            Ok(self.tp_rank * local)
        } else {
            Ok(self.tp_rank / (self.tp_size / self.kv_heads))
        }
    }

    /// Checks the config and computes strides, sizes and the number of pages.
    ///
    /// # Errors
    /// A [`ConfigError`] that names the value: zeros, sizes that overflow, page counts past `u32`, a byte budget
    /// smaller than one page, heads that do not divide.
    pub fn layout(&self) -> Result<PoolLayout, ConfigError> {
        let bytes_per_token = self.bytes_per_token()?;
        // A page has up to 2 * layers pieces, counted in 32 bits.
        if self.layers > u32::MAX / 2 {
            let (value, max) = (self.layers.into(), (u32::MAX / 2).into());
            return Err(ConfigError::Limit { name: "layers", value, max });
        }
        if self.page_size == 0 {
            return Err(ConfigError::Zero { name: "page_size" });
        }
        if self.page_size > PAGE_SIZE_MAX {
            return Err(ConfigError::PageSize { page_size: self.page_size });
        }
        let page_bytes = bytes_per_token
            .checked_mul(u64::from(self.page_size))
            .ok_or(ConfigError::Overflow { name: "page_bytes" })?;
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
        // u32::MAX itself stays free, for "no page" in kernels' tables.
        if page_count >= u64::from(u32::MAX) {
            return Err(ConfigError::PageCount { page_count });
        }
        page_bytes.checked_mul(page_count).ok_or(ConfigError::Overflow { name: "pool bytes" })?;
        Ok(PoolLayout {
            layers: self.layers,
            kv_heads: self.local_kv_heads()?,
            head_dim: self.head_dim,
            dtype: self.dtype,
            page_size: self.page_size,
            page_count: page_count as u32,
            layout: self.layout,
        })
    }
}

/// Distances between neighbours along each axis of a pool, in elements.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Strides {
    /// From K to V.
    pub kv: u64,
    /// From a layer to the next.
    pub layer: u64,
    /// From a page to the next.
    pub page: u64,
    /// From a slot to the next in its page.
    pub slot: u64,
    /// From a head to the next.
    pub head: u64,
}

/// A checked pool: what one rank holds and where. Made by [`PoolConfig::layout`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PoolLayout {
    layers: u32,
    kv_heads: u32,
    head_dim: u32,
    dtype: Dtype,
    page_size: u32,
    page_count: u32,
    layout: Layout,
}

impl PoolLayout {
    /// Layers of the model.
    pub const fn layers(&self) -> u32 {
        self.layers
    }

    /// Heads of K and V on this rank.
    pub const fn kv_heads(&self) -> u32 {
        self.kv_heads
    }

    /// Elements of one head.
    pub const fn head_dim(&self) -> u32 {
        self.head_dim
    }

    /// Element type.
    pub const fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Tokens of one page.
    pub const fn page_size(&self) -> u32 {
        self.page_size
    }

    /// Pages of the pool.
    pub const fn page_count(&self) -> u32 {
        self.page_count
    }

    /// Physical order.
    pub const fn layout(&self) -> Layout {
        self.layout
    }

    /// Tokens that the whole pool holds.
    pub const fn slot_count(&self) -> u64 {
        self.page_count as u64 * self.page_size as u64
    }

    /// Bytes of one page: K and V of all layers.
    pub const fn page_bytes(&self) -> u64 {
        self.piece_bytes_layer_first() * 2 * self.layers as u64
    }

    /// Bytes of the whole pool.
    pub const fn total_bytes(&self) -> u64 {
        self.page_bytes() * self.page_count as u64
    }

    /// Whether every slot fits a signed 32-bit number, so that plans carry 32-bit slot mappings.
    pub const fn slots_fit_i32(&self) -> bool {
        self.slot_count() <= i32::MAX as u64 + 1
    }

    /// The slot at `offset` of `page`.
    pub fn slot(&self, page: PageId, offset: u32) -> SlotId {
        debug_assert!(offset < self.page_size && page.raw() < self.page_count);
        SlotId::new(u64::from(page.raw()) * u64::from(self.page_size) + u64::from(offset))
    }

    /// The page and the offset in it of a slot.
    pub fn page_of(&self, slot: SlotId) -> (PageId, u32) {
        let size = u64::from(self.page_size);
        debug_assert!(slot.raw() < self.slot_count());
        (PageId::new((slot.raw() / size) as u32), (slot.raw() % size) as u32)
    }

    /// Strides in elements.
    pub const fn strides(&self) -> Strides {
        let head = self.head_dim as u64;
        let slot = head * self.kv_heads as u64;
        let plane = slot * self.page_size as u64; // one page, one layer, K or V
        match self.layout {
            Layout::LayerFirst => Strides {
                kv: plane * self.page_count as u64 * self.layers as u64,
                layer: plane * self.page_count as u64,
                page: plane,
                slot,
                head,
            },
            Layout::PageFirst => Strides {
                kv: plane * self.layers as u64,
                layer: plane,
                page: plane * 2 * self.layers as u64,
                slot,
                head,
            },
        }
    }

    /// First element of K or V of one layer: the origin that page strides count from.
    pub fn origin(&self, kv: Kv, layer: LayerId) -> u64 {
        debug_assert!(layer.raw() < self.layers);
        let strides = self.strides();
        let v = if kv == Kv::V { strides.kv } else { 0 };
        v + strides.layer * u64::from(layer.raw())
    }

    /// First element of one slot's head 0. All heads of a slot are contiguous: `kv_heads * head_dim` elements.
    pub fn element(&self, kv: Kv, layer: LayerId, slot: SlotId) -> u64 {
        let (page, offset) = self.page_of(slot);
        let strides = self.strides();
        self.origin(kv, layer)
            + strides.page * u64::from(page.raw())
            + strides.slot * u64::from(offset)
    }

    /// Bytes of one contiguous piece of a page.
    pub const fn piece_bytes(&self) -> u64 {
        match self.layout {
            Layout::LayerFirst => self.piece_bytes_layer_first(),
            Layout::PageFirst => self.page_bytes(),
        }
    }

    /// Contiguous pieces of one page: 1 in PageFirst, `2 * layers` in LayerFirst.
    pub const fn pieces_per_page(&self) -> u32 {
        match self.layout {
            Layout::LayerFirst => 2 * self.layers,
            Layout::PageFirst => 1,
        }
    }

    /// Byte range of one contiguous piece of a page. Pieces are ordered K of every layer, then V of every layer, so
    /// that the pieces of a page in order are the page in the order `[2, L, S, H, D]`, whatever the layout.
    pub fn piece(&self, page: PageId, piece: u32) -> Range<u64> {
        debug_assert!(piece < self.pieces_per_page() && page.raw() < self.page_count);
        let bytes = self.piece_bytes();
        let start = match self.layout {
            // The origins of (K, layer 0..), (V, layer 0..) follow one another.
            Layout::LayerFirst => {
                (u64::from(piece) * u64::from(self.page_count) + u64::from(page.raw())) * bytes
            }
            Layout::PageFirst => u64::from(page.raw()) * bytes,
        };
        start..start + bytes
    }

    const fn piece_bytes_layer_first(&self) -> u64 {
        self.page_size as u64
            * self.kv_heads as u64
            * self.head_dim as u64
            * self.dtype.size() as u64
    }
}

/// Tokens that one chunk of a sequence holds, where the page size divides it.
const CHUNK_TOKENS: u32 = 1024;

/// Shape of the page tables: one flat array of 32-bit words, the same on the host and on every backend.
///
/// A row is found in two steps, so that rows of any length need no contiguous memory and none is ever moved:
///
/// ```text
/// words = [ directory: rows x chunks_per_row | chunks: chunk_count x chunk_pages ]
/// chunk = words[row * chunks_per_row + page_index / chunk_pages]
/// page  = words[rows * chunks_per_row + chunk * chunk_pages + page_index % chunk_pages]
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TableShape {
    /// Rows: the most sequences at a time.
    pub rows: u32,
    /// Words of one row's directory.
    pub chunks_per_row: u32,
    /// Pages of one chunk: a power of two.
    pub chunk_pages: u32,
    /// Chunks of all rows together.
    pub chunk_count: u32,
}

impl TableShape {
    /// The shape for `rows` sequences of at most `len_max` tokens each and `tokens` together.
    ///
    /// # Errors
    /// [`ConfigError::Overflow`] where a word's index would not fit 32 bits, [`ConfigError::Zero`] for a page of no
    /// tokens.
    pub fn new(page_size: u32, rows: u32, len_max: u32, tokens: u64) -> Result<Self, ConfigError> {
        if page_size == 0 {
            return Err(ConfigError::Zero { name: "page_size" });
        }
        // A power of two, so that finding a page takes no division.
        let chunk_pages = 1 << (CHUNK_TOKENS / page_size).max(1).ilog2();
        let chunk_tokens = chunk_pages * page_size;
        // Every row may leave its last chunk partly empty.
        let chunk_count = tokens / u64::from(chunk_tokens) + u64::from(rows);
        let chunks_per_row = len_max.div_ceil(chunk_tokens);
        let overflow = ConfigError::Overflow { name: "page table words" };
        let shape = Self {
            rows,
            chunks_per_row,
            chunk_pages,
            chunk_count: u32::try_from(chunk_count).map_err(|_| overflow)?,
        };
        let words = u64::from(rows) * u64::from(chunks_per_row)
            + u64::from(shape.chunk_count) * u64::from(chunk_pages);
        if words > u64::from(u32::MAX) { Err(overflow) } else { Ok(shape) }
    }

    /// Words of the whole array.
    pub const fn words(&self) -> usize {
        self.rows as usize * self.chunks_per_row as usize
            + self.chunk_count as usize * self.chunk_pages as usize
    }

    /// Index of the word that names the chunk of a row's page.
    pub const fn directory_word(&self, row: RowId, page_index: u32) -> u32 {
        row.raw() * self.chunks_per_row + (page_index >> self.chunk_pages.trailing_zeros())
    }

    /// Index of the word that names a page, given its chunk.
    pub const fn page_word(&self, chunk: u32, page_index: u32) -> u32 {
        let in_chunk = page_index & (self.chunk_pages - 1);
        self.rows * self.chunks_per_row + chunk * self.chunk_pages + in_chunk
    }

    /// Looks a page up in the array.
    pub fn page(&self, words: &[u32], row: RowId, page_index: u32) -> PageId {
        let chunk = words[self.directory_word(row, page_index) as usize];
        PageId::new(words[self.page_word(chunk, page_index) as usize])
    }
}
