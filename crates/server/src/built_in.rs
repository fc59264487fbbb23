//! Models that the program contains, so that it needs no files.

use std::path::Path;

use serde_json::Value;

use kvarena_host::checkpoint::Checkpoint;
use kvarena_host::config::ModelConfig;
use kvarena_host::error::Result;
use kvarena_host::fields::parse_json;
use kvarena_host::template::Template;
use kvarena_host::text::Text;

/// The files of a model.
pub struct BuiltIn {
    /// Name of the model.
    pub name: &'static str,
    config: &'static [u8],
    /// `model.safetensors`
    pub weights: &'static [u8],
}

/// The default model. It was trained on explanations of some words of kvarena.
pub const GLOSSARY: BuiltIn = BuiltIn {
    name: "glossary",
    config: include_bytes!("../data/glossary/config.json"),
    weights: include_bytes!("../data/glossary/model.safetensors"),
};

/// The model that `--check` serves by default.
#[cfg(feature = "cuda")]
pub const QWEN3_TINY: BuiltIn = BuiltIn {
    name: "qwen3-tiny",
    config: include_bytes!("../../host/tests/data/qwen3-tiny/config.json"),
    weights: include_bytes!("../../host/tests/data/qwen3-tiny/model.safetensors"),
};

impl BuiltIn {
    /// Returns the shape.
    ///
    /// # Errors
    /// None; a test reads each model.
    pub fn config(&self) -> Result<ModelConfig> {
        let path = Path::new(self.name).join("config.json");
        ModelConfig::parse(&path, &parse_json(&path, self.config)?)
    }

    /// Returns the tensors.
    ///
    /// # Errors
    /// None; a test reads each model.
    pub fn checkpoint(&self) -> Result<Checkpoint> {
        Checkpoint::in_memory(Path::new(self.name), self.weights)
    }
}

/// Returns the tokenizer of the default model, with its own chat template unless `template` replaces it.
///
/// # Errors
/// None; the tests use the tokenizer.
pub fn glossary_text(vocab: usize, template: Option<Template>) -> Result<Text> {
    let path = Path::new(GLOSSARY.name);
    let config = include_bytes!("../data/glossary/tokenizer_config.json");
    let config: Value = parse_json(path, config)?;
    let template = template.map_or_else(|| Template::of_config(path, &config), Ok)?;
    let tokenizer = include_bytes!("../data/glossary/tokenizer.json");
    Text::parse(path, tokenizer, vocab, Some(template))
}
