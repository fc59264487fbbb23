//! One continuation of a request: its tokens so far, and its state in the engine.

use std::time::Instant;

use kvarena::SeqKey;
use kvarena::plan::{Draft, Leader};
use slotmap::new_key_type;

use crate::draft::Drafter;
use crate::shaping::Counts;

new_key_type! {
    /// A request that has not ended.
    pub(crate) struct RequestKey;
    /// A stream that has not ended.
    pub(crate) struct StreamKey;
}

/// Reason for the end of a continuation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Finish {
    /// A stop token, a stop string that the sink found, or edits of logits that allow no token.
    Stop,
    /// The limit of new tokens.
    Length,
    /// The sink cancelled the stream, such as after a disconnect, or the stream has reached `cancel_after`.
    Cancelled,
}

/// One continuation of a request.
#[derive(Debug)]
pub struct Stream {
    /// Number of the request, in the order of submission.
    pub request: usize,
    /// Index among the request's samples.
    pub sample: u32,
    /// New tokens, including the stop token.
    pub tokens: Vec<u32>,
    /// Prompt tokens that were cached at the first admission; for a fork, the tokens that it shares.
    pub cached_tokens: u32,
    /// Number of checked drafts.
    pub drafted: u32,
    /// Number of accepted drafts.
    pub accepted: u32,
    /// Reason for the end; `None` while the stream continues.
    pub finish: Option<Finish>,
    pub(crate) request_key: RequestKey,
    pub(crate) submitted: Instant,
    /// Sequence in the engine, if any.
    pub(crate) seq: Option<SeqKey>,
    /// Leader that computes the prompt, while the stream waits for it.
    pub(crate) leader: Option<Leader>,
    /// Time of the first step without the stream, while the stream's pages were loading.
    pub(crate) loading: Option<Instant>,
    /// Number of the last admission; a resume does not change it. The loop preempts the stream with the greatest age.
    pub(crate) age: u64,
    /// Whether the stream has been admitted before.
    pub(crate) admitted: bool,
    /// The search of stores for the prompt.
    pub(crate) search: Search,
    /// Drafts of the stream.
    pub(crate) drafter: Drafter,
    /// Counts of the new tokens, if the request penalises them.
    pub(crate) counts: Counts,
    /// Index of the prompt token whose logits are reported next, if requested; the first token has none.
    pub(crate) scored: u32,
}

/// The search of stores for a stream's prompt.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Search {
    /// The stores were not asked.
    New,
    /// The stream waits for them.
    Waiting,
    /// The stream does not wait any more.
    Done,
}

impl Stream {
    /// Creates a stream of a request with this key and this number.
    pub(crate) fn new((request_key, request): (RequestKey, usize), sample: u32, submitted: Instant) -> Self {
        Self {
            request,
            request_key,
            sample,
            tokens: Vec::new(),
            cached_tokens: 0,
            drafted: 0,
            accepted: 0,
            finish: None,
            submitted,
            seq: None,
            leader: None,
            loading: None,
            age: 0,
            admitted: false,
            search: Search::New,
            drafter: Drafter::default(),
            counts: Counts::default(),
            scored: 1,
        }
    }

    /// Returns the drafts that a step checks, if there are any.
    pub(crate) fn drafts(&self) -> Option<Draft<'_>> {
        self.drafter.planned(self.seq?)
    }
}
