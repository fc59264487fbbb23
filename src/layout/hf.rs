//! `PoolConfig` from the `config.json` of a Hugging Face model.
//!
//! The fields of the file, not the model's name, decide which models are supported. A layer stores either latent rows,
//! or equally many heads of K and of V, all of one length. A layer reads all tokens, a window or a chunk. Layers that
//! read all tokens may have other heads than layers that do not. An error names the field that describes another layout
//! or is missing.

use std::fmt;

use serde_json::{Map, Value};

use super::config::PoolConfig;
use super::dtype::KvDtype;
use super::groups::{GROUPED_LAYERS_MAX, Groups, Reach};
use super::shape::KvShape;
use crate::error::displayed;

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
const OTHER_SHAPES: [&str; 14] = [
    // An index of tokens, in addition to latent rows.
    "index_head_dim",
    // Some layers have another shape.
    "block_configs",
    "per_layer_config",
    // Layers read K and V of another layer.
    "num_kv_shared_layers",
    // Layers have another operation instead of attention, or in addition.
    "full_attention_interval",
    "attn_layer_period",
    "attn_layer_indices",
    "attn_type_list",
    "hybrid_override_pattern",
    "layers_block_type",
    "linear_attn_config",
    "mamba_d_state",
    "ssm_cfg",
    "state_size",
];

/// Prefixes of model types whose default head_dim is not `hidden_size / num_attention_heads`.
const OWN_HEAD_DIM: [&str; 2] = ["gemma", "qwen3"];

/// Layer types that store K and V.
const LAYER_TYPES: [&str; 3] = ["full_attention", "sliding_attention", "chunked_attention"];

/// Layer types that read a window or a chunk, and the field with its size.
const LIMITED_TYPES: [(&str, &str); 2] = [(LAYER_TYPES[1], "sliding_window"), (LAYER_TYPES[2], "attention_chunk_size")];

/// Default of `no_rope_layer_interval`: the interval of layers with full attention in a model with chunks.
const NO_ROPE_INTERVAL: u32 = 4;

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
    /// groups have [their own](Groups::with_shape).
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
        let dtype = fields.dtype().or_else(|| whole.dtype());
        let layers = fields.size("num_hidden_layers")?;
        let (groups, shape) = (fields.groups(layers)?, fields.shape()?);
        let dtype = dtype.unwrap_or_else(|| Err(fields.missing("dtype")))?;
        fields.with_full_shape(Self { layers, groups, shape, dtype, ..Self::default() })
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

    /// Sets the heads of the layers that read all tokens, if they have their own.
    fn with_full_shape(&self, pool: PoolConfig) -> Result<PoolConfig, HfError> {
        let KvShape::Heads { kv_heads, head_dim } = pool.shape else { return Ok(pool) };
        let [of_dim, of_heads, gate] = ["global_head_dim", "num_global_key_value_heads", "attention_k_eq_v"];
        let given = |name| self.get(name).filter(|value| is_set(value));
        let Some(field) = [of_dim, of_heads].into_iter().find(|name| given(name).is_some()) else {
            return Ok(pool);
        };
        let Some((_, kinds)) = self.kinds(pool.layers)? else {
            return Err(self.unsupported(field, &self.map[field]));
        };
        let head_dim = if given(of_dim).is_some() { self.size(of_dim)? } else { head_dim };
        let kv_heads = match (given(of_heads), self.get(gate)) {
            (Some(_), None) => return Err(self.missing(gate)),
            (Some(_), Some(gate)) if is_set(gate) => self.size(of_heads)?,
            _ => kv_heads,
        };
        let shape = KvShape::heads(kv_heads, head_dim);
        if shape == pool.shape || !kinds.contains(&LAYER_TYPES[0]) {
            return Ok(pool);
        }
        let mut groups = pool.groups;
        for group in 1..groups.count() {
            let own = groups.with_shape(group, pool.shape, None);
            groups = own.map_err(|_| self.unsupported(field, &self.map[field]))?;
        }
        Ok(PoolConfig { groups, shape, ..pool })
    }

    fn is_latent(&self) -> bool {
        self.get("kv_lora_rank").is_some_and(is_set)
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
        let Some(types) = self.get("layer_types") else { return Ok(()) };
        let list = types.as_array().ok_or_else(|| self.unfit("layer_types", types, "a list"))?;
        match list.iter().find(|kind| !kind.as_str().is_some_and(|s| LAYER_TYPES.contains(&s))) {
            Some(kind) => Err(self.unsupported("layer_types", kind)),
            None => Ok(()),
        }
    }

    fn groups(&self, layers: u32) -> Result<Groups, HfError> {
        let Some((field, kinds)) = self.kinds(layers)? else { return Ok(Groups::ONE) };
        let (mut reaches, mut groups) = (vec![Reach::All], vec![0; kinds.len()]);
        if !kinds.contains(&LAYER_TYPES[0]) {
            return Ok(Groups::ONE); // No layer reads all tokens, but group 0 must.
        }
        for (kind, field) in LIMITED_TYPES {
            if !kinds.contains(&kind) {
                continue;
            }
            let size = self.size(field)?;
            let reach = match kind {
                "chunked_attention" if !size.is_power_of_two() => {
                    return Err(self.unfit(field, &self.map[field], "a power of two"));
                }
                "chunked_attention" => Reach::Chunk(size),
                _ => Reach::Window(size),
            };
            let own = groups.iter_mut().zip(&kinds).filter(|(_, own)| **own == kind);
            own.for_each(|(group, _)| *group = reaches.len() as u8);
            reaches.push(reach);
        }
        self.check_grouped(layers)?;
        Groups::new(&reaches, &groups).map_err(|_| self.unsupported(field, &self.map[field]))
    }

    /// Rejects more layers than groups can contain.
    fn check_grouped(&self, layers: u32) -> Result<(), HfError> {
        if layers as usize <= GROUPED_LAYERS_MAX {
            return Ok(());
        }
        let name = "num_hidden_layers";
        let value = self.get(name).ok_or_else(|| self.missing(name))?;
        Err(self.unfit(name, value, "256 layers of several kinds at most"))
    }

    /// Returns the type of each layer, and the field that errors about the types name; `None` if no field determines
    /// the types.
    fn kinds(&self, layers: u32) -> Result<Option<(&'static str, Vec<&'a str>)>, HfError> {
        let wanted = "one for each of num_hidden_layers";
        let list = |field: &'static str| {
            let Some(value) = self.get(field) else { return Ok(None) };
            let list = value.as_array().ok_or_else(|| self.unfit(field, value, "a list"))?;
            match list.len() {
                len if len == layers as usize => Ok(Some(list)),
                0 => Ok(None),
                _ => Err(self.unfit(field, value, wanted)),
            }
        };
        let every = |interval: u32, kind| {
            let kind = |layer: u32| if layer.is_multiple_of(interval) { LAYER_TYPES[0] } else { kind };
            (1..=layers).map(kind).collect()
        };
        let [_, sliding, chunked] = LAYER_TYPES;
        if let Some(types) = list("layer_types")? {
            return Ok(Some(("layer_types", types.iter().filter_map(Value::as_str).collect())));
        }
        let field = "sliding_window_pattern";
        if self.get(field).is_some_and(is_set) && self.get("sliding_window").is_some() {
            self.check_grouped(layers)?;
            return Ok(Some((field, every(self.size(field)?, sliding))));
        }
        if self.get("attention_chunk_size").is_none() {
            return Ok(None);
        }
        if let Some(rope) = list("no_rope_layers")? {
            // Layers without rotary positions read all tokens.
            let kind = |value: &Value| if is_set(value) { chunked } else { LAYER_TYPES[0] };
            return Ok(Some(("no_rope_layers", rope.iter().map(kind).collect())));
        }
        self.check_grouped(layers)?;
        let field = "no_rope_layer_interval";
        let interval = if self.get(field).is_some() { self.size(field)? } else { NO_ROPE_INTERVAL };
        Ok(Some(("attention_chunk_size", every(interval, chunked))))
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
        let name = ["dtype", "torch_dtype"].into_iter().find(|name| self.get(name).is_some())?;
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
