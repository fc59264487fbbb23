//! Calls about pages in swap memory: loads, saves ahead of evictions, puts and fetches of stores.

use crate::backend::Backend;
use crate::error::{EngineError, Error};
use crate::id::{Namespace, SeqKey, TokenId};
use crate::moves::{Fetch, FetchId, Put, PutId};
use crate::system::load::{Load, begin_load, end_load};
use crate::world::World;

use super::Engine;

/// Swap memory: loads and saves.
impl<B: Backend> Engine<B> {
    /// Loads the pages of swap memory that running sequences wait for, and completes their page tables. O(pages that
    /// the sequences waited for).
    ///
    /// [`admit`](Engine::admit) and [`resume`](Engine::resume) use cached pages wherever they are. Pages in swap memory
    /// alone are loaded here, or by the next [`plan_batch`](Engine::plan_batch) or [`fork`](Engine::fork) of the
    /// sequence. A page that several sequences wait for is loaded once. Loads take promised pages of their sequences
    /// first. A call for sequences that wait for nothing does nothing.
    ///
    /// # Errors
    /// [`EngineError::Core`] with [`Error::UnknownSequence`], [`Error::Preempted`] or [`Error::OutOfPages`]: nothing
    /// has changed. [`EngineError::Backend`] if the load failed: the sequences wait as before, and evicted pages stay
    /// evicted.
    pub fn load(&mut self, seqs: &[SeqKey]) -> Result<(), EngineError<B::Error>> {
        seqs.iter().try_for_each(|seq| self.world.sequences.running(*seq).map(drop))?;
        if self.world.prefixes.has_swap() {
            self.load_waiting(&mut seqs.iter().copied())?;
        }
        Ok(())
    }

    /// Loads the pages that these sequences wait for. Skips sequences that wait for none or are not running.
    pub(super) fn load_waiting(&mut self, seqs: &mut dyn Iterator<Item = SeqKey>) -> Result<(), EngineError<B::Error>> {
        self.look_at_swap();
        let begun = begin_load(Load::from(&mut self.world), seqs);
        self.world.counters.count_refusal(begun)?;
        self.flush_saves();
        let World { prefixes, load, .. } = &mut self.world;
        let mut loaded = Ok(());
        if !load.moves().is_empty() {
            loaded = self.backend.load_pages(prefixes.swap_mut().begin_load(load), load.moves());
            if loaded.is_ok() {
                prefixes.swap_mut().set_loads(load);
            }
        }
        end_load(Load::from(&mut self.world), loaded.is_err());
        loaded.map_err(EngineError::Backend)
    }

    /// Returns whether the device is still loading pages of a sequence, for this or for another sequence. On the
    /// device, a plan of the sequence waits for the load, so the host may plan other sequences first. O(pages of the
    /// sequence), or O(1) if an earlier call has found all loads done.
    ///
    /// Returns false before the load begins, although the sequence waits for it:
    /// [`Admission::swap_pages`](crate::plan::Admission::swap_pages) counts the pages to load. The call reads the
    /// backend's progress and stores it, so it takes `&mut self`.
    ///
    /// # Errors
    /// [`EngineError::Core`] with [`Error::UnknownSequence`]; [`EngineError::Backend`].
    pub fn is_loading(&mut self, seq: SeqKey) -> Result<bool, EngineError<B::Error>> {
        let World { prefixes, sequences, shape, .. } = &self.world;
        let sequence = sequences.get(seq)?;
        let Some(lock) = sequence.lock.as_ref().filter(|_| prefixes.has_swap() && prefixes.swap().may_load()) else {
            return Ok(false);
        };
        // The path of the lock has the pages of group 0. The row names the cells that it uses, unless it waits.
        let tracks = 1..shape.table.tracks;
        let cells = tracks.flat_map(|track| sequences.track_pages(sequence, track, 0).flatten().copied());
        let Some(last) = prefixes.last_load(lock, sequences.prefix_pages(sequence), cells) else {
            return Ok(false);
        };
        let moved = self.backend.moved().map_err(EngineError::Backend)?;
        self.world.prefixes.swap_mut().set_loaded(moved.loaded);
        Ok(moved.loaded < last)
    }

    /// Saves the oldest evictable pages until the `pages` oldest ones have copies in swap memory, so that evicting them
    /// needs no copy. Stops earlier if no swap page can be taken. Returns the number of pages saved. O(pages saved).
    ///
    /// The host calls it after it has launched a step. Each copy takes a swap page, so keep `pages` below a thirtieth
    /// of the swap pages.
    ///
    /// # Errors
    /// [`EngineError::Backend`] if the save failed: the pages have no copies then.
    pub fn save_ahead(&mut self, pages: u32) -> Result<u32, EngineError<B::Error>> {
        if !self.world.prefixes.has_swap() {
            return Ok(0);
        }
        self.look_at_swap();
        let World { prefixes, pages: pool, buffers, .. } = &mut self.world;
        buffers.pool_pages.clear();
        prefixes.save_ahead(pages, &mut buffers.pool_pages);
        pool.free_cached(&buffers.pool_pages);
        let Some((id, moves)) = prefixes.saves() else { return Ok(0) };
        let count = moves.len() as u32;
        let saved = self.backend.save_pages(id, moves);
        self.end_saves(saved.is_err());
        saved.map(|()| count).map_err(EngineError::Backend)
    }

    /// Reads from the backend how many swap pages are ready, and makes them usable.
    pub(super) fn look_at_swap(&mut self) {
        self.world.prefixes.swap_mut().set_ready(self.backend.swap_pages());
    }

    /// Gives the backend the saves of pages that a call has evicted, before the pages are reused. A failure loses
    /// cached prefixes and nothing else.
    pub(super) fn flush_saves(&mut self) {
        if let Some((id, moves)) = self.world.prefixes.saves() {
            let failed = self.backend.save_pages(id, moves).is_err();
            self.end_saves(failed);
        }
    }

    /// Ends a batch of saves.
    fn end_saves(&mut self, failed: bool) {
        let World { prefixes, pages, buffers, .. } = &mut self.world;
        buffers.pool_pages.clear();
        prefixes.end_saves(failed, &mut buffers.pool_pages);
        pages.free_cached(&buffers.pool_pages);
    }
}

/// Stores: puts and fetches.
impl<B: Backend> Engine<B> {
    /// Calls `sink` with cached pages that no store has, including those of running sequences. Selects at most `max`
    /// pages, in the order in which they were published; pages that a store refused come later, in the order of the
    /// refusals. At most 1,024 puts are open at a time. Returns the number of calls of `sink`. O(pages).
    ///
    /// Needs hashes of pages ([`EngineConfig::hashing`](crate::EngineConfig::hashing)) and swap memory. A page that is
    /// on the device alone is copied to one of the [`stage_pages`](crate::PoolConfig::stage_pages) swap pages. A call
    /// after the end of the copy passes the page to `sink`. The store reads the swap page until
    /// [`put_done`](Engine::put_done).
    ///
    /// # Errors
    /// [`EngineError::Core`] with [`Error::StoreGroups`]. [`EngineError::Backend`] if the copy failed: a later call
    /// selects the same pages again.
    pub fn puts(&mut self, max: usize, sink: impl FnMut(Put<'_>)) -> Result<usize, EngineError<B::Error>> {
        self.check_groups()?;
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

    /// Ends a put. `ok` is set if the store has the page; otherwise the page is put again, after the pages that
    /// wait now. Returns whether the put was open. O(open puts).
    ///
    /// A refused page waits for a call of [`puts`](Engine::puts) that selects no page. So a loop over `puts` ends even
    /// if the store refuses every page.
    ///
    /// The store drops the put's [leases](crate::backend::SwapMemory) first: the engine may save another page to the
    /// swap page from now on, and backends reject saves to a leased page.
    pub fn put_done(&mut self, id: PutId, ok: bool) -> bool {
        self.world.prefixes.has_swap() && self.world.prefixes.swap_mut().end_put(id, ok)
    }

    /// Takes at most `most` swap pages, into which a store writes the pages of a prompt that follow its cached prefix.
    /// The prefix stays cached until [`fetched`](Engine::fetched). O(prompt + pages + free swap pages with unfinished
    /// moves), and O(idle nodes) if only swap pages of the prefix could make room.
    ///
    /// Returns `None` without swap memory or hashes, if `most` is 0, for a prompt that contains [`TokenId::PENDING`],
    /// or while 256 fetches are open. Also returns `None` if no whole page without the last token follows the prefix,
    /// no swap page without unfinished moves can be taken, or promises need the pages of the prefix. `None` changes
    /// nothing, not even recency.
    ///
    /// # Errors
    /// [`EngineError::Core`] with [`Error::StoreGroups`] or [`Error::UnnamedNamespace`]; [`EngineError::Backend`].
    pub fn fetch(
        &mut self,
        namespace: Namespace,
        prompt: &[TokenId],
        most: u32,
    ) -> Result<Option<Fetch<'_>>, EngineError<B::Error>> {
        self.check_groups()?;
        if !self.world.prefixes.names.is_named(namespace) {
            return Err(EngineError::Core(Error::UnnamedNamespace { namespace }));
        }
        if !self.world.prefixes.has_swap() || prompt.is_empty() || prompt.contains(&TokenId::PENDING) {
            return Ok(None);
        }
        self.look_at_swap();
        let moved = self.backend.moved().map_err(EngineError::Backend)?;
        // No sequence can use tokens beyond the maximum.
        let end = (prompt.len() - 1).min(self.world.shape.max_sequence_len as usize);
        let tokens = &prompt[..end];
        let (available, moved) = (self.world.available(), [moved.saved, moved.loaded]);
        let World { prefixes, fence, .. } = &mut self.world;
        Ok(prefixes.begin_fetch(namespace, tokens, most, available, moved, fence))
    }

    /// Checks that the model has one group of layers. Puts and fetches do not include cells, which other groups need.
    fn check_groups(&self) -> Result<(), Error> {
        match self.world.shape.layout.groups().count() {
            1 => Ok(()),
            groups => Err(Error::StoreGroups { groups }),
        }
    }

    /// Ends a fetch of which the store has written the first `count` pages: prompts match them from now on. Returns
    /// whether the fetch was open. O(pages of open fetches).
    ///
    /// The store drops the fetch's [leases](crate::backend::SwapMemory) first: the engine may load the pages, and save
    /// others to them, from now on. Backends reject loads from a page with a write lease, and saves to a leased page.
    ///
    /// If [`reset`](Engine::reset) was called after [`fetch`](Engine::fetch), no fetched page is cached.
    pub fn fetched(&mut self, id: FetchId, count: u32) -> bool {
        if !self.world.prefixes.has_swap() {
            return false;
        }
        let World { prefixes, fence, pages, buffers, .. } = &mut self.world;
        buffers.pool_pages.clear();
        let open = prefixes.end_fetch(id, count, fence, &mut buffers.pool_pages, &mut buffers.tokens);
        pages.free_cached(&buffers.pool_pages);
        open
    }
}
