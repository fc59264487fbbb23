//! Compares the arithmetic of page tables with plain enumeration.

use std::collections::BTreeSet;

use kvarena::id::RowId;
use kvarena::layout::TableShape;
use kvarena::{Capacity, Error, PageId, PoolConfig, SeqKey, TokenId};

use super::host::Host;

#[test]
fn page_tables_have_a_word_for_every_page_of_every_row() {
    for (page_size, rows, len_max, tokens) in
        [(1, 3, 5000, 9000), (16, 5, 700, 3500), (3, 2, 2048, 4000), (1024, 4, 5000, 5000)]
    {
        let table = TableShape::new(page_size, rows, len_max, tokens).expect("a small table");
        let pages_max = len_max.div_ceil(page_size);
        assert!(table.leaves_per_row * table.leaf_pages >= pages_max);
        // Words are distinct and in range: first the directory, then the leaves.
        let mut seen = BTreeSet::new();
        for row in (0..rows).map(RowId::new) {
            for leaf in 0..table.leaves_per_row {
                assert!(seen.insert(table.directory_word(row, leaf * table.leaf_pages)));
            }
        }
        for leaf in 0..table.leaf_count {
            for page in 0..table.leaf_pages {
                assert!(seen.insert(table.page_word(leaf, page)));
            }
        }
        assert_eq!(seen.len(), table.words());
        assert_eq!(seen.last().map(|&word| word as usize), Some(table.words() - 1));

        // In the worst case, rows begin a leaf for a single token. All rows still find leaves, and every page is found
        // again.
        let mut words = vec![u32::MAX; table.words()];
        let leaf_tokens = table.leaf_pages * page_size;
        let mut leaves = (0..table.leaf_count).rev();
        let mut left = tokens;
        let mut lens = Vec::new();
        for row in 0..rows {
            let len = if row + 1 == rows {
                left.min(len_max.into())
            } else {
                left.min(u64::from(len_max / leaf_tokens * leaf_tokens + 1)).min(len_max.into())
            };
            left -= len;
            lens.push(len as u32);
        }
        let page = |row: u32, index: u32| row * 100_000 + index;
        for (row, &len) in lens.iter().enumerate() {
            let id = RowId::new(row as u32);
            for index in 0..len.div_ceil(page_size) {
                if index % table.leaf_pages == 0 {
                    let leaf = leaves.next().expect("tokens that fit have their leaves");
                    words[table.directory_word(id, index) as usize] = leaf;
                }
                let leaf = words[table.directory_word(id, index) as usize];
                words[table.page_word(leaf, index) as usize] = page(row as u32, index);
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

#[test]
fn dense_tables_have_a_row_for_each_sequence_in_the_callers_order() {
    let mut host = Host::null(PoolConfig { page_size: 4, capacity: Capacity::Pages(8), ..Default::default() });
    let [long, short] = [9, 2].map(|len| host.begin(&vec![TokenId::new(len); len as usize]));
    host.plan(long, 9);
    let pages = |host: &Host, seq| host.page_table(seq).expect("it is live").map(PageId::raw).collect::<Vec<_>>();
    // The plan need not have all sequences, and a sequence may occur twice.
    let mut out = [7; 12];
    assert_eq!(host.write_tables(&[short, long, long], 0, 4, 99, &mut out), Ok(()));
    let row = [pages(&host, long), vec![99]].concat();
    assert_eq!(out.to_vec(), [vec![99; 4], row.clone(), row].concat());

    let mut out = [7; 4];
    let gone = SeqKey::default();
    for (seqs, width, error) in [
        (&[short, long][..], 2, Error::TableWidth { seq: long, pages: 3, width: 2 }),
        (&[long][..], 3, Error::TableLen { actual: 4, wanted: 3 }),
        (&[long, gone][..], 2, Error::TableWidth { seq: long, pages: 3, width: 2 }),
        (&[short, gone][..], 2, Error::UnknownSequence { seq: gone }),
    ] {
        assert_eq!(host.write_tables(seqs, 0, width, 99, &mut out), Err(error));
        assert_eq!(out, [7; 4]);
    }
}
