//! `kvarena-server`: reads the command line, serves, and reports errors.

use std::io::{IsTerminal, StdoutLock, stdin, stdout};
use std::process::ExitCode;

use clap::Parser;
use kvarena::layout::LabelChannels;
use kvarena::{CpuOptions, Engine, EngineConfig};
use kvarena_host::calibrate;
use kvarena_host::cpu::CpuRunner;
use kvarena_host::error::{Error, Result};
use kvarena_host::generation::Generation;
use kvarena_host::memory;
use kvarena_host::request::Request;
use kvarena_host::runner::Runner;
use kvarena_host::server::Server;
use kvarena_host::sparse::Sparse;
use kvarena_host::sparse::change::{Change, Count, RecordedTokens};
use kvarena_host::sparse::channels;
use kvarena_host::sparse::reader::Reader;
use kvarena_host::sparse::recall::Recall;
use kvarena_host::text::Text;
use kvarena_server::args::{Args, BackendName};
use kvarena_server::chat::{Console, Interrupt, chat};
use kvarena_server::demo;
use kvarena_server::http;
use kvarena_server::output::{Form, Printer};
use kvarena_server::setup::{self, Unread};
use kvarena_server::work::{self, Work};
use serde_json::json;

/// The state of Ctrl-C.
static INTERRUPT: Interrupt = Interrupt::new();

fn main() -> ExitCode {
    if std::env::args().skip(1).eq(["--help", "fields"]) {
        print!("{}", http::fields::table());
        return ExitCode::SUCCESS;
    }
    match run(&Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("kvarena-server: {error}");
            ExitCode::from(error.fault as u8)
        }
    }
}

fn run(args: &Args) -> Result<()> {
    if args.chat && args.n > 1 {
        return Err(Error::request(format!("--n {} is not for --chat: a turn has one answer", args.n)));
    }
    let threads = args.threads.map_or(0, usize::from); // 0: all cores
    rayon::ThreadPoolBuilder::new()
        .num_threads(threads)
        .build_global()
        .map_err(|e| Error::run(format!("cannot start {threads} threads: {e}")))?;
    if args.serve.is_none() {
        let interrupt = || {
            if INTERRUPT.record() {
                std::process::exit(130);
            }
        };
        ctrlc::set_handler(interrupt).map_err(|e| Error::run(format!("cannot catch Ctrl-C: {e}")))?;
    }
    match args.backend {
        BackendName::Cpu if args.tp > 1 => Err(Error::request("--tp is for GPUs")),
        BackendName::Cpu if args.bench.is_some() => Err(Error::request("--bench is for GPUs")),
        BackendName::Cpu => on_cpu(args),
        BackendName::Cuda if args.calibrate.is_some() => Err(Error::request("--calibrate is for the CPU")),
        BackendName::Cuda => on_gpu(args),
    }
}

fn on_cpu(args: &Args) -> Result<()> {
    let (unread, text) = setup::model_files(args)?;
    let shape = &unread.config;
    let work = work::work(args, shape, &text)?;
    let cpu = setup::cpu_options(args)?;
    let config = setup::engine_config(args, shape, setup::POOL_BYTES)?;
    work.check(shape, &config)?;
    if let Some(sparse) = args.sparse {
        return sparsely(args, sparse, &unread, text, work, cpu, config);
    }
    let model = unread.model(args)?;
    let engine = Engine::new(config, cpu).map_err(setup::no_engine)?;
    let (runner, policy) = (CpuRunner::new(&model), setup::policy(args, shape)?);
    if let Some(path) = &args.calibrate {
        let mut server = Server::new(runner.calibrate(), engine, policy);
        serve(args, text, work, &mut server)?;
        return calibrate::write(path, &server.runner().largest().expect("the runner measures").scales()?);
    }
    let mut server = args.cache.attach(args, Server::new(runner, engine, policy))?;
    serve(args, text, work, &mut server)?;
    report(args, &server);
    Ok(())
}

/// Serves with sparse reads.
fn sparsely(
    args: &Args,
    sparse: Sparse,
    unread: &Unread,
    text: Text,
    work: Work,
    cpu: CpuOptions,
    config: EngineConfig,
) -> Result<()> {
    let given = args.labels.as_deref().map(channels::read).transpose()?;
    let count = sparse.channels(given.as_ref().map(LabelChannels::channels))?;
    let (kept, table) = sparse.engine(&config, count)?;
    let given = given.map(|labels| labels.local(&kept.pool)).transpose();
    let given = given.map_err(|error| Error::request(format!("--labels: {error}")))?;
    if given.is_none() && (args.chat || args.serve.is_some()) {
        return Err(Error::request("--sparse with --chat or --serve needs --labels"));
    }
    let open = |config, labels| Engine::new(config, CpuOptions { labels, ..cpu.clone() }).map_err(setup::no_engine);
    let model = &unread.model(args)?;
    let reader = Reader::new(sparse.top, args.recall.then(|| Recall::new(table)));
    let runner = CpuRunner::new(model).read_sparsely(reader);
    let policy = setup::policy(args, &model.config)?;
    let requests = match work {
        Work::Requests(requests) => requests,
        work => {
            let mut server = Server::new(runner, open(kept, given)?, policy);
            serve(args, text, work, &mut server)?;
            report(args, &server);
            return Ok(());
        }
    };
    let mut recorded = RecordedTokens::new(&INTERRUPT.cancel);
    let labels = match given {
        Some(labels) if !args.recall => labels,
        given => {
            // The first pass reads all positions, to choose the channels and to record the tokens.
            let mut server = Server::new(CpuRunner::new(model).measure(), open(config, None)?, policy);
            submit(&mut server, &requests)?;
            server.run(&mut recorded)?;
            let measured = server.runner().measured().expect("the runner measures");
            given.map_or_else(|| measured.best(count), Ok)?
        }
    };
    if let Some(path) = &args.save_labels {
        channels::write(path, &labels)?;
    }
    let mut server = Server::new(runner, open(kept, Some(labels))?, policy);
    let change = print_change(args, &text, &requests, &mut server, &recorded)?;
    report(args, &server);
    report_sparse(args, change, server.runner().reader().and_then(Reader::recall));
    Ok(())
}

/// Serves requests with sparse reads, and counts the tokens that differ from the recorded ones.
fn print_change<R: Runner>(
    args: &Args,
    text: &Text,
    requests: &[Request],
    server: &mut Server<R>,
    recorded: &RecordedTokens<'_>,
) -> Result<Count> {
    submit(server, requests)?;
    let mut printer = printer(args, text, requests);
    let mut change = Change::new(&mut printer, recorded);
    server.run(&mut change)?;
    let change = change.count();
    printer.finish()?;
    Ok(change)
}

fn report_sparse(args: &Args, change: Count, recall: Option<&Recall>) {
    if args.json {
        let recall = recall.map(Recall::json);
        println!("{}", json!({"report": {"change": change.json(), "recall": recall}}));
    }
    if args.quiet {
        return;
    }
    eprintln!("{change}");
    if let Some(recall) = recall {
        eprintln!("{recall}");
    }
}

#[cfg(feature = "cuda")]
fn on_gpu(args: &Args) -> Result<()> {
    use kvarena_server::gpu;
    if let Some(part) = args.bench {
        return gpu::bench::run(args, part, &mut stdout().lock());
    }
    let mut loaded = gpu::setup::Loaded::new(args)?;
    let work = work::work(args, &loaded.config, &loaded.text)?;
    // Without --pages, the memory that the weights leave decides the size of the pool.
    if args.pages.is_some() {
        work.check(&loaded.config, &setup::engine_config(args, &loaded.config, 0)?)?;
    }
    let text = std::mem::take(&mut loaded.text);
    match (args.tp, work) {
        (_, Work::Requests(requests)) if args.sparse.is_some() && args.labels.is_none() => {
            measured_on_gpu(args, &loaded, &text, &requests)
        }
        (1, work) => serve_on_gpu(args, text, work, args.cache.attach(args, loaded.one(args)?)?),
        (_, work) => serve_on_gpu(args, text, work, args.cache.attach(args, loaded.ranks(args)?)?),
    }
}

#[cfg(feature = "cuda")]
fn serve_on_gpu(
    args: &Args,
    text: Text,
    work: Work,
    mut server: Server<impl kvarena_host::gpu::runner::OnGpu>,
) -> Result<()> {
    serve(args, text, work, &mut server)?;
    report_on_gpu(args, &server);
    Ok(())
}

/// Serves with sparse reads; the first pass reads all positions and measures the channels.
#[cfg(feature = "cuda")]
fn measured_on_gpu(
    args: &Args,
    loaded: &kvarena_server::gpu::setup::Loaded,
    text: &Text,
    requests: &[Request],
) -> Result<()> {
    use kvarena_host::gpu::sparse::Reading;
    let Some(sparse) = args.sparse else { unreachable!("`--sparse` is set") };
    let mut runner = loaded.runner(args)?;
    runner.measure_channels()?;
    let mut recorded = RecordedTokens::new(&INTERRUPT.cancel);
    let mut server = loaded.server(args, runner, None)?;
    submit(&mut server, requests)?;
    server.run(&mut recorded)?;
    // Both passes use the same runner, and so the same implementations of products.
    let mut runner = server.into_runner();
    let measured = runner.take_measured().expect("the runner measures");
    let labels = measured.best(sparse.channels(None)?)?;
    if let Some(path) = &args.save_labels {
        channels::write(path, &labels)?;
    }
    let reading = Some(Reading { top: sparse.top, labels });
    let mut server = loaded.server(args, runner, reading)?;
    let change = print_change(args, text, requests, &mut server, &recorded)?;
    report_on_gpu(args, &server);
    report_sparse(args, change, None);
    Ok(())
}

#[cfg(feature = "cuda")]
fn report_on_gpu(args: &Args, server: &Server<impl kvarena_host::gpu::runner::OnGpu>) {
    let (json, line) = kvarena_server::gpu::report::report(server);
    if args.json {
        println!("{json}");
    }
    report(args, server);
    if !args.quiet {
        eprint!("{line}");
    }
}

#[cfg(not(feature = "cuda"))]
fn on_gpu(_: &Args) -> Result<()> {
    Err(Error::request("a GPU needs a build with --features cuda"))
}

fn serve<R: Runner>(args: &Args, text: Text, work: Work, server: &mut Server<R>) -> Result<()> {
    let text = match work {
        Work::Serve(door) => return http::run(args, *door, text, server),
        Work::Chat | Work::Requests(_) => &text,
    };
    let defaults = setup::defaults(args, server.runner().config(), &Generation::default());
    let Work::Requests(requests) = work else {
        let system = args.system.as_deref();
        let sign = if stdin().is_terminal() { "> " } else { "" };
        let console = Console { input: stdin().lock(), out: stdout().lock(), sign };
        chat(server, text, &defaults, system, console, &INTERRUPT)?;
        return args.cache.finish(args, server);
    };
    if work::is_demo(args) && !args.json {
        return demo::show(server, text, &defaults, stdout().lock(), &INTERRUPT.cancel);
    }
    submit(server, &requests)?;
    let mut printer = printer(args, text, &requests);
    server.run(&mut printer)?;
    args.cache.finish(args, server)?;
    printer.finish()
}

fn submit<R: Runner>(server: &mut Server<R>, requests: &[Request]) -> Result<()> {
    requests.iter().try_for_each(|request| server.submit(request.clone()).map(drop))
}

fn printer<'a>(args: &Args, text: &'a Text, requests: &[Request]) -> Printer<'a, StdoutLock<'static>> {
    let form = match (args.json, requests) {
        (true, _) => Form::Json,
        (false, [only]) if only.samples == 1 => Form::Live,
        (false, _) => Form::Blocks,
    };
    let printer = Printer::new(stdout().lock(), text, form, &INTERRUPT.cancel);
    printer.with_first_logits(args.first_logits)
}

fn report<R: Runner>(args: &Args, server: &Server<R>) {
    if !args.quiet {
        let (tally, clock) = server.tally();
        eprint!("{}", tally.report(&server.engine().stats(), clock));
        eprint!("{}", memory::report(&server.engine().shape().layout).unwrap_or_default());
    }
}
