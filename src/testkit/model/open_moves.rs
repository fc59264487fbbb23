//! Records of the pages that stores read and write in the model: pages to put, open puts and open fetches.

use std::collections::VecDeque;

use crate::id::{Scope, SwapPageId, TokenId};

/// The key of a page: namespace, generation, and all tokens up to the page's end.
pub type Path = (u64, u64, Vec<TokenId>);

/// A page of the tree. The version distinguishes it from earlier pages with the same path.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct PageVersion {
    pub path: Path,
    pub version: u64,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Put {
    pub number: u64,
    /// The page; `None` once its generation has ended.
    pub page: Option<PageVersion>,
    /// The swap page that the store reads; `None` for a page of the stage.
    pub swap_page: Option<SwapPageId>,
    /// Number of the last save to the page; the store reads the page after this save.
    pub save: u64,
    pub is_given: bool,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Fetch {
    pub number: u64,
    pub scope: Scope,
    /// All tokens of the prompt up to the end of the last fetched page.
    pub tokens: Vec<TokenId>,
    pub cached: usize,
    pub pages: Vec<SwapPageId>,
}

/// The pages that stores read and write.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Stores {
    pub queue: VecDeque<PageVersion>,
    /// Pages that a store refused, and later ones. They are put after a call that selects no page.
    pub refused: VecDeque<PageVersion>,
    pub puts: Vec<Put>,
    pub last_put: u64,
    pub stage_free: usize,
    pub fetches: Vec<Fetch>,
    pub last_fetch: u64,
    /// Number of pages that stores have read.
    pub done: u64,
    /// Number of pages that stores have written and the tree has received.
    pub fetched: u64,
}

impl Stores {
    pub fn new(stage_pages: u32) -> Self {
        Self { stage_free: stage_pages as usize, ..Self::default() }
    }

    /// Ends the generation of all pages.
    pub fn end_generation(&mut self) {
        self.queue.clear();
        self.refused.clear();
        self.puts.iter_mut().for_each(|put| put.page = None);
    }
}
