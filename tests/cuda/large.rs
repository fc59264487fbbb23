//! Pools past 4 GiB and past 100 GB: slots and pages are spread over the whole pool.

use kvarena::backend::cuda::Gpu;
use kvarena::layout::Layout;
use kvarena::plan::StepEnd;
use kvarena::testkit::planner::Item;
use kvarena::{Backend, Capacity};

use crate::drive::{Drive, Shape};
use crate::gpu;

fn run(gpu: &Gpu, layout: Layout, page_size: u32, bytes: u64, layers: u32) {
    let reserve = 4 << 30;
    let free = gpu.free_memory().expect("a driver");
    if free < bytes + reserve {
        println!("skipped: {free} bytes are free, {bytes} wanted");
        return;
    }
    let capacity = Capacity::Bytes(bytes);
    let shape =
        Shape { layers, kv_heads: 8, page_size, layout, capacity, sequences: 6, max_len: 5_000, ..Shape::SMALL };
    let mut drive = Drive::new(shape, u64::from(page_size));
    let mut backend = shape.open(gpu, 2);
    let mut highest = 0;
    for len in [700, 1, 300, 64] {
        let mut items = Vec::new();
        if len > 1 {
            items.push(Item::Extend { sequence: drive.admit(), len });
        } else {
            let all = drive.planner.live();
            items.extend(all.into_iter().map(|sequence| Item::Extend { sequence, len: 1 }));
        }
        let plan = drive.planner.plan(&items);
        let plan = plan.plan();
        let inputs = drive.inputs(&items, &plan);
        backend.begin(&plan).expect("a valid plan");
        for i in 0..plan.token_count() {
            highest = highest.max(plan.slot_mapping.get(i).expect("no padding").raw());
        }
        let attend = shape.attend();
        for (layer, rows) in inputs.iter().enumerate() {
            let (out, lse) = rows.run(&mut backend, &plan, layer, &attend);
            drive.check(&items, &plan, (layer, &rows.q), &attend, (&out, &lse), 200);
        }
        backend.end(StepEnd::Complete(plan.step()));
    }
    let slots = shape.pool().slot_count();
    assert!(highest > slots - slots / 8, "{highest} of {slots} is not near the end");
    println!("{layout:?}, page_size {page_size}: {} bytes", shape.pool().total_bytes());
}

#[test]
fn pools_past_four_gib_and_a_hundred_gb() {
    let Some(gpu) = gpu() else { return };
    for layout in [Layout::LayerFirst, Layout::PageFirst] {
        run(&gpu, layout, 1, 6 << 30, 1);
        run(&gpu, layout, 16, 9 << 30, 3);
        run(&gpu, layout, 16, 110_000_000_000, 2);
    }
}
