//! Finds that are repeated while another engine computes the prompt.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use kvarena::EngineConfig;
use kvarena::layout::Groups;
use kvarena_tiers::testing::{Faulty, Memory};
use kvarena_tiers::tier::{Find, TierOptions};

use super::host::{Host, PAGE_SIZE, models, of, options, text};
use super::{ALL, full, memory};

/// Returns a host that repeats its finds.
fn patient(config: &EngineConfig, store: &Arc<Memory>, patience: Duration) -> Host {
    Host::with(config, TierOptions { patience, ..options(vec![of(store, 8)]) })
}

#[test]
fn a_find_waits_for_a_prompt_that_another_engine_computes() {
    for config in models() {
        let (store, prompt) = (memory(), text(0..50));
        let mut decode = patient(&config, &store, Duration::from_secs(600));
        assert_eq!(decode.tier.find(1, &decode.engine, ALL, &prompt), Find::Waiting);
        let mut prefill = Host::new(&config, Arc::clone(&store), None);
        for len in [17, 33, 50] {
            assert_eq!(decode.tier.open().0, 1, "the request waits");
            prefill.serve(ALL, &text(0..len));
            assert_eq!(prefill.tier.confirm(7, &mut prefill.engine, ALL, &text(0..len)), Find::Waiting);
            prefill.reports(1);
            // Without groups, what is there is read before the rest.
            if config.pool.groups == Groups::ONE && len < 50 {
                let hit = |host: &Host| host.engine.lookup(ALL, &prompt).expect("a name").expect("a prompt").hit();
                decode.until(|host| hit(host) == (len - 1) / PAGE_SIZE);
            } else if len < 50 {
                assert_eq!(decode.tier.stats()[0].read, 0);
            }
        }
        let record = config.record_pages * PAGE_SIZE;
        let cached = 49 / record * record;
        assert_eq!(decode.reports(1), [(1, cached / PAGE_SIZE)]);
        assert_eq!((decode.serve(ALL, &prompt), decode.tier.waits().late), (cached, 0));
    }
}

#[test]
fn a_find_ends_when_nothing_new_comes() {
    for config in models() {
        let store = memory();
        let mut prefill = Host::new(&config, Arc::clone(&store), None);
        prefill.serve(ALL, &text(0..33));
        assert!(prefill.flush());
        let mut decode = patient(&config, &store, Duration::from_millis(30));
        // Another prompt, and one of which the store has a part.
        assert_eq!(decode.find(ALL, &text(500..550)), 0);
        assert_eq!(decode.find(ALL, &text(0..50)), 8);
        assert_eq!((decode.serve(ALL, &text(0..50)), decode.tier.waits().late), (32, 0));
        // What the store has whole is not asked for twice.
        let mut decode = patient(&config, &store, Duration::from_secs(600));
        assert_eq!(decode.find(ALL, &text(0..33)), 8);
    }
}

#[test]
fn a_question_or_a_fetch_that_hangs_ends_at_the_later_of_patience_and_deadline() {
    for (is_fetch, deadline, patience) in [(false, 1, 40), (false, 40, 1), (true, 1, 40), (true, 40, 1)] {
        let held = Arc::new(Faulty::new(full()));
        held.gate.hold([!is_fetch, is_fetch, false]);
        let [deadline, patience] = [deadline, patience].map(Duration::from_millis);
        let mut decode = Host::plain_with(TierOptions { deadline, patience, ..options(vec![of(&held, 2)]) });
        let begin = Instant::now();
        assert_eq!(decode.find(ALL, &text(0..50)), 0);
        assert!(begin.elapsed() >= deadline.max(patience));
        assert_eq!((decode.tier.waits().late, decode.tier.open().0), (1, 0));
        assert!(held.calls.load(Relaxed) <= 8, "one question, and the reads that run");
        held.gate.hold([false; 3]);
        decode.until(|decode| decode.tier.open() == (0, 0, 0));
    }
}
