//! Tests followers: streams that wait while a running stream, their leader, computes their prompt.

mod common;

use kvarena::{Capacity, CpuOptions, Engine, EngineConfig, PoolConfig};
use kvarena_host::cpu::CpuRunner;
use kvarena_host::request::{Defaults, Request};
use kvarena_host::sample::Sampling;
use kvarena_host::server::{Policy, Server, Sink};
use kvarena_host::stream::Stream;

/// Ended streams in the order of their ends: request, tokens, and number of cached prompt tokens.
#[derive(Default)]
struct Ended(Vec<(usize, Vec<u32>, u32)>);

impl Sink for Ended {
    fn done(&mut self, stream: &Stream, _: bool) {
        self.0.push((stream.request, stream.tokens.clone(), stream.cached_tokens));
    }
}

fn request(prompt: impl Iterator<Item = u32>, new_tokens: u32) -> Request {
    let defaults =
        Defaults { max_new_tokens: Some(new_tokens), samples: 1, sampling: Sampling::default(), stop: Vec::new() };
    defaults.request(prompt.collect())
}

/// Serves requests with an engine of `max_sequences` sequences. The policy allows more streams than that.
fn serve(requests: &[Request], max_sequences: u32) -> Vec<(usize, Vec<u32>, u32)> {
    let model = common::model("qwen3-tiny");
    let config = &model.config;
    let pool = PoolConfig {
        layers: config.layers as u32,
        shape: config.kv_shape(),
        page_size: 4,
        capacity: Capacity::Pages(200),
        ..PoolConfig::default()
    };
    let config = EngineConfig { max_sequences, max_sequence_len: 256, ..EngineConfig::from(pool) };
    let engine = Engine::new(config, CpuOptions::with_threads(1)).expect("the config is sound");
    let policy =
        Policy { chunk: 64, concurrency: 8, overlap: false, fail_every: None, wait_for_leaders: true, drafts: None };
    let mut server = Server::new(CpuRunner::new(&model), engine, policy);
    for request in requests {
        server.submit(request.clone()).expect("the request fits");
    }
    let mut ended = Ended::default();
    server.run(&mut ended).expect("serving succeeds");
    server.engine().verify().expect("the state is sound");
    ended.0
}

/// The second request waits for the first one, which computes the same prompt. Meanwhile the third request takes the
/// last row, so the engine rejects the second request until a row is free. The loop must then forget the leader of the
/// second request. Otherwise the step would try to admit that request forever.
#[test]
fn a_refused_follower_forgets_its_leader() {
    let prompt = || (0..40).map(|i| 7 * i % 500);
    let other = (0..12).map(|i| 3 * i + 1);
    let requests = [request(prompt(), 4), request(prompt(), 4), request(other, 9)];
    let ended = serve(&requests, 2);
    let order: Vec<usize> = ended.iter().map(|(number, ..)| *number).collect();
    assert_eq!(order, [0, 1, 2], "the second runs as soon as the first has ended");
    let [(_, first, _), (_, second, cached), _] = &ended[..] else { panic!("{ended:?}") };
    assert_eq!(first, second, "equal prompts have equal tokens");
    assert_eq!(*cached, 36, "whole pages of all but the last token");
}
