//! Groups of layers: prompts match where the host marked, more sequences fit, and the backend rejects arguments that do
//! not fit the groups. `replay.rs` compares the pages of groups with the model; the contract of backends compares
//! attention.

use kvarena::backend::{CpuError, PlanError, Select, SparseBackend};
use kvarena::layout::{Groups, Reach};
use kvarena::plan::SlotMapping;
use kvarena::{
    Attend, Backend, BatchPlan, Capacity, CpuOptions, EngineConfig, Extend, KvDtype, KvShape, LayerId, PoolConfig,
    SlotId, TokenId,
};

use super::host::{ALL, Host, pool, text};

#[test]
fn a_prompt_matches_where_the_host_marked() {
    let groups = Groups::new(&[Reach::All, Reach::Window(8)], &[0, 1, 1]).expect("two groups");
    for mark in [None, Some(20), Some(23)] {
        let mut host = Host::null(EngineConfig { promise_ahead: 4, ..pool(4, 100, groups).into() });
        let seq = host.begin(&text(0..40));
        host.compute(seq, 6);
        mark.into_iter().for_each(|len| host.mark(seq, len).expect("it is ahead"));
        (0..3).for_each(|_| host.compute(seq, 10));
        let parting = [text(0..20), text(100..109)].concat();
        let found = host.match_prefix(ALL, &parting);
        let pages = if mark.is_some() { 5 } else { 0 };
        assert_eq!((found.pages(), found.full_pages()), (pages, 5), "{mark:?}");
        host.begin(&parting);
        assert_eq!(host.stats().lost_hit_tokens, u64::from((5 - pages) * 4), "{mark:?}");
    }
}

#[test]
fn attention_that_does_not_match_the_groups_is_refused() {
    let (q_heads, kv_heads, dim, window_size) = (4, 2, 8, 5);
    let reach = Reach::Window(window_size);
    // Group 1 has three layers and group 0 two: the second track of group 1 has an unused lane.
    let groups = Groups::new(&[Reach::All, reach], &[0, 1, 0, 1, 1]).expect("two groups");
    let shape = KvShape::heads(kv_heads, dim);
    let pool = PoolConfig { shape, dtype: KvDtype::F32, ..pool(4, 600, groups) };
    let Host { mut engine, mut scratch } = Host::new(pool, CpuOptions::with_threads(1));
    let seq = engine.admit(ALL, &[TokenId::new(1); 3], 0).expect("there is room");
    let plan = engine.plan_batch(&mut scratch, &[Extend { seq, len: 3 }]).expect("there is room");
    assert_eq!(plan.track_slots.len(), 2 * 3);
    let (q, mut out) = ([0.0; 3 * 4 * 8], [0.0; 3 * 4 * 8]);
    let mut attend = |layer, window| {
        let attend = Attend { window, ..Attend::new(q_heads, dim) };
        let (layer, out) = (LayerId::new(layer), (&mut out[..]).into());
        engine.backend_mut().attend(&plan, layer, &attend, q[..].into(), out, None)
    };
    for (layer, window) in [(1, None), (3, Some(window_size + 1)), (4, Some(window_size - 1))] {
        let error = PlanError::Reach { layer: LayerId::new(layer), group: 1, reach, window, chunk: None };
        assert_eq!(attend(layer, window), Err(CpuError::Plan(error)));
    }
    // A layer that keeps all tokens may be read through any window, a layer of group 1 only through its own.
    for (layer, window) in [(0, None), (2, Some(1)), (4, Some(window_size))] {
        assert_eq!(attend(layer, window), Ok(()));
    }
    // Only layers that keep all tokens can be read through lists.
    let (select, mut positions) = (Select { q_heads, top: 1, window: None }, [0; 2]);
    let (layer, q) = (LayerId::new(3), q[..].into());
    let error = PlanError::SparseGroup { layer, group: 1 };
    let selected = engine.backend_mut().select(&plan, layer, &select, q, &mut positions);
    assert_eq!(selected, Err(CpuError::Plan(error)));
    // A plan has slots for too few tracks, for none, or a slot outside the pool.
    let slot_count = engine.backend().layout().slot_count();
    let past = PlanError::Slot { slot: SlotId::new(slot_count), slot_count };
    let tracks = |slots| PlanError::TrackSlots { slots, wanted: 6 };
    for (slots, error) in [(&[0; 3][..], tracks(3)), (&[], tracks(0)), (&[0, 0, 0, 0, 0, slot_count as i32], past)] {
        let plan = BatchPlan { track_slots: SlotMapping::I32(slots), ..plan };
        let k = [0.0; 3 * 2 * 8];
        let stored = engine.backend_mut().store_cache(&plan, LayerId::new(0), k[..].into(), k[..].into());
        assert_eq!(stored, Err(CpuError::Plan(error)));
    }
}

#[test]
fn more_sequences_run_before_one_is_out_of_pages() {
    // Each sequence has a distinct prompt of 64 tokens and is extended to 8,192 tokens. Either all its tokens are
    // promised, or none. Both pools, of one group and of two, have the same number of bytes.
    let run = |pool: PoolConfig, promise: u32| {
        let mut host = Host::null(pool);
        for count in 0.. {
            let text = text(count * 8192..(count + 1) * 8192);
            let Ok(seq) = host.admit(ALL, &text[..64], promise) else { return count };
            host.append(seq, &text[64..]).expect("there is room");
            while let len @ 1.. = host.extend_max(seq).expect("it is live").min(512) {
                let Ok(plan) = host.engine.plan_batch(&mut host.scratch, &[Extend { seq, len }]) else {
                    host.check();
                    return count; // A host would preempt a sequence now.
                };
                let step = plan.step();
                host.commit(step).expect("it is open");
                host.complete(step).expect("it is committed");
            }
        }
        unreachable!("the pool is full before")
    };
    // With one group a page of gpt-oss-20b has 24 layers, with two groups 12. For Gemma 3 27B these are 62 and 10.
    for (all, others, window, promise, times) in
        [(12, 12, 128, 0, 1.9), (10, 52, 1024, 0, 3.4), (12, 12, 128, 8192, 1.8), (10, 52, 1024, 8192, 2.9)]
    {
        let pages = 20 * 512 * (all + others) as u32;
        let layers = [vec![0; all], vec![1; others]].concat();
        let groups = Groups::new(&[Reach::All, Reach::Window(window)], &layers).expect("both have layers");
        let several = run(pool(16, pages / all as u32, groups), promise);
        let capacity = Capacity::Pages(20 * 512);
        let one = run(PoolConfig { layers: (all + others) as u32, capacity, ..PoolConfig::default() }, promise);
        assert_eq!(one, 20);
        println!("window {window}, promise {promise}: {several} sequences, {one} with one group");
        assert!(f64::from(several) >= times * f64::from(one), "{several} sequences, not {times} x {one}");
    }
}
