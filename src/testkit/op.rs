//! The calls of a host to an engine, as plain data.
//!
//! An op refers to sequences, prompts and steps by small numbers, which the replay takes modulo the existing ones. The
//! replay can therefore make every op in every state, also after other ops were removed from the list.
//! [`literal`](super::shrink::literal) prints a shrunk list as Rust code for a regression test.

use crate::config::{EngineConfig, PrefixMode};
use crate::hash::Hashing;
use crate::layout::{Capacity, Groups, KvDtype, KvShape, Layout, PoolConfig, Reach, Scaling, StatePart};

/// Recipe of a prompt: a head shared with an earlier prompt, and new tokens of a tiny vocabulary.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Prompt {
    /// The namespace, modulo 2.
    pub namespace: u8,
    /// The earlier prompt or finished sequence to share with, modulo the remembered ones.
    pub like: u8,
    /// Number of shared tokens. Odd: all tokens of `like`; even: half of this number, modulo the length of `like` plus
    /// one.
    pub shared: u16,
    /// 0: no tokens; above 65,500: longer than allowed; else the number of tokens less one, modulo about five pages.
    /// With 65,500, one token is [`TokenId::PENDING`](crate::TokenId::PENDING).
    pub len: u16,
    /// Seed of the new tokens.
    pub seed: u8,
    /// The promise of the prompt's sequence.
    pub promise: Promise,
    /// The limit of the hit.
    pub limit: Limit,
}

/// A limit on the tokens of a hit. Below 224: none; else this number modulo the sequence's tokens plus two.
pub type Limit = u8;

/// A promise, in tokens. 0: none; 255: more than allowed; 254: half of the sequence's tokens; else all its tokens and
/// this many more, modulo about four pages.
pub type Promise = u8;

/// A call of a host, or several consecutive calls.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Op {
    /// `admit`
    Admit(Prompt),
    /// `admit_batch`
    AdmitBatch {
        /// The first prompt. The others begin with its tokens and are up to a page longer; the fourth is in the other
        /// namespace.
        prompt: Prompt,
        /// Number of prompts, modulo 5.
        count: u8,
    },
    /// `match_prefix`
    Match(Prompt),
    /// `plan_batch`, and a store of K and V of its tokens.
    Plan {
        /// The first sequence, modulo the live ones.
        first: u8,
        /// This number modulo the live sequences is the number of further sequences.
        count: u8,
        /// Numbers of new tokens of the sequences, in turn. 0: none; 1: one above the sequence's maximum; other even
        /// values: the maximum; other odd values: from 1 to the maximum.
        lens: [u8; 4],
        /// 0 repeats a sequence, 1 adds a finished one, and 3 leaves the batch empty. All values but 2 remove preempted
        /// sequences from the batch. All values but 0 and 2 remove sequences with waiting drafts.
        twist: u8,
    },
    /// `append`
    Append {
        /// The sequence; above 250 a finished one.
        pick: u8,
        /// Number of tokens, modulo about two pages; 255: more than allowed; 254: the last token is
        /// [`TokenId::PENDING`](crate::TokenId::PENDING).
        count: u8,
        /// Seed of the tokens.
        seed: u8,
    },
    /// `commit`
    Commit {
        /// Below 224 the first open step, else one of the last seven planned steps or the next one.
        pick: u8,
    },
    /// `complete`
    Complete {
        /// The step up to which steps are completed. Below 128: the last step before the open ones; below 208: the
        /// first unfinished step; else as in [`Op::Commit`].
        pick: u8,
    },
    /// `abort`
    Abort {
        /// Below 224 an open step, modulo the open ones, else as in [`Op::Commit`].
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
        /// Below 200 a preempted sequence, modulo the preempted ones, else as in [`Op::Finish`].
        pick: u8,
        /// The new promise.
        promise: Promise,
        /// The limit of the hit.
        limit: Limit,
    },
    /// `mark`
    Mark {
        /// The sequence; above 250 a finished one.
        pick: u8,
        /// The marked length is the published length, plus this number modulo eight pages, minus half a page.
        more: u8,
    },
    /// `load`
    Load {
        /// The first sequence; above 250 a finished one.
        first: u8,
        /// Number of consecutive sequences from `first` on, modulo the number of live sequences plus two.
        count: u8,
    },
    /// `save_ahead`
    SaveAhead {
        /// Number of pages.
        pages: u8,
    },
    /// `puts`
    Puts {
        /// Maximum number of puts, modulo 8.
        most: u8,
    },
    /// `put_done`
    PutDone {
        /// The open put, modulo the number of open puts.
        pick: u8,
        /// Whether the store has the record.
        ok: bool,
    },
    /// `lookup` and `fetch`; the store writes the records that it contains.
    Fetch {
        /// The prompt.
        prompt: Prompt,
        /// Even: the fetch reaches the target; odd: half of this number, modulo 6, of pages more than the hit.
        most: u8,
    },
    /// `fetched`
    Fetched {
        /// The open fetch, modulo the number of open fetches.
        pick: u8,
        /// Even: all records that the store has written arrive; odd: some of them, a number that depends on this value.
        count: u8,
    },
    /// `restate_puts`, after the store has lost about half of the prompt's records.
    RestatePuts {
        /// The prompt.
        prompt: Prompt,
        /// Seed of the lost records.
        lost: u8,
    },
    /// `promise`
    Promise {
        /// The sequence; above 250 a finished one.
        pick: u8,
        /// The new promise.
        promise: Promise,
    },
    /// `fork`
    Fork {
        /// The sequence; above 250 a finished one.
        pick: u8,
        /// Number of children, modulo 4.
        count: u8,
        /// The promise of each child.
        promise: Promise,
    },
    /// `rollback`
    Rollback {
        /// The sequence; above 250 a finished one.
        pick: u8,
        /// The new length is the number of tokens plus one, minus this value. The value is taken modulo the tokens
        /// after the published ones plus three, so some lengths are invalid.
        fewer: u8,
    },
    /// `append` of drafts, `plan_drafts`, and a store of K and V of their tokens.
    Draft {
        /// The first sequence, modulo the live ones.
        first: u8,
        /// This number modulo the live sequences is the number of further sequences.
        count: u8,
        /// Seed of the drafts: their numbers, tokens and parents.
        seed: u8,
        /// 0 to 3: the last draft is invalid, but 0 and 1 do not change a chain; 4: the order of drafts is reversed. 8
        /// to 31: the batch keeps sequences with waiting drafts.
        twist: u8,
    },
    /// `accept_batch`
    Accept {
        /// Below 224 the first step with waiting drafts, else as in [`Op::Commit`].
        pick: u8,
        /// Seed of the branches; below 8: branches may be invalid or out of order.
        seed: u8,
    },
    /// `reset`
    Reset,
}

/// Config of an engine so small that sharing, splits, exhaustion and collisions are frequent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SmallConfig {
    /// Number of pages; with states, 1 counts as 2.
    pub pages: u32,
    /// Number of tokens of a page.
    pub page_size: u32,
    /// Maximum number of sequences.
    pub sequences: u32,
    /// Maximum number of tokens of a sequence.
    pub sequence_len: u32,
    /// Maximum number of tokens of all sequences.
    pub tokens: u64,
    /// Maximum number of unfinished steps.
    pub steps: u32,
    /// Whether prefixes are cached and shared.
    pub share_prefixes: bool,
    /// Bits of the hashes in the engine's hash tables. With fewer than 32 bits, the tables use fixed seeds, so a
    /// failure is reproducible.
    pub hash_bits: u32,
    /// Whether the layout is PageFirst rather than LayerFirst. Groups with shapes of their own are always PageFirst.
    pub page_first: bool,
    /// 0: f32, 1: f16, 2: bf16, 3: fp8 with scales of 1 (by token for latent rows), else fp8 with scales by token.
    pub dtype: u8,
    /// Number of layers.
    pub layers: u32,
    /// Number of heads of K and V; 0 for latent rows.
    pub kv_heads: u32,
    /// Number of reserved pages, modulo the number of pages.
    pub reserved: u32,
    /// Whether slots have 64 bits.
    pub wide: bool,
    /// 0 for one group of layers; else the index of a set of groups, which replaces `layers`.
    pub groups: u8,
    /// Number of swap pages.
    pub swap_pages: u32,
    /// A record of a store has 2 to the power of this number of pages, modulo 4; with groups, one page.
    pub record_pages: u8,
    /// 0 for no hashes; else one of [`Hashing::ALL`], modulo their number.
    pub hashing: u8,
    /// Capacity of the event buffer in pages, if pages are hashed; 0 for no events.
    pub event_pages: u8,
    /// Whether cells have events.
    pub event_cells: bool,
    /// Number of ops between drains of events; 0 counts as 1.
    pub drain_every: u8,
    /// Number of different tokens; 0 counts as 1. With few, prompts and samples share prefixes by chance.
    pub vocabulary: u8,
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
            share_prefixes: true,
            hash_bits: 2,
            page_first: true,
            dtype: 0,
            layers: 1,
            kv_heads: 1,
            reserved: 0,
            wide: false,
            groups: 0,
            swap_pages: 0,
            record_pages: 0,
            hashing: 0,
            event_pages: 0,
            event_cells: false,
            drain_every: 1,
            vocabulary: 3,
        }
    }
}

impl SmallConfig {
    fn hashing(&self) -> Option<Hashing> {
        let index = usize::from(self.hashing).checked_sub(1)?;
        Hashing::ALL.get(index % Hashing::ALL.len().max(1)).copied()
    }

    /// Returns the engine's config.
    pub fn engine(&self) -> EngineConfig {
        // A page holds the state of a layer, which takes at least 256 bytes.
        let has_states = groups(self.groups).state_group().is_some();
        let head_dim = if has_states { 128 } else { 2 };
        // Page 0 is never given to a state.
        let pages = if has_states { self.pages.max(2) } else { self.pages };
        let pool = PoolConfig {
            layers: if self.groups > 0 { groups(self.groups).layers() } else { self.layers },
            groups: groups(self.groups),
            shape: match self.kv_heads {
                0 => KvShape::Latent { rank: head_dim * 2 - 1, rope: 2 },
                kv_heads => KvShape::heads(kv_heads, head_dim),
            },
            dtype: match self.dtype {
                0 => KvDtype::F32,
                1 => KvDtype::F16,
                2 => KvDtype::Bf16,
                _ => KvDtype::Fp8E4M3,
            },
            scaling: match self.dtype {
                3 if self.kv_heads == 0 => Scaling::ByToken, // Latent rows support no other scaling.
                4.. => Scaling::ByToken,
                _ => Scaling::Static,
            },
            page_size: self.page_size,
            capacity: Capacity::Pages(pages),
            swap_pages: self.swap_pages,
            extra_bytes: if self.groups >= FIRST_SHARING { 7 } else { 0 },
            layout: if self.page_first || self.groups >= FIRST_SHAPED { Layout::PageFirst } else { Layout::LayerFirst },
            ..PoolConfig::default()
        };
        let pool = if self.groups.is_multiple_of(2) { pool } else { with_long_states(pool) };
        let record_pages = if self.groups == 0 { 1 << (self.record_pages % 4) } else { 1 };
        let stage_pages = match self.swap_pages % 4 {
            0 => 0,
            more => most_record_pages(&pool, record_pages) + more - 1,
        };
        EngineConfig {
            hashing: self.hashing(),
            event_pages: self.hashing().map_or(0, |_| self.event_pages.into()),
            event_cells: self.event_cells,
            pool: PoolConfig { stage_pages, ..pool },
            record_pages,
            prefix: if self.share_prefixes { PrefixMode::Radix } else { PrefixMode::None },
            max_sequences: self.sequences,
            max_sequence_len: self.sequence_len,
            max_tokens: self.tokens,
            max_steps: self.steps,
            // So low that some batches exceed it.
            max_step_tokens: 2 * self.sequence_len,
            // So low that some plans exceed it, and therefore take pages that are not promised.
            promise_ahead: 3 * self.page_size,
            state_margin: self.steps * self.page_size / 2,
            state_gap: (u32::from(self.vocabulary) % 3) * self.page_size,
            keep_used_states: !self.page_first,
            reserved_pages: self.reserved % pages,
            wide_slots: self.wide,
            prefault: true,
        }
    }
}

/// Returns the groups of layers of a setting: one group for 0, else several groups with windows or chunks. Some groups
/// of the settings from [`FIRST_SHAPED`] on have a shape or a type of their own.
pub(super) fn groups(setting: u8) -> Groups {
    let (all, window, chunk, state) = (Reach::All, Reach::Window, Reach::Chunk, Reach::State);
    let several: [(&[Reach], &[u8]); SETTINGS as usize] = [
        (&[all, window(1)], &[0, 1]),
        (&[all, window(3)], &[1, 0]),
        (&[all, window(7)], &[1, 0, 1]),
        (&[all, chunk(4)], &[0, 1]),
        (&[all, chunk(2), window(4)], &[1, 0, 2]),
        (&[all, window(2), chunk(8)], &[1, 0, 0, 1, 1, 2]),
        (&[all, chunk(1), window(5), window(20)], &[0, 1, 2, 3]),
        (&[all, window(3)], &[1, 0, 1, 1]),
        (&[all, window(5), chunk(4)], &[0, 1, 2, 1, 2, 0]),
        (&[all, chunk(2)], &[1, 0, 1, 1, 1]),
        (&[all, state], &[0, 1]),
        (&[all, state], &[1, 0, 1]),
        (&[all, window(3), state], &[2, 0, 2, 1]),
        (&[all, state, chunk(4)], &[0, 1, 1, 1, 2, 1]),
        (&[all, state], &[1, 0, 1, 1, 1]),
        (&[all, window(5), all], &[0, 1, 0, 2]),
        (&[all, state, all], &[1, 0, 1, 2, 2]),
    ];
    let Some(index) = usize::from(setting).checked_sub(1) else { return Groups::ONE };
    let (reaches, layers) = several[index];
    let groups = Groups::new(reaches, layers).expect("each group has layers");
    let latent = KvShape::Latent { rank: 1, rope: 1 };
    let shaped = match setting {
        // A page for one layer of group 0 holds several layers of a smaller shape.
        FIRST_SHAPED => groups.with_shape(1, KvShape::heads(1, 1), None),
        // A layer of three heads makes pages longer. A layer of another type does not fill its page.
        9 => groups
            .with_shape(1, KvShape::heads(3, 2), None)
            .and_then(|groups| groups.with_shape(2, KvShape::heads(1, 3), KvDtype::F16)),
        10 => groups.with_shape(1, latent, KvDtype::Bf16),
        FIRST_SHARING => groups.with_shape(2, KvShape::heads(2, 5), None),
        _ => groups.state_group().map_or(Ok(groups), |group| groups.with_state(group, &STATE)),
    };
    shaped.expect("the groups exist")
}

/// Makes the state of a layer as long as a page, if a group keeps a state.
fn with_long_states(pool: PoolConfig) -> PoolConfig {
    let Some(group) = pool.groups.state_group() else { return pool };
    let Ok(layout) = pool.layout() else { return pool };
    let head_bytes = (layout.page_bytes() / 256 * 256) as u32;
    let groups = pool.groups.with_state(group, &[StatePart { heads: 1, head_bytes }]).expect("the group keeps a state");
    PoolConfig { groups, ..pool }
}

/// Returns the maximum number of pages of a record.
fn most_record_pages(pool: &PoolConfig, record_pages: u32) -> u32 {
    let Ok(layout) = pool.layout() else { return record_pages };
    let tracks = (1..layout.groups().count()).map(|group| layout.tracks_of(group));
    tracks.fold(record_pages.max(layout.state_pages()), u32::max)
}

/// The parts of a layer's state in most settings, 256 bytes together.
const STATE: [StatePart; 2] = [StatePart { heads: 2, head_bytes: 60 }, StatePart { heads: 1, head_bytes: 7 }];

/// The last setting of [`groups`]. Settings 1 to this number have several groups.
pub(super) const SETTINGS: u8 = 17;

/// The settings of [`groups`] with a group that keeps a state.
pub(super) const KEEPING_STATES: [u8; 6] = [11, 12, 13, 14, 15, 17];

/// The first setting of [`groups`] whose groups have shapes of their own.
const FIRST_SHAPED: u8 = 8;

/// The first setting of [`groups`] with a group that shares the pages of group 0.
const FIRST_SHARING: u8 = 16;
