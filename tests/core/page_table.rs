//! Compares the arithmetic of page tables with plain enumeration.

use std::collections::BTreeSet;

use kvarena::{PageId, RowId, TableShape};

#[test]
fn page_tables_have_a_word_for_every_page_of_every_row() {
    for (page_size, rows, len_max, tokens) in
        [(1, 3, 5000, 9000), (16, 5, 700, 3500), (3, 2, 2048, 4000), (1024, 4, 5000, 5000)]
    {
        let table = TableShape::new(page_size, rows, len_max, tokens).expect("a small table");
        let pages_max = len_max.div_ceil(page_size);
        assert!(table.chunks_per_row * table.chunk_pages >= pages_max);
        // Words are distinct and in range: first the directory, then the chunks.
        let mut seen = BTreeSet::new();
        for row in (0..rows).map(RowId::new) {
            for chunk in 0..table.chunks_per_row {
                assert!(seen.insert(table.directory_word(row, chunk * table.chunk_pages)));
            }
        }
        for chunk in 0..table.chunk_count {
            for page in 0..table.chunk_pages {
                assert!(seen.insert(table.page_word(chunk, page)));
            }
        }
        assert_eq!(seen.len(), table.words());
        assert_eq!(seen.last().map(|&word| word as usize), Some(table.words() - 1));

        // In the worst case, rows begin a chunk for a single token. All rows still find chunks, and every page is found
        // again.
        let mut words = vec![u32::MAX; table.words()];
        let chunk_tokens = table.chunk_pages * page_size;
        let mut chunks = (0..table.chunk_count).rev();
        let mut left = tokens;
        let mut lens = Vec::new();
        for row in 0..rows {
            let len = match row + 1 == rows {
                true => left.min(len_max.into()),
                false => left.min(u64::from(len_max / chunk_tokens * chunk_tokens + 1)).min(len_max.into()),
            };
            left -= len;
            lens.push(len as u32);
        }
        let page = |row: u32, index: u32| row * 100_000 + index;
        for (row, &len) in lens.iter().enumerate() {
            let id = RowId::new(row as u32);
            for index in 0..len.div_ceil(page_size) {
                if index % table.chunk_pages == 0 {
                    let chunk = chunks.next().expect("tokens that fit have their chunks");
                    words[table.directory_word(id, index) as usize] = chunk;
                }
                let chunk = words[table.directory_word(id, index) as usize];
                words[table.page_word(chunk, index) as usize] = page(row as u32, index);
            }
        }
        for (row, &len) in lens.iter().enumerate() {
            for index in 0..len.div_ceil(page_size) {
                let found = table.page(&words, RowId::new(row as u32), index);
                assert_eq!(found, PageId::new(page(row as u32, index)));
            }
        }
    }
}
