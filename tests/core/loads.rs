//! Loads of pages from swap memory, over a backend that finishes them late.

use kvarena::layout::{Groups, Reach};
use kvarena::testkit::late::{Late, LateOptions};
use kvarena::*;

use super::host::{Host, pool};

fn text(own: u32) -> Vec<TokenId> {
    super::host::text(own * 100..own * 100 + 13)
}

fn late(pool: PoolConfig) -> Host<Late> {
    Host::new(EngineConfig { max_tokens: 256, ..pool.into() }, LateOptions(CpuOptions::with_threads(1)))
}

#[test]
fn others_are_planned_while_a_sequence_loads() {
    let mut engine = late(PoolConfig { swap_pages: 8, ..pool(4, 8, Groups::ONE) });
    for own in 0..3 {
        let seq = engine.prefill(&text(own));
        assert_eq!(engine.is_loading(seq), Ok(false), "it waits for no load");
        engine.finish(seq).expect("it is live");
    }
    let loads = engine.begin(&text(0));
    assert_eq!(engine.cached_len(loads), Ok(12));
    assert_eq!(engine.is_loading(loads), Ok(false), "the load has not begun");
    let complete = engine.begin(&text(5)[..3]);
    engine.load(&[loads, complete]).expect("there is room");
    assert_eq!(engine.is_loading(complete), Ok(false), "it waits for no load");
    assert_eq!(engine.is_loading(loads), Ok(true));
    let other = engine.begin(&text(7)[..3]);
    engine.compute_rest(other);
    // Each query of finished moves lets the backend finish one batch more.
    assert!((0..9).any(|_| engine.is_loading(loads) == Ok(false)), "the load ends");
    engine.compute_rest(loads);
    assert_eq!(engine.is_loading(other), Ok(false), "it waits for no load");
    engine.finish(loads).expect("it is live");
    let gone = EngineError::Core(Error::UnknownSequence { seq: loads });
    assert_eq!(engine.is_loading(loads), Err(gone));
}

/// Sequences that use pages of an unfinished load are loading, whichever sequence the load is for.
#[test]
fn pages_of_another_sequences_load_are_loading() {
    type Other = fn(&mut Host<Late>, SeqKey, bool) -> SeqKey;
    let admitted: Other = |engine, _, _| engine.begin(&text(0));
    let before: Other = |engine, loads, is_begun| if is_begun { loads } else { engine.begin(&text(0)) };
    let resumed: Other = |engine, loads, is_begun| {
        if is_begun {
            engine.preempt(loads, Keep::Publish).expect("it runs");
            engine.resume(loads, 0).expect("there is room");
        }
        loads
    };
    let forked: Other = |engine, loads, is_begun| {
        if is_begun { engine.fork(loads, 1, 0).expect("there is room").children[0] } else { loads }
    };
    let groups = Groups::new(&[Reach::All, Reach::Window(6)], &[0, 1]).expect("two groups");
    for groups in [Groups::ONE, groups] {
        for (case, other) in [admitted, before, resumed, forked].into_iter().enumerate() {
            let pages = 16 * groups.layers().max(1);
            let mut engine = late(PoolConfig { swap_pages: 40, ..pool(4, pages, groups) });
            (0..9).for_each(|own| engine.cache(&text(own)));
            let loads = engine.begin(&text(0));
            assert_eq!(engine.cached_len(loads), Ok(12));
            // The case `before` admits its sequence before the load begins.
            let waits = (case == 1).then(|| other(&mut engine, loads, false));
            engine.load(&[loads]).expect("there is room");
            let other = waits.unwrap_or_else(|| other(&mut engine, loads, true));
            let unlike = engine.begin(&text(99));
            assert_eq!(engine.is_loading(other), Ok(true), "case {case} of {groups:?}");
            assert_eq!(engine.is_loading(unlike), Ok(false));
            assert!((0..99).any(|_| engine.is_loading(other) == Ok(false)), "the load ends");
            engine.check();
        }
    }
}
