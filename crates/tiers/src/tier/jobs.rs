//! The jobs of the stores' threads, and their ends. Jobs own leases, so a store that hangs keeps pages, but no request.

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::Duration;

use kvarena::hash::PageHash;
use kvarena::id::TokenId;
use kvarena::moves::{Lookup, PutId};

use crate::miss::Miss;
use crate::name::{Name, Space};
use crate::store::StoreError;

/// A record without the fields that all records of a tier share.
#[derive(Clone, Debug)]
pub(super) struct Key {
    pub space: Space,
    pub group: u32,
    pub first: u32,
    pub parent: Option<[u8; 32]>,
    pub key: PageHash,
    pub tokens: Arc<[TokenId]>,
    /// The tokens of the record.
    pub range: Range<usize>,
}

/// A question for the records of a prompt. It visits the stores in order.
#[derive(Debug)]
pub(super) struct Ask {
    /// Number of the request or the confirmation.
    pub find: u64,
    pub space: Space,
    pub lookup: Lookup,
    pub prompt: Arc<[TokenId]>,
    pub keys: Vec<PageHash>,
    /// Tokens and bytes of all records that the prompt lacks.
    pub most: (u64, u64),
    pub wanted: Vec<(u32, u32)>,
    /// The store that has a record of a group at a place.
    pub located: HashMap<(u32, u32), usize>,
    /// Whether stores look at the records, and not at what they remember.
    pub is_exact: bool,
    /// The records that a store lacks on a rank.
    pub denied: HashSet<(u32, u32)>,
    /// The time that stores took to answer.
    pub took: Duration,
}

impl Ask {
    pub fn new(
        find: u64,
        space: Space,
        lookup: Lookup,
        prompt: Arc<[TokenId]>,
        most: (u64, u64),
        wanted: Vec<(u32, u32)>,
    ) -> Self {
        Self {
            find,
            space,
            lookup,
            prompt,
            keys: Vec::new(),
            most,
            wanted,
            located: HashMap::new(),
            is_exact: false,
            denied: HashSet::new(),
            took: Duration::ZERO,
        }
    }
}

pub(super) struct Get<W> {
    pub fetch: u64,
    pub index: usize,
    pub key: Key,
    /// Index of the first page in the record.
    pub first: u32,
    pub pages: Vec<W>,
}

pub(super) struct Put<R> {
    pub id: PutId,
    pub key: Key,
    pub pages: Vec<R>,
    /// Whether the record is put even if the store has it: a reader did not accept what the store has.
    pub is_forced: bool,
    /// Whether a store has the record.
    pub is_stored: bool,
    /// How often its space was forgotten before the put began.
    pub forgets: u64,
}

pub(super) enum Job<R, W> {
    Ask(Box<Ask>),
    Get(Get<W>),
    Put(Put<R>),
    Forget { space: Space, answer: Sender<Forgotten> },
}

/// Name of a store, and whether it has removed a namespace.
pub type Forgotten = (String, Result<(), StoreError>);

/// The end of a job.
pub(super) enum Done {
    Asked(Box<Ask>),
    Got { fetch: u64, index: usize, name: Name, got: Result<(), Miss> },
    Put { id: PutId, name: Name, is_stored: bool },
}
