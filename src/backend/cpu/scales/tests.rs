//! Tests stores of a quantised pool: bytes and scales must equal the definition bit by bit.

use half::{bf16, f16};

use crate::backend::{Backend, Cpu, CpuError, CpuOptions, CpuRows, OpenBackend};
use crate::id::{LayerId, PageId, SlotId};
use crate::layout::{
    Capacity, KvDtype, KvScales, KvShape, Layout, PlaneName, PoolConfig, ScaleError, Scaling, TableShape,
};
use crate::plan::{BatchPlan, PageCopy, SlotMapping};
use crate::testkit::planner::{Item, Planner};
use crate::testkit::quantised::{quantise, scales, value};
use crate::testkit::rng::Rng;

const HEADS: usize = 3;
const DIM: usize = 10;
const TOKENS: usize = 23;

fn config(layout: Layout, scaling: Scaling) -> PoolConfig {
    PoolConfig {
        layers: 2,
        shape: KvShape::heads(HEADS as u32, DIM as u32),
        dtype: KvDtype::Fp8E4M3,
        scaling,
        page_size: 5,
        capacity: Capacity::Pages(6),
        layout,
        ..PoolConfig::default()
    }
}

fn open(config: &PoolConfig, scales: Option<KvScales>) -> Result<Cpu, CpuError> {
    let table = TableShape::new(config.page_size, 1, 30, 30).expect("a small table");
    let layout = config.layout().expect("a valid pool");
    CpuOptions { scales, ..CpuOptions::with_threads(1) }.open(&layout, &table, 2)
}

/// Returns numbers of every magnitude and all special values. Some heads have only zeros, or no finite numbers.
fn numbers(rng: &mut Rng) -> Vec<f32> {
    let special = [0.0, -0.0, f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 448.0, 1e-42, f32::MAX];
    let mut all = Vec::new();
    for _ in 0..TOKENS * HEADS {
        let size = 2_f32.powi(rng.within(0, 250) as i32 - 130);
        let of = rng.pick(&[1, 1, 1, 2, 20, 0, -1]);
        for _ in 0..DIM {
            let x = (rng.bits() as u16 as f32 / 32768.0 - 1.0) * size;
            all.push(match of {
                0 => rng.pick(&[0.0, -0.0]),
                -1 => rng.pick(&special[2..5]),
                of if !rng.one_in(of as u64 * 8) => x,
                _ => rng.pick(&special),
            });
        }
    }
    all
}

/// Stores the same rows of K and V in both layers of a new sequence. Returns the tokens' slots.
fn store(cpu: &mut Cpu, k: CpuRows<'_>, v: CpuRows<'_>) -> Vec<SlotId> {
    let table = TableShape::new(5, 1, 30, 30).expect("a small table");
    let mut planner = Planner::new(cpu.layout(), &table, 1);
    let sequence = planner.admit().expect("there is a row");
    let plan = planner.plan(&[Item::Extend { sequence, len: TOKENS as u32 }]);
    let plan: BatchPlan<'_> = plan.plan();
    cpu.begin(&plan).expect("a valid plan");
    for layer in [0, 1].map(LayerId::new) {
        cpu.store_cache(&plan, layer, k, v).expect("a valid store");
    }
    let slots: &SlotMapping<'_> = &plan.slot_mapping;
    (0..TOKENS).map(|i| slots.get(i).expect("a token's slot")).collect()
}

/// Compares the stored bytes, numbers and scales with those of `rows` by the definition, in both layers, for K and V.
fn check(cpu: &Cpu, slots: &[SlotId], rows: [&[f32]; 2], given: Option<&KvScales>) {
    let names = [(PlaneName::K, PlaneName::KScales), (PlaneName::V, PlaneName::VScales)];
    for layer in [0, 1].map(LayerId::new) {
        for (side, (name, scales_name)) in names.into_iter().enumerate() {
            for (i, &slot) in slots.iter().enumerate() {
                let row = cpu.layout().row(name, layer, slot).expect("a row by slot");
                let bytes = &cpu.pool.bytes()[row.start as usize..row.end as usize];
                let read = cpu.read_slot(name, layer, slot).expect("a plane of the pool");
                for head in 0..HEADS {
                    let source = &rows[side][(i * HEADS + head) * DIM..][..DIM];
                    let given = given.map(|given| given.get(layer, head as u32)[side]);
                    let (wanted, scale) = quantise(source, given);
                    let got = &bytes[head * DIM..(head + 1) * DIM];
                    assert_eq!(got, wanted, "{name:?} {layer:?} {i} {head}: {source:?} {scale}");
                    for (x, &byte) in read[head * DIM..].iter().zip(&wanted) {
                        let exact = (f64::from(scale) * value(byte)) as f32;
                        assert!(*x == exact || x.is_nan() && exact.is_nan(), "{x} {exact}");
                    }
                    if given.is_none() {
                        let made = cpu.read_slot(scales_name, layer, slot).expect("token scales");
                        assert_eq!(made[head].to_bits(), scale.to_bits(), "{source:?}");
                    }
                }
            }
        }
    }
}

#[test]
fn stores_follow_the_definition_bit_by_bit() {
    let mut rng = Rng::new(1);
    for layout in [Layout::LayerFirst, Layout::PageFirst] {
        for scaling in [Scaling::Static, Scaling::ByToken] {
            for seed in 0..20 {
                let given = (scaling == Scaling::Static).then(|| scales(2, HEADS as u32, seed));
                let cpu = || open(&config(layout, scaling), given.clone()).expect("a small pool");
                let [k, v] = [(); 2].map(|()| numbers(&mut rng));
                let mut wide = cpu();
                let slots = store(&mut wide, (&k[..]).into(), (&v[..]).into());
                check(&wide, &slots, [&k, &v], given.as_ref());

                let k: Vec<f16> = k.iter().map(|&x| f16::from_f32(x)).collect();
                let v: Vec<bf16> = v.iter().map(|&x| bf16::from_f32(x)).collect();
                let mut narrow = cpu();
                let slots = store(&mut narrow, (&k[..]).into(), (&v[..]).into());
                let k: Vec<f32> = k.iter().map(|x| x.to_f32()).collect();
                let v: Vec<f32> = v.iter().map(|x| x.to_f32()).collect();
                check(&narrow, &slots, [&k, &v], given.as_ref());
            }
        }
    }
}

#[test]
fn missing_scales_equal_scales_of_one() {
    let mut rng = Rng::new(2);
    let [k, v] = [(); 2].map(|()| numbers(&mut rng));
    let config = config(Layout::PageFirst, Scaling::Static);
    let ones = KvScales::new(2, HEADS as u32, vec![1.0; 4 * HEADS]).expect("positive scales");
    let mut none = open(&config, None).expect("a small pool");
    let mut one = open(&config, Some(ones.clone())).expect("a small pool");
    let slots = store(&mut none, (&k[..]).into(), (&v[..]).into());
    store(&mut one, (&k[..]).into(), (&v[..]).into());
    check(&none, &slots, [&k, &v], Some(&ones));
    assert_eq!(none.pool.bytes(), one.pool.bytes());
    assert_eq!(none.page_fingerprint(), one.page_fingerprint());
    assert_eq!(one.bytes() - none.bytes(), 4 * 4 * HEADS as u64);
}

#[test]
fn scales_that_are_not_for_the_pool_are_refused() {
    let static_pool = config(Layout::PageFirst, Scaling::Static);
    let refused = |config: &PoolConfig, layers, heads| {
        let Err(CpuError::Scales(error)) = open(config, Some(scales(layers, heads, 1))) else {
            panic!("the pool accepted the scales")
        };
        assert_eq!(CpuError::Scales(error).to_string(), error.to_string());
        error
    };
    for (layers, kv_heads) in [(1, 3), (2, 2), (3, 2)] {
        let (pool_layers, pool_kv_heads) = (2, 3);
        let size = ScaleError::Size { layers, kv_heads, pool_layers, pool_kv_heads };
        assert_eq!(refused(&static_pool, layers, kv_heads), size);
    }
    let by_token = config(Layout::PageFirst, Scaling::ByToken);
    let plain = PoolConfig { dtype: KvDtype::Bf16, ..static_pool };
    for config in [by_token, plain] {
        assert_eq!(refused(&config, 2, 3), ScaleError::NotStatic);
    }
}

#[test]
fn pages_move_only_between_pools_of_equal_scales() {
    let mut rng = Rng::new(3);
    let rows = [(); 2].map(|()| numbers(&mut rng));
    let given = || Some(scales(2, HEADS as u32, 1));
    let page_first = config(Layout::PageFirst, Scaling::Static);
    let layer_first = PoolConfig { layout: Layout::LayerFirst, ..page_first };
    let by_token = PoolConfig { scaling: Scaling::ByToken, ..page_first };
    let copies: Vec<_> =
        (0..6).map(|page| PageCopy { source: PageId::new(page), target: PageId::new(5 - page) }).collect();
    for (config, scales) in [(layer_first, given()), (by_token, None)] {
        let mut source = open(&config, scales.clone()).expect("a small pool");
        let slots = store(&mut source, (&rows[0][..]).into(), (&rows[1][..]).into());
        let other = PoolConfig { layout: Layout::PageFirst, capacity: Capacity::Pages(7), ..config };
        let mut target = open(&other, scales.clone()).expect("a small pool");
        source.copy_to_pool(&mut target, &copies).expect("the fingerprints are equal");
        let moved: Vec<_> = slots
            .iter()
            .map(|&slot| {
                let (page, offset) = source.layout().page_of(slot);
                target.layout().slot(PageId::new(5 - page.raw()), offset)
            })
            .collect();
        check(&target, &moved, [&rows[0], &rows[1]], scales.as_ref());
        let past = [PageCopy { source: PageId::new(6), target: PageId::new(0) }];
        assert!(matches!(source.copy_to_pool(&mut target, &past), Err(CpuError::Plan(_))));
    }
    let source = open(&page_first, given()).expect("a small pool");
    let other_scales = Some(scales(2, HEADS as u32, 2));
    for (config, scales) in [
        (page_first, other_scales),
        (page_first, None),
        (by_token, None),
        (PoolConfig { layers: 1, ..page_first }, None),
        (PoolConfig { page_size: 4, ..page_first }, given()),
    ] {
        let mut target = open(&config, scales).expect("a small pool");
        let before = target.pool.bytes().to_vec();
        let (from, to) = (source.page_fingerprint(), target.page_fingerprint());
        let refused = CpuError::PageFingerprint { source: from, target: to };
        assert!(!refused.to_string().is_empty());
        assert_eq!(source.copy_to_pool(&mut target, &copies[..1]), Err(refused));
        assert_eq!(target.pool.bytes(), before);
    }
}

#[test]
fn a_quantised_slot_is_read_as_numbers_only() {
    let cpu = open(&config(Layout::PageFirst, Scaling::ByToken), None).expect("a small pool");
    let (layer, slot) = (LayerId::new(0), SlotId::new(3));
    for plane in [PlaneName::K, PlaneName::V, PlaneName::KScales] {
        assert_eq!(cpu.slot(plane, layer, slot), Err(CpuError::Plane { plane }));
        assert!(cpu.read_slot(plane, layer, slot).is_ok());
    }
    let plane = PlaneName::Spare;
    assert_eq!(cpu.read_slot(plane, layer, slot), Err(CpuError::Plane { plane }));
}
