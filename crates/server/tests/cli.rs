//! Tests the program from outside: its JSON output, samples, cancellation, chat and text.

mod common;

use common::byte_tokenizer::byte_tokenizer;
use common::files::Dir;
use common::{MODEL, REQUEST, Ran, folder, refuses, run_server, serve_twice, tiny};
use serde_json::{Value, json};

/// Returns the tokens of each line of a run.
fn tokens(ran: Ran) -> Vec<Value> {
    ran.lines().into_iter().map(|mut line| line["tokens"].take()).collect()
}

/// Without arguments the program prints answers and the savings of the cache.
#[test]
fn the_command_of_the_readme_explains_words() {
    let ran = run_server(&[], "").ok();
    for (question, answer) in [
        ("> What is a page?", "a page is room for the keys and values of a few tokens in all layers."),
        ("> What is the fence?", "the fence keeps pages that were given up until no kernel can"),
        ("> Explain eviction.", "eviction drops the prefixes that nobody has used for the longest"),
    ] {
        let rest = ran.out.split_once(question).map(|(_, rest)| rest.trim_start());
        assert!(rest.is_some_and(|rest| rest.starts_with(answer)), "{question}: {}", ran.out);
    }
    let saved: Vec<&str> = ran.out.lines().filter(|line| line.contains("in the cache)")).collect();
    assert_eq!(saved.len(), 8);
    assert!(saved[0].contains("(0 of ") && saved[1..].iter().all(|line| line.contains("(32 of ")));
    for word in ["tokens/s", "time to first token", "reuse"] {
        assert!(ran.err.contains(word), "{word} is not in: {}", ran.err);
    }
    let lines = run_server(&["--json"], "").lines();
    assert_eq!(lines.iter().filter(|line| line["text"].is_string()).count(), 8);
}

#[test]
fn a_gguf_file_is_a_model() {
    let dir = folder("gguf");
    let golden = std::fs::read(format!("{dir}/models.json")).expect("the file exists");
    let golden: Value = serde_json::from_slice(&golden).expect("JSON");
    let case = &golden["llama"]["cases"][1];
    let request = json!({ "prompt": case["prompt"], "max_new_tokens": 20 }).to_string();
    let args = ["--requests", "-", "--json", "--ignore-eos", "--kv-dtype", "f32", "--model"];
    let ran = run_server(&[&args[..], &[&format!("{dir}/llama.gguf")]].concat(), &request);
    assert_eq!(ran.lines()[0]["tokens"], case["tokens"]);
    let missing = "none.gguf: give the path of a GGUF file or of a model folder";
    refuses(&["--model", &format!("{dir}/none.gguf")], MODEL, &[missing]);
    refuses(&["--model", &dir], MODEL, &[&format!("give one of them, such as --model {dir}/gemma3.gguf")]);
}

#[test]
fn a_chat_with_the_glossary_explains_its_words() {
    let ran = run_server(&["--chat"], "what is a slot?\nand what is a zebra?\n").ok();
    let slot = "a slot is the place of one token in the pool: page times page size plus offset.";
    let lines: Vec<&str> = ran.out.lines().map(str::trim).collect();
    assert_eq!(lines.len(), 2, "no prompt sign without a terminal: {}", ran.out);
    assert_eq!(lines[0], slot);
    assert!(lines[1].starts_with("i do not know that word."), "{}", lines[1]);
}

/// At the prompt no stream can be cancelled, so the first Ctrl-C ends the program.
#[cfg(unix)]
#[test]
fn ctrl_c_at_the_prompt_ends_a_chat() {
    use std::io::{BufRead, BufReader, Write};
    use std::process::{Command, Stdio};
    let mut child = Command::new(env!("CARGO_BIN_EXE_kvarena-server"))
        .args(["--chat", "--quiet"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the program starts");
    let mut input = child.stdin.take().expect("piped");
    input.write_all(b"what is a page?\n").expect("the program reads");
    let mut note = String::new();
    // The program prints this note last before the prompt.
    let mut notes = BufReader::new(child.stderr.take().expect("piped"));
    notes.read_line(&mut note).expect("a note");
    assert!(note.ends_with("reused)\n"), "{note}");
    let ended = loop {
        // A Ctrl-C before the program reaches the prompt cancels nothing; the next one ends the program.
        let sent = Command::new("kill").args(["-INT", &child.id().to_string()]).status();
        assert!(sent.expect("`kill` exists").success());
        if let Some(status) = child.try_wait().expect("the child is ours") {
            break status;
        }
        std::thread::sleep(std::time::Duration::from_millis(10));
    };
    assert_eq!(ended.code(), Some(130));
    drop(input);
}

/// The JSON interface: `kvarena-server --model DIR --requests FILE --json` and its options.
#[test]
fn requests_and_answers_are_json_lines() {
    let options: [&[&str]; 7] = [
        &[],
        &["--page-size", "1", "--layout", "layer-first", "--kv-dtype", "f32", "--concurrency", "1"],
        &["--page-size", "64", "--pages", "3", "--kv-dtype", "f16", "--prefix", "off"],
        &["--chunk", "7", "--overlap", "--no-prefix"],
        &["--draft", "3"],
        &["--draft", "9", "--draft-tree", "--chunk", "7", "--fail-every", "4", "--page-size", "1"],
        &["--fail-every", "5", "--overlap", "--backend", "cpu", "--prefix", "on", "--threads", "1"],
    ];
    for model in common::MODELS {
        let (files, cases) = (Dir::new(), common::cases(model));
        let file = files.write("requests.jsonl", common::golden_requests(model));
        let fixed = ["--model", &folder(model), "--requests", file.to_str().expect("UTF-8"), "--json"];
        for options in options {
            let lines = run_server(&[&fixed[..], options].concat(), "").lines();
            assert_eq!(lines.len(), cases.len());
            for (number, (line, case)) in lines.iter().zip(&cases).enumerate() {
                assert_eq!(line["index"], number);
                assert_eq!(line["tokens"], json!(case.tokens), "{model} {number} {options:?}");
            }
            let cached = |number: usize| lines[number]["cached_tokens"].as_u64().expect("a number");
            if options.contains(&"1") && options.contains(&"f32") {
                // Cases 3, 4 and 6 share a prefix.
                assert_eq!((cached(0), cached(4), cached(6)), (0, 20, 48), "{model}");
            }
            if options.contains(&"--no-prefix") || options.contains(&"off") {
                assert!((0..lines.len()).all(|number| cached(number) == 0));
            }
        }
    }
}

/// One run writes static scales, and another run reads them. The second run's logits differ from those with scales of 1
/// and with scales by token.
#[test]
fn scales_are_measured_and_given() {
    let files = Dir::new();
    let file = files.write("scales.json", "");
    let path = file.to_str().expect("UTF-8");
    let requests = ["--prompt", "5 6 7 8 9", "--prompt", "9 8 7", "--max-new-tokens", "12", "--json"];
    let run = |options: &[&str]| tiny(&[&requests[..], options].concat(), "").lines();
    let plain = run(&["--kv-dtype", "f32"]);
    assert_eq!(run(&["--calibrate", path]), plain, "measuring changes no token");
    let written = std::fs::read_to_string(&file).expect("the file is written");
    assert!(written.starts_with(r#"{"layers":"#), "{written}");
    let fp8 = ["--kv-dtype", "fp8", "--first-logits", "8"];
    let given = run(&[&fp8[..], &["--kv-scales", "static", "--scales", path]].concat());
    let ones = run(&[&fp8[..], &["--kv-scales", "static"]].concat());
    let made = run(&fp8);
    assert_eq!((given.len(), made.len()), (2, 2));
    for (given, others) in given.iter().zip(ones.iter().zip(&made)) {
        assert_ne!(given["first_logits"], others.0["first_logits"]);
        assert_ne!(given["first_logits"], others.1["first_logits"]);
    }
}

#[test]
fn first_logits_are_printed_on_request() {
    let cases = common::cases("qwen3-tiny");
    let request = |case: &common::Case| json!({ "prompt": case.prompt, "max_new_tokens": 1 });
    let input: Vec<String> = cases.iter().map(|case| request(case).to_string()).collect();
    let options = ["--requests", "-", "--json", "--first-logits", "8", "--kv-dtype", "f32"];
    let lines = tiny(&options, &input.join("\n")).lines();
    assert_eq!(lines.len(), cases.len());
    for (line, case) in lines.iter().zip(cases) {
        let logits = line["first_logits"].as_array().expect("a list");
        assert_eq!(logits.len(), 8);
        for (actual, expected) in logits.iter().zip(case.first_logits_head) {
            let actual = actual.as_f64().expect("a number");
            assert!(common::agree(actual, expected), "{actual} is not {expected}");
        }
    }
}

/// A model with windows generates the same tokens if its pool holds one request and its pages return from swap memory.
#[test]
fn swap_memory_keeps_the_pages_of_all_groups() {
    let fixed = ["--model", &folder("gemma3-tiny"), "--pages", "24"];
    let serve = |cache: &[&str]| serve_twice(&[], &[&fixed[..], cache].concat(), 96);
    let (expected, _) = serve(&[]);
    let (tokens, line) = serve(&["--swap-space", "0.01"]);
    assert_eq!(tokens, expected);
    assert!(line.contains(" loaded") && !line.contains(" 0 loaded"), "{line}");
}

/// Samples differ from the first one and do not depend on batching; greedy samples have the golden tokens.
#[test]
fn samples_share_the_prompt() {
    let case = &common::cases("qwen3-tiny")[5];
    let request = |temperature: f32| json!({ "prompt": case.prompt, "max_new_tokens": 20, "n": 4, "temperature": temperature, "seed": 9 });
    let input = format!("{}\n{}\n", request(0.0), request(1.0));
    let mut sampled = Vec::new();
    let small = ["--page-size", "16", "--pages", "6"];
    let options: [&[&str]; 5] = [&[], &["--overlap"], &["--concurrency", "1"], &small, &["--no-prefix"]];
    for options in options {
        let fixed = ["--requests", "-", "--json", "--kv-dtype", "f32"];
        let ran = tiny(&[&fixed[..], options].concat(), &input);
        let forks = ran.err.contains("forks 6");
        let lines = ran.lines();
        assert_eq!(lines.len(), 8);
        for (number, line) in lines.iter().enumerate() {
            assert_eq!(line["index"], number / 4);
            assert_eq!(line.get("sample").and_then(Value::as_u64).unwrap_or(0), number as u64 % 4);
        }
        assert!(lines[..4].iter().all(|line| line["tokens"] == json!(case.tokens)), "{options:?}");
        let tokens: Vec<Value> = lines[4..].iter().map(|line| line["tokens"].clone()).collect();
        assert!((1..4).all(|i| tokens[i] != tokens[0]), "samples differ");
        sampled.push(tokens);
        if options.is_empty() || options == ["--overlap"] {
            assert_eq!(lines[1]["cached_tokens"], case.prompt.len());
            assert!(forks, "{options:?}");
        }
    }
    assert!(sampled.iter().all(|tokens| *tokens == sampled[0]), "batching changes no sample");
}

#[test]
fn stop_tokens_and_cancelled_clients_end_a_stream() {
    let case = &common::cases("llama-tiny")[4];
    let third = case.tokens[2];
    let requests = [
        json!({ "prompt": case.prompt, "max_new_tokens": 20, "stop_token_ids": [third] }),
        json!({ "prompt": case.prompt, "max_new_tokens": 20, "cancel_after": 5 }),
        json!({ "prompt": case.prompt, "max_new_tokens": 20, "cancel_after": 0 }),
        json!({ "prompt": case.prompt, "max_new_tokens": 0 }),
        json!({ "prompt": case.prompt, "max_new_tokens": 20 }),
    ];
    let input = requests.map(|request| request.to_string()).join("\n");
    for options in [
        &[][..],
        &["--overlap"],
        &["--chunk", "9"],
        &["--overlap", "--concurrency", "1"],
        &["--draft", "7", "--draft-tree"],
    ] {
        let fixed = ["--model", &folder("llama-tiny"), "--requests", "-", "--json"];
        let ran = run_server(&[&fixed[..], options].concat(), &input);
        assert!(ran.err.contains("cancelled 2"), "{}", ran.err);
        let (lines, lengths) = (ran.lines(), [3, 5, 0, 0, 20]);
        assert_eq!(lines.len(), lengths.len(), "{options:?}");
        for (line, len) in lines.iter().zip(lengths) {
            assert_eq!(line["tokens"], json!(case.tokens[..len]), "{options:?}");
            assert_eq!(line.get("cancelled").is_some(), line["index"] == 1 || line["index"] == 2);
        }
    }
}

/// Hashes of pages need a name for each namespace.
#[test]
fn namespaces_are_served_with_hashed_pages() {
    let prompt: Vec<u32> = (0..20).collect();
    let request = |namespace| json!({ "prompt": prompt, "max_new_tokens": 1, "namespace": namespace });
    let input = [0, 1, 2, 1].map(|namespace| request(namespace).to_string()).join("\n");
    let fixed = ["--requests", "-", "--json", "--concurrency", "1"];
    for options in [&[][..], &["--kv-events", "tcp://127.0.0.1:0"]] {
        let lines = tiny(&[&fixed[..], options].concat(), &input).lines();
        let cached: Vec<Value> = lines.iter().map(|line| line["cached_tokens"].clone()).collect();
        assert_eq!(cached, [0, 0, 0, 16], "{options:?}");
    }
}

/// A prediction that equals the answer saves steps, and the report counts the accepted drafts.
#[test]
fn a_correct_prediction_saves_steps() {
    let case = &common::cases("qwen3-tiny")[4];
    let prediction = [&case.prompt[case.prompt.len() - 2..], &case.tokens].concat();
    let request = json!({ "prompt": case.prompt, "max_new_tokens": 20, "prediction": prediction });
    let run = |options: &[&str]| {
        let fixed = ["--requests", "-", "--json", "--kv-dtype", "f32"];
        let ran = tiny(&[&fixed[..], options].concat(), &request.to_string());
        let err = ran.err.clone();
        assert_eq!(tokens(ran), [json!(case.tokens)], "{options:?}");
        err
    };
    assert!(!run(&[]).contains("drafts:"), "no drafts were requested");
    // The prompt's step generates the first of 20 tokens. Each later step generates up to 7.
    let report = run(&["--draft", "6"]);
    assert!(report.contains(" 4 steps of"), "{report}");
    let drafts = "drafts: 16 of 16 accepted, 5.33 per stream and step with drafts\n";
    assert!(report.contains(drafts), "{report}");
    assert!(run(&["--draft", "6", "--draft-tree"]).contains(" accepted"));
}

#[test]
fn a_chat_reuses_its_last_turn() {
    let files = Dir::new();
    let template = files.write("joined.jinja", common::JOINED);
    let template = template.to_str().expect("UTF-8");
    let chat = ["--chat", "--chat-template", template, "--max-new-tokens", "20"];
    let ran = tiny(&[&chat[..], &["--page-size", "1"]].concat(), "344 506 214\n7\n").ok();
    assert_eq!(ran.out.lines().count(), 2);
    assert!(ran.out.lines().all(|line| line.split_whitespace().count() == 20));
    // The last generated token has no K and V.
    assert!(ran.err.contains("(22 prompt tokens reused)"), "{}", ran.err);
    // The conversation omits a turn that cannot be served.
    let again = tiny(&chat, "344 506 214\n600\nx\n7\n");
    assert_eq!((again.code, again.out), (Some(2), ran.out), "{}", again.err);
}

#[test]
fn equal_lines_draw_different_tokens() {
    let line = |seed: &str| format!("{{\"prompt\": [344, 506], \"max_new_tokens\": 20, \"temperature\": 2{seed}}}\n");
    let draw = |lines: String| tokens(tiny(&["--requests", "-", "--json"], &lines));
    let plain = draw(line("").repeat(3));
    assert!(plain[0] != plain[1] && plain[1] != plain[2] && plain[0] != plain[2], "{plain:?}");
    let seeded = draw(line(", \"seed\": 0").repeat(2) + &line(""));
    assert_eq!(seeded, [&plain[0], &plain[0], &plain[2]].map(Value::clone));
}

/// Returns a model with a tokenizer of single bytes.
fn with_tokenizer(tokens: u32) -> Dir {
    let dir = Dir::with_config("qwen3-tiny", |config| config["eos_token_id"] = json!(223));
    dir.write("tokenizer.json", byte_tokenizer(tokens).to_string());
    dir
}

#[test]
fn text_uses_the_models_own_tokenizer() {
    let dir = with_tokenizer(256);
    let path = dir.path().to_str().expect("UTF-8");
    let common = ["--max-new-tokens", "9", "--json"];
    let run = |more: &[&str]| run_server(&[&common[..], more].concat(), "").lines().swap_remove(0);
    let ids = run(&["--model", &folder("qwen3-tiny"), "--prompt", "65 122"]);
    let text = run(&["--model", path, "--prompt", "Az", "--ignore-eos"]);
    assert_eq!(text["tokens"], ids["tokens"]);
    let live = ["--model", path, "--prompt", "Az", "--ignore-eos", "--max-new-tokens", "9"];
    let live = run_server(&live, "").out;
    assert_eq!(live, format!("{}\n", text["text"].as_str().expect("a text")), "no text is missing");
    // The config's own stop token ends the text earlier, and is the last token.
    let stopped = run(&["--model", path, "--prompt", "Az"]);
    let ids = ids["tokens"].as_array().expect("tokens");
    let end = ids.iter().position(|id| *id == 223).expect("the model chooses 223 soon");
    assert_eq!(stopped["tokens"], json!(ids[..=end]));
}

#[test]
fn a_tokenizer_past_the_vocabulary_is_refused() {
    let dir = with_tokenizer(513);
    let path = dir.path().to_str().expect("UTF-8");
    refuses(&["--model", path, "--prompt", "A"], MODEL, &["id 512", "512 tokens"]);
}

#[test]
fn a_chat_is_written_by_the_models_own_template() {
    let dir = with_tokenizer(256);
    let path = dir.path().to_str().expect("UTF-8");
    let template = "{{ bos_token }}{% for message in messages %}\n    {% if message.role == 'bad' %}\n\
        {{ raise_exception('never') }}\n    {% endif %}\n\
        [{{ message['role'] }}] {{ message.content.strip() }}\n{% endfor %}\n\
        {% if add_generation_prompt %}>{% endif %}";
    let config = json!({ "chat_template": template, "bos_token": { "content": "^" } });
    dir.write("tokenizer_config.json", config.to_string());
    let arguments = ["--model", path, "--max-new-tokens", "1", "--page-size", "1"];
    let chat = [&arguments[..], &["--chat", "--system", "be kind"]].concat();
    let ran = run_server(&chat, " hello \n").ok();
    let written = "^[system] be kind\n[user] hello\n>";
    let plain = run_server(&[&arguments[..], &["--prompt", written]].concat(), "");
    assert_eq!(ran.out, plain.out, "the template's text is the prompt");

    let refusing = json!({ "chat_template": "{{ raise_exception('no system message') }}" });
    dir.write("tokenizer_config.json", refusing.to_string());
    let ran = run_server(&chat, "hello\n");
    assert!(ran.code == Some(REQUEST) && ran.err.contains("no system message"), "{}", ran.err);
    dir.write("tokenizer_config.json", json!({ "chat_template": "{% for %}" }).to_string());
    refuses(&chat, MODEL, &[]);
}

#[test]
fn the_documentation_lists_the_fields_of_requests() {
    assert_eq!(include_str!("../FIELDS.md"), run_server(&["--help", "fields"], "").out);
}

/// HTTP.md has a row for each option of `--serve`; the row of a limit has its default and its tests.
#[test]
fn the_documentation_lists_the_options_of_the_server() {
    let help = run_server(&["--help"], "").out;
    let (_, options) = help.split_once("Options of --serve:").expect("the heading");
    let readme = include_str!("../HTTP.md");
    let mut limits = 0;
    for option in options.split("\n      --").skip(1) {
        let name = format!("--{}", option.split_whitespace().next().expect("a name"));
        let is_its = |cells: &Vec<&str>| cells[0].split([' ', '`']).any(|word| word == name);
        let rows = readme.lines().filter_map(|line| line.strip_prefix('|')?.strip_suffix('|'));
        let mut rows = rows.map(|row| row.split('|').map(str::trim).collect::<Vec<_>>());
        let cells = rows.find(is_its).unwrap_or_else(|| panic!("HTTP.md lacks {name}"));
        let [_, _, default, _, tests] = cells[..] else { continue };
        limits += 1;
        let (_, given) = option.split_once("[default: ").expect("a limit has a default");
        let given = given.split([']', ',']).next().expect("a value");
        let listed = default.replace(',', "");
        assert!(
            listed.strip_prefix(given).is_some_and(|rest| !rest.starts_with(|c: char| c.is_ascii_digit())),
            "{name}: {given} is {default}"
        );
        names_its_tests(tests);
    }
    assert_eq!(limits, 8, "each limit has its row");
}

/// Checks that a cell names tests as `PATH::NAME`, and that they exist.
fn names_its_tests(cell: &str) {
    let tests: Vec<(&str, &str)> = cell.split('`').filter_map(|part| part.split_once("::")).collect();
    assert!(!tests.is_empty(), "{cell}");
    for (path, name) in tests {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
        let text = std::fs::read_to_string(&path).expect("a file of tests");
        let found = ["fn", "def"].iter().any(|word| text.contains(&format!("{word} {name}(")));
        assert!(found, "{} has no test {name}", path.display());
    }
}

#[test]
fn a_key_that_is_too_long_is_refused() {
    let key = "k".repeat(513);
    let arguments = ["--serve", "127.0.0.1:0", "--api-key", &key];
    refuses(&arguments, REQUEST, &["512"]);
    assert!(!run_server(&arguments, "").err.contains("kkkk"));
}
