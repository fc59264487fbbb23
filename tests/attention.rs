//! The CPU backend: it keeps the contract of backends, refuses by name and value what makes no sense, and gives the
//! same numbers whatever the pool looks like.

use half::f16;
use kvarena::backend::{Backend, CpuError, CpuRows, CpuRowsMut, Elements, Operand};
use kvarena::testkit::contract::{Case, check_backend, check_sparse_backend};
use kvarena::testkit::planner::{Item, Planner};
use kvarena::testkit::rng::Rng;
use kvarena::{
    Attend, BatchPlan, BatchRow, Capacity, Cpu, CpuOptions, KvDtype, KvShape, LayerId, Layout,
    OpenBackend, OwnedPlan, PageCopy, PageId, PlanError, PlaneName, PoolConfig, PoolLayout,
    Queries, RowId, SlotId, SlotMapping, StepEnd, StepId, TableShape, TableWrite, TokenId,
};

#[test]
fn cpu_keeps_the_contract() {
    let report = check_backend(options, 0..260);
    println!("{report}");
    assert!(report.rows > 100_000, "{report}");
}

#[test]
fn cpu_reads_what_a_selection_names() {
    let report = check_sparse_backend(options, 0..120);
    println!("{report}");
    assert!(report.rows > 50_000, "{report}");
}

fn options(case: &Case) -> CpuOptions {
    let (scales, labels) = (case.scales(), case.labels());
    CpuOptions { scales, labels, ..CpuOptions::with_threads(3) }
}

/// Two layers of two heads of 12 x f16, pages of 3, two sequences of up to 30 tokens.
fn pool() -> (PoolLayout, TableShape) {
    let config = PoolConfig {
        layers: 2,
        shape: KvShape::heads(2, 12),
        dtype: KvDtype::F16,
        page_size: 3,
        capacity: Capacity::Pages(20),
        ..Default::default()
    };
    let table = TableShape::new(3, 2, 30, 60).expect("a small table");
    (config.layout().expect("a valid pool"), table)
}

fn opened() -> Cpu {
    let (layout, table) = pool();
    CpuOptions::with_threads(1).open(&layout, &table, 2).expect("a small pool")
}

fn all_bytes(cpu: &Cpu) -> Vec<u8> {
    let layout = *cpu.layout();
    let mut bytes = vec![0; layout.total_bytes() as usize];
    for (page, bytes) in bytes.chunks_exact_mut(layout.page_bytes() as usize).enumerate() {
        cpu.read_page(PageId::new(page as u32), bytes).expect("a page of the pool");
    }
    bytes
}

fn numbers(rng: &mut Rng, len: usize) -> Vec<f32> {
    (0..len).map(|_| rng.below(2000) as f32 / 500.0 - 2.0).collect()
}

/// A plan of five tokens of one sequence, as plain arrays to be spoilt.
#[derive(Clone)]
struct Arrays {
    step: u64,
    rows: Vec<BatchRow>,
    tokens: Vec<TokenId>,
    positions: Vec<u32>,
    slots: Vec<i32>,
    writes: Vec<TableWrite>,
}

impl Arrays {
    fn good() -> Self {
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
        }
    }

    fn plan(&self) -> BatchPlan<'_> {
        BatchPlan {
            step: StepId::new(self.step),
            rows: &self.rows,
            tokens: &self.tokens,
            positions: &self.positions,
            slot_mapping: SlotMapping::I32(&self.slots),
            table_writes: &self.writes,
            shared: kvarena::SharedSpans::default(),
            masks: &[],
        }
    }
}

#[test]
fn plans_that_name_what_does_not_exist_are_refused() {
    let good = Arrays::good();
    let spoilt = |spoil: &dyn Fn(&mut Arrays)| {
        let mut arrays = good.clone();
        spoil(&mut arrays);
        arrays
    };
    let row = RowId::new(1);
    let (_, table) = pool();
    let words = table.words();
    let max = u64::from(table.chunks_per_row * table.chunk_pages * 3);
    let cases = [
        (
            spoilt(&|a| a.tokens.truncate(4)),
            CpuError::Plan(PlanError::Tokens { positions: 5, tokens: 4, slots: 5 }),
        ),
        (
            spoilt(&|a| a.slots.push(0)),
            CpuError::Plan(PlanError::Tokens { positions: 5, tokens: 5, slots: 6 }),
        ),
        (spoilt(&|a| a.rows[0].qo_start = 1), CpuError::Plan(PlanError::QueryRows { row: 0 })),
        (spoilt(&|a| a.rows[0].extend_len = 4), CpuError::Plan(PlanError::QueryRows { row: 1 })),
        (spoilt(&|a| a.rows.clear()), CpuError::Plan(PlanError::QueryRows { row: 0 })),
        (
            spoilt(&|a| a.rows[0].row = RowId::new(2)),
            CpuError::Plan(PlanError::Row { row: RowId::new(2), rows: 2 }),
        ),
        (
            spoilt(&|a| a.rows[0].kv_len = 4),
            CpuError::Plan(PlanError::KvLen { row, kv_len: 4, min: 5, max }),
        ),
        (
            spoilt(&|a| a.rows[0].kv_len = 2000),
            CpuError::Plan(PlanError::KvLen { row, kv_len: 2000, min: 5, max }),
        ),
        (
            spoilt(&|a| a.slots[4] = 60),
            CpuError::Plan(PlanError::Slot { slot: SlotId::new(60), slot_count: 60 }),
        ),
        (
            spoilt(&|a| a.writes[1].index = words as u32),
            CpuError::Plan(PlanError::TableIndex { index: words as u32, words }),
        ),
        (
            spoilt(&|a| a.writes[0].value = 2),
            CpuError::Plan(PlanError::TableValue {
                index: good.writes[0].index,
                value: 2,
                count: 2,
            }),
        ),
        (
            spoilt(&|a| a.writes[2].value = 20),
            CpuError::Plan(PlanError::TableValue {
                index: good.writes[2].index,
                value: 20,
                count: 20,
            }),
        ),
    ];
    for (arrays, error) in cases {
        let mut cpu = opened();
        assert_eq!(cpu.begin(&arrays.plan()), Err(error));
        assert!(cpu.table_words().iter().all(|&word| word == 0), "{error}");
        // The step may begin once it is mended. A spoilt plan of a step that has begun is refused too.
        cpu.begin(&good.plan()).expect("a valid plan");
        let (kv, q) = (vec![1.0; 5 * 24], vec![1.0; 5 * 48]);
        let mut out = vec![7.0; q.len()];
        let layer = LayerId::new(0);
        let rows = CpuRows::from(&kv[..]);
        assert_eq!(cpu.store_cache(&arrays.plan(), layer, rows, rows), Err(error));
        let out_rows = CpuRowsMut::from(&mut out[..]);
        let (q, attend) = (CpuRows::from(&q[..]), Attend::new(4, 12));
        assert_eq!(cpu.attend(&arrays.plan(), layer, &attend, q, out_rows, None), Err(error));
        assert!(out.iter().all(|&x| x == 7.0), "{error}");
        assert!(all_bytes(&cpu).iter().all(|&x| x == 0), "{error}");
        assert!(!error.to_string().is_empty());
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
    let length = |operand, actual, wanted| {
        Err(CpuError::Plan(PlanError::Length { operand, actual, wanted }))
    };

    let mut store = |layer, k, v| cpu.store_cache(&plan, LayerId::new(layer), k, v);
    let past = CpuError::Plan(PlanError::Layer { layer: LayerId::new(2), layers: 2 });
    assert_eq!(store(2, rows(120), rows(120)), Err(past));
    assert_eq!(store(1, rows(119), rows(120)), length(Operand::K, 119, 120));
    assert_eq!(store(1, rows(120), rows(121)), length(Operand::V, 121, 120));
    assert_eq!(store(1, rows(143).strided(30), rows(120)), length(Operand::K, 143, 144));
    let stride = CpuError::Plan(PlanError::Stride { operand: Operand::V, stride: 23, width: 24 });
    assert_eq!(store(1, rows(120), rows(120).strided(23)), Err(stride));
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
        let refused = Err(CpuError::Plan(PlanError::Heads { q_heads, kv_heads: 2 }));
        assert_eq!(attend(Attend { q_heads, ..plain }, 240, 240, 20), refused);
    }
    let window = Some(0);
    assert_eq!(
        attend(Attend { window, ..plain }, 240, 240, 20),
        Err(CpuError::Plan(PlanError::EmptyWindow))
    );
    for soft_cap in [0.0, -1.0, f32::INFINITY] {
        let refused = Err(CpuError::Plan(PlanError::SoftCap { soft_cap }));
        let soft_cap = Some(soft_cap);
        assert_eq!(attend(Attend { soft_cap, ..plain }, 240, 240, 20), refused);
    }
    let not_a_number = Attend { soft_cap: Some(f32::NAN), ..plain };
    assert!(matches!(
        attend(not_a_number, 240, 240, 20),
        Err(CpuError::Plan(PlanError::SoftCap { .. }))
    ));
    for scale in [f32::INFINITY, f32::NEG_INFINITY] {
        let refused = Err(CpuError::Plan(PlanError::Scale { scale }));
        assert_eq!(attend(Attend { scale, ..plain }, 240, 240, 20), refused);
    }
    let not_a_number = Attend { scale: f32::NAN, ..plain };
    assert!(matches!(
        attend(not_a_number, 240, 240, 20),
        Err(CpuError::Plan(PlanError::Scale { .. }))
    ));
    assert_eq!(attend(Attend { scale: 0.0, ..plain }, 240, 240, 20), Ok(()));
    assert_eq!(attend(plain, 240, 240, 20), Ok(()));
    assert_eq!(all_bytes(&cpu), stored);
}

#[test]
fn sinks_that_make_no_sense_are_refused() {
    let arrays = Arrays::good();
    let plan = arrays.plan();
    let mut cpu = opened();
    cpu.begin(&plan).expect("a valid plan");
    let (layer, ones) = (LayerId::new(0), [1.0_f32; 240]);
    let rows = CpuRows::from(&ones[..120]);
    cpu.store_cache(&plan, layer, rows, rows).expect("valid rows");
    let mut attend = |sinks: &[f32]| {
        let mut out = [7.0_f32; 240];
        let asked = Queries { rows: CpuRows::from(&ones[..]), sinks: Some(sinks) };
        let to = CpuRowsMut::from(&mut out[..]);
        cpu.attend_queries(&plan, layer, &Attend::new(4, 12), asked, to, None)?;
        Ok(out)
    };
    let refused = |error| Err(CpuError::Plan(error));
    let (operand, wanted) = (Operand::Sinks, 4);
    assert_eq!(attend(&[0.0; 3]), refused(PlanError::Length { operand, actual: 3, wanted }));
    assert_eq!(attend(&[0.0; 5]), refused(PlanError::Length { operand, actual: 5, wanted }));
    let sink = f32::INFINITY;
    assert_eq!(attend(&[0.0, 0.0, sink, 0.0]), refused(PlanError::Sink { head: 2, sink }));
    let not_a_number = attend(&[0.0, f32::NAN, 0.0, 0.0]);
    assert!(matches!(not_a_number, Err(CpuError::Plan(PlanError::Sink { head: 1, .. }))));
    let none = attend(&[f32::NEG_INFINITY; 4]).expect("no head has one");
    assert!(none.iter().all(|&x| x == 1.0), "V is 1 everywhere");
    // Head 3's sink is far above its logits.
    let mut sinks = [f32::NEG_INFINITY; 4];
    sinks[3] = 1e4;
    let one = attend(&sinks).expect("a sink");
    assert!(one.chunks_exact(12).enumerate().all(|(i, head)| head == [f32::from(i % 4 != 3); 12]));
}

#[test]
fn calls_out_of_turn_are_refused() {
    let arrays = Arrays::good();
    let plan = arrays.plan();
    let layer = LayerId::new(0);
    let mut bytes = vec![0; 24];
    let rows = CpuRows::from(&[0.0_f32; 120][..]);
    let mut cpu = opened();
    let not_begun = Err(CpuError::Plan(PlanError::NotBegun { step: StepId::new(1) }));
    assert_eq!(cpu.store_cache(&plan, layer, rows, rows), not_begun);
    cpu.begin(&plan).expect("a valid plan");
    let last = StepId::new(1);
    assert_eq!(cpu.begin(&plan), Err(CpuError::Plan(PlanError::AlreadyBegun { step: last, last })));

    let page = PageId::new(20);
    let past = Err(CpuError::Plan(PlanError::Page { page, page_count: 20 }));
    assert_eq!(cpu.copy_pages(&[PageCopy { source: page, target: PageId::new(1) }]), past);
    assert_eq!(cpu.copy_pages(&[PageCopy { source: PageId::new(1), target: page }]), past);
    assert_eq!(cpu.read_page(page, &mut bytes), past);
    let wanted = cpu.layout().page_bytes();
    let size = Err(CpuError::PageBytes { actual: 24, wanted });
    assert_eq!(cpu.read_page(PageId::new(1), &mut bytes), size);
    assert_eq!(cpu.write_page(PageId::new(1), &bytes), size);
    assert_eq!(cpu.page_piece(PageId::new(1), 1), Err(CpuError::Piece { piece: 1, pieces: 1 }));
    let slot = SlotId::new(60);
    let past = Err(CpuError::Plan(PlanError::Slot { slot, slot_count: 60 }));
    assert_eq!(cpu.slot(PlaneName::K, layer, slot), past);
    let layer = LayerId::new(2);
    let past = Err(CpuError::Plan(PlanError::Layer { layer, layers: 2 }));
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

#[test]
fn stores_convert_to_the_nearest_and_copy_their_own_type_bit_by_bit() {
    let arrays = Arrays::good();
    let mut cpu = opened();
    cpu.begin(&arrays.plan()).expect("a valid plan");
    // Ties, overflow, the smallest subnormal, minus zero; then bits that no conversion would keep.
    let wide = [1.0 + 1.0 / 2048.0, 1.0 + 3.0 / 2048.0, 65519.0, 65520.0, 5.9604645e-8, -0.0];
    let kept = [0x3c00, 0x3c02, 0x7bff, 0x7c00, 0x0001, 0x8000].map(f16::from_bits);
    let k: Vec<f32> = wide.iter().copied().cycle().take(120).collect();
    let v: Vec<f16> = (0..120).map(|i| f16::from_bits(0x7c01 + i * 7)).collect();
    let layer = LayerId::new(1);
    let (k_rows, v_rows) = (CpuRows::from(&k[..]), CpuRows::from(&v[..]));
    cpu.store_cache(&arrays.plan(), layer, k_rows, v_rows).expect("valid rows");
    for (i, &slot) in arrays.slots.iter().enumerate() {
        let slot = SlotId::new(slot as u64);
        let bits = |elements| match elements {
            Ok(Elements::F16(x)) => x.iter().map(|x: &f16| x.to_bits()).collect::<Vec<_>>(),
            other => panic!("{other:?}"),
        };
        let wanted: Vec<u16> = kept.iter().cycle().take(24).map(|x| x.to_bits()).collect();
        assert_eq!(bits(cpu.slot(PlaneName::K, layer, slot)), wanted);
        let wanted: Vec<u16> = v[i * 24..(i + 1) * 24].iter().map(|x| x.to_bits()).collect();
        assert_eq!(bits(cpu.slot(PlaneName::V, layer, slot)), wanted);
    }
}

/// A pool, and how a sequence of 230 tokens is computed in it.
#[derive(Clone, Copy, Debug)]
struct Way {
    layout: Layout,
    page_size: u32,
    threads: usize,
    /// Tokens of each step but the last.
    chunk: u32,
    window: Option<u32>,
}

/// Bits of all outputs and log-sum-exps of the sequence.
fn computed(way: Way) -> (Vec<u32>, Vec<u32>) {
    let (tokens, kv_heads, head_dim, q_heads) = (230, 4, 64, 12);
    let config = PoolConfig {
        shape: KvShape::heads(kv_heads, head_dim),
        page_size: way.page_size,
        dtype: KvDtype::Bf16,
        capacity: Capacity::Pages(tokens + 7),
        layout: way.layout,
        ..Default::default()
    };
    let pool = config.layout().expect("a valid pool");
    let table = TableShape::new(way.page_size, 1, tokens, tokens.into()).expect("a small table");
    let mut cpu =
        CpuOptions::with_threads(way.threads).open(&pool, &table, 2).expect("a small pool");
    let mut planner = Planner::new(&pool, &table, u64::from(way.page_size));
    let sequence = planner.admit().expect("a row");
    let mut rng = Rng::new(1);
    let (q_width, kv_width) = ((q_heads * head_dim) as usize, (kv_heads * head_dim) as usize);
    let [k, v] = [(); 2].map(|()| numbers(&mut rng, tokens as usize * kv_width));
    let q = numbers(&mut rng, tokens as usize * q_width);
    let attend = Attend { window: way.window, ..Attend::new(q_heads, head_dim) };
    let mut out = vec![0.0; q.len()];
    let mut lse = vec![0.0; (tokens * q_heads) as usize];
    for start in (0..tokens).step_by(way.chunk as usize) {
        let len = way.chunk.min(tokens - start);
        let plan: OwnedPlan = planner.plan(&[Item::Extend { sequence, len }]);
        let plan = plan.plan();
        let rows = |width: usize| start as usize * width..(start + len) as usize * width;
        let layer = LayerId::new(0);
        cpu.begin(&plan).expect("a valid plan");
        cpu.store_cache(&plan, layer, k[rows(kv_width)].into(), v[rows(kv_width)].into())
            .expect("a valid store");
        let out = CpuRowsMut::from(&mut out[rows(q_width)]);
        let lse = &mut lse[rows(q_heads as usize)];
        cpu.attend(&plan, layer, &attend, q[rows(q_width)].into(), out, Some(lse))
            .expect("valid attention");
        cpu.end(StepEnd::Complete(plan.step()));
    }
    let bits = |numbers: Vec<f32>| numbers.into_iter().map(f32::to_bits).collect();
    (bits(out), bits(lse))
}

#[test]
fn results_depend_on_nothing_but_the_row_and_what_it_sees() {
    for window in [None, Some(50)] {
        // One page and one step: contiguous K and V.
        let plain =
            Way { layout: Layout::LayerFirst, page_size: 256, threads: 1, chunk: 230, window };
        let contiguous = computed(plain);
        for layout in [Layout::LayerFirst, Layout::PageFirst] {
            for (page_size, threads, chunk) in
                [(1, 5, 230), (3, 2, 230), (16, 1, 1), (64, 3, 7), (7, 5, 100), (1, 1, 64)]
            {
                let way = Way { layout, page_size, threads, chunk, ..plain };
                assert!(computed(way) == contiguous, "{way:?}");
            }
        }
    }
}

#[test]
fn the_last_of_2_32_positions_are_seen() {
    // One page for all of them: the words of the directory name chunk 0, and its only word names page 0.
    for page_size in [1024, 1000] {
        let capacity = Capacity::Pages(1);
        let config =
            PoolConfig { shape: KvShape::heads(1, 8), page_size, capacity, ..Default::default() };
        let layout = config.layout().expect("a valid pool");
        let chunks_per_row = u32::MAX / page_size + 1;
        let table = TableShape { rows: 1, chunks_per_row, chunk_pages: 1, chunk_count: 1 };
        let mut cpu = CpuOptions::with_threads(1).open(&layout, &table, 1).expect("a small pool");
        let (kv_len, row) = (u32::MAX, RowId::new(0));
        let last = kv_len - 1;
        let plan = BatchPlan {
            step: StepId::new(1),
            rows: &[BatchRow { row, qo_start: 0, extend_len: 1, kv_len }],
            tokens: &[TokenId::new(1)],
            positions: &[last],
            slot_mapping: SlotMapping::I32(&[(last % page_size) as i32]),
            table_writes: &[],
            shared: kvarena::SharedSpans::default(),
            masks: &[],
        };
        cpu.begin(&plan).expect("the plan is sound");
        let (layer, attend) = (LayerId::new(0), Attend { window: Some(70), ..Attend::new(1, 8) });
        let (one, mut out) = ([1.0_f32; 8], [7.0_f32; 8]);
        let v = [140.0_f32; 8];
        // A key of 0 beside 69 others that are 0 too: the mean of one value of 140 and 69 of 0.
        let zero = [0.0_f32; 8];
        cpu.store_cache(&plan, layer, zero[..].into(), v[..].into()).expect("they fit");
        let (q, out_rows) = (one[..].into(), out[..].as_mut().into());
        cpu.attend(&plan, layer, &attend, q, out_rows, None).expect("it makes sense");
        assert!(out.iter().all(|x| (x - 2.0).abs() < 1e-5), "page_size {page_size}: {out:?}");
    }
}

#[test]
fn what_lies_past_a_position_has_no_effect() {
    let arrays = Arrays::good();
    let layer = LayerId::new(0);
    let mut rng = Rng::new(4);
    let (q, kv) = (numbers(&mut rng, 5 * 48), numbers(&mut rng, 5 * 24));
    let out = |kv: &[f32]| {
        let mut cpu = opened();
        cpu.begin(&arrays.plan()).expect("a valid plan");
        let rows = CpuRows::from(kv);
        cpu.store_cache(&arrays.plan(), layer, rows, rows).expect("a valid store");
        let mut out = vec![0.0; q.len()];
        let out_rows = CpuRowsMut::from(&mut out[..]);
        let (q, attend) = (CpuRows::from(&q[..]), Attend::new(4, 12));
        cpu.attend(&arrays.plan(), layer, &attend, q, out_rows, None).expect("valid attention");
        out
    };
    let plain = out(&kv);
    for poison in [f32::NAN, f32::INFINITY] {
        let mut poisoned = kv.clone();
        poisoned[3 * 24..].fill(poison);
        let poisoned = out(&poisoned);
        assert_eq!(poisoned[..3 * 48], plain[..3 * 48]);
        assert!(poisoned[3 * 48..].iter().all(|x| x.is_nan()), "the reference hides {poison}");
    }
}

#[test]
fn pages_move_between_pools_of_any_layout() {
    let mut rng = Rng::new(3);
    for (from, to) in [
        (Layout::LayerFirst, Layout::PageFirst),
        (Layout::PageFirst, Layout::LayerFirst),
        (Layout::PageFirst, Layout::PageFirst),
    ] {
        let opened = |layout, pages| {
            let config = PoolConfig {
                layers: 3,
                shape: KvShape::heads(2, 5),
                page_size: 4,
                capacity: Capacity::Pages(pages),
                layout,
                ..Default::default()
            };
            let pool = config.layout().expect("a valid pool");
            let table = TableShape::new(4, 1, 8, 8).expect("a small table");
            let cpu = CpuOptions::default().open(&pool, &table, 1).expect("a small pool");
            (cpu, pool)
        };
        let ((mut source, pool), (mut target, other)) = (opened(from, 5), opened(to, 7));
        let mut bytes = vec![0; pool.page_bytes() as usize];
        bytes.fill_with(|| rng.below(120) as u8);
        source.write_page(PageId::new(3), &bytes).expect("a page");
        let mut moved = vec![0; bytes.len()];
        source.read_page(PageId::new(3), &mut moved).expect("a page");
        assert_eq!(moved, bytes);
        target.write_page(PageId::new(6), &moved).expect("a page");
        for (kv, layer) in
            [PlaneName::K, PlaneName::V].into_iter().flat_map(|kv| (0..3).map(move |l| (kv, l)))
        {
            for offset in 0..4 {
                let (a, b) =
                    (pool.slot(PageId::new(3), offset), other.slot(PageId::new(6), offset));
                let layer = LayerId::new(layer);
                assert_eq!(source.slot(kv, layer, a), target.slot(kv, layer, b));
            }
        }
        // The other pages stay as they were.
        assert!(all_bytes(&target)[..6 * bytes.len()].iter().all(|&x| x == 0));
    }
}
