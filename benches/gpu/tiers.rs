//! Measures moves of pages to swap memory and back: for pages of several sizes, in comparison with plain copies of the
//! driver, and during decode steps. Also measures steps while swap memory is pinned.

use std::time::{Duration, Instant};

use cust::sys;
use kvarena::backend::cuda::{Cuda, CudaOptions, CudaStream, DeviceBuffer, Gpu, PinnedBuffer};
use kvarena::backend::{OpenBackend, SwapMemory};
use kvarena::id::{MoveId, SwapPageId};
use kvarena::layout::Layout;
use kvarena::plan::{PageMove, StepEnd};
use kvarena::testkit::rng::Rng;
use kvarena::{Attend, Backend, Capacity, LayerId, PageId, PoolConfig};

use crate::Outcome;
use crate::batch::{Batch, Forest, Noise, distinct, pool, table};
use crate::report::{Rate, Report};
use crate::timer::Timer;

/// Sizes of the measurements: full ones for a GPU, small ones to test the code on the tests' driver.
#[derive(Clone, Copy)]
pub struct Sizes {
    layers: u32,
    rows: u32,
    len: u32,
    /// Pages of a batch of moves.
    pages: u32,
    rounds: usize,
    /// Bytes of the region whose pinning is timed.
    pinned: u64,
}

impl Sizes {
    pub const FULL: Self = Self { layers: 36, rows: 64, len: 4_096, pages: 1_024, rounds: 9, pinned: 64 << 30 };
    pub const SMALL: Self = Self { layers: 2, rows: 2, len: 64, pages: 8, rounds: 3, pinned: 16 << 20 };
}

fn config(sizes: Sizes) -> PoolConfig {
    PoolConfig { swap_pages: 2 * sizes.pages, ..pool(sizes.layers, 16, 1 << 14, Layout::PageFirst) }
}

fn open(gpu: &Gpu, config: &PoolConfig, stream: &CudaStream) -> Outcome<Cuda> {
    let options = CudaOptions { stream: Some(stream.clone()), ..CudaOptions::new(gpu) };
    let layout = config.layout()?;
    Ok(options.open(&layout, &table(layout.page_size()), 2)?)
}

fn wait_until_pinned(cuda: &Cuda) -> Duration {
    let start = Instant::now();
    while cuda.swap_pages() < cuda.layout().swap_region_pages() && cuda.swap_failure().is_none() {
        std::thread::sleep(Duration::from_millis(1));
    }
    start.elapsed()
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// Returns two batches of moves of distinct random pages. Each batch uses one half of the swap pages.
fn moves(rng: &mut Rng, cuda: &Cuda, count: u32) -> [Vec<PageMove>; 2] {
    let devices = distinct(rng, 2 * count as usize, cuda.layout().page_count());
    let pair = |(&device, swap)| PageMove { device: PageId::new(device), swap: SwapPageId::new(swap) };
    let all: Vec<_> = devices.iter().zip(0..).map(pair).collect();
    let (first, second) = all.split_at(count as usize);
    [first.to_vec(), second.to_vec()]
}

/// Counter of the numbers of moves.
struct Ids(u64);

impl Ids {
    fn next(&mut self) -> MoveId {
        self.0 += 1;
        MoveId::new(self.0)
    }
}

/// Starts moves: saves if `way` is 0, otherwise loads.
fn start(cuda: &mut Cuda, ids: &mut Ids, way: u32, moves: &[PageMove]) -> Outcome<MoveId> {
    let id = ids.next();
    if way == 0 {
        cuda.save_pages(id, moves)?;
    } else {
        cuda.load_pages(id, moves)?;
    }
    Ok(id)
}

pub fn run(gpu: &Gpu, sizes: Sizes, report: &mut Report) -> Outcome<()> {
    blocks(gpu, sizes, report)?;
    copies(gpu, sizes, report)?;
    beside_decode(gpu, sizes, report)?;
    pinning(gpu, sizes, report)
}

/// Measures pages of several sizes, in each direction.
fn blocks(gpu: &Gpu, sizes: Sizes, report: &mut Report) -> Outcome<()> {
    let stream = CudaStream::new(gpu)?;
    for (layers, page_size, layout) in [
        (1, 4, Layout::PageFirst),
        (1, 8, Layout::PageFirst),
        (2, 8, Layout::PageFirst),
        (2, 16, Layout::PageFirst),
        (4, 16, Layout::PageFirst),
        (36, 16, Layout::PageFirst),
        (36, 16, Layout::LayerFirst),
        (36, 1, Layout::PageFirst),
        (36, 1, Layout::LayerFirst),
    ] {
        let layers = layers.min(sizes.layers);
        let count = 2 * sizes.pages;
        let capacity = Capacity::Pages(2 * count);
        let config = PoolConfig { layers, page_size, layout, capacity, swap_pages: count, ..config(sizes) };
        let mut cuda = open(gpu, &config, &stream)?;
        wait_until_pinned(&cuda);
        let (mut rng, mut ids) = (Rng::new(1), Ids(0));
        let mut time = |cuda: &mut Cuda, way: u32| -> Outcome<f64> {
            let moves = moves(&mut rng, cuda, count / 2).concat();
            cuda.synchronize()?;
            let begun = Instant::now();
            start(cuda, &mut ids, way, &moves)?;
            cuda.synchronize()?;
            Ok(begun.elapsed().as_secs_f64() * 1e6)
        };
        let page_bytes = cuda.layout().page_bytes();
        for (name, way) in [("save", 0), ("load", 1)] {
            time(&mut cuda, way)?;
            let times = (0..sizes.rounds).map(|_| time(&mut cuda, way));
            let us = median(times.collect::<Outcome<_>>()?);
            let case = format!("{name} {count} x {} KiB {layout:?}", page_bytes >> 10);
            let rate = Rate::Bytes((page_bytes * u64::from(count)) as f64);
            report.row("tiers", &case, "kvarena", us, rate, true);
        }
    }
    Ok(())
}

/// Plain copies of the driver between device memory and pinned memory, with a stream for each direction.
struct Plain {
    streams: [CudaStream; 2],
    device: DeviceBuffer,
    pinned: PinnedBuffer,
    page_bytes: u64,
}

impl Plain {
    /// Submits a copy for each page: to the host if `way` is 0, otherwise to the device.
    fn submit(&mut self, way: usize, moves: &[PageMove]) {
        let stream = self.streams[way].raw() as usize as sys::CUstream;
        let bytes = self.page_bytes as usize;
        for (page, place) in moves.iter().zip(0_u64..) {
            let device = self.device.address() + (2 * place + way as u64) * self.page_bytes;
            let swap = self.pinned.address() + u64::from(page.swap.raw()) * self.page_bytes;
            let swap = swap as usize as *mut std::ffi::c_void;
            // SAFETY: both ranges are inside their buffers, which live until the streams are done.
            let result = unsafe {
                match way {
                    0 => sys::cuMemcpyDtoHAsync_v2(swap, device, bytes, stream),
                    _ => sys::cuMemcpyHtoDAsync_v2(device, swap, bytes, stream),
                }
            };
            assert_eq!(result as u32, 0, "cuMemcpyAsync");
        }
    }

    fn wait(&self) -> Outcome<()> {
        self.streams.iter().try_for_each(|stream| Ok(stream.synchronize()?))
    }
}

/// Measures batches of pages in each direction and in both, alternating with plain copies.
fn copies(gpu: &Gpu, sizes: Sizes, report: &mut Report) -> Outcome<()> {
    let stream = CudaStream::new(gpu)?;
    let capacity = Capacity::Pages(4 * sizes.pages);
    let mut cuda = open(gpu, &PoolConfig { capacity, ..config(sizes) }, &stream)?;
    Noise::new(gpu)?.fill(cuda.pool())?;
    wait_until_pinned(&cuda);
    let page_bytes = cuda.layout().page_bytes();
    let bytes = page_bytes * u64::from(2 * sizes.pages);
    let mut plain = Plain {
        streams: [CudaStream::new(gpu)?, CudaStream::new(gpu)?],
        device: DeviceBuffer::new(gpu, bytes)?,
        pinned: PinnedBuffer::new(gpu, bytes as usize)?,
        page_bytes,
    };
    let (mut rng, mut ids) = (Rng::new(2), Ids(0));
    for (name, ways) in [("save", &[0][..]), ("load", &[1]), ("save and load", &[0, 1])] {
        let (mut own, mut theirs) = (Vec::new(), Vec::new());
        for round in 0..=sizes.rounds {
            let batches = moves(&mut rng, &cuda, sizes.pages);
            cuda.synchronize()?;
            let begun = Instant::now();
            for &way in ways {
                start(&mut cuda, &mut ids, way, &batches[way as usize])?;
            }
            cuda.synchronize()?;
            let us = begun.elapsed().as_secs_f64() * 1e6;
            let begun = Instant::now();
            ways.iter().for_each(|&way| plain.submit(way as usize, &batches[way as usize]));
            plain.wait()?;
            let plain_us = begun.elapsed().as_secs_f64() * 1e6;
            if round > 0 {
                own.push(us);
                theirs.push(plain_us);
            }
        }
        let all = ways.len() as u64 * page_bytes * u64::from(sizes.pages);
        let case = format!("{name} {} x {} KiB", sizes.pages, page_bytes >> 10);
        let (own, theirs) = (median(own), median(theirs));
        let rate = || Rate::Bytes(all as f64);
        report.row("tiers", &case, "kvarena", own, rate(), true);
        report.row("tiers", &case, "cuMemcpyAsync", theirs, rate(), true);
        println!("       {:.1} % of plain copies", 100.0 * theirs / own);
    }
    let ok = comes_back(&mut cuda, &mut ids)?;
    report.row("tiers", "a page comes back to another page", "kvarena", 0.0, Rate::None, ok);
    Ok(())
}

/// Returns whether a page has the same bytes after a save and a load to another page.
fn comes_back(cuda: &mut Cuda, ids: &mut Ids) -> Outcome<bool> {
    let (swap, bytes) = (SwapPageId::new(0), cuda.layout().page_bytes());
    let move_of = |page| PageMove { device: PageId::new(page), swap };
    start(cuda, ids, 0, &[move_of(3)])?;
    start(cuda, ids, 1, &[move_of(5)])?;
    cuda.synchronize()?;
    let [saved, loaded]: [Vec<u8>; 2] =
        [3, 5].map(|page| cuda.pool().read(page * bytes, bytes as usize).expect("a page"));
    Ok(saved == loaded && cuda.lease(swap).as_ref() == saved)
}

/// Measures the attention of a decode step in all layers, alternately alone and during moves that outlast the step.
fn beside_decode(gpu: &Gpu, sizes: Sizes, report: &mut Report) -> Outcome<()> {
    let (noise, mut timer) = (Noise::new(gpu)?, Timer::new(gpu)?);
    let stream = timer.stream.clone();
    let pages = sizes.rows * sizes.len / 16;
    let capacity = Capacity::Pages(pages + 2 * sizes.pages);
    let mut cuda = open(gpu, &PoolConfig { capacity, ..config(sizes) }, &stream)?;
    noise.fill(cuda.pool())?;
    wait_until_pinned(&cuda);
    let layout = *cuda.layout();
    let forest = Forest::alone(vec![sizes.len; sizes.rows as usize]);
    // The step reads pages with low numbers; pages with high numbers move.
    let mut batch = Batch::forest(1, &layout, &table(16), &forest, &vec![1; forest.own.len()], &mut Rng::new(3));
    batch.move_below(pages, &layout, &mut Rng::new(4));
    let plan = batch.plan();
    let q = noise.buffer(gpu, u64::from(sizes.rows) * 32 * 128 * 2)?;
    let mut out = DeviceBuffer::new(gpu, q.bytes())?;
    let attend = Attend::new(32, 128);
    cuda.begin(&plan)?;
    let mut step = |cuda: &mut Cuda| {
        (0..sizes.layers).try_for_each(|layer| {
            let (q, out) = (q.rows(0, None), out.rows_mut(0, None));
            cuda.attend(&plan, LayerId::new(layer), &attend, q, out, None)
        })
    };
    step(&mut cuda)?;
    stream.synchronize()?;
    let graph = stream.capture(|| step(&mut cuda))?;
    let batch = |way: u32| -> Vec<PageMove> {
        let own = way * sizes.pages..(way + 1) * sizes.pages;
        own.map(|i| PageMove { device: PageId::new(pages + i), swap: SwapPageId::new(i) }).collect()
    };
    let (mut ids, kinds) = (Ids(0), ["alone", "beside saves", "beside loads", "beside both"]);
    let (mut times, mut late) = (kinds.map(|_| Vec::new()), 0);
    for round in 0..=sizes.rounds {
        for (kind, times) in times.iter_mut().enumerate() {
            cuda.synchronize()?;
            let mut last = MoveId::new(0);
            for way in [0, 1].into_iter().filter(|way| kind & 1 << way != 0) {
                last = start(&mut cuda, &mut ids, way, &batch(way))?;
            }
            // SAFETY: backend and rows live, and no other plan is staged.
            let us = timer.once(|| unsafe { graph.launch(&stream) })?;
            let moved = cuda.moved()?;
            late += u32::from(kind > 0 && moved.saved.max(moved.loaded) >= last);
            if round > 0 {
                times.push(us);
            }
        }
    }
    let alone = median(times[0].clone());
    for (kind, times) in kinds.iter().zip(times) {
        let us = median(times);
        let bytes = f64::from(sizes.rows * sizes.len) * 4096.0 * f64::from(sizes.layers);
        let case = format!("decode {} x {} {kind}", sizes.rows, sizes.len);
        report.row("tiers", &case, "kvarena", us, Rate::Bytes(bytes), true);
        println!("       {:+.2} %", 100.0 * (us / alone - 1.0));
    }
    println!("       {late} steps ended after their moves");
    cuda.end(StepEnd::Complete(plan.step()));
    Ok(())
}

/// Measures a backend with a large region of swap pages: the time to open it, the longest step while the region is
/// pinned, and the time to drop it.
fn pinning(gpu: &Gpu, sizes: Sizes, report: &mut Report) -> Outcome<()> {
    let page_bytes = config(sizes).layout()?.page_bytes();
    let swap_pages = (sizes.pinned / page_bytes) as u32;
    let config = PoolConfig { capacity: Capacity::Pages(64), swap_pages, ..config(sizes) };
    let stream = CudaStream::new(gpu)?;
    let noise = Noise::new(gpu)?;
    let rows = noise.buffer(gpu, 1 << 20)?;
    let us = |time: Duration| time.as_secs_f64() * 1e6;
    for dropped_early in [true, false] {
        let start = Instant::now();
        let mut cuda = open(gpu, &config, &stream)?;
        report.row("tiers", "open with a large region", "kvarena", us(start.elapsed()), Rate::None, true);
        let (mut worst, mut steps) = (Duration::ZERO, 0_u64);
        let begun = Instant::now();
        while cuda.swap_pages() < swap_pages && cuda.swap_failure().is_none() {
            steps += 1;
            let batch = Batch::stores(steps, &[1, 2, 3]);
            let start = Instant::now();
            cuda.begin(&batch.plan())?;
            for layer in 0..sizes.layers {
                let k = rows.rows(0, None);
                cuda.store_cache(&batch.plan(), LayerId::new(layer), k, k)?;
            }
            stream.synchronize()?;
            cuda.end(StepEnd::Complete(batch.plan().step()));
            worst = worst.max(start.elapsed());
            if dropped_early && begun.elapsed() > Duration::from_secs(3) {
                break;
            }
        }
        let pinned = u64::from(cuda.swap_pages()) * page_bytes;
        let case = format!("{} MiB pinned, {steps} steps", pinned >> 20);
        let rate = Rate::Bytes(pinned as f64);
        report.row("tiers", &case, "kvarena", us(begun.elapsed()), rate, true);
        report.row("tiers", "the longest step meanwhile", "kvarena", us(worst), Rate::None, true);
        if let Some(failure) = cuda.swap_failure() {
            println!("       {failure}");
        }
        let start = Instant::now();
        drop(cuda);
        report.row("tiers", "drop", "kvarena", us(start.elapsed()), Rate::None, true);
    }
    Ok(())
}
