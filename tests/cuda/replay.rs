//! Compares the engine over the GPU with the naive model after every op: tables, plans, pages, and cached K and V.

use std::cell::RefCell;
use std::convert::identity;
use std::thread::yield_now;

use half::{bf16, f16};
use kvarena::backend::cuda::{CudaError, DeviceBuffer};
use kvarena::backend::{Moved, OpenBackend, SwapMemory};
use kvarena::config::{EngineShape, StepBounds};
use kvarena::id::SwapPageId;
use kvarena::layout::{PlaneName, PoolLayout, Reach, Scaling, TableShape};
use kvarena::testkit::contract::{StateTestBackend, bytes};
use kvarena::testkit::op::SmallConfig;
use kvarena::testkit::quantised::value;
use kvarena::testkit::replay::{Inspect, Summary, replay_on};
use kvarena::testkit::workload::{Family, Workload};
use kvarena::{Backend, BatchPlan, KvDtype, LayerId, SlotId, forward_backend};

use crate::on_gpu::{OnGpu, OnGpuOptions, read_device, write_device};
use crate::{gpu, seeds};

/// A backend whose page tables and pool the replay reads after every op.
struct Watched {
    gpu: OnGpu,
    words: Vec<u32>,
    /// The pool's bytes, until a call may have changed them.
    pool: RefCell<Option<Vec<u8>>>,
    moved: Moved,
}

impl Watched {
    /// Returns the layout of the pool for the layers of a layer's group.
    fn layout_of(&self, layer: LayerId) -> PoolLayout {
        let layout = self.gpu.cuda.layout();
        layout.of_group(layout.place(layer).group)
    }

    /// Returns the address of the state that a row of a plan reads (part 0) or writes (1).
    fn state(&mut self, plan: &BatchPlan<'_>, layer: LayerId, (part, row): (usize, usize)) -> u64 {
        let page = self.gpu.slots(plan, layer)[part][row];
        let slots = self.gpu.cuda.slots(plan, layer).expect("a layer that keeps a state");
        slots.states + slots.stride * u64::try_from(page).expect("the row is not padding")
    }

    /// Returns the backend for a call that changes the pool.
    fn written(&mut self) -> &mut OnGpu {
        self.pool.take();
        &mut self.gpu
    }
}

/// Options of a [`Watched`].
struct WatchedOptions(OnGpuOptions);

impl OpenBackend for WatchedOptions {
    type Backend = Watched;

    fn open(
        self,
        layout: &PoolLayout,
        table: &TableShape,
        bounds: impl Into<StepBounds>,
    ) -> Result<Watched, CudaError> {
        let mut gpu = self.0.open(layout, table, bounds)?;
        // The model has all swap pages from the start; a thread pins them.
        while gpu.swap_pages() < layout.swap_region_pages() {
            gpu.moved()?;
            yield_now();
        }
        Ok(Watched { words: gpu.cuda.table_words()?, gpu, pool: RefCell::default(), moved: Moved::default() })
    }
}

impl Backend for Watched {
    type Error = CudaError;
    forward_backend!(gpu: OnGpu, identity; types, end, attend, swap_pages, save_pages, synchronize);
    forward_backend!((written()): OnGpu, identity; store_cache, rope_store, copy_pages, compact, load_pages);

    fn begin(&mut self, plan: &BatchPlan<'_>) -> Result<(), CudaError> {
        self.gpu.begin(plan)?;
        self.words = self.gpu.cuda.table_words()?;
        Ok(())
    }

    fn moved(&mut self) -> Result<Moved, CudaError> {
        self.moved = self.gpu.moved()?;
        Ok(self.moved)
    }
}

impl Inspect for Watched {
    fn store(&mut self, plan: &BatchPlan<'_>, layer: LayerId, k: &[f32], v: &[f32]) -> Result<(), CudaError> {
        let dtype = self.layout_of(layer).dtype();
        let [k, v] = [k, v].map(|rows| DeviceBuffer::of(self.gpu.cuda.gpu(), &bytes(dtype.rows(), rows)));
        let (k, v) = (k?, v?);
        self.store_cache(plan, layer, k.rows(0, None), v.rows(0, None))
    }

    fn load(&self, plane: PlaneName, layer: LayerId, slot: SlotId) -> Option<Vec<f32>> {
        let layout = &self.layout_of(layer);
        let memory = self.gpu.cuda.pool();
        let mut pool = self.pool.borrow_mut();
        let bytes = pool.get_or_insert_with(|| memory.read(0, memory.bytes() as usize).expect("bytes"));
        if layout.dtype().is_quantised() {
            return Some(quantised(layout, bytes, plane, layer, slot));
        }
        let row = layout.row(plane, layer, slot)?;
        let row = &bytes[row.start as usize..row.end as usize];
        Some(match layout.dtype() {
            KvDtype::F32 => row.chunks_exact(4).map(bytemuck::pod_read_unaligned).collect(),
            KvDtype::F16 => row.chunks_exact(2).map(|x| bytemuck::pod_read_unaligned::<f16>(x).into()).collect(),
            KvDtype::Bf16 => row.chunks_exact(2).map(|x| bytemuck::pod_read_unaligned::<bf16>(x).into()).collect(),
            other => panic!("{other:?}"),
        })
    }

    fn read_state(&mut self, plan: &BatchPlan<'_>, layer: LayerId, row: usize) -> Option<Vec<u8>> {
        let address = self.state(plan, layer, (0, row));
        let bytes = self.gpu.cuda.layout().state()?.lane_bytes;
        Some(read_device(self.gpu.cuda.gpu(), address, bytes as usize))
    }

    fn write_state(&mut self, plan: &BatchPlan<'_>, layer: LayerId, row: usize, bytes: &[u8]) {
        let address = self.state(plan, layer, (1, row));
        write_device(self.written().cuda.gpu(), address, bytes);
    }

    fn words(&self) -> Option<&[u32]> {
        Some(&self.words)
    }

    fn last_moved(&mut self) -> Moved {
        self.moved
    }

    fn read_swap(&mut self, page: SwapPageId) -> Option<Vec<u8>> {
        Some(self.gpu.cuda.lease(page).as_ref().to_vec())
    }

    fn write_swap(&mut self, page: SwapPageId, bytes: &[u8]) {
        self.gpu.cuda.lease_mut(page).as_mut().copy_from_slice(bytes);
    }
}

/// Returns the numbers of a slot in a plane of fp8, or the slot's scales; static scales are 1.
fn quantised(layout: &PoolLayout, bytes: &[u8], plane: PlaneName, layer: LayerId, slot: SlotId) -> Vec<f32> {
    let (page, offset) = layout.page_of(slot);
    let lane = layout.place(layer).lane;
    let at = |plane, head: u32| {
        let strides = layout.strides(plane).expect("the pool has it");
        (strides.row(lane, page, offset) + strides.head * u64::from(head)) as usize
    };
    let scale = |plane, head| -> f32 {
        let at = at(plane, head);
        bytemuck::pod_read_unaligned(&bytes[at..at + 4])
    };
    let heads = 0..layout.kv_heads();
    let scales = match plane {
        PlaneName::KScales | PlaneName::VScales => {
            return heads.map(|head| scale(plane, head)).collect();
        }
        PlaneName::K => PlaneName::KScales,
        _ => PlaneName::VScales,
    };
    let made = layout.scaling() == Some(Scaling::ByToken);
    let head = |head| {
        let (at, factor) = (at(plane, head), if made { scale(scales, head) } else { 1.0 });
        let row = &bytes[at..at + layout.head_dim() as usize];
        row.iter().map(move |&byte| (value(byte) * f64::from(factor)) as f32)
    };
    heads.flat_map(head).collect()
}

/// Returns whether no group has latent rows, and the groups' chunk sizes are multiples of the tokens of a page table
/// leaf.
fn has_served_groups(config: &SmallConfig) -> bool {
    let EngineShape { layout, table, .. } = config.engine().shape().expect("a small engine");
    let leaf_tokens = table.leaf_pages * layout.page_size();
    let is_served = |(_, reach)| match reach {
        Reach::Chunk(size) => size % leaf_tokens == 0,
        _ => true,
    };
    layout.groups().limited().all(is_served) && !layout.views().any(|view| view.is_latent())
}

#[test]
fn the_engine_over_the_gpu_is_the_model() {
    let Some(gpu) = gpu() else { return };
    let mut summary = Summary::default();
    for seed in seeds(300) {
        let mut workload = Workload::new(Family::Any, seed);
        // `kv_heads` 0 stands for latent rows of 3 and 2 numbers; no kernel serves such short rows. The backend rejects
        // groups whose chunks do not begin at page table leaves.
        let drawn = workload.config();
        let config = SmallConfig { kv_heads: drawn.kv_heads.max(1), ..drawn };
        let groups = if has_served_groups(&config) { config.groups } else { 0 };
        let config = SmallConfig { groups, ..config };
        match replay_on(&config, WatchedOptions(OnGpuOptions::new(&gpu)), &workload.take_ops(200)) {
            Ok(more) => summary.add(&more),
            Err(mismatch) => panic!("seed {seed}: {mismatch}"),
        }
    }
    println!("{summary:?}");
}
