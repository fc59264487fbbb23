//! A safe caller may begin one plan and pass another plan of the same step to later calls. These tests check that
//! kernels still use only the addresses of the staged plan, which was checked.

use kvarena::backend::PlanError;
use kvarena::backend::cuda::{Cuda, CudaError, CudaOptions, DeviceBuffer, Gpu, Limit, Prepare};
use kvarena::config::StepBounds;
use kvarena::id::RowId;
use kvarena::layout::{PlaneName, TableShape};
use kvarena::plan::{BatchRow, SlotMapping};
use kvarena::{Attend, Backend, BatchPlan, Capacity, KvDtype, KvShape, LayerId, PoolConfig, SlotId};

use crate::gpu;
use crate::plans::{self, plan_of, small_table};

const WIDTH: usize = 64;

fn open(gpu: &Gpu, table: &TableShape) -> Cuda {
    let (capacity, dtype) = (Capacity::Pages(8), KvDtype::Bf16);
    let shape = KvShape::heads(1, WIDTH as u32);
    let config = PoolConfig { capacity, dtype, shape, ..PoolConfig::default() };
    plans::open(CudaOptions::new(gpu), config, table, StepBounds { steps: 2, tokens: 64 })
}

/// Returns batch rows of one token each. All are the same sequence of `kv_len` tokens, in row 0 of the page tables.
fn rows(count: u32, kv_len: u32) -> Vec<BatchRow> {
    let row = |i| BatchRow { row: RowId::new(0), qo_start: i, extend_len: 1, kv_len };
    (0..count).map(row).collect()
}

fn plan<'a>(rows: &'a [BatchRow], slots: SlotMapping<'a>) -> BatchPlan<'a> {
    plan_of(1, rows, &[0; 64][..rows.len()], slots)
}

/// The second plan has slots of another width. Kernels must not read the staged slots with this width.
#[test]
fn slots_are_read_with_the_width_of_the_staged_plan() {
    let Some(gpu) = gpu() else { return };
    let table = small_table();
    let rows = rows(4, 1);
    let (narrow, wide) = ([3, 17, 40, -1], [3, 17, 40, -1]);
    let plans = [SlotMapping::I32(&narrow), SlotMapping::I64(&wide)].map(|s| plan(&rows, s));
    for [first, second] in [[&plans[0], &plans[1]], [&plans[1], &plans[0]]] {
        let mut cuda = open(&gpu, &table);
        let row: Vec<u16> = (0..4 * WIDTH).map(|i| 1 + (i / WIDTH) as u16).collect();
        let buffer = DeviceBuffer::of(&gpu, &row).expect("memory");
        cuda.begin(first).expect("a valid plan");
        let pool = cuda.pool();
        let (bytes, layout) = (pool.bytes() as usize, *cuda.layout());
        let before: Vec<u16> = pool.read(0, bytes / 2).expect("numbers");
        let layer = LayerId::new(0);
        cuda.store_cache(second, layer, buffer.rows(0, None), buffer.rows(0, None)).expect("a store");
        cuda.synchronize().expect("nothing failed");
        let mut wanted = before;
        for (i, &slot) in wide[..3].iter().enumerate() {
            for plane in [PlaneName::K, PlaneName::V] {
                let row = layout.row(plane, layer, SlotId::new(slot as u64));
                let at = row.expect("the pool has it").start as usize / 2;
                wanted[at..at + WIDTH].fill(1 + i as u16);
            }
        }
        let got: Vec<u16> = cuda.pool().read(0, bytes / 2).expect("numbers");
        assert!(got == wanted, "{:?} after {:?}", second.slot_mapping, first.slot_mapping);
    }
}

/// Rows, slots, tokens and positions of the second plan may differ too. Kernels use the staged plan, which was checked.
#[test]
fn an_altered_plan_uses_the_staged_values() {
    let Some(gpu) = gpu() else { return };
    let mut cuda = open(&gpu, &small_table());
    let (valid, far) = (rows(2, 1), rows(2, u32::MAX));
    let first = plan(&valid, SlotMapping::I32(&[0, 1]));
    cuda.begin(&first).expect("a valid plan");
    let mut buffer = DeviceBuffer::of(&gpu, &[0_u16; 16 * WIDTH]).expect("memory");
    let q = DeviceBuffer::of(&gpu, &[0_u16; 16 * WIDTH]).expect("memory");
    let (layer, attend) = (LayerId::new(0), Attend::new(1, WIDTH as u32));
    cuda.prepare(&Prepare::new(&[attend])).expect("a served shape");
    let altered = [
        BatchPlan { rows: &far, ..first },
        BatchPlan { slot_mapping: SlotMapping::I32(&[i32::MAX; 2]), ..first },
        BatchPlan { slot_mapping: SlotMapping::I32(&[]), ..first },
        BatchPlan { slot_mapping: SlotMapping::I64(&[i64::MAX; 2]), ..first },
        BatchPlan { positions: &[u32::MAX; 2], tokens: &[], ..first },
        BatchPlan { positions: &[0; 9], ..first },
        BatchPlan { positions: &[], ..first },
        BatchPlan { rows: &far[..1], ..first },
        BatchPlan { rows: &[], ..first },
    ];
    for plan in &altered {
        let rows = q.rows(0, None);
        // The call may fail or use the staged plan. The tests' driver detects a stray write, like memcheck on a GPU.
        let _ = cuda.store_cache(plan, layer, rows, rows);
        let _ = cuda.attend(plan, layer, &attend, q.rows(0, None), buffer.rows_mut(0, None), None);
        cuda.synchronize().expect("nothing failed");
        cuda.stage(&first).expect("it has begun");
    }
    let slot = SlotId::new(i64::MAX as u64);
    let slot = Err(CudaError::Plan(PlanError::Slot { slot, slot_count: 128 }));
    let wide = cuda.store_cache(&altered[3], layer, q.rows(0, None), q.rows(0, None));
    assert_eq!(wide, slot);
}

/// Many rows of one long sequence: the units of the decode kernel must not overflow.
#[test]
fn rows_that_read_too_many_tokens_are_refused() {
    let Some(gpu) = gpu() else { return };
    let mut cuda = open(&gpu, &TableShape::new(16, 2, 1 << 31, 256).expect("long rows"));
    cuda.prepare(&Prepare::new(&[Attend::new(1, WIDTH as u32)])).expect("a served shape");
    let rows = rows(40, 1 << 31);
    let max = 1 << 35;
    let value = 40 * ((1 << 31) + 7 * 16);
    let error = cuda.begin(&plan(&rows, SlotMapping::I32(&[-1; 40])));
    assert_eq!(error, Err(CudaError::Limit { what: Limit::SeenTokens, value, max }));
    cuda.begin(&plan(&rows[..15], SlotMapping::I32(&[-1; 15]))).expect("a valid plan");
    cuda.synchronize().expect("nothing failed");
}
