//! Two engines publish their cache contents over real sockets, and a router finds the engine that caches a prompt.

use std::error::Error;

use kvarena::{Namespace, NamespaceNames, TokenId};
use kvarena_events::clock::seconds;
use kvarena_events::host::{Host, HostConfig};
use kvarena_events::publisher::{Publisher, PublisherConfig};
use kvarena_events::router::Router;
use kvarena_events::subscriber::{Received, Subscriber};

/// Runs the demonstration.
pub fn run() -> Result<(), Box<dyn Error>> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(two_engines())
}

fn text(from: u32) -> Vec<TokenId> {
    (from..from + 100).map(TokenId::new).collect()
}

async fn two_engines() -> Result<(), Box<dyn Error>> {
    let mut router = Router::new(HostConfig::default().page_size);
    let mut engines = Vec::new();
    for engine in 0..2 {
        let publisher = Publisher::bind(PublisherConfig::default()).await?;
        println!("engine {engine} publishes its events at {}", publisher.endpoint);
        let mut host = Host::new(HostConfig::default())?;
        host.serve(Namespace::default(), &text(1000 * engine), &[]);
        if let Some((payload, events)) = host.take_payload(seconds()) {
            println!("engine {engine}: {events} events in {} bytes", payload.len());
            publisher.send(payload);
        }
        let mut subscriber = Subscriber::connect(&publisher.endpoint, &publisher.replay_endpoint).await?;
        if let Received::Payload(payload) = subscriber.receive().await? {
            router.check_and_apply(engine.into(), &payload)?;
        }
        engines.push((host, publisher, subscriber));
    }
    for engine in 0..2 {
        let found = router.overlap(&NamespaceNames::default(), &text(1000 * engine));
        println!("prompt {engine}: the router finds (engine, pages) {found:?}");
    }
    Ok(())
}
