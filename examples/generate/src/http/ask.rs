//! What clients ask for: OpenAI's completions and chat completions, checked to the last field that matters.
//!
//! Fields that would change the answer and are not served are refused; fields that nobody knows are ignored.

use kvarena::TokenId;
use serde_json::Value;

use super::body::{Body, brief};
use super::refusal::Refusal;
use crate::request::{Defaults, Request};
use crate::server::Limits;
use crate::text::{Message, Text};

/// Most choices of one request, over all its prompts.
pub const CHOICES_MAX: usize = 128;
/// Most stop strings.
const STOPS_MAX: usize = 16;
/// Most likely tokens named beside each one said.
const TOP_MAX: u32 = 20;
/// New tokens of a completion that does not say how many, as OpenAI has it. A chat goes on to the end of the model.
const COMPLETION_TOKENS: u32 = 16;

type Result<T> = std::result::Result<T, Refusal>;

/// Which of the two ways of asking.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// `/v1/completions`
    Completion,
    /// `/v1/chat/completions`
    Chat,
}

/// The model that is served, and how.
pub struct Host {
    /// What clients call it.
    pub model: String,
    /// Its way with text.
    pub text: Text,
    /// What requests may ask for.
    pub limits: Limits,
    /// What requests are where they do not say.
    pub defaults: Defaults,
    /// Most choices of one prompt: as many as a step can choose tokens for, should all prompts ask for so many.
    pub samples_max: u32,
    /// Whether log-probabilities can be had.
    pub keeps_logits: bool,
}

/// A request that can be served.
#[derive(Clone, PartialEq, Debug)]
pub struct Ask {
    /// How it was asked.
    pub kind: Kind,
    /// One for each prompt.
    pub requests: Vec<Request>,
    /// Texts that end an answer, and are not part of it.
    pub stop: Vec<String>,
    /// Whether tokens are sent as they come.
    pub stream: bool,
    /// Whether a stream ends with the counts of tokens.
    pub include_usage: bool,
    /// How many most likely tokens go with each one said, if log-probabilities are wanted.
    pub logprobs: Option<u32>,
}

impl Ask {
    /// Reads a request. `seed` is that of its draws where it has none.
    ///
    /// # Errors
    /// Anything that is not as it should be.
    pub fn parse(host: &Host, kind: Kind, bytes: &[u8], seed: u64) -> Result<Self> {
        let value: Value = serde_json::from_slice(bytes)
            .map_err(|e| Refusal::bad(format!("the body is not valid JSON: {e}")))?;
        let body = Body::new(&value)?;
        match body.text("model")? {
            Some(name) if name == host.model => {}
            Some(name) => return Err(Refusal::unknown_model(name)),
            None => return Err(Refusal::field("model", "model is missing")),
        }
        refuse_unserved(body, kind)?;
        let logprobs = logprobs(body, kind, host.keeps_logits)?;
        let stop = stops(body)?;
        let stream = body.flag("stream")?;
        let include_usage = match body.object("stream_options")? {
            Some(_) if !stream => {
                return Err(Refusal::field("stream_options", "stream_options are for streams"));
            }
            Some(options) => options.flag("include_usage")?,
            None => false,
        };
        let mut template = template(body, host, kind, seed)?;
        template.prediction = prediction(body, host)?;
        let prompts = match kind {
            Kind::Completion => prompts(body, &host.text)?,
            Kind::Chat => vec![messages(body, &host.text)?],
        };
        let choices = prompts.len().saturating_mul(template.samples as usize);
        if choices > CHOICES_MAX {
            let message = format!("{choices} choices are asked for, of at most {CHOICES_MAX}");
            return Err(Refusal::field("prompt", message));
        }
        let request = |prompt| settle(host, kind, &template, prompt);
        let requests = prompts.into_iter().map(request).collect::<Result<_>>()?;
        Ok(Self { kind, requests, stop, stream, include_usage, logprobs })
    }
}

/// Everything of a request but its prompt.
fn template(body: Body<'_>, host: &Host, kind: Kind, seed: u64) -> Result<Request> {
    let mut request = host.defaults.request(Vec::new());
    let newest = match kind {
        Kind::Chat => body.whole("max_completion_tokens")?,
        Kind::Completion => None,
    };
    if let Some(most) = newest.or(body.whole("max_tokens")?) {
        if most == 0 {
            return Err(Refusal::field("max_tokens", "max_tokens is 0 but must be at least 1"));
        }
        request.max_new_tokens = Some(most);
    }
    request.samples = body.whole("n")?.unwrap_or(request.samples);
    if !(1..=host.samples_max).contains(&request.samples) {
        let message =
            format!("n is {} but must be from 1 to {}", request.samples, host.samples_max);
        return Err(Refusal::field("n", message));
    }
    let sampling = &mut request.sampling;
    sampling.temperature = body.number("temperature")?.unwrap_or(sampling.temperature);
    if !(0.0..=2.0).contains(&sampling.temperature) {
        let message = format!("temperature {} is not from 0 to 2", sampling.temperature);
        return Err(Refusal::field("temperature", message));
    }
    sampling.top_p = body.number("top_p")?.unwrap_or(sampling.top_p);
    if !(sampling.top_p > 0.0 && sampling.top_p <= 1.0) {
        let message = format!("top_p {} is not above 0 and at most 1", sampling.top_p);
        return Err(Refusal::field("top_p", message));
    }
    sampling.top_k = body.whole("top_k")?.unwrap_or(sampling.top_k);
    // OpenAI's seeds are signed; which number stands for which does not matter.
    sampling.seed = body.whole::<i64>("seed")?.map_or(seed, |seed| seed as u64);
    if body.flag("ignore_eos")? {
        request.stop.clear();
    }
    if let Some(ids) = body.list("stop_token_ids")? {
        for id in ids {
            request.stop.push(token(id).map_err(|what| Refusal::field("stop_token_ids", what))?);
        }
    }
    Ok(request)
}

/// The request for one prompt, with its number of tokens settled.
fn settle(host: &Host, kind: Kind, template: &Request, prompt: Vec<u32>) -> Result<Request> {
    let name = if kind == Kind::Chat { "messages" } else { "prompt" };
    let room = host.limits.room(prompt.len());
    let usual = match kind {
        Kind::Chat => room as u32,
        Kind::Completion => COMPLETION_TOKENS.min(room as u32),
    };
    let new_tokens = template.max_new_tokens.unwrap_or(usual).max(1);
    let request = Request {
        prompt: prompt.into_iter().map(TokenId::new).collect(),
        max_new_tokens: Some(new_tokens),
        ..template.clone()
    };
    host.limits.check(request).map_err(|what| match new_tokens as usize > room {
        true => Refusal::too_long(name, what),
        false => Refusal::field(name, what),
    })
}

/// Refuses what would change the answer and is not served.
fn refuse_unserved(body: Body<'_>, kind: Kind) -> Result<()> {
    let some = |value: &Value| match value {
        Value::Number(number) => number.as_f64() != Some(0.0),
        Value::Bool(flag) => *flag,
        Value::Array(list) => !list.is_empty(),
        Value::Object(fields) => !fields.is_empty(),
        _ => true,
    };
    for name in ["frequency_penalty", "presence_penalty", "logit_bias"] {
        body.refuse(name, some)?;
    }
    match kind {
        Kind::Completion => {
            body.refuse("echo", some)?;
            body.refuse("suffix", |value| value != "")?;
            body.refuse("best_of", |value| *value != 1)
        }
        Kind::Chat => {
            body.refuse("response_format", |value| value["type"] != "text")?;
            body.refuse("modalities", |value| *value != serde_json::json!(["text"]))?;
            ["tools", "functions", "audio"].into_iter().try_for_each(|name| body.refuse(name, some))
        }
    }
}

fn logprobs(body: Body<'_>, kind: Kind, keeps_logits: bool) -> Result<Option<u32>> {
    let (wanted, name) = match kind {
        Kind::Completion => (body.whole::<u32>("logprobs")?, "logprobs"),
        Kind::Chat => {
            let top = body.whole::<u32>("top_logprobs")?;
            let wanted = body.flag("logprobs")?;
            if top.is_some() && !wanted {
                return Err(Refusal::field(
                    "top_logprobs",
                    "top_logprobs need logprobs to be true",
                ));
            }
            (wanted.then(|| top.unwrap_or(0)), "top_logprobs")
        }
    };
    if let Some(top) = wanted.filter(|&top| top > TOP_MAX) {
        return Err(Refusal::field(name, format!("{name}: {top} is more than {TOP_MAX}")));
    }
    if wanted.is_some() && !keeps_logits {
        let message = "log-probabilities need a server that was started with --logprobs";
        return Err(Refusal::field("logprobs", message));
    }
    Ok(wanted)
}

fn stops(body: Body<'_>) -> Result<Vec<String>> {
    let wrong = |what: String| Refusal::field("stop", what);
    let stops = match body.get("stop") {
        None => Vec::new(),
        Some(Value::String(stop)) => vec![stop.clone()],
        Some(Value::Array(list)) => {
            let text = |value: &Value| match value {
                Value::String(stop) => Ok(stop.clone()),
                other => Err(wrong(format!("stop: {} is no string", brief(other)))),
            };
            list.iter().map(text).collect::<Result<_>>()?
        }
        Some(other) => {
            let what = format!("stop: {} is neither a string nor a list of strings", brief(other));
            return Err(wrong(what));
        }
    };
    if stops.len() > STOPS_MAX {
        return Err(wrong(format!("{} stop strings, of at most {STOPS_MAX}", stops.len())));
    }
    match stops.iter().any(String::is_empty) {
        true => Err(wrong("a stop string is empty".into())),
        false => Ok(stops),
    }
}

fn token(id: &Value) -> std::result::Result<u32, String> {
    let token = id.as_u64().and_then(|id| u32::try_from(id).ok());
    token.ok_or_else(|| format!("{} is no token id", brief(id)))
}

/// The prompts of a completion: a text, tokens, or a list of either.
fn prompts(body: Body<'_>, text: &Text) -> Result<Vec<Vec<u32>>> {
    let wrong = |what: String| Refusal::field("prompt", what);
    let ids = |list: &[Value]| -> Result<Vec<u32>> {
        list.iter().map(|id| token(id).map_err(wrong)).collect()
    };
    let one = |prompt: &Value| match prompt {
        Value::String(prompt) => text.encode(prompt).map_err(|e| wrong(e.message)),
        Value::Array(list) => ids(list),
        other => Err(wrong(format!("prompt: {} is no text and no list of tokens", brief(other)))),
    };
    match body.get("prompt") {
        None => Err(wrong("prompt is missing".into())),
        Some(Value::Array(list)) => match &list[..] {
            [] => Err(wrong("prompt: the list is empty".into())),
            [Value::Number(_), ..] => Ok(vec![ids(list)?]),
            many if many.len() > CHOICES_MAX => {
                Err(wrong(format!("{} prompts, of at most {CHOICES_MAX}", many.len())))
            }
            many => many.iter().map(one).collect(),
        },
        Some(prompt) => Ok(vec![one(prompt)?]),
    }
}

/// What the answer may be like; nothing where that is not said. It changes no answer, so it is as good as none where
/// nothing is drafted.
fn prediction(body: Body<'_>, host: &Host) -> Result<Vec<u32>> {
    let Some(value) = body.get("prediction") else { return Ok(Vec::new()) };
    let wrong = |what: String| Refusal::field("prediction", format!("prediction: {what}"));
    if value["type"] != "content" {
        return Err(wrong(format!("{} is not of type content", brief(value))));
    }
    let tokens = host.text.encode(&content(value).map_err(wrong)?).map_err(|e| wrong(e.message))?;
    let vocab = host.limits.vocab;
    match tokens.iter().find(|&&token| token as usize >= vocab) {
        Some(token) => Err(wrong(format!("token {token} is past the model's {vocab} tokens"))),
        None => Ok(tokens),
    }
}

/// The prompt of a chat, by the model's own template.
fn messages(body: Body<'_>, text: &Text) -> Result<Vec<u32>> {
    let wrong = |what: String| Refusal::field("messages", what);
    let list = body.list("messages")?.ok_or_else(|| wrong("messages is missing".into()))?;
    if list.is_empty() {
        return Err(wrong("messages: the list is empty".into()));
    }
    let messages = list
        .iter()
        .enumerate()
        .map(|(at, value)| message(value).map_err(|what| wrong(format!("messages[{at}]: {what}"))));
    let messages = messages.collect::<Result<Vec<_>>>()?;
    text.chat(&messages).map_err(|e| wrong(e.message))
}

fn message(value: &Value) -> std::result::Result<Message, String> {
    let role = match &value["role"] {
        // What newer clients call it; templates know the older word.
        Value::String(role) if role == "developer" => "system".to_owned(),
        Value::String(role) => role.clone(),
        Value::Null => return Err("role is missing".into()),
        other => return Err(format!("role: {} is no string", brief(other))),
    };
    Ok(Message { role: role.into(), content: content(value)? })
}

/// The text of a message or of a prediction.
fn content(value: &Value) -> std::result::Result<String, String> {
    match &value["content"] {
        Value::String(content) => Ok(content.clone()),
        Value::Array(parts) => parts.iter().map(part).collect(),
        Value::Null => Err("content is missing".into()),
        other => Err(format!("content: {} is no text", brief(other))),
    }
}

/// A part of a message; only texts are served.
fn part(value: &Value) -> std::result::Result<&str, String> {
    match (&value["type"], &value["text"]) {
        (Value::String(kind), Value::String(text)) if kind == "text" => Ok(text),
        _ => Err(format!("content: {} is no part of type text", brief(value))),
    }
}

#[cfg(test)]
#[path = "ask_tests.rs"]
mod tests;
