//! `generate`: reads the command line, serves, and says what went wrong.

use std::io::{stdin, stdout};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};

use clap::Parser;
use generate::args::{Args, BackendName};
use generate::chat::chat;
use generate::error::{Error, Result};
use generate::memory::{HostMemory, Memory};
use generate::model::Model;
use generate::output::{Form, Printer};
use generate::server::Server;
use generate::setup;
use generate::text::Text;
use kvarena::{Cpu, Engine};

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
    let (model, text) = setup::model(args)?;
    match args.backend {
        BackendName::Cpu => {
            let cpu = args.threads.map_or_else(Cpu::new, |n| Cpu::with_threads(n.into()));
            serve(args, &model, &text, cpu, HostMemory)
        }
        BackendName::Cuda => serve_cuda(args, &model, &text),
    }
}

#[cfg(feature = "cuda")]
fn serve_cuda(args: &Args, model: &Model, text: &Text) -> Result<()> {
    // A step holds a chunk of prompts and a token of every stream.
    let tokens = args.chunk.saturating_add(args.concurrency);
    let (backend, memory) = generate::cuda::open(args.kv_dtype.into(), tokens)
        .map_err(|e| Error::run(format!("no GPU can be used: {e}")))?;
    serve(args, model, text, backend, memory)
}

#[cfg(not(feature = "cuda"))]
fn serve_cuda(_: &Args, _: &Model, _: &Text) -> Result<()> {
    Err(Error::request("--backend cuda needs a build with --features cuda"))
}

fn serve<M: Memory>(
    args: &Args,
    model: &Model,
    text: &Text,
    backend: M::Backend,
    memory: M,
) -> Result<()> {
    let config = setup::engine_config(args, &model.config)?;
    let engine = Engine::new(config, backend).map_err(|error| {
        let cause = std::error::Error::source(&error).map(|cause| format!(": {cause}"));
        Error::run(format!("cannot make the engine: {error}{}", cause.unwrap_or_default()))
    })?;
    let mut server = Server::new(model, engine, memory, setup::policy(args));
    if args.chat {
        let defaults = setup::defaults(args, &model.config);
        let system = args.system.as_deref();
        chat(&mut server, text, &defaults, system, stdin().lock(), stdout().lock(), &INTERRUPT)?;
    } else {
        let requests = setup::requests(args, &model.config, text)?;
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
        printer.finish()?;
    }
    if !args.quiet {
        let (tally, clock) = server.tally();
        eprint!("{}", tally.report(&server.engine().stats(), clock, server.streams()));
    }
    Ok(())
}
