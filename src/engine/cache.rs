//! Calls about the prefix cache: matches, namespaces, events and reset.

use crate::backend::Backend;
use crate::error::Error;
use crate::event::Event;
use crate::hash::{NamespaceNames, PageHash};
use crate::id::{Namespace, PageId, TokenId};
use crate::prefix::PrefixMatch;
use crate::system::reset::{Reset, reset};

use super::Engine;

/// Calls about the prefix cache: matches, namespaces, events and reset.
impl<B: Backend> Engine<B> {
    /// Returns the cached prefix that a prompt matches now: whole pages, without the last token. O(tokens matched).
    ///
    /// Changes nothing, not even recency, so a scheduler can order prompts by their hits. A page with
    /// [`TokenId::PENDING`] never matches.
    pub fn match_prefix(&self, namespace: Namespace, prompt: &[TokenId]) -> PrefixMatch {
        let found = if self.world.shape.shares_prefixes() { prompt.len().saturating_sub(1) } else { 0 };
        let tokens = &prompt[..found];
        self.world.prefixes.match_prefix(namespace, tokens)
    }

    /// Returns the longest cached prefix of a chain of page hashes, for callers that have no tokens. O(hashes matched).
    ///
    /// Matches only the present generation and only group 0, and nothing if pages are not hashed
    /// ([`EngineConfig::hashing`](crate::EngineConfig::hashing)). Changes nothing. The result is as reliable as the
    /// hash function; only [`match_hashed_pages`](Engine::match_hashed_pages) also trusts hashes.
    pub fn match_hashes(&self, chain: &[PageHash]) -> PrefixMatch {
        self.match_hashed_pages(chain, |_| ())
    }

    /// Returns [`Engine::match_hashes`], and passes the matched pages on the device to `each`, in order, in slices.
    /// O(hashes matched).
    pub fn match_hashed_pages(&self, chain: &[PageHash], each: impl FnMut(&[PageId])) -> PrefixMatch {
        self.world.prefixes.match_hashes(chain, each)
    }

    /// Names a namespace: the names become part of the hashes of its pages. O(names).
    ///
    /// Call it once, before the first prompt of the namespace. The names hold until the namespace is
    /// [forgotten](Engine::forget_namespace). The call does nothing if pages are not hashed. The default namespace has
    /// no names.
    ///
    /// # Errors
    /// [`Error::NamespaceNamed`] if the namespace already has other names. [`Error::NamesTaken`] if another namespace
    /// has names with the same effect on hashes. Some recipes of
    /// [`EngineConfig::hashing`](crate::EngineConfig::hashing) ignore all names.
    pub fn name_namespace(&mut self, namespace: Namespace, names: NamespaceNames) -> Result<(), Error> {
        self.world.prefixes.names.name(namespace, names)
    }

    /// Forgets the names of a namespace. O(names).
    ///
    /// A host that salts each request calls it to bound the table of names. From then on [`admit`](Engine::admit)
    /// rejects prompts of the namespace ([`Error::UnnamedNamespace`]); its sequences continue. The names leave the
    /// table when the namespace has no sequence, no cached page and no open fetch. Until then no other namespace can
    /// take the names, and [`name_namespace`](Engine::name_namespace) with the same names undoes the call. The call
    /// does nothing if pages are not hashed, or for the default namespace.
    ///
    /// # Errors
    /// [`Error::UnnamedNamespace`] if the namespace has no names or is already forgotten.
    pub fn forget_namespace(&mut self, namespace: Namespace) -> Result<(), Error> {
        self.world.prefixes.names.forget(namespace)
    }

    /// Passes the changes of the cached prefixes since the last drain to `sink`, in order. O(pages of the events);
    /// after an overflow O(tree).
    ///
    /// Events report pages stored (parents first), pages removed, or the whole cache cleared. Publishing a page that
    /// the device already caches emits nothing. If more pages changed than
    /// [`EngineConfig::event_pages`](crate::EngineConfig::event_pages), the buffer has overflowed: the sink then
    /// receives [`Event::Cleared`] and all cached pages. An index built from events alone is therefore correct after
    /// every drain. Events cover the present generation only. If the sink panics, the next drain restates the whole
    /// cache.
    pub fn drain_events(&mut self, sink: impl FnMut(Event<'_>)) {
        self.world.prefixes.drain_events(sink);
    }

    /// Makes the next [drain](Engine::drain_events) emit the whole cache, as after an overflow.
    /// O(events in the buffer).
    ///
    /// For a subscriber that is new or has missed events.
    pub fn restate_events(&mut self) {
        self.world.prefixes.events().into_iter().for_each(|events| events.restate());
    }

    /// Invalidates all cached prefixes, for a host that changes the model's weights. O(idle pages).
    ///
    /// Idle prefixes are dropped now. Prefixes in use no longer match and are dropped when their last user releases
    /// them.
    pub fn reset(&mut self) {
        reset(Reset::from(&mut self.world));
    }
}
