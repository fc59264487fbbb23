//! The events of the tree, one by one. `replay.rs` checks that events suffice to reconstruct the cache.

use kvarena::config::PrefixMode;
use kvarena::event::{Event, Medium, Stored};
use kvarena::hash::{Hashing, NamespaceNames, PageHash};
use kvarena::layout::{Groups, Reach};
use kvarena::*;

use super::host::{ALL, Host, pool, text};

const HASHING: Hashing = Hashing::Dynamo;

/// An owned copy of an event.
#[derive(Clone, PartialEq, Eq, Debug)]
enum OwnedEvent {
    Stored { namespace: Namespace, parent: Option<PageHash>, hashes: Vec<PageHash>, step: u64 },
    Removed(Vec<PageHash>),
    Cleared,
}

/// Returns an engine with pages of two tokens, and a buffer for the events of `event_pages` pages.
fn host(pages: u32, event_pages: u32, groups: Groups) -> Host {
    let hashing = Some(HASHING);
    Host::null(EngineConfig { hashing, event_pages, max_tokens: 4096, ..pool(2, pages, groups).into() })
}

/// Admits a prompt of a namespace and computes it.
fn compute(host: &mut Host, namespace: Namespace, prompt: &[TokenId]) -> SeqKey {
    let seq = host.admit(namespace, prompt, 0).expect("there is room");
    host.compute_rest(seq);
    seq
}

fn drain(host: &mut Host) -> Vec<OwnedEvent> {
    let mut events = Vec::new();
    host.drain_events(|event| {
        events.push(match event {
            Event::Stored(stored) => OwnedEvent::Stored {
                namespace: stored.namespace,
                parent: stored.parent,
                hashes: stored.hashes.iter().collect(),
                step: stored.step.raw(),
            },
            Event::Removed { medium: Medium::Device, hashes, .. } => OwnedEvent::Removed(hashes.iter().collect()),
            Event::Cleared => OwnedEvent::Cleared,
            event => panic!("an unknown event: {event:?}"),
        });
    });
    host.verify().expect("all invariants hold");
    events
}

fn chain(tokens: &[TokenId]) -> Vec<PageHash> {
    HASHING.chain(&NamespaceNames::default(), tokens, 2)
}

fn stored(parent: Option<PageHash>, hashes: &[PageHash], step: u64) -> OwnedEvent {
    OwnedEvent::Stored { namespace: ALL, parent, hashes: hashes.to_vec(), step }
}

#[test]
fn a_page_is_stored_once_and_consecutive_pages_share_an_event() {
    let mut host = host(32, 32, Groups::ONE);
    let long = text(0..8);
    let hashes = chain(&long);
    let first = host.prefill(&long[..5]);
    assert_eq!(drain(&mut host), [stored(None, &hashes[..2], 1)]);
    // An equal prompt is a hit, which emits no event.
    let again = host.prefill(&long[..5]);
    assert_eq!(drain(&mut host), []);
    // The continuation of `first` takes three steps, of which two publish a page. Drained together, the pages are one
    // event, readable after the last step.
    for token in 5..8 {
        host.append(first, &[TokenId::new(token)]).expect("there is room");
        let step = host.plan_rest(first);
        host.commit(step).expect("it is open");
    }
    assert_eq!(drain(&mut host), [stored(Some(hashes[1]), &hashes[2..], 5)]);
    host.finish(first).expect("it is live");
    host.finish(again).expect("it is live");
    assert_eq!(drain(&mut host), [], "idle pages are cached");
}

#[test]
fn evictions_are_reported_deepest_page_first() {
    let mut host = host(6, 32, Groups::ONE);
    let (old, new) = (text(0..9), text(100..107));
    host.cache(&old);
    drain(&mut host);
    host.prefill(&new);
    let gone: Vec<_> = chain(&old)[2..].iter().rev().copied().collect();
    assert_eq!(drain(&mut host), [OwnedEvent::Removed(gone), stored(None, &chain(&new), 2)]);
}

#[test]
fn a_reset_is_one_event_and_old_generations_emit_none() {
    let mut host = host(32, 32, Groups::ONE);
    let old = host.prefill(&text(0..5));
    host.cache(&text(50..55));
    host.reset();
    assert_eq!(drain(&mut host), [OwnedEvent::Cleared]);
    // The old sequence continues to publish, and another computes the same texts again.
    host.append(old, &text(5..7)).expect("there is room");
    let step = host.plan_rest(old);
    host.commit(step).expect("it is open");
    assert_eq!(drain(&mut host), []);
    let hashes = chain(&text(0..6));
    assert_eq!(host.match_hashes(&hashes).pages(), 0);
    let new = host.prefill(&text(0..5));
    assert_eq!(drain(&mut host), [stored(None, &hashes[..2], 4)]);
    // The dropped pages of the old sequence have the hashes of the new one's pages.
    host.finish(old).expect("it is live");
    host.complete_all();
    assert_eq!(drain(&mut host), []);
    assert_eq!(host.match_hashes(&hashes).pages(), 2);
    host.finish(new).expect("it is live");
}

#[test]
fn an_overflow_emits_all_cached_pages() {
    let mut host = host(32, 3, Groups::ONE);
    let (first, second) = (text(0..9), text(4..13));
    let hashes = [chain(&first), chain(&second)];
    let one = host.prefill(&first);
    assert_eq!(drain(&mut host), [OwnedEvent::Cleared, stored(None, &hashes[0], 1)], "4 pages, room for 3");
    host.prefill(&second);
    host.finish(one).expect("it is live");
    let events = drain(&mut host);
    assert_eq!(events[0], OwnedEvent::Cleared);
    assert_eq!(events.len(), 3);
    for hashes in &hashes {
        assert!(events.contains(&stored(None, hashes, 2)), "{events:?}");
    }
    assert_eq!(drain(&mut host), [], "each event is emitted once");
    // A listener connects.
    host.restate_events();
    assert_eq!(drain(&mut host), events);
}

#[test]
fn namespaces_are_known_by_their_names() {
    let mut host = host(32, 32, Groups::ONE);
    let (tenant, prompt) = (Namespace::new(7), text(0..5));
    let refused = host.admit(tenant, &prompt, 0);
    assert_eq!(refused, Err(Error::UnnamedNamespace { namespace: tenant }));
    assert_eq!(host.admission(tenant, &prompt, 0).map(|_| ()), refused.map(|_| ()));
    let names = NamespaceNames { salt: Some("red".to_owned()), ..Default::default() };
    host.name_namespace(tenant, names.clone()).expect("the names are unused");
    compute(&mut host, tenant, &prompt);
    let hashes = HASHING.chain(&names, &prompt, 2);
    let events = drain(&mut host);
    let parent = None;
    assert_eq!(events, [OwnedEvent::Stored { namespace: tenant, parent, hashes: hashes.clone(), step: 1 }]);
    assert_ne!(hashes, chain(&prompt), "a salt makes other hashes");
    assert_eq!(host.match_hashes(&hashes).scope().namespace, tenant);
}

#[test]
fn without_hashes_there_are_no_events() {
    let pool = PoolConfig { capacity: Capacity::Pages(8), ..Default::default() };
    let config = EngineConfig { event_pages: 5, ..pool.into() };
    assert_eq!(config.shape(), Err(ConfigError::EventsWithoutHashes { event_pages: 5 }));
    let mut silent = Engine::new(EngineConfig::from(pool), Null).expect("a valid config");
    silent.drain_events(|event| panic!("events are disabled: {event:?}"));
    assert_eq!(silent.match_hashes(&chain(&text(0..8))).pages(), 0);
    let unshared = EngineConfig { hashing: Some(HASHING), event_pages: 5, prefix: PrefixMode::None, ..pool.into() };
    let bytes = unshared.bytes().expect("a valid config");
    assert_eq!((bytes.hashes, bytes.events), (0, 0), "pages that are not shared have no hashes");
}

/// If a sink panics, the next drain emits the whole cache. Later drains emit the following changes.
#[test]
fn a_sink_that_panics_loses_no_event() {
    for event_pages in [3, 32] {
        for handed in 0..3 {
            let mut host = host(32, event_pages, Groups::ONE);
            host.cache(&text(50..55));
            host.reset();
            let texts = [text(0..9), text(4..13)];
            texts.iter().for_each(|text| _ = host.prefill(text));
            let mut left = handed;
            let fails = std::panic::AssertUnwindSafe(|| {
                host.drain_events(|event| {
                    assert!(left > 0, "the sink fails at {event:?}");
                    left -= 1;
                });
            });
            std::panic::catch_unwind(fails).expect_err("all is cleared, and two texts are stored");
            let events = drain(&mut host);
            assert_eq!((&events[0], events.len()), (&OwnedEvent::Cleared, 3), "{event_pages} {handed}");
            for text in &texts {
                assert!(events.contains(&stored(None, &chain(text), 3)), "{events:?}");
            }
            assert_eq!(drain(&mut host), [], "each event is emitted once");
            host.prefill(&text(70..75));
            assert_eq!(drain(&mut host), [stored(None, &chain(&text(70..75)), 4)]);
        }
    }
}

#[test]
fn a_reset_before_an_overflow_is_one_cleared_event() {
    let mut host = host(32, 3, Groups::ONE);
    host.reset();
    let long = text(0..9);
    host.prefill(&long);
    assert_eq!(drain(&mut host), [OwnedEvent::Cleared, stored(None, &chain(&long), 1)]);
    assert_eq!(drain(&mut host), []);
}

#[test]
fn a_buffer_is_full_when_all_of_its_pages_are_taken() {
    for texts in [&[text(0..9)][..], &[text(0..7), text(50..53)], &[text(0..3), text(50..57)]] {
        let mut host = host(32, 4, Groups::ONE);
        let mut want = Vec::new();
        for (text, step) in texts.iter().zip(1..) {
            host.prefill(text);
            want.push(stored(None, &chain(text), step));
        }
        assert_eq!(drain(&mut host), want, "4 pages, and room for 4");
        texts.iter().for_each(|_| host.restate_events());
        drain(&mut host);
        for first in [100, 200, 300, 400, 500] {
            host.prefill(&text(first..first + 3));
        }
        assert_eq!(drain(&mut host)[0], OwnedEvent::Cleared, "5 pages, and room for 4");
    }
}

#[test]
fn pages_that_a_finish_publishes_are_readable_after_their_step() {
    let mut host = host(32, 32, Groups::ONE);
    let first = text(0..4);
    let seq = host.begin(&first[..3]);
    let other = host.begin(&text(50..53));
    // The token at position 3 is computed before it is known, so the commit does not publish its page.
    for seq in [seq, seq, other] {
        host.plan_rest(seq);
    }
    (1..4).for_each(|step| host.commit(StepId::new(step)).expect("it is open"));
    let hashes = chain(&first);
    let others = stored(None, &chain(&text(50..53)), 3);
    assert_eq!(drain(&mut host), [stored(None, &hashes[..1], 1), others]);
    host.append(seq, &first[3..]).expect("there is room");
    host.finish(seq).expect("it is live");
    assert_eq!(drain(&mut host), [stored(Some(hashes[0]), &hashes[1..], 2)]);
}

#[test]
fn names_are_forgotten_when_unused() {
    let mut host = host(8, 32, Groups::ONE);
    let [red, blue] = [7, 8].map(Namespace::new);
    let salt = |salt: &str| NamespaceNames { salt: Some(salt.to_owned()), ..Default::default() };
    let unnamed = |namespace| Error::UnnamedNamespace { namespace };
    assert_eq!(host.forget_namespace(red), Err(unnamed(red)));
    assert_eq!(host.forget_namespace(ALL), Ok(()), "the namespace has no names");
    host.name_namespace(red, salt("red")).expect("the names are unused");
    let seq = compute(&mut host, red, &text(0..5));
    host.forget_namespace(red).expect("it has names");
    // A forgotten namespace admits no prompt; its running sequences continue and are hashed with its names.
    assert_eq!(host.admit(red, &text(0..5), 0), Err(unnamed(red)));
    assert_eq!(host.forget_namespace(red), Err(unnamed(red)));
    host.preempt(seq, Keep::Publish).expect("it runs");
    host.resume(seq, 0).expect("there is room");
    let child = host.fork(seq, 1, 0).expect("there is room").children[0];
    host.append(child, &text(5..7)).expect("there is room");
    let step = host.plan_rest(child);
    host.close(step);
    let hashes = HASHING.chain(&salt("red"), &text(0..7), 2);
    assert_eq!(host.match_hashes(&hashes).pages(), 3);
    let taken = Err(Error::NamesTaken { namespace: blue, by: red });
    let still_taken = |host: &mut Host| {
        host.verify().expect("all invariants hold");
        assert_eq!(host.name_namespace(blue, salt("red")), taken);
    };
    still_taken(&mut host);
    let named = Err(Error::NamespaceNamed { namespace: red });
    assert_eq!(host.name_namespace(red, salt("blue")), named);
    // The same names restore the namespace.
    host.name_namespace(red, salt("red")).expect("it is called that");
    let again = host.admit(red, &text(0..5), 0).expect("there is room");
    host.forget_namespace(red).expect("it has names");
    for seq in [seq, child, again] {
        still_taken(&mut host);
        host.finish(seq).expect("it is live");
    }
    still_taken(&mut host);
    // The names of a namespace are removed with its last cached page. Waiting events still have them.
    host.prefill(&text(100..115));
    host.verify().expect("all invariants hold");
    assert_eq!(host.name_namespace(blue, salt("red")), Ok(()));
    assert_eq!(host.name_namespace(red, salt("blue")), Ok(()));
    let mut stored = Vec::new();
    host.drain_events(|event| {
        if let Event::Stored(event) = event {
            stored.push((event.namespace, event.names.clone(), event.hashes.len()));
        }
    });
    let default = (ALL, NamespaceNames::default(), 7);
    assert_eq!(stored, [(red, salt("red"), 3), default]);
    assert_eq!(host.forget_namespace(blue), Ok(()), "the namespace has no names");
    assert_eq!(host.name_namespace(red, salt("blue")), Ok(()));
    host.verify().expect("all invariants hold");
}

/// An index of events contains the pages that match in group 0. A prompt matches fewer where cells were evicted.
#[test]
fn pages_of_other_groups_have_no_events() {
    let groups = Groups::new(&[Reach::All, Reach::Window(4)], &[0, 1]).expect("two groups");
    // A text of 11 tokens takes 12 pages. The first text leaves five pages and two cells, so the second lacks two
    // pages.
    let mut host = host(17, 100, groups);
    let (first, second) = (text(0..11), text(100..111));
    let (hashes, others) = (chain(&first), chain(&second));
    let matched = |host: &Host| {
        let found = host.match_prefix(ALL, &first);
        (found.pages(), found.full_pages(), host.match_hashes(&hashes).pages())
    };
    host.cache(&first);
    assert_eq!(drain(&mut host), [stored(None, &hashes, 1)]);
    assert_eq!(matched(&host), (5, 5, 5));

    host.prefill(&second);
    assert_eq!(host.stats().evicted_cells, 2);
    assert_eq!(drain(&mut host), [stored(None, &others, 2)], "cells emit no events");
    assert_eq!(matched(&host), (0, 5, 5));
}

/// An event about pages: its group, `+` or `-`, and the hashes.
type Change = (u32, char, Vec<PageHash>);

fn changes(host: &mut Host) -> Vec<Change> {
    let mut changes = Vec::new();
    host.drain_events(|event| {
        changes.push(match event {
            Event::Stored(Stored { group, parent, hashes, tokens, .. }) => {
                // The texts begin at multiples of 100.
                let (first, last) = (tokens[0].raw(), tokens[tokens.len() - 1].raw());
                let own = text(first / 100 * 100..last + 1);
                assert_eq!(tokens, &own[own.len() - 2 * hashes.len()..]);
                let (before, end) = (own.len() / 2 - hashes.len(), chain(&own));
                assert_eq!(hashes.iter().collect::<Vec<_>>(), end[before..]);
                assert_eq!(parent, before.checked_sub(1).map(|at| end[at]));
                (group, '+', hashes.iter().collect())
            }
            Event::Removed { group, hashes, .. } => (group, '-', hashes.iter().collect()),
            _ => (0, '0', Vec::new()),
        });
    });
    host.verify().expect("all invariants hold");
    changes
}

/// With `event_cells`, a window's cells are stored after their pages and removed before them, and a reset clears them.
#[test]
fn cells_have_events_if_the_config_says_so() {
    let groups = Groups::new(&[Reach::All, Reach::Window(4)], &[0, 1]).expect("two groups");
    let plain =
        EngineConfig { hashing: Some(HASHING), event_pages: 100, max_tokens: 4096, ..pool(2, 17, groups).into() };
    let mut host = Host::null(EngineConfig { event_cells: true, ..plain });
    let (first, second) = (text(0..11), text(100..111));
    let (hashes, others) = (chain(&first), chain(&second));
    let both = |hashes: &[PageHash]| [(0, '+', hashes.to_vec()), (1, '+', hashes[3..].to_vec())];
    host.cache(&first);
    // The token after five pages reads the window's last two; their cells are one event.
    assert_eq!(changes(&mut host), both(&hashes));
    let seq = host.prefill(&second);
    // Evicting the two oldest cells makes room. Changes of cells follow those of pages.
    let mut gone = hashes[3..].to_vec();
    let mut got = changes(&mut host);
    gone.sort_unstable();
    got[1].2.sort_unstable();
    let [pages, cells] = both(&others);
    assert_eq!(got, [pages, (1, '-', gone), cells]);
    host.restate_events();
    let restated = changes(&mut host);
    assert_eq!(restated[0], (0, '0', Vec::new()));
    let of_group = |group| {
        let mut all: Vec<_> = restated.iter().filter(|c| c.1 == '+' && c.0 == group).map(|c| c.2.clone()).collect();
        all.sort_unstable();
        all
    };
    let mut all = vec![hashes.clone(), others.clone()];
    all.sort_unstable();
    assert_eq!((of_group(0), of_group(1)), (all, vec![others[3..].to_vec()]));
    // The cells of an old generation have no events, although they live until their sequence ends.
    host.reset();
    host.finish(seq).expect("it is live");
    assert_eq!(changes(&mut host), [(0, '0', Vec::new())]);
    host.prefill(&first);
    assert_eq!(changes(&mut host), both(&hashes));
    // A small buffer overflows, and the cache is restated with its cells.
    let mut small = Host::null(EngineConfig { event_cells: true, event_pages: 6, ..plain });
    small.cache(&first);
    assert_eq!(changes(&mut small), [&[(0, '0', Vec::new())][..], &both(&hashes)].concat());
}
