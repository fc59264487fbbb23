//! candle's own models, which use `kvarena-candle` for K and V. Each model is a source file of candle; the build script
//! applies a patch from `patches/` to it. [`serve`](mod@serve) runs the models; the programs `chat` and `batch` are
//! examples.

pub mod chat;
pub mod config;
pub mod contiguous;
pub mod serve;
pub mod text;

/// candle's unpatched models with candle's caches, the baseline of `batch` and of the examples.
#[allow(clippy::all, missing_docs, dead_code, unexpected_cfgs)]
pub mod models {
    pub mod gemma3 {
        include!(concat!(env!("OUT_DIR"), "/gemma3.rs"));
    }
    pub mod llama {
        include!(concat!(env!("OUT_DIR"), "/llama.rs"));
    }
    pub mod qwen3 {
        include!(concat!(env!("OUT_DIR"), "/qwen3.rs"));
    }
    pub mod with_tracing {
        include!(concat!(env!("OUT_DIR"), "/with_tracing.rs"));
    }
}

/// The patched models: K and V are in pages of an arena.
#[allow(clippy::all, missing_docs, dead_code, unexpected_cfgs)]
pub mod paged {
    pub mod gemma3 {
        include!(concat!(env!("OUT_DIR"), "/paged_gemma3.rs"));
    }
    pub mod llama {
        include!(concat!(env!("OUT_DIR"), "/paged_llama.rs"));
    }
    pub mod qwen3 {
        include!(concat!(env!("OUT_DIR"), "/paged_qwen3.rs"));
    }
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

use config::Family;
use config::{Config, ConfigError};
use paged::{gemma3, llama, qwen3};

/// An error of [`load`], [`read_config`], [`weights`] or [`Contiguous::load`](contiguous::Contiguous::load).
#[derive(Debug)]
pub enum LoadError {
    /// `config.json`, `generation_config.json` or the folder could not be read.
    File(String, io::Error),
    /// `config.json` does not describe a supported model.
    Config(ConfigError),
    /// candle could not read the weights, or rejected them.
    Candle(candle::Error),
}

impl std::fmt::Display for LoadError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::File(path, error) => write!(f, "{path}: {error}"),
            Self::Config(error) => write!(f, "config.json: {error}"),
            Self::Candle(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for LoadError {}

impl From<ConfigError> for LoadError {
    fn from(error: ConfigError) -> Self {
        Self::Config(error)
    }
}

impl From<candle::Error> for LoadError {
    fn from(error: candle::Error) -> Self {
        Self::Candle(error)
    }
}

/// Runs a program. Prints its error as text and returns its exit code.
pub fn run(name: &str, program: impl FnOnce() -> Result<(), Box<dyn std::error::Error>>) -> ExitCode {
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
    match gpu {
        true => Ok((Device::new_cuda_with_stream(0)?, DType::BF16)),
        false => Ok((Device::Cpu, DType::F32)),
    }
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
pub fn load(folder: &Path, dtype: DType, device: &Device) -> Result<Loaded, LoadError> {
    let (config, text) = read_config(folder)?;
    let mut end = config::end_tokens(&config.of()?);
    end.extend(config::end_tokens(&generation_config(folder)?));
    let vb = weights(folder, dtype, device)?;
    let model = match config.family {
        Family::Qwen3 => Model::Qwen3(qwen3::ModelForCausalLM::new(&config.of()?, vb)?),
        Family::Llama => {
            let config = config.of::<llama::LlamaConfig>()?.into_config(false);
            let cache = llama::Cache::new(dtype, &config, device)?;
            Model::Llama(llama::Llama::load(vb, &config)?, cache)
        }
        Family::Gemma3 => Model::Gemma3(gemma3::Model::new(&config.of()?, vb)?),
    };
    let pool = PoolConfig::from_hf(&text).map_err(|error| LoadError::Config(error.into()))?;
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
/// [`LoadError::File`] or [`LoadError::Config`].
pub fn read_config(folder: &Path) -> Result<(Config, String), LoadError> {
    let path = folder.join("config.json");
    let text = fs::read_to_string(&path).map_err(|error| LoadError::File(path.display().to_string(), error))?;
    Ok((Config::parse(&text).map_err(LoadError::Config)?, text))
}

/// Returns a folder's `generation_config.json`, or null if there is none.
fn generation_config(folder: &Path) -> Result<serde_json::Value, LoadError> {
    let path = folder.join("generation_config.json");
    let named = |error| LoadError::File(path.display().to_string(), error);
    match fs::read_to_string(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(serde_json::Value::Null),
        text => serde_json::from_str(&text.map_err(named)?).map_err(|error| named(error.into())),
    }
}

/// Maps a folder's weights into memory.
///
/// # Errors
/// [`LoadError::File`] if the folder cannot be listed, otherwise [`LoadError::Candle`].
pub fn weights(folder: &Path, dtype: DType, device: &Device) -> Result<VarBuilder<'static>, LoadError> {
    let named = |error| LoadError::File(folder.display().to_string(), error);
    let entries = fs::read_dir(folder).map_err(named)?;
    let mut files = entries.map(|entry| Ok(entry?.path())).collect::<io::Result<Vec<_>>>().map_err(named)?;
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
