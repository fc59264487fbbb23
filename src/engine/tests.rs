//! Breaks invariants of the world and of its tables by hand, and checks that `verify` names them. The tests of a table
//! are in its module. Also checks that the tree's log of attached and detached pages reproduces its contents.

use std::collections::HashMap;

use super::Engine;
use crate::backend::Null;
use crate::fence::Fence;
use crate::id::{CellId, Namespace, PageId, SeqKey, StepId, TokenId};
use crate::layout::{Capacity, Groups, HeldGroup, PoolConfig, Reach, StatePart};
use crate::page::PageState;
use crate::plan::{Extend, Keep, StepScratch};
use crate::prefix::{CachedPage, LogEntry, PrefixTree, Stale};
use crate::sequence::{Current, DirtyFrom, RowMut, Sequence};
use crate::testkit::replay::replay_each;
use crate::testkit::{Family, SmallConfig, Workload};
use crate::world::{Broken, Owner, World};

/// An engine with four tokens a page, whose invariants all hold before a test breaks one.
struct Sound {
    engine: Engine<Null>,
    /// Ten tokens: the tree owns two of its pages, and the sequence owns one.
    long: SeqKey,
    /// Begins like `long`, and shares its first page.
    other: SeqKey,
    /// Three tokens on one page of its own.
    short: SeqKey,
}

impl Sound {
    fn new() -> Self {
        let pool = PoolConfig { page_size: 4, capacity: Capacity::Pages(16), ..Default::default() };
        let mut engine = Engine::with_hash_bits(pool, Null, 31).expect("a valid config");
        let [long, other, short] = [(0, 10), (1, 7), (2, 3)].map(|(own, len)| {
            let token = |i| TokenId::new(if i < 4 { own / 2 } else { own });
            let prompt: Vec<TokenId> = (0..len).map(token).collect();
            let seq = engine.admit(Namespace::default(), &prompt, 0).expect("there is room");
            let step = plan(&mut engine, seq);
            engine.commit(step).expect("it is open");
            seq
        });
        // The last step stays unfinished, and a page waits for it.
        let child = engine.fork(short, 1, 0).expect("there is room").children[0];
        engine.finish(child).expect("it is live");
        engine.complete(StepId::new(3)).expect("it is committed");
        assert_eq!(engine.verify(), Ok(()));
        Self { engine, long, other, short }
    }

    fn world(&mut self) -> &mut World {
        &mut self.engine.world
    }

    fn sequence(&mut self, seq: SeqKey) -> &mut Sequence {
        self.world().sequences.get_mut(seq).expect("it is live")
    }

    /// Returns a sequence's last page, which is its own.
    fn last_page(&self, seq: SeqKey) -> PageId {
        self.engine.page_table(seq).expect("it is live").last().expect("it has pages")
    }
}

/// Plans all tokens of a sequence that have no K and V.
fn plan(engine: &mut Engine<Null>, seq: SeqKey) -> StepId {
    let len = engine.extend_max(seq).expect("it is live");
    engine.plan_batch(&mut StepScratch::new(), &[Extend { seq, len }]).expect("there is room").step()
}

fn compute(engine: &mut Engine<Null>, seq: SeqKey) {
    let step = plan(engine, seq);
    engine.commit(step).expect("it is open");
    engine.complete(step).expect("it is committed");
}

/// Returns the error of the audit after `spoil`.
fn verify<T>(spoil: impl FnOnce(&mut Sound) -> T) -> Broken {
    let mut sound = Sound::new();
    spoil(&mut sound);
    sound.engine.verify().expect_err("the audit finds it")
}

fn broken<T>(spoil: impl FnOnce(&mut Sound) -> T) -> &'static str {
    verify(spoil).invariant
}

#[test]
fn tables_are_audited() {
    let p1 = verify(|s| {
        let page = s.last_page(s.long);
        s.world().pages.break_p1(page);
        s.world().pages.free_cached(&[page]);
        s.world().pages.break_p1(page);
    });
    assert_eq!(p1.invariant, "P1: a page is in exactly one state");
    assert!(matches!(p1.owner, Some(Owner::Sequence(_))), "{p1}");
    let planned = "F1: nothing waits for a step that is not planned";
    assert_eq!(broken(|s| s.world().fence.push_pages(&[], StepId::new(99))), planned);
    let counted = "F2: marks count the pages that wait";
    let lost = |s: &mut Sound| {
        let (page, _) = s.world().fence.pages().next().expect("the child's page");
        s.world().pages.unfence(&[page]);
    };
    assert_eq!(broken(lost), counted);
}

/// The audit of T3 covers W3: it compares `lock_count` with the locks that sequences, fetches and the fence hold.
#[test]
fn w3_a_lock_that_is_counted_is_held() {
    let counts = "T3: lock_count counts locks that end here and locked children";
    let dropped = |s: &mut Sound| s.sequence(s.long).lock = None;
    assert_eq!(broken(dropped), counts);
    let unheld = |s: &mut Sound| {
        let World { prefixes, sequences, fence, .. } = s.world();
        let (_, sequence) = sequences.iter().find(|(_, s)| s.published == 2).expect("it is live");
        prefixes.lock_again(sequence.lock.as_ref().expect("it runs"), fence)
    };
    assert_eq!(broken(unheld), counts);
}

#[test]
fn s1_lengths_are_ordered_and_match_the_page_table() {
    let lengths = "S1: cached_len <= planned_len";
    assert_eq!(broken(|s| s.sequence(s.long).cached_len = 11), lengths);
    let pages = "S1: page_len = ceil(planned_len / page_size), less pending pages";
    assert_eq!(broken(|s| s.sequence(s.long).planned_len = 13), pages);
    assert_eq!(broken(|s| s.sequence(s.short).page_len = 0), pages);
}

#[test]
fn s2_published_pages_are_computed() {
    let computed = "S2: published pages are computed";
    assert_eq!(broken(|s| s.sequence(s.long).cached_len = 7), computed);
    assert_eq!(broken(|s| s.sequence(s.long).token_len = 7), computed);
}

#[test]
fn s3_a_preempted_sequence_has_no_pages() {
    let preempted = "S3: a preempted sequence has no pages";
    assert_eq!(broken(|s| s.sequence(s.short).lock = None), preempted);
}

#[test]
fn s4_unsent_pages_are_within_the_page_table() {
    let within = "S4: dirty_from lies within the pages";
    assert_eq!(broken(|s| s.sequence(s.long).dirty_from = DirtyFrom::sent(4)), within);
    let published = "S4: inherited pages are published";
    assert_eq!(broken(|s| s.sequence(s.long).inherited = 4), published);
}

#[test]
fn s5_leaves_in_use_belong_to_rows() {
    let leaves = "S5: a leaf's user count is the number of rows that use it";
    assert_eq!(broken(|s| s.sequence(s.long).break_s5()), leaves);
    assert_eq!(broken(|s| s.world().sequences.break_s5_of_pages()), leaves);
}

#[test]
fn s6_a_row_stores_its_last_token_and_page() {
    let ends = "S6: a row stores the entry of its last page and its last token";
    assert_eq!(broken(|s| s.sequence(s.long).break_s6()), ends);
    assert_eq!(broken(|s| s.sequence(s.long).last_token = TokenId::new(7)), ends);
}

#[test]
fn s7_promises_are_counted() {
    let counted = "S7: the total of outstanding pages is the sum over all sequences";
    assert_eq!(broken(|s| s.sequence(s.long).promised = 4), counted);
    let nothing = "S3: a preempted sequence is promised nothing";
    let preempted = |s: &mut Sound| {
        s.engine.preempt(s.long, Keep::Publish).expect("it runs");
        s.sequence(s.long).promised = 1;
    };
    assert_eq!(broken(preempted), nothing);
}

#[test]
fn s8_fronts_are_found() {
    let found = "S8: each sequence in the index runs and is found by its front";
    let gone = |s: &mut Sound| {
        let long = s.long;
        s.engine.append(long, &[TokenId::new(7); 4]).expect("there is room");
        s.engine.verify().expect("it is found");
        let row = s.world().sequences.row_mut(long).expect("it is live");
        row.sequence.token_len = 10;
        s.world().sequences.truncate_tokens(long, 10);
    };
    assert_eq!(broken(gone), found);
}

#[test]
fn w4_promises_are_backed() {
    let mut sound = Sound::new();
    let World { pages, prefixes, .. } = sound.world();
    let backed = pages.free_count() + prefixes.size_info().evictable + pages.fenced_count();
    let (long, page_len) = (sound.long, sound.sequence(sound.long).page_len);
    sound.world().sequences.promise(long, page_len + backed);
    assert_eq!(sound.engine.verify(), Ok(()));
    let more = |s: &mut Sound| s.world().sequences.promise(long, page_len + backed + 1);
    assert_eq!(broken(more), "W4: promised <= free + evictable + fenced");
}

#[test]
fn w1_a_page_has_one_owner_and_its_state_matches() {
    let two = verify(|s| {
        let (long, last) = (s.long, s.last_page(s.other));
        let sequences = &mut s.world().sequences;
        sequences.truncate_pages(long, 2, &mut Vec::new());
        sequences.row_mut(long).expect("it is live").append_pages(1, &[last]);
    });
    assert_eq!(two.invariant, "W1: a page has one owner");
    assert!(matches!(two.owner, Some(Owner::Sequence(_))), "{two}");

    let sentence = "W1: a page's state is that of its owner";
    let cached = |s: &mut Sound| {
        let last = s.last_page(s.long);
        s.world().pages.publish(&[last]);
    };
    assert_eq!(broken(cached), sentence);
    let freed = |s: &mut Sound| {
        let first = s.engine.page_table(s.long).expect("it is live").next().expect("a page");
        s.world().pages.free_cached(&[first]);
    };
    let freed = verify(freed);
    assert_eq!(freed.invariant, sentence);
    assert!(matches!(freed.owner, Some(Owner::Node(_))), "{freed}");

    let mut lost = [PageId::default()];
    let unowned = verify(|s| assert!(s.world().pages.alloc(&mut lost)));
    assert_eq!(unowned.invariant, "W1: a page that is not free has an owner");
    assert_eq!((unowned.page, unowned.owner), (Some(lost[0]), None));
}

#[test]
fn w2_published_pages_are_the_locks_path() {
    let path = "W2: published and pending pages are the lock's path";
    assert_eq!(broken(|s| s.sequence(s.long).published = 1), path);
    let exchanged = |s: &mut Sound| {
        let (long, other) = (s.long, s.other);
        let lock = s.sequence(other).lock.take();
        let lock = std::mem::replace(&mut s.sequence(long).lock, lock);
        s.sequence(other).lock = lock;
    };
    assert_eq!(broken(exchanged), path);
}

#[test]
fn a_fenced_page_is_free_once_its_step_is_complete() {
    let mut sound = Sound::new();
    let (page, step) = sound.world().fence.pages().next().expect("the child's page");
    assert_eq!(sound.engine.world.pages.state(page), PageState::Fenced);
    sound.engine.complete(step).expect("a fork's step counts as committed");
    assert_eq!(sound.engine.world.pages.state(page), PageState::Free);
    assert_eq!(sound.engine.verify(), Ok(()));
}

/// Returns an engine with two groups, a sequence, and the places that the sequence keeps in the group with a window.
/// Cells of the tree contain the tail of its prompt. All invariants hold.
fn grouped() -> (Engine<Null>, SeqKey, HeldGroup) {
    let groups = Groups::new(&[Reach::All, Reach::Window(8)], &[0, 1]).expect("two groups");
    let capacity = Capacity::Pages(40);
    let pool = PoolConfig { layers: 2, groups, page_size: 4, capacity, ..Default::default() };
    let mut engine = Engine::with_hash_bits(pool, Null, 31).expect("a valid config");
    let prompt: Vec<TokenId> = (0..22).map(TokenId::new).collect();
    let seq = engine.admit(Namespace::default(), &prompt, 0).expect("there is room");
    engine.mark(seq, 28).expect("it is ahead");
    compute(&mut engine, seq);
    assert_eq!(engine.verify(), Ok(()));
    let limits = engine.world.sequences.limits();
    let held = limits.held_groups(5).next().expect("a group");
    assert_eq!(held.first, 3);
    (engine, seq, held)
}

#[test]
fn g4_held_places_name_the_cells_of_the_path() {
    let spoiled = |spoil: fn(&mut World, SeqKey, &HeldGroup)| {
        let (mut engine, seq, held) = grouped();
        spoil(&mut engine.world, seq, &held);
        engine.verify().expect_err("the audit finds it").invariant
    };
    let swapped = spoiled(|world, seq, held| {
        let mut row = world.sequences.row_mut(seq).expect("it is live");
        let cells = [3, 4].map(|place| row.cell(held.group, place));
        assert!(cells.iter().all(|cell| cell.is_some()), "the tail of the prompt is kept");
        row.set_cell(held.group, 3, cells[1]);
        row.set_cell(held.group, 4, cells[0]);
    });
    assert_eq!(swapped, "G4: a held place names the cell at its entry of the lock's path");
    let beyond = spoiled(|world, seq, held| {
        let mut row = world.sequences.row_mut(seq).expect("it is live");
        let cell = row.cell(held.group, 4);
        row.set_cell(held.group, 4, CellId::NONE);
        row.set_cell(held.group, 5, cell);
    });
    assert_eq!(beyond, "G4: a held place names the cell at its entry of the lock's path");
    let pages = spoiled(|world, seq, held| {
        let mut row = world.sequences.row_mut(seq).expect("it is live");
        let (cell, other) = (row.cell(held.group, 4), row.track_page(held.track, 3));
        row.name_cell(held, 4, cell, &[other]);
    });
    assert_eq!(pages, "G4: a held place that names a cell has its pages");
}

#[test]
fn g6_waiting_marks_are_ahead() {
    let (mut engine, seq, _) = grouped();
    let mut row = engine.world.sequences.row_mut(seq).expect("it is live");
    row.add_mark(5).expect("the row has space for the mark");
    let broken = engine.verify().expect_err("the audit finds it");
    assert_eq!(broken.invariant, "G6: waiting marks are above the published pages");
}

/// Returns an engine, and a sequence that has computed a prompt and two tokens, so that its state is steady. The last
/// step is open.
fn stateful() -> (Engine<Null>, SeqKey) {
    let groups = Groups::new(&[Reach::All, Reach::State], &[0, 1]);
    let groups = groups.and_then(|groups| groups.with_state(1, &[StatePart { heads: 1, head_bytes: 512 }]));
    let (groups, capacity) = (groups.expect("two groups"), Capacity::Pages(32));
    let pool = PoolConfig { layers: 2, groups, page_size: 4, capacity, ..Default::default() };
    let mut engine = Engine::with_hash_bits(pool, Null, 31).expect("a valid config");
    let prompt: Vec<TokenId> = (0..6).map(TokenId::new).collect();
    let seq = engine.admit(Namespace::default(), &prompt, 0).expect("there is room");
    for token in 6..8 {
        compute(&mut engine, seq);
        engine.append(seq, &[TokenId::new(token)]).expect("there is room");
    }
    plan(&mut engine, seq);
    assert_eq!(engine.verify(), Ok(()));
    (engine, seq)
}

#[test]
fn s10_the_current_state_is_behind_the_planned_tokens() {
    let (mut engine, seq) = stateful();
    let mut row = engine.world.sequences.row_mut(seq).expect("it is live");
    assert!(row.sequence.dirty_from.is_steady());
    row.states_mut().current = Current::Fresh;
    let behind = "S10: the current state is behind the last planned token";
    assert_eq!(engine.verify().expect_err("the audit finds it").invariant, behind);
    let steady = "S10: a steady row updates its state in place";
    let spoils: [fn(&mut RowMut<'_>); 4] = [
        |row| row.states_mut().careful_until = 99,
        |row| row.states_mut().places.iter_mut().for_each(|place| place.mark = 2),
        |row| row.resend_state(),
        |row| row.add_mark(9).expect("the row has space for the mark"),
    ];
    for spoil in spoils {
        let (mut engine, seq) = stateful();
        let mut row = engine.world.sequences.row_mut(seq).expect("it is live");
        spoil(&mut row);
        assert!(!row.sequence.dirty_from.is_steady(), "each change of a state ends it");
        row.sequence.dirty_from.set_steady(true);
        assert_eq!(engine.verify().expect_err("the audit finds it").invariant, steady);
    }
}

/// An item that keeps the state at a mark reads its place, and writes another.
#[test]
fn s10_items_read_and_write_the_states_behind_their_tokens() {
    let spoils: [fn(&mut RowMut<'_>, u8); 2] = [
        |row, read| row.states_mut().current = Current::At(read),
        |row, read| row.states_mut().places[usize::from(read)].len = 7,
    ];
    for spoil in spoils {
        let (mut engine, seq) = stateful();
        let mut row = engine.world.sequences.row_mut(seq).expect("it is live");
        let Current::At(read) = row.states_mut().current else { panic!("S10: the row has a state") };
        engine.mark(seq, 8).expect("it is the end of the planned tokens");
        engine.append(seq, &[TokenId::new(8)]).expect("there is room");
        plan(&mut engine, seq);
        assert_eq!(engine.verify(), Ok(()));
        let mut row = engine.world.sequences.row_mut(seq).expect("it is live");
        assert_ne!(row.states().current, Current::At(read));
        spoil(&mut row, read);
        let invariant = "S10: items read and write the states behind their tokens";
        assert_eq!(engine.verify().expect_err("the audit finds it").invariant, invariant);
    }
}

/// Returns an engine, and a sequence of 13 tokens that waits for pages in swap memory.
fn waiting() -> (Engine<Null>, SeqKey) {
    let capacity = Capacity::Pages(4);
    let pool = PoolConfig { page_size: 4, capacity, swap_pages: 8, ..Default::default() };
    let mut engine = Engine::with_hash_bits(pool, Null, 31).expect("a valid config");
    let texts = [1, 2].map(|own| [TokenId::new(own); 13]);
    for text in texts {
        let seq = engine.admit(Namespace::default(), &text, 0).expect("there is room");
        compute(&mut engine, seq);
        engine.finish(seq).expect("it is live");
    }
    let seq = engine.admit(Namespace::default(), &texts[0], 0).expect("there is room");
    assert!(engine.world.sequences.pending(engine.world.sequences.get(seq).expect("it is live")) > 0);
    assert_eq!(engine.verify(), Ok(()));
    (engine, seq)
}

/// Returns an engine, and a sequence that waits for a cell in swap memory. All pages of group 0 are on the device.
fn waiting_for_a_cell() -> (Engine<Null>, SeqKey) {
    let groups = Groups::new(&[Reach::All, Reach::Window(2)], &[0, 1]).expect("two groups");
    let capacity = Capacity::Pages(8);
    let pool = PoolConfig { layers: 2, groups, page_size: 1, capacity, ..Default::default() };
    let pool = PoolConfig { swap_pages: 8, ..pool };
    let mut engine = Engine::with_hash_bits(pool, Null, 31).expect("a valid config");
    let texts = [1, 2].map(|own| [TokenId::new(own); 3]);
    let admit = |engine: &mut Engine<Null>, text: &[TokenId]| {
        engine.admit(Namespace::default(), text, 3).expect("there is room")
    };
    let seq = admit(&mut engine, &texts[0]);
    compute(&mut engine, seq);
    engine.finish(seq).expect("it is live");
    // The plan of this sequence evicts the oldest cells to swap memory.
    let seq = admit(&mut engine, &texts[1]);
    let step = plan(&mut engine, seq);
    engine.abort(step).expect("it is open");
    engine.complete(step).expect("it is aborted");
    engine.finish(seq).expect("it is live");
    let seq = admit(&mut engine, &texts[0]);
    assert_eq!(engine.verify(), Ok(()));
    (engine, seq)
}

#[test]
fn h5_with_groups_a_sequence_that_waits_lists_no_page() {
    let (engine, seq) = waiting_for_a_cell();
    let sequence = engine.world.sequences.get(seq).expect("it is live");
    assert_eq!((engine.world.sequences.pending(sequence), sequence.page_len), (2, 0));
    let (mut engine, seq) = waiting_for_a_cell();
    let row = engine.world.sequences.row_mut(seq).expect("it is live");
    assert_eq!(row.pending(), 2);
    let first = engine.world.prefixes.nodes().path(row.sequence.lock.as_ref().expect("it runs"))[0];
    let mut row = engine.world.sequences.row_mut(seq).expect("it is live");
    row.begin_pending(1, 1, 1);
    row.append_published(&[first]);
    row.sequence.published = 1;
    let lists = "H5: with groups, a sequence that waits lists no page";
    assert_eq!(engine.verify().expect_err("the audit finds it").invariant, lists);
}

#[test]
fn h5_a_sequence_that_waits_uses_its_cells() {
    let (mut engine, seq) = waiting_for_a_cell();
    let World { prefixes, sequences, fence, .. } = &mut engine.world;
    let lock = sequences.get(seq).expect("it is live").lock.as_ref().expect("it runs");
    prefixes.release_tails(lock, 2, fence);
    let users = "G2: users = places that name the cell + waiting users";
    assert_eq!(engine.verify().expect_err("the audit finds it").invariant, users);
}

#[test]
fn h5_a_page_table_lacks_pending_pages() {
    let (mut engine, seq) = waiting();
    let mut row = engine.world.sequences.row_mut(seq).expect("it is live");
    let pending = row.pending();
    row.begin_pending(pending - 1, 0, 0);
    let lengths = "S1: page_len = ceil(planned_len / page_size), less pending pages";
    assert_eq!(engine.verify().expect_err("the audit finds it").invariant, lengths);
    let (mut engine, seq) = waiting();
    engine.world.sequences.get_mut(seq).expect("it is live").published += 1;
    let waits = "H5: a sequence that waits is in no open plan";
    assert_eq!(engine.verify().expect_err("the audit finds it").invariant, waits);
}

#[test]
fn a_match_is_stale_after_a_split_growth_eviction_or_reset() {
    let text: Vec<TokenId> = (0..6).map(TokenId::new).collect();
    for change in 0..4 {
        let mut tree = PrefixTree::new(20, 1, 31, false).expect("memory");
        let mut fence = Fence::new(0, 1, 1).expect("memory");
        let start = tree.match_prefix(Namespace::default(), &[]);
        let mut lock = tree.lock(&start, &mut fence).expect("nothing has changed");
        let mut pages: Vec<PageId> = (0..6).map(PageId::new).collect();
        _ = tree.insert(&mut lock, &text[..5], &mut pages[..5], &mut Vec::new(), &mut fence);
        let [short, found] = [2, 5].map(|len| tree.match_prefix(Namespace::default(), &text[..len]));
        assert_eq!(tree.match_prefix(Namespace::default(), &text[..5]), found, "the epoch is the same");
        match change {
            0 => drop(tree.lock(&short, &mut fence)),
            1 => _ = tree.insert(&mut lock, &text[5..], &mut pages[5..], &mut Vec::new(), &mut fence),
            2 => {
                tree.unlock(lock, &mut fence, &mut Vec::new());
                tree.evict(1, &mut Vec::new());
            }
            _ => tree.reset(&mut Vec::new()),
        }
        assert_eq!(tree.lock(&found, &mut fence).err(), Some(Stale), "change {change}");
    }
}

/// Contents of a tree, from its log alone.
#[derive(Default)]
struct Follower {
    all: HashMap<PageId, CachedPage>,
    /// Pages that can match.
    present: HashMap<PageId, CachedPage>,
    /// Number of detached pages of old generations, and of the present one.
    detached: [usize; 2],
}

impl Follower {
    fn follow(&mut self, LogEntry { added, present, pages }: LogEntry) {
        if added {
            for (page, cached) in pages {
                let parent = cached.parent.is_none_or(|parent| self.all.contains_key(&parent));
                assert!(parent, "a parent is attached first");
                assert_eq!(cached.parent.is_none(), cached.position == 0);
                if present {
                    self.present.insert(page, cached.clone());
                }
                assert_eq!(self.all.insert(page, cached), None, "a page is attached once");
            }
            return;
        }
        self.detached[usize::from(present)] += pages.len();
        for (page, cached) in pages.into_iter().rev() {
            assert_eq!(self.all.remove(&page), Some(cached), "the attached page is detached");
            assert_eq!(self.present.remove(&page).is_some(), present);
            let parent = |cached: &CachedPage| cached.parent == Some(page);
            assert!(!self.all.values().any(parent), "children are detached first");
        }
    }
}

#[test]
fn the_log_reproduces_the_pages_of_the_tree() {
    let mut detached = [0; 2];
    for seed in 0..5000 {
        let mut workload = Workload::new(Family::Any, seed);
        // The pool is so small that most pages are evicted.
        let small = SmallConfig { pages: 12, page_size: 1, tokens: 1 << 12, ..SmallConfig::default() };
        let config = SmallConfig { hashing: workload.config().hashing, ..small };
        let (mut follower, mut generation) = (None::<Follower>, 0);
        let replayed = replay_each(&config, Null, &workload.take_ops(200), |engine| {
            let tree = &mut engine.world.prefixes;
            let Some(follower) = &mut follower else {
                follower = Some(Follower::default());
                return tree.keep_log();
            };
            let present = tree.match_prefix(Namespace::default(), &[]).scope().generation;
            if std::mem::replace(&mut generation, present) != present {
                follower.present.clear();
            }
            tree.take_log().into_iter().for_each(|entry| follower.follow(entry));
            let mut held = tree.held();
            assert_eq!(follower.all, held, "seed {seed}");
            held.retain(|_, cached| cached.scope.generation == present);
            assert_eq!(follower.present, held, "seed {seed}");
        });
        replayed.expect("engine and model agree");
        let gone = follower.map_or([0; 2], |follower| follower.detached);
        (0..2).for_each(|i| detached[i] += gone[i]);
    }
    assert!(detached.iter().all(|&pages| pages > 1000), "old and present pages: {detached:?}");
}
