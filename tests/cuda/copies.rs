//! Page copies are exact to the byte: inside a pool, between pools of either layout, to and from pinned host memory.

use kvarena::backend::cuda::{Cuda, CudaError, CudaStream, Gpu, HostPages};
use kvarena::testkit::contract::with_spare_plane;
use kvarena::testkit::planner::shuffle;
use kvarena::testkit::rng::Rng;
use kvarena::{
    Backend, Capacity, KvDtype, KvShape, Layout, OpenBackend, PageCopy, PageId, PoolConfig,
    PoolLayout, TableShape,
};

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

/// Layers, kv heads, head_dim, dtype, page size, and whether a plane of other pieces follows K and V.
type Shape = (u32, u32, u32, KvDtype, u32, bool);

const PAGES: u32 = 40;

fn pool(shape: Shape, layout: Layout) -> PoolLayout {
    let (layers, kv_heads, head_dim, dtype, page_size, spare) = shape;
    let capacity = Capacity::Pages(PAGES);
    let config = PoolConfig {
        layers,
        shape: KvShape::heads(kv_heads, head_dim),
        dtype,
        page_size,
        capacity,
        layout,
        ..PoolConfig::default()
    };
    if spare { with_spare_plane(&config) } else { config.layout().expect("a valid pool") }
}

fn open(gpu: &Gpu, layout: &PoolLayout) -> OnGpu {
    let table = TableShape::new(layout.page_size(), 2, 16, 32).expect("a small table");
    OnGpuOptions::with_tokens(gpu, 16).open(layout, &table, 1).expect("a small pool")
}

/// Returns the bytes of a page for a seed.
fn page(layout: &PoolLayout, seed: u64) -> Vec<u8> {
    let mut rng = Rng::new(seed);
    (0..layout.page_bytes()).map(|_| rng.bits() as u8).collect()
}

/// Returns a page's bytes read directly from the pool's memory, piece by piece in the layout.
fn raw_page(cuda: &Cuda, id: u32) -> Vec<u8> {
    let layout = cuda.layout();
    let memory = cuda.pool();
    (0..layout.pieces_per_page())
        .flat_map(|piece| {
            let range = layout.piece(PageId::new(id), piece);
            memory.read(range.start, (range.end - range.start) as usize).expect("bytes")
        })
        .collect::<Vec<u8>>()
}

/// Returns `count` copies between distinct random pages.
fn copies(rng: &mut Rng, count: usize, sources: u32, targets: u32) -> Vec<PageCopy> {
    let mut from: Vec<_> = (0..sources).map(PageId::new).collect();
    let mut to: Vec<_> = (0..targets).map(PageId::new).collect();
    shuffle(rng, &mut from);
    shuffle(rng, &mut to);
    let pairs = from.into_iter().zip(to).take(count);
    pairs.map(|(source, target)| PageCopy { source, target }).collect()
}

/// Fills all pages of a pool from the host; page `i` gets `page(seed + i)`.
fn fill(backend: &mut OnGpu, layout: &PoolLayout, seed: u64) {
    let mut host = HostPages::new(backend.cuda.gpu(), layout, PAGES).expect("pinned memory");
    for i in 0..PAGES {
        host.page_mut(PageId::new(i))
            .expect("no copy")
            .copy_from_slice(&page(layout, seed + u64::from(i)));
    }
    let all: Vec<_> =
        (0..PAGES).map(PageId::new).map(|id| PageCopy { source: id, target: id }).collect();
    let event = backend.cuda.copy_from_host(&host, &all, &backend.stream).expect("a copy");
    event.synchronize().expect("nothing failed");
    assert!(event.is_done().expect("nothing failed"));
}

#[test]
fn pages_go_to_the_host_and_back() {
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
            let mut host = HostPages::new(&gpu, &layout, 50).expect("pinned memory");
            let moves = copies(&mut rng, 31, PAGES, 50);
            // On another stream than the backend's, several times, so that chunks are reused.
            let other = CudaStream::new(&gpu).expect("a stream");
            for stream in [backend.stream.clone(), other] {
                for i in 0..50 {
                    host.page_mut(PageId::new(i)).expect("no copy").fill(0xee);
                }
                let event = backend.cuda.copy_to_host(&mut host, &moves, &stream).expect("a copy");
                event.synchronize().expect("nothing failed");
                for i in (0..50).map(PageId::new) {
                    match moves.iter().find(|copy| copy.target == i) {
                        Some(copy) => {
                            let wanted = page(&layout, 100 + u64::from(copy.source.raw()));
                            assert!(
                                host.page(i).expect("no copy") == wanted,
                                "{layout:?} {copy:?}"
                            );
                        }
                        None => {
                            assert!(
                                host.page(i).expect("no copy").iter().all(|&x| x == 0xee),
                                "{layout:?} {i:?}"
                            )
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn copies_are_captured_and_replayed() {
    let Some(gpu) = gpu() else { return };
    let mut rng = Rng::new(3);
    // Small pages, and large ones that the copy engines move.
    for shape in [SHAPES[3], SHAPES[5], SHAPES[6], SHAPES[9]] {
        for layout in [Layout::LayerFirst, Layout::PageFirst] {
            let layout = pool(shape, layout);
            let mut backend = open(&gpu, &layout);
            let stream = backend.stream.clone();
            let mut host = HostPages::new(&gpu, &layout, PAGES).expect("pinned memory");
            let moves = copies(&mut rng, 31, PAGES, PAGES);
            let to_host = |backend: &mut OnGpu, host: &mut HostPages| {
                backend.cuda.copy_to_host(host, &moves, &stream).map(drop)
            };
            let early = stream.capture(|| to_host(&mut backend, &mut host));
            assert_eq!(early.err(), Some(CudaError::NotPrepared));
            fill(&mut backend, &layout, 100);
            let graph = stream.capture(|| to_host(&mut backend, &mut host)).expect("a capture");
            for round in 0..3 {
                for i in 0..PAGES {
                    host.page_mut(PageId::new(i)).expect("no copy").fill(0xee);
                }
                // The last copy is outside the graph: a capture must not affect later copies.
                if round < 2 {
                    // SAFETY: backend and pages live, and the pages are not accessed before the copy is done.
                    unsafe { graph.launch(&stream) }.expect("a replay");
                } else {
                    to_host(&mut backend, &mut host).expect("a copy");
                }
                stream.synchronize().expect("nothing failed");
                for copy in &moves {
                    let wanted = page(&layout, 100 + u64::from(copy.source.raw()));
                    assert!(
                        host.page(copy.target).expect("no copy") == wanted,
                        "{layout:?} {copy:?}"
                    );
                }
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
            let event =
                source.cuda.copy_to_pool(&mut target.cuda, &moves, &stream).expect("a copy");
            event.synchronize().expect("nothing failed");
            for i in 0..PAGES {
                let seed = match moves.iter().find(|copy| copy.target.raw() == i) {
                    Some(copy) => 300 + u64::from(copy.source.raw()),
                    None => 700 + u64::from(i),
                };
                assert!(
                    raw_page(&target.cuda, i) == page(&to, seed),
                    "{from:?} to {to:?} page {i}"
                );
            }
            // Inside a pool: the lower half of a random order to the upper.
            let order = copies(&mut rng, PAGES as usize, PAGES, PAGES);
            let ids: Vec<_> = order.iter().map(|copy| copy.source).collect();
            let (low, high) = ids.split_at(ids.len() / 2);
            let pairs = low.iter().zip(high);
            let moves: Vec<_> =
                pairs.map(|(&source, &target)| PageCopy { source, target }).collect();
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
        PoolConfig { page_size: 1, shape: KvShape::heads(1, 4), capacity, ..PoolConfig::default() };
    let layout = config.layout().expect("a valid pool");
    let mut backend = open(&gpu, &layout);
    let mut host = HostPages::new(&gpu, &layout, 1_000).expect("pinned memory");
    for i in 0..1_000 {
        host.page_mut(PageId::new(i))
            .expect("no copy")
            .copy_from_slice(&page(&layout, u64::from(i)));
    }
    let pair =
        |source, target| PageCopy { source: PageId::new(source), target: PageId::new(target) };
    let inward: Vec<_> = (0..1_000).map(|i| pair(i, 999 - i)).collect();
    let stream = backend.stream.clone();
    backend.cuda.copy_from_host(&host, &inward, &stream).expect("a copy");
    let across: Vec<_> = (0..1_000).map(|i| pair(i, 1_000 + i)).collect();
    backend.copy_pages(&across).expect("pages of the pool");
    backend.synchronize().expect("nothing failed");
    for i in 0..1_000 {
        assert!(
            raw_page(&backend.cuda, 1_000 + i) == page(&layout, u64::from(999 - i)),
            "page {i}"
        );
    }
}

#[test]
fn pages_of_another_shape_are_refused() {
    let Some(gpu) = gpu() else { return };
    let first = pool(SHAPES[0], Layout::PageFirst);
    let second = pool(SHAPES[3], Layout::PageFirst);
    let (mut source, mut target) = (open(&gpu, &first), open(&gpu, &second));
    let copy = [PageCopy { source: PageId::new(0), target: PageId::new(0) }];
    let stream = source.stream.clone();
    let error = source.cuda.copy_to_pool(&mut target.cuda, &copy, &stream).err();
    assert_eq!(error, Some(CudaError::PageShape));
    let mut host = HostPages::new(&gpu, &second, 1).expect("pinned memory");
    let error = source.cuda.copy_to_host(&mut host, &copy, &stream).err();
    assert_eq!(error, Some(CudaError::PageShape));
}

#[test]
fn pages_are_not_lent_beside_a_copy() {
    let Some(gpu) = gpu() else { return };
    for shape in [SHAPES[3], SHAPES[5], SHAPES[6], SHAPES[9]] {
        let layout = pool(shape, Layout::LayerFirst);
        let mut backend = open(&gpu, &layout);
        fill(&mut backend, &layout, 100);
        let stream = backend.stream.clone();
        let mut host = HostPages::new(&gpu, &layout, PAGES + 1).expect("pinned memory");
        let all: Vec<_> =
            (0..PAGES).map(PageId::new).map(|id| PageCopy { source: id, target: id }).collect();
        let (last, spare) = (PageId::new(PAGES - 1), PageId::new(PAGES));
        let refused = Some(CudaError::PageInUse { page: last.raw() });

        let event = backend.cuda.copy_to_host(&mut host, &all, &stream).expect("a copy");
        let (read, written) = (host.page(last).err(), host.page_mut(last).err());
        // The copy may be done already; then a write must succeed.
        let done = || event.is_done().expect("nothing failed");
        assert!(read == refused || done(), "{read:?}");
        assert!(written == refused || done(), "{written:?}");
        host.page_mut(spare).expect("not in the copy").fill(1);
        event.synchronize().expect("nothing failed");
        assert!(host.page(last).expect("done") == page(&layout, 100 + u64::from(last.raw())));

        let event = backend.cuda.copy_from_host(&host, &all, &stream).expect("a copy");
        let written = host.page_mut(last).err();
        assert!(written == refused || event.is_done().expect("nothing failed"), "{written:?}");
        host.page(last).expect("the copy only reads it");
        stream.synchronize().expect("nothing failed");
        host.page_mut(last).expect("done").fill(1);
    }
}
