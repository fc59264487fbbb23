//! B20 to B22: the states of layers that keep one.
//!
//! An engine plans steps of texts with common prefixes, over a pool whose pages contain K, V and states. Up to three
//! steps are open, and a step is computed after later ones have begun. For each layer of a step, the test compares the
//! pages that rows read and write with those that the engine packed before the next plan (B21), and checks that no row
//! writes a page of another one (B22). It then copies the states, or leaves the copy to the kernel, compares every byte
//! of the pool with a shadow (B20), and writes random states as a kernel would.

use std::collections::{BTreeSet, VecDeque};
use std::ops::Range;

use super::{Report, TestBackend};
use crate::backend::{OpenBackend, StateBackend};
use crate::config::EngineConfig;
use crate::engine::Engine;
use crate::error::{EngineError, Error};
use crate::id::{LayerId, Namespace, PageId, SeqKey, TokenId};
use crate::layout::{Capacity, Groups, KvDtype, KvShape, PoolConfig, PoolLayout, Reach, StatePart};
use crate::plan::{BatchPlan, Extend, OwnedPlan, PlanSize, StepScratch};
use crate::testkit::padded::padded;
use crate::testkit::rng::{Rng, mix};

/// Maximum size of a pool in bytes; every comparison reads the whole pool.
const POOL_BYTES: u64 = 3 << 20;
/// Maximum number of open steps.
const STEPS: u32 = 3;
/// Numbers of pages of a state: up to those of Kimi K3.
const STATE_PAGES: [u32; 8] = [1, 1, 2, 3, 5, 24, 36, 69];

/// A backend with states under test.
pub trait StateTestBackend: TestBackend + StateBackend {
    /// Returns the pages of a layer's states that the rows of an open plan read, and those that they write; -1 for
    /// padding.
    fn slots(&mut self, plan: &BatchPlan<'_>, layer: LayerId) -> [Vec<i32>; 2];
}

/// Checks B20 to B22 with a fresh engine for each seed.
///
/// # Panics
/// At the first violation. The message contains the seed. Also if rows seldom read a cached state in at least 10 seeds.
pub fn check_states<O>(options: impl Fn() -> O, seeds: Range<u64>) -> Report
where
    O: OpenBackend<Backend: StateTestBackend>,
{
    let (mut report, mut hits) = (Report::default(), 0);
    for seed in seeds {
        let mut rng = Rng::new(mix(seed));
        let config = draw(&mut rng);
        let engine = Engine::new(config, options()).expect("a small engine opens");
        let prompts = [0; 3].map(|_| text(&mut rng, 6 * u64::from(config.pool.page_size))).to_vec();
        let (texts, begun, shadow) = (Vec::new(), VecDeque::new(), Vec::new());
        let mut host = Host { engine, rng, seed, prompts, texts, begun, shadow, report: &mut report };
        host.fill();
        (0..40).for_each(|_| host.round());
        host.compute_all();
        hits += host.engine.stats().hit_tokens;
        report.runs += 1;
    }
    assert!(report.runs < 10 || hits > report.runs, "{hits} tokens before cached states in {report}");
    report
}

fn draw(rng: &mut Rng) -> EngineConfig {
    loop {
        let config = any(rng);
        if config.pool.layout().is_ok_and(|layout| layout.total_bytes() <= POOL_BYTES) {
            return config;
        }
    }
}

/// Returns a config of any size, whose pages may be too small for states.
fn any(rng: &mut Rng) -> EngineConfig {
    let latent = (KvShape::Latent { rank: 512, rope: 64 }, KvDtype::Bf16);
    let dtype = rng.pick(&[KvDtype::F32, KvDtype::F16, KvDtype::Bf16, KvDtype::Fp8E4M3]);
    let heads = KvShape::heads(rng.pick(&[1, 1, 2]), rng.pick(&[64, 128]));
    let (shape, dtype) = if rng.one_in(6) { latent } else { (heads, dtype) };
    let reaches = [Reach::All, Reach::Window(20), Reach::State];
    let reaches = if rng.one_in(3) { &reaches[..] } else { &[Reach::All, Reach::State] };
    let state = reaches.len() - 1;
    let (lanes, pages) = (rng.within(1, 3) as u32, rng.pick(&STATE_PAGES));
    let kv_layers: Vec<u8> = (0..state).flat_map(|group| vec![group as u8; rng.within(1, 2) as usize]).collect();
    let mut layers = [&kv_layers[..], &vec![state as u8; (lanes * pages) as usize]].concat();
    let turn = rng.below(layers.len() as u64) as usize;
    layers.rotate_left(turn);
    let groups = Groups::new(reaches, &layers).expect("all groups have layers");
    let page_size = rng.pick(&[8, 16, 24, 40]);
    let pool = PoolConfig { layers: layers.len() as u32, shape, dtype, page_size, ..PoolConfig::default() };
    let with =
        |parts: &[StatePart]| PoolConfig { groups: groups.with_state(state as u32, parts).expect("parts"), ..pool };
    let page_bytes = with(&[StatePart { heads: 1, head_bytes: 1 }]).layout().map_or(0, |layout| layout.page_bytes());
    let lane = (page_bytes as u32 / lanes / 256 * 256).max(256);
    let first = StatePart { heads: 2, head_bytes: lane / 4 };
    let second = StatePart { heads: 1, head_bytes: lane - lane / 4 * 2 - rng.below(100) as u32 };
    let sequences = rng.within(1, 4) as u32;
    let pages = 1 + sequences * (3 * pages + 40) + rng.below(20) as u32;
    let pool = PoolConfig { capacity: Capacity::Pages(pages), ..with(&[first, second]) };
    EngineConfig {
        max_sequences: sequences,
        max_sequence_len: 20 * page_size,
        max_steps: STEPS,
        state_margin: rng.pick(&[0, 0, 5, 128]),
        prefault: false,
        ..EngineConfig::from(pool)
    }
}

fn text(rng: &mut Rng, most: u64) -> Vec<TokenId> {
    (0..rng.within(1, most)).map(|_| TokenId::new(rng.below(2) as u32)).collect()
}

/// A step that is not computed yet.
struct Begun {
    plan: OwnedPlan,
    /// `[pages of a state, rows]`: the pages to read, and those to write.
    wanted: [Vec<i32>; 2],
}

/// A host that serves texts.
struct Host<'a, B: StateTestBackend> {
    engine: Engine<B>,
    rng: Rng,
    seed: u64,
    /// Common prefixes of texts.
    prompts: Vec<Vec<TokenId>>,
    /// The sequences, and their numbers of tokens.
    texts: Vec<(SeqKey, u32)>,
    begun: VecDeque<Begun>,
    /// The bytes of the pool.
    shadow: Vec<u8>,
    report: &'a mut Report,
}

impl<B: StateTestBackend> Host<'_, B> {
    fn layout(&self) -> PoolLayout {
        self.engine.shape().layout
    }

    fn read_pool(&mut self) -> Vec<u8> {
        let layout = self.layout();
        let pages: Vec<_> = (0..layout.page_count()).map(PageId::new).collect();
        let mut bytes = vec![0; layout.total_bytes() as usize];
        let backend = self.engine.backend_mut();
        backend.synchronize().expect("nothing failed");
        backend.read_pages(&pages, &mut bytes);
        bytes
    }

    /// Fills all pages except page 0, whose states must be zero.
    fn fill(&mut self) {
        let layout = self.layout();
        let pages: Vec<_> = (1..layout.page_count()).map(PageId::new).collect();
        let garbage = vec![0xff; pages.len() * layout.page_bytes() as usize];
        self.engine.backend_mut().synchronize().expect("nothing failed");
        self.engine.backend_mut().write_pages(&pages, &garbage);
        self.shadow = self.read_pool();
        let state = layout.state().expect("layers keep a state");
        let zeros = &self.shadow[..(u64::from(state.lanes) * state.lane_bytes) as usize];
        assert!(zeros.iter().all(|&byte| byte == 0), "seed {}: the states of page 0 are zero", self.seed);
    }

    fn round(&mut self) {
        if self.rng.one_in(2) {
            self.admit();
        }
        self.plan();
        let late = self.rng.below(STEPS.into()) as usize;
        while self.begun.len() > late {
            self.compute();
        }
        if self.rng.one_in(4) {
            self.finish();
        }
    }

    fn admit(&mut self) {
        let mut tokens = self.prompts[self.rng.below(self.prompts.len() as u64) as usize].clone();
        let most = if self.rng.one_in(2) { 4 } else { 2 * u64::from(self.layout().page_size()) };
        tokens.extend(text(&mut self.rng, most));
        if let Ok(seq) = self.engine.admit(Namespace::default(), &tokens, 0) {
            self.texts.push((seq, tokens.len() as u32));
        }
    }

    /// Computes all steps, and finishes a sequence.
    fn finish(&mut self) {
        self.compute_all();
        if !self.texts.is_empty() {
            let at = self.rng.below(self.texts.len() as u64) as usize;
            self.engine.finish(self.texts.swap_remove(at).0).expect("it is live");
        }
    }

    /// Returns the items of a step: for each text some of its tokens, or a new one.
    fn items(&mut self) -> Vec<Extend> {
        let page_size = u64::from(self.layout().page_size());
        let mut items = Vec::new();
        for (seq, known) in &mut self.texts {
            let planned = self.engine.planned_len(*seq).expect("it is live");
            let token = TokenId::new(self.rng.below(2) as u32);
            if planned == *known && self.engine.append(*seq, &[token]).is_ok() {
                *known += 1;
            }
            let most = self.rng.within(1, 3 * page_size) as u32;
            let len = self.engine.next_len(*seq, most.min(*known - planned)).expect("it runs");
            if len > 0 && !self.rng.one_in(5) {
                items.push(Extend { seq: *seq, len });
            }
        }
        items
    }

    fn plan(&mut self) {
        if self.begun.len() == STEPS as usize {
            self.compute();
        }
        let items = self.items();
        if items.is_empty() {
            return;
        }
        let tokens: u32 = items.iter().map(|item| item.len).sum();
        let size = PlanSize { rows: items.len() + 2, tokens: tokens as usize + 3 };
        let (mut scratch, mut other) = (StepScratch::new(), StepScratch::new());
        let is_padded = self.rng.one_in(2);
        let planned = match is_padded {
            true => self.engine.plan_padded(&mut scratch, &items, &[], size),
            false => self.engine.plan_batch(&mut scratch, &items),
        };
        let plan = match planned {
            Ok(plan) => plan,
            Err(EngineError::Core(Error::OutOfPages { .. })) => return self.finish(),
            Err(error) => panic!("seed {}: {error}", self.seed),
        };
        // Padding that is added after a plan has begun makes another plan.
        let plan = if !is_padded && self.rng.one_in(2) { padded(&plan, &mut other, size) } else { plan };
        let mut begun = Begun { plan: OwnedPlan::new(), wanted: Default::default() };
        begun.plan.copy_from(&plan);
        let (mut scratch, rows) = (StepScratch::new(), begun.plan.plan().rows.len());
        let packed = self.engine.packed_states(&mut scratch, &items, rows).expect("the items were planned");
        begun.wanted = [packed.reads, packed.writes].map(<[i32]>::to_vec);
        self.begun.push_back(begun);
    }

    fn compute_all(&mut self) {
        while !self.begun.is_empty() {
            self.compute();
        }
    }

    /// Computes and completes the first step that is not computed.
    fn compute(&mut self) {
        let begun = self.begun.pop_front().expect("a step has begun");
        let plan = &begun.plan.plan();
        self.check_slots(plan, &begun.wanted);
        self.check_owners(plan, &begun.wanted);
        if !self.rng.one_in(3) {
            self.engine.backend_mut().copy_states(plan).expect("the step is open");
            self.move_shadow(&begun.wanted);
        }
        let pool = self.read_pool();
        let page_bytes = self.layout().page_bytes() as usize;
        let pages = pool.chunks_exact(page_bytes).zip(self.shadow.chunks_exact(page_bytes));
        let other = pages.enumerate().find(|(_, (page, shadow))| page != shadow).map(|(page, _)| page);
        assert_eq!(other, None, "seed {}: B20: the bytes of a page are others, {plan:?}", self.seed);
        self.write_states(&begun.wanted);
        self.engine.commit(plan.step).expect("steps are computed in order");
        self.engine.complete(plan.step).expect("it is committed");
        let ended = self.engine.backend_mut().copy_states(plan);
        assert!(ended.is_err(), "seed {}: B8: states of an ended step are copied", self.seed);
        self.engine.verify().expect("nothing is broken");
        self.report.steps += 1;
    }

    /// B21: compares the pages of each row in each layer.
    fn check_slots(&mut self, plan: &BatchPlan<'_>, wanted: &[Vec<i32>; 2]) {
        let (layout, rows) = (self.layout(), plan.rows.len());
        for layer in (0..layout.layers()).map(LayerId::new) {
            let place = layout.place(layer);
            if Some(place.group) == layout.groups().state_group() {
                let got = self.engine.backend_mut().slots(plan, layer);
                let wanted = [0, 1].map(|part| &wanted[part][place.track as usize * rows..][..rows]);
                assert_eq!(got, wanted, "seed {}: B21: slots of {layer:?}, {plan:?}", self.seed);
            }
        }
        self.report.rows += rows as u64;
    }

    /// B22: a row's written pages are its own. New sequences read page 0.
    fn check_owners(&self, plan: &BatchPlan<'_>, [reads, writes]: &[Vec<i32>; 2]) {
        let (rows, mut written) = (plan.rows.len(), BTreeSet::new());
        for (at, (&read, &write)) in reads.iter().zip(writes).enumerate() {
            let row = &plan.rows[at % rows];
            if row.kv_len == 0 {
                assert_eq!((read, write), (-1, -1), "seed {}: padding has no pages", self.seed);
                continue;
            }
            assert_eq!(read == 0, row.kv_len == row.extend_len, "seed {}: new sequences read page 0", self.seed);
            assert!(write > 0 && written.insert(write), "seed {}: B22: page {write} is written twice", self.seed);
            let others = reads.iter().enumerate().filter(|&(other, &page)| other != at && page == write);
            assert_eq!(others.count(), 0, "seed {}: B22: another row reads page {write}", self.seed);
        }
    }

    /// Copies the states in the shadow.
    fn move_shadow(&mut self, [reads, writes]: &[Vec<i32>; 2]) {
        let page_bytes = self.layout().page_bytes() as usize;
        for (&read, &write) in reads.iter().zip(writes).filter(|(read, write)| read != write) {
            let start = read as usize * page_bytes;
            self.shadow.copy_within(start..start + page_bytes, write as usize * page_bytes);
        }
    }

    /// Writes random bytes to the pages that rows write.
    fn write_states(&mut self, [_, writes]: &[Vec<i32>; 2]) {
        let page_bytes = self.layout().page_bytes() as usize;
        let pages: Vec<_> = writes.iter().filter(|&&page| page > 0).map(|&page| PageId::new(page as u32)).collect();
        let mut bytes = vec![0; pages.len() * page_bytes];
        for (page, bytes) in pages.iter().zip(bytes.chunks_exact_mut(page_bytes)) {
            bytes.fill(self.rng.below(256) as u8);
            self.shadow[page.index() * page_bytes..][..page_bytes].copy_from_slice(bytes);
        }
        self.engine.backend_mut().write_pages(&pages, &bytes);
    }
}
