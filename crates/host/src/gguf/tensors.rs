//! Tensors by the names of published checkpoints. llama.cpp's converter changes two things, which this module undoes:
//! in llama files the rows of q and k are ordered for adjacent pairs of rotating elements, and gemma3 files store the
//! weights of norms, not their difference from 1.

use std::os::unix::fs::FileExt;

use bytemuck::Pod;
use half::{bf16, f16};
use rayon::prelude::*;

use super::quants::Quant;
use super::{Gguf, Kind, Tensor};
use crate::error::Result;
use crate::matrix::Numbers;
use crate::source::Source;

/// Bytes of a task of dequantisation, at least.
const TASK_BYTES: usize = 1 << 16;

impl Source for &Gguf {
    fn numbers(&mut self, name: &str, shape: &[usize]) -> Result<Numbers> {
        self.tensor(name, shape)
    }
}

impl Gguf {
    /// Reads and dequantises a tensor, named as in published checkpoints.
    fn tensor(&self, name: &str, shape: &[usize]) -> Result<Numbers> {
        let own = self.own_name(name);
        let missing = || self.wrong(&format!("tensor {} is missing", own.as_deref().unwrap_or(name)));
        let tensor = own.as_ref().and_then(|own| self.tensors.get(own)).ok_or_else(missing)?;
        if tensor.shape != shape {
            return Err(
                self.wrong(&format!("tensor {name} has shape {:?}, but the metadata implies {shape:?}", tensor.shape))
            );
        }
        let numbers = self.read(tensor, self.pairs(name, shape[0])?)?;
        if self.kind != Kind::Gemma3 || !name.ends_with("norm.weight") {
            return Ok(numbers);
        }
        // The file has one plus the published weight.
        Ok(Numbers::F32(numbers.to_f32().into_iter().map(|w| w - 1.0).collect()))
    }

    /// Returns the number of pairs of rotating elements in a head, if the tensor's rows are ordered by them.
    fn pairs(&self, name: &str, rows: usize) -> Result<Option<usize>> {
        let (fields, heads) = (self.fields()?, "llama.attention.head_count");
        let heads = match name.rsplit('.').nth(1) {
            _ if self.kind != Kind::Llama => return Ok(None),
            Some("q_proj") => fields.size(heads)?,
            Some("k_proj") => fields.size_or("llama.attention.head_count_kv", fields.size(heads)?)?,
            _ => return Ok(None),
        };
        Ok(Some((rows / heads / 2).max(1)))
    }

    /// Returns llama.cpp's name of a tensor.
    fn own_name(&self, name: &str) -> Option<String> {
        let (module, parameter) = name.rsplit_once('.')?;
        let own = match module {
            "model.embed_tokens" => "token_embd".to_owned(),
            "model.norm" => "output_norm".to_owned(),
            "lm_head" => "output".to_owned(),
            _ => {
                let (layer, part) = module.strip_prefix("model.layers.")?.split_once('.')?;
                let part = match (part, self.kind) {
                    ("input_layernorm", _) => "attn_norm",
                    ("self_attn.q_proj", _) => "attn_q",
                    ("self_attn.k_proj", _) => "attn_k",
                    ("self_attn.v_proj", _) => "attn_v",
                    ("self_attn.o_proj", _) => "attn_output",
                    ("self_attn.q_norm", _) => "attn_q_norm",
                    ("self_attn.k_norm", _) => "attn_k_norm",
                    ("post_attention_layernorm", Kind::Gemma3) => "post_attention_norm",
                    ("post_attention_layernorm" | "pre_feedforward_layernorm", _) => "ffn_norm",
                    ("post_feedforward_layernorm", _) => "post_ffw_norm",
                    ("mlp.gate_proj", _) => "ffn_gate",
                    ("mlp.up_proj", _) => "ffn_up",
                    ("mlp.down_proj", _) => "ffn_down",
                    _ => return None,
                };
                format!("blk.{layer}.{part}")
            }
        };
        Some(format!("{own}.{parameter}"))
    }

    /// Reads a tensor as llama.cpp orders it, or the rows of heads with this number of `pairs` in the order of
    /// published checkpoints: the first elements of all pairs, then the second ones.
    pub(super) fn read(&self, tensor: &Tensor, pairs: Option<usize>) -> Result<Numbers> {
        let two = |bytes: &[u8]| [bytes[0], bytes[1]];
        match tensor.quant {
            Quant::F16 => Ok(Numbers::F16(self.rows(tensor, pairs, |bytes, row: &mut [f16]| {
                row.iter_mut().zip(bytes.chunks_exact(2)).for_each(|(x, b)| *x = f16::from_le_bytes(two(b)));
            })?)),
            Quant::BF16 => Ok(Numbers::Bf16(self.rows(tensor, pairs, |bytes, row: &mut [bf16]| {
                row.iter_mut().zip(bytes.chunks_exact(2)).for_each(|(x, b)| *x = bf16::from_le_bytes(two(b)));
            })?)),
            quant => Ok(Numbers::F32(self.rows(tensor, pairs, |bytes, row| quant.decode(bytes, row))?)),
        }
    }

    fn rows<T: Pod + Send>(
        &self,
        tensor: &Tensor,
        pairs: Option<usize>,
        decode: impl Fn(&[u8], &mut [T]) + Sync,
    ) -> Result<Vec<T>> {
        let (block, bytes) = tensor.quant.block();
        let cols = match tensor.shape[..] {
            // The elements of a bias are rows of one element.
            [_] if pairs.is_some() && block == 1 => 1,
            [_] if pairs.is_some() => {
                return Err(self.wrong(&format!("a bias in {} is not implemented", tensor.quant)));
            }
            [] => 1,
            [.., cols] => cols,
        };
        let row_bytes = cols / block * bytes;
        let mut numbers = bytemuck::zeroed_vec(tensor.shape.iter().product());
        if numbers.is_empty() {
            return Ok(numbers);
        }
        let task = TASK_BYTES.div_ceil(row_bytes);
        let read = |bytes: &mut Vec<u8>, (first, rows): (usize, &mut [T])| -> Result<()> {
            for (i, row) in rows.chunks_exact_mut(cols).enumerate() {
                let place = source_row(first * task + i, pairs) * row_bytes;
                self.file
                    .read_exact_at(bytes, tensor.start + place as u64)
                    .map_err(|e| self.wrong(&format!("cannot read the file: {e}")))?;
                decode(bytes, row);
            }
            Ok(())
        };
        let tasks = numbers.par_chunks_mut(task * cols).enumerate();
        tasks.try_for_each_init(|| vec![0; row_bytes], read)?;
        Ok(numbers)
    }
}

/// Returns the row of the file that is row `row` of a published checkpoint.
fn source_row(row: usize, pairs: Option<usize>) -> usize {
    let Some(pairs) = pairs else { return row };
    let (head, half, pair) = (row / (2 * pairs), row / pairs % 2, row % pairs);
    (head * pairs + pair) * 2 + half
}

#[cfg(test)]
mod tests {
    use super::source_row;

    #[test]
    fn rows_of_pairs_are_put_apart() {
        let rows: Vec<_> = (0..12).map(|row| source_row(row, Some(3))).collect();
        assert_eq!(rows, [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]);
    }
}
