//! The byte form of plans: writing and reading a plan preserves it, and invalid bytes never make a reader or a backend
//! panic.

use kvarena::backend::{Backend, CpuRows, CpuRowsMut, OpenBackend};
use kvarena::id::RowId;
use kvarena::layout::{PlaneName, TableShape};
use kvarena::plan::{BatchRow, OwnedPlan, PlanBytesError, SharedSpan, SharedSpans, SlotMapping, TableWrite};
use kvarena::testkit::planner::{Item, Planner};
use kvarena::testkit::rng::Rng;
use kvarena::testkit::spans::Spans;
use kvarena::{Attend, BatchPlan, Capacity, Cpu, CpuOptions, KvShape, LayerId, PageId, PoolConfig, StepId, TokenId};

use crate::small_cpu::all_bytes;

/// Bytes of the header. Its words: magic, step, rows, tokens, table writes, bytes of a slot (low 32 bits) with the
/// number of tracks after the first (high 32 bits), spans, members, masks.
const HEADER: usize = 72;

/// The arrays of a random plan. Its pages and rows need not exist.
struct Arrays {
    rows: Vec<BatchRow>,
    tokens: Vec<TokenId>,
    positions: Vec<u32>,
    narrow: Vec<i32>,
    wide: Vec<i64>,
    track_narrow: Vec<i32>,
    track_wide: Vec<i64>,
    writes: Vec<TableWrite>,
    spans: Spans,
    masks: Vec<u64>,
}

impl Arrays {
    fn random(rng: &mut Rng) -> Self {
        let mut next = 0;
        let mut rows = Vec::new();
        for _ in 0..rng.below(6) {
            let extend_len = rng.below(5) as u32;
            let kv_len = if rng.one_in(3) { 0 } else { extend_len + rng.below(100) as u32 };
            let row = RowId::new(rng.bits() as u32);
            rows.push(BatchRow { row, qo_start: next, extend_len, kv_len });
            next += extend_len;
        }
        let (writes, tracks) = (rng.below(8), rng.below(3) as u32);
        let pages = |row: &BatchRow| {
            let computed = row.kv_len.saturating_sub(row.extend_len) as usize;
            let page = |at: u64| PageId::new((rng.below(2) + 2 * at) as u32);
            (0..6).map(page).take(computed).collect()
        };
        let tables: Vec<Vec<PageId>> = rows.iter().map(pages).collect();
        let tables: Vec<_> = tables.iter().map(Vec::as_slice).collect();
        let spans = Spans::of(&tables, 1);
        let masks = if rng.one_in(2) { masks(rng, &rows) } else { Vec::new() };
        let mut word = || rng.bits() as u32;
        Self {
            rows,
            tokens: (0..next).map(|_| TokenId::new(word())).collect(),
            positions: (0..next).map(|_| word()).collect(),
            narrow: (0..next).map(|_| word() as i32).collect(),
            wide: (0..next).map(|_| (i64::from(word()) << 32) | i64::from(word())).collect(),
            track_narrow: (0..next * tracks).map(|_| word() as i32).collect(),
            track_wide: (0..next * tracks).map(|_| i64::from(word()) - 9).collect(),
            writes: (0..writes).map(|_| TableWrite { index: word(), value: word() }).collect(),
            spans,
            masks,
        }
    }

    fn plan(&self, step: u64, wide: bool) -> BatchPlan<'_> {
        BatchPlan {
            track_slots: if wide { SlotMapping::I64(&self.track_wide) } else { SlotMapping::I32(&self.track_narrow) },
            step: StepId::new(step),
            rows: &self.rows,
            tokens: &self.tokens,
            positions: &self.positions,
            slot_mapping: if wide { SlotMapping::I64(&self.wide) } else { SlotMapping::I32(&self.narrow) },
            table_writes: &self.writes,
            shared: self.spans.plan(),
            masks: &self.masks,
        }
    }
}

/// Returns masks: random ones for the rows that are trees, and 0 for the tokens of other rows.
fn masks(rng: &mut Rng, rows: &[BatchRow]) -> Vec<u64> {
    let mut masks = Vec::new();
    for row in rows {
        let is_tree = row.kv_len > 0 && rng.one_in(2);
        masks.extend((0..row.extend_len).map(|token| {
            let own = 1 << (row.extend_len - 1 - token);
            let slots = u64::MAX.checked_shr(64_u32.saturating_sub(row.kv_len)).unwrap_or(0);
            if is_tree { rng.bits() & slots & !(own - 1) | own } else { 0 }
        }));
    }
    masks
}

#[test]
fn plans_are_equal_after_writing_and_reading() {
    let mut rng = Rng::new(1);
    let mut reused = OwnedPlan::new();
    for step in 0..500 {
        let arrays = Arrays::random(&mut rng);
        for wide in [false, true] {
            let plan = arrays.plan(step, wide);
            let owned = OwnedPlan::from(&plan);
            assert_eq!(owned.plan(), plan);
            reused.copy_from(&plan);
            assert_eq!(reused, owned);
            let read = OwnedPlan::from_bytes(owned.as_bytes()).expect("its own bytes");
            assert_eq!(read.plan(), plan);
            // The bytes may begin at any address.
            let mut shifted = vec![0];
            shifted.extend_from_slice(owned.as_bytes());
            assert_eq!(OwnedPlan::from_bytes(&shifted[1..]), Ok(owned));
        }
    }
}

#[test]
fn bytes_of_another_length_are_refused() {
    let mut rng = Rng::new(2);
    for step in 0..40 {
        let arrays = Arrays::random(&mut rng);
        let owned = OwnedPlan::from(&arrays.plan(step, rng.one_in(2)));
        let bytes = owned.as_bytes();
        for actual in 0..bytes.len() {
            let refused = OwnedPlan::from_bytes(&bytes[..actual]);
            assert_eq!(refused, Err(PlanBytesError::Length { actual }));
        }
        for more in [1, 7, 8, 4096] {
            let mut longer = bytes.to_vec();
            longer.resize(bytes.len() + more, 0);
            let refused = OwnedPlan::from_bytes(&longer);
            assert_eq!(refused, Err(PlanBytesError::Length { actual: longer.len() }));
        }
    }
}

fn row(qo_start: u32, extend_len: u32, kv_len: u32) -> BatchRow {
    BatchRow { row: RowId::new(0), qo_start, extend_len, kv_len }
}

/// Writes and reads a plan of these rows, tokens, spans and masks.
fn read(rows: &[BatchRow], tokens: usize, shared: SharedSpans<'_>, masks: &[u64]) -> Result<(), PlanBytesError> {
    let plan = BatchPlan {
        track_slots: SlotMapping::I32(&[]),
        step: StepId::new(1),
        rows,
        tokens: &vec![TokenId::new(0); tokens],
        positions: &vec![0; tokens],
        slot_mapping: SlotMapping::I32(&vec![0; tokens]),
        table_writes: &[],
        shared,
        masks,
    };
    OwnedPlan::from_bytes(OwnedPlan::from(&plan).as_bytes()).map(|_| ())
}

#[test]
fn wrong_rows_are_refused() {
    let read = |rows: &[BatchRow], tokens| read(rows, tokens, SharedSpans::default(), &[]);
    assert_eq!(read(&[row(0, 2, 5), row(2, 1, 0), row(3, 1, 1)], 4), Ok(()));
    let refused = |row| Err(PlanBytesError::Rows { row });
    assert_eq!(read(&[row(1, 2, 5)], 3), refused(0));
    assert_eq!(read(&[row(0, 2, 5), row(1, 1, 5)], 3), refused(1));
    assert_eq!(read(&[row(0, 2, 5), row(2, 1, 5)], 4), refused(2));
    assert_eq!(read(&[row(0, 2, 5), row(2, 3, 5)], 4), refused(2));
    assert_eq!(read(&[row(0, 4, 3)], 4), refused(0));
    assert_eq!(read(&[row(0, u32::MAX, 0), row(u32::MAX, 1, 1), row(0, 0, 1)], 0), refused(2));
    assert_eq!(read(&[], 1), refused(0));
}

#[test]
fn wrong_spans_are_refused() {
    let shared = (0..).map(|seed| Arrays::random(&mut Rng::new(seed)).spans);
    assert!(shared.take(50).any(|spans| !spans.plan().spans.is_empty()));
    let spans = [SharedSpan { member_start: 0, member_count: 2, begin: 0, end: 3 }];
    let rows = [row(0, 1, 4), row(1, 1, 4)];
    let with_members = |members: &[u32]| read(&rows, 2, SharedSpans { spans: &spans, members }, &[]);
    assert_eq!(with_members(&[1, 0]), Ok(()));
    assert_eq!(with_members(&[1, 1]), Err(PlanBytesError::Span { span: 1 }));
    assert_eq!(with_members(&[1, 2]), Err(PlanBytesError::Span { span: 1 }));
    assert_eq!(with_members(&[1]), Err(PlanBytesError::Span { span: 0 }));
}

#[test]
fn wrong_masks_are_refused() {
    // A row with 2 new of 3 tokens, a row with 66 new of 70, and a padding row.
    let rows = [row(0, 2, 3), row(2, 66, 70), row(68, 1, 0)];
    let with_masks = |masks: &[u64]| read(&rows, 69, SharedSpans::default(), masks);
    let masks = |set: &[(usize, u64)]| {
        let mut masks = [0; 69];
        set.iter().for_each(|&(token, mask)| masks[token] = mask);
        with_masks(&masks)
    };
    let off = |token| Err(PlanBytesError::Mask { token });
    assert_eq!(with_masks(&[]), Ok(()));
    assert_eq!(with_masks(&[0; 68]), off(69), "one too few");
    assert_eq!(masks(&[]), Ok(()));
    assert_eq!(masks(&[(0, 0b10), (1, 0b111)]), Ok(()));
    assert_eq!(masks(&[(0, 0b10)]), off(1), "the other token of the row has no mask");
    assert_eq!(masks(&[(0, 0b10), (1, 0b110)]), off(1), "without its own bit");
    assert_eq!(masks(&[(0, 0b11), (1, 0b1)]), off(0), "with the bit of a later slot");
    assert_eq!(masks(&[(0, 0b10), (1, 0b1001)]), off(1), "with the bit of a missing slot");
    assert_eq!(masks(&[(2, 1)]), off(2), "of a row of more tokens than bits");
    assert_eq!(masks(&[(68, 1)]), off(68), "of padding");
}

#[test]
fn wrong_headers_are_refused() {
    let arrays = Arrays::random(&mut Rng::new(9));
    let owned = OwnedPlan::from(&arrays.plan(7, false));
    let with = |word: usize, value: u64| {
        let mut bytes = owned.as_bytes().to_vec();
        bytes[word * 8..word * 8 + 8].copy_from_slice(&value.to_le_bytes());
        OwnedPlan::from_bytes(&bytes).map(|_| ())
    };
    let length = Err(PlanBytesError::Length { actual: owned.as_bytes().len() });
    assert_eq!(with(0, 0), Err(PlanBytesError::Magic));
    assert_eq!(with(1, u64::MAX), Ok(())); // any step
    for (word, value) in [2, 3, 4, 6, 7, 8].into_iter().flat_map(|word| [u64::MAX, 1 << 60, 1 << 32].map(|x| (word, x)))
    {
        assert_eq!(with(word, value), length, "word {word} = {value}");
    }
    for slots in [1 << 32 | 4, 1 << 63 | 4, (u64::MAX << 32) | 8] {
        assert_eq!(with(5, slots), length, "the slots of more tracks are missing");
    }
    for (slots, slot_bytes) in [(0, 0), (5, 5), (1 << 32 | 5, 5), (u64::MAX, u64::from(u32::MAX))] {
        let error = PlanBytesError::SlotBytes { slot_bytes };
        assert_eq!(with(5, slots), Err(error), "slot_bytes excludes the number of tracks");
    }
    for error in [PlanBytesError::Magic, PlanBytesError::Length { actual: 3 }] {
        assert!(!error.to_string().is_empty());
    }
}

/// Creates a small pool with two sequences, and the plan of their next step.
fn begun() -> (Cpu, OwnedPlan) {
    let (page_size, capacity) = (3, Capacity::Pages(20));
    let config = PoolConfig { layers: 2, shape: KvShape::heads(1, 8), page_size, capacity, ..Default::default() };
    let layout = config.layout().expect("a valid pool");
    let table = TableShape::new(page_size, 3, 30, 60).expect("a small table");
    let mut cpu = CpuOptions::with_threads(1).open(&layout, &table, 2).expect("a small pool");
    let mut planner = Planner::new(&layout, &table, 5);
    let [a, b] = [(); 2].map(|()| planner.admit().expect("a row"));
    let extend = |sequence, len| Item::Extend { sequence, len };
    let first = planner.plan(&[extend(a, 7), extend(b, 12)]);
    cpu.begin(&first.plan()).expect("a valid plan");
    let items = [extend(b, 1), Item::Padding { len: 1 }, extend(a, 6)];
    let second = planner.plan_trees(&items, &[false, false, true]);
    (cpu, second)
}

#[test]
fn garbled_plans_are_refused_or_access_only_the_pool() {
    let mut rng = Rng::new(6);
    let (mut read, mut refused, mut stored) = (0, 0, 0);
    for _ in 0..5000 {
        let (mut cpu, plan) = begun();
        let mut bytes = plan.as_bytes().to_vec();
        for _ in 0..rng.within(1, 3) {
            let header = rng.one_in(8);
            let at = if header { rng.below(HEADER as u64) } else { rng.below(bytes.len() as u64) };
            // Small numbers and arbitrary numbers; small ones are more often valid.
            let value = if rng.one_in(2) { rng.below(32) } else { rng.bits() };
            bytes[at as usize] = value as u8;
        }
        let Ok(plan) = OwnedPlan::from_bytes(&bytes) else { continue };
        read += 1;
        let plan = plan.plan();
        let (words, mut pool) = (cpu.table_words().to_vec(), all_bytes(&cpu));
        if cpu.begin(&plan).is_err() {
            refused += 1;
            assert_eq!(cpu.table_words(), words);
            continue;
        }
        let rows = vec![1.0_f32; plan.token_count() * 8];
        let mut out = rows.clone();
        for layer in 0..2 {
            let layer = LayerId::new(layer);
            let (k, v) = (CpuRows::from(&rows[..]), CpuRows::from(&rows[..]));
            let is_stored = cpu.store_cache(&plan, layer, k, v).is_ok();
            if is_stored {
                for slot in (0..plan.slot_mapping.len()).filter_map(|i| plan.slot_mapping.get(i)) {
                    for name in [PlaneName::K, PlaneName::V] {
                        let row = cpu.layout().row(name, layer, slot).expect("a row of the plane");
                        let row = &mut pool[row.start as usize..row.end as usize];
                        row.copy_from_slice(&1.0_f32.to_ne_bytes().repeat(8));
                    }
                }
            }
            assert!(all_bytes(&cpu) == pool, "only the plan's slots of {layer:?} change");
            if !is_stored {
                continue;
            }
            stored += 1;
            let (q, out) = (CpuRows::from(&rows[..]), CpuRowsMut::from(&mut out[..]));
            let attend = Attend::new(1, 8);
            cpu.attend(&plan, layer, &attend, q, out, None).expect("a plan that was stored");
        }
    }
    assert!(read > 1000 && refused > 500 && stored > 500, "{read} {refused} {stored}");
}
