//! Failures that the oracle has found, as literal calls or ops, with date and cause.

use kvarena::{
    Capacity, Engine, EngineConfig, Extend, Namespace, Null, PageCopy, PageId, PoolConfig, StepScratch, TokenId,
};

fn engine(pages: u32, page_size: u32) -> Engine<Null> {
    let pool = PoolConfig { page_size, capacity: Capacity::Pages(pages), ..PoolConfig::default() };
    Engine::new(EngineConfig::from(pool), Null).expect("a valid config")
}

fn tokens(text: &str) -> Vec<TokenId> {
    text.bytes().map(|byte| TokenId::new(byte.into())).collect()
}

/// 2026-11-21. `fork` checked that a page for the tail's copy was available, then published the parent's whole pages,
/// and then took the page. A publish locks the last idle page if the parent has a duplicate of it. The call failed with
/// `OutOfPages` after it had published, and lost a lock.
#[test]
fn fork_takes_the_tail_before_it_publishes() {
    let mut engine = engine(4, 2);
    let mut scratch = StepScratch::new();
    let namespace = Namespace::default();
    let first = engine.admit(namespace, &tokens("abcde"), 0).expect("the pool is empty");
    let plan = engine.plan_batch(&mut scratch, &[Extend { seq: first, len: 5 }]);
    let step = plan.expect("it fits").step();
    engine.commit(step).expect("it is open");
    engine.complete(step).expect("it is committed");
    engine.finish(first).expect("it is live");
    // Idle: p0 (ab), p1 (cd). The second sequence finds p0 only, because its prompt ends at "c". It computes "cde"
    // before the host appends "de".
    let seq = engine.admit(namespace, &tokens("abc"), 0).expect("two pages are free");
    for _ in "cde".chars() {
        let plan = engine.plan_batch(&mut scratch, &[Extend { seq, len: 1 }]);
        let step = plan.expect("it fits").step();
        engine.commit(step).expect("it is open");
    }
    engine.append(seq, &tokens("de")).expect("it fits");
    assert_eq!((engine.stats().free_pages, engine.available()), (0, 1)); // p1

    let forked = engine.fork(seq, 1, 0).expect("a page is idle");
    let copy = PageCopy { source: PageId::new(3), target: PageId::new(1) };
    assert_eq!(forked.copies, [copy]);
    let child = forked.children[0];
    let table: Vec<_> = engine.page_table(child).expect("it is live").collect();
    assert_eq!(table, [0, 2, 1].map(PageId::new));
    engine.verify().expect("nothing is lost");
}
