//! One run of the contract: random rounds on one backend of one shape, compared with a shadow of its pool. `draw`
//! chooses the inputs, `moved` makes moves, and `invalid` makes calls that the backend must reject.

use std::collections::BTreeSet;
use std::thread;

use super::case::{Case, HostRows};
use super::history::History;
use super::stored::Given;
use super::swap_shadow::SwapShadow;
use super::{Report, TestBackend};
use crate::backend::{Attend, Queries};
use crate::id::{LayerId, PageId, RowId};
use crate::layout::LayerPlace;
use crate::plan::{Compaction, OwnedPlan, StepEnd};
use crate::testkit::planner::{Item, Planner};
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
    pub inputs: Inputs,
    pub out: B::Output,
    pub lse: Option<B::Sums>,
    /// Buffers that the backend may read until `synchronize`.
    _buffers: ([B::Input; 3], Option<B::Input>),
}

/// An additional check of one layer of a step, which runs after the store and attention of this layer.
pub(super) type ExtraCheck<B> = fn(&mut World<'_, B>, &Step, &Inputs);

/// The layer of a call to attention, its parameters and queries, and its sinks if any.
pub(super) struct Inputs {
    pub layer: usize,
    pub attend: Attend,
    pub q: HostRows,
    pub sinks: Option<HostRows>,
}

/// A kind of attention. Groups may have different shapes, so the same window in two groups is two kinds.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Kind {
    pub group: u32,
    pub window: Option<u32>,
    pub chunk: Option<u32>,
    pub is_positive: bool,
}

impl Kind {
    pub fn of(case: &Case, layer: LayerId, attend: &Attend) -> Self {
        let Attend { scale, window, chunk, .. } = *attend;
        Self { group: case.layout.place(layer).group, window, chunk, is_positive: scale > 0.0 }
    }
}

/// The state of a run: the backend, and a shadow of what it should contain.
pub(super) struct World<'a, B: TestBackend> {
    pub backend: B,
    /// Kinds of attention in the run, including the plain kind of each group.
    pub kinds: BTreeSet<Kind>,
    pub case: Case,
    /// Scales and label channels with which the backend was opened.
    pub given: Given,
    /// An additional check of each layer.
    pub also: Option<ExtraCheck<B>>,
    pub seed: u64,
    pub rng: Rng,
    pub planner: Planner,
    /// `[sequence][layer]`
    pub history: Vec<Vec<History>>,
    /// Sequences that were forked; their children share their pages.
    pub parents: BTreeSet<usize>,
    /// Expected bytes of every page, in the order `[plane, lane, piece]`.
    pub shadow: Vec<Vec<u8>>,
    pub swap: SwapShadow<B>,
    pub report: &'a mut Report,
}

/// Runs one seed on a fresh backend.
pub(super) fn run<B: TestBackend>(
    backend: B,
    case: Case,
    seed: u64,
    rng: Rng,
    also: Option<ExtraCheck<B>>,
    report: &mut Report,
) {
    let poison = vec![0xff; case.layout.page_bytes() as usize];
    let shadow = vec![poison; case.layout.page_count() as usize];
    let swap = SwapShadow::new(&backend, case.layout.swap_region_pages());
    let planner = Planner::new(&case.layout, &case.table, seed);
    let (history, parents) = (Vec::new(), BTreeSet::new());
    let layers = (0..case.layout.layers()).map(LayerId::new);
    let kinds = layers.map(|layer| Kind::of(&case, layer, &case.attend_of(layer))).collect();
    let given = Given { scales: case.scales(), labels: case.labels() };
    let mut world =
        World { backend, kinds, case, given, also, seed, rng, planner, history, parents, shadow, swap, report };
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
            self.release_unread();
        }
        let whole = self.whole_pages();
        self.move_pages(&whole);
        let steps: Vec<_> = (0..self.rng.within(1, self.case.max_steps.into())).map(|_| self.plan()).collect();
        if self.rng.one_in(2) {
            thread::scope(|scope| scope.spawn(|| self.execute(&steps, &whole)).join())
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        } else {
            self.execute(&steps, &whole);
        }
        self.compare_pool();
        self.compare_swap();
        self.report.steps += steps.len() as u64;
        if self.rng.one_in(2) {
            self.compact();
            self.compare_pool();
        }
    }

    /// Compacts live sequences that were not forked: each keeps a random subset of its last tokens. Skips all sequences
    /// while table writes wait for a plan. Also checks that the backend rejects invalid compactions.
    fn compact(&mut self) {
        let (mut compactions, mut past_rows) = (Vec::new(), Compaction::default());
        for sequence in self.planner.live() {
            let planned = self.planner.sequence(sequence).expect("it is live").clone();
            if planned.len == 0 || self.parents.contains(&sequence) || !self.planner.is_sent() {
                continue;
            }
            // Compaction may write only pages that the sequence owns and has not released.
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

    /// Releases pages that sequences no longer read, for about half of the sequences, and fills the pages with NaN.
    fn release_unread(&mut self) {
        for sequence in self.planner.live() {
            let planned = self.planner.sequence(sequence).expect("it is live");
            if self.parents.contains(&sequence) || self.rng.one_in(2) {
                continue;
            }
            let fixed_len = self.rng.within(planned.fixed_len.into(), planned.len.into()) as u32;
            let pages = self.planner.release_unread(sequence, fixed_len);
            pages.iter().for_each(|page| self.shadow[page.index()].fill(0xff));
            self.write_shadow(&pages);
        }
    }

    /// Adds tokens to a new sequence. Their K and V reach the pool as whole pages, not through a step.
    fn add_stored_tokens(&mut self, sequence: usize) {
        let len = self.rng.within(1, self.case.max_len.into()) as u32;
        self.planner.grow(sequence, len);
        let planned = self.planner.sequence(sequence).expect("just admitted").clone();
        for layer in 0..self.case.layout.layers() as usize {
            let case = self.case.of(LayerId::new(layer as u32));
            let (dtype, widths) = (case.layout.dtype().rows(), case.kv_widths());
            let [k, v] = widths.map(|width| HostRows::random(&mut self.rng, dtype, len as usize, width));
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
    pub(super) fn append_history(
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

    /// Stores K and V of a layer of a step, also in the shadow. Returns the input buffers.
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
        let mut lse = self.rng.one_in(2).then(|| self.backend.sums(tokens * attend.q_heads as usize));
        if self.rng.one_in(8) {
            self.check_invalid_calls(&plan, id, &attend, [&k, &v, &q_rows], &mut out);
        }
        let sums = lse.as_mut().map(B::lse);
        let queries = Queries { rows: B::rows(&q_rows), sinks: sinks_at.as_ref().map(B::sinks) };
        self.backend.attend_queries(&plan, id, &attend, queries, B::rows_mut(&mut out), sums).expect("valid attention");
        let inputs = Inputs { layer, attend, q, sinks };
        if let Some(also) = self.also {
            also(self, &steps[step], &inputs);
        }
        Pending { step, inputs, out, lse, _buffers: ([k, v, q_rows], sinks_at) }
    }
}
