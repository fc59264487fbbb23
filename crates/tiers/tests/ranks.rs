//! Engines over two ranks: each rank's part of a record is a record, and all parts are read or none.

#[path = "common/host.rs"]
mod host;
#[path = "common/ranks.rs"]
mod ranks;

use std::sync::Arc;

use host::{Host, PAGE_SIZE, model, models, options, text};
use kvarena::hash::NamespaceNames;
use kvarena::id::Namespace;
use kvarena::layout::Groups;
use kvarena::{Engine, EngineConfig};
use kvarena_tiers::check::Secret;
use kvarena_tiers::miss::Miss;
use kvarena_tiers::name::{Fingerprint, Name};
use kvarena_tiers::store::Store;
use kvarena_tiers::testing::{Faulty, Memory};
use kvarena_tiers::tier::{Find, StoreOptions, Tier, TierOptions};
use ranks::{Ranks, RanksOptions};

const ALL: Namespace = Namespace::new(0);
/// The fingerprints of two ranks.
const PRINTS: [Fingerprint; 2] = [Fingerprint([1; 32]), Fingerprint([2; 32])];
/// Ranks with different K and V.
const FACTORS: [f32; 2] = [1.0, 2.0];

fn tier_options(store: &Arc<impl Store>) -> TierOptions {
    let stores = vec![StoreOptions { threads: 2, ..StoreOptions::new("store", Arc::clone(store) as Arc<dyn Store>) }];
    TierOptions { fingerprints: PRINTS.to_vec(), ..options(stores) }
}

fn host(config: &EngineConfig, store: &Arc<impl Store>) -> Host<Ranks> {
    Host::over(RanksOptions(FACTORS.to_vec()), config, tier_options(store))
}

/// Returns a store with the records of a prompt of 33 tokens, and their host.
fn filled(config: &EngineConfig) -> (Arc<Memory>, Host<Ranks>) {
    let store = Arc::new(Memory::default());
    let mut first = host(config, &store);
    first.serve(ALL, &text(0..33));
    assert!(first.flush());
    (store, first)
}

/// Returns the names of a rank's records.
fn of_rank(store: &Memory, rank: usize) -> Vec<Name> {
    store.names().into_iter().filter([is_of::<0>, is_of::<1>][rank]).collect()
}

/// Returns the tokens of a prompt's whole records before its last token.
fn whole(config: &EngineConfig, len: u32) -> u32 {
    let record = config.record_pages * PAGE_SIZE;
    (len - 1) / record * record
}

/// The host compares all K and V of both ranks after each prompt.
#[test]
fn each_rank_reads_its_own_part() {
    for config in models() {
        for secret in [None, Some(Secret::new([3; 32]))] {
            let store = Arc::new(Memory::default());
            let new = || {
                let options = TierOptions { secret: secret.clone(), ..tier_options(&store) };
                Host::over(RanksOptions(FACTORS.to_vec()), &config, options)
            };
            let mut first = new();
            for len in [33, 50] {
                first.find(ALL, &text(0..len));
                first.serve(ALL, &text(0..len));
            }
            assert!(first.flush());
            let keys = [0, 1].map(|rank| of_rank(&store, rank).iter().map(|name| (name.key, name.group)).collect());
            let [own, other]: [Vec<_>; 2] = keys;
            assert!(own == other && !own.is_empty());
            let stats = &first.tier.stats()[0];
            assert_eq!(stats.put, store.names().len() as u64);
            let bytes = |name| store.record(name).expect("it is stored").len() as u64;
            assert_eq!(stats.put_bytes, store.names().iter().map(bytes).sum::<u64>());
            let mut second = new();
            for len in [33, 50] {
                second.find(ALL, &text(0..len));
                assert_eq!(second.serve(ALL, &text(0..len)), whole(&config, len));
            }
            assert_eq!((second.misses(), second.tier.open()), (vec![], (0, 0, 0)));
        }
    }
}

#[test]
fn a_part_that_is_lost_or_damaged_on_one_rank_is_a_miss_of_all() {
    for config in models() {
        for rank in 0..2 {
            for miss in [Miss::Absent, Miss::PageCheck] {
                let (store, _) = filled(&config);
                let names = of_rank(&store, rank);
                for name in names.iter().filter(|name| name.group == 0) {
                    match miss {
                        Miss::Absent => store.remove(&[*name]).expect("no failure"),
                        _ => {
                            let mut bytes = store.record(name).expect("it is stored");
                            bytes[4096] ^= 1;
                            store.set(*name, bytes);
                        }
                    }
                }
                let mut second = host(&config, &store);
                assert_eq!(second.find(ALL, &text(0..33)), 0);
                // Finds ask for the parts of rank 0, and do not read what that rank lacks.
                let is_asked = rank == 1 || miss != Miss::Absent;
                let misses = second.misses();
                assert!(if is_asked { misses[0].0 == miss && misses.len() == 1 } else { misses.is_empty() });
                // The record counts as absent from now on.
                assert_eq!(second.find(ALL, &text(0..33)), 0);
                assert_eq!(second.misses(), misses);
                // The parts are put again.
                assert_eq!(second.serve(ALL, &text(0..33)), 0);
                assert!(second.flush());
                assert_eq!(of_rank(&store, rank), names);
                let mut third = host(&config, &store);
                third.find(ALL, &text(0..33));
                assert_eq!(third.serve(ALL, &text(0..33)), whole(&config, 33));
            }
        }
    }
}

#[test]
fn a_hit_ends_before_the_first_record_without_all_parts() {
    let config = model(Groups::ONE, 1);
    for rank in 0..2 {
        let store = Arc::new(Memory::default());
        let mut first = host(&config, &store);
        first.serve(ALL, &text(0..13));
        assert!(first.flush());
        let before = of_rank(&store, rank);
        first.serve(ALL, &text(0..17));
        assert!(first.flush());
        let last: Vec<_> = of_rank(&store, rank).into_iter().filter(|name| !before.contains(name)).collect();
        first.serve(ALL, &text(0..33));
        assert!(first.flush());
        assert_eq!((before.len(), last.len(), store.names().len()), (3, 1, 16));
        store.remove(&last).expect("no failure");
        let mut second = host(&config, &store);
        assert_eq!(second.find(ALL, &text(0..33)), 3);
        assert_eq!(second.serve(ALL, &text(0..33)), 12);
    }
}

/// Returns whether a name is that of a rank's part.
fn is_of<const RANK: usize>(name: &Name) -> bool {
    name.fingerprint == PRINTS[RANK].0[..8]
}

#[test]
fn a_put_of_which_one_part_fails_is_a_failed_put() {
    for config in models().into_iter().step_by(2) {
        for rank in 0..2 {
            let store = Arc::new(Faulty::new(Arc::new(Memory::default())));
            *store.refuses.lock().expect("no panic") = [is_of::<0>, is_of::<1>][rank];
            let mut first = host(&config, &store);
            first.serve(ALL, &text(0..33));
            assert!(!first.flush());
            // No find meets a record of rank 0 without the others' parts.
            assert!(of_rank(&store.inner, 0).is_empty());
            assert_eq!(of_rank(&store.inner, 1).is_empty(), rank == 1);
            let mut second = host(&config, &store);
            assert_eq!((second.find(ALL, &text(0..33)), second.misses()), (0, vec![]));
            drop(second);
            *store.refuses.lock().expect("no panic") = |_| false;
            // The tier wakes the host when the store is tried again.
            let all = filled(&config).0.names();
            first.until(|_| store.inner.names() == all);
        }
    }
}

#[test]
fn a_forgotten_namespace_leaves_no_part() {
    for config in models() {
        let store = Arc::new(Memory::default());
        let mut first = host(&config, &store);
        first.name(Namespace::new(1), "one");
        for namespace in [0, 1].map(Namespace::new) {
            first.serve(namespace, &text(0..33));
        }
        assert!(first.flush());
        let names = NamespaceNames { salt: Some("one".to_owned()), ..NamespaceNames::default() };
        let kept: Vec<_> = store.names().into_iter().filter(|name| name.space == [0; 8]).collect();
        assert_eq!(2 * kept.len(), store.names().len());
        assert_eq!(first.tier.forget(&names).recv().expect("an answer").1, Ok(()));
        assert_eq!(store.names(), kept);
        assert!(of_rank(&store, 1).len() * 2 == kept.len());
    }
}

#[test]
fn a_confirmed_prompt_has_all_parts() {
    for config in models() {
        for rank in 0..2 {
            let (store, mut first) = filled(&config);
            let (all, lost) = (store.names(), of_rank(&store, rank));
            store.remove(&lost.iter().copied().step_by(2).collect::<Vec<_>>()).expect("no failure");
            let mut confirm = |puts| {
                let before = first.tier.stats()[0].put;
                assert_eq!(first.tier.confirm(7, &mut first.engine, ALL, &text(0..33)), Find::Waiting);
                assert_eq!(first.reports(1), [(7, 0)]);
                assert_eq!((first.tier.stats()[0].put - before, store.names()), (puts, all.clone()));
                assert_eq!(first.tier.waits().unconfirmed, 0);
            };
            confirm(lost.len().div_ceil(2) as u64);
            confirm(0);
        }
    }
}

#[test]
fn a_record_that_one_rank_denies_is_put_again_without_the_answer_of_another() {
    let config = model(Groups::ONE, 1);
    let store = Arc::new(Faulty::new(Arc::new(Memory::default())));
    let mut first = host(&config, &store);
    first.serve(ALL, &text(0..33));
    assert!(first.flush());
    let all = store.inner.names();
    store.remove(&of_rank(&store.inner, 0)[..3]).expect("no failure");
    *store.hides.lock().expect("no panic") = is_of::<1>;
    assert_eq!(first.tier.confirm(7, &mut first.engine, ALL, &text(0..33)), Find::Waiting);
    assert_eq!(first.reports(1), [(7, 0)]);
    // Rank 1 may lack other records.
    assert_eq!((store.inner.names(), first.tier.waits().unconfirmed), (all, 1));
}

/// Ranks with equal pages, such as those of latent rows, have equal fingerprints.
#[test]
fn one_of_equal_ranks_puts_and_all_read() {
    let config = model(Groups::ONE, 1);
    let store = Arc::new(Memory::default());
    let new = || {
        let options = TierOptions { fingerprints: vec![PRINTS[0]; 2], ..tier_options(&store) };
        let backend = RanksOptions(vec![1.0; 2]);
        Host::over(backend, &config, options)
    };
    let mut first = new();
    first.serve(ALL, &text(0..33));
    assert!(first.flush());
    let stats = &first.tier.stats()[0];
    assert_eq!((store.names().len(), stats.put, stats.known), (8, 8, 0));
    // The store is asked once for each name.
    let asked = stats.asked;
    assert_eq!(first.tier.confirm(7, &mut first.engine, ALL, &text(0..33)), Find::Waiting);
    assert_eq!((first.reports(1), first.tier.stats()[0].asked - asked), (vec![(7, 0)], 8));
    let mut second = new();
    assert_eq!(second.find(ALL, &text(0..33)), 8);
    assert_eq!(second.serve(ALL, &text(0..33)), 32);
}

#[test]
fn every_rank_needs_a_fingerprint() {
    let store = Arc::new(Memory::default());
    let config = model(Groups::ONE, 1);
    for (ranks, prints) in [(2, 1), (1, 2), (2, 3), (2, 0)] {
        let engine = Engine::new(config, RanksOptions(vec![1.0; ranks])).expect("a valid config");
        let options = TierOptions { fingerprints: vec![PRINTS[0]; prints], ..tier_options(&store) };
        let error = Tier::new(options, &engine).err().expect("a refusal");
        assert_eq!(error.to_string(), "stores need a fingerprint for each rank");
    }
}
