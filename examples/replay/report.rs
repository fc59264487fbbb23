//! The report of a run: a table for people, one JSON object for programs.

use std::cmp::Reverse;

use kvarena::testkit::tiers;
use serde::Serialize;

use crate::core_time::percentile;
use crate::host::{Outcome, StepWork};

/// Prompt tokens a second that one GPU computes: Qwen3-8B on an H200, measured in `crates/server/GPU.md`.
const PREFILL_RATE: f64 = 44_400.0;

/// Number of slow steps in the list.
const SLOWEST: usize = 5;

/// Figures of replays with several groups of layers.
#[derive(Debug, Serialize)]
pub struct GroupFigures {
    /// The groups but group 0, as on the command line.
    pub groups: String,
    /// Prompt tokens that were cached in group 0, which keeps all tokens. The prompts use `hit_tokens` of them.
    pub full_hit_tokens: u64,
    /// Tokens that were cached in group 0 and lost, by reason, at all admissions and resumes: no mark where they end, a
    /// state evicted for a later one, other evicted cells, and hits beside which the request did not fit.
    pub unmarked_hit_tokens: u64,
    pub superseded_hit_tokens: u64,
    pub evicted_hit_tokens: u64,
    pub ignored_hit_tokens: u64,
    pub evicted_cells: u64,
}

impl GroupFigures {
    fn lost(&self) -> String {
        let Self { unmarked_hit_tokens, superseded_hit_tokens, evicted_hit_tokens, ignored_hit_tokens, .. } = *self;
        let [unmarked, superseded, evicted, ignored] =
            [unmarked_hit_tokens, superseded_hit_tokens, evicted_hit_tokens, ignored_hit_tokens].map(grouped);
        format!("{unmarked} without a mark, {superseded} superseded, {evicted} evicted, {ignored} that did not fit")
    }
}

/// Figures of replays with swap memory.
#[derive(Debug, Serialize)]
pub struct TierFigures {
    #[serde(rename = "host_pages")]
    pub swap_pages: u32,
    #[serde(flatten)]
    pub totals: tiers::Figures,
}

/// Options and time of a run.
#[derive(Debug, Default)]
pub struct Run {
    pub workload: String,
    pub prefix: String,
    pub groups: Option<String>,
    pub schedule: String,
    pub swap_pages: u32,
    pub runs: u32,
    pub wall_ns: u64,
}

/// The figures of a run, or of several runs. The time of a step is its minimum over the runs. Times are in nanoseconds.
/// All except `wall_ns` are core time, which passes inside calls of the engine and of the key store.
#[derive(Debug, Serialize)]
pub struct Report {
    pub workload: String,
    pub prefix: String,
    /// `sequential`, or the maximum number of requests that run at a time.
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
    /// Tokens of preempted requests that were still cached at the resume.
    pub resume_hit_tokens: u64,
    pub evicted_pages: u64,
    #[serde(flatten)]
    pub groups: Option<GroupFigures>,
    #[serde(flatten)]
    pub tiers: Option<TierFigures>,
    pub preemptions: u64,
    /// Requests that waited for another request to compute their prefix.
    pub followers: u64,
    /// Tokens that followers hit and that were not cached yet when the follower began to wait.
    pub awaited_tokens: u64,
    /// Bytes of K and V that decode reads if each sequence is read separately.
    pub decode_bytes_flat: u64,
    /// Bytes of K and V that decode reads if shared spans are read once.
    pub decode_bytes_shared: u64,
    /// Maximum number of pages that running requests used at a time.
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
    /// Number of runs over which each step's time is the minimum.
    pub runs: u32,
    /// The sum, over the steps, of the slowest run's time minus the fastest run's time.
    pub machine_ns: u64,
    #[serde(skip)]
    pub slowest: Vec<StepWork>,
    /// Wall-clock time of all runs, including the host's work.
    pub wall_ns: u64,
}

/// Name and value of a line of the table.
type Row = (&'static str, String);

fn percent(part: u64, whole: u64) -> f64 {
    100.0 * part as f64 / whole.max(1) as f64
}

/// Returns the time that a GPU needs for all prompts, and the part that the cache saves.
fn saved(hit: u64, input: u64) -> String {
    let minutes = |tokens: u64| tokens as f64 / PREFILL_RATE / 60.0;
    format!(
        "{:.1} of the {:.1} minutes that all prompts take without a cache (Qwen3-8B on an H200: {} tokens/s)",
        minutes(hit),
        minutes(input),
        grouped(PREFILL_RATE as u64)
    )
}

impl Report {
    pub fn new(outcome: Outcome, run: Run) -> Self {
        let totals = outcome.totals();
        let Outcome { tally, stats, steps, page_count, page_size, token_bytes, .. } = outcome;
        let Run { workload, prefix, groups, schedule, swap_pages, runs, wall_ns } = run;
        let machine_ns = steps.iter().map(StepWork::machine_ns).sum();
        let mut slowest = steps.clone();
        slowest.sort_by_key(|step| Reverse(step.core_ns));
        slowest.truncate(SLOWEST);
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
            groups: groups.map(|groups| GroupFigures {
                groups,
                full_hit_tokens: tally.full_hit_tokens,
                unmarked_hit_tokens: stats.unmarked_hit_tokens(),
                superseded_hit_tokens: stats.superseded_hit_tokens,
                evicted_hit_tokens: stats.evicted_hit_tokens,
                ignored_hit_tokens: stats.ignored_hit_tokens,
                evicted_cells: stats.evicted_cells,
            }),
            tiers: (swap_pages > 0).then_some(TierFigures { swap_pages, totals }),
            preemptions: tally.preemptions,
            followers: tally.followers,
            awaited_tokens: tally.awaited_tokens,
            decode_bytes_flat: tally.decode_tokens_flat * token_bytes,
            decode_bytes_shared: tally.decode_tokens_shared * token_bytes,
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
            machine_ns,
            slowest,
            wall_ns,
        }
    }

    /// Returns the table, a line for each figure, and the list of the slowest steps.
    pub fn table(&self) -> String {
        let rows = [self.workload_rows(), self.token_rows(), self.page_rows(), self.time_rows()].concat();
        let lines = rows.iter().map(|(name, value)| format!("{name:<19} {value}\n"));
        lines.collect::<String>() + &self.slowest_steps()
    }

    fn workload_rows(&self) -> Vec<Row> {
        let mut rows = vec![("workload", self.workload.clone()), ("pool", self.pool())];
        rows.extend(self.tiers.iter().map(|tiers| ("swap memory", counted(tiers.swap_pages.into(), "page"))));
        rows.extend(self.groups.iter().map(|figures| ("groups", figures.groups.clone())));
        rows.push(("schedule", format!("{}, prefix reuse {}", self.schedule, self.prefix)));
        rows.push(("requests", grouped(self.requests)));
        if self.skipped > 0 {
            rows.push(("  skipped", format!("{} that do not fit the pool even alone", grouped(self.skipped))));
        }
        rows
    }

    fn token_rows(&self) -> Vec<Row> {
        let hits = |tokens: u64| format!("{} ({:.1} %)", grouped(tokens), percent(tokens, self.input_tokens));
        let mut rows = vec![("input tokens", grouped(self.input_tokens)), ("  from the cache", hits(self.hit_tokens))];
        if let Some(TierFigures { totals: tiers, .. }) = &self.tiers {
            rows.push(("    on the device", hits(tiers.device_hit_tokens)));
            rows.push(("    in swap memory", hits(tiers.swap_hit_tokens)));
            rows.push(("    in the store", hits(tiers.store_hit_tokens)));
        }
        rows.extend(self.groups.iter().map(|groups| ("  cached in group 0", hits(groups.full_hit_tokens))));
        rows.extend(self.groups.iter().map(|groups| ("  lost", groups.lost())));
        rows.push(("  GPU time saved", saved(self.hit_tokens, self.input_tokens)));
        rows.push(("output tokens", grouped(self.output_tokens)));
        rows.push(("computed tokens", grouped(self.computed_tokens)));
        rows.push(("  waited for", self.awaited()));
        rows
    }

    fn page_rows(&self) -> Vec<Row> {
        let mut rows = vec![("evicted pages", grouped(self.evicted_pages))];
        if let Some(TierFigures { totals: tiers, .. }) = &self.tiers {
            let moved = format!(
                "{} saved ({} as they were evicted), {} loaded, {} fetched, {} put",
                grouped(tiers.saved_pages),
                grouped(tiers.forced_pages),
                grouped(tiers.loaded_pages),
                grouped(tiers.fetched_pages),
                grouped(tiers.put_pages)
            );
            let dropped = [tiers.swap_evicted_pages, tiers.lost_pages].map(grouped);
            rows.push(("  moved pages", moved));
            rows.push(("  dropped pages", format!("{} from swap memory, {} lost", dropped[0], dropped[1])));
        }
        rows.extend(self.groups.iter().map(|groups| ("evicted cells", grouped(groups.evicted_cells))));
        rows.push(("preemptions", grouped(self.preemptions)));
        let [flat, shared] = [self.decode_bytes_flat, self.decode_bytes_shared].map(|bytes| bytes / 1_000_000_000);
        let share = percent(self.decode_bytes_shared, self.decode_bytes_flat);
        rows.push(("decode reads", format!("{} GB", grouped(flat))));
        rows.push(("  spans once", format!("{} GB ({share:.1} %)", grouped(shared))));
        let (pages, share) = (grouped(self.peak_pages.into()), percent(self.peak_pages.into(), self.pages.into()));
        let running = counted(self.peak_running as u64, "request");
        rows.push(("peak pages in use", format!("{pages} ({share:.1} % of the pool), {running} running")));
        rows
    }

    fn time_rows(&self) -> Vec<Row> {
        vec![
            ("core time, us", self.core_time()),
            ("core steps, us", self.step_times()),
            ("machine, us", self.machine()),
        ]
    }

    fn pool(&self) -> String {
        let (pages, tokens) = (u64::from(self.pages), u64::from(self.page_size));
        format!("{} of {}", counted(pages, "page"), counted(tokens, "token"))
    }

    fn awaited(&self) -> String {
        let (tokens, requests) = (grouped(self.awaited_tokens), grouped(self.followers));
        format!("{tokens} tokens that {requests} requests left to another request")
    }

    fn core_time(&self) -> String {
        format!(
            "{} in all, {} a request, {:.4} an input token",
            micros(self.core_ns),
            micros(self.core_ns_per_request as u64),
            self.core_ns_per_input_token / 1e3
        )
    }

    fn step_times(&self) -> String {
        format!(
            "p50 {}, p99 {}, max {} over {} steps, {} of them above 1,000",
            micros(self.step_ns_p50),
            micros(self.step_ns_p99),
            micros(self.step_ns_max),
            grouped(self.steps as u64),
            grouped(self.steps_above_1ms as u64)
        )
    }

    fn machine(&self) -> String {
        if self.runs == 1 {
            return "unknown after one run: part of core time (--runs 2 separates it)".to_owned();
        }
        let machine = micros(self.machine_ns);
        format!("{machine} more in the slowest of {} runs of each step, not counted above", self.runs)
    }

    /// Returns a title, the names and units of the columns, and a line for each of the slowest steps and its work.
    fn slowest_steps(&self) -> String {
        const HEADS: [&str; 9] = [
            "step",
            "core, us",
            "machine, us",
            "prompts",
            "tokens in them",
            "tokens planned",
            "pages evicted",
            "preempted",
            "ended",
        ];
        let one_run = self.runs == 1;
        let cells = |work: &StepWork| {
            [
                grouped(work.step),
                micros(work.core_ns),
                if one_run { "-".to_owned() } else { micros(work.machine_ns()) },
                grouped(work.admitted.into()),
                grouped(work.admitted_tokens),
                grouped(work.computed_tokens),
                grouped(work.evicted_pages),
                grouped(work.preempted.into()),
                grouped(work.finished.into()),
            ]
        };
        let mut lines = vec![HEADS.map(str::to_owned)];
        lines.extend(self.slowest.iter().map(cells));
        let width = |column: usize| lines.iter().map(|line| line[column].len()).max().unwrap_or(0);
        let mut text = "\nthe slowest steps and their work\n".to_owned();
        for line in &lines {
            for (column, cell) in line.iter().enumerate() {
                text += &format!("  {cell:>width$}", width = width(column));
            }
            text.push('\n');
        }
        text
    }
}

/// Formats `1234567` as `1,234,567`.
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

/// Formats a count with its unit: `1 page`, `1,234 pages`.
pub fn counted(number: u64, what: &str) -> String {
    format!("{} {what}{}", grouped(number), if number == 1 { "" } else { "s" })
}

/// Formats nanoseconds as microseconds.
fn micros(ns: u64) -> String {
    // Rounded to 0.1 us.
    let tenths = (ns + 50) / 100;
    format!("{}.{}", grouped(tenths / 10), tenths % 10)
}

#[cfg(test)]
mod tests {
    use kvarena::stats::Stats;

    use super::*;
    use crate::host::Tally;

    #[test]
    fn numbers_are_grouped() {
        assert_eq!([0, 12, 999, 1000, 1_234_567].map(grouped).join(" "), "0 12 999 1,000 1,234,567");
    }

    #[test]
    fn times_are_microseconds() {
        let times = [0, 49, 50, 9_999, 12_345_678].map(micros);
        assert_eq!(times.join(" "), "0.0 0.0 0.1 10.0 12,345.7");
    }

    #[test]
    fn savings_are_shown_in_minutes() {
        assert_eq!(
            saved(2_664_000, 26_640_000),
            "1.0 of the 10.0 minutes that all prompts take without a cache (Qwen3-8B on an H200: 44,400 tokens/s)"
        );
    }

    fn report(tally: Tally, groups: Option<&str>, runs: u32) -> Report {
        let step = StepWork { step: 1234, core_ns: 2_000, most_ns: 5_500, ..Default::default() };
        let outcome = Outcome {
            tally,
            stats: Stats::default(),
            steps: vec![step; 9],
            samples: Vec::new(),
            page_count: 1,
            page_size: 16,
            token_bytes: 1,
        };
        Report::new(outcome, Run { groups: groups.map(str::to_owned), runs, ..Run::default() })
    }

    #[test]
    fn only_groups_have_figures_of_groups() {
        let tally = Tally { input_tokens: 2000, full_hit_tokens: 1500, skipped: 1, ..Tally::default() };
        let [one, several] = [None, Some("window:5x2")].map(|groups| report(tally, groups, 1));
        let [json, grouped] = [&one, &several].map(|report| serde_json::to_string(report).unwrap());
        let figures =
            r#""groups":"window:5x2","full_hit_tokens":1500,"unmarked_hit_tokens":0,"superseded_hit_tokens":0,"#;
        let figures = [figures, r#""evicted_hit_tokens":0,"ignored_hit_tokens":0,"evicted_cells":0,"#].concat();
        assert_eq!(grouped.replace(&figures, ""), json);
        assert_ne!(grouped, json);
        let names = |report: &Report| -> Vec<String> {
            report.table().lines().map(|line| line.chars().take(19).collect()).collect()
        };
        let mut rows = names(&several);
        rows.retain(|name| !["groups", "  cached in group 0", "  lost", "evicted cells"].contains(&name.trim_end()));
        assert_eq!(rows, names(&one));
        assert!(several.table().contains("  cached in group 0 1,500 (75.0 %)\n"));
    }

    #[test]
    fn columns_align_with_their_heads() {
        let report = |runs| report(Tally::default(), None, runs);
        let text = report(2).table();
        let lines: Vec<&str> = text.lines().skip_while(|line| !line.contains("core, us  ")).collect();
        assert_eq!(lines.len(), 1 + SLOWEST);
        assert!(lines.iter().all(|line| line.len() == lines[0].len()), "{text}");
        assert!(lines[1].starts_with("  1,234       2.0          3.5"), "{text}");
        assert!(text.contains("1 page of 16 tokens") && text.contains("31.5 more"), "{text}");
        assert!(report(1).table().contains("unknown after one run"));
    }
}
