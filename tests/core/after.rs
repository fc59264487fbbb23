//! [`Error::OutOfPages`] names the step to wait for: the call succeeds after the completion of this step and of no
//! earlier one. If it names none, the call does not succeed after the completion of all steps.

use kvarena::testkit::rng::Rng;
use kvarena::{
    Capacity, Engine, EngineConfig, EngineError, Error, Extend, Groups, Keep, Namespace, Null, PoolConfig, Prompt,
    Reach, SeqKey, StepId, StepScratch, TokenId,
};

use super::{is_range, seeds};

const ALL: Namespace = Namespace::new(0);

/// A call that may lack pages.
#[derive(Debug)]
enum Call {
    Admit(Vec<TokenId>, u32),
    AdmitBatch(Vec<(Vec<TokenId>, u32)>),
    Resume(SeqKey, u32),
    Promise(SeqKey, u32),
    Load(SeqKey),
    Plan(SeqKey, u32),
    Fork(SeqKey, u32, u32),
}

/// The calls that failed, by whether they named a step.
#[derive(Default)]
struct Counts {
    named: u32,
    unnamed: u32,
}

struct Host {
    engine: Engine<Null>,
    scratch: StepScratch,
    rng: Rng,
    running: Vec<SeqKey>,
    preempted: Vec<SeqKey>,
    /// All steps up to this one are complete. All others are committed.
    completed: u64,
}

impl Host {
    fn new(seed: u64, groups: Groups, swap_pages: u32) -> Self {
        let pool = PoolConfig {
            layers: groups.layers().max(1),
            groups,
            page_size: 2,
            capacity: Capacity::Pages(40),
            swap_pages,
            ..PoolConfig::default()
        };
        let config = EngineConfig { promise_ahead: 8, max_sequences: 8, ..pool.into() };
        let engine = Engine::new(config, Null).expect("a valid config");
        let (running, preempted) = (Vec::new(), Vec::new());
        let scratch = StepScratch::new();
        Self { engine, scratch, rng: Rng::new(seed), running, preempted, completed: 0 }
    }

    /// Returns a prefix of one of three texts, which have a common beginning.
    fn prompt(&mut self) -> Vec<TokenId> {
        let (text, len) = (self.rng.below(3) as u32, 1 + self.rng.below(40) as u32);
        (0..len).map(|at| TokenId::new(if at < 6 { at } else { 100 * text + at })).collect()
    }

    fn promise(&mut self) -> u32 {
        if self.rng.one_in(2) { 0 } else { self.rng.below(60) as u32 }
    }

    fn next(&mut self) -> Option<Call> {
        let (prompt, promise) = (self.prompt(), self.promise());
        let kind = self.rng.below(9);
        if kind == 0 || self.running.is_empty() {
            return Some(match self.rng.one_in(3) {
                true => Call::AdmitBatch(vec![(prompt, promise), (self.prompt(), self.promise())]),
                false => Call::Admit(prompt, promise),
            });
        }
        let seq = self.rng.pick(&self.running);
        Some(match kind {
            1 if !self.preempted.is_empty() => Call::Resume(self.rng.pick(&self.preempted), promise),
            2 => Call::Promise(seq, promise),
            3 => Call::Fork(seq, 1 + self.rng.below(3) as u32, promise),
            4..7 => {
                // Whether a token that is not known can be planned depends on the unfinished steps.
                let sequence = self.engine.sequence(seq).expect("it is live");
                match sequence.token_len.saturating_sub(sequence.planned_len) {
                    0 => return None,
                    most => Call::Plan(seq, 1 + self.rng.below(most.into()) as u32),
                }
            }
            _ => return None,
        })
    }

    /// Makes a call. A planned step is committed, but not completed.
    fn call(&mut self, call: &Call) -> Result<(), Error> {
        let core = |error| match error {
            EngineError::Core(error) => error,
            error => panic!("the backend does not fail: {error}"),
        };
        let Self { engine, scratch, running, preempted, .. } = self;
        match *call {
            Call::Admit(ref prompt, promise) => running.push(engine.admit(ALL, prompt, promise)?),
            Call::AdmitBatch(ref prompts) => {
                let prompts: Vec<_> =
                    prompts.iter().map(|&(ref tokens, promise)| Prompt { namespace: ALL, tokens, promise }).collect();
                running.extend(engine.admit_batch(&prompts)?.iter().map(|admitted| admitted.seq));
            }
            Call::Resume(seq, promise) => {
                engine.resume(seq, promise)?;
                preempted.retain(|other| *other != seq);
                running.push(seq);
            }
            Call::Promise(seq, len) => engine.promise(seq, len)?,
            Call::Load(seq) => engine.load(&[seq]).map_err(core)?,
            Call::Plan(seq, len) => {
                let plan = engine.plan_batch(scratch, &[Extend { seq, len }]).map_err(core)?;
                let step = plan.step();
                engine.commit(step)?;
            }
            Call::Fork(seq, count, promise) => {
                let forked = engine.fork(seq, count, promise).map_err(core)?;
                running.extend_from_slice(forked.children);
            }
        }
        Ok(())
    }

    fn complete(&mut self, step: u64) {
        self.engine.complete(StepId::new(step)).expect("all steps are committed");
        self.completed = self.completed.max(step);
    }

    /// Makes a call, and checks the step that its error names.
    fn check(&mut self, call: &Call, counts: &mut Counts) -> Result<(), Error> {
        let failed = self.call(call);
        let Err(Error::OutOfPages { after, .. }) = failed else { return failed };
        let last = self.engine.newest_step().raw();
        let end = after.map_or(last, |step| step.raw() - 1);
        while self.completed < end {
            self.complete(self.completed + 1);
            match self.call(call) {
                Err(Error::OutOfPages { after: again, .. }) => assert_eq!(again, after, "{call:?}"),
                other => panic!("{call:?} after step {} of {after:?}: {other:?}", self.completed),
            }
        }
        match after {
            None => counts.unnamed += 1,
            Some(step) => {
                counts.named += 1;
                self.complete(step.raw());
                assert_eq!(self.call(call), Ok(()), "{call:?} after {step:?}");
            }
        }
        after.map_or(failed, |_| Ok(()))
    }

    /// Releases something, or completes a step.
    fn release(&mut self) {
        let last = self.engine.newest_step().raw();
        match self.rng.below(5) {
            0 if self.completed < last => self.complete(self.completed + 1),
            1 if !self.running.is_empty() => {
                let at = self.rng.below(self.running.len() as u64) as usize;
                let seq = self.running.swap_remove(at);
                let keep = if self.rng.one_in(4) { Keep::Drop } else { Keep::Publish };
                self.engine.finish_with(seq, keep).expect("it is live");
            }
            2 if !self.running.is_empty() => {
                let at = self.rng.below(self.running.len() as u64) as usize;
                let seq = self.running.swap_remove(at);
                self.engine.preempt(seq, Keep::Publish).expect("it runs");
                self.preempted.push(seq);
            }
            3 if !self.preempted.is_empty() => {
                let seq = self.preempted.remove(0);
                self.engine.finish(seq).expect("it is live");
            }
            _ if !self.running.is_empty() => {
                let seq = self.rng.pick(&self.running);
                let token = TokenId::new(self.rng.below(4) as u32);
                let _ = self.engine.append(seq, &[token]);
            }
            _ => {}
        }
        if last - self.completed > 5 {
            self.complete(self.completed + 1);
        }
    }
}

#[test]
fn a_call_succeeds_after_the_step_that_its_error_names_and_no_earlier() {
    let windows = Groups::new(&[Reach::All, Reach::Window(9)], &[0, 1, 1]).expect("two groups");
    let chunks = Groups::new(&[Reach::All, Reach::Chunk(8)], &[0, 1]).expect("two groups");
    for groups in [Groups::ONE, windows, chunks] {
        for swap_pages in [0, 30] {
            let mut counts = Counts::default();
            for seed in seeds(60, 600) {
                let mut host = Host::new(seed, groups, swap_pages);
                for _ in 0..300 {
                    match host.next() {
                        None => host.release(),
                        Some(call @ (Call::Plan(seq, _) | Call::Fork(seq, ..))) => {
                            // These calls load first; `after` then concerns the load.
                            if host.check(&Call::Load(seq), &mut counts).is_ok() {
                                let _ = host.check(&call, &mut counts);
                            }
                        }
                        Some(call) => _ = host.check(&call, &mut counts),
                    }
                }
                host.engine.verify().expect("all invariants hold");
            }
            let Counts { named, unnamed } = counts;
            assert!(is_range() || named > 100 && unnamed > 100, "{named} {unnamed}");
        }
    }
}

/// Beside the tails of its hit, the pool has no room for a prompt. Once the pool is idle, the prompt is admitted
/// without its hit.
#[test]
fn a_prompt_that_fits_an_idle_pool_names_the_step_that_makes_it_idle() {
    let groups = Groups::new(&[Reach::All, Reach::Window(64)], &[0, 1]).expect("two groups");
    let capacity = Capacity::Pages(40);
    let pool = PoolConfig { layers: 2, groups, capacity, page_size: 2, ..PoolConfig::default() };
    let config = EngineConfig { promise_ahead: 64, ..pool.into() };
    for batch in [false, true] {
        let mut engine = Engine::new(config, Null).expect("a valid config");
        let mut scratch = StepScratch::new();
        let prompt: Vec<_> = (0..20).map(TokenId::new).collect();
        let seq = engine.admit(ALL, &prompt, 40).expect("40 pages are free");
        let plan = engine.plan_batch(&mut scratch, &[Extend { seq, len: 20 }]);
        let step = plan.expect("there is room").step();
        engine.commit(step).expect("it is open");
        engine.finish(seq).expect("it is live");
        let again = Prompt { namespace: ALL, tokens: &prompt, promise: 40 };
        let admit = |engine: &mut Engine<Null>| match batch {
            true => engine.admit_batch(&[again]).map(|_| ()),
            false => engine.admit(ALL, &prompt, 40).map(|_| ()),
        };
        let refused = admit(&mut engine);
        let Err(Error::OutOfPages { after, .. }) = refused else { panic!("{refused:?}") };
        assert_eq!(after, Some(step));
        engine.complete(step).expect("it is committed");
        assert_eq!(admit(&mut engine), Ok(()));
    }
}
