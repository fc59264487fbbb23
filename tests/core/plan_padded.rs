//! A plan that is padded from the start equals the plan of the same batch padded afterwards.

use kvarena::backend::Either;
use kvarena::testkit::padded::padded;
use kvarena::testkit::rng::Rng;
use kvarena::{
    Capacity, CpuOptions, Draft, DraftTree, Engine, EngineConfig, EngineError, Error, Extend, Groups, Namespace, Null,
    PlanSize, PoolConfig, Reach, SeqKey, StepScratch, TokenId,
};

fn config(groups: Groups) -> EngineConfig {
    let capacity = Capacity::Pages(400);
    let pool = PoolConfig { layers: 4, groups, page_size: 4, capacity, ..PoolConfig::default() };
    EngineConfig { max_sequences: 8, max_steps: 2, ..pool.into() }
}

/// One group, and two groups of which the second has its own track.
fn groups() -> [Groups; 2] {
    let two = Groups::new(&[Reach::All, Reach::Window(6)], &[0, 1, 0, 1]).expect("two groups");
    [Groups::default(), two]
}

/// Two engines that receive the same calls.
struct Twins {
    engines: [Engine<Null>; 2],
    seqs: Vec<SeqKey>,
    rng: Rng,
}

impl Twins {
    fn new(groups: Groups, seed: u64) -> Self {
        let engines = [(); 2].map(|()| Engine::new(config(groups), Null).expect("a sound config"));
        Self { engines, seqs: Vec::new(), rng: Rng::new(seed) }
    }

    /// Returns the result of a call, which must be equal for both engines.
    fn both<T: PartialEq + std::fmt::Debug>(&mut self, call: impl Fn(&mut Engine<Null>) -> T) -> T {
        let [first, second] = self.engines.each_mut().map(call);
        assert_eq!(first, second);
        first
    }

    /// Admits sequences, sometimes finishes one, and appends tokens to the others.
    fn change(&mut self) {
        while self.seqs.len() < 6 {
            let len = self.rng.within(1, 9) as u32;
            let first = self.rng.below(1000) as u32;
            let prompt: Vec<TokenId> = (first..first + len).map(TokenId::new).collect();
            let seq = self.both(|engine| engine.admit(Namespace::default(), &prompt, 0).expect("there is room"));
            self.seqs.push(seq);
        }
        if self.rng.one_in(3) {
            let seq = self.seqs.swap_remove(self.rng.below(6) as usize);
            self.both(|engine| engine.finish(seq).expect("it is live"));
        }
        for seq in self.seqs.clone() {
            let tokens = vec![TokenId::new(7); self.rng.below(4) as usize];
            self.both(|engine| engine.append(seq, &tokens).expect("there is room"));
        }
    }

    /// Returns an item for each sequence with unplanned tokens: a random number of these tokens.
    fn items(&mut self) -> Vec<Extend> {
        let (engine, rng) = (&self.engines[0], &mut self.rng);
        let item = |&seq: &SeqKey| {
            let known = engine.token_count(seq).expect("it is live");
            let left = known - engine.planned_len(seq).expect("it is live");
            (left > 0).then(|| Extend { seq, len: rng.within(1, left.into()) as u32 })
        };
        self.seqs.iter().filter_map(item).collect()
    }
}

#[test]
fn padding_before_the_plan_is_padding_after_it() {
    for (groups, seed) in groups().into_iter().flat_map(|groups| (0..20).map(move |i| (groups, i))) {
        let mut twins = Twins::new(groups, seed);
        let mut scratch = [(); 3].map(|()| StepScratch::new());
        for _ in 0..12 {
            twins.change();
            let items = twins.items();
            if items.is_empty() {
                continue;
            }
            // The first item is a tree, a chain or neither.
            let (Extend { seq, len }, mut tree) = (items[0], DraftTree::new());
            let start = twins.engines[0].planned_len(seq).expect("it is live");
            let draft = match twins.rng.below(3) {
                0 => Some(Draft::chain(seq)),
                1 => {
                    tree.set(start, &vec![0; len as usize]).expect("valid parents");
                    Some(tree.draft(seq))
                }
                _ => None,
            };
            let drafts: Vec<_> = draft.into_iter().collect();
            let rows = twins.rng.below(4) as usize;
            let more = if rows == 0 { 0 } else { rows + twins.rng.below(4) as usize };
            let tokens = items.iter().map(|item| item.len as usize).sum::<usize>();
            let size = PlanSize { rows: items.len() + rows, tokens: tokens + more };
            let [first, second] = &mut twins.engines;
            let [of_first, of_second, padding] = &mut scratch;
            let plan = first.plan_drafts(of_first, &items, &drafts).expect("there is room");
            let wanted = padded(&plan, padding, size);
            let got = second.plan_padded(of_second, &items, &drafts, size).expect("room");
            assert_eq!(got, wanted, "{size:?}");
            let step = plan.step();
            if !drafts.is_empty() {
                twins.both(|engine| engine.accept(step, seq, &[0]).expect("a root").len());
            }
            twins.both(|engine| engine.commit(step).expect("it is open"));
            twins.both(|engine| engine.complete(step).expect("it is committed"));
            twins.engines.iter().for_each(|engine| engine.verify().expect("all invariants hold"));
        }
    }
}

#[test]
fn a_size_that_does_not_hold_the_batch_is_refused() {
    let mut twins = Twins::new(Groups::default(), 1);
    twins.change();
    let (items, mut scratch) = (twins.items(), StepScratch::new());
    let batch_rows = items.len();
    let batch_tokens = items.iter().map(|item| item.len as usize).sum::<usize>();
    let engine = &mut twins.engines[0];
    for (rows, tokens) in [
        (batch_rows - 1, batch_tokens),
        (batch_rows, batch_tokens - 1),
        (batch_rows, batch_tokens + 1),
        (batch_rows + 2, batch_tokens + 1),
        (batch_rows + 1, 1 << 31),
    ] {
        let wanted = Error::PlanSize { rows, tokens, batch_rows, batch_tokens };
        match engine.plan_padded(&mut scratch, &items, &[], PlanSize { rows, tokens }) {
            Err(EngineError::Core(error)) => assert_eq!(error, wanted),
            other => panic!("{rows} and {tokens} were accepted: {other:?}"),
        }
        engine.verify().expect("all invariants hold");
    }
    assert_eq!(engine.stats().steps, 0, "nothing was planned");
    engine.plan_batch(&mut scratch, &items).expect("the batch is unchanged");
}

/// The config limits the tokens of a step, including padding tokens.
#[test]
fn a_step_of_more_tokens_than_the_config_allows_is_refused() {
    let config = EngineConfig { max_step_tokens: 8, ..config(Groups::default()) };
    let options = Either::<Null, CpuOptions>::Right(CpuOptions::with_threads(1));
    let mut engine = Engine::new(config, options).expect("a small pool");
    let seqs = [0, 100].map(|first| {
        let prompt: Vec<TokenId> = (first..first + 9).map(TokenId::new).collect();
        engine.admit(Namespace::default(), &prompt, 0).expect("there is room")
    });
    let mut scratch = StepScratch::new();
    let items = |len| [Extend { seq: seqs[0], len: 4 }, Extend { seq: seqs[1], len }];
    let before = engine.stats();
    let refused = Some(Error::StepTokens { tokens: 9, max: 8 }.into());
    assert_eq!(engine.plan_batch(&mut scratch, &items(5)).err(), refused);
    let size = PlanSize { rows: 3, tokens: 9 };
    assert_eq!(engine.plan_padded(&mut scratch, &items(3), &[], size).err(), refused);
    assert_eq!(engine.stats(), before);
    engine.verify().expect("all invariants hold");
    let size = PlanSize { rows: 3, tokens: 8 };
    engine.plan_padded(&mut scratch, &items(3), &[], size).expect("8 tokens");
    engine.plan_batch(&mut scratch, &items(4)).expect("8 tokens");
}
