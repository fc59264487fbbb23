//! candle's own models with their own caches, which run one text after the other. `batch` compares
//! them with the arena.

use std::path::Path;

use candle::{D, DType, Device, Tensor};

use crate::config::Family;
use crate::models::{gemma3, llama, qwen3};
use crate::{Outcome, read_config, weights};

/// One of candle's models with its cache.
pub enum Contiguous {
    Qwen3(qwen3::ModelForCausalLM),
    Llama(Box<llama::Llama>, llama::Config, DType, Device, Option<llama::Cache>),
    Gemma3(gemma3::Model),
}

impl Contiguous {
    /// Loads a folder like [`load`](crate::load).
    ///
    /// # Errors
    /// The errors of [`load`](crate::load).
    pub fn load(folder: &Path, dtype: DType, device: &Device) -> Outcome<Self> {
        let (config, _) = read_config(folder)?;
        let vb = weights(folder, dtype, device)?;
        Ok(match config.family {
            Family::Qwen3 => Self::Qwen3(qwen3::ModelForCausalLM::new(&config.typed()?, vb)?),
            Family::Llama => {
                let config = config.typed::<llama::LlamaConfig>()?.into_config(false);
                let model = Box::new(llama::Llama::load(vb, &config)?);
                Self::Llama(model, config, dtype, device.clone(), None)
            }
            Family::Gemma3 => Self::Gemma3(gemma3::Model::new(false, &config.typed()?, vb)?),
        })
    }

    /// Returns the likeliest tokens after a prompt: `new` tokens, or fewer if one of them is in `end`. `device` is the
    /// model's device.
    ///
    /// # Errors
    /// candle's errors.
    pub fn generate(&mut self, device: &Device, prompt: &[u32], new: usize, end: &[u32]) -> candle::Result<Vec<u32>> {
        self.clear()?;
        let (mut tokens, mut text) = (prompt.to_vec(), Vec::new());
        let mut cached = 0;
        while text.len() < new {
            let input = Tensor::new(&tokens[cached..], device)?.unsqueeze(0)?;
            let token = self.logits(&input, cached)?.argmax(D::Minus1)?.to_scalar::<u32>()?;
            cached = tokens.len();
            tokens.push(token);
            text.push(token);
            if end.contains(&token) {
                break;
            }
        }
        Ok(text)
    }

    /// Empties the cache.
    ///
    /// # Errors
    /// candle's errors.
    pub fn clear(&mut self) -> candle::Result<()> {
        match self {
            Self::Qwen3(model) => model.clear_kv_cache(),
            Self::Llama(_, config, dtype, device, cache) => {
                *cache = Some(llama::Cache::new(true, *dtype, config, device)?);
            }
            Self::Gemma3(model) => model.clear_kv_cache(),
        }
        Ok(())
    }

    /// Returns the logits `[vocab]` after tokens `[1, new]` that follow `offset` cached tokens.
    /// Clear the cache before the first call.
    ///
    /// # Errors
    /// candle's errors.
    ///
    /// # Panics
    /// If a Llama's cache was never cleared.
    pub fn logits(&mut self, input: &Tensor, offset: usize) -> candle::Result<Tensor> {
        let logits = match self {
            Self::Qwen3(model) => model.forward(input, offset),
            Self::Llama(model, _, _, _, cache) => model.forward(input, offset, cache.as_mut().expect("cleared first")),
            Self::Gemma3(model) => model.forward(input, offset),
        }?;
        logits.flatten_all()
    }
}
