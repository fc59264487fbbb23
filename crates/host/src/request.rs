//! Requests, and a reader of requests from a file of JSON lines.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use kvarena::{Namespace, TokenId};
use serde_json::Value;

use crate::error::{Error, Result};
use crate::fields::Fields;
use crate::files::parse_json;
use crate::sample::Sampling;
use crate::shaping::PreparedShaping;
use crate::text::Text;

/// A prompt and the parameters of its continuation.
#[derive(Clone, PartialEq, Debug)]
pub struct Request {
    /// Tokens of the prompt.
    pub prompt: Vec<TokenId>,
    /// Maximum number of new tokens. With `None`, the loop sets its own default, or fewer if the model's positions or
    /// the pool's pages allow no more.
    pub max_new_tokens: Option<u32>,
    /// Number of continuations, which share the prompt's pages.
    pub samples: u32,
    /// Sampling parameters.
    pub sampling: Sampling,
    /// Edits of logits before a token is chosen, if any.
    pub shaping: Option<Arc<PreparedShaping>>,
    /// Tokens that end a continuation.
    pub stop: Vec<u32>,
    /// Cancels a continuation after this many new tokens, as if its client had disconnected.
    pub cancel_after: Option<u32>,
    /// Separates prefixes of different tenants.
    pub namespace: Namespace,
    /// The salt by which routers distinguish the namespace. `None` for the default namespace. Only an engine without
    /// hashes of pages accepts other namespaces without a salt.
    pub salt: Option<Arc<str>>,
    /// A text that the answer may resemble. The loop searches it for drafts, in addition to the prompt.
    pub prediction: Vec<u32>,
    /// Whether the logits of the prompt tokens after the first are requested, for the first sample. The request then
    /// shares no cached prefix with other requests.
    pub scores_prompt: bool,
    /// The group of the request; with `None`, the request is a group by itself. Of the waiting streams, the loop first
    /// admits those of the group with the fewest running streams.
    pub group: Option<u64>,
}

/// Defaults of a request's fields.
#[derive(Clone, PartialEq, Debug)]
pub struct Defaults {
    /// See [`Request`].
    pub max_new_tokens: Option<u32>,
    /// See [`Request`].
    pub samples: u32,
    /// See [`Request`].
    pub sampling: Sampling,
    /// See [`Request`].
    pub stop: Vec<u32>,
}

impl Defaults {
    /// Returns a request for `prompt` with the defaults.
    pub fn request(&self, prompt: Vec<u32>) -> Request {
        Request {
            prompt: prompt.into_iter().map(TokenId::new).collect(),
            max_new_tokens: self.max_new_tokens,
            samples: self.samples,
            sampling: self.sampling,
            shaping: None,
            stop: self.stop.clone(),
            cancel_after: None,
            namespace: Namespace::default(),
            salt: None,
            prediction: Vec::new(),
            scores_prompt: false,
            group: None,
        }
    }
}

/// Reads a file of JSON lines, one request each, or standard input for `-`. Skips blank lines and ignores unknown
/// fields. The default seed of a line is the default seed plus the number of lines before it, so that equal lines draw
/// different tokens.
///
/// # Errors
/// The file cannot be read, or a line is not a request; the message names the line.
pub fn read_requests(path: &Path, defaults: &Defaults, text: &Text) -> Result<Vec<Request>> {
    let bytes = match path.to_str() {
        Some("-") => std::io::read_to_string(std::io::stdin()),
        _ => std::fs::read_to_string(path),
    };
    let lines = bytes.map_err(|e| Error::request(format!("cannot read {}: {e}", path.display())))?;
    let lines = lines.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    let parse = |(i, line): (usize, &str)| {
        let place = PathBuf::from(format!("{}:{}", path.display(), i + 1));
        parse_line(&place, line, i as u64, defaults, text).map_err(|error| Error::request(error.message))
    };
    lines.map(parse).collect()
}

/// Reads a line; `place` is for messages.
fn parse_line(place: &Path, line: &str, number: u64, defaults: &Defaults, text: &Text) -> Result<Request> {
    let value = parse_json(place, line.as_bytes())?;
    let fields = Fields::new(place, &value)?;
    let prompt = words(&fields, "prompt", text)?.ok_or_else(|| fields.wrong("prompt is missing"))?;
    let mut request = defaults.request(prompt);
    request.prediction = words(&fields, "prediction", text)?.unwrap_or_default();
    request.max_new_tokens = whole(&fields, "max_new_tokens")?.or(defaults.max_new_tokens);
    request.samples = whole(&fields, "n")?.unwrap_or(defaults.samples);
    request.cancel_after = whole(&fields, "cancel_after")?;
    if let Some(namespace) = whole::<u64>(&fields, "namespace")? {
        request.namespace = Namespace::new(namespace);
        request.salt = (namespace != 0).then(|| namespace.to_string().into());
    }
    let sampling = &mut request.sampling;
    sampling.temperature = fields.number_or("temperature", sampling.temperature.into())? as f32;
    sampling.top_p = fields.number_or("top_p", sampling.top_p.into())? as f32;
    sampling.top_k = whole(&fields, "top_k")?.unwrap_or(sampling.top_k);
    sampling.seed = whole(&fields, "seed")?.unwrap_or(sampling.seed.wrapping_add(number));
    if fields.get("stop_token_ids").is_some() {
        request.stop = fields.tokens("stop_token_ids")?;
    }
    Ok(request)
}

/// Returns the tokens of a field that contains a text or a list of token ids.
fn words(fields: &Fields<'_>, name: &str, text: &Text) -> Result<Option<Vec<u32>>> {
    match fields.get(name) {
        Some(Value::String(words)) => text.encode(words).map(Some).map_err(|error| fields.wrong(&error.message)),
        Some(Value::Array(ids)) => {
            let token = |id: &Value| id.as_u64().and_then(|id| u32::try_from(id).ok());
            let wrong = |id: &Value| fields.wrong(&format!("{name}: {id} is not a token id"));
            ids.iter().map(|id| token(id).ok_or_else(|| wrong(id))).collect::<Result<_>>().map(Some)
        }
        Some(_) => Err(fields.wrong(&format!("{name}: neither a text nor a list of token ids"))),
        None => Ok(None),
    }
}

fn whole<T: TryFrom<u64>>(fields: &Fields<'_>, name: &str) -> Result<Option<T>> {
    let Some(value) = fields.get(name) else { return Ok(None) };
    let number = value.as_u64().and_then(|n| T::try_from(n).ok());
    number.map(Some).ok_or_else(|| fields.wrong(&format!("{name}: {value} is not a whole number in range")))
}
