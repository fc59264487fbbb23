//! The configuration of a tree.

use crate::error::ConfigError;
use crate::hash::Hashing;
use crate::layout::PAGE_SIZE_MAX;
use crate::memory::Memory;
use crate::prefix::TreeShape;

use super::Tables;

/// The configuration of a [`Tree`](super::Tree).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TreeConfig {
    /// Page ids are below this number, so it is the maximum number of cached pages.
    pub pages: u32,
    /// Number of tokens of a page, 1 to [`PAGE_SIZE_MAX`].
    pub page_size: u32,
    /// Hash recipe of cached pages, as in [`EngineConfig::hashing`](crate::EngineConfig::hashing).
    pub hashing: Option<Hashing>,
    /// Capacity of the event buffer in pages, as in [`EngineConfig::event_pages`](crate::EngineConfig::event_pages).
    pub event_pages: u32,
    /// Whether [`Tree::new`](super::Tree::new) touches its memory, as in
    /// [`EngineConfig::prefault`](crate::EngineConfig::prefault).
    pub prefault: bool,
}

impl TreeConfig {
    /// Returns the config of a tree without hashes and events, whose memory is touched at the start.
    pub const fn new(pages: u32, page_size: u32) -> Self {
        Self { pages, page_size, hashing: None, event_pages: 0, prefault: true }
    }

    /// Returns the bytes that the tree will allocate. O(1).
    ///
    /// # Errors
    /// A [`ConfigError`] that names the value.
    pub fn bytes(&self) -> Result<u64, ConfigError> {
        let shape = self.shape()?;
        let counted = Tables::new(&shape, &mut Memory::counting());
        Ok(counted.map(|(_, bytes)| bytes).expect("counting allocates nothing"))
    }

    /// Checks the config.
    pub(super) fn shape(&self) -> Result<TreeShape, ConfigError> {
        let &Self { pages, page_size, hashing, event_pages, .. } = self;
        for (name, value) in [("pages", pages), ("page_size", page_size)] {
            if value == 0 {
                return Err(ConfigError::Zero { name });
            }
        }
        if page_size > PAGE_SIZE_MAX {
            return Err(ConfigError::PageSize { page_size, max: PAGE_SIZE_MAX });
        }
        // The tree uses u32::MAX for "no page".
        if pages == u32::MAX {
            return Err(ConfigError::PageCount { page_count: pages.into() });
        }
        if event_pages > 0 && hashing.is_none() {
            return Err(ConfigError::EventsWithoutHashes { event_pages });
        }
        Ok(TreeShape { hashing, event_pages, ..TreeShape::new(pages, page_size, u32::BITS) })
    }
}
