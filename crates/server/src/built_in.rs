//! The model that the program contains, so that it needs no files.

use std::path::Path;

use serde_json::Value;

use kvarena_host::checkpoint::Checkpoint;
use kvarena_host::config::ModelConfig;
use kvarena_host::error::Result;
use kvarena_host::files::parse_json;
use kvarena_host::template::Template;
use kvarena_host::text::Text;

/// Name of the default model. It was trained on explanations of some words of kvarena.
pub const NAME: &str = "glossary";

/// `model.safetensors`
pub const WEIGHTS: &[u8] = include_bytes!("../data/glossary/model.safetensors");

/// Returns the shape of the default model.
///
/// # Errors
/// None; the tests use the model.
pub fn config() -> Result<ModelConfig> {
    let path = Path::new(NAME).join("config.json");
    ModelConfig::parse(&path, &parse_json(&path, include_bytes!("../data/glossary/config.json"))?)
}

/// Returns the tensors of the default model.
///
/// # Errors
/// None; the tests use the model.
pub fn checkpoint() -> Result<Checkpoint> {
    Checkpoint::in_memory(Path::new(NAME), WEIGHTS)
}

/// Returns the tokenizer of the default model, with its own chat template unless `template` replaces it.
///
/// # Errors
/// None; the tests use the tokenizer.
pub fn text(vocab: usize, template: Option<Template>) -> Result<Text> {
    let path = Path::new(NAME);
    let config: Value = parse_json(path, include_bytes!("../data/glossary/tokenizer_config.json"))?;
    let template = template.map_or_else(|| Template::of_config(path, &config), Ok)?;
    let tokenizer = include_bytes!("../data/glossary/tokenizer.json");
    Text::parse(path, tokenizer, vocab, Some(template))
}
