//! The contract of backends with states; layouts of states, the rejected ones, and how many sequences fit.
//! `config_states` has the published models. Random programs check the engine's calls.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::atomic::{AtomicBool, Ordering};

use super::seeds;
use kvarena::backend::Either;
use kvarena::config::{EngineShape, PrefixMode};
use kvarena::layout::{Groups, Layout, Reach, StatePart};
use kvarena::testkit::contract::check_states;
use kvarena::testkit::late::LateOptions;
use kvarena::testkit::posted::PostedOptions;
use kvarena::{
    Capacity, ConfigError, CpuOptions, Engine, EngineConfig, EngineError, Error, Extend, Keep, KvDtype, KvShape,
    Namespace, Null, PoolConfig, SeqKey, StepId, StepScratch, TokenId,
};

#[test]
fn backends_keep_the_contract_of_states() {
    let cpu = || CpuOptions::with_threads(1);
    let report = check_states(cpu, seeds(20, 80));
    println!("{report}");
    assert!(report.steps > 10 * report.runs, "{report}");
    println!("{}", check_states(|| LateOptions(cpu()), seeds(4, 20)));
    println!("{}", check_states(|| PostedOptions(cpu()), seeds(4, 20)));
    let is_right = AtomicBool::new(false);
    let either = || match is_right.fetch_not(Ordering::Relaxed) {
        true => Either::Right(cpu()),
        false => Either::Left(cpu()),
    };
    println!("{}", check_states(either, seeds(4, 20)));
}

/// Returns a pool of `attention` layers with this shape in bf16, and `states` layers that keep these parts.
fn pool(attention: usize, states: usize, shape: KvShape, parts: &[(u32, u32)]) -> PoolConfig {
    let layers: Vec<u8> = (0..attention + states).map(|layer| u8::from(layer >= attention)).collect();
    let parts: Vec<_> = parts.iter().map(|&(heads, head_bytes)| StatePart { heads, head_bytes }).collect();
    let groups = Groups::new(&[Reach::All, Reach::State], &layers).and_then(|groups| groups.with_state(1, &parts));
    let (groups, layers) = (groups.expect("two groups"), layers.len() as u32);
    let capacity = Capacity::Pages(200);
    PoolConfig { layers, groups, shape, dtype: KvDtype::Bf16, capacity, ..PoolConfig::default() }
}

#[test]
fn ranks_share_the_heads_of_a_state() {
    let config = pool(12, 36, KvShape::heads(2, 256), &[(32, 65_536), (16, 3_072)]);
    for (tp_size, page_size) in [(1, 96), (2, 96), (4, 48), (8, 32)] {
        let config = PoolConfig { tp_size, ..config };
        assert_eq!(config.state_page_size(16), Ok(page_size), "{tp_size} ranks");
        let layout = PoolConfig { page_size, ..config }.layout().expect("it holds a state");
        assert_eq!(layout.state().expect("a state").lane_bytes, 2_146_304 / u64::from(tp_size));
    }
    let split = PoolConfig { tp_size: 3, page_size: 1024, ..config }.layout().map(|_| ());
    assert!(matches!(split, Err(ConfigError::HeadSplit { .. })), "{split:?}");
}

#[test]
fn unfit_states_are_refused() {
    let part = StatePart { heads: 1, head_bytes: 256 };
    let groups = Groups::new(&[Reach::All, Reach::Window(4), Reach::State], &[0, 1, 2]).expect("three groups");
    assert_eq!(groups.state_group(), Some(2));
    assert_eq!(groups.with_state(1, &[part]), Err(ConfigError::StateGroup { group: 1 }));
    assert_eq!(groups.with_state(7, &[part]), Err(ConfigError::StateGroup { group: 7 }));
    let limit = ConfigError::Limit { name: "parts of a state", value: 5, max: 4 };
    assert_eq!(groups.with_state(2, &[part; 5]), Err(limit));
    for parts in [&[][..], &[StatePart { heads: 0, ..part }], &[part, StatePart { head_bytes: 0, ..part }]] {
        assert_eq!(groups.with_state(2, parts), Err(ConfigError::Zero { name: "bytes of a state's part" }));
    }
    let second = Groups::new(&[Reach::All, Reach::State, Reach::State], &[0, 1, 2]);
    assert_eq!(second, Err(ConfigError::Reach { group: 2, reach: Reach::State }));
    let first = Groups::new(&[Reach::State], &[0]);
    assert_eq!(first, Err(ConfigError::Reach { group: 0, reach: Reach::State }));
    let without = PoolConfig { layers: 3, groups, ..PoolConfig::default() };
    assert_eq!(without.layout(), Err(ConfigError::StateGroup { group: 2 }));
    let with = groups.with_state(2, &[part]).expect("a part");
    let by_layer = PoolConfig { groups: with, layout: Layout::LayerFirst, ..without };
    assert_eq!(by_layer.layout(), Err(ConfigError::LayerFirst { group: 2 }));
    let vast = StatePart { heads: u32::MAX, head_bytes: u32::MAX };
    let vast = PoolConfig { groups: groups.with_state(2, &[vast; 4]).expect("four parts"), ..without };
    assert_eq!(vast.layout(), Err(ConfigError::Overflow { name: "bytes of a state" }));
    let large = StatePart { heads: 1, head_bytes: u32::MAX };
    let large = PoolConfig { groups: groups.with_state(2, &[large]).expect("a part"), ..without };
    assert!(matches!(large.state_page_size(8), Err(ConfigError::PageSize { max: 1024, .. })));
    assert_eq!(large.state_page_size(0), Err(ConfigError::Zero { name: "multiple" }));
    assert_eq!(PoolConfig::default().state_page_size(8), Ok(8));
}

#[test]
fn the_null_page_belongs_to_no_sequence() {
    let config = pool(1, 1, KvShape::heads(1, 128), &[(1, 256)]);
    let usable = |reserved_pages| {
        let config = EngineConfig { reserved_pages, ..EngineConfig::from(config) };
        config.shape().map(|shape: EngineShape| shape.usable_pages())
    };
    assert_eq!([0, 1, 5].map(usable), [Ok(199), Ok(199), Ok(195)]);
    let one = EngineConfig::from(PoolConfig { capacity: Capacity::Pages(1), ..config }).shape();
    assert_eq!(one.map(|_| ()), Err(ConfigError::Limit { name: "reserved_pages", value: 1, max: 0 }));
    let shape = EngineConfig::from(config).shape().expect("a sound config");
    // Two states: the one that a step reads, and the one that it writes.
    assert_eq!((shape.most_pages(0), shape.most_pages(1), shape.most_pages(17)), (0, 3, 4));
}

/// Decodes `count` unlike sequences of Qwen3-Next in 47 GB to 8,192 tokens each, and returns whether all fit.
fn decode_in_47_gb(count: u32) -> Result<(), EngineError<Infallible>> {
    let shape = KvShape::heads(2, 256);
    let pool = PoolConfig {
        page_size: 96,
        capacity: Capacity::Bytes(47_000_000_000),
        ..pool(12, 36, shape, &[(32, 65_536), (16, 3_072)])
    };
    let config = EngineConfig { max_sequences: 256, max_tokens: 256 * 8_192, max_step_tokens: 1 << 20, ..pool.into() };
    let mut engine = Engine::new(config, Null).expect("a sound config");
    let mut scratch = StepScratch::new();
    let mut items = Vec::new();
    for seq in 0..count {
        let prompt: Vec<TokenId> = (0..512).map(|at| TokenId::new(seq << 16 | at)).collect();
        items.push(Extend { seq: engine.admit(Namespace::default(), &prompt, 0)?, len: 0 });
    }
    while engine.planned_len(items[0].seq)? < 8_192 {
        for Extend { seq, len } in &mut items {
            if engine.planned_len(*seq)? == engine.token_count(*seq)? {
                engine.append(*seq, &[TokenId::new(7)])?;
            }
            *len = engine.next_len(*seq, 512)?;
        }
        let step = engine.plan_batch(&mut scratch, &items)?.step;
        engine.commit(step)?;
        engine.complete(step)?;
    }
    assert_eq!(engine.stats().preemptions, 0);
    Ok(())
}

/// Each has 86 pages of K and V, and one state of 36: no sequence keeps a second one. A fixed split of 47 % for states,
/// with two of them a sequence, holds 124 sequences.
#[test]
fn unlike_sequences_of_qwen3_next_fit_in_47_gb() {
    decode_in_47_gb(163).expect("each has 122 pages");
    let error = decode_in_47_gb(164).expect_err("19,921 pages hold 163 sequences of 122");
    assert!(matches!(error, EngineError::Core(Error::OutOfPages { .. })), "{error}");
}

/// Serves a prompt of 600 tokens and 60 sampled ones. Steps have at most 8 tokens, and `ahead` steps are planned ahead
/// of the oldest open one. Every `fail_every`-th step fails. Returns the numbers of collected steps and of lost states.
fn serve_with_failures(prefix: PrefixMode, ahead: usize, fail_every: u32) -> [u32; 2] {
    let config = PoolConfig { page_size: 16, ..pool(1, 3, KvShape::heads(1, 128), &[(1, 2048)]) };
    let mut engine = Engine::new(EngineConfig { prefix, ..config.into() }, Null).expect("a valid config");
    let mut scratches = [(); 2].map(|()| StepScratch::new());
    let text: Vec<_> = (0..660).map(TokenId::new).collect();
    let seq = engine.admit(Namespace::default(), &text[..600], 660).expect("there is room");
    let (mut open, mut steps, mut lost) = (VecDeque::new(), 0, 0);
    while engine.cached_len(seq).expect("it is live") < 660 {
        assert!(steps < 2000, "the sequence does not advance: {:?}", engine.stats());
        let count = engine.token_count(seq).expect("it is live") as usize;
        let planned_len = engine.planned_len(seq).expect("it is live");
        if planned_len < 660 && open.len() <= ahead {
            if planned_len as usize == count {
                engine.append(seq, &text[count..count + 1]).expect("it is promised");
            }
            let len = engine.next_len(seq, 8).expect("it is live");
            let plan = engine.plan_batch(&mut scratches[open.len()], &[Extend { seq, len }]);
            open.push_back(plan.expect("it is promised").step());
            continue;
        }
        let step = open.pop_front().expect("just pushed");
        steps += 1;
        if steps % fail_every > 0 {
            engine.commit(step).expect("it is open");
            engine.complete(step).expect("it is committed");
            continue;
        }
        engine.abort(step).expect("it is open");
        engine.complete(engine.newest_step()).expect("no step is open");
        open.clear();
        if engine.is_state_lost(seq).expect("it is live") {
            lost += 1;
            engine.preempt(seq, Keep::Publish).expect("it runs");
            engine.resume(seq, 660).expect("there is room");
        }
        engine.verify().expect("all invariants hold");
    }
    [steps, lost]
}

/// Failures at intervals much shorter than those of marks lose states, but not for ever: a sequence that lost its state
/// keeps the states of its committed steps until it has made up for the loss.
#[test]
fn failures_at_short_intervals_do_not_stop_a_sequence() {
    for prefix in [PrefixMode::Radix, PrefixMode::None] {
        for ahead in [0, 1] {
            for fail_every in 2..=8 {
                let [steps, lost] = serve_with_failures(prefix, ahead, fail_every);
                println!("{prefix:?}, {ahead} ahead, every {fail_every}th fails: {steps} steps, {lost} states lost");
                // Each loss at least doubles the computed tokens, of 660, or passes a mark.
                assert!((1..=11).contains(&lost), "{lost} states lost in {steps} steps");
            }
        }
    }
}

/// Plans the next tokens of a sequence, 8 at most; appends one if all are planned.
fn plan_next(engine: &mut Engine<Null>, seq: SeqKey) -> StepId {
    if engine.planned_len(seq) == engine.token_count(seq) {
        engine.append(seq, &[TokenId::new(7)]).expect("there is room");
    }
    let len = engine.next_len(seq, 8).expect("it is live");
    let mut scratch = StepScratch::new();
    let plan = engine.plan_batch(&mut scratch, &[Extend { seq, len }]);
    plan.expect("there is room").step()
}

fn compute_next(engine: &mut Engine<Null>, seq: SeqKey) {
    let step = plan_next(engine, seq);
    engine.commit(step).expect("it is open");
    engine.complete(step).expect("it is committed");
    engine.verify().expect("all invariants hold");
}

/// Returns an engine with a pool of pages of 16 tokens, and a sequence of `len` tokens.
fn begin(len: u32) -> (Engine<Null>, SeqKey) {
    let config = PoolConfig { page_size: 16, ..pool(1, 3, KvShape::heads(1, 128), &[(1, 2048)]) };
    let mut engine = Engine::new(config, Null).expect("a valid config");
    let text: Vec<_> = (0..len).map(TokenId::new).collect();
    let seq = engine.admit(Namespace::default(), &text, 0).expect("there is room");
    (engine, seq)
}

/// A row that decodes updates its state in place, and its plans do not look at it. A mark behind the last of them makes
/// the next plan keep that state, so an abort of this plan loses nothing.
#[test]
fn a_state_marked_after_its_plan_outlives_an_abort_of_the_next() {
    let (mut engine, seq) = begin(13);
    while engine.planned_len(seq) != Ok(31) {
        compute_next(&mut engine, seq);
    }
    let first = plan_next(&mut engine, seq);
    engine.mark(seq, 32).expect("it is the end of the planned tokens");
    let next = plan_next(&mut engine, seq);
    engine.abort(next).expect("it is open");
    engine.verify().expect("all invariants hold");
    assert_eq!(engine.is_state_lost(seq), Ok(false));
    engine.commit(first).expect("it is open");
    engine.complete(first).expect("it is committed");
    assert_eq!(engine.stats().kept_states, 1);
    compute_next(&mut engine, seq);
}

/// A careful row that finds no page updates its state in place, and is careful again once there are pages.
#[test]
fn a_careful_row_stays_careful_while_no_page_is_left() {
    let (mut engine, seq) = begin(100);
    (0..6).for_each(|_| compute_next(&mut engine, seq));
    let lost = plan_next(&mut engine, seq);
    engine.abort(lost).expect("it is open");
    assert_eq!(engine.is_state_lost(seq), Ok(true));
    engine.preempt(seq, Keep::Publish).expect("it runs");
    engine.resume(seq, 0).expect("there is room");
    compute_next(&mut engine, seq);
    let other =
        (1..200).rev().find_map(|pages| engine.admit(Namespace::default(), &[TokenId::new(9)], pages * 16).ok());
    compute_next(&mut engine, seq);
    engine.finish(other.expect("pages are left")).expect("it is live");
    let step = plan_next(&mut engine, seq);
    engine.abort(step).expect("it is open");
    assert_eq!(engine.is_state_lost(seq), Ok(false));
    engine.verify().expect("all invariants hold");
}
