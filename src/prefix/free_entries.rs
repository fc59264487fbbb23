//! The free entries of the lists' slab, as a bitmap, and the choice of the entries that a list gets.
//!
//! Any free entries would do; contiguous ones are faster. Small lists are packed into words of their own. A list that
//! grows takes the free entries after its end, then those of a wholly free word, or else a gap. So sequences that grow
//! at the same time do not interleave.
//! A large list begins right after the one before it. If the earlier list then grows, it needs another extent, which
//! costs 16 bytes and one more comparison.
//!
//! Not here: the contents and the owner of an entry (`entry_list.rs`).

use crate::bitmap::{Bitmap, Bits, WORD, for_each_word_of_run};
use crate::memory::{Memory, OutOfMemory};

/// Maximum number of words that a search for a gap reads.
const GAP_WORDS: usize = 8;

/// Minimum number of entries of a gap that ends the search early.
const GAP_GOOD: usize = 16;

/// Free entries.
pub(super) struct FreeEntries {
    free: Bitmap,
    /// Words of `free` that are wholly free.
    whole: Bitmap,
    /// The word that small lists are packed into.
    open: usize,
    /// The word where the search for free entries goes on.
    cursor: usize,
}

impl FreeEntries {
    /// Creates a set of `count` free entries.
    pub fn new(count: u32, memory: &mut Memory) -> Result<Self, OutOfMemory> {
        let words = count.div_ceil(WORD as u32);
        let mut whole = Bitmap::new(words, true, memory)?;
        if !(count as usize).is_multiple_of(WORD) && memory.allocates() {
            // The last word is short, so it is never wholly free.
            let last = words as usize - 1;
            whole.remove(Bits::one(last));
        }
        Ok(Self { free: Bitmap::new(count, true, memory)?, whole, open: usize::MAX, cursor: 0 })
    }

    pub fn free_count(&self) -> u32 {
        self.free.count()
    }

    /// Returns whether an entry is free, for audits.
    pub fn is_free(&self, entry: u32) -> bool {
        self.free.contains(entry)
    }

    /// Prefetches the word of an entry that will be freed soon.
    pub fn prefetch(&self, entry: usize) {
        self.free.prefetch(entry / WORD);
    }

    /// Takes a run of at most `wanted` neighbouring free entries, and returns its start and its length. `pack` is set
    /// for a small list, which shares a word with other small lists.
    #[inline]
    pub fn take_run(&mut self, wanted: usize, pack: bool) -> (usize, usize) {
        if pack && let Some(start) = self.open_entry(wanted) {
            self.take(start, wanted);
            return (start, wanted);
        }
        if let Some(word) = self.whole.next(self.cursor) {
            if pack {
                self.open = word;
            }
            let (start, len) = self.whole_run(word, wanted);
            self.take(start, len);
            self.cursor = (start + len) / WORD;
            return (start, len);
        }
        let (start, run) = self.gap(wanted);
        let len = run.min(wanted);
        self.take(start, len);
        (start, len)
    }

    /// Returns a run of free entries between taken ones: the first of at least `wanted` and [`GAP_GOOD`] entries, or
    /// else the longest in a few words. The next call continues after this run, so that lists that grow at the same
    /// time get separate gaps.
    fn gap(&mut self, wanted: usize) -> (usize, usize) {
        let mut best = (0, 0);
        for _ in 0..GAP_WORDS {
            let word = self.free.next_word(self.cursor);
            let word = word.expect("T6: a free entry for every page not in the tree");
            self.cursor = (word + 1) % self.free.word_count();
            let (offset, run) = longest_run(self.free.word(word));
            if run > best.1 {
                best = (word * WORD + offset, run);
            }
            if best.1 >= wanted.max(GAP_GOOD) {
                break;
            }
        }
        best
    }

    /// Returns the entry after the last taken entry of the open word, if `wanted` entries fit there.
    fn open_entry(&self, wanted: usize) -> Option<usize> {
        let tail = self.free.word(self.open).leading_ones() as usize;
        (tail >= wanted).then(|| (self.open + 1) * WORD - tail)
    }

    /// Returns a run of at most `wanted` entries in the wholly free words from `word` on. A large list also takes the
    /// free entries before and after these words. So it begins right after the list before it, and takes all entries
    /// that one eviction has freed.
    fn whole_run(&self, word: usize, wanted: usize) -> (usize, usize) {
        if wanted < WORD {
            return (word * WORD, wanted);
        }
        let words = (word..word + wanted.div_ceil(WORD)).take_while(|&w| self.whole.contains(w as u32));
        let count = words.count();
        let before = match word.checked_sub(1) {
            Some(word) if word != self.open => self.free.word(word).leading_ones() as usize,
            _ => 0,
        };
        let after = self.free.word(word + count).trailing_ones() as usize;
        (word * WORD - before, wanted.min(before + count * WORD + after))
    }

    /// Takes at most `wanted` entries from `start` on, as long as they are free. Enters a new word only if the whole
    /// word is free. Returns the number of taken entries.
    #[inline]
    pub fn take_from(&mut self, start: usize, wanted: usize) -> usize {
        let mut len = 0;
        while len < wanted {
            let (word, offset) = ((start + len) / WORD, (start + len) % WORD);
            let free = self.free.word(word);
            let run = ((free >> offset).trailing_ones() as usize).min(wanted - len);
            // Do not run into the word that small lists are packed into.
            if run == 0 || (offset == 0 && free != u64::MAX) {
                break;
            }
            self.take_bits(Bits::run(start + len, run));
            len += run;
        }
        len
    }

    #[inline]
    fn take(&mut self, start: usize, len: usize) {
        for_each_word_of_run(start, len, |bits| self.take_bits(bits));
    }

    #[inline(always)] // Saves 6 % of an insertion at page_size 1.
    fn take_bits(&mut self, bits: Bits) {
        if self.free.word(bits.word) == u64::MAX {
            self.whole.remove(Bits::one(bits.word));
        }
        self.free.remove(bits);
    }

    /// Frees entries. The next search for entries begins at them.
    pub fn release(&mut self, start: usize, len: usize) {
        // In a full cache, the next list needs the entries that were freed last.
        self.cursor = start / WORD;
        for_each_word_of_run(start, len, |bits| {
            self.free.insert(bits);
            if self.free.word(bits.word) == u64::MAX {
                self.add_whole(bits.word);
            }
        });
    }

    /// Records a wholly free word. Not inlined: otherwise the compiler keeps all fields in registers during the loops
    /// of a trim, which costs 36 more instructions for each evicted leaf.
    #[inline(never)]
    fn add_whole(&mut self, word: usize) {
        self.whole.insert(Bits::one(word));
    }
}

/// Returns the start and the length of the longest run of ones in a word that is not 0. If several runs are equally
/// long, returns the lowest one.
fn longest_run(word: u64) -> (usize, usize) {
    // Each round shortens every run by one; the last bits to stay are the ends of the longest runs.
    let (mut rest, mut len) = (word, 0);
    let mut last = rest;
    while rest != 0 {
        last = rest;
        rest &= rest << 1;
        len += 1;
    }
    (last.trailing_zeros() as usize + 1 - len, len)
}

#[cfg(test)]
mod tests {
    use super::{FreeEntries, longest_run};
    use crate::memory::Memory;

    #[test]
    fn a_large_run_ends_before_the_next_taken_entry() {
        let mut entries = FreeEntries::new(256, &mut Memory::new(false)).expect("it is small");
        assert_eq!(entries.take_run(128, false), (0, 128));
        entries.release(0, 64);
        assert_eq!(entries.take_run(96, false), (0, 64));
        entries.release(64, 8);
        entries.release(0, 64);
        assert_eq!(entries.take_run(96, false), (0, 72));
    }

    #[test]
    fn the_longest_run_is_found() {
        assert_eq!(longest_run(1), (0, 1));
        assert_eq!(longest_run(u64::MAX), (0, 64));
        assert_eq!(longest_run(0b0111_0110_1100), (8, 3));
        assert_eq!(longest_run(0b11_0011), (0, 2));
        assert_eq!(longest_run(1 << 63), (63, 1));
        assert_eq!(longest_run(u64::MAX << 5 | 0b111), (5, 59));
    }
}
