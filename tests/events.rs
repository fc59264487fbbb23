//! What the tree says to others, event by event. That it is enough to know what is cached, `tests/replay.rs` holds.

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

/// An engine of pages of two tokens, whose host hears what it says.
struct Heard {
    engine: Engine<Null>,
    scratch: StepScratch,
}

fn text(tokens: std::ops::Range<u32>) -> Vec<TokenId> {
    tokens.map(TokenId::new).collect()
}

impl Heard {
    fn new(pages: u32, event_pages: u32) -> Self {
        let pool =
            PoolConfig { page_size: 2, capacity: Capacity::Pages(pages), ..Default::default() };
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
                Event::Removed { hashes } => Said::Removed(hashes.iter().collect()),
                Event::Cleared => Said::Cleared,
                event => panic!("an event that nobody knows: {event:?}"),
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
fn pages_are_said_once_and_neighbours_together() {
    let mut heard = Heard::new(32, 32);
    let long = text(0..8);
    let hashes = chain(&long);
    let first = heard.compute(NAMESPACE, &long[..5]);
    assert_eq!(heard.said(), [stored(None, &hashes[..2], 1)]);
    // The same again is a duplicate, and a hit: neither says anything.
    let again = heard.compute(NAMESPACE, &long[..5]);
    assert_eq!(heard.said(), []);
    // What follows it, in two steps that are drained together, is one event; it can be read after the later one.
    for token in 5..8 {
        heard.engine.append(first, &[TokenId::new(token)]).expect("there is room");
        let step = heard.plan(first);
        heard.engine.commit(step).expect("open");
    }
    assert_eq!(heard.said(), [stored(Some(hashes[1]), &hashes[2..], 5)]);
    heard.engine.finish(first).expect("alive");
    heard.engine.finish(again).expect("alive");
    assert_eq!(heard.said(), [], "what is idle is cached");
}

#[test]
fn what_is_evicted_is_said_deepest_first() {
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
fn a_reset_is_one_word_and_the_old_generation_says_none() {
    let mut heard = Heard::new(32, 32);
    let old = heard.compute(NAMESPACE, &text(0..5));
    let idle = heard.compute(NAMESPACE, &text(50..55));
    heard.engine.finish(idle).expect("alive");
    heard.engine.reset();
    assert_eq!(heard.said(), [Said::Cleared]);
    // It goes on to publish, and another computes the same texts anew.
    heard.engine.append(old, &text(5..7)).expect("there is room");
    let step = heard.plan(old);
    heard.engine.commit(step).expect("open");
    assert_eq!(heard.said(), []);
    let hashes = chain(&text(0..6));
    assert_eq!(heard.engine.match_hashes(&hashes).pages(), 0);
    let new = heard.compute(NAMESPACE, &text(0..5));
    assert_eq!(heard.said(), [stored(None, &hashes[..2], 4)]);
    // What the old one drops has the hashes of what the new one holds.
    heard.engine.finish(old).expect("alive");
    heard.engine.complete(heard.engine.newest_step()).expect("committed");
    assert_eq!(heard.said(), []);
    assert_eq!(heard.engine.match_hashes(&hashes).pages(), 2);
    heard.engine.finish(new).expect("alive");
}

#[test]
fn too_much_is_said_as_all_there_is() {
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
    // Somebody begins to listen.
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
    heard.engine.name_namespace(tenant, names.clone()).expect("nobody else is called that");
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
    silent.drain_events(|event| panic!("nobody asked for {event:?}"));
    assert_eq!(silent.match_hashes(&chain(&text(0..8))).pages(), 0);
    let unshared = EngineConfig {
        hashing: Some(HASHING),
        event_pages: 5,
        prefix: PrefixMode::None,
        ..pool.into()
    };
    let bytes = unshared.bytes().expect("the config is right");
    assert_eq!((bytes.hashes, bytes.events), (0, 0), "what is not shared has no hashes");
}
