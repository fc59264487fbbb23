//! Passes each request to a server that computes its prompt, then to one that generates its answer.
//!
//! ```text
//! router 127.0.0.1:8000 PREFILL DECODE      addresses of `kvarena-server --role prefill` and of another one
//! ```
//!
//! Both servers have the same model, options of K and V, and store. If the first one fails, the second one computes.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::thread;

use serde_json::Value;

fn main() -> io::Result<()> {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    let [address, prefill, decode] = &arguments[..] else { return Err(io::Error::other("ADDRESS PREFILL DECODE")) };
    serve(&TcpListener::bind(address)?, prefill, decode)
}

/// Serves each connection with a thread of its own, for one request.
pub fn serve(listener: &TcpListener, prefill: &str, decode: &str) -> io::Result<()> {
    loop {
        let (client, [prefill, decode]) = (listener.accept()?.0, [prefill, decode].map(str::to_owned));
        // A client that hangs up ends its thread.
        thread::spawn(move || route(client, &prefill, &decode));
    }
}

fn route(mut client: TcpStream, prefill: &str, decode: &str) -> io::Result<()> {
    let (head, body) = read(&client)?;
    if let Some(short) = one_token(&body) {
        // The answer only marks the end of the prompt.
        _ = send(prefill, &head, &short).and_then(|mut answer| io::copy(&mut answer, &mut io::sink()));
    }
    io::copy(&mut send(decode, &head, &body)?, &mut client).map(drop)
}

/// Reads a request: its head without the lines that `send` writes, and its body.
fn read(client: &TcpStream) -> io::Result<(String, Vec<u8>)> {
    let (mut reader, mut head, mut len) = (BufReader::new(client), String::new(), 0);
    for line in reader.by_ref().lines() {
        let line = line?;
        let (name, value) = line.split_once(':').unwrap_or((&line, ""));
        match &name.to_ascii_lowercase()[..] {
            "" => break,
            "content-length" => len = value.trim().parse().map_err(io::Error::other)?,
            "connection" | "expect" => {}
            _ => head += &(line + "\r\n"),
        }
    }
    let mut body = Vec::new();
    reader.take(len).read_to_end(&mut body)?;
    Ok((head, body))
}

/// Returns the request for the prefill server: one token, as a whole. `None` if the body is no JSON object.
fn one_token(body: &[u8]) -> Option<Vec<u8>> {
    let mut request: Value = serde_json::from_slice(body).ok()?;
    let fields = request.as_object_mut()?;
    for name in ["stream", "stream_options", "min_tokens", "max_completion_tokens", "n", "best_of"] {
        fields.remove(name);
    }
    fields.insert("max_tokens".to_owned(), 1.into());
    Some(request.to_string().into_bytes())
}

/// Sends a request, and returns the connection with its answer.
fn send(server: &str, head: &str, body: &[u8]) -> io::Result<TcpStream> {
    let mut stream = TcpStream::connect(server)?;
    write!(stream, "{head}Connection: close\r\nContent-Length: {}\r\n\r\n", body.len())?;
    stream.write_all(body)?;
    Ok(stream)
}
