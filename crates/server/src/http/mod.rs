//! The server: OpenAI's HTTP API around the serving loop.
//!
//! ```text
//! clients        tasks of a runtime of their own threads             the engine's thread (that of `main`)
//!   HTTP  --->  routes: ask (check) --- Job ---> queue (bounded) ---> desk: Server::step, step after step
//!         <---  answer: choice, stop  <--- Event for each token ------'
//! ```
//!
//! ```text
//! options, connections   the command line; accepting, time limits, the bound of open connections
//! intake, guard          what requests may hold; the API key and origins
//! fields, body, host     the table of fields; typed look-ups; the served model and its limits
//! ask                    a request with all its checks
//! prompt, tokens         prompts and messages as tokens; /tokenize
//! refusal                why a request is not served
//! queue, job, desk       what waits; what passes between the two sides; the engine's side
//! stop, choice, answer   stop strings; a choice's text; the answer's JSON
//! sse, routes            framing; paths
//! board, journal         metrics for monitors; the request log
//! announcer              the cache events for routers
//! ```
//!
//! A client that goes away drops its `Ticket`: the loop ends its streams before the next step, and their pages return.
//! Tokens become text, and stop strings are looked for, on the client's side, so that steps do not wait for that; a
//! stream whose text has stopped is ended a step or two later. SIGTERM closes the queue: what is in it ends, then the
//! engine's state is audited, and the program ends.
//!
//! Not here: the loop (`server`), who computes (`runner`).

pub mod announcer;
mod answer;
mod ask;
mod board;
mod body;
mod choice;
mod connections;
mod desk;
mod fields;
mod guard;
mod host;
mod intake;
mod job;
mod journal;
pub mod options;
mod prompt;
mod queue;
mod refusal;
mod routes;
mod sse;
mod stop;
mod tokens;

use std::hash::{BuildHasher, RandomState};
use std::io::Write;
use std::net::TcpListener;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::Router;
use tokio::runtime::{Builder, Runtime};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::oneshot;

use crate::args::Args;
use crate::setup;
use announcer::Announcer;
use board::Board;
use host::Host;
use intake::Intake;
use job::Job;
use kvarena_host::error::{Error, Result};
use kvarena_host::runner::Runner;
use kvarena_host::server::Server;
use kvarena_host::text::Text;
use options::Bounds;
use queue::Queue;
use routes::{App, crowded, router};

/// Threads for clients, and as many again for prompts that are being encoded.
const THREADS: usize = 4;
/// How long clients may take to read the ends of their answers once everything has been generated.
const GRACE: Duration = Duration::from_secs(10);

/// Serves at `address` until SIGTERM or Ctrl-C, and then until what was taken in has ended.
///
/// # Errors
/// Nobody can listen there, the run failed, or the audit at the end found pages in use.
pub fn run<R: Runner>(
    args: &Args,
    address: &str,
    text: Text,
    server: &mut Server<R>,
) -> Result<()> {
    let no_address = |e: std::io::Error| Error::request(format!("cannot listen at {address}: {e}"));
    let listener = TcpListener::bind(address).map_err(no_address)?;
    listener.set_nonblocking(true).map_err(no_address)?;
    let local = listener.local_addr().map_err(no_address)?;
    let (bounds, cors) = (args.http.bounds()?, guard::cors(&args.http.cors_origin)?);
    let key = args.http.key()?;
    if key.as_ref().is_some_and(|key| key.bytes().len() > guard::KEY_BYTES_MAX) {
        let most = guard::KEY_BYTES_MAX;
        return Err(Error::request(format!("the API key has more than {most} bytes")));
    }
    journal::begin(args.http.log);
    let host = host(args, text, server)?;
    let name = host.model.clone();
    let app = app(args, host);
    let routers = (router(Arc::clone(&app), key, cors), crowded(Arc::clone(&app)));
    let (queue, board) = (Arc::clone(&app.queue), Arc::clone(&app.board));
    let runtime = runtime()?;
    let page_size = server.limits().page_size;
    let announcer = Announcer::bind(&args.http, page_size, &runtime)?;
    let signals = {
        let _entered = runtime.enter();
        Signals::catch()?
    };
    let (over, is_over) = oneshot::channel();
    let clients =
        runtime.spawn(listen(listener, routers, bounds, Arc::clone(&queue), signals, is_over));
    announce(&format!("serving {name} at http://{local}"))?;
    if let Some((endpoint, replay)) = announcer.as_ref().map(Announcer::endpoints) {
        announce(&format!("events at {endpoint}, missed ones at {replay}"))?;
    }
    board.post(server, board::Ended::default());
    let outcome = desk::serve(server, &queue, &board, announcer);
    // The queue is closed and nothing runs; clients still read.
    let _ = over.send(());
    let _ = runtime.block_on(async { tokio::time::timeout(GRACE, clients).await });
    runtime.shutdown_background();
    outcome?;
    announce(&desk::audit(server)?)
}

fn runtime() -> Result<Runtime> {
    let mut builder = Builder::new_multi_thread();
    builder.worker_threads(THREADS).max_blocking_threads(THREADS).enable_all();
    builder.build().map_err(|e| Error::run(format!("cannot start threads: {e}")))
}

fn announce(what: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    let wrote = writeln!(out, "{what}").and_then(|()| out.flush());
    wrote.map_err(|e| Error::run(format!("cannot write the output: {e}")))
}

fn host<R: Runner>(args: &Args, text: Text, server: &Server<R>) -> Result<Host> {
    let model = match args.random_model {
        Some(shape) => shape.name(),
        None => {
            let dir = setup::model_dir(args)?;
            let dir = dir.canonicalize().unwrap_or(dir);
            dir.file_name().unwrap_or(Path::new("model").as_os_str()).to_string_lossy().into_owned()
        }
    };
    let streams = args.concurrency as usize;
    let samples_max = (server.runner().draws_max() / streams).max(1) as u64;
    Ok(Host {
        model,
        text,
        limits: server.limits(),
        defaults: setup::defaults(args, server.runner().config()),
        samples_max: samples_max.min(args.http.max_n.into()) as u32,
        shapes: server.runner().edits_max() > 0,
        salts: RandomState::new(),
        keeps_logits: server.runner().keeps_logits(),
    })
}

fn app(args: &Args, host: Host) -> Arc<App> {
    let options = &args.http;
    let body_time = Duration::from_secs(options.body_timeout);
    let created = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    Arc::new(App {
        host: Arc::new(host),
        queue: Arc::new(Queue::<Job>::new(options.queue as usize)),
        intake: Intake::new(options.max_body, body_time, options.max_waiting_tokens),
        board: Arc::new(Board::default()),
        // Its keys are random, as the standard library has no other numbers that are.
        run: RandomState::new().hash_one(created),
        answers: AtomicU64::new(0),
        created,
    })
}

/// Answers clients until the engine's thread has stopped (`is_over`), and then the clients whose answers are not
/// complete. After a request to stop, the server accepts no more requests and reports this to monitors.
async fn listen(
    listener: TcpListener,
    routers: (Router, Router),
    bounds: Bounds,
    queue: Arc<Queue<Job>>,
    mut signals: Signals,
    is_over: oneshot::Receiver<()>,
) {
    tokio::spawn(async move {
        signals.next().await;
        queue.close();
        signals.next().await;
        std::process::exit(130);
    });
    let listener = match tokio::net::TcpListener::from_std(listener) {
        Ok(listener) => listener,
        Err(error) => return eprintln!("generate: cannot listen: {error}"),
    };
    let end = async {
        // A sender that is dropped is an end too.
        let _ = is_over.await;
    };
    connections::serve(listener, routers, bounds, end).await;
}

/// Who may ask for an end.
struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    /// Catches them from now on. Called where a runtime is entered.
    fn catch() -> Result<Self> {
        let catch =
            |kind| signal(kind).map_err(|e| Error::run(format!("cannot catch signals: {e}")));
        let terminate = catch(SignalKind::terminate())?;
        Ok(Self { terminate, interrupt: catch(SignalKind::interrupt())? })
    }

    /// Waits for SIGTERM or Ctrl-C.
    async fn next(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}
