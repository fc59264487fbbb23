//! All fields of the request types of OpenAI and of vLLM (with a few of SGLang's), and their use.
//!
//! The server checks requests against this table. It rejects a field that is not in the table, because the field may
//! change the answer.

use serde_json::Value;

/// The two kinds of requests.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// `/v1/completions`
    Completion,
    /// `/v1/chat/completions`
    Chat,
}

impl Kind {
    /// Returns the name of the field that contains the prompt.
    pub fn prompt_field(self) -> &'static str {
        match self {
            Self::Completion => "prompt",
            Self::Chat => "messages",
        }
    }
}

/// Requests to which a field belongs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Of {
    /// Completions only.
    Completion,
    /// Chats only.
    Chat,
    /// Completions and chats.
    Both,
}

/// The use of a field.
#[derive(Clone, Copy, Debug)]
pub enum Use {
    /// The field has the effect that the API's documentation describes.
    Served,
    /// The field changes no answer, and the server does not read it.
    Harmless,
    /// The field would change the answer, so the server accepts only values without an effect.
    Refused(Neutral),
}

/// Values without an effect. Null is always one of them.
#[derive(Clone, Copy, Debug)]
pub enum Neutral {
    /// `false`, 0, an empty list, object or text.
    Empty,
    /// The values of `Empty`, and this JSON value.
    Or(&'static str),
    /// Only this JSON value. It is the API's default; `false` or 0 would change the answer.
    Only(&'static str),
    /// The values of `Empty`, and a value whose `type` is `text`.
    Text,
}

/// A field of a request.
#[derive(Clone, Copy, Debug)]
pub struct Field {
    /// Name of the field.
    pub name: &'static str,
    /// The requests to which it belongs.
    pub of: Of,
    /// Use of the field.
    pub usage: Use,
}

const fn served(of: Of, name: &'static str) -> Field {
    Field { name, of, usage: Use::Served }
}

const fn harmless(name: &'static str) -> Field {
    Field { name, of: Of::Both, usage: Use::Harmless }
}

const fn refused(name: &'static str) -> Field {
    refused_but(name, Neutral::Empty)
}

const fn refused_but(name: &'static str, neutral: Neutral) -> Field {
    refused_of(Of::Both, name, neutral)
}

const fn refused_of(of: Of, name: &'static str, neutral: Neutral) -> Field {
    Field { name, of, usage: Use::Refused(neutral) }
}

/// The table.
pub const FIELDS: &[Field] = &[
    served(Of::Both, "model"),
    served(Of::Completion, "prompt"),
    served(Of::Chat, "messages"),
    served(Of::Both, "max_tokens"),
    served(Of::Chat, "max_completion_tokens"),
    served(Of::Both, "min_tokens"),
    served(Of::Both, "n"),
    served(Of::Both, "stream"),
    served(Of::Both, "stream_options"),
    served(Of::Both, "stop"),
    served(Of::Both, "stop_token_ids"),
    served(Of::Both, "ignore_eos"),
    served(Of::Both, "seed"),
    served(Of::Both, "temperature"),
    served(Of::Both, "top_p"),
    served(Of::Both, "top_k"),
    served(Of::Both, "min_p"),
    served(Of::Both, "frequency_penalty"),
    served(Of::Both, "presence_penalty"),
    served(Of::Both, "repetition_penalty"),
    served(Of::Both, "logit_bias"),
    served(Of::Both, "bad_words"),
    served(Of::Both, "allowed_token_ids"),
    served(Of::Both, "logprobs"),
    served(Of::Chat, "top_logprobs"),
    served(Of::Completion, "echo"),
    served(Of::Both, "prediction"),
    served(Of::Both, "cache_salt"),
    served(Of::Chat, "chat_template_kwargs"),
    harmless("user"),
    harmless("metadata"),
    harmless("store"),
    harmless("service_tier"),
    harmless("safety_identifier"),
    harmless("prompt_cache_key"),
    harmless("prompt_cache_retention"),
    harmless("parallel_tool_calls"),
    harmless("priority"),
    harmless("request_id"),
    harmless("rid"),
    harmless("session_id"),
    harmless("prompt_cache_options"),
    harmless("stream_interval"),
    harmless("return_token_offsets"),
    harmless("return_mm_kwargs"),
    refused("tools"),
    refused_but("tool_choice", Neutral::Or("\"none\"")),
    refused("functions"),
    refused_but("function_call", Neutral::Or("\"none\"")),
    refused_but("response_format", Neutral::Text),
    refused_but("modalities", Neutral::Or("[\"text\"]")),
    refused("audio"),
    refused("reasoning"),
    refused("reasoning_effort"),
    refused("thinking"),
    refused("thinking_token_budget"),
    refused_but("include_reasoning", Neutral::Or("true")),
    refused("verbosity"),
    refused("web_search_options"),
    refused("moderation"),
    refused("suffix"),
    refused_but("best_of", Neutral::Or("1")),
    refused("use_beam_search"),
    refused_but("length_penalty", Neutral::Or("1.0")),
    refused("include_stop_str_in_output"),
    refused_but("skip_special_tokens", Neutral::Only("true")),
    refused_but("spaces_between_special_tokens", Neutral::Or("true")),
    refused_of(Of::Completion, "add_special_tokens", Neutral::Only("true")),
    refused_of(Of::Chat, "add_special_tokens", Neutral::Empty),
    refused_but("add_generation_prompt", Neutral::Only("true")),
    refused("continue_final_message"),
    refused("truncate_prompt_tokens"),
    refused("truncation_side"),
    refused_of(Of::Chat, "echo", Neutral::Empty),
    refused("prompt_logprobs"),
    refused("logprob_token_ids"),
    refused("prompt_embeds"),
    refused("input_ids"),
    refused("documents"),
    refused("chat_template"),
    refused("mm_processor_kwargs"),
    refused("media_io_kwargs"),
    refused("structured_outputs"),
    refused("structural_tag"),
    refused("guided_json"),
    refused("guided_regex"),
    refused("guided_choice"),
    refused("guided_grammar"),
    refused("guided_decoding_backend"),
    refused("guided_whitespace_pattern"),
    refused("regex"),
    refused("json_schema"),
    refused("ebnf"),
    refused("logits_processors"),
    refused("custom_logit_processor"),
    refused("custom_params"),
    refused("repetition_detection"),
    refused("return_tokens_as_token_ids"),
    refused("return_token_ids"),
    refused("return_hidden_states"),
    refused("return_prompt_text"),
    refused("routed_experts_prompt_start"),
    refused("watermarking"),
    refused("kv_transfer_params"),
    refused("ec_transfer_params"),
    refused("vllm_xargs"),
    refused("lora_path"),
    refused("session_params"),
    refused("no_stop_trim"),
    refused_but("separate_reasoning", Neutral::Or("true")),
    refused_but("stream_reasoning", Neutral::Or("true")),
];

impl Field {
    /// Returns the field of this name, if requests of this kind have it.
    pub fn find(name: &str, kind: Kind) -> Option<&'static Field> {
        FIELDS.iter().find(|field| field.name == name && field.is_of(kind))
    }

    /// Returns whether requests of this kind have the field.
    pub fn is_of(&self, kind: Kind) -> bool {
        match kind {
            Kind::Completion => self.of != Of::Chat,
            Kind::Chat => self.of != Of::Completion,
        }
    }
}

impl Neutral {
    /// Returns whether a value has no effect.
    pub fn accepts(self, value: &Value) -> bool {
        let is_empty = match value {
            Value::Null => true,
            Value::Bool(flag) => !flag,
            Value::Number(number) => number.as_f64() == Some(0.0),
            Value::String(text) => text.is_empty(),
            Value::Array(list) => list.is_empty(),
            Value::Object(fields) => fields.is_empty(),
        };
        let is = |json| serde_json::from_str::<Value>(json).is_ok_and(|other| same(&other, value));
        match self {
            Self::Empty => is_empty,
            Self::Or(json) => is_empty || is(json),
            Self::Only(json) => value.is_null() || is(json),
            Self::Text => is_empty || value["type"] == "text",
        }
    }
}

/// Returns whether two values are equal; 1 equals 1.0.
fn same(a: &Value, b: &Value) -> bool {
    a == b || a.as_f64().is_some_and(|a| b.as_f64() == Some(a))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use serde_json::json;

    use super::*;

    #[test]
    fn each_field_is_listed_once() {
        for kind in [Kind::Completion, Kind::Chat] {
            let of_kind = FIELDS.iter().filter(|field| field.is_of(kind));
            let names: Vec<_> = of_kind.map(|field| field.name).collect();
            assert_eq!(names.iter().collect::<BTreeSet<_>>().len(), names.len(), "{kind:?}");
        }
        assert!(Field::find("messages", Kind::Completion).is_none());
        assert!(Field::find("unheard_of", Kind::Chat).is_none());
    }

    #[test]
    fn the_table_has_every_field_of_the_request_types() {
        let lists = include_str!("../../tests/request_fields.txt");
        let mut missing = Vec::new();
        for line in lists.lines().filter(|line| !line.starts_with('#')) {
            let (source, names) = line.split_once(": ").expect("a source and names");
            let kind = match source.rsplit(' ').next() {
                Some("chat") => Kind::Chat,
                Some("completion") => Kind::Completion,
                _ => panic!("{source}"),
            };
            let unknown = names.split(' ').filter(|name| Field::find(name, kind).is_none());
            missing.extend(unknown.map(|name| format!("{source}: {name}")));
        }
        assert!(missing.is_empty(), "{missing:#?}");
    }

    #[test]
    fn neutral_values_are_recognised() {
        for value in [json!(null), json!(false), json!(0), json!(0.0), json!(""), json!([]), json!({})] {
            assert!(Neutral::Empty.accepts(&value), "{value}");
        }
        for value in [json!(true), json!(1), json!("none"), json!([0]), json!({ "a": null })] {
            assert!(!Neutral::Empty.accepts(&value), "{value}");
        }
        assert!(Neutral::Or("1").accepts(&json!(1.0)) && !Neutral::Or("1").accepts(&json!(2)));
        assert!(Neutral::Or("\"none\"").accepts(&json!("none")) && !Neutral::Or("\"none\"").accepts(&json!("auto")));
        for value in [json!(false), json!(0), json!("true")] {
            assert!(!Neutral::Only("true").accepts(&value), "{value}");
        }
        assert!(Neutral::Only("true").accepts(&json!(true)));
        assert!(Neutral::Only("true").accepts(&json!(null)));
        assert!(Neutral::Text.accepts(&json!({ "type": "text" })));
        assert!(!Neutral::Text.accepts(&json!({ "type": "json_object" })));
    }

    /// The lists of fields in the README equal those of the table.
    #[test]
    fn the_documentation_lists_the_same() {
        let readme = include_str!("../../README.md");
        let list = |wanted: fn(&Use) -> bool| {
            let fields = FIELDS.iter().filter(|field| wanted(&field.usage));
            let mut names: Vec<_> = fields.map(|field| format!("`{}`", field.name)).collect();
            names.dedup();
            names.join(", ")
        };
        for (what, names) in [
            ("served", list(|usage| matches!(usage, Use::Served))),
            ("harmless", list(|usage| matches!(usage, Use::Harmless))),
            ("refused", list(|usage| matches!(usage, Use::Refused(_)))),
        ] {
            let row = format!("| {what} | {names} |");
            assert!(readme.lines().any(|line| line == row), "README.md lacks:\n{row}");
        }
    }
}
