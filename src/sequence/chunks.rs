//! Chunks of token places and page places, shared by all rows.
//!
//! A chunk holds `chunk_tokens` tokens and the pages that store them. A row's directory names its chunks, so any
//! position is found in O(1) and a long row needs no contiguous memory. Directory and pages are the page tables' words
//! ([`TableShape`]), which backends mirror; tokens stay on the host.
//!
//! Not here: lengths of rows.

use crate::id::{PageId, RowId, TokenId};
use crate::layout::TableShape;
use crate::memory::{touch, touch_reserved};
use crate::plan::TableWrite;

/// The chunks.
pub(super) struct ChunkStore {
    shape: TableShape,
    page_size: u32,
    /// Directory, then pages: see [`TableShape`].
    words: Vec<u32>,
    /// `[chunk_count, chunk_tokens]`
    tokens: Vec<TokenId>,
    /// Chunks that were used before and are free now.
    returned: Vec<u32>,
    /// Chunks from here on were never used.
    fresh: u32,
}

impl ChunkStore {
    pub fn new(shape: &TableShape, page_size: u32) -> Self {
        let tokens = shape.chunk_count as usize * shape.chunk_pages as usize * page_size as usize;
        Self {
            shape: *shape,
            page_size,
            // Zeroed memory is not touched before it is used.
            words: bytemuck::zeroed_vec(shape.words()),
            tokens: bytemuck::zeroed_vec(tokens),
            returned: Vec::with_capacity(shape.chunk_count as usize),
            fresh: 0,
        }
    }

    pub fn prefault(&mut self) {
        touch(&mut self.words);
        touch(&mut self.tokens);
        touch_reserved(&mut self.returned, 0);
    }

    pub fn bytes(shape: &TableShape, page_size: u32) -> u64 {
        let chunk = 4 * u64::from(shape.chunk_pages) * u64::from(page_size) + 4;
        4 * shape.words() as u64 + u64::from(shape.chunk_count) * chunk
    }

    pub fn chunk_tokens(&self) -> u32 {
        self.shape.chunk_pages * self.page_size
    }

    pub fn chunks_for(&self, tokens: u32) -> u32 {
        tokens.div_ceil(self.chunk_tokens())
    }

    pub fn chunks_for_pages(&self, pages: u32) -> u32 {
        let shift = self.shape.chunk_pages.trailing_zeros();
        (pages + self.shape.chunk_pages - 1) >> shift
    }

    pub fn free_count(&self) -> u32 {
        self.shape.chunk_count - self.fresh + self.returned.len() as u32
    }

    pub fn used_count(&self) -> u32 {
        self.fresh - self.returned.len() as u32
    }

    /// Gives a row as many chunks as wanted.
    pub fn reserve(&mut self, row: RowId, chunks: &mut u32, wanted: u32) {
        while *chunks < wanted {
            let chunk = self.returned.pop().unwrap_or_else(|| {
                assert!(self.fresh < self.shape.chunk_count, "the caller checked the room");
                self.fresh += 1;
                self.fresh - 1
            });
            let word = self.shape.directory_word(row, *chunks * self.shape.chunk_pages);
            self.words[word as usize] = chunk;
            *chunks += 1;
        }
    }

    /// Takes chunks back that lie past `tokens` tokens.
    pub fn shrink(&mut self, row: RowId, chunks: &mut u32, tokens: u32) {
        let wanted = self.chunks_for(tokens);
        while *chunks > wanted {
            *chunks -= 1;
            self.returned.push(self.chunk(row, *chunks * self.shape.chunk_pages));
        }
    }

    fn chunk(&self, row: RowId, page_index: u32) -> u32 {
        self.words[self.shape.directory_word(row, page_index) as usize]
    }

    /// Index of a token's place.
    fn token_place(&self, row: RowId, position: u32) -> usize {
        let page = position / self.page_size;
        let chunk_start = (page & !(self.shape.chunk_pages - 1)) * self.page_size;
        let chunk = self.chunk(row, page) as usize * self.chunk_tokens() as usize;
        chunk + (position - chunk_start) as usize
    }

    /// Index of a page's word.
    fn page_word(&self, row: RowId, index: u32) -> usize {
        self.shape.page_word(self.chunk(row, index), index) as usize
    }

    pub fn token(&self, row: RowId, position: u32) -> TokenId {
        self.tokens[self.token_place(row, position)]
    }

    pub fn page(&self, row: RowId, index: u32) -> PageId {
        PageId::new(self.words[self.page_word(row, index)])
    }

    pub fn write_tokens(&mut self, row: RowId, start: u32, tokens: &[TokenId]) {
        let chunk_tokens = self.chunk_tokens();
        let end = start + tokens.len() as u32;
        for (at, len) in pieces(start, end, chunk_tokens) {
            let (place, from) = (self.token_place(row, at), (at - start) as usize);
            self.tokens[place..place + len].copy_from_slice(&tokens[from..from + len]);
        }
    }

    pub fn write_pages(&mut self, row: RowId, start: u32, pages: &[PageId]) {
        let end = start + pages.len() as u32;
        for (at, len) in pieces(start, end, self.shape.chunk_pages) {
            let (word, from) = (self.page_word(row, at), (at - start) as usize);
            let pages = PageId::peel(&pages[from..from + len]);
            self.words[word..word + len].copy_from_slice(pages);
        }
    }

    pub fn copy_tokens(&mut self, from: RowId, to: RowId, len: u32) {
        for (at, len) in pieces(0, len, self.chunk_tokens()) {
            let (source, target) = (self.token_place(from, at), self.token_place(to, at));
            self.tokens.copy_within(source..source + len, target);
        }
    }

    pub fn token_pieces(
        &self,
        row: RowId,
        start: u32,
        end: u32,
    ) -> impl Iterator<Item = &[TokenId]> + use<'_> {
        pieces(start, end, self.chunk_tokens()).map(move |(at, len)| {
            let place = self.token_place(row, at);
            &self.tokens[place..place + len]
        })
    }

    pub fn page_pieces(
        &self,
        row: RowId,
        start: u32,
        end: u32,
    ) -> impl Iterator<Item = &[PageId]> + use<'_> {
        pieces(start, end, self.shape.chunk_pages).map(move |(at, len)| {
            let word = self.page_word(row, at);
            PageId::wrap(&self.words[word..word + len])
        })
    }

    pub fn piece_mut(&mut self, row: RowId, start: u32, end: u32) -> (&[TokenId], &mut [PageId]) {
        let (_, len) = pieces(start, end, self.shape.chunk_pages).next().expect("start < end");
        let word = self.page_word(row, start);
        let place = self.token_place(row, start * self.page_size);
        let tokens = &self.tokens[place..place + len * self.page_size as usize];
        (tokens, bytemuck::cast_slice_mut(&mut self.words[word..word + len]))
    }

    /// Chunks whose first page lies in `start..end`.
    pub fn directory_span(&self, start: u32, end: u32) -> u32 {
        self.chunks_for_pages(end) - self.chunks_for_pages(start)
    }

    /// Directory words and page words of pages `start..end`.
    pub fn writes(&self, row: RowId, start: u32, end: u32, write: &mut impl FnMut(TableWrite)) {
        for (at, len) in pieces(start, end, self.shape.chunk_pages) {
            if at.is_multiple_of(self.shape.chunk_pages) {
                let index = self.shape.directory_word(row, at);
                write(TableWrite { index, value: self.words[index as usize] });
            }
            let first = self.page_word(row, at);
            for (index, &value) in (first as u32..).zip(&self.words[first..first + len]) {
                write(TableWrite { index, value });
            }
        }
    }
}

/// Cuts `start..end` at multiples of `unit`: start and length of each piece.
fn pieces(start: u32, end: u32, unit: u32) -> impl Iterator<Item = (u32, usize)> {
    // A single one, as in decoding, lies within a piece; else one division finds the first cut.
    let mut at = start;
    let mut cut = if end.saturating_sub(start) <= 1 { end } else { (start / unit + 1) * unit };
    std::iter::from_fn(move || {
        if at >= end {
            return None;
        }
        let from = at;
        at = end.min(cut);
        cut += unit;
        Some((from, (at - from) as usize))
    })
}
