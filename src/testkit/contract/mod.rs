//! The contract of [`Backend`], checked for any implementation: B1 to B8 and B11 to B16 over random shapes and batches
//! (B9 and B10: `sparse`; B19: `rotated`).
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
mod either;
mod exact;
mod filter;
mod history;
mod host_shadow;
mod late;
mod moved;
mod rotated;
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
pub use filter::Filter;
pub use rotated::check_rotated;
pub use served::check_served;
pub use sparse::{SparseTestBackend, check_sparse_backend};

use crate::backend::{HostMemory, OpenBackend};
use crate::id::PageId;
use crate::testkit::parallel;
use crate::testkit::rng::{Rng, mix};
use run::Also;

/// What a test needs of a backend, beyond [`HostMemory`]: buffers, and the pool's bytes.
///
/// Buffers may lie on a device. Reads are asked for after `synchronize`. These methods panic where they fail.
pub trait TestBackend: HostMemory + Send {
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

    /// The bytes of pages, one page after another, each in the order `[plane, layer, piece]`.
    fn read_pages(&mut self, pages: &[PageId], target: &mut [u8]);

    /// Replaces the bytes of pages, in the same order.
    fn write_pages(&mut self, pages: &[PageId], source: &[u8]);
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

impl Report {
    /// Returns what this check and another one saw together.
    fn and(&self, other: &Self) -> Self {
        Self {
            runs: self.runs + other.runs,
            steps: self.steps + other.steps,
            rows: self.rows + other.rows,
            worst_out: self.worst_out.max(other.worst_out),
            worst_lse: self.worst_lse.max(other.worst_lse),
        }
    }
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
pub fn check_backend<O>(options: impl Fn(&Case) -> O + Sync, seeds: Range<u64>) -> Report
where
    O: OpenBackend<Backend: TestBackend>,
{
    check_cases(&Filter::ALL, options, seeds)
}

/// The same over the cases of a filter.
///
/// # Panics
/// As [`check_backend`].
pub fn check_cases<O>(
    filter: &Filter,
    options: impl Fn(&Case) -> O + Sync,
    seeds: Range<u64>,
) -> Report
where
    O: OpenBackend<Backend: TestBackend>,
{
    check_seeds(filter, options, seeds, None)
}

/// Runs each seed on the first case of the filter that the backend supports; cores run several seeds at a time.
fn check_seeds<O>(
    filter: &Filter,
    options: impl Fn(&Case) -> O + Sync,
    seeds: Range<u64>,
    also: Option<Also<O::Backend>>,
) -> Report
where
    O: OpenBackend<Backend: TestBackend>,
{
    let seeds: Vec<u64> = seeds.collect();
    let reports = parallel::map(&seeds, |&seed| {
        let mut rng = Rng::new(mix(seed));
        let case = (0..10_000)
            .filter_map(|_| filter.draw(&mut rng))
            .find(|case| case.groups().all(|case| O::Backend::supports(&case)))
            .expect("a backend supports one shape of ten thousand");
        let backend = options(&case).open(&case.layout, &case.table, case.max_steps);
        let mut report = Report { runs: 1, ..Report::default() };
        run::run(backend.expect("a small pool opens"), case, seed, rng, also, &mut report);
        report
    });
    reports.iter().fold(Report::default(), |all, report| all.and(report))
}
