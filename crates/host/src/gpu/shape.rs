//! Checks which models and pools the kernels support.

use kvarena::KvDtype;

use super::delta::check_sizes;
use super::error::GpuError;
use super::kernels::ROUTED_MAX;
use crate::config::ModelConfig;
use crate::family::Family;

/// The widest row that a block of 1,024 threads can norm.
const HIDDEN_MAX: usize = 8192;

/// Rejects models that the kernels do not support.
///
/// # Errors
/// The kernels do not support a property, which the error names.
pub fn check_shape(config: &ModelConfig) -> Result<(), GpuError> {
    let missing = |what| Err(GpuError::Missing { what });
    match config.family {
        Family::Llama | Family::Qwen3 | Family::GptOss | Family::Gemma3 | Family::Qwen3_5 => {}
        Family::DeepseekV3 => return missing("a latent attention"),
        Family::Gemma4 => return missing("layers of several shapes"),
        Family::Llama4 => return missing("layers without rotary positions"),
    }
    if let Some(delta) = &config.delta {
        check_sizes(delta)?;
    }
    if config.experts.is_some_and(|experts| experts.count > ROUTED_MAX) {
        return missing("a layer of so many experts");
    }
    let (head_dim, group) = (config.head_dim, config.q_heads / config.kv_heads);
    if ![64, 128, 256].contains(&head_dim) || group > 16 {
        return Err(GpuError::Heads { head_dim, group });
    }
    let ModelConfig { hidden, intermediate, vocab, .. } = *config;
    let width = |name, value, wanted| Err(GpuError::Width { name, value, wanted });
    if !hidden.is_multiple_of(8) || hidden > HIDDEN_MAX {
        return width("hidden_size", hidden, "a multiple of 8 up to 8,192");
    }
    if !intermediate.is_multiple_of(8) {
        return width("intermediate_size", intermediate, "a multiple of 8");
    }
    if !vocab.is_multiple_of(8) {
        return width("vocab_size", vocab, "a multiple of 8");
    }
    if config.family.gates_attention() && config.attention_bias {
        return missing("a bias of gated attention");
    }
    if config.mlp_bias {
        return missing("a bias of an MLP");
    }
    Ok(())
}

/// Rejects pools of types other than bf16 and fp8. The activations are bf16.
///
/// # Errors
/// The pool has another type.
pub fn check_dtype(dtype: KvDtype) -> Result<(), GpuError> {
    match dtype {
        KvDtype::Bf16 | KvDtype::Fp8E4M3 => Ok(()),
        _ => Err(GpuError::Missing { what: "a cache of another type than bf16 or fp8" }),
    }
}
