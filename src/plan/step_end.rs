//! The end of steps: [`StepEnd`], the record that backends receive, and its byte form for other ranks.
//!
//! Not here: the end of a step in the engine (`system/complete.rs`, `system/abort.rs`), the set of open steps
//! (`backend/open_steps.rs`).

use super::PlanBytesError;
use crate::id::StepId;

/// The steps that end, completed or aborted. An engine passes it to its own backend. The host passes it to backends of
/// other ranks, as bytes or as a value, in the order of plans and ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum StepEnd {
    /// This step and all earlier ones are complete: their plans are no longer used.
    Complete(StepId),
    /// This step and all later ones are undone.
    Abort(StepId),
}

/// Marks the byte form, and its version.
const MAGIC: u64 = u64::from_le_bytes(*b"kvends01");
const COMPLETE: u64 = 1;
const ABORT: u64 = 2;

impl StepEnd {
    /// Bytes of the byte form.
    pub const BYTES: usize = 24;

    /// Returns the byte form: three little-endian words of 64 bits, `"kvends01"`, 1 to complete or 2 to abort, and the
    /// step.
    pub fn to_bytes(self) -> [u8; Self::BYTES] {
        let (kind, step) = match self {
            Self::Complete(step) => (COMPLETE, step),
            Self::Abort(step) => (ABORT, step),
        };
        bytemuck::cast([MAGIC, kind, step.raw()])
    }

    /// Reads the byte form.
    ///
    /// # Errors
    /// [`PlanBytesError::Length`], [`PlanBytesError::Magic`] for other bytes such as a plan, and
    /// [`PlanBytesError::StepEnd`].
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, PlanBytesError> {
        let length = |_| PlanBytesError::Length { actual: bytes.len() };
        let bytes: [u8; Self::BYTES] = bytes.try_into().map_err(length)?;
        let [magic, kind, step] = bytemuck::cast::<_, [u64; 3]>(bytes);
        match (magic, kind) {
            (MAGIC, COMPLETE) => Ok(Self::Complete(StepId::new(step))),
            (MAGIC, ABORT) => Ok(Self::Abort(StepId::new(step))),
            (MAGIC, kind) => Err(PlanBytesError::StepEnd { kind }),
            _ => Err(PlanBytesError::Magic),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_byte_form_is_as_documented() {
        let abort = StepEnd::Abort(StepId::new(0x0102)).to_bytes();
        assert_eq!(abort, *b"kvends01\x02\0\0\0\0\0\0\0\x02\x01\0\0\0\0\0\0");
        for end in [StepEnd::Abort, StepEnd::Complete] {
            let end = end(StepId::new(u64::MAX - 7));
            assert_eq!(StepEnd::from_bytes(&end.to_bytes()), Ok(end));
        }
    }

    #[test]
    fn other_bytes_are_refused() {
        let bytes = StepEnd::Complete(StepId::new(3)).to_bytes();
        let short = StepEnd::from_bytes(&bytes[..16]);
        assert_eq!(short, Err(PlanBytesError::Length { actual: 16 }));
        let mut other = bytes;
        other[0] ^= 1;
        assert_eq!(StepEnd::from_bytes(&other), Err(PlanBytesError::Magic));
        let mut kind = bytes;
        kind[8] = 3;
        assert_eq!(StepEnd::from_bytes(&kind), Err(PlanBytesError::StepEnd { kind: 3 }));
    }
}
