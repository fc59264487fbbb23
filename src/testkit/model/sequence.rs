//! What a sequence goes through, but for its steps: admitted, extended with tokens, preempted, forked, finished.

use super::{ForkWant, Given, Lock, Model, PageIs, Sequence, Step};
use crate::error::Error;
use crate::id::{Namespace, Scope, SeqKey, StepId, TokenId};
use crate::system::finish::Keep;

impl Model {
    fn next_scope(&self, namespace: Namespace) -> Scope {
        Scope { namespace, generation: self.generation }
    }

    /// Whole pages that `Engine::match_prefix` finds.
    pub fn match_prefix(&self, namespace: Namespace, prompt: &[TokenId]) -> u32 {
        let scope = self.next_scope(namespace);
        self.tree.matched(scope, all_but_last(prompt)).len() as u32
    }

    /// `Engine::admit`, where the engine has answered with `key`, if with a sequence at all.
    pub fn admit(
        &mut self,
        key: SeqKey,
        namespace: Namespace,
        prompt: &[TokenId],
    ) -> Result<(), Error> {
        if prompt.is_empty() {
            return Err(Error::EmptyPrompt);
        }
        let (len, max) = (prompt.len() as u64, u64::from(self.shape.max_sequence_len));
        if len > max {
            return Err(Error::TooLong { len, max });
        }
        check_known(0, prompt)?;
        if self.sequences.len() as u32 == self.shape.table.rows {
            return Err(Error::OutOfSequences { max: self.shape.table.rows });
        }
        self.check_chunks(prompt.len().div_ceil(self.chunk_tokens()))?;
        let scope = self.next_scope(namespace);
        let pages = self.tree.matched(scope, all_but_last(prompt)).len();
        self.check_rest(scope, prompt, pages)?;
        let sequence = Sequence {
            scope,
            tokens: prompt.to_vec(),
            cached_len: 0,
            planned_len: 0,
            published: 0,
            table: Vec::new(),
            preempted: false,
            incarnation: 0,
            last_step: 0,
        };
        self.sequences.insert(key, sequence);
        self.begin_with(key, scope, pages);
        Ok(())
    }

    /// Whether what `pages` matched pages leave to compute can fit, once they are locked.
    fn check_rest(&self, scope: Scope, tokens: &[TokenId], pages: usize) -> Result<(), Error> {
        let rest = tokens.len().div_ceil(self.page_size()) - pages;
        self.check_pages(rest, self.available() - self.tree.idle_on_path(scope, tokens, pages))
    }

    /// A sequence without pages begins with the first `pages` of its tokens' path.
    fn begin_with(&mut self, key: SeqKey, scope: Scope, pages: usize) {
        let len = pages * self.page_size();
        let sequence = self.sequences.get_mut(&key).expect("the row was just made or seen");
        self.tree.lock(scope, &sequence.tokens, pages);
        sequence.table = self.tree.matched(scope, &sequence.tokens[..len]);
        sequence.scope = scope;
        sequence.published = pages;
        sequence.cached_len = len;
        sequence.planned_len = len;
        sequence.preempted = false;
        self.hit_tokens += len as u64;
        if !self.shares() {
            self.generation += 1;
        }
    }

    /// `Engine::append`
    pub fn append(&mut self, seq: SeqKey, tokens: &[TokenId]) -> Result<(), Error> {
        let sequence = self.sequence(seq)?;
        let len = (sequence.tokens.len() + tokens.len()) as u64;
        let max = u64::from(self.shape.max_sequence_len);
        if len > max {
            return Err(Error::TooLong { len, max });
        }
        check_known(sequence.tokens.len(), tokens)?;
        self.check_chunks(self.chunks_lacking(sequence, len as usize))?;
        let sequence = self.sequences.get_mut(&seq).expect("seen above");
        sequence.tokens.extend_from_slice(tokens);
        Ok(())
    }

    fn chunk_tokens(&self) -> usize {
        self.shape.table.chunk_pages as usize * self.page_size()
    }

    /// Chunks of the page tables that a sequence has.
    fn chunks(&self, sequence: &Sequence) -> usize {
        let tokens = sequence.tokens.len().max(sequence.table.len() * self.page_size());
        tokens.div_ceil(self.chunk_tokens())
    }

    /// Chunks that a sequence lacks to have `len` tokens.
    pub(super) fn chunks_lacking(&self, sequence: &Sequence, len: usize) -> usize {
        len.div_ceil(self.chunk_tokens()).saturating_sub(self.chunks(sequence))
    }

    /// Whether `chunks` more fit.
    pub(super) fn check_chunks(&self, chunks: usize) -> Result<(), Error> {
        let used: usize = self.sequences.values().map(|sequence| self.chunks(sequence)).sum();
        let free = self.shape.table.chunk_count as usize - used;
        if chunks > free {
            let tokens = |chunks: usize| (chunks * self.chunk_tokens()) as u64;
            return Err(Error::OutOfTokens { wanted: tokens(chunks), available: tokens(free) });
        }
        Ok(())
    }

    /// Publishes the whole pages below what is known and computed.
    ///
    /// A chunk at a time, which shows only in what becomes stale: the second piece grows the leaf of the first.
    pub(super) fn publish(&mut self, seq: SeqKey) {
        let page_size = self.page_size();
        let chunk_pages = self.shape.table.chunk_pages as usize;
        let sequence = self.sequences.get_mut(&seq).expect("the caller has checked");
        let end = sequence.cached_len.min(sequence.tokens.len()) / page_size;
        let mut duplicates = Vec::new();
        while sequence.published < end {
            let start = sequence.published;
            let stop = end.min((start / chunk_pages + 1) * chunk_pages);
            let own = &sequence.table[start..stop];
            let published = self.tree.insert(sequence.scope, &sequence.tokens, start, own);
            sequence.table[start..stop].copy_from_slice(&published.table);
            sequence.published = stop;
            self.pages.turn(&published.taken, PageIs::Private, PageIs::Cached);
            duplicates.extend(published.duplicates);
        }
        let last_step = sequence.last_step;
        self.give_up_pages(last_step, duplicates);
    }

    /// A sequence releases its pages past the first `keep`, none of them published.
    fn trim(&mut self, seq: SeqKey, keep: usize) {
        let sequence = self.sequences.get_mut(&seq).expect("the caller has checked");
        assert!(keep >= sequence.published, "the model trims what is published");
        let pages = sequence.table.split_off(keep.min(sequence.table.len()));
        let last_step = sequence.last_step;
        self.give_up_pages(last_step, pages);
    }

    /// A sequence releases all its pages and its lock.
    fn let_go(&mut self, seq: SeqKey) {
        let sequence = self.sequences.get_mut(&seq).expect("the caller has checked");
        let pages = sequence.table.split_off(sequence.published);
        sequence.table.clear();
        let lock = Lock {
            scope: sequence.scope,
            tokens: sequence.tokens.clone(),
            pages: std::mem::take(&mut sequence.published),
        };
        let last_step = sequence.last_step;
        self.give_up_pages(last_step, pages);
        self.give_up(last_step, Given::Lock(lock));
    }

    /// `Engine::finish_with`
    pub fn finish(&mut self, seq: SeqKey, keep: Keep) -> Result<(), Error> {
        if !self.sequence(seq)?.preempted {
            if keep == Keep::Publish && self.shares() {
                self.publish(seq);
            }
            self.let_go(seq);
        }
        self.sequences.remove(&seq);
        Ok(())
    }

    /// `Engine::preempt`
    pub fn preempt(&mut self, seq: SeqKey, keep: Keep) -> Result<(), Error> {
        self.running(seq)?;
        if keep == Keep::Publish && self.shares() {
            self.publish(seq);
        }
        self.let_go(seq);
        let sequence = self.sequences.get_mut(&seq).expect("seen above");
        sequence.preempted = true;
        sequence.incarnation += 1;
        sequence.last_step = 0;
        sequence.cached_len = 0;
        sequence.planned_len = 0;
        Ok(())
    }

    /// `Engine::resume`
    pub fn resume(&mut self, seq: SeqKey) -> Result<(), Error> {
        let sequence = self.sequence(seq)?;
        if !sequence.preempted {
            return Err(Error::NotPreempted { seq });
        }
        // It begins anew: in the present generation, or with prefix reuse off in one of its own.
        let scope = self.next_scope(sequence.scope.namespace);
        let pages = self.tree.matched(scope, all_but_last(&sequence.tokens)).len();
        self.check_rest(scope, &sequence.tokens, pages)?;
        self.begin_with(seq, scope, pages);
        Ok(())
    }

    /// `Engine::rollback`
    pub fn rollback(&mut self, seq: SeqKey, len: u32) -> Result<(), Error> {
        let sequence = self.sequence(seq)?;
        let min = (self.published_len(seq)).max(1);
        let max = sequence.tokens.len() as u32;
        if !(min..=max).contains(&len) {
            return Err(Error::RollbackLen { len, min, max });
        }
        let sequence = self.sequences.get_mut(&seq).expect("seen above");
        let (incarnation, len) = (sequence.incarnation, len as usize);
        sequence.tokens.truncate(len);
        sequence.cached_len = sequence.cached_len.min(len);
        sequence.planned_len = sequence.planned_len.min(len);
        let keep = sequence.planned_len.div_ceil(self.page_size());
        for step in self.steps.values_mut() {
            step.cap(seq, incarnation, len);
        }
        self.trim(seq, keep);
        Ok(())
    }

    /// `Engine::fork`, with `key` as in [`Model::admit`].
    pub fn fork(&mut self, key: SeqKey, seq: SeqKey) -> Result<ForkWant, Error> {
        let parent = self.running(seq)?;
        let page_size = self.page_size();
        let len = parent.cached_len.min(parent.tokens.len());
        let (pages, tail) = (len / page_size, len % page_size);
        if self.sequences.len() as u32 == self.shape.table.rows {
            return Err(Error::OutOfSequences { max: self.shape.table.rows });
        }
        self.check_chunks(parent.tokens.len().div_ceil(self.chunk_tokens()))?;
        if tail > 0 {
            self.check_steps()?;
            self.check_pages(1, self.available())?;
        }
        // The tail's page is taken first: publishing may put idle pages to use.
        let target = self.take_pages(usize::from(tail > 0)).pop();
        self.publish(seq);
        let step = target.map(|_| self.new_step(Step::copy()));
        let parent = self.sequences.get_mut(&seq).expect("seen above");
        parent.last_step = step.unwrap_or(parent.last_step);
        let mut child = parent.clone();
        child.cached_len = len;
        child.planned_len = len;
        child.table.truncate(pages);
        child.table.extend(target);
        child.incarnation = 0;
        child.last_step = step.unwrap_or(0);
        let source = parent.table.get(pages).copied();
        self.tree.lock(child.scope, &child.tokens, pages);
        self.sequences.insert(key, child);
        let copy = target.zip(source).zip(step);
        Ok(ForkWant {
            copy: copy.map(|((target, source), step)| (source, target, StepId::new(step))),
        })
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

/// Whether all tokens, which are to stand from `start` on, are tokens.
fn check_known(start: usize, tokens: &[TokenId]) -> Result<(), Error> {
    match tokens.iter().position(|token| *token == TokenId::PENDING) {
        Some(at) => Err(Error::PendingToken { position: (start + at) as u32 }),
        None => Ok(()),
    }
}

/// What a prompt may find in the tree: one token must be computed.
fn all_but_last(tokens: &[TokenId]) -> &[TokenId] {
    tokens.split_last().map_or(&[], |(_, before)| before)
}
