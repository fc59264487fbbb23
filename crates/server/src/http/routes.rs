//! The routes: OpenAI's paths, and those of monitors.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use axum::body::{Body, Bytes};
use axum::extract::{DefaultBodyLimit, Path, Request, State};
use axum::http::{HeaderMap, StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Router, middleware};
use futures_util::stream;
use serde_json::{Value, json};
use tower_http::cors::CorsLayer;

use super::answer::Answer;
use super::ask::Ask;
use super::board::{Board, open_metrics};
use super::choice::Piece;
use super::fields::Kind;
use super::guard;
use super::host::Host;
use super::intake::Intake;
use super::job::{Event, Job, Ticket};
use super::journal::Entry;
use super::options::Secret;
use super::queue::{Queue, Refused};
use super::refusal::{Refusal, refused};
use super::sse;
use kvarena_host::sample::splitmix;

/// The state that all handlers share.
pub struct App {
    /// The model.
    pub host: Arc<Host>,
    /// The queue to the engine's thread.
    pub queue: Arc<Queue<Job>>,
    /// The limits of requests.
    pub intake: Intake,
    /// The engine's metrics, for monitors.
    pub board: Arc<Board>,
    /// Number of this run, so that answers of two runs have different names and their unseeded draws differ.
    pub run: u64,
    /// Number of answers begun.
    pub answers: AtomicU64,
    /// The start time, in seconds since 1970.
    pub created: u64,
}

type Shared = State<Arc<App>>;

/// Returns the routes: those that need the key, if there is one, and those of monitors.
pub fn router(app: Arc<App>, key: Option<Secret>, cors: CorsLayer) -> Router {
    let mut guarded = Router::new()
        .route("/v1/completions", post(completions))
        .route("/v1/chat/completions", post(chat))
        .route("/v1/models", get(models))
        .route("/v1/models/{*name}", get(model))
        .route("/tokenize", post(tokenize))
        .route("/detokenize", post(detokenize));
    if let Some(key) = key {
        guarded = guarded.route_layer(middleware::from_fn_with_state(key, guard::check));
    }
    monitors()
        .route("/metrics", get(metrics))
        .route("/version", get(version))
        .merge(guarded)
        .fallback(|uri: Uri| async move { refused(&Refusal::no_such_path(404, uri.path())) })
        .method_not_allowed_fallback(|uri: Uri| async move {
            refused(&Refusal::no_such_path(405, uri.path()))
        })
        // `Intake` limits bodies.
        .layer(DefaultBodyLimit::disable())
        .layer(cors)
        .with_state(app)
}

/// Returns the routes of a spare connection.
pub fn crowded(app: Arc<App>) -> Router {
    monitors().fallback(|| async { refused(&Refusal::no_connection()) }).with_state(app)
}

fn monitors() -> Router<Arc<App>> {
    Router::new().route("/health", get(health)).route("/ping", get(health).post(health))
}

async fn completions(State(app): Shared, request: Request) -> Response {
    answer(app, Kind::Completion, "/v1/completions", request).await
}

async fn chat(State(app): Shared, request: Request) -> Response {
    answer(app, Kind::Chat, "/v1/chat/completions", request).await
}

async fn answer(app: Arc<App>, kind: Kind, path: &'static str, request: Request) -> Response {
    let board = Arc::clone(&app.board);
    let mut entry = Entry::new(path);
    let response = match begin(app, kind, request, &mut entry).await {
        Ok(talk) if talk.stream => events(talk.entry(entry)),
        Ok(talk) => whole(talk.entry(entry)).await.unwrap_or_else(|refusal| refused(&refusal)),
        Err(refusal) => {
            (entry.status, entry.outcome) = (refusal.status, refusal.code.unwrap_or("refused"));
            refused(&refusal)
        }
    };
    board.count(path, response.status().as_u16());
    response
}

async fn begin(
    app: Arc<App>,
    kind: Kind,
    request: Request,
    entry: &mut Entry,
) -> Result<Talk, Refusal> {
    if app.queue.is_closed() {
        return Err(Refusal::closing());
    }
    let number = app.answers.fetch_add(1, Ordering::Relaxed);
    let name = format!("{:08x}{number:08x}", app.run as u32);
    entry.id.clone_from(&name);
    let (parts, body) = request.into_parts();
    let read = app.intake.read(&parts.headers, body).await?;
    let seed = splitmix(&mut app.run.wrapping_add(number));
    let host = Arc::clone(&app.host);
    // A blocking thread encodes, because a long prompt takes time.
    let parse = move |bytes: &[u8]| Ask::parse(&host, kind, bytes, seed);
    let mut ask = app.intake.parse(read, parse).await?;
    let tokens =
        |request: &kvarena_host::request::Request| request.prompt.len() + request.prediction.len();
    let held = app.intake.hold(ask.requests.iter().map(tokens).sum())?;
    entry.prompt_tokens = ask.requests.iter().map(|request| request.prompt.len()).sum();
    let answer = Answer::new(Arc::clone(&app.host), &ask, &name);
    let (jobs, ticket) =
        Ticket::issue(std::mem::take(&mut ask.requests), ask.logprobs, held, number);
    app.queue.push(jobs).map_err(|why| match why {
        Refused::Full => Refusal::full(app.queue.waiting()),
        Refused::Closed => Refusal::closing(),
    })?;
    Ok(Talk { answer, ticket, is_over: false, stream: ask.stream, entry: None })
}

/// A client and its answer. A drop means that the client has disconnected, and cancels its request.
struct Talk {
    answer: Answer,
    ticket: Ticket,
    is_over: bool,
    /// Whether tokens are streamed.
    stream: bool,
    entry: Option<Entry>,
}

impl Drop for Talk {
    fn drop(&mut self) {
        if let Some(entry) = &mut self.entry {
            (entry.cached_tokens, entry.new_tokens) = self.answer.counts();
            if self.answer.is_whole() {
                entry.outcome = "done";
            }
        }
    }
}

impl Talk {
    /// Sets the log entry that is written at the end.
    fn entry(mut self, entry: Entry) -> Self {
        self.entry = Some(entry);
        self
    }

    /// Processes an event; `None` stands for the engine's end.
    fn hear(&mut self, event: Option<Event>) -> Result<Option<Piece>, Refusal> {
        let lost = || Event::Failed("the engine has stopped".into());
        let event = event.unwrap_or_else(lost);
        if let Some(entry) = &mut self.entry {
            match event {
                Event::Token { .. } => entry.token(),
                Event::Failed(_) => (entry.outcome, entry.status) = ("failed", 500),
                Event::Prompt { .. } | Event::Done { .. } => {}
            }
        }
        let piece = self.answer.hear(event)?;
        if let Some(piece) = piece.as_ref().filter(|piece| piece.finish.is_some()) {
            self.ticket.has_enough(piece.choice);
        }
        Ok(piece)
    }

    /// Returns the frames of an event: the new chunk, and the end of the stream if it has ended.
    fn frames(&mut self, event: Option<Event>) -> String {
        let mut frames = match self.hear(event) {
            Ok(Some(piece)) => sse::event(&self.answer.chunk(piece)),
            Ok(None) => String::new(),
            Err(refusal) => {
                self.is_over = true;
                return sse::event(&refusal.json());
            }
        };
        if self.answer.is_whole() {
            self.is_over = true;
            if self.answer.includes_usage() {
                frames += &sse::event(&self.answer.usage_chunk());
            }
            frames += sse::DONE;
        }
        frames
    }
}

async fn whole(mut talk: Talk) -> Result<Response, Refusal> {
    let mut pieces = Vec::new();
    while !talk.answer.is_whole() {
        let event = talk.ticket.next().await;
        pieces.extend(talk.hear(event)?);
    }
    Ok(json_response(StatusCode::OK, &talk.answer.whole(pieces)))
}

/// Answers with server-sent events.
fn events(talk: Talk) -> Response {
    let frames = stream::unfold(talk, |mut talk| async move {
        while !talk.is_over {
            let event = talk.ticket.next().await;
            let mut frames = talk.frames(event);
            // The same write sends further events that have arrived.
            while let Some(event) = (!talk.is_over).then(|| talk.ticket.next_now()).flatten() {
                frames += &talk.frames(Some(event));
            }
            if !frames.is_empty() {
                return Some((Ok::<_, Infallible>(Bytes::from(frames)), talk));
            }
        }
        None
    });
    let headers =
        [(header::CONTENT_TYPE, "text/event-stream"), (header::CACHE_CONTROL, "no-cache")];
    (headers, Body::from_stream(frames)).into_response()
}

fn json_response(status: StatusCode, value: &Value) -> Response {
    (status, [(header::CONTENT_TYPE, "application/json")], value.to_string()).into_response()
}

fn card(app: &App) -> Value {
    json!({
        "id": app.host.model,
        "object": "model",
        "created": app.created,
        "owned_by": "kvarena",
        "max_model_len": app.host.limits.room(0).saturating_sub(1),
    })
}

async fn models(State(app): Shared) -> Response {
    json_response(StatusCode::OK, &json!({ "object": "list", "data": [card(&app)] }))
}

async fn model(State(app): Shared, Path(name): Path<String>) -> Response {
    match name == app.host.model {
        true => json_response(StatusCode::OK, &card(&app)),
        false => refused(&Refusal::unknown_model(&name)),
    }
}

async fn health(State(app): Shared) -> Response {
    match app.queue.is_closed() {
        false => json_response(StatusCode::OK, &json!({ "status": "ok" })),
        true => refused(&Refusal::closing()),
    }
}

async fn version() -> Response {
    json_response(StatusCode::OK, &json!({ "version": env!("CARGO_PKG_VERSION") }))
}

async fn metrics(State(app): Shared, headers: HeaderMap) -> Response {
    let text = app.board.text(app.queue.waiting());
    let accepts = headers.get(header::ACCEPT).and_then(|accept| accept.to_str().ok());
    let (kind, text) = match accepts
        .is_some_and(|accept| accept.contains("application/openmetrics-text"))
    {
        true => ("application/openmetrics-text; version=1.0.0; charset=utf-8", open_metrics(&text)),
        false => ("text/plain; version=0.0.4; charset=utf-8", text),
    };
    ([(header::CONTENT_TYPE, kind)], text).into_response()
}

/// Returns an answer computed from a body, for paths without generation.
async fn text_of(
    app: Arc<App>,
    request: Request,
    answer: fn(&Host, &[u8]) -> Result<Value, Refusal>,
) -> Response {
    let made = async {
        let (parts, body) = request.into_parts();
        let read = app.intake.read(&parts.headers, body).await?;
        let host = Arc::clone(&app.host);
        app.intake.parse(read, move |bytes| answer(&host, bytes)).await
    };
    match made.await {
        Ok(value) => json_response(StatusCode::OK, &value),
        Err(refusal) => refused(&refusal),
    }
}

async fn tokenize(State(app): Shared, request: Request) -> Response {
    text_of(app, request, super::tokens::tokenize).await
}

async fn detokenize(State(app): Shared, request: Request) -> Response {
    text_of(app, request, super::tokens::detokenize).await
}
