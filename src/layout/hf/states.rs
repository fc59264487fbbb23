//! The parts of a layer's state, from the fields of the model families that have states.
//!
//! A state has a recurrent part in f32, or in the dtype that the file names, and the last inputs of a short convolution
//! in the dtype of the weights. Ranks split each part by heads; the channels of a state without heads are its heads.
//! Shapes are those of the families' code in Hugging Face transformers 5.24; where the file names no dtype of the
//! state, f32 is what vLLM and SGLang keep.

use super::kinds::Kinds;
use super::{Fields, HfError};
use crate::layout::dtype::KvDtype;
use crate::layout::groups::StatePart;

type Parts = Result<Vec<StatePart>, HfError>;

/// Returns the parts of a family's state from the bytes of an input.
type PartsOf = fn(&Fields<'_>, u32) -> Parts;

/// A field of each family with states, and the function of its parts.
const FAMILIES: [(&str, PartsOf); 6] = [
    ("linear_attn_config", |fields, bytes| fields.kimi_delta(bytes)),
    ("linear_num_value_heads", |fields, bytes| fields.gated_delta(bytes)),
    ("mamba_num_heads", |fields, bytes| fields.mamba2(&NEMOTRON, bytes)),
    ("mamba_n_heads", |fields, bytes| fields.mamba2(&MAMBA2, bytes)),
    ("mamba_d_state", |fields, bytes| fields.mamba1(bytes)),
    ("conv_L_cache", |fields, bytes| fields.convolution(bytes)),
];

/// The names of Mamba2's sizes: heads, their length, the size of a state, groups, and the kernel of the convolution.
type Mamba2Names = [&'static str; 5];

const NEMOTRON: Mamba2Names = ["mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel"];

/// Names in Granite 4, Bamba and Falcon-H1.
const MAMBA2: Mamba2Names = ["mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_n_groups", "mamba_d_conv"];

/// Fields with the dtype of the recurrent part.
const STATE_DTYPES: [&str; 2] = ["mamba_ssm_cache_dtype", "mamba_ssm_dtype"];

impl Fields<'_> {
    /// Returns the parts of a layer's state in a model whose weights have a dtype.
    pub(super) fn state_parts(&self, kinds: &Kinds, dtype: KvDtype) -> Parts {
        let family = FAMILIES.iter().find(|(field, _)| self.is_set(field));
        let mut parts = match family {
            Some((_, parts)) => parts(self, dtype.size())?,
            // MiniMax.
            None if kinds.field == "attn_type_list" => self.lightning()?,
            None => Vec::new(),
        };
        parts.retain(|part| part.head_bytes > 0);
        if parts.is_empty() { Err(self.refused(kinds.field)) } else { Ok(parts) }
    }

    /// Rejects fields that describe states if no layer keeps one.
    pub(super) fn check_stateless(&self, kinds: Option<&Kinds>) -> Result<(), HfError> {
        if kinds.is_some_and(Kinds::has_states) {
            return Ok(());
        }
        match FAMILIES.iter().find(|(field, _)| self.is_set(field)) {
            Some((field, _)) => Err(self.refused(field)),
            None => Ok(()),
        }
    }

    /// Qwen3-Next, Qwen3.5, OLMo Hybrid: a value head keeps keys x values. The inputs are q, k and v.
    fn gated_delta(&self, bytes: u32) -> Parts {
        let [key_heads, keys] = [self.size("linear_num_key_heads")?, self.size("linear_key_head_dim")?];
        let [value_heads, values] = [self.size("linear_num_value_heads")?, self.size("linear_value_head_dim")?];
        if !value_heads.is_multiple_of(key_heads) {
            let field = "linear_num_value_heads";
            return Err(self.unfit(field, &self.map[field], "a multiple of linear_num_key_heads"));
        }
        // A key head has the inputs of its value heads.
        let [of_keys, of_values] = [2 * u64::from(keys), u64::from(value_heads / key_heads) * u64::from(values)];
        let inputs = self.inputs("linear_conv_kernel_dim", bytes)?;
        Ok(vec![
            self.part_of("linear_key_head_dim", value_heads, &[keys.into(), values.into(), self.state_bytes()?])?,
            self.part_of("linear_key_head_dim", key_heads, &[of_keys + of_values, inputs])?,
        ])
    }

    /// Kimi Linear: as [`Fields::gated_delta`], with one length of all heads.
    fn kimi_delta(&self, bytes: u32) -> Parts {
        let Some(sizes) = self.linear_attention()? else { return Ok(Vec::new()) };
        let (heads, len) = (sizes.size("num_heads")?, u64::from(sizes.size("head_dim")?));
        let inputs = sizes.inputs("short_conv_kernel_size", bytes)?;
        Ok(vec![
            sizes.part_of("head_dim", heads, &[len, len, self.state_bytes()?])?,
            sizes.part_of("head_dim", heads, &[3, len, inputs])?,
        ])
    }

    /// A head keeps its length x the size of a state. The inputs are those of the heads, and B and C of each group.
    fn mamba2(&self, &[heads, head_dim, state, groups, kernel]: &Mamba2Names, bytes: u32) -> Parts {
        let (head_count, size) = (self.size(heads)?, u64::from(self.size(state)?));
        let is_auto = self.get(head_dim).is_none_or(|value| value == "auto");
        let len = if is_auto { self.mamba_width()? / head_count } else { self.size(head_dim)? };
        let inputs = self.inputs(kernel, bytes)?;
        Ok(vec![
            self.part_of(state, head_count, &[len.into(), size, self.state_bytes()?])?,
            self.part_of(heads, head_count, &[len.into(), inputs])?,
            self.part_of(groups, self.size(groups)?, &[2, size, inputs])?,
        ])
    }

    /// Jamba: a channel keeps the size of a state, and is an input.
    fn mamba1(&self, bytes: u32) -> Parts {
        let channels = self.mamba_width()?;
        let state = "mamba_d_state";
        Ok(vec![
            self.part_of(state, channels, &[self.size(state)?.into(), self.state_bytes()?])?,
            self.part_of(state, channels, &[self.inputs("mamba_d_conv", bytes)?])?,
        ])
    }

    /// LFM2: the inputs of a convolution, without a recurrent part.
    fn convolution(&self, bytes: u32) -> Parts {
        let inputs = self.inputs("conv_L_cache", bytes)?;
        Ok(vec![self.part_of("hidden_size", self.size("hidden_size")?, &[inputs])?])
    }

    /// MiniMax: a head keeps keys x values, without a convolution.
    fn lightning(&self) -> Parts {
        let (heads, len) = ("num_attention_heads", u64::from(self.head_dim()?));
        Ok(vec![self.part_of(heads, self.size(heads)?, &[len, len, self.state_bytes()?])?])
    }

    /// Returns the number of channels of a Mamba layer.
    fn mamba_width(&self) -> Result<u32, HfError> {
        let (expand, hidden) = (self.size("mamba_expand")?, self.size("hidden_size")?);
        let fits = expand.checked_mul(hidden);
        fits.ok_or_else(|| self.unfit("hidden_size", &self.map["hidden_size"], "below 2^32 with mamba_expand"))
    }

    /// Returns the bytes that a convolution with a kernel keeps of a channel: all inputs of the next token but the
    /// token itself.
    fn inputs(&self, kernel: &str, bytes: u32) -> Result<u64, HfError> {
        Ok(u64::from(self.size(kernel)? - 1) * u64::from(bytes))
    }

    /// Returns the bytes of an element of the recurrent part.
    fn state_bytes(&self) -> Result<u64, HfError> {
        let named = STATE_DTYPES.iter().find_map(|name| self.dtype_of(name));
        Ok(named.unwrap_or(Ok(KvDtype::F32))?.size().into())
    }

    /// Returns a part whose head has the product of some sizes in bytes. An error names a field.
    fn part_of(&self, field: &str, heads: u32, sizes: &[u64]) -> Result<StatePart, HfError> {
        let product = sizes.iter().try_fold(1_u64, |product, &size| product.checked_mul(size));
        match product.and_then(|bytes| u32::try_from(bytes).ok()) {
            Some(head_bytes) => Ok(StatePart { heads, head_bytes }),
            None => Err(self.unfit(field, &self.map[field], "small enough for a head of less than 4 GiB")),
        }
    }
}
