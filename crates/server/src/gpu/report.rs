//! Times of the device and the host over the steps of a run.

use serde_json::{Value, json};

use kvarena_host::clock::Part;
use kvarena_host::gpu::runner::{OnGpu, StepTime};
use kvarena_host::gpu::sums::{Link, Transport};
use kvarena_host::server::Server;

/// Returns the report of a server's whole run: JSON for a program, and a line for a person.
pub fn report(server: &Server<impl OnGpu>) -> (Value, String) {
    let times = server.runner().gpu().times();
    let decode: Vec<StepTime> = times.iter().copied().filter(|time| time.decode).collect();
    let [idle, decode_idle] = [times, &decode].map(idle);
    let steps = times.len().max(1) as f64;
    let [engine, launch] = [Part::Engine, Part::Launch].map(|part| host_us(server, part) / steps);
    let sums = server.runner().gpu().forward().link().map(Link::sums);
    let mut report = json!({
        "steps": times.len(),
        "decode_steps": decode.len(),
        "gpu_idle": idle,
        "gpu_idle_decode": decode_idle,
        "engine_us": engine,
        "launch_us": launch,
        "late_modules": server.runner().late_modules(server.engine().backend()),
    });
    if let Some(sums) = sums {
        report["sums"] = sums.name().into();
    }
    let sums = match sums {
        Some(Transport::Peer) => "; short sums over GPUs in each other's memory",
        Some(Transport::Nccl) => "; sums over GPUs through NCCL",
        None => "",
    };
    let line = format!(
        "GPU: {} steps ({} of decode), idle {:.2} % ({:.2} % between decode steps); a step takes {engine:.1} us of the \
         engine's calls and {launch:.1} us of launching{sums}\n",
        times.len(),
        decode.len(),
        100.0 * idle,
        100.0 * decode_idle,
    );
    (json!({ "report": report }), line)
}

/// Returns the host's microseconds in a part of the work, summed over all runs of the server.
pub fn host_us(server: &Server<impl OnGpu>, part: Part) -> f64 {
    server.tally().1.spent(part).as_secs_f64() * 1e6
}

/// Returns the idle time of these steps divided by their whole time.
pub fn idle(times: &[StepTime]) -> f64 {
    let known = || times.iter().filter_map(|time| Some((time.idle_ms, time.period_ms?)));
    let idle: f64 = known().map(|(idle, _)| f64::from(idle)).sum();
    let whole: f64 = known().map(|(_, period)| f64::from(period)).sum();
    if whole > 0.0 { idle / whole } else { 0.0 }
}
