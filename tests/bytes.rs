//! The config reports the bytes that the engine allocates. The test compares the report with the allocator's count.
#![allow(unsafe_code)] // A counting allocator.
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicU64, Ordering};

use kvarena::config::PrefixMode;
use kvarena::hash::{Hashing, NamespaceNames};
use kvarena::layout::{Groups, Reach, Scaling};
use kvarena::tree::{Tree, TreeConfig};
use kvarena::{
    Capacity, CpuOptions, Engine, EngineConfig, Extend, KvDtype, KvShape, Namespace, Null, PoolConfig, StepScratch,
    TokenId,
};

struct Counting;

static LIVE: AtomicU64 = AtomicU64::new(0);

// SAFETY: every call is forwarded to the system's allocator unchanged; counting touches no memory of the caller.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LIVE.fetch_add(layout.size() as u64, Ordering::Relaxed);
        // SAFETY: the caller's contract is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        LIVE.fetch_add(layout.size() as u64, Ordering::Relaxed);
        // SAFETY: the caller's contract is passed on.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size() as u64, Ordering::Relaxed);
        // SAFETY: the caller's contract is passed on.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Maximum difference in bytes: rounding of small tables, and one spare slot of each slotmap. It is constant, so that
/// it hides no table that grows.
const SLACK: u64 = 4096;

fn check_reported(config: &EngineConfig, reported: u64, measured: u64) {
    assert!(reported.abs_diff(measured) <= SLACK, "{config:?} reports {reported} bytes and takes {measured}");
}

fn check(config: EngineConfig) {
    let reported = config.bytes().expect("a valid config").host();
    let before = LIVE.load(Ordering::Relaxed);
    let engine = Engine::new(config, Null).expect("a valid config");
    let measured = LIVE.load(Ordering::Relaxed) - before;
    drop(engine);
    check_reported(&config, reported, measured);
}

fn check_trees() {
    for (pages, page_size) in [(1, 16), (1_000, 1), (100_000, 16)] {
        let plain = TreeConfig { prefault: false, ..TreeConfig::new(pages, page_size) };
        let hashing = Some(Hashing::ALL[0]);
        for config in [plain, TreeConfig { hashing, ..plain }, TreeConfig { hashing, event_pages: 10 + pages, ..plain }]
        {
            let reported = config.bytes().expect("a valid config");
            let before = LIVE.load(Ordering::Relaxed);
            let tree = Tree::new(config).expect("a valid config");
            let measured = LIVE.load(Ordering::Relaxed) - before;
            drop(tree);
            assert!(reported.abs_diff(measured) <= SLACK, "{config:?} reports {reported} and takes {measured}");
        }
    }
}

fn check_swap() {
    for (swap_pages, page_size) in [(1, 16), (1_000, 1), (70_000, 16)] {
        let pool = PoolConfig { page_size, swap_pages, ..Default::default() };
        let config = EngineConfig::from(pool);
        check(config);
        check(EngineConfig { prefix: PrefixMode::None, ..config });
        check(EngineConfig { hashing: Some(Hashing::ALL[0]), event_pages: 10, ..config });
        let groups = Groups::new(&[Reach::All, Reach::Window(20)], &[0, 1, 1]);
        let pool = PoolConfig { layers: 3, groups: groups.expect("two groups"), ..pool };
        check(EngineConfig::from(pool));
        let config = EngineConfig { hashing: Some(Hashing::ALL[0]), event_pages: 10, ..EngineConfig::from(pool) };
        check(EngineConfig { event_cells: true, ..config });
        check(EngineConfig { prefix: PrefixMode::None, ..EngineConfig::from(pool) });
    }
}

/// Layers in groups. The tree keeps the pages of groups of limited reach in cells.
fn check_groups() {
    let limited = [Reach::All, Reach::Window(40), Reach::Chunk(64)];
    let groups = Groups::new(&limited, &[1, 0, 2, 1]).expect("three groups");
    for (pages, page_size) in [(1_000, 1), (100_000, 1), (100_000, 16)] {
        let capacity = Capacity::Pages(pages);
        let pool = PoolConfig { layers: 4, groups, page_size, capacity, ..Default::default() };
        let config = EngineConfig::from(pool);
        check(config);
        check(EngineConfig { prefix: PrefixMode::None, ..config });
        check(EngineConfig { max_sequences: 1, max_steps: 1 << 18, ..config });
    }
}

/// All cases are one test, because allocations of other tests would be counted.
#[test]
fn the_config_reports_what_the_engine_takes() {
    check_pools();
    check_names();
    check_trees();
    check_swap();
    check_groups();
    check_documented();
    for pages in [1, 1_000, 100_000] {
        for page_size in [1, 3, 16, 1024] {
            let pool = PoolConfig { page_size, capacity: Capacity::Pages(pages), ..Default::default() };
            let mut config = EngineConfig::from(pool);
            check(config);
            for &hashing in Hashing::ALL {
                check(EngineConfig { hashing: Some(hashing), ..config });
                check(EngineConfig { hashing: Some(hashing), event_pages: 10 + pages, ..config });
            }
            config.prefault = false;
            config.max_sequences = 7;
            config.max_tokens = 100_000;
            config.max_steps = 2;
            config.prefix = PrefixMode::None;
            check(config);
            config.max_sequences = 4096;
            check(config);
            // The memory of steps dominates this config.
            config.max_sequences = 1;
            config.max_steps = 1 << 18;
            check(config);
        }
    }
}

/// Each request has its own salt, which is forgotten after the request: only cached pages keep names.
fn check_names() {
    let pool = PoolConfig { page_size: 4, capacity: Capacity::Pages(64), ..Default::default() };
    let hashing = Some(Hashing::Dynamo);
    let config = EngineConfig { hashing, event_pages: 64, max_tokens: 4096, ..pool.into() };
    let mut engine = Engine::new(config, Null).expect("a valid config");
    let mut scratch = StepScratch::new();
    let prompt: Vec<_> = (0..13).map(TokenId::new).collect();
    let mut settled = 0;
    for request in 1..=40_000 {
        let namespace = Namespace::new(request);
        let names = NamespaceNames { salt: Some(format!("{request:0>64}")), ..Default::default() };
        engine.name_namespace(namespace, names).expect("the names are unused");
        let seq = engine.admit(namespace, &prompt, 0).expect("room");
        let items = [Extend { seq, len: 13 }];
        let step = engine.plan_batch(&mut scratch, &items).expect("room").step();
        engine.commit(step).expect("it is open");
        engine.complete(step).expect("it is committed");
        engine.finish(seq).expect("it is live");
        engine.forget_namespace(namespace).expect("it has names");
        if request % 10 == 0 {
            engine.drain_events(|_| ());
        }
        if request == 4_000 {
            settled = LIVE.load(Ordering::Relaxed);
        }
    }
    let grown = LIVE.load(Ordering::Relaxed).saturating_sub(settled);
    assert!(grown < 4096, "36,000 namespaces left {grown} bytes");
    engine.verify().expect("all invariants hold");
}

/// The config also reports K and V, and the scales that a pool of fp8 stores.
fn check_pools() {
    for (dtype, scaling) in
        [(KvDtype::Bf16, Scaling::Static), (KvDtype::Fp8E4M3, Scaling::Static), (KvDtype::Fp8E4M3, Scaling::ByToken)]
    {
        for page_size in [1, 3, 16] {
            let pool = PoolConfig {
                layers: 3,
                shape: KvShape::heads(5, 40),
                dtype,
                scaling,
                page_size,
                capacity: Capacity::Pages(6_000 / page_size),
                ..Default::default()
            };
            let config = EngineConfig::from(pool);
            let bytes = config.bytes().expect("a valid config");
            let tokens = u64::from(6_000 / page_size * page_size);
            // The pool stores K and V. With scales by token, it also stores a scale for each token, head, layer and
            // plane.
            let heads = tokens * 3 * 2 * 5;
            let numbers = heads * 40 * u64::from(dtype.size());
            let scales = if scaling == Scaling::ByToken { heads * 4 } else { 0 };
            // K, V and scales of a page and layer then each begin at a multiple of 16 bytes.
            let pieces = tokens / u64::from(page_size) * 3 * 2 * 2;
            let padding = if scales > 0 { pieces * 15 } else { 0 };
            assert!((numbers + scales..=numbers + scales + padding).contains(&bytes.kv), "{bytes:?}");
            let reported = bytes.host() + bytes.kv + bytes.kv_tables;
            let before = LIVE.load(Ordering::Relaxed);
            let engine = Engine::new(config, CpuOptions::with_threads(1)).expect("a valid config");
            let measured = LIVE.load(Ordering::Relaxed) - before;
            drop(engine);
            check_reported(&config, reported, measured);
        }
    }
}

/// ARCHITECTURE.md contains these numbers: the bytes of a swap page's tables at pages of 16 and of 64 tokens.
fn check_documented() {
    let pages = 1 << 20;
    let bytes = |page_size: u32, hashing: Option<Hashing>, event_pages: u32| {
        let total = |swap_pages: u32| {
            // The child table has a power of two of entries: as many as needed both times.
            let capacity = Capacity::Pages(pages - 1);
            let pool = PoolConfig { page_size, capacity, swap_pages, ..Default::default() };
            let config = EngineConfig { hashing, event_pages, ..pool.into() };
            config.bytes().expect("a valid config").host()
        };
        // The first swap page adds tables of the device's pages.
        (total(pages) - total(1)) / u64::from(pages - 1)
    };
    let of = |hashing: Option<Hashing>, events: u32| [16, 64].map(|size| bytes(size, hashing, events));
    assert_eq!(of(None, 0), [253, 469]);
    assert_eq!(of(Some(Hashing::Dynamo), 0), [342, 558]);
    assert_eq!(of(Some(Hashing::SglangSha256), 1), [393, 609]);
}
