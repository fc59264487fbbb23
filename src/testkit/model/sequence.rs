//! The calls about a sequence after its admission; `step.rs` contains the calls about steps.

use super::{AdmissionKind, ForkWant, Lock, Model, PageIs, Released, Sequence, Step};
use crate::error::Error;
use crate::id::{Scope, SeqKey, StepId, TokenId};
use crate::plan::{Admit, Keep};
use crate::sequence::HOST_MARKS;

impl Sequence {
    /// Records that the tokens from `len` on are about to be removed, if there are any.
    pub(super) fn cut(&mut self, len: usize) {
        if len < self.tokens.len() {
            self.cuts.push(len);
        }
    }
}

impl Model {
    /// `Engine::append`
    pub fn append(&mut self, seq: SeqKey, tokens: &[TokenId]) -> Result<(), Error> {
        let sequence = self.sequence(seq)?;
        let len = (sequence.tokens.len() + tokens.len()) as u64;
        let max = u64::from(self.shape.max_sequence_len);
        if len > max {
            return Err(Error::TooLong { len, max });
        }
        check_known(sequence.tokens.len(), tokens)?;
        self.check_leaves(self.leaves_lacking(sequence, len as usize))?;
        let sequence = self.sequences.get_mut(&seq).expect("seen above");
        sequence.tokens.extend_from_slice(tokens);
        self.update_front(seq, tokens.len() != 1);
        Ok(())
    }

    pub(super) fn leaf_tokens(&self) -> usize {
        self.shape.table.leaf_pages as usize * self.page_size()
    }

    /// Returns the number of leaves that a sequence has for its tokens and pages.
    fn leaves(&self, sequence: &Sequence) -> usize {
        let tokens = sequence.tokens.len().max(sequence.table.len() * self.page_size());
        tokens.div_ceil(self.leaf_tokens())
    }

    /// Returns the number of leaves that a sequence lacks for `len` tokens.
    pub(super) fn leaves_lacking(&self, sequence: &Sequence, len: usize) -> usize {
        len.div_ceil(self.leaf_tokens()).saturating_sub(self.leaves(sequence))
    }

    /// Checks that the table has `leaves` free leaves.
    pub(super) fn check_leaves(&self, leaves: usize) -> Result<(), Error> {
        let used: usize = self.sequences.values().map(|sequence| self.leaves(sequence)).sum();
        let free = self.shape.table.leaf_count as usize - used;
        if leaves > free {
            let tokens = |leaves: usize| (leaves * self.leaf_tokens()) as u64;
            return Err(Error::OutOfTokens { wanted: tokens(leaves), available: tokens(free) });
        }
        Ok(())
    }

    /// Publishes the whole pages of known, computed tokens.
    pub(super) fn publish(&mut self, seq: SeqKey) {
        let page_size = self.page_size();
        let sequence = self.sequences.get_mut(&seq).expect("the caller has checked");
        if sequence.pending > 0 {
            return;
        }
        let end = sequence.cached_len.min(sequence.tokens.len()) / page_size;
        let start = sequence.published;
        let mut duplicates = Vec::new();
        if start < end {
            let published = self.tree.insert(sequence.scope, &sequence.tokens, start, &sequence.table[start..end]);
            sequence.table[start..end].copy_from_slice(&published.table);
            self.pages.turn(&published.taken, PageIs::Private, PageIs::Cached);
            self.counters.published_pages += published.taken.len() as u64;
            self.counters.duplicate_pages += published.duplicates.len() as u64;
            duplicates = published.duplicates;
        }
        let (last_step, end) = (sequence.last_step, end.max(start));
        while let Some(&mark) = self.sequences[&seq].marks.first().filter(|&&mark| mark <= end) {
            if self.keeps_promises(seq, mark) {
                duplicates.extend(self.keep_tails(seq, mark));
            }
            let sequence = self.sequences.get_mut(&seq).expect("it is live");
            sequence.marks.remove(&mark);
            sequence.host_marks.remove(&mark);
            sequence.states.junctions.remove(&mark);
        }
        self.sequences.get_mut(&seq).expect("it is live").published = end;
        duplicates.extend(self.take_held(seq, |model, reach| model.tree.first_held(reach, end)));
        self.release_pages_after(last_step, duplicates);
        self.update_front(seq, false);
    }

    /// Releases the pages of a sequence after the first `keep` places. None of these pages is published.
    pub(super) fn trim(&mut self, seq: SeqKey, keep: usize) {
        let sequence = self.sequences.get_mut(&seq).expect("the caller has checked");
        assert!(keep >= sequence.published, "the model trims published pages");
        let pages = sequence.split_off(keep);
        let last_step = sequence.last_step;
        self.release_pages_after(last_step, pages);
    }

    /// Releases all pages and the lock of a sequence.
    fn let_go(&mut self, seq: SeqKey) {
        let sequence = self.sequences.get_mut(&seq).expect("the caller has checked");
        let end = sequence.table.len();
        let mut pages = sequence.table.split_off(sequence.published);
        if sequence.pending > 0 {
            let prefix = sequence.published + sequence.pending;
            self.leave_tails(seq, prefix);
        }
        pages.extend(self.take_held(seq, |_, _| end));
        pages.extend(self.leave_states(seq));
        let sequence = self.sequences.get_mut(&seq).expect("the caller has checked");
        sequence.others.iter_mut().for_each(Vec::clear);
        sequence.held.fill(0);
        sequence.marks.clear();
        sequence.host_marks.clear();
        sequence.kept = 0;
        (sequence.on_device, sequence.cell_pages) = (0, 0);
        sequence.table.clear();
        sequence.promised = 0;
        let lock = Lock {
            scope: sequence.scope,
            tokens: sequence.tokens.clone(),
            pages: std::mem::take(&mut sequence.published) + std::mem::take(&mut sequence.pending),
        };
        let last_step = sequence.last_step;
        self.release_pages_after(last_step, pages);
        self.release_after(last_step, Released::Lock(lock));
    }

    /// Returns whether W4 holds if a sequence keeps its tails at a mark.
    pub(super) fn keeps_promises(&self, seq: SeqKey, mark: usize) -> bool {
        let sequence = &self.sequences[&seq];
        let outstanding = |kept| self.outstanding_of(sequence, sequence.promised, sequence.published, kept);
        let more = outstanding(sequence.kept.max(mark)) - outstanding(sequence.kept);
        let promised = self.outstanding_pages() as usize + more;
        promised <= (self.reclaimable() + self.pages.count(PageIs::Fenced)) as usize
    }

    /// Keeps the tails at the end of the published pages.
    fn keep_now(&mut self, seq: SeqKey) {
        let Sequence { published, last_step, .. } = self.sequences[&seq];
        let duplicates = self.keep_tails(seq, published);
        self.release_pages_after(last_step, duplicates);
    }

    /// Keeps the tails of a sequence that ends, unless its layers keep a state: prompts match only where states are
    /// cached.
    fn keep_at_end(&mut self, seq: SeqKey) {
        if self.state_size() == 0 {
            self.keep_now(seq);
        }
    }

    /// Returns the number of device pages of the cells in the tails of a prefix.
    pub(super) fn tail_pages(&self, scope: Scope, tokens: &[TokenId], pages: usize) -> usize {
        let keys = self.tree.tail_cells(scope, tokens, pages);
        keys.iter().map(|key| self.tree.cells[key].pages.len()).sum()
    }

    /// `Engine::finish_with`
    pub fn finish(&mut self, seq: SeqKey, keep: Keep) -> Result<(), Error> {
        if !self.sequence(seq)?.preempted {
            self.sequences.get_mut(&seq).expect("seen above").promised = 0;
            if keep == Keep::Publish && self.shares() {
                self.publish(seq);
                self.keep_at_end(seq);
            }
            self.let_go(seq);
        }
        self.sequences.remove(&seq);
        Ok(())
    }

    /// `Engine::preempt`
    pub fn preempt(&mut self, seq: SeqKey, keep: Keep) -> Result<(), Error> {
        self.running(seq)?;
        self.check_accepted(seq)?;
        self.sequences.get_mut(&seq).expect("seen above").promised = 0;
        if keep == Keep::Publish && self.shares() {
            self.publish(seq);
            self.keep_at_end(seq);
        }
        self.let_go(seq);
        let sequence = self.sequences.get_mut(&seq).expect("seen above");
        sequence.preempted = true;
        sequence.preemption_epoch += 1;
        sequence.last_step = 0;
        sequence.cached_len = 0;
        sequence.planned_len = 0;
        self.counters.preemptions += 1;
        self.update_front(seq, false);
        Ok(())
    }

    /// `Engine::resume`
    pub fn resume(&mut self, seq: SeqKey, admit: Admit) -> Result<(), Error> {
        let sequence = self.sequence(seq)?;
        if !sequence.preempted {
            return Err(Error::NotPreempted { seq });
        }
        self.check_promise(admit.promise)?;
        // The sequence begins anew: in the present generation, or without prefix reuse in its own generation.
        let scope = self.next_scope(sequence.scope.namespace);
        self.estimate(scope, &sequence.tokens, admit)?.check()?;
        let pages = self.used_hit(scope, &sequence.tokens, admit);
        let hit_len = self.begin_with(seq, scope, admit, pages);
        let sequence = self.sequences.get_mut(&seq).expect("seen above");
        sequence.admission_kind = Some(match sequence.admission_kind {
            Some(AdmissionKind::Admitted { prompt_len, .. }) => AdmissionKind::Admitted { prompt_len, hit_len },
            _ => AdmissionKind::Resumed { hit_len },
        });
        self.counters.resumes += 1;
        Ok(())
    }

    /// `Engine::mark`
    pub fn mark(&mut self, seq: SeqKey, len: u32) -> Result<(), Error> {
        let sequence = self.running(seq)?;
        let published = sequence.published + sequence.pending;
        if !self.shares() || !self.has_groups() {
            return Ok(());
        }
        let mark = len as usize / self.page_size();
        let planned_len = sequence.planned_len;
        if self.state_size() > 0 && mark * self.page_size() < planned_len {
            return Err(Error::MarkLen { len, min: planned_len.next_multiple_of(self.page_size()) as u32 });
        }
        if mark < published {
            return Err(Error::MarkLen { len, min: (published * self.page_size()) as u32 });
        }
        if mark == published {
            if !self.is_pending(seq) && self.keeps_promises(seq, mark) {
                self.keep_now(seq);
            }
        } else {
            self.add_mark(seq, mark)?;
        }
        if self.state_size() > 0 {
            self.mark_state(seq, mark);
        }
        Ok(())
    }

    /// Adds a mark above the published pages.
    fn add_mark(&mut self, seq: SeqKey, mark: usize) -> Result<(), Error> {
        let has_state = self.state_size() > 0;
        let sequence = self.sequences.get_mut(&seq).expect("it runs");
        let known = if has_state { &sequence.states.junctions } else { &sequence.marks };
        if known.contains(&mark) {
            return Ok(());
        }
        if sequence.host_marks.len() == HOST_MARKS {
            return Err(Error::OutOfMarks { max: HOST_MARKS as u32 });
        }
        sequence.marks.insert(mark);
        sequence.host_marks.insert(mark);
        sequence.states.junctions.insert(mark);
        Ok(())
    }

    /// `Engine::promise`
    pub fn promise(&mut self, seq: SeqKey, len: u32) -> Result<(), Error> {
        let before = self.running(seq).and_then(|_| self.outstanding(seq))?;
        self.check_promise(len)?;
        let mut after = self.clone();
        let pages = (len as usize).div_ceil(self.page_size());
        after.sequences.get_mut(&seq).expect("seen above").promised = pages;
        let more = after.outstanding(seq)?.saturating_sub(before);
        self.check_pages(more as usize, 0)?;
        *self = after;
        Ok(())
    }

    /// `Engine::rollback`
    pub fn rollback(&mut self, seq: SeqKey, len: u32) -> Result<(), Error> {
        self.sequence(seq)?;
        self.check_accepted(seq)?;
        let sequence = self.sequence(seq)?;
        let min = (self.published_len(seq)).max(1);
        let max = sequence.tokens.len() as u32;
        if !(min..=max).contains(&len) {
            return Err(Error::RollbackLen { len, min, max });
        }
        let sequence = self.sequences.get_mut(&seq).expect("seen above");
        let (preemption_epoch, len) = (sequence.preemption_epoch, len as usize);
        let is_lost = len < sequence.planned_len;
        sequence.cut(len);
        sequence.tokens.truncate(len);
        sequence.cached_len = sequence.cached_len.min(len);
        sequence.planned_len = sequence.planned_len.min(len);
        let pending = sequence.pending;
        let keep = sequence.planned_len.div_ceil(self.page_size()) - pending;
        for step in self.steps.values_mut() {
            step.cap(seq, preemption_epoch, len);
        }
        self.trim(seq, keep);
        if is_lost {
            self.lose_state(seq);
        }
        self.counters.rollbacks += 1;
        self.update_front(seq, false);
        Ok(())
    }

    /// `Engine::fork`, with `keys` as in [`Model::admit`], one for each child.
    pub fn fork(&mut self, keys: &[SeqKey], seq: SeqKey, promise: u32) -> Result<ForkWant, Error> {
        self.load_first(std::iter::once(seq))?;
        self.running(seq)?;
        self.check_accepted(seq)?;
        let parent = self.running(seq)?;
        self.check_promise(promise)?;
        let state = self.state_to_copy(seq)?;
        let page_size = self.page_size();
        let len = parent.cached_len.min(parent.tokens.len());
        let (pages, tail) = (len / page_size, usize::from(len % page_size > 0));
        self.check_rows(keys.len(), parent.tokens.len())?;
        if keys.is_empty() {
            return Ok(ForkWant { copies: Vec::new(), step: None });
        }
        let copied = tail * self.tracks() + state.len();
        if copied > 0 {
            self.check_steps()?;
        }
        let promised = (promise as usize).div_ceil(page_size);
        let of_state = if promised > 0 && state.is_empty() { self.state_size() } else { 0 };
        let outstanding = self.outstanding_of_promise(promised, pages + tail, pages, pages) + of_state;
        let of_parent = |kept| self.outstanding_of(parent, parent.promised, pages, kept);
        let more = of_parent(pages) - of_parent(parent.kept);
        self.check_pages(keys.len() * (copied + outstanding) + more, 0)?;
        // The pages for the copies are taken first, because publishing may lock idle pages.
        let targets = self.take_pages(keys.len() * copied);
        self.flush_saves();
        self.publish(seq);
        self.keep_now(seq);
        let step = (copied > 0).then(|| self.new_step(Step::copy()));
        let parent = self.sequences.get_mut(&seq).expect("seen above");
        parent.last_step = step.unwrap_or(parent.last_step);
        let parent = parent.clone();
        for (index, &key) in keys.iter().enumerate() {
            let mut child = parent.clone();
            child.cached_len = len;
            child.planned_len = len;
            child.table.truncate(pages);
            let mut own = targets[index * copied..(index + 1) * copied].iter().copied();
            child.table.extend(own.by_ref().take(tail));
            for track in &mut child.others {
                track.truncate(pages);
                track.extend(own.by_ref().take(tail));
            }
            for key in self.tree.tail_cells_of_tracks(child.scope, &child.tokens, pages) {
                self.tree.acquire_cell(&key);
            }
            child.marks.clear();
            child.host_marks.clear();
            child.promised = promised;
            child.preemption_epoch = 0;
            child.admission_kind = None;
            child.front = None;
            child.cuts.clear();
            child.last_step = step.unwrap_or(0);
            self.tree.lock(child.scope, &child.tokens, pages);
            self.sequences.insert(key, child);
            self.inherit_state(&parent.states, key, own.collect());
            self.update_front(key, true);
        }
        self.counters.forks += keys.len() as u64;
        let others = parent.others.iter().flat_map(|own| &own[pages..pages + tail]);
        let sources: Vec<_> = parent.table[pages..pages + tail].iter().chain(others).chain(&state).copied().collect();
        Ok(ForkWant { copies: sources.into_iter().cycle().zip(targets).collect(), step: step.map(StepId::new) })
    }

    /// `Engine::reset`
    pub fn reset(&mut self) {
        if self.shares() {
            self.generation += 1;
        }
        let gone = self.tree.reset(self.shares().then_some(self.generation));
        self.pages.turn(&gone, PageIs::Cached, PageIs::Free);
    }
}

/// Checks that no token is the placeholder. The first token has position `start`.
pub(super) fn check_known(start: usize, tokens: &[TokenId]) -> Result<(), Error> {
    match tokens.iter().position(|token| *token == TokenId::PENDING) {
        Some(at) => Err(Error::PendingToken { position: (start + at) as u32 }),
        None => Ok(()),
    }
}
