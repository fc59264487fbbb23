//! The data of the staged plan that launches need: the limits of steps, and the device addresses.

/// The limits of all steps.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::backend::cuda) struct StepLimits {
    pub(in crate::backend::cuda) tokens: u32,
    pub(in crate::backend::cuda) rows: u32,
    /// For tests: reads every span once, at any cost.
    pub(in crate::backend::cuda) all_spans: bool,
}

/// The device addresses of the staged plan.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::backend::cuda) struct Image {
    pub(in crate::backend::cuda) slots: u64,
    /// Slots of the second track, and bytes from one track to the next.
    pub(in crate::backend::cuda) track_slots: u64,
    pub(in crate::backend::cuda) track_bytes: u64,
    pub(in crate::backend::cuda) positions: u64,
    pub(in crate::backend::cuda) rows: u64,
    /// The chunk rows, for each size of chunks.
    pub(in crate::backend::cuda) chunks: u64,
    /// First chunk of each row's scores, in pools with labels.
    pub(in crate::backend::cuda) starts: u64,
    /// The decode splits of each variant of attention, and the plans of shared spans.
    pub(in crate::backend::cuda) splits: u64,
    /// Masks of trees.
    pub(in crate::backend::cuda) masks: u64,
    /// Whether some rows are trees.
    pub(in crate::backend::cuda) trees: bool,
    pub(in crate::backend::cuda) token_count: usize,
    pub(in crate::backend::cuda) row_count: usize,
    /// Bytes of one entry of `slots`.
    pub(in crate::backend::cuda) slot_bytes: usize,
}

impl Image {
    /// Returns the slots of the new tokens in a track.
    pub(in crate::backend::cuda) fn slots_of(&self, track: u32) -> u64 {
        match track.checked_sub(1) {
            None => self.slots,
            Some(index) => self.track_slots + u64::from(index) * self.track_bytes,
        }
    }
}

/// Copies records to offset `at` and returns the offset after them.
pub(in crate::backend::cuda) fn put<T: bytemuck::Pod>(bytes: &mut [u8], at: usize, records: &[T]) -> usize {
    let end = at + size_of_val(records);
    bytes[at..end].copy_from_slice(bytemuck::cast_slice(records));
    end
}
