//! A check with an engine that serves texts with common prefixes over the backend. It compares a sample of the outputs
//! of every call with attention in float64.
//!
//! K and V of a token depend on the whole text up to it, as in a model. A shared page is therefore right only if the
//! texts up to its end are equal. If the backend reads a shared span once for several rows, the outputs of each row
//! must still be right.

use std::ops::Range;

use super::case::{Case, HostRows, with_groups, with_shapes};
use super::compare::{Bound, compare_row};
use super::exact::attention;
use super::history::History;
use super::stored::Given;
use super::{Report, TestBackend};
use crate::backend::{OpenBackend, Queries};
use crate::config::EngineConfig;
use crate::engine::Engine;
use crate::error::{EngineError, Error};
use crate::id::{LayerId, Namespace, SeqKey, StepId, TokenId};
use crate::layout::{Capacity, Dtype, KvDtype, KvShape, Layout, PoolConfig, Scaling, TableShape};
use crate::plan::{BatchPlan, Extend, Keep, StepScratch};
use crate::testkit::rng::{Rng, mix};

/// Approximate number of compared query rows of a call.
const ROWS_COMPARED: u64 = 64;

/// K and V of one layer. `rows` contains the inputs of `store_cache`; `history` contains these values with the pool's
/// rounding.
#[derive(Clone, Default)]
struct Layer {
    history: History,
    rows: Vec<[Vec<f32>; 2]>,
}

/// A sequence with its text, and K and V of all its tokens.
#[derive(Clone)]
struct Text {
    seq: SeqKey,
    tokens: Vec<TokenId>,
    layers: Vec<Layer>,
    preempted: bool,
}

/// A host that serves texts.
struct Server<'a, B: TestBackend> {
    engine: Engine<B>,
    scratch: StepScratch,
    case: Case,
    given: Given,
    rng: Rng,
    seed: u64,
    /// Common prefixes of texts.
    beginnings: Vec<Vec<TokenId>>,
    texts: Vec<Text>,
    open: Vec<StepId>,
    report: &'a mut Report,
}

/// Serves texts with an engine for each seed. If `in_groups` is true, the pool has several groups of layers. `options`
/// returns the backend's options for a shape. `observe` receives the backend after the attention of each layer of a
/// step.
///
/// # Panics
/// At the first violation. The message about a wrong output contains the seed, the shape and the place.
pub fn check_served<O>(
    in_groups: bool,
    options: impl Fn(&Case) -> O,
    seeds: Range<u64>,
    mut observe: impl FnMut(&O::Backend),
) -> Report
where
    O: OpenBackend<Backend: TestBackend>,
{
    let mut report = Report::default();
    for seed in seeds {
        let mut rng = Rng::new(mix(seed));
        let (case, config) = std::iter::repeat_with(|| draw(&mut rng, in_groups))
            .find(|(case, _)| case.groups().all(|case| O::Backend::supports(&case)))
            .expect("a backend supports some shape");
        let engine = Engine::new(config, options(&case)).expect("a small engine opens");
        let given = Given { scales: case.scales(), labels: None };
        let beginnings = [20, 70, 150].map(|most| random_text(&mut rng, most)).to_vec();
        let (scratch, texts, open) = (StepScratch::new(), Vec::new(), Vec::new());
        let report = &mut report;
        let mut server = Server { engine, scratch, case, given, rng, seed, beginnings, texts, open, report };
        for _ in 0..24 {
            server.round(&mut observe);
        }
        report.runs += 1;
    }
    report
}

/// Returns a random shape, and a config whose pool may be too small for all texts.
fn draw(rng: &mut Rng, in_groups: bool) -> (Case, EngineConfig) {
    let rows = rng.pick(&[Dtype::F16, Dtype::Bf16]);
    let is_fp8 = rng.one_in(3);
    let scaling = rng.pick(&[Scaling::Static, Scaling::ByToken]);
    let page_size = rng.pick(&[1, 2, 5, 16, 16, 64]);
    let (sequences, len) = (rng.within(4, 14) as u32, 300);
    let pool = PoolConfig {
        layers: rng.within(1, 2) as u32,
        shape: KvShape::heads(rng.pick(&[1, 2, 3]), rng.pick(&[64, 128, 128, 256])),
        dtype: if is_fp8 { KvDtype::Fp8E4M3 } else { rows.into() },
        scaling: if is_fp8 { scaling } else { Scaling::Static },
        page_size,
        capacity: Capacity::Pages((sequences * rng.pick(&[60, 120, 300])).div_ceil(page_size) + 5),
        layout: rng.pick(&[Layout::LayerFirst, Layout::PageFirst]),
        ..PoolConfig::default()
    };
    let pool = if in_groups { with_groups(&pool, rng) } else { pool };
    let own = in_groups && rng.one_in(2);
    let pool = if own { with_shapes(&pool, rows, rng) } else { pool };
    let config = EngineConfig {
        max_sequences: sequences,
        max_sequence_len: len,
        max_tokens: u64::from(sequences * len),
        max_steps: 4,
        prefault: false,
        ..EngineConfig::from(pool)
    };
    let layout = pool.layout().expect("a valid pool");
    let mut dtypes = (0..layout.groups().count()).map(|group| layout.of_group(group).dtype());
    let is_fp8 = dtypes.any(KvDtype::is_quantised);
    let table = TableShape::of(&layout, sequences, len, config.max_tokens);
    let case = Case {
        layout,
        table: table.expect("a small table"),
        max_steps: config.max_steps,
        group_size: rng.pick(&[1, 2, 4, 4, 8, 12]),
        kv_rows: rows,
        q_rows: rows,
        max_len: len,
        extend_max: u32::MAX,
        scale_seed: (is_fp8 && pool.scaling == Scaling::Static).then(|| rng.bits()),
        label_seed: 0,
    };
    (case, config)
}

fn random_text(rng: &mut Rng, most: u64) -> Vec<TokenId> {
    (0..rng.within(1, most)).map(|_| TokenId::new(rng.below(3) as u32)).collect()
}

impl<B: TestBackend> Server<'_, B> {
    fn round(&mut self, observe: &mut impl FnMut(&B)) {
        self.change_texts();
        let items = self.items();
        if items.is_empty() {
            return;
        }
        let mut scratch = std::mem::take(&mut self.scratch);
        match self.engine.plan_batch(&mut scratch, &items) {
            Ok(plan) => {
                self.step(&items, &plan, observe);
                self.open.push(plan.step());
                self.engine.commit(plan.step()).expect("it is the next one");
            }
            Err(EngineError::Core(Error::OutOfPages { .. } | Error::OutOfSteps { .. })) => {
                self.complete();
                self.finish_one();
            }
            Err(error) => panic!("seed {}: {error}", self.seed),
        }
        self.scratch = scratch;
        self.engine.verify().expect("nothing is broken");
        self.report.steps += 1;
        if self.rng.one_in(2) {
            self.complete();
        }
    }

    /// Finishes, admits, forks, preempts and rolls back texts at random. Then resumes each preempted text, if possible.
    fn change_texts(&mut self) {
        if self.rng.one_in(5) {
            self.finish_one();
        }
        for _ in 0..self.rng.within(0, 3) {
            self.admit();
        }
        if !self.texts.is_empty() && self.rng.one_in(3) {
            self.fork();
        }
        let Some(i) = self.any() else { return };
        let (text, len) = (&mut self.texts[i], self.rng.within(1, 8) as usize);
        match self.rng.below(6) {
            0 if self.engine.preempt(text.seq, Keep::Publish).is_ok() => text.preempted = true,
            1 if text.tokens.len() > len => {
                let left = text.tokens.len() - len;
                if self.engine.rollback(text.seq, left as u32).is_ok() {
                    cut(text, left);
                }
            }
            _ => {}
        }
        for text in self.texts.iter_mut().filter(|text| text.preempted) {
            text.preempted = self.engine.resume(text.seq, 0).is_err();
        }
    }

    /// Returns the index of a random text, if there is one.
    fn any(&mut self) -> Option<usize> {
        let count = self.texts.len() as u64;
        (count > 0).then(|| self.rng.below(count) as usize)
    }

    fn finish_one(&mut self) {
        if let Some(i) = self.any() {
            let text = self.texts.swap_remove(i);
            self.engine.finish(text.seq).expect("it is live");
        }
    }

    fn complete(&mut self) {
        self.engine.backend_mut().synchronize().expect("nothing failed");
        for step in self.open.drain(..) {
            self.engine.complete(step).expect("it is committed, and no earlier step is open");
        }
    }

    /// Admits a text that begins with a common prefix, or with the tokens of another text.
    fn admit(&mut self) {
        let mut tokens = match self.any() {
            Some(i) if self.rng.one_in(3) => self.texts[i].tokens.clone(),
            _ => self.beginnings[self.rng.below(3) as usize].clone(),
        };
        tokens.truncate(200);
        tokens.extend(random_text(&mut self.rng, 30));
        let Ok(seq) = self.engine.admit(Namespace::default(), &tokens, 0) else { return };
        let layers = vec![Layer::default(); self.case.layout.layers() as usize];
        let mut text = Text { seq, tokens, layers, preempted: false };
        self.remember(&mut text);
        self.texts.push(text);
    }

    fn fork(&mut self) {
        let (i, count) = (self.any().expect("a text"), self.rng.within(1, 4) as u32);
        let parent = self.texts[i].clone();
        let Ok(forked) = self.engine.fork(parent.seq, count, 0) else { return };
        let child = |&seq: &SeqKey| Text { seq, ..parent.clone() };
        self.texts.extend(forked.children.iter().map(child));
        self.open.extend(forked.step);
    }

    /// Returns a random batch. If all known tokens of a text are planned, first appends new tokens to the text.
    fn items(&mut self) -> Vec<Extend> {
        let mut items = Vec::new();
        let new_tokens = self.rng.pick(&[1, 1, 1, 4, 9]);
        for i in 0..self.texts.len() {
            if self.texts[i].preempted || self.rng.one_in(6) {
                continue;
            }
            let seq = self.texts[i].seq;
            let sequence = self.engine.sequence(seq).expect("it is live");
            let known = sequence.token_len - sequence.planned_len;
            let len = if known > 0 {
                self.rng.pick(&[known, known, known.div_ceil(2)])
            } else {
                let more = random_text(&mut self.rng, new_tokens);
                if self.engine.append(seq, &more).is_err() {
                    continue;
                }
                self.texts[i].tokens.extend(&more);
                let mut text = self.texts[i].clone();
                self.remember(&mut text);
                self.texts[i] = text;
                more.len() as u32
            };
            items.push(Extend { seq, len });
        }
        items
    }

    /// Adds K and V of a text's tokens that have none.
    fn remember(&self, text: &mut Text) {
        let mut key = 0;
        for (position, token) in text.tokens.iter().enumerate() {
            key = mix(key ^ u64::from(token.raw()) << 32 ^ position as u64);
            for (i, layer) in text.layers.iter_mut().enumerate() {
                if position < layer.rows.len() {
                    continue;
                }
                let mut rng = Rng::new(mix(key + i as u64));
                let id = LayerId::new(i as u32);
                let case = self.case.of(id);
                let rows = case
                    .kv_widths()
                    .map(|width| HostRows::random(&mut rng, self.case.kv_rows, 1, width).row(0).to_vec());
                layer.history.push(&case.layout, &self.given, id, [&rows[0], &rows[1]]);
                layer.rows.push(rows);
            }
        }
    }

    /// Returns the text of a sequence.
    fn text(&self, seq: SeqKey) -> &Text {
        self.texts.iter().find(|text| text.seq == seq).expect("it is live")
    }

    /// Stores K and V, attends, and compares, layer by layer.
    fn step(&mut self, items: &[Extend], plan: &BatchPlan<'_>, observe: &mut impl FnMut(&B)) {
        let tokens = plan.token_count();
        for layer in 0..self.case.layout.layers() as usize {
            let case = self.case.of(LayerId::new(layer as u32));
            let attend = self.case.attend_of(LayerId::new(layer as u32));
            let [k, v] = self.new_rows(items, plan, layer);
            let q = HostRows::random(&mut self.rng, self.case.q_rows, tokens, case.q_width());
            let values = vec![f32::NAN; tokens * case.out_width()];
            let width = case.out_width();
            let poison = HostRows { dtype: self.case.q_rows, width, stride: width, values };
            let (backend, id) = (self.engine.backend_mut(), LayerId::new(layer as u32));
            let [k, v, q_rows] = [&k, &v, &q].map(|rows| backend.input(rows));
            let mut out = backend.output(&poison);
            let mut lse = backend.sums(tokens * attend.q_heads as usize);
            backend.store_cache(plan, id, B::rows(&k), B::rows(&v)).expect("a valid store");
            let queries = Queries { rows: B::rows(&q_rows), sinks: None };
            let (to, sums) = (B::rows_mut(&mut out), Some(B::lse(&mut lse)));
            backend.attend_queries(plan, id, &attend, queries, to, sums).expect("valid attention");
            backend.synchronize().expect("nothing failed");
            observe(backend);
            let got = (backend.read_output(&out), backend.read_sums(&lse));
            self.compare(items, plan, layer, &q, got);
        }
    }

    /// Returns K and V of the plan's tokens.
    fn new_rows(&self, items: &[Extend], plan: &BatchPlan<'_>, layer: usize) -> [HostRows; 2] {
        let widths = self.case.of(LayerId::new(layer as u32)).kv_widths();
        let mut rows = widths.map(|width| HostRows {
            dtype: self.case.kv_rows,
            width,
            stride: width,
            values: vec![f32::NAN; plan.token_count() * width],
        });
        for (item, row) in items.iter().zip(plan.rows) {
            let all = &self.text(item.seq).layers[layer].rows;
            let new = &all[(row.kv_len - row.extend_len) as usize..row.kv_len as usize];
            for (token, kv) in (row.qo_start as usize..).zip(new) {
                for (rows, values) in rows.iter_mut().zip(kv) {
                    rows.values[token * rows.width..][..rows.width].copy_from_slice(values);
                }
            }
        }
        rows
    }

    /// Compares some rows of each item.
    fn compare(
        &mut self,
        items: &[Extend],
        plan: &BatchPlan<'_>,
        layer: usize,
        q: &HostRows,
        (out, lse): (Vec<f32>, Vec<f32>),
    ) {
        let attend = self.case.attend_of(LayerId::new(layer as u32));
        let case = self.case.of(LayerId::new(layer as u32));
        let (q_heads, head_dim) = (attend.q_heads as usize, case.layout.head_dim() as usize);
        let all = plan.token_count() as u64 * q_heads as u64;
        let bound = Bound::of(self.engine.backend(), &case);
        for (item, row) in items.iter().zip(plan.rows) {
            for (token, head) in (0..row.extend_len).flat_map(|t| (0..q_heads).map(move |h| (t, h))) {
                let is_first = token == 0 && head == 0;
                if !is_first && self.rng.below(all) >= ROWS_COMPARED {
                    continue;
                }
                let at = (row.qo_start + token) as usize;
                let position = (row.kv_len - row.extend_len + token) as usize;
                let query = &q.row(at)[head * head_dim..][..head_dim];
                let History { k, v, .. } = &self.text(item.seq).layers[layer].history;
                let heads = (case.layout.kv_heads() as usize, head / case.group_size as usize);
                let exact = attention(&attend, query, k, v, heads, position, f32::NEG_INFINITY);
                let got = &out[(at * q_heads + head) * head_dim..][..head_dim];
                let sum = Some(lse[at * q_heads + head]);
                let seed = self.seed;
                let location = || format!("seed {seed} {case:?} {:?}: token {at} head {head}", plan.shared);
                compare_row(bound, got, sum, &exact, &location, self.report);
            }
        }
    }
}

fn cut(text: &mut Text, len: usize) {
    let all = text.tokens.len();
    text.tokens.truncate(len);
    for Layer { history, rows } in &mut text.layers {
        rows.truncate(len);
        for numbers in [&mut history.k, &mut history.v] {
            numbers.truncate(numbers.len() / all * len);
        }
    }
}
