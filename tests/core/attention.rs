//! The CPU backend satisfies the contract of backends, and computes the same numbers for any layout of the pool.
//! `refusals.rs` tests the rejected calls.

use std::env;
use std::process::Command;

use super::seeds;
use super::small_cpu::{self, Arrays, all_bytes, opened};
use half::f16;
use kvarena::backend::{Backend, CpuError, CpuPath, CpuRows, CpuRowsMut, Elements, OpenBackend, PATH_VARIABLE};
use kvarena::id::RowId;
use kvarena::layout::{KvScales, Layout, PlaneName, Scaling, TableShape};
use kvarena::plan::{BatchRow, OwnedPlan, SlotMapping, StepEnd};
use kvarena::testkit::contract::{
    Case, Filter, check_backend, check_cases, check_rotated, check_served, check_sparse_backend,
};
use kvarena::testkit::late::LateOptions;
use kvarena::testkit::planner::{Item, Planner};
use kvarena::testkit::posted::PostedOptions;
use kvarena::testkit::rng::Rng;
use kvarena::{
    Attend, BatchPlan, Capacity, CpuOptions, KvDtype, KvShape, LayerId, PageId, PoolConfig, SlotId, StepId, TokenId,
};

#[test]
fn cpu_keeps_the_contract_on_every_path_of_the_machine() {
    for path in CpuPath::available() {
        let report = check_backend(options(path), seeds(65, 260));
        println!("CPU path {}: {report}", path.name());
        assert!(report.rows > 380 * report.runs, "{report}");
    }
}

/// Moves take effect at the last legal moment, or after a call of `moved`.
#[test]
fn late_moves_keep_the_contract() {
    let options = |case: &Case| {
        let (scales, labels) = (case.scales(), case.labels());
        LateOptions(CpuOptions { scales, labels, ..CpuOptions::with_threads(3) })
    };
    println!("{}", check_backend(options, seeds(65, 260)));
    println!("{}", check_cases(&Filter::FP8, options, seeds(10, 40)));
    println!("{}", check_cases(&Filter::ALL.in_groups(), options, seeds(10, 40)));
}

/// A host does the work of an outbox late, from bytes, on another thread.
#[test]
fn posted_work_keeps_the_contract() {
    let options = |case: &Case| {
        let (scales, labels) = (case.scales(), case.labels());
        PostedOptions(CpuOptions { scales, labels, ..CpuOptions::with_threads(1) })
    };
    println!("{}", check_backend(options, seeds(30, 130)));
    println!("{}", check_cases(&Filter::FP8, options, seeds(10, 40)));
    println!("{}", check_cases(&Filter::ALL.in_groups(), options, seeds(20, 60)));
}

/// Layers form several groups. The tests fill released pages of a group with NaN.
#[test]
fn cpu_keeps_the_contract_in_groups() {
    for path in CpuPath::available() {
        let report = check_cases(&Filter::ALL.in_groups(), options(path), seeds(25, 100));
        println!("CPU path {}: {report}", path.name());
        assert!(report.rows > 380 * report.runs, "{report}");
        let report = check_served(true, options(path), seeds(4, 12), |_| {});
        println!("{report}");
        assert!(report.rows > 800 * report.runs, "{report}");
        for (full, limited) in [(64, 128), (256, 64), (20, 96)] {
            check_cases(&Filter::head_dims(full, limited), options(path), seeds(3, 20));
        }
        let labels = Filter::LABELS.in_groups();
        println!("{}", check_sparse_backend(&labels, options(path), seeds(10, 40)));
    }
}

#[test]
fn cpu_rotates_and_stores_rows() {
    for path in CpuPath::available().take(1) {
        let report = check_rotated(&Filter::HEADS, options(path), seeds(15, 60));
        println!("{report}");
        let groups = Filter::HEADS.in_groups();
        println!("{}", check_rotated(&groups, options(path), seeds(5, 20)));
    }
}

/// An engine plans the steps of texts that share prefixes.
#[test]
fn an_engine_serves_texts_over_the_cpu() {
    for path in CpuPath::available() {
        let report = check_served(false, options(path), seeds(4, 12), |_| {});
        println!("{report}");
        assert!(report.rows > 800 * report.runs, "{report}");
    }
}

#[test]
fn cpu_reads_the_positions_of_a_selection() {
    for path in CpuPath::available() {
        let report = check_sparse_backend(&Filter::LABELS, options(path), seeds(30, 120));
        println!("{report}");
        assert!(report.rows > 400 * report.runs, "{report}");
    }
}

fn options(path: CpuPath) -> impl Fn(&Case) -> CpuOptions {
    move |case| {
        let (scales, labels) = (case.scales(), case.labels());
        CpuOptions { path: Some(path), scales, labels, ..CpuOptions::with_threads(3) }
    }
}

/// Child process of the test below: prints the path of the backend that its environment selects, or the error.
#[test]
#[ignore = "run by the_environment_names_a_path"]
fn print_path() {
    let (layout, table) = small_cpu::pool();
    match CpuOptions::with_threads(1).open(&layout, &table, 1) {
        Ok(cpu) => println!("path: {}", cpu.path().name()),
        Err(error) => println!("path: {error}"),
    }
}

#[test]
fn the_environment_names_a_path() {
    let shown = |name: Option<&str>| {
        let mut child = Command::new(env::current_exe().expect("this program"));
        child.args(["--ignored", "--exact", "attention::print_path", "--nocapture"]);
        child.env_remove(PATH_VARIABLE).envs(name.map(|name| (PATH_VARIABLE, name)));
        let output = child.output().expect("it runs");
        let text = String::from_utf8(output.stdout).expect("it prints text");
        let path = text.lines().find_map(|line| line.split_once("path: "));
        path.expect("it prints a path").1.to_owned()
    };
    println!("CPU paths: {:?}", CpuPath::available().collect::<Vec<_>>());
    let fastest = CpuPath::available().last().expect("every machine has a path");
    assert_eq!(shown(None), fastest.name());
    for path in CpuPath::ALL {
        let has = CpuPath::available().any(|other| other == path);
        let error = CpuError::Path { path }.to_string();
        assert_eq!(shown(Some(path.name())), if has { path.name() } else { &error });
    }
    let no_name = "KVARENA_CPU_PATH is \"sse9\", which is none of portable, neon, avx2, avx512";
    assert_eq!(shown(Some("sse9")), no_name);
    let missing = CpuError::Path { path: CpuPath::Neon }.to_string();
    assert_eq!(missing, "this machine has no instructions for the path neon");
    // The option overrides the environment.
    let (layout, table) = small_cpu::pool();
    let options = CpuOptions { path: Some(CpuPath::Portable), ..CpuOptions::with_threads(1) };
    let cpu = options.open(&layout, &table, 1).expect("every machine has the path");
    assert_eq!(cpu.path(), CpuPath::Portable);
}

fn numbers(rng: &mut Rng, len: usize) -> Vec<f32> {
    (0..len).map(|_| rng.below(2000) as f32 / 500.0 - 2.0).collect()
}

#[test]
fn stores_convert_to_the_nearest_and_copy_their_own_type_bit_by_bit() {
    let arrays = Arrays::good();
    let mut cpu = opened();
    cpu.begin(&arrays.plan()).expect("a valid plan");
    // `wide` has ties, an overflow, the smallest subnormal and minus zero, and `kept` has the same numbers rounded to
    // f16. V has NaNs; a conversion would change the bits of signalling NaNs.
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

/// The computation of a sequence: a pool, and the division into steps.
#[derive(Clone, Copy, Debug)]
struct Setup {
    layout: Layout,
    page_size: u32,
    threads: usize,
    len: u32,
    /// Number of tokens of the first step, which has no attention.
    unread: u32,
    /// Number of tokens of each later step except the last.
    chunk: u32,
    window: Option<u32>,
    path: CpuPath,
    dtype: KvDtype,
    scaling: Scaling,
    /// Numbers of kv heads, query heads and elements of a head.
    heads: [u32; 3],
}

/// Returns the bits of all outputs and log-sum-exps of the sequence.
fn computed(setup: Setup) -> Vec<u32> {
    let Setup { layout, page_size, threads, len, unread, chunk, window, path, dtype, scaling, .. } = setup;
    let [kv_heads, q_heads, head_dim] = setup.heads;
    let config = PoolConfig {
        shape: KvShape::heads(kv_heads, head_dim),
        page_size,
        dtype,
        scaling,
        capacity: Capacity::Pages(len.div_ceil(page_size) + 7),
        layout,
        ..Default::default()
    };
    let pool = config.layout().expect("a valid pool");
    let table = TableShape::new(page_size, 1, len, len.into()).expect("a small table");
    // The scales are not powers of two, so that products are rounded.
    let scales = (0..2 * kv_heads).map(|i| 0.011 + 0.003 * i as f32).collect();
    let scales = KvScales::new(1, kv_heads, scales).expect("they are above 0");
    let given = dtype.is_quantised() && scaling == Scaling::Static;
    let scales = given.then_some(scales);
    let options = CpuOptions { path: Some(path), scales, ..CpuOptions::with_threads(threads) };
    let mut cpu = options.open(&pool, &table, 2).expect("a small pool");
    let mut planner = Planner::new(&pool, &table, u64::from(page_size));
    let sequence = planner.admit().expect("a row");
    let mut rng = Rng::new(1);
    let (q_width, kv_width) = ((q_heads * head_dim) as usize, (kv_heads * head_dim) as usize);
    let [k, v] = [(); 2].map(|()| numbers(&mut rng, len as usize * kv_width));
    let q = numbers(&mut rng, (len - unread) as usize * q_width);
    let attend = Attend { window, ..Attend::new(q_heads, head_dim) };
    let (mut out, mut lse) = (vec![0.0; q.len()], vec![0.0; ((len - unread) * q_heads) as usize]);
    let mut start = 0;
    while start < len {
        let end = if start < unread { unread } else { len.min(start + chunk) };
        let plan: OwnedPlan = planner.plan(&[Item::Extend { sequence, len: end - start }]);
        let (plan, layer) = (plan.plan(), LayerId::new(0));
        let rows = |from: u32, width: usize| (start - from) as usize * width..(end - from) as usize * width;
        let kv = rows(0, kv_width);
        cpu.begin(&plan).expect("a valid plan");
        cpu.store_cache(&plan, layer, k[kv.clone()].into(), v[kv].into()).expect("a valid store");
        if start >= unread {
            let rows_of_q = rows(unread, q_width);
            let out = CpuRowsMut::from(&mut out[rows_of_q.clone()]);
            let lse = &mut lse[rows(unread, q_heads as usize)];
            cpu.attend(&plan, layer, &attend, q[rows_of_q].into(), out, Some(lse)).expect("valid attention");
        }
        cpu.end(StepEnd::Complete(plan.step()));
        start = end;
    }
    out.into_iter().chain(lse).map(f32::to_bits).collect()
}

#[test]
fn results_depend_only_on_the_row_and_its_context() {
    let dtypes = [
        (KvDtype::Bf16, Scaling::Static, [4, 12, 64]),
        (KvDtype::Fp8E4M3, Scaling::Static, [2, 4, 32]),
        (KvDtype::Fp8E4M3, Scaling::ByToken, [2, 4, 32]),
        (KvDtype::F32, Scaling::Static, [2, 2, 20]),
    ];
    let cases = CpuPath::available().flat_map(|path| dtypes.map(|dtype| (path, dtype)));
    for (path, (dtype, scaling, heads)) in cases {
        for window in [None, Some(50)] {
            // With one page and one step, K and V are contiguous.
            let (layout, page_size, threads, len) = (Layout::LayerFirst, 256, 1, 230);
            let chunk = len;
            let plain =
                Setup { layout, page_size, threads, len, unread: 0, chunk, window, path, dtype, scaling, heads };
            let contiguous = computed(plain);
            for layout in [Layout::LayerFirst, Layout::PageFirst] {
                for (page_size, threads, chunk) in
                    [(1, 5, 230), (3, 2, 230), (16, 1, 1), (64, 3, 7), (7, 5, 100), (1, 1, 64)]
                {
                    let setup = Setup { layout, page_size, threads, chunk, ..plain };
                    assert!(computed(setup) == contiguous, "{setup:?}");
                }
            }
        }
    }
}

/// Computes the last tokens of a sequence of several segments in chunks of several sizes, by several threads.
#[test]
fn segments_of_a_long_row_join_to_the_same_bits_for_any_threads_and_steps() {
    let (len, unread) = (2_080, 2_060);
    for path in CpuPath::available() {
        for dtype in [KvDtype::F32, KvDtype::F16, KvDtype::Bf16, KvDtype::Fp8E4M3] {
            for window in [None, Some(1_060)] {
                let (layout, page_size, scaling, heads) = (Layout::PageFirst, 16, Scaling::Static, [2, 4, 64]);
                let (threads, chunk) = (1, len - unread);
                let plain =
                    Setup { layout, page_size, threads, len, unread, chunk, window, path, dtype, scaling, heads };
                let whole = computed(plain);
                for (threads, chunk) in [(1, 1), (3, 5), (2, 10), (2, 20)] {
                    let setup = Setup { threads, chunk, ..plain };
                    assert!(computed(setup) == whole, "{setup:?}");
                }
            }
        }
    }
}

#[test]
fn the_last_of_2_32_positions_are_seen() {
    // All positions are in one page: each word of the directory points to leaf 0, whose only word points to page 0.
    for page_size in [1024, 1000] {
        let capacity = Capacity::Pages(1);
        let config = PoolConfig { shape: KvShape::heads(1, 8), page_size, capacity, ..Default::default() };
        let layout = config.layout().expect("a valid pool");
        let leaves_per_row = u32::MAX / page_size + 1;
        let table = TableShape { rows: 1, leaves_per_row, leaf_pages: 1, leaf_count: 1, tracks: 1, state_pages: 0 };
        let mut cpu = CpuOptions::with_threads(1).open(&layout, &table, 1).expect("a small pool");
        let (kv_len, row) = (u32::MAX, RowId::new(0));
        let last = kv_len - 1;
        let plan = BatchPlan {
            track_slots: SlotMapping::I32(&[]),
            step: StepId::new(1),
            rows: &[BatchRow { row, qo_start: 0, extend_len: 1, kv_len }],
            tokens: &[TokenId::new(1)],
            positions: &[last],
            slot_mapping: SlotMapping::I32(&[(last % page_size) as i32]),
            table_writes: &[],
            shared: kvarena::plan::SharedSpans::default(),
            masks: &[],
        };
        cpu.begin(&plan).expect("the plan is sound");
        let (layer, attend) = (LayerId::new(0), Attend { window: Some(70), ..Attend::new(1, 8) });
        let (one, mut out) = ([1.0_f32; 8], [7.0_f32; 8]);
        let v = [140.0_f32; 8];
        // The window has 70 tokens with keys of 0, so the output is the mean of their values: one is 140, and 69 are 0.
        let zero = [0.0_f32; 8];
        cpu.store_cache(&plan, layer, zero[..].into(), v[..].into()).expect("they fit");
        let (q, out_rows) = (one[..].into(), out[..].as_mut().into());
        cpu.attend(&plan, layer, &attend, q, out_rows, None).expect("the call is valid");
        assert!(out.iter().all(|x| (x - 2.0).abs() < 1e-5), "page_size {page_size}: {out:?}");
    }
}

#[test]
fn keys_past_a_position_have_no_effect() {
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
        let is_visible = poisoned[3 * 48..].iter().all(|x| x.is_nan());
        assert!(is_visible, "outputs of later tokens must show {poison}");
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
        for (kv, layer) in [PlaneName::K, PlaneName::V].into_iter().flat_map(|kv| (0..3).map(move |l| (kv, l))) {
            for offset in 0..4 {
                let (a, b) = (pool.slot(PageId::new(3), offset), other.slot(PageId::new(6), offset));
                let layer = LayerId::new(layer);
                assert_eq!(source.slot(kv, layer, a), target.slot(kv, layer, b));
            }
        }
        // The other pages are unchanged.
        assert!(all_bytes(&target)[..6 * bytes.len()].iter().all(|&x| x == 0));
    }
}
