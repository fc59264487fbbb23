//! Where the layers of a group store K and V.
//!
//! Not here: the pool's memory (`pool.rs`).

use super::labels::Labels;
use super::scales::Scales;
use crate::layout::{KvScales, LabelChannels, PlaneName, PoolLayout, Strides};

/// Where the layers of a group store K and V, and what is stored beside them.
#[derive(Debug)]
pub(super) struct Planes {
    /// The pool as these layers store it.
    pub layout: PoolLayout,
    /// Where K and V lie; latent rows are both.
    pub kv: [Strides; 2],
    /// Where the rest of latent rows lies, if they are quantised.
    pub rope: Option<Strides>,
    pub scales: Scales,
    pub labels: Labels,
}

impl Planes {
    /// Of a pool, for which scales and channels are right.
    pub fn new(
        layout: &PoolLayout,
        scales: Option<&KvScales>,
        labels: Option<&LabelChannels>,
    ) -> Self {
        let names = match layout.is_latent() {
            true => [PlaneName::Latent; 2],
            false => [PlaneName::K, PlaneName::V],
        };
        let strides = |name| layout.strides(name).expect("the pool has its shape's planes");
        Self {
            layout: *layout,
            kv: names.map(strides),
            rope: layout.strides(PlaneName::Rope),
            scales: Scales::new(layout, scales.cloned()),
            labels: Labels::new(layout, labels.cloned()),
        }
    }

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        self.scales.bytes() + self.labels.bytes()
    }
}
