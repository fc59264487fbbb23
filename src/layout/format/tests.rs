//! Tests of pools whose groups have different shapes: fixed pools, and every byte of small random pools.

use crate::error::ConfigError;
use crate::id::{LayerId, PageId};
use crate::layout::{
    Capacity, Groups, KvDtype, KvScales, KvShape, Layout, Plane, PlaneOrder, PoolConfig, PoolLayout, Reach, ScaleError,
    Scaling,
};
use crate::testkit::rng::Rng;

/// Returns a small pool of two to four groups, some with their own shape.
fn random(rng: &mut Rng) -> PoolConfig {
    let own = |rng: &mut Rng, reach| if rng.one_in(4) { Reach::All } else { reach };
    let [window, chunk] = [Reach::Window(5), Reach::Chunk(64)];
    let mut reaches = [Reach::All, own(rng, window), own(rng, chunk), own(rng, Reach::Window(1))];
    let (count, layers) = (rng.within(2, 4) as usize, rng.within(4, 9) as u32);
    reaches[1..count].sort_by_key(|reach| *reach == Reach::All);
    let mut layer_groups: Vec<u8> = (0..layers).map(|_| rng.below(count as u64) as u8).collect();
    (0..count).for_each(|group| layer_groups[group] = group as u8);
    let mut groups = Groups::new(&reaches[..count], &layer_groups).expect("each has a layer");
    let scaling = rng.pick(&[Scaling::Static, Scaling::ByToken]);
    let dtypes = [KvDtype::F32, KvDtype::F16, KvDtype::Bf16, KvDtype::Fp8E4M3];
    let any = |rng: &mut Rng| {
        let dtype = rng.pick(&dtypes);
        let latent = rng.one_in(4) && (scaling == Scaling::ByToken || !dtype.is_quantised());
        let [a, b] = [rng.within(1, 3) as u32, rng.within(1, 9) as u32];
        let shape = if latent { KvShape::Latent { rank: a, rope: b } } else { KvShape::heads(a, b) };
        (shape, dtype)
    };
    for group in 1..count as u32 {
        if rng.one_in(4) {
            continue;
        }
        let (shape, dtype) = any(rng);
        let latent = matches!(shape, KvShape::Latent { .. });
        let dtype = Some(dtype).filter(|_| latent || !rng.one_in(4));
        groups = groups.with_shape(group, shape, dtype).expect("the group exists");
    }
    let (shape, dtype) = any(rng);
    let config = PoolConfig {
        layers,
        groups,
        shape,
        dtype,
        scaling,
        page_size: rng.within(1, 5) as u32,
        capacity: Capacity::Pages(rng.within(1, 3) as u32),
        layout: Layout::PageFirst,
        extra_bytes: if rng.one_in(3) { rng.within(1, 300) as u32 } else { 0 },
        ..PoolConfig::default()
    };
    let scaled = (0..4).any(|group| dtype_of(&config, group).is_quantised());
    PoolConfig { scaling: if scaled { scaling } else { Scaling::Static }, ..config }
}

fn dtype_of(config: &PoolConfig, group: u32) -> KvDtype {
    config.groups.shape(group).and_then(|own| own.dtype).unwrap_or(config.dtype)
}

/// Returns the bytes of one layer of a page, from a pool of this layer alone.
fn layer_bytes(config: &PoolConfig, group: u32) -> u64 {
    let shape = config.groups.shape(group).map_or(config.shape, |own| own.shape);
    let dtype = dtype_of(config, group);
    let scaling = if dtype.is_quantised() { config.scaling } else { Scaling::Static };
    let groups = Groups::ONE;
    let alone = PoolConfig { layers: 1, groups, shape, dtype, scaling, extra_bytes: 0, ..*config };
    alone.layout().expect("a small pool").page_bytes()
}

/// Returns the first byte and the length of each head of each slot of one layer in one page.
fn heads(pool: &PoolLayout, lane: u32, page: PageId) -> Vec<(u64, u64)> {
    let mut all = Vec::new();
    for plane in pool.planes() {
        let strides = pool.strides(plane.name).expect("the pool has it");
        for (slot, head) in (0..pool.page_size()).flat_map(|slot| (0..plane.heads).map(move |head| (slot, head))) {
            let at = strides.row(lane, page, slot) + strides.head * u64::from(head);
            assert!(at.is_multiple_of(plane.dtype.size().into()), "{pool:?} {plane:?}");
            assert!(plane.order == PlaneOrder::BySlot || strides.slot == 4, "{plane:?}");
            all.push((at, u64::from(plane.elements * plane.dtype.size())));
        }
    }
    all
}

#[test]
fn a_page_holds_all_lanes_of_a_group_without_overlap() {
    let mut rng = Rng::new(3);
    let mut left_over = 0;
    for _ in 0..400 {
        let config = random(&mut rng);
        let pool = config.layout().expect("a small pool");
        let mut layers_of = vec![0; config.groups.count() as usize];
        let mut tracks_before = 0;
        // The owners of the bytes of group 0's pages: its layers, those of the groups that share them, and the host.
        let mut shared = vec![false; pool.total_bytes() as usize];
        for group in 0..config.groups.count() {
            let layers = config.groups.layers_of(group);
            let bytes = layer_bytes(&config, group);
            let lanes = u64::from(pool.lanes_of(group));
            // A group with its own shape has as many lanes as fit, at most 256. Other groups have those of group 0.
            let as_first = group == 0 || pool.groups().shape(group).is_none();
            let fitting = pool.page_bytes() / bytes;
            let first = u64::from(config.groups.layers_of(0));
            let shares = config.groups.shares_pages(group);
            let wanted = match (shares, as_first) {
                (true, _) => u64::from(layers),
                (false, true) => first,
                (false, false) => fitting.min(256),
            };
            assert_eq!(lanes, wanted, "{config:?}");
            assert_eq!(pool.unused_bytes(group), pool.page_bytes() - lanes * bytes);
            left_over += u32::from(pool.unused_bytes(group) > 0);
            let tracks = if shares { 0 } else { u64::from(layers).div_ceil(lanes) as u32 };
            assert_eq!(pool.tracks_of(group), tracks);
            for layer in (0..pool.layers()).map(LayerId::new) {
                let place = pool.place(layer);
                assert_eq!(pool.of_group(group).place(layer), place);
                if place.group == group {
                    let index = &mut layers_of[group as usize];
                    assert_eq!(u64::from(place.lane), *index % lanes);
                    let first = if shares { 0 } else { tracks_before };
                    assert_eq!(u64::from(place.track - first), *index / lanes);
                    *index += 1;
                }
            }
            tracks_before += tracks;
            // In every group's view a page has the same bytes, and lanes do not overlap.
            let view = pool.of_group(group);
            let mut own = vec![false; pool.total_bytes() as usize];
            let owner = if group == 0 || shares { &mut shared } else { &mut own };
            for page in (0..pool.page_count()).map(PageId::new) {
                let start = u64::from(page.raw()) * pool.page_bytes();
                assert_eq!(view.piece(page, 0), start..start + pool.page_bytes());
                for (at, len) in (0..lanes as u32).flat_map(|lane| heads(&view, lane, page)) {
                    assert!(at >= start && at + len <= start + pool.page_bytes(), "{config:?}");
                    for byte in at..at + len {
                        assert!(!std::mem::replace(&mut owner[byte as usize], true), "{config:?}");
                    }
                }
            }
        }
        for page in (0..pool.page_count()).map(PageId::new) {
            let extra = pool.extra(page);
            let end = (u64::from(page.raw()) + 1) * pool.page_bytes();
            assert!(extra.end - extra.start == u64::from(config.extra_bytes) && extra.end <= end, "{config:?}");
            extra.for_each(|byte| assert!(!std::mem::replace(&mut shared[byte as usize], true), "{config:?}"));
        }
        assert_eq!(pool.tracks(), tracks_before);
        let of_layer = |layer: u32| {
            let group = config.groups.group(LayerId::new(layer));
            let view = pool.of_group(group);
            let bytes = |plane: &Plane| plane.heads * plane.elements * plane.dtype.size();
            u64::from(view.planes().iter().map(bytes).sum::<u32>())
        };
        assert_eq!(config.bytes_per_token(), Ok((0..config.layers).map(of_layer).sum()));
    }
    assert!(left_over > 100);
}

/// Returns a pool with two groups of layers: layer 0, and layers 1 and 2 with the given shape.
fn two(shape: KvShape, dtype: KvDtype) -> PoolConfig {
    let groups = Groups::new(&[Reach::All, Reach::Window(8)], &[0, 1, 1]).expect("valid groups");
    PoolConfig {
        layers: 3,
        groups: groups.with_shape(1, shape, dtype).expect("there is group 1"),
        shape: KvShape::heads(2, 64),
        dtype: KvDtype::Bf16,
        ..PoolConfig::default()
    }
}

#[test]
fn a_page_holds_a_layer_of_any_group() {
    let pool = two(KvShape::heads(8, 64), KvDtype::Bf16).layout().expect("a small pool");
    let page_bytes = 16 * 2 * 8 * 64 * 2;
    assert_eq!((pool.page_bytes(), pool.lanes(), pool.lanes_of(1)), (page_bytes, 1, 1));
    assert_eq!((pool.unused_bytes(0), pool.unused_bytes(1)), (page_bytes * 3 / 4, 0));
    // Five rows of 6 bytes, rounded up to a multiple of 4 bytes.
    let layers = [0, 0, 0, 0, 0, 1];
    let groups = Groups::new(&[Reach::All, Reach::Window(8)], &layers).expect("valid groups");
    let groups = groups.with_shape(1, KvShape::heads(1, 1), KvDtype::F32).expect("as above");
    let (shape, dtype) = (KvShape::Latent { rank: 1, rope: 2 }, KvDtype::F16);
    let config = PoolConfig { layers: 6, groups, shape, dtype, page_size: 1, ..Default::default() };
    let pool = config.layout().expect("a small pool");
    assert_eq!((pool.page_bytes(), pool.unused_bytes(0), pool.lanes_of(1)), (32, 2, 4));
}

#[test]
fn shapes_that_no_pool_has_are_refused() {
    let groups = Groups::new(&[Reach::All, Reach::Window(8)], &[0, 1, 1]).expect("valid groups");
    for group in [0, 2, 4, u32::MAX] {
        let own = groups.with_shape(group, KvShape::heads(1, 1), KvDtype::F32);
        assert_eq!(own, Err(ConfigError::GroupShape { group, groups: 2 }));
    }
    let one = two(KvShape::heads(1, 64), KvDtype::Bf16);
    let first = PoolConfig { layout: Layout::LayerFirst, ..one };
    assert_eq!(first.layout(), Err(ConfigError::LayerFirst { group: 1 }));
    let zero = two(KvShape::heads(1, 0), KvDtype::Bf16).layout();
    assert_eq!(zero, Err(ConfigError::Zero { name: "head_dim" }));
    let latent = two(KvShape::Latent { rank: 8, rope: 4 }, KvDtype::Fp8E4M3);
    let static_scales = ConfigError::LatentScaling { dtype: KvDtype::Fp8E4M3 };
    assert_eq!(latent.layout(), Err(static_scales));
    assert!(PoolConfig { scaling: Scaling::ByToken, ..latent }.layout().is_ok());
    let split = PoolConfig { tp_size: 2, ..two(KvShape::heads(3, 64), KvDtype::Bf16) };
    assert_eq!(split.layout(), Err(ConfigError::HeadSplit { kv_heads: 3, tp_size: 2 }));
    let wide = two(KvShape::heads(u32::MAX, u32::MAX), KvDtype::F32).layout();
    assert!(matches!(wide, Err(ConfigError::Overflow { .. })));
}

#[test]
fn a_group_that_is_given_the_pools_shape_has_none_of_its_own() {
    for label_channels in [0, 4] {
        let same = two(KvShape::heads(2, 64), KvDtype::Bf16);
        let groups = Groups::new(&[Reach::All, Reach::Window(8)], &[0, 1, 1]).expect("as before");
        let [same, plain] = [same, PoolConfig { groups, ..same }]
            .map(|config| PoolConfig { label_channels, ..config }.layout().expect("a small pool"));
        assert_eq!(same, plain);
        assert!(same.has_one_shape());
        assert_eq!(same.page_fingerprint(None, None), plain.page_fingerprint(None, None));
    }
}

#[test]
fn a_rank_has_its_heads_of_every_group() {
    let pool = PoolConfig { tp_size: 4, tp_rank: 3, ..two(KvShape::heads(8, 32), KvDtype::Fp8E4M3) };
    let layout = pool.layout().expect("a small pool");
    assert_eq!([0, 1].map(|group| layout.of_group(group).kv_heads()), [1, 2]);
    assert_eq!((layout.groups().shape(1).map(|own| own.shape)), Some(KvShape::heads(2, 32)));
    assert_eq!(layout.most_kv_heads(), 2);
    // A scale encodes its layer in thousands and its head, counted from 1, in ones.
    let scale = |i: u32| (1000 * (i / 16) + i % 16 / 2 + 1) as f32;
    let model = KvScales::new(3, 8, (0..3 * 8 * 2).map(scale).collect()).expect("above 0");
    let local = model.local(&pool).expect("the scales fit the model");
    let head = |layer, head| local.get(LayerId::new(layer), head)[0];
    // The last of 4 ranks has the last of two heads, and the last two of eight. Layer 0 has no second head: scale 1.
    assert_eq!([head(0, 0), head(0, 1)], [2.0, 1.0]);
    assert_eq!([head(1, 0), head(1, 1), head(2, 1)], [1007.0, 1008.0, 2008.0]);
    assert_eq!(local.check_pool(&layout), Ok(()));
    assert!(matches!(model.check_pool(&layout), Err(ScaleError::Size { pool_kv_heads: 2, .. })));
    let plain = two(KvShape::heads(8, 32), KvDtype::F16).layout().expect("a small pool");
    assert_eq!(local.check_pool(&plain), Err(ScaleError::NotStatic));
}

#[test]
fn the_fingerprint_covers_the_shape_of_every_group() {
    let fingerprint = |config: PoolConfig| config.layout().expect("a small pool").page_fingerprint(None, None);
    let mut all = vec![
        fingerprint(two(KvShape::heads(2, 64), KvDtype::Bf16)),
        fingerprint(two(KvShape::heads(2, 64), KvDtype::F16)),
        fingerprint(two(KvShape::heads(1, 64), KvDtype::Bf16)),
        fingerprint(two(KvShape::heads(1, 128), KvDtype::Bf16)),
        fingerprint(two(KvShape::Latent { rank: 60, rope: 4 }, KvDtype::Bf16)),
        fingerprint(two(KvShape::Latent { rank: 32, rope: 32 }, KvDtype::Bf16)),
    ];
    let count = all.len();
    all.sort_unstable();
    all.dedup();
    assert_eq!(all.len(), count);
}
