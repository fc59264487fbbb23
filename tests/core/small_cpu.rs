//! A small pool on the CPU, and a plan for it that tests can modify.

#![allow(dead_code)] // each test uses a part

use kvarena::{
    BatchPlan, BatchRow, Capacity, Cpu, CpuOptions, KvDtype, KvShape, OpenBackend, PageId, PoolConfig, PoolLayout,
    RowId, SharedSpans, SlotMapping, StepId, TableShape, TableWrite, TokenId,
};

/// Returns the config of a pool: two layers, each with two kv heads of 12 f16 elements; 3 tokens a page.
pub fn config() -> PoolConfig {
    PoolConfig {
        layers: 2,
        shape: KvShape::heads(2, 12),
        dtype: KvDtype::F16,
        page_size: 3,
        capacity: Capacity::Pages(20),
        ..Default::default()
    }
}

/// Returns the layout of that pool, and the shape of page tables for two sequences of up to 30 tokens.
pub fn pool() -> (PoolLayout, TableShape) {
    let table = TableShape::new(3, 2, 30, 60).expect("a small table");
    (config().layout().expect("a valid pool"), table)
}

/// Returns the number of tokens that fit in all leaves of one row of those page tables.
pub fn longest_row() -> u64 {
    let (layout, table) = pool();
    u64::from(table.leaves_per_row * table.leaf_pages * layout.page_size())
}

/// Opens the CPU backend over that pool, for two steps at a time.
pub fn opened() -> Cpu {
    let (layout, table) = pool();
    CpuOptions::with_threads(1).open(&layout, &table, 2).expect("a small pool")
}

/// Returns the bytes of all pages, in order.
pub fn all_bytes(cpu: &Cpu) -> Vec<u8> {
    let layout = *cpu.layout();
    let mut bytes = vec![0; layout.total_bytes() as usize];
    for (page, bytes) in bytes.chunks_exact_mut(layout.page_bytes() as usize).enumerate() {
        cpu.read_page(PageId::new(page as u32), bytes).expect("a page of the pool");
    }
    bytes
}

/// A plan of five tokens of one sequence, as plain arrays to modify.
#[derive(Clone)]
pub struct Arrays {
    pub step: u64,
    pub rows: Vec<BatchRow>,
    pub tokens: Vec<TokenId>,
    pub positions: Vec<u32>,
    pub slots: Vec<i32>,
    pub writes: Vec<TableWrite>,
    pub masks: Vec<u64>,
}

impl Arrays {
    /// Returns a valid plan: a prompt of five tokens in row 1, on pages 7 and 2.
    pub fn good() -> Self {
        let (_, table) = pool();
        let row = RowId::new(1);
        Self {
            step: 1,
            rows: vec![BatchRow { row, qo_start: 0, extend_len: 5, kv_len: 5 }],
            tokens: vec![TokenId::new(1); 5],
            positions: vec![0, 1, 2, 3, 4],
            slots: vec![21, 22, 23, 6, 7],
            writes: vec![
                TableWrite { index: table.directory_word(row, 0), value: 1 },
                TableWrite { index: table.page_word(1, 0), value: 7 },
                TableWrite { index: table.page_word(1, 1), value: 2 },
            ],
            masks: Vec::new(),
        }
    }

    /// Returns the plan of the arrays as they are, valid or not.
    pub fn plan(&self) -> BatchPlan<'_> {
        BatchPlan {
            track_slots: SlotMapping::I32(&[]),
            step: StepId::new(self.step),
            rows: &self.rows,
            tokens: &self.tokens,
            positions: &self.positions,
            slot_mapping: SlotMapping::I32(&self.slots),
            table_writes: &self.writes,
            shared: SharedSpans::default(),
            masks: &self.masks,
        }
    }
}
