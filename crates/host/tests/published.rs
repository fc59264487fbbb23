//! Model folders as they are published: quantised weights, and models of texts and images.

mod common;

use std::fs;

use common::contiguous::greedy;
use common::files::Dir;
use half::bf16;
use kvarena_host::checkpoint::Checkpoint;
use kvarena_host::config::ModelConfig;
use kvarena_host::files::read_json;
use kvarena_host::matrix::Numbers;
use kvarena_host::model::Model;
use kvarena_host::source::Source;
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView, serialize};
use serde_json::{Value, json};

/// `make.py` writes the expected values by the reference.
#[test]
fn quantised_weights_equal_the_references() {
    for (name, tensors) in [("gpt-oss-mxfp4", 3), ("deepseek-fp8", 9)] {
        let dir = common::dir(name);
        let bytes = fs::read(dir.join("expected.safetensors")).expect("expected values");
        let expected = SafeTensors::deserialize(&bytes).expect("tensors");
        assert!(expected.len() >= tensors, "{name}: {} tensors", expected.len());
        let mut read = Checkpoint::open(&dir).expect("the checkpoint opens");
        for (tensor, view) in expected.iter() {
            let numbers = read.numbers(tensor, view.shape()).expect("a tensor");
            let Numbers::Bf16(numbers) = numbers else { panic!("{tensor} is bf16") };
            let wanted = bytemuck::pod_collect_to_vec::<u8, bf16>(view.data());
            assert_eq!(numbers.len(), wanted.len(), "{name}, {tensor}");
            for (at, (x, y)) in numbers.iter().zip(&wanted).enumerate() {
                let equal = x.to_bits() == y.to_bits() || (x.is_nan() && y.is_nan());
                assert!(equal, "{name}, {tensor}, element {at}: {x:?} is not {y:?}");
            }
        }
    }
}

/// Fp8 of another family, with its factors in bf16. The values are small integers, so both forms are exact.
#[test]
fn fp8_is_read_in_every_family() {
    let values = |i: usize| (i * 7 % 5) as f32 - 2.0;
    let codes = [0xC0, 0xB8, 0x00, 0x38, 0x40]; // -2 to 2
    let dir = Dir::copy_of("qwen3-tiny");
    let name = "model.layers.1.mlp.up_proj.weight";
    let (rows, cols) = (256, 128);
    let codes: Vec<u8> = (0..rows * cols).map(|i| codes[i * 7 % 5]).collect();
    let factors: Vec<u8> = [0.5, 3.0].iter().flat_map(|&x| bf16::from_f32(x).to_le_bytes()).collect();
    rewrite(&dir, str::to_owned, |name_of| {
        vec![
            (name_of(name), Dtype::F8_E4M3, vec![rows, cols], codes.clone()),
            (name_of(&format!("{name}_scale_inv")), Dtype::BF16, vec![2, 1], factors.clone()),
        ]
    });
    let numbers = Checkpoint::open(dir.path()).and_then(|mut read| read.numbers(name, &[rows, cols]));
    let numbers = numbers.expect("the matrix is read").to_f32();
    let wanted = (0..rows * cols).map(|i| values(i) * if i < 128 * cols { 0.5 } else { 3.0 });
    assert!(numbers.iter().copied().eq(wanted));
    Model::read(dir.path()).expect("the model loads");

    let factors = vec![0; 4];
    rewrite(&dir, str::to_owned, |name_of| {
        vec![(name_of(&format!("{name}_scale_inv")), Dtype::BF16, vec![1, 2], factors.clone())]
    });
    refuses(&dir, &["up_proj.weight_scale_inv has shape [1, 2]", "[2, 1]"]);
}

/// A tensor's name, type, shape and bytes.
type Tensor = (String, Dtype, Vec<usize>, Vec<u8>);

/// Rewrites a folder's file with other names, and with further tensors, which replace those of the same name.
fn rewrite(dir: &Dir, rename: impl Fn(&str) -> String, more: impl FnOnce(&dyn Fn(&str) -> String) -> Vec<Tensor>) {
    let bytes = fs::read(dir.path().join("model.safetensors")).expect("a file");
    let old = SafeTensors::deserialize(&bytes).expect("tensors");
    let more = more(&rename);
    let views = more.iter().map(|(name, dtype, shape, bytes)| {
        (name.clone(), TensorView::new(*dtype, shape.clone(), bytes).expect("a tensor"))
    });
    let kept = old.iter().map(|(name, view)| (rename(name), view));
    let kept = kept.filter(|(name, _)| more.iter().all(|(other, ..)| name != other));
    let file = serialize(kept.chain(views), None).expect("a file");
    dir.write("model.safetensors", file);
}

fn refuses(dir: &Dir, words: &[&str]) {
    let error = Model::read(dir.path()).map(|_| ()).expect_err("the model is refused");
    for word in words {
        assert!(error.message.contains(word), "{word:?} is not in: {error}");
    }
}

/// Converts a text model's folder to the published form of a model of texts and images.
fn with_images(model: &str, architecture: &str, rename: fn(&str) -> String) -> Dir {
    let dir = Dir::with_config(model, |config| {
        let mut text = config.take();
        text.as_object_mut().expect("an object").remove("architectures");
        text.as_object_mut().expect("an object").remove("tie_word_embeddings");
        *config = json!({ "architectures": [architecture], "eos_token_id": [1, 106], "text_config": text,
            "vision_config": { "hidden_size": 8 } });
    });
    let vision = "vision_tower.vision_model.post_layernorm.weight".to_owned();
    rewrite(&dir, rename, |_| vec![(vision, Dtype::BF16, vec![2], vec![0; 4])]);
    dir
}

#[test]
fn the_text_part_of_models_with_images_generates_the_golden_tokens() {
    // As published, and as transformers 5 saves them.
    let published = |name: &str| format!("language_model.{name}");
    let saved = |name: &str| name.replacen("model.", "model.language_model.", 1);
    let (gemma3, gemma4) = ("Gemma3ForConditionalGeneration", "Gemma4ForConditionalGeneration");
    let forms = [
        ("gemma3-tiny", gemma3, published as fn(&str) -> String),
        ("gemma3-tiny", gemma3, saved),
        ("gemma4-tiny", gemma4, saved),
        ("llama4-tiny", "Llama4ForConditionalGeneration", published),
        ("qwen3-5-tiny", "Qwen3_5ForConditionalGeneration", saved),
    ];
    for (name, architecture, rename) in forms {
        let dir = with_images(name, architecture, rename);
        let model = Model::read(dir.path()).expect("the text part loads");
        assert_eq!(model.config.eos, [1, 106]);
        assert_eq!(model.config.tied, name.starts_with("gemma"), "{name}");
        for case in &common::cases(name)[..2] {
            let (tokens, _) = greedy(&model, &case.prompt, case.tokens.len(), usize::MAX);
            assert_eq!(tokens, case.tokens, "{name}");
        }
    }
}

fn parse(config: &Value) -> Result<ModelConfig, String> {
    ModelConfig::parse("config.json".as_ref(), config).map_err(|error| error.message)
}

/// Published configs omit the fields that have transformers' defaults.
#[test]
fn a_short_config_of_gemma_3_has_the_defaults() {
    let config = parse(&json!({
        "architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 255_999, "eoi_token_index": 256_000,
        "eos_token_id": [1, 106], "image_token_index": 262_144, "mm_tokens_per_image": 256, "model_type": "gemma3",
        "text_config": {
            "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
            "rope_scaling": { "factor": 8.0, "rope_type": "linear" }, "sliding_window": 1024,
        },
        "vision_config": { "hidden_size": 1152, "num_hidden_layers": 27 },
    }));
    let config = config.expect("a config");
    assert_eq!((config.q_heads, config.kv_heads, config.head_dim), (8, 4, 256));
    assert_eq!((config.vocab, config.max_len, config.layers), (262_208, 131_072, 34));
    assert_eq!((config.scale, config.tied, config.eos), (1.0 / 16.0, true, vec![1, 106]));
    let full = config.windows.iter().filter(|window| window.is_none()).count();
    assert_eq!((full, config.windows[0]), (5, Some(1024)));
}

#[test]
fn other_quantised_weights_are_refused_by_name() {
    let golden = |model: &str| read_json(&common::dir(model).join("config.json")).expect("a config");
    for (model, quantised, word) in [
        ("llama-tiny", json!({}), "quant_method null"),
        ("llama-tiny", json!({ "quant_method": "awq", "bits": 4 }), "\"awq\""),
        ("llama-tiny", json!({ "quant_method": "gptq", "bits": 4 }), "\"gptq\""),
        ("llama-tiny", json!({ "quant_method": "bitsandbytes" }), "\"bitsandbytes\""),
        ("llama-tiny", json!({ "quant_method": "compressed-tensors" }), "\"compressed-tensors\""),
        ("llama-tiny", json!({ "quant_method": "mxfp4" }), "\"mxfp4\""),
        ("llama-tiny", json!({ "quant_method": "fp8" }), "weight_block_size null"),
        ("deepseek-tiny", json!({ "quant_method": "fp8", "weight_block_size": [64, 128] }), "[64,128]"),
        (
            "deepseek-tiny",
            json!({ "quant_method": "fp8", "fmt": "e5m2", "weight_block_size": [128, 128] }),
            "only fp8 (e4m3)",
        ),
        ("gpt-oss-tiny", json!({ "quant_method": "quark" }), "\"quark\""),
        ("gpt-oss-tiny", json!("mxfp4"), "an object"),
    ] {
        let mut config = golden(model);
        config["quantization_config"] = quantised.clone();
        let error = parse(&config).expect_err("the config is refused");
        assert!(error.contains("quantization_config") && error.contains(word), "{error}");
        // The same inside the text part.
        let nested = json!({ "architectures": config["architectures"], "text_config": config });
        assert_eq!(parse(&nested).expect_err("the config is refused"), error);
    }
}

#[test]
fn damaged_quantised_weights_are_refused() {
    let copy = || Dir::copy_of("gpt-oss-mxfp4");
    let name = "model.layers.0.mlp.experts.down_proj";
    let tensor = |part: &str, dtype, shape: &[usize], size: usize| {
        let bytes = vec![0; size * shape.iter().product::<usize>()];
        (format!("{name}{part}"), dtype, shape.to_vec(), bytes)
    };
    let dir = copy();
    rewrite(&dir, str::to_owned, |_| vec![tensor("_blocks", Dtype::U8, &[4, 64, 2, 16], 1)]);
    refuses(&dir, &["down_proj_blocks has shape [4, 64, 2, 16]", "[4, 64, 3, 16]"]);
    let dir = copy();
    rewrite(&dir, str::to_owned, |_| vec![tensor("_scales", Dtype::BF16, &[4, 64, 3], 2)]);
    refuses(&dir, &["down_proj_scales is BF16"]);
    let dir = copy();
    rewrite(&dir, |old| old.replace(&format!("{name}_scales"), "elsewhere"), |_| Vec::new());
    refuses(&dir, &["tensor model.layers.0.mlp.experts.down_proj is missing"]);
    let dir = Dir::copy_of("deepseek-fp8");
    let scale = "model.layers.0.mlp.up_proj.weight_scale_inv";
    rewrite(&dir, |old| old.replace(scale, "elsewhere"), |_| Vec::new());
    refuses(&dir, &[scale, "is missing"]);
}

#[test]
fn llama_4_has_experts_in_evenly_spaced_layers() {
    let config = |layers: Value| {
        let mut config = read_json(&common::dir("llama4-published").join("config.json")).expect("a config");
        config["text_config"]["moe_layers"] = layers;
        parse(&config).map(|config| (0..4).map(|i| config.experts.is_some_and(|e| e.is_in(i))).collect())
    };
    let has = |layers: [bool; 4]| Ok(layers.to_vec());
    assert_eq!(config(json!(null)), has([false, true, false, true]));
    assert_eq!(config(json!([])), has([false; 4]));
    assert_eq!(config(json!([0, 1, 2, 3])), has([true; 4]));
    assert_eq!(config(json!([1])), has([false, true, false, false]));
    assert_eq!(config(json!([0, 3])), has([true, false, false, true]));
    for uneven in [json!([0, 1, 3]), json!([1, 2]), json!([3, 1]), json!([4]), json!([1, 1]), json!(["1"]), json!(3)] {
        let error = config(uneven.clone()).expect_err("the layers are refused");
        assert!(error.contains("moe_layers"), "{uneven}: {error}");
    }
}

#[test]
fn gemma_4_without_its_defaults_is_refused() {
    let mut config = read_json(&common::dir("gemma4-tiny").join("config.json")).expect("a config");
    config["use_bidirectional_attention"] = json!("vision");
    parse(&config).expect("text has causal attention");
    config.as_object_mut().expect("an object").remove("hidden_size_per_layer_input");
    let error = parse(&config).expect_err("the default is 256");
    assert!(error.contains("hidden_size_per_layer_input"), "{error}");
}
