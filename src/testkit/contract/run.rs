//! One run of the contract: random rounds on one backend of one shape, compared with a shadow of its pool.

use std::collections::BTreeSet;
use std::thread;

use super::case::{Case, HostRows};
use super::history::History;
use super::host_shadow::HostShadow;
use super::stored::Given;
use super::{Report, TestBackend};
use crate::backend::{Attend, Queries};
use crate::id::{LayerId, PageId, RowId};
use crate::layout::{Dtype, LayerPlace};
use crate::plan::{BatchPlan, Compaction, OwnedPlan, StepEnd, StepScratch};
use crate::testkit::planner::{Item, Planner, shuffle};
use crate::testkit::rng::Rng;

/// A plan, the batch that it was made from, and k and v of every layer.
pub(super) struct Step {
    pub plan: OwnedPlan,
    pub items: Vec<Item>,
    pub kv: Vec<[HostRows; 2]>,
}

/// A call to attention whose outputs are compared after `synchronize`.
pub(super) struct Pending<B: TestBackend> {
    pub step: usize,
    pub layer: usize,
    pub attend: Attend,
    pub q: HostRows,
    pub sinks: Option<HostRows>,
    pub out: B::Output,
    pub lse: Option<B::Sums>,
    /// Inputs that the backend may read until `synchronize`.
    _inputs: ([B::Input; 3], Option<B::Input>),
}

/// An additional check of one layer of a step, which runs after the store and attention of this layer.
pub(super) type Also<B> = fn(&mut World<'_, B>, &Step, usize, &Attend, Asked<'_>);

/// The queries of a call to attention, and its sinks if any.
pub(super) type Asked<'a> = (&'a HostRows, Option<&'a HostRows>);

/// The state of a run: the backend, and a shadow of what it should contain.
pub(super) struct World<'a, B: TestBackend> {
    pub backend: B,
    /// Kinds of attention that the run has used: window, chunk, and whether the scale is positive.
    kinds: BTreeSet<(Option<u32>, Option<u32>, bool)>,
    pub case: Case,
    /// Scales and label channels with which the backend was opened.
    pub given: Given,
    /// An additional check of each layer.
    pub also: Option<Also<B>>,
    pub seed: u64,
    pub rng: Rng,
    pub planner: Planner,
    /// `[sequence][layer]`
    pub history: Vec<Vec<History>>,
    /// Sequences that were forked; their children share their pages.
    pub parents: BTreeSet<usize>,
    /// Expected bytes of every page, in the order `[plane, lane, piece]`.
    pub shadow: Vec<Vec<u8>>,
    pub host: HostShadow<B>,
    pub report: &'a mut Report,
}

/// Number of kinds of attention from which on a run repeats earlier kinds or uses the layer's plain attention.
const KINDS_MAX: usize = 7;

/// Runs one seed on a fresh backend.
pub(super) fn run<B: TestBackend>(
    backend: B,
    case: Case,
    seed: u64,
    rng: Rng,
    also: Option<Also<B>>,
    report: &mut Report,
) {
    let poison = vec![0xff; case.layout.page_bytes() as usize];
    let shadow = vec![poison; case.layout.page_count() as usize];
    let host = HostShadow::new(&backend, case.layout.host_region_pages());
    let planner = Planner::new(&case.layout, &case.table, seed);
    let (history, parents) = (Vec::new(), BTreeSet::new());
    let plain = (0..case.layout.layers()).map(|layer| case.attend_of(LayerId::new(layer)));
    let kinds = plain.map(|attend| (attend.window, attend.chunk, true));
    let kinds = kinds.filter(|kind| *kind != (None, None, true)).collect();
    let given = Given { scales: case.scales(), labels: case.labels() };
    let mut world = World {
        backend,
        kinds,
        case,
        given,
        also,
        seed,
        rng,
        planner,
        history,
        parents,
        shadow,
        host,
        report,
    };
    world.write_shadow(&(0..world.shadow.len() as u32).map(PageId::new).collect::<Vec<_>>());
    world.compare_pool();
    for _ in 0..world.rng.within(1, 4) {
        world.round();
    }
}

impl<B: TestBackend> World<'_, B> {
    fn round(&mut self) {
        let whole = self.whole_pages();
        self.move_pages(&whole);
        self.change_sequences();
        self.lease_some();
        if self.case.layout.tracks() > 1 {
            self.give_back();
        }
        let whole = self.whole_pages();
        self.move_pages(&whole);
        let steps: Vec<_> =
            (0..self.rng.within(1, self.case.max_steps.into())).map(|_| self.plan()).collect();
        if self.rng.one_in(2) {
            thread::scope(|scope| scope.spawn(|| self.execute(&steps, &whole)).join())
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        } else {
            self.execute(&steps, &whole);
        }
        self.compare_pool();
        self.compare_host();
        self.report.steps += steps.len() as u64;
        if self.rng.one_in(2) {
            self.compact();
            self.compare_pool();
        }
    }

    /// Compacts some sequences to a random subset of their last tokens, if plans have contained all page table words.
    /// Also checks that the backend rejects invalid compactions.
    fn compact(&mut self) {
        let (mut compactions, mut past_rows) = (Vec::new(), Compaction::default());
        for sequence in self.planner.live() {
            let planned = self.planner.sequence(sequence).expect("a live sequence").clone();
            if planned.len == 0 || self.parents.contains(&sequence) || !self.planner.is_sent() {
                continue;
            }
            // Compaction may write only the sequence's own pages that it has not given back.
            let own = planned.own_from(self.case.layout.page_size()).max(planned.fixed_len);
            let most = (planned.len - own.min(planned.len)).min(u64::BITS);
            if most == 0 {
                continue;
            }
            let len = self.rng.within(1, most.into()) as u32;
            let first = planned.len - len;
            let keep = self.rng.bits() & (u64::MAX >> (u64::BITS - len));
            for (from, to) in (Compaction { row: planned.row, first, keep }).moves() {
                for group in 0..self.case.layout.groups().count() {
                    let layout = self.case.of_group(group).layout;
                    for track in layout.track_range(group) {
                        let [source, target] = [from, to].map(|place| {
                            let slot = self.planner.track_slot(&planned, track, place);
                            layout.page_of(slot)
                        });
                        self.shadow_move(&layout, source, target);
                    }
                }
            }
            for history in &mut self.history[sequence] {
                history.keep(planned.len, first, keep);
            }
            compactions.push(self.planner.compact(sequence, first, keep));
        }
        self.backend.compact(&compactions).expect("valid compactions");
        past_rows.row = RowId::new(self.case.table.rows);
        assert!(self.backend.compact(&[past_rows]).is_err(), "accepted a row past the page tables");
        let far = Compaction { row: RowId::new(0), first: u32::MAX - 64, keep: 1 };
        assert!(self.backend.compact(&[far]).is_err(), "accepted a place past the row");
    }

    /// Finishes, admits and forks some sequences, and leaves at least one live sequence.
    fn change_sequences(&mut self) {
        for sequence in self.planner.live() {
            if self.rng.one_in(4) && !self.parents.contains(&sequence) {
                self.planner.finish(sequence);
            }
        }
        while self.planner.live().is_empty() || self.rng.one_in(2) {
            let Some(sequence) = self.planner.admit() else { break };
            self.history.push(vec![History::default(); self.case.layout.layers() as usize]);
            if self.rng.one_in(2) {
                self.add_stored_tokens(sequence);
            }
        }
        if self.rng.one_in(2) {
            // Many forks in a third of the cases, so that rows share spans of their prefixes.
            let forks = if self.rng.one_in(3) { self.rng.within(2, 24) } else { 1 };
            for _ in 0..forks {
                let parent = self.rng.pick(&self.planner.live());
                self.fork(parent);
            }
        }
    }

    /// Releases pages that some sequences no longer read, and fills the pages with NaN.
    fn give_back(&mut self) {
        for sequence in self.planner.live() {
            let planned = self.planner.sequence(sequence).expect("a live sequence");
            if self.parents.contains(&sequence) || self.rng.one_in(2) {
                continue;
            }
            let fixed_len = self.rng.within(planned.fixed_len.into(), planned.len.into()) as u32;
            let pages = self.planner.give_back(sequence, fixed_len);
            pages.iter().for_each(|page| self.shadow[page.index()].fill(0xff));
            self.write_shadow(&pages);
        }
    }

    /// Adds tokens to a new sequence, whose K and V reach the pool as pages instead of by a step.
    fn add_stored_tokens(&mut self, sequence: usize) {
        let len = self.rng.within(1, self.case.max_len.into()) as u32;
        self.planner.grow(sequence, len);
        let planned = self.planner.sequence(sequence).expect("just admitted").clone();
        for layer in 0..self.case.layout.layers() as usize {
            let case = self.case.of(LayerId::new(layer as u32));
            let (dtype, widths) = (case.layout.dtype().rows(), case.kv_widths());
            let [k, v] =
                widths.map(|width| HostRows::random(&mut self.rng, dtype, len as usize, width));
            let LayerPlace { track, .. } = self.case.layout.place(LayerId::new(layer as u32));
            for position in 0..len {
                let slot = self.planner.track_slot(&planned, track, position);
                self.shadow_rows(layer, slot, [&k, &v].map(|rows| rows.row(position as usize)));
            }
            self.append_history(sequence, layer, [&k, &v], 0..len as usize);
        }
        let pages: Vec<_> = planned.all_pages().collect();
        if !self.load_shadow(&pages) {
            self.write_shadow(&pages);
        }
    }

    /// Copies pages of the shadow to the pool.
    fn write_shadow(&mut self, pages: &[PageId]) {
        let bytes: Vec<_> = pages.iter().map(|page| &self.shadow[page.index()][..]).collect();
        self.backend.write_pages(pages, &bytes.concat());
    }

    /// Appends rows of k and v to a sequence's history of a layer.
    fn append_history(
        &mut self,
        sequence: usize,
        layer: usize,
        [k, v]: [&HostRows; 2],
        rows: std::ops::Range<usize>,
    ) {
        let history = &mut self.history[sequence][layer];
        for i in rows {
            let layer = LayerId::new(layer as u32);
            history.push(&self.case.of(layer).layout, &self.given, layer, [k.row(i), v.row(i)]);
        }
    }

    fn fork(&mut self, parent: usize) {
        let Some((_, copies)) = self.planner.fork(parent) else { return };
        self.parents.insert(parent);
        self.history.push(self.history[parent].clone());
        if !copies.is_empty() {
            self.backend.copy_pages(&copies).expect("pages of the pool");
        }
        for copy in copies {
            self.shadow[copy.target.index()] = self.shadow[copy.source.index()].clone();
        }
    }

    /// Returns a random batch with its plan and inputs.
    fn plan(&mut self) -> Step {
        let mut live = self.planner.live();
        shuffle(&mut self.rng, &mut live);
        live.truncate(self.rng.within(1, live.len() as u64) as usize);
        let mut items: Vec<Item> = live.into_iter().filter_map(|seq| self.item(seq)).collect();
        if items.is_empty() || self.rng.one_in(4) {
            let at = self.rng.below(items.len() as u64 + 1) as usize;
            // The wider the rows are, the fewer tokens of padding.
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
            plan = OwnedPlan::from(&plain.padded(&mut StepScratch::new(), rows, tokens));
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
        let max_again = (len - planned.fixed_len).min(20);
        if max_again > 0 && (room == 0 || self.rng.one_in(8)) {
            let len = self.rng.within(1, max_again.into()) as u32;
            return Some(Item::Again { sequence, len });
        }
        let most = u64::from(self.rng.pick(&[1, 1, 1, 5, 40, 200]).min(room));
        let most = most.min(self.case.extend_max.into());
        let len = self.rng.within(u64::from(most > 0), most) as u32;
        (len > 0).then_some(Item::Extend { sequence, len })
    }

    /// Returns random k and v for all layers, and appends those of extended sequences to their histories.
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

    /// Begins all steps, runs their layers and compares the outputs. No step writes the pages `whole`.
    fn execute(&mut self, steps: &[Step], whole: &[PageId]) {
        for step in steps {
            self.backend.begin(&step.plan.plan()).expect("a valid plan begins");
        }
        let layers = self.case.layout.layers() as usize;
        let mut order: Vec<(usize, usize)> =
            (0..steps.len()).flat_map(|step| (0..layers).map(move |layer| (step, layer))).collect();
        if self.rng.one_in(2) {
            order.sort_by_key(|&(step, layer)| (layer, step));
        }
        let mut pending = Vec::new();
        for (step, layer) in order {
            self.move_pages(whole);
            pending.push(self.run_layer(steps, step, layer));
        }
        let all: Vec<_> = (0..self.case.layout.page_count()).map(PageId::new).collect();
        self.move_pages(&all);
        // A step may end as soon as its last call is made (B8).
        let early = self.rng.one_in(2);
        if early {
            self.end(steps);
        }
        self.backend.synchronize().expect("nothing failed");
        for call in pending {
            self.compare(&steps[call.step], call);
        }
        if !early {
            self.end(steps);
        }
    }

    /// Completes some steps, aborts the later ones, and checks that the backend rejects the plan of one of them.
    fn end(&mut self, steps: &[Step]) {
        let cut = self.rng.below(steps.len() as u64 + 1) as usize;
        let step_of = |step: &Step| step.plan.plan().step();
        let complete = steps[..cut].last().map(|step| StepEnd::Complete(step_of(step)));
        let abort = steps[cut..].first().map(|step| StepEnd::Abort(step_of(step)));
        let mut ends = [complete, abort];
        if self.rng.one_in(2) {
            ends.reverse();
        }
        for end in ends.into_iter().flatten() {
            let end = StepEnd::from_bytes(&end.to_bytes()).expect("the bytes of an end");
            self.backend.end(end);
        }
        let step = &steps[self.rng.below(steps.len() as u64) as usize];
        self.check_ended_step(step);
    }

    /// Checks that the backend rejects the plan of an ended step. Later comparisons check that it wrote nothing.
    fn check_ended_step(&mut self, step: &Step) {
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
        assert!(
            self.backend.begin(&plan).is_err(),
            "seed {seed}: the ended {:?} began again",
            plan.step()
        );
    }

    /// Stores K and V of a layer of a step, also in the shadow. Returns the rows.
    pub fn store(&mut self, step: &Step, layer: usize) -> [B::Input; 2] {
        let (plan, id, rows) = (step.plan.plan(), LayerId::new(layer as u32), &step.kv[layer]);
        let [k, v] = rows.each_ref().map(|rows| self.backend.input(rows));
        self.backend.store_cache(&plan, id, B::rows(&k), B::rows(&v)).expect("a valid store");
        for i in 0..plan.token_count() {
            let track = self.case.layout.place(id).track;
            let Some(slot) = plan.slots_of(track).get(i) else { continue };
            self.shadow_rows(layer, slot, rows.each_ref().map(|rows| rows.row(i)));
        }
        [k, v]
    }

    /// Runs one layer of one step. Returns the call to attention, whose outputs are not compared yet.
    fn run_layer(&mut self, steps: &[Step], step: usize, layer: usize) -> Pending<B> {
        let (plan, id) = (steps[step].plan.plan(), LayerId::new(layer as u32));
        let [k, v] = self.store(&steps[step], layer);
        let attend = self.random_attend(&plan, id);
        let case = self.case.of(id);
        let (tokens, width) = (plan.token_count(), case.q_width());
        let q = HostRows::random(&mut self.rng, self.case.q_rows, tokens, width);
        let out_width = case.out_width();
        let mut poison = HostRows::random(&mut self.rng, self.case.q_rows, tokens, out_width);
        poison.values.fill(f32::NAN);
        let q_rows = self.backend.input(&q);
        let sinks = self.rng.one_in(3).then(|| self.sinks(&case));
        let sinks_at = sinks.as_ref().map(|sinks| self.backend.input(sinks));
        let mut out = self.backend.output(&poison);
        let mut lse =
            self.rng.one_in(2).then(|| self.backend.sums(tokens * attend.q_heads as usize));
        if self.rng.one_in(8) {
            self.check_invalid_calls(&plan, (id, &attend), [&k, &v, &q_rows], &mut out);
        }
        let sums = lse.as_mut().map(B::lse);
        let asked = Queries { rows: B::rows(&q_rows), sinks: sinks_at.as_ref().map(B::sinks) };
        self.backend
            .attend_queries(&plan, id, &attend, asked, B::rows_mut(&mut out), sums)
            .expect("valid attention");
        if let Some(also) = self.also {
            also(self, &steps[step], layer, &attend, (&q, sinks.as_ref()));
        }
        Pending { step, layer, attend, q, sinks, out, lse, _inputs: ([k, v, q_rows], sinks_at) }
    }

    /// Returns a sink for each query head. Some are minus infinity, which is no sink, and some are much larger than
    /// the logits.
    fn sinks(&mut self, case: &Case) -> HostRows {
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

    /// Returns the layer's attention with random changes of its window, cap and scale.
    fn random_attend(&mut self, plan: &BatchPlan<'_>, layer: LayerId) -> Attend {
        let plain = self.case.attend_of(layer);
        let window = self.rng.pick(&[1, 2, 17, 33, 64, 1000, u32::MAX]);
        let soft_cap = self.rng.pick(&[0.5, 5.0, 30.0]);
        let scale = plain.scale * self.rng.pick(&[1.0, 1.0, 0.3, -1.5]);
        let window = (self.rng.one_in(3) && plan.masks.is_empty()).then_some(window);
        let (chunk, window) =
            (plain.chunk, plain.window.or(window.filter(|_| plain.chunk.is_none())));
        let soft_cap = self.rng.one_in(3).then_some(soft_cap);
        // A backend may keep memory for each kind and support few kinds.
        let kind = (window, chunk, scale > 0.0);
        let has_room = self.kinds.len() < KINDS_MAX || self.kinds.contains(&kind);
        let (scale, window) = if has_room { (scale, window) } else { (plain.scale, plain.window) };
        self.kinds.insert((window, chunk, scale > 0.0));
        Attend { scale, window, soft_cap, ..plain }
    }

    /// Checks that the backend rejects invalid calls. Later comparisons check that they wrote nothing.
    fn check_invalid_calls(
        &mut self,
        plan: &BatchPlan<'_>,
        (own, attend): (LayerId, &Attend),
        [k, v, q]: [&B::Input; 3],
        out: &mut B::Output,
    ) {
        let layer_count = self.case.layout.layers();
        let (case, seed) = (self.case.of(own), self.seed);
        // Backends reject this scale for latent rows, whose heads have another length.
        let row_scale = Attend::new(1, case.layout.head_dim()).scale;
        let store =
            self.backend.store_cache(plan, LayerId::new(layer_count), B::rows(k), B::rows(v));
        assert!(store.is_err(), "seed {seed}: accepted a store past the layers");
        if !plan.masks.is_empty() {
            let windowed = Attend { window: Some(9), ..*attend };
            let (id, out) = (own, B::rows_mut(out));
            let result = self.backend.attend(plan, id, &windowed, B::rows(q), out, None);
            assert!(result.is_err(), "seed {seed}: accepted a window with trees");
        }
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
                assert!(
                    result.is_err(),
                    "seed {seed}: {layer:?} accepted window {window:?}, chunk {chunk:?}"
                );
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
