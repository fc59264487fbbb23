//! [`RowMut`]: one sequence to change, with its tokens and its page tables.

use super::HOST_MARKS;
use super::branches::Branches;
use super::inflight::InflightIndex;
use super::page_table::PageTable;
use super::record::{DirtyFrom, Sequence};
use super::states::States;
use super::token_store::TokenStore;
use crate::error::Error;
use crate::id::{CellId, PageId, SeqKey, TokenId};
use crate::layout::{HeldGroup, Limits};
use crate::plan::TableWrite;

/// Marks of a row. A mark is a length in pages; 0 means none. At a mark, the row keeps its tails.
#[derive(Clone, Copy, Default)]
pub(super) struct Marks {
    /// Waiting marks: the end of the full match, the last place where an equal prompt can match, and the host's marks.
    pub(super) waiting: [u32; 2 + HOST_MARKS],
    /// The last kept mark. Cells own the pages of the row's held places below the mark. The pages of later places are
    /// private.
    pub(super) kept: u32,
}

/// The pages that a row waits for.
#[derive(Clone, Copy, Default)]
pub(super) struct Waits {
    /// Number of pending pages. The locked prefix contains them after the published pages, but the page table does not
    /// list them yet.
    pub(super) pages: u32,
    /// Number of pending pages that were on the device at the admission.
    pub(super) on_device: u32,
    /// Number of pages of the tails' cells that were in swap memory alone at the admission. A promise covers them.
    pub(super) cell_pages: u32,
}

/// The two-level stores of all sequences.
pub(super) struct Stores {
    pub(super) page_size: u32,
    /// The rule for the places that a row keeps in each group other than group 0.
    pub(super) limits: Limits,
    /// Outstanding pages of all promises.
    pub(super) all_outstanding: u32,
    pub(super) tokens: TokenStore,
    pub(super) pages: PageTable,
    /// Marks by row; empty without groups.
    pub(super) marks: Vec<Marks>,
    /// Waits by row; empty without swap memory.
    pub(super) waits: Vec<Waits>,
    /// States by row; empty if no group keeps a state.
    pub(super) states: States,
    pub(super) inflight: InflightIndex,
    pub(super) branches: Branches,
}

impl Stores {
    pub(super) fn pending(&self, sequence: &Sequence) -> u32 {
        self.waits.get(sequence.row.index()).map_or(0, |waits| waits.pages)
    }

    /// Returns the outstanding pages that a sequence would have with a promise of `promised` places.
    pub(super) fn outstanding(&self, sequence: &Sequence, promised: u32) -> u32 {
        let Sequence { page_len, published, .. } = *sequence;
        let outstanding = self.limits.outstanding(promised, page_len, published, self.kept(sequence));
        let outstanding = outstanding.saturating_add(self.states.outstanding(sequence.row.index(), promised));
        match self.waits.get(sequence.row.index()) {
            Some(waits) if promised > 0 && waits.pages > 0 => {
                (outstanding - waits.on_device.min(promised)).saturating_add(waits.cell_pages)
            }
            _ => outstanding,
        }
    }

    /// Returns the minimum number of known tokens for a front: those up to the end of the page, and one more.
    fn front_len(&self, sequence: &Sequence) -> u32 {
        (sequence.published + 1) * self.page_size + 1
    }

    /// Returns whether a sequence has a front (`inflight.rs`).
    pub(super) fn has_front(&self, sequence: &Sequence) -> bool {
        sequence.lock.is_some() && self.pending(sequence) == 0 && sequence.token_len >= self.front_len(sequence)
    }

    /// Returns the hash of a sequence's front.
    pub(super) fn front_hash(&self, sequence: &Sequence) -> u32 {
        let Sequence { row, published: at, .. } = *sequence;
        let scope = sequence.scope().expect("a sequence with a front runs");
        let before = (at > 0).then(|| self.pages.page(row, at - 1));
        self.inflight.hash(before, scope, self.tokens.pages(row, at, 1))
    }
}

/// A sequence with its tokens and pages. Two pointers, so that a look-up returns it in registers.
pub(crate) struct RowMut<'a> {
    pub sequence: &'a mut Sequence,
    pub(super) stores: &'a mut Stores,
}

/// The leaves and table writes that a row lacks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Lacking {
    /// Number of leaves of tokens.
    pub leaves: u32,
    /// Number of page table words that the next plan will send.
    pub table_writes: u32,
}

impl RowMut<'_> {
    /// Moves the kept tokens to the places from `start` on. `kept` contains their ascending offsets from `start`. The
    /// caller then truncates the row. O(tokens kept).
    pub fn keep_tokens(&mut self, start: u32, kept: &[u32]) {
        let Self { sequence, stores: Stores { tokens, .. } } = self;
        for (to, &token) in (0..).zip(kept) {
            let token = tokens.token(sequence.row, start + token);
            tokens.write_one(sequence.row, start + to, token);
        }
    }

    /// Checks that the row can have `len` tokens.
    ///
    /// # Errors
    /// [`Error::OutOfTokens`].
    pub fn check_room(&self, len: u32) -> Result<(), Error> {
        if len <= self.sequence.leaves * self.stores.tokens.leaf_tokens() {
            return Ok(());
        }
        let leaves = self.stores.tokens.leaves_for(len) - self.sequence.leaves;
        self.stores.tokens.check_free(leaves.into())
    }

    /// Appends tokens. The caller has checked that they fit. O(tokens).
    pub fn append_tokens(&mut self, tokens: &[TokenId]) {
        let Self { sequence, stores: Stores { tokens: store, .. } } = self;
        let len = sequence.token_len + tokens.len() as u32;
        store.reserve(sequence.row, &mut sequence.leaves, len);
        match tokens {
            [token] => store.write_one(sequence.row, sequence.token_len, *token),
            _ => store.write(sequence.row, sequence.token_len, tokens),
        }
        sequence.token_len = len;
        sequence.last_token = tokens.last().copied().unwrap_or(sequence.last_token);
    }

    /// Adds the front of the sequence with key `seq`, if it has one and the index does not contain it.
    pub fn begin_front(&mut self, seq: SeqKey) {
        let Self { sequence, stores } = self;
        if !stores.inflight.holds(sequence.row) && stores.has_front(sequence) {
            let hash = stores.front_hash(sequence);
            stores.inflight.enter(sequence.row, seq, hash);
        }
    }

    #[inline]
    pub fn advance_front(&mut self) {
        let (row, inflight) = (self.sequence.row, &mut self.stores.inflight);
        if !inflight.is_empty() && inflight.holds(row) {
            let seq = inflight.leave(row);
            self.begin_front(seq);
        }
    }

    /// Removes the front if the sequence no longer has one, because it dropped tokens or stopped running.
    pub fn drop_front(&mut self) {
        let Self { sequence, stores } = self;
        if stores.inflight.holds(sequence.row) && !stores.has_front(sequence) {
            stores.inflight.leave(sequence.row);
        }
    }

    /// Returns the number of promised pages that the next `places` places would take.
    #[inline]
    pub fn promised_of(&self, places: u32) -> u32 {
        if self.sequence.promised == 0 { 0 } else { self.outstanding_of(places) }
    }

    /// Returns [`RowMut::promised_of`] for a row with a promise.
    fn outstanding_of(&self, places: u32) -> u32 {
        let Sequence { promised, page_len, published, .. } = *self.sequence;
        let kept = self.stores.kept(self.sequence);
        let outstanding = |page_len| self.stores.limits.outstanding(promised, page_len, published, kept);
        outstanding(page_len) - outstanding(page_len + places)
    }

    /// Returns the leaves and table writes that the row still needs to have `page_len` places and to send all of them.
    #[inline]
    pub fn lacking(&self, page_len: u32) -> Lacking {
        let Sequence { leaves: own, inherited, published, .. } = *self.sequence;
        let dirty_from = self.sequence.dirty_from.page();
        let leaves = self.stores.pages.leaves_for(page_len);
        let dirty_leaves = leaves - self.stores.pages.leaves_for(dirty_from);
        let pages = self.stores.limits.held(dirty_from.max(inherited), page_len, published);
        let table_writes = pages.saturating_add(dirty_leaves);
        Lacking { leaves: leaves.saturating_sub(own), table_writes }
    }

    /// Returns [`RowMut::lacking`] for one more place of a row whose pages are sent. `ONE` is set if there is one
    /// track.
    #[inline]
    pub fn lacking_one<const ONE: bool>(&self) -> Lacking {
        let page_len = self.sequence.page_len;
        if self.stores.pages.begins_leaf(page_len) {
            self.lacking(page_len + 1)
        } else {
            let table_writes = if ONE { 1 } else { self.stores.pages.tracks() };
            Lacking { leaves: 0, table_writes }
        }
    }

    /// Appends `count` places, and memory for their tokens. `pages` contains the pages of track 0, then those of each
    /// later track. It contains no pages for places that a track does not keep. The caller has checked that the places
    /// fit. O(pages).
    pub fn append_pages(&mut self, count: u32, pages: &[PageId]) {
        let Self { sequence, stores: Stores { page_size, limits, tokens, pages: table, .. } } = self;
        let len = sequence.page_len + count;
        tokens.reserve(sequence.row, &mut sequence.leaves, len * *page_size);
        table.reserve(sequence.row, sequence.page_len, len);
        let (own, mut rest) = pages.split_at(count as usize);
        table.write(sequence.row, 0, sequence.page_len, own);
        for (track, first) in limits.tracks(sequence.published) {
            let start = sequence.page_len.max(first).min(len);
            let own = rest.split_off(..(len - start) as usize).expect("each place has a page");
            table.write(sequence.row, track, start, own);
        }
        debug_assert!(rest.is_empty(), "each page has a place");
        sequence.page_len = len;
        if len > 0 {
            sequence.last_entry = table.entry(sequence.row, len - 1);
        }
    }

    /// Combines [`RowMut::append_pages`] and [`RowMut::take_dirty`] for one page. The row has one track, and
    /// [is sent](RowMut::is_sent). It saves 20 % of a plan's instructions at page_size 1, beside
    /// [`RowMut::append_place`].
    #[inline]
    pub fn append_sent(&mut self, page: PageId, mut write: impl FnMut(TableWrite)) {
        debug_assert!(self.is_sent(), "the caller looked");
        let Self { sequence, stores } = self;
        let index = sequence.page_len;
        if stores.pages.begins_leaf(index) {
            return RowMut { sequence, stores }.begin_leaf(page).into_iter().for_each(write);
        }
        sequence.page_len += 1;
        sequence.dirty_from = DirtyFrom::sent(sequence.page_len);
        sequence.last_entry += 1;
        write(stores.pages.write_one(sequence.last_entry, page));
    }

    /// Returns the number of words that [`RowMut::append_place`] writes for one place of a row with `tracks` tracks.
    #[inline]
    pub fn words_of_place(&self, tracks: usize) -> usize {
        tracks + usize::from(self.stores.pages.begins_leaf(self.sequence.page_len))
    }

    /// Appends one place as [`RowMut::append_sent`] does, with a page for each track.
    #[inline]
    pub fn append_place(&mut self, pages: &[PageId], words: &mut [TableWrite]) {
        debug_assert!(self.is_sent(), "the caller looked");
        if words.len() > pages.len() {
            return self.begin_leaves(pages, words);
        }
        let Self { sequence, stores } = self;
        sequence.page_len += 1;
        sequence.dirty_from = DirtyFrom::sent(sequence.page_len);
        sequence.last_entry += 1;
        stores.pages.write_place(sequence.last_entry, pages, words);
    }

    /// Handles the rare case of [`RowMut::append_place`], as [`RowMut::begin_leaf`] does. Not inlined, which saves 15 %
    /// of a plan's instructions with 2 tracks at page_size 1.
    #[inline(never)]
    fn begin_leaves(&mut self, pages: &[PageId], words: &mut [TableWrite]) {
        self.append_pages(1, pages);
        let mut out = words.iter_mut();
        self.take_dirty(|write| *out.next().expect("counted") = write);
        assert!(out.next().is_none(), "the leaf's word, and one for each track");
    }

    /// Handles the rare case of [`RowMut::append_sent`], the first page of a leaf. Returns the words of the leaf and
    /// the page.
    fn begin_leaf(mut self, page: PageId) -> [TableWrite; 2] {
        self.append_pages(1, &[page]);
        let mut writes = [TableWrite::default(); 2];
        let mut out = writes.iter_mut();
        self.take_dirty(|write| *out.next().expect("two words") = write);
        assert!(out.next().is_none(), "two words");
        writes
    }

    /// Passes the unsent words of the row to `write`, and counts them as sent.
    pub fn take_dirty(&mut self, write: impl FnMut(TableWrite)) {
        let Self { sequence, stores: Stores { limits, pages, .. } } = self;
        let Sequence { row, inherited, page_len, published, .. } = **sequence;
        let own = |track| match track {
            0 => inherited,
            _ => inherited.max(limits.first_place(track, published)),
        };
        pages.writes(row, sequence.dirty_from.page(), own, page_len, write);
        sequence.dirty_from.set_page(page_len);
    }

    /// Sets the number of published pages of a row with groups. Promised pages that no later token reads become
    /// outstanding again.
    pub fn publish_to(&mut self, published: u32) {
        let Self { sequence, stores } = self;
        let Sequence { promised, page_len, published: before, .. } = **sequence;
        sequence.published = published;
        let kept = stores.kept(sequence);
        let Stores { limits, all_outstanding, .. } = &mut **stores;
        let outstanding = |published| limits.outstanding(promised, page_len, published, kept);
        *all_outstanding += outstanding(published) - outstanding(before);
    }

    /// Appends one place for each of `pages`, the tree's pages for track 0. The caller sets the cells of other tracks.
    pub fn append_published(&mut self, pages: &[PageId]) {
        let Self { sequence, stores: Stores { page_size, tokens, pages: table, .. } } = self;
        let len = sequence.page_len + pages.len() as u32;
        tokens.reserve(sequence.row, &mut sequence.leaves, len * *page_size);
        table.reserve(sequence.row, sequence.page_len, len);
        table.write(sequence.row, 0, sequence.page_len, pages);
        sequence.page_len = len;
        if len > 0 {
            sequence.last_entry = table.entry(sequence.row, len - 1);
        }
    }

    /// Adds the loaded pages of a row that waited for them, and subtracts the promised pages that the load has
    /// consumed. Returns the number of pages of group 0 that were in swap memory at the admission.
    pub fn complete_pending(&mut self, pages: &[PageId]) -> u32 {
        let before = self.outstanding();
        self.append_published(pages);
        self.sequence.published += self.pending();
        let waits = &mut self.stores.waits[self.sequence.row.index()];
        let loaded = waits.pages - waits.on_device;
        (waits.pages, waits.on_device, waits.cell_pages) = (0, 0, 0);
        if let Some(marks) = self.stores.marks.get_mut(self.sequence.row.index()) {
            marks.kept = self.sequence.published;
        }
        self.stores.all_outstanding -= before - self.outstanding();
        loaded
    }

    /// Makes a row wait for pages: the first `on_device` of them are on the device. `cell_pages` is the number of pages
    /// of its tails' cells that are in swap memory alone.
    pub fn begin_pending(&mut self, pages: u32, on_device: u32, cell_pages: u32) {
        let waits = &mut self.stores.waits[self.sequence.row.index()];
        (waits.pages, waits.on_device, waits.cell_pages) = (pages, on_device, cell_pages);
    }

    pub fn pending(&self) -> u32 {
        self.stores.pending(self.sequence)
    }

    /// Returns the outstanding pages of the row.
    pub fn outstanding(&self) -> u32 {
        self.stores.outstanding(self.sequence, self.sequence.promised)
    }

    pub fn limits(&self) -> &Limits {
        &self.stores.limits
    }

    /// Returns the maximum number of tail pages that one mark publishes.
    pub fn most_kept(&self) -> u64 {
        u64::from(self.sequence.page_len) * u64::from(self.stores.pages.tracks() - 1)
    }

    pub fn cell(&self, group: u32, place: u32) -> CellId {
        self.stores.pages.cell(self.sequence.row, group, place)
    }

    /// Records that a cell has become the owner of the row's pages at a place.
    pub fn set_cell(&mut self, group: u32, place: u32, cell: CellId) {
        self.stores.pages.set_cell(self.sequence.row, group, place, cell);
    }

    /// Writes a cell and its pages into the row's page tables at a place.
    pub fn name_cell(&mut self, held: &HeldGroup, place: u32, cell: CellId, pages: &[PageId]) {
        for (track, page) in (held.track..).zip(pages) {
            let page = std::slice::from_ref(page);
            self.stores.pages.write(self.sequence.row, track, place, page);
        }
        self.set_cell(held.group, place, cell);
    }

    pub fn track_page(&self, track: u32, place: u32) -> PageId {
        let entry = self.stores.pages.entry(self.sequence.row, place);
        self.stores.pages.track_page_at(entry, track)
    }

    pub fn all_outstanding(&self) -> u32 {
        self.stores.all_outstanding
    }

    /// Returns whether plans have sent all pages of the row, and its state, if it has one, is steady.
    pub fn is_sent(&self) -> bool {
        self.sequence.dirty_from == DirtyFrom::sent(self.sequence.page_len)
    }

    /// Returns the pages `start..end` of a track in contiguous slices.
    pub fn page_pieces(&self, track: u32, start: u32, end: u32) -> impl Iterator<Item = &[PageId]> {
        self.stores.pages.pieces(self.sequence.row, track, start, end)
    }

    /// Returns the known tokens `start..end` in contiguous slices.
    pub fn token_pieces(&self, start: u32, end: u32) -> impl Iterator<Item = &[TokenId]> {
        self.stores.tokens.pieces(self.sequence.row, start, end)
    }

    /// Returns the tokens and the ids of the row's pages from `start` on. The slices end at page `end` or at the end of
    /// the leaf.
    pub fn piece_mut(&mut self, start: u32, end: u32) -> (&[TokenId], &mut [PageId]) {
        let row = self.sequence.row;
        let pages = self.stores.pages.piece_mut(row, start, end);
        (self.stores.tokens.pages(row, start, pages.len()), pages)
    }

    /// Prefetches the word that [`RowMut::append_sent`] will write, unless it is the first of a leaf. Without the
    /// prefetch, writes that miss the CPU's caches wait for each other.
    #[inline]
    pub fn prefetch_next_page(&self) {
        self.stores.pages.prefetch(self.sequence.last_entry + 1);
    }

    /// Returns the row's last page in each track after the first one. The row has `tracks` tracks.
    #[inline]
    pub fn last_further_pages(&self, tracks: usize) -> impl Iterator<Item = PageId> {
        self.stores.pages.further_pages(self.sequence.last_entry, tracks)
    }

    /// Returns the row's last page.
    #[inline]
    pub fn last_page(&self) -> PageId {
        self.stores.pages.page_at(self.sequence.last_entry)
    }

    /// Returns a known token.
    #[inline]
    pub fn token(&self, position: u32) -> TokenId {
        self.stores.tokens.token(self.sequence.row, position)
    }
}
