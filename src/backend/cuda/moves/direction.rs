//! A stream of saves or of loads, and how far it has come.

use std::collections::VecDeque;

use crate::backend::cuda::driver::gpu::Gpu;
use crate::backend::cuda::driver::stream::{CudaEvent, CudaStream};
use crate::backend::cuda::error::CudaError;
use crate::id::MoveId;

/// Most events of a direction. With more moves in flight, waits for the oldest ones become waits for a later one.
const EVENTS_MAX: usize = 64;

/// Moves of one direction, which take effect in order.
#[derive(Debug)]
pub(super) struct Direction {
    pub stream: CudaStream,
    /// Events at the ends of moves in flight, oldest first.
    in_flight: VecDeque<(MoveId, CudaEvent)>,
    spare: Vec<CudaEvent>,
    /// The last move that is known to be done.
    done: MoveId,
}

impl Direction {
    pub fn new(gpu: &Gpu) -> Result<Self, CudaError> {
        let (in_flight, spare) =
            (VecDeque::with_capacity(EVENTS_MAX), Vec::with_capacity(EVENTS_MAX));
        Ok(Self { stream: CudaStream::new(gpu)?, in_flight, spare, done: MoveId::new(0) })
    }

    /// Marks the stream's end as the end of a move.
    pub fn record(&mut self, id: MoveId) -> Result<(), CudaError> {
        let oldest = match self.in_flight.len() {
            EVENTS_MAX => self.in_flight.pop_front().map(|(_, event)| event),
            _ => self.spare.pop(),
        };
        let mut event = match oldest {
            Some(event) => event,
            None => CudaEvent::new(self.stream.gpu(), false)?,
        };
        event.record(&self.stream)?;
        self.in_flight.push_back((id, event));
        Ok(())
    }

    /// Returns the last move that is done.
    pub fn poll(&mut self) -> Result<MoveId, CudaError> {
        while let Some((id, event)) = self.in_flight.front() {
            if !event.is_done()? {
                break;
            }
            self.done = *id;
            self.spare.extend(self.in_flight.pop_front().map(|(_, event)| event));
        }
        Ok(self.done)
    }

    /// Returns the last move that was done at the last [`poll`](Self::poll).
    pub fn done(&self) -> MoveId {
        self.done
    }

    /// Makes a stream wait for a move, unless it is done.
    pub fn block(&self, id: MoveId, stream: &CudaStream) -> Result<(), CudaError> {
        if id <= self.done {
            return Ok(());
        }
        match self.in_flight.iter().find(|(later, _)| *later >= id) {
            Some((_, event)) => event.block(stream),
            // It failed, and the call that failed has waited for it.
            None => Ok(()),
        }
    }
}
