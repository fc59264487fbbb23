//! Breaks each of H1 to H4 and M1 to M3 by hand, and checks that the audit reports it. The pages have hashes, which
//! need the feature `sha256` or `xxhash`.
#![cfg(any(feature = "sha256", feature = "xxhash"))]

use crate::fence::Fence;
use crate::hash::Hashing;
use crate::id::{MoveId, Namespace, NodeKey, PageId, PrefixLock, SeqKey, SwapPageId, TokenId};
use crate::memory::Memory;
use crate::prefix::cursors::{Cursors, Seek};
use crate::prefix::nodes::Sides;
use crate::prefix::{LoadBatch, PrefixTree, TreeShape};

/// A tree of pages of one token. `used` is locked. The last page of `idle` is in swap memory alone, and the page before
/// it is clean.
struct Sound {
    tree: PrefixTree,
    used: NodeKey,
    idle: NodeKey,
}

/// Returns an empty tree of pages of one token, which are hashed.
fn tree(page_count: u32, swap_pages: u32, stage_pages: u32) -> PrefixTree {
    let hashing = Some(Hashing::ALL[0]);
    let shape = TreeShape { hashing, swap_pages, stage_pages, ..TreeShape::new(page_count, 1, 31) };
    PrefixTree::of_shape(&shape, &mut Memory::new(false)).expect("memory").0
}

fn insert(tree: &mut PrefixTree, fence: &mut Fence, text: &[u32]) -> PrefixLock {
    let tokens: Vec<TokenId> = text.iter().copied().map(TokenId::new).collect();
    let found = tree.match_prefix(Namespace::default(), &tokens);
    let mut lock = tree.lock(&found, fence).expect("nothing changed since the match");
    let mut pages: Vec<PageId> = text.iter().copied().map(PageId::new).collect();
    let inserted = tree.insert(&mut lock, &tokens, &mut pages, &mut Vec::new(), fence);
    assert_eq!(inserted.duplicates, 0);
    lock
}

impl PrefixTree {
    fn cursors_mut(&mut self) -> &mut Cursors<NodeKey> {
        self.ages.as_mut().expect("there is swap memory").cursors_mut()
    }
}

impl Sound {
    fn new() -> Self {
        let mut tree = tree(10, 10, 2);
        tree.swap_mut().set_ready(12);
        let mut fence = Fence::new(0, 1, 0).expect("memory");
        let idle = insert(&mut tree, &mut fence, &[1, 2, 3]);
        let used = insert(&mut tree, &mut fence, &[5, 6]).node().expect("not empty");
        let node = idle.node().expect("not empty");
        tree.unlock(idle, &mut fence, &mut Vec::new());
        assert_eq!(tree.evict(1, &mut Vec::new()), 1);
        assert!(tree.saves().is_some());
        tree.end_saves(false, &mut Vec::new());
        tree.save_ahead(1, &mut Vec::new());
        assert!(tree.saves().is_some());
        tree.end_saves(false, &mut Vec::new());
        let sound = Self { tree, used, idle: node };
        assert_eq!(sound.check(), Ok(()));
        assert_eq!(sound.tree.nodes.sides_of(node), Sides { device: 2, swap_start: 1 });
        sound
    }

    fn check(&self) -> Result<(), &'static str> {
        self.tree.check_swap().map_err(|(what, _)| what)
    }
}

fn broken<T>(spoil: impl FnOnce(&mut Sound) -> T) -> &'static str {
    let mut sound = Sound::new();
    spoil(&mut sound);
    sound.check().expect_err("the audit finds it")
}

#[test]
fn m1_pages_of_stores_have_no_other_user() {
    let fetched = |s: &mut Sound| {
        let moved = [MoveId::new(9); 2];
        let text: Vec<TokenId> = [7, 8].map(TokenId::new).to_vec();
        let mut fence = Fence::new(0, 1, 0).expect("memory");
        let freed = &mut Vec::new();
        let fetch = s.tree.begin_fetch((Namespace::default(), &text), 1, 9, moved, &mut fence, freed);
        assert_eq!(fetch.expect("there are swap pages").pages.len(), 1);
        assert_eq!(s.check(), Ok(()));
        let page = s.tree.swap().fetches.pages[0];
        s.tree.swap_mut().pool.end_fill(page, true);
    };
    assert_eq!(broken(fetched), "M1: a page that a fetch writes has no other user");
    let begin_put = |s: &mut Sound| {
        s.tree.begin_puts(9);
        assert_eq!(s.check(), Ok(()));
        let pool = &s.tree.swap().pool;
        let read = (0..10).map(SwapPageId::new).find(|&page| pool.is_read(page));
        read.expect("a put reads a swap page")
    };
    let untouched = "M1: no writer touches a page that a put reads";
    let ended = |s: &mut Sound| {
        let page = begin_put(s);
        s.tree.swap_mut().pool.end_read(page);
    };
    assert_eq!(broken(ended), untouched);
    let saved = |s: &mut Sound| {
        let page = begin_put(s);
        s.tree.swap_mut().pool.set_save(page, MoveId::new(9));
    };
    assert_eq!(broken(saved), untouched);
}

#[test]
fn m2_fetched_pages_wait_with_their_tokens() {
    let more = |s: &mut Sound| s.tree.swap_mut().fetches.pages.push(SwapPageId::new(9));
    assert_eq!(broken(more), "M2: a fetched page waits with its record until all have arrived");
}

#[test]
fn m3_stored_entries_have_pages_and_keep_their_hashes() {
    let free = |s: &mut Sound| {
        let entry = (0..20).find(|&entry| s.tree.nodes.lists.is_free(entry)).expect("most are free");
        s.tree.swap_mut().puts.set_stored(entry);
    };
    assert_eq!(broken(free), "M3: a stored entry has a page");
    let other = |s: &mut Sound| {
        s.tree.begin_puts(9);
        let last = s.tree.nodes.last_entry(s.idle);
        s.tree.chain.as_mut().expect("pages are hashed").spoil(last);
    };
    assert_eq!(broken(other), "M3: an entry has the hash that its put has");
}

#[test]
fn h1_a_host_page_belongs_to_one_entry() {
    let belongs = "H1: a swap page belongs to one entry";
    let shared = |s: &mut Sound| s.tree.swap_mut().of_entry.fill(SwapPageId::new(0));
    assert_eq!(broken(shared), belongs);
    let lost = |s: &mut Sound| s.tree.swap_mut().pool.take();
    assert_eq!(broken(lost), "H1: Cached swap pages belong to entries and cells");
    let freed = |s: &mut Sound| s.tree.swap_mut().pool.drop_page(SwapPageId::new(0));
    assert_eq!(broken(freed), belongs);
}

#[test]
fn h2_every_entry_has_a_page() {
    let set = |node: fn(&Sound) -> NodeKey, device, swap_start| {
        move |s: &mut Sound| {
            let node = node(s);
            *s.tree.nodes.sides_mut(node) = Sides { device, swap_start };
        }
    };
    let nowhere = "H2: every entry has a page, device pages come first";
    assert_eq!(broken(set(|s| s.idle, 1, 2)), nowhere);
    assert_eq!(broken(set(|s| s.idle, 4, 1)), nowhere);
    assert_eq!(broken(set(|s| s.idle, 1, 1)), "H2: entries below `device` have device pages");
    let below_swap_page = |s: &mut Sound| s.tree.nodes.link[s.used].parent = Some(s.idle);
    let whole = "H2: a node has device pages only if its parent is entirely on the device";
    assert_eq!(broken(below_swap_page), whole);
}

#[test]
fn h3_clean_entries_are_counted() {
    let counted = "H3: clean entries of idle nodes are counted";
    assert_eq!(broken(|s| s.tree.swap_mut().clean += 1), counted);
    let in_use = |s: &mut Sound| {
        let Sound { tree, used, .. } = s;
        let last = tree.nodes.last_entry(*used);
        let swap = tree.swap_mut();
        swap.of_entry[last as usize] = swap.pool.take().expect("one is free");
        tree.nodes.sides_mut(*used).swap_start -= 1;
    };
    assert_eq!(broken(in_use), "H3: a node in use has no clean entries");
}

#[test]
fn h4_cursors_find_the_oldest() {
    for seek in Seek::ALL {
        let past = |s: &mut Sound| s.tree.cursors_mut().at[seek as usize] = None;
        let what = "H4: no node older than a cursor has what the cursor looks for";
        assert_eq!(broken(past), what, "{seek:?}");
        let astray = |s: &mut Sound| {
            let used = s.used;
            s.tree.cursors_mut().at[seek as usize] = Some(used);
        };
        assert_eq!(broken(astray), what, "{seek:?}");
    }
    let astray = |s: &mut Sound| {
        s.tree.save_ahead(2, &mut Vec::new());
        assert!(s.tree.saves().is_some());
        s.tree.end_saves(false, &mut Vec::new());
        assert_eq!(s.check(), Ok(()), "no idle node is dirty");
        s.tree.cursors_mut().at[Seek::Dirty as usize] = Some(s.used);
    };
    assert_eq!(broken(astray), "H4: a cursor is at an idle node");
}

#[test]
fn the_stage_is_used_once_all_its_pages_are_ready() {
    let mut tree = tree(10, 10, 2);
    let _lock = insert(&mut tree, &mut Fence::new(0, 1, 0).expect("memory"), &[1, 2, 3]);
    for (ready, staged) in [(9, 0), (10, 0), (11, 0), (12, 2), (12, 0)] {
        tree.swap_mut().set_ready(ready);
        tree.begin_puts(8);
        assert_eq!(tree.swap_mut().staged().map_or(0, |(_, moves)| moves.len()), staged, "{ready} ready");
    }
}

/// A save ahead visits no node that forced evictions have passed.
#[test]
fn saves_ahead_cost_as_much_as_their_pages() {
    const NODES: u32 = 900;
    let mut tree = tree(NODES, NODES, 0);
    tree.swap_mut().set_ready(NODES);
    let mut fence = Fence::new(0, 1, 0).expect("memory");
    for page in 0..NODES {
        let lock = insert(&mut tree, &mut fence, &[page]);
        tree.unlock(lock, &mut fence, &mut Vec::new());
    }
    let visits = |tree: &mut PrefixTree, evicted: u32, ahead: u32| {
        let before = tree.ages.as_ref().map(|ages| ages.cursors().visits).expect("there is swap memory");
        assert_eq!(tree.evict(evicted, &mut Vec::new()), evicted);
        let evicting = tree.ages.as_ref().map(|ages| ages.cursors().visits).expect("there is swap memory") - before;
        tree.save_ahead(ahead, &mut Vec::new());
        assert!(tree.saves().is_some());
        tree.end_saves(false, &mut Vec::new());
        [
            evicting,
            tree.ages.as_ref().map(|ages| ages.cursors().visits).expect("there is swap memory") - before - evicting,
        ]
    };
    // A page costs the visit of its node, and one more visit if the node before it has become clean.
    let [evicting, saving] = visits(&mut tree, NODES / 2, 1);
    assert!(evicting <= u64::from(NODES) && saving <= 2, "{evicting} {saving}");
    for round in 0..50 {
        let [evicting, saving] = visits(&mut tree, 4, 3);
        assert!(evicting <= 12 && saving <= 8, "round {round}: {evicting} {saving}");
    }
}

/// A fetch that gets no page changes neither the order of eviction nor the pages in swap memory.
#[test]
fn a_fetch_of_nothing_changes_nothing() {
    let state = |tree: &PrefixTree| {
        let nodes: Vec<_> = tree.order.iter(&tree.usage).collect();
        let swap = tree.swap();
        let sides: Vec<_> = nodes.iter().map(|&node| tree.nodes.sides_of(node)).collect();
        let entries = (swap.of_entry.clone(), swap.counts, tree.swap().page_counts());
        (nodes, sides, entries, tree.epoch, tree.branches, tree.size_info())
    };
    // Nine device pages, and two swap pages with the last page of the first text and the only one of the second. The
    // two other texts are on the device alone.
    let full = || {
        let mut tree = tree(9, 2, 0);
        tree.swap_mut().set_ready(2);
        let mut fence = Fence::new(0, 1, 0).expect("memory");
        let mut freed = Vec::new();
        for text in [&[0, 1][..], &[2], &[3, 4], &[5, 6]] {
            let lock = insert(&mut tree, &mut fence, text);
            tree.unlock(lock, &mut fence, &mut Vec::new());
            if text[0] == 2 {
                let first = tree.match_prefix(Namespace::default(), &[0].map(TokenId::new));
                let first = tree.lock(&first, &mut fence).expect("just matched");
                assert_eq!(tree.evict(2, &mut freed), 2);
                tree.unlock(first, &mut fence, &mut Vec::new());
            }
        }
        let saved = tree.saves().map(|(id, saves)| (id, saves.len()));
        assert_eq!(saved, Some((MoveId::new(1), 2)));
        tree.end_saves(false, &mut Vec::new());
        assert_eq!(tree.swap().page_counts(), (2, 0));
        (tree, fence)
    };
    let fetch = |tree: &mut PrefixTree, fence: &mut Fence, text: &[u32], done: [u64; 2]| {
        let text: Vec<TokenId> = text.iter().copied().map(TokenId::new).collect();
        let moved = done.map(MoveId::new);
        let target = tree.match_prefix(Namespace::default(), &text).pages() + 3;
        let fetch = tree.begin_fetch((Namespace::default(), &text), target, 9, moved, fence, &mut Vec::new());
        let pages = fetch.map(|fetch| fetch.pages.len());
        tree.check_swap().expect("all invariants of swap memory hold");
        pages
    };
    // The oldest swap-only page belongs to another text, but its save is not done.
    let (mut tree, mut fence) = full();
    let before = state(&tree);
    assert_eq!(fetch(&mut tree, &mut fence, &[3, 4, 7, 8], [0, 0]), None);
    assert_eq!(state(&tree), before);
    assert_eq!(fetch(&mut tree, &mut fence, &[3, 4, 7, 8], [1, 0]), Some(2));
    // One of two swap-only pages belongs to the prefix, and the other one is dropped.
    let (mut tree, mut fence) = full();
    assert_eq!(fetch(&mut tree, &mut fence, &[0, 1, 9, 9], [1, 0]), Some(1));
    let before = state(&tree);
    assert_eq!(fetch(&mut tree, &mut fence, &[0, 1, 9, 9], [1, 0]), None, "no other page is left");
    assert_eq!(state(&tree), before);
    // A load has freed the swap pages, and is not done.
    let (mut tree, mut fence) = full();
    let text = [0, 1].map(TokenId::new);
    let found = tree.match_prefix(Namespace::default(), &text);
    let lock = tree.lock(&found, &mut fence).expect("just matched");
    let mut load = LoadBatch::new(1, 1, &mut Memory::new(false)).expect("memory");
    tree.begin_load(&mut load);
    assert_eq!(tree.claim(&lock, 2, &mut load), 1);
    load.push_sequence(SeqKey::default());
    tree.assign(&mut load, &[PageId::new(1)]);
    let id = tree.swap_mut().begin_load(&load);
    load.sequences().for_each(|(_, parts)| tree.end_load(&lock, parts, false));
    tree.unlock(lock, &mut fence, &mut Vec::new());
    assert_eq!(tree.swap().page_counts(), (1, 1));
    let before = state(&tree);
    // The page of the second text could be dropped, but it has an unfinished save here.
    assert_eq!(fetch(&mut tree, &mut fence, &[3, 4, 7, 8], [0, 0]), None);
    assert_eq!(state(&tree), before);
    assert_eq!(fetch(&mut tree, &mut fence, &[3, 4, 7, 8], [1, id.raw()]), Some(2));
}
