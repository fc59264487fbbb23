//! Tests models with groups of layers. Groups do not change the tokens, and no step reads a free page. Prompts hit the
//! pages of an equal prompt or of an earlier turn.

mod common;

use common::contiguous::greedy;
use common::serving::{CollectedStreams, Setting, requests, server};
use kvarena::config::PrefixMode;
use kvarena::error::ConfigError;
use kvarena::layout::{Groups, Layout, Reach, Scaling};
use kvarena::testkit::poison::poison;
use kvarena::{KvDtype, PoolConfig, TokenId};
use kvarena_host::config::ModelConfig;
use kvarena_host::cpu::CpuRunner;
use kvarena_host::error::Fault;
use kvarena_host::files::read_json;
use kvarena_host::model::Model;
use kvarena_host::request::Request;
use kvarena_host::server::Server;

/// New tokens of each request.
const NEW: usize = 20;

/// Serves requests. After each step, verifies the engine and fills every free page with NaN.
fn run(server: &mut Server<CpuRunner<'_>>, requests: &[Request], setting: Setting) -> CollectedStreams {
    let mut collected = CollectedStreams::default();
    for request in requests {
        server.submit(request.clone()).expect("the request fits");
    }
    while server.step(&mut collected).unwrap_or_else(|error| panic!("{setting:?}: {error}")) {
        server.engine().verify().unwrap_or_else(|broken| panic!("{setting:?}: {broken}"));
        poison(server.engine_mut(), |cpu, page, bytes| {
            cpu.write_page(page, bytes).expect("the page exists");
        });
    }
    collected
}

/// Returns the requests of a second turn. Each prompt is the first prompt, its answer and some more tokens.
fn second_turns(requests: &[Request], collected: &CollectedStreams) -> Vec<Request> {
    let turn = |(request, answer): (&Request, &Vec<u32>)| {
        let mut request = request.clone();
        request.prompt.extend(answer.iter().copied().chain(3..14).map(TokenId::new));
        request
    };
    requests.iter().zip(tokens_of(collected)).map(turn).collect()
}

fn tokens_of(collected: &CollectedStreams) -> Vec<&Vec<u32>> {
    collected.tokens.values().collect()
}

/// Runs three rounds: prompts, the same prompts again, and second turns. Groups lose no hit: each hit has all whole
/// pages of the computed tokens.
fn rounds(name: &str, overlap: bool) {
    let model = common::model(name);
    let cases = common::cases(name);
    let first = requests(&cases);
    let expected: Vec<_> = cases.iter().map(|case| &case.tokens).collect();
    let mut second = Vec::new();
    for (page_size, chunk) in [1, 8, 16].into_iter().flat_map(|size| [(size, 512), (size, 48)]) {
        // One group cannot contain layers of two shapes.
        let has_one_shape = model.config.window_heads.is_none();
        for groups in [false, true].into_iter().skip(usize::from(!has_one_shape)) {
            let setting = Setting { page_size, chunk, overlap, groups, ..Setting::default() };
            let largest = Request { prompt: vec![Default::default(); 2000], ..first[0].clone() };
            let runner = CpuRunner::new(&model);
            let mut server = server(runner, &[largest], setting, Scaling::Static, None);
            assert_eq!(*server.engine().shape().layout.groups() == Groups::ONE, !groups);
            let collected = run(&mut server, &first, setting);
            assert_eq!(tokens_of(&collected), expected, "{name}, {setting:?}");

            let collected = run(&mut server, &first, setting);
            assert_eq!(tokens_of(&collected), expected, "{name}, {setting:?}, again");
            let hits: Vec<_> =
                first.iter().map(|request| (request.prompt.len() as u32 - 1) / page_size * page_size).collect();
            assert_eq!(sorted(&collected.cached), sorted(&hits), "{name}, {setting:?}, again");

            let turns = second_turns(&first, &collected);
            if second.is_empty() {
                second = turns.iter().map(|turn| tokens_without_pages(&model, turn)).collect();
            }
            let collected = run(&mut server, &turns, setting);
            assert_eq!(tokens_of(&collected), second.iter().collect::<Vec<_>>(), "{name}, {setting:?}, turn");
            // The last token of an answer has no K and V.
            let hits: Vec<_> =
                first.iter().map(|request| ((request.prompt.len() + NEW - 1) as u32) / page_size * page_size).collect();
            assert_eq!(sorted(&collected.cached), sorted(&hits), "{name}, {setting:?}, turn");
        }
    }
}

/// Returns the answer's tokens from the forward pass with contiguous K and V.
fn tokens_without_pages(model: &Model, request: &Request) -> Vec<u32> {
    let prompt: Vec<_> = request.prompt.iter().map(|token| token.raw()).collect();
    greedy(model, &prompt, NEW, usize::MAX).0
}

macro_rules! generate_equal_texts {
    ($($test:ident: $model:literal, $overlap:literal;)*) => {
        $(#[test]
        fn $test() {
            rounds($model, $overlap);
        })*
    };
}

generate_equal_texts! {
    gpt_oss: "gpt-oss-tiny", false;
    gpt_oss_with_overlap: "gpt-oss-tiny", true;
    gemma3: "gemma3-tiny", false;
    gemma3_with_overlap: "gemma3-tiny", true;
    gemma4: "gemma4-tiny", false;
    gemma4_with_overlap: "gemma4-tiny", true;
    llama4: "llama4-tiny", false;
    llama4_with_overlap: "llama4-tiny", true;
}

fn sorted(numbers: &[u32]) -> Vec<u32> {
    let mut numbers = numbers.to_vec();
    numbers.sort_unstable();
    numbers
}

/// Layers with windows have 4 heads of 64. A page has the size of 3 layers with 1 head of 128, so it holds one layer
/// with a window. The bytes of half a layer with a window are unused.
#[test]
fn layers_of_two_shapes_share_pages() {
    let model = common::model("gemma4-tiny");
    let pool = PoolConfig {
        layers: 6,
        groups: model.config.groups(),
        shape: model.config.kv_shape(),
        dtype: KvDtype::Bf16,
        ..PoolConfig::default()
    };
    let layout = pool.layout().expect("the config is sound");
    assert_eq!([layout.lanes_of(0), layout.lanes_of(1), layout.tracks_of(1)], [3, 1, 3]);
    assert_eq!(layout.unused_bytes(1), 16 * 2 * 2 * 128);
    let first = PoolConfig { layout: Layout::LayerFirst, ..pool };
    assert_eq!(first.layout(), Err(ConfigError::LayerFirst { group: 1 }));
}

/// The host's groups equal those that the core reads from the same file.
#[test]
fn the_groups_are_those_of_the_config_file() {
    for name in common::GROUPED {
        let model = common::model(name);
        let file = std::fs::read_to_string(common::dir(name).join("config.json")).expect("a file");
        let pool = PoolConfig::from_hf(&file).expect("the config makes a pool");
        assert_eq!(model.config.groups(), pool.groups, "{name}");
        let chunks = name == "llama4-tiny";
        let reach = if chunks { Reach::Chunk(32) } else { Reach::Window(32) };
        assert_eq!(pool.groups.reach(1), reach, "{name}");
    }
    let plain = common::model("qwen3-tiny");
    assert_eq!(plain.config.groups(), Groups::ONE);
}

/// The layers with a window have a shape of their own, so a pool needs groups.
#[test]
fn configs_of_two_shapes_without_groups_are_rejected() {
    let path = common::dir("gemma4-tiny").join("config.json");
    let config = read_json(&path).expect("a config");
    let refuses = |types: Vec<&str>, word: &str| {
        let mut config = config.clone();
        config["num_hidden_layers"] = types.len().into();
        config["layer_types"] = types.into();
        let error = ModelConfig::parse(&path, &config).expect_err("there are no such groups");
        assert!(error.fault == Fault::Model && error.message.contains(word), "{error}");
    };
    refuses(vec!["sliding_attention"; 6], "group 0");
    refuses(["sliding_attention", "full_attention"].repeat(150), "300");

    let mut config = config.clone();
    config["layer_types"] = vec!["full_attention"; 6].into();
    let full = ModelConfig::parse(&path, &config).expect("all layers have one shape");
    assert_eq!(full.groups(), Groups::ONE);
}

/// The pool has memory for the longest request only. Streams are preempted, but generate the same tokens.
#[test]
fn preempted_streams_generate_the_same_tokens() {
    for name in common::GROUPED {
        let model = common::model(name);
        let cases = common::cases(name);
        let requests = requests(&cases);
        let expected: Vec<_> = cases.iter().map(|case| &case.tokens).collect();
        for prefix in [PrefixMode::Radix, PrefixMode::None] {
            let setting = Setting {
                page_size: 8,
                chunk: 48,
                schedule: common::serving::Schedule::SmallPool,
                prefix,
                ..Setting::default()
            };
            let runner = CpuRunner::new(&model);
            let mut server = server(runner, &requests, setting, Scaling::Static, None);
            let collected = run(&mut server, &requests, setting);
            assert_eq!(tokens_of(&collected), expected, "{name}, {setting:?}");
            assert!(server.tally().0.preemptions > 0, "{name}, {setting:?}");
        }
    }
}

/// One of several equal prompts is computed. The other streams wait, and hit the pages that their leader has kept for
/// them.
#[test]
fn equal_prompts_are_computed_once() {
    for name in common::GROUPED {
        let model = common::model(name);
        let cases = common::cases(name);
        let longest = cases.iter().max_by_key(|case| case.prompt.len()).expect("there are cases");
        let requests = vec![requests(std::slice::from_ref(longest)).remove(0); 4];
        for overlap in [false, true] {
            let setting = Setting { page_size: 1, chunk: 48, overlap, ..Setting::default() };
            let runner = CpuRunner::new(&model);
            let mut server = server(runner, &requests, setting, Scaling::Static, None);
            let collected = run(&mut server, &requests, setting);
            assert_eq!(tokens_of(&collected), [&longest.tokens; 4], "{name}, {setting:?}");
            let hits = 3 * (longest.prompt.len() as u64 - 1);
            assert_eq!(server.engine().stats().hit_tokens, hits, "{name}, {setting:?}");
        }
    }
}
