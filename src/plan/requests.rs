//! Records of the calls in `engine/requests.rs`: a prompt, the cost of its admission, and its leader; the children of a
//! fork; the treatment of a sequence's pages at its end.

use super::PageCopy;
use crate::error::Error;
use crate::id::{Namespace, SeqKey, StepId, TokenId};

/// A prompt for [`Engine::admit_batch`](crate::Engine::admit_batch).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Prompt<'a> {
    /// Namespace of the prompt. Prompts in different namespaces share no pages.
    pub namespace: Namespace,
    /// Tokens of the prompt, at least one.
    pub tokens: &'a [TokenId],
    /// What the prompt asks of its admission.
    pub admit: Admit,
}

impl<'a> Prompt<'a> {
    /// Returns the tokens that can match cached prefixes: at least the last token must be computed to sample the next.
    pub(crate) fn matchable(&self) -> &'a [TokenId] {
        &self.tokens[..(self.tokens.len() - 1).min(self.admit.at_most as usize)]
    }
}

/// What a prompt asks of [`Engine::admit`](crate::Engine::admit). A number converts into a promise of so many tokens.
///
/// ```
/// # use kvarena::plan::Admit;
/// # let prompt = [0; 700];
/// let prompt_len = prompt.len() as u32; // the engine rejects prompts that this cast would cut
/// // Memory for the whole prompt; of a hit, at most the whole pages of the first 512 tokens.
/// let admit = Admit { promise: prompt_len, at_most: 512 };
/// assert_eq!(Admit::from(700), Admit { promise: 700, ..Admit::default() });
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Admit {
    /// Number of tokens, prompt and output together, for which the engine reserves pages. With 0, plans take available
    /// pages, and the host may have to preempt other sequences. Default: 0.
    pub promise: u32,
    /// Maximum number of the prompt's first tokens whose cached K and V the sequence uses, for a host that must compute
    /// the rest itself. The hit is cut to whole pages. Default: `u32::MAX`.
    pub at_most: u32,
}

impl Default for Admit {
    fn default() -> Self {
        Self { promise: 0, at_most: u32::MAX }
    }
}

impl From<u32> for Admit {
    /// Returns a promise of so many tokens, without a limit on the hit.
    fn from(promise: u32) -> Self {
        Self { promise, ..Self::default() }
    }
}

/// The cost of admitting a prompt, as [`Engine::admission`](crate::Engine::admission) returns it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
#[non_exhaustive]
pub struct Admission {
    /// Number of the prompt's first tokens whose cached K and V its sequence would use, a multiple of `page_size`.
    pub cached_len: u32,
    /// Number of cached pages, of all groups of layers, that are in swap memory alone. They are loaded before the
    /// prompt's first plan.
    pub swap_pages: u32,
    /// Number of the prompt's cached device pages that no sequence, fetch or unfinished step uses now. Admission makes
    /// them unevictable.
    pub idle_pages: u32,
    /// Number of pages that the loads and the tokens after the cached ones need. The tokens are counted to the end of
    /// the prompt or of the promise, whichever is longer. At most `u32::MAX`, which is more than any pool has.
    pub lacking_pages: u32,
    /// Number of pages available to the prompt once its idle pages are locked.
    pub available_pages: u32,
    /// First unfinished step whose completion makes enough pages available, unless another call takes them first.
    /// `None` if enough are available now, or if no step frees enough. With groups of layers, this may be the step
    /// after which the prompt is admitted without its hit.
    pub after: Option<StepId>,
    /// Running sequence that computes more of the prompt than is cached. A prompt that waits for it need not compute
    /// these tokens.
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
    /// The sequence that computes the tokens.
    pub seq: SeqKey,
    /// Number of the prompt's first tokens that are cached once the sequence has committed them; greater than
    /// [`Admission::cached_len`].
    pub cached_len: u32,
    /// The sequence's number of cuts at the time when the engine named it as the leader. A cut drops known tokens.
    pub(crate) cuts: u32,
}

/// The result of admitting one prompt of a batch.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct Admitted {
    /// The new sequence.
    pub seq: SeqKey,
    /// The prompt's leader at the time of admission. It may be the sequence of an earlier prompt of the batch.
    pub leader: Option<Leader>,
}

/// The children of a fork. The slices are valid until the engine's next call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
#[non_exhaustive]
pub struct Forked<'a> {
    /// The new sequences. They have all known tokens of their parent, and K and V of the computed ones.
    pub children: &'a [SeqKey],
    /// Copies of the partly filled last page of each track, for each child. The engine has passed them to its own
    /// backend. The host passes them to `copy_pages` of other ranks, after the steps committed so far.
    pub copies: &'a [PageCopy],
    /// The step of the copies; `None` if nothing is copied. It counts as committed and must be completed.
    pub step: Option<StepId>,
}

/// The treatment of computed pages when a sequence is preempted or finished.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Keep {
    /// Whole computed pages stay cached until they are evicted. Without shared prefixes the same as [`Keep::Drop`].
    Publish,
    /// Pages that are not published yet are released.
    Drop,
}
