//! The program's error: a sentence for the user, and the exit code.

use std::fmt;

/// The category of the cause; the number is the exit code.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    /// The run failed, for example in a backend, for lack of memory, or because a pipe broke.
    Run = 1,
    /// The program cannot serve the command line or a request.
    Request = 2,
    /// The program cannot use the model or the GPU.
    Model = 3,
}

/// A sentence and an exit code.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Error {
    /// The category of the cause.
    pub fault: Fault,
    /// The cause, with the value that is wrong.
    pub message: String,
}

/// The result of most functions of this crate that can fail.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// Creates the error of a run that failed.
    pub fn run(message: impl Into<String>) -> Self {
        Self { fault: Fault::Run, message: message.into() }
    }

    /// Creates the error of a command line or a request that the program cannot serve.
    pub fn request(message: impl Into<String>) -> Self {
        Self { fault: Fault::Request, message: message.into() }
    }

    /// Creates the error of a model that the program cannot use.
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

/// Returns an error's sentence, followed by the sentence of its cause.
pub fn with_cause(error: &dyn std::error::Error) -> String {
    match error.source() {
        Some(cause) => format!("{error}: {cause}"),
        None => error.to_string(),
    }
}
