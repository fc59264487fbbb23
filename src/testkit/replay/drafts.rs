//! Drafts and branches of a replay.

use super::agree;
use super::bytes::Inspect;
use super::host::Host;
use crate::error::EngineError;
use crate::id::SeqKey;
use crate::plan::{Branch, Compaction, Draft, DraftTree, Extend, OwnedPlan, PlanSize};
use crate::testkit::rng::Rng;

impl<B: Inspect> Host<B> {
    pub(super) fn draft(&mut self, first: u8, count: u8, seed: u8, twist: u8) -> Result<(), String> {
        let mut rng = Rng::new(u64::from(seed));
        let live = self.live.len().max(1);
        let seqs = self.live.iter().copied().cycle().skip(usize::from(first) % live);
        let seqs: Vec<_> = seqs
            .take((1 + usize::from(count) % live).min(self.live.len()))
            .filter(|&seq| !self.model.is_preempted(seq))
            .filter(|&seq| (8..32).contains(&twist) || self.model.waiting(seq).is_none())
            .collect();
        let (mut items, mut trees) = (Vec::new(), Vec::new());
        for seq in seqs {
            let count = rng.pick(&[0, 1, 3, 5]);
            self.append_to(seq, count, seed)?;
            let start = self.model.planned_len(seq).unwrap_or(0);
            let known = self.known(seq) as u32;
            let len = known.saturating_sub(start).max(1);
            items.push(Extend { seq, len });
            trees.push((!rng.one_in(6)).then(|| tree(&mut rng, start, len)).flatten());
        }
        let mut drafts: Vec<_> =
            items.iter().zip(&trees).filter_map(|(item, tree)| Some(tree.as_ref()?.draft(item.seq))).collect();
        // Some drafts become chains, and some get masks that may form no tree.
        let mut own: Vec<Vec<u64>> = drafts.iter().map(|draft| draft.masks.to_vec()).collect();
        for (draft, masks) in drafts.iter_mut().zip(&mut own) {
            match rng.below(4) {
                0 => *draft = Draft::chain(draft.seq),
                1 => {
                    let at = rng.below(masks.len() as u64) as usize;
                    masks[at] &= rng.bits() | 1 << (masks.len() - 1 - at);
                    draft.masks = masks;
                }
                _ => {}
            }
        }
        let (wrong_masks, far_positions) = (vec![1_u64 << 63; 70], vec![u32::MAX; 70]);
        if let Some(draft) = drafts.last_mut() {
            let len = draft.masks.len();
            match twist {
                0 => draft.masks = &wrong_masks[..len],
                1 => draft.positions = &far_positions[..len],
                2 => draft.masks = &wrong_masks[..len + 1],
                3 => draft.seq = SeqKey::default(),
                4 => drafts.reverse(),
                _ => {}
            }
        }
        self.plan_with(&items, &drafts)
    }

    pub(super) fn plan_with(&mut self, items: &[Extend], drafts: &[Draft<'_>]) -> Result<(), String> {
        let mut scratch = std::mem::take(&mut self.scratch);
        let failures = self.engine.backend().failures();
        let planned = match self.padded_size(items) {
            Some(size) => self.engine.plan_padded(&mut scratch, items, drafts, size),
            None => self.engine.plan_drafts(&mut scratch, items, drafts),
        };
        let got = planned.as_ref().map(OwnedPlan::from);
        let got = got.map_err(|error| match error {
            EngineError::Core(error) => Some(*error),
            _ => None,
        });
        self.scratch = scratch;
        let moves = self.engine.backend_mut().take_moves();
        self.model.expect_moves(moves);
        let want = self.model.plan_drafts(items, drafts);
        if self.model.take_load_failed() {
            self.summary.count("load of a plan Backend".to_owned());
            let backend_failed = matches!(got, Err(None));
            return agree("a plan whose load fails", &backend_failed, &true);
        }
        let want = self.model.counted(want);
        self.compare_planned(items, got, want, failures)
    }

    /// Returns a size with up to two padding rows for two thirds of the batches, if it does not exceed the config.
    fn padded_size(&self, items: &[Extend]) -> Option<PlanSize> {
        let rows = self.ops as usize % 3;
        let tokens = items.iter().map(|item| item.len as usize).sum::<usize>() + rows * (self.ops as usize % 4).max(1);
        let fits = rows > 0 && tokens <= self.engine.shape().max_step_tokens as usize;
        fits.then_some(PlanSize { rows: items.len() + rows, tokens })
    }

    pub(super) fn accept(&mut self, pick: u8, seed: u8) -> Result<(), String> {
        let mut rng = Rng::new(u64::from(seed) + 1000);
        let waiting = |seq: &SeqKey| self.model.waiting(*seq);
        let first = self.live.iter().filter_map(waiting).min().filter(|_| pick < 224);
        let step = first.unwrap_or(self.any_step(pick));
        let mut seqs: Vec<_> = self.live.iter().copied().filter(|seq| waiting(seq) == Some(step)).collect();
        seqs.sort_by_key(|&seq| self.model.place_in_step(step, seq));
        if rng.one_in(3) {
            seqs.truncate(1);
        }
        let mut branches: Vec<Vec<u32>> = Vec::new();
        for &seq in &seqs {
            let mut branch = Vec::new();
            while !rng.one_in(5) {
                let next = self.model.may_follow(seq, &branch);
                if next.is_empty() {
                    break;
                }
                branch.push(rng.pick(&next));
            }
            branches.push(branch);
        }
        if seed < 8 {
            match seed % 4 {
                0 => seqs.reverse(),
                1 => seqs.push(self.pick(pick)),
                _ => branches.iter_mut().for_each(|branch| branch.push(rng.below(5) as u32)),
            }
            branches.resize(seqs.len(), vec![0]);
        }
        let named = seqs.iter().zip(&branches).map(|(&seq, tokens)| Branch { seq, tokens });
        let named: Vec<_> = named.collect();
        let starts: Vec<_> = seqs.iter().map(|&seq| self.model.draft_start(seq).unwrap_or(0)).collect();
        let failures = self.engine.backend().failures();
        let got = self.engine.accept_batch(step, &named).map(<[Compaction]>::to_vec);
        if let Err(EngineError::Backend(_)) = got {
            // The moved K and V are lost, so the replay aborts the step.
            agree("a failed call", &(self.engine.backend().failures() > failures), &true)?;
            self.summary.count("accept Backend".to_owned());
            self.undo_words(step);
            return agree("abort", &self.engine.abort(step), &self.model.abort(step));
        }
        let got = got.map_err(|error| match error {
            EngineError::Core(error) => error,
            _ => unreachable!("seen above"),
        });
        let want = self.model.accept(step, &named);
        let moved = want.as_ref().map(|moved| {
            let row = |seq| self.engine.sequence(seq).expect("it is live").row;
            let all = moved.iter();
            all.map(|&(seq, first, keep)| Compaction { row: row(seq), first, keep }).collect()
        });
        self.check_result("accept", &got, &moved.map_err(|error| *error))?;
        if want.is_ok() {
            for ((seq, tokens), start) in seqs.iter().zip(&branches).zip(starts) {
                let text = self.texts.get_mut(seq).expect("it is live");
                let kept: Vec<_> = tokens.iter().map(|&at| text[start + at as usize]).collect();
                text.truncate(start);
                text.extend(kept);
            }
        }
        Ok(())
    }
}

/// Returns a random tree, unless there are too many tokens.
fn tree(rng: &mut Rng, start: u32, len: u32) -> Option<DraftTree> {
    let parent = |token: u32| match rng.below(4) {
        0 => rng.below(u64::from(token) + 1) as u32,
        _ => token.saturating_sub(rng.within(1, 2) as u32),
    };
    let parents: Vec<_> = (0..len).map(parent).collect();
    let mut tree = DraftTree::new();
    tree.set(start, &parents).ok().map(|()| tree)
}
