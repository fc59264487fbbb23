//! Errors of calls that the engine rejects: shortages and wrong calls. A broken invariant of the crate panics instead.

mod config;
mod displayed;

use std::error::Error as StdError;
use std::fmt;

use crate::id::{Namespace, SeqKey, StepId};

pub use config::ConfigError;
pub(crate) use displayed::{Count, displayed};

displayed! {
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
            /// First unfinished step whose completion makes enough pages available, if no other call comes first.
            /// `None` if the completion of all steps does not suffice. Always present for a plan that takes only
            /// promised pages. With groups of layers, this may be the step after which a prompt is admitted without its
            /// hit. If a plan or a fork lacks pages to [load](crate::Engine::load), the three values concern the load.
            after: Option<StepId>,
        } => "{} needed, {available} available{}", Count(wanted, "page"),
            after.map_or(String::new(), |step| format!(", enough after step {}", step.raw()));
        /// The sequence table has too few free rows (`max_sequences` of the config).
        OutOfSequences { max: u32 } => "{}", match max {
            1 => "there is only one sequence row".into(),
            _ => format!("too few of the {max} sequence rows are free"),
        };
        /// The sequence table has too few free leaves (`max_tokens` of the config).
        OutOfTokens {
            /// Tokens for which the call needs memory, in whole leaves.
            wanted: u64,
            /// Tokens that fit in the free leaves.
            available: u64,
        } => "memory for {} needed, {available} fit", Count(wanted, "token");
        /// `max_steps` steps are unfinished.
        OutOfSteps { max: u32 } => "at most {} may be unfinished", Count(max, "step");
        /// The sequence has more pages than a row of the host's page table.
        TableWidth { seq: SeqKey, pages: u32, width: usize } =>
            "sequence {seq:?} has {} and a row of the table only {width}", Count(pages, "page");
        /// The host's page table has another length than its rows times their width.
        TableLen { actual: usize, wanted: usize } =>
            "a page table of {} instead of {wanted}", Count(actual as u64, "word");
        /// The prompt has no tokens.
        EmptyPrompt => "a prompt has no tokens";
        /// Pages are hashed, and the namespace has no names or is forgotten. Call
        /// [`Engine::name_namespace`](crate::Engine::name_namespace) first.
        UnnamedNamespace { namespace: Namespace } => "pages are hashed, but {namespace:?} has no names";
        /// The namespace already has different names. The names of the default namespace are always empty.
        NamespaceNamed { namespace: Namespace } => "{namespace:?} has other names already";
        /// Another namespace has names with the same effect on hashes, so equal tokens would have equal hashes.
        NamesTaken {
            /// Namespace of the call.
            namespace: Namespace,
            /// Namespace that has the names.
            by: Namespace,
        } => "{namespace:?} cannot have the names that {by:?} has in hashes";
        /// A token of the call is [`TokenId::PENDING`](crate::TokenId::PENDING), the placeholder for unknown tokens.
        PendingToken {
            /// Its position in the sequence.
            position: u32,
        } => "the token at position {position} is the placeholder for unknown tokens";
        /// The step has more tokens, including padding, than the config allows.
        StepTokens { tokens: u64, max: u64 } =>
            "a step of {} is larger than the limit of {max}", Count(tokens, "token");
        /// The sequence or its promise would be longer than `max_sequence_len`, or than the longest one that fits an
        /// empty pool. From [`DraftTree::set`](crate::plan::DraftTree::set): a sequence with these drafts would be
        /// longer than `u32::MAX`.
        TooLong { len: u64, max: u64 } => "a sequence of {} is longer than the limit of {max}", Count(len, "token");
        /// The sequence is finished, or never existed.
        UnknownSequence { seq: SeqKey } => "sequence {seq:?} is unknown or finished";
        /// The sequence is repeated in a batch, or out of order among the branches to accept.
        RepeatedSequence { seq: SeqKey } => "sequence {seq:?} is repeated in a batch, or out of order";
        /// The sequence is preempted; the host must `resume` it first.
        Preempted { seq: SeqKey } => "sequence {seq:?} is preempted";
        /// The sequence is not preempted.
        NotPreempted { seq: SeqKey } => "sequence {seq:?} is not preempted";
        /// A plan's item has no tokens, or more than the sequence can take.
        ExtendLen {
            seq: SeqKey,
            /// Requested tokens.
            len: u32,
            /// Maximum number of tokens that can be planned now.
            max: u32,
        } => "sequence {seq:?} cannot be extended by {}, {}", Count(len, "token"), match max {
            0 => "it has no tokens to compute".into(),
            1 => "only by 1".into(),
            _ => format!("only by 1 to {max}"),
        };
        /// The batch has no sequences.
        EmptyBatch => "a batch has no sequences";
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
        } => "a batch of {} and {} cannot be padded to {} and {}", Count(batch_rows, "row"),
            Count(batch_tokens, "token"), Count(rows, "row"), Count(tokens, "token");
        /// The item is not the last plan of its sequence, or is repeated or out of order. Also returned if the plan's
        /// step is complete, or if a rollback has cut the plan.
        NotPlanned {
            seq: SeqKey,
            /// Requested tokens.
            len: u32,
        } => "an item of {} is not the last plan of sequence {seq:?}, or is out of order", Count(len, "token");
        /// The draft has more tokens than a mask has bits.
        DraftLen { len: u64, max: u64 } => "a draft of {} is larger than {max}", Count(len, "token");
        /// A token of a draft tree follows a later token.
        DraftParent {
            token: u32,
            /// The token that it follows.
            parent: u32,
        } => "draft {token} cannot follow draft {parent}, which is later";
        /// The sequence of a draft is not in the batch, or out of order.
        DraftOrder { seq: SeqKey } => "sequence {seq:?} of a draft is not in the batch, or out of order";
        /// The draft does not have one mask and one position for each new token.
        DraftArrays {
            seq: SeqKey,
            masks: usize,
            positions: usize,
            /// New tokens of the draft's item.
            len: u32,
        } => "{masks} masks and {positions} positions for {} of sequence {seq:?}", Count(len, "draft");
        /// The mask of a draft token lacks the token's own bit, or has bits of later tokens, or bits before the
        /// sequence's first token.
        DraftMask {
            seq: SeqKey,
            /// The token, counted from the item's first.
            token: u32,
            mask: u64,
            /// The token's own bit.
            own: u64,
            /// All bits that the mask may have.
            most: u64,
        } => "mask {mask:#x} of draft {token} of sequence {seq:?} lacks bit {own:#x} or has bits outside {most:#x}";
        /// The position of a draft token is before the first new position, or above the sum of that position and the
        /// token's index in the item.
        DraftPosition {
            seq: SeqKey,
            /// The token, counted from the item's first.
            token: u32,
            position: u32,
            min: u32,
            max: u32,
        } => "position {position} of draft {token} of sequence {seq:?} is outside {min} to {max}";
        /// The sequence's last plan has drafts: the host must [`accept`](crate::Engine::accept) a branch first, or
        /// abort the step.
        NotAccepted {
            seq: SeqKey,
            /// The step that checks the drafts.
            step: StepId,
        } => "no branch of the drafts of sequence {seq:?} in step {} is accepted yet", step.raw();
        /// The step has no waiting drafts of the sequence.
        NotDrafted { seq: SeqKey, step: StepId } => "step {} has no waiting drafts of sequence {seq:?}", step.raw();
        /// The tokens to accept are not a branch: the first is not a root, or another does not follow its predecessor.
        ///
        /// A root is at the first new position and sees itself and all tokens before the drafts. A token follows
        /// another if it is at the next position and sees exactly itself and the tokens that the other sees.
        NotABranch {
            seq: SeqKey,
            /// Index of the token in the branch.
            place: usize,
            /// The token, counted from the item's first.
            token: u32,
        } => "draft {token} of sequence {seq:?}, accepted at place {place}, {}",
            if place == 0 { "is not a root" } else { "does not follow the one before it" };
        /// The item is a tree of drafts. FlashInfer's packed arrays have no masks, so they cannot describe it.
        PackedTree { seq: SeqKey } => "packed arrays cannot describe the draft tree of sequence {seq:?}";
        /// The plan's number of sequences, without padding, differs from the number of items to pack.
        PackedRows {
            items: usize,
            /// Rows of the plan.
            rows: usize,
        } => "a plan of {} does not match {}", Count(rows, "row"), Count(items, "item");
        /// A number does not fit FlashInfer's signed 32-bit arrays.
        PackedLimit {
            name: &'static str,
            value: u64,
            max: u64,
        } => "{value} {name} do not fit packed arrays, which hold up to {max}";
        /// The new length of a sequence is 0, below the tokens of its published and pending pages, or above its tokens.
        RollbackLen { len: u32, min: u32, max: u32 } =>
            "a rollback to {} is outside {min} to {max}", Count(len, "token");
        /// A mark is below the tokens of the sequence's published and pending pages, or, if layers keep a state, below
        /// its planned tokens.
        MarkLen { len: u32, min: u32 } =>
            "a mark at {} is below the {min} that are published or planned", Count(len, "token");
        /// An item ends after a mark of its sequence, whose layers keep a state. Items end at marks, because a cached
        /// state is one that a step has written. [`Engine::next_len`](crate::Engine::next_len) returns valid lengths.
        CrossesMark {
            seq: SeqKey,
            /// Tokens of the sequence up to the mark.
            mark: u32,
        } => "an item of sequence {seq:?} crosses its mark at {}", Count(mark, "token");
        /// An abort or a rollback has undone tokens of the sequence, and its layers have no earlier state. The host
        /// must preempt and resume the sequence, which computes the tokens after its last cached state again.
        StateLost { seq: SeqKey } => "the state of sequence {seq:?} is lost; preempt and resume it";
        /// The sequence to fork has planned tokens that are not committed or not known, so its state is ahead of its
        /// known tokens.
        StateAhead { seq: SeqKey } => "the state of sequence {seq:?} is ahead of its committed and known tokens";
        /// Models whose layers keep a state have no drafts.
        StateDraft { seq: SeqKey } => "layers that keep a state have no drafts, as of sequence {seq:?}";
        /// The sequence has the maximum number of waiting marks from [`Engine::mark`](crate::Engine::mark).
        OutOfMarks { max: u32 } => "{max} marks wait in the sequence already";
        /// The step is not open, or was never planned.
        UnknownStep { step: StepId } => "step {} is not open", step.raw();
        /// Steps commit in the order of planning, and an earlier step is open.
        StepOrder {
            step: StepId,
            /// The first open step.
            first: StepId,
        } => "step {} cannot commit before step {}", step.raw(), first.raw();
        /// The step to complete, or an earlier one, is neither committed nor aborted.
        StepOpen {
            /// The open step.
            step: StepId,
        } => "step {} is neither committed nor aborted", step.raw();
    }
}

impl StdError for Error {}

impl Error {
    /// Returns whether the call lacked pages, rows, tokens or steps, so that a later call may succeed. A sequence that
    /// can never fit is [`Error::TooLong`], which is no shortage.
    pub fn is_shortage(&self) -> bool {
        matches!(
            self,
            Self::OutOfPages { .. } | Self::OutOfSequences { .. } | Self::OutOfTokens { .. } | Self::OutOfSteps { .. }
        )
    }
}

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

impl<E> EngineError<E> {
    /// Returns whether the [core](Error::is_shortage) lacked pages, rows, tokens or steps.
    pub fn is_shortage(&self) -> bool {
        matches!(self, Self::Core(error) if error.is_shortage())
    }
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
