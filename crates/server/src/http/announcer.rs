//! Publishes the engine's cached pages to routers in the wire format of `crates/events`.

use std::time::Duration;

use kvarena::hash::Hashing;
use kvarena::{Backend, Engine};
use kvarena_events::clock::seconds;
use kvarena_events::encode::Batch;
use kvarena_events::publisher::{Publisher, PublisherConfig};
use tokio::runtime::Runtime;

use super::options::HttpOptions;
use kvarena_host::error::{Error, Result};

/// Recipe of page hashes for routers.
pub const HASHING: Hashing = Hashing::Dynamo;
/// Maximum number of pages whose events may wait for the end of a step. If there are more, all cached pages are
/// published again.
pub const EVENT_PAGES_MAX: u32 = 1 << 16;
/// Interval at which an idle engine checks whether a router requests all pages.
pub const PAUSE: Duration = Duration::from_millis(50);

/// Publishes an engine's events.
pub struct Announcer {
    publisher: Publisher,
    /// The events of the next message; `None` before the first call of [`Announcer::publish`].
    batch: Option<Batch>,
}

impl Announcer {
    /// Binds the sockets of the command line, if any.
    ///
    /// # Errors
    /// An address is invalid or in use.
    pub fn bind(options: &HttpOptions, runtime: &Runtime) -> Result<Option<Self>> {
        let Some(endpoint) = &options.kv_events else { return Ok(None) };
        let mut config = PublisherConfig { endpoint: endpoint.clone(), ..PublisherConfig::default() };
        if let Some(replay) = &options.kv_events_replay {
            config.replay_endpoint.clone_from(replay);
        }
        let publisher = runtime
            .block_on(Publisher::bind(config))
            .map_err(|e| Error::request(format!("cannot publish events at {e}")))?;
        Ok(Some(Self { publisher, batch: None }))
    }

    /// Returns the addresses of the events and of the replay.
    pub fn endpoints(&self) -> (&str, &str) {
        (&self.publisher.endpoint, &self.publisher.replay_endpoint)
    }

    /// Publishes the events since the last call, or all pages if a router requested them. O(pages published).
    pub fn publish<B: Backend>(&mut self, engine: &mut Engine<B>) {
        if self.publisher.take_dump_request() {
            engine.restate_events();
        }
        let layout = engine.shape().layout;
        let new = || Batch::new(HASHING, layout.page_size()).with_groups(*layout.groups());
        let batch = self.batch.get_or_insert_with(new);
        engine.drain_events(|event| batch.push(event));
        if !batch.is_empty() {
            self.publisher.send(batch.take(seconds(), 0));
        }
    }
}
