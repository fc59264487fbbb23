//! Marks of the host, leaders with groups of layers, and the cost of a hit in an idle pool.

use kvarena::{
    Capacity, Engine, EngineConfig, Error, Extend, Groups, Keep, Namespace, Null, PoolConfig,
    PrefixMode, Prompt, Reach, SeqKey, StepScratch, TokenId,
};

const PAGE: u32 = 4;
const ALL: Namespace = Namespace::new(0);

/// One lane; a window of 8 tokens in two more tracks.
fn engine(pages: u32, prefix: PrefixMode) -> Engine<Null> {
    let groups = Groups::new(&[Reach::All, Reach::Window(8)], &[0, 1, 1]).expect("two groups");
    let capacity = Capacity::Pages(pages);
    let pool = PoolConfig { layers: 3, groups, page_size: PAGE, capacity, ..PoolConfig::default() };
    let config = EngineConfig { promise_ahead: 4, prefix, ..pool.into() };
    Engine::new(config, Null).expect("the config is sound")
}

fn text(seed: u32, len: u32) -> Vec<TokenId> {
    (0..len).map(|i| TokenId::new(seed * 1000 + i)).collect()
}

fn compute(engine: &mut Engine<Null>, seq: SeqKey, len: u32) {
    let mut scratch = StepScratch::new();
    let step = engine.plan_batch(&mut scratch, &[Extend { seq, len }]).expect("it fits").step;
    engine.commit(step).expect("it is open");
    engine.complete(step).expect("it is committed");
    engine.verify().expect("all invariants hold");
}

/// Returns a prompt that begins with the first tokens of a text of 40.
fn parting(at: u32) -> Vec<TokenId> {
    [&text(1, 40)[..at as usize], &text(2, 9)].concat()
}

#[test]
fn a_prompt_matches_where_the_host_marked() {
    for mark in [None, Some(20), Some(23)] {
        let mut engine = engine(100, PrefixMode::Radix);
        let seq = engine.admit(ALL, &text(1, 40), 0).expect("it fits");
        compute(&mut engine, seq, 6);
        if let Some(len) = mark {
            engine.mark(seq, len).expect("it is ahead");
        }
        for _ in 0..3 {
            compute(&mut engine, seq, 10);
        }
        let found = engine.match_prefix(ALL, &parting(20));
        let pages = if mark.is_some() { 5 } else { 0 };
        assert_eq!((found.pages(), found.full_pages()), (pages, 5), "{mark:?}");
        engine.admit(ALL, &parting(20), 0).expect("it fits");
        assert_eq!(engine.stats().lost_hit_tokens, u64::from((5 - pages) * PAGE), "{mark:?}");
    }
}

#[test]
fn a_mark_at_the_published_pages_takes_effect_at_once() {
    let mut engine = engine(100, PrefixMode::Radix);
    let seq = engine.admit(ALL, &text(1, 40), 0).expect("it fits");
    compute(&mut engine, seq, 18);
    assert_eq!(engine.match_prefix(ALL, &parting(16)).pages(), 0);
    engine.mark(seq, 19).expect("16 tokens are published");
    engine.verify().expect("all invariants hold");
    assert_eq!(engine.match_prefix(ALL, &parting(16)).pages(), 4);
    compute(&mut engine, seq, 22);
    assert_eq!(engine.match_prefix(ALL, &parting(16)).pages(), 4, "the cells stay");
}

#[test]
fn invalid_marks_are_refused() {
    let mut engine = engine(100, PrefixMode::Radix);
    let seq = engine.admit(ALL, &text(1, 60), 0).expect("it fits");
    compute(&mut engine, seq, 18);
    assert_eq!(engine.mark(seq, 15), Err(Error::MarkLen { len: 15, min: 16 }));
    for len in [24, 28, 32, 33, 36] {
        engine.mark(seq, len).expect("33 tokens are 8 pages too");
    }
    engine.mark(seq, 59).expect("an equal prompt matches there: it is marked already");
    assert_eq!(engine.mark(seq, 40), Err(Error::OutOfMarks { max: 4 }));
    compute(&mut engine, seq, 10);
    engine.mark(seq, 40).expect("two marks are reached");
    engine.preempt(seq, Keep::Publish).expect("it runs");
    assert_eq!(engine.mark(seq, 40), Err(Error::Preempted { seq }));
    engine.finish(seq).expect("it exists");
    assert_eq!(engine.mark(seq, 40), Err(Error::UnknownSequence { seq }));
    engine.verify().expect("all invariants hold");
}

#[test]
fn marks_mean_nothing_where_no_prompt_matches_or_all_layers_keep_everything() {
    let one = PoolConfig { page_size: PAGE, ..PoolConfig::default() };
    let one = Engine::new(one, Null).expect("the config is sound");
    for mut engine in [engine(100, PrefixMode::None), one] {
        let seq = engine.admit(ALL, &text(1, 40), 0).expect("it fits");
        compute(&mut engine, seq, 18);
        for len in [0, 16, 20, 24, 28, 32, 36] {
            assert_eq!(engine.mark(seq, len), Ok(()));
        }
        engine.verify().expect("all invariants hold");
    }
}

/// The second prompt waits until the first has computed the common prefix, and then finds it.
#[test]
fn a_marked_leader_leaves_its_tails() {
    for marks in [false, true] {
        let mut engine = engine(100, PrefixMode::Radix);
        let first = engine.admit(ALL, &text(1, 40), 0).expect("it fits");
        let leader = engine.admission(ALL, &parting(24), 0).expect("it fits").leader;
        let leader = leader.expect("the first computes six pages of it");
        assert_eq!((leader.seq, leader.cached_len), (first, 24));
        if marks {
            engine.mark(leader.seq, leader.cached_len).expect("it is ahead");
        }
        for len in [10, 10, 10] {
            assert!(engine.is_leading(&leader));
            compute(&mut engine, first, len);
        }
        assert!(!engine.is_leading(&leader));
        let hit = if marks { 6 } else { 0 };
        assert_eq!(engine.match_prefix(ALL, &parting(24)).pages(), hit, "marked: {marks}");
        // Beyond it only group 0 is cached, so the first no longer leads.
        assert_eq!(engine.admission(ALL, &parting(24), 0).expect("it fits").leader, None);
    }
}

/// A turn is admitted with its hit if the pool has the pages of its tails as well. It is admitted without the hit if an
/// idle pool has only the pages of its promise. While other sequences run, it waits.
#[test]
fn a_hit_never_keeps_a_prompt_from_an_idle_pool() {
    let promise = 60;
    let shape = *engine(100, PrefixMode::Radix).shape();
    let most = shape.most_pages(promise);
    let tails = 2 * 2; // Two places of the window in two tracks.
    for (pages, hit) in [(most, 0), (most + tails - 1, 0), (most + tails, 20)] {
        let run = |batch: bool, busy: bool| {
            let mut engine = engine(pages, PrefixMode::Radix);
            let seq = engine.admit(ALL, &text(1, 20), 0).expect("it fits");
            compute(&mut engine, seq, 20);
            engine.finish(seq).expect("it runs");
            let other = busy.then(|| {
                let other = engine.admit(ALL, &text(3, 1), 0).expect("it fits");
                compute(&mut engine, other, 1);
                other
            });
            let prompt = text(1, 30);
            let admission = engine.admission(ALL, &prompt, promise).expect("it may come");
            let admitted = match batch {
                true => {
                    let tokens = &prompt[..];
                    let prompts = [Prompt { namespace: ALL, tokens, promise }];
                    engine.admit_batch(&prompts).map(|admitted| admitted[0].seq)
                }
                false => engine.admit(ALL, &prompt, promise),
            };
            engine.verify().expect("all invariants hold");
            assert_eq!(admission.fits(), admitted.is_ok());
            assert_eq!(admitted.is_ok(), other.is_none(), "{pages} pages");
            if let Ok(seq) = admitted {
                assert_eq!(admission.cached_len, hit, "{pages} pages");
                assert_eq!(engine.cached_len(seq), Ok(hit), "{pages} pages");
                assert_eq!(engine.stats().lost_hit_tokens, u64::from(20 - hit));
                for at in (hit..30).step_by(4) {
                    compute(&mut engine, seq, 4.min(30 - at));
                }
            }
        };
        for (batch, busy) in [(false, false), (true, false), (false, true), (true, true)] {
            run(batch, busy);
        }
    }
}
