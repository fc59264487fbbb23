//! Measures stores, attention and page copies over the backend's own pool and over pools in memory of the host. The
//! forms take turns, so that all have the same clocks. Prints the ratio of each form's time to that of the own pool.

use std::sync::Arc;

use cust::sys;
use kvarena::backend::cuda::{Cuda, CudaError, CudaOptions, DeviceBuffer, DeviceRegion, GivenPool, Gpu};
use kvarena::backend::{OpenBackend, Rope};
use kvarena::config::StepBounds;
use kvarena::layout::{Layout, PoolLayout};
use kvarena::plan::{PageCopy, StepEnd};
use kvarena::testkit::rng::Rng;
use kvarena::{Attend, Backend, LayerId, PageId};

use crate::Outcome;
use crate::batch::{Batch, Forest, Noise, distinct, pool, table};
use crate::report::{Rate, Report};
use crate::timer::Timer;

/// Names of the forms; the first is the own pool.
const FORMS: [&str; 4] = ["own", "page-layer-plane", "nhd", "hnd"];
/// Number of measurements of each form and case, in turn.
const ROUNDS: usize = 5;
const PAGE_SIZE: u32 = 16;
/// Bytes of a row of K or V: 8 heads x 128 x bf16.
const ROW: u64 = 2048;
const HEADS: u32 = 32;

/// The cases of a run.
#[derive(Clone, Copy)]
pub struct Sizes {
    layers: u32,
    slots: u32,
    /// New tokens and all tokens of the rows of batches, each a name, the number of rows, and both numbers.
    batches: &'static [(&'static str, usize, (u32, u32))],
    /// Tokens of stores.
    stores: &'static [u32],
    /// Pages of a copy.
    copied: u32,
    /// Bytes of the rows that stores and attention read, and as many that they write.
    rows: u64,
    /// Microseconds of calls that are timed together.
    together: f64,
}

impl Sizes {
    /// 268 MB of K and V a layer and 2.1 GB a form, so that the L2 cache does not serve reads.
    pub const FULL: Self = Self {
        layers: 8,
        slots: 1 << 16,
        batches: &[
            ("decode b16 L4096", 16, (1, 4_096)),
            ("decode b64 L512", 64, (1, 512)),
            ("extend 4 x 1024 of 4096", 4, (1_024, 4_096)),
        ],
        stores: &[16, 256, 4_096],
        copied: 64,
        rows: 256 << 20,
        together: 10_000.0,
    };
    /// For the tests' driver, which interprets kernels.
    pub const SMALL: Self = Self {
        layers: 2,
        slots: 1 << 10,
        batches: &[("decode b3 L40", 3, (1, 40)), ("extend 2 x 20 of 40", 2, (20, 40))],
        stores: &[16],
        copied: 4,
        rows: 8 << 20,
        together: 0.0,
    };
}

/// Memory that a host allocated outside the device's memory pool, as the backend's own.
struct Allocation {
    gpu: Gpu,
    address: u64,
}

impl Allocation {
    fn region(gpu: &Gpu, bytes: u64) -> Outcome<DeviceRegion> {
        gpu.bind()?;
        let mut address = 0;
        // SAFETY: `address` is valid memory for one address; a context is bound.
        let result = unsafe { sys::cuMemAlloc_v2(&mut address, bytes as usize) };
        assert_eq!(result as u32, 0, "cuMemAlloc of {bytes} bytes");
        let owner = Arc::new(Self { gpu: gpu.clone(), address });
        // SAFETY: the owner keeps the memory allocated, and only the backend uses it.
        Ok(unsafe { DeviceRegion::from_raw(gpu, address, bytes, owner) }?)
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        // SAFETY: allocated once, freed once.
        let _ = self.gpu.bind().map(|()| unsafe { sys::cuMemFree_v2(self.address) });
    }
}

/// Returns the memory of a form; `None` for the own pool.
fn memory(gpu: &Gpu, layout: &PoolLayout, form: &str) -> Outcome<Option<GivenPool>> {
    let tensor = layout.total_bytes() / u64::from(2 * layout.layers());
    let tensors = || -> Outcome<Vec<_>> {
        let pair = |_| Ok([Allocation::region(gpu, tensor)?, Allocation::region(gpu, tensor)?]);
        (0..layout.layers()).map(pair).collect()
    };
    Ok(match form {
        "nhd" => Some(GivenPool::nhd(layout, tensors()?)),
        "hnd" => Some(GivenPool::hnd(layout, tensors()?)),
        "page-layer-plane" => {
            let region = Allocation::region(gpu, layout.total_bytes())?;
            Some(GivenPool::page_layer_plane(layout, region))
        }
        _ => None,
    })
}

/// All forms, with a stream and rows for all of them.
struct Bench {
    sizes: Sizes,
    timer: Timer,
    forms: Vec<Cuda>,
    rows: DeviceBuffer,
    out: DeviceBuffer,
    rng: Rng,
    step: u64,
}

/// Work on a layer of a backend, with rows to read and to write.
type Work<'a> = &'a dyn Fn(&mut Cuda, LayerId, &DeviceBuffer, &mut DeviceBuffer) -> Result<(), CudaError>;

impl Bench {
    fn new(gpu: &Gpu, sizes: Sizes) -> Outcome<Self> {
        let (noise, mut timer) = (Noise::new(gpu)?, Timer::new(gpu)?);
        timer.together = sizes.together;
        let layout = pool(sizes.layers, PAGE_SIZE, sizes.slots, Layout::LayerFirst).layout()?;
        let bounds = StepBounds { steps: 2, tokens: sizes.slots };
        let open = |form| -> Outcome<Cuda> {
            let options = CudaOptions { pool: memory(gpu, &layout, form)?, ..timer.options(gpu) };
            Ok(options.open(&layout, &table(PAGE_SIZE), bounds)?)
        };
        let forms = FORMS.into_iter().map(open).collect::<Outcome<_>>()?;
        let (rows, out) = (noise.buffer(gpu, sizes.rows)?, noise.buffer(gpu, sizes.rows)?);
        Ok(Self { sizes, timer, forms, rows, out, rng: Rng::new(6), step: 0 })
    }

    /// Stores random rows in all slots of all layers, equally in all forms.
    fn fill(&mut self) -> Outcome<()> {
        let slots: Vec<u32> = (0..self.sizes.slots).collect();
        self.step += 1;
        let batch = Batch::stores(self.step, &slots);
        for cuda in &mut self.forms {
            cuda.begin(&batch.plan())?;
            for layer in 0..u64::from(self.sizes.layers) {
                // Other rows for each layer and for V.
                let [k, v] = [0, 1].map(|side| self.rows.rows((2 * layer + side) * 3 * ROW, None));
                cuda.store_cache(&batch.plan(), LayerId::new(layer as u32), k, v)?;
            }
            cuda.end(StepEnd::Complete(batch.plan().step()));
        }
        Ok(())
    }

    /// Measures a case in all forms in turn, and prints times and ratios. The last layer's output of each form equals
    /// that of the own pool, byte by byte, in `compared` bytes.
    fn case(&mut self, name: &str, batch: &Batch, work: Work<'_>, compared: usize, report: &mut Report) -> Outcome<()> {
        let mut times = vec![Vec::new(); self.forms.len()];
        let mut outputs = Vec::new();
        for round in 0..ROUNDS {
            for (form, cuda) in self.forms.iter_mut().enumerate() {
                if round == 0 {
                    cuda.begin(&batch.plan())?;
                }
                let (rows, out) = (&self.rows, &mut self.out);
                let us =
                    self.timer.graph(self.sizes.layers as usize, |i| work(cuda, LayerId::new(i as u32), rows, out))?;
                times[form].push(us);
                if round == 0 {
                    outputs.push(self.out.read::<u8>(0, compared)?);
                }
            }
        }
        for (form, cuda) in self.forms.iter_mut().enumerate() {
            cuda.end(StepEnd::Complete(batch.plan().step()));
            let mut ratios: Vec<f64> = times[form].iter().zip(&times[0]).map(|(given, own)| given / own).collect();
            ratios.sort_by(f64::total_cmp);
            let mut all = times[form].clone();
            all.sort_by(f64::total_cmp);
            report.row("given", name, FORMS[form], all[ROUNDS / 2], Rate::None, outputs[form] == outputs[0]);
            println!("       ratio {:.4} ({:.4} to {:.4})", ratios[ROUNDS / 2], ratios[0], ratios[ROUNDS - 1]);
        }
        Ok(())
    }

    fn attend(&mut self, name: &str, rows: usize, (new, all): (u32, u32), report: &mut Report) -> Outcome<()> {
        self.step += 1;
        let (forest, new) = (Forest::alone(vec![all; rows]), vec![new; rows]);
        let layout = *self.forms[0].layout();
        let batch = Batch::forest(self.step, &layout, &table(PAGE_SIZE), &forest, &new, &mut self.rng);
        let compared = batch.slots.len() * (HEADS * 256) as usize;
        let attend = Attend::new(HEADS, 128);
        let work: Work<'_> = &|cuda, layer, q, out| {
            cuda.attend(&batch.plan(), layer, &attend, q.rows(0, None), out.rows_mut(0, None), None)
        };
        self.case(name, &batch, work, compared, report)
    }

    fn store(&mut self, tokens: u32, report: &mut Report) -> Outcome<()> {
        let frequencies = DeviceBuffer::of(self.forms[0].gpu(), &[0.01_f32; 64])?;
        for (name, rotates) in [("store", false), ("rope_store", true)] {
            self.step += 1;
            let batch = Batch::stores(self.step, &distinct(&mut self.rng, tokens as usize, self.sizes.slots));
            let work: Work<'_> = &|cuda, layer, rows, qkv| {
                let at = u64::from(layer.raw()) * u64::from(tokens) * ROW;
                if rotates {
                    let (frequencies, eps) = (frequencies.rows(0, None), 1e-6);
                    let rope = Rope { q_heads: HEADS, eps, q_norm: None, k_norm: None, frequencies };
                    return cuda.rope_store(&batch.plan(), layer, &rope, qkv.rows_mut(0, None));
                }
                cuda.store_cache(&batch.plan(), layer, rows.rows(at, None), rows.rows(at + rows.bytes() / 2, None))
            };
            self.case(&format!("{name} T{tokens}"), &batch, work, 0, report)?;
        }
        Ok(())
    }

    /// Copies pages to others of the same pool.
    fn copy(&mut self, report: &mut Report) -> Outcome<()> {
        self.step += 1;
        let batch = Batch::stores(self.step, &[0]);
        let pages = distinct(&mut self.rng, 2 * self.sizes.copied as usize, self.sizes.slots / PAGE_SIZE);
        let pair = |i: usize| PageCopy { source: PageId::new(pages[2 * i]), target: PageId::new(pages[2 * i + 1]) };
        let copies: Vec<_> = (0..self.sizes.copied as usize).map(pair).collect();
        let work: Work<'_> = &|cuda, _, _, _| cuda.copy_pages(&copies);
        self.case(&format!("copy of {} pages", copies.len()), &batch, work, 0, report)
    }
}

pub fn run(gpu: &Gpu, sizes: Sizes, report: &mut Report) -> Outcome<()> {
    let mut bench = Bench::new(gpu, sizes)?;
    bench.fill()?;
    for &(name, rows, lens) in sizes.batches {
        bench.attend(name, rows, lens, report)?;
    }
    for &tokens in sizes.stores {
        bench.store(tokens, report)?;
    }
    bench.copy(report)
}
