//! Quantised numbers: how they are made at the store, and what they are multiplied by when they are read.
//!
//! The rule of the store, bit by bit the same on every backend. A scale that is made for a token's head is the largest
//! of its finite numbers, without sign, divided by 448, but at least 2^-126; it is 1 where none of them but 0 is
//! finite. Each number is divided by the scale (IEEE, in f32) and [rounded](E4m3::from_f32).
//!
//! Not here: scales that are given (`layout/scales.rs`).

use super::e4m3::E4m3;
use super::number::convert;
use super::pool::Pool;
use super::rows::Elements;
use crate::id::{LayerId, PageId};
use crate::layout::{KvScales, PlaneName, PoolLayout, Scaling, Strides};

/// The largest number of E4M3.
const LARGEST: f32 = 448.0;

/// Where the scales of K and of V are.
#[derive(Debug)]
pub(super) enum Scales {
    /// Nowhere: numbers are as they are stored, or all scales are 1.
    Ones,
    /// Given.
    Static(KvScales),
    /// In planes of the pool.
    ByToken([Strides; 2]),
}

/// K or V of one token in one layer.
#[derive(Clone, Copy)]
pub(super) struct Row {
    /// 0 for K, 1 for V.
    pub side: usize,
    pub layer: LayerId,
    /// The layer's place in a page.
    pub lane: u32,
    pub page: PageId,
    /// In its page.
    pub offset: u32,
}

impl Scales {
    /// Of a pool, for which `given` is right.
    pub fn new(layout: &PoolLayout, given: Option<KvScales>) -> Self {
        match (layout.scaling(), given) {
            (Some(Scaling::ByToken), _) => {
                // Where V is of K's numbers, so are its scales.
                let v = if layout.is_latent() { PlaneName::KScales } else { PlaneName::VScales };
                let strides = |name| layout.strides(name).expect("they are made");
                Self::ByToken([PlaneName::KScales, v].map(strides))
            }
            (Some(_), Some(given)) => Self::Static(given),
            (None, _) | (_, None) => Self::Ones,
        }
    }

    /// Those that were given.
    pub fn given(&self) -> Option<&KvScales> {
        if let Self::Static(given) = self { Some(given) } else { None }
    }

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        self.given().map_or(0, |given| size_of_val(given.values()))
    }

    /// What a head's numbers are multiplied by; `pool` is all of the pool.
    pub fn of(&self, pool: &[f32], row: Row, head: u32) -> f32 {
        match self {
            Self::Ones => 1.0,
            Self::Static(given) => given.get(row.layer, head)[row.side],
            Self::ByToken(planes) => pool[scale_at(&planes[row.side], row, head)],
        }
    }

    /// Reads the scales of a head's consecutive slots from `first` on, as many as `scales` holds. A head's scales are
    /// contiguous in a page.
    pub fn read(&self, pool: &[f32], first: Row, head: u32, scales: &mut [f32]) {
        match self {
            Self::ByToken(planes) => {
                let at = scale_at(&planes[first.side], first, head);
                scales.copy_from_slice(&pool[at..at + scales.len()]);
            }
            _ => scales.fill(self.of(pool, first, head)),
        }
    }

    /// Stores one row; `strides` say where K or V lies, `wide` is room for one head.
    pub fn store(
        &self,
        pool: &mut Pool,
        strides: &Strides,
        row: Row,
        numbers: Elements<'_>,
        wide: &mut [f32],
    ) {
        let head_dim = wide.len();
        for (head, start) in (0..numbers.len()).step_by(head_dim).enumerate() {
            let head = head as u32;
            numbers.slice(start..start + head_dim).convert_into(wide);
            if let Self::ByToken(planes) = self {
                let at = scale_at(&planes[row.side], row, head);
                pool.numbers_mut()[at] = token_scale(wide);
            }
            let scale = self.of(pool.numbers(), row, head);
            let at = byte(strides, row, head) as usize;
            wide.iter_mut().for_each(|x| *x /= scale);
            convert(wide, &mut pool.numbers_mut::<E4m3>()[at..at + head_dim]);
        }
    }
}

/// What a token stores of K and V: both, or one row where V is made of K's numbers.
pub(super) fn side_count(layout: &PoolLayout) -> usize {
    if layout.is_latent() { 1 } else { 2 }
}

/// First byte of a row's head.
pub(super) fn byte(strides: &Strides, row: Row, head: u32) -> u64 {
    strides.row(row.lane, row.page, row.offset) + strides.head * u64::from(head)
}

/// Where a head's scale lies, among all of the pool's f32.
fn scale_at(strides: &Strides, row: Row, head: u32) -> usize {
    byte(strides, row, head) as usize / size_of::<f32>()
}

/// The scale that is made for a token's head.
fn token_scale(head: &[f32]) -> f32 {
    let size = |x: &f32| if x.is_finite() { x.abs() } else { 0.0 };
    let largest = head.iter().map(size).fold(0.0, f32::max);
    if largest == 0.0 { 1.0 } else { (largest / LARGEST).max(f32::MIN_POSITIVE) }
}

#[cfg(test)]
mod tests;
