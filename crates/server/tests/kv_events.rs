//! `--kv-events`: a router that connects late receives the server's cached pages, and tenants share neither pages nor
//! hashes.

mod common;

use std::collections::BTreeSet;

use common::listening::Listening;
use kvarena::hash::NamespaceNames;
use kvarena::{Capacity, CpuOptions, Engine, EngineConfig, Namespace, PoolConfig, TokenId};
use kvarena_events::decode::{StoredPages, WireEvent, decode};
use kvarena_events::subscriber::{Received, Subscriber};
use kvarena_host::cpu::CpuRunner;
use kvarena_host::model::Model;
use kvarena_host::request::Defaults;
use kvarena_host::sample::Sampling;
use kvarena_host::server::{Policy, Server};
use kvarena_server::http::announcer::HASHING;
use serde_json::{Value, json};

/// A server, and its addresses for routers.
struct Serving {
    server: Listening,
    endpoint: String,
    replay: String,
}

impl Serving {
    fn start() -> Self {
        let mut server = Listening::start(&["--kv-events", "tcp://127.0.0.1:0"]);
        let events = server.line();
        let addresses = events.strip_prefix("events at ").and_then(|rest| rest.split_once(", missed ones at "));
        let (endpoint, replay) = addresses.expect("two addresses");
        Self { server, endpoint: endpoint.to_owned(), replay: replay.to_owned() }
    }

    /// Completes a prompt. Returns the number of its cached tokens.
    fn complete(&self, prompt: &[u32], salt: Option<&str>) -> u64 {
        self.post(&json!({ "model": "glossary", "max_tokens": 1, "prompt": prompt, "cache_salt": salt }))
    }

    /// Posts a completion. Returns the number of cached prompt tokens.
    fn post(&self, body: &Value) -> u64 {
        let (status, answer) = self.server.post("/v1/completions", body);
        assert_eq!(status, 200, "{answer}");
        answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().expect("a count")
    }

    /// Connects a new router and requests all pages.
    async fn router(&self) -> Subscriber {
        let subscriber = Subscriber::connect(&self.endpoint, &self.replay).await;
        let mut subscriber = subscriber.expect("it connects");
        // No stream runs, so the request reaches an idle engine thread.
        subscriber.request_dump().await.expect("it is answered");
        subscriber
    }
}

fn block_on(test: impl Future<Output = ()>) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.expect("a runtime").block_on(test);
}

/// Collects the stored pages since the last clear, until they contain `count` tokens.
async fn receive(subscriber: &mut Subscriber, pages: &mut Vec<StoredPages>, count: usize) {
    while tokens(pages).len() < count {
        let Received::Payload(payload) = subscriber.receive().await.expect("a message arrives") else {
            continue;
        };
        for event in decode(&payload).expect("the wire's form").events {
            match event {
                WireEvent::Stored(stored) => pages.push(stored),
                WireEvent::Cleared => pages.clear(),
                other => panic!("{other:?}"),
            }
        }
    }
}

fn tokens(pages: &[StoredPages]) -> Vec<u32> {
    pages.iter().flat_map(|stored| stored.tokens.iter().copied()).collect()
}

#[test]
fn a_late_router_receives_the_whole_cache() {
    let server = Serving::start();
    let first: Vec<u32> = (0..32).map(|i| 5 + i).collect();
    server.complete(&first, None);
    block_on(async {
        let (mut router, mut pages) = (server.router().await, Vec::new());
        receive(&mut router, &mut pages, 32).await;
        assert_eq!(tokens(&pages), first);
        let second: Vec<u32> = (0..16).map(|i| 90 + i).collect();
        server.complete(&second, None);
        receive(&mut router, &mut pages, 48).await;
        assert_eq!(tokens(&pages), [first, second].concat());
    });
}

fn salted(salt: Option<&str>) -> NamespaceNames {
    NamespaceNames { salt: salt.map(str::to_owned), ..Default::default() }
}

#[test]
fn tenants_share_no_page_and_no_hash() {
    let server = Serving::start();
    let prompt: Vec<u32> = (0..33).map(|i| 5 + i).collect();
    let salts = [None, Some("red"), Some("blue")];
    for cached in [0, 32] {
        let found = salts.map(|salt| server.complete(&prompt, salt));
        assert_eq!(found, [cached; 3]);
    }
    block_on(async {
        let (mut router, mut pages) = (server.router().await, Vec::new());
        receive(&mut router, &mut pages, 3 * 32).await;
        let mut all = BTreeSet::new();
        for salt in salts {
            let own = pages.iter().filter(|stored| stored.salt.as_deref() == salt);
            let own: Vec<u64> = own.flat_map(|stored| stored.hashes.iter().copied()).collect();
            let chain = HASHING.chain(&salted(salt), TokenId::from_raw(&prompt[..32]), 16);
            let expected: Vec<u64> = chain.into_iter().map(|hash| HASHING.event_id(hash)).collect();
            assert_eq!(own, expected, "{salt:?}");
            all.extend(own);
        }
        assert_eq!(all.len(), 6, "two pages of each tenant");
    });
}

/// Scored prompts are computed without the cache. Routers receive these pages under hashes that no other request has.
#[test]
fn scored_prompts_have_hashes_of_their_own() {
    let server = Serving::start();
    let prompt: Vec<u32> = (0..33).map(|i| 5 + i).collect();
    server.complete(&prompt, None);
    let body = json!({
        "model": "glossary", "max_tokens": 1, "prompt": prompt, "echo": true, "logprobs": 0, "cache_salt": "red",
    });
    assert_eq!([server.post(&body), server.post(&body)], [0, 0]);
    block_on(async {
        let (mut router, mut pages) = (server.router().await, Vec::new());
        receive(&mut router, &mut pages, 3 * 32).await;
        let scored = pages.iter().filter(|stored| stored.lora.is_some());
        assert_eq!(scored.flat_map(|stored| &stored.hashes).count(), 4);
        let all: BTreeSet<u64> = pages.iter().flat_map(|stored| stored.hashes.clone()).collect();
        assert_eq!(all.len(), 6, "two pages of each request");
    });
}

/// Each salt has two requests, and the pool has few pages.
#[test]
fn salts_are_forgotten_with_their_last_page() {
    const PAGES: u32 = 12;
    const SALTS: u64 = 50;
    let model = Model::read(&common::dir("qwen3-tiny")).expect("the golden model loads");
    let pool = PoolConfig {
        layers: model.config.layers as u32,
        shape: model.config.kv_shape(),
        page_size: 4,
        capacity: Capacity::Pages(PAGES),
        ..PoolConfig::default()
    };
    let config =
        EngineConfig { hashing: Some(HASHING), max_sequences: 3, max_sequence_len: 16, ..EngineConfig::from(pool) };
    let engine = Engine::new(config, CpuOptions::with_threads(1)).expect("the config is sound");
    let policy =
        Policy { chunk: 64, concurrency: 3, overlap: false, fail_every: None, wait_for_leaders: true, drafts: None };
    let mut server = Server::new(CpuRunner::new(&model), engine, policy);
    let defaults = Defaults { max_new_tokens: Some(2), samples: 1, sampling: Sampling::default(), stop: Vec::new() };
    let salt = |i: u64| format!("salt {i}");
    for i in (0..SALTS).flat_map(|i| [i, i]) {
        let mut request = defaults.request((0..9).collect());
        request.namespace = Namespace::new(1 + i);
        request.salt = Some(salt(i).into());
        server.submit(request).expect("it fits");
    }
    server.run(&mut common::serving::CollectedStreams::default()).expect("it serves");
    let engine = server.engine_mut();
    engine.verify().expect("the state is sound");
    let mut kept = || -> usize {
        let is_kept = |i: &u64| {
            let namespace = Namespace::new(1000 + i);
            match engine.name_namespace(namespace, salted(Some(&salt(*i)))) {
                Ok(()) => engine.forget_namespace(namespace).map(|()| false).expect("it has names"),
                Err(error) => matches!(error, kvarena::Error::NamesTaken { .. }),
            }
        };
        (0..SALTS).filter(is_kept).count()
    };
    let kept = kept();
    assert!((1..=PAGES as usize).contains(&kept), "{kept} of {SALTS} salts are kept");
}
