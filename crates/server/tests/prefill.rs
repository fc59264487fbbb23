//! Prefill and decode apart: one server computes prompts, another one reads them from a folder and generates.

mod common;
#[path = "../examples/router.rs"]
#[allow(dead_code)] // The test has its own listener.
mod router;

use std::fs;
use std::net::TcpListener;
use std::path::Path;

use common::files::Dir;
use common::listening::{Listening, post};
use serde_json::{Value, json};

/// Models without groups of layers, with windows, with windows and experts, and with states.
const MODELS: [&str; 4] = ["qwen3-tiny", "gemma3-tiny", "gpt-oss-tiny", "qwen3-5-tiny"];
/// Tokens of a page: enough for a state of the last model.
const PAGE_SIZE: u64 = 40;

fn request(model: &str, number: usize, len: usize) -> Value {
    let prompt: Vec<_> = (0..len).map(|i| (7 * number + i * i) % 500).collect();
    json!({ "model": model, "prompt": prompt, "max_tokens": 6, "temperature": 0 })
}

fn options<'a>(model: &'a str, folder: &'a Path, more: &[&'a str]) -> Vec<&'a str> {
    let folder = folder.to_str().expect("UTF-8");
    let fixed = ["--model", model, "--page-size", "40", "--swap-space", "0.01", "--cache-dir", folder];
    [&fixed[..], more].concat()
}

/// Returns the text of an answer, and its cached tokens.
fn read((status, answer): (u16, Value)) -> (String, u64) {
    assert_eq!(status, 200, "{answer}");
    let cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64();
    (answer["choices"][0]["text"].as_str().expect("a text").to_owned(), cached.expect("a number"))
}

/// Removes each record file whose number in the order of the folder is a multiple of `step`.
fn remove(folder: &Path, step: usize) -> usize {
    let mut files = Vec::new();
    records(folder, &mut files);
    files.sort();
    files.iter().step_by(step).map(|file| fs::remove_file(file).expect("it is there")).count()
}

fn records(folder: &Path, files: &mut Vec<std::path::PathBuf>) {
    for entry in fs::read_dir(folder).expect("it is there") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            records(&path, files);
        } else if path.components().any(|part| part.as_os_str() == "v1") {
            files.push(path);
        }
    }
}

#[test]
fn the_words_are_those_of_one_server() {
    for name in MODELS {
        let model = common::folder(name);
        let alone = Listening::start(&["--model", &model, "--page-size", "40"]);
        let lens = [200, 90, 30, 121];
        let expected: Vec<_> = (0..)
            .zip(lens)
            .map(|(number, len)| read(alone.post("/v1/completions", &request(name, number, len))).0)
            .collect();
        let dir = Dir::new();
        let prefill = Listening::start(&options(&model, dir.path(), &["--role", "prefill"]));
        let decode = Listening::start(&options(&model, dir.path(), &["--cache-write", "off"]));
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("it is bound").to_string();
        let [first, second] = [&prefill, &decode].map(|server| server.address.clone());
        std::thread::spawn(move || router::serve(&listener, &first, &second));
        for ((number, len), expected) in (0..).zip(lens).zip(expected) {
            let (words, cached) =
                read(post(&address, "/v1/completions", &request(name, number, len)).expect("it answers"));
            // All whole pages before the last token.
            let pages = (len as u64 - 1) / PAGE_SIZE;
            assert_eq!((words, cached), (expected, pages * PAGE_SIZE), "{name}, {len} tokens");
        }
        prefill.reaches("kvarena_server_new_tokens_total", 4);
        // One prompt is shorter than a page.
        prefill.reaches("kvarena_server_store_confirmed_prompts_total", 3);
        assert_eq!(prefill.metric("kvarena_server_store_unconfirmed_prompts_total"), 0);
        decode.reaches("kvarena_server_store_hit_tokens_total", 160 + 80 + 120);
        [alone, prefill, decode].into_iter().for_each(Listening::end);
    }
}

#[test]
fn a_server_waits_for_the_one_that_computes_the_prompt() {
    for name in MODELS {
        let model = common::folder(name);
        let dir = Dir::new();
        let prefill = Listening::start(&options(&model, dir.path(), &["--role", "prefill"]));
        let decode = Listening::start(&options(&model, dir.path(), &["--cache-write", "off", "--cache-wait", "600"]));
        let (prompt, first) = (request(name, 0, 200), prefill.address.clone());
        let both = std::thread::scope(|scope| {
            let waiting = scope.spawn(|| read(decode.post("/v1/completions", &prompt)));
            decode.reaches("kvarena_server_prompt_tokens_total", 200);
            let expected = read(post(&first, "/v1/completions", &prompt).expect("it answers")).0;
            (waiting.join().expect("no panic"), (expected, 160))
        });
        assert_eq!(both.0, both.1, "{name}");
        [prefill, decode].into_iter().for_each(Listening::end);
    }
}

#[test]
fn removed_records_are_computed_again() {
    for name in MODELS {
        let model = common::folder(name);
        let dir = Dir::new();
        let prefill = Listening::start(&options(&model, dir.path(), &["--role", "prefill"]));
        let prompt = request(name, 0, 200);
        let expected = read(prefill.post("/v1/completions", &prompt)).0;
        for step in [1, 3] {
            assert!(remove(dir.path(), step) > 0);
            let decode = Listening::start(&options(&model, dir.path(), &["--cache-write", "off"]));
            let (words, cached) = read(decode.post("/v1/completions", &prompt));
            assert_eq!((&words, cached < 160), (&expected, true), "{name}: {cached} cached");
            decode.end();
            // The prefill server has the prompt, and finds that the folder does not.
            assert_eq!(read(prefill.post("/v1/completions", &prompt)).0, expected);
            let decode = Listening::start(&options(&model, dir.path(), &["--cache-write", "off"]));
            assert_eq!(read(decode.post("/v1/completions", &prompt)), (expected.clone(), 160), "{name}");
            decode.end();
        }
        prefill.end();
    }
}

#[test]
fn a_store_that_fails_delays_no_answer() {
    // A port at which nothing listens.
    let port = TcpListener::bind("127.0.0.1:0").expect("a port").local_addr().expect("it is bound");
    let (model, url) = (common::folder("qwen3-tiny"), format!("redis://{port}"));
    let store = ["--swap-space", "0.01", "--cache-url", &url, "--cache-trust", "--role", "prefill"];
    let server = Listening::start(&[&["--model", &model, "--flush-seconds", "0"], &store[..]].concat());
    for number in 0..2 {
        let (_, cached) = read(server.post("/v1/completions", &request("qwen3-tiny", number, 90)));
        assert_eq!(cached, 0);
    }
    server.reaches("kvarena_server_store_confirmed_prompts_total", 2);
    server.reaches("kvarena_server_store_unconfirmed_prompts_total", 2);
    assert!(server.metric("kvarena_server_store_failed_calls_total{store=\"redis\"}") >= 5);
    server.end();
}

#[test]
fn a_server_of_prompts_needs_a_store_that_it_writes() {
    let model = ["--random-requests", "1:8", "--model", &common::folder("qwen3-tiny"), "--role", "prefill"];
    let folder = ["--swap-space", "0.01", "--cache-dir", "/tmp/none", "--cache-write", "off"];
    for more in [&[][..], &folder] {
        common::refuses(&[&model, more].concat(), common::REQUEST, &["--role prefill", "--cache-dir"]);
    }
}
