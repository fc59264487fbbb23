//! Large pages: the store, and attention of one and of several new tokens, find slots beyond the first 256 of a page.

use kvarena::backend::cuda::Gpu;
use kvarena::layout::{Dtype, Layout, Scaling};
use kvarena::plan::StepEnd;
use kvarena::testkit::planner::Item;
use kvarena::{Attend, Backend, Capacity};

use crate::drive::{Drive, Shape};
use crate::gpu;

/// Stores sequences that end near a page's end, extends them, and decodes two tokens of each. Checks some outputs
/// of each step after the first.
fn run(gpu: &Gpu, shape: Shape, window: Option<u32>) {
    let mut drive = Drive::new(shape, u64::from(shape.page_size));
    let mut backend = shape.open(gpu, 2);
    let attend = Attend { window, ..shape.attend() };
    let ends = [2 * shape.page_size - 20, shape.page_size - 20, shape.page_size + 1];
    let ends = ends.map(|len| (drive.admit(), len));
    let grow = |more: u32| ends.map(|(sequence, _)| Item::Extend { sequence, len: more });
    let store = ends.map(|(sequence, len)| Item::Extend { sequence, len });
    for (step, items) in [store, grow(19), grow(1), grow(1)].into_iter().enumerate() {
        let plan = drive.planner.plan(&items);
        let plan = plan.plan();
        let inputs = drive.inputs(&items, &plan);
        backend.begin(&plan).expect("a valid plan");
        for (layer, rows) in inputs.iter().enumerate() {
            if step == 0 {
                rows.store(&mut backend, &plan, layer);
                backend.synchronize().expect("nothing failed");
                continue;
            }
            let (out, lse) = rows.run(&mut backend, &plan, layer, &attend);
            drive.check(&items, &plan, (layer, &rows.q), &attend, (&out, &lse), 20);
        }
        backend.end(StepEnd::Complete(plan.step()));
    }
}

#[test]
fn slots_of_large_pages_are_found() {
    let Some(gpu) = gpu() else { return };
    find_slots(&gpu, [None; 2]);
}

#[test]
fn slots_of_large_pages_of_fp8_are_found() {
    let Some(gpu) = gpu() else { return };
    find_slots(&gpu, [Some(Scaling::Static), Some(Scaling::ByToken)]);
}

fn find_slots(gpu: &Gpu, kinds: [Option<Scaling>; 2]) {
    let shapes = [
        (Dtype::Bf16, 64, 8),
        (Dtype::F16, 64, 9),
        (Dtype::Bf16, 128, 4),
        (Dtype::F16, 128, 1),
        (Dtype::Bf16, 128, 16),
        (Dtype::F16, 256, 2),
        (Dtype::Bf16, 256, 12),
        (Dtype::F32, 64, 2),
    ];
    // Each shape alternates between both kinds from one page size to the next.
    for (round, page_size) in [255, 256, 257, 341, 512, 1024].into_iter().enumerate() {
        for (i, (dtype, head_dim, group)) in shapes.into_iter().enumerate() {
            let (layout, fp8) = ([Layout::PageFirst, Layout::LayerFirst][i % 2], kinds[(i / 2 + round) % 2]);
            let (capacity, max_len, sequences) = (Capacity::Pages(9), 3 * page_size, 3);
            let pages = Shape { page_size, layout, capacity, sequences, max_len, ..Shape::SMALL };
            let shape = Shape { group, head_dim, dtype, fp8, ..pages };
            run(gpu, shape, (i % 3 == 1).then_some(page_size + 3));
        }
    }
}
