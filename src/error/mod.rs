//! Errors of calls that the engine rejects: shortages and wrong calls. A broken invariant of the crate panics instead.

mod config;

use std::error::Error as StdError;
use std::fmt;

use crate::id::{Namespace, SeqKey, StepId};

pub use config::ConfigError;

/// A number and its noun: `1 page`, `2 pages`.
pub(crate) struct Count(pub(crate) u64, pub(crate) &'static str);

impl fmt::Display for Count {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}{}", self.0, self.1, if self.0 == 1 { "" } else { "s" })
    }
}

/// The reason why the engine rejected a call. The state is unchanged, unless the method documents otherwise.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Error {
    /// The call needs more pages than are available to it.
    OutOfPages {
        /// Pages that the call needs.
        wanted: u64,
        /// Pages that are available to the call now.
        available: u64,
        /// First unfinished step whose completion makes enough pages available, if no other call comes first. `None`
        /// if the completion of all steps does not suffice. Always present for a plan that takes only promised pages.
        /// With groups of layers, this may be the step after which a prompt is admitted without its hit.
        /// If a plan or a fork lacks pages to [load](crate::Engine::load), the three values concern the load.
        after: Option<StepId>,
    },
    /// The sequence table has too few free rows.
    OutOfSequences {
        /// `max_sequences` of the config.
        max: u32,
    },
    /// The sequence table has too few free chunks (`max_tokens` of the config).
    OutOfTokens {
        /// Tokens for which the call needs memory, in whole chunks.
        wanted: u64,
        /// Tokens that fit in the free chunks.
        available: u64,
    },
    /// `max_steps` steps are unfinished.
    OutOfSteps {
        /// `max_steps` of the config.
        max: u32,
    },
    /// The prompt has no tokens.
    EmptyPrompt,
    /// Pages are hashed, and the namespace has no names or is forgotten. Call
    /// [`Engine::name_namespace`](crate::Engine::name_namespace) first.
    UnnamedNamespace {
        /// The namespace.
        namespace: Namespace,
    },
    /// The namespace already has different names. The names of the default namespace are always empty.
    NamespaceNamed {
        /// The namespace.
        namespace: Namespace,
    },
    /// Another namespace has names with the same effect on hashes, so equal tokens would have equal hashes.
    NamesTaken {
        /// Namespace of the call.
        namespace: Namespace,
        /// Namespace that has the names.
        by: Namespace,
    },
    /// A token of the call is [`TokenId::PENDING`](crate::TokenId::PENDING), the placeholder for unknown tokens.
    PendingToken {
        /// Its position in the sequence.
        position: u32,
    },
    /// The step has more tokens, including padding, than the config allows.
    StepTokens {
        /// New tokens of the step, including padding.
        tokens: u64,
        /// Maximum number of tokens.
        max: u64,
    },
    /// The sequence or its promise would be longer than the pool or `max_sequence_len` allows. From
    /// [`DraftTree::set`](crate::DraftTree::set): a sequence with these drafts would be longer than `u32::MAX`.
    TooLong {
        /// Tokens of the sequence.
        len: u64,
        /// Maximum number of tokens.
        max: u64,
    },
    /// The sequence is finished, or never existed.
    UnknownSequence {
        /// The key.
        seq: SeqKey,
    },
    /// The sequence is repeated in a batch, or out of order among the branches to accept.
    RepeatedSequence {
        /// The key.
        seq: SeqKey,
    },
    /// The sequence is preempted; the host must `resume` it first.
    Preempted {
        /// The key.
        seq: SeqKey,
    },
    /// The sequence is not preempted.
    NotPreempted {
        /// The key.
        seq: SeqKey,
    },
    /// A plan's item has no tokens, or more than the sequence can take.
    ExtendLen {
        /// The key.
        seq: SeqKey,
        /// Requested tokens.
        len: u32,
        /// Maximum number of tokens that can be planned now.
        max: u32,
    },
    /// The batch has no sequences.
    EmptyBatch,
    /// The batch cannot be padded to the size: the size is smaller, has too many tokens for a plan, or has invalid
    /// padding. Each padding row takes at least one padding token; padding tokens need a padding row.
    PlanSize {
        /// Requested rows.
        rows: usize,
        /// Requested tokens.
        tokens: usize,
        /// Sequences of the batch.
        batch_rows: usize,
        /// Tokens of the batch.
        batch_tokens: usize,
    },
    /// The item is not the last plan of its sequence, or is repeated or out of order. Also returned if the plan's step
    /// is complete, or if a rollback has cut the plan.
    NotPlanned {
        /// The key.
        seq: SeqKey,
        /// Requested tokens.
        len: u32,
    },
    /// The draft has more tokens than a mask has bits.
    DraftLen {
        /// Tokens of the draft.
        len: u64,
        /// Maximum number of tokens of a draft.
        max: u64,
    },
    /// A token of a draft tree follows a later token.
    DraftParent {
        /// The token.
        token: u32,
        /// The token that it follows.
        parent: u32,
    },
    /// The sequence of a draft is not in the batch, or out of order.
    DraftOrder {
        /// The key.
        seq: SeqKey,
    },
    /// The draft does not have one mask and one position for each new token.
    DraftArrays {
        /// The key.
        seq: SeqKey,
        /// Number of masks.
        masks: usize,
        /// Number of positions.
        positions: usize,
        /// New tokens of the draft's item.
        len: u32,
    },
    /// The mask of a draft token lacks the token's own bit, or has bits of later tokens, or bits before the sequence's
    /// first token.
    DraftMask {
        /// The key.
        seq: SeqKey,
        /// The token, counted from the item's first.
        token: u32,
        /// Mask of the token.
        mask: u64,
        /// The token's own bit.
        own: u64,
        /// All bits that the mask may have.
        most: u64,
    },
    /// The position of a draft token is before the first new position, or above the sum of that position and the
    /// token's index in the item.
    DraftPosition {
        /// The key.
        seq: SeqKey,
        /// The token, counted from the item's first.
        token: u32,
        /// Position of the token.
        position: u32,
        /// The lowest position that is allowed.
        min: u32,
        /// The highest position that is allowed.
        max: u32,
    },
    /// The sequence's last plan has drafts: the host must [`accept`](crate::Engine::accept) a branch first, or abort
    /// the step.
    NotAccepted {
        /// The key.
        seq: SeqKey,
        /// The step that checks the drafts.
        step: StepId,
    },
    /// The step has no waiting drafts of the sequence.
    NotDrafted {
        /// The key.
        seq: SeqKey,
        /// The requested step.
        step: StepId,
    },
    /// The tokens to accept are not a branch: the first is not a root, or another does not follow its predecessor.
    ///
    /// A root is at the first new position and sees itself and all tokens before the drafts. A token follows another if
    /// it is at the next position and sees exactly itself and the tokens that the other sees.
    NotABranch {
        /// The key.
        seq: SeqKey,
        /// Index of the token in the branch.
        place: usize,
        /// The token, counted from the item's first.
        token: u32,
    },
    /// The item is a tree of drafts. FlashInfer's packed arrays have no masks, so they cannot describe it.
    PackedTree {
        /// The key.
        seq: SeqKey,
    },
    /// The plan's number of sequences, without padding, differs from the number of items to pack.
    PackedRows {
        /// The items.
        items: usize,
        /// Rows of the plan.
        rows: usize,
    },
    /// A number does not fit FlashInfer's signed 32-bit arrays.
    PackedLimit {
        /// Name of the number.
        name: &'static str,
        /// The value.
        value: u64,
        /// The largest that fits.
        max: u64,
    },
    /// The new length of a sequence is 0, below the tokens of its published and pending pages, or above its tokens.
    RollbackLen {
        /// The requested length.
        len: u32,
        /// The shortest that is allowed.
        min: u32,
        /// Tokens of the sequence.
        max: u32,
    },
    /// A mark is below the tokens of the sequence's published and pending pages.
    MarkLen {
        /// The requested length.
        len: u32,
        /// The shortest that is allowed.
        min: u32,
    },
    /// The sequence has the maximum number of waiting marks from [`Engine::mark`](crate::Engine::mark).
    OutOfMarks {
        /// Maximum number of waiting marks.
        max: u32,
    },
    /// Stores do not support models with groups of layers.
    StoreGroups {
        /// Number of groups.
        groups: u32,
    },
    /// The step is not open, or was never planned.
    UnknownStep {
        /// The step.
        step: StepId,
    },
    /// Steps commit in the order of planning, and an earlier step is open.
    StepOrder {
        /// The requested step.
        step: StepId,
        /// The first open step.
        first: StepId,
    },
    /// The step to complete, or an earlier one, is neither committed nor aborted.
    StepOpen {
        /// The open step.
        step: StepId,
    },
}

impl Error {
    /// Returns whether the call lacked pages, rows, tokens or steps, so that a later call may succeed.
    pub fn is_shortage(&self) -> bool {
        matches!(
            self,
            Self::OutOfPages { .. } | Self::OutOfSequences { .. } | Self::OutOfTokens { .. } | Self::OutOfSteps { .. }
        )
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::OutOfPages { wanted, available, after } => {
                write!(f, "{} needed, {available} available", Count(wanted, "page"))?;
                match after {
                    Some(step) => write!(f, ", enough after step {}", step.raw()),
                    None => Ok(()),
                }
            }
            Self::OutOfSequences { max } => match max {
                1 => write!(f, "there is only one sequence row"),
                _ => write!(f, "too few of the {max} sequence rows are free"),
            },
            Self::OutOfTokens { wanted, available } => {
                write!(f, "memory for {} needed, {available} fit", Count(wanted, "token"))
            }
            Self::OutOfSteps { max } => {
                write!(f, "at most {} may be unfinished", Count(max.into(), "step"))
            }
            Self::EmptyPrompt => write!(f, "a prompt has no tokens"),
            Self::UnnamedNamespace { namespace } => {
                write!(f, "pages are hashed, but {namespace:?} has no names")
            }
            Self::NamespaceNamed { namespace } => {
                write!(f, "{namespace:?} has other names already")
            }
            Self::NamesTaken { namespace, by } => {
                write!(f, "{namespace:?} cannot have the names that {by:?} has in hashes")
            }
            Self::PendingToken { position } => {
                write!(f, "the token at position {position} is the placeholder for unknown tokens")
            }
            Self::StepTokens { tokens, max } => {
                write!(f, "a step of {} is larger than the limit of {max}", Count(tokens, "token"))
            }
            Self::TooLong { len, max } => {
                write!(f, "a sequence of {} is longer than the limit of {max}", Count(len, "token"))
            }
            Self::UnknownSequence { seq } => write!(f, "sequence {seq:?} is unknown or finished"),
            Self::RepeatedSequence { seq } => {
                write!(f, "sequence {seq:?} is repeated in a batch, or out of order")
            }
            Self::Preempted { seq } => write!(f, "sequence {seq:?} is preempted"),
            Self::NotPreempted { seq } => write!(f, "sequence {seq:?} is not preempted"),
            Self::ExtendLen { seq, len, max } => {
                let len = Count(len.into(), "token");
                write!(f, "sequence {seq:?} cannot be extended by {len}, ")?;
                match max {
                    0 => write!(f, "it has no tokens to compute"),
                    1 => write!(f, "only by 1"),
                    _ => write!(f, "only by 1 to {max}"),
                }
            }
            Self::EmptyBatch => write!(f, "a batch has no sequences"),
            Self::PlanSize { rows, tokens, batch_rows, batch_tokens } => {
                let of = |rows: usize, tokens: usize| (Count(rows as u64, "row"), Count(tokens as u64, "token"));
                let ((rows, tokens), batch) = (of(rows, tokens), of(batch_rows, batch_tokens));
                write!(f, "a batch of {} and {} cannot be padded ", batch.0, batch.1)?;
                write!(f, "to {rows} and {tokens}")
            }
            Self::NotPlanned { seq, len } => {
                let len = Count(len.into(), "token");
                write!(f, "an item of {len} is not the last plan of sequence {seq:?}, ")?;
                write!(f, "or is out of order")
            }
            Self::DraftLen { len, max } => {
                write!(f, "a draft of {} is larger than {max}", Count(len, "token"))
            }
            Self::DraftParent { token, parent } => {
                write!(f, "draft {token} cannot follow draft {parent}, which is later")
            }
            Self::DraftOrder { seq } => {
                write!(f, "sequence {seq:?} of a draft is not in the batch, or out of order")
            }
            Self::DraftArrays { seq, masks, positions, len } => {
                let len = Count(len.into(), "draft");
                write!(f, "{masks} masks and {positions} positions for {len} of sequence {seq:?}")
            }
            Self::DraftMask { seq, token, mask, own, most } => {
                write!(f, "mask {mask:#x} of draft {token} of sequence {seq:?} lacks bit {own:#x} ")?;
                write!(f, "or has bits outside {most:#x}")
            }
            Self::DraftPosition { seq, token, position, min, max } => {
                write!(f, "position {position} of draft {token} of sequence {seq:?} ")?;
                write!(f, "is outside {min} to {max}")
            }
            Self::NotAccepted { seq, step } => {
                write!(f, "no branch of the drafts of sequence {seq:?} ")?;
                write!(f, "in step {} is accepted yet", step.raw())
            }
            Self::NotDrafted { seq, step } => {
                write!(f, "step {} has no waiting drafts of sequence {seq:?}", step.raw())
            }
            Self::NotABranch { seq, place, token } => {
                write!(f, "draft {token} of sequence {seq:?}, accepted at place {place}, ")?;
                match place {
                    0 => write!(f, "is not a root"),
                    _ => write!(f, "does not follow the one before it"),
                }
            }
            Self::PackedTree { seq } => {
                write!(f, "packed arrays cannot describe the draft tree of sequence {seq:?}")
            }
            Self::PackedRows { items, rows } => {
                let (rows, items) = (Count(rows as u64, "row"), Count(items as u64, "item"));
                write!(f, "a plan of {rows} does not match {items}")
            }
            Self::PackedLimit { name, value, max } => {
                write!(f, "{value} {name} do not fit packed arrays, which hold up to {max}")
            }
            Self::RollbackLen { len, min, max } => {
                write!(f, "a rollback to {} is outside {min} to {max}", Count(len.into(), "token"))
            }
            Self::MarkLen { len, min } => {
                let len = Count(len.into(), "token");
                write!(f, "a mark at {len} is below the {min} published ones")
            }
            Self::StoreGroups { groups } => {
                write!(f, "stores do not support models with {groups} groups of layers")
            }
            Self::OutOfMarks { max } => write!(f, "{max} marks wait in the sequence already"),
            Self::UnknownStep { step } => write!(f, "step {} is not open", step.raw()),
            Self::StepOrder { step, first } => {
                write!(f, "step {} cannot commit before step {}", step.raw(), first.raw())
            }
            Self::StepOpen { step } => {
                write!(f, "step {} is neither committed nor aborted", step.raw())
            }
        }
    }
}

impl StdError for Error {}

/// An error of an engine: of its config, its core or its backend.
///
/// The message includes the reason, for callers that keep only the text. The [`source`](StdError::source) is the reason
/// as a value: a [`ConfigError`], an [`enum@Error`] or the backend's error.
///
/// ```
/// # use kvarena::{EngineError, Error, backend::CpuError};
/// use std::error::Error as _;
/// let error = EngineError::<CpuError>::Core(Error::EmptyPrompt);
/// let source = error.source().and_then(|source| source.downcast_ref());
/// assert_eq!(source, Some(&Error::EmptyPrompt));
/// assert_eq!(error.to_string(), "the engine rejected the call: a prompt has no tokens");
/// ```
#[derive(Debug, PartialEq)]
#[non_exhaustive]
pub enum EngineError<E> {
    /// The config is invalid, or the engine cannot create its tables.
    Config(ConfigError),
    /// The engine rejected the call.
    Core(Error),
    /// The backend failed.
    Backend(E),
}

impl<E> From<ConfigError> for EngineError<E> {
    fn from(error: ConfigError) -> Self {
        Self::Config(error)
    }
}

impl<E> From<Error> for EngineError<E> {
    fn from(error: Error) -> Self {
        Self::Core(error)
    }
}

impl<E: fmt::Display> fmt::Display for EngineError<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (who, why): (_, &dyn fmt::Display) = match self {
            Self::Config(error) => ("the engine rejected the config", error),
            Self::Core(error) => ("the engine rejected the call", error),
            Self::Backend(error) => ("the backend failed", error),
        };
        write!(f, "{who}: {why}")
    }
}

impl<E: StdError + 'static> StdError for EngineError<E> {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        match self {
            Self::Config(error) => Some(error),
            Self::Core(error) => Some(error),
            Self::Backend(error) => Some(error),
        }
    }
}
