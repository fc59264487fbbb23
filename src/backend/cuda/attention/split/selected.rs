//! The shares of attention over lists.
//!
//! For this kernel, the tokens of a row with lists are the entries of its lists. Other rows read all visible tokens and
//! go to the extend kernel.

use super::{DecodeFilter, Split, SplitCount, SplitShape};
use crate::backend::cuda::kernels::params::is_tree;
use crate::plan::BatchRow;

impl SplitShape {
    /// Converts a row for the kernel over lists. The tokens of a row with lists become the entries of its lists; other
    /// rows get no query rows.
    fn places(&self, row: &BatchRow) -> BatchRow {
        if row.extend_len != 1 || is_tree(row) {
            return BatchRow { extend_len: 0, kv_len: 0, ..*row };
        }
        let seen = row.kv_len - self.first_seen(row.kv_len.saturating_sub(1));
        BatchRow { kv_len: seen.min(self.top), ..*row }
    }
}

impl Split {
    /// Splits a step over lists like [`Split::plan`]. `places` receives the rows of the batch for the kernel.
    pub fn plan_selected(&mut self, rows: &[BatchRow], places: &mut [BatchRow], decode: &mut [u32]) -> SplitCount {
        assert!(rows.len() <= self.shape.batch_max as usize && self.shape.top > 0);
        for (place, row) in places.iter_mut().zip(rows) {
            *place = self.shape.places(row);
        }
        let width = self.shape.narrowest();
        let whole = SplitShape { window: 0, ..self.shape };
        let decode_units = self.decode.plan(&whole, width, places, decode);
        // A row of one token that is no tree is never an extend item, whatever the group.
        let extend_items = self.extend.plan(&self.shape, rows, |row| DecodeFilter::new(1, false).goes_to_extend(row));
        SplitCount { width, decode_units, extend_items }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::cuda::kernels::params::TREE_ROW;
    use crate::id::RowId;

    fn row(row: u32, extend_len: u32, kv_len: u32) -> BatchRow {
        BatchRow { row: RowId::new(row), qo_start: 0, extend_len, kv_len }
    }

    #[test]
    fn rows_of_one_token_have_places() {
        let (decode_ctas, extend_ctas) = ([10, 0, 0], 10);
        let shape = SplitShape { kv_heads: 2, window: 100, top: 64, decode_ctas, extend_ctas, ..SplitShape::PLAIN };
        let rows = [row(0, 1, 1), row(1, 1, 5000), row(2, 2, 5000), row(3 | TREE_ROW, 1, 50), row(4, 1, 0)];
        let lens = |shape: &SplitShape| {
            rows.map(|row| {
                let BatchRow { extend_len, kv_len, .. } = shape.places(&row);
                (extend_len, kv_len)
            })
        };
        assert_eq!(lens(&shape), [(1, 1), (1, 64), (0, 0), (0, 0), (1, 0)]);
        assert_eq!(lens(&SplitShape { top: 200, ..shape })[1], (1, 100), "no more than the window");
        assert_eq!(lens(&SplitShape { top: 200, window: 0, ..shape })[1], (1, 200));

        let mut split = Split::new(shape);
        let mut places = [row(0, 0, 0); 5];
        let mut words = vec![0; shape.decode_words()];
        let count = split.plan_selected(&rows, &mut places, &mut words);
        // 1, 4 and 0 units of tokens, and 6 extra units for each of these rows, in 2 heads.
        assert_eq!((count.decode_units, count.extend_items), (2 * ((1 + 6) + (4 + 6) + 6), 2 * 2));
    }
}
