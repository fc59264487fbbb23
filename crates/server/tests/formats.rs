//! Tests model directories in other forms than the golden ones (shards, other element types, both config styles). Also
//! compares models of other shapes with the forward pass over contiguous K and V.

mod common;

use std::fs;

use common::contiguous;
use common::files::Dir;
use common::run_server;
use common::serving::{Setting, serve};
use half::{bf16, f16};
use kvarena::layout::Dtype;
use kvarena_host::config::ModelConfig;
use kvarena_host::model::Model;
use kvarena_host::request::Defaults;
use kvarena_host::sample::Sampling;
use kvarena_host::source::Random;
use safetensors::tensor::TensorView;
use safetensors::{SafeTensors, serialize};
use serde_json::{Value, json};

/// Checks that the model of a directory generates the golden tokens.
#[track_caller]
fn generates_the_golden_tokens(dir: &Dir, model: &str) {
    let path = dir.path().to_str().expect("UTF-8");
    let arguments = ["--model", path, "--requests", "-", "--json"];
    let lines = run_server(&arguments, &common::golden_requests(model)).lines();
    let cases = common::cases(model);
    assert_eq!(lines.len(), cases.len());
    for (line, case) in lines.iter().zip(&cases) {
        assert_eq!(line["tokens"], json!(case.tokens));
    }
}

/// Writes some of a golden model's bf16 tensors in another element type. f32 stores them exactly; f16 has more
/// significant bits than bf16 (11 instead of 8).
fn write_tensors(dir: &Dir, file: &str, model: &str, dtype: Dtype, keep: impl Fn(&str) -> bool) {
    let bytes = fs::read(common::dir(model).join("model.safetensors")).expect("a model");
    let whole = SafeTensors::deserialize(&bytes).expect("tensors");
    let kept: Vec<_> = whole.iter().filter(|(name, _)| keep(name)).collect();
    let converted: Vec<(safetensors::Dtype, Vec<u8>)> = kept
        .iter()
        .map(|(_, view)| {
            let wide = bytemuck::pod_collect_to_vec::<u8, bf16>(view.data());
            let wide = wide.iter().map(|x| x.to_f32());
            match dtype {
                Dtype::Bf16 => (safetensors::Dtype::BF16, view.data().to_vec()),
                Dtype::F16 => (safetensors::Dtype::F16, wide.flat_map(|x| f16::from_f32(x).to_le_bytes()).collect()),
                Dtype::F32 => (safetensors::Dtype::F32, wide.flat_map(f32::to_le_bytes).collect()),
                other => panic!("{other:?}"),
            }
        })
        .collect();
    let views = kept.iter().zip(&converted).map(|((name, view), (dtype, data))| {
        (*name, TensorView::new(*dtype, view.shape().to_vec(), data).expect("a tensor"))
    });
    dir.write(file, serialize(views, None).expect("a file"));
}

#[test]
fn weights_in_f32_and_f16() {
    for model in common::MODELS {
        for dtype in [Dtype::F32, Dtype::F16] {
            let dir = Dir::copy_of(model);
            write_tensors(&dir, "model.safetensors", model, dtype, |_| true);
            generates_the_golden_tokens(&dir, model);
        }
    }
}

#[test]
fn shards_with_an_index() {
    for model in common::MODELS {
        let dir = Dir::copy_of(model);
        fs::remove_file(dir.path().join("model.safetensors")).expect("removed");
        let shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];
        let first = |name: &str| name.contains("layers.1.") || name.contains("embed");
        write_tensors(&dir, shards[0], model, Dtype::Bf16, first);
        write_tensors(&dir, shards[1], model, Dtype::Bf16, |name| !first(name));
        let bytes = fs::read(common::dir(model).join("model.safetensors")).expect("a model");
        let whole = SafeTensors::deserialize(&bytes).expect("tensors");
        let map: serde_json::Map<String, Value> =
            whole.names().iter().map(|name| (name.to_string(), json!(shards[usize::from(!first(name))]))).collect();
        let index = json!({ "metadata": {}, "weight_map": map });
        dir.write("model.safetensors.index.json", index.to_string());
        generates_the_golden_tokens(&dir, model);
    }
}

/// The config has `rope_theta`, `rope_scaling` and `torch_dtype`, and omits some fields that have defaults.
#[test]
fn configs_of_the_old_style() {
    for model in common::MODELS {
        let dir = Dir::with_config(model, |config| {
            config["rope_theta"] = config["rope_parameters"]["rope_theta"].take();
            config["rope_scaling"] = Value::Null;
            config["torch_dtype"] = config["dtype"].take();
            let fields = config.as_object_mut().expect("an object");
            for name in ["rope_parameters", "dtype", "attention_bias", "hidden_act", "rms_norm_eps"] {
                fields.remove(name);
            }
        });
        generates_the_golden_tokens(&dir, model);
    }
}

/// Computes Llama 3.1's frequencies as its authors do: by wavelength, in three cases. Linear scaling divides all by the
/// factor.
#[test]
fn llama3_rope_in_both_styles() {
    let scaling = json!({
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    });
    let mut old = shape("LlamaForCausalLM", [4, 2, 128]);
    old["rope_theta"] = json!(500_000.0);
    let mut new = old.clone();
    old["rope_scaling"] = scaling.clone();
    new["rope_parameters"] = scaling;
    new["rope_parameters"]["rope_theta"] = new["rope_theta"].take();
    let parse = |config: &Value| ModelConfig::parse("config.json".as_ref(), config).expect("a config");
    let (old, new) = (parse(&old).rope, parse(&new).rope);
    assert_eq!(old, new);
    let mut cases = [0; 3];
    for (i, &actual) in old.frequencies.iter().enumerate() {
        let plain = 500_000_f64.powf(-(i as f64) / 64.0);
        let wavelength = std::f64::consts::TAU / plain;
        let expected = if wavelength < 8192.0 / 4.0 {
            cases[0] += 1;
            plain
        } else if wavelength > 8192.0 / 1.0 {
            cases[1] += 1;
            plain / 8.0
        } else {
            cases[2] += 1;
            let smooth = (8192.0 / wavelength - 1.0) / (4.0 - 1.0);
            (1.0 - smooth) * plain / 8.0 + smooth * plain
        };
        assert!((f64::from(actual) / expected - 1.0).abs() < 1e-6, "{i}: {actual} is not {expected}");
    }
    assert!(cases.iter().all(|&n| n > 0), "all three cases are seen: {cases:?}");
    let mut linear = shape("LlamaForCausalLM", [4, 2, 128]);
    linear["rope_scaling"] = json!({ "type": "linear", "factor": 4.0 });
    let linear = parse(&linear).rope.frequencies;
    let plain = parse(&shape("LlamaForCausalLM", [4, 2, 128])).rope.frequencies;
    assert!(linear.iter().zip(&plain).all(|(l, p)| (l * 4.0 - p).abs() < 1e-6));
}

/// Returns a small config with these numbers of query heads, kv heads and elements of a head.
fn shape(architecture: &str, [q_heads, kv_heads, head_dim]: [usize; 3]) -> Value {
    json!({
        "architectures": [architecture],
        "vocab_size": 300,
        "hidden_size": 96,
        "intermediate_size": 130,
        "num_hidden_layers": 4,
        "num_attention_heads": q_heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": 512,
    })
}

/// The models have one or many heads, wide or narrow heads, biases, tied outputs, or windows in some layers.
#[test]
fn models_of_other_shapes_are_served() {
    let (llama, qwen) = ("LlamaForCausalLM", "Qwen3ForCausalLM");
    let shapes = [
        (llama, [1, 1, 64]),
        (llama, [6, 3, 16]),
        (llama, [8, 8, 12]),
        (qwen, [16, 1, 6]),
        (qwen, [5, 5, 128]),
        (qwen, [14, 2, 80]),
    ];
    for (number, (architecture, heads)) in shapes.into_iter().enumerate() {
        let mut value = shape(architecture, heads);
        value["attention_bias"] = json!(number % 2 == 0);
        value["mlp_bias"] = json!(number % 3 == 0);
        value["tie_word_embeddings"] = json!(number % 2 == 1);
        if architecture == qwen {
            value["use_sliding_window"] = json!(true);
            value["sliding_window"] = json!(9);
            value["max_window_layers"] = json!(2);
        }
        let config = ModelConfig::parse("config.json".as_ref(), &value).expect("a config");
        let model = Model::build(config, &mut Random { seed: number as u64 }).expect("a model");
        let prompts: Vec<Vec<u32>> =
            [1, 8, 40].iter().map(|&len| (0..len).map(|i| (i * i * 7 + len) % 300).collect()).collect();
        let defaults =
            Defaults { max_new_tokens: Some(24), samples: 1, sampling: Sampling::default(), stop: Vec::new() };
        let requests: Vec<_> = prompts.iter().map(|prompt| defaults.request(prompt.clone())).collect();
        let setting = Setting { page_size: 4, chunk: 11, overlap: true, ..Setting::default() };
        let served = serve(&model, &requests, setting).collected.tokens;
        for (prompt, served) in prompts.iter().zip(served.values()) {
            let (expected, _) = contiguous::greedy(&model, prompt, 24, usize::MAX);
            assert_eq!(*served, expected, "{value}, {} tokens", prompt.len());
        }
    }
}
