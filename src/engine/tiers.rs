//! Calls about pages in swap memory: loads, and saves ahead of evictions.

use crate::backend::Backend;
use crate::error::EngineError;
use crate::id::SeqKey;
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
    /// [`EngineError::Core`] with [`Error::UnknownSequence`](crate::Error::UnknownSequence),
    /// [`Error::Preempted`](crate::Error::Preempted) or [`Error::OutOfPages`](crate::Error::OutOfPages): nothing has
    /// changed. [`EngineError::Backend`] if the load failed: the sequences wait as before, and evicted pages stay
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
    /// [`EngineError::Core`] with [`Error::UnknownSequence`](crate::Error::UnknownSequence);
    /// [`EngineError::Backend`].
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
