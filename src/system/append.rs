//! Tokens become known: sampled, drafted, or the next turn of a conversation.

use crate::config::EngineShape;
use crate::error::Error;
use crate::id::{SeqKey, TokenId};
use crate::sequence::SequenceTable;

/// Appends tokens to a sequence; legal before and after the commit of the step that sampled them. O(tokens).
///
/// # Errors
/// [`Error::UnknownSequence`], [`Error::TooLong`], [`Error::OutOfTokens`]. Nothing changes then.
pub(crate) fn append(
    shape: &EngineShape,
    sequences: &mut SequenceTable,
    seq: SeqKey,
    tokens: &[TokenId],
) -> Result<(), Error> {
    let mut row = sequences.row_mut(seq)?;
    let (len, max) = (
        u64::from(row.sequence.token_len) + tokens.len() as u64,
        u64::from(shape.max_sequence_len),
    );
    if len > max {
        return Err(Error::TooLong { len, max });
    }
    row.check_room(len as u32)?;
    row.append_tokens(tokens);
    Ok(())
}
