//! Guarantees of the engine that random programs do not compare: threads, wide slots, the words that plans send, leaves
//! of page tables, and spans. `replay.rs` compares all other results with the model.

use kvarena::layout::Groups;
use kvarena::plan::{OwnedPlan, SlotMapping};
use kvarena::{EngineConfig, Error, Extend, Keep, Namespace, PageId, PoolConfig, SeqKey, StepId, TokenId};

use super::host::{ALL, Host, pool, text};

/// Returns an engine with 64 pages of 4 tokens.
fn small() -> Host {
    Host::null(EngineConfig { max_tokens: 4096, ..pool(4, 64, Groups::ONE).into() })
}

#[test]
fn an_engine_moves_to_another_thread() {
    let mut host = small();
    let moved = std::thread::spawn(move || {
        host.begin(&text(0..9));
        host
    });
    assert_eq!(moved.join().expect("no panic").stats().sequences, 1);
}

#[test]
fn a_pool_of_more_than_2_31_slots_has_64_bit_slots() {
    // The memory is reserved and not touched: only a few system pages are used.
    let pool = pool(1024, (1 << 21) + 1, Groups::ONE);
    let Host { mut engine, mut scratch } =
        Host::null(EngineConfig { prefault: false, max_tokens: 4096, ..pool.into() });
    let seq = engine.admit(ALL, &text(0..1030), 0).expect("room");
    let plan = engine.plan_batch(&mut scratch, &[Extend { seq, len: 1030 }]).expect("room");
    let SlotMapping::I64(slots) = plan.slot_mapping else { panic!("64-bit slots") };
    assert!(slots.iter().copied().eq(0..1030));
    assert_eq!(OwnedPlan::from(&plan).plan(), plan);
}

/// Two steps in flight plan tokens that are not yet known. The first unknown token begins a leaf of the page table,
/// which no known token reaches. The leaf stays when the second step is aborted.
#[test]
fn an_abort_keeps_the_leaf_that_an_earlier_step_began() {
    let mut host = Host::null(pool(1, 8192, Groups::ONE));
    let leaf = host.shape().table.leaf_pages;
    let seq = host.begin(&text(0..leaf));
    let [_, _, last] = [leaf, 1, 1].map(|len| host.plan(seq, len));
    host.abort(last).expect("it is open");
    let table: Vec<PageId> = host.page_table(seq).expect("it is live").collect();
    assert_eq!(table.len() as u32, leaf + 1);
    // Another sequence would get that leaf if it were free.
    let other = host.admit(Namespace::new(1), &text(0..1), 0).expect("room");
    host.plan(other, 1);
    assert!(host.page_table(seq).expect("it is live").eq(table));
    host.check();
}

/// Steps in flight may plan tokens that are not yet known. The pages of these tokens may lie in a leaf that no known
/// token reaches.
#[test]
fn a_leaf_stays_while_pages_reach_it() {
    let config = EngineConfig { max_tokens: 1024, max_sequences: 2, max_steps: 8, ..pool(4, 512, Groups::ONE).into() };
    let mut host = Host::null(config);
    let table = host.shape().table;
    let leaf = table.leaf_pages * 4;
    assert_eq!((leaf, table.leaf_count), (1024, 3));
    let seq = host.begin(&text(0..leaf));
    host.plan(seq, leaf);
    // The five unknown tokens take two pages of the second leaf. The first abort below releases the last page.
    let steps = [(); 5].map(|()| host.plan(seq, 1));
    // Returns whether another sequence may have two leaves.
    let two = |host: &Host| {
        host.check();
        host.admission(ALL, &text(0..leaf + 1), 0).map(|_| ())
    };
    let refused = Err(Error::OutOfTokens { wanted: 2048, available: 1024 });
    assert_eq!(two(&host), refused);
    host.abort(steps[4]).expect("it is open");
    assert_eq!(two(&host), refused, "the table has a page in the second leaf");
    host.abort(steps[0]).expect("it is open");
    assert_eq!(two(&host), Ok(()));
    host.append(seq, &text(0..1)).expect("a leaf is free");
    assert_eq!(two(&host), refused);
    host.rollback(seq, leaf).expect("nothing is published");
    assert_eq!(two(&host), Ok(()));
}

#[test]
fn words_of_the_page_tables_are_sent_once() {
    let mut host = small();
    let seq = host.begin(&text(0..6));
    let words = |host: &mut Host, len| {
        let plan = host.engine.plan_batch(&mut host.scratch, &[Extend { seq, len }]).expect("room");
        (plan.step(), plan.table_writes.len())
    };
    // Two pages and their leaf, then a word for each new page.
    assert_eq!(words(&mut host, 6).1, 3);
    for position in 6..30 {
        host.append(seq, &text(0..1)).expect("room");
        let (step, sent) = words(&mut host, 1);
        assert_eq!(sent, usize::from(position % 4 == 0), "position {position}");
        host.close(StepId::new(step.raw() - 1));
    }
    // The words of an aborted plan are sent again.
    for _ in 0..2 {
        host.append(seq, &text(0..3)).expect("room");
        let (step, sent) = words(&mut host, 3);
        assert_eq!(sent, 1);
        host.abort(step).expect("it is open");
        host.rollback(seq, 30).expect("nothing past it is published");
    }
    host.check();
}

/// A step in flight may sample a token of a sequence that the host preempts meanwhile.
#[test]
fn a_sample_may_arrive_after_the_preemption() {
    let mut host = small();
    let seq = host.begin(&text(0..6));
    let step = host.plan(seq, 6);
    host.preempt(seq, Keep::Publish).expect("it runs");
    host.append(seq, &text(6..7)).expect("it is live");
    host.close(step);
    host.resume(seq, 0).expect("there is room");
    assert_eq!(host.tokens(seq).map(Iterator::collect::<Vec<_>>), Ok(text(0..7)));
    assert_eq!(host.extend_max(seq), Ok(7));
}

#[test]
fn a_sequence_is_no_longer_than_the_pool() {
    let mut host = Host::null(EngineConfig { max_tokens: 4096, ..pool(4, 3, Groups::ONE).into() });
    assert_eq!(host.shape().max_sequence_len, 12);
    let seq = host.begin(&text(0..12));
    host.plan(seq, 12);
    assert_eq!(host.extend_max(seq), Ok(0), "no place for the next token");
    assert_eq!(host.append(seq, &text(0..1)), Err(Error::TooLong { len: 13, max: 12 }));
    let cut = EngineConfig { reserved_pages: 2, ..pool(4, 3, Groups::ONE).into() };
    assert_eq!(cut.shape().expect("a valid config").max_sequence_len, 4);
    // In a larger pool, a sequence has at most 2^30 tokens, and at most those that the tables have memory for.
    let large: PoolConfig = pool(1024, 1 << 21, Groups::ONE);
    let config = EngineConfig { max_sequence_len: u32::MAX, max_tokens: 1 << 31, ..large.into() };
    assert_eq!(config.shape().expect("a valid config").max_sequence_len, 1 << 30);
    let (rows, leaf) = (u64::from(config.max_sequences), 1024);
    let config = EngineConfig { max_tokens: 5000, ..config };
    assert_eq!(u64::from(config.shape().expect("a valid config").max_sequence_len), (4 + rows) * leaf);
}

/// Rows that shared a prefix are resumed without it. Between the plans, both rows release their locks, and a fork adds
/// 0 to 4 locks of another prefix.
#[test]
fn spans_cover_only_pages_that_rows_hold_now() {
    for others in 0..5 {
        let mut host = small();
        let spans = |host: &mut Host, pair: [SeqKey; 2]| {
            let items = pair.map(|seq| Extend { seq, len: host.extend_max(seq).expect("it is live") });
            let plan = host.engine.plan_batch(&mut host.scratch, &items).expect("room");
            let (step, spans) = (plan.step(), plan.shared.spans.len());
            host.close(step);
            spans
        };
        let other = host.prefill(&text(100..108));
        let pair = [1, 2].map(|own| {
            let seq = host.prefill(&[&text(0..8)[..], &[TokenId::new(50 + own)]].concat());
            host.append(seq, &[TokenId::new(60)]).expect("room");
            seq
        });
        assert_eq!(spans(&mut host, pair), 1);
        pair.iter().for_each(|&seq| host.preempt(seq, Keep::Drop).expect("it runs"));
        host.reset();
        assert_eq!(host.fork(other, others, 0).expect("room").children.len(), others as usize);
        pair.iter().for_each(|&seq| host.resume(seq, 0).expect("room"));
        assert_eq!(spans(&mut host, pair), 0, "each computes its own pages, {others}");
    }
}
