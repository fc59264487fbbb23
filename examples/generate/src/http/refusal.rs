//! Why a request is not served, in OpenAI's form.

use serde_json::{Value, json};

/// A status and what is said with it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Refusal {
    /// Of HTTP.
    pub status: u16,
    /// `type` of the error.
    pub kind: &'static str,
    /// What is wrong, naming the value.
    pub message: String,
    /// The field that is wrong.
    pub param: Option<String>,
    /// For programs.
    pub code: Option<&'static str>,
}

impl Refusal {
    fn new(status: u16, kind: &'static str, message: impl Into<String>) -> Self {
        Self { status, kind, message: message.into(), param: None, code: None }
    }

    /// The request makes no sense.
    pub fn bad(message: impl Into<String>) -> Self {
        Self::new(400, "invalid_request_error", message)
    }

    /// A field of it makes no sense.
    pub fn field(name: &str, message: impl Into<String>) -> Self {
        Self { param: Some(name.into()), ..Self::bad(message) }
    }

    /// Prompt and output are longer than any sequence may be.
    pub fn too_long(name: &str, message: impl Into<String>) -> Self {
        Self { code: Some("context_length_exceeded"), ..Self::field(name, message) }
    }

    /// Another model.
    pub fn unknown_model(name: &str) -> Self {
        Self {
            status: 404,
            code: Some("model_not_found"),
            ..Self::field("model", format!("the model {name:?} is not served here"))
        }
    }

    /// Another path, or another method for it.
    pub fn no_such_path(status: u16, path: &str) -> Self {
        Self { status, ..Self::bad(format!("{path} is not served, or not by this method")) }
    }

    /// The body is longer than any that makes sense.
    pub fn body(status: u16, message: String) -> Self {
        Self { status, ..Self::bad(message) }
    }

    /// As many requests wait as may.
    pub fn full(waiting: usize) -> Self {
        let message = format!("{waiting} requests wait already; try again later");
        Self { code: Some("queue_full"), ..Self::new(429, "rate_limit_error", message) }
    }

    /// The server ends.
    pub fn closing() -> Self {
        let message = "the server is shutting down";
        Self { code: Some("shutting_down"), ..Self::new(503, "server_error", message) }
    }

    /// The engine failed.
    pub fn failed(message: impl Into<String>) -> Self {
        Self::new(500, "server_error", message)
    }

    /// As OpenAI says it.
    pub fn json(&self) -> Value {
        json!({ "error": {
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.code,
        } })
    }
}
