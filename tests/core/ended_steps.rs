//! The plan of an ended step is rejected: after an abort or completion, its pages may belong to another sequence.

use kvarena::backend::{CpuError, CpuRows, CpuRowsMut};
use kvarena::testkit::planner::{Item, Planner};
use kvarena::{
    Attend, Backend, Capacity, Cpu, CpuOptions, Engine, Extend, KvShape, LayerId, Namespace, OpenBackend, OwnedPlan,
    PlanError, PoolConfig, SeqKey, StepEnd, StepId, StepScratch, TableShape, TokenId,
};

use crate::small_cpu::all_bytes;

const LAYER: LayerId = LayerId::new(0);

fn pool() -> PoolConfig {
    PoolConfig { page_size: 4, shape: KvShape::heads(1, 8), capacity: Capacity::Pages(4), ..PoolConfig::default() }
}

fn prompt(first: u32) -> Vec<TokenId> {
    (first..first + 16).map(TokenId::new).collect()
}

/// Plans a whole prompt, which uses the whole pool, and stores rows of one number.
fn fill(engine: &mut Engine<Cpu>, first: u32, number: f32) -> (SeqKey, OwnedPlan) {
    let seq = engine.admit(Namespace::default(), &prompt(first), 0).expect("room");
    let mut scratch = StepScratch::new();
    let plan = engine.plan_batch(&mut scratch, &[Extend { seq, len: 16 }]).expect("room");
    store(engine.backend_mut(), &OwnedPlan::from(&plan), number).expect("an open step");
    (seq, OwnedPlan::from(&plan))
}

fn store(cpu: &mut Cpu, plan: &OwnedPlan, number: f32) -> Result<(), CpuError> {
    let rows = vec![number; 16 * 8];
    cpu.store_cache(&plan.plan(), LAYER, CpuRows::from(&rows[..]), CpuRows::from(&rows[..]))
}

fn attend(cpu: &mut Cpu, plan: &OwnedPlan) -> Result<(), CpuError> {
    let (q, mut out) = (vec![1.0_f32; 16 * 8], vec![0.0_f32; 16 * 8]);
    let (q, out) = (CpuRows::from(&q[..]), CpuRowsMut::from(&mut out[..]));
    cpu.attend(&plan.plan(), LAYER, &Attend::new(1, 8), q, out, None)
}

/// Checks that the old plan is rejected and does not write to its pages, which another sequence now uses.
fn is_refused(engine: &mut Engine<Cpu>, old: &OwnedPlan) {
    fill(engine, 100, 2.0);
    let before = all_bytes(engine.backend());
    let ended = Err(CpuError::Plan(PlanError::Ended { step: old.plan().step() }));
    assert_eq!(store(engine.backend_mut(), old, 1.0), ended);
    assert_eq!(attend(engine.backend_mut(), old), ended);
    assert_eq!(all_bytes(engine.backend()), before);
}

#[test]
fn the_plan_of_an_aborted_step_is_refused() {
    let mut engine = Engine::new(pool(), CpuOptions::with_threads(1)).expect("a small pool");
    let (seq, old) = fill(&mut engine, 0, 1.0);
    engine.abort(old.plan().step()).expect("it is open");
    engine.complete(old.plan().step()).expect("it is aborted");
    engine.finish(seq).expect("it is live");
    is_refused(&mut engine, &old);
}

#[test]
fn the_plan_of_a_complete_step_is_refused() {
    let mut engine = Engine::new(pool(), CpuOptions::with_threads(1)).expect("a small pool");
    let (seq, old) = fill(&mut engine, 0, 1.0);
    engine.commit(old.plan().step()).expect("it is open");
    attend(engine.backend_mut(), &old).expect("a committed step has not ended");
    engine.complete(old.plan().step()).expect("it is committed");
    engine.finish(seq).expect("it is live");
    engine.reset();
    is_refused(&mut engine, &old);
}

#[test]
fn an_abort_also_aborts_later_steps() {
    let mut engine = Engine::new(pool(), CpuOptions::with_threads(1)).expect("a small pool");
    let seq = engine.admit(Namespace::default(), &prompt(0), 0).expect("room");
    let plans = [8, 8].map(|len| {
        let mut scratch = StepScratch::new();
        let plan = engine.plan_batch(&mut scratch, &[Extend { seq, len }]).expect("room");
        OwnedPlan::from(&plan)
    });
    engine.abort(plans[0].plan().step()).expect("it is open");
    for plan in &plans {
        let ended = Err(CpuError::Plan(PlanError::Ended { step: plan.plan().step() }));
        assert_eq!(attend(engine.backend_mut(), plan), ended);
    }
}

#[test]
fn a_rank_is_driven_by_bytes_alone() {
    let layout = pool().layout().expect("a small pool");
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
