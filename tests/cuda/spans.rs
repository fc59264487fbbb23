//! Decode steps of families of sequences with shared spans, which a kernel reads once. The steps run with and without a
//! graph. Each row has one new token or a few.

use std::collections::HashMap;

use kvarena::backend::cuda::{CudaGraph, CudaOptions, Gpu, GraphKey};
use kvarena::layout::{Dtype, Scaling};
use kvarena::plan::{PlanSize, StepEnd};
use kvarena::testkit::padded::padded;
use kvarena::testkit::planner::Item;
use kvarena::testkit::rng::Rng;
use kvarena::{Backend, Capacity, StepScratch};

use crate::drive::{Drive, Shape};
use crate::gpu;
use crate::graph::Buffers;
use crate::on_gpu::{OnGpu, OnGpuOptions};

/// Rows of a decode step: sequences, and at least one row of padding.
const ROWS: usize = 13;

fn shape(kv_heads: u32, group: u32, head_dim: u32, dtype: Dtype) -> Shape {
    let pages = Shape { capacity: Capacity::Pages(400), sequences: ROWS as u32, max_len: 900, ..Shape::SMALL };
    Shape { kv_heads, group, head_dim, dtype, ..pages }
}

/// Computes and checks the new tokens of these items without a graph.
fn extend(gpu: &mut OnGpu, drive: &mut Drive, buffers: &mut Buffers, items: &[Item]) {
    let (attend, plan) = (drive.shape.attend(), drive.planner.plan(items));
    let inputs = drive.inputs(items, &plan.plan());
    buffers.fill(&inputs);
    gpu.begin(&plan.plan()).expect("a valid plan");
    buffers.launch(gpu, &plan.plan(), &attend).expect("a valid step");
    gpu.synchronize().expect("nothing failed");
    buffers.check(drive, items, &plan.plan(), &inputs, &attend);
    gpu.end(StepEnd::Complete(plan.plan().step()));
}

/// Creates a family of a sequence, its children and their children, and one sequence without a shared prefix.
fn grow(backend: &mut OnGpu, drive: &mut Drive, buffers: &mut Buffers) -> Vec<usize> {
    let (first, alone) = (drive.admit(), drive.admit());
    let items = [(first, 304), (alone, 90)].map(|(sequence, len)| Item::Extend { sequence, len });
    extend(backend, drive, buffers, &items);
    let mut all = vec![first];
    for (parents, children, len) in [(1, 3, 144), (4, 7, 0)] {
        for i in 0..children {
            let child = drive.fork(all[i % parents]);
            if len > 0 {
                extend(backend, drive, buffers, &[Item::Extend { sequence: child, len }]);
            }
            all.push(child);
        }
    }
    all.push(alone);
    all
}

/// Runs and checks a few steps. `draw` returns the items of a step and which of them are trees. With `graph`, steps run
/// in graphs with space for `row_tokens` tokens of each row.
fn decode(
    gpu: &Gpu,
    shape: Shape,
    graph: bool,
    row_tokens: usize,
    mut draw: impl FnMut(&[usize]) -> (Vec<Item>, Vec<bool>),
) {
    let mut drive = Drive::new(shape, 21);
    let rows = Some(shape.dtype);
    let options = CudaOptions { all_spans: true, rows, ..CudaOptions::new(gpu) };
    let mut backend = shape.open_with(OnGpuOptions::of(gpu, options), 4);
    let attend = shape.attend();
    let mut buffers = Buffers::new(gpu, &shape, 400);
    let all = grow(&mut backend, &mut drive, &mut buffers);
    let mut scratch = StepScratch::new();
    let mut once = 0;
    let mut graphs: HashMap<GraphKey, CudaGraph> = HashMap::new();
    for step in 0..5 {
        // Different sequences each time, so that spans appear and disappear.
        let some = all.iter().enumerate().filter(|(i, _)| step == 0 || (i + step) % 4 > 0);
        let some: Vec<_> = some.map(|(_, &sequence)| sequence).collect();
        let (items, is_tree) = draw(&some);
        let plan = drive.planner.plan_trees(&items, &is_tree);
        backend.begin(&plan.plan()).expect("a valid plan");
        let plan = plan.plan();
        let more = ROWS - items.len();
        let least = plan.token_count() + more;
        let tokens = if graph { least.max(row_tokens * ROWS) } else { least };
        let plan = padded(&plan, &mut scratch, PlanSize { rows: ROWS, tokens });
        let inputs = drive.inputs(&items, &plan);
        buffers.fill(&inputs);
        let staged = backend.cuda.stage(&plan).expect("a valid plan");
        let is_once = backend.cuda.span_work().is_some();
        // With a graph, lengths may differ so much that the split lets the decode kernel read all spans.
        assert!(is_once || graph, "a span is read once");
        once += usize::from(is_once);
        if graph {
            let graph = graphs.entry(staged.graph).or_insert_with(|| {
                let stream = backend.stream.clone();
                let graph = stream.capture(|| buffers.launch(&mut backend, &plan, &attend));
                graph.expect("a capture")
            });
            // SAFETY: backend and buffers live until the end, and a padded plan was just staged.
            unsafe { graph.launch(&backend.stream) }.expect("a replay");
        } else {
            buffers.launch(&mut backend, &plan, &attend).expect("a valid step");
        }
        backend.synchronize().expect("nothing failed");
        buffers.check(&mut drive, &items, &plan, &inputs, &attend);
        backend.end(StepEnd::Complete(plan.step()));
    }
    // Spans were read once in at least two steps. With one token a row, all steps used the same graph.
    assert!(once > 1 && (row_tokens > 1 || graphs.len() <= 1), "{once} steps, {} graphs", graphs.len());
}

/// Returns items of one token for each sequence, none of which is a tree.
fn one_token(sequences: &[usize]) -> (Vec<Item>, Vec<bool>) {
    (sequences.iter().map(|&sequence| Item::Extend { sequence, len: 1 }).collect(), Vec::new())
}

#[test]
fn families_decode() {
    let Some(gpu) = gpu() else { return };
    for (kv_heads, group, head_dim, dtype) in [
        (2, 4, 128, Dtype::Bf16),
        (1, 8, 128, Dtype::F16),
        (2, 16, 128, Dtype::Bf16),
        (3, 9, 128, Dtype::F16),
        (2, 8, 64, Dtype::Bf16),
        (3, 12, 64, Dtype::F16),
        (2, 4, 256, Dtype::F16),
        (1, 16, 256, Dtype::Bf16),
    ] {
        for graph in [false, true] {
            decode(&gpu, shape(kv_heads, group, head_dim, dtype), graph, 1, one_token);
        }
    }
}

/// Returns the shape with an fp8 pool of the same number of tokens.
fn over_fp8((kv_heads, group, head_dim, dtype): (u32, u32, u32, Dtype), scaling: Scaling, page_size: u32) -> Shape {
    let shape = shape(kv_heads, group, head_dim, dtype);
    // `Drive::fork` needs full pages. Forked sequences have multiples of 16 tokens, so `page_size` must divide 16.
    Shape { fp8: Some(scaling), page_size, capacity: Capacity::Pages(6400 / page_size), ..shape }
}

#[test]
fn families_decode_over_fp8() {
    let Some(gpu) = gpu() else { return };
    for (of, scaling, page_size) in [
        ((2, 4, 128, Dtype::Bf16), Scaling::Static, 16),
        ((1, 8, 128, Dtype::F16), Scaling::ByToken, 8),
        ((2, 16, 128, Dtype::Bf16), Scaling::ByToken, 16),
        ((3, 9, 128, Dtype::F16), Scaling::Static, 1),
        ((2, 8, 64, Dtype::Bf16), Scaling::ByToken, 2),
        ((3, 12, 64, Dtype::F16), Scaling::Static, 16),
        ((2, 4, 256, Dtype::F16), Scaling::ByToken, 16),
        ((1, 16, 256, Dtype::Bf16), Scaling::Static, 4),
    ] {
        for graph in [false, true] {
            decode(&gpu, over_fp8(of, scaling, page_size), graph, 1, one_token);
        }
    }
}

/// Runs steps whose rows have at most `row_tokens` new tokens: as many as a suffix or an item has space for. Graphs
/// also get longer rows and trees of drafts, which the extend kernel serves. In the first step all rows have
/// `row_tokens` tokens. With groups of 3 query heads, an item of 42 tokens then ends between two tokens of a row.
fn verify(gpu: &Gpu, shape: Shape, row_tokens: u32) {
    for graph in [false, true] {
        let (mut rng, mut first) = (Rng::new(31), true);
        decode(gpu, shape, graph, row_tokens as usize, |some| {
            let all = std::mem::take(&mut first);
            let mut item = |&sequence: &usize| {
                let most = if graph && rng.one_in(8) { 18.max(row_tokens) } else { row_tokens };
                let len = rng.within(1, most.into()) as u32;
                Item::Extend { sequence, len: if all { row_tokens } else { len } }
            };
            let items: Vec<_> = some.iter().map(&mut item).collect();
            let is_tree = items.iter().map(|_| graph && !all && rng.one_in(8)).collect();
            (items, is_tree)
        });
    }
}

#[test]
fn families_verify_drafts() {
    let Some(gpu) = gpu() else { return };
    for (kv_heads, group, head_dim, dtype, row_tokens) in [
        (2, 4, 128, Dtype::Bf16, 2_u32),
        (2, 4, 128, Dtype::F16, 4),
        (1, 8, 128, Dtype::F16, 2),
        (3, 1, 128, Dtype::Bf16, 8),
        (2, 3, 128, Dtype::Bf16, 5),
        (2, 4, 64, Dtype::Bf16, 2),
        (2, 3, 256, Dtype::F16, 5),
        // Rows with their own items instead of a suffix.
        (2, 4, 128, Dtype::Bf16, 8),
        (1, 8, 128, Dtype::F16, 8),
        (2, 4, 64, Dtype::F16, 8),
        (1, 8, 256, Dtype::Bf16, 6),
    ] {
        verify(&gpu, shape(kv_heads, group, head_dim, dtype), row_tokens);
    }
}

#[test]
fn families_verify_drafts_over_fp8() {
    let Some(gpu) = gpu() else { return };
    for (of, scaling, row_tokens) in [
        ((2, 4, 128, Dtype::Bf16), Scaling::ByToken, 2),
        ((2, 4, 128, Dtype::F16), Scaling::Static, 4),
        ((2, 3, 256, Dtype::F16), Scaling::ByToken, 5),
        // Rows with their own items instead of a suffix.
        ((2, 4, 128, Dtype::Bf16), Scaling::Static, 8),
        ((2, 4, 64, Dtype::F16), Scaling::ByToken, 8),
        ((1, 8, 256, Dtype::Bf16), Scaling::Static, 6),
    ] {
        verify(&gpu, over_fp8(of, scaling, 16), row_tokens);
    }
}
