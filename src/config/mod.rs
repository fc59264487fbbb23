//! What an engine is made for: [`EngineConfig`], checked to an [`EngineShape`] of limits.
//!
//! `bytes` is the byte form of a shape.
//!
//! Not here: the shape of K and V memory (`layout/`), the bytes that an engine takes (`world/bytes.rs`).

mod bytes;

use crate::error::ConfigError;
use crate::hash::Hashing;
use crate::layout::{PoolConfig, PoolLayout, TableShape};

pub use bytes::ShapeBytesError;

/// Whether prefixes are kept and shared.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(rename_all = "snake_case")
)]
#[non_exhaustive]
pub enum PrefixMode {
    /// Whole pages of equal prefixes are shared, and kept after their sequences until they are evicted.
    #[default]
    Radix,
    /// Every prompt is computed in full and nothing outlives its sequence; only forks share with their parent.
    None,
}

/// What an engine is made for. `EngineConfig::from(pool_config)` fills in the limits; a field that is left out of a
/// serialised config (feature `serde`) has its default.
#[derive(Clone, Copy, PartialEq, Debug)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(default, deny_unknown_fields)
)]
pub struct EngineConfig {
    /// Shape and size of K and V. Default: [`PoolConfig::default`].
    pub pool: PoolConfig,
    /// Whether prefixes are kept and shared. Default: [`PrefixMode::Radix`].
    pub prefix: PrefixMode,
    /// How cached pages are hashed, for those who know prefixes by hashes; needs a feature. Only with
    /// [`PrefixMode::Radix`]: what is not shared has no hashes. Default: none, which costs nothing.
    pub hashing: Option<Hashing>,
    /// Pages that wait to be told of ([`Engine::drain_events`](crate::Engine::drain_events)) at most, stored and
    /// removed ones; 0: nobody is told. Needs `hashing`. Room for what happens between two drains is enough: where it
    /// is not, the next drain tells of the whole tree. Default: 0, which costs nothing.
    pub event_pages: u32,
    /// Most sequences at a time, preempted ones included. Default: 256.
    pub max_sequences: u32,
    /// Most tokens of one sequence. Capped at the pool's tokens, and at 2^30. Default: 131,072.
    pub max_sequence_len: u32,
    /// Tokens of all sequences together that are sure to fit. Sharing makes this independent of the pool's size. Host
    /// memory for tokens and page tables is reserved for it and touched as used. Default: 4,194,304.
    pub max_tokens: u64,
    /// Most steps planned and not yet complete. Default: 8.
    pub max_steps: u32,
    /// Tokens that a sequence is planned past its published ones, where layers are in groups: what
    /// [`Engine::admit`](crate::Engine::admit) asks for and promises has room for a plan so far ahead. A plan that
    /// goes further takes pages that nobody is promised. Default: 512.
    pub promise_ahead: u32,
    /// Touch the reserved host memory of the tables at the start, so that no step pays for a page fault, nor the
    /// process for an over-committed machine later. Off: memory is touched as it is first used. What the machine does
    /// not have ends the process when it is touched, which no program can catch; it is the better for that to happen in
    /// [`Engine::new`](crate::Engine::new), if at all. Default: true.
    pub prefault: bool,
}

impl From<PoolConfig> for EngineConfig {
    fn from(pool: PoolConfig) -> Self {
        Self {
            pool,
            prefix: PrefixMode::Radix,
            hashing: None,
            event_pages: 0,
            max_sequences: 256,
            max_sequence_len: 128 << 10,
            max_tokens: 4 << 20,
            max_steps: 8,
            promise_ahead: 512,
            prefault: true,
        }
    }
}

impl Default for EngineConfig {
    /// Of the default pool, with the default limits.
    fn default() -> Self {
        PoolConfig::default().into()
    }
}

/// Checked limits: what the tables are made with.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct EngineShape {
    /// K and V.
    pub layout: PoolLayout,
    /// The page tables, on the host and on every backend.
    pub table: TableShape,
    /// Most tokens of one sequence.
    pub max_sequence_len: u32,
    /// Most unfinished steps.
    pub max_steps: u32,
    /// Tokens that a sequence is planned past its published ones.
    pub promise_ahead: u32,
    /// Whether prefixes are kept and shared.
    pub prefix: PrefixMode,
    /// How cached pages are hashed, if they are.
    pub hashing: Option<Hashing>,
    /// Pages that wait to be told of at most.
    pub event_pages: u32,
    /// Whether all host memory is touched at the start.
    pub prefault: bool,
}

impl EngineShape {
    /// Whether sequences share prefixes that others have computed.
    pub(crate) fn shares_prefixes(&self) -> bool {
        self.prefix == PrefixMode::Radix
    }

    /// Whether commits publish pages: where layers are in groups, for what that lets the sequence give back.
    pub(crate) fn publishes(&self) -> bool {
        self.shares_prefixes() || self.table.tracks > 1
    }

    /// Whether prompts find what is cached: only group 0's pages are, so that none does where there are other groups.
    pub(crate) fn finds_prefixes(&self) -> bool {
        self.shares_prefixes() && self.table.tracks == 1
    }
}

impl EngineConfig {
    /// Checks the config.
    ///
    /// # Errors
    /// A [`ConfigError`] that names the value.
    pub fn shape(&self) -> Result<EngineShape, ConfigError> {
        let layout = self.pool.layout()?;
        for (name, value) in [
            ("max_sequences", u64::from(self.max_sequences)),
            ("max_sequence_len", u64::from(self.max_sequence_len)),
            ("max_tokens", self.max_tokens),
            ("max_steps", u64::from(self.max_steps)),
        ] {
            if value == 0 {
                return Err(ConfigError::Zero { name });
            }
        }
        // Slotmap keys are 32-bit with a sentinel; step items are counted in 32 bits.
        let items = u64::from(self.max_sequences) * u64::from(self.max_steps);
        if items > 1 << 30 {
            let name = "max_sequences * max_steps";
            return Err(ConfigError::Limit { name, value: items, max: 1 << 30 });
        }
        if self.event_pages > 0 && self.hashing.is_none() {
            return Err(ConfigError::EventsWithoutHashes { event_pages: self.event_pages });
        }
        let len_max = layout.slot_count().min(1 << 30);
        let max_sequence_len = u64::from(self.max_sequence_len).min(len_max) as u32;
        let table = TableShape::new(
            layout.page_size(),
            self.max_sequences,
            max_sequence_len,
            self.max_tokens,
        )?
        .with_tracks(layout.tracks())?;
        Ok(EngineShape {
            layout,
            table,
            max_sequence_len,
            max_steps: self.max_steps,
            promise_ahead: self.promise_ahead,
            prefix: self.prefix,
            hashing: self.hashing.filter(|_| self.prefix == PrefixMode::Radix),
            event_pages: if self.prefix == PrefixMode::Radix { self.event_pages } else { 0 },
            prefault: self.prefault,
        })
    }
}
