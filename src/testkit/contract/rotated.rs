//! B19: one call that normalises and rotates q and k, and stores k and v.
//!
//! The test computes norm and rotation in float64, and compares them with the q and k that the call wrote. It compares
//! the pool with a shadow, which contains the written k and the given v. Then it stores the step's own K and V over the
//! test's rows, because the attention of later steps reads them.

use std::ops::Range;

use super::case::{HostRows, rounding};
use super::run::{ExtraCheck, Step, World};
use super::{Case, Filter, Report, TestBackend, check_seeds};
use crate::backend::{OpenBackend, Rope};
use crate::id::LayerId;
use crate::layout::Dtype;

/// Like [`check_cases`](super::check_cases), but also checks B19. The filter must select pools of
/// [heads](Filter::HEADS).
///
/// # Panics
/// As [`check_cases`](super::check_cases).
pub fn check_rotated<O>(filter: &Filter, options: impl Fn(&Case) -> O + Sync, seeds: Range<u64>) -> Report
where
    O: OpenBackend<Backend: TestBackend>,
{
    let also: ExtraCheck<O::Backend> = |world, step, inputs| world.check_rotated(step, inputs.layer);
    check_seeds(filter, options, seeds, Some(also))
}

/// The inputs of a call.
#[derive(Clone)]
struct RopeInputs {
    q_heads: usize,
    qkv: HostRows,
    /// Weights of the norms of q and of k; `None` for no norm.
    norms: [Option<HostRows>; 2],
    eps: f32,
    frequencies: HostRows,
}

impl RopeInputs {
    /// Returns the expected elements of a token's head, each with the sum of the absolute values of its two terms.
    fn exact(&self, token: usize, head: usize, dim: usize, position: u32) -> Vec<(f64, f64)> {
        let norm = &self.norms[usize::from(head >= self.q_heads)];
        let numbers = &self.qkv.row(token)[head * dim..(head + 1) * dim];
        let mut x: Vec<f64> = numbers.iter().map(|&x| x.into()).collect();
        if let Some(norm) = norm {
            let mean = x.iter().map(|x| x * x).sum::<f64>() / dim as f64;
            let scale = 1.0 / (mean + f64::from(self.eps)).sqrt();
            x.iter_mut().zip(norm.row(0)).for_each(|(x, &w)| *x *= scale * f64::from(w));
        }
        let (low, high) = x.split_at(dim / 2);
        let pair = |(i, sign): (usize, f64)| {
            // Backends compute the angle as a product in f32.
            let (sin, cos) = f64::from(position as f32 * self.frequencies.row(0)[i]).sin_cos();
            let (a, b) = if sign < 0.0 { (low[i], high[i]) } else { (high[i], low[i]) };
            (a * cos + sign * b * sin, (a * cos).abs() + (b * sin).abs())
        };
        let half = |sign| (0..dim / 2).map(move |i| pair((i, sign)));
        half(-1.0).chain(half(1.0)).collect()
    }
}

impl<B: TestBackend> World<'_, B> {
    /// Checks one layer of one step.
    fn check_rotated(&mut self, step: &Step, layer: usize) {
        let (plan, id) = (step.plan.plan(), LayerId::new(layer as u32));
        let case = self.case.of(id);
        let dim = case.layout.head_dim() as usize;
        let kv_heads = case.layout.kv_heads() as usize;
        let inputs = self.rope_inputs(&case, plan.token_count());
        let mut qkv = self.backend.output(&inputs.qkv);
        self.call(step, id, &inputs, &mut qkv).expect("a valid call");
        let past = LayerId::new(self.case.layout.layers());
        assert!(self.call(step, past, &inputs, &mut qkv).is_err(), "a layer past the last");
        for count in [dim / 2 - 1, dim / 2 + 1] {
            let mut values = inputs.frequencies.values.clone();
            values.resize(count, 0.0);
            let frequencies = HostRows { values, width: count, stride: count, ..inputs.frequencies };
            let wrong = RopeInputs { frequencies, ..inputs.clone() };
            let result = self.call(step, id, &wrong, &mut qkv);
            assert!(result.is_err(), "accepted {count} frequencies for heads of {dim}");
        }
        self.backend.synchronize().expect("nothing failed");
        let got = self.backend.read_output(&qkv);
        let location = format!("seed {} {:?}", self.seed, self.case);
        let (unit, first_v) = (rounding(self.case.kv_rows), (inputs.q_heads + kv_heads) * dim);
        for (token, row) in got.chunks_exact(inputs.qkv.stride).enumerate() {
            let is_same = |at: usize| row[at].to_bits() == inputs.qkv.values[token * row.len() + at].to_bits();
            let v_is_same = (first_v..inputs.qkv.width).all(is_same);
            assert!(v_is_same, "{location}: token {token}: v has changed");
            let between = &row[inputs.qkv.width..];
            assert!(between.iter().all(|x| x.is_nan()), "{location}: written between rows");
            for head in 0..inputs.q_heads + kv_heads {
                let exact = inputs.exact(token, head, dim, plan.positions[token]);
                for (i, (&got, (wanted, size))) in row[head * dim..].iter().zip(exact).enumerate() {
                    let bound = unit * wanted.abs() + 2_f64.powi(-19) * size + 2_f64.powi(-25);
                    let error = (f64::from(got) - wanted).abs();
                    assert!(error <= bound, "{location}: {token} {head} {i}: {got}, not {wanted}");
                }
            }
            let Some(slot) = plan.slots_of(self.case.layout.place(id).track).get(token) else {
                continue;
            };
            let width = kv_heads * dim;
            let k = &row[inputs.q_heads * dim..][..width];
            self.shadow_rows(layer, slot, [k, &row[first_v..][..width]]);
        }
        self.compare_pool();
        self.store(step, layer);
    }

    /// Returns random rows, with or without norms.
    fn rope_inputs(&mut self, case: &Case, tokens: usize) -> RopeInputs {
        let (layout, dtype) = (&case.layout, case.kv_rows);
        let (dim, kv_heads) = (layout.head_dim() as usize, layout.kv_heads() as usize);
        let q_heads = case.q_heads() as usize;
        let rng = &mut self.rng;
        let qkv = HostRows::random(rng, dtype, tokens, (q_heads + 2 * kv_heads) * dim);
        let norms = [(); 2].map(|()| rng.one_in(2).then(|| HostRows::random(rng, dtype, 1, dim)));
        let mut frequencies = HostRows::random(rng, Dtype::F32, 1, dim / 2);
        frequencies.values.truncate(dim / 2);
        frequencies.stride = dim / 2;
        let eps = rng.pick(&[1e-6, 1e-5, 0.1]);
        RopeInputs { q_heads, qkv, norms, eps, frequencies }
    }

    fn call(&mut self, step: &Step, layer: LayerId, inputs: &RopeInputs, qkv: &mut B::Output) -> Result<(), B::Error> {
        let mut input = |rows: &HostRows| self.backend.input(rows);
        let norms = inputs.norms.each_ref().map(|norm| norm.as_ref().map(&mut input));
        let frequencies = input(&inputs.frequencies);
        let [q_norm, k_norm] = norms.each_ref().map(|norm| norm.as_ref().map(B::rows));
        let (q_heads, eps) = (inputs.q_heads as u32, inputs.eps);
        let rope = Rope { q_heads, q_norm, k_norm, eps, frequencies: B::sinks(&frequencies) };
        self.backend.rope_store(&step.plan.plan(), layer, &rope, B::rows_mut(qkv))
    }
}
