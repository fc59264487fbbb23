//! A backend chosen at run time satisfies the contract on both sides, and rejects arguments of the other side.

use std::sync::atomic::{AtomicBool, Ordering};

use super::seeds;
use super::small_cpu;
use kvarena::backend::{
    CpuRows, CpuRowsMut, Either, EitherError, OpenBackend, Operand, Queries, Select, Selection, SparseBackend,
};
use kvarena::testkit::contract::{Case, Filter, check_backend, check_sparse_backend};
use kvarena::{Attend, Backend, CpuOptions, LayerId};

/// Returns options that alternate between the left and the right backend.
fn in_turn() -> impl Fn(&Case) -> Either<CpuOptions, CpuOptions> {
    let is_right = AtomicBool::new(false);
    move |case| {
        let (scales, labels) = (case.scales(), case.labels());
        let options = CpuOptions { scales, labels, ..CpuOptions::with_threads(1) };
        if is_right.fetch_xor(true, Ordering::Relaxed) { Either::Right(options) } else { Either::Left(options) }
    }
}

#[test]
fn each_side_keeps_the_contract() {
    let report = check_backend(in_turn(), seeds(12, 40));
    assert!(report.rows > 300 * report.runs, "{report}");
    let report = check_sparse_backend(&Filter::LABELS, in_turn(), seeds(6, 20));
    assert!(report.rows > 300 * report.runs, "{report}");
}

#[test]
fn arguments_of_the_other_side_are_rejected() {
    let (layout, table) = small_cpu::pool();
    for is_right in [false, true] {
        let options = CpuOptions::with_threads(1);
        let options = if is_right { Either::Right(options) } else { Either::Left(options) };
        let mut backend = options.open(&layout, &table, 1).expect("a small pool");
        let numbers = [0.0; 64];
        check_operands(&mut backend, &numbers, is_right);
    }
}

type Both = Either<kvarena::Cpu, kvarena::Cpu>;

/// Passes one argument at a time for the wrong side.
fn check_operands(backend: &mut Both, numbers: &[f32], is_right: bool) {
    fn on<T>(is_right: bool, x: T) -> Either<T, T> {
        if is_right { Either::Right(x) } else { Either::Left(x) }
    }
    let (attend, layer) = (Attend::new(1, 64), LayerId::new(0));
    let arrays = small_cpu::Arrays::good();
    let plan = arrays.plan();
    let rows = |wrong| on(is_right ^ wrong, CpuRows::from(numbers));
    let refused = |operand| Err(EitherError::Operand { operand });
    for operand in [Operand::K, Operand::V] {
        let [k, v] = [Operand::K, Operand::V].map(|this| rows(this == operand));
        assert_eq!(backend.store_cache(&plan, layer, k, v), refused(operand));
    }
    let select = Select { q_heads: 1, top: 1, window: None };
    for operand in [Operand::Q, Operand::Out, Operand::Lse, Operand::Sinks, Operand::Selection] {
        let is = |this| is_right ^ (this == operand);
        let (mut out, mut lse) = (vec![0.0_f32; 64], vec![0.0_f32; 1]);
        let mut lists = [0_u32];
        if [Operand::Q, Operand::Selection].contains(&operand) {
            let to = on(is(Operand::Selection), &mut lists[..]);
            let answer = backend.select(&plan, layer, &select, rows(operand == Operand::Q), to);
            assert_eq!(answer, refused(operand));
        }
        let queries = Queries { rows: rows(operand == Operand::Q), sinks: Some(on(is(Operand::Sinks), numbers)) };
        let selection = Selection { positions: on(is(Operand::Selection), &lists[..]), top: 1 };
        let to = on(is(Operand::Out), CpuRowsMut::from(&mut out[..]));
        let sums = Some(on(is(Operand::Lse), &mut lse[..]));
        let answer = backend.attend_selected(&plan, layer, &attend, selection, queries, to, sums);
        assert_eq!(answer, refused(operand));
        if operand == Operand::Selection {
            continue;
        }
        let to = on(is(Operand::Out), CpuRowsMut::from(&mut out[..]));
        let sums = Some(on(is(Operand::Lse), &mut lse[..]));
        assert_eq!(backend.attend_queries(&plan, layer, &attend, queries, to, sums), refused(operand));
        if operand == Operand::Sinks {
            continue;
        }
        let to = on(is(Operand::Out), CpuRowsMut::from(&mut out[..]));
        let sums = Some(on(is(Operand::Lse), &mut lse[..]));
        let answer = backend.attend(&plan, layer, &attend, queries.rows, to, sums);
        assert_eq!(answer, refused(operand));
    }
}
