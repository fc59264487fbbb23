//! `generate`: reads the command line, serves, and says what went wrong.

use std::io::{IsTerminal, stdin, stdout};
use std::process::ExitCode;

use clap::Parser;
use generate::args::{Args, BackendName};
use generate::calibrate::{self, Calibrating};
use generate::chat::{Console, Interrupt, chat};
use generate::cpu::CpuRunner;
use generate::demo;
use generate::error::{Error, Result};
use generate::http;
use generate::output::{Form, Printer};
use generate::runner::Runner;
use generate::server::Server;
use generate::setup;
use generate::text::Text;
use kvarena::Engine;

/// What Ctrl-C has asked for.
static INTERRUPT: Interrupt = Interrupt::new();

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
    if args.serve.is_none() {
        let interrupt = || {
            if INTERRUPT.ask() {
                std::process::exit(130);
            }
        };
        ctrlc::set_handler(interrupt)
            .map_err(|e| Error::run(format!("cannot catch Ctrl-C: {e}")))?;
    }
    match args.backend {
        BackendName::Cpu => {
            let (model, text) = setup::model(args)?;
            let cpu = setup::cpu_options(args)?;
            let config = setup::engine_config(args, &model.config, setup::POOL_BYTES)?;
            let engine = Engine::new(config, cpu).map_err(setup::no_engine)?;
            let (runner, policy) = (CpuRunner::new(&model), setup::policy(args));
            if let Some(path) = &args.calibrate {
                let mut server = Server::new(Calibrating::new(runner), engine, policy);
                serve(args, text, &mut server)?;
                return calibrate::write(path, &server.runner().scales()?);
            }
            let mut server = Server::new(runner, engine, policy);
            serve(args, text, &mut server)?;
            report(args, &server);
            Ok(())
        }
        BackendName::Cuda if args.calibrate.is_some() => {
            Err(Error::request("--calibrate is for the CPU"))
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
    serve(args, text, &mut server)?;
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

fn serve<R: Runner>(args: &Args, text: Text, server: &mut Server<R>) -> Result<()> {
    if let Some(address) = &args.serve {
        return http::run(args, address, text, server);
    }
    let text = &text;
    if args.chat {
        let defaults = setup::defaults(args, server.runner().config());
        let system = args.system.as_deref();
        let sign = if stdin().is_terminal() { "> " } else { "" };
        let console = Console { input: stdin().lock(), out: stdout().lock(), sign };
        return chat(server, text, &defaults, system, console, &INTERRUPT);
    }
    if setup::is_demo(args) && !args.json {
        let defaults = setup::defaults(args, server.runner().config());
        return demo::show(server, text, &defaults, stdout().lock(), &INTERRUPT.asked);
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
    let printer = Printer::new(stdout().lock(), text, form, &INTERRUPT.asked);
    let mut printer = printer.with_first_logits(args.first_logits);
    server.run(&mut printer)?;
    printer.finish()
}

fn report<R: Runner>(args: &Args, server: &Server<R>) {
    if !args.quiet {
        let (tally, clock) = server.tally();
        eprint!("{}", tally.report(&server.engine().stats(), clock));
    }
}
