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
use super::api_error::ApiError;
use super::checked_request::CheckedRequest;
use super::choice::Piece;
use super::fields::Kind;
use super::guard;
use super::host::Host;
use super::intake::Intake;
use super::job::{Event, Job, JobHandle};
use super::journal::Entry;
use super::metrics::{Metrics, open_metrics};
use super::options::Secret;
use super::queue::{PushError, Queue};
use super::sse;
use kvarena_host::sample::splitmix;

/// The state that all handlers share.
pub struct App {
    /// The served model, and the limits and defaults of requests.
    pub host: Arc<Host>,
    /// The queue to the engine's thread.
    pub queue: Arc<Queue<Job>>,
    pub intake: Intake,
    pub metrics: Arc<Metrics>,
    /// Number of this run, so that answers of two runs have different names and their unseeded draws differ.
    pub run: u64,
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
        .fallback(|uri: Uri| async move { ApiError::no_such_path(404, uri.path()).response() })
        .method_not_allowed_fallback(|uri: Uri| async move { ApiError::no_such_path(405, uri.path()).response() })
        // `Intake` limits bodies.
        .layer(DefaultBodyLimit::disable())
        .layer(cors)
        .with_state(app)
}

/// Returns the routes of a spare connection: `/health` and `/ping`; other paths get 503.
pub fn crowded(app: Arc<App>) -> Router {
    monitors().fallback(|| async { ApiError::no_connection().response() }).with_state(app)
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
    let metrics = Arc::clone(&app.metrics);
    let mut entry = Entry::new(path);
    let response = match begin(app, kind, request, &mut entry).await {
        Ok(client) if client.stream => events(client.entry(entry)),
        Ok(client) => whole(client.entry(entry)).await.unwrap_or_else(|error| error.response()),
        Err(error) => {
            (entry.status, entry.outcome) = (error.status, error.code.unwrap_or("refused"));
            error.response()
        }
    };
    metrics.count(path, response.status().as_u16());
    response
}

async fn begin(app: Arc<App>, kind: Kind, request: Request, entry: &mut Entry) -> Result<ClientAnswer, ApiError> {
    if app.queue.is_closed() {
        return Err(ApiError::closing());
    }
    let number = app.answers.fetch_add(1, Ordering::Relaxed);
    let name = format!("{:08x}{number:08x}", app.run as u32);
    entry.id.clone_from(&name);
    let (parts, body) = request.into_parts();
    let read = app.intake.read(&parts.headers, body).await?;
    let seed = splitmix(&mut app.run.wrapping_add(number));
    let host = Arc::clone(&app.host);
    // A blocking thread encodes, because a long prompt takes time.
    let parse = move |bytes: &[u8]| CheckedRequest::parse(&host, kind, bytes, seed);
    let mut checked = app.intake.parse(read, parse).await?;
    let tokens = |request: &kvarena_host::request::Request| request.prompt.len() + request.prediction.len();
    let held = app.intake.hold(kind.prompt_field(), checked.requests.iter().map(tokens).sum())?;
    entry.prompt_tokens = checked.requests.iter().map(|request| request.prompt.len()).sum();
    let answer = Answer::new(Arc::clone(&app.host), &checked, &name);
    let (jobs, handle) = JobHandle::issue(std::mem::take(&mut checked.requests), checked.logprobs, held, number);
    app.queue.push(jobs).map_err(|why| match why {
        PushError::Full => ApiError::full(app.queue.waiting()),
        PushError::Closed => ApiError::closing(),
    })?;
    Ok(ClientAnswer { answer, handle, is_over: false, stream: checked.stream, entry: None })
}

/// A client and its answer. If the client disconnects, the drop cancels its request.
struct ClientAnswer {
    answer: Answer,
    handle: JobHandle,
    is_over: bool,
    stream: bool,
    entry: Option<Entry>,
}

impl Drop for ClientAnswer {
    fn drop(&mut self) {
        if let Some(entry) = &mut self.entry {
            (entry.cached_tokens, entry.new_tokens) = self.answer.counts();
            if self.answer.is_whole() {
                entry.outcome = "done";
            }
        }
    }
}

impl ClientAnswer {
    /// Sets the log entry that is written at the end.
    fn entry(mut self, entry: Entry) -> Self {
        self.entry = Some(entry);
        self
    }

    /// Processes an event; `None` stands for the engine's end.
    fn receive(&mut self, event: Option<Event>) -> Result<Option<Piece>, ApiError> {
        let lost = || Event::Failed("the engine has stopped".into());
        let event = event.unwrap_or_else(lost);
        if let Some(entry) = &mut self.entry {
            match event {
                Event::Token { .. } => entry.token(),
                Event::Failed(_) => (entry.outcome, entry.status) = ("failed", 500),
                Event::Prompt { .. } | Event::Done { .. } => {}
            }
        }
        let piece = self.answer.receive(event)?;
        if let Some(piece) = piece.as_ref().filter(|piece| piece.finish.is_some()) {
            self.handle.has_enough(piece.choice);
        }
        Ok(piece)
    }

    /// Returns the frames of an event: the new chunk, and the end of the stream if all choices have ended.
    fn frames(&mut self, event: Option<Event>) -> String {
        let mut frames = match self.receive(event) {
            Ok(Some(piece)) => sse::event(&self.answer.chunk(piece)),
            Ok(None) => String::new(),
            Err(error) => {
                self.is_over = true;
                return sse::event(&error.json());
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

async fn whole(mut client: ClientAnswer) -> Result<Response, ApiError> {
    let mut pieces = Vec::new();
    while !client.answer.is_whole() {
        let event = client.handle.next().await;
        pieces.extend(client.receive(event)?);
    }
    Ok(json_response(StatusCode::OK, &client.answer.whole(pieces)))
}

/// Answers with server-sent events.
fn events(client: ClientAnswer) -> Response {
    let frames = stream::unfold(client, |mut client| async move {
        while !client.is_over {
            let event = client.handle.next().await;
            let mut frames = client.frames(event);
            // The same write sends further events that have arrived.
            while let Some(event) = (!client.is_over).then(|| client.handle.next_now()).flatten() {
                frames += &client.frames(Some(event));
            }
            if !frames.is_empty() {
                return Some((Ok::<_, Infallible>(Bytes::from(frames)), client));
            }
        }
        None
    });
    let headers = [(header::CONTENT_TYPE, "text/event-stream"), (header::CACHE_CONTROL, "no-cache")];
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
        "max_model_len": app.host.limits.longest_prompt(),
    })
}

async fn models(State(app): Shared) -> Response {
    json_response(StatusCode::OK, &json!({ "object": "list", "data": [card(&app)] }))
}

async fn model(State(app): Shared, Path(name): Path<String>) -> Response {
    if name == app.host.model {
        json_response(StatusCode::OK, &card(&app))
    } else {
        ApiError::unknown_model(&name).response()
    }
}

async fn health(State(app): Shared) -> Response {
    if app.queue.is_closed() {
        ApiError::closing().response()
    } else {
        json_response(StatusCode::OK, &json!({ "status": "ok" }))
    }
}

async fn version() -> Response {
    json_response(StatusCode::OK, &json!({ "version": env!("CARGO_PKG_VERSION") }))
}

async fn metrics(State(app): Shared, headers: HeaderMap) -> Response {
    let text = app.metrics.text(app.queue.waiting());
    let accepts = headers.get(header::ACCEPT).and_then(|accept| accept.to_str().ok());
    let (kind, text) = if accepts.is_some_and(|accept| accept.contains("application/openmetrics-text")) {
        ("application/openmetrics-text; version=1.0.0; charset=utf-8", open_metrics(&text))
    } else {
        ("text/plain; version=0.0.4; charset=utf-8", text)
    };
    ([(header::CONTENT_TYPE, kind)], text).into_response()
}

/// Returns an answer computed from a body, for paths without generation.
async fn text_of(app: Arc<App>, request: Request, answer: fn(&Host, &[u8]) -> Result<Value, ApiError>) -> Response {
    let made = async {
        let (parts, body) = request.into_parts();
        let read = app.intake.read(&parts.headers, body).await?;
        let host = Arc::clone(&app.host);
        app.intake.parse(read, move |bytes| answer(&host, bytes)).await
    };
    match made.await {
        Ok(value) => json_response(StatusCode::OK, &value),
        Err(error) => error.response(),
    }
}

async fn tokenize(State(app): Shared, request: Request) -> Response {
    text_of(app, request, super::tokens::tokenize).await
}

async fn detokenize(State(app): Shared, request: Request) -> Response {
    text_of(app, request, super::tokens::detokenize).await
}
