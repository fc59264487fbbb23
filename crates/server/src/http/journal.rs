//! The request log: a line for each request once it has ended, by `tracing`.

use std::time::Instant;

use tracing::info;

use super::options::LogForm;

/// Begins to write lines to standard error, if a form is given.
pub fn begin(form: Option<LogForm>) {
    let Some(form) = form else { return };
    let lines =
        tracing_subscriber::fmt().with_writer(std::io::stderr).with_target(false).with_ansi(false);
    // A process that has a subscriber already keeps it.
    let _ = match form {
        LogForm::Text => tracing::subscriber::set_global_default(lines.finish()),
        LogForm::Json => {
            tracing::subscriber::set_global_default(lines.json().flatten_event(true).finish())
        }
    };
}

/// What the log has of a request. It writes itself when it is dropped; neither texts nor keys are in it.
#[derive(Debug)]
pub struct Entry {
    /// Its name, as in the answer.
    pub id: String,
    /// Its path.
    pub path: &'static str,
    /// The status of its answer.
    pub status: u16,
    /// Tokens of its prompts.
    pub prompt_tokens: usize,
    /// Those of them that needed no computing.
    pub cached_tokens: u32,
    /// New tokens.
    pub new_tokens: u32,
    /// `done`, `cancelled`, `failed`, or the code of a refusal.
    pub outcome: &'static str,
    since: Instant,
    first: Option<Instant>,
}

impl Entry {
    /// A request that has just come.
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

    /// A token came.
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
