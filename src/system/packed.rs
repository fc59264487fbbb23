//! A planned batch in FlashInfer's contract, for hosts that bring their own attention kernels.

use bumpalo::Bump;

use crate::error::Error;
use crate::id::PageId;
use crate::layout::PoolLayout;
use crate::plan::{Extend, PackedPlan};
use crate::sequence::{Sequence, SequenceTable};
use crate::step::StepLog;

/// The page tables of planned items as packed CSR arrays, as they stand after the plan. O(pages of the items): this is
/// the cost that plans avoid.
///
/// # Errors
/// [`Error::UnknownSequence`], [`Error::Preempted`], [`Error::NotPlanned`], [`Error::PackedTree`],
/// [`Error::PackedLimit`].
pub(crate) fn packed<'step>(
    sequences: &SequenceTable,
    steps: &StepLog,
    layout: &PoolLayout,
    items: &[Extend],
    bump: &'step Bump,
) -> Result<PackedPlan<'step>, Error> {
    let Totals { pages, tokens } = check_items(sequences, steps, items)?;
    check_limits(layout.page_count().into(), pages, tokens)?;
    let qo_indptr = bump.alloc_slice_fill_copy(items.len() + 1, 0_i32);
    let kv_indptr = bump.alloc_slice_fill_copy(items.len() + 1, 0_i32);
    let kv_indices = bump.alloc_slice_fill_copy(pages as usize, 0_i32);
    let kv_last_page_len = bump.alloc_slice_fill_copy(items.len(), 0_i32);
    let mut at = 0;
    for (i, item) in items.iter().enumerate() {
        let sequence = sequences.running(item.seq)?;
        for piece in sequences.page_pieces(sequence, 0, sequence.page_len) {
            let pages: &[i32] = bytemuck::cast_slice(PageId::as_raw(piece));
            kv_indices[at..at + pages.len()].copy_from_slice(pages);
            at += pages.len();
        }
        qo_indptr[i + 1] = qo_indptr[i] + item.len as i32;
        kv_indptr[i + 1] = at as i32;
        kv_last_page_len[i] = ((sequence.planned_len - 1) % layout.page_size() + 1) as i32;
    }
    Ok(PackedPlan { qo_indptr, kv_indptr, kv_indices, kv_last_page_len })
}

/// Pages and new tokens of a batch's items.
pub(super) struct Totals {
    pub pages: u64,
    pub tokens: u64,
}

/// Refuses items that are not planned as they are, or cannot be packed.
pub(super) fn check_items(
    sequences: &SequenceTable,
    steps: &StepLog,
    items: &[Extend],
) -> Result<Totals, Error> {
    let (mut totals, mut before) = (Totals { pages: 0, tokens: 0 }, 0);
    for &Extend { seq, len } in items {
        let sequence = sequences.running(seq)?;
        // Items rise within a batch, so each stands at most once.
        if sequence.last_item <= before || !is_planned(sequence, steps, len) {
            return Err(Error::NotPlanned { seq, len });
        }
        if sequences.is_tree(sequence, len) {
            return Err(Error::PackedTree { seq });
        }
        before = sequence.last_item;
        totals.pages += u64::from(sequence.page_len);
        totals.tokens += u64::from(len);
    }
    Ok(totals)
}

/// Refuses numbers that the contract's signed 32-bit arrays cannot hold: page numbers, and the sums of both kinds.
pub(super) fn check_limits(pool_pages: u64, pages: u64, tokens: u64) -> Result<(), Error> {
    let max = i32::MAX as u64;
    // Page numbers count from 0.
    let numbers =
        [("pool pages", pool_pages, max + 1), ("pages", pages, max), ("tokens", tokens, max)];
    match numbers.into_iter().find(|&(_, value, max)| value > max) {
        Some((name, value, max)) => Err(Error::PackedLimit { name, value, max }),
        None => Ok(()),
    }
}

/// Whether the last plan of a sequence is of an unfinished step, extends it by `len` tokens, and still stands.
fn is_planned(sequence: &Sequence, steps: &StepLog, len: u32) -> bool {
    steps.samples_next(sequence.last_item) && {
        let item = steps.item(sequence.last_item);
        (item.end, item.end - item.start) == (sequence.planned_len, len)
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
