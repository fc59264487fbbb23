//! Recognisable K and V: each number tells its token's text, layer, head and place.

use crate::backend::{Backend, Cpu, Null};
use crate::id::{LayerId, Scope, SlotId, TokenId};
use crate::layout::{Kv, PoolLayout};
use crate::plan::BatchPlan;
use crate::testkit::rng::mix;

/// A backend whose bytes the replay can write and read.
pub trait Inspect: Backend {
    /// Stores a step's K and V of one layer, `[tokens, kv_heads, head_dim]` small whole numbers each.
    ///
    /// # Errors
    /// The backend's own.
    fn store(
        &mut self,
        plan: &BatchPlan<'_>,
        layer: LayerId,
        k: &[f32],
        v: &[f32],
    ) -> Result<(), Self::Error>;

    /// K or V of a slot, `[kv_heads, head_dim]`; nothing where the backend holds none.
    fn load(&self, kv: Kv, layer: LayerId, slot: SlotId) -> Option<Vec<f32>>;

    /// The words of its page tables; nothing where it holds none.
    fn words(&self) -> Option<&[u32]>;

    /// How many calls failed.
    fn failures(&self) -> u64 {
        0
    }
}

impl Inspect for Null {
    fn store(
        &mut self,
        _: &BatchPlan<'_>,
        _: LayerId,
        _: &[f32],
        _: &[f32],
    ) -> Result<(), Self::Error> {
        Ok(())
    }

    fn load(&self, _: Kv, _: LayerId, _: SlotId) -> Option<Vec<f32>> {
        None
    }

    fn words(&self) -> Option<&[u32]> {
        None
    }
}

impl Inspect for Cpu {
    fn store(
        &mut self,
        plan: &BatchPlan<'_>,
        layer: LayerId,
        k: &[f32],
        v: &[f32],
    ) -> Result<(), Self::Error> {
        self.store_cache(plan, layer, k.into(), v.into())
    }

    fn load(&self, kv: Kv, layer: LayerId, slot: SlotId) -> Option<Vec<f32>> {
        self.slot(kv, layer, slot).ok().map(|numbers| numbers.to_f32())
    }

    fn words(&self) -> Option<&[u32]> {
        Some(self.table_words())
    }
}

/// What stands for the text up to each token: `marks[i]` depends on the scope and on tokens `0..=i`.
pub(super) fn marks(scope: Scope, tokens: &[TokenId]) -> Vec<u64> {
    let mut mark = mix(mix(scope.namespace.raw()) ^ scope.generation);
    let step = |token: &TokenId| {
        mark = mix(mark.wrapping_mul(31) ^ u64::from(token.raw() + 1));
        mark
    };
    tokens.iter().map(step).collect()
}

/// K or V of a token, `[kv_heads, head_dim]`: whole numbers below 256, which every dtype holds exactly.
pub(super) fn numbers(layout: &PoolLayout, mark: u64, kv: Kv, layer: LayerId) -> Vec<f32> {
    let plane = 2 * u64::from(layer.raw()) + u64::from(kv == Kv::V);
    let count = u64::from(layout.kv_heads() * layout.head_dim());
    (0..count).map(|i| (mix(mark ^ mix(plane * count + i)) & 0xff) as f32).collect()
}
