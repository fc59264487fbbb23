//! Renders a model's chat template, for `tests/templates/reference.py`.
//!
//! ```sh
//! echo '{"messages": [..], "arguments": {..}}' | render FOLDER > TEXT
//! ```

use std::error::Error;
use std::io::{Write, stdin, stdout};
use std::path::Path;

use kvarena_host::template::Template;
use serde_json::Value;

fn main() -> Result<(), Box<dyn Error>> {
    let folder = std::env::args().nth(1).ok_or("usage: render FOLDER")?;
    let request: Value = serde_json::from_reader(stdin())?;
    let messages = request["messages"].as_array().ok_or("messages is not a list")?;
    let arguments = request["arguments"].as_object().ok_or("arguments is not an object")?;
    let template = Template::read(Path::new(&folder))?.ok_or("no chat template")?;
    stdout().write_all(template.render(messages, arguments)?.as_bytes())?;
    Ok(())
}
