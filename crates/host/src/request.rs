//! What users ask for: requests, from the command line or a file of JSON lines.

use std::path::Path;
use std::sync::Arc;

use kvarena::{Namespace, TokenId};
use serde_json::Value;

use crate::error::{Error, Result};
use crate::fields::Fields;
use crate::sample::Sampling;
use crate::shaping::PreparedShaping;
use crate::text::Text;

/// A prompt and how to go on from it.
#[derive(Clone, PartialEq, Debug)]
pub struct Request {
    /// Its tokens.
    pub prompt: Vec<TokenId>,
    /// Most new tokens. None: as many as usual, fewer where the model or the pool ends.
    pub max_new_tokens: Option<u32>,
    /// Continuations wanted; they share the prompt's pages.
    pub samples: u32,
    /// How to choose tokens.
    pub sampling: Sampling,
    /// What changes logits before tokens are chosen; none: nothing does.
    pub shaping: Option<Arc<PreparedShaping>>,
    /// Tokens that end a continuation.
    pub stop: Vec<u32>,
    /// The client goes away after so many new tokens of a continuation.
    pub cancel_after: Option<u32>,
    /// Keeps prefixes of different tenants apart.
    pub namespace: Namespace,
    /// The salt by which routers tell the namespace from others, unless it is the default one.
    pub salt: Option<Arc<str>>,
    /// What the answer may be like, where drafts are looked for beside the prompt: a text that is to be edited, say.
    pub prediction: Vec<u32>,
    /// Whether the logits of each token of the prompt are wanted. No cached prefix is used then.
    pub scores_prompt: bool,
    /// Requests of the same group take turns with other groups as if they were one; none: a group of its own.
    pub group: Option<u64>,
}

/// What a request's fields are where it does not name them.
#[derive(Clone, PartialEq, Debug)]
pub struct Defaults {
    /// As in [`Request`].
    pub max_new_tokens: Option<u32>,
    /// As in [`Request`].
    pub samples: u32,
    /// As in [`Request`].
    pub sampling: Sampling,
    /// As in [`Request`].
    pub stop: Vec<u32>,
}

impl Defaults {
    /// A request for `prompt` with nothing else said.
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

/// Reads a file of JSON lines, one request each; empty lines are skipped, unknown fields are ignored.
///
/// # Errors
/// The file cannot be read, or a line makes no request; the message names the line.
pub fn read_requests(path: &Path, defaults: &Defaults, text: &Text) -> Result<Vec<Request>> {
    let bytes = match path.to_str() {
        Some("-") => std::io::read_to_string(std::io::stdin()),
        _ => std::fs::read_to_string(path),
    };
    let lines =
        bytes.map_err(|e| Error::request(format!("cannot read {}: {e}", path.display())))?;
    let lines = lines.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    let parse = |(i, line): (usize, &str)| {
        parse_line(line, defaults, text)
            .map_err(|what| Error::request(format!("{}:{}: {what}", path.display(), i + 1)))
    };
    lines.map(parse).collect()
}

fn parse_line(
    line: &str,
    defaults: &Defaults,
    text: &Text,
) -> std::result::Result<Request, String> {
    let value: Value = serde_json::from_str(line).map_err(|e| format!("not valid JSON: {e}"))?;
    let fields = Line { value: &value };
    let prompt = fields.tokens("prompt", text)?.ok_or("prompt is missing")?;
    let mut request = defaults.request(prompt);
    request.prediction = fields.tokens("prediction", text)?.unwrap_or_default();
    request.max_new_tokens = fields.whole("max_new_tokens")?.or(defaults.max_new_tokens);
    request.samples = fields.whole("n")?.unwrap_or(defaults.samples);
    request.cancel_after = fields.whole("cancel_after")?;
    if let Some(namespace) = fields.whole::<u64>("namespace")? {
        request.namespace = Namespace::new(namespace);
    }
    let sampling = &mut request.sampling;
    sampling.temperature = fields.number("temperature")?.unwrap_or(sampling.temperature);
    sampling.top_p = fields.number("top_p")?.unwrap_or(sampling.top_p);
    sampling.top_k = fields.whole("top_k")?.unwrap_or(sampling.top_k);
    sampling.seed = fields.whole("seed")?.unwrap_or(sampling.seed);
    if fields.get("stop_token_ids").is_some() {
        let fields = Fields::new(Path::new("stop_token_ids"), &value);
        let stop = fields.and_then(|fields| fields.tokens("stop_token_ids"));
        request.stop = stop.map_err(|e| e.message)?;
    }
    Ok(request)
}

/// Typed look-ups in a line.
struct Line<'a> {
    value: &'a Value,
}

impl Line<'_> {
    fn get(&self, name: &str) -> Option<&Value> {
        self.value.get(name).filter(|value| !value.is_null())
    }

    fn tokens(&self, name: &str, text: &Text) -> std::result::Result<Option<Vec<u32>>, String> {
        let tokens = match self.get(name) {
            Some(Value::String(words)) => text.encode(words).map_err(|e| e.message),
            Some(Value::Array(ids)) => {
                let token = |id: &Value| id.as_u64().and_then(|id| u32::try_from(id).ok());
                let wrong = |id: &Value| format!("{name}: {id} is no token id");
                ids.iter().map(|id| token(id).ok_or_else(|| wrong(id))).collect()
            }
            Some(_) => Err(format!("{name}: neither a text nor a list of token ids")),
            None => return Ok(None),
        };
        tokens.map(Some)
    }

    fn whole<T: TryFrom<u64>>(&self, name: &str) -> std::result::Result<Option<T>, String> {
        let Some(value) = self.get(name) else { return Ok(None) };
        let number = value.as_u64().and_then(|n| T::try_from(n).ok());
        number.map(Some).ok_or_else(|| format!("{name}: {value} is no whole number in range"))
    }

    fn number(&self, name: &str) -> std::result::Result<Option<f32>, String> {
        let Some(value) = self.get(name) else { return Ok(None) };
        let number = value.as_f64().map(|x| x as f32);
        number.map(Some).ok_or_else(|| format!("{name}: {value} is no number"))
    }
}
