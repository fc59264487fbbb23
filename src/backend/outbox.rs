//! [`Outbox`]: a backend without bytes that hands the work on pages to the host as data.
//!
//! The backend keeps a copy of the page tables, because a compaction names places of rows: the tables that it means
//! have changed by the time the host reads its work.

use bytemuck::{Pod, Zeroable};

use super::{Attend, Backend, Moved, OpenBackend, PlanError, Queries, Rope, check};
use crate::config::StepBounds;
use crate::error::{Count, displayed};
use crate::id::{LayerId, MoveId, SlotId};
use crate::layout::{PoolLayout, TableShape};
use crate::plan::{BatchPlan, Compaction, PageCopy, PageMove, PlanBytesError, StepEnd};

/// One slot to copy within a pool, in the layers of one track. 16 bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct SlotMove {
    /// Source slot.
    pub source: SlotId,
    /// Target slot.
    pub target: SlotId,
}

/// Work on pages that the host does for an [`Outbox`]. The numbers name the rules of a [`Backend`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Work<'a> {
    /// Copies pages within the pool, all planes of all lanes. Sources and targets are disjoint ([B5](Backend)).
    Copy(&'a [PageCopy]),
    /// Moves slots in all layers of a track, and of groups that share its pages, in this order: no move reads a slot
    /// that an earlier one wrote ([B11](Backend)).
    Slots(u32, &'a [SlotMove]),
    /// Copies pages of the pool to swap pages ([B12](Backend)). The host reports it by [`Outbox::saved`].
    Save(MoveId, &'a [PageMove]),
    /// Copies swap pages to pages of the pool ([B12, B13](Backend)). The host reports it by [`Outbox::loaded`].
    Load(MoveId, &'a [PageMove]),
}

/// Items for which a new outbox has memory, of each type.
const ITEMS: usize = 1024;

/// Magic number and version of the byte form of work.
const MAGIC: u64 = u64::from_le_bytes(*b"kvwork01");

/// First words of the byte form of one piece of work.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Header {
    magic: u64,
    kind: u64,
    /// The track of slots, the id of a save or a load, or 0.
    number: u64,
    items: u64,
}

impl Work<'_> {
    /// Appends the byte form, little-endian: `"kvwork01"`, the kind (0 to 3 in the order of the variants), the track or
    /// the id of the move, and the number of items in 64 bits each; then the items in their order in memory. O(items).
    pub fn to_bytes(&self, out: &mut Vec<u8>) {
        let (kind, number, items, bytes): (u64, u64, usize, &[u8]) = match *self {
            Self::Copy(copies) => (0, 0, copies.len(), bytemuck::cast_slice(copies)),
            Self::Slots(track, slots) => (1, track.into(), slots.len(), bytemuck::cast_slice(slots)),
            Self::Save(id, moves) => (2, id.raw(), moves.len(), bytemuck::cast_slice(moves)),
            Self::Load(id, moves) => (3, id.raw(), moves.len(), bytemuck::cast_slice(moves)),
        };
        out.extend_from_slice(bytemuck::bytes_of(&Header { magic: MAGIC, kind, number, items: items as u64 }));
        out.extend_from_slice(bytes);
    }

    /// Passes each piece of work in `bytes` to `each`, in order. O(items).
    ///
    /// # Errors
    /// [`PlanBytesError::Magic`], [`PlanBytesError::Length`], [`PlanBytesError::Work`]: `each` has received the work
    /// before the wrong bytes. The host checks whether pages and slots exist.
    pub fn from_bytes(mut bytes: &[u8], mut each: impl FnMut(Work<'_>)) -> Result<(), PlanBytesError> {
        while !bytes.is_empty() {
            bytes = Self::first_from_bytes(bytes, &mut each)?;
        }
        Ok(())
    }

    /// Passes the first piece of work to `each`, and returns the bytes after it.
    fn first_from_bytes<'a>(bytes: &'a [u8], each: &mut impl FnMut(Work<'_>)) -> Result<&'a [u8], PlanBytesError> {
        let length = PlanBytesError::Length { actual: bytes.len() };
        let (header, rest) = bytes.split_first_chunk::<{ size_of::<Header>() }>().ok_or(length)?;
        let Header { magic, kind, number, items } = bytemuck::pod_read_unaligned(header);
        if magic != MAGIC {
            return Err(PlanBytesError::Magic);
        }
        let size = if kind == 1 { size_of::<SlotMove>() } else { size_of::<PageCopy>() };
        let size = usize::try_from(items).ok().and_then(|items| items.checked_mul(size));
        let (list, rest) = size.and_then(|size| rest.split_at_checked(size)).ok_or(length)?;
        let id = MoveId::new(number);
        match kind {
            0 => each(Work::Copy(&bytemuck::pod_collect_to_vec(list))),
            1 => {
                let track = u32::try_from(number).map_err(|_| PlanBytesError::Work { kind, number })?;
                each(Work::Slots(track, &bytemuck::pod_collect_to_vec(list)));
            }
            2 => each(Work::Save(id, &bytemuck::pod_collect_to_vec(list))),
            3 => each(Work::Load(id, &bytemuck::pod_collect_to_vec(list))),
            _ => return Err(PlanBytesError::Work { kind, number }),
        }
        Ok(rest)
    }
}

displayed! {
    /// An [`Outbox`]'s error.
    #[derive(Clone, Copy, PartialEq, Debug)]
    #[non_exhaustive]
    pub enum OutboxError {
        /// Work for an earlier plan still waits: the host has not called [`Outbox::drain`] since. The step is aborted.
        Undrained { pieces: usize } =>
            "the outbox has {} of work that an earlier plan waits for: drain it before the next plan",
            Count(pieces, "piece");
        /// The plan or the list does not fit the pool.
        Plan(error: PlanError) => "{error}";
    }
}

impl std::error::Error for OutboxError {}

impl From<PlanError> for OutboxError {
    fn from(error: PlanError) -> Self {
        Self::Plan(error)
    }
}

/// The kind of a piece of work; its items are the next ones in the list of their type.
#[derive(Clone, Copy, Debug)]
enum Kind {
    Copy,
    Slots(u32),
    Save(MoveId),
    Load(MoveId),
}

/// Options of an [`Outbox`].
#[derive(Clone, Copy, Debug, Default)]
pub struct OutboxOptions;

/// A backend without bytes, for a host with tensors and kernels of its own.
///
/// Attention and stores are the host's: calls of [`store_cache`](Backend::store_cache),
/// [`rope_store`](Backend::rope_store) and [`attend`](Backend::attend) have no effect. Page tables reach the host by
/// the plan ([`table_writes`](BatchPlan::table_writes)), by [`Engine::packed`](crate::Engine::packed) or by the
/// engine's other forms. All other work is [`Work`], which the host [drains](Outbox::drain) after each plan and does
/// before it launches the plan's step.
///
/// The host's swap memory exists as a whole from the beginning. A copy that fails later invalidates cached pages, so
/// the host calls [`Engine::reset`](crate::Engine::reset) or stops.
#[derive(Debug)]
pub struct Outbox {
    layout: PoolLayout,
    table: TableShape,
    /// The page tables.
    words: Vec<u32>,
    /// The waiting work in order; the items of a piece are in the list of their type.
    work: Vec<(Kind, usize)>,
    copies: Vec<PageCopy>,
    slots: Vec<SlotMove>,
    moves: Vec<PageMove>,
    /// Number of pieces that waited when the last step began.
    due: usize,
    /// The last save and load that the host received, and those that it has done.
    last: Moved,
    done: Moved,
}

impl Outbox {
    /// Passes all waiting work to `each`, in order. O(items). Allocates nothing.
    pub fn drain(&mut self, mut each: impl FnMut(Work<'_>)) {
        let (mut copies, mut slots, mut moves) = (&self.copies[..], &self.slots[..], &self.moves[..]);
        for &(kind, len) in &self.work {
            match kind {
                Kind::Copy => each(Work::Copy(take(&mut copies, len))),
                Kind::Slots(track) => each(Work::Slots(track, take(&mut slots, len))),
                Kind::Save(id) => each(Work::Save(id, take(&mut moves, len))),
                Kind::Load(id) => each(Work::Load(id, take(&mut moves, len))),
            }
        }
        self.work.clear();
        self.copies.clear();
        self.slots.clear();
        self.moves.clear();
        self.due = 0;
    }

    /// Reports that all saves up to `id` are complete ([B14](Backend)): the device has done the copies. O(1).
    ///
    /// Plans do not wait for the report. [`Engine::puts`](crate::Engine::puts) and
    /// [`Engine::fetch`](crate::Engine::fetch) use only swap pages whose saves are reported.
    pub fn saved(&mut self, id: MoveId) {
        self.done.saved = self.done.saved.max(id);
    }

    /// Reports that all loads up to `id` are complete ([B14](Backend)): the device has done the copies. O(1).
    ///
    /// Plans do not wait for the report. [`Engine::is_loading`](crate::Engine::is_loading) returns true until then, and
    /// [`Engine::fetch`](crate::Engine::fetch) uses only swap pages whose loads are reported.
    pub fn loaded(&mut self, id: MoveId) {
        self.done.loaded = self.done.loaded.max(id);
    }

    fn push_moves(&mut self, kind: Kind, id: MoveId, moves: &[PageMove]) -> Result<(), OutboxError> {
        check::moves(id, moves, &self.layout, self.last)?;
        self.moves.extend_from_slice(moves);
        self.work.push((kind, moves.len()));
        Ok(())
    }

    fn slot(&self, compaction: Compaction, track: u32, place: u32) -> SlotId {
        let page_size = self.layout.page_size();
        let page = self.table.track_page(&self.words, compaction.row, track, place / page_size);
        SlotId::new(u64::from(page.raw()) * u64::from(page_size) + u64::from(place % page_size))
    }
}

/// Removes the first `len` items of a list, and returns them.
fn take<'a, T>(list: &mut &'a [T], len: usize) -> &'a [T] {
    let (first, rest) = list.split_at(len);
    *list = rest;
    first
}

impl OpenBackend for OutboxOptions {
    type Backend = Outbox;

    fn open(self, layout: &PoolLayout, table: &TableShape, _: impl Into<StepBounds>) -> Result<Outbox, OutboxError> {
        Ok(Outbox {
            layout: *layout,
            table: *table,
            words: vec![0; table.words()],
            // The lists of usual steps never grow.
            work: Vec::with_capacity(64),
            copies: Vec::with_capacity(ITEMS),
            slots: Vec::with_capacity(ITEMS),
            moves: Vec::with_capacity(ITEMS),
            due: 0,
            last: Moved::default(),
            done: Moved::default(),
        })
    }
}

impl Backend for Outbox {
    type Error = OutboxError;
    type Rows<'a> = ();
    type RowsMut<'a> = ();
    type Sinks<'a> = ();
    type Lse<'a> = ();

    /// # Errors
    /// [`OutboxError::Undrained`], and [`OutboxError::Plan`] for table writes that do not fit.
    fn begin(&mut self, plan: &BatchPlan<'_>) -> Result<(), OutboxError> {
        if self.due > 0 {
            return Err(OutboxError::Undrained { pieces: self.work.len() });
        }
        check::table_writes(plan.table_writes, &self.layout, &self.table)?;
        for write in plan.table_writes {
            self.words[write.index as usize] = write.value;
        }
        self.due = self.work.len();
        Ok(())
    }

    fn end(&mut self, _: StepEnd) {}

    fn store_cache(&mut self, _: &BatchPlan<'_>, _: LayerId, _: (), _: ()) -> Result<(), OutboxError> {
        Ok(())
    }

    fn rope_store(&mut self, _: &BatchPlan<'_>, _: LayerId, _: &Rope<(), ()>, _: ()) -> Result<(), OutboxError> {
        Ok(())
    }

    fn attend_queries(
        &mut self,
        _: &BatchPlan<'_>,
        _: LayerId,
        _: &Attend,
        _: Queries<(), ()>,
        _: (),
        _: Option<()>,
    ) -> Result<(), OutboxError> {
        Ok(())
    }

    fn copy_pages(&mut self, copies: &[PageCopy]) -> Result<(), OutboxError> {
        check::copies(copies, (self.layout.page_count(), self.layout.page_count()))?;
        self.copies.extend_from_slice(copies);
        self.work.push((Kind::Copy, copies.len()));
        Ok(())
    }

    fn compact(&mut self, compactions: &[Compaction]) -> Result<(), OutboxError> {
        check::compactions(compactions, &self.layout, &self.table)?;
        for track in 0..self.table.tracks {
            let before = self.slots.len();
            for &compaction in compactions {
                for (source, target) in compaction.moves() {
                    let [source, target] = [source, target].map(|place| self.slot(compaction, track, place));
                    self.slots.push(SlotMove { source, target });
                }
            }
            self.work.push((Kind::Slots(track), self.slots.len() - before));
        }
        Ok(())
    }

    fn swap_pages(&self) -> u32 {
        self.layout.swap_region_pages()
    }

    fn save_pages(&mut self, id: MoveId, moves: &[PageMove]) -> Result<(), OutboxError> {
        self.push_moves(Kind::Save(id), id, moves)?;
        self.last.saved = id;
        Ok(())
    }

    fn load_pages(&mut self, id: MoveId, moves: &[PageMove]) -> Result<(), OutboxError> {
        self.push_moves(Kind::Load(id), id, moves)?;
        self.last.loaded = id;
        Ok(())
    }

    /// # Errors
    /// None: the host reports what is done.
    fn moved(&mut self) -> Result<Moved, OutboxError> {
        Ok(self.done)
    }

    /// # Errors
    /// None: the call does not wait, because the work is the host's.
    fn synchronize(&mut self) -> Result<(), OutboxError> {
        Ok(())
    }
}
