//! `generate`: reads the command line, serves, and says what went wrong.

use std::io::{stdin, stdout};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};

use clap::Parser;
use generate::args::{Args, BackendName};
use generate::chat::chat;
use generate::cpu::CpuRunner;
use generate::error::{Error, Result};
use generate::output::{Form, Printer};
use generate::runner::Runner;
use generate::server::Server;
use generate::setup;
use generate::text::Text;
use kvarena::{CpuOptions, Engine};

/// Set by Ctrl-C: the streams now running are cancelled.
static INTERRUPT: AtomicBool = AtomicBool::new(false);

fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("generate: {error}");
            ExitCode::from(error.fault as u8)
        }
    }
}

fn run(args: &Args) -> Result<()> {
    let threads = args.threads.map_or(0, usize::from); // 0: all cores
    rayon::ThreadPoolBuilder::new()
        .num_threads(threads)
        .build_global()
        .map_err(|e| Error::run(format!("cannot start {threads} threads: {e}")))?;
    // The second Ctrl-C finds nobody who took heed of the first.
    let interrupt = || {
        if INTERRUPT.swap(true, Ordering::Relaxed) {
            std::process::exit(130);
        }
    };
    ctrlc::set_handler(interrupt).map_err(|e| Error::run(format!("cannot catch Ctrl-C: {e}")))?;
    match args.backend {
        BackendName::Cpu => {
            let (model, text) = setup::model(args)?;
            let threads = |n: u16| CpuOptions::with_threads(n.into());
            let cpu = args.threads.map_or_else(CpuOptions::default, threads);
            let config = setup::engine_config(args, &model.config, setup::POOL_BYTES)?;
            let engine = Engine::new(config, cpu).map_err(setup::no_engine)?;
            let mut server = Server::new(CpuRunner::new(&model), engine, setup::policy(args));
            serve(args, &text, &mut server)?;
            report(args, &server);
            Ok(())
        }
        BackendName::Cuda => on_gpu(args),
    }
}

#[cfg(feature = "cuda")]
fn on_gpu(args: &Args) -> Result<()> {
    use generate::gpu;
    if args.check {
        return gpu::check::run(&mut stdout().lock());
    }
    if let Some(part) = args.bench {
        return gpu::bench::run(args, part, &mut stdout().lock());
    }
    let (mut server, text) = gpu::setup::server(args)?;
    serve(args, &text, &mut server)?;
    let times = gpu::report::Times::of(&server);
    if args.json {
        println!("{}", times.json());
    }
    report(args, &server);
    if !args.quiet {
        eprint!("{}", times.text());
    }
    Ok(())
}

#[cfg(not(feature = "cuda"))]
fn on_gpu(_: &Args) -> Result<()> {
    Err(Error::request("a GPU needs a build with --features cuda"))
}

fn serve<R: Runner>(args: &Args, text: &Text, server: &mut Server<R>) -> Result<()> {
    if args.chat {
        let defaults = setup::defaults(args, server.runner().config());
        let system = args.system.as_deref();
        return chat(server, text, &defaults, system, stdin().lock(), stdout().lock(), &INTERRUPT);
    }
    let requests = setup::requests(args, server.runner().config(), text)?;
    let form = match (args.json, &requests[..]) {
        (true, _) => Form::Json,
        (false, [only]) if only.samples == 1 => Form::Live,
        (false, _) => Form::Blocks,
    };
    for request in requests {
        server.submit(request)?;
    }
    let printer = Printer::new(stdout().lock(), text, form, &INTERRUPT);
    let mut printer = printer.with_first_logits(args.first_logits);
    server.run(&mut printer)?;
    printer.finish()
}

fn report<R: Runner>(args: &Args, server: &Server<R>) {
    if !args.quiet {
        let (tally, clock) = server.tally();
        eprint!("{}", tally.report(&server.engine().stats(), clock, server.streams()));
    }
}
