//! Tests model folders as they are published: paths that are no folder, files that are not downloaded, tokenizers,
//! templates, `generation_config.json`, and the order in which the program reads them.

mod common;

use std::fs;
use std::path::Path;

use common::byte_tokenizer::byte_tokenizer;
use common::files::Dir;
use common::listening::Listening;
use common::{JOINED, MODEL, REQUEST, folder, refuses, run_server};
use serde_json::{Value, json};

fn path(dir: &Dir) -> &str {
    dir.path().to_str().expect("UTF-8")
}

/// A model with a tokenizer of single bytes, and a token for images past the vocabulary of 512.
fn with_image_token() -> Dir {
    let dir = Dir::copy_of("qwen3-tiny");
    let mut tokenizer = byte_tokenizer(512);
    tokenizer["added_tokens"] = json!([{
        "id": 512, "content": "<image_soft_token>", "single_word": false, "lstrip": false, "rstrip": false,
        "normalized": false, "special": true,
    }]);
    dir.write("tokenizer.json", tokenizer.to_string());
    dir
}

#[test]
fn paths_that_are_no_folder_say_the_next_step() {
    let model = |path: &str, words: &[&str]| {
        refuses(&["--model", path, "--prompt", "1"], MODEL, words);
        refuses(&["--model", path, "--serve", "127.0.0.1:0"], MODEL, words);
    };
    let hub = ["no folder", "`hf download HuggingFaceTB/SmolLM2-135M --local-dir SmolLM2-135M`"];
    model("HuggingFaceTB/SmolLM2-135M", &hub);
    model("/nowhere/at/all", &["there is no folder /nowhere/at/all", "Hugging Face format"]);
    model("nowhere", &["there is no folder nowhere"]);
    model("./owner/name", &["there is no folder ./owner/name: "]);
    // `tests` is a folder here, so this is no name of the hub.
    model("tests/nothing", &["there is no folder tests/nothing: "]);
    let dir = Dir::copy_of("qwen3-tiny");
    let file = dir.path().join("model.safetensors");
    model(file.to_str().expect("UTF-8"), &["is a file", "the folder that contains it"]);
    let cache = Dir::new();
    fs::create_dir_all(cache.path().join("snapshots/1234")).expect("a folder");
    model(path(&cache), &["cache folder", "/snapshots"]);
    model(path(&Dir::new()), &["config.json"]);
}

#[test]
fn git_lfs_pointers_are_named() {
    let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n";
    for file in ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"] {
        let dir = with_image_token();
        dir.write(file, pointer);
        let words = [file, "Git LFS pointer", "`git lfs pull`", path(&dir)];
        refuses(&["--model", path(&dir), "--prompt", "1"], MODEL, &words);
    }
    let dir = Dir::copy_of("qwen3-tiny");
    fs::remove_file(dir.path().join("model.safetensors")).expect("removed");
    dir.write("a.safetensors", pointer);
    let index = json!({ "weight_map": { "model.norm.weight": "a.safetensors" } });
    dir.write("model.safetensors.index.json", index.to_string());
    let words = ["a.safetensors", "Git LFS pointer"];
    refuses(&["--model", path(&dir), "--prompt", "1"], MODEL, &words);
}

#[test]
fn a_token_past_the_vocabulary_is_refused_where_it_is_used() {
    let dir = with_image_token();
    let model = ["--model", path(&dir), "--max-new-tokens", "2"];
    run_server(&[&model[..], &["--prompt", "A"]].concat(), "").ok();
    let past = ["token 512 is past the model's vocabulary of 512"];
    refuses(&[&model[..], &["--prompt", "<image_soft_token>"]].concat(), REQUEST, &past);
    let request = dir.write("requests.jsonl", r#"{"prompt": [65, 512]}"#);
    let request = request.to_str().expect("UTF-8");
    refuses(&[&model[..], &["--requests", request]].concat(), REQUEST, &past);
}

#[test]
fn a_chat_needs_a_template() {
    let dir = with_image_token();
    let model = ["--model", path(&dir), "--max-new-tokens", "3"];
    let missing = ["no chat template", "chat_template.jinja", "--chat-template FILE"];
    refuses(&[&model[..], &["--chat"]].concat(), REQUEST, &missing);
    let template = dir.write("given.jinja", JOINED);
    let template = ["--chat-template", template.to_str().expect("UTF-8")];
    let chat = run_server(&[&model[..], &template, &["--chat"]].concat(), "hello\n");
    let prompt = run_server(&[&model[..], &["--prompt", "hello"]].concat(), "");
    assert_eq!(chat.ok().out, prompt.out);
    let nothing = ["--chat", "--chat-template", "/nowhere.jinja"];
    refuses(&[&model[..], &nothing].concat(), REQUEST, &["cannot read /nowhere.jinja"]);
    // A fault of the model's own files is not one of the command line.
    let damaged = dir.write("tokenizer_config.json", "{");
    let chat = [&model[..], &template, &["--chat"]].concat();
    refuses(&chat, MODEL, &["tokenizer_config.json"]);
    std::fs::remove_file(damaged).expect("it was written");

    let messages = json!([{ "role": "user", "content": "hello" }]);
    let name = dir.path().file_name().expect("a name").to_str().expect("UTF-8");
    let body = json!({ "model": name, "messages": messages, "max_tokens": 1 });
    let without = Listening::start(&model);
    let (status, answer) = without.post("/v1/chat/completions", &body);
    let message = answer["error"]["message"].as_str().expect("a message");
    assert_eq!(status, 400, "{answer}");
    assert!(missing.iter().all(|word| message.contains(word)), "{message}");
    let body = json!({ "model": name, "prompt": "hello", "max_tokens": 1 });
    assert_eq!(without.post("/v1/completions", &body).0, 200, "completions go on");
    // A given template replaces the model's own.
    dir.write("chat_template.jinja", "{{ raise_exception('the own one') }}");
    let with = Listening::start(&[&model[..], &template].concat());
    let body = json!({ "messages": messages });
    let (status, answer) = with.post("/tokenize", &body);
    assert_eq!((status, &answer["count"]), (200, &json!(5)), "{answer}");
}

/// Recommended parameters are the defaults of requests over HTTP. Options of the command line replace them.
#[test]
fn recommended_parameters_are_defaults_over_http() {
    let dir = Dir::copy_of("qwen3-tiny");
    let name = dir.path().file_name().expect("a name").to_str().expect("UTF-8");
    let case = &common::cases("qwen3-tiny")[3];
    let text = |options: &[&str], more: Value| {
        let server = Listening::start(&[&["--model", path(&dir)], options].concat());
        let mut body = json!({
            "model": name, "prompt": case.prompt, "max_tokens": 16, "seed": 5,
        });
        body.as_object_mut().expect("an object").extend(more.as_object().expect("one").clone());
        let (status, answer) = server.post("/v1/completions", &body);
        assert_eq!(status, 200, "{answer}");
        answer["choices"][0]["text"].as_str().expect("a text").to_owned()
    };
    let golden: Vec<String> = case.tokens[..16].iter().map(u32::to_string).collect();
    let golden = golden.join(" ");
    for greedy in [json!({ "temperature": 0.0 }), json!({ "top_k": 1 }), json!({ "top_p": 1e-6 })] {
        dir.write("generation_config.json", greedy.to_string());
        assert_eq!(text(&[], json!({})).trim(), golden, "{greedy}");
        assert_ne!(text(&["--generation-config", "none"], json!({})).trim(), golden);
        let given = json!({ "temperature": 1, "top_k": 0, "top_p": 1 });
        assert_ne!(text(&[], given).trim(), golden, "{greedy}");
        let options = ["--temperature", "1", "--top-k", "0", "--top-p", "1"];
        assert_ne!(text(&options, json!({})).trim(), golden, "{greedy}");
    }
    dir.write("generation_config.json", json!({ "temperature": 0, "top_p": 0 }).to_string());
    let serve = ["--model", path(&dir), "--serve", "127.0.0.1:0"];
    refuses(&serve, MODEL, &["generation_config.json: top_p 0", "--generation-config none"]);
    assert_ne!(text(&["--generation-config", "none"], json!({})).trim(), golden);
}

/// The weights of this model are damaged. The program finds each other error first.
#[test]
fn weights_are_read_last() {
    let dir = Dir::copy_of("qwen3-tiny");
    dir.write("model.safetensors", "");
    let model = ["--model", path(&dir)];
    let first = |options: &[&str], code: i32, words: &[&str]| {
        refuses(&[&model[..], options].concat(), code, words);
    };
    first(&["--prompt", "1"], MODEL, &["model.safetensors: damaged"]);
    first(&["--prompt", "one"], REQUEST, &["\"one\" is not a token id"]);
    first(&["--prompt", "600"], REQUEST, &["request 0: token 600"]);
    first(&["--prompt", "1", "--max-new-tokens", "9999"], REQUEST, &["2048 positions"]);
    first(&["--prompt", "1", "--pages", "0"], REQUEST, &["page_count is 0"]);
    first(&["--prompt", "1", "--pages", "1", "--max-new-tokens", "99"], REQUEST, &["1 page"]);
    first(&["--prompt", "1", "--scales", "none.json"], REQUEST, &["--kv-scales static"]);
    first(&["--requests", "/nowhere.jsonl"], REQUEST, &["cannot read /nowhere.jsonl"]);
    first(&["--random-requests", "1"], REQUEST, &["COUNT:LEN"]);
    first(&[], REQUEST, &["nothing to generate"]);
    first(&["--chat"], REQUEST, &["no chat template"]);
    first(&["--prompt", "1", "--draft", "2", "--overlap", "on"], REQUEST, &["--overlap on"]);
    first(&["--prompt", "1", "--sparse", "4", "--labels", "none.json"], REQUEST, &["none.json"]);
    first(&["--prompt", "1", "--sparse", "4000"], REQUEST, &["--sparse 4000"]);
    first(&["--serve", "nowhere"], REQUEST, &["cannot listen at nowhere"]);
    let serve = ["--serve", "127.0.0.1:0"];
    first(&[&serve[..], &["--api-key-file", "/nowhere"]].concat(), REQUEST, &["/nowhere"]);
    first(&[&serve[..], &["--cors-origin", "\n"]].concat(), REQUEST, &["origin"]);
    first(&[&serve[..], &["--kv-events", "nowhere"]].concat(), REQUEST, &["nowhere"]);
    dir.write("generation_config.json", r#"{"temperature": -1}"#);
    first(&serve, MODEL, &["temperature -1"]);
    dir.write("generation_config.json", "{}");
    dir.write("tokenizer.json", "{");
    first(&serve, MODEL, &["tokenizer.json"]);
    fs::remove_file(dir.path().join("tokenizer.json")).expect("removed");
    dir.write("chat_template.jinja", "{% for %}");
    first(&serve, MODEL, &["chat template"]);
}

/// The message about a pool that is too small contains the number of pages that suffices, and the number of tokens that
/// the pool holds.
#[test]
fn pages_of_all_groups_are_counted() {
    let gemma = folder("gemma3-tiny");
    let serve = |pages: usize, tokens: usize| {
        let (pages, prompt) = (pages.to_string(), vec!["7"; tokens].join(" "));
        let fixed = ["--model", &gemma, "--chunk", "32", "--max-new-tokens", "1"];
        run_server(&[&fixed[..], &["--prompt", &prompt, "--pages", &pages]].concat(), "")
    };
    let number = |err: &str, before: &str| -> usize {
        let rest = err.split_once(before).expect(err).1;
        rest.split([' ', ':']).next().expect("a word").parse().expect("a number")
    };
    let err = serve(13, 200).err;
    let needed = number(&err, "200 tokens take up to ");
    assert!(err.contains("each group of layers takes pages of its own"), "{err}");
    assert!(err.contains("it has 13 (--pages)") && needed > 13, "{err}");
    serve(needed, 200).ok();
    let err = serve(needed - 1, 200).err;
    assert_eq!(number(&err, "200 tokens take up to "), needed, "{err}");
    let holds = number(&err, "the pool holds ");
    assert_eq!([holds, holds + 1].map(|tokens| serve(needed - 1, tokens).code), [Some(0), Some(REQUEST)]);
}

/// The program contains no path of its build, except the core's sources in messages of panics and the folders of debug
/// information, so it runs anywhere.
#[test]
fn the_program_contains_no_build_path() {
    let program = fs::read(env!("CARGO_BIN_EXE_kvarena-server")).expect("the program");
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).expect("a root");
    let root = root.to_str().expect("UTF-8").as_bytes();
    let is_source = |rest: &[u8]| rest.starts_with(b"/src/") && rest[..80].windows(3).any(|bytes| bytes == b".rs");
    let is_folder = |rest: &[u8]| rest[0] == 0 || rest.starts_with(b"/crates\0");
    let mut found = 0;
    for at in 0..program.len() - root.len() - 80 {
        if program[at..].starts_with(root) {
            let rest = &program[at + root.len()..];
            let shown = String::from_utf8_lossy(&rest[..80]);
            assert!(is_source(rest) || is_folder(rest), "{shown:?}");
            found += 1;
        }
    }
    assert!(found > 0, "panics name the core's sources");
    let away = Dir::new();
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_kvarena-server"));
    let ran = command.current_dir(away.path()).args(["--json", "--quiet"]).output();
    assert!(ran.expect("it runs").status.success());
}
