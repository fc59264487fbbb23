//! The shares of the decode kernel.
//!
//! Tokens are counted in units of [`DECODE_UNIT`]. The kv heads are striped: stripe `s` of `n` has heads `s`, `s + n`,
//! `s + 2 * n`, .. In each stripe the units of all sequences and heads are numbered consecutively and cut into equal
//! work chunks, one for each CTA, independent of the sequences' ends. CTAs of different stripes read neighbouring heads
//! of the same tokens at about the same time, which improves memory locality.
//!
//! Not here: sequences with many query rows (`extend.rs`).

use super::{Decoded, SplitShape};
use crate::backend::cuda::kernels::params::DecodeWork;
use crate::plan::BatchRow;
use core::mem::size_of;

/// Tokens of one decode unit.
pub const DECODE_UNIT: u32 = 16;
/// Units without tokens at the end of a sequence's head. They represent its cost beyond its tokens, and their CTA
/// writes a padding row's zeros.
pub const DECODE_EXTRA: u32 = 6;
/// Such units for a pool of fp8, whose units take half the time.
pub const DECODE_EXTRA_FP8: u32 = 12;

/// Returns the number of such units for a pool.
pub const fn decode_extra(is_quantised: bool) -> u32 {
    if is_quantised { DECODE_EXTRA_FP8 } else { DECODE_EXTRA }
}

/// Query rows that the decode kernels take for one sequence and kv head: `attend_decode_*_r8` and so on. Only Hopper
/// has the last kernel.
pub const DECODE_ROWS: [u32; 3] = [8, 16, 64];
/// The first decode kernel that supports trees of drafts.
const TREES_FROM: usize = 2;
/// Words of a work chunk.
pub(super) const DECODE_WORDS: usize = size_of::<DecodeWork>() / 4;

impl SplitShape {
    /// Returns the narrowest decode kernel of the group, as an index of [`DECODE_ROWS`].
    pub const fn narrowest(&self) -> usize {
        if self.group > 8 { 1 } else { 0 }
    }

    /// Returns the decode kernel for steps of these numbers of tokens and rows. It is the narrowest that takes a row
    /// with the average number of tokens, or the narrowest of all if none does. It depends on nothing else, so a graph,
    /// whose kernels are fixed, serves all steps of these numbers.
    pub const fn width(&self, tokens: usize, rows: usize) -> usize {
        let narrowest = self.narrowest();
        if tokens <= rows || rows == 0 {
            return narrowest;
        }
        let wanted = tokens.div_ceil(rows) * self.group as usize;
        let mut width = narrowest;
        while width < DECODE_ROWS.len() {
            if self.decode_ctas[width] > 0 && wanted <= DECODE_ROWS[width] as usize {
                return width;
            }
            width += 1;
        }
        narrowest
    }

    /// Returns which sequences a decode kernel takes.
    pub(super) const fn decoded(&self, width: usize) -> Decoded {
        Decoded::new(DECODE_ROWS[width] / self.group, width >= TREES_FROM)
    }

    /// Returns the words of the largest decode plan: a [`DecodeWork`] for each work chunk, which the CTAs of all
    /// stripes share.
    pub const fn decode_words(&self) -> usize {
        let (mut most, mut width) = (0, self.narrowest());
        while width < DECODE_ROWS.len() {
            let words = self.width_words(width);
            most = if words > most { words } else { most };
            width += 1;
        }
        most
    }

    /// Words of a decode kernel's plan.
    pub(super) const fn width_words(&self, width: usize) -> usize {
        let ctas = self.decode_ctas[width];
        if ctas == 0 {
            0
        } else {
            ctas.div_ceil(self.decode_stripes(width)) as usize * DECODE_WORDS
        }
    }

    /// Bytes of a decode kernel's `partial`.
    pub const fn width_partial_bytes(&self, width: usize) -> usize {
        let slots = 2 * self.decode_ctas[width] as usize;
        slots * (DECODE_ROWS[width] * (self.head_dim + 2) * 4) as usize
    }

    /// Bytes of the `partial` that all decode kernels use.
    pub const fn decode_partial_bytes(&self) -> usize {
        let (mut most, mut width) = (0, 0);
        while width < DECODE_ROWS.len() {
            let bytes = self.width_partial_bytes(width);
            most = if bytes > most { bytes } else { most };
            width += 1;
        }
        most
    }

    /// Bytes of the decode kernels' `counters`.
    pub const fn decode_counter_bytes(&self) -> usize {
        let (mut most, mut width) = (0, 0);
        while width < DECODE_ROWS.len() {
            let ctas = self.decode_ctas[width];
            most = if ctas > most { ctas } else { most };
            width += 1;
        }
        most as usize * 4
    }

    /// Returns the stripes of a decode plan: the largest divisor of the kv heads up to 8 and up to the CTAs.
    pub const fn decode_stripes(&self, width: usize) -> u32 {
        let ctas = self.decode_ctas[width];
        let mut stripes = if ctas < 8 { ctas } else { 8 };
        while !self.kv_heads.is_multiple_of(stripes) {
            stripes -= 1;
        }
        stripes
    }

    /// Returns the decode units of one kv head of a sequence that the decode kernel takes.
    pub(super) const fn units(&self, row: &BatchRow) -> u32 {
        let first = self.first_seen(row.kv_len.saturating_sub(row.extend_len));
        // A single division computes the rounded-up units and the extra units.
        (row.kv_len.saturating_sub(first) + (self.extra + 1) * DECODE_UNIT - 1) / DECODE_UNIT
    }
}

/// Per-sequence data of a step while its units are cut; the memory is reused.
#[derive(Clone, Debug)]
pub(super) struct DecodeSplit {
    /// End of each sequence, in units of one kv head.
    pub ends: Vec<u32>,
}

impl DecodeSplit {
    pub fn new(shape: &SplitShape) -> Self {
        Self { ends: Vec::with_capacity(shape.batch_max as usize) }
    }

    /// Cuts the units into work chunks for a decode kernel and returns their number.
    pub fn plan(
        &mut self,
        shape: &SplitShape,
        width: usize,
        rows: &[BatchRow],
        words: &mut [u32],
    ) -> u32 {
        let (decoded, mut total) = (shape.decoded(width), 0);
        self.ends.clear();
        self.ends
            .extend(rows.iter().map(|row| if decoded.has(row) { shape.units(row) } else { 0 }));
        for end in &mut self.ends {
            total += *end;
            *end = total;
        }
        let stripes = shape.decode_stripes(width);
        let heads = shape.kv_heads / stripes;
        let total = total * heads;
        // A small step gains more from fewer parts to join than from more CTAs.
        let least = (total / 16).clamp(1, 32);
        let per = total.div_ceil(shape.decode_ctas[width] / stripes).max(least);
        let mut index = 0;
        let words = &mut words[..shape.width_words(width)];
        let (works, []) = words.as_chunks_mut::<DECODE_WORDS>() else {
            unreachable!("a work chunk is whole")
        };
        for (i, work) in works.iter_mut().enumerate() {
            let begin = i as u32 * per;
            *work = [0; DECODE_WORDS];
            work[0] = per;
            // The remaining CTAs, too few for a chunk in each stripe, get empty chunks past the end.
            if begin < total {
                while self.ends[index] * heads <= begin {
                    index += 1;
                }
                let start = if index == 0 { 0 } else { self.ends[index - 1] * heads };
                let row = &rows[index];
                work[1..4].copy_from_slice(&[(begin + per).min(total), index as u32, start]);
                work[4..].copy_from_slice(&[
                    row.row.raw(),
                    row.qo_start,
                    row.extend_len,
                    row.kv_len,
                ]);
            }
        }
        total * stripes
    }
}
