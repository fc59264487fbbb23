//! Pads a finished plan, and removes the padding: the oracle of [`Engine::plan_padded`](crate::Engine::plan_padded),
//! which pads while it plans.

use bumpalo::Bump;

use crate::id::TokenId;
use crate::plan::{BatchPlan, PlanSize, STEP_TOKENS_MAX, SharedSpans, SlotMapping, StepScratch};

/// Returns `plan` padded to `size`.
///
/// A padding row has `kv_len` 0: it attends to nothing and its output is 0. A padding token has slot -1, so nothing is
/// stored. Each padding row has one padding token; the last row has the rest.
///
/// # Panics
/// If the plan is larger than `size`. If there are fewer padding tokens than padding rows, or padding tokens without a
/// padding row. If there are more than [`STEP_TOKENS_MAX`] tokens.
pub fn padded<'pad>(plan: &BatchPlan<'_>, scratch: &'pad mut StepScratch, size: PlanSize) -> BatchPlan<'pad> {
    let PlanSize { rows, tokens } = size;
    let more_rows = rows.checked_sub(plan.rows.len()).expect("padding only adds rows");
    let more_tokens = tokens.checked_sub(plan.token_count()).expect("padding only adds tokens");
    assert!(tokens <= STEP_TOKENS_MAX as usize, "a step has at most {STEP_TOKENS_MAX} tokens");
    assert!(more_rows <= more_tokens, "each padding row takes at least one padding token");
    assert!(more_rows > 0 || more_tokens == 0, "padding tokens need a padding row");
    let bump = scratch.reset();
    let planned = PlanSize { rows: plan.rows.len(), tokens: plan.token_count() };
    let slots_of = |slots, tracks| match slots {
        SlotMapping::I32(slots) => SlotMapping::I32(pad_tracks(bump, slots, tracks, tokens)),
        SlotMapping::I64(slots) => SlotMapping::I64(pad_tracks(bump, slots, tracks, tokens)),
    };
    let more_tracks = plan.track_slots.len().checked_div(plan.token_count()).unwrap_or(0);
    BatchPlan {
        step: plan.step,
        rows: pad(bump, plan.rows, rows, |i| size.padding_row(planned, i)),
        tokens: pad(bump, plan.tokens, tokens, |_| TokenId::new(0)),
        positions: pad(bump, plan.positions, tokens, |_| 0),
        slot_mapping: slots_of(plan.slot_mapping, 1),
        track_slots: slots_of(plan.track_slots, more_tracks),
        table_writes: bump.alloc_slice_copy(plan.table_writes),
        shared: SharedSpans {
            spans: bump.alloc_slice_copy(plan.shared.spans),
            members: bump.alloc_slice_copy(plan.shared.members),
        },
        masks: match plan.masks {
            [] => &[],
            masks => pad(bump, masks, tokens, |_| 0),
        },
    }
}

/// Returns `plan` without the rows and tokens after the first ones of `size`.
pub fn unpadded<'a>(plan: &BatchPlan<'a>, scratch: &'a mut StepScratch, size: PlanSize) -> BatchPlan<'a> {
    let (bump, all, kept) = (scratch.reset(), plan.token_count(), size.tokens);
    let cut = |slots| match slots {
        SlotMapping::I32(slots) => SlotMapping::I32(cut_tracks(bump, slots, all, kept)),
        SlotMapping::I64(slots) => SlotMapping::I64(cut_tracks(bump, slots, all, kept)),
    };
    BatchPlan {
        rows: &plan.rows[..size.rows],
        tokens: &plan.tokens[..kept],
        positions: &plan.positions[..kept],
        slot_mapping: cut(plan.slot_mapping),
        track_slots: cut(plan.track_slots),
        masks: &plan.masks[..kept.min(plan.masks.len())],
        ..*plan
    }
}

/// Keeps the first `kept` of the `all` slots of each track.
fn cut_tracks<'a, T: Copy>(bump: &'a Bump, slots: &[T], all: usize, kept: usize) -> &'a [T] {
    let tracks = slots.chunks_exact(all).map(|track| &track[..kept]);
    bump.alloc_slice_copy(&tracks.collect::<Vec<_>>().concat())
}

/// Pads the slots of each track, `[tracks, slots.len() / tracks]`, to `[tracks, tokens]`.
fn pad_tracks<'a, T: Copy + From<i8>>(bump: &'a Bump, slots: &[T], tracks: usize, tokens: usize) -> &'a [T] {
    let planned = slots.len().checked_div(tracks).unwrap_or(0);
    bump.alloc_slice_fill_with(tracks * tokens, |i| {
        let (track, token) = (i / tokens, i % tokens);
        if token < planned { slots[track * planned + token] } else { T::from(-1) }
    })
}

/// Returns `items`, followed by `fill(0)`, `fill(1)` and so on, up to `len` items.
fn pad<'a, T: Copy>(bump: &'a Bump, items: &[T], len: usize, mut fill: impl FnMut(usize) -> T) -> &'a [T] {
    bump.alloc_slice_fill_with(len, |i| match items.get(i) {
        Some(item) => *item,
        None => fill(i - items.len()),
    })
}
