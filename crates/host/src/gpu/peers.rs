//! Sums over ranks in peer memory (`ptx/src/sum_ranks.cu`): each rank's kernels write into memory on the other ranks'
//! GPUs.
//!
//! `Peers::connect` allocates all this memory by `cuMemAlloc` before the first step, because peer access does not cover
//! CUDA's memory pools. The last rank frees it after all ranks have finished their work.
//!
//! `sums.rs` chooses between NCCL and this memory.

use std::ptr::null_mut;
use std::sync::Arc;

use cudarc::driver::sys;
use kvarena::backend::cuda::Gpu;

use super::device::Device;
use super::error::{GpuError, driver};
use super::kernels::{RANKS_MAX, SUM_BLOCKS, SumRanksParams};

/// Maximum number of bytes that a rank sends in a sum. For more bytes, sending all of them to every rank is slower than
/// NCCL.
const SENT_MAX: usize = 2 << 20;
const UNIT_BYTES: usize = 16;
const UNIT_NUMBERS: usize = UNIT_BYTES / 2;
/// Each byte of an empty word (`EMPTY` of `ptx/src/sum_ranks.cu`).
const EMPTY_BYTE: u8 = 0xff;

/// The memory on one rank's GPU: its inboxes, and for each block the number of sums in which it had units.
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

    /// Sets bytes from `start` on, and waits for the write.
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
            // SAFETY: allocated once, freed once; all ranks have waited for their work (`Peers::drop`).
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

/// A rank's view of the memory of all ranks.
#[derive(Debug)]
pub struct Peers {
    rank: usize,
    /// Maximum number of 16-byte units of a sum.
    capacity: usize,
    memory: Arc<Vec<Memory>>,
}

impl Peers {
    /// Lets these GPUs access each other's memory, and allocates the memory of one rank on each GPU.
    ///
    /// # Errors
    /// [`GpuError::NoPeer`] if a GPU cannot access a peer; otherwise an error of the driver.
    ///
    /// # Panics
    /// If there is only one GPU, or more than [`RANKS_MAX`].
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

    /// Returns the maximum number of elements of a sum.
    pub fn max_elements(&self) -> usize {
        self.capacity * UNIT_NUMBERS
    }

    /// Adds the sum of y over all ranks to x, in bf16 and in the stream's order. The sum is computed in f32, in the
    /// order of ranks, and rounded once. If all ranks begin with the same x, they get the same x. A count of 0 only
    /// prepares the kernel.
    ///
    /// # Panics
    /// If there are more numbers than [`Peers::max_elements`], or if the count is not a multiple of 8.
    ///
    /// # Safety
    /// Until the sum is done the addresses are this rank's memory of that many numbers, aligned to 16 bytes. The device
    /// is this rank's. All ranks submit the same sums in the same order, each in one stream.
    pub unsafe fn add(&self, device: &Device, x: u64, y: u64, count: usize) -> Result<(), GpuError> {
        let max = self.max_elements();
        assert!(count <= max, "{count} numbers are more than {max}");
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
        // SAFETY: there is memory for that many units (asserted); the caller guarantees the rest.
        unsafe { device.kernels.sum_ranks.launch(device.raw(), (blocks as u32, 1), 512, &params) }
    }
}

impl Drop for Peers {
    fn drop(&mut self) {
        // Pending work of this rank accesses the memory of all ranks; the last rank frees it.
        let _ = finish(&self.memory[self.rank].gpu);
    }
}

/// Returns the bytes of a rank's two inboxes. Each has a part for every rank.
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

/// Enables a GPU's kernels to access the memory of a peer.
fn reach(gpu: &Gpu, peer: &Gpu) -> Result<(), GpuError> {
    peer.bind()?;
    let mut context = null_mut();
    // SAFETY: `context` is valid memory for one handle.
    driver("cuCtxGetCurrent", unsafe { sys::cuCtxGetCurrent(&mut context) })?;
    gpu.bind()?;
    // SAFETY: both contexts are retained; a context is bound.
    match unsafe { sys::cuCtxEnablePeerAccess(context, 0) } {
        // Access was already enabled, by NCCL or for an earlier model.
        sys::CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED => Ok(()),
        result => driver("cuCtxEnablePeerAccess", result),
    }
}
