//! The configuration of an engine: [`EngineConfig`], and its checked limits, [`EngineShape`].

// `bytes` is the byte form of a shape. `world/bytes.rs` computes the memory of an engine.

mod bytes;

use crate::error::ConfigError;
use crate::hash::Hashing;
use crate::layout::{Limits, PoolConfig, PoolLayout, TableShape};

pub use bytes::ShapeBytesError;

/// Default of [`EngineConfig::max_step_tokens`].
const STEP_TOKENS: u32 = 16 << 10;

/// Maximum of [`EngineConfig::record_pages`].
const RECORD_PAGES_MAX: u32 = 64;

/// Limits of a backend's steps. They determine its memory for plans.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StepBounds {
    /// Maximum number of steps that have begun and not ended.
    pub steps: u32,
    /// Maximum number of new tokens of a step, including padding.
    pub tokens: u32,
}

impl From<u32> for StepBounds {
    /// Returns limits of `steps` steps with at most 16,384 tokens each.
    fn from(steps: u32) -> Self {
        Self { steps, tokens: STEP_TOKENS }
    }
}

/// Whether prefixes are cached and shared.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum PrefixMode {
    /// Sequences share whole pages of equal prefixes, which stay cached until they are evicted.
    #[default]
    Radix,
    /// Every prompt is computed in full, and the engine keeps no page that no sequence uses. Only a parent and its
    /// forks share pages.
    None,
}

/// The configuration of an engine. `EngineConfig::from(pool_config)` uses the default limits.
///
/// With feature `serde`, fields that a serialised config omits have their defaults.
#[derive(Clone, Copy, PartialEq, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(default, deny_unknown_fields))]
pub struct EngineConfig {
    /// Shape and size of K and V. Default: [`PoolConfig::default`].
    pub pool: PoolConfig,
    /// Reuse of cached prefixes. Default: [`PrefixMode::Radix`].
    pub prefix: PrefixMode,
    /// Hash recipe of cached pages, for callers that identify prefixes by hashes. Each recipe needs a feature. Without
    /// effect in [`PrefixMode::None`]. Default: none, which costs nothing.
    pub hashing: Option<Hashing>,
    /// Capacity of the event buffer: the maximum number of stored and removed pages that wait for
    /// [`Engine::drain_events`](crate::Engine::drain_events). After an overflow the next drain emits the whole tree.
    /// Requires `hashing`; without effect in [`PrefixMode::None`]. Default: 0, no events, which costs nothing.
    pub event_pages: u32,
    /// Whether events also report cells: the pages that groups of limited reach keep, and states. A cell counts as one
    /// page in the buffer. Without effect without events or without such groups. Default: false, which costs nothing.
    pub event_cells: bool,
    /// Number of consecutive pages of group 0 that a store keeps as one record: a power of two from 1 to 64. Larger
    /// records pack small pages. With groups of layers, only 1. Default: 1.
    pub record_pages: u32,
    /// Maximum number of sequences, including preempted ones. Default: 256.
    pub max_sequences: u32,
    /// Maximum number of tokens of a sequence. The engine caps it at 2^30, at the tokens of the pages that
    /// are not reserved, and at the tokens that [`max_tokens`](Self::max_tokens) has memory for. Default: 131,072.
    pub max_sequence_len: u32,
    /// Number of tokens of all sequences together that always fit. It may exceed the pool's tokens, because sequences
    /// share pages. The engine reserves memory for this many tokens and their page tables. Default: 4,194,304.
    pub max_tokens: u64,
    /// Maximum number of steps that are planned and not complete. Default: 8.
    pub max_steps: u32,
    /// Maximum number of new tokens of a step, including padding. The engine caps it at 2^31 - 1. It determines a
    /// backend's memory for plans. Default: 16,384.
    pub max_step_tokens: u32,
    /// Number of tokens by which plans of a sequence with a promise may be ahead of its published tokens. It applies to
    /// models with groups of layers. [`Engine::admit`](crate::Engine::admit) reserves pages for these tokens. A plan
    /// that is further ahead also takes pages that are not promised. Default: 512.
    pub promise_ahead: u32,
    /// For models whose layers keep a state: a prompt's state is cached this many tokens before the prompt's end,
    /// rounded down to whole pages. The next turn of a conversation often changes the last tokens of its prompt.
    /// Default: 128.
    pub state_margin: u32,
    /// Minimum number of tokens from a prompt's hit to the place where its state is cached. Larger gaps save steps, and
    /// lose some hits. Default: 0.
    pub state_gap: u32,
    /// Whether a cached state that a prompt has read keeps its age when the prompt caches a later state of its own.
    /// Otherwise it is evicted first, because a conversation that goes on reads the later state. Default: false.
    pub keep_used_states: bool,
    /// Number of pages, from page 0 on, that no sequence gets: a null page for tables that are padded with 0, or pages
    /// that padding rows of a captured graph write. Less than all pages, and at least 1 if a group of layers keeps a
    /// state: page 0 is then zero, the state of new sequences. Default: 0.
    pub reserved_pages: u32,
    /// Whether plans have [slots of 64 bits](crate::plan::SlotMapping) even if the pool's slots fit in 32 bits, for
    /// kernels that only read these. Default: false.
    pub wide_slots: bool,
    /// Whether [`Engine::new`](crate::Engine::new) touches the reserved memory of the tables that grow with pages and
    /// tokens, so that steps cause no page faults in these tables. Tables of sequences and of steps are small;
    /// their first use touches them. If the machine cannot back the memory, the process ends in this call instead of
    /// in a step. Default: true.
    pub prefault: bool,
}

impl From<PoolConfig> for EngineConfig {
    fn from(pool: PoolConfig) -> Self {
        Self {
            pool,
            prefix: PrefixMode::Radix,
            hashing: None,
            event_pages: 0,
            event_cells: false,
            record_pages: 1,
            max_sequences: 256,
            max_sequence_len: 128 << 10,
            max_tokens: 4 << 20,
            max_steps: 8,
            max_step_tokens: STEP_TOKENS,
            promise_ahead: 512,
            state_margin: 128,
            state_gap: 0,
            keep_used_states: false,
            reserved_pages: 0,
            wide_slots: false,
            prefault: true,
        }
    }
}

impl Default for EngineConfig {
    /// Returns the default pool with the default limits.
    fn default() -> Self {
        PoolConfig::default().into()
    }
}

/// The checked limits of an engine, from which its tables are created.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct EngineShape {
    /// Layout of K and V.
    pub layout: PoolLayout,
    /// Shape of the page tables, on the host and on every backend.
    pub table: TableShape,
    /// Maximum number of tokens of a sequence.
    pub max_sequence_len: u32,
    /// Maximum number of unfinished steps.
    pub max_steps: u32,
    /// Maximum number of new tokens of a step, including padding.
    pub max_step_tokens: u32,
    /// Number of tokens by which plans may be ahead of the published ones within a promise.
    pub promise_ahead: u32,
    /// Number of tokens before a prompt's end at which its state is cached.
    pub state_margin: u32,
    /// Minimum number of tokens from a prompt's hit to the place where its state is cached.
    pub state_gap: u32,
    /// Whether cached states that were read keep their age.
    pub keep_used_states: bool,
    /// Number of pages, from page 0 on, that no sequence gets.
    pub reserved_pages: u32,
    /// Whether plans have slots of 64 bits in a pool of any size.
    pub wide_slots: bool,
    /// Reuse of cached prefixes.
    pub prefix: PrefixMode,
    /// Recipe of page hashes, if any.
    pub hashing: Option<Hashing>,
    /// Maximum number of pages whose events wait for a drain.
    pub event_pages: u32,
    /// Whether events also report the cells of groups of limited reach.
    pub event_cells: bool,
    /// Number of pages of group 0 in a record of a store.
    pub record_pages: u32,
    /// Whether the engine touches its large tables at the start: see [`EngineConfig::prefault`].
    pub prefault: bool,
}

impl EngineShape {
    /// Returns the maximum number of pages that a sequence of `tokens` tokens has in all groups of layers, if its plans
    /// stay within `promise_ahead`. In a pool of fewer pages, the sequence may lack pages even if it runs alone.
    ///
    /// A sequence with a promise and a hit also holds the cached pages of groups of limited reach that the first token
    /// after the hit reads. It holds them until no later token reads them. If an idle pool has too few pages for
    /// `most_pages` and these pages together, `admit` ignores the hit.
    ///
    /// ```
    /// # use kvarena::{Capacity, EngineConfig, PoolConfig};
    /// # use kvarena::layout::{Groups, Reach};
    /// let groups = Groups::new(&[Reach::All, Reach::Window(128)], &[0, 1])?;
    /// let capacity = Capacity::Pages(200);
    /// let pool = PoolConfig { layers: 2, groups, capacity, page_size: 16, ..PoolConfig::default() };
    /// let shape = EngineConfig { promise_ahead: 16, ..pool.into() }.shape()?;
    /// // In the group with the window, 127 tokens before and 16 tokens ahead are in 10 pages at most.
    /// assert_eq!(shape.most_pages(1600), 100 + 10);
    /// # Ok::<(), kvarena::ConfigError>(())
    /// ```
    pub fn most_pages(&self, tokens: u32) -> u64 {
        let places = tokens.div_ceil(self.layout.page_size());
        self.limits().most(places)
    }

    /// Returns the places that sequences keep in groups of layers.
    pub(crate) fn limits(&self) -> Limits {
        Limits::new(&self.layout, self.promise_ahead, self.shares_prefixes())
    }

    /// Returns the limits of steps, from which backends are opened.
    pub fn step_bounds(&self) -> StepBounds {
        StepBounds { steps: self.max_steps, tokens: self.max_step_tokens }
    }

    /// Returns the number of pages that sequences and the cache can have.
    pub fn usable_pages(&self) -> u32 {
        self.layout.page_count() - self.reserved_pages
    }

    pub(crate) fn slots_fit_i32(&self) -> bool {
        !self.wide_slots && self.layout.slots_fit_i32()
    }

    pub(crate) fn shares_prefixes(&self) -> bool {
        self.prefix == PrefixMode::Radix
    }

    /// Returns whether commits publish pages. With groups of layers they do even without prefix reuse, because
    /// publishing releases the pages that no later token reads.
    pub(crate) fn publishes(&self) -> bool {
        self.shares_prefixes() || self.table.tracks > 1
    }
}

impl EngineConfig {
    /// Checks the config and returns its limits.
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
            ("max_step_tokens", u64::from(self.max_step_tokens)),
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
        self.check_records(&layout)?;
        // Cells have 32-bit numbers, and 0 is no cell.
        let all_pages = u64::from(layout.page_count()) + u64::from(layout.swap_pages());
        let limits = Limits::new(&layout, 0, true);
        if limits.tails(0).map(|held| held.cells_in(all_pages)).sum::<u64>() >= u64::from(u32::MAX) {
            return Err(ConfigError::Overflow { name: "cells" });
        }
        // Kernels read the state of a new sequence from page 0, which stays zero.
        let null_page = u32::from(layout.state().is_some());
        let (reserved_pages, pages) = (self.reserved_pages.max(null_page), layout.page_count());
        if reserved_pages >= pages {
            let (name, value, max) = ("reserved_pages", reserved_pages.into(), u64::from(pages) - 1);
            return Err(ConfigError::Limit { name, value, max });
        }
        let usable_slots = u64::from(pages - reserved_pages) * u64::from(layout.page_size());
        let len_max = usable_slots.min(1 << 30).min(self.max_sequence_len.into()) as u32;
        let table = |len_max| TableShape::of(&layout, self.max_sequences, len_max, self.max_tokens);
        // A sequence that is alone has at most the memory of all tokens.
        let max_sequence_len = table(len_max)?.tokens(layout.page_size()).min(len_max.into()) as u32;
        let table = table(max_sequence_len)?;
        let event_pages = if self.prefix == PrefixMode::Radix { self.event_pages } else { 0 };
        Ok(EngineShape {
            layout,
            table,
            max_sequence_len,
            max_steps: self.max_steps,
            max_step_tokens: self.max_step_tokens.min(i32::MAX as u32),
            promise_ahead: self.promise_ahead,
            state_margin: self.state_margin,
            state_gap: self.state_gap,
            keep_used_states: self.keep_used_states,
            reserved_pages,
            wide_slots: self.wide_slots,
            prefix: self.prefix,
            hashing: self.hashing.filter(|_| self.prefix == PrefixMode::Radix),
            event_pages,
            event_cells: self.event_cells && event_pages > 0 && !limits.is_none(),
            record_pages: self.record_pages,
            prefault: self.prefault,
        })
    }

    /// Checks the sizes of the records of stores.
    fn check_records(&self, layout: &PoolLayout) -> Result<(), ConfigError> {
        let record_pages = self.record_pages;
        let cell_pages = Limits::new(layout, 0, true).tails(0).map(|held| held.tracks).max();
        let max = if cell_pages.is_some() { 1 } else { RECORD_PAGES_MAX };
        if !record_pages.is_power_of_two() || record_pages > max {
            return Err(ConfigError::RecordPages { record_pages, max });
        }
        let (stage_pages, min) = (layout.stage_pages(), record_pages.max(cell_pages.unwrap_or(0)));
        // Without a stage, only pages in swap memory are put.
        if (1..min).contains(&stage_pages) { Err(ConfigError::StagePages { stage_pages, min }) } else { Ok(()) }
    }
}
