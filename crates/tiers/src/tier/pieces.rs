//! The bytes of a swap page that a group uses. Other bytes are stale, perhaps of another tenant, and are not stored.

use std::ops::Range;

use kvarena::id::PageId;
use kvarena::layout::{Plane, PoolLayout};

/// The used bytes of the pages of a group.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Pieces {
    /// Number of bytes of a page in a record: the most that a page of the group uses.
    pub page_bytes: usize,
    /// The used ranges of the page of each track, in order. Group 0 has one.
    tracks: Vec<Vec<Range<usize>>>,
    is_whole: bool,
}

impl Pieces {
    pub fn new(layout: &PoolLayout, group: u32) -> Self {
        let (lanes, groups) = (layout.lanes_of(group), layout.groups());
        let state = layout.state().filter(|_| groups.state_group() == Some(group));
        let tracks = state.map_or(layout.tracks_of(group), |state| state.pages);
        let layers = if group == 0 { lanes } else { groups.layers_of(group) };
        let of_track = |track: u32| {
            let used = lanes.min(layers - track * lanes);
            let mut ranges = match state {
                Some(state) => std::iter::once(0..u64::from(used) * state.lane_bytes).collect(),
                None => planes(layout, group, used),
            };
            if group == 0 {
                // Other groups and the host use further bytes of these pages.
                let others = (1..groups.count()).filter(|&other| groups.shares_pages(other));
                ranges.extend(others.flat_map(|other| planes(layout, other, layout.lanes_of(other))));
                ranges.push(layout.extra(PageId::new(0)));
            }
            merge(ranges)
        };
        let tracks: Vec<_> = (0..tracks).map(of_track).collect();
        let page_bytes = tracks.iter().map(|ranges| ranges.iter().map(Range::len).sum()).max().unwrap_or(0);
        let whole = 0..layout.page_bytes() as usize;
        let is_whole = tracks.iter().all(|ranges| ranges.len() == 1 && ranges[0] == whole);
        Self { page_bytes, tracks, is_whole }
    }

    /// Returns whether every page of a record is a whole swap page.
    pub fn is_whole(&self) -> bool {
        self.is_whole
    }

    /// Returns the number of pages of a cell.
    pub fn pages(&self) -> usize {
        self.tracks.len()
    }

    /// Copies the used bytes of a swap page, the page `index` of a record; the rest of the result is zeros.
    pub fn gather(&self, index: usize, page: &[u8]) -> Vec<u8> {
        let mut used = Vec::with_capacity(self.page_bytes);
        self.track(index).iter().for_each(|range| used.extend_from_slice(&page[range.clone()]));
        used.resize(self.page_bytes, 0);
        used
    }

    /// Copies the used bytes back.
    pub fn scatter(&self, index: usize, mut used: &[u8], page: &mut [u8]) {
        for range in self.track(index) {
            page[range.clone()].copy_from_slice(used.split_off(..range.len()).expect("the page is long enough"));
        }
    }

    /// All pages of group 0 have one track; a cell has a page for each track.
    fn track(&self, index: usize) -> &[Range<usize>] {
        &self.tracks[index.min(self.tracks.len() - 1)]
    }
}

/// Returns the bytes of the first lanes of a group in each plane.
fn planes(layout: &PoolLayout, group: u32, lanes: u32) -> Vec<Range<u64>> {
    let view = layout.of_group(group);
    let of_plane = |plane: &Plane| {
        let strides = view.page_strides(plane.name).expect("the plane is the pool's");
        strides.origin..strides.origin + u64::from(lanes) * strides.lane
    };
    view.planes().iter().map(of_plane).collect()
}

/// Joins ranges that touch.
fn merge(mut ranges: Vec<Range<u64>>) -> Vec<Range<usize>> {
    ranges.sort_by_key(|range| range.start);
    let mut merged: Vec<Range<usize>> = Vec::new();
    for range in ranges.into_iter().filter(|range| !range.is_empty()) {
        let range = range.start as usize..range.end as usize;
        match merged.last_mut() {
            Some(last) if last.end == range.start => last.end = range.end,
            _ => merged.push(range),
        }
    }
    merged
}

#[cfg(test)]
mod tests {
    use kvarena::layout::{Groups, Reach};
    use kvarena::{KvDtype, KvShape, PoolConfig};

    use super::*;

    #[test]
    fn pages_contain_the_layers_that_share_them_and_the_bytes_of_the_host() {
        let reaches = [Reach::All, Reach::Window(8), Reach::All];
        let groups = Groups::new(&reaches, &[0, 1, 0, 2]).expect("valid groups");
        let (shape, dtype) = (KvShape::heads(2, 8), KvDtype::F32);
        let pool = PoolConfig { layers: 4, groups, shape, dtype, page_size: 4, ..PoolConfig::default() };
        let layout = PoolConfig { extra_bytes: 40, ..pool }.layout().expect("a valid pool");
        let lane = 4 * 2 * 8 * 4;
        // Two layers of group 0 and one of group 2, K and V each, and the host's bytes.
        assert_eq!(Pieces::new(&layout, 0).page_bytes, 6 * lane + 40);
        assert_eq!(Pieces::new(&layout, 1).page_bytes, 2 * lane);
        assert_eq!(Pieces::new(&layout, 2).pages(), 0);
    }

    #[test]
    fn stale_lanes_are_left_out() {
        // Two layers read all, five a window: tracks of 2, 2 and 1 layers.
        let groups = Groups::new(&[Reach::All, Reach::Window(8)], &[0, 1, 1, 1, 0, 1, 1]).expect("valid groups");
        let (shape, dtype) = (KvShape::heads(2, 8), KvDtype::F32);
        let pool = PoolConfig { layers: 7, groups, shape, dtype, page_size: 4, ..PoolConfig::default() };
        let layout = pool.layout().expect("a valid pool");
        let [all, window] = [0, 1].map(|group| Pieces::new(&layout, group));
        let (page_bytes, lane) = (layout.page_bytes() as usize, 4 * 2 * 8 * 4);
        assert_eq!((all.page_bytes, all.is_whole()), (page_bytes, true));
        assert_eq!((window.page_bytes, window.is_whole(), window.tracks.len()), (page_bytes, false, 3));
        assert_eq!(window.tracks[2], [0..lane, 2 * lane..3 * lane]);
        let page: Vec<u8> = (0..page_bytes).map(|at| (at % 251) as u8).collect();
        let used = window.gather(2, &page);
        assert!(used[2 * lane..].iter().all(|&byte| byte == 0));
        let mut back = vec![99; page_bytes];
        window.scatter(2, &used, &mut back);
        let expected: Vec<_> = (0..page_bytes).map(|at| if at / lane % 2 == 0 { page[at] } else { 99 }).collect();
        assert_eq!(back, expected);
    }
}
