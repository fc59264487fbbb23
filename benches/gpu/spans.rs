//! Measures how well the split chooses between separate reads and spans read once, and the accuracy of its cost model.
//!
//! The bench fits the cost model's constants to simple shapes and to random forests. A forest is a batch of rows with
//! shared spans, which may be nested. Each forest is timed in three variants: each row read separately, spans as the
//! split chooses, and every span read once. The results of the last two are compared with those of separate reads. The
//! bench prints how far the choice is from the faster of the other two variants, and the model from the measured times.
//! It writes all times to `$OUT/spans-dN.csv`, where N is the first head_dim, or to `$OUT/spans-fp8-dN.csv` for pools
//! of fp8 with static scales.

use std::fmt::Write;
use std::ops::Range;

use half::bf16;
use kvarena::backend::OpenBackend;
use kvarena::backend::cuda::{Cuda, CudaOptions, DeviceBuffer, Gpu, Prepare, SpanCosts, SpanWork};
use kvarena::layout::Layout;
use kvarena::plan::{SharedSpans, StepEnd};
use kvarena::testkit::quantised::scales;
use kvarena::testkit::rng::Rng;
use kvarena::{Attend, Backend, BatchPlan, KvDtype, KvShape, LayerId, PoolConfig, StepId};

use crate::Outcome;
use crate::batch::{Batch, Forest, Noise, pool, table};
use crate::fp8_noise::Fp8Noise;
use crate::report::{Distance, Rate, Report};
use crate::timer::Timer;

const PAGE: u32 = 16;
const LAYERS: u32 = 8;
/// Maximum tokens of the rows of a batch, with shared tokens counted for each row, so that the page tables have room.
const SEEN_MAX: u64 = 4_300_000;

/// Query heads, kv heads, head_dim.
pub type Heads = (u32, u32, u32);
pub const HEADS_128: [Heads; 2] = [(32, 8, 128), (64, 4, 128)];
pub const OTHER_HEADS: [Heads; 2] = [(32, 8, 64), (32, 8, 256)];

/// Sizes of forests.
#[derive(Clone, Copy)]
pub struct Sizes {
    /// Random forests for each number of heads.
    forests: usize,
    rows: u32,
    /// Maximum tokens of a span.
    shared: u32,
    /// Maximum tokens of a row outside spans.
    own: u32,
    /// Slots of a layer.
    slots: u32,
    /// Microseconds of calls that are timed together.
    together: f64,
}

impl Sizes {
    pub const FULL: Self =
        Self { forests: 200, rows: 256, shared: 16_384, own: 1_024, slots: 131_072, together: 1_000.0 };
    /// Fewer forests, for more head_dims.
    pub const FEWER: Self = Self { forests: 60, ..Self::FULL };
    /// A small form of the section, for a driver that runs kernels on the CPU without a clock.
    pub const SMALL: Self = Self { forests: 3, rows: 8, shared: 256, own: 32, slots: 4_096, together: 0.0 };
}

/// Variant of reads.
#[derive(Clone, Copy, PartialEq, Eq)]
enum How {
    Flat,
    Chosen,
    Once,
}

/// Microseconds of a forest, and its work.
struct Timed {
    flat: f64,
    chosen: f64,
    once: f64,
    /// Whether the split chose to read a span once.
    accepted: bool,
    /// Work with every span read once; zeros if no span can be read once.
    work: SpanWork,
}

impl Timed {
    fn better(&self) -> f64 {
        self.flat.min(self.once)
    }
}

/// Two backends over pools of the same numbers: one chooses spans, one reads every span once.
struct Bench {
    timer: Timer,
    choosing: Cuda,
    all: Cuda,
    q: DeviceBuffer,
    out: DeviceBuffer,
    q_heads: u32,
    step: u64,
    rng: Rng,
}

impl Bench {
    /// Creates the bench, over pools of fp8 if `fp8` is given.
    fn new(gpu: &Gpu, (noise, fp8): (&Noise, Option<&Fp8Noise>), heads: &Heads, sizes: &Sizes) -> Outcome<Self> {
        let &(q_heads, kv_heads, head_dim) = heads;
        let mut timer = Timer::new(gpu)?;
        timer.together = sizes.together;
        let open = |all_spans| -> Outcome<Cuda> {
            let scales = fp8.map(|_| scales(LAYERS, kv_heads, 1));
            let options = CudaOptions { all_spans, scales, ..timer.options(gpu) };
            let config = PoolConfig {
                shape: KvShape::heads(kv_heads, head_dim),
                dtype: if fp8.is_some() { KvDtype::Fp8E4M3 } else { KvDtype::Bf16 },
                ..pool(LAYERS, PAGE, sizes.slots, Layout::LayerFirst)
            };
            let mut cuda = options.open(&config.layout()?, &table(PAGE), 2)?;
            match fp8 {
                Some(fp8) => fp8.fill(&cuda, noise)?,
                None => noise.fill(cuda.pool())?,
            }
            cuda.prepare(&Prepare::new(&[Attend::new(q_heads, head_dim)]))?;
            Ok(cuda)
        };
        let (choosing, all) = (open(false)?, open(true)?);
        let bytes = u64::from(LAYERS * sizes.rows * q_heads * head_dim) * 2;
        let (q, out) = (noise.buffer(gpu, bytes)?, DeviceBuffer::new(gpu, bytes)?);
        Ok(Self { timer, choosing, all, q, out, q_heads, step: 0, rng: Rng::new(5) })
    }

    /// Returns the bytes of K and V of a token in a layer.
    fn token_bytes(&self) -> f64 {
        let layout = self.choosing.layout();
        f64::from(2 * layout.kv_heads() * layout.head_dim()) * layout.dtype().size() as f64
    }

    /// Times each variant of a forest. Adds a variant to `report` if its results differ from those of separate reads by
    /// more than rounding.
    fn run(&mut self, case: &str, forest: &Forest, report: &mut Report) -> Outcome<Timed> {
        let layout = *self.choosing.layout();
        let new_lens = vec![1; forest.own.len()];
        let batch = Batch::forest(0, &layout, &table(PAGE), forest, &new_lens, &mut self.rng);
        let bytes = forest.tokens() as f64 * self.token_bytes();
        let sets = ((400e6 / bytes).ceil() as usize).clamp(2, LAYERS as usize);
        let (flat, _, exact) = self.time(&batch, How::Flat, sets)?;
        let exact: Vec<f64> = exact.iter().map(|x| x.to_f64()).collect();
        let mut compared = |how, kind| -> Outcome<(f64, Option<SpanWork>)> {
            let (us, work, got) = self.time(&batch, how, sets)?;
            let mut distance = Distance::default();
            distance.add(&got, &exact);
            if !distance.is_small() {
                report.row("spans", case, kind, us, Rate::Bytes(bytes), false);
            }
            Ok((us, work))
        };
        let (chosen, accepted) = compared(How::Chosen, "as chosen")?;
        let (once, work) = compared(How::Once, "spans once")?;
        let accepted = accepted.is_some();
        Ok(Timed { flat, chosen, once, accepted, work: work.unwrap_or_default() })
    }

    /// Returns the microseconds, the work if a span is read once, and one layer's rows of out.
    fn time(&mut self, batch: &Batch, how: How, sets: usize) -> Outcome<(f64, Option<SpanWork>, Vec<bf16>)> {
        self.step += 1;
        let plan = batch.plan();
        let shared = if how == How::Flat { SharedSpans::default() } else { plan.shared };
        let plan = BatchPlan { step: StepId::new(self.step), shared, ..plan };
        let cuda = if how == How::Once { &mut self.all } else { &mut self.choosing };
        let head_dim = cuda.layout().head_dim();
        let elements = batch.rows.len() * (self.q_heads * head_dim) as usize;
        let attend = Attend::new(self.q_heads, head_dim);
        let (q, out) = (&self.q, &mut self.out);
        out.fill(0xff)?;
        cuda.begin(&plan)?;
        let us = self.timer.launches(sets, |i| {
            let at = (i * elements * 2) as u64;
            let (q, out) = (q.rows(at, None), out.rows_mut(at, None));
            cuda.attend(&plan, LayerId::new(i as u32), &attend, q, out, None)
        })?;
        let work = cuda.span_work();
        cuda.end(StepEnd::Complete(plan.step));
        Ok((us, work, self.out.read(0, elements)?))
    }
}

/// Returns a number in `low..=high`, with equal probability for each octave.
fn spread(rng: &mut Rng, low: u32, high: u32) -> u32 {
    let part = (rng.bits() >> 11) as f64 / (1_u64 << 53) as f64;
    let number = f64::from(low) * (f64::from(high) / f64::from(low)).powf(part);
    (number.round() as u32).min(high)
}

/// Adds a span of these rows, and random spans below it; nothing for fewer than two rows or at depth 0.
fn grow(forest: &mut Forest, rng: &mut Rng, rows: Range<usize>, depth: u64, longest: u32) {
    if rows.len() < 2 || depth == 0 {
        return;
    }
    forest.spans.push((rows.clone(), spread(rng, 128, longest) / PAGE * PAGE));
    let pieces = rng.within(2, rows.len().min(8) as u64) as usize;
    let len = rows.len().div_ceil(pieces);
    for start in rows.clone().step_by(len) {
        if !rng.one_in(4) {
            grow(forest, rng, start..rows.end.min(start + len), depth - 1, longest);
        }
    }
}

/// Returns whether a forest is within the sizes, and the pool and the tables have room for it.
fn fits(forest: &Forest, sizes: &Sizes) -> bool {
    let rows = forest.own.len() as u32;
    let is_small = rows <= sizes.rows
        && forest.own.iter().all(|&own| own <= sizes.own)
        && forest.spans.iter().all(|span| span.1 <= sizes.shared);
    // The last page of each row's own tokens may be partial.
    let has_slots = forest.tokens() + u64::from(PAGE * rows) <= sizes.slots.into();
    let shared = forest.spans.iter().map(|span| span.0.len() as u64 * u64::from(span.1));
    let seen = shared.chain(forest.own.iter().copied().map(u64::from)).sum::<u64>();
    is_small && has_slots && seen <= SEEN_MAX
}

/// Returns a random forest with spans that fits.
fn random(rng: &mut Rng, sizes: &Sizes) -> Forest {
    loop {
        let rows = spread(rng, 2, sizes.rows) as usize;
        let mut forest = Forest::alone((0..rows).map(|_| spread(rng, 16, sizes.own)));
        let (depth, trees) = (rng.within(1, 4), rng.pick(&[1, 1, 1, 2, 4]));
        let len = rows.div_ceil(trees);
        for start in (0..rows).step_by(len) {
            grow(&mut forest, rng, start..rows.min(start + len), depth, sizes.shared);
        }
        if !forest.spans.is_empty() && fits(&forest, sizes) {
            return forest;
        }
    }
}

/// Returns shapes whose time one part dominates: products, suffixes, bytes, or repeated reads.
fn simple(sizes: &Sizes) -> Vec<(String, Forest)> {
    let all = |rows: u32, len: u32, own: u32| {
        let own = vec![own; rows as usize];
        (format!("b{rows} {len}+{}", own[0]), Forest { spans: vec![(0..own.len(), len)], own })
    };
    let groups = |rows: usize, group: usize, len: u32, own: u32| {
        let spans = (0..rows).step_by(group).map(|start| (start..start + group, len)).collect();
        (format!("b{rows} by {group} {len}+{own}"), Forest { spans, own: vec![own; rows] })
    };
    let mut shapes = Vec::new();
    for rows in [32, 64, 128, 256] {
        shapes.extend([1_024, 4_096, 16_384].map(|len| all(rows, len, 16)));
    }
    for rows in [16, 64, 96] {
        shapes.extend([256, 1_024].map(|own| all(rows, 512, own)));
    }
    shapes.extend([all(2, 8_192, 256), all(8, 8_192, 64), all(8, 1_024, 1_024), all(16, 2_048, 64)]);
    shapes.extend([groups(64, 8, 2_048, 128), groups(64, 4, 1_024, 128), groups(128, 2, 512, 64)]);
    shapes.extend([groups(256, 16, 1_024, 64), groups(64, 32, 4_096, 256)]);
    shapes.extend([all(8, 256, 32), groups(8, 2, 128, 32)]);
    shapes.into_iter().filter(|(_, forest)| fits(forest, sizes)).collect()
}

const NAMES: [&str; 9] = ["tile", "spans", "suffixes", "units", "memory", "flat", "own", "first", "again"];

fn values(costs: &SpanCosts) -> [f64; 9] {
    let SpanCosts { tile, spans, suffixes, units, memory, .. } = *costs;
    let SpanCosts { flat, own, first, again, .. } = *costs;
    [tile, spans, suffixes, units, memory, flat, own, first, again]
}

fn costs(values: [f64; 9]) -> SpanCosts {
    let [tile, spans, suffixes, units, memory, flat, own, first, again] = values;
    SpanCosts { tile, spans, suffixes, units, memory, flat, own, first, again }
}

/// Returns the model's times divided by the measured ones: with separate reads, and with every span read once.
fn factors(costs: &SpanCosts, timed: &Timed) -> [f64; 2] {
    let (flat, once) = (costs.flat(&timed.work), costs.once(&timed.work));
    [flat / timed.flat / 1e3, once / timed.once / 1e3]
}

/// Returns the mean square of the factors' logarithms.
fn error(costs: &SpanCosts, all: &[&Timed]) -> f64 {
    let squares = all.iter().flat_map(|timed| factors(costs, timed)).map(|x| x.ln().powi(2));
    squares.sum::<f64>() / (2 * all.len()) as f64
}

/// Returns constants with a smaller error: starts at the code's constants, and changes one at a time while the error
/// falls.
fn fit(code: &SpanCosts, all: &[&Timed]) -> SpanCosts {
    let mut best = values(code);
    let mut least = error(&costs(best), all);
    let mut by = 1.2;
    while by > 1.002 {
        let before = least;
        for i in 0..best.len() {
            for factor in [by, 1.0 / by] {
                let mut tried = best;
                tried[i] *= factor;
                let error = error(&costs(tried), all);
                if error < least {
                    (best, least) = (tried, error);
                }
            }
        }
        if least >= before || least.is_nan() {
            by = by.sqrt();
        }
    }
    costs(best)
}

/// Returns the mean, the bias and the maximum distance of the model from the measured times, in percent, for separate
/// reads and for spans read once.
fn distances(costs: &SpanCosts, all: &[&Timed]) -> String {
    let distance = |which: usize| {
        let off: Vec<f64> = all.iter().map(|timed| 100.0 * (factors(costs, timed)[which] - 1.0)).collect();
        let count = off.len() as f64;
        let bias = off.iter().sum::<f64>() / count;
        let mean = off.iter().map(|x| x.abs()).sum::<f64>() / count;
        let worst = off.iter().fold(0_f64, |worst, &x| if x.abs() > worst.abs() { x } else { worst });
        format!("{mean:.1} % off ({bias:+.1} % on the mean, at worst {worst:+.1} %)")
    };
    format!("flat {}, once {}", distance(0), distance(1))
}

/// Prints how much longer a choice takes: on average than the faster variant, and at worst than separate reads.
fn verdict(what: &str, all: &[(String, Timed)], chosen: impl Fn(&Timed) -> f64) {
    let over: f64 = all.iter().map(|(_, timed)| chosen(timed) / timed.better()).sum();
    let worse = |timed: &Timed| chosen(timed) / timed.flat;
    let worst = all.iter().max_by(|a, b| worse(&a.1).total_cmp(&worse(&b.1)));
    let (case, timed) = worst.expect("forests were timed");
    let (over, worst) = (100.0 * (over / all.len() as f64 - 1.0), 100.0 * (worse(timed) - 1.0));
    println!("  {what}: {over:+.2} % over the faster variant on average, at worst {worst:+.1} % over flat ({case})");
}

fn summarize(code: &SpanCosts, shapes: &[(String, Timed)], forests: &[(String, Timed)]) {
    // A step in which no span could be read once does not test the model.
    fn known(all: &[(String, Timed)]) -> Vec<&Timed> {
        all.iter().map(|(_, timed)| timed).filter(|timed| timed.work.work_tiles > 0.0).collect()
    }
    let (shapes, random) = (known(shapes), known(forests));
    let all: Vec<&Timed> = shapes.iter().chain(&random).copied().collect();
    let fitted = fit(code, &all);
    println!("  constant      code    fitted");
    for ((name, code), new) in NAMES.iter().zip(values(code)).zip(values(&fitted)) {
        println!("  {name:9}{code:9.1} {new:9.1}");
    }
    for (name, costs) in [("the code's", code), ("fitted", &fitted)] {
        println!("  {name} constants: simple shapes {}", distances(costs, &shapes));
        println!("  {name} constants: forests {}", distances(costs, &random));
    }
    let accepted = forests.iter().filter(|(_, timed)| timed.accepted).count();
    let better = forests.iter().filter(|(_, timed)| timed.once < timed.flat).count();
    println!("  of {} forests, {accepted} read spans once, {better} are faster that way", forests.len());
    verdict("as chosen", forests, |timed| timed.chosen);
    verdict("always flat", forests, |timed| timed.flat);
    verdict("always once", forests, |timed| timed.once);
    verdict("all or nothing by the fitted constants", forests, |timed| {
        let is_better = timed.work.work_tiles > 0.0 && fitted.is_better_once(&timed.work);
        if is_better { timed.once } else { timed.flat }
    });
}

fn line(csv: &mut String, heads: &str, case: &str, forest: &Forest, timed: &Timed) {
    let Timed { flat, chosen, once, accepted, work } = timed;
    let SpanWork { work_tiles, unit_bytes, suffix_ctas, own_bytes, span_bytes, row_bytes, .. } = work;
    let (rows, spans) = (forest.own.len(), forest.spans.len());
    let _ = write!(csv, "{heads},{case},{rows},{spans},{flat:.3},{chosen:.3},{once:.3},{accepted},");
    let _ = writeln!(csv, "{work_tiles},{unit_bytes},{suffix_ctas},{own_bytes},{span_bytes},{row_bytes}");
}

/// Runs small forms of all sections of spans.
pub fn run_small(gpu: &Gpu, report: &mut Report) -> Outcome<()> {
    for heads in [&HEADS_128, &OTHER_HEADS] {
        for over_fp8 in [false, true] {
            run(gpu, Sizes::SMALL, (heads, over_fp8), report)?;
        }
    }
    Ok(())
}

/// Runs the section. The report lists the simple shapes, and random forests with differing results. All forests are in
/// the CSV file and in the printed summary.
pub fn run(gpu: &Gpu, sizes: Sizes, (all, over_fp8): (&[Heads], bool), report: &mut Report) -> Outcome<()> {
    let noise = Noise::new(gpu)?;
    let bytes = if over_fp8 { Some(Fp8Noise::new(gpu)?) } else { None };
    let of_fp8 = if over_fp8 { "fp8-" } else { "" };
    let mut csv = String::from("heads,case,rows,spans,flat,chosen,once,accepted,");
    csv += "work_tiles,unit_bytes,suffix_ctas,own_bytes,span_bytes,row_bytes\n";
    for one in all {
        let (q_heads, kv_heads, head_dim) = one;
        let heads = format!("{of_fp8}{q_heads}q/{kv_heads}kv d{head_dim}");
        let mut bench = Bench::new(gpu, (&noise, bytes.as_ref()), one, &sizes)?;
        let mut shapes = Vec::new();
        for (name, forest) in simple(&sizes) {
            let case = format!("{name} {heads}");
            let timed = bench.run(&case, &forest, report)?;
            let bytes = Rate::Bytes(forest.tokens() as f64 * bench.token_bytes());
            let kinds = [("flat", timed.flat), ("as chosen", timed.chosen), ("spans once", timed.once)];
            for (kind, us) in kinds {
                report.row("spans", &case, kind, us, bytes, true);
            }
            line(&mut csv, &heads, &name, &forest, &timed);
            shapes.push((case, timed));
        }
        let (mut forests, mut rng) = (Vec::new(), Rng::new(14));
        for i in 0..sizes.forests {
            let forest = random(&mut rng, &sizes);
            let case = format!("forest {i} of {} rows, {} spans {heads}", forest.own.len(), forest.spans.len());
            let timed = bench.run(&case, &forest, report)?;
            line(&mut csv, &heads, &format!("forest {i}"), &forest, &timed);
            forests.push((case, timed));
        }
        println!("spans, {heads}:");
        let suffixes = usize::from(q_heads / kv_heads > 8);
        let hopper = gpu.capability() == 90 && *head_dim == 128 && !over_fp8;
        // These constants are per multiprocessor, but the model needs them per CTA. The conversion assumes two CTAs on
        // a multiprocessor.
        let costs = if over_fp8 { SpanCosts::over_fp8 } else { SpanCosts::general };
        let general = costs(*head_dim, suffixes).of_ctas(2);
        summarize(if hopper { &SpanCosts::H200[suffixes] } else { &general }, &shapes, &forests);
    }
    let folder = std::env::var("OUT").unwrap_or_else(|_| ".".into());
    std::fs::write(format!("{folder}/spans-{of_fp8}d{}.csv", all[0].2), csv)?;
    Ok(())
}
