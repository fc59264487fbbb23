//! Chunks of token places and page places, shared by all rows.
//!
//! A chunk holds `chunk_tokens` tokens and the pages that store them. A row's directory names its chunks, so any
//! position is found in O(1) and a long row needs no contiguous memory. Directory and pages are the page tables' words
//! ([`TableShape`]), which backends mirror; tokens stay on the host. A page's *place* is its number among those of all
//! chunks: its word stands there behind the directory, and its tokens follow those of the place before, but for the
//! tokens that lie unused between chunks ([`SKEW`]).
//!
//! Not here: lengths of rows.

use std::ops::Range;

use crate::error::Error;
use crate::id::{PageId, RowId, TokenId};
use crate::layout::TableShape;
use crate::memory::{prefetch_item, touch, touch_reserved};
use crate::plan::TableWrite;

/// Unused tokens after each chunk's, a cache line of them: else the tokens that rows of one length append lie in the
/// same few sets of a cache, and at page_size 1 in those of their pages' words.
const SKEW: usize = 16;

/// The chunks.
pub(super) struct ChunkStore {
    shape: TableShape,
    page_size: u32,
    /// Directory, then pages: see [`TableShape`].
    words: Vec<u32>,
    /// Words of the directory.
    directory_len: usize,
    /// `[chunk_count, chunk_tokens + SKEW]`
    tokens: Vec<TokenId>,
    /// Chunks that were used before and are free now.
    returned: Vec<u32>,
    /// Chunks from here on were never used.
    fresh: u32,
}

impl ChunkStore {
    pub fn new(shape: &TableShape, page_size: u32) -> Self {
        let tokens =
            shape.chunk_count as usize * (shape.chunk_pages as usize * page_size as usize + SKEW);
        Self {
            shape: *shape,
            page_size,
            // Zeroed memory is not touched before it is used.
            words: bytemuck::zeroed_vec(shape.words()),
            directory_len: shape.directory_word(RowId::new(shape.rows), 0) as usize,
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
        let chunk = 4 * (u64::from(shape.chunk_pages) * u64::from(page_size) + SKEW as u64) + 4;
        4 * shape.words() as u64 + u64::from(shape.chunk_count) * chunk
    }

    pub fn page_size(&self) -> u32 {
        self.page_size
    }

    pub fn chunk_tokens(&self) -> u32 {
        self.shape.chunk_pages * self.page_size
    }

    pub fn chunks_for(&self, tokens: u32) -> u32 {
        tokens.div_ceil(self.chunk_tokens())
    }

    /// Chunks of so many pages.
    pub fn chunks_for_pages(&self, pages: u32) -> u32 {
        (pages + self.shape.chunk_pages - 1) >> self.shape.chunk_pages.trailing_zeros()
    }

    /// Checks that `chunks` more fit.
    ///
    /// # Errors
    /// [`Error::OutOfTokens`].
    pub fn check_free(&self, chunks: u32) -> Result<(), Error> {
        if chunks <= self.free_count() {
            return Ok(());
        }
        let places = |chunks| u64::from(chunks) * u64::from(self.chunk_tokens());
        Err(Error::OutOfTokens { wanted: places(chunks), available: places(self.free_count()) })
    }

    fn free_count(&self) -> u32 {
        self.shape.chunk_count - self.fresh + self.returned.len() as u32
    }

    pub fn used_count(&self) -> u32 {
        self.fresh - self.returned.len() as u32
    }

    /// Gives a row chunks for so many tokens.
    pub fn reserve(&mut self, row: RowId, chunks: &mut u32, tokens: u32) {
        while *chunks * self.chunk_tokens() < tokens {
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
            let word = self.shape.directory_word(row, *chunks * self.shape.chunk_pages);
            self.returned.push(self.words[word as usize]);
        }
    }

    /// The place of a row's page.
    pub fn place(&self, row: RowId, index: u32) -> u32 {
        let chunk = self.words[self.shape.directory_word(row, index) as usize];
        let in_chunk = index & (self.shape.chunk_pages - 1);
        chunk * self.shape.chunk_pages + in_chunk
    }

    /// The places of a row's pages from `index` on, up to page `end` or to where their chunk ends.
    fn run(&self, row: RowId, index: u32, end: u32) -> Range<usize> {
        let place = self.place(row, index) as usize;
        let chunk_end = (index | (self.shape.chunk_pages - 1)) + 1;
        place..place + (end.min(chunk_end) - index) as usize
    }

    /// Where the tokens of the page at a place begin.
    fn first_token(&self, place: usize) -> usize {
        let chunk = place >> self.shape.chunk_pages.trailing_zeros();
        place * self.page_size as usize + chunk * SKEW
    }

    fn token_place(&self, row: RowId, position: u32) -> usize {
        let place = self.place(row, position / self.page_size) as usize;
        self.first_token(place) + (position % self.page_size) as usize
    }

    /// Where the tokens from `position` on lie, up to `end` or to where their chunk ends.
    fn token_run(&self, row: RowId, position: u32, end: u32) -> Range<usize> {
        let (page, offset) = (position / self.page_size, position % self.page_size);
        let size = self.page_size as usize;
        let places = self.run(row, page, u32::MAX);
        let first = self.first_token(places.start);
        let start = first + offset as usize;
        start..(first + places.len() * size).min(start + (end - position) as usize)
    }

    /// Words of pages at places.
    fn page_words(&self, places: Range<usize>) -> Range<usize> {
        self.directory_len + places.start..self.directory_len + places.end
    }

    pub fn token(&self, row: RowId, position: u32) -> TokenId {
        self.tokens[self.token_place(row, position)]
    }

    pub fn page(&self, row: RowId, index: u32) -> PageId {
        self.page_at(self.place(row, index))
    }

    /// Asks for the word of the page at a place, if there is such a place.
    pub fn prefetch_page(&self, place: u32) {
        if let Some(word) = self.words.get(self.directory_len + place as usize) {
            prefetch_item(word);
        }
    }

    /// The page at a place.
    pub fn page_at(&self, place: u32) -> PageId {
        PageId::new(self.words[self.directory_len + place as usize])
    }

    /// The token at `offset` in the page at a place.
    pub fn token_at(&self, place: u32, offset: u32) -> TokenId {
        self.tokens[self.first_token(place as usize) + offset as usize]
    }

    /// [`ChunkStore::write_tokens`] of one, as decoding has it: a third of the instructions.
    pub fn write_token(&mut self, row: RowId, position: u32, token: TokenId) {
        let place = self.token_place(row, position);
        self.tokens[place] = token;
    }

    pub fn write_tokens(&mut self, row: RowId, start: u32, mut tokens: &[TokenId]) {
        let (mut at, end) = (start, start + tokens.len() as u32);
        while at < end {
            let run = self.token_run(row, at, end);
            at += run.len() as u32;
            let (head, rest) = tokens.split_at(run.len());
            self.tokens[run].copy_from_slice(head);
            tokens = rest;
        }
    }

    pub fn write_pages(&mut self, row: RowId, start: u32, mut pages: &[PageId]) {
        let (mut at, end) = (start, start + pages.len() as u32);
        while at < end {
            let run = self.run(row, at, end);
            at += run.len() as u32;
            let (head, rest) = pages.split_at(run.len());
            let words = self.page_words(run);
            self.words[words].copy_from_slice(PageId::peel(head));
            pages = rest;
        }
    }

    pub fn copy_tokens(&mut self, from: RowId, to: RowId, len: u32) {
        let mut at = 0;
        while at < len {
            let source = self.token_run(from, at, len);
            let target = self.token_run(to, at, len).start;
            at += source.len() as u32;
            self.tokens.copy_within(source, target);
        }
    }

    pub fn token_pieces(
        &self,
        row: RowId,
        start: u32,
        end: u32,
    ) -> impl Iterator<Item = &[TokenId]> + use<'_> {
        pieces(start, end, move |at| &self.tokens[self.token_run(row, at, end)])
    }

    pub fn page_pieces(
        &self,
        row: RowId,
        start: u32,
        end: u32,
    ) -> impl Iterator<Item = &[PageId]> + use<'_> {
        let piece = move |at| &self.words[self.page_words(self.run(row, at, end))];
        pieces(start, end, move |at| PageId::wrap(piece(at)))
    }

    /// The first piece of whole pages from page `start` on: its tokens and pages.
    pub fn piece_mut(&mut self, row: RowId, start: u32, end: u32) -> (&[TokenId], &mut [PageId]) {
        let run = self.run(row, start, end);
        let first = self.first_token(run.start);
        let tokens = &self.tokens[first..first + run.len() * self.page_size as usize];
        let words = self.page_words(run);
        (tokens, bytemuck::cast_slice_mut(&mut self.words[words]))
    }

    /// Whether a page is the first of its chunk.
    pub fn begins_chunk(&self, index: u32) -> bool {
        index & (self.shape.chunk_pages - 1) == 0
    }

    /// The word that names the chunk of a row's page.
    pub fn directory_write(&self, row: RowId, index: u32) -> TableWrite {
        let index = self.shape.directory_word(row, index);
        TableWrite { index, value: self.words[index as usize] }
    }

    /// Writes the word of the page at a place.
    #[inline]
    pub fn write_page(&mut self, place: u32, page: PageId) -> TableWrite {
        let (word, value) = (self.directory_len + place as usize, page.raw());
        self.words[word] = value;
        TableWrite { index: word as u32, value }
    }

    /// Directory words and page words of pages `start..end`.
    pub fn writes(&self, row: RowId, start: u32, end: u32, mut write: impl FnMut(TableWrite)) {
        let mut at = start;
        while at < end {
            if self.begins_chunk(at) {
                write(self.directory_write(row, at));
            }
            let run = self.run(row, at, end);
            at += run.len() as u32;
            let words = self.page_words(run);
            for (index, &value) in (words.start as u32..).zip(&self.words[words]) {
                write(TableWrite { index, value });
            }
        }
    }
}

/// The pieces of `start..end`, given the one that begins at an index.
fn pieces<'a, T: 'a>(
    start: u32,
    end: u32,
    piece: impl Fn(u32) -> &'a [T],
) -> impl Iterator<Item = &'a [T]> {
    let mut at = start;
    std::iter::from_fn(move || {
        (at < end).then(|| {
            let piece = piece(at);
            at += piece.len() as u32;
            piece
        })
    })
}
