//! Groups of layers: attention is the same whatever groups layers are in, and what does not fit them is refused.

use kvarena::backend::CpuError;
use kvarena::{
    Attend, Backend, Capacity, Cpu, CpuOptions, Engine, EngineConfig, EngineError, Extend, Groups,
    KvDtype, KvShape, LayerId, Namespace, Null, OwnedPlan, PlanError, PoolConfig, PrefixMode,
    Reach, SeqKey, SlotMapping, StepScratch, TokenId,
};

/// Layers 1, 3 and 4 read a window.
const WINDOW: u32 = 5;
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

/// Group 1 has three layers where group 0 has two: its second track has a lane that nobody uses.
fn windows() -> Groups {
    Groups::new(&[Reach::All, Reach::Window(WINDOW)], &WINDOWED.map(u8::from)).expect("two groups")
}

/// Numbers that depend on what they are of.
fn numbers(kind: u64, layer: u32, token: TokenId, position: u32, count: usize) -> Vec<f32> {
    let mut x =
        kind << 60 ^ u64::from(layer) << 40 ^ u64::from(token.raw()) << 20 ^ u64::from(position);
    let number = |_| {
        x = (x ^ x >> 27).wrapping_mul(0x9E37_79B9_7F4A_7C15).wrapping_add(1);
        (x >> 40) as f32 / (1_u64 << 23) as f32 - 1.0
    };
    (0..count).map(number).collect()
}

/// One step of both: stores and attends to every layer. The attention's bits.
fn step(engine: &mut Engine<Cpu>, items: &[Extend]) -> Vec<u32> {
    let (mut scratch, mut padded) = (StepScratch::new(), StepScratch::new());
    let plan = engine.plan_batch(&mut scratch, items).expect("there is room");
    let plan = plan.padded(&mut padded, items.len() + 1, plan.token_count() + 2);
    // As another process reads it.
    let bytes = OwnedPlan::from(&plan);
    let plan = OwnedPlan::from_bytes(bytes.as_bytes()).expect("it was written");
    let (plan, tokens) = (plan.plan(), bytes.plan().token_count());
    let mut bits = Vec::new();
    for layer in 0..WINDOWED.len() as u32 {
        let rows = |kind: u64, heads: usize| -> Vec<f32> {
            let at = plan.tokens.iter().zip(plan.positions);
            at.flat_map(|(&token, &at)| numbers(kind, layer, token, at, heads * DIM)).collect()
        };
        let (k, v, q) = (rows(1, KV_HEADS), rows(2, KV_HEADS), rows(3, Q_HEADS));
        let window = WINDOWED[layer as usize].then_some(WINDOW);
        let attend = Attend { window, ..Attend::new(Q_HEADS as u32, DIM as u32) };
        let (backend, layer) = (engine.backend_mut(), LayerId::new(layer));
        backend.store_cache(&plan, layer, k[..].into(), v[..].into()).expect("rows fit");
        let mut out = vec![0.0; tokens * Q_HEADS * DIM];
        backend
            .attend(&plan, layer, &attend, q[..].into(), (&mut out[..]).into(), None)
            .expect("rows fit");
        bits.extend(out.into_iter().map(f32::to_bits));
    }
    let step = plan.step();
    engine.commit(step).expect("it is open");
    engine.complete(step).expect("it is committed");
    engine.verify().expect("all invariants hold");
    bits
}

/// Two conversations in chunks, decoded together, one of them forked.
fn run(engine: &mut Engine<Cpu>) -> Vec<u32> {
    let token = |seed: u32, i: u32| TokenId::new(1 + (seed * 31 + i * 7) % 97);
    let mut bits = Vec::new();
    let mut seqs: Vec<SeqKey> = Vec::new();
    for seed in [1, 2] {
        let prompt: Vec<_> = (0..23 + seed).map(|i| token(seed, i)).collect();
        let seq = engine.admit(Namespace::default(), &prompt, 40).expect("there is room");
        for len in [9, 1, 13 + seed] {
            bits.extend(step(engine, &[Extend { seq, len }]));
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
        bits.extend(step(engine, &items));
    }
    for seq in seqs {
        engine.finish(seq).expect("it runs");
        engine.verify().expect("all invariants hold");
    }
    bits
}

#[test]
fn attention_does_not_depend_on_groups() {
    for page_size in [1, 4, 16] {
        for prefix in [PrefixMode::Radix, PrefixMode::None] {
            let [one, several] = [Groups::ONE, windows()].map(|groups| {
                let config = config(groups, page_size, prefix);
                run(&mut Engine::new(config, CpuOptions::with_threads(1)).expect("a small pool"))
            });
            assert_eq!(one.len(), several.len());
            assert!(one == several, "attention differs, pages of {page_size}, {prefix:?}");
        }
    }
}

#[test]
fn what_does_not_fit_the_groups_is_refused() {
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
        let error = PlanError::Reach { layer: LayerId::new(layer), group: 1, reach, window };
        assert_eq!(attend(layer, window), Err(CpuError::Plan(error)));
    }
    // A layer that keeps everything may be read through any window.
    for (layer, window) in [(0, None), (2, Some(1)), (4, Some(WINDOW))] {
        assert_eq!(attend(layer, window), Ok(()));
    }
    // Slots for fewer tracks, or of none.
    let slots = [0; 3];
    for track_slots in [SlotMapping::I32(&slots), SlotMapping::I32(&[])] {
        let plan = kvarena::BatchPlan { track_slots, ..plan };
        let (k, error) = (vec![0.0; 3 * KV_HEADS * DIM], track_slots.len());
        let stored =
            engine.backend_mut().store_cache(&plan, LayerId::new(0), k[..].into(), k[..].into());
        let error = PlanError::TrackSlots { slots: error, wanted: 6 };
        assert_eq!(stored, Err(CpuError::Plan(error)));
    }
}

#[test]
fn a_place_takes_a_page_of_each_track() {
    let mut engine =
        Engine::new(config(windows(), 4, PrefixMode::Radix), Null).expect("a small pool");
    let prompt: Vec<_> = (0..10).map(TokenId::new).collect();
    // Three places of three tracks each, four promised.
    let admission = engine.admission(Namespace::default(), &prompt, 16).expect("it is right");
    assert_eq!((admission.lacking_pages, admission.available_pages), (12, 600));
    let seq = engine.admit(Namespace::default(), &prompt, 16).expect("there is room");
    assert_eq!((engine.promised(seq), engine.available()), (Ok(12), 588));
    let mut scratch = StepScratch::new();
    let plan = engine.plan_batch(&mut scratch, &[Extend { seq, len: 10 }]).expect("room");
    let step = plan.step();
    assert_eq!((engine.promised(seq), engine.available()), (Ok(3), 588));
    let pages: Vec<Vec<_>> =
        (0..3).map(|track| engine.track_table(seq, track).expect("it runs").collect()).collect();
    assert!(pages.iter().all(|pages| pages.len() == 3), "{pages:?}");
    assert_eq!(engine.stats().private_pages, 9);
    engine.abort(step).expect("it is open");
    assert_eq!((engine.promised(seq), engine.available()), (Ok(12), 588 - 9));
    engine.complete(step).expect("it is closed");
    assert_eq!((engine.promised(seq), engine.available()), (Ok(12), 588));
    // Only group 0's pages are cached, so that nothing is found.
    let step = engine.plan_batch(&mut scratch, &[Extend { seq, len: 10 }]).expect("room").step();
    engine.commit(step).expect("it is open");
    engine.complete(step).expect("it is committed");
    engine.finish(seq).expect("it runs");
    let stats = engine.stats();
    assert_eq!((stats.evictable_pages, stats.free_pages), (2, 598));
    assert_eq!(engine.match_prefix(Namespace::default(), &prompt).pages(), 0);
    engine.verify().expect("all invariants hold");
}

#[test]
fn pages_of_more_tracks_than_there_are_pages_are_out_of_pages() {
    let pool =
        PoolConfig { capacity: Capacity::Pages(5), ..config(windows(), 4, PrefixMode::Radix).pool };
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
