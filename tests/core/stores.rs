//! Stores: puts and fetches at the limits of their counts, of leased pages, and of records with several pages or of
//! cells. `replay.rs` compares puts and fetches with the model, and the bytes of their pages.

use std::collections::HashMap;

use kvarena::backend::{CpuError, PlanError, SwapMemory};
use kvarena::hash::{Hashing, NamespaceNames, PageHash};
use kvarena::id::SwapPageId;
use kvarena::layout::{Groups, Reach};
use kvarena::moves::FetchId;
use kvarena::*;

use super::host::{self, ALL, pool, text};

const HASHING: Hashing = Hashing::Dynamo;

type Host = host::Host<Cpu>;

/// Returns an engine with eight pages on the device, eight in swap memory and two in the stage.
fn host() -> Host {
    host_of(1, PoolConfig { swap_pages: 8, stage_pages: 2, ..pool(4, 8, Groups::ONE) })
}

fn host_of(record_pages: u32, pool: PoolConfig) -> Host {
    let pool = PoolConfig { shape: KvShape::heads(1, 8), ..pool };
    let config = EngineConfig { hashing: Some(HASHING), max_tokens: 64, record_pages, ..pool.into() };
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

/// A host may forget the names of a prompt before a store has its pages. Cached pages keep the names.
#[test]
fn puts_of_a_forgotten_namespace_are_restated() {
    let (mut host, prompt, salted) = (host(), text(0..21), Namespace::new(7));
    let names = NamespaceNames { salt: Some("s".into()), ..NamespaceNames::default() };
    host.name_namespace(salted, names).expect("the names are free");
    let seq = host.admit(salted, &prompt, 0).expect("there is room");
    host.compute_rest(seq);
    host.finish(seq).expect("it is live");
    host.forget_namespace(salted).expect("it has names");
    assert_eq!(host.restate_puts(salted, &prompt, |_, _| true), Ok(5));
    assert!(host.lookup(salted, &prompt).expect("the names are in use").is_some());
    assert_eq!(put(&mut host, |_| true).len(), 5);
    assert_eq!(host.restate_puts(salted, &prompt, |_, _| true), Ok(0));
    host.reset();
    assert_eq!(host.restate_puts(salted, &prompt, |_, _| true), Err(Error::UnnamedNamespace { namespace: salted }));
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
    let (id, len) = fetch.map(|fetch| (fetch.id, fetch.len())).expect("pages are free");
    assert_eq!(len, 5);
    assert!(other.fetched(id, usize::MAX));
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
    assert_eq!(host.puts(2, |put| puts.push((put.id, put.pages[0]))), Ok(2));
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
    let id = fetch.id;
    let pages: Vec<_> = fetch.records().map(|record| record.pages[0]).collect();
    let lease = other.backend_mut().lease_mut(pages[1]);
    assert!(other.fetched(id, 2));
    let seq = other.begin(&prompt);
    assert!(is_leased(other.load(&[seq]).err(), &pages[1..]));
    other.check();
    drop(lease);
    assert_eq!(other.load(&[seq]), Ok(()));
    other.check();
}

/// The tokens and the bytes of records, by group and key.
type Records = HashMap<(u32, PageHash), (Vec<TokenId>, Vec<Vec<u8>>)>;

/// Stores all records of the engine.
fn store(host: &mut Host) -> Records {
    let mut records = Records::new();
    loop {
        let mut puts = Vec::new();
        host.puts(3, |put| puts.push((put.id, put.group, put.key, put.tokens.to_vec(), put.pages.to_vec())))
            .expect("no fault");
        if puts.is_empty() {
            return records;
        }
        for (id, group, key, tokens, pages) in puts {
            let bytes = pages.iter().map(|&page| host.backend_mut().lease(page).as_ref().to_vec()).collect();
            assert!(records.insert((group, key), (tokens, bytes)).is_none(), "a record is put once");
            assert!(host.put_done(id, true));
            host.check();
        }
    }
}

/// Begins a fetch of a prompt's target, and writes its records. Returns the fetch, and the number of its records.
fn begin_fetch(host: &mut Host, records: &Records, prompt: &[TokenId]) -> Option<(FetchId, usize)> {
    let lookup = host.lookup(ALL, prompt).expect("it is named").expect("pages are hashed");
    let keys = lookup.keys(prompt);
    let to = lookup.target(|group, place| records.contains_key(&(group, keys[place as usize])));
    let fetch = host.fetch(ALL, prompt, to).expect("no fault")?;
    let id = fetch.id;
    let own: Vec<_> = fetch.records().map(|r| (r.group, r.place, r.first, r.pages.to_vec())).collect();
    for (group, place, first, pages) in &own {
        let (_, bytes) = &records[&(*group, keys[*place as usize])];
        let start = if *group == 0 { place + 1 - bytes.len() as u32 } else { *place };
        for (&page, bytes) in pages.iter().zip(&bytes[(first - start) as usize..]) {
            host.backend_mut().lease_mut(page).as_mut().copy_from_slice(bytes);
        }
    }
    host.check();
    Some((id, own.len()))
}

#[test]
fn records_of_several_pages_are_put_and_fetched_whole() {
    let new = || host_of(4, PoolConfig { swap_pages: 12, stage_pages: 4, ..pool(4, 20, Groups::ONE) });
    let (mut first, mut second, prompt) = (new(), new(), text(0..60));
    first.cache(&prompt[..55]);
    let records = store(&mut first);
    // Thirteen pages end three records.
    let keys = keys(&prompt);
    let sizes = |key| records[&(0, key)].1.len();
    assert_eq!((records.len(), [3, 7, 11].map(|last: usize| sizes(keys[last]))), (3, [4; 3]));
    assert_eq!(records[&(0, keys[7])].0, prompt[16..32]);
    // Of the record that two cached pages begin, the fetch takes the other two.
    second.cache(&prompt[..9]);
    let (id, count) = begin_fetch(&mut second, &records, &prompt).expect("there are records");
    assert_eq!(count, 3);
    assert!(second.fetched(id, 2));
    assert_eq!(second.match_prefix(ALL, &prompt).pages(), 8);
    second.check();
    // The last page of a record is put again if it was dropped, and no page before it.
    assert_eq!(store(&mut second), Records::new());
}

/// The prompt of two engines has a window at its end; the cell is a record of its own.
#[test]
fn fetches_with_groups_arrive_whole_or_not_at_all() {
    let groups = Groups::new(&[Reach::All, Reach::Window(6), Reach::Chunk(8)], &[0, 1, 1, 2]).expect("three groups");
    let new = || host_of(1, PoolConfig { swap_pages: 20, stage_pages: 2, ..pool(4, 60, groups) });
    let (mut first, mut second, prompt) = (new(), new(), text(0..29));
    first.cache(&prompt);
    let records = store(&mut first);
    let of_cells: Vec<_> = records.iter().filter(|(key, _)| key.0 > 0).map(|(_, (_, bytes))| bytes.len()).collect();
    assert!(of_cells.contains(&2) && of_cells.contains(&1), "{of_cells:?}");
    let lookup = second.lookup(ALL, &prompt).expect("it is named").expect("pages are hashed");
    let wanted = std::thread::spawn(move || lookup.wanted()).join().expect("it ends");
    assert!((0..7).all(|place| wanted.contains(&(0, place))) && wanted.contains(&(2, 6)), "{wanted:?}");
    for is_whole in [false, true] {
        let (id, count) = begin_fetch(&mut second, &records, &prompt).expect("there are records");
        assert!(second.fetched(id, if is_whole { count } else { count - 1 }));
        second.check();
        assert_eq!(second.match_prefix(ALL, &prompt).pages(), if is_whole { 7 } else { 0 });
    }
    assert_eq!(store(&mut second), Records::new());
    // Without the window's cells, no prefix can be reached.
    let without: Records = records.into_iter().filter(|(key, _)| key.0 != 1).collect();
    assert_eq!(begin_fetch(&mut new(), &without, &prompt), None);
}

#[test]
fn lost_records_are_put_again() {
    let (mut host, prompt) = (host(), text(0..21));
    host.cache(&prompt);
    let mut records = store(&mut host);
    let keys = keys(&prompt);
    assert_eq!(host.restate_puts(ALL, &prompt, |_, _| true), Ok(0));
    assert_eq!(store(&mut host), Records::new());
    assert_eq!(host.restate_puts(ALL, &prompt, |group, place| (group, place) != (0, 2)), Ok(1));
    assert_eq!(host.restate_puts(ALL, &prompt, |group, place| (group, place) != (0, 2)), Ok(1));
    assert_eq!(store(&mut host).into_keys().collect::<Vec<_>>(), [(0, keys[2])]);
    assert!(records.remove(&(0, keys[2])).is_some());
}
