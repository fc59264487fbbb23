//! Without enough memory, opening an engine returns an error and never aborts. The tests let the allocation of each
//! table fail, and try any numbers in the config.

#![allow(unsafe_code)] // An allocator that fails.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use kvarena::backend::CpuError;
use kvarena::config::PrefixMode;
use kvarena::hash::Hashing;
use kvarena::testkit::rng::Rng;
use kvarena::tree::{Tree, TreeConfig};
use kvarena::{
    Capacity, ConfigError, CpuOptions, Engine, EngineConfig, EngineError, KvDtype, KvShape, Null, PoolConfig,
};

/// Smaller blocks never fail: Rust and slotmap allocate some of them infallibly. The tables of names have 340 and 660.
const TABLE: usize = 256;

thread_local! {
    /// Bytes of the largest block that this thread may allocate.
    static ROOM: Cell<usize> = const { Cell::new(usize::MAX) };
    /// Number of blocks of at least [`TABLE`] bytes that are allocated before one fails.
    static BLOCKS: Cell<u64> = const { Cell::new(u64::MAX) };
    /// Bytes of the live blocks of at least [`TABLE`] bytes.
    static LIVE: Cell<usize> = const { Cell::new(0) };
}

/// An allocator that fails as a thread has requested.
struct Refusing;

fn grants(layout: Layout) -> bool {
    if layout.size() < TABLE {
        return true;
    }
    let blocks = BLOCKS.get();
    BLOCKS.set(blocks.wrapping_sub(1));
    let granted = blocks > 0 && layout.size() <= ROOM.get();
    if granted {
        LIVE.set(LIVE.get().wrapping_add(layout.size()));
    }
    granted
}

// SAFETY: granted calls are forwarded to the system's allocator unchanged; an allocator reports failure by null.
unsafe impl GlobalAlloc for Refusing {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if !grants(layout) {
            return std::ptr::null_mut();
        }
        // SAFETY: the caller's contract is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if !grants(layout) {
            return std::ptr::null_mut();
        }
        // SAFETY: the caller's contract is passed on.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        if layout.size() >= TABLE {
            LIVE.set(LIVE.get().wrapping_sub(layout.size()));
        }
        // SAFETY: the caller's contract is passed on.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Refusing = Refusing;

/// Returns a config each of whose tables is larger than [`TABLE`].
fn config(prefault: bool) -> EngineConfig {
    let pool = PoolConfig {
        shape: KvShape::heads(1, 1),
        page_size: 2,
        capacity: Capacity::Pages(1 << 20),
        ..Default::default()
    };
    let limits = EngineConfig::from(pool);
    EngineConfig { max_sequences: 300, max_steps: 300, max_tokens: 1 << 20, prefault, ..limits }
}

#[test]
fn each_refusal_is_an_error() {
    let with_events =
        |plain: EngineConfig| EngineConfig { hashing: Hashing::ALL.last().copied(), event_pages: 1000, ..plain };
    for config in [config(false), config(true), with_events(config(false)), with_events(config(true))] {
        let bytes = config.bytes().expect("a valid config").host();
        let mut refusals = 0;
        loop {
            let before = LIVE.get();
            BLOCKS.set(refusals);
            let made = Engine::new(config, CpuOptions::with_threads(1));
            BLOCKS.set(u64::MAX);
            match made {
                Ok(engine) => {
                    engine.verify().expect("it is sound");
                    break;
                }
                Err(EngineError::Config(error)) => {
                    assert_eq!(error, ConfigError::OutOfMemory { bytes });
                }
                Err(EngineError::Backend(error)) => {
                    assert!(matches!(error, CpuError::OutOfMemory { bytes } if bytes > 0));
                }
                Err(error) => panic!("{error}"),
            }
            assert_eq!(LIVE.get(), before, "all memory is freed");
            refusals += 1;
        }
        // The backend, the pages, the tree, the sequences, the steps and the buffers together have more than 30 tables.
        assert!(refusals > 30, "only {refusals} tables were refused");
    }
}

#[test]
fn each_refusal_of_a_tree_is_an_error() {
    let plain = TreeConfig { prefault: false, ..TreeConfig::new(1 << 16, 2) };
    let with_events = TreeConfig { hashing: Hashing::ALL.last().copied(), event_pages: 1000, ..plain };
    for config in [plain, with_events, TreeConfig { prefault: true, ..with_events }] {
        let bytes = config.bytes().expect("a valid config");
        let mut refusals = 0;
        loop {
            let before = LIVE.get();
            BLOCKS.set(refusals);
            let made = Tree::new(config);
            BLOCKS.set(u64::MAX);
            let Err(error) = made else { break };
            assert_eq!(error, ConfigError::OutOfMemory { bytes });
            assert_eq!(LIVE.get(), before, "all memory is freed");
            refusals += 1;
        }
        assert!(refusals > 10, "only {refusals} tables were refused");
    }
}

#[test]
fn memory_that_the_engine_touches_is_one_allocation() {
    let config = config(true);
    let bytes = config.bytes().expect("a valid config").host();
    ROOM.set(bytes as usize - 1);
    let refused = Engine::new(config, Null).err();
    ROOM.set(usize::MAX);
    let Some(EngineError::Config(error)) = refused else { panic!("the allocation succeeded") };
    assert_eq!(error, ConfigError::OutOfMemory { bytes });
    assert_eq!(error.to_string(), format!("the host has no memory for {bytes} bytes"));
}

/// Returns a number at which a computation may overflow, or a usual number.
fn number(rng: &mut Rng) -> u32 {
    let power = 1_u32 << rng.below(32);
    rng.pick(&[1, 2, 3, 16, 1024, power, power - 1, power.wrapping_add(1), u32::MAX - 1, u32::MAX])
}

#[test]
fn any_numbers_give_an_engine_or_an_error() {
    // Blocks above a megabyte fail, so no engine with a large config is allocated.
    const ROOM_HERE: usize = 1 << 20;
    let mut rng = Rng::new(10);
    let (mut made, mut refused, mut wrong) = (0, 0, 0);
    for _ in 0..20_000 {
        let mut number = || number(&mut rng);
        let pool = PoolConfig {
            layers: number(),
            shape: match number() % 3 {
                0 => KvShape::Latent { rank: number(), rope: number() },
                _ => KvShape::heads(number(), number()),
            },
            dtype: KvDtype::F16,
            page_size: number() % 1100,
            capacity: match number() % 2 {
                0 => Capacity::Pages(number()),
                _ => Capacity::Bytes(u64::from(number()) * u64::from(number())),
            },
            ..Default::default()
        };
        let small = number() % 2 == 0;
        let config = EngineConfig {
            pool: if small { PoolConfig { page_size: 4, ..Default::default() } } else { pool },
            prefix: PrefixMode::Radix,
            hashing: Hashing::ALL.get(number() as usize % 8).copied(),
            event_pages: number(),
            event_cells: number() % 2 == 0,
            record_pages: 1 << (number() % 7),
            max_sequences: number(),
            max_sequence_len: number(),
            max_tokens: u64::from(number()) * u64::from(number()),
            max_steps: number(),
            max_step_tokens: number(),
            promise_ahead: 512,
            state_margin: number(),
            state_gap: number(),
            keep_used_states: number() % 2 == 0,
            reserved_pages: number() % 4,
            wide_slots: number() % 2 == 0,
            prefault: number() % 2 == 0,
        };
        let bytes = config.bytes();
        let _ = (pool.first_kv_head(), pool.local_kv_heads(), pool.bytes_per_token());
        let before = LIVE.get();
        ROOM.set(ROOM_HERE);
        let engine = Engine::new(config, Null);
        ROOM.set(usize::MAX);
        match engine {
            Ok(engine) => {
                drop(engine);
                made += 1;
            }
            Err(EngineError::Config(ConfigError::OutOfMemory { bytes: wanted })) => {
                refused += 1;
                assert_eq!(bytes.map(|bytes| bytes.host()), Ok(wanted), "{config:?}");
                assert!(wanted > ROOM_HERE as u64);
            }
            Err(EngineError::Config(error)) => {
                wrong += 1;
                assert_eq!(bytes, Err(error), "{config:?}");
            }
            Err(error) => panic!("{error}"),
        }
        assert_eq!(LIVE.get(), before, "all memory is freed");
    }
    println!("{made} made, {refused} refused, {wrong} wrong");
    assert!(made > 100 && refused > 1000 && wrong > 1000, "{made} {refused} {wrong}");
}
