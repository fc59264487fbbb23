//! Pools of models whose layers keep a state, from the fields of their published `config.json`.

use kvarena::error::ConfigError;
use kvarena::layout::{Groups, HfError, Layout, Reach, StatePart};
use kvarena::{Capacity, KvDtype, KvShape, LayerId, PoolConfig};
use serde_json::{Value, json};

/// A published model: the fields that describe its cache, and what its pool is.
struct Model {
    fields: Value,
    shape: KvShape,
    /// Number of layers with K and V, and with a state.
    layers: [u32; 2],
    token_bytes: u64,
    /// Bytes of a layer's state.
    state_bytes: u64,
    /// Least page size in multiples of 16, and the pages of a state.
    pages: [u32; 2],
}

/// Returns names by place: `kind` at the places from `first` in steps of `step`, else `other`.
fn named(layers: usize, first: usize, step: usize, [kind, other]: [&str; 2]) -> Vec<String> {
    let is_kind = |at: usize| at >= first && (at - first).is_multiple_of(step);
    (0..layers).map(|at| (if is_kind(at) { kind } else { other }).to_owned()).collect()
}

fn delta(fields: Value) -> Value {
    let mut all = json!({
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "linear_num_key_heads": 16, "linear_num_value_heads": 32, "head_dim": 256, "num_attention_heads": 16,
    });
    all.as_object_mut().expect("fields").extend(fields.as_object().expect("fields").clone());
    all
}

const SUPER: &str = "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME";

fn nemotron(fields: Value) -> Value {
    let mut all = json!({
        "model_type": "nemotron_h", "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128,
        "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128, "conv_kernel": 4, "expand": 2,
        "mamba_ssm_cache_dtype": "float32", "sliding_window": null, "torch_dtype": "bfloat16",
    });
    all.as_object_mut().expect("fields").extend(fields.as_object().expect("fields").clone());
    all
}

fn qwen_models() -> [Model; 2] {
    [
        // Qwen3-Next-80B-A3B: every fourth layer computes attention.
        Model {
            fields: delta(json!({
                "model_type": "qwen3_next", "num_hidden_layers": 48, "full_attention_interval": 4,
                "num_key_value_heads": 2, "torch_dtype": "bfloat16",
            })),
            shape: KvShape::heads(2, 256),
            layers: [12, 36],
            token_bytes: 24_576,
            state_bytes: 2_146_304,
            pages: [96, 36],
        },
        // Qwen3.5-9B: the language model beside a vision model.
        Model {
            fields: json!({"model_type": "qwen3_5", "vision_config": {"depth": 27}, "text_config": delta(json!({
                "model_type": "qwen3_5_text", "num_hidden_layers": 32, "num_key_value_heads": 4, "dtype": "bfloat16",
                "layer_types": named(32, 3, 4, ["full_attention", "linear_attention"]), "mamba_ssm_dtype": "float32",
                "full_attention_interval": 4,
            }))}),
            shape: KvShape::heads(4, 256),
            layers: [8, 24],
            token_bytes: 32_768,
            state_bytes: 2_146_304,
            pages: [80, 24],
        },
    ]
}

fn kimi_models() -> [Model; 2] {
    let kimi = |layers: u32, heads: u32, full: Vec<u32>| {
        let kda: Vec<u32> = (1..=layers).filter(|layer| !full.contains(layer)).collect();
        json!({
            "model_type": "kimi_linear", "num_hidden_layers": layers, "num_attention_heads": heads, "head_dim": 72,
            "num_key_value_heads": heads, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
            "v_head_dim": 128, "dtype": "bfloat16", "linear_attn_config": {
                "full_attn_layers": full, "kda_layers": kda, "head_dim": 128, "num_heads": heads,
                "short_conv_kernel_size": 4,
            },
        })
    };
    let shape = KvShape::Latent { rank: 512, rope: 64 };
    [
        // Kimi-Linear-48B-A3B.
        Model {
            fields: kimi(27, 32, vec![4, 8, 12, 16, 20, 24, 27]),
            shape,
            layers: [7, 20],
            token_bytes: 8_064,
            state_bytes: 2_170_880,
            pages: [272, 20],
        },
        // Kimi K3: 93 layers, the language model beside others.
        Model {
            fields: json!({
                "model_type": "kimi_k3",
                "text_config": kimi(93, 96, (4..=92).step_by(4).chain([93]).collect()),
            }),
            shape,
            layers: [24, 69],
            token_bytes: 27_648,
            state_bytes: 6_512_640,
            pages: [240, 69],
        },
    ]
}

fn mamba_models() -> [Model; 6] {
    let granite: Vec<String> = (0..40).map(|at| if at % 10 == 5 { "attention" } else { "mamba" }.to_owned()).collect();
    let nano = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME";
    let (heads8, heads2) = (KvShape::heads(8, 128), KvShape::heads(2, 128));
    [
        // NVIDIA-Nemotron-3-Nano-30B-A3B.
        Model {
            fields: nemotron(json!({
                "num_hidden_layers": 52, "hidden_size": 2688, "mamba_num_heads": 64, "hybrid_override_pattern": nano,
            })),
            shape: heads2,
            layers: [6, 23],
            token_bytes: 6_144,
            state_bytes: 2_134_016,
            pages: [352, 23],
        },
        // NVIDIA-Nemotron-3-Super-120B-A12B.
        Model {
            fields: nemotron(json!({
                "num_hidden_layers": 88, "hidden_size": 4096, "mamba_num_heads": 128, "hybrid_override_pattern": SUPER,
            })),
            shape: heads2,
            layers: [8, 40],
            token_bytes: 8_192,
            state_bytes: 4_255_744,
            pages: [528, 40],
        },
        // granite-4.0-h-small.
        Model {
            fields: json!({
                "model_type": "granitemoehybrid", "num_hidden_layers": 40, "hidden_size": 4096, "layer_types": granite,
                "num_attention_heads": 32, "num_key_value_heads": 8, "mamba_n_heads": 128, "mamba_d_head": 64,
                "mamba_d_state": 128, "mamba_n_groups": 1, "mamba_d_conv": 4, "mamba_expand": 2,
                "torch_dtype": "bfloat16",
            }),
            shape: heads8,
            layers: [4, 36],
            token_bytes: 16_384,
            state_bytes: 4_244_992,
            pages: [272, 36],
        },
        // Falcon-H1-34B: each layer computes attention and keeps a state.
        Model {
            fields: json!({
                "model_type": "falcon_h1", "num_hidden_layers": 72, "hidden_size": 5120, "num_attention_heads": 20,
                "num_key_value_heads": 4, "head_dim": 128, "mamba_d_ssm": 4096, "mamba_n_heads": 32,
                "mamba_d_head": 128, "mamba_d_state": 256, "mamba_n_groups": 2, "mamba_d_conv": 4, "mamba_expand": 2,
                "torch_dtype": "bfloat16",
            }),
            shape: KvShape::heads(4, 128),
            layers: [72, 72],
            token_bytes: 147_456,
            state_bytes: 4_225_024,
            pages: [32, 72],
        },
        // AI21-Jamba-1.5-Mini.
        Model {
            fields: json!({
                "model_type": "jamba", "num_hidden_layers": 32, "hidden_size": 4096, "attn_layer_period": 8,
                "attn_layer_offset": 4, "num_attention_heads": 32, "num_key_value_heads": 8, "mamba_d_state": 16,
                "mamba_d_conv": 4, "mamba_expand": 2, "torch_dtype": "bfloat16", "sliding_window": null,
            }),
            shape: heads8,
            layers: [4, 28],
            token_bytes: 16_384,
            state_bytes: 573_440,
            pages: [48, 28],
        },
        // MiniMax-Text-01.
        Model {
            fields: json!({
                "model_type": "minimax_text_01", "num_hidden_layers": 80, "hidden_size": 6144, "head_dim": 128,
                "num_attention_heads": 64, "num_key_value_heads": 8, "torch_dtype": "bfloat16",
                "attn_type_list": (1..=80).map(|layer| u8::from(layer % 8 == 0)).collect::<Vec<_>>(),
            }),
            shape: heads8,
            layers: [10, 70],
            token_bytes: 40_960,
            state_bytes: 4_194_304,
            pages: [112, 70],
        },
    ]
}

fn lfm2() -> Model {
    // LFM2-8B-A1B.
    let full = [2, 6, 10, 14, 18, 21];
    let kinds: Vec<_> = (0..24).map(|at| if full.contains(&at) { "full_attention" } else { "conv" }).collect();
    Model {
        fields: json!({
            "model_type": "lfm2_moe", "num_hidden_layers": 24, "hidden_size": 2048, "num_attention_heads": 32,
            "num_key_value_heads": 8, "layer_types": kinds, "conv_L_cache": 3, "torch_dtype": "bfloat16",
        }),
        shape: KvShape::heads(8, 64),
        layers: [6, 18],
        token_bytes: 12_288,
        state_bytes: 8_192,
        pages: [16, 1],
    }
}

fn read(fields: &Value) -> Result<PoolConfig, HfError> {
    PoolConfig::from_hf(&fields.to_string())
}

#[test]
fn families_with_states_are_read() {
    let models = qwen_models().into_iter().chain(kimi_models()).chain(mamba_models()).chain([lfm2()]);
    for Model { fields, shape, layers: [attend, keep], token_bytes, state_bytes, pages: [page_size, pages] } in models {
        let model = &fields["model_type"];
        let pool = read(&fields).unwrap_or_else(|error| panic!("{model}: {error}"));
        assert_eq!((pool.layers, pool.shape, pool.dtype), (attend + keep, shape, KvDtype::Bf16), "{model}");
        assert_eq!([0, 1].map(|group| pool.groups.layers_of(group)), [attend, keep], "{model}");
        let parts = pool.groups.state_parts();
        let bytes: u64 = parts.iter().map(|part| u64::from(part.heads) * u64::from(part.head_bytes)).sum();
        assert_eq!((bytes, pool.page_size), (state_bytes, page_size), "{model}");
        let layout = PoolConfig { capacity: Capacity::Pages(pages + 1), ..pool }.layout().expect("a pool");
        assert_eq!(layout.state().map(|state| state.pages), Some(pages), "{model}");
        assert_eq!(layout.sequence_bytes(0, page_size), u64::from(page_size) * token_bytes, "{model}");
        assert_eq!(layout.sequence_bytes(1, 1), u64::from(pages) * layout.page_bytes(), "{model}");
        let state = layout.state().expect("a group keeps a state");
        assert_eq!((layout.tracks_of(1), layout.lanes_of(1)), (0, state.lanes), "{model}");
        // A smaller page is refused, and the error names the least one.
        let min = match (PoolConfig { page_size: 1, ..pool }).layout() {
            Err(ConfigError::StatePage { page_size: 1, min }) => min,
            other => other.map(|_| 1).unwrap_or_else(|error| panic!("{model}: {error}")),
        };
        assert_eq!(min.next_multiple_of(16), page_size, "{model}");
        assert!(PoolConfig { page_size: min, ..pool }.layout().is_ok(), "{model}");
        let below = PoolConfig { page_size: min - 1, ..pool }.layout().map(|_| ());
        let refused = Err(ConfigError::StatePage { page_size: min - 1, min });
        assert!(min == 1 || below == refused, "{model}: {below:?}");
    }
}

/// With 8 ranks, each keeps its heads; with fp8, pages hold more tokens.
#[test]
fn ranks_and_dtypes_change_the_least_page() {
    let [next, _] = qwen_models();
    let [_, k3] = kimi_models();
    let [nano, large, ..] = mamba_models();
    for (model, page_size) in [(&next, 32), (&k3, 32), (&nano, 96), (&large, 144)] {
        let pool = PoolConfig { tp_size: 8, ..read(&model.fields).expect("a pool") };
        assert_eq!(pool.state_page_size(16), Ok(page_size), "{}", model.fields["model_type"]);
    }
    let pool = PoolConfig { dtype: KvDtype::Fp8E4M3, ..read(&next.fields).expect("a pool") };
    assert_eq!(pool.state_page_size(16), Ok(176));
    // The state's dtype is that of the file, else f32.
    let bytes = |changes: Value| {
        let mut fields = next.fields.clone();
        fields.as_object_mut().expect("fields").extend(changes.as_object().expect("fields").clone());
        read(&fields).map(|pool| u64::from(pool.groups.state_parts()[0].head_bytes))
    };
    assert_eq!(bytes(json!({"mamba_ssm_dtype": "bfloat16"})), Ok(128 * 128 * 2));
    assert_eq!(bytes(json!({"mamba_ssm_cache_dtype": "auto"})).map_err(|error| error.to_string()).unwrap_err(), {
        "config.json: mamba_ssm_cache_dtype is \"auto\", not float32, float16 or bfloat16"
    });
}

/// The layers of a model are those that keep something, in their order.
#[test]
fn layers_are_counted_that_keep_something() {
    let [nano, ..] = mamba_models();
    let few = |changes: Value| {
        let mut fields = nano.fields.clone();
        fields.as_object_mut().expect("fields").extend(changes.as_object().expect("fields").clone());
        read(&fields)
    };
    let of =
        |pool: &PoolConfig| (0..pool.layers).map(|layer| pool.groups.group(LayerId::new(layer))).collect::<Vec<_>>();
    let pool = few(json!({"num_hidden_layers": 5, "hybrid_override_pattern": "M-*EM"})).expect("a pool");
    assert_eq!((pool.layers, of(&pool)), (3, vec![1, 0, 1]));
    // A list of kinds has a kind for each layer, so their number may lack.
    let kinds = json!({
        "num_hidden_layers": null, "hybrid_override_pattern": null,
        "layers_block_type": ["mamba", "moe", "attention", "mlp", "mamba", "hybrid"],
    });
    let pool = few(kinds).expect("a pool");
    assert_eq!((pool.layers, of(&pool)), (5, vec![1, 0, 1, 0, 1]));
    // Without states, fields of states have no meaning that is known.
    let error = few(json!({"hybrid_override_pattern": "*-", "num_hidden_layers": 2})).expect_err("no states");
    assert_eq!(error.to_string(), "config.json: mamba_num_heads is 64, which is not supported");
}

#[test]
fn other_states_are_refused_by_the_field() {
    let [next, _] = qwen_models();
    let [linear, _] = kimi_models();
    let [nano, _, granite, _, jamba, minimax] = mamba_models();
    let count = "not a whole number from 1 to 4294967295";
    for (model, changes, message) in [
        (&next, json!({"linear_key_head_dim": [1, 2]}), format!("linear_key_head_dim is [1,2], {count}")),
        (&next, json!({"linear_num_key_heads": null}), "linear_num_key_heads is missing".into()),
        (
            &next,
            json!({"linear_num_key_heads": 5}),
            "linear_num_value_heads is 32, not a multiple of linear_num_key_heads".into(),
        ),
        (
            &next,
            json!({"linear_key_head_dim": u32::MAX}),
            "linear_key_head_dim is 4294967295, not small enough for a head of less than 4 GiB".into(),
        ),
        (
            &next,
            json!({"layer_types": vec!["linear_attention"; 48]}),
            format!(
                "layer_types is {}..., which is not supported",
                &json!(vec!["linear_attention"; 48]).to_string()[..80]
            ),
        ),
        (&next, json!({"layer_types": ["gated"]}), "layer_types is \"gated\", which is not supported".into()),
        (&linear, json!({"linear_attn_config": 3}), "linear_attn_config is 3, not an object".into()),
        (
            &linear,
            json!({"linear_attn_config": {"full_attn_layers": [1], "num_heads": 2}}),
            "linear_attn_config.head_dim is missing".into(),
        ),
        (
            &linear,
            json!({"linear_attn_config": {"full_attn_layers": ["x"]}}),
            "linear_attn_config.full_attn_layers is \"x\", not the place of a layer".into(),
        ),
        (
            &nano,
            json!({"hybrid_override_pattern": "MX", "num_hidden_layers": 2}),
            "hybrid_override_pattern is \"MX\", which is not supported".into(),
        ),
        (
            &nano,
            json!({"hybrid_override_pattern": "M*"}),
            "hybrid_override_pattern is \"M*\", not one for each of num_hidden_layers".into(),
        ),
        (&granite, json!({"mamba_n_groups": 0}), format!("mamba_n_groups is 0, {count}")),
        (&granite, json!({"n_mamba_heads": 2}), "n_mamba_heads is 2, which is not supported".into()),
        (&jamba, json!({"attn_layer_offset": null}), "attn_layer_offset is missing".into()),
        (&jamba, json!({"mamba_d_state": null}), "attn_layer_period is 8, which is not supported".into()),
        (&jamba, json!({"mamba_expand": u32::MAX}), "hidden_size is 4096, not below 2^32 with mamba_expand".into()),
        (&minimax, json!({"attn_type_list": 3}), "attn_type_list is 3, not a list".into()),
    ] {
        let mut fields = model.fields.clone();
        fields.as_object_mut().expect("fields").extend(changes.as_object().expect("fields").clone());
        let error = read(&fields).expect_err("refused").to_string();
        assert_eq!(error, format!("config.json: {message}"), "{changes}");
    }
}

/// A pool's own checks: the least page, the layout and the group.
#[test]
fn pools_of_states_are_checked() {
    let [next, _] = qwen_models();
    let pool = read(&next.fields).expect("a pool");
    assert_eq!(
        PoolConfig { page_size: 64, ..pool }.layout().map(|_| ()),
        Err(ConfigError::StatePage { page_size: 64, min: 88 }),
    );
    let error = PoolConfig { layout: Layout::LayerFirst, ..pool }.layout().map(|_| ());
    assert_eq!(error, Err(ConfigError::LayerFirst { group: 1 }));
    let error = pool.groups.with_shape(1, KvShape::heads(1, 8), None).expect_err("it keeps a state");
    assert_eq!(error.to_string(), "group 1 keeps a state, which has parts and no shape");
    let plain = Groups::new(&[Reach::All, Reach::Window(3)], &[0, 1]).expect("two groups");
    let error = plain.with_state(1, &[StatePart { heads: 1, head_bytes: 1 }]).expect_err("a window");
    assert_eq!(error, ConfigError::StateGroup { group: 1 });
}
