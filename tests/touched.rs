//! A call writes to few system pages, for any size of the tables. It therefore waits for few page faults, even if no
//! memory was prefaulted.

#![allow(unsafe_code)] // An allocator that records the large blocks.

use std::alloc::{GlobalAlloc, Layout, System};
use std::hash::{DefaultHasher, Hasher};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use kvarena::hash::Hashing;
use kvarena::layout::{Groups, Reach};
use kvarena::{
    Capacity, Engine, EngineConfig, Extend, Namespace, Null, PoolConfig, SeqKey, StepId, StepScratch, TokenId,
};

/// Minimum size of recorded blocks.
const LARGE: usize = 512 << 10;
const SYSTEM_PAGE: usize = 4096;

/// Records the live large blocks by address and size. While [`FILLS`] is set, blocks that need no zeros begin as a
/// pattern, so that writes of zeros are also detected.
struct Recording;

/// Not set at first: memory would back a filled table even if the engine did not touch it.
static FILLS: AtomicBool = AtomicBool::new(false);

static BLOCKS: Mutex<[(usize, usize); 256]> = Mutex::new([(0, 0); 256]);

fn record(old: (usize, usize), new: (usize, usize)) {
    let mut blocks = BLOCKS.lock().expect("no thread panics here");
    *blocks.iter_mut().find(|block| **block == old).expect("there are few large blocks") = new;
}

// SAFETY: every call is forwarded to the system's allocator unchanged; only new blocks are filled, before the caller
// gets them.
unsafe impl GlobalAlloc for Recording {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's contract is passed on.
        let at = unsafe { System.alloc(layout) };
        if !at.is_null() && layout.size() >= LARGE {
            if FILLS.load(Ordering::Relaxed) {
                // SAFETY: the block was just given out, with that many bytes.
                unsafe { at.write_bytes(0xa5, layout.size()) };
            }
            record((0, 0), (at.expose_provenance(), layout.size()));
        }
        at
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's contract is passed on.
        let at = unsafe { System.alloc_zeroed(layout) };
        if !at.is_null() && layout.size() >= LARGE {
            record((0, 0), (at.expose_provenance(), layout.size()));
        }
        at
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        if layout.size() >= LARGE {
            record((at.expose_provenance(), layout.size()), (0, 0));
        }
        // SAFETY: the caller's contract is passed on.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Recording = Recording;

/// Returns a hash of each system page of the large blocks.
fn contents() -> Vec<u64> {
    let blocks = *BLOCKS.lock().expect("no thread panics here");
    let mut pages = Vec::new();
    for (at, size) in blocks {
        for start in (0..size).step_by(SYSTEM_PAGE) {
            let at = std::ptr::with_exposed_provenance::<u8>(at + start);
            let len = SYSTEM_PAGE.min(size - start);
            // SAFETY: the block lives, all its bytes were written when it was allocated, because no block is older than
            // the pattern, and no other thread runs.
            let bytes = unsafe { std::slice::from_raw_parts(at, len) };
            let mut hasher = DefaultHasher::new();
            hasher.write(bytes);
            pages.push(hasher.finish());
        }
    }
    pages
}

/// Returns the number of system pages whose contents a call changes.
fn changed(call: impl FnOnce()) -> usize {
    let before = contents();
    call();
    let after = contents();
    assert_eq!(before.len(), after.len(), "the call allocates no large block");
    before.iter().zip(&after).filter(|(before, after)| before != after).count()
}

/// A host of one sequence at a time.
struct Host {
    engine: Engine<Null>,
    scratch: StepScratch,
}

impl Host {
    fn prefill(&mut self, prompt: [u32; 2]) -> (SeqKey, StepId) {
        let prompt = prompt.map(TokenId::new);
        let seq = self.engine.admit(Namespace::default(), &prompt, 0).expect("there is room");
        let len = self.engine.extend_max(seq).expect("it is live");
        let items = [Extend { seq, len }];
        let step = self.engine.plan_batch(&mut self.scratch, &items).expect("room").step();
        self.engine.commit(step).expect("it is open");
        (seq, step)
    }

    /// Runs a sequence that leaves its prefix cached and nothing in the fence.
    fn serve(&mut self, prompt: [u32; 2]) {
        let (seq, step) = self.prefill(prompt);
        self.engine.complete(step).expect("it is committed");
        self.engine.finish(seq).expect("it is live");
    }
}

fn the_first_rare_operation_touches_few_pages() {
    const NODES: u32 = 100_000;
    let capacity = Capacity::Pages(NODES + 100);
    let pool = PoolConfig { page_size: 1, capacity, ..Default::default() };
    let config = EngineConfig {
        max_sequences: 4,
        max_sequence_len: 16,
        max_tokens: 1024,
        prefault: false,
        ..EngineConfig::from(pool)
    };
    let engine = Engine::new(config, Null).expect("a valid config");
    let mut host = Host { engine, scratch: StepScratch::with_capacity(1 << 10) };
    // One root, and its children.
    for i in 0..NODES {
        host.serve([0, i]);
    }
    let usual = changed(|| host.serve([0, NODES]));
    assert!((1..16).contains(&usual), "a call changes {usual} pages");
    let root = changed(|| host.serve([1, 0]));
    assert!(root < 2 * usual + 16, "the first new root changes {root} pages, another node {usual}");
    let (seq, step) = host.prefill([0, NODES + 1]);
    let leave = changed(|| host.engine.finish(seq).expect("it is live"));
    assert!(leave < 2 * usual + 16, "the first lock that waits changes {leave} pages");
    host.engine.complete(step).expect("it is committed");
    host.engine.verify().expect("all invariants hold");
}

/// Returns the bytes of this process that memory backs.
#[cfg(target_os = "linux")]
fn resident() -> u64 {
    let fields = std::fs::read_to_string("/proc/self/statm").expect("Linux has it");
    let pages: u64 = fields.split(' ').nth(1).and_then(|pages| pages.parse().ok()).expect("pages");
    pages * SYSTEM_PAGE as u64
}

/// If memory backed a table only at its first use, a step would pay for the page faults.
#[cfg(target_os = "linux")]
fn prefaulted_tables_are_backed_by_memory() {
    let plain = PoolConfig { capacity: Capacity::Pages(100_000), ..Default::default() };
    let hosts = PoolConfig { swap_pages: 100_000, stage_pages: 64, ..plain };
    let windows = Groups::new(&[Reach::All, Reach::Window(64)], &[0, 1, 1, 1]);
    let groups = PoolConfig { layers: 4, groups: windows.expect("two groups"), ..hosts };
    // All engines live to the end, because the allocator keeps freed memory.
    let mut engines = Vec::new();
    for pool in [plain, hosts, groups] {
        let hashing = Some(Hashing::Dynamo);
        let config = EngineConfig { event_pages: 1000, hashing, ..EngineConfig::from(pool) };
        let bytes = config.shape().expect("a valid config").bytes().host();
        let before = resident();
        engines.push(Engine::new(config, Null).expect("a valid config"));
        let backed = resident() - before;
        // Small tables share system pages and are not touched.
        assert!(backed + bytes / 100 > bytes, "{backed} of {bytes} bytes");
    }
}

/// One test, because another thread would also touch memory. Prefaulted tables come first, so that their memory is new.
#[test]
fn memory_is_backed_at_the_start_or_little_by_little() {
    #[cfg(target_os = "linux")]
    prefaulted_tables_are_backed_by_memory();
    let blocks = *BLOCKS.lock().expect("no thread panics here");
    assert_eq!(blocks, [(0, 0); 256], "no block is older than the pattern");
    FILLS.store(true, Ordering::Relaxed);
    the_first_rare_operation_touches_few_pages();
}
