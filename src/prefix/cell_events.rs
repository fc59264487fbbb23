//! What events about cells need: the changes of cells since the last flush, and the origin of each entry. Only trees
//! whose config sets `event_cells` have them.
//!
//! Cells do not contain their node, so they only log their changes. A flush (`chain.rs`) turns the log into events. It
//! runs before an entry is removed, so that its cells have events before the entry has, and before a drain. A log that
//! is full loses changes; the buffer of events then starts over.
//!
//! Not here: the form of an event (`event.rs`), the buffer (`events.rs`), cells (`cells.rs`).

use bytemuck::{Pod, Zeroable};

use crate::event::Medium;
use crate::id::{Namespace, Scope};
use crate::memory::{Memory, OutOfMemory};

use super::entry_list::EntryLists;

/// A medium has received the pages of a cell, or no longer has them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct CellChange {
    /// Index of the group, minus 1.
    pub group: u32,
    pub entry: u32,
    pub medium: Medium,
    pub is_stored: bool,
}

/// The changes of cells since the last flush, oldest first.
#[derive(Default)]
pub(super) struct CellChanges {
    list: Vec<CellChange>,
    /// Maximum number of changes; 0 if cells have no events.
    limit: u32,
    /// Whether a change did not fit.
    has_lost: bool,
}

impl CellChanges {
    pub fn new(limit: u32, memory: &mut Memory) -> Result<Self, OutOfMemory> {
        Ok(Self { list: memory.reserved(limit.into())?, limit, has_lost: false })
    }

    #[inline]
    pub fn push(&mut self, change: CellChange) {
        if self.limit > 0 {
            self.log(change);
        }
    }

    #[cold]
    fn log(&mut self, change: CellChange) {
        if (self.list.len() as u32) < self.limit {
            self.list.push(change);
        } else {
            self.has_lost = true;
        }
    }

    pub fn list(&self) -> &[CellChange] {
        &self.list
    }

    /// Empties the log. Returns whether a change did not fit.
    pub fn clear(&mut self) -> bool {
        self.list.clear();
        std::mem::take(&mut self.has_lost)
    }
}

/// The prefix in which an entry lies, and the entry before it.
#[derive(Clone, Copy, Default, Pod, Zeroable)]
#[repr(C)]
struct Origin {
    namespace: u64,
    generation: u64,
    /// The entry before, plus 1; 0 for the first entry of a prefix.
    before: u64,
}

/// The origin of each entry, from its addition on. A split changes no origin.
pub(super) struct Origins {
    of_entry: Vec<Origin>,
}

impl Origins {
    /// Creates the column for at most `page_count` pages; an empty one if cells have no events.
    pub fn new(page_count: u32, has_cells: bool, memory: &mut Memory) -> Result<Self, OutOfMemory> {
        let entries = if has_cells { EntryLists::entry_count(page_count) } else { 0 };
        Ok(Self { of_entry: memory.zeroed(entries.into())? })
    }

    /// Returns whether cells have events.
    pub fn are_kept(&self) -> bool {
        !self.of_entry.is_empty()
    }

    /// Records the origin of an entry that is added.
    pub fn set(&mut self, entry: u32, scope: Scope, before: Option<u32>) {
        let Scope { namespace, generation } = scope;
        let before = before.map_or(0, |entry| u64::from(entry) + 1);
        self.of_entry[entry as usize] = Origin { namespace: namespace.raw(), generation, before };
    }

    /// Returns the scope of an entry's prefix.
    pub fn scope(&self, entry: u32) -> Scope {
        let Origin { namespace, generation, .. } = self.of_entry[entry as usize];
        Scope { namespace: Namespace::new(namespace), generation }
    }

    /// Returns the entry before an entry.
    pub fn before(&self, entry: u32) -> Option<u32> {
        self.of_entry[entry as usize].before.checked_sub(1).map(|entry| entry as u32)
    }
}
