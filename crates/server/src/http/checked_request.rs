//! The requests of OpenAI's completions and chat completions, with all their checks.
//!
//! `fields.rs` lists all fields; the server rejects unsupported fields.

use std::hash::BuildHasher;

use kvarena::{Namespace, TokenId};
use serde_json::Value;

use super::api_error::{ApiError, Result};
use super::body::{Body, RequestBody, brief};
use super::fields::Kind;
use super::host::{CHOICES_MAX, Host};
use super::prompt::{Prompt, PromptText, known, messages, prediction, prompts, token};
use kvarena_host::decoder::Decoder;
use kvarena_host::request::Request;
use kvarena_host::sample::Sampling;
use kvarena_host::shaping::Shaping;

/// Maximum number of stop strings.
const STOPS_MAX: usize = 16;
/// Maximum number of bytes of a stop string or a bad word.
const STOP_BYTES_MAX: usize = 1024;
/// Maximum number of different stop tokens that a request lists.
const STOP_TOKENS_MAX: usize = 128;
/// Maximum number of characters of a cache salt, as in vLLM. The engine keeps a salt while a page of its namespace is
/// cached.
const SALT_CHARS_MAX: usize = 1024;
/// Maximum number of tokens with a bias.
const BIASES_MAX: usize = 1024;
/// Maximum number of bad words, and of tokens of one bad word.
const BAD_WORDS_MAX: usize = 128;
/// Maximum number of most likely tokens that an answer reports with each token.
const TOP_MAX: u32 = 20;
/// Default number of new tokens of a completion, as in OpenAI's API. A chat continues as far as the model and the pool
/// allow.
const COMPLETION_TOKENS: u32 = 16;

/// A request that the server can serve.
#[derive(Clone, Debug)]
pub struct CheckedRequest {
    pub kind: Kind,
    pub requests: Vec<Request>,
    /// The state of the decoder after each prompt, and the prompt's text if the answer begins with it.
    pub beginnings: Vec<(Decoder, Option<PromptText>)>,
    /// Stop strings. The answer does not contain them.
    pub stop: Vec<String>,
    pub stream: bool,
    /// Whether a stream ends with the counts of tokens.
    pub include_usage: bool,
    /// Number of most likely tokens reported with each token; `None` without log-probabilities.
    pub logprobs: Option<u32>,
    /// Whether the answer begins with the prompt.
    pub echo: bool,
    /// Whether the answer omits new tokens, because `max_tokens` is 0.
    pub hides_new: bool,
}

impl CheckedRequest {
    /// Reads a request. `seed` is the default seed of its draws.
    ///
    /// # Errors
    /// The body or a field is invalid.
    pub fn parse(host: &Host, kind: Kind, bytes: &[u8], seed: u64) -> Result<Self> {
        let sent = RequestBody::read(bytes, kind)?;
        let body = sent.body();
        host.check_model(body)?;
        let logprobs = logprobs(body, kind, host.keeps_logits)?;
        let stop = stops(body)?;
        let stream = body.flag("stream")?;
        let include_usage = match body.object("stream_options")? {
            Some(_) if !stream => {
                return Err(ApiError::field("stream_options", "stream_options are for streams"));
            }
            Some(options) => options.flag("include_usage")?,
            None => false,
        };
        let echo = body.flag("echo")?;
        let mut template = template(body, host, kind, seed)?;
        let hides_new = template.max_new_tokens == Some(0);
        if hides_new && !echo {
            return Err(ApiError::field("max_tokens", "max_tokens is 0 but must be at least 1, or echo true"));
        }
        template.scores_prompt = echo && logprobs.is_some();
        template.prediction = prediction(body, host)?;
        let prompts = match kind {
            Kind::Completion => prompts(sent.prompt, host)?,
            Kind::Chat => vec![messages(body, host)?.into()],
        };
        let choices = prompts.len().saturating_mul(template.samples as usize);
        let most = CHOICES_MAX.max(host.samples_max as usize);
        if choices > most {
            let message = format!("{choices} choices are more than {most}");
            // With n = 1, every allowed number of prompts is valid, so the error names `n`.
            return Err(ApiError::field("n", message));
        }
        let (mut requests, mut beginnings) = (Vec::new(), Vec::new());
        let is_seeded = body.get("seed").is_some();
        for Prompt { tokens, mut text } in prompts {
            if let Some(own) = text.as_mut().filter(|_| template.scores_prompt) {
                own.offsets = host.text.offsets(&own.text).map_err(|e| ApiError::field("prompt", e.message))?;
            }
            beginnings.push(beginning(host, kind, echo, &tokens, text));
            requests.push(settle(host, kind, &template, tokens)?);
            if !is_seeded {
                // Equal prompts without a seed have different answers.
                template.sampling.seed = template.sampling.seed.wrapping_add(1);
            }
        }
        Ok(Self { kind, requests, beginnings, stop, stream, include_usage, logprobs, echo, hides_new })
    }
}

/// Decodes a prompt as far as its answer needs it. `own` is the prompt's text, unless the prompt is a list of tokens or
/// a chat.
pub(super) fn beginning(
    host: &Host,
    kind: Kind,
    echo: bool,
    tokens: &[u32],
    own: Option<PromptText>,
) -> (Decoder, Option<PromptText>) {
    let is_empty = own.as_ref().is_some_and(|own| own.text.is_empty());
    // An answer to a chat is a text of its own.
    if kind == Kind::Chat || is_empty {
        return (Decoder::default(), own);
    }
    if !echo || own.is_some() {
        return (Decoder::after(&host.text, tokens), own);
    }
    // Tokens that end inside a character are held back for the choice's own tokens.
    let (mut decoder, mut shown, mut offsets, mut chars) = (Decoder::default(), String::new(), Vec::new(), 0);
    for &token in tokens {
        offsets.push(chars);
        let text = decoder.push_shown(&host.text, token);
        chars += text.chars().count();
        shown += &text;
    }
    (decoder, Some(PromptText { text: shown, offsets }))
}

/// Returns the parameters that all prompts of a request share, as a request without a prompt.
fn template(body: Body<'_>, host: &Host, kind: Kind, seed: u64) -> Result<Request> {
    let mut request = host.defaults.request(Vec::new());
    let newest = match kind {
        Kind::Chat => body.whole("max_completion_tokens")?,
        Kind::Completion => None,
    };
    if let Some(most) = newest.or(body.whole("max_tokens")?) {
        request.max_new_tokens = Some(most);
    }
    request.samples = body.whole("n")?.unwrap_or(request.samples);
    if !(1..=host.samples_max).contains(&request.samples) {
        let message = format!("n is {} but must be from 1 to {}", request.samples, host.samples_max);
        return Err(ApiError::field("n", message));
    }
    request.sampling = sampling(body, host, seed)?;
    if body.flag("ignore_eos")? {
        request.stop.clear();
    }
    request.stop.extend(ids(body, "stop_token_ids", STOP_TOKENS_MAX, host)?);
    request.shaping = shaping(body, host)?.map(Shaping::prepare);
    if request.shaping.as_ref().is_some_and(|s| !s.allows_some(&request.stop, host.limits.vocab)) {
        let name = ["allowed_token_ids", "bad_words"].into_iter().find(|name| body.get(name).is_some());
        let what = "allowed_token_ids, bad_words, min_tokens and the stop tokens allow no token";
        return Err(ApiError::field(name.unwrap_or("min_tokens"), what));
    }
    if let Some(salt) = body.text("cache_salt")? {
        let len = salt.chars().count();
        if !(1..=SALT_CHARS_MAX).contains(&len) {
            let message = format!("cache_salt has {len} characters but must have from 1 to {SALT_CHARS_MAX}");
            return Err(ApiError::field("cache_salt", message));
        }
        // The serving loop uses the namespaces with the top bit for scored prompts; 0 is the default namespace.
        request.namespace = Namespace::new((host.salts.hash_one(salt) >> 1).max(1));
        request.salt = Some(salt.into());
    }
    Ok(request)
}

/// Returns the parameters of draws; those of the host replace missing ones.
fn sampling(body: Body<'_>, host: &Host, seed: u64) -> Result<Sampling> {
    let usual = host.defaults.sampling;
    let temperature = body.number_in("temperature", (0.0, 2.0))?.unwrap_or(usual.temperature);
    let min_p = body.number_in("min_p", (0.0, 1.0))?.unwrap_or(usual.min_p);
    let top_p = body.number("top_p")?.unwrap_or(usual.top_p);
    if !(top_p > 0.0 && top_p <= 1.0) {
        return Err(ApiError::field("top_p", format!("top_p {top_p} is not above 0 and at most 1")));
    }
    if min_p > 0.0 && !host.edits_logits {
        return Err(ApiError::unsupported("min_p", "this backend does not support min_p"));
    }
    // In vLLM, -1 stands for all tokens.
    let top_k = match body.whole::<i64>("top_k")? {
        None => usual.top_k,
        Some(-1) => 0,
        Some(k) => {
            u32::try_from(k).map_err(|_| ApiError::field("top_k", format!("top_k {k} is below -1 or too large")))?
        }
    };
    // OpenAI's seeds are signed; any mapping to unsigned numbers is valid.
    let seed = body.whole::<i64>("seed")?.map_or(seed, |seed| seed as u64);
    Ok(Sampling { temperature, top_k, top_p, min_p, seed })
}

/// Returns a list of at most `most` token ids of the model, without duplicates.
fn ids(body: Body<'_>, name: &str, most: usize, host: &Host) -> Result<Vec<u32>> {
    let list = body.list(name)?.unwrap_or_default();
    let wrong = |what: String| ApiError::field(name, format!("{name}: {what}"));
    let ids = list.iter().map(token).collect::<std::result::Result<Vec<_>, _>>().map_err(wrong)?;
    let mut ids = known(host, name, ids)?;
    ids.sort_unstable();
    ids.dedup();
    if ids.len() > most {
        return Err(wrong(format!("{} tokens, of at most {most}", ids.len())));
    }
    Ok(ids)
}

/// Returns the edits of logits, if any.
fn shaping(body: Body<'_>, host: &Host) -> Result<Option<Shaping>> {
    let vocab = host.limits.vocab;
    let repetition = body.number_in("repetition_penalty", (0.0, 1e3))?.unwrap_or(host.repetition);
    if repetition == 0.0 {
        return Err(ApiError::field("repetition_penalty", "repetition_penalty 0 is not above 0"));
    }
    let shaping = Shaping {
        repetition,
        frequency: body.number_in("frequency_penalty", (-2.0, 2.0))?.unwrap_or(0.0),
        presence: body.number_in("presence_penalty", (-2.0, 2.0))?.unwrap_or(0.0),
        bias: biases(body, vocab)?,
        allowed: match body.list("allowed_token_ids")? {
            Some([]) => {
                return Err(ApiError::field("allowed_token_ids", "allowed_token_ids: the list is empty"));
            }
            Some(_) => Some(ids(body, "allowed_token_ids", vocab, host)?),
            None => None,
        },
        bad_words: bad_words(body, host)?,
        min_tokens: body.whole("min_tokens")?.unwrap_or(0),
    };
    if shaping.is_none() {
        return Ok(None);
    }
    if !host.edits_logits {
        let names = [
            "repetition_penalty",
            "frequency_penalty",
            "presence_penalty",
            "logit_bias",
            "allowed_token_ids",
            "bad_words",
            "min_tokens",
        ];
        let name = names.into_iter().find(|name| body.get(name).is_some()).unwrap_or(names[0]);
        return Err(ApiError::unsupported(name, format!("this backend does not support {name}")));
    }
    Ok(Some(shaping))
}

/// Returns pairs of a token id, given as a string, and the addend of its logit.
fn biases(body: Body<'_>, vocab: usize) -> Result<Vec<(u32, f32)>> {
    let Some(fields) = body.object("logit_bias")? else { return Ok(Vec::new()) };
    let wrong = |what: String| ApiError::field("logit_bias", format!("logit_bias: {what}"));
    let fields = fields.all();
    if fields.len() > BIASES_MAX {
        return Err(wrong(format!("{} tokens, of at most {BIASES_MAX}", fields.len())));
    }
    let bias = |(id, value): (&String, &Value)| {
        // Another spelling of a number would be a second key of the same token.
        let is_token = |token: &u32| (*token as usize) < vocab && token.to_string() == *id;
        let token = id.parse::<u32>().ok().filter(is_token);
        let token = token.ok_or_else(|| wrong(format!("{id:?} is not a token id below {vocab}")))?;
        let bias = value.as_f64().filter(|bias| (-100.0..=100.0).contains(bias));
        let bias = bias.ok_or_else(|| wrong(format!("{} is not from -100 to 100", brief(value))))?;
        Ok((token, bias as f32))
    };
    fields.iter().map(bias).collect()
}

/// Returns the tokens of each bad word, at the beginning of a text and after a space.
fn bad_words(body: Body<'_>, host: &Host) -> Result<Vec<Vec<u32>>> {
    let list = body.list("bad_words")?.unwrap_or_default();
    let wrong = |what: String| ApiError::field("bad_words", format!("bad_words: {what}"));
    if list.len() > BAD_WORDS_MAX {
        return Err(wrong(format!("{} words, of at most {BAD_WORDS_MAX}", list.len())));
    }
    let mut words = Vec::new();
    for value in list {
        let word = value.as_str().filter(|word| !word.trim().is_empty() && word.len() <= STOP_BYTES_MAX);
        let word = word.ok_or_else(|| wrong(format!("{} is no word", brief(value))))?;
        for text in [word.trim_start().to_owned(), format!(" {}", word.trim_start())] {
            let tokens = host.text.encode_with(&text, false).map_err(|e| wrong(e.message))?;
            if tokens.len() > BAD_WORDS_MAX || tokens.iter().any(|&token| token as usize >= host.limits.vocab) {
                return Err(wrong(format!("{} is no word of this model", brief(value))));
            }
            if !tokens.is_empty() && !words.contains(&tokens) {
                words.push(tokens);
            }
        }
    }
    Ok(words)
}

/// Returns the request for one prompt, with its maximum number of new tokens.
fn settle(host: &Host, kind: Kind, template: &Request, prompt: Vec<u32>) -> Result<Request> {
    let name = kind.prompt_field();
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
    host.limits.check(request).map_err(|what| {
        let is_too_long = new_tokens as usize > room;
        if is_too_long {
            ApiError::too_long(name, what, host.limits.longest_prompt())
        } else {
            ApiError::field(name, what)
        }
    })
}

fn logprobs(body: Body<'_>, kind: Kind, keeps_logits: bool) -> Result<Option<u32>> {
    let (wanted, name) = match kind {
        Kind::Completion => (body.whole::<u32>("logprobs")?, "logprobs"),
        Kind::Chat => {
            let top = body.whole::<u32>("top_logprobs")?;
            let wanted = body.flag("logprobs")?;
            if top.is_some() && !wanted {
                return Err(ApiError::field("top_logprobs", "top_logprobs need logprobs to be true"));
            }
            (wanted.then(|| top.unwrap_or(0)), "top_logprobs")
        }
    };
    if let Some(top) = wanted.filter(|&top| top > TOP_MAX) {
        return Err(ApiError::field(name, format!("{name}: {top} is more than {TOP_MAX}")));
    }
    if wanted.is_some() && !keeps_logits {
        let message = "log-probabilities need a server that was started with --logprobs";
        return Err(ApiError::field("logprobs", message));
    }
    Ok(wanted)
}

fn stops(body: Body<'_>) -> Result<Vec<String>> {
    let wrong = |what: String| ApiError::field("stop", what);
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
    if let Some(stop) = stops.iter().find(|stop| stop.len() > STOP_BYTES_MAX) {
        return Err(wrong(format!("a stop string of {} bytes, of at most {STOP_BYTES_MAX}", stop.len())));
    }
    if stops.iter().any(String::is_empty) {
        return Err(wrong("a stop string is empty".into()));
    }
    Ok(stops)
}

#[cfg(test)]
pub(super) mod tests;
