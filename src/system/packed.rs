//! A planned batch in FlashInfer's format, for hosts with their own attention kernels.

use bumpalo::Bump;

use crate::config::EngineShape;
use crate::error::Error;
use crate::id::PageId;
use crate::plan::{Extend, PackedPlan, PackedStates};
use crate::sequence::{Sequence, SequenceTable};
use crate::step::StepLog;
use crate::system::access::access;
use crate::world::World;

access! {
    /// Tables of [`packed`] and [`packed_levels`](super::packed_levels::packed_levels).
    struct Packed of &World {
        shape: &EngineShape,
        sequences: &SequenceTable,
        steps: &StepLog,
    }
}

/// Implements [`Engine::packed_track`](crate::Engine::packed_track). O(pages of the items).
///
/// # Errors
/// [`Error::UnknownSequence`], [`Error::Preempted`], [`Error::NotPlanned`], [`Error::PackedTree`],
/// [`Error::PackedLimit`].
pub(crate) fn packed<'step>(
    world: &Packed<'_>,
    track: u32,
    items: &[Extend],
    bump: &'step Bump,
) -> Result<PackedPlan<'step>, Error> {
    let all = check_items(world, items)?;
    let Packed { shape, sequences, .. } = *world;
    let first = |sequence: &Sequence| sequences.limits().first_place(track, sequence.published);
    let not_held = items.iter().map(|item| sequences.running(item.seq).map_or(0, first) as usize);
    let pages = if track == 0 { all } else { all - not_held.sum::<usize>() };
    let mut packer = Packer::new(items.len(), pages, bump);
    for item in items {
        let sequence = sequences.running(item.seq)?;
        let pages = sequences.page_pieces(sequence, track, first(sequence), sequence.page_len);
        packer.push(item.len, pages, last_page_len(sequence, shape.layout.page_size()));
    }
    Ok(packer.finish())
}

/// Implements [`Engine::packed_states`](crate::Engine::packed_states). O(rows, times the pages of a state).
///
/// # Errors
/// As [`packed`], and [`Error::PackedRows`].
pub(crate) fn packed_states<'step>(
    world: &Packed<'_>,
    items: &[Extend],
    rows: usize,
    bump: &'step Bump,
) -> Result<PackedStates<'step>, Error> {
    check_items(world, items)?;
    if rows < items.len() {
        return Err(Error::PackedRows { items: items.len(), rows });
    }
    let Packed { shape, sequences, .. } = *world;
    let [reads, writes] = [0, 1].map(|part| {
        let all = bump.alloc_slice_fill_copy(shape.table.state_pages as usize * rows, -1);
        for (row, item) in items.iter().enumerate() {
            let sequence = sequences.running(item.seq).expect("checked");
            for (track, page) in sequences.planned_state(sequence, part).iter().enumerate() {
                all[track * rows + row] = page.raw() as i32;
            }
        }
        &*all
    });
    Ok(PackedStates { reads, writes })
}

/// Rejects items that are not the last plans of their sequences, or cannot be packed. Returns the number of their
/// pages of group 0.
pub(super) fn check_items(world: &Packed<'_>, items: &[Extend]) -> Result<usize, Error> {
    let Packed { shape, sequences, steps } = *world;
    let (mut pages, mut tokens, mut before) = (0, 0, 0);
    for &Extend { seq, len } in items {
        let sequence = sequences.running(seq)?;
        // The step log numbers items in ascending order. An item that breaks this order is repeated or out of order.
        if sequence.last_item <= before || !is_planned(sequence, steps, len) {
            return Err(Error::NotPlanned { seq, len });
        }
        if sequences.has_tree(sequence, len) {
            return Err(Error::PackedTree { seq });
        }
        before = sequence.last_item;
        pages += u64::from(sequence.page_len);
        tokens += u64::from(len);
    }
    check_limits(shape.layout.page_count().into(), pages, tokens)?;
    Ok(pages as usize)
}

/// Rejects numbers beyond FlashInfer's signed 32-bit arrays.
fn check_limits(pool_pages: u64, pages: u64, tokens: u64) -> Result<(), Error> {
    let max = i32::MAX as u64;
    let numbers = [("pool pages", pool_pages, max + 1), ("pages", pages, max), ("tokens", tokens, max)];
    match numbers.into_iter().find(|&(_, value, max)| value > max) {
        Some((name, value, max)) => Err(Error::PackedLimit { name, value, max }),
        None => Ok(()),
    }
}

/// Returns whether the last plan of a sequence belongs to an unfinished step, has `len` tokens, and was not rolled
/// back.
fn is_planned(sequence: &Sequence, steps: &StepLog, len: u32) -> bool {
    steps.samples_next(sequence.last_item) && {
        let item = steps.item(sequence.last_item);
        (item.end, item.end - item.start) == (sequence.planned_len, len)
    }
}

/// Returns the number of tokens in the last page of a sequence after its plan.
pub(super) const fn last_page_len(sequence: &Sequence, page_size: u32) -> u32 {
    (sequence.planned_len - 1) % page_size + 1
}

/// Packed arrays that are filled entry by entry. The caller has checked that the numbers of tokens and pages fit `i32`.
pub(super) struct Packer<'step> {
    qo_indptr: &'step mut [i32],
    kv_indptr: &'step mut [i32],
    kv_indices: &'step mut [i32],
    kv_last_page_len: &'step mut [i32],
    entries: usize,
    pages: usize,
}

impl<'step> Packer<'step> {
    /// Creates arrays for `entries` entries, and `pages` pages in total.
    #[inline] // The callers bound the sizes, so the compiler can omit the size checks of the allocations.
    pub fn new(entries: usize, pages: usize, bump: &'step Bump) -> Self {
        Self {
            qo_indptr: bump.alloc_slice_fill_copy(entries + 1, 0),
            kv_indptr: bump.alloc_slice_fill_copy(entries + 1, 0),
            kv_indices: bump.alloc_slice_fill_copy(pages, 0),
            kv_last_page_len: bump.alloc_slice_fill_copy(entries, 0),
            entries: 0,
            pages: 0,
        }
    }

    /// Appends an entry: the number of its new tokens, and the pages that they read.
    pub fn push<'a>(&mut self, tokens: u32, pieces: impl Iterator<Item = &'a [PageId]>, last_page_len: u32) {
        for piece in pieces {
            let pages: &[i32] = bytemuck::cast_slice(PageId::as_raw(piece));
            self.kv_indices[self.pages..self.pages + pages.len()].copy_from_slice(pages);
            self.pages += pages.len();
        }
        let entry = self.entries;
        self.qo_indptr[entry + 1] = self.qo_indptr[entry] + tokens as i32;
        self.kv_indptr[entry + 1] = self.pages as i32;
        self.kv_last_page_len[entry] = last_page_len as i32;
        self.entries += 1;
    }

    pub fn finish(self) -> PackedPlan<'step> {
        let Self { qo_indptr, kv_indptr, kv_indices, kv_last_page_len, .. } = self;
        PackedPlan { qo_indptr, kv_indptr, kv_indices, kv_last_page_len }
    }
}

#[cfg(test)]
mod tests {
    use super::check_limits;
    use crate::error::Error;

    #[test]
    fn numbers_past_31_bits_are_refused() {
        let max = i32::MAX as u64;
        assert_eq!(check_limits(max + 1, max, max), Ok(()));
        let refused = |name, value, max| Err(Error::PackedLimit { name, value, max });
        assert_eq!(check_limits(max + 2, 1, 1), refused("pool pages", max + 2, max + 1));
        assert_eq!(check_limits(1, max + 1, 1), refused("pages", max + 1, max));
        assert_eq!(check_limits(1, 1, max + 1), refused("tokens", max + 1, max));
    }
}
