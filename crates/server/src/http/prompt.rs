//! The prompts of a request: texts, tokens, or the messages of a chat.

use serde_json::value::RawValue;
use serde_json::{Map, Value, json};

use super::api_error::{ApiError, Result};
use super::body::{Body, brief, brief_json};
use super::host::{CHOICES_MAX, Host};

/// A prompt of a completion.
#[derive(Debug)]
pub struct Prompt {
    pub tokens: Vec<u32>,
    /// The text; `None` for a prompt of tokens.
    pub text: Option<PromptText>,
}

/// The text of a prompt.
#[derive(Clone, PartialEq, Default, Debug)]
pub struct PromptText {
    pub text: String,
    /// Index of the character at which each token begins, if requested.
    pub offsets: Vec<usize>,
}

impl From<Vec<u32>> for Prompt {
    fn from(tokens: Vec<u32>) -> Self {
        Self { tokens, text: None }
    }
}

/// Returns the tokens of a text. First it rejects a text with more bytes than the maximum number of tokens times the
/// bytes of the longest token.
fn encode(host: &Host, name: &str, text: &str, special: bool) -> Result<Vec<u32>> {
    let room = host.limits.room(0);
    let most = host.text.longest_token().saturating_mul(room);
    if text.len() > most {
        let what = format!(
            "a text of {} bytes is longer than {room} tokens of {} bytes, and {}",
            text.len(),
            host.text.longest_token(),
            host.limits.least(room)
        );
        return Err(ApiError::too_long(name, what, host.limits.longest_prompt()));
    }
    let tokens = host.text.encode_with(text, special).map_err(|e| ApiError::field(name, e.message))?;
    known(host, name, tokens)
}

/// Returns the tokens if the model has all of them. A tokenizer may have more tokens, such as those of images.
pub fn known(host: &Host, name: &str, tokens: Vec<u32>) -> Result<Vec<u32>> {
    let vocab = host.limits.vocab;
    match tokens.iter().find(|&&token| token as usize >= vocab) {
        Some(token) => Err(ApiError::field(
            name,
            format!("{name}: token {token} is past the model's vocabulary of {vocab} tokens"),
        )),
        None => Ok(tokens),
    }
}

/// Returns a token id.
pub fn token(id: &Value) -> std::result::Result<u32, String> {
    let token = id.as_u64().and_then(|id| u32::try_from(id).ok());
    token.ok_or_else(|| format!("{} is not a token id", brief(id)))
}

/// Returns the prompts of a completion: a text, tokens, or a list of either.
pub fn prompts(prompt: Option<&RawValue>, host: &Host) -> Result<Vec<Prompt>> {
    let wrong = |what: String| ApiError::field("prompt", what);
    let json = prompt.ok_or_else(|| wrong("prompt is missing".into()))?;
    let Some(list) = items(json)? else { return Ok(vec![text(json, host)?]) };
    match &list[..] {
        [] => Err(wrong("prompt: the list is empty".into())),
        [first, ..] if is_number(first) => Ok(vec![ids(&list, host)?.into()]),
        many if many.len() > CHOICES_MAX => Err(wrong(format!("{} prompts, of at most {CHOICES_MAX}", many.len()))),
        many => many.iter().map(|prompt| one(prompt, host)).collect(),
    }
}

fn is_number(json: &RawValue) -> bool {
    matches!(json.get().as_bytes()[0], b'0'..=b'9' | b'-')
}

/// Returns one prompt of a list.
fn one(json: &RawValue, host: &Host) -> Result<Prompt> {
    match items(json)? {
        None => text(json, host),
        Some(list) => ids(&list, host).map(Prompt::from),
    }
}

/// Returns the items of a list, or `None` for a text.
fn items(json: &RawValue) -> Result<Option<Vec<&RawValue>>> {
    let wrong = |what: String| ApiError::field("prompt", format!("prompt: {what}"));
    match json.get().as_bytes()[0] {
        b'"' => Ok(None),
        b'[' => serde_json::from_str(json.get()).map(Some).map_err(|e| wrong(e.to_string())),
        _ => Err(wrong(format!("{} is no text and no list of tokens", brief_json(json.get())))),
    }
}

fn text(json: &RawValue, host: &Host) -> Result<Prompt> {
    let text: String =
        serde_json::from_str(json.get()).map_err(|e| ApiError::field("prompt", format!("prompt: {e}")))?;
    let tokens = encode(host, "prompt", &text, true)?;
    Ok(Prompt { tokens, text: Some(PromptText { text, offsets: Vec::new() }) })
}

fn ids(list: &[&RawValue], host: &Host) -> Result<Vec<u32>> {
    let room = host.limits.room(0);
    if list.len() > room {
        let what = format!("a prompt of {} tokens, but {}", list.len(), host.limits.least(list.len()));
        return Err(ApiError::too_long("prompt", what, host.limits.longest_prompt()));
    }
    let id = |json: &&RawValue| {
        let wrong = || ApiError::field("prompt", format!("{} is not a token id", brief_json(json.get())));
        json.get().parse::<u32>().map_err(|_| wrong())
    };
    known(host, "prompt", list.iter().map(id).collect::<Result<_>>()?)
}

/// Returns the prediction, if any. It does not change the answer; a server without drafting only checks it.
pub fn prediction(body: Body<'_>, host: &Host) -> Result<Vec<u32>> {
    let Some(value) = body.get("prediction") else { return Ok(Vec::new()) };
    let wrong = |what: String| ApiError::field("prediction", format!("prediction: {what}"));
    if value["type"] != "content" {
        return Err(wrong(format!("{} is not of type content", brief(value))));
    }
    let content = content(value).map_err(wrong)?.ok_or_else(|| wrong("content is missing".into()))?;
    encode(host, "prediction", &content, true)
}

/// Returns the tokens of a chat, rendered by the model's own template.
pub fn messages(body: Body<'_>, host: &Host) -> Result<Vec<u32>> {
    let wrong = |what: String| ApiError::field("messages", what);
    let list = body.list("messages")?.ok_or_else(|| wrong("messages is missing".into()))?;
    if list.is_empty() {
        return Err(wrong("messages: the list is empty".into()));
    }
    let messages = list
        .iter()
        .enumerate()
        .map(|(at, value)| message(value).map_err(|what| wrong(format!("messages[{at}]: {what}"))));
    let messages = messages.collect::<Result<Vec<_>>>()?;
    let none = Map::new();
    let arguments = body.object("chat_template_kwargs")?.map_or(&none, |arguments| arguments.all());
    let rendered = host.text.render(&messages, arguments).map_err(|e| wrong(e.message))?;
    // The template's output already contains special tokens.
    encode(host, "messages", &rendered, false)
}

/// Fields of messages that templates read, in addition to role and content.
const PASSED: [&str; 6] = ["name", "tool_calls", "tool_call_id", "reasoning_content", "reasoning", "thinking"];

/// Converts a message to the template's form.
fn message(value: &Value) -> std::result::Result<Value, String> {
    let role = match &value["role"] {
        // The role name of newer clients; templates use the older name.
        Value::String(role) if role == "developer" => "system".to_owned(),
        Value::String(role) => role.clone(),
        Value::Null => return Err("role is missing".into()),
        other => return Err(format!("role: {} is no string", brief(other))),
    };
    let calls = &value["tool_calls"];
    let has_calls = calls.as_array().is_some_and(|calls| !calls.is_empty());
    let content = match content(value)? {
        None if !has_calls => return Err("content is missing".into()),
        content => content,
    };
    let mut message = json!({ "role": role, "content": content });
    for (name, value) in value.as_object().into_iter().flatten() {
        let is_empty = super::fields::Neutral::Empty.accepts(value);
        if is_empty || ["role", "content"].contains(&&name[..]) {
            continue;
        }
        if !PASSED.contains(&&name[..]) {
            return Err(format!("{name}: {} is not served here", brief(value)));
        }
        message[name] = value.clone();
    }
    if has_calls {
        // Templates write arguments as JSON; clients send them as a string that already contains JSON.
        for call in message["tool_calls"].as_array_mut().into_iter().flatten() {
            let parsed = call["function"]["arguments"].as_str().map(serde_json::from_str::<Value>);
            if let Some(Ok(arguments @ Value::Object(_))) = parsed {
                call["function"]["arguments"] = arguments;
            }
        }
    }
    Ok(message)
}

/// Returns the text of a message or of a prediction, if it has one.
fn content(value: &Value) -> std::result::Result<Option<String>, String> {
    match &value["content"] {
        Value::String(content) => Ok(Some(content.clone())),
        Value::Array(parts) => parts.iter().map(part).collect::<std::result::Result<_, _>>().map(Some),
        Value::Null => Ok(None),
        other => Err(format!("content: {} is no text", brief(other))),
    }
}

/// Returns a part of a message; only text is supported, also by models that read images.
fn part(value: &Value) -> std::result::Result<&str, String> {
    match (&value["type"], &value["text"]) {
        (Value::String(kind), Value::String(text)) if kind == "text" => Ok(text),
        (Value::String(kind), _) if kind != "text" => {
            Err(format!("content: parts of type {} are not served, only text", brief(&value["type"])))
        }
        _ => Err(format!("content: {} is no part of type text", brief(value))),
    }
}
