//! The host's side of a replay: the host's state, and the meaning of an op's numbers.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;

use super::bytes::Inspect;
use super::{Summary, agree};
use crate::engine::Engine;
use crate::error::Error;
use crate::hash::{NamespaceNames, PageHash};
use crate::id::{Namespace, PageId, SeqKey, StepId, SwapPageId, TokenId};
use crate::moves::{FetchId, PutId};
use crate::plan::{Admit, Leader, StepScratch};
use crate::testkit::index::Index;
use crate::testkit::model::Model;
use crate::testkit::op::{Limit, Promise, Prompt, SmallConfig};
use crate::testkit::rng::mix;

/// Number of earlier texts whose prefixes new prompts may share.
const TEXTS: usize = 12;
/// The second namespace.
pub(super) const OTHER: Namespace = Namespace::new(1);

/// Returns the names of a namespace.
pub(super) fn names(namespace: Namespace) -> NamespaceNames {
    let salt = (namespace == OTHER).then(|| "other".to_owned());
    NamespaceNames { lora: salt.clone(), salt, lora_path: None }
}

pub(super) type Bytes = Option<Vec<u8>>;

/// Generation, group and hash of a record.
pub(super) type RecordKey = (u64, u32, PageHash);

/// A put that the store reads.
pub(super) struct OpenPut {
    pub id: PutId,
    pub number: u64,
    pub key: RecordKey,
    pub pages: Vec<SwapPageId>,
    pub bytes: Vec<Bytes>,
}

/// A fetch, and the number of its records that the store has written.
pub(super) struct OpenFetch {
    pub id: FetchId,
    pub number: u64,
    pub arrived: usize,
}

/// The store: its records, and its open puts and fetches.
#[derive(Default)]
pub(super) struct Store {
    pub records: BTreeMap<RecordKey, Vec<Bytes>>,
    pub puts: Vec<OpenPut>,
    pub fetches: Vec<OpenFetch>,
    pub fetch_count: u64,
    pub generation: u64,
}

/// An engine, the model, and the state of a host.
pub(super) struct Host<B> {
    pub(super) engine: Engine<B>,
    pub(super) model: Model,
    /// Live sequences, oldest first.
    pub(super) live: Vec<SeqKey>,
    pub(super) gone: Vec<SeqKey>,
    /// Each live sequence's tokens, including those that steps in flight will sample.
    pub(super) texts: BTreeMap<SeqKey, Vec<TokenId>>,
    pub(super) earlier: VecDeque<Vec<TokenId>>,
    /// The page tables after the table writes of all plans.
    pub(super) words: Vec<u32>,
    /// The page tables before each unfinished plan. An abort restores them: the engine sends the words again.
    pub(super) words_before: BTreeMap<StepId, Vec<u32>>,
    pub(super) scratch: StepScratch,
    /// Pages that each unfinished step may access: those of its rows, or of its copies.
    pub(super) touched: BTreeMap<StepId, BTreeSet<PageId>>,
    /// Recent leaders, newest first. The number counts the removals of the leader's tokens before the engine named it.
    /// The tokens are the part of the prompt that is cached once the leader has computed it.
    pub(super) leaders: VecDeque<(Leader, usize, Vec<TokenId>)>,
    pub(super) store: Store,
    /// An index from events alone.
    pub(super) index: Index,
    /// Number of ops between drains of events.
    pub(super) drain_every: u8,
    /// Number of different tokens.
    vocabulary: u64,
    pub(super) ops: u64,
    pub(super) summary: Summary,
}

impl<B: Inspect> Host<B> {
    pub(super) fn new(mut engine: Engine<B>, model: Model, config: &SmallConfig) -> Self {
        // The call fails if hashes use no names; prompts of the namespace are then rejected.
        _ = engine.name_namespace(OTHER, names(OTHER));
        let index = Index::new(engine.shape().layout.page_size());
        let words = vec![u32::MAX; engine.shape().table.words()];
        Self {
            engine,
            model,
            live: Vec::new(),
            gone: Vec::new(),
            texts: BTreeMap::new(),
            earlier: VecDeque::new(),
            words,
            words_before: BTreeMap::new(),
            scratch: StepScratch::new(),
            touched: BTreeMap::new(),
            leaders: VecDeque::new(),
            store: Store::default(),
            index,
            drain_every: config.drain_every.max(1),
            vocabulary: config.vocabulary.max(1).into(),
            ops: 0,
            summary: Summary::default(),
        }
    }

    pub(super) fn into_summary(mut self, ops: usize) -> Summary {
        self.summary.ops = ops as u64;
        let [stored, removed, cleared] = self.index.counts;
        for (what, count) in [("stored", stored), ("removed", removed), ("cleared", cleared)] {
            self.summary.answers.insert(format!("events {what}"), count);
        }
        self.summary.answers.insert("events of swap memory".to_owned(), self.index.swap_count);
        let [events, cells] = self.index.cell_counts;
        self.summary.answers.insert("events of cells".to_owned(), events);
        self.summary.answers.insert("cells of joined events".to_owned(), cells - events);
        let failures = self.engine.backend().failures();
        self.summary.answers.insert("backend failures".to_owned(), failures);
        let stats = self.engine.stats();
        for (what, count) in [
            ("hit tokens", stats.hit_tokens),
            ("hit tokens of resumes", stats.resume_hit_tokens),
            ("duplicate pages", stats.duplicate_pages),
            ("computed tokens", stats.computed_tokens),
            ("evicted pages", stats.evicted_pages),
            ("hit tokens lost without a mark", stats.unmarked_hit_tokens()),
            ("hit tokens lost with superseded states", stats.superseded_hit_tokens),
            ("hit tokens lost with evicted cells", stats.evicted_hit_tokens),
            ("hit tokens that did not fit", stats.ignored_hit_tokens),
            ("swap hit tokens", stats.swap_hit_tokens),
            ("pages saved", stats.saved_pages),
            ("pages saved as they were evicted", stats.forced_pages),
            ("pages loaded", stats.loaded_pages),
            ("failed saves", stats.failed_saves),
            ("pages put", stats.put_pages),
            ("pages fetched", stats.fetched_pages),
            ("pages evicted from swap memory", stats.swap_evicted_pages),
            ("pages lost", stats.lost_pages),
            ("states kept", stats.kept_states),
            ("states superseded", stats.superseded_states),
            ("marks given up", stats.given_up_marks),
            ("states spared after a loss", self.model.careful_items),
        ] {
            self.summary.answers.insert(what.to_owned(), count);
        }
        self.summary
    }

    /// Compares the results of a call, and counts the result.
    pub(super) fn check_result<T: PartialEq + fmt::Debug>(
        &mut self,
        call: &str,
        got: &Result<T, Error>,
        want: &Result<T, Error>,
    ) -> Result<(), String> {
        let name = match want {
            Ok(_) => "Ok".to_owned(),
            Err(error) => {
                let name = format!("{error:?}");
                name.split(' ').next().unwrap_or_default().to_owned()
            }
        };
        self.summary.count(format!("{call} {name}"));
        agree(call, got, want)
    }

    pub(super) fn page_size(&self) -> usize {
        self.engine.shape().layout.page_size() as usize
    }

    /// Returns the factor for an op's small numbers. Multiplied by it, they reach several pages of any size.
    pub(super) fn scale(&self) -> usize {
        self.page_size().div_ceil(64)
    }

    /// Returns a live sequence. For high picks, or if none is live, returns one that is finished or never existed.
    pub(super) fn pick(&self, pick: u8) -> SeqKey {
        if pick > 250 || self.live.is_empty() {
            let count = self.gone.len().max(1);
            self.gone.get(usize::from(pick) % count).copied().unwrap_or_default()
        } else {
            self.live[usize::from(pick) % self.live.len()]
        }
    }

    /// Returns the next step or one of the seven before it. Step 0 is never planned.
    pub(super) fn any_step(&self, pick: u8) -> StepId {
        let count = self.model.last_step().raw() + 2;
        // Older steps behave alike, so the replay never picks them.
        let back = u64::from(pick) % count.min(8);
        StepId::new(count - 1 - back)
    }

    pub(super) fn token(&self, seed: u64, i: usize) -> TokenId {
        TokenId::new((mix(seed.wrapping_mul(0x1_0001) ^ i as u64) % self.vocabulary) as u32)
    }

    pub(super) fn prompt(&self, spec: &Prompt) -> (Namespace, Vec<TokenId>) {
        let namespace = Namespace::new(u64::from(spec.namespace % 2));
        let max = self.engine.shape().max_sequence_len as usize;
        let len = match spec.len {
            0 => 0,
            65_501.. => max + 1,
            len => (1 + usize::from(len) % (5 * self.page_size() + 2)).min(max),
        };
        let none = Vec::new();
        let like = usize::from(spec.like) % self.earlier.len().max(1);
        let like = self.earlier.get(like).unwrap_or(&none);
        let shared = match usize::from(spec.shared) {
            odd if odd % 2 == 1 => like.len(),
            even => even / 2 % (like.len() + 1),
        };
        let shared = like[..shared].iter().copied().take(len);
        let new = (0..).map(|i| self.token(u64::from(spec.seed), i));
        let mut prompt: Vec<_> = shared.chain(new).take(len).collect();
        if spec.len == 65_500 {
            prompt[usize::from(spec.seed) % len] = TokenId::PENDING;
        }
        (namespace, prompt)
    }

    /// Returns the number of promised tokens for a sequence of `tokens` tokens.
    pub(super) fn promise(&self, spec: Promise, tokens: usize) -> u32 {
        let max = self.engine.shape().max_sequence_len;
        let more = usize::from(spec) * self.scale() % (4 * self.page_size() + 2);
        match spec {
            0 => 0,
            255 => max + 1,
            254 => tokens as u32 / 2,
            _ => max.min((tokens + more) as u32),
        }
    }

    /// Returns what a sequence of `tokens` tokens asks of its admission.
    pub(super) fn terms(&self, promise: Promise, limit: Limit, tokens: usize) -> Admit {
        let at_most = if limit < 224 { u32::MAX } else { u32::from(limit) % (tokens as u32 + 2) };
        Admit { promise: self.promise(promise, tokens), at_most }
    }

    pub(super) fn remember(&mut self, text: Vec<TokenId>) {
        if self.earlier.len() == TEXTS {
            self.earlier.pop_front();
        }
        if !text.is_empty() && !text.contains(&TokenId::PENDING) {
            self.earlier.push_back(text);
        }
    }

    /// Drops the chosen tokens that a sequence's steps will no longer sample.
    pub(super) fn cut_text(&mut self, seq: SeqKey) {
        let known = self.model.tokens(seq).map_or(0, <[TokenId]>::len);
        let planned = self.model.planned_len(seq).unwrap_or(0) as usize;
        if let Some(text) = self.texts.get_mut(&seq) {
            text.truncate(known.max(planned));
        }
    }

    /// Drops the words of the plans from `step` on, which is aborted.
    pub(super) fn undo_words(&mut self, step: StepId) {
        if let Some(words) = self.words_before.remove(&step) {
            self.words = words;
        }
    }

    pub(super) fn add_live(&mut self, seq: SeqKey, text: Vec<TokenId>) -> Result<(), String> {
        if self.live.contains(&seq) || self.gone.contains(&seq) {
            return Err(format!("the engine returned the key {seq:?} twice"));
        }
        self.live.push(seq);
        self.texts.insert(seq, text);
        Ok(())
    }
}
