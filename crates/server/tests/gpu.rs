//! Tests the model on a GPU or on the stand-in driver: its tokens equal the CPU's within rounding, the weights of all
//! ranks together equal those of one GPU, and errors name the reason why a GPU cannot serve.
#![cfg(feature = "cuda")]

mod common;

use std::collections::VecDeque;
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};

use clap::Parser;
use common::files::Dir;
use common::gpu::{device, lock_gpus};
use common::run_server;
use common::serving::CollectedStreams;
use cudarc::driver::sys;
use kvarena::backend::cuda::{Cuda, CudaError, PinnedBuffer};
use kvarena_host::clock::Clock;
use kvarena_host::config::ModelConfig;
use kvarena_host::draft::Drafting;
use kvarena_host::error::Error;
use kvarena_host::gpu::GpuError;
use kvarena_host::gpu::device::Device;
use kvarena_host::gpu::forward::InjectedFault;
use kvarena_host::gpu::nccl::Comm;
use kvarena_host::gpu::products::Choice;
use kvarena_host::gpu::runner::GpuRunner;
use kvarena_host::gpu::sums::Transport;
use kvarena_host::gpu::weights::{Share, Weights};
use kvarena_host::runner::{Runner, Work};
use kvarena_host::sample::Sampling;
use kvarena_host::server::Server;
use kvarena_host::source::Random;
use kvarena_server::args::{Args, Shape};
use kvarena_server::gpu::check::{self, Case, Schedule, Setting};
use kvarena_server::setup;

/// Returns the options of `--check`.
fn args(more: &[&str]) -> Args {
    let words = ["kvarena-server", "--check"].iter().chain(more);
    Args::try_parse_from(words).expect("options")
}

/// Checks every setting for both models, deliberate faults, and draws with and without overlap and graphs.
#[test]
fn the_gpu_generates_the_cpus_text() {
    let _lock = lock_gpus();
    if device().is_none() {
        return;
    }
    let mut output = Vec::new();
    let outcome = check::run(&args(&[]), &mut output);
    let output = String::from_utf8(output).expect("UTF-8");
    assert!(outcome.is_ok(), "{output}{outcome:?}");
    assert_eq!(output.matches(": ok,").count(), 2 * check::settings().len());
    assert_eq!(output.matches(" found: ").count(), 8);
    let every_ninth = check::settings().into_iter().step_by(9).count();
    assert_eq!(output.matches("changed draws equal the CPU's").count(), 2 * every_ninth);
}

/// A model directory without golden prompts is checked with random ones, in the settings that its layers support.
#[test]
fn a_given_model_is_checked() {
    let _lock = lock_gpus();
    let Some(device) = device() else { return };
    let dir = Dir::copy_of("qwen3-tiny");
    let mut case = Case::folder(&device, dir.path()).expect("a served model");
    assert_eq!(case.settings(), check::settings());
    let setting = Setting::default();
    let distance = case.distance(setting).expect("served");
    assert!(distance.is_close() && distance.tokens == 160, "{distance:?}");
    let wrong = case.distance(Setting { fault: InjectedFault::Position, ..setting });
    assert!(!wrong.expect("served").is_close());
    let windows = Case::folder(&device, &common::dir("gemma3-tiny")).expect("a served model");
    let settings = windows.settings();
    assert!(settings.iter().all(|setting| setting.sparse.is_none()) && settings.len() > 64);
    let few = Dir::with_config("qwen3-tiny", |config| config["max_position_embeddings"] = 146.into());
    let error = Case::folder(&device, few.path()).err().expect("too few positions");
    assert!(error.message.contains("147 positions"), "{error}");
}

/// Edited logits yield the tokens that the specification chooses, with graphs, overlap, forks, drafts and failed steps.
/// A step without edits launches no kernel for edits: the test runs itself in a subprocess, and the stand-in driver
/// counts the launches.
#[test]
fn changed_logits_are_the_cpus_and_cost_others_nothing() {
    const RUNS: &str = "KVARENA_TEST_SHAPED";
    let lock = lock_gpus();
    let Some(device) = device() else { return };
    if let Ok(shaped) = std::env::var(RUNS) {
        let case = Case::golden(&device).expect("the golden model");
        let tokens = case.tokens(Setting { shaped: shaped == "1", ..Setting::default() });
        assert!(!tokens.expect("served").is_empty());
        return;
    }
    let drafts = Some(Drafting { tokens: 4, tree: false });
    let mut case = Case::golden(&device).expect("the golden model");
    for setting in [
        Setting::default(),
        Setting { overlap: false, ..Setting::default() },
        Setting { graphs: false, schedule: Schedule::Forked, ..Setting::default() },
        Setting { schedule: Schedule::Chunked, fail_every: Some(3), ..Setting::default() },
        Setting { overlap: false, drafts, ..Setting::default() },
    ] {
        let changed = case.shaped_draws(setting).unwrap_or_else(|error| panic!("{error}"));
        assert!(changed > 100, "{setting:?}: {changed}");
    }
    drop((case, lock, device));
    let launches = |shaped: &str| {
        let name = "changed_logits_are_the_cpus_and_cost_others_nothing";
        let own = std::env::current_exe().expect("a path");
        let mut command = std::process::Command::new(own);
        command.args(["--exact", name, "--nocapture"]).env(RUNS, shaped);
        let ran = command.env("FAKE_DRIVER_STATISTICS", "1").output().expect("it runs");
        let err = String::from_utf8_lossy(&ran.stderr).into_owned();
        assert!(ran.status.success(), "{err}");
        let line = err.lines().find(|line| line.starts_with("sample_shaped "))?;
        Some(line.split_whitespace().nth(1)?.parse::<u64>().expect("a number"))
    };
    // A real GPU counts no launches.
    if let Some(shaped) = launches("1") {
        assert!(shaped > 0);
        assert_eq!(launches("0"), Some(0));
    }
}

/// Returns the weights at an address.
fn weights_at(device: &Device, address: u64, count: usize) -> Vec<u16> {
    let mut memory = PinnedBuffer::new(&device.gpu, 2 * count).expect("memory");
    // SAFETY: the tensor has that many numbers, and the copy is waited for.
    unsafe { device.copy_to_host(&mut memory, 0, address, 2 * count) }.expect("a copy");
    device.stream.synchronize().expect("the copy is done");
    bytemuck::cast_slice(memory.as_slice()).to_vec()
}

/// The weights of all ranks together equal those of one GPU.
#[test]
fn shares_make_a_whole() {
    let _lock = lock_gpus();
    let Some(device) = device() else { return };
    let config = setup::config_of(Shape::LlamaTiny64).expect("a shape");
    let random = |share| Weights::random(&device, &config, share, Random { seed: 3 }).expect("weights");
    let whole = random(Share::WHOLE);
    let ModelConfig { hidden, head_dim, q_heads, kv_heads, intermediate, .. } = config;
    let ranks = 2;
    for rank in 0..ranks {
        let part = random(Share { rank, ranks });
        for (own, all) in part.layers.iter().zip(&whole.layers) {
            // Compares the rank's rows of consecutive matrices.
            let rows = |own: u64, all: u64, heights: &[usize]| {
                let (mut at, mut from) = (0, 0);
                for height in heights {
                    let count = height / ranks * hidden;
                    let expected = weights_at(&device, all + 2 * (from + rank * count) as u64, count);
                    assert!(weights_at(&device, own + 2 * at as u64, count) == expected);
                    (at, from) = (at + count, from + height * hidden);
                }
            };
            rows(own.qkv, all.qkv, &[q_heads, kv_heads, kv_heads].map(|heads| heads * head_dim));
            rows(own.gate_up, all.gate_up, &[intermediate, intermediate]);
            // Compares the rank's columns of a matrix.
            let cols = |own: u64, all: u64, width: usize| {
                let all = weights_at(&device, all, hidden * width);
                let own = weights_at(&device, own, hidden * width / ranks);
                let part = width / ranks;
                for (own, all) in own.chunks(part).zip(all.chunks(width)) {
                    assert!(own == &all[rank * part..][..part]);
                }
            };
            cols(own.o, all.o, q_heads * head_dim);
            cols(own.down, all.down, intermediate);
        }
        assert!(part.bytes() < whole.bytes());
    }
    let odd = Share { rank: 0, ranks: 3 };
    assert!(matches!(odd.of(&config), Err(GpuError::Ranks { ranks: 3, what: "query heads" })));
}

/// A model on two GPUs is as close to the reference as on one. Its tokens may differ, because sums over ranks round
/// differently.
#[test]
fn two_gpus_are_as_close_as_one() {
    let _lock = lock_gpus();
    if device().is_none() || Device::open_number(1).is_err() || Comm::version().is_err() {
        return;
    }
    // First the ranks sum through peer memory, if the GPUs can access it; then through NCCL.
    for sums in [None, Some(Transport::Nccl)] {
        let mut output = Vec::new();
        let nccl: &[&str] = if sums.is_some() { &["--sums", "nccl"] } else { &[] };
        let checked = check::run(&args(&[&["--tp", "2"], nccl].concat()), &mut output);
        let output = String::from_utf8_lossy(&output);
        assert!(checked.is_ok(), "{sums:?}, {checked:?}: {output}");
        let every_ninth = check::settings().into_iter().step_by(9).count();
        assert_eq!(output.matches(": ok,").count(), 2 * (every_ninth + 1), "{sums:?}: {output}");
        assert_eq!(output.matches("draws agree").count(), 2, "{sums:?}: {output}");
        assert_eq!(output.matches("changed draws equal").count(), 2, "{sums:?}: {output}");
    }
}

/// The program rejects several GPUs without `--backend cuda`, with a model that cannot be divided, or without NCCL. It
/// names the reason.
#[test]
fn several_gpus_are_refused_by_name() {
    let _lock = lock_gpus();
    let ran = run_server(&["--tp", "2"], "");
    assert_eq!(ran.code, Some(2), "{}", ran.err);
    if device().is_none() {
        return;
    }
    let ran = run_server(&["--backend", "cuda", "--tp", "2"], "");
    assert_eq!(ran.code, Some(3), "{}", ran.err);
    assert!(ran.err.contains("its heads of K and V"), "the glossary's model has one: {}", ran.err);
    let (code, words) = match Comm::version() {
        Err(_) => (3, "libnccl.so.2"),
        // crates/host/tests/fake_cublaslt/nccl.cc
        Ok(_) if std::env::var_os("FAKE_NCCL_REFUSES").is_some() => (1, "ncclCommInitAll failed: it is a fake"),
        Ok(_) => return,
    };
    let shape = ["--random-model", "llama-tiny-64", "--random-requests", "1:9"];
    let ran = run_server(&[&["--backend", "cuda", "--tp", "2"], &shape[..]].concat(), "");
    assert_eq!(ran.code, Some(code), "{}", ran.err);
    assert!(ran.err.contains(words), "{}", ran.err);
}

/// The loop sees a stop token while the next step is in flight. It drops the stream's token of that step, and the other
/// streams continue.
#[test]
fn a_stop_is_seen_a_step_late() {
    let _lock = lock_gpus();
    let Some(device) = device() else { return };
    let mut case = Case::golden(&device).expect("the golden model");
    for (graphs, overlap) in [(true, true), (false, true), (true, false)] {
        let setting = Setting { graphs, overlap, ..Setting::default() };
        let stop = Some(case.tokens(setting).expect("served")[&(1, 0)][7]);
        // `distance` checks that each stream ends at its stop token and not before.
        let setting = Setting { stop, ..setting };
        assert!(case.tokens(setting).expect("served")[&(1, 0)].len() <= 8, "{setting:?}");
        let distance = case.distance(setting).expect("served");
        assert!(distance.is_close(), "{setting:?}: {distance:?}");
    }
}

/// A failed step is aborted with the step launched after it, and both are computed again.
#[test]
fn failed_steps_change_nothing() {
    let _lock = lock_gpus();
    let Some(device) = device() else { return };
    let mut case = Case::golden(&device).expect("the golden model");
    for (setting, fail_every) in check::settings().into_iter().step_by(7).zip([3, 5, 7].iter().cycle()) {
        let setting = Setting { fail_every: Some(*fail_every), ..setting };
        let distance = case.distance(setting).expect("served");
        assert!(distance.is_close(), "{setting:?}: {distance:?}");
    }
}

/// Before the device begins step n, the loop plans, stages and launches step n + 1. This changes no data that step n
/// reads.
#[test]
fn staging_ahead_touches_nothing_in_flight() {
    let _lock = lock_gpus();
    let Some(device) = device() else { return };
    let case = Case::golden(&device).expect("the golden model");
    let launched = [(true, Choice::Gemm, None), (false, Choice::First, None)];
    for (graphs, choice, sparse) in launched.into_iter().chain([(true, Choice::First, Some(24))]) {
        let setting = Setting { graphs, choice, sparse, ..Setting::default() };
        let (runner, engine, policy) = case.parts(setting).expect("served");
        let runner = GatedRunner { runner, holds: false, gates: VecDeque::new() };
        let mut server = Server::new(runner, engine, policy);
        let mut serve = |holds| {
            server.runner_mut().holds = holds;
            for request in case.requests(setting, Sampling::default()) {
                server.submit(request).expect("a request");
            }
            let mut collected = CollectedStreams::default();
            server.run(&mut collected).expect("served");
            collected.tokens.into_values().collect::<Vec<_>>()
        };
        // The first run loads all kernels and captures graphs; the second has the prefixes cached.
        serve(false);
        let free = serve(false);
        assert_eq!(serve(true), free, "{setting:?}");
    }
}

/// Gate at which the device's stream waits for the host.
#[derive(Default)]
struct Gate {
    is_open: Mutex<bool>,
    opened: Condvar,
    is_passed: AtomicBool,
}

impl Gate {
    /// Waits for the gate; the driver calls this in the stream's order.
    unsafe extern "C" fn pass(gate: *mut c_void) {
        // SAFETY: `GatedRunner::launch` made the pointer from an `Arc`, for this one call.
        let gate = unsafe { Arc::from_raw(gate.cast::<Self>()) };
        let is_open = gate.is_open.lock().expect("no thread panicked");
        drop(gate.opened.wait_while(is_open, |is_open| !*is_open));
        gate.is_passed.store(true, Ordering::SeqCst);
    }
}

/// Holds back each step until the loop collects its tokens, after the launch of the next step.
struct GatedRunner {
    runner: GpuRunner,
    holds: bool,
    gates: VecDeque<Arc<Gate>>,
}

impl Runner for GatedRunner {
    type Backend = Cuda;

    fn config(&self) -> &ModelConfig {
        self.runner.config()
    }

    fn before_plan(&mut self) -> Result<(), Error> {
        self.runner.before_plan()
    }

    fn launch(&mut self, backend: &mut Cuda, work: &Work, clock: &mut Clock) -> Result<(), Error> {
        if self.holds {
            let gate = Arc::new(Gate::default());
            let (stream, own) = (self.runner.device().raw(), Arc::into_raw(gate.clone()));
            // SAFETY: the stream lives, and the function takes the pointee of `own`.
            let result = unsafe {
                let stream = stream as usize as sys::CUstream;
                sys::cuLaunchHostFunc(stream, Some(Gate::pass), own.cast_mut().cast())
            };
            assert_eq!(result, sys::CUresult::CUDA_SUCCESS);
            self.gates.push_back(gate);
        }
        self.runner.launch(backend, work, clock)
    }

    fn collect(
        &mut self,
        backend: &mut Cuda,
        work: &Work,
        fail: bool,
        tokens: &mut Vec<u32>,
        clock: &mut Clock,
    ) -> Result<(), Error> {
        if let Some(gate) = self.gates.pop_front() {
            assert!(!gate.is_passed.load(Ordering::SeqCst), "the device was held back");
            *gate.is_open.lock().expect("no thread panicked") = true;
            gate.opened.notify_all();
        }
        self.runner.collect(backend, work, fail, tokens, clock)
    }

    fn settle(&mut self, backend: &mut Cuda) -> Result<(), Error> {
        self.runner.settle(backend)
    }

    fn keeps_logits(&self) -> bool {
        self.runner.keeps_logits()
    }

    fn logits(&self, draw: usize) -> &[f32] {
        self.runner.logits(draw)
    }
}

/// The program exits with code 3 and names the reason if a GPU or a library is missing, or if the GPU cannot serve the
/// model or its K and V.
#[test]
fn the_program_names_why_it_cannot_run() {
    let refuse = |arguments: &[&str], words: &[&str]| {
        let ran = run_server(arguments, "");
        assert_eq!(ran.code, Some(3), "{arguments:?}: {}", ran.err);
        assert!(words.iter().all(|word| ran.err.contains(word)), "{arguments:?}: {}", ran.err);
    };
    let narrow = common::dir("llama-tiny");
    let narrow = narrow.to_str().expect("a path");
    refuse(&["--backend", "cuda", "--model", narrow, "--prompt", "1"], &["head_dim 32"]);
    refuse(&["--check", "--model", narrow], &["head_dim 32"]);
    refuse(&["--check", "--model", "/nowhere"], &["no folder /nowhere"]);
    refuse(&["--backend", "cuda", "--kv-dtype", "f16"], &["bf16"]);
    let _lock = lock_gpus();
    match Device::open() {
        Err(GpuError::Cuda(CudaError::NoDriver)) => {
            refuse(&["--backend", "cuda"], &["no GPU can be used", "driver"]);
            refuse(&["--check"], &["no GPU can be used"]);
            refuse(&["--bench", "decode"], &["no GPU can be used"]);
        }
        Err(GpuError::Cuda(CudaError::NoDevice { .. })) => {
            refuse(&["--backend", "cuda"], &["no GPU can be used"]);
        }
        Err(GpuError::NoCublasLt { .. }) => refuse(&["--backend", "cuda"], &["cublasLt"]),
        Ok(device) if device.gpu.free_memory().expect("a number") < 16 << 30 => {
            let large = ["--backend", "cuda", "--random-model", "qwen3-8b"];
            refuse(&[&large[..], &["--random-requests", "1:4"]].concat(), &["does not fit", "free"]);
        }
        _ => {}
    }
}
