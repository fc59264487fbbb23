//! The rows of a step for layers with chunks.
//!
//! A token reads only its own chunk, so each row is cut at the ends of chunks into *chunk rows*. A chunk row counts
//! positions from its chunk's start, so kernels compute plain causal attention. The chunks of a group begin at
//! multiples of the page tables' leaves, so the pages of a chunk row begin at a directory word of its row. The row
//! number of a chunk row is the index of that word, as in a directory with one word for each row.

use crate::backend::cuda::error::{CudaError, Limit};
use crate::backend::cuda::kernels::params::{TREE_ROW, is_tree};
use crate::backend::cuda::plan::image::StepLimits;
use crate::id::RowId;
use crate::layout::{PoolLayout, Reach, TableShape};
use crate::plan::BatchRow;

/// Returns the chunk sizes of a pool, except those over latent rows, which have no kernel.
fn sizes(layout: &PoolLayout) -> impl Iterator<Item = u32> + use<'_> {
    let limited = layout.groups().limited().filter(|_| !layout.is_latent());
    limited.filter_map(|(_, reach)| if let Reach::Chunk(size) = reach { Some(size) } else { None })
}

/// Returns the number of chunk rows, including empty ones, for chunks of `size` tokens in a step of these numbers of
/// tokens and rows. It does not depend on the lengths of rows, so a graph has a fixed number.
pub fn count(size: u32, tokens: usize, rows: usize) -> usize {
    // Only the first and the last chunk row of a row may be short.
    rows + rows.min(tokens / 2) + tokens / size as usize
}

/// Returns the maximum number of chunk rows of a step.
pub fn most(layout: &PoolLayout, limits: StepLimits) -> u32 {
    let (tokens, rows) = (limits.tokens as usize, limits.rows as usize);
    sizes(layout).map(|size| count(size, tokens, rows)).max().unwrap_or(rows) as u32
}

/// Returns the bytes of all chunk rows of a step.
pub fn bytes(layout: &PoolLayout, tokens: usize, rows: usize) -> usize {
    let count: usize = sizes(layout).map(|size| count(size, tokens, rows)).sum();
    count * size_of::<BatchRow>()
}

/// The chunk rows of the staged step's rows, for each size of chunks.
#[derive(Debug)]
pub struct ChunkRows {
    list: Vec<RowsOfSize>,
    /// Number of directory words of a row.
    row_words: u32,
}

#[derive(Debug)]
struct RowsOfSize {
    size: u32,
    /// Number of directory words of a chunk.
    words: u32,
    rows: Vec<BatchRow>,
}

impl ChunkRows {
    /// Allocates the chunk rows of the largest step.
    pub fn new(layout: &PoolLayout, table: &TableShape, limits: StepLimits) -> Result<Self, CudaError> {
        let (page_size, leaf_tokens) = (layout.page_size(), table.leaf_pages * layout.page_size());
        let of_size = |size: u32| {
            // A page table leaf has a power of two of pages, and no more tokens than the smallest chunk of a group.
            if !size.is_multiple_of(leaf_tokens) {
                return Err(CudaError::ChunkPages { chunk: size, page_size });
            }
            Limit::DirectoryWords.check(table.directory_words(), TREE_ROW.into())?;
            let rows = Vec::with_capacity(most(layout, limits) as usize);
            Ok(RowsOfSize { size, words: size / leaf_tokens, rows })
        };
        let list = sizes(layout).map(of_size).collect::<Result<_, _>>()?;
        Ok(Self { list, row_words: table.leaves_per_row })
    }

    /// Cuts the rows of a step of `tokens` tokens. Draft trees have no chunk rows, because layers with chunks reject
    /// them.
    pub fn cut(&mut self, rows: &[BatchRow], tokens: usize) {
        for chunks in &mut self.list {
            let count = count(chunks.size, tokens, rows.len());
            chunks.rows.clear();
            for row in rows.iter().filter(|row| !is_tree(row)) {
                chunks.cut(row, self.row_words);
            }
            assert!(chunks.rows.len() <= count, "a row has more chunk rows than its tokens allow");
            chunks.rows.resize(count, EMPTY);
        }
    }

    /// Returns the chunk rows for chunks of a size.
    pub fn of_size(&self, size: u32) -> Option<&[BatchRow]> {
        let chunks = self.list.iter().find(|chunks| chunks.size == size)?;
        Some(&chunks.rows)
    }

    /// Returns the chunk rows of each chunk size: their offset in bytes, the chunk size, and the chunk rows.
    pub fn all(&self) -> impl Iterator<Item = (usize, u32, &[BatchRow])> {
        let mut at = 0;
        self.list.iter().map(move |chunks| {
            let before = at;
            at += size_of_val(&chunks.rows[..]);
            (before, chunks.size, &chunks.rows[..])
        })
    }
}

/// A row without query rows.
const EMPTY: BatchRow = BatchRow { row: RowId::new(0), qo_start: 0, extend_len: 0, kv_len: 0 };

impl RowsOfSize {
    fn cut(&mut self, row: &BatchRow, row_words: u32) {
        if row.kv_len == 0 {
            self.rows.push(BatchRow { row: RowId::new(0), ..*row });
            return;
        }
        let (mut position, mut qo_start) = (row.kv_len - row.extend_len, row.qo_start);
        while position < row.kv_len {
            let chunk = position / self.size;
            let first = chunk * self.size;
            let end = row.kv_len.min(first.saturating_add(self.size));
            let word = row.row.raw() * row_words + chunk * self.words;
            let (extend_len, kv_len) = (end - position, end - first);
            self.rows.push(BatchRow { row: RowId::new(word), qo_start, extend_len, kv_len });
            qo_start += extend_len;
            position = end;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::{Capacity, Groups, PoolConfig};
    use crate::testkit::rng::Rng;

    fn layout(size: u32, page_size: u32) -> PoolLayout {
        let groups = Groups::new(&[Reach::All, Reach::Chunk(size)], &[0, 1]).expect("two groups");
        let capacity = Capacity::Pages(64);
        let config = PoolConfig { layers: 2, groups, page_size, capacity, ..PoolConfig::default() };
        config.layout().expect("a small pool")
    }

    #[test]
    fn each_token_is_in_the_row_of_its_chunk() {
        let mut rng = Rng::new(1);
        for (size, page_size) in [(1, 1), (8, 1), (16, 4), (32, 32), (2048, 16)] {
            let layout = layout(size, page_size);
            let table = TableShape::of(&layout, 9, 5000, 45_000).expect("a small table");
            let limits = StepLimits { tokens: 5000, rows: 9, all_spans: false };
            let mut chunks = ChunkRows::new(&layout, &table, limits).expect("aligned chunks");
            for _ in 0..200 {
                let (mut rows, mut tokens) = (Vec::new(), 0);
                for row in 0..rng.within(1, 9) as u32 {
                    let extend_len = rng.pick(&[0, 1, 1, 2, 7, 64, 500]);
                    let kv_len = extend_len + rng.below(4000) as u32;
                    let kv_len = if rng.one_in(5) { 0 } else { kv_len };
                    let row = RowId::new(row);
                    rows.push(BatchRow { row, qo_start: tokens, extend_len, kv_len });
                    tokens += extend_len;
                }
                chunks.cut(&rows, tokens as usize);
                let parts = chunks.of_size(size).expect("the pool's chunks");
                assert_eq!(parts.len(), count(size, tokens as usize, rows.len()));
                assert!(parts.len() <= most(&layout, limits) as usize);
                assert_eq!(size_of_val(parts), bytes(&layout, tokens as usize, rows.len()));
                let mut tokens = Vec::new();
                for part in parts {
                    for i in 0..part.extend_len {
                        tokens.push((part.qo_start + i, part.row, part.kv_len, i, part));
                    }
                }
                let wanted = rows.iter().flat_map(|row| (0..row.extend_len).map(move |i| (row, i)));
                assert_eq!(tokens.len(), wanted.clone().count());
                for ((row, i), (query, word, len, at, part)) in wanted.zip(tokens) {
                    assert_eq!(query, row.qo_start + i);
                    if row.kv_len == 0 {
                        assert_eq!((word.raw(), len), (0, 0));
                        continue;
                    }
                    let position = row.kv_len - row.extend_len + i;
                    let seen = len - part.extend_len + at;
                    assert_eq!(seen, position % size, "the position in its chunk");
                    let page = (position - seen) / page_size;
                    assert_eq!(word.raw(), table.directory_word(row.row, page));
                    assert_eq!(page % table.leaf_pages, 0, "its chunk begins a page table leaf");
                }
            }
        }
    }

    #[test]
    fn chunks_that_pages_do_not_divide_are_refused() {
        let limits = StepLimits { tokens: 10, rows: 1, all_spans: false };
        for (size, page_size) in [(8, 16), (64, 3), (2048, 3)] {
            let layout = layout(size, page_size);
            let table = TableShape::of(&layout, 1, 100, 100).expect("a small table");
            let refused = ChunkRows::new(&layout, &table, limits).map(|_| ());
            let error = CudaError::ChunkPages { chunk: size, page_size };
            assert_eq!(refused, Err(error));
        }
    }
}
