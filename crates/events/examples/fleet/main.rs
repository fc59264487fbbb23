//! Runs two engines and a router over real sockets. With --fleet and --trace, simulates a fleet that serves a trace,
//! under each of three routing policies.

#[path = "../../../../examples/replay/chart.rs"]
mod chart;
mod host;
#[allow(dead_code)]
#[path = "../../../../examples/replay/request.rs"]
mod request;
mod router;
mod simulation;
#[allow(dead_code)]
#[path = "../../../../examples/replay/trace.rs"]
mod trace;

use std::error::Error;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use chart::{BLUE, Chart, Form, GREY, RED, Series};
use clap::Parser;
use host::{Host, HostConfig};
use kvarena::hash::NamespaceNames;
use kvarena::{Namespace, TokenId};
use kvarena_events::clock::seconds;
use kvarena_events::publisher::{Publisher, PublisherConfig};
use kvarena_events::subscriber::{Received, Subscriber};
use request::Request;
use router::Router;
use simulation::{FleetConfig, Outcome, Policy, costs, index_bytes_a_page, run};

/// Runs two engines and a router over real sockets. With --fleet and --trace, simulates a fleet that serves a trace,
/// under each of three routing policies.
#[derive(Parser, Debug)]
#[command(name = "fleet", version)]
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

fn main() -> ExitCode {
    let options = Options::parse();
    let done = match (options.fleet, &options.trace) {
        (Some(engines), Some(trace)) => fleet(engines.get(), trace, &options),
        _ => demonstrate(),
    };
    if let Err(error) = done {
        eprintln!("fleet: {error}");
        return ExitCode::FAILURE;
    }
    ExitCode::SUCCESS
}

/// Lets two engines publish their cache contents over real sockets, and a router find the engine that caches a prompt.
#[tokio::main(flavor = "current_thread")]
async fn demonstrate() -> Result<(), Box<dyn Error>> {
    let text = |engine: u64| -> Vec<_> { (0..100).map(|at| TokenId::new(1000 * engine as u32 + at)).collect() };
    let mut router = Router::new(HostConfig::default().page_size);
    for engine in 0..2 {
        let publisher = Publisher::bind(PublisherConfig::default()).await?;
        println!("engine {engine} publishes its events at {}", publisher.endpoint);
        let mut host = Host::new(HostConfig::default())?;
        host.serve(Namespace::default(), &text(engine), &[]);
        if let Some((payload, events)) = host.take_payload(seconds()) {
            println!("engine {engine}: {events} events in {} bytes", payload.len());
            publisher.send(payload);
        }
        let mut subscriber = Subscriber::connect(&publisher.endpoint, &publisher.replay_endpoint).await?;
        if let Received::Payload(payload) = subscriber.receive().await? {
            router.check_and_apply(engine, &payload)?;
        }
    }
    for engine in 0..2 {
        let found = router.overlap(&NamespaceNames::default(), &text(engine));
        println!("prompt {engine}: the router finds (engine, pages) {found:?}");
    }
    Ok(())
}

fn fleet(engines: usize, path: &Path, options: &Options) -> Result<(), Box<dyn Error>> {
    // This runs first, because memory that the process has freed would hide a part of the index's growth.
    let index_bytes = index_bytes_a_page(options.page_size, 16, 20_000)?;
    let most = options.requests.map_or(usize::MAX, NonZeroUsize::get);
    let requests = trace::read(path, most, None)?;
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
        plot(path, &outcomes)?;
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
    for (policy, name) in Policy::ALL {
        let outcome = run(config, policy, requests)?;
        let seconds = outcome.seconds.max(1e-9);
        println!(
            "{name:<16}{:>9.1}%{:>10.2}{:>12.2}{:>12.2}{:>10}{:>11.1}{:>10.1}{:>10.1}",
            100.0 * outcome.hit_rate(),
            outcome.skew(),
            outcome.mean_wait(),
            outcome.late_wait(),
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

/// Draws the hit rate, the skew and the mean wait of each policy over the requests.
fn plot(file: &Path, outcomes: &[Outcome]) -> Result<(), Box<dyn Error>> {
    let charts = ["cached prompt tokens, %", "busiest / mean", "mean wait, s"].into_iter().enumerate();
    let charts = charts.map(|(which, y)| {
        let scale = if which == 0 { 100.0 } else { 1.0 };
        let policies = outcomes.iter().zip(Policy::ALL).zip([GREY, RED, BLUE]);
        let series = policies.map(|((outcome, (_, name)), colour)| {
            let points = outcome.curves.iter().map(|(number, values)| (*number, scale * values[which]));
            Series { name: name.to_owned(), colour, form: Form::Line(2), points: points.collect() }
        });
        Chart { x: "requests", y, series: series.collect(), ..Chart::default() }
    });
    chart::draw(file, (1200, 400), 3, &charts.collect::<Vec<_>>())
}

/// Prints an engine's time for each request, by stages of publishing events, and the stages' time for each stored page.
fn print_costs(host: HostConfig, requests: &[Request]) -> Result<(), Box<dyn Error>> {
    println!("\nwork of one engine besides serving      us per request   ns per stored page");
    let all = costs(host, requests)?;
    for cost in &all {
        let more = (cost.seconds - all[0].seconds) * 1e9 / cost.pages.max(1) as f64;
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
        Options::try_parse_from(["fleet"].iter().chain(words))
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

    #[test]
    fn invalid_sizes_are_errors() {
        for size in ["5000", "400001", "4294967295"] {
            let options = parse(&["--fleet", "1", "--trace", "f", "--page-size", size]).expect("a command line");
            let error = fleet(1, Path::new("f"), &options).expect_err("the page size is too large");
            let wanted = format!("the engine rejected the config: page_size {size} is above 1024");
            assert_eq!(error.to_string(), wanted);
        }
    }

    #[test]
    fn a_prompt_longer_than_the_default_step_is_served() {
        let mut host = Host::new(HostConfig { pages: 2000, ..HostConfig::default() }).expect("the config is valid");
        let prompt: Vec<TokenId> = (0..20_000).map(TokenId::new).collect();
        assert_eq!(host.serve(Namespace::default(), &prompt, &[]), Some(0));
    }
}
