//! Reads `config.json` of transformers 4 or 5 into the form of transformers 4, which candle's
//! models take.

use std::fmt;

use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};

/// A family of models.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Family {
    Qwen3,
    Llama,
    Gemma3,
}

/// A config in the form of transformers 4.
#[derive(Clone, Debug)]
pub struct Config {
    pub family: Family,
    values: Map<String, Value>,
}

/// The reason that a config is not supported.
#[derive(Debug)]
pub enum ConfigError {
    /// The text is not a JSON object, or a key of candle's config type is missing or has the wrong type.
    Json(serde_json::Error),
    /// A key that [`Config::parse`] requires is missing.
    Missing(&'static str),
    /// candle's implementation of the model does not support the value of this key.
    Unsupported(&'static str, Value),
    /// The core does not support the model's K and V.
    Pool(kvarena::layout::HfError),
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Json(error) => error.fmt(f),
            Self::Missing(key) => write!(f, "the key {key} is missing"),
            Self::Unsupported(key, value) => write!(f, "{key} = {value} is not supported"),
            Self::Pool(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for ConfigError {}

impl From<serde_json::Error> for ConfigError {
    fn from(error: serde_json::Error) -> Self {
        Self::Json(error)
    }
}

impl Config {
    /// Reads a config.
    ///
    /// # Errors
    /// [`ConfigError::Json`] if the text is not a JSON object. [`ConfigError::Missing`] and
    /// [`ConfigError::Unsupported`] name the key.
    pub fn parse(text: &str) -> Result<Self, ConfigError> {
        let mut config: Map<String, Value> = serde_json::from_str(text)?;
        let kind = config.get("model_type").and_then(Value::as_str).map(str::to_owned);
        let family = match kind.as_deref() {
            Some("qwen3") => Family::Qwen3,
            Some("llama") => Family::Llama,
            Some("gemma3_text") => Family::Gemma3,
            Some(_) => {
                return Err(ConfigError::Unsupported("model_type", config["model_type"].clone()));
            }
            None => return Err(ConfigError::Missing("model_type")),
        };
        if family == Family::Gemma3 {
            two_ropes(&mut config)?;
            pattern(&mut config)?;
        } else {
            one_rope(&mut config)?;
        }
        if family != Family::Llama {
            default_rope_only(&config)?;
        }
        Ok(Self { family, values: config })
    }

    /// Deserializes the config as the config type of candle's model.
    ///
    /// # Errors
    /// [`ConfigError::Json`] for a missing key or a wrong type.
    pub fn of<T: DeserializeOwned>(&self) -> Result<T, ConfigError> {
        Ok(serde_json::from_value(Value::Object(self.values.clone()))?)
    }
}

/// Returns the tokens of `eos_token_id` in a `config.json` or `generation_config.json`: one, several or none.
pub fn end_tokens(config: &Value) -> Vec<u32> {
    let number = |value: &Value| value.as_u64().and_then(|token| u32::try_from(token).ok());
    match &config["eos_token_id"] {
        Value::Array(tokens) => tokens.iter().filter_map(number).collect(),
        token => number(token).into_iter().collect(),
    }
}

/// Moves `rope_parameters` of transformers 5 to `rope_theta` and `rope_scaling`.
fn one_rope(config: &mut Map<String, Value>) -> Result<(), ConfigError> {
    if let Some(Value::Object(mut rope)) = config.remove("rope_parameters") {
        let theta = rope.remove("rope_theta").ok_or(ConfigError::Missing("rope_theta"))?;
        config.insert("rope_theta".into(), theta);
        if rope.get("rope_type").is_some_and(|kind| kind != "default") {
            config.insert("rope_scaling".into(), Value::Object(rope));
        }
    }
    match config.contains_key("rope_theta") {
        true => Ok(()),
        false => Err(ConfigError::Missing("rope_theta")),
    }
}

/// Rejects RoPE scaling, which candle's implementation would ignore.
fn default_rope_only(config: &Map<String, Value>) -> Result<(), ConfigError> {
    match config.get("rope_scaling") {
        None | Some(Value::Null) => Ok(()),
        Some(scaling) => Err(ConfigError::Unsupported("rope_scaling", scaling.clone())),
    }
}

/// Moves the RoPE bases of full and sliding layers to the two keys of transformers 4.
fn two_ropes(config: &mut Map<String, Value>) -> Result<(), ConfigError> {
    if let Some(ropes) = config.remove("rope_parameters") {
        for (from, to) in [("full_attention", "rope_theta"), ("sliding_attention", "rope_local_base_freq")] {
            let rope = &ropes[from];
            if rope["rope_type"] != "default" {
                return Err(ConfigError::Unsupported("rope_type", rope["rope_type"].clone()));
            }
            config.insert(to.into(), rope["rope_theta"].clone());
        }
    }
    Ok(())
}

/// Derives `sliding_window_pattern` from `layer_types` of transformers 5.
fn pattern(config: &mut Map<String, Value>) -> Result<(), ConfigError> {
    let Some(Value::Array(types)) = config.get("layer_types") else { return Ok(()) };
    let full = |layer: &Value| layer == "full_attention";
    let every = types.iter().position(full).map_or(types.len() + 1, |first| first + 1);
    let is_regular = types.iter().enumerate().all(|(i, layer)| full(layer) == ((i + 1) % every == 0));
    if !is_regular {
        return Err(ConfigError::Unsupported("layer_types", config["layer_types"].clone()));
    }
    config.insert("sliding_window_pattern".into(), json!(every));
    Ok(())
}

impl From<kvarena::layout::HfError> for ConfigError {
    fn from(error: kvarena::layout::HfError) -> Self {
        Self::Pool(error)
    }
}
