//! The staged plan: one step's arrays at fixed device addresses, which all kernels of the step read.
//!
//! A plan's image is contiguous. One launch sends it together with the plan's table writes:
//!
//! ```text
//! slots [tokens] | positions [tokens] | rows [rows] | with labels: first score chunk of each row [rows + 1]
//!     | slots of further tracks [tracks - 1, tokens] | with states: their pages, and the first token of each row
//!     | rows cut at the ends of chunks, for each chunk size
//!     | decode split of each variant | plan of shared spans of each variant that has one
//! ```
//!
//! Addresses depend only on the numbers of tokens and rows, the slot width, and the prepared variants of attention. A
//! captured graph can therefore be replayed for any later plan with the same [`GraphKey`]. Padding can give a smaller
//! plan the numbers of tokens and rows of that key. There is one image: the stream orders work, so the next plan may be
//! sent once the last launch of this plan is submitted. A launch stages its plan if necessary. A plan is identified by
//! its step, its numbers of tokens and rows, and its slot width. Launches use the addresses of the checked image, so a
//! plan with different contents cannot redirect a write.
//!
//! If a row is a draft tree, the image marks its page table row. Masks have their own memory. A step without trees
//! neither sends nor reads masks. A graph without extend kernels serves plans with trees and plans without.

use super::chunk_rows::{self, ChunkRows};
use super::image::{Image, StepLimits, put};
use super::ring::{Payload, UploadRing};
use super::states;
use super::tables::Tables;
use crate::backend::cuda::attention::graph_key::GraphKey;
use crate::backend::cuda::attention::shared::SharedDecode;
use crate::backend::cuda::attention::split::{DECODE_UNIT, decode_extra};
use crate::backend::cuda::attention::variant_table::Variants;
use crate::backend::cuda::driver::gpu::Gpu;
use crate::backend::cuda::driver::launch::Start;
use crate::backend::cuda::driver::memory::DeviceBuffer;
use crate::backend::cuda::driver::raw::{RawStream, is_capturing};
use crate::backend::cuda::error::{CudaError, Limit};
use crate::backend::cuda::kernels::params::{TREE_ROW, is_tree};
use crate::backend::cuda::store::labels;
use crate::backend::step_states::{StateColumns, StepStates};
use crate::backend::{Attend, check};
use crate::id::{RowId, StepId};
use crate::layout::{PoolLayout, TableShape};
use crate::plan::{BatchPlan, BatchRow, SlotMapping, SpanCheck, TableWrite};

/// The identity of the plan in the image.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Staged {
    step: StepId,
    tokens: usize,
    rows: usize,
    /// Bytes of one entry of the slot mapping.
    slot_bytes: usize,
    /// Number of attention variants whose splits are in the image.
    variants: usize,
}

impl Staged {
    fn new(plan: &BatchPlan<'_>, variants: usize) -> Self {
        let (tokens, rows) = (plan.token_count(), plan.rows.len());
        Self { step: plan.step, tokens, rows, slot_bytes: slot_bytes(plan), variants }
    }
}

/// Byte offsets in the image.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Offsets {
    positions: usize,
    rows: usize,
    starts: usize,
    /// Slots of the second track, and bytes from one track to the next.
    tracks: usize,
    track_bytes: usize,
    /// Pages of states, and bytes from one page of a state to the next.
    states: usize,
    state_bytes: usize,
    /// Chunk rows.
    chunks: usize,
    decode: usize,
}

impl Offsets {
    /// Returns the offsets for the numbers of a plan.
    fn of_plan(plan: &BatchPlan<'_>, layout: &PoolLayout) -> Self {
        Self::new(plan.token_count(), plan.rows.len(), slot_bytes(plan), layout)
    }

    fn new(tokens: usize, rows: usize, slot_bytes: usize, layout: &PoolLayout) -> Self {
        let track_bytes = (tokens * slot_bytes).next_multiple_of(16);
        let positions = track_bytes;
        let rows_at = positions + (tokens * 4).next_multiple_of(16);
        let starts = rows_at + rows * size_of::<BatchRow>();
        let words = if layout.label_channels() > 0 { rows + 1 } else { 0 };
        let tracks = starts + (4 * words).next_multiple_of(16);
        let states = tracks + (layout.tracks() as usize - 1) * track_bytes;
        let state_bytes = (4 * rows.max(1)).next_multiple_of(16);
        let starts_bytes = (4 * (rows + 1)).next_multiple_of(16);
        let chunks = match layout.state_pages() as usize {
            0 => states,
            pages => states + 2 * pages * state_bytes + starts_bytes,
        };
        let decode = chunks + chunk_rows::bytes(layout, tokens, rows);
        Self { positions, rows: rows_at, starts, tracks, track_bytes, states, state_bytes, chunks, decode }
    }
}

/// The image on the device, and its upload ring.
#[derive(Debug)]
pub struct Stage {
    image: DeviceBuffer,
    ring: UploadRing,
    limits: StepLimits,
    layout: PoolLayout,
    staged: Option<Staged>,
    spans: SpanCheck,
    /// The pages of states of the open steps.
    pub states: StepStates,
    /// The pages of states of the plan that was sent last.
    columns: StateColumns,
    /// The chunk rows of the staged plan.
    chunks: ChunkRows,
    /// The masks of the staged plan, if it has some.
    masks: DeviceBuffer,
    /// Whether the staged plan has masks.
    trees: bool,
    /// The plan's rows as [`mark_trees`] returns them, if it changes any. It marks draft trees. It also sets the row
    /// number of padding to 0 if the number looks marked.
    marked: Vec<BatchRow>,
    /// How to start the next kernel that reads the plan and the page tables before it waits for earlier kernels. After
    /// an upload, the first such kernel starts in order. Later kernels start after the first, so they may use PDL.
    pub start: Start,
}

impl Stage {
    pub fn new(
        gpu: &Gpu,
        layout: &PoolLayout,
        table: &TableShape,
        limits: StepLimits,
        uploads: usize,
    ) -> Result<Self, CudaError> {
        let (tokens, rows) = (limits.tokens as usize, limits.rows as usize);
        let offsets = Offsets::new(tokens, rows, size_of::<i64>(), layout);
        // A new token changes at most one page table word for each track, and one directory word. Further writes,
        // such as those of a long cached prefix, take several uploads.
        let words = layout.tracks() as usize + 1;
        let writes = (words * tokens + 4 * rows) * size_of::<TableWrite>();
        let decode = Variants::image_bytes(gpu, layout, limits) + SharedDecode::image_bytes(gpu, limits);
        let split = decode.max(Variants::extend_bytes(gpu, layout, limits));
        let bytes = offsets.decode + split + writes;
        let states = StepStates::new(table);
        let columns = StateColumns::new(&states, rows);
        Ok(Self {
            image: DeviceBuffer::lasting(gpu, bytes.next_multiple_of(64) as u64)?,
            ring: UploadRing::new(gpu, uploads, bytes)?,
            limits,
            layout: *layout,
            staged: None,
            spans: SpanCheck::default(),
            states,
            columns,
            chunks: ChunkRows::new(layout, table, limits)?,
            trees: false,
            masks: DeviceBuffer::lasting(gpu, (tokens * size_of::<u64>()).next_multiple_of(16) as u64)?,
            marked: Vec::with_capacity(rows),
            start: Start::InOrder,
        })
    }

    pub fn sent_bytes(&self) -> u64 {
        self.ring.sent_bytes()
    }

    pub fn switch_stream(&mut self) {
        self.ring.switch_stream();
    }

    /// Stages the plan if necessary, and returns its addresses. Rejects an upload while the stream is captured.
    pub fn ensure(
        &mut self,
        gpu: &Gpu,
        plan: &BatchPlan<'_>,
        variants: &mut Variants,
        tables: &Tables,
        stream: RawStream,
    ) -> Result<Image, CudaError> {
        let wanted = Staged::new(plan, variants.len());
        if self.staged != Some(wanted) {
            if is_capturing(stream)? {
                return Err(CudaError::NotStaged { step: plan.step });
            }
            self.check(plan, tables)?;
            self.send(gpu, plan, &[], variants, tables, stream)?;
        }
        Ok(self.addresses(wanted))
    }

    /// Returns the addresses of the staged arrays.
    fn addresses(&self, staged: Staged) -> Image {
        let Staged { tokens, rows, slot_bytes, .. } = staged;
        let at = self.image.address();
        let offsets = Offsets::new(tokens, rows, slot_bytes, &self.layout);
        Image {
            slots: at,
            track_slots: at + offsets.tracks as u64,
            track_bytes: offsets.track_bytes as u64,
            positions: at + offsets.positions as u64,
            rows: at + offsets.rows as u64,
            chunks: at + offsets.chunks as u64,
            states: at + offsets.states as u64,
            state_bytes: offsets.state_bytes as u64,
            starts: at + offsets.starts as u64,
            splits: at + offsets.decode as u64,
            masks: self.masks.address(),
            trees: self.trees,
            token_count: tokens,
            row_count: rows,
            slot_bytes,
        }
    }

    /// Returns the address and number of the rows for a variant of attention, which may have chunks.
    pub fn rows_of(&self, image: &Image, chunk: Option<u32>) -> Result<(u64, u32), CudaError> {
        let Some(chunk) = chunk else { return Ok((image.rows, image.row_count as u32)) };
        let (at, _, rows) = self.chunks.all().find(|&(_, size, _)| size == chunk).ok_or(CudaError::Chunk { chunk })?;
        Ok((image.chunks + at as u64, rows.len() as u32))
    }

    /// Rejects chunks that no group of the pool has.
    pub fn check_chunk(&self, attend: &Attend) -> Result<(), CudaError> {
        match attend.chunk {
            Some(chunk) if self.chunks.of_size(chunk).is_none() => Err(CudaError::Chunk { chunk }),
            _ => Ok(()),
        }
    }

    /// Returns the key of the graphs that may be replayed for the staged plan.
    pub fn key(&self, image: &Image, variants: &Variants) -> GraphKey {
        let Image { token_count: tokens, row_count: rows, slot_bytes, trees, .. } = *image;
        GraphKey { tokens, rows, slot_bytes, kernels: variants.key(trees) }
    }

    /// Sends a plan's arrays and applies its table writes.
    pub fn begin(
        &mut self,
        gpu: &Gpu,
        plan: &BatchPlan<'_>,
        variants: &mut Variants,
        tables: &Tables,
        stream: RawStream,
    ) -> Result<(), CudaError> {
        self.check(plan, tables)?;
        check::table_writes(plan.table_writes, &self.layout, tables.shape())?;
        self.states.begin(plan);
        let sent = self.send(gpu, plan, plan.table_writes, variants, tables, stream)?;
        // Each further upload sends as many of the remaining writes as fit one slot of the upload ring.
        let empty = self.empty_payload(tables);
        for writes in plan.table_writes[sent..].chunks(self.ring.slot_bytes() / 8) {
            let mut upload = self.ring.acquire(stream)?;
            put(upload.bytes(), 0, writes);
            upload.send(gpu, &Payload { writes: writes.len(), ..empty }, stream)?;
        }
        Ok(())
    }

    /// Returns a payload without contents.
    fn empty_payload(&self, tables: &Tables) -> Payload {
        let (image, words) = (self.image.address(), tables.address());
        Payload { image_bytes: 0, image, writes_at: 0, writes: 0, words }
    }

    /// Sends the image with as many of `writes` as fit, and returns their number.
    fn send(
        &mut self,
        gpu: &Gpu,
        plan: &BatchPlan<'_>,
        writes: &[TableWrite],
        variants: &mut Variants,
        tables: &Tables,
        stream: RawStream,
    ) -> Result<usize, CudaError> {
        variants.compile(gpu, plan, self.limits, stream)?;
        self.staged = None;
        self.trees = !plan.masks.is_empty();
        self.start = Start::InOrder;
        let offsets = Offsets::of_plan(plan, &self.layout);
        let empty = self.empty_payload(tables);
        if !plan.masks.is_empty() {
            self.ring.send_image(gpu, bytemuck::cast_slice(plan.masks), self.masks.address(), stream)?;
        }
        let plan = &BatchPlan { rows: mark_trees(plan, &mut self.marked), ..*plan };
        let mut upload = self.ring.acquire(stream)?;
        let bytes = upload.bytes();
        put_slots(bytes, 0, plan.slot_mapping);
        for track in 1..self.layout.tracks() {
            let at = offsets.tracks + (track as usize - 1) * offsets.track_bytes;
            put_slots(bytes, at, plan.slots_of(track));
        }
        put(bytes, offsets.positions, plan.positions);
        put(bytes, offsets.rows, plan.rows);
        if offsets.tracks > offsets.starts {
            let mut at = offsets.starts;
            labels::starts(plan.rows, |start| at = put(bytes, at, &[start]));
        }
        let bytes_of_states = &mut bytes[offsets.states..offsets.chunks];
        states::put(&mut self.columns, &self.states, plan, bytes_of_states, offsets.state_bytes);
        self.chunks.cut(plan.rows, plan.token_count());
        for (at, _, rows) in self.chunks.all() {
            put(bytes, offsets.chunks + at, rows);
        }
        let image_bytes = variants.split(plan, &self.chunks, bytes, offsets.decode);
        let writes_at = image_bytes.next_multiple_of(16);
        let fit = writes.len().min((bytes.len() - writes_at) / size_of::<TableWrite>());
        put(bytes, writes_at, &writes[..fit]);
        upload.send(gpu, &Payload { image_bytes, writes_at, writes: fit, ..empty }, stream)?;
        let decode_only = plan.token_count() <= plan.rows.len();
        variants.send_extend(gpu, decode_only, &mut self.ring, stream)?;
        self.staged = Some(Staged::new(plan, variants.len()));
        Ok(fit)
    }

    /// Rejects a plan that would make a kernel access memory outside the pool, the tables or the image, or that exceeds
    /// the counters of a split.
    fn check(&mut self, plan: &BatchPlan<'_>, tables: &Tables) -> Result<(), CudaError> {
        let StepLimits { tokens, rows, .. } = self.limits;
        check::step_tokens(plan, tokens)?;
        Limit::StepRows.check(plan.rows.len() as u64, rows.into())?;
        check::plan(plan, &self.layout, tables.shape())?;
        check::spans(&mut self.spans, plan)?;
        // Beyond its tokens, a row takes the extra units. Rounding up to whole units adds less than one unit.
        let is_quantised = self.layout.views().any(|layout| layout.dtype().is_quantised());
        let overhead = (decode_extra(is_quantised) + 1) * DECODE_UNIT;
        let seen = plan.rows.iter().map(|row| u64::from(row.kv_len) + u64::from(overhead)).sum();
        Limit::SeenTokens.check(seen, most_seen(self.layout.most_kv_heads()))
    }
}

/// Returns the plan's rows with trees marked, in `marked` if they differ. Kernels treat any row from [`TREE_ROW`] on as
/// a tree. The caller may give padding such a row; it becomes row 0.
fn mark_trees<'a>(plan: &BatchPlan<'a>, marked: &'a mut Vec<BatchRow>) -> &'a [BatchRow] {
    if plan.masks.is_empty() && !plan.rows.iter().fold(false, |any, row| any | is_tree(row)) {
        return plan.rows;
    }
    marked.clear();
    marked.extend(plan.rows.iter().map(|row| match plan.tree(row) {
        Some(_) => BatchRow { row: RowId::new(row.row.raw() | TREE_ROW), ..*row },
        // The plan was checked, so only padding has such a row.
        None if is_tree(row) => BatchRow { row: RowId::new(0), ..*row },
        None => *row,
    }));
    marked
}

/// Returns the maximum number of tokens that the rows of a step see together. Decode units of all kv heads are counted
/// in 31 bits.
fn most_seen(kv_heads: u32) -> u64 {
    (u64::from(DECODE_UNIT) << 31) / u64::from(kv_heads)
}

/// Returns the bytes of one entry of the slot mapping.
fn slot_bytes(plan: &BatchPlan<'_>) -> usize {
    match plan.slot_mapping {
        SlotMapping::I32(_) => size_of::<i32>(),
        SlotMapping::I64(_) => size_of::<i64>(),
    }
}

fn put_slots(bytes: &mut [u8], at: usize, slots: SlotMapping<'_>) {
    match slots {
        SlotMapping::I32(slots) => put(bytes, at, slots),
        SlotMapping::I64(slots) => put(bytes, at, slots),
    };
}
