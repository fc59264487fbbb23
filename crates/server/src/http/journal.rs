//! The request log: a line for each ended request for a completion or a chat, by `tracing`.

use std::time::Instant;

use tracing::info;

use super::options::LogForm;

/// Starts the log to standard error, if a format is given.
pub fn begin(form: Option<LogForm>) {
    let Some(form) = form else { return };
    let lines = tracing_subscriber::fmt().with_writer(std::io::stderr).with_target(false).with_ansi(false);
    // An existing subscriber of the process stays.
    let _ = match form {
        LogForm::Text => tracing::subscriber::set_global_default(lines.finish()),
        LogForm::Json => tracing::subscriber::set_global_default(lines.json().flatten_event(true).finish()),
    };
}

/// The log entry of a request. It is written when it is dropped and contains neither texts nor keys.
#[derive(Debug)]
pub struct Entry {
    /// The answer's id without its prefix. Empty if the server was shutting down when the request arrived.
    pub id: String,
    pub path: &'static str,
    pub status: u16,
    pub prompt_tokens: usize,
    pub cached_tokens: u32,
    pub new_tokens: u32,
    /// `done`, `cancelled`, `failed`, the code of an error, or `refused` for an error without a code.
    pub outcome: &'static str,
    since: Instant,
    first: Option<Instant>,
}

impl Entry {
    pub fn new(path: &'static str) -> Self {
        Self {
            id: String::new(),
            path,
            status: 200,
            prompt_tokens: 0,
            cached_tokens: 0,
            new_tokens: 0,
            outcome: "cancelled",
            since: Instant::now(),
            first: None,
        }
    }

    pub fn token(&mut self) {
        self.first.get_or_insert_with(Instant::now);
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        let ms = |at: Instant| (at - self.since).as_secs_f64() * 1e3;
        info!(
            id = self.id,
            path = self.path,
            status = self.status,
            prompt_tokens = self.prompt_tokens,
            cached_tokens = self.cached_tokens,
            new_tokens = self.new_tokens,
            first_token_ms = self.first.map(ms),
            ms = ms(Instant::now()),
            outcome = self.outcome,
            "request"
        );
    }
}
