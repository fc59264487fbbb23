//! The kernels that read a step's spans once, and their grids on a device.

use super::super::{DecodeFilter, SplitShape};
use super::{PARTIAL_ROWS, SpanCosts};
use crate::backend::cuda::kernels::params::is_tree;
use crate::backend::cuda::kernels::{Cache, Kernel, SUFFIX_ROWS};
use crate::plan::BatchRow;

/// Maximum number of query rows of a row with own items.
pub const ITEM_ROWS: u32 = 64;

/// The rows that a kernel with shared spans takes. The extend kernel takes all other rows that have new tokens.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RowAssignment {
    /// The kernel, an index of [`SUFFIX_ROWS`].
    pub suffixes: usize,
    /// Filter of the rows that have a suffix.
    with_suffixes: DecodeFilter,
    /// Maximum number of new tokens of a row with own items. One query tile contains all of them.
    longest: u32,
}

impl RowAssignment {
    /// Returns the assignment of rows to kernel `suffixes`, an index of [`SUFFIX_ROWS`].
    pub fn new(shape: &SplitShape, grid: &SharedGrid, suffixes: usize) -> Self {
        let longest = ITEM_ROWS.min(grid.rows) / shape.group;
        Self { suffixes, with_suffixes: shape.decoded(suffixes), longest }
    }

    pub fn has_suffix(&self, row: &BatchRow) -> bool {
        self.with_suffixes.has(row)
    }

    /// Returns whether rows may have own items.
    pub const fn may_have_items(&self) -> bool {
        self.longest > self.with_suffixes.longest
    }

    pub fn has_items(&self, row: &BatchRow) -> bool {
        let is_long = row.extend_len > self.with_suffixes.longest && row.extend_len <= self.longest;
        is_long && row.kv_len > 0 && !is_tree(row)
    }

    /// Returns whether the extend kernel takes a row.
    pub fn goes_to_extend(&self, row: &BatchRow) -> bool {
        self.with_suffixes.goes_to_extend(row) && !self.has_items(row)
    }
}

/// The grid of a variant's kernels that read spans once.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct SharedGrid {
    /// Number of CTAs of a launch.
    pub ctas: u32,
    /// Number of warps of a CTA that work on suffixes.
    pub warps: u32,
    /// Maximum number of query rows of a query tile.
    pub rows: u32,
    /// Fixed cost of an item in tiles.
    pub item_tiles: u32,
    /// Bytes of an element of K or V.
    pub number_bytes: u32,
    /// Constants of each kernel of [`SUFFIX_ROWS`].
    pub costs: [SpanCosts; SUFFIX_ROWS.len()],
}

impl SharedGrid {
    /// Returns the grid of a kernel and its siblings for other [`SUFFIX_ROWS`], with up to `resident` CTAs on a
    /// multiprocessor. A CTA of Hopper's kernels fills a multiprocessor.
    pub fn new(kernel: &Kernel, multiprocessors: u32, resident: u32) -> Self {
        let serves = kernel.supported().expect("a kernel of the table's column `step`");
        let (is_hopper, is_fp8) = (kernel.is_sm90a(), serves.cache == Cache::Fp8);
        let resident = if is_hopper { 1 } else { resident };
        let costs = if is_fp8 { SpanCosts::over_fp8 } else { SpanCosts::general };
        Self {
            ctas: multiprocessors * resident,
            warps: kernel.suffix_warps(),
            rows: kernel.item_rows(),
            item_tiles: if is_hopper { 4 } else { 3 },
            number_bytes: if is_fp8 { 1 } else { 2 },
            costs: if is_hopper {
                SpanCosts::H200
            } else {
                [0, 1].map(|place| costs(serves.head_dim, place).of_ctas(resident))
            },
        }
    }

    /// Returns the number of query rows in the memory for sums of spans.
    pub const fn partial_rows(&self) -> usize {
        (2 * self.ctas * self.rows + PARTIAL_ROWS) as usize
    }

    /// Returns the maximum number of CTAs for spans. The other CTAs need a warp for each stripe of the suffixes.
    pub fn span_ctas_max(&self, shape: &SplitShape) -> u32 {
        let stripes = shape.decode_stripes(shape.narrowest());
        self.ctas.saturating_sub(stripes.div_ceil(self.warps))
    }

    /// Returns whether the grid has a CTA for spans.
    pub fn serves(&self, shape: &SplitShape) -> bool {
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
        let (narrowest, widest) = (self.narrowest(), SUFFIX_ROWS.len() - 1);
        if tokens <= rows.len() {
            // The plan has space for own items only if the step has more tokens than rows.
            return Some(RowAssignment { longest: 0, ..RowAssignment::new(self, grid, narrowest) });
        }
        // Suffixes of fewer query rows are faster.
        let [few, more] = [narrowest, widest].map(|suffixes| self.decoded(suffixes));
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
