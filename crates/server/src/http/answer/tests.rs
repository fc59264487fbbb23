use std::path::Path;

use super::*;
use crate::http::checked_request::{self, beginning};
use crate::http::job::Logprob;
use crate::http::prompt::PromptText;
use kvarena_host::decoder::Decoder;
use kvarena_host::request::{Defaults, Request};
use kvarena_host::sample::Sampling;
use kvarena_host::text::Text;

#[path = "../../../../host/tests/common/tokenizers.rs"]
mod tokenizers;

fn host(text: Text) -> Arc<Host> {
    let defaults = Defaults { max_new_tokens: Some(5), samples: 2, sampling: Sampling::default(), stop: vec![4] };
    Arc::new(Host { text, defaults, ..checked_request::tests::host() })
}

/// Returns an answer to a request of two prompts with two choices each, which `change` changes.
fn answer_with(host: &Arc<Host>, change: impl FnOnce(&mut CheckedRequest)) -> Answer {
    let mut checked = CheckedRequest {
        kind: Kind::Completion,
        beginnings: vec![Default::default(); 2],
        requests: [vec![1, 2, 3], vec![5]].map(|prompt| host.defaults.request(prompt)).into(),
        stop: vec!["7 8".into()],
        stream: true,
        include_usage: true,
        logprobs: None,
        echo: false,
        hides_new: false,
    };
    change(&mut checked);
    for (request, own) in checked.requests.iter().zip(&mut checked.beginnings) {
        let tokens: Vec<u32> = request.prompt.iter().map(|token| token.raw()).collect();
        *own = beginning(host, checked.kind, checked.echo, &tokens, own.1.take());
    }
    Answer::new(Arc::clone(host), &checked, "12")
}

fn answer(kind: Kind, logprobs: Option<u32>) -> Answer {
    let host = host(Text::default());
    answer_with(&host, |checked| (checked.kind, checked.logprobs) = (kind, logprobs))
}

/// Reduces a request to one choice of one prompt, without stops.
fn ask(checked: &mut CheckedRequest, host: &Host, prompt: &[u32], text: Option<PromptText>) {
    let request = host.defaults.request(prompt.to_vec());
    checked.requests = vec![Request { samples: 1, stop: Vec::new(), ..request }];
    (checked.beginnings, checked.stop) = (vec![(Decoder::default(), text)], Vec::new());
}

fn token(choice: u32, token: u32) -> Event {
    let logprob = Logprob { own: -0.5, top: vec![(token, -0.5), (9, -1.0)] };
    // The counts of a choice's last token apply.
    let drafts = [5 + token, token];
    Event::Token { choice, token, cached: 2, drafts, logprob: Some(logprob) }
}

/// Returns the events of two prompts with two choices each. Of each pair, one choice stops and one reaches its length.
fn events() -> Vec<Event> {
    let done = |choice, finish| Event::Done { choice, finish };
    vec![
        token(0, 1),
        token(1, 11),
        token(0, 7),
        token(2, 4),
        done(2, Finish::Stop),
        token(0, 8),
        token(3, 3),
        token(1, 7),
        done(1, Finish::Length),
        done(0, Finish::Stop),
        done(3, Finish::Length),
    ]
}

fn pieces(answer: &mut Answer) -> Vec<Piece> {
    let mut pieces = Vec::new();
    for event in events() {
        assert!(!answer.is_whole());
        pieces.extend(answer.receive(event).expect("nothing failed"));
    }
    assert!(answer.is_whole());
    pieces
}

#[test]
fn a_whole_completion() {
    let mut answer = answer(Kind::Completion, None);
    let pieces = pieces(&mut answer);
    let body = answer.whole(pieces);
    let choices = body["choices"].as_array().expect("choices");
    let texts: Vec<_> = choices.iter().map(|c| c["text"].as_str().expect("text")).collect();
    let reasons: Vec<_> = choices.iter().map(|c| c["finish_reason"].as_str()).collect();
    assert_eq!(texts, [" 1 ", " 11 7", "", " 3"]);
    assert_eq!(reasons, [Some("stop"), Some("length"), Some("stop"), Some("length")]);
    assert!(choices.iter().enumerate().all(|(i, c)| c["index"] == i && c["logprobs"].is_null()));
    let usage = json!({
        "prompt_tokens": 4,
        "completion_tokens": 7,
        "total_tokens": 11,
        "prompt_tokens_details": { "cached_tokens": 4 },
    });
    assert_eq!((&body["usage"], &body["object"]), (&usage, &json!("text_completion")));
    assert_eq!((&body["id"], &body["model"]), (&json!("cmpl-12"), &json!("tiny")));
}

#[test]
fn usage_counts_drafts_of_predicted_answers() {
    let mut plain = answer(Kind::Chat, None);
    let all = pieces(&mut plain);
    assert!(plain.whole(all)["usage"].get("completion_tokens_details").is_none());
    let mut predicted = Answer { has_prediction: true, ..answer(Kind::Chat, None) };
    let all = pieces(&mut predicted);
    // The last tokens of the choices are 8, 7, 4 and 3.
    let details = json!({ "accepted_prediction_tokens": 22, "rejected_prediction_tokens": 20 });
    assert_eq!(predicted.usage_chunk()["usage"]["completion_tokens_details"], details);
    assert_eq!(predicted.whole(all)["usage"]["completion_tokens_details"], details);
}

#[test]
fn a_streamed_chat_equals_the_whole_answer() {
    let (mut answer, mut other) = (answer(Kind::Chat, None), answer(Kind::Chat, None));
    let all = pieces(&mut other);
    let whole = other.whole(all);
    let mut texts = vec![String::new(); 4];
    let mut ended = [false; 4];
    for piece in pieces(&mut answer) {
        let chunk = answer.chunk(piece);
        assert_eq!((&chunk["object"], &chunk["usage"]), (&json!("chat.completion.chunk"), &Value::Null));
        let choice = &chunk["choices"][0];
        let index = choice["index"].as_u64().expect("a number") as usize;
        let is_first = texts[index].is_empty() && !ended[index];
        assert_eq!(choice["delta"].get("role").is_some(), is_first);
        assert!(!ended[index], "nothing comes after the reason");
        texts[index] += choice["delta"]["content"].as_str().unwrap_or_default();
        ended[index] = choice["finish_reason"].is_string();
    }
    assert_eq!(ended, [true; 4]);
    for (text, choice) in texts.iter().zip(whole["choices"].as_array().expect("choices")) {
        let message = json!({ "role": "assistant", "content": text, "refusal": null });
        assert_eq!(choice["message"], message);
    }
    let last = answer.usage_chunk();
    assert_eq!((&last["choices"], &last["usage"]), (&json!([]), &whole["usage"]));
}

#[test]
fn logprobs_in_both_forms() {
    let mut completion = answer(Kind::Completion, Some(2));
    let all = pieces(&mut completion);
    let logprobs = completion.whole(all)["choices"][1]["logprobs"].take();
    let expected = json!({
        "tokens": [" 11", " 7"],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{ " 11": -0.5, " 9": -1.0 }, { " 7": -0.5, " 9": -1.0 }],
        "text_offset": [0, 3],
    });
    assert_eq!(logprobs, expected);
    let mut chat = answer(Kind::Chat, Some(2));
    let all = pieces(&mut chat);
    let logprobs = chat.whole(all)["choices"][0]["logprobs"].take();
    let entry = |token: &str, logprob: f32| json!({ "token": token, "logprob": logprob, "bytes": token.as_bytes() });
    let with_top = |token: &str, other: &str| {
        let mut own = entry(token, -0.5);
        own["top_logprobs"] = json!([entry(token, -0.5), entry(other, -1.0)]);
        own
    };
    // The stop string contains the second token except its space, and all of the third token.
    let content = [with_top("1", "9"), with_top(" 7", " 9")];
    assert_eq!(logprobs, json!({ "content": content, "refusal": null }));
}

#[test]
fn a_failure_is_an_error() {
    let mut answer = answer(Kind::Chat, None);
    let error = answer.receive(Event::Failed("no more memory".into())).expect_err("it failed");
    assert_eq!((error.status, &error.message[..]), (500, "no more memory"));
}

/// Returns the host of a model with a small tokenizer.
fn host_with(tokenizer: &Value) -> Arc<Host> {
    let text = Text::parse(Path::new(""), tokenizer.to_string().as_bytes(), 1000, None);
    host(text.expect("a tokenizer"))
}

/// Returns the whole text of a choice, and the joined text of its chunks.
fn texts(mut make: impl FnMut() -> Answer, tokens: &[u32]) -> [String; 2] {
    let received = |answer: &mut Answer| -> Vec<Piece> {
        let event = |&token: &u32| Event::Token { choice: 0, token, cached: 0, drafts: [0; 2], logprob: None };
        let done = Event::Done { choice: 0, finish: Finish::Length };
        let events = tokens.iter().map(event).chain([done]);
        events.filter_map(|event| answer.receive(event).expect("nothing failed")).collect()
    };
    let (mut whole, mut streamed) = (make(), make());
    let pieces = received(&mut whole);
    let body = whole.whole(pieces);
    let chunks = received(&mut streamed).into_iter().map(|piece| streamed.chunk(piece));
    let chunks: String = chunks.map(|chunk| chunk["choices"][0]["text"].as_str().expect("text").to_owned()).collect();
    [body["choices"][0]["text"].as_str().expect("text").to_owned(), chunks]
}

/// Random tokens, cut at each place into a prompt and an answer: whole, streamed, echoed, and decoded at once.
#[test]
fn all_ways_to_read_an_answer_give_one_text() {
    use kvarena_host::sample::splitmix;
    for tokenizer in [tokenizers::byte_level(), tokenizers::sentence_piece(), tokenizers::word_piece()] {
        let host = host_with(&tokenizer);
        let vocab = tokenizer["model"]["vocab"].as_object().expect("a vocabulary").len() as u64;
        let special = tokenizer["added_tokens"].as_array().expect("a list").len() as u64;
        let mut state = 3;
        let mut below = |n: u64| splitmix(&mut state) % n;
        for _ in 0..300 {
            let count = 1 + below(9);
            let mut token = |_| if below(2) == 0 { below(vocab) } else { vocab - 1 - below(9) };
            let tokens: Vec<u32> = (0..count).map(|i| token(i) as u32).collect();
            for cut in 1..tokens.len() {
                let (prompt, answer) = tokens.split_at(cut);
                let make = |echo: bool| {
                    answer_with(&host, |checked| {
                        ask(checked, &host, prompt, None);
                        checked.echo = echo;
                    })
                };
                let shown = answer.iter().copied().filter(|&token| u64::from(token) >= special);
                let expected = host.text.decode_shown(&prompt.iter().copied().chain(shown).collect::<Vec<_>>());
                let [whole, streamed] = texts(|| make(true), answer);
                assert_eq!((&whole, &streamed), (&expected, &expected), "{prompt:?} and {answer:?}");
                let [whole, streamed] = texts(|| make(false), answer);
                assert_eq!(whole, streamed);
                assert!(expected.ends_with(&whole), "{prompt:?} and {answer:?}: {whole:?}, {expected:?}");
            }
        }
    }
}

#[test]
fn an_echo_begins_with_the_prompts_own_text() {
    let (bytes, words) = (tokenizers::byte_level(), tokenizers::word_piece());
    for (tokenizer, own, tokens, expected) in [
        (bytes, "<|im_start|>user\n", vec![258], " the"),
        (words, "The  CAT", vec![3, 7], " the."),
        (tokenizers::sentence_piece(), "the", vec![261, 0, 261], " the the"),
        (tokenizers::sentence_piece(), "", vec![261, 261], "the the"),
    ] {
        let host = host_with(&tokenizer);
        let prompt = host.text.encode(own).expect("encoded");
        let offsets = host.text.offsets(own).expect("encoded");
        assert_eq!(prompt.len(), offsets.len());
        let mut answer = answer_with(&host, |checked| {
            let own = PromptText { text: own.into(), offsets: offsets.clone() };
            ask(checked, &host, &prompt, Some(own));
            checked.requests[0].scores_prompt = true;
            (checked.echo, checked.logprobs) = (true, Some(0));
        });
        let mut pieces = Vec::new();
        for token in tokens {
            pieces.extend(answer.receive(self::token(0, token)).expect("nothing failed"));
        }
        let choice = &answer.whole(pieces)["choices"][0];
        assert_eq!(choice["text"], format!("{own}{expected}"));
        let places = choice["logprobs"]["text_offset"].as_array().expect("offsets");
        assert_eq!(places[..prompt.len()], offsets.into_iter().map(Value::from).collect::<Vec<_>>());
        assert_eq!(places[prompt.len()], own.chars().count());
    }
}

/// Of tokens with one text the most likely one counts, and the chosen token is in the map.
#[test]
fn the_best_token_of_a_text_is_in_the_map() {
    let host = host_with(&tokenizers::byte_level());
    let part = |byte: u32| 2 + byte;
    let own = [part(0xE2), part(0xE2), part(0x61)];
    let tops = [
        vec![(part(0xE2), -0.5), (part(0x62), -1.0), (part(0xE3), -2.0)],
        vec![(part(0xE3), -0.25), (part(0xE2), -0.5), (part(0x62), -1.0)],
        vec![(part(0xE3), -0.25), (part(0xE2), -0.5)],
    ];
    let maps = [
        json!({ "\u{FFFD}": -0.5, "b": -1.0 }),
        json!({ "\u{FFFD}": -0.25, "b": -1.0 }),
        json!({ "\u{FFFD}": -0.25, "a": -0.5 }),
    ];
    for ((token, top), map) in own.into_iter().zip(tops).zip(maps) {
        for kind in [Kind::Completion, Kind::Chat] {
            let mut answer = answer_with(&host, |checked| {
                ask(checked, &host, &[part(0x61)], None);
                (checked.kind, checked.logprobs) = (kind, Some(3));
            });
            let logprob = Some(Logprob { own: -0.5, top: top.clone() });
            let token = Event::Token { choice: 0, token, cached: 0, drafts: [0; 2], logprob };
            let done = Event::Done { choice: 0, finish: Finish::Length };
            let received = [token, done].map(|event| answer.receive(event).expect("nothing failed"));
            let logprobs = answer.whole(received.into_iter().flatten().collect())["choices"][0]["logprobs"].take();
            if kind == Kind::Completion {
                assert_eq!(logprobs["top_logprobs"], json!([map]));
                continue;
            }
            let bytes = |entry: &Value| entry["bytes"].clone();
            let entry = &logprobs["content"][0];
            let listed: Vec<Value> = entry["top_logprobs"].as_array().expect("a list").iter().map(bytes).collect();
            let expected: Vec<Value> = top.iter().map(|(token, _)| json!([token - 2])).collect();
            assert_eq!((listed, entry["bytes"][0].is_u64()), (expected, true));
        }
    }
}
