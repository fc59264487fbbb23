//! Tests that chat templates are rendered as `transformers` renders them. `tests/templates/reference.py` writes the
//! cases.

mod common;

use std::fs;
use std::path::Path;

use common::files::Dir;
use kvarena_host::template::Template;
use serde_json::{Value, json};

/// Renders a template from its text; returns `None` if the template is invalid or rejects the messages.
fn render(dir: &Dir, source: &str, talk: &Value) -> Option<String> {
    dir.write("chat_template.jinja", source);
    let special = json!({ "bos_token": "<s>", "eos_token": "</s>" });
    dir.write("tokenizer_config.json", special.to_string());
    let template = Template::read(dir.path()).ok()?.expect("the template exists");
    let messages = talk["messages"].as_array().expect("messages");
    let arguments = talk["arguments"].as_object().expect("arguments");
    template.render(messages, arguments).ok()
}

#[test]
fn templates_are_rendered_as_the_reference_renders_them() {
    let cases: Vec<Value> = serde_json::from_str(include_str!("templates/cases.json")).expect("JSON");
    let dir = Dir::new();
    let mut wrong = Vec::new();
    for case in &cases {
        let rendered = render(&dir, case["template"].as_str().expect("a template"), case);
        let (expected, name) = (case["expected"].as_str(), &case["name"]);
        if rendered.as_deref() != expected {
            wrong.push(format!("{name}\n  expected {expected:?}\n  rendered {rendered:?}"));
        }
    }
    assert!(wrong.is_empty(), "{} of {} differ:\n{}", wrong.len(), cases.len(), wrong.join("\n"));
}

#[test]
fn published_templates_are_rendered_as_the_reference_renders_them() {
    let published: Value = serde_json::from_str(include_str!("templates/published.json")).expect("JSON");
    let prefix = published["prefix"].as_str().expect("a text");
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/templates/published");
    let dir = Dir::new();
    let (mut compared, mut wrong) = (0, Vec::new());
    for (model, rendered) in published["rendered"].as_object().expect("models") {
        let path = folder.join(format!("{model}.jinja"));
        let source = prefix.to_owned() + &fs::read_to_string(path).expect("a template");
        for (name, talk) in published["conversations"].as_object().expect("conversations") {
            let (expected, rendered) = (rendered[name].as_str(), render(&dir, &source, talk));
            compared += 1;
            if rendered.as_deref() != expected {
                let texts = format!("expected {expected:?}\n  rendered {rendered:?}");
                wrong.push(format!("{model}, {name}\n  {texts}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{} of {compared} differ:\n{}", wrong.len(), wrong.join("\n"));
    assert_eq!(compared, 100);
}
