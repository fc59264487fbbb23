//! Pools of made-up planes against plain enumeration: what shapes to come will ask of the arithmetic.

use super::{
    Capacity, KvDtype, KvShape, Layout, Plane, PlaneName, PlaneOrder, PoolConfig, PoolLayout,
};
use crate::id::{LayerId, PageId};
use crate::testkit::rng::Rng;

fn plane(name: PlaneName, heads: u32, elements: u32, dtype: KvDtype, order: PlaneOrder) -> Plane {
    Plane { name, heads, elements, dtype, order }
}

/// Sets of planes, and the bytes that their pieces are multiples of.
fn sets(rng: &mut Rng) -> [(Vec<Plane>, u64); 4] {
    use PlaneName::{K, Spare, V};
    use PlaneOrder::{ByPage, BySlot};
    let (heads, dim) = (rng.within(1, 3) as u32, rng.within(1, 7) as u32);
    let (f16, f32) = (KvDtype::F16, KvDtype::F32);
    let [k, v] = [K, V].map(|name| plane(name, heads, dim, f16, BySlot));
    [
        // K and V with a number for each token and head beside them, padded.
        (vec![k, v, plane(Spare, heads, 1, f32, ByPage)], 16),
        // The same before them.
        (vec![plane(Spare, heads, 1, f32, ByPage), k, v], 16),
        // Some wider numbers of each token beside K, not padded but aligned.
        (vec![k, plane(Spare, 1, dim + 1, f32, BySlot)], 4),
        // One row for all heads.
        (vec![plane(K, 1, dim + 2, f16, BySlot)], 2),
    ]
}

/// Small pools, with the bytes that their pieces are multiples of.
fn pools() -> Vec<(PoolLayout, u64)> {
    let mut rng = Rng::new(1);
    let mut pools = Vec::new();
    for _ in 0..50 {
        for (planes, align) in sets(&mut rng) {
            for layout in [Layout::LayerFirst, Layout::PageFirst] {
                let config = PoolConfig {
                    layers: rng.within(1, 3) as u32,
                    page_size: rng.within(1, 5) as u32,
                    capacity: Capacity::Pages(rng.within(1, 4) as u32),
                    layout,
                    ..PoolConfig::default()
                };
                pools.push((config.layout_with(&planes).expect("a valid pool"), align));
            }
        }
    }
    pools
}

/// Calls `each` for every plane, layer and page in the physical order that the docs give.
fn pieces(pool: &PoolLayout, mut each: impl FnMut(&Plane, LayerId, PageId)) {
    let (layers, pages) = (0..pool.layers(), 0..pool.page_count());
    let (layers, pages) = (layers.map(LayerId::new), pages.map(PageId::new));
    let rows = pool.planes().iter();
    let rows = rows.flat_map(|&plane| layers.clone().map(move |layer| (plane, layer)));
    let rows: Vec<_> = rows.collect();
    match pool.layout() {
        Layout::LayerFirst => {
            for (plane, layer) in rows {
                pages.clone().for_each(|page| each(&plane, layer, page));
            }
        }
        Layout::PageFirst => {
            for page in pages {
                rows.iter().for_each(|(plane, layer)| each(plane, *layer, page));
            }
        }
    }
}

/// `(slot, head)` of a piece in the order in which they lie.
fn rows_of(plane: &Plane, page_size: u32) -> Vec<(u32, u32)> {
    let (slots, heads) = (0..page_size, 0..plane.heads);
    match plane.order {
        PlaneOrder::BySlot => {
            slots.flat_map(|slot| heads.clone().map(move |head| (slot, head))).collect()
        }
        PlaneOrder::ByPage => {
            heads.flat_map(|head| slots.clone().map(move |slot| (slot, head))).collect()
        }
    }
}

#[test]
fn every_head_has_the_offset_of_its_place_in_the_physical_order() {
    for (pool, align) in pools() {
        let mut next = 0;
        pieces(&pool, |plane, layer, page| {
            let strides = pool.strides(plane.name).expect("the pool has it");
            let head_bytes = u64::from(plane.elements * plane.dtype.size());
            let start = next;
            for (slot, head) in rows_of(plane, pool.page_size()) {
                let at = strides.row(layer, page, slot) + u64::from(head) * strides.head;
                assert_eq!(at, next, "{pool:?} {plane:?} {layer:?} {page:?} {slot} {head}");
                assert!(at.is_multiple_of(plane.dtype.size().into()), "{pool:?} {plane:?}");
                next += head_bytes;
            }
            next = next.next_multiple_of(align);
            assert_eq!(next - start, pool.piece_bytes(plane), "{pool:?} {plane:?}");
        });
        assert_eq!(next, pool.total_bytes(), "{pool:?}");
        assert_eq!(pool.page_bytes() * u64::from(pool.page_count()), pool.total_bytes());
    }
}

#[test]
fn pieces_tile_the_pool_and_are_each_page_in_one_order() {
    for (pool, _) in pools() {
        let mut owner = vec![None; pool.total_bytes() as usize];
        for page in (0..pool.page_count()).map(PageId::new) {
            // Where each byte of the page, as it is read out, lies in the pool.
            let page_bytes: Vec<u64> =
                (0..pool.pieces_per_page()).flat_map(|piece| pool.piece(page, piece)).collect();
            assert_eq!(page_bytes.len() as u64, pool.page_bytes(), "{pool:?}");
            for &byte in &page_bytes {
                assert_eq!(owner[byte as usize].replace(page), None, "{pool:?} {page:?} {byte}");
            }
            for plane in pool.planes() {
                let [there, here] = [pool.strides(plane.name), pool.page_strides(plane.name)]
                    .map(|strides| strides.expect("the pool has it"));
                for layer in (0..pool.layers()).map(LayerId::new) {
                    for (slot, head) in rows_of(plane, pool.page_size()) {
                        let in_pool = there.row(layer, page, slot) + there.head * u64::from(head);
                        let in_page =
                            here.row(layer, PageId::new(0), slot) + here.head * u64::from(head);
                        assert_eq!(page_bytes[in_page as usize], in_pool, "{pool:?} {plane:?}");
                    }
                }
            }
        }
        assert!(owner.iter().all(Option::is_some), "{pool:?}");
    }
}

#[test]
fn rows_are_of_planes_by_slot_that_the_pool_has() {
    for (pool, _) in pools() {
        for name in [PlaneName::K, PlaneName::V, PlaneName::Spare] {
            let plane = pool.planes().iter().find(|plane| plane.name == name);
            assert_eq!(pool.strides(name).is_some(), plane.is_some(), "{pool:?}");
            let by_slot = plane.filter(|plane| plane.order == PlaneOrder::BySlot);
            let slot = pool.slot(PageId::new(pool.page_count() - 1), pool.page_size() - 1);
            let row = pool.row(name, LayerId::new(pool.layers() - 1), slot);
            let bytes = by_slot.map(|plane| plane.heads * plane.elements * plane.dtype.size());
            assert_eq!(row.map(|row| row.end - row.start), bytes.map(u64::from), "{pool:?}");
        }
    }
}

#[test]
fn padding_counts_in_a_page_and_not_in_a_token() {
    let heads = KvShape::heads(2, 3);
    let config = PoolConfig { layers: 5, shape: heads, page_size: 3, ..PoolConfig::default() };
    let k = config.layout().expect("a valid pool").planes()[0];
    let scale = plane(PlaneName::Spare, 2, 1, KvDtype::F32, PlaneOrder::ByPage);
    // A piece of K is 3 * 2 * 3 * 4 = 72 bytes and takes 80; one of the other is 3 * 2 * 4 = 24 and takes 32.
    let page_bytes = 5 * (80 + 32);
    let capacity = Capacity::Bytes(2 * page_bytes - 1);
    let pool = PoolConfig { capacity, ..config }.layout_with(&[k, scale]).expect("a page fits");
    assert_eq!((pool.page_bytes(), pool.page_count()), (page_bytes, 1));
    assert_eq!(config.bytes_per_token(), Ok(5 * 2 * 2 * 3 * 4));
}
