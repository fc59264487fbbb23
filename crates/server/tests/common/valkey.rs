//! A Valkey server that a test can end, stop and fill.

use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

/// Returns the path of the server's program, which `crates/tiers/tests/servers.sh` installs.
pub fn program() -> Option<String> {
    let program = std::env::var("KVARENA_VALKEY").ok();
    if program.is_none() {
        println!("skipped: no Valkey");
    }
    program
}

/// A running server. Dropping it ends it by SIGKILL.
pub struct Valkey {
    child: Child,
    pub port: u16,
}

impl Valkey {
    /// Starts a server without records, at a free port.
    pub fn start(program: &str) -> Self {
        let port = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr()).expect("a port").port();
        Self::start_at(program, port)
    }

    /// Starts a server without records, at a port.
    pub fn start_at(program: &str, port: u16) -> Self {
        let child = Command::new(program)
            .args(["--bind", "127.0.0.1", "--port", &port.to_string(), "--save", "", "--dir", "/tmp"])
            .stdout(Stdio::null())
            .spawn()
            .expect("the program starts");
        let server = Self { child, port };
        while TcpStream::connect(("127.0.0.1", port)).is_err() {
            thread::sleep(Duration::from_millis(5));
        }
        server
    }

    /// Sends a signal to the server.
    pub fn signal(&self, name: &str) {
        let kill = Command::new("kill").args([name, &self.child.id().to_string()]).status().expect("a signal");
        assert!(kill.success());
    }

    /// Sends a command, and returns the first line of the answer.
    pub fn command(&self, words: &str) -> String {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).expect("it listens");
        stream.write_all(format!("{words}\r\n").as_bytes()).expect("it reads");
        let mut line = String::new();
        BufReader::new(stream).read_line(&mut line).expect("it answers");
        line.trim().to_owned()
    }

    /// Returns the number of records.
    pub fn records(&self) -> u64 {
        self.command("DBSIZE").strip_prefix(':').expect("a number").parse().expect("a number")
    }
}

impl Drop for Valkey {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
