//! Decodes a message's payload: events of vLLM and SGLang, as maps or, from engines before June 2026, as arrays.
//!
//! The decoder checks the whole payload before it returns an event. An error contains the offset of the invalid value.
//! `msgpack.rs` reads MessagePack; `subscriber.rs` orders the messages.

use std::fmt;

use crate::msgpack::{Malformed, Reader, Value};

/// Pages that became matchable.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct StoredPages {
    pub hashes: Vec<u64>,
    /// Hash of the preceding page.
    pub parent: Option<u64>,
    pub tokens: Vec<u32>,
    pub page_size: u32,
    pub lora: Option<String>,
    /// Cache salt, which separates tenants.
    pub salt: Option<String>,
    pub medium: Option<String>,
    /// Group of layers of the pages; 0 if the event has none.
    pub group: u32,
}

/// Event of an engine.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum WireEvent {
    Stored(StoredPages),
    Removed {
        hashes: Vec<u64>,
        medium: Option<String>,
        /// Group of layers of the pages; 0 if the event has none.
        group: u32,
    },
    Cleared,
}

/// Decoded payload.
#[derive(Clone, PartialEq, Debug)]
pub struct Message {
    /// Time of creation, in seconds since 1970.
    pub seconds: f64,
    pub events: Vec<WireEvent>,
    /// Data-parallel rank of the engine, among the engines of one endpoint.
    pub rank: Option<u32>,
}

/// Error in a payload, with its offset.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct WireError {
    /// Offset of the invalid value, of the event that lacks a field, or of the first trailing byte.
    pub at: usize,
    pub kind: ErrorKind,
}

/// Kind of error in a payload.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The bytes are not MessagePack.
    Malformed(Malformed),
    /// The payload is an array, but not of three items: time, events, rank.
    Envelope {
        len: usize,
    },
    /// The value has a wrong type.
    Type {
        expected: &'static str,
        found: &'static str,
    },
    EventType {
        name: String,
    },
    /// The event lacks a required field.
    Missing {
        field: &'static str,
    },
    /// The hash is a byte string, but not of 32 bytes.
    HashWidth {
        bytes: usize,
    },
    /// The number is too large for its field.
    Range {
        field: &'static str,
        value: u64,
    },
    /// The tokens do not exactly fill the pages, or the page size is 0.
    TokenCount {
        tokens: usize,
        pages: usize,
        page_size: u32,
    },
    /// Bytes follow the payload.
    Trailing {
        bytes: usize,
    },
}

impl fmt::Display for WireError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "byte {}: ", self.at)?;
        match &self.kind {
            ErrorKind::Malformed(malformed) => write!(f, "{malformed}"),
            ErrorKind::Envelope { len } => {
                write!(f, "a payload of {len} items, not of time, events and rank")
            }
            ErrorKind::Type { expected, found } => write!(f, "{found} where {expected} belongs"),
            ErrorKind::EventType { name } => write!(f, "an event of the unknown type `{name}`"),
            ErrorKind::Missing { field } => write!(f, "an event without `{field}`"),
            ErrorKind::HashWidth { bytes } => write!(f, "a hash of {bytes} bytes, not of 32"),
            ErrorKind::Range { field, value } => write!(f, "`{field}` of {value} is too large"),
            ErrorKind::TokenCount { tokens, pages, page_size } => {
                write!(f, "{tokens} tokens do not fill {pages} pages of {page_size}")
            }
            ErrorKind::Trailing { bytes } => write!(f, "{bytes} more bytes behind the payload"),
        }
    }
}

impl std::error::Error for WireError {}

type Read<T> = Result<T, WireError>;

/// Decodes a payload.
///
/// # Errors
/// [`WireError`]: the first error.
pub fn decode(payload: &[u8]) -> Read<Message> {
    let mut payload = Payload { reader: Reader::new(payload) };
    let at = payload.reader.at();
    match payload.value()? {
        Value::Array(3) => {}
        Value::Array(len) => return Err(WireError { at, kind: ErrorKind::Envelope { len } }),
        other => return Err(wrong_type(at, "an array", other)),
    }
    let seconds = payload.seconds()?;
    let mut events = Vec::new();
    for _ in 0..payload.array("an array of events")? {
        events.push(payload.event()?);
    }
    let rank = payload.optional(|payload| payload.small("rank"))?;
    match payload.reader.rest() {
        0 => Ok(Message { seconds, events, rank }),
        bytes => Err(WireError { at: payload.reader.at(), kind: ErrorKind::Trailing { bytes } }),
    }
}

fn wrong_type(at: usize, expected: &'static str, found: Value<'_>) -> WireError {
    WireError { at, kind: ErrorKind::Type { expected, found: found.name() } }
}

struct Payload<'a> {
    reader: Reader<'a>,
}

/// The fields of an event that have been read.
#[derive(Default)]
struct Fields {
    kind: Option<(usize, String)>,
    hashes: Option<Vec<u64>>,
    tokens: Option<(usize, Vec<u32>)>,
    page_size: Option<u32>,
    /// Hash of the parent page; `None` if the event lacks the field.
    parent: Option<Option<u64>>,
    lora: Option<String>,
    salt: Option<String>,
    medium: Option<String>,
    group: Option<u32>,
}

/// Order of the fields of a stored event in array form, after its type.
const POSITIONS: [&str; 9] = [
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
];
const REMOVED_POSITIONS: [&str; 3] = ["block_hashes", "medium", "group_idx"];

impl<'a> Payload<'a> {
    fn value(&mut self) -> Read<Value<'a>> {
        let at = self.reader.at();
        self.reader.value().map_err(|error| WireError { at, kind: ErrorKind::Malformed(error) })
    }

    fn skip(&mut self) -> Read<()> {
        let skipped = self.reader.skip();
        let at = self.reader.at();
        skipped.map_err(|error| WireError { at, kind: ErrorKind::Malformed(error) })
    }

    fn seconds(&mut self) -> Read<f64> {
        let at = self.reader.at();
        match self.value()? {
            Value::Float(seconds) => Ok(seconds),
            Value::Unsigned(seconds) => Ok(seconds as f64),
            other => Err(wrong_type(at, "a time in seconds", other)),
        }
    }

    fn array(&mut self, expected: &'static str) -> Read<usize> {
        let at = self.reader.at();
        match self.value()? {
            Value::Array(len) => Ok(len),
            other => Err(wrong_type(at, expected, other)),
        }
    }

    /// Reads a value, or returns none for nil.
    fn optional<T>(&mut self, read: impl FnOnce(&mut Self) -> Read<T>) -> Read<Option<T>> {
        let before = self.reader.clone();
        if self.value()? == Value::Nil {
            return Ok(None);
        }
        self.reader = before;
        read(self).map(Some)
    }

    fn text(&mut self) -> Read<String> {
        let at = self.reader.at();
        match self.value()? {
            Value::Text(text) => Ok(text.to_owned()),
            other => Err(wrong_type(at, "text", other)),
        }
    }

    /// Reads a number that is not negative and has at most 32 bits.
    fn small(&mut self, field: &'static str) -> Read<u32> {
        let at = self.reader.at();
        match self.value()? {
            Value::Unsigned(value) => {
                u32::try_from(value).map_err(|_| WireError { at, kind: ErrorKind::Range { field, value } })
            }
            other => Err(wrong_type(at, "a number that is not negative", other)),
        }
    }

    /// Reads a hash: 64 bits of either sign, or the last 8 bytes of a 32-byte digest.
    fn hash(&mut self) -> Read<u64> {
        let at = self.reader.at();
        match self.value()? {
            Value::Unsigned(hash) => Ok(hash),
            Value::Negative(hash) => Ok(hash.cast_unsigned()),
            Value::Bytes(bytes) => match *bytes {
                [.., a, b, c, d, e, f, g, h] if bytes.len() == 32 => Ok(u64::from_be_bytes([a, b, c, d, e, f, g, h])),
                _ => Err(WireError { at, kind: ErrorKind::HashWidth { bytes: bytes.len() } }),
            },
            other => Err(wrong_type(at, "a hash", other)),
        }
    }

    /// Reads the items of an array. The length is untrusted, so this reserves at most one item for each remaining byte.
    fn list<T>(&mut self, expected: &'static str, mut read: impl FnMut(&mut Self) -> Read<T>) -> Read<Vec<T>> {
        let len = self.array(expected)?;
        let mut items = Vec::with_capacity(len.min(self.reader.rest()));
        for _ in 0..len {
            items.push(read(self)?);
        }
        Ok(items)
    }

    fn event(&mut self) -> Read<WireEvent> {
        let at = self.reader.at();
        let mut fields = Fields::default();
        match self.value()? {
            Value::Map(len) => {
                for _ in 0..len {
                    let key = self.text()?;
                    self.field(&key, &mut fields)?;
                }
            }
            Value::Array(len) if len > 0 => {
                let kind = (self.reader.at(), self.text()?);
                let positions: &[&str] = if kind.1 == "BlockRemoved" { &REMOVED_POSITIONS } else { &POSITIONS };
                fields.kind = Some(kind);
                for index in 0..len - 1 {
                    self.field(positions.get(index).unwrap_or(&"later"), &mut fields)?;
                }
            }
            other => return Err(wrong_type(at, "an event", other)),
        }
        fields.event(at)
    }

    fn field(&mut self, key: &str, fields: &mut Fields) -> Read<()> {
        let at = self.reader.at();
        match key {
            "type" => fields.kind = Some((at, self.text()?)),
            "block_hashes" => {
                fields.hashes = Some(self.list("an array of hashes", Self::hash)?);
            }
            "parent_block_hash" => fields.parent = Some(self.optional(Self::hash)?),
            "token_ids" => {
                let tokens = self.list("an array of tokens", |own| own.small("token_ids"))?;
                fields.tokens = Some((at, tokens));
            }
            "block_size" => fields.page_size = Some(self.small("block_size")?),
            "lora_name" => fields.lora = self.optional(Self::text)?,
            "cache_salt" => fields.salt = self.optional(Self::text)?,
            "medium" => fields.medium = self.optional(Self::text)?,
            "group_idx" => fields.group = self.optional(|own| own.small("group_idx"))?,
            _ => self.skip()?,
        }
        Ok(())
    }
}

impl Fields {
    /// Returns the event that begins at byte `at`.
    fn event(self, at: usize) -> Read<WireEvent> {
        let missing = |field| WireError { at, kind: ErrorKind::Missing { field } };
        let (kind_at, kind) = self.kind.ok_or(missing("type"))?;
        match kind.as_str() {
            "AllBlocksCleared" => return Ok(WireEvent::Cleared),
            "BlockStored" | "BlockRemoved" => {}
            _ => return Err(WireError { at: kind_at, kind: ErrorKind::EventType { name: kind } }),
        }
        let hashes = self.hashes.ok_or(missing("block_hashes"))?;
        if kind == "BlockRemoved" {
            return Ok(WireEvent::Removed { hashes, medium: self.medium, group: self.group.unwrap_or(0) });
        }
        let parent = self.parent.ok_or(missing("parent_block_hash"))?;
        let (tokens_at, tokens) = self.tokens.ok_or(missing("token_ids"))?;
        let page_size = self.page_size.ok_or(missing("block_size"))?;
        if tokens.len() as u64 != hashes.len() as u64 * u64::from(page_size) || page_size == 0 {
            let (tokens, pages) = (tokens.len(), hashes.len());
            let kind = ErrorKind::TokenCount { tokens, pages, page_size };
            return Err(WireError { at: tokens_at, kind });
        }
        let Self { lora, salt, medium, group, .. } = self;
        let group = group.unwrap_or(0);
        Ok(WireEvent::Stored(StoredPages { hashes, parent, tokens, page_size, lora, salt, medium, group }))
    }
}
