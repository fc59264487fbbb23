//! Stores labels, which are channels of K, and selects positions by scores of the labels.

use super::number::Number;
use super::pool::{Pool, with_number};
use super::rows::Elements;
use super::scales::{Row, byte};
use crate::backend::{NO_POSITION, Select};
use crate::id::LayerId;
use crate::layout::{KvDtype, LabelChannels, PlaneName, PoolLayout, Strides, TableShape};
use crate::plan::BatchRow;

/// The place and the channels of a pool's labels; `None` without labels.
#[derive(Debug)]
pub(super) struct Labels(Option<Plane>);

#[derive(Debug)]
struct Plane {
    channels: LabelChannels,
    strides: Strides,
    dtype: KvDtype,
}

impl Labels {
    /// Creates the labels of a pool; `channels` have been checked.
    pub fn new(layout: &PoolLayout, channels: Option<LabelChannels>) -> Self {
        let plane = layout.planes().iter().find(|plane| plane.name == PlaneName::Labels);
        Self(plane.zip(channels).map(|(plane, channels)| {
            let strides = layout.strides(PlaneName::Labels).expect("the pool has labels");
            Plane { channels, strides, dtype: plane.dtype }
        }))
    }

    pub fn channels(&self) -> Option<&LabelChannels> {
        self.0.as_ref().map(|plane| &plane.channels)
    }

    /// Returns the number of bytes in use.
    pub fn bytes(&self) -> usize {
        self.channels().map_or(0, |channels| size_of_val(channels.values()))
    }

    /// Stores the labels of one token's K, `[kv_heads, head_dim]`; `wide` has space for one head.
    pub fn store(&self, pool: &mut Pool, row: Row, k: Elements<'_>, wide: &mut [f32]) {
        let Some(plane) = &self.0 else { return };
        let head_dim = wide.len();
        for (head, start) in (0..k.len()).step_by(head_dim).enumerate() {
            let head = head as u32;
            k.slice(start..start + head_dim).convert_into(wide);
            let at = byte(&plane.strides, row, head) as usize;
            with_number!(plane.dtype, T => {
                let channels = plane.channels.get(row.layer, head);
                let first = at / size_of::<T>();
                let labels = &mut pool.numbers_mut::<T>()[first..first + channels.len()];
                for (label, &channel) in labels.iter_mut().zip(channels) {
                    let channel = channel as usize;
                    T::narrow(&wide[channel..=channel], std::slice::from_mut(label));
                }
            });
        }
    }

    fn read(&self, pool: &Pool, row: Row, head: u32, labels: &mut [f32]) {
        let plane = self.0.as_ref().expect("the pool has labels");
        let at = byte(&plane.strides, row, head) as usize;
        with_number!(plane.dtype, T => {
            let first = at / size_of::<T>();
            T::widen(&pool.numbers::<T>()[first..first + labels.len()], labels);
        });
    }
}

/// The inputs of a selection.
pub(super) struct Scorer<'a> {
    pub labels: &'a Labels,
    pub pool: &'a Pool,
    pub layout: &'a PoolLayout,
    pub table: &'a TableShape,
    pub words: &'a [u32],
    pub layer: LayerId,
    /// The layer's lane.
    pub lane: u32,
    pub select: &'a Select,
}

/// Buffers of a selection, reused in later calls.
#[derive(Debug, Default)]
pub(super) struct SelectScratch {
    /// The query of one head.
    head: Vec<f32>,
    /// The sum of the queries of a kv head, in the labels' channels.
    query: Vec<f32>,
    /// The labels of a position.
    labels: Vec<f32>,
    /// The score of each position, as [`order`] converts it, and the position.
    scored: Vec<(u32, u32)>,
}

impl SelectScratch {
    /// Returns the number of allocated bytes.
    pub fn bytes(&self) -> usize {
        (self.head.capacity() + self.query.capacity() + self.labels.capacity()) * size_of::<f32>()
            + self.scored.capacity() * size_of::<(u32, u32)>()
    }

    /// Writes the list of one row and kv head to `list`. `q` contains the queries of the row, `[q_heads, head_dim]`.
    pub fn list(&mut self, scorer: &Scorer<'_>, row: &BatchRow, kv_head: u32, q: Elements<'_>, list: &mut [u32]) {
        self.sum_queries(scorer, kv_head, q);
        let own = row.kv_len - 1;
        let first = row.kv_len.saturating_sub(scorer.select.window.unwrap_or(row.kv_len));
        self.scored.clear();
        for position in first..own {
            let score = self.score(scorer, row, kv_head, position);
            self.scored.push((order(score), position));
        }
        let others = list.len() - 1;
        if self.scored.len() > others {
            if others > 0 {
                self.scored.select_nth_unstable_by(others - 1, |a, b| b.cmp(a));
            }
            self.scored.truncate(others);
        }
        self.scored.sort_unstable_by_key(|&(_, position)| position);
        let chosen = self.scored.iter().map(|&(_, position)| position).chain([own]);
        let mut left = list.iter_mut();
        chosen.zip(&mut left).for_each(|(position, entry)| *entry = position);
        left.for_each(|entry| *entry = NO_POSITION);
    }

    fn sum_queries(&mut self, scorer: &Scorer<'_>, kv_head: u32, q: Elements<'_>) {
        let head_dim = scorer.layout.head_dim() as usize;
        let group = (scorer.select.q_heads / scorer.layout.kv_heads()) as usize;
        let channels = scorer.labels.channels().expect("the pool has labels").get(scorer.layer, kv_head);
        self.head.resize(head_dim, 0.0);
        self.query.clear();
        self.query.resize(channels.len(), 0.0);
        self.labels.resize(channels.len(), 0.0);
        for head in kv_head as usize * group..(kv_head as usize + 1) * group {
            q.slice(head * head_dim..(head + 1) * head_dim).convert_into(&mut self.head);
            for (sum, &channel) in self.query.iter_mut().zip(channels) {
                *sum += self.head[channel as usize];
            }
        }
    }

    fn score(&mut self, scorer: &Scorer<'_>, row: &BatchRow, kv_head: u32, position: u32) -> f32 {
        let page_size = scorer.layout.page_size();
        let page = scorer.table.page(scorer.words, row.row, position / page_size);
        let slot = Row { side: 0, layer: scorer.layer, lane: scorer.lane, page, offset: position % page_size };
        scorer.labels.read(scorer.pool, slot, kv_head, &mut self.labels);
        let products = self.query.iter().zip(&self.labels);
        products.fold(0.0, |score, (&query, &label)| f32::mul_add(query, label, score))
    }
}

/// Returns an integer that orders scores: a larger score has a larger integer. 0 and -0 are equal, and NaN is below all
/// other scores.
fn order(score: f32) -> u32 {
    if score.is_nan() {
        return 0;
    }
    let bits = (score + 0.0).to_bits();
    if bits >> 31 == 1 { !bits } else { bits | 1 << 31 }
}

#[cfg(test)]
mod tests {
    use super::order;

    #[test]
    fn scores_are_ordered_as_numbers() {
        let rising = [f32::NAN, f32::NEG_INFINITY, -2.0, -f32::MIN_POSITIVE, 0.0, 1e-45, 3.0, f32::INFINITY];
        assert!(rising.windows(2).all(|pair| order(pair[0]) < order(pair[1])));
        assert_eq!(order(0.0), order(-0.0));
        assert_eq!(order(f32::NAN), order(-f32::NAN));
    }
}
