//! `kvarena-events`: two engines and a router over real sockets, or a fleet and a trace.
//!
//! ```text
//! cargo run --release                                        two engines and a router over real sockets
//! cargo run --release -- --fleet 8 --trace FILE              a trace over 8 engines, by three policies
//!     [--plot FILE.svg] [--requests N] [--page-size N] [--pages N] [--rate TOKENS_PER_SECOND]
//! ```

mod demo;

use std::error::Error;
use std::path::PathBuf;

use kvarena_events::fleet::{FleetConfig, Policy, costs, index_bytes_a_page, run};
use kvarena_events::host::HostConfig;
use kvarena_events::{plot, trace};

struct Options {
    fleet: Option<usize>,
    trace: Option<PathBuf>,
    plot: Option<PathBuf>,
    requests: usize,
    page_size: u32,
    pages: Option<u32>,
    rate: f64,
}

const USAGE: &str = "usage: kvarena-events [--fleet N --trace FILE [--plot FILE.svg] [--requests N] \
                     [--page-size N] [--pages N] [--rate TOKENS_PER_SECOND]]";

fn options() -> Result<Options, Box<dyn Error>> {
    let mut options = Options {
        fleet: None,
        trace: None,
        plot: None,
        requests: usize::MAX,
        page_size: 16,
        pages: None,
        rate: 20_000.0,
    };
    let mut args = std::env::args().skip(1);
    while let Some(name) = args.next() {
        let value = args.next().ok_or_else(|| format!("{name} lacks its value\n{USAGE}"))?;
        let wrong = || format!("{name} {value}: not a number above 0\n{USAGE}");
        let number = || match value.parse::<u32>() {
            Ok(number) if number > 0 => Ok(number),
            _ => Err(wrong()),
        };
        match name.as_str() {
            "--fleet" => options.fleet = Some(number()? as usize),
            "--trace" => options.trace = Some(value.into()),
            "--plot" => options.plot = Some(value.into()),
            "--requests" => options.requests = number()? as usize,
            "--page-size" => options.page_size = number()?,
            "--pages" => options.pages = Some(number()?),
            "--rate" => options.rate = number()?.into(),
            _ => return Err(format!("{name} is unknown\n{USAGE}").into()),
        }
    }
    Ok(options)
}

fn main() {
    let done = options().and_then(|options| match (options.fleet, &options.trace) {
        (Some(engines), Some(_)) => fleet(engines, &options),
        (None, None) => demo::run(),
        _ => Err(format!("a fleet needs a trace, and a trace a fleet\n{USAGE}").into()),
    });
    if let Err(error) = done {
        eprintln!("kvarena-events: {error}");
        std::process::exit(1);
    }
}

fn fleet(engines: usize, options: &Options) -> Result<(), Box<dyn Error>> {
    // First of all: memory that has been in use before would not be seen.
    let index_bytes = index_bytes_a_page(options.page_size, 16, 20_000);
    let path = options.trace.as_ref().expect("it was given");
    let requests = trace::read(path, options.requests)?;
    // As many tokens as an 80 GB device has room for beside a model of 8 billion parameters.
    let pages = options.pages.unwrap_or(400_000 / options.page_size);
    let page_size = options.page_size;
    let host =
        HostConfig { page_size, pages, event_pages: pages.min(65_536), ..HostConfig::default() };
    let config = FleetConfig { engines, host, rate: options.rate };
    println!(
        "{} requests, {engines} engines of {pages} pages of {page_size} tokens, {} tokens a second each",
        requests.len(),
        options.rate
    );
    println!(
        "\n{:<16}{:>10}{:>10}{:>12}{:>12}{:>10}{:>11}{:>10}{:>10}",
        "policy", "hit", "busiest/", "mean wait", "p99 wait", "events", "events/s", "MB", "KB/s"
    );
    println!("{:<16}{:>10}{:>10}{:>12}{:>12}", "", "tokens", "mean", "s", "s");
    let mut outcomes = Vec::new();
    for policy in Policy::ALL {
        let outcome = run(&config, policy, &requests);
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
        println!("{skipped} requests fit no engine and were left out");
    }
    if let Some(path) = &options.plot {
        std::fs::write(path, plot::draw(&outcomes))?;
        println!("the picture is in {}", path.display());
    }
    println!("\nwhat one engine does besides serving     us a request    ns a page stored");
    let few = &requests[..requests.len().min(1000)];
    let all = costs(host, few);
    let bare = all[0];
    for cost in &all {
        let more = (cost.seconds - bare.seconds) * 1e9 / cost.pages.max(1) as f64;
        println!(
            "{:<40}{:>13.1}{:>20.1}",
            cost.what,
            cost.seconds * 1e6 / cost.requests.max(1) as f64,
            more
        );
    }
    let last = outcomes.last().expect("there are policies");
    let apply = last.apply_seconds / last.seconds.max(1e-9);
    println!(
        "\nthe router's index took over {} events in {:.2} s: {:.4}% of one core for the trace's {:.0} s, so by time \
         one core holds {:.0} such engines",
        last.events,
        last.apply_seconds,
        100.0 * apply,
        last.seconds,
        engines as f64 / apply.max(1e-12),
    );
    if let Some(bytes) = index_bytes {
        let engine = bytes * f64::from(pages);
        println!(
            "it takes {bytes:.0} bytes a page, {:.1} MB for an engine that is full: a GiB holds {:.0} engines",
            engine / 1e6,
            f64::from(1 << 30) / engine
        );
    }
    Ok(())
}
