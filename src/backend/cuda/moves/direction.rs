//! A stream of saves or of loads, and its progress.

use std::collections::VecDeque;

use crate::backend::Moved;
use crate::backend::cuda::driver::gpu::Gpu;
use crate::backend::cuda::driver::stream::{CudaEvent, CudaStream};
use crate::backend::cuda::error::CudaError;
use crate::id::MoveId;

/// Maximum number of events of a direction. With more parts in flight, the oldest part loses its event. A wait for that
/// part then waits for the next part with an event.
const EVENTS_MAX: usize = 64;

/// The direction of moves between device and swap pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Direction {
    Save,
    Load,
}

impl Direction {
    /// Returns the other direction.
    pub(super) fn other(self) -> Self {
        match self {
            Self::Save => Self::Load,
            Self::Load => Self::Save,
        }
    }

    /// Returns the id in `moved` of this direction.
    pub(super) fn last_in(self, moved: &mut Moved) -> &mut MoveId {
        match self {
            Self::Save => &mut moved.saved,
            Self::Load => &mut moved.loaded,
        }
    }
}

/// A part of a move; a move's parts take effect in order.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct Part {
    id: MoveId,
    number: u32,
}

impl Default for Part {
    /// Returns the last part of move 0, which stands for no move and is done.
    fn default() -> Self {
        Self::last(MoveId::new(0))
    }
}

impl Part {
    /// Returns part `number` of a move's `count` parts.
    pub fn new(id: MoveId, number: u32, count: u32) -> Self {
        if number + 1 < count { Self { id, number } } else { Self::last(id) }
    }

    /// Returns the last part of a move, which may be its only part.
    pub fn last(id: MoveId) -> Self {
        Self { id, number: u32::MAX }
    }
}

/// Moves of one direction, which take effect in order.
#[derive(Debug)]
pub(super) struct MoveQueue {
    pub stream: CudaStream,
    /// Events at the ends of parts in flight, oldest first.
    in_flight: VecDeque<(Part, CudaEvent)>,
    spare: Vec<CudaEvent>,
    /// The last part and the last move that are known to be done.
    done: (Part, MoveId),
}

impl MoveQueue {
    pub fn new(gpu: &Gpu) -> Result<Self, CudaError> {
        let (in_flight, spare) = (VecDeque::with_capacity(EVENTS_MAX), Vec::with_capacity(EVENTS_MAX));
        let done = (Part::default(), MoveId::new(0));
        Ok(Self { stream: CudaStream::new(gpu)?, in_flight, spare, done })
    }

    /// Marks the stream's end as the end of a part.
    pub fn record(&mut self, part: Part) -> Result<(), CudaError> {
        let oldest = match self.in_flight.len() {
            EVENTS_MAX => self.in_flight.pop_front().map(|(_, event)| event),
            _ => self.spare.pop(),
        };
        let mut event = match oldest {
            Some(event) => event,
            None => CudaEvent::new(self.stream.gpu(), false)?,
        };
        event.record(&self.stream)?;
        self.in_flight.push_back((part, event));
        Ok(())
    }

    /// Returns the last move that is done.
    pub fn poll(&mut self) -> Result<MoveId, CudaError> {
        while let Some((part, event)) = self.in_flight.front() {
            if !event.is_done()? {
                break;
            }
            self.done.0 = *part;
            if *part == Part::last(part.id) {
                self.done.1 = part.id;
            }
            self.spare.extend(self.in_flight.pop_front().map(|(_, event)| event));
        }
        Ok(self.done())
    }

    /// Returns the last move that was done at the last [`poll`](Self::poll).
    pub fn done(&self) -> MoveId {
        self.done.1
    }

    /// Makes a stream wait for a part of a move, unless it is done.
    pub fn block(&self, part: Part, stream: &CudaStream) -> Result<(), CudaError> {
        if part <= self.done.0 {
            return Ok(());
        }
        match self.in_flight.iter().find(|(later, _)| *later >= part) {
            Some((_, event)) => event.block(stream),
            // There is no such part, or its submission failed. A failed call has waited for the device.
            None => Ok(()),
        }
    }
}
