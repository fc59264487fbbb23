//! Cells of the tree and of the model. A lock uses the cells of the tails at the end of its pages, creates missing
//! cells, and releases its cells.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};

use super::{Both, Held, Kept};
use crate::id::{CellId, StepId};
use crate::testkit::model::{CellHeld, CellKey};
use crate::testkit::replay::agree;

/// The cells that a lock uses, by their keys in the model.
pub(super) type Cells = BTreeMap<CellKey, CellId>;

impl Both {
    /// Counts one more user of a cell.
    pub(super) fn acquire_cell(&mut self, key: &CellKey, cell: CellId) {
        self.tree.acquire_cell(cell, &mut self.fence);
        self.model.acquire_cell(key);
    }

    /// Returns the cells of the tails of a match that is not stale. The caller must not have locked the match yet,
    /// because the lock may split a node.
    pub(super) fn tail_cells(&self, kept: &Kept) -> Result<Cells, String> {
        let Kept { found, scope, tokens, .. } = kept;
        let mut keys = self.model.tail_cells(*scope, tokens, found.pages() as usize);
        // The tree visits the cells of a group from last to first.
        keys.sort_by_key(|(group, path)| (*group, Reverse(path.2.len())));
        let cells: Vec<_> = self.tree.tails(found.end(), found.pages()).collect();
        agree("cells of a match", &cells.len(), &keys.len())?;
        for (key, cell) in keys.iter().zip(&cells) {
            let pages = &self.model.cells[key].pages;
            agree("pages of a cell", &self.tree.cells().pages(*cell), &pages.as_slice())?;
        }
        Ok(keys.into_iter().zip(cells).collect())
    }

    /// Uses the cells of the tails at the end of a lock's pages, and creates missing cells while enough pages are free.
    pub(super) fn keep(&mut self, index: usize) -> Result<(), String> {
        let Held { scope, ref tokens, .. } = self.held[index];
        let pages = tokens.len() / self.config.page_size as usize;
        for key in self.model.tail_cells(scope, tokens, pages) {
            let Held { lock, cells, .. } = &self.held[index];
            if cells.contains_key(&key) {
                continue;
            }
            let (group, place) = (key.0, key.1.2.len() / self.config.page_size as usize - 1);
            let nodes = self.tree.nodes();
            let mut path = nodes.path_of(lock, pages as u32);
            let entry = nodes.entry_at(&mut path, place as u32);
            let cell = self.tree.cells().at(group as u32, entry);
            agree("a cell", &cell.is_some(), &self.model.cells.contains_key(&key))?;
            if cell.is_some() {
                self.acquire_cell(&key, cell);
                self.held[index].cells.insert(key, cell);
                continue;
            }
            let Some(rest) = self.free.len().checked_sub(self.model.limited[group].1.len()) else {
                return Ok(());
            };
            let own = self.free.split_off(rest);
            let cell = self.tree.cells_mut().create(group as u32, entry, own.iter().copied());
            let held = CellHeld { pages: own, swap_pages: Vec::new(), users: 1, waits: Vec::new(), since: 0 };
            self.model.cells.insert(key.clone(), held);
            self.held[index].cells.insert(key, cell);
        }
        Ok(())
    }

    /// Releases the cells that a lock uses. The cells wait for `step`. Step 0 is always complete.
    pub(super) fn release_cells(&mut self, index: usize, step: StepId) {
        let held = &mut self.held[index];
        held.last_step = held.last_step.max(step);
        for (key, cell) in std::mem::take(&mut held.cells) {
            self.tree.release_cell(cell, step, &mut self.fence);
            self.model.release_cell(&key, step.raw(), self.completed);
        }
    }

    /// Compares the counts of cells, and audits them.
    pub(super) fn compare_cells(&self) -> Result<(), String> {
        let cells = (self.model.cells.len() as u32, self.model.evicted.1);
        let counts = self.tree.has_cells().then(|| self.tree.cells().counts());
        agree("cells, and evicted ones", &counts.unwrap_or_default(), &cells)?;
        let mut named = HashMap::new();
        for cell in self.held.iter().flat_map(|held| held.cells.values()) {
            *named.entry(*cell).or_default() += 1;
        }
        let broken = self.tree.check_cells(&named, &self.fence);
        broken.map_err(|broken| format!("{broken:?}"))
    }
}
