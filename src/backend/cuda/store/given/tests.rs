//! Compares the checks of strides with sets of bytes. These tests launch nothing; `tests/cuda/given.rs` opens pools.

use std::collections::BTreeSet;

use super::*;
use crate::layout::{Capacity, KvDtype, KvShape, PoolConfig};
use crate::testkit::rng::Rng;

/// Returns a pool whose heads have 16 bytes.
fn layout(heads: u32, page_size: u32, pages: u32) -> PoolLayout {
    let (shape, capacity) = (KvShape::heads(heads, 8), Capacity::Pages(pages));
    let config = PoolConfig { shape, dtype: KvDtype::Bf16, page_size, capacity, ..PoolConfig::default() };
    config.layout().expect("a valid pool")
}

fn given([page, slot, head]: [u64; 3]) -> GivenPool {
    GivenPool { regions: Vec::new(), layers: Vec::new(), page, slot, head }
}

/// Returns the first bytes of all heads in units of 16 bytes, or `None` if two heads are equal.
fn heads(layout: &PoolLayout, [page, slot, head]: [u64; 3]) -> Option<BTreeSet<u64>> {
    let (pages, slots, heads) = (layout.page_count().into(), layout.page_size().into(), layout.kv_heads().into());
    let mut found = BTreeSet::new();
    for p in 0_u64..pages {
        for s in 0_u64..slots {
            for h in 0_u64..heads {
                if !found.insert((p * page + s * slot + h * head) / 16) {
                    return None;
                }
            }
        }
    }
    Some(found)
}

#[test]
fn accepted_strides_keep_heads_apart_and_planes_meet_only_where_bytes_do() {
    let mut rng = Rng::new(1);
    let (mut accepted, mut met) = (0, 0);
    for _ in 0..40_000 {
        let [kv_heads, slots, pages] = [0; 3].map(|_| rng.within(1, 4) as u32);
        let layout = layout(kv_heads, slots, pages);
        let mut strides = [0; 3].map(|_| 16 * rng.within(1, 40));
        if rng.one_in(2) {
            // Strides of a contiguous order, sometimes with gaps.
            let counts = [u64::from(pages), slots.into(), kv_heads.into()];
            let mut next = 16;
            for axis in rng.pick(&[[2, 1, 0], [1, 2, 0], [0, 1, 2], [1, 0, 2]]) {
                strides[axis] = next + if rng.one_in(3) { 16 * rng.within(0, 3) } else { 0 };
                next = strides[axis] * counts[axis];
            }
        }
        let apart = heads(&layout, strides);
        let Ok(grid) = given(strides).grid(&layout) else { continue };
        let Some(apart) = apart else { panic!("{layout:?} {strides:?}: accepted heads that overlap") };
        let end = apart.last().expect("there is a head") * 16 + 16;
        assert_eq!(grid.bytes(), end.into(), "{layout:?} {strides:?}");
        accepted += 1;
        for _ in 0..8 {
            let distance = rng.within(0, end + 32);
            let other = |head: &u64| head * 16 + distance;
            let naive = apart.iter().map(other).any(|at| [at / 16, at.div_ceil(16)].iter().any(|n| apart.contains(n)));
            assert_eq!(grid.meets(distance.into()), naive, "{layout:?} {strides:?} {distance}");
            assert_eq!(grid.meets(-i128::from(distance)), naive, "{layout:?} {strides:?} -{distance}");
            met += u32::from(naive);
        }
    }
    assert!(accepted > 10_000 && met > 10_000, "{accepted} {met}");
}

#[test]
fn strides_near_the_limit_do_not_wrap() {
    let layout = layout(2, 4, 1 << 31);
    let max = u64::MAX - 15;
    let grid = given([max, 32, 16]).grid(&layout).expect("the strides nest");
    assert_eq!(grid.bytes(), u128::from(max) * u128::from((1_u32 << 31) - 1) + 128);
    assert!(grid.meets(i128::from(max)) && !grid.meets(i128::from(max) - 128) && grid.meets(127 - i128::from(max)));
    let error = |strides| given(strides).grid(&layout).expect_err("invalid strides");
    assert_eq!(error([max, max, 16]), GivenError::WideStride { stride: max }.into());
    assert_eq!(error([max, 32, max]), GivenError::WideStride { stride: max }.into());
    assert_eq!(error([u64::MAX, 32, 16]), GivenError::Alignment { value: u64::MAX }.into());
    assert_eq!(error([112, 32, 16]), GivenError::Stride { stride: 112, bytes: 128 }.into());
    assert_eq!(error([128, 16, 16]), GivenError::Stride { stride: 16, bytes: 64 }.into());
    assert_eq!(error([0, 32, 16]), GivenError::Stride { stride: 0, bytes: 16 }.into());
}
