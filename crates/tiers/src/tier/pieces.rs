//! The bytes of a swap page that a group uses. Other bytes are stale, perhaps of another tenant, and are not stored.

use std::ops::Range;

use kvarena::id::PageId;
use kvarena::layout::PoolLayout;

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
        let lanes = layout.lanes_of(group);
        let state = layout.state().filter(|_| layout.groups().state_group() == Some(group));
        // Layers that share the pages of group 0 are in its records.
        let tracks = state.map_or(layout.tracks_of(group), |state| state.pages);
        let sharing = (1..layout.groups().count()).filter(|&other| group == 0 && layout.groups().shares_pages(other));
        let sharing: Vec<_> = sharing.map(|other| layout.of_group(other)).collect();
        let extra = layout.extra(PageId::new(0));
        let layers = if group == 0 { lanes } else { layout.groups().layers_of(group) };
        let view = layout.of_group(group);
        let of_track = |track: u32| {
            let used = u64::from(lanes.min(layers - track * lanes));
            let mut ranges: Vec<Range<usize>> = Vec::new();
            let mut add = |start: u64, bytes: u64| match ranges.last_mut() {
                Some(last) if last.end as u64 == start => last.end += bytes as usize,
                _ => ranges.push(start as usize..(start + bytes) as usize),
            };
            match state {
                Some(state) => add(0, used * state.lane_bytes),
                None => [(&view, used)]
                    .into_iter()
                    .chain(sharing.iter().map(|own| (own, own.lanes().into())))
                    .for_each(|(view, lanes)| {
                        for plane in view.planes() {
                            let strides = view.page_strides(plane.name).expect("the plane is the pool's");
                            add(strides.origin, lanes * strides.lane);
                        }
                    }),
            }
            if group == 0 && !extra.is_empty() {
                add(extra.start, extra.end - extra.start);
            }
            ranges
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

#[cfg(test)]
mod tests {
    use kvarena::layout::{Groups, Reach};
    use kvarena::{KvDtype, KvShape, PoolConfig};

    use super::*;

    /// A record of group 0 has a drafter's layers and the host's bytes, without the padding between them.
    #[test]
    fn layers_and_bytes_that_share_a_page_are_in_its_record() {
        let groups = Groups::new(&[Reach::All, Reach::All], &[0, 1]);
        let groups = groups.and_then(|groups| groups.with_shape(1, KvShape::heads(1, 3), None)).expect("two groups");
        let pool = PoolConfig { layers: 2, groups, extra_bytes: 5, page_size: 4, ..PoolConfig::default() };
        let layout = pool.layout().expect("a valid pool");
        let [all, own] = [0, 1].map(|group| Pieces::new(&layout, group));
        let of_layers = 4 * 2 * (64 + 3) * 4;
        assert_eq!((all.page_bytes, own.pages(), own.page_bytes), (of_layers + 5, 0, 0));
        let extra = layout.extra(PageId::new(0));
        assert_eq!(all.tracks[0].last(), Some(&(extra.start as usize..extra.end as usize)));
        assert!(!all.is_whole());
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
