//! States in the model of tiers: the marks of a request, and the cells that its steps read and leave.

use std::collections::BTreeMap;

use super::{Served, Setting, Tiers};
use crate::layout::Reach;

impl Tiers {
    /// Returns the group that keeps a state.
    pub(super) fn state(&self) -> Option<usize> {
        self.setting.groups.iter().position(|&(reach, _)| reach == Reach::State)
    }

    /// Returns the groups after group 0 that store K and V.
    pub(super) fn limited(&self) -> Vec<usize> {
        (1..self.setting.groups.len()).filter(|&group| self.state() != Some(group)).collect()
    }

    /// Returns the marks of a request, and whether its state near the prompt's end supersedes the one that it hits.
    pub(super) fn marks(
        &self,
        path: &[u64],
        [hit, full, limit]: [usize; 3],
        prompt_len: usize,
    ) -> (BTreeMap<usize, bool>, bool) {
        let Setting { page_size, state_margin, state_gap, keep_used_states, .. } = self.setting;
        if self.state().is_none() {
            return (BTreeMap::from([(full, false), (limit, false)]), false);
        }
        let mut marks = BTreeMap::new();
        let end = (prompt_len - 1).saturating_sub(state_margin) / page_size;
        let ends = end > hit && (hit == 0 || (end - hit) * page_size >= state_gap);
        if ends {
            marks.insert(end, false);
        }
        let follows = |before: u64| self.names.iter().any(|((parent, _), name)| *parent == before && self.has(*name));
        if full > hit && follows(path[full - 1]) {
            marks.insert(full, true);
        }
        (marks, ends && !keep_used_states)
    }

    /// Returns whether a page of group 0 is cached.
    pub(super) fn has(&self, name: u64) -> bool {
        self.items.contains_key(&(0, name))
    }

    /// Leaves the cell that the step has read. At a mark, the request's state becomes a cell that the next step reads.
    pub(super) fn keep_state(&mut self, request: &mut Served, stored: usize) {
        let Some(group) = self.state() else { return };
        if let Some(read) = request.reads.take() {
            self.release(&(group, read));
            if request.supersedes && !self.junctions.contains(&read) {
                self.past -= 1;
                self.items.get_mut(&(group, read)).expect("just left").since = self.past;
            }
        }
        request.supersedes = false;
        let mark = stored / self.setting.page_size;
        let Some(is_junction) = request.marks.get(&mark).filter(|_| stored == mark * self.setting.page_size) else {
            return;
        };
        let name = request.path[mark - 1];
        if *is_junction {
            self.junctions.insert(name);
        }
        request.own.insert((group, mark - 1));
        self.publish(request, group, mark - 1..mark);
        (request.has_state, request.reads) = (false, Some(name));
    }
}
