//! [`Lookup`]: the records that the engine has of a prompt, and those that it lacks.

use crate::hash::{Hashing, Named, NamespaceNames, PageHash};
use crate::id::TokenId;
use crate::layout::Limits;

/// The records of a prompt that the engine has, for a search of the others in stores. It borrows nothing, so a thread
/// of a store can use it. [`Engine::lookup`](crate::Engine::lookup) creates it.
#[derive(Clone, Debug)]
pub struct Lookup {
    pub(crate) hashing: Hashing,
    pub(crate) named: Named,
    pub(crate) limits: Limits,
    pub(crate) page_size: u32,
    pub(crate) record_pages: u32,
    /// Maximum number of pages that the prompt can match.
    pub(crate) limit: u32,
    pub(crate) hit: u32,
    pub(crate) full: u32,
    /// For each place below `full`, bit `n` is set if group `n + 1` has a cell.
    pub(crate) cells: Vec<u8>,
}

impl Lookup {
    /// Returns the number of pages of the prompt that the engine hits.
    pub fn hit(&self) -> u32 {
        self.hit
    }

    /// Returns the number of pages of the prompt that group 0 has cached.
    pub fn full_pages(&self) -> u32 {
        self.full
    }

    /// Returns the names of the prompt's namespace.
    pub fn names(&self) -> &NamespaceNames {
        &self.named.names
    }

    /// Returns the hashes of the pages that the prompt can match. A record's key is the hash at its place. O(prompt).
    ///
    /// # Panics
    /// If `prompt` is shorter than the prompt of the lookup.
    pub fn keys(&self, prompt: &[TokenId]) -> Vec<PageHash> {
        let tokens = &prompt[..(self.limit * self.page_size) as usize];
        self.hashing.chain_of(&self.named, tokens, self.page_size)
    }

    /// Returns the group and the place of each record that could make the hit longer: those of group 0, then those of
    /// each other group, with rising places. O(pages that the prompt can match, for each group).
    pub fn wanted(&self) -> Vec<(u32, u32)> {
        let first = self.record_end(self.full) - 1;
        let mut wanted: Vec<_> = (first..self.limit).step_by(self.record_pages as usize).map(|at| (0, at)).collect();
        for index in 0..self.limits.count() as usize {
            let mut next = 0;
            for pages in self.hit + 1..=self.limit {
                let tail = self.limits.tails(pages).nth(index).expect("each group has tails");
                let places = tail.first.max(next)..pages;
                next = next.max(pages);
                wanted.extend(places.filter(|&at| !self.has(tail.group, at)).map(|at| (tail.group + 1, at)));
            }
        }
        wanted
    }

    /// Returns the number of pages of the longest prefix whose records the engine or a store has: at least
    /// [`Lookup::hit`]. `stored` returns whether a store has the record of a group at a place.
    /// [`Engine::fetch`](crate::Engine::fetch) takes a longer prefix than the hit. O(pages that the prompt can match,
    /// for each group).
    pub fn target(&self, mut stored: impl FnMut(u32, u32) -> bool) -> u32 {
        let mut end = self.full;
        while self.record_end(end) <= self.limit && stored(0, self.record_end(end) - 1) {
            end = self.record_end(end);
        }
        // For each group, all places from this one up to `end` have cells.
        let mut lows = [end; 3];
        'shorter: while end > self.hit {
            for tail in self.limits.tails(end) {
                let low = &mut lows[tail.group as usize];
                *low = end.min(*low);
                while *low > tail.first {
                    *low -= 1;
                    if !self.has(tail.group, *low) && !stored(tail.group + 1, *low) {
                        end = *low;
                        continue 'shorter;
                    }
                }
            }
            return end;
        }
        self.hit
    }

    /// Returns the end of the record of group 0 that has a place.
    fn record_end(&self, place: u32) -> u32 {
        (place / self.record_pages + 1) * self.record_pages
    }

    fn has(&self, group: u32, place: u32) -> bool {
        self.cells.get(place as usize).is_some_and(|cells| cells >> group & 1 > 0)
    }
}
