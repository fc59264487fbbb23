//! The planes of a pool in physical order, and their sizes in bytes.

use std::fmt;

use super::plane::{Plane, PlaneName};

/// Maximum number of planes of a pool.
pub const PLANES_MAX: usize = 8;

/// One to [`PLANES_MAX`] planes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Planes {
    /// The planes; unused items are copies of the first.
    list: [Plane; PLANES_MAX],
    count: u32,
    /// Alignment of pieces, a power of two.
    align: u64,
}

impl Planes {
    pub(super) fn new(planes: &[Plane]) -> Self {
        let mut list = [planes[0]; PLANES_MAX];
        list[..planes.len()].copy_from_slice(planes);
        let align = planes.iter().map(Plane::align).max().expect("there is a plane");
        Self { list, count: planes.len() as u32, align }
    }

    /// Adds the plane of labels with `channels` numbers of each head of K, unless `channels` is 0. Labels have K's
    /// type, or bf16 if K is quantised, because they are read without scales.
    pub(super) fn with_labels(self, channels: u32) -> Self {
        if channels == 0 {
            return self;
        }
        let k = self.list[0];
        let dtype = k.dtype.rows().into();
        let labels = Plane { name: PlaneName::Labels, elements: channels, dtype, ..k };
        let mut planes = Self { count: self.count + 1, align: self.align.max(labels.align()), ..self };
        planes.list[self.count as usize] = labels;
        planes
    }

    pub(super) fn as_slice(&self) -> &[Plane] {
        &self.list[..self.count as usize]
    }

    pub(super) const fn count(&self) -> u32 {
        self.count
    }

    pub(super) const fn align(&self) -> u64 {
        self.align
    }

    /// Returns the bytes of a token in `layers` layers, if they fit 64 bits.
    pub(super) fn token_bytes(&self, layers: u32) -> Option<u64> {
        let layer: u128 = self.as_slice().iter().map(Plane::row_bytes).sum();
        u64::try_from(layer * u128::from(layers)).ok()
    }

    /// Returns the bytes of a piece of a plane, including padding: a multiple of the alignment. At most 2^78.
    pub(super) fn piece_bytes(&self, plane: &Plane, page_size: u32) -> u128 {
        let mask = u128::from(self.align) - 1;
        (plane.row_bytes() * u128::from(page_size) + mask) & !mask
    }

    /// Returns the bytes of `layers` layers of one page, if they fit 64 bits.
    pub(super) fn page_bytes(&self, layers: u32, page_size: u32) -> Option<u64> {
        let pieces = self.as_slice().iter().map(|plane| self.piece_bytes(plane, page_size));
        u64::try_from(pieces.sum::<u128>() * u128::from(layers)).ok()
    }
}

#[cfg(feature = "serde")]
impl serde::Serialize for Planes {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.as_slice())
    }
}

impl fmt::Debug for Planes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.as_slice().fmt(f)
    }
}
