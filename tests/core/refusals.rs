//! The CPU backend rejects invalid calls with typed errors, and writes nothing.

use super::small_cpu::{Arrays, all_bytes, config, longest_row, opened, pool};
use kvarena::backend::{
    Backend, CpuError, CpuRows, CpuRowsMut, NO_POSITION, OpenBackend, Operand, PlanError, Queries, Rope, Select,
    Selection, SparseBackend,
};
use kvarena::config::StepBounds;
use kvarena::id::RowId;
use kvarena::layout::{LabelChannels, LabelError, PlaneName, TableShape};
use kvarena::plan::{Compaction, PageCopy};
use kvarena::{Attend, Capacity, CpuOptions, KvShape, LayerId, PageId, PoolConfig, SlotId, StepId};

#[test]
fn plans_with_invalid_indices_are_refused() {
    let good = Arrays::good();
    let spoilt = |spoil: &dyn Fn(&mut Arrays)| {
        let mut arrays = good.clone();
        spoil(&mut arrays);
        arrays
    };
    let row = RowId::new(1);
    let (_, table) = pool();
    let words = table.words();
    let max = longest_row();
    let cases = [
        (spoilt(&|a| a.tokens.truncate(4)), PlanError::Tokens { positions: 5, tokens: 4, slots: 5 }),
        (spoilt(&|a| a.slots.push(0)), PlanError::Tokens { positions: 5, tokens: 5, slots: 6 }),
        (spoilt(&|a| a.rows[0].qo_start = 1), PlanError::QueryRows { row: 0 }),
        (spoilt(&|a| a.rows[0].extend_len = 4), PlanError::QueryRows { row: 1 }),
        (spoilt(&|a| a.rows.clear()), PlanError::QueryRows { row: 0 }),
        (spoilt(&|a| a.rows[0].row = RowId::new(2)), PlanError::Row { row: RowId::new(2), rows: 2 }),
        (spoilt(&|a| a.rows[0].kv_len = 4), PlanError::KvLen { row, kv_len: 4, min: 5, max }),
        (spoilt(&|a| a.rows[0].kv_len = 2000), PlanError::KvLen { row, kv_len: 2000, min: 5, max }),
        (spoilt(&|a| a.slots[4] = 60), PlanError::Slot { slot: SlotId::new(60), slot_count: 60 }),
        (spoilt(&|a| a.masks = vec![0; 4]), PlanError::Mask { token: 5, mask: 0 }),
        (
            // Slots 0 to 4 are bits 4 to 0: the third token's mask has the bit of the fourth.
            spoilt(&|a| a.masks = vec![0b10000, 0b11000, 0b11110, 0b11110, 0b11111]),
            PlanError::Mask { token: 2, mask: 0b11110 },
        ),
        (spoilt(&|a| a.writes[1].index = words as u32), PlanError::TableIndex { index: words as u32, words }),
        (spoilt(&|a| a.writes[0].value = 2), PlanError::TableValue { index: good.writes[0].index, value: 2, count: 2 }),
        (
            spoilt(&|a| a.writes[2].value = 20),
            PlanError::TableValue { index: good.writes[2].index, value: 20, count: 20 },
        ),
    ];
    for (arrays, error) in cases {
        let mut cpu = opened();
        assert_eq!(cpu.begin(&arrays.plan()), refused(error));
        assert!(cpu.table_words().iter().all(|&word| word == 0), "{error}");
        // The step may begin after the plan is corrected. An invalid plan of a begun step is also rejected.
        cpu.begin(&good.plan()).expect("a valid plan");
        let (kv, q) = (vec![1.0; 5 * 24], vec![1.0; 5 * 48]);
        let mut out = vec![7.0; q.len()];
        let layer = LayerId::new(0);
        let rows = CpuRows::from(&kv[..]);
        assert_eq!(cpu.store_cache(&arrays.plan(), layer, rows, rows), refused(error));
        let out_rows = CpuRowsMut::from(&mut out[..]);
        let (q, attend) = (CpuRows::from(&q[..]), Attend::new(4, 12));
        assert_eq!(cpu.attend(&arrays.plan(), layer, &attend, q, out_rows, None), refused(error));
        assert!(out.iter().all(|&x| x == 7.0), "{error}");
        assert!(all_bytes(&cpu).iter().all(|&x| x == 0), "{error}");
        assert!(!CpuError::Plan(error).to_string().is_empty());
    }
}

#[test]
fn rows_that_do_not_fit_the_plan_are_refused() {
    let arrays = Arrays::good();
    let plan = arrays.plan();
    let mut cpu = opened();
    cpu.begin(&plan).expect("a valid plan");
    let layer = LayerId::new(1);
    let all = vec![1.0_f32; 1000];
    let rows = |len: usize| CpuRows::from(&all[..len]);
    assert_eq!([0, 1].map(|len| rows(len).elements.is_empty()), [true, false]);
    let length = |operand, actual, wanted| refused(PlanError::Length { operand, actual, wanted });

    let mut store = |layer, k, v| cpu.store_cache(&plan, LayerId::new(layer), k, v);
    let past = PlanError::Layer { layer: LayerId::new(2), layers: 2 };
    assert_eq!(store(2, rows(120), rows(120)), refused(past));
    assert_eq!(store(1, rows(119), rows(120)), length(Operand::K, 119, 120));
    assert_eq!(store(1, rows(120), rows(121)), length(Operand::V, 121, 120));
    assert_eq!(store(1, rows(143).strided(30), rows(120)), length(Operand::K, 143, 144));
    let stride = PlanError::Stride { operand: Operand::V, stride: 23, width: 24 };
    assert_eq!(store(1, rows(120), rows(120).strided(23)), refused(stride));
    assert_eq!(store(1, rows(144).strided(30), rows(120).strided(24)), Ok(()));
    let stored = all_bytes(&cpu);

    let mut out = vec![7.0_f32; 240];
    let mut lse = [7.0_f32; 20];
    let plain = Attend::new(4, 12);
    let mut attend = |attend: Attend, q: usize, out_len: usize, lse_len: usize| {
        let out = CpuRowsMut::from(&mut out[..out_len]);
        let result = cpu.attend(&plan, layer, &attend, rows(q), out, Some(&mut lse[..lse_len]));
        if result.is_err() {
            assert!(lse.iter().all(|&x| x == 7.0), "{result:?}");
        }
        result
    };
    assert_eq!(attend(plain, 239, 240, 20), length(Operand::Q, 239, 240));
    assert_eq!(attend(plain, 240, 239, 20), length(Operand::Out, 239, 240));
    assert_eq!(attend(plain, 240, 240, 19), length(Operand::Lse, 19, 20));
    for q_heads in [0, 1, 3] {
        let refused = refused(PlanError::Heads { q_heads, kv_heads: 2 });
        assert_eq!(attend(Attend { q_heads, ..plain }, 240, 240, 20), refused);
    }
    let window = Some(0);
    let empty = refused(PlanError::EmptyWindow);
    assert_eq!(attend(Attend { window, ..plain }, 240, 240, 20), empty);
    for soft_cap in [0.0, -1.0, f32::INFINITY] {
        let refused = refused(PlanError::SoftCap { soft_cap });
        let soft_cap = Some(soft_cap);
        assert_eq!(attend(Attend { soft_cap, ..plain }, 240, 240, 20), refused);
    }
    let not_a_number = Attend { soft_cap: Some(f32::NAN), ..plain };
    assert!(matches!(attend(not_a_number, 240, 240, 20), Err(CpuError::Plan(PlanError::SoftCap { .. }))));
    for scale in [f32::INFINITY, f32::NEG_INFINITY] {
        let refused = refused(PlanError::Scale { scale });
        assert_eq!(attend(Attend { scale, ..plain }, 240, 240, 20), refused);
    }
    let not_a_number = Attend { scale: f32::NAN, ..plain };
    assert!(matches!(attend(not_a_number, 240, 240, 20), Err(CpuError::Plan(PlanError::Scale { .. }))));
    assert_eq!(attend(Attend { scale: 0.0, ..plain }, 240, 240, 20), Ok(()));
    assert_eq!(attend(plain, 240, 240, 20), Ok(()));
    assert_eq!(all_bytes(&cpu), stored);
}

#[test]
fn frequencies_of_another_length_are_refused() {
    let arrays = Arrays::good();
    let plan = arrays.plan();
    let mut cpu = opened();
    cpu.begin(&plan).expect("a valid plan");
    let mut qkv = vec![1.0_f32; 5 * 8 * 12];
    let (operand, wanted) = (Operand::Frequencies, 6);
    for actual in [0, 5, 7, 12, 6] {
        let frequencies = &[0.5; 12][..actual];
        let rope = Rope { q_heads: 4, q_norm: None, k_norm: None, eps: 0.0, frequencies };
        let stored = cpu.rope_store(&plan, LayerId::new(0), &rope, CpuRowsMut::from(&mut qkv[..]));
        if actual == wanted {
            assert_eq!(stored, Ok(()));
            continue;
        }
        assert_eq!(stored, refused(PlanError::Length { operand, actual, wanted }));
        assert!(qkv.iter().all(|&x| x == 1.0), "{actual}");
        assert!(all_bytes(&cpu).iter().all(|&x| x == 0), "{actual}");
    }
}

#[test]
fn invalid_sinks_are_refused() {
    let arrays = Arrays::good();
    let plan = arrays.plan();
    let mut cpu = opened();
    cpu.begin(&plan).expect("a valid plan");
    let (layer, ones) = (LayerId::new(0), [1.0_f32; 240]);
    let rows = CpuRows::from(&ones[..120]);
    cpu.store_cache(&plan, layer, rows, rows).expect("valid rows");
    let mut attend = |sinks: &[f32]| {
        let mut out = [7.0_f32; 240];
        let queries = Queries { rows: CpuRows::from(&ones[..]), sinks: Some(sinks) };
        let to = CpuRowsMut::from(&mut out[..]);
        cpu.attend_queries(&plan, layer, &Attend::new(4, 12), queries, to, None)?;
        Ok(out)
    };
    let (operand, wanted) = (Operand::Sinks, 4);
    assert_eq!(attend(&[0.0; 3]), refused(PlanError::Length { operand, actual: 3, wanted }));
    assert_eq!(attend(&[0.0; 5]), refused(PlanError::Length { operand, actual: 5, wanted }));
    let sink = f32::INFINITY;
    assert_eq!(attend(&[0.0, 0.0, sink, 0.0]), refused(PlanError::Sink { head: 2, sink }));
    let not_a_number = attend(&[0.0, f32::NAN, 0.0, 0.0]);
    assert!(matches!(not_a_number, Err(CpuError::Plan(PlanError::Sink { head: 1, .. }))));
    let none = attend(&[f32::NEG_INFINITY; 4]).expect("no head has one");
    assert!(none.iter().all(|&x| x == 1.0), "V is 1 everywhere");
    // Head 3's sink far exceeds its logits.
    let mut sinks = [f32::NEG_INFINITY; 4];
    sinks[3] = 1e4;
    let one = attend(&sinks).expect("a sink");
    assert!(one.chunks_exact(12).enumerate().all(|(i, head)| head == [f32::from(i % 4 != 3); 12]));
}

#[test]
fn calls_out_of_order_are_refused() {
    let arrays = Arrays::good();
    let plan = arrays.plan();
    let layer = LayerId::new(0);
    let mut bytes = vec![0; 24];
    let rows = CpuRows::from(&[0.0_f32; 120][..]);
    let mut cpu = opened();
    let not_begun = refused(PlanError::NotBegun { step: StepId::new(1) });
    assert_eq!(cpu.store_cache(&plan, layer, rows, rows), not_begun);
    cpu.begin(&plan).expect("a valid plan");
    let last = StepId::new(1);
    assert_eq!(cpu.begin(&plan), refused(PlanError::AlreadyBegun { step: last, last }));

    let page = PageId::new(20);
    let past = refused(PlanError::Page { page, page_count: 20 });
    assert_eq!(cpu.copy_pages(&[PageCopy { source: page, target: PageId::new(1) }]), past);
    assert_eq!(cpu.copy_pages(&[PageCopy { source: PageId::new(1), target: page }]), past);
    assert_eq!(cpu.read_page(page, &mut bytes), past);
    let wanted = cpu.layout().page_bytes();
    let size = Err(CpuError::PageBytes { actual: 24, wanted });
    assert_eq!(cpu.read_page(PageId::new(1), &mut bytes), size);
    assert_eq!(cpu.write_page(PageId::new(1), &bytes), size);
    assert_eq!(cpu.page_piece(PageId::new(1), 1), Err(CpuError::Piece { piece: 1, pieces: 1 }));
    let row = cpu.layout().row(PlaneName::V, layer, SlotId::new(5)).expect("the pool has V");
    cpu.pool_mut()[row.start as usize..][..2].copy_from_slice(&0x4100_u16.to_le_bytes()); // 2.5 as f16
    assert_eq!(cpu.read_slot(PlaneName::V, layer, SlotId::new(5)).map(|row| row[0]), Ok(2.5));
    let slot = SlotId::new(60);
    let past = refused(PlanError::Slot { slot, slot_count: 60 });
    assert_eq!(cpu.slot(PlaneName::K, layer, slot), past);
    let layer = LayerId::new(2);
    let past = refused(PlanError::Layer { layer, layers: 2 });
    assert_eq!(cpu.slot(PlaneName::V, layer, SlotId::new(0)), past);
}

#[test]
fn a_pool_that_memory_does_not_hold_is_an_error() {
    let capacity = Capacity::Pages(u32::MAX - 1);
    let config = PoolConfig { layers: 1000, page_size: 1024, capacity, ..Default::default() };
    let layout = config.layout().expect("valid, if large");
    let table = TableShape::new(1024, 1, 1024, 1024).expect("a small table");
    let refused = CpuError::OutOfMemory { bytes: layout.total_bytes() };
    assert_eq!(CpuOptions::default().open(&layout, &table, 1).err(), Some(refused));
}

/// Windows use positions, and masks of trees use slots.
#[test]
fn windows_over_trees_are_refused() {
    let mut arrays = Arrays::good();
    arrays.masks = vec![0b10000, 0b11000, 0b10100, 0b11010, 0b10101];
    let plan = arrays.plan();
    let mut cpu = opened();
    cpu.begin(&plan).expect("a valid plan");
    let (layer, ones) = (LayerId::new(0), [1.0_f32; 240]);
    let rows = CpuRows::from(&ones[..120]);
    cpu.store_cache(&plan, layer, rows, rows).expect("valid rows");
    let mut attend = |window| {
        let mut out = [7.0_f32; 240];
        let attend = Attend { window, ..Attend::new(4, 12) };
        let to = CpuRowsMut::from(&mut out[..]);
        cpu.attend(&plan, layer, &attend, CpuRows::from(&ones[..]), to, None).map(|()| out)
    };
    assert_eq!(attend(Some(1000)), refused(PlanError::TreeWindow { window: 1000 }));
    assert_eq!(attend(None), Ok([1.0; 240]), "V is 1 everywhere");
}

#[test]
fn slots_that_a_row_does_not_have_are_not_moved() {
    let arrays = Arrays::good();
    let mut cpu = opened();
    cpu.begin(&arrays.plan()).expect("a valid plan");
    let (row, past) = (RowId::new(1), RowId::new(2));
    let max = longest_row();
    let keep = |row, first, keep| Compaction { row, first, keep };
    let last = max as u32 - 1;
    assert_eq!(cpu.compact(&[keep(past, 0, 1)]), refused(PlanError::Row { row: past, rows: 2 }));
    let place = |place| refused(PlanError::Place { row, place, max });
    assert_eq!(cpu.compact(&[keep(row, last, 0b11)]), place(max));
    // The first of two compactions is valid.
    assert_eq!(cpu.compact(&[keep(row, 0, 0b10), keep(row, last, 0b100)]), place(max + 1));
    assert_eq!(cpu.compact(&[keep(row, last, 1)]), Ok(()), "nothing moves");
}

#[test]
fn invalid_selections_are_refused() {
    let arrays = Arrays::good();
    let plan = arrays.plan();
    let (layer, q) = (LayerId::new(0), [1.0_f32; 240]);
    let select = Select { q_heads: 4, top: 3, window: None };
    let (layout, table) = pool();
    let mut cpu = opened();
    cpu.begin(&plan).expect("a valid plan");
    let mut lists = [7; 6];
    let unlabelled = cpu.select(&plan, layer, &select, CpuRows::from(&q[..]), &mut lists);
    assert_eq!((unlabelled, lists), (refused(PlanError::NoLabels), [7; 6]));

    let labelled = PoolConfig { label_channels: 2, ..config() }.layout().expect("a valid pool");
    let open = |layout, labels| {
        let options = CpuOptions { labels, ..CpuOptions::with_threads(1) };
        OpenBackend::open(options, layout, &table, 2)
    };
    let missing = LabelError::Missing { channels: 2 };
    assert_eq!(open(&labelled, None).err(), Some(CpuError::Labels(missing)));
    let labels = LabelChannels::new(2, 2, 2, [0, 5].repeat(4)).expect("the channels ascend");
    let none = open(&layout, Some(labels.clone())).err();
    assert_eq!(none, Some(CpuError::Labels(LabelError::NoLabels)));
    let mut cpu = open(&labelled, Some(labels)).expect("the labels fit the pool");
    cpu.begin(&plan).expect("a valid plan");
    let max = longest_row();
    let mut select_top = |top, lists: &mut [u32]| {
        let select = Select { top, ..select };
        cpu.select(&plan, layer, &select, CpuRows::from(&q[..]), lists)
    };
    assert_eq!(select_top(0, &mut []), refused(PlanError::Top { top: 0, max }));
    let top = max as u32 + 1;
    assert_eq!(select_top(top, &mut [0; 6]), refused(PlanError::Top { top, max }));
    let (operand, actual, wanted) = (Operand::Selection, 5, 6);
    assert_eq!(select_top(3, &mut [0; 5]), refused(PlanError::Length { operand, actual, wanted }));
    assert_eq!(select_top(3, &mut lists), Ok(()));
    assert_eq!(lists, [NO_POSITION; 6], "a row of five new tokens has none");
    let selection = Selection { positions: &lists[..4], top: 3 };
    let queries = Queries { rows: CpuRows::from(&q[..]), sinks: None };
    let mut out = [7.0_f32; 240];
    let to = CpuRowsMut::from(&mut out[..]);
    let attend = Attend::new(4, 12);
    let short = cpu.attend_selected(&plan, layer, &attend, selection, queries, to, None);
    assert_eq!(short, refused(PlanError::Length { operand, actual: 4, wanted }));
}

#[test]
fn a_scale_by_the_length_of_latent_rows_is_refused() {
    let arrays = Arrays::good();
    let plan = arrays.plan();
    let shape = KvShape::Latent { rank: 8, rope: 4 };
    let layout = PoolConfig { shape, ..config() }.layout().expect("a valid pool");
    let (_, table) = pool();
    let mut cpu = CpuOptions::with_threads(1).open(&layout, &table, 2).expect("a small pool");
    cpu.begin(&plan).expect("a valid plan");
    let (layer, rows, none) = (LayerId::new(0), [1.0_f32; 5 * 12], [0.0_f32; 0]);
    let stored = cpu.store_cache(&plan, layer, rows[..].into(), none[..].into());
    stored.expect("rows, and no V");
    let mut attend = |attend: Attend| {
        let mut out = [7.0_f32; 5 * 8];
        cpu.attend(&plan, layer, &attend, rows[..].into(), out[..].as_mut().into(), None)
    };
    let scale = Attend::new(1, 12).scale;
    assert_eq!(attend(Attend::new(1, 12)), refused(PlanError::LatentScale { scale }));
    assert_eq!(attend(Attend::latent(1, 0.5)), Ok(()));
}

fn refused<T>(error: PlanError) -> Result<T, CpuError> {
    Err(CpuError::Plan(error))
}

#[test]
fn a_step_of_more_tokens_than_the_backend_was_opened_for_is_refused() {
    let (layout, table) = pool();
    let plan = Arrays::good();
    for tokens in [4, 5] {
        let bounds = StepBounds { steps: 1, tokens };
        let mut cpu = CpuOptions::with_threads(1).open(&layout, &table, bounds).expect("a small pool");
        let wanted = match tokens {
            4 => refused(PlanError::StepTokens { tokens: 5, max: 4 }),
            _ => Ok(()),
        };
        assert_eq!(cpu.begin(&plan.plan()), wanted);
        assert_eq!(cpu.table_words().iter().any(|&word| word > 0), tokens == 5);
    }
}
