//! The engine packs only planned items, and rejects other items.

use kvarena::testkit::padded::padded;
use kvarena::{
    BatchPlan, Capacity, Draft, DraftTree, Engine, EngineConfig, Error, Extend, Groups, Namespace, Null, OwnedPlan,
    PackedPlan, PlanSize, PoolConfig, Reach, SeqKey, StepScratch, TokenId,
};

fn engine() -> Engine<Null> {
    let pool = PoolConfig { page_size: 4, capacity: Capacity::Pages(64), ..PoolConfig::default() };
    let config = EngineConfig { max_tokens: 4096, ..EngineConfig::from(pool) };
    Engine::new(config, Null).expect("a valid config")
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
fn unplanned_items_are_not_packed() {
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
fn aborted_items_are_not_packed() {
    let mut engine = engine();
    let mut scratch = StepScratch::new();
    let seq = admit(&mut engine, 0);
    let (first, second) = (Extend { seq, len: 6 }, Extend { seq, len: 4 });
    engine.plan_batch(&mut scratch, &[first]).expect("room");
    let step = engine.plan_batch(&mut scratch, &[second]).expect("room").step();
    assert_eq!(packed(&engine, &[second]), Ok(vec![0, 4]));
    engine.abort(step).expect("it is open");
    assert!(packed(&engine, &[second]).is_err());
    assert_eq!(packed(&engine, &[first]), Ok(vec![0, 6]), "the earlier plan is valid");
    engine.rollback(seq, 5).expect("nothing is published");
    assert!(packed(&engine, &[first]).is_err(), "a rollback has cut it");
}

/// Packed arrays have no masks. Kernels over them attend causally, which is correct only for a chain.
#[test]
fn a_tree_is_not_packed() {
    let mut engine = engine();
    let seq = admit(&mut engine, 0);
    let (mut scratch, mut levels) = (StepScratch::new(), StepScratch::new());
    let prompt = engine.plan_batch(&mut scratch, &[Extend { seq, len: 10 }]).expect("room").step();
    engine.append(seq, &[1, 2, 3].map(TokenId::new)).expect("room");
    engine.commit(prompt).expect("it is open");
    let items = [Extend { seq, len: 3 }];
    let mut tree = DraftTree::new();
    for (parents, is_chain) in [([0, 0, 1], true), ([0, 0, 0], false), ([0, 1, 1], false)] {
        tree.set(10, &parents).expect("parents precede children");
        let step = engine.plan_drafts(&mut scratch, &items, &[tree.draft(seq)]).expect("room").step();
        let want = if is_chain { Ok(vec![0, 3]) } else { Err(Error::PackedTree { seq }) };
        assert_eq!(packed(&engine, &items), want, "{parents:?}");
        engine.abort(step).expect("it is open");
    }
    // A plain chain is packed. A draft with a chain's masks and other positions is not.
    let step = engine.plan_drafts(&mut scratch, &items, &[Draft::chain(seq)]).expect("room").step();
    assert_eq!(packed(&engine, &items), Ok(vec![0, 3]));
    engine.abort(step).expect("it is open");
    tree.set(10, &[0, 0, 1]).expect("parents precede children");
    let draft = Draft { positions: &[10, 10, 11], ..tree.draft(seq) };
    let plan = engine.plan_drafts(&mut scratch, &items, &[draft]).expect("room");
    assert_eq!(packed(&engine, &items), Err(Error::PackedTree { seq }));
    // The accepted branch is contiguous, like any text.
    engine.accept(plan.step(), seq, &[0]).expect("a root");
    let kept = [Extend { seq, len: 1 }];
    assert_eq!(packed(&engine, &kept), Ok(vec![0, 1]));
    let levels = engine.packed_levels(&mut levels, &plan, &kept).map(|_| ());
    assert_eq!(levels, Err(Error::NotPlanned { seq, len: 1 }), "the plan has all three drafts");
}

/// The list of a limited track begins at the first page that the sequence keeps. The lists of all tracks end at the
/// same page.
#[test]
fn lists_of_limited_tracks_begin_at_the_first_kept_page() {
    for (reach, first) in [(Reach::Window(9), 3), (Reach::Chunk(8), 4)] {
        let groups = Groups::new(&[Reach::All, reach], &[0, 1, 1]).expect("two groups");
        let capacity = Capacity::Pages(64);
        let pool = PoolConfig { layers: 3, groups, page_size: 4, capacity, ..PoolConfig::default() };
        let config = EngineConfig { max_tokens: 4096, ..pool.into() };
        let mut engine = Engine::new(config, Null).expect("a valid config");
        let prompt: Vec<TokenId> = (0..30).map(TokenId::new).collect();
        let seq = engine.admit(Namespace::default(), &prompt, 0).expect("room");
        let (mut scratch, mut lists) = (StepScratch::new(), StepScratch::new());
        // The first step publishes 5 whole pages of 4 tokens. The next token is at position 20.
        for (len, first) in [(21, 0), (9, first)] {
            let items = [Extend { seq, len }];
            let step = engine.plan_batch(&mut scratch, &items).expect("room").step();
            for track in 0..3 {
                let first = if track == 0 { 0 } else { first };
                let packed = engine.packed_track(&mut lists, track, &items).expect("planned");
                let kept = engine.track_table(seq, track).expect("it is live");
                let kept: Vec<i32> = kept.map(|page| page.raw() as i32).collect();
                assert_eq!(packed.kv_indices, kept);
                let all = engine.page_table(seq).expect("it is live").count();
                assert_eq!(packed.kv_indices.len(), all - first, "{reach:?} {track}");
                assert_eq!(packed.kv_last_page_len, [if len == 21 { 1 } else { 2 }]);
            }
            engine.commit(step).expect("it is open");
            engine.complete(step).expect("it is committed");
        }
    }
}

/// Packs three branches of one conversation and a sequence without shared pages. Checks the levels, and that a plan of
/// other items is rejected.
#[test]
fn levels_list_what_is_shared_once() {
    let mut engine = engine();
    let mut scratch = [StepScratch::new(), StepScratch::new()];
    let text = |first: u32, second: std::ops::Range<u32>| -> Vec<TokenId> {
        (0..first).chain(second).map(TokenId::new).collect()
    };
    let root = text(9, 0..0);
    let first = engine.admit(Namespace::default(), &root, 0).expect("room");
    let items = [Extend { seq: first, len: 9 }];
    let step = engine.plan_batch(&mut scratch[0], &items).expect("room").step();
    engine.commit(step).expect("it is open");
    engine.complete(step).expect("it is committed");
    // Pages of 4 tokens: texts 0, 2 and 3 share the first page, and texts 2 and 3 also the second.
    let texts = [text(4, 90..93), text(0, 50..53), text(9, 0..0), text(8, 70..72)];
    let seqs = texts.each_ref().map(|text| engine.admit(Namespace::default(), text, 0).expect("room"));
    let items = [3, 3, 1, 2].into_iter().zip(seqs).map(|(len, seq)| Extend { seq, len });
    let items: Vec<_> = items.collect();
    let [of_plan, of_levels] = &mut scratch;
    let plan = engine.plan_batch(of_plan, &items).expect("room");
    let mut padding = StepScratch::new();
    for plan in [plan, padded(&plan, &mut padding, PlanSize { rows: 6, tokens: 16 })] {
        let packed = engine.packed_levels(of_levels, &plan, &items).expect("planned");
        // Rows 2 and 3 have two common pages, row 0 one of them, row 1 none.
        assert_eq!(packed.order, [2, 3, 0, 1]);
        let levels = packed.levels;
        assert_eq!(levels.len(), 3);
        let read = |level: usize| {
            let PackedPlan { qo_indptr, kv_indptr, kv_last_page_len, .. } = levels[level];
            (qo_indptr.to_vec(), kv_indptr.to_vec(), kv_last_page_len.to_vec())
        };
        assert_eq!(read(0), (vec![0, 6, 9], vec![0, 1, 1], vec![4, 0]));
        assert_eq!(read(1), (vec![0, 3, 9], vec![0, 1, 1], vec![4, 0]));
        assert_eq!(read(2), (vec![0, 1, 3, 6, 9], vec![0, 1, 2, 3, 4], vec![1, 2, 3, 3]));
    }
    let levels = |items: &[Extend]| {
        engine.packed_levels(&mut StepScratch::new(), &plan, items).map(|packed| packed.levels.len())
    };
    assert_eq!(levels(&items), Ok(3));
    assert_eq!(levels(&items[..3]), Err(Error::PackedRows { items: 3, rows: 4 }));
    let old = plan.step();
    let mut bytes = OwnedPlan::new();
    bytes.copy_from(&plan);
    engine.abort(old).expect("it is open");
    // A plan of the same rows with other tokens.
    let others = items.iter().map(|&Extend { seq, .. }| Extend { seq, len: 1 });
    let others: Vec<_> = others.collect();
    engine.plan_batch(of_plan, &others).expect("room");
    let stale = engine.packed_levels(of_levels, &bytes.plan(), &others).map(|_| ());
    assert_eq!(stale, Err(Error::NotPlanned { seq: others[0].seq, len: 1 }));
}

/// The test keeps an aborted plan, whose row another sequence then takes. With equal numbers of tokens, the plans of
/// both sequences look alike.
#[test]
fn a_plan_that_was_undone_has_no_levels() {
    let mut engine = engine();
    let mut scratch = StepScratch::new();
    let extend = |seq| [Extend { seq, len: 10 }];
    let first = admit(&mut engine, 0);
    let undone = OwnedPlan::from(&engine.plan_batch(&mut scratch, &extend(first)).expect("room"));
    engine.abort(undone.plan().step()).expect("it is open");
    engine.finish(first).expect("the sequence is live");
    let second = admit(&mut engine, 100);
    let planned = OwnedPlan::from(&engine.plan_batch(&mut scratch, &extend(second)).expect("room"));
    let (plan, undone) = (planned.plan(), undone.plan());
    assert_eq!(plan.rows, undone.rows, "the rows are equal");
    let levels = |engine: &Engine<Null>, plan: &BatchPlan<'_>| {
        let mut scratch = StepScratch::new();
        engine.packed_levels(&mut scratch, plan, &extend(second)).map(|packed| packed.levels.len())
    };
    assert_eq!(levels(&engine, &plan), Ok(1));
    let refused = Err(Error::NotPlanned { seq: second, len: 10 });
    assert_eq!(levels(&engine, &undone), refused);
    // The second word of the bytes is the step.
    for step in [0, 1_000, u64::MAX] {
        let mut bytes = planned.as_bytes().to_vec();
        bytes[8..16].copy_from_slice(&step.to_le_bytes());
        let never = OwnedPlan::from_bytes(&bytes).expect("any step");
        assert_eq!(levels(&engine, &never.plan()), refused, "step {step} was never planned");
    }
    engine.commit(plan.step()).expect("it is open");
    assert_eq!(levels(&engine, &plan), Ok(1));
    engine.complete(plan.step()).expect("it is committed");
    assert_eq!(levels(&engine, &plan), refused, "it is complete");
}
