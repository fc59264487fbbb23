//! Measures one sum over ranks, by peer memory and by NCCL. The rows have a model's width.

use std::io::Write;
use std::thread;

use kvarena::backend::cuda::{CudaError, CudaEvent, DeviceBuffer};
use serde_json::json;

use super::print;
use crate::args::{Args, Shape};
use crate::setup::config_of;
use kvarena_host::error::{Error, Result};
use kvarena_host::gpu::device::Device;
use kvarena_host::gpu::error::{GpuError, GpuResult};
use kvarena_host::gpu::kernels::FillParams;
use kvarena_host::gpu::sums::Link;

/// Number of sums of a graph, and number of measured launches of the graph. The median over launches is reported.
const SUMS: usize = 100;
const LAUNCHES: usize = 9;

/// Prints a result for each number of summed rows.
///
/// # Errors
/// `--tp` is 1, the ranks cannot be connected, or a write failed. Any other failure ends the program.
pub fn run(args: &Args, shape: Shape, batches: &[usize], out: &mut impl Write) -> Result<()> {
    if args.tp == 1 {
        return Err(Error::request("--bench sums is for several GPUs: --tp 2"));
    }
    let width = config_of(shape)?.hidden;
    let links = Link::connect(args.tp as usize, args.sums.map(Into::into))?;
    let sums = links[0].sums();
    let times: Vec<Vec<[Option<f32>; 2]>> = thread::scope(|scope| {
        let measure = |link| move || rank_times(&link, width, batches);
        let threads: Vec<_> = links.into_iter().map(|link| scope.spawn(measure(link))).collect();
        threads.into_iter().map(|thread| thread.join().expect("no rank panics")).collect()
    });
    for (&batch, [peer, nccl]) in batches.iter().zip(&times[0]) {
        let row = json!({
            "part": "sums",
            "rows": batch,
            "width": width,
            "peer_us": peer,
            "nccl_us": nccl,
        });
        print(args, shape, Some(sums), row, out)?;
    }
    Ok(())
}

/// Returns a rank's microseconds for each sum. A rank that fails ends the program, because the other ranks wait for it.
/// The program exits without dropping anything: drops of `Peers` and of the last handle of a GPU wait for work, which
/// may wait for other ranks.
fn rank_times(link: &Link, width: usize, batches: &[usize]) -> Vec<[Option<f32>; 2]> {
    let end = |error: GpuError| -> ! {
        let error = Error::from(error);
        eprintln!("kvarena-server: rank {}: {error}", link.rank());
        std::process::exit(error.fault as i32)
    };
    let most = width * batches.iter().copied().max().unwrap_or(1);
    let device = Device::open_number(link.rank() as u32).unwrap_or_else(|error| end(error));
    let [x, y] = [1, 2].map(|seed| filled(&device, seed, most).unwrap_or_else(|error| end(error)));
    let times = batches.iter().map(|&rows| {
        row_times(&device, link, [x.address(), y.address()], (rows, width)).unwrap_or_else(|error| end(error))
    });
    times.collect()
}

/// Returns random numbers in bf16.
fn filled(device: &Device, seed: u64, count: usize) -> GpuResult<DeviceBuffer> {
    let buffer = device.zeros(2 * count)?;
    let out = buffer.address();
    let params = FillParams { out, count: count as u64, seed, scale: 0.1, offset: 0.0 };
    // SAFETY: the buffer has that many numbers.
    unsafe { device.kernels.fill.launch(device.raw(), (64, 1), 256, &params) }?;
    Ok(buffer)
}

fn row_times(
    device: &Device,
    link: &Link,
    [x, y]: [u64; 2],
    (rows, width): (usize, usize),
) -> GpuResult<[Option<f32>; 2]> {
    let count = rows * width;
    let peers = link.peers().filter(|peers| count <= peers.max_elements());
    let peer = peers.map(|peers| {
        // SAFETY: both have that many numbers, and all ranks submit the same sums.
        sum_us(device, || unsafe { peers.add(device, x, y, count) })
    });
    // SAFETY: x has that many numbers, and all ranks submit the same sums.
    let nccl = sum_us(device, || unsafe { link.all_reduce(device, x, count) })?;
    Ok([peer.transpose()?, Some(nccl)])
}

fn sum_us(device: &Device, sum: impl Fn() -> GpuResult<()>) -> GpuResult<f32> {
    // The first sum initialises libraries and loads kernels. A capture must contain neither.
    sum()?;
    device.stream.synchronize()?;
    let graph = device.stream.capture(|| (0..SUMS).try_for_each(|_| sum()))?;
    let mut events = Vec::new();
    for _ in 0..=LAUNCHES {
        let mut event = CudaEvent::new(&device.gpu, true)?;
        // SAFETY: the graph's memory lives until the stream is waited for.
        unsafe { graph.launch(&device.stream) }?;
        event.record(&device.stream)?;
        events.push(event);
    }
    device.stream.synchronize()?;
    let times = events.windows(2).map(|pair| pair[1].elapsed_ms(&pair[0]));
    let mut times = times.collect::<std::result::Result<Vec<f32>, CudaError>>()?;
    times.sort_by(f32::total_cmp);
    Ok(times[times.len() / 2] * 1e3 / SUMS as f32)
}
