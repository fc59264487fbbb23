//! The format of a group's pages: the planes of its layers, and the number of layers in a page.

use super::dtype::KvDtype;
use super::groups::{GROUPED_LAYERS_MAX, GROUPS_MAX};
use super::planes::Planes;
use super::shape::KvShape;

/// The host's bytes of a page begin at a multiple of this number.
const EXTRA_ALIGN: u64 = 256;

/// The format of a group on one rank.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub(super) struct Format {
    pub(super) shape: KvShape,
    pub(super) dtype: KvDtype,
    pub(super) planes: Planes,
    /// Number of layers in a page.
    pub(super) lanes: u32,
    /// First byte of the lanes in a page.
    pub(super) start: u64,
    /// Number of bytes of a page outside of its lanes.
    pub(super) unused_bytes: u64,
}

impl Format {
    /// Creates a format without lanes.
    pub(super) fn new(shape: KvShape, dtype: KvDtype, planes: Planes) -> Self {
        Self { shape, dtype, planes, lanes: 0, start: 0, unused_bytes: 0 }
    }

    /// Returns whether a layer has the same bytes in another format.
    pub(super) fn is_like(&self, other: &Self) -> bool {
        (self.shape, self.dtype, &self.planes) == (other.shape, other.dtype, &other.planes)
    }
}

/// What each page of group 0 holds.
#[derive(Clone, Copy, Debug)]
pub(super) struct Contents {
    /// Number of layers of group 0, and of each group that shares its pages; 0 for other groups.
    pub(super) layers: [u32; GROUPS_MAX],
    /// Number of bytes of the host's, behind all layers.
    pub(super) extra_bytes: u32,
}

/// Sets the lanes of every group, and returns the bytes of a page and the first one of the host's; `None` if they do
/// not fit 64 bits. A page can contain either all layers of group 0 and of the groups that share its pages, or at least
/// one layer of any other group.
pub(super) fn fit(formats: &mut [Format; GROUPS_MAX], contents: &Contents, page_size: u32) -> Option<(u64, u64)> {
    let mut end = 0_u64;
    for (format, &layers) in formats.iter_mut().zip(&contents.layers).filter(|(_, layers)| **layers > 0) {
        format.start = end.checked_next_multiple_of(format.planes.align())?;
        format.lanes = layers;
        end = format.start.checked_add(format.planes.page_bytes(layers, page_size)?)?;
    }
    let (mut align, mut extra) = (1, end);
    if contents.extra_bytes > 0 {
        align = EXTRA_ALIGN;
        extra = end.checked_next_multiple_of(EXTRA_ALIGN)?;
        end = extra.checked_add(contents.extra_bytes.into())?;
    }
    let mut page_bytes = end;
    for format in &*formats {
        page_bytes = page_bytes.max(format.planes.page_bytes(1, page_size)?);
        align = align.max(format.planes.align());
    }
    page_bytes = page_bytes.checked_next_multiple_of(align)?;
    let first = formats[0];
    for (format, &layers) in formats.iter_mut().zip(&contents.layers) {
        let layer_bytes = format.planes.page_bytes(1, page_size)?;
        let fitting = (page_bytes / layer_bytes).min(GROUPED_LAYERS_MAX as u64) as u32;
        if layers == 0 {
            format.lanes = if format.is_like(&first) { first.lanes } else { fitting };
        }
        format.unused_bytes = page_bytes - u64::from(format.lanes) * layer_bytes;
    }
    Some((page_bytes, extra))
}

#[cfg(test)]
mod tests;
