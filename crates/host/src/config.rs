//! `config.json` of a Hugging Face model directory: the model's family and shape. A model of texts and images has the
//! fields of its text model, the only part that the host runs, in `text_config`.
//!
//! Parsing rejects models that the forward pass on the CPU does not support. `gpu/shape.rs` checks the limits of the
//! GPU's kernels.

use std::path::Path;

use kvarena::KvShape;
use kvarena::error::ConfigError;
use kvarena::layout::{Groups, Reach};
use serde_json::Value;

use crate::delta::DeltaConfig;
use crate::error::Result;
use crate::experts::ExpertsConfig;
use crate::family::Family;
use crate::fields::Fields;
use crate::files::read_json;
use crate::gemma::{self, WindowHeads};
use crate::latent::LatentConfig;
use crate::linear::Activation;
use crate::nope::NopeConfig;
use crate::quantised;
use crate::rope::Rope;

/// The shape of a model.
#[derive(Clone, PartialEq, Debug)]
pub struct ModelConfig {
    /// Family of the model.
    pub family: Family,
    /// Number of tokens of the vocabulary, and of rows of the embedding.
    pub vocab: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Width of the MLP.
    pub intermediate: usize,
    /// Number of transformer layers.
    pub layers: usize,
    /// Number of query heads.
    pub q_heads: usize,
    /// Number of kv heads, a divisor of `q_heads`; 1 for latent rows. For Gemma 4 this is the number in layers that
    /// read all tokens.
    pub kv_heads: usize,
    /// Number of elements of one head of q and k in attention. For latent rows it is the length of a row. For Gemma 4
    /// it is the number in layers that read all tokens.
    pub head_dim: usize,
    /// For Gemma 4, the heads of layers with a window.
    pub window_heads: Option<WindowHeads>,
    /// Whether layers that read all tokens compute V from the output of K's projection, without a projection for V.
    pub k_is_v: bool,
    /// Number of elements of one head of attention's output. For Gemma 4 see `head_dim`.
    pub value_dim: usize,
    /// Factor of attention's logits.
    pub scale: f32,
    /// Latent attention, where the family has it.
    pub latent: Option<LatentConfig>,
    /// Layers of Gated DeltaNet, where the family has them. They store no K and V.
    pub delta: Option<DeltaConfig>,
    /// Mixtures of experts, where the family has them.
    pub experts: Option<ExpertsConfig>,
    /// Epsilon of the RMSNorms, except for those inside latent attention.
    pub norm_eps: f32,
    /// The model's maximum length in positions.
    pub max_len: usize,
    /// Rotary embedding.
    pub rope: Rope,
    /// Rotary embedding of layers with a window in Gemma 3 and 4; `None` for other families.
    pub window_rope: Option<Rope>,
    /// Factor by which rows of the embedding are multiplied.
    pub embedding_scale: f32,
    /// Soft cap of the output logits, if there is one.
    pub logit_cap: Option<f32>,
    /// The activation of MLPs.
    pub activation: Activation,
    /// Whether the output projection is tied to the embedding.
    pub tied: bool,
    /// Whether q, k, v and o have a bias.
    pub attention_bias: bool,
    /// Whether the MLP's projections have a bias.
    pub mlp_bias: bool,
    /// For each layer its sliding window, if it has one.
    pub windows: Vec<Option<u32>>,
    /// For each layer the size of its chunks, if it reads chunks.
    pub chunks: Vec<Option<u32>>,
    /// Llama 4's encoding of positions; `None` for other families.
    pub nope: Option<NopeConfig>,
    /// Tokens that end a generation.
    pub eos: Vec<u32>,
}

impl ModelConfig {
    /// Reads `config.json` of a folder, and the stop tokens of `generation_config.json` if there is one.
    ///
    /// # Errors
    /// A file cannot be read or parsed; the model needs a property that is not implemented; or a field is missing,
    /// invalid or contradicts another one.
    pub fn read(dir: &Path) -> Result<Self> {
        let path = dir.join("config.json");
        let mut config = Self::parse(&path, &read_json(&path)?)?;
        let generation = dir.join("generation_config.json");
        if generation.exists() {
            let value = read_json(&generation)?;
            config.eos.extend(Fields::new(&generation, &value)?.tokens("eos_token_id")?);
            config.eos.sort_unstable();
            config.eos.dedup();
        }
        Ok(config)
    }

    /// Reads the config from a parsed value; `path` is for messages.
    ///
    /// # Errors
    /// As [`ModelConfig::read`].
    pub fn parse(path: &Path, value: &Value) -> Result<Self> {
        let whole = Fields::new(path, value)?;
        let family = Family::parse(&whole)?;
        let text = whole.object("text_config")?;
        let fields = text.as_ref().unwrap_or(&whole);
        [fields, &whole].into_iter().try_for_each(|part| quantised::check(part, family))?;
        let activation = activation(fields, family)?;
        let gemma = family.norms_outputs();
        if gemma {
            gemma::check(fields, family)?;
        }
        let hidden = fields.size("hidden_size")?;
        let q_heads = "num_attention_heads";
        let q_heads = if gemma { fields.size_or(q_heads, gemma::Q_HEADS) } else { fields.size(q_heads) }?;
        let latent = (family == Family::DeepseekV3).then(|| LatentConfig::parse(fields)).transpose()?;
        let delta = (family == Family::Qwen3_5).then(|| parse_delta(fields)).transpose()?;
        let nope = (family == Family::Llama4).then(|| NopeConfig::parse(fields)).transpose()?;
        let (kv_heads, head_dim, window_heads, k_is_v) = heads(fields, family, (hidden, q_heads), latent)?;
        let rotated = latent.map_or(head_dim, |latent| latent.rope);
        if !rotated.is_multiple_of(2) {
            return Err(fields.wrong(&format!("head_dim {head_dim} is odd, so it cannot be rotated")));
        }
        let norm_eps = fields.number_or("rms_norm_eps", 1e-6)? as f32;
        if norm_eps.is_nan() || norm_eps < 0.0 {
            return Err(fields.wrong(&format!("rms_norm_eps {norm_eps} is negative")));
        }
        let layers = fields.size("num_hidden_layers")?;
        let (rope, window_rope) = ropes(fields, family, rotated, window_heads)?;
        let scale = match family {
            Family::DeepseekV3 => latent.map_or(1.0, |latent| rope.logit_factor / sqrt(latent.nope + latent.rope)),
            Family::Gemma4 => 1.0,
            Family::Gemma3 => 1.0 / sqrt(fields.size_or("query_pre_attn_scalar", 256)?),
            _ => 1.0 / sqrt(head_dim),
        };
        let config = Self {
            family,
            vocab: match family {
                Family::Gemma3 => fields.size_or("vocab_size", gemma::VOCAB)?,
                _ => fields.size("vocab_size")?,
            },
            hidden,
            intermediate: match family {
                Family::Llama4 => fields.size("intermediate_size_mlp")?,
                _ => fields.size("intermediate_size")?,
            },
            layers,
            q_heads,
            kv_heads,
            head_dim,
            window_heads,
            k_is_v,
            value_dim: latent.map_or(head_dim, |latent| latent.rank),
            scale,
            latent,
            delta,
            experts: ExpertsConfig::parse(fields, family)?,
            norm_eps,
            max_len: fields.size_or("max_position_embeddings", default_len(family))?,
            rope,
            window_rope,
            embedding_scale: if gemma { sqrt(hidden) } else { 1.0 },
            logit_cap: gemma::logit_cap(fields, family)?,
            activation,
            tied: fields.flag_or("tie_word_embeddings", whole.flag_or("tie_word_embeddings", gemma)?)?,
            attention_bias: attention_bias(fields, family)?,
            mlp_bias: fields.flag("mlp_bias")?,
            windows: windows(fields, family, layers)?,
            chunks: nope.as_ref().map_or(vec![None; layers], NopeConfig::chunks),
            nope,
            eos: eos(&[fields, &whole])?,
        };
        // Layers of one shape also work in a single group. Layers of two shapes do not.
        match config.find_groups() {
            Err(error) if window_heads.is_some() => {
                Err(fields.wrong(&format!("layers of two shapes need groups, but {error}")))
            }
            _ => Ok(config),
        }
    }

    /// Returns the shape of the K and V that each token stores in a layer. [`ModelConfig::groups`] contains the other
    /// shape of Gemma 4's layers with a window.
    pub fn kv_shape(&self) -> KvShape {
        match self.latent {
            Some(latent) => KvShape::Latent { rank: latent.rank as u32, rope: latent.rope as u32 },
            None => KvShape::heads(self.kv_heads as u32, self.head_dim as u32),
        }
    }

    /// Returns the rotary embedding of a layer.
    pub fn rope_of(&self, layer: usize) -> &Rope {
        match (&self.window_rope, self.windows[layer]) {
            (Some(rope), Some(_)) => rope,
            _ => &self.rope,
        }
    }

    /// Returns the sizes of a layer of Gated DeltaNet; `None` for a layer of attention.
    pub fn delta_of(&self, layer: usize) -> Option<&DeltaConfig> {
        self.delta.as_ref().filter(|delta| delta.layers[layer])
    }

    /// Returns a layer's heads of K and V, and the elements of a head.
    pub fn heads_of(&self, layer: usize) -> (usize, usize) {
        match self.window_heads {
            Some(heads) if self.windows[layer].is_some() => (heads.kv_heads, heads.head_dim),
            _ => (self.kv_heads, self.head_dim),
        }
    }

    /// Returns the groups of layers: one for the layers that read all tokens, one for each size of a window or a chunk,
    /// and one for the layers that keep a state. Returns one group if all layers are alike, or if [`Groups`] cannot
    /// contain them. Parsing rejects layers of two shapes that [`Groups`] cannot contain.
    pub fn groups(&self) -> Groups {
        self.find_groups().unwrap_or(Groups::ONE)
    }

    fn find_groups(&self) -> std::result::Result<Groups, ConfigError> {
        let mut reaches = vec![Reach::All];
        let group = |(window, chunk): (&Option<u32>, &Option<u32>)| {
            let reach = chunk.map_or(Reach::All, Reach::Chunk);
            let reach = window.map_or(reach, Reach::Window);
            let group = reaches.iter().position(|&other| other == reach);
            group.unwrap_or_else(|| {
                reaches.push(reach);
                reaches.len() - 1
            }) as u8
        };
        let mut layers: Vec<u8> = self.windows.iter().zip(&self.chunks).map(group).collect();
        if let Some(delta) = &self.delta {
            let keeps = layers.iter_mut().zip(&delta.layers).filter(|(_, keeps)| **keeps);
            keeps.for_each(|(group, _)| *group = reaches.len() as u8);
            reaches.push(Reach::State);
            return Groups::new(&reaches, &layers)?.with_state(reaches.len() as u32 - 1, &delta.parts());
        }
        let groups = Groups::new(&reaches, &layers)?;
        let Some(WindowHeads { kv_heads, head_dim }) = self.window_heads else { return Ok(groups) };
        let shape = KvShape::heads(kv_heads as u32, head_dim as u32);
        (1..groups.count()).try_fold(groups, |all, group| all.with_shape(group, shape, None))
    }
}

fn sqrt(size: usize) -> f32 {
    (size as f32).sqrt()
}

/// Returns the default of a model's maximum length.
fn default_len(family: Family) -> usize {
    match family {
        Family::Llama => 2048,
        Family::DeepseekV3 => 4096,
        Family::Qwen3 | Family::Qwen3_5 => 32768,
        Family::GptOss | Family::Gemma3 | Family::Gemma4 | Family::Llama4 => 131_072,
    }
}

/// Returns the tokens that end a generation by any of the parts of a config.
fn eos(parts: &[&Fields<'_>]) -> Result<Vec<u32>> {
    let mut eos = Vec::new();
    for part in parts {
        eos.extend(part.tokens("eos_token_id")?);
    }
    eos.sort_unstable();
    eos.dedup();
    Ok(eos)
}

/// Returns the activation of MLPs; rejects an activation that the family does not have.
fn activation(fields: &Fields<'_>, family: Family) -> Result<Activation> {
    let (field, name, activation) = match family {
        Family::Gemma3 | Family::Gemma4 => ("hidden_activation", "gelu_pytorch_tanh", Activation::GeluTanh),
        _ => ("hidden_act", "silu", Activation::Silu),
    };
    match fields.text(field)? {
        Some(other) if other != name => Err(fields.wrong(&format!("{field} {other:?} is not implemented"))),
        _ => Ok(activation),
    }
}

/// Returns the kv heads of layers that read all tokens, the elements of such a head, Gemma 4's heads of layers with a
/// window, and whether layers that read all tokens compute V from the product for K.
fn heads(
    fields: &Fields<'_>,
    family: Family,
    (hidden, q_heads): (usize, usize),
    latent: Option<LatentConfig>,
) -> Result<(usize, usize, Option<WindowHeads>, bool)> {
    let default = if family.norms_outputs() { gemma::KV_HEADS } else { q_heads };
    let kv_heads = fields.size_or("num_key_value_heads", default)?;
    let may_share = |kv_heads: usize| {
        let wrong = || fields.wrong(&format!("{q_heads} query heads cannot share {kv_heads} key and value heads"));
        q_heads.is_multiple_of(kv_heads).then_some(()).ok_or_else(wrong)
    };
    may_share(kv_heads)?;
    if let Some(latent) = latent {
        return Ok((1, latent.rank + latent.rope, None, false));
    }
    let default = default_head_dim(fields, family, hidden, q_heads)?;
    let head_dim = fields.size_or("head_dim", default)?;
    if family != Family::Gemma4 {
        return Ok((kv_heads, head_dim, None, false));
    }
    let window_heads = WindowHeads { kv_heads, head_dim };
    let (kv_heads, head_dim, k_is_v) = gemma::full_heads(fields, (kv_heads, head_dim))?;
    may_share(kv_heads)?;
    Ok((kv_heads, head_dim, Some(window_heads), k_is_v))
}

/// Returns the rotary embedding of layers that read all tokens. For Gemma 3 and 4, also returns that of layers with a
/// window.
fn ropes(
    fields: &Fields<'_>,
    family: Family,
    rotated: usize,
    window_heads: Option<WindowHeads>,
) -> Result<(Rope, Option<Rope>)> {
    if !matches!(family, Family::Gemma3 | Family::Gemma4) {
        return Ok((Rope::parse(fields, rotated, family == Family::Qwen3_5)?, None));
    }
    let of_windows = window_heads.map_or(rotated, |heads| heads.head_dim);
    let (rope, of_windows) = Rope::parse_pair(fields, (rotated, of_windows))?;
    Ok((rope, Some(of_windows)))
}

/// Reads the layers of Gated DeltaNet. The family gates the output of attention in its other layers.
fn parse_delta(fields: &Fields<'_>) -> Result<DeltaConfig> {
    if !fields.flag_or("attn_output_gate", true)? {
        return Err(fields.wrong("attn_output_gate false is not implemented"));
    }
    DeltaConfig::parse(fields)
}

/// Returns whether q, k, v and o have a bias, which latent rows do not support. Only gpt-oss has it by default.
fn attention_bias(fields: &Fields<'_>, family: Family) -> Result<bool> {
    let has_bias = fields.flag_or("attention_bias", family == Family::GptOss)?;
    if has_bias && family == Family::DeepseekV3 {
        return Err(fields.wrong("attention_bias is not implemented over latent rows"));
    }
    Ok(has_bias)
}

fn default_head_dim(fields: &Fields<'_>, family: Family, hidden: usize, q_heads: usize) -> Result<usize> {
    match family {
        Family::Qwen3 | Family::Llama4 => return Ok(128),
        Family::GptOss => return Ok(64),
        Family::Gemma3 | Family::Gemma4 | Family::Qwen3_5 => return Ok(256),
        Family::Llama | Family::DeepseekV3 => {}
    }
    if fields.get("head_dim").is_none() && !hidden.is_multiple_of(q_heads) {
        let what = format!("hidden_size {hidden} cannot be divided among {q_heads} heads");
        return Err(fields.wrong(&what));
    }
    Ok((hidden / q_heads).max(1))
}

/// Returns the window of each layer. Qwen3 has windows only if `use_sliding_window` is set. `layer_types` names the
/// layers with a window. Without it, Qwen3's windows begin with layer `max_window_layers`. Also without it, the first
/// layer of gpt-oss and every second one after it have a window. In Gemma 3 and 4 without it, every
/// `sliding_window_pattern`-th layer has none, by default every sixth.
fn windows(fields: &Fields<'_>, family: Family, layers: usize) -> Result<Vec<Option<u32>>> {
    let may = match family {
        Family::Llama | Family::DeepseekV3 | Family::Llama4 | Family::Qwen3_5 => false,
        Family::Qwen3 => fields.flag("use_sliding_window")?,
        Family::GptOss | Family::Gemma3 | Family::Gemma4 => true,
    };
    if !may {
        return Ok(vec![None; layers]);
    }
    let window = Some(fields.size("sliding_window")? as u32);
    let Some(types) = fields.get("layer_types") else {
        if family == Family::GptOss {
            return Ok((0..layers).map(|i| window.filter(|_| i % 2 == 0)).collect());
        }
        if family.norms_outputs() {
            let pattern = fields.size_or("sliding_window_pattern", 6)?;
            let is_full = |i: usize| (i + 1).is_multiple_of(pattern);
            return Ok((0..layers).map(|i| window.filter(|_| !is_full(i))).collect());
        }
        let first = fields.size_or("max_window_layers", 28)?;
        return Ok((0..layers).map(|i| window.filter(|_| i >= first)).collect());
    };
    let types = types.as_array().map_or(&[][..], Vec::as_slice);
    if types.len() != layers {
        let what = format!("layer_types names {} layers, but there are {layers}", types.len());
        return Err(fields.wrong(&what));
    }
    let parse = |kind: &Value| match kind.as_str() {
        Some("full_attention") => Ok(None),
        Some("sliding_attention") => Ok(window),
        _ => Err(fields.wrong(&format!("layer type {kind} is not implemented"))),
    };
    types.iter().map(parse).collect()
}
