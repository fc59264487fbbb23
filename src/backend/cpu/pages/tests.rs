//! Tests of pages with more planes than K and V, and pieces of different sizes.

use super::*;
use crate::backend::{Backend, CpuOptions, OpenBackend};
use crate::layout::{Capacity, KvShape, Layout, PoolConfig, TableShape};
use crate::plan::PageCopy;
use crate::testkit::contract::with_spare_plane;
use crate::testkit::rng::Rng;

const PAGES: u32 = 6;

/// Returns a pool with random bytes, and the bytes of each page.
fn filled(layout: Layout, seed: u64) -> (Cpu, Vec<Vec<u8>>) {
    let shape = KvShape::heads(2, 3);
    let capacity = Capacity::Pages(PAGES);
    let config = PoolConfig { layers: 3, shape, page_size: 5, capacity, layout, ..PoolConfig::default() };
    let layout = with_spare_plane(&config);
    let table = TableShape::new(5, 1, 10, 10).expect("a small table");
    let mut cpu = CpuOptions::with_threads(1).open(&layout, &table, 1).expect("a small pool");
    let mut rng = Rng::new(seed);
    let mut bytes = || (0..layout.page_bytes()).map(|_| rng.bits() as u8).collect();
    let pages: Vec<Vec<u8>> = (0..PAGES).map(|_| bytes()).collect();
    for (page, bytes) in (0..).map(PageId::new).zip(&pages) {
        cpu.write_page(page, bytes).expect("a page of the pool");
    }
    (cpu, pages)
}

fn read(cpu: &Cpu, page: u32) -> Vec<u8> {
    let mut bytes = vec![0; cpu.layout().page_bytes() as usize];
    cpu.read_page(PageId::new(page), &mut bytes).expect("a page of the pool");
    bytes
}

#[test]
fn pages_move_between_pools_of_either_layout_and_inside_one() {
    for from in [Layout::LayerFirst, Layout::PageFirst] {
        for to in [Layout::LayerFirst, Layout::PageFirst] {
            let ((source, sources), (mut target, mut targets)) = (filled(from, 1), filled(to, 2));
            for (i, j) in [(0, 5), (4, 0), (3, 3)] {
                target.write_page(PageId::new(j), &read(&source, i)).expect("a page of the pool");
                targets[j as usize].clone_from(&sources[i as usize]);
            }
            let copy = PageCopy { source: PageId::new(3), target: PageId::new(2) };
            target.copy_pages(&[copy]).expect("pages of the pool");
            targets[2] = targets[3].clone();
            for page in 0..PAGES {
                assert_eq!(read(&target, page), targets[page as usize], "{from:?} {to:?} {page}");
                let pieces = 0..target.layout().pieces_per_page();
                let piece = |piece| target.page_piece(PageId::new(page), piece).expect("a piece");
                assert_eq!(pieces.map(piece).collect::<Vec<_>>().concat(), read(&target, page));
            }
        }
    }
}

#[test]
fn a_slot_is_read_from_planes_by_slot() {
    let (cpu, pages) = filled(Layout::LayerFirst, 3);
    let (layer, slot) = (LayerId::new(1), SlotId::new(7));
    let Ok(Elements::F32(v)) = cpu.slot(PlaneName::V, layer, slot) else { panic!("no row of V") };
    // A page has 3 layers of K, then 3 of V. A piece has 5 slots of 2 * 3 * 4 = 24 bytes, and takes 128 bytes.
    let start = (3 + 1) * 128 + 2 * 24;
    assert_eq!(bytemuck::cast_slice::<_, u8>(v), &pages[1][start..start + 24]);
    let refused = CpuError::Plane { plane: PlaneName::Spare };
    assert!(!refused.to_string().is_empty());
    assert_eq!(cpu.slot(PlaneName::Spare, layer, slot), Err(refused));
}
