//! Recognisable K and V: each number encodes its token's text, layer, head and place.

use crate::backend::{Backend, Cpu, Null};
use crate::id::{LayerId, Scope, SlotId, TokenId};
use crate::layout::{Plane, PlaneName, PoolLayout, Scaling};
use crate::plan::BatchPlan;
use crate::testkit::quantised::value;
use crate::testkit::rng::mix;

/// A backend whose bytes the replay can write and read.
pub trait Inspect: Backend {
    /// Stores a step's K and V of one layer, `[tokens, kv_heads, head_dim]` numbers each that the pool holds exactly.
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

    /// Whether each save and load since the last call failed, in order; those that are not listed did not.
    fn take_moves(&mut self) -> Vec<bool> {
        Vec::new()
    }

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
        self.read_slot(plane, layer, slot).ok()
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

/// What a token stores in one of a pool's planes, `[heads, elements]`, as it is read again: numbers that the pool holds
/// exactly. In a quantised pool, the bytes encode more of it and the scales less.
pub(super) fn numbers(layout: &PoolLayout, mark: u64, plane: usize, layer: LayerId) -> Vec<f32> {
    let (all, of) = (layout.planes(), &layout.planes()[plane]);
    let row = all.len() as u64 * u64::from(layer.raw()) + plane as u64;
    let count = u64::from(of.heads * of.elements);
    let drawn = (0..count).map(|i| (mix(mark ^ mix(row * count + i)) & 0xff) as u8);
    let source = match of.name {
        PlaneName::KScales if layout.is_latent() => PlaneName::Latent,
        PlaneName::KScales => PlaneName::K,
        PlaneName::VScales => PlaneName::V,
        name => name,
    };
    let scale = |head| scale(layout, mark ^ mix(row_of(layout, source, layer)), head);
    if source != of.name {
        return (0..of.heads).map(scale).collect();
    }
    if !of.dtype.is_quantised() {
        return drawn.map(f32::from).collect();
    }
    let drawn: Vec<u8> = drawn.collect();
    let heads = (0..).zip(drawn.chunks_exact(of.elements as usize));
    heads.flat_map(|(head, bytes)| head_of(layout, of, bytes, scale(head))).collect()
}

/// Numbers of one head that its scale is made from, if it is made: the first one is the largest there is.
fn head_of(layout: &PoolLayout, of: &Plane, bytes: &[u8], scale: f32) -> Vec<f32> {
    debug_assert_eq!(bytes.len(), of.elements as usize);
    const LARGEST: u8 = 0x7e;
    let number = |(i, &byte): (usize, &u8)| {
        let makes = i == 0 && layout.scaling() == Some(Scaling::ByToken);
        let byte = if makes || byte & 0x7f > LARGEST { byte & 0x80 | LARGEST } else { byte };
        value(byte) as f32 * scale
    };
    bytes.iter().enumerate().map(number).collect()
}

/// Powers of two, with which nothing is rounded.
fn scale(layout: &PoolLayout, mark: u64, head: u32) -> f32 {
    match layout.scaling() {
        Some(Scaling::ByToken) => 2_f32.powi((mix(mark ^ u64::from(head)) % 16) as i32 - 8),
        _ => 1.0,
    }
}

fn row_of(layout: &PoolLayout, name: PlaneName, layer: LayerId) -> u64 {
    u64::from(layout.layers()) * (1 + name as u64) + u64::from(layer.raw())
}
