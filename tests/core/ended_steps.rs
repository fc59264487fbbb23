//! The plan of an ended step is rejected: after an abort or completion, its pages may belong to another sequence.

use kvarena::backend::{CpuError, CpuRows, CpuRowsMut, OpenBackend, PlanError};
use kvarena::layout::{Groups, TableShape};
use kvarena::plan::{OwnedPlan, StepEnd};
use kvarena::testkit::planner::{Item, Planner};
use kvarena::{Attend, Backend, Cpu, CpuOptions, Extend, KvShape, LayerId, PoolConfig, StepId};

use super::host::{ALL, Host, pool, text};

fn small() -> PoolConfig {
    PoolConfig { shape: KvShape::heads(1, 8), ..pool(4, 4, Groups::ONE) }
}

fn attend(cpu: &mut Cpu, plan: &OwnedPlan) -> Result<(), CpuError> {
    let (q, mut out) = (vec![1.0_f32; 16 * 8], vec![0.0_f32; 16 * 8]);
    let (q, out) = (CpuRows::from(&q[..]), CpuRowsMut::from(&mut out[..]));
    cpu.attend(&plan.plan(), LayerId::new(0), &Attend::new(1, 8), q, out, None)
}

fn ended(step: StepId) -> Result<(), CpuError> {
    Err(CpuError::Plan(PlanError::Ended { step }))
}

/// An engine ends steps at the backend. An abort also ends later steps, and a commit ends none.
#[test]
fn aborted_and_complete_steps_end() {
    for is_aborted in [true, false] {
        let Host { mut engine, mut scratch } = Host::new(small(), CpuOptions::with_threads(1));
        let seq = engine.admit(ALL, &text(0..16), 0).expect("room");
        let plans = [8, 8].map(|len| {
            let plan = engine.plan_batch(&mut scratch, &[Extend { seq, len }]).expect("room");
            OwnedPlan::from(&plan)
        });
        let steps = plans.each_ref().map(|plan| plan.plan().step());
        if is_aborted {
            engine.abort(steps[0]).expect("it is open");
        } else {
            steps.iter().for_each(|&step| engine.commit(step).expect("it is open"));
            assert_ne!(attend(engine.backend_mut(), &plans[0]), ended(steps[0]), "a committed step has not ended");
            engine.complete(steps[1]).expect("it is committed");
        }
        for (plan, step) in plans.iter().zip(steps) {
            assert_eq!(attend(engine.backend_mut(), plan), ended(step));
        }
    }
}

#[test]
fn a_rank_is_driven_by_bytes_alone() {
    let layout = small().layout().expect("a small pool");
    let table = TableShape::new(4, 2, 16, 32).expect("a small table");
    let mut planner = Planner::new(&layout, &table, 1);
    let mut rank = CpuOptions::with_threads(1).open(&layout, &table, 2).expect("a small pool");
    let sequence = planner.admit().expect("a row");
    let mut plans = Vec::new();
    for _ in 0..3 {
        plans.push(planner.plan(&[Item::Padding { len: 16 }]));
    }
    let begin = |rank: &mut Cpu, plan: &OwnedPlan| {
        let plan = OwnedPlan::from_bytes(plan.as_bytes()).expect("the bytes of a plan");
        rank.begin(&plan.plan())
    };
    let end = |rank: &mut Cpu, end: StepEnd| {
        rank.end(StepEnd::from_bytes(&end.to_bytes()).expect("the bytes of an end"));
    };
    let step = |number| StepId::new(number);
    assert_eq!(begin(&mut rank, &plans[0]), Ok(()));
    assert_eq!(begin(&mut rank, &plans[1]), Ok(()));
    assert_eq!(begin(&mut rank, &plans[2]), Err(CpuError::Plan(PlanError::OpenSteps { max: 2 })));
    end(&mut rank, StepEnd::Complete(step(1)));
    assert_eq!(attend(&mut rank, &plans[0]), Err(CpuError::Plan(PlanError::Ended { step: step(1) })));
    assert_eq!(attend(&mut rank, &plans[1]), Ok(()));
    assert_eq!(begin(&mut rank, &plans[2]), Ok(()));
    end(&mut rank, StepEnd::Abort(step(3)));
    assert_eq!(attend(&mut rank, &plans[2]), Err(CpuError::Plan(PlanError::Ended { step: step(3) })));
    assert_eq!(attend(&mut rank, &plans[1]), Ok(()));
    let spent = CpuError::Plan(PlanError::AlreadyBegun { step: step(3), last: step(3) });
    assert_eq!(begin(&mut rank, &plans[2]), Err(spent));
    let next = planner.plan(&[Item::Extend { sequence, len: 4 }]);
    assert_eq!(begin(&mut rank, &next), Ok(()));
}
