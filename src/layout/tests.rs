//! Tests of pool layouts, by enumeration over unusual planes; also of scales, fingerprints, labels and groups.

use super::{
    Capacity, Groups, KvDtype, KvScales, KvShape, LabelChannels, LabelError, LayerPlace, Layout, Plane, PlaneName,
    PlaneOrder, PoolConfig, PoolLayout, Reach, ScaleError, Scaling,
};
use crate::error::ConfigError;
use crate::id::{LayerId, PageId};
use crate::testkit::rng::Rng;

fn plane(name: PlaneName, heads: u32, elements: u32, dtype: KvDtype, order: PlaneOrder) -> Plane {
    Plane { name, heads, elements, dtype, order }
}

const KV_DTYPES: [KvDtype; 4] = [KvDtype::F32, KvDtype::F16, KvDtype::Bf16, KvDtype::Fp8E4M3];

/// Returns sets of planes, and the alignment of their pieces in bytes.
fn sets(rng: &mut Rng) -> [(Vec<Plane>, u64); 5] {
    use PlaneName::{K, Spare, V};
    use PlaneOrder::{ByPage, BySlot};
    let (heads, dim) = (rng.within(1, 3) as u32, rng.within(1, 7) as u32);
    let (f16, f32) = (KvDtype::F16, KvDtype::F32);
    let [k, v] = [K, V].map(|name| plane(name, heads, dim, f16, BySlot));
    let dtype = rng.pick(&KV_DTYPES);
    [
        // K and V of every dtype.
        ([K, V].map(|name| plane(name, heads, dim, dtype, BySlot)).into(), dtype.size().into()),
        // K and V, followed by one f32 for each token and head, in pieces padded to 16 bytes.
        (vec![k, v, plane(Spare, heads, 1, f32, ByPage)], 16),
        // The same, with the f32 plane first.
        (vec![plane(Spare, heads, 1, f32, ByPage), k, v], 16),
        // K, followed by f32 numbers of each token.
        (vec![k, plane(Spare, 1, dim + 1, f32, BySlot)], 4),
        // One row for all heads.
        (vec![plane(K, 1, dim + 2, f16, BySlot)], 2),
    ]
}

/// Returns small pools, and the alignment of their pieces in bytes.
fn pools() -> Vec<(PoolLayout, u64)> {
    let mut rng = Rng::new(1);
    let mut pools = Vec::new();
    for _ in 0..50 {
        for (planes, align) in sets(&mut rng) {
            for layout in [Layout::LayerFirst, Layout::PageFirst] {
                let config = PoolConfig {
                    layers: rng.within(1, 3) as u32,
                    page_size: rng.within(1, 5) as u32,
                    capacity: Capacity::Pages(rng.within(1, 4) as u32),
                    layout,
                    ..PoolConfig::default()
                };
                pools.push((config.layout_with(&planes).expect("a valid pool"), align));
            }
        }
    }
    pools
}

/// Calls `each` for every plane, layer and page, in the documented physical order.
fn pieces(pool: &PoolLayout, mut each: impl FnMut(&Plane, LayerId, PageId)) {
    let (layers, pages) = (0..pool.layers(), 0..pool.page_count());
    let (layers, pages) = (layers.map(LayerId::new), pages.map(PageId::new));
    let rows = pool.planes().iter();
    let rows = rows.flat_map(|&plane| layers.clone().map(move |layer| (plane, layer)));
    let rows: Vec<_> = rows.collect();
    match pool.layout() {
        Layout::LayerFirst => {
            for (plane, layer) in rows {
                pages.clone().for_each(|page| each(&plane, layer, page));
            }
        }
        Layout::PageFirst => {
            for page in pages {
                rows.iter().for_each(|(plane, layer)| each(plane, *layer, page));
            }
        }
    }
}

/// Returns `(slot, head)` of each row of a piece, in physical order.
fn rows_of(plane: &Plane, page_size: u32) -> Vec<(u32, u32)> {
    let (slots, heads) = (0..page_size, 0..plane.heads);
    match plane.order {
        PlaneOrder::BySlot => slots.flat_map(|slot| heads.clone().map(move |head| (slot, head))).collect(),
        PlaneOrder::ByPage => heads.flat_map(|head| slots.clone().map(move |slot| (slot, head))).collect(),
    }
}

#[test]
fn every_head_has_the_offset_of_its_place_in_the_physical_order() {
    for (pool, align) in pools() {
        let mut next = 0;
        pieces(&pool, |plane, layer, page| {
            let strides = pool.strides(plane.name).expect("the pool has it");
            let head_bytes = u64::from(plane.elements * plane.dtype.size());
            let start = next;
            for (slot, head) in rows_of(plane, pool.page_size()) {
                let at = strides.row(layer.raw(), page, slot) + u64::from(head) * strides.head;
                assert_eq!(at, next, "{pool:?} {plane:?} {layer:?} {page:?} {slot} {head}");
                assert!(at.is_multiple_of(plane.dtype.size().into()), "{pool:?} {plane:?}");
                let id = pool.slot(page, slot);
                assert_eq!(pool.page_of(id), (page, slot), "{pool:?}");
                if let Some(row) = pool.row(plane.name, layer, id) {
                    assert_eq!(row.start + u64::from(head) * strides.head, at, "{pool:?} {plane:?}");
                }
                next += head_bytes;
            }
            next = next.next_multiple_of(align);
            assert_eq!(next - start, pool.piece_bytes(plane), "{pool:?} {plane:?}");
        });
        assert_eq!(next, pool.total_bytes(), "{pool:?}");
        assert_eq!(pool.page_bytes() * u64::from(pool.page_count()), pool.total_bytes());
        assert_eq!(pool.slot_count(), u64::from(pool.page_count() * pool.page_size()));
    }
}

#[test]
fn heads_are_planes_k_and_v_by_slot() {
    for dtype in KV_DTYPES {
        let config = PoolConfig { shape: KvShape::heads(2, 5), dtype, ..PoolConfig::default() };
        let pool = config.layout().expect("a valid pool");
        let planes = [PlaneName::K, PlaneName::V];
        let wanted = planes.map(|name| plane(name, 2, 5, dtype, PlaneOrder::BySlot));
        assert_eq!(pool.planes(), wanted);
    }
}

#[test]
fn pieces_tile_the_pool_and_order_every_page_alike() {
    for (pool, _) in pools() {
        let mut owner = vec![None; pool.total_bytes() as usize];
        for page in (0..pool.page_count()).map(PageId::new) {
            // The offset in the pool of each byte of a page that was read from it.
            let page_bytes: Vec<u64> = (0..pool.pieces_per_page()).flat_map(|piece| pool.piece(page, piece)).collect();
            assert_eq!(page_bytes.len() as u64, pool.page_bytes(), "{pool:?}");
            for &byte in &page_bytes {
                assert_eq!(owner[byte as usize].replace(page), None, "{pool:?} {page:?} {byte}");
            }
            for plane in pool.planes() {
                let [pooled, read] = [pool.strides(plane.name), pool.page_strides(plane.name)]
                    .map(|strides| strides.expect("the pool has it"));
                for layer in (0..pool.layers()).map(LayerId::new) {
                    for (slot, head) in rows_of(plane, pool.page_size()) {
                        let in_pool = pooled.row(layer.raw(), page, slot) + pooled.head * u64::from(head);
                        let in_page = read.row(layer.raw(), PageId::new(0), slot) + read.head * u64::from(head);
                        assert_eq!(page_bytes[in_page as usize], in_pool, "{pool:?} {plane:?}");
                    }
                }
            }
        }
        assert!(owner.iter().all(Option::is_some), "{pool:?}");
    }
}

#[test]
fn only_planes_by_slot_have_rows() {
    for (pool, _) in pools() {
        for name in [PlaneName::K, PlaneName::V, PlaneName::Spare] {
            let plane = pool.planes().iter().find(|plane| plane.name == name);
            assert_eq!(pool.strides(name).is_some(), plane.is_some(), "{pool:?}");
            let by_slot = plane.filter(|plane| plane.order == PlaneOrder::BySlot);
            let slot = pool.slot(PageId::new(pool.page_count() - 1), pool.page_size() - 1);
            let row = pool.row(name, LayerId::new(pool.layers() - 1), slot);
            let bytes = by_slot.map(|plane| plane.heads * plane.elements * plane.dtype.size());
            assert_eq!(row.map(|row| row.end - row.start), bytes.map(u64::from), "{pool:?}");
        }
    }
}

#[test]
fn padding_counts_in_a_page_and_not_in_a_token() {
    let heads = KvShape::heads(2, 3);
    let config = PoolConfig { layers: 5, shape: heads, page_size: 3, ..PoolConfig::default() };
    let k = config.layout().expect("a valid pool").planes()[0];
    let scale = plane(PlaneName::Spare, 2, 1, KvDtype::F32, PlaneOrder::ByPage);
    // A piece of K has 3 * 2 * 3 * 4 = 72 bytes and takes 80. A piece of the other plane has 3 * 2 * 4 = 24 and takes
    // 32.
    let page_bytes = 5 * (80 + 32);
    let capacity = Capacity::Bytes(2 * page_bytes - 1);
    let pool = PoolConfig { capacity, ..config }.layout_with(&[k, scale]).expect("a page fits");
    assert_eq!((pool.page_bytes(), pool.page_count()), (page_bytes, 1));
    assert_eq!(config.bytes_per_token(), Ok(5 * 2 * 2 * 3 * 4));
}

/// Returns scales that encode their place: the layer in thousands, the head in hundreds, and 1 for K or 2 for V.
fn place_scales(layers: u32, kv_heads: u32) -> KvScales {
    let place = |i: u32| (1000 * (i / 2 / kv_heads) + 100 * (i / 2 % kv_heads) + 1 + i % 2) as f32;
    let values = (0..2 * layers * kv_heads).map(place).collect();
    KvScales::new(layers, kv_heads, values).expect("they are above 0")
}

#[test]
fn a_rank_has_the_scales_of_its_heads() {
    for (kv_heads, tp_size) in [(8, 1), (8, 2), (8, 8), (2, 8), (3, 6), (6, 3)] {
        let model = place_scales(3, kv_heads);
        for tp_rank in 0..tp_size {
            let shape = KvShape::heads(kv_heads, 2);
            let dtype = KvDtype::Fp8E4M3;
            let pool = PoolConfig { layers: 3, shape, dtype, tp_size, tp_rank, ..PoolConfig::default() };
            let rank = model.local(&pool).expect("they are the model's");
            let layout = pool.layout().expect("a valid pool");
            assert_eq!((rank.layers(), rank.kv_heads()), (3, layout.kv_heads()));
            assert_eq!(rank.check_pool(&layout), Ok(()));
            let first = pool.first_kv_head().expect("a valid pool");
            for (layer, head) in (0..3).flat_map(|l| (0..layout.kv_heads()).map(move |h| (l, h))) {
                let at = (1000 * layer + 100 * (first + head)) as f32;
                assert_eq!(rank.get(LayerId::new(layer), head), [at + 1.0, at + 2.0]);
            }
            // A model's scales fit a rank only if the rank has all heads.
            assert_eq!(model.check_pool(&layout).is_ok(), tp_size == 1);
        }
    }
}

#[test]
fn invalid_scales_are_refused() {
    let with = |at: usize, scale: f32| {
        let mut values = place_scales(2, 3).values().to_vec();
        values[at] = scale;
        KvScales::new(2, 3, values)
    };
    for scale in [0.0, -0.0, -1.0, f32::INFINITY, f32::NEG_INFINITY] {
        let (layer, head, plane) = (LayerId::new(1), 2, PlaneName::V);
        let refused = ScaleError::Value { layer, head, plane, scale };
        assert_eq!(with(11, scale), Err(refused));
        assert!(refused.to_string().contains("head 2"));
    }
    assert!(matches!(with(6, f32::NAN), Err(ScaleError::Value { head: 0, plane: PlaneName::K, .. })));
    assert!(with(11, f32::from_bits(1)).is_ok());
    let count = |actual, wanted| Err(ScaleError::Count { actual, wanted });
    assert_eq!(KvScales::new(2, 3, vec![1.0; 11]), count(11, 12));
    assert_eq!(KvScales::new(u32::MAX, u32::MAX, vec![1.0]), count(1, u64::MAX));
    assert!(KvScales::new(0, 5, Vec::new()).is_ok());
    let pool = PoolConfig { layers: 3, shape: KvShape::heads(3, 2), ..PoolConfig::default() };
    let (layers, kv_heads, pool_layers, pool_kv_heads) = (2, 3, 3, 3);
    let size = ScaleError::Size { layers, kv_heads, pool_layers, pool_kv_heads };
    assert_eq!(place_scales(2, 3).local(&pool), Err(size));
    let ranks = PoolConfig { tp_size: 2, ..pool };
    let split = ConfigError::HeadSplit { kv_heads: 3, tp_size: 2 };
    assert_eq!(place_scales(3, 3).local(&ranks), Err(ScaleError::Config(split)));
}

#[test]
fn equal_formats_have_equal_fingerprints() {
    let pool = PoolConfig { layers: 2, shape: KvShape::heads(3, 2), dtype: KvDtype::Fp8E4M3, ..PoolConfig::default() };
    let layout = |pool: PoolConfig| pool.layout().expect("a valid pool");
    let plain = layout(pool).page_fingerprint(None, None);
    // Hosts may keep this number with stored pages, so it must never change.
    assert_eq!(plain, 0x51a4_c355_2b17_72e6);
    let ones = KvScales::new(2, 3, vec![1.0; 12]).expect("they are above 0");
    let like = PoolConfig { layout: Layout::LayerFirst, capacity: Capacity::Pages(3), ..pool };
    assert_eq!(layout(like).page_fingerprint(Some(&ones), None), plain);
    let mut others = vec![
        plain,
        layout(pool).page_fingerprint(Some(&place_scales(2, 3)), None),
        layout(PoolConfig { scaling: Scaling::ByToken, ..pool }).page_fingerprint(None, None),
        layout(PoolConfig { layers: 3, ..pool }).page_fingerprint(None, None),
        layout(PoolConfig { page_size: 3, ..pool }).page_fingerprint(None, None),
        layout(PoolConfig { shape: KvShape::heads(2, 3), ..pool }).page_fingerprint(None, None),
        layout(PoolConfig { dtype: KvDtype::F16, ..pool }).page_fingerprint(None, None),
        layout(PoolConfig { dtype: KvDtype::Bf16, ..pool }).page_fingerprint(None, None),
    ];
    for at in 0..12 {
        let mut values = place_scales(2, 3).values().to_vec();
        values[at] = f32::from_bits(values[at].to_bits() + 1);
        let scales = KvScales::new(2, 3, values).expect("they are above 0");
        others.push(layout(pool).page_fingerprint(Some(&scales), None));
    }
    let count = others.len();
    others.sort_unstable();
    others.dedup();
    assert_eq!(others.len(), count);
}

/// Returns channels `h`, `h + 1`, .. for each head `h`, counted over all layers.
fn channels(layers: u32, kv_heads: u32, channels: u32) -> LabelChannels {
    let heads = (0..layers * kv_heads).flat_map(|head| (head..head + channels).collect::<Vec<_>>());
    LabelChannels::new(layers, kv_heads, channels, heads.collect()).expect("they ascend")
}

#[test]
fn labels_are_planes_of_the_pool() {
    for layout in [Layout::LayerFirst, Layout::PageFirst] {
        let shape = KvShape::heads(3, 8);
        let dtype = KvDtype::F16;
        let plain = PoolConfig { layers: 2, shape, dtype, layout, ..PoolConfig::default() };
        let pool = PoolConfig { label_channels: 5, ..plain };
        let token = |config: PoolConfig| config.bytes_per_token().expect("a valid pool");
        assert_eq!(token(pool) - token(plain), 2 * 3 * 5 * 2);
        let made = pool.layout().expect("a valid pool");
        assert_eq!((made.label_channels(), made.planes().len()), (5, 3));
        let labels = made.planes()[2];
        let wanted = (PlaneName::Labels, 3, 5, KvDtype::F16, PlaneOrder::BySlot);
        let Plane { name, heads, elements, dtype, order } = labels;
        assert_eq!((name, heads, elements, dtype, order), wanted);
        assert!(made.strides(PlaneName::Labels).is_some());
        let fp8 = PoolConfig { dtype: KvDtype::Fp8E4M3, scaling: Scaling::ByToken, ..pool };
        let fp8 = fp8.layout().expect("a valid pool");
        assert_eq!((fp8.planes()[4].name, fp8.planes()[4].dtype), (PlaneName::Labels, KvDtype::Bf16));
        let wide = PoolConfig { label_channels: 9, ..plain }.layout();
        assert_eq!(wide, Err(ConfigError::Limit { name: "label_channels", value: 9, max: 8 }));
    }
}

#[test]
fn label_channels_that_do_not_fit_are_refused() {
    let made = |values: &[u32]| LabelChannels::new(1, 2, 2, values.to_vec());
    assert_eq!(made(&[0, 1, 2]), Err(LabelError::Count { actual: 3, wanted: 4 }));
    let layer = LayerId::new(0);
    let order = |kv_head, channel| Err(LabelError::Order { layer, kv_head, channel });
    assert_eq!(made(&[0, 0, 2, 3]), order(0, 0));
    assert_eq!(made(&[0, 1, 3, 2]), order(1, 2));
    let pool =
        PoolConfig { shape: KvShape::heads(2, 4), label_channels: 2, tp_size: 2, tp_rank: 1, ..PoolConfig::default() };
    let model = made(&[0, 3, 1, 2]).expect("they ascend");
    let local = model.local(&pool).expect("they are the model's");
    assert_eq!(local.values(), [1, 2]);
    let layout = pool.layout().expect("a valid pool");
    let check = |given: Option<&LabelChannels>| LabelChannels::check_pool(given, &layout);
    assert_eq!(check(Some(&local)), Ok(()));
    assert_eq!(check(None), Err(LabelError::Missing { channels: 2 }));
    let size = LabelError::Size { given: [1, 2, 2], pool: [1, 1, 2] };
    assert_eq!(check(Some(&model)), Err(size));
    let past = LabelChannels::new(1, 1, 2, vec![1, 4]).expect("they ascend");
    let error = LabelError::Channel { layer, kv_head: 0, channel: 4, head_dim: 4 };
    assert_eq!(check(Some(&past)), Err(error));
    let plain = PoolConfig { label_channels: 0, ..pool }.layout().expect("a valid pool");
    assert_eq!(LabelChannels::check_pool(Some(&local), &plain), Err(LabelError::NoLabels));
    assert_eq!(LabelChannels::check_pool(None, &plain), Ok(()));
    let other = PoolConfig { label_channels: 3, ..pool };
    let size = LabelError::Size { given: [1, 2, 2], pool: [1, 2, 3] };
    assert_eq!(model.local(&other), Err(size));
}

#[test]
fn label_channels_are_part_of_the_fingerprint() {
    let pool = PoolConfig { shape: KvShape::heads(2, 8), label_channels: 3, ..PoolConfig::default() };
    let layout = pool.layout().expect("a valid pool");
    let fingerprint = |values: Vec<u32>| {
        let labels = LabelChannels::new(1, 2, 3, values).expect("they ascend");
        layout.page_fingerprint(None, Some(&labels))
    };
    let first = fingerprint(channels(1, 2, 3).values().to_vec());
    assert_ne!(first, fingerprint(vec![0, 1, 2, 1, 2, 4]));
    let plain = PoolConfig { label_channels: 0, ..pool }.layout().expect("a valid pool");
    assert_ne!(first, plain.page_fingerprint(None, None));
}

#[test]
fn layers_of_groups_have_places_of_their_own() {
    let mut rng = Rng::new(7);
    for _ in 0..300 {
        let (count, layers) = (rng.within(1, 4) as usize, rng.pick(&[4, 9, 62, 64, 65, 130, 256]));
        let all = [Reach::All, Reach::Window(5), Reach::Chunk(64), Reach::Window(1)];
        let mut layer_groups: Vec<u8> = (0..layers).map(|_| rng.below(count as u64) as u8).collect();
        (0..count).for_each(|group| layer_groups[group] = group as u8);
        let groups = Groups::new(&all[..count], &layer_groups).expect("each has a layer");
        let config = PoolConfig { layers, groups, page_size: 2, ..PoolConfig::default() };
        let layout = config.layout().expect("a small pool");
        // The expected places: each layer takes the next place of its group.
        let sizes: Vec<u32> =
            (0..count as u8).map(|group| layer_groups.iter().filter(|other| **other == group).count() as u32).collect();
        let tracks: Vec<u32> = sizes.iter().map(|size| size.div_ceil(sizes[0])).collect();
        assert_eq!((layout.lanes(), layout.tracks()), (sizes[0], tracks.iter().sum()));
        assert_eq!(layout.page_bytes(), u64::from(sizes[0]) * 2 * 2 * 64 * 4);
        let mut next = vec![0; count];
        for (layer, &group) in (0..).map(LayerId::new).zip(&layer_groups) {
            let (group, index) = (u32::from(group), next[usize::from(group)]);
            next[group as usize] += 1;
            let track = tracks[..group as usize].iter().sum::<u32>() + index / sizes[0];
            let place = LayerPlace { group, track, lane: index % sizes[0] };
            assert_eq!(layout.place(layer), place, "{layer:?} of {layer_groups:?}");
            assert_eq!(layout.tracks_of(group), tracks[group as usize]);
        }
    }
}

#[test]
fn invalid_groups_are_refused() {
    let (all, window) = (Reach::All, Reach::Window(8));
    let reach = |group, reach| Err(ConfigError::Reach { group, reach });
    let limit = |name, value, max| Err(ConfigError::Limit { name, value, max });
    let layer = LayerId::new(1);
    let many = [all, window, window, window, window];
    for (reaches, layers, want) in [
        (&[window, all][..], &[0, 1][..], reach(0, window)),
        (&[all, all, window], &[0, 1, 2], reach(2, window)),
        (&[all, Reach::Window(0)], &[0, 1], reach(1, Reach::Window(0))),
        (&[all, window, Reach::Chunk(0)], &[0, 1, 2], reach(2, Reach::Chunk(0))),
        (&[all, Reach::Chunk(24)], &[0, 1], reach(1, Reach::Chunk(24))),
        (&[all, window], &[0, 2], Err(ConfigError::LayerGroup { layer, group: 2, groups: 2 })),
        (&[all, window], &[1, 1], Err(ConfigError::EmptyGroup { group: 0 })),
        (&[all, window], &[0, 0], Err(ConfigError::EmptyGroup { group: 1 })),
        (&[], &[], Err(ConfigError::EmptyGroup { group: 0 })),
        (&many, &[0, 1, 2, 3], limit("groups", 5, 4)),
        (&[all, window], &[0; 257], limit("layers", 257, 256)),
    ] {
        assert_eq!(Groups::new(reaches, layers), want, "{reaches:?} {layers:?}");
    }
    let groups = Groups::new(&[all, window], &[0, 1, 1]).expect("valid groups");
    let config = PoolConfig { layers: 2, groups, ..PoolConfig::default() };
    assert_eq!(config.layout(), Err(ConfigError::GroupedLayers { layers: 2, grouped: 3 }));
    assert_eq!(Groups::new(&[all], &[0, 0]), Ok(Groups::ONE));
}

#[test]
fn layers_in_no_group_are_in_group_0() {
    let groups = Groups::new(&[Reach::All, Reach::Window(8)], &[0, 1]).expect("valid groups");
    assert_eq!([0, 1, 2, 256].map(|layer| groups.group(LayerId::new(layer))), [0, 1, 0, 0]);
    assert_eq!(Groups::ONE.group(LayerId::new(u32::MAX)), 0);
}

#[test]
fn groups_that_do_not_exist_have_no_layers() {
    let groups = Groups::new(&[Reach::All, Reach::Window(8)], &[0, 1, 1]).expect("valid groups");
    assert_eq!([0, 1, 2, 3, 4, 5, u32::MAX].map(|group| groups.layers_of(group)), [1, 2, 0, 0, 0, 0, 0]);
}

#[test]
fn reaches_never_fall() {
    for reach in [Reach::All, Reach::Window(1), Reach::Window(7), Reach::Chunk(1), Reach::Chunk(16)] {
        for at in 0..100 {
            let want = match reach {
                Reach::All => 0,
                Reach::Window(size) => (0..=at).find(|seen| at - seen < size).expect("itself"),
                Reach::Chunk(size) => (0..=at).find(|seen| seen / size == at / size).expect("itself"),
                Reach::State => at.saturating_sub(1),
            };
            assert_eq!(reach.first(at), want);
            assert!(reach.first(at) <= reach.first(at + 1));
        }
    }
}
