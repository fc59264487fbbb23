//! A set of small numbers as bits, with a summary level to find the lowest member.
//!
//! ```text
//! words    one bit a number, 64 to a word
//! nonzero  one bit a word: set while the word has a member
//! lowest   no summary word below this one has a bit
//! ```
//!
//! Each operation changes whole words, so a run of neighbours costs one operation a word. For example, `page` and
//! `swap` store the states of pages in such sets, and `prefix/free_entries.rs` the free entries of spans.

use bitvec::prelude::Lsb0;
use bitvec::view::BitView;

use crate::memory::{Memory, OutOfMemory, prefetch_items};

/// Numbers in one word.
pub(crate) const WORD: usize = 64;

/// Numbers that are compared at once to find runs.
const STEP: usize = 8;

/// A set of numbers below a fixed limit.
pub(crate) struct Bitmap {
    words: Vec<u64>,
    nonzero: Vec<u64>,
    lowest: usize,
    count: u32,
}

/// Some numbers that share a word.
#[derive(Clone, Copy)]
pub(crate) struct Bits {
    pub word: usize,
    pub mask: u64,
    /// Number of ones in the mask.
    pub count: u32,
}

impl Bitmap {
    /// Creates a set of all numbers below `limit`, or of none.
    pub fn new(limit: u32, full: bool, memory: &mut Memory) -> Result<Self, OutOfMemory> {
        Ok(Self {
            words: bits(limit as usize, full, memory)?,
            nonzero: bits((limit as usize).div_ceil(WORD), full, memory)?,
            lowest: 0,
            count: if full { limit } else { 0 },
        })
    }

    pub fn count(&self) -> u32 {
        self.count
    }

    /// Returns whether `number` is a member. Numbers past the limit are not.
    pub fn contains(&self, number: u32) -> bool {
        self.words.view_bits::<Lsb0>().get(number as usize).is_some_and(|bit| *bit)
    }

    /// Returns one word of the set; 0 past the limit.
    pub fn word(&self, index: usize) -> u64 {
        self.words.get(index).copied().unwrap_or(0)
    }

    pub fn prefetch(&self, index: usize) {
        prefetch_items(&self.words[index..=index]);
    }

    pub fn word_count(&self) -> usize {
        self.words.len()
    }

    /// Adds members.
    ///
    /// # Panics
    /// If one of them is a member already, or their word is past the limit.
    #[inline]
    pub fn insert(&mut self, bits: Bits) {
        let Bits { word: index, mask, count } = bits;
        let word = &mut self.words[index];
        assert!(*word & mask == 0, "bit {} is set already", first(index, *word & mask));
        *word |= mask;
        self.nonzero[index / WORD] |= 1 << (index % WORD);
        self.lowest = self.lowest.min(index / WORD);
        self.count += count;
    }

    /// Removes members.
    ///
    /// # Panics
    /// If one of them is not a member, or their word is past the limit.
    #[inline]
    pub fn remove(&mut self, bits: Bits) {
        let Bits { word: index, mask, count } = bits;
        let word = &mut self.words[index];
        assert!(*word & mask == mask, "bit {} is not set", first(index, !*word & mask));
        *word &= !mask;
        if *word == 0 {
            self.nonzero[index / WORD] &= !(1 << (index % WORD));
        }
        self.count -= count;
    }

    /// Returns the lowest word with a member.
    fn lowest_word(&mut self) -> Option<usize> {
        let summary = &self.nonzero;
        while let Some(&bits) = summary.get(self.lowest) {
            if bits != 0 {
                return Some(self.lowest * WORD + bits.trailing_zeros() as usize);
            }
            self.lowest += 1;
        }
        None
    }

    /// Returns the first member from `start` on, or else from the beginning. Costs as much as [`Bitmap::next_word`].
    pub fn next(&self, start: usize) -> Option<usize> {
        let (index, offset) = (start / WORD, start % WORD);
        let here = self.word(index) & (u64::MAX << offset);
        if here != 0 {
            return Some(index * WORD + here.trailing_zeros() as usize);
        }
        let index = self.next_word(index + 1)?;
        Some(index * WORD + self.word(index).trailing_zeros() as usize)
    }

    /// Returns the first word with a member from word `start` on, or else from the beginning. O(words / 64) at worst,
    /// O(1) if a member is near `start`.
    pub fn next_word(&self, start: usize) -> Option<usize> {
        let summary = &self.nonzero;
        let first = start / WORD;
        let masked = summary.get(first).map_or(0, |bits| bits & (u64::MAX << (start % WORD)));
        let later = summary.iter().enumerate().skip(first + 1).map(|(i, bits)| (i, *bits));
        let wrapped = summary.iter().enumerate().take(first + 1).map(|(i, bits)| (i, *bits));
        let (index, bits) =
            std::iter::once((first, masked)).chain(later).chain(wrapped).find(|(_, bits)| *bits != 0)?;
        Some(index * WORD + bits.trailing_zeros() as usize)
    }

    /// Removes the `out.len()` lowest members and writes them in ascending order.
    ///
    /// # Panics
    /// If the set has fewer members.
    pub fn take_lowest(&mut self, mut out: &mut [u32]) {
        while !out.is_empty() {
            let index = self.lowest_word().expect("the caller checked the count");
            let bits = lowest_bits(index, self.word(index), out.len());
            let (head, rest) = out.split_at_mut(bits.count as usize);
            write_members(bits, head);
            self.remove(bits);
            out = rest;
        }
    }
}

/// Returns `len` bits, all equal to `set`. The rest of the last word is 0.
fn bits(len: usize, set: bool, memory: &mut Memory) -> Result<Vec<u64>, OutOfMemory> {
    let mut words = memory.filled(len.div_ceil(WORD) as u64, if set { u64::MAX } else { 0 })?;
    if let Some(last) = words.last_mut() {
        last.view_bits_mut::<Lsb0>()[(len - 1) % WORD + 1..].fill(false);
    }
    Ok(words)
}

impl Bits {
    pub fn one(number: usize) -> Self {
        Self::run(number, 1)
    }

    /// Returns a run of numbers within one word.
    pub fn run(start: usize, len: usize) -> Self {
        Self { word: start / WORD, mask: ones(len) << (start % WORD), count: len as u32 }
    }
}

/// Returns the `n` lowest members of a word, or all of them.
fn lowest_bits(word: usize, members: u64, n: usize) -> Bits {
    let count = members.count_ones();
    if n >= count as usize {
        return Bits { word, mask: members, count };
    }
    let mut rest = members;
    for _ in 0..n {
        rest &= rest - 1;
    }
    Bits { word, mask: members & !rest, count: n as u32 }
}

/// Writes numbers in ascending order, and long runs as a whole.
fn write_members(bits: Bits, out: &mut [u32]) {
    let base = (bits.word * WORD) as u32;
    let (mut rest, mut out) = (bits.mask, out);
    while rest != 0 {
        let first = rest.trailing_zeros();
        let run = (rest >> first).trailing_ones() as usize;
        let (head, tail) = out.split_at_mut(if run < STEP { STEP.min(out.len()) } else { run });
        if run < STEP {
            for out in head {
                *out = base + rest.trailing_zeros();
                rest &= rest - 1;
            }
        } else {
            for (number, out) in (base + first..).zip(head) {
                *out = number;
            }
            rest &= !(ones(run) << first);
        }
        out = tail;
    }
}

/// Returns `run` ones from the lowest bit on; `run` is at least 1.
fn ones(run: usize) -> u64 {
    u64::MAX >> (WORD - run)
}

fn first(index: usize, mask: u64) -> usize {
    index * WORD + mask.trailing_zeros() as usize
}

/// Calls `visit` once for each group of adjacent numbers in the list that share a word.
///
/// # Panics
/// If a group contains a number twice.
pub(crate) fn for_each_word(numbers: &[u32], mut visit: impl FnMut(Bits)) {
    let mut rest = numbers;
    while let Some(&first) = rest.first() {
        let word = first as usize / WORD;
        let (mask, len) = same_word(rest, word);
        assert!(mask.count_ones() as usize == len, "a number is repeated in {:?}", &rest[..len]);
        visit(Bits { word, mask, count: len as u32 });
        rest = &rest[len..];
    }
}

/// Calls `visit` for a run of numbers, once for each word.
pub(crate) fn for_each_word_of_run(start: usize, len: usize, mut visit: impl FnMut(Bits)) {
    let end = start + len;
    let mut at = start;
    while at < end {
        let run = (WORD - at % WORD).min(end - at);
        visit(Bits::run(at, run));
        at += run;
    }
}

/// Returns the numbers at the start of a list that fall in one word, as a mask and a count.
fn same_word(numbers: &[u32], word: usize) -> (u64, usize) {
    let (mut mask, mut len) = (0u64, 0);
    while let Some(&first) = numbers.get(len)
        && first as usize / WORD == word
    {
        let rest = &numbers[len..];
        if rest.get(STEP - 1) == Some(&first.wrapping_add(STEP as u32 - 1)) {
            let offset = first as usize % WORD;
            let run = run_len(&rest[..rest.len().min(WORD - offset)]);
            mask |= ones(run) << offset;
            len += run;
            continue;
        }
        for &number in rest.iter().take(STEP) {
            if number as usize / WORD != word {
                return (mask, len);
            }
            mask |= 1 << (number as usize % WORD);
            len += 1;
        }
    }
    (mask, len)
}

/// Returns the number of consecutive numbers at the start of a list.
fn run_len(numbers: &[u32]) -> usize {
    let mut wanted = numbers[0];
    let mut len = 0;
    for step in numbers.chunks_exact(STEP) {
        let differing = (wanted..).zip(step).fold(0, |bits, (wanted, n)| bits | (wanted ^ n));
        if differing != 0 {
            break;
        }
        (wanted, len) = (wanted.wrapping_add(STEP as u32), len + STEP);
    }
    len + (wanted..).zip(&numbers[len..]).take_while(|(wanted, n)| wanted == *n).count()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testkit::rng::Rng;

    /// Returns lists of distinct numbers below 1,000: runs, ascending, descending, shuffled or with gaps.
    fn lists() -> impl Iterator<Item = Vec<u32>> {
        let mut rng = Rng::new(7);
        let mut draw = move |below: u32| rng.below(below.into()) as u32;
        (0..2000).map(move |_| {
            let mut list = Vec::new();
            for _ in 0..draw(6) {
                let (start, len, step) = (draw(800), draw(150), 1 + draw(8) / 7);
                let part = (start..start + len).step_by(step as usize);
                let mut part: Vec<u32> = part.filter(|n| !list.contains(n)).collect();
                match draw(6) {
                    0 => part.reverse(),
                    // The number that `same_word` compares fits a run, but earlier numbers are out of order.
                    1 if part.len() > 4 => part[1..4].reverse(),
                    _ => {}
                }
                list.extend(part);
            }
            list
        })
    }

    #[test]
    fn words_hold_the_numbers_of_a_list() {
        for list in lists() {
            let (mut seen, mut words) = (Vec::new(), Vec::new());
            for_each_word(&list, |bits| {
                assert_eq!(bits.mask.count_ones(), bits.count);
                let members = (0..WORD as u32).filter(|n| bits.mask >> n & 1 != 0);
                seen.extend(members.map(|n| (bits.word * WORD) as u32 + n));
                words.push(bits.word);
            });
            let mut whole: Vec<usize> = list.iter().map(|&n| n as usize / WORD).collect();
            whole.dedup();
            assert_eq!(words, whole, "one visit for adjacent numbers of a word: {list:?}");
            seen.sort_unstable();
            let mut list = list;
            list.sort_unstable();
            assert_eq!(seen, list);
        }
    }

    #[test]
    fn the_lowest_are_taken_in_order() {
        for mut list in lists() {
            let mut bitmap = Bitmap::new(1000, false, &mut Memory::new(false)).expect("a small set");
            for_each_word(&list, |bits| bitmap.insert(bits));
            list.sort_unstable();
            for part in list.chunks(list.len() / 3 + 1) {
                let mut taken = vec![0; part.len()];
                bitmap.take_lowest(&mut taken);
                assert_eq!(taken, part);
            }
            assert_eq!(bitmap.count(), 0);
        }
    }

    #[test]
    fn the_next_member_is_found_from_everywhere() {
        const LIMIT: u32 = 64 * WORD as u32 * 4 + 300;
        let ends = [0, 1, 63, 64, 4095, 4096, 4097, 8191, 8192, 12_288, 16_383, LIMIT - 1];
        let singles = ends.map(|end| vec![end]);
        let pairs = ends.windows(2).map(<[u32]>::to_vec);
        let apart = ends.map(|end| vec![end, (end + 7777) % LIMIT]);
        for list in singles.into_iter().chain(pairs).chain(apart).chain([vec![]]) {
            let mut bitmap = Bitmap::new(LIMIT, false, &mut Memory::new(false)).expect("a small set");
            list.iter().for_each(|&n| bitmap.insert(Bits::one(n as usize)));
            let near = list.iter().chain(&ends).flat_map(|&n| [n.saturating_sub(1), n, n + 1]);
            for start in near.chain((0..LIMIT).step_by(911)).map(|n| n as usize) {
                let members = list.iter().map(|&n| n as usize);
                let next =
                    |start: usize, members: &mut dyn Iterator<Item = usize>| members.min_by_key(|&n| (n < start, n));
                assert_eq!(bitmap.next(start), next(start, &mut members.clone()), "{list:?}");
                let word = start / WORD;
                let want = next(word, &mut members.map(|n| n / WORD));
                assert_eq!(bitmap.next_word(word), want, "{list:?} from word {word}");
            }
        }
    }

    #[test]
    #[should_panic(expected = "a number is repeated")]
    fn a_number_repeated_within_a_run_panics() {
        let list: Vec<u32> = (8..40).chain([20]).collect();
        for_each_word(&list, |_| ());
    }
}
