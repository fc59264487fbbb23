//! Tests the order in which cells and pages move to swap memory. Breaks each of H1 to H4 by hand, and checks that the
//! audit reports it.

use super::{DEVICE, SWAP};
use crate::fence::Fence;
use crate::id::{CellId, Namespace, PageId, PrefixLock, SeqKey, StepId, SwapPageId, TokenId};
use crate::layout::{Groups, Limits, PoolConfig, Reach};
use crate::memory::Memory;
use crate::prefix::cursors::Seek;
use crate::prefix::nodes::NO_PAGE;
use crate::prefix::{LoadBatch, PrefixTree, SizeInfo, TreeShape};

/// A tree of pages of one token. At each place, the first group has one page and the second group two.
struct Sound {
    tree: PrefixTree,
    fence: Fence,
    freed: Vec<PageId>,
}

fn page(page: u32) -> PageId {
    PageId::new(page)
}

impl Sound {
    fn new(swap_pages: u32) -> Self {
        let groups = Groups::new(&[Reach::All, Reach::Window(2)], &[0, 1, 1]).expect("two groups");
        let pool = PoolConfig { layers: 3, groups, page_size: 1, ..PoolConfig::default() };
        let limits = Limits::new(&pool.layout().expect("a pool"), 1, true);
        let shape = TreeShape { swap_pages, limits, max_steps: 4, ..TreeShape::new(30, 1, 31) };
        let mut tree = PrefixTree::of_shape(&shape, &mut Memory::new(false)).expect("memory").0;
        tree.swap_mut().set_ready(swap_pages);
        Self { tree, fence: Fence::new(0, 4, 1).expect("memory"), freed: Vec::new() }
    }

    /// Inserts a prompt of one page, and a used cell of two pages at the same entry.
    fn insert(&mut self, own: u32) -> (PrefixLock, CellId) {
        let Self { tree, fence, .. } = self;
        let found = tree.match_prefix(Namespace::new(0), &[]);
        let mut lock = tree.lock(&found, fence).expect("nothing changed");
        let (tokens, mut pages) = ([TokenId::new(own)], [page(own)]);
        let inserted = tree.insert(&mut lock, &tokens, &mut pages, &mut Vec::new(), fence);
        assert_eq!(inserted.duplicates, 0);
        let entry = tree.nodes.last_entry(lock.node().expect("one page"));
        let cell = tree.cells_mut().create(0, entry, [page(own + 1), page(own + 2)].into_iter());
        (lock, cell)
    }

    /// Makes the cell idle, then the page.
    fn release(&mut self, (lock, cell): (PrefixLock, CellId)) {
        self.tree.release_cell(cell, StepId::default(), &mut self.fence);
        self.tree.unlock(lock, &mut self.fence, &mut Vec::new());
    }

    fn evict(&mut self, count: u32) -> Vec<u32> {
        self.freed.clear();
        self.tree.evict(count, &mut self.freed);
        self.freed.iter().map(|page| page.raw()).collect()
    }

    fn flush(&mut self, failed: bool) {
        assert!(self.tree.saves().is_some());
        self.freed.clear();
        self.tree.end_saves(failed, &mut self.freed);
        assert_eq!(self.tree.check_swap(), Ok(()));
    }

    fn hit(&self, own: u32) -> [u32; 3] {
        let found = self.tree.match_prefix(Namespace::new(0), &[TokenId::new(own)]);
        [found.pages(), found.swap_pages(), found.swap_cell_pages()]
    }

    fn counts(&self) -> [u64; 5] {
        let counts = self.tree.swap().counts;
        [counts.saved, counts.forced, counts.evicted, counts.lost, counts.failed]
    }
}

#[test]
fn a_cell_moves_whole_and_counts_for_a_hit_on_either_side() {
    let mut sound = Sound::new(8);
    let first = sound.insert(0);
    sound.release(first);
    // The cell is the oldest, so both of its pages go, although one page is enough.
    assert_eq!(sound.evict(1), [1, 2]);
    assert_eq!(sound.hit(0), [1, 0, 2]);
    assert_eq!(sound.evict(1), [0]);
    assert_eq!(sound.hit(0), [1, 1, 2]);
    sound.flush(false);
    assert_eq!(sound.counts(), [3, 3, 0, 0, 0]);

    // A used prefix is loaded, and its swap pages become free.
    let Sound { tree, fence, .. } = &mut sound;
    let found = tree.match_prefix(Namespace::new(0), &[TokenId::new(0)]);
    let lock = tree.lock(&found, fence).expect("nothing changed");
    tree.acquire_tails(&lock, 1, fence);
    let mut load = LoadBatch::new(3, 1, &mut Memory::new(false)).expect("memory");
    for (failed, hit) in [(true, [1, 1, 2]), (false, [1, 0, 0])] {
        let tree = &mut sound.tree;
        tree.begin_load(&mut load);
        assert_eq!([3, 0], [(); 2].map(|()| tree.claim(&lock, 1, &mut load)));
        load.push_sequence(SeqKey::default());
        tree.assign(&mut load, &[5, 6, 7].map(page));
        assert!(load.device_pages().eq([5, 6, 7].map(page)));
        load.sequences().for_each(|(_, parts)| tree.end_load(&lock, parts, failed));
        assert_eq!(sound.hit(0), hit);
    }
    assert_eq!(sound.tree.swap().page_counts(), (0, 8));
    assert_eq!(sound.tree.check_swap(), Ok(()));
}

#[test]
fn the_older_of_cells_and_pages_makes_room() {
    let mut sound = Sound::new(3);
    let both = [0, 10].map(|own| sound.insert(own));
    both.into_iter().for_each(|one| sound.release(one));
    assert_eq!(sound.evict(3), [1, 2, 0]);
    sound.flush(false);
    // Two swap pages come from the older cell.
    assert_eq!(sound.evict(1), [11, 12]);
    sound.flush(false);
    assert_eq!(sound.hit(0), [0, 0, 0], "the cell that a hit needs is lost");
    assert_eq!(sound.counts(), [5, 5, 2, 2, 0]);
    // One swap page comes from the older page.
    assert_eq!(sound.evict(1), [10]);
    sound.flush(false);
    assert_eq!(sound.hit(10), [1, 1, 2]);
    assert_eq!(sound.counts(), [6, 6, 3, 3, 0]);
}

#[test]
fn an_entry_that_makes_room_takes_its_cell_with_it() {
    let mut sound = Sound::new(1);
    let (lock, cell) = sound.insert(0);
    // Make the cell younger than the page, as if the cell had become idle later.
    let Sound { tree, fence, .. } = &mut sound;
    tree.release_cell(cell, StepId::default(), fence);
    tree.unlock(lock, fence, &mut Vec::new());
    let stamp = tree.cells().cells[cell.index()].stamp;
    tree.cells_mut().cells[cell.index()].stamp = stamp + 10;
    assert_eq!(sound.evict(1), [0]);
    sound.flush(false);
    assert_eq!(sound.hit(0), [1, 1, 0]);
    // The cell needs two swap pages. The tree drops the cell's entry to free the first, so the cell is removed as well.
    assert_eq!(sound.evict(1), [1, 2]);
    assert_eq!(sound.tree.swap().page_counts(), (0, 1));
    assert_eq!((sound.hit(0), sound.tree.size_info()), ([0; 3], SizeInfo::default()));
    assert_eq!(sound.counts(), [1, 1, 1, 3, 0]);
    assert_eq!(sound.tree.check_swap(), Ok(()));
}

#[test]
fn failed_saves_lose_evicted_cells_and_keep_others() {
    let mut sound = Sound::new(8);
    let both = [0, 10].map(|own| sound.insert(own));
    both.into_iter().for_each(|one| sound.release(one));
    sound.tree.save_ahead(2, &mut Vec::new());
    assert_eq!(sound.tree.swap().clean, 2);
    sound.flush(true);
    assert_eq!((sound.tree.swap().clean, sound.hit(0)), (0, [1, 0, 0]));
    sound.tree.save_ahead(2, &mut Vec::new());
    sound.flush(false);
    assert_eq!(sound.tree.swap().clean, 2);
    // Evicting a clean cell needs no save.
    assert_eq!(sound.evict(2), [1, 2]);
    assert!(sound.tree.saves().is_none());
    assert_eq!(sound.evict(3), [0, 11, 12]);
    sound.flush(true);
    assert_eq!([sound.hit(0), sound.hit(10)], [[0; 3]; 2]);
    assert_eq!(sound.freed, [], "no page on the device is freed");
    assert_eq!(sound.counts(), [7, 3, 0, 5, 5]);
}

/// Returns the error of the audit after `spoil`, which receives a used cell, a clean one and one in swap memory alone.
fn broken<T>(spoil: impl FnOnce(&mut PrefixTree, [CellId; 3]) -> T) -> &'static str {
    let mut sound = Sound::new(8);
    let all = [0, 10, 20].map(|own| sound.insert(own));
    let cells = [2, 1, 0].map(|at| all[at].1);
    let [oldest, older, used] = all;
    sound.release(oldest);
    sound.release(older);
    assert_eq!(sound.evict(3).len(), 3);
    sound.flush(false);
    sound.tree.save_ahead(2, &mut Vec::new());
    sound.flush(false);
    spoil(&mut sound.tree, cells);
    drop(used);
    sound.tree.check_swap().expect_err("the audit finds it").0
}

#[test]
fn h1_a_host_page_belongs_to_one_cell() {
    let shared = |tree: &mut PrefixTree, [_, clean, _]: [CellId; 3]| {
        let cells = tree.cells_mut();
        let range = cells.range(clean);
        cells.swap_pages[range].fill(SwapPageId::new(0));
    };
    assert_eq!(broken(shared), "H1: a swap page belongs to one cell");
    let lost = |tree: &mut PrefixTree, _| tree.swap_mut().pool.take();
    assert_eq!(broken(lost), "H1: Cached swap pages belong to entries and cells");
}

#[test]
fn h2_a_cell_has_all_of_its_pages_on_a_side() {
    let nowhere = |tree: &mut PrefixTree, [used, ..]: [CellId; 3]| {
        tree.cells_mut().cells[used.index()].sides = 0;
    };
    assert_eq!(broken(nowhere), "H2: every cell has its pages");
    let part = |tree: &mut PrefixTree, [used, ..]: [CellId; 3]| {
        tree.cells_mut().pages_mut(used)[1] = NO_PAGE;
    };
    let whole = "H2: a cell has all of its pages on the device, or none";
    assert_eq!(broken(part), whole);
    let both = |tree: &mut PrefixTree, [.., swap_start]: [CellId; 3]| {
        tree.cells_mut().cells[swap_start.index()].sides |= DEVICE;
    };
    assert_eq!(broken(both), whole);
}

#[test]
fn h3_clean_cells_are_idle_and_counted() {
    let counted = "H3: clean entries of idle nodes are counted";
    assert_eq!(broken(|tree, _| tree.swap_mut().clean -= 2), counted);
    let used = |tree: &mut PrefixTree, [used, ..]: [CellId; 3]| {
        let (cells, swap) = (tree.cells.as_mut(), tree.swap.as_mut());
        let (cells, swap) = (cells.expect("groups"), swap.expect("swap memory"));
        cells.cells[used.index()].sides |= SWAP;
        for at in cells.range(used) {
            cells.swap_pages[at] = swap.pool.take().expect("one is free");
        }
    };
    assert_eq!(broken(used), "H3: a used cell is not clean");
}

#[test]
fn h4_cursors_find_the_oldest_cell() {
    for seek in Seek::ALL {
        let past = |tree: &mut PrefixTree, cells: [CellId; 3]| {
            // No idle cell is dirty, so the test makes the clean one dirty.
            if seek == Seek::Dirty {
                let PrefixTree { cells: Some(all), swap: Some(swap), .. } = tree else { return };
                all.drop_copy(cells[1], Some(swap));
            }
            tree.cells_mut().cursors.at[seek as usize] = None;
        };
        let what = "H4: no cell older than a cursor has what the cursor looks for";
        assert_eq!(broken(past), what, "{seek:?}");
    }
    let astray = |tree: &mut PrefixTree, [used, ..]: [CellId; 3]| {
        tree.cells_mut().cursors.at[Seek::Dirty as usize] = Some(used);
    };
    assert_eq!(broken(astray), "H4: a cursor is at an idle cell");
}
