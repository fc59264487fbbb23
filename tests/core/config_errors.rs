//! Invalid configs: each error names its value, and no numbers cause a panic.

use kvarena::config::{EngineShape, PrefixMode};
use kvarena::layout::{Groups, Layout, PoolLayout, Reach, Scaling, StatePart, TableShape};
use kvarena::testkit::rng::Rng;
use kvarena::{Capacity, ConfigError, EngineConfig, KvDtype, KvShape, LayerId, PageId, PoolConfig, SlotId};

use super::layout::latent;

#[test]
fn every_config_error_names_its_value() {
    use ConfigError::*;
    let good = PoolConfig::default();
    let (huge, fp8) = (u32::MAX, KvDtype::Fp8E4M3);
    let pools = [
        (PoolConfig { layers: 0, ..good }, Zero { name: "layers" }),
        (PoolConfig { shape: KvShape::heads(0, 64), ..good }, Zero { name: "kv_heads" }),
        (PoolConfig { shape: KvShape::heads(1, 0), ..good }, Zero { name: "head_dim" }),
        (PoolConfig { shape: latent(0, 64), ..good }, Zero { name: "rank" }),
        (PoolConfig { shape: latent(512, 0), ..good }, Zero { name: "rope" }),
        (PoolConfig { shape: latent(huge, 1), ..good }, Overflow { name: "rank + rope" }),
        (PoolConfig { shape: latent(512, 64), dtype: fp8, ..good }, LatentScaling { dtype: fp8 }),
        (PoolConfig { tp_size: 0, ..good }, Zero { name: "tp_size" }),
        (PoolConfig { page_size: 0, ..good }, Zero { name: "page_size" }),
        (PoolConfig { capacity: Capacity::Pages(0), ..good }, Zero { name: "page_count" }),
        (PoolConfig { page_size: 1025, ..good }, PageSize { page_size: 1025, max: 1024 }),
        (PoolConfig { capacity: Capacity::Pages(huge), ..good }, PageCount { page_count: huge.into() }),
        (
            PoolConfig { capacity: Capacity::Bytes(u64::MAX), page_size: 1, ..good },
            PageCount { page_count: u64::MAX / 512 },
        ),
        (PoolConfig { capacity: Capacity::Bytes(8191), ..good }, Budget { bytes: 8191, page_bytes: 8192 }),
        (PoolConfig { capacity: Capacity::Bytes(0), ..good }, Budget { bytes: 0, page_bytes: 8192 }),
        (PoolConfig { shape: KvShape::heads(6, 64), tp_size: 4, ..good }, HeadSplit { kv_heads: 6, tp_size: 4 }),
        (PoolConfig { tp_rank: 1, ..good }, Rank { tp_rank: 1, tp_size: 1 }),
        (PoolConfig { layers: huge, shape: KvShape::heads(huge, huge), ..good }, Overflow { name: "bytes per token" }),
        (PoolConfig { layers: 1 << 31, ..good }, Limit { name: "layers", value: 1 << 31, max: (1 << 31) - 1 }),
        (
            PoolConfig { layers: huge / 2, shape: KvShape::heads(1, 1 << 28), page_size: 1024, ..good },
            Overflow { name: "page_bytes" },
        ),
        (
            PoolConfig {
                layers: huge / 2,
                shape: KvShape::heads(1, 1 << 20),
                page_size: 1,
                capacity: Capacity::Pages(huge - 1),
                ..good
            },
            Overflow { name: "pool bytes" },
        ),
        (
            PoolConfig {
                layers: huge / 2,
                shape: KvShape::heads(1, 1 << 20),
                page_size: 1,
                capacity: Capacity::Pages(1),
                swap_pages: 1 << 12,
                ..good
            },
            Overflow { name: "host bytes" },
        ),
        (
            PoolConfig { capacity: Capacity::Pages(10), swap_pages: huge - 12, stage_pages: 2, ..good },
            Limit { name: "swap_pages + stage_pages", value: u64::from(huge) - 10, max: u64::from(huge) - 11 },
        ),
    ];
    for (config, error) in pools {
        assert_eq!(config.layout(), Err(error), "{config:?}");
        assert_eq!(EngineConfig::from(config).shape(), Err(error), "{config:?}");
        assert!(!error.to_string().is_empty());
    }
    let grouped = PoolConfig { layers: 3, groups: windows(1), ..good };
    let good = EngineConfig::from(good);
    let engines = [
        (EngineConfig { record_pages: 0, ..good }, RecordPages { record_pages: 0, max: 64 }),
        (EngineConfig { record_pages: 6, ..good }, RecordPages { record_pages: 6, max: 64 }),
        (EngineConfig { record_pages: 128, ..good }, RecordPages { record_pages: 128, max: 64 }),
        (EngineConfig { record_pages: 2, pool: grouped, ..good }, RecordPages { record_pages: 2, max: 1 }),
        (
            EngineConfig { record_pages: 4, pool: PoolConfig { stage_pages: 3, ..good.pool }, ..good },
            StagePages { stage_pages: 3, min: 4 },
        ),
        (
            EngineConfig { pool: PoolConfig { stage_pages: 1, ..grouped }, ..good },
            StagePages { stage_pages: 1, min: 2 },
        ),
        (EngineConfig { max_sequences: 0, ..good }, Zero { name: "max_sequences" }),
        (EngineConfig { max_sequence_len: 0, ..good }, Zero { name: "max_sequence_len" }),
        (EngineConfig { max_tokens: 0, ..good }, Zero { name: "max_tokens" }),
        (EngineConfig { max_steps: 0, ..good }, Zero { name: "max_steps" }),
        (
            EngineConfig { max_sequences: 1 << 20, max_steps: 1 << 11, ..good },
            Limit { name: "max_sequences * max_steps", value: 1 << 31, max: 1 << 30 },
        ),
        (EngineConfig { max_tokens: u64::MAX, ..good }, Overflow { name: "page table words" }),
    ];
    for (config, error) in engines {
        assert_eq!(config.shape(), Err(error), "{config:?}");
    }
    assert_eq!(TableShape::new(0, 1, 1, 1), Err(Zero { name: "page_size" }));
    // First the directory has too many words, then the leaves.
    let directory = TableShape::new(1, 1 << 20, u32::MAX, 1);
    assert_eq!(directory, Err(Overflow { name: "page table words" }));
    let leaves = TableShape::new(1, 1, 1, 1 << 33);
    assert_eq!(leaves, Err(Overflow { name: "page table words" }));
}

#[test]
fn a_model_without_heads_is_refused_by_every_method() {
    let config = PoolConfig { shape: KvShape::heads(0, 64), ..Default::default() };
    let refused = ConfigError::Zero { name: "kv_heads" };
    assert_eq!(config.first_kv_head(), Err(refused));
    assert_eq!(config.local_kv_heads(), Err(refused));
    assert_eq!(config.bytes_per_token(), Err(refused));
    assert_eq!(config.layout(), Err(refused));
}

#[test]
fn any_numbers_give_a_pool_or_an_error_and_never_a_panic() {
    let mut rng = Rng::new(3);
    let mut number = || {
        let bits = rng.below(33);
        (rng.bits() & ((1_u64 << bits) - 1)) as u32
    };
    let mut made = 0;
    for _ in 0..200_000 {
        let config = PoolConfig {
            layers: number(),
            shape: match number() % 3 {
                0 => latent(number(), number()),
                _ => KvShape::heads(number(), number()),
            },
            dtype: [KvDtype::F32, KvDtype::F16, KvDtype::Fp8E4M3][number() as usize % 3],
            scaling: Scaling::Static,
            label_channels: 0,
            groups: Groups::ONE,
            page_size: number() % 1030,
            capacity: match number() % 2 {
                0 => Capacity::Pages(number()),
                _ => Capacity::Bytes(u64::from(number()) << (number() % 32)),
            },
            layout: [Layout::LayerFirst, Layout::PageFirst][number() as usize % 2],
            tp_size: if number() % 2 == 0 { 1 } else { number() },
            ..PoolConfig::default()
        };
        let Ok(pool) = config.layout() else { continue };
        made += 1;
        let by_token = PoolConfig { scaling: Scaling::ByToken, ..config };
        check_made_scales(&by_token, &pool);
        let element = u128::from(pool.layers())
            * u128::from(pool.kv_heads())
            * u128::from(pool.head_dim())
            * u128::from(pool.page_size())
            * u128::from(pool.dtype().size());
        let planes = if pool.is_latent() { 1 } else { 2 };
        let page_bytes = planes * element;
        assert_eq!(u128::from(pool.page_bytes()), page_bytes);
        assert_eq!(u128::from(pool.total_bytes()), page_bytes * u128::from(pool.page_count()));
        if let Capacity::Bytes(bytes) = config.capacity {
            assert!(pool.total_bytes() <= bytes && bytes - pool.total_bytes() < pool.page_bytes());
        }
        let last = PageId::new(pool.page_count() - 1);
        let piece = pool.piece(last, pool.pieces_per_page() - 1);
        assert_eq!(piece.end, pool.total_bytes());
        let slot = SlotId::new(pool.slot_count() - 1);
        let plane = pool.planes().last().expect("a pool has planes").name;
        let row = pool.row(plane, LayerId::new(pool.layers() - 1), slot);
        assert_eq!(row.map(|row| row.end), Some(pool.total_bytes()));
    }
    assert!(made > 1000, "{made}");
}

/// Checks the same pool with scales by token: its pages are larger by the scales and padding. Pools that are not fp8
/// must be rejected.
fn check_made_scales(by_token: &PoolConfig, given: &PoolLayout) {
    let made = by_token.layout();
    if by_token.dtype != KvDtype::Fp8E4M3 {
        assert_eq!(made, Err(ConfigError::Scaling { dtype: by_token.dtype }));
        return;
    }
    let rows = u128::from(given.page_size()) * u128::from(given.kv_heads());
    let layers = u128::from(given.layers());
    let pieces = [1_u128, given.head_dim().into(), 4].map(|bytes| (rows * bytes).next_multiple_of(16));
    match made {
        Ok(made) => {
            let page_bytes = 2 * layers * (pieces[1] + pieces[2]);
            assert_eq!(u128::from(made.page_bytes()), page_bytes, "{by_token:?}");
            let token = 2 * layers * u128::from(given.kv_heads()) * (u128::from(given.head_dim()) + 4);
            assert_eq!(by_token.bytes_per_token().map(u128::from), Ok(token));
            if let Capacity::Bytes(bytes) = by_token.capacity {
                assert!(bytes - made.total_bytes() < made.page_bytes());
            }
        }
        Err(ConfigError::Overflow { .. } | ConfigError::Budget { .. }) => {}
        Err(ConfigError::Limit { name: "layers", .. } | ConfigError::PageCount { .. }) => {}
        Err(error) => panic!("{by_token:?}: {error}"),
    }
}

/// A field of a config: sets it to a number, or to the number's low bits.
type Field = fn(&mut EngineConfig, u64);

const FIELDS: [Field; 20] = [
    |config, x| config.pool.layers = x as u32,
    |config, x| match &mut config.pool.shape {
        KvShape::Heads { kv_heads: first, .. } | KvShape::Latent { rank: first, .. } => {
            *first = x as u32;
        }
        _ => unreachable!("there are two shapes"),
    },
    |config, x| match &mut config.pool.shape {
        KvShape::Heads { head_dim: second, .. } | KvShape::Latent { rope: second, .. } => {
            *second = x as u32;
        }
        _ => unreachable!("there are two shapes"),
    },
    |config, x| config.pool.label_channels = x as u32,
    |config, x| config.pool.page_size = x as u32,
    |config, x| config.pool.capacity = Capacity::Pages(x as u32),
    |config, x| config.pool.capacity = Capacity::Bytes(x),
    |config, x| config.pool.swap_pages = x as u32,
    |config, x| config.pool.stage_pages = x as u32,
    |config, x| config.pool.tp_size = x as u32,
    |config, x| config.pool.tp_rank = x as u32,
    |config, x| config.pool.groups = chunks(x as u32),
    |config, x| config.pool.groups = windows(x as u32),
    |config, x| config.max_sequences = x as u32,
    |config, x| config.max_sequence_len = x as u32,
    |config, x| config.max_tokens = x,
    |config, x| config.max_steps = x as u32,
    |config, x| config.max_step_tokens = x as u32,
    |config, x| config.promise_ahead = x as u32,
    |config, x| config.event_pages = x as u32,
];

/// Returns three groups of one layer each, with chunks of the largest power of two up to `size`.
fn chunks(size: u32) -> Groups {
    let chunk = Reach::Chunk(1 << size.max(1).ilog2());
    Groups::new(&[Reach::All, chunk, Reach::Window(7)], &[0, 1, 2]).expect("three groups")
}

/// Returns two groups of one layer and of two layers. The second one keeps a state of `bytes` bytes a layer.
fn states(bytes: u32) -> Groups {
    let part = StatePart { heads: 1, head_bytes: bytes };
    let groups = Groups::new(&[Reach::All, Reach::State], &[0, 1, 1]).and_then(|groups| groups.with_state(1, &[part]));
    groups.expect("two groups")
}

/// Returns two groups of one layer and of two layers, with a window of `size`.
fn windows(size: u32) -> Groups {
    Groups::new(&[Reach::All, Reach::Window(size.max(1))], &[0, 1, 1]).expect("two groups")
}

/// Each two fields of a config, at the limits of their types and around powers of two.
#[test]
fn any_limits_give_an_engine_or_an_error_and_never_a_panic() {
    let values = [0, 1, 3, 1 << 16, 1 << 31, u64::from(u32::MAX) - 1, u64::from(u32::MAX), u64::MAX];
    let grouped = PoolConfig { layers: 3, groups: windows(1 << 30), ..Default::default() };
    let small = PoolConfig { page_size: 1, shape: KvShape::heads(1, 1), ..Default::default() };
    let latent =
        PoolConfig { shape: latent(512, 64), dtype: KvDtype::Fp8E4M3, scaling: Scaling::ByToken, ..Default::default() };
    let chunked = PoolConfig { layers: 3, groups: chunks(1), ..small };
    let mut made = 0;
    let stateful = PoolConfig { layers: 3, groups: states(1 << 10), ..Default::default() };
    for pool in [PoolConfig::default(), small, grouped, chunked, latent, stateful] {
        for (i, first) in FIELDS.iter().enumerate() {
            for second in &FIELDS[i..] {
                for (a, b) in values.into_iter().flat_map(|a| values.map(|b| (a, b))) {
                    let mut config = EngineConfig::from(pool);
                    first(&mut config, a);
                    second(&mut config, b);
                    let Ok(shape) = config.shape() else { continue };
                    made += 1;
                    check_shape(&config, &shape);
                }
            }
        }
    }
    assert!(made > 10_000, "{made}");
}

/// Compares the sizes of a shape with sums of 128 bits.
fn check_shape(config: &EngineConfig, shape: &EngineShape) {
    let layout = &shape.layout;
    let bytes = shape.bytes();
    assert_eq!(config.bytes(), Ok(bytes));
    assert!(shape.plan_bytes(u32::MAX, u32::MAX) > 0);
    let _ = EngineShape::from_bytes(&shape.to_bytes());
    let [page_size, page_bytes] = [u128::from(layout.page_size()), u128::from(layout.page_bytes())];
    for tokens in [0, 1, shape.max_sequence_len, u32::MAX] {
        let places = u128::from(tokens).div_ceil(page_size);
        let mut most = places;
        for group in 0..layout.groups().count() {
            if layout.groups().state_group() == Some(group) {
                let pages = if tokens > 0 { u128::from(layout.state_pages()) } else { 0 };
                let kept = u64::try_from(pages * page_bytes).unwrap_or(u64::MAX);
                assert_eq!(layout.sequence_bytes(group, tokens), kept, "{config:?}");
                most += pages * if config.prefix == PrefixMode::None { 1 } else { 2 };
                continue;
            }
            let tracks = u128::from(layout.tracks_of(group));
            let whole = u128::from(tokens) / page_size * page_size;
            let (first, reads) = match layout.groups().reach(group) {
                Reach::Window(size) => ((whole + 1).saturating_sub(size.into()), size),
                Reach::Chunk(size) => (whole / u128::from(size) * u128::from(size), size),
                _ => (0, 0),
            };
            let kept = (places - first / page_size) * tracks * page_bytes;
            let kept = u64::try_from(kept).unwrap_or(u64::MAX);
            assert_eq!(layout.sequence_bytes(group, tokens), kept, "{config:?}");
            if group > 0 {
                let ahead = u128::from(reads - 1) + u128::from(shape.promise_ahead);
                most += tracks * places.min(ahead.div_ceil(page_size) + 1);
            }
        }
        assert_eq!(u128::from(shape.most_pages(tokens)), most, "{config:?}");
    }
    for view in layout.views() {
        let last = PageId::new(view.page_count() - 1);
        let piece = view.piece(last, view.pieces_per_page() - 1);
        assert!(piece.end <= view.total_bytes());
        for plane in view.planes() {
            let strides = view.strides(plane.name).expect("it has the plane");
            assert!(strides.row(view.lanes() - 1, last, view.page_size() - 1) < view.total_bytes());
            assert!(view.page_strides(plane.name).is_some());
        }
    }
}

#[test]
fn sizes_beyond_32_bits_are_exact() {
    let reaches = [Reach::All, Reach::Window(1), Reach::Window(u32::MAX), Reach::Chunk(1 << 31)];
    assert_eq!(reaches.map(|reach| reach.first(u32::MAX)), [0, u32::MAX, 1, 1 << 31]);
    let reaches = [Reach::All, Reach::Window(u32::MAX)];
    let groups = Groups::new(&reaches, &[0, 1, 1, 1, 1]).expect("two groups");
    let (shape, capacity) = (KvShape::heads(1, 1), Capacity::Pages(1 << 31));
    let pool = PoolConfig { layers: 5, groups, shape, page_size: 1, capacity, ..Default::default() };
    let wide = EngineConfig { max_sequence_len: 1 << 30, max_sequences: 1, ..pool.into() };
    let wide = wide.shape().expect("a valid config");
    assert_eq!(wide.layout.tracks(), 5);
    assert_eq!(wide.most_pages(1 << 30), 5 << 30);
    let (shape, capacity) = (KvShape::heads(1 << 20, 1 << 20), Capacity::Pages(1));
    let large = PoolConfig { layers: 1, shape, page_size: 1024, capacity, ..pool };
    let large = PoolConfig { groups: Groups::ONE, ..large }.layout().expect("a valid pool");
    assert_eq!(large.page_bytes(), 1 << 53);
    assert_eq!([1 << 20, 1 << 31].map(|tokens| large.sequence_bytes(0, tokens)), [1 << 63, u64::MAX]);
    // Each group has a cell for each page.
    let reaches = [Reach::All, Reach::Window(8), Reach::Window(9), Reach::Window(10)];
    let groups = Groups::new(&reaches, &[0, 1, 2, 3]).expect("four groups");
    let cells = PoolConfig { layers: 4, groups, ..pool };
    let refused = Err(ConfigError::Overflow { name: "cells" });
    assert_eq!(EngineConfig::from(cells).shape(), refused);
    // A chunk of one token, and one token a page.
    let groups = Groups::new(&[Reach::All, Reach::Chunk(1)], &[0, 1]).expect("two groups");
    let narrow = PoolConfig { layers: 2, groups, page_size: 1, ..Default::default() };
    let refused = Err(ConfigError::Overflow { name: "page table words" });
    assert_eq!(EngineConfig { max_tokens: u64::MAX, ..narrow.into() }.shape(), refused);
}
