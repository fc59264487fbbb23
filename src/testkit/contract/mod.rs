//! The contract of [`Backend`], checked for any implementation: B1 to B8 and B11 over random shapes and batches (B9
//! and B10: `sparse`).
//!
//! A run is one pool and a few rounds. A round brings in, forks and finishes sequences, begins several plans, runs them
//! layer by layer (through bytes, on another thread, padded: as it falls), ends them (B8: what is asked of their plans
//! from then on is refused), and compares:
//!
//! * every byte of the pool with a shadow of it, after stores and copies (B3, B5, B7): all pages are poisoned with NaN
//!   first, so a stray write shows, and so does a stray read, in the outputs. Some pools have a plane beside K and V;
//! * every output and log-sum-exp with attention in float64 over contiguous K and V (B1, B2, B4). Outputs are poisoned
//!   too; what lies between strided rows must stay poison. K and V of a quantised pool are what its bytes stand for.
//!
//! Some rows are trees of drafts, or see what random masks let them.
//!
//! The bound: `|out - exact| <= unit (4 + max_j scale sum_i |q_i k_i|) sum_j p_j |v_j|`, plus the rounding of `out`'s
//! type. `unit` is the backend's own: the precision it computes in, times a small constant.
//!
//! Not here: which errors a backend has, beyond that it refuses what makes no sense.

mod case;
mod compare;
mod cpu;
mod exact;
mod history;
mod run;
mod served;
mod shadow;
mod sparse;
mod stored;

use std::fmt;
use std::ops::Range;

pub use case::{Case, HostRows, bytes, round, rounding, with_spare_plane};
pub use cpu::{Numbers, OwnedRows};
pub use exact::{Exact, attention, attention_to};
pub use served::check_served;
pub use sparse::{SparseTestBackend, check_sparse_backend};

use crate::backend::{Backend, OpenBackend};
use crate::id::PageId;
use crate::layout::{Dtype, KvDtype, KvShape};
use crate::testkit::rng::{Rng, mix};
use run::Also;

/// What a test needs of a backend, beyond [`Backend`]: buffers, and the pool's bytes.
///
/// Buffers may lie on a device. Reads are asked for after `synchronize`. These methods panic where they fail.
pub trait TestBackend: Backend + Send {
    /// Rows of q, k or v, or sinks.
    type Input;
    /// Rows of attention's output.
    type Output;
    /// Log-sum-exp.
    type Sums;

    /// Whether the backend takes the shape. Others are drawn until one is.
    fn supports(case: &Case) -> bool;

    /// Precision of attention for a shape, times a small constant: see the module for the bound.
    fn unit(&self, case: &Case) -> f64;

    /// A buffer with these rows, in their type and with their stride.
    fn input(&mut self, rows: &HostRows) -> Self::Input;

    /// The rows of a buffer, as the backend takes them.
    fn rows(input: &Self::Input) -> Self::Rows<'_>;

    /// A buffer of packed f32, as the backend takes sinks.
    fn sinks(input: &Self::Input) -> Self::Sinks<'_>;

    /// A buffer to write to, of the type and stride of these rows, and holding them.
    fn output(&mut self, poison: &HostRows) -> Self::Output;

    /// The rows of a buffer, as the backend takes them.
    fn rows_mut(output: &mut Self::Output) -> Self::RowsMut<'_>;

    /// All `rows * stride` numbers of a buffer.
    fn read_output(&mut self, output: &Self::Output) -> Vec<f32>;

    /// A buffer for `len` log-sum-exps, filled with NaN.
    fn sums(&mut self, len: usize) -> Self::Sums;

    /// The buffer, as the backend takes it.
    fn lse(sums: &mut Self::Sums) -> Self::Lse<'_>;

    /// All numbers of a buffer.
    fn read_sums(&mut self, sums: &Self::Sums) -> Vec<f32>;

    /// A page's bytes, in the order `[plane, layer, piece]`.
    fn read_page(&mut self, page: PageId, target: &mut [u8]);

    /// Replaces a page's bytes, in the same order.
    fn write_page(&mut self, page: PageId, source: &[u8]);
}

/// What a check saw.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Report {
    /// Seeds.
    pub runs: u64,
    /// Steps.
    pub steps: u64,
    /// Rows of one head that were compared.
    pub rows: u64,
    /// Largest error of an output beyond its type's rounding, as a part of its bound: at most 1.
    pub worst_out: f64,
    /// Largest error of a log-sum-exp, as a part of its bound: at most 1.
    pub worst_lse: f64,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { runs, steps, rows, worst_out, worst_lse } = self;
        write!(f, "{runs} seeds, {steps} steps, {rows} rows; ")?;
        write!(f, "of the bound: out {worst_out:.3}, log-sum-exp {worst_lse:.3}")
    }
}

/// Checks a backend's contract, one fresh backend a seed, opened with what `options` make of its shape: of the
/// [scales](Case::scales) above all.
///
/// # Panics
/// At the first breach; the message names the seed, the shape and the place.
pub fn check_backend<O>(options: impl Fn(&Case) -> O, seeds: Range<u64>) -> Report
where
    O: OpenBackend<Backend: TestBackend>,
{
    check_cases(options, seeds, |_| true)
}

/// The same over quantised pools alone.
///
/// # Panics
/// As [`check_backend`].
pub fn check_fp8<O>(options: impl Fn(&Case) -> O, seeds: Range<u64>) -> Report
where
    O: OpenBackend<Backend: TestBackend>,
{
    check_cases(options, seeds, |case| case.layout.dtype().is_quantised())
}

/// The same over pools of 16 bits and heads of 128, with rows for families of sequences: kernels read spans once that
/// their members share.
///
/// # Panics
/// As [`check_backend`].
pub fn check_spans<O>(options: impl Fn(&Case) -> O, seeds: Range<u64>) -> Report
where
    O: OpenBackend<Backend: TestBackend>,
{
    check_cases(options, seeds, has_families)
}

/// [`check_spans`] of groups of 9 to 16, which others seldom draw, up to 64 query heads of several kv heads.
///
/// # Panics
/// As [`check_backend`].
pub fn check_wide_spans<O>(options: impl Fn(&Case) -> O, seeds: Range<u64>) -> Report
where
    O: OpenBackend<Backend: TestBackend>,
{
    check_drawn(options, seeds, |rng| {
        let mut case = Case::random(rng);
        case.group = rng.within(9, 16) as u32;
        (has_families(&case) && case.q_heads() <= 64).then_some(case)
    })
}

/// [`check_spans`] of rows of 1 to 8 new tokens, as when drafts are verified: trees among them, prompts beside some.
///
/// # Panics
/// As [`check_backend`].
pub fn check_short_spans<O>(options: impl Fn(&Case) -> O, seeds: Range<u64>) -> Report
where
    O: OpenBackend<Backend: TestBackend>,
{
    check_drawn(options, seeds, |rng| {
        let mut case = Case::random(rng);
        case.group = rng.within(1, 8) as u32;
        // What a kernel's 8 or 16 query rows of a tail have room for, more, or any prompt.
        case.extend_max =
            rng.pick(&[8 / case.group, 16 / case.group, 16 / case.group, 8, u32::MAX]);
        (has_families(&case) && case.q_heads() <= 32).then_some(case)
    })
}

/// The same over quantised pools: groups of 1 to 16, rows of one new token, of a few, or of prompts too.
///
/// # Panics
/// As [`check_backend`].
pub fn check_fp8_spans<O>(options: impl Fn(&Case) -> O, seeds: Range<u64>) -> Report
where
    O: OpenBackend<Backend: TestBackend>,
{
    check_drawn(options, seeds, |rng| {
        let mut case = Case::random(rng);
        case.group = rng.pick(&[1, 2, 3, 4, 4, 8, 8, 12, 16]);
        case.extend_max =
            rng.pick(&[1, (8 / case.group).max(1), (16 / case.group).max(1), 8, u32::MAX]);
        let is_fp8 = case.layout.dtype().is_quantised() && case.q_rows != Dtype::F32;
        (is_fp8 && is_for_families(&case) && case.q_heads() <= 64).then_some(case)
    })
}

/// Whether kernels may read spans once that members of families share, of pools of 16 bits.
fn has_families(case: &Case) -> bool {
    let dtype = case.layout.dtype();
    dtype == KvDtype::from(case.q_rows) && dtype.size() == 2 && is_for_families(case)
}

/// Whether a pool's heads are such as kernels read spans once of, and families have room.
fn is_for_families(case: &Case) -> bool {
    let layout = &case.layout;
    let has_room = case.table.rows >= 7 && case.max_len >= 150;
    !layout.is_latent() && matches!(layout.head_dim(), 64 | 128 | 256) && has_room
}

/// The same over pools of 16 bits and heads of 128 alone, as kernels read them for several new tokens a row.
///
/// # Panics
/// As [`check_backend`].
pub fn check_short<O>(options: impl Fn(&Case) -> O, seeds: Range<u64>) -> Report
where
    O: OpenBackend<Backend: TestBackend>,
{
    check_cases(options, seeds, |case| {
        let layout = &case.layout;
        let is_plain = layout.dtype() == KvDtype::from(case.q_rows) && layout.dtype().size() == 2;
        is_plain && !layout.is_latent() && layout.head_dim() == 128 && case.max_len >= 40
    })
}

/// The same over latent rows of 512 + 64 alone, as kernels read them, of long sequences.
///
/// # Panics
/// As [`check_backend`].
pub fn check_latent<O>(options: impl Fn(&Case) -> O, seeds: Range<u64>) -> Report
where
    O: OpenBackend<Backend: TestBackend>,
{
    let shape = KvShape::Latent { rank: 512, rope: 64 };
    check_cases(options, seeds, |case| case.layout.shape() == shape && case.max_len >= 700)
}

/// The same of fp8 with rows of 16 bits.
///
/// # Panics
/// As [`check_backend`].
pub fn check_latent_fp8<O>(options: impl Fn(&Case) -> O, seeds: Range<u64>) -> Report
where
    O: OpenBackend<Backend: TestBackend>,
{
    let shape = KvShape::Latent { rank: 512, rope: 64 };
    check_cases(options, seeds, |case| {
        let is_fp8 = case.layout.dtype().is_quantised() && case.q_rows.size() == 2;
        case.layout.shape() == shape && is_fp8 && case.max_len >= 150
    })
}

/// The same of many query heads, over pages of eights or of fp8: what two CTAs of a cluster share.
///
/// # Panics
/// As [`check_backend`].
pub fn check_latent_pairs<O>(options: impl Fn(&Case) -> O, seeds: Range<u64>) -> Report
where
    O: OpenBackend<Backend: TestBackend>,
{
    let shape = KvShape::Latent { rank: 512, rope: 64 };
    check_cases(options, seeds, |case| {
        let layout = &case.layout;
        let (fp8, eights) = (layout.dtype().is_quantised(), layout.page_size() % 8 == 0);
        let is_served = layout.shape() == shape && case.q_rows.size() == 2 && (fp8 || eights);
        is_served && case.q_heads() >= 40 && case.max_len >= 150
    })
}

/// Pools of so many kv heads, of 16 bits or of fp8: a few short sequences.
///
/// # Panics
/// As [`check_backend`].
pub fn check_many_heads<O>(options: impl Fn(&Case) -> O, kv_heads: u32, seeds: Range<u64>) -> Report
where
    O: OpenBackend<Backend: TestBackend>,
{
    check_drawn(options, seeds, |rng| Some(Case::of_many_heads(rng, kv_heads)))
}

fn check_cases<O>(
    options: impl Fn(&Case) -> O,
    seeds: Range<u64>,
    wanted: impl Fn(&Case) -> bool,
) -> Report
where
    O: OpenBackend<Backend: TestBackend>,
{
    check_drawn(options, seeds, |rng| Some(Case::random(rng)).filter(&wanted))
}

/// Draws until there is a case that the backend supports.
fn check_drawn<O>(
    options: impl Fn(&Case) -> O,
    seeds: Range<u64>,
    draw: impl Fn(&mut Rng) -> Option<Case>,
) -> Report
where
    O: OpenBackend<Backend: TestBackend>,
{
    let mut report = Report::default();
    for seed in seeds {
        let mut rng = Rng::new(mix(seed));
        let case = (0..10_000)
            .filter_map(|_| draw(&mut rng))
            .find(O::Backend::supports)
            .expect("a backend supports one shape of ten thousand");
        check_seed(&options, case, seed, (rng, None), &mut report);
    }
    report
}

/// One run.
fn check_seed<O>(
    options: &impl Fn(&Case) -> O,
    case: Case,
    seed: u64,
    (rng, also): (Rng, Option<Also<O::Backend>>),
    report: &mut Report,
) where
    O: OpenBackend<Backend: TestBackend>,
{
    let backend = options(&case).open(&case.layout, &case.table, case.max_steps);
    let backend = backend.expect("a small pool opens");
    run::run(backend, case, seed, rng, also, report);
    report.runs += 1;
}
