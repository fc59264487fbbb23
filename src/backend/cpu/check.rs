//! What a plan may name. Plans can come from anywhere, as bytes, so nothing in them is believed.

use super::error::{CpuError, Operand};
use crate::backend::Attend;
use crate::id::{LayerId, PageId};
use crate::layout::{PoolLayout, TableShape};
use crate::plan::{BatchPlan, PageCopy, TableWrite};

/// Checks everything in a plan but its step. Cost: the batch and its new tokens.
pub(super) fn plan(
    plan: &BatchPlan<'_>,
    layout: &PoolLayout,
    table: &TableShape,
) -> Result<(), CpuError> {
    query_rows(plan)?;
    for row in plan.rows.iter().filter(|row| row.kv_len > 0) {
        if row.row.raw() >= table.rows {
            return Err(CpuError::Row { row: row.row, rows: table.rows });
        }
        let pages = u64::from(table.chunks_per_row) * u64::from(table.chunk_pages);
        let max = pages * u64::from(layout.page_size());
        if row.kv_len < row.extend_len || u64::from(row.kv_len) > max {
            let (kv_len, min) = (row.kv_len, row.extend_len);
            return Err(CpuError::KvLen { row: row.row, kv_len, min, max });
        }
    }
    slots(plan, layout)?;
    plan.table_writes.iter().try_for_each(|write| table_write(write, layout, table))
}

/// The rows of q, k, v and out: one for each token, sequence after sequence.
fn query_rows(plan: &BatchPlan<'_>) -> Result<(), CpuError> {
    let (positions, tokens) = (plan.positions.len(), plan.tokens.len());
    let slots = plan.slot_mapping.len();
    if positions != tokens || positions != slots {
        return Err(CpuError::Tokens { positions, tokens, slots });
    }
    let mut next = 0;
    for (i, row) in plan.rows.iter().enumerate() {
        if u64::from(row.qo_start) != next {
            return Err(CpuError::QueryRows { row: i });
        }
        next += u64::from(row.extend_len);
    }
    let whole = next == positions as u64;
    if whole { Ok(()) } else { Err(CpuError::QueryRows { row: plan.rows.len() }) }
}

fn slots(plan: &BatchPlan<'_>, layout: &PoolLayout) -> Result<(), CpuError> {
    let slot_count = layout.slot_count();
    match (0..plan.token_count())
        .filter_map(|i| plan.slot_mapping.get(i))
        .find(|slot| slot.raw() >= slot_count)
    {
        Some(slot) => Err(CpuError::Slot { slot, slot_count }),
        None => Ok(()),
    }
}

/// Every word ever written names a chunk or a page, so that attention need not look.
fn table_write(
    write: &TableWrite,
    layout: &PoolLayout,
    table: &TableShape,
) -> Result<(), CpuError> {
    let TableWrite { index, value } = *write;
    if index as usize >= table.words() {
        return Err(CpuError::TableIndex { index, words: table.words() });
    }
    let directory = index < table.page_word(0, 0);
    let count = if directory { table.chunk_count } else { layout.page_count() };
    if value >= count { Err(CpuError::TableValue { index, value, count }) } else { Ok(()) }
}

pub(super) fn layer(layer: LayerId, layout: &PoolLayout) -> Result<(), CpuError> {
    let layers = layout.layers();
    if layer.raw() < layers { Ok(()) } else { Err(CpuError::Layer { layer, layers }) }
}

pub(super) fn page(page: PageId, layout: &PoolLayout) -> Result<(), CpuError> {
    let page_count = layout.page_count();
    if page.raw() < page_count { Ok(()) } else { Err(CpuError::Page { page, page_count }) }
}

pub(super) fn copies(copies: &[PageCopy], layout: &PoolLayout) -> Result<(), CpuError> {
    copies.iter().flat_map(|copy| [copy.source, copy.target]).try_for_each(|id| page(id, layout))
}

pub(super) fn attend(attend: &Attend, layout: &PoolLayout) -> Result<(), CpuError> {
    let (q_heads, kv_heads) = (attend.q_heads, layout.kv_heads());
    if q_heads == 0 || q_heads % kv_heads != 0 {
        return Err(CpuError::Heads { q_heads, kv_heads });
    }
    if attend.window == Some(0) {
        return Err(CpuError::EmptyWindow);
    }
    if !attend.scale.is_finite() {
        return Err(CpuError::Scale { scale: attend.scale });
    }
    match attend.soft_cap {
        Some(soft_cap) if !(soft_cap > 0.0 && soft_cap.is_finite()) => {
            Err(CpuError::SoftCap { soft_cap })
        }
        _ => Ok(()),
    }
}

pub(super) fn lse(lse: Option<&[f32]>, wanted: usize) -> Result<(), CpuError> {
    match lse.map(<[f32]>::len) {
        Some(actual) if actual != wanted => {
            Err(CpuError::Length { operand: Operand::Lse, actual, wanted })
        }
        _ => Ok(()),
    }
}
