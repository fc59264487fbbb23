//! Converts the command line to a model, an engine's config and the options of serving.

use std::path::{Path, PathBuf};

use kvarena::config::PrefixMode;
use kvarena::layout::{Groups, KvScales, Scaling};
use kvarena::{Capacity, CpuOptions, EngineConfig, EngineError, KvDtype, PoolConfig};
use serde_json::{Value, json};

use crate::args::{Args, BackendName, Shape, Switch};
use crate::built_in;
use crate::http::announcer::{EVENT_PAGES_MAX, HASHING};
use crate::http::options::GenerationConfig;
use kvarena_host::calibrate;
use kvarena_host::config::ModelConfig;
use kvarena_host::draft::Drafting;
use kvarena_host::error::{Error, Result, with_cause};
use kvarena_host::generation::Generation;
use kvarena_host::gguf::is_gguf;
use kvarena_host::model::Model;
use kvarena_host::model_files::ModelFiles;
use kvarena_host::request::Defaults;
use kvarena_host::sample::Sampling;
use kvarena_host::server::Policy;
use kvarena_host::source::Random;
use kvarena_host::template::Template;
use kvarena_host::text::Text;

/// Maximum number of bytes of K and V on the CPU, if the command line gives no number of pages.
pub const POOL_BYTES: u64 = 1 << 30;

/// Maximum number of unfinished steps; a fork waits if no step is available.
const STEPS_MAX: u32 = 1024;

/// Opens the files of the model, if any, and reads all but its weights: its shape, its tokenizer and its chat template.
///
/// # Errors
/// The model or the template of the command line cannot be used.
pub fn model_files(args: &Args) -> Result<(Unread, Text)> {
    let open = |dir: &PathBuf| check_dir(dir).and_then(|()| ModelFiles::open(dir));
    let files = args.model.as_ref().map(open).transpose()?;
    let mut template = None;
    if let Some(file) = &args.chat_template {
        let tokens = files.as_ref().map(ModelFiles::special_tokens).transpose()?;
        template = Some(Template::from_file(file, &tokens.unwrap_or_default())?);
    }
    let (config, text) = match (&files, args.random_model) {
        (_, Some(shape)) => (config_of(shape)?, Text::without_tokenizer(template)),
        (Some(files), None) => {
            let config = files.config()?;
            let text = files.text(config.vocab, template)?;
            (config, text)
        }
        (None, None) => {
            let config = built_in::config()?;
            let text = built_in::text(config.vocab, template)?;
            (config, text)
        }
    };
    Ok((Unread { files, config }, text))
}

/// A model whose weights are not read yet.
pub struct Unread {
    /// The files; `None` for a random or the built-in model.
    pub files: Option<ModelFiles>,
    /// The shape.
    pub config: ModelConfig,
}

impl Unread {
    /// Reads the weights of the model, or generates random ones.
    ///
    /// # Errors
    /// The weights cannot be read or do not fit the shape.
    pub fn model(&self, args: &Args) -> Result<Model> {
        let config = self.config.clone();
        match &self.files {
            _ if args.random_model.is_some() => Model::build(config, &mut Random { seed: args.seed }),
            Some(files) => Model::build(config, &mut *files.weights()?),
            None => Model::build(config, &mut built_in::checkpoint()?),
        }
    }
}

/// Checks that a path is a model directory or a GGUF file.
///
/// # Errors
/// It is neither; the message contains the next step.
fn check_dir(path: &Path) -> Result<()> {
    let shown = path.display();
    if path.join("config.json").exists() || (is_gguf(path) && path.is_file()) {
        return Ok(());
    }
    let inside = std::fs::read_dir(path).into_iter().flatten().flatten().map(|entry| entry.path());
    let what = if let Some(file) = inside.filter(|file| is_gguf(file)).min() {
        let file = file.display();
        format!("{shown} has GGUF files but no config.json: give one of them, such as --model {file}")
    } else if is_gguf(path) && !path.exists() {
        format!("there is no file {shown}: give the path of a GGUF file or of a model folder")
    } else if path.join("snapshots").is_dir() {
        format!("{shown} is a cache folder of the Hugging Face Hub: give a folder inside {shown}/snapshots")
    } else if path.is_dir() {
        format!("cannot read {shown}/config.json: give a model folder in the Hugging Face format")
    } else if path.exists() {
        format!("{shown} is a file: give the folder that contains it, with config.json and weights")
    } else if let Some(name) = hub_name(path) {
        format!(
            "there is no folder {shown}, and names of the Hugging Face Hub are not downloaded: run `hf download {shown} \
             --local-dir {name}`, then give --model {name}"
        )
    } else {
        format!("there is no folder {shown}: give a model folder in the Hugging Face format")
    };
    Err(Error::model(what))
}

/// Returns the second part of `OWNER/NAME`, unless a folder has the owner's name.
fn hub_name(path: &Path) -> Option<&str> {
    let (owner, name) = path.to_str()?.split_once('/')?;
    let is_part = |part: &str| {
        let is_plain = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
        part.starts_with(|c: char| c.is_ascii_alphanumeric()) && part.chars().all(is_plain)
    };
    (is_part(owner) && is_part(name) && !Path::new(owner).exists()).then_some(name)
}

/// Returns the config of a random model.
///
/// # Errors
/// None; all random models are valid.
pub fn config_of(shape: Shape) -> Result<ModelConfig> {
    ModelConfig::parse(Path::new("random model"), &json_of(shape))
}

fn json_of(shape: Shape) -> Value {
    let (qwen, llama, delta) = ("Qwen3ForCausalLM", "LlamaForCausalLM", "Qwen3_5ForCausalLM");
    let (architecture, layers, hidden, intermediate, heads, head_dim, vocab, positions) = match shape {
        Shape::Qwen3_0_6B => (qwen, 28, 1024, 3072, [16, 8], 128, 151_936, 40_960),
        Shape::Qwen3_8B => (qwen, 36, 4096, 12_288, [32, 8], 128, 151_936, 40_960),
        Shape::Llama3_1_8B => (llama, 32, 4096, 14_336, [32, 8], 128, 128_256, 131_072),
        // Its layers of Gated DeltaNet have the default sizes.
        Shape::Qwen3_5_9B => (delta, 32, 4096, 12_288, [16, 4], 256, 248_320, 262_144),
        Shape::Qwen3_5_9BAttention => (qwen, 32, 4096, 12_288, [16, 4], 256, 248_320, 262_144),
        Shape::LlamaTiny64 => (llama, 3, 256, 512, [4, 2], 64, 512, 2048),
    };
    let mut config = json!({
        "architectures": [architecture],
        "head_dim": head_dim,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "max_position_embeddings": positions,
        "num_attention_heads": heads[0],
        "num_hidden_layers": layers,
        "num_key_value_heads": heads[1],
        "rms_norm_eps": if shape == Shape::Llama3_1_8B { 1e-5 } else { 1e-6 },
        "rope_theta": if architecture == llama { 500_000 } else { 1_000_000 },
        "tie_word_embeddings": shape == Shape::Qwen3_0_6B,
        "vocab_size": vocab,
    });
    if shape == Shape::Llama3_1_8B {
        config["rope_scaling"] = json!({
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        });
    }
    config
}

/// Returns the engine's config from the command line. The pool has at most `pool_bytes` bytes, unless the command line
/// gives the number of pages or one page is larger.
///
/// # Errors
/// A size that the engine does not support, options that exclude each other, or an option that does not fit the model,
/// such as `--calibrate` for latent rows, which are scaled by token.
pub fn engine_config(args: &Args, model: &ModelConfig, pool_bytes: u64) -> Result<EngineConfig> {
    if args.calibrate.is_some() && model.latent.is_some() {
        return Err(Error::request(
            "--calibrate is not for models with latent attention: their rows have no static scales",
        ));
    }
    let dtype = if args.calibrate.is_some() { KvDtype::F32 } else { args.kv_dtype };
    let mut pool = PoolConfig {
        layers: model.layers as u32,
        groups: groups(args, model)?,
        shape: model.kv_shape(),
        dtype,
        scaling: if dtype.is_quantised() { args.kv_scales } else { Scaling::Static },
        page_size: args.page_size,
        // Two, because no sequence gets page 0 if layers keep a state.
        capacity: Capacity::Pages(2),
        layout: args.layout,
        ..PoolConfig::default()
    };
    if model.delta.is_some() {
        // Larger pages hold the state of a layer.
        pool.page_size = pool.page_size.max(pool.state_page_size(8).map_err(unusable)?);
        if args.http.kv_events.is_some() && pool.page_size != args.page_size {
            return Err(Error::request(format!("--kv-events needs --page-size {} for this model", pool.page_size)));
        }
    }
    let policy = policy(args, model)?;
    let promise_ahead = policy.promise_ahead(pool.page_size.max(1));
    let limits = EngineConfig { promise_ahead, ..EngineConfig::from(pool) };
    let limits = limits.shape().map_err(unusable)?;
    let usual = || {
        let longest = limits.most_pages(model.max_len as u32);
        let pages = u64::from(args.concurrency).saturating_mul(longest);
        let most = pool_bytes / limits.layout.page_bytes();
        u32::try_from(pages.min(most).max(1)).unwrap_or(u32::MAX)
    };
    let pages = args.pages.unwrap_or_else(usual);
    pool.capacity = Capacity::Pages(pages);
    let off = args.no_prefix || args.prefix == Switch::Off;
    pool.swap_pages = swap_pages(args, limits.layout.page_bytes(), off)?;
    let events = args.http.kv_events.is_some();
    if events && off {
        return Err(Error::request("--kv-events needs --prefix on: without it, nothing is cached"));
    }
    let mut config = EngineConfig {
        prefix: if off { PrefixMode::None } else { PrefixMode::Radix },
        hashing: events.then_some(HASHING),
        event_pages: if events { pages.min(EVENT_PAGES_MAX) } else { 0 },
        event_cells: args.http.kv_events_groups,
        max_sequences: args.concurrency,
        max_sequence_len: model.max_len as u32,
        // Every fork with a partial page is a separate step, so one batch may need many steps.
        max_steps: args.concurrency.saturating_add(4).min(STEPS_MAX),
        max_step_tokens: policy.step_tokens(),
        promise_ahead,
        ..EngineConfig::from(pool)
    };
    args.cache.config(args, &mut config)?;
    let sequence_len = config.shape().map_err(unusable)?.max_sequence_len;
    config.max_tokens = u64::from(args.concurrency) * u64::from(sequence_len);
    config.shape().map_err(unusable)?;
    Ok(config)
}

/// Returns the number of swap pages.
///
/// # Errors
/// A size that is not positive, is infinite or is less than a page, or `--prefix off`.
fn swap_pages(args: &Args, page_bytes: u64, prefix_off: bool) -> Result<u32> {
    let Some(gib) = args.swap_space else { return Ok(0) };
    if !(gib > 0.0 && gib.is_finite()) {
        return Err(Error::request(format!("--swap-space {gib} is not above 0")));
    }
    if prefix_off {
        return Err(Error::request("--swap-space needs --prefix on: without it, nothing is cached"));
    }
    let pages = gib * (1_u64 << 30) as f64 / page_bytes as f64;
    if pages < 1.0 {
        let what = format!("--swap-space {gib} GiB is less than a page of {page_bytes} bytes");
        return Err(Error::request(what));
    }
    Ok(pages as u32)
}

/// Returns the groups of layers: the model's, unless the command line disables them. Sparse reads require layers that
/// keep all tokens.
///
/// # Errors
/// `--groups on` with `--sparse`, or an option that needs layers of one shape for a model with layers of two shapes.
fn groups(args: &Args, model: &ModelConfig) -> Result<Groups> {
    let off = args.groups == Some(Switch::Off);
    let needs_one =
        [("--groups off", off), ("--sparse", args.sparse.is_some()), ("--calibrate", args.calibrate.is_some())];
    if let Some((option, _)) = needs_one.into_iter().find(|&(_, is_given)| is_given)
        && model.window_heads.is_some()
    {
        return Err(Error::request(format!("{option} is not for models with layers of two shapes")));
    }
    match args.groups {
        Some(Switch::On) if args.sparse.is_some() => Err(Error::request("--groups on is not for --sparse")),
        Some(Switch::Off) => Ok(Groups::ONE),
        _ if args.sparse.is_some() => Ok(Groups::ONE),
        _ => Ok(model.groups()),
    }
}

/// Returns the options of the CPU backend from the command line.
///
/// # Errors
/// Scales that cannot be read, or that the pool does not use.
pub fn cpu_options(args: &Args) -> Result<CpuOptions> {
    let threads = |n: u16| CpuOptions::with_threads(n.into());
    let options = args.threads.map_or_else(CpuOptions::default, threads);
    Ok(CpuOptions { scales: scales(args)?, ..options })
}

/// Returns the static scales of the command line.
///
/// # Errors
/// See [`cpu_options`].
pub fn scales(args: &Args) -> Result<Option<KvScales>> {
    let Some(path) = &args.scales else { return Ok(None) };
    let given = args.kv_dtype.is_quantised() && args.kv_scales == Scaling::Static;
    if !given {
        let wanted = "--scales are for --kv-dtype fp8 --kv-scales static";
        return Err(Error::request(wanted));
    }
    calibrate::read(path).map(Some)
}

/// Returns the error for an engine that cannot be created.
pub fn no_engine<E: std::error::Error + 'static>(error: EngineError<E>) -> Error {
    Error::run(format!("cannot create the engine: {}", with_cause(&error)))
}

pub(crate) fn unusable(error: kvarena::ConfigError) -> Error {
    Error::request(format!("cannot create a pool of this shape: {error}"))
}

/// Returns the batching options of the command line.
///
/// # Errors
/// `--draft` with `--overlap on`; `--draft-tree` for a model with a window or a chunk.
pub fn policy(args: &Args, model: &ModelConfig) -> Result<Policy> {
    let gpu = args.backend == BackendName::Cuda;
    let drafts = drafting(args, model)?;
    Ok(Policy {
        chunk: chunk(args),
        concurrency: args.concurrency,
        overlap: args.overlap.map_or(gpu && drafts.is_none(), |switch| switch == Switch::On),
        fail_every: args.fail_every,
        wait_for_leaders: true,
        drafts,
    })
}

/// Returns the drafting options of the command line.
///
/// # Errors
/// `--draft` with `--overlap on`, which plans before the previous token is known; `--draft-tree` for a model with a
/// window or a chunk, which no backend supports.
fn drafting(args: &Args, model: &ModelConfig) -> Result<Option<Drafting>> {
    let Some(tokens) = args.draft else { return Ok(None) };
    if args.overlap == Some(Switch::On) {
        let what = "--draft needs the previous token, and --overlap on plans before it is known";
        return Err(Error::request(what));
    }
    let limits = model.windows.iter().zip(&model.chunks).map(|(window, chunk)| window.or(*chunk));
    if let Some((window, layer)) = limits.zip(0..).find_map(|(w, layer)| w.map(|w| (w, layer)))
        && args.draft_tree
    {
        return Err(Error::request(format!(
            "--draft-tree is not for a model with sliding windows or chunks, such as {window} of layer {layer}: use --draft alone"
        )));
    }
    Ok(Some(Drafting { tokens, tree: args.draft_tree }))
}

/// Returns the maximum number of prompt tokens of a step.
pub fn chunk(args: &Args) -> u32 {
    args.chunk.unwrap_or(if args.backend == BackendName::Cuda { 8192 } else { 512 })
}

/// Returns the sampling parameters of the model's `generation_config.json`, unless the command line ignores them.
///
/// # Errors
/// The file is unreadable or damaged, or has a parameter that is out of range.
pub fn generation(args: &Args) -> Result<Generation> {
    match &args.model {
        Some(dir) if args.http.generation_config == GenerationConfig::Auto => Generation::read(dir),
        _ => Ok(Generation::default()),
    }
}

/// Returns the defaults of requests: the options of the command line, then the parameters of `generation`.
pub fn defaults(args: &Args, model: &ModelConfig, generation: &Generation) -> Defaults {
    let mut stop = args.stop_token.clone();
    if !args.ignore_eos {
        stop.extend(&model.eos);
    }
    // Clients of the HTTP API expect sampled tokens; users of the program expect the same answer each time.
    let temperature = if args.serve.is_some() { 1.0 } else { 0.0 };
    Defaults {
        max_new_tokens: args.max_new_tokens,
        samples: args.n,
        sampling: Sampling {
            temperature: args.temperature.or(generation.temperature).unwrap_or(temperature),
            top_k: args.top_k.or(generation.top_k).unwrap_or(0),
            top_p: args.top_p.or(generation.top_p).unwrap_or(1.0),
            min_p: generation.min_p.unwrap_or(0.0),
            seed: args.seed,
        },
        stop,
    }
}
