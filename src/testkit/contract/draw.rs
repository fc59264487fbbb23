//! Random inputs of a run: batches, k and v, and the parameters of attention.

use super::TestBackend;
use super::case::{Case, HostRows};
use super::run::{Kind, Step, World};
use crate::backend::Attend;
use crate::id::LayerId;
use crate::layout::Dtype;
use crate::plan::{BatchPlan, OwnedPlan, PlanSize, StepScratch};
use crate::testkit::padded::padded;
use crate::testkit::planner::{Item, shuffle};

/// Maximum number of kinds of attention in a run. Later calls repeat earlier kinds, or use the layer's plain
/// attention.
const KINDS_MAX: usize = 8;

impl<B: TestBackend> World<'_, B> {
    /// Returns a random batch with its plan and inputs.
    pub(super) fn plan(&mut self) -> Step {
        let mut live = self.planner.live();
        shuffle(&mut self.rng, &mut live);
        live.truncate(self.rng.within(1, live.len() as u64) as usize);
        let mut items: Vec<Item> = live.into_iter().filter_map(|seq| self.item(seq)).collect();
        if items.is_empty() || self.rng.one_in(4) {
            let at = self.rng.below(items.len() as u64 + 1) as usize;
            // Wide rows get fewer padding tokens.
            let max_tokens = ((1 << 20) / self.case.q_width() as u64).max(1);
            let most = self.rng.pick(&[3, 3, 100, 300]).min(max_tokens);
            items.insert(at, Item::Padding { len: self.rng.within(1, most) as u32 });
        }
        let trees = self.rng.one_in(3) && self.case.layout.groups().count() == 1;
        let is_tree: Vec<_> = items.iter().map(|_| trees && self.rng.one_in(2)).collect();
        let mut plan = self.planner.plan_trees(&items, &is_tree);
        if self.rng.one_in(4) {
            let (rows, tokens) = (self.rng.within(1, 2) as usize, self.rng.within(2, 5) as usize);
            let plain = plan.plan();
            let (rows, tokens) = (plain.rows.len() + rows, plain.token_count() + tokens);
            plan = OwnedPlan::from(&padded(&plain, &mut StepScratch::new(), PlanSize { rows, tokens }));
        }
        if self.rng.one_in(2) {
            plan = OwnedPlan::from_bytes(plan.as_bytes()).expect("the bytes of a plan");
        }
        let kv = self.inputs(&plan, &items);
        Step { plan, items, kv }
    }

    /// Returns a random item of a sequence: new tokens, or its last tokens again. `None` if neither is possible.
    fn item(&mut self, sequence: usize) -> Option<Item> {
        let planned = self.planner.sequence(sequence)?;
        let (len, room) = (planned.len, self.case.max_len - planned.len);
        let max_requery = (len - planned.fixed_len).min(20);
        if max_requery > 0 && (room == 0 || self.rng.one_in(8)) {
            let len = self.rng.within(1, max_requery.into()) as u32;
            return Some(Item::Requery { sequence, len });
        }
        let most = u64::from(self.rng.pick(&[1, 1, 1, 5, 40, 200]).min(room));
        let most = most.min(self.case.extend_max.into());
        let len = self.rng.within(u64::from(most > 0), most) as u32;
        (len > 0).then_some(Item::Extend { sequence, len })
    }

    /// Returns random k and v for all layers, and appends the rows of extended sequences to the sequences' histories.
    fn inputs(&mut self, plan: &OwnedPlan, items: &[Item]) -> Vec<[HostRows; 2]> {
        let plan = plan.plan();
        let (dtype, tokens) = (self.case.kv_rows, plan.token_count());
        let mut all = Vec::new();
        for layer in 0..self.case.layout.layers() as usize {
            let widths = self.case.of(LayerId::new(layer as u32)).kv_widths();
            let kv = widths.map(|width| HostRows::random(&mut self.rng, dtype, tokens, width));
            for (item, row) in items.iter().zip(plan.rows) {
                if let Item::Extend { sequence, .. } = *item {
                    let rows = row.qo_start as usize..(row.qo_start + row.extend_len) as usize;
                    self.append_history(sequence, layer, [&kv[0], &kv[1]], rows);
                }
            }
            all.push(kv);
        }
        all
    }

    /// Returns a sink for each query head. Some are minus infinity, which is no sink, and some are much larger than
    /// the logits.
    pub(super) fn sinks(&mut self, case: &Case) -> HostRows {
        let width = case.q_heads() as usize;
        let mut sinks = HostRows::random(&mut self.rng, Dtype::F32, 1, width);
        sinks.stride = width;
        sinks.values.truncate(width);
        for sink in &mut sinks.values {
            *sink = match self.rng.below(8) {
                0 | 1 => f32::NEG_INFINITY,
                2 => 40.0 * *sink,
                _ => *sink,
            };
        }
        sinks
    }

    /// Returns the layer's attention with random changes of its scale and soft cap. Its window also changes if the
    /// layer's group reads all tokens and the plan has no masks.
    pub(super) fn random_attend(&mut self, plan: &BatchPlan<'_>, layer: LayerId) -> Attend {
        let plain = self.case.attend_of(layer);
        let window = self.rng.pick(&[1, 2, 17, 33, 64, 1000, u32::MAX]);
        let soft_cap = self.rng.pick(&[0.5, 5.0, 30.0]);
        let scale = plain.scale * self.rng.pick(&[1.0, 1.0, 0.3, -1.5]);
        let window = (self.rng.one_in(3) && plan.masks.is_empty()).then_some(window);
        let window = plain.window.or(window.filter(|_| plain.chunk.is_none()));
        let soft_cap = self.rng.one_in(3).then_some(soft_cap);
        let attend = Attend { scale, window, soft_cap, ..plain };
        // A backend may keep memory for each kind and support few kinds.
        let kind = Kind::of(&self.case, layer, &attend);
        if self.kinds.len() >= KINDS_MAX && !self.kinds.contains(&kind) {
            return Attend { soft_cap, ..plain };
        }
        self.kinds.insert(kind);
        attend
    }
}
