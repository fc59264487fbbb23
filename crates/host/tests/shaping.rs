//! Tests edits of logits, logits of prompts, turns of groups, and limits of sampling parameters. Overlap, drafts and
//! failed steps do not change the tokens.

mod common;

use common::serving::{CollectedStreams, Schedule, Setting, requests, serve};
use common::wrapped::Wrapped;
use kvarena::Cpu;
use kvarena::layout::Scaling;
use kvarena_host::cpu::CpuRunner;
use kvarena_host::draft::Drafting;
use kvarena_host::model::Model;
use kvarena_host::request::{Defaults, Request};
use kvarena_host::runner::Runner;
use kvarena_host::sample::Sampling;
use kvarena_host::server::{Server, Sink};
use kvarena_host::shaping::Shaping;
use kvarena_host::stream::{Finish, Stream};

/// Returns requests with each kind of shaping, and requests without shaping.
fn shaped() -> Vec<Request> {
    let mut requests = requests(&common::cases("qwen3-tiny"));
    let repeating = Shaping { repetition: 1.7, frequency: 0.8, presence: 0.5, ..Shaping::default() };
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
            0 => Some(repeating.clone().prepare()),
            1 => Some(bounded.clone().prepare()),
            2 => Some(worded.clone().prepare()),
            _ => None,
        };
        if i % 3 == 0 {
            request.sampling = Sampling { temperature: 0.9, min_p: 0.05, seed: i as u64, ..Sampling::default() };
            request.samples = 3;
        }
    }
    requests
}

#[test]
fn settings_change_no_token_of_shaped_requests() {
    let (model, requests) = (common::model("qwen3-tiny"), shaped());
    let plain = serve(&model, &requests, Setting::default()).collected.tokens;
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
        Setting { overlap: true, schedule: Schedule::ChunksOf7, ..Setting::default() },
        Setting { schedule: Schedule::SmallPool, ..Setting::default() },
        Setting { drafts: drafts(4, false), ..Setting::default() },
        Setting { drafts: drafts(5, true), fail_every: Some(5), ..Setting::default() },
    ] {
        let other = serve(&model, &requests, setting).collected.tokens;
        assert_eq!(other, plain, "{setting:?}");
    }
}

/// Records the logits of prompts, and what [`CollectedStreams`] records.
#[derive(Default)]
struct Scores {
    prompt: Vec<(usize, u32, Vec<f32>)>,
    collected: CollectedStreams,
}

impl Sink for Scores {
    fn prompt(&mut self, stream: &Stream, position: u32, logits: &[f32]) {
        self.prompt.push((stream.request, position, logits.to_vec()));
    }

    fn token(&mut self, stream: &Stream, logits: &[f32]) {
        self.collected.token(stream, logits);
    }

    fn done(&mut self, stream: &Stream, last: bool) {
        self.collected.done(stream, last);
    }
}

fn server(model: &Model, chunk: u32, concurrency: u32, overlap: bool) -> Server<CpuRunner<'_>> {
    server_over(CpuRunner::new(model), setting(chunk, concurrency, overlap))
}

fn setting(chunk: u32, concurrency: u32, overlap: bool) -> Setting {
    Setting { page_size: 4, chunk, concurrency, overlap, ..Setting::default() }
}

fn server_over<R: Runner<Backend = Cpu>>(runner: R, setting: Setting) -> Server<R> {
    common::serving::server(runner, &[], setting, Scaling::Static, None)
}

fn request(prompt: Vec<u32>, new_tokens: u32) -> Request {
    let sampling = Sampling::default();
    Defaults { max_new_tokens: Some(new_tokens), samples: 1, sampling, stop: Vec::new() }.request(prompt)
}

/// The logits from which a prompt token would be chosen equal the first logits of a request whose prompt ends before
/// that token. This also holds with chunks, and if the cache contains the whole prompt.
#[test]
fn prompts_are_scored_whole() {
    let model = common::model("qwen3-tiny");
    let prompt: Vec<u32> = (0..40).map(|i| 7 * i % 500).collect();
    let alone = |len: usize| {
        let mut server = server(&model, 512, 4, false);
        server.submit(request(prompt[..len].to_vec(), 1)).expect("it fits");
        let mut collected = CollectedStreams::default();
        server.run(&mut collected).expect("it serves");
        collected.first_logits.remove(&0).expect("the stream has a token")
    };
    for (chunk, overlap) in [(512, false), (7, false), (7, true)] {
        let mut server = server(&model, chunk, 4, overlap);
        let mut scores = Scores::default();
        for scores_prompt in [false, true] {
            server.submit(Request { scores_prompt, ..request(prompt.clone(), 3) }).expect("it fits");
            server.run(&mut scores).expect("it serves");
        }
        let places: Vec<u32> = scores.prompt.iter().map(|(_, position, _)| *position).collect();
        assert_eq!(places, (1..40).collect::<Vec<_>>(), "each position once, in order");
        assert!(scores.prompt.iter().all(|(request, ..)| *request == 1));
        for (_, position, logits) in scores.prompt.iter().filter(|(_, position, _)| position % 6 == 1) {
            let expected = alone(*position as usize);
            let far = logits.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(far < 1e-3, "chunk {chunk}, place {position}: {far}");
        }
        assert_eq!(scores.collected.tokens[&(0, 0)], scores.collected.tokens[&(1, 0)]);
    }
}

/// Returns a request with 60 edits for each new token.
fn edited(prompt: Vec<u32>, new_tokens: u32) -> Request {
    let allowed = Some((0..60).map(|i| 7 * i).collect());
    let shaping = Some(Shaping { allowed, ..Shaping::default() }.prepare());
    Request { shaping, ..request(prompt, new_tokens) }
}

/// If the streams' edits exceed a step's limit, the streams take turns, even if steps fail or are planned ahead.
#[test]
fn streams_take_turns_with_edits() {
    let model = common::model("qwen3-tiny");
    let prompt = |i| (0..10).map(|j| 31 * i as u32 + j).collect();
    for (overlap, fail_every) in [(false, None), (true, None), (false, Some(2)), (true, Some(3))] {
        let setting = Setting { fail_every, ..setting(64, 8, overlap) };
        let mut server = server_over(Wrapped::with_edits(&model, 130), setting);
        for i in 0..5 {
            server.submit(edited(prompt(i), 20)).expect("it fits");
        }
        let mut order = Order::default();
        while server.step(&mut order).expect("it serves") {
            let tokens_of = |i| order.0.iter().filter(|&&request| request == i).count();
            let counts: Vec<usize> = (0..5).map(tokens_of).collect();
            let (least, most) = (counts.iter().min(), counts.iter().max());
            let apart = most.expect("five") - least.expect("five");
            assert!(apart <= 2, "overlap {overlap}, fail_every {fail_every:?}: {counts:?}");
        }
        let mut wide = self::server(&model, 64, 8, false);
        for i in 0..5 {
            wide.submit(edited(prompt(i), 20)).expect("it fits");
        }
        let mut expected = Order::default();
        wide.run(&mut expected).expect("it serves");
        assert_eq!(order.1, expected.1, "overlap {overlap}");
    }
}

/// A scored prompt and samples take no more draws than a step has. Other streams still get a token in each step.
#[test]
fn scored_prompts_fit_the_draws_of_a_step() {
    let model = common::model("qwen3-tiny");
    let prompt: Vec<u32> = (0..60).map(|i| 7 * i % 500).collect();
    let warm = Sampling { temperature: 1.0, seed: 3, ..Sampling::default() };
    let scored = Request { scores_prompt: true, samples: 5, sampling: warm, ..request(prompt.clone(), 4) };
    let plain = || request((100..110).collect(), 40);
    let mut wide = server(&model, 64, 8, false);
    wide.submit(scored.clone()).expect("it fits");
    wide.submit(plain()).expect("it fits");
    let mut expected = Scores::default();
    wide.run(&mut expected).expect("it serves");
    let places: Vec<u32> = expected.prompt.iter().map(|(_, position, _)| *position).collect();
    assert_eq!(places, (1..60).collect::<Vec<_>>());

    let drafts = Some(Drafting { tokens: 2, tree: false });
    for (overlap, fail_every, drafts) in [
        (false, None, None),
        (true, None, None),
        (true, Some(3), None),
        (false, None, drafts),
        (false, Some(2), drafts),
    ] {
        let setting = Setting { fail_every, drafts, ..setting(64, 8, overlap) };
        let mut server = server_over(Wrapped::with_draws(&model, 7), setting);
        server.submit(scored.clone()).expect("it fits");
        server.submit(plain()).expect("it fits");
        let mut found = Scores::default();
        server.run(&mut found).unwrap_or_else(|error| panic!("{setting:?}: {error}"));
        assert_eq!(found.collected.tokens, expected.collected.tokens, "{setting:?}");
        assert_eq!(found.prompt.len(), expected.prompt.len(), "{setting:?}");
        for (found, expected) in found.prompt.iter().zip(&expected.prompt) {
            assert_eq!(found.1, expected.1, "{setting:?}: each position once, in order");
            let far = found.2.iter().zip(&expected.2).map(|(a, b)| (a - b).abs());
            assert!(far.fold(0.0, f32::max) < 1e-3, "{setting:?}: position {}", found.1);
        }
    }

    let mut server = server_over(Wrapped::with_draws(&model, 7), setting(64, 8, false));
    server.submit(scored.clone()).expect("it fits");
    server.submit(plain()).expect("it fits");
    let mut order = Order::default();
    for step in 1..=8 {
        server.step(&mut order).expect("it serves");
        assert_eq!(order.0, vec![1; step], "the prompt leaves a draw to the other stream");
    }
    let many = Request { samples: 8, ..scored };
    let error = server.submit(many).expect_err("a step has 7 draws");
    assert!(error.message.contains("8 samples"), "{error}");
}

/// Steps whose edits are all in use still compute a prompt, which needs no edits before its last token.
#[test]
fn prompts_need_no_edits() {
    let model = common::model("qwen3-tiny");
    let mut server = server_over(Wrapped::with_edits(&model, 60), setting(10, 8, false));
    server.submit(edited((0..10).collect(), 60)).expect("it fits");
    let mut order = Order::default();
    server.step(&mut order).expect("it serves");
    server.submit(edited((100..200).collect(), 2)).expect("it fits");
    for step in 1..=9 {
        server.step(&mut order).expect("it serves");
        assert_eq!(order.0, vec![0; step + 1], "the prompt takes no edits");
    }
    server.step(&mut order).expect("it serves");
    server.step(&mut order).expect("it serves");
    assert!(order.0.contains(&1), "the prompt is computed by now: {:?}", order.0);
}

/// Records the request of each token, in order.
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

/// A request with many samples fills all rows; the loop serves another request before the first one ends.
#[test]
fn groups_take_turns() {
    let model = common::model("qwen3-tiny");
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
        assert_eq!(server.stream_counts().running, 4, "all rows are taken");
        server.submit(request((30..50).collect(), 10)).expect("it fits");
        server.run(&mut order).expect("it serves");
        server.engine().verify().expect("the state is sound");
        let first = order.0.iter().position(|&request| request == 1).expect("request 1 is served");
        assert!(first - before <= 3 * 4, "{} other tokens came first", first - before);
        // A stream that yields loses no token.
        let mut alone = self::server(&model, 64, 16, false);
        alone.submit(many).expect("it fits");
        let mut expected = Order::default();
        alone.run(&mut expected).expect("it serves");
        order.1.retain(|&(request, _), _| request == 0);
        assert_eq!(order.1, expected.1, "overlap {overlap}");
    }
}

/// The prompts of one group share its turns, so a new request runs before all prompts of the group have ended.
#[test]
fn prompts_of_a_group_share_a_turn() {
    let model = common::model("qwen3-tiny");
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
    let first = order.0.iter().position(|&request| request == 9).expect("request 9 is served");
    assert!(first - before <= 9, "{} other tokens came first", first - before);
}

/// The loop rejects tokens past the vocabulary before it uses them as an index.
#[test]
fn tokens_past_the_vocabulary_are_refused() {
    let model = common::model("qwen3-tiny");
    let past = model.config.vocab as u32;
    let plain = Shaping::default();
    for shaping in [
        Shaping { bias: vec![(past, 1.0)], ..plain.clone() },
        Shaping { allowed: Some(vec![1, past]), ..plain.clone() },
        Shaping { bad_words: vec![vec![past]], ..plain },
    ] {
        let mut server = server(&model, 64, 4, false);
        let shaping = Some(shaping.prepare());
        let invalid = Request { shaping, ..request(vec![1, 2], 3) };
        let error = server.submit(invalid).expect_err("the request is rejected").to_string();
        assert!(error.contains(&format!("token {past} is past the model's vocabulary")), "{error}");
    }
}

/// Edits that allow no first token are rejected. If they allow no later token, the stream ends before it.
#[test]
fn no_stream_gets_a_forbidden_token() {
    let model = common::model("qwen3-tiny");
    let only = |token| Shaping { allowed: Some(vec![token]), ..Shaping::default() };
    let shaped = |shaping: &Shaping, stop: &[u32]| Request {
        shaping: Some(shaping.clone().prepare()),
        stop: stop.to_vec(),
        samples: 2,
        ..request(vec![1, 2, 3], 6)
    };
    let none = [
        shaped(&Shaping { bad_words: vec![vec![100]], ..only(100) }, &[]),
        shaped(&Shaping { min_tokens: 2, ..only(100) }, &[100, 100]),
        shaped(&Shaping { bad_words: (0..512).map(|t| vec![t]).collect(), ..Shaping::default() }, &[]),
    ];
    for (overlap, size) in [(false, 64), (true, 64), (true, 1)] {
        let mut server = server(&model, size, 4, overlap);
        for request in &none {
            let error = server.submit(request.clone()).expect_err("no token is allowed");
            assert!(error.message.contains("allow no token"), "{error}");
        }
        let requests = [
            shaped(&Shaping { bad_words: vec![vec![100, 100, 100]], ..only(100) }, &[]),
            shaped(&Shaping { bad_words: vec![vec![100, 100]], min_tokens: 4, ..only(100) }, &[]),
            shaped(&Shaping { min_tokens: 2, ..only(100) }, &[7]),
            shaped(&only(100), &[100]),
        ];
        for request in &requests {
            let sampling = Sampling { temperature: 1.0, ..Sampling::default() };
            server.submit(request.clone()).expect("the first token is allowed");
            server.submit(Request { sampling, ..request.clone() }).expect("so it is when drawn");
        }
        let mut ends = Ends::default();
        server.run(&mut ends).expect("it serves");
        server.engine().verify().expect("the state is sound");
        for ((request, sample), end) in &ends.0 {
            let (len, finish) =
                [(2, Finish::Stop), (1, Finish::Stop), (6, Finish::Length), (1, Finish::Stop)][request / 2];
            assert_eq!(*end, (vec![100; len], Some(finish)), "{overlap}: {request}.{sample}");
        }
        assert_eq!(ends.0.len(), 16);
    }
}

/// Records the tokens of each stream and the reason for its end.
#[derive(Default)]
struct Ends(std::collections::BTreeMap<(usize, u32), (Vec<u32>, Option<Finish>)>);

impl Sink for Ends {
    fn done(&mut self, stream: &Stream, _: bool) {
        let end = (stream.tokens.clone(), stream.finish);
        self.0.insert((stream.request, stream.sample), end);
    }
}

/// A GPU chooses token 0 if it finds no allowed token, for example if all logits are NaN.
#[test]
fn a_forbidden_choice_of_the_runner_ends_the_stream() {
    let model = common::model("qwen3-tiny");
    let mut server = server_over(Wrapped { forced: Some(0), ..Wrapped::new(&model) }, setting(64, 4, true));
    let shaping = Shaping { allowed: Some(vec![100, 7]), ..Shaping::default() }.prepare();
    server.submit(Request { shaping: Some(shaping), ..request(vec![1, 2], 5) }).expect("it fits");
    server.submit(request(vec![1, 2], 5)).expect("it fits");
    let mut ends = Ends::default();
    server.run(&mut ends).expect("it serves");
    assert_eq!(ends.0[&(0, 0)], (Vec::new(), Some(Finish::Stop)));
    assert_eq!(ends.0[&(1, 0)], (vec![0; 5], Some(Finish::Length)));
}

/// A stop token past the vocabulary never occurs, so `min_tokens` does not forbid it.
#[test]
fn stop_tokens_past_the_vocabulary_are_left_out() {
    let model = common::model("qwen3-tiny");
    let past = model.config.vocab as u32;
    let generate = |request| {
        let mut server = server(&model, 64, 4, false);
        server.submit(request).expect("the request is accepted");
        let mut collected = CollectedStreams::default();
        server.run(&mut collected).expect("it serves");
        collected.tokens.remove(&(0, 0)).expect("the stream has tokens")
    };
    let plain = generate(request(vec![1, 2], 5));
    let shaping = Some(Shaping { min_tokens: 2, ..Shaping::default() }.prepare());
    for stop in [vec![past], vec![u32::MAX, past, plain[0]]] {
        let tokens = generate(Request { shaping: shaping.clone(), stop, ..request(vec![1, 2], 5) });
        let forbidden = tokens.iter().take(2).any(|token| *token == plain[0]);
        assert!(tokens == plain || (!forbidden && tokens.len() >= 2), "{tokens:?}, {plain:?}");
    }
}

/// The loop raises lower temperatures to 0.01. At a tiny temperature, the quotients of logits would be so large that a
/// draw's noise has no effect, or they would overflow.
#[test]
fn temperatures_below_0_01_draw_as_0_01() {
    let model = common::model("qwen3-tiny");
    let generate = |temperature| {
        let mut server = server(&model, 64, 4, false);
        let sampling = Sampling { temperature, seed: 3, ..Sampling::default() };
        server.submit(Request { sampling, ..request((1..20).collect(), 20) }).expect("it fits");
        let mut collected = CollectedStreams::default();
        server.run(&mut collected).expect("it serves");
        collected.tokens.remove(&(0, 0)).expect("the stream has tokens")
    };
    let expected = generate(0.01);
    for temperature in [0.0099, 1e-5, 1e-6, 1e-30, f32::from_bits(1)] {
        assert_eq!(generate(temperature), expected, "{temperature}");
    }
    assert_ne!(generate(2.0), expected);
}
