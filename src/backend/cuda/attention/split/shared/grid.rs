//! The kernels that read a step's spans once, and their grids on a device.

use super::super::{DECODE_ROWS, DecodeFilter, SplitShape};
use super::{PARTIAL_ROWS, SpanCosts};
use crate::backend::cuda::kernels::params::{
    SPAN_ROWS, SPAN_ROWS_256, TAIL_WARPS, TAIL_WARPS_256, TAIL_WARPS_ANY, is_tree,
};
use crate::plan::BatchRow;

/// Maximum number of query rows of a tail in each kernel, such as 8 in `attend_shared_*_r8_sm90a`.
pub const TAIL_ROWS: [u32; 2] = [DECODE_ROWS[0], DECODE_ROWS[1]];

/// Maximum number of query rows of a row with own items.
pub const ITEM_ROWS: u32 = 64;

/// The rows that a kernel with shared spans takes. The extend kernel takes all other rows that have new tokens.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RowAssignment {
    /// The kernel, an index of [`TAIL_ROWS`].
    pub tails: usize,
    /// Filter of the rows that have a tail.
    with_tails: DecodeFilter,
    /// Maximum number of new tokens of a row with own items. One query tile contains all of them.
    longest: u32,
}

impl RowAssignment {
    /// Returns the assignment of rows to kernel `tails`, an index of [`TAIL_ROWS`].
    pub fn new(shape: &SplitShape, grid: &SharedGrid, tails: usize) -> Self {
        let longest = ITEM_ROWS.min(grid.rows) / shape.group;
        Self { tails, with_tails: shape.decoded(tails), longest }
    }

    pub fn has_tail(&self, row: &BatchRow) -> bool {
        self.with_tails.has(row)
    }

    /// Returns whether rows may have own items.
    pub const fn may_have_items(&self) -> bool {
        self.longest > self.with_tails.longest
    }

    pub fn has_items(&self, row: &BatchRow) -> bool {
        let is_long = row.extend_len > self.with_tails.longest && row.extend_len <= self.longest;
        is_long && row.kv_len > 0 && !is_tree(row)
    }

    /// Returns whether the extend kernel takes a row.
    pub fn goes_to_extend(&self, row: &BatchRow) -> bool {
        self.with_tails.goes_to_extend(row) && !self.has_items(row)
    }
}

/// The grid of a variant's kernels that read spans once.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct SharedGrid {
    /// Number of CTAs of a launch.
    pub ctas: u32,
    /// Number of warps of a CTA that work on tails.
    pub warps: u32,
    /// Maximum number of query rows of a query tile.
    pub rows: u32,
    /// Fixed cost of an item in tiles.
    pub item_tiles: u32,
    /// Bytes of an element of K or V.
    pub number_bytes: u32,
    /// Constants of each kernel of [`TAIL_ROWS`].
    pub costs: [SpanCosts; TAIL_ROWS.len()],
}

impl SharedGrid {
    /// Returns the grid of Hopper's kernels for head_dim 128: a CTA fills a multiprocessor.
    pub const fn hopper(multiprocessors: u32) -> Self {
        Self {
            ctas: multiprocessors,
            warps: TAIL_WARPS,
            rows: SPAN_ROWS,
            item_tiles: 4,
            number_bytes: 2,
            costs: SpanCosts::H200,
        }
    }

    /// Returns the grid of all other 16-bit kernels.
    pub fn general(multiprocessors: u32, resident: u32, head_dim: u32) -> Self {
        let is_wide = head_dim > 128;
        Self {
            ctas: multiprocessors * resident,
            warps: if is_wide { TAIL_WARPS_256 } else { TAIL_WARPS_ANY },
            rows: if is_wide { SPAN_ROWS_256 } else { SPAN_ROWS },
            item_tiles: 3,
            number_bytes: 2,
            costs: [0, 1].map(|tails| SpanCosts::general(head_dim, tails).of_ctas(resident)),
        }
    }

    /// Returns the grid of the kernels over fp8.
    pub fn over_fp8(multiprocessors: u32, resident: u32, head_dim: u32) -> Self {
        Self {
            number_bytes: 1,
            costs: [0, 1].map(|tails| SpanCosts::over_fp8(head_dim, tails).of_ctas(resident)),
            ..Self::general(multiprocessors, resident, head_dim)
        }
    }

    /// Returns the number of query rows in the memory for sums of spans.
    pub const fn partial_rows(&self) -> usize {
        (2 * self.ctas * self.rows + PARTIAL_ROWS) as usize
    }

    /// Returns the maximum number of CTAs for spans. The other CTAs need a warp for each stripe of the tails.
    pub const fn span_ctas_max(&self, shape: &SplitShape) -> u32 {
        let stripes = shape.decode_stripes(shape.narrowest());
        self.ctas.saturating_sub(stripes.div_ceil(self.warps))
    }

    /// Returns whether the grid has a CTA for spans.
    pub const fn serves(&self, shape: &SplitShape) -> bool {
        self.span_ctas_max(shape) > 0
    }

    pub fn work_count(&self, shape: &SplitShape) -> usize {
        (self.warps * self.ctas).div_ceil(shape.decode_stripes(shape.narrowest())) as usize
    }
}

impl SplitShape {
    /// Returns the rows that a kernel with shared spans would take from a step. Returns `None` if the decode kernel
    /// takes a row that this kernel does not, such as a tree.
    pub fn taken(&self, grid: &SharedGrid, tokens: usize, rows: &[BatchRow]) -> Option<RowAssignment> {
        let (narrowest, widest) = (self.narrowest(), TAIL_ROWS.len() - 1);
        if tokens <= rows.len() {
            // The plan has space for own items only if the step has more tokens than rows.
            return Some(RowAssignment { longest: 0, ..RowAssignment::new(self, grid, narrowest) });
        }
        // Tails of fewer query rows are faster.
        let [few, more] = [narrowest, widest].map(|tails| self.decoded(tails));
        let is_wide = rows.iter().any(|row| few.goes_to_extend(row) && more.has(row));
        let taken = RowAssignment::new(self, grid, if is_wide { widest } else { narrowest });
        let flat = self.decoded(self.width(tokens, rows.len()));
        let is_left = |row: &BatchRow| taken.goes_to_extend(row) && flat.has(row) && row.kv_len > 0;
        (!rows.iter().any(is_left)).then_some(taken)
    }

    /// Returns the maximum number of members of spans, in a step of these numbers of tokens and rows.
    pub fn members_max(&self, tokens: usize, rows: usize) -> usize {
        tokens.min(rows * (ITEM_ROWS / self.group) as usize)
    }
}
