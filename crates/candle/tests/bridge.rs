//! Compares the bridge with float64 attention over contiguous K and V, and tests the calls that it
//! rejects.

mod common;

use candle_core::{DType, Device, Tensor};
use common::{DIM, KV_HEADS, LAYERS, Program, Q_HEADS, WRONG, attention, fused, numbers};
use kvarena::backend::Operand;
use kvarena::testkit::rng::Rng;
use kvarena::{Attend, Extend, Namespace, TokenId};
use kvarena_candle::{Error, KvArena, Step};

fn arena() -> KvArena {
    common::arena(&Device::Cpu)
}

/// Returns the numbers of random fused rows, and their q, k and v.
fn rows(seed: u64, rows: usize) -> (Vec<f32>, [Tensor; 3]) {
    let numbers = numbers(&mut Rng::new(seed), rows);
    let qkv = fused(&numbers, &Device::Cpu);
    (numbers, qkv)
}

#[test]
fn programs_are_exact() {
    let mut rejected = [0; WRONG];
    for seed in 0..20 {
        let some = Program::new(&Device::Cpu, &[], 20, seed).run(30);
        rejected.iter_mut().zip(some).for_each(|(all, some)| *all += some);
    }
    // These programs have no other device, so one kind of wrong call does not occur.
    assert!(rejected.iter().filter(|&&count| count > 0).count() == WRONG - 1, "{rejected:?}");
}

#[test]
fn tensors_that_cannot_be_read_in_place_are_rejected() {
    let mut arena = arena();
    let tokens: Vec<TokenId> = (0..3).map(TokenId::new).collect();
    let seq = arena.engine.admit(Namespace::default(), &tokens, 0).expect("room");
    let step = arena.step(&[Extend { seq, len: 3 }]).expect("room");
    let attend = attention();
    let (_, [q, k, v]) = rows(1, 3);
    let refused =
        |q: &Tensor, k: &Tensor, v: &Tensor| step.attend(0, &attend, q, k, v).expect_err("it must not be read");
    let error = refused(&q, &k.narrow(0, 0, 2).expect("rows"), &v);
    assert!(matches!(error, Error::Shape { operand: Operand::K, .. }), "{error}");
    assert_eq!(error.to_string(), "k has shape [2, 2, 32] where [3, 2, 32] is expected");
    // Heads precede rows, as in candle's own models, so the rows are not contiguous.
    let heads_first = v.transpose(0, 1).and_then(|v| v.contiguous()?.transpose(0, 1));
    let error = refused(&q, &k, &heads_first.expect("a view"));
    assert!(matches!(error, Error::Strides { operand: Operand::V, .. }), "{error}");
    let broadcast = k.narrow(0, 0, 1).and_then(|k| k.contiguous()?.broadcast_as((3, KV_HEADS, DIM)));
    let error = refused(&q, &broadcast.expect("a view"), &v);
    assert!(matches!(error, Error::Engine(_)), "{error}");
    let error = refused(&q.to_dtype(DType::F64).expect("numbers"), &k, &v);
    assert!(matches!(error, Error::Dtype { operand: Operand::Q, dtype: DType::F64 }), "{error}");
    let error = refused(&q, &k.to_dtype(DType::U32).expect("numbers"), &v);
    assert!(matches!(error, Error::Dtype { operand: Operand::K, dtype: DType::U32 }), "{error}");
    let error = step.attend(LAYERS, &attend, &q, &k, &v).expect_err("there are two layers");
    assert_eq!(error.to_string(), "the backend failed: layer 2 is out of range: the count is 2");
    // candle keeps only the text.
    let text = candle_core::Error::from(error).to_string();
    assert!(text.contains("layer 2 is out of range"), "{text}");
    let window = Attend { window: Some(0), ..attend };
    assert!(step.attend(0, &window, &q, &k, &v).is_err());
    // The rejected calls changed neither the step nor the arena.
    step.attend(0, &attend, &q, &k, &v).expect("valid attention");
    drop(step);
    arena.engine.verify().expect("all invariants hold");
    assert_eq!(arena.engine.planned_len(seq), Ok(0));
}

#[test]
fn sinks_take_their_part_of_the_softmax() {
    let mut arena = arena();
    let seq = arena.engine.admit(Namespace::default(), &[TokenId::new(1)], 0).expect("room");
    let step = arena.step(&[Extend { seq, len: 1 }]).expect("room");
    let attend = attention();
    let (numbers, [q, k, v]) = rows(2, 1);
    let plain = step.attend(0, &attend, &q, &k, &v).expect("valid attention");
    let logit = |head: usize| {
        let kv_head = Q_HEADS + head / (Q_HEADS / KV_HEADS);
        let [q, k] = [head, kv_head].map(|head| &numbers[head * DIM..][..DIM]);
        q.iter().zip(k).map(|(q, k)| q * k).sum::<f32>() / (DIM as f32).sqrt()
    };
    let attended = |sinks: Vec<f32>| {
        let sinks = Tensor::from_vec(sinks, Q_HEADS, &Device::Cpu).expect("numbers");
        step.attend_with_sinks(0, &attend, [&q, &k, &v], Some(&sinks)).expect("valid attention")
    };
    // A sink as large as the only logit takes half of the weight; minus infinity takes none.
    let (half, none) = (attended((0..Q_HEADS).map(logit).collect()), attended(vec![f32::NEG_INFINITY; Q_HEADS]));
    let [plain, half, none] =
        [plain, half, none].map(|x| x.flatten_all().and_then(|x| x.to_vec1::<f32>()).expect("numbers"));
    assert_eq!(plain, none);
    for (plain, half) in plain.iter().zip(&half) {
        assert!((plain / 2.0 - half).abs() < 1e-6, "{half} is not half of {plain}");
    }
    let few = Tensor::zeros(1, DType::F32, &Device::Cpu).expect("numbers");
    let error = step.attend_with_sinks(0, &attend, [&q, &k, &v], Some(&few)).expect_err("one sink");
    assert!(matches!(error, Error::Shape { operand: Operand::Sinks, .. }), "{error}");
}

#[test]
fn a_step_that_panics_is_undone_and_tensors_outlive_the_arena() {
    let mut arena = arena();
    let seq = arena.engine.admit(Namespace::default(), &[TokenId::new(1)], 0).expect("room");
    let items = [Extend { seq, len: 1 }];
    let panics = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        let _step = arena.step(&items).expect("room");
        panic!("in the model");
    }));
    assert!(panics.is_err());
    arena.engine.verify().expect("all invariants hold");
    let step = arena.step(&items).expect("the same step again");
    let (_, [q, k, v]) = rows(3, 1);
    let out = step.attend(0, &attention(), &q, &k, &v).expect("valid attention");
    let inputs = step.inputs.clone();
    drop(step);
    drop(arena);
    assert_eq!(out.dims(), [1, Q_HEADS, DIM]);
    assert_eq!(inputs.tokens.to_vec1::<u32>().expect("numbers"), [1]);
}

/// A dropped step cannot complete while an earlier step is open. Closing the earlier step completes it.
#[test]
fn a_later_step_may_be_dropped_while_an_earlier_one_is_open() {
    let mut arena = arena();
    let seqs = [1, 2].map(|token| arena.engine.admit(Namespace::default(), &[TokenId::new(token)], 0).expect("room"));
    let first = arena.step(&[Extend { seq: seqs[0], len: 1 }]).expect("room").launched();
    drop(arena.step(&[Extend { seq: seqs[1], len: 1 }]).expect("room"));
    arena.engine.verify().expect("all invariants hold");
    arena.close(first).expect("it was launched");
    assert_eq!(arena.engine.stats().fenced_pages, 0, "the pages of the dropped step return");
    let second = arena.step(&[Extend { seq: seqs[1], len: 1 }]).expect("room").launched();
    arena.close(second).expect("it was launched");
    arena.engine.verify().expect("all invariants hold");
}

/// Padding follows the rows of the items and does not change their results.
#[test]
fn a_padded_step_is_the_same_for_its_items() {
    let mut arena = arena();
    let seqs =
        [1, 2, 3].map(|token| arena.engine.admit(Namespace::default(), &[TokenId::new(token)], 0).expect("room"));
    let items = seqs.map(|seq| Extend { seq, len: 1 });
    let (_, qkv) = rows(4, 8);
    let attend = |step: &Step<'_>| {
        let rows = step.plan().token_count();
        let [q, k, v] = qkv.each_ref().map(|x| x.narrow(0, 0, rows).expect("rows"));
        let out = step.attend(0, &attention(), &q, &k, &v).expect("valid attention");
        out.to_vec3::<f32>().expect("numbers")
    };
    let wanted = attend(&arena.step(&items).expect("room"));
    let step = arena.step_padded(&items, 8).expect("room");
    assert_eq!([step.inputs.tokens.elem_count(), step.inputs.last_rows.elem_count()], [8, 8]);
    let last_rows = step.inputs.last_rows.to_vec1::<u32>().expect("numbers");
    assert_eq!(last_rows, [0, 1, 2, 3, 4, 5, 6, 7]);
    let out = attend(&step);
    assert_eq!(out[..3], wanted);
    assert!(out[3..].iter().flatten().flatten().all(|&x| x == 0.0));
    drop(step);
    let few = arena.step_padded(&items, 2).err().expect("fewer rows than items");
    assert!(matches!(few, Error::Engine(_)), "{few}");
    arena.engine.verify().expect("all invariants hold");
}
