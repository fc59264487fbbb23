//! Invalid calls, which a backend must reject. Later comparisons check that they wrote nothing.

use super::TestBackend;
use super::case::HostRows;
use super::run::{Step, World};
use crate::backend::{Attend, Queries};
use crate::id::LayerId;
use crate::layout::Dtype;
use crate::plan::BatchPlan;

impl<B: TestBackend> World<'_, B> {
    /// Checks that the backend rejects the plan of an ended step.
    pub(super) fn check_ended_step(&mut self, step: &Step) {
        let (plan, layer, seed) = (step.plan.plan(), LayerId::new(0), self.seed);
        let case = self.case.of(layer);
        let (tokens, width) = (plan.token_count(), case.q_width());
        let attend = self.case.attend_of(layer);
        let q = HostRows::random(&mut self.rng, self.case.q_rows, tokens, width);
        let old_out = HostRows::random(&mut self.rng, self.case.q_rows, tokens, case.out_width());
        let [k, v] = [0, 1].map(|i| self.backend.input(&step.kv[0][i]));
        let (rows, mut out) = (self.backend.input(&q), self.backend.output(&old_out));
        let store = self.backend.store_cache(&plan, layer, B::rows(&k), B::rows(&v));
        assert!(store.is_err(), "seed {seed}: accepted a store of the ended {:?}", plan.step());
        let (rows, out) = (B::rows(&rows), B::rows_mut(&mut out));
        let result = self.backend.attend(&plan, layer, &attend, rows, out, None);
        assert!(result.is_err(), "seed {seed}: accepted attention of the ended {:?}", plan.step());
        assert!(self.backend.begin(&plan).is_err(), "seed {seed}: the ended {:?} began again", plan.step());
    }

    /// Checks that the backend rejects invalid calls.
    pub(super) fn check_invalid_calls(
        &mut self,
        plan: &BatchPlan<'_>,
        own: LayerId,
        attend: &Attend,
        [k, v, q]: [&B::Input; 3],
        out: &mut B::Output,
    ) {
        let layer_count = self.case.layout.layers();
        let (case, seed) = (self.case.of(own), self.seed);
        // Backends reject this scale for latent rows, whose heads have another length.
        let row_scale = Attend::new(1, case.layout.head_dim()).scale;
        let store = self.backend.store_cache(plan, LayerId::new(layer_count), B::rows(k), B::rows(v));
        assert!(store.is_err(), "seed {seed}: accepted a store past the layers");
        if !plan.masks.is_empty() {
            let windowed = Attend { window: Some(9), ..*attend };
            let (id, out) = (own, B::rows_mut(out));
            let result = self.backend.attend(plan, id, &windowed, B::rows(q), out, None);
            assert!(result.is_err(), "seed {seed}: accepted a window with trees");
        }
        let width = case.q_heads() as usize + 1;
        let many = HostRows { dtype: Dtype::F32, width, stride: width, values: vec![0.0; width] };
        let many = self.backend.input(&many);
        let queries = Queries { rows: B::rows(q), sinks: Some(B::sinks(&many)) };
        let result = self.backend.attend_queries(plan, own, attend, queries, B::rows_mut(out), None);
        assert!(result.is_err(), "seed {seed}: accepted more sinks than query heads");
        for layer in (0..layer_count).map(LayerId::new) {
            let Attend { window, chunk, .. } = self.case.attend_of(layer);
            let wrong = match (window, chunk) {
                (Some(size), _) => [(None, None), (Some(size + 1), None), (window, Some(8))],
                (_, Some(size)) => [(None, None), (None, Some(2 * size)), (Some(size), None)],
                _ => continue,
            };
            for (window, chunk) in wrong {
                let (attend, out) = (Attend { window, chunk, ..*attend }, B::rows_mut(out));
                let result = self.backend.attend(plan, layer, &attend, B::rows(q), out, None);
                assert!(result.is_err(), "seed {seed}: {layer:?} accepted window {window:?}, chunk {chunk:?}");
            }
        }
        for (layer, attend) in [
            (layer_count, *attend),
            (own.raw(), Attend { q_heads: attend.q_heads + 1, ..*attend }),
            (own.raw(), Attend { window: Some(0), ..*attend }),
            (own.raw(), Attend { soft_cap: Some(0.0), ..*attend }),
            (own.raw(), Attend { soft_cap: Some(f32::INFINITY), ..*attend }),
            (own.raw(), Attend { scale: f32::NAN, ..*attend }),
            (own.raw(), Attend { scale: f32::NEG_INFINITY, ..*attend }),
            (own.raw(), Attend { scale: row_scale, ..*attend }),
        ] {
            if attend.scale == row_scale && !case.layout.is_latent() {
                continue;
            }
            if attend.q_heads % case.layout.kv_heads() == 0 && attend.q_heads != case.q_heads() {
                continue; // With one kv head, any number of query heads is valid.
            }
            let out = B::rows_mut(out);
            let id = LayerId::new(layer);
            let result = self.backend.attend(plan, id, &attend, B::rows(q), out, None);
            assert!(result.is_err(), "seed {seed}: layer {layer} accepted {attend:?}");
        }
    }
}
