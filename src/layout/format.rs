//! The format of a group's pages: the planes of its layers, and the number of layers in a page.

use super::dtype::KvDtype;
use super::groups::{GROUPED_LAYERS_MAX, GROUPS_MAX};
use super::planes::Planes;
use super::shape::KvShape;

/// The format of a group on one rank.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub(super) struct Format {
    pub(super) shape: KvShape,
    pub(super) dtype: KvDtype,
    pub(super) planes: Planes,
    /// Number of layers in a page.
    pub(super) lanes: u32,
    /// Number of bytes of a page after its lanes.
    pub(super) unused_bytes: u64,
}

impl Format {
    /// Creates a format without lanes.
    pub(super) fn new(shape: KvShape, dtype: KvDtype, planes: Planes) -> Self {
        Self { shape, dtype, planes, lanes: 0, unused_bytes: 0 }
    }
}

/// Sets the number of lanes of every group, and returns the bytes of a page; `None` if they do not fit 64 bits. A page
/// can contain either `lanes` layers of group 0 or at least one layer of any other group.
pub(super) fn fit(formats: &mut [Format; GROUPS_MAX], lanes: u32, page_size: u32) -> Option<u64> {
    let mut page_bytes = formats[0].planes.page_bytes(lanes, page_size)?;
    let mut align = 1;
    for format in &*formats {
        page_bytes = page_bytes.max(format.planes.page_bytes(1, page_size)?);
        align = align.max(format.planes.align());
    }
    page_bytes = page_bytes.checked_next_multiple_of(align)?;
    let first = formats[0];
    for format in formats {
        let layer_bytes = format.planes.page_bytes(1, page_size)?;
        let fitting = (page_bytes / layer_bytes).min(GROUPED_LAYERS_MAX as u64) as u32;
        format.lanes = if *format == first { lanes } else { fitting };
        format.unused_bytes = page_bytes - u64::from(format.lanes) * layer_bytes;
    }
    Some(page_bytes)
}

#[cfg(test)]
mod tests;
