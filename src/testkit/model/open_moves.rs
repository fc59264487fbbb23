//! Records of the pages that stores read and write in the model: pages to put, open puts and open fetches.

use std::collections::VecDeque;

use crate::id::{Scope, SwapPageId, TokenId};

/// The index of a limited group, and the path of the page that has the cell.
pub(super) type CellKey = (usize, Path);

/// The key of a page: namespace, generation, and all tokens up to the page's end.
pub type Path = (u64, u64, Vec<TokenId>);

/// A page of the tree. The version distinguishes it from earlier pages with the same path.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct PageVersion {
    pub path: Path,
    pub version: u64,
}

/// A record: the page that it ends with, and 0, or the index of a group's cells plus 1.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Record {
    pub cell: usize,
    pub page: PageVersion,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Put {
    pub number: u64,
    /// The record; `None` once its generation has ended.
    pub record: Option<Record>,
    /// The swap pages that the store reads; `None` for a page of the stage.
    pub pages: Vec<Option<SwapPageId>>,
    /// Number of the last save to one of the pages; the store reads the pages after this save.
    pub save: u64,
    pub is_given: bool,
}

impl Put {
    pub fn is_staged(&self) -> bool {
        self.staged() > 0
    }

    pub fn staged(&self) -> usize {
        self.pages.iter().filter(|page| page.is_none()).count()
    }
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Fetch {
    pub number: u64,
    pub scope: Scope,
    /// The tokens of the target.
    pub tokens: Vec<TokenId>,
    /// Number of its pages that were cached when the fetch began.
    pub cached: usize,
    pub records: Vec<RecordWant>,
    /// The cells of its tails that were cached when the fetch began, and the others, in the order of their release.
    pub tails: Vec<(CellKey, bool)>,
}

/// The expected record of a fetch.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RecordWant {
    /// The group of layers.
    pub group: u32,
    /// Index of its last page in the prompt.
    pub place: u32,
    /// Index of the first page to write.
    pub first: u32,
    /// The swap pages to write.
    pub pages: Vec<SwapPageId>,
}

/// The pages that stores read and write.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Stores {
    pub queue: VecDeque<Record>,
    /// Records that a store refused, and later ones. They are put after a call that selects no record.
    pub refused: VecDeque<Record>,
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
        self.puts.iter_mut().for_each(|put| put.record = None);
    }
}
