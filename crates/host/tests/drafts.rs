//! Tests that streams generate the same tokens with and without drafts.
//!
//! A step with drafts has another number of rows, so its matrix products sum in another order and may differ in their
//! last bits. Tokens may therefore differ if two logits are nearly equal, as after any change of the batch. No golden
//! token has such logits, for any element type of the pool. Attention itself gives the same bits (`tests/core/trees.rs`
//! of the core).

mod common;

use common::MIXTURES;
use common::serving::{CollectedStreams, Ran, SCHEDULES, Schedule, Setting, requests, serve, serve_by, server};
use kvarena::KvDtype;
use kvarena::config::PrefixMode;
use kvarena::layout::Scaling;
use kvarena_host::cpu::CpuRunner;
use kvarena_host::draft::Drafting;
use kvarena_host::model::Model;
use kvarena_host::request::Request;
use kvarena_host::sample::Sampling;
use kvarena_host::tally::Tally;

const GPT_OSS: &str = MIXTURES[1];

const fn chain(tokens: u32) -> Drafting {
    Drafting { tokens, tree: false }
}

const fn tree(tokens: u32) -> Drafting {
    Drafting { tokens, tree: true }
}

/// Returns the draft rules of a model. A model with windows supports only chains.
fn rules(name: &str) -> Vec<Drafting> {
    let chains = [1, 4, 63].map(chain);
    let trees = [2, 5, 63].map(tree);
    if name == GPT_OSS { chains.to_vec() } else { [chains, trees].concat() }
}

/// Reads a model and its golden prompts. Every other request has two predictions with different mistakes, because the
/// models' outputs rarely repeat.
fn read(name: &str) -> (Model, Vec<Request>) {
    let model = common::model(name);
    let cases = common::cases(name);
    let mut requests = requests(&cases);
    for (request, case) in requests.iter_mut().zip(&cases).step_by(2) {
        for wrong in [5, 7] {
            let answer = case.prompt.iter().chain(&case.tokens).enumerate();
            let mistaken = answer.map(|(i, &token)| token ^ u32::from(i % wrong == wrong - 1));
            request.prediction.extend(mistaken);
        }
    }
    (model, requests)
}

#[track_caller]
fn same(what: &str, drafted: &Ran, plain: &Ran) {
    assert_eq!(drafted.collected.tokens, plain.collected.tokens, "{what}");
    assert_eq!(drafted.tally.new_tokens, plain.tally.new_tokens, "{what}");
    let left = |ran: &Ran| (ran.stats.sequences, ran.stats.steps, ran.stats.private_pages);
    assert_eq!(left(drafted), (0, 0, 0), "{what}: all resources are released");
}

/// Pools of f32 generate the golden tokens, for all settings.
fn golden(name: &str) {
    let (model, requests) = read(name);
    let cases = common::cases(name);
    let (mut accepted, mut branched) = (0, 0);
    for schedule in SCHEDULES {
        for (page_size, prefix) in [(1, PrefixMode::Radix), (16, PrefixMode::Radix), (16, PrefixMode::None)] {
            let setting = Setting { page_size, schedule, prefix, ..Setting::default() };
            let plain = serve(&model, &requests, setting);
            for (number, case) in cases.iter().enumerate() {
                assert_eq!(plain.collected.tokens[&(number, 0)], case.tokens, "{name} {number}");
            }
            let all = schedule == Schedule::OneByOne && page_size == 16;
            for rule in rules(name).into_iter().filter(|rule| all || [4, 5].contains(&rule.tokens)) {
                let setting = Setting { drafts: Some(rule), ..setting };
                let ran = serve(&model, &requests, setting);
                same(&format!("{name}, {setting:?}"), &ran, &plain);
                let tally = &ran.tally;
                assert!(tally.accepted <= tally.drafted && tally.checks <= tally.drafted);
                if schedule == Schedule::OneByOne {
                    let saved = plain.tally.steps - tally.steps;
                    assert_eq!(saved, tally.accepted, "each accepted draft saves the only stream a step");
                }
                accepted += tally.accepted;
                branched += u64::from(rule.tree) * tally.accepted;
                if all && prefix == PrefixMode::Radix {
                    let (checks, steps) = (tally.checks, plain.tally.steps);
                    println!(
                        "{name}, {rule:?}: {} of {} accepted in {checks} checks, {} steps of {steps} left",
                        tally.accepted, tally.drafted, tally.steps
                    );
                }
            }
        }
    }
    assert!(accepted > 0 && (branched > 0 || name == GPT_OSS), "{name}: some drafts are accepted");
}

macro_rules! golden {
    ($($test:ident: $model:expr;)*) => {
        $(#[test]
        fn $test() {
            golden($model);
        })*
    };
}

golden! {
    qwen3: "qwen3-tiny";
    llama: "llama-tiny";
    deepseek: "deepseek-tiny";
    gpt_oss: "gpt-oss-tiny";
}

/// Pools of rounded elements generate the same tokens with and without drafts.
#[test]
fn rounded_pools_generate_equal_texts_with_drafts() {
    for name in common::MODELS.into_iter().chain(MIXTURES) {
        let (model, requests) = read(name);
        let static_scales = [KvDtype::F16, KvDtype::Bf16].map(|dtype| (dtype, Scaling::Static));
        let fp8 = [Scaling::Static, Scaling::ByToken].map(|scaling| (KvDtype::Fp8E4M3, scaling));
        let fp8 = if model.config.latent.is_some() { &[][..] } else { &fp8 };
        for &(dtype, scaling) in static_scales.iter().chain(fp8) {
            for page_size in [1, 16] {
                let run = |drafts| {
                    let setting = Setting { dtype, page_size, drafts, ..Setting::default() };
                    let runner = CpuRunner::new(&model);
                    serve_by(runner, &requests, setting, scaling, None).0
                };
                let plain = run(None);
                for rule in rules(name) {
                    let what = format!("{name}, {dtype:?}, {scaling:?}, {page_size}, {rule:?}");
                    same(&what, &run(Some(rule)), &plain);
                }
            }
        }
    }
}

/// The loop accepts a draft only if it equals the drawn token. Draws with a temperature, and forked samples, therefore
/// do not change.
#[test]
fn samples_and_draws_are_the_same_with_drafts() {
    let (model, mut requests) = read("qwen3-tiny");
    for (temperature, top_k) in [(0.0, 0), (0.3, 0), (0.05, 5)] {
        for request in &mut requests {
            request.samples = 3;
            request.sampling = Sampling { temperature, top_k, seed: 11, ..Sampling::default() };
        }
        let run = |schedule, drafts| {
            serve(&model, &requests, Setting { schedule, drafts, page_size: 4, ..Setting::default() })
        };
        for schedule in SCHEDULES {
            let plain = run(schedule, None);
            for rule in [chain(4), tree(9)] {
                let ran = run(schedule, Some(rule));
                same(&format!("{temperature}, {schedule:?}, {rule:?}"), &ran, &plain);
                assert!(ran.tally.accepted > 0, "{temperature}, {schedule:?}, {rule:?}");
            }
        }
    }
}

/// A stop token, a client that disconnects, and the token limit end a stream at the same token as without drafts.
#[test]
fn streams_end_where_they_do_without_drafts() {
    let (model, plain) = read("qwen3-tiny");
    let answers = serve(&model, &plain, Setting::default()).collected.tokens;
    for n in 0..20 {
        let ends: [fn(&mut Request, u32, &[u32]); 3] = [
            |request, n, answer| request.stop = vec![answer[n as usize]],
            |request, n, _| request.cancel_after = Some(n + 1),
            |request, n, _| request.max_new_tokens = Some(n),
        ];
        for (i, end) in ends.into_iter().enumerate() {
            let mut requests = plain.clone();
            for (number, request) in requests.iter_mut().enumerate() {
                end(request, n, &answers[&(number, 0)]);
            }
            let run = |drafts| serve(&model, &requests, Setting { drafts, ..Setting::default() });
            let plain = run(None);
            for rule in [chain(6), tree(20)] {
                same(&format!("{n}, end {i}, {rule:?}"), &run(Some(rule)), &plain);
            }
        }
    }
}

/// A failed step is aborted with its drafts.
#[test]
fn failed_steps_change_no_token_with_drafts() {
    for name in common::MODELS {
        let (model, requests) = read(name);
        for schedule in SCHEDULES {
            let plain = serve(&model, &requests, Setting { schedule, ..Setting::default() });
            for rule in rules(name) {
                let (drafts, fail_every) = (Some(rule), Some(3));
                let setting = Setting { schedule, drafts, fail_every, ..Setting::default() };
                let ran = serve(&model, &requests, setting);
                same(&format!("{name}, {setting:?}"), &ran, &plain);
                assert!(ran.tally.aborted_steps > 0);
            }
        }
    }
}

/// A resumed stream computes its earlier tokens again in chunks. Drafts follow only the stream's last token, not a
/// chunk of one token.
#[test]
fn a_resumed_stream_has_no_drafts_before_its_last_token() {
    let (model, requests) = read("qwen3-tiny");
    // The prompts are short, so that all streams have new tokens when the pool is full.
    let words = &requests.last().expect("prompts").prompt;
    let short = [3, 2, 2, 1].into_iter().zip(words.chunks(8));
    let mut short: Vec<Request> =
        short.map(|(len, words)| Request { prompt: words[..len].to_vec(), ..requests[0].clone() }).collect();
    for chunk in [1, 2] {
        // Without prefixes a resumed stream computes all its tokens again.
        let (schedule, prefix) = (Schedule::SmallPool, PrefixMode::None);
        let setting = Setting { schedule, chunk, prefix, page_size: 4, ..Setting::default() };
        let plain = serve(&model, &short, setting);
        assert!(plain.tally.preemptions > 0, "chunks of {chunk}");
        for (number, request) in short.iter_mut().enumerate() {
            let prompt = request.prompt.iter().map(|token| token.raw());
            let answer = plain.collected.tokens[&(number, 0)].iter().copied();
            request.prediction = prompt.chain(answer).collect();
        }
        for rule in [chain(4), tree(9)] {
            let ran = serve(&model, &short, Setting { drafts: Some(rule), ..setting });
            same(&format!("chunks of {chunk}, {rule:?}"), &ran, &plain);
            let Tally { preemptions, accepted, .. } = ran.tally;
            assert!(preemptions > 0 && accepted > 0, "{chunk}, {rule:?}: {preemptions}, {accepted}");
        }
    }
}

/// If pages are short, the loop drops drafts before it preempts a stream.
#[test]
fn no_stream_is_preempted_for_drafts() {
    let (model, requests) = read("qwen3-tiny");
    let two = [requests[0].clone(), requests[2].clone()];
    // The pool has memory for one request as long as both, so for all tokens of both except their last ones.
    let mut whole = requests[7].clone();
    whole.prompt.truncate(two[0].prompt.len() + two[1].prompt.len() + 19);
    let run = |drafts| {
        let setting = Setting { page_size: 1, schedule: Schedule::SmallPool, drafts, ..Setting::default() };
        let runner = CpuRunner::new(&model);
        let mut server = server(runner, &[whole.clone()], setting, Scaling::Static, None);
        for request in &two {
            server.submit(request.clone()).expect("it fits");
        }
        let mut collected = CollectedStreams::default();
        server.run(&mut collected).expect("the requests fit");
        let tally = server.tally().0.clone();
        Ran { collected, stats: server.engine().stats(), tally }
    };
    let (plain, ran) = (run(None), run(Some(tree(9))));
    same("two streams", &ran, &plain);
    assert_eq!((plain.tally.preemptions, ran.tally.preemptions), (0, 0));
    assert!(ran.tally.accepted > 0);
}
