//! Tests the model on a GPU or on the stand-in driver: its tokens equal the CPU's within rounding, the weights of all
//! ranks together equal those of one GPU, and errors name the reason why a GPU cannot serve.
#![cfg(feature = "cuda")]

#[path = "common/check/mod.rs"]
mod check;
mod common;

use std::collections::VecDeque;
use std::ffi::c_void;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};

use check::{Case, FAIL_EVERY, FEW, Schedule, Setting, samplings};
use common::files::Dir;
use common::gpu::{device, lock_gpus};
use common::serving::CollectedStreams;
use common::{MODEL, refuses, run_server};
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
use kvarena_server::args::Shape;
use kvarena_server::setup;

/// The folder of a model to check instead of the built-in ones.
const FOLDER: &str = "KVARENA_CHECK_MODEL";

/// Returns the models to check: a golden Qwen3 and a seeded Llama with heads of 64, or the folder of [`FOLDER`].
fn cases(device: &Rc<Device>) -> Vec<Case> {
    match std::env::var_os(FOLDER) {
        Some(dir) => vec![Case::folder(device, dir.as_ref())],
        None => vec![Case::golden(device), Case::seeded(device)],
    }
}

/// Checks that each setting's tokens are close to the reference's, and prints their distances.
fn are_close(case: &mut Case, settings: impl IntoIterator<Item = Setting>) {
    let mut wrong = Vec::new();
    for setting in settings {
        let distance = case.distance(setting);
        println!("{}: {distance:?}, {setting:?}", case.name);
        if !distance.is_close {
            wrong.push((distance, setting));
        }
    }
    assert!(wrong.is_empty(), "{}: {wrong:#?}", case.name);
}

/// Checks that edited logits yield the tokens that the specification chooses.
fn shaped_draws_agree(case: &mut Case, settings: impl IntoIterator<Item = Setting>) {
    for setting in settings {
        let changed = case.shaped_draws(setting);
        println!("{}: {changed} changed draws equal the CPU's, {setting:?}", case.name);
        assert!(changed > 100, "{setting:?}: {changed}");
    }
}

/// Checks every setting, deliberate faults, and draws with and without edits, overlap and graphs. Only in the built-in
/// models do wrong channels surely change tokens.
#[test]
fn the_gpu_generates_the_cpus_text() {
    let _lock = lock_gpus();
    let Some(device) = device() else { return };
    for case in &mut cases(&device) {
        let settings = case.settings();
        are_close(case, settings.clone());
        let is_built_in = std::env::var_os(FOLDER).is_none();
        let faults = [InjectedFault::Page, InjectedFault::Position, InjectedFault::Rotary];
        for fault in faults.into_iter().chain(is_built_in.then_some(InjectedFault::Labels)) {
            let sparse = (fault == InjectedFault::Labels).then_some(FEW);
            let distance = case.distance(Setting { fault, sparse, ..settings[0] });
            println!("{}: fault {fault:?}: {distance:?}", case.name);
            assert!(!distance.is_close, "{}: {fault:?} is not found", case.name);
        }
        samplings().into_iter().for_each(|sampling| case.draws_agree(sampling));
        if case.can_be_shaped() {
            shaped_draws_agree(case, settings.into_iter().step_by(9));
        }
    }
}

/// A model directory without golden prompts is checked with random ones, in the settings that its layers support.
#[test]
fn a_given_model_is_checked() {
    let _lock = lock_gpus();
    let Some(device) = device() else { return };
    let mut case = Case::folder(&device, Dir::copy_of("qwen3-tiny").path());
    assert_eq!(case.settings(), check::settings());
    let distance = case.distance(Setting::default());
    assert!(distance.is_close && distance.tokens == 160, "{distance:?}");
    let fault = InjectedFault::Position;
    assert!(!case.distance(Setting { fault, ..Setting::default() }).is_close);
    let settings = Case::folder(&device, &common::dir("gemma3-tiny")).settings();
    assert!(settings.iter().all(|setting| setting.sparse.is_none()) && settings.len() > 64);
}

/// Edited logits yield the tokens that the specification chooses, with graphs, overlap, forks, drafts and failed steps.
/// A step without edits launches no kernel for edits: the test runs itself in a subprocess, and the stand-in driver
/// counts the launches.
#[test]
fn changed_logits_are_the_cpus_and_cost_others_nothing() {
    const RUNS: &str = "KVARENA_TEST_SHAPED";
    let lock = lock_gpus();
    let Some(device) = device() else { return };
    let mut case = Case::golden(&device);
    if let Ok(shaped) = std::env::var(RUNS) {
        assert!(!case.tokens(Setting { shaped: shaped == "1", ..Setting::default() }).is_empty());
        return;
    }
    let plain = Setting::default();
    let settings = [
        plain,
        Setting { overlap: false, ..plain },
        Setting { graphs: false, schedule: Schedule::Forked, ..plain },
        Setting { schedule: Schedule::Chunked, fail_every: Some(3), ..plain },
        Setting { overlap: false, drafts: Some(Drafting { tokens: 4, tree: false }), ..plain },
    ];
    shaped_draws_agree(&mut case, settings);
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

/// A model on two GPUs is as close to the reference as on one, in every ninth setting, since each opens its GPUs again.
/// Its tokens may differ, because sums over ranks round differently; the test prints whether they do.
#[test]
fn two_gpus_are_as_close_as_one() {
    let _lock = lock_gpus();
    let Some(device) = device() else { return };
    if Device::open_number(1).is_err() || Comm::version().is_err() {
        return;
    }
    for case in &mut cases(&device) {
        let one = case.tokens(Setting::default());
        case.ranks = 2;
        // First the ranks sum through peer memory, if the GPUs can access it; then through NCCL.
        for sums in [None, Some(Transport::Nccl)] {
            case.sums = sums;
            let is_same = case.tokens(Setting::default()) == one;
            println!("{}: the tokens on 2 GPUs equal those on one: {is_same}, sums by {sums:?}", case.name);
            let failing = Setting { fail_every: Some(FAIL_EVERY), ..Setting::default() };
            let settings = case.settings();
            are_close(case, settings.into_iter().step_by(9).chain([failing]));
            case.draws_agree(samplings()[2]);
            if case.can_be_shaped() {
                shaped_draws_agree(case, [Setting::default()]);
            }
        }
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
    let mut case = Case::golden(&device);
    for (graphs, overlap) in [(true, true), (false, true), (true, false)] {
        let setting = Setting { graphs, overlap, ..Setting::default() };
        let setting = Setting { stop: Some(case.tokens(setting)[&(1, 0)][7]), ..setting };
        assert!(case.tokens(setting)[&(1, 0)].len() <= 8, "{setting:?}");
        // `distance` checks that each stream ends at its stop token and not before.
        are_close(&mut case, [setting]);
    }
}

/// A failed step is aborted with the step launched after it, and both are computed again.
#[test]
fn failed_steps_change_nothing() {
    let _lock = lock_gpus();
    let Some(device) = device() else { return };
    let settings = check::settings().into_iter().step_by(7).zip([3, 5, 7].into_iter().cycle());
    let settings = settings.map(|(setting, fail_every)| Setting { fail_every: Some(fail_every), ..setting });
    are_close(&mut Case::golden(&device), settings);
}

/// Before the device begins step n, the loop plans, stages and launches step n + 1. This changes no data that step n
/// reads.
#[test]
fn staging_ahead_touches_nothing_in_flight() {
    let _lock = lock_gpus();
    let Some(device) = device() else { return };
    let case = Case::golden(&device);
    let launched = [(true, Choice::Gemm, None), (false, Choice::First, None)];
    for (graphs, choice, sparse) in launched.into_iter().chain([(true, Choice::First, Some(24))]) {
        let setting = Setting { graphs, choice, sparse, ..Setting::default() };
        let (runner, engine, policy) = case.parts(setting);
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
    let refuse = |arguments: &[&str], words: &[&str]| refuses(arguments, MODEL, words);
    refuse(&["--backend", "cuda", "--model", &common::folder("llama-tiny"), "--prompt", "1"], &["head_dim 32"]);
    refuse(&["--backend", "cuda", "--model", "/nowhere"], &["no folder /nowhere"]);
    refuse(&["--backend", "cuda", "--kv-dtype", "f16"], &["bf16"]);
    let _lock = lock_gpus();
    match Device::open() {
        Err(GpuError::Cuda(CudaError::NoDriver)) => {
            refuse(&["--backend", "cuda"], &["no GPU can be used", "driver"]);
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
