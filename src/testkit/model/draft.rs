//! Drafts: the set of places that each token sees, and the branches that the host may accept.

use std::collections::BTreeSet;

use super::{Model, Step};
use crate::error::Error;
use crate::id::{SeqKey, StepId};
use crate::plan::{Branch, Draft, Extend};

/// A token of a draft: the places that it sees among the last 64 places of its sequence, and its position.
pub(super) type DraftToken = (BTreeSet<usize>, usize);

/// Bits of a mask.
const BITS: usize = 64;

impl Model {
    /// Returns the step in which a sequence has drafts that wait for `accept`.
    pub fn waiting(&self, seq: SeqKey) -> Option<StepId> {
        let preemption_epoch = self.sequences.get(&seq)?.preemption_epoch;
        let waits = |step: &Step| {
            let mut items = step.items.iter();
            step.open && items.any(|item| item.is_of(seq, preemption_epoch) && item.draft.is_some())
        };
        let mut steps = self.steps.iter();
        steps.find(|(_, step)| waits(step)).map(|(&id, _)| StepId::new(id))
    }

    /// Checks that no drafts of a sequence wait.
    pub(super) fn check_accepted(&self, seq: SeqKey) -> Result<(), Error> {
        match self.waiting(seq) {
            Some(step) => Err(Error::NotAccepted { seq, step }),
            None => Ok(()),
        }
    }

    /// Checks the drafts of a valid batch.
    pub(super) fn check_drafts(&self, items: &[Extend], drafts: &[Draft<'_>]) -> Result<(), Error> {
        let mut next = 0;
        for draft in drafts {
            let seq = draft.seq;
            if self.state_size() > 0 {
                return Err(Error::StateDraft { seq });
            }
            let found = items[next..].iter().position(|item| item.seq == seq);
            next += found.ok_or(Error::DraftOrder { seq })? + 1;
            let (sequence, len) = (&self.sequences[&seq], items[next - 1].len);
            let known = sequence.tokens.len().saturating_sub(sequence.planned_len) as u32;
            if len > known {
                return Err(Error::ExtendLen { seq, len, max: known });
            }
            if len as usize > BITS {
                return Err(Error::DraftLen { len: len.into(), max: BITS as u64 });
            }
            check_tree(draft, sequence.planned_len, len)?;
        }
        Ok(())
    }

    /// Returns whether a sequence has waiting drafts that are not a chain. In a chain, each draft sees itself and all
    /// tokens before it, and has the next position.
    pub fn has_tree(&self, seq: SeqKey) -> bool {
        let Some((_, start, tokens)) = self.drafts(seq) else { return false };
        let old = (start + tokens.len()).saturating_sub(BITS);
        let mut tokens = (start..).zip(tokens);
        !tokens.all(|(place, (seen, position))| seen.iter().copied().eq(old..=place) && *position == place)
    }

    /// Returns the indices of the drafts that a draft sees. The last one is its own.
    pub fn drafts_seen(&self, seq: SeqKey, token: usize) -> Vec<usize> {
        let Some((_, start, tokens)) = self.drafts(seq) else { return Vec::new() };
        tokens[token].0.iter().filter(|&&place| place >= start).map(|place| place - start).collect()
    }

    /// Returns the place of the first waiting draft of a sequence.
    pub fn draft_start(&self, seq: SeqKey) -> Option<usize> {
        self.drafts(seq).map(|drafts| drafts.1)
    }

    /// Returns the index of a sequence's item in a step that is not complete.
    pub fn place_in_step(&self, step: StepId, seq: SeqKey) -> Option<usize> {
        self.steps.get(&step.raw())?.items.iter().position(|item| item.seq == seq)
    }

    /// Returns the step, the start and the tokens of a sequence's waiting drafts.
    fn drafts(&self, seq: SeqKey) -> Option<(StepId, usize, &[DraftToken])> {
        let step = self.waiting(seq)?;
        let item = self.steps[&step.raw()].items.iter().find(|item| item.seq == seq)?;
        Some((step, item.start, item.draft.as_deref()?))
    }

    /// Returns the drafts that may follow a branch of a sequence's drafts.
    pub fn may_follow(&self, seq: SeqKey, branch: &[u32]) -> Vec<u32> {
        let Some((_, _, tokens)) = self.drafts(seq) else { return Vec::new() };
        let longer = |token: u32| [branch, &[token]].concat();
        (0..tokens.len() as u32).filter(|&token| self.first_invalid(seq, &longer(token)).is_none()).collect()
    }

    /// Returns the index of the first token that makes a branch invalid. A valid token exists, sees exactly the text
    /// and the branch up to itself, and has the next position.
    fn first_invalid(&self, seq: SeqKey, branch: &[u32]) -> Option<usize> {
        let (_, start, tokens) = self.drafts(seq)?;
        let mut seen: BTreeSet<usize> = (0..start).collect();
        let kv_len = start + tokens.len();
        branch.iter().enumerate().position(|(place, &token)| {
            let Some((sees, position)) = tokens.get(token as usize) else { return true };
            seen.insert(start + token as usize);
            let old = kv_len.saturating_sub(BITS);
            !sees.iter().eq(seen.range(old..)) || *position != start + place
        })
    }

    /// `Engine::accept_batch`. Returns the moves of kept tokens: for each sequence with moves, its first place, and a
    /// mask of the kept places from there on.
    pub fn accept(&mut self, step: StepId, branches: &[Branch<'_>]) -> Result<Vec<(SeqKey, u32, u64)>, Error> {
        if !self.open_steps().contains(&step) {
            return Err(Error::UnknownStep { step });
        }
        let (mut before, mut moved) = (None, Vec::new());
        for &Branch { seq, tokens } in branches {
            let max = self.running(seq)?.tokens.len() as u32;
            if self.waiting(seq) != Some(step) {
                return Err(Error::NotDrafted { seq, step });
            }
            let place = self.place_in_step(step, seq);
            if place <= before {
                return Err(Error::RepeatedSequence { seq });
            }
            before = place;
            if let Some(place) = self.first_invalid(seq, tokens) {
                return Err(Error::NotABranch { seq, place, token: tokens[place] });
            }
            let start = self.drafts(seq).map_or(0, |drafts| drafts.1) as u32;
            if start == 0 && tokens.is_empty() {
                return Err(Error::RollbackLen { len: 0, min: 1, max });
            }
            if !tokens.iter().copied().eq(0..tokens.len() as u32) {
                moved.push((seq, start, tokens.iter().map(|token| 1 << token).sum()));
            }
        }
        for &Branch { seq, tokens } in branches {
            self.keep(step, seq, tokens);
        }
        Ok(moved)
    }

    fn keep(&mut self, step: StepId, seq: SeqKey, tokens: &[u32]) {
        let page_size = self.page_size();
        let sampled = u64::from(self.may_follow(seq, &[]).len() == 1);
        let step = self.steps.get_mut(&step.raw()).expect("it is open");
        let item = step.items.iter_mut().find(|item| item.seq == seq).expect("its drafts wait");
        let start = item.start;
        self.counters.drafts += 1;
        self.counters.draft_tokens += (item.end - start) as u64 - sampled;
        self.counters.accepted_tokens += (tokens.len() as u64).saturating_sub(sampled);
        let sequence = self.sequences.get_mut(&seq).expect("it is live");
        let kept: Vec<_> = tokens.iter().map(|&token| sequence.tokens[start + token as usize]).collect();
        let in_place = (0..).zip(tokens).take_while(|(place, token)| place == *token).count();
        sequence.cut(start + in_place);
        sequence.tokens.truncate(start);
        sequence.tokens.extend(kept);
        sequence.planned_len = sequence.tokens.len();
        item.end = sequence.planned_len;
        item.cut |= tokens.is_empty();
        item.draft = None;
        let had_front = sequence.front.take().is_some();
        let pages = sequence.planned_len.div_ceil(page_size);
        self.trim(seq, pages);
        self.update_front(seq, had_front);
    }
}

fn check_tree(draft: &Draft<'_>, start: usize, len: u32) -> Result<(), Error> {
    let (seq, count) = (draft.seq, len as usize);
    let (masks, positions) = (draft.masks.len(), draft.positions.len());
    if masks == 0 && positions == 0 {
        return Ok(());
    }
    if masks != count || positions != count {
        return Err(Error::DraftArrays { seq, masks, positions, len });
    }
    for token in 0..count {
        let (mask, position) = (draft.masks[token], draft.positions[token]);
        let bit = |place: usize| start + count - 1 - place;
        let bits = (0..=start + token).map(bit).filter(|&bit| bit < BITS);
        let (own, most) = (1 << bit(start + token), bits.map(|bit| 1_u64 << bit).sum());
        let token = token as u32;
        if mask & own == 0 || mask | most != most {
            return Err(Error::DraftMask { seq, token, mask, own, most });
        }
        let (min, max) = (start as u32, start as u32 + token);
        if position < min || position > max {
            return Err(Error::DraftPosition { seq, token, position, min, max });
        }
    }
    Ok(())
}

/// Returns the tokens of a valid draft.
pub(super) fn tokens_of(draft: &Draft<'_>, start: usize, len: usize) -> Vec<DraftToken> {
    let old = (start + len).saturating_sub(BITS);
    let token = |token: usize| match draft.masks.get(token) {
        None => ((old..=start + token).collect(), start + token),
        Some(mask) => {
            let bit = |place: &usize| mask >> (start + len - 1 - place) & 1 == 1;
            let seen = (old..start + len).filter(bit).collect();
            (seen, draft.positions[token] as usize)
        }
    };
    (0..len).map(token).collect()
}
