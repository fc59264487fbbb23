//! The events of the tree, one by one. `replay.rs` checks that events suffice to reconstruct the cache.

use kvarena::*;

const NAMESPACE: Namespace = Namespace::new(0);
const HASHING: Hashing = Hashing::Dynamo;

/// An event, owned.
#[derive(Clone, PartialEq, Eq, Debug)]
enum Said {
    Stored { namespace: Namespace, parent: Option<PageHash>, hashes: Vec<PageHash>, step: u64 },
    Removed(Vec<PageHash>),
    Cleared,
}

/// An engine with pages of two tokens, and a host that drains its events.
struct Heard {
    engine: Engine<Null>,
    scratch: StepScratch,
}

fn text(tokens: std::ops::Range<u32>) -> Vec<TokenId> {
    tokens.map(TokenId::new).collect()
}

impl Heard {
    fn new(pages: u32, event_pages: u32) -> Self {
        Self::with_groups(pages, event_pages, Groups::ONE)
    }

    fn with_groups(pages: u32, event_pages: u32, groups: Groups) -> Self {
        let (layers, capacity) = (groups.layers().max(1), Capacity::Pages(pages));
        let pool = PoolConfig { layers, groups, page_size: 2, capacity, ..Default::default() };
        let hashing = Some(HASHING);
        let config = EngineConfig { hashing, event_pages, max_tokens: 4096, ..pool.into() };
        let engine = Engine::new(config, Null).expect("the config is right");
        Self { engine, scratch: StepScratch::new() }
    }

    fn plan(&mut self, seq: SeqKey) -> StepId {
        let len = self.engine.extend_max(seq).expect("alive");
        let plan = self.engine.plan_batch(&mut self.scratch, &[Extend { seq, len }]);
        plan.expect("there is room").step()
    }

    /// Admits a prompt and computes it; the step is committed and complete.
    fn compute(&mut self, namespace: Namespace, prompt: &[TokenId]) -> SeqKey {
        let seq = self.engine.admit(namespace, prompt, 0).expect("there is room");
        let step = self.plan(seq);
        self.engine.commit(step).expect("open");
        self.engine.complete(step).expect("committed");
        seq
    }

    fn said(&mut self) -> Vec<Said> {
        let mut said = Vec::new();
        self.engine.drain_events(|event| {
            said.push(match event {
                Event::Stored(stored) => Said::Stored {
                    namespace: stored.namespace,
                    parent: stored.parent,
                    hashes: stored.hashes.iter().collect(),
                    step: stored.step.raw(),
                },
                Event::Removed { medium: Medium::Device, hashes } => {
                    Said::Removed(hashes.iter().collect())
                }
                Event::Cleared => Said::Cleared,
                event => panic!("an unknown event: {event:?}"),
            });
        });
        self.engine.verify().expect("all invariants hold");
        said
    }
}

fn chain(tokens: &[TokenId]) -> Vec<PageHash> {
    HASHING.chain(&NamespaceNames::default(), tokens, 2)
}

fn stored(parent: Option<PageHash>, hashes: &[PageHash], step: u64) -> Said {
    Said::Stored { namespace: NAMESPACE, parent, hashes: hashes.to_vec(), step }
}

#[test]
fn a_page_is_stored_once_and_consecutive_pages_share_an_event() {
    let mut heard = Heard::new(32, 32);
    let long = text(0..8);
    let hashes = chain(&long);
    let first = heard.compute(NAMESPACE, &long[..5]);
    assert_eq!(heard.said(), [stored(None, &hashes[..2], 1)]);
    // An equal prompt is a duplicate, then a hit: neither emits an event.
    let again = heard.compute(NAMESPACE, &long[..5]);
    assert_eq!(heard.said(), []);
    // Its continuation in two steps that are drained together is one event, readable after the later step.
    for token in 5..8 {
        heard.engine.append(first, &[TokenId::new(token)]).expect("there is room");
        let step = heard.plan(first);
        heard.engine.commit(step).expect("open");
    }
    assert_eq!(heard.said(), [stored(Some(hashes[1]), &hashes[2..], 5)]);
    heard.engine.finish(first).expect("alive");
    heard.engine.finish(again).expect("alive");
    assert_eq!(heard.said(), [], "idle pages are cached");
}

#[test]
fn evictions_are_reported_deepest_page_first() {
    let mut heard = Heard::new(6, 32);
    let (old, new) = (text(0..9), text(100..107));
    let seq = heard.compute(NAMESPACE, &old);
    heard.engine.finish(seq).expect("alive");
    heard.said();
    heard.compute(NAMESPACE, &new);
    let gone: Vec<_> = chain(&old)[2..].iter().rev().copied().collect();
    assert_eq!(heard.said(), [Said::Removed(gone), stored(None, &chain(&new), 2)]);
}

#[test]
fn a_reset_is_one_event_and_old_generations_emit_none() {
    let mut heard = Heard::new(32, 32);
    let old = heard.compute(NAMESPACE, &text(0..5));
    let idle = heard.compute(NAMESPACE, &text(50..55));
    heard.engine.finish(idle).expect("alive");
    heard.engine.reset();
    assert_eq!(heard.said(), [Said::Cleared]);
    // The old sequence continues to publish, and another computes the same texts again.
    heard.engine.append(old, &text(5..7)).expect("there is room");
    let step = heard.plan(old);
    heard.engine.commit(step).expect("open");
    assert_eq!(heard.said(), []);
    let hashes = chain(&text(0..6));
    assert_eq!(heard.engine.match_hashes(&hashes).pages(), 0);
    let new = heard.compute(NAMESPACE, &text(0..5));
    assert_eq!(heard.said(), [stored(None, &hashes[..2], 4)]);
    // The dropped pages of the old sequence have the hashes of the new one's pages.
    heard.engine.finish(old).expect("alive");
    heard.engine.complete(heard.engine.newest_step()).expect("committed");
    assert_eq!(heard.said(), []);
    assert_eq!(heard.engine.match_hashes(&hashes).pages(), 2);
    heard.engine.finish(new).expect("alive");
}

#[test]
fn an_overflow_emits_all_cached_pages() {
    let mut heard = Heard::new(32, 3);
    let (first, second) = (text(0..9), text(4..13));
    let hashes = [chain(&first), chain(&second)];
    let one = heard.compute(NAMESPACE, &first);
    assert_eq!(heard.said(), [Said::Cleared, stored(None, &hashes[0], 1)], "4 pages, room for 3");
    heard.compute(NAMESPACE, &second);
    heard.engine.finish(one).expect("alive");
    let said = heard.said();
    assert_eq!(said[0], Said::Cleared);
    assert_eq!(said.len(), 3);
    for hashes in &hashes {
        assert!(said.contains(&stored(None, hashes, 2)), "{said:?}");
    }
    assert_eq!(heard.said(), [], "it is said once");
    // A listener connects.
    heard.engine.restate_events();
    assert_eq!(heard.said(), said);
}

#[test]
fn namespaces_are_known_by_their_names() {
    let mut heard = Heard::new(32, 32);
    let (tenant, prompt) = (Namespace::new(7), text(0..5));
    let refused = heard.engine.admit(tenant, &prompt, 0);
    assert_eq!(refused, Err(Error::UnnamedNamespace { namespace: tenant }));
    assert_eq!(heard.engine.admission(tenant, &prompt, 0).map(|_| ()), refused.map(|_| ()));
    let names = NamespaceNames { salt: Some("red".to_owned()), ..Default::default() };
    heard.engine.name_namespace(tenant, names.clone()).expect("the names are unused");
    heard.compute(tenant, &prompt);
    let hashes = HASHING.chain(&names, &prompt, 2);
    let said = heard.said();
    let parent = None;
    assert_eq!(said, [Said::Stored { namespace: tenant, parent, hashes: hashes.clone(), step: 1 }]);
    assert_ne!(hashes, chain(&prompt), "a salt makes other hashes");
    assert_eq!(heard.engine.match_hashes(&hashes).scope().namespace, tenant);
}

#[test]
fn without_hashes_there_are_no_events() {
    let pool = PoolConfig { capacity: Capacity::Pages(8), ..Default::default() };
    let config = EngineConfig { event_pages: 5, ..pool.into() };
    assert_eq!(config.shape(), Err(ConfigError::EventsWithoutHashes { event_pages: 5 }));
    let mut silent = Engine::new(EngineConfig::from(pool), Null).expect("the config is right");
    silent.drain_events(|event| panic!("events are disabled: {event:?}"));
    assert_eq!(silent.match_hashes(&chain(&text(0..8))).pages(), 0);
    let unshared = EngineConfig {
        hashing: Some(HASHING),
        event_pages: 5,
        prefix: PrefixMode::None,
        ..pool.into()
    };
    let bytes = unshared.bytes().expect("the config is right");
    assert_eq!((bytes.hashes, bytes.events), (0, 0), "pages that are not shared have no hashes");
}

/// If a sink panics, the next drain emits the whole cache, and later drains the following changes.
#[test]
fn a_sink_that_panics_loses_no_event() {
    for event_pages in [3, 32] {
        for handed in 0..3 {
            let mut heard = Heard::new(32, event_pages);
            let gone = heard.compute(NAMESPACE, &text(50..55));
            heard.engine.finish(gone).expect("alive");
            heard.engine.reset();
            let texts = [text(0..9), text(4..13)];
            texts.iter().for_each(|text| _ = heard.compute(NAMESPACE, text));
            let (engine, mut left) = (&mut heard.engine, handed);
            let drain = std::panic::AssertUnwindSafe(|| {
                engine.drain_events(|event| {
                    assert!(left > 0, "the sink fails at {event:?}");
                    left -= 1;
                });
            });
            std::panic::catch_unwind(drain).expect_err("all is cleared, and two texts are stored");
            let said = heard.said();
            assert_eq!((&said[0], said.len()), (&Said::Cleared, 3), "{event_pages} {handed}");
            for text in &texts {
                assert!(said.contains(&stored(None, &chain(text), 3)), "{said:?}");
            }
            assert_eq!(heard.said(), [], "it is said once");
            heard.compute(NAMESPACE, &text(70..75));
            assert_eq!(heard.said(), [stored(None, &chain(&text(70..75)), 4)]);
        }
    }
}

#[test]
fn a_reset_before_an_overflow_is_one_cleared_event() {
    let mut heard = Heard::new(32, 3);
    heard.engine.reset();
    let long = text(0..9);
    heard.compute(NAMESPACE, &long);
    assert_eq!(heard.said(), [Said::Cleared, stored(None, &chain(&long), 1)]);
    assert_eq!(heard.said(), []);
}

#[test]
fn a_buffer_is_full_when_all_of_its_pages_are_taken() {
    for texts in [&[text(0..9)][..], &[text(0..7), text(50..53)], &[text(0..3), text(50..57)]] {
        let mut heard = Heard::new(32, 4);
        let mut want = Vec::new();
        for (text, step) in texts.iter().zip(1..) {
            heard.compute(NAMESPACE, text);
            want.push(stored(None, &chain(text), step));
        }
        assert_eq!(heard.said(), want, "4 pages, and room for 4");
        texts.iter().for_each(|_| heard.engine.restate_events());
        heard.said();
        for first in [100, 200, 300, 400, 500] {
            heard.compute(NAMESPACE, &text(first..first + 3));
        }
        assert_eq!(heard.said()[0], Said::Cleared, "5 pages, and room for 4");
    }
}

#[test]
fn pages_that_a_finish_publishes_are_readable_after_their_step() {
    let mut heard = Heard::new(32, 32);
    let first = text(0..4);
    let seq = heard.engine.admit(NAMESPACE, &first[..3], 0).expect("there is room");
    let other = heard.engine.admit(NAMESPACE, &text(50..53), 0).expect("there is room");
    // The token at position 3 is computed before it is known, so the commit does not publish its page.
    for seq in [seq, seq, other] {
        heard.plan(seq);
    }
    (1..4).for_each(|step| heard.engine.commit(StepId::new(step)).expect("open"));
    let hashes = chain(&first);
    let others = stored(None, &chain(&text(50..53)), 3);
    assert_eq!(heard.said(), [stored(None, &hashes[..1], 1), others]);
    heard.engine.append(seq, &first[3..]).expect("there is room");
    heard.engine.finish(seq).expect("alive");
    assert_eq!(heard.said(), [stored(Some(hashes[0]), &hashes[1..], 2)]);
}

#[test]
fn names_are_forgotten_when_unused() {
    let mut heard = Heard::new(8, 32);
    let [red, blue] = [7, 8].map(Namespace::new);
    let salt = |salt: &str| NamespaceNames { salt: Some(salt.to_owned()), ..Default::default() };
    let unnamed = |namespace| Error::UnnamedNamespace { namespace };
    assert_eq!(heard.engine.forget_namespace(red), Err(unnamed(red)));
    assert_eq!(heard.engine.forget_namespace(NAMESPACE), Ok(()), "the namespace has no names");
    heard.engine.name_namespace(red, salt("red")).expect("the names are unused");
    let seq = heard.compute(red, &text(0..5));
    heard.engine.forget_namespace(red).expect("it has names");
    // A forgotten namespace admits no prompt; its running sequences continue and are hashed with its names.
    assert_eq!(heard.engine.admit(red, &text(0..5), 0), Err(unnamed(red)));
    assert_eq!(heard.engine.forget_namespace(red), Err(unnamed(red)));
    heard.engine.preempt(seq, Keep::Publish).expect("it runs");
    heard.engine.resume(seq, 0).expect("there is room");
    let child = heard.engine.fork(seq, 1, 0).expect("there is room").children[0];
    heard.engine.append(child, &text(5..7)).expect("there is room");
    let step = heard.plan(child);
    heard.engine.commit(step).expect("open");
    heard.engine.complete(step).expect("committed");
    let hashes = HASHING.chain(&salt("red"), &text(0..7), 2);
    assert_eq!(heard.engine.match_hashes(&hashes).pages(), 3);
    let taken = Err(Error::NamesTaken { namespace: blue, by: red });
    let still_taken = |heard: &mut Heard| {
        heard.engine.verify().expect("all invariants hold");
        assert_eq!(heard.engine.name_namespace(blue, salt("red")), taken);
    };
    still_taken(&mut heard);
    let named = Err(Error::NamespaceNamed { namespace: red });
    assert_eq!(heard.engine.name_namespace(red, salt("blue")), named);
    // The same names restore the namespace.
    heard.engine.name_namespace(red, salt("red")).expect("it is called that");
    let again = heard.engine.admit(red, &text(0..5), 0).expect("there is room");
    heard.engine.forget_namespace(red).expect("it has names");
    for seq in [seq, child, again] {
        still_taken(&mut heard);
        heard.engine.finish(seq).expect("alive");
    }
    still_taken(&mut heard);
    // With the last cached page its names are removed. Waiting events still have them.
    heard.compute(NAMESPACE, &text(100..115));
    heard.engine.verify().expect("all invariants hold");
    assert_eq!(heard.engine.name_namespace(blue, salt("red")), Ok(()));
    assert_eq!(heard.engine.name_namespace(red, salt("blue")), Ok(()));
    let mut stored = Vec::new();
    heard.engine.drain_events(|event| {
        if let Event::Stored(event) = event {
            stored.push((event.namespace, event.names.clone(), event.hashes.len()));
        }
    });
    let default = (NAMESPACE, NamespaceNames::default(), 7);
    assert_eq!(stored, [(red, salt("red"), 3), default]);
    assert_eq!(heard.engine.forget_namespace(blue), Ok(()), "the namespace has no names");
    assert_eq!(heard.engine.name_namespace(red, salt("blue")), Ok(()));
    heard.engine.verify().expect("all invariants hold");
}

/// An index sees what matches in group 0. A prompt matches less of it where cells were evicted.
#[test]
fn pages_of_other_groups_have_no_events() {
    let groups = Groups::new(&[Reach::All, Reach::Window(4)], &[0, 1]).expect("two groups");
    // Room for a text of 11 tokens, in 12 pages, beside the five pages and two cells of another one, but for two pages.
    let mut heard = Heard::with_groups(17, 100, groups);
    let (first, second) = (text(0..11), text(100..111));
    let (hashes, others) = (chain(&first), chain(&second));
    let matched = |heard: &Heard| {
        let found = heard.engine.match_prefix(NAMESPACE, &first);
        (found.pages(), found.full_pages(), heard.engine.match_hashes(&hashes).pages())
    };
    let seq = heard.compute(NAMESPACE, &first);
    heard.engine.finish(seq).expect("it runs");
    assert_eq!(heard.said(), [stored(None, &hashes, 1)]);
    assert_eq!(matched(&heard), (5, 5, 5));

    heard.compute(NAMESPACE, &second);
    assert_eq!(heard.engine.stats().evicted_cells, 2);
    assert_eq!(heard.said(), [stored(None, &others, 2)], "cells go unsaid");
    assert_eq!(matched(&heard), (0, 5, 5));
}
