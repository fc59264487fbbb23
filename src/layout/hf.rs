//! `PoolConfig` from the `config.json` of a Hugging Face model.
//!
//! The fields of the file, not the model's name, decide which models are supported. A layer stores either latent rows,
//! or equally many heads of K and of V, all of one length. A layer reads all tokens, a window or a chunk, or keeps a
//! state. Layers that read all tokens may have other heads than layers that do not. An error names the field that
//! describes another layout or is missing. Module `kinds` determines what each layer keeps, and `states` the parts of a
//! state.

mod kinds;
mod states;

use std::fmt;

use serde_json::{Map, Value};

use super::config::PoolConfig;
use super::dtype::KvDtype;
use super::shape::KvShape;
use crate::error::displayed;
use kinds::{Kind, Kinds};

displayed! {
    /// The reason why a `config.json` does not describe a pool.
    #[derive(Clone, PartialEq, Eq, Debug)]
    #[non_exhaustive]
    pub enum HfError {
        /// The text is not JSON, or not an object.
        Json {
            /// Message of the parser with line and column, or `not an object`.
            message: Box<str>,
        } => "config.json: {message}";
        /// A required field is missing or null.
        Missing {
            /// Name of the field, such as `text_config.head_dim`.
            field: Box<str>,
        } => "config.json: {field} is missing";
        /// A field has an invalid value.
        Unfit {
            field: Box<str>,
            /// Value of the field, as JSON.
            value: Box<str>,
            /// The valid values.
            wanted: &'static str,
        } => "config.json: {field} is {value}, not {wanted}";
        /// A field describes layers with another layout, or of an unknown kind.
        Unsupported {
            field: Box<str>,
            /// Value of the field, as JSON.
            value: Box<str>,
        } => "config.json: {field} is {value}, which is not supported";
    }
}

impl std::error::Error for HfError {}

/// Fields that describe layers of another layout, unless they are absent, null, 0 or false.
const OTHER_SHAPES: [&str; 7] = [
    // An index of tokens, in addition to latent rows.
    "index_head_dim",
    // Some layers have another shape.
    "block_configs",
    "per_layer_config",
    // Layers read K and V of another layer.
    "num_kv_shared_layers",
    // No layer keeps K and V, or layers share the weights of attention but not its K and V (Mamba, Zamba).
    "ssm_cfg",
    "state_size",
    "n_mamba_heads",
];

/// Prefixes of model types whose default head_dim is not `hidden_size / num_attention_heads`.
const OWN_HEAD_DIM: [&str; 2] = ["gemma", "qwen3"];

impl PoolConfig {
    /// Returns the pool of a model from the text of its Hugging Face `config.json`: `layers`, `groups`, `shape` and
    /// `dtype`.
    ///
    /// The dtype is that of the weights (`dtype` or `torch_dtype`). The host sets the other fields, which have the
    /// values of [`PoolConfig::default`]. In a model with several parts, only the language model counts
    /// (`text_config`). A model with a `kv_lora_rank` stores latent rows, and the host sets the scale of their
    /// attention ([`KvShape::Latent`]).
    ///
    /// Layers are in groups if some read all tokens and others a window or a chunk. The field `layer_types`,
    /// `sliding_window_pattern`, `no_rope_layers` or `no_rope_layer_interval` (default: 4) determines the kind of each
    /// layer; `sliding_window` and `attention_chunk_size` contain the sizes. If no layer reads all tokens, the pool
    /// still keeps all tokens of all layers. Layers that read all tokens may have other heads (`global_head_dim`, and
    /// `num_global_key_value_heads` with `attention_k_eq_v`). These heads are then the pool's shape, and the other
    /// groups have [their own](crate::layout::Groups::with_shape).
    ///
    /// ```
    /// # use kvarena::*;
    /// # use kvarena::layout::HfError;
    /// let json = r#"{"model_type": "qwen3", "num_hidden_layers": 36, "num_attention_heads": 32,
    ///                "num_key_value_heads": 8, "head_dim": 128, "torch_dtype": "bfloat16"}"#;
    /// let config = PoolConfig { page_size: 32, ..PoolConfig::from_hf(json)? };
    /// assert_eq!((config.layers, config.shape), (36, KvShape::heads(8, 128)));
    /// assert_eq!(config.dtype, KvDtype::Bf16);
    ///
    /// let error = PoolConfig::from_hf(&json.replace("bfloat16", "fp8")).unwrap_err().to_string();
    /// assert_eq!(error, "config.json: torch_dtype is \"fp8\", not float32, float16 or bfloat16");
    /// # Ok::<(), HfError>(())
    /// ```
    ///
    /// # Errors
    /// An [`HfError`] that names the field, or describes invalid JSON. [`PoolConfig::layout`] checks the numbers.
    pub fn from_hf(config_json: &str) -> Result<Self, HfError> {
        let message = |e: &dyn fmt::Display| HfError::Json { message: e.to_string().into() };
        let value: Value = serde_json::from_str(config_json).map_err(|e| message(&e))?;
        let Value::Object(map) = value else { return Err(message(&"not an object")) };
        let whole = Fields { map: &map, path: "" };
        let fields = match whole.get("text_config") {
            None => whole,
            Some(Value::Object(map)) => Fields { map, path: "text_config." },
            Some(other) => return Err(whole.unfit("text_config", other, "an object")),
        };
        fields.check_shape()?;
        let kinds = fields.kinds()?;
        fields.check_stateless(kinds.as_ref())?;
        let ((layers, groups), shape) = (fields.groups(kinds.as_ref())?, fields.shape()?);
        let dtype = fields.dtype().or_else(|| whole.dtype());
        let dtype = dtype.unwrap_or_else(|| Err(fields.missing("dtype")))?;
        let pool = Self { layers, groups, shape, dtype, ..Self::default() };
        let Some(kinds) = kinds else { return fields.with_full_shape(pool, None) };
        fields.with_full_shape(fields.with_states(pool, &kinds)?, Some(&kinds))
    }
}

/// The fields of an object. Null counts as absent, as in Hugging Face transformers.
#[derive(Clone, Copy)]
struct Fields<'a> {
    map: &'a Map<String, Value>,
    /// Prefix of field names in messages.
    path: &'static str,
}

impl<'a> Fields<'a> {
    fn get(&self, name: &str) -> Option<&'a Value> {
        self.map.get(name).filter(|value| !value.is_null())
    }

    fn is_set(&self, name: &str) -> bool {
        self.get(name).is_some_and(is_set)
    }

    /// Returns the fields of Kimi's `linear_attn_config`.
    fn linear_attention(&self) -> Result<Option<Self>, HfError> {
        let name = "linear_attn_config";
        let path = if self.path.is_empty() { "linear_attn_config." } else { "text_config.linear_attn_config." };
        match self.get(name) {
            None => Ok(None),
            Some(Value::Object(map)) => Ok(Some(Self { map, path })),
            Some(other) => Err(self.unfit(name, other, "an object")),
        }
    }

    fn size(&self, name: &str) -> Result<u32, HfError> {
        let value = self.get(name).ok_or_else(|| self.missing(name))?;
        match value.as_u64().and_then(|n| u32::try_from(n).ok()) {
            None | Some(0) => Err(self.unfit(name, value, "a whole number from 1 to 4294967295")),
            Some(n) => Ok(n),
        }
    }

    /// Returns the shape of K and V of a token.
    fn shape(&self) -> Result<KvShape, HfError> {
        if self.is_latent() {
            let (rank, rope) = (self.size("kv_lora_rank")?, self.size("qk_rope_head_dim")?);
            return Ok(KvShape::Latent { rank, rope });
        }
        let kv_heads = match self.get("num_key_value_heads") {
            Some(_) => self.size("num_key_value_heads")?,
            None => self.size("num_attention_heads")?,
        };
        Ok(KvShape::heads(kv_heads, self.head_dim()?))
    }

    /// Sets the parts of the states, if layers keep them, and the least page size that holds one.
    fn with_states(&self, pool: PoolConfig, kinds: &Kinds) -> Result<PoolConfig, HfError> {
        let Some(group) = pool.groups.state_group() else { return Ok(pool) };
        let groups = pool.groups.with_state(group, &self.state_parts(kinds, pool.dtype)?);
        let groups = groups.map_err(|_| self.refused(kinds.field))?;
        let pool = PoolConfig { groups, ..pool };
        // A state that no page holds is an error of the pool's layout.
        let page_size = pool.state_page_size(pool.page_size).unwrap_or(pool.page_size);
        Ok(PoolConfig { page_size, ..pool })
    }

    /// Sets the heads of the layers that read all tokens, if they have their own.
    fn with_full_shape(&self, pool: PoolConfig, kinds: Option<&Kinds>) -> Result<PoolConfig, HfError> {
        let KvShape::Heads { kv_heads, head_dim } = pool.shape else { return Ok(pool) };
        let [of_dim, of_heads, gate] = ["global_head_dim", "num_global_key_value_heads", "attention_k_eq_v"];
        let given = |name| self.get(name).filter(|value| is_set(value));
        let Some(field) = [of_dim, of_heads].into_iter().find(|name| given(name).is_some()) else {
            return Ok(pool);
        };
        let Some(kinds) = kinds else { return Err(self.refused(field)) };
        let head_dim = if given(of_dim).is_some() { self.size(of_dim)? } else { head_dim };
        let kv_heads = match (given(of_heads), self.get(gate)) {
            (Some(_), None) => return Err(self.missing(gate)),
            (Some(_), Some(gate)) if is_set(gate) => self.size(of_heads)?,
            _ => kv_heads,
        };
        let shape = KvShape::heads(kv_heads, head_dim);
        if shape == pool.shape || !kinds.contains(Kind::All) {
            return Ok(pool);
        }
        let mut groups = pool.groups;
        for group in 1..groups.count() {
            let own = groups.with_shape(group, pool.shape, None);
            groups = own.map_err(|_| self.refused(field))?;
        }
        Ok(PoolConfig { groups, shape, ..pool })
    }

    fn is_latent(&self) -> bool {
        self.is_set("kv_lora_rank")
    }

    /// Rejects models with another layout.
    fn check_shape(&self) -> Result<(), HfError> {
        for name in OTHER_SHAPES {
            if let Some(value) = self.get(name).filter(|value| is_set(value)) {
                return Err(self.unsupported(name, value));
            }
        }
        if let Some(value @ Value::Bool(true)) = self.get("is_encoder_decoder") {
            return Err(self.unsupported("is_encoder_decoder", value));
        }
        let value_dim = self.get("v_head_dim").filter(|_| !self.is_latent());
        if let Some(value) = value_dim.filter(|&v| Some(v) != self.get("head_dim")) {
            return Err(self.unsupported("v_head_dim", value));
        }
        Ok(())
    }

    fn head_dim(&self) -> Result<u32, HfError> {
        let model = self.get("model_type").and_then(Value::as_str).unwrap_or_default();
        let own = OWN_HEAD_DIM.iter().any(|name| model.starts_with(name));
        if own || self.get("head_dim").is_some() {
            return self.size("head_dim");
        }
        let (hidden, heads) = (self.size("hidden_size")?, self.size("num_attention_heads")?);
        if !hidden.is_multiple_of(heads) {
            let value = &self.map["hidden_size"];
            return Err(self.unfit("hidden_size", value, "a multiple of num_attention_heads"));
        }
        Ok(hidden / heads)
    }

    /// Returns the element type, if any: newer files have `dtype`, older ones `torch_dtype`.
    fn dtype(&self) -> Option<Result<KvDtype, HfError>> {
        ["dtype", "torch_dtype"].into_iter().find_map(|name| self.dtype_of(name))
    }

    /// Returns the element type that a field names.
    fn dtype_of(&self, name: &str) -> Option<Result<KvDtype, HfError>> {
        let value = self.get(name)?;
        Some(match value.as_str().map(|text| text.strip_prefix("torch.").unwrap_or(text)) {
            Some("float32") => Ok(KvDtype::F32),
            Some("float16") => Ok(KvDtype::F16),
            Some("bfloat16") => Ok(KvDtype::Bf16),
            _ => Err(self.unfit(name, value, "float32, float16 or bfloat16")),
        })
    }

    fn name(&self, name: &str) -> Box<str> {
        format!("{}{name}", self.path).into()
    }

    fn missing(&self, name: &str) -> HfError {
        HfError::Missing { field: self.name(name) }
    }

    fn unfit(&self, name: &str, value: &Value, wanted: &'static str) -> HfError {
        HfError::Unfit { field: self.name(name), value: shown(value), wanted }
    }

    /// Returns the error for a field whose whole value is not supported.
    fn refused(&self, name: &str) -> HfError {
        self.unsupported(name, &self.map[name])
    }

    fn unsupported(&self, name: &str, value: &Value) -> HfError {
        HfError::Unsupported { field: self.name(name), value: shown(value) }
    }
}

/// Returns whether a field is set to a value other than 0 or false.
fn is_set(value: &Value) -> bool {
    !matches!(value, Value::Bool(false)) && value.as_u64() != Some(0)
}

/// Returns a value as JSON, cut after 80 characters.
fn shown(value: &Value) -> Box<str> {
    let text = value.to_string();
    let long = text.chars().count() > 80;
    if long { format!("{}...", text.chars().take(80).collect::<String>()) } else { text }.into()
}
