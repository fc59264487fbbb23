//! Tests the users and lists of cells. Breaks each of G1 to G3 and G5 by hand, and checks that the audit reports it.

use std::collections::HashMap;
use std::iter::once;

use crate::fence::Fence;
use crate::id::{CellId, Namespace, PageId, PrefixLock, StepId, TokenId};
use crate::layout::{Groups, Limits, PoolConfig, Reach};
use crate::memory::Memory;
use crate::prefix::{PrefixTree, TreeShape};

const LATER: StepId = StepId::new(3);

/// A locked path of five pages of one token. Each page has a cell: two cells are idle, one waits for step 3, two are in
/// use.
struct Sound {
    tree: PrefixTree,
    fence: Fence,
    /// The cells, by place on the path.
    cells: Vec<CellId>,
    /// Held places that name each cell.
    named: HashMap<CellId, u32>,
    _lock: PrefixLock,
}

impl Sound {
    fn new() -> Self {
        let groups = Groups::new(&[Reach::All, Reach::Window(2)], &[0, 1]).expect("two groups");
        let pool = PoolConfig { layers: 2, groups, page_size: 1, ..PoolConfig::default() };
        let limits = Limits::new(&pool.layout().expect("a pool"), 1, true);
        let shape = TreeShape { limits, max_steps: 4, ..TreeShape::new(30, 1, 31) };
        let mut tree = PrefixTree::of_shape(&shape, &mut Memory::new(false)).expect("memory").0;
        let mut fence = Fence::new(0, 4, 1).expect("memory");
        let found = tree.match_prefix(Namespace::new(0), &[]);
        let mut lock = tree.lock(&found, &mut fence).expect("nothing changed");
        let tokens: Vec<_> = (0..5).map(TokenId::new).collect();
        let mut pages: Vec<_> = (0..5).map(PageId::new).collect();
        let inserted = tree.insert(&mut lock, &tokens, &mut pages, &mut Vec::new(), &mut fence);
        assert_eq!(inserted.duplicates, 0);
        let mut path = tree.nodes.path_of(&lock, 5);
        let entries: Vec<_> = (0..5).rev().map(|at| tree.nodes.entry_at(&mut path, at)).collect();
        let cell = |(at, &entry): (u32, _)| tree.cells_mut().create(0, entry, once(PageId::new(10 + at)));
        let cells: Vec<_> = (0..).zip(entries.iter().rev()).map(cell).collect();
        tree.release_cell(cells[0], StepId::default(), &mut fence);
        tree.release_cell(cells[1], StepId::default(), &mut fence);
        tree.release_cell(cells[2], LATER, &mut fence);
        let named = HashMap::from([(cells[3], 1), (cells[4], 1)]);
        let sound = Self { tree, fence, cells, named, _lock: lock };
        assert_eq!(sound.check(), Ok(()));
        sound
    }

    fn check(&self) -> Result<(), &'static str> {
        self.tree.check_cells(&self.named, &self.fence).map_err(|(what, _)| what)
    }

    fn sizes(&self) -> (u32, u32) {
        let size = self.tree.size_info();
        // The nodes' own five pages are protected.
        (size.evictable, size.protected - 5)
    }
}

/// Returns the error of the audit after `spoil`, which receives the cells by place.
fn broken(spoil: impl FnOnce(&mut super::Cells, &[CellId])) -> &'static str {
    let mut sound = Sound::new();
    spoil(sound.tree.cells_mut(), &sound.cells);
    sound.check().expect_err("the audit finds it")
}

#[test]
fn g1_entries_name_their_cells() {
    let stands = "G1: a cell belongs to the entry that names it";
    assert_eq!(broken(|all, cells| all.cells[cells[3].index()].entry += 1), stands);
    assert_eq!(broken(|all, cells| all.cells[cells[3].index()].group = 1), stands);
    let unnamed = |all: &mut super::Cells, cells: &[CellId]| {
        let entry = all.cells[cells[0].index()].entry;
        all.of_entry[entry as usize] = CellId::NONE;
    };
    assert_eq!(broken(unnamed), "G1: cells that no entry names are free");
    assert_eq!(broken(|all, _| all.count += 1), "G1: cells are counted");
    let elsewhere = |all: &mut super::Cells, cells: &[CellId]| {
        let free = all.of_entry.iter().position(|cell| !cell.is_some()).expect("an entry is free");
        let entry = all.cells[cells[0].index()].entry;
        all.of_entry.swap(entry as usize, free);
        all.cells[cells[0].index()].entry = free as u32;
    };
    assert_eq!(broken(elsewhere), "G1: a cell's entry belongs to a live list");
}

#[test]
fn g2_users_are_counted_and_their_nodes_locked() {
    let users = "G2: users = places that name the cell + waiting users";
    assert_eq!(broken(|all, cells| all.cells[cells[3].index()].users = 2), users);
    assert_eq!(broken(|all, cells| all.cells[cells[2].index()].waiting = 0), users);
    let mut sound = Sound::new();
    sound.named.remove(&sound.cells[4]);
    assert_eq!(sound.check(), Err(users));
    let mut sound = Sound::new();
    let node = sound._lock.node().expect("five pages");
    sound.tree.usage[node].lock_count = 0;
    assert_eq!(sound.check(), Err("G2: a used cell's node is locked"));
}

#[test]
fn g3_cells_are_in_the_list_of_their_state() {
    let rise = "G3: stamps rise along the idle list";
    assert_eq!(broken(|all, cells| all.cells[cells[1].index()].stamp = 0), rise);
    let state = "G3: a cell is in the list of its state";
    assert_eq!(broken(|all, _| all.idle = super::Ends::default()), state);
    assert_eq!(broken(|all, _| all.deferred.clear()), state);
    let used = |all: &mut super::Cells, cells: &[CellId]| {
        let mut ends = all.idle;
        all.cells[cells[3].index()].stamp = u64::MAX;
        all.link(&mut ends, cells[3]);
        all.idle = ends;
    };
    assert_eq!(broken(used), state);
}

#[test]
fn g5_deferred_cells_are_in_the_order_of_steps() {
    let order = "G5: deferred cells are in the order of steps, none complete";
    assert_eq!(broken(|all, _| all.deferred[0].0 = StepId::default()), order);
    let twice = |all: &mut super::Cells, _: &[CellId]| {
        let list = all.deferred[0];
        all.deferred.push_back(list);
    };
    assert_eq!(broken(twice), order);
    let until = |all: &mut super::Cells, cells: &[CellId]| {
        all.cells[cells[2].index()].until = StepId::new(4);
    };
    assert_eq!(broken(until), "G5: a deferred cell waits for the step of its list");
}

#[test]
fn a_cell_is_idle_once_its_last_user_is_done() {
    let mut sound = Sound::new();
    assert_eq!(sound.sizes(), (2, 3));
    let Sound { tree, fence, cells, .. } = &mut sound;
    // Two more users wait for earlier steps than the first user. The latest step decides.
    tree.acquire_cell(cells[2], fence);
    tree.acquire_cell(cells[2], fence);
    assert!(!tree.cells().is_idle(cells[2], Some(LATER)), "two use it");
    tree.release_cell(cells[2], StepId::new(2), fence);
    tree.release_cell(cells[2], StepId::new(1), fence);
    assert!(!tree.cells().is_idle(cells[2], Some(StepId::new(2))), "one of three waits for step 3");
    assert!(tree.cells().is_idle(cells[2], Some(LATER)));
    // An idle cell that gets a user leaves the idle list.
    tree.acquire_cell(cells[0], fence);
    sound.named.insert(sound.cells[0], 1);
    assert_eq!((sound.check(), sound.sizes()), (Ok(()), (1, 4)));

    let Sound { tree, fence, .. } = &mut sound;
    tree.complete_cells(LATER, fence);
    fence.complete(LATER);
    assert_eq!((sound.check(), sound.sizes()), (Ok(()), (2, 3)));
    // The youngest cell of the idle list became idle last.
    let list: Vec<_> = sound.tree.cells().list(sound.tree.cells().idle).collect();
    assert_eq!(list, [sound.cells[1], sound.cells[2]]);
}

#[test]
fn freed_cells_are_used_again() {
    let mut sound = Sound::new();
    let all = sound.tree.cells_mut();
    let (entry, mut freed) = (all.cells[sound.cells[0].index()].entry, Vec::new());
    all.remove(sound.cells[0], false, None, &mut freed);
    assert_eq!((freed, all.count), (vec![PageId::new(10)], 4));
    assert_eq!(all.at(0, entry), CellId::NONE);
    assert_eq!(all.create(0, entry, once(PageId::new(20))), sound.cells[0]);
    assert_eq!((all.pages(sound.cells[0]), all.at(0, entry)), (&[PageId::new(20)][..], sound.cells[0]));
}

#[test]
fn an_eviction_counts_the_cells_of_its_entries() {
    let Sound { mut tree, mut fence, cells, _lock: lock, .. } = Sound::new();
    tree.complete_cells(LATER, &mut fence);
    fence.complete(LATER);
    cells[3..].iter().for_each(|&cell| tree.release_cell(cell, StepId::default(), &mut fence));
    tree.unlock(lock, &mut fence, &mut Vec::new());
    // Make the cells younger than the pages, as if the cells had become idle later.
    cells.iter().for_each(|cell| tree.cells_mut().cells[cell.index()].stamp += 100);
    let mut freed = Vec::new();
    assert_eq!(tree.evict(2, &mut freed), 1);
    freed.sort_unstable();
    assert_eq!(freed, [4, 14].map(PageId::new), "the last page and its cell suffice");
}
