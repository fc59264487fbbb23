//! Calls about the prefix cache: matches, names of namespaces, events, reset.

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
    /// Returns the prefix that a prompt would reuse if it was admitted now: whole pages of all tokens but the last one.
    /// O(tokens matched).
    ///
    /// Changes nothing, not even recency, so a scheduler can order prompts by their hits. The match ends before a page
    /// with [`TokenId::PENDING`], which no sequence has.
    pub fn match_prefix(&self, namespace: Namespace, prompt: &[TokenId]) -> PrefixMatch {
        let found =
            if self.world.shape.shares_prefixes() { prompt.len().saturating_sub(1) } else { 0 };
        let tokens = &prompt[..found];
        self.world.prefixes.match_prefix(namespace, tokens)
    }

    /// Returns the longest cached prefix of a chain of page hashes, for callers that have no tokens. O(hashes matched).
    ///
    /// Matches prefixes of the present generation, in the namespace of the hashes. Matches 0 pages if pages are not
    /// hashed ([`EngineConfig::hashing`](crate::EngineConfig::hashing)). Changes nothing. The result trusts the hashes,
    /// so it is as reliable as their recipe; no other call of the engine trusts hashes.
    pub fn match_hashes(&self, chain: &[PageHash]) -> PrefixMatch {
        self.match_hashed_pages(chain, |_| ())
    }

    /// [`Engine::match_hashes`] that also calls `each` with the matched pages, in order, run by run. O(hashes matched).
    pub fn match_hashed_pages(
        &self,
        chain: &[PageHash],
        each: impl FnMut(&[PageId]),
    ) -> PrefixMatch {
        self.world.prefixes.match_hashes(chain, each)
    }

    /// Gives a namespace the names that enter the hashes of its pages, once, before its first prompt. O(names).
    ///
    /// The names hold until the namespace is [forgotten](Engine::forget_namespace). Does nothing if pages are not
    /// hashed. The default namespace has no names and needs none.
    ///
    /// # Errors
    /// [`Error::NamespaceNamed`] if the namespace has other names already. [`Error::NamesTaken`] if another namespace
    /// has the same names, compared as far as they enter the hashes of
    /// [`EngineConfig::hashing`](crate::EngineConfig::hashing); some recipes use none of them.
    pub fn name_namespace(
        &mut self,
        namespace: Namespace,
        names: NamespaceNames,
    ) -> Result<(), Error> {
        self.world.prefixes.name(namespace, names)
    }

    /// Forgets the names of a namespace, so that the table of names does not grow with a salt for each request.
    /// O(names).
    ///
    /// From then on [`admit`](Engine::admit) rejects prompts of the namespace ([`Error::UnnamedNamespace`]); its
    /// sequences continue. The table drops the names when the last sequence is finished and the last cached page is
    /// evicted. Until then no other namespace can take the names, and [`name_namespace`](Engine::name_namespace) with
    /// the same names undoes the call. Does nothing if pages are not hashed, nor to the default namespace.
    ///
    /// # Errors
    /// [`Error::UnnamedNamespace`] if the namespace has no names or is forgotten already.
    pub fn forget_namespace(&mut self, namespace: Namespace) -> Result<(), Error> {
        self.world.prefixes.forget_names(namespace)
    }

    /// Calls `sink` with the changes of the cached prefixes since the last drain, in order. O(pages of the events),
    /// after an overflow O(tree).
    ///
    /// Pages are stored parents first, pages are removed, or all are cleared. Publishing a cached page again emits
    /// nothing; neighbouring events are joined. If more has changed than
    /// [`EngineConfig::event_pages`](crate::EngineConfig::event_pages) allows, the sink gets [`Event::Cleared`] and
    /// then all cached pages, read from the tree. So an index that is built from events alone is correct after every
    /// drain. Events are about the present generation only. If the sink panics, the next drain is as after an overflow.
    pub fn drain_events(&mut self, sink: impl FnMut(Event<'_>)) {
        self.world.prefixes.drain_events(sink);
    }

    /// Makes the next [drain](Engine::drain_events) restate the whole cache, as after an overflow. O(1).
    ///
    /// For a follower that has just subscribed or has missed events.
    pub fn restate_events(&mut self) {
        self.world.prefixes.restate_events();
    }

    /// Drops every idle prefix, for a host that changes the model's weights. O(idle pages).
    ///
    /// Prefixes in use no longer match, and are dropped with their last user.
    pub fn reset(&mut self) {
        reset(Reset::of(&mut self.world));
    }
}
