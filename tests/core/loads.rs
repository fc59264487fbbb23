//! Loads of pages from swap memory, over a backend that finishes them late. `puts` and `fetch` reject groups of layers.

use kvarena::testkit::late::{Late, LateOptions};
use kvarena::*;

fn text(own: u32) -> Vec<TokenId> {
    (0..13).map(|i| TokenId::new(own * 100 + i)).collect()
}

/// Computes all tokens of a sequence that are not cached, in one step.
fn compute(engine: &mut Engine<impl Backend>, scratch: &mut StepScratch, seq: SeqKey) {
    let len = engine.extend_max(seq).expect("it is live");
    let plan = engine.plan_batch(scratch, &[Extend { seq, len }]);
    let step = plan.expect("there is room").step();
    engine.commit(step).expect("it is open");
    engine.complete(step).expect("it is committed");
    engine.verify().expect("all invariants hold");
}

#[test]
fn stores_do_not_support_groups() {
    let groups = Groups::new(&[Reach::All, Reach::Window(4)], &[0, 1]).expect("two groups");
    let capacity = Capacity::Pages(8);
    let pool = PoolConfig { layers: 2, groups, capacity, swap_pages: 8, ..PoolConfig::default() };
    let config = EngineConfig { hashing: Hashing::ALL.first().copied(), ..pool.into() };
    for swap_pages in [0, 8] {
        let pool = PoolConfig { swap_pages, ..pool };
        let mut engine = Engine::new(EngineConfig { pool, ..config }, Null).expect("a valid config");
        let refused = || EngineError::Core(Error::StoreGroups { groups: 2 });
        let before = engine.stats();
        assert_eq!(engine.puts(1, |_| panic!("there is no put")), Err(refused()));
        assert_eq!(engine.fetch(Namespace::default(), &text(0), 1), Err(refused()));
        assert_eq!(engine.stats(), before);
        engine.verify().expect("all invariants hold");
    }
}

#[test]
fn others_are_planned_while_a_sequence_loads() {
    let (capacity, swap_pages) = (Capacity::Pages(8), 8);
    let pool = PoolConfig { page_size: 4, capacity, swap_pages, ..PoolConfig::default() };
    let config = EngineConfig { max_tokens: 256, ..pool.into() };
    let options = LateOptions(CpuOptions::with_threads(1));
    let mut engine = Engine::new(config, options).expect("a valid config");
    let mut scratch = StepScratch::new();
    for own in 0..3 {
        let seq = engine.admit(Namespace::default(), &text(own), 0).expect("there is room");
        compute(&mut engine, &mut scratch, seq);
        assert_eq!(engine.is_loading(seq), Ok(false), "it waits for no load");
        engine.finish(seq).expect("it is live");
    }
    let loads = engine.admit(Namespace::default(), &text(0), 0).expect("there is room");
    assert_eq!(engine.cached_len(loads), Ok(12));
    assert_eq!(engine.is_loading(loads), Ok(false), "the load has not begun");
    let complete = engine.admit(Namespace::default(), &text(5)[..3], 0).expect("there is room");
    engine.load(&[loads, complete]).expect("there is room");
    assert_eq!(engine.is_loading(complete), Ok(false), "it waits for no load");
    assert_eq!(engine.is_loading(loads), Ok(true));
    let other = engine.admit(Namespace::default(), &text(7)[..3], 0).expect("there is room");
    compute(&mut engine, &mut scratch, other);
    // Each query of finished moves lets the backend finish one batch more.
    assert!((0..9).any(|_| engine.is_loading(loads) == Ok(false)), "the load ends");
    compute(&mut engine, &mut scratch, loads);
    assert_eq!(engine.is_loading(other), Ok(false), "it waits for no load");
    engine.finish(loads).expect("it is live");
    let gone = EngineError::Core(Error::UnknownSequence { seq: loads });
    assert_eq!(engine.is_loading(loads), Err(gone));
}

/// Sequences that use pages of an unfinished load are loading, whichever sequence the load is for.
#[test]
fn pages_of_another_sequences_load_are_loading() {
    type Other = fn(&mut Engine<Late>, SeqKey, bool) -> SeqKey;
    let admitted: Other = |engine, _, _| engine.admit(Namespace::default(), &text(0), 0).expect("there is room");
    let before: Other = |engine, loads, is_begun| match is_begun {
        false => engine.admit(Namespace::default(), &text(0), 0).expect("there is room"),
        true => loads,
    };
    let resumed: Other = |engine, loads, is_begun| {
        if is_begun {
            engine.preempt(loads, Keep::Publish).expect("it runs");
            engine.resume(loads, 0).expect("there is room");
        }
        loads
    };
    let forked: Other = |engine, loads, is_begun| match is_begun {
        false => loads,
        true => engine.fork(loads, 1, 0).expect("there is room").children[0],
    };
    let groups = Groups::new(&[Reach::All, Reach::Window(6)], &[0, 1]).expect("two groups");
    for groups in [Groups::ONE, groups] {
        for (case, other) in [admitted, before, resumed, forked].into_iter().enumerate() {
            let layers = groups.layers().max(1);
            let (capacity, swap_pages) = (Capacity::Pages(16 * layers), 40);
            let pool = PoolConfig { layers, groups, page_size: 4, capacity, swap_pages, ..PoolConfig::default() };
            let config = EngineConfig { max_tokens: 256, ..pool.into() };
            let options = LateOptions(CpuOptions::with_threads(1));
            let mut engine = Engine::new(config, options).expect("a valid config");
            let mut scratch = StepScratch::new();
            for own in 0..9 {
                let seq = engine.admit(Namespace::default(), &text(own), 0).expect("room");
                compute(&mut engine, &mut scratch, seq);
                engine.finish(seq).expect("it is live");
            }
            let loads = engine.admit(Namespace::default(), &text(0), 0).expect("room");
            assert_eq!(engine.cached_len(loads), Ok(12));
            // The case `before` admits its sequence before the load begins.
            let waits = (case == 1).then(|| other(&mut engine, loads, false));
            engine.load(&[loads]).expect("there is room");
            let other = waits.unwrap_or_else(|| other(&mut engine, loads, true));
            let unlike = engine.admit(Namespace::default(), &text(99), 0).expect("room");
            assert_eq!(engine.is_loading(other), Ok(true), "case {case} of {groups:?}");
            assert_eq!(engine.is_loading(unlike), Ok(false));
            assert!((0..99).any(|_| engine.is_loading(other) == Ok(false)), "the load ends");
            engine.verify().expect("all invariants hold");
        }
    }
}
