//! [`Either`]: one of two backends, chosen at run time.

use std::error::Error;
use std::fmt;

use super::{
    Attend, Backend, Moved, OpenBackend, Operand, Queries, Rope, Select, Selection, SparseBackend, SwapMemory,
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

impl<L, R> Either<L, R> {
    fn left<E, F>(self, operand: Operand) -> Result<L, EitherError<E, F>> {
        match self {
            Self::Left(left) => Ok(left),
            Self::Right(_) => Err(EitherError::Operand { operand }),
        }
    }

    fn right<E, F>(self, operand: Operand) -> Result<R, EitherError<E, F>> {
        match self {
            Self::Left(_) => Err(EitherError::Operand { operand }),
            Self::Right(right) => Ok(right),
        }
    }
}

impl<L: OpenBackend, R: OpenBackend> OpenBackend for Either<L, R> {
    type Backend = Either<L::Backend, R::Backend>;

    fn open(
        self,
        layout: &PoolLayout,
        table: &TableShape,
        bounds: impl Into<StepBounds>,
    ) -> Result<Self::Backend, <Self::Backend as Backend>::Error> {
        match self {
            Self::Left(options) => options.open(layout, table, bounds).map(Either::Left).map_err(EitherError::Left),
            Self::Right(options) => options.open(layout, table, bounds).map(Either::Right).map_err(EitherError::Right),
        }
    }
}

/// Unwraps query rows by `rows` and sinks by `sinks`.
fn queries<Q, S, R, T, E>(
    of: Queries<Q, S>,
    rows: impl FnOnce(Q, Operand) -> Result<R, E>,
    sinks: impl FnOnce(S, Operand) -> Result<T, E>,
) -> Result<Queries<R, T>, E> {
    let sinks = of.sinks.map(|given| sinks(given, Operand::Sinks)).transpose()?;
    Ok(Queries { rows: rows(of.rows, Operand::Q)?, sinks })
}

/// Unwraps the weights of norms by `norm` and frequencies by `frequencies`.
fn rope<W: Copy, F: Copy, R, T, E>(
    of: &Rope<W, F>,
    norm: impl Fn(W, Operand) -> Result<R, E>,
    frequencies: impl FnOnce(F, Operand) -> Result<T, E>,
) -> Result<Rope<R, T>, E> {
    let Rope { q_heads, eps, .. } = *of;
    let norm = |given: Option<W>| given.map(|given| norm(given, Operand::Norm)).transpose();
    let frequencies = frequencies(of.frequencies, Operand::Frequencies)?;
    Ok(Rope { q_heads, q_norm: norm(of.q_norm)?, k_norm: norm(of.k_norm)?, eps, frequencies })
}

impl<L: Backend, R: Backend> Backend for Either<L, R> {
    type Error = EitherError<L::Error, R::Error>;
    type Rows<'a> = Either<L::Rows<'a>, R::Rows<'a>>;
    type RowsMut<'a> = Either<L::RowsMut<'a>, R::RowsMut<'a>>;
    type Sinks<'a> = Either<L::Sinks<'a>, R::Sinks<'a>>;
    type Lse<'a> = Either<L::Lse<'a>, R::Lse<'a>>;

    fn begin(&mut self, plan: &BatchPlan<'_>) -> Result<(), Self::Error> {
        match self {
            Self::Left(backend) => backend.begin(plan).map_err(EitherError::Left),
            Self::Right(backend) => backend.begin(plan).map_err(EitherError::Right),
        }
    }

    fn end(&mut self, end: StepEnd) {
        match self {
            Self::Left(backend) => backend.end(end),
            Self::Right(backend) => backend.end(end),
        }
    }

    fn store_cache(
        &mut self,
        plan: &BatchPlan<'_>,
        layer: LayerId,
        k: Self::Rows<'_>,
        v: Self::Rows<'_>,
    ) -> Result<(), Self::Error> {
        match self {
            Self::Left(backend) => {
                let (k, v) = (k.left(Operand::K)?, v.left(Operand::V)?);
                backend.store_cache(plan, layer, k, v).map_err(EitherError::Left)
            }
            Self::Right(backend) => {
                let (k, v) = (k.right(Operand::K)?, v.right(Operand::V)?);
                backend.store_cache(plan, layer, k, v).map_err(EitherError::Right)
            }
        }
    }

    fn rope_store(
        &mut self,
        plan: &BatchPlan<'_>,
        layer: LayerId,
        of: &Rope<Self::Rows<'_>, Self::Sinks<'_>>,
        qkv: Self::RowsMut<'_>,
    ) -> Result<(), Self::Error> {
        match self {
            Self::Left(backend) => {
                let (of, qkv) = (rope(of, Either::left, Either::left)?, qkv.left(Operand::Qkv)?);
                backend.rope_store(plan, layer, &of, qkv).map_err(EitherError::Left)
            }
            Self::Right(backend) => {
                let (of, qkv) = (rope(of, Either::right, Either::right)?, qkv.right(Operand::Qkv)?);
                backend.rope_store(plan, layer, &of, qkv).map_err(EitherError::Right)
            }
        }
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
        match self {
            Self::Left(backend) => {
                let (q, out) = (queries(q, Either::left, Either::left)?, out.left(Operand::Out)?);
                let lse = lse.map(|lse| lse.left(Operand::Lse)).transpose()?;
                backend.attend_queries(plan, layer, attend, q, out, lse).map_err(EitherError::Left)
            }
            Self::Right(backend) => {
                let (q, out) = (queries(q, Either::right, Either::right)?, out.right(Operand::Out)?);
                let lse = lse.map(|lse| lse.right(Operand::Lse)).transpose()?;
                backend.attend_queries(plan, layer, attend, q, out, lse).map_err(EitherError::Right)
            }
        }
    }

    fn copy_pages(&mut self, copies: &[PageCopy]) -> Result<(), Self::Error> {
        match self {
            Self::Left(backend) => backend.copy_pages(copies).map_err(EitherError::Left),
            Self::Right(backend) => backend.copy_pages(copies).map_err(EitherError::Right),
        }
    }

    fn compact(&mut self, compactions: &[Compaction]) -> Result<(), Self::Error> {
        match self {
            Self::Left(backend) => backend.compact(compactions).map_err(EitherError::Left),
            Self::Right(backend) => backend.compact(compactions).map_err(EitherError::Right),
        }
    }

    fn swap_pages(&self) -> u32 {
        match self {
            Self::Left(backend) => backend.swap_pages(),
            Self::Right(backend) => backend.swap_pages(),
        }
    }

    fn save_pages(&mut self, id: MoveId, moves: &[PageMove]) -> Result<(), Self::Error> {
        match self {
            Self::Left(backend) => backend.save_pages(id, moves).map_err(EitherError::Left),
            Self::Right(backend) => backend.save_pages(id, moves).map_err(EitherError::Right),
        }
    }

    fn load_pages(&mut self, id: MoveId, moves: &[PageMove]) -> Result<(), Self::Error> {
        match self {
            Self::Left(backend) => backend.load_pages(id, moves).map_err(EitherError::Left),
            Self::Right(backend) => backend.load_pages(id, moves).map_err(EitherError::Right),
        }
    }

    fn moved(&mut self) -> Result<Moved, Self::Error> {
        match self {
            Self::Left(backend) => backend.moved().map_err(EitherError::Left),
            Self::Right(backend) => backend.moved().map_err(EitherError::Right),
        }
    }

    fn synchronize(&mut self) -> Result<(), Self::Error> {
        match self {
            Self::Left(backend) => backend.synchronize().map_err(EitherError::Left),
            Self::Right(backend) => backend.synchronize().map_err(EitherError::Right),
        }
    }
}

impl<L: AsRef<[u8]>, R: AsRef<[u8]>> AsRef<[u8]> for Either<L, R> {
    fn as_ref(&self) -> &[u8] {
        match self {
            Self::Left(bytes) => bytes.as_ref(),
            Self::Right(bytes) => bytes.as_ref(),
        }
    }
}

impl<L: AsMut<[u8]>, R: AsMut<[u8]>> AsMut<[u8]> for Either<L, R> {
    fn as_mut(&mut self) -> &mut [u8] {
        match self {
            Self::Left(bytes) => bytes.as_mut(),
            Self::Right(bytes) => bytes.as_mut(),
        }
    }
}

impl<L: SwapMemory, R: SwapMemory> SwapMemory for Either<L, R> {
    type Read = Either<L::Read, R::Read>;
    type Write = Either<L::Write, R::Write>;

    fn lease(&mut self, page: SwapPageId) -> Self::Read {
        match self {
            Self::Left(backend) => Either::Left(backend.lease(page)),
            Self::Right(backend) => Either::Right(backend.lease(page)),
        }
    }

    fn lease_mut(&mut self, page: SwapPageId) -> Self::Write {
        match self {
            Self::Left(backend) => Either::Left(backend.lease_mut(page)),
            Self::Right(backend) => Either::Right(backend.lease_mut(page)),
        }
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
        match self {
            Self::Left(backend) => {
                let (q, lists) = (q.left(Operand::Q)?, positions.left(Operand::Selection)?);
                backend.select(plan, layer, select, q, lists).map_err(EitherError::Left)
            }
            Self::Right(backend) => {
                let (q, lists) = (q.right(Operand::Q)?, positions.right(Operand::Selection)?);
                backend.select(plan, layer, select, q, lists).map_err(EitherError::Right)
            }
        }
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
        match self {
            Self::Left(backend) => {
                let selection = Selection { positions: positions.left(Operand::Selection)?, top };
                let (q, out) = (queries(q, Either::left, Either::left)?, out.left(Operand::Out)?);
                let lse = lse.map(|lse| lse.left(Operand::Lse)).transpose()?;
                let done = backend.attend_selected(plan, layer, attend, selection, q, out, lse);
                done.map_err(EitherError::Left)
            }
            Self::Right(backend) => {
                let selection = Selection { positions: positions.right(Operand::Selection)?, top };
                let (q, out) = (queries(q, Either::right, Either::right)?, out.right(Operand::Out)?);
                let lse = lse.map(|lse| lse.right(Operand::Lse)).transpose()?;
                let done = backend.attend_selected(plan, layer, attend, selection, q, out, lse);
                done.map_err(EitherError::Right)
            }
        }
    }
}
