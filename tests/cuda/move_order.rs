//! Moves among the calls of steps, without a wait of the host between them. The tests' driver can do the work of the
//! first or of the last stream first (`FAKE_DRIVER_STREAMS`), which shows a missing wait.

use std::thread::yield_now;

use kvarena::backend::cuda::{Cuda, CudaOptions, CudaStream, DeviceBuffer, Gpu};
use kvarena::{
    Backend, BatchPlan, Capacity, HostMemory, HostPageId, KvDtype, KvShape, LayerId, Layout,
    MoveId, OpenBackend, PageCopy, PageId, PageMove, PlaneName, PoolConfig, RowId, SlotId,
    SlotMapping, StepEnd, StepId, TableShape, TableWrite,
};

use crate::gpu;
use crate::plans::{FIRST, plan_of};

/// Tokens of a page.
const SIZE: u32 = 16;
/// Elements of a row of K or V.
const WIDTH: usize = 1024;
/// The byte of every stored row.
const STORED: u8 = 0x11;

/// A backend whose page 0 and host page 0 are full of byte 3, and host page 1 of byte 4.
struct World {
    cuda: Cuda,
    row: DeviceBuffer,
    table: TableShape,
    moves: u64,
}

fn of(device: u32, host: u32) -> [PageMove; 1] {
    [PageMove { device: PageId::new(device), host: HostPageId::new(host) }]
}

impl World {
    fn new(gpu: &Gpu, layers: u32, layout: Layout) -> Self {
        let config = PoolConfig {
            layers,
            shape: KvShape::heads(8, 128),
            dtype: KvDtype::Bf16,
            capacity: Capacity::Pages(4),
            layout,
            host_pages: 3,
            ..PoolConfig::default()
        };
        let stream = Some(CudaStream::new(gpu).expect("a stream"));
        let table = TableShape::new(SIZE, 2, 64, 128).expect("a small table");
        let options = CudaOptions { stream, ..CudaOptions::new(gpu) };
        let layout = config.layout().expect("a small pool");
        let cuda = options.open(&layout, &table, 3).expect("a small pool");
        let row = DeviceBuffer::of(gpu, &[STORED; 2 * WIDTH]).expect("memory");
        let mut world = Self { cuda, row, table, moves: 0 };
        while world.cuda.host_pages() < 3 {
            yield_now();
        }
        for (page, byte) in [(0, 3), (1, 4)] {
            world.cuda.lease_mut(HostPageId::new(page)).as_mut().fill(byte);
        }
        world.load(0, 0);
        // Loads the kernels of later calls.
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

    fn save(&mut self, device: u32, host: u32) {
        let id = self.next();
        self.cuda.save_pages(id, &of(device, host)).expect("pages of the pool");
    }

    fn load(&mut self, device: u32, host: u32) {
        let id = self.next();
        self.cuda.load_pages(id, &of(device, host)).expect("pages of the pool");
    }

    /// A step whose only token is the first one of a page, which the page tables name from now on.
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
        self.with_plan(step, page, |world, plan| {
            for layer in 0..world.cuda.layout().layers() {
                let row = world.row.rows(0, None);
                world.cuda.store_cache(plan, LayerId::new(layer), row, row).expect("a valid store");
            }
        });
    }

    fn end(&mut self, end: StepEnd) {
        self.cuda.end(end);
    }

    /// The bytes of K of a page's first two tokens in the last layer.
    fn tokens(&self, page: u32) -> [u8; 2] {
        let layout = self.cuda.layout();
        let layer = LayerId::new(layout.layers() - 1);
        [0, 1].map(|offset| {
            let slot = SlotId::new(u64::from(page * SIZE + offset));
            let row = layout.row(PlaneName::K, layer, slot).expect("the pool has it");
            let bytes: Vec<u8> = self.cuda.pool().read(row.start, 2 * WIDTH).expect("a row");
            assert!(bytes.iter().all(|&byte| byte == bytes[0]), "a row of one byte");
            bytes[0]
        })
    }

    /// The same of the first layer in a host page, once all calls are done.
    fn host_tokens(&mut self, page: u32) -> [u8; 2] {
        self.cuda.synchronize().expect("nothing failed");
        let lease = self.cuda.lease(HostPageId::new(page));
        [0, 1].map(|token| lease.as_ref()[token * 2 * WIDTH])
    }
}

/// Runs a check over pages that kernels move, and over pages of one piece and of many for the copy engines.
fn each(check: impl Fn(&mut World)) {
    let Some(gpu) = gpu() else { return };
    for (layers, layout) in
        [(1, Layout::PageFirst), (8, Layout::PageFirst), (8, Layout::LayerFirst)]
    {
        check(&mut World::new(&gpu, layers, layout));
    }
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
fn a_load_comes_after_calls_that_followed_an_open_step() {
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
        // A page is saved, then loaded over; its host page is loaded, then saved over.
        world.save(0, 2);
        world.load(0, 1);
        world.load(1, 2);
        world.save(0, 2);
        assert_eq!((world.tokens(0), world.tokens(1)), ([4, 4], [3, 3]));
        assert_eq!(world.host_tokens(2), [4, 4]);
    });
}
