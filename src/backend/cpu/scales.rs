//! Quantised numbers: rounding at the store, and scales for reads.
//!
//! All backends store the same bits. A scale by token is the maximum of the finite absolute values of the token's head,
//! divided by 448, at least 2^-126; it is 1 if no finite value other than 0 exists. Each number is divided by its scale
//! (IEEE, in f32) and [rounded](E4m3::from_f32). `layout/scales.rs` has static scales.

use super::e4m3::E4m3;
use super::number::convert;
use super::pool::Pool;
use super::rows::Elements;
use crate::id::{LayerId, PageId};
use crate::layout::{KvScales, PlaneName, PoolLayout, Scaling, Strides};

const LARGEST: f32 = 448.0;

/// The scales of K and V.
#[derive(Debug)]
pub(super) enum Scales {
    /// The pool has no scales, or the host has given none, so that all are 1.
    Ones,
    /// Static scales of the host.
    Static(KvScales),
    /// Scales in planes of the pool.
    ByToken([Strides; 2]),
}

/// K or V of one token in one layer.
#[derive(Clone, Copy)]
pub(super) struct Row {
    /// 0 for K, 1 for V.
    pub side: usize,
    pub layer: LayerId,
    /// The layer's lane.
    pub lane: u32,
    pub page: PageId,
    /// Offset of the slot in its page.
    pub offset: u32,
}

impl Scales {
    /// Creates the scales of a pool; `given` has been checked.
    pub fn new(layout: &PoolLayout, given: Option<KvScales>) -> Self {
        match (layout.scaling(), given) {
            (Some(Scaling::ByToken), _) => {
                // If K and V share numbers, they share scales.
                let v = if layout.is_latent() { PlaneName::KScales } else { PlaneName::VScales };
                let strides = |name| layout.strides(name).expect("the pool has planes of scales");
                Self::ByToken([PlaneName::KScales, v].map(strides))
            }
            (Some(_), Some(given)) => Self::Static(given),
            (None, _) | (_, None) => Self::Ones,
        }
    }

    pub fn given(&self) -> Option<&KvScales> {
        if let Self::Static(given) = self { Some(given) } else { None }
    }

    /// Returns the number of bytes in use.
    pub fn bytes(&self) -> usize {
        self.given().map_or(0, |given| size_of_val(given.values()))
    }

    /// Returns the scale of a head; `pool` is the whole pool as f32.
    pub fn of_head(&self, pool: &[f32], row: Row, head: u32) -> f32 {
        match self {
            Self::Ones => 1.0,
            Self::Static(given) => given.get(row.layer, head)[row.side],
            Self::ByToken(planes) => pool[scale_at(&planes[row.side], row, head)],
        }
    }

    /// Reads the scales of a head's consecutive slots from `first` on, which are contiguous in a page.
    pub fn read(&self, pool: &[f32], first: Row, head: u32, scales: &mut [f32]) {
        match self {
            Self::ByToken(planes) => {
                let at = scale_at(&planes[first.side], first, head);
                scales.copy_from_slice(&pool[at..at + scales.len()]);
            }
            _ => scales.fill(self.of_head(pool, first, head)),
        }
    }

    /// Stores one row; `strides` are those of K or V, and `wide` has space for one head.
    pub fn store(&self, pool: &mut Pool, strides: &Strides, row: Row, numbers: Elements<'_>, wide: &mut [f32]) {
        let head_dim = wide.len();
        for (head, start) in (0..numbers.len()).step_by(head_dim).enumerate() {
            let head = head as u32;
            numbers.slice(start..start + head_dim).convert_into(wide);
            if let Self::ByToken(planes) = self {
                let at = scale_at(&planes[row.side], row, head);
                pool.numbers_mut()[at] = token_scale(wide);
            }
            let scale = self.of_head(pool.numbers(), row, head);
            let at = byte(strides, row, head) as usize;
            wide.iter_mut().for_each(|x| *x /= scale);
            convert(wide, &mut pool.numbers_mut::<E4m3>()[at..at + head_dim]);
        }
    }
}

/// Returns the number of rows that a token stores: K and V, or one latent row.
pub(super) fn side_count(layout: &PoolLayout) -> usize {
    if layout.is_latent() { 1 } else { 2 }
}

/// Returns the first byte of a row's head.
pub(super) fn byte(strides: &Strides, row: Row, head: u32) -> u64 {
    strides.row(row.lane, row.page, row.offset) + strides.head * u64::from(head)
}

/// Returns the index of a head's scale in the pool as f32.
fn scale_at(strides: &Strides, row: Row, head: u32) -> usize {
    byte(strides, row, head) as usize / size_of::<f32>()
}

/// Returns the scale of a token's head.
fn token_scale(head: &[f32]) -> f32 {
    let size = |x: &f32| if x.is_finite() { x.abs() } else { 0.0 };
    let largest = head.iter().map(size).fold(0.0, f32::max);
    if largest == 0.0 { 1.0 } else { (largest / LARGEST).max(f32::MIN_POSITIVE) }
}

#[cfg(test)]
mod tests;
