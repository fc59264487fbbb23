//! Random programs over an arena on any device. They compare every row with float64 attention over
//! contiguous K and V.

#![allow(dead_code)] // each test uses a part

use candle_core::{Device, Tensor};
use kvarena::testkit::rng::Rng;
use kvarena::{Attend, Capacity, Extend, KvDtype, KvShape, Namespace, PoolConfig, SeqKey, TokenId};
use kvarena_candle::{Error, KvArena, Step};

pub const KV_HEADS: usize = 2;
pub const Q_HEADS: usize = 4;
pub const DIM: usize = 32;
pub const LAYERS: usize = 2;
/// Heads of q, k and v.
pub const HEADS: [usize; 3] = [Q_HEADS, KV_HEADS, KV_HEADS];
pub const ALL_HEADS: usize = Q_HEADS + 2 * KV_HEADS;

pub fn arena(device: &Device) -> KvArena {
    KvArena::new(config(), device).expect("a small pool")
}

pub fn config() -> PoolConfig {
    PoolConfig {
        layers: LAYERS as u32,
        shape: KvShape::heads(KV_HEADS as u32, DIM as u32),
        dtype: KvDtype::F32,
        page_size: 4,
        capacity: Capacity::Pages(256),
        ..PoolConfig::default()
    }
}

pub fn attention() -> Attend {
    Attend::new(Q_HEADS as u32, DIM as u32)
}

/// Returns random rows, one for each new token. A row has q, k and v next to each other, as a fused
/// projection computes them.
pub fn numbers(rng: &mut Rng, rows: usize) -> Vec<f32> {
    (0..rows * ALL_HEADS * DIM).map(|_| rng.within(0, 2000) as f32 / 1000.0 - 1.0).collect()
}

/// Returns q, k and v as parts of fused rows.
pub fn fused(numbers: &[f32], device: &Device) -> [Tensor; 3] {
    let rows = numbers.len() / (ALL_HEADS * DIM);
    let all = Tensor::from_slice(numbers, (rows, ALL_HEADS, DIM), device).expect("numbers");
    let part = |from, heads| all.narrow(1, from, heads).expect("heads");
    [part(0, Q_HEADS), part(Q_HEADS, KV_HEADS), part(Q_HEADS + KV_HEADS, KV_HEADS)]
}

/// Returns the packed numbers of q, k or v.
pub fn packed(numbers: &[f32], side: usize) -> Vec<f32> {
    let from: usize = HEADS[..side].iter().sum();
    let rows = numbers.chunks(ALL_HEADS * DIM);
    rows.flat_map(|row| &row[from * DIM..(from + HEADS[side]) * DIM]).copied().collect()
}

/// Returns q, k and v in one of the forms that the bridge reads in place: parts of fused rows,
/// packed rows, or rows of a longer tensor.
fn views(numbers: &[f32], form: u64, device: &Device) -> [Tensor; 3] {
    let rows = numbers.len() / (ALL_HEADS * DIM);
    [0, 1, 2].map(|side| match form {
        0 => fused(numbers, device)[side].clone(),
        1 => Tensor::from_vec(packed(numbers, side), (rows, HEADS[side], DIM), device).expect("numbers"),
        _ => {
            let more = [packed(numbers, side), vec![f32::NAN; 3 * HEADS[side] * DIM]].concat();
            let all = Tensor::from_vec(more, (rows + 3, HEADS[side], DIM), device);
            all.and_then(|all| all.narrow(0, 0, rows)).expect("rows")
        }
    })
}

/// A sequence, with the fused rows of all its tokens in each layer.
pub struct Sequence {
    pub seq: SeqKey,
    pub rows: [Vec<Vec<f32>>; LAYERS],
}

/// Returns the float64 attention of the last row over all rows.
pub fn exact(rows: &[Vec<f32>], head: usize) -> Vec<f64> {
    let q = &rows.last().expect("a row")[head * DIM..][..DIM];
    let kv_head = head / (Q_HEADS / KV_HEADS);
    let numbers_of = |row: &[f32], side: usize| {
        let from = (Q_HEADS + side * KV_HEADS + kv_head) * DIM;
        row[from..from + DIM].iter().map(|&x| f64::from(x)).collect::<Vec<_>>()
    };
    let weight = |row: &Vec<f32>| {
        let product: f64 = numbers_of(row, 0).iter().zip(q).map(|(k, &q)| k * f64::from(q)).sum();
        (product / (DIM as f64).sqrt()).exp()
    };
    let weights: Vec<f64> = rows.iter().map(weight).collect();
    let total: f64 = weights.iter().sum();
    let mut out = vec![0.0; DIM];
    for (row, weight) in rows.iter().zip(&weights) {
        for (out, v) in out.iter_mut().zip(numbers_of(row, 1)) {
            *out += weight / total * v;
        }
    }
    out
}

/// A random program.
pub struct Program<'a> {
    device: &'a Device,
    /// Other devices and streams, whose tensors the arena rejects.
    others: &'a [Device],
    /// Maximum number of tokens of a prompt.
    longest: u64,
    arena: KvArena,
    rng: Rng,
    running: Vec<Sequence>,
    /// Results. Each has a copy of its numbers, made when the result was computed.
    kept: Vec<(Tensor, Vec<f32>)>,
    /// Number of rejected calls of each kind.
    pub rejected: [u32; WRONG],
}

/// Number of kinds of wrong calls.
pub const WRONG: usize = 7;

impl<'a> Program<'a> {
    pub fn new(device: &'a Device, others: &'a [Device], longest: u64, seed: u64) -> Self {
        Self::over(arena(device), device, others, longest, seed)
    }

    /// Returns a program over an arena of [`config`].
    pub fn over(arena: KvArena, device: &'a Device, others: &'a [Device], longest: u64, seed: u64) -> Self {
        Self {
            device,
            others,
            longest,
            arena,
            rng: Rng::new(seed),
            running: Vec::new(),
            kept: Vec::new(),
            rejected: [0; WRONG],
        }
    }

    /// Runs `turns` turns. Then it drops the arena and checks that the results have not changed.
    pub fn run(mut self, turns: u32) -> [u32; WRONG] {
        (0..turns).for_each(|turn| self.turn(turn));
        drop(self.arena);
        for (tensor, numbers) in &self.kept {
            let now = tensor.flatten_all().and_then(|x| x.to_vec1::<f32>());
            assert_eq!(now.expect("numbers"), *numbers);
        }
        self.rejected
    }

    /// Runs one turn. A prompt may join. Then a step is computed, and closed or dropped. At the end a
    /// sequence may finish.
    fn turn(&mut self, turn: u32) {
        let Self { arena, rng, running, .. } = self;
        if running.is_empty() || (running.len() < 4 && rng.one_in(2)) {
            // All prompts differ, because equal tokens would share pages although their rows differ.
            let tokens = (0..rng.within(1, self.longest) as u32).map(|at| TokenId::new(1000 * turn + at));
            let tokens: Vec<TokenId> = tokens.collect();
            let seq = arena.engine.admit(Namespace::default(), &tokens, 0).expect("room");
            running.push(Sequence { seq, rows: Default::default() });
        }
        let mut item = |one: &Sequence| {
            let planned = arena.engine.planned_len(one.seq).expect("it runs");
            let left = arena.engine.token_count(one.seq).expect("it runs") - planned;
            Extend { seq: one.seq, len: rng.within(1, left.into()) as u32 }
        };
        let items: Vec<Extend> = running.iter().map(&mut item).collect();
        let before: Vec<_> = running.iter().map(|one| one.rows.clone()).collect();
        let layers = if rng.one_in(4) { rng.below(LAYERS as u64 + 1) as usize } else { LAYERS };
        let step = arena.step(&items).expect("room");
        let mut calls =
            Calls { device: self.device, others: self.others, rng, kept: &mut self.kept, rejected: &mut self.rejected };
        (0..layers).for_each(|layer| calls.compute(&step, layer, running));
        if layers == LAYERS && !rng.one_in(5) {
            let id = step.launched();
            for one in &*running {
                let engine = &mut arena.engine;
                if engine.token_count(one.seq) == engine.planned_len(one.seq) {
                    engine.append(one.seq, &[TokenId::new(7)]).expect("room");
                }
            }
            arena.close(id).expect("it was launched");
        } else {
            // Dropping a step undoes it, however many layers were computed.
            drop(step);
            running.iter_mut().zip(before).for_each(|(one, rows)| one.rows = rows);
        }
        if running.len() > 1 && rng.one_in(6) {
            let done = running.swap_remove(rng.below(running.len() as u64) as usize);
            arena.engine.finish(done.seq).expect("it runs");
        }
        arena.engine.verify().expect("all invariants hold");
    }
}

/// The calls of a step.
struct Calls<'a> {
    device: &'a Device,
    others: &'a [Device],
    rng: &'a mut Rng,
    kept: &'a mut Vec<(Tensor, Vec<f32>)>,
    rejected: &'a mut [u32; WRONG],
}

impl Calls<'_> {
    /// Computes a layer, perhaps after wrong calls, and compares every row with the exact result.
    fn compute(&mut self, step: &Step<'_>, layer: usize, running: &mut [Sequence]) {
        let numbers = numbers(self.rng, step.plan().token_count());
        let [q, k, v] = views(&numbers, self.rng.below(3), self.device);
        for _ in 0..self.rng.below(3) {
            self.wrong(step, layer, &numbers);
        }
        let out = step.attend(layer, &attention(), &q, &k, &v).expect("valid attention");
        let flat = out.flatten_all().and_then(|x| x.to_vec1::<f32>()).expect("numbers");
        if self.rng.one_in(4) {
            self.kept.push((out, flat.clone()));
        }
        let mut rows = numbers.chunks(ALL_HEADS * DIM).zip(flat.chunks(Q_HEADS * DIM));
        for (sequence, row) in running.iter_mut().zip(step.plan().rows) {
            for (row, out) in rows.by_ref().take(row.extend_len as usize) {
                sequence.rows[layer].push(row.to_vec());
                for (head, out) in out.chunks(DIM).enumerate() {
                    for (out, exact) in out.iter().zip(exact(&sequence.rows[layer], head)) {
                        assert!((f64::from(*out) - exact).abs() < 1e-5, "{out} for {exact}");
                    }
                }
            }
        }
    }

    /// Makes one wrong call, which must fail and change nothing. Makes none if the drawn kind does not apply.
    fn wrong(&mut self, step: &Step<'_>, layer: usize, numbers: &[f32]) {
        let rows = numbers.len() / (ALL_HEADS * DIM);
        let side = self.rng.below(3) as usize;
        let heads = HEADS[side];
        let mut qkv = views(numbers, self.rng.below(3), self.device);
        let (mut at, mut attend) = (layer, attention());
        let kind = self.rng.below(WRONG as u64) as usize;
        let one = &mut qkv[side];
        match kind {
            0 => {
                let wide = vec![0.0_f64; rows * heads * DIM];
                *one = Tensor::from_vec(wide, (rows, heads, DIM), self.device).expect("numbers");
            }
            1 => at = [LAYERS, usize::MAX][self.rng.below(2) as usize],
            2 => {
                let more = vec![0.0_f32; (rows + 1) * heads * DIM];
                *one = Tensor::from_vec(more, (rows + 1, heads, DIM), self.device).expect("rows");
            }
            3 if rows > 1 => {
                let turned = Tensor::from_vec(packed(numbers, side), (heads, rows, DIM), self.device);
                *one = turned.and_then(|x| x.transpose(0, 1)).expect("a view");
            }
            4 if !self.others.is_empty() => {
                let other = &self.others[self.rng.below(self.others.len() as u64) as usize];
                *one = Tensor::from_vec(packed(numbers, side), (rows, heads, DIM), other).expect("numbers");
            }
            5 => attend.window = Some(0),
            6 => attend.q_heads += 1,
            _ => return,
        }
        let [q, k, v] = &qkv;
        let error = step.attend(at, &attend, q, k, v).expect_err("the call is wrong");
        let is_named = match kind {
            0 => matches!(error, Error::Dtype { .. }),
            2 | 6 => matches!(error, Error::Shape { .. }),
            3 => matches!(error, Error::Strides { .. }),
            4 => matches!(error, Error::Device { .. }),
            _ => matches!(error, Error::Engine(_)),
        };
        assert!(is_named, "{kind}: {error}");
        self.rejected[kind] += 1;
    }
}
