//! What a correct caller can meet. Our own broken invariant stops the program instead.

mod config;

use std::error::Error as StdError;
use std::fmt;

use crate::id::{Namespace, SeqKey, StepId};

pub use config::ConfigError;

/// A number of things in words: `1 page`, `2 pages`.
pub(crate) struct Count(pub(crate) u64, pub(crate) &'static str);

impl fmt::Display for Count {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}{}", self.0, self.1, if self.0 == 1 { "" } else { "s" })
    }
}

/// Why the engine refused a call. The state is as it was before the call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Error {
    /// Fewer pages are free or evictable, and not promised to others, than the call needs.
    OutOfPages {
        /// Pages that the call needs.
        wanted: u64,
        /// Pages that it could take now.
        available: u64,
        /// The first unfinished step after which it could take so many, if nothing else happens. There is one wherever
        /// all of the pages are promised to the sequences of a plan.
        after: Option<StepId>,
    },
    /// All rows of the sequence table are taken.
    OutOfSequences {
        /// `max_sequences` of the config.
        max: u32,
    },
    /// The running sequences' tokens fill the table (`max_tokens` of the config).
    OutOfTokens {
        /// Tokens that the call needs room for, in whole chunks of the table.
        wanted: u64,
        /// Tokens that fit in the free chunks.
        available: u64,
    },
    /// As many steps are unfinished as the config allows.
    OutOfSteps {
        /// `max_steps` of the config.
        max: u32,
    },
    /// A prompt of no tokens.
    EmptyPrompt,
    /// Pages are hashed, and nobody has said what this namespace is called, or it is forgotten:
    /// [`Engine::name_namespace`](crate::Engine::name_namespace).
    UnnamedNamespace {
        /// The namespace.
        namespace: Namespace,
    },
    /// The namespace is called something else already; the default one has no names.
    NamespaceNamed {
        /// The namespace.
        namespace: Namespace,
    },
    /// Another namespace is called that already, as far as names enter hashes: equal tokens would have equal hashes.
    NamesTaken {
        /// The namespace that was to be called so.
        namespace: Namespace,
        /// The one that is.
        by: Namespace,
    },
    /// A token that is handed in is [`TokenId::PENDING`](crate::TokenId::PENDING), which stands for none.
    PendingToken {
        /// Its position in the sequence.
        position: u32,
    },
    /// A step of more tokens than its plan can number.
    StepTokens {
        /// New tokens of the batch.
        tokens: u64,
        /// The most that a step can have.
        max: u64,
    },
    /// A sequence longer than the pool or `max_sequence_len` allows.
    TooLong {
        /// Its tokens.
        len: u64,
        /// The most that it can have.
        max: u64,
    },
    /// The sequence is finished, or never was.
    UnknownSequence {
        /// The key.
        seq: SeqKey,
    },
    /// The sequence stands twice in one batch, or, among branches to accept, out of its order.
    RepeatedSequence {
        /// The key.
        seq: SeqKey,
    },
    /// The sequence is preempted: `resume` it first.
    Preempted {
        /// The key.
        seq: SeqKey,
    },
    /// The sequence is not preempted.
    NotPreempted {
        /// The key.
        seq: SeqKey,
    },
    /// A plan item of no tokens, or past the sequence's tokens.
    ExtendLen {
        /// The key.
        seq: SeqKey,
        /// The tokens asked for.
        len: u32,
        /// The most that can be planned now.
        max: u32,
    },
    /// A batch of no sequences.
    EmptyBatch,
    /// The last plan of the sequence is complete or does not extend it by so many tokens, or the item stands twice or
    /// out of the plan's order.
    NotPlanned {
        /// The key.
        seq: SeqKey,
        /// The tokens asked for.
        len: u32,
    },
    /// A draft of more tokens than a mask has bits.
    DraftLen {
        /// Its tokens.
        len: u64,
        /// The most that it can have.
        max: u64,
    },
    /// A tree of drafts in which a token follows one behind it.
    DraftParent {
        /// The token.
        token: u32,
        /// The one that it follows.
        parent: u32,
    },
    /// A draft of a sequence that is not in the batch, or not in its order.
    DraftOrder {
        /// The key.
        seq: SeqKey,
    },
    /// A draft with masks or positions that are not one for each new token.
    DraftArrays {
        /// The key.
        seq: SeqKey,
        /// Its masks.
        masks: usize,
        /// Its positions.
        positions: usize,
        /// New tokens of its item.
        len: u32,
    },
    /// A mask without its token's own bit, or with bits of slots that are not there, or behind the token.
    DraftMask {
        /// The key.
        seq: SeqKey,
        /// The token, counted from the item's first.
        token: u32,
        /// Its mask.
        mask: u64,
        /// Its own bit.
        own: u64,
        /// All bits that it may have.
        most: u64,
    },
    /// A draft's position before the first new one, or past its token's slot.
    DraftPosition {
        /// The key.
        seq: SeqKey,
        /// The token, counted from the item's first.
        token: u32,
        /// Its position.
        position: u32,
        /// The first that is allowed.
        min: u32,
        /// The last that is allowed.
        max: u32,
    },
    /// The sequence's last plan is of drafts: [`accept`](crate::Engine::accept) a branch of them first, or abort the
    /// step.
    NotAccepted {
        /// The key.
        seq: SeqKey,
        /// The step that checks the drafts.
        step: StepId,
    },
    /// The step has no drafts of the sequence that wait to be accepted.
    NotDrafted {
        /// The key.
        seq: SeqKey,
        /// The step asked for.
        step: StepId,
    },
    /// What is to be accepted is no branch: a token that does not follow the one before it, or, as the first, is no
    /// root. It follows it if it sees just what that sees and itself, at the next position; a root sees all that stands
    /// before the drafts and itself, at the first position.
    NotABranch {
        /// The key.
        seq: SeqKey,
        /// Its place in what is to be accepted.
        place: usize,
        /// The token, counted from the item's first.
        token: u32,
    },
    /// A tree of drafts in packed arrays, which say nothing of masks: kernels over them would let each token see all
    /// before it.
    PackedTree {
        /// The key.
        seq: SeqKey,
    },
    /// A plan that is not of the items that it is to be packed for.
    PackedRows {
        /// The items.
        items: usize,
        /// The plan's rows.
        rows: usize,
    },
    /// A number that FlashInfer's signed 32-bit arrays cannot hold.
    PackedLimit {
        /// What is counted.
        name: &'static str,
        /// The value.
        value: u64,
        /// The largest that fits.
        max: u64,
    },
    /// A rollback past the sequence's end, or below what it has published.
    RollbackLen {
        /// The length asked for.
        len: u32,
        /// The shortest that is allowed.
        min: u32,
        /// The sequence's tokens now.
        max: u32,
    },
    /// No such step is open for this call.
    UnknownStep {
        /// The step.
        step: StepId,
    },
    /// Steps commit in the order of planning, and another is first.
    StepOrder {
        /// The step asked for.
        step: StepId,
        /// The step whose turn it is.
        first: StepId,
    },
    /// A step up to this one is neither committed nor aborted, so nothing up to it can be complete.
    StepOpen {
        /// The open step.
        step: StepId,
    },
}

impl Error {
    /// Whether the call lacked pages, rows, tokens or steps: it may work once others have ended or steps are complete.
    pub fn is_shortage(&self) -> bool {
        matches!(
            self,
            Self::OutOfPages { .. }
                | Self::OutOfSequences { .. }
                | Self::OutOfTokens { .. }
                | Self::OutOfSteps { .. }
        )
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::OutOfPages { wanted, available, after } => {
                write!(f, "{} needed, {available} available", Count(wanted, "page"))?;
                match after {
                    Some(step) => write!(f, ", enough of them after step {}", step.raw()),
                    None => Ok(()),
                }
            }
            Self::OutOfSequences { max } => match max {
                1 => write!(f, "the only sequence row is taken"),
                _ => write!(f, "all {max} sequence rows are taken"),
            },
            Self::OutOfTokens { wanted, available } => {
                write!(f, "room for {} needed, {available} would fit", Count(wanted, "token"))
            }
            Self::OutOfSteps { max } => {
                write!(f, "no more than {} may be unfinished", Count(max.into(), "step"))
            }
            Self::EmptyPrompt => write!(f, "a prompt has no tokens"),
            Self::UnnamedNamespace { namespace } => {
                write!(f, "pages are hashed, and {namespace:?} has not been named")
            }
            Self::NamespaceNamed { namespace } => {
                write!(f, "{namespace:?} is called something else already")
            }
            Self::NamesTaken { namespace, by } => {
                write!(f, "{namespace:?} cannot be called what {by:?} is called in hashes")
            }
            Self::PendingToken { position } => {
                write!(f, "the token at position {position} is the mark for one that is not known")
            }
            Self::StepTokens { tokens, max } => {
                write!(f, "a step of {} is larger than the limit of {max}", Count(tokens, "token"))
            }
            Self::TooLong { len, max } => {
                write!(f, "a sequence of {} is longer than the limit of {max}", Count(len, "token"))
            }
            Self::UnknownSequence { seq } => write!(f, "sequence {seq:?} is unknown or finished"),
            Self::RepeatedSequence { seq } => {
                write!(f, "sequence {seq:?} stands twice in one batch, or out of its order")
            }
            Self::Preempted { seq } => write!(f, "sequence {seq:?} is preempted"),
            Self::NotPreempted { seq } => write!(f, "sequence {seq:?} is not preempted"),
            Self::ExtendLen { seq, len, max } => {
                let len = Count(len.into(), "token");
                write!(f, "sequence {seq:?} cannot be extended by {len}, ")?;
                match max {
                    0 => write!(f, "it has none to compute"),
                    1 => write!(f, "only by 1"),
                    _ => write!(f, "only by 1 to {max}"),
                }
            }
            Self::EmptyBatch => write!(f, "a batch has no sequences"),
            Self::NotPlanned { seq, len } => {
                let len = Count(len.into(), "token");
                write!(f, "{len} of sequence {seq:?}: not what was planned for it last")
            }
            Self::DraftLen { len, max } => {
                write!(f, "a draft of {} is larger than {max}", Count(len, "token"))
            }
            Self::DraftParent { token, parent } => {
                write!(f, "draft {token} cannot follow draft {parent}, which is behind it")
            }
            Self::DraftOrder { seq } => {
                write!(f, "a draft of sequence {seq:?}, which is not in the batch in this order")
            }
            Self::DraftArrays { seq, masks, positions, len } => {
                let len = Count(len.into(), "draft");
                write!(f, "{masks} masks and {positions} positions for {len} of sequence {seq:?}")
            }
            Self::DraftMask { seq, token, mask, own, most } => {
                write!(
                    f,
                    "mask {mask:#x} of draft {token} of sequence {seq:?} lacks bit {own:#x} "
                )?;
                write!(f, "or has others than {most:#x}")
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
                write!(f, "no drafts of sequence {seq:?} wait in step {}", step.raw())
            }
            Self::NotABranch { seq, place, token } => {
                write!(f, "draft {token} of sequence {seq:?}, accepted at place {place}, ")?;
                match place {
                    0 => write!(f, "is no root"),
                    _ => write!(f, "does not follow the one before it"),
                }
            }
            Self::PackedTree { seq } => {
                write!(f, "packed arrays cannot say what the tree of sequence {seq:?} sees")
            }
            Self::PackedRows { items, rows } => {
                let (rows, items) = (Count(rows as u64, "row"), Count(items as u64, "item"));
                write!(f, "a plan of {rows} is not of {items}")
            }
            Self::PackedLimit { name, value, max } => {
                write!(f, "{value} {name} do not fit packed arrays, which hold up to {max}")
            }
            Self::RollbackLen { len, min, max } => {
                write!(f, "a rollback to {} is outside {min} to {max}", Count(len.into(), "token"))
            }
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

/// An engine's error: the core's, or its backend's.
///
/// Its own sentence says who refused, its [`source`](StdError::source) why: a [`ConfigError`], an [`enum@Error`] or the
/// backend's error. `{error:#}` says both.
///
/// ```
/// # use kvarena::{EngineError, Error, backend::CpuError};
/// use std::error::Error as _;
/// let error = EngineError::<CpuError>::Core(Error::EmptyPrompt);
/// let source = error.source().and_then(|source| source.downcast_ref());
/// assert_eq!(source, Some(&Error::EmptyPrompt));
/// assert_eq!(format!("{error:#}"), "the engine refused the call: a prompt has no tokens");
/// ```
#[derive(Debug, PartialEq)]
#[non_exhaustive]
pub enum EngineError<E> {
    /// The config does not work.
    Config(ConfigError),
    /// The core refused.
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
            Self::Config(error) => ("the config was refused", error),
            Self::Core(error) => ("the engine refused the call", error),
            Self::Backend(error) => ("the backend failed", error),
        };
        f.write_str(who)?;
        if f.alternate() { write!(f, ": {why}") } else { Ok(()) }
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
