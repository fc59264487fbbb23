//! Engines over stores: what one computes, another one hits, whatever the store does.

mod confirm;
#[path = "../common/host.rs"]
mod host;
mod identity;
mod repeat;
mod spaces;

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use host::{Host, PAGE_SIZE, disk, models, of, options, text};
use kvarena::id::Namespace;
use kvarena_tiers::check::Secret;
use kvarena_tiers::miss::Miss;
use kvarena_tiers::store::Store;
use kvarena_tiers::testing::{Faulty, Memory};
use kvarena_tiers::tier::{Find, LoadRule, StoreOptions, TierOptions};

const ALL: Namespace = Namespace::new(0);

/// A host that computes a prompt of 33 tokens and puts its records.
fn filled(store: &Arc<impl Store>) -> Host {
    let mut host = Host::plain(store);
    assert_eq!(host.serve(ALL, &text(0..33)), 0);
    host.flush();
    host
}

fn memory() -> Arc<Memory> {
    Arc::default()
}

fn faulty() -> Faulty<Memory> {
    Faulty::new(memory())
}

/// The same store, with calls that take this time.
fn slow<S: Store>(store: &Arc<S>, milliseconds: u64) -> Arc<Faulty<S>> {
    Arc::new(Faulty { delay: Duration::from_millis(milliseconds), ..Faulty::new(Arc::clone(store)) })
}

/// A host over a store with this number of threads and this deadline.
fn hurried(store: &Arc<impl Store>, threads: usize, milliseconds: u64) -> Host {
    let deadline = Duration::from_millis(milliseconds);
    Host::plain_with(TierOptions { deadline, ..options(vec![of(store, threads)]) })
}

/// A store with the records of the prompt.
fn full() -> Arc<Memory> {
    let store = memory();
    drop(filled(&store));
    store
}

/// Finds and serves the prompt with a new engine. Returns the cached tokens.
fn hit(store: &Arc<impl Store>) -> (u32, Host) {
    let mut host = Host::plain(store);
    let pages = host.find(ALL, &text(0..33));
    let cached = host.serve(ALL, &text(0..33));
    assert_eq!(cached, pages * PAGE_SIZE);
    (cached, host)
}

#[test]
fn what_one_engine_computes_another_one_hits() {
    for config in models() {
        for secret in [None, Some(Secret::new([3; 32]))] {
            let (store, prompts) = (memory(), [text(0..33), text(100..141), text(0..50)]);
            let mut first = Host::new(&config, Arc::clone(&store), secret.clone());
            for prompt in &prompts {
                first.find(ALL, prompt);
                first.serve(ALL, prompt);
            }
            assert!(first.flush());
            drop(first);
            let mut second = Host::new(&config, Arc::clone(&store), secret.clone());
            for prompt in [2, 1, 0].map(|at| &prompts[at]) {
                second.find(ALL, prompt);
                // All whole records before the last token.
                let record = config.record_pages * PAGE_SIZE;
                assert_eq!(second.serve(ALL, prompt), (prompt.len() as u32 - 1) / record * record);
            }
            assert_eq!((second.misses(), second.tier.open()), (vec![], (0, 0, 0)));
            // Without the secret, no record is read.
            let mut third = Host::new(&config, Arc::clone(&store), secret.is_none().then(|| Secret::new([4; 32])));
            assert_eq!(third.find(ALL, &prompts[0]), 0);
            assert!(third.misses().iter().all(|(miss, _)| *miss == Miss::Secret) && !third.misses().is_empty());
        }
    }
}

#[test]
fn a_disk_serves_a_restart() {
    let folder = tempfile::tempdir().expect("a folder");
    let open = || disk(folder.path());
    drop(filled(&open()));
    assert_eq!(hit(&open()).0, 32);
    // Damage in each record in turn: the hit ends before it, and the damaged file is removed.
    let mut files = Vec::new();
    let cache = kvarena_tiers::disk::Cache::open(folder.path()).expect("it is there");
    cache.list(|file| files.push(folder.path().join(file.name.to_string()))).expect("no failure");
    for file in files {
        let mut bytes = std::fs::read(&file).expect("it is there");
        bytes[200] ^= 1;
        std::fs::write(&file, &bytes).expect("it is ours");
        let mut host = Host::plain_with(options(vec![StoreOptions { removes_damage: true, ..of(&open(), 2) }]));
        assert!(host.find(ALL, &text(0..33)) < 8);
        assert_eq!((host.misses()[0], host.tier.stats()[0].removed), ((Miss::HeadCheck, 1), 1));
        assert!(!file.exists());
        host.serve(ALL, &text(0..33));
        assert!(host.flush() && file.exists());
    }
}

#[test]
fn torn_and_false_records_are_misses() {
    for keep in [0, 100, 4096, 4200, 4607] {
        let store = Arc::new(Faulty { keep, ..faulty() });
        drop(filled(&store));
        let (cached, host) = hit(&store);
        assert_eq!((cached, host.misses().len()), (0, 1), "{keep}");
    }
    let store = Arc::new(Faulty { lies: true, ..faulty() });
    let mut host = filled(&store);
    assert!(store.inner.names().is_empty(), "the store claims to have all records");
    let (cached, other) = hit(&store);
    assert_eq!((cached, other.misses()), (0, vec![(Miss::Magic, 8)]));
    // A record that was read and not accepted is put whatever the store claims.
    host.engine.reset();
    assert_eq!(host.find(ALL, &text(0..33)), 0);
    host.serve(ALL, &text(0..33));
    host.flush();
    assert_eq!(store.inner.names().len(), 8);
    assert_eq!(hit(&store).0, 32);
}

#[test]
fn a_damaged_record_is_put_again() {
    let store = full();
    let names = store.names();
    for name in &names {
        let mut bytes = store.record(name).expect("it is stored");
        bytes[4096] ^= 1;
        store.set(*name, bytes);
    }
    let (cached, mut host) = hit(&store);
    assert_eq!((cached, host.misses()), (0, vec![(Miss::PageCheck, 8)]));
    host.flush();
    assert_eq!(hit(&store).0, 32);
}

#[test]
fn a_full_store_gets_no_puts_and_the_rest_waits() {
    let store = Arc::new(faulty());
    store.room.store(3, Relaxed);
    let mut host = Host::plain(&store);
    host.serve(ALL, &text(0..33));
    host.turn();
    host.until(|host| host.tier.open().2 == 0 && host.tier.stats()[0].is_stopped);
    assert_eq!((store.inner.names().len(), host.tier.stats()[0].put), (3, 3));
    store.room.store(100, Relaxed);
    // The tier wakes the host when the store is tried again.
    host.until(|host| host.tier.stats()[0].put == 8);
    assert_eq!(hit(&store).0, 32);
}

#[test]
fn a_store_that_dies_costs_few_calls_and_comes_back() {
    let store = Arc::new(faulty());
    drop(filled(&store));
    store.is_gone.store(true, Relaxed);
    let mut host = Host::plain(&store);
    let before = store.calls.load(Relaxed);
    for at in 0..100 {
        host.find(ALL, &text(0..33));
        host.serve(ALL, &text(1000 + 50 * at..1033 + 50 * at));
    }
    let calls = store.calls.load(Relaxed) - before;
    // Five failures, those of calls that were under way, and trials once in a second or less often.
    assert!((5..50).contains(&calls), "{calls}");
    assert_eq!(host.tier.find(1, &host.engine, ALL, &text(0..33)), Find::Ready);
    store.is_gone.store(false, Relaxed);
    while host.find(ALL, &text(0..33)) == 0 {
        std::thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(host.serve(ALL, &text(0..33)), 32);
    assert!(host.flush());
}

#[test]
fn a_store_that_dies_in_a_fetch_is_a_miss() {
    let store = Arc::new(faulty());
    drop(filled(&store));
    let mut host = Host::plain(&slow(&store, 20));
    assert_eq!(host.tier.find(1, &host.engine, ALL, &text(0..33)), Find::Waiting);
    host.until(|host| host.tier.open().1 == 1);
    store.is_gone.store(true, Relaxed);
    host.until(|host| host.tier.open() == (0, 0, 0));
    assert!(host.misses().iter().all(|(miss, _)| *miss == Miss::Failed));
    host.serve(ALL, &text(0..33));
}

#[test]
fn a_deadline_frees_the_request_and_not_the_pages() {
    let store = full();
    // The deadline passes while the store is asked.
    let mut late = hurried(&slow(&store, 1000), 2, 1);
    assert_eq!(late.find(ALL, &text(0..33)), 0);
    assert_eq!((late.misses(), late.tier.waits().late), (vec![(Miss::Late, 1)], 1));
    assert_eq!(late.serve(ALL, &text(0..33)), 0);
    // The deadline passes while the records are read: the fetch ends later, and the next prompt hits.
    let held = Arc::new(Faulty::new(store));
    held.gate.hold([false, true, false]);
    let mut late = hurried(&held, 2, 1000);
    assert_eq!(late.find(ALL, &text(0..33)), 0);
    let (requests, fetches, _) = late.tier.open();
    assert_eq!((requests, fetches, late.tier.waits().late), (0, 1, 1));
    assert_eq!(late.serve(ALL, &text(0..7)), 0);
    held.gate.hold([false; 3]);
    late.until(|host| host.tier.open().1 == 0);
    assert_eq!(late.serve(ALL, &text(0..33)), 32);
}

#[test]
fn few_requests_wait_for_a_store_that_hangs() {
    for calls in [[true, false, false], [false, true, false], [false, false, true]] {
        let store = full();
        let held = Arc::new(Faulty::new(store));
        held.gate.hold(calls);
        let mut host = hurried(&held, 2, 20);
        if calls[2] {
            host.serve(ALL, &text(500..533));
            host.turn();
            held.gate.wait_for(2); // both threads
        }
        for at in 0..100 {
            // Some requests have the same prefix, and others none in the store.
            let prompt = if at % 2 == 0 { text(0..33) } else { text(50 * at..50 * at + 33) };
            assert_eq!(host.find(ALL, &prompt), 0);
        }
        let late = host.tier.waits().late;
        assert!((1..25).contains(&late), "{late} requests waited while {calls:?} hung");
        assert_eq!(host.serve(ALL, &text(0..21)), 0);
        // The store comes back.
        held.gate.hold([false; 3]);
        while host.find(ALL, &text(0..33)) == 0 && host.engine.match_prefix(ALL, &text(0..33)).pages() < 8 {
            std::thread::sleep(Duration::from_millis(1));
            host.turn();
        }
        assert!(host.flush());
    }
}

#[test]
fn a_store_whose_answers_are_late_is_not_asked_for_a_while() {
    let store = full();
    let mut host = hurried(&slow(&store, 50), 2, 10);
    for at in 0..100 {
        assert_eq!(host.find(ALL, &text(50 * at..50 * at + 33)), 0);
        std::thread::sleep(Duration::from_millis(5));
    }
    let late = host.tier.waits().late;
    assert!((5..50).contains(&late), "{late} requests waited");
    // Puts have time.
    host.serve(ALL, &text(5000..5033));
    assert!(host.flush());
    assert_eq!(store.names().len(), 16);
}

#[test]
fn requests_of_one_prefix_share_a_fetch() {
    let store = full();
    // One thread answers in the order of the questions.
    let mut host = hurried(&slow(&store, 5), 1, 60_000);
    let prompts = [text(0..33), text(0..33), text(0..29), [text(0..20), text(900..920)].concat()];
    for (id, prompt) in (0..).zip(&prompts) {
        assert_eq!(host.tier.find(id, &host.engine, ALL, prompt), Find::Waiting);
    }
    let reports = host.reports(4);
    assert_eq!(reports.iter().filter(|(_, pages)| *pages == 8).count(), 1, "{reports:?}");
    host.until(|host| host.tier.open() == (0, 0, 0));
    assert_eq!(host.tier.stats()[0].read, 8);
    for (prompt, cached) in prompts.iter().zip([32, 32, 28, 20]) {
        assert_eq!(host.serve(ALL, prompt), cached);
    }
}

#[test]
fn namespaces_do_not_share_records() {
    let store = memory();
    let new = || {
        let mut host = Host::plain(&store);
        host.name(Namespace::new(1), "one");
        host.name(Namespace::new(2), "two");
        host
    };
    let mut host = new();
    for namespace in [0, 1].map(Namespace::new) {
        host.serve(namespace, &text(0..33));
    }
    assert!(host.flush());
    assert_eq!(store.names().len(), 16);
    let mut host = new();
    let cached = [0, 1, 2].map(|namespace| {
        host.find(Namespace::new(namespace), &text(0..33));
        host.serve(Namespace::new(namespace), &text(0..33))
    });
    assert_eq!(cached, [32, 32, 0]);
}

#[test]
fn a_store_slower_than_computing_is_not_asked() {
    let store = full();
    let rule = |tokens_per_second| LoadRule::Costs {
        latency: Duration::from_millis(1),
        bytes_per_second: 1e9,
        tokens_per_second,
    };
    for (tokens_per_second, pages) in [(1e3, 8), (1e6, 0)] {
        let rule = rule(tokens_per_second);
        let mut host = Host::plain_with(options(vec![StoreOptions { rule, ..of(&store, 2) }]));
        assert_eq!(host.find(ALL, &text(0..33)), pages);
        assert_eq!(host.tier.stats()[0].asked > 0, pages > 0);
    }
}

#[test]
fn the_second_store_has_what_the_first_one_lacks() {
    let (first, second) = (Arc::new(faulty()), memory());
    let new = || Host::plain_with(options(vec![of(&first, 2), of(&second, 2)]));
    let mut host = new();
    host.serve(ALL, &text(0..33));
    assert!(host.flush());
    assert_eq!([&first.inner, &second].map(|store| store.names().len()), [8, 8]);
    first.remove(&first.inner.names()[..4]).expect("no failure");
    for first_is_gone in [false, true] {
        first.is_gone.store(first_is_gone, Relaxed);
        let mut host = new();
        assert_eq!(host.find(ALL, &text(0..33)), 8);
        assert_eq!(host.serve(ALL, &text(0..33)), 32);
        let read = host.tier.stats().iter().map(|stats| stats.read).collect::<Vec<_>>();
        assert_eq!(read, if first_is_gone { [0, 8] } else { [4, 4] });
    }
}

#[test]
fn a_store_that_hangs_does_not_hold_the_puts_of_another_one() {
    for (hung, puts_max) in [(0, 3), (1, 3), (0, 64), (1, 64)] {
        let stores = [Arc::new(faulty()), Arc::new(faulty())];
        stores[hung].gate.hold([false, false, true]);
        let put_deadline = Duration::from_millis(20);
        let options = options(stores.iter().map(|store| of(store, 1)).collect());
        let mut host = Host::plain_with(TierOptions { put_deadline, puts_max, ..options });
        host.serve(ALL, &text(0..33));
        host.turn();
        // All but the put that hangs.
        host.until(|host| host.tier.stats()[1 - hung].put >= 7);
        assert_eq!(stores[hung].inner.names(), []);
        assert!(hung == 1 || host.tier.stats()[0].passed_over >= 7);
        stores[hung].gate.hold([false; 3]);
        assert!(host.flush());
        assert_eq!(stores[1 - hung].inner.names().len(), 8);
    }
}
