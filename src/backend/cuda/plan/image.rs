//! The data of the staged plan that launches need: the limits of steps, and the device addresses.

/// The limits of all steps.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StepLimits {
    pub tokens: u32,
    pub rows: u32,
    /// For tests: reads every span once, at any cost.
    pub all_spans: bool,
}

/// The device addresses of the staged plan.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Image {
    pub slots: u64,
    /// Slots of the second track, and bytes from one track to the next.
    pub track_slots: u64,
    pub track_bytes: u64,
    pub positions: u64,
    pub rows: u64,
    /// The chunk rows, for each size of chunks.
    pub chunks: u64,
    /// First chunk of each row's scores, in pools with labels.
    pub starts: u64,
    /// The pages of states, i32 `[2, pages of a state, rows]`: those to read, then those to write. Then the first token
    /// of each row and the number of tokens, u32 `[rows + 1]`. Only in pools with states.
    pub states: u64,
    /// Bytes from one page of states to the next.
    pub state_bytes: u64,
    /// The decode splits of each variant of attention, and the plans of shared spans.
    pub splits: u64,
    /// Masks of trees.
    pub masks: u64,
    /// Whether some rows are trees.
    pub trees: bool,
    pub token_count: usize,
    pub row_count: usize,
    /// Bytes of one entry of `slots`.
    pub slot_bytes: usize,
}

impl Image {
    /// Returns the slots of the new tokens in a track.
    pub fn slots_of(&self, track: u32) -> u64 {
        match track.checked_sub(1) {
            None => self.slots,
            Some(index) => self.track_slots + u64::from(index) * self.track_bytes,
        }
    }
}

/// Copies records to offset `at` and returns the offset after them.
pub fn put<T: bytemuck::Pod>(bytes: &mut [u8], at: usize, records: &[T]) -> usize {
    let end = at + size_of_val(records);
    bytes[at..end].copy_from_slice(bytemuck::cast_slice(records));
    end
}
