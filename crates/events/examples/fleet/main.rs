//! `kvarena-events`: runs two engines and a router over real sockets, or simulates a fleet of engines that serves a
//! trace.

mod demo;

use std::error::Error;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

use clap::Parser;
use kvarena_events::fleet::{FleetConfig, Outcome, Policy, costs, index_bytes_a_page, run};
use kvarena_events::host::HostConfig;
use kvarena_events::plot;
use kvarena_events::trace::{self, Request};

/// Runs two engines and a router over real sockets. With --fleet and --trace, simulates a fleet that serves a trace,
/// under each of three routing policies.
#[derive(Parser, Debug)]
#[command(name = "kvarena-events", version)]
struct Options {
    /// Number of engines in the fleet
    #[arg(long, value_name = "N", requires = "trace")]
    fleet: Option<NonZeroUsize>,
    /// Trace in Mooncake's JSON-lines format
    #[arg(long, value_name = "FILE", requires = "fleet")]
    trace: Option<PathBuf>,
    /// SVG file in which the program draws the results of each policy
    #[arg(long, value_name = "FILE.svg", requires = "fleet")]
    plot: Option<PathBuf>,
    /// Maximum number of requests to take from the trace [default: all]
    #[arg(long, value_name = "N", requires = "fleet")]
    requests: Option<NonZeroUsize>,
    /// Number of tokens in a page
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..))]
    page_size: u32,
    /// Number of pages of each engine [default: as many as fit 400,000 tokens]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pages: Option<u32>,
    /// Number of tokens that each engine computes in a second
    #[arg(long, value_name = "TOKENS", default_value_t = 20_000, value_parser = clap::value_parser!(u32).range(1..))]
    rate: u32,
}

fn main() {
    let options = Options::parse();
    let done = match (options.fleet, &options.trace) {
        (Some(engines), Some(trace)) => fleet(engines.get(), trace, &options),
        _ => demo::run(),
    };
    if let Err(error) = done {
        eprintln!("kvarena-events: {error}");
        std::process::exit(1);
    }
}

fn fleet(engines: usize, path: &Path, options: &Options) -> Result<(), Box<dyn Error>> {
    // This runs first, because memory that the process has freed would hide a part of the index's growth.
    let index_bytes = index_bytes_a_page(options.page_size, 16, 20_000)?;
    let most = options.requests.map_or(usize::MAX, NonZeroUsize::get);
    let requests = trace::read(path, most)?;
    // An 80 GB device has room for this many tokens beside a model of 8 billion parameters.
    let pages = options.pages.unwrap_or(400_000 / options.page_size);
    let page_size = options.page_size;
    let host = HostConfig { page_size, pages, event_pages: pages.min(65_536), ..HostConfig::default() };
    let config = FleetConfig { engines, host, rate: options.rate.into() };
    println!(
        "{} requests, {engines} engines of {pages} pages of {page_size} tokens, {} tokens a second each",
        requests.len(),
        options.rate
    );
    let outcomes = simulate(&config, &requests)?;
    if let Some(path) = &options.plot {
        std::fs::write(path, plot::draw(&outcomes))?;
        println!("the plot is in {}", path.display());
    }
    print_costs(host, &requests[..requests.len().min(1000)])?;
    print_index(outcomes.last().expect("there are policies"), engines);
    if let Some(bytes) = index_bytes {
        let engine = bytes * f64::from(pages);
        println!(
            "the index takes {bytes:.0} bytes per page, {:.1} MB for a full engine: a GiB suffices for {:.0} engines",
            engine / 1e6,
            f64::from(1 << 30) / engine
        );
    }
    Ok(())
}

/// Serves the trace under each policy, and prints a table of the outcomes.
fn simulate(config: &FleetConfig, requests: &[Request]) -> Result<Vec<Outcome>, Box<dyn Error>> {
    println!(
        "\n{:<16}{:>10}{:>10}{:>12}{:>12}{:>10}{:>11}{:>10}{:>10}",
        "policy", "hit", "busiest/", "mean wait", "p99 wait", "events", "events/s", "MB", "KB/s"
    );
    println!("{:<16}{:>10}{:>10}{:>12}{:>12}", "", "tokens", "mean", "s", "s");
    let mut outcomes = Vec::new();
    for policy in Policy::ALL {
        let outcome = run(config, policy, requests)?;
        let ((mean, p99), seconds) = (outcome.wait(), outcome.seconds.max(1e-9));
        println!(
            "{:<16}{:>9.1}%{:>10.2}{:>12.2}{:>12.2}{:>10}{:>11.1}{:>10.1}{:>10.1}",
            policy,
            100.0 * outcome.hit_rate(),
            outcome.skew(),
            mean,
            p99,
            outcome.events,
            outcome.events as f64 / seconds,
            outcome.event_bytes as f64 / 1e6,
            outcome.event_bytes as f64 / 1e3 / seconds,
        );
        outcomes.push(outcome);
    }
    let skipped = outcomes.iter().map(|outcome| outcome.skipped).max().unwrap_or(0);
    if skipped > 0 {
        println!("{skipped} requests were left out because they fit in no engine");
    }
    Ok(outcomes)
}

/// Prints an engine's time for each request, by stages of publishing events, and the stages' time for each stored page.
fn print_costs(host: HostConfig, requests: &[Request]) -> Result<(), Box<dyn Error>> {
    println!("\nwork of one engine besides serving      us per request   ns per stored page");
    let all = costs(host, requests)?;
    let bare = all[0];
    for cost in &all {
        let more = (cost.seconds - bare.seconds) * 1e9 / cost.pages.max(1) as f64;
        println!("{:<40}{:>13.1}{:>20.1}", cost.stages, cost.seconds * 1e6 / cost.requests.max(1) as f64, more);
    }
    Ok(())
}

/// Prints the work of the router's index in a run.
fn print_index(outcome: &Outcome, engines: usize) {
    let apply = outcome.apply_seconds / outcome.seconds.max(1e-9);
    println!(
        "\nthe router's index applied {} events in {:.2} s. This is {:.4}% of one core over the trace's {:.0} s, so \
         one core has time for {:.0} such engines",
        outcome.events,
        outcome.apply_seconds,
        100.0 * apply,
        outcome.seconds,
        engines as f64 / apply.max(1e-12),
    );
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    fn parse(words: &[&str]) -> Result<Options, clap::Error> {
        Options::try_parse_from(["kvarena-events"].iter().chain(words))
    }

    #[test]
    fn the_command_line_is_sound() {
        Options::command().debug_assert();
        assert_eq!(parse(&["--help"]).expect_err("help").kind(), clap::error::ErrorKind::DisplayHelp);
        assert!(parse(&[]).is_ok_and(|options| options.fleet.is_none() && options.rate == 20_000));
        assert!(parse(&["--fleet", "4", "--trace", "f", "--pages", "9"]).is_ok());
        for wrong in
            [&["--fleet", "4"][..], &["--trace", "f"], &["--fleet", "0", "--trace", "f"], &["--rate", "0"], &["--x"]]
        {
            assert!(parse(wrong).is_err(), "{wrong:?}");
        }
    }
}
