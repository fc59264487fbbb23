//! The server: OpenAI's HTTP API around the serving loop.
//!
//! ```text
//! clients        tasks of a runtime with its own threads              the engine's thread (that of `main`)
//!   HTTP  --->  routes: checked_request --- Job ---> queue (bounded) ---> engine_loop: Server::step, step after step
//!         <---  answer: choice, stop  <--- Event for each token ------'
//! ```
//!
//! ```text
//! options, connections   the command line; accepting, the bound of open connections
//! peer, watched          a connection's state and time limits; streams that record it and detect hang-ups
//! intake, guard          limits of requests; the API key and origins
//! fields, body, host     the table of fields; typed look-ups; the served model and its limits
//! checked_request        a request with all its checks
//! prompt, tokens         prompts and messages as tokens; /tokenize and /detokenize
//! api_error              errors of rejected requests
//! queue, job             waiting requests; messages between clients and engine
//! engine_loop            the engine's thread
//! stop, choice, answer   stop strings; a choice's text; the answer's JSON
//! sse, routes            framing; paths
//! metrics, journal       metrics; the request log
//! announcer              cache events for routers
//! ```
//!
//! If a client disconnects, its task drops the `JobHandle`. The loop then ends the client's streams and releases their
//! pages before the next step. The clients' tasks convert tokens to text and search for stop strings, so that steps do
//! not wait for this work. A stream therefore ends one or two steps after its stop string. SIGTERM closes the queue.
//! Then the accepted requests finish, the engine audits its state, and the program ends.

pub mod announcer;
mod answer;
mod api_error;
mod body;
mod checked_request;
mod choice;
mod connections;
mod engine_loop;
pub mod fields;
mod guard;
mod host;
mod intake;
mod job;
mod journal;
mod metrics;
pub mod options;
mod peer;
mod prompt;
mod queue;
mod routes;
mod sse;
mod stop;
mod tokens;
mod watched;

use std::hash::{BuildHasher, RandomState};
use std::io::Write;
use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::Router;
use tokio::runtime::{Builder, Runtime};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::oneshot;
use tower_http::cors::CorsLayer;

use crate::args::Args;
use crate::{built_in, setup};
use announcer::Announcer;
use host::Host;
use intake::Intake;
use job::Job;
use kvarena_host::error::{Error, Result};
use kvarena_host::generation::Generation;
use kvarena_host::runner::Runner;
use kvarena_host::server::Server;
use kvarena_host::text::Text;
use metrics::Metrics;
use options::{Bounds, Secret};
use queue::Queue;
use routes::{App, crowded, router};

/// Number of threads for the clients' tasks. As many other threads encode prompts.
const THREADS: usize = 4;
/// Time that clients have, after the last token has been generated, to read the rest of their answers.
const GRACE: Duration = Duration::from_secs(10);

/// The bound addresses and the checked options of a server. Clients that connect before the server runs wait.
pub struct Door {
    listener: TcpListener,
    local: SocketAddr,
    bounds: Bounds,
    cors: CorsLayer,
    key: Option<Secret>,
    generation: Generation,
    runtime: Runtime,
    announcer: Option<Announcer>,
}

impl Door {
    /// Checks the options of the server, and binds its addresses.
    ///
    /// # Errors
    /// An address cannot be bound, an option is invalid, or `generation_config.json` is.
    pub fn open(args: &Args, address: &str) -> Result<Self> {
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
        let generation = setup::generation(args)?;
        let runtime = runtime()?;
        let announcer = Announcer::bind(&args.http, &runtime)?;
        Ok(Self { listener, local, bounds, cors, key, generation, runtime, announcer })
    }
}

/// Serves until SIGTERM or Ctrl-C, and then until all accepted requests have ended.
///
/// # Errors
/// The backend does not support a default of requests, the run failed, or the audit at the end failed.
pub fn run<R: Runner>(args: &Args, door: Door, text: Text, server: &mut Server<R>) -> Result<()> {
    let Door { listener, local, bounds, cors, key, generation, runtime, announcer } = door;
    journal::begin(args.http.log);
    let host = host(args, &generation, text, server)?;
    let name = host.model.clone();
    let app = app(args, host);
    let (router, crowded) = (router(Arc::clone(&app), key, cors), crowded(Arc::clone(&app)));
    let (queue, metrics) = (Arc::clone(&app.queue), Arc::clone(&app.metrics));
    let signals = {
        let _entered = runtime.enter();
        Signals::catch()?
    };
    let (over, is_over) = oneshot::channel();
    let clients = runtime.spawn(listen(listener, router, crowded, bounds, Arc::clone(&queue), signals, is_over));
    announce(&format!("serving {name} at http://{local}"))?;
    if let Some((endpoint, replay)) = announcer.as_ref().map(Announcer::endpoints) {
        announce(&format!("events at {endpoint}, missed ones at {replay}"))?;
    }
    metrics.post(server, metrics::Ended::default());
    let outcome =
        engine_loop::serve(server, &queue, &metrics, announcer).and_then(|()| args.cache.finish(args, server));
    // The queue is closed and no stream runs; clients still read.
    let _ = over.send(());
    let _ = runtime.block_on(async { tokio::time::timeout(GRACE, clients).await });
    runtime.shutdown_background();
    outcome?;
    announce(&engine_loop::audit(server)?)
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

fn host<R: Runner>(args: &Args, generation: &Generation, text: Text, server: &Server<R>) -> Result<Host> {
    let model = match (&args.model, args.random_model) {
        (_, Some(shape)) => shape.name(),
        (None, None) => built_in::NAME.to_owned(),
        (Some(dir), None) => {
            let dir = dir.canonicalize().unwrap_or(dir.clone());
            dir.file_name().unwrap_or(Path::new("model").as_os_str()).to_string_lossy().into_owned()
        }
    };
    let samples_max = server.runner().draws_max() as u64;
    let host = Host {
        model,
        text,
        limits: server.limits(),
        defaults: setup::defaults(args, server.runner().config(), generation),
        repetition: generation.repetition.unwrap_or(1.0),
        samples_max: samples_max.min(args.http.max_n.into()) as u32,
        edits_logits: server.runner().edits_max() > 0,
        salts: RandomState::new(),
        keeps_logits: server.runner().keeps_logits(),
    };
    let edits = host.repetition != 1.0 || host.defaults.sampling.min_p > 0.0;
    if edits && !host.edits_logits {
        return Err(Error::request(
            "this backend does not support repetition_penalty and min_p of generation_config.json: start the program \
             with --generation-config none",
        ));
    }
    Ok(host)
}

fn app(args: &Args, host: Host) -> Arc<App> {
    let options = &args.http;
    let body_time = Duration::from_secs(options.body_timeout);
    let created = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    Arc::new(App {
        host: Arc::new(host),
        queue: Arc::new(Queue::<Job>::new(options.queue as usize)),
        intake: Intake::new(options.max_body, body_time, options.max_waiting_tokens),
        metrics: Arc::new(Metrics::default()),
        // The keys of `RandomState` are the only random numbers of the standard library.
        run: RandomState::new().hash_one(created),
        answers: AtomicU64::new(0),
        created,
    })
}

/// Answers clients until the engine's thread has stopped (`is_over`), and then completes the answers. After the first
/// signal the server rejects completions and chats, and `/health` returns 503. A second signal ends the program.
async fn listen(
    listener: TcpListener,
    router: Router,
    crowded: Router,
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
        Err(error) => return eprintln!("kvarena-server: cannot listen: {error}"),
    };
    let end = async {
        // A dropped sender also ends the wait.
        let _ = is_over.await;
    };
    connections::serve(listener, router, crowded, bounds, end).await;
}

/// Signals that request the end.
struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    /// Catches the signals from now on. The caller has entered a runtime.
    fn catch() -> Result<Self> {
        let catch = |kind| signal(kind).map_err(|e| Error::run(format!("cannot catch signals: {e}")));
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
