//! Where the pages of a node's entries are.
//!
//! Not here: the columns (`swap.rs`).

use bytemuck::Zeroable;

use crate::id::{PageId, SwapPageId};

/// Stands for the page of an entry that is in swap memory alone.
pub(super) const NO_PAGE: PageId = PageId::new(u32::MAX);

/// Stands for the swap page of an entry that has none.
pub(super) const NO_SWAP_PAGE: SwapPageId = SwapPageId::new(u32::MAX);

/// Where the pages of a node's entries are.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Zeroable)]
#[repr(C)]
pub(super) struct Residency {
    /// The entries below this have device pages.
    pub device: u32,
    /// The entries from this on have swap pages.
    pub swap_start: u32,
}

/// The kind of entries or cells that a cursor looks for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Seek {
    DevicePages,
    SwapOnly,
    Dirty,
}

impl Seek {
    pub const ALL: [Self; 3] = [Self::DevicePages, Self::SwapOnly, Self::Dirty];

    /// Returns whether a node of `entries` entries has what the cursor looks for.
    pub fn finds(self, Residency { device, swap_start }: Residency, entries: u32) -> bool {
        match self {
            Self::DevicePages => device > 0,
            Self::SwapOnly => device < entries,
            Self::Dirty => swap_start > 0,
        }
    }
}
