//! Sparse reads on a GPU: channels for a pool's labels, attention over the selected positions, and measurement of
//! channels.
//!
//! Rows of one new token read a selection. All layers write their selections at the same address, so that graphs can
//! contain it. A measuring pass copies q, K and V of each layer to the host, where [`Measured`] accumulates q and K.
//! This pass is slow and runs once.

use kvarena::backend::cuda::{Cuda, DeviceBuffer, DeviceRows, DeviceRowsMut, PinnedBuffer};
use kvarena::backend::{Queries, Select, Selection, SparseBackend};
use kvarena::layout::LabelChannels;
use kvarena::plan::SlotMapping;
use kvarena::{Attend, Backend, BatchPlan, LayerId, PoolConfig};

use super::device::Device;
use super::error::GpuResult;
use super::weights::{Share, qkv_stride};
use crate::config::ModelConfig;
use crate::error::{Error, Result};
use crate::sparse::channels::Measured;

/// The selection of the positions that generating streams read.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Reading {
    /// Number of positions for each kv head.
    pub top: u32,
    /// The channels that select them, of a whole model or of a rank's heads.
    pub labels: LabelChannels,
}

impl Reading {
    /// Returns a rank's part of a whole model's channels.
    ///
    /// # Errors
    /// The channels belong to another model.
    pub fn of_rank(&self, model: &ModelConfig, share: Share) -> Result<Self> {
        let pool = PoolConfig {
            layers: model.layers as u32,
            shape: model.kv_shape(),
            label_channels: self.labels.channels(),
            tp_size: share.ranks as u32,
            tp_rank: share.rank as u32,
            ..PoolConfig::default()
        };
        let labels = self.labels.local(&pool);
        let labels = labels.map_err(|error| Error::request(format!("--labels: {error}")))?;
        Ok(Self { labels, ..*self })
    }
}

/// Selected positions on the device.
#[derive(Debug)]
pub(super) struct Chosen {
    pub(super) top: u32,
    /// u32 `[rows, kv_heads, top]`, reused by each layer.
    positions: DeviceBuffer,
}

impl Chosen {
    /// Allocates memory for `top` positions of each kv head, for this many rows.
    pub(super) fn new(device: &Device, top: u32, (rows, kv_heads): (usize, usize)) -> GpuResult<Self> {
        Ok(Self { top, positions: device.zeros(4 * rows * kv_heads * top as usize)? })
    }

    /// Computes a layer's attention. Rows of one new token read their selection; other rows read all visible tokens.
    pub(super) fn attend(
        &mut self,
        backend: &mut Cuda,
        (plan, layer): (&BatchPlan<'_>, LayerId),
        attend: &Attend,
        q: Queries<DeviceRows<'_>, DeviceRows<'_>>,
        out: DeviceRowsMut<'_>,
    ) -> GpuResult<()> {
        if plan.rows.iter().all(|row| row.extend_len != 1) {
            return Ok(backend.attend_queries(plan, layer, attend, q, out, None)?);
        }
        let select = Select { q_heads: attend.q_heads, top: self.top, window: attend.window };
        backend.select(plan, layer, &select, q.rows, self.positions.rows_mut(0, None))?;
        let selection = Selection { positions: self.positions.rows(0, None), top: self.top };
        Ok(backend.attend_selected(plan, layer, attend, selection, q, out, None)?)
    }
}

/// Measures the importance of each channel of K on the host.
#[derive(Debug)]
pub(super) struct Gauge {
    measured: Measured,
    /// bf16 rows that begin with q and k.
    rows: PinnedBuffer,
    /// Count of numbers in a row: of q, of K, and of the whole row.
    widths: [usize; 3],
}

impl Gauge {
    /// Starts an empty measurement, for steps of at most this many tokens.
    pub(super) fn new(device: &Device, config: &ModelConfig, tokens: usize) -> GpuResult<Self> {
        let [q, k] = [config.q_heads, config.kv_heads].map(|heads| heads * config.head_dim);
        let widths = [q, k, qkv_stride(config)];
        let rows = PinnedBuffer::new(&device.gpu, 2 * tokens * widths[2])?;
        Ok(Self { measured: Measured::new(config), rows, widths })
    }

    /// Measures a layer's rotated rows of q and k, after waiting for them.
    pub(super) fn measure(&mut self, device: &Device, plan: &BatchPlan<'_>, layer: usize, qkv: u64) -> GpuResult<()> {
        // Padding comes last and has no slots.
        let tokens = match plan.slot_mapping {
            SlotMapping::I32(slots) => slots.iter().filter(|&&slot| slot >= 0).count(),
            SlotMapping::I64(slots) => slots.iter().filter(|&&slot| slot >= 0).count(),
        };
        let [q_width, k_width, width] = self.widths;
        // SAFETY: the step's rows have that length, and nothing accesses the copy before the wait.
        unsafe { device.copy_to_host(&mut self.rows, 0, qkv, 2 * tokens * width) }?;
        device.stream.synchronize()?;
        let rows: &[half::bf16] = bytemuck::cast_slice(self.rows.as_slice());
        let wide = |row: &[half::bf16]| row.iter().map(|x| x.to_f32()).collect::<Vec<_>>();
        for row in rows[..tokens * width].chunks_exact(width) {
            let (q, k) = row.split_at(q_width);
            self.measured.measure(layer, &wide(q), &wide(&k[..k_width]));
        }
        Ok(())
    }

    pub(super) fn measured(self) -> Measured {
        self.measured
    }
}

/// Returns the first channels of each head, to measure times with random weights. With such weights, no channel is more
/// important than another.
pub fn first_channels(model: &ModelConfig, count: u32) -> LabelChannels {
    let (layers, kv_heads) = (model.layers as u32, model.kv_heads as u32);
    let values = (0..layers * kv_heads).flat_map(|_| 0..count).collect();
    LabelChannels::new(layers, kv_heads, count, values).expect("each head has its channels in order")
}

/// Returns how many of `bytes` remain for K and V. The rest is for labels of `channels` channels, and for the scores of
/// `streams` streams of the model's maximum length.
pub fn pool_bytes(model: &ModelConfig, (streams, channels): (u32, u32), bytes: u64) -> u64 {
    let ModelConfig { kv_heads, head_dim, max_len, .. } = *model;
    let scores = 4 * kv_heads as u64 * u64::from(streams) * max_len as u64;
    let (rows, channels) = (2 * head_dim as u64, u64::from(channels));
    bytes.saturating_sub(scores) / (rows + channels) * rows
}
