//! A message's payload, read: events of vLLM and SGLang, as maps or, from engines before June 2026, as arrays.
//!
//! A payload is read and checked as a whole before its first event is returned. An error names the position of the
//! wrong byte. Not here: MessagePack (`msgpack.rs`), which message is next (`subscriber.rs`).

use std::fmt;

use crate::msgpack::{Malformed, Reader, Value};

/// Pages that became matchable.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct StoredPages {
    /// Of each page, what it is called.
    pub hashes: Vec<u64>,
    /// The page before them.
    pub parent: Option<u64>,
    /// Their tokens.
    pub tokens: Vec<u32>,
    /// Tokens of each page.
    pub page_size: u32,
    /// The adapter.
    pub lora: Option<String>,
    /// What keeps a tenant apart.
    pub salt: Option<String>,
    /// Where the pages are.
    pub medium: Option<String>,
}

/// A message of an engine.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum WireEvent {
    /// `BlockStored`
    Stored(StoredPages),
    /// `BlockRemoved`
    Removed {
        /// Of each page, what it is called.
        hashes: Vec<u64>,
        /// Where the pages were.
        medium: Option<String>,
    },
    /// `AllBlocksCleared`
    Cleared,
}

/// A payload.
#[derive(Clone, PartialEq, Debug)]
pub struct Message {
    /// When it was made, in seconds.
    pub seconds: f64,
    /// What has happened, in order.
    pub events: Vec<WireEvent>,
    /// The engine's rank among those of one endpoint.
    pub rank: Option<u32>,
}

/// Why a payload is refused, and the place of the byte where what is wrong begins.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct WireError {
    /// Bytes before it.
    pub at: usize,
    /// What it is.
    pub what: Wrong,
}

/// What is wrong with a payload.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Wrong {
    /// The bytes are not MessagePack.
    Malformed(Malformed),
    /// The payload is not an array of three: time, events, rank.
    Envelope {
        /// Its items.
        len: usize,
    },
    /// Another kind of value belongs there.
    Kind {
        /// What belongs there.
        wanted: &'static str,
        /// What is there.
        found: &'static str,
    },
    /// An event of an unknown type.
    EventType {
        /// Its name.
        name: String,
    },
    /// An event lacks what it cannot be without.
    Missing {
        /// The field.
        field: &'static str,
    },
    /// A hash of other than 64 bits or 32 bytes.
    HashWidth {
        /// Its bytes.
        bytes: usize,
    },
    /// A number that is too large for what it counts.
    Range {
        /// The field.
        field: &'static str,
        /// The number.
        value: u64,
    },
    /// Tokens that do not fill the pages.
    TokenCount {
        /// Tokens.
        tokens: usize,
        /// Pages.
        pages: usize,
        /// Tokens of a page.
        page_size: u32,
    },
    /// Bytes behind the payload's end.
    Trailing {
        /// How many.
        bytes: usize,
    },
}

impl fmt::Display for WireError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "byte {}: ", self.at)?;
        match &self.what {
            Wrong::Malformed(malformed) => write!(f, "{malformed}"),
            Wrong::Envelope { len } => {
                write!(f, "a payload of {len} items, not of time, events and rank")
            }
            Wrong::Kind { wanted, found } => write!(f, "{found} where {wanted} belongs"),
            Wrong::EventType { name } => write!(f, "an event of the unknown type `{name}`"),
            Wrong::Missing { field } => write!(f, "an event without `{field}`"),
            Wrong::HashWidth { bytes } => write!(f, "a hash of {bytes} bytes, not of 8 or 32"),
            Wrong::Range { field, value } => write!(f, "`{field}` of {value} is too large"),
            Wrong::TokenCount { tokens, pages, page_size } => {
                write!(f, "{tokens} tokens do not fill {pages} pages of {page_size}")
            }
            Wrong::Trailing { bytes } => write!(f, "{bytes} more bytes behind the payload"),
        }
    }
}

impl std::error::Error for WireError {}

type Read<T> = Result<T, WireError>;

/// Reads a payload, all of it or nothing.
///
/// # Errors
/// [`WireError`]: the first thing that is wrong.
pub fn decode(payload: &[u8]) -> Read<Message> {
    let mut payload = Payload { reader: Reader::new(payload) };
    let at = payload.reader.at();
    match payload.value()? {
        Value::Array(3) => {}
        Value::Array(len) => return Err(WireError { at, what: Wrong::Envelope { len } }),
        other => return Err(kind(at, "an array", other)),
    }
    let seconds = payload.seconds()?;
    let mut events = Vec::new();
    for _ in 0..payload.array("an array of events")? {
        events.push(payload.event()?);
    }
    let rank = payload.optional(|payload| payload.small("rank"))?;
    match payload.reader.rest() {
        0 => Ok(Message { seconds, events, rank }),
        bytes => Err(WireError { at: payload.reader.at(), what: Wrong::Trailing { bytes } }),
    }
}

fn kind(at: usize, wanted: &'static str, found: Value<'_>) -> WireError {
    WireError { at, what: Wrong::Kind { wanted, found: found.name() } }
}

struct Payload<'a> {
    reader: Reader<'a>,
}

/// The fields of an event, as far as they have been read.
#[derive(Default)]
struct Fields {
    kind: Option<(usize, String)>,
    hashes: Option<Vec<u64>>,
    tokens: Option<(usize, Vec<u32>)>,
    page_size: Option<u32>,
    /// Whether there is a field for it.
    parent: Option<Option<u64>>,
    lora: Option<String>,
    salt: Option<String>,
    medium: Option<String>,
}

/// The order of fields in events that are arrays.
const POSITIONS: [&str; 7] = [
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
];
const REMOVED_POSITIONS: [&str; 2] = ["block_hashes", "medium"];

impl<'a> Payload<'a> {
    fn value(&mut self) -> Read<Value<'a>> {
        let at = self.reader.at();
        self.reader.value().map_err(|what| WireError { at, what: Wrong::Malformed(what) })
    }

    fn skip(&mut self) -> Read<()> {
        let skipped = self.reader.skip();
        let at = self.reader.at();
        skipped.map_err(|what| WireError { at, what: Wrong::Malformed(what) })
    }

    fn seconds(&mut self) -> Read<f64> {
        let at = self.reader.at();
        match self.value()? {
            Value::Float(seconds) => Ok(seconds),
            Value::Unsigned(seconds) => Ok(seconds as f64),
            other => Err(kind(at, "a time in seconds", other)),
        }
    }

    fn array(&mut self, wanted: &'static str) -> Read<usize> {
        let at = self.reader.at();
        match self.value()? {
            Value::Array(len) => Ok(len),
            other => Err(kind(at, wanted, other)),
        }
    }

    /// Nothing for nil.
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
            other => Err(kind(at, "text", other)),
        }
    }

    /// A number of 32 bits.
    fn small(&mut self, field: &'static str) -> Read<u32> {
        let at = self.reader.at();
        match self.value()? {
            Value::Unsigned(value) => u32::try_from(value)
                .map_err(|_| WireError { at, what: Wrong::Range { field, value } }),
            other => Err(kind(at, "a number that is not negative", other)),
        }
    }

    /// 64 bits of either sign, or a digest, of which the last 8 bytes count.
    fn hash(&mut self) -> Read<u64> {
        let at = self.reader.at();
        match self.value()? {
            Value::Unsigned(hash) => Ok(hash),
            Value::Negative(hash) => Ok(hash.cast_unsigned()),
            Value::Bytes(bytes) => match *bytes {
                [.., a, b, c, d, e, f, g, h] if bytes.len() == 32 => {
                    Ok(u64::from_be_bytes([a, b, c, d, e, f, g, h]))
                }
                _ => Err(WireError { at, what: Wrong::HashWidth { bytes: bytes.len() } }),
            },
            other => Err(kind(at, "a hash", other)),
        }
    }

    /// The items of an array. A length that is a lie takes no memory.
    fn list<T>(
        &mut self,
        wanted: &'static str,
        mut read: impl FnMut(&mut Self) -> Read<T>,
    ) -> Read<Vec<T>> {
        let len = self.array(wanted)?;
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
                let positions: &[&str] =
                    if kind.1 == "BlockRemoved" { &REMOVED_POSITIONS } else { &POSITIONS };
                fields.kind = Some(kind);
                for index in 0..len - 1 {
                    self.field(positions.get(index).unwrap_or(&"later"), &mut fields)?;
                }
            }
            other => return Err(kind(at, "an event", other)),
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
            _ => self.skip()?,
        }
        Ok(())
    }
}

impl Fields {
    /// The event that begins at `at`.
    fn event(self, at: usize) -> Read<WireEvent> {
        let missing = |field| WireError { at, what: Wrong::Missing { field } };
        let (kind_at, kind) = self.kind.ok_or(missing("type"))?;
        match kind.as_str() {
            "AllBlocksCleared" => return Ok(WireEvent::Cleared),
            "BlockStored" | "BlockRemoved" => {}
            _ => return Err(WireError { at: kind_at, what: Wrong::EventType { name: kind } }),
        }
        let hashes = self.hashes.ok_or(missing("block_hashes"))?;
        if kind == "BlockRemoved" {
            return Ok(WireEvent::Removed { hashes, medium: self.medium });
        }
        let parent = self.parent.ok_or(missing("parent_block_hash"))?;
        let (tokens_at, tokens) = self.tokens.ok_or(missing("token_ids"))?;
        let page_size = self.page_size.ok_or(missing("block_size"))?;
        if tokens.len() as u64 != hashes.len() as u64 * u64::from(page_size) || page_size == 0 {
            let (tokens, pages) = (tokens.len(), hashes.len());
            let what = Wrong::TokenCount { tokens, pages, page_size };
            return Err(WireError { at: tokens_at, what });
        }
        let Self { lora, salt, medium, .. } = self;
        Ok(WireEvent::Stored(StoredPages { hashes, parent, tokens, page_size, lora, salt, medium }))
    }
}
