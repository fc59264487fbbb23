//! What stores read and write in the model: pages to be put, open puts and fetches, as plain records.

use std::collections::VecDeque;

use crate::id::{HostPageId, Scope, TokenId};

/// Scope (namespace, generation) and whole pages of tokens.
pub type Path = (u64, u64, Vec<TokenId>);

/// A page of the tree, and which of the pages with this path it is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Of {
    pub path: Path,
    pub version: u64,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Put {
    pub number: u64,
    pub of: Of,
    /// The host page that the store reads; none for a page of the stage.
    pub host: Option<HostPageId>,
    /// The save to it.
    pub save: u64,
    pub is_given: bool,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Fetch {
    pub number: u64,
    pub scope: Scope,
    /// Up to the end of the last page.
    pub tokens: Vec<TokenId>,
    pub cached: usize,
    pub pages: Vec<HostPageId>,
}

/// What stores read and write.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Stores {
    pub queue: VecDeque<Of>,
    pub puts: Vec<Put>,
    pub last_put: u64,
    pub stage_free: usize,
    pub fetches: Vec<Fetch>,
    pub last_fetch: u64,
    /// Pages that stores have taken and given.
    pub done: u64,
    pub fetched: u64,
}

impl Stores {
    pub fn new(stage_pages: u32) -> Self {
        Self { stage_free: stage_pages as usize, ..Self::default() }
    }

    /// Forgets what waits: its generation is over.
    pub fn clear(&mut self) {
        self.queue.clear();
    }
}
