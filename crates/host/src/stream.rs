//! One continuation of a request: its tokens so far, and its state in the engine.

use std::time::Instant;

use kvarena::{Draft, Leader, SeqKey};
use slotmap::new_key_type;

use crate::draft::Drafter;
use crate::shaping::Counts;

new_key_type! {
    /// A request that has not ended.
    pub(crate) struct RequestKey;
    /// A stream that has not ended.
    pub(crate) struct StreamKey;
}

/// The reason of a continuation's end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Finish {
    /// A stop token, or a stop string that its reader found.
    Stop,
    /// Its limit of tokens.
    Length,
    /// Its client went away.
    Cancelled,
}

/// One continuation of a request.
#[derive(Debug)]
pub struct Stream {
    /// Number of the request, in the order of submission.
    pub request: usize,
    /// Index among the request's samples.
    pub sample: u32,
    /// New tokens so far, the stop token included.
    pub tokens: Vec<u32>,
    /// Prompt tokens that were cached when it was first admitted.
    pub cached_tokens: u32,
    /// Its checked drafts.
    pub drafted: u32,
    /// Its accepted drafts.
    pub accepted: u32,
    /// The reason of its end; `None` while it continues.
    pub finish: Option<Finish>,
    pub(crate) asked: RequestKey,
    pub(crate) submitted: Instant,
    /// Its sequence in the engine, while it has one.
    pub(crate) seq: Option<SeqKey>,
    /// The leader that computes its prompt, while it waits for the leader.
    pub(crate) leader: Option<Leader>,
    /// Order of the first admission: the youngest stream is preempted first.
    pub(crate) age: u64,
    /// Whether the stream has been admitted before.
    pub(crate) admitted: bool,
    /// Its drafts.
    pub(crate) drafter: Drafter,
    /// Counts of its new tokens, if its request penalises them.
    pub(crate) counts: Counts,
    /// Tokens of the prompt whose logits were reported, if requested; the first one has none.
    pub(crate) scored: u32,
}

impl Stream {
    /// Creates a stream of a request with this key and this number.
    pub(crate) fn new(
        (asked, request): (RequestKey, usize),
        sample: u32,
        submitted: Instant,
    ) -> Self {
        Self {
            request,
            asked,
            sample,
            tokens: Vec::new(),
            cached_tokens: 0,
            drafted: 0,
            accepted: 0,
            finish: None,
            submitted,
            seq: None,
            leader: None,
            age: 0,
            admitted: false,
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
