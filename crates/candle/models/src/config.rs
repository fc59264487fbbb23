//! Reads `config.json` of transformers 4 or 5 into the form of transformers 4, which candle's
//! models take.

use std::error::Error;

use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};

use crate::Outcome;

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

fn missing(key: &str) -> Box<dyn Error> {
    format!("config.json: the key {key} is missing").into()
}

/// Returns the error for a value that candle's implementation of the model does not support.
fn unsupported(key: &str, value: &Value) -> Box<dyn Error> {
    format!("config.json: {key} = {value} is not supported").into()
}

impl Config {
    /// Reads a config.
    ///
    /// # Errors
    /// The text is not a JSON object, or a key is missing or not supported; the message names the key.
    pub fn parse(text: &str) -> Outcome<Self> {
        let mut config: Map<String, Value> =
            serde_json::from_str(text).map_err(|error| format!("config.json: {error}"))?;
        let family = match config.get("model_type").and_then(Value::as_str).ok_or_else(|| missing("model_type"))? {
            "qwen3" => Family::Qwen3,
            "llama" => Family::Llama,
            "gemma3_text" => Family::Gemma3,
            _ => return Err(unsupported("model_type", &config["model_type"])),
        };
        if family == Family::Gemma3 {
            two_ropes(&mut config)?;
            pattern(&mut config)?;
        } else {
            one_rope(&mut config)?;
        }
        // candle's implementation would ignore RoPE scaling.
        let scaling = config.get("rope_scaling").filter(|scaling| family != Family::Llama && !scaling.is_null());
        if let Some(scaling) = scaling {
            return Err(unsupported("rope_scaling", scaling));
        }
        Ok(Self { family, values: config })
    }

    /// Deserializes the config as the config type of candle's model.
    ///
    /// # Errors
    /// A key is missing or has the wrong type.
    pub fn typed<T: DeserializeOwned>(&self) -> Outcome<T> {
        Ok(serde_json::from_value(Value::Object(self.values.clone()))
            .map_err(|error| format!("config.json: {error}"))?)
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
fn one_rope(config: &mut Map<String, Value>) -> Outcome {
    if let Some(Value::Object(mut rope)) = config.remove("rope_parameters") {
        let theta = rope.remove("rope_theta").ok_or_else(|| missing("rope_theta"))?;
        config.insert("rope_theta".into(), theta);
        if rope.get("rope_type").is_some_and(|kind| kind != "default") {
            config.insert("rope_scaling".into(), Value::Object(rope));
        }
    }
    if config.contains_key("rope_theta") { Ok(()) } else { Err(missing("rope_theta")) }
}

/// Moves the RoPE bases of full and sliding layers to the two keys of transformers 4.
fn two_ropes(config: &mut Map<String, Value>) -> Outcome {
    if let Some(ropes) = config.remove("rope_parameters") {
        for (from, to) in [("full_attention", "rope_theta"), ("sliding_attention", "rope_local_base_freq")] {
            let rope = &ropes[from];
            if rope["rope_type"] != "default" {
                return Err(unsupported("rope_type", &rope["rope_type"]));
            }
            config.insert(to.into(), rope["rope_theta"].clone());
        }
    }
    Ok(())
}

/// Derives `sliding_window_pattern` from `layer_types` of transformers 5.
fn pattern(config: &mut Map<String, Value>) -> Outcome {
    let Some(Value::Array(types)) = config.get("layer_types") else { return Ok(()) };
    let full = |layer: &Value| layer == "full_attention";
    let every = types.iter().position(full).map_or(types.len() + 1, |first| first + 1);
    if !types.iter().enumerate().all(|(i, layer)| full(layer) == ((i + 1) % every == 0)) {
        return Err(unsupported("layer_types", &config["layer_types"]));
    }
    config.insert("sliding_window_pattern".into(), json!(every));
    Ok(())
}
