//! Model families, which differ in the operations of their layers.

use serde_json::Value;

use crate::error::Result;
use crate::fields::Fields;

/// A family of models.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Family {
    /// `LlamaForCausalLM`
    Llama,
    /// `Qwen3ForCausalLM`: normalises each head of q and k.
    Qwen3,
    /// `DeepseekV3ForCausalLM`: latent attention, mixtures of experts.
    DeepseekV3,
    /// `GptOssForCausalLM`: sinks, windows, mixtures of experts.
    GptOss,
    /// `Gemma3ForCausalLM`, and the text model of `Gemma3ForConditionalGeneration`: windows with their own rope, and
    /// norms of outputs.
    Gemma3,
    /// `Gemma4ForCausalLM`, and the text model of `Gemma4ForConditionalGeneration`: like Gemma 3, but the layers
    /// without a window have other heads. The host implements no experts of this family.
    Gemma4,
    /// `Llama4ForCausalLM`, and the text model of `Llama4ForConditionalGeneration`: layers with rotary positions read
    /// chunks, the other layers read all tokens; mixtures of experts.
    Llama4,
    /// `Qwen3_5ForCausalLM`, and the text model of `Qwen3_5ForConditionalGeneration`: layers of Gated DeltaNet, and
    /// layers of attention whose output is gated and whose heads rotate in part.
    Qwen3_5,
}

impl Family {
    /// Returns whether the family has weights that normalise the heads of q and k. Llama 4 normalises without weights.
    pub fn norms_heads(self) -> bool {
        matches!(self, Self::Qwen3 | Self::Gemma3 | Self::Gemma4 | Self::Qwen3_5)
    }

    /// Returns whether the family normalises the outputs of attention and of the MLP.
    pub fn norms_outputs(self) -> bool {
        matches!(self, Self::Gemma3 | Self::Gemma4)
    }

    /// Returns whether checkpoints store the difference of a norm's weight from 1.
    pub fn centres_norms(self) -> bool {
        matches!(self, Self::Gemma3 | Self::Qwen3_5)
    }

    /// Returns whether q's projection also computes a gate of attention's output.
    pub fn gates_attention(self) -> bool {
        self == Self::Qwen3_5
    }

    /// Returns the name of the norm before the MLP.
    pub fn mlp_norm(self) -> &'static str {
        match self {
            Self::Gemma3 | Self::Gemma4 => "pre_feedforward_layernorm",
            _ => "post_attention_layernorm",
        }
    }

    /// Returns the family by the first name in `architectures`, or by `model_type` if there is no such name.
    ///
    /// # Errors
    /// Both are missing, `model_type` is not a text, or the family is not implemented.
    pub fn parse(fields: &Fields<'_>) -> Result<Self> {
        let named = fields.get("architectures").and_then(|list| list.get(0)).and_then(Value::as_str);
        let Some(name) = named.or(fields.text("model_type")?) else {
            return Err(fields.wrong("neither architectures nor model_type names the model's family"));
        };
        match name {
            "LlamaForCausalLM" | "llama" => Ok(Self::Llama),
            "Qwen3ForCausalLM" | "qwen3" => Ok(Self::Qwen3),
            "DeepseekV3ForCausalLM" | "deepseek_v3" => Ok(Self::DeepseekV3),
            "GptOssForCausalLM" | "gpt_oss" => Ok(Self::GptOss),
            "Gemma3ForCausalLM" | "Gemma3ForConditionalGeneration" | "gemma3_text" | "gemma3" => Ok(Self::Gemma3),
            "Gemma4ForCausalLM" | "Gemma4ForConditionalGeneration" | "gemma4_text" | "gemma4" => Ok(Self::Gemma4),
            "Llama4ForCausalLM" | "Llama4ForConditionalGeneration" | "llama4_text" | "llama4" => Ok(Self::Llama4),
            "Qwen3_5ForCausalLM" | "Qwen3_5ForConditionalGeneration" | "qwen3_5_text" | "qwen3_5" => Ok(Self::Qwen3_5),
            other => Err(fields.wrong(&format!(
                "architecture {other:?} is not implemented, only LlamaForCausalLM, Qwen3ForCausalLM, \
                 DeepseekV3ForCausalLM, GptOssForCausalLM, and Gemma3, Gemma4, Llama4 and Qwen3_5 ForCausalLM or \
                 ForConditionalGeneration"
            ))),
        }
    }
}
