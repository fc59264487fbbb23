//! States of layers that keep one: the contract, addresses that graphs contain, a change of streams, rejected calls.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use kvarena::backend::cuda::{CudaError, CudaEvent, CudaStream, Gpu, StateSlots};
use kvarena::backend::{Either, PlanError, StateBackend};
use kvarena::layout::{Groups, Reach, StatePart};
use kvarena::plan::{OwnedPlan, PlanSize, StepEnd};
use kvarena::testkit::contract::{StateTestBackend, check_states};
use kvarena::{
    Backend, Capacity, CpuOptions, Engine, EngineConfig, Extend, KvDtype, KvShape, LayerId, Namespace, PoolConfig,
    SeqKey, StepScratch, TokenId,
};

use crate::on_gpu::{OnGpu, OnGpuOptions};
use crate::{gpu, seeds};

#[test]
fn cuda_keeps_the_contract_of_states() {
    let Some(gpu) = gpu() else { return };
    println!("{}", check_states(|| OnGpuOptions::new(&gpu), seeds(60)));
    let on_gpu = AtomicBool::new(false);
    let either = || match on_gpu.fetch_not(Relaxed) {
        true => Either::Right(OnGpuOptions::new(&gpu)),
        false => Either::Left(CpuOptions::with_threads(1)),
    };
    println!("{}", check_states(either, seeds(6)));
}

/// Returns a pool of one layer of attention and 5 layers with states, two in a page.
pub fn pool() -> PoolConfig {
    let groups = Groups::new(&[Reach::All, Reach::State], &[1, 1, 0, 1, 1, 1]);
    let groups = groups.and_then(|groups| groups.with_state(1, &[StatePart { heads: 2, head_bytes: 1000 }]));
    PoolConfig {
        layers: 6,
        groups: groups.expect("two groups"),
        shape: KvShape::heads(1, 64),
        dtype: KvDtype::Bf16,
        capacity: Capacity::Pages(100),
        ..PoolConfig::default()
    }
}

/// An engine with four sequences whose prompts are computed.
struct Decoding {
    engine: Engine<OnGpu>,
    sequences: Vec<SeqKey>,
}

impl Decoding {
    fn new(gpu: &Gpu) -> Self {
        let config = EngineConfig { max_sequences: 4, max_steps: 4, prefault: false, ..EngineConfig::from(pool()) };
        let engine = Engine::new(config, OnGpuOptions::new(gpu)).expect("a small engine");
        let mut host = Self { engine, sequences: Vec::new() };
        let prompts = (0..4).map(|i| [TokenId::new(i); 20]);
        let admit = |prompt: [TokenId; 20]| host.engine.admit(Namespace::default(), &prompt, 0).expect("there is room");
        host.sequences = prompts.map(admit).collect();
        let items: Vec<_> = host.sequences.iter().map(|&seq| Extend { seq, len: 20 }).collect();
        let prompts = host.plan(&items, PlanSize { rows: 4, tokens: 80 }).plan().step;
        host.engine.commit(prompts).expect("the first step");
        host.engine.complete(prompts).expect("it is committed");
        host
    }

    fn plan(&mut self, items: &[Extend], size: PlanSize) -> OwnedPlan {
        let (mut scratch, mut owned) = (StepScratch::new(), OwnedPlan::new());
        owned.copy_from(&self.engine.plan_padded(&mut scratch, items, &[], size).expect("there is room"));
        owned
    }

    /// Plans a step of one token of some sequences, padded to five rows.
    fn decode(&mut self, sequences: &[usize]) -> OwnedPlan {
        let items: Vec<_> = sequences.iter().map(|&i| Extend { seq: self.sequences[i], len: 1 }).collect();
        for item in &items {
            self.engine.append(item.seq, &[TokenId::new(7)]).expect("there is room");
        }
        self.plan(&items, PlanSize { rows: 5, tokens: 5 })
    }

    fn backend(&mut self) -> &mut OnGpu {
        self.engine.backend_mut()
    }
}

fn states() -> impl Iterator<Item = LayerId> {
    [0, 1, 3, 4, 5].into_iter().map(LayerId::new)
}

/// Steps of other sequences, and a step that is staged again after a later one, have the same addresses.
#[test]
fn graphs_of_a_key_find_states_at_the_same_addresses() {
    let Some(gpu) = gpu() else { return };
    let mut host = Decoding::new(&gpu);
    let mut seen: Option<Vec<StateSlots>> = None;
    let mut check = |host: &mut Decoding, plan: &OwnedPlan| {
        let plan = &plan.plan();
        let key = host.backend().cuda.stage(plan).expect("a valid plan").graph;
        let cuda = &mut host.backend().cuda;
        let slots: Vec<_> = states().map(|layer| cuda.slots(plan, layer).expect("a state")).collect();
        assert_eq!(seen.get_or_insert_with(|| slots.clone()), &slots, "{key:?}");
        // Layers of a page share its number, and have lanes of their own.
        let [first, second, third] = [slots[0], slots[1], slots[2]];
        assert_eq!((first.reads, first.writes, first.stride), (second.reads, second.writes, second.stride));
        assert_eq!((second.states - first.states, third.states), (2048, first.states));
        assert!(third.reads > first.reads);
        host.backend().slots(plan, LayerId::new(0))
    };
    let steps = [&[0, 1, 2][..], &[3, 1], &[2]];
    let plans = steps.map(|sequences| {
        let plan = host.decode(sequences);
        let [reads, writes] = check(&mut host, &plan);
        assert_eq!(reads, writes, "a step of one token updates states in place");
        let padding = |page: &&i32| **page == -1;
        assert_eq!(writes.iter().filter(padding).count(), 5 - sequences.len());
        (plan, writes)
    });
    let shared = |a: usize, b: usize| plans[0].1[a] == plans[1].1[b];
    assert!(shared(1, 1) && !shared(0, 0), "the second sequence is in both steps");
    for (plan, writes) in &plans {
        assert_eq!(&check(&mut host, plan)[1], writes, "a step that is staged again has its own pages");
    }
}

#[test]
fn states_follow_the_backend_to_another_stream() {
    let Some(gpu) = gpu() else { return };
    let mut host = Decoding::new(&gpu);
    let mut plans = Vec::new();
    for turn in 0..3 {
        plans.push(host.decode(&[turn, 3]));
        let stream = CudaStream::new(&gpu).expect("a stream");
        let mut before = CudaEvent::new(&gpu, false).expect("an event");
        before.record(host.backend().cuda.stream()).expect("a mark");
        before.block(&stream).expect("a stream that waits");
        // SAFETY: the new stream waits for the previous one.
        unsafe { host.backend().cuda.set_stream(stream) };
        let pages: Vec<_> = plans.iter().map(|plan| host.backend().slots(&plan.plan(), LayerId::new(5))).collect();
        assert!(pages.iter().all(|[_, writes]| writes[1] == pages[0][1][1] && writes[2..] == [-1; 3]), "{pages:?}");
        let plan = plans.last().expect("planned").plan();
        host.backend().copy_states(&plan).expect("the step is open");
    }
    host.backend().synchronize().expect("nothing failed");
}

#[test]
fn wrong_calls_are_rejected() {
    let Some(gpu) = gpu() else { return };
    let mut host = Decoding::new(&gpu);
    let owned = host.decode(&[0]);
    let plan = &owned.plan();
    let OnGpu { cuda, stream, .. } = host.backend();
    let attention = LayerId::new(2);
    assert_eq!(cuda.slots(plan, attention), Err(PlanError::NoState { layer: attention }.into()));
    let missing = LayerId::new(6);
    assert_eq!(cuda.slots(plan, missing), Err(PlanError::Layer { layer: missing, layers: 6 }.into()));
    let step = plan.step;
    let captured = stream.capture(|| cuda.copy_states(plan)).map(|_| ());
    assert_eq!(captured, Err(CudaError::CapturedStates { step }));
    cuda.end(StepEnd::Abort(step));
    assert_eq!(cuda.slots(plan, LayerId::new(0)), Err(PlanError::Ended { step }.into()));
    assert_eq!(cuda.copy_states(plan), Err(PlanError::Ended { step }.into()));
}
