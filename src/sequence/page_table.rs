//! The page tables of all sequences: the words that backends mirror ([`TableShape`]), a directory and leaves of pages.
//!
//! The *entry* of a page is the index of its word after the directory. The pages of other tracks at the same place
//! follow at distances of `leaf_pages` entries. Leaves count their users: a fork's child shares leaves of its parent
//! whose pages are all published. Words of shared leaves are never rewritten.

use std::ops::Range;

use super::leaf_pool::LeafPool;
use super::pieces;
use crate::id::{CellId, PageId, RowId};
use crate::layout::TableShape;
use crate::memory::{Memory, OutOfMemory, prefetch_item};
use crate::plan::TableWrite;

/// The words, and the users of each leaf.
pub(super) struct PageTable {
    shape: TableShape,
    /// Directory, then pages: see [`TableShape`].
    words: Vec<u32>,
    /// Number of words of the directory.
    directory_len: usize,
    leaves: LeafPool,
    /// Number of groups other than group 0.
    groups: u32,
    /// `[leaf, group, page]`: the cell that owns the pages of a place; none if the pages are private.
    cells: Vec<CellId>,
}

impl PageTable {
    pub fn new(shape: &TableShape, memory: &mut Memory) -> Result<Self, OutOfMemory> {
        Ok(Self {
            shape: *shape,
            // Zeroed memory is not touched before its first use.
            words: memory.zeroed(shape.words() as u64)?,
            directory_len: shape.directory_word(RowId::new(shape.rows), 0) as usize,
            leaves: LeafPool::new(shape.leaf_count, memory)?,
            groups: 0,
            cells: Vec::new(),
        })
    }

    /// Allocates the cells of `groups` groups other than group 0.
    pub fn keep_cells(&mut self, groups: u32, memory: &mut Memory) -> Result<(), OutOfMemory> {
        let places = u64::from(self.shape.leaf_count) * u64::from(self.shape.leaf_pages);
        (self.groups, self.cells) = (groups, memory.zeroed(places * u64::from(groups))?);
        Ok(())
    }

    /// Returns the cell of a group at a row's place.
    pub fn cell(&self, row: RowId, group: u32, place: u32) -> CellId {
        self.cells[self.cell_index(row, group, place)]
    }

    pub fn set_cell(&mut self, row: RowId, group: u32, place: u32, cell: CellId) {
        let index = self.cell_index(row, group, place);
        self.cells[index] = cell;
    }

    fn cell_index(&self, row: RowId, group: u32, place: u32) -> usize {
        let block = self.words[self.shape.directory_word(row, place) as usize];
        let leaf = (block / self.shape.tracks * self.groups + group) as usize;
        leaf * self.shape.leaf_pages as usize + (place & (self.shape.leaf_pages - 1)) as usize
    }

    pub fn leaves_for(&self, pages: u32) -> u32 {
        (pages + self.shape.leaf_pages - 1) >> self.shape.leaf_pages.trailing_zeros()
    }

    /// Returns the number of pages in whole leaves among `pages`.
    pub fn whole_leaves(&self, pages: u32) -> u32 {
        pages & !(self.shape.leaf_pages - 1)
    }

    /// Returns whether a page is the first of its leaf.
    pub fn begins_leaf(&self, index: u32) -> bool {
        index & (self.shape.leaf_pages - 1) == 0
    }

    /// Returns the number of page tables of a row.
    pub fn tracks(&self) -> u32 {
        self.shape.tracks
    }

    /// Adds the leaves for `to` pages to a row of `from` pages. The pool has enough leaves, because the caller has
    /// reserved as many leaves for the tokens of these pages.
    pub fn reserve(&mut self, row: RowId, from: u32, to: u32) {
        for leaf in self.leaves_for(from)..self.leaves_for(to) {
            let word = self.shape.directory_word(row, leaf * self.shape.leaf_pages);
            self.words[word as usize] = self.leaves.take() * self.shape.tracks;
        }
    }

    /// Releases the leaves of a row of `from` pages beyond `to` pages. Places of free leaves name no cells.
    pub fn shrink(&mut self, row: RowId, from: u32, to: u32) {
        let cells = (self.groups * self.shape.leaf_pages) as usize;
        for leaf in self.leaves_for(to)..self.leaves_for(from) {
            let word = self.shape.directory_word(row, leaf * self.shape.leaf_pages);
            let leaf = self.words[word as usize] / self.shape.tracks;
            if self.leaves.release(leaf) {
                self.cells[leaf as usize * cells..][..cells].fill(CellId::NONE);
            }
        }
    }

    /// Shares another row's first leaves, which are whole and contain `pages` pages, with a row without pages.
    pub fn share(&mut self, from: RowId, to: RowId, pages: u32) {
        for index in (0..pages).step_by(self.shape.leaf_pages as usize) {
            let block = self.words[self.shape.directory_word(from, index) as usize];
            self.leaves.share(block / self.shape.tracks);
            self.words[self.shape.directory_word(to, index) as usize] = block;
        }
    }

    /// Returns the entry of a row's page in track 0.
    pub fn entry(&self, row: RowId, index: u32) -> u32 {
        let block = self.words[self.shape.directory_word(row, index) as usize];
        let in_leaf = index & (self.shape.leaf_pages - 1);
        block * self.shape.leaf_pages + in_leaf
    }

    /// Returns the entry in another track at the place of an entry of track 0.
    fn entry_of(&self, entry: u32, track: u32) -> u32 {
        entry + track * self.shape.leaf_pages
    }

    /// Returns the words of a row's pages in a track from `index` on, up to page `end` or the end of the leaf.
    fn run(&self, row: RowId, track: u32, index: u32, end: u32) -> Range<usize> {
        let first = self.directory_len + self.entry_of(self.entry(row, index), track) as usize;
        let leaf_end = (index | (self.shape.leaf_pages - 1)) + 1;
        first..first + (end.min(leaf_end) - index) as usize
    }

    pub fn page(&self, row: RowId, index: u32) -> PageId {
        self.page_at(self.entry(row, index))
    }

    /// Returns the page of another track at the place of an entry of track 0.
    pub fn track_page_at(&self, entry: u32, track: u32) -> PageId {
        self.page_at(self.entry_of(entry, track))
    }

    /// Returns the page at an entry.
    pub fn page_at(&self, entry: u32) -> PageId {
        PageId::new(self.words[self.directory_len + entry as usize])
    }

    /// Prefetches the word of an entry, if the entry exists.
    pub fn prefetch(&self, entry: u32) {
        if let Some(word) = self.words.get(self.directory_len + entry as usize) {
            prefetch_item(word);
        }
    }

    /// Writes the pages of a track from page `start` on. The row has the leaves.
    pub fn write(&mut self, row: RowId, track: u32, start: u32, mut pages: &[PageId]) {
        let (mut at, end) = (start, start + pages.len() as u32);
        while at < end {
            let run = self.run(row, track, at, end);
            at += run.len() as u32;
            let (head, rest) = pages.split_at(run.len());
            self.words[run].copy_from_slice(PageId::as_raw(head));
            pages = rest;
        }
    }

    /// Writes the pages of all tracks at the same place as an entry of track 0.
    #[inline]
    pub fn write_place(&mut self, entry: u32, pages: &[PageId], writes: &mut [TableWrite]) {
        let mut at = self.directory_len + entry as usize;
        for (page, write) in pages.iter().zip(writes) {
            self.words[at] = page.raw();
            *write = TableWrite { index: at as u32, value: page.raw() };
            at += self.shape.leaf_pages as usize;
        }
    }

    /// Returns the pages of tracks `1..tracks` at the same place as an entry of track 0.
    #[inline]
    pub fn further_pages(&self, entry: u32, tracks: usize) -> impl Iterator<Item = PageId> {
        let mut at = self.directory_len + entry as usize;
        (1..tracks).map(move |_| {
            at += self.shape.leaf_pages as usize;
            PageId::new(self.words[at])
        })
    }

    #[inline]
    pub fn write_one(&mut self, entry: u32, page: PageId) -> TableWrite {
        let (word, value) = (self.directory_len + entry as usize, page.raw());
        self.words[word] = value;
        TableWrite { index: word as u32, value }
    }

    /// Returns the pages `start..end` of a track in slices, one for each leaf.
    pub fn pieces(&self, row: RowId, track: u32, start: u32, end: u32) -> impl Iterator<Item = &[PageId]> + use<'_> {
        pieces(start, end, move |at| PageId::from_raw(&self.words[self.run(row, track, at, end)]))
    }

    /// Returns a row's pages of track 0 from `start` on, up to `end` or the end of the leaf, to rewrite them.
    pub fn piece_mut(&mut self, row: RowId, start: u32, end: u32) -> &mut [PageId] {
        let run = self.run(row, 0, start, end);
        bytemuck::cast_slice_mut(&mut self.words[run])
    }

    /// Returns the directory word for the leaf of a row's page.
    pub fn directory_write(&self, row: RowId, index: u32) -> TableWrite {
        let index = self.shape.directory_word(row, index);
        TableWrite { index, value: self.words[index as usize] }
    }

    /// Calls `write` with the words of pages `start..end`: the directory words of leaves that begin there, and the
    /// words of each track's pages. `own` returns the first page to write of a track.
    pub fn writes(
        &self,
        row: RowId,
        start: u32,
        own: impl Fn(u32) -> u32,
        end: u32,
        mut write: impl FnMut(TableWrite),
    ) {
        let mut at = start;
        while at < end {
            if self.begins_leaf(at) {
                write(self.directory_write(row, at));
            }
            let run = self.run(row, 0, at, end);
            let first = at;
            at += run.len() as u32;
            for track in 0..self.shape.tracks {
                let skip = (own(track).max(first) - first).min(run.len() as u32);
                let behind = (track * self.shape.leaf_pages) as usize;
                let words = behind + run.start + skip as usize..behind + run.end;
                for (index, &value) in (words.start as u32..).zip(&self.words[words]) {
                    write(TableWrite { index, value });
                }
            }
        }
    }

    /// Writes the pages of a state that a row reads (`part` 0) or writes (1), also as words for the backends. `None` is
    /// the state of zeros, in page 0.
    pub fn write_state(&mut self, row: RowId, part: u32, pages: Option<&[PageId]>, writes: &mut [TableWrite]) {
        let first = self.shape.state_word(row, part);
        let words = &mut self.words[first as usize..][..self.shape.state_pages as usize];
        match pages {
            Some(pages) => words.copy_from_slice(bytemuck::cast_slice(pages)),
            None => words.fill(0),
        }
        for (at, (&mut value, write)) in words.iter_mut().zip(writes).enumerate() {
            *write = TableWrite { index: first + at as u32, value };
        }
    }

    /// Returns the pages of the state that a row's last plan reads (`part` 0) or writes (1).
    pub fn state(&self, row: RowId, part: u32) -> &[PageId] {
        let first = self.shape.state_word(row, part) as usize;
        PageId::from_raw(&self.words[first..first + self.shape.state_pages as usize])
    }

    /// Returns the leaves of a row of `pages` pages, for audits.
    pub fn leaves_of(&self, row: RowId, pages: u32) -> impl Iterator<Item = u32> + use<'_> {
        let first = self.shape.directory_word(row, 0) as usize;
        let blocks = &self.words[first..first + self.leaves_for(pages) as usize];
        blocks.iter().map(|block| block / self.shape.tracks)
    }

    pub fn pool(&self) -> &LeafPool {
        &self.leaves
    }
}

#[cfg(test)]
impl PageTable {
    /// Adds a user to a row's first leaf, for tests of the audit.
    pub fn break_s5(&mut self, row: RowId) {
        let leaf = self.entry(row, 0) / (self.shape.leaf_pages * self.shape.tracks);
        self.leaves.share(leaf);
    }
}
