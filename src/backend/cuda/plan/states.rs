//! The pages of the states of a step's rows in the image.
//!
//! The host gathers them from the words of each open step, as it has these anyway: a kernel would need them on the
//! device for each open step, and one more launch.

use crate::backend::step_states::{StateColumns, StepStates};
use crate::plan::BatchPlan;

/// Writes the pages to read, then those to write, i32 `[2, pages of a state, rows]`, `stride` bytes from one page of a
/// state to the next. Padding has -1. Then writes the first token of each row, and the number of tokens.
pub fn put(columns: &mut StateColumns, states: &StepStates, plan: &BatchPlan<'_>, bytes: &mut [u8], stride: usize) {
    let words: &mut [u32] = bytemuck::cast_slice_mut(bytes);
    let (state_words, rows) = (states.row_words(), plan.rows.len());
    if state_words == 0 {
        return;
    }
    let (pages, starts) = words.split_at_mut(state_words * stride / 4);
    columns.put(states, plan.step, rows, pages, stride / 4);
    for (out, row) in starts.iter_mut().zip(plan.rows) {
        *out = row.qo_start;
    }
    starts[rows] = plan.token_count() as u32;
}
