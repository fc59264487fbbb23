//! Records of admission: a prompt, what admitting it takes, and the sequence that leads it.
//!
//! Not here: how a prompt is matched and admitted (`system/admit.rs`), how a leader is found (`system/leader.rs`).

use crate::error::Error;
use crate::id::{Namespace, SeqKey, StepId, TokenId};

/// A prompt of a batch to admit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Prompt<'a> {
    /// Namespace of its prefixes: prompts of different namespaces share nothing.
    pub namespace: Namespace,
    /// Its tokens, at least one.
    pub tokens: &'a [TokenId],
    /// Tokens that it is promised memory for, as in [`Engine::admit`](crate::Engine::admit).
    pub promise: u32,
}

/// The cost of admitting a prompt, as [`Engine::admission`](crate::Engine::admission) returns it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
#[non_exhaustive]
pub struct Admission {
    /// Tokens that have K and V already, in whole pages.
    pub cached_len: u32,
    /// Cached pages of the prompt that are in host memory, to be loaded before its first plan.
    pub host_pages: u32,
    /// Cached pages of the prompt that no sequence uses now. Admission makes them unevictable.
    pub idle_pages: u32,
    /// Pages that the rest of the prompt needs, those to be loaded included, or the rest of the promise if that is
    /// longer.
    pub lacking_pages: u32,
    /// Pages that are available for the rest once the cached ones are in use.
    pub available_pages: u32,
    /// If too few pages are available, the first unfinished step whose completion makes them enough, if no other call
    /// comes first.
    pub after: Option<StepId>,
    /// A running sequence that computes more of the prompt than is cached. A prompt that waits for it need not compute
    /// these tokens again.
    pub leader: Option<Leader>,
}

impl Admission {
    /// Returns whether enough pages are available now.
    pub fn fits(&self) -> bool {
        self.lacking_pages <= self.available_pages
    }

    /// Returns [`Error::OutOfPages`] if too few pages are available.
    pub(crate) fn check(&self) -> Result<(), Error> {
        if self.fits() {
            return Ok(());
        }
        let (wanted, available) = (self.lacking_pages.into(), self.available_pages.into());
        Err(Error::OutOfPages { wanted, available, after: self.after })
    }
}

/// A running sequence that computes tokens of a prompt. [`Engine::is_leading`](crate::Engine::is_leading) returns
/// whether it still does.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct Leader {
    /// The sequence.
    pub seq: SeqKey,
    /// Tokens of the prompt that need no computing once the sequence has committed them, more than are cached now.
    pub cached_len: u32,
    /// Number of cuts of the sequence's tokens when it was named.
    pub(crate) cuts: u32,
}

impl Leader {
    pub(crate) fn new(seq: SeqKey, cached_len: u32, cuts: u32) -> Self {
        Self { seq, cached_len, cuts }
    }
}

/// A prompt that was admitted in a batch.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct Admitted {
    /// The sequence.
    pub seq: SeqKey,
    /// Its leader at the time of admission: another sequence, or an earlier prompt of the batch.
    pub leader: Option<Leader>,
}

impl Admitted {
    pub(crate) fn new(seq: SeqKey, leader: Option<Leader>) -> Self {
        Self { seq, leader }
    }
}
