//! Compares replays of padded steps with attention in float64, while sequences join, grow and end.

use std::cell::Cell;

use candle_core::{Device, Tensor};
use kvarena::testkit::rng::Rng;
use kvarena::{Extend, Namespace, TokenId};
use kvarena_candle::{Error, Forward, Graphs, KvArena, Step};

use crate::common::{
    ALL_HEADS, DIM, HEADS, LAYERS, Q_HEADS, Sequence, arena, attention, exact, fused, numbers, packed,
};
use crate::{device, untracked};

/// Rows of the padded steps.
const ROWS: usize = 8;
const STEPS: usize = 24;

/// A model without weights: its q, k and v are written before each step.
struct Model {
    qkv: [Tensor; 3],
    /// Forward passes that ran. Each graph takes two: a direct run and a capture.
    passes: Cell<usize>,
}

impl Model {
    fn new(device: &Device) -> Self {
        let zeros = |heads| Tensor::from_vec(vec![0.0_f32; ROWS * heads * DIM], (ROWS, heads, DIM), device);
        Self { qkv: HEADS.map(|heads| zeros(heads).expect("memory")), passes: Cell::new(0) }
    }

    fn set(&self, numbers: &[f32]) {
        for (side, to) in self.qkv.iter().enumerate() {
            let rows = Tensor::from_vec(packed(numbers, side), to.dims(), to.device());
            rows.and_then(|rows| to.slice_set(&rows, 0, 0)).expect("a copy");
        }
    }
}

/// Computes attention of all layers and returns the attention of the last layer.
const ATTEND: Forward<Model> = |model, step| {
    let [q, k, v] = &model.qkv;
    model.passes.set(model.passes.get() + 1);
    for layer in 0..LAYERS - 1 {
        step.attend(layer, &attention(), q, k, v)?;
    }
    Ok(step.attend(LAYERS - 1, &attention(), q, k, v)?)
};

/// Returns a copy of a step's positions. In a graph, `step.inputs` is the graph's input buffer.
const INPUTS: Forward<()> = |(), step| step.inputs.positions.copy();

/// Admits a prompt, and computes it in a step without a graph.
fn join(arena: &mut KvArena, rng: &mut Rng, device: &Device) -> Sequence {
    let len = 1 + rng.below(20) as u32;
    let prompt: Vec<TokenId> = (0..len).map(|_| TokenId::new(rng.below(1 << 30) as u32)).collect();
    let seq = arena.engine.admit(Namespace::default(), &prompt, 0).expect("room");
    let step = arena.step(&[Extend { seq, len }]).expect("room");
    let numbers = numbers(rng, len as usize);
    let [q, k, v] = fused(&numbers, device);
    for layer in 0..LAYERS {
        step.attend(layer, &attention(), &q, &k, &v).expect("valid attention");
    }
    let id = step.launched();
    arena.engine.append(seq, &[TokenId::new(1)]).expect("room");
    arena.close(id).expect("it was launched");
    let rows: Vec<Vec<f32>> = numbers.chunks(ALL_HEADS * DIM).map(<[f32]>::to_vec).collect();
    Sequence { seq, rows: [(); LAYERS].map(|()| rows.clone()) }
}

#[test]
fn replays_of_padded_steps_are_exact() {
    let Some(device) = untracked() else { return };
    let (mut arena, mut rng, model) = (arena(&device), Rng::new(9), Model::new(&device));
    let mut graphs = Graphs::new(&arena, &model, ATTEND).expect("events are not tracked");
    let mut inputs = Graphs::new(&arena, &(), INPUTS).expect("events are not tracked");
    let mut running = Vec::new();
    for turn in 0..STEPS {
        if running.len() < 2 || (running.len() < ROWS && turn % 3 == 0) {
            running.push(join(&mut arena, &mut rng, &device));
        } else if turn % 7 == 0 {
            arena.engine.finish(running.remove(0).seq).expect("it runs");
        }
        let items: Vec<Extend> = running.iter().map(|one| Extend { seq: one.seq, len: 1 }).collect();
        let numbers = numbers(&mut rng, ROWS);
        model.set(&numbers);
        let mut step = arena.step_padded(&items, ROWS).expect("room");
        let out = graphs.forward(&mut step).and_then(|x| Ok(x.flatten_all()?.to_vec1::<f32>()?));
        let positions = inputs.forward(&mut step).and_then(|x| Ok(x.to_vec1::<u32>()?));
        assert_eq!(positions.expect("a copy"), step.plan().positions);
        let out = out.expect("valid attention");
        let rows = numbers.chunks(ALL_HEADS * DIM).zip(out.chunks(Q_HEADS * DIM));
        for (one, (row, out)) in running.iter_mut().zip(rows) {
            one.rows.iter_mut().for_each(|rows| rows.push(row.to_vec()));
            let exact = (0..Q_HEADS).flat_map(|head| exact(&one.rows[LAYERS - 1], head));
            for (out, exact) in out.iter().zip(exact) {
                assert!((f64::from(*out) - exact).abs() < 1e-5, "step {turn}: {out} for {exact}");
            }
        }
        let id = step.launched();
        for item in &items {
            arena.engine.append(item.seq, &[TokenId::new(1)]).expect("room");
        }
        arena.close(id).expect("it was launched");
        arena.engine.verify().expect("all invariants hold");
    }
    assert!(model.passes.get() <= 4, "{} passes of {STEPS} steps", model.passes.get());
}

#[test]
fn graphs_reject_what_they_cannot_capture() {
    let (Some(tracked), Some(device)) = (device(), untracked()) else { return };
    let model = Model::new(&device);
    let error = Graphs::new(&arena(&tracked), &model, ATTEND).err().expect("events are tracked");
    assert!(matches!(error, Error::EventTracking), "{error}");
    let mut graphs = Graphs::new(&arena(&device), &model, ATTEND).expect("events are not tracked");
    let mut other = arena(&device);
    let seq = other.engine.admit(Namespace::default(), &[TokenId::new(1)], 0).expect("room");
    let mut step: Step<'_> = other.step_padded(&[Extend { seq, len: 1 }], ROWS).expect("room");
    let error = graphs.forward(&mut step).expect_err("a step of another arena");
    assert!(matches!(error, Error::OtherArena), "{error}");
}
