//! Who is answered what: OpenAI's paths, and those of monitors.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::rejection::BytesRejection;
use axum::extract::{DefaultBodyLimit, Path, State};
use axum::http::{StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use futures_util::stream;
use serde_json::{Value, json};

use super::answer::Answer;
use super::ask::{Ask, Host, Kind};
use super::board::Board;
use super::choice::Piece;
use super::job::{Event, Job, Ticket};
use super::queue::{Queue, Refused};
use super::refusal::Refusal;
use super::sse;
use crate::sample::splitmix;

/// The longest body: of a prompt of a million tokens as numbers.
const BODY_BYTES_MAX: usize = 16 << 20;

/// What all answers need.
pub struct App {
    /// The model.
    pub host: Arc<Host>,
    /// To the engine's thread.
    pub queue: Arc<Queue<Job>>,
    /// From there, for monitors.
    pub board: Arc<Board>,
    /// A number of this run: answers of two runs have different names, and draws without a seed differ.
    pub run: u64,
    /// Answers begun.
    pub answers: AtomicU64,
    /// When the model came up, in seconds since 1970.
    pub created: u64,
}

type Shared = State<Arc<App>>;

/// All paths.
pub fn router(app: Arc<App>) -> Router {
    Router::new()
        .route("/v1/completions", post(completions))
        .route("/v1/chat/completions", post(chat))
        .route("/v1/models", get(models))
        .route("/v1/models/{*name}", get(model))
        .route("/health", get(health))
        .route("/metrics", get(metrics))
        .fallback(|uri: Uri| async move { refused(&Refusal::no_such_path(404, uri.path())) })
        .method_not_allowed_fallback(|uri: Uri| async move {
            refused(&Refusal::no_such_path(405, uri.path()))
        })
        .layer(DefaultBodyLimit::max(BODY_BYTES_MAX))
        .with_state(app)
}

type Sent = Result<Bytes, BytesRejection>;

async fn completions(State(app): Shared, body: Sent) -> Response {
    answer(app, Kind::Completion, "/v1/completions", body).await
}

async fn chat(State(app): Shared, body: Sent) -> Response {
    answer(app, Kind::Chat, "/v1/chat/completions", body).await
}

async fn answer(app: Arc<App>, kind: Kind, path: &'static str, body: Sent) -> Response {
    let board = Arc::clone(&app.board);
    let response = begin(app, kind, body).await.unwrap_or_else(|refusal| refused(&refusal));
    board.count(path, response.status().as_u16());
    response
}

async fn begin(app: Arc<App>, kind: Kind, body: Sent) -> Result<Response, Refusal> {
    let bytes = body.map_err(|e| Refusal::body(e.status().as_u16(), e.body_text()))?;
    let number = app.answers.fetch_add(1, Ordering::Relaxed);
    let seed = splitmix(&mut app.run.wrapping_add(number));
    let host = Arc::clone(&app.host);
    // A long prompt takes a while to encode: others are answered meanwhile.
    let parsing = tokio::task::spawn_blocking(move || Ask::parse(&host, kind, &bytes, seed));
    let mut ask = parsing.await.map_err(|e| Refusal::failed(e.to_string()))??;
    let name = format!("{:08x}{number:08x}", app.run as u32);
    let answer = Answer::new(Arc::clone(&app.host), &ask, &name);
    let (jobs, ticket) = Ticket::issue(std::mem::take(&mut ask.requests), ask.logprobs);
    app.queue.push(jobs).map_err(|why| match why {
        Refused::Full => Refusal::full(app.queue.waiting()),
        Refused::Closed => Refusal::closing(),
    })?;
    let talk = Talk { answer, ticket, is_over: false };
    if ask.stream { Ok(events(talk)) } else { whole(talk).await }
}

/// A client and its answer. Once it is dropped the client has gone away, and what it asked for is cancelled.
struct Talk {
    answer: Answer,
    ticket: Ticket,
    is_over: bool,
}

impl Talk {
    /// What is new with an event; none stands for the engine's end.
    fn hear(&mut self, event: Option<Event>) -> Result<Option<Piece>, Refusal> {
        let lost = || Event::Failed("the engine has stopped".into());
        let piece = self.answer.hear(event.unwrap_or_else(lost))?;
        if let Some(piece) = piece.as_ref().filter(|piece| piece.finish.is_some()) {
            self.ticket.has_enough(piece.choice);
        }
        Ok(piece)
    }

    /// Frames for an event: what is new, and the end of the stream where it is.
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
            // What else has come goes along in one write.
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

fn refused(refusal: &Refusal) -> Response {
    let status = StatusCode::from_u16(refusal.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let mut response = json_response(status, &refusal.json());
    if status == StatusCode::TOO_MANY_REQUESTS {
        let soon = header::HeaderValue::from_static("1");
        response.headers_mut().insert(header::RETRY_AFTER, soon);
    }
    response
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

async fn metrics(State(app): Shared) -> Response {
    let kind = [(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")];
    (kind, app.board.text(app.queue.waiting())).into_response()
}
