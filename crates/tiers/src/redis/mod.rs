//! [`Redis`]: records as values of Redis or Valkey. Names have `:` instead of `/`.

mod reader;

use std::ops::Range;
use std::sync::Mutex;
use std::time::Duration;

use reader::Reader;
use redis::{Client, Connection, ConnectionAddr, ErrorKind, RedisError, RedisResult, ServerErrorKind, cmd, pipe};

use crate::lock::lock;
use crate::name::{Fingerprint, Name, Space};
use crate::store::{Buffers, Got, Store, StoreError, stride};
use crate::testing::memory::concat;

/// Maximum number of bytes of a record. Larger values delay other clients.
pub const VALUE_MAX: u64 = 64 << 20;
const CONNECT: Duration = Duration::from_secs(1);
/// Time of a read or write of the socket.
const TRANSFER: Duration = Duration::from_secs(5);
/// Number of keys that a step of a scan visits.
const SCAN: usize = 1000;

/// A store of records as values of Redis or Valkey. Each thread uses its own connection.
pub struct Redis {
    client: Client,
    /// Seconds for which the server keeps a record.
    ttl: Option<u64>,
    idle: Mutex<Vec<Connection>>,
    /// Connections that read whole records over TCP.
    readers: Mutex<Vec<Reader>>,
}

impl Redis {
    /// Creates a store from a URL, such as `redis://:password@host:6379/0`. Connects at the first call.
    ///
    /// # Errors
    /// [`StoreError::Failed`] if the URL is invalid.
    pub fn new(url: &str, ttl: Option<Duration>) -> Result<Self, StoreError> {
        let client = Client::open(url).map_err(error)?;
        Ok(Self { client, ttl: ttl.map(|ttl| ttl.as_secs().max(1)), idle: Mutex::default(), readers: Mutex::default() })
    }

    /// Returns a warning if the server does not evict old records when its memory is full.
    ///
    /// # Errors
    /// If the server cannot be reached, or does not return its config.
    pub fn policy_warning(&self) -> Result<Option<String>, StoreError> {
        let get = |connection: &mut Connection| cmd("CONFIG").arg("GET").arg("maxmemory-policy").query(connection);
        let answer: Vec<String> = self.call(get)?;
        let policy = answer.get(1).map_or("", String::as_str);
        let evicts = policy.starts_with("allkeys-") || self.ttl.is_some() && policy.starts_with("volatile-");
        Ok((!evicts).then(|| format!("maxmemory-policy is {policy}: a full server refuses records; use allkeys-lru")))
    }

    /// Makes a call with an idle or a new connection. A connection with an error is closed.
    fn call<T>(&self, call: impl FnOnce(&mut Connection) -> RedisResult<T>) -> Result<T, StoreError> {
        let idle = lock(&self.idle).pop();
        let mut connection = match idle {
            Some(connection) => connection,
            None => self.connect().map_err(error)?,
        };
        let called = call(&mut connection).map_err(error)?;
        lock(&self.idle).push(connection);
        Ok(called)
    }

    /// Reads a value with an idle or a new reader.
    fn read(&self, (host, port): (&str, u16), key: &str, into: &mut Buffers) -> Result<Got, StoreError> {
        let idle = lock(&self.readers).pop();
        let mut reader = match idle {
            Some(reader) => reader,
            None => Reader::connect(host, port, self.client.get_connection_info().redis_settings())?,
        };
        let got = reader.get(key, into)?;
        if matches!(got, Got::Read | Got::Absent) {
            lock(&self.readers).push(reader);
        }
        Ok(got)
    }

    /// Reads a part of a record, or over another connection than TCP.
    fn get_by_client(&self, name: &Name, into: &mut Buffers) -> Result<Got, StoreError> {
        let (Range { start, end }, page_bytes) = (into.range(), into.page_bytes());
        let mut pipe = pipe();
        pipe.cmd("STRLEN").arg(key(name));
        pipe.cmd("GETRANGE").arg(key(name)).arg(0).arg(into.head.len() - 1);
        pipe.cmd("GETRANGE").arg(key(name)).arg(start).arg(end - 1);
        let (len, first, rest): (u64, Vec<u8>, Vec<u8>) = self.call(|connection| pipe.query(connection))?;
        if len == 0 {
            return Ok(Got::Absent);
        }
        let is_whole = first.len() == into.head.len() && rest.len() as u64 == end - start;
        if len != into.record_bytes() || !is_whole {
            return Ok(Got::Length);
        }
        into.head.copy_from_slice(&first);
        into.pages.iter_mut().zip(rest.chunks(stride(page_bytes))).for_each(|(page, bytes)| {
            page.copy_from_slice(&bytes[..page_bytes]);
        });
        into.see_all();
        Ok(Got::Read)
    }

    fn connect(&self) -> RedisResult<Connection> {
        let connection = self.client.get_connection_with_timeout(CONNECT)?;
        connection.set_read_timeout(Some(TRANSFER))?;
        connection.set_write_timeout(Some(TRANSFER))?;
        Ok(connection)
    }
}

fn error(error: RedisError) -> StoreError {
    let text = error.to_string();
    match error.kind() {
        ErrorKind::Server(ServerErrorKind::ReadOnly) => StoreError::ReadOnly,
        _ if error.code() == Some("OOM") => StoreError::Full,
        _ if error.code() == Some("MISCONF") => StoreError::ReadOnly,
        ErrorKind::Io => StoreError::Gone { text },
        _ => StoreError::Failed { text },
    }
}

fn key(name: &Name) -> String {
    name.separated_by(":")
}

impl Store for Redis {
    fn have(&self, names: &[Name]) -> Result<Vec<bool>, StoreError> {
        if names.is_empty() {
            return Ok(Vec::new());
        }
        let mut pipe = pipe();
        for name in names {
            pipe.cmd("EXISTS").arg(key(name));
        }
        self.call(|connection| pipe.query(connection))
    }

    fn get(&self, name: &Name, into: &mut Buffers) -> Result<Got, StoreError> {
        if let ConnectionAddr::Tcp(host, port) = self.client.get_connection_info().addr()
            && into.pages.len() == into.of as usize
        {
            return self.read((host, *port), &key(name), into);
        }
        self.get_by_client(name, into)
    }

    fn put(&self, name: &Name, head: &[u8], pages: &[&[u8]]) -> Result<(), StoreError> {
        let value = concat(head, pages);
        let bytes = value.len() as u64;
        if bytes > VALUE_MAX {
            return Err(StoreError::TooLarge { bytes, max: VALUE_MAX });
        }
        let mut set = cmd("SET");
        set.arg(key(name)).arg(value);
        if let Some(ttl) = self.ttl {
            set.arg("EX").arg(ttl);
        }
        self.call(|connection| set.exec(connection))
    }

    fn remove(&self, names: &[Name]) -> Result<(), StoreError> {
        if names.is_empty() {
            return Ok(());
        }
        let keys: Vec<_> = names.iter().map(key).collect();
        self.call(|connection| cmd("UNLINK").arg(keys).exec(connection))
    }

    fn remove_space(&self, fingerprint: &Fingerprint, space: Space) -> Result<(), StoreError> {
        let pattern = format!("v1:{fingerprint}:{space}:*");
        self.call(|connection| {
            let mut cursor = 0_u64;
            loop {
                let mut scan = cmd("SCAN");
                scan.arg(cursor).arg("MATCH").arg(&pattern).arg("COUNT").arg(SCAN);
                let (next, keys): (u64, Vec<String>) = scan.query(connection)?;
                if !keys.is_empty() {
                    cmd("UNLINK").arg(keys).exec(connection)?;
                }
                cursor = next;
                if cursor == 0 {
                    return Ok(());
                }
            }
        })
    }
}
