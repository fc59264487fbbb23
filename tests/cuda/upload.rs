//! Uploads of plans: through a ring that the host must not overrun, and in rounds if one slot is too small.

use kvarena::backend::cuda::{Cuda, CudaEvent, CudaOptions, CudaStream, DeviceBuffer, Gpu};
use kvarena::config::StepBounds;
use kvarena::layout::{PlaneName, TableShape};
use kvarena::plan::{PageCopy, SlotMapping, StepEnd, TableWrite};
use kvarena::testkit::rng::Rng;
use kvarena::{Backend, BatchPlan, Capacity, KvDtype, KvShape, LayerId, PageId, PoolConfig, SlotId, StepId};

use crate::gpu;
use crate::plans::{self, FIRST, plan_of, small_table};

/// Returns a plan of one token.
fn plan<'a>(step: u64, slots: &'a [i32], table_writes: &'a [TableWrite]) -> BatchPlan<'a> {
    BatchPlan { table_writes, ..plan_of(step, &[FIRST], &[0], SlotMapping::I32(slots)) }
}

fn open(gpu: &Gpu, table: &TableShape) -> Cuda {
    let config = PoolConfig {
        layers: 16,
        shape: KvShape::heads(8, 128),
        dtype: KvDtype::Bf16,
        capacity: Capacity::Pages(64),
        ..PoolConfig::default()
    };
    plans::open(CudaOptions::new(gpu), config, table, StepBounds { steps: 1, tokens: 4 })
}

#[test]
fn a_slot_of_the_ring_is_not_written_before_it_was_read() {
    let Some(gpu) = gpu() else { return };
    let mut cuda = open(&gpu, &small_table());
    let layout = *cuda.layout();
    const STEPS: usize = 40;
    const WIDTH: usize = 8 * 128;
    let rows: Vec<u16> = (0..STEPS * WIDTH).map(|i| (i / WIDTH * 100 + i % 7) as u16).collect();
    let buffer = DeviceBuffer::of(&gpu, &rows).expect("memory");
    // This work keeps the device far behind the host: the ring has four slots.
    let busy = |i| PageCopy { source: PageId::new(i), target: PageId::new(32 + i) };
    let busy: Vec<_> = (0..32).map(busy).collect();
    for _ in 0..40 {
        cuda.copy_pages(&busy).expect("pages of the pool");
    }
    let slot = |step: usize| (step * 11) as i32;
    for step in 0..STEPS {
        let slots = [slot(step)];
        let plan = plan(step as u64 + 1, &slots, &[]);
        cuda.begin(&plan).expect("a valid plan");
        let row = buffer.rows((step * WIDTH * 2) as u64, None);
        cuda.store_cache(&plan, LayerId::new(0), row, row).expect("a store");
        cuda.end(StepEnd::Complete(plan.step));
    }
    cuda.synchronize().expect("nothing failed");
    let memory = cuda.pool();
    for step in 0..STEPS {
        for plane in [PlaneName::K, PlaneName::V] {
            let row = layout.row(plane, LayerId::new(0), SlotId::new(slot(step) as u64));
            let at = row.expect("the pool has it").start;
            let got: Vec<u16> = memory.read(at, WIDTH).expect("a row");
            assert!(got == rows[step * WIDTH..(step + 1) * WIDTH], "{plane:?} of step {step}");
        }
    }
}

#[test]
fn table_writes_of_any_number_arrive() {
    let Some(gpu) = gpu() else { return };
    let table = TableShape::new(1, 2, 1 << 19, 1 << 20).expect("a large table");
    let mut cuda = open(&gpu, &table);
    let mut rng = Rng::new(1);
    let mut words = vec![0; table.words()];
    // First many more writes than a slot of the ring holds, then one, then some.
    for (step, every) in [(1, 1), (2, words.len()), (3, 1_000)] {
        let writes: Vec<_> = (0..words.len() as u32)
            .step_by(every)
            .map(|index| TableWrite { index, value: rng.below(64) as u32 })
            .collect();
        let before = cuda.uploaded_bytes();
        cuda.begin(&plan(step, &[0], &writes)).expect("a valid plan");
        cuda.end(StepEnd::Complete(StepId::new(step)));
        let sent = cuda.uploaded_bytes() - before;
        assert!((8 * writes.len() as u64..8 * writes.len() as u64 + 2048).contains(&sent), "{sent}");
        for write in writes {
            words[write.index as usize] = write.value;
        }
        assert!(cuda.table_words().expect("nothing failed") == words, "step {step}");
    }
}

#[test]
fn streams_are_kept_until_their_uploads_are_read() {
    let Some(gpu) = gpu() else { return };
    let mut cuda = open(&gpu, &small_table());
    // The backend uses each stream for one step.
    for step in 1..=20 {
        let stream = CudaStream::new(&gpu).expect("a stream");
        let mut before = CudaEvent::new(&gpu, false).expect("an event");
        before.record(cuda.stream()).expect("a mark");
        before.block(&stream).expect("a stream that waits");
        // SAFETY: the new stream waits for the previous one.
        unsafe { cuda.set_stream(stream) };
        cuda.begin(&plan(step, &[0], &[])).expect("a valid plan");
        cuda.end(StepEnd::Complete(StepId::new(step)));
    }
    cuda.synchronize().expect("nothing failed");
}
