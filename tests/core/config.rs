//! Configs as text: written, read again, and created from a model's `config.json`.

use std::fs;

use kvarena::config::PrefixMode;
use kvarena::hash::{HashSeed, Hashing};
use kvarena::layout::{Groups, HfError, KvScales, Layout, Reach, Scaling};
use kvarena::stats::Stats;
use kvarena::*;
use serde_json::{Value, json};

fn qwen3() -> Value {
    json!({
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_hidden_layers": 36, "hidden_size": 4096,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "torch_dtype": "bfloat16",
        "sliding_window": null, "use_sliding_window": false,
    })
}

/// Calls `from_hf` for a model with some fields changed. A null field counts as missing.
fn with(changes: Value) -> Result<PoolConfig, HfError> {
    let mut config = qwen3();
    for (name, value) in changes.as_object().expect("changes are fields") {
        config[name] = value.clone();
    }
    PoolConfig::from_hf(&config.to_string())
}

fn pool(layers: u32, shape: KvShape, dtype: KvDtype) -> PoolConfig {
    PoolConfig { layers, shape, dtype, ..Default::default() }
}

#[test]
fn a_config_keeps_its_values_in_text() {
    let pool = PoolConfig {
        capacity: Capacity::Bytes(14 << 30),
        layout: Layout::LayerFirst,
        swap_pages: 7,
        stage_pages: 2,
        tp_size: 2,
        tp_rank: 1,
        ..pool(36, KvShape::heads(8, 128), KvDtype::Bf16)
    };
    let config = EngineConfig {
        prefix: PrefixMode::None,
        hashing: Some(Hashing::VllmSha256Cbor),
        event_pages: 100,
        event_cells: true,
        record_pages: 2,
        max_sequences: 3,
        max_sequence_len: 1000,
        max_tokens: 5000,
        max_steps: 2,
        max_step_tokens: 300,
        promise_ahead: 100,
        state_margin: 7,
        state_gap: 9,
        keep_used_states: true,
        reserved_pages: 3,
        wide_slots: true,
        prefault: false,
        pool,
    };
    let seed = HashSeed::new("42").expect("the text is short");
    let seeded = EngineConfig { hashing: Some(Hashing::VllmSha256CborSeeded(seed)), ..config };
    let text = serde_json::to_string(&seeded).expect("a config is JSON");
    assert_eq!(serde_json::from_str::<EngineConfig>(&text).expect("it was written"), seeded);
    assert!(text.contains(r#""hashing":{"vllm_sha256_cbor_seeded":"42"}"#), "{text}");
    let long = text.replace("42", &"4".repeat(32));
    let error = serde_json::from_str::<EngineConfig>(&long).expect_err("the seed is too long");
    assert!(error.to_string().contains("32"), "{error}");
    let text = serde_json::to_string(&config).expect("a config is JSON");
    assert_eq!(serde_json::from_str::<EngineConfig>(&text).expect("it was written"), config);
    let pool = json!({
        "layers": 36, "shape": {"heads": {"kv_heads": 8, "head_dim": 128}}, "dtype": "bf16", "page_size": 16,
        "capacity": {"bytes": 15_032_385_536_u64}, "layout": "layer_first", "tp_size": 2, "tp_rank": 1,
        "scaling": "static",
        "label_channels": 0, "swap_pages": 7, "stage_pages": 2, "extra_bytes": 0,
        "groups": {"reaches": ["all"], "layers": []},
    });
    assert_eq!(serde_json::from_str::<Value>(&text).expect("JSON")["pool"], pool);
}

#[test]
fn fp8_and_its_scales_are_read_as_they_were_written() {
    let fp8 = PoolConfig { scaling: Scaling::ByToken, ..pool(2, KvShape::heads(3, 64), KvDtype::Fp8E4M3) };
    let text = serde_json::to_string(&fp8).expect("a config is JSON");
    assert!(text.contains(r#""dtype":"fp8_e4m3","scaling":"by_token""#), "{text}");
    assert_eq!(serde_json::from_str::<PoolConfig>(&text).expect("it was written"), fp8);
    // Numbers with a long decimal form.
    let values: Vec<f32> = (1..=12).map(|x| (x as f32).sqrt() / 448.0).collect();
    let scales = KvScales::new(2, 3, values).expect("they are above 0");
    let text = serde_json::to_string(&scales).expect("scales are JSON");
    assert_eq!(serde_json::from_str::<KvScales>(&text).expect("they were written"), scales);
    for (wrong, named) in [
        (json!({"layers": 1, "kv_heads": 1, "values": [1.0]}), "1 scale, expected 2"),
        (json!({"layers": 1, "kv_heads": 1, "values": [1.0, 0.0]}), "scale 0 of V, l0, head 0"),
        (json!({"layers": 1, "kv_heads": 1, "value": [1.0, 1.0]}), "unknown field `value`"),
    ] {
        let error = serde_json::from_value::<KvScales>(wrong).expect_err("refused").to_string();
        assert!(error.contains(named), "{error}");
    }
}

#[test]
fn missing_fields_have_defaults_and_unknown_fields_are_named() {
    let read = |text: &str| serde_json::from_str::<EngineConfig>(text);
    assert_eq!(read("{}").expect("all defaults"), EngineConfig::default());
    assert_eq!(EngineConfig::default(), PoolConfig::default().into());
    let some = read(r#"{"pool": {"page_size": 32}, "max_steps": 2}"#).expect("some defaults");
    let pool = PoolConfig { page_size: 32, ..Default::default() };
    assert_eq!(some, EngineConfig { max_steps: 2, ..EngineConfig::from(pool) });
    for (text, named) in [
        (r#"{"max_sequnces": 3}"#, "unknown field `max_sequnces`"),
        (r#"{"pool": {"block_size": 3}}"#, "unknown field `block_size`"),
        (r#"{"pool": {"dtype": "fp8"}}"#, "unknown variant `fp8`"),
        (r#"{"pool": {"capacity": {"pages": -1}}}"#, "invalid value: integer `-1`"),
        (r#"{"pool": {"shape": {"heads": {"kv_heads": 8}}}}"#, "missing field `head_dim`"),
        (r#"{"prefix": "lru"}"#, "unknown variant `lru`"),
    ] {
        let error = read(text).expect_err("the text is invalid").to_string();
        assert!(error.starts_with(named), "{text}: {error}");
    }
}

#[test]
fn shapes_and_stats_are_written() {
    let config = EngineConfig::from(pool(2, KvShape::heads(4, 64), KvDtype::F16));
    let mut engine = Engine::new(config, Null).expect("a small pool");
    engine.admit(Namespace::default(), &[TokenId::new(1)], 0).expect("there is room");
    let shape = serde_json::to_value(engine.shape()).expect("JSON");
    assert_eq!(shape["layout"]["page_count"], 1024);
    let planes = json!([
        {"name": "k", "heads": 4, "elements": 64, "dtype": "f16", "order": "by_slot"},
        {"name": "v", "heads": 4, "elements": 64, "dtype": "f16", "order": "by_slot"},
    ]);
    assert_eq!(shape["layout"]["planes"], planes);
    let bytes = serde_json::to_value(config.bytes().expect("a small pool")).expect("JSON");
    assert_eq!(bytes["kv"], 2 * 2 * 4 * 64 * 2 * 16 * 1024);
    let text = serde_json::to_string(&engine.stats()).expect("JSON");
    assert_eq!(serde_json::from_str::<Stats>(&text).expect("it was written"), engine.stats());
    assert_eq!(serde_json::from_str::<Value>(&text).expect("JSON")["sequences"], 1);
}

#[test]
fn models_of_the_supported_shape_are_read() {
    let (grouped, bf16) = (KvShape::heads(8, 128), KvDtype::Bf16);
    assert_eq!(with(json!({})), Ok(pool(36, grouped, bf16)));
    assert_eq!(with(json!({"torch_dtype": null, "dtype": "float16"})), Ok(pool(36, grouped, KvDtype::F16)));
    assert_eq!(with(json!({"dtype": "torch.float32"})), Ok(pool(36, grouped, KvDtype::F32)));
    // Without `num_key_value_heads`, every query head has its own K and V. Without `head_dim`, the heads of a Llama
    // model divide `hidden_size`.
    assert_eq!(with(json!({"num_key_value_heads": null})), Ok(pool(36, KvShape::heads(32, 128), bf16)));
    let llama = json!({"model_type": "llama", "head_dim": null, "hidden_size": 2048});
    assert_eq!(with(llama), Ok(pool(36, KvShape::heads(8, 64), bf16)));
    // Disabled features change nothing.
    assert_eq!(with(json!({"num_kv_shared_layers": 0})), Ok(pool(36, grouped, bf16)));
    assert_eq!(with(json!({"v_head_dim": 128, "is_encoder_decoder": false})), Ok(pool(36, grouped, bf16)));
    // Latent rows, for any number of heads.
    let latent = json!({"kv_lora_rank": 512, "qk_rope_head_dim": 64, "v_head_dim": 64});
    let rows = KvShape::Latent { rank: 512, rope: 64 };
    assert_eq!(with(latent), Ok(pool(36, rows, bf16)));
    assert_eq!(with(json!({"kv_lora_rank": 0})), Ok(pool(36, grouped, bf16)));
    // The config of a language model inside another config. The outer config contains the dtype.
    let mut text = qwen3();
    text["torch_dtype"] = Value::Null;
    let parts = json!({"text_config": text, "dtype": "float16", "vision_config": {"num_hidden_layers": 27}});
    assert_eq!(PoolConfig::from_hf(&parts.to_string()), Ok(pool(36, grouped, KvDtype::F16)));
    for model in ["llama-tiny", "qwen3-tiny"] {
        let file = format!("{}/tests/data/{model}/config.json", env!("CARGO_MANIFEST_DIR"));
        let config = PoolConfig::from_hf(&fs::read_to_string(file).expect("a file of the tests"));
        config.expect("a supported model").layout().expect("a pool");
    }
}

/// Returns the groups of `n` layers: every `interval`th layer is in group 0, the others are in group 1.
fn every(n: u32, interval: u32, reach: Reach) -> Groups {
    let layers: Vec<u8> = (1..=n).map(|layer| u8::from(layer % interval != 0)).collect();
    Groups::new(&[Reach::All, reach], &layers).expect("both have layers")
}

#[test]
fn layers_that_read_a_window_or_a_chunk_are_in_groups() {
    let groups = |changes| with(changes).map(|config| config.groups);
    let types = |full: u32, n: u32| -> Vec<&str> {
        let kind = |layer| if layer % full == 0 { "full_attention" } else { "sliding_attention" };
        (1..=n).map(kind).collect()
    };
    // gpt-oss-20b.
    let gpt_oss = json!({
        "layer_types": types(2, 24), "num_hidden_layers": 24, "sliding_window": 128, "initial_context_length": 4096,
    });
    assert_eq!(groups(gpt_oss), Ok(every(24, 2, Reach::Window(128))));
    // Gemma 3 27B, by its types and by its pattern.
    let gemma = json!({"layer_types": types(6, 62), "num_hidden_layers": 62, "sliding_window": 1024});
    assert_eq!(groups(gemma), Ok(every(62, 6, Reach::Window(1024))));
    let gemma = json!({"sliding_window_pattern": 6, "num_hidden_layers": 62, "sliding_window": 1024});
    assert_eq!(groups(gemma), Ok(every(62, 6, Reach::Window(1024))));
    // Llama 4 Scout, whose list of layers is empty, and a model with a list.
    let scout = json!({"num_hidden_layers": 48, "attention_chunk_size": 8192, "no_rope_layers": []});
    assert_eq!(groups(scout), Ok(every(48, 4, Reach::Chunk(8192))));
    let some = json!({"num_hidden_layers": 4, "attention_chunk_size": 8192, "no_rope_layers": [1, 0, 1, 0]});
    assert_eq!(groups(some), Ok(every(4, 2, Reach::Chunk(8192))));
    // A window and a chunk beside full attention.
    let three = json!({
        "layer_types": ["chunked_attention", "full_attention", "sliding_attention"], "num_hidden_layers": 3,
        "sliding_window": 100, "attention_chunk_size": 64,
    });
    let reaches = [Reach::All, Reach::Window(100), Reach::Chunk(64)];
    assert_eq!(groups(three), Groups::new(&reaches, &[2, 0, 1]).map_err(|_| unreachable!()));
    // One window in all layers (Mistral), a disabled window (Qwen 2.5), and layers of one type.
    for plain in [
        json!({"sliding_window": 4096}),
        json!({"sliding_window": 32768, "use_sliding_window": false, "max_window_layers": 21}),
        json!({"num_hidden_layers": 2, "layer_types": ["full_attention", "full_attention"]}),
        json!({"num_hidden_layers": 2, "layer_types": ["sliding_attention", "sliding_attention"]}),
    ] {
        assert_eq!(groups(plain), Ok(Groups::ONE));
    }
    for (changes, message) in [
        (
            json!({"layer_types": types(2, 2), "sliding_window": 128}),
            r#"layer_types is ["sliding_attention","full_attention"], not one for each of num_hidden_layers"#,
        ),
        (json!({"layer_types": types(2, 2), "num_hidden_layers": 2}), "sliding_window is missing"),
        (
            json!({"num_hidden_layers": 4, "attention_chunk_size": 100, "no_rope_layers": [1, 0, 1, 0]}),
            "attention_chunk_size is 100, not a power of two",
        ),
        (
            json!({"num_hidden_layers": 300, "sliding_window_pattern": 2, "sliding_window": 8}),
            "num_hidden_layers is 300, not 256 layers of several kinds at most",
        ),
        (
            json!({"num_hidden_layers": u32::MAX, "attention_chunk_size": 8}),
            "num_hidden_layers is 4294967295, not 256 layers of several kinds at most",
        ),
    ] {
        let error = groups(changes).expect_err("refused").to_string();
        assert_eq!(error, format!("config.json: {message}"));
    }
}

/// In Gemma 4, layers that read all tokens have fewer heads, each of 512 elements.
#[test]
fn layers_that_read_everything_have_heads_of_their_own() {
    let types = |full: u32, n: u32| -> Vec<&str> {
        let kind = |layer| if layer % full == 0 { "full_attention" } else { "sliding_attention" };
        (1..=n).map(kind).collect()
    };
    let gemma = |layers: u32, heads: u32, global: Option<u32>, changes: Value| {
        let mut fields = json!({
            "model_type": "gemma4_text", "num_hidden_layers": layers, "num_key_value_heads": heads, "head_dim": 256,
            "global_head_dim": 512, "num_global_key_value_heads": global, "attention_k_eq_v": true,
            "sliding_window": 1024, "layer_types": types(6, layers), "num_kv_shared_layers": 0,
        });
        let more = changes.as_object().expect("fields").clone();
        fields.as_object_mut().expect("fields").extend(more);
        with(fields)
    };
    let own = |layers, heads, full| {
        let groups = every(layers, 6, Reach::Window(1024));
        let groups = groups.with_shape(1, KvShape::heads(heads, 256), None);
        let shape = KvShape::heads(full, 512);
        Ok(PoolConfig { groups: groups.expect("there is group 1"), ..pool(layers, shape, KvDtype::Bf16) })
    };
    // Gemma 4 26B-A4B and 31B.
    assert_eq!(gemma(30, 8, Some(2), json!({})), own(30, 8, 2));
    assert_eq!(gemma(60, 16, Some(4), json!({})), own(60, 16, 4));
    let layout = own(60, 16, 4).map(|config| config.layout().expect("a pool"));
    let layout = layout.expect("Gemma 4 31B");
    // Ten layers of 4 heads of 512 have the bytes of 5 layers of 16 heads of 256.
    assert_eq!([layout.lanes_of(0), layout.lanes_of(1), layout.tracks_of(1)], [10, 5, 10]);
    assert_eq!([0, 1].map(|group| layout.unused_bytes(group)), [0, 0]);
    // The number of global heads applies only with attention_k_eq_v.
    assert_eq!(gemma(30, 8, Some(2), json!({"attention_k_eq_v": false})), own(30, 8, 8));
    assert_eq!(gemma(30, 8, None, json!({"attention_k_eq_v": null})), own(30, 8, 8));
    let plain = json!({"global_head_dim": 256, "attention_k_eq_v": false});
    let same = gemma(30, 8, Some(2), plain).expect("a pool");
    assert_eq!((same.groups, same.shape), (every(30, 6, Reach::Window(1024)), KvShape::heads(8, 256)));
    let one = gemma(2, 8, Some(2), json!({"layer_types": ["full_attention", "full_attention"]}));
    assert_eq!(one, Ok(pool(2, KvShape::heads(2, 512), KvDtype::Bf16)));
    for (changes, message) in [
        (json!({"attention_k_eq_v": null}), "attention_k_eq_v is missing"),
        (json!({"layer_types": null}), "global_head_dim is 512, which is not supported"),
        (json!({"num_kv_shared_layers": 20}), "num_kv_shared_layers is 20, which is not supported"),
    ] {
        let error = gemma(30, 8, Some(2), changes).expect_err("refused").to_string();
        assert_eq!(error, format!("config.json: {message}"));
    }
}

/// Megabytes of a sequence of 8,192 tokens in bf16, by group and without groups.
#[test]
fn a_sequence_takes_fewer_bytes_with_groups() {
    let types: Vec<_> =
        (1..=62).map(|layer| if layer % 6 == 0 { "full_attention" } else { "sliding_attention" }).collect();
    for (changes, of_groups, one) in [
        (
            json!({
                "num_hidden_layers": 24, "num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128,
                "sliding_window_pattern": 2,
            }),
            [201, 3],
            402,
        ),
        (
            json!({
                "num_hidden_layers": 62, "num_key_value_heads": 16, "head_dim": 128, "sliding_window": 1024,
                "layer_types": types,
            }),
            [671, 503],
            4160,
        ),
        (
            json!({
                "num_hidden_layers": 48, "num_key_value_heads": 8, "head_dim": 128, "attention_chunk_size": 8192,
                "no_rope_layers": [],
            }),
            [402, 0],
            1610,
        ),
    ] {
        let config = with(changes).expect("a pool");
        let layout = config.layout().expect("a pool");
        let megabytes = |bytes: u64| bytes / 1_000_000;
        let by_group = [0, 1].map(|group| megabytes(layout.sequence_bytes(group, 8192)));
        assert_eq!(by_group, of_groups);
        let plain = PoolConfig { groups: Groups::ONE, ..config }.layout().expect("a pool");
        assert_eq!(megabytes(plain.sequence_bytes(0, 8192)), one);
    }
}

#[test]
fn groups_are_read_as_they_were_written() {
    let groups = every(62, 6, Reach::Window(1024));
    let config = PoolConfig { groups, ..pool(62, KvShape::heads(16, 128), KvDtype::Bf16) };
    let text = serde_json::to_string(&config).expect("a config is JSON");
    assert!(text.contains(r#""reaches":["all",{"window":1024}]"#), "{text}");
    assert_eq!(serde_json::from_str::<PoolConfig>(&text).expect("it was written"), config);
    let own = config.groups.with_shape(1, KvShape::heads(8, 64), KvDtype::Fp8E4M3);
    let config = PoolConfig { groups: own.expect("there is group 1"), ..config };
    let text = serde_json::to_string(&config).expect("a config is JSON");
    let written = r#""shapes":[{"shape":{"heads":{"kv_heads":8,"head_dim":64}},"dtype":"fp8_e4m3"}]"#;
    assert!(text.contains(written), "{text}");
    assert_eq!(serde_json::from_str::<PoolConfig>(&text).expect("it was written"), config);
    let layout = config.layout().expect("a pool");
    let text = serde_json::to_value(layout).expect("JSON");
    assert_eq!((&text["lanes"], &text["formats"][1]["lanes"]), (&json!(10), &json!(80)));
    let read = |text: &str| serde_json::from_str::<Groups>(text).map_err(|error| error.to_string());
    let error = read(
        r#"{"reaches": ["all"], "layers": [0], "shapes": [{"shape": {"heads":
        {"kv_heads": 1, "head_dim": 1}}, "dtype": "f32"}]}"#,
    );
    assert_eq!(error.expect_err("one group"), "a shape is given for group 1 of 1 group");
    assert_eq!(read(r#"{"reaches": ["all"], "layers": []}"#), Ok(Groups::ONE));
    let error = read(r#"{"reaches": ["all", {"chunk": 12}], "layers": [0, 1]}"#).expect_err("12 is no power of two");
    assert_eq!(error, "group 1 cannot read a chunk of 12");
}

#[test]
fn other_models_are_refused_by_the_field() {
    let count = "not a whole number from 1 to 4294967295";
    for (changes, message) in [
        (json!({"num_hidden_layers": null}), "num_hidden_layers is missing".into()),
        (json!({"num_hidden_layers": 0}), format!("num_hidden_layers is 0, {count}")),
        (json!({"num_hidden_layers": -3}), format!("num_hidden_layers is -3, {count}")),
        (json!({"num_hidden_layers": 1.5}), format!("num_hidden_layers is 1.5, {count}")),
        (json!({"num_key_value_heads": [8, 4]}), format!("num_key_value_heads is [8,4], {count}")),
        (json!({"head_dim": 4_294_967_296_u64}), format!("head_dim is 4294967296, {count}")),
        // For these model types, hidden_size does not determine head_dim.
        (json!({"head_dim": null}), "head_dim is missing".into()),
        (json!({"head_dim": null, "model_type": "gemma2"}), "head_dim is missing".into()),
        (
            json!({"head_dim": null, "model_type": "llama", "hidden_size": 100}),
            "hidden_size is 100, not a multiple of num_attention_heads".into(),
        ),
        (json!({"torch_dtype": null}), "dtype is missing".into()),
        (json!({"torch_dtype": "int8"}), "torch_dtype is \"int8\", not float32, float16 or bfloat16".into()),
        (json!({"kv_lora_rank": 512}), "qk_rope_head_dim is missing".into()),
        (json!({"kv_lora_rank": "x", "qk_rope_head_dim": 64}), format!("kv_lora_rank is \"x\", {count}")),
        // DeepSeek V3.2 stores keys of an indexer beside the rows.
        (
            json!({"kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128}),
            "index_head_dim is 128, which is not supported".into(),
        ),
        (json!({"v_head_dim": 64}), "v_head_dim is 64, which is not supported".into()),
        (json!({"num_kv_shared_layers": 15}), "num_kv_shared_layers is 15, which is not supported".into()),
        (json!({"is_encoder_decoder": true}), "is_encoder_decoder is true, which is not supported".into()),
        (
            json!({"layer_types": ["full_attention", "sparse_attention"]}),
            "layer_types is \"sparse_attention\", which is not supported".into(),
        ),
        (json!({"layer_types": "full"}), "layer_types is \"full\", not a list".into()),
        (json!({"text_config": 3}), "text_config is 3, not an object".into()),
        (json!({"text_config": {"num_hidden_layers": 2}}), "text_config.num_attention_heads is missing".into()),
    ] {
        let error = with(changes.clone()).expect_err("not supported").to_string();
        assert_eq!(error, format!("config.json: {message}"), "{changes}");
    }
    let long = with(json!({"head_dim": "x".repeat(1000)})).expect_err("no number").to_string();
    assert!(long.len() < 200, "{long}");
    assert_eq!(PoolConfig::from_hf("[]"), Err(HfError::Json { message: "not an object".into() }));
}

#[test]
fn damaged_text_is_refused() {
    let text = qwen3().to_string();
    for end in 0..text.len() {
        assert!(matches!(PoolConfig::from_hf(&text[..end]), Err(HfError::Json { .. })), "cut at {end}");
    }
    // Any value of a field gives a config, or an error that names a field.
    let values =
        [json!(0), json!(1), json!(-1), json!(1e300), json!(u64::MAX), json!("x"), json!([]), json!({}), json!(true)];
    for name in qwen3().as_object().expect("fields").keys().map(String::as_str).chain(["layer_types", "text_config"]) {
        for value in &values {
            match with(json!({name: value})) {
                Ok(config) => drop(config.layout()),
                Err(error) => {
                    assert!(!matches!(error, HfError::Json { .. }), "{name} {value}: {error}")
                }
            }
        }
    }
}
