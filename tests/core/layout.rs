//! Compares the arithmetic of pools and page tables with plain enumeration.

use std::collections::BTreeSet;

use kvarena::testkit::rng::Rng;
use kvarena::{
    Capacity, ConfigError, EngineConfig, Groups, KvDtype, KvShape, LayerId, Layout, PageId,
    PlaneName, PoolConfig, PoolLayout, RowId, Scaling, SlotId, TableShape,
};

const LAYOUTS: [Layout; 2] = [Layout::LayerFirst, Layout::PageFirst];
const PLANES: [PlaneName; 2] = [PlaneName::K, PlaneName::V];

/// Returns small pools of heads in every layout and dtype.
fn small_pools() -> Vec<PoolLayout> {
    let mut rng = Rng::new(1);
    let mut pools = Vec::new();
    for i in 0..200 {
        let config = PoolConfig {
            layers: rng.within(1, 4) as u32,
            shape: KvShape::heads(rng.within(1, 3) as u32, rng.within(1, 5) as u32),
            dtype: rng.pick(&[KvDtype::F32, KvDtype::F16, KvDtype::Bf16, KvDtype::Fp8E4M3]),
            page_size: rng.within(1, 5) as u32,
            capacity: Capacity::Pages(rng.within(1, 6) as u32),
            layout: LAYOUTS[i % 2],
            ..Default::default()
        };
        pools.push(config.layout().expect("a valid pool"));
    }
    pools
}

/// Calls `each(plane, layer, page, offset, head, d)` for every element, in the documented physical order.
fn enumerate(pool: &PoolLayout, mut each: impl FnMut(PlaneName, u32, u32, u32, u32, u32)) {
    let (layers, pages) = (pool.layers(), pool.page_count());
    let mut piece = |plane, layer, page| {
        for offset in 0..pool.page_size() {
            for head in 0..pool.kv_heads() {
                for d in 0..pool.head_dim() {
                    each(plane, layer, page, offset, head, d);
                }
            }
        }
    };
    match pool.layout() {
        Layout::LayerFirst => {
            for plane in PLANES {
                for layer in 0..layers {
                    (0..pages).for_each(|page| piece(plane, layer, page));
                }
            }
        }
        Layout::PageFirst => {
            for page in 0..pages {
                for plane in PLANES {
                    (0..layers).for_each(|layer| piece(plane, layer, page));
                }
            }
        }
    }
}

#[test]
fn every_element_has_the_offset_of_its_place_in_the_physical_order() {
    for pool in small_pools() {
        let size = u64::from(pool.dtype().size());
        let mut next = 0;
        enumerate(&pool, |plane, layer, page, offset, head, d| {
            let strides = pool.strides(plane).expect("the pool has it");
            let slot = pool.slot(PageId::new(page), offset);
            assert_eq!(pool.page_of(slot), (PageId::new(page), offset), "{pool:?}");
            let within = u64::from(head) * strides.head + u64::from(d) * size;
            let row = pool.row(plane, LayerId::new(layer), slot).expect("the pool has it");
            let place = (plane, layer, page, offset, head, d);
            assert_eq!(row.start + within, next, "{pool:?} {place:?}");
            assert!(next + size <= row.end, "{pool:?} {place:?}");
            let by_strides = strides.origin
                + u64::from(layer) * strides.lane
                + u64::from(page) * strides.page
                + u64::from(offset) * strides.slot
                + within;
            assert_eq!(by_strides, next, "{pool:?}");
            next += size;
        });
        assert_eq!(next, pool.total_bytes(), "{pool:?}");
        assert_eq!(pool.total_bytes(), pool.page_bytes() * u64::from(pool.page_count()));
        let slots = u64::from(pool.page_count()) * u64::from(pool.page_size());
        assert_eq!(pool.slot_count(), slots);
    }
}

#[test]
fn pieces_tile_the_pool_and_are_each_page_in_one_order() {
    for pool in small_pools() {
        let mut all = Vec::new();
        for page in (0..pool.page_count()).map(PageId::new) {
            let pieces: Vec<_> = (0..pool.pieces_per_page()).map(|i| pool.piece(page, i)).collect();
            // The page's bytes in the order [K and V, L, S, H, D].
            let wanted = PLANES.into_iter().flat_map(|plane| {
                (0..pool.layers()).flat_map(move |layer| {
                    (0..pool.page_size()).flat_map(move |offset| {
                        let slot = pool.slot(page, offset);
                        pool.row(plane, LayerId::new(layer), slot).expect("the pool has it")
                    })
                })
            });
            assert!(pieces.iter().cloned().flatten().eq(wanted), "{pool:?} {page:?}");
            let piece_bytes = pool.page_bytes() / pieces.len() as u64;
            assert!(pieces.iter().all(|piece| piece.end - piece.start == piece_bytes));
            all.extend(pieces);
        }
        all.sort_by_key(|piece| piece.start);
        let ends = all.iter().scan(0, |end, piece| {
            let follows = piece.start == *end;
            *end = piece.end;
            Some((follows, piece.end))
        });
        let ends: Vec<_> = ends.collect();
        assert!(ends.iter().all(|(follows, _)| *follows), "{pool:?}: {all:?}");
        assert_eq!(ends.last().map(|(_, end)| *end), Some(pool.total_bytes()));
    }
}

#[test]
fn a_byte_budget_gives_as_many_whole_pages_as_fit() {
    let config =
        PoolConfig { layers: 3, shape: KvShape::heads(2, 5), page_size: 7, ..Default::default() };
    let page_bytes = 2 * 3 * 2 * 5 * 7 * 4;
    for bytes in [page_bytes, page_bytes + 1, 2 * page_bytes - 1, 2 * page_bytes, 1 << 30] {
        let capacity = Capacity::Bytes(bytes);
        let pool = PoolConfig { capacity, ..config }.layout().expect("room for a page");
        assert_eq!(u64::from(pool.page_count()), bytes / page_bytes);
        assert_eq!(pool.page_bytes(), page_bytes);
    }
    let capacity = Capacity::Bytes(page_bytes - 1);
    let refused = PoolConfig { capacity, ..config }.layout();
    assert_eq!(refused, Err(ConfigError::Budget { bytes: page_bytes - 1, page_bytes }));
}

#[test]
fn ranks_split_or_replicate_the_heads() {
    for kv_heads in 1..=16 {
        for tp_size in 1..=32 {
            let mut owners = vec![0; kv_heads as usize];
            for tp_rank in 0..tp_size {
                let config = PoolConfig {
                    shape: KvShape::heads(kv_heads, 64),
                    tp_size,
                    tp_rank,
                    ..Default::default()
                };
                let divides = kv_heads % tp_size == 0 || tp_size % kv_heads == 0;
                let Ok(local) = config.local_kv_heads() else {
                    assert!(!divides, "{kv_heads} heads, {tp_size} ranks");
                    let refused = Err(ConfigError::HeadSplit { kv_heads, tp_size });
                    assert_eq!(config.first_kv_head(), refused);
                    assert_eq!(config.layout().map(|_| 0), refused);
                    continue;
                };
                assert!(divides);
                assert_eq!(config.layout().map(|pool| pool.kv_heads()), Ok(local));
                let first = config.first_kv_head().expect("checked above");
                for owner in &mut owners[first as usize..(first + local) as usize] {
                    *owner += 1;
                }
                // Neighbouring ranks have the same or neighbouring heads.
                assert_eq!(first, tp_rank * kv_heads / tp_size);
            }
            let replicas = (tp_size / kv_heads).max(1);
            assert!(owners.iter().all(|&n| n == 0 || n == replicas), "{kv_heads} {tp_size}");
        }
    }
}

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
        (
            PoolConfig { capacity: Capacity::Pages(huge), ..good },
            PageCount { page_count: huge.into() },
        ),
        (
            PoolConfig { capacity: Capacity::Bytes(u64::MAX), page_size: 1, ..good },
            PageCount { page_count: u64::MAX / 512 },
        ),
        (
            PoolConfig { capacity: Capacity::Bytes(8191), ..good },
            Budget { bytes: 8191, page_bytes: 8192 },
        ),
        (
            PoolConfig { capacity: Capacity::Bytes(0), ..good },
            Budget { bytes: 0, page_bytes: 8192 },
        ),
        (
            PoolConfig { shape: KvShape::heads(6, 64), tp_size: 4, ..good },
            HeadSplit { kv_heads: 6, tp_size: 4 },
        ),
        (PoolConfig { tp_rank: 1, ..good }, Rank { tp_rank: 1, tp_size: 1 }),
        (
            PoolConfig { layers: huge, shape: KvShape::heads(huge, huge), ..good },
            Overflow { name: "bytes per token" },
        ),
        (
            PoolConfig { layers: 1 << 31, ..good },
            Limit { name: "layers", value: 1 << 31, max: (1 << 31) - 1 },
        ),
        (
            PoolConfig {
                layers: huge / 2,
                shape: KvShape::heads(1, 1 << 28),
                page_size: 1024,
                ..good
            },
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
                host_pages: 1 << 12,
                ..good
            },
            Overflow { name: "host bytes" },
        ),
        (
            PoolConfig {
                capacity: Capacity::Pages(10),
                host_pages: huge - 12,
                stage_pages: 2,
                ..good
            },
            Limit {
                name: "host_pages + stage_pages",
                value: u64::from(huge) - 10,
                max: u64::from(huge) - 11,
            },
        ),
    ];
    for (config, error) in pools {
        assert_eq!(config.layout(), Err(error), "{config:?}");
        assert_eq!(EngineConfig::from(config).shape(), Err(error), "{config:?}");
        assert!(!error.to_string().is_empty());
    }
    let good = EngineConfig::from(good);
    let engines = [
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
    // The chunks have few words, and the directory has too many.
    let directory = TableShape::new(1, 1 << 20, u32::MAX, 1);
    assert_eq!(directory, Err(Overflow { name: "page table words" }));
}

const fn latent(rank: u32, rope: u32) -> KvShape {
    KvShape::Latent { rank, rope }
}

#[test]
fn latent_rows_are_one_plane_that_every_rank_holds() {
    let (shape, dtype) = (latent(512, 64), KvDtype::Bf16);
    let config = PoolConfig { layers: 61, shape, dtype, tp_size: 128, ..Default::default() };
    for tp_rank in [0, 5, 127] {
        let config = PoolConfig { tp_rank, ..config };
        assert_eq!(config.bytes_per_token(), Ok(61 * 1152));
        assert_eq!((config.local_kv_heads(), config.first_kv_head()), (Ok(1), Ok(0)));
        let pool = config.layout().expect("a valid pool");
        assert_eq!((pool.kv_heads(), pool.head_dim(), pool.value_dim()), (1, 576, 512));
        assert_eq!((pool.is_latent(), pool.page_bytes()), (true, 61 * 16 * 1152));
        let [plane] = pool.planes() else { panic!("{pool:?}") };
        assert_eq!((plane.name, plane.heads, plane.elements), (PlaneName::Latent, 1, 576));
        let row = pool.row(PlaneName::Latent, LayerId::new(2), pool.slot(PageId::new(3), 5));
        let start = 3 * pool.page_bytes() + (2 * 16 + 5) * 1152;
        assert_eq!(row, Some(start..start + 1152));
        assert_eq!((pool.strides(PlaneName::K), pool.strides(PlaneName::V)), (None, None));
    }
    // The fingerprint covers which elements form V.
    let of = |shape| PoolConfig { shape, ..config }.layout().expect("a valid pool");
    let fingerprint = |shape| of(shape).page_fingerprint(None, None);
    assert_ne!(fingerprint(latent(512, 64)), fingerprint(latent(448, 128)));
    assert_eq!(of(KvShape::heads(128, 64)).value_dim(), 64);
}

#[test]
fn quantised_latent_rows_are_bytes_a_scale_and_a_rope() {
    let (dtype, scaling) = (KvDtype::Fp8E4M3, Scaling::ByToken);
    let shape = latent(512, 64);
    let config = PoolConfig { layers: 61, shape, dtype, scaling, tp_size: 8, ..Default::default() };
    assert_eq!(config.bytes_per_token(), Ok(61 * (512 + 2 * 64 + 4)));
    let pool = config.layout().expect("a valid pool");
    assert_eq!((pool.head_dim(), pool.value_dim()), (576, 512));
    assert_eq!((pool.scaling(), pool.is_latent()), (Some(Scaling::ByToken), true));
    let planes = pool.planes().iter().map(|plane| (plane.name, plane.elements, plane.dtype));
    let wanted = [
        (PlaneName::Latent, 512, dtype),
        (PlaneName::Rope, 64, KvDtype::Bf16),
        (PlaneName::KScales, 1, KvDtype::F32),
    ];
    assert!(planes.eq(wanted), "{pool:?}");
    assert_eq!(pool.page_bytes(), 61 * 16 * 644);
    // Planes of odd rows also begin at aligned offsets.
    let (shape, layers) = (latent(3, 1), 1);
    let odd = PoolConfig { shape, layers, page_size: 1, ..config }.layout().expect("a valid pool");
    assert_eq!(odd.page_bytes(), 3 * 16);
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
            layout: LAYOUTS[number() as usize % 2],
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

/// Checks the same pool with scales made at the store, if supported: it is larger by the scales and padding.
fn check_made_scales(by_token: &PoolConfig, given: &PoolLayout) {
    let made = by_token.layout();
    if by_token.dtype != KvDtype::Fp8E4M3 {
        assert_eq!(made, Err(ConfigError::Scaling { dtype: by_token.dtype }));
        return;
    }
    let rows = u128::from(given.page_size()) * u128::from(given.kv_heads());
    let layers = u128::from(given.layers());
    let pieces =
        [1_u128, given.head_dim().into(), 4].map(|bytes| (rows * bytes).next_multiple_of(16));
    match made {
        Ok(made) => {
            let page_bytes = 2 * layers * (pieces[1] + pieces[2]);
            assert_eq!(u128::from(made.page_bytes()), page_bytes, "{by_token:?}");
            let token =
                2 * layers * u128::from(given.kv_heads()) * (u128::from(given.head_dim()) + 4);
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

#[test]
fn scales_made_at_the_store_are_planes_of_the_pool() {
    // 3 heads of 5 and pages of 7 give pieces of 105 and of 84 bytes, padded.
    let pool = PoolConfig {
        layers: 2,
        shape: KvShape::heads(3, 5),
        dtype: KvDtype::Fp8E4M3,
        page_size: 7,
        ..Default::default()
    };
    let given = pool.layout().expect("a valid pool");
    assert_eq!((given.page_bytes(), given.planes().len()), (2 * 2 * 105, 2));
    assert_eq!(pool.bytes_per_token(), Ok(2 * 2 * 3 * 5));
    assert_eq!(given.scaling(), Some(Scaling::Static));
    let by_token = PoolConfig { scaling: Scaling::ByToken, ..pool };
    let made = by_token.layout().expect("a valid pool");
    assert_eq!((made.page_bytes(), made.planes().len()), (2 * (2 * 112 + 2 * 96), 4));
    assert_eq!(by_token.bytes_per_token(), Ok(2 * 2 * 3 * (5 + 4)));
    assert_eq!(made.scaling(), Some(Scaling::ByToken));
    for (plane, origin) in [(PlaneName::KScales, 4 * 112), (PlaneName::VScales, 4 * 112 + 2 * 96)] {
        let strides = made.strides(plane).expect("the pool has scales");
        assert_eq!((strides.origin, strides.lane), (origin, 96));
        assert_eq!((strides.slot, strides.head, strides.page), (4, 4 * 7, made.page_bytes()));
        assert_eq!(given.strides(plane), None);
    }
    assert_eq!(EngineConfig::from(by_token).bytes().map(|bytes| bytes.kv), Ok(made.total_bytes()));
    let plain = PoolConfig { dtype: KvDtype::Bf16, ..by_token };
    let refused = ConfigError::Scaling { dtype: KvDtype::Bf16 };
    assert_eq!((plain.layout(), plain.bytes_per_token()), (Err(refused), Err(refused)));
    assert!(refused.to_string().contains("Bf16"));
    assert_eq!(PoolConfig { scaling: Scaling::Static, ..plain }.layout().unwrap().scaling(), None);
}

#[test]
fn slot_mappings_are_32_bit_as_long_as_every_slot_fits() {
    let pool = |pages, page_size| {
        let capacity = Capacity::Pages(pages);
        PoolConfig { shape: KvShape::heads(1, 1), page_size, capacity, ..Default::default() }
            .layout()
    };
    assert_eq!(pool(1 << 21, 1024).map(|pool| pool.slots_fit_i32()), Ok(true));
    assert_eq!(pool((1 << 21) + 1, 1024).map(|pool| pool.slots_fit_i32()), Ok(false));
    assert_eq!(pool((1 << 31) + 1, 1).map(|pool| pool.slots_fit_i32()), Ok(false));
}

#[test]
fn page_tables_have_a_word_for_every_page_of_every_row() {
    for (page_size, rows, len_max, tokens) in
        [(1, 3, 5000, 9000), (16, 5, 700, 3500), (3, 2, 2048, 4000), (1024, 4, 5000, 5000)]
    {
        let table = TableShape::new(page_size, rows, len_max, tokens).expect("a small table");
        let pages_max = len_max.div_ceil(page_size);
        assert!(table.chunks_per_row * table.chunk_pages >= pages_max);
        // Words are distinct and in range: first the directory, then the chunks.
        let mut seen = BTreeSet::new();
        for row in (0..rows).map(RowId::new) {
            for chunk in 0..table.chunks_per_row {
                assert!(seen.insert(table.directory_word(row, chunk * table.chunk_pages)));
            }
        }
        for chunk in 0..table.chunk_count {
            for page in 0..table.chunk_pages {
                assert!(seen.insert(table.page_word(chunk, page)));
            }
        }
        assert_eq!(seen.len(), table.words());
        assert_eq!(seen.last().map(|&word| word as usize), Some(table.words() - 1));

        // The rows divide the tokens such that they need the most chunks. All get chunks, and every page is found
        // again.
        let mut words = vec![u32::MAX; table.words()];
        let chunk_tokens = table.chunk_pages * page_size;
        let mut chunks = (0..table.chunk_count).rev();
        let mut left = tokens;
        let mut lens = Vec::new();
        for row in 0..rows {
            let len = match row + 1 == rows {
                true => left.min(len_max.into()),
                false => left
                    .min(u64::from(len_max / chunk_tokens * chunk_tokens + 1))
                    .min(len_max.into()),
            };
            left -= len;
            lens.push(len as u32);
        }
        let page = |row: u32, index: u32| row * 100_000 + index;
        for (row, &len) in lens.iter().enumerate() {
            let id = RowId::new(row as u32);
            for index in 0..len.div_ceil(page_size) {
                if index % table.chunk_pages == 0 {
                    let chunk = chunks.next().expect("tokens that fit have their chunks");
                    words[table.directory_word(id, index) as usize] = chunk;
                }
                let chunk = words[table.directory_word(id, index) as usize];
                words[table.page_word(chunk, index) as usize] = page(row as u32, index);
            }
        }
        for (row, &len) in lens.iter().enumerate() {
            for index in 0..len.div_ceil(page_size) {
                let found = table.page(&words, RowId::new(row as u32), index);
                assert_eq!(found, PageId::new(page(row as u32, index)));
            }
        }
    }
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
