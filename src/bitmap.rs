//! A set of small numbers as bits, with a summary level that makes the lowest member cheap to find.
//!
//! ```text
//! words    one bit a number, 64 to a word
//! nonzero  one bit a word: set while the word has a member
//! lowest   no summary word below this one has a bit
//! ```
//!
//! Work is done on whole words: a caller that handles runs of neighbours pays once a word, not once a number.
//! Knows bits; what they mean is the caller's (`page`: free pages; `prefix/span.rs`: free places).

use bitvec::prelude::{BitVec, Lsb0};

use crate::memory::prefetch_items;

/// Numbers in one word.
pub(crate) const WORD: usize = 64;

/// A set of numbers below a fixed limit.
pub(crate) struct Bitmap {
    words: BitVec<u64, Lsb0>,
    nonzero: BitVec<u64, Lsb0>,
    lowest: usize,
    count: u32,
}

impl Bitmap {
    /// All numbers below `limit`, or none.
    pub fn new(limit: u32, full: bool) -> Self {
        // Bits past the limit are never set: whole words are worked on.
        let bits = |len: usize| {
            let mut bits = BitVec::repeat(full, len);
            bits.set_uninitialized(false);
            bits
        };
        Self {
            words: bits(limit as usize),
            nonzero: bits((limit as usize).div_ceil(WORD)),
            lowest: 0,
            count: if full { limit } else { 0 },
        }
    }

    /// Bytes of the set for a limit.
    pub fn bytes(limit: u32) -> u64 {
        let words = u64::from(limit).div_ceil(WORD as u64);
        8 * (words + words.div_ceil(WORD as u64))
    }

    /// Members.
    pub fn count(&self) -> u32 {
        self.count
    }

    /// Whether `number` is a member. Numbers past the limit are not.
    pub fn contains(&self, number: u32) -> bool {
        self.words.get(number as usize).is_some_and(|bit| *bit)
    }

    /// One word of the set, 0 past the limit.
    pub fn word(&self, index: usize) -> u64 {
        self.words.as_raw_slice().get(index).copied().unwrap_or(0)
    }

    /// Asks for a word that will be changed soon.
    pub fn prefetch(&self, index: usize) {
        prefetch_items(&self.words.as_raw_slice()[index..=index]);
    }

    /// Words of the set.
    pub fn word_count(&self) -> usize {
        self.nonzero.len()
    }

    /// Adds the members of `mask` to word `index`.
    ///
    /// # Panics
    /// If one of them is a member already.
    pub fn insert(&mut self, index: usize, mask: u64) {
        let word = &mut self.words.as_raw_mut_slice()[index];
        assert!(*word & mask == 0, "bit {} is set already", first(index, *word & mask));
        *word |= mask;
        self.nonzero.as_raw_mut_slice()[index / WORD] |= 1 << (index % WORD);
        self.lowest = self.lowest.min(index / WORD);
        self.count += mask.count_ones();
    }

    /// Takes the members of `mask` out of word `index`.
    ///
    /// # Panics
    /// If one of them is no member.
    pub fn remove(&mut self, index: usize, mask: u64) {
        let word = &mut self.words.as_raw_mut_slice()[index];
        assert!(*word & mask == mask, "bit {} is not set", first(index, !*word & mask));
        *word &= !mask;
        if *word == 0 {
            self.nonzero.as_raw_mut_slice()[index / WORD] &= !(1 << (index % WORD));
        }
        self.count -= mask.count_ones();
    }

    /// The lowest word with a member.
    fn lowest_word(&mut self) -> Option<usize> {
        let summary = self.nonzero.as_raw_slice();
        while let Some(&bits) = summary.get(self.lowest) {
            if bits != 0 {
                return Some(self.lowest * WORD + bits.trailing_zeros() as usize);
            }
            self.lowest += 1;
        }
        None
    }

    /// The first member from `start` on, from the beginning again where there is none. As [`Bitmap::next_word`].
    pub fn next(&self, start: usize) -> Option<usize> {
        let (index, offset) = (start / WORD, start % WORD);
        let here = self.word(index) & (u64::MAX << offset);
        if here != 0 {
            return Some(index * WORD + here.trailing_zeros() as usize);
        }
        let index = self.next_word(index + 1)?;
        Some(index * WORD + self.word(index).trailing_zeros() as usize)
    }

    /// The first word with a member from word `start` on, from the beginning again where there is none. O(words / 64)
    /// at worst, O(1) where members are many.
    pub fn next_word(&self, start: usize) -> Option<usize> {
        let summary = self.nonzero.as_raw_slice();
        let first = start / WORD;
        let masked = summary.get(first).map_or(0, |bits| bits & (u64::MAX << (start % WORD)));
        let later = summary.iter().enumerate().skip(first + 1).map(|(i, bits)| (i, *bits));
        let wrapped = summary.iter().enumerate().take(first + 1).map(|(i, bits)| (i, *bits));
        let (index, bits) = std::iter::once((first, masked))
            .chain(later)
            .chain(wrapped)
            .find(|(_, bits)| *bits != 0)?;
        Some(index * WORD + bits.trailing_zeros() as usize)
    }

    /// Takes the `out.len()` lowest members out, in rising order.
    ///
    /// # Panics
    /// If there are fewer.
    pub fn take_lowest(&mut self, mut out: &mut [u32]) {
        while !out.is_empty() {
            let index = self.lowest_word().expect("the caller checked the count");
            let mask = lowest_bits(self.word(index), out.len());
            let (head, rest) = out.split_at_mut(mask.count_ones() as usize);
            write_members(index, mask, head);
            self.remove(index, mask);
            out = rest;
        }
    }
}

/// The `n` lowest bits that are set in `word`, or all of them.
fn lowest_bits(word: u64, n: usize) -> u64 {
    if n >= word.count_ones() as usize {
        return word;
    }
    let mut rest = word;
    for _ in 0..n {
        rest &= rest - 1;
    }
    word & !rest
}

/// Writes the numbers of a word's members, in rising order.
fn write_members(index: usize, mask: u64, out: &mut [u32]) {
    let base = (index * WORD) as u32;
    let first = mask.trailing_zeros();
    if (mask >> first).trailing_ones() as usize == out.len() {
        // One run of neighbours.
        for (number, out) in (base + first..).zip(out) {
            *out = number;
        }
        return;
    }
    let mut rest = mask;
    for out in out {
        *out = base + rest.trailing_zeros();
        rest &= rest - 1;
    }
}

fn first(index: usize, mask: u64) -> usize {
    index * WORD + mask.trailing_zeros() as usize
}

/// Calls `visit(word, mask)` for numbers, once for each run of neighbours in the list that share a word.
///
/// # Panics
/// If a number stands twice in such a run.
pub(crate) fn for_each_word(numbers: &[u32], mut visit: impl FnMut(usize, u64)) {
    let mut rest = numbers;
    while let Some(&first) = rest.first() {
        let (index, offset) = (first as usize / WORD, first as usize % WORD);
        let run = WORD - offset;
        if is_consecutive(rest, run) {
            visit(index, u64::MAX << offset);
            rest = &rest[run..];
        } else {
            let (mask, len) = same_word(rest, index);
            visit(index, mask);
            rest = &rest[len..];
        }
    }
}

/// Whether a list begins with `run` numbers that rise by one. The last is looked at first, so that a list that does not
/// costs one comparison.
fn is_consecutive(numbers: &[u32], run: usize) -> bool {
    let Some(numbers) = numbers.get(..run) else { return false };
    let first = numbers[0];
    if numbers[run - 1] != first + (run as u32 - 1) {
        return false;
    }
    let differing = (first..).zip(numbers).fold(0, |bits, (wanted, n)| bits | (wanted ^ n));
    differing == 0
}

/// The numbers from the start of a list that lie in word `index`, as a mask and a count.
fn same_word(numbers: &[u32], index: usize) -> (u64, usize) {
    let (mut mask, mut len) = (0, 0);
    for &number in numbers.iter().take_while(|&&number| number as usize / WORD == index) {
        let bit = 1 << (number as usize % WORD);
        assert!(mask & bit == 0, "{number} stands twice in one list");
        mask |= bit;
        len += 1;
    }
    (mask, len)
}
