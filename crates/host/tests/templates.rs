//! Chat templates, rendered as `transformers` renders them: `tests/templates/reference.py` wrote the cases.

mod common;

use common::files::Dir;
use kvarena_host::template::Template;
use serde_json::{Value, json};

#[test]
fn templates_are_rendered_as_the_reference_renders_them() {
    let cases: Vec<Value> =
        serde_json::from_str(include_str!("templates/cases.json")).expect("JSON");
    let dir = Dir::new();
    let special = json!({ "bos_token": "<s>", "eos_token": "</s>" });
    dir.write("tokenizer_config.json", special.to_string());
    let mut wrong = Vec::new();
    for case in &cases {
        let source = case["template"].as_str().expect("a template");
        dir.write("chat_template.jinja", source);
        let messages = case["messages"].as_array().expect("messages");
        let arguments = case["arguments"].as_object().expect("arguments");
        let template = Template::read(dir.path()).map(|found| found.expect("it is there"));
        let rendered = template.and_then(|template| template.render(messages, arguments));
        let (expected, name) = (case["expected"].as_str(), &case["name"]);
        if rendered.as_deref().ok() != expected {
            wrong.push(format!("{name}\n  expected {expected:?}\n  rendered {rendered:?}"));
        }
    }
    assert!(wrong.is_empty(), "{} of {} differ:\n{}", wrong.len(), cases.len(), wrong.join("\n"));
}
