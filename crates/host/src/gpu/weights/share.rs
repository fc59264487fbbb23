//! The share of a model that a rank has.

use std::ops::Range;

use crate::config::ModelConfig;
use crate::delta::DeltaConfig;
use crate::experts::ExpertsConfig;
use crate::gpu::error::{GpuError, GpuResult};

/// A rank and the number of ranks that share a model.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Share {
    /// Number of the rank.
    pub rank: usize,
    /// Number of ranks.
    pub ranks: usize,
}

impl Share {
    /// The whole model.
    pub const WHOLE: Self = Self { rank: 0, ranks: 1 };

    /// Returns the shape of the rank's model: its part of the heads and of the MLP's width.
    ///
    /// # Errors
    /// A size is not a multiple of the number of ranks.
    pub fn of(self, config: &ModelConfig) -> GpuResult<ModelConfig> {
        let ModelConfig { q_heads, kv_heads, intermediate, .. } = *config;
        let ranks = self.ranks;
        let part = |value: usize, what| {
            if value.is_multiple_of(ranks) { Ok(value / ranks) } else { Err(GpuError::Ranks { ranks, what }) }
        };
        let (q_heads, kv_heads) = (part(q_heads, "query heads")?, part(kv_heads, "heads of K and V")?);
        let intermediate = part(intermediate, "intermediate size")?;
        let delta_part = |delta: &DeltaConfig| -> GpuResult<DeltaConfig> {
            let key_heads = part(delta.key_heads, "key heads of Gated DeltaNet")?;
            let value_heads = part(delta.value_heads, "value heads of Gated DeltaNet")?;
            Ok(DeltaConfig { key_heads, value_heads, ..delta.clone() })
        };
        Ok(ModelConfig {
            q_heads,
            kv_heads,
            intermediate,
            delta: config.delta.as_ref().map(delta_part).transpose()?,
            // Each expert has the width that the layer's MLP would have.
            experts: config.experts.map(|experts| ExpertsConfig { intermediate, ..experts }),
            ..config.clone()
        })
    }

    /// Returns the rank's part of `count` rows that are consecutive from `first` on.
    pub(super) fn rows(self, first: usize, count: usize) -> Range<usize> {
        let part = count / self.ranks;
        let first = first + self.rank * part;
        first..first + part
    }
}
