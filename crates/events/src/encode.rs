//! Encodes an engine's events as a message's payload: `[seconds, [event, ..], rank]` in MessagePack, each event a map.
//!
//! The keys are those that vLLM 0.33 requires, plus its keys of groups and `cache_salt` of SGLang 0.5.23. Events about
//! cells have the group of the cell; routers of other engines ignore all groups but those of full attention.
//! `publisher.rs` adds the frames and sequence numbers.

use kvarena::TokenId;
use kvarena::event::{Event, Medium, Stored};
use kvarena::hash::{Hashing, PageHash};
use kvarena::layout::{Groups, Reach};
use rmp::encode::{write_array_len, write_f64, write_uint};
use serde::Serialize;

/// Map of an event, with the keys in the order of the wire format.
#[derive(Serialize)]
#[serde(tag = "type")]
enum Map<'a> {
    BlockStored {
        block_hashes: Vec<Id>,
        parent_block_hash: Option<Id>,
        token_ids: &'a [u32],
        block_size: u32,
        lora_id: (),
        medium: &'a str,
        lora_name: Option<&'a str>,
        group_idx: u32,
        kv_cache_spec_kind: &'a str,
        #[serde(skip_serializing_if = "Option::is_none")]
        kv_cache_spec_sliding_window: Option<u32>,
        #[serde(skip_serializing_if = "Option::is_none")]
        cache_salt: Option<&'a str>,
    },
    BlockRemoved {
        block_hashes: Vec<Id>,
        medium: &'a str,
        group_idx: u32,
    },
    AllBlocksCleared,
}

/// A page's hash as 64 bits, signed for SGLang and unsigned otherwise.
#[derive(Serialize)]
#[serde(untagged)]
enum Id {
    Signed(i64),
    Unsigned(u64),
}

/// Events of one message.
pub struct Batch {
    hashing: Hashing,
    page_size: u32,
    groups: Groups,
    events: Vec<u8>,
    count: u32,
}

impl Batch {
    /// Creates an empty batch for an engine with one group of layers, or without events about cells.
    pub fn new(hashing: Hashing, page_size: u32) -> Self {
        Self { hashing, page_size, groups: Groups::ONE, events: Vec::new(), count: 0 }
    }

    /// Sets the groups of layers, whose kinds events about cells contain.
    #[must_use]
    pub fn with_groups(self, groups: Groups) -> Self {
        Self { groups, ..self }
    }

    pub fn len(&self) -> u32 {
        self.count
    }

    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Adds an event.
    ///
    /// # Panics
    /// If the event is about a cell of a group that the batch does not have.
    pub fn push(&mut self, event: Event<'_>) {
        let map = match &event {
            Event::Stored(Stored { group, .. }) | Event::Removed { group, .. } if *group >= self.groups.count() => {
                panic!("an event of group {group} of {}", self.groups.count())
            }
            Event::Stored(stored) => Map::BlockStored {
                block_hashes: stored.hashes.iter().map(|hash| self.id(hash)).collect(),
                parent_block_hash: stored.parent.map(|parent| self.id(parent)),
                token_ids: TokenId::as_raw(stored.tokens),
                block_size: self.page_size,
                lora_id: (),
                medium: self.medium(stored.medium),
                lora_name: stored.names.lora.as_deref(),
                group_idx: stored.group,
                kv_cache_spec_kind: match self.groups.reach(stored.group) {
                    Reach::Window(_) => "sliding_window",
                    Reach::Chunk(_) => "chunked_local_attention",
                    Reach::State => "mamba",
                    _ => "full_attention",
                },
                kv_cache_spec_sliding_window: match self.groups.reach(stored.group) {
                    Reach::Window(size) => Some(size),
                    _ => None,
                },
                cache_salt: stored.names.salt.as_deref(),
            },
            Event::Removed { group, medium, hashes } => Map::BlockRemoved {
                block_hashes: hashes.iter().map(|hash| self.id(hash)).collect(),
                medium: self.medium(*medium),
                group_idx: *group,
            },
            Event::Cleared => Map::AllBlocksCleared,
            // The wire format has no other kinds of events.
            _ => return,
        };
        let mut maps = rmp_serde::Serializer::new(&mut self.events).with_struct_map();
        map.serialize(&mut maps).expect("a write to memory succeeds");
        self.count += 1;
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

    /// Returns the name of a medium. SGLang and vLLM name swap memory differently; the hashing selects the name.
    fn medium(&self, medium: Medium) -> &'static str {
        match (medium, self.hashing) {
            (Medium::Device, _) => "GPU",
            (Medium::Swap, Hashing::SglangSha256) => "CPU_PINNED",
            (Medium::Swap, _) => "CPU",
        }
    }

    fn id(&self, hash: PageHash) -> Id {
        let id = self.hashing.event_id(hash);
        match self.hashing {
            Hashing::SglangSha256 => Id::Signed(id.cast_signed()),
            _ => Id::Unsigned(id),
        }
    }
}
