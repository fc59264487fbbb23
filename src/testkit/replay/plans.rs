//! Plans: the comparison of each plan with the model's, the tokens that its step samples, and the store of its K and V.
//!
//! Not here: packed arrays of a plan (`packed.rs`).

use std::collections::BTreeSet;

use super::agree;
use super::bytes::{self, Inspect};
use super::host::Host;
use crate::error::Error;
use crate::id::{LayerId, PageId};
use crate::layout::PlaneName;
use crate::plan::{BatchPlan, Extend, OwnedPlan, PlanSize, StepScratch};
use crate::testkit::model::PlanWant;
use crate::testkit::padded::{padded, unpadded};
use crate::testkit::rng::mix;
use crate::testkit::spans::{Spans, unordered};

impl<B: Inspect> Host<B> {
    pub(super) fn compare_planned(
        &mut self,
        items: &[Extend],
        got: Result<OwnedPlan, Option<Error>>,
        want: Result<PlanWant, Error>,
        failures: u64,
    ) -> Result<(), String> {
        match (got, want) {
            (Ok(plan), Ok(want)) => {
                self.check_result("plan_batch", &Ok(plan.plan().step), &Ok(want.step))?;
                self.planned(items, &plan, &want)
            }
            (Err(None), Ok(want)) if self.engine.backend().failures() > failures => {
                self.summary.count("plan_batch Backend".to_owned());
                agree("abort", &Ok(()), &self.model.undo_plan(want.step))
            }
            (Err(Some(got)), want) => {
                if let Error::OutOfPages { after, .. } = got
                    && self.model.is_promised(items)
                {
                    self.summary.count("plan_batch promised, but later".to_owned());
                    agree("promised pages come back", &after.is_some(), &true)?;
                }
                self.check_result("plan_batch", &Err(got), &want.map(|want| want.step))
            }
            (got, want) => {
                let got = got.map(|plan| plan.plan().step);
                Err(format!("plan_batch: engine {got:?}, model {want:?}"))
            }
        }
    }

    /// Checks a plan, and stores its K and V.
    fn planned(&mut self, items: &[Extend], plan: &OwnedPlan, want: &PlanWant) -> Result<(), String> {
        let again = OwnedPlan::from_bytes(plan.as_bytes()).map_err(|error| error.to_string())?;
        agree("the plan's bytes", &again, plan)?;
        let (whole, mut scratch) = (again.plan(), [(); 2].map(|()| StepScratch::new()));
        let [of_plan, of_padded] = &mut scratch;
        let plan = &unpadded(&whole, of_plan, PlanSize { rows: want.rows.len(), tokens: want.tokens.len() });
        let size = PlanSize { rows: whole.rows.len(), tokens: whole.token_count() };
        agree("the padding", &whole, &padded(plan, of_padded, size))?;
        self.compare_plan(plan, want)?;
        self.words_before.insert(plan.step, self.words.clone());
        for write in plan.table_writes {
            self.words[write.index as usize] = write.value;
        }
        self.compare_rows(plan, want)?;
        self.compare_states(plan, items, want)?;
        self.compare_spans(plan, want)?;
        self.compare_packed(&whole, plan, items, want)?;
        for row in &want.rows {
            let old = (row.kv_len - row.extend_len) as usize;
            for (first, table) in row.tables() {
                self.compare_untouched(&table[old.div_ceil(self.page_size()) - first..])?;
            }
        }
        let tables = want.rows.iter().flat_map(|row| row.tables());
        let states = want.states.iter().flatten().flatten().filter(|page| page.raw() > 0);
        let pages = tables.flat_map(|(_, pages)| pages).chain(states).copied().collect();
        self.touched.insert(want.step, pages);
        self.sample(want);
        self.store(&whole, want)
    }

    /// Compares the shared spans with the page tables.
    fn compare_spans(&self, plan: &BatchPlan<'_>, want: &PlanWant) -> Result<(), String> {
        let tables: Vec<_> = want.rows.iter().map(|row| row.table.as_slice()).collect();
        let page_size = self.engine.shape().layout.page_size();
        let shares = self.engine.shape().shares_prefixes();
        let naive = if shares { Spans::of(&tables, page_size) } else { Spans::default() };
        agree("shared spans", &unordered(&plan.shared), &unordered(&naive.plan()))
    }

    fn compare_rows(&self, plan: &BatchPlan<'_>, want: &PlanWant) -> Result<(), String> {
        let table = self.engine.shape().table;
        let mut seen = BTreeSet::new();
        for (row, want) in plan.rows.iter().zip(&want.rows) {
            if row.row.raw() >= table.rows || !seen.insert(row.row) {
                return Err(format!("the plan names {:?} twice, or it does not exist", row.row));
            }
            for words in [Some(&self.words[..]), self.engine.backend().words()].iter().flatten() {
                for (track, (first, pages)) in (0..).zip(want.tables()) {
                    let page = |i| table.track_page(words, row.row, track, i);
                    let held = first as u32..(first + pages.len()) as u32;
                    let got: Vec<_> = held.map(page).collect();
                    agree("the page table words", &(track, &got[..]), &(track, pages))?;
                }
            }
        }
        Ok(())
    }

    /// Compares the pages of the states that rows read and write, in the page tables and packed.
    fn compare_states(&self, plan: &BatchPlan<'_>, items: &[Extend], want: &PlanWant) -> Result<(), String> {
        let table = self.engine.shape().table;
        for (row, want) in plan.rows.iter().zip(&want.states) {
            for words in [Some(&self.words[..]), self.engine.backend().words()].iter().flatten() {
                for (part, pages) in (0..).zip(want) {
                    let first = table.state_word(row.row, part) as usize;
                    let got = PageId::from_raw(&words[first..first + table.state_pages as usize]);
                    agree("the words of a state", &(part, got), &(part, &pages[..]))?;
                }
            }
            let [reads, writes] = want;
            self.compare_untouched(if reads == writes { &[] } else { writes })?;
        }
        let (mut scratch, rows) = (StepScratch::new(), items.len() + 1);
        if want.masks.is_empty() {
            let packed = self.engine.packed_states(&mut scratch, items, rows).map_err(|error| error.to_string())?;
            for (part, got) in [packed.reads, packed.writes].into_iter().enumerate() {
                let page = |track: usize| want.states.iter().map(move |row| row[part][track].raw() as i32).chain([-1]);
                let want: Vec<_> = (0..table.state_pages as usize).flat_map(page).collect();
                agree("packed states", &(part, got), &(part, &want[..]))?;
            }
        }
        Ok(())
    }

    /// Chooses the tokens that steps will sample in place of the plan's pending tokens.
    fn sample(&mut self, want: &PlanWant) {
        for row in &want.rows {
            let known = self.texts[&row.seq].len();
            let seed = mix(want.step.raw()) ^ u64::from(row.qo_start);
            let new: Vec<_> = (known..row.kv_len as usize).map(|i| self.token(seed, i)).collect();
            self.texts.entry(row.seq).or_default().extend(new);
        }
    }

    fn store(&mut self, plan: &BatchPlan<'_>, want: &PlanWant) -> Result<(), String> {
        let layout = self.engine.shape().layout;
        let mut seeds = Vec::new();
        for row in &want.rows {
            let scope = self.model.scope(row.seq).map_err(|error| error.to_string())?;
            let text = &self.texts[&row.seq][..row.kv_len as usize];
            let start = (row.kv_len - row.extend_len) as usize;
            if self.model.waiting(row.seq).is_none() {
                seeds.extend_from_slice(&bytes::seeds(scope, text)[start..]);
                continue;
            }
            // K and V of a draft depend on its own branch.
            for token in 0..row.extend_len as usize {
                let seen = self.model.drafts_seen(row.seq, token);
                let branch = seen.into_iter().map(|at| text[start + at]);
                let text: Vec<_> = text[..start].iter().copied().chain(branch).collect();
                seeds.extend(bytes::seeds(scope, &text).last());
            }
        }
        let stores = |layer: &LayerId| Some(layout.place(*layer).group) != layout.groups().state_group();
        for layer in (0..layout.layers()).map(LayerId::new).filter(stores) {
            let layout = layout.of_group(layout.place(layer).group);
            // A store takes K and V of one plane each, or latent rows of one or two planes.
            let rows = [&[PlaneName::K, PlaneName::Latent, PlaneName::Rope][..], &[PlaneName::V]];
            let [k, v] = rows.map(|names| -> Vec<f32> {
                let stored = |&plane: &usize| names.contains(&layout.planes()[plane].name);
                let planes = (0..layout.planes().len()).filter(stored);
                let row = |&seed: &u64| {
                    let planes = planes.clone();
                    planes.flat_map(move |plane| bytes::numbers(&layout, seed, plane, layer))
                };
                let mut rows: Vec<f32> = seeds.iter().flat_map(row).collect();
                rows.resize(rows.len() / seeds.len() * plan.token_count(), 0.0);
                rows
            });
            let stored = self.engine.backend_mut().store(plan, layer, &k, &v);
            stored.map_err(|error| error.to_string())?;
        }
        self.compute_states(plan, want)
    }

    /// Checks the bytes of the states that rows read, and writes those behind the rows' last tokens.
    fn compute_states(&mut self, plan: &BatchPlan<'_>, want: &PlanWant) -> Result<(), String> {
        let layout = self.engine.shape().layout;
        let keeps = |layer: &LayerId| Some(layout.place(*layer).group) == layout.groups().state_group();
        for (index, row) in want.rows.iter().enumerate() {
            let scope = self.model.scope(row.seq).map_err(|error| error.to_string())?;
            let seeds = bytes::seeds(scope, &self.texts[&row.seq][..row.kv_len as usize]);
            let start = (row.kv_len - row.extend_len) as usize;
            let before = start.checked_sub(1).map(|last| seeds[last]);
            for layer in (0..layout.layers()).map(LayerId::new).filter(keeps) {
                let backend = self.engine.backend_mut();
                let Some(got) = backend.read_state(plan, layer, index) else { return Ok(()) };
                if got != bytes::state(&layout, before, layer) {
                    return Err(format!(
                        "the state of {layer:?} behind {start} tokens of {:?} is another one",
                        row.seq
                    ));
                }
                backend.write_state(plan, layer, index, &bytes::state(&layout, seeds.last().copied(), layer));
            }
        }
        Ok(())
    }

    pub(super) fn compare_plan(&self, plan: &BatchPlan<'_>, want: &PlanWant) -> Result<(), String> {
        let rows: Vec<_> = plan.rows.iter().map(|row| (row.qo_start, row.extend_len, row.kv_len)).collect();
        let rows_want: Vec<_> = want.rows.iter().map(|row| (row.qo_start, row.extend_len, row.kv_len)).collect();
        agree("the plan's rows", &rows, &rows_want)?;
        agree("the plan's tokens", &plan.tokens.to_vec(), &want.tokens)?;
        agree("the plan's masks", &plan.masks.to_vec(), &want.masks)?;
        agree("the plan's positions", &plan.positions.to_vec(), &want.positions)?;
        let slots = (0..plan.slot_mapping.len()).map(|i| plan.slot_mapping.get(i).map_or(-1, |slot| slot.raw() as i64));
        agree("the plan's slots", &slots.collect::<Vec<_>>(), &want.slots)?;
        agree("tracks", &plan.track_slots.len(), &want.track_slots.iter().map(Vec::len).sum())?;
        for (track, want) in (1..).zip(&want.track_slots) {
            let slots = plan.slots_of(track);
            let slots = (0..slots.len()).map(|i| slots.get(i).map_or(-1, |slot| slot.raw() as i64)).collect::<Vec<_>>();
            agree("the slots of a track", &(track, &slots), &(track, want))?;
        }
        Ok(())
    }
}
