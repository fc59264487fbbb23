//! The prompts of `chat` are those of the model's own template, and its errors are sentences.

#[allow(dead_code)] // this test uses a part
#[path = "../../../host/tests/common/files.rs"]
mod files;

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use candle::{DType, Device};
use files::Dir;
use kvarena_candle_models::chat::Chat;
use kvarena_candle_models::load;
use serde_json::{Map, Value, json};

/// A model's special tokens, its template, and what the template writes around messages.
struct Kind {
    /// The first one is the token that begins a text.
    special: &'static [&'static str],
    template: &'static str,
    begin: &'static str,
    user: [&'static str; 2],
    assistant: [&'static str; 2],
}

const LLAMA3: Kind = Kind {
    special: &["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    template: r"{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' }}
        {{- m['content'] | trim + '<|eot_id|>' }}{% endfor %}
        {%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}",
    begin: "<|begin_of_text|>",
    user: ["<|start_header_id|>user<|end_header_id|>\n\n", "<|eot_id|>"],
    assistant: ["<|start_header_id|>assistant<|end_header_id|>\n\n", "<|eot_id|>"],
};

/// As in SmolLM2: with a system message of its own, and a newline after each message.
const CHATML: Kind = Kind {
    special: &["<|im_start|>", "<|im_end|>"],
    template: r"{% for m in messages %}
        {%- if loop.first and m['role'] != 'system' %}{{ '<|im_start|>system\nBe brief.<|im_end|>\n' }}{% endif %}
        {{- '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}
        {%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    begin: "<|im_start|>system\nBe brief.<|im_end|>\n",
    user: ["<|im_start|>user\n", "<|im_end|>\n"],
    assistant: ["<|im_start|>assistant\n", "<|im_end|>\n"],
};

const GEMMA: Kind = Kind {
    special: &["<bos>", "<start_of_turn>", "<end_of_turn>"],
    template: r"{{ bos_token }}{% for m in messages %}
        {%- set role = 'model' if m['role'] == 'assistant' else m['role'] %}
        {{- '<start_of_turn>' + role + '\n' + m['content'] | trim + '<end_of_turn>\n' }}{% endfor %}
        {%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}",
    begin: "<bos>",
    user: ["<start_of_turn>user\n", "<end_of_turn>\n"],
    assistant: ["<start_of_turn>model\n", "<end_of_turn>\n"],
};

/// Number of tokens of the tiny models.
const VOCAB: u32 = 512;

impl Kind {
    /// Returns the text of a token: a special one, or one character.
    fn text(&self, token: u32) -> String {
        let special = self.special.get((VOCAB - 1 - token) as usize).map(|&token| token.into());
        let is_ascii = token == u32::from(b'\n') || (32..127).contains(&token);
        let character = if is_ascii { token } else { 0x100 + token };
        special.unwrap_or_else(|| char::from_u32(character).expect("a character").into())
    }

    fn tokens(&self, mut text: &str) -> Vec<u32> {
        let mut tokens = Vec::new();
        while !text.is_empty() {
            let begins = |&token: &u32| text.starts_with(&self.text(token));
            let token = (0..VOCAB).rev().find(begins).expect("special tokens, then characters");
            tokens.push(token);
            text = &text[self.text(token).len()..];
        }
        tokens
    }

    /// Returns a `tokenizer.json` that begins each text with the first special token.
    fn tokenizer(&self) -> Value {
        let vocab: Map<String, Value> = (0..VOCAB).map(|id| (self.text(id), id.into())).collect();
        let added = self.special.iter().map(|&token| {
            json!({
                "id": vocab[token], "content": token, "special": true, "normalized": false,
                "single_word": false, "lstrip": false, "rstrip": false,
            })
        });
        let first = self.special[0];
        json!({
            "version": "1.0",
            "added_tokens": added.collect::<Value>(),
            "post_processor": {
                "type": "TemplateProcessing",
                "single": [
                    { "SpecialToken": { "id": first, "type_id": 0 } },
                    { "Sequence": { "id": "A", "type_id": 0 } },
                ],
                "pair": [{ "Sequence": { "id": "A", "type_id": 0 } }, { "Sequence": { "id": "B", "type_id": 1 } }],
                "special_tokens": { first: { "id": first, "ids": [vocab[first]], "tokens": [first] } },
            },
            "decoder": { "type": "Fuse" },
            "model": { "type": "BPE", "vocab": vocab, "merges": [] },
        })
    }

    /// Writes the tokenizer, and the template into one of the two files that may contain it.
    fn write(&self, dir: &Dir, in_config: bool) {
        dir.write("tokenizer.json", self.tokenizer().to_string());
        let mut config = json!({ "bos_token": self.special[0] });
        if in_config {
            config["chat_template"] = self.template.into();
        } else {
            dir.write("chat_template.jinja", self.template);
        }
        dir.write("tokenizer_config.json", config.to_string());
    }
}

fn dir(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../host/tests/data").join(name)
}

#[test]
fn prompts_are_those_of_the_models_template() {
    for (kind, in_config) in [(LLAMA3, true), (CHATML, false), (GEMMA, true)] {
        let dir = Dir::new();
        kind.write(&dir, in_config);
        let mut chat = Chat::read(dir.path()).expect("a tokenizer and a template");
        let ([before, after], [begin, end]) = (kind.user, kind.assistant);
        let mut expected = format!("{}{before}Hello{after}{begin}", kind.begin);
        let mut prompt = chat.ask("Hello").expect("a prompt");
        for (answer, message) in [("Hi.", "How are you?"), ("Fine.\nAnd you?", "Well.")] {
            assert_eq!(chat.render().expect("a text"), expected);
            assert_eq!(prompt, kind.tokens(&expected));
            let answer_tokens = kind.tokens(answer);
            chat.answer(&answer_tokens);
            let cached = [prompt, answer_tokens].concat();
            prompt = chat.ask(message).expect("a prompt");
            assert_eq!(prompt[..cached.len()], cached, "the next turn finds this one in the cache");
            expected += &format!("{answer}{end}{before}{message}{after}{begin}");
        }
        assert_eq!(prompt, kind.tokens(&expected));
    }
}

fn run_chat(folder: &Path, input: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_chat"));
    command.arg("--model").arg(folder).args(["--new-tokens", "20"]);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("the program runs");
    // A program that reports an error does not read its input.
    let _ = child.stdin.take().expect("piped").write_all(input.as_bytes());
    child.wait_with_output().expect("the program ends")
}

/// A Llama with ChatML's template, as SmolLM2, and other families with the templates of others.
#[test]
fn the_program_renders_the_template_and_hits_earlier_turns() {
    for (name, kind) in [("llama-tiny", CHATML), ("qwen3-tiny", LLAMA3), ("gemma3-tiny", GEMMA)] {
        let dir = Dir::copy_of(name);
        kind.write(&dir, true);
        let output = run_chat(dir.path(), "Hello\nHow are you?\n");
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{name}: {error}");
        let text = String::from_utf8(output.stdout).expect("text");
        // The numbers of `[20 tokens, 99.9 tokens/s, 48 of 64 cached]`: new, cached and all tokens of the prompt.
        let turns = text.lines().filter_map(|line| line.strip_prefix('[')?.strip_suffix(" cached]"));
        let turns: Vec<[usize; 3]> = turns
            .map(|line| {
                let words: Vec<&str> = line.split(' ').collect();
                [0, 4, 6].map(|at| words[at].parse().expect("a number"))
            })
            .collect();
        let ([before, after], [begin, end]) = (kind.user, kind.assistant);
        let first = kind.tokens(&format!("{}{before}Hello{after}{begin}", kind.begin)).len();
        let between = kind.tokens(&format!("{end}{before}How are you?{after}{begin}")).len();
        let [[new, _, total], [_, hits, next_total]] = turns[..] else { panic!("{name}: {text}") };
        assert_eq!((new, total, next_total), (20, first, first + 20 + between), "{name}: {text}");
        // The last token of an answer is not computed.
        assert!(hits >= (first + 19) / 16 * 16, "{name}: {text}");
    }
}

/// The tokenizer and the template are checked before the weights are read.
#[test]
fn errors_are_sentences() {
    let error_of = |dir: &Dir| {
        let output = run_chat(dir.path(), "Hello\n");
        assert_eq!(output.status.code(), Some(1));
        let error = String::from_utf8(output.stderr).expect("text");
        error.replace(&dir.path().display().to_string(), "DIR").trim_end().to_owned()
    };
    let dir = Dir::new();
    let missing = "chat: DIR/config.json: No such file or directory (os error 2)";
    assert_eq!(error_of(&dir), missing);
    fs::copy(self::dir("llama-tiny").join("config.json"), dir.path().join("config.json")).expect("a copy");
    let missing = "chat: DIR: there is no tokenizer.json, and a chat needs the model's tokenizer";
    assert_eq!(error_of(&dir), missing);
    dir.write("tokenizer.json", CHATML.tokenizer().to_string());
    let missing = "chat: DIR: there is no chat template, neither in chat_template.jinja nor in tokenizer_config.json; \
                   save the model's template as chat_template.jinja";
    assert_eq!(error_of(&dir), missing);
    let dir = Dir::copy_of("llama-tiny");
    CHATML.write(&dir, true);
    dir.write("chat_template.jinja", "{{ raise_exception('no \"users\"') }}");
    let error = error_of(&dir);
    assert!(error.starts_with("chat: chat template: invalid operation: no \"users\""), "{error}");
}

#[test]
fn stop_tokens_of_the_generation_config_end_a_text() {
    let dir = Dir::copy_of("llama-tiny");
    let end = |dir: &Dir| load(dir.path(), DType::F32, &Device::Cpu).map(|loaded| loaded.end);
    assert!(end(&dir).expect("a model").is_empty());
    dir.write("generation_config.json", r#"{ "eos_token_id": [7, 9] }"#);
    assert_eq!(end(&dir).expect("a model"), [7, 9]);
    dir.write("generation_config.json", "{");
    let error = end(&dir).expect_err("damaged").to_string();
    assert!(error.contains("generation_config.json: EOF while parsing"), "{error}");
}
