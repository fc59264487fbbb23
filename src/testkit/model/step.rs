//! Steps: planned, then committed or aborted, and removed when they are complete.

use super::draft::{DraftToken, tokens_of};
use super::{AdmissionKind, Model, PageIs};
use crate::error::Error;
use crate::id::{PageId, SeqKey, StepId, TokenId};
use crate::plan::{Draft, Extend};

/// The states that an item reads and writes, by their numbers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Used {
    pub(super) reads: Option<u64>,
    pub(super) writes: u64,
}

/// One item of a step: it computes tokens `start..end` of a sequence.
#[derive(Clone, Debug)]
pub(super) struct Item {
    pub seq: SeqKey,
    preemption_epoch: u32,
    pub start: usize,
    pub end: usize,
    /// Whether a rollback has removed some of its tokens, or all its drafts were rejected.
    pub cut: bool,
    /// The item's tokens, if they are drafts that wait for `accept`.
    pub draft: Option<Vec<DraftToken>>,
    /// The states that it uses, if layers keep one.
    pub(super) state: Option<Used>,
}

impl Item {
    pub(super) fn is_of(&self, seq: SeqKey, preemption_epoch: u32) -> bool {
        (self.seq, self.preemption_epoch) == (seq, preemption_epoch)
    }
}

/// A step that is not complete.
#[derive(Clone, Debug)]
pub(super) struct Step {
    /// The step's items; empty after an abort.
    pub(super) items: Vec<Item>,
    /// Whether the step is neither committed nor aborted.
    pub(super) open: bool,
}

impl Step {
    /// Returns the step of a fork's copies, which needs no commit.
    pub(super) fn copy() -> Self {
        Self { items: Vec::new(), open: false }
    }

    /// Records a rollback: cuts the items of a sequence at `len` tokens.
    pub(super) fn cap(&mut self, seq: SeqKey, preemption_epoch: u32, len: usize) {
        for item in self.items.iter_mut().filter(|item| item.is_of(seq, preemption_epoch)) {
            item.cut |= item.end > len;
            item.start = item.start.min(len);
            item.end = item.end.min(len);
        }
    }
}

/// The expected row of a sequence in a plan.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RowWant {
    /// The sequence.
    pub seq: SeqKey,
    /// Index of the sequence's first query row.
    pub qo_start: u32,
    /// Number of new tokens.
    pub extend_len: u32,
    /// Number of all tokens, including the new ones.
    pub kv_len: u32,
    /// The page table of group 0.
    pub table: Vec<PageId>,
    /// The page tables of the further tracks.
    pub others: Vec<Vec<PageId>>,
    /// The first held place of each further track.
    pub held: Vec<usize>,
}

impl RowWant {
    /// Returns the held part of each page table: its first place, and the pages from there on.
    pub fn tables(&self) -> impl Iterator<Item = (usize, &[PageId])> {
        let others = self.others.iter().zip(&self.held);
        let others = others.map(|(own, &first)| (first, &own[first..]));
        std::iter::once((0, &self.table[..])).chain(others)
    }
}

/// The expected plan.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct PlanWant {
    /// The step.
    pub step: StepId,
    /// The sequences.
    pub rows: Vec<RowWant>,
    /// The new tokens.
    pub tokens: Vec<TokenId>,
    /// The positions of the new tokens.
    pub positions: Vec<u32>,
    /// The slots of the new tokens.
    pub slots: Vec<i64>,
    /// The slots of the new tokens in each further track.
    pub track_slots: Vec<Vec<i64>>,
    /// The masks of the new tokens; empty if no token has a mask.
    pub masks: Vec<u64>,
    /// The pages of the states that each row reads and writes; empty if no layer keeps a state.
    pub states: Vec<[Vec<PageId>; 2]>,
}

impl Model {
    /// Returns the steps that are neither committed nor aborted, first to last.
    pub fn open_steps(&self) -> Vec<StepId> {
        let open = self.steps.iter().filter(|(_, step)| step.open);
        open.map(|(&id, _)| StepId::new(id)).collect()
    }

    /// Returns the steps that are not complete, first to last.
    pub fn unfinished_steps(&self) -> Vec<StepId> {
        self.steps.keys().map(|&id| StepId::new(id)).collect()
    }

    /// Returns the newest step.
    pub fn last_step(&self) -> StepId {
        StepId::new(self.last_step)
    }

    /// Returns the last complete step. All earlier steps are complete.
    pub fn completed(&self) -> StepId {
        StepId::new(self.completed)
    }

    pub(super) fn check_steps(&self) -> Result<(), Error> {
        if self.steps.len() as u32 == self.shape.max_steps {
            return Err(Error::OutOfSteps { max: self.shape.max_steps });
        }
        Ok(())
    }

    pub(super) fn new_step(&mut self, step: Step) -> u64 {
        self.last_step += 1;
        self.steps.insert(self.last_step, step);
        self.last_step
    }

    /// Returns the maximum number of tokens of a sequence in the next plan.
    pub fn extend_max(&self, seq: SeqKey) -> Result<u32, Error> {
        let sequence = self.running(seq)?;
        let known = sequence.tokens.len().saturating_sub(sequence.planned_len) as u32;
        let mut items = self.steps.values().flat_map(|step| &step.items);
        let last = items.rfind(|item| item.is_of(seq, sequence.preemption_epoch));
        let sampling = last.is_some_and(|item| !item.cut);
        let room = sequence.planned_len < self.shape.max_sequence_len as usize;
        Ok(if known == 0 && sampling && room { 1 } else { known })
    }

    fn check_items(&self, items: &[Extend]) -> Result<(), Error> {
        for (i, &Extend { seq, len }) in items.iter().enumerate() {
            let max = self.extend_max(seq)?;
            self.check_accepted(seq)?;
            if items[..i].iter().any(|before| before.seq == seq) {
                return Err(Error::RepeatedSequence { seq });
            }
            if len == 0 || len > max {
                return Err(Error::ExtendLen { seq, len, max });
            }
        }
        Ok(())
    }

    fn check_room(&self, items: &[Extend]) -> Result<(), Error> {
        let lacking = |item: &Extend| {
            let sequence = &self.sequences[&item.seq];
            self.leaves_lacking(sequence, sequence.planned_len + item.len as usize)
        };
        self.check_leaves(items.iter().map(lacking).sum())
    }

    /// Returns the number of places that a sequence lacks for an item.
    fn places_for(&self, item: &Extend) -> usize {
        let sequence = &self.sequences[&item.seq];
        let end = sequence.planned_len + item.len as usize;
        end.div_ceil(self.page_size()) - sequence.table.len()
    }

    /// Returns the number of promised pages among the pages that a valid batch takes.
    fn drawn_by(&self, items: &[Extend]) -> usize {
        let drawn = |item: &Extend| {
            let sequence = &self.sequences[&item.seq];
            let (len, published) = (sequence.table.len(), sequence.published);
            let outstanding = |len| self.outstanding_of_promise(sequence.promised, len, published, sequence.kept);
            outstanding(len) - outstanding(len + self.places_for(item))
        };
        items.iter().map(drawn).sum()
    }

    /// Returns whether a valid batch takes only promised pages.
    pub fn is_promised(&self, items: &[Extend]) -> bool {
        let needed: usize = items.iter().map(|item| self.places_for(item)).sum();
        let Ok((of_states, drawn, _)) = self.check_states(items) else { return false };
        needed * self.tracks() + of_states == self.drawn_by(items) + drawn
    }

    /// `Engine::plan_batch`
    pub fn plan_batch(&mut self, items: &[Extend]) -> Result<PlanWant, Error> {
        self.plan_drafts(items, &[])
    }

    /// `Engine::plan_drafts`
    pub fn plan_drafts(&mut self, items: &[Extend], drafts: &[Draft<'_>]) -> Result<PlanWant, Error> {
        self.load_first(items.iter().map(|item| item.seq))?;
        if items.is_empty() {
            return Err(Error::EmptyBatch);
        }
        self.check_steps()?;
        self.check_items(items)?;
        let tokens = items.iter().map(|item| u64::from(item.len)).sum();
        let max = u64::from(self.shape.max_step_tokens);
        if tokens > max {
            return Err(Error::StepTokens { tokens, max });
        }
        self.check_room(items)?;
        let (of_states, drawn, optional) = self.check_states(items)?;
        self.check_drafts(items, drafts)?;
        let places: usize = items.iter().map(|item| self.places_for(item)).sum();
        let (needed, drawn) = (places * self.tracks() + of_states, self.drawn_by(items) + drawn);
        self.check_pages(needed, drawn)?;
        let spare = self.takes_at_most(drawn as u32) as usize - needed;
        let takes = self.grant_states(items, spare);
        let granted = takes.iter().filter(|&&takes| takes).count() * self.state_size() - of_states;
        debug_assert!(granted <= optional * self.state_size());
        let mut pages = self.take_pages(needed + granted).into_iter();
        self.flush_saves();
        let step = self.new_step(Step { items: Vec::new(), open: true });
        let track_slots = vec![Vec::new(); self.tracks() - 1];
        let mut plan = PlanWant { step: StepId::new(step), track_slots, ..PlanWant::default() };
        for item in items {
            let count = self.places_for(item) * self.tracks();
            let draft = drafts.iter().find(|draft| draft.seq == item.seq);
            self.plan_item(step, item, draft, pages.by_ref().take(count), &mut plan);
        }
        plan.states = self.plan_states(step, items, &takes, pages);
        if plan.masks.iter().all(|&mask| mask == 0) {
            plan.masks.clear();
        }
        Ok(plan)
    }

    fn plan_item(
        &mut self,
        step: u64,
        item: &Extend,
        draft: Option<&Draft<'_>>,
        mut pages: impl Iterator<Item = PageId>,
        plan: &mut PlanWant,
    ) {
        let (page_size, count) = (self.page_size(), self.places_for(item));
        let sequence = self.sequences.get_mut(&item.seq).expect("checked");
        let (start, end) = (sequence.planned_len, sequence.planned_len + item.len as usize);
        // The pages of the first track come first, then those of each further track.
        sequence.table.extend(pages.by_ref().take(count));
        sequence.others.iter_mut().for_each(|own| own.extend(pages.by_ref().take(count)));
        sequence.planned_len = end;
        sequence.last_step = step;
        plan.rows.push(RowWant {
            seq: item.seq,
            qo_start: plan.tokens.len() as u32,
            extend_len: item.len,
            kv_len: end as u32,
            table: sequence.table.clone(),
            others: sequence.others.clone(),
            held: sequence.held.clone(),
        });
        for position in start..end {
            let page = sequence.table[position / page_size].index();
            plan.tokens.push(*sequence.tokens.get(position).unwrap_or(&TokenId::PENDING));
            let place = position - start;
            let tree = draft.filter(|draft| !draft.masks.is_empty());
            plan.positions.push(tree.map_or(position as u32, |tree| tree.positions[place]));
            plan.masks.push(tree.map_or(0, |tree| tree.masks[place]));
            plan.slots.push((page * page_size + position % page_size) as i64);
            for (slots, table) in plan.track_slots.iter_mut().zip(&sequence.others) {
                let page = table[position / page_size].index();
                slots.push((page * page_size + position % page_size) as i64);
            }
        }
        let (seq, preemption_epoch) = (item.seq, sequence.preemption_epoch);
        let draft = draft.map(|draft| tokens_of(draft, start, end - start));
        let item = Item { seq, preemption_epoch, start, end, cut: false, draft, state: None };
        self.steps.get_mut(&step).expect("just made").items.push(item);
    }

    /// Returns whether a page is free.
    pub fn is_free(&self, page: PageId) -> bool {
        self.page(page) == PageIs::Free
    }

    /// Returns whether the item's sequence exists and was not preempted since the item was planned.
    pub(super) fn alive(&self, item: &Item) -> bool {
        let sequence = self.sequences.get(&item.seq);
        sequence.is_some_and(|sequence| !sequence.preempted && sequence.preemption_epoch == item.preemption_epoch)
    }

    /// `Engine::commit`
    pub fn commit(&mut self, step: StepId) -> Result<(), Error> {
        let open = self.open_steps();
        if !open.contains(&step) {
            return Err(Error::UnknownStep { step });
        }
        if open[0] != step {
            return Err(Error::StepOrder { step, first: open[0] });
        }
        for item in &self.steps[&step.raw()].items {
            if self.alive(item) && item.draft.is_some() {
                return Err(Error::NotAccepted { seq: item.seq, step });
            }
        }
        let state = self.steps.get_mut(&step.raw()).expect("it is open");
        state.open = false;
        let items = state.items.clone();
        items.iter().for_each(|item| self.commit_item(item));
        self.commit_states(&items);
        Ok(())
    }

    fn commit_item(&mut self, item: &Item) {
        if !self.alive(item) {
            return;
        }
        self.counters.computed_tokens += (item.end - item.start) as u64;
        let sequence = self.sequences.get_mut(&item.seq).expect("it is alive");
        match sequence.admission_kind.take() {
            Some(AdmissionKind::Admitted { prompt_len, hit_len }) => {
                self.counters.prompts += 1;
                self.counters.prompt_tokens += prompt_len as u64;
                self.counters.hit_tokens += hit_len.min(prompt_len) as u64;
                self.counters.resume_hit_tokens += hit_len.saturating_sub(prompt_len) as u64;
            }
            Some(AdmissionKind::Resumed { hit_len }) => {
                self.counters.resume_hit_tokens += hit_len as u64;
            }
            None => {}
        }
        sequence.cached_len = item.end;
        if self.publishes() {
            self.publish(item.seq);
        }
    }

    /// `Engine::complete`
    pub fn complete(&mut self, step: StepId) -> Result<(), Error> {
        if step.raw() == 0 || step.raw() > self.last_step {
            return Err(Error::UnknownStep { step });
        }
        if let Some(&first) = self.open_steps().first()
            && first <= step
        {
            return Err(Error::StepOpen { step: first });
        }
        self.completed = self.completed.max(step.raw());
        self.steps.retain(|&id, _| id > step.raw());
        self.open_fence(step.raw());
        Ok(())
    }

    /// `Engine::abort`
    pub fn abort(&mut self, step: StepId) -> Result<(), Error> {
        self.abort_from(step, true)
    }

    /// Undoes a plan that the backend has rejected.
    pub fn undo_plan(&mut self, step: StepId) -> Result<(), Error> {
        self.abort_from(step, false)
    }

    fn abort_from(&mut self, step: StepId, may_have_run: bool) -> Result<(), Error> {
        let open = self.open_steps();
        if !open.contains(&step) {
            return Err(Error::UnknownStep { step });
        }
        for id in open.into_iter().filter(|id| *id >= step).rev() {
            let state = self.steps.get_mut(&id.raw()).expect("it is open");
            state.open = false;
            self.counters.aborts += 1;
            for item in std::mem::take(&mut state.items).iter().rev() {
                self.abort_item(item, may_have_run);
            }
        }
        Ok(())
    }

    fn abort_item(&mut self, item: &Item, may_have_run: bool) {
        if !self.alive(item) {
            return;
        }
        let page_size = self.page_size();
        let sequence = self.sequences.get_mut(&item.seq).expect("it is alive");
        sequence.planned_len = item.start;
        let mut pages = sequence.split_off(item.start.div_ceil(page_size));
        let last_step = sequence.last_step;
        pages.extend(self.undo_state(item, may_have_run));
        self.release_pages_after(last_step, pages);
    }
}
