//! Times of the device and the host over the steps of a run.

use serde_json::{Value, json};

use kvarena_host::clock::Part;
use kvarena_host::gpu::runner::{OnGpu, StepTime};
use kvarena_host::gpu::sums::{Link, Transport};
use kvarena_host::server::Server;

/// A run's numbers.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Times {
    /// Number of all steps, and of decode steps.
    pub steps: [usize; 2],
    /// Share of the time between the ends of steps in which the device was idle.
    pub idle: f64,
    /// The same share, over decode steps only.
    pub decode_idle: f64,
    /// Mean microseconds of a step in the engine's calls, and in launches.
    pub host_us: [f64; 2],
    /// The transport of sums over GPUs, if there are several.
    pub sums: Option<Transport>,
    /// Modules loaded after the start.
    pub late_modules: usize,
}

impl Times {
    /// Returns the report of a server's whole run.
    pub fn of(server: &Server<impl OnGpu>) -> Self {
        let times = server.runner().gpu().times();
        let steps = times.len().max(1) as f64;
        let (_, clock) = server.tally();
        let us = |part| clock.spent(part).as_secs_f64() * 1e6 / steps;
        let decode: Vec<StepTime> = times.iter().copied().filter(|time| time.decode).collect();
        Self {
            steps: [times.len(), decode.len()],
            idle: idle(times),
            decode_idle: idle(&decode),
            host_us: [us(Part::Engine), us(Part::Launch)],
            sums: server.runner().gpu().forward().link().map(Link::sums),
            late_modules: server.runner().late_modules(server.engine().backend()),
        }
    }

    /// Returns a line for a person.
    pub fn text(&self) -> String {
        let [engine, launch] = self.host_us;
        let sums = match self.sums {
            Some(Transport::Peer) => "; short sums over GPUs in each other's memory",
            Some(Transport::Nccl) => "; sums over GPUs through NCCL",
            None => "",
        };
        format!(
            "GPU: {} steps ({} of decode), idle {:.2} % ({:.2} % between decode steps); a step takes {engine:.1} us of \
             the engine's calls and {launch:.1} us of launching{sums}\n",
            self.steps[0],
            self.steps[1],
            100.0 * self.idle,
            100.0 * self.decode_idle,
        )
    }

    /// Returns JSON for a program.
    pub fn json(&self) -> Value {
        let mut report = json!({
            "steps": self.steps[0],
            "decode_steps": self.steps[1],
            "gpu_idle": self.idle,
            "gpu_idle_decode": self.decode_idle,
            "engine_us": self.host_us[0],
            "launch_us": self.host_us[1],
            "late_modules": self.late_modules,
        });
        if let Some(sums) = self.sums {
            report["sums"] = sums.name().into();
        }
        json!({ "report": report })
    }
}

/// Returns the idle time of these steps divided by their whole time.
pub fn idle(times: &[StepTime]) -> f64 {
    let known = || times.iter().filter_map(|time| Some((time.idle_ms, time.period_ms?)));
    let idle: f64 = known().map(|(idle, _)| f64::from(idle)).sum();
    let whole: f64 = known().map(|(_, period)| f64::from(period)).sum();
    if whole > 0.0 { idle / whole } else { 0.0 }
}

/// Returns the median time between the ends of decode steps of `streams` streams, in milliseconds.
pub fn median_ms(times: &[StepTime], streams: usize) -> Option<f32> {
    let wanted = times.iter().filter(|time| time.decode && time.tokens == streams);
    let mut periods: Vec<f32> = wanted.filter_map(|time| time.period_ms).collect();
    periods.sort_by(f32::total_cmp);
    periods.get(periods.len() / 2).copied()
}
