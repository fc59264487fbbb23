//! Compares the results of a backend with the expected results.

use super::case::{Case, rounding};
use super::exact::{Exact, attention, attention_to};
use super::history::History;
use super::run::{Inputs, Pending, Step, World};
use super::{Report, TestBackend};
use crate::id::{LayerId, PageId};
use crate::layout::Dtype;
use crate::testkit::parallel;
use crate::testkit::planner::Item;

/// Approximate maximum number of multiplications of float64 attention for one call. The test compares only a random
/// sample of the rows of a larger call.
const EXACT_WORK: u64 = 2_000_000;

impl<B: TestBackend> World<'_, B> {
    /// Compares the outputs of one call with float64.
    pub fn compare(&mut self, step: &Step, call: Pending<B>) {
        let out = self.backend.read_output(&call.out);
        let lse = call.lse.as_ref().map(|sums| self.backend.read_sums(sums));
        let plan = step.plan.plan();
        let stride = out.len() / plan.token_count();
        let case = self.case.of(LayerId::new(call.inputs.layer as u32));
        let (width, q_heads) = (case.out_width(), case.q_heads() as usize);
        let location = format!("seed {} {:?} {:?} {:?}", self.seed, self.case, plan.rows, call.inputs.attend);
        for row in out.chunks_exact(stride) {
            assert!(row[width..].iter().all(|x| x.is_nan()), "{location}: written between rows");
        }
        let value_dim = case.layout.value_dim() as usize;
        let pairs: u64 = plan.rows.iter().map(|r| u64::from(r.extend_len) * u64::from(r.kv_len)).sum();
        let work = pairs * (width + case.q_width()) as u64;
        let mut compared = Vec::new();
        for (i, row) in plan.rows.iter().enumerate() {
            for (token, head) in (0..row.extend_len).flat_map(|t| (0..q_heads).map(move |h| (t, h))) {
                let at = (row.qo_start + token) as usize;
                let start = at * stride + head * value_dim;
                let got = &out[start..start + value_dim];
                let sum = lse.as_ref().map(|lse| lse[at * q_heads + head]);
                let location = || format!("{location}: token {at} head {head}");
                if row.kv_len == 0 {
                    assert!(got.iter().all(|&x| x == 0.0), "{}: padding is not 0", location());
                    assert!(sum.is_none_or(|x| x == f32::NEG_INFINITY), "{}: {sum:?}", location());
                    continue;
                }
                assert!(got.iter().all(|x| x.is_finite()), "{}: {got:?}", location());
                if work > EXACT_WORK && self.rng.below(work) > EXACT_WORK {
                    continue;
                }
                compared.push(Place { row: i, token, head });
            }
        }
        let history = &self.history;
        let exacts = parallel::map(&compared, |place| exact_of(&case, history, step, &call.inputs, place));
        for (&Place { row, token, head }, exact) in compared.iter().zip(&exacts) {
            let at = (plan.rows[row].qo_start + token) as usize;
            let start = at * stride + head * value_dim;
            let sum = lse.as_ref().map(|lse| lse[at * q_heads + head]);
            let location = || format!("{location}: token {at} head {head}");
            self.compare_row(&case, &out[start..start + value_dim], sum, exact, &location);
        }
    }

    pub fn compare_row(
        &mut self,
        case: &Case,
        got: &[f32],
        sum: Option<f32>,
        exact: &Exact,
        location: &dyn Fn() -> String,
    ) {
        let bound = Bound::of(&self.backend, case);
        compare_row(bound, got, sum, exact, location, self.report);
    }

    /// Compares every byte of the pool.
    pub fn compare_pool(&mut self) {
        self.backend.synchronize().expect("nothing failed");
        let page_bytes = self.case.layout.page_bytes() as usize;
        let pages: Vec<_> = (0..self.shadow.len() as u32).map(PageId::new).collect();
        let mut got = vec![0; pages.len() * page_bytes];
        self.backend.read_pages(&pages, &mut got);
        for (page, (got, wanted)) in got.chunks_exact(page_bytes).zip(&self.shadow).enumerate() {
            if got != *wanted {
                let first = got.iter().zip(wanted).position(|(a, b)| a != b);
                let (seed, case) = (self.seed, &self.case);
                panic!("seed {seed} {case:?}: page {page} differs at byte {first:?}");
            }
        }
    }
}

/// A query head of a new token: the index of its row, of the token in the row, and of the head.
struct Place {
    row: usize,
    token: u32,
    head: usize,
}

/// Returns the attention of one query head.
fn exact_of(
    case: &Case,
    history: &[Vec<History>],
    step: &Step,
    Inputs { layer, attend, q, sinks }: &Inputs,
    &Place { row, token, head }: &Place,
) -> Exact {
    let (Item::Extend { sequence, .. } | Item::Requery { sequence, .. }) = step.items[row] else {
        unreachable!("padding has kv_len 0")
    };
    let plan = step.plan.plan();
    let row = &plan.rows[row];
    let head_dim = case.layout.head_dim() as usize;
    let q = &q.row((row.qo_start + token) as usize)[head * head_dim..(head + 1) * head_dim];
    let History { k, v, .. } = &history[sequence][*layer];
    let heads = (case.layout.kv_heads() as usize, head / case.group_size as usize);
    let sink = sinks.as_ref().map_or(f32::NEG_INFINITY, |sinks| sinks.values[head]);
    let Some(masks) = plan.tree(row) else {
        let position = (row.kv_len - row.extend_len + token) as usize;
        return attention(attend, q, k, v, heads, position, sink);
    };
    let (mask, last) = (masks[token as usize], row.kv_len as usize - 1);
    let is_seen = |&at: &usize| last - at >= 64 || mask >> (last - at) & 1 == 1;
    attention_to(attend, q, k, v, heads, (0..=last).filter(is_seen), sink)
}

/// The numbers of a backend and a case that determine the bound of errors.
#[derive(Clone, Copy)]
pub(super) struct Bound {
    unit: f64,
    values: f64,
    q_rows: Dtype,
}

impl Bound {
    pub fn of(backend: &impl TestBackend, case: &Case) -> Self {
        let (unit, values) = (backend.unit(case), backend.value_rounding(case));
        Self { unit, values, q_rows: case.q_rows }
    }
}

/// Compares one head of an output row.
pub(super) fn compare_row(
    Bound { unit, values, q_rows }: Bound,
    got: &[f32],
    sum: Option<f32>,
    exact: &Exact,
    location: &dyn Fn() -> String,
    report: &mut Report,
) {
    let of_lse = unit * exact.lse.abs();
    let unit = unit * (4.0 + exact.logit_mass);
    let rounding = rounding(q_rows);
    // In f16, neighbouring results and weights differ by at least 2^-24, so each may be off by half of it.
    let step = 2_f64.powi(-25);
    let weights = if q_rows == Dtype::F16 { step } else { 0.0 };
    let sums = exact.out.iter().zip(&exact.mass).zip(&exact.faint);
    for (&got, ((&wanted, &mass), &faint)) in got.iter().zip(sums) {
        // A number of V below 2^-14 has the same absolute rounding error as 2^-14. The weights of all tokens add up to
        // at most 1.
        let of_values = values * (mass + 2_f64.powi(-14));
        let rounded = rounding * wanted.abs() * 1.01 + step + weights * faint + of_values;
        let error = (f64::from(got) - wanted).abs() - rounded;
        let part = error / (unit * mass);
        assert!(error <= unit * mass, "{}: {got} is not {wanted}: {part} of the bound", location());
        report.worst_out = report.worst_out.max(part);
    }
    if let Some(sum) = sum {
        let part = (f64::from(sum) - exact.lse).abs() / (unit + of_lse);
        assert!(part <= 1.0, "{}: {sum} is not {}: {part} of the bound", location(), exact.lse);
        report.worst_lse = report.worst_lse.max(part);
    }
    report.rows += 1;
}
