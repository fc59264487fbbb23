//! Errors of rejected requests, in OpenAI's format.

use std::time::Duration;

use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

/// The result of a check of a request.
pub(super) type Result<T> = std::result::Result<T, ApiError>;

/// A status and its error body.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ApiError {
    pub status: u16,
    /// `type` of the error.
    pub kind: &'static str,
    /// The error's description for the client.
    pub message: String,
    pub param: Option<String>,
    pub code: Option<&'static str>,
}

impl ApiError {
    /// Returns the answer to the rejected request; a status of 429 or 503 adds `Retry-After`.
    pub(super) fn response(&self) -> Response {
        let status = StatusCode::from_u16(self.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let body = ([(header::CONTENT_TYPE, "application/json")], self.json().to_string());
        let mut response = (status, body).into_response();
        if [StatusCode::TOO_MANY_REQUESTS, StatusCode::SERVICE_UNAVAILABLE].contains(&status) {
            let soon = header::HeaderValue::from_static("1");
            response.headers_mut().insert(header::RETRY_AFTER, soon);
        }
        response
    }

    fn new(status: u16, kind: &'static str, message: impl Into<String>) -> Self {
        Self { status, kind, message: message.into(), param: None, code: None }
    }

    pub fn bad(message: impl Into<String>) -> Self {
        Self::new(400, "invalid_request_error", message)
    }

    pub fn field(name: &str, message: impl Into<String>) -> Self {
        Self { param: Some(name.into()), ..Self::bad(message) }
    }

    /// Returns the error for a prompt and output that are longer than a sequence may be.
    pub fn too_long(name: &str, message: impl std::fmt::Display, room: usize) -> Self {
        // Client libraries recognise the error by this text of OpenAI's.
        let message = format!("This model's maximum context length is {room} tokens: {message}");
        Self { code: Some("context_length_exceeded"), ..Self::field(name, message) }
    }

    pub fn unknown_model(name: &str) -> Self {
        Self {
            status: 404,
            code: Some("model_not_found"),
            ..Self::field("model", format!("the model {name:?} is not served here"))
        }
    }

    /// Returns the error for an unknown path, or an unknown method of a path.
    pub fn no_such_path(status: u16, path: &str) -> Self {
        Self { status, ..Self::bad(format!("{path} is not served, or not by this method")) }
    }

    /// Returns the error for an unsupported field.
    pub fn unsupported(name: &str, message: impl Into<String>) -> Self {
        Self { code: Some("unsupported_parameter"), ..Self::field(name, message) }
    }

    pub fn body_too_long(most: usize) -> Self {
        let what = format!("the body has more than {most} bytes (--max-body)");
        Self { status: 413, code: Some("body_too_long"), ..Self::bad(what) }
    }

    pub fn body_too_slow(time: Duration) -> Self {
        let what = format!("the body did not come within {} s", time.as_secs_f32());
        Self { status: 408, code: Some("body_too_slow"), ..Self::bad(what) }
    }

    /// Returns the error for an exhausted memory budget of requests.
    pub fn crowded(what: &str) -> Self {
        let message = format!("{what}; try again later");
        Self { code: Some("crowded"), ..Self::new(429, "rate_limit_error", message) }
    }

    pub fn no_connection() -> Self {
        let message = "too many connections are open; try again later";
        Self { code: Some("too_many_connections"), ..Self::new(503, "server_error", message) }
    }

    /// Returns the error for a missing or invalid key. The message does not repeat the key.
    pub fn wrong_key() -> Self {
        let message = "this server needs its API key: Authorization: Bearer KEY";
        Self { status: 401, code: Some("invalid_api_key"), ..Self::bad(message) }
    }

    pub fn full(waiting: usize) -> Self {
        let message = format!("{waiting} streams wait already; try again later");
        Self { code: Some("queue_full"), ..Self::new(429, "rate_limit_error", message) }
    }

    pub fn closing() -> Self {
        let message = "the server is shutting down";
        Self { code: Some("shutting_down"), ..Self::new(503, "server_error", message) }
    }

    pub fn failed(message: impl Into<String>) -> Self {
        Self::new(500, "server_error", message)
    }

    pub fn json(&self) -> Value {
        json!({ "error": {
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.code,
        } })
    }
}
