//! One engine's plans drive two ranks in two threads, each with half the heads, on separate devices if there are two.
//! Their combined outputs equal the output of one device up to rounding.

use std::sync::mpsc;
use std::thread;

use kvarena::backend::OpenBackend;
use kvarena::backend::cuda::Gpu;
use kvarena::layout::{Layout, PoolLayout, TableShape};
use kvarena::plan::{OwnedPlan, StepEnd};
use kvarena::testkit::contract::HostRows;
use kvarena::testkit::planner::Item;
use kvarena::{Attend, Backend, Capacity, Engine, Extend, Namespace, Null, StepScratch, TokenId};

use crate::drive::{Drive, LayerInputs, Results, Shape};
use crate::on_gpu::OnGpuOptions;
use crate::{device, gpu};

const LAYERS: u32 = 2;

/// A step as a rank receives it: the bytes of its plan and of its end, and the rank's heads of q, k and v.
type Step = (Vec<u8>, [u8; StepEnd::BYTES], Vec<LayerInputs>);

type Outputs = Vec<Results>;

fn serve(
    gpu: &Gpu,
    layout: &PoolLayout,
    table: &TableShape,
    attend: &Attend,
    steps: impl Iterator<Item = Step>,
    mut done: impl FnMut(Outputs),
) {
    let mut backend = OnGpuOptions::new(gpu).open(layout, table, 8).expect("a small pool");
    for (bytes, end, inputs) in steps {
        let plan = OwnedPlan::from_bytes(&bytes).expect("the bytes of a plan");
        let plan = plan.plan();
        backend.begin(&plan).expect("a valid plan");
        let layers = inputs.iter().enumerate().map(|(layer, rows)| rows.run(&mut backend, &plan, layer, attend));
        done(layers.collect());
        backend.end(StepEnd::from_bytes(&end).expect("the bytes of an end"));
    }
}

fn of_rank(plan: &OwnedPlan, inputs: Vec<LayerInputs>) -> Step {
    (plan.as_bytes().to_vec(), StepEnd::Complete(plan.plan().step()).to_bytes(), inputs)
}

/// Returns half of each row's heads.
fn half(rows: &HostRows, rank: usize) -> HostRows {
    let width = rows.width / 2;
    let cut = |row: &[f32]| row[rank * width..(rank + 1) * width].to_vec();
    let values = rows.values.chunks_exact(rows.width).flat_map(cut).collect();
    HostRows { dtype: rows.dtype, width, stride: width, values }
}

/// Combines the rows of two halves.
fn join(left: &[f32], right: &[f32], width: usize) -> Vec<f32> {
    let halves = left.chunks_exact(width / 2).zip(right.chunks_exact(width / 2));
    halves.flat_map(|(left, right)| [left, right].concat()).collect()
}

/// The items of a step, its plan, and the inputs of each layer.
type Planned = (Vec<Item>, OwnedPlan, Vec<LayerInputs>);

/// Returns the steps of all ranks and the shape of their page tables. The engine that plans the steps has no K and V.
fn plan_steps(drive: &mut Drive) -> (Vec<Planned>, TableShape) {
    let mut engine = Engine::new(drive.shape.config(), Null).expect("a small engine");
    let mut scratch = StepScratch::new();
    let (mut steps, mut sequences) = (Vec::new(), Vec::new());
    for step in 0..12_u32 {
        let mut items = Vec::new();
        for (sequence, &seq) in sequences.iter().enumerate() {
            engine.append(seq, &[TokenId::new(step)]).expect("room for a token");
            items.push((Item::Extend { sequence, len: 1 }, Extend { seq, len: 1 }));
        }
        if step % 3 == 0 {
            let len = drive.rng.within(1, 900) as u32;
            let prompt: Vec<_> = (0..len).map(|i| TokenId::new(1_000 * step + i)).collect();
            let seq = engine.admit(Namespace::default(), &prompt, 0).expect("room for a prompt");
            sequences.push(seq);
            items.push((Item::Extend { sequence: drive.admit(), len }, Extend { seq, len }));
        }
        let (items, extends): (Vec<_>, Vec<_>) = items.into_iter().unzip();
        let plan = engine.plan_batch(&mut scratch, &extends).expect("room for a step");
        let plan = OwnedPlan::from(&plan);
        engine.commit(plan.plan().step()).expect("the step just planned");
        // No sequence ends, so no page is released before the ranks have run.
        engine.complete(plan.plan().step()).expect("the step just committed");
        let inputs = drive.inputs(&items, &plan.plan());
        steps.push((items, plan, inputs));
    }
    (steps, engine.shape().table)
}

#[test]
fn two_ranks_are_one_gpu() {
    let Some(first) = gpu() else { return };
    let first = &*first;
    let second = device(1).unwrap_or_else(|| first.clone());
    println!("ranks on devices {} and {}", first.ordinal(), second.ordinal());
    let (layout, capacity) = (Layout::PageFirst, Capacity::Pages(600));
    let shape = Shape { layers: LAYERS, kv_heads: 8, layout, capacity, sequences: 8, max_len: 1_500, ..Shape::SMALL };
    let mut drive = Drive::new(shape, 5);
    let attend = shape.attend();
    let rank_attend = Attend { q_heads: attend.q_heads / 2, ..attend };
    let rank_pool = |rank| {
        let config = kvarena::PoolConfig { tp_size: 2, tp_rank: rank, ..shape.config() };
        config.layout().expect("a valid pool")
    };
    let (steps, table) = plan_steps(&mut drive);
    let mut single = Vec::new();
    let all = steps.iter().map(|(_, plan, inputs)| of_rank(plan, inputs.clone()));
    serve(first, &shape.pool(), &table, &attend, all, |outputs| single.push(outputs));
    let (mut senders, mut receivers) = (Vec::new(), Vec::new());
    thread::scope(|scope| {
        for (rank, gpu) in [first, &second].into_iter().enumerate() {
            let (send_step, steps) = mpsc::channel::<Step>();
            let (send_outputs, outputs) = mpsc::channel::<Outputs>();
            let (pool, table, attend) = (rank_pool(rank as u32), &table, &rank_attend);
            scope.spawn(move || {
                serve(gpu, &pool, table, attend, steps.iter(), |outputs| {
                    send_outputs.send(outputs).expect("the receiver lives");
                });
            });
            senders.push(send_step);
            receivers.push(outputs);
        }
        for ((items, plan, inputs), single) in steps.iter().zip(&single) {
            for (rank, sender) in senders.iter().enumerate() {
                let cut = |rows: &LayerInputs| LayerInputs {
                    q: half(&rows.q, rank),
                    k: half(&rows.k, rank),
                    v: half(&rows.v, rank),
                };
                let inputs = inputs.iter().map(cut).collect();
                sender.send(of_rank(plan, inputs)).expect("the rank lives");
            }
            let [left, right] = [0, 1].map(|rank| receivers[rank].recv().expect("the rank lives"));
            for layer in 0..LAYERS as usize {
                let width = (attend.q_heads * shape.head_dim) as usize;
                let out = join(&left[layer].0, &right[layer].0, width);
                let lse = join(&left[layer].1, &right[layer].1, attend.q_heads as usize);
                let (whole, sums) = &single[layer];
                for (a, b) in out.iter().zip(whole) {
                    // The outputs may differ by one rounding of bf16, because the ranks split the tokens among CTAs
                    // differently.
                    assert!((a - b).abs() <= 2_f32.powi(-7) * b.abs() + 1e-3, "{a} is not {b}");
                }
                for (a, b) in lse.iter().zip(sums) {
                    assert!((a - b).abs() <= 1e-4 * (1.0 + b.abs()), "{a} is not {b}");
                }
                let q = &inputs[layer].q;
                drive.check(items, &plan.plan(), (layer, q), &attend, (&out, &lse), 30);
            }
        }
        senders.clear();
    });
}
