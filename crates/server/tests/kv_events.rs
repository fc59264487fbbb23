//! `--kv-events`: what the server has cached, as a router hears it that starts late.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};

use kvarena_events::decode::{WireEvent, decode};
use kvarena_events::subscriber::{Heard, Subscriber};

struct Ending(Child);

impl Drop for Ending {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn complete(address: &str, prompt: &[u32]) {
    let body = format!("{{\"model\":\"glossary\",\"max_tokens\":1,\"prompt\":{prompt:?}}}");
    let mut stream = TcpStream::connect(address).expect("it listens");
    let length = body.len();
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n"
    );
    stream.write_all((head + &body).as_bytes()).expect("it reads");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("it answers");
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
}

/// The tokens of all pages stored, after the last time that all was cleared.
async fn heard(subscriber: &mut Subscriber, tokens: &mut Vec<u32>, want: usize) {
    while tokens.len() < want {
        let Heard::Payload(payload) = subscriber.hear().await.expect("it hears") else { continue };
        for event in decode(&payload).expect("the wire's form").events {
            match event {
                WireEvent::Stored(stored) => tokens.extend(stored.tokens),
                WireEvent::Cleared => tokens.clear(),
                other => panic!("{other:?}"),
            }
        }
    }
}

#[test]
fn a_router_that_starts_late_is_brought_up_to_date() {
    let mut child = Command::new(env!("CARGO_BIN_EXE_generate"))
        .args(["--serve", "127.0.0.1:0", "--kv-events", "tcp://127.0.0.1:0", "--quiet"])
        .stdout(Stdio::piped())
        .spawn()
        .expect("the program starts");
    let mut lines = BufReader::new(child.stdout.take().expect("piped")).lines();
    let _ending = Ending(child);
    let mut line = || lines.next().expect("a line").expect("text");
    let serving = line();
    let address = serving.rsplit("http://").next().expect("an address").to_owned();
    let events = line();
    let (endpoint, replay) = events
        .strip_prefix("events at ")
        .and_then(|rest| rest.split_once(", missed ones at "))
        .expect("two addresses");
    let first: Vec<u32> = (0..32).map(|i| 5 + i).collect();
    complete(&address, &first);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.expect("a runtime").block_on(async {
        // Nothing runs: the engine's thread is idle when it is asked.
        let mut subscriber = Subscriber::connect(endpoint, replay).await.expect("it connects");
        subscriber.ask_for_all().await.expect("it is answered");
        let mut tokens = Vec::new();
        heard(&mut subscriber, &mut tokens, 32).await;
        assert_eq!(tokens, first);
        let second: Vec<u32> = (0..16).map(|i| 90 + i).collect();
        complete(&address, &second);
        heard(&mut subscriber, &mut tokens, 48).await;
        assert_eq!(tokens, [first, second].concat());
    });
}
