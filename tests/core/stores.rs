//! Stores: puts and fetches at the limits of their counts, and of leased pages. `replay.rs` compares puts and fetches
//! with the model, and the bytes of their pages.

use kvarena::backend::{CpuError, PlanError, SwapMemory};
use kvarena::hash::{Hashing, NamespaceNames, PageHash};
use kvarena::id::SwapPageId;
use kvarena::layout::Groups;
use kvarena::*;

use super::host::{self, ALL, pool, text};

const HASHING: Hashing = Hashing::Dynamo;

type Host = host::Host<Cpu>;

/// Returns an engine with eight pages on the device, eight in swap memory and two in the stage.
fn host() -> Host {
    let shape = KvShape::heads(1, 8);
    let pool = PoolConfig { shape, swap_pages: 8, stage_pages: 2, ..pool(4, 8, Groups::ONE) };
    let config = EngineConfig { hashing: Some(HASHING), max_tokens: 64, ..pool.into() };
    Host::new(config, CpuOptions::with_threads(1))
}

/// Makes all puts of the engine. The store takes the pages for which `takes` returns true. Returns the keys in the
/// order of the puts.
fn put(host: &mut Host, mut takes: impl FnMut(&PageHash) -> bool) -> Vec<PageHash> {
    let mut all = Vec::new();
    loop {
        let mut puts = Vec::new();
        host.puts(3, |put| puts.push((put.id, put.key))).expect("no fault");
        if puts.is_empty() {
            return all;
        }
        for (id, key) in puts {
            assert!(host.put_done(id, takes(&key)), "the put is open");
            host.check();
            all.push(key);
        }
    }
}

fn keys(tokens: &[TokenId]) -> Vec<PageHash> {
    HASHING.chain(&NamespaceNames::default(), tokens, 4)
}

#[test]
fn a_loop_over_a_store_that_refuses_all_pages_ends() {
    let (mut host, prompt) = (host(), text(0..21));
    host.cache(&prompt);
    let all = keys(&prompt);
    for _ in 0..2 {
        let mut tries = 0..20; // A loop without an end fails here.
        let put = put(&mut host, |_| tries.next().is_none());
        assert_eq!((put, tries.len()), (all.clone(), 20 - all.len()));
    }
    // A refused page is put before pages that are published later, and new pages are put in the order of publishing.
    let mut refused = None;
    assert_eq!(put(&mut host, |key| key != refused.get_or_insert(*key)), all);
    let other = text(100..109);
    host.cache(&other);
    assert_eq!(put(&mut host, |_| true), [vec![all[0]], keys(&other)].concat());
}

#[test]
fn counts_at_their_limits_are_accepted() {
    let (mut host, mut other, prompt) = (host(), host(), text(0..21));
    host.cache(&prompt);
    let mut open = Vec::new();
    // With two pages in the stage, the first call opens two puts.
    for wanted in [2, 0] {
        assert_eq!(host.puts(usize::MAX, |put| open.push(put.id)), Ok(wanted));
    }
    open.into_iter().for_each(|id| assert!(host.put_done(id, true)));
    put(&mut host, |_| true);
    let fetch = other.fetch(ALL, &prompt, u32::MAX).expect("no fault");
    let (id, len) = fetch.map(|fetch| (fetch.id, fetch.pages.len())).expect("pages are free");
    assert_eq!(len, 5);
    assert!(other.fetched(id, u32::MAX));
    assert_eq!(other.match_prefix(ALL, &prompt).pages(), 5);
    assert_eq!(host.save_ahead(u32::MAX), Ok(5));
    [host, other].iter().for_each(Host::check);
}

#[test]
fn moves_of_leased_pages_are_refused() {
    let (mut host, mut other, prompt) = (host(), host(), text(0..21));
    host.cache(&prompt);
    let is_leased = |error: Option<EngineError<CpuError>>, pages: &[SwapPageId]| {
        let Some(EngineError::Backend(CpuError::Plan(PlanError::Leased { page }))) = error else { return false };
        pages.contains(&page)
    };
    let mut puts = Vec::new();
    assert_eq!(host.puts(2, |put| puts.push((put.id, put.page))), Ok(2));
    let pages: Vec<_> = puts.iter().map(|put| put.1).collect();
    let leases: Vec<_> = pages.iter().map(|&page| host.backend_mut().lease(page)).collect();
    puts.iter().for_each(|put| assert!(host.put_done(put.0, true)));
    // The next copies to the stage would write the leased pages.
    let refused = host.puts(2, |_| panic!("no page was copied"));
    assert!(is_leased(refused.err(), &pages));
    host.check();
    drop(leases);
    assert_eq!(put(&mut host, |_| true), keys(&prompt)[2..]);

    let fetch = other.fetch(ALL, &prompt, 2).expect("no fault").expect("free pages");
    let (id, pages) = (fetch.id, fetch.pages.to_vec());
    let lease = other.backend_mut().lease_mut(pages[1]);
    assert!(other.fetched(id, 2));
    let seq = other.begin(&prompt);
    assert!(is_leased(other.load(&[seq]).err(), &pages[1..]));
    other.check();
    drop(lease);
    assert_eq!(other.load(&[seq]), Ok(()));
    other.check();
}
