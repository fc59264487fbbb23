//! The items of the extend kernel.
//!
//! An item is a tile of query rows and the tokens that it sees. CTAs take items in order, roughly longest first. If
//! there are too few items to fill the device, long items are cut over their tokens.

use super::SplitShape;
use crate::backend::cuda::kernels::params::{ExtendHead, ExtendWork, words_of};
use crate::plan::BatchRow;
use core::mem::size_of;

/// Maximum number of parts of an extend item.
const PARTS_MAX: u32 = 16;
/// Logarithm of the number of length classes by which items are sorted. Items of one class stay in the order of
/// sequences, so items that run together read the same tokens from the L2 cache.
const LENGTHS_LOG2: u32 = 3;
pub(super) const HEAD_WORDS: usize = size_of::<ExtendHead>() / 4;
pub(super) const EXTEND_WORDS: usize = size_of::<ExtendWork>() / 4;

impl SplitShape {
    /// Returns the maximum number of words of the extend plan, a multiple of 4.
    pub const fn extend_words(&self) -> usize {
        // The last tile of each sequence may be partly empty; each slot may be an extra item.
        let tiles =
            (self.tokens_max as u64 * self.group as u64 / self.extend_rows as u64) as usize + self.batch_max as usize;
        HEAD_WORDS + (tiles + self.extend_slots() as usize) * EXTEND_WORDS
    }

    /// Returns the number of bytes of the extend kernel's `partial`.
    pub const fn extend_partial_bytes(&self) -> usize {
        let slots = self.extend_slots() as usize * self.kv_heads as usize;
        slots * (self.extend_rows * (self.head_dim + 2) * 4) as usize
    }

    /// Returns the number of bytes of the extend kernel's `counters`.
    pub const fn extend_counter_bytes(&self) -> usize {
        (1 + self.extend_slots() as usize * self.kv_heads as usize) * 4
    }

    /// Returns the maximum number of parts of extend items, for each kv head.
    pub(super) const fn extend_slots(&self) -> u32 {
        let slots = 2 * self.extend_ctas / self.kv_heads;
        if self.fills_machine(1) {
            0 // No item is cut. Two slots for each of 65,535 heads would take up to 8.7 GB.
        } else if slots < 2 {
            2
        } else if slots > 0xffff {
            0xffff
        } else {
            slots
        }
    }

    /// Returns whether `tiles` query tiles in each kv head fill the device without cuts.
    const fn fills_machine(&self, tiles: usize) -> bool {
        tiles as u64 * self.kv_heads as u64 >= 4 * self.extend_ctas as u64
    }
}

/// Builds the extend kernel's words of each step in reused memory.
#[derive(Clone, Debug)]
pub(super) struct ExtendSplit {
    pub words: Vec<u32>,
    works: Vec<ExtendWork>,
    whole: Vec<ExtendWork>,
}

impl ExtendSplit {
    pub fn new(shape: &SplitShape) -> Self {
        let works = (shape.extend_words() - HEAD_WORDS) / EXTEND_WORDS;
        Self {
            words: Vec::with_capacity(shape.extend_words()),
            works: Vec::with_capacity(works),
            whole: Vec::with_capacity(works),
        }
    }

    /// Builds the items of the extend kernel's rows, and returns their number over all kv heads.
    pub fn plan(&mut self, shape: &SplitShape, rows: &[BatchRow], is_left: impl Fn(&BatchRow) -> bool) -> u32 {
        self.whole.clear();
        // Most steps only decode, which one vectorised pass detects.
        if rows.iter().fold(false, |any, row| any | is_left(row)) {
            for row in rows.iter().filter(|row| is_left(row)) {
                tiles(shape, row, &mut self.whole);
            }
        }
        let works = match parts(shape, &self.whole) {
            None => &mut self.whole,
            Some(chunk) => {
                cut(&self.whole, chunk, &mut self.works);
                &mut self.works
            }
        };
        self.words.clear();
        self.words.extend_from_slice(words_of(&ExtendHead { work_count: works.len() as u32, reserved: [0; 3] }));
        let longest = works.iter().map(last_token).max().unwrap_or(0);
        let shift = longest.checked_ilog2().unwrap_or(0).saturating_sub(LENGTHS_LOG2 - 1);
        for length in (0..=longest >> shift).rev() {
            for work in works.iter().filter(|work| last_token(work) >> shift == length) {
                self.words.extend_from_slice(words_of(work));
            }
        }
        works.len() as u32 * shape.kv_heads
    }

    #[cfg(test)]
    pub fn capacities(&self) -> [usize; 3] {
        [self.words.capacity(), self.works.capacity(), self.whole.capacity()]
    }
}

const fn last_token(work: &ExtendWork) -> u32 {
    (work.kv_end - work.kv_begin).saturating_sub(1)
}

/// Appends a sequence's query tiles, longest first, each with all tokens that it sees.
fn tiles(shape: &SplitShape, row: &BatchRow, works: &mut Vec<ExtendWork>) {
    let size = shape.extend_rows;
    let cached_len = row.kv_len.saturating_sub(row.extend_len);
    for tile in (0..(row.extend_len * shape.group).div_ceil(size)).rev() {
        let q_begin = tile * size;
        let last = ((q_begin + size - 1) / shape.group).min(row.extend_len - 1);
        let padding = row.kv_len == 0;
        works.push(ExtendWork {
            row: row.row.raw(),
            qo_start: row.qo_start,
            extend_len: row.extend_len,
            kv_len: row.kv_len,
            q_begin,
            kv_begin: if padding { 0 } else { shape.first_seen(cached_len + q_begin / shape.group) },
            kv_end: if padding { 0 } else { cached_len + last + 1 },
            part: 1,
        });
    }
}

/// Returns the number of tokens of a part, if cuts make the step end sooner.
///
/// The estimate assumes that CTAs take items in waves, and that the partial sum of a part costs as much as three tiles.
fn parts(shape: &SplitShape, whole: &[ExtendWork]) -> Option<u32> {
    let (ctas, heads) = (shape.extend_ctas, shape.kv_heads);
    if whole.is_empty() || shape.fills_machine(whole.len()) {
        return None;
    }
    let step = shape.extend_tokens;
    let count = |work: &ExtendWork| (work.kv_end - work.kv_begin).div_ceil(step).max(1);
    let longest = whole.iter().map(count).max()?;
    // The sum over the tiles of long rows and all heads may exceed 32 bits.
    let total = whole.iter().map(|work| u64::from(count(work))).sum::<u64>() * u64::from(heads);
    let mut best = (u32::MAX, 0);
    let mut last = 0;
    for parts in 1..=PARTS_MAX.min(longest) {
        let chunk = longest.div_ceil(parts);
        if chunk == last || (parts > 1 && chunk < 4) {
            continue;
        }
        last = chunk;
        let pieces = whole.iter().map(|work| count(work).div_ceil(chunk)).sum::<u32>();
        let slots: u32 = whole.iter().map(|work| count(work).div_ceil(chunk)).filter(|&n| n > 1).sum();
        if slots > shape.extend_slots() {
            break;
        }
        let waves = (pieces * heads).div_ceil(ctas);
        let even = u32::try_from(total.div_ceil(ctas.into())).unwrap_or(u32::MAX);
        let extra = if parts > 1 { 3 * waves } else { 0 };
        let time = waves.saturating_mul(chunk).min(even.saturating_add(chunk)) + extra;
        best = best.min((time, chunk));
    }
    (best.1 < longest).then_some(best.1 * step)
}

/// Cuts each item into parts of `chunk` tokens; the last part may be shorter.
fn cut(whole: &[ExtendWork], chunk: u32, works: &mut Vec<ExtendWork>) {
    works.clear();
    let mut slot = 0;
    for work in whole {
        let parts = (work.kv_end - work.kv_begin).div_ceil(chunk).max(1);
        for index in 0..parts {
            let kv_begin = work.kv_begin + index * chunk;
            let kv_end = work.kv_end.min(kv_begin + chunk);
            let part = if parts == 1 { 1 } else { slot << 16 | index << 8 | parts };
            works.push(ExtendWork { kv_begin, kv_end, part, ..*work });
        }
        if parts > 1 {
            slot += parts;
        }
    }
}
