//! Gated DeltaNet (arXiv:2412.06464): layers of Qwen3.5 that keep a state of fixed size instead of K and V.
//!
//! ```text
//! layer     weights; projections of the input, gated norm of the output
//! update    short convolution and recurrence over the tokens of one sequence; reads and writes its state
//! ```

mod layer;
mod update;

pub use layer::{Delta, DeltaWork};
pub use update::{DeltaStep, State};

use kvarena::layout::StatePart;
use serde_json::Value;

use crate::error::Result;
use crate::fields::Fields;

/// Sizes of the layers of Gated DeltaNet.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DeltaConfig {
    /// For each layer of the model, whether it is a layer of Gated DeltaNet. The others compute attention.
    pub layers: Vec<bool>,
    /// Heads of q and k.
    pub key_heads: usize,
    /// Heads of v and of the output, a multiple of `key_heads`.
    pub value_heads: usize,
    /// Elements of a head of q and k.
    pub key_dim: usize,
    /// Elements of a head of v and of the output.
    pub value_dim: usize,
    /// Number of tokens that the convolution reads.
    pub kernel: usize,
}

impl DeltaConfig {
    /// Reads the sizes, and the kinds of layers from `layer_types` or `full_attention_interval`.
    ///
    /// # Errors
    /// A field is invalid, names an unknown kind of layer, or contradicts another one.
    pub fn parse(fields: &Fields<'_>) -> Result<Self> {
        let key_heads = fields.size_or("linear_num_key_heads", 16)?;
        let value_heads = fields.size_or("linear_num_value_heads", 32)?;
        if !value_heads.is_multiple_of(key_heads) {
            let what = format!("linear_num_value_heads {value_heads} cannot share {key_heads} key heads");
            return Err(fields.wrong(&what));
        }
        Ok(Self {
            layers: kinds(fields)?,
            key_heads,
            value_heads,
            key_dim: fields.size_or("linear_key_head_dim", 128)?,
            value_dim: fields.size_or("linear_value_head_dim", 128)?,
            kernel: fields.size_or("linear_conv_kernel_dim", 4)?,
        })
    }

    /// Returns the width of q, k and v together, which are the channels of the convolution.
    pub fn channels(&self) -> usize {
        2 * self.key_heads * self.key_dim + self.value_width()
    }

    /// Returns the width of v.
    pub fn value_width(&self) -> usize {
        self.value_heads * self.value_dim
    }

    /// Returns the parts of a layer's state in the cache. The convolution's part is in bf16.
    pub fn parts(&self) -> [StatePart; 2] {
        let StateShape { recurrent_bytes, conv_bytes, .. } = self.state(CACHED_CONV);
        let part = |heads: usize, bytes: usize| StatePart { heads: heads as u32, head_bytes: (bytes / heads) as u32 };
        [part(self.value_heads, recurrent_bytes), part(self.key_heads, conv_bytes)]
    }

    /// Returns the bytes of a layer's state.
    pub fn state(&self, conv: ConvDtype) -> StateShape {
        let recurrent_bytes = size_of::<f32>() * self.key_dim * self.value_width();
        let conv_bytes = conv.bytes() * (self.kernel - 1) * self.channels();
        StateShape { recurrent_bytes, conv_bytes, conv }
    }
}

/// Element type of the convolution's part of the states in a cache.
pub const CACHED_CONV: ConvDtype = ConvDtype::Bf16;

/// Element type of the convolution's part of a state.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ConvDtype {
    /// IEEE binary32.
    F32,
    /// bfloat16.
    Bf16,
}

impl ConvDtype {
    /// Returns the bytes of an element.
    pub fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 => 2,
        }
    }
}

/// The two parts of one layer's state. The second part is directly behind the first.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StateShape {
    /// Bytes of the recurrent part, f32 `[value_heads, key_dim, value_dim]`.
    pub recurrent_bytes: usize,
    /// Bytes of the convolution's part, `[kernel - 1, channels]`: its latest inputs, the oldest first.
    pub conv_bytes: usize,
    /// Element type of the convolution's part.
    pub conv: ConvDtype,
}

impl StateShape {
    /// Returns the bytes of both parts.
    pub fn bytes(&self) -> usize {
        self.recurrent_bytes + self.conv_bytes
    }
}

/// Returns for each layer whether it is a layer of Gated DeltaNet.
fn kinds(fields: &Fields<'_>) -> Result<Vec<bool>> {
    let layers = fields.size("num_hidden_layers")?;
    let Some(types) = fields.get("layer_types") else {
        let interval = fields.size_or("full_attention_interval", 4)?;
        return Ok((1..=layers).map(|layer| !layer.is_multiple_of(interval)).collect());
    };
    let types = types.as_array().map_or(&[][..], Vec::as_slice);
    if types.len() != layers {
        let what = format!("layer_types names {} layers, but there are {layers}", types.len());
        return Err(fields.wrong(&what));
    }
    let parse = |kind: &Value| match kind.as_str() {
        Some("linear_attention") => Ok(true),
        Some("full_attention") => Ok(false),
        _ => Err(fields.wrong(&format!("layer type {kind} is not implemented"))),
    };
    types.iter().map(parse).collect()
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use serde_json::{Value, json};

    use super::{ConvDtype, DeltaConfig};
    use crate::fields::Fields;

    fn parse(changes: Value) -> Result<DeltaConfig, String> {
        let mut config = json!({"num_hidden_layers": 8});
        let changes = changes.as_object().expect("an object").clone();
        config.as_object_mut().expect("an object").extend(changes);
        let fields = Fields::new(Path::new("config.json"), &config).expect("an object");
        DeltaConfig::parse(&fields).map_err(|error| error.message)
    }

    #[test]
    fn every_fourth_layer_computes_attention() {
        let config = parse(json!({})).expect("the config is complete");
        assert_eq!(config.layers, [true, true, true, false, true, true, true, false]);
        let config = parse(json!({"full_attention_interval": 3})).expect("the config is complete");
        assert_eq!(config.layers, [true, true, false, true, true, false, true, true]);
        let types = ["full_attention", "linear_attention"];
        let config = parse(json!({"num_hidden_layers": 2, "layer_types": types})).expect("the config is complete");
        assert_eq!(config.layers, [false, true]);
    }

    /// The defaults are the sizes of Qwen3.5 9B.
    #[test]
    fn a_state_has_the_bytes_of_its_parts() {
        let config = parse(json!({})).expect("the config is complete");
        let state = config.state(ConvDtype::Bf16);
        assert_eq!((state.recurrent_bytes, state.conv_bytes, state.bytes()), (2_097_152, 49_152, 2_146_304));
        assert_eq!(config.state(ConvDtype::F32).conv_bytes, 98_304);
    }

    #[test]
    fn unsupported_config_values_are_named() {
        let rejected = |changes| parse(changes).expect_err("the config is rejected");
        assert!(rejected(json!({"linear_num_key_heads": 5})).contains("32 cannot share 5"));
        assert!(rejected(json!({"layer_types": ["full_attention"]})).contains("1 layers, but there are 8"));
        let types = vec!["mamba"; 8];
        assert!(rejected(json!({"layer_types": types})).contains("\"mamba\" is not implemented"));
    }
}
