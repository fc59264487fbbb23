use super::*;
use crate::http::checked_request::tests::limits;
use crate::http::job::Logprob;
use kvarena_host::request::Defaults;
use kvarena_host::sample::Sampling;
use kvarena_host::text::Text;

fn answer(kind: Kind, logprobs: Option<u32>) -> Answer {
    let defaults = Defaults {
        max_new_tokens: Some(5),
        samples: 2,
        sampling: Sampling::default(),
        stop: vec![4],
    };
    let checked = CheckedRequest {
        kind,
        requests: vec![defaults.request(vec![1, 2, 3]), defaults.request(vec![5])],
        stop: vec!["7 8".into()],
        stream: true,
        include_usage: true,
        logprobs,
        echo: false,
        hides_new: false,
    };
    let (model, text) = ("tiny".into(), Text::default());
    let host = Host {
        model,
        text,
        limits: limits(),
        defaults,
        repetition: 1.0,
        samples_max: 9,
        keeps_logits: true,
        edits_logits: true,
        salts: std::hash::RandomState::new(),
    };
    let host = Arc::new(host);
    Answer::new(host, &checked, "12")
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
    assert_eq!(texts, ["1 ", "11 7 ", "", "3 "]);
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
        assert_eq!(
            (&chunk["object"], &chunk["usage"]),
            (&json!("chat.completion.chunk"), &Value::Null)
        );
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
        "tokens": ["11", "7"],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{ "11": -0.5, "9": -1.0 }, { "7": -0.5, "9": -1.0 }],
        "text_offset": [0, 3],
    });
    assert_eq!(logprobs, expected);
    let mut chat = answer(Kind::Chat, Some(2));
    let all = pieces(&mut chat);
    let logprobs = chat.whole(all)["choices"][0]["logprobs"].take();
    let entry = |token: &str, logprob: f32| json!({ "token": token, "logprob": logprob, "bytes": token.as_bytes() });
    let mut first = entry("1", -0.5);
    first["top_logprobs"] = json!([entry("1", -0.5), entry("9", -1.0)]);
    assert_eq!(
        logprobs,
        json!({ "content": [first], "refusal": null }),
        "the stop string has no log-probabilities"
    );
}

#[test]
fn a_failure_is_an_error() {
    let mut answer = answer(Kind::Chat, None);
    let error = answer.receive(Event::Failed("no more memory".into())).expect_err("it failed");
    assert_eq!((error.status, &error.message[..]), (500, "no more memory"));
}
