//! A backend that moves pages as late as the contract allows, to check that the engine relies on no earlier effect.
//!
//! Until a move takes effect, its target is full of NaN. Three kinds of calls first apply a waiting move: `begin` with
//! a table write that names the move's page of the pool; a copy from or to this page; a later move that writes one of
//! the move's two pages. `synchronize` applies all moves. [`Backend::moved`] reads the watermark and then finishes the
//! oldest batch, so polling makes progress.

use std::cell::RefCell;
use std::convert::identity;

use super::replay::Inspect;
use crate::backend::{
    Backend, Cpu, CpuError, CpuOptions, CpuRead, CpuWrite, Moved, OpenBackend, PlanError, StateBackend, SwapMemory,
};
use crate::config::StepBounds;
use crate::id::{LayerId, MoveId, PageId, SlotId, SwapPageId};
use crate::layout::{PlaneName, PoolLayout, TableShape};
use crate::plan::{BatchPlan, PageCopy, PageMove};

/// Opens a [`Late`].
#[derive(Clone, Debug, Default)]
pub struct LateOptions(pub CpuOptions);

/// A [`Cpu`] with delayed moves.
#[derive(Debug)]
pub struct Late {
    inner: RefCell<Cpu>,
    words: Vec<u32>,
    layout: PoolLayout,
    table: TableShape,
    /// Moves that have not taken effect, in the order of the calls.
    waiting: Vec<Waiting>,
    last: Moved,
    /// Last result of `moved`.
    reported: Moved,
    /// Last move number of the inner backend.
    inner_id: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Way {
    Save,
    Load,
}

/// A move that has not taken effect.
#[derive(Clone, Copy, Debug)]
struct Waiting {
    id: MoveId,
    way: Way,
    pages: PageMove,
}

impl Waiting {
    fn meets(&self, other: &Self) -> bool {
        self.pages.device == other.pages.device || self.pages.swap == other.pages.swap
    }
}

impl Late {
    /// Returns the backend after all moves have taken effect.
    pub fn settled(&mut self) -> &mut Cpu {
        self.settle(|_| true);
        self.inner.get_mut()
    }

    /// Returns the backend without applying the waiting moves, for a host's own calls in a step that has begun.
    pub fn unsettled(&mut self) -> &mut Cpu {
        self.inner.get_mut()
    }

    /// Applies the moves for which `needs` is true, after all earlier moves of the same pages.
    fn settle(&mut self, needs: impl Fn(&Waiting) -> bool) {
        let mut due = vec![false; self.waiting.len()];
        for i in (0..due.len()).rev() {
            let met = (i + 1..due.len()).any(|later| due[later] && self.waiting[i].meets(&self.waiting[later]));
            due[i] = met || needs(&self.waiting[i]);
        }
        let mut due = due.into_iter();
        let moves = self.waiting.extract_if(.., |_| due.next().expect("one for each move"));
        let moves: Vec<_> = moves.collect();
        moves.into_iter().for_each(|one| self.take_effect(one));
    }

    fn settle_pages(&mut self, pages: &[PageId]) {
        self.settle(|one| pages.contains(&one.pages.device));
    }

    fn take_effect(&mut self, Waiting { way, pages, .. }: Waiting) {
        self.inner_id += 1;
        let (cpu, id) = (self.inner.get_mut(), MoveId::new(self.inner_id));
        let done = match way {
            Way::Save => cpu.save_pages(id, &[pages]),
            Way::Load => cpu.load_pages(id, &[pages]),
        };
        done.expect("the move was checked");
    }

    /// Returns watermarks: all saves up to `saved` and all loads up to `loaded` have taken effect.
    fn done(&self) -> Moved {
        let done = |way, last: MoveId| {
            let first = self.waiting.iter().find(|one| one.way == way);
            first.map_or(last, |one| MoveId::new(one.id.raw() - 1))
        };
        Moved { saved: done(Way::Save, self.last.saved), loaded: done(Way::Load, self.last.loaded) }
    }

    /// Checks moves as every backend does.
    fn check(&self, id: MoveId, moves: &[PageMove]) -> Result<(), PlanError> {
        let last = self.last.saved.max(self.last.loaded);
        if id <= last {
            return Err(PlanError::MoveOrder { id, last });
        }
        let (page_count, pages) = (self.layout.page_count(), self.layout.swap_region_pages());
        moves.iter().try_for_each(|&PageMove { device: page, swap }| {
            if page.raw() >= page_count {
                return Err(PlanError::Page { page, page_count });
            }
            if swap.raw() < pages { Ok(()) } else { Err(PlanError::SwapPage { page: swap, pages }) }
        })
    }

    /// Returns the bytes of a page of the pool after the given waiting moves.
    fn device_bytes(&self, page: PageId, moves: &[Waiting]) -> Vec<u8> {
        let is_load = |one: &Waiting| one.way == Way::Load && one.pages.device == page;
        if let Some(i) = moves.iter().rposition(is_load) {
            return self.swap_bytes(moves[i].pages.swap, &moves[..i]);
        }
        let mut bytes = vec![0; self.layout.page_bytes() as usize];
        self.inner.borrow().read_page(page, &mut bytes).expect("a page of the pool");
        bytes
    }

    /// Returns the bytes of a swap page after the given waiting moves.
    fn swap_bytes(&self, page: SwapPageId, moves: &[Waiting]) -> Vec<u8> {
        let is_save = |one: &Waiting| one.way == Way::Save && one.pages.swap == page;
        match moves.iter().rposition(is_save) {
            Some(i) => self.device_bytes(moves[i].pages.device, &moves[..i]),
            None => self.inner.borrow_mut().lease(page).as_ref().to_vec(),
        }
    }
}

impl OpenBackend for LateOptions {
    type Backend = Late;

    fn open(self, layout: &PoolLayout, table: &TableShape, bounds: impl Into<StepBounds>) -> Result<Late, CpuError> {
        let cpu = self.0.open(layout, table, bounds)?;
        Ok(Late {
            words: cpu.table_words().to_vec(),
            inner: RefCell::new(cpu),
            layout: *layout,
            table: *table,
            waiting: Vec::new(),
            last: Moved::default(),
            reported: Moved::default(),
            inner_id: 0,
        })
    }
}

impl Backend for Late {
    type Error = CpuError;
    forward_backend!((inner.get_mut()): Cpu, identity; types, end, store_cache, rope_store, attend, compact);

    fn begin(&mut self, plan: &BatchPlan<'_>) -> Result<(), CpuError> {
        let first = self.table.page_word(0, 0);
        let named = plan.table_writes.iter().filter(|write| write.index >= first);
        let pages: Vec<_> = named.map(|write| PageId::new(write.value)).collect();
        self.settle_pages(&pages);
        let cpu = self.inner.get_mut();
        cpu.begin(plan)?;
        self.words.copy_from_slice(cpu.table_words());
        Ok(())
    }

    fn copy_pages(&mut self, copies: &[PageCopy]) -> Result<(), CpuError> {
        let pages: Vec<_> = copies.iter().flat_map(|copy| [copy.source, copy.target]).collect();
        self.settle_pages(&pages);
        self.inner.get_mut().copy_pages(copies)
    }

    fn swap_pages(&self) -> u32 {
        self.layout.swap_region_pages()
    }

    fn save_pages(&mut self, id: MoveId, moves: &[PageMove]) -> Result<(), CpuError> {
        self.check(id, moves)?;
        self.inner.get_mut().check_leases(moves, false)?;
        for &PageMove { swap, .. } in moves {
            self.settle(|one| one.pages.swap == swap);
            self.inner.get_mut().lease_mut(swap).as_mut().fill(0xff);
        }
        let moves = moves.iter().map(|&pages| Waiting { id, way: Way::Save, pages });
        self.waiting.extend(moves);
        self.last.saved = id;
        Ok(())
    }

    fn load_pages(&mut self, id: MoveId, moves: &[PageMove]) -> Result<(), CpuError> {
        self.check(id, moves)?;
        self.inner.get_mut().check_leases(moves, true)?;
        let garbage = vec![0xff; self.layout.page_bytes() as usize];
        for &PageMove { device, .. } in moves {
            self.settle_pages(&[device]);
            self.inner.get_mut().write_page(device, &garbage)?;
        }
        let moves = moves.iter().map(|&pages| Waiting { id, way: Way::Load, pages });
        self.waiting.extend(moves);
        self.last.loaded = id;
        Ok(())
    }

    fn moved(&mut self) -> Result<Moved, CpuError> {
        let done = self.done();
        self.reported = done;
        if let Some(first) = self.waiting.first().map(|one| one.id) {
            self.settle(|one| one.id == first);
        }
        Ok(done)
    }

    fn synchronize(&mut self) -> Result<(), CpuError> {
        self.settle(|_| true);
        Ok(())
    }
}

impl StateBackend for Late {
    forward_backend!((inner.get_mut()): Cpu, identity; states);
}

impl SwapMemory for Late {
    type Read = CpuRead;
    type Write = CpuWrite;

    fn lease(&mut self, page: SwapPageId) -> CpuRead {
        let mut saves = self.waiting.iter().filter(|one| one.way == Way::Save);
        assert!(saves.all(|one| one.pages.swap != page), "B16: a save writes {page:?}");
        self.inner.get_mut().lease(page)
    }

    fn lease_mut(&mut self, page: SwapPageId) -> CpuWrite {
        assert!(self.waiting.iter().all(|one| one.pages.swap != page), "B16: a move uses {page:?}");
        self.inner.get_mut().lease_mut(page)
    }
}

impl Inspect for Late {
    fn store(&mut self, plan: &BatchPlan<'_>, layer: LayerId, k: &[f32], v: &[f32]) -> Result<(), CpuError> {
        self.store_cache(plan, layer, k.into(), v.into())
    }

    /// Returns the values of a slot after all waiting moves, without applying them.
    fn load(&self, plane: PlaneName, layer: LayerId, slot: SlotId) -> Option<Vec<f32>> {
        let page = self.layout.page_of(slot).0;
        let [now, then] = [&[], &self.waiting[..]].map(|moves| self.device_bytes(page, moves));
        let mut cpu = self.inner.borrow_mut();
        cpu.write_page(page, &then).expect("a page of the pool");
        let row = cpu.read_slot(plane, layer, slot).ok();
        cpu.write_page(page, &now).expect("a page of the pool");
        row
    }

    fn read_state(&mut self, plan: &BatchPlan<'_>, layer: LayerId, row: usize) -> Option<Vec<u8>> {
        self.inner.get_mut().read_state(plan, layer, row)
    }

    fn write_state(&mut self, plan: &BatchPlan<'_>, layer: LayerId, row: usize, bytes: &[u8]) {
        self.inner.get_mut().write_state(plan, layer, row, bytes);
    }

    fn words(&self) -> Option<&[u32]> {
        Some(&self.words)
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
