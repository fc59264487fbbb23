//! The positions of Llama 4. Layers that read chunks rotate q and k, and then may norm each head. The other layers read
//! all tokens and do not rotate; they may scale each query by a factor that grows with its position.

use serde_json::Value;

use crate::error::Result;
use crate::fields::{Fields, is_set};
use crate::ops::{self, Angles};

/// The layers with and without rotary positions.
#[derive(Clone, PartialEq, Debug)]
pub struct NopeConfig {
    /// Whether each layer has rotary positions and reads chunks.
    pub rotated: Vec<bool>,
    /// Tokens of a chunk.
    pub chunk: u32,
    /// Whether layers with rotary positions norm each head of q and k.
    pub norms: bool,
    /// Scale of the queries of layers without rotary positions, if any.
    pub temperature: Option<Temperature>,
}

/// Factor of a query at position `p`: `1 + scale * ln(1 + k)`, where `k` is `(p + 1) / floor`, rounded down.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Temperature {
    /// Number of positions with the same factor.
    pub floor: f32,
    /// Factor of the logarithm.
    pub scale: f32,
}

impl NopeConfig {
    /// Reads `no_rope_layers` or `no_rope_layer_interval`, and the fields that belong to them.
    ///
    /// # Errors
    /// A chunk that is not a power of two, lists that contradict each other or the number of layers, or a field that is
    /// missing or invalid.
    pub fn parse(fields: &Fields<'_>) -> Result<Self> {
        let layers = fields.size("num_hidden_layers")?;
        let chunk = fields.size("attention_chunk_size")? as u32;
        if !chunk.is_power_of_two() {
            return Err(fields.wrong(&format!("attention_chunk_size {chunk} is not a power of two")));
        }
        let rotated: Vec<bool> = match list(fields, "no_rope_layers") {
            [] => {
                let interval = fields.size_or("no_rope_layer_interval", 4)?;
                (1..=layers).map(|layer| !layer.is_multiple_of(interval)).collect()
            }
            layers => layers.iter().map(is_set).collect(),
        };
        let types = list(fields, "layer_types").iter().map(|kind| kind == "chunked_attention");
        if rotated.len() != layers || !(types.len() == 0 || types.eq(rotated.iter().copied())) {
            let what = format!("no_rope_layers or layer_types do not fit {layers} layers");
            return Err(fields.wrong(&what));
        }
        let temperature = Temperature {
            floor: fields.number_or("floor_scale", 8192.0)? as f32,
            scale: fields.number_or("attn_scale", 0.1)? as f32,
        };
        let is_tuned = fields.get("attn_temperature_tuning").is_none_or(is_set);
        Ok(Self {
            rotated,
            chunk,
            norms: fields.get("use_qk_norm").is_none_or(is_set),
            temperature: is_tuned.then_some(temperature),
        })
    }

    /// Returns for each layer the size of its chunks, if it reads chunks.
    pub fn chunks(&self) -> Vec<Option<u32>> {
        self.rotated.iter().map(|&rotated| rotated.then_some(self.chunk)).collect()
    }

    /// Encodes the positions in q and k of a layer. Each is `[tokens, heads, head_dim]` and is given with its number of
    /// heads.
    pub fn place(
        &self,
        layer: usize,
        (q, q_heads): (&mut [f32], usize),
        (k, kv_heads): (&mut [f32], usize),
        (head_dim, eps): (usize, f32),
        (positions, angles): (&[u32], &Angles),
    ) {
        if !self.rotated[layer] {
            let Some(Temperature { floor, scale }) = self.temperature else { return };
            for (row, &position) in q.chunks_exact_mut(q_heads * head_dim).zip(positions) {
                let steps = ((position + 1) as f32 / floor).floor();
                let factor = steps.ln_1p() * scale + 1.0;
                row.iter_mut().for_each(|x| *x *= factor);
            }
            return;
        }
        for (x, heads) in [(q, q_heads), (k, kv_heads)] {
            ops::rotate_ends(x, (heads, head_dim), head_dim, true, angles);
            if self.norms {
                ops::norm_heads(x, head_dim, eps);
            }
        }
    }
}

/// Returns a list; empty if the field is absent or not a list.
fn list<'a>(fields: &Fields<'a>, name: &str) -> &'a [Value] {
    fields.get(name).and_then(Value::as_array).map_or(&[], Vec::as_slice)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use serde_json::{Value, json};

    use super::NopeConfig;
    use crate::fields::Fields;

    fn parse(changes: Value) -> Result<NopeConfig, String> {
        let mut config = json!({"num_hidden_layers": 8, "attention_chunk_size": 32});
        let changes = changes.as_object().expect("an object").clone();
        config.as_object_mut().expect("an object").extend(changes);
        let fields = Fields::new(Path::new("config.json"), &config).expect("an object");
        NopeConfig::parse(&fields).map_err(|error| error.message)
    }

    #[test]
    fn every_fourth_layer_has_no_positions() {
        let config = parse(json!({})).expect("the config is complete");
        assert_eq!(config.rotated, [true, true, true, false, true, true, true, false]);
        let few = json!({"num_hidden_layers": 2, "no_rope_layers": [0, 1], "attn_temperature_tuning": 0});
        let config = parse(few).expect("the config is complete");
        assert_eq!((config.chunks(), config.temperature), (vec![None, Some(32)], None));
    }

    #[test]
    fn unsupported_config_values_are_named() {
        let refused = |changes| parse(changes).expect_err("the config is rejected");
        assert!(refused(json!({"attention_chunk_size": 48})).contains("48"));
        assert!(refused(json!({"no_rope_layers": [1, 0]})).contains("8 layers"));
        let types = vec!["full_attention"; 8];
        assert!(refused(json!({"layer_types": types})).contains("layer_types"));
    }
}
