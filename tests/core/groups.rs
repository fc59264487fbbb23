//! Groups of layers: attention does not depend on the groups; a sequence keeps only pages that later tokens read; the
//! backend rejects arguments that do not fit the groups.

use kvarena::backend::CpuError;
use kvarena::testkit::padded::padded;
use kvarena::testkit::poison::poison;
use kvarena::{
    Attend, Backend, Capacity, Cpu, CpuOptions, Engine, EngineConfig, EngineError, Extend, Groups, KvDtype, KvShape,
    LayerId, Namespace, Null, OwnedPlan, PlanError, PlanSize, PoolConfig, PrefixMode, Reach, Select, SeqKey, SlotId,
    SlotMapping, SparseBackend, StepScratch, TokenId,
};

const WINDOW: u32 = 5;
/// Whether a layer reads a window or a chunk. The others read all tokens.
const WINDOWED: [bool; 5] = [false, true, false, true, true];
const Q_HEADS: usize = 4;
const KV_HEADS: usize = 2;
const DIM: usize = 8;

fn config(groups: Groups, page_size: u32, prefix: PrefixMode) -> EngineConfig {
    let pool = PoolConfig {
        layers: 5,
        groups,
        shape: KvShape::heads(KV_HEADS as u32, DIM as u32),
        dtype: KvDtype::F32,
        page_size,
        capacity: Capacity::Pages(600),
        ..PoolConfig::default()
    };
    EngineConfig { prefix, max_tokens: 4096, ..pool.into() }
}

/// Group 1 has three layers and group 0 two: the second track of group 1 has an unused lane.
fn windows() -> Groups {
    limited(Reach::Window(WINDOW))
}

fn limited(reach: Reach) -> Groups {
    Groups::new(&[Reach::All, reach], &WINDOWED.map(u8::from)).expect("two groups")
}

/// Returns numbers that depend on their token, position and layer.
fn numbers(kind: u64, layer: u32, token: TokenId, position: u32, count: usize) -> Vec<f32> {
    let mut x = kind << 60 ^ u64::from(layer) << 40 ^ u64::from(token.raw()) << 20 ^ u64::from(position);
    let number = |_| {
        x = (x ^ x >> 27).wrapping_mul(0x9E37_79B9_7F4A_7C15).wrapping_add(1);
        (x >> 40) as f32 / (1_u64 << 23) as f32 - 1.0
    };
    (0..count).map(number).collect()
}

/// Runs one step: stores and attends in every layer. Returns the attention's bits.
fn step(engine: &mut Engine<Cpu>, reach: Reach, items: &[Extend]) -> Vec<u32> {
    let (mut scratch, mut padding) = (StepScratch::new(), StepScratch::new());
    let plan = engine.plan_batch(&mut scratch, items).expect("there is room");
    let size = PlanSize { rows: items.len() + 1, tokens: plan.token_count() + 2 };
    let plan = padded(&plan, &mut padding, size);
    // The plan is converted to bytes and back, as between processes.
    let bytes = OwnedPlan::from(&plan);
    let plan = OwnedPlan::from_bytes(bytes.as_bytes()).expect("the bytes are a plan");
    let (plan, tokens) = (plan.plan(), bytes.plan().token_count());
    let mut bits = Vec::new();
    for layer in 0..WINDOWED.len() as u32 {
        let rows = |kind: u64, heads: usize| -> Vec<f32> {
            let at = plan.tokens.iter().zip(plan.positions);
            at.flat_map(|(&token, &at)| numbers(kind, layer, token, at, heads * DIM)).collect()
        };
        let (k, v, q) = (rows(1, KV_HEADS), rows(2, KV_HEADS), rows(3, Q_HEADS));
        let plain = Attend::new(Q_HEADS as u32, DIM as u32);
        let attend = match reach {
            Reach::Window(size) if WINDOWED[layer as usize] => Attend { window: Some(size), ..plain },
            Reach::Chunk(size) if WINDOWED[layer as usize] => Attend { chunk: Some(size), ..plain },
            _ => plain,
        };
        let (backend, layer) = (engine.backend_mut(), LayerId::new(layer));
        backend.store_cache(&plan, layer, k[..].into(), v[..].into()).expect("rows fit");
        let mut out = vec![0.0; tokens * Q_HEADS * DIM];
        backend.attend(&plan, layer, &attend, q[..].into(), (&mut out[..]).into(), None).expect("rows fit");
        bits.extend(out.into_iter().map(f32::to_bits));
    }
    let step = plan.step();
    engine.commit(step).expect("it is open");
    engine.complete(step).expect("it is committed");
    engine.verify().expect("all invariants hold");
    poison(engine, |cpu, id, page| cpu.write_page(id, page).expect("the page exists"));
    bits
}

/// Prefills two sequences in chunks, decodes them together, and forks one of them. Returns the bits of all outputs.
fn run(engine: &mut Engine<Cpu>, reach: Reach) -> Vec<u32> {
    let token = |seed: u32, i: u32| TokenId::new(1 + (seed * 31 + i * 7) % 97);
    let mut bits = Vec::new();
    let mut seqs: Vec<SeqKey> = Vec::new();
    for seed in [1, 2] {
        let prompt: Vec<_> = (0..23 + seed).map(|i| token(seed, i)).collect();
        let seq = engine.admit(Namespace::default(), &prompt, 40).expect("there is room");
        for len in [9, 1, 13 + seed] {
            bits.extend(step(engine, reach, &[Extend { seq, len }]));
        }
        seqs.push(seq);
    }
    for i in 0..9 {
        if i == 4 {
            seqs.extend(engine.fork(seqs[0], 2, 50).expect("there is room").children);
            engine.complete(engine.newest_step()).expect("all is committed");
            engine.verify().expect("all invariants hold");
        }
        for (at, &seq) in (0..).zip(&seqs) {
            engine.append(seq, &[token(at, 100 + i)]).expect("there is room");
        }
        let items: Vec<_> = seqs.iter().map(|&seq| Extend { seq, len: 1 }).collect();
        bits.extend(step(engine, reach, &items));
    }
    for seq in seqs {
        engine.finish(seq).expect("it is live");
        engine.verify().expect("all invariants hold");
    }
    bits
}

#[test]
fn attention_does_not_depend_on_groups() {
    let ways = [Reach::Window(WINDOW), Reach::Chunk(8)].into_iter();
    for (reach, page_size) in ways.flat_map(|reach| [1, 4, 16].map(|size| (reach, size))) {
        for prefix in [PrefixMode::Radix, PrefixMode::None] {
            let [one, several] = [Groups::ONE, limited(reach)].map(|groups| {
                let config = config(groups, page_size, prefix);
                let engine = Engine::new(config, CpuOptions::with_threads(1));
                run(&mut engine.expect("a small pool"), reach)
            });
            assert_eq!(one.len(), several.len());
            assert!(one == several, "{reach:?} differs, pages of {page_size}, {prefix:?}");
            assert!(one.iter().all(|&bits| !f32::from_bits(bits).is_nan()));
        }
    }
}

#[test]
fn attention_that_does_not_match_the_groups_is_refused() {
    let config = config(windows(), 4, PrefixMode::Radix);
    let mut engine = Engine::new(config, CpuOptions::with_threads(1)).expect("a small pool");
    let seq = engine.admit(Namespace::default(), &[TokenId::new(1); 3], 0).expect("there is room");
    let mut scratch = StepScratch::new();
    let plan = engine.plan_batch(&mut scratch, &[Extend { seq, len: 3 }]).expect("there is room");
    assert_eq!(plan.track_slots.len(), 2 * 3);
    let (q, mut out) = (vec![0.0; 3 * Q_HEADS * DIM], vec![0.0; 3 * Q_HEADS * DIM]);
    let mut attend = |layer, window| {
        let attend = Attend { window, ..Attend::new(Q_HEADS as u32, DIM as u32) };
        let backend = engine.backend_mut();
        let (layer, out) = (LayerId::new(layer), (&mut out[..]).into());
        backend.attend(&plan, layer, &attend, q[..].into(), out, None)
    };
    let reach = Reach::Window(WINDOW);
    for (layer, window) in [(1, None), (3, Some(WINDOW + 1)), (4, Some(WINDOW - 1))] {
        let error = PlanError::Reach { layer: LayerId::new(layer), group: 1, reach, window, chunk: None };
        assert_eq!(attend(layer, window), Err(CpuError::Plan(error)));
    }
    // A layer that keeps all tokens may be read through any window, a layer of group 1 only through its own.
    for (layer, window) in [(0, None), (2, Some(1)), (4, Some(WINDOW))] {
        assert_eq!(attend(layer, window), Ok(()));
    }
    // Only layers that keep all tokens can be read through lists.
    let (select, mut positions) = (Select { q_heads: 4, top: 1, window: None }, [0; 2]);
    let (layer, q) = (LayerId::new(3), q[..].into());
    let error = PlanError::SparseGroup { layer, group: 1 };
    let selected = engine.backend_mut().select(&plan, layer, &select, q, &mut positions);
    assert_eq!(selected, Err(CpuError::Plan(error)));
    // A plan has slots for too few tracks, for none, or slots outside the pool.
    let slot_count = engine.backend().layout().slot_count();
    let past = SlotId::new(slot_count);
    let tracks = |slots| PlanError::TrackSlots { slots, wanted: 6 };
    for (slots, error) in [
        (&[0; 3][..], tracks(3)),
        (&[], tracks(0)),
        (&[0, 0, 0, 0, 0, past.raw() as i32], PlanError::Slot { slot: past, slot_count }),
    ] {
        let plan = kvarena::BatchPlan { track_slots: SlotMapping::I32(slots), ..plan };
        let k = [0.0; 3 * KV_HEADS * DIM];
        let stored = engine.backend_mut().store_cache(&plan, LayerId::new(0), k[..].into(), k[..].into());
        assert_eq!(stored, Err(CpuError::Plan(error)));
    }
}

#[test]
fn a_place_takes_a_page_of_each_track() {
    let mut engine = Engine::new(config(windows(), 4, PrefixMode::Radix), Null).expect("a small pool");
    let prompt: Vec<_> = (0..10).map(TokenId::new).collect();
    // The prompt needs three places with a page in each of three tracks; 16 tokens promise four places.
    let admission = engine.admission(Namespace::default(), &prompt, 16).expect("it is right");
    assert_eq!((admission.lacking_pages, admission.available_pages), (12, 600));
    let seq = engine.admit(Namespace::default(), &prompt, 16).expect("there is room");
    assert_eq!((engine.outstanding(seq), engine.available()), (Ok(12), 588));
    let mut scratch = StepScratch::new();
    let plan = engine.plan_batch(&mut scratch, &[Extend { seq, len: 10 }]).expect("room");
    let step = plan.step();
    assert_eq!((engine.outstanding(seq), engine.available()), (Ok(3), 588));
    let pages: Vec<Vec<_>> =
        (0..3).map(|track| engine.track_table(seq, track).expect("it is live").collect()).collect();
    assert!(pages.iter().all(|pages| pages.len() == 3), "{pages:?}");
    assert_eq!(engine.stats().private_pages, 9);
    engine.abort(step).expect("it is open");
    assert_eq!((engine.outstanding(seq), engine.available()), (Ok(12), 588 - 9));
    engine.complete(step).expect("it is closed");
    assert_eq!((engine.outstanding(seq), engine.available()), (Ok(12), 588));
    // The tree keeps two pages of group 0, and the tail at their end: one cell with a page in each of two tracks.
    let step = engine.plan_batch(&mut scratch, &[Extend { seq, len: 10 }]).expect("room").step();
    engine.commit(step).expect("it is open");
    engine.complete(step).expect("it is committed");
    engine.finish(seq).expect("it is live");
    let stats = engine.stats();
    assert_eq!((stats.evictable_pages, stats.free_pages, stats.cells), (4, 596, 1));
    assert_eq!(engine.match_prefix(Namespace::default(), &prompt).pages(), 2);
    engine.verify().expect("all invariants hold");
}

#[test]
fn a_prompt_whose_tracks_need_more_pages_than_the_pool_has_is_out_of_pages() {
    let pool = PoolConfig { capacity: Capacity::Pages(5), ..config(windows(), 4, PrefixMode::Radix).pool };
    let mut engine = Engine::new(pool, Null).expect("a small pool");
    let error = kvarena::Error::OutOfPages { wanted: 6, available: 5, after: None };
    let refused = engine.admit(Namespace::default(), &[TokenId::new(1); 5], 0);
    assert_eq!(refused, Err(error));
    let seq = engine.admit(Namespace::default(), &[TokenId::new(1); 4], 0).expect("3 of 5");
    engine.append(seq, &[TokenId::new(2)]).expect("there is room");
    let mut scratch = StepScratch::new();
    match engine.plan_batch(&mut scratch, &[Extend { seq, len: 5 }]) {
        Err(EngineError::Core(got)) => assert_eq!(got, error),
        other => panic!("{other:?}"),
    }
}

/// Creates an engine without K and V for a model with `all` layers that keep all tokens and `others` that do not.
fn null(all: usize, others: usize, reach: Reach, pages: u32) -> Engine<Null> {
    let layers = [vec![0; all], vec![1; others]].concat();
    let groups = Groups::new(&[Reach::All, reach], &layers).expect("both have layers");
    let pool =
        PoolConfig { layers: layers.len() as u32, groups, capacity: Capacity::Pages(pages), ..PoolConfig::default() };
    Engine::new(pool, Null).expect("a small pool")
}

/// Computes all tokens of a sequence in steps of at most 512; returns false if pages run out.
fn compute(engine: &mut Engine<Null>, seq: SeqKey) -> bool {
    let mut scratch = StepScratch::new();
    loop {
        let len = engine.extend_max(seq).expect("it is live").min(512);
        if len == 0 {
            return true;
        }
        let Ok(plan) = engine.plan_batch(&mut scratch, &[Extend { seq, len }]) else {
            return false;
        };
        let step = plan.step();
        engine.commit(step).expect("it is open");
        engine.complete(step).expect("it is committed");
    }
}

#[test]
fn a_sequence_holds_the_pages_that_later_tokens_read() {
    let (gpt_oss, gemma, scout) = (Reach::Window(128), Reach::Window(1024), Reach::Chunk(8192));
    // A page has 16 tokens. The sequence should have all its pages in group 0, and the tail in each other track.
    for (all, others, reach, tokens, pages) in [
        (12, 12, gpt_oss, 8192, 512 + 8),
        (10, 52, gemma, 8192, 512 + 6 * 64),
        (12, 36, scout, 8192, 512),
        (12, 36, scout, 8191, 512 + 3 * 512),
    ] {
        let mut engine = null(all, others, reach, 3000);
        let prompt: Vec<_> = (0..tokens).map(TokenId::new).collect();
        let seq = engine.admit(Namespace::default(), &prompt, tokens).expect("there is room");
        assert!(compute(&mut engine, seq));
        engine.verify().expect("all invariants hold");
        let stats = engine.stats();
        assert_eq!(stats.private_pages + stats.protected_pages, pages, "{reach:?}");
        let tail = engine.track_table(seq, 1).expect("it is live").count() as u32;
        assert_eq!((pages - 512) / tail.max(1), if tail > 0 { others.div_ceil(all) as u32 } else { 0 });
        // Released pages are available to other sequences. The sequence's promise counts them again, up to the maximum
        // that it can still need.
        let free = engine.stats().free_pages + engine.stats().evictable_pages;
        assert_eq!(engine.available(), free - engine.outstanding(seq).expect("it is live"));
        engine.finish(seq).expect("it is live");
        let (stats, tracks) = (engine.stats(), others.div_ceil(all) as u32);
        assert_eq!(stats.cached_pages - stats.cells * tracks, tokens / 16);
    }
}

#[test]
fn more_sequences_run_before_one_is_out_of_pages() {
    // Each sequence has a distinct prompt of 64 tokens and is extended to 8,192 tokens. Either all its tokens are
    // promised, or none. Both pools, of one group and of two, have the same number of bytes.
    let run = |mut engine: Engine<Null>, promise: u32| {
        let mut seqs = Vec::new();
        for seed in 0.. {
            let text: Vec<_> = (0..8192).map(|i| TokenId::new(seed * 8192 + i)).collect();
            let Ok(seq) = engine.admit(Namespace::default(), &text[..64], promise) else { break };
            engine.append(seq, &text[64..]).expect("there is room");
            if !compute(&mut engine, seq) {
                break; // A host would preempt a sequence now.
            }
            seqs.push(seq);
        }
        engine.verify().expect("all invariants hold");
        seqs.len()
    };
    // With one group a page of gpt-oss-20b has 24 layers, with two groups 12. For Gemma 3 27B these are 62 and 10.
    for (all, others, window, promise, times) in
        [(12, 12, 128, 0, 1.9), (10, 52, 1024, 0, 3.4), (12, 12, 128, 8192, 1.8), (10, 52, 1024, 8192, 2.9)]
    {
        let bytes: u32 = 20 * 512 * (all + others) as u32;
        let several = run(null(all, others, Reach::Window(window), bytes / all as u32), promise);
        let pool = PoolConfig {
            layers: (all + others) as u32,
            capacity: Capacity::Pages(bytes / (all + others) as u32),
            ..PoolConfig::default()
        };
        let one = run(Engine::new(pool, Null).expect("a small pool"), promise);
        assert_eq!(one, 20);
        println!("window {window}, promise {promise}: {several} sequences, {one} with one group");
        assert!(several as f64 >= times * one as f64, "{several} sequences, not {times} x {one}");
    }
}

#[test]
fn a_plan_beyond_promise_ahead_takes_unpromised_pages() {
    let groups = Groups::new(&[Reach::All, Reach::Window(4)], &[0, 1]).expect("both have layers");
    let pool = PoolConfig { layers: 2, groups, page_size: 4, capacity: Capacity::Pages(30), ..PoolConfig::default() };
    let config = EngineConfig { promise_ahead: 8, ..pool.into() };
    let mut engine = Engine::new(config, Null).expect("a small pool");
    let prompt: Vec<_> = (0..64).map(TokenId::new).collect();
    // Group 0 needs 16 pages. The window needs at most 4: for 3 tokens before the next one, and for 8 planned ahead.
    let seq = engine.admit(Namespace::default(), &prompt, 64).expect("20 of 30");
    assert_eq!((engine.outstanding(seq), engine.available()), (Ok(20), 10));
    let mut scratch = StepScratch::new();
    // The plan takes 10 pages of each group. 6 pages of the window are beyond the promise.
    let step = engine.plan_batch(&mut scratch, &[Extend { seq, len: 40 }]).expect("room").step();
    assert_eq!((engine.outstanding(seq), engine.available()), (Ok(6), 4));
    let refused = engine.plan_batch(&mut scratch, &[Extend { seq, len: 24 }]);
    let error = kvarena::Error::OutOfPages { wanted: 12, available: 10, after: None };
    assert!(matches!(refused, Err(EngineError::Core(got)) if got == error), "{refused:?}");
    // Pages that no later token reads return when the step is complete. The promise counts three of them again from
    // the commit on.
    engine.commit(step).expect("it is open");
    assert_eq!((engine.outstanding(seq), engine.available_after(step)), (Ok(9), 10));
    engine.complete(step).expect("it is committed");
    assert_eq!((engine.outstanding(seq), engine.available()), (Ok(9), 10));
    engine.verify().expect("all invariants hold");
}
