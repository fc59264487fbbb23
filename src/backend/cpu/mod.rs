//! The CPU backend: the reference, and the specification of the kernels.
//!
//! The pool is one zeroed allocation, which the system backs at the first writes. Every call is complete when it
//! returns, and a failed call has written nothing. Attention is compiled for several instruction sets ([`CpuPath`]); a
//! backend chooses one when it is opened.

mod attention;
mod e4m3;
mod error;
mod fold;
mod labels;
mod math;
mod number;
mod options;
mod pages;
mod path;
mod planes;
mod pool;
mod rope;
mod rows;
mod scales;
mod simd;
mod states;
mod swap;
mod threads;
mod unit;

use std::num::NonZeroUsize;

use half::bf16;

pub use error::CpuError;
pub use options::CpuOptions;
pub use path::{CpuPath, PATH_VARIABLE};
pub use rows::{CpuRows, CpuRowsMut, Elements, ElementsMut};
pub use states::CpuState;
pub use swap::{CpuRead, CpuWrite};

use super::by_shape::ByShape;
use super::sparse::{self, Select, Selection, SparseBackend};
use super::step_states::StepStates;
use super::{Attend, Backend, Moved, OpenSteps, Operand, PlanError, Queries, Rope, check};
use crate::id::{LayerId, MoveId};
use crate::layout::{LayerPlace, PoolLayout, TableShape};
use crate::plan::{BatchPlan, Compaction, PageCopy, PageMove, SpanCheck, StepEnd};
use attention::Scratch;
use labels::{Scorer, SelectScratch};
use math::{Line, Softmax};
use number::Number;
use pages::bytes_of;
use planes::Planes;
use pool::{Pool, with_number};
use scales::{Row, side_count};
use simd::Isa;
use swap::SwapPages;
use unit::Job;

/// The reference backend: K and V in host memory.
#[derive(Debug)]
pub struct Cpu {
    threads: NonZeroUsize,
    isa: Isa,
    layout: PoolLayout,
    table: TableShape,
    pool: Pool,
    swap: SwapPages,
    planes: ByShape<Planes>,
    /// Space for one head, if the pool is quantised or has labels.
    wide: Box<[f32]>,
    /// The page tables. Every word is a valid leaf or page.
    words: Box<[u32]>,
    steps: OpenSteps,
    states: StepStates,
    max_step_tokens: u32,
    spans: SpanCheck,
    scratch: Vec<Scratch>,
    selects: SelectScratch,
    /// Results of attention's units: `[query rows, value lines]`, and their softmax, `[query rows]`.
    out: Vec<Line>,
    softmax: Vec<Softmax>,
}

impl Cpu {
    /// Returns the layout of the pool.
    pub fn layout(&self) -> &PoolLayout {
        &self.layout
    }

    /// Returns the instruction set of attention.
    pub fn path(&self) -> CpuPath {
        self.isa.path()
    }

    /// Returns the page tables in the order of [`TableShape`].
    pub fn table_words(&self) -> &[u32] {
        &self.words
    }

    /// Returns the allocated bytes: pool, swap pages, static scales, label channels, page tables, and scratch, which
    /// grows to the largest step.
    pub fn bytes(&self) -> u64 {
        let scratch = self.scratch.iter().map(Scratch::bytes).sum::<usize>()
            + self.out.capacity() * size_of::<Line>()
            + self.softmax.capacity() * size_of::<Softmax>()
            + size_of_val(&*self.wide)
            + self.planes.all().map(Planes::bytes).sum::<usize>()
            + self.selects.bytes();
        let pages = self.layout.total_bytes() + self.swap.bytes(&self.layout);
        pages + (size_of_val(&*self.words) + scratch) as u64
    }

    /// Checks a plan, and that its step is open.
    fn check_open(&self, plan: &BatchPlan<'_>) -> Result<(), PlanError> {
        check::is_open(&self.steps, plan.step)?;
        check::plan(plan, &self.layout, &self.table)?;
        check::table_writes(plan.table_writes, &self.layout, &self.table)
    }

    /// Stores the labels of a step's K; `k` has the rows and their stride.
    fn store_labels(&mut self, plan: &BatchPlan<'_>, layer: LayerId, k: (CpuRows<'_>, usize)) {
        let LayerPlace { group, track, lane } = self.layout.place(layer);
        let Planes { layout, labels, .. } = self.planes.of_group(group);
        if labels.channels().is_none() {
            return;
        }
        let dim = layout.head_dim() as usize;
        let width = layout.kv_heads() as usize * dim;
        let (rows, stride) = k;
        let slots = plan.slots_of(track);
        for i in 0..plan.token_count() {
            let Some(slot) = slots.get(i) else { continue };
            let (page, offset) = self.layout.page_of(slot);
            let row = Row { side: 0, layer, lane, page, offset };
            let numbers = rows.elements.slice(i * stride..i * stride + width);
            labels.store(&mut self.pool, row, numbers, &mut self.wide[..dim]);
        }
    }

    /// Stores rows of K and V in a quantised pool, each with its stride. Rotary parts of latent rows are not quantised.
    fn store_quantised(&mut self, plan: &BatchPlan<'_>, layer: LayerId, rows: [(CpuRows<'_>, usize); 2]) {
        let LayerPlace { group, track, lane } = self.layout.place(layer);
        let Planes { layout, kv, rope, scales, .. } = self.planes.of_group(group);
        let count = side_count(layout);
        let dim = layout.value_dim() as usize;
        let width = layout.kv_heads() as usize * dim;
        let slots = plan.slots_of(track);
        for i in 0..plan.token_count() {
            let Some(slot) = slots.get(i) else { continue };
            let (page, offset) = self.layout.page_of(slot);
            for (side, (rows, stride)) in rows.into_iter().enumerate().take(count) {
                let row = Row { side, layer, lane, page, offset };
                let numbers = rows.elements.slice(i * stride..i * stride + width);
                let strides = &kv[side];
                scales.store(&mut self.pool, strides, row, numbers, &mut self.wide[..dim]);
            }
            if let Some(strides) = rope {
                let (rows, stride) = rows[0];
                let start = i * stride + width;
                let row = rows.elements.slice(start..start + layout.head_dim() as usize - dim);
                let target = strides.row(lane, page, offset) as usize / size_of::<bf16>();
                row.convert_into(&mut self.pool.numbers_mut::<bf16>()[target..target + row.len()]);
            }
        }
    }

    /// Computes attention. Rows with lists read only the positions of their lists.
    fn attend_rows(
        &mut self,
        plan: &BatchPlan<'_>,
        layer: LayerId,
        (attend, selection): (&Attend, Option<Selection<&[u32]>>),
        Queries { rows: q, sinks }: Queries<CpuRows<'_>, &[f32]>,
        mut out: CpuRowsMut<'_>,
        mut lse: Option<&mut [f32]>,
    ) -> Result<(), CpuError> {
        self.check_open(plan)?;
        check::layer(layer, &self.layout)?;
        let place = self.layout.place(layer);
        let planes = self.planes.of_group(place.group);
        let layout = &planes.layout;
        check::attend(attend, layout)?;
        check::window(plan, attend)?;
        match selection {
            Some(_) => check::sparse_layer(layer, &self.layout)?,
            None => check::reach(layer, &self.layout, attend)?,
        }
        let (tokens, q_heads) = (plan.token_count(), attend.q_heads as usize);
        let q_width = q_heads * layout.head_dim() as usize;
        let width = q_heads * layout.value_dim() as usize;
        let q_stride = q.check(Operand::Q, tokens, q_width)?;
        let out_stride = out.check(Operand::Out, tokens, width)?;
        rows::check_lse(lse.as_deref(), tokens * q_heads)?;
        if let Some(sinks) = sinks {
            check::sinks(sinks, attend.q_heads)?;
        }

        let [k, v] = planes.kv;
        with_number!(layout.dtype(), T => {
            let job = Job {
                pool: self.pool.numbers::<T>(),
                numbers: self.pool.numbers(),
                rope: planes.rope.as_ref().map(|strides| (strides, self.pool.numbers())),
                scales: &planes.scales,
                layout,
                layer,
                place,
                k,
                v,
                table: &self.table,
                words: &self.words,
                plan,
                attend,
                sinks,
                selection,
                q,
                q_stride,
                threads: self.threads,
                isa: self.isa,
            };
            let threads = job.threads();
            if self.scratch.len() < threads {
                self.scratch.resize_with(threads, Scratch::default);
            }
            let results: usize = job.units().map(|unit| unit.row_count(job.group())).sum();
            self.out.resize(results * job.value_lines(), Line::default());
            self.softmax.resize(results, math::NOTHING);
            attention::run(&job, &mut self.scratch[..threads], &mut self.out, &mut self.softmax);
            let results = (&mut self.out[..], &mut self.softmax[..]);
            hand_out(&job, results, &mut out, out_stride, lse.as_deref_mut());
        });
        pad(plan, width, &mut out, out_stride, attend.q_heads as usize, lse);
        Ok(())
    }
}

impl Backend for Cpu {
    type Error = CpuError;
    type Rows<'a> = CpuRows<'a>;
    type RowsMut<'a> = CpuRowsMut<'a>;
    type Sinks<'a> = &'a [f32];
    type Lse<'a> = &'a mut [f32];

    /// # Errors
    /// [`CpuError::Plan`].
    fn begin(&mut self, plan: &BatchPlan<'_>) -> Result<(), CpuError> {
        check::may_begin(&self.steps, plan.step)?;
        check::step_tokens(plan, self.max_step_tokens)?;
        check::plan(plan, &self.layout, &self.table)?;
        check::spans(&mut self.spans, plan)?;
        check::table_writes(plan.table_writes, &self.layout, &self.table)?;
        for write in plan.table_writes {
            self.words[write.index as usize] = write.value;
        }
        self.steps.begin(plan.step);
        self.states.begin(plan);
        Ok(())
    }

    fn end(&mut self, end: StepEnd) {
        self.steps.end(end);
        self.states.end(&self.steps);
    }

    /// Rounds rows of another type than the pool's to nearest even. A quantised pool first divides by the scale;
    /// results beyond the largest number, and infinities, become that number. NaN stays NaN.
    ///
    /// # Errors
    /// [`CpuError::Plan`] for an invalid plan, a step that is not open, a layer that does not exist, or rows that do
    /// not fit the plan or the pool.
    fn store_cache(
        &mut self,
        plan: &BatchPlan<'_>,
        layer: LayerId,
        k: CpuRows<'_>,
        v: CpuRows<'_>,
    ) -> Result<(), CpuError> {
        self.check_open(plan)?;
        check::layer(layer, &self.layout)?;
        let LayerPlace { group, track, lane } = self.layout.place(layer);
        let layout = self.planes.of_group(group).layout;
        let [width, v_width] = layout.store_widths();
        let k_stride = k.check(Operand::K, plan.token_count(), width)?;
        let v_stride = v.check(Operand::V, plan.token_count(), v_width)?;
        let rows = [(k, k_stride), (v, v_stride)];
        let count = side_count(&layout);
        let slots = plan.slots_of(track);
        self.store_labels(plan, layer, rows[0]);
        if layout.dtype().is_quantised() {
            self.store_quantised(plan, layer, rows);
            return Ok(());
        }
        let kv = &self.planes.of_group(group).kv;
        with_number!(layout.dtype(), T => {
            let pool = self.pool.numbers_mut::<T>();
            for i in 0..plan.token_count() {
                let Some(slot) = slots.get(i) else { continue };
                let (page, offset) = self.layout.page_of(slot);
                for (strides, (rows, stride)) in kv.iter().zip(rows).take(count) {
                    let target = strides.row(lane, page, offset) as usize / size_of::<T>();
                    let row = rows.elements.slice(i * stride..i * stride + width);
                    row.convert_into(&mut pool[target..target + width]);
                }
            }
        });
        Ok(())
    }

    /// # Errors
    /// As [`store_cache`](Backend::store_cache); also [`CpuError::Plan`] for norms or frequencies of another
    /// length, and for pools without heads or with an odd head_dim.
    fn rope_store(
        &mut self,
        plan: &BatchPlan<'_>,
        layer: LayerId,
        rope: &Rope<CpuRows<'_>, &[f32]>,
        qkv: CpuRowsMut<'_>,
    ) -> Result<(), CpuError> {
        self.rotate_and_store(plan, layer, rope, qkv)
    }

    /// # Errors
    /// As [`store_cache`](Backend::store_cache); also [`CpuError::Plan`] for an invalid [`Attend`] or sinks, a window
    /// or chunks with draft trees, and a window or chunks other than those of the layer's group.
    fn attend_queries(
        &mut self,
        plan: &BatchPlan<'_>,
        layer: LayerId,
        attend: &Attend,
        queries: Queries<CpuRows<'_>, &[f32]>,
        out: CpuRowsMut<'_>,
        lse: Option<&mut [f32]>,
    ) -> Result<(), CpuError> {
        self.attend_rows(plan, layer, (attend, None), queries, out, lse)
    }

    /// Copies in the given order.
    ///
    /// # Errors
    /// [`CpuError::Plan`] for pages that do not exist.
    fn copy_pages(&mut self, copies: &[PageCopy]) -> Result<(), CpuError> {
        check::copies(copies, (self.layout.page_count(), self.layout.page_count()))?;
        let bytes = self.pool.bytes_mut();
        for copy in copies {
            for piece in 0..self.layout.pieces_per_page() {
                let source = bytes_of(&self.layout, copy.source, piece);
                let target = bytes_of(&self.layout, copy.target, piece).start;
                bytes.copy_within(source, target);
            }
        }
        Ok(())
    }

    /// # Errors
    /// [`CpuError::Plan`] for rows or slots that do not exist.
    fn compact(&mut self, compactions: &[Compaction]) -> Result<(), CpuError> {
        check::compactions(compactions, &self.layout, &self.table)?;
        for compaction in compactions {
            for (from, to) in compaction.moves() {
                self.move_slot(compaction.row, from, to);
            }
        }
        Ok(())
    }

    fn swap_pages(&self) -> u32 {
        self.layout.swap_region_pages()
    }

    fn save_pages(&mut self, id: MoveId, moves: &[PageMove]) -> Result<(), CpuError> {
        self.save(id, moves)
    }

    fn load_pages(&mut self, id: MoveId, moves: &[PageMove]) -> Result<(), CpuError> {
        self.load(id, moves)
    }

    fn moved(&mut self) -> Result<Moved, CpuError> {
        Ok(self.last_moved())
    }

    /// # Errors
    /// None: every call is complete when it returns.
    fn synchronize(&mut self) -> Result<(), CpuError> {
        Ok(())
    }
}

impl SparseBackend for Cpu {
    type Positions<'a> = &'a [u32];
    type PositionsMut<'a> = &'a mut [u32];

    /// # Errors
    /// As [`store_cache`](Backend::store_cache); also [`CpuError::Plan`] for lists that do not fit, an invalid
    /// [`Select`], a pool without labels, and a layer outside group 0.
    fn select(
        &mut self,
        plan: &BatchPlan<'_>,
        layer: LayerId,
        select: &Select,
        q: CpuRows<'_>,
        positions: &mut [u32],
    ) -> Result<(), CpuError> {
        self.check_open(plan)?;
        check::layer(layer, &self.layout)?;
        check::sparse_layer(layer, &self.layout)?;
        let longest = check::longest_row(&self.table, self.layout.page_size());
        sparse::check(select, &self.layout, longest)?;
        let width = select.q_heads as usize * self.layout.head_dim() as usize;
        let stride = q.check(Operand::Q, plan.token_count(), width)?;
        let (top, kv_heads) = (select.top as usize, self.layout.kv_heads() as usize);
        check_lists(positions.len(), plan.rows.len() * kv_heads * top)?;

        let lane = self.layout.place(layer).lane;
        let Self { planes, pool, layout, table, words, selects, .. } = self;
        let labels = &planes.of_group(0).labels;
        let scorer = Scorer { labels, pool, layout, table, words, layer, lane, select };
        for (row, lists) in plan.rows.iter().zip(positions.chunks_exact_mut(kv_heads * top)) {
            if !sparse::has_lists(plan, row) {
                lists.fill(sparse::NO_POSITION);
                continue;
            }
            let start = row.qo_start as usize * stride;
            let queries = q.elements.slice(start..start + width);
            for (kv_head, list) in (0..).zip(lists.chunks_exact_mut(top)) {
                selects.list(&scorer, row, kv_head, queries, list);
            }
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
        out: CpuRowsMut<'_>,
        lse: Option<&mut [f32]>,
    ) -> Result<(), CpuError> {
        let longest = check::longest_row(&self.table, self.layout.page_size());
        sparse::check_top(selection.top, longest)?;
        let lists = plan.rows.len() * self.layout.kv_heads() as usize;
        check_lists(selection.positions.len(), lists * selection.top as usize)?;
        self.attend_rows(plan, layer, (attend, Some(selection)), queries, out, lse)
    }
}

/// Checks that lists have exactly the wanted number of positions.
fn check_lists(actual: usize, wanted: usize) -> Result<(), PlanError> {
    let operand = Operand::Selection;
    if actual == wanted { Ok(()) } else { Err(PlanError::Length { operand, actual, wanted }) }
}

/// Joins the units' results for the same query rows, and writes them to `out` and `lse`.
fn hand_out<T: Number>(
    job: &Job<'_, T>,
    (mut results, mut sums): (&mut [Line], &mut [Softmax]),
    out: &mut CpuRowsMut<'_>,
    out_stride: usize,
    mut lse: Option<&mut [f32]>,
) {
    let (group, value_dim) = (job.group(), job.layout.value_dim() as usize);
    let lines = job.value_lines();
    let mut whole: (&mut [Line], &mut [Softmax]) = (&mut [], &mut []);
    for unit in job.units() {
        let rows = unit.row_count(group);
        let part = results.split_off_mut(..rows * lines).expect("a result for each row");
        let part_sums = sums.split_off_mut(..rows).expect("a result for each row");
        if unit.continues {
            attention::join_parts((whole.0, whole.1), (part, part_sums));
        } else {
            whole = (part, part_sums);
        }
        if unit.goes_on {
            continue;
        }
        if unit.continues {
            attention::finish(job, unit, whole.0, whole.1);
        }
        let rows = unit.rows(group).zip(whole.0.chunks_exact(lines).zip(&*whole.1));
        for ((token, head), (result, (max, sum))) in rows {
            let start = token * out_stride + head * value_dim;
            out.elements.write(start, &bytemuck::cast_slice(result)[..value_dim]);
            if let Some(lse) = &mut lse {
                lse[token * job.attend.q_heads as usize + head] = max + sum.ln();
            }
        }
    }
}

/// Writes padding rows: output 0, log-sum-exp minus infinity.
fn pad(
    plan: &BatchPlan<'_>,
    width: usize,
    out: &mut CpuRowsMut<'_>,
    out_stride: usize,
    q_heads: usize,
    mut lse: Option<&mut [f32]>,
) {
    for row in plan.rows.iter().filter(|row| row.kv_len == 0) {
        for token in row.qo_start as usize..row.qo_start as usize + row.extend_len as usize {
            out.elements.zero(token * out_stride..token * out_stride + width);
            if let Some(lse) = &mut lse {
                lse[token * q_heads..(token + 1) * q_heads].fill(f32::NEG_INFINITY);
            }
        }
    }
}
