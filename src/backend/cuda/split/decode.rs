//! The decode kernel's shares.
//!
//! Tokens are counted in units of [`DECODE_UNIT`]. The kv heads are striped: stripe `s` of `n` has heads `s`, `s + n`,
//! `s + 2 * n`, .. In each stripe the units of all sequences and heads are numbered through and cut into equal work
//! chunks, one for each CTA, wherever sequences begin and end. CTAs of different stripes read neighbouring heads of the
//! same tokens at about the same time, which memory likes.
//!
//! Not here: sequences with many query rows (`extend.rs`).

use super::super::params::DecodeWork;
use super::{SplitShape, is_tree};
use crate::plan::BatchRow;
use core::mem::size_of;

/// Tokens of one decode unit.
pub const DECODE_UNIT: u32 = 16;
/// Units without tokens that end a head of a sequence: what it costs beside its tokens, and who writes a padding
/// row's zeros.
pub const DECODE_EXTRA: u32 = 6;
/// Query rows that `partial` of the decode kernel has room for in a slot.
const PARTIAL_ROWS: u32 = 16;
/// Words of a work chunk.
pub(super) const DECODE_WORDS: usize = size_of::<DecodeWork>() / 4;

impl SplitShape {
    /// Query rows that the decode kernel takes for one sequence and kv head: `attend_decode_*_r8` or `_r16`.
    pub const fn decode_rows(&self) -> u32 {
        if self.group > 8 { 16 } else { 8 }
    }

    /// Words of the decode plan: a [`DecodeWork`] for each work chunk, which the CTAs of all stripes share.
    pub const fn decode_words(&self) -> usize {
        self.decode_ctas.div_ceil(self.decode_stripes()) as usize * DECODE_WORDS
    }

    /// Bytes of the decode kernel's `partial`.
    pub const fn decode_partial_bytes(&self) -> usize {
        2 * self.decode_ctas as usize * (PARTIAL_ROWS * (self.head_dim + 2) * 4) as usize
    }

    /// Bytes of the decode kernel's `counters`.
    pub const fn decode_counter_bytes(&self) -> usize {
        self.decode_ctas as usize * 4
    }

    /// Stripes of a decode plan: the most that divide the kv heads, up to 8.
    pub const fn decode_stripes(&self) -> u32 {
        let mut stripes = if self.decode_ctas < 8 { self.decode_ctas } else { 8 };
        while !self.kv_heads.is_multiple_of(stripes) {
            stripes -= 1;
        }
        stripes
    }

    /// Decode units of one kv head of a sequence that the decode kernel takes.
    pub(super) const fn units(&self, row: &BatchRow) -> u32 {
        let first = self.first_seen(row.kv_len.saturating_sub(row.extend_len));
        // Rounded up, and the extra units, in one division.
        (row.kv_len.saturating_sub(first) + (DECODE_EXTRA + 1) * DECODE_UNIT - 1) / DECODE_UNIT
    }
}

/// What is known of a step's sequences while their units are cut, in memory that stays.
#[derive(Clone, Debug)]
pub(super) struct DecodeSplit {
    /// Where each sequence ends, in units of one kv head.
    pub ends: Vec<u32>,
}

impl DecodeSplit {
    pub fn new(shape: &SplitShape) -> Self {
        Self { ends: Vec::with_capacity(shape.batch_max as usize) }
    }

    /// Cuts the units into work chunks; gives their number.
    pub fn plan(&mut self, shape: &SplitShape, rows: &[BatchRow], words: &mut [u32]) -> u32 {
        let (longest, mut total) = (shape.decode_len(), 0);
        self.ends.clear();
        self.ends.extend(rows.iter().map(|row| {
            let decodes = (1..=longest).contains(&row.extend_len) & !is_tree(row);
            if decodes { shape.units(row) } else { 0 }
        }));
        for end in &mut self.ends {
            total += *end;
            *end = total;
        }
        let stripes = shape.decode_stripes();
        let heads = shape.kv_heads / stripes;
        let total = total * heads;
        // Where there is little to do, fewer parts to join are worth more than CTAs that share it.
        let least = (total / 16).clamp(1, 32);
        let per = total.div_ceil(shape.decode_ctas / stripes).max(least);
        let mut index = 0;
        let (works, []) = words.as_chunks_mut::<DECODE_WORDS>() else {
            unreachable!("a work chunk is whole")
        };
        for (i, work) in works.iter_mut().enumerate() {
            let begin = i as u32 * per;
            *work = [0; DECODE_WORDS];
            work[0] = per;
            // The CTAs that are left over, too few for a chunk in each stripe, find theirs past the end.
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
