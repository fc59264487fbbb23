//! The shares of the decode kernel.
//!
//! Tokens are counted in units of [`DECODE_UNIT`]. Stripe `s` of `n` has the kv heads `s`, `s + n`, `s + 2 * n` and so
//! on. Each stripe numbers the units of all sequences and heads consecutively, and cuts them into equal work chunks,
//! one for each CTA. CTAs of different stripes read neighbouring heads of the same tokens at about the same time, which
//! improves memory locality.

use super::{DecodeFilter, SplitShape};
use crate::backend::cuda::kernels::DECODE_ROWS;
use crate::backend::cuda::kernels::params::DecodeWork;
use crate::plan::BatchRow;
use core::mem::size_of;
use core::ops::Range;

/// Number of tokens of a decode unit.
pub const DECODE_UNIT: u32 = 16;
/// Extra units without tokens at the end of a sequence's head. They represent the fixed cost of the head. A padding row
/// has no other units; the CTA of its extra units writes the zeros.
pub const DECODE_EXTRA: u32 = 6;
/// Extra units for a pool of fp8, whose units take half the time. Suffixes beside shared spans have [`DECODE_EXTRA`].
pub const DECODE_EXTRA_FP8: u32 = 12;

/// Returns the number of extra units for a pool.
pub const fn decode_extra(is_quantised: bool) -> u32 {
    if is_quantised { DECODE_EXTRA_FP8 } else { DECODE_EXTRA }
}

/// The first decode kernel that supports draft trees; only Hopper has it.
const TREES_FROM: usize = 2;
pub(super) const DECODE_WORDS: usize = size_of::<DecodeWork>() / 4;

impl SplitShape {
    /// Returns the narrowest decode kernel of the group, as an index of [`DECODE_ROWS`].
    pub const fn narrowest(&self) -> usize {
        if self.group > DECODE_ROWS[0] { 1 } else { 0 }
    }

    /// Returns the decode kernel for a step of these numbers of tokens and rows. It is the narrowest that takes a row
    /// of the average number of tokens, or the narrowest of all if none does. Lengths do not matter, so all
    /// steps that replay a graph use the same kernel.
    pub fn width(&self, tokens: usize, rows: usize) -> usize {
        let narrowest = self.narrowest();
        if tokens <= rows || rows == 0 {
            return narrowest;
        }
        let wanted = tokens.div_ceil(rows) * self.group as usize;
        let takes = |&width: &usize| self.decode_ctas[width] > 0 && wanted <= DECODE_ROWS[width] as usize;
        (narrowest..DECODE_ROWS.len()).find(takes).unwrap_or(narrowest)
    }

    /// Returns the filter of the sequences that a decode kernel takes.
    pub(super) const fn decoded(&self, width: usize) -> DecodeFilter {
        DecodeFilter::new(DECODE_ROWS[width] / self.group, width >= TREES_FROM)
    }

    /// Returns the number of words of the largest decode plan: a [`DecodeWork`] for each work chunk of a stripe. All
    /// stripes read the same words.
    pub fn decode_words(&self) -> usize {
        (self.narrowest()..DECODE_ROWS.len()).map(|width| self.width_words(width)).max().unwrap_or(0)
    }

    pub(super) fn width_words(&self, width: usize) -> usize {
        let ctas = self.decode_ctas[width];
        if ctas == 0 { 0 } else { ctas.div_ceil(self.decode_stripes(width)) as usize * DECODE_WORDS }
    }

    /// Returns the number of bytes of the `partial` that all decode kernels share.
    pub fn decode_partial_bytes(&self) -> usize {
        let kernels = self.decode_ctas.into_iter().zip(DECODE_ROWS);
        let bytes = kernels.map(|(ctas, rows)| 2 * ctas as usize * (rows * (self.head_dim + 2) * 4) as usize);
        bytes.max().unwrap_or(0)
    }

    /// Returns the number of bytes of the decode kernels' `counters`.
    pub fn decode_counter_bytes(&self) -> usize {
        4 * self.decode_ctas.into_iter().max().unwrap_or(0) as usize
    }

    /// Returns the number of stripes of a decode plan: the largest divisor of `kv_heads` that is at most 8 and at most
    /// the number of CTAs.
    pub fn decode_stripes(&self, width: usize) -> u32 {
        let divides = |stripes: &u32| self.kv_heads.is_multiple_of(*stripes);
        (1..=self.decode_ctas[width].min(8)).rev().find(divides).expect("the kernel has CTAs")
    }

    /// Returns the number of decode units of a sequence's kv head.
    pub(super) const fn units(&self, row: &BatchRow) -> u32 {
        let first = self.first_seen(row.kv_len.saturating_sub(row.extend_len));
        // One division computes both the rounded-up units and the extra units.
        (row.kv_len.saturating_sub(first) + (self.extra + 1) * DECODE_UNIT - 1) / DECODE_UNIT
    }
}

/// Data of each sequence while the units of a step are cut, in reused memory.
#[derive(Clone, Debug)]
pub(super) struct DecodeSplit {
    /// End of each sequence, in units of one kv head.
    pub ends: Vec<u32>,
}

impl DecodeSplit {
    pub fn new(shape: &SplitShape) -> Self {
        Self { ends: Vec::with_capacity(shape.batch_max as usize) }
    }

    /// Cuts the units into work chunks for a decode kernel, and returns the number of units.
    pub fn plan(&mut self, shape: &SplitShape, width: usize, rows: &[BatchRow], words: &mut [u32]) -> u32 {
        let (decoded, mut total) = (shape.decoded(width), 0);
        self.ends.clear();
        self.ends.extend(rows.iter().map(|row| if decoded.has(row) { shape.units(row) } else { 0 }));
        for end in &mut self.ends {
            total += *end;
            *end = total;
        }
        let stripes = shape.decode_stripes(width);
        let heads = shape.kv_heads / stripes;
        let total = total * heads;
        // Small steps gain more from fewer parts to join than from more CTAs.
        let least = (total / 16).clamp(1, 32);
        let per = total.div_ceil(shape.decode_ctas[width] / stripes).max(least);
        let start = |i: usize| if i == 0 { 0 } else { self.ends[i - 1] * heads };
        let chunks = work_chunks(rows, per, total, |i| start(i)..self.ends[i] * heads);
        let works: &mut [DecodeWork] = bytemuck::cast_slice_mut(&mut words[..shape.width_words(width)]);
        // The last chunk is always empty if it has no CTA in some stripe.
        works.iter_mut().zip(chunks).for_each(|(work, chunk)| *work = chunk);
        total * stripes
    }
}

/// Returns the work chunks of a stripe with `total` units, `per` units each, and then empty ones without end. `units`
/// returns the units of a row.
pub(super) fn work_chunks(
    rows: &[BatchRow],
    per: u32,
    total: u32,
    units: impl Fn(usize) -> Range<u32>,
) -> impl Iterator<Item = DecodeWork> {
    let mut index = 0;
    (0..).map(move |i: u32| {
        let begin = i.saturating_mul(per);
        if begin >= total {
            return DecodeWork { work_units: per, ..DecodeWork::default() };
        }
        while units(index).end <= begin {
            index += 1;
        }
        let BatchRow { row, qo_start, extend_len, kv_len } = rows[index];
        DecodeWork {
            work_units: per,
            unit_end: (begin + per).min(total),
            batch_index: index as u32,
            unit_start: units(index).start,
            row: row.raw(),
            qo_start,
            extend_len,
            kv_len,
        }
    })
}
