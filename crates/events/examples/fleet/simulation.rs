//! Simulates a fleet of engines that serves a trace behind a router, and measures each routing policy. The engines
//! store no K and V.
//!
//! Each engine computes its requests in order of arrival, at a fixed number of tokens a second. A request waits for the
//! earlier requests of its engine. The router receives only the events that the engines publish.

use std::convert::Infallible;
use std::fmt;

use kvarena::{EngineError, Namespace, NamespaceNames, TokenId};

use crate::clock::{resident_bytes, timed};
use crate::host::{Host, HostConfig};
use crate::router::Router;
use crate::trace::Request;

/// Routing policy.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Policy {
    /// Round robin.
    RoundRobin,
    /// The engine with the longest cached prefix; round robin among equals.
    Prefix,
    /// The engine that would finish the prompt first: the one with the fewest tokens in its queue plus uncached tokens
    /// of the prompt.
    PrefixAndLoad,
}

impl Policy {
    /// All policies.
    pub const ALL: [Policy; 3] = [Policy::RoundRobin, Policy::Prefix, Policy::PrefixAndLoad];
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::RoundRobin => "round robin",
            Self::Prefix => "prefix",
            Self::PrefixAndLoad => "prefix and load",
        })
    }
}

/// Size and speed of a fleet.
#[derive(Clone, Copy, Debug)]
pub struct FleetConfig {
    /// Number of engines.
    pub engines: usize,
    /// Config of each engine.
    pub host: HostConfig,
    /// Number of tokens that an engine computes in a second.
    pub rate: f64,
}

/// Results of a trace under one policy.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// Routing policy.
    pub policy: Policy,
    /// Number of served requests.
    pub requests: usize,
    /// Number of requests that were too long for an engine.
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
    /// Points of a curve: a request's number, and the cached share of the prompt tokens up to that request.
    pub rates: Vec<(usize, f64)>,
    /// Pages in the router's index at the end.
    pub index_pages: usize,
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

    /// Returns the mean and the 99th percentile of the requests' wait, in seconds.
    pub fn wait(&self) -> (f64, f64) {
        let mut waits = self.waits.clone();
        waits.sort_by(f64::total_cmp);
        let mean = waits.iter().sum::<f64>() / (waits.len() as f64).max(1.0);
        (mean, waits.get(waits.len() * 99 / 100).copied().unwrap_or(0.0))
    }
}

/// Approximate number of points in [`Outcome::rates`].
const POINTS: usize = 200;

/// Serves a trace with a fleet under one policy.
///
/// # Errors
/// As [`Host::new`].
///
/// # Panics
/// If the fleet has no engines, a prompt is empty, or the router rejects a payload.
pub fn run(config: &FleetConfig, policy: Policy, requests: &[Request]) -> Result<Outcome, EngineError<Infallible>> {
    let hosts = (0..config.engines).map(|_| Host::new(config.host));
    let mut hosts: Vec<Host> = hosts.collect::<Result<_, _>>()?;
    let mut router = Router::new(config.host.page_size);
    let mut free_at = vec![0.0_f64; config.engines];
    let mut outcome = Outcome {
        policy,
        requests: 0,
        skipped: 0,
        prompt_tokens: 0,
        hit_tokens: 0,
        computed: vec![0; config.engines],
        waits: Vec::with_capacity(requests.len()),
        events: 0,
        event_bytes: 0,
        seconds: requests.last().map_or(0.0, |last| last.timestamp as f64 / 1e3),
        rates: Vec::new(),
        index_pages: 0,
        apply_seconds: 0.0,
    };
    let (mut prompt, mut answer) = (Vec::new(), Vec::new());
    for (number, request) in requests.iter().enumerate() {
        request.prompt(&mut prompt);
        request.answer(number, &mut answer);
        let now = request.timestamp as f64 / 1e3;
        let waiting = |engine: usize| (free_at[engine] - now).max(0.0) * config.rate;
        let engine = choose(config, policy, &router, &prompt, number, waiting);
        let Some(hit) = hosts[engine].serve(Namespace::default(), &prompt, &answer) else {
            outcome.skipped += 1;
            continue;
        };
        let computed = prompt.len() as u64 - u64::from(hit);
        outcome.waits.push((free_at[engine] - now).max(0.0));
        free_at[engine] = free_at[engine].max(now) + computed as f64 / config.rate;
        outcome.requests += 1;
        outcome.prompt_tokens += prompt.len() as u64;
        outcome.hit_tokens += u64::from(hit);
        outcome.computed[engine] += computed;
        if let Some((payload, events)) = hosts[engine].take_payload(now) {
            outcome.events += u64::from(events);
            outcome.event_bytes += payload.len() as u64;
            let applied = timed(&mut outcome.apply_seconds, || router.apply(engine as u64, &payload));
            applied.expect("the engine's payload is valid");
        }
        if number.is_multiple_of((requests.len() / POINTS).max(1)) {
            outcome.rates.push((number, outcome.hit_rate()));
        }
    }
    outcome.index_pages = router.pages();
    Ok(outcome)
}

fn choose(
    config: &FleetConfig,
    policy: Policy,
    router: &Router,
    prompt: &[TokenId],
    number: usize,
    waiting: impl Fn(usize) -> f64,
) -> usize {
    // Equal costs fall back to round robin.
    let turn = |engine: usize| (engine + config.engines - number % config.engines) % config.engines;
    if policy == Policy::RoundRobin {
        return number % config.engines;
    }
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
///
/// # Errors
/// As [`Host::new`].
///
/// # Panics
/// If a prompt is empty.
pub fn costs(host: HostConfig, requests: &[Request]) -> Result<Vec<Cost>, EngineError<Infallible>> {
    const RUNS: usize = 3;
    let silent = HostConfig { hashing: None, ..host };
    let ways: [(&'static str, HostConfig, bool, bool); 4] = [
        ("nothing", silent, false, false),
        ("hashes", HostConfig { event_pages: 0, ..host }, false, false),
        ("hashes, events", host, true, false),
        ("hashes, events, payloads", host, true, true),
    ];
    let texts: Vec<(Vec<TokenId>, Vec<TokenId>)> = requests
        .iter()
        .enumerate()
        .map(|(number, request)| {
            let (mut prompt, mut answer) = (Vec::new(), Vec::new());
            request.prompt(&mut prompt);
            request.answer(number, &mut answer);
            (prompt, answer)
        })
        .collect();
    let cost = |(stages, config, drains, encodes): (&'static str, HostConfig, bool, bool)| {
        let run = || -> Result<_, EngineError<Infallible>> {
            let mut host = Host::new(config)?;
            let (mut seconds, mut served) = (0.0, 0);
            timed(&mut seconds, || {
                for (prompt, answer) in &texts {
                    served += usize::from(host.serve(Namespace::default(), prompt, answer).is_some());
                    if encodes {
                        std::hint::black_box(host.take_payload(0.0));
                    } else if drains {
                        host.engine.drain_events(|event| _ = std::hint::black_box(event));
                    }
                }
            });
            let pages = host.engine.stats().published_pages;
            Ok(Cost { stages, seconds, requests: served, pages })
        };
        let runs = (0..RUNS).map(|_| run()).collect::<Result<Vec<_>, _>>()?;
        let fastest = runs.into_iter().min_by(|a, b| a.seconds.total_cmp(&b.seconds));
        Ok(fastest.expect("some runs"))
    };
    ways.into_iter().map(cost).collect()
}

/// Returns the bytes that a router's index takes for each page of an engine, measured by filling an index. Returns
/// `None` on systems that do not report the resident memory.
///
/// # Errors
/// As [`Host::new`].
pub fn index_bytes_a_page(page_size: u32, engines: u64, pages: u32) -> Result<Option<f64>, EngineError<Infallible>> {
    const CHAT: u32 = 100;
    let host = HostConfig { page_size, pages: 2 * CHAT, ..HostConfig::default() };
    let mut host = Host::new(host)?;
    let mut router = Router::new(page_size);
    let Some(before) = resident_bytes() else { return Ok(None) };
    for engine in 0..engines {
        // Each conversation has 100 pages and belongs to one engine.
        for chat in 0..u64::from(pages / CHAT) {
            let first = (engine * u64::from(pages / CHAT) + chat) * u64::from(CHAT * page_size);
            let text: Vec<TokenId> = (0..CHAT * page_size).map(|at| TokenId::new(first as u32 + at)).collect();
            // One engine plays the part of all engines. The router does not receive the events of its resets, so the
            // index keeps all conversations.
            host.engine.reset();
            host.engine.drain_events(|_| ());
            host.serve(Namespace::default(), &text, &[]).expect("it fits");
            let (payload, _) = host.take_payload(0.0).expect("it has new pages");
            router.apply(engine, &payload).expect("the engine's payload is valid");
        }
    }
    let pages = router.pages().max(1) as f64;
    Ok(resident_bytes().map(|after| after.saturating_sub(before) as f64 / pages))
}
