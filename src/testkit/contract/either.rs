//! The contract's buffers for an [`Either`]: those of the chosen backend.

use super::{Case, HostRows, SparseTestBackend, StateTestBackend, TestBackend};
use crate::backend::Either;
use crate::id::{LayerId, PageId};
use crate::plan::BatchPlan;

/// Applies an expression to the chosen side of a backend and of a buffer.
macro_rules! both {
    ($backend:expr, $buffer:expr; |$b:ident, $x:ident| $call:expr) => {
        match ($backend, $buffer) {
            (Either::Left($b), Either::Left($x)) => $call,
            (Either::Right($b), Either::Right($x)) => $call,
            _ => panic!("a buffer of the other backend"),
        }
    };
}

/// Applies the first expression to a left side or the second to a right side, and wraps the result.
macro_rules! each {
    ($either:expr; |$x:ident| $left:expr, $right:expr) => {
        match $either {
            Either::Left($x) => Either::Left($left),
            Either::Right($x) => Either::Right($right),
        }
    };
}

impl<L: TestBackend, R: TestBackend> TestBackend for Either<L, R> {
    type Input = Either<L::Input, R::Input>;
    type Output = Either<L::Output, R::Output>;
    type Sums = Either<L::Sums, R::Sums>;

    fn supports(case: &Case) -> bool {
        L::supports(case) && R::supports(case)
    }

    fn unit(&self, case: &Case) -> f64 {
        match self {
            Self::Left(backend) => backend.unit(case),
            Self::Right(backend) => backend.unit(case),
        }
    }

    fn value_rounding(&self, case: &Case) -> f64 {
        match self {
            Self::Left(backend) => backend.value_rounding(case),
            Self::Right(backend) => backend.value_rounding(case),
        }
    }

    fn input(&mut self, rows: &HostRows) -> Self::Input {
        each!(self; |backend| backend.input(rows), backend.input(rows))
    }

    fn rows(input: &Self::Input) -> Self::Rows<'_> {
        each!(input; |x| L::rows(x), R::rows(x))
    }

    fn sinks(input: &Self::Input) -> Self::Sinks<'_> {
        each!(input; |x| L::sinks(x), R::sinks(x))
    }

    fn output(&mut self, poison: &HostRows) -> Self::Output {
        each!(self; |backend| backend.output(poison), backend.output(poison))
    }

    fn rows_mut(output: &mut Self::Output) -> Self::RowsMut<'_> {
        each!(output; |x| L::rows_mut(x), R::rows_mut(x))
    }

    fn read_output(&mut self, output: &Self::Output) -> Vec<f32> {
        both!(self, output; |backend, x| backend.read_output(x))
    }

    fn sums(&mut self, len: usize) -> Self::Sums {
        each!(self; |backend| backend.sums(len), backend.sums(len))
    }

    fn lse(sums: &mut Self::Sums) -> Self::Lse<'_> {
        each!(sums; |x| L::lse(x), R::lse(x))
    }

    fn read_sums(&mut self, sums: &Self::Sums) -> Vec<f32> {
        both!(self, sums; |backend, x| backend.read_sums(x))
    }

    fn read_pages(&mut self, pages: &[PageId], target: &mut [u8]) {
        match self {
            Self::Left(backend) => backend.read_pages(pages, target),
            Self::Right(backend) => backend.read_pages(pages, target),
        }
    }

    fn write_pages(&mut self, pages: &[PageId], source: &[u8]) {
        match self {
            Self::Left(backend) => backend.write_pages(pages, source),
            Self::Right(backend) => backend.write_pages(pages, source),
        }
    }
}

impl<L: SparseTestBackend, R: SparseTestBackend> SparseTestBackend for Either<L, R> {
    type Lists = Either<L::Lists, R::Lists>;

    fn lists(&mut self, positions: &[u32]) -> Self::Lists {
        each!(self; |backend| backend.lists(positions), backend.lists(positions))
    }

    fn positions(lists: &Self::Lists) -> Self::Positions<'_> {
        each!(lists; |x| L::positions(x), R::positions(x))
    }

    fn positions_mut(lists: &mut Self::Lists) -> Self::PositionsMut<'_> {
        each!(lists; |x| L::positions_mut(x), R::positions_mut(x))
    }

    fn read_lists(&mut self, lists: &Self::Lists) -> Vec<u32> {
        both!(self, lists; |backend, x| backend.read_lists(x))
    }
}

impl<L: StateTestBackend, R: StateTestBackend> StateTestBackend for Either<L, R> {
    fn slots(&mut self, plan: &BatchPlan<'_>, layer: LayerId) -> [Vec<i32>; 2] {
        match self {
            Self::Left(backend) => backend.slots(plan, layer),
            Self::Right(backend) => backend.slots(plan, layer),
        }
    }
}
