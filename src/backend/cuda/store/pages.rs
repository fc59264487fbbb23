//! The addresses of whole pages: their pieces, for copies and compactions.

use std::ops::Range;

use crate::layout::{PLANES_MAX, Plane, PoolLayout};

/// The heads of a piece: head h of slot s at `s * slot_stride + h * head_stride`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Rows {
    pub slots: u32,
    pub heads: u32,
    pub head_bytes: u64,
    pub slot_stride: u64,
    pub head_stride: u64,
}

impl Rows {
    /// Returns the heads of a plane, with contiguous slots of contiguous heads.
    pub fn new(layout: &PoolLayout, plane: &Plane) -> Self {
        let (head_bytes, heads) = (plane.head_bytes(), plane.heads);
        let slot_stride = head_bytes * u64::from(heads);
        Self { slots: layout.page_size(), heads, head_bytes, slot_stride, head_stride: head_bytes }
    }
}

/// Pieces of one size: piece `i` of page `p` is at `address + p * page_stride + i * piece_stride`, or with a table at
/// `table[i] + p * page_stride`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Pieces {
    pub address: u64,
    /// Device address of u64 `[count]`; 0: the pieces have one stride and are contiguous.
    pub table: u64,
    pub page_stride: u64,
    pub piece_stride: u64,
    pub piece_bytes: u64,
    pub rows: Rows,
    pub count: u32,
}

impl Pieces {
    /// Returns contiguous pages of one piece each.
    fn whole(address: u64, bytes: u64) -> Self {
        let rows = Rows { slots: 1, heads: 1, head_bytes: bytes, slot_stride: bytes, head_stride: bytes };
        Self { address, table: 0, page_stride: bytes, piece_stride: bytes, piece_bytes: bytes, rows, count: 1 }
    }

    /// Returns the number of bytes of the pieces of one page.
    pub fn bytes(&self) -> u64 {
        self.piece_bytes * u64::from(self.count)
    }

    /// Returns whether the pieces of another plane are alike and begin where the next piece of this one would.
    pub fn continues(&self, next: &Self) -> bool {
        let address = self.address + self.piece_stride * u64::from(self.count);
        *next == Self { address, count: next.count, ..*self }
    }

    /// Returns the pieces from `first` on, `count` of them.
    fn part(&self, first: u32, count: u32) -> Self {
        let first = u64::from(first);
        let table = if self.table == 0 { 0 } else { self.table + 8 * first };
        Self { address: self.address + first * self.piece_stride, table, count, ..*self }
    }

    /// Returns whether pages of two memories have pieces of the same sizes and numbers.
    fn is_like(&self, other: &Self) -> bool {
        (self.piece_bytes, self.count) == (other.piece_bytes, other.count)
    }
}

/// The addresses of whole pages: the pieces of a page, in groups. The pieces of a group have the same size.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Pages {
    groups: [Pieces; PLANES_MAX],
    group_count: usize,
    /// Number of pieces of one plane in a page: one for each lane, or 1 if the planes depend on the group.
    pub lanes: u32,
    /// Number of pages.
    pub count: u32,
}

impl Pages {
    /// Returns the pages of a pool whose planes have these pieces.
    pub fn new(pieces: &[Pieces], layout: &PoolLayout) -> Self {
        if layout.has_one_shape() {
            return Self::of(pieces, layout.lanes(), layout.page_count());
        }
        // The planes depend on the group, but every page is contiguous.
        Self::of(&[Pieces::whole(pieces[0].address, layout.page_bytes())], 1, layout.page_count())
    }

    fn of(pieces: &[Pieces], lanes: u32, count: u32) -> Self {
        let mut groups = [Pieces::default(); PLANES_MAX];
        groups[..pieces.len()].copy_from_slice(pieces);
        Self { groups, group_count: pieces.len(), lanes, count }
    }

    /// Returns consecutive pages of the same size, each contiguous.
    pub fn packed(address: u64, like: &Pages, count: u32) -> Self {
        let mut pages = Self { count, ..*like };
        let (page_stride, mut next) = (like.page_bytes(), address);
        for group in &mut pages.groups[..like.group_count] {
            let slot_stride = group.rows.head_bytes * u64::from(group.rows.heads);
            let rows = Rows { slot_stride, head_stride: group.rows.head_bytes, ..group.rows };
            let piece_stride = group.piece_bytes;
            *group = Pieces { address: next, table: 0, page_stride, piece_stride, rows, ..*group };
            next += group.bytes();
        }
        pages
    }

    /// Returns the pieces of some lanes, a group for each plane.
    pub fn part(&self, lanes: Range<u32>) -> Self {
        let mut part = Self { group_count: 0, lanes: lanes.len() as u32, ..*self };
        for group in self.groups() {
            for first in (0..group.count).step_by(self.lanes as usize) {
                part.groups[part.group_count] = group.part(first + lanes.start, part.lanes);
                part.group_count += 1;
            }
        }
        part
    }

    /// Returns the number of planes.
    pub fn planes(&self) -> u32 {
        self.groups().iter().map(|group| group.count / self.lanes).sum()
    }

    /// Returns the groups of pieces, in the order of a page.
    pub fn groups(&self) -> &[Pieces] {
        &self.groups[..self.group_count]
    }

    /// Returns whether the pieces have a table of addresses, as in memory of the host.
    pub fn has_table(&self) -> bool {
        self.groups().iter().any(|group| group.table != 0)
    }

    /// Returns whether a page is contiguous.
    pub fn is_packed(&self) -> bool {
        let mut end = self.groups[0].address;
        self.groups().iter().all(|group| {
            let follows = group.table == 0 && group.address == end && group.piece_stride == group.piece_bytes;
            end += group.bytes();
            follows
        })
    }

    /// Returns packed pages with one piece each.
    pub fn whole(&self) -> Pieces {
        debug_assert!(self.is_packed());
        Pieces::whole(self.groups[0].address, self.page_bytes())
    }

    /// Returns whether pages of the two pools have pieces of the same sizes and numbers.
    pub fn is_like(&self, other: &Self) -> bool {
        let pairs = || self.groups().iter().zip(other.groups());
        self.group_count == other.group_count && pairs().all(|(a, b)| a.is_like(b))
    }

    pub fn page_bytes(&self) -> u64 {
        self.groups().iter().map(Pieces::bytes).sum()
    }
}

#[cfg(test)]
mod tests;
