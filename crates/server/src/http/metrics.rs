//! Metrics for monitors. The engine's thread posts its counters after each step, and requests for metrics read the last
//! posted counters.

use std::collections::{BTreeMap, HashSet};
use std::fmt::{self, Write};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kvarena::stats::Stats;

use kvarena_host::clock::Part;
use kvarena_host::runner::Runner;
use kvarena_host::server::{Server, StreamCounts};
use kvarena_host::stores::{StoreCounters, Stores};
use kvarena_host::tally::Tally;
use kvarena_tiers::tier::StoreStats;

/// Number of ended streams by reason.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Ended {
    /// Ended by a stop token or a stop string.
    pub stopped: u64,
    /// Ended by the limit of tokens.
    pub at_length: u64,
    /// Ended because the client disconnected.
    pub cancelled: u64,
}

/// The last posted counters, and counts of answers.
#[derive(Debug, Default)]
pub struct Metrics {
    snapshot: Mutex<Snapshot>,
    /// Number of answers to completions and chats, by path and status.
    answers: Mutex<BTreeMap<(&'static str, u16), u64>>,
}

#[derive(Debug, Default)]
struct Snapshot {
    stats: Stats,
    tally: Tally,
    streams: StreamCounts,
    ended: Ended,
    parts: [Duration; Part::ALL.len()],
    page_bytes: u64,
    page_size: u32,
    stores: Option<StoreCounters>,
}

impl Metrics {
    /// Posts a server's counters, and the number of its ended streams by reason.
    pub fn post<R: Runner>(&self, server: &Server<R>, ended: Ended) {
        let (tally, clock) = server.tally();
        let mut snapshot = lock(&self.snapshot);
        snapshot.stats = server.engine().stats();
        snapshot.tally.clone_from(tally);
        snapshot.streams = server.stream_counts();
        snapshot.ended = ended;
        let layout = server.engine().shape().layout;
        (snapshot.page_bytes, snapshot.page_size) = (layout.page_bytes(), layout.page_size());
        snapshot.stores = server.stores().map(Stores::counters);
        snapshot.parts = Part::ALL.map(|part| clock.spent(part));
    }

    /// Counts an answer to a completion or a chat.
    pub fn count(&self, path: &'static str, status: u16) {
        *lock(&self.answers).entry((path, status)).or_default() += 1;
    }

    /// Returns all metrics in Prometheus's text format. `waiting` is the number of waiting jobs and streams.
    pub fn text(&self, waiting: usize) -> String {
        let mut text = String::new();
        // A write to a String cannot fail.
        let _ = self.write(&mut text, waiting);
        text
    }

    fn write(&self, out: &mut String, waiting: usize) -> fmt::Result {
        let help = "Answers to completions and chats, by path and status.";
        head(out, "kvarena_server_answers_total", "counter", help)?;
        for ((path, status), count) in &*lock(&self.answers) {
            writeln!(out, "kvarena_server_answers_total{{path=\"{path}\",status=\"{status}\"}} {count}")?;
        }
        let Snapshot { stats, tally, streams, ended, parts, page_bytes, page_size, stores } = &*lock(&self.snapshot);
        head(out, "kvarena_server_streams_ended_total", "counter", "Streams that ended, by reason.")?;
        let Ended { stopped, at_length, cancelled } = ended;
        for (why, count) in [("stop", stopped), ("length", at_length), ("cancelled", cancelled)] {
            writeln!(out, "kvarena_server_streams_ended_total{{why=\"{why}\"}} {count}")?;
        }
        head(out, "kvarena_server_streams", "gauge", "Streams that wait to be admitted, or run.")?;
        for (state, count) in [("waiting", waiting), ("running", streams.running)] {
            writeln!(out, "kvarena_server_streams{{state=\"{state}\"}} {count}")?;
        }
        head(out, "kvarena_server_host_bytes_total", "counter", "Bytes copied to and from swap memory.")?;
        for (way, pages) in [("save", stats.saved_pages), ("load", stats.loaded_pages)] {
            writeln!(out, "kvarena_server_host_bytes_total{{way=\"{way}\"}} {}", pages * page_bytes)?;
        }
        for (name, help, count) in [
            ("load_waits", "Times a step left out a stream that loads pages.", tally.load_waits),
            ("prompt_tokens", "Tokens of all prompts.", tally.prompt_tokens),
            ("cached_tokens", "Tokens of prompts that were cached.", tally.cached_tokens),
            ("new_tokens", "Tokens generated.", tally.new_tokens),
            ("drafted_tokens", "Drafts that steps checked.", tally.drafted),
            ("accepted_tokens", "Accepted drafts.", tally.accepted),
            ("steps", "Steps committed.", tally.steps),
            ("aborted_steps", "Failed steps, and steps planned after a failed one.", tally.aborted_steps),
        ] {
            head(out, &format!("kvarena_server_{name}_total"), "counter", help)?;
            writeln!(out, "kvarena_server_{name}_total {count}")?;
        }
        head(out, "kvarena_server_busy_seconds_total", "counter", "Time of the engine's thread, by part.")?;
        for (part, spent) in Part::ALL.iter().zip(parts) {
            let (part, seconds) = (part.name(), spent.as_secs_f64());
            writeln!(out, "kvarena_server_busy_seconds_total{{part=\"{part}\"}} {seconds}")?;
        }
        let help = "Time from the end of the previous step to a step's end, or from its own start if no step ran.";
        tally.step_time.prometheus(out, "kvarena_server_step_seconds", help)?;
        let help = "Time from the end of a request's checks to each stream's first token.";
        tally.first_token.prometheus(out, "kvarena_server_first_token_seconds", help)?;
        let help = "Time that steps left a stream out because its pages were loading.";
        tally.load_time.prometheus(out, "kvarena_server_load_seconds", help)?;
        if let Some(counters) = stores {
            write_stores(out, counters, *page_size)?;
        }
        write!(out, "{}", stats.prometheus())
    }
}

/// Writes the counters of stores of K and V.
fn write_stores(out: &mut String, counters: &StoreCounters, page_size: u32) -> fmt::Result {
    let StoreCounters { stores, misses, waits } = counters;
    let prefix = "kvarena_server_store";
    let help = "Records that the store was asked for, had, returned, took, already had, removed as damaged, or did not \
                get because it hung or was stopped.";
    head(out, &format!("{prefix}_records_total"), "counter", help)?;
    for store in stores {
        let counts = [
            ("asked", store.asked),
            ("found", store.found),
            ("read", store.read),
            ("put", store.put),
            ("known", store.known),
            ("removed", store.removed),
            ("passed_over", store.passed_over),
        ];
        for (what, count) in counts {
            writeln!(out, "{prefix}_records_total{{store=\"{}\",what=\"{what}\"}} {count}", store.name)?;
        }
    }
    head(out, &format!("{prefix}_bytes_total"), "counter", "Bytes of records read from and put into the store.")?;
    for store in stores {
        for (way, bytes) in [("read", store.read_bytes), ("put", store.put_bytes)] {
            writeln!(out, "{prefix}_bytes_total{{store=\"{}\",way=\"{way}\"}} {bytes}", store.name)?;
        }
    }
    type Of = fn(&StoreStats) -> u64;
    let by_store: [(&str, &str, &str, Of); 3] = [
        ("failed_calls_total", "counter", "Calls of the store that failed.", |store| store.failed),
        ("queue", "gauge", "Reads and puts that wait.", |store| store.queue as u64),
        ("stopped", "gauge", "1 while the store gets no calls, or no puts, because it failed or is full.", |store| {
            store.is_stopped.into()
        }),
    ];
    for (name, kind, help, of) in by_store {
        head(out, &format!("{prefix}_{name}"), kind, help)?;
        for store in stores {
            writeln!(out, "{prefix}_{name}{{store=\"{}\"}} {}", store.name, of(store))?;
        }
    }
    head(out, &format!("{prefix}_misses_total"), "counter", "Records that were not accepted, by reason.")?;
    for (reason, count) in misses {
        writeln!(out, "{prefix}_misses_total{{reason=\"{reason}\"}} {count}")?;
    }
    let hits = waits.pages * u64::from(page_size);
    for (name, help, count) in [
        ("hit_tokens", "Tokens of prompts that were read from stores.", hits as f64),
        ("waits", "Requests that waited for stores.", waits.waited as f64),
        ("late_waits", "Requests that waited for stores until their deadline.", waits.late as f64),
        ("wait_seconds", "Time of these waits.", waits.time.as_secs_f64()),
        ("confirmed_prompts", "Prompts that stores had to have before their answer.", waits.confirmed as f64),
        ("unconfirmed_prompts", "Of these, prompts that no store has whole.", waits.unconfirmed as f64),
    ] {
        head(out, &format!("{prefix}_{name}_total"), "counter", help)?;
        writeln!(out, "{prefix}_{name}_total {count}")?;
    }
    Ok(())
}

/// Converts Prometheus's text format to OpenMetrics: descriptions of counters omit `_total`, and an end marker follows.
pub fn open_metrics(text: &str) -> String {
    let counters: HashSet<&str> =
        text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.strip_suffix(" counter")).collect();
    let mut out = String::with_capacity(text.len());
    for line in text.lines() {
        let mut words = line.splitn(4, ' ');
        let described = match (words.next(), words.next(), words.next()) {
            (Some("#"), Some(kind), Some(name)) if counters.contains(name) => {
                let rest = words.next().unwrap_or_default();
                Some(format!("# {kind} {} {rest}", name.strip_suffix("_total").unwrap_or(name)))
            }
            _ => None,
        };
        out += described.as_deref().unwrap_or(line);
        out.push('\n');
    }
    out + "# EOF\n"
}

fn head(out: &mut String, name: &str, kind: &str, help: &str) -> fmt::Result {
    writeln!(out, "# HELP {name} {help}\n# TYPE {name} {kind}")
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic of another thread does not invalidate the numbers.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_are_in_prometheus_format() {
        let metrics = Metrics::default();
        metrics.count("/v1/completions", 200);
        metrics.count("/v1/completions", 200);
        metrics.count("/v1/completions", 429);
        let text = metrics.text(3);
        for line in [
            "kvarena_server_answers_total{path=\"/v1/completions\",status=\"200\"} 2",
            "kvarena_server_answers_total{path=\"/v1/completions\",status=\"429\"} 1",
            "kvarena_server_streams{state=\"waiting\"} 3",
            "# TYPE kvarena_server_step_seconds histogram",
            "kvarena_free_pages 0",
        ] {
            assert!(text.lines().any(|other| other == line), "{line} is not in:\n{text}");
        }
        let mut types = Vec::new();
        for line in text.lines() {
            if let Some(rest) = line.strip_prefix("# TYPE ") {
                types.push(rest.split(' ').next().expect("a name"));
            } else if !line.starts_with('#') {
                let (name, value) = line.rsplit_once(' ').expect("a name and a number");
                assert!(value.parse::<f64>().is_ok(), "{line}");
                let metric = types.last().expect("a type comes first");
                assert!(name.starts_with(metric), "{line}");
            }
        }
        let open = open_metrics(&text);
        assert!(open.ends_with("# EOF\n") && open.contains("# TYPE kvarena_server_answers counter\n"), "{open}");
        for name in open.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.strip_suffix(" counter")) {
            let samples = open.lines().filter(|line| line.split([' ', '{']).next() == Some(&format!("{name}_total")));
            assert!(samples.count() > 0, "{name}_total has no sample");
        }
        let count = types.len();
        types.sort_unstable();
        types.dedup();
        assert_eq!(types.len(), count, "each metric occurs once");
    }
}
