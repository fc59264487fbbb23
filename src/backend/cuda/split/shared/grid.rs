//! Which kernel reads a step's spans once, and how its CTAs lie on a device.
//!
//! Not here: what each CTA works on (`split/shared.rs`), the kernels' names (`attend_shared.rs`).

use super::super::super::params::{
    SPAN_ROWS, SPAN_ROWS_256, TAIL_WARPS, TAIL_WARPS_256, TAIL_WARPS_ANY,
};
use super::super::{DECODE_ROWS, SplitShape};
use super::{PARTIAL_ROWS, SpanCosts};
use crate::plan::BatchRow;

/// Kernels whose tails have room for so many query rows: `attend_shared_*_r8_sm90a` and so on.
pub const TAIL_ROWS: [u32; 2] = [DECODE_ROWS[0], DECODE_ROWS[1]];

/// How the kernels that read spans once for a variant lie on a device.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct SharedGrid {
    /// CTAs of a launch.
    pub ctas: u32,
    /// Those of a multiprocessor.
    pub resident: u32,
    /// Warps of a CTA that work on tails.
    pub warps: u32,
    /// Query rows of a query tile, at most.
    pub rows: u32,
    /// Tiles that an item takes as long as beside its own.
    pub item_tiles: u32,
    /// Of each of [`TAIL_ROWS`].
    pub costs: [SpanCosts; TAIL_ROWS.len()],
}

impl SharedGrid {
    /// The kernels of Hopper for head_dim 128: a CTA fills a multiprocessor.
    pub const fn hopper(multiprocessors: u32) -> Self {
        Self {
            ctas: multiprocessors,
            resident: 1,
            warps: TAIL_WARPS,
            rows: SPAN_ROWS,
            item_tiles: 4,
            costs: SpanCosts::H200,
        }
    }

    /// All others.
    pub fn general(multiprocessors: u32, resident: u32, head_dim: u32) -> Self {
        let is_wide = head_dim > 128;
        Self {
            ctas: multiprocessors * resident,
            resident,
            warps: if is_wide { TAIL_WARPS_256 } else { TAIL_WARPS_ANY },
            rows: if is_wide { SPAN_ROWS_256 } else { SPAN_ROWS },
            item_tiles: 3,
            costs: [0, 1].map(|tails| SpanCosts::general(head_dim, tails).of_ctas(resident)),
        }
    }

    /// Query rows that the spans' sums have room for.
    pub const fn partial_rows(&self) -> usize {
        (2 * self.ctas * self.rows + PARTIAL_ROWS) as usize
    }

    /// Whether there is a work chunk for each stripe of the tails.
    pub fn serves(&self, shape: &SplitShape) -> bool {
        self.ctas > 1 && self.warps * self.ctas >= shape.decode_stripes(shape.narrowest())
    }

    /// Work chunks of the tails, at most.
    pub fn work_count(&self, shape: &SplitShape) -> usize {
        (self.warps * self.ctas).div_ceil(shape.decode_stripes(shape.narrowest())) as usize
    }
}

impl SplitShape {
    /// The kernel that reads spans once for a step, whose split is that of a step without spans: its place in
    /// [`TAIL_ROWS`]. It must leave what the decode kernel leaves, or nothing. None where none does, since rows are
    /// trees or have more query rows.
    pub fn step_tails(&self, tokens: usize, rows: &[BatchRow]) -> Option<usize> {
        let (narrowest, widest) = (self.narrowest(), TAIL_ROWS.len() - 1);
        if tokens <= rows.len() {
            return Some(narrowest);
        }
        let flat = self.decoded(self.width(tokens, rows.len()));
        let serves = |tails: usize| {
            let taken = self.decoded(tails);
            self.leaves_none(tails, rows)
                || rows.iter().all(|row| taken.leaves(row) == flat.leaves(row))
        };
        // Tails of fewer query rows are faster.
        let [few, more] = [narrowest, widest].map(|tails| self.decoded(tails));
        let is_wide = rows.iter().any(|row| few.leaves(row) && more.has(row));
        let wanted = if is_wide { [widest, narrowest] } else { [narrowest; 2] };
        wanted.into_iter().find(|&tails| serves(tails))
    }

    /// Whether the kernel of `tails` leaves no row to the extend kernel.
    pub fn leaves_none(&self, tails: usize, rows: &[BatchRow]) -> bool {
        let taken = self.decoded(tails);
        rows.iter().all(|row| !taken.leaves(row))
    }

    /// Most new tokens of members, in a step of so many tokens and rows.
    pub fn members_max(&self, tokens: usize, rows: usize) -> usize {
        tokens.min(rows * (TAIL_ROWS[TAIL_ROWS.len() - 1] / self.group) as usize)
    }
}
