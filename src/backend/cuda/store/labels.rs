//! Labels on the device: their channels, their plane, and the scores of selections.
//!
//! Scores of all rows with lists share one buffer, in chunks of [`SCORE_TOKENS`] positions. Staging a plan sends the
//! index of each row's first chunk to the device.

use super::pool::Pool;
use crate::backend::Operand;
use crate::backend::cuda::check::row_stride;
use crate::backend::cuda::driver::gpu::Gpu;
use crate::backend::cuda::driver::launch::Start;
use crate::backend::cuda::driver::memory::{DeviceBuffer, DeviceRows};
use crate::backend::cuda::driver::raw::RawStream;
use crate::backend::cuda::error::{CudaError, Limit};
use crate::backend::cuda::kernels::params::{
    AttendParams, CANDIDATES, SCORE_TOKENS, SelectParams, StoreLabelsParams, is_tree, wide_magic,
};
use crate::backend::cuda::kernels::{Kernel, SELECT_TOP, STORE_LABELS, Selection};
use crate::backend::cuda::plan::image::Image;
use crate::id::LayerId;
use crate::layout::{LabelChannels, LayerPlace, PlaneName, PoolLayout, Strides};
use crate::plan::{BatchPlan, BatchRow};

/// Number of CTAs of `score_labels_*` for each multiprocessor.
const SCORE_RESIDENT: u32 = 3;
/// Number of CTAs of `select_top` that a multiprocessor holds.
const TOP_RESIDENT: u32 = 2;
/// Maximum number of CTAs of `select_top` for each list.
const TOP_PARTS: u32 = 8;

/// The labels of a pool.
#[derive(Debug)]
pub struct Labels {
    /// u32 `[layers, kv_heads, channels]`.
    channels: DeviceBuffer,
    channel_count: u32,
    /// Strides of the plane of labels.
    strides: Strides,
    /// The kernel that computes scores.
    score: &'static Kernel,
    pool: u64,
    /// u32 `[key_chunks, kv_heads, SCORE_TOKENS]`.
    keys: DeviceBuffer,
    key_chunks: u32,
    /// For lists with several CTAs: candidates, each a key and a position in u32, `[lists, CANDIDATES]`.
    gathered: DeviceBuffer,
    /// For the same lists: u32 `[lists, 2]`, zero between launches.
    gather_counters: DeviceBuffer,
    /// Whether a selection has been launched or prepared. From then on, staging rejects a plan whose scores exceed the
    /// memory, because a graph may replay the selection.
    pub used: bool,
}

/// Returns the number of chunks of scores of a row; `tree` is set for a draft tree.
fn chunks(row: &BatchRow, tree: bool) -> u32 {
    if row.extend_len == 1 && !tree { row.kv_len.div_ceil(SCORE_TOKENS) } else { 0 }
}

/// Calls `put` with the index of each row's first chunk, and at the end with the number of chunks. Draft trees are
/// marked.
pub fn starts(rows: &[BatchRow], mut put: impl FnMut(u32)) {
    let mut start = 0;
    for row in rows {
        put(start);
        start += chunks(row, is_tree(row));
    }
    put(start);
}

impl Labels {
    /// Creates the labels of a pool with channels `given`, and allocates memory for the scores of `tokens` tokens in
    /// `rows` rows.
    pub fn new(gpu: &Gpu, pool: &Pool, given: &LabelChannels, tokens: u64, rows: u32) -> Result<Self, CudaError> {
        let layout = pool.layout();
        let mut channels = DeviceBuffer::lasting(gpu, size_of_val(given.values()) as u64)?;
        channels.write(0, given.values())?;
        // The last chunk of a row may be partly empty.
        let key_chunks = tokens.div_ceil(SCORE_TOKENS.into()) + u64::from(rows);
        let key_chunks = u32::try_from(key_chunks).unwrap_or(u32::MAX);
        let chunk_bytes = 4 * u64::from(layout.kv_heads()) * u64::from(SCORE_TOKENS);
        let divided = u64::from(gpu.multiprocessors() * TOP_RESIDENT / 2);
        let mut gather_counters = DeviceBuffer::lasting(gpu, 8 * divided)?;
        gather_counters.fill(0)?;
        Ok(Self {
            channels,
            gathered: DeviceBuffer::lasting(gpu, 8 * u64::from(CANDIDATES) * divided)?,
            gather_counters,
            channel_count: given.channels(),
            score: pool.selection().score().expect("pools of 16 bits have labels"),
            strides: layout.strides(PlaneName::Labels).expect("the pool has labels"),
            pool: pool.memory().address(),
            keys: DeviceBuffer::lasting(gpu, u64::from(key_chunks).saturating_mul(chunk_bytes))?,
            key_chunks,
            used: false,
        })
    }

    /// Returns the kernels that stores use, and if `selects`, those that selections use.
    pub fn kernels(pool: &Selection, selects: bool) -> Vec<&'static Kernel> {
        let selection = [pool.score(), Some(SELECT_TOP)].into_iter().flatten().filter(|_| selects);
        std::iter::once(STORE_LABELS).chain(selection).collect()
    }

    /// Rejects a step whose scores exceed the memory.
    pub fn check(&self, plan: &BatchPlan<'_>) -> Result<(), CudaError> {
        let chunks = |row| u64::from(chunks(row, plan.tree(row).is_some()));
        let wanted: u64 = plan.rows.iter().map(chunks).sum();
        let tokens = |chunks: u64| chunks * u64::from(SCORE_TOKENS);
        Limit::SelectTokens.check(tokens(wanted), tokens(self.key_chunks.into()))
    }

    fn channels_of(&self, layout: &PoolLayout, layer: LayerId) -> u64 {
        let layer_bytes = 4 * u64::from(layout.kv_heads()) * u64::from(self.channel_count);
        self.channels.address() + u64::from(layer.raw()) * layer_bytes
    }

    /// Stores the labels of the staged plan's rows of K, which were checked.
    pub fn store(
        &self,
        gpu: &Gpu,
        pool: &Pool,
        image: &Image,
        layer: LayerId,
        k: DeviceRows<'_>,
        stream: RawStream,
    ) -> Result<(), CudaError> {
        let (layout, tokens) = (pool.layout(), image.token_count);
        if tokens == 0 {
            return Ok(());
        }
        let [width, _] = layout.store_widths();
        let k_stride = row_stride(Operand::K, &k.extent, tokens, width, pool.rows())?;
        let LayerPlace { track, lane, .. } = layout.place(layer);
        let params = StoreLabelsParams {
            k: k.extent.address,
            slots: image.slots_of(track),
            channels: self.channels_of(layout, layer),
            labels: self.pool + self.strides.lane_origin(lane),
            page_stride: self.strides.page,
            slot_stride: self.strides.slot,
            head_stride: self.strides.head,
            k_stride,
            page_magic: wide_magic(layout.page_size().into()),
            page_size: layout.page_size(),
            tokens: tokens as u32,
            kv_heads: layout.kv_heads(),
            head_dim: layout.head_dim(),
            channel_count: self.channel_count,
            slot_bytes: image.slot_bytes as u32,
        };
        let labels = tokens as u64 * u64::from(layout.kv_heads()) * u64::from(self.channel_count);
        let blocks = labels.div_ceil(STORE_LABELS.threads().into());
        let grid = (u32::try_from(blocks).unwrap_or(u32::MAX), 1);
        // SAFETY: slots are in the pool (checked when staged), rows are long enough (checked by the store of K).
        unsafe { gpu.launch(STORE_LABELS, grid, (STORE_LABELS.threads(), 1), stream, &params, Start::Pdl) }
    }

    /// Fills lists `[rows, kv_heads, top]` at `positions`; `attend` has q, tables and rows of the staged plan.
    ///
    /// # Safety
    /// The addresses have q for every token of the staged step, and space for all lists.
    pub unsafe fn select(
        &self,
        gpu: &Gpu,
        pool: &Pool,
        image: &Image,
        (layer, attend): (LayerId, AttendParams),
        (positions, top): (u64, u32),
        (start, stream): (Start, RawStream),
    ) -> Result<(), CudaError> {
        let layout = pool.layout();
        let params = SelectParams {
            attend: AttendParams {
                k: self.pool + self.strides.lane_origin(layout.place(layer).lane),
                page_stride: self.strides.page,
                slot_stride: self.strides.slot,
                head_stride: self.strides.head,
                ..attend
            },
            channels: self.channels_of(layout, layer),
            starts: image.starts,
            keys: self.keys.address(),
            positions,
            gathered: self.gathered.address(),
            gather_counters: self.gather_counters.address(),
            channel_count: self.channel_count,
            head_dim: layout.head_dim(),
            top,
            key_chunks: self.key_chunks,
            ..SelectParams::default()
        };
        let score = self.score;
        let kv_heads = layout.kv_heads();
        let grid = (kv_heads.max(SCORE_RESIDENT * gpu.multiprocessors()), 1);
        // SAFETY: the caller guarantees the addresses; the kernel skips rows whose scores exceed the memory.
        unsafe { gpu.launch(score, grid, (score.threads(), 1), stream, &params, start) }?;
        let lists = image.row_count as u32 * kv_heads;
        // Lists have several CTAs only if the device holds at least two for each list. `new` allocates scratch for the
        // maximum number of such lists.
        let parts = (TOP_RESIDENT * gpu.multiprocessors() / lists).clamp(1, TOP_PARTS);
        let grid = (lists, parts);
        // SAFETY: the caller guarantees the addresses.
        unsafe { gpu.launch(SELECT_TOP, grid, (SELECT_TOP.threads(), 1), stream, &params, Start::Pdl) }
    }
}
