//! [`Reader`]: reads values of a server into a caller's buffers. The crate `redis` copies each value twice on its way.

use std::io::{self, BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};

use redis::RedisConnectionInfo;

use super::{CONNECT, TRANSFER};
use crate::store::{Buffers, Got, StoreError};
use crate::vectored::{pieces, unused};

/// Buffered bytes of an answer: its first line. Longer reads bypass the buffer.
const BUFFERED: usize = 512;

/// A connection that only reads values.
pub(super) struct Reader(BufReader<TcpStream>);

impl Reader {
    /// Connects without TLS, and logs in.
    pub fn connect(host: &str, port: u16, settings: &RedisConnectionInfo) -> Result<Self, StoreError> {
        let mut connected = Err(io::Error::from(ErrorKind::NotFound));
        for address in (host, port).to_socket_addrs()? {
            connected = connected.or_else(|_| TcpStream::connect_timeout(&address, CONNECT));
        }
        let stream = connected?;
        stream.set_read_timeout(Some(TRANSFER))?;
        stream.set_write_timeout(Some(TRANSFER))?;
        stream.set_nodelay(true)?;
        let mut reader = Self(BufReader::with_capacity(BUFFERED, stream));
        if let Some(password) = settings.password() {
            let user = settings.username().map(str::as_bytes);
            let words: Vec<_> = [&b"AUTH"[..]].into_iter().chain(user).chain([password.as_bytes()]).collect();
            reader.ask(&words)?;
        }
        if settings.db() != 0 {
            reader.ask(&[b"SELECT", settings.db().to_string().as_bytes()])?;
        }
        Ok(reader)
    }

    /// Reads a whole record. The connection is of no use after another result than [`Got::Read`] and [`Got::Absent`].
    pub fn get(&mut self, key: &str, into: &mut Buffers) -> Result<Got, StoreError> {
        let header = self.ask(&[b"GET", key.as_bytes()])?;
        match header.strip_prefix('$').and_then(|len| len.parse::<i64>().ok()) {
            Some(-1) => return Ok(Got::Absent),
            Some(len) if u64::try_from(len) == Ok(into.record_bytes()) => {}
            Some(_) => return Ok(Got::Length),
            None => return Err(StoreError::Failed { text: format!("a value, but the answer is {header}") }),
        }
        let mut padding = unused(into.pages);
        for piece in pieces(into.head, into.pages, &mut padding) {
            self.0.read_exact(piece.bytes)?;
            if piece.is_page {
                (into.seen)(piece.bytes);
            }
        }
        self.0.read_exact(&mut [0; 2])?;
        Ok(Got::Read)
    }

    /// Sends a command, and returns the first line of the answer.
    fn ask(&mut self, words: &[&[u8]]) -> Result<String, StoreError> {
        let mut command = format!("*{}\r\n", words.len()).into_bytes();
        for word in words {
            command.extend(format!("${}\r\n", word.len()).bytes());
            command.extend(*word);
            command.extend(b"\r\n");
        }
        self.0.get_mut().write_all(&command)?;
        let mut line = Vec::new();
        (&mut self.0).take(BUFFERED as u64).read_until(b'\n', &mut line)?;
        let Some(line) = line.strip_suffix(b"\r\n") else {
            return Err(io::Error::from(ErrorKind::UnexpectedEof).into());
        };
        let line = String::from_utf8_lossy(line);
        match line.strip_prefix('-') {
            Some(text) => Err(StoreError::Failed { text: text.to_owned() }),
            None => Ok(line.into_owned()),
        }
    }
}
