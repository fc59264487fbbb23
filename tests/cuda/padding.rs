//! Padding rows of any length, without a row of the page tables, together with rows and trees of drafts.

use kvarena::Backend;
use kvarena::backend::cuda::Gpu;
use kvarena::layout::{Dtype, Scaling};
use kvarena::plan::StepEnd;
use kvarena::testkit::planner::Item;

use crate::drive::{Drive, Shape};
use crate::gpu;

/// Lengths around the 64 masks of a tree, a query tile, and several tiles.
const PADDING: [u32; 11] = [1, 2, 63, 64, 65, 100, 127, 128, 129, 256, 300];

fn run(gpu: &Gpu, dtype: Dtype, head_dim: u32, fp8: Option<Scaling>, group: u32) {
    let shape = Shape { group, head_dim, dtype, fp8, max_len: 500, ..Shape::SMALL };
    let mut drive = Drive::new(shape, 12);
    let mut backend = shape.open(gpu, 2);
    let (tree, row) = (drive.admit(), drive.admit());
    for (turn, &len) in PADDING.iter().enumerate() {
        let padding = Item::Padding { len };
        let sequences =
            [(tree, [9, 30][turn % 2]), (row, [1, 21][turn % 2])].map(|(sequence, len)| Item::Extend { sequence, len });
        // The padding precedes, separates or follows the rows.
        let mut items = sequences.to_vec();
        items.insert(turn % 3, padding);
        let is_tree: Vec<_> = items
            .iter()
            .map(|item| turn % 4 < 3 && matches!(item, Item::Extend { sequence, .. } if *sequence == tree))
            .collect();
        let plan = drive.planner.plan_trees(&items, &is_tree);
        let plan = plan.plan();
        let inputs = drive.inputs(&items, &plan).remove(0);
        backend.begin(&plan).expect("a valid plan");
        let (out, lse) = inputs.run(&mut backend, &plan, 0, &shape.attend());
        println!("{dtype:?}, {fp8:?}, head_dim {head_dim}: {len} tokens of padding");
        drive.check(&items, &plan, (0, &inputs.q), &shape.attend(), (&out, &lse), 20);
        backend.end(StepEnd::Complete(plan.step()));
    }
}

#[test]
fn padding_of_any_length_is_padding() {
    let Some(gpu) = gpu() else { return };
    for head_dim in [64, 128, 256] {
        for fp8 in [None, Some(Scaling::Static), Some(Scaling::ByToken)] {
            run(&gpu, Dtype::Bf16, head_dim, fp8, 4);
            run(&gpu, Dtype::F16, head_dim, fp8, 1);
        }
    }
    run(&gpu, Dtype::F32, 64, None, 2);
}
