//! Prompts that wait until a store has their records, so that another engine reads them.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use kvarena::id::Namespace;
use kvarena_tiers::store::Store;
use kvarena_tiers::tier::{Find, TierOptions};

use super::host::{Host, PAGE_SIZE, models, of, options, text};
use super::{ALL, faulty, memory, slow};

/// Confirms a prompt, and waits for the report.
fn confirm(host: &mut Host, namespace: Namespace, len: u32) -> Find {
    let found = host.tier.confirm(7, &mut host.engine, namespace, &text(0..len));
    if found == Find::Waiting {
        assert_eq!(host.reports(1), [(7, 0)]);
    }
    found
}

#[test]
fn a_confirmed_prompt_is_in_the_store() {
    for config in models() {
        let store = memory();
        let mut first = Host::new(&config, Arc::clone(&store), None);
        for len in [33, 50, 33, 64] {
            first.serve(ALL, &text(0..len));
            assert_eq!(confirm(&mut first, ALL, len), Find::Waiting);
            // At once, and without a flush, another engine hits all whole records before the last token.
            let mut second = Host::new(&config, Arc::clone(&store), None);
            second.find(ALL, &text(0..len));
            let record = config.record_pages * PAGE_SIZE;
            assert_eq!(second.serve(ALL, &text(0..len)), (len - 1) / record * record, "{len}");
        }
        assert_eq!((first.tier.waits().confirmed, first.tier.waits().unconfirmed), (4, 0));
    }
}

#[test]
fn lost_records_are_put_again() {
    for config in models() {
        let store = memory();
        let mut first = Host::new(&config, Arc::clone(&store), None);
        first.serve(ALL, &text(0..33));
        confirm(&mut first, ALL, 33);
        let (names, puts) = (store.names(), first.tier.stats()[0].put);
        assert_eq!(puts, names.len() as u64);
        let lost: Vec<_> = names.iter().copied().step_by(2).collect();
        store.remove(&lost).expect("no failure");
        assert_eq!(confirm(&mut first, ALL, 33), Find::Waiting);
        assert_eq!((store.names(), first.tier.stats()[0].put), (names, puts + lost.len() as u64));
        // With all records in the store, nothing is put.
        assert_eq!(confirm(&mut first, ALL, 33), Find::Waiting);
        assert_eq!(first.tier.stats()[0].put, puts + lost.len() as u64);
    }
}

#[test]
fn prompts_without_records_do_not_wait() {
    let mut host = Host::plain(&memory());
    assert_eq!(confirm(&mut host, ALL, 33), Find::Ready, "nothing is computed");
    host.serve(ALL, &text(0..4));
    assert_eq!(confirm(&mut host, ALL, 4), Find::Ready, "no other prompt can match the last token");
    assert_eq!(confirm(&mut host, Namespace::new(9), 33), Find::Ready, "the namespace has no name");
    assert_eq!(host.tier.waits().confirmed, 0);
}

#[test]
fn a_store_that_fails_delays_no_prompt() {
    let store = Arc::new(faulty());
    store.is_gone.store(true, Relaxed);
    let mut host = Host::plain(&store);
    host.serve(ALL, &text(0..33));
    // The breaker stops the store after five failures, which ends the wait.
    assert_eq!(confirm(&mut host, ALL, 33), Find::Waiting);
    assert_eq!(confirm(&mut host, ALL, 33), Find::Ready);
    assert_eq!((host.tier.waits().confirmed, host.tier.waits().unconfirmed), (2, 2));
    // The store comes back, and gets the records.
    store.is_gone.store(false, Relaxed);
    host.until(|host| host.tier.stats()[0].put == 8);
    assert_eq!(confirm(&mut host, ALL, 33), Find::Waiting);
    assert_eq!((host.tier.waits().confirmed, host.tier.waits().unconfirmed), (3, 2));
    let store = Arc::new(faulty());
    store.room.store(3, Relaxed);
    let mut host = Host::plain(&store);
    host.serve(ALL, &text(0..33));
    assert_eq!(confirm(&mut host, ALL, 33), Find::Waiting);
    assert_eq!((host.tier.stats()[0].put, host.tier.waits().unconfirmed), (3, 1));
}

#[test]
fn a_store_that_hangs_delays_a_prompt_until_its_deadline() {
    let put_deadline = Duration::from_millis(1);
    let mut host = Host::plain_with(TierOptions { put_deadline, ..options(vec![of(&slow(&memory(), 200), 1)]) });
    host.serve(ALL, &text(0..33));
    assert_eq!(confirm(&mut host, ALL, 33), Find::Waiting);
    assert_eq!((host.tier.waits().unconfirmed, host.tier.stats()[0].put < 8), (1, true));
    assert!(host.flush());
    assert_eq!(host.tier.stats()[0].put, 8);
}

#[test]
fn a_store_that_hangs_delays_no_prompt_if_another_one_works() {
    let stores = [Arc::new(faulty()), Arc::new(faulty())];
    stores[0].gate.hold([false, false, true]);
    // Half of it is left for the puts of the first prompt, also on a busy machine.
    let put_deadline = Duration::from_secs(8);
    let options = options(stores.iter().map(|store| of(store, 1)).collect());
    let mut host = Host::plain_with(TierOptions { put_deadline, ..options });
    host.serve(ALL, &text(0..33));
    host.turn();
    host.until(|host| host.tier.open().2 > 0);
    stores[0].gate.wait_for(1);
    std::thread::sleep(put_deadline / 2);
    // The question for the first prompt waits for the store when it hangs; the other one comes later.
    for start in [100, 200] {
        let prompt = text(start..start + 33);
        host.serve(ALL, &prompt);
        assert_eq!(host.tier.confirm(7, &mut host.engine, ALL, &prompt), Find::Waiting);
        assert_eq!(host.reports(1), [(7, 0)]);
    }
    assert_eq!((host.tier.waits().confirmed, host.tier.waits().unconfirmed), (2, 0));
    assert!(stores[0].inner.names().is_empty() && stores[1].inner.names().len() >= 16);
    stores[0].gate.hold([false; 3]);
    assert!(host.flush());
}

#[test]
fn a_prompt_does_not_wait_for_a_queued_record_that_the_cache_has_lost() {
    let store = Arc::new(faulty());
    store.gate.hold([false, false, true]);
    // No deadline wakes the host.
    let options = TierOptions { put_deadline: Duration::MAX, puts_max: 1, ..options(vec![of(&store, 2)]) };
    let mut host = Host::plain_with(options);
    host.serve(ALL, &text(100..133));
    host.turn();
    host.until(|host| host.tier.open().2 == 1);
    host.serve(ALL, &text(0..33));
    assert_eq!(host.tier.confirm(7, &mut host.engine, ALL, &text(0..33)), Find::Waiting);
    while !host.tier.has_results() {
        std::thread::sleep(Duration::from_millis(1));
    }
    host.turn();
    host.engine.reset();
    assert_eq!(host.reports(1), [(7, 0)]);
    assert_eq!((host.tier.waits().unconfirmed, host.tier.open().2), (0, 1));
    store.gate.hold([false; 3]);
    assert!(host.flush());
}

#[test]
fn a_prompt_without_an_answer_is_not_confirmed() {
    let store = Arc::new(faulty());
    let mut host = Host::plain(&store);
    host.serve(ALL, &text(0..33));
    assert!(host.flush());
    for (is_gone, unconfirmed) in [(true, 1), (false, 1)] {
        store.is_gone.store(is_gone, Relaxed);
        assert_eq!(confirm(&mut host, ALL, 33), Find::Waiting);
        assert_eq!(host.tier.waits().unconfirmed, unconfirmed);
    }
    assert_eq!(host.tier.stats()[0].put, 8);
}

#[test]
fn a_cancelled_prompt_is_not_reported() {
    let mut host = Host::plain(&memory());
    host.serve(ALL, &text(0..33));
    assert_eq!(host.tier.confirm(7, &mut host.engine, ALL, &text(0..33)), Find::Waiting);
    host.tier.cancel(7);
    assert_eq!(host.tier.confirm(8, &mut host.engine, ALL, &text(0..33)), Find::Waiting);
    assert_eq!(host.reports(1), [(8, 0)]);
}

#[test]
fn prompts_are_compared_after_their_own_puts_alone() {
    let store = Arc::new(faulty());
    store.gate.hold([false, false, true]);
    let mut host = Host::plain(&store);
    let prompts: Vec<_> = (0..12).map(|at| text(100 * at..100 * at + 21)).collect();
    for (id, prompt) in (0..).zip(&prompts) {
        host.serve(ALL, prompt);
        assert_eq!(host.tier.confirm(id, &mut host.engine, ALL, prompt), Find::Waiting);
    }
    host.until(|host| host.tier.open().2 > 0);
    store.gate.hold([false; 3]);
    let mut reports: Vec<_> = host.reports(12).into_iter().map(|(id, _)| id).collect();
    reports.sort_unstable();
    assert_eq!(reports, (0..12).collect::<Vec<_>>());
    // 60 puts: each prompt once after its last one, and a few that wait when nothing is open, or for long. Pauses
    // double, so a prompt has at most 6 comparisons before its deadline.
    let waits = host.tier.waits();
    assert_eq!((waits.confirmed, waits.unconfirmed), (12, 0));
    assert!((12..=96).contains(&waits.compared), "{} comparisons", waits.compared);
}
