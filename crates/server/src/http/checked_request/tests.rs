use kvarena::{Capacity, EngineConfig, PoolConfig};
use serde_json::json;

use super::*;
use std::hash::RandomState;
use std::path::Path;

use crate::http::fields::{Field, Use};
use crate::http::tokens::{detokenize, tokenize};
use kvarena_host::request::Defaults;
use kvarena_host::sample::Sampling;
use kvarena_host::server::Limits;
use kvarena_host::template::Template;
use kvarena_host::text::Text;

#[path = "../../../../host/tests/common/byte_tokenizer.rs"]
mod byte_tokenizer;
use byte_tokenizer::byte_tokenizer;

/// Returns the limits of a model of 50 positions over a pool of 4 pages.
fn limits() -> Limits {
    let pool = PoolConfig { capacity: Capacity::Pages(4), page_size: 16, ..PoolConfig::default() };
    let shape = EngineConfig::from(pool).shape().expect("a shape");
    Limits { vocab: 100, positions: 50, pool: 64, shape }
}

/// Returns a template that joins the contents of messages.
fn joined() -> Template {
    let config = json!({ "chat_template": "{% for m in messages %}{{ m.content or '' }} {% endfor %}" });
    Template::of_config(Path::new("a test's template"), &config).expect("a template")
}

/// Returns the host of a model without a tokenizer: texts are token ids.
pub(in crate::http) fn host() -> Host {
    let defaults = Defaults {
        max_new_tokens: None,
        samples: 1,
        sampling: Sampling { temperature: 1.0, ..Sampling::default() },
        stop: vec![4],
    };
    let model = "tiny".into();
    Host {
        model,
        text: Text::without_tokenizer(Some(joined())),
        limits: limits(),
        defaults,
        repetition: 1.0,
        samples_max: 9,
        keeps_logits: true,
        edits_logits: true,
        salts: RandomState::new(),
    }
}

fn parse(host: &Host, kind: Kind, mut body: Value) -> Result<CheckedRequest> {
    if body.get("model").is_none() {
        body["model"] = "tiny".into();
    }
    CheckedRequest::parse(host, kind, body.to_string().as_bytes(), 77)
}

fn complete(body: Value) -> Result<CheckedRequest> {
    parse(&host(), Kind::Completion, body)
}

fn chat(body: Value) -> Result<CheckedRequest> {
    parse(&host(), Kind::Chat, body)
}

/// Returns a completion with more fields.
fn with(fields: Value) -> Value {
    let mut body = json!({ "prompt": "1 2 3" });
    body.as_object_mut().expect("an object").append(&mut fields.as_object().expect("an object").clone());
    body
}

fn user(content: impl Into<Value>) -> Value {
    json!([{ "role": "user", "content": content.into() }])
}

/// Returns the only request of an answer.
fn only(answer: Result<CheckedRequest>) -> Request {
    let mut requests = answer.expect("served").requests;
    assert_eq!(requests.len(), 1);
    requests.swap_remove(0)
}

fn prompt_of(request: &Request) -> Vec<u32> {
    request.prompt.iter().map(|token| token.raw()).collect()
}

#[test]
fn missing_fields_have_openais_defaults() {
    let checked = complete(json!({ "prompt": "1 2 3" })).expect("served");
    let [request] = &checked.requests[..] else { panic!("{checked:?}") };
    assert_eq!(prompt_of(request), [1, 2, 3]);
    assert_eq!((request.max_new_tokens, request.samples), (Some(16), 1));
    let sampling = Sampling { temperature: 1.0, seed: 77, ..Sampling::default() };
    assert_eq!((request.sampling, &request.stop[..]), (sampling, &[4][..]));
    assert_eq!((checked.stream, checked.include_usage, checked.logprobs), (false, false, None));
    let request = only(chat(json!({ "messages": user("1 2 3") })));
    assert_eq!(request.max_new_tokens, Some(48), "a chat continues to the model's maximum length");
}

#[test]
fn given_fields_are_used() {
    let checked = complete(json!({
        "prompt": [[1, 2], [3]], "n": 3, "max_tokens": 5, "temperature": 0, "top_p": 0.5, "top_k": 7, "seed": -1,
        "stop": ["a", "bc"], "stream": true, "stream_options": { "include_usage": true }, "logprobs": 2,
        "ignore_eos": true, "stop_token_ids": [9], "user": "me", "metadata": {},
    }))
    .expect("served");
    let prompts: Vec<_> = checked.requests.iter().map(prompt_of).collect();
    assert_eq!(prompts, [vec![1, 2], vec![3]]);
    let sampling = Sampling { temperature: 0.0, top_k: 7, top_p: 0.5, seed: u64::MAX, ..Sampling::default() };
    for request in &checked.requests {
        assert_eq!((request.sampling, request.max_new_tokens), (sampling, Some(5)));
        assert_eq!((request.samples, &request.stop[..]), (3, &[9][..]));
    }
    assert_eq!(checked.stop, ["a", "bc"]);
    assert_eq!((checked.stream, checked.include_usage, checked.logprobs), (true, true, Some(2)));
    let parts = json!([{ "type": "text", "text": "1 " }, { "type": "text", "text": "2" }]);
    let checked = chat(json!({
        "messages": [{ "role": "developer", "content": "9" }, { "role": "user", "content": parts }],
        "max_tokens": 3, "max_completion_tokens": 4, "logprobs": true, "top_logprobs": 1, "stop": "x", "tools": [],
        "response_format": { "type": "text" }, "frequency_penalty": 0,
    }))
    .expect("served");
    assert_eq!(prompt_of(&checked.requests[0]), [9, 1, 2]);
    assert_eq!((checked.requests[0].max_new_tokens, checked.logprobs), (Some(4), Some(1)));
}

/// Equal prompts of a request draw different tokens, unless the request has a seed, as in vLLM.
#[test]
fn prompts_without_a_seed_have_different_ones() {
    let seeds = |seed: Value| -> Vec<u64> {
        let checked = complete(json!({ "prompt": vec!["1 2"; 6], "seed": seed })).expect("served");
        checked.requests.iter().map(|request| request.sampling.seed).collect()
    };
    let mut different = seeds(Value::Null);
    assert_eq!((different[0], different.len()), (77, 6));
    different.dedup();
    assert_eq!(different.len(), 6);
    assert_eq!(seeds(json!(5)), [5; 6]);
}

#[test]
fn requests_that_allow_no_token_are_refused() {
    // The model's own stop token is 4.
    for (more, name) in [
        (json!({ "allowed_token_ids": [10], "bad_words": ["10"] }), "allowed_token_ids"),
        (json!({ "allowed_token_ids": [10], "stop_token_ids": [10], "min_tokens": 1 }), "allowed_token_ids"),
        (json!({ "allowed_token_ids": [4], "min_tokens": 3 }), "allowed_token_ids"),
        (json!({ "allowed_token_ids": [4, 10, 10], "bad_words": ["10"], "min_tokens": 3 }), "allowed_token_ids"),
        (json!({ "bad_words": (0..100).map(|i| i.to_string()).collect::<Vec<_>>() }), "bad_words"),
    ] {
        refuses(complete(with(more)), 400, name, "allow no token");
    }
    for more in [
        json!({ "allowed_token_ids": [4] }),
        json!({ "allowed_token_ids": [4], "min_tokens": 3, "ignore_eos": true }),
        json!({ "allowed_token_ids": [10], "bad_words": ["10 10"], "min_tokens": 3 }),
    ] {
        complete(with(more)).expect("a token is allowed");
    }
}

#[test]
fn a_prediction_is_a_text_or_parts_of_it() {
    let predict = |prediction: Value| chat(json!({ "messages": user("1 2 3"), "prediction": prediction }));
    let parts = json!([{ "type": "text", "text": "4 " }, { "type": "text", "text": "6" }]);
    for (content, expected) in [(json!("4 5"), [4, 5]), (parts, [4, 6])] {
        let request = only(predict(json!({ "type": "content", "content": content })));
        assert_eq!((prompt_of(&request), &request.prediction[..]), (vec![1, 2, 3], &expected[..]));
    }
    assert!(only(predict(Value::Null)).prediction.is_empty());
    let checked = complete(json!({ "prompt": ["1", "2"], "prediction": { "type": "content", "content": "7" } }));
    assert!(checked.expect("served").requests.iter().all(|request| request.prediction == [7]));
    for (prediction, words) in [
        (json!("4 5"), "is not of type content"),
        (json!({ "content": "4" }), "is not of type content"),
        (json!({ "type": "content" }), "content is missing"),
        (json!({ "type": "content", "content": 4 }), "4 is no text"),
        (
            json!({ "type": "content", "content": [{ "type": "image_url" }] }),
            "parts of type \"image_url\" are not served",
        ),
        (json!({ "type": "content", "content": "4 x" }), "\"x\" is not a token id"),
        (json!({ "type": "content", "content": "4 100" }), "100"),
    ] {
        refuses(predict(prediction), 400, "prediction", words);
    }
}

#[track_caller]
fn refuses(answer: Result<CheckedRequest>, status: u16, param: &str, words: &str) {
    let error = answer.expect_err("refused");
    assert_eq!((error.status, error.param.as_deref()), (status, Some(param)), "{error:?}");
    assert!(error.message.contains(words), "{words:?} is not in {error:?}");
    let json = error.json();
    assert_eq!(json["error"]["param"], param);
    assert!(json["error"]["type"].is_string() && json["error"]["message"].is_string());
}

#[test]
fn invalid_bodies_are_refused() {
    for bytes in [&b""[..], b"{", b"{\"model\": \"tiny\", \"prompt\": \"1\"} x", b"\xff\xfe", b"[1]", b"7"] {
        let error = CheckedRequest::parse(&host(), Kind::Completion, bytes, 0).expect_err("refused");
        assert_eq!((error.status, error.param), (400, None));
    }
    let deep = [vec![b'['; 100_000], vec![b']'; 100_000]].concat();
    assert!(CheckedRequest::parse(&host(), Kind::Chat, &deep, 0).is_err(), "no stack overflows");
}

#[test]
fn fields_of_the_wrong_type_or_range() {
    refuses(complete(with(json!({ "model": "gpt-4" }))), 404, "model", "gpt-4");
    for (name, value, words) in [
        ("model", json!(7), "7 is no string"),
        ("n", json!(0), "n is 0"),
        ("n", json!(1.5), "1.5 is no whole number"),
        ("n", json!("2"), "is no whole number"),
        ("n", json!(-1), "-1 is no whole number"),
        ("n", json!(10), "from 1 to 9"),
        ("prompt", json!(vec![[1]; 129]), "129"),
        ("max_tokens", json!(1.5), "1.5 is no whole number"),
        ("max_tokens", json!(0), "at least 1"),
        ("max_tokens", json!("many"), "is no whole number"),
        ("temperature", json!("hot"), "is no number"),
        ("temperature", json!(-0.1), "-0.1"),
        ("temperature", json!(2.5), "2.5"),
        ("top_p", json!(0), "top_p 0"),
        ("top_p", json!(1.01), "1.01"),
        ("seed", json!(0.5), "0.5"),
        ("stop", json!(3), "3 is neither"),
        ("stop", json!(["a", 3]), "3 is no string"),
        ("stop", json!(""), "empty"),
        ("stop", json!(vec!["a"; 17]), "17 stop strings"),
        ("stream", json!("yes"), "is no boolean"),
        ("stream_options", json!({ "include_usage": true }), "for streams"),
        ("logprobs", json!(true), "true is no whole number"),
        ("tool_choice", json!("required"), "not served"),
        ("truncate_prompt_tokens", json!(5), "not served"),
        ("logprobs", json!(21), "21"),
        ("stop_token_ids", json!(["a"]), "not a token id"),
        ("prompt", json!({}), "no text"),
        ("prompt", json!([]), "empty"),
        ("prompt", json!(""), "no tokens"),
        ("prompt", json!([1, "a"]), "not a token id"),
        ("prompt", json!([1, -2]), "-2 is not a token id"),
        ("prompt", json!([100]), "past the model's vocabulary of 100"),
        ("prompt", json!([[1], true]), "true"),
        ("prompt", json!(null), "missing"),
        ("best_of", json!(3), "not served"),
        ("presence_penalty", json!(2.5), "2.5 is not from -2 to 2"),
        ("frequency_penalty", json!("x"), "is no number"),
        ("repetition_penalty", json!(0), "not above 0"),
        ("repetition_penalty", json!(-1), "-1 is not from"),
        ("min_p", json!(1.5), "1.5 is not from 0 to 1"),
        ("min_tokens", json!(-1), "-1 is no whole number"),
        ("top_k", json!(-2), "top_k -2"),
        ("logit_bias", json!({ "100": 1 }), "not a token id below 100"),
        ("logit_bias", json!({ "5": 1, "05": 1 }), "\"05\" is not a token id below 100"),
        ("logit_bias", json!({ "5": 101 }), "101 is not from -100 to 100"),
        ("logit_bias", json!([5]), "no object"),
        ("allowed_token_ids", json!([]), "empty"),
        ("allowed_token_ids", json!([100]), "vocabulary of 100"),
        ("bad_words", json!([7]), "7 is no word"),
        ("bad_words", json!([""]), "no word"),
        ("bad_words", json!(["1".repeat(1025)]), "no word"),
        ("bad_words", json!(vec!["1"; 129]), "129 words"),
        ("bad_words", json!(["1".repeat(1 << 20)]), "of at most 1048576"),
        ("logit_bias", Value::Object((0..1025).map(|i| (i.to_string(), 1.into())).collect()), "1025"),
        ("stop_token_ids", json!([100]), "vocabulary of 100"),
        ("stop", json!("x".repeat(1025)), "1025 bytes"),
        ("cache_salt", json!(7), "7 is no string"),
        ("unheard_of", json!(1), "not a field"),
        ("guided_json", json!({ "type": "object" }), "not served"),
        ("use_beam_search", json!(true), "not served"),
        ("messages", json!([]), "not a field of this request"),
        // The value opposite to a default would change the prompt or the answer.
        ("skip_special_tokens", json!(false), "not served"),
        ("add_special_tokens", json!(false), "not served"),
    ] {
        refuses(complete(with(json!({ name: value }))), 400, name, words);
    }
    for (name, value, words) in [
        ("tools", json!([{}]), "not served"),
        ("response_format", json!({ "type": "json_schema" }), "not served"),
        ("top_logprobs", json!(2), "logprobs to be true"),
        ("logprobs", json!(2), "no boolean"),
        ("add_generation_prompt", json!(false), "not served"),
        ("skip_special_tokens", json!(false), "not served"),
        ("add_special_tokens", json!(true), "not served"),
        ("echo", json!(true), "not served"),
    ] {
        refuses(chat(json!({ "messages": user("1"), name: value })), 400, name, words);
    }
}

/// Gemma 3's tokenizer has a token for images whose id is the size of the model's vocabulary. No request can use it.
#[test]
fn tokens_past_the_vocabulary_are_refused() {
    let mut tokenizer = byte_tokenizer(256);
    tokenizer["added_tokens"] = json!([{
        "id": 256, "content": "<image>", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
        "special": true,
    }]);
    let content = tokenizer.to_string();
    let text = Text::parse(Path::new(""), content.as_bytes(), 256, Some(joined()));
    let text = text.expect("accepted");
    let limits = Limits { vocab: 256, ..limits() };
    let host = Host { text, limits, ..host() };
    let prediction = json!({ "type": "content", "content": "a<image>" });
    for (field, value) in [
        ("prompt", json!("a<image>")),
        ("prompt", json!([97, 256])),
        ("prompt", json!(["a", "<image>"])),
        ("prompt", json!([[97], [256]])),
        ("messages", user("<image>")),
        ("prediction", prediction),
        ("bad_words", json!(["<image>"])),
        ("logit_bias", json!({ "256": 1 })),
        ("allowed_token_ids", json!([97, 256])),
        ("stop_token_ids", json!([256])),
    ] {
        let kind = if field == "messages" { Kind::Chat } else { Kind::Completion };
        let mut body = json!({ kind.prompt_field(): "a" });
        body[field] = value;
        if field == kind.prompt_field() {
            assert_eq!(tokenize(&host, body.to_string().as_bytes()).expect_err("refused").status, 400);
        }
        refuses(parse(&host, kind, body), 400, field, if field == "bad_words" { "no word" } else { "256" });
    }
    let error = detokenize(&host, b"{\"tokens\": [256]}").expect_err("refused");
    assert_eq!((error.status, error.param.as_deref()), (400, Some("tokens")));
    let request = only(parse(&host, Kind::Chat, json!({ "messages": user("a") })));
    assert_eq!(prompt_of(&request), [97, 32], "other requests are served");
}

#[test]
fn a_chat_needs_a_template() {
    let host = Host { text: Text::default(), ..host() };
    let body = json!({ "messages": user("1") });
    refuses(parse(&host, Kind::Chat, body.clone()), 400, "messages", "--chat-template FILE");
    assert!(tokenize(&host, body.to_string().as_bytes()).is_err());
    assert!(parse(&host, Kind::Completion, json!({ "prompt": "1" })).is_ok());
}

/// `generation_config.json` has defaults of sampling; each value of a request replaces one.
#[test]
fn recommended_parameters_are_defaults() {
    let sampling = Sampling { temperature: 0.6, top_k: 20, top_p: 0.95, min_p: 0.1, ..Sampling::default() };
    let sampling = Sampling { seed: 77, ..sampling };
    let host = Host { defaults: Defaults { sampling, ..host().defaults }, repetition: 1.5, ..host() };
    let given = json!({ "temperature": 1, "top_k": -1, "top_p": 1, "min_p": 0, "repetition_penalty": 1 });
    for (fields, expected) in [
        (json!({}), (sampling, 1.5)),
        (given, (Sampling { temperature: 1.0, seed: 77, ..Sampling::default() }, 1.0)),
        (json!({ "top_k": 0 }), (Sampling { top_k: 0, ..sampling }, 1.5)),
    ] {
        let request = only(parse(&host, Kind::Completion, with(fields)));
        let repetition = request.shaping.map_or(1.0, |shaping| shaping.rules().repetition);
        assert_eq!((request.sampling, repetition), expected);
    }
}

#[test]
fn stop_tokens_are_bounded() {
    let mut host = host();
    host.limits.vocab = 200;
    let stop_at = |ids: Vec<u32>| parse(&host, Kind::Completion, with(json!({ "stop_token_ids": ids })));
    assert!(stop_at((0..128).chain(0..128).collect()).is_ok(), "repeated ones count once");
    refuses(stop_at((0..129).collect()), 400, "stop_token_ids", "129 tokens, of at most 128");
}

#[test]
fn invalid_chats_are_refused() {
    // The type is named even if a long image precedes it.
    let image = json!({ "image_url": { "url": "x".repeat(100) }, "type": "image_url" });
    for (messages, words) in [
        (json!(null), "missing"),
        (json!("hello"), "no list"),
        (json!([]), "empty"),
        (json!(["hello"]), "messages[0]: role is missing"),
        (json!([{ "role": "user" }]), "content is missing"),
        (json!([{ "role": 1, "content": "1" }]), "role: 1"),
        (json!([{ "role": "user", "content": 1 }]), "content: 1"),
        (json!([{ "role": "user", "content": [image] }]), "parts of type \"image_url\""),
        (json!([{ "role": "user", "content": [{ "type": "text" }] }]), "no part of type text"),
        (json!([{ "role": "user", "content": "word" }]), "not a token id"),
    ] {
        refuses(chat(json!({ "messages": messages })), 400, "messages", words);
    }
}

#[test]
fn prompts_past_the_limit_are_refused() {
    let prompt = |len: u32| json!((0..len).map(|i| i % 7).collect::<Vec<_>>());
    let checked = complete(json!({ "prompt": prompt(50) })).expect("one token fits");
    assert_eq!(checked.requests[0].max_new_tokens, Some(1));
    for body in [json!({ "prompt": prompt(51) }), json!({ "prompt": prompt(40), "max_tokens": 12 })] {
        let error = complete(body).expect_err("too long");
        assert_eq!((error.status, error.code), (400, Some("context_length_exceeded")));
        assert!(error.message.contains("50 positions"), "{error:?}");
    }
}

#[test]
fn logprobs_need_logits() {
    let host = Host { keeps_logits: false, ..host() };
    refuses(parse(&host, Kind::Completion, with(json!({ "logprobs": 1 }))), 400, "logprobs", "--logprobs");
}

/// The server rejects each unsupported field by name, for any value with an effect.
#[test]
fn fields_that_change_the_answer_are_refused_by_name() {
    let bodies = [(Kind::Completion, json!({ "prompt": "1" })), (Kind::Chat, json!({ "messages": user("1") }))];
    for (kind, plain) in bodies {
        for field in Field::all().filter(|field| field.is_of(kind)) {
            let Use::Refused(neutral) = field.usage else { continue };
            let values = [json!(true), json!("some"), json!({ "a": 1 }), json!([1]), json!(7), json!(false)];
            for value in values {
                let mut body = plain.clone();
                body[field.name] = value.clone();
                if neutral.accepts(&value) {
                    parse(&host(), kind, body).expect("the request is valid");
                    continue;
                }
                let error = parse(&host(), kind, body).expect_err("refused");
                assert_eq!((error.status, error.code), (400, Some("unsupported_parameter")));
                assert_eq!(error.param.as_deref(), Some(field.name));
            }
        }
    }
}

/// The server accepts null for every field that has a default.
#[test]
fn null_fields_are_served() {
    for field in Field::all() {
        if ["model", "prompt", "messages"].contains(&field.name) {
            continue;
        }
        let completion = complete(with(json!({ field.name: null })));
        completion.or_else(|_| chat(json!({ "messages": user("1"), field.name: null }))).expect(field.name);
    }
}

#[test]
fn options_for_logits_are_read() {
    let request = only(complete(with(json!({
        "min_p": 0.25, "repetition_penalty": 1.5, "frequency_penalty": -0.5, "presence_penalty": 1,
        "logit_bias": { "7": -100, "3": 2.5 }, "bad_words": ["5 6", "9"], "allowed_token_ids": [4, 3, 3], "min_tokens": 2.0,
        "top_k": -1, "max_tokens": 3.0,
    }))));
    assert_eq!((request.sampling.min_p, request.sampling.top_k, request.max_new_tokens), (0.25, 0, Some(3)));
    let expected = Shaping {
        repetition: 1.5,
        frequency: -0.5,
        presence: 1.0,
        bias: vec![(7, -100.0), (3, 2.5)],
        allowed: Some(vec![3, 4]),
        bad_words: vec![vec![5, 6], vec![9]],
        min_tokens: 2,
    };
    let mut shaping = request.shaping.as_ref().expect("shaped").rules().clone();
    shaping.bias.sort_by_key(|(token, _)| std::cmp::Reverse(*token));
    assert_eq!(shaping, expected);
    let plain = json!({ "repetition_penalty": 1, "presence_penalty": 0.0, "min_tokens": 0 });
    assert_eq!(only(complete(with(plain))).shaping, None);
    let host = Host { edits_logits: false, ..host() };
    for (name, value) in [("min_p", json!(0.5)), ("logit_bias", json!({ "5": 1 })), ("min_tokens", json!(1))] {
        let answer = parse(&host, Kind::Completion, with(json!({ name: value })));
        refuses(answer, 400, name, "this backend does not support");
    }
}

#[test]
fn salts_are_namespaces() {
    let host = host();
    let namespace = |salt: Value| only(parse(&host, Kind::Completion, with(json!({ "cache_salt": salt })))).namespace;
    assert_eq!(namespace(json!("one")), namespace(json!("one")));
    assert_ne!(namespace(json!("one")), namespace(json!("two")));
    assert_eq!(namespace(Value::Null), Namespace::default());
    let longest = "é".repeat(1024);
    assert_ne!(namespace(json!(longest)), Namespace::default());
    for salt in [String::new(), longest + "s"] {
        refuses(complete(with(json!({ "cache_salt": salt }))), 400, "cache_salt", "must have from 1 to 1024");
    }
}

#[test]
fn too_many_choices_are_those_of_n() {
    let prompts = |count| complete(json!({ "prompt": vec!["1"; count], "n": 9 }));
    assert_eq!(prompts(14).expect("served").requests.len(), 14);
    refuses(prompts(15), 400, "n", "135 choices are more than 128");
}

#[test]
fn echoes_need_no_new_token() {
    let checked = complete(json!({ "prompt": "1 2", "echo": true, "logprobs": 0, "max_tokens": 0 })).expect("served");
    assert!(checked.echo && checked.hides_new && checked.requests[0].scores_prompt);
    assert_eq!(checked.requests[0].max_new_tokens, Some(1));
    let checked = complete(json!({ "prompt": "1 2", "echo": true })).expect("served");
    assert!(checked.echo && !checked.hides_new && !checked.requests[0].scores_prompt);
}

#[test]
fn messages_with_tool_calls_need_no_content() {
    let call = json!({ "id": "1", "type": "function", "function": { "name": "f", "arguments": "{\"a\": 1}" } });
    let messages = json!([
        { "role": "user", "content": "1" },
        { "role": "assistant", "content": null, "tool_calls": [call], "refusal": null },
        { "role": "tool", "tool_call_id": "1", "content": "2" },
    ]);
    assert_eq!(prompt_of(&only(chat(json!({ "messages": messages })))), [1, 2]);
    let odd = json!([{ "role": "user", "content": "1", "audio": { "id": "x" } }]);
    refuses(chat(json!({ "messages": odd })), 400, "messages", "audio");
}

/// The server does not encode a text with more bytes than the model's positions can hold. Encoding this text would
/// fail.
#[test]
fn texts_are_refused_by_their_bytes() {
    let long = "x".repeat(51 * 16 + 1);
    let error = complete(json!({ "prompt": long })).expect_err("too long");
    assert_eq!((error.status, error.code), (400, Some("context_length_exceeded")));
    assert!(error.message.contains("maximum context length is 50 tokens"), "{error:?}");
    let error = chat(json!({ "messages": user(&long[..]) })).expect_err("too long");
    assert_eq!(error.code, Some("context_length_exceeded"));
    let prediction = json!({ "type": "content", "content": long });
    let error = complete(json!({ "prompt": "1", "prediction": prediction })).expect_err("too long");
    assert_eq!(error.param.as_deref(), Some("prediction"));
}
