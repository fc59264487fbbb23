//! Hand-written plans, for tests of a single step.

use kvarena::backend::OpenBackend;
use kvarena::backend::cuda::{Cuda, CudaOptions};
use kvarena::config::StepBounds;
use kvarena::id::RowId;
use kvarena::layout::TableShape;
use kvarena::plan::{BatchRow, SharedSpans, SlotMapping};
use kvarena::{BatchPlan, PoolConfig, StepId, TokenId};

/// Returns page tables of 2 rows of 128 tokens.
pub fn small_table() -> TableShape {
    TableShape::new(16, 2, 128, 256).expect("a small table")
}

/// Opens a backend over a small pool.
pub fn open(options: CudaOptions, config: PoolConfig, table: &TableShape, bounds: impl Into<StepBounds>) -> Cuda {
    options.open(&config.layout().expect("a small pool"), table, bounds).expect("a small pool")
}

/// Row of a sequence's first token.
pub const FIRST: BatchRow = BatchRow { row: RowId::new(0), qo_start: 0, extend_len: 1, kv_len: 1 };

/// Returns a plan of these rows. It has one unknown token for each of up to 64 positions, and no table writes, spans or
/// masks.
pub fn plan_of<'a>(step: u64, rows: &'a [BatchRow], positions: &'a [u32], slots: SlotMapping<'a>) -> BatchPlan<'a> {
    BatchPlan {
        track_slots: SlotMapping::I32(&[]),
        step: StepId::new(step),
        rows,
        tokens: &[TokenId::PENDING; 64][..positions.len()],
        positions,
        slot_mapping: slots,
        table_writes: &[],
        shared: SharedSpans::default(),
        masks: &[],
    }
}

/// Returns a plan of a sequence's first token, in the first slot.
pub fn first_token(step: u64) -> BatchPlan<'static> {
    plan_of(step, &[FIRST], &[0], SlotMapping::I32(&[0]))
}
