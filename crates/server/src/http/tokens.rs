//! `/tokenize` and `/detokenize`, in vLLM's format.

use serde_json::{Map, Value, json};

use super::api_error::{ApiError, Result};
use super::body::{Body, RequestBody};
use super::fields::Kind;
use super::host::Host;
use super::prompt;

/// Converts `{"prompt"}` or `{"messages"}` to `{"count", "max_model_len", "tokens"}`. From a list of prompts, it
/// converts the first one. As in vLLM, a request may name the model.
pub fn tokenize(host: &Host, bytes: &[u8]) -> Result<Value> {
    let kind = if has_messages(bytes) { Kind::Chat } else { Kind::Completion };
    let sent = RequestBody::read(bytes, kind)?;
    host.check_model_if_named(sent.body())?;
    let tokens = match kind {
        Kind::Chat => prompt::messages(sent.body(), host)?,
        Kind::Completion => prompt::prompts(sent.prompt, host)?.swap_remove(0).tokens,
    };
    Ok(json!({ "count": tokens.len(), "max_model_len": host.limits.longest_prompt(), "tokens": tokens }))
}

fn has_messages(bytes: &[u8]) -> bool {
    let fields = serde_json::from_slice::<std::collections::BTreeMap<String, &serde_json::value::RawValue>>(bytes);
    fields.is_ok_and(|fields| fields.contains_key("messages"))
}

/// Converts `{"tokens"}` to `{"prompt"}`, with special tokens.
pub fn detokenize(host: &Host, bytes: &[u8]) -> Result<Value> {
    let fields: Map<String, Value> = serde_json::from_slice(bytes)
        .map_err(|e| ApiError::bad(format!("the body is not valid JSON, or no object: {e}")))?;
    if let Some(name) = fields.keys().find(|name| !["model", "tokens"].contains(&name.as_str())) {
        return Err(ApiError::unsupported(name, format!("{name} is not a field of this request")));
    }
    host.check_model_if_named(Body(&fields))?;
    let wrong = |what: String| ApiError::field("tokens", format!("tokens: {what}"));
    let list = fields.get("tokens").and_then(Value::as_array).ok_or_else(|| wrong("no list of tokens".into()))?;
    let tokens = list.iter().map(|id| prompt::token(id).map_err(wrong)).collect::<Result<Vec<u32>>>()?;
    let tokens = prompt::known(host, "tokens", tokens)?;
    Ok(json!({ "prompt": host.text.decode_shown(&tokens) }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::checked_request::tests::host;

    #[test]
    fn both_paths_check_the_model_if_it_is_named() {
        let tokenized =
            |model: Value| tokenize(&host(), json!({ "model": model, "prompt": "1 2" }).to_string().as_bytes());
        let detokenized =
            |model: Value| detokenize(&host(), json!({ "model": model, "tokens": [1, 2] }).to_string().as_bytes());
        assert_eq!(tokenized("tiny".into()).expect("served")["tokens"], json!([1, 2]));
        assert_eq!(detokenized("tiny".into()).expect("served")["prompt"], "1 2");
        assert_eq!(tokenized(Value::Null).expect("served")["count"], 2);
        let unnamed = tokenize(&host(), b"{\"prompt\": \"1 2\"}").expect("served");
        assert_eq!(unnamed["tokens"], json!([1, 2]));
        let messages = b"{\"messages\": [{\"role\": \"user\", \"content\": \"7\"}]}";
        assert_eq!(tokenize(&host(), messages).expect("served")["tokens"], json!([7]));
        assert_eq!(detokenize(&host(), b"{\"tokens\": [1]}").expect("served")["prompt"], "1");
        for (model, status) in [(json!("other"), 404), (json!(7), 400)] {
            for answer in [tokenized(model.clone()), detokenized(model.clone())] {
                let error = answer.expect_err("no such model");
                assert_eq!((error.status, error.param.as_deref()), (status, Some("model")));
            }
        }
    }
}
