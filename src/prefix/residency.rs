//! Where the pages of a node's entries are.
//!
//! Not here: the columns (`hosts.rs`).

use bytemuck::Zeroable;

use crate::id::{HostPageId, PageId};

/// Stands for the page of an entry that is in host memory alone.
pub(super) const NO_PAGE: PageId = PageId::new(u32::MAX);

/// Stands for the host page of an entry that has none.
pub(super) const NO_HOST_PAGE: HostPageId = HostPageId::new(u32::MAX);

/// Where the pages of a node's entries are.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Zeroable)]
#[repr(C)]
pub(super) struct Residency {
    /// The entries below this have device pages.
    pub device: u32,
    /// The entries from this on have host pages.
    pub host: u32,
}

/// The kind of entries or cells that a cursor looks for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Seek {
    DevicePages,
    HostOnly,
    Dirty,
}

impl Seek {
    pub const ALL: [Self; 3] = [Self::DevicePages, Self::HostOnly, Self::Dirty];

    /// Returns whether a node of `entries` entries has what the cursor looks for.
    pub fn finds(self, Residency { device, host }: Residency, entries: u32) -> bool {
        match self {
            Self::DevicePages => device > 0,
            Self::HostOnly => device < entries,
            Self::Dirty => host > 0,
        }
    }
}
