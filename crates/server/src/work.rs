//! The work of the command line: requests, a chat or a server.

use kvarena::EngineConfig;

use crate::args::Args;
use crate::demo;
use crate::http::Door;
use crate::setup::{defaults, unusable};
use kvarena_host::config::ModelConfig;
use kvarena_host::error::{Error, Result};
use kvarena_host::generation::Generation;
use kvarena_host::request::{Defaults, Request, read_requests};
use kvarena_host::sample::splitmix;
use kvarena_host::server::Limits;
use kvarena_host::text::Text;

/// The work of the command line. It is checked before weights are read.
pub enum Work {
    /// Serve clients over HTTP.
    Serve(Box<Door>),
    /// Chat on the terminal.
    Chat,
    /// Serve these requests.
    Requests(Vec<Request>),
}

/// Returns the work of the command line.
///
/// # Errors
/// An option or a request is not valid, an address cannot be bound, or a chat has no template.
pub fn work(args: &Args, model: &ModelConfig, text: &Text) -> Result<Work> {
    if let Some(address) = &args.serve {
        return Door::open(args, address).map(|door| Work::Serve(Box::new(door)));
    }
    if args.chat {
        return text.template().map(|_| Work::Chat);
    }
    requests(args, model, text).map(Work::Requests)
}

impl Work {
    /// Checks the requests against the sizes of the model and the pool.
    ///
    /// # Errors
    /// A request is not valid or too long, or the pool cannot be created.
    pub fn check(&self, model: &ModelConfig, config: &EngineConfig) -> Result<()> {
        let Self::Requests(requests) = self else { return Ok(()) };
        let limits = Limits::new(model, &config.shape().map_err(unusable)?);
        let check = |(number, request): (usize, &Request)| match limits.check(request.clone()) {
            Ok(_) => Ok(()),
            Err(what) => Err(Error::request(format!("request {number}: {what}"))),
        };
        requests.iter().enumerate().try_for_each(check)
    }
}

/// Returns whether the demo's questions are the requests: the command line gives no requests, model or `--chat`.
pub fn is_demo(args: &Args) -> bool {
    let has_requests = !args.prompt.is_empty() || args.requests.is_some() || args.random_requests.is_some();
    let has_model = args.model.is_some() || args.random_model.is_some();
    !has_requests && !has_model && !args.chat
}

/// Returns the requests of the command line, or the demo's questions if it names neither requests nor a model.
///
/// # Errors
/// A file cannot be read, a line, a prompt or `--random-requests` is not valid, or the command line names no requests.
fn requests(args: &Args, model: &ModelConfig, text: &Text) -> Result<Vec<Request>> {
    let defaults = defaults(args, model, &Generation::default());
    let mut requests = Vec::new();
    for prompt in &args.prompt {
        requests.push(defaults.request(text.encode(prompt)?));
    }
    if let Some(path) = &args.requests {
        requests.extend(read_requests(path, &defaults, text)?);
    }
    if let Some(counts) = &args.random_requests {
        requests.extend(random_requests(counts, args.seed, model, &defaults)?);
    }
    if !requests.is_empty() || args.requests.is_some() {
        return Ok(requests);
    }
    if !is_demo(args) {
        let ways = "--prompt, --requests, --random-requests or --chat";
        return Err(Error::request(format!("nothing to generate: give {ways}")));
    }
    demo::QUESTIONS.iter().map(|question| demo::request(question, &defaults, text)).collect()
}

fn random_requests(counts: &str, seed: u64, model: &ModelConfig, defaults: &Defaults) -> Result<Vec<Request>> {
    let parts =
        counts.split_once(':').and_then(|(count, len)| Some((count.parse::<u32>().ok()?, len.parse::<u32>().ok()?)));
    let Some((count, len)) = parts else {
        return Err(Error::request(format!("--random-requests {counts:?} is not COUNT:LEN")));
    };
    let mut state = seed;
    let mut token = || (splitmix(&mut state) % model.vocab as u64) as u32;
    Ok((0..count).map(|_| defaults.request((0..len).map(|_| token()).collect())).collect())
}
