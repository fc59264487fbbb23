//! The token streams being extended: [`SequenceTable`], one row a sequence.
//!
//! ```text
//! tokens     0 ......... cached_len ..... planned_len ... token_len      (planned_len may pass token_len: see below)
//!            |  have K and V  | in unfinished plans | known, waiting |
//! pages      [p p p p p p p p|p p p p p p p p p p p]
//!             0 .. published    .. page_len = ceil(planned_len / page_size)
//!             in the tree, under the lock | private
//! ```
//!
//! * S1. cached_len <= planned_len; page_len = ceil(planned_len / page_size).
//! * S2. The first `published` pages are the tree's, on the path of the lock; the rest are private and this row's only.
//! * S3. A preempted sequence has tokens and nothing else.
//! * S4. Pages before `dirty_from` have been planned to be sent to the backends; those from it on have not.
//! * S5. Every chunk in use belongs to a row.
//!
//! planned_len passes token_len by one token for each unfinished step that samples the token of the next.
//!
//! Tokens and pages of a row lie in chunks (`chunks.rs`).
//!
//! Not here: prefixes, page states, steps.

mod chunks;

use slotmap::SlotMap;

use crate::error::Error;
use crate::id::{Namespace, PageId, PrefixLock, RowId, SeqKey, StepId, TokenId};
use crate::layout::TableShape;
use crate::plan::TableWrite;
use chunks::ChunkStore;

/// One sequence's numbers. Lengths in tokens unless they say pages.
#[derive(Debug)]
pub struct Sequence {
    /// Its row in the page tables.
    pub row: RowId,
    /// Known tokens.
    pub token_len: u32,
    /// Tokens with K and V, by committed steps.
    pub cached_len: u32,
    /// `cached_len` and what unfinished plans add.
    pub planned_len: u32,
    /// Pages of its page table.
    pub page_len: u32,
    /// Pages of it that are the tree's.
    pub published: u32,
    /// First page that no plan has sent to the backends.
    pub dirty_from: u32,
    /// Chunks of its row.
    chunks: u32,
    /// Counts preemptions: plan items of an earlier life are skipped.
    pub life: u32,
    /// The last step that planned it or copied for it; 0: none in this life.
    pub last_step: StepId,
    /// Its last plan item, in the numbering of the step log; 0: none.
    pub last_item: u64,
    /// The last plan that named it, to find repeats.
    pub stamp: u64,
    /// The host's namespace.
    pub namespace: Namespace,
    /// Its prefix; none while preempted.
    pub lock: Option<PrefixLock>,
}

impl Sequence {
    /// Whether it waits to be resumed, and so has tokens and nothing else.
    pub fn is_preempted(&self) -> bool {
        self.lock.is_none()
    }
}

/// All sequences.
pub struct SequenceTable {
    page_size: u32,
    max: u32,
    rows: SlotMap<SeqKey, Sequence>,
    free_rows: Vec<RowId>,
    store: ChunkStore,
}

impl SequenceTable {
    /// An empty table.
    pub fn new(shape: &TableShape, page_size: u32) -> Self {
        Self {
            page_size,
            max: shape.rows,
            rows: SlotMap::with_capacity_and_key(shape.rows as usize),
            free_rows: (0..shape.rows).rev().map(RowId::new).collect(),
            store: ChunkStore::new(shape, page_size),
        }
    }

    /// Touches the memory of tokens and page tables, so that no call pays for a page fault later.
    pub fn prefault(&mut self) {
        self.store.prefault();
    }

    /// Bytes that a table reserves; they are touched as tokens come.
    pub fn bytes(shape: &TableShape, page_size: u32) -> u64 {
        let row = size_of::<Sequence>() + 4 + size_of::<RowId>();
        u64::from(shape.rows) * row as u64 + ChunkStore::bytes(shape, page_size)
    }

    /// Sequences, preempted ones included.
    pub fn len(&self) -> u32 {
        self.rows.len() as u32
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Most sequences at a time.
    pub fn max(&self) -> u32 {
        self.max
    }

    /// All sequences, in no order.
    pub fn iter(&self) -> impl Iterator<Item = (SeqKey, &Sequence)> {
        self.rows.iter()
    }

    /// A sequence.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`] for a key that is finished or never was.
    pub fn get(&self, seq: SeqKey) -> Result<&Sequence, Error> {
        self.rows.get(seq).ok_or(Error::UnknownSequence { seq })
    }

    /// A sequence to change. Same error.
    pub(crate) fn get_mut(&mut self, seq: SeqKey) -> Result<&mut Sequence, Error> {
        self.rows.get_mut(seq).ok_or(Error::UnknownSequence { seq })
    }

    /// A sequence that is not preempted.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`], [`Error::Preempted`].
    pub fn running(&self, seq: SeqKey) -> Result<&Sequence, Error> {
        let sequence = self.get(seq)?;
        if sequence.is_preempted() { Err(Error::Preempted { seq }) } else { Ok(sequence) }
    }

    /// Checks that a new row with so many tokens fits.
    ///
    /// # Errors
    /// [`Error::OutOfSequences`], [`Error::OutOfTokens`].
    pub fn check_room(&self, tokens: u32) -> Result<(), Error> {
        if self.rows.len() == self.max as usize {
            return Err(Error::OutOfSequences { max: self.max });
        }
        self.check_chunks(self.store.chunks_for(tokens), u64::from(tokens))
    }

    /// Checks that `chunks` more fit; `tokens` is what the caller wants to store.
    pub(crate) fn check_chunks(&self, chunks: u32, tokens: u64) -> Result<(), Error> {
        if chunks <= self.store.free_count() {
            return Ok(());
        }
        let available = u64::from(self.store.free_count()) * u64::from(self.store.chunk_tokens());
        Err(Error::OutOfTokens { wanted: tokens, available })
    }

    /// Chunks that a row lacks to hold so many tokens, in whole pages.
    pub(crate) fn chunks_lacking(&self, sequence: &Sequence, page_len: u32) -> u32 {
        self.store.chunks_for_pages(page_len).saturating_sub(sequence.chunks)
    }

    /// Records that a step extends a running sequence by `len` tokens.
    pub(crate) fn begin_extend(
        &mut self,
        seq: SeqKey,
        len: u32,
        step: StepId,
        mut record: impl FnMut(&Sequence) -> u64,
    ) -> &Sequence {
        let sequence = &mut self.rows[seq];
        sequence.last_item = record(sequence);
        sequence.last_step = step;
        sequence.planned_len += len;
        sequence
    }

    /// All pages of a row count as sent.
    pub(crate) fn mark_clean(&mut self, seq: SeqKey) {
        let sequence = &mut self.rows[seq];
        sequence.dirty_from = sequence.page_len;
    }

    /// Makes a row of these tokens. The caller checked the room.
    pub(crate) fn spawn(
        &mut self,
        namespace: Namespace,
        tokens: &[TokenId],
        lock: PrefixLock,
    ) -> SeqKey {
        let row = self.free_rows.pop().expect("the caller checked the room");
        let sequence = Sequence {
            row,
            token_len: 0,
            cached_len: 0,
            planned_len: 0,
            page_len: 0,
            published: 0,
            dirty_from: 0,
            chunks: 0,
            life: 0,
            last_step: StepId::default(),
            last_item: 0,
            stamp: 0,
            namespace,
            lock: Some(lock),
        };
        let seq = self.rows.insert(sequence);
        self.push_tokens(seq, tokens);
        seq
    }

    /// Removes a row that has given up its lock and pages.
    pub(crate) fn despawn(&mut self, seq: SeqKey) {
        let mut sequence = self.rows.remove(seq).expect("the caller looked it up");
        assert!(sequence.lock.is_none(), "S2: a finished sequence has given up its prefix");
        self.store.shrink(sequence.row, &mut sequence.chunks, 0);
        self.free_rows.push(sequence.row);
    }

    /// Makes a row of another's tokens, `tokens` of them. The caller checked the room. O(tokens).
    pub(crate) fn spawn_copy(&mut self, parent: SeqKey, tokens: u32, lock: PrefixLock) -> SeqKey {
        let (from, namespace) = (self.rows[parent].row, self.rows[parent].namespace);
        let child = self.spawn(namespace, &[], lock);
        let sequence = &mut self.rows[child];
        let chunks = self.store.chunks_for(tokens);
        self.store.reserve(sequence.row, &mut sequence.chunks, chunks);
        self.store.copy_tokens(from, sequence.row, tokens);
        sequence.token_len = tokens;
        child
    }

    /// Appends tokens. The caller checked the room. O(tokens).
    pub(crate) fn push_tokens(&mut self, seq: SeqKey, tokens: &[TokenId]) {
        let sequence = &mut self.rows[seq];
        let len = sequence.token_len + tokens.len() as u32;
        let chunks = self.store.chunks_for(len);
        self.store.reserve(sequence.row, &mut sequence.chunks, chunks);
        self.store.write_tokens(sequence.row, sequence.token_len, tokens);
        sequence.token_len = len;
    }

    /// Appends pages. The caller checked the room. O(pages).
    pub(crate) fn push_pages(&mut self, seq: SeqKey, pages: &[PageId]) {
        if pages.is_empty() {
            return;
        }
        let sequence = &mut self.rows[seq];
        let len = sequence.page_len + pages.len() as u32;
        let chunks = self.store.chunks_for_pages(len);
        self.store.reserve(sequence.row, &mut sequence.chunks, chunks);
        self.store.write_pages(sequence.row, sequence.page_len, pages);
        sequence.page_len = len;
    }

    /// Drops pages from `page_len` on; they are appended to `out`. O(pages dropped).
    pub(crate) fn truncate_pages(&mut self, seq: SeqKey, page_len: u32, out: &mut Vec<PageId>) {
        let sequence = &mut self.rows[seq];
        if page_len >= sequence.page_len {
            return;
        }
        assert!(page_len >= sequence.published, "S2: published pages are not the row's to drop");
        for index in page_len..sequence.page_len {
            out.push(self.store.page(sequence.row, index));
        }
        sequence.page_len = page_len;
        sequence.dirty_from = sequence.dirty_from.min(page_len);
        self.shrink(seq);
    }

    /// Forgets all pages, which the caller has given up: the sequence is preempted.
    pub(crate) fn clear_pages(&mut self, seq: SeqKey) {
        let sequence = &mut self.rows[seq];
        (sequence.page_len, sequence.published, sequence.dirty_from) = (0, 0, 0);
        (sequence.cached_len, sequence.planned_len) = (0, 0);
        (sequence.last_step, sequence.last_item) = (StepId::default(), 0);
        sequence.life += 1;
        self.shrink(seq);
    }

    /// Forgets tokens past `len`.
    pub(crate) fn truncate_tokens(&mut self, seq: SeqKey, len: u32) {
        self.rows[seq].token_len = len;
        self.shrink(seq);
    }

    /// Gives chunks back that neither tokens nor pages reach.
    fn shrink(&mut self, seq: SeqKey) {
        let sequence = &mut self.rows[seq];
        let tokens = sequence.token_len.max(sequence.page_len * self.page_size);
        self.store.shrink(sequence.row, &mut sequence.chunks, tokens);
    }

    /// One page of a row.
    pub fn page(&self, sequence: &Sequence, index: u32) -> PageId {
        debug_assert!(index < sequence.page_len);
        self.store.page(sequence.row, index)
    }

    /// One known token.
    pub fn token(&self, sequence: &Sequence, position: u32) -> TokenId {
        debug_assert!(position < sequence.token_len);
        self.store.token(sequence.row, position)
    }

    /// A row's pages in order.
    pub fn pages(&self, sequence: &Sequence) -> impl Iterator<Item = PageId> + use<'_> {
        let row = sequence.row;
        (0..sequence.page_len).map(move |index| self.store.page(row, index))
    }

    /// A row's pages `start..end`, in contiguous pieces.
    pub(crate) fn page_pieces(
        &self,
        sequence: &Sequence,
        start: u32,
        end: u32,
    ) -> impl Iterator<Item = &[PageId]> + use<'_> {
        self.store.page_pieces(sequence.row, start, end)
    }

    /// A row's known tokens `start..end`, in contiguous pieces.
    pub(crate) fn token_pieces(
        &self,
        sequence: &Sequence,
        start: u32,
        end: u32,
    ) -> impl Iterator<Item = &[TokenId]> + use<'_> {
        self.store.token_pieces(sequence.row, start, end)
    }

    /// The longest contiguous piece of whole pages from page `start` on, up to page `end`: its tokens and pages.
    pub(crate) fn piece_mut(
        &mut self,
        row: RowId,
        start: u32,
        end: u32,
    ) -> (&[TokenId], &mut [PageId]) {
        self.store.piece_mut(row, start, end)
    }

    /// Number of writes that [`SequenceTable::dirty_writes`] will give once the row has `page_len` pages.
    pub(crate) fn dirty_write_count(&self, sequence: &Sequence, page_len: u32) -> usize {
        let (from, to) = (sequence.dirty_from, page_len);
        (to - from + self.store.directory_span(from, to)) as usize
    }

    /// The words of a row that no plan has sent: each new page, and each chunk that a new page is the first of.
    pub(crate) fn dirty_writes(&self, sequence: &Sequence, mut write: impl FnMut(TableWrite)) {
        self.store.writes(sequence.row, sequence.dirty_from, sequence.page_len, &mut write);
    }

    /// Chunks in use and chunks that rows count, for audits.
    pub(crate) fn chunk_counts(&self) -> (u32, u32) {
        (self.store.used_count(), self.rows.values().map(|sequence| sequence.chunks).sum())
    }
}
