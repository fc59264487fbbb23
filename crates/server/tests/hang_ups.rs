//! The server ends the streams of a client that hangs up, also if unread bytes lie behind its request. Clients that
//! pipeline requests get their answers in order.

mod common;

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::thread;

use common::listening::Listening;
use serde_json::{Value, json};

/// New tokens of a stream. Each test hangs up after the first one.
const TOKENS: u64 = 2_000;
/// Streams of a request. With several, a busy machine hangs up long before the last token.
const STREAMS: u64 = 4;

fn serve() -> Listening {
    let model = common::dir("qwen3-tiny");
    Listening::start(&["--model", model.to_str().expect("UTF-8")])
}

fn request(headers: &str, body: &Value) -> Vec<u8> {
    let body = body.to_string();
    let length = body.len();
    let head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\n";
    format!("{head}{headers}Content-Length: {length}\r\n\r\n{body}").into_bytes()
}

fn completion(tokens: u64, stream: bool) -> Value {
    json!({
        "model": "qwen3-tiny", "prompt": [7, 8, 9], "max_tokens": tokens, "temperature": 0, "ignore_eos": true,
        "stream": stream,
    })
}

/// How a client ends its connection.
#[derive(Clone, Copy, PartialEq, Debug)]
enum End {
    Close,
    /// The client sends no more, but would read.
    HalfClose,
}

/// Sends a long request and `behind`, and hangs up after the first token. Returns the number of computed tokens.
fn hang_up(server: &Listening, (headers, stream): (&str, bool), behind: &[u8], end: End) -> u64 {
    let count = |name: &str| server.metric(&format!("kvarena_server_{name}"));
    let (cancelled, new) = (r#"streams_ended_total{why="cancelled"}"#, "new_tokens_total");
    let before = (count(cancelled), count(new));
    let mut client = server.connect();
    let mut body = completion(TOKENS, stream);
    body["n"] = STREAMS.into();
    client.write_all(&request(headers, &body)).expect("it reads");
    client.write_all(behind).expect("it reads");
    while count(new) == before.1 {
        thread::yield_now();
    }
    match end {
        End::Close => drop(client),
        End::HalfClose => client.shutdown(Shutdown::Write).expect("connected"),
    }
    while count(r#"streams{state="running"}"#) > 0 {
        thread::yield_now();
    }
    let ended = count(cancelled) - before.0;
    let behind = behind.len();
    assert_eq!(ended, STREAMS, "{headers:?}, streamed {stream}, {behind} bytes behind, {end:?}");
    count(new) - before.1
}

#[test]
fn a_client_that_is_gone_costs_no_further_tokens() {
    let server = serve();
    let next = request("", &completion(1, false));
    let long = request("", &json!({ "model": "qwen3-tiny", "prompt": vec![7; 300_000] }));
    assert!(long.len() > 500_000, "more than the server reads ahead");
    let all = [&b""[..], b"\r\n", &next, &next[..20], &b"\r\n".repeat(50_000), &long];
    for headers in ["", "Connection: close\r\n"] {
        for behind in all {
            for end in [End::Close, End::HalfClose] {
                let computed = hang_up(&server, (headers, false), behind, end);
                assert!(computed < STREAMS * TOKENS, "{computed} tokens");
            }
        }
        hang_up(&server, (headers, true), b"\r\n", End::HalfClose);
    }
}

/// Reads an answer with a length. Returns its status and body.
fn answer(client: &mut TcpStream) -> (String, String) {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        client.read_exact(&mut byte).expect("an answer");
        head.push(byte[0]);
    }
    let head = String::from_utf8(head).expect("text").to_lowercase();
    let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
    let mut body = vec![0; length.expect("a length").parse().expect("a number")];
    client.read_exact(&mut body).expect("a body");
    (head.lines().next().expect("a line").to_owned(), String::from_utf8(body).expect("text"))
}

#[test]
fn pipelined_requests_are_answered_in_order() {
    let server = serve();
    let lengths = [3, 1, 2, 30, 1];
    let requests = lengths.map(|tokens| request("", &completion(tokens, false)));
    let mut client = server.connect();
    // An empty line between requests is allowed.
    client.write_all(&requests.join(&b"\r\n"[..])).expect("it reads");
    let get = "GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";
    client.write_all(get.as_bytes()).expect("it reads");
    for tokens in lengths {
        let (status, body) = answer(&mut client);
        assert_eq!(status, "http/1.1 200 ok");
        let body: Value = serde_json::from_str(&body).expect("JSON");
        assert_eq!(body["usage"]["completion_tokens"], tokens);
    }
    assert_eq!(answer(&mut client).0, "http/1.1 200 ok");
    assert_eq!(client.read(&mut [0]).expect("closed"), 0);
}

/// Behind a request without an answer the server keeps 64 KiB. It answers the requests therein, and then closes.
#[test]
fn requests_past_the_limit_are_dropped() {
    let server = serve();
    let first = request("", &completion(TOKENS, false));
    let padded = request(&format!("X-Padding: {}\r\n", "x".repeat(4_000)), &completion(1, false));
    let mut client = server.connect();
    client.write_all(&first).expect("it reads");
    while server.metric("kvarena_server_new_tokens_total") == 0 {}
    let all = padded.repeat(200);
    client.write_all(&all).expect("it reads");
    assert_eq!(answer(&mut client).0, "http/1.1 200 ok", "the first request is not disturbed");
    let mut rest = Vec::new();
    // The server closes with unread bytes, which may reset the connection.
    _ = client.read_to_end(&mut rest);
    let rest = String::from_utf8(rest).expect("text");
    let answers = rest.matches("HTTP/1.1 200").count();
    assert!((1..200).contains(&answers), "{answers} answers");
}
