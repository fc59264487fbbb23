//! The places that a sequence keeps in the groups of limited reach, and their maximum number. A place is an index in a
//! page table.
//!
//! A sequence with `m` published pages computes tokens from position `m * page_size` on, and a rollback cannot cut
//! below this position. In each group the sequence therefore keeps the pages that the token at this position reads, and
//! all later pages.

use super::groups::{GROUPS_MAX, Reach};
use super::pool::PoolLayout;

/// A group other than group 0 that has page tables.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limit {
    reach: Reach,
    /// Index of the group, minus 1.
    group: u32,
    /// Number of page tables of the group.
    pub tracks: u32,
    /// Maximum number of places that a sequence keeps, if its plans stay within the config's `promise_ahead`.
    most: u32,
}

/// The group that keeps a state.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StateLimit {
    /// Index of the group, minus 1.
    pub group: u32,
    /// Number of pages of a state.
    pub pages: u32,
    /// Number of states that a sequence may use at a time: the one that a step reads, and the one that it writes.
    most: u32,
}

/// The places that a sequence keeps in a group other than group 0: all from `first` on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HeldGroup {
    /// Index of the group, minus 1.
    pub group: u32,
    /// Index of the group's first page table; without meaning for a state.
    pub track: u32,
    /// Number of page tables of the group, or of pages of a state.
    pub tracks: u32,
    /// The first kept place.
    pub first: u32,
}

impl HeldGroup {
    /// Returns the maximum number of the group's cells in a tree of `pages` pages.
    pub fn cells_in(&self, pages: u64) -> u64 {
        pages / u64::from(self.tracks)
    }
}

/// All groups other than group 0.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    page_size: u32,
    /// Number of groups in `list`.
    count: u32,
    list: [Limit; GROUPS_MAX - 1],
    state: Option<StateLimit>,
}

impl Limits {
    /// Limits of a pool with one group.
    pub const NONE: Self = Self {
        page_size: 1,
        count: 0,
        list: [Limit { reach: Reach::All, group: 0, tracks: 0, most: 0 }; 3],
        state: None,
    };

    /// Creates the limits of a pool whose plans are at most `ahead` tokens ahead of the published ones. If states are
    /// cached (`are_cached`), a step may read a state that is not the sequence's own.
    pub fn new(layout: &PoolLayout, ahead: u32, are_cached: bool) -> Self {
        let page_size = layout.page_size();
        let mut limits = Self { page_size, ..Self::NONE };
        for (group, reach) in layout.groups().limited() {
            let (Reach::Window(size) | Reach::Chunk(size)) = reach else { unreachable!("it is limited") };
            let span = u64::from(size - 1) + u64::from(ahead);
            let most = span.div_ceil(page_size.into()) + 1;
            let most = u32::try_from(most).unwrap_or(u32::MAX);
            let tracks = layout.tracks_of(group);
            limits.list[limits.count as usize] = Limit { reach, group: group - 1, tracks, most };
            limits.count += 1;
        }
        limits.state = layout.groups().state_group().map(|group| StateLimit {
            group: group - 1,
            pages: layout.state_pages(),
            most: if are_cached { 2 } else { 1 },
        });
        limits
    }

    pub fn is_none(&self) -> bool {
        self.count == 0 && self.state.is_none()
    }

    /// Returns the group that keeps a state.
    pub fn state(&self) -> Option<StateLimit> {
        self.state
    }

    /// Returns the number of pages of a state; 0 if no group keeps one.
    pub fn state_pages(&self) -> u32 {
        self.state.map_or(0, |state| state.pages)
    }

    fn groups(&self) -> &[Limit] {
        &self.list[..self.count as usize]
    }

    /// Returns the first place that a sequence with `published` published pages keeps in a group.
    fn first_of(&self, limit: &Limit, published: u32) -> u32 {
        limit.reach.first(published * self.page_size) / self.page_size
    }

    /// Returns the places that a sequence with `published` published pages keeps in each group with page tables other
    /// than group 0.
    pub fn held_groups(&self, published: u32) -> impl Iterator<Item = HeldGroup> + use<'_> {
        let mut track = 1;
        self.groups().iter().map(move |limit| {
            let Limit { group, tracks, .. } = *limit;
            let held = HeldGroup { group, track, tracks, first: self.first_of(limit, published) };
            track += limit.tracks;
            held
        })
    }

    /// Returns the tails of a prefix of `pages` pages: for each group other than group 0, the places of the cells that
    /// the next token reads. The state comes last.
    pub fn tails(&self, pages: u32) -> impl Iterator<Item = HeldGroup> + use<'_> {
        let state = self.state.map(|StateLimit { group, pages: tracks, .. }| {
            let first = pages.saturating_sub(1); // The state behind the last page.
            HeldGroup { group, track: 0, tracks, first }
        });
        self.held_groups(pages).chain(state)
    }

    /// Returns the number of groups other than group 0.
    pub fn count(&self) -> u32 {
        self.count + u32::from(self.state.is_some())
    }

    /// Returns each track after the first, with the first place that a sequence with `published` published pages keeps
    /// in it.
    pub fn tracks(&self, published: u32) -> impl Iterator<Item = (u32, u32)> + use<'_> {
        let firsts = self.groups().iter().flat_map(move |limit| {
            let first = self.first_of(limit, published);
            (0..limit.tracks).map(move |_| first)
        });
        (1..).zip(firsts)
    }

    /// Returns the first place that a sequence with `published` published pages keeps in a track.
    pub fn first_place(&self, track: u32, published: u32) -> u32 {
        let mut tracks = self.tracks(published);
        tracks.find(|&(other, _)| other == track).map_or(0, |(_, first)| first)
    }

    /// Returns the number of pages of all tracks from place `start` on that a sequence of `page_len` places keeps; at
    /// most `u32::MAX`.
    pub fn held(&self, start: u32, page_len: u32, published: u32) -> u32 {
        let from = |first: u32| page_len - start.max(first).min(page_len);
        let limited = self.groups().iter().map(|limit| {
            let first = self.first_of(limit, published);
            u64::from(limit.tracks) * u64::from(from(first))
        });
        saturated(u64::from(from(0)) + limited.sum::<u64>())
    }

    /// Returns the maximum number of pages in all tracks that a sequence of `places` places keeps.
    pub fn most(&self, places: u32) -> u64 {
        let pages = |limit: &Limit| u64::from(limit.tracks) * u64::from(places.min(limit.most));
        let state = self.state.map_or(0, |state| u64::from(state.most) * u64::from(state.pages));
        u64::from(places) + self.groups().iter().map(pages).sum::<u64>() + if places > 0 { state } else { 0 }
    }

    /// Returns the number of pages that a sequence lacks for `promised` places, over all groups with page tables.
    /// Places below `kept` have cells. Their pages count as lacking, because a cell that the sequence gives back may
    /// stay in use. At most `u32::MAX`, which is more than any pool has.
    pub fn outstanding(&self, promised: u32, page_len: u32, published: u32, kept: u32) -> u32 {
        let limited = self.groups().iter().map(|limit| {
            let held = page_len - self.first_of(limit, published).max(kept);
            u64::from(limit.tracks) * u64::from(promised.min(limit.most).saturating_sub(held))
        });
        saturated(u64::from(promised.saturating_sub(page_len)) + limited.sum::<u64>())
    }
}

/// Returns a number of pages; `u32::MAX` for more.
pub(crate) fn saturated(pages: u64) -> u32 {
    u32::try_from(pages).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::{Limits, Reach};
    use crate::layout::{Groups, PoolConfig};

    #[test]
    fn no_sequence_holds_more_than_is_promised() {
        for (page_size, reach) in [1, 3, 16].into_iter().flat_map(|size| {
            [Reach::Window(1), Reach::Window(5), Reach::Window(32), Reach::Chunk(1), Reach::Chunk(16)]
                .map(|reach| (size, reach))
        }) {
            let groups = Groups::new(&[Reach::All, reach], &[1, 0, 1]).expect("both have layers");
            let config = PoolConfig { layers: 3, groups, page_size, ..PoolConfig::default() };
            let layout = config.layout().expect("a small pool");
            for ahead in [1, 7, 40] {
                let limits = Limits::new(&layout, ahead, true);
                for (published, more) in (0..60).flat_map(|m| (0..=ahead).map(move |more| (m, more))) {
                    let page_len = (published * page_size + more).div_ceil(page_size);
                    // All places that the next token reads, and all later ones.
                    let first = reach.first(published * page_size) / page_size;
                    let held = page_len + 2 * (page_len - first);
                    assert_eq!(limits.held(0, page_len, published), held);
                    let most = limits.most(page_len);
                    assert!(u64::from(held) <= most, "{reach:?} {published} {more}");
                    let outstanding = limits.outstanding(page_len, page_len, published, 0);
                    assert_eq!(outstanding, most as u32 - held);
                    assert_eq!(limits.first_place(2, published), first);
                }
            }
        }
    }
}
