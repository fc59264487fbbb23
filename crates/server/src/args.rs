//! The command line.

use std::path::PathBuf;

use clap::builder::{ArgPredicate, PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::{Parser, ValueEnum};
use kvarena::KvDtype;
use kvarena::layout::{Layout, Scaling};

use crate::http::options::HttpOptions;
use kvarena_host::draft::DRAFTS_MAX;
use kvarena_host::sparse::Sparse;

/// A small LLM host on kvarena. It serves Llama, Qwen3, Qwen3.5, DeepSeek V3, gpt-oss, Gemma 3, Gemma 4 and Llama 4
/// models from safetensors, and Llama and Gemma 3 from GGUF, with continuous batching.
///
/// Without arguments a small model explains words of kvarena. `--help fields` lists the fields of requests over HTTP.
/// Exit codes: 0 done, 1 the run failed, 2 the command line or a request cannot be served, 3 the model or the GPU
/// cannot be used.
#[derive(Parser, Clone, Debug)]
#[command(name = "kvarena-server", version)]
pub struct Args {
    /// A model directory in the Hugging Face format, or a GGUF file.
    #[arg(long, value_name = "PATH", conflicts_with = "random_model")]
    pub model: Option<PathBuf>,

    /// A file with the chat template (Jinja), instead of the model's own.
    #[arg(long, value_name = "FILE")]
    pub chat_template: Option<PathBuf>,

    /// Random weights in a model's shape, for measuring.
    #[arg(long, value_name = "SHAPE")]
    pub random_model: Option<Shape>,

    /// A prompt (repeatable): text, or token ids if the model has no tokenizer.
    #[arg(long, value_name = "TEXT")]
    pub prompt: Vec<String>,

    /// A file of JSON lines, `-` for standard input: {"prompt": [ids] or "text", "max_new_tokens": N}, and optionally
    /// n, temperature, top_k, top_p, seed, stop_token_ids, cancel_after, namespace, prediction.
    #[arg(long, value_name = "FILE")]
    pub requests: Option<PathBuf>,

    /// COUNT random prompts of LEN tokens, for measuring.
    #[arg(long, value_name = "COUNT:LEN")]
    pub random_requests: Option<String>,

    /// Chat: each line of standard input is a turn, and reuses the cache of earlier turns.
    #[arg(long, conflicts_with_all = ["prompt", "requests", "json"])]
    pub chat: bool,

    /// The system message of a chat.
    #[arg(long, value_name = "TEXT", requires = "chat")]
    pub system: Option<String>,

    /// Serve OpenAI's HTTP API at an address such as 127.0.0.1:8000; port 0 takes a free port. SIGTERM and Ctrl-C let
    /// accepted requests finish; a second one ends the program at once.
    #[arg(
        long,
        value_name = "ADDRESS",
        conflicts_with_all = ["prompt", "requests", "random_requests", "chat", "calibrate", "bench", "json"]
    )]
    pub serve: Option<String>,

    /// With --serve on a GPU: copy logits to the host, so that requests may use log-probabilities.
    #[arg(long)]
    pub logprobs: bool,

    /// Print a line {"index": i, "tokens": [...], "cached_tokens": n} for each sample.
    #[arg(long)]
    pub json: bool,

    /// With --json: add this many logits of each first token, as "first_logits".
    #[arg(long, value_name = "COUNT", default_value_t = 0)]
    pub first_logits: usize,

    /// Maximum number of new tokens of a request [default: 128, fewer at the end of the model or the pool].
    #[arg(long, value_name = "N")]
    pub max_new_tokens: Option<u32>,

    /// Samples per prompt, which share its pages; 1 with --chat.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub n: u32,

    /// Temperature of the draws; 0 is greedy [default: 0, but over HTTP the model's recommendation, or 1].
    #[arg(long)]
    pub temperature: Option<f32>,

    /// Draw from this many of the most likely tokens; 0: from all [default: 0, but over HTTP the model's
    /// recommendation].
    #[arg(long)]
    pub top_k: Option<u32>,

    /// Draw from the most likely tokens that together reach this probability [default: 1, but over HTTP the model's
    /// recommendation].
    #[arg(long)]
    pub top_p: Option<f32>,

    /// Seed of the draws, and of random weights and requests.
    #[arg(long, default_value_t = 0)]
    pub seed: u64,

    /// A token id that ends a generation (repeatable), in addition to the model's.
    #[arg(long, value_name = "ID")]
    pub stop_token: Vec<u32>,

    /// Continue after the model's own stop tokens.
    #[arg(long)]
    pub ignore_eos: bool,

    /// Tokens of a page. Models whose layers keep a state take more if a page would not hold the state of a layer.
    #[arg(long, value_name = "TOKENS", default_value_t = 16)]
    pub page_size: u32,

    /// Pages of the pool [default: enough for every stream at full length, at most 1 GiB, or on a GPU its free memory].
    #[arg(long)]
    pub pages: Option<u32>,

    /// Swap memory in GiB for evicted pages; with --tp, for the pages of each GPU.
    #[arg(long, alias = "host-cache", value_name = "GIB", conflicts_with_all = ["calibrate", "bench"])]
    pub swap_space: Option<f64>,

    /// Order of K and V in memory.
    #[arg(long, default_value = "page-first", ignore_case = true, value_parser = named(LAYOUTS))]
    pub layout: Layout,

    /// Element type of K and V.
    #[arg(long, default_value = "bf16", ignore_case = true, value_parser = named(DTYPES))]
    pub kv_dtype: KvDtype,

    /// Scales of an fp8 pool: computed at the store for each token and head, or static, from --scales.
    #[arg(long, default_value = "token", ignore_case = true, value_parser = named(SCALINGS))]
    pub kv_scales: Scaling,

    /// Static scales, from a file that --calibrate wrote. Without a file, all scales are 1.
    #[arg(long, value_name = "FILE")]
    pub scales: Option<PathBuf>,

    /// Serve the requests with a pool of f32 on the CPU, and write their static scales to FILE.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["scales", "bench", "chat"])]
    pub calibrate: Option<PathBuf>,

    /// Generating streams read only K positions of their context, selected by CHANNELS channels of the keys [CHANNELS:
    /// 16]. Without --labels the requests are served twice: the first pass reads all positions, chooses the channels
    /// and records the tokens; the second counts those that differ. A --bench of random weights takes the first
    /// channels.
    #[arg(long, value_name = "K[,CHANNELS]", conflicts_with = "calibrate")]
    pub sparse: Option<Sparse>,

    /// With --sparse: the channels, from a file that --save-labels wrote. Without --recall, the requests are then
    /// served once. Several GPUs, --chat and --serve require --labels.
    #[arg(long, value_name = "FILE", requires = "sparse")]
    pub labels: Option<PathBuf>,

    /// With --sparse: write the chosen channels to FILE.
    #[arg(long, value_name = "FILE", requires = "sparse", conflicts_with_all = ["labels", "serve", "chat", "bench"])]
    pub save_labels: Option<PathBuf>,

    /// With --sparse: report the share of attention's weight at the selected positions, and at the best ones. This is
    /// slow, and only for the CPU.
    #[arg(long, requires = "sparse", conflicts_with_all = ["serve", "chat", "bench"])]
    pub recall: bool,

    /// Reuse of prefixes.
    #[arg(long, default_value = "on", num_args = 0..=1, default_missing_value = "on")]
    pub prefix: Switch,

    /// The same as --prefix off.
    #[arg(long)]
    pub no_prefix: bool,

    /// Layers with a window or a chunk keep only the K and V inside it. Not with --sparse [default: on].
    #[arg(long, num_args = 0..=1, default_missing_value = "on")]
    pub groups: Option<Switch>,

    /// Maximum number of prompt tokens computed in one step [default: 512, on a GPU 8192].
    #[arg(long, value_name = "TOKENS", value_parser = at_least_one())]
    pub chunk: Option<u32>,

    /// Maximum number of streams at a time.
    #[arg(long, value_name = "STREAMS", default_value_t = 16, value_parser = at_least_one())]
    pub concurrency: u32,

    /// Plan each step before the tokens of the previous one are known; the default on a GPU, except with --draft.
    #[arg(long, num_args = 0..=1, default_missing_value = "on")]
    pub overlap: Option<Switch>,

    /// Draft up to N tokens of each stream from its text and prompt (and a request's "prediction"), and check them with
    /// the next token. A step generates a stream's accepted drafts and one more token. The tokens do not change.
    #[arg(
        long,
        value_name = "N",
        value_parser = clap::value_parser!(u32).range(1..=i64::from(DRAFTS_MAX)),
        conflicts_with_all = ["calibrate", "bench", "sparse"]
    )]
    pub draft: Option<u32>,

    /// With --draft: several continuations of each stream, as a tree.
    #[arg(long, requires = "draft")]
    pub draft_tree: bool,

    /// Replay decode steps as graphs, on a GPU.
    #[arg(long, default_value = "on")]
    pub graphs: Switch,

    /// Let every N-th step fail halfway, to test abort and retry.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(2..))]
    pub fail_every: Option<u64>,

    /// Device of the model. --bench needs a GPU, which is its default.
    #[arg(long, default_value = "cpu", default_value_if("bench", ArgPredicate::IsPresent, "cuda"))]
    pub backend: BackendName,

    /// GPUs among which the model's heads are divided (tensor parallel; needs NCCL).
    #[arg(long, value_name = "GPUS", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=8))]
    pub tp: u32,

    /// Transport of sums over GPUs [default: peer if each GPU can access the others' memory, else nccl].
    #[arg(long, value_name = "WAY")]
    pub sums: Option<SumsName>,

    /// Measure a random model on a GPU. Prints one row for each result.
    #[arg(long, value_name = "PART", conflicts_with_all = ["chat", "prompt", "model"])]
    pub bench: Option<Bench>,

    /// Batch sizes of --bench decode.
    #[arg(long, value_delimiter = ',', default_value = "1,16,64,256", value_parser = at_least_one())]
    pub batch: Vec<u32>,

    /// Prompt tokens of a stream of --bench decode and prefill; cached tokens of --bench load.
    #[arg(long, value_name = "TOKENS", default_value_t = 1024, value_parser = at_least_one())]
    pub context: u32,

    /// Tokens of the prefix that all streams of --bench decode share.
    #[arg(long, value_name = "TOKENS", default_value_t = 0)]
    pub common: u32,

    /// Threads for matrix products and attention [default: all cores].
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub threads: Option<u16>,

    /// Omit the report at the end.
    #[arg(long)]
    pub quiet: bool,

    /// Options of stores.
    #[command(flatten)]
    pub cache: CacheOptions,

    /// Options of the HTTP server. They are last, because their heading in `--help` covers all following options.
    #[command(flatten)]
    pub http: HttpOptions,
}

fn at_least_one() -> clap::builder::RangedI64ValueParser<u32> {
    clap::value_parser!(u32).range(1..)
}

/// Shapes of random models.
#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub enum Shape {
    /// 28 layers of width 1,024.
    #[value(name = "qwen3-0.6b")]
    Qwen3_0_6B,
    /// 36 layers of width 4,096.
    #[value(name = "qwen3-8b")]
    Qwen3_8B,
    /// 32 layers of width 4,096.
    #[value(name = "llama-3.1-8b")]
    Llama3_1_8B,
    /// 24 layers of Gated DeltaNet and 8 of attention, of width 4,096.
    #[value(name = "qwen3.5-9b")]
    Qwen3_5_9B,
    /// The sizes of qwen3.5-9b with 32 layers of attention, for comparing.
    #[value(name = "qwen3.5-9b-attention")]
    Qwen3_5_9BAttention,
    /// 3 layers of width 256 with heads of 64: for checking.
    #[value(name = "llama-tiny-64")]
    LlamaTiny64,
}

impl Shape {
    /// Returns the name on the command line.
    pub fn name(self) -> String {
        self.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
    }
}

/// Measurements of --bench.
#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub enum Bench {
    /// 256 requests of mixed lengths, at once.
    Offline,
    /// Steps of one token of each stream, after a context.
    Decode,
    /// 64 prompts.
    Prefill,
    /// Time to the first token of a prompt with --context cached tokens in swap memory. After them, the prompt has 1
    /// new token, or an eighth of --context.
    Load,
}

/// Transports of sums over GPUs.
#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub enum SumsName {
    /// A kernel that writes to the other GPUs' memory for short sums; NCCL for longer ones.
    Peer,
    /// NCCL.
    Nccl,
}

#[cfg(feature = "cuda")]
impl From<SumsName> for kvarena_host::gpu::sums::Transport {
    fn from(name: SumsName) -> Self {
        match name {
            SumsName::Peer => Self::Peer,
            SumsName::Nccl => Self::Nccl,
        }
    }
}

/// A value of an option: its name, other names, its description, and what it stands for.
type Named<T> = (&'static str, &'static [&'static str], &'static str, T);

const LAYOUTS: &[Named<Layout>] = &[
    ("layer-first", &["layer_first", "layerfirst", "layer"], "All pages of a layer are contiguous", Layout::LayerFirst),
    ("page-first", &["page_first", "pagefirst", "page"], "All layers of a page are contiguous", Layout::PageFirst),
];

const DTYPES: &[Named<KvDtype>] = &[
    ("f32", &["float32", "fp32"], "IEEE binary32", KvDtype::F32),
    ("f16", &["float16", "fp16"], "IEEE binary16", KvDtype::F16),
    ("bf16", &["bfloat16"], "bfloat16", KvDtype::Bf16),
    ("fp8", &["fp8_e4m3"], "e4m3", KvDtype::Fp8E4M3),
];

const SCALINGS: &[Named<Scaling>] = &[
    ("static", &[], "From a file", Scaling::Static),
    ("token", &["by-token"], "Computed at the store, for each token and head", Scaling::ByToken),
];

/// Returns the parser of an option with these values.
fn named<T: Copy + Send + Sync + 'static>(values: &'static [Named<T>]) -> impl TypedValueParser<Value = T> {
    let possible = values.iter().map(|(name, others, description, _)| {
        PossibleValue::new(*name).aliases(others.iter().copied()).help(*description)
    });
    PossibleValuesParser::new(possible).map(|given| {
        let is_given = |name: &&str| name.eq_ignore_ascii_case(&given);
        let found = values.iter().find(|(name, others, ..)| is_given(name) || others.iter().any(is_given));
        found.expect("the parser accepts only these names").3
    })
}

/// On or off.
#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub enum Switch {
    /// Yes.
    #[value(alias = "true", alias = "radix", alias = "1")]
    On,
    /// No.
    #[value(alias = "false", alias = "none", alias = "0")]
    Off,
}

/// Backends.
#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub enum BackendName {
    /// The CPU.
    Cpu,
    /// A GPU; needs a build with `--features cuda`.
    Cuda,
}

/// Parts of the work of a server.
#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub enum Role {
    /// Prompts and answers.
    Both,
    /// Prompts, for another server.
    Prefill,
}

/// Options of stores.
#[derive(clap::Args, Clone, Debug)]
#[command(next_help_heading = "Stores of K and V, which outlive the program (with --swap-space)")]
pub struct CacheOptions {
    /// Keep K and V in files of this folder.
    #[arg(long, value_name = "DIR")]
    pub cache_dir: Option<PathBuf>,

    /// Maximum size of --cache-dir in GiB.
    #[arg(long, value_name = "GIB", default_value_t = 64.0, requires = "cache_dir")]
    pub cache_limit: f64,

    /// Keep K and V in Redis or Valkey (redis://..), or in a bucket (s3://bucket/prefix, gs://.., azure://..), whose
    /// options are read from the environment (AWS_.., GOOGLE_.., AZURE_..).
    #[arg(long, value_name = "URL")]
    pub cache_url: Option<String>,

    /// Seconds for which Redis keeps K and V [default: no limit].
    #[arg(long, value_name = "SECONDS", requires = "cache_url")]
    pub cache_ttl: Option<u64>,

    /// Keep K and V in a store of another process, which this command starts, such as `mooncake_child.py MASTER HOST
    /// tcp`.
    #[arg(long, value_name = "COMMAND")]
    pub cache_exec: Option<String>,

    /// A file of at least 32 bytes, which only its owner may read: the key of the checks of K and V. Stores that others
    /// can write need one, the same for all servers.
    #[arg(long, value_name = "FILE")]
    pub cache_secret_file: Option<PathBuf>,

    /// Use stores that others can write without a secret.
    #[arg(long, conflicts_with = "cache_secret_file")]
    pub cache_trust: bool,

    /// Threads of each store, 1 to 16. They compute checks and move bytes: more read faster where cores are free.
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u8).range(1..=16))]
    pub cache_threads: u8,

    /// Whether to write K and V to the stores: at most 1 GB in a second to each, without a limit to a folder in memory
    /// and with `--role prefill`.
    #[arg(long, default_value = "on")]
    pub cache_write: Switch,

    /// Part of the work: with `prefill`, an answer ends only when a store has the K and V of its prompt, so that another
    /// server reads them instead of computing the prompt.
    #[arg(long, default_value = "both")]
    pub role: Role,

    /// Search the stores for a prompt every 5 ms, until they have had nothing new of it for this time: for a server that
    /// gets each request at the same time as one with `--role prefill`.
    #[arg(long, value_name = "SECONDS", default_value_t = 0.0)]
    pub cache_wait: f64,

    /// At the end, write K and V to the stores for at most this time.
    #[arg(long, value_name = "SECONDS", default_value_t = 10)]
    pub flush_seconds: u64,
}
