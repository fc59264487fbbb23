//! Replays a request trace, or generated chats, through a kvarena engine as a serving engine would, without a model.
//! Reports the savings of prefix reuse and the cost of the core.
//!
//! ```text
//! cargo run --release --example replay
//! cargo run --release --example replay -- --trace FILE --pages 60000 --page-size 512 --sequential
//! cargo run --release --example replay -- --trace FILE --pages 60000 --sequential --groups window:1024x6
//! cargo run --release --example replay -- --trace FILE --pages 20000 --page-size 96 --sequential --groups state:36
//! cargo run --release --example replay -- --trace FILE --pages 6000 --page-size 512 --sequential \
//!     --swap-pages 20000 --store --restart 6000
//! ```

mod args;
mod batching;
mod chart;
mod chat;
mod core_time;
#[cfg(test)]
mod exact;
mod groups;
mod host;
mod plot;
mod report;
mod request;
mod rng;
mod sequential;
mod trace;

use std::error::Error;
use std::num::NonZeroUsize;
use std::process::ExitCode;
use std::time::Instant;

use clap::Parser;
use indicatif::{ProgressBar, ProgressStyle};
use kvarena::hash::Hashing;
use kvarena::layout::Groups;
use kvarena::testkit::store::KeyStore;
use kvarena::{EngineConfig, KvDtype, KvShape, PoolConfig};

use args::Args;
use host::{Host, Outcome, ServeError};
use report::Report;
use request::Request;

fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {}", with_causes(error.as_ref()));
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> Result<(), Box<dyn Error>> {
    let (requests, workload) = workload(args)?;
    let start = Instant::now();
    let progress = progress_bar(requests.len() * args.runs as usize);
    let mut outcome = serve(args, &requests, &progress)?;
    for _ in 1..args.runs {
        outcome.keep_least(&serve(args, &requests, &progress)?);
    }
    progress.finish_and_clear();
    let wall_ns = start.elapsed().as_nanos() as u64;
    if let Some(file) = &args.plot {
        let title = format!(
            "{workload}: {} of {}, {}",
            report::counted(outcome.page_count.into(), "page"),
            report::counted(outcome.page_size.into(), "token"),
            schedule(args)
        );
        plot::draw(file, title, &outcome.samples)?;
    }
    let run = report::Run {
        workload,
        prefix: format!("{:?}", args.prefix).to_lowercase(),
        groups: args.groups.as_ref().map(|groups| groups.text.clone()),
        schedule: schedule(args),
        swap_pages: args.swap_pages,
        runs: args.runs,
        wall_ns,
    };
    let report = Report::new(outcome, run);
    if args.json {
        println!("{}", serde_json::to_string(&report)?);
    } else {
        print!("{}", report.table());
    }
    Ok(())
}

fn workload(args: &Args) -> Result<(Vec<Request>, String), Box<dyn Error>> {
    if let Some(count) = args.burst {
        let requests = chat::burst(count.get(), args.seed);
        return Ok((requests, format!("a burst of {count} equal prompts")));
    }
    let Some(file) = &args.trace else {
        let requests = chat::generate(args.max_requests(8000), args.seed);
        return Ok((requests, format!("generated chats, seed {}", args.seed)));
    };
    let requests = trace::read(file, args.max_requests(usize::MAX), args.block)?;
    Ok((requests, trace::name(file)))
}

fn schedule(args: &Args) -> String {
    if args.sequential { "sequential".to_owned() } else { format!("up to {} at a time", args.concurrency) }
}

/// Serves the requests with the engine of `args`.
fn serve(args: &Args, requests: &[Request], progress: &ProgressBar) -> Result<Outcome, ServeError> {
    let running = if args.sequential { 1 } else { args.concurrency };
    let step_tokens = args.step_tokens.unwrap_or(if args.sequential { u32::MAX } else { 8192 });
    let config = EngineConfig {
        // A plan is ahead of the published tokens by its own tokens and by those of a page that is not full yet.
        promise_ahead: step_tokens.saturating_add(args.page_size.saturating_sub(1)),
        max_step_tokens: step_tokens,
        state_margin: args.state_margin,
        state_gap: args.state_gap,
        keep_used_states: args.keep_used,
        ..host::engine_config(pool(args), args.prefix, requests, running)
    };
    let hashing = args.store.then_some(Hashing::Dynamo);
    let config = EngineConfig { hashing, record_pages: args.record_pages, ..config };
    let mut host = Host::new(config, requests.len(), args.ahead, progress)?;
    host.store = args.store.then(KeyStore::default);
    if args.sequential {
        let restart = args.restart.map_or(requests.len(), NonZeroUsize::get).min(requests.len());
        sequential::serve(&mut host, &requests[..restart], step_tokens)?;
        if restart < requests.len() {
            host.restart()?;
            sequential::serve(&mut host, &requests[restart..], step_tokens)?;
        }
    } else {
        let limits = batching::Limits { running: running as usize, step_tokens, follow: !args.no_waiting };
        batching::serve(&mut host, requests, limits)?;
    }
    Ok(host.outcome())
}

/// Returns the config of the pool: K and V of Qwen3-8B in bf16, 147,456 bytes a token. `--bytes` and the
/// reported decode reads depend on this size. With `--groups`, a page contains K and V of one layer, or its state.
fn pool(args: &Args) -> PoolConfig {
    let page_bytes = 2 * 8 * 128 * 2 * args.page_size; // K and V of one layer.
    PoolConfig {
        layers: args.groups.as_ref().map_or(36, |groups| groups.layers),
        groups: args.groups.as_ref().map_or(Groups::ONE, |groups| groups.in_pages(page_bytes)),
        shape: KvShape::heads(8, 128),
        dtype: KvDtype::Bf16,
        page_size: args.page_size,
        capacity: args.capacity(),
        swap_pages: args.swap_pages,
        // A record has at most a page for each layer of a group.
        stage_pages: if args.store { 256.max(args.groups.as_ref().map_or(0, |groups| groups.layers)) } else { 0 },
        ..PoolConfig::default()
    }
}

/// Returns a progress bar, hidden unless standard error is a terminal.
fn progress_bar(requests: usize) -> ProgressBar {
    let bar = ProgressBar::new(requests as u64);
    let style = ProgressStyle::with_template("{bar:40} {human_pos} of {human_len} requests, {eta}");
    bar.with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}

/// Formats an error and its causes on one line.
fn with_causes(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(inner) = cause {
        let next = inner.to_string();
        // Skip a cause if the message already ends with its text.
        if !text.ends_with(&next) {
            text = format!("{text}: {next}");
        }
        cause = inner.source();
    }
    text
}
