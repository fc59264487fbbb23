//! The calls about the prefix cache: matches, names of namespaces, events, reset.

use crate::backend::Backend;
use crate::error::Error;
use crate::event::Event;
use crate::hash::{NamespaceNames, PageHash};
use crate::id::{Namespace, PageId, TokenId};
use crate::prefix::PrefixMatch;
use crate::system::reset::{Reset, reset};

use super::Engine;

/// The prefix cache: matches, names of namespaces, events, reset.
impl<B: Backend> Engine<B> {
    /// The prefix that a prompt would use if admitted now: whole pages of all but its last token. Changes nothing, not
    /// even recency: for schedulers that order prompts by what is cached. It ends before a page with
    /// [`TokenId::PENDING`], which no sequence has. O(tokens matched).
    pub fn match_prefix(&self, namespace: Namespace, prompt: &[TokenId]) -> PrefixMatch {
        let found =
            if self.world.shape.finds_prefixes() { prompt.len().saturating_sub(1) } else { 0 };
        let tokens = &prompt[..found];
        self.world.prefixes.match_prefix(namespace, tokens)
    }

    /// The longest cached prefix of a chain of hashes, for callers that have no tokens: the cache as one of blocks by
    /// chained hashes. The present generation's prefixes match, of whichever namespace the hashes are. 0 pages where
    /// pages are not hashed ([`EngineConfig::hashing`]). Changes nothing. O(hashes matched).
    ///
    /// The answer trusts the hashes, so it is as good as their recipe is; nothing else in the engine does.
    pub fn match_hashes(&self, chain: &[PageHash]) -> PrefixMatch {
        self.match_hashed_pages(chain, |_| ())
    }

    /// [`Engine::match_hashes`] that also hands the matched pages over, in order, piece by piece. O(hashes matched).
    pub fn match_hashed_pages(
        &self,
        chain: &[PageHash],
        each: impl FnMut(&[PageId]),
    ) -> PrefixMatch {
        self.world.prefixes.match_hashes(chain, each)
    }

    /// Says what a namespace is called by those who know prefixes by hashes, once, before its first prompt, until it is
    /// [forgotten](Engine::forget_namespace). Does nothing where pages are not hashed. The default namespace has no
    /// names and needs none. O(names).
    ///
    /// # Errors
    /// [`Error::NamespaceNamed`] if it is called something else already, [`Error::NamesTaken`] if another namespace has
    /// these names as far as they enter the hashes of [`EngineConfig::hashing`]; some recipes hear none.
    pub fn name_namespace(
        &mut self,
        namespace: Namespace,
        names: NamespaceNames,
    ) -> Result<(), Error> {
        self.world.prefixes.name(namespace, names)
    }

    /// Forgets the names of a namespace, so that a salt for each request does not grow the table of names for ever.
    ///
    /// From now on [`admit`](Engine::admit) refuses its prompts ([`Error::UnnamedNamespace`]); its sequences go on. The
    /// table drops the names when the last of these is finished and the last cached page of the namespace is evicted.
    /// Until then no other namespace can take the names, and [`name_namespace`](Engine::name_namespace) with the same
    /// names undoes the call. Does nothing where pages are not hashed, nor to the default namespace. O(names).
    ///
    /// # Errors
    /// [`Error::UnnamedNamespace`] if the namespace has no names or is forgotten already.
    pub fn forget_namespace(&mut self, namespace: Namespace) -> Result<(), Error> {
        self.world.prefixes.forget_names(namespace)
    }

    /// Hands over what has happened to the cached prefixes since the last drain, in order: pages stored, parents first,
    /// pages removed, all cleared. Pages that are published again say nothing; neighbours are joined. Where more has
    /// happened than [`EngineConfig::event_pages`] has room for, all is cleared, and then what is cached now is stored,
    /// straight from the tree. So an index that is built from events alone is always right once a drain has ended.
    /// Only the present generation is spoken of. Where the sink panics, the next drain is as after an overflow.
    /// O(pages of the events), after an overflow O(tree).
    pub fn drain_events(&mut self, sink: impl FnMut(Event<'_>)) {
        self.world.prefixes.drain_events(sink);
    }

    /// The next [drain](Engine::drain_events) begins anew, as after an overflow: for somebody who has just begun to
    /// listen, or has lost track. O(1).
    pub fn restate_events(&mut self) {
        self.world.prefixes.restate_events();
    }

    /// Drops every idle prefix; those in use match no more and go with their last user. For a host that changes the
    /// model's weights. O(idle pages).
    pub fn reset(&mut self) {
        reset(Reset::of(&mut self.world));
    }
}
