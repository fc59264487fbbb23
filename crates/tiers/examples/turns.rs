//! Measures what stores cost the thread that calls the engine: an idle `Tier::turn`, and a page of puts and of fetches.
//!
//! usage: `turns idle|put|fetch`, for times. For instructions, divided by the number of calls or pages that it prints:
//! `valgrind --tool=callgrind --callgrind-out-file=/dev/null --toggle-collect='*measured*' turns CASE count`

use std::error::Error;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use kvarena::hash::Hashing;
use kvarena::id::{Namespace, TokenId};
use kvarena::*;
use kvarena_tiers::name::Fingerprint;
use kvarena_tiers::testing::Memory;
use kvarena_tiers::tier::{StoreOptions, Tier, TierOptions};
use rustix::time::{ClockId, clock_gettime};

type Fallible<T = ()> = Result<T, Box<dyn Error>>;

const PAGES: u32 = 1000;
const PAGE_SIZE: u32 = 16;
const CALLS: u32 = 10_000;

/// The profiler counts only the instructions of this function and of its callees.
#[inline(never)]
fn measured(calls: u32, call: &mut dyn FnMut()) {
    (0..calls).for_each(|_| call());
}

/// Returns the CPU time of the thread in ns.
fn timed(calls: u32, call: &mut dyn FnMut()) -> i64 {
    let has_clock = std::env::args().len() == 2; // rustix's call ends a program under valgrind
    let now = || {
        let time = has_clock.then(|| clock_gettime(ClockId::ThreadCPUTime));
        time.map_or(0, |time| time.tv_sec * 1_000_000_000 + time.tv_nsec)
    };
    let begin = now();
    measured(calls, call);
    now() - begin
}

/// An engine with small pages, whose copies cost little. The receiver gets a message when the tier has work.
fn host(store: &Arc<Memory>) -> Fallible<(Engine<Cpu>, Tier<Cpu>, Receiver<()>)> {
    let (shape, capacity, swap_pages) = (KvShape::heads(1, 8), Capacity::Pages(PAGES + 2), PAGES + 2);
    let pool = PoolConfig { layers: 2, shape, page_size: PAGE_SIZE, capacity, swap_pages, ..PoolConfig::default() };
    let pool = PoolConfig { stage_pages: 64, ..pool };
    let max_tokens = u64::from(PAGES * PAGE_SIZE + 1);
    let config = EngineConfig { hashing: Some(Hashing::SglangSha256), max_tokens, ..pool.into() };
    let engine = Engine::new(config, CpuOptions::with_threads(1))?;
    let (sender, woken) = channel();
    let stores = StoreOptions { write_rate: None, ..StoreOptions::new("memory", store.clone()) };
    let options = TierOptions {
        deadline: Duration::from_secs(600),
        wake: Arc::new(move || sender.send(()).unwrap_or(())),
        ..TierOptions::new(vec![Fingerprint([7; 32])], vec![stores])
    };
    let tier = Tier::new(options, &engine)?;
    Ok((engine, tier, woken))
}

/// Returns the time of the thread's work in ns, and the number of calls or pages.
fn run(case: &str) -> Fallible<(i64, u32)> {
    let (store, prompt) = (Arc::new(Memory::default()), (0..PAGES * PAGE_SIZE + 1).map(TokenId::new));
    let prompt: Vec<_> = prompt.collect();
    let (mut engine, mut tier, woken) = host(&store)?;
    let mut time = 0;
    if case == "idle" {
        while !tier.is_idle() {
            tier.turn(&mut engine, |_, _| ())?;
        }
        time += timed(CALLS, &mut || tier.turn(&mut engine, |_, _| ()).expect("no fault"));
        return Ok((time, CALLS));
    }
    let seq = engine.admit(Namespace::default(), &prompt, 0)?;
    let mut scratch = StepScratch::new();
    let step = engine.plan_batch(&mut scratch, &[Extend { seq, len: prompt.len() as u32 }])?.step();
    engine.commit(step)?;
    engine.complete(step)?;
    engine.finish(seq)?;
    while tier.stats()[0].put < u64::from(PAGES) || tier.open().2 > 0 {
        let turn = &mut || tier.turn(&mut engine, |_, _| ()).expect("no fault");
        if case == "put" {
            time += timed(1, turn)
        } else {
            turn()
        }
        _ = woken.recv_timeout(Duration::from_millis(1));
    }
    if case == "fetch" {
        let (mut engine, mut tier, woken) = host(&store)?;
        let mut found = None;
        time += timed(1, &mut || _ = tier.find(1, &engine, Namespace::default(), &prompt));
        while found.is_none() {
            woken.recv()?;
            time += timed(1, &mut || tier.turn(&mut engine, |_, pages| found = Some(pages)).expect("no fault"));
        }
        assert_eq!(found, Some(PAGES));
    }
    Ok((time, PAGES))
}

fn main() -> Fallible {
    let case = std::env::args().nth(1).filter(|case| ["idle", "put", "fetch"].contains(&&**case));
    let case = case.ok_or("usage: turns idle|put|fetch")?;
    let (time, count) = run(&case)?;
    let what = if case == "idle" { "calls" } else { "pages" };
    println!("{case}: {count} {what}, {} ns of CPU each", time / i64::from(count));
    Ok(())
}
