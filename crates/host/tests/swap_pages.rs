//! Tests that streams generate the same tokens if their prefixes are evicted to swap memory and loaded again. This must
//! also hold if each page moves at the last moment that the contract allows.

mod common;

use common::serving::{CollectedStreams, Setting, requests, server, server_on};
use kvarena::layout::Scaling;
use kvarena::testkit::late::{Late, LateOptions};
use kvarena::{CpuOptions, TokenId};
use kvarena_host::clock::Clock;
use kvarena_host::config::ModelConfig;
use kvarena_host::cpu::CpuRunner;
use kvarena_host::error::Result;
use kvarena_host::request::Request;
use kvarena_host::runner::{Runner, Work};
use kvarena_host::server::Server;

/// Runs a model on the CPU behind a backend that moves pages late.
struct LateRunner<'m>(CpuRunner<'m>);

impl Runner for LateRunner<'_> {
    type Backend = Late;

    fn config(&self) -> &ModelConfig {
        self.0.config()
    }

    fn launch(&mut self, backend: &mut Late, work: &Work, clock: &mut Clock) -> Result<()> {
        self.0.launch(backend.unsettled(), work, clock)
    }

    fn collect(
        &mut self,
        backend: &mut Late,
        work: &Work,
        fail: bool,
        tokens: &mut Vec<u32>,
        clock: &mut Clock,
    ) -> Result<()> {
        self.0.collect(backend.unsettled(), work, fail, tokens, clock)
    }

    fn settle(&mut self, backend: &mut Late) -> Result<()> {
        self.0.settle(backend.unsettled())
    }

    fn edits_max(&self) -> usize {
        self.0.edits_max()
    }

    fn keeps_logits(&self) -> bool {
        self.0.keeps_logits()
    }

    fn logits(&self, draw: usize) -> &[f32] {
        self.0.logits(draw)
    }
}

fn tokens_of(collected: &CollectedStreams) -> Vec<&Vec<u32>> {
    collected.tokens.values().collect()
}

fn run<R: Runner>(server: &mut Server<R>, requests: &[Request]) -> CollectedStreams {
    let mut collected = CollectedStreams::default();
    for request in requests {
        server.submit(request.clone()).expect("the request fits");
    }
    while server.step(&mut collected).expect("a step") {
        server.engine().verify().expect("nothing is broken");
    }
    collected
}

/// Serves prompts, the same prompts again, and second turns, in a pool with memory for one request. Returns the tokens
/// of the second turns, and the number of pages that were loaded.
fn rounds<R: Runner>(server: &mut Server<R>, first: &[Request], expected: &[&Vec<u32>]) -> (Vec<Vec<u32>>, u64) {
    let collected = run(server, first);
    assert_eq!(tokens_of(&collected), expected);
    let collected = run(server, first);
    assert_eq!(tokens_of(&collected), expected, "again");
    let turn = |(request, answer): (&Request, &Vec<u32>)| {
        let mut request = request.clone();
        request.prompt.extend(answer.iter().copied().chain(3..9).map(TokenId::new));
        request
    };
    let turns: Vec<_> = first.iter().zip(tokens_of(&collected)).map(turn).collect();
    let collected = run(server, &turns);
    (collected.tokens.values().cloned().collect(), server.engine().stats().loaded_pages)
}

fn same_tokens(name: &str) {
    let model = common::model(name);
    let cases = common::cases(name);
    let first = requests(&cases);
    let expected: Vec<_> = cases.iter().map(|case| &case.tokens).collect();
    let longest = first.iter().map(|request| request.prompt.len()).max().expect("a request");
    let largest = [Request { prompt: vec![Default::default(); longest + 60], ..first[0].clone() }];
    let schedule = common::serving::Schedule::SmallPool;
    for (page_size, overlap, fail_every) in [(4, false, None), (4, true, None), (16, true, Some(5)), (1, true, None)] {
        let plain = Setting { page_size, overlap, fail_every, schedule, ..Setting::default() };
        let runner = CpuRunner::new(&model);
        let mut without = server(runner, &largest, plain, Scaling::Static, None);
        let (second, loaded) = rounds(&mut without, &first, &expected);
        assert_eq!(loaded, 0);
        // Swap memory for all pages, and for a part of them.
        let tracks = without.engine().shape().table.tracks;
        let part = if tracks == 1 { 40 } else { (480 / page_size).max(120) };
        for swap_pages in [4000, part] {
            let setting = Setting { swap_pages, ..plain };
            let runner = CpuRunner::new(&model);
            let mut with = server(runner, &largest, setting, Scaling::Static, None);
            let (tokens, loaded) = rounds(&mut with, &first, &expected);
            assert_eq!(tokens, second, "{name}, {setting:?}");
            assert!(loaded > 0, "{name}, {setting:?}: no page was loaded");

            let runner = LateRunner(CpuRunner::new(&model));
            let options = LateOptions(CpuOptions::with_threads(1));
            let mut late = server_on(runner, &largest, setting, Scaling::Static, options);
            let (tokens, late_loaded) = rounds(&mut late, &first, &expected);
            assert_eq!(tokens, second, "{name}, {setting:?}, late");
            assert!(late_loaded > 0, "{name}, {setting:?}: no page was loaded late");
        }
    }
}

#[test]
fn qwen3_generates_equal_texts_with_swap_pages() {
    same_tokens("qwen3-tiny");
}

#[test]
fn gpt_oss_generates_equal_texts_with_swap_pages_and_groups() {
    same_tokens("gpt-oss-tiny");
}

#[test]
fn gemma3_generates_equal_texts_with_swap_pages_and_groups() {
    same_tokens("gemma3-tiny");
}
