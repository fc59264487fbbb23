//! Stores: checks which pages an engine puts and fetches, and that each page has the bytes that belong to its hash.

use std::collections::HashMap;

use kvarena::backend::CpuError;
use kvarena::testkit::late::LateOptions;
use kvarena::*;

const NAMESPACE: Namespace = Namespace::new(0);
const HASHING: Hashing = Hashing::Dynamo;
const PAGE_SIZE: usize = 4;

/// An engine with eight pages on the device, eight in swap memory and two in the stage.
struct Host {
    engine: Engine<Cpu>,
    scratch: StepScratch,
}

fn config() -> EngineConfig {
    let pool = PoolConfig {
        shape: KvShape::heads(1, 8),
        page_size: PAGE_SIZE as u32,
        capacity: Capacity::Pages(8),
        swap_pages: 8,
        stage_pages: 2,
        ..Default::default()
    };
    EngineConfig { hashing: Some(HASHING), max_tokens: 64, ..pool.into() }
}

impl Host {
    fn new() -> Self {
        let engine = Engine::new(config(), CpuOptions::with_threads(1)).expect("a valid config");
        Self { engine, scratch: StepScratch::new() }
    }

    /// Returns bytes in place of the K and V of a page. They depend on the page's hash alone.
    fn bytes(&self, key: &PageHash) -> Vec<u8> {
        let len = self.engine.shape().layout.page_bytes() as usize;
        format!("{key:?}").into_bytes().into_iter().cycle().take(len).collect()
    }

    /// Computes a prompt, and checks that its cached pages have their bytes. Returns the cached tokens.
    fn compute(&mut self, prompt: &[TokenId]) -> u32 {
        let seq = self.engine.admit(NAMESPACE, prompt, 0).expect("there is room");
        let cached = self.engine.cached_len(seq).expect("it is live");
        let len = self.engine.extend_max(seq).expect("it is live");
        let plan = self.engine.plan_batch(&mut self.scratch, &[Extend { seq, len }]);
        let step = plan.expect("there is room").step();
        let pages: Vec<PageId> = self.engine.page_table(seq).expect("it is live").collect();
        for (i, (page, key)) in pages.iter().zip(&keys(prompt)).enumerate() {
            let wanted = self.bytes(key);
            if i < cached as usize / PAGE_SIZE {
                let mut bytes = vec![0; wanted.len()];
                self.engine.backend().read_page(*page, &mut bytes).expect("a page of the pool");
                assert_eq!(bytes, wanted, "page {i} of {prompt:?}");
            } else {
                self.engine.backend_mut().write_page(*page, &wanted).expect("a page of the pool");
            }
        }
        self.engine.commit(step).expect("it is open");
        self.engine.complete(step).expect("it is committed");
        self.engine.finish(seq).expect("it is live");
        self.engine.verify().expect("all invariants hold");
        cached
    }

    /// Makes all puts of the engine. The store takes the pages for which `takes` returns true. Returns the keys in the
    /// order of the puts.
    fn put(
        &mut self,
        store: &mut HashMap<PageHash, Vec<u8>>,
        mut takes: impl FnMut(&PageHash) -> bool,
    ) -> Vec<PageHash> {
        let mut all = Vec::new();
        loop {
            let mut puts = Vec::new();
            let sink = |put: Put<'_>| puts.push((put.id, put.key, put.parent, put.page));
            self.engine.puts(3, sink).expect("no fault");
            if puts.is_empty() {
                return all;
            }
            for (id, key, parent, page) in puts {
                let bytes = self.engine.backend_mut().lease(page);
                assert_eq!(bytes.as_ref(), self.bytes(&key), "the bytes of {key:?}");
                assert!(parent.is_none_or(|parent| parent != key), "a page is not its own parent");
                let ok = takes(&key);
                if ok {
                    store.insert(key, bytes.as_ref().to_vec());
                }
                drop(bytes);
                assert!(self.engine.put_done(id, ok), "the put is open");
                assert!(!self.engine.put_done(id, ok), "the put is done");
                self.engine.verify().expect("all invariants hold");
                all.push(key);
            }
        }
    }

    /// Fetches pages of a prompt; the store writes the first `count` pages. Returns the fetch and the number of its
    /// pages.
    fn fetch(&mut self, store: &HashMap<PageHash, Vec<u8>>, prompt: &[TokenId], count: usize) -> (FetchId, usize) {
        let fetch = self.engine.fetch(NAMESPACE, prompt, 8).expect("no fault");
        let fetch = fetch.expect("the host has free pages");
        let (id, first, pages) = (fetch.id, fetch.cached_pages as usize, fetch.pages.to_vec());
        for (page, key) in pages.iter().zip(&keys(prompt)[first..]).take(count) {
            self.engine.backend_mut().lease_mut(*page).as_mut().copy_from_slice(&store[key]);
        }
        self.engine.verify().expect("all invariants hold");
        (id, pages.len())
    }
}

fn text(tokens: std::ops::Range<u32>) -> Vec<TokenId> {
    tokens.map(TokenId::new).collect()
}

fn keys(tokens: &[TokenId]) -> Vec<PageHash> {
    HASHING.chain(&NamespaceNames::default(), tokens, PAGE_SIZE as u32)
}

#[test]
fn a_page_that_the_store_did_not_take_is_put_again() {
    let (mut host, mut store) = (Host::new(), HashMap::new());
    let prompt = text(0..21);
    let all = keys(&prompt);
    assert_eq!(host.compute(&prompt), 0);
    assert_eq!(host.put(&mut store, |key| *key == all[0]), all);
    assert_eq!(host.put(&mut store, |_| true), all[1..]);
    assert_eq!(store.len(), all.len());
    assert!(host.put(&mut store, |_| true).is_empty(), "the store has all pages");
}

#[test]
fn a_loop_over_a_store_that_refuses_all_pages_ends() {
    let (mut host, mut store) = (Host::new(), HashMap::new());
    let prompt = text(0..21);
    host.compute(&prompt);
    let all = keys(&prompt);
    for _ in 0..2 {
        let mut tries = 0..20; // A loop without an end fails here.
        let put = host.put(&mut store, |_| tries.next().is_none());
        assert_eq!((put, tries.len()), (all.clone(), 20 - all.len()));
    }
    // A refused page is put before pages that are published later, and new pages are put in the order of publishing.
    let mut refused = None;
    let put = host.put(&mut store, |key| key != refused.get_or_insert(*key));
    assert_eq!(put, all);
    let other = text(100..109);
    host.compute(&other);
    assert_eq!(host.put(&mut store, |_| true), [vec![all[0]], keys(&other)].concat());
}

#[test]
fn counts_at_their_limits_are_accepted() {
    let (mut host, mut store) = (Host::new(), HashMap::new());
    let prompt = text(0..21);
    host.compute(&prompt);
    let mut open = Vec::new();
    // With two pages in the stage, the first call opens two puts.
    for wanted in [2, 0] {
        let count = host.engine.puts(usize::MAX, |put| open.push((put.id, put.key)));
        assert_eq!(count, Ok(wanted));
    }
    for (id, key) in open {
        assert!(host.engine.put_done(id, true));
        store.insert(key, host.bytes(&key));
    }
    host.put(&mut store, |_| true);
    let mut other = Host::new();
    let fetch = other.engine.fetch(NAMESPACE, &prompt, u32::MAX).expect("no fault");
    let (id, len) = fetch.map(|fetch| (fetch.id, fetch.pages.len())).expect("pages are free");
    assert_eq!(len, 5);
    assert!(other.engine.fetched(id, u32::MAX));
    assert_eq!(other.engine.match_prefix(NAMESPACE, &prompt).pages(), 5);
    assert_eq!(host.engine.save_ahead(u32::MAX), Ok(5));
    [host, other].iter().for_each(|host| host.engine.verify().expect("all invariants hold"));
}

#[test]
fn moves_of_leased_pages_are_refused() {
    let (mut host, mut store) = (Host::new(), HashMap::new());
    let prompt = text(0..21);
    host.compute(&prompt);
    let is_leased = |error: Option<EngineError<CpuError>>, pages: &[SwapPageId]| {
        let Some(EngineError::Backend(CpuError::Plan(PlanError::Leased { page }))) = error else {
            return false;
        };
        pages.contains(&page)
    };
    let mut puts = Vec::new();
    assert_eq!(host.engine.puts(2, |put| puts.push((put.id, put.page))), Ok(2));
    let pages: Vec<_> = puts.iter().map(|put| put.1).collect();
    let leases: Vec<_> = pages.iter().map(|&page| host.engine.backend_mut().lease(page)).collect();
    puts.iter().for_each(|put| assert!(host.engine.put_done(put.0, true)));
    // The next copies to the stage would write the leased pages.
    let refused = host.engine.puts(2, |_| panic!("no page was copied"));
    assert!(is_leased(refused.err(), &pages));
    host.engine.verify().expect("all invariants hold");
    drop(leases);
    let rest = host.put(&mut store, |_| true);
    assert_eq!(rest, keys(&prompt)[2..]);

    let mut other = Host::new();
    let fetch = other.engine.fetch(NAMESPACE, &prompt, 2).expect("no fault").expect("free pages");
    let (id, pages) = (fetch.id, fetch.pages.to_vec());
    let lease = other.engine.backend_mut().lease_mut(pages[1]);
    assert!(other.engine.fetched(id, 2));
    let seq = other.engine.admit(NAMESPACE, &prompt, 0).expect("there is room");
    assert!(is_leased(other.engine.load(&[seq]).err(), &pages[1..]));
    other.engine.verify().expect("all invariants hold");
    drop(lease);
    assert_eq!(other.engine.load(&[seq]), Ok(()));
    other.engine.verify().expect("all invariants hold");
}

#[test]
fn a_short_fetch_matches_up_to_its_first_failure() {
    let (mut host, mut store) = (Host::new(), HashMap::new());
    let prompt = text(0..21);
    host.compute(&prompt);
    host.put(&mut store, |_| true);
    for count in 0..=5 {
        let mut other = Host::new();
        let (id, len) = other.fetch(&store, &prompt, count);
        assert_eq!(len, 5, "the last token is not matched");
        assert!(other.engine.fetched(id, count as u32));
        assert!(!other.engine.fetched(id, count as u32), "the fetch is done");
        other.engine.verify().expect("all invariants hold");
        let found = other.engine.match_prefix(NAMESPACE, &prompt);
        assert_eq!([found.pages(), found.swap_pages()], [count as u32; 2]);
        assert_eq!(other.compute(&prompt), (count * PAGE_SIZE) as u32);
        // The store has the fetched pages already.
        assert_eq!(other.put(&mut HashMap::new(), |_| true), keys(&prompt)[count..]);
    }
}

#[test]
fn pages_fetched_across_a_reset_are_dropped() {
    let (mut host, mut store) = (Host::new(), HashMap::new());
    let prompt = text(0..21);
    host.compute(&prompt);
    host.put(&mut store, |_| true);
    host.engine.reset();
    let (id, len) = host.fetch(&store, &prompt, 5);
    host.engine.reset();
    assert!(host.engine.fetched(id, len as u32));
    host.engine.verify().expect("all invariants hold");
    assert_eq!(host.engine.match_prefix(NAMESPACE, &prompt).pages(), 0);
    assert_eq!(host.compute(&prompt), 0);
}

#[test]
fn pages_that_come_in_during_a_fetch_stay() {
    let (mut host, mut store) = (Host::new(), HashMap::new());
    let prompt = text(0..21);
    host.compute(&prompt);
    host.put(&mut store, |_| true);
    let mut other = Host::new();
    let (id, len) = other.fetch(&store, &prompt, 5);
    assert_eq!(other.compute(&prompt[..13]), 0);
    assert!(other.engine.fetched(id, len as u32));
    other.engine.verify().expect("all invariants hold");
    let found = other.engine.match_prefix(NAMESPACE, &prompt);
    assert_eq!((found.pages(), found.swap_pages()), (5, 2));
    assert_eq!(other.compute(&prompt), 20);
}

/// After a reset, a store receives no page of the earlier generation: neither one whose copy to the stage was not done,
/// nor one that the store has refused. A sequence in use keeps both pages.
#[test]
fn a_reset_drops_puts() {
    let mut engine = Engine::new(config(), LateOptions(CpuOptions::with_threads(1))).expect("a valid config");
    let seq = engine.admit(NAMESPACE, &text(0..9), 0).expect("there is room");
    let mut scratch = StepScratch::new();
    let plan = engine.plan_batch(&mut scratch, &[Extend { seq, len: 9 }]).expect("there is room");
    engine.commit(plan.step()).expect("it is open");
    engine.complete(engine.newest_step()).expect("it is committed");
    // The backend finishes one batch of copies after each call.
    assert_eq!(engine.puts(1, |_| panic!("the copy is not done")), Ok(0));
    let mut given = Vec::new();
    assert_eq!(engine.puts(1, |put| given.push(put.id)), Ok(1));
    engine.reset();
    for id in given {
        assert!(engine.put_done(id, false));
        engine.verify().expect("all invariants hold");
    }
    for _ in 0..4 {
        assert_eq!(engine.puts(8, |put| panic!("{:?} is of an earlier generation", put.key)), Ok(0));
        engine.verify().expect("all invariants hold");
    }
    // Pages that are computed after the reset are put.
    engine.finish(seq).expect("it is live");
    let seq = engine.admit(NAMESPACE, &text(0..5), 0).expect("there is room");
    let plan = engine.plan_batch(&mut scratch, &[Extend { seq, len: 5 }]).expect("there is room");
    engine.commit(plan.step()).expect("it is open");
    assert_eq!((0..3).map(|_| engine.puts(8, |_| {}).expect("no fault")).sum::<usize>(), 1);
    engine.verify().expect("all invariants hold");
}
