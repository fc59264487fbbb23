//! Messages of `EngineError` name what failed and contain the cause. Messages of causes contain the reason and values.

use std::collections::BTreeSet;
use std::error::Error as _;

use kvarena::backend::{CpuError, OutboxError, PlanError};
use kvarena::id::{MoveId, RowId, SwapPageId};
use kvarena::layout::{Groups, Reach};
use kvarena::plan::PlanSize;
use kvarena::stats::Stats;
use kvarena::{
    Attend, Backend, Capacity, ConfigError, Cpu, CpuOptions, Engine, EngineConfig, EngineError, Error, Extend, Keep,
    LayerId, Namespace, Null, OutboxOptions, PageId, PoolConfig, Prompt, SeqKey, SlotId, StepId, StepScratch, TokenId,
    Work,
};

fn engine() -> Engine<Cpu> {
    let pool = PoolConfig { page_size: 4, capacity: Capacity::Pages(8), ..Default::default() };
    Engine::new(EngineConfig { max_tokens: 256, ..pool.into() }, CpuOptions::with_threads(1)).expect("a valid config")
}

#[test]
fn an_engines_error_contains_its_cause() {
    let pool = PoolConfig { page_size: 0, ..Default::default() };
    let config = Engine::new(pool, CpuOptions::default()).err().expect("pages of no tokens");
    let why = config.source().and_then(|why| why.downcast_ref::<ConfigError>());
    assert_eq!(why, Some(&ConfigError::Zero { name: "page_size" }));

    let mut scratch = StepScratch::new();
    let items = [Extend { seq: SeqKey::default(), len: 1 }];
    let core = engine().plan_batch(&mut scratch, &items).expect_err("no such sequence");
    let why = core.source().and_then(|why| why.downcast_ref::<Error>());
    assert_eq!(why, Some(&Error::UnknownSequence { seq: SeqKey::default() }));

    let mut engine = engine();
    let capacity = Capacity::Pages(u32::MAX - 1);
    let large = PoolConfig { layers: 1000, page_size: 1024, capacity, ..Default::default() };
    let bytes = large.layout().expect("valid, if large").total_bytes();
    let backend = Engine::new(large, CpuOptions::default()).err().expect("no memory for it");
    let why = backend.source().and_then(|why| why.downcast_ref::<CpuError>());
    assert_eq!(why, Some(&CpuError::OutOfMemory { bytes }));

    // Some callers keep only the text.
    let prompt = [TokenId::new(1); 40];
    let refused: EngineError<CpuError> =
        engine.admit(Namespace::default(), &prompt, 0).expect_err("8 pages of 4").into();
    for error in [config, core, backend, refused] {
        let why = error.source().expect("there is a reason").to_string();
        assert!(error.to_string().ends_with(&format!(": {why}")), "{error} lacks {why}");
    }
}

#[test]
fn errors_are_in_plain_words() {
    let mut engine = engine();
    let mut scratch = StepScratch::new();
    let prompt = vec![TokenId::new(1); 4];
    let seq = engine.admit(Namespace::default(), &prompt, 0).expect("there is room");
    let shown = |error: &dyn std::fmt::Display| error.to_string();
    let long = engine.plan_batch(&mut scratch, &[Extend { seq, len: 9 }]).expect_err("4 tokens");
    let end = shown(&long);
    assert!(end.ends_with("cannot be extended by 9 tokens, only by 1 to 4"), "{end}");
    let plan = engine.plan_batch(&mut scratch, &[Extend { seq, len: 4 }]).expect("there is room");
    let (rows, attend) = (vec![0.0; 4 * 64], Attend::new(1, 64));
    let (layer, mut out) = (LayerId::new(1), vec![0.0; 4 * 64]);
    let backend = engine.backend_mut();
    let past = backend.store_cache(&plan, layer, rows[..].into(), rows[..].into());
    assert_eq!(shown(&past.expect_err("one layer")), "layer 1 is out of range: the count is 1");
    let past = backend.attend(&plan, layer, &attend, rows[..].into(), out[..].as_mut().into(), None);
    assert_eq!(shown(&past.expect_err("one layer")), "layer 1 is out of range: the count is 1");
    let step = plan.step();
    engine.commit(step).expect("it is open");
    assert_eq!(shown(&engine.commit(step).expect_err("it is committed")), "step 1 is not open");

    let lacking = |wanted, available, after| Error::OutOfPages { wanted, available, after };
    assert_eq!(shown(&lacking(1, 0, None)), "1 page needed, 0 available");
    let after = Some(StepId::new(3));
    let text = "2 pages needed, 1 available, enough after step 3";
    assert_eq!(shown(&lacking(2, 1, after)), text);
    assert_eq!(shown(&Error::OutOfSteps { max: 1 }), "at most 1 step may be unfinished");
    let size = Error::PlanSize { rows: 1, tokens: 4, batch_rows: 2, batch_tokens: 1 };
    let text = "a batch of 2 rows and 1 token cannot be padded to 1 row and 4 tokens";
    assert_eq!(shown(&size), text);
    assert_eq!(shown(&ConfigError::OutOfMemory { bytes: 1 }), "the host has no memory for 1 byte");
    for (error, text) in [
        (
            ConfigError::Reach { group: 0, reach: Reach::Window(8) },
            "group 0 keeps everything, and does not read a window of 8",
        ),
        (ConfigError::Reach { group: 2, reach: Reach::Chunk(12) }, "group 2 cannot read a chunk of 12"),
        (ConfigError::LayerGroup { layer: LayerId::new(3), group: 1, groups: 1 }, "layer 3 is in group 1 of 1 group"),
        (ConfigError::EmptyGroup { group: 1 }, "no layer is in group 1"),
        (ConfigError::Reach { group: 2, reach: Reach::State }, "group 2 cannot read a state"),
        (ConfigError::StateGroup { group: 1 }, "group 1 keeps no state, or its state has no parts"),
        (
            ConfigError::StatePage { page_size: 1, min: 91 },
            "pages of 1 token do not hold the state of a layer, which takes at least 91",
        ),
        (ConfigError::GroupedLayers { layers: 2, grouped: 1 }, "groups of 1 layer do not fit a model of 2 layers"),
    ] {
        assert_eq!(shown(&error), text);
    }
    let (layer, group, reach) = (LayerId::new(3), 1, Reach::Window(8));
    for (error, text) in [
        (
            PlanError::Reach { layer, group, reach, window: None, chunk: None },
            "layer 3 of group 1 reads a window of 8, but its attention has no window",
        ),
        (
            PlanError::Reach { layer, group, reach, window: Some(9), chunk: None },
            "layer 3 of group 1 reads a window of 8, but its attention has a window of 9",
        ),
        (
            PlanError::Reach { layer, group, reach, window: None, chunk: Some(8) },
            "layer 3 of group 1 reads a window of 8, but its attention has chunks of 8",
        ),
        (PlanError::StateLayer { layer }, "layer 3 keeps a state instead of K and V"),
        (PlanError::NoState { layer }, "layer 3 stores K and V, and keeps no state"),
        (PlanError::StateRow { row: 2, rows: 3 }, "row 2 of 3 of a plan does not exist or is padding"),
        (PlanError::TreeChunk { chunk: 8 }, "chunks of 8 for a plan with trees of drafts"),
        (PlanError::ChunkSize { chunk: 9 }, "chunks of 9, which is no power of two"),
        (PlanError::SparseGroup { layer, group }, "a sparse read of layer 3, whose group 1 does not keep all tokens"),
        (PlanError::TrackSlots { slots: 1, wanted: 2 }, "1 slot of further tracks, expected 2"),
    ] {
        assert_eq!(shown(&error), text);
    }
}

#[test]
fn errors_of_drafts_are_in_plain_words() {
    let (seq, step) = (SeqKey::default(), StepId::new(7));
    for (error, words) in [
        (Error::CrossesMark { seq, mark: 1 }, "crosses its mark at 1 token"),
        (Error::StateLost { seq }, "is lost; preempt and resume it"),
        (Error::StateAhead { seq }, "is ahead of its committed and known tokens"),
        (Error::StateDraft { seq }, "layers that keep a state have no drafts"),
        (Error::MarkLen { len: 1, min: 16 }, "a mark at 1 token is below the 16 that are published or planned"),
        (Error::DraftLen { len: 65, max: 64 }, "a draft of 65 tokens is larger than 64"),
        (Error::DraftParent { token: 1, parent: 2 }, "draft 1 cannot follow draft 2, which is later"),
        (Error::DraftOrder { seq }, "of a draft is not in the batch, or out of order"),
        (Error::DraftArrays { seq, masks: 1, positions: 0, len: 1 }, "1 masks and 0 positions for 1 draft of"),
        (
            Error::DraftMask { seq, token: 1, mask: 4, own: 2, most: 62 },
            "mask 0x4 of draft 1 of sequence SeqKey(null) lacks bit 0x2 or has bits outside 0x3e",
        ),
        (
            Error::DraftPosition { seq, token: 1, position: 9, min: 5, max: 6 },
            "position 9 of draft 1 of sequence SeqKey(null) is outside 5 to 6",
        ),
        (Error::NotAccepted { seq, step }, "in step 7 is accepted yet"),
        (Error::NotDrafted { seq, step }, "step 7 has no waiting drafts of"),
        (Error::NotABranch { seq, place: 0, token: 3 }, "accepted at place 0, is not a root"),
        (Error::NotABranch { seq, place: 1, token: 3 }, "does not follow the one before it"),
        (Error::RepeatedSequence { seq }, "is repeated in a batch, or out of order"),
    ] {
        assert!(error.to_string().contains(words), "{error}");
        assert!(!error.is_shortage(), "{error}: waiting does not help");
    }
}

/// Every call takes any count: it is refused with a typed error that changes nothing, or means "all".
#[test]
fn counts_at_their_limits_are_refused_by_name() {
    const MAX: u32 = u32::MAX;
    let windows = Groups::new(&[Reach::All, Reach::Window(6)], &[0, 1, 1]).expect("two groups");
    for (groups, swap_pages) in [(Groups::ONE, 0), (Groups::ONE, 8), (windows, 0), (windows, 8)] {
        let pool = PoolConfig {
            layers: groups.layers().max(1),
            groups,
            page_size: 4,
            capacity: Capacity::Pages(64),
            swap_pages,
            ..Default::default()
        };
        let config = EngineConfig { max_tokens: 256, max_sequences: 4, ..pool.into() };
        let mut engine = Engine::new(config, Null).expect("a valid config");
        let max = u64::from(engine.shape().max_sequence_len);
        let too_long = Error::TooLong { len: MAX.into(), max };
        let (all, last) = (Namespace::default(), StepId::new(u64::MAX));
        let mut scratch = StepScratch::new();
        let prompt: Vec<TokenId> = (0..10).map(TokenId::new).collect();
        let seq = engine.admit(all, &prompt, 20).expect("there is room");
        let waits = engine.admit(all, &prompt[..3], 0).expect("there is room");
        engine.preempt(waits, Keep::Publish).expect("it runs");
        let before = |engine: &Engine<Null>| {
            let mut stats: Stats = engine.stats();
            stats.refusals = 0;
            stats
        };
        let stats = before(&engine);

        assert_eq!(engine.admission(all, &prompt, MAX).err(), Some(too_long));
        assert_eq!(engine.admit(all, &prompt, MAX), Err(too_long));
        let batch = [Prompt { namespace: all, tokens: &prompt, admit: MAX.into() }];
        assert_eq!(engine.admit_batch(&batch).err(), Some(too_long));
        assert_eq!(engine.resume(waits, MAX), Err(too_long));
        assert_eq!(engine.promise(seq, MAX), Err(too_long));
        let rows = EngineError::Core(Error::OutOfSequences { max: 4 });
        assert_eq!(engine.fork(seq, MAX, 0).err(), Some(rows));
        assert_eq!(engine.fork(seq, 1, MAX).err(), Some(EngineError::Core(too_long)));
        assert_eq!(engine.rollback(seq, MAX), Err(Error::RollbackLen { len: MAX, min: 1, max: 10 }));
        assert_eq!(engine.mark(seq, MAX), Ok(()));
        let items = [Extend { seq, len: MAX }];
        let len = EngineError::Core(Error::ExtendLen { seq, len: MAX, max: 10 });
        assert_eq!(engine.plan_batch(&mut scratch, &items).err(), Some(len));
        let items = [Extend { seq, len: 10 }];
        let [rows, tokens] = [usize::MAX; 2];
        for size in [PlanSize { rows, tokens }, PlanSize { rows: 2, tokens }] {
            let padded = engine.plan_padded(&mut scratch, &items, &[], size);
            assert!(matches!(padded.err(), Some(EngineError::Core(Error::PlanSize { .. }))));
        }
        for end in [Engine::commit, Engine::complete, Engine::abort] {
            assert_eq!(end(&mut engine, last), Err(Error::UnknownStep { step: last }));
        }
        let accepted = engine.accept(last, seq, &[MAX]).err();
        assert_eq!(accepted, Some(EngineError::Core(Error::UnknownStep { step: last })));
        assert_eq!(engine.available_after(last), engine.available());
        assert_eq!(engine.save_ahead(MAX), Ok(0));
        assert_eq!(before(&engine), stats);
        engine.verify().expect("all invariants hold");

        let step = engine.plan_batch(&mut scratch, &items).expect("there is room").step();
        let items = [Extend { seq, len: MAX }];
        let unplanned = Error::NotPlanned { seq, len: MAX };
        assert_eq!(engine.packed(&mut scratch, &items).err(), Some(unplanned));
        engine.commit(step).expect("it is open");
        engine.complete(step).expect("it is committed");
        engine.finish(seq).expect("it is live");
        let saved = engine.save_ahead(MAX).expect("no fault");
        assert_eq!(saved > 0, swap_pages > 0);
        engine.verify().expect("all invariants hold");
    }
}

/// Messages and logs contain ids without their types.
#[test]
fn ids_of_each_type_print_differently() {
    let pages = [format!("{:?}", PageId::new(1)), format!("{:?}", SwapPageId::new(1)), format!("{:?}", SlotId::new(1))];
    assert_eq!(pages, ["p1", "swap1", "s1"]);
    let others = [format!("{:?}", TokenId::new(1)), format!("{:?}", LayerId::new(1)), format!("{:?}", RowId::new(1))];
    let (step, moved) = (format!("{:?}", StepId::new(1)), format!("{:?}", MoveId::new(1)));
    let namespace = format!("{:?}", Namespace::new(1));
    let all: BTreeSet<_> = pages.iter().chain(&others).chain([&step, &moved, &namespace]).collect();
    assert_eq!(all.len(), 9, "{all:?}");
}

/// Work for a plan must be drained before the next plan. The rejected plan's step counts until a `complete`.
#[test]
fn a_forgotten_drain_is_an_error() {
    let pool = PoolConfig { page_size: 4, capacity: Capacity::Pages(8), ..Default::default() };
    let config = EngineConfig { max_steps: 3, ..pool.into() };
    let mut engine = Engine::new(config, OutboxOptions).expect("a valid config");
    let mut scratch = StepScratch::new();
    let seq = engine.admit(Namespace::default(), &[TokenId::new(1); 6], 0).expect("there is room");
    let step = engine.plan_batch(&mut scratch, &[Extend { seq, len: 6 }]).expect("there is room").step();
    engine.commit(step).expect("it is open");
    engine.complete(step).expect("it is committed");
    // The outbox has the copy of the partly filled page. Its step may be complete before the drain.
    let forked = engine.fork(seq, 1, 0).expect("there is room");
    let copied = forked.step.expect("a page is copied");
    engine.complete(copied).expect("it is committed");
    engine.append(seq, &[TokenId::new(2); 2]).expect("there is room");
    let items = [Extend { seq, len: 1 }];
    engine.plan_batch(&mut scratch, &items).expect("nothing was due at the last plan");

    let error = engine.plan_batch(&mut scratch, &items).expect_err("the copy waits");
    assert_eq!(error, EngineError::Backend(OutboxError::Undrained { pieces: 1 }));
    let text = "the outbox has 1 piece of work that an earlier plan waits for: drain it before the next plan";
    assert!(error.to_string().ends_with(text), "{error}");
    assert!(OutboxError::Undrained { pieces: 2 }.to_string().contains("2 pieces"));
    assert_eq!((engine.stats().steps, engine.stats().aborts), (2, 1));
    let mut copies = 0;
    engine.backend_mut().drain(|work| copies += usize::from(matches!(work, Work::Copy([_]))));
    assert_eq!(copies, 1);
    let last = engine.plan_batch(&mut scratch, &items).expect("the outbox is empty").step();
    let full = EngineError::Core(Error::OutOfSteps { max: 3 });
    assert_eq!(engine.plan_batch(&mut scratch, &items).err(), Some(full));
    engine.commit(StepId::new(last.raw() - 2)).expect("it is open");
    engine.commit(last).expect("the step between them is aborted");
    engine.complete(last).expect("it is committed");
    assert_eq!(engine.stats().steps, 0);
    engine.verify().expect("all invariants hold");
}
