//! The load from swap memory that one call makes. `system/load.rs` builds and ends it; in between, the engine passes
//! its moves to the backend.
//!
//! Not here: the changes of the tree (`restore.rs`).

use crate::id::{CellId, NodeKey, PageId, SeqKey};
use crate::memory::{Memory, OutOfMemory};
use crate::plan::PageMove;

/// What a load brings to the device.
#[derive(Clone, Copy)]
pub(crate) enum Part {
    /// The last entries of a node, which are in swap memory alone, and their number.
    Entries(NodeKey, u32),
    Cell(CellId),
}

/// The sequences that wait for a load, the entries and cells that they lack, and the moves of the pages.
pub(crate) struct LoadBatch {
    /// Identifies the load in the nodes and cells that belong to it.
    pub(super) number: u64,
    /// Each sequence, with the end of its parts. A part belongs to the first sequence that lacks it.
    seqs: Vec<(SeqKey, u32)>,
    pub(super) parts: Vec<Part>,
    pub(super) moves: Vec<PageMove>,
}

impl LoadBatch {
    /// Creates an empty batch for at most `rows` sequences and `page_count` pages.
    ///
    /// # Errors
    /// The allocation that failed.
    pub fn new(page_count: u32, rows: u32, memory: &mut Memory) -> Result<Self, OutOfMemory> {
        let (parts, moves) = (memory.reserved(page_count.into())?, memory.reserved(page_count.into())?);
        Ok(Self { number: 0, seqs: memory.reserved(rows.into())?, parts, moves })
    }

    /// Removes everything, and sets the number of the next load.
    pub(super) fn restart(&mut self, number: u64) {
        self.number = number;
        self.seqs.clear();
        self.parts.clear();
        self.moves.clear();
    }

    pub fn is_empty(&self) -> bool {
        self.seqs.is_empty()
    }

    /// Adds a part. A load of more parts than pages is only counted, because no device has the pages for it.
    pub(super) fn push_part(&mut self, part: Part) {
        if self.parts.len() < self.parts.capacity() {
            self.parts.push(part);
        }
    }

    /// Adds a sequence, whose parts are those after the last sequence.
    pub fn push_sequence(&mut self, seq: SeqKey) {
        self.seqs.push((seq, self.parts.len() as u32));
    }

    /// Returns the moves for the backend.
    pub fn moves(&self) -> &[PageMove] {
        &self.moves
    }

    /// Returns the device pages that the load fills.
    pub fn device_pages(&self) -> impl Iterator<Item = PageId> {
        self.moves.iter().map(|load| load.device)
    }

    /// Returns each sequence with its parts.
    pub fn sequences(&self) -> impl Iterator<Item = (SeqKey, &[Part])> {
        let mut start = 0;
        self.seqs
            .iter()
            .map(move |&(seq, end)| (seq, &self.parts[std::mem::replace(&mut start, end as usize)..end as usize]))
    }
}
