//! Encodes an engine's events as a message's payload: `[seconds, [event, ..], rank]` in MessagePack, each event a map.
//!
//! The keys are those that vLLM 0.33 requires, plus `cache_salt` of SGLang 0.5.23. `publisher.rs` adds the frames and
//! sequence numbers.

use kvarena::{Event, Hashing, Medium, PageHash, Stored};
use rmp::encode::{write_array_len, write_f64, write_map_len, write_nil, write_sint, write_str, write_uint};

/// Events of one message.
pub struct Batch {
    hashing: Hashing,
    page_size: u32,
    events: Vec<u8>,
    count: u32,
}

impl Batch {
    /// Creates an empty batch.
    pub fn new(hashing: Hashing, page_size: u32) -> Self {
        Self { hashing, page_size, events: Vec::new(), count: 0 }
    }

    /// Returns the number of events.
    pub fn len(&self) -> u32 {
        self.count
    }

    /// Returns whether the batch has no events.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Adds an event.
    pub fn push(&mut self, event: Event<'_>) {
        match event {
            Event::Stored(stored) => self.push_stored(&stored),
            Event::Removed { medium, hashes } => {
                self.begin(3, "BlockRemoved");
                self.key("block_hashes");
                self.array(hashes.len());
                hashes.iter().for_each(|hash| self.hash(hash));
                self.medium(medium);
            }
            Event::Cleared => self.begin(1, "AllBlocksCleared"),
            // The wire format has no other kinds of events.
            _ => return,
        }
        self.count += 1;
    }

    fn push_stored(&mut self, stored: &Stored<'_>) {
        let names = stored.names;
        self.begin(10 + u32::from(names.salt.is_some()), "BlockStored");
        self.key("block_hashes");
        self.array(stored.hashes.len());
        stored.hashes.iter().for_each(|hash| self.hash(hash));
        self.key("parent_block_hash");
        match stored.parent {
            Some(parent) => self.hash(parent),
            None => self.nil(),
        }
        self.key("token_ids");
        self.array(stored.tokens.len());
        stored.tokens.iter().for_each(|token| self.number(token.raw().into()));
        self.key("block_size");
        self.number(self.page_size.into());
        self.key("lora_id");
        self.nil();
        self.medium(stored.medium);
        self.text("lora_name", names.lora.as_deref());
        self.key("group_idx");
        self.number(0);
        self.text("kv_cache_spec_kind", Some("full_attention"));
        if let Some(salt) = &names.salt {
            self.text("cache_salt", Some(salt));
        }
    }

    /// Returns the payload of all added events, and empties the batch.
    pub fn take(&mut self, seconds: f64, rank: u32) -> Vec<u8> {
        let mut payload = Vec::with_capacity(self.events.len() + 32);
        let written = write_array_len(&mut payload, 3)
            .and_then(|_| {
                write_f64(&mut payload, seconds)?;
                write_array_len(&mut payload, self.count)
            })
            .map(|_| payload.append(&mut self.events))
            .and_then(|()| write_uint(&mut payload, rank.into()));
        written.expect("a write to memory succeeds");
        self.count = 0;
        payload
    }

    fn begin(&mut self, fields: u32, kind: &str) {
        write_map_len(&mut self.events, fields).expect("a write to memory succeeds");
        self.text("type", Some(kind));
    }

    fn key(&mut self, key: &str) {
        write_str(&mut self.events, key).expect("a write to memory succeeds");
    }

    fn text(&mut self, key: &str, text: Option<&str>) {
        self.key(key);
        match text {
            Some(text) => self.key(text),
            None => self.nil(),
        }
    }

    /// Writes the name of a medium. SGLang and vLLM name swap memory differently; the hashing selects the name.
    fn medium(&mut self, medium: Medium) {
        let name = match (medium, self.hashing) {
            (Medium::Device, _) => "GPU",
            (Medium::Swap, Hashing::SglangSha256) => "CPU_PINNED",
            (Medium::Swap, _) => "CPU",
        };
        self.text("medium", Some(name));
    }

    fn nil(&mut self) {
        write_nil(&mut self.events).expect("a write to memory succeeds");
    }

    fn array(&mut self, len: usize) {
        let len = u32::try_from(len).expect("an event has fewer than 2^32 items");
        write_array_len(&mut self.events, len).expect("a write to memory succeeds");
    }

    fn number(&mut self, number: u64) {
        write_uint(&mut self.events, number).expect("a write to memory succeeds");
    }

    /// Writes a page's hash as 64 bits, signed for SGLang and unsigned otherwise.
    fn hash(&mut self, hash: PageHash) {
        let id = self.hashing.event_id(hash);
        let written = match self.hashing {
            Hashing::SglangSha256 => write_sint(&mut self.events, id.cast_signed()),
            _ => write_uint(&mut self.events, id),
        };
        written.expect("a write to memory succeeds");
    }
}
