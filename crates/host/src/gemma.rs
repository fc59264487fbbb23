//! Config fields that only Gemma 3 and Gemma 4 have.

use serde_json::Value;

use crate::error::Result;
use crate::family::Family;
use crate::fields::{Fields, is_set};

/// Default number of query heads, which published configs of Gemma 3 omit.
pub const Q_HEADS: usize = 8;
/// Default number of heads of K and V.
pub const KV_HEADS: usize = 4;
/// Default number of tokens of Gemma 3's vocabulary.
pub const VOCAB: usize = 262_208;
/// Default of Gemma 4's `hidden_size_per_layer_input`.
const PER_LAYER_INPUT: usize = 256;

/// The heads of Gemma 4's layers with a window.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WindowHeads {
    /// Heads of K and V.
    pub kv_heads: usize,
    /// Elements of one head.
    pub head_dim: usize,
}

/// Rejects options that change the forward pass and are not implemented.
///
/// # Errors
/// An unsupported option is set.
pub fn check(fields: &Fields<'_>, family: Family) -> Result<()> {
    let unsupported: &[&str] = match family {
        Family::Gemma4 => &[
            "enable_moe_block",
            "hidden_size_per_layer_input",
            "num_kv_shared_layers",
            "per_layer_config",
            "use_bidirectional_attention",
        ],
        _ => &["attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"],
    };
    // Text has causal attention even if images do not.
    let is_unset =
        |name: &str, value: &Value| !is_set(value) || (name == "use_bidirectional_attention" && value == "vision");
    for name in unsupported {
        if let Some(value) = fields.get(name).filter(|value| !is_unset(name, value)) {
            return Err(fields.wrong(&format!("{name} {value} is not implemented")));
        }
    }
    let name = "hidden_size_per_layer_input";
    if family == Family::Gemma4 && fields.get(name).is_none() {
        let what = format!("{name} is missing, and its default {PER_LAYER_INPUT} is not implemented");
        return Err(fields.wrong(&what));
    }
    Ok(())
}

/// Returns the kv heads of Gemma 4's layers without a window, the elements of a head, and whether these layers compute
/// V from the product for K. `windows` contains the kv heads of the other layers, and the elements of a head.
///
/// # Errors
/// A field is not valid.
pub fn full_heads(fields: &Fields<'_>, windows: (usize, usize)) -> Result<(usize, usize, bool)> {
    let k_is_v = fields.flag("attention_k_eq_v")?;
    let kv_heads = if k_is_v { fields.size_or("num_global_key_value_heads", windows.0)? } else { windows.0 };
    Ok((kv_heads, fields.size_or("global_head_dim", 512)?, k_is_v))
}

/// Returns the soft cap of Gemma 4's logits, if it has one.
///
/// # Errors
/// The cap is not a number above 0.
pub fn logit_cap(fields: &Fields<'_>, family: Family) -> Result<Option<f32>> {
    let name = "final_logit_softcapping";
    if family != Family::Gemma4 || fields.get(name).is_none() {
        return Ok(None);
    }
    match fields.number(name)? {
        cap if cap > 0.0 => Ok(Some(cap as f32)),
        cap => Err(fields.wrong(&format!("{name} {cap} is not above 0"))),
    }
}
