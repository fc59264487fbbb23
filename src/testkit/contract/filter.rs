//! Filters of random cases: most select the cases of one kind of kernel.

use super::Case;
use crate::layout::{Dtype, KvDtype, KvShape, PlaneName};
use crate::testkit::rng::Rng;

/// A restriction of the random cases of a check.
#[derive(Clone, Copy, Debug)]
pub struct Filter {
    /// Number of kv heads of special small pools; `None` for random pools.
    kv_heads: Option<u32>,
    /// Whether pools have several groups of layers.
    in_groups: bool,
    /// Number of elements of a head in group 0 and in group 1.
    head_dims: Option<(u32, u32)>,
    /// Numbers of query heads of a kv head, of which a case draws one. An empty list keeps the case's own number.
    groups: &'static [u32],
    /// Maximum numbers of new tokens of a row, of which a case draws one. An empty list keeps the case's own maximum.
    extends: &'static [Extends],
    /// Conditions, all of which a case must meet.
    conditions: &'static [fn(&Case) -> bool],
}

#[derive(Clone, Copy, Debug)]
enum Extends {
    Tokens(u32),
    /// The largest number of tokens that together have at most this many query rows for a kv head, but at least one.
    QueryRows(u32),
}
use Extends::{QueryRows, Tokens};

impl Filter {
    /// All cases with one group of layers.
    pub const ALL: Self =
        Self { kv_heads: None, in_groups: false, head_dims: None, groups: &[], extends: &[], conditions: &[] };

    /// Quantised pools.
    pub const FP8: Self = Self { conditions: &[is_fp8], ..Self::ALL };

    /// Pools of K and V alone in one shape, whose memory a host can allocate for a GPU.
    pub const PLAIN: Self = Self { conditions: &[is_plain], ..Self::ALL };

    /// [`Filter::PLAIN`] with heads that kernels can rotate.
    pub const PLAIN_HEADS: Self = Self { conditions: &[is_plain, has_heads_for_spans], ..Self::ALL };

    /// [`Filter::PLAIN`] with quantised pools.
    pub const PLAIN_FP8: Self = Self { conditions: &[is_plain, is_fp8], ..Self::ALL };

    /// Pools with heads of an even number of elements.
    pub const HEADS: Self =
        Self { conditions: &[|case| !case.layout.is_latent() && case.layout.head_dim() % 2 == 0], ..Self::ALL };

    /// Pools with heads that kernels can rotate.
    pub const KERNEL_HEADS: Self = Self { conditions: &[has_heads_for_spans], ..Self::ALL };

    /// Pools with labels.
    pub const LABELS: Self = Self { conditions: &[|case| case.layout.label_channels() > 0], ..Self::ALL };

    /// 16-bit pools with families of sequences, whose shared spans kernels read once.
    pub const SPANS: Self = Self { conditions: &[is_16_bits, has_heads_for_spans, has_families], ..Self::ALL };

    /// [`Filter::SPANS`] with 9 to 16 query heads for a kv head, which random cases seldom have.
    pub const WIDE_SPANS: Self = Self {
        groups: &[9, 10, 11, 12, 13, 14, 15, 16],
        conditions: &[is_16_bits, has_heads_for_spans, has_families, |case| case.q_heads() <= 64],
        ..Self::ALL
    };

    /// [`Filter::SPANS`] with rows of a few new tokens, as in the verification of drafts. A tail of the kernels
    /// (`backend/cuda/attention/split/shared.rs`) has at most 8 or 16 query rows; some sequences have more.
    pub const SHORT_SPANS: Self = Self {
        groups: &[1, 2, 3, 4, 5, 6, 7, 8],
        extends: &[QueryRows(8), QueryRows(16), QueryRows(16), Tokens(8), Tokens(u32::MAX)],
        conditions: &[is_16_bits, has_heads_for_spans, has_families, |case| case.q_heads() <= 32],
        ..Self::ALL
    };

    /// Spans of quantised pools, with rows of one new token, of a few, or of prompts.
    pub const FP8_SPANS: Self = Self {
        groups: &[1, 2, 3, 4, 4, 8, 8, 12, 16],
        extends: &[Tokens(1), QueryRows(8), QueryRows(16), Tokens(8), Tokens(u32::MAX)],
        conditions: &[is_fp8, has_rows_of_16_bits, has_heads_for_spans, has_families, |case| case.q_heads() <= 64],
        ..Self::ALL
    };

    /// 16-bit pools with heads of 128, whose kernels take several new tokens of a row.
    pub const SHORT: Self =
        Self { conditions: &[is_16_bits, |case| has_heads(case, &[128]), |case| case.max_len >= 40], ..Self::ALL };

    /// Latent rows of long sequences.
    pub const LATENT: Self = Self { conditions: &[is_latent, |case| case.max_len >= 700], ..Self::ALL };

    /// Quantised latent rows.
    pub const LATENT_FP8: Self =
        Self { conditions: &[is_latent, is_fp8, has_rows_of_16_bits, |case| case.max_len >= 150], ..Self::ALL };

    /// Latent rows with many query heads, for which the two CTAs of a cluster share their reads.
    pub const LATENT_PAIRS: Self = Self {
        conditions: &[
            is_latent,
            has_rows_of_16_bits,
            |case| is_fp8(case) || case.layout.page_size() % 8 == 0,
            |case| case.q_heads() >= 40 && case.max_len >= 150,
        ],
        ..Self::ALL
    };

    /// Pools of `kv_heads` kv heads, 16-bit or quantised, with a few short sequences.
    pub const fn many_heads(kv_heads: u32) -> Self {
        Self { kv_heads: Some(kv_heads), ..Self::ALL }
    }

    /// Returns the same filter for pools with several groups of layers.
    #[must_use]
    pub const fn in_groups(self) -> Self {
        Self { in_groups: true, ..self }
    }

    /// Pools with several groups of layers, with heads of these lengths in group 0 and in group 1.
    pub const fn head_dims(full: u32, limited: u32) -> Self {
        Self { in_groups: true, head_dims: Some((full, limited)), ..Self::ALL }
    }

    /// Draws a case; `None` if it does not meet a condition.
    pub(super) fn draw(&self, rng: &mut Rng) -> Option<Case> {
        let mut case = match self.kv_heads {
            Some(kv_heads) => Case::of_many_heads(rng, kv_heads),
            None => Case::random(rng, self.in_groups),
        };
        if !self.groups.is_empty() {
            case.group_size = rng.pick(self.groups);
        }
        if !self.extends.is_empty() {
            case.extend_max = match rng.pick(self.extends) {
                Tokens(tokens) => tokens,
                QueryRows(rows) => (rows / case.group_size).max(1),
            };
        }
        let has_dims = |dims| {
            let [full, limited] = [0, 1].map(|group| case.of_group(group).layout.head_dim());
            !case.layout.is_latent() && dims == (full, limited)
        };
        let fits = self.head_dims.is_none_or(has_dims);
        (fits && self.conditions.iter().all(|holds| holds(&case))).then_some(case)
    }
}

fn is_fp8(case: &Case) -> bool {
    case.layout.dtype().is_quantised()
}

fn is_plain(case: &Case) -> bool {
    let (layout, planes) = (&case.layout, case.layout.planes());
    let head_bytes = planes[0].elements * planes[0].dtype.size();
    let is_k_and_v = planes.iter().map(|plane| plane.name).eq([PlaneName::K, PlaneName::V]);
    layout.has_one_shape() && is_k_and_v && head_bytes.is_multiple_of(16)
}

fn is_16_bits(case: &Case) -> bool {
    case.layout.dtype() == KvDtype::from(case.q_rows) && has_rows_of_16_bits(case)
}

fn has_rows_of_16_bits(case: &Case) -> bool {
    case.q_rows != Dtype::F32
}

fn is_latent(case: &Case) -> bool {
    case.layout.shape() == KvShape::Latent { rank: 512, rope: 64 }
}

fn has_heads(case: &Case, dims: &[u32]) -> bool {
    !case.layout.is_latent() && dims.contains(&case.layout.head_dim())
}

fn has_heads_for_spans(case: &Case) -> bool {
    has_heads(case, &[64, 128, 256])
}

fn has_families(case: &Case) -> bool {
    case.table.rows >= 7 && case.max_len >= 150
}
