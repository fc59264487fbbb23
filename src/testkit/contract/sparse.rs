//! B9 and B10: selections, and attention over them.
//!
//! The test compares a selection by labels with the result of sorting all scores, position by position. It compares
//! attention with float64 over the positions of a list. The list is the selected one or a random one; a random list may
//! have positions that the row does not see.

use std::cmp::Reverse;
use std::ops::Range;

use super::case::HostRows;
use super::exact::{attention_to, sees};
use super::history::History;
use super::run::{ExtraCheck, Inputs, Step, World};
use super::{Case, Filter, Report, TestBackend, check_seeds};
use crate::backend::{Attend, NO_POSITION, OpenBackend, Queries, Select, Selection, SparseBackend};
use crate::id::LayerId;
use crate::plan::BatchRow;
use crate::testkit::planner::Item;
use crate::testkit::rng::mix;

/// A sparse backend under test.
pub trait SparseTestBackend: TestBackend + SparseBackend {
    /// Lists of positions.
    type Lists;

    /// Creates a buffer with these numbers.
    fn lists(&mut self, positions: &[u32]) -> Self::Lists;

    /// Returns the lists of a buffer.
    fn positions(lists: &Self::Lists) -> Self::Positions<'_>;

    /// Returns the writable lists of a buffer.
    fn positions_mut(lists: &mut Self::Lists) -> Self::PositionsMut<'_>;

    /// Returns all numbers of a buffer.
    fn read_lists(&mut self, lists: &Self::Lists) -> Vec<u32>;
}

/// Like [`check_cases`](super::check_cases), but also checks B9 and B10. The filter must select pools with labels.
///
/// # Panics
/// As [`check_cases`](super::check_cases).
pub fn check_sparse_backend<O>(filter: &Filter, options: impl Fn(&Case) -> O + Sync, seeds: Range<u64>) -> Report
where
    O: OpenBackend<Backend: SparseTestBackend>,
{
    let also: ExtraCheck<O::Backend> = |world, step, inputs| world.check_sparse(step, inputs);
    check_seeds(filter, options, seeds, Some(also))
}

impl<B: SparseTestBackend> World<'_, B> {
    /// Checks one layer of one step.
    fn check_sparse(&mut self, step: &Step, inputs: &Inputs) {
        let Inputs { layer, ref attend, ref q, ref sinks } = *inputs;
        let (plan, id) = (step.plan.plan(), LayerId::new(layer as u32));
        let top = self.top();
        let lists = plan.rows.len() * self.case.layout.kv_heads() as usize;
        let q_rows = self.backend.input(q);
        let mut chosen = self.backend.lists(&vec![7; lists * top as usize]);
        let select = Select { q_heads: attend.q_heads, top, window: attend.window };
        self.check_invalid_selections(step, &select, &q_rows);
        let to = B::positions_mut(&mut chosen);
        let selected = self.backend.select(&plan, id, &select, B::rows(&q_rows), to);
        if self.case.layout.place(id).group > 0 {
            // Only layers that read all tokens have lists.
            assert!(selected.is_err(), "seed {}: a list was made for {id:?}", self.seed);
            return;
        }
        selected.expect("a valid selection");
        self.backend.synchronize().expect("nothing failed");
        let mut positions = self.backend.read_lists(&chosen);
        let wanted = self.selected(step, layer, &select, q);
        assert_eq!(positions, wanted, "seed {} {:?} {select:?}", self.seed, self.case);
        if self.rng.one_in(2) {
            self.scatter(step, top, &mut positions);
            chosen = self.backend.lists(&positions);
        }

        let mut poison = q.clone();
        poison.values.fill(f32::NAN);
        let mut out = self.backend.output(&poison);
        let mut lse = self.backend.sums(plan.token_count() * attend.q_heads as usize);
        let selection = Selection { positions: B::positions(&chosen), top };
        let (to, sums) = (B::rows_mut(&mut out), Some(B::lse(&mut lse)));
        let sinks_at = sinks.as_ref().map(|sinks| self.backend.input(sinks));
        let queries = Queries { rows: B::rows(&q_rows), sinks: sinks_at.as_ref().map(B::sinks) };
        self.backend.attend_selected(&plan, id, attend, selection, queries, to, sums).expect("valid attention");
        self.backend.synchronize().expect("nothing failed");
        let (out, lse) = (self.backend.read_output(&out), self.backend.read_sums(&lse));
        self.compare_selected(step, inputs, top, &positions, (&out, &lse));
    }

    /// Returns the length of the lists. It is constant for a seed, because a GPU allocates memory for each length.
    fn top(&self) -> u32 {
        let tops = [1, 2, 3, 16, 33, 64, 200];
        tops[mix(self.seed) as usize % tops.len()].min(self.case.max_len)
    }

    /// Checks that the backend rejects invalid selections.
    fn check_invalid_selections(&mut self, step: &Step, select: &Select, queries: &B::Input) {
        let (plan, layer) = (step.plan.plan(), LayerId::new(0));
        let past = self.case.table.leaves_per_row * self.case.table.leaf_pages;
        let past = past * self.case.layout.page_size() + 1;
        for select in [
            Select { top: 0, ..*select },
            Select { top: past, ..*select },
            Select { window: Some(0), ..*select },
            Select { q_heads: 0, ..*select },
        ] {
            let lists = plan.rows.len() * self.case.layout.kv_heads() as usize;
            let mut lists = self.backend.lists(&vec![7; lists * select.top as usize]);
            let to = B::positions_mut(&mut lists);
            let result = self.backend.select(&plan, layer, &select, B::rows(queries), to);
            assert!(result.is_err(), "seed {}: {select:?} was accepted", self.seed);
        }
    }

    /// Returns all expected lists.
    fn selected(&self, step: &Step, layer: usize, select: &Select, q: &HostRows) -> Vec<u32> {
        let kv_heads = self.case.layout.kv_heads() as usize;
        let rows = step.plan.plan().rows.iter().zip(&step.items);
        let mut all = Vec::new();
        for (row, item) in rows {
            for kv_head in 0..kv_heads {
                let mut list = match item {
                    Item::Extend { sequence, .. } | Item::Requery { sequence, .. }
                        if row.extend_len == 1 && step.plan.plan().tree(row).is_none() =>
                    {
                        let q = q.row(row.qo_start as usize);
                        let history = &self.history[*sequence][layer];
                        self.best(history, (layer, kv_head), q, select, row.kv_len)
                    }
                    _ => vec![],
                };
                list.resize(select.top as usize, NO_POSITION);
                all.extend(list);
            }
        }
        // Padding has no items.
        all.resize(step.plan.plan().rows.len() * kv_heads * select.top as usize, NO_POSITION);
        all
    }

    /// Returns the expected list of a row and a kv head: the row's own position, and the positions with the largest
    /// scores.
    fn best(
        &self,
        history: &History,
        (layer, kv_head): (usize, usize),
        q: &[f32],
        select: &Select,
        kv_len: u32,
    ) -> Vec<u32> {
        let channels = self.given.labels.as_ref().expect("the pool has labels");
        let channels = channels.get(LayerId::new(layer as u32), kv_head as u32);
        let (head_dim, group) = (self.case.layout.head_dim() as usize, self.case.group_size as usize);
        let heads = kv_head * group..(kv_head + 1) * group;
        let query = |channel: u32| {
            let numbers = heads.clone().map(|head| q[head * head_dim + channel as usize]);
            numbers.fold(0.0_f32, |sum, x| sum + x)
        };
        let query: Vec<f32> = channels.iter().map(|&channel| query(channel)).collect();
        let kv_heads = self.case.layout.kv_heads() as usize;
        let score = |position: u32| {
            let start = (position as usize * kv_heads + kv_head) * query.len();
            let labels = &history.labels[start..start + query.len()];
            query.iter().zip(labels).fold(0.0, |score, (&q, &label)| q.mul_add(label, score))
        };
        let attend = Attend { window: select.window, ..Attend::new(1, 1) };
        let own = kv_len - 1;
        let mut seen: Vec<u32> = sees(&attend, own as usize).map(|x| x as u32).collect();
        seen.sort_by(|&a, &b| {
            let (a, b) = ((Reverse(a == own), a), (Reverse(b == own), b));
            let by_score = score(b.1).partial_cmp(&score(a.1)).expect("finite numbers");
            a.0.cmp(&b.0).then(by_score).then(b.1.cmp(&a.1))
        });
        seen.truncate(select.top as usize);
        seen.sort_unstable();
        seen
    }

    /// Replaces lists by random ones: with fewer positions or none, or with positions that the row does not see.
    fn scatter(&mut self, step: &Step, top: u32, positions: &mut [u32]) {
        let kv_heads = self.case.layout.kv_heads() as usize;
        let rows = step.plan.plan().rows;
        for (i, list) in positions.chunks_exact_mut(top as usize).enumerate() {
            let kv_len = rows[i / kv_heads].kv_len;
            let end = self.rng.pick(&[kv_len, kv_len, kv_len + 9, 1 << 31, 0]);
            let count = self.rng.within(0, top.into()).min(end.into());
            let mut some: Vec<u32> = (0..count).map(|_| self.rng.below(end.into()) as u32).collect();
            some.sort_unstable();
            some.dedup();
            some.resize(top as usize, NO_POSITION);
            list.copy_from_slice(&some);
        }
    }

    fn compare_selected(
        &mut self,
        step: &Step,
        Inputs { layer, attend, q, sinks }: &Inputs,
        top: u32,
        positions: &[u32],
        (out, lse): (&[f32], &[f32]),
    ) {
        let (plan, case, seed) = (step.plan.plan(), self.case, self.seed);
        let (stride, head_dim) = (out.len() / plan.token_count(), case.layout.head_dim() as usize);
        let (q_heads, kv_heads) = (case.q_heads() as usize, case.layout.kv_heads() as usize);
        let listed = |row: &BatchRow| row.extend_len == 1 && plan.tree(row).is_none();
        for (i, row) in plan.rows.iter().enumerate().filter(|(_, row)| listed(row)) {
            let at = row.qo_start as usize;
            for head in 0..q_heads {
                let kv_head = head / case.group_size as usize;
                let got = &out[at * stride + head * head_dim..][..head_dim];
                let sum = lse[at * q_heads + head];
                let location = || format!("seed {seed} {case:?} {attend:?}: row {i} head {head}, selected");
                let list = &positions[(i * kv_heads + kv_head) * top as usize..][..top as usize];
                let seen = sees(attend, (row.kv_len as usize).saturating_sub(1));
                let list: Vec<usize> = match row.kv_len {
                    0 => vec![],
                    _ => list.iter().map(|&x| x as usize).filter(|x| seen.contains(x)).collect(),
                };
                let sink = sinks.as_ref().map_or(f32::NEG_INFINITY, |sinks| sinks.values[head]);
                if list.is_empty() {
                    let alone = if row.kv_len == 0 { f32::NEG_INFINITY } else { sink };
                    let nothing = got.iter().all(|&x| x == 0.0) && sum == alone;
                    assert!(nothing, "{}: {sum} {got:?}", location());
                    continue;
                }
                let (Item::Extend { sequence, .. } | Item::Requery { sequence, .. }) = step.items[i] else {
                    unreachable!("padding has kv_len 0")
                };
                let History { k, v, .. } = &self.history[sequence][*layer];
                let q = &q.row(at)[head * head_dim..(head + 1) * head_dim];
                let heads = (kv_heads, kv_head);
                let exact = attention_to(attend, q, k, v, heads, list.iter().copied(), sink);
                self.compare_row(&self.case.clone(), got, Some(sum), &exact, &location);
            }
        }
    }
}
