//! The contract of [`Backend`](crate::Backend), checked for any implementation: B1 to B8 and B11 to B18 over random
//! shapes and batches; B9 and B10 in `sparse`, B19 in `rotated`, B20 to B22 in `states`. No valid call fails in a run,
//! so the failures of B6 and B15 are not checked.
//!
//! A run uses one pool for a few rounds. A round admits, forks and finishes sequences, and begins one plan or more.
//! Some plans are padded, or decoded from bytes. The round runs the plans layer by layer, sometimes on another thread.
//! It ends them, and checks that the backend rejects ended plans (B8). It compares:
//!
//! * every byte of the pool with a shadow, after stores, copies and moves (B3, B5, B7, B11, B12). All pages are first
//!   filled with NaN, so stray writes change these bytes and stray reads change outputs. Some pools have an additional
//!   plane;
//! * outputs and log-sum-exps with attention in float64 over contiguous K and V (B1, B2, B4); for large calls, only a
//!   sample. Outputs are first filled with NaN, which must remain between strided rows. K and V of a quantised pool are
//!   the values of its bytes.
//!
//! Some rows are draft trees or have random masks. The bound of errors is `|out - exact| <= unit (4 + max_j |scale|
//! sum_i |q_i k_i|) sum_j p_j |v_j|`, plus the rounding of `out`'s type. `unit` is the precision of the backend's
//! computation, times a small constant; 4 units are the rounding of p_j. A kernel that multiplies v_j by a scale and
//! rounds the product adds `r sum_j p_j |v_j|`. r is [`TestBackend::value_rounding`]; the bound omits r squared. In
//! f16, the bound includes the rounding of small weights ([`Exact::faint`]). If a call must fail, any error is
//! accepted.

mod case;
mod compare;
mod cpu;
mod draw;
mod either;
mod exact;
mod filter;
mod history;
mod invalid;
mod late;
mod moved;
mod rotated;
mod run;
mod served;
mod shadow;
mod sparse;
mod states;
mod stored;
mod swap_shadow;

use std::fmt;
use std::ops::Range;

pub use case::{Case, HostRows, bytes, round, rounding, with_spare_plane};
pub use cpu::{Numbers, OwnedRows};
pub use exact::{Exact, attention, attention_to};
pub use filter::Filter;
pub use rotated::check_rotated;
pub use served::check_served;
pub use sparse::{SparseTestBackend, check_sparse_backend};
pub use states::{StateTestBackend, check_states};

use crate::backend::{OpenBackend, SwapMemory};
use crate::id::PageId;
use crate::testkit::parallel;
use crate::testkit::rng::{Rng, mix};
use run::ExtraCheck;

/// A backend under test: its buffers, and access to the pool's bytes.
///
/// Buffers may be on a device. The test calls `synchronize` before it reads them. These methods panic on failure.
pub trait TestBackend: SwapMemory<Read: AsRef<[u8]>, Write: AsMut<[u8]>> + Send {
    /// Rows of q, k or v, or sinks.
    type Input;
    /// Rows of attention's output.
    type Output;
    /// Log-sum-exp.
    type Sums;

    /// Returns whether the backend supports the shape. Otherwise the test draws another one.
    fn supports(case: &Case) -> bool;

    /// Returns the precision of attention for a shape, times a small constant: see the bound in the module's
    /// documentation.
    fn unit(&self, case: &Case) -> f64;

    /// Returns the relative error of the numbers of V if kernels round these numbers after reading them, else 0.
    fn value_rounding(&self, _: &Case) -> f64 {
        0.0
    }

    /// Creates a buffer with these rows, in their type and stride.
    fn input(&mut self, rows: &HostRows) -> Self::Input;

    /// Returns the rows of a buffer.
    fn rows(input: &Self::Input) -> Self::Rows<'_>;

    /// Returns the sinks of a buffer of packed f32.
    fn sinks(input: &Self::Input) -> Self::Sinks<'_>;

    /// Creates an output buffer with the type, stride and contents of these rows.
    fn output(&mut self, poison: &HostRows) -> Self::Output;

    /// Returns the writable rows of a buffer.
    fn rows_mut(output: &mut Self::Output) -> Self::RowsMut<'_>;

    /// Returns all `rows * stride` numbers of a buffer.
    fn read_output(&mut self, output: &Self::Output) -> Vec<f32>;

    /// Creates a buffer for `len` log-sum-exps, filled with NaN.
    fn sums(&mut self, len: usize) -> Self::Sums;

    /// Returns the writable log-sum-exps of a buffer.
    fn lse(sums: &mut Self::Sums) -> Self::Lse<'_>;

    /// Returns all numbers of a buffer.
    fn read_sums(&mut self, sums: &Self::Sums) -> Vec<f32>;

    /// Reads the bytes of pages, each in the order `[plane, lane, piece]`.
    fn read_pages(&mut self, pages: &[PageId], target: &mut [u8]);

    /// Writes the bytes of pages, in the same order.
    fn write_pages(&mut self, pages: &[PageId], source: &[u8]);
}

/// The extent of a check.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Report {
    /// Number of seeds.
    pub runs: u64,
    /// Number of steps.
    pub steps: u64,
    /// Number of compared rows of one head.
    pub rows: u64,
    /// Maximum error of an output beyond its type's rounding, as a fraction of its bound: at most 1.
    pub worst_out: f64,
    /// Maximum error of a log-sum-exp, as a fraction of its bound: at most 1.
    pub worst_lse: f64,
}

impl Report {
    /// Combines two reports.
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

/// Checks a backend's contract with a fresh backend for each seed. `options` returns the options for a shape, such as
/// its [scales](Case::scales).
///
/// # Panics
/// At the first violation. The message about a wrong output contains the seed, the shape and the place.
pub fn check_backend<O>(options: impl Fn(&Case) -> O + Sync, seeds: Range<u64>) -> Report
where
    O: OpenBackend<Backend: TestBackend>,
{
    check_cases(&Filter::ALL, options, seeds)
}

/// [`check_backend`] over the cases of a filter.
///
/// # Panics
/// As [`check_backend`].
pub fn check_cases<O>(filter: &Filter, options: impl Fn(&Case) -> O + Sync, seeds: Range<u64>) -> Report
where
    O: OpenBackend<Backend: TestBackend>,
{
    check_seeds(filter, options, seeds, None)
}

/// Runs each seed on the filter's first case that the backend supports, with several seeds in parallel.
fn check_seeds<O>(
    filter: &Filter,
    options: impl Fn(&Case) -> O + Sync,
    seeds: Range<u64>,
    also: Option<ExtraCheck<O::Backend>>,
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
