//! Measures store_cache and page copies.

use kvarena::backend::OpenBackend;
use kvarena::backend::cuda::{Cuda, Gpu};
use kvarena::config::StepBounds;
use kvarena::layout::{Layout, PlaneName};
use kvarena::plan::{PageCopy, StepEnd};
use kvarena::testkit::rng::Rng;
use kvarena::{Backend, LayerId, PageId};

use crate::Outcome;
use crate::batch::{Batch, Noise, distinct, pool, table};
use crate::report::{Rate, Report};
use crate::timer::Timer;

/// Bytes of a row of K or V: 8 heads x 128 x bf16.
const ROW: u64 = 2048;

pub fn store(gpu: &Gpu, report: &mut Report) -> Outcome<()> {
    let noise = Noise::new(gpu)?;
    for (counts, slots, layers) in
        // 4 GiB of slots in all layers together, as the baselines have in one layer.
        [(&[1_u32, 16, 256][..], 1 << 14, 64), (&[4_096][..], 116_496, 9), (&[16_384, 65_536][..], 349_520, 3)]
    {
        for (layout, page_size) in [(Layout::LayerFirst, 1), (Layout::PageFirst, 1), (Layout::PageFirst, 16)] {
            let mut timer = Timer::new(gpu)?;
            let mut rng = Rng::new(3);
            let bounds = StepBounds { steps: 2, tokens: 65_536 };
            let layout = pool(layers, page_size, slots, layout).layout()?;
            let mut cuda = timer.options(gpu).open(&layout, &table(page_size), bounds)?;
            for (step, &tokens) in counts.iter().enumerate() {
                let bytes = f64::from(tokens) * 8196.0;
                let sets = ((300e6 / bytes).ceil() as usize).clamp(3, layers as usize);
                let batch = Batch::stores(step as u64 + 1, &distinct(&mut rng, tokens as usize, slots));
                cuda.begin(&batch.plan())?;
                let set_bytes = u64::from(tokens) * ROW;
                let k = noise.buffer(gpu, set_bytes * sets as u64)?;
                let v = noise.buffer(gpu, set_bytes * sets as u64)?;
                let us = timer.graph(sets, |i| {
                    let layer = LayerId::new(i as u32);
                    let at = i as u64 * set_bytes;
                    cuda.store_cache(&batch.plan(), layer, k.rows(at, None), v.rows(at, None))
                })?;
                cuda.end(StepEnd::Complete(batch.plan().step()));
                let ok = stored(&cuda, &batch, sets as u32 - 1, set_bytes, &noise)?;
                let case = format!("T{tokens} page{page_size} {:?}", layout.layout());
                report.row("store", &case, "kvarena", us, Rate::Bytes(bytes), ok);
            }
        }
    }
    Ok(())
}

/// Returns whether some slots of the last set's layer contain their rows.
fn stored(cuda: &Cuda, batch: &Batch, layer: u32, bytes: u64, noise: &Noise) -> Outcome<bool> {
    let (layout, memory) = (cuda.layout(), cuda.pool());
    let tokens = batch.slots.len();
    for token in [0, tokens / 2, tokens - 1] {
        for plane in [PlaneName::K, PlaneName::V] {
            let slot = kvarena::SlotId::new(batch.slots[token] as u64);
            let at = layout.row(plane, LayerId::new(layer), slot).expect("the pool has it").start;
            let row: Vec<half::bf16> = memory.read(at, ROW as usize / 2)?;
            let first = (u64::from(layer) * bytes + token as u64 * ROW) / 2;
            if !row.iter().zip(first..).all(|(x, i)| x.to_f32() == noise.at(i)) {
                return Ok(false);
            }
        }
    }
    Ok(true)
}

pub fn copy(gpu: &Gpu, report: &mut Report) -> Outcome<()> {
    let noise = Noise::new(gpu)?;
    for page_size in [1, 16, 64] {
        let mut timer = Timer::new(gpu)?;
        let stream = timer.stream.clone();
        let mut rng = Rng::new(4);
        let pages = 1_024;
        let open = |layout| -> Outcome<Cuda> {
            let bounds = StepBounds { steps: 2, tokens: 16 };
            let layout = pool(36, page_size, pages * page_size, layout).layout()?;
            let cuda = timer.options(gpu).open(&layout, &table(page_size), bounds)?;
            noise.fill(cuda.pool())?;
            Ok(cuda)
        };
        let (mut layers, mut whole) = (open(Layout::LayerFirst)?, open(Layout::PageFirst)?);
        let mut pairs = || -> Vec<PageCopy> {
            let (from, to) = (distinct(&mut rng, 256, pages), distinct(&mut rng, 256, pages));
            let pair = |(source, target)| PageCopy { source: PageId::new(source), target: PageId::new(target) };
            from.into_iter().zip(to).map(pair).collect()
        };
        let shape = *whole.layout();
        let bytes = 256.0 * shape.page_bytes() as f64;
        let case = |what: &str| format!("{what} page{page_size}");
        let sets: Vec<_> = (0..3).map(|_| pairs()).collect();
        let us = timer.graph(3, |i| layers.copy_to_pool(&mut whole, &sets[i], &stream).map(drop))?;
        let ok = same(&layers, &whole, &sets[2])?;
        let both = Rate::Bytes(2.0 * bytes);
        report.row("copy", &case("LayerFirst to PageFirst"), "kvarena", us, both, ok);
        let us = timer.graph(3, |i| whole.copy_to_pool(&mut layers, &sets[i], &stream).map(drop))?;
        let ok = same(&whole, &layers, &sets[2])?;
        report.row("copy", &case("PageFirst to LayerFirst"), "kvarena", us, both, ok);
    }
    Ok(())
}

/// Returns a page's bytes, piece by piece.
fn page(cuda: &Cuda, id: PageId) -> Outcome<Vec<u8>> {
    let (layout, memory) = (cuda.layout(), cuda.pool());
    let mut bytes = Vec::new();
    for piece in 0..layout.pieces_per_page() {
        let range = layout.piece(id, piece);
        bytes.extend(memory.read::<u8>(range.start, (range.end - range.start) as usize)?);
    }
    Ok(bytes)
}

fn same(source: &Cuda, target: &Cuda, copies: &[PageCopy]) -> Outcome<bool> {
    let mut same = true;
    for copy in [copies[0], copies[255]] {
        same &= page(source, copy.source)? == page(target, copy.target)?;
    }
    Ok(same)
}
