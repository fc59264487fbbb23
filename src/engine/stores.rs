//! Calls for stores outside the engine: puts, lookups and fetches of records.

use crate::backend::Backend;
use crate::error::{EngineError, Error};
use crate::id::{Namespace, TokenId};
use crate::moves::{Fetch, FetchId, Lookup, Put, PutId};
use crate::world::World;

use super::Engine;

/// Stores: puts and fetches. They need hashes of pages ([`EngineConfig::hashing`](crate::EngineConfig::hashing)) and
/// swap memory. A shared store needs hashes of 32 bytes, because collisions of shorter ones can be made.
///
/// A store keeps [records](crate::moves): [`record_pages`](crate::EngineConfig::record_pages) consecutive pages of
/// group 0, or one cell of another group.
impl<B: Backend> Engine<B> {
    /// Calls `sink` with records that no store has, including those of running sequences. Selects at most `max`
    /// records, in the order in which their last pages were published and their cells were made; records that a store
    /// refused come later, in the order of the refusals. At most 1,024 puts are open at a time. Returns the number of
    /// calls of `sink`. O(pages).
    ///
    /// A page that is on the device alone is copied to one of the [`stage_pages`](crate::PoolConfig::stage_pages) swap
    /// pages. A call after the end of the copies passes the record to `sink`. The store reads the swap pages until
    /// [`put_done`](Engine::put_done).
    ///
    /// # Errors
    /// [`EngineError::Backend`] if the copy failed: a later call selects the same records again.
    pub fn puts(&mut self, max: usize, sink: impl FnMut(Put<'_>)) -> Result<usize, EngineError<B::Error>> {
        if !self.world.prefixes.has_swap() {
            return Ok(0);
        }
        self.look_at_swap();
        self.world.prefixes.begin_puts(max);
        if let Some((id, moves)) = self.world.prefixes.swap_mut().staged()
            && let Err(error) = self.backend.save_pages(id, moves)
        {
            self.world.prefixes.swap_mut().fail_staged();
            return Err(EngineError::Backend(error));
        }
        let moved = self.backend.moved().map_err(EngineError::Backend)?;
        Ok(self.world.prefixes.give_puts(moved.saved, sink))
    }

    /// Ends a put. `ok` is set if the store has the record; otherwise the record is put again, after the records that
    /// wait now. Returns whether the put was open. O(pages of open puts).
    ///
    /// A refused record waits for a call of [`puts`](Engine::puts) that selects no record. So a loop over `puts` ends
    /// even if the store refuses every record.
    ///
    /// The store drops the put's [leases](crate::backend::SwapMemory) first: the engine may save other pages to the
    /// swap pages from now on, and backends reject saves to a leased page.
    pub fn put_done(&mut self, id: PutId, ok: bool) -> bool {
        self.world.prefixes.end_put(id, ok)
    }

    /// Returns the records that the engine has of a prompt, for a search of the others in stores; `None` without swap
    /// memory or hashes, and for an empty prompt or one that contains [`TokenId::PENDING`]. O(prompt, and cached pages
    /// for each group of layers); computes no hash.
    ///
    /// # Errors
    /// [`Error::UnnamedNamespace`].
    pub fn lookup(&self, namespace: Namespace, prompt: &[TokenId]) -> Result<Option<Lookup>, Error> {
        let tokens = self.findable(namespace, prompt)?;
        Ok(tokens.and_then(|tokens| self.world.prefixes.lookup(namespace, tokens)))
    }

    /// Takes swap pages, into which a store writes the records that the first `to` pages of a prompt lack. Usually `to`
    /// is the [target](Lookup::target) of a lookup. The prompt's cached prefix stays cached until
    /// [`fetched`](Engine::fetched). O(prompt + pages + free swap pages with unfinished moves), and O(idle nodes) if
    /// only swap pages of the prefix could make room. With groups of layers, each dropped page may cost O(free swap
    /// pages with unfinished moves).
    ///
    /// If swap pages are lacking, the fetch has fewer pages. With groups it has all, or the result is `None`: other
    /// pages may then be gone from swap memory, and the prompt's cached pages are the last used ones.
    ///
    /// Returns `None` without any change without swap memory or hashes, if the prompt hits `to` pages or can match no
    /// more pages, for a prompt that contains [`TokenId::PENDING`], or while 256 fetches are open. Also returns `None`
    /// if no swap page without unfinished moves can be taken, or promises need the pages of the prefix.
    ///
    /// # Errors
    /// [`EngineError::Core`] with [`Error::UnnamedNamespace`]; [`EngineError::Backend`].
    pub fn fetch(
        &mut self,
        namespace: Namespace,
        prompt: &[TokenId],
        to: u32,
    ) -> Result<Option<Fetch<'_>>, EngineError<B::Error>> {
        let Some(tokens) = self.findable(namespace, prompt)? else { return Ok(None) };
        self.look_at_swap();
        let moved = self.backend.moved().map_err(EngineError::Backend)?;
        let (available, moved) = (self.world.available(), [moved.saved, moved.loaded]);
        let World { prefixes, fence, pages, buffers, .. } = &mut self.world;
        buffers.pool_pages.clear();
        let fetch = prefixes.begin_fetch((namespace, tokens), to, available, moved, fence, &mut buffers.pool_pages);
        pages.free_cached(&buffers.pool_pages);
        Ok(fetch)
    }

    /// Ends a fetch of which the store has written the first `count` records: prompts match them from now on. With
    /// groups of layers, the store has written all records, or none matches. Returns whether the fetch was open.
    /// O(pages of open fetches).
    ///
    /// The store drops the fetch's [leases](crate::backend::SwapMemory) first: the engine may load the pages, and save
    /// others to them, from now on. Backends reject loads from a page with a write lease, and saves to a leased page.
    ///
    /// If [`reset`](Engine::reset) was called after [`fetch`](Engine::fetch), no fetched page is cached.
    pub fn fetched(&mut self, id: FetchId, count: usize) -> bool {
        if !self.world.prefixes.has_swap() {
            return false;
        }
        let World { prefixes, fence, pages, buffers, .. } = &mut self.world;
        buffers.pool_pages.clear();
        let open = prefixes.end_fetch(id, count, fence, &mut buffers.pool_pages, &mut buffers.tokens);
        pages.free_cached(&buffers.pool_pages);
        open
    }

    /// Queues again the records of a prompt that were put and that the stores have lost: `stored` returns whether a
    /// store has the record of a group at a place. Returns the number of the prompt's records that no store has; later
    /// calls of [`puts`](Engine::puts) select those that are not open. A server that only computes prompts for another
    /// one calls it before it reports a prompt as computed. O(prompt, and cached pages for each group of layers).
    ///
    /// # Errors
    /// [`Error::UnnamedNamespace`].
    pub fn restate_puts(
        &mut self,
        namespace: Namespace,
        prompt: &[TokenId],
        stored: impl FnMut(u32, u32) -> bool,
    ) -> Result<u32, Error> {
        let Some(tokens) = self.findable(namespace, prompt)? else { return Ok(0) };
        Ok(self.world.prefixes.restate_puts(namespace, tokens, stored))
    }

    /// Returns the tokens of a prompt that can match: all but the last one, at most those of the longest sequence.
    /// `None` if stores can have no page of them.
    ///
    /// # Errors
    /// [`Error::UnnamedNamespace`].
    fn findable<'a>(&self, namespace: Namespace, prompt: &'a [TokenId]) -> Result<Option<&'a [TokenId]>, Error> {
        let World { prefixes, shape, .. } = &self.world;
        // Sequences and cached pages of a forgotten namespace keep its names.
        if !prefixes.names.is_named(namespace) && prefixes.names.get(namespace).is_none() {
            return Err(Error::UnnamedNamespace { namespace });
        }
        let is_known = prefixes.has_swap() && !prompt.contains(&TokenId::PENDING);
        let before = prompt.split_last().filter(|_| is_known).map(|(_, before)| before);
        Ok(before.map(|before| &before[..before.len().min(shape.max_sequence_len as usize)]))
    }
}
