//! Options of `--serve`: limits, the API key, origins, addresses for routers and the log.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use clap::ValueEnum;
use clap::builder::TypedValueParser;
use rustix::process::{Resource, getrlimit};

use kvarena_host::error::{Error, Result};

/// Number of descriptors that connections within the limit cannot use. The spare connections use [`SPARES`] of them.
pub const DESCRIPTORS_LEFT: usize = 64;
/// Maximum number of connections beyond the limit, each for one answer.
pub const SPARES: usize = 32;
/// Default maximum number of connections, if the limit of descriptors allows as many.
const CONNECTIONS_USUAL: usize = 4096;

/// Options of `--serve`.
#[derive(clap::Args, Clone, Debug)]
#[command(next_help_heading = "Options of --serve")]
pub struct HttpOptions {
    /// Maximum number of bytes of a request's body; a request with a longer body gets 413.
    #[arg(long, value_name = "BYTES", default_value_t = 4 << 20, value_parser = from_one_to(1 << 30))]
    pub max_body: usize,

    /// Maximum number of prompt and prediction tokens of all requests that wait or run; a request beyond that gets 429,
    /// or 400 if it exceeds the limit alone.
    #[arg(long, value_name = "TOKENS", default_value_t = 1 << 20, value_parser = from_one_to(1 << 40))]
    pub max_waiting_tokens: usize,

    /// Maximum number of streams that wait to be admitted; one more request gets 429.
    #[arg(long, value_name = "STREAMS", default_value_t = 1024, value_parser = clap::value_parser!(u32).range(1..))]
    pub queue: u32,

    /// Maximum number of choices of a prompt (`n`).
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub max_n: u32,

    /// Maximum number of connections [default: the limit of descriptors less 64, at most 4096]. Beyond that, the server
    /// closes the connection that has waited longest for a request. If none waits, `/health` and `/ping` get answers
    /// and other requests get 503.
    #[arg(long, value_name = "CONNECTIONS", value_parser = from_one_to(1 << 20))]
    pub max_connections: Option<usize>,

    /// Seconds for a request's headers; then the connection is closed.
    #[arg(long, value_name = "SECONDS", default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..))]
    pub header_timeout: u64,

    /// Seconds for a request's body; a slower one gets 408.
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..))]
    pub body_timeout: u64,

    /// Seconds between requests, and seconds in which a client reads nothing of its answer; then the connection is
    /// closed.
    #[arg(long, value_name = "SECONDS", default_value_t = 75, value_parser = clap::value_parser!(u64).range(1..))]
    pub idle_timeout: u64,

    /// Use of the sampling parameters in the model's generation_config.json: as defaults of requests, or none.
    #[arg(long, value_name = "USE", default_value = "auto")]
    pub generation_config: GenerationConfig,

    /// Requests need this key (`Authorization: Bearer KEY`); monitors (`/health`, `/ping`, `/version`, `/metrics`) need
    /// none.
    #[arg(long, value_name = "KEY", env = "KVARENA_API_KEY", hide_env_values = true)]
    pub api_key: Option<Secret>,

    /// Reads the key from the first line of a file.
    #[arg(long, value_name = "FILE", conflicts_with = "api_key")]
    pub api_key_file: Option<PathBuf>,

    /// An origin whose pages may send requests (repeatable; `*`: any). By default browsers block pages of other
    /// origins.
    #[arg(long, value_name = "ORIGIN")]
    pub cors_origin: Vec<String>,

    /// Publishes the cached pages to routers at a ZeroMQ address such as tcp://127.0.0.1:5557, in the wire format of
    /// vLLM and SGLang.
    #[arg(long, value_name = "ADDRESS")]
    pub kv_events: Option<String>,

    /// ZeroMQ address at which routers request lost events, or all pages [default: a free port of 127.0.0.1].
    #[arg(long, value_name = "ADDRESS", requires = "kv_events")]
    pub kv_events_replay: Option<String>,

    /// Also publishes the cached windows, chunks and states of the model's groups of layers, as events of these groups.
    #[arg(long, requires = "kv_events")]
    pub kv_events_groups: bool,

    /// Writes a line for each completion or chat to standard error: number, tokens, cached tokens, times, outcome.
    #[arg(long, value_name = "FORM", num_args = 0..=1, default_missing_value = "text")]
    pub log: Option<LogForm>,
}

fn from_one_to(most: u64) -> impl TypedValueParser<Value = usize> {
    clap::value_parser!(u64).range(1..=most).map(|number| number as usize)
}

/// Uses of the sampling parameters in `generation_config.json`.
#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub enum GenerationConfig {
    /// Defaults of requests.
    Auto,
    /// None.
    None,
}

/// Forms of the request log.
#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub enum LogForm {
    /// A text line.
    Text,
    /// A line with a JSON object.
    Json,
}

/// A text that no output contains.
#[derive(Clone)]
pub struct Secret(String);

impl Secret {
    /// Returns the bytes of the text.
    pub fn bytes(&self) -> &[u8] {
        self.0.as_bytes()
    }
}

impl From<&str> for Secret {
    fn from(text: &str) -> Self {
        Self(text.into())
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret")
    }
}

/// Bounds of connections.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Bounds {
    /// Time for a request's headers.
    pub header: Duration,
    /// Time between requests, and time in which a client may read nothing of its answer.
    pub idle: Duration,
    /// Maximum number of connections, without the spare ones.
    pub connections: usize,
}

impl HttpOptions {
    /// Returns the limits of connections. The number of connections fits the process's limit of descriptors.
    ///
    /// # Errors
    /// `--max-connections` exceeds the descriptors that are not reserved, or all descriptors are reserved.
    pub fn bounds(&self) -> Result<Bounds> {
        let limit = getrlimit(Resource::Nofile).current;
        let limit = limit.map_or(usize::MAX, |limit| usize::try_from(limit).unwrap_or(usize::MAX));
        self.bounds_within(limit)
    }

    fn bounds_within(&self, descriptors: usize) -> Result<Bounds> {
        let most = descriptors.saturating_sub(DESCRIPTORS_LEFT);
        let connections = self.max_connections.unwrap_or(most.min(CONNECTIONS_USUAL));
        if connections > most || connections == 0 {
            return Err(Error::request(format!(
                "--max-connections {connections} is not from 1 to {most}: the limit of descriptors is {descriptors}, and \
                 {DESCRIPTORS_LEFT} are reserved for other uses"
            )));
        }
        Ok(Bounds {
            header: Duration::from_secs(self.header_timeout),
            idle: Duration::from_secs(self.idle_timeout),
            connections,
        })
    }

    /// Returns the key that requests need, if any.
    ///
    /// # Errors
    /// The file cannot be read, or the key is empty.
    pub fn key(&self) -> Result<Option<Secret>> {
        let key = match &self.api_key_file {
            None => self.api_key.clone(),
            Some(path) => {
                let text = std::fs::read_to_string(path)
                    .map_err(|e| Error::request(format!("cannot read {}: {e}", path.display())))?;
                Some(text.lines().next().unwrap_or_default().trim().into())
            }
        };
        match &key {
            Some(key) if key.bytes().is_empty() => Err(Error::request("the API key is empty")),
            _ => Ok(key),
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::Args;

    fn options(more: &[&str]) -> HttpOptions {
        let words = ["kvarena-server", "--serve", "127.0.0.1:0"].iter().chain(more);
        Args::try_parse_from(words).expect("options").http
    }

    #[test]
    fn connections_leave_descriptors() {
        let usual = options(&[]);
        assert_eq!(usual.bounds_within(1024).expect("enough").connections, 960);
        assert_eq!(usual.bounds_within(usize::MAX).expect("enough").connections, 4096);
        assert!(usual.bounds_within(64).is_err(), "none is left for a connection");
        let many = options(&["--max-connections", "961"]);
        assert!(many.bounds_within(1024).expect_err("too many").message.contains("961"));
        assert_eq!(many.bounds_within(1025).expect("just enough").connections, 961);
    }

    #[test]
    fn a_key_is_never_shown() {
        let given = options(&["--api-key", "open sesame"]);
        assert_eq!(given.key().expect("a key").expect("given").bytes(), b"open sesame");
        assert!(!format!("{given:?}").contains("sesame"));
        assert!(options(&["--api-key", ""]).key().is_err());
        assert!(options(&["--api-key-file", "/no/such/file"]).key().is_err());
    }
}
