//! Packed arrays are of what was planned, or there are none.

use kvarena::{
    Capacity, Draft, DraftTree, Engine, EngineConfig, Error, Extend, Namespace, Null, PoolConfig,
    SeqKey, StepScratch, TokenId,
};

fn engine() -> Engine<Null> {
    let pool = PoolConfig { page_size: 4, capacity: Capacity::Pages(64), ..PoolConfig::default() };
    let config = EngineConfig { max_tokens: 4096, ..EngineConfig::from(pool) };
    Engine::new(config, Null).expect("the config is right")
}

fn admit(engine: &mut Engine<Null>, first: u32) -> SeqKey {
    let prompt: Vec<TokenId> = (first..first + 10).map(TokenId::new).collect();
    engine.admit(Namespace::default(), &prompt, 0).expect("room")
}

fn packed(engine: &Engine<Null>, items: &[Extend]) -> Result<Vec<i32>, Error> {
    let mut scratch = StepScratch::new();
    engine.packed(&mut scratch, items).map(|packed| packed.qo_indptr.to_vec())
}

#[test]
fn what_is_not_planned_is_not_packed() {
    let mut engine = engine();
    let mut scratch = StepScratch::new();
    let (a, b) = (admit(&mut engine, 0), admit(&mut engine, 100));
    let (of_a, of_b) = (Extend { seq: a, len: 10 }, Extend { seq: b, len: 7 });
    let refused = |item: Extend| Err(Error::NotPlanned { seq: item.seq, len: item.len });
    assert_eq!(packed(&engine, &[of_a]), refused(of_a), "before a plan");
    let step = engine.plan_batch(&mut scratch, &[of_a, of_b]).expect("room").step();
    assert_eq!(packed(&engine, &[of_a, of_b]), Ok(vec![0, 10, 17]));
    assert_eq!(packed(&engine, &[of_b]), Ok(vec![0, 7]), "a part of the batch");
    for len in [0, 6, 8, u32::MAX] {
        let other = Extend { seq: b, len };
        assert_eq!(packed(&engine, &[of_a, other]), refused(other));
    }
    assert_eq!(packed(&engine, &[of_b, of_a]), refused(of_a), "out of order");
    assert_eq!(packed(&engine, &[of_a, of_a]), refused(of_a), "twice");
    engine.commit(step).expect("it is open");
    assert_eq!(packed(&engine, &[of_a, of_b]), Ok(vec![0, 10, 17]));
    engine.complete(step).expect("it is committed");
    assert_eq!(packed(&engine, &[of_b]), refused(of_b), "after its step");
}

#[test]
fn what_was_undone_is_not_packed() {
    let mut engine = engine();
    let mut scratch = StepScratch::new();
    let seq = admit(&mut engine, 0);
    let (first, second) = (Extend { seq, len: 6 }, Extend { seq, len: 4 });
    engine.plan_batch(&mut scratch, &[first]).expect("room");
    let step = engine.plan_batch(&mut scratch, &[second]).expect("room").step();
    assert_eq!(packed(&engine, &[second]), Ok(vec![0, 4]));
    engine.abort(step).expect("it is open");
    assert!(packed(&engine, &[second]).is_err());
    assert_eq!(packed(&engine, &[first]), Ok(vec![0, 6]), "the plan before stands");
    engine.rollback(seq, 5).expect("nothing is published");
    assert!(packed(&engine, &[first]).is_err(), "a rollback has cut it");
}

/// Packed arrays have no masks: kernels over them attend causally, which is right for a chain alone.
#[test]
fn a_tree_is_not_packed() {
    let mut engine = engine();
    let seq = admit(&mut engine, 0);
    let mut scratch = StepScratch::new();
    let prompt = engine.plan_batch(&mut scratch, &[Extend { seq, len: 10 }]).expect("room").step();
    engine.append(seq, &[1, 2, 3].map(TokenId::new)).expect("room");
    engine.commit(prompt).expect("open");
    let items = [Extend { seq, len: 3 }];
    let mut tree = DraftTree::new();
    for (parents, is_chain) in [([0, 0, 1], true), ([0, 0, 0], false), ([0, 1, 1], false)] {
        tree.set(10, &parents).expect("parents stand before");
        let step =
            engine.plan_drafts(&mut scratch, &items, &[tree.draft(seq)]).expect("room").step();
        let want = if is_chain { Ok(vec![0, 3]) } else { Err(Error::PackedTree { seq }) };
        assert_eq!(packed(&engine, &items), want, "{parents:?}");
        engine.abort(step).expect("open");
    }
    // A chain that is named as one, and positions that are not those of a chain.
    let step = engine.plan_drafts(&mut scratch, &items, &[Draft::chain(seq)]).expect("room").step();
    assert_eq!(packed(&engine, &items), Ok(vec![0, 3]));
    engine.abort(step).expect("open");
    tree.set(10, &[0, 0, 1]).expect("parents stand before");
    let draft = Draft { positions: &[10, 10, 11], ..tree.draft(seq) };
    let step = engine.plan_drafts(&mut scratch, &items, &[draft]).expect("room").step();
    assert_eq!(packed(&engine, &items), Err(Error::PackedTree { seq }));
    // What is kept of it stands in one piece, as any text does.
    engine.accept(step, seq, &[0]).expect("a root");
    assert_eq!(packed(&engine, &[Extend { seq, len: 1 }]), Ok(vec![0, 1]));
}
