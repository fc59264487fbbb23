//! Serves tiny models on a GPU, or on the stand-in driver, and compares the logits with the CPU's.
#![cfg(feature = "cuda")]

mod common;

use std::collections::BTreeMap;
use std::path::Path;
use std::rc::Rc;
use std::thread::yield_now;

use common::files::Dir;
use common::gpu::{device, lock_gpus};
use kvarena::backend::{OpenBackend, SwapMemory};
use kvarena::id::{MoveId, SwapPageId};
use kvarena::layout::Groups;
use kvarena::plan::PageMove;
use kvarena::{Backend, Capacity, CpuOptions, Engine, EngineConfig, KvDtype, PageId, PoolConfig};
use kvarena_host::cpu::CpuRunner;
use kvarena_host::gpu::device::Device;
use kvarena_host::gpu::products::Choice;
use kvarena_host::gpu::ranks::{Ranks, RanksRunner, WeightSource};
use kvarena_host::gpu::runner::{GpuOptions, GpuRunner};
use kvarena_host::gpu::weights::Share;
use kvarena_host::model::Model;
use kvarena_host::model_files::ModelFiles;
use kvarena_host::request::{Defaults, Request};
use kvarena_host::runner::Runner;
use kvarena_host::sample::Sampling;
use kvarena_host::server::{Policy, Server, Sink};
use kvarena_host::stream::Stream;
use kvarena_tiers::tier::RankMemory;
use serde_json::json;

const POLICY: Policy =
    Policy { chunk: 512, concurrency: 16, overlap: true, fail_every: None, wait_for_leaders: false, drafts: None };

const OPTIONS: GpuOptions = GpuOptions {
    chunk: POLICY.chunk,
    concurrency: POLICY.concurrency,
    drafts: 0,
    trees: false,
    graphs: true,
    choice: Choice::Fastest,
    sums: None,
    keep_logits: true,
    keep_times: false,
};

/// The logits of prompt tokens and of the first new token, by request and position.
#[derive(Default)]
struct Logits(BTreeMap<(usize, u32), Vec<f32>>);

impl Sink for Logits {
    fn prompt(&mut self, stream: &Stream, position: u32, logits: &[f32]) {
        self.0.insert((stream.request, position), logits.to_vec());
    }

    fn token(&mut self, stream: &Stream, logits: &[f32]) {
        self.0.entry((stream.request, u32::MAX)).or_insert_with(|| logits.to_vec());
    }
}

/// Serves requests one after the other. Also returns the number of prompt tokens that were cached.
fn serve<R: Runner>(
    runner: R,
    options: impl OpenBackend<Backend = R::Backend>,
    warm: impl FnOnce(&mut R, &mut R::Backend),
    (policy, requests): (Policy, &[Request]),
) -> (Logits, u64) {
    let config = runner.config();
    let pool = PoolConfig {
        layers: config.layers as u32,
        groups: if config.delta.is_some() { config.groups() } else { Groups::ONE },
        shape: config.kv_shape(),
        dtype: KvDtype::Bf16,
        capacity: Capacity::Pages(200),
        ..PoolConfig::default()
    };
    let page_size = pool.page_size.max(pool.state_page_size(8).expect("pages hold a state"));
    let pool = PoolConfig { page_size, ..pool };
    let config = EngineConfig {
        max_sequences: POLICY.concurrency,
        max_sequence_len: config.max_len as u32,
        max_tokens: u64::from(POLICY.concurrency) * config.max_len as u64,
        max_steps: 2 * POLICY.concurrency,
        max_step_tokens: POLICY.step_tokens(),
        ..EngineConfig::from(pool)
    };
    let mut engine = Engine::new(config, options).expect("the config is sound");
    let mut runner = runner;
    warm(&mut runner, engine.backend_mut());
    let mut server = Server::new(runner, engine, policy);
    let mut logits = Logits::default();
    for request in requests {
        server.submit(request.clone()).expect("it fits");
        server.run(&mut logits).expect("it serves");
    }
    (logits, server.engine().stats().hit_tokens)
}

/// Checks that the GPU's logits nearly equal the CPU's, and that both find the same tokens in their caches. Returns
/// the number of these tokens.
fn compare(device: &Rc<Device>, dir: &Path, policy: Policy, requests: &[Request]) -> u64 {
    let model = Model::read(dir).expect("the model loads");
    let options = CpuOptions::with_threads(1);
    let (expected, hits) = serve(CpuRunner::new(&model), options, |_, _| {}, (policy, requests));
    let weights = WeightSource::Files(ModelFiles::Folder(dir.into())).weights(device, &model.config, Share::WHOLE);
    let weights = Rc::new(weights.expect("the weights fit"));
    let runner = GpuRunner::new(device.clone(), model.config.clone(), weights, OPTIONS);
    let runner = runner.expect("the GPU can serve");
    let options = runner.backend();
    let warm = |runner: &mut GpuRunner, backend: &mut _| runner.warm(backend, &[1]).expect("kernels");
    let (found, found_hits) = serve(runner, options, warm, (policy, requests));
    assert_eq!(found_hits, hits, "cached tokens");
    assert!(found.0.keys().eq(expected.0.keys()));
    for (place, expected) in &expected.0 {
        let found = &found.0[place];
        assert_eq!(found.len(), expected.len(), "{place:?} has logits");
        let squares = |numbers: Vec<f32>| -> f32 { numbers.iter().map(|x| x * x).sum() };
        let apart = found.iter().zip(expected).map(|(x, y)| x - y).collect();
        let apart = (squares(apart) / squares(expected.clone())).sqrt();
        // A GPU rounds activations to bf16: up to 0.0304 on an H200, 0.036 on a CPU that rounds likewise.
        assert!(apart < 0.045, "{place:?}: the logits differ by {apart} of their size");
    }
    hits
}

fn request(prompt: impl Iterator<Item = u32>) -> Request {
    let sampling = Sampling::default();
    Defaults { max_new_tokens: Some(2), samples: 1, sampling, stop: Vec::new() }.request(prompt.collect())
}

/// The prompts have more tokens than a step has draws, so each prompt takes several steps. Several steps use each
/// part of the memory for kept logits.
#[test]
fn long_prompts_are_scored_whole() {
    let _lock = lock_gpus();
    let Some(device) = device() else { return };
    let scored = |i: u32| Request { scores_prompt: true, ..request((0..300).map(|j| (7 * j + i) % 500)) };
    let requests: Vec<Request> = (0..3_u32).map(scored).collect();
    compare(&device, &common::dir("qwen3-tiny"), POLICY, &requests);
}

/// A yarn rope scales only the logits of the layers that use it.
#[test]
fn layers_have_the_amplitude_of_their_rope() {
    let _lock = lock_gpus();
    let Some(device) = device() else { return };
    let dir = Dir::with_config("gemma3-tiny", |config| {
        config["rope_parameters"]["full_attention"] = json!({ "rope_type": "yarn",
            "rope_theta": 1e6, "factor": 64.0, "original_max_position_embeddings": 32 });
    });
    let requests: Vec<Request> = (0..4).map(|i| request((0..60).map(|j| (7 * j + i) % 500))).collect();
    compare(&device, dir.path(), POLICY, &requests);
}

/// A prompt, the same prompt and its next turn, in one step or in several, with and without failed steps. A failed
/// step loses the states that it updates in place.
#[test]
fn prompts_with_cached_states_have_the_cpus_logits() {
    let _lock = lock_gpus();
    let Some(device) = device() else { return };
    let lens = [300, 300, 420];
    let requests: Vec<Request> = lens.iter().map(|&len| request((0..len).map(|j| (7 * j + j / 9) % 500))).collect();
    for (chunk, fail_every) in [(512, None), (60, None), (60, Some(4))] {
        let policy = Policy { chunk, fail_every, ..POLICY };
        let hits = compare(&device, &common::dir("qwen3-5-tiny"), policy, &requests);
        assert!(hits > 200, "{hits} cached tokens");
    }
}

/// A swap page has a part on each rank. A lease contains the parts in the order of the ranks.
#[test]
fn a_lease_over_ranks_has_the_part_of_each_rank() {
    let Some(_device) = device() else { return };
    let dir = common::dir("qwen3-tiny");
    let config = Model::read(&dir).expect("the model is read").config;
    let mut runner = match RanksRunner::new(&config, &WeightSource::Files(ModelFiles::Folder(dir)), OPTIONS, 2) {
        Ok(runner) => runner,
        Err(error) => return println!("not run on two GPUs: {error}"),
    };
    let pool = PoolConfig {
        layers: config.layers as u32,
        shape: runner.config().kv_shape(),
        dtype: KvDtype::Bf16,
        capacity: Capacity::Pages(200),
        swap_pages: 2,
        ..PoolConfig::default()
    };
    let config = EngineConfig {
        max_sequences: POLICY.concurrency,
        max_sequence_len: 2048,
        max_step_tokens: POLICY.step_tokens(),
        ..EngineConfig::from(pool)
    };
    let mut engine = Engine::new(config, runner.backend()).expect("the config is sound");
    runner.warm(engine.backend_mut(), &[1]).expect("kernels");
    let bytes = engine.shape().layout.page_bytes() as usize;
    let ranks = engine.backend_mut();
    while ranks.swap_pages() < 2 {
        ranks.moved().expect("nothing failed");
        yield_now();
    }
    let [first, second] = [0, 1].map(SwapPageId::new);
    assert_eq!(ranks.ranks(), 2);
    for (page, mut lease) in (0..).zip(ranks.lease_all_mut(&[first, second])) {
        (0..2).for_each(|rank| Ranks::part_mut(&mut lease, rank).fill(10 * page + 1 + rank as u8));
    }
    let parts = |ranks: &mut Ranks, page| {
        let lease = ranks.lease(page);
        [0, 1].map(|rank| Ranks::part(&lease, rank).to_vec())
    };
    let filled = |values: [u8; 2]| values.map(|value| vec![value; bytes]);
    assert_eq!([first, second].map(|page| parts(ranks, page)), [[1, 2], [11, 12]].map(filled));
    let leases = ranks.lease_all(&[second, first]);
    assert_eq!([0, 1].map(|at| Ranks::part(&leases[at], 1)[0]), [12, 2]);
    drop(leases);
    let (device, [load, save]) = (PageId::new(3), [1, 2].map(MoveId::new));
    ranks.load_pages(load, &[PageMove { device, swap: first }]).expect("the pages exist");
    ranks.save_pages(save, &[PageMove { device, swap: second }]).expect("the pages exist");
    while ranks.moved().expect("nothing failed").saved < save {
        yield_now();
    }
    assert_eq!(parts(ranks, second), filled([1, 2]));
}
