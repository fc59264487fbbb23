//! Forks share chunks of the page table: a child's first plan sends few words, and all that the backend lacks.

use kvarena::{
    Backend, Capacity, Cpu, CpuOptions, Engine, EngineConfig, Extend, Keep, KvShape, Namespace, Null, PageId,
    PoolConfig, SeqKey, StepScratch, TokenId,
};

fn config(page_size: u32, pages: u32) -> EngineConfig {
    let capacity = Capacity::Pages(pages);
    let pool = PoolConfig { shape: KvShape::heads(1, 1), page_size, capacity, ..PoolConfig::default() };
    let max_step_tokens = 1 << 20;
    EngineConfig { max_sequences: 80, max_tokens: 8 << 20, max_step_tokens, ..pool.into() }
}

fn tokens(range: std::ops::Range<u32>) -> Vec<TokenId> {
    range.map(TokenId::new).collect()
}

/// Admits and computes a prompt.
fn computed<B: Backend<Error: std::fmt::Debug>>(engine: &mut Engine<B>, len: u32) -> SeqKey {
    let seq = engine.admit(Namespace::default(), &tokens(0..len), 0).expect("room");
    let mut scratch = StepScratch::new();
    let step = engine.plan_batch(&mut scratch, &[Extend { seq, len }]).expect("room").step();
    engine.commit(step).expect("it is open");
    engine.complete(step).expect("it is committed");
    seq
}

/// Returns the pages of a sequence's row in the backend.
fn mirrored(engine: &Engine<Cpu>, seq: SeqKey) -> Vec<PageId> {
    let (sequence, table) = (engine.sequence(seq).expect("it is live"), engine.shape().table);
    let words = engine.backend().table_words();
    (0..sequence.page_len).map(|index| table.page(words, sequence.row, index)).collect()
}

fn assert_mirrored(engine: &Engine<Cpu>, seq: SeqKey) {
    let pages: Vec<_> = engine.page_table(seq).expect("it is live").collect();
    assert!(mirrored(engine, seq) == pages, "the backend has another page table");
}

#[test]
fn a_long_parent_costs_one_word_for_each_chunk() {
    let mut engine = Engine::new(config(1, 110_000), Null).expect("a valid config");
    let parent = computed(&mut engine, 100_000);
    let mut scratch = StepScratch::new();
    for i in 0..64 {
        let child = engine.fork(parent, 1, 0).expect("room").children[0];
        engine.append(child, &[TokenId::new(i)]).expect("room");
        let items = [Extend { seq: child, len: 1 }];
        let plan = engine.plan_batch(&mut scratch, &items).expect("room");
        // One word for each of 97 shared chunks of 1,024 pages. One for the child's own chunk, one for each of its 672
        // pages, and one for the new page.
        assert_eq!(plan.table_writes.len(), 97 + 1 + 672 + 1);
        engine.commit(plan.step()).expect("it is open");
        engine.complete(engine.newest_step()).expect("it is committed");
    }
    engine.verify().expect("all invariants hold");
}

#[test]
fn a_child_that_was_preempted_sends_its_whole_page_table() {
    let mut engine = Engine::new(config(2, 4000), CpuOptions::with_threads(1)).expect("it fits");
    let parent = computed(&mut engine, 4099);
    let child = engine.fork(parent, 1, 0).expect("room").children[0];
    engine.finish(parent).expect("it is live");
    engine.preempt(child, Keep::Publish).expect("it runs");
    engine.verify().expect("all invariants hold");
    engine.resume(child, 0).expect("room");
    engine.verify().expect("all invariants hold");
    let mut scratch = StepScratch::new();
    let plan = engine.plan_batch(&mut scratch, &[Extend { seq: child, len: 1 }]).expect("room");
    assert_eq!(plan.table_writes.len(), 2050 + 5, "all pages, and 5 chunks of 512");
    assert_mirrored(&engine, child);
}

/// When the child is forked, the plans `second` and `third` are open. `third` contains all words of the parent's page
/// table and is then aborted, so the child sends these words.
#[test]
fn words_of_the_second_of_two_open_plans_are_sent_again() {
    let mut engine = Engine::new(config(1, 8000), CpuOptions::with_threads(1)).expect("it fits");
    let pair = [(); 2].map(|()| engine.admit(Namespace::default(), &tokens(0..3000), 0).expect("room"));
    let (mut scratch, parent) = (StepScratch::new(), pair[1]);
    let items = pair.map(|seq| Extend { seq, len: 2999 });
    let first = engine.plan_batch(&mut scratch, &items).expect("room").step();
    let next = [Extend { seq: parent, len: 1 }];
    let second = engine.plan_batch(&mut scratch, &next).expect("room");
    assert_eq!(second.table_writes.len(), 1, "the others were in the first");
    engine.commit(first).expect("it is open");
    // The commit found that the other sequence had published all pages of the parent. The parent now uses these pages,
    // so its next plan sends all words again.
    engine.append(parent, &tokens(0..1)).expect("room");
    let plan = engine.plan_batch(&mut scratch, &next).expect("room");
    assert!(plan.table_writes.len() > 2999);
    let third = plan.step();
    let child = engine.fork(parent, 1, 0).expect("room").children[0];
    engine.abort(third).expect("it is open");
    let len = engine.extend_max(child).expect("it is live");
    let plan = engine.plan_batch(&mut scratch, &[Extend { seq: child, len }]).expect("room");
    assert!(plan.table_writes.len() > 2999, "the backend may lack the parent's words");
    assert_mirrored(&engine, child);
    engine.verify().expect("all invariants hold");
}

#[test]
fn grandchildren_share_what_their_parents_inherited() {
    let mut engine = Engine::new(config(2, 4000), CpuOptions::with_threads(1)).expect("it fits");
    let parent = computed(&mut engine, 4099);
    let child = engine.fork(parent, 1, 0).expect("room").children[0];
    let grandchild = engine.fork(child, 1, 0).expect("room").children[0];
    for seq in [parent, child] {
        engine.finish(seq).expect("it is live");
    }
    engine.append(grandchild, &tokens(0..1)).expect("room");
    let mut scratch = StepScratch::new();
    let items = [Extend { seq: grandchild, len: 1 }];
    let plan = engine.plan_batch(&mut scratch, &items).expect("room");
    assert_eq!(plan.table_writes.len(), 4 + 1 + 2, "one of 5 chunks has the copied tail");
    assert_mirrored(&engine, grandchild);
    engine.verify().expect("all invariants hold");
}

/// The words of a shared chunk were in a plan that is aborted after the fork, so the child sends them itself.
#[test]
fn words_of_an_aborted_plan_are_sent_again() {
    let mut engine = Engine::new(config(1, 8000), CpuOptions::with_threads(1)).expect("it fits");
    // The second sequence publishes pages that the first has published meanwhile, so its page table is rewritten.
    let pair = [(); 2].map(|()| engine.admit(Namespace::default(), &tokens(0..3000), 0).expect("room"));
    let mut scratch = StepScratch::new();
    let items = pair.map(|seq| Extend { seq, len: 2999 });
    let step = engine.plan_batch(&mut scratch, &items).expect("room").step();
    engine.commit(step).expect("it is open");
    let parent = pair[1];
    let old = mirrored(&engine, parent);
    let step = engine.plan_batch(&mut scratch, &[Extend { seq: parent, len: 1 }]).expect("room");
    let (step, sent) = (step.step(), step.table_writes.len());
    assert!(sent > 2999, "{sent} words: all of them were rewritten");
    let child = engine.fork(parent, 1, 0).expect("room").children[0];
    engine.abort(step).expect("it is open");
    let items = [Extend { seq: child, len: 1 }];
    let plan = engine.plan_batch(&mut scratch, &items).expect("room");
    assert!(plan.table_writes.len() > 2999, "the backend may lack the parent's words");
    assert_mirrored(&engine, child);
    assert_ne!(mirrored(&engine, child)[..2999], old[..2999]);
    engine.verify().expect("all invariants hold");
}
