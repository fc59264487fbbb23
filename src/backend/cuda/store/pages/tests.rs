//! Compares the groups of pieces with the byte ranges of the layout. These tests launch nothing.

use super::*;
use crate::backend::cuda::store::memory::own_pieces;
use crate::id::PageId;
use crate::layout::{Capacity, KvShape, Layout, PoolConfig};
use crate::testkit::contract::with_spare_plane;

const ADDRESS: u64 = 1 << 20;

fn pages_of(layout: &PoolLayout) -> Pages {
    Pages::new(&own_pieces(ADDRESS, layout), layout)
}

fn config(layout: Layout, pages: u32) -> PoolConfig {
    let (shape, capacity) = (KvShape::heads(2, 3), Capacity::Pages(pages));
    PoolConfig { layers: 3, shape, page_size: 5, capacity, layout, ..PoolConfig::default() }
}

/// Returns the byte ranges of a page's pieces, in order.
fn ranges(pages: &Pages, page: u64) -> Vec<(u64, u64)> {
    let group = |group: &Pieces| {
        let Pieces { address, page_stride, piece_stride, piece_bytes, count, .. } = *group;
        let start = move |i: u32| address + page * page_stride + u64::from(i) * piece_stride;
        (0..count).map(move |i| (start(i), start(i) + piece_bytes))
    };
    pages.groups().iter().flat_map(group).collect()
}

/// Merges adjacent ranges.
fn joined(ranges: impl IntoIterator<Item = (u64, u64)>) -> Vec<(u64, u64)> {
    let mut joined: Vec<(u64, u64)> = Vec::new();
    for (start, end) in ranges {
        match joined.last_mut() {
            Some(last) if last.1 == start => last.1 = end,
            _ => joined.push((start, end)),
        }
    }
    joined
}

#[test]
fn k_and_v_are_one_group_and_a_plane_of_another_size_is_another() {
    for (layout, pages) in [Layout::LayerFirst, Layout::PageFirst].into_iter().flat_map(|l| [(l, 1), (l, 4)]) {
        let config = config(layout, pages);
        let plain = config.layout().expect("a valid pool");
        for (pool, groups) in [(plain, 1), (with_spare_plane(&config), 2)] {
            let all = pages_of(&pool);
            assert_eq!(all.groups().len(), groups, "{pool:?}");
            assert_eq!(all.page_bytes(), pool.page_bytes());
            for page in 0..pages {
                let piece = |piece| pool.piece(PageId::new(page), piece);
                let wanted = (0..pool.pieces_per_page()).map(piece);
                let wanted = wanted.map(|piece| (ADDRESS + piece.start, ADDRESS + piece.end));
                assert_eq!(joined(ranges(&all, page.into())), joined(wanted), "{pool:?}");
            }
            let packed = layout == Layout::PageFirst || pages == 1;
            assert_eq!(all.is_packed(), packed, "{pool:?}");
            assert_eq!(all.planes(), pool.planes().len() as u32);
            // The parts for lanes 0 and 1..3 together have all pieces of the page. In a page they are ordered by plane,
            // then by lane.
            let parts = [0..1, 1..3].map(|lanes| ranges(&all.part(lanes), 1));
            let planes = parts[0].chunks(1).zip(parts[1].chunks(2));
            let joined: Vec<_> = planes.flat_map(|(one, two)| [one, two].concat()).collect();
            assert_eq!(joined, ranges(&all, 1));
        }
    }
}

#[test]
fn packed_pages_follow_one_another() {
    let pool = with_spare_plane(&config(Layout::LayerFirst, 4));
    let like = pages_of(&pool);
    let packed = Pages::packed(2 * ADDRESS, &like, 9);
    assert!(packed.is_packed() && packed.is_like(&like) && packed.count == 9);
    let bytes = pool.page_bytes();
    for page in 0..9 {
        let start = 2 * ADDRESS + page * bytes;
        assert_eq!(joined(ranges(&packed, page)), [(start, start + bytes)]);
    }
    let whole = packed.whole();
    assert_eq!((whole.address, whole.page_stride, whole.count), (2 * ADDRESS, bytes, 1));
    let plain = config(Layout::LayerFirst, 4).layout().expect("a valid pool");
    assert!(!like.is_like(&pages_of(&plain)));
}
