//! Tests `mark`, leaders of engines with groups of layers, and hits whose tails do not fit in an idle pool.

use kvarena::{
    Capacity, Engine, EngineConfig, Error, Extend, Groups, Keep, Namespace, Null, PoolConfig, PrefixMode, Prompt,
    Reach, SeqKey, StepScratch, TokenId,
};

const PAGE: u32 = 4;
const ALL: Namespace = Namespace::new(0);

/// Returns an engine with one layer that reads all tokens and two layers with a window of 8 tokens. A page has one
/// lane, so the window's layers have two tracks.
fn engine(pages: u32, prefix: PrefixMode) -> Engine<Null> {
    let groups = Groups::new(&[Reach::All, Reach::Window(8)], &[0, 1, 1]).expect("two groups");
    let capacity = Capacity::Pages(pages);
    let pool = PoolConfig { layers: 3, groups, page_size: PAGE, capacity, ..PoolConfig::default() };
    let config = EngineConfig { promise_ahead: 4, prefix, ..pool.into() };
    Engine::new(config, Null).expect("a valid config")
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

/// Returns a prompt whose first `at` tokens equal those of `text(1, 40)`, and whose next 9 differ.
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
        engine.mark(seq, len).expect("32 and 33 tokens mark the same 8 pages");
    }
    engine.mark(seq, 59).expect("admit has marked these 14 pages, where an equal prompt matches");
    assert_eq!(engine.mark(seq, 40), Err(Error::OutOfMarks { max: 4 }));
    compute(&mut engine, seq, 10);
    engine.mark(seq, 40).expect("the marks at 24 and 28 tokens wait no longer");
    engine.preempt(seq, Keep::Publish).expect("it runs");
    assert_eq!(engine.mark(seq, 40), Err(Error::Preempted { seq }));
    engine.finish(seq).expect("it exists");
    assert_eq!(engine.mark(seq, 40), Err(Error::UnknownSequence { seq }));
    engine.verify().expect("all invariants hold");
}

#[test]
fn marks_mean_nothing_where_no_prompt_matches_or_all_layers_keep_everything() {
    let one = PoolConfig { page_size: PAGE, ..PoolConfig::default() };
    let one = Engine::new(one, Null).expect("a valid config");
    for mut engine in [engine(100, PrefixMode::None), one] {
        let seq = engine.admit(ALL, &text(1, 40), 0).expect("it fits");
        compute(&mut engine, seq, 18);
        for len in [0, 16, 20, 24, 28, 32, 36] {
            assert_eq!(engine.mark(seq, len), Ok(()));
        }
        engine.verify().expect("all invariants hold");
    }
}

/// The second prompt waits until the first has computed the common prefix. It then matches the prefix only if the host
/// has marked the prefix's end.
#[test]
fn a_marked_leader_leaves_its_tails() {
    for marks in [false, true] {
        let mut engine = engine(100, PrefixMode::Radix);
        let first = engine.admit(ALL, &text(1, 40), 0).expect("it fits");
        let leader = engine.admission(ALL, &parting(24), 0).expect("it fits").leader;
        let leader = leader.expect("the first sequence will compute six pages of the prompt");
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
        // The first sequence has computed all common tokens, so it no longer leads.
        assert_eq!(engine.admission(ALL, &parting(24), 0).expect("it fits").leader, None);
    }
}

/// A prompt is admitted with its hit if the pool has pages for its promise and for the hit's tails. If an idle pool has
/// pages for the promise alone, the prompt is admitted without the hit. While another sequence runs, the prompt waits.
#[test]
fn a_hit_never_keeps_a_prompt_from_an_idle_pool() {
    let promise = 60;
    let shape = *engine(100, PrefixMode::Radix).shape();
    let most = shape.most_pages(promise) as u32;
    let tails = 2 * 2; // The window covers two pages in each of two tracks.
    for (pages, hit) in [(most, 0), (most + tails - 1, 0), (most + tails, 20)] {
        let run = |batch: bool, busy: bool| {
            let mut engine = engine(pages, PrefixMode::Radix);
            let seq = engine.admit(ALL, &text(1, 20), 0).expect("it fits");
            compute(&mut engine, seq, 20);
            engine.finish(seq).expect("it is live");
            let other = busy.then(|| {
                let other = engine.admit(ALL, &text(3, 1), 0).expect("it fits");
                compute(&mut engine, other, 1);
                other
            });
            let prompt = text(1, 30);
            let admission = engine.admission(ALL, &prompt, promise).expect("the prompt is valid");
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
