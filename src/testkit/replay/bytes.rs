//! Recognisable K and V: each number tells its token's text, layer, head and place.

use crate::backend::{Backend, Cpu, Null};
use crate::id::{LayerId, Scope, SlotId, TokenId};
use crate::layout::{PlaneName, PoolLayout};
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

    /// What a slot holds in a plane, `[heads, elements]`; nothing where the backend holds none.
    fn load(&self, plane: PlaneName, layer: LayerId, slot: SlotId) -> Option<Vec<f32>>;

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

    fn load(&self, _: PlaneName, _: LayerId, _: SlotId) -> Option<Vec<f32>> {
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

    fn load(&self, plane: PlaneName, layer: LayerId, slot: SlotId) -> Option<Vec<f32>> {
        self.slot(plane, layer, slot).ok().map(|numbers| numbers.to_f32())
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

/// What a token stores in one of a pool's planes, `[heads, elements]`: whole numbers below 256, which every dtype holds
/// exactly.
pub(super) fn numbers(layout: &PoolLayout, mark: u64, plane: usize, layer: LayerId) -> Vec<f32> {
    let (all, of) = (layout.planes(), &layout.planes()[plane]);
    let row = all.len() as u64 * u64::from(layer.raw()) + plane as u64;
    let count = u64::from(of.heads * of.elements);
    (0..count).map(|i| (mix(mark ^ mix(row * count + i)) & 0xff) as f32).collect()
}
