//! A server at a free port of the loopback.

use std::io::{BufRead, BufReader, Lines, Read, Write};
use std::net::TcpStream;
use std::process::{Child, ChildStdout, Command, Stdio};

use serde_json::Value;

/// A running server. Dropping it ends the server.
pub struct Listening {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
    /// The address without the scheme.
    pub address: String,
}

impl Listening {
    /// Starts a server with more arguments.
    pub fn start(arguments: &[&str]) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_kvarena-server"))
            .args(["--serve", "127.0.0.1:0", "--quiet"])
            .args(arguments)
            .stdout(Stdio::piped())
            .spawn()
            .expect("the program starts");
        let lines = BufReader::new(child.stdout.take().expect("piped")).lines();
        let mut server = Self { child, lines, address: String::new() };
        server.address = server.line().rsplit("http://").next().expect("an address").to_owned();
        server
    }

    /// Reads the next line that the server prints.
    pub fn line(&mut self) -> String {
        self.lines.next().expect("a line").expect("text")
    }

    /// Ends the server by SIGTERM, and waits for its end.
    pub fn end(mut self) {
        let kill = Command::new("kill").arg(self.child.id().to_string()).status().expect("a signal");
        assert!(kill.success() && self.child.wait().expect("it ends").success());
    }

    pub fn connect(&self) -> TcpStream {
        TcpStream::connect(&self.address).expect("it listens")
    }

    /// Returns a metric by its name with labels.
    pub fn metric(&self, name: &str) -> u64 {
        let mut stream = self.connect();
        let get = "GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";
        stream.write_all(get.as_bytes()).expect("it reads");
        let mut text = String::new();
        stream.read_to_string(&mut text).expect("it answers");
        let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        value.unwrap_or_else(|| panic!("no {name} in {text}")).parse().expect("a number")
    }

    /// Reads a metric until it reaches a value: the server posts its counters after the step that ends an answer.
    pub fn reaches(&self, name: &str, value: u64) {
        while self.metric(name) < value {}
        assert_eq!(self.metric(name), value, "{name}");
    }

    /// Posts a request. Returns the status and the body of the answer.
    pub fn post(&self, path: &str, body: &Value) -> (u16, Value) {
        post(&self.address, path, body).expect("it answers")
    }
}

/// Posts a request. Returns the status and the body of the answer, or `None` if the server ends before the answer does.
pub fn post(address: &str, path: &str, body: &Value) -> Option<(u16, Value)> {
    let body = body.to_string();
    let head =
        format!("POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {}\r\n\r\n", body.len());
    let mut stream = TcpStream::connect(address).ok()?;
    stream.write_all((head + &body).as_bytes()).ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).ok()?;
    let (head, body) = answer.split_once("\r\n\r\n")?;
    let status = head.split(' ').nth(1).expect("a status").parse().expect("a number");
    Some((status, serde_json::from_str(body).ok()?))
}

impl Drop for Listening {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
