//! Admission: the cost of a prompt, and the first state of its sequence.

use std::collections::BTreeSet;

use super::sequence::check_known;
use super::{AdmissionKind, Model, Sequence};
use crate::config::PrefixMode;
use crate::error::Error;
use crate::id::{Namespace, PageId, Scope, SeqKey, StepId, TokenId};
use crate::plan::{Admit, Prompt};

/// The expected result of `Engine::admission`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AdmissionWant {
    /// Number of cached tokens of the prompt.
    pub cached_len: u32,
    /// Number of the prompt's cached pages, of all groups, that are in swap memory alone.
    pub swap_pages: u32,
    /// Number of the prompt's cached device pages, of all groups, that are idle.
    pub idle_pages: u32,
    /// Number of pages that the loads and the other tokens of the prompt or of the promise need.
    pub lacking_pages: u32,
    /// Number of pages that the prompt can take.
    pub available_pages: u32,
    /// The first step whose completion makes enough pages available, if too few are available now.
    pub after: Option<StepId>,
    /// The leader, and the number of the prompt's tokens that are cached once the leader has computed them.
    pub leader: Option<(SeqKey, u32)>,
}

impl AdmissionWant {
    pub(super) fn check(&self) -> Result<(), Error> {
        let Self { lacking_pages, available_pages, after, .. } = *self;
        let (wanted, available) = (lacking_pages.into(), available_pages.into());
        let fits = lacking_pages <= available_pages;
        if fits { Ok(()) } else { Err(Error::OutOfPages { wanted, available, after }) }
    }
}

impl Model {
    pub(super) fn next_scope(&self, namespace: Namespace) -> Scope {
        Scope { namespace, generation: self.generation }
    }

    /// Returns the number of whole pages that `Engine::match_prefix` finds.
    pub fn match_prefix(&self, namespace: Namespace, prompt: &[TokenId]) -> u32 {
        let scope = self.next_scope(namespace);
        self.tree.hit(scope, self.findable(prompt, u32::MAX)) as u32
    }

    /// Returns the device pages at the start of a text's longest cached prefix.
    pub fn cached_pages(&self, namespace: Namespace, text: &[TokenId]) -> Vec<PageId> {
        self.tree.matched(self.next_scope(namespace), text)
    }

    /// `Engine::admission`
    pub fn admission(&self, prompt: &Prompt<'_>) -> Result<AdmissionWant, Error> {
        self.check_prompt(prompt)?;
        self.check_rows(1, prompt.tokens.len())?;
        self.estimate(self.next_scope(prompt.namespace), prompt.tokens, prompt.admit)
    }

    /// `Engine::admit_batch`, with `keys` as in [`Model::admit`]. Returns the leader of each prompt.
    pub fn admit_batch(
        &mut self,
        keys: &[SeqKey],
        prompts: &[Prompt<'_>],
    ) -> Result<Vec<Option<(SeqKey, u32)>>, Error> {
        for prompt in prompts {
            self.check_prompt(prompt)?;
        }
        let max = self.shape.table.rows;
        if self.sequences.len() + prompts.len() > max as usize {
            return Err(Error::OutOfSequences { max });
        }
        let leaves = prompts.iter().map(|prompt| prompt.tokens.len().div_ceil(self.leaf_tokens()));
        self.check_leaves(leaves.sum())?;
        let hit = |prompt: &Prompt<'_>| {
            let findable = self.findable(prompt.tokens, prompt.admit.at_most);
            self.tree.hit(self.next_scope(prompt.namespace), findable)
        };
        let mut hits: Vec<_> = prompts.iter().map(hit).collect();
        let lacking = |(prompt, &pages): (&Prompt<'_>, &usize)| {
            let scope = self.next_scope(prompt.namespace);
            u64::from(self.estimate_with(scope, prompt.tokens, prompt.admit, pages).lacking_pages)
        };
        let wanted: u64 = prompts.iter().zip(&hits).map(lacking).sum();
        let room = |model: &Self| u64::from(model.available().saturating_sub(model.idle_of_all(prompts)));
        if wanted > room(self) {
            for prompt in prompts {
                self.check_alone(prompt.tokens.len(), prompt.admit.promise)?;
            }
            let without: u64 = prompts.iter().map(|prompt| lacking((prompt, &0))).sum();
            if !self.is_idle() || without > u64::from(self.available()) {
                let after = self.first_after(|model| {
                    wanted <= room(model) || model.is_idle() && without <= u64::from(model.available())
                });
                return Err(Error::OutOfPages { wanted, available: room(self), after });
            }
            hits.fill(0);
        }
        let mut leaders = Vec::new();
        for ((&key, prompt), pages) in keys.iter().zip(prompts).zip(hits) {
            let scope = self.next_scope(prompt.namespace);
            let findable = self.findable(prompt.tokens, prompt.admit.at_most);
            leaders.push(self.leader(scope, findable).filter(|_| self.shares()));
            self.admit_with(key, scope, prompt.tokens, prompt.admit, pages);
        }
        Ok(leaders)
    }

    /// Returns the number of idle pages that the prompts use together.
    fn idle_of_all(&self, prompts: &[Prompt<'_>]) -> u32 {
        let mut locked = self.clone();
        let before = locked.tree.evictable();
        for prompt in prompts {
            let scope = self.next_scope(prompt.namespace);
            let pages = self.tree.hit(scope, self.findable(prompt.tokens, prompt.admit.at_most));
            locked.tree.lock(scope, prompt.tokens, pages);
            for key in self.tree.tail_cells(scope, prompt.tokens, pages) {
                locked.tree.acquire_cell(&key);
            }
        }
        before - locked.tree.evictable()
    }

    /// `Engine::admit`. If the engine has admitted the prompt, `key` is the key that it has returned.
    pub fn admit(&mut self, key: SeqKey, prompt: &Prompt<'_>) -> Result<(), Error> {
        let Prompt { tokens, admit, .. } = *prompt;
        self.admission(prompt)?.check()?;
        let scope = self.next_scope(prompt.namespace);
        let pages = self.used_hit(scope, tokens, admit);
        self.admit_with(key, scope, tokens, admit, pages);
        Ok(())
    }

    /// Begins a new sequence that uses `pages` pages of its hit.
    fn admit_with(&mut self, key: SeqKey, scope: Scope, prompt: &[TokenId], admit: Admit, pages: usize) {
        let sequence = Sequence {
            scope,
            tokens: prompt.to_vec(),
            cached_len: 0,
            planned_len: 0,
            published: 0,
            pending: 0,
            on_device: 0,
            cell_pages: 0,
            table: Vec::new(),
            others: vec![Vec::new(); self.tracks() - 1],
            held: vec![0; self.tracks() - 1],
            cells: Vec::new(),
            marks: BTreeSet::new(),
            host_marks: BTreeSet::new(),
            kept: 0,
            states: Default::default(),
            promised: 0,
            preempted: false,
            front: None,
            cuts: Vec::new(),
            admission_kind: None,
            preemption_epoch: 0,
            last_step: 0,
        };
        self.sequences.insert(key, sequence);
        let hit_len = self.begin_with(key, scope, admit, pages);
        let sequence = self.sequences.get_mut(&key).expect("just made");
        sequence.admission_kind = Some(AdmissionKind::Admitted { prompt_len: prompt.len(), hit_len });
        self.counters.admissions += 1;
    }

    pub(super) fn check_promise(&self, promise: u32) -> Result<(), Error> {
        let (len, max) = (u64::from(promise), u64::from(self.shape.max_sequence_len));
        if len > max { Err(Error::TooLong { len, max }) } else { Ok(()) }
    }

    /// Checks a prompt. The replay names every namespace if the page hashes depend on names.
    fn check_prompt(&self, prompt: &Prompt<'_>) -> Result<(), Error> {
        let Prompt { namespace, tokens, admit } = *prompt;
        if tokens.is_empty() {
            return Err(Error::EmptyPrompt);
        }
        let (len, max) = (tokens.len() as u64, u64::from(self.shape.max_sequence_len));
        if len > max {
            return Err(Error::TooLong { len, max });
        }
        self.check_promise(admit.promise)?;
        let ignores_names = self.shape.hashing.is_some_and(|hashing| !hashing.uses_names());
        if ignores_names && namespace != Namespace::default() {
            return Err(Error::UnnamedNamespace { namespace });
        }
        check_known(0, tokens)
    }

    /// Checks that `count` new sequences of `tokens` tokens each fit the tables.
    pub(super) fn check_rows(&self, count: usize, tokens: usize) -> Result<(), Error> {
        let max = self.shape.table.rows;
        if self.sequences.len() + count > max as usize {
            return Err(Error::OutOfSequences { max });
        }
        self.check_leaves(count * tokens.div_ceil(self.leaf_tokens()))
    }

    /// Returns the number of pages of the hit that a sequence of these tokens uses. In an idle pool, it is 0 if the
    /// sequence fits only without its hit.
    pub(super) fn used_hit(&self, scope: Scope, tokens: &[TokenId], admit: Admit) -> usize {
        let pages = self.tree.hit(scope, self.findable(tokens, admit.at_most));
        let fits = |pages| {
            let want = self.estimate_with(scope, tokens, admit, pages);
            want.lacking_pages <= want.available_pages
        };
        if !fits(pages) && self.is_idle() && fits(0) { 0 } else { pages }
    }

    /// Returns whether there are several groups and all pages are available to any call.
    fn is_idle(&self) -> bool {
        self.has_groups() && self.available() == self.shape.layout.page_count() - self.shape.reserved_pages
    }

    /// Returns the cost of a sequence of these tokens.
    pub(super) fn estimate(&self, scope: Scope, tokens: &[TokenId], admit: Admit) -> Result<AdmissionWant, Error> {
        let want = self.estimate_with(scope, tokens, admit, self.used_hit(scope, tokens, admit));
        if want.check().is_err() {
            self.check_alone(tokens.len(), admit.promise)?;
        }
        Ok(want)
    }

    /// Checks that a sequence of `len` tokens with a promise fits a pool without other sequences.
    fn check_alone(&self, len: usize, promise: u32) -> Result<(), Error> {
        let pages = (self.shape.layout.page_count() - self.shape.reserved_pages) as usize;
        let fits = |len: usize, promise: usize| {
            let [places, promised] = [len, promise].map(|tokens| tokens.div_ceil(self.page_size()));
            self.most_pages(places).max(self.outstanding_alone(promised)) <= pages
        };
        if fits(len, promise as usize) {
            return Ok(());
        }
        let len = len.max(promise as usize);
        let max = (0..len).rfind(|&len| fits(len, len)).expect("a sequence without tokens fits");
        Err(Error::TooLong { len: len as u64, max: max as u64 })
    }

    /// Returns the number of outstanding pages of a promise for a sequence without pages.
    fn outstanding_alone(&self, promised: usize) -> usize {
        let state = if promised > 0 { self.state_size() } else { 0 };
        self.outstanding_of_promise(promised, 0, 0, 0) + state
    }

    /// Returns the cost of a sequence of these tokens that uses `pages` pages of its hit.
    fn estimate_with(&self, scope: Scope, tokens: &[TokenId], admit: Admit, pages: usize) -> AdmissionWant {
        let Admit { promise, at_most } = admit;
        let all = self.most_pages(tokens.len().div_ceil(self.page_size()));
        let promised_places = (promise as usize).div_ceil(self.page_size());
        let device = self.on_device(scope, tokens, pages);
        let cells = self.tree.swap_tail_pages(scope, tokens, pages);
        let promised = self.outstanding_of_promise(promised_places, device, device, device)
            + if promised_places > 0 { cells + self.state_size() } else { 0 };
        // The sequence locks these pages, so they are not available to it and back no promise.
        let room = |model: &Self| {
            let idle = model.tree.idle_on_path(scope, tokens, pages) + model.tree.idle_in_tails(scope, tokens, pages);
            (idle, model.available().saturating_sub(idle))
        };
        let held: usize = self.tail_pages(scope, tokens, pages);
        let lacking_pages = (all - device - held).max(promised) as u32;
        // The prompt is admitted without its hit if all pages are available.
        let without = all.max(self.outstanding_alone(promised_places)) as u32;
        let is_admitted =
            |model: &Self| lacking_pages <= room(model).1 || model.is_idle() && without <= model.available();
        let (idle_pages, available_pages) = room(self);
        let fits = lacking_pages <= available_pages;
        AdmissionWant {
            cached_len: (pages * self.page_size()) as u32,
            swap_pages: (pages - device + cells) as u32,
            idle_pages,
            lacking_pages,
            available_pages,
            after: self.first_after(is_admitted).filter(|_| !fits),
            leader: self.leader(scope, self.findable(tokens, at_most)).filter(|_| self.shares()),
        }
    }

    /// Starts a sequence, which has no pages yet, on the first `pages` cached pages of its tokens. Returns the number
    /// of tokens in these pages.
    pub(super) fn begin_with(&mut self, key: SeqKey, scope: Scope, admit: Admit, pages: usize) -> usize {
        let Admit { promise, at_most } = admit;
        let tokens = self.findable(&self.sequences[&key].tokens, at_most);
        let full = self.tree.matched_len(scope, tokens);
        let (hit, [superseded, evicted]) = (self.tree.hit(scope, tokens), self.tree.gone_pages(scope, tokens));
        let (len, promised) = (pages * self.page_size(), (promise as usize).div_ceil(self.page_size()));
        let has_groups = self.has_groups();
        let sequence = self.sequences.get_mut(&key).expect("it was just made or seen");
        self.tree.lock(scope, &sequence.tokens, pages);
        sequence.table = self.tree.matched(scope, &sequence.tokens[..len]);
        sequence.scope = scope;
        let last = (sequence.tokens.len() - 1) / self.shape.layout.page_size() as usize;
        let on_device = sequence.table.len();
        let cells = self.tree.swap_tail_pages(scope, &sequence.tokens, pages);
        let waits = on_device < pages || cells > 0;
        if waits && has_groups {
            // With groups, the page tables are empty until all pages are loaded.
            sequence.table.clear();
        }
        sequence.kept = sequence.table.len();
        sequence.on_device = on_device - sequence.table.len();
        sequence.cell_pages = cells;
        sequence.marks = [full, last].into_iter().filter(|&mark| mark > pages).collect();
        sequence.published = sequence.table.len();
        sequence.pending = pages - sequence.published;
        sequence.cached_len = len;
        sequence.planned_len = len;
        sequence.preempted = false;
        sequence.promised = promised;
        let page_size = self.shape.layout.page_size() as usize;
        self.counters.lost_hit_tokens += ((full - pages) * page_size) as u64;
        self.counters.superseded_hit_tokens += (superseded * page_size) as u64;
        self.counters.evicted_hit_tokens += (evicted * page_size) as u64;
        self.counters.ignored_hit_tokens += ((hit - pages) * page_size) as u64;
        let marks = (self.state_size() > 0).then(|| self.begin_states(key, pages, full));
        let sequence = self.sequences.get_mut(&key).expect("it was just made or seen");
        if let Some(marks) = marks {
            sequence.marks = marks.into_iter().collect();
        }
        if self.shape.prefix == PrefixMode::None {
            sequence.marks.clear();
        }
        self.use_tails(key, pages);
        self.take_tails(key, if waits { 0 } else { pages });
        if !self.shares() {
            self.generation += 1;
        }
        self.update_front(key, true);
        len
    }
}
