//! `--kv-events`: a router that connects late receives the server's cached pages, and tenants share neither pages nor
//! hashes.

mod common;

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::net::TcpStream;

use common::listening::Listening;
use kvarena::{Capacity, CpuOptions, Engine, EngineConfig, Namespace, NamespaceNames, PoolConfig, TokenId};
use kvarena_events::decode::{StoredPages, WireEvent, decode};
use kvarena_events::subscriber::{Received, Subscriber};
use kvarena_host::cpu::CpuRunner;
use kvarena_host::model::Model;
use kvarena_host::request::Defaults;
use kvarena_host::sample::Sampling;
use kvarena_host::server::{Policy, Server};
use kvarena_server::http::announcer::HASHING;
use serde_json::{Value, json};

/// Completes a prompt. Returns the number of its cached tokens.
fn complete(address: &str, prompt: &[u32], salt: Option<&str>) -> u64 {
    let body = json!({ "model": "glossary", "max_tokens": 1, "prompt": prompt, "cache_salt": salt });
    post(address, &body)
}

/// Posts a request. Returns the number of cached prompt tokens.
fn post(address: &str, body: &Value) -> u64 {
    let body = body.to_string();
    let mut stream = TcpStream::connect(address).expect("it listens");
    let length = body.len();
    let head =
        format!("POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n");
    stream.write_all((head + &body).as_bytes()).expect("it reads");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("it answers");
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    let (_, body) = answer.split_once("\r\n\r\n").expect("a body");
    let body: Value = serde_json::from_str(body).expect("JSON");
    body["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().expect("a count")
}

/// A server, its address, and the addresses for routers.
struct Serving {
    _server: Listening,
    address: String,
    endpoint: String,
    replay: String,
}

impl Serving {
    fn start() -> Self {
        let mut server = Listening::start(&["--kv-events", "tcp://127.0.0.1:0"]);
        let (address, events) = (server.address.clone(), server.line());
        let (endpoint, replay) = events
            .strip_prefix("events at ")
            .and_then(|rest| rest.split_once(", missed ones at "))
            .expect("two addresses");
        Self { _server: server, address, endpoint: endpoint.to_owned(), replay: replay.to_owned() }
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
    complete(&server.address, &first, None);
    block_on(async {
        let (mut router, mut pages) = (server.router().await, Vec::new());
        receive(&mut router, &mut pages, 32).await;
        assert_eq!(tokens(&pages), first);
        let second: Vec<u32> = (0..16).map(|i| 90 + i).collect();
        complete(&server.address, &second, None);
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
        let found = salts.map(|salt| complete(&server.address, &prompt, salt));
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
    complete(&server.address, &prompt, None);
    let body = json!({
        "model": "glossary", "max_tokens": 1, "prompt": prompt, "echo": true, "logprobs": 0, "cache_salt": "red",
    });
    assert_eq!([post(&server.address, &body), post(&server.address, &body)], [0, 0]);
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
