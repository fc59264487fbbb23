//! Tests the order of page moves and calls of steps on the device; the host does not wait between them. The backend
//! submits a large load in parts, each for some of the layers. With `FAKE_DRIVER_STREAMS`, the tests' driver prefers
//! the stream that was created first, or last. This exposes missing waits between streams.

use std::thread::yield_now;

use kvarena::backend::cuda::{Cuda, CudaError, CudaOptions, CudaStream, DeviceBuffer, Gpu, Prepare};
use kvarena::backend::{OpenBackend, Rope, SwapMemory};
use kvarena::id::{MoveId, RowId, SwapPageId};
use kvarena::layout::{Layout, PlaneName, TableShape};
use kvarena::plan::{Compaction, PageCopy, PageMove, SlotMapping, StepEnd, TableWrite};
use kvarena::{Attend, Backend, BatchPlan, Capacity, KvDtype, KvShape, LayerId, PageId, PoolConfig, SlotId, StepId};

use crate::gpu;
use crate::plans::{FIRST, plan_of};

/// Tokens of a page.
const SIZE: u32 = 16;
/// Elements of a row of K or V.
const WIDTH: usize = 1024;
/// The byte of every stored row.
const STORED: u8 = 0x11;

/// A backend whose page 0 and swap page 0 are full of byte 3, and swap page 1 of byte 4.
struct World {
    cuda: Cuda,
    row: DeviceBuffer,
    table: TableShape,
    moves: u64,
}

fn page_move(device: u32, swap: u32) -> [PageMove; 1] {
    [PageMove { device: PageId::new(device), swap: SwapPageId::new(swap) }]
}

impl World {
    fn new(gpu: &Gpu, layers: u32, layout: Layout) -> Self {
        let config = PoolConfig {
            layers,
            shape: KvShape::heads(8, 128),
            dtype: KvDtype::Bf16,
            capacity: Capacity::Pages(4),
            layout,
            swap_pages: 3,
            ..PoolConfig::default()
        };
        let stream = Some(CudaStream::new(gpu).expect("a stream"));
        let table = TableShape::new(SIZE, 2, 64, 128).expect("a small table");
        let options = CudaOptions { stream, ..CudaOptions::new(gpu) };
        let layout = config.layout().expect("a small pool");
        let cuda = options.open(&layout, &table, 3).expect("a small pool");
        let row = DeviceBuffer::of(gpu, &[STORED; 2 * WIDTH]).expect("memory");
        let mut world = Self { cuda, row, table, moves: 0 };
        while world.cuda.swap_pages() < 3 {
            yield_now();
        }
        for (page, byte) in [(0, 3), (1, 4)] {
            world.cuda.lease_mut(SwapPageId::new(page)).as_mut().fill(byte);
        }
        world.load(0, 0);
        // Compiles the kernels of later calls.
        let copy = PageCopy { source: PageId::new(2), target: PageId::new(3) };
        world.cuda.copy_pages(&[copy]).expect("pages of the pool");
        world.begin(1, 2);
        world.store(1, 2);
        world.end(StepEnd::Complete(StepId::new(1)));
        world.cuda.synchronize().expect("nothing failed");
        world
    }

    fn next(&mut self) -> MoveId {
        self.moves += 1;
        MoveId::new(self.moves)
    }

    fn save(&mut self, device: u32, swap: u32) {
        let id = self.next();
        self.cuda.save_pages(id, &page_move(device, swap)).expect("pages of the pool");
    }

    fn load(&mut self, device: u32, swap: u32) {
        let id = self.next();
        self.cuda.load_pages(id, &page_move(device, swap)).expect("pages of the pool");
    }

    /// Calls `call` with a plan whose only token is the first of `page`. The plan writes `page` into the page tables.
    fn with_plan(&mut self, step: u64, page: u32, call: impl FnOnce(&mut Self, &BatchPlan<'_>)) {
        let word = self.table.page_word(0, 0);
        let directory = TableWrite { index: self.table.directory_word(RowId::new(0), 0), value: 0 };
        let writes = [directory, TableWrite { index: word, value: page }];
        let slots = [(page * SIZE) as i32];
        let plan = plan_of(step, &[FIRST], &[0], SlotMapping::I32(&slots));
        call(self, &BatchPlan { table_writes: &writes, ..plan });
    }

    fn begin(&mut self, step: u64, page: u32) {
        self.with_plan(step, page, |world, plan| world.cuda.begin(plan).expect("a valid plan"));
    }

    /// Stores the token of a step in all layers.
    fn store(&mut self, step: u64, page: u32) {
        (0..self.cuda.layout().layers()).for_each(|layer| self.store_layer(step, page, layer));
    }

    fn store_layer(&mut self, step: u64, page: u32, layer: u32) {
        self.with_plan(step, page, |world, plan| {
            let row = world.row.rows(0, None);
            world.cuda.store_cache(plan, LayerId::new(layer), row, row).expect("a valid store");
        });
    }

    /// Loads all pages of the pool from a swap page; with 32 layers they are 8 MiB, which come in parts.
    fn load_all(&mut self, swap: u32) {
        let id = self.next();
        let moves: Vec<_> = (0..4).flat_map(|page| page_move(page, swap)).collect();
        self.cuda.load_pages(id, &moves).expect("pages of the pool");
    }

    fn end(&mut self, end: StepEnd) {
        self.cuda.end(end);
    }

    /// Reads K of a page's first two tokens in the last layer. Returns the byte that fills each token's K.
    fn tokens(&self, page: u32) -> [u8; 2] {
        self.tokens_of(page, self.cuda.layout().layers() - 1)
    }

    fn tokens_of(&self, page: u32, layer: u32) -> [u8; 2] {
        let layout = self.cuda.layout();
        [0, 1].map(|offset| {
            let slot = SlotId::new(u64::from(page * SIZE + offset));
            let row = layout.row(PlaneName::K, LayerId::new(layer), slot);
            let row = row.expect("the pool has it");
            let bytes: Vec<u8> = self.cuda.pool().read(row.start, 2 * WIDTH).expect("a row");
            assert!(bytes.iter().all(|&byte| byte == bytes[0]), "a row of one byte");
            bytes[0]
        })
    }

    /// Returns the first byte of K of a swap page's first two tokens in the first layer, after all calls are done.
    fn host_tokens(&mut self, page: u32) -> [u8; 2] {
        self.cuda.synchronize().expect("nothing failed");
        let lease = self.cuda.lease(SwapPageId::new(page));
        [0, 1].map(|token| lease.as_ref()[token * 2 * WIDTH])
    }
}

/// Runs a check over three pools: small pages, which a kernel moves; large contiguous pages, which copy engines move;
/// and large pages of many pieces, which both move.
fn each(check: impl Fn(&mut World)) {
    let Some(gpu) = gpu() else { return };
    for (layers, layout) in [(1, Layout::PageFirst), (8, Layout::PageFirst), (8, Layout::LayerFirst)] {
        check(&mut World::new(&gpu, layers, layout));
    }
}

/// First and last layers of a load's first two parts, the first layer of its third part, and the last of its fourth.
const OF_PARTS: [u32; 6] = [0, 7, 8, 15, 16, 31];

/// Runs a check over pages of many layers, whose loads come in parts.
fn each_of_parts(check: impl Fn(&mut World)) {
    let Some(gpu) = gpu() else { return };
    for layout in [Layout::PageFirst, Layout::LayerFirst] {
        check(&mut World::new(&gpu, 32, layout));
    }
}

#[test]
fn the_calls_of_a_layer_come_after_its_part_of_a_load() {
    each_of_parts(|world| {
        for (layer, step) in OF_PARTS.into_iter().zip(2..) {
            world.load_all(0);
            world.cuda.synchronize().expect("nothing failed");
            world.load_all(1);
            world.begin(step, 1);
            world.store_layer(step, 1, layer);
            assert_eq!(world.tokens_of(1, layer), [STORED, 4], "layer {layer}");
            world.end(StepEnd::Complete(StepId::new(step)));
        }
    });
}

/// A step reads cached tokens of a layer before it stores any in this layer. Another step rotates and stores.
#[test]
fn attention_and_rotation_come_after_a_part_of_a_load() {
    each_of_parts(|world| {
        let gpu = world.cuda.gpu().clone();
        let attend = Attend::new(8, 128);
        world.cuda.prepare(&Prepare { rope_store: true, ..Prepare::new(&[attend]) }).expect("a served shape");
        let mut out = DeviceBuffer::new(&gpu, 2 * WIDTH as u64).expect("memory");
        let frequencies = DeviceBuffer::of(&gpu, &[0.0_f32; 64]).expect("memory");
        for (layer, step) in OF_PARTS.into_iter().zip((2..).step_by(2)) {
            let id = LayerId::new(layer);
            let mut qkv = DeviceBuffer::of(&gpu, &[STORED; 6 * WIDTH]).expect("memory");
            world.load_all(0);
            world.cuda.synchronize().expect("nothing failed");
            world.load_all(1);
            world.begin(step, 1);
            world.with_plan(step, 1, |World { cuda, row, .. }, plan| {
                let (q, out) = (row.rows(0, None), out.rows_mut(0, None));
                cuda.attend(plan, id, &attend, q, out, None).expect("valid attention");
            });
            let read: Vec<u8> = out.read(0, 2 * WIDTH).expect("a row");
            world.end(StepEnd::Complete(StepId::new(step)));
            assert!(read.iter().all(|&byte| byte == 4), "layer {layer} reads V: {:?}", &read[..2]);

            world.load_all(0);
            world.begin(step + 1, 1);
            world.with_plan(step + 1, 1, |World { cuda, .. }, plan| {
                let frequencies = frequencies.rows(0, None);
                let rope = Rope { q_heads: 8, q_norm: None, k_norm: None, eps: 0.0, frequencies };
                cuda.rope_store(plan, id, &rope, qkv.rows_mut(0, None)).expect("a valid store");
            });
            assert_eq!(world.tokens_of(1, layer), [STORED, 3], "layer {layer}");
            world.end(StepEnd::Complete(StepId::new(step + 1)));
        }
    });
}

#[test]
fn a_compaction_comes_after_a_load() {
    each_of_parts(|world| {
        // The second token differs from the first one in every piece.
        let mut page = world.cuda.lease_mut(SwapPageId::new(2));
        let tokens = page.as_mut().chunks_mut(2 * WIDTH);
        tokens.zip(0..).for_each(|(token, at)| token.fill(if at % SIZE == 1 { 6 } else { 5 }));
        drop(page);
        world.load_all(2);
        world.begin(2, 1);
        let kept = Compaction { row: RowId::new(0), first: 0, keep: 2 };
        world.cuda.compact(&[kept]).expect("a row of the tables");
        assert_eq!(world.tokens(1), [6, 6]);
    });
}

/// A capture cannot wait for a load, so it fails until `stage` has waited for all parts.
#[test]
fn a_graph_comes_after_a_load() {
    each_of_parts(|world| {
        let stream = world.cuda.stream().clone();
        world.load_all(1);
        world.begin(2, 1);
        let mut refused = None;
        world.with_plan(2, 1, |World { cuda, row, .. }, plan| {
            let store = |layer, cuda: &mut Cuda| {
                let row = row.rows(0, None);
                cuda.store_cache(plan, LayerId::new(layer), row, row)
            };
            refused = stream.capture(|| store(31, cuda)).err();
            cuda.stage(plan).expect("an open plan");
            let graph = stream.capture(|| store(31, cuda)).expect("a staged plan");
            // SAFETY: backend and rows live, and the plan was staged.
            unsafe { graph.launch(&stream) }.expect("a graph");
        });
        assert_eq!(refused, Some(CudaError::NotPrepared));
        assert_eq!(world.tokens(1), [STORED, 4]);
    });
}

/// Checks only with `FAKE_DRIVER_STREAMS=1`: the tests' driver then prefers the stream of the steps. Otherwise the
/// whole load may be done first.
#[test]
fn the_first_layers_do_not_wait_for_the_last_part() {
    each_of_parts(|world| {
        world.load_all(1);
        world.begin(2, 1);
        world.store_layer(2, 1, 0);
        world.cuda.stream().synchronize().expect("nothing failed");
        let loaded = world.cuda.moved().expect("nothing failed").loaded;
        let first = std::env::var("FAKE_DRIVER_STREAMS").is_ok_and(|order| order == "1");
        assert!(!first || loaded < MoveId::new(world.moves), "the whole load is done");
    });
}

/// Checks only with `FAKE_DRIVER_STREAMS=1`, as the test above.
#[test]
fn a_step_does_not_wait_for_the_save_of_another_page() {
    each(|world| {
        world.save(0, 2);
        world.begin(2, 1);
        world.store(2, 1);
        world.cuda.stream().synchronize().expect("nothing failed");
        let saved = world.cuda.moved().expect("nothing failed").saved;
        let first = std::env::var("FAKE_DRIVER_STREAMS").is_ok_and(|order| order == "1");
        assert!(!first || saved < MoveId::new(world.moves), "the save is done");
    });
}

#[test]
fn a_step_comes_after_the_load_of_its_page() {
    each(|world| {
        world.load(1, 1);
        world.begin(2, 1);
        world.store(2, 1);
        assert_eq!(world.tokens(1), [STORED, 4]);
    });
}

#[test]
fn a_step_comes_after_the_save_of_its_page() {
    each(|world| {
        world.save(0, 2);
        world.begin(2, 0);
        world.store(2, 0);
        assert_eq!((world.host_tokens(2), world.tokens(0)), ([3, 3], [STORED, 3]));
    });
}

#[test]
fn a_save_comes_after_the_calls_before_it() {
    each(|world| {
        world.begin(2, 0);
        world.store(2, 0);
        world.save(0, 2);
        assert_eq!(world.host_tokens(2), [STORED, 3]);
    });
}

#[test]
fn a_load_comes_after_a_step_that_has_ended() {
    each(|world| {
        world.begin(2, 0);
        world.store(2, 0);
        world.end(StepEnd::Complete(StepId::new(2)));
        world.load(0, 1);
        assert_eq!(world.tokens(0), [4, 4]);
    });
}

/// The next step is open, and has begun after the calls of the first one.
#[test]
fn a_load_comes_after_an_ended_step_beside_an_open_one() {
    each(|world| {
        world.begin(2, 0);
        world.store(2, 0);
        world.begin(3, 2);
        world.end(StepEnd::Complete(StepId::new(2)));
        world.load(0, 1);
        assert_eq!(world.tokens(0), [4, 4]);
    });
}

/// The next step has begun before the calls of the first one.
#[test]
fn a_load_comes_after_the_late_calls_of_an_ended_step() {
    each(|world| {
        world.begin(2, 0);
        world.begin(3, 2);
        world.store(2, 0);
        world.end(StepEnd::Complete(StepId::new(2)));
        world.load(0, 1);
        assert_eq!(world.tokens(0), [4, 4]);
    });
}

#[test]
fn a_load_comes_after_an_aborted_step_beside_an_open_one() {
    each(|world| {
        world.begin(2, 2);
        world.begin(3, 0);
        world.store(3, 0);
        world.end(StepEnd::Abort(StepId::new(3)));
        world.load(0, 1);
        assert_eq!(world.tokens(0), [4, 4]);
    });
}

#[test]
fn a_load_comes_after_a_copy_beside_an_open_step() {
    each(|world| {
        world.begin(2, 2);
        let copy = PageCopy { source: PageId::new(2), target: PageId::new(0) };
        world.cuda.copy_pages(&[copy]).expect("pages of the pool");
        world.load(0, 1);
        assert_eq!(world.tokens(0), [4, 4]);
    });
}

#[test]
fn copies_come_after_the_moves_of_their_pages() {
    each(|world| {
        world.load(1, 1);
        world.save(0, 2);
        let copy = PageCopy { source: PageId::new(1), target: PageId::new(0) };
        world.cuda.copy_pages(&[copy]).expect("pages of the pool");
        assert_eq!((world.host_tokens(2), world.tokens(0)), ([3, 3], [4, 4]));
    });
}

#[test]
fn moves_of_the_two_directions_are_ordered_by_their_pages() {
    each(|world| {
        // A page is saved, then loaded over; its swap page is loaded, then saved over.
        world.save(0, 2);
        world.load(0, 1);
        world.load(1, 2);
        world.save(0, 2);
        assert_eq!((world.tokens(0), world.tokens(1)), ([4, 4], [3, 3]));
        assert_eq!(world.host_tokens(2), [4, 4]);
    });
}
