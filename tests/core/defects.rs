//! The contract of backends reports each wrong call, and each [`Filter`] draws the cases that show wrong kernels.
//!
//! A [`Defective`] backend makes one mistake, for example in one number of one token. The contract must report it
//! within the seeds that tests of the backends run, and must accept the same seed without the mistake.

use std::any::Any;
use std::convert::identity;
use std::panic::{AssertUnwindSafe, catch_unwind};

use half::{bf16, f16};
use kvarena::backend::{
    CpuError, CpuRows, CpuRowsMut, ElementsMut, Moved, NO_POSITION, OpenBackend, PlanError, Queries, Rope, Select,
    Selection, SparseBackend, StateBackend, SwapMemory,
};
use kvarena::config::StepBounds;
use kvarena::id::MoveId;
use kvarena::layout::{PoolLayout, TableShape};
use kvarena::plan::{BatchRow, Compaction, PageCopy, PageMove, SlotMapping, StepEnd};
use kvarena::testkit::contract::{
    Case, Filter, SparseTestBackend, StateTestBackend, TestBackend, check_cases, check_rotated, check_served,
    check_sparse_backend, check_states,
};
use kvarena::{Attend, Backend, BatchPlan, Cpu, CpuOptions, LayerId, PageId, forward_backend, forward_buffers};

/// A call for one layer of a step.
struct Call<'a> {
    plan: &'a BatchPlan<'a>,
    /// The case with the shape of the layer.
    case: Case,
    group: u32,
}

/// Returns the token whose result the defect makes wrong; `None` for a call without a mistake.
type Wrong = fn(&Call<'_>) -> Option<usize>;

/// A mistake of a backend.
#[derive(Clone, Copy)]
enum Defect {
    /// One number of a token's output is wrong.
    Attend(Wrong),
    /// The same, in attention over selected positions.
    AttendSelected(Wrong),
    /// One number of a token's rotated rows is wrong.
    Rotate(Wrong),
    /// A token is not stored.
    Store(Wrong),
    /// A list lacks its last position.
    Select,
    /// A log-sum-exp is wrong.
    Lse,
    /// Attention ignores sinks.
    Sinks,
    /// Attention ignores the masks of draft trees.
    Masks,
    /// The last changed word of a plan is not written to the page tables.
    Begin,
    /// Steps do not end.
    End,
    /// The last page is not copied.
    Copy,
    /// The last row is not compacted.
    Compact,
    /// The last page is not saved.
    Save,
    /// The last page is not loaded.
    Load,
    /// The watermark of saves is too high.
    Moved,
    /// States are not copied.
    CopyStates,
    /// The page that the last row writes is another one.
    Slots,
}

impl Defect {
    /// Returns phrases, at least one of which must be in the contract's report of the defect.
    fn reports(self) -> &'static [&'static str] {
        match self {
            Self::Attend(_) | Self::Lse | Self::Sinks | Self::Masks => &["of the bound"],
            Self::AttendSelected(_) => &["of the bound", "selected: "],
            Self::Rotate(_) => &[", not "],
            Self::Select => &["left == right"],
            Self::End => &["of the ended"],
            Self::Moved => &["saved: "],
            Self::CopyStates => &["B20"],
            Self::Slots => &["B21"],
            // Pages whose bytes are missing are full of NaN.
            Self::Store(_) | Self::Begin | Self::Copy | Self::Compact | Self::Save | Self::Load => &["NaN", "differs"],
        }
    }
}

/// Opens a [`Defective`].
struct Options {
    cpu: CpuOptions,
    /// The case; `None` for states, whose calls do not use it.
    case: Option<Case>,
    defect: Option<Defect>,
}

/// A [`Cpu`] with a mistake, or without.
struct Defective {
    cpu: Cpu,
    case: Option<Case>,
    defect: Option<Defect>,
}

impl OpenBackend for Options {
    type Backend = Defective;

    fn open(
        self,
        layout: &PoolLayout,
        table: &TableShape,
        bounds: impl Into<StepBounds>,
    ) -> Result<Defective, CpuError> {
        let Self { cpu, case, defect } = self;
        Ok(Defective { cpu: cpu.open(layout, table, bounds)?, case, defect })
    }
}

impl Defective {
    fn call<'a>(&self, plan: &'a BatchPlan<'a>, layer: LayerId) -> Call<'a> {
        let case = self.case.expect("the check has cases");
        let group = case.layout.place(layer).group;
        Call { plan, case: case.of_group(group), group }
    }

    /// Returns all items, or all except the last one if the defect satisfies `is`. Keeps a single item, because the
    /// contract passes single invalid items, which the backend must reject.
    fn without_last<'a, T>(&self, is: fn(&Defect) -> bool, items: &'a [T]) -> &'a [T] {
        match items {
            [others @ .., _] if items.len() > 1 && self.defect.as_ref().is_some_and(is) => others,
            _ => items,
        }
    }
}

/// Returns the same rows with a shorter lifetime.
fn reborrow<'a>(rows: &'a mut CpuRowsMut<'_>) -> CpuRowsMut<'a> {
    let elements = match &mut rows.elements {
        ElementsMut::F32(x) => ElementsMut::F32(x),
        ElementsMut::F16(x) => ElementsMut::F16(x),
        ElementsMut::Bf16(x) => ElementsMut::Bf16(x),
    };
    CpuRowsMut { elements, stride: rows.stride }
}

/// Adds 1 to a number of a token's row.
fn spoil(rows: CpuRowsMut<'_>, width: usize, token: usize, column: usize) {
    let at = token * rows.stride.unwrap_or(width) + column;
    match rows.elements {
        ElementsMut::F32(x) => x[at] += 1.0,
        ElementsMut::F16(x) => x[at] += f16::ONE,
        ElementsMut::Bf16(x) => x[at] += bf16::ONE,
    }
}

impl Backend for Defective {
    type Error = CpuError;
    forward_backend!(cpu: Cpu, identity; types, swap_pages, synchronize);

    fn begin(&mut self, plan: &BatchPlan<'_>) -> Result<(), CpuError> {
        let writes = self.without_last(|defect| matches!(defect, Defect::Begin), plan.table_writes);
        self.cpu.begin(&BatchPlan { table_writes: writes, ..*plan })
    }

    fn end(&mut self, end: StepEnd) {
        if !matches!(self.defect, Some(Defect::End)) {
            self.cpu.end(end);
        }
    }

    fn store_cache(
        &mut self,
        plan: &BatchPlan<'_>,
        layer: LayerId,
        k: CpuRows<'_>,
        v: CpuRows<'_>,
    ) -> Result<(), CpuError> {
        let Some(Defect::Store(wrong)) = self.defect else {
            return self.cpu.store_cache(plan, layer, k, v);
        };
        if layer.raw() >= self.cpu.layout().layers() {
            return self.cpu.store_cache(plan, layer, k, v); // An error.
        }
        let (wrong, tokens) = (wrong(&self.call(plan, layer)), plan.token_count());
        let without = |slots: SlotMapping<'_>| -> Vec<i64> {
            let slot = |i| slots.get(i).filter(|_| Some(i % tokens) != wrong);
            (0..slots.len()).map(|i| slot(i).map_or(-1, |slot| slot.raw() as i64)).collect()
        };
        let [first, others] = [plan.slot_mapping, plan.track_slots].map(without);
        let (slot_mapping, track_slots) = (SlotMapping::I64(&first), SlotMapping::I64(&others));
        self.cpu.store_cache(&BatchPlan { slot_mapping, track_slots, ..*plan }, layer, k, v)
    }

    fn rope_store(
        &mut self,
        plan: &BatchPlan<'_>,
        layer: LayerId,
        rope: &Rope<CpuRows<'_>, &[f32]>,
        mut qkv: CpuRowsMut<'_>,
    ) -> Result<(), CpuError> {
        self.cpu.rope_store(plan, layer, rope, reborrow(&mut qkv))?;
        if let Some(Defect::Rotate(wrong)) = self.defect {
            let call = self.call(plan, layer);
            let heads = call.case.q_heads() + 2 * call.case.layout.kv_heads();
            let width = (heads * call.case.layout.head_dim()) as usize;
            wrong(&call).into_iter().for_each(|token| spoil(reborrow(&mut qkv), width, token, 0));
        }
        Ok(())
    }

    fn attend_queries(
        &mut self,
        plan: &BatchPlan<'_>,
        layer: LayerId,
        attend: &Attend,
        mut queries: Queries<CpuRows<'_>, &[f32]>,
        mut out: CpuRowsMut<'_>,
        mut lse: Option<&mut [f32]>,
    ) -> Result<(), CpuError> {
        let mut read = *plan;
        match self.defect {
            Some(Defect::Sinks) => queries.sinks = None,
            Some(Defect::Masks) => read.masks = &[],
            _ => {}
        }
        let to = reborrow(&mut out);
        self.cpu.attend_queries(&read, layer, attend, queries, to, lse.as_deref_mut())?;
        match (self.defect, lse) {
            (Some(Defect::Attend(wrong)), _) => {
                let call = self.call(plan, layer);
                let width = call.case.out_width();
                wrong(&call).into_iter().for_each(|i| spoil(reborrow(&mut out), width, i, width - 1));
            }
            (Some(Defect::Lse), Some([.., last])) => *last += 1.0,
            _ => {}
        }
        Ok(())
    }

    fn copy_pages(&mut self, copies: &[PageCopy]) -> Result<(), CpuError> {
        match (self.defect, copies) {
            (Some(Defect::Copy), [others @ .., _]) => self.cpu.copy_pages(others),
            _ => self.cpu.copy_pages(copies),
        }
    }

    fn compact(&mut self, compactions: &[Compaction]) -> Result<(), CpuError> {
        let compactions = self.without_last(|defect| matches!(defect, Defect::Compact), compactions);
        self.cpu.compact(compactions)
    }

    fn save_pages(&mut self, id: MoveId, moves: &[PageMove]) -> Result<(), CpuError> {
        let moves = self.without_last(|defect| matches!(defect, Defect::Save), moves);
        self.cpu.save_pages(id, moves)
    }

    fn load_pages(&mut self, id: MoveId, moves: &[PageMove]) -> Result<(), CpuError> {
        let moves = self.without_last(|defect| matches!(defect, Defect::Load), moves);
        self.cpu.load_pages(id, moves)
    }

    fn moved(&mut self) -> Result<Moved, CpuError> {
        let Moved { saved, loaded } = self.cpu.moved()?;
        let more = u64::from(matches!(self.defect, Some(Defect::Moved)));
        Ok(Moved { saved: MoveId::new(saved.raw() + more), loaded })
    }
}

impl SparseBackend for Defective {
    type Positions<'a> = &'a [u32];
    type PositionsMut<'a> = &'a mut [u32];

    fn select(
        &mut self,
        plan: &BatchPlan<'_>,
        layer: LayerId,
        select: &Select,
        q: CpuRows<'_>,
        positions: &mut [u32],
    ) -> Result<(), CpuError> {
        self.cpu.select(plan, layer, select, q, positions)?;
        let last = positions.iter_mut().rfind(|position| **position != NO_POSITION);
        if let (Some(Defect::Select), Some(last)) = (self.defect, last) {
            *last = NO_POSITION;
        }
        Ok(())
    }

    fn attend_selected(
        &mut self,
        plan: &BatchPlan<'_>,
        layer: LayerId,
        attend: &Attend,
        selection: Selection<&[u32]>,
        queries: Queries<CpuRows<'_>, &[f32]>,
        mut out: CpuRowsMut<'_>,
        lse: Option<&mut [f32]>,
    ) -> Result<(), CpuError> {
        let to = reborrow(&mut out);
        self.cpu.attend_selected(plan, layer, attend, selection, queries, to, lse)?;
        if let Some(Defect::AttendSelected(wrong)) = self.defect {
            let call = self.call(plan, layer);
            let width = call.case.out_width();
            wrong(&call).into_iter().for_each(|i| spoil(reborrow(&mut out), width, i, width - 1));
        }
        Ok(())
    }
}

impl StateBackend for Defective {
    fn copy_states(&mut self, plan: &BatchPlan<'_>) -> Result<(), CpuError> {
        if !matches!(self.defect, Some(Defect::CopyStates)) {
            return self.cpu.copy_states(plan);
        }
        // Only a plan whose step has ended is rejected.
        match self.cpu.state(plan, LayerId::new(0), 0) {
            Err(ended @ CpuError::Plan(PlanError::Ended { .. })) => Err(ended),
            _ => Ok(()),
        }
    }
}

impl StateTestBackend for Defective {
    fn slots(&mut self, plan: &BatchPlan<'_>, layer: LayerId) -> [Vec<i32>; 2] {
        let mut slots = self.cpu.slots(plan, layer);
        if let (Some(Defect::Slots), Some(last)) = (self.defect, slots[1].last_mut()) {
            *last += 1;
        }
        slots
    }
}

impl SwapMemory for Defective {
    forward_backend!(cpu: Cpu, identity; leases);
}

impl TestBackend for Defective {
    forward_buffers!(this: Cpu => this.cpu);

    fn supports(case: &Case) -> bool {
        Cpu::supports(case)
    }

    fn unit(&self, case: &Case) -> f64 {
        self.cpu.unit(case)
    }

    fn read_pages(&mut self, pages: &[PageId], target: &mut [u8]) {
        self.cpu.read_pages(pages, target);
    }

    fn write_pages(&mut self, pages: &[PageId], source: &[u8]) {
        self.cpu.write_pages(pages, source);
    }
}

impl SparseTestBackend for Defective {
    type Lists = Vec<u32>;

    fn lists(&mut self, positions: &[u32]) -> Vec<u32> {
        positions.to_vec()
    }

    fn positions(lists: &Vec<u32>) -> &[u32] {
        lists
    }

    fn positions_mut(lists: &mut Vec<u32>) -> &mut [u32] {
        lists
    }

    fn read_lists(&mut self, lists: &Vec<u32>) -> Vec<u32> {
        lists.clone()
    }
}

/// A check of the contract.
#[derive(Clone, Copy)]
enum Check {
    Cases(Filter),
    Rotated(Filter),
    Sparse(Filter),
    /// Engines with one group of layers or several.
    Served(bool),
    States,
}

impl Check {
    fn run(self, defect: Option<Defect>, seed: u64) {
        let options = |case: &Case| {
            let (scales, labels) = (case.scales(), case.labels());
            let cpu = CpuOptions { scales, labels, ..CpuOptions::with_threads(1) };
            Options { cpu, case: Some(*case), defect }
        };
        let seeds = seed..seed + 1;
        match self {
            Self::Cases(filter) => check_cases(&filter, options, seeds),
            Self::Rotated(filter) => check_rotated(&filter, options, seeds),
            Self::Sparse(filter) => check_sparse_backend(&filter, options, seeds),
            Self::Served(in_groups) => check_served(in_groups, options, seeds, |_| {}),
            Self::States => check_states(|| Options { cpu: CpuOptions::with_threads(1), case: None, defect }, seeds),
        };
    }

    /// Checks that the contract reports a defect with one of `seeds` seeds, and accepts this seed without the defect.
    /// The search begins at `first`, so that it is short.
    fn reports(self, name: &str, defect: Defect, seeds: u64, first: u64) {
        let report = |seed| {
            let run = AssertUnwindSafe(|| self.run(Some(defect), seed));
            Some((seed, text(&*catch_unwind(run).err()?)))
        };
        let found = (first..seeds).chain(0..first).find_map(report);
        let (seed, report) = found.unwrap_or_else(|| panic!("{name}: {seeds} seeds report nothing"));
        let is_right = defect.reports().iter().any(|words| report.contains(words));
        assert!(is_right, "{name}: seed {seed} reports {report}");
        println!("{name}: seed {seed}");
        self.run(None, seed);
    }
}

/// Returns the message of a panic.
fn text(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().cloned();
    text.or_else(|| panic.downcast_ref::<&str>().map(|&text| text.into())).unwrap_or_default()
}

/// Returns the last token of the last row that is not padding and for which `holds` is true.
fn last_of(call: &Call<'_>, holds: impl Fn(&BatchRow) -> bool) -> Option<usize> {
    let row = call.plan.rows.iter().rfind(|row| row.kv_len > 0 && holds(row))?;
    Some((row.qo_start + row.extend_len - 1) as usize)
}

/// Returns the last token of the last member for which `holds` is true, in the last span that begins at `begin` or
/// later.
fn last_member(call: &Call<'_>, begin: u32, holds: impl Fn(&BatchRow) -> bool) -> Option<usize> {
    let shared = call.plan.shared;
    let span = shared.spans.iter().rfind(|span| span.begin >= begin)?;
    let mut rows = shared.members[span.range()].iter().map(|&row| call.plan.rows[row as usize]);
    let row = rows.rfind(|row| holds(row))?;
    Some((row.qo_start + row.extend_len - 1) as usize)
}

/// Returns the number of query rows of a row in a kv head.
fn query_rows(call: &Call<'_>, row: &BatchRow) -> u32 {
    row.extend_len * call.case.group_size
}

const ANY: Wrong = |call| last_of(call, |_| true);
const IN_GROUPS: Wrong = |call| last_of(call, |_| call.group > 0);
const PAST_WINDOW: Wrong = |call| last_of(call, |row| call.group > 0 && row.kv_len > 64);
const TREE: Wrong = |call| last_of(call, |row| call.plan.tree(row).is_some());
const LISTED: Wrong = |call| last_of(call, |row| row.extend_len == 1);
const LONG: Wrong = |call| last_of(call, |row| row.kv_len >= 512);
const SHORT: Wrong = |call| last_of(call, |row| (17..=64).contains(&query_rows(call, row)));
const PAIR: Wrong = |call| last_of(call, |row| call.case.q_heads() > 64 && row.kv_len >= 64);
const HEADS_OF_128: Wrong = |call| last_of(call, |_| call.case.layout.head_dim() == 128);
const HEADS_OF_256: Wrong = |call| last_of(call, |_| call.case.layout.head_dim() == 256);
const MEMBER: Wrong = |call| last_member(call, 0, |_| true);
const NESTED: Wrong = |call| last_member(call, 1, |_| true);
const DECODING: Wrong = |call| last_member(call, 0, |row| row.extend_len == 1);
const PROMPT: Wrong = |call| last_member(call, 0, |row| query_rows(call, row) > 16);
const TAIL_OF_8: Wrong = |call| last_member(call, 0, |row| row.extend_len > 1 && query_rows(call, row) <= 8);
const TAIL_OF_16: Wrong =
    |call| last_member(call, 0, |row| row.extend_len > 1 && (9..=16).contains(&query_rows(call, row)));

/// Each tuple contains a name, a check with a filter, and a defect in the kernels that the filter selects. Its numbers
/// are the number of seeds and the first seed of the search. The contract tests on the GPU use the same number of
/// seeds. Only tests of the CPU use [`Filter::HEADS`], with this number if `KVARENA_SEEDS=all`.
#[test]
fn each_filter_draws_cases_that_show_its_defects() {
    use Check::{Cases, Rotated, Sparse};
    use Defect::{Attend, AttendSelected, Rotate, Select, Store};

    let in_groups = |filter: Filter| Cases(filter.in_groups());
    for (name, check, defect, seeds, first) in [
        ("all: trees", Cases(Filter::ALL), Attend(TREE), 200, 0),
        ("all, in groups", in_groups(Filter::ALL), Attend(PAST_WINDOW), 200, 1),
        ("head_dims", Cases(Filter::head_dims(64, 128)), Attend(HEADS_OF_128), 12, 0),
        ("fp8", Cases(Filter::FP8), Store(ANY), 200, 0),
        ("fp8, in groups", in_groups(Filter::FP8), Store(IN_GROUPS), 60, 0),
        ("heads", Rotated(Filter::HEADS), Rotate(ANY), 60, 0),
        ("heads, in groups", Rotated(Filter::HEADS.in_groups()), Rotate(IN_GROUPS), 20, 0),
        ("kernel heads", Rotated(Filter::KERNEL_HEADS), Rotate(HEADS_OF_256), 60, 8),
        ("kernel heads, in groups", Rotated(Filter::KERNEL_HEADS.in_groups()), Rotate(IN_GROUPS), 10, 0),
        ("labels: selection", Sparse(Filter::LABELS), Select, 200, 0),
        ("labels: attention", Sparse(Filter::LABELS), AttendSelected(LISTED), 200, 0),
        ("labels, in groups", Sparse(Filter::LABELS.in_groups()), AttendSelected(LISTED), 60, 0),
        ("spans", Cases(Filter::SPANS), Attend(DECODING), 100, 0),
        ("spans: nested", Cases(Filter::SPANS), Attend(NESTED), 100, 0),
        ("spans, in groups", in_groups(Filter::SPANS), Attend(MEMBER), 60, 0),
        ("wide spans", Cases(Filter::WIDE_SPANS), Attend(DECODING), 50, 4),
        ("short spans: 8", Cases(Filter::SHORT_SPANS), Attend(TAIL_OF_8), 50, 10),
        ("short spans: 16", Cases(Filter::SHORT_SPANS), Attend(TAIL_OF_16), 50, 2),
        ("fp8 spans", Cases(Filter::FP8_SPANS), Attend(DECODING), 100, 5),
        ("fp8 spans: prompts", Cases(Filter::FP8_SPANS), Attend(PROMPT), 100, 1),
        ("fp8 spans, in groups", in_groups(Filter::FP8_SPANS), Attend(MEMBER), 60, 3),
        ("short", Cases(Filter::SHORT), Attend(SHORT), 100, 1),
        ("short, in groups", in_groups(Filter::SHORT), Attend(IN_GROUPS), 60, 0),
        ("latent", Cases(Filter::LATENT), Attend(LONG), 100, 27),
        ("latent, in groups", in_groups(Filter::LATENT), Attend(IN_GROUPS), 15, 0),
        ("latent fp8", Cases(Filter::LATENT_FP8), Attend(ANY), 100, 0),
        ("latent fp8, in groups", in_groups(Filter::LATENT_FP8), Attend(IN_GROUPS), 15, 1),
        ("latent pairs", Cases(Filter::LATENT_PAIRS), Attend(PAIR), 60, 2),
        ("many heads", Cases(Filter::many_heads(4_097)), Attend(ANY), 3, 0),
    ] {
        check.reports(name, defect, seeds, first);
    }
}

/// Tests one defect in each other call except `swap_pages`, `synchronize` and the leases, and defects in the sinks,
/// masks and log-sum-exp of attention. The test above covers `rope_store`, `select` and `attend_selected`.
#[test]
fn each_call_has_a_defect_that_the_contract_reports() {
    let all = Check::Cases(Filter::ALL);
    for (name, defect, first) in [
        ("begin", Defect::Begin, 0),
        ("end", Defect::End, 0),
        ("store_cache", Defect::Store(ANY), 0),
        ("attend", Defect::Attend(ANY), 0),
        ("log-sum-exp", Defect::Lse, 1),
        ("sinks", Defect::Sinks, 0),
        ("masks", Defect::Masks, 1),
        ("copy_pages", Defect::Copy, 5),
        ("compact", Defect::Compact, 7),
        ("save_pages", Defect::Save, 0),
        ("load_pages", Defect::Load, 1),
        ("moved", Defect::Moved, 0),
    ] {
        all.reports(name, defect, 65, first);
    }
    Check::States.reports("copy_states", Defect::CopyStates, 4, 0);
    Check::States.reports("slots", Defect::Slots, 4, 0);
    Check::Served(false).reports("served", Defect::Attend(MEMBER), 4, 0);
    Check::Served(true).reports("served, in groups", Defect::Attend(PAST_WINDOW), 4, 0);
}
