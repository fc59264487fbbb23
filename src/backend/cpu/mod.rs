//! The CPU backend: the reference, and the specification of the kernels.
//!
//! One zeroed allocation in the pool's layout, which the system backs with memory as pages are first
//! written, and a copy of the page tables. Every call is done when it returns. A call that fails has written nothing.
//!
//! Not here: which pages are whose.

mod attention;
mod check;
mod error;
mod math;
mod number;
mod pages;
mod pool;
mod rows;
mod unit;

use std::num::NonZeroUsize;
use std::thread;

pub use error::{CpuError, Operand};
pub use rows::{CpuRows, CpuRowsMut, Elements, ElementsMut};

use super::{Attend, Backend, OpenSteps};
use crate::id::LayerId;
use crate::layout::{PlaneName, PoolLayout, Strides, TableShape};
use crate::memory::OutOfMemory;
use crate::plan::{BatchPlan, PageCopy, StepEnd};
use attention::Scratch;
use math::F32x8;
use number::Number;
use pages::bytes_of;
use pool::{Pool, with_number};
use unit::Job;

/// K and V in the host's memory.
#[derive(Debug)]
pub struct Cpu {
    threads: NonZeroUsize,
    open: Option<Open>,
    scratch: Vec<Scratch>,
    /// Results of attention's units: `[query rows, vectors]`, and the log-sum-exp, `[query rows]`.
    out: Vec<F32x8>,
    lse: Vec<f32>,
}

/// What `open` took.
#[derive(Debug)]
struct Open {
    layout: PoolLayout,
    table: TableShape,
    pool: Pool,
    /// Where K and V lie.
    kv: [Strides; 2],
    /// The page tables. Every word names a chunk or a page that exists.
    words: Box<[u32]>,
    steps: OpenSteps,
}

impl Default for Cpu {
    fn default() -> Self {
        Self::new()
    }
}

impl Cpu {
    /// A backend without a pool yet, computing on all of the machine's cores.
    pub fn new() -> Self {
        Self::with_threads(thread::available_parallelism().map_or(1, NonZeroUsize::get))
    }

    /// As [`Cpu::new`], with at most `threads` threads, the caller's included; 0 counts as 1. Results do not depend on
    /// it.
    pub fn with_threads(threads: usize) -> Self {
        Self {
            threads: NonZeroUsize::new(threads).unwrap_or(NonZeroUsize::MIN),
            open: None,
            scratch: Vec::new(),
            out: Vec::new(),
            lse: Vec::new(),
        }
    }

    /// The pool that `open` was given.
    pub fn layout(&self) -> Option<&PoolLayout> {
        self.open.as_ref().map(|open| &open.layout)
    }

    /// The page tables as last written, in the order of [`TableShape`]; none before `open`.
    pub fn table_words(&self) -> &[u32] {
        self.open.as_ref().map_or(&[], |open| &open.words)
    }

    /// Bytes taken: pool, page tables, and scratch, which grows to the largest step attended.
    pub fn bytes(&self) -> u64 {
        let open = self
            .open
            .as_ref()
            .map_or(0, |open| open.layout.total_bytes() + size_of_val(&*open.words) as u64);
        let scratch = self.scratch.iter().map(Scratch::bytes).sum::<usize>()
            + self.out.capacity() * size_of::<F32x8>()
            + self.lse.capacity() * size_of::<f32>();
        open + scratch as u64
    }

    fn open(&self) -> Result<&Open, CpuError> {
        self.open.as_ref().ok_or(CpuError::NotOpen)
    }
}

impl Open {
    /// Checks a plan, and that its step is open.
    fn check_open(&self, plan: &BatchPlan<'_>) -> Result<(), CpuError> {
        let step = plan.step;
        if step > self.steps.last() {
            return Err(CpuError::NotBegun { step });
        }
        if !self.steps.contains(step) {
            return Err(CpuError::Ended { step });
        }
        check::plan(plan, &self.layout, &self.table)
    }
}

impl Backend for Cpu {
    type Error = CpuError;
    type Rows<'a> = CpuRows<'a>;
    type RowsMut<'a> = CpuRowsMut<'a>;
    type Lse<'a> = &'a mut [f32];

    /// # Errors
    /// [`CpuError::OutOfMemory`], or a pool already.
    fn open(
        &mut self,
        layout: &PoolLayout,
        table: &TableShape,
        max_steps: u32,
    ) -> Result<(), CpuError> {
        if self.open.is_some() {
            return Err(CpuError::AlreadyOpen);
        }
        let pool = Pool::new(layout)?;
        let words = pool::zeroed::<u32>(table.words() as u64)?;
        let (layout, table) = (*layout, *table);
        let kv = [PlaneName::K, PlaneName::V]
            .map(|name| layout.strides(name).expect("a pool of heads has K and V"));
        let refused = |error: OutOfMemory| CpuError::OutOfMemory { bytes: error.bytes };
        let steps = OpenSteps::try_new(max_steps).map_err(refused)?;
        self.open = Some(Open { layout, table, pool, kv, words, steps });
        Ok(())
    }

    /// # Errors
    /// A plan that names what does not exist, or whose step does not follow the last one.
    fn begin(&mut self, plan: &BatchPlan<'_>) -> Result<(), CpuError> {
        let open = self.open.as_mut().ok_or(CpuError::NotOpen)?;
        let (step, last) = (plan.step, open.steps.last());
        if step <= last {
            return Err(CpuError::AlreadyBegun { step, last });
        }
        if !open.steps.has_room() {
            return Err(CpuError::OpenSteps { max: open.steps.max() });
        }
        check::plan(plan, &open.layout, &open.table)?;
        for write in plan.table_writes {
            open.words[write.index as usize] = write.value;
        }
        open.steps.begin(step);
        Ok(())
    }

    fn end(&mut self, end: StepEnd) {
        if let Some(open) = &mut self.open {
            open.steps.end(end);
        }
    }

    /// Rows of another type than the pool's are rounded to nearest even.
    ///
    /// # Errors
    /// A plan whose step is not open or that names what does not exist, or rows that do not fit it.
    fn store_cache(
        &mut self,
        plan: &BatchPlan<'_>,
        layer: LayerId,
        k: CpuRows<'_>,
        v: CpuRows<'_>,
    ) -> Result<(), CpuError> {
        let open = self.open.as_mut().ok_or(CpuError::NotOpen)?;
        open.check_open(plan)?;
        check::layer(layer, &open.layout)?;
        let width = open.layout.kv_heads() as usize * open.layout.head_dim() as usize;
        let k_stride = k.check(Operand::K, plan.token_count(), width)?;
        let v_stride = v.check(Operand::V, plan.token_count(), width)?;
        let rows = [(k, k_stride), (v, v_stride)];
        with_number!(open.layout.dtype(), T => {
            let pool = open.pool.numbers_mut::<T>();
            for i in 0..plan.token_count() {
                let Some(slot) = plan.slot_mapping.get(i) else { continue };
                let (page, offset) = open.layout.page_of(slot);
                for (strides, (rows, stride)) in open.kv.iter().zip(rows) {
                    let target = strides.row(layer, page, offset) as usize / size_of::<T>();
                    let row = rows.elements.slice(i * stride..i * stride + width);
                    row.convert_into(&mut pool[target..target + width]);
                }
            }
        });
        Ok(())
    }

    /// # Errors
    /// A plan whose step is not open or that names what does not exist, rows that do not fit it, or an [`Attend`] that
    /// makes no sense.
    fn attend(
        &mut self,
        plan: &BatchPlan<'_>,
        layer: LayerId,
        attend: &Attend,
        q: CpuRows<'_>,
        mut out: CpuRowsMut<'_>,
        mut lse: Option<&mut [f32]>,
    ) -> Result<(), CpuError> {
        let open = self.open.as_ref().ok_or(CpuError::NotOpen)?;
        open.check_open(plan)?;
        check::layer(layer, &open.layout)?;
        check::attend(attend, &open.layout)?;
        let (tokens, q_heads) = (plan.token_count(), attend.q_heads as usize);
        let width = q_heads * open.layout.head_dim() as usize;
        let q_stride = q.check(Operand::Q, tokens, width)?;
        let out_stride = out.check(Operand::Out, tokens, width)?;
        check::lse(lse.as_deref(), tokens * q_heads)?;

        let [k, v] = open.kv;
        with_number!(open.layout.dtype(), T => {
            let job = Job {
                pool: open.pool.numbers::<T>(),
                layout: &open.layout,
                layer,
                k,
                v,
                table: &open.table,
                words: &open.words,
                rows: plan.rows,
                attend,
                q,
                q_stride,
                threads: self.threads,
            };
            let threads = job.threads();
            if self.scratch.len() < threads {
                self.scratch.resize_with(threads, Scratch::default);
            }
            self.out.resize(tokens * q_heads * job.vectors(), F32x8::default());
            self.lse.resize(tokens * q_heads, 0.0);
            attention::run(&job, &mut self.scratch[..threads], &mut self.out, &mut self.lse);
            hand_out(&job, &self.out, &self.lse, &mut out, out_stride, lse.as_deref_mut());
        });
        pad(plan, width, &mut out, out_stride, attend.q_heads as usize, lse);
        Ok(())
    }

    /// Copies in the order given.
    ///
    /// # Errors
    /// Pages that do not exist.
    fn copy_pages(&mut self, copies: &[PageCopy]) -> Result<(), CpuError> {
        let open = self.open.as_mut().ok_or(CpuError::NotOpen)?;
        check::copies(copies, &open.layout)?;
        let bytes = open.pool.bytes_mut();
        for copy in copies {
            for piece in 0..open.layout.pieces_per_page() {
                let source = bytes_of(&open.layout, copy.source, piece);
                let target = bytes_of(&open.layout, copy.target, piece).start;
                bytes.copy_within(source, target);
            }
        }
        Ok(())
    }

    /// # Errors
    /// None: every call was done when it returned.
    fn synchronize(&mut self) -> Result<(), CpuError> {
        Ok(())
    }
}

/// Takes the units' results apart into rows of `out` and `lse`.
fn hand_out<T: Number>(
    job: &Job<'_, T>,
    results: &[F32x8],
    sums: &[f32],
    out: &mut CpuRowsMut<'_>,
    out_stride: usize,
    mut lse: Option<&mut [f32]>,
) {
    let (group, head_dim) = (job.group(), job.layout.head_dim() as usize);
    let results = results.chunks_exact(job.vectors()).zip(sums);
    for ((token, head), (result, sum)) in job.units().flat_map(|unit| unit.rows(group)).zip(results)
    {
        let start = token * out_stride + head * head_dim;
        out.elements.write(start, &result.as_flattened()[..head_dim]);
        if let Some(lse) = &mut lse {
            lse[token * job.attend.q_heads as usize + head] = *sum;
        }
    }
}

/// Padding rows: output 0, log-sum-exp minus infinity.
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
