//! Renders a model's chat template as `transformers` does.

mod form;

use std::path::Path;

use chrono::Local;
use minijinja::value::ValueKind;
use minijinja::{Environment, ErrorKind, Value as Jinja};
use serde_json::{Map, Value};

use crate::error::{Error, Result};
use crate::files::{read_file, read_json};

type Rendering<T> = std::result::Result<T, minijinja::Error>;

/// A template, and the special tokens that it may use.
pub struct Template {
    environment: Environment<'static>,
    /// Special tokens of the model by name, such as `bos_token`.
    special: Map<String, Value>,
}

impl Template {
    /// Reads the template of a folder's `chat_template.jinja` or `tokenizer_config.json`, if there is one.
    ///
    /// # Errors
    /// An existing file cannot be read or is damaged.
    pub fn read(dir: &Path) -> Result<Option<Self>> {
        let file = dir.join("chat_template.jinja");
        let tokens = tokens_of(dir)?;
        if file.exists() {
            return Self::of_file(&file, &tokens, Error::model).map(Some);
        }
        let [config, map] = tokens;
        let Some(source) = template_of(&config) else { return Ok(None) };
        Self::parse(dir, source.to_owned(), &config, &map).map(Some)
    }

    /// Reads the template of a file. `tokens` are the contents of the model's `tokenizer_config.json` and
    /// `special_tokens_map.json`; null stands for a missing file.
    ///
    /// # Errors
    /// The file cannot be read or is damaged: an error of the request.
    pub fn from_file(file: &Path, tokens: &[Value; 2]) -> Result<Self> {
        Self::of_file(file, tokens, Error::request)
    }

    /// Does the work of [`Template::from_file`]; `fault` makes the error of the template's own file.
    fn of_file(file: &Path, [config, map]: &[Value; 2], fault: fn(String) -> Error) -> Result<Self> {
        let own = |e: Error| fault(e.message);
        let source =
            String::from_utf8(read_file(file).map_err(own)?).map_err(|e| fault(format!("{}: {e}", file.display())))?;
        Self::parse(file, source, config, map).map_err(own)
    }

    /// Reads the template of the content of a `tokenizer_config.json`; `path` is for messages.
    ///
    /// # Errors
    /// There is no template, or it is damaged.
    pub fn of_config(path: &Path, config: &Value) -> Result<Self> {
        let source = template_of(config).unwrap_or_default();
        Self::parse(path, source.to_owned(), config, &Value::Null)
    }

    fn parse(path: &Path, source: String, config: &Value, map: &Value) -> Result<Self> {
        let environment =
            environment(source).map_err(|e| Error::model(format!("{}: chat template: {e}", path.display())))?;
        Ok(Self { environment, special: special_tokens(config, map) })
    }

    /// Returns the prompt for the assistant's next turn. `arguments` are further variables of the template. They
    /// override all others except `messages`. Null or absent content beside tool calls is an empty text, as in vLLM.
    /// Templates that test content for `none` receive null, as with `transformers`.
    ///
    /// # Errors
    /// The template rejects the messages.
    pub fn render(&self, messages: &[Value], arguments: &Map<String, Value>) -> Result<String> {
        let wrong = |e: minijinja::Error| Error::request(format!("chat template: {e}"));
        let template = self.environment.get_template("chat").map_err(wrong)?;
        let mut names = self.special.clone();
        names.extend(["tools", "documents"].map(|name| (name.to_owned(), Value::Null)));
        names.insert("add_generation_prompt".into(), true.into());
        names.extend(arguments.clone());
        names.insert("messages".into(), with_content(messages, template.source()).into());
        let context = Jinja::from_serialize(names);
        template.render(context).map_err(wrong)
    }
}

/// Returns the messages with content beside tool calls: an empty text instead of null, which most templates would print
/// as `None` or reject. Templates that test for null content, such as DeepSeek's, receive null.
fn with_content(messages: &[Value], source: &str) -> Vec<Value> {
    let empty = if tests_content(source) { Value::Null } else { "".into() };
    let mut messages = messages.to_vec();
    for message in &mut messages {
        let has_calls = message["tool_calls"].as_array().is_some_and(|calls| !calls.is_empty());
        if has_calls && message["content"].is_null() {
            message["content"] = empty.clone();
        }
    }
    messages
}

/// Returns whether a template compares a name or a field `content` with `none`.
fn tests_content(source: &str) -> bool {
    let is_word = |character: char| character.is_alphanumeric() || character == '_';
    source.match_indices("content").any(|(at, word)| {
        let closing = |character: char| "'\"])".contains(character) || character.is_whitespace();
        let rest = source[at + word.len()..].trim_start_matches(closing);
        let operators = ["is not", "is", "==", "!="];
        let operand = operators.iter().find_map(|operator| rest.strip_prefix(operator));
        let operand = operand.map(str::trim_start).and_then(|operand| operand.get(..4));
        operand.is_some_and(|operand| operand.eq_ignore_ascii_case("none")) && !source[..at].ends_with(is_word)
    })
}

/// Returns the contents of the files that name a folder's special tokens: `tokenizer_config.json` and
/// `special_tokens_map.json`. Null stands for a missing file.
pub(crate) fn tokens_of(dir: &Path) -> Result<[Value; 2]> {
    let read = |name: &str| {
        let path = dir.join(name);
        if path.exists() { read_json(&path) } else { Ok(Value::Null) }
    };
    Ok([read("tokenizer_config.json")?, read("special_tokens_map.json")?])
}

/// Returns the model's special tokens by name, as `transformers` collects them: strings of the tokenizer's config named
/// `.._token`, and the names in `extra_special_tokens`. The older `special_tokens_map.json` has precedence over a
/// config without `added_tokens_decoder`, and is ignored otherwise.
fn special_tokens(config: &Value, map: &Value) -> Map<String, Value> {
    // Older configs wrap a token in an object.
    let text = |value: &Value| value.as_str().or(value["content"].as_str()).map(str::to_owned);
    let is_read = config["added_tokens_decoder"].is_null();
    let sources = [Some(config), Some(map).filter(|_| is_read)].into_iter().flatten();
    let mut tokens = Map::new();
    for source in sources {
        let named = source.as_object().into_iter().flatten();
        let named = named.filter(|(name, _)| name.ends_with("_token"));
        let extra = source["extra_special_tokens"].as_object().into_iter().flatten();
        for (name, value) in extra.chain(named) {
            if let Some(token) = text(value) {
                tokens.insert(name.clone(), token.into());
            }
        }
    }
    tokens
}

/// Creates the environment that `transformers` provides to templates.
fn environment(source: String) -> Rendering<Environment<'static>> {
    let mut environment = Environment::new();
    environment.set_trim_blocks(true);
    environment.set_lstrip_blocks(true);
    environment.set_unknown_method_callback(|state, value, name, arguments| {
        string_method(value, name, arguments)
            .unwrap_or_else(|| minijinja_contrib::pycompat::unknown_method_callback(state, value, name, arguments))
    });
    environment.add_function("raise_exception", |what: String| -> Rendering<Jinja> {
        Err(minijinja::Error::new(ErrorKind::InvalidOperation, what))
    });
    environment.add_function("strftime_now", |format: String| -> Rendering<String> {
        let mut text = String::new();
        let now = Local::now().format(&format);
        std::fmt::Write::write_fmt(&mut text, format_args!("{now}")).map_err(|_| {
            minijinja::Error::new(ErrorKind::InvalidOperation, format!("{format:?} is not a date format"))
        })?;
        Ok(text)
    });
    environment.set_formatter(form::print);
    environment.add_filter("string", |value: &Jinja| form::string(value));
    environment.add_filter("tojson", form::tojson);
    environment.add_test("iterable", |value: &Jinja| {
        use ValueKind::{Iterable, Map, Seq, String, Undefined};
        matches!(value.kind(), Iterable | Map | Seq | String | Undefined)
    });
    // As in Python's Jinja, strings and dictionaries are sequences.
    environment.add_test("sequence", |value: &Jinja| {
        matches!(value.kind(), ValueKind::Seq | ValueKind::String | ValueKind::Map)
    });
    // Jinja reads each kind of line end as a newline.
    let source = source.replace("\r\n", "\n").replace('\r', "\n");
    environment.add_template_owned("chat", without_generation(&source))?;
    Ok(environment)
}

/// Calls a method of Python's `str` that `pycompat` lacks; returns `None` for other methods.
fn string_method(value: &Jinja, name: &str, arguments: &[Jinja]) -> Option<Rendering<Jinja>> {
    let (text, argument) = (value.as_str()?, arguments.first()?.as_str()?);
    let result = match (name, &arguments[1..]) {
        ("removeprefix", []) => Jinja::from(text.strip_prefix(argument).unwrap_or(text)),
        ("removesuffix", []) => Jinja::from(text.strip_suffix(argument).unwrap_or(text)),
        ("rsplit", rest) if !argument.is_empty() => {
            let most = rest.first().and_then(Jinja::as_i64).and_then(|n| usize::try_from(n).ok());
            let parts = most.map_or(usize::MAX, |most| most.saturating_add(1));
            let mut parts: Vec<_> = text.rsplitn(parts, argument).map(Jinja::from).collect();
            parts.reverse();
            Jinja::from(parts)
        }
        _ => return None,
    };
    Some(Ok(result))
}

/// Returns the template with plain scopes in place of its `generation` blocks, which mark answers for training.
fn without_generation(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let Some(len) = rest[start..].find("%}") else { break };
        let (before, tag) = (&rest[..start], &rest[start..start + len + 2]);
        out.push_str(before);
        match tag[2..tag.len() - 2].trim_matches(['-', '+', ' ', '\n', '\t']) {
            "generation" => out.push_str(&tag.replace("generation", "with")),
            "endgeneration" => out.push_str(&tag.replace("endgeneration", "endwith")),
            _ => out.push_str(tag),
        }
        rest = &rest[start + len + 2..];
    }
    out + rest
}

/// Returns the template of a tokenizer's config: a text, or the entry `default` of a list.
fn template_of(config: &Value) -> Option<&str> {
    let template = &config["chat_template"];
    let named = || template.as_array()?.iter().find(|t| t["name"] == "default");
    template.as_str().or_else(|| named()?["template"].as_str())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn render(source: &str, messages: Value, arguments: Value) -> String {
        let environment = environment(source.to_owned()).expect("a template");
        let template = Template { environment, special: special_tokens(&json!({ "bos_token": "<s>" }), &Value::Null) };
        let messages = messages.as_array().expect("messages");
        template.render(messages, arguments.as_object().expect("arguments")).expect("rendered")
    }

    #[test]
    fn dates_and_generation_blocks_are_rendered() {
        let source = "{{ bos_token }}{{ strftime_now('%Y-%m-%d') }}{% for m in messages %}\n\
                      {%- generation -%} {{ m.content }} {%- endgeneration %}|\n{% generation %}\nx\n{% endgeneration %}\n{% endfor %}";
        let text = render(source, json!([{ "role": "user", "content": "hi" }]), json!({}));
        let date = Local::now().format("%Y-%m-%d");
        assert_eq!(text, format!("<s>{date}hi|\nx\n"));
    }

    #[test]
    fn an_unknown_format_is_refused() {
        let environment = environment("{{ strftime_now('%Q!') }}".into()).expect("a template");
        let template = Template { environment, special: Map::new() };
        assert!(template.render(&[], &Map::new()).is_err());
    }

    #[test]
    fn json_is_written_as_python_writes_it() {
        let tools = json!({ "t": { "a": "<b> & 'c' \u{e9}", "d": [1, 2.5, null, true, []], "e": {} } });
        assert_eq!(
            render("{{ t | tojson }}", json!([]), tools.clone()),
            "{\"a\": \"<b> & 'c' \u{e9}\", \"d\": [1, 2.5, null, true, []], \"e\": {}}"
        );
        assert_eq!(
            render("{{ t.d | tojson(indent=2) }}", json!([]), tools),
            "[\n  1,\n  2.5,\n  null,\n  true,\n  []\n]"
        );
    }

    #[test]
    fn arguments_reach_the_template_and_do_not_replace_messages() {
        let source = "{{ enable_thinking }}{{ messages | length }}{{ bos_token }}";
        let arguments = json!({ "enable_thinking": false, "messages": [1, 2], "bos_token": "!" });
        assert_eq!(render(source, json!([]), arguments), "False0!");
    }

    #[test]
    fn special_tokens_are_those_that_the_model_has() {
        let mut config = json!({
            "bos_token": { "content": "<s>" }, "eos_token": null, "pad_token": "<p>", "add_bos_token": true,
            "extra_special_tokens": { "image_token": "<i>" }, "additional_special_tokens": ["<x>"],
        });
        let map = json!({ "pad_token": "<m>", "unk_token": { "content": "<u>" } });
        let mut expected = json!({
            "image_token": "<i>", "bos_token": "<s>", "pad_token": "<m>", "unk_token": "<u>",
        });
        assert_eq!(Value::Object(special_tokens(&config, &map)), expected);
        config["added_tokens_decoder"] = json!({});
        expected["pad_token"] = "<p>".into();
        expected.as_object_mut().expect("an object").remove("unk_token");
        assert_eq!(Value::Object(special_tokens(&config, &map)), expected);
    }
}
