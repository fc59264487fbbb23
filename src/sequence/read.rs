//! Reads of a sequence's pages and tokens.

use crate::id::{CellId, PageId, TokenId};

use super::{Sequence, SequenceTable};

impl SequenceTable {
    /// Returns one page of a row.
    pub fn page(&self, sequence: &Sequence, index: u32) -> PageId {
        debug_assert!(index < sequence.page_len);
        self.stores.pages.page(sequence.row, index)
    }

    /// Returns one known token.
    pub fn token(&self, sequence: &Sequence, position: u32) -> TokenId {
        debug_assert!(position < sequence.token_len);
        self.stores.tokens.token(sequence.row, position)
    }

    /// Returns a row's pages of a track in contiguous slices, from place `start` on, without places that the track does
    /// not keep.
    pub(crate) fn track_pages(
        &self,
        sequence: &Sequence,
        track: u32,
        start: u32,
    ) -> impl Iterator<Item = &[PageId]> + use<'_> {
        let first = self.stores.limits.first_place(track, sequence.published);
        let (start, end) = (start.max(first), sequence.page_len);
        self.stores.pages.pieces(sequence.row, track, start, end)
    }

    pub(crate) fn cell(&self, sequence: &Sequence, group: u32, place: u32) -> CellId {
        self.stores.pages.cell(sequence.row, group, place)
    }

    /// Returns a row's pages in order.
    pub fn pages(&self, sequence: &Sequence) -> impl Iterator<Item = PageId> + use<'_> {
        let row = sequence.row;
        (0..sequence.page_len).map(move |index| self.stores.pages.page(row, index))
    }

    /// Returns a row's pages `start..end` of a track in contiguous slices.
    pub(crate) fn page_pieces(
        &self,
        sequence: &Sequence,
        track: u32,
        start: u32,
        end: u32,
    ) -> impl Iterator<Item = &[PageId]> + use<'_> {
        self.stores.pages.pieces(sequence.row, track, start, end)
    }

    /// Returns a row's known tokens `start..end` in contiguous slices.
    pub(crate) fn token_pieces(
        &self,
        sequence: &Sequence,
        start: u32,
        end: u32,
    ) -> impl Iterator<Item = &[TokenId]> + use<'_> {
        self.stores.tokens.pieces(sequence.row, start, end)
    }
}
