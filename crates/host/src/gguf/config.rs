//! The metadata of a GGUF file as the fields of a published `config.json`.

use serde_json::{Value, json};

use super::{Gguf, Kind};
use crate::config::ModelConfig;
use crate::error::Result;
use crate::fields::Fields;

/// Layers of Gemma 3 27B, the only size whose logits are not divided by the square root of a head's elements. Files do
/// not contain this factor; llama.cpp also identifies the model by its layers.
const LAYERS_OF_27B: usize = 62;

/// Divisors of the rotary frequencies, which llama.cpp's converter computes from Llama 3's scaling.
const ROPE_FACTORS: &str = "rope_freqs.weight";

impl Gguf {
    /// Returns the config of the model.
    ///
    /// # Errors
    /// A key is missing or invalid, or the model needs a property that is not implemented.
    pub fn config(&self) -> Result<ModelConfig> {
        let mut config = ModelConfig::parse(&self.path, &self.json()?)?;
        if let Some(tensor) = self.tensors.get(ROPE_FACTORS) {
            let frequencies = &mut config.rope.frequencies;
            let pairs = frequencies.len();
            let wrong = || self.wrong(&format!("{ROPE_FACTORS} is not {pairs} positive numbers"));
            if tensor.shape != [pairs] {
                return Err(wrong());
            }
            let factors = self.read(tensor, None)?.to_f32();
            if !factors.iter().all(|f| *f > 0.0) {
                return Err(wrong());
            }
            frequencies.iter_mut().zip(factors).for_each(|(f, factor)| *f /= factor);
        }
        Ok(config)
    }

    fn json(&self) -> Result<Value> {
        let (fields, kind) = (self.fields()?, self.kind.name());
        let key = |name: &str| format!("{kind}.{name}");
        let size = |name: &str| fields.size(&key(name));
        if fields.count_or(&key("expert_count"), 0)? > 0 {
            return Err(fields.wrong(&format!("{kind}.expert_count: experts are not implemented")));
        }
        let (hidden, layers) = (size("embedding_length")?, size("block_count")?);
        let heads = size("attention.head_count")?;
        let head_dim = fields.size_or(&key("attention.key_length"), (hidden / heads).max(1))?;
        for name in ["attention.value_length", "rope.dimension_count"] {
            let other = fields.size_or(&key(name), head_dim)?;
            if other != head_dim {
                let what = format!("{kind}.{name} {other} is not the {head_dim} elements of a head");
                return Err(fields.wrong(&what));
            }
        }
        let vocab = self.tensors.get("token_embd.weight").and_then(|t| t.shape.first());
        let vocab = vocab.ok_or_else(|| fields.wrong("tensor token_embd.weight is missing"))?;
        let has = |name: &str| self.tensors.contains_key(name);
        let optional = |name: &str| fields.get(&key(name)).cloned();
        let mut config = json!({
            "hidden_size": hidden,
            "intermediate_size": size("feed_forward_length")?,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": fields.size_or(&key("attention.head_count_kv"), heads)?,
            "head_dim": head_dim,
            "max_position_embeddings": size("context_length")?,
            "rms_norm_eps": fields.number(&key("attention.layer_norm_rms_epsilon"))?,
            "rope_theta": optional("rope.freq_base"),
            "rope_scaling": self.rope_scaling(&fields)?,
            "vocab_size": vocab,
            "tie_word_embeddings": !has("output.weight"),
            "attention_bias": has("blk.0.attn_q.bias"),
            "mlp_bias": has("blk.0.ffn_gate.bias"),
            "eos_token_id": stop_tokens(&fields)?,
        });
        let more = match self.kind {
            Kind::Llama => json!({ "architectures": ["LlamaForCausalLM"] }),
            Kind::Gemma3 => json!({
                "architectures": ["Gemma3ForCausalLM"],
                "rope_local_base_freq": optional("rope.freq_base_swa"),
                "sliding_window": size("attention.sliding_window")?,
                "sliding_window_pattern": optional("attention.sliding_window_pattern"),
                "query_pre_attn_scalar": if layers == LAYERS_OF_27B { hidden / heads } else { head_dim },
                "attn_logit_softcapping": optional("attn_logit_softcapping"),
                "final_logit_softcapping": optional("final_logit_softcapping"),
            }),
        };
        let (Value::Object(config_map), Value::Object(more)) = (&mut config, more) else {
            unreachable!("both are objects")
        };
        config_map.extend(more);
        Ok(config)
    }

    /// Returns the field `rope_scaling`.
    fn rope_scaling(&self, fields: &Fields<'_>) -> Result<Value> {
        let kind = self.kind.name();
        let key = |name: &str| format!("{kind}.rope.{name}");
        match fields.text(&key("scaling.type"))? {
            None if fields.get(&key("scale_linear")).is_none() => Ok(Value::Null),
            None => Ok(json!({ "type": "linear", "factor": fields.number(&key("scale_linear"))? })),
            Some("none") => Ok(Value::Null),
            Some("linear") => Ok(json!({ "type": "linear", "factor": fields.number(&key("scaling.factor"))? })),
            Some(other) => {
                Err(fields
                    .wrong(&format!("{} {other:?} is not implemented, only none and linear", key("scaling.type"))))
            }
        }
    }
}

/// Returns the tokens that end a text, a turn or a message.
fn stop_tokens(fields: &Fields<'_>) -> Result<Vec<u32>> {
    let mut stop = Vec::new();
    for name in ["eos", "eot", "eom"] {
        stop.extend(fields.tokens(&format!("tokenizer.ggml.{name}_token_id"))?);
    }
    Ok(stop)
}
