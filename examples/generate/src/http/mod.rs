//! The server: OpenAI's HTTP API around the serving loop.
//!
//! ```text
//! clients        tasks of a runtime of their own threads             the engine's thread (that of `main`)
//!   HTTP  --->  routes: ask (check) --- Job ---> queue (bounded) ---> desk: Server::step, step after step
//!         <---  answer: choice, stop  <--- Event for each token ------'
//! ```
//!
//! ```text
//! body, ask, refusal     a request's fields; what is asked for; why it is not served
//! queue, job, desk       what waits; what passes between the two sides; the engine's side
//! stop, choice, answer   stop strings; a choice's text; the answer's JSON
//! sse, routes, board     framing; paths; what monitors are told
//! ```
//!
//! A client that goes away drops its `Ticket`: the loop ends its streams before the next step, and their pages return.
//! Tokens become text, and stop strings are looked for, on the client's side, so that steps do not wait for that; a
//! stream whose text has stopped is ended a step or two later. SIGTERM closes the queue: what is in it ends, then the
//! engine's state is audited, and the program ends.
//!
//! Not here: the loop (`server`), who computes (`runner`).

mod answer;
mod ask;
mod board;
mod body;
mod choice;
mod desk;
mod job;
mod queue;
mod refusal;
mod routes;
mod sse;
mod stop;

use std::hash::{BuildHasher, RandomState};
use std::io::Write;
use std::net::TcpListener;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::serve::ListenerExt;
use tokio::runtime::{Builder, Runtime};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::oneshot;

use crate::args::Args;
use crate::error::{Error, Result};
use crate::runner::Runner;
use crate::server::Server;
use crate::setup;
use crate::text::Text;
use ask::{CHOICES_MAX, Host};
use board::Board;
use job::Job;
use queue::Queue;
use routes::{App, router};

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
    let host = host(args, text, server)?;
    let name = host.model.clone();
    let app = app(host, args.queue as usize);
    let (queue, board) = (Arc::clone(&app.queue), Arc::clone(&app.board));
    let runtime = runtime()?;
    let signals = {
        let _entered = runtime.enter();
        Signals::catch()?
    };
    let (over, is_over) = oneshot::channel();
    let clients = runtime.spawn(listen(listener, app, signals, is_over));
    announce(&format!("serving {name} at http://{local}"))?;
    board.post(server, desk::Ended::default());
    let outcome = desk::serve(server, &queue, &board);
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
    let samples_max = (server.runner().draws_max() / streams).clamp(1, CHOICES_MAX) as u32;
    Ok(Host {
        model,
        text,
        limits: server.limits(),
        defaults: setup::defaults(args, server.runner().config()),
        samples_max,
        keeps_logits: server.runner().keeps_logits(),
    })
}

fn app(host: Host, waiting_max: usize) -> Arc<App> {
    let created = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    Arc::new(App {
        host: Arc::new(host),
        queue: Arc::new(Queue::<Job>::new(waiting_max)),
        board: Arc::new(Board::default()),
        // Its keys are random, as the standard library has no other numbers that are.
        run: RandomState::new().hash_one(created),
        answers: AtomicU64::new(0),
        created,
    })
}

/// Answers clients until somebody asks for an end or the engine's thread has stopped (`is_over`); then those whose
/// answers are not whole.
async fn listen(
    listener: TcpListener,
    app: Arc<App>,
    mut signals: Signals,
    is_over: oneshot::Receiver<()>,
) {
    let queue = Arc::clone(&app.queue);
    let (close, closed) = oneshot::channel::<()>();
    tokio::spawn(async move {
        signals.next().await;
        queue.close();
        let _ = close.send(());
        signals.next().await;
        std::process::exit(130);
    });
    let listener = match tokio::net::TcpListener::from_std(listener) {
        Ok(listener) => listener.tap_io(|stream| {
            // Each token is a small write that somebody waits for.
            let _ = stream.set_nodelay(true);
        }),
        Err(error) => return eprintln!("generate: cannot listen: {error}"),
    };
    let end = async {
        tokio::select! {
            _ = closed => {}
            _ = is_over => {}
        }
    };
    let _ = axum::serve(listener, router(app)).with_graceful_shutdown(end).await;
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
