//! Pinned memory: leases, captures, pinning in the background, and its failures.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread::yield_now;
use std::time::{Duration, Instant};

use kvarena::backend::cuda::{Cuda, CudaError, CudaOptions, CudaStream, DeviceBuffer, Gpu, Prepare};
use kvarena::backend::{Moved, OpenBackend, PlanError, SwapMemory};
use kvarena::id::{MoveId, SwapPageId};
use kvarena::layout::{Layout, TableShape};
use kvarena::plan::{PageCopy, PageMove};
use kvarena::{Backend, Capacity, KvDtype, KvShape, LayerId, PageId, PoolConfig};

use crate::gpu;
use crate::plans::first_token;

/// Returns a config with pages of 4 MiB.
fn config(swap_pages: u32) -> PoolConfig {
    PoolConfig {
        layers: 64,
        shape: KvShape::heads(8, 128),
        dtype: KvDtype::Bf16,
        capacity: Capacity::Pages(8),
        layout: Layout::PageFirst,
        swap_pages,
        ..PoolConfig::default()
    }
}

fn open(gpu: &Gpu, swap_pages: u32, fewer: bool) -> Result<Cuda, CudaError> {
    let stream = Some(CudaStream::new(gpu)?);
    let options = CudaOptions { stream, fewer_swap_pages: fewer, ..CudaOptions::new(gpu) };
    let table = TableShape::new(16, 2, 64, 128).expect("a small table");
    options.open(&config(swap_pages).layout().expect("a small pool"), &table, 2)
}

fn opened(gpu: &Gpu, swap_pages: u32) -> Cuda {
    let cuda = open(gpu, swap_pages, false).expect("a small pool");
    while cuda.swap_pages() < swap_pages {
        yield_now();
    }
    cuda
}

fn page_move(device: u32, swap: u32) -> PageMove {
    PageMove { device: PageId::new(device), swap: SwapPageId::new(swap) }
}

fn panics(call: impl FnOnce()) -> bool {
    catch_unwind(AssertUnwindSafe(call)).is_err()
}

#[test]
fn leased_pages_are_not_moved() {
    let Some(gpu) = gpu() else { return };
    let mut cuda = opened(&gpu, 4);
    let [first, second] = [0, 1].map(SwapPageId::new);
    cuda.lease_mut(first).as_mut().fill(7);
    let readers = [cuda.lease(first), cuda.lease(first)];
    let leased = |page| Err(CudaError::Plan(PlanError::Leased { page }));
    assert_eq!(cuda.save_pages(MoveId::new(1), &[page_move(1, 1), page_move(0, 0)]), leased(first));
    assert!(panics(|| drop(cuda.lease_mut(first))));
    cuda.load_pages(MoveId::new(1), &[page_move(0, 0)]).expect("readers may share a page");
    let mut writer = cuda.lease_mut(second);
    assert_eq!(cuda.load_pages(MoveId::new(2), &[page_move(0, 0), page_move(1, 1)]), leased(second));
    assert_eq!(cuda.save_pages(MoveId::new(2), &[page_move(1, 1)]), leased(second));
    assert!(panics(|| drop(cuda.lease(second))));
    writer.as_mut().fill(9);
    drop(writer);
    assert!(cuda.lease(second).as_ref().iter().all(|&byte| byte == 9));
    // Leases outlive the backend.
    drop(cuda);
    assert!(readers.iter().all(|lease| lease.as_ref().iter().all(|&byte| byte == 7)));
}

/// While a load reads a page, `lease_mut` panics; while a save writes it, `lease` panics too. Both succeed if the
/// device has already finished the move.
#[test]
fn moving_pages_are_not_leased() {
    let Some(gpu) = gpu() else { return };
    let mut cuda = opened(&gpu, 4);
    cuda.lease_mut(SwapPageId::new(0)).as_mut().fill(7);
    let moves: Vec<_> = (0..8).map(|page| page_move(page, 0)).collect();
    cuda.load_pages(MoveId::new(1), &moves).expect("pages of the pool");
    let refused = panics(|| drop(cuda.lease_mut(SwapPageId::new(0))));
    assert!(refused || cuda.moved().expect("nothing failed").loaded == MoveId::new(1));
    drop(cuda.lease(SwapPageId::new(0)));
    cuda.save_pages(MoveId::new(2), &[page_move(0, 1)]).expect("pages of the pool");
    let refused = panics(|| drop(cuda.lease(SwapPageId::new(1))));
    assert!(refused || cuda.moved().expect("nothing failed").saved == MoveId::new(2));
    cuda.synchronize().expect("nothing failed");
    let all = Moved { saved: MoveId::new(2), loaded: MoveId::new(1) };
    assert_eq!(cuda.moved(), Ok(all));
    assert!(cuda.lease(SwapPageId::new(1)).as_ref().iter().all(|&byte| byte == 7));
}

/// More batches in flight than a direction has events.
#[test]
fn many_batches_are_in_flight() {
    let Some(gpu) = gpu() else { return };
    let mut cuda = opened(&gpu, 4);
    cuda.lease_mut(SwapPageId::new(3)).as_mut().fill(5);
    for id in 0..200 {
        let (id, moves) = (MoveId::new(id + 1), [page_move(id as u32 % 8, 3 - id as u32 % 2)]);
        match id.raw() % 2 {
            0 => cuda.save_pages(id, &moves).expect("pages of the pool"),
            _ => cuda.load_pages(id, &moves).expect("pages of the pool"),
        }
    }
    let last = Moved { saved: MoveId::new(200), loaded: MoveId::new(199) };
    let start = Instant::now();
    while cuda.moved().expect("nothing failed") != last {
        assert!(start.elapsed() < Duration::from_secs(20), "{:?}", cuda.moved());
    }
}

#[test]
fn captures_take_no_moves() {
    let Some(gpu) = gpu() else { return };
    let mut cuda = opened(&gpu, 4);
    let stream = cuda.stream().clone();
    let copy = [PageCopy { source: PageId::new(1), target: PageId::new(2) }];
    cuda.copy_pages(&copy).expect("the kernel is compiled");
    let captured = stream.capture(|| cuda.save_pages(MoveId::new(1), &[page_move(0, 0)]));
    assert_eq!(captured.err(), Some(CudaError::NotPrepared));
    cuda.save_pages(MoveId::new(1), &[page_move(1, 0)]).expect("pages of the pool");
    let captured = stream.capture(|| cuda.copy_pages(&copy));
    assert_eq!(captured.err(), Some(CudaError::PageInUse { page: 1 }));
    cuda.synchronize().expect("nothing failed");
    stream.capture(|| cuda.copy_pages(&copy)).expect("no move is in flight");
}

/// A step whose pages no load writes needs no wait, so a capture takes it. The load of another page may be in flight.
#[test]
fn captures_take_steps_without_loads() {
    let Some(gpu) = gpu() else { return };
    let mut cuda = opened(&gpu, 4);
    let stream = cuda.stream().clone();
    cuda.prepare(&Prepare::new(&[])).expect("the kernels are compiled");
    cuda.load_pages(MoveId::new(1), &[page_move(7, 0)]).expect("pages of the pool");
    let plan = first_token(1);
    cuda.begin(&plan).expect("a valid plan");
    let row = DeviceBuffer::new(&gpu, 2 * 8 * 128).expect("memory");
    let row = row.rows(0, None);
    stream.capture(|| cuda.store_cache(&plan, LayerId::new(63), row, row)).expect("nothing to wait for");
}

#[test]
fn moves_of_no_pages_and_without_swap_pages() {
    let Some(gpu) = gpu() else { return };
    let mut cuda = opened(&gpu, 0);
    cuda.save_pages(MoveId::new(1), &[]).expect("no page");
    let error = PlanError::SwapPage { page: SwapPageId::new(0), pages: 0 };
    assert_eq!(cuda.load_pages(MoveId::new(2), &[page_move(0, 0)]), Err(CudaError::Plan(error)));
    assert_eq!((cuda.swap_pages(), cuda.moved()), (0, Ok(Moved::default())));
}

#[test]
fn too_little_swap_memory_is_an_error() {
    let Some(gpu) = gpu() else { return };
    // 64 TiB.
    let (pages, bytes) = (16 << 20, 64 << 40);
    match open(&gpu, pages, false).err() {
        Some(CudaError::SwapMemory { bytes: wanted, available }) => {
            assert_eq!(wanted, bytes);
            assert!(available > 1 << 20 && available < bytes, "{available}");
        }
        error => panic!("{error:?}"),
    }
}

/// Opening and dropping a backend wait for no pinning, which the tests' driver can slow down (`FAKE_DRIVER_PIN_MS`).
#[test]
fn opening_waits_for_no_pinning() {
    let Some(gpu) = gpu() else { return };
    let start = Instant::now();
    let mut cuda = open(&gpu, 768, false).expect("3 GiB of swap memory");
    assert!(start.elapsed() < Duration::from_secs(1), "opened after {:?}", start.elapsed());
    let ready = cuda.swap_pages();
    let error = cuda.save_pages(MoveId::new(1), &[page_move(0, 767)]);
    let refused = Err(CudaError::NotPinned { page: SwapPageId::new(767), ready });
    assert!(error == refused || cuda.swap_pages() > ready, "{error:?}");
    let start = Instant::now();
    drop(cuda);
    assert!(start.elapsed() < Duration::from_secs(1), "dropped after {:?}", start.elapsed());
}

/// Run by `tests/cuda/fake_driver/run.sh`, whose driver pins 4 pages of 4 MiB (`FAKE_DRIVER_PINS`).
#[test]
#[ignore = "needs a driver that refuses to pin memory"]
fn memory_that_is_not_pinned_is_an_error_or_fewer_pages() {
    let gpu = gpu().expect("the tests' driver");
    let failed = |cuda: &Cuda| {
        while cuda.swap_failure().is_none() {
            yield_now();
        }
        cuda.swap_failure().expect("it fails").clone()
    };
    for fewer in [false, true] {
        let mut cuda = open(&gpu, 8, fewer).expect("a small pool");
        let failure = failed(&cuda);
        match failure {
            CudaError::Pinning { code: 2, bytes, pinned: 0, .. } => assert_eq!(bytes, 32 << 20),
            ref error => panic!("{error}"),
        }
        assert_eq!(cuda.swap_pages(), 0);
        assert_eq!(cuda.save_pages(MoveId::new(1), &[page_move(0, 0)]), Err(failure.clone()));
        assert_eq!(cuda.moved(), if fewer { Ok(Moved::default()) } else { Err(failure) });
    }
}
