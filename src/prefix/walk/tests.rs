//! Compares long texts that differ in one token, at each place of that token. The comparison must find the page of the
//! token in any block and any run of entries. All tokens of a text are distinct, so a comparison at a wrong offset
//! fails.

use super::common_pages;
use crate::fence::Fence;
use crate::id::{Namespace, PageId, PrefixLock, TokenId};
use crate::prefix::PrefixTree;
use crate::prefix::entry_list::EntryList;

const PAGE_SIZES: [u32; 6] = [1, 2, 3, 16, 64, 100];

/// Fewer than 32 bits: the hash has a fixed seed, so each run builds the same table.
const HASH_BITS: u32 = 31;

const NAMESPACE: Namespace = Namespace::new(0);

fn text(len: u32) -> Vec<TokenId> {
    (0..len).map(TokenId::new).collect()
}

/// Returns the text with the token at `at` changed; the unchanged text if `at` is its end.
fn changed(text: &[TokenId], at: usize) -> Vec<TokenId> {
    let mut changed = text.to_vec();
    if let Some(token) = changed.get_mut(at) {
        *token = TokenId::new(1_000_000);
    }
    changed
}

fn page_ids(start: u32, count: u32) -> Vec<PageId> {
    (start..start + count).map(PageId::new).collect()
}

/// Returns the number of pages of a text of several blocks of the comparison: about 400 tokens, or 6 pages if they
/// contain more.
fn page_count(page_size: u32) -> u32 {
    (397 / page_size).max(6)
}

#[test]
fn common_pages_end_at_the_changed_token() {
    for page_size in PAGE_SIZES.map(|size| size as usize) {
        for len in [0, 1, 2, 63, 64, 65, 127, 128, 129, 191, 192, 193, 331] {
            let whole = text(len);
            for at in 0..=len as usize {
                let other = changed(&whole, at);
                let expected = at / page_size;
                assert_eq!(common_pages(&whole, &other, page_size), expected, "{len} tokens, {at}");
                let short = &whole[..at];
                assert_eq!(common_pages(&whole, short, page_size), expected, "{len} tokens, {at}");
                assert_eq!(common_pages(short, &whole, page_size), expected, "{len} tokens, {at}");
            }
        }
    }
}

/// Returns a tree, and a list in it whose extents have at most `run` entries.
fn scattered(page_size: u32, run: usize, tokens: &[TokenId], pages: &[PageId]) -> (PrefixTree, EntryList) {
    let mut tree = PrefixTree::new(1000, page_size, HASH_BITS, false).expect("memory");
    let page = vec![TokenId::default(); page_size as usize];
    // Take every entry. Then repeatedly free `run` entries and keep the next one.
    let mut singles: Vec<EntryList> =
        (0..1000 + 1000 / 8).map(|_| tree.nodes.lists.create(&page, &[PageId::default()])).collect();
    singles.sort_by_key(|list| tree.nodes.lists.entries(list).next());
    for gap in singles.chunks_exact_mut(run + 1) {
        for single in &mut gap[..run] {
            tree.nodes.lists.trim(single, 1, None);
        }
    }
    let list = tree.nodes.lists.create(tokens, pages);
    let runs = pages.len().div_ceil(run);
    assert!(tree.nodes.lists.extents_of(&list) as usize + 1 >= runs, "runs of {run} entries");
    (tree, list)
}

#[test]
fn spans_of_any_runs_match_up_to_the_changed_token() {
    for page_size in PAGE_SIZES {
        let pages = page_ids(0, page_count(page_size));
        let tokens = text(pages.len() as u32 * page_size);
        for run in [1, 2, 7, 60, 500] {
            let (tree, list) = scattered(page_size, run, &tokens, &pages);
            for at in 0..=tokens.len() {
                let other = changed(&tokens, at);
                for other in [&other, &tokens[..at]] {
                    let mut found = Vec::new();
                    let mut each = |pages: &[PageId]| found.extend_from_slice(pages);
                    let matched = tree.nodes.compare(&list, other, &mut each) as usize;
                    let expected = at / page_size as usize;
                    assert_eq!(matched, expected, "page_size {page_size}, runs of {run}, {at}");
                    assert_eq!(found, pages[..expected], "page_size {page_size}, runs of {run}, {at}");
                }
            }
        }
    }
}

/// Returns a fence for tests in which no page or lock waits for a step.
fn fence() -> Fence {
    Fence::new(0, 1, 0).expect("memory")
}

/// Returns a tree with one text, the lock on that text and its pages.
fn tree_with(page_size: u32, tokens: &[TokenId], room: u32) -> (PrefixTree, PrefixLock, Vec<PageId>) {
    let count = tokens.len() as u32 / page_size;
    let mut tree = PrefixTree::new(count + room, page_size, HASH_BITS, false).expect("memory");
    let found = tree.match_prefix(NAMESPACE, tokens);
    let mut lock = tree.lock(&found, &mut fence()).expect("nothing changed since the match");
    let mut pages = page_ids(0, count);
    let inserted = tree.insert(&mut lock, tokens, &mut pages, &mut Vec::new(), &mut fence());
    assert_eq!(inserted.duplicates, 0);
    (tree, lock, pages)
}

#[test]
fn matches_over_split_nodes_end_at_the_changed_token() {
    for page_size in PAGE_SIZES {
        let count = page_count(page_size);
        let tokens = text(count * page_size);
        let (mut tree, _lock, pages) = tree_with(page_size, &tokens, 0);
        // Split at the end, in the middle, in the first half, after the first page and before the last one.
        for split in [count, count / 2, count / 3, 1, count - 1] {
            let cut = &tokens[..(split * page_size) as usize];
            let found = tree.match_prefix(NAMESPACE, cut);
            let _lock = tree.lock(&found, &mut fence()).expect("nothing changed since the match");
            for at in 0..=tokens.len() {
                let mut found = Vec::new();
                let each = |pages: &[PageId]| found.extend_from_slice(pages);
                let matched = tree.match_pages(NAMESPACE, &changed(&tokens, at), each).pages();
                let expected = at / page_size as usize;
                assert_eq!(matched as usize, expected, "page_size {page_size}, {at}");
                assert_eq!(found, pages[..expected], "page_size {page_size}, {at}");
            }
        }
        assert_eq!(tree.node_count(), 5, "each split inside a node adds one");
    }
}

#[test]
fn inserted_texts_share_the_pages_before_the_changed_token() {
    for page_size in PAGE_SIZES {
        let count = page_count(page_size);
        let tokens = text(count * page_size);
        for at in 0..=tokens.len() {
            let (mut tree, _lock, first) = tree_with(page_size, &tokens, count);
            let other = changed(&tokens, at);
            let nothing = tree.match_prefix(NAMESPACE, &[]);
            let mut lock = tree.lock(&nothing, &mut fence()).expect("nothing changed since the match");
            let (own, mut duplicates) = (page_ids(count, count), Vec::new());
            let mut table = own.clone();
            let inserted = tree.insert(&mut lock, &other, &mut table, &mut duplicates, &mut fence());
            let expected = at / page_size as usize;
            assert_eq!(inserted.duplicates as usize, expected, "page_size {page_size}, {at}");
            assert_eq!(duplicates, own[..expected], "page_size {page_size}, {at}");
            assert_eq!(table, [&first[..expected], &own[expected..]].concat());
            assert_eq!(tree.nodes.path(&lock), table);
            // The tree matches both texts in full.
            for (tokens, pages) in [(&tokens, &first), (&other, &table)] {
                let mut found = Vec::new();
                tree.match_pages(NAMESPACE, tokens, |pages| found.extend_from_slice(pages));
                assert_eq!(&found, pages, "page_size {page_size}, {at}");
            }
        }
    }
}
