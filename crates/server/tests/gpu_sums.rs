//! Tests that sums over ranks in peer memory equal their specification bit by bit. The ranks are on several GPUs, or
//! all on one GPU with a stream each.
#![cfg(feature = "cuda")]

mod common;

use std::sync::{Barrier, Mutex};
use std::thread;
use std::time::Duration;

use common::gpu::{Numbers, buffer, device, lock_gpus, read};
use common::run_server;
use common::twin;
use half::bf16;
use kvarena::backend::cuda::CudaEvent;
use kvarena_host::gpu::device::Device;
use kvarena_host::gpu::error::GpuResult;
use kvarena_host::gpu::nccl::Comm;
use kvarena_host::gpu::peers::Peers;
use kvarena_host::gpu::sums::Link;

/// Returns the number of a GPU for each rank. If there is only one GPU, all ranks share it. Returns `None` if there is
/// no GPU, or if there are several, but fewer than ranks.
fn gpus(ranks: usize) -> Option<Vec<u32>> {
    device()?;
    let numbers: Vec<u32> = (0..ranks as u32).collect();
    if numbers.iter().all(|&number| Device::open_number(number).is_ok()) {
        return Some(numbers);
    }
    Device::open_number(1).is_err().then(|| vec![0; ranks])
}

/// The sums of a test: the number of elements of each, and the addends of each rank.
struct Sums {
    counts: Vec<usize>,
    x: Vec<bf16>,
    /// The addends of each rank, concatenated in the order of the sums.
    parts: Vec<Vec<bf16>>,
}

impl Sums {
    fn new(ranks: usize, counts: &[usize], seed: u64) -> Self {
        let mut numbers = Numbers(seed);
        let longest = counts.iter().copied().max().unwrap_or_default();
        let x = numbers.vec(longest, 1.0);
        let parts = (0..ranks).map(|_| numbers.vec(counts.iter().sum(), 1.0)).collect();
        Self { counts: counts.to_vec(), x, parts }
    }

    /// Returns x after `times` rounds of all sums, computed by the specification.
    fn expected(&self, times: usize) -> Vec<bf16> {
        let mut x = self.x.clone();
        for _ in 0..times {
            let mut from = 0;
            for &count in &self.counts {
                let parts: Vec<_> = self.parts.iter().map(|part| &part[from..][..count]).collect();
                let sum = twin::sum_ranks(&x[..count], &parts);
                x[..count].copy_from_slice(&sum);
                from += count;
            }
        }
        x
    }

    /// Computes all sums on a rank's GPU: `eager` times as single launches, then `replays` times as one graph. Calls
    /// `pause` before each launch. At `ready` the ranks wait for one another.
    fn on_rank(
        &self,
        (rank, gpu): (usize, u32),
        peers: &Peers,
        (eager, replays): (usize, usize),
        ready: &Barrier,
        mut pause: impl FnMut(),
    ) -> Vec<bf16> {
        let device = Device::open_number(gpu).expect("it was there");
        let (x, parts) = (buffer(&device, &self.x), buffer(&device, &self.parts[rank]));
        let sums = |pause: &mut dyn FnMut()| {
            let mut at = parts.address();
            for &count in &self.counts {
                pause();
                // SAFETY: x and the parts have that many numbers, and all ranks submit the same sums.
                unsafe { peers.add(&device, x.address(), at, count) }?;
                at += 2 * count as u64;
            }
            Ok::<_, kvarena_host::gpu::GpuError>(())
        };
        // SAFETY: an empty sum accesses no memory, and all ranks submit it.
        unsafe { peers.add(&device, x.address(), parts.address(), 0) }.expect("loaded");
        device.stream.synchronize().expect("done");
        let graph = device.stream.capture(|| sums(&mut || {})).expect("captured");
        // All ranks finish their setup before any rank launches a sum. A kernel load waits for all work on its
        // GPU. If another rank's sum were running on this GPU, it would wait for this rank's sum: a deadlock.
        ready.wait();
        for _ in 0..eager {
            sums(&mut pause).expect("launched");
        }
        for _ in 0..replays {
            pause();
            // SAFETY: the graph's memory lives until its work is done, below.
            unsafe { graph.launch(&device.stream) }.expect("launched");
        }
        device.stream.synchronize().expect("done");
        read(&x, self.x.len())
    }

    /// Computes the sums on all ranks, and compares them with the specification. `pause` receives the rank and the
    /// number of its earlier pauses.
    fn agree(&self, gpus: &[u32], (eager, replays): (usize, usize), pause: impl Fn(usize, usize) + Sync) {
        let links = Peers::connect(gpus).expect("GPUs that reach each other");
        let (expected, ready) = (&self.expected(eager + replays), &Barrier::new(gpus.len()));
        thread::scope(|scope| {
            for (rank, peers) in links.into_iter().enumerate() {
                let pause = &pause;
                scope.spawn(move || {
                    let mut paused = 0..;
                    let pause = || pause(rank, paused.next().expect("no end"));
                    let rank_gpu = (rank, gpus[rank]);
                    let x = self.on_rank(rank_gpu, &peers, (eager, replays), ready, pause);
                    let wrong = x.iter().zip(expected).position(|(a, b)| !same(*a, *b));
                    assert!(wrong.is_none(), "rank {rank}, number {wrong:?} of {:?}", self.counts);
                });
            }
        });
    }
}

/// Returns random pauses that differ by rank.
fn paces(seed: u64) -> impl Fn(usize, usize) + Sync {
    move |rank, paused| {
        let mut pace = Numbers(seed ^ (rank as u64) << 32 ^ (paused as u64) << 40);
        if pace.below(4) == 0 {
            thread::sleep(Duration::from_micros(pace.below(300) as u64));
        }
    }
}

/// Returns whether two numbers have equal bits, or both are NaN.
fn same(a: bf16, b: bf16) -> bool {
    a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan())
}

/// Long and short sums alternate. Only some blocks take part in short sums, so the blocks' counts of sums differ.
#[test]
fn sums_are_their_specification_bit_by_bit() {
    let _lock = lock_gpus();
    for ranks in [2, 3, 4] {
        let Some(gpus) = gpus(ranks) else { continue };
        let counts = [8, 4096, 0, 24, 4104, 8, 16 * 4096, 1000, 8 * 511, 8 * 512, 8 * 513, 0, 40_000, 8];
        Sums::new(ranks, &counts, 1).agree(&gpus, (3, 4), paces(2));
    }
}

/// No rank reads a part before another rank has written it, or overwrites a part before another rank has read it.
#[test]
fn no_rank_outruns_another() {
    let _lock = lock_gpus();
    let Some(gpus) = gpus(2) else { return };
    for seed in 0..4 {
        let mut numbers = Numbers(seed);
        let counts: Vec<usize> = (0..40).map(|_| 8 * numbers.below(1300)).collect();
        Sums::new(2, &counts, seed).agree(&gpus, (2, 3), paces(seed));
    }
}

/// Rank 0 drops a buffer after its first sum, while rank 1's second sum waits for rank 0's second sum. Both ranks use
/// one GPU. If there are two GPUs, the test also runs with one rank on each.
#[test]
fn a_rank_drops_a_buffer_between_its_sums() {
    let _lock = lock_gpus();
    if device().is_none() {
        return;
    }
    let numbers = [[0, 0], [0, 1]];
    for gpus in numbers.into_iter().filter(|gpus| Device::open_number(gpus[1]).is_ok()) {
        let device = Device::open_number(gpus[0]).expect("it was there");
        let between = Mutex::new(Some(buffer(&device, &[0_u8; 4096])));
        let launched = Barrier::new(2);
        Sums::new(2, &[4096; 2], 5).agree(&gpus, (1, 1), |rank, paused| match (rank, paused) {
            (0, 1) => {
                launched.wait();
                drop(between.lock().expect("no thread panics").take());
            }
            (1, 2) => {
                launched.wait();
            }
            _ => {}
        });
    }
}

/// A sum of the maximum length.
#[test]
fn the_longest_sum_is_exact() {
    let _lock = lock_gpus();
    let Some(gpus) = gpus(2) else { return };
    let most = Peers::connect(&gpus).expect("GPUs that reach each other")[0].max_elements();
    assert_eq!(most, 256 * 4096);
    Sums::new(2, &[most, 8, most], 3).agree(&gpus, (1, 1), paces(3));
}

/// Some addends are 0xffff, a NaN; a pair of them marks an empty word of an inbox. Others are another NaN, infinities,
/// zeros of either sign, or the least and the greatest positive number.
#[test]
fn nan_and_infinity_are_summed() {
    let _lock = lock_gpus();
    let Some(gpus) = gpus(2) else { return };
    let mut sums = Sums::new(2, &[4096; 3], 4);
    let odd = [0xffff, 0x7fff, 0x7f80, 0xff80, 0x8000, 0x0000, 0x0001, 0x7f7f];
    for (rank, part) in sums.parts.iter_mut().enumerate() {
        for (i, number) in part.iter_mut().enumerate().filter(|(i, _)| i % 5 < 3) {
            *number = bf16::from_bits(odd[(i / 5 + 3 * rank * (i / 40)) % odd.len()]);
        }
    }
    sums.parts[0][..8].fill(bf16::from_bits(0xffff));
    sums.agree(&gpus, (2, 2), paces(4));
}

/// The report names the transport of sums. GPUs without peer access use NCCL, or the program fails with `--sums peer`.
#[test]
fn the_report_names_the_transport_of_sums() {
    let _lock = lock_gpus();
    if device().is_none() || Device::open_number(1).is_err() || Comm::version().is_err() {
        return;
    }
    let reached = Peers::connect(&[0, 1]).is_ok();
    for (more, way) in [(&[][..], "peer"), (&["--sums", "peer"], "peer"), (&["--sums", "nccl"], "nccl")] {
        let model = ["--backend", "cuda", "--tp", "2", "--random-model", "llama-tiny-64", "--json", "--chunk", "64"];
        let requests = ["--random-requests", "1:9", "--max-new-tokens", "4"];
        let ran = run_server(&[&model[..], &requests, more].concat(), "");
        if !reached && more == ["--sums", "peer"] {
            assert_eq!(ran.code, Some(3), "{}", ran.err);
            assert!(ran.err.contains("GPU 0 cannot reach the memory of GPU 1"), "{}", ran.err);
            continue;
        }
        assert_eq!(ran.code, Some(0), "{}", ran.err);
        let last = ran.out.lines().last().expect("a report");
        let report: serde_json::Value = serde_json::from_str(last).expect("JSON");
        assert_eq!(report["report"]["sums"], if reached { way } else { "nccl" }, "{report}");
    }
}

/// Prints the time of a sum of rows of 4,096 numbers, in the GPUs' memory and through NCCL: the median of some launches
/// of a graph of 100 sums.
#[test]
#[ignore = "measures two GPUs"]
fn times_of_sums() {
    const WIDTH: usize = 4096;
    const SUMS: usize = 100;
    let time = |device: &Device, sum: &dyn Fn() -> GpuResult<()>| -> GpuResult<f32> {
        // The first sum initialises libraries and loads kernels. A capture must contain neither.
        sum()?;
        device.stream.synchronize()?;
        let graph = device.stream.capture(|| (0..SUMS).try_for_each(|_| sum()))?;
        let mut events = Vec::new();
        for _ in 0..10 {
            let mut event = CudaEvent::new(&device.gpu, true)?;
            // SAFETY: the graph's memory lives until the stream is waited for.
            unsafe { graph.launch(&device.stream) }?;
            event.record(&device.stream)?;
            events.push(event);
        }
        device.stream.synchronize()?;
        let times = events.windows(2).map(|pair| pair[1].elapsed_ms(&pair[0]));
        let mut times = times.collect::<Result<Vec<f32>, _>>()?;
        times.sort_by(f32::total_cmp);
        Ok(times[times.len() / 2] * 1e3 / SUMS as f32)
    };
    thread::scope(|scope| {
        for link in Link::connect(2, None).expect("two GPUs") {
            scope.spawn(move || {
                let device = Device::open_number(link.rank() as u32).expect("it was there");
                let [x, y] = [1, 2].map(|seed| buffer(&device, &Numbers(seed).vec(256 * WIDTH, 0.1)));
                for rows in [1, 16, 64, 256] {
                    let (x, y, count) = (x.address(), y.address(), rows * WIDTH);
                    // SAFETY: x and y have that many numbers, and all ranks submit the same sums.
                    let peer = link.peers().map(|peers| time(&device, &|| unsafe { peers.add(&device, x, y, count) }));
                    // SAFETY: as above.
                    let nccl = time(&device, &|| unsafe { link.all_reduce(&device, x, count) });
                    if link.rank() == 0 {
                        println!("{rows} rows: {peer:?} us, {nccl:?} us through NCCL");
                    }
                }
            });
        }
    });
}
