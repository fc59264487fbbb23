//! What changes logits, and whose turn it is: the same words with and without overlap, drafts and failed steps.

mod common;

use std::sync::Arc;

use common::serving::{Heard, Setting, Way, requests, serve};
use kvarena::{Capacity, CpuOptions, Engine, EngineConfig, PoolConfig};
use kvarena_host::cpu::CpuRunner;
use kvarena_host::draft::Drafting;
use kvarena_host::model::Model;
use kvarena_host::request::{Defaults, Request};
use kvarena_host::sample::Sampling;
use kvarena_host::server::{Policy, Server, Sink};
use kvarena_host::shaping::Shaping;
use kvarena_host::stream::Stream;

fn model() -> Model {
    Model::read(&common::dir("qwen3-tiny")).expect("the golden model loads")
}

/// A request of each kind beside plain ones.
fn shaped() -> Vec<Request> {
    let mut requests = requests(&common::cases("qwen3-tiny"));
    let repeating =
        Shaping { repetition: 1.7, frequency: 0.8, presence: 0.5, ..Shaping::default() };
    let bounded = Shaping {
        allowed: Some((0..60).map(|i| 7 * i).collect()),
        bias: vec![(7, 3.0), (14, -2.0)],
        min_tokens: 15,
        ..Shaping::default()
    };
    let worded = Shaping { bad_words: vec![vec![228, 431], vec![9]], ..Shaping::default() };
    for (i, request) in requests.iter_mut().enumerate() {
        request.stop = vec![7, 14, 228];
        request.shaping = match i % 4 {
            0 => Some(Arc::new(repeating.clone())),
            1 => Some(Arc::new(bounded.clone())),
            2 => Some(Arc::new(worded.clone())),
            _ => None,
        };
        if i % 3 == 0 {
            request.sampling =
                Sampling { temperature: 0.9, min_p: 0.05, seed: i as u64, ..Sampling::default() };
            request.samples = 3;
        }
    }
    requests
}

#[test]
fn settings_change_no_shaped_word() {
    let (model, requests) = (model(), shaped());
    let plain = serve(&model, &requests, Setting::default()).heard.tokens;
    let stopped = |tokens: &[u32]| tokens.iter().position(|token| [7, 14, 228].contains(token));
    for ((request, _), tokens) in &plain {
        if request % 4 == 1 {
            assert!(stopped(tokens).is_none_or(|at| at >= 15), "request {request}: {tokens:?}");
            assert!(tokens.iter().all(|token| token % 7 == 0 && *token < 420), "{tokens:?}");
        }
        if request % 4 == 2 {
            assert!(!tokens.contains(&9) && !tokens.windows(2).any(|two| two == [228, 431]));
        }
    }
    let drafts = |tokens, tree| Some(Drafting { tokens, tree });
    for setting in [
        Setting { overlap: true, ..Setting::default() },
        Setting { overlap: true, fail_every: Some(3), ..Setting::default() },
        Setting { overlap: true, way: Way::ChunksOf7, ..Setting::default() },
        Setting { way: Way::SmallPool, ..Setting::default() },
        Setting { drafts: drafts(4, false), ..Setting::default() },
        Setting { drafts: drafts(5, true), fail_every: Some(5), ..Setting::default() },
    ] {
        let other = serve(&model, &requests, setting).heard.tokens;
        assert_eq!(other, plain, "{setting:?}");
    }
}

/// Keeps logits of prompts and of what is said.
#[derive(Default)]
struct Scores {
    prompt: Vec<(usize, u32, Vec<f32>)>,
    heard: Heard,
}

impl Sink for Scores {
    fn prompt(&mut self, stream: &Stream, position: u32, logits: &[f32]) {
        self.prompt.push((stream.request, position, logits.to_vec()));
    }

    fn token(&mut self, stream: &Stream, logits: &[f32]) {
        self.heard.token(stream, logits);
    }

    fn done(&mut self, stream: &Stream, last: bool) {
        self.heard.done(stream, last);
    }
}

fn server(model: &Model, chunk: u32, concurrency: u32, overlap: bool) -> Server<CpuRunner<'_>> {
    let config = &model.config;
    let pool = PoolConfig {
        layers: config.layers as u32,
        shape: config.kv_shape(),
        page_size: 4,
        capacity: Capacity::Pages(2000),
        ..PoolConfig::default()
    };
    let config = EngineConfig {
        max_sequences: concurrency,
        max_sequence_len: 512,
        max_tokens: 512 * u64::from(concurrency),
        max_steps: 40,
        ..EngineConfig::from(pool)
    };
    let engine = Engine::new(config, CpuOptions::with_threads(1)).expect("the config is sound");
    let policy = Policy {
        chunk,
        concurrency,
        overlap,
        fail_every: None,
        wait_for_leaders: true,
        drafts: None,
    };
    Server::new(CpuRunner::new(model), engine, policy)
}

fn request(prompt: Vec<u32>, new_tokens: u32) -> Request {
    let sampling = Sampling::default();
    Defaults { max_new_tokens: Some(new_tokens), samples: 1, sampling, stop: Vec::new() }
        .request(prompt)
}

/// Each token of a prompt has the logits that follow the prompt up to it, in chunks, and though all of it is cached.
#[test]
fn prompts_are_scored_whole() {
    let model = model();
    let prompt: Vec<u32> = (0..40).map(|i| 7 * i % 500).collect();
    let alone = |len: usize| {
        let mut server = server(&model, 512, 4, false);
        server.submit(request(prompt[..len].to_vec(), 1)).expect("it fits");
        let mut heard = Heard::default();
        server.run(&mut heard).expect("it serves");
        heard.first_logits.remove(&0).expect("a token was said")
    };
    for (chunk, overlap) in [(512, false), (7, false), (7, true)] {
        let mut server = server(&model, chunk, 4, overlap);
        let mut scores = Scores::default();
        for scores_prompt in [false, true] {
            server
                .submit(Request { scores_prompt, ..request(prompt.clone(), 3) })
                .expect("it fits");
            server.run(&mut scores).expect("it serves");
        }
        let places: Vec<u32> = scores.prompt.iter().map(|(_, position, _)| *position).collect();
        assert_eq!(places, (1..40).collect::<Vec<_>>(), "each once, in order");
        assert!(scores.prompt.iter().all(|(request, ..)| *request == 1));
        for (_, position, logits) in
            scores.prompt.iter().filter(|(_, position, _)| position % 6 == 1)
        {
            let expected = alone(*position as usize);
            let far = logits.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(far < 1e-3, "chunk {chunk}, place {position}: {far}");
        }
        assert_eq!(scores.heard.tokens[&(0, 0)], scores.heard.tokens[&(1, 0)]);
    }
}

/// Which request each token is of, in order.
#[derive(Default)]
struct Order(Vec<usize>, std::collections::BTreeMap<(usize, u32), Vec<u32>>);

impl Sink for Order {
    fn token(&mut self, stream: &Stream, _: &[f32]) {
        self.0.push(stream.request);
    }

    fn done(&mut self, stream: &Stream, _: bool) {
        self.1.insert((stream.request, stream.sample), stream.tokens.clone());
    }
}

/// A request with many samples fills all rows; another one is served beside it, not after it.
#[test]
fn groups_take_turns() {
    let model = model();
    for overlap in [false, true] {
        let mut server = server(&model, 64, 4, overlap);
        let warm = Sampling { temperature: 1.0, seed: 3, ..Sampling::default() };
        let many = Request { samples: 12, sampling: warm, ..request((1..20).collect(), 60) };
        server.submit(many.clone()).expect("it fits");
        let mut order = Order::default();
        for _ in 0..10 {
            server.step(&mut order).expect("it serves");
        }
        let before = order.0.len();
        assert_eq!(server.load().running, 4, "all rows are taken");
        server.submit(request((30..50).collect(), 10)).expect("it fits");
        server.run(&mut order).expect("it serves");
        server.engine().verify().expect("the state is sound");
        let first = order.0.iter().position(|&request| request == 1).expect("it was served");
        assert!(first - before <= 3 * 4, "{} tokens of others came first", first - before);
        // Who gives way loses nothing.
        let mut alone = self::server(&model, 64, 16, false);
        alone.submit(many).expect("it fits");
        let mut expected = Order::default();
        alone.run(&mut expected).expect("it serves");
        order.1.retain(|&(request, _), _| request == 0);
        assert_eq!(order.1, expected.1, "overlap {overlap}");
    }
}

/// Prompts of one group are one: a newcomer is served beside three of them.
#[test]
fn prompts_of_a_group_share_a_turn() {
    let model = model();
    let mut server = server(&model, 64, 3, false);
    for i in 0..9 {
        let prompt = (0..10).map(|j| 11 * i + j).collect();
        server.submit(Request { group: Some(5), ..request(prompt, 40) }).expect("it fits");
    }
    let mut order = Order::default();
    for _ in 0..5 {
        server.step(&mut order).expect("it serves");
    }
    let before = order.0.len();
    server.submit(request((300..320).collect(), 5)).expect("it fits");
    server.run(&mut order).expect("it serves");
    let first = order.0.iter().position(|&request| request == 9).expect("it was served");
    assert!(first - before <= 9, "{} tokens of others came first", first - before);
}

/// Tokens that the model does not have are refused before they are looked up.
#[test]
fn tokens_past_the_vocabulary_are_refused() {
    let model = model();
    let past = model.config.vocab as u32;
    let plain = Shaping::default();
    for shaping in [
        Shaping { bias: vec![(past, 1.0)], ..plain.clone() },
        Shaping { allowed: Some(vec![1, past]), ..plain.clone() },
        Shaping { bad_words: vec![vec![past]], ..plain.clone() },
        Shaping { min_tokens: 2, ..plain },
    ] {
        let mut server = server(&model, 64, 4, false);
        let shaping = Some(Arc::new(shaping));
        let asked = Request { shaping, stop: vec![past], ..request(vec![1, 2], 3) };
        let error = server.submit(asked).expect_err("it is refused").to_string();
        assert!(error.contains(&format!("token {past} is past the model's vocabulary")), "{error}");
    }
}
