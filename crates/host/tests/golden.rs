//! Tests that models generate their golden tokens. All models use pages of f32; some also use pages of f16 and bf16.
//! The tests vary the page size, the layout and the reuse of prefixes. Prompts run one at a time, all at once, in
//! chunks, in a pool that is too small, with failed steps, and with steps planned ahead. fp8 may change tokens, so one
//! test bounds how much fp8 changes the logits.

mod common;

use common::serving::{Ran, SCHEDULES, Schedule, Setting, requests, serve, serve_by};
use kvarena::KvDtype;
use kvarena::config::PrefixMode;
use kvarena::layout::{KvScales, Layout, Scaling};
use kvarena::stats::Stats;
use kvarena_host::calibrate;
use kvarena_host::cpu::CpuRunner;

const PAGE_SIZES: [u32; 3] = [1, 16, 64];
const PREFIXES: [PrefixMode; 2] = [PrefixMode::Radix, PrefixMode::None];

fn check(name: &str, cases: &[common::Case], setting: Setting, ran: &Ran) {
    for (number, case) in cases.iter().enumerate() {
        let tokens = &ran.collected.tokens[&(number, 0)];
        assert_eq!(tokens, &case.tokens, "{name}, case {number}, {setting:?}");
        if setting.dtype == KvDtype::F32 {
            let logits = &ran.collected.first_logits[&number];
            for (actual, expected) in logits.iter().zip(&case.first_logits_head) {
                let actual = f64::from(*actual);
                assert!(
                    common::agree(actual, *expected),
                    "{name}, case {number}, {setting:?}: logit {actual} is not {expected}"
                );
            }
        }
    }
    let Stats { sequences, steps, private_pages, fenced_pages, protected_pages, .. } = ran.stats;
    let left = (sequences, steps, private_pages, fenced_pages, protected_pages);
    assert_eq!(left, (0, 0, 0, 0, 0), "{name}, {setting:?}: all resources are released");
    if setting.prefix == PrefixMode::None {
        assert_eq!((ran.stats.hit_tokens, ran.stats.cached_pages), (0, 0), "{name}, {setting:?}");
    } else if setting.schedule == Schedule::OneByOne && setting.page_size < 64 && !common::GROUPED.contains(&name) {
        // With groups, the first shared prefix has no tails; `groups.rs` checks the hits.
        assert!(ran.stats.hit_tokens > 0, "{name}, {setting:?}: prompts share prefixes");
    }
    // All streams of these models may fit at once. Most layers of Llama 4 keep no pages at the end of a chunk. Most
    // pages of Gemma 4's longest stream belong to full windows.
    let may_fit = ["gemma4-tiny", "llama4-tiny"].contains(&name);
    if setting.schedule == Schedule::SmallPool && !may_fit {
        assert!(ran.tally.preemptions > 0, "{name}, {setting:?}: the pool is too small for all");
        let evicted = ran.stats.evicted_pages > 0;
        assert_eq!(evicted, setting.prefix == PrefixMode::Radix, "{name}, {setting:?}");
    }
    let failed = setting.fail_every.is_some();
    assert_eq!(ran.tally.aborted_steps > 0, failed, "{name}, {setting:?}: steps fail as requested");
}

/// Returns settings for every combination of page size, prefix mode and schedule. The layout alternates, so that every
/// pair of values occurs; a model with layers of two shapes needs PageFirst.
fn settings(dtype: KvDtype, overlap: bool, has_one_shape: bool) -> Vec<Setting> {
    let mut settings = Vec::new();
    for (i, page_size) in PAGE_SIZES.into_iter().enumerate() {
        for (j, prefix) in PREFIXES.into_iter().enumerate() {
            for (k, schedule) in SCHEDULES.into_iter().enumerate() {
                let layout = if has_one_shape && (i + j + k) % 2 == 0 { Layout::LayerFirst } else { Layout::PageFirst };
                let plain = Setting { dtype, page_size, layout, overlap, ..Setting::default() };
                settings.push(Setting { prefix, schedule, ..plain });
            }
        }
    }
    settings
}

fn all_settings(name: &str, dtype: KvDtype, overlap: bool) {
    let model = common::model(name);
    let cases = common::cases(name);
    let requests = requests(&cases);
    let has_one_shape = model.config.window_heads.is_none();
    for setting in settings(dtype, overlap, has_one_shape) {
        check(name, &cases, setting, &serve(&model, &requests, setting));
    }
}

macro_rules! golden {
    ($($test:ident: $model:literal, $dtype:ident, $overlap:literal;)*) => {
        $(#[test]
        fn $test() {
            all_settings($model, KvDtype::$dtype, $overlap);
        })*
    };
}

golden! {
    qwen3_f32: "qwen3-tiny", F32, false;
    qwen3_f16: "qwen3-tiny", F16, false;
    qwen3_bf16: "qwen3-tiny", Bf16, false;
    qwen3_f32_overlap: "qwen3-tiny", F32, true;
    qwen3_f16_overlap: "qwen3-tiny", F16, true;
    qwen3_bf16_overlap: "qwen3-tiny", Bf16, true;
    llama_f32: "llama-tiny", F32, false;
    llama_f16: "llama-tiny", F16, false;
    llama_bf16: "llama-tiny", Bf16, false;
    llama_f32_overlap: "llama-tiny", F32, true;
    llama_f16_overlap: "llama-tiny", F16, true;
    llama_bf16_overlap: "llama-tiny", Bf16, true;
    deepseek_f32: "deepseek-tiny", F32, false;
    deepseek_f32_overlap: "deepseek-tiny", F32, true;
    deepseek_groups_f32: "deepseek-groups", F32, false;
    gpt_oss_f32: "gpt-oss-tiny", F32, false;
    gpt_oss_f32_overlap: "gpt-oss-tiny", F32, true;
    gemma3_f32: "gemma3-tiny", F32, false;
    gemma3_f32_overlap: "gemma3-tiny", F32, true;
    gemma4_f32: "gemma4-tiny", F32, false;
    gemma4_f32_overlap: "gemma4-tiny", F32, true;
    llama4_f32: "llama4-tiny", F32, false;
    llama4_f32_overlap: "llama4-tiny", F32, true;
}

/// Prints the first token of each answer that a rounded pool changes in models with experts. A pool of f16 or bf16 must
/// change no token. Prompts run one at a time and without reuse, so all runs compute the same tokens in the same order.
#[test]
fn changes_by_rounded_pools_are_reported() {
    for name in common::MIXTURES {
        let model = common::model(name);
        for (number, case) in common::cases(name).iter().enumerate() {
            let request = requests(std::slice::from_ref(case));
            let static_scales = [KvDtype::F32, KvDtype::F16, KvDtype::Bf16].map(|dtype| (dtype, Scaling::Static));
            for (dtype, scaling) in static_scales.into_iter().chain([(KvDtype::Fp8E4M3, Scaling::ByToken)]) {
                let setting =
                    Setting { dtype, prefix: PrefixMode::None, schedule: Schedule::OneByOne, ..Setting::default() };
                let tokens = serve_by(CpuRunner::new(&model), &request, setting, scaling, None).0.collected.tokens;
                let changed = tokens[&(0, 0)].iter().zip(&case.tokens).position(|(x, y)| x != y);
                println!("{name}, case {number}, {dtype:?}: the first changed token is {changed:?}");
                assert!(changed.is_none() || dtype.is_quantised(), "{name}, case {number}, {dtype:?}: {changed:?}");
            }
        }
    }
}

/// One of several equal prompts is computed; the other streams wait for it.
#[test]
fn equal_prompts_are_computed_once() {
    let name = common::MODELS[0];
    let model = common::model(name);
    let longest = common::cases(name).into_iter().max_by_key(|case| case.prompt.len());
    let longest = longest.expect("there are cases");
    let request = requests(std::slice::from_ref(&longest)).remove(0);
    let requests = vec![request; 4];
    for (schedule, overlap) in [(Schedule::AllAtOnce, false), (Schedule::AllAtOnce, true), (Schedule::ChunksOf7, true)]
    {
        let setting = Setting { page_size: 1, schedule, overlap, ..Setting::default() };
        let ran = serve(&model, &requests, setting);
        let hits = 3 * (longest.prompt.len() as u64 - 1);
        assert_eq!(ran.stats.hit_tokens, hits, "{setting:?}: all but the last token");
        assert_eq!((ran.tally.preemptions, ran.stats.prompts), (0, 4));
        for number in 0..4 {
            assert_eq!(ran.collected.tokens[&(number, 0)], longest.tokens, "{setting:?}");
        }
    }
}

#[test]
fn failed_steps_change_no_token() {
    for name in common::MODELS {
        let model = common::model(name);
        let cases = common::cases(name);
        let requests = requests(&cases);
        for (schedule, (overlap, every)) in
            SCHEDULES.iter().flat_map(|&schedule| [(false, 3), (true, 2), (true, 3)].map(|kind| (schedule, kind)))
        {
            let fail_every = Some(every);
            let setting = Setting { schedule, overlap, fail_every, ..Setting::default() };
            let ran = serve(&model, &requests, setting);
            check(name, &cases, setting, &ran);
            let collected = ran.tally.steps + ran.tally.failed_steps;
            assert_eq!(ran.tally.failed_steps, collected / every, "{name}, {setting:?}");
        }
    }
}

/// Returns the RMS of `f(x, y)` over the first logits x of all requests and the logits y of the f32 pool.
fn rms(ran: &Ran, exact: &Ran, f: fn(f32, f32) -> f32) -> f64 {
    let pairs = ran.collected.first_logits.iter().zip(&exact.collected.first_logits);
    let all = pairs.flat_map(|((_, x), (_, y))| x.iter().zip(y).map(|(&x, &y)| f64::from(f(x, y))));
    let (count, sum) = all.fold((0.0, 0.0), |(count, sum), x| (count + 1.0, sum + x * x));
    (sum / count).sqrt()
}

/// Prints how fp8 changes tokens and logits. The change of logits must stay below 32 times that of bf16, which rounds
/// 16 times as finely. The test also measures, writes and reads scales. Weights are random, so tokens depend on smaller
/// differences than in a trained model.
#[test]
fn fp8_changes_logits_no_more_than_its_rounding() {
    for name in common::MODELS {
        let model = common::model(name);
        let cases = common::cases(name);
        let requests = requests(&cases);
        let setting = |dtype, schedule| Setting { dtype, schedule, ..Setting::default() };
        let runner = CpuRunner::new(&model).calibrate();
        let f32_pool = setting(KvDtype::F32, Schedule::AllAtOnce);
        let (exact, server) = serve_by(runner, &requests, f32_pool, Scaling::Static, None);
        let measured = server.runner().largest().expect("measured").scales().expect("K and V are finite");
        let file = std::env::temp_dir().join(format!("{name}-{}.json", std::process::id()));
        calibrate::write(&file, &measured).expect("a file can be written");
        assert_eq!(calibrate::read(&file).expect("the file is written"), measured);
        std::fs::remove_file(&file).expect("the file exists");

        let run = |dtype, schedule, scaling, scales: &Option<KvScales>| {
            let (setting, runner) = (setting(dtype, schedule), CpuRunner::new(&model));
            serve_by(runner, &requests, setting, scaling, scales.clone()).0
        };
        let change = |what: &str, ran: &Ran| {
            let pairs = ran.collected.tokens.values().zip(exact.collected.tokens.values());
            let all: usize = exact.collected.tokens.values().map(Vec::len).sum();
            let same = pairs.clone().flat_map(|(x, y)| x.iter().zip(y)).filter(|(x, y)| x == y);
            let (tokens, texts) = (all - same.count(), pairs.filter(|(x, y)| x != y).count());
            let (change, size) = (rms(ran, &exact, |x, y| x - y), rms(ran, &exact, |_, y| y));
            print!("{name}, {what}: {tokens} of {all} tokens, {texts} of {} texts differ; ", cases.len());
            println!("first logits change by {change:.5} of {size:.5} (RMS)");
            change
        };
        let bf16 = run(KvDtype::Bf16, Schedule::AllAtOnce, Scaling::Static, &None);
        let bf16 = change("bf16", &bf16);
        for (scaling, scales) in [(Scaling::Static, Some(measured)), (Scaling::ByToken, None)] {
            let fp8 = |schedule| run(KvDtype::Fp8E4M3, schedule, scaling, &scales);
            let ran = fp8(Schedule::AllAtOnce);
            // Attention does not depend on chunks. But products of up to 16 rows sum in another order than larger ones.
            // A number near the middle of two fp8 values may then round to the other value and change the text.
            for schedule in SCHEDULES {
                let collected = fp8(schedule).collected.tokens;
                let other = collected.iter().filter(|&(key, text)| ran.collected.tokens[key] != *text);
                assert!(other.count() <= 1, "{name} {scaling:?} {schedule:?}: {collected:?}");
            }
            let fp8 = change(&format!("fp8, {scaling:?}"), &ran);
            assert!(fp8 < 32.0 * bf16, "{name} {scaling:?}: {fp8} is too large relative to {bf16}");
        }
    }
}
