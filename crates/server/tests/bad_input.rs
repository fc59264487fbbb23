//! Tests that the program rejects bad input: the message names the wrong value, the exit code is 2 for a request or an
//! option and 3 for a model, and the program does not panic.

mod common;

use std::fs;

use common::files::Dir;
use common::{MODEL, REQUEST, folder, refuses};
use serde_json::{Value, json};

/// Runs the program on a model directory and expects an error.
#[track_caller]
fn refuses_model(dir: &Dir, words: &[&str]) {
    refuses(&["--model", dir.path().to_str().expect("UTF-8"), "--prompt", "1 2"], MODEL, words);
}

#[track_caller]
fn refuses_config(model: &str, change: impl FnOnce(&mut Value), words: &[&str]) {
    let mut words = words.to_vec();
    words.push("config.json");
    refuses_model(&Dir::with_config(model, change), &words);
}

#[test]
fn missing_files_are_named() {
    refuses(&["--model", "/nowhere/at/all", "--prompt", "1"], MODEL, &["/nowhere/at/all"]);
    let dir = Dir::new();
    refuses_model(&dir, &["cannot read", "config.json"]);
    let dir = Dir::copy_of("llama-tiny");
    fs::remove_file(dir.path().join("model.safetensors")).expect("removed");
    refuses_model(&dir, &["neither model.safetensors nor"]);
    let requests = ["--requests", "/nowhere.jsonl"];
    refuses(&requests, REQUEST, &["cannot read /nowhere.jsonl"]);
}

#[test]
fn unsupported_configs_are_refused() {
    refuses_config("llama-tiny", |c| c["architectures"] = json!(["MambaForCausalLM"]), &["MambaForCausalLM"]);
    refuses_config("llama-tiny", |c| c["rope_parameters"]["rope_type"] = json!("dynamic"), &["dynamic", "rope"]);
    refuses_config("llama-tiny", |c| c["rope_parameters"] = json!("x"), &["rope_parameters"]);
    refuses_config(
        "llama-tiny",
        |c| {
            c["rope_parameters"] = Value::Null;
            c["rope_scaling"] = json!({ "type": "dynamic", "factor": 2.0 });
        },
        &["dynamic"],
    );
    refuses_config(
        "llama-tiny",
        |c| c["rope_parameters"] = json!({ "rope_type": "llama3", "factor": 8.0, "rope_theta": 5e5 }),
        &["low_freq_factor is missing"],
    );
    refuses_config("llama-tiny", |c| c["hidden_act"] = json!("gelu"), &["gelu"]);
    refuses_config("llama-tiny", |c| c["num_key_value_heads"] = json!(3), &["4 query heads", "3"]);
    refuses_config("llama-tiny", |c| c["hidden_size"] = json!(0), &["hidden_size", "0"]);
    refuses_config("llama-tiny", |c| c["hidden_size"] = json!("big"), &["hidden_size", "big"]);
    refuses_config("llama-tiny", |c| c["head_dim"] = json!(31), &["head_dim 31"]);
    refuses_config("llama-tiny", |c| c["vocab_size"] = Value::Null, &["vocab_size is missing"]);
    refuses_config("llama-tiny", |c| c["num_hidden_layers"] = json!(1_u64 << 60), &["num_hidden_layers"]);
    refuses_config("qwen3-tiny", |c| c["quantization_config"] = json!({}), &["quantization_config"]);
    let dir = Dir::copy_of("llama-tiny");
    dir.write("config.json", "{ \"hidden_size\": ");
    refuses_model(&dir, &["config.json", "not valid JSON"]);
}

#[test]
fn missing_and_misshapen_tensors_are_refused() {
    let shape = "[512, 128]";
    let dir = Dir::with_config("llama-tiny", |c| c["vocab_size"] = json!(513));
    refuses_model(&dir, &["model.embed_tokens.weight", shape, "[513, 128]"]);
    let dir = Dir::with_config("llama-tiny", |c| c["intermediate_size"] = json!(255));
    refuses_model(&dir, &["mlp.gate_proj.weight", "[256, 128]", "[255, 128]"]);
    let dir = Dir::with_config("qwen3-tiny", |c| c["num_hidden_layers"] = json!(4));
    refuses_model(&dir, &["model.layers.3.self_attn.q_proj.weight is missing"]);
    let dir = Dir::with_config("qwen3-tiny", |c| c["tie_word_embeddings"] = json!(false));
    refuses_model(&dir, &["lm_head.weight is missing"]);
    let dir = Dir::with_config("llama-tiny", |c| c["architectures"] = json!(["Qwen3ForCausalLM"]));
    refuses_model(&dir, &["q_norm.weight is missing"]);
}

#[test]
fn safetensors_cut_at_any_place() {
    let whole = fs::read(common::dir("llama-tiny").join("model.safetensors")).expect("a model");
    let header = u64::from_le_bytes(whole[..8].try_into().expect("8 bytes")) as usize;
    let dir = Dir::copy_of("llama-tiny");
    for len in [0, 1, 7, 8, 9, header, header + 8, header + 9, whole.len() / 2, whole.len() - 1] {
        dir.write("model.safetensors", &whole[..len]);
        refuses_model(&dir, &["model.safetensors", "damaged or truncated"]);
    }
    let mut longer = whole.clone();
    longer.push(0);
    dir.write("model.safetensors", &longer);
    refuses_model(&dir, &["damaged or truncated"]);
    let mut huge = whole;
    huge[..8].copy_from_slice(&u64::MAX.to_le_bytes());
    dir.write("model.safetensors", &huge);
    refuses_model(&dir, &["damaged or truncated"]);
}

#[test]
fn an_index_of_missing_shards_is_refused() {
    let dir = Dir::copy_of("llama-tiny");
    let whole = dir.path().join("model.safetensors");
    fs::rename(&whole, dir.path().join("a.safetensors")).expect("renamed");
    let index = |map: Value| dir.write("model.safetensors.index.json", json!({ "weight_map": map }).to_string());
    index(json!({ "model.norm.weight": "b.safetensors" }));
    refuses_model(&dir, &["cannot read", "b.safetensors"]);
    index(json!({ "model.nothing": "a.safetensors" }));
    refuses_model(&dir, &["a.safetensors holds no tensor model.nothing"]);
    index(json!({ "model.norm.weight": "../a.safetensors" }));
    refuses_model(&dir, &["no plain file name"]);
    index(json!(5));
    refuses_model(&dir, &["weight_map is missing"]);
}

#[test]
fn requests_that_never_fit_are_refused() {
    let refuse = |line: &str, options: &[&str], words: &[&str]| {
        let dir = Dir::new();
        let path = dir.write("requests.jsonl", format!("{{\"prompt\": [1]}}\n{line}\n"));
        let fixed = ["--json", "--requests", path.to_str().expect("UTF-8"), "--model", &folder("qwen3-tiny")];
        refuses(&[&fixed[..], options].concat(), REQUEST, words);
    };
    refuse(r#"{"prompt": [1, 512]}"#, &[], &["request 1", "token 512", "512 tokens"]);
    refuse(r#"{"prompt": [1, 4294967295]}"#, &[], &["request 1", "token 4294967295"]);
    refuse(r#"{"prompt": [1], "prediction": [3, 600]}"#, &[], &["request 1", "token 600"]);
    refuse(r#"{"prompt": [1], "prediction": 7}"#, &[], &[":2:", "prediction"]);
    refuse(r#"{"prompt": [1, 4294967296]}"#, &[], &[":2:", "4294967296"]);
    refuse(r#"{"prompt": [-1]}"#, &[], &[":2:", "-1"]);
    refuse(r#"{"prompt": []}"#, &[], &["request 1", "no tokens"]);
    refuse(r#"{"prompt": "hello"}"#, &[], &[":2:", "no tokenizer", "hello"]);
    refuse(r#"{"prompt": [1], "stop_token_ids": 5.5}"#, &[], &[":2: stop_token_ids: 5.5 is not"]);
    refuse(r#"{"max_new_tokens": 3}"#, &[], &[":2:", "prompt is missing"]);
    refuse(r#"{"prompt": [1]"#, &[], &[":2:", "not valid JSON"]);
    refuse(r#"{"prompt": [1], "max_new_tokens": 2049}"#, &[], &["request 1", "2049", "2048 positions"]);
    refuse(r#"{"prompt": [1], "temperature": -1}"#, &[], &["temperature -1"]);
    refuse(r#"{"prompt": [1], "top_p": 0}"#, &[], &["top_p 0"]);
    refuse(r#"{"prompt": [1], "n": 0}"#, &[], &["n is 0"]);
    let long: Vec<u32> = vec![1; 2049];
    refuse(&json!({ "prompt": long }).to_string(), &[], &["2049 tokens", "2048 positions"]);
    let long: Vec<u32> = vec![1; 65];
    let pool = ["--pages", "4", "--page-size", "16"];
    refuse(&json!({ "prompt": long }).to_string(), &pool, &["65 tokens", "holds 64 (4 pages of 16)"]);
    refuse(r#"{"prompt": [1, 2], "max_new_tokens": 64}"#, &pool, &["65 tokens", "holds 64"]);
}

#[test]
fn invalid_options_are_refused() {
    let refuse = |options: &[&str], words: &[&str]| {
        let arguments = [&["--prompt", "1"], options].concat();
        refuses(&arguments, REQUEST, words);
    };
    refuse(&["--page-size", "0"], &["page_size is 0"]);
    refuse(&["--page-size", "5000"], &["page_size 5000"]);
    refuse(&["--pages", "0"], &["page_count is 0"]);
    refuse(&["--chunk", "0"], &["--chunk"]);
    refuse(&["--concurrency", "0"], &["--concurrency"]);
    refuse(&["--concurrency", "4294967295"], &["max_sequences"]);
    refuse(&["--threads", "99999999"], &["--threads"]);
    refuse(&["--layout", "diagonal"], &["diagonal"]);
    refuse(&["--kv-dtype", "fp4"], &["fp4"]);
    let static_fp8 = ["--kv-dtype", "fp8", "--kv-scales", "static", "--scales"];
    refuse(&["--scales", "none.json"], &["--kv-scales static"]);
    refuse(&["--kv-dtype", "fp8", "--scales", "none.json"], &["--kv-scales static"]);
    let files = Dir::new();
    for (text, word) in [
        (r#"{"layers": 1, "kv_heads": 1, "values": [1.0]}"#, "1 scale"),
        (r#"{"layers": 1, "kv_heads": 1, "values": [1.0, "x"]}"#, "NaN"),
        (r#"{"layers": -1, "kv_heads": 1, "values": []}"#, "layers"),
    ] {
        let file = files.write("scales.json", text);
        refuse(&[&static_fp8[..], &[file.to_str().expect("UTF-8")]].concat(), &[word]);
    }
    refuse(&["--backend", "cuda", "--calibrate", "none.json"], &["--calibrate"]);
    refuse(&["--backend", "cpu", "--bench", "decode", "--random-model", "qwen3-0.6b"], &["--bench"]);
    refuse(&["--sparse", "0"], &["--sparse", "\"0\""]);
    refuse(&["--sparse", "8,0"], &["--sparse", "\"0\""]);
    refuse(&["--sparse", "8,x"], &["--sparse", "\"x\""]);
    let tiny = ["--model", &folder("qwen3-tiny")];
    refuse(&[&tiny[..], &["--sparse", "2049"]].concat(), &["--sparse 2049", "2048 tokens"]);
    refuse(&[&tiny[..], &["--sparse", "8,65"]].concat(), &["label_channels", "65", "64"]);
    refuse(&[&tiny[..], &["--sparse", "8", "--labels", "none.json"]].concat(), &["none.json"]);
    let latent = ["--model", &folder("deepseek-tiny")];
    refuse(&[&latent[..], &["--sparse", "8"]].concat(), &["label_channels"]);
    refuse(&[&latent[..], &["--calibrate", "none.json"]].concat(), &["--calibrate", "latent"]);
    refuse(&["--labels", "none.json"], &["--sparse"]);
    refuse(&["--recall"], &["--sparse"]);
    refuse(&["--sparse", "8", "--draft", "3"], &["--sparse", "--draft"]);
    let labels = files.write("labels.json", r#"{"layers": 1, "kv_heads": 1, "channels": 2, "values": [3, 1]}"#);
    let labels = labels.to_str().expect("UTF-8");
    refuse(&[&tiny[..], &["--sparse", "8", "--labels", labels]].concat(), &["channel 1"]);
    refuses(&["--chat", "--sparse", "8"], REQUEST, &["--labels"]);
    refuses(&["--chat", "--n", "4"], REQUEST, &["--chat", "--n 4"]);
    if !cfg!(feature = "cuda") {
        refuse(&["--backend", "cuda"], &["--features cuda"]);
    }
    refuses(&["--model", &folder("llama-tiny")], REQUEST, &["--requests"]);
}

#[test]
fn invalid_draft_options_are_refused() {
    let refuse = |options: &[&str], words: &[&str]| {
        refuses(&[&["--prompt", "1"], options].concat(), REQUEST, words);
    };
    refuse(&["--draft", "0"], &["--draft"]);
    refuse(&["--draft", "64"], &["--draft", "64", "63"]);
    refuse(&["--draft-tree"], &["--draft <N>"]);
    refuse(&["--draft", "3", "--overlap", "on"], &["--draft", "--overlap on"]);
    refuse(&["--draft", "3", "--calibrate", "none.json"], &["--draft", "--calibrate"]);
    let windows = ["--model", &folder("gpt-oss-tiny"), "--draft", "3", "--draft-tree"];
    refuse(&windows, &["--draft-tree", "sliding windows", "layer 0"]);
    refuses(&[&windows[..], &["--serve", "127.0.0.1:0"]].concat(), REQUEST, &["windows"]);
}

#[test]
fn invalid_server_options_are_refused() {
    refuses(&["--serve", "nowhere"], REQUEST, &["cannot listen at nowhere"]);
    refuses(&["--serve", "127.0.0.1:0", "--chat"], REQUEST, &["--serve", "--chat"]);
    refuses(&["--serve", "127.0.0.1:0", "--queue", "0"], REQUEST, &["--queue"]);
}
