//! Tokens become known: sampled, drafted, or the next turn of a conversation.

use crate::config::EngineShape;
use crate::error::Error;
use crate::id::{SeqKey, TokenId};
use crate::sequence::SequenceTable;

/// Appends tokens to a sequence; legal before and after the commit of the step that sampled them. O(tokens).
///
/// # Errors
/// [`Error::UnknownSequence`], [`Error::TooLong`], [`Error::PendingToken`], [`Error::OutOfTokens`]. Nothing changes
/// then.
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
    check_known(row.sequence.token_len, tokens)?;
    row.check_room(len as u32)?;
    row.append_tokens(tokens);
    Ok(())
}

/// Checks that tokens are tokens, to stand from `start` on in a sequence; there are fewer than 2^31.
///
/// # Errors
/// [`Error::PendingToken`].
pub(crate) fn check_known(start: u32, tokens: &[TokenId]) -> Result<(), Error> {
    // Looked at in stretches, which are compared many tokens at a time.
    const STRETCH: usize = 32;
    let pending = |token: &TokenId| *token == TokenId::PENDING;
    for (i, stretch) in tokens.chunks(STRETCH).enumerate() {
        if stretch.iter().fold(false, |any, token| any | pending(token)) {
            let first = i * STRETCH + stretch.iter().position(pending).unwrap_or(0);
            return Err(Error::PendingToken { position: start + first as u32 });
        }
    }
    Ok(())
}
