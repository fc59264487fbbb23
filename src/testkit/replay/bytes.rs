//! K and V whose origin can be checked: each number depends on all tokens up to its own, and on its layer, head and
//! element.

use crate::backend::{Backend, Cpu, CpuState, Moved, Null, SwapMemory};
use crate::id::{LayerId, Scope, SlotId, SwapPageId, TokenId};
use crate::layout::{PlaneName, PoolLayout, Scaling};
use crate::plan::BatchPlan;
use crate::testkit::quantised::value;
use crate::testkit::rng::mix;

/// A backend whose contents the replay can write and read.
pub trait Inspect: Backend {
    /// Stores a step's K and V of one layer, `[tokens, kv_heads, head_dim]` each. In a pool of latent rows, k has `rank
    /// + rope` numbers for each token, and v is empty. The pool represents the numbers exactly.
    ///
    /// # Errors
    /// The backend's own.
    fn store(&mut self, plan: &BatchPlan<'_>, layer: LayerId, k: &[f32], v: &[f32]) -> Result<(), Self::Error>;

    /// Returns the values of a slot in a plane, `[heads, elements]`; `None` if the backend has no bytes.
    fn load(&self, plane: PlaneName, layer: LayerId, slot: SlotId) -> Option<Vec<f32>>;

    /// Returns the bytes of the state that a row of a plan reads in a layer; `None` if the backend has no bytes.
    fn read_state(&mut self, _: &BatchPlan<'_>, _: LayerId, _: usize) -> Option<Vec<u8>> {
        None
    }

    /// Writes the state that a row of a plan writes in a layer.
    fn write_state(&mut self, _: &BatchPlan<'_>, _: LayerId, _: usize, _: &[u8]) {}

    /// Returns the words of the page tables; `None` if the backend has no tables.
    fn words(&self) -> Option<&[u32]>;

    /// Returns a flag for each save and load since the last call, in order: whether it failed. Moves that are not in
    /// the list succeeded.
    fn take_moves(&mut self) -> Vec<bool> {
        Vec::new()
    }

    /// Returns the last result of [`Backend::moved`] that the engine has read.
    fn last_moved(&mut self) -> Moved;

    /// Returns the bytes of a swap page that a put reads, if the backend has bytes.
    fn read_swap(&mut self, _: SwapPageId) -> Option<Vec<u8>> {
        None
    }

    /// Writes a swap page for a fetch.
    fn write_swap(&mut self, _: SwapPageId, _: &[u8]) {}

    /// Returns whether the last save to a swap page succeeded, or a fetch wrote the page since.
    fn has_swap_page(&self, _: SwapPageId) -> bool {
        true
    }

    /// Returns the number of failed calls.
    fn failures(&self) -> u64 {
        0
    }
}

impl Inspect for Null {
    fn store(&mut self, _: &BatchPlan<'_>, _: LayerId, _: &[f32], _: &[f32]) -> Result<(), Self::Error> {
        Ok(())
    }

    fn load(&self, _: PlaneName, _: LayerId, _: SlotId) -> Option<Vec<f32>> {
        None
    }

    fn words(&self) -> Option<&[u32]> {
        None
    }

    fn last_moved(&mut self) -> Moved {
        Moved::ALL
    }
}

impl Inspect for Cpu {
    fn store(&mut self, plan: &BatchPlan<'_>, layer: LayerId, k: &[f32], v: &[f32]) -> Result<(), Self::Error> {
        self.store_cache(plan, layer, k.into(), v.into())
    }

    fn load(&self, plane: PlaneName, layer: LayerId, slot: SlotId) -> Option<Vec<f32>> {
        self.read_slot(plane, layer, slot).ok()
    }

    fn read_state(&mut self, plan: &BatchPlan<'_>, layer: LayerId, row: usize) -> Option<Vec<u8>> {
        match self.state(plan, layer, row).expect("the row has a state") {
            CpuState::InPlace(bytes) => Some(bytes.to_vec()),
            CpuState::From(bytes, _) => Some(bytes.to_vec()),
        }
    }

    fn write_state(&mut self, plan: &BatchPlan<'_>, layer: LayerId, row: usize, bytes: &[u8]) {
        match self.state(plan, layer, row).expect("the row has a state") {
            CpuState::InPlace(state) | CpuState::From(_, state) => state.copy_from_slice(bytes),
        }
    }

    fn words(&self) -> Option<&[u32]> {
        Some(self.table_words())
    }

    fn last_moved(&mut self) -> Moved {
        self.moved().expect("it cannot fail")
    }

    fn read_swap(&mut self, page: SwapPageId) -> Option<Vec<u8>> {
        Some(self.lease(page).as_ref().to_vec())
    }

    fn write_swap(&mut self, page: SwapPageId, bytes: &[u8]) {
        self.lease_mut(page).as_mut().copy_from_slice(bytes);
    }
}

/// Returns the bytes of a layer's state behind tokens whose last one has this seed; zeros behind no token.
pub(super) fn state(layout: &PoolLayout, seed: Option<u64>, layer: LayerId) -> Vec<u8> {
    let len = layout.state().map_or(0, |state| state.lane_bytes);
    let byte =
        |seed: u64, at: u64| mix(seed ^ mix((u64::from(layer.raw()) << 32) | (at / 8))).to_le_bytes()[at as usize % 8];
    (0..len).map(|at| seed.map_or(0, |seed| byte(seed, at))).collect()
}

/// Returns the seed of each token's K and V: seed `i` depends on the scope and on tokens `0..=i`.
pub(super) fn seeds(scope: Scope, tokens: &[TokenId]) -> Vec<u64> {
    let mut seed = mix(mix(scope.namespace.raw()) ^ scope.generation);
    let step = |token: &TokenId| {
        seed = mix(seed.wrapping_mul(31) ^ u64::from(token.raw() + 1));
        seed
    };
    tokens.iter().map(step).collect()
}

/// Returns a token's values in one plane, `[heads, elements]`, which the pool represents exactly. In a quantised pool,
/// the bytes depend on the seed, and so do scales by token.
pub(super) fn numbers(layout: &PoolLayout, seed: u64, index: usize, layer: LayerId) -> Vec<f32> {
    let plane = &layout.planes()[index];
    // Layer and plane have separate bits, because groups may have different numbers of planes.
    let row = u64::from(layer.raw()) << 40 | (index as u64) << 32;
    let count = u64::from(plane.heads * plane.elements);
    let drawn = (0..count).map(|i| (mix(seed ^ mix(row | i)) & 0xff) as u8);
    let source = match plane.name {
        PlaneName::KScales if layout.is_latent() => PlaneName::Latent,
        PlaneName::KScales => PlaneName::K,
        PlaneName::VScales => PlaneName::V,
        name => name,
    };
    let scale = |head| scale(layout, seed ^ mix(row_of(layout, source, layer)), head);
    if source != plane.name {
        return (0..plane.heads).map(scale).collect();
    }
    if !plane.dtype.is_quantised() {
        return drawn.map(f32::from).collect();
    }
    let drawn: Vec<u8> = drawn.collect();
    let heads = (0..).zip(drawn.chunks_exact(plane.elements as usize));
    heads.flat_map(|(head, bytes)| head_of(layout, bytes, scale(head))).collect()
}

/// Returns the numbers of one head. With scales by token, the first number has the largest magnitude, from which the
/// store computes the scale.
fn head_of(layout: &PoolLayout, bytes: &[u8], scale: f32) -> Vec<f32> {
    const LARGEST: u8 = 0x7e;
    let number = |(i, &byte): (usize, &u8)| {
        let makes = i == 0 && layout.scaling() == Some(Scaling::ByToken);
        let byte = if makes || byte & 0x7f > LARGEST { byte & 0x80 | LARGEST } else { byte };
        value(byte) as f32 * scale
    };
    bytes.iter().enumerate().map(number).collect()
}

/// Returns a head's scale. It is a power of two, so that products with it are exact.
fn scale(layout: &PoolLayout, seed: u64, head: u32) -> f32 {
    match layout.scaling() {
        Some(Scaling::ByToken) => 2_f32.powi((mix(seed ^ u64::from(head)) % 16) as i32 - 8),
        _ => 1.0,
    }
}

fn row_of(layout: &PoolLayout, name: PlaneName, layer: LayerId) -> u64 {
    u64::from(layout.layers()) * (1 + name as u64) + u64::from(layer.raw())
}
