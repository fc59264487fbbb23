//! Simulates a fleet of engines that serves a trace behind a router, and measures each routing policy. The engines
//! store no K and V.
//!
//! Each engine computes its requests in order of arrival, at a fixed number of tokens a second. A request waits for the
//! earlier requests of its engine. The router receives only the events that the engines publish.

use std::convert::Infallible;
use std::time::Instant;

use kvarena::hash::NamespaceNames;
use kvarena::{EngineError, Namespace, TokenId};
use kvarena_events::clock::resident_bytes;

use crate::host::{Host, HostConfig};
use crate::request::Request;
use crate::router::Router;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Policy {
    RoundRobin,
    /// The engine with the longest cached prefix; round robin among equals.
    Prefix,
    /// The engine that would finish the prompt first: the one with the fewest tokens in its queue plus uncached tokens
    /// of the prompt.
    PrefixAndLoad,
}

impl Policy {
    pub const ALL: [(Policy, &str); 3] =
        [(Self::RoundRobin, "round robin"), (Self::Prefix, "prefix"), (Self::PrefixAndLoad, "prefix and load")];
}

/// Size and speed of a fleet.
#[derive(Clone, Copy, Debug)]
pub struct FleetConfig {
    pub engines: usize,
    pub host: HostConfig,
    /// Number of tokens that an engine computes in a second.
    pub rate: f64,
}

/// Results of a trace under one policy.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// Requests that were too long for an engine.
    pub skipped: usize,
    /// Prompt tokens of the served requests.
    pub prompt_tokens: u64,
    /// Prompt tokens that the chosen engines had cached.
    pub hit_tokens: u64,
    /// Prompt tokens that each engine computed.
    pub computed: Vec<u64>,
    /// Seconds that each served request waited in its engine's queue.
    pub waits: Vec<f64>,
    /// Events that all engines published.
    pub events: u64,
    /// Bytes of all payloads.
    pub event_bytes: u64,
    /// Arrival of the last request, in seconds since the start of the trace.
    pub seconds: f64,
    /// A request's number, and `hit_rate`, `skew` and the mean wait up to that request, at about 200 requests.
    pub curves: Vec<(f64, [f64; 3])>,
    /// Seconds that `dynamo-kv-router` needed to apply all events.
    pub apply_seconds: f64,
}

impl Outcome {
    /// Returns the share of prompt tokens that were cached.
    pub fn hit_rate(&self) -> f64 {
        self.hit_tokens as f64 / (self.prompt_tokens as f64).max(1.0)
    }

    /// Returns the busiest engine's computed tokens divided by the mean.
    pub fn skew(&self) -> f64 {
        let most = self.computed.iter().max().copied().unwrap_or(0) as f64;
        let mean = self.computed.iter().sum::<u64>() as f64 / self.computed.len() as f64;
        most / mean.max(1.0)
    }

    pub fn mean_wait(&self) -> f64 {
        self.waits.iter().sum::<f64>() / (self.waits.len() as f64).max(1.0)
    }

    /// Returns the 99th percentile of the waits.
    pub fn late_wait(&self) -> f64 {
        let mut waits = self.waits.clone();
        waits.sort_by(f64::total_cmp);
        waits.get(waits.len() * 99 / 100).copied().unwrap_or(0.0)
    }
}

/// Serves a trace with a fleet under one policy.
///
/// # Panics
/// If the fleet has no engines, or the router rejects a payload.
pub fn run(config: &FleetConfig, policy: Policy, requests: &[Request]) -> Result<Outcome, EngineError<Infallible>> {
    let hosts = (0..config.engines).map(|_| Host::new(config.host));
    let mut hosts: Vec<Host> = hosts.collect::<Result<_, _>>()?;
    let mut router = Router::new(config.host.page_size);
    let mut free_at = vec![0.0_f64; config.engines];
    let mut outcome = Outcome {
        computed: vec![0; config.engines],
        seconds: requests.last().map_or(0.0, |last| last.arrival_ms as f64 / 1e3),
        ..Outcome::default()
    };
    let (mut prompt, mut answer) = (Vec::new(), Vec::new());
    for (number, request) in requests.iter().enumerate() {
        write_texts(request, &mut prompt, &mut answer);
        let now = request.arrival_ms as f64 / 1e3;
        let waiting = |engine: usize| (free_at[engine] - now).max(0.0) * config.rate;
        let engine = choose(config, policy, &router, &prompt, number, waiting);
        let Some(hit) = hosts[engine].serve(Namespace::default(), &prompt, &answer) else {
            outcome.skipped += 1;
            continue;
        };
        let computed = prompt.len() as u64 - u64::from(hit);
        outcome.waits.push((free_at[engine] - now).max(0.0));
        free_at[engine] = free_at[engine].max(now) + computed as f64 / config.rate;
        outcome.prompt_tokens += prompt.len() as u64;
        outcome.hit_tokens += u64::from(hit);
        outcome.computed[engine] += computed;
        if let Some((payload, events)) = hosts[engine].take_payload(now) {
            outcome.events += u64::from(events);
            outcome.event_bytes += payload.len() as u64;
            let start = Instant::now();
            router.apply(engine as u64, &payload).expect("the engine's payload is valid");
            outcome.apply_seconds += start.elapsed().as_secs_f64();
        }
        if number.is_multiple_of((requests.len() / 200).max(1)) {
            outcome.curves.push((number as f64, [outcome.hit_rate(), outcome.skew(), outcome.mean_wait()]));
        }
    }
    Ok(outcome)
}

/// Writes a request's prompt and answer. The tokens are those of a vocabulary of 100,000, so that payloads have the
/// usual size.
fn write_texts(request: &Request, prompt: &mut Vec<TokenId>, answer: &mut Vec<TokenId>) {
    request.write_prompt(prompt);
    answer.clear();
    answer.extend((0..request.output.len).map(|i| request.output_token(i)));
    prompt.iter_mut().chain(answer).for_each(|token| *token = TokenId::new(token.raw() % 100_000));
}

fn choose(
    config: &FleetConfig,
    policy: Policy,
    router: &Router,
    prompt: &[TokenId],
    number: usize,
    waiting: impl Fn(usize) -> f64,
) -> usize {
    if policy == Policy::RoundRobin {
        return number % config.engines;
    }
    // Equal costs fall back to round robin.
    let turn = |engine: usize| (engine + config.engines - number % config.engines) % config.engines;
    let mut cached = vec![0; config.engines];
    for (engine, pages) in router.overlap(&NamespaceNames::default(), prompt) {
        cached[engine as usize] = pages * config.host.page_size;
    }
    let cost = |engine: usize| {
        let uncached = (prompt.len() as f64) - f64::from(cached[engine]);
        if policy == Policy::Prefix { uncached } else { uncached + waiting(engine) }
    };
    let better = |a: &usize, b: &usize| cost(*a).total_cmp(&cost(*b)).then(turn(*a).cmp(&turn(*b)));
    (0..config.engines).min_by(better).expect("a fleet has engines")
}

/// Publishes the events of a request, or drops them.
type Publish = dyn Fn(&mut Host);

/// Cost of serving requests on one engine, with some stages of publishing events enabled.
#[derive(Clone, Copy, Debug)]
pub struct Cost {
    /// The enabled stages.
    pub stages: &'static str,
    /// Seconds for all requests, including the engine's own work.
    pub seconds: f64,
    /// Number of served requests.
    pub requests: usize,
    /// Number of pages that the engine published in its tree.
    pub pages: u64,
}

/// Measures the cost of publishing events: with no stage, with hashes, with events as well, and with payloads as well.
/// Each is the fastest of three runs that serve all requests.
pub fn costs(host: HostConfig, requests: &[Request]) -> Result<Vec<Cost>, EngineError<Infallible>> {
    let with_hashes = HostConfig { event_pages: 0, ..host };
    let ignore = |host: &mut Host| host.engine.drain_events(|event| _ = std::hint::black_box(event));
    let encode = |host: &mut Host| _ = std::hint::black_box(host.take_payload(0.0));
    let ways: [(&str, HostConfig, &Publish); 4] = [
        ("nothing", HostConfig { hashing: None, ..host }, &|_| ()),
        ("hashes", with_hashes, &|_| ()),
        ("hashes, events", host, &ignore),
        ("hashes, events, payloads", host, &encode),
    ];
    let text = |request: &Request| {
        let (mut prompt, mut answer) = (Vec::new(), Vec::new());
        write_texts(request, &mut prompt, &mut answer);
        (prompt, answer)
    };
    let texts: Vec<_> = requests.iter().map(text).collect();
    let mut costs = Vec::new();
    for (stages, config, publish) in ways {
        let mut fastest = Cost { stages, seconds: f64::INFINITY, requests: 0, pages: 0 };
        for _ in 0..3 {
            let mut host = Host::new(config)?;
            let (start, mut requests) = (Instant::now(), 0);
            for (prompt, answer) in &texts {
                requests += usize::from(host.serve(Namespace::default(), prompt, answer).is_some());
                publish(&mut host);
            }
            let (seconds, pages) = (start.elapsed().as_secs_f64(), host.engine.stats().published_pages);
            if seconds < fastest.seconds {
                fastest = Cost { stages, seconds, requests, pages };
            }
        }
        costs.push(fastest);
    }
    Ok(costs)
}

/// Returns the bytes that a router's index takes for each page of an engine, measured by filling an index. Returns
/// `None` on systems that do not report the resident memory.
pub fn index_bytes_a_page(page_size: u32, engines: u64, pages: u32) -> Result<Option<f64>, EngineError<Infallible>> {
    // Each conversation has 100 pages and belongs to one engine.
    const CHAT: u32 = 100;
    let mut host = Host::new(HostConfig { page_size, pages: 2 * CHAT, ..HostConfig::default() })?;
    let mut router = Router::new(page_size);
    let Some(before) = resident_bytes() else { return Ok(None) };
    let chats = u64::from(pages / CHAT);
    for chat in 0..engines * chats {
        let first = chat as u32 * CHAT * page_size;
        let text: Vec<TokenId> = (first..first + CHAT * page_size).map(TokenId::new).collect();
        // One engine plays the part of all engines. The router does not receive the events of its resets, so the
        // index keeps all conversations.
        host.engine.reset();
        host.engine.drain_events(|_| ());
        host.serve(Namespace::default(), &text, &[]).expect("it fits");
        let (payload, _) = host.take_payload(0.0).expect("it has new pages");
        router.apply(chat / chats, &payload).expect("the engine's payload is valid");
    }
    let pages = router.pages().max(1) as f64;
    Ok(resident_bytes().map(|after| after.saturating_sub(before) as f64 / pages))
}
