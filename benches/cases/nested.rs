//! Rows with nested prefixes. Each prefix is one page longer than the next, so n rows have n - 1 nested spans.

use kvarena::id::RowId;
use kvarena::plan::{BatchRow, OwnedPlan, SharedSpan, SharedSpans, SlotMapping};
use kvarena::{
    BatchPlan, Capacity, Cpu, CpuOptions, Engine, EngineConfig, Extend, KvShape, PoolConfig, StepId, StepScratch,
    TokenId,
};

use kvarena::plan::PlanBytesError;

use super::NAMESPACE;

/// Maximum number of steps for which the rows have pages.
const GROWTH: u32 = 64;

pub struct Nested {
    engine: Engine<Cpu>,
    scratch: StepScratch,
    levels: StepScratch,
    items: Vec<Extend>,
}

impl Nested {
    pub fn new(rows: u32) -> Self {
        let (longest, chunk) = (rows + GROWTH + 2, 1024);
        let pool = PoolConfig {
            layers: 1,
            shape: KvShape::heads(1, 1),
            page_size: 1,
            capacity: Capacity::Pages(rows * (GROWTH + 3)),
            ..PoolConfig::default()
        };
        let config = EngineConfig {
            max_sequences: rows,
            max_sequence_len: longest,
            max_tokens: u64::from(longest.next_multiple_of(chunk)) * u64::from(rows),
            prefault: false,
            ..EngineConfig::from(pool)
        };
        let engine = Engine::new(config, CpuOptions::with_threads(1)).expect("a valid config");
        let (scratch, levels) = (StepScratch::new(), StepScratch::new());
        let mut nested = Self { engine, scratch, levels, items: Vec::new() };
        for row in (0..rows).rev() {
            let mut prompt: Vec<TokenId> = (0..=row).map(TokenId::new).collect();
            prompt.push(TokenId::new(rows + row));
            let seq = nested.engine.admit(NAMESPACE, &prompt, 0).expect("there is room");
            let len = nested.engine.extend_max(seq).expect("the sequence is admitted");
            nested.compute(&[Extend { seq, len }]);
            nested.items.push(Extend { seq, len: 1 });
        }
        nested
    }

    fn compute(&mut self, items: &[Extend]) {
        let plan = self.engine.plan_batch(&mut self.scratch, items).expect("there is room");
        let step = plan.step();
        self.engine.commit(step).expect("it is open");
        self.engine.complete(step).expect("it is committed");
    }

    /// Appends the next token of each row.
    pub fn prepare(&mut self) {
        for item in &self.items {
            self.engine.append(item.seq, &[TokenId::new(0)]).expect("there is room");
        }
    }

    /// Plans a step. The plan contains the spans, and the backend checks it.
    pub fn plan(&mut self) -> StepId {
        let plan = self.engine.plan_batch(&mut self.scratch, &self.items).expect("there is room");
        assert_eq!(plan.shared.spans.len() + 1, self.items.len());
        plan.step()
    }

    /// Plans a step, passes `measured` a call that packs the plan, and ends the step.
    pub fn levels(&mut self, measured: &mut dyn FnMut(&mut dyn FnMut())) {
        let Self { engine, scratch, levels, items } = self;
        let plan = engine.plan_batch(scratch, items).expect("there is room");
        measured(&mut || {
            let packed = engine.packed_levels(levels, &plan, items).expect("the plan has these items");
            assert_eq!(packed.levels.len(), items.len());
        });
        let step = plan.step();
        self.rest(step);
    }

    /// Commits and completes a planned step.
    pub fn rest(&mut self, step: StepId) {
        self.engine.commit(step).expect("it is open");
        self.engine.complete(step).expect("it is committed");
    }
}

/// Returns the bytes of a plan of nested rows. The innermost row is in a span that extends past its query.
pub fn hostile_bytes(rows: u32) -> Vec<u8> {
    let row = |i| BatchRow {
        row: RowId::new(i),
        qo_start: i,
        extend_len: 1,
        kv_len: 1 + if i + 1 == rows { rows / 2 } else { rows },
    };
    let span = |i| SharedSpan { member_start: i, member_count: rows - i, begin: i, end: i + 1 };
    let rows_of_plan: Vec<_> = (0..rows).map(row).collect();
    let spans: Vec<_> = (0..rows - 1).map(span).collect();
    let numbers: Vec<u32> = (0..rows).collect();
    let (tokens, slots) = (vec![TokenId::new(0); rows as usize], vec![0; rows as usize]);
    let plan = BatchPlan {
        track_slots: SlotMapping::I32(&[]),
        step: StepId::new(1),
        rows: &rows_of_plan,
        tokens: &tokens,
        positions: &numbers,
        slot_mapping: SlotMapping::I32(&slots),
        table_writes: &[],
        shared: SharedSpans { spans: &spans, members: &numbers },
        masks: &[],
    };
    OwnedPlan::from(&plan).as_bytes().to_vec()
}

/// Decodes [`hostile_bytes`] and expects an error.
pub fn read_hostile(bytes: &[u8], rows: u32) {
    let refused = OwnedPlan::from_bytes(bytes).expect_err("a span extends past a query");
    assert_eq!(refused, PlanBytesError::Span { span: rows as usize / 2 });
}
