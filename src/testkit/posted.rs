//! A host of an [`Outbox`] that owns bytes: it reads the work from its byte form, on another thread, and does it as
//! late as an outbox allows.
//!
//! The work waits until a call stores, reads or attends, or until the next plan begins. [`Backend::moved`] reads the
//! watermarks and then does the work, so polling makes progress.

use std::cell::RefCell;

use super::contract::{Case, TestBackend};
use super::replay::Inspect;
use crate::backend::{
    Attend, Backend, Cpu, CpuError, CpuOptions, CpuRead, CpuRows, CpuRowsMut, CpuWrite, Moved, OpenBackend, Outbox,
    OutboxError, OutboxOptions, PlanError, Queries, Rope, SlotMove, SwapMemory, Work,
};
use crate::config::StepBounds;
use crate::id::{LayerId, MoveId, PageId, SlotId, SwapPageId};
use crate::layout::{PlaneName, PoolLayout, TableShape};
use crate::plan::{BatchPlan, Compaction, PageCopy, PageMove, StepEnd};

/// Opens a [`Posted`].
#[derive(Clone, Debug, Default)]
pub struct PostedOptions(pub CpuOptions);

/// An [`Outbox`], and a [`Cpu`] with the bytes.
#[derive(Debug)]
pub struct Posted {
    posted: RefCell<Bytes>,
    layout: PoolLayout,
    /// Last result of `moved`.
    reported: Moved,
}

/// The outbox, and the backend on which its work is done.
#[derive(Debug)]
struct Bytes {
    outbox: Outbox,
    cpu: Cpu,
}

impl Bytes {
    /// Does all waiting work.
    fn settle(&mut self) -> &mut Cpu {
        let mut bytes = Vec::new();
        self.outbox.drain(|work| work.to_bytes(&mut bytes));
        let (outbox, cpu) = (&mut self.outbox, &mut self.cpu);
        if !bytes.is_empty() {
            std::thread::scope(|scope| {
                scope.spawn(|| Work::from_bytes(&bytes, |work| execute(cpu, outbox, work)).expect("an outbox's work"));
            });
        }
        &mut self.cpu
    }
}

/// Does one piece of work, and reports moves.
fn execute(cpu: &mut Cpu, outbox: &mut Outbox, work: Work<'_>) {
    match work {
        Work::Copy(copies) => cpu.copy_pages(copies).expect("checked copies"),
        Work::Slots(track, moves) => moves.iter().for_each(|of| move_slot(cpu, track, *of)),
        Work::Save(id, moves) => {
            cpu.save_pages(id, moves).expect("checked moves");
            outbox.saved(id);
        }
        Work::Load(id, moves) => {
            cpu.load_pages(id, moves).expect("checked moves");
            outbox.loaded(id);
        }
    }
}

/// Copies the bytes of a slot in all planes and lanes of a track's groups.
fn move_slot(cpu: &mut Cpu, track: u32, of: SlotMove) {
    let whole = *cpu.layout();
    let groups = (0..whole.groups().count()).filter(|group| whole.track_range(*group).contains(&track));
    groups.for_each(|group| move_slot_of_group(cpu, &whole.of_group(group), of));
}

fn move_slot_of_group(cpu: &mut Cpu, layout: &PoolLayout, SlotMove { source, target }: SlotMove) {
    let (source, target) = (layout.page_of(source), layout.page_of(target));
    let [mut from, mut to] = [source.0, target.0].map(|page| {
        let mut bytes = vec![0; layout.page_bytes() as usize];
        cpu.read_page(page, &mut bytes).expect("a page of the pool");
        bytes
    });
    for plane in layout.planes() {
        let strides = layout.page_strides(plane.name).expect("the plane is the pool's");
        let len = plane.elements as usize * plane.dtype.size() as usize;
        for (lane, head) in (0..layout.lanes()).flat_map(|lane| (0..plane.heads).map(move |head| (lane, head))) {
            let at = |offset| (strides.row(lane, PageId::new(0), offset) + u64::from(head) * strides.head) as usize;
            let row = from[at(source.1)..][..len].to_vec();
            to[at(target.1)..][..len].copy_from_slice(&row);
            if source.0 == target.0 {
                from[at(target.1)..][..len].copy_from_slice(&row);
            }
        }
    }
    cpu.write_page(target.0, &to).expect("a page of the pool");
}

impl OpenBackend for PostedOptions {
    type Backend = Posted;

    fn open(self, layout: &PoolLayout, table: &TableShape, bounds: impl Into<StepBounds>) -> Result<Posted, CpuError> {
        let bounds = bounds.into();
        let outbox = OutboxOptions.open(layout, table, bounds).expect("an outbox always opens");
        let cpu = self.0.open(layout, table, bounds)?;
        Ok(Posted { posted: RefCell::new(Bytes { outbox, cpu }), layout: *layout, reported: Moved::default() })
    }
}

/// Returns the error of the same plan or list on a [`Cpu`]. The double drains the outbox in time.
fn same(error: OutboxError) -> CpuError {
    match error {
        OutboxError::Plan(error) => CpuError::Plan(error),
        other => panic!("{other}"),
    }
}

impl Posted {
    fn settled(&mut self) -> &mut Cpu {
        self.posted.get_mut().settle()
    }

    /// Returns the backend without the effects of the waiting work.
    fn unsettled(&mut self) -> &mut Cpu {
        &mut self.posted.get_mut().cpu
    }
}

impl Backend for Posted {
    type Error = CpuError;
    type Rows<'a> = CpuRows<'a>;
    type RowsMut<'a> = CpuRowsMut<'a>;
    type Sinks<'a> = &'a [f32];
    type Lse<'a> = &'a mut [f32];

    fn begin(&mut self, plan: &BatchPlan<'_>) -> Result<(), CpuError> {
        let Bytes { outbox, cpu } = self.posted.get_mut();
        cpu.begin(plan)?;
        if let Err(OutboxError::Undrained { .. }) = outbox.begin(plan) {
            self.settled();
            self.posted.get_mut().outbox.begin(plan).map_err(same)?;
        }
        Ok(())
    }

    fn end(&mut self, end: StepEnd) {
        self.unsettled().end(end);
    }

    fn store_cache(
        &mut self,
        plan: &BatchPlan<'_>,
        layer: LayerId,
        k: CpuRows<'_>,
        v: CpuRows<'_>,
    ) -> Result<(), CpuError> {
        self.settled().store_cache(plan, layer, k, v)
    }

    fn rope_store(
        &mut self,
        plan: &BatchPlan<'_>,
        layer: LayerId,
        rope: &Rope<CpuRows<'_>, &[f32]>,
        qkv: CpuRowsMut<'_>,
    ) -> Result<(), CpuError> {
        self.settled().rope_store(plan, layer, rope, qkv)
    }

    fn attend_queries(
        &mut self,
        plan: &BatchPlan<'_>,
        layer: LayerId,
        attend: &Attend,
        queries: Queries<CpuRows<'_>, &[f32]>,
        out: CpuRowsMut<'_>,
        lse: Option<&mut [f32]>,
    ) -> Result<(), CpuError> {
        self.settled().attend_queries(plan, layer, attend, queries, out, lse)
    }

    fn copy_pages(&mut self, copies: &[PageCopy]) -> Result<(), CpuError> {
        self.posted.get_mut().outbox.copy_pages(copies).map_err(same)
    }

    fn compact(&mut self, compactions: &[Compaction]) -> Result<(), CpuError> {
        self.posted.get_mut().outbox.compact(compactions).map_err(same)
    }

    fn swap_pages(&self) -> u32 {
        self.posted.borrow().outbox.swap_pages()
    }

    fn save_pages(&mut self, id: MoveId, moves: &[PageMove]) -> Result<(), CpuError> {
        self.check_leases(moves, false)?;
        self.posted.get_mut().outbox.save_pages(id, moves).map_err(same)
    }

    fn load_pages(&mut self, id: MoveId, moves: &[PageMove]) -> Result<(), CpuError> {
        self.check_leases(moves, true)?;
        self.posted.get_mut().outbox.load_pages(id, moves).map_err(same)
    }

    fn moved(&mut self) -> Result<Moved, CpuError> {
        self.reported = self.posted.get_mut().outbox.moved().map_err(same)?;
        self.settled();
        Ok(self.reported)
    }

    fn synchronize(&mut self) -> Result<(), CpuError> {
        self.settled();
        Ok(())
    }
}

impl Posted {
    /// Rejects moves of leased pages, as the owner of swap memory must.
    fn check_leases(&mut self, moves: &[PageMove], is_load: bool) -> Result<(), PlanError> {
        let pages = self.layout.swap_region_pages();
        if moves.iter().any(|of| of.swap.raw() >= pages) {
            return Ok(()); // The outbox rejects the page.
        }
        self.unsettled().check_leases(moves, is_load)
    }
}

impl SwapMemory for Posted {
    type Read = CpuRead;
    type Write = CpuWrite;

    fn lease(&mut self, page: SwapPageId) -> CpuRead {
        self.settled().lease(page)
    }

    fn lease_mut(&mut self, page: SwapPageId) -> CpuWrite {
        self.settled().lease_mut(page)
    }
}

impl TestBackend for Posted {
    forward_buffers!(this: Cpu => this.unsettled());

    fn supports(case: &Case) -> bool {
        Cpu::supports(case)
    }

    fn unit(&self, case: &Case) -> f64 {
        self.posted.borrow().cpu.unit(case)
    }

    fn read_pages(&mut self, pages: &[PageId], target: &mut [u8]) {
        self.settled().read_pages(pages, target);
    }

    fn write_pages(&mut self, pages: &[PageId], source: &[u8]) {
        self.settled().write_pages(pages, source);
    }
}

impl Inspect for Posted {
    fn store(&mut self, plan: &BatchPlan<'_>, layer: LayerId, k: &[f32], v: &[f32]) -> Result<(), CpuError> {
        self.store_cache(plan, layer, k.into(), v.into())
    }

    fn load(&self, plane: PlaneName, layer: LayerId, slot: SlotId) -> Option<Vec<f32>> {
        self.posted.borrow_mut().settle().read_slot(plane, layer, slot).ok()
    }

    fn words(&self) -> Option<&[u32]> {
        None
    }

    fn last_moved(&mut self) -> Moved {
        self.reported
    }

    fn read_swap(&mut self, page: SwapPageId) -> Option<Vec<u8>> {
        Some(self.lease(page).as_ref().to_vec())
    }

    fn write_swap(&mut self, page: SwapPageId, bytes: &[u8]) {
        self.lease_mut(page).as_mut().copy_from_slice(bytes);
    }
}
