//! A host of an [`Outbox`] whose bytes are in another process: the test's program starts itself again as the worker,
//! which reads frames of a kind, a length and bytes from its standard input.

use std::collections::VecDeque;
use std::io::{Read, Write};
use std::process::{Child, ChildStdin, Command, Stdio};

use kvarena::backend::SlotMove;
use kvarena::plan::{Forked, PageCopy, PageMove, SlotMapping};
use kvarena::testkit::rng::Rng;
use kvarena::*;

use super::host::{ALL, text};

const PAGE: u32 = 4;
const PAGES: u32 = 24;
const SWAP: u32 = 16;

/// Work, in its byte form.
const WORK: u64 = 0;
/// Stores: pairs of a slot and a token.
const STORE: u64 = 1;
/// Pairs of a slot and the token that it must have; the worker answers with one byte.
const CHECK: u64 = 2;

/// The worker's memory: the token whose K and V each slot has.
struct Memory {
    pool: Vec<u64>,
    swap: Vec<u64>,
}

impl Memory {
    fn work(&mut self, work: Work<'_>) {
        let page = |id: u32| PAGE as usize * id as usize..PAGE as usize * (id as usize + 1);
        match work {
            Work::Copy(copies) => copies.iter().for_each(|&PageCopy { source, target }| {
                self.pool.copy_within(page(source.raw()), page(target.raw()).start);
            }),
            Work::Slots(_, moves) => moves.iter().for_each(|&SlotMove { source, target }| {
                self.pool[target.raw() as usize] = self.pool[source.raw() as usize];
            }),
            Work::Save(_, moves) => moves.iter().for_each(|&PageMove { device, swap }| {
                self.swap[page(swap.raw())].copy_from_slice(&self.pool[page(device.raw())]);
            }),
            Work::Load(_, moves) => moves.iter().for_each(|&PageMove { device, swap }| {
                self.pool[page(device.raw())].copy_from_slice(&self.swap[page(swap.raw())]);
            }),
        }
    }
}

/// The worker's program; a test only so that the test's program can run it.
#[test]
#[ignore = "another test starts it as a process"]
fn worker() {
    let tokens = |pages: u32| vec![u64::MAX; (pages * PAGE) as usize];
    let mut memory = Memory { pool: tokens(PAGES), swap: tokens(SWAP) };
    let (mut input, mut output) = (std::io::stdin().lock(), std::io::stderr().lock());
    let mut word = [0; 8];
    while input.read_exact(&mut word).is_ok() {
        let kind = u64::from_le_bytes(word);
        input.read_exact(&mut word).expect("a length");
        let mut bytes = vec![0; u64::from_le_bytes(word) as usize];
        input.read_exact(&mut bytes).expect("the bytes");
        let number = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().expect("a word"));
        let pairs = bytes.chunks_exact(16).map(|pair| (number(&pair[..8]) as usize, number(&pair[8..])));
        match kind {
            WORK => Work::from_bytes(&bytes, |work| memory.work(work)).expect("an outbox's work"),
            STORE => pairs.for_each(|(slot, token)| memory.pool[slot] = token),
            _ => {
                let is_right = pairs.into_iter().all(|(slot, token)| memory.pool[slot] == token);
                output.write_all(&[u8::from(is_right)]).expect("the answer is read");
            }
        }
    }
}

struct Worker {
    child: Child,
    input: ChildStdin,
}

impl Worker {
    fn start() -> Self {
        let program = std::env::current_exe().expect("the test's program");
        let arguments = ["--exact", "outbox_process::worker", "--ignored", "--nocapture", "--quiet"];
        let mut command = Command::new(program);
        // The harness of tests prints on the standard output, so answers come by the other one.
        command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = command.spawn().expect("the program starts again");
        let input = child.stdin.take().expect("it is piped");
        Self { child, input }
    }

    fn send(&mut self, kind: u64, bytes: &[u8]) {
        let header = [kind, bytes.len() as u64].map(u64::to_le_bytes);
        self.input.write_all(header.as_flattened()).and_then(|()| self.input.write_all(bytes)).expect("it reads");
    }

    fn is_right(&mut self, pairs: &[u8]) -> bool {
        self.send(CHECK, pairs);
        self.input.flush().expect("it reads");
        let mut answer = [0];
        self.child.stderr.as_mut().expect("it is piped").read_exact(&mut answer).expect("an answer");
        answer == [1]
    }
}

fn push(pairs: &mut Vec<u8>, slot: u64, token: TokenId) {
    pairs.extend(slot.to_le_bytes());
    pairs.extend(u64::from(token.raw()).to_le_bytes());
}

/// Forks, evicts to swap memory and loads, with the bytes in another process. Every token that a row reads is checked
/// there in each step.
#[test]
fn work_crosses_to_another_process() {
    let pool = PoolConfig { page_size: PAGE, capacity: Capacity::Pages(PAGES), swap_pages: SWAP, ..Default::default() };
    let config = EngineConfig { reserved_pages: 1, wide_slots: true, ..pool.into() };
    let mut engine = Engine::new(config, OutboxOptions).expect("a valid config");
    let (mut scratch, mut rng, mut worker) = (StepScratch::new(), Rng::new(1), Worker::start());
    let (mut running, mut kinds) = (VecDeque::new(), [0; 4]);
    for round in 0..2000_u32 {
        let start = 10 * rng.below(3) as u32;
        let prompt: Vec<_> = text(start..start + 6).into_iter().chain(text(100 + round % 7..105 + round % 7)).collect();
        if let Ok(seq) = engine.admit(ALL, &prompt, prompt.len() as u32) {
            running.push_back(seq);
        }
        let mut items = Vec::new();
        for &seq in &running {
            items.push(Extend { seq, len: engine.extend_max(seq).expect("it is live") });
        }
        let plan = match engine.plan_batch(&mut scratch, &items) {
            Ok(plan) => plan,
            Err(EngineError::Core(Error::OutOfPages { .. })) => {
                let seq = running.pop_front().expect("a batch that lacks pages");
                engine.finish(seq).expect("it is live");
                continue;
            }
            Err(error) => panic!("{error}"),
        };
        let step = plan.step();
        let mut bytes = Vec::new();
        let mut moved = (None, None);
        engine.backend_mut().drain(|work| {
            kinds[match work {
                Work::Copy(_) => 0,
                Work::Slots(..) => 1,
                Work::Save(id, _) => (moved.0 = Some(id), 2).1,
                Work::Load(id, _) => (moved.1 = Some(id), 3).1,
            }] += 1;
            work.to_bytes(&mut bytes);
        });
        worker.send(WORK, &bytes);
        let SlotMapping::I64(slots) = plan.slot_mapping else { panic!("the config asks for wide slots") };
        let mut stores = Vec::new();
        slots.iter().zip(plan.tokens).for_each(|(&slot, &token)| push(&mut stores, slot as u64, token));
        assert!(slots.iter().all(|&slot| slot >= i64::from(PAGE)), "page 0 is reserved");
        worker.send(STORE, &stores);
        let mut reads = Vec::new();
        for &seq in &running {
            let pages: Vec<_> = engine.page_runs(seq, 0).expect("it is live").flatten().copied().collect();
            for (position, token) in engine.tokens(seq).expect("it is live").enumerate() {
                let (page, offset) = (pages[position / PAGE as usize], position as u64 % u64::from(PAGE));
                push(&mut reads, u64::from(page.raw()) * u64::from(PAGE) + offset, token);
            }
        }
        assert!(worker.is_right(&reads), "round {round}: a row reads another token's K and V");
        moved.0.into_iter().for_each(|id| engine.backend_mut().saved(id));
        moved.1.into_iter().for_each(|id| engine.backend_mut().loaded(id));
        for &seq in &running {
            engine.append(seq, &[TokenId::new(rng.below(50) as u32)]).expect("room");
        }
        engine.commit(step).expect("it is open");
        engine.complete(step).expect("it is committed");
        let pick = running[rng.below(running.len() as u64) as usize];
        if rng.one_in(3)
            && let Ok(Forked { children, step, .. }) = engine.fork(pick, 1, 0)
        {
            running.extend(children);
            step.into_iter().for_each(|step| engine.complete(step).expect("it counts as committed"));
        }
        if running.len() > 4 {
            engine.finish(running.pop_front().expect("five")).expect("it is live");
        }
        engine.verify().expect("all invariants hold");
    }
    assert!([0, 2, 3].iter().all(|&kind| kinds[kind] > 20), "copies, slots, saves, loads: {kinds:?}");
    drop(worker.input);
    assert!(worker.child.wait().expect("it ends").success());
}
