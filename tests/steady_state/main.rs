//! A warm engine allocates and frees nothing: the cache is replaced many times with prefill, decode, forks, preemption,
//! rollback and eviction, without a call of the allocator.

#![allow(unsafe_code)]

mod host;
mod tree;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use kvarena::backend::OpenBackend;
use kvarena::config::PrefixMode;
use kvarena::hash::Hashing;
use kvarena::layout::{Groups, Reach, Scaling, StatePart};
use kvarena::{
    Backend, CpuOptions, Engine, EngineConfig, Extend, KvDtype, KvShape, LayerId, Namespace, Null, OutboxOptions,
    PoolConfig, StepScratch, TokenId, Work,
};

use host::{Done, Host, PAGES, SEQUENCES, config, mix};

thread_local! {
    static CALLS: Cell<u64> = const { Cell::new(0) };
}

/// An allocator that counts the calls of each thread.
struct Counting;

fn count() {
    // A thread that is ending has no counter.
    let _ = CALLS.try_with(|calls| calls.set(calls.get() + 1));
}

// SAFETY: every call is forwarded to the system's allocator unchanged; counting touches no allocated memory.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller keeps `alloc`'s contract, which is the system's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        count();
        // SAFETY: see `alloc`; `at` came from the system's allocator.
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count();
        // SAFETY: see `alloc`; `at` came from the system's allocator.
        unsafe { System.realloc(at, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn calls() -> u64 {
    CALLS.with(Cell::get)
}

/// Runs until warm. Then checks that the allocator is not called while the cache is replaced `turns` times.
fn run<B: Backend>(
    config: EngineConfig,
    backend: impl OpenBackend<Backend = B>,
    turns: u64,
    mut store: impl FnMut(&mut B, &kvarena::BatchPlan<'_>),
) -> Done {
    let mut host = Host::new(config, backend);
    let turned = |host: &Host<B>| {
        let stats = host.engine.stats();
        // Without reuse nothing is evicted; the computed tokens then measure the turnover of the pool.
        let computed = stats.computed_tokens / u64::from(config.pool.page_size);
        let pages = match config.prefix {
            PrefixMode::Radix => stats.evicted_pages,
            _ => computed,
        };
        pages / u64::from(PAGES)
    };
    let mut seed = 0;
    let mut until = |host: &mut Host<B>, turns: u64| {
        while turned(host) < turns {
            seed += 1;
            assert!(seed < 1_000_000, "the host is stuck: {:?}", host.engine.stats());
            host.round(mix(seed), &mut store);
        }
    };
    until(&mut host, 10);
    host.engine.verify().expect("it is sound when warm");
    host.done = Done::default();
    let before = calls();
    until(&mut host, 10 + turns);
    let after = calls();
    assert_eq!(after - before, 0, "a warm engine has called the allocator");
    let stats = host.engine.stats();
    let tiers = [
        stats.saved_pages - stats.forced_pages,
        stats.forced_pages,
        stats.loaded_pages,
        stats.swap_evicted_pages,
        stats.put_pages,
        stats.fetched_pages,
    ];
    let has_swap = config.pool.swap_pages > 0;
    let has_stores = has_swap && config.hashing.is_some();
    let (hosts, stores) = tiers.split_at(4);
    assert!(hosts.iter().all(|&pages| (pages > 100) == has_swap), "{tiers:?}");
    assert!(stores.iter().all(|&pages| (pages > 100) == has_stores), "{tiers:?}");
    let has_followers = config.prefix == PrefixMode::Radix;
    assert_eq!(host.done.followers > 3, has_followers, "{:?}", host.done);
    host.engine.verify().expect("it is sound at the end");
    host.done
}

fn check(done: Done) {
    println!("{done:?}");
    let Done {
        prefills,
        decodes,
        forks,
        preemptions,
        resumes,
        rollbacks,
        drafts,
        promises,
        followers: _, // None without reuse: see `run`.
        batches,
        aborts,
        lost: _, // Only with states.
        finishes,
        refusals,
    } = done;
    let sequences = [prefills, decodes, forks, preemptions, resumes, rollbacks, finishes];
    let calls = [drafts, promises, batches, aborts, refusals];
    let mut all = sequences.iter().chain(&calls);
    assert!(all.all(|&count| count > 3), "too little happened: {done:?}");
}

#[test]
fn planning_allocates_nothing() {
    for page_size in [1, 4, 16] {
        for prefix in [PrefixMode::Radix, PrefixMode::None] {
            check(run(config(page_size, prefix), Null, 100, |_, _| ()));
        }
    }
}

#[test]
fn groups_of_layers_allocate_nothing() {
    let reaches = [Reach::All, Reach::Window(8), Reach::Chunk(4)];
    let groups = Groups::new(&reaches, &[0, 1, 2]).expect("each has a layer");
    for page_size in [1, 4] {
        for prefix in [PrefixMode::Radix, PrefixMode::None] {
            let plain = config(page_size, prefix);
            let pool = PoolConfig { layers: 3, groups, ..plain.pool };
            check(run(EngineConfig { pool, ..plain }, Null, 50, |_, _| ()));
        }
    }
}

/// Cached states, lost states and marks, in pages of one lane and of two, and in swap memory.
#[test]
fn states_allocate_nothing() {
    let parts = [StatePart { heads: 2, head_bytes: 500 }];
    let groups = Groups::new(&[Reach::All, Reach::Window(8), Reach::State], &[0, 1, 2, 2]);
    let groups = groups.and_then(|groups| groups.with_state(2, &parts)).expect("each has a layer");
    let [radix, none] = [PrefixMode::Radix, PrefixMode::None];
    for (page_size, swap_pages, prefix) in [(1, 0, radix), (4, 64, radix), (4, 0, none)] {
        let plain = config(page_size, prefix);
        let pool = PoolConfig { layers: 4, groups, shape: KvShape::heads(1, 128), swap_pages, ..plain.pool };
        let done = run(EngineConfig { pool, state_margin: 3, ..plain }, Null, 50, |_, _| ());
        assert!(done.lost > 3 && done.drafts == 0, "{done:?}");
        check(Done { drafts: 4, ..done });
    }
}

#[test]
fn hashes_and_events_allocate_nothing() {
    for &hashing in Hashing::ALL {
        // The event buffer has space for few pages, so that some drains emit the whole tree, or for all pages.
        for event_pages in [8, 1000] {
            let plain = config(4, PrefixMode::Radix);
            let config = EngineConfig { hashing: Some(hashing), event_pages, ..plain };
            check(run(config, Null, 20, |_, _| ()));
        }
    }
}

#[test]
fn events_of_cells_allocate_nothing() {
    let reaches = [Reach::All, Reach::Window(8), Reach::Chunk(4)];
    let groups = Groups::new(&reaches, &[0, 1, 2]).expect("each has a layer");
    for swap_pages in [0, 64] {
        for event_pages in [8, 1000] {
            let plain = config(4, PrefixMode::Radix);
            let pool = PoolConfig { layers: 3, groups, swap_pages, stage_pages: swap_pages / 16, ..plain.pool };
            let hashing = Hashing::ALL.first().copied();
            check(run(EngineConfig { pool, hashing, event_pages, event_cells: true, ..plain }, Null, 20, |_, _| ()));
        }
    }
}

#[test]
fn swap_memory_and_stores_allocate_nothing() {
    for page_size in [1, 4] {
        let plain = config(page_size, PrefixMode::Radix);
        let pool = PoolConfig { swap_pages: 64, stage_pages: 4, ..plain.pool };
        let config = EngineConfig { hashing: Hashing::ALL.first().copied(), pool, ..plain };
        check(run(config, Null, 50, |_, _| ()));
    }
}

/// The host does an outbox's work before each step, and reports its moves at once.
#[test]
fn work_of_an_outbox_allocates_nothing() {
    let mut items = [0; 4];
    for page_size in [1, 4] {
        let plain = config(page_size, PrefixMode::Radix);
        let pool = PoolConfig { swap_pages: 64, stage_pages: 4, ..plain.pool };
        let config = EngineConfig { hashing: Hashing::ALL.first().copied(), pool, ..plain };
        let done = run(config, OutboxOptions, 50, |outbox, _| {
            let (mut saved, mut loaded) = (None, None);
            outbox.drain(|work| match work {
                Work::Copy(copies) => items[0] += copies.len(),
                Work::Slots(_, moves) => items[1] += moves.len(),
                Work::Save(id, moves) => (saved, items[2]) = (Some(id), items[2] + moves.len()),
                Work::Load(id, moves) => (loaded, items[3]) = (Some(id), items[3] + moves.len()),
            });
            saved.into_iter().for_each(|id| outbox.saved(id));
            loaded.into_iter().for_each(|id| outbox.loaded(id));
        });
        check(done);
    }
    assert!(items.iter().all(|&count| count > 3), "copies, slots, saves, loads: {items:?}");
}

#[test]
fn swap_memory_and_stores_with_groups_allocate_nothing() {
    let reaches = [Reach::All, Reach::Window(8), Reach::Chunk(4)];
    let groups = Groups::new(&reaches, &[0, 1, 2, 2]).expect("each has a layer");
    for page_size in [1, 4] {
        let plain = config(page_size, PrefixMode::Radix);
        let pool = PoolConfig { layers: 4, groups, swap_pages: 64, stage_pages: 4, ..plain.pool };
        for hashing in [None, Hashing::ALL.first().copied()] {
            check(run(EngineConfig { pool, hashing, ..plain }, Null, 50, |_, _| ()));
        }
    }
}

#[test]
fn storing_on_the_cpu_allocates_nothing() {
    let rows = [0.5_f32; 2 * 64 * SEQUENCES];
    let plain = config(4, PrefixMode::Radix);
    let fp8 = |scaling| {
        let pool = PoolConfig { dtype: KvDtype::Fp8E4M3, scaling, ..plain.pool };
        EngineConfig { pool, ..plain }
    };
    for config in [plain, fp8(Scaling::Static), fp8(Scaling::ByToken)] {
        check(run(config, CpuOptions::with_threads(1), 50, |cpu, plan| {
            let rows = &rows[..2 * plan.token_count()];
            cpu.store_cache(plan, LayerId::new(0), rows.into(), rows.into()).expect("the plan is sound");
        }));
    }
}

#[test]
fn a_tree_alone_allocates_nothing() {
    for (hashing, event_pages) in [(None, 0), (Hashing::ALL.first().copied(), 8), (Hashing::ALL.last().copied(), 500)] {
        let mut host = tree::Host::new(hashing, event_pages);
        (1..2_000).for_each(|seed| host.round(mix(seed)));
        host.tree.verify().expect("it is sound when warm");
        host.done = [0; 5];
        let before = calls();
        (2_000..10_000).for_each(|seed| host.round(mix(seed)));
        assert_eq!(calls() - before, 0, "a warm tree has called the allocator");
        host.tree.verify().expect("it is sound at the end");
        println!("{:?}", host.done);
        assert!(host.done.iter().all(|&count| count > 100), "too little happened: {:?}", host.done);
    }
}

/// The buffer of a commit's pages has the size of one sequence.
#[test]
fn a_commit_of_more_pages_than_a_sequence_has_allocates_nothing() {
    let config = EngineConfig { max_sequence_len: 4 * 8, ..config(4, PrefixMode::Radix) };
    let mut engine = Engine::new(config, Null).expect("a valid config");
    let mut scratch = StepScratch::new();
    let items: Vec<Extend> = (0..SEQUENCES as u64)
        .map(|own| {
            let prompt: Vec<_> = (0..4 * 8).map(|i| TokenId::new((own + i) as u32)).collect();
            let admitted = engine.admit(Namespace::new(own), &prompt, 0);
            Extend { seq: admitted.expect("there is room"), len: 4 * 8 }
        })
        .collect();
    let step = engine.plan_batch(&mut scratch, &items).expect("there is room").step();
    let before = calls();
    engine.commit(step).expect("it is open");
    assert_eq!(calls() - before, 0, "a commit has called the allocator");
    assert_eq!(engine.stats().cached_pages, PAGES);
    engine.verify().expect("it is sound");
}

#[test]
fn calls_of_the_allocator_are_counted() {
    let before = calls();
    let boxed = std::hint::black_box(Box::new(1));
    assert_eq!(calls() - before, 1);
    drop(boxed);
    assert_eq!(calls() - before, 2);
}
