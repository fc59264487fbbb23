//! Compares packed arrays of a plan with the model's page tables.

use super::agree;
use super::bytes::Inspect;
use super::host::Host;
use crate::error::Error;
use crate::id::StepId;
use crate::plan::{BatchPlan, Extend, PackedLevels, PackedPlan, SharedSpan, StepScratch};
use crate::testkit::model::PlanWant;

/// The pages that a row has read in earlier levels.
#[derive(Clone, Default)]
struct Read {
    pages: Vec<i32>,
    tokens: i32,
}

impl<B: Inspect> Host<B> {
    /// Compares the packed arrays of a plan in both forms. If items are trees, both forms must reject the first tree.
    /// `whole` is the plan with its padding.
    pub(super) fn compare_packed(
        &self,
        whole: &BatchPlan<'_>,
        plan: &BatchPlan<'_>,
        items: &[Extend],
        want: &PlanWant,
    ) -> Result<(), String> {
        let mut scratch = [StepScratch::new(), StepScratch::new()];
        let [of_packed, of_levels] = &mut scratch;
        let packed = self.engine.packed(of_packed, items);
        let levels = self.engine.packed_levels(of_levels, whole, items);
        if let Some(item) = items.iter().find(|item| self.model.has_tree(item.seq)) {
            let refused = Err(Error::PackedTree { seq: item.seq });
            agree("packed arrays of a tree", &packed.map(|_| ()), &refused)?;
            return agree("levels of a tree", &levels.map(|_| ()), &refused);
        }
        self.compare_arrays(&packed.map_err(|error| error.to_string())?, 0, want)?;
        for track in 1..self.engine.shape().table.tracks {
            let mut scratch = StepScratch::new();
            let packed = self.engine.packed_track(&mut scratch, track, items);
            self.compare_arrays(&packed.map_err(|error| error.to_string())?, track, want)?;
        }
        self.compare_levels(&levels.map_err(|error| error.to_string())?, plan, items, want)?;
        self.compare_other_items(plan, items)
    }

    fn compare_arrays(&self, packed: &PackedPlan<'_>, track: u32, want: &PlanWant) -> Result<(), String> {
        let page_size = self.engine.shape().layout.page_size();
        let (mut qo, mut kv, mut indices, mut last) = (vec![0], vec![0], Vec::new(), Vec::new());
        for row in &want.rows {
            qo.push((row.qo_start + row.extend_len) as i32);
            let (_, table) = row.tables().nth(track as usize).ok_or("too few tracks")?;
            indices.extend(table.iter().map(|page| page.raw() as i32));
            kv.push(indices.len() as i32);
            last.push(((row.kv_len - 1) % page_size + 1) as i32);
        }
        agree("qo_indptr", &packed.qo_indptr.to_vec(), &qo)?;
        agree("kv_indptr", &packed.kv_indptr.to_vec(), &kv)?;
        agree("kv_indices", &packed.kv_indices.to_vec(), &indices)?;
        agree("kv_last_page_len", &packed.kv_last_page_len.to_vec(), &last)
    }

    /// Checks that the levels contain each row's pages once, in order, and each page of a span once for all its rows.
    fn compare_levels(
        &self,
        packed: &PackedLevels<'_>,
        plan: &BatchPlan<'_>,
        items: &[Extend],
        want: &PlanWant,
    ) -> Result<(), String> {
        let mut order = packed.order.to_vec();
        order.sort_unstable();
        agree("the order of rows", &order, &(0..items.len() as u32).collect())?;
        let page_size = self.engine.shape().layout.page_size();
        let mut reads = vec![Read::default(); items.len()];
        for level in packed.levels {
            read_level(level, packed.order, items, page_size as i32, &mut reads)?;
        }
        for (row, read) in want.rows.iter().zip(&reads) {
            let pages = row.table.iter().map(|page| page.raw() as i32).collect();
            agree("pages of a row in its levels", &read.pages, &pages)?;
            agree("tokens of a row in its levels", &(read.tokens as u32), &row.kv_len)?;
        }
        let listed: usize = packed.levels.iter().map(|level| level.kv_indices.len()).sum();
        let flat: usize = want.rows.iter().map(|row| row.table.len()).sum();
        let saved =
            |span: &SharedSpan| (span.member_count as usize - 1) * ((span.end - span.begin) / page_size) as usize;
        let saved: usize = plan.shared.spans.iter().map(saved).sum();
        agree("pages that are listed", &listed, &(flat - saved))
    }

    /// Checks that the engine rejects other items, another order, fewer items than the plan has, and another step's
    /// plan.
    fn compare_other_items(&self, plan: &BatchPlan<'_>, items: &[Extend]) -> Result<(), String> {
        let longer = vec![Extend { len: items[0].len + 1, ..items[0] }];
        let backwards: Vec<_> = items.iter().rev().copied().collect();
        for (wrong, items) in [("longer", longer), ("reversed", backwards)] {
            let refused = self.engine.packed(&mut StepScratch::new(), &items).is_err();
            agree(wrong, &refused, &(wrong == "longer" || items.len() > 1))?;
        }
        let levels = |plan: &BatchPlan<'_>, items: &[Extend]| {
            self.engine.packed_levels(&mut StepScratch::new(), plan, items).map(|_| ())
        };
        let fewer = Err(Error::PackedRows { items: items.len() - 1, rows: items.len() });
        agree("levels of fewer items", &levels(plan, &items[1..]), &fewer)?;
        let before = BatchPlan { step: StepId::new(plan.step.raw() - 1), ..*plan };
        let Extend { seq, len } = items[0];
        let refused = Err(Error::NotPlanned { seq, len });
        agree("levels of the step before", &levels(&before, items), &refused)
    }
}

/// Adds a level's pages to the pages that its rows have read. Checks that each entry contains whole rows, and that no
/// page follows a partial one.
fn read_level(
    level: &PackedPlan<'_>,
    order: &[u32],
    items: &[Extend],
    page_size: i32,
    reads: &mut [Read],
) -> Result<(), String> {
    let (mut rows, mut tokens) = (order.iter(), 0);
    for (i, last) in level.kv_last_page_len.iter().enumerate() {
        let [begin, end] = [i, i + 1].map(|at| level.kv_indptr[at] as usize);
        let pages = &level.kv_indices[begin..end];
        while tokens < level.qo_indptr[i + 1] {
            let row = *rows.next().ok_or("more tokens than the rows have")? as usize;
            tokens += items[row].len as i32;
            let read = &mut reads[row];
            if !pages.is_empty() {
                agree("whole pages before others", &(read.tokens % page_size), &0)?;
                read.tokens += (pages.len() as i32 - 1) * page_size + last;
            }
            read.pages.extend_from_slice(pages);
        }
        agree("rows of an entry are whole", &tokens, &level.qo_indptr[i + 1])?;
    }
    agree("rows of a level", &rows.len(), &0)
}
