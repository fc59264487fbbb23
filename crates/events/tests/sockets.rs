//! Engines, subscribers and a router over real sockets. The router finds a cached prompt, also after a lost message,
//! after a gap too large to replay, and after a restart.

#[path = "../examples/fleet/host.rs"]
mod host;
#[path = "../examples/fleet/router.rs"]
mod router;

use std::io::ErrorKind;
use std::sync::Arc;
use std::time::Duration;

use host::{Host, HostConfig};
use kvarena::hash::{Hashing, NamespaceNames};
use kvarena::{Namespace, TokenId};
use kvarena_events::encode::Batch;
use kvarena_events::publisher::{Publisher, PublisherConfig};
use kvarena_events::subscriber::{Received, Subscriber};
use router::Router;
use tokio::task::JoinHandle;

const CONFIG: HostConfig = HostConfig { page_size: 4, pages: 64, hashing: Some(Hashing::Dynamo), event_pages: 64 };

fn text(from: u32) -> Vec<TokenId> {
    (from..from + 20).map(TokenId::new).collect()
}

fn nothing() -> Vec<u8> {
    Batch::new(Hashing::Dynamo, 4).take(0.0, 0)
}

/// An engine and its publisher.
struct Engine {
    host: Host,
    publisher: Arc<Publisher>,
    beat: JoinHandle<()>,
}

impl Engine {
    async fn new(config: PublisherConfig) -> Self {
        let host = Host::new(CONFIG).expect("the config is right");
        // The ports of a closed engine may still be in use for a moment.
        let publisher = loop {
            match Publisher::bind(config.clone()).await {
                Err(e) if e.kind() == ErrorKind::AddrInUse => {
                    tokio::time::sleep(Duration::from_millis(2)).await;
                }
                bound => break Arc::new(bound.expect("the endpoints are valid")),
            }
        };
        // A new subscriber may miss the first messages, so the publisher sends one every 2 ms.
        let beats = publisher.clone();
        let beat = tokio::spawn(async move {
            loop {
                tokio::time::sleep(Duration::from_millis(2)).await;
                beats.send(nothing());
            }
        });
        Self { host, publisher, beat }
    }

    async fn subscriber(&self) -> Subscriber {
        let Publisher { endpoint, replay_endpoint, .. } = &*self.publisher;
        Subscriber::connect(endpoint, replay_endpoint).await.expect("the publisher is bound")
    }

    fn serve(&mut self, prompt: &[TokenId]) -> Vec<u8> {
        self.host.serve(Namespace::default(), prompt, &[]).expect("it fits");
        self.host.take_payload(0.0).expect("something is new").0
    }

    fn dump(&mut self) {
        self.host.engine.restate_events();
        self.publisher.send(self.host.take_payload(0.0).expect("the cleared event").0);
    }

    async fn close(self) -> PublisherConfig {
        self.beat.abort();
        _ = self.beat.await;
        let config = PublisherConfig {
            endpoint: self.publisher.endpoint.clone(),
            replay_endpoint: self.publisher.replay_endpoint.clone(),
            ..PublisherConfig::default()
        };
        let publisher = Arc::into_inner(self.publisher).expect("this is the only reference");
        publisher.close().await;
        config
    }
}

/// Receives until the router has `pages` pages of each prompt, and returns all items but payloads. On a request the
/// engine publishes its whole cache again.
async fn until(
    router: &mut Router,
    (number, engine, subscriber): (u64, &mut Engine, &mut Subscriber),
    prompts: &[&[TokenId]],
    pages: u32,
) -> Vec<Received> {
    let mut odd = Vec::new();
    let known = |router: &Router, prompt| router.overlap(&NamespaceNames::default(), prompt).contains(&(number, pages));
    while !prompts.iter().all(|prompt| known(router, prompt)) {
        match subscriber.receive().await.expect("the socket works") {
            Received::Payload(payload) => router.check_and_apply(number, &payload).expect("it is right"),
            other => {
                router.forget(number);
                odd.push(other);
            }
        }
        if engine.publisher.take_dump_request() {
            engine.dump();
        }
    }
    odd
}

/// Returns an engine of which the router knows the pages of `text(0)`.
async fn known_engine(config: PublisherConfig) -> (Router, Engine, Subscriber) {
    let (mut router, mut engine) = (Router::new(4), Engine::new(config).await);
    let mut subscriber = engine.subscriber().await;
    let first = engine.serve(&text(0));
    engine.publisher.send(first);
    until(&mut router, (0, &mut engine, &mut subscriber), &[&text(0)], 5).await;
    (router, engine, subscriber)
}

#[tokio::test]
async fn the_router_finds_the_engine_that_caches_a_prompt() {
    let mut router = Router::new(4);
    let mut engines = Vec::new();
    for number in 0..2 {
        let mut engine = Engine::new(PublisherConfig::default()).await;
        // The payload is sent before the subscriber connects, so the publisher replays it.
        let payload = engine.serve(&text(1000 * number));
        engine.publisher.send(payload);
        let mut subscriber = engine.subscriber().await;
        let peer = (u64::from(number), &mut engine, &mut subscriber);
        until(&mut router, peer, &[&text(1000 * number)], 5).await;
        engines.push((engine, subscriber));
    }
    // Both engines publish the same prompt while the subscribers are connected.
    for (number, (engine, subscriber)) in engines.iter_mut().enumerate() {
        let both = text(5000);
        let payload = engine.serve(&both);
        engine.publisher.send(payload);
        let own = text(1000 * number as u32);
        until(&mut router, (number as u64, engine, subscriber), &[&both, &own], 5).await;
    }
    let found = |from| router.overlap(&NamespaceNames::default(), &text(from));
    assert_eq!([found(0), found(1000)], [vec![(0, 5)], vec![(1, 5)]]);
    assert_eq!(found(5000), [(0, 5), (1, 5)]);
    assert_eq!(found(9000), []);
}

#[tokio::test]
async fn lost_messages_are_replayed() {
    let (mut router, mut engine, mut subscriber) = known_engine(PublisherConfig::default()).await;
    // Without the lost message, the next one would have no parent.
    let long: Vec<TokenId> = (0..60).map(TokenId::new).collect();
    let lost = engine.serve(&long[..40]);
    engine.publisher.lose(lost);
    let next = engine.serve(&long);
    engine.publisher.send(next);
    let odd = until(&mut router, (0, &mut engine, &mut subscriber), &[&long], 15).await;
    assert_eq!(odd, [], "the replay fills the gap");
}

#[tokio::test]
async fn a_gap_too_large_to_replay_causes_a_dump() {
    let config = PublisherConfig { keep: 1, ..PublisherConfig::default() };
    let (mut router, mut engine, mut subscriber) = known_engine(config).await;
    for from in [1000, 2000] {
        let lost = engine.serve(&text(from));
        engine.publisher.lose(lost);
    }
    engine.publisher.send(nothing());
    let odd = until(&mut router, (0, &mut engine, &mut subscriber), &[&text(1000)], 5).await;
    assert!(matches!(odd[..], [Received::Lost { .. }, ..]), "{odd:?}");
    for from in [0, 2000] {
        assert_eq!(router.overlap(&NamespaceNames::default(), &text(from)), [(0, 5)]);
    }
    assert_eq!(router.pages(), 15);
}

#[tokio::test]
async fn a_restarted_engine_replaces_its_old_contents() {
    let (mut router, mut engine, mut subscriber) = known_engine(PublisherConfig::default()).await;
    // More messages than the next engine will send, so its numbers go back.
    (0..5000).for_each(|_| engine.publisher.send(nothing()));
    let last = engine.serve(&text(500));
    engine.publisher.send(last);
    until(&mut router, (0, &mut engine, &mut subscriber), &[&text(500)], 5).await;

    let config = engine.close().await;
    let mut engine = Engine::new(config).await;
    // The subscriber receives this event only because it requests the whole cache.
    let lost = engine.serve(&text(1000));
    engine.publisher.lose(lost);
    let odd = until(&mut router, (0, &mut engine, &mut subscriber), &[&text(1000)], 5).await;
    assert!(odd.contains(&Received::Restarted), "{odd:?}");
    assert_eq!(router.overlap(&NamespaceNames::default(), &text(0)), [], "the old engine's pages are gone");
    assert_eq!(router.pages(), 5);
}

/// A subscriber that disconnects in the middle of a reply, with unread data, does not end the publisher.
#[tokio::test]
async fn a_closed_connection_ends_only_its_reply() {
    let config = PublisherConfig { keep_bytes: 1 << 28, ..PublisherConfig::default() };
    let engine = Engine::new(config).await;
    for _ in 0..2_000 {
        engine.publisher.lose(vec![0; 1 << 16]);
    }
    // A new subscriber requests all 131 MB, which take longer than the timeout.
    let connected = tokio::time::timeout(Duration::from_millis(30), engine.subscriber()).await;
    assert!(connected.is_err(), "the reply is unfinished");
    tokio::time::sleep(Duration::from_millis(300)).await;
    let other = tokio::time::timeout(Duration::from_secs(60), engine.subscriber()).await;
    let received = other.expect("the publisher lives").receive().await;
    assert!(matches!(received.expect("the socket works"), Received::Payload(_)));
}
