//! Messages of `EngineError` name what failed and contain the cause. Messages of causes contain the reason and values.

use std::error::Error as _;

use kvarena::backend::CpuError;
use kvarena::{
    Attend, Backend, Capacity, ConfigError, Cpu, CpuOptions, Engine, EngineConfig, EngineError,
    Error, Extend, LayerId, Namespace, PlanError, PoolConfig, Reach, SeqKey, StepId, StepScratch,
    TokenId,
};

fn engine() -> Engine<Cpu> {
    let pool = PoolConfig { page_size: 4, capacity: Capacity::Pages(8), ..Default::default() };
    Engine::new(EngineConfig { max_tokens: 256, ..pool.into() }, CpuOptions::with_threads(1))
        .expect("a valid config")
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
fn pending_tokens_are_refused() {
    let mut engine = engine();
    let namespace = Namespace::default();
    let good: Vec<TokenId> = (0..9).map(TokenId::new).collect();
    for position in 0..9 {
        let mut prompt = good.clone();
        prompt[position] = TokenId::PENDING;
        let refused = Error::PendingToken { position: position as u32 };
        assert_eq!(engine.admit(namespace, &prompt, 0), Err(refused));
    }
    // Two pending tokens must not cancel each other out.
    let mut prompt = good.clone();
    (prompt[3], prompt[7]) = (TokenId::PENDING, TokenId::PENDING);
    assert_eq!(engine.admit(namespace, &prompt, 0), Err(Error::PendingToken { position: 3 }));
    assert_eq!(engine.stats().sequences, 0);
    let seq = engine.admit(namespace, &good, 0).expect("there is room");
    let mut more = [TokenId::new(1); 50];
    for at in [0, 1, 31, 32, 49] {
        more[at] = TokenId::PENDING;
        let refused = Error::PendingToken { position: 9 + at as u32 };
        let len = at + 1;
        // The limit of the pool is reported first.
        let want =
            if 9 + len > 32 { Error::TooLong { len: 9 + len as u64, max: 32 } } else { refused };
        assert_eq!(engine.append(seq, &more[..len]), Err(want));
        more[at] = TokenId::new(1);
    }
    assert_eq!(engine.token_count(seq), Ok(9), "no token was appended");
    engine.verify().expect("all invariants hold");
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
    let past =
        backend.attend(&plan, layer, &attend, rows[..].into(), out[..].as_mut().into(), None);
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
        (
            ConfigError::Reach { group: 2, reach: Reach::Chunk(12) },
            "group 2 cannot read a chunk of 12",
        ),
        (
            ConfigError::LayerGroup { layer: LayerId::new(3), group: 1, groups: 1 },
            "layer 3 is in group 1 of 1 group",
        ),
        (ConfigError::EmptyGroup { group: 1 }, "no layer is in group 1"),
        (
            ConfigError::GroupedLayers { layers: 2, grouped: 1 },
            "groups of 1 layer do not fit a model of 2 layers",
        ),
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
        (PlanError::TreeChunk { chunk: 8 }, "chunks of 8 for a plan with trees of drafts"),
        (PlanError::ChunkSize { chunk: 9 }, "chunks of 9, which is no power of two"),
        (
            PlanError::SparseGroup { layer, group },
            "a sparse read of layer 3, whose group 1 does not keep all tokens",
        ),
        (PlanError::TrackSlots { slots: 1, wanted: 2 }, "1 slot of further tracks, expected 2"),
    ] {
        assert_eq!(shown(&error), text);
    }
}
