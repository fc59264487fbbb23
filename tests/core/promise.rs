//! Promised pages: a sequence with a promise gets its pages, at once or after a named step is complete. No other
//! sequence can take them.

use kvarena::{
    Capacity, Engine, EngineConfig, EngineError, Error, Extend, Keep, Namespace, Null, PoolConfig, SeqKey, StepId,
    StepScratch, TokenId,
};

const PAGE_SIZE: u32 = 4;

fn engine(pages: u32) -> Engine<Null> {
    let pool = PoolConfig { page_size: PAGE_SIZE, capacity: Capacity::Pages(pages), ..Default::default() };
    let config = EngineConfig { max_tokens: 4096, ..EngineConfig::from(pool) };
    Engine::new(config, Null).expect("a valid config")
}

/// Returns the tokens of `pages` pages of a distinct text.
fn text(own: u32, pages: u32) -> Vec<TokenId> {
    (0..pages * PAGE_SIZE).map(|i| TokenId::new(1000 * own + i)).collect()
}

fn admit(engine: &mut Engine<Null>, prompt: &[TokenId], promised_pages: u32) -> Result<SeqKey, Error> {
    engine.admit(Namespace::default(), prompt, promised_pages * PAGE_SIZE)
}

fn plan(engine: &mut Engine<Null>, items: &[(SeqKey, u32)]) -> Result<StepId, Error> {
    let mut scratch = StepScratch::new();
    let items: Vec<_> = items.iter().map(|&(seq, len)| Extend { seq, len }).collect();
    match engine.plan_batch(&mut scratch, &items) {
        Ok(plan) => Ok(plan.step()),
        Err(EngineError::Core(error)) => Err(error),
        Err(error) => panic!("{error}"),
    }
}

fn commit(engine: &mut Engine<Null>, step: StepId) {
    engine.commit(step).expect("it is open");
    engine.verify().expect("all invariants hold");
}

fn out_of_pages(wanted: u64, available: u64, after: Option<StepId>) -> Error {
    Error::OutOfPages { wanted, available, after }
}

#[test]
fn a_pool_is_promised_once() {
    let mut engine = engine(10);
    // Without promises all six are admitted, although the pool has pages for only one.
    for own in 0..6 {
        admit(&mut engine, &text(own, 10), 0).expect("it could fit");
    }
    let mut engine = self::engine(10);
    let first = admit(&mut engine, &text(0, 10), 10).expect("all are free");
    assert_eq!((engine.outstanding(first), engine.available()), (Ok(10), 0));
    for own in 1..6 {
        let refused = Err(out_of_pages(10, 0, None));
        assert_eq!(admit(&mut engine, &text(own, 10), 10), refused);
        assert_eq!(admit(&mut engine, &text(own, 1), 0), Err(out_of_pages(1, 0, None)));
    }
    let step = plan(&mut engine, &[(first, 40)]).expect("they are promised");
    assert_eq!((engine.outstanding(first), engine.stats().free_pages), (Ok(0), 0));
    commit(&mut engine, step);
}

#[test]
fn cached_pages_need_no_promise() {
    let mut engine = engine(10);
    let first = admit(&mut engine, &text(0, 8), 8).expect("all are free");
    let step = plan(&mut engine, &[(first, 32)]).expect("they are promised");
    commit(&mut engine, step);
    let admission = engine.admission(Namespace::default(), &text(0, 8), 9 * PAGE_SIZE).expect("a row");
    assert_eq!((admission.cached_len, admission.idle_pages), (28, 0));
    assert_eq!((admission.lacking_pages, admission.available_pages, admission.fits()), (2, 2, true));
    let second = admit(&mut engine, &text(0, 8), 9).expect("seven pages are shared");
    assert_eq!((engine.outstanding(second), engine.available()), (Ok(2), 0));
    engine.verify().expect("all invariants hold");
}

/// Idle pages back promises, because the engine can evict these pages. A locked page backs no promise, so a lock is
/// refused if too few pages would remain.
#[test]
fn a_match_that_would_lock_what_backs_a_promise_is_refused() {
    let mut engine = engine(10);
    let first = admit(&mut engine, &text(0, 6), 0).expect("all are free");
    let step = plan(&mut engine, &[(first, 24)]).expect("all are free");
    commit(&mut engine, step);
    engine.complete(step).expect("it is committed");
    engine.finish(first).expect("it is live");
    assert_eq!((engine.stats().free_pages, engine.stats().evictable_pages), (4, 6));
    let promised = admit(&mut engine, &text(1, 1), 8).expect("free and evictable pages");
    assert_eq!(engine.available(), 2);
    let namespace = Namespace::default();
    let admission = engine.admission(namespace, &text(0, 6), 0).expect("a row");
    assert_eq!((admission.cached_len, admission.idle_pages), (20, 5));
    assert_eq!((admission.lacking_pages, admission.available_pages, admission.after), (1, 0, None));
    assert_eq!(admit(&mut engine, &text(0, 6), 0), Err(out_of_pages(1, 0, None)));
    // A shorter match and its remaining page are still available.
    let short = admit(&mut engine, &text(0, 2), 0).expect("one idle page and a new one");
    engine.verify().expect("all invariants hold");
    let step = plan(&mut engine, &[(promised, 4), (short, 4)]).expect("both have theirs");
    commit(&mut engine, step);
    // The short sequence's page becomes a duplicate; when the duplicate returns, it backs the promise.
    engine.append(promised, &text(1, 8)[4..]).expect("room for tokens");
    assert_eq!(plan(&mut engine, &[(promised, 28)]), Err(out_of_pages(7, 6, Some(step))));
    engine.complete(step).expect("it is committed");
    let step = plan(&mut engine, &[(promised, 28)]).expect("they are promised");
    commit(&mut engine, step);
    assert_eq!(engine.stats().evicted_pages, 4, "the four idle pages back the promise");
}

/// Two equal prompts are computed by two steps in flight. The commit of the second step finds the first prompt's pages
/// in the tree. The second prompt's pages are duplicates; they wait in the fence and back promises.
#[test]
fn duplicate_pages_back_promises_after_the_step_is_complete() {
    let mut engine = engine(12);
    let old = admit(&mut engine, &text(0, 4), 0).expect("all are free");
    let first = plan(&mut engine, &[(old, 16)]).expect("all are free");
    let twin = admit(&mut engine, &text(0, 4), 4).expect("nothing is cached yet");
    let second = plan(&mut engine, &[(twin, 16)]).expect("they are promised");
    // The two prompts have four pages each. The last four pages are promised to another sequence.
    let other = admit(&mut engine, &text(1, 4), 4).expect("they are free");
    commit(&mut engine, first);
    engine.complete(first).expect("it is committed");
    engine.finish(old).expect("it is live");
    assert_eq!((engine.stats().evictable_pages, engine.available()), (4, 4));
    // Another sequence is promised the idle pages, so that all remaining pages are promised.
    let filler = admit(&mut engine, &text(2, 4), 4).expect("four idle pages");
    assert_eq!(engine.available(), 0);
    let stats = engine.stats();
    commit(&mut engine, second);
    assert_eq!((stats.evictable_pages, engine.stats().evictable_pages), (4, 0), "in use again");
    assert_eq!(engine.stats().fenced_pages, 4, "the twin's own");
    // Eight pages are promised: four free, four in the fence.
    assert_eq!((engine.stats().outstanding_pages, engine.stats().free_pages), (8, 4));
    let third = plan(&mut engine, &[(other, 16)]).expect("they are promised");
    let refused = plan(&mut engine, &[(filler, 16)]);
    assert_eq!(refused, Err(out_of_pages(4, 0, Some(second))));
    assert_eq!(engine.available_after(second), 0, "for other sequences");
    engine.complete(second).expect("it is committed");
    let fourth = plan(&mut engine, &[(filler, 16)]).expect("the named step is complete");
    commit(&mut engine, third);
    commit(&mut engine, fourth);
}

#[test]
fn pages_returned_by_abort_and_rollback_are_promised_again() {
    let mut engine = engine(8);
    let seq = admit(&mut engine, &text(0, 6), 6).expect("all are free");
    let first = plan(&mut engine, &[(seq, 12)]).expect("they are promised");
    let second = plan(&mut engine, &[(seq, 12)]).expect("they are promised");
    assert_eq!((engine.outstanding(seq), engine.available()), (Ok(0), 2));
    engine.abort(second).expect("it is open");
    engine.verify().expect("all invariants hold");
    assert_eq!((engine.outstanding(seq), engine.available()), (Ok(3), 0));
    assert_eq!(engine.stats().fenced_pages, 3);
    let other = admit(&mut engine, &text(1, 1), 0);
    assert_eq!(other, Err(out_of_pages(1, 0, Some(second))), "the free pages are promised");
    // Two of three pages are free and may be taken at once; the third is in the fence.
    let refused = plan(&mut engine, &[(seq, 12)]);
    assert_eq!(refused, Err(out_of_pages(3, 2, Some(second))));
    engine.rollback(seq, 5).expect("nothing is published");
    engine.verify().expect("all invariants hold");
    assert_eq!((engine.outstanding(seq), engine.available()), (Ok(4), 0));
    commit(&mut engine, first);
    engine.complete(second).expect("all are closed");
    assert_eq!((engine.outstanding(seq), engine.available()), (Ok(4), 2));
}

#[test]
fn a_plan_beyond_its_promise_takes_unpromised_pages() {
    let mut engine = engine(8);
    let seq = admit(&mut engine, &text(0, 6), 3).expect("all are free");
    let other = admit(&mut engine, &text(1, 3), 3).expect("five are left");
    assert_eq!(engine.available(), 2);
    assert_eq!(plan(&mut engine, &[(seq, 24)]), Err(out_of_pages(6, 5, None)));
    let first = plan(&mut engine, &[(seq, 20)]).expect("three promised and two more");
    assert_eq!((engine.available(), engine.outstanding(other)), (0, Ok(3)));
    // The pages beyond the promise are released first, and are not promised.
    engine.rollback(seq, 16).expect("nothing is published");
    assert_eq!(engine.outstanding(seq), Ok(0));
    engine.rollback(seq, 8).expect("nothing is published");
    assert_eq!(engine.outstanding(seq), Ok(1));
    let second = plan(&mut engine, &[(other, 12)]).expect("they are promised");
    commit(&mut engine, first);
    commit(&mut engine, second);
}

#[test]
fn a_promise_can_be_made_changed_and_cancelled() {
    let mut engine = engine(8);
    let seq = admit(&mut engine, &text(0, 2), 0).expect("all are free");
    assert_eq!(engine.promise(seq, 33), Err(Error::TooLong { len: 33, max: 32 }));
    engine.promise(seq, 5 * PAGE_SIZE + 1).expect("all are free");
    assert_eq!((engine.outstanding(seq), engine.available()), (Ok(6), 2));
    engine.promise(seq, 5 * PAGE_SIZE).expect("it is less");
    let other = admit(&mut engine, &text(1, 2), 3).expect("three are left");
    assert_eq!(engine.promise(seq, 6 * PAGE_SIZE), Err(out_of_pages(1, 0, None)));
    assert_eq!(engine.outstanding(seq), Ok(5), "as it was");
    engine.promise(seq, 0).expect("it is less");
    assert_eq!(engine.available(), 5);
    engine.preempt(other, Keep::Publish).expect("it runs");
    assert_eq!((engine.outstanding(other), engine.available()), (Ok(0), 8));
    assert_eq!(engine.promise(other, 1), Err(Error::Preempted { seq: other }));
    assert_eq!(engine.resume(other, 33), Err(Error::TooLong { len: 33, max: 32 }));
    engine.resume(other, 8 * PAGE_SIZE).expect("all are free");
    assert_eq!(engine.available(), 0);
    engine.finish(other).expect("it is live");
    assert_eq!(engine.available(), 8);
    assert_eq!(engine.promise(other, 1), Err(Error::UnknownSequence { seq: other }));
    engine.verify().expect("all invariants hold");
}

#[test]
fn every_child_of_a_fork_is_promised_its_own() {
    let mut engine = engine(12);
    let parent = admit(&mut engine, &text(0, 2)[..6], 0).expect("all are free");
    let step = plan(&mut engine, &[(parent, 6)]).expect("all are free");
    commit(&mut engine, step);
    engine.complete(step).expect("it is committed");
    // Each child shares a whole page and takes three pages: a copy of the tail, and two that are promised. Ten are
    // free.
    let namespace = Namespace::default();
    let admission = engine.admission(namespace, &text(1, 11), 0).expect("a row");
    assert_eq!((admission.lacking_pages, admission.available_pages, admission.fits()), (11, 10, false));
    let refused = engine.fork(parent, 4, 4 * PAGE_SIZE).expect_err("each takes three");
    assert_eq!(refused, EngineError::Core(out_of_pages(12, 10, None)));
    assert_eq!(engine.stats().sequences, 1, "all or none");
    let forked = engine.fork(parent, 3, 4 * PAGE_SIZE).expect("each takes three");
    assert_eq!((forked.children.len(), forked.copies.len()), (3, 3));
    let (children, copies) = (forked.children.to_vec(), forked.copies.to_vec());
    let step = forked.step.expect("tails are copied");
    assert!(copies.iter().all(|copy| copy.source == copies[0].source));
    assert_eq!(engine.stats().steps, 1, "one step");
    for &child in &children {
        assert_eq!((engine.outstanding(child), engine.cached_len(child)), (Ok(2), Ok(6)));
    }
    assert_eq!((engine.available(), engine.stats().outstanding_pages), (1, 6));
    engine.complete(step).expect("it counts as committed");
    engine.verify().expect("all invariants hold");
    assert!(engine.fork(parent, 0, 0).expect("it is live").children.is_empty());
    let max = engine.config().max_sequences;
    let refused = engine.fork(parent, u32::MAX, 0).expect_err("too many rows");
    assert_eq!(refused, EngineError::Core(Error::OutOfSequences { max }));
}
