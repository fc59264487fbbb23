//! The places of K and V in the pool, for the layers of one shape.

use super::labels::Labels;
use super::scales::Scales;
use crate::layout::{KvScales, LabelChannels, PlaneName, PoolLayout, Strides};

/// The places of K and V for the layers of one shape, with their scales and labels.
#[derive(Debug)]
pub(super) struct Planes {
    /// The layout of the pool for the layers of this shape.
    pub layout: PoolLayout,
    /// Strides of K and of V; equal for latent rows.
    pub kv: [Strides; 2],
    /// Strides of the rotary part of quantised latent rows.
    pub rope: Option<Strides>,
    pub scales: Scales,
    pub labels: Labels,
}

impl Planes {
    /// Creates the planes of a pool; scales and channels have been checked.
    pub fn new(layout: &PoolLayout, scales: Option<&KvScales>, labels: Option<&LabelChannels>) -> Self {
        let names = if layout.is_latent() { [PlaneName::Latent; 2] } else { [PlaneName::K, PlaneName::V] };
        let strides = |name| layout.strides(name).expect("the pool has its shape's planes");
        Self {
            layout: *layout,
            kv: names.map(strides),
            rope: layout.strides(PlaneName::Rope),
            scales: Scales::new(layout, scales.cloned()),
            labels: Labels::new(layout, labels.cloned()),
        }
    }

    /// Returns the number of bytes of the static scales and label channels, which are outside the pool.
    pub fn bytes(&self) -> usize {
        self.scales.bytes() + self.labels.bytes()
    }
}
