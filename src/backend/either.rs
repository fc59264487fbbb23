//! [`Either`]: one of two backends, chosen at run time.

use std::error::Error;
use std::fmt;

use super::{
    Attend, Backend, Moved, OpenBackend, Operand, Queries, Rope, Select, Selection, SparseBackend, StateBackend,
    SwapMemory,
};
use crate::config::StepBounds;
use crate::id::{LayerId, MoveId, SwapPageId};
use crate::layout::{PoolLayout, TableShape};
use crate::plan::{BatchPlan, Compaction, PageCopy, PageMove, StepEnd};

/// One of two values, chosen at run time: backends, their options, or the rows of their calls.
///
/// A host that runs with or without a GPU uses an `Engine<Either<Cpu, Cuda>>`. Every call costs one more branch. Rows
/// of the other backend are rejected with [`EitherError::Operand`].
///
/// ```
/// use kvarena::backend::Either;
/// use kvarena::*;
///
/// let has_bytes = true;
/// let options = if has_bytes { Either::Left(CpuOptions::default()) } else { Either::Right(Null) };
/// let config = PoolConfig { capacity: Capacity::Pages(4), ..PoolConfig::default() };
/// let engine = Engine::new(config, options)?;
/// assert!(matches!(engine.backend(), Either::Left(cpu) if cpu.layout().page_count() == 4));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Either<L, R> {
    /// The first value.
    Left(L),
    /// The second value.
    Right(R),
}

/// The error of an [`Either`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum EitherError<L, R> {
    /// An error of the first backend.
    Left(L),
    /// An error of the second backend.
    Right(R),
    /// An argument belongs to the backend that was not chosen.
    Operand {
        /// The argument.
        operand: Operand,
    },
}

impl<L: fmt::Display, R: fmt::Display> fmt::Display for EitherError<L, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Left(error) => error.fmt(f),
            Self::Right(error) => error.fmt(f),
            Self::Operand { operand } => write!(f, "{operand} belongs to another backend"),
        }
    }
}

impl<L: Error + 'static, R: Error + 'static> Error for EitherError<L, R> {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            Self::Left(error) => error.source(),
            Self::Right(error) => error.source(),
            Self::Operand { .. } => None,
        }
    }
}

/// Evaluates an expression for the value of an [`Either`]. In the expression, `take` unwraps an argument of the same
/// variant, `same` wraps a result in this variant, and `failed` wraps an error.
macro_rules! each {
    ($either:expr, $value:ident => $result:expr) => {
        match $either {
            Either::Left($value) => {
                #[allow(unused_imports)]
                use {Either::Left as same, EitherError::Left as failed, left as take};
                $result
            }
            Either::Right($value) => {
                #[allow(unused_imports)]
                use {Either::Right as same, EitherError::Right as failed, right as take};
                $result
            }
        }
    };
}

fn left<L, R, E, F>(argument: Either<L, R>, operand: Operand) -> Result<L, EitherError<E, F>> {
    if let Either::Left(left) = argument { Ok(left) } else { Err(EitherError::Operand { operand }) }
}

fn right<L, R, E, F>(argument: Either<L, R>, operand: Operand) -> Result<R, EitherError<E, F>> {
    if let Either::Right(right) = argument { Ok(right) } else { Err(EitherError::Operand { operand }) }
}

impl<L: OpenBackend, R: OpenBackend> OpenBackend for Either<L, R> {
    type Backend = Either<L::Backend, R::Backend>;

    fn open(
        self,
        layout: &PoolLayout,
        table: &TableShape,
        bounds: impl Into<StepBounds>,
    ) -> Result<Self::Backend, <Self::Backend as Backend>::Error> {
        each!(self, options => options.open(layout, table, bounds).map(same).map_err(failed))
    }
}

/// Unwraps query rows by `rows` and sinks by `sinks`.
fn queries<Q, S, R, T, E>(
    given: Queries<Q, S>,
    rows: impl FnOnce(Q, Operand) -> Result<R, E>,
    sinks: impl FnOnce(S, Operand) -> Result<T, E>,
) -> Result<Queries<R, T>, E> {
    let sinks = given.sinks.map(|sink| sinks(sink, Operand::Sinks)).transpose()?;
    Ok(Queries { rows: rows(given.rows, Operand::Q)?, sinks })
}

/// Unwraps the weights of norms by `norm` and frequencies by `frequencies`.
fn rope<W: Copy, F: Copy, R, T, E>(
    given: &Rope<W, F>,
    norm: impl Fn(W, Operand) -> Result<R, E>,
    frequencies: impl FnOnce(F, Operand) -> Result<T, E>,
) -> Result<Rope<R, T>, E> {
    let Rope { q_heads, eps, .. } = *given;
    let norm = |weights: Option<W>| weights.map(|weights| norm(weights, Operand::Norm)).transpose();
    let frequencies = frequencies(given.frequencies, Operand::Frequencies)?;
    Ok(Rope { q_heads, q_norm: norm(given.q_norm)?, k_norm: norm(given.k_norm)?, eps, frequencies })
}

/// Forwards calls without operands.
macro_rules! forward {
    ($($call:ident($($argument:ident: $type:ty),*) -> $result:ty;)*) => {$(
        fn $call(&mut self, $($argument: $type),*) -> Result<$result, Self::Error> {
            each!(self, backend => backend.$call($($argument),*).map_err(failed))
        }
    )*};
}

impl<L: Backend, R: Backend> Backend for Either<L, R> {
    type Error = EitherError<L::Error, R::Error>;
    type Rows<'a> = Either<L::Rows<'a>, R::Rows<'a>>;
    type RowsMut<'a> = Either<L::RowsMut<'a>, R::RowsMut<'a>>;
    type Sinks<'a> = Either<L::Sinks<'a>, R::Sinks<'a>>;
    type Lse<'a> = Either<L::Lse<'a>, R::Lse<'a>>;

    forward! {
        begin(plan: &BatchPlan<'_>) -> ();
        copy_pages(copies: &[PageCopy]) -> ();
        compact(compactions: &[Compaction]) -> ();
        save_pages(id: MoveId, moves: &[PageMove]) -> ();
        load_pages(id: MoveId, moves: &[PageMove]) -> ();
        moved() -> Moved;
        synchronize() -> ();
    }

    fn end(&mut self, end: StepEnd) {
        each!(self, backend => backend.end(end));
    }

    fn swap_pages(&self) -> u32 {
        each!(self, backend => backend.swap_pages())
    }

    fn store_cache(
        &mut self,
        plan: &BatchPlan<'_>,
        layer: LayerId,
        k: Self::Rows<'_>,
        v: Self::Rows<'_>,
    ) -> Result<(), Self::Error> {
        each!(self, backend => {
            let (k, v) = (take(k, Operand::K)?, take(v, Operand::V)?);
            backend.store_cache(plan, layer, k, v).map_err(failed)
        })
    }

    fn rope_store(
        &mut self,
        plan: &BatchPlan<'_>,
        layer: LayerId,
        given: &Rope<Self::Rows<'_>, Self::Sinks<'_>>,
        qkv: Self::RowsMut<'_>,
    ) -> Result<(), Self::Error> {
        each!(self, backend => {
            let (rope, qkv) = (rope(given, take, take)?, take(qkv, Operand::Qkv)?);
            backend.rope_store(plan, layer, &rope, qkv).map_err(failed)
        })
    }

    fn attend_queries(
        &mut self,
        plan: &BatchPlan<'_>,
        layer: LayerId,
        attend: &Attend,
        q: Queries<Self::Rows<'_>, Self::Sinks<'_>>,
        out: Self::RowsMut<'_>,
        lse: Option<Self::Lse<'_>>,
    ) -> Result<(), Self::Error> {
        each!(self, backend => {
            let (q, out) = (queries(q, take, take)?, take(out, Operand::Out)?);
            let lse = lse.map(|lse| take(lse, Operand::Lse)).transpose()?;
            backend.attend_queries(plan, layer, attend, q, out, lse).map_err(failed)
        })
    }
}

impl<L: AsRef<[u8]>, R: AsRef<[u8]>> AsRef<[u8]> for Either<L, R> {
    fn as_ref(&self) -> &[u8] {
        each!(self, bytes => bytes.as_ref())
    }
}

impl<L: AsMut<[u8]>, R: AsMut<[u8]>> AsMut<[u8]> for Either<L, R> {
    fn as_mut(&mut self) -> &mut [u8] {
        each!(self, bytes => bytes.as_mut())
    }
}

impl<L: SwapMemory, R: SwapMemory> SwapMemory for Either<L, R> {
    type Read = Either<L::Read, R::Read>;
    type Write = Either<L::Write, R::Write>;

    fn lease(&mut self, page: SwapPageId) -> Self::Read {
        each!(self, backend => same(backend.lease(page)))
    }

    fn lease_mut(&mut self, page: SwapPageId) -> Self::Write {
        each!(self, backend => same(backend.lease_mut(page)))
    }
}

impl<L: SparseBackend, R: SparseBackend> SparseBackend for Either<L, R> {
    type Positions<'a> = Either<L::Positions<'a>, R::Positions<'a>>;
    type PositionsMut<'a> = Either<L::PositionsMut<'a>, R::PositionsMut<'a>>;

    fn select(
        &mut self,
        plan: &BatchPlan<'_>,
        layer: LayerId,
        select: &Select,
        q: Self::Rows<'_>,
        positions: Self::PositionsMut<'_>,
    ) -> Result<(), Self::Error> {
        each!(self, backend => {
            let (q, lists) = (take(q, Operand::Q)?, take(positions, Operand::Selection)?);
            backend.select(plan, layer, select, q, lists).map_err(failed)
        })
    }

    fn attend_selected(
        &mut self,
        plan: &BatchPlan<'_>,
        layer: LayerId,
        attend: &Attend,
        Selection { positions, top }: Selection<Self::Positions<'_>>,
        q: Queries<Self::Rows<'_>, Self::Sinks<'_>>,
        out: Self::RowsMut<'_>,
        lse: Option<Self::Lse<'_>>,
    ) -> Result<(), Self::Error> {
        each!(self, backend => {
            let selection = Selection { positions: take(positions, Operand::Selection)?, top };
            let (q, out) = (queries(q, take, take)?, take(out, Operand::Out)?);
            let lse = lse.map(|lse| take(lse, Operand::Lse)).transpose()?;
            backend.attend_selected(plan, layer, attend, selection, q, out, lse).map_err(failed)
        })
    }
}

impl<L: StateBackend, R: StateBackend> StateBackend for Either<L, R> {
    forward! {
        copy_states(plan: &BatchPlan<'_>) -> ();
    }
}
