//! The pinned upload ring: a few slots of pinned memory. The host rewrites a slot only after the device has read it.
//!
//! The kernel that reads a slot then writes the slot's ticket to pinned memory. An upload therefore costs the host one
//! launch, without a copy or an event.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::backend::cuda::driver::gpu::Gpu;
use crate::backend::cuda::driver::launch::Start;
use crate::backend::cuda::driver::memory::{DeviceBuffer, PinnedBuffer};
use crate::backend::cuda::driver::raw::{RawStream, raw};
use crate::backend::cuda::driver::sys;
use crate::backend::cuda::error::{CudaError, check};
use crate::backend::cuda::kernels::LOAD_PLAN;
use crate::backend::cuda::kernels::params::LoadPlanParams;

/// Slots of pinned memory, used in turn.
#[derive(Debug)]
pub struct UploadRing {
    memory: PinnedBuffer,
    slot_bytes: usize,
    /// The last ticket that a reader of each slot has written, `u64 [slots]`.
    done: PinnedBuffer,
    /// Block counters of the readers, `u32 [slots]`.
    counters: DeviceBuffer,
    /// For each slot, the last ticket issued for it, and the index of the ticket's stream among the backend's streams.
    sent: Vec<(u64, u32)>,
    /// Number of earlier streams of the backend.
    turn: u32,
    next: usize,
    ticket: u64,
    sent_bytes: u64,
}

/// The contents of a slot: an image at its start, and table writes at an offset.
#[derive(Clone, Copy, Debug)]
pub struct Payload {
    /// Bytes of the image; the kernel copies whole units of 16 bytes.
    pub image_bytes: usize,
    /// Device address of the image.
    pub image: u64,
    /// Offset of the table writes in the slot, a multiple of 8.
    pub writes_at: usize,
    /// Number of table writes, which are checked.
    pub writes: usize,
    /// Device address of the page tables.
    pub words: u64,
}

impl UploadRing {
    pub fn new(gpu: &Gpu, slots: usize, slot_bytes: usize) -> Result<Self, CudaError> {
        let slot_bytes = slot_bytes.next_multiple_of(64);
        let mut counters = DeviceBuffer::lasting(gpu, (slots * size_of::<u32>()) as u64)?;
        counters.fill(0)?;
        Ok(Self {
            memory: PinnedBuffer::new(gpu, slots * slot_bytes)?,
            slot_bytes,
            done: PinnedBuffer::new(gpu, slots * size_of::<u64>())?,
            counters,
            sent: vec![(0, 0); slots],
            turn: 0,
            next: 0,
            ticket: 0,
            sent_bytes: 0,
        })
    }

    pub fn slot_bytes(&self) -> usize {
        self.slot_bytes
    }

    pub fn sent_bytes(&self) -> u64 {
        self.sent_bytes
    }

    /// Returns the next slot; `stream` is the backend's. Waits for the slot's reader only if the host is a whole ring
    /// ahead of the device.
    pub fn acquire(&mut self, stream: RawStream) -> Result<Upload<'_>, CudaError> {
        let slot = self.next;
        let (ticket, turn) = self.sent[slot];
        while self.read(slot) < ticket {
            // SAFETY: it is the backend's stream.
            let result = unsafe { sys::cuStreamQuery(raw(stream)) };
            match check("cuStreamQuery", result) {
                Ok(()) if turn == self.turn => break,
                // The reader's stream may be destroyed, so only the slot's ticket shows that the reader is done.
                Ok(()) | Err(CudaError::Driver { code: 600, .. }) => std::thread::yield_now(),
                Err(error) => return Err(error),
            }
        }
        self.next = (slot + 1) % self.sent.len();
        let start = slot * self.slot_bytes;
        Ok(Upload { ring: self, slot, start })
    }

    /// Sends an image without table writes.
    pub fn send_image(&mut self, gpu: &Gpu, image: &[u8], address: u64, stream: RawStream) -> Result<(), CudaError> {
        let mut upload = self.acquire(stream)?;
        upload.bytes()[..image.len()].copy_from_slice(image);
        let payload = Payload { image_bytes: image.len(), image: address, writes_at: 0, writes: 0, words: 0 };
        upload.send(gpu, &payload, stream)
    }

    /// Records that the backend switches to another stream.
    pub fn switch_stream(&mut self) {
        self.turn += 1;
    }

    /// Returns the last ticket that a slot's reader has written.
    fn read(&self, slot: usize) -> u64 {
        // SAFETY: the slot is inside `done` and 8-byte aligned (pinned memory is page aligned), and the device writes
        // it as one word.
        let done = unsafe { &*self.done.host_address().cast::<AtomicU64>().add(slot) };
        done.load(Ordering::Acquire)
    }
}

#[derive(Debug)]
pub struct Upload<'a> {
    ring: &'a mut UploadRing,
    slot: usize,
    start: usize,
}

impl Upload<'_> {
    /// Returns the slot's bytes, which the device no longer reads.
    pub fn bytes(&mut self) -> &mut [u8] {
        let bytes = self.ring.slot_bytes;
        &mut self.ring.memory.as_mut_slice()[self.start..self.start + bytes]
    }

    /// Launches the kernel that reads the slot, in the stream's order. The context is bound.
    pub fn send(self, gpu: &Gpu, payload: &Payload, stream: RawStream) -> Result<(), CudaError> {
        let ring = self.ring;
        let units = payload.image_bytes.div_ceil(16);
        let end = payload.writes_at + payload.writes * 8;
        assert!(units * 16 <= ring.slot_bytes && (payload.writes == 0 || end <= ring.slot_bytes));
        let count = units.max(payload.writes) as u32;
        if count == 0 {
            return Ok(());
        }
        ring.ticket += 1;
        let slot = self.slot as u64;
        let params = LoadPlanParams {
            source: ring.memory.address() + self.start as u64,
            image: payload.image,
            words: payload.words,
            counter: ring.counters.address() + 4 * slot,
            done: ring.done.address() + 8 * slot,
            ticket: ring.ticket,
            units: units as u32,
            writes_at: payload.writes_at as u32,
            writes: payload.writes as u32,
            reserved: 0,
        };
        // SAFETY: source and writes are inside the slot (asserted), which is not rewritten before its ticket returns.
        // The target has memory for the image, and the writes were checked.
        unsafe {
            gpu.launch(
                LOAD_PLAN,
                (count.div_ceil(LOAD_PLAN.threads()), 1),
                (LOAD_PLAN.threads(), 1),
                stream,
                &params,
                Start::InOrder,
            )
        }?;
        ring.sent[self.slot] = (ring.ticket, ring.turn);
        ring.sent_bytes += (payload.image_bytes + payload.writes * 8) as u64;
        Ok(())
    }
}
