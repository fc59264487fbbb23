//! The peak memory of loading is at most 1.1 times the weights, for one file and for shards, for quantised weights and
//! for GGUF.
//! This file has one test, because its allocator counts the allocations of all threads.

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use common::files::Dir;
use common::gguf::{pair, string, tensor, whole};
use kvarena_host::config::ModelConfig;
use kvarena_host::error::Result;
use kvarena_host::matrix::Numbers;
use kvarena_host::model::Model;
use kvarena_host::source::{Random, Source};
use safetensors::tensor::{Dtype, TensorView, serialize};
use serde_json::{Value, json};

/// Counts allocated bytes, and their maximum.
struct Counting;

static NOW: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call goes to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        PEAK.fetch_max(NOW.fetch_add(layout.size(), Relaxed) + layout.size(), Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        NOW.fetch_sub(layout.size(), Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

type Tensors = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

/// Random tensors that remember what the model requested, in the form of a published file.
struct Published<'a> {
    format: &'a str,
    tensors: Tensors,
    /// Bytes of all matrices in memory.
    weights: usize,
}

impl Source for Published<'_> {
    fn numbers(&mut self, name: &str, shape: &[usize]) -> Result<Numbers> {
        let numbers = Random { seed: 1 }.numbers(name, shape)?;
        self.weights += if shape.len() > 1 { 2 * numbers.len() } else { 0 };
        let mut add = |part: &str, dtype, shape: &[usize], size: usize| {
            let bytes = vec![0; size * shape.iter().product::<usize>()];
            self.tensors.insert(format!("{name}{part}"), (dtype, shape.to_vec(), bytes));
        };
        match (self.format, shape) {
            ("mxfp4", &[count, cols, rows]) => {
                add("_blocks", Dtype::U8, &[count, rows, cols / 32, 16], 1);
                add("_scales", Dtype::U8, &[count, rows, cols / 32], 1);
            }
            ("fp8", &[rows, cols]) if name.ends_with("_proj.weight") => {
                add("", Dtype::F8_E4M3, shape, 1);
                add("_scale_inv", Dtype::F32, &[rows.div_ceil(128), cols.div_ceil(128)], 4);
            }
            _ => add("", Dtype::BF16, shape, 2),
        }
        Ok(numbers)
    }
}

/// Writes the tensors into some files, with an index if there are several.
fn write(dir: &Dir, tensors: &Tensors, files: usize) {
    let mut map = BTreeMap::new();
    for file in 0..files {
        let name = match files {
            1 => "model.safetensors".to_owned(),
            _ => format!("model-{file}.safetensors"),
        };
        let part = tensors.iter().skip(file).step_by(files);
        map.extend(part.clone().map(|(tensor, _)| (tensor.clone(), name.clone())));
        let views = part.map(|(name, (dtype, shape, bytes))| {
            (name, TensorView::new(*dtype, shape.clone(), bytes).expect("a tensor"))
        });
        dir.write(&name, serialize(views, None).expect("a file"));
    }
    if files > 1 {
        dir.write("model.safetensors.index.json", json!({ "weight_map": map }).to_string());
    }
}

fn config(architecture: &str, changes: Value) -> Value {
    let mut config = json!({
        "architectures": [architecture], "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 16,
        "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 2048, "rms_norm_eps": 1e-6,
    });
    let changes = changes.as_object().expect("an object").clone();
    config.as_object_mut().expect("an object").extend(changes);
    config
}

/// Writes a GGUF file of zeros in Q4_0 (type 2) with norms in F32, and with many tokens. Returns the bytes of all
/// matrices in memory.
fn write_gguf(dir: &Dir) -> (PathBuf, usize) {
    let size = |name: &str, value: u32| pair(&format!("llama.{name}"), 4, value.to_le_bytes());
    let tokens: Vec<u8> = (0..2048).flat_map(|i| string(&format!("token {i}"))).collect();
    let count = [&8_u32.to_le_bytes()[..], &2048_u64.to_le_bytes()].concat();
    let mut body = vec![
        pair("general.architecture", 8, string("llama")),
        size("embedding_length", 256),
        size("block_count", 16),
        size("feed_forward_length", 512),
        size("attention.head_count", 4),
        size("context_length", 2048),
        pair("llama.attention.layer_norm_rms_epsilon", 6, 1e-6_f32.to_le_bytes()),
        pair("tokenizer.ggml.tokens", 9, [count, tokens].concat()),
    ];
    let (pairs, mut bytes, mut weights) = (body.len(), 0, 0);
    let mut add = |name: &str, dims: &[u64]| {
        weights += if dims.len() > 1 { 4 * (dims[0] * dims[1]) as usize } else { 0 };
        let (kind, size) = if dims.len() == 1 { (0, dims[0] * 4) } else { (2, dims[0] * dims[1] / 32 * 18) };
        body.push(tensor(name, dims, kind, bytes));
        bytes += size;
    };
    add("token_embd.weight", &[256, 2048]);
    add("output_norm.weight", &[256]);
    for layer in 0..16 {
        for (part, dims) in [
            ("attn_norm", &[256][..]),
            ("attn_q", &[256, 256]),
            ("attn_k", &[256, 256]),
            ("attn_v", &[256, 256]),
            ("attn_output", &[256, 256]),
            ("ffn_norm", &[256]),
            ("ffn_gate", &[256, 512]),
            ("ffn_up", &[256, 512]),
            ("ffn_down", &[512, 256]),
        ] {
            add(&format!("blk.{layer}.{part}.weight"), dims);
        }
    }
    let mut file = whole(3, (body.len() - pairs) as u64, pairs as u64, &body);
    file.resize(file.len() + 32 + bytes as usize, 0);
    (dir.write("model.gguf", file), weights)
}

fn check(shown: &str, path: &Path, weights: usize) {
    let before = NOW.load(Relaxed);
    PEAK.store(before, Relaxed);
    let model = Model::read(path).expect("the model loads");
    let peak = PEAK.load(Relaxed) - before;
    drop(model);
    println!("{shown}: a peak of {peak} bytes for weights of {weights}");
    assert!(peak <= weights / 10 * 11, "{shown}: {peak} bytes for {weights}");
}

#[test]
fn loading_takes_little_more_than_the_weights() {
    let experts = json!({ "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 64,
        "intermediate_size": 256, "quantization_config": { "quant_method": "mxfp4" } });
    let fp8 = json!({ "quantization_config":
        { "quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128] } });
    let cases = [
        ("bf16", 1, config("LlamaForCausalLM", json!({}))),
        ("bf16", 3, config("LlamaForCausalLM", json!({}))),
        ("mxfp4", 1, config("GptOssForCausalLM", experts)),
        ("fp8", 1, config("Qwen3ForCausalLM", fp8)),
    ];
    for (format, files, config) in cases {
        let dir = Dir::new();
        let path = dir.write("config.json", config.to_string());
        let config = ModelConfig::parse(&path, &config).expect("a config");
        let mut published = Published { format, tensors: Tensors::new(), weights: 0 };
        drop(Model::build(config, &mut published).expect("random tensors"));
        write(&dir, &published.tensors, files);
        let weights = published.weights;
        drop(published);
        check(&format!("{format}, {files} files"), dir.path(), weights);
    }
    let dir = Dir::new();
    let (path, weights) = write_gguf(&dir);
    check("gguf", &path, weights);
}
