//! Difficult cases of fp8 pools: numbers between the values of two bytes and beyond all values, bytes of NaN, widely
//! different scales, and copies between pools with different scales.

use std::collections::BTreeSet;

use kvarena::backend::cuda::{CudaError, Gpu};
use kvarena::backend::{CpuRows, OpenBackend};
use kvarena::layout::{Dtype, KvScales, Layout, PlaneName, PoolLayout, Scaling, TableShape};
use kvarena::plan::{OwnedPlan, PageCopy, StepEnd};
use kvarena::testkit::contract::{HostRows, Numbers, TestBackend, round};
use kvarena::testkit::planner::Item;
use kvarena::testkit::quantised::{scales, value};
use kvarena::testkit::rng::Rng;
use kvarena::{Attend, Backend, BatchPlan, Capacity, Cpu, CpuOptions, KvDtype, KvShape, LayerId, PageId, PoolConfig};

use crate::drive::{Drive, LayerInputs, Shape, attend_layer};
use crate::gpu;
use crate::on_gpu::{OnGpu, OnGpuOptions};

const TOKENS: usize = 192;

fn pool(shape: KvShape, scaling: Scaling, layout: Layout) -> PoolLayout {
    let capacity = Capacity::Pages(40);
    let dtype = KvDtype::Fp8E4M3;
    let config =
        PoolConfig { layers: 2, shape, dtype, scaling, page_size: 5, capacity, layout, ..PoolConfig::default() };
    config.layout().expect("a valid pool")
}

/// Returns rows that are hard to round. Most numbers are near the middle between the values of two adjacent bytes,
/// times a scale. The others are zeros, special values such as NaN, and a head's largest number.
fn hard_rows(dtype: Dtype, width: usize, head_dim: usize, given: Option<&KvScales>, side: usize) -> HostRows {
    let mut rng = Rng::new(side as u64 + 7);
    let special = [
        0.0,
        -0.0,
        f32::NAN,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::MAX,
        f32::MIN_POSITIVE,
        1e-40,
        448.0,
        464.0,
        465.0,
    ];
    let mut values = Vec::new();
    for _ in 0..TOKENS {
        for head in 0..width / head_dim {
            // About one head in eight contains zeros, and one in eight special numbers. The others are hard to round.
            let kind = rng.below(8);
            let largest = round(
                dtype,
                [1.0, 1.75, 0.3, 3.5 * 13.0 / 64.0][rng.below(4) as usize] * 2_f32.powi(rng.below(12) as i32 - 6),
            );
            let scale = given.map_or(largest / 448.0, |given| given.get(LayerId::new(0), head as u32)[side]);
            let mut number = || match kind {
                0 => 0.0,
                1 => rng.pick(&special),
                _ => {
                    let byte = rng.below(0x7e) as u8;
                    let middle = (value(byte) + value(byte + 1)) / 2.0 * f64::from(scale);
                    let near = middle as f32 * [1.0, 1.0, 0.999, 1.001][rng.below(4) as usize];
                    round(dtype, if rng.one_in(2) { near } else { -near })
                }
            };
            let start = values.len();
            values.extend((0..head_dim).map(|_| number()).map(|x| round(dtype, x)));
            if kind > 1 && given.is_none() {
                values[start] = largest;
            }
        }
    }
    HostRows { dtype, width, stride: width, values }
}

fn cpu_rows(rows: &HostRows) -> Numbers {
    match rows.dtype {
        Dtype::F32 => Numbers::F32(rows.values.clone()),
        Dtype::F16 => Numbers::F16(rows.values.iter().map(|&x| half::f16::from_f32(x)).collect()),
        _ => Numbers::Bf16(rows.values.iter().map(|&x| half::bf16::from_f32(x)).collect()),
    }
}

fn as_rows(numbers: &Numbers) -> CpuRows<'_> {
    match numbers {
        Numbers::F32(x) => CpuRows::from(&x[..]),
        Numbers::F16(x) => CpuRows::from(&x[..]),
        Numbers::Bf16(x) => CpuRows::from(&x[..]),
    }
}

/// Stores the same rows on the CPU and on the GPU, and compares all bytes of the pools.
fn stores_alike(gpu: &Gpu, pool: &PoolLayout, given: Option<&KvScales>, [k, v]: [HostRows; 2], case: &str) {
    let table = TableShape::new(5, 4, 200, 800).expect("a table");
    let options = CpuOptions { scales: given.cloned(), ..CpuOptions::with_threads(1) };
    let mut cpu: Cpu = options.open(pool, &table, 1).expect("a small pool");
    let options = OnGpuOptions::of_rows(gpu, k.dtype).with_scales(given.cloned());
    let mut backend = options.open(pool, &table, 1).expect("a small pool");
    let blank = vec![0; pool.page_bytes() as usize];
    (0..40).for_each(|page| backend.write_pages(&[PageId::new(page)], &blank));
    let mut planner = kvarena::testkit::planner::Planner::new(pool, &table, 3);
    let sequence = planner.admit().expect("a row");
    let plan = planner.plan(&[Item::Extend { sequence, len: TOKENS as u32 }]);
    let plan = plan.plan();
    cpu.begin(&plan).expect("a valid plan");
    backend.begin(&plan).expect("a valid plan");
    let id = LayerId::new(0);
    let (ck, cv) = (cpu_rows(&k), cpu_rows(&v));
    cpu.store_cache(&plan, id, as_rows(&ck), as_rows(&cv)).expect("a store");
    let [k, v] = [&k, &v].map(|rows| backend.input(rows));
    backend.store_cache(&plan, id, OnGpu::rows(&k), OnGpu::rows(&v)).expect("a store");
    backend.synchronize().expect("nothing failed");
    let [mut wanted, mut got] = [(); 2].map(|()| vec![0; pool.page_bytes() as usize]);
    for page in 0..40 {
        cpu.read_page(PageId::new(page), &mut wanted).expect("a page");
        backend.read_pages(&[PageId::new(page)], &mut got);
        if let Some(at) = got.iter().zip(&wanted).position(|(a, b)| a != b) {
            let (got, wanted) = (got[at], wanted[at]);
            panic!("{case}: page {page} byte {at}: {got:#x} is not {wanted:#x}");
        }
    }
}

#[test]
fn stores_are_the_cpus_bit_by_bit() {
    let Some(gpu) = gpu() else { return };
    for (scaling, layout) in [
        (Scaling::Static, Layout::LayerFirst),
        (Scaling::Static, Layout::PageFirst),
        (Scaling::ByToken, Layout::LayerFirst),
        (Scaling::ByToken, Layout::PageFirst),
    ] {
        for (dtype, head_dim) in [
            (Dtype::Bf16, 128),
            (Dtype::F16, 64),
            (Dtype::Bf16, 256),
            (Dtype::F16, 128),
            (Dtype::F32, 128),
            (Dtype::F32, 32),
            (Dtype::F16, 32),
            (Dtype::Bf16, 16),
            (Dtype::Bf16, 20),
        ] {
            let by_token = scaling == Scaling::ByToken;
            for seed in [None, Some(1), Some(2)].into_iter().take(if by_token { 1 } else { 3 }) {
                let pool = pool(KvShape::heads(3, head_dim), scaling, layout);
                let given = seed.map(|seed| scales(2, 3, seed));
                let width = 3 * head_dim as usize;
                let ones = KvScales::new(2, 3, vec![1.0; 12]).expect("sound scales");
                let known = (!by_token).then(|| given.clone().unwrap_or(ones));
                let rows = [0, 1].map(|side| hard_rows(dtype, width, head_dim as usize, known.as_ref(), side));
                let case = format!("{scaling:?} {layout:?} {dtype:?} {head_dim} {seed:?}");
                stores_alike(&gpu, &pool, given.as_ref(), rows, &case);
            }
        }
    }
}

/// The unquantised part of the rows has ties between numbers of bf16, overflow, and every kind of NaN.
#[test]
fn stores_of_latent_rows_are_the_cpus_bit_by_bit() {
    let Some(gpu) = gpu() else { return };
    let (rank, rope) = (512, 64);
    for layout in [Layout::LayerFirst, Layout::PageFirst] {
        for dtype in [Dtype::Bf16, Dtype::F16, Dtype::F32] {
            let pool = pool(KvShape::Latent { rank, rope }, Scaling::ByToken, layout);
            let latent = hard_rows(dtype, rank as usize, rank as usize, None, 0);
            let mut rng = Rng::new(11);
            let mut number = || {
                let high = (rng.bits() as u32) << 16;
                let low = rng.pick(&[0, 1, 0x7fff, 0x8000, 0x8001, 0xffff]);
                let any = f32::from_bits(high | low);
                let sizes = [any, rng.below(1 << 13) as f32 / 512.0, f32::from_bits(high | 0x7f80_0000)];
                round(dtype, rng.pick(&sizes))
            };
            let mut values = Vec::new();
            for row in latent.values.chunks_exact(rank as usize) {
                values.extend_from_slice(row);
                values.extend((0..rope).map(|_| number()));
            }
            let width = (rank + rope) as usize;
            let k = HostRows { dtype, width, stride: width, values };
            let v = HostRows { dtype, width: 0, stride: 0, values: vec![] };
            stores_alike(&gpu, &pool, None, [k, v], &format!("{layout:?} {dtype:?}"));
        }
    }
}

fn shape(scaling: Scaling, dtype: Dtype, head_dim: u32, group: u32) -> Shape {
    Shape { group, head_dim, dtype, fp8: Some(scaling), ..Shape::SMALL }
}

/// Attends again for the last tokens of a sequence, with new queries. Returns the plan, q, the output and its
/// log-sum-exp.
fn requery(drive: &mut Drive, backend: &mut OnGpu, items: &[Item]) -> (OwnedPlan, HostRows, Vec<f32>, Vec<f32>) {
    let Shape { kv_heads, group, head_dim, dtype, .. } = drive.shape;
    let (owned, attend) = (drive.planner.plan(items), drive.shape.attend());
    let plan = owned.plan();
    let mut q = drive.rows(plan.token_count(), (kv_heads * group * head_dim) as usize);
    // K grows 16 times from head to head. q shrinks as much, so the logits of all heads are alike.
    for (i, heads) in q.values.chunks_exact_mut((group * head_dim) as usize).enumerate() {
        let factor = 2_f32.powi(4 - 4 * (i as i32 % 4));
        heads.iter_mut().for_each(|x| *x = round(dtype, *x * factor));
    }
    backend.begin(&plan).expect("a valid plan");
    let (out, lse) = attend_layer(backend, &plan, 0, &attend, &q);
    backend.end(StepEnd::Complete(plan.step()));
    (owned, q, out, lse)
}

/// Attention reads fp8 rows that contain all bytes of finite numbers, including subnormal ones. Then it reads rows with
/// a NaN in V, and at last with another NaN in K.
#[test]
fn every_byte_is_read_as_it_is() {
    let Some(gpu) = gpu() else { return };
    for (dtype, head_dim, group) in [
        (Dtype::Bf16, 128, 4),
        (Dtype::F16, 128, 16),
        (Dtype::Bf16, 64, 8),
        (Dtype::F16, 256, 2),
        (Dtype::Bf16, 256, 16),
        (Dtype::F32, 64, 2),
    ] {
        for new in [1, 90] {
            // Large numbers would hide errors of small ones, so each kv head has the bytes of four exponents.
            let shape = Shape { kv_heads: 4, ..shape(Scaling::Static, dtype, head_dim, group) };
            let mut drive = Drive::new(shape, 9);
            let mut backend = shape.open(&gpu, 2);
            let sequence = drive.admit();
            // The scales are 1, because small scales of V would hide small errors.
            let items = [Item::Extend { sequence, len: 300 }];
            let width = 4 * head_dim as usize;
            let plan = drive.planner.plan(&items);
            let plan = plan.plan();
            let mut rng = Rng::new(4);
            let mut stored = BTreeSet::new();
            let mut number = |rng: &mut Rng, kv_head: usize| {
                let size = (0x20 * kv_head as u8 + rng.below(0x20) as u8).min(0x7e);
                let byte = size | if rng.one_in(2) { 0x80 } else { 0 };
                stored.insert(byte);
                round(dtype, value(byte) as f32)
            };
            let mut rows = |rng: &mut Rng| {
                let kv_heads = (0..300 * width).map(|i| i / head_dim as usize % 4);
                let values = kv_heads.map(|kv_head| number(rng, kv_head)).collect();
                HostRows { dtype, width, stride: width, values }
            };
            let (k, v) = (rows(&mut rng), rows(&mut rng));
            assert_eq!(stored.len(), 0x100 - 2, "every byte but the two of NaN");
            drive.remember(sequence, 0, &k, &v);
            backend.begin(&plan).expect("a valid plan");
            let [k, v] = [&k, &v].map(|rows| backend.input(rows));
            let id = LayerId::new(0);
            backend.store_cache(&plan, id, OnGpu::rows(&k), OnGpu::rows(&v)).expect("a store");
            backend.synchronize().expect("nothing failed");
            backend.end(StepEnd::Complete(plan.step()));
            let items = [Item::Requery { sequence, len: new }];
            let slot = drive.planner.slot(&drive.planner.sequence(sequence).expect("it is live").clone(), 40);
            let (plan, q, out, lse) = requery(&mut drive, &mut backend, &items);
            drive.check(&items, &plan.plan(), (0, &q), &shape.attend(), (&out, &lse), 40);
            // Replaces a byte of head 0 by NaN: first in V, then in K.
            let nans = [(PlaneName::V, 0x7f), (PlaneName::K, 0xff)].map(|(plane, nan)| {
                let (page, offset) = shape.pool().page_of(slot);
                let mut bytes = vec![0; shape.pool().page_bytes() as usize];
                backend.read_pages(&[page], &mut bytes);
                let strides = shape.pool().page_strides(plane).expect("the pool has it");
                bytes[strides.row(id.raw(), PageId::new(0), offset) as usize + 5] = nan;
                backend.write_pages(&[page], &bytes);
                let (.., out, _) = requery(&mut drive, &mut backend, &items);
                out.iter().filter(|x| x.is_nan()).count()
            });
            // A NaN of V affects one dim of each query of the head, a NaN of K all dims.
            let queries = (new * group) as usize;
            assert_eq!(nans, [queries, queries * head_dim as usize], "{dtype:?} {head_dim} {group} {new}");
        }
    }
}

/// Widely different scales of a sequence's tokens, with rows of zeros, whose scale is 1.
#[test]
fn scales_by_token_may_differ_widely() {
    let Some(gpu) = gpu() else { return };
    for (dtype, powers) in [(Dtype::Bf16, 60), (Dtype::F16, 10), (Dtype::F32, 60)] {
        for (head_dim, group, new) in [(128, 4, 1), (128, 4, 60), (64, 12, 1), (256, 1, 1), (64, 2, 90)] {
            let shape = shape(Scaling::ByToken, dtype, head_dim, group);
            let mut drive = Drive::new(shape, 10);
            let mut backend = shape.open(&gpu, 2);
            let sequence = drive.admit();
            let width = 2 * head_dim as usize;
            for step in 0..2 {
                let len = if step == 0 { 300 } else { new };
                let items = [Item::Extend { sequence, len }];
                let plan = drive.planner.plan(&items);
                let plan = plan.plan();
                let mut inputs = drive.inputs_of(&items, &plan, |drive| {
                    let mut rows = drive.rows(len as usize, width);
                    for row in rows.values.chunks_exact_mut(width) {
                        // All rows of a sequence are small except a few tokens.
                        let power = if drive.rng.one_in(40) { 0 } else { -powers };
                        let zero = drive.rng.one_in(9);
                        row.iter_mut().for_each(|x| *x = if zero { 0.0 } else { round(dtype, *x * 2_f32.powi(power)) });
                    }
                    rows
                });
                let rows = inputs.remove(0);
                let attend = (step == 1).then(|| shape.attend());
                run_step(&mut drive, &mut backend, &items, &plan, &rows, attend.as_ref());
            }
        }
    }
}

/// A scale of K at an end of f32's range: the smallest number, or the largest power of two. V's is 1 or 2^[`LARGE`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum End {
    Smallest,
    Largest,
}

/// Exponent of V's large scale. Sums of weighted V over a row's tokens still fit f32.
const LARGE: i32 = 100;

/// Scales of K at both ends of f32's range, for rows and trees. Infinity times a scale that rounds to zero gives NaN.
#[test]
fn scales_may_be_at_both_ends_of_f32() {
    let Some(gpu) = gpu() else { return };
    let largest = 2_f32.powi(127);
    // No f16 number is near the largest scale, so K has no such rows of f16.
    for (dtype, end) in [(Dtype::Bf16, End::Smallest), (Dtype::F16, End::Smallest), (Dtype::Bf16, End::Largest)] {
        let is_small = end == End::Smallest;
        let pair = if is_small { [1.5e-45, 1.0] } else { [largest, 2_f32.powi(LARGE)] };
        let given = KvScales::new(1, 2, [pair, pair].concat()).expect("sound scales");
        for (head_dim, group) in [(64, 2), (128, 4), (256, 1)] {
            for (new, tree) in [(1, false), (20, true), (60, true), (90, false)] {
                println!("{dtype:?} {end:?} {head_dim} {group} {new} {tree}");
                let shape = shape(Scaling::Static, dtype, head_dim, group);
                let mut drive = Drive::new(shape, 13);
                let options = OnGpuOptions::of_rows(&gpu, dtype).with_scales(Some(given.clone()));
                let mut backend = shape.open_with(options, 2);
                let sequence = drive.admit();
                for (len, tree) in [(100, false), (new, tree)] {
                    let items = [Item::Extend { sequence, len }];
                    let plan = drive.planner.plan_trees(&items, &[tree]);
                    run_scaled(&mut drive, &mut backend, &items, &plan.plan(), end);
                }
            }
        }
    }
}

/// Runs a step over scales at an end of f32's range. With the smallest scale, every K acts as zero. With the largest,
/// K, V and the output are those of the reference times powers of two.
fn run_scaled(drive: &mut Drive, backend: &mut OnGpu, items: &[Item], plan: &BatchPlan<'_>, end: End) {
    let (mut is_k, width) = (false, (2 * drive.shape.head_dim) as usize);
    let is_small = end == End::Smallest;
    let rows = drive.inputs_of(items, plan, |drive| {
        let mut rows = drive.rows(plan.token_count(), width);
        is_k = !is_k;
        if is_k && is_small {
            rows.values.fill(0.0);
        }
        rows
    });
    let LayerInputs { q: exact_q, mut k, mut v } = rows.into_iter().next().expect("a layer");
    let (exact, mut q) = (drive.shape.attend(), exact_q.clone());
    let mut attend = exact;
    if is_small {
        k = drive.rows(plan.token_count(), width);
    } else {
        for (rows, power) in [(&mut k, 127), (&mut v, LARGE)] {
            rows.values.iter_mut().for_each(|x| *x *= 2_f32.powi(power));
        }
        q.values.iter_mut().for_each(|x| *x *= 2_f32.powi(-100));
        attend.scale *= 2_f32.powi(-27);
    }
    backend.begin(plan).expect("a valid plan");
    let (mut out, lse) = LayerInputs { q, k, v }.run(backend, plan, 0, &attend);
    if !is_small {
        out.iter_mut().for_each(|x| *x *= 2_f32.powi(-LARGE));
    }
    drive.check(items, plan, (0, &exact_q), &exact, (&out, &lse), 40);
    backend.end(StepEnd::Complete(plan.step()));
}

/// Runs a step of one layer: stores its rows, and checks attention if requested.
fn run_step(
    drive: &mut Drive,
    backend: &mut OnGpu,
    items: &[Item],
    plan: &BatchPlan<'_>,
    rows: &LayerInputs,
    attend: Option<&Attend>,
) {
    backend.begin(plan).expect("a valid plan");
    rows.store(backend, plan, 0);
    if let Some(attend) = attend {
        let (out, lse) = attend_layer(backend, plan, 0, attend, &rows.q);
        drive.check(items, plan, (0, &rows.q), attend, (&out, &lse), 60);
    }
    backend.synchronize().expect("nothing failed");
    backend.end(StepEnd::Complete(plan.step()));
}

/// Rows of q have widely different magnitudes: each row is multiplied by its own power of two, and some are zeros. The
/// scales of attention have either sign.
#[test]
fn queries_may_differ_widely_in_magnitude() {
    let Some(gpu) = gpu() else { return };
    // In each case, the logits of some rows are about 1.
    for (dtype, powers, up) in
        [(Dtype::Bf16, [-90, -40, 0, 16], 0), (Dtype::Bf16, [-90, -44, -40, -30], 40), (Dtype::F16, [-9, -4, 0, 5], 0)]
    {
        for (scaling, scale, soft_cap, new) in [
            (Scaling::Static, 0.1, None, 60),
            (Scaling::Static, -0.1, None, 60),
            (Scaling::Static, -0.1, Some(5.0), 60),
            (Scaling::ByToken, -0.1, None, 60),
            (Scaling::ByToken, 0.1, Some(5.0), 60),
            (Scaling::Static, -0.1, None, 1),
            (Scaling::ByToken, 0.1, None, 1),
        ] {
            let shape = shape(scaling, dtype, 128, 4);
            let scale = scale * 2_f32.powi(up);
            let attend = Attend { scale, soft_cap, ..shape.attend() };
            let mut drive = Drive::new(shape, 12);
            let mut backend = shape.open(&gpu, 2);
            let sequence = drive.admit();
            for len in [200, new] {
                let items = [Item::Extend { sequence, len }];
                let plan = drive.planner.plan(&items);
                let plan = plan.plan();
                let mut rows = drive.inputs(&items, &plan).remove(0);
                for row in rows.q.values.chunks_exact_mut(128) {
                    let power = drive.rng.pick(&powers);
                    let zero = drive.rng.one_in(7);
                    let factor = if zero { 0.0 } else { 2_f32.powi(power) };
                    row.iter_mut().for_each(|x| *x = round(dtype, *x * factor));
                }
                run_step(&mut drive, &mut backend, &items, &plan, &rows, Some(&attend));
            }
        }
    }
}

#[test]
fn pages_of_other_scales_are_not_copied() {
    let Some(gpu) = gpu() else { return };
    let table = TableShape::new(5, 2, 16, 32).expect("a table");
    let layout = pool(KvShape::heads(3, 64), Scaling::Static, Layout::LayerFirst);
    let open = |seed: Option<u64>| {
        let options = OnGpuOptions::new(&gpu).with_scales(seed.map(|seed| scales(2, 3, seed)));
        options.open(&layout, &table, 1).expect("a small pool")
    };
    let (source, mut same, mut other) = (open(Some(1)), open(Some(1)), open(None));
    let copy = [PageCopy { source: PageId::new(0), target: PageId::new(1) }];
    source.cuda.copy_to_pool(&mut same.cuda, &copy, &source.stream).expect("a copy");
    let refused = source.cuda.copy_to_pool(&mut other.cuda, &copy, &source.stream);
    let fingerprints = (source.cuda.page_fingerprint(), other.cuda.page_fingerprint());
    assert_ne!(fingerprints.0, fingerprints.1);
    let error = CudaError::PageFingerprint { source: fingerprints.0, target: fingerprints.1 };
    assert_eq!(refused.err(), Some(error));
}
