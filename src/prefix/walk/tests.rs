//! Long equal runs that part at every token: whatever blocks and runs the comparison goes by, it finds the page. All
//! tokens of a text differ, so that runs have in common exactly what lies before the one token that is changed.

use super::common_pages;
use crate::fence::Fence;
use crate::id::{Namespace, PageId, PrefixLock, TokenId};
use crate::prefix::PrefixTree;
use crate::prefix::span::Span;

const PAGE_SIZES: [u32; 6] = [1, 2, 3, 16, 64, 100];

/// Hash bits of a table that is the same in every process.
const HASH_BITS: u32 = 31;

const NAMESPACE: Namespace = Namespace::new(0);

fn text(len: u32) -> Vec<TokenId> {
    (0..len).map(TokenId::new).collect()
}

/// The text with one token changed.
fn parted(text: &[TokenId], at: usize) -> Vec<TokenId> {
    let mut parted = text.to_vec();
    if let Some(token) = parted.get_mut(at) {
        *token = TokenId::new(1_000_000);
    }
    parted
}

fn page_ids(start: u32, count: u32) -> Vec<PageId> {
    (start..start + count).map(PageId::new).collect()
}

/// Pages of a text of about 400 tokens: several blocks of the comparison.
fn page_count(page_size: u32) -> u32 {
    (397 / page_size).max(6)
}

#[test]
fn runs_part_at_every_token() {
    for page_size in PAGE_SIZES.map(|size| size as usize) {
        for len in [0, 1, 2, 63, 64, 65, 127, 128, 129, 191, 192, 193, 331] {
            let whole = text(len);
            for at in 0..=len as usize {
                let other = parted(&whole, at);
                let want = at / page_size;
                assert_eq!(common_pages(&whole, &other, page_size), want, "{len} tokens, {at}");
                let short = &whole[..at];
                assert_eq!(common_pages(&whole, short, page_size), want, "{len} tokens, {at}");
                assert_eq!(common_pages(short, &whole, page_size), want, "{len} tokens, {at}");
            }
        }
    }
}

/// A tree with a span whose pages lie in runs of at most `run` entries.
fn scattered(
    page_size: u32,
    run: usize,
    tokens: &[TokenId],
    pages: &[PageId],
) -> (PrefixTree, Span) {
    let mut tree = PrefixTree::new(1000, page_size, HASH_BITS);
    let page = vec![TokenId::default(); page_size as usize];
    // Every entry is taken, and runs of them are given back.
    let mut singles: Vec<Span> =
        (0..1000 + 1000 / 8).map(|_| tree.spans.create(&page, &[PageId::default()])).collect();
    singles.sort_by_key(|span| tree.spans.entries(span).next());
    for gap in singles.chunks_exact_mut(run + 1) {
        for single in &mut gap[..run] {
            tree.spans.trim(single, 1, &mut Vec::new());
        }
    }
    let span = tree.spans.create(tokens, pages);
    let runs = pages.len().div_ceil(run);
    assert!(tree.spans.extents_of(&span) as usize + 1 >= runs, "runs of {run} entries");
    (tree, span)
}

#[test]
fn spans_part_at_every_token_of_every_run() {
    for page_size in PAGE_SIZES {
        let pages = page_ids(0, page_count(page_size));
        let tokens = text(pages.len() as u32 * page_size);
        for run in [1, 2, 7, 60, 500] {
            let (tree, span) = scattered(page_size, run, &tokens, &pages);
            for at in 0..=tokens.len() {
                let other = parted(&tokens, at);
                for other in [&other, &tokens[..at]] {
                    let mut found = Vec::new();
                    let mut each = |pages: &[PageId]| found.extend_from_slice(pages);
                    let matched = tree.compare(&span, other, &mut each) as usize;
                    let want = at / page_size as usize;
                    assert_eq!(matched, want, "page_size {page_size}, runs of {run}, {at}");
                    assert_eq!(found, pages[..want], "page_size {page_size}, runs of {run}, {at}");
                }
            }
        }
    }
}

/// Nothing waits for a step here.
fn fence() -> Fence {
    Fence::new(0, 1, 0)
}

/// A tree of one text, held by a lock.
fn grown(page_size: u32, tokens: &[TokenId], room: u32) -> (PrefixTree, PrefixLock, Vec<PageId>) {
    let count = tokens.len() as u32 / page_size;
    let mut tree = PrefixTree::new(count + room, page_size, HASH_BITS);
    let found = tree.match_prefix(NAMESPACE, tokens);
    let mut lock = tree.lock(&found, &mut fence()).expect("nothing changed since the match");
    let mut pages = page_ids(0, count);
    let inserted = tree.insert(&mut lock, tokens, &mut pages, &mut Vec::new(), &mut fence());
    assert_eq!(inserted.duplicates, 0);
    (tree, lock, pages)
}

#[test]
fn matches_part_at_every_token_of_nodes_split_anywhere() {
    for page_size in PAGE_SIZES {
        let count = page_count(page_size);
        let tokens = text(count * page_size);
        let (mut tree, _lock, pages) = grown(page_size, &tokens, 0);
        // In the middle, within what comes before it, right behind the start and right before the end.
        for split in [count, count / 2, count / 3, 1, count - 1] {
            let cut = &tokens[..(split * page_size) as usize];
            let found = tree.match_prefix(NAMESPACE, cut);
            let _lock = tree.lock(&found, &mut fence()).expect("nothing changed since the match");
            for at in 0..=tokens.len() {
                let mut found = Vec::new();
                let each = |pages: &[PageId]| found.extend_from_slice(pages);
                let matched = tree.match_pages(NAMESPACE, &parted(&tokens, at), each).pages();
                let want = at / page_size as usize;
                assert_eq!(matched as usize, want, "page_size {page_size}, {at}");
                assert_eq!(found, pages[..want], "page_size {page_size}, {at}");
            }
        }
        assert_eq!(tree.node_count(), 5, "each split made a node");
    }
}

#[test]
fn texts_that_part_at_every_token_share_what_comes_before() {
    for page_size in PAGE_SIZES {
        let count = page_count(page_size);
        let tokens = text(count * page_size);
        for at in 0..=tokens.len() {
            let (mut tree, _lock, first) = grown(page_size, &tokens, count);
            let other = parted(&tokens, at);
            let nothing = tree.match_prefix(NAMESPACE, &[]);
            let mut lock =
                tree.lock(&nothing, &mut fence()).expect("nothing changed since the match");
            let (own, mut duplicates) = (page_ids(count, count), Vec::new());
            let mut table = own.clone();
            let inserted =
                tree.insert(&mut lock, &other, &mut table, &mut duplicates, &mut fence());
            let want = at / page_size as usize;
            assert_eq!(inserted.duplicates as usize, want, "page_size {page_size}, {at}");
            assert_eq!(duplicates, own[..want], "page_size {page_size}, {at}");
            assert_eq!(table, [&first[..want], &own[want..]].concat());
            assert_eq!(tree.path(&lock), table);
            // Both are whole.
            for (tokens, pages) in [(&tokens, &first), (&other, &table)] {
                let mut found = Vec::new();
                tree.match_pages(NAMESPACE, tokens, |pages| found.extend_from_slice(pages));
                assert_eq!(&found, pages, "page_size {page_size}, {at}");
            }
        }
    }
}
