//! Measures the share of attention's weight on selected positions, relative to the share on the same number of best
//! positions.
//!
//! A position's weight is the sum of its weights from the query heads of a kv head, in float64 over the stored K,
//! without sinks. Recall is the weight of a list divided by the greatest weight of any list of the same length.

use std::fmt;

use kvarena::backend::{CpuError, NO_POSITION};
use kvarena::layout::{PlaneName, TableShape};
use kvarena::plan::BatchRow;
use kvarena::{Attend, BatchPlan, Cpu, LayerId};
use serde_json::{Value, json};

/// Measurements of lists with fewer positions than their rows can read.
#[derive(Clone, PartialEq, Debug)]
pub struct Recall {
    table: TableShape,
    /// Number of measured lists.
    pub lists: u64,
    /// Sums over the lists: recall, the lists' share of all weight, and the best positions' share.
    sums: [f64; 3],
    /// The minimum recall of a list.
    pub least: f64,
}

impl Recall {
    /// Starts an empty measurement; `table` is the shape of the engine's page tables.
    pub fn new(table: TableShape) -> Self {
        Self { table, lists: 0, sums: [0.0; 3], least: 1.0 }
    }

    /// Returns means over the lists: recall, the lists' share of all weight, and the best positions' share. Without
    /// lists, they are NaN.
    pub fn means(&self) -> [f64; 3] {
        self.sums.map(|sum| sum / self.lists as f64)
    }

    /// Returns the measurement as JSON; `null` if no list was measured.
    pub fn json(&self) -> Value {
        if self.lists == 0 {
            return Value::Null;
        }
        let [mean, held, best] = self.means();
        json!({"lists": self.lists, "mean": mean, "least": self.least, "held": held, "best": best})
    }

    /// Measures lists `[rows, kv_heads, top]` for q, `[tokens, q_heads, head_dim]`. O(n log n) for each list over n
    /// positions.
    ///
    /// # Errors
    /// A layer or a slot does not exist.
    pub fn measure(
        &mut self,
        backend: &Cpu,
        (plan, layer): (&BatchPlan<'_>, LayerId),
        attend: &Attend,
        q: &[f32],
        (positions, top): (&[u32], u32),
    ) -> Result<(), CpuError> {
        let layout = *backend.layout();
        let (kv_heads, head_dim) = (layout.kv_heads() as usize, layout.head_dim() as usize);
        let group = attend.q_heads as usize / kv_heads * head_dim;
        let lists = positions.chunks_exact(kv_heads * top as usize);
        for (row, lists) in plan.rows.iter().zip(lists) {
            let first = row.kv_len.saturating_sub(attend.window.unwrap_or(row.kv_len));
            if lists[0] == NO_POSITION || row.kv_len - first <= top {
                continue;
            }
            let keys = self.keys(backend, layer, row, first)?;
            let queries = &q[row.qo_start as usize * kv_heads * group..];
            let heads = queries.chunks_exact(group).zip(lists.chunks_exact(top as usize));
            for (head, (queries, list)) in heads.take(kv_heads).enumerate() {
                let keys = keys.iter().map(|key| &key[head * head_dim..(head + 1) * head_dim]);
                let keys: Vec<&[f32]> = keys.collect();
                let weights = weights(queries, &keys, attend.scale);
                self.add(&weights, list.iter().map(|position| (position - first) as usize));
            }
        }
        Ok(())
    }

    /// Returns K of a row's positions from `first` on.
    fn keys(&self, backend: &Cpu, layer: LayerId, row: &BatchRow, first: u32) -> Result<Vec<Vec<f32>>, CpuError> {
        let layout = backend.layout();
        let key = |position: u32| {
            let page_size = layout.page_size();
            let page = self.table.page(backend.table_words(), row.row, position / page_size);
            backend.read_slot(PlaneName::K, layer, layout.slot(page, position % page_size))
        };
        (first..row.kv_len).map(key).collect()
    }

    fn add(&mut self, weights: &[f64], list: impl ExactSizeIterator<Item = usize>) {
        let all: f64 = weights.iter().sum();
        let mut order = weights.to_vec();
        order.sort_unstable_by(|a, b| b.total_cmp(a));
        let best: f64 = order[..list.len()].iter().sum();
        let held: f64 = list.map(|at| weights[at]).sum();
        for (sum, x) in self.sums.iter_mut().zip([held / best, held / all, best / all]) {
            *sum += x;
        }
        self.least = self.least.min(held / best);
        self.lists += 1;
    }
}

/// Returns the sum of each key's weights under the queries; the weights of each query sum to 1.
fn weights(queries: &[f32], keys: &[&[f32]], scale: f32) -> Vec<f64> {
    let mut weights = vec![0.0; keys.len()];
    for query in queries.chunks_exact(keys[0].len()) {
        let product = |key: &&[f32]| {
            let products = query.iter().zip(*key).map(|(&q, &k)| f64::from(q) * f64::from(k));
            products.sum::<f64>() * f64::from(scale)
        };
        let logits: Vec<f64> = keys.iter().map(product).collect();
        let most = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = logits.iter().map(|logit| (logit - most).exp()).sum();
        for (weight, logit) in weights.iter_mut().zip(logits) {
            *weight += (logit - most).exp() / sum;
        }
    }
    weights
}

impl fmt::Display for Recall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.lists == 0 {
            return f.write_str("recall: every list contained all positions of its row");
        }
        let [mean, held, best] = self.means();
        write!(f, "recall of {} lists: {mean:.4}, least {:.4}; ", self.lists, self.least)?;
        write!(f, "they hold {held:.4} of attention's weight, the best lists {best:.4}")
    }
}

#[cfg(test)]
mod tests {
    use super::weights;

    #[test]
    fn weights_are_those_of_all_queries() {
        let keys: [&[f32]; 2] = [&[1.0, 0.0], &[0.0, 1.0]];
        let ln3 = 3_f32.ln();
        let weights = weights(&[ln3, 0.0, 0.0, ln3, 0.0, 0.0], &keys, 1.0);
        assert!(weights.iter().all(|weight| (weight - 1.5).abs() < 1e-6), "{weights:?}");
    }
}
