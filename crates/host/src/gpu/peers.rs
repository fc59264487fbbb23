//! Memory of each rank's GPU that the other ranks' kernels write to, and sums made through it (`ptx/src/sum_ranks.cu`).
//!
//! All of it is taken before there are steps, by `cuMemAlloc`: memory of pools is not reached by other devices. It is
//! given back when the last rank is done with it.
//!
//! Not here: which sums are made so (`sums.rs`).

use std::ptr::null_mut;
use std::sync::Arc;

use cudarc::driver::sys;
use kvarena::backend::cuda::Gpu;

use super::device::Device;
use super::error::{GpuError, driver};
use super::kernels::{RANKS_MAX, SUM_BLOCKS, SumRanksParams};

/// Bytes that a rank sends in one sum at most: with more, whoever sends everything to everyone is slower than NCCL.
const SENT_MAX: usize = 2 << 20;
const UNIT_BYTES: usize = 16;
const UNIT_NUMBERS: usize = UNIT_BYTES / 2;
/// A word of this is empty (`ptx/src/sum_ranks.cu`).
const EMPTY_BYTE: u8 = 0xff;

/// Inboxes of a rank, and the turns of its blocks.
#[derive(Debug)]
struct Memory {
    gpu: Gpu,
    address: u64,
}

impl Memory {
    fn new(gpu: Gpu, bytes: usize) -> Result<Self, GpuError> {
        gpu.bind()?;
        let mut address = 0;
        // SAFETY: `address` is valid memory for one device address; a context is bound.
        let result = unsafe { sys::cuMemAlloc_v2(&mut address, bytes) };
        driver("cuMemAlloc", result)?;
        Ok(Self { gpu, address })
    }

    /// Sets bytes from `start` on, and waits for it.
    fn fill(&self, start: usize, byte: u8, bytes: usize) -> Result<(), GpuError> {
        self.gpu.bind()?;
        // SAFETY: the caller's range is inside this memory, of the bound context.
        let result = unsafe { sys::cuMemsetD8_v2(self.address + start as u64, byte, bytes) };
        driver("cuMemsetD8", result)?;
        finish(&self.gpu)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if self.gpu.bind().is_ok() {
            // SAFETY: taken once, given back once; all ranks have waited for their work (`Peers::drop`).
            unsafe { sys::cuMemFree_v2(self.address) };
        }
    }
}

/// Waits for all work of a device.
fn finish(gpu: &Gpu) -> Result<(), GpuError> {
    gpu.bind()?;
    // SAFETY: takes no pointers; a context is bound.
    driver("cuCtxSynchronize", unsafe { sys::cuCtxSynchronize() })
}

/// One rank's view of all ranks' memory.
#[derive(Debug)]
pub struct Peers {
    rank: usize,
    /// Most units of a sum.
    capacity: usize,
    memory: Arc<Vec<Memory>>,
}

impl Peers {
    /// Lets these GPUs reach each other's memory, and takes what the sums of a rank on each need.
    ///
    /// # Errors
    /// [`GpuError::NoPeer`] where one cannot reach another; the driver's.
    ///
    /// # Panics
    /// If there is one alone, or more than [`RANKS_MAX`].
    pub fn connect(numbers: &[u32]) -> Result<Vec<Self>, GpuError> {
        let ranks = numbers.len();
        assert!((2..=RANKS_MAX).contains(&ranks), "{ranks} ranks");
        let gpus = numbers.iter().map(|&number| Ok(Gpu::new(number)?));
        let gpus = gpus.collect::<Result<Vec<_>, GpuError>>()?;
        let pairs = || gpus.iter().flat_map(|gpu| gpus.iter().map(move |peer| (gpu, peer)));
        let others = || pairs().filter(|(gpu, peer)| gpu.ordinal() != peer.ordinal());
        others().try_for_each(|(gpu, peer)| can_reach(gpu.ordinal(), peer.ordinal()))?;
        others().try_for_each(|(gpu, peer)| reach(gpu, peer))?;
        let capacity = SENT_MAX / (ranks - 1) / UNIT_BYTES;
        let inboxes = inboxes_bytes(ranks, capacity);
        let take = |gpu| {
            let memory = Memory::new(gpu, inboxes + 4 * SUM_BLOCKS)?;
            memory.fill(0, EMPTY_BYTE, inboxes)?;
            memory.fill(inboxes, 0, 4 * SUM_BLOCKS)?;
            Ok(memory)
        };
        let memory = gpus.into_iter().map(take).collect::<Result<Vec<_>, GpuError>>()?;
        let memory = Arc::new(memory);
        let peer = |rank| Self { rank, capacity, memory: Arc::clone(&memory) };
        Ok((0..ranks).map(peer).collect())
    }

    /// Most numbers of a sum.
    pub fn most(&self) -> usize {
        self.capacity * UNIT_NUMBERS
    }

    /// Adds to x the sum over all ranks of y, numbers in bf16, in the stream's order: in f32, in the order of ranks,
    /// rounded once. All ranks get the same x if they begin with the same. With a count of 0 the kernel is loaded, no more.
    ///
    /// # Errors
    /// The driver's.
    ///
    /// # Panics
    /// If there are more numbers than [`Peers::most`], or not a multiple of 8.
    ///
    /// # Safety
    /// The addresses are this rank's memory of that many numbers, until it is done, and begin at multiples of 16. The
    /// device is this rank's. All ranks ask for the same sums in the same order, each in one stream.
    pub unsafe fn add(
        &self,
        device: &Device,
        x: u64,
        y: u64,
        count: usize,
    ) -> Result<(), GpuError> {
        assert!(count <= self.most(), "{count} numbers are more than {}", self.most());
        assert!(count.is_multiple_of(UNIT_NUMBERS), "{count} numbers are not whole units");
        let (units, ranks) = (count / UNIT_NUMBERS, self.memory.len());
        let mut inboxes = [0; RANKS_MAX];
        for (inbox, memory) in inboxes.iter_mut().zip(&*self.memory) {
            *inbox = memory.address;
        }
        let params = SumRanksParams {
            x,
            y,
            inboxes,
            turns: inboxes[self.rank] + inboxes_bytes(ranks, self.capacity) as u64,
            reserved: 0,
            units: units as u32,
            capacity: self.capacity as u32,
            rank: self.rank as u32,
            ranks: ranks as u32,
        };
        let blocks = units.div_ceil(512).clamp(1, SUM_BLOCKS);
        // SAFETY: there is room for that many units (asserted); the caller answers for the rest.
        unsafe { device.kernels.sum_ranks.launch(device.raw(), (blocks as u32, 1), 512, &params) }
    }
}

impl Drop for Peers {
    fn drop(&mut self) {
        // What this rank still does reads and writes the memory of all: the last one gives that back.
        let _ = finish(&self.memory[self.rank].gpu);
    }
}

/// Bytes of a rank's inboxes: two, with a part for each rank.
fn inboxes_bytes(ranks: usize, capacity: usize) -> usize {
    2 * ranks * capacity * UNIT_BYTES
}

fn can_reach(gpu: u32, peer: u32) -> Result<(), GpuError> {
    let number = |gpu: u32| {
        let mut device = 0;
        // SAFETY: `device` is valid memory for one device.
        let result = unsafe { sys::cuDeviceGet(&mut device, gpu as i32) };
        driver("cuDeviceGet", result).map(|()| device)
    };
    let mut can = 0;
    // SAFETY: `can` is valid memory for one number; the devices were found.
    let result = unsafe { sys::cuDeviceCanAccessPeer(&mut can, number(gpu)?, number(peer)?) };
    driver("cuDeviceCanAccessPeer", result)?;
    if can == 0 { Err(GpuError::NoPeer { gpu, peer }) } else { Ok(()) }
}

/// Lets a GPU's kernels reach another one's memory.
fn reach(gpu: &Gpu, peer: &Gpu) -> Result<(), GpuError> {
    peer.bind()?;
    let mut context = null_mut();
    // SAFETY: `context` is valid memory for one handle.
    driver("cuCtxGetCurrent", unsafe { sys::cuCtxGetCurrent(&mut context) })?;
    gpu.bind()?;
    // SAFETY: both contexts are retained; a context is bound.
    match unsafe { sys::cuCtxEnablePeerAccess(context, 0) } {
        // By NCCL, or for a model before this one.
        sys::CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED => Ok(()),
        result => driver("cuCtxEnablePeerAccess", result),
    }
}
