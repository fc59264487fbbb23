//! One continuation of a request: what it has said so far, and where it stands in the engine.

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

/// Why a continuation ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Finish {
    /// It said a stop token, or its reader found a stop string.
    Stop,
    /// It has all the tokens asked for.
    Length,
    /// Its client went away.
    Cancelled,
}

/// One continuation of a request.
#[derive(Debug)]
pub struct Stream {
    /// Number of the request, in the order of submission.
    pub request: usize,
    /// Which of the request's samples it is.
    pub sample: u32,
    /// New tokens so far, the stop token included.
    pub tokens: Vec<u32>,
    /// Prompt tokens that needed no computing when it was first admitted.
    pub cached_tokens: u32,
    /// Drafts of it that steps have checked.
    pub drafted: u32,
    /// Those of them that came true.
    pub accepted: u32,
    /// Why it ended; none while it goes on.
    pub finish: Option<Finish>,
    pub(crate) asked: RequestKey,
    pub(crate) submitted: Instant,
    /// Its sequence in the engine, while it has one.
    pub(crate) seq: Option<SeqKey>,
    /// Who computes what it needs, while it waits for that.
    pub(crate) leader: Option<Leader>,
    /// When it was admitted first, as a count: the youngest is preempted first.
    pub(crate) age: u64,
    /// Whether it was admitted before.
    pub(crate) admitted: bool,
    /// Its drafts.
    pub(crate) drafter: Drafter,
    /// Counts of its new tokens, where its request penalises them.
    pub(crate) counts: Counts,
    /// Tokens of the prompt whose logits were given out, where they are wanted; the first one has none.
    pub(crate) scored: u32,
}

impl Stream {
    /// A stream of a request, which has this key and this number.
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

    /// The drafts that a step checks, if there are any.
    pub(crate) fn drafts(&self) -> Option<Draft<'_>> {
        self.drafter.planned(self.seq?)
    }
}
