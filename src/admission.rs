//! Records of admission: a prompt, what admitting it takes, and the sequence that leads it.
//!
//! Not here: how a prompt is matched and admitted (`system/admit.rs`), how a leader is found (`system/leader.rs`).

use crate::error::Error;
use crate::id::{Namespace, SeqKey, StepId, TokenId};

/// A prompt to be admitted with others.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Prompt<'a> {
    /// Keeps its prefixes apart from others'.
    pub namespace: Namespace,
    /// At least one token.
    pub tokens: &'a [TokenId],
    /// Tokens that it is promised room for in all, as in [`Engine::admit`](crate::Engine::admit).
    pub promise: u32,
}

/// What admitting a prompt would take: the answer to [`Engine::admission`](crate::Engine::admission).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
#[non_exhaustive]
pub struct Admission {
    /// Tokens that have K and V already, in whole pages.
    pub cached_len: u32,
    /// Pages of those that nobody uses now: they would not be evictable any more.
    pub idle_pages: u32,
    /// Pages that the rest needs: that of the prompt, or that of the promise if it goes further.
    pub lacking_pages: u32,
    /// Pages that could be had for that now, once what is cached is in use.
    pub available_pages: u32,
    /// Where they are too few: the first unfinished step after which they are enough, if nothing else happens.
    pub after: Option<StepId>,
    /// A running sequence that is computing more of the prompt than is cached: who waits for it need not compute that
    /// once more.
    pub leader: Option<Leader>,
}

impl Admission {
    /// Whether there are enough pages now.
    pub fn fits(&self) -> bool {
        self.lacking_pages <= self.available_pages
    }

    /// The answer of an admission: nothing, if it fits.
    pub(crate) fn check(&self) -> Result<(), Error> {
        if self.fits() {
            return Ok(());
        }
        let (wanted, available) = (self.lacking_pages.into(), self.available_pages.into());
        Err(Error::OutOfPages { wanted, available, after: self.after })
    }
}

/// A running sequence that is computing what a prompt needs. [`Engine::is_leading`](crate::Engine::is_leading) says
/// whether it still is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct Leader {
    /// The sequence.
    pub seq: SeqKey,
    /// Tokens of the prompt that will need no computing when it has committed them: more than now.
    pub cached_len: u32,
    /// How often the sequence's text had been cut when it was named.
    pub(crate) cuts: u32,
}

impl Leader {
    pub(crate) fn new(seq: SeqKey, cached_len: u32, cuts: u32) -> Self {
        Self { seq, cached_len, cuts }
    }
}

/// One of a batch of prompts that were admitted.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct Admitted {
    /// The sequence.
    pub seq: SeqKey,
    /// Who was computing what it needs when it was admitted: another sequence, or a prompt before it in the batch.
    pub leader: Option<Leader>,
}

impl Admitted {
    pub(crate) fn new(seq: SeqKey, leader: Option<Leader>) -> Self {
        Self { seq, leader }
    }
}
