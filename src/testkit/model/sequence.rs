//! What a sequence goes through, but for its steps: admitted, extended with tokens, preempted, forked, finished.

use std::collections::BTreeSet;

use super::{AdmissionKind, ForkWant, Given, Lock, Model, PageIs, Sequence, Step};
use crate::config::PrefixMode;
use crate::error::Error;
use crate::id::{Namespace, PageId, Scope, SeqKey, StepId, TokenId};
use crate::plan::Prompt;
use crate::system::finish::Keep;

/// What an admission must answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AdmissionWant {
    /// Tokens that are cached.
    pub cached_len: u32,
    /// Pages of those that nobody uses.
    pub idle_pages: u32,
    /// Pages that the rest needs.
    pub lacking_pages: u32,
    /// Pages that there are for it.
    pub available_pages: u32,
    /// The step after which there are enough.
    pub after: Option<StepId>,
    /// Who leads, and the tokens that are cached then.
    pub leader: Option<(SeqKey, u32)>,
}

impl AdmissionWant {
    fn check(&self) -> Result<(), Error> {
        let Self { lacking_pages, available_pages, after, .. } = *self;
        let (wanted, available) = (lacking_pages.into(), available_pages.into());
        let fits = lacking_pages <= available_pages;
        if fits { Ok(()) } else { Err(Error::OutOfPages { wanted, available, after }) }
    }
}

impl Sequence {
    /// Tokens from `len` on are about to be forgotten, if there are any.
    pub(super) fn cut(&mut self, len: usize) {
        if len < self.tokens.len() {
            self.cuts.push(len);
        }
    }
}

impl Model {
    pub(super) fn next_scope(&self, namespace: Namespace) -> Scope {
        Scope { namespace, generation: self.generation }
    }

    /// Whole pages that `Engine::match_prefix` finds.
    pub fn match_prefix(&self, namespace: Namespace, prompt: &[TokenId]) -> u32 {
        let scope = self.next_scope(namespace);
        self.hit(scope, self.findable(prompt)) as u32
    }

    /// The pages of a text's longest cached prefix.
    pub fn cached_pages(&self, namespace: Namespace, text: &[TokenId]) -> Vec<PageId> {
        self.tree.matched(self.next_scope(namespace), text)
    }

    /// `Engine::admission`
    pub fn admission(
        &self,
        namespace: Namespace,
        prompt: &[TokenId],
        promise: u32,
    ) -> Result<AdmissionWant, Error> {
        self.check_prompt(namespace, prompt, promise)?;
        self.check_rows(1, prompt.len())?;
        let scope = self.next_scope(namespace);
        Ok(self.ask(scope, prompt, promise))
    }

    /// `Engine::admit_batch`, with `keys` as in [`Model::admit`]. Answers with each one's leader.
    pub fn admit_batch(
        &mut self,
        keys: &[SeqKey],
        prompts: &[Prompt<'_>],
    ) -> Result<Vec<Option<(SeqKey, u32)>>, Error> {
        for prompt in prompts {
            self.check_prompt(prompt.namespace, prompt.tokens, prompt.promise)?;
        }
        let max = self.shape.table.rows;
        if self.sequences.len() + prompts.len() > max as usize {
            return Err(Error::OutOfSequences { max });
        }
        let chunks = prompts.iter().map(|prompt| prompt.tokens.len().div_ceil(self.chunk_tokens()));
        self.check_chunks(chunks.sum())?;
        let lacking = |prompt: &Prompt<'_>| {
            let scope = self.next_scope(prompt.namespace);
            u64::from(self.ask(scope, prompt.tokens, prompt.promise).lacking_pages)
        };
        let wanted: u64 = prompts.iter().map(lacking).sum();
        let room =
            |model: &Self| u64::from(model.available().saturating_sub(model.idle_of_all(prompts)));
        if wanted > room(self) {
            let after = self.first_after(|model| wanted <= room(model));
            return Err(Error::OutOfPages { wanted, available: room(self), after });
        }
        let mut leaders = Vec::new();
        for (&key, prompt) in keys.iter().zip(prompts) {
            let scope = self.next_scope(prompt.namespace);
            leaders.push(self.ask(scope, prompt.tokens, prompt.promise).leader);
            self.admit(key, prompt.namespace, prompt.tokens, prompt.promise)?;
        }
        Ok(leaders)
    }

    /// Idle pages of what prompts match, each counted once.
    fn idle_of_all(&self, prompts: &[Prompt<'_>]) -> u32 {
        let mut locked = self.clone();
        let before = locked.tree.evictable();
        for prompt in prompts {
            let scope = self.next_scope(prompt.namespace);
            let pages = self.hit(scope, self.findable(prompt.tokens));
            locked.tree.lock(scope, prompt.tokens, pages);
            for key in self.tail_cells(scope, prompt.tokens, pages) {
                locked.tree.cells.get_mut(&key).expect("it was matched").users += 1;
            }
        }
        before - locked.tree.evictable()
    }

    /// `Engine::admit`, where the engine has answered with `key`, if with a sequence at all.
    pub fn admit(
        &mut self,
        key: SeqKey,
        namespace: Namespace,
        prompt: &[TokenId],
        promise: u32,
    ) -> Result<(), Error> {
        self.check_prompt(namespace, prompt, promise)?;
        self.check_rows(1, prompt.len())?;
        let scope = self.next_scope(namespace);
        self.ask(scope, prompt, promise).check()?;
        let sequence = Sequence {
            scope,
            tokens: prompt.to_vec(),
            cached_len: 0,
            planned_len: 0,
            published: 0,
            table: Vec::new(),
            others: vec![Vec::new(); self.tracks() - 1],
            held: vec![0; self.tracks() - 1],
            cells: Vec::new(),
            marks: BTreeSet::new(),
            kept: 0,
            promised: 0,
            preempted: false,
            front: None,
            cuts: Vec::new(),
            admission_kind: None,
            preemption_epoch: 0,
            last_step: 0,
        };
        self.sequences.insert(key, sequence);
        let hit_len = self.begin_with(key, scope, promise);
        let sequence = self.sequences.get_mut(&key).expect("just made");
        sequence.admission_kind =
            Some(AdmissionKind::Admitted { prompt_len: prompt.len(), hit_len });
        self.counters.admissions += 1;
        Ok(())
    }

    fn check_promise(&self, promise: u32) -> Result<(), Error> {
        let (len, max) = (u64::from(promise), u64::from(self.shape.max_sequence_len));
        if len > max { Err(Error::TooLong { len, max }) } else { Ok(()) }
    }

    /// Every namespace is named, if the hashes of pages hear names.
    fn check_prompt(
        &self,
        namespace: Namespace,
        prompt: &[TokenId],
        promise: u32,
    ) -> Result<(), Error> {
        if prompt.is_empty() {
            return Err(Error::EmptyPrompt);
        }
        let (len, max) = (prompt.len() as u64, u64::from(self.shape.max_sequence_len));
        if len > max {
            return Err(Error::TooLong { len, max });
        }
        self.check_promise(promise)?;
        let deaf = self.shape.hashing.is_some_and(|hashing| !hashing.uses_names());
        if deaf && namespace != Namespace::default() {
            return Err(Error::UnnamedNamespace { namespace });
        }
        check_known(0, prompt)
    }

    /// Whether so many new sequences of so many tokens each fit the tables.
    fn check_rows(&self, count: usize, tokens: usize) -> Result<(), Error> {
        let max = self.shape.table.rows;
        if self.sequences.len() + count > max as usize {
            return Err(Error::OutOfSequences { max });
        }
        self.check_chunks(count * tokens.div_ceil(self.chunk_tokens()))
    }

    /// What beginning with these tokens takes.
    fn ask(&self, scope: Scope, tokens: &[TokenId], promise: u32) -> AdmissionWant {
        let pages = self.hit(scope, self.findable(tokens));
        let all = self.most_pages(tokens.len().div_ceil(self.page_size()));
        let promised = (promise as usize).div_ceil(self.page_size());
        let promised = self.outstanding(promised, pages, pages, pages);
        // Pages that are locked are there for nobody else, and for no promise.
        let room = |model: &Self| {
            let idle = model.tree.idle_on_path(scope, tokens, pages)
                + model.idle_in_tails(scope, tokens, pages);
            (idle, model.available().saturating_sub(idle))
        };
        let (idle_pages, available_pages) = room(self);
        let held: usize = self.tail_pages(scope, tokens, pages);
        let lacking_pages = (all - pages - held).max(promised) as u32;
        let fits = lacking_pages <= available_pages;
        AdmissionWant {
            cached_len: (pages * self.page_size()) as u32,
            idle_pages,
            lacking_pages,
            available_pages,
            after: self.first_after(|model| lacking_pages <= room(model).1).filter(|_| !fits),
            leader: self
                .leader(scope, self.findable(tokens))
                .filter(|_| self.shares() && self.tracks() == 1),
        }
    }

    /// A sequence without pages begins with what the tree has of its tokens. Returns how many those are.
    fn begin_with(&mut self, key: SeqKey, scope: Scope, promise: u32) -> usize {
        let tokens = self.findable(&self.sequences[&key].tokens);
        let (pages, full) = (self.hit(scope, tokens), self.tree.matched(scope, tokens).len());
        let (len, promised) =
            (pages * self.page_size(), (promise as usize).div_ceil(self.page_size()));
        let sequence = self.sequences.get_mut(&key).expect("the row was just made or seen");
        self.tree.lock(scope, &sequence.tokens, pages);
        sequence.table = self.tree.matched(scope, &sequence.tokens[..len]);
        sequence.scope = scope;
        let last = (sequence.tokens.len() - 1) / self.shape.layout.page_size() as usize;
        sequence.kept = pages;
        sequence.marks = [full, last].into_iter().filter(|&mark| mark > pages).collect();
        sequence.published = pages;
        sequence.cached_len = len;
        sequence.planned_len = len;
        sequence.preempted = false;
        sequence.promised = promised;
        if self.shape.prefix == PrefixMode::None {
            sequence.marks.clear();
        }
        self.take_tails(key, pages);
        if !self.shares() {
            self.generation += 1;
        }
        self.look_at_front(key, true);
        len
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
        self.look_at_front(seq, tokens.len() != 1);
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
        let (mut duplicates, before) = (Vec::new(), sequence.published);
        while sequence.published < end {
            let start = sequence.published;
            let stop = end.min((start / chunk_pages + 1) * chunk_pages);
            let own = &sequence.table[start..stop];
            let published = self.tree.insert(sequence.scope, &sequence.tokens, start, own);
            sequence.table[start..stop].copy_from_slice(&published.table);
            sequence.published = stop;
            self.pages.turn(&published.taken, PageIs::Private, PageIs::Cached);
            self.counters.published_pages += published.taken.len() as u64;
            self.counters.duplicate_pages += published.duplicates.len() as u64;
            duplicates.extend(published.duplicates);
        }
        let (last_step, end) = (sequence.last_step, sequence.published);
        sequence.published = before;
        while let Some(&mark) = self.sequences[&seq].marks.first().filter(|&&mark| mark <= end) {
            if self.keeps_promises(seq, mark) {
                duplicates.extend(self.keep_tails(seq, mark));
            }
            self.sequences.get_mut(&seq).expect("it lives").marks.remove(&mark);
        }
        self.sequences.get_mut(&seq).expect("it lives").published = end;
        duplicates.extend(self.take_held(seq, |model, reach| model.first_held(reach, end)));
        self.give_up_pages(last_step, duplicates);
        self.look_at_front(seq, false);
    }

    /// A sequence releases its pages past the first `keep`, none of them published.
    pub(super) fn trim(&mut self, seq: SeqKey, keep: usize) {
        let sequence = self.sequences.get_mut(&seq).expect("the caller has checked");
        assert!(keep >= sequence.published, "the model trims what is published");
        let pages = sequence.split_off(keep);
        let last_step = sequence.last_step;
        self.give_up_pages(last_step, pages);
    }

    /// A sequence releases all its pages and its lock.
    fn let_go(&mut self, seq: SeqKey) {
        let sequence = self.sequences.get_mut(&seq).expect("the caller has checked");
        let end = sequence.table.len();
        let mut pages = sequence.table.split_off(sequence.published);
        pages.extend(self.take_held(seq, |_, _| end));
        let sequence = self.sequences.get_mut(&seq).expect("the caller has checked");
        sequence.others.iter_mut().for_each(Vec::clear);
        sequence.held.fill(0);
        sequence.marks.clear();
        sequence.kept = 0;
        sequence.table.clear();
        sequence.promised = 0;
        let lock = Lock {
            scope: sequence.scope,
            tokens: sequence.tokens.clone(),
            pages: std::mem::take(&mut sequence.published),
        };
        let last_step = sequence.last_step;
        self.give_up_pages(last_step, pages);
        self.give_up(last_step, Given::Lock(lock));
    }

    /// Whether all promises can be kept if a sequence keeps its tails at a mark.
    fn keeps_promises(&self, seq: SeqKey, mark: usize) -> bool {
        let sequence = &self.sequences[&seq];
        let outstanding =
            |kept| self.outstanding_of(sequence, sequence.promised, sequence.published, kept);
        let more = outstanding(sequence.kept.max(mark)) - outstanding(sequence.kept);
        let promised = self.promised_pages() as usize + more;
        promised <= (self.there() + self.pages.count(PageIs::Fenced)) as usize
    }

    /// Keeps the tails behind what is published.
    fn keep_now(&mut self, seq: SeqKey) {
        let Sequence { published, last_step, .. } = self.sequences[&seq];
        let duplicates = self.keep_tails(seq, published);
        self.give_up_pages(last_step, duplicates);
    }

    /// Pages of the cells in the tails of a prefix.
    fn tail_pages(&self, scope: Scope, tokens: &[TokenId], pages: usize) -> usize {
        let keys = self.tail_cells(scope, tokens, pages);
        keys.iter().map(|key| self.tree.cells[key].pages.len()).sum()
    }

    /// `Engine::finish_with`
    pub fn finish(&mut self, seq: SeqKey, keep: Keep) -> Result<(), Error> {
        if !self.sequence(seq)?.preempted {
            self.sequences.get_mut(&seq).expect("seen above").promised = 0;
            if keep == Keep::Publish && self.shares() {
                self.publish(seq);
                self.keep_now(seq);
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
            self.keep_now(seq);
        }
        self.let_go(seq);
        let sequence = self.sequences.get_mut(&seq).expect("seen above");
        sequence.preempted = true;
        sequence.preemption_epoch += 1;
        sequence.last_step = 0;
        sequence.cached_len = 0;
        sequence.planned_len = 0;
        self.counters.preemptions += 1;
        self.look_at_front(seq, false);
        Ok(())
    }

    /// `Engine::resume`
    pub fn resume(&mut self, seq: SeqKey, promise: u32) -> Result<(), Error> {
        let sequence = self.sequence(seq)?;
        if !sequence.preempted {
            return Err(Error::NotPreempted { seq });
        }
        self.check_promise(promise)?;
        // It begins anew: in the present generation, or with prefix reuse off in one of its own.
        let scope = self.next_scope(sequence.scope.namespace);
        self.ask(scope, &sequence.tokens, promise).check()?;
        let hit_len = self.begin_with(seq, scope, promise);
        let sequence = self.sequences.get_mut(&seq).expect("seen above");
        sequence.admission_kind = Some(match sequence.admission_kind {
            Some(AdmissionKind::Admitted { prompt_len, .. }) => {
                AdmissionKind::Admitted { prompt_len, hit_len }
            }
            _ => AdmissionKind::Resumed { hit_len },
        });
        self.counters.resumes += 1;
        Ok(())
    }

    /// `Engine::promise`
    pub fn promise(&mut self, seq: SeqKey, len: u32) -> Result<(), Error> {
        let before = self.running(seq).and_then(|_| self.promised(seq))?;
        self.check_promise(len)?;
        let mut after = self.clone();
        let pages = (len as usize).div_ceil(self.page_size());
        after.sequences.get_mut(&seq).expect("seen above").promised = pages;
        let more = after.promised(seq)?.saturating_sub(before);
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
        sequence.cut(len);
        sequence.tokens.truncate(len);
        sequence.cached_len = sequence.cached_len.min(len);
        sequence.planned_len = sequence.planned_len.min(len);
        let keep = sequence.planned_len.div_ceil(self.page_size());
        for step in self.steps.values_mut() {
            step.cap(seq, preemption_epoch, len);
        }
        self.trim(seq, keep);
        self.counters.rollbacks += 1;
        self.look_at_front(seq, false);
        Ok(())
    }

    /// `Engine::fork`, with `keys` as in [`Model::admit`], one for each child.
    pub fn fork(&mut self, keys: &[SeqKey], seq: SeqKey, promise: u32) -> Result<ForkWant, Error> {
        self.running(seq)?;
        self.check_accepted(seq)?;
        let parent = self.running(seq)?;
        self.check_promise(promise)?;
        let page_size = self.page_size();
        let len = parent.cached_len.min(parent.tokens.len());
        let (pages, tail) = (len / page_size, usize::from(len % page_size > 0));
        self.check_rows(keys.len(), parent.tokens.len())?;
        if keys.is_empty() {
            return Ok(ForkWant { copies: Vec::new(), step: None });
        }
        let copied = tail * self.tracks();
        if copied > 0 {
            self.check_steps()?;
        }
        let promised = (promise as usize).div_ceil(page_size);
        let outstanding = self.outstanding(promised, pages + tail, pages, pages);
        let of_parent = |kept| self.outstanding_of(parent, parent.promised, pages, kept);
        let more = of_parent(pages) - of_parent(parent.kept);
        self.check_pages(keys.len() * (copied + outstanding) + more, 0)?;
        // The copies' pages are taken first: publishing may put idle pages to use.
        let targets = self.take_pages(keys.len() * copied);
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
            for key in self.tail_cells(child.scope, &child.tokens, pages) {
                self.tree.cells.get_mut(&key).expect("the parent has it").users += 1;
            }
            child.marks.clear();
            child.promised = promised;
            child.preemption_epoch = 0;
            child.admission_kind = None;
            child.front = None;
            child.cuts.clear();
            child.last_step = step.unwrap_or(0);
            self.tree.lock(child.scope, &child.tokens, pages);
            self.sequences.insert(key, child);
            self.look_at_front(key, true);
        }
        self.counters.forks += keys.len() as u64;
        let others = parent.others.iter().flat_map(|own| &own[pages..pages + tail]);
        let sources: Vec<_> =
            parent.table[pages..pages + tail].iter().chain(others).copied().collect();
        Ok(ForkWant {
            copies: sources.into_iter().cycle().zip(targets).collect(),
            step: step.map(StepId::new),
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
