//! Appends tokens to a sequence: sampled tokens, drafts, or the next turn of a conversation.

use crate::config::EngineShape;
use crate::error::Error;
use crate::id::{SeqKey, TokenId};
use crate::sequence::{Sequence, SequenceTable};
use crate::system::access::access;
use crate::world::World;

access! {
    /// Tables of [`append`].
    struct Append of &mut World {
        shape: &EngineShape,
        sequences: &mut SequenceTable,
    }
}

/// Implements [`Engine::append`](crate::Engine::append). O(tokens).
///
/// # Errors
/// [`Error::UnknownSequence`], [`Error::TooLong`], [`Error::PendingToken`], [`Error::OutOfTokens`]. Nothing changes
/// then.
#[inline] // It only chooses between two calls.
pub(crate) fn append(world: Append<'_>, seq: SeqKey, tokens: &[TokenId]) -> Result<(), Error> {
    let Append { shape, sequences } = world;
    match tokens {
        // Decoding appends one token at a time. The short path saves 5 % of a step's instructions at page_size 16.
        [token] if *token != TokenId::PENDING => push_known(shape, sequences, seq, tokens),
        _ => check_and_push(shape, sequences, seq, tokens),
    }
}

/// Appends tokens that contain no placeholder, if they fit.
fn push_known(
    shape: &EngineShape,
    sequences: &mut SequenceTable,
    seq: SeqKey,
    tokens: &[TokenId],
) -> Result<(), Error> {
    let mut row = sequences.row_mut(seq)?;
    let len = check_len(shape, row.sequence, tokens)?;
    row.check_room(len)?;
    row.append_tokens(tokens);
    Ok(())
}

fn check_and_push(
    shape: &EngineShape,
    sequences: &mut SequenceTable,
    seq: SeqKey,
    tokens: &[TokenId],
) -> Result<(), Error> {
    let sequence = sequences.get(seq)?;
    check_len(shape, sequence, tokens)?;
    check_known(sequence.token_len, tokens)?;
    push_known(shape, sequences, seq, tokens)?;
    sequences.row_mut(seq)?.begin_front(seq);
    Ok(())
}

/// Returns the length of a sequence with more tokens, if it is allowed.
fn check_len(shape: &EngineShape, sequence: &Sequence, tokens: &[TokenId]) -> Result<u32, Error> {
    let len = u64::from(sequence.token_len) + tokens.len() as u64;
    let max = u64::from(shape.max_sequence_len);
    if len > max { Err(Error::TooLong { len, max }) } else { Ok(len as u32) }
}

/// Checks that no token is the placeholder. The first of `tokens` is at position `start`. All positions are below 2^30.
///
/// # Errors
/// [`Error::PendingToken`].
pub(crate) fn check_known(start: u32, tokens: &[TokenId]) -> Result<(), Error> {
    // Chunks are compared by vector instructions.
    const CHUNK: usize = 64;
    let pending = |token: &TokenId| *token == TokenId::PENDING;
    let any = |tokens: &[TokenId]| tokens.iter().fold(false, |any, token| any | pending(token));
    let Some(index) = tokens.chunks(CHUNK).position(any) else { return Ok(()) };
    let before = index * CHUNK;
    let at = before + tokens[before..].iter().position(pending).expect("one was seen");
    Err(Error::PendingToken { position: start + at as u32 })
}
