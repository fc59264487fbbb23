//! Page copies are exact to the byte: inside a pool, between pools of either layout, to and from pinned memory.

use kvarena::backend::cuda::{Cuda, CudaError, Gpu};
use kvarena::backend::{Moved, OpenBackend, SwapMemory};
use kvarena::config::StepBounds;
use kvarena::id::{MoveId, SwapPageId};
use kvarena::layout::{Layout, PoolLayout, TableShape};
use kvarena::plan::{PageCopy, PageMove};
use kvarena::testkit::contract::{TestBackend, with_spare_plane};
use kvarena::testkit::planner::shuffle;
use kvarena::testkit::rng::Rng;
use kvarena::{Backend, Capacity, KvDtype, KvShape, PageId, PoolConfig};

use crate::gpu;
use crate::on_gpu::{OnGpu, OnGpuOptions};

/// Shapes of pages: units of 16, 4 and 2 bytes; pieces from 6 bytes to many blocks; pages below and above the threshold
/// of the copy engines.
const SHAPES: [Shape; 10] = [
    (3, 2, 64, KvDtype::Bf16, 16, false),
    (2, 1, 3, KvDtype::F16, 1, false),
    (1, 1, 5, KvDtype::F32, 7, false),
    (2, 8, 128, KvDtype::Bf16, 1, false),
    (4, 8, 128, KvDtype::Bf16, 64, false),
    (36, 8, 128, KvDtype::Bf16, 16, false),
    (3, 2, 64, KvDtype::Bf16, 16, true),
    (2, 1, 3, KvDtype::F16, 1, true),
    (1, 3, 5, KvDtype::F32, 7, true),
    (36, 8, 128, KvDtype::Bf16, 16, true),
];

/// Layers, kv heads, head_dim, dtype, page size, and whether a plane with pieces of another size follows K and V.
pub type Shape = (u32, u32, u32, KvDtype, u32, bool);

pub const PAGES: u32 = 40;
const SWAP_PAGES: u32 = 50;

pub fn pool(shape: Shape, layout: Layout) -> PoolLayout {
    let (layers, kv_heads, head_dim, dtype, page_size, spare) = shape;
    let capacity = Capacity::Pages(PAGES);
    let config = PoolConfig {
        layers,
        shape: KvShape::heads(kv_heads, head_dim),
        dtype,
        page_size,
        capacity,
        layout,
        swap_pages: SWAP_PAGES,
        ..PoolConfig::default()
    };
    if spare { with_spare_plane(&config) } else { config.layout().expect("a valid pool") }
}

fn open(gpu: &Gpu, layout: &PoolLayout) -> OnGpu {
    let table = TableShape::new(layout.page_size(), 2, 16, 32).expect("a small table");
    OnGpuOptions::new(gpu).open(layout, &table, StepBounds { steps: 1, tokens: 16 }).expect("a small pool")
}

/// Returns the bytes of a page for a seed.
pub fn page(layout: &PoolLayout, seed: u64) -> Vec<u8> {
    let (mut rng, mut bytes) = (Rng::new(seed), vec![0; layout.page_bytes() as usize]);
    bytes.chunks_mut(8).for_each(|chunk| chunk.copy_from_slice(&rng.bits().to_le_bytes()[..chunk.len()]));
    bytes
}

/// Returns a page's bytes read directly from the pool's memory, piece by piece in the layout.
fn raw_page(cuda: &Cuda, id: u32) -> Vec<u8> {
    let layout = cuda.layout();
    let memory = cuda.pool();
    let pieces = (0..layout.pieces_per_page()).map(|piece| {
        let range = layout.piece(PageId::new(id), piece);
        memory.read(range.start, (range.end - range.start) as usize).expect("bytes")
    });
    pieces.collect::<Vec<_>>().concat()
}

/// Returns `count` copies of random pages. No two copies have the same source or the same target.
pub fn copies(rng: &mut Rng, count: usize, sources: u32, targets: u32) -> Vec<PageCopy> {
    let mut from: Vec<_> = (0..sources).map(PageId::new).collect();
    let mut to: Vec<_> = (0..targets).map(PageId::new).collect();
    shuffle(rng, &mut from);
    shuffle(rng, &mut to);
    let pairs = from.into_iter().zip(to).take(count);
    pairs.map(|(source, target)| PageCopy { source, target }).collect()
}

/// Fills all pages of a pool; page `i` gets `page(seed + i)`.
pub fn fill(backend: &mut OnGpu, layout: &PoolLayout, seed: u64) {
    let pages: Vec<_> = (0..PAGES).map(|i| page(layout, seed + u64::from(i))).collect();
    backend.write_pages(&(0..PAGES).map(PageId::new).collect::<Vec<_>>(), &pages.concat());
}

/// Waits until all swap pages are pinned, and fills them.
pub fn fill_swap(backend: &mut OnGpu, byte: u8) {
    let count = backend.cuda.layout().swap_region_pages();
    while backend.swap_pages() < count {
        std::thread::yield_now();
    }
    let pages = (0..count).map(SwapPageId::new);
    pages.for_each(|page| backend.lease_mut(page).as_mut().fill(byte));
}

/// Returns a move for each copy. The source of the copy is the page of the pool, and its target is the swap page.
pub fn moves(copies: &[PageCopy]) -> Vec<PageMove> {
    let swap = |page: PageId| SwapPageId::new(page.raw());
    copies.iter().map(|copy| PageMove { device: copy.source, swap: swap(copy.target) }).collect()
}

#[test]
fn pages_are_equal_after_a_copy_to_the_host_and_back() {
    let Some(gpu) = gpu() else { return };
    let mut rng = Rng::new(1);
    for shape in SHAPES {
        for layout in [Layout::LayerFirst, Layout::PageFirst] {
            let layout = pool(shape, layout);
            let mut backend = open(&gpu, &layout);
            fill(&mut backend, &layout, 100);
            for i in 0..PAGES {
                let wanted = page(&layout, 100 + u64::from(i));
                assert!(raw_page(&backend.cuda, i) == wanted, "{layout:?} page {i}");
            }
            // The test repeats the moves, so that the backend reuses events and chunks.
            for round in 0..3 {
                fill_swap(&mut backend, 0xee);
                let copies = copies(&mut rng, 31, PAGES, SWAP_PAGES);
                let ids = [1, 2].map(|id| MoveId::new(2 * round + id));
                backend.save_pages(ids[0], &moves(&copies)).expect("pages of the pool");
                backend.synchronize().expect("nothing failed");
                for i in 0..SWAP_PAGES {
                    let found = copies.iter().find(|copy| copy.target.raw() == i);
                    let wanted = found.map(|copy| page(&layout, 100 + u64::from(copy.source.raw())));
                    let lease = backend.lease(SwapPageId::new(i));
                    match wanted {
                        Some(wanted) => assert!(lease.as_ref() == wanted, "{layout:?} {i}"),
                        None => assert!(lease.as_ref().iter().all(|&x| x == 0xee), "{layout:?} {i}"),
                    }
                }
                // Each swap page is loaded to the device page of the next copy.
                let mut back = moves(&copies);
                let first = back[0].device;
                for i in 0..back.len() {
                    back[i].device = back.get(i + 1).map_or(first, |next| next.device);
                }
                backend.load_pages(ids[1], &back).expect("pages of the pool");
                backend.synchronize().expect("nothing failed");
                assert_eq!(backend.moved(), Ok(Moved { saved: ids[0], loaded: ids[1] }));
                for (copy, PageMove { device, .. }) in copies.iter().zip(&back) {
                    let wanted = page(&layout, 100 + u64::from(copy.source.raw()));
                    assert!(raw_page(&backend.cuda, device.raw()) == wanted, "{layout:?} {copy:?}");
                }
                fill(&mut backend, &layout, 100);
            }
        }
    }
}

#[test]
fn pages_move_inside_a_pool_and_between_pools() {
    let Some(gpu) = gpu() else { return };
    let mut rng = Rng::new(2);
    for shape in SHAPES {
        for (from, to) in [
            (Layout::LayerFirst, Layout::PageFirst),
            (Layout::PageFirst, Layout::LayerFirst),
            (Layout::LayerFirst, Layout::LayerFirst),
            (Layout::PageFirst, Layout::PageFirst),
        ] {
            let (from, to) = (pool(shape, from), pool(shape, to));
            let (mut source, mut target) = (open(&gpu, &from), open(&gpu, &to));
            fill(&mut source, &from, 300);
            fill(&mut target, &to, 700);
            let moves = copies(&mut rng, 23, PAGES, PAGES);
            let stream = source.stream.clone();
            let event = source.cuda.copy_to_pool(&mut target.cuda, &moves, &stream).expect("a copy");
            event.synchronize().expect("nothing failed");
            for i in 0..PAGES {
                let seed = match moves.iter().find(|copy| copy.target.raw() == i) {
                    Some(copy) => 300 + u64::from(copy.source.raw()),
                    None => 700 + u64::from(i),
                };
                assert!(raw_page(&target.cuda, i) == page(&to, seed), "{from:?} to {to:?} page {i}");
            }
            // Copies inside a pool, from the first to the second half of its pages in a random order.
            let order = copies(&mut rng, PAGES as usize, PAGES, PAGES);
            let ids: Vec<_> = order.iter().map(|copy| copy.source).collect();
            let (low, high) = ids.split_at(ids.len() / 2);
            let pairs = low.iter().zip(high);
            let moves: Vec<_> = pairs.map(|(&source, &target)| PageCopy { source, target }).collect();
            source.copy_pages(&moves).expect("pages of the pool");
            source.synchronize().expect("nothing failed");
            for i in 0..PAGES {
                let copied = moves.iter().find(|copy| copy.target.raw() == i);
                let seed = 300 + u64::from(copied.map_or(i, |copy| copy.source.raw()));
                assert!(raw_page(&source.cuda, i) == page(&from, seed), "{from:?} page {i}");
            }
        }
    }
}

#[test]
fn more_pages_than_one_launch_takes() {
    let Some(gpu) = gpu() else { return };
    let capacity = Capacity::Pages(2_000);
    let config =
        PoolConfig { page_size: 1, shape: KvShape::heads(1, 4), capacity, swap_pages: 1_000, ..PoolConfig::default() };
    let layout = config.layout().expect("a valid pool");
    let mut backend = open(&gpu, &layout);
    fill_swap(&mut backend, 0);
    for i in 0..1_000 {
        let mut lease = backend.lease_mut(SwapPageId::new(i));
        lease.as_mut().copy_from_slice(&page(&layout, u64::from(i)));
    }
    let pair = |source, target| PageCopy { source: PageId::new(source), target: PageId::new(target) };
    let inward: Vec<_> = (0..1_000).map(|i| pair(999 - i, i)).collect();
    backend.load_pages(MoveId::new(1), &moves(&inward)).expect("pages of the pool");
    let across: Vec<_> = (0..1_000).map(|i| pair(i, 1_000 + i)).collect();
    backend.copy_pages(&across).expect("pages of the pool");
    backend.synchronize().expect("nothing failed");
    for i in 0..1_000 {
        assert!(raw_page(&backend.cuda, 1_000 + i) == page(&layout, u64::from(999 - i)), "page {i}");
    }
}

#[test]
fn pages_of_another_shape_are_refused() {
    let Some(gpu) = gpu() else { return };
    let first = pool(SHAPES[0], Layout::PageFirst);
    let second = pool(SHAPES[3], Layout::PageFirst);
    let (source, mut target) = (open(&gpu, &first), open(&gpu, &second));
    let copy = [PageCopy { source: PageId::new(0), target: PageId::new(0) }];
    let stream = source.stream.clone();
    let error = source.cuda.copy_to_pool(&mut target.cuda, &copy, &stream).err();
    assert_eq!(error, Some(CudaError::PageShape));
}
