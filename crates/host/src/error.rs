//! One error for the whole program: a sentence for the user, and the exit code it ends with.

use std::fmt;

/// Whose mistake it is; the number is the exit code.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    /// The run failed: a backend, an out-of-memory, a broken pipe.
    Run = 1,
    /// The command line or a request cannot be served.
    Request = 2,
    /// The model cannot be used.
    Model = 3,
}

/// A sentence and an exit code.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Error {
    /// Whose mistake it is.
    pub fault: Fault,
    /// What is wrong, naming the value.
    pub message: String,
}

/// What most functions here return.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// The run failed.
    pub fn run(message: impl Into<String>) -> Self {
        Self { fault: Fault::Run, message: message.into() }
    }

    /// The command line or a request cannot be served.
    pub fn request(message: impl Into<String>) -> Self {
        Self { fault: Fault::Request, message: message.into() }
    }

    /// The model cannot be used.
    pub fn model(message: impl Into<String>) -> Self {
        Self { fault: Fault::Model, message: message.into() }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Error {}

/// An error's sentence, and that of its cause.
pub fn with_cause(error: &dyn std::error::Error) -> String {
    match error.source() {
        Some(cause) => format!("{error}: {cause}"),
        None => error.to_string(),
    }
}
