//! The pinned upload ring: a few pieces of pinned host memory, each used again only after its copies are done.
//!
//! Not here: what is uploaded.

use cust::sys;

use super::error::{CudaError, check};
use super::gpu::Gpu;
use super::memory::PinnedBuffer;
use super::stream::{CudaEvent, RawStream, raw};

/// Slots of pinned memory, taken in turn.
#[derive(Debug)]
pub(super) struct UploadRing {
    memory: PinnedBuffer,
    slot_bytes: usize,
    /// One for each slot: done when the slot's copies are.
    events: Vec<CudaEvent>,
    next: usize,
    sent_bytes: u64,
}

impl UploadRing {
    pub(super) fn new(gpu: &Gpu, slots: usize, slot_bytes: usize) -> Result<Self, CudaError> {
        let slot_bytes = slot_bytes.next_multiple_of(64);
        let memory = PinnedBuffer::new(gpu, slots * slot_bytes)?;
        let events = (0..slots).map(|_| CudaEvent::new(gpu, false)).collect::<Result<_, _>>()?;
        Ok(Self { memory, slot_bytes, events, next: 0, sent_bytes: 0 })
    }

    /// Bytes of one slot.
    pub(super) fn slot_bytes(&self) -> usize {
        self.slot_bytes
    }

    /// Bytes sent so far.
    pub(super) fn sent_bytes(&self) -> u64 {
        self.sent_bytes
    }

    /// The next slot. Waits for its copies only where the host runs a whole ring ahead of the device.
    pub(super) fn acquire(&mut self) -> Result<Upload<'_>, CudaError> {
        let slot = self.next;
        if !self.events[slot].is_done()? {
            self.events[slot].synchronize()?;
        }
        self.next = (slot + 1) % self.events.len();
        let start = slot * self.slot_bytes;
        Ok(Upload { ring: self, slot, start })
    }
}

/// A slot being filled and copied.
#[derive(Debug)]
pub(super) struct Upload<'a> {
    ring: &'a mut UploadRing,
    slot: usize,
    start: usize,
}

impl Upload<'_> {
    /// The slot's bytes, which no copy reads any more.
    pub(super) fn bytes(&mut self) -> &mut [u8] {
        let bytes = self.ring.slot_bytes;
        &mut self.ring.memory.as_mut_slice()[self.start..self.start + bytes]
    }

    /// Copies the slot's first `len` bytes to the device, in the stream's order, and marks when that is done.
    pub(super) fn send(self, len: usize, target: u64, stream: RawStream) -> Result<(), CudaError> {
        assert!(len <= self.ring.slot_bytes);
        // SAFETY: the source is inside the slot, which is not written again before the event below; the target is
        // memory of the stage, at least a slot long.
        let result = unsafe {
            let source = self.ring.memory.host().add(self.start).cast();
            sys::cuMemcpyHtoDAsync_v2(target, source, len, raw(stream))
        };
        check("cuMemcpyHtoDAsync", result)?;
        self.ring.sent_bytes += len as u64;
        self.ring.events[self.slot].record(stream)
    }
}
