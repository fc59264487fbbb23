//! candle's own models, which use `kvarena-candle` for K and V. Each model is a source file of candle; the build script
//! applies a patch from `patches/` to it. [`serve`](mod@serve) runs the models; the programs `chat` and `batch` are
//! examples.

pub mod chat;
pub mod config;
pub mod contiguous;
pub mod serve;

macro_rules! modules {
    ($prefix:literal: $($name:ident)*) => {
        $(pub mod $name {
            include!(concat!(env!("OUT_DIR"), "/", $prefix, stringify!($name), ".rs"));
        })*
    };
}

/// candle's unpatched models with candle's caches, the baseline of `batch` and of the example.
#[allow(clippy::all, missing_docs, dead_code, unexpected_cfgs)]
pub mod models {
    modules! { "": gemma3 llama qwen3 with_tracing }
}

/// The patched models: K and V are in pages of an arena.
#[allow(clippy::all, missing_docs, dead_code, unexpected_cfgs)]
pub mod paged {
    modules! { "paged_": gemma3 llama qwen3 }
}

#[allow(clippy::all, dead_code)]
mod utils {
    include!(concat!(env!("OUT_DIR"), "/utils.rs"));
}

use std::path::Path;
use std::process::ExitCode;
use std::{fs, io};

use candle::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use kvarena::{Capacity, EngineConfig, KvDtype, PoolConfig};
use kvarena_candle::Step;

use config::{Config, Family};
use paged::{gemma3, llama, qwen3};

/// The result of functions whose errors are sentences for the user.
pub type Outcome<T = ()> = Result<T, Box<dyn std::error::Error>>;

/// Runs a program. Prints its error as text and returns its exit code.
pub fn run(name: &str, program: impl FnOnce() -> Outcome) -> ExitCode {
    match program() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{name}: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Returns a device, and the dtype of weights there: bf16 on the first GPU, f32 on the CPU.
///
/// # Errors
/// If `gpu` is set: candle's error if there is no GPU, or if feature `cuda` is off.
pub fn device(gpu: bool) -> candle::Result<(Device, DType)> {
    if gpu { Ok((Device::new_cuda_with_stream(0)?, DType::BF16)) } else { Ok((Device::Cpu, DType::F32)) }
}

/// One of the served models, with its weights.
pub enum Model {
    Qwen3(qwen3::ModelForCausalLM),
    Llama(llama::Llama, llama::Cache),
    Gemma3(gemma3::Model),
}

/// A loaded model.
pub struct Loaded {
    pub model: Model,
    /// Config of the pool, with a capacity of 0 pages, which the caller must replace. [`Loaded::arena`] does so.
    pub pool: PoolConfig,
    /// The tokens that end a text.
    pub end: Vec<u32>,
}

impl Loaded {
    /// Returns the config of an arena in which sequences of these lengths fit together, in steps of at most
    /// `step_tokens` tokens. Each group of layers has pages of its own, so a model with groups needs several pages for
    /// the same tokens.
    ///
    /// # Errors
    /// The core does not support the model's pool or the number of tokens of a step.
    pub fn arena(
        &self,
        lens: impl IntoIterator<Item = usize>,
        step_tokens: u32,
    ) -> Result<EngineConfig, kvarena::ConfigError> {
        let pool = PoolConfig { page_size: 16, capacity: Capacity::Pages(1), ..self.pool };
        // A step computes at most this many tokens of a sequence ahead of its published ones.
        let (promise_ahead, max_step_tokens) = (step_tokens, step_tokens);
        let mut config = EngineConfig { promise_ahead, max_step_tokens, ..pool.into() };
        let shape = config.shape()?;
        let pages = |len: usize| shape.most_pages(u32::try_from(len).unwrap_or(u32::MAX));
        let pages = lens.into_iter().map(pages).fold(0, u64::saturating_add);
        config.pool.capacity = Capacity::Pages(u32::try_from(pages).unwrap_or(u32::MAX));
        Ok(config)
    }
}

/// Loads a folder in Hugging Face's form: `config.json` of transformers 4 or 5, `*.safetensors`, and the end tokens of
/// `generation_config.json` if there is one.
///
/// # Errors
/// A file cannot be read, the config lacks a key or is not supported, or candle rejects the weights.
pub fn load(folder: &Path, dtype: DType, device: &Device) -> Outcome<Loaded> {
    let (config, text) = read_config(folder)?;
    let mut end = config::end_tokens(&config.typed()?);
    end.extend(config::end_tokens(&generation_config(folder)?));
    let vb = weights(folder, dtype, device)?;
    let model = match config.family {
        Family::Qwen3 => Model::Qwen3(qwen3::ModelForCausalLM::new(&config.typed()?, vb)?),
        Family::Llama => {
            let config = config.typed::<llama::LlamaConfig>()?.into_config(false);
            let cache = llama::Cache::new(dtype, &config, device)?;
            Model::Llama(llama::Llama::load(vb, &config)?, cache)
        }
        Family::Gemma3 => Model::Gemma3(gemma3::Model::new(&config.typed()?, vb)?),
    };
    let pool = PoolConfig::from_hf(&text).map_err(|error| format!("config.json: {error}"))?;
    let dtype = match dtype {
        DType::BF16 => KvDtype::Bf16,
        DType::F16 => KvDtype::F16,
        _ => KvDtype::F32,
    };
    let pool = PoolConfig { dtype, capacity: Capacity::Pages(0), ..pool };
    Ok(Loaded { model, pool, end })
}

/// Reads a folder's config. Returns the parsed config and its text.
///
/// # Errors
/// The file cannot be read, or see [`Config::parse`].
pub fn read_config(folder: &Path) -> Outcome<(Config, String)> {
    let path = folder.join("config.json");
    let text = fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()))?;
    Ok((Config::parse(&text)?, text))
}

/// Returns a folder's `generation_config.json`, or null if there is none.
fn generation_config(folder: &Path) -> Outcome<serde_json::Value> {
    let path = folder.join("generation_config.json");
    let text = match fs::read_to_string(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(serde_json::Value::Null),
        text => text,
    };
    let parsed = text.and_then(|text| Ok(serde_json::from_str(&text)?));
    Ok(parsed.map_err(|error| format!("{}: {error}", path.display()))?)
}

/// Maps a folder's weights into memory.
///
/// # Errors
/// The folder cannot be listed, or candle's errors.
pub fn weights(folder: &Path, dtype: DType, device: &Device) -> Outcome<VarBuilder<'static>> {
    let entries =
        fs::read_dir(folder).and_then(|all| all.map(|entry| Ok(entry?.path())).collect::<io::Result<Vec<_>>>());
    let mut files = entries.map_err(|error| format!("{}: {error}", folder.display()))?;
    files.retain(|path| path.extension().is_some_and(|extension| extension == "safetensors"));
    files.sort();
    // SAFETY: as in every program that maps weights, the user must not change the files while they are mapped.
    Ok(unsafe { VarBuilder::from_mmaped_safetensors(&files, dtype, device) }?)
}

impl Model {
    /// Returns the logits after the last token of each item of a step, `[items, vocab]`.
    ///
    /// # Errors
    /// candle's errors, which include those of [`Step::attend`].
    pub fn forward(&self, step: &Step<'_>) -> candle::Result<Tensor> {
        match self {
            Self::Qwen3(model) => model.forward(step),
            Self::Llama(model, cache) => model.forward(step, cache),
            Self::Gemma3(model) => model.forward(step),
        }
    }
}
