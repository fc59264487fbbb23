//! Tests the sizes of pools, the heads of ranks, the planes of latent rows and of scales, and the width of slots.

use kvarena::layout::{PlaneName, Scaling};
use kvarena::{Capacity, ConfigError, EngineConfig, KvDtype, KvShape, LayerId, PageId, PoolConfig};

#[test]
fn a_byte_budget_gives_as_many_whole_pages_as_fit() {
    let config = PoolConfig { layers: 3, shape: KvShape::heads(2, 5), page_size: 7, ..Default::default() };
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
                let config = PoolConfig { shape: KvShape::heads(kv_heads, 64), tp_size, tp_rank, ..Default::default() };
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

/// Returns the shape of latent rows.
pub(super) const fn latent(rank: u32, rope: u32) -> KvShape {
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
    let pool = |shape| PoolConfig { shape, ..config }.layout().expect("a valid pool");
    let fingerprint = |shape| pool(shape).page_fingerprint(None, None);
    assert_ne!(fingerprint(latent(512, 64)), fingerprint(latent(448, 128)));
    assert_eq!(pool(KvShape::heads(128, 64)).value_dim(), 64);
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
    let wanted =
        [(PlaneName::Latent, 512, dtype), (PlaneName::Rope, 64, KvDtype::Bf16), (PlaneName::KScales, 1, KvDtype::F32)];
    assert!(planes.eq(wanted), "{pool:?}");
    assert_eq!(pool.page_bytes(), 61 * 16 * 644);
    // Planes of odd rows also begin at aligned offsets.
    let (shape, layers) = (latent(3, 1), 1);
    let odd = PoolConfig { shape, layers, page_size: 1, ..config }.layout().expect("a valid pool");
    assert_eq!(odd.page_bytes(), 3 * 16);
}

#[test]
fn scales_made_at_the_store_are_planes_of_the_pool() {
    // 3 heads of 5 elements and pages of 7 tokens give pieces of 105 bytes. Scales by token add pieces of 84 bytes and
    // pad all pieces to multiples of 16.
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
        PoolConfig { shape: KvShape::heads(1, 1), page_size, capacity, ..Default::default() }.layout()
    };
    assert_eq!(pool(1 << 21, 1024).map(|pool| pool.slots_fit_i32()), Ok(true));
    assert_eq!(pool((1 << 21) + 1, 1024).map(|pool| pool.slots_fit_i32()), Ok(false));
    assert_eq!(pool((1 << 31) + 1, 1).map(|pool| pool.slots_fit_i32()), Ok(false));
}
