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
pub enum Requests {
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
    pub requests: Requests,
    /// Use of the field.
    pub usage: Use,
}

/// The table: the requests to which fields belong, their use, and their names.
const TABLE: &[(Requests, Use, &str)] = &[
    (
        Requests::Both,
        Use::Served,
        "model max_tokens min_tokens n stream stream_options stop stop_token_ids ignore_eos seed temperature top_p top_k \
         min_p frequency_penalty presence_penalty repetition_penalty logit_bias bad_words allowed_token_ids logprobs \
         prediction cache_salt",
    ),
    (Requests::Completion, Use::Served, "prompt echo"),
    (Requests::Chat, Use::Served, "messages max_completion_tokens top_logprobs chat_template_kwargs"),
    (
        Requests::Both,
        Use::Harmless,
        "user metadata store service_tier safety_identifier prompt_cache_key prompt_cache_retention \
         parallel_tool_calls priority request_id rid session_id prompt_cache_options stream_interval \
         return_token_offsets return_mm_kwargs",
    ),
    (
        Requests::Both,
        Use::Refused(Neutral::Empty),
        "tools functions audio reasoning reasoning_effort thinking thinking_token_budget verbosity web_search_options \
         moderation suffix use_beam_search include_stop_str_in_output continue_final_message truncate_prompt_tokens \
         truncation_side prompt_logprobs logprob_token_ids prompt_embeds input_ids documents chat_template \
         mm_processor_kwargs media_io_kwargs structured_outputs structural_tag guided_json guided_regex guided_choice \
         guided_grammar guided_decoding_backend guided_whitespace_pattern regex json_schema ebnf logits_processors \
         custom_logit_processor custom_params repetition_detection return_tokens_as_token_ids return_token_ids \
         return_hidden_states return_prompt_text routed_experts_prompt_start watermarking kv_transfer_params \
         ec_transfer_params vllm_xargs lora_path session_params no_stop_trim",
    ),
    (Requests::Chat, Use::Refused(Neutral::Empty), "echo add_special_tokens"),
    (Requests::Completion, Use::Refused(Neutral::Only("true")), "add_special_tokens"),
    (Requests::Both, Use::Refused(Neutral::Only("true")), "skip_special_tokens add_generation_prompt"),
    (
        Requests::Both,
        Use::Refused(Neutral::Or("true")),
        "include_reasoning spaces_between_special_tokens separate_reasoning stream_reasoning",
    ),
    (Requests::Both, Use::Refused(Neutral::Or("1")), "best_of length_penalty"),
    (Requests::Both, Use::Refused(Neutral::Or("\"none\"")), "tool_choice function_call"),
    (Requests::Both, Use::Refused(Neutral::Or("[\"text\"]")), "modalities"),
    (Requests::Both, Use::Refused(Neutral::Text), "response_format"),
];

/// Returns the table as Markdown, for `--help fields`.
pub fn table() -> String {
    let mut text = "# Fields of requests\n\nThe output of `kvarena-server --help fields`.\n\n\
                    | requests | use | fields |\n|---|---|---|\n"
        .to_owned();
    for (requests, usage, names) in TABLE {
        let requests = match requests {
            Requests::Both => "completions and chats",
            Requests::Completion => "completions",
            Requests::Chat => "chats",
        };
        let usage = match usage {
            Use::Served => "served".to_owned(),
            Use::Harmless => "harmless".to_owned(),
            Use::Refused(Neutral::Empty) => "refused, unless null, false, 0 or empty".to_owned(),
            Use::Refused(Neutral::Or(json)) => format!("refused, unless null, false, 0, empty or `{json}`"),
            Use::Refused(Neutral::Only(json)) => format!("refused, unless null or `{json}`"),
            Use::Refused(Neutral::Text) => "refused, unless null, false, 0, empty or of type `text`".to_owned(),
        };
        let names: Vec<_> = names.split(' ').map(|name| format!("`{name}`")).collect();
        text += &format!("| {requests} | {usage} | {} |\n", names.join(", "));
    }
    text
}

impl Field {
    /// Returns all fields.
    pub fn all() -> impl Iterator<Item = Self> {
        let fields = |&(requests, usage, names): &(Requests, Use, &'static str)| {
            names.split(' ').map(move |name| Self { name, requests, usage })
        };
        TABLE.iter().flat_map(fields)
    }

    /// Returns the field of this name, if requests of this kind have it.
    pub fn find(name: &str, kind: Kind) -> Option<Self> {
        Self::all().find(|field| field.name == name && field.is_of(kind))
    }

    /// Returns whether requests of this kind have the field.
    pub fn is_of(&self, kind: Kind) -> bool {
        match kind {
            Kind::Completion => self.requests != Requests::Chat,
            Kind::Chat => self.requests != Requests::Completion,
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
            let of_kind = Field::all().filter(|field| field.is_of(kind));
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
}
