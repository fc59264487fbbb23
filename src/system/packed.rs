//! A planned batch in FlashInfer's contract, for hosts that bring their own attention kernels.

use bumpalo::Bump;

use crate::error::Error;
use crate::id::PageId;
use crate::plan::{Extend, PackedPlan};
use crate::sequence::SequenceTable;

/// The page tables of a batch as packed CSR arrays, as they stand after the batch was planned. O(pages of the batch):
/// this is the cost that plans avoid.
///
/// # Errors
/// [`Error::UnknownSequence`], [`Error::Preempted`].
pub(crate) fn packed<'step>(
    sequences: &SequenceTable,
    page_size: u32,
    items: &[Extend],
    bump: &'step Bump,
) -> Result<PackedPlan<'step>, Error> {
    let mut page_count = 0;
    for item in items {
        page_count += sequences.running(item.seq)?.page_len as usize;
    }
    let qo_indptr = bump.alloc_slice_fill_copy(items.len() + 1, 0_i32);
    let kv_indptr = bump.alloc_slice_fill_copy(items.len() + 1, 0_i32);
    let kv_indices = bump.alloc_slice_fill_copy(page_count, 0_i32);
    let kv_last_page_len = bump.alloc_slice_fill_copy(items.len(), 0_i32);
    let mut at = 0;
    for (i, item) in items.iter().enumerate() {
        let sequence = sequences.running(item.seq)?;
        for piece in sequences.page_pieces(sequence, 0, sequence.page_len) {
            let pages: &[i32] = bytemuck::cast_slice(PageId::peel(piece));
            kv_indices[at..at + pages.len()].copy_from_slice(pages);
            at += pages.len();
        }
        qo_indptr[i + 1] = qo_indptr[i] + item.len as i32;
        kv_indptr[i + 1] = at as i32;
        kv_last_page_len[i] = ((sequence.planned_len.max(1) - 1) % page_size + 1) as i32;
    }
    Ok(PackedPlan { qo_indptr, kv_indptr, kv_indices, kv_last_page_len })
}
