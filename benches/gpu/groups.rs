//! Measures decode attention of a model's layers, in one group and in groups: full layers, and layers with a window.

use kvarena::backend::OpenBackend;
use kvarena::backend::cuda::{Cuda, DeviceBuffer, Gpu};
use kvarena::layout::{Groups, Reach, TableShape};
use kvarena::plan::OwnedPlan;
use kvarena::testkit::planner::{Item, Planner};
use kvarena::{Attend, Backend, Capacity, KvDtype, KvShape, LayerId, PoolConfig};

use crate::Outcome;
use crate::batch::Noise;
use crate::report::{Rate, Report};
use crate::timer::Timer;

/// Number of turns. Each turn measures both groupings.
const TURNS: usize = 5;
const PAGE_SIZE: u32 = 16;

/// A model whose layers read all tokens, or a window.
struct Model {
    name: &'static str,
    full: u32,
    windowed: u32,
    window: u32,
    q_heads: u32,
    kv_heads: u32,
    head_dim: u32,
}

/// Returns gpt-oss-20b, and Gemma 3 27B with a fifth of its layers.
fn models() -> [Model; 2] {
    [
        Model { name: "gpt-oss-20b", full: 12, windowed: 12, window: 128, q_heads: 64, kv_heads: 8, head_dim: 64 },
        Model {
            name: "gemma-3-27b / 5",
            full: 2,
            windowed: 10,
            window: 1024,
            q_heads: 32,
            kv_heads: 16,
            head_dim: 128,
        },
    ]
}

impl Model {
    fn attend(&self, layer: u32) -> Attend {
        let window = (layer >= self.full).then_some(self.window);
        Attend { window, ..Attend::new(self.q_heads, self.head_dim) }
    }

    /// Returns both groupings: one group, in which every layer keeps all tokens, and two groups, one of them for the
    /// layers with a window.
    fn groupings(&self) -> Outcome<Vec<(&'static str, Groups)>> {
        let layers: Vec<u8> = (0..self.full + self.windowed).map(|layer| u8::from(layer >= self.full)).collect();
        let groups = Groups::new(&[Reach::All, Reach::Window(self.window)], &layers)?;
        Ok(vec![("one group", Groups::ONE), ("groups", groups)])
    }
}

/// A backend with a step of rows of one new token.
struct Setup {
    name: &'static str,
    cuda: Cuda,
    plan: OwnedPlan,
    q: DeviceBuffer,
    out: DeviceBuffer,
}

impl Setup {
    fn new(
        gpu: &Gpu,
        (noise, timer): (&Noise, &Timer),
        model: &Model,
        (name, groups): (&'static str, Groups),
        (rows, len): (u32, u32),
    ) -> Outcome<Self> {
        let config = PoolConfig {
            layers: model.full + model.windowed,
            groups,
            shape: KvShape::heads(model.kv_heads, model.head_dim),
            dtype: KvDtype::Bf16,
            page_size: PAGE_SIZE,
            ..PoolConfig::default()
        };
        let places = rows * (len.div_ceil(PAGE_SIZE) + 1);
        let pages = places * config.layout()?.tracks();
        let layout = PoolConfig { capacity: Capacity::Pages(pages), ..config }.layout()?;
        let table = TableShape::of(&layout, rows, len + PAGE_SIZE, (rows * 2 * len).into())?;
        let mut cuda = timer.options(gpu).open(&layout, &table, 2)?;
        noise.fill(cuda.pool())?;
        let mut planner = Planner::new(&layout, &table, 3);
        for _ in 0..rows {
            let sequence = planner.admit().ok_or("all rows are in use")?;
            planner.grow(sequence, len - 1);
            planner.release_unread(sequence, len - 1);
        }
        let items: Vec<_> = planner.live().into_iter().map(|sequence| Item::Extend { sequence, len: 1 }).collect();
        let plan = planner.plan(&items);
        cuda.begin(&plan.plan())?;
        let bytes = u64::from(rows * model.q_heads * model.head_dim) * 2;
        let (q, out) = (noise.buffer(gpu, bytes)?, DeviceBuffer::new(gpu, bytes)?);
        Ok(Self { name, cuda, plan, q, out })
    }

    /// Returns the microseconds of one layer's attention. The layers run in turn.
    fn time(&mut self, timer: &mut Timer, model: &Model, layers: std::ops::Range<u32>) -> Outcome<f64> {
        let Self { cuda, plan, q, out, .. } = self;
        let plan = plan.plan();
        timer.graph(layers.len(), |i| {
            let layer = layers.start + i as u32;
            let (q, out) = (q.rows(0, None), out.rows_mut(0, None));
            cuda.attend(&plan, LayerId::new(layer), &model.attend(layer), q, out, None)
        })
    }
}

pub fn run(gpu: &Gpu, report: &mut Report) -> Outcome<()> {
    let (noise, mut timer) = (Noise::new(gpu)?, Timer::new(gpu)?);
    for (model, rows, len) in
        models().iter().flat_map(|model| [(model, 64, 4096), (model, 256, 1024), (model, 8, 8192)])
    {
        let mut setups = Vec::new();
        for grouping in model.groupings()? {
            setups.push(Setup::new(gpu, (&noise, &timer), model, grouping, (rows, len))?);
        }
        for (kind, layers) in [("full", 0..model.full), ("window", model.full..model.full + model.windowed)] {
            let mut times = vec![Vec::new(); setups.len()];
            for _ in 0..TURNS {
                for (setup, times) in setups.iter_mut().zip(&mut times) {
                    times.push(setup.time(&mut timer, model, layers.clone())?);
                }
            }
            for (setup, mut times) in setups.iter().zip(times) {
                times.sort_by(f64::total_cmp);
                let case = format!("{} {kind} {rows} x {len}", model.name);
                report.row("groups", &case, setup.name, times[TURNS / 2], Rate::None, true);
            }
        }
    }
    Ok(())
}
