//! Guarantees of the engine to the host: threads, shared pages, the order of steps, aborts, page table words and
//! counters.

use kvarena::{
    Capacity, Engine, EngineConfig, Error, Extend, Keep, Namespace, Null, PageId, PoolConfig, PrefixMode, SeqKey,
    StepId, StepScratch, TokenId,
};

fn engine(prefix: PrefixMode) -> Engine<Null> {
    let pool = PoolConfig { page_size: 4, capacity: Capacity::Pages(64), ..Default::default() };
    let config = EngineConfig { prefix, max_tokens: 4096, ..EngineConfig::from(pool) };
    Engine::new(config, Null).expect("a valid config")
}

fn prompt(len: u32) -> Vec<TokenId> {
    (0..len).map(TokenId::new).collect()
}

#[test]
fn an_engine_moves_to_another_thread() {
    let mut engine = engine(PrefixMode::Radix);
    let moved = std::thread::spawn(move || {
        engine.admit(Namespace::default(), &prompt(9), 0).expect("there is room");
        engine
    });
    assert_eq!(moved.join().expect("no panic").stats().sequences, 1);
}

#[test]
fn equal_prompts_in_one_batch_end_with_one_set_of_pages() {
    let mut engine = engine(PrefixMode::Radix);
    let mut scratch = StepScratch::new();
    let seqs = [0, 1].map(|_| engine.admit(Namespace::default(), &prompt(10), 0).expect("room"));
    let items = seqs.map(|seq| Extend { seq, len: 10 });
    let step = engine.plan_batch(&mut scratch, &items).expect("room").step();
    engine.commit(step).expect("it is open");
    engine.verify().expect("all invariants hold");
    let tables = seqs.map(|seq| engine.page_table(seq).expect("it is live").collect::<Vec<PageId>>());
    assert_eq!(tables[0][..2], tables[1][..2], "whole pages are shared");
    assert_ne!(tables[0][2], tables[1][2], "each sequence has its own tail");
    // The second sequence's duplicates wait for the step that may still write them.
    assert_eq!(engine.stats().fenced_pages, 2);
    engine.complete(step).expect("it is committed");
    let stats = engine.stats();
    assert_eq!((stats.fenced_pages, stats.cached_pages, stats.private_pages), (0, 2, 2));
}

#[test]
fn committed_pages_are_shared_before_the_prefill_is_done() {
    let mut engine = engine(PrefixMode::Radix);
    let mut scratch = StepScratch::new();
    let first = engine.admit(Namespace::default(), &prompt(40), 0).expect("room");
    let chunk = [Extend { seq: first, len: 16 }];
    let step = engine.plan_batch(&mut scratch, &chunk).expect("room").step();
    engine.commit(step).expect("it is open");
    let second = engine.admit(Namespace::default(), &prompt(40), 0).expect("room");
    assert_eq!(engine.cached_len(second), Ok(16));
    let elsewhere = engine.admit(Namespace::new(1), &prompt(40), 0).expect("room");
    assert_eq!(engine.cached_len(elsewhere), Ok(0), "namespaces do not share");
}

#[test]
fn without_reuse_only_forks_share_pages() {
    let mut engine = engine(PrefixMode::None);
    let mut scratch = StepScratch::new();
    let parent = engine.admit(Namespace::default(), &prompt(10), 0).expect("room");
    let items = [Extend { seq: parent, len: 10 }];
    let step = engine.plan_batch(&mut scratch, &items).expect("room").step();
    engine.commit(step).expect("it is open");
    engine.complete(step).expect("it is committed");
    let forked = engine.fork(parent, 1, 0).expect("room");
    let (child, step) = (forked.children[0], forked.step.expect("a tail was copied"));
    assert_eq!(engine.cached_len(child), Ok(10));
    let stranger = engine.admit(Namespace::default(), &prompt(10), 0).expect("room");
    assert_eq!(engine.cached_len(stranger), Ok(0));
    engine.complete(step).expect("copied");
    for seq in [parent, child, stranger] {
        engine.finish(seq).expect("it is live");
        engine.verify().expect("all invariants hold");
    }
    assert_eq!(engine.stats().free_pages, 64, "nothing outlives its sequence");
}

#[test]
fn extend_max_is_the_limit_of_a_plan() {
    let mut engine = engine(PrefixMode::Radix);
    let mut scratch = StepScratch::new();
    let seq = engine.admit(Namespace::default(), &prompt(10), 0).expect("room");
    assert_eq!(engine.extend_max(seq), Ok(10));
    let plan = |engine: &mut Engine<Null>, scratch: &mut StepScratch, len| {
        engine.plan_batch(scratch, &[Extend { seq, len }]).map(|plan| plan.step())
    };
    let first = plan(&mut engine, &mut scratch, 10).expect("room");
    assert_eq!(engine.extend_max(seq), Ok(1), "the token that the unfinished step will sample");
    let second = plan(&mut engine, &mut scratch, 1).expect("room");
    engine.append(seq, &prompt(1)).expect("room");
    for step in [first, second] {
        engine.commit(step).expect("it is open");
        engine.complete(step).expect("it is committed");
    }
    assert_eq!(engine.extend_max(seq), Ok(0), "no known and no sampled tokens");
    assert!(plan(&mut engine, &mut scratch, 1).is_err());
    engine.preempt(seq, kvarena::Keep::Publish).expect("it runs");
    assert_eq!(engine.extend_max(seq), Ok(0));
}

#[test]
fn a_step_shortened_by_a_rollback_samples_no_next_token() {
    let mut engine = engine(PrefixMode::Radix);
    let mut scratch = StepScratch::new();
    let seq = engine.admit(Namespace::default(), &prompt(10), 0).expect("room");
    let cut = engine.plan_batch(&mut scratch, &[Extend { seq, len: 10 }]).expect("room").step();
    engine.rollback(seq, 9).expect("nothing is published");
    assert_eq!(engine.extend_max(seq), Ok(0), "the step's sample follows a removed token");
    engine.append(seq, &prompt(1)).expect("room");
    assert_eq!(engine.extend_max(seq), Ok(1));
    engine.plan_batch(&mut scratch, &[Extend { seq, len: 1 }]).expect("room");
    assert_eq!(engine.extend_max(seq), Ok(1), "the rollback did not shorten the second step");
    engine.abort(cut).expect("it is open");
    assert_eq!(engine.extend_max(seq), Ok(10), "no step is left");
    engine.verify().expect("all invariants hold");
}

#[test]
fn a_pool_of_more_than_2_31_slots_has_64_bit_slots() {
    let pool = PoolConfig { page_size: 1024, capacity: Capacity::Pages((1 << 21) + 1), ..Default::default() };
    // The memory is reserved and not touched: only a few system pages are used.
    let config = EngineConfig { prefault: false, max_tokens: 4096, ..EngineConfig::from(pool) };
    let mut engine = Engine::new(config, Null).expect("a valid config");
    let mut scratch = StepScratch::new();
    let seq = engine.admit(Namespace::default(), &prompt(1030), 0).expect("room");
    let plan = engine.plan_batch(&mut scratch, &[Extend { seq, len: 1030 }]).expect("room");
    let kvarena::SlotMapping::I64(slots) = plan.slot_mapping else { panic!("64-bit slots") };
    assert!(slots.iter().copied().eq(0..1030));
    let owned = kvarena::OwnedPlan::from(&plan);
    assert_eq!(owned.plan(), plan);
}

/// Plans the next `len` tokens of one sequence.
fn plan(engine: &mut Engine<Null>, seq: SeqKey, len: u32) -> StepId {
    let mut scratch = StepScratch::new();
    engine.plan_batch(&mut scratch, &[Extend { seq, len }]).expect("there is room").step()
}

#[test]
fn steps_commit_in_the_order_they_were_planned() {
    let mut engine = engine(PrefixMode::Radix);
    let seq = engine.admit(Namespace::default(), &prompt(10), 0).expect("room");
    let [first, second, third] = [4, 3, 3].map(|len| plan(&mut engine, seq, len));
    for step in [second, third] {
        assert_eq!(engine.commit(step), Err(Error::StepOrder { step, first }));
        assert_eq!(engine.cached_len(seq), Ok(0), "nothing has changed");
    }
    engine.commit(first).expect("it is open");
    assert_eq!(engine.commit(third), Err(Error::StepOrder { step: third, first: second }));
    assert_eq!(engine.commit(first), Err(Error::UnknownStep { step: first }));
    engine.commit(second).expect("it is open");
    assert_eq!(engine.cached_len(seq), Ok(7));
    engine.abort(third).expect("it is open");
    engine.verify().expect("all invariants hold");
}

#[test]
fn a_resumed_sequence_does_not_wait_for_steps_before_its_preemption() {
    let mut engine = engine(PrefixMode::Radix);
    let [other, seq] = [(); 2].map(|()| engine.admit(Namespace::default(), &prompt(9), 0).expect("room"));
    let cached = plan(&mut engine, other, 8);
    plan(&mut engine, seq, 8);
    engine.commit(cached).expect("it is open");
    // The unfinished step of `seq` computes 8 tokens, as many as the rollback below leaves. It began before the
    // preemption, so its sample does not count.
    engine.preempt(seq, Keep::Publish).expect("it runs");
    engine.resume(seq, 0).expect("room");
    assert_eq!(engine.cached_len(seq), Ok(8));
    engine.rollback(seq, 8).expect("nothing past it is published");
    assert_eq!(engine.extend_max(seq), Ok(0), "no step since the preemption samples a token");
    // No step since the preemption reads the prefix, so its release waits for no step.
    engine.complete(cached).expect("it is committed");
    engine.finish(other).expect("it is live");
    assert_eq!(engine.stats().evictable_pages, 0, "`seq` still locks the prefix");
    engine.finish(seq).expect("it is live");
    assert_eq!(engine.stats().evictable_pages, 2);
    engine.verify().expect("all invariants hold");
}

#[test]
fn an_aborted_step_samples_no_next_token() {
    let mut engine = engine(PrefixMode::Radix);
    let seq = engine.admit(Namespace::default(), &prompt(10), 0).expect("room");
    let first = plan(&mut engine, seq, 10);
    let second = plan(&mut engine, seq, 1);
    engine.abort(second).expect("it is open");
    assert_eq!(engine.extend_max(seq), Ok(1), "the first step will sample one");
    engine.commit(first).expect("it is open");
    engine.complete(first).expect("it is committed");
    assert_eq!(engine.extend_max(seq), Ok(0), "the second step is aborted, but not yet complete");
    engine.verify().expect("all invariants hold");
}

/// Two steps in flight plan tokens that are not yet known. The first unknown token begins a chunk of the page table,
/// which no known token reaches. The chunk stays when the second step is aborted.
#[test]
fn an_abort_keeps_the_chunk_that_an_earlier_step_began() {
    let pool = PoolConfig { page_size: 1, capacity: Capacity::Pages(8192), ..Default::default() };
    let mut engine = Engine::new(EngineConfig::from(pool), Null).expect("a valid config");
    let chunk = engine.shape().table.chunk_pages;
    let seq = engine.admit(Namespace::default(), &prompt(chunk), 0).expect("room");
    let [_, _, last] = [chunk, 1, 1].map(|len| plan(&mut engine, seq, len));
    engine.abort(last).expect("it is open");
    let table: Vec<PageId> = engine.page_table(seq).expect("it is live").collect();
    assert_eq!(table.len() as u32, chunk + 1);
    // Another sequence would get that chunk if it were free.
    let other = engine.admit(Namespace::new(1), &prompt(1), 0).expect("room");
    plan(&mut engine, other, 1);
    assert!(engine.page_table(seq).expect("it is live").eq(table));
    engine.verify().expect("all invariants hold");
}

#[test]
fn words_of_the_page_tables_are_sent_once() {
    let mut engine = engine(PrefixMode::Radix);
    let mut scratch = StepScratch::new();
    let seq = engine.admit(Namespace::default(), &prompt(6), 0).expect("room");
    let mut words = |engine: &mut Engine<Null>, len| {
        let plan = engine.plan_batch(&mut scratch, &[Extend { seq, len }]).expect("room");
        (plan.step(), plan.table_writes.len())
    };
    // Two pages and their chunk, then a word for each new page.
    assert_eq!(words(&mut engine, 6).1, 3);
    for position in 6..30 {
        engine.append(seq, &prompt(1)).expect("room");
        let (step, sent) = words(&mut engine, 1);
        assert_eq!(sent, usize::from(position % 4 == 0), "position {position}");
        let before = StepId::new(step.raw() - 1);
        engine.commit(before).expect("it is open");
        engine.complete(before).expect("it is committed");
    }
    // The words of an aborted plan are sent again.
    for _ in 0..2 {
        engine.append(seq, &prompt(3)).expect("room");
        let (step, sent) = words(&mut engine, 3);
        assert_eq!(sent, 1);
        engine.abort(step).expect("it is open");
        engine.rollback(seq, 30).expect("nothing past it is published");
    }
    engine.verify().expect("all invariants hold");
}

#[test]
fn words_of_a_prefix_are_sent_again_after_an_abort() {
    let mut engine = engine(PrefixMode::Radix);
    let mut scratch = StepScratch::new();
    let first = engine.admit(Namespace::default(), &prompt(9), 0).expect("room");
    let step = plan(&mut engine, first, 9);
    engine.commit(step).expect("it is open");
    let seq = engine.admit(Namespace::default(), &prompt(9), 0).expect("room");
    assert_eq!(engine.cached_len(seq), Ok(8));
    let mut sent = |engine: &mut Engine<Null>| {
        let plan = engine.plan_batch(&mut scratch, &[Extend { seq, len: 1 }]).expect("room");
        (plan.step(), plan.table_writes.iter().map(|write| write.index).collect::<Vec<_>>())
    };
    let (aborted, words) = sent(&mut engine);
    assert_eq!(words.len(), 1 + 2 + 1, "a chunk, two pages of the prefix, one of its own");
    engine.abort(aborted).expect("it is open");
    assert_eq!(sent(&mut engine).1, words);
}

#[test]
fn an_abort_does_not_change_a_resumed_sequence() {
    let mut engine = engine(PrefixMode::Radix);
    let [other, seq] = [(); 2].map(|()| engine.admit(Namespace::default(), &prompt(10), 0).expect("room"));
    let cached = plan(&mut engine, other, 10);
    let aborted = plan(&mut engine, seq, 10);
    engine.commit(cached).expect("it is open");
    engine.preempt(seq, Keep::Publish).expect("it runs");
    engine.resume(seq, 0).expect("room");
    assert_eq!((engine.cached_len(seq), engine.planned_len(seq)), (Ok(8), Ok(8)));
    engine.abort(aborted).expect("it is open");
    assert_eq!((engine.cached_len(seq), engine.planned_len(seq)), (Ok(8), Ok(8)));
    assert_eq!(engine.extend_max(seq), Ok(2));
    engine.verify().expect("all invariants hold");
}

#[test]
fn a_sequence_is_no_longer_than_the_pool() {
    let pool = PoolConfig { page_size: 4, capacity: Capacity::Pages(3), ..Default::default() };
    let config = EngineConfig { max_tokens: 4096, ..EngineConfig::from(pool) };
    let mut engine = Engine::new(config, Null).expect("a valid config");
    assert_eq!(engine.shape().max_sequence_len, 12);
    let refused = engine.admit(Namespace::default(), &prompt(13), 0);
    assert_eq!(refused, Err(Error::TooLong { len: 13, max: 12 }));
    let seq = engine.admit(Namespace::default(), &prompt(12), 0).expect("room");
    plan(&mut engine, seq, 12);
    assert_eq!(engine.extend_max(seq), Ok(0), "no place for the next token");
    assert_eq!(engine.append(seq, &prompt(1)), Err(Error::TooLong { len: 13, max: 12 }));
    // In a larger pool, a sequence has at most 2^30 tokens.
    let pool = PoolConfig { page_size: 1024, capacity: Capacity::Pages(1 << 21), ..pool };
    let config = EngineConfig { max_sequence_len: u32::MAX, ..EngineConfig::from(pool) };
    assert_eq!(config.shape().expect("a valid config").max_sequence_len, 1 << 30);
}

#[test]
fn a_hit_is_counted_when_the_first_step_is_committed() {
    let mut engine = engine(PrefixMode::Radix);
    let first = engine.admit(Namespace::default(), &prompt(10), 0).expect("room");
    let step = plan(&mut engine, first, 10);
    engine.commit(step).expect("it is open");
    engine.complete(step).expect("it is committed");
    let before = engine.stats();
    assert_eq!((before.prompts, before.prompt_tokens, before.hit_tokens), (1, 10, 0));
    // Without a step, an admission counts neither as a hit nor as a prompt.
    let second = engine.admit(Namespace::default(), &prompt(10), 0).expect("room");
    engine.finish(second).expect("it is live");
    let third = engine.admit(Namespace::default(), &prompt(9), 0).expect("room");
    engine.append(third, &prompt(1)).expect("room");
    let since = engine.stats() - before;
    assert_eq!((since.admissions, since.prompts, since.hit_tokens), (2, 0, 0));
    for len in [1, 1] {
        let step = plan(&mut engine, third, len);
        engine.commit(step).expect("it is open");
        engine.complete(step).expect("it is committed");
        let since = engine.stats() - before;
        assert_eq!((since.prompts, since.prompt_tokens, since.hit_tokens), (1, 9, 8));
    }
    // A fork counts no hit, and the hit of a resume is counted separately.
    let child = engine.fork(third, 1, 0).expect("room").children[0];
    let newest = engine.newest_step();
    engine.complete(newest).expect("copies are committed");
    engine.preempt(third, Keep::Publish).expect("it runs");
    engine.resume(third, 0).expect("room");
    for seq in [third, child] {
        engine.append(seq, &prompt(1)).expect("room");
        let step = plan(&mut engine, seq, 1);
        engine.commit(step).expect("it is open");
        engine.complete(step).expect("it is committed");
    }
    let since = engine.stats() - before;
    assert_eq!((since.prompts, since.hit_tokens, since.resume_hit_tokens), (1, 8, 8));
    assert_eq!((since.forks, since.preemptions, since.resumes), (1, 1, 1));
    assert_eq!(since.refusals, 0);
    assert!(engine.admit(Namespace::new(1), &prompt(64 * 4), 0).is_err());
    assert!(engine.admit(Namespace::new(1), &[], 0).is_err());
    assert_eq!((engine.stats() - before).refusals, 1, "an empty prompt is not a shortage");
}

/// A sequence that is preempted before its first commit counts as a prompt at the first commit.
#[test]
fn a_prompt_first_computed_after_a_resume_counts_as_a_prompt() {
    let mut engine = engine(PrefixMode::Radix);
    let commit = |engine: &mut Engine<Null>, seq, len| {
        let step = plan(engine, seq, len);
        engine.commit(step).expect("it is open");
        engine.complete(step).expect("it is committed");
    };
    let [first, second, longer] =
        [10, 10, 9].map(|len| engine.admit(Namespace::default(), &prompt(len), 0).expect("room"));
    for seq in [second, longer, second] {
        engine.preempt(seq, Keep::Drop).expect("it runs");
        engine.resume(seq, 0).expect("room");
    }
    // `longer` gets 14 tokens, 5 more than its prompt. `first` then caches 12 of them.
    engine.append(longer, &prompt(10)[9..]).expect("room");
    engine.append(longer, &prompt(14)[10..]).expect("room");
    engine.preempt(longer, Keep::Drop).expect("it runs");
    engine.append(first, &prompt(14)[10..]).expect("room");
    commit(&mut engine, first, 14);
    engine.resume(longer, 0).expect("room");
    engine.preempt(second, Keep::Drop).expect("it runs");
    engine.resume(second, 0).expect("room");
    assert_eq!(engine.stats().prompts, 1);
    commit(&mut engine, second, 2);
    let stats = engine.stats();
    assert_eq!((stats.prompts, stats.prompt_tokens, stats.hit_tokens), (2, 20, 8));
    assert_eq!(stats.resume_hit_tokens, 0);
    // Of the 12 cached tokens that `longer` finds, 9 belong to its prompt.
    commit(&mut engine, longer, 2);
    let stats = engine.stats();
    assert_eq!((stats.prompts, stats.prompt_tokens, stats.hit_tokens), (3, 29, 17));
    assert_eq!(stats.resume_hit_tokens, 3);
    // After a sequence's first commit, the hit of a resume counts as a resume hit.
    engine.preempt(second, Keep::Publish).expect("it runs");
    engine.resume(second, 0).expect("room");
    commit(&mut engine, second, 2);
    let stats = engine.stats();
    assert_eq!((stats.prompts, stats.hit_tokens, stats.resume_hit_tokens), (3, 17, 3 + 8));
    assert_eq!((stats.admissions, stats.preemptions, stats.resumes), (3, 6, 6));
}

/// Steps in flight may plan tokens that are not yet known. The pages of these tokens may lie in a chunk that no known
/// token reaches.
#[test]
fn a_chunk_stays_while_pages_reach_it() {
    let pool = PoolConfig { page_size: 4, capacity: Capacity::Pages(512), ..Default::default() };
    let config = EngineConfig { max_tokens: 1024, max_sequences: 2, max_steps: 8, ..EngineConfig::from(pool) };
    let mut engine = Engine::new(config, Null).expect("a valid config");
    let table = engine.shape().table;
    let chunk = table.chunk_pages * 4;
    assert_eq!((chunk, table.chunk_count), (1024, 3));
    let mut scratch = StepScratch::new();
    let seq = engine.admit(Namespace::default(), &prompt(chunk), 0).expect("room");
    let mut plan =
        |engine: &mut Engine<Null>, len| engine.plan_batch(&mut scratch, &[Extend { seq, len }]).expect("room").step();
    plan(&mut engine, chunk);
    // The five unknown tokens take two pages of the second chunk. The first abort below releases the last page.
    let steps: Vec<_> = (0..5).map(|_| plan(&mut engine, 1)).collect();
    // Returns whether another sequence may have two chunks.
    let two = |engine: &Engine<Null>| {
        engine.verify().expect("all invariants hold");
        engine.admission(Namespace::default(), &prompt(chunk + 1), 0).map(|_| ())
    };
    let refused = Err(Error::OutOfTokens { wanted: 2048, available: 1024 });
    assert_eq!(two(&engine), refused);
    engine.abort(steps[4]).expect("it is open");
    assert_eq!(two(&engine), refused, "the table has a page in the second chunk");
    engine.abort(steps[0]).expect("it is open");
    assert_eq!(two(&engine), Ok(()));
    engine.append(seq, &prompt(1)).expect("a chunk is free");
    assert_eq!(two(&engine), refused);
    engine.rollback(seq, chunk).expect("nothing is published");
    assert_eq!(two(&engine), Ok(()));
}

/// Rows that shared a prefix are resumed without it. Between the plans, both rows release their locks, and a fork adds
/// 0 to 4 locks of another prefix.
#[test]
fn spans_cover_only_pages_that_rows_hold_now() {
    for others in 0..5 {
        let mut engine = engine(PrefixMode::Radix);
        let mut scratch = StepScratch::new();
        let mut plan = |engine: &mut Engine<Null>, seqs: &[SeqKey]| {
            let len = |seq| engine.extend_max(seq).expect("it is live");
            let items: Vec<_> = seqs.iter().map(|&seq| Extend { seq, len: len(seq) }).collect();
            let plan = engine.plan_batch(&mut scratch, &items).expect("room");
            let (step, spans) = (plan.step(), plan.shared.spans.len());
            engine.commit(step).expect("it is open");
            engine.complete(step).expect("it is committed");
            engine.verify().expect("all invariants hold");
            spans
        };
        let namespace = Namespace::default();
        let other: Vec<_> = (100..108).map(TokenId::new).collect();
        let other = engine.admit(namespace, &other, 0).expect("room");
        plan(&mut engine, &[other]);
        let pair = [1, 2].map(|own| {
            let text = [&prompt(8)[..], &[TokenId::new(50 + own)]].concat();
            let seq = engine.admit(namespace, &text, 0).expect("room");
            plan(&mut engine, &[seq]);
            engine.append(seq, &[TokenId::new(60)]).expect("room");
            seq
        });
        assert_eq!(plan(&mut engine, &pair), 1);
        pair.iter().for_each(|&seq| engine.preempt(seq, Keep::Drop).expect("it runs"));
        engine.reset();
        assert_eq!(engine.fork(other, others, 0).expect("room").children.len(), others as usize);
        pair.iter().for_each(|&seq| engine.resume(seq, 0).expect("room"));
        assert_eq!(plan(&mut engine, &pair), 0, "each computes its own pages, {others}");
    }
}
