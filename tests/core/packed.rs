//! The engine packs only planned items, and rejects other items.

use kvarena::layout::Groups;
use kvarena::plan::OwnedPlan;
use kvarena::{BatchPlan, Error, Extend, StepScratch};

use super::host::{Host, pool, text};

fn host() -> Host {
    Host::null(pool(4, 64, Groups::ONE))
}

fn packed(host: &Host, items: &[Extend]) -> Result<Vec<i32>, Error> {
    let mut scratch = StepScratch::new();
    host.packed(&mut scratch, items).map(|packed| packed.qo_indptr.to_vec())
}

#[test]
fn unplanned_items_are_not_packed() {
    let mut host = host();
    let [a, b] = [0, 100].map(|first| host.begin(&text(first..first + 10)));
    let (of_a, of_b) = (Extend { seq: a, len: 10 }, Extend { seq: b, len: 7 });
    let refused = |item: Extend| Err(Error::NotPlanned { seq: item.seq, len: item.len });
    assert_eq!(packed(&host, &[of_a]), refused(of_a), "before a plan");
    let step = host.plan_all(&[of_a, of_b]);
    assert_eq!(packed(&host, &[of_a, of_b]), Ok(vec![0, 10, 17]));
    assert_eq!(packed(&host, &[of_b]), Ok(vec![0, 7]), "a part of the batch");
    for len in [0, 6, 8, u32::MAX] {
        let other = Extend { seq: b, len };
        assert_eq!(packed(&host, &[of_a, other]), refused(other));
    }
    assert_eq!(packed(&host, &[of_b, of_a]), refused(of_a), "out of order");
    assert_eq!(packed(&host, &[of_a, of_a]), refused(of_a), "twice");
    host.commit(step).expect("it is open");
    assert_eq!(packed(&host, &[of_a, of_b]), Ok(vec![0, 10, 17]));
    host.complete(step).expect("it is committed");
    assert_eq!(packed(&host, &[of_b]), refused(of_b), "after its step");
}

#[test]
fn aborted_items_are_not_packed() {
    let mut host = host();
    let seq = host.begin(&text(0..10));
    let (first, second) = (Extend { seq, len: 6 }, Extend { seq, len: 4 });
    host.plan_all(&[first]);
    let step = host.plan_all(&[second]);
    assert_eq!(packed(&host, &[second]), Ok(vec![0, 4]));
    host.abort(step).expect("it is open");
    assert!(packed(&host, &[second]).is_err());
    assert_eq!(packed(&host, &[first]), Ok(vec![0, 6]), "the earlier plan is valid");
    host.rollback(seq, 5).expect("nothing is published");
    assert!(packed(&host, &[first]).is_err(), "a rollback has cut it");
}

/// The test keeps an aborted plan, whose row another sequence then takes. With equal numbers of tokens, the plans of
/// both sequences look alike.
#[test]
fn a_plan_that_was_undone_has_no_levels() {
    let mut host = host();
    let extend = |seq| [Extend { seq, len: 10 }];
    let first = host.begin(&text(0..10));
    let undone = OwnedPlan::from(&host.engine.plan_batch(&mut host.scratch, &extend(first)).expect("room"));
    host.abort(undone.plan().step()).expect("it is open");
    host.finish(first).expect("the sequence is live");
    let second = host.begin(&text(100..110));
    let planned = OwnedPlan::from(&host.engine.plan_batch(&mut host.scratch, &extend(second)).expect("room"));
    let (plan, undone) = (planned.plan(), undone.plan());
    assert_eq!(plan.rows, undone.rows, "the rows are equal");
    let levels = |host: &Host, plan: &BatchPlan<'_>| {
        let mut scratch = StepScratch::new();
        host.packed_levels(&mut scratch, plan, &extend(second)).map(|packed| packed.levels.len())
    };
    assert_eq!(levels(&host, &plan), Ok(1));
    let refused = Err(Error::NotPlanned { seq: second, len: 10 });
    assert_eq!(levels(&host, &undone), refused);
    // The second word of the bytes is the step.
    for step in [0, 1_000, u64::MAX] {
        let mut bytes = planned.as_bytes().to_vec();
        bytes[8..16].copy_from_slice(&step.to_le_bytes());
        let never = OwnedPlan::from_bytes(&bytes).expect("any step");
        assert_eq!(levels(&host, &never.plan()), refused, "step {step} was never planned");
    }
    host.commit(plan.step()).expect("it is open");
    assert_eq!(levels(&host, &plan), Ok(1));
    host.complete(plan.step()).expect("it is committed");
    assert_eq!(levels(&host, &plan), refused, "it is complete");
}
