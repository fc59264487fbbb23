//! A drafter's layer in the pool of its model. Its K and V for position `p` depend on token `p + 1` and on the model's
//! hidden state at `p`, and are stored one place later, at `p + 1`. So a page depends on its own tokens alone: a hit
//! drops nothing, and the hits are those of the model without the drafter. After a hit, the first place needs the
//! hidden state before it, which the page before keeps in the host's bytes.

use kvarena::layout::{Groups, PlaneName, Reach};
use kvarena::plan::BatchRow;
use kvarena::stats::Stats;
use kvarena::testkit::rng::Rng;
use kvarena::{
    Attend, Backend, BatchPlan, Capacity, Cpu, CpuOptions, Engine, EngineConfig, EngineError, Error, Extend, Keep,
    KvShape, LayerId, Namespace, Null, PageId, PoolConfig, SeqKey, StepScratch, TokenId,
};

const PAGE_SIZE: u32 = 4;
const TARGET: LayerId = LayerId::new(0);
const DRAFTER: LayerId = LayerId::new(1);
/// Elements of the drafter's heads.
const DIM: usize = 3;
const HEADS: usize = 2;

/// Returns pseudorandom numbers from -1 to 1 for a seed.
fn numbers<const N: usize>(seed: u64) -> [f32; N] {
    let mut rng = Rng::new(seed);
    std::array::from_fn(|_| rng.below(2001) as f32 / 1000.0 - 1.0)
}

/// The hidden state of the model behind tokens: here any function of all of them.
fn hidden(tokens: &[TokenId]) -> u32 {
    tokens.iter().fold(7, |hash, token| (hash ^ token.raw()).wrapping_mul(0x9e37_79b1).rotate_left(13))
}

/// Returns the drafter's K and V at place `place` of these tokens, from the hidden state before it.
fn row(before: u32, token: TokenId) -> [f32; 2 * HEADS * DIM] {
    numbers(u64::from(before) << 32 | u64::from(token.raw()))
}

fn query(token: TokenId) -> [f32; HEADS * DIM] {
    numbers(u64::from(token.raw()) | 1 << 63)
}

/// Attention in f64 of one head over places 1 to `last`.
fn naive(tokens: &[TokenId], last: usize, head: usize) -> [f64; DIM] {
    let q = query(tokens[last]);
    let own = head * DIM..head * DIM + DIM;
    let dot = |k: &[f32]| q[own.clone()].iter().zip(k).map(|(&q, &k)| f64::from(q) * f64::from(k)).sum::<f64>();
    let rows: Vec<_> = (1..=last).map(|place| row(hidden(&tokens[..place]), tokens[place])).collect();
    let weights: Vec<f64> = rows.iter().map(|row| (dot(&row[own.clone()]) / (DIM as f64).sqrt()).exp()).collect();
    let sum: f64 = weights.iter().sum();
    std::array::from_fn(|i| {
        let value = |row: &[f32; 2 * HEADS * DIM]| f64::from(row[HEADS * DIM + own.start + i]);
        rows.iter().zip(&weights).map(|(row, weight)| weight * value(row)).sum::<f64>() / sum
    })
}

fn config(with_drafter: bool, swap_pages: u32) -> EngineConfig {
    let groups = Groups::new(&[Reach::All, Reach::All], &[0, 1]);
    let groups = groups.and_then(|groups| groups.with_shape(1, KvShape::heads(HEADS as u32, DIM as u32), None));
    let pool = PoolConfig {
        layers: if with_drafter { 2 } else { 1 },
        groups: if with_drafter { groups.expect("two groups") } else { Groups::ONE },
        extra_bytes: if with_drafter { 4 } else { 0 },
        shape: KvShape::heads(1, 2),
        page_size: PAGE_SIZE,
        capacity: Capacity::Pages(40),
        swap_pages,
        ..PoolConfig::default()
    };
    EngineConfig { max_sequences: 6, max_steps: 2, ..pool.into() }
}

/// A row of a plan as the host knows it.
struct Known<'a> {
    text: &'a [TokenId],
    /// After a hit, the page before the row's first token. Later the host has the hidden state of its last step.
    hit: Option<PageId>,
}

/// Computes a step's layer of the drafter. Returns the number of rows that continue a hit.
fn draft(cpu: &mut Cpu, plan: &BatchPlan<'_>, rows: &[Known<'_>]) -> u32 {
    let mut continued = 0;
    let (mut k, mut v, mut q) = (Vec::<f32>::new(), Vec::<f32>::new(), Vec::<f32>::new());
    let layout = *cpu.layout();
    let mut notes = Vec::new();
    for (row_of, &Known { text, hit }) in plan.rows.iter().zip(rows) {
        let start = (row_of.kv_len - row_of.extend_len) as usize;
        let mut before = hidden(&text[..start]);
        if let Some(page) = hit {
            assert!(start.is_multiple_of(PAGE_SIZE as usize), "a hit ends with a page");
            let at = layout.extra(page).start - u64::from(page.raw()) * layout.page_bytes();
            let piece = cpu.page_piece(page, 0).expect("it exists");
            let kept: [u8; 4] = piece[at as usize..at as usize + 4].try_into().expect("four bytes");
            assert_eq!(u32::from_le_bytes(kept), before, "the hidden state of token {}", start - 1);
            before = u32::from_le_bytes(kept);
            continued += 1;
        }
        for place in start..row_of.kv_len as usize {
            let numbers = if place == 0 { [1000.0; 2 * HEADS * DIM] } else { row(before, text[place]) };
            k.extend(&numbers[..HEADS * DIM]);
            v.extend(&numbers[HEADS * DIM..]);
            q.extend(query(text[place]));
            before = hidden(&text[..=place]);
            if (place as u32 + 1).is_multiple_of(PAGE_SIZE) {
                let slot = plan.slot_mapping.get(row_of.qo_start as usize + place - start).expect("it is stored");
                notes.push((layout.page_of(slot).0, before));
            }
        }
    }
    cpu.store_cache(plan, DRAFTER, k[..].into(), v[..].into()).expect("the plan is sound");
    for (page, hidden) in notes {
        let bytes = layout.extra(page);
        cpu.pool_mut()[bytes.start as usize..bytes.end as usize].copy_from_slice(&hidden.to_le_bytes());
    }
    let mut out = vec![0.0_f32; q.len()];
    let attend = Attend { first: 1, ..Attend::new(HEADS as u32, DIM as u32) };
    cpu.attend(plan, DRAFTER, &attend, q[..].into(), (&mut out[..]).into(), None).expect("the plan is sound");
    let mut out = out.chunks_exact(DIM);
    for (row_of, Known { text, .. }) in plan.rows.iter().zip(rows) {
        for place in row_of.kv_len - row_of.extend_len..row_of.kv_len {
            for head in 0..HEADS {
                let got = out.next().expect("one for each token and head");
                if place == 0 {
                    continue; // Nothing is before it, and no draft continues from it.
                }
                let want = naive(text, place as usize, head);
                let near = got.iter().zip(want).all(|(&got, want)| (f64::from(got) - want).abs() < 1e-5);
                assert!(near, "place {place}, head {head}: {got:?}, not {want:?}");
            }
        }
    }
    continued
}

struct Chat {
    seq: SeqKey,
    text: Vec<TokenId>,
    /// Whether a step has computed its last planned token.
    is_computed: bool,
}

/// Returns what the host knows of a planned row. Pages from swap memory are in its table once it is planned.
fn known<'a, B: Backend>(engine: &Engine<B>, chat: &'a Chat, row: &BatchRow) -> Known<'a> {
    let start = row.kv_len - row.extend_len;
    let mut table = [0; 64];
    engine.write_tables(&[chat.seq], 0, table.len(), 0, &mut table).expect("it is long enough");
    let is_hit = start > 0 && !chat.is_computed;
    Known { text: &chat.text, hit: is_hit.then(|| PageId::new(table[(start / PAGE_SIZE) as usize - 1])) }
}

/// Runs random chats, and calls `compute` with each plan and its rows. The program depends on the seed and on the
/// engine's answers.
fn run<B: Backend>(
    mut engine: Engine<B>,
    seed: u64,
    mut compute: impl FnMut(&mut B, &BatchPlan<'_>, &[Known<'_>]),
) -> Stats {
    let mut rng = Rng::new(seed);
    let mut scratch = StepScratch::new();
    let mut chats: Vec<Chat> = Vec::new();
    for _ in 0..300 {
        if chats.len() < 4 {
            let shared = rng.below(3) as u32;
            let len = rng.within(1, 30) as u32;
            let text: Vec<_> =
                (0..len).map(|at| TokenId::new(if at < 17 { shared } else { rng.below(4) as u32 })).collect();
            if let Ok(seq) = engine.admit(Namespace::default(), &text, 0) {
                chats.push(Chat { seq, text, is_computed: false });
            }
        }
        let mut items = Vec::new();
        for chat in &mut chats {
            if engine.planned_len(chat.seq).expect("it runs") as usize == chat.text.len() {
                let token = TokenId::new(rng.below(4) as u32);
                engine.append(chat.seq, &[token]).expect("there is room");
                chat.text.push(token);
            }
            let most = engine.extend_max(chat.seq).expect("it runs");
            items.push(Extend { seq: chat.seq, len: rng.within(1, u64::from(most)) as u32 });
        }
        match engine.plan_batch(&mut scratch, &items) {
            Ok(plan) => {
                let rows: Vec<_> = chats.iter().zip(plan.rows).map(|(chat, row)| known(&engine, chat, row)).collect();
                compute(engine.backend_mut(), &plan, &rows);
                let step = plan.step;
                engine.commit(step).expect("it is open");
                engine.complete(step).expect("it is committed");
                chats.iter_mut().for_each(|chat| chat.is_computed = true);
            }
            Err(EngineError::Core(Error::OutOfPages { .. })) => {
                let chat = chats.pop().expect("it lacks pages");
                engine.preempt(chat.seq, Keep::Publish).expect("it runs");
                engine.finish(chat.seq).expect("it is preempted");
            }
            Err(error) => panic!("{error}"),
        }
        if rng.one_in(6) && !chats.is_empty() {
            let chat = chats.swap_remove(rng.below(chats.len() as u64) as usize);
            engine.finish(chat.seq).expect("it runs");
        }
    }
    engine.verify().expect("it is sound");
    engine.stats()
}

#[test]
fn a_drafters_layer_hits_with_its_model() {
    let mut continued = 0;
    for (seed, swap_pages) in (0..20).flat_map(|seed| [(seed, 0), (seed, 12)]) {
        let cpu = Engine::new(config(true, swap_pages), CpuOptions::with_threads(1)).expect("a sound config");
        let with = run(cpu, seed, |cpu, plan, known| {
            let rows = vec![0.5_f32; 2 * plan.token_count()];
            cpu.store_cache(plan, TARGET, rows[..].into(), rows[..].into()).expect("the plan is sound");
            continued += draft(cpu, plan, known);
        });
        let plain = Engine::new(config(false, swap_pages), Null).expect("a sound config");
        let without = run(plain, seed, |_, _, _| ());
        assert_eq!(with, without, "the drafter changes nothing");
        assert!(with.hit_tokens > 100 && with.evicted_pages > 100, "{with}");
    }
    assert!(continued > 500, "{continued} rows continued a hit");
}

/// The shares of a page: the model's layers, then the drafter's, then the host's bytes.
#[test]
fn a_page_holds_the_layers_and_the_hosts_bytes() {
    let layout = config(true, 0).pool.layout().expect("a pool");
    let page = |group: u32| layout.of_group(group).strides(PlaneName::K).expect("a plane");
    let [model, drafter] = [PAGE_SIZE * 2 * 2 * 4, PAGE_SIZE * 2 * (HEADS * DIM) as u32 * 4].map(u64::from);
    assert_eq!([page(0).origin, page(1).origin], [0, model.next_multiple_of(16)]);
    let extra = (model.next_multiple_of(16) + drafter).next_multiple_of(256);
    assert_eq!(layout.extra(PageId::new(0)), extra..extra + 4);
    assert_eq!(layout.page_bytes(), extra + 256);
    assert_eq!((layout.tracks(), layout.tracks_of(1), layout.sequence_bytes(1, 100)), (1, 0, 0));
    let place = layout.place(DRAFTER);
    assert_eq!((place.group, place.track, place.lane), (1, 0, 0));
}
