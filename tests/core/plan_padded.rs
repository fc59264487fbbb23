//! Sizes that do not hold a batch, or exceed the config, are refused. `replay.rs` compares padded plans with plans that
//! are padded afterwards.

use kvarena::backend::Either;
use kvarena::layout::Groups;
use kvarena::plan::PlanSize;
use kvarena::{CpuOptions, EngineConfig, Error, Extend, Null};

use super::host::{Host, core, pool, text};

#[test]
fn a_size_that_does_not_hold_the_batch_is_refused() {
    let mut host = Host::null(pool(4, 400, Groups::ONE));
    let items = [3, 5, 1].map(|len| Extend { seq: host.begin(&text(10 * len..11 * len)), len });
    let (batch_rows, batch_tokens) = (3, 9);
    for (rows, tokens) in [(2, 9), (3, 8), (3, 10), (5, 10), (4, 1 << 31)] {
        let size = PlanSize { rows, tokens };
        let refused = host.engine.plan_padded(&mut host.scratch, &items, &[], size).map(|_| ()).map_err(core);
        assert_eq!(refused, Err(Error::PlanSize { rows, tokens, batch_rows, batch_tokens }));
        host.check();
    }
    assert_eq!(host.stats().steps, 0, "nothing was planned");
    host.plan_all(&items);
}

/// The config limits the tokens of a step, including padding tokens.
#[test]
fn a_step_of_more_tokens_than_the_config_allows_is_refused() {
    let config = EngineConfig { max_step_tokens: 8, ..pool(4, 400, Groups::ONE).into() };
    let mut host = Host::new(config, Either::<Null, CpuOptions>::Right(CpuOptions::with_threads(1)));
    let seqs = [0, 100].map(|first| host.begin(&text(first..first + 9)));
    let items = |len| [Extend { seq: seqs[0], len: 4 }, Extend { seq: seqs[1], len }];
    let before = host.stats();
    let refused = Some(Error::StepTokens { tokens: 9, max: 8 }.into());
    assert_eq!(host.engine.plan_batch(&mut host.scratch, &items(5)).err(), refused);
    let size = PlanSize { rows: 3, tokens: 9 };
    assert_eq!(host.engine.plan_padded(&mut host.scratch, &items(3), &[], size).err(), refused);
    assert_eq!(host.stats(), before);
    host.check();
    let size = PlanSize { rows: 3, tokens: 8 };
    host.engine.plan_padded(&mut host.scratch, &items(3), &[], size).expect("8 tokens");
    host.plan_all(&items(4));
}
