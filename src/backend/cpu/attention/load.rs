//! Loads tiles of K and V: finds each slot in the pool, widens its numbers to f32 and scales them.

use std::ops::Range;

use bytemuck::cast_slice_mut;
use half::bf16;

use super::{Scratch, computes_in_place, scales_products};
use crate::backend::cpu::fold::Widen;
use crate::backend::cpu::math::{Line, TILE};
use crate::backend::cpu::number::Number;
use crate::backend::cpu::scales::{Row, byte, side_count};
use crate::backend::cpu::unit::{Job, Unit};

#[derive(Debug, Default)]
pub(super) struct Places {
    /// Start of each slot's K and V in the pool, in elements.
    pub(super) starts: [[usize; TILE]; 2],
    /// `[kv heads]`: scales of each slot's K and V, used if logits and weights are scaled instead of K and V.
    pub(super) scales: Vec<[[f32; TILE]; 2]>,
}

impl Scratch {
    /// Widens the unit's queries, and allocates its tiles.
    pub(super) fn load_queries<T: Number>(&mut self, job: &Job<'_, T>, unit: Unit) {
        let (group, lines) = (job.group(), job.lines());
        let head_dim = job.layout.head_dim() as usize;
        let rows = unit.row_count(group);
        // The padding of a head to whole lines must be 0. If the last unit's heads had another size, the buffers may
        // contain other numbers there.
        let is_padded = !head_dim.is_multiple_of(Line::NUMBERS);
        if std::mem::replace(&mut self.head_dim, head_dim) != head_dim && is_padded {
            [&mut self.q, &mut self.k, &mut self.v].into_iter().for_each(Vec::clear);
        }
        grow(&mut self.q, rows * lines);
        let tiles = if computes_in_place(job, unit) { 0 } else { unit.heads as usize * TILE };
        grow(&mut self.k, tiles * lines);
        if !job.layout.is_latent() {
            grow(&mut self.v, tiles * lines);
        }
        grow(&mut self.logits, rows * TILE);
        grow(&mut self.factors, rows);
        grow(&mut self.places.scales, unit.heads as usize);
        grow(&mut self.ahead.scales, unit.heads as usize);
        for ((token, head), wide) in unit.rows(group).zip(self.q.chunks_exact_mut(lines)) {
            let start = token * job.q_stride + head * head_dim;
            let wide: &mut [f32] = cast_slice_mut(wide);
            let wide = &mut wide[..head_dim];
            job.q.elements.slice(start..start + head_dim).convert_into(wide);
        }
    }

    /// Widens K and V of the positions in `tile`, page by page.
    pub(super) fn load_tile<T: Number>(&mut self, job: &Job<'_, T>, unit: Unit, tile: Range<u32>) {
        let page_size = job.layout.page_size();
        let mut at = tile.start;
        while at < tile.end {
            // A token of a draft tree may not see all slots of a page, so the loop loads one slot at a time.
            let first = unit.table_index(at);
            let run = if unit.is_tree() { 1 } else { page_size - first % page_size };
            let end = tile.end.min(at.saturating_add(run));
            self.load_slots(job, unit, first..first + (end - at), (at - tile.start) as usize);
            at = end;
        }
    }

    /// Widens K and V of `positions` into the tiles of K and V, from row `row` on. All positions are in one page. For
    /// latent rows, K's tile contains V. If the unit widens numbers in registers, the function fills only `ahead`.
    pub(super) fn load_slots<T: Number>(&mut self, job: &Job<'_, T>, unit: Unit, positions: Range<u32>, row: usize) {
        let (page_size, first) = (job.layout.page_size(), positions.start);
        let width = unit.heads as usize * stored_dim(job);
        let page = job.table.track_page(job.words, unit.row.row, job.place.track, first / page_size);
        let in_place = computes_in_place(job, unit);
        let sides = [(&job.k, &mut self.k), (&job.v, &mut self.v)];
        for (side, (strides, tiles)) in sides.into_iter().enumerate().take(side_count(job.layout)) {
            let head = u64::from(unit.first_head) * strides.head;
            let slot = Row { side, layer: job.layer, lane: job.place.lane, page, offset: 0 };
            for position in positions.clone() {
                let (offset, row) = (position % page_size, row + (position - first) as usize);
                let byte = strides.row(job.place.lane, page, offset) + head;
                let start = byte as usize / size_of::<T>();
                self.ahead.starts[side][row] = start;
                if !in_place {
                    widen_slot(&job.pool[start..start + width], tiles, row, job);
                }
                if T::QUANTISED && !scales_products(job) {
                    let slot = Row { offset, ..slot };
                    scale_slot(slot, unit, tiles, row, job);
                    widen_rope(slot, tiles, row, job);
                }
            }
            if scales_products(job) {
                let slot = Row { offset: first % page_size, ..slot };
                let heads = unit.first_head..unit.first_head + unit.heads;
                for (head, scales) in heads.zip(&mut self.ahead.scales) {
                    let scales = &mut scales[side][row..row + positions.len()];
                    job.scales.read(job.numbers, slot, head, scales);
                }
            }
        }
    }
}

fn grow<T: Copy + Default>(buffer: &mut Vec<T>, len: usize) {
    if buffer.len() < len {
        buffer.resize(len, T::default());
    }
}

/// Returns the number of contiguous elements of a head: all of K, but only the quantised part of quantised latent rows.
fn stored_dim<T: Number>(job: &Job<'_, T>) -> usize {
    let dim = if T::QUANTISED { job.layout.value_dim() } else { job.layout.head_dim() };
    dim as usize
}

/// Widens the heads of one slot, each to row `row` of its tile.
fn widen_slot<T: Number>(slot: &[T], tiles: &mut [Line], row: usize, job: &Job<'_, T>) {
    let (lines, dim) = (job.lines(), stored_dim(job));
    let tiles = tiles.chunks_exact_mut(TILE * lines);
    for (head, tile) in slot.chunks_exact(dim).zip(tiles) {
        let wide = &mut cast_slice_mut(&mut tile[row * lines..(row + 1) * lines])[..dim];
        if let Some(Widen(head, wide)) = job.isa.run(Widen(head, wide)) {
            T::widen(head, wide);
        }
    }
}

fn widen_rope<T: Number>(slot: Row, tiles: &mut [Line], row: usize, job: &Job<'_, T>) {
    let Some((strides, pool)) = job.rope else { return };
    let (lines, dim, row_len) = (job.lines(), stored_dim(job), job.layout.head_dim() as usize);
    let start = byte(strides, slot, 0) as usize / size_of::<bf16>();
    let wide: &mut [f32] = cast_slice_mut(&mut tiles[row * lines..(row + 1) * lines]);
    bf16::widen(&pool[start..start + row_len - dim], &mut wide[dim..row_len]);
}

/// Multiplies the stored numbers in row `row` of each head's tile by the slot's scale.
fn scale_slot<T: Number>(slot: Row, unit: Unit, tiles: &mut [Line], row: usize, job: &Job<'_, T>) {
    let (lines, dim) = (job.lines(), stored_dim(job));
    let heads = unit.first_head..unit.first_head + unit.heads;
    for (head, tile) in heads.zip(tiles.chunks_exact_mut(TILE * lines)) {
        let scale = job.scales.of_head(job.numbers, slot, head);
        let wide: &mut [f32] = cast_slice_mut(&mut tile[row * lines..(row + 1) * lines]);
        for x in &mut wide[..dim] {
            *x *= scale;
        }
    }
}
