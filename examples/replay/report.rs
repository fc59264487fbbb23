//! What a run comes to: a table for people, one JSON object for programs.

use serde::Serialize;

use crate::core_time::percentile;
use crate::host::{Outcome, StepWork};

/// The figures of a run, or of several: each step's time is then the least of its times. Times are core time, inside
/// engine calls only, in nanoseconds.
#[derive(Debug, Serialize)]
pub struct Report {
    pub workload: String,
    pub prefix: String,
    /// `sequential`, or how many requests run at a time.
    pub schedule: String,
    pub pages: u32,
    pub page_size: u32,
    pub requests: u64,
    pub skipped: u64,
    pub input_tokens: u64,
    pub output_tokens: u64,
    pub hit_tokens: u64,
    pub hit_rate: f64,
    pub computed_tokens: u64,
    /// Tokens that preempted requests found again in the cache.
    pub resume_hit_tokens: u64,
    pub evicted_pages: u64,
    pub preemptions: u64,
    /// Requests that waited for another one to compute what they needed, and tokens that came of it meanwhile.
    pub followers: u64,
    pub awaited_tokens: u64,
    /// Most pages that running requests used at a time.
    pub peak_pages: u32,
    pub peak_running: usize,
    pub steps: usize,
    pub core_ns: u64,
    pub core_ns_per_request: f64,
    pub core_ns_per_input_token: f64,
    pub requests_per_core_second: f64,
    pub step_ns_p50: u64,
    pub step_ns_p99: u64,
    pub step_ns_max: u64,
    /// Steps of more than a millisecond of core time.
    pub steps_above_1ms: usize,
    /// Runs over which each step's time is the least.
    pub runs: u32,
    #[serde(skip)]
    pub slowest: StepWork,
    /// The whole run by the wall clock, host and workload included.
    pub wall_ns: u64,
}

impl Report {
    pub fn new(
        outcome: Outcome,
        workload: String,
        prefix: String,
        schedule: String,
        runs: u32,
        wall_ns: u64,
    ) -> Self {
        let Outcome { tally, stats, steps, page_count, page_size, .. } = outcome;
        let slowest = steps.iter().max_by_key(|step| step.core_ns).copied().unwrap_or_default();
        let mut steps: Vec<u64> = steps.iter().map(|step| step.core_ns).collect();
        steps.sort_unstable();
        let core_ns = steps.iter().sum::<u64>();
        let per = |total: f64, count: u64| if count == 0 { 0.0 } else { total / count as f64 };
        Self {
            workload,
            prefix,
            schedule,
            pages: page_count,
            page_size,
            requests: tally.requests,
            skipped: tally.skipped,
            input_tokens: tally.input_tokens,
            output_tokens: tally.output_tokens,
            hit_tokens: tally.hit_tokens,
            hit_rate: per(tally.hit_tokens as f64, tally.input_tokens),
            computed_tokens: stats.computed_tokens,
            resume_hit_tokens: tally.resume_hit_tokens,
            evicted_pages: stats.evicted_pages,
            preemptions: tally.preemptions,
            followers: tally.followers,
            awaited_tokens: tally.awaited_tokens,
            peak_pages: tally.peak_pages,
            peak_running: tally.peak_running,
            steps: steps.len(),
            core_ns,
            core_ns_per_request: per(core_ns as f64, tally.requests),
            core_ns_per_input_token: per(core_ns as f64, tally.input_tokens),
            requests_per_core_second: per(tally.requests as f64 * 1e9, core_ns),
            step_ns_p50: percentile(&steps, 50.0),
            step_ns_p99: percentile(&steps, 99.0),
            step_ns_max: percentile(&steps, 100.0),
            steps_above_1ms: steps.len() - steps.partition_point(|&ns| ns <= 1_000_000),
            runs,
            slowest,
            wall_ns,
        }
    }

    /// The table, a line for each figure.
    pub fn table(&self) -> String {
        let percent = |part: u64, whole: u64| 100.0 * part as f64 / whole.max(1) as f64;
        let mut rows = vec![
            ("workload", self.workload.clone()),
            ("pool", format!("{} pages of {} tokens", grouped(self.pages.into()), self.page_size)),
            ("schedule", format!("{}, prefix reuse {}", self.schedule, self.prefix)),
            ("requests", grouped(self.requests)),
            ("input tokens", grouped(self.input_tokens)),
            ("  hit", format!("{} ({:.1} %)", grouped(self.hit_tokens), 100.0 * self.hit_rate)),
            ("output tokens", grouped(self.output_tokens)),
            ("computed tokens", grouped(self.computed_tokens)),
            ("  waited for", self.awaited()),
            ("evicted pages", grouped(self.evicted_pages)),
            ("preemptions", grouped(self.preemptions)),
            (
                "peak pages in use",
                format!(
                    "{} ({:.1} % of the pool), {} requests running",
                    grouped(self.peak_pages.into()),
                    percent(self.peak_pages.into(), self.pages.into()),
                    self.peak_running
                ),
            ),
            ("core time", self.core_time()),
            ("  per request", time(self.core_ns_per_request as u64)),
            ("  per input token", format!("{:.2} ns", self.core_ns_per_input_token)),
            (
                "  per step",
                format!(
                    "p50 {}, p99 {}, max {} over {} steps, {} above 1 ms",
                    time(self.step_ns_p50),
                    time(self.step_ns_p99),
                    time(self.step_ns_max),
                    grouped(self.steps as u64),
                    self.steps_above_1ms
                ),
            ),
            ("  slowest step", self.slowest_step()),
        ];
        if self.skipped > 0 {
            let text = format!("{} that do not fit the pool even alone", grouped(self.skipped));
            rows.insert(4, ("  skipped", text));
        }
        rows.iter().map(|(name, value)| format!("{name:<19} {value}\n")).collect()
    }

    fn awaited(&self) -> String {
        let (tokens, requests) = (grouped(self.awaited_tokens), grouped(self.followers));
        format!("{tokens} tokens that {requests} requests let another one compute")
    }

    fn core_time(&self) -> String {
        let least = format!(", each step's least of {} runs,", self.runs);
        let least = if self.runs > 1 { least.as_str() } else { "" };
        format!("{}{least} of {} in all", time(self.core_ns), time(self.wall_ns))
    }

    fn slowest_step(&self) -> String {
        let work = self.slowest;
        format!(
            "number {}: {} prompts of {} tokens matched, {} tokens planned, {} pages evicted, {} preempted, {} finished",
            grouped(work.step),
            work.admitted,
            grouped(work.matched_prompt_tokens),
            grouped(work.computed_tokens),
            grouped(work.evicted_pages),
            work.preempted,
            work.finished
        )
    }
}

/// `1234567` as `1,234,567`.
pub fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::with_capacity(digits.len() * 4 / 3);
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Nanoseconds in the unit that suits them.
fn time(ns: u64) -> String {
    match ns {
        0..10_000 => format!("{ns} ns"),
        10_000..10_000_000 => format!("{:.1} us", ns as f64 / 1e3),
        10_000_000..10_000_000_000 => format!("{:.1} ms", ns as f64 / 1e6),
        _ => format!("{:.1} s", ns as f64 / 1e9),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_grouped() {
        assert_eq!(
            [0, 12, 999, 1000, 1_234_567].map(grouped).join(" "),
            "0 12 999 1,000 1,234,567"
        );
    }

    #[test]
    fn times_have_units() {
        let times = [9_999, 10_000, 12_345_678, 12_345_678_900].map(time);
        assert_eq!(times.join(", "), "9999 ns, 10.0 us, 12.3 ms, 12.3 s");
    }
}
