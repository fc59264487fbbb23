//! [`StepEnd`]: the record that ends steps on a backend, and its byte form for other ranks.

use super::PlanBytesError;
use crate::id::StepId;

/// Completes or aborts steps on a backend.
///
/// The engine passes it to its own backend. The host passes it to the backends of other ranks, as bytes or as a value,
/// in the engine's order of plans and ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum StepEnd {
    /// Completes this step and all earlier ones. Backends reject the plans of ended steps from now on.
    Complete(StepId),
    /// Aborts this step and all later ones that have begun.
    Abort(StepId),
}

/// Magic number and version of the byte form.
const MAGIC: u64 = u64::from_le_bytes(*b"kvends01");
const COMPLETE: u64 = 1;
const ABORT: u64 = 2;

impl StepEnd {
    /// Length of the byte form, in bytes.
    pub const BYTES: usize = 24;

    /// Returns the byte form, three little-endian words of 64 bits: `"kvends01"`; 1 for [`StepEnd::Complete`] or 2 for
    /// [`StepEnd::Abort`]; the step.
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
    /// [`PlanBytesError::Length`] unless there are [`StepEnd::BYTES`] bytes. [`PlanBytesError::Magic`] for another
    /// record of this length. [`PlanBytesError::StepEnd`] for an unknown kind.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, PlanBytesError> {
        let wrong_length = |_| PlanBytesError::Length { actual: bytes.len() };
        let bytes: [u8; Self::BYTES] = bytes.try_into().map_err(wrong_length)?;
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
    fn wrong_bytes_are_rejected() {
        let bytes = StepEnd::Complete(StepId::new(3)).to_bytes();
        let short = StepEnd::from_bytes(&bytes[..16]);
        assert_eq!(short, Err(PlanBytesError::Length { actual: 16 }));
        let mut wrong_magic = bytes;
        wrong_magic[0] ^= 1;
        assert_eq!(StepEnd::from_bytes(&wrong_magic), Err(PlanBytesError::Magic));
        let mut wrong_kind = bytes;
        wrong_kind[8] = 3;
        assert_eq!(StepEnd::from_bytes(&wrong_kind), Err(PlanBytesError::StepEnd { kind: 3 }));
    }
}
