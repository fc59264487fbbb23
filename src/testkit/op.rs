//! What a host can do to an engine, as plain data.
//!
//! An op names sequences, prompts and steps by small numbers that are taken modulo what is live when it runs, so that
//! every op means something whatever came before it, and dropping some ops of a list leaves a valid list: a shrunk
//! finding is a literal that reads well.
//!
//! Not here: what the numbers resolve to (`replay.rs`).

use arbitrary::{Arbitrary, Result, Unstructured};

use crate::config::{EngineConfig, PrefixMode};
use crate::hash::Hashing;
use crate::layout::{Capacity, Groups, KvDtype, KvShape, Layout, PoolConfig, Reach, Scaling};

/// How to make a prompt out of earlier ones: a shared head and new tokens of a tiny vocabulary.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Arbitrary)]
pub struct Prompt {
    /// The namespace, modulo 2.
    pub namespace: u8,
    /// The earlier prompt or finished sequence that it begins like, modulo those remembered.
    pub like: u8,
    /// Odd: it begins with all of that; even: with half this number of tokens of it, modulo what it has.
    pub shared: u16,
    /// 0: no tokens; above 65,500: longer than allowed; else its tokens, modulo about five pages. 65,500: one of them
    /// is [`TokenId::PENDING`](crate::TokenId::PENDING).
    pub len: u16,
    /// What the new tokens are made of.
    pub seed: u8,
    /// What is promised.
    pub promise: Promise,
}

/// How many tokens a sequence is promised room for: 0 none, 255 more than allowed, 254 half of its tokens, else all of
/// its tokens and this many more, modulo about four pages.
pub type Promise = u8;

/// One call of a host, or two that belong together.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Arbitrary)]
pub enum Op {
    /// `admit`
    Admit(Prompt),
    /// `admit_batch`
    AdmitBatch {
        /// The first prompt; the others begin like it and are a little longer or shorter.
        prompt: Prompt,
        /// How many, modulo 5.
        count: u8,
    },
    /// `match_prefix`
    Match(Prompt),
    /// `plan_batch`, and storing K and V of its tokens.
    Plan {
        /// The first sequence, modulo those live.
        first: u8,
        /// How many from there on, modulo the live ones and one more.
        count: u8,
        /// Their new tokens, in turn: 0 none, 1 more than allowed, even all that is allowed, odd some of it.
        lens: [u8; 4],
        /// 0 repeats a sequence, 1 adds a finished one, 2 keeps preempted ones in; else a sane batch.
        twist: u8,
    },
    /// `append`
    Append {
        /// The sequence; above 250 a finished one.
        pick: u8,
        /// How many tokens, modulo about two pages; 255: more than allowed; 254: the last of them is
        /// [`TokenId::PENDING`](crate::TokenId::PENDING).
        count: u8,
        /// What tokens.
        seed: u8,
    },
    /// `commit`
    Commit {
        /// Below 224 the step whose turn it is, else any modulo those ever planned and one more.
        pick: u8,
    },
    /// `complete`
    Complete {
        /// Below 128 all that can be complete, below 208 one step more than now, else any, as with commit.
        pick: u8,
    },
    /// `abort`
    Abort {
        /// Below 224 an open step, modulo those, else any.
        pick: u8,
    },
    /// `finish`, or `finish_with` and [`Keep::Drop`](crate::Keep::Drop).
    Finish {
        /// The sequence; above 250 a finished one.
        pick: u8,
        /// Whether computed pages are published.
        publish: bool,
    },
    /// `preempt`
    Preempt {
        /// The sequence; above 250 a finished one.
        pick: u8,
        /// Whether computed pages are published.
        publish: bool,
    },
    /// `resume`
    Resume {
        /// Below 200 a preempted sequence, modulo those, else any as with finish.
        pick: u8,
        /// What is promised.
        promise: Promise,
    },
    /// `mark`
    Mark {
        /// The sequence; above 250 a finished one.
        pick: u8,
        /// The length: this many tokens more than half a page below the published ones, modulo eight pages.
        more: u8,
    },
    /// `promise`
    Promise {
        /// The sequence; above 250 a finished one.
        pick: u8,
        /// What is promised.
        promise: Promise,
    },
    /// `fork`
    Fork {
        /// The sequence; above 250 a finished one.
        pick: u8,
        /// How many children, modulo 4.
        count: u8,
        /// What each is promised.
        promise: Promise,
    },
    /// `rollback`
    Rollback {
        /// The sequence; above 250 a finished one.
        pick: u8,
        /// The length: that many tokens fewer than now, modulo what can be forgotten and a little more.
        fewer: u8,
    },
    /// `append` of drafts, and `plan_drafts`, and storing K and V of their tokens.
    Draft {
        /// The first sequence, modulo those live.
        first: u8,
        /// How many from there on, modulo the live ones.
        count: u8,
        /// How many drafts each gets, what tokens, and who follows whom.
        seed: u8,
        /// Below 8: something about a draft is wrong; below 32 sequences whose drafts wait are kept in.
        twist: u8,
    },
    /// `accept_batch`
    Accept {
        /// Below 224 the first step whose drafts wait, else any, as with commit.
        pick: u8,
        /// Which branches; below 8: something about one is wrong.
        seed: u8,
    },
    /// `reset`
    Reset,
}

/// An engine small enough that sharing, splitting, exhaustion and collisions happen all the time.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SmallConfig {
    /// Pages of the pool.
    pub pages: u32,
    /// Tokens of a page.
    pub page_size: u32,
    /// Most sequences.
    pub sequences: u32,
    /// Most tokens of a sequence.
    pub sequence_len: u32,
    /// Most tokens of all sequences.
    pub tokens: u64,
    /// Most unfinished steps.
    pub steps: u32,
    /// Whether prefixes are kept and shared.
    pub reuse: bool,
    /// Bits of the child table's hashes; fewer than 32, so that a finding replays.
    pub hash_bits: u32,
    /// PageFirst or LayerFirst.
    pub page_first: bool,
    /// 0: f32, 1: f16, 2: bf16, 3: fp8 with scales of 1, else fp8 with scales made at the store.
    pub dtype: u8,
    /// Layers.
    pub layers: u32,
    /// Heads of K and V; 0: latent rows.
    pub kv_heads: u32,
    /// 0: one group of layers; else which groups, modulo those that there are, in place of `layers`.
    pub groups: u8,
    /// 0: pages are not hashed; else how, modulo the recipes that are compiled in.
    pub hashing: u8,
    /// Pages that events have room for, where pages are hashed; 0: none.
    pub event_pages: u8,
    /// Ops between two drains of events; at least 1.
    pub drain_every: u8,
}

impl Default for SmallConfig {
    fn default() -> Self {
        Self {
            pages: 12,
            page_size: 2,
            sequences: 4,
            sequence_len: 1 << 20,
            tokens: 1 << 12,
            steps: 3,
            reuse: true,
            hash_bits: 2,
            page_first: true,
            dtype: 0,
            layers: 1,
            kv_heads: 1,
            groups: 0,
            hashing: 0,
            event_pages: 0,
            drain_every: 1,
        }
    }
}

impl SmallConfig {
    fn hashing(&self) -> Option<Hashing> {
        let index = usize::from(self.hashing).checked_sub(1)?;
        Hashing::ALL.get(index % Hashing::ALL.len().max(1)).copied()
    }

    /// Groups of layers: none, or windows and chunks of one track or of several.
    fn groups(&self) -> Groups {
        let (all, window, chunk) = (Reach::All, Reach::Window, Reach::Chunk);
        let several: [(&[Reach], &[u8]); 7] = [
            (&[all, window(1)], &[0, 1]),
            (&[all, window(3)], &[1, 0]),
            (&[all, window(7)], &[1, 0, 1]),
            (&[all, chunk(4)], &[0, 1]),
            (&[all, chunk(2), window(4)], &[1, 0, 2]),
            (&[all, window(2), chunk(8)], &[1, 0, 0, 1, 1, 2]),
            (&[all, chunk(1), window(5), window(20)], &[0, 1, 2, 3]),
        ];
        let Some(index) = usize::from(self.groups).checked_sub(1) else { return Groups::ONE };
        let (reaches, layers) = several[index % several.len()];
        Groups::new(reaches, layers).expect("each has layers")
    }

    /// The engine's config.
    pub fn engine(&self) -> EngineConfig {
        let pool = PoolConfig {
            layers: if self.groups > 0 { self.groups().layers() } else { self.layers },
            groups: self.groups(),
            shape: match self.kv_heads {
                0 => KvShape::Latent { rank: 3, rope: 2 },
                kv_heads => KvShape::heads(kv_heads, 2),
            },
            dtype: match self.dtype {
                0 => KvDtype::F32,
                1 => KvDtype::F16,
                2 => KvDtype::Bf16,
                _ => KvDtype::Fp8E4M3,
            },
            scaling: match self.dtype {
                3 if self.kv_heads == 0 => Scaling::ByToken, // Latent rows know no other.
                4.. => Scaling::ByToken,
                _ => Scaling::Static,
            },
            page_size: self.page_size,
            capacity: Capacity::Pages(self.pages),
            layout: if self.page_first { Layout::PageFirst } else { Layout::LayerFirst },
            ..PoolConfig::default()
        };
        EngineConfig {
            hashing: self.hashing(),
            event_pages: self.hashing().map_or(0, |_| self.event_pages.into()),
            pool,
            prefix: if self.reuse { PrefixMode::Radix } else { PrefixMode::None },
            max_sequences: self.sequences,
            max_sequence_len: self.sequence_len,
            max_tokens: self.tokens,
            max_steps: self.steps,
            // Less than some batches have.
            max_step_tokens: 2 * self.sequence_len,
            // As other sizes, so that plans go further at times.
            promise_ahead: 3 * self.page_size,
            prefault: true,
        }
    }
}

impl<'a> Arbitrary<'a> for SmallConfig {
    fn arbitrary(u: &mut Unstructured<'a>) -> Result<Self> {
        Ok(Self {
            pages: if u.ratio(1, 8)? { u.int_in_range(60..=200)? } else { u.int_in_range(1..=40)? },
            page_size: u.int_in_range(1..=5)?,
            sequences: u.int_in_range(1..=8)?,
            sequence_len: if u.ratio(1, 4)? { u.int_in_range(1..=40)? } else { 1 << 20 },
            tokens: u.int_in_range(1..=200)?,
            steps: u.int_in_range(1..=4)?,
            reuse: u.ratio(4, 5)?,
            hash_bits: *u.choose(&[2, 2, 1, 3, 31])?,
            page_first: u.arbitrary()?,
            dtype: u.int_in_range(0..=4)?,
            layers: u.int_in_range(1..=2)?,
            kv_heads: u.int_in_range(0..=2)?,
            groups: u.int_in_range(0..=7)?,
            hashing: u.int_in_range(0..=5)?,
            event_pages: *u.choose(&[0, 1, 4, 12, 200])?,
            drain_every: u.int_in_range(1..=8)?,
        })
    }
}
