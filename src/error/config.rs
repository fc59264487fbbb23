//! Errors of an engine's configuration.

use super::{Count, displayed};
use crate::id::LayerId;
use crate::layout::{KvDtype, Reach};

displayed! {
    /// The reason why a config is invalid, or why the engine cannot create its tables.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    #[non_exhaustive]
    pub enum ConfigError {
        /// A number that must be at least 1 is 0.
        Zero { name: &'static str } => "{name} is 0 but must be at least 1";
        /// A computed size exceeds 64 bits. The number of page table words, the number of cells and the length of a
        /// latent row must fit 32 bits.
        Overflow { name: &'static str } => "{name} overflows";
        /// A page has more tokens than the maximum.
        PageSize { page_size: u32, max: u32 } => "page_size {page_size} is above {max}";
        /// The pool has more than 2^32 - 2 pages.
        PageCount { page_count: u64 } => "page_count {page_count} does not fit 32-bit page ids";
        /// The byte budget is below one page.
        Budget {
            /// The budget.
            bytes: u64,
            page_bytes: u64,
        } => "a budget of {} is smaller than a page of {page_bytes}", Count(bytes, "byte");
        /// Neither the number of heads nor the number of ranks divides the other.
        HeadSplit {
            /// The model's heads of K and V.
            kv_heads: u32,
            /// Number of ranks.
            tp_size: u32,
        } => "{} cannot be divided among {}", Count(kv_heads, "kv head"), Count(tp_size, "rank");
        /// The config selects scales by token, but no element type of the pool or of its groups has scales.
        Scaling {
            /// Element type of the pool.
            dtype: KvDtype,
        } => "numbers of {dtype:?} have no scales";
        /// Quantised latent rows require scales by token, but the config selects static scales.
        LatentScaling {
            /// Element type of the latent rows.
            dtype: KvDtype,
        } => "latent rows of {dtype:?} are scaled by token, not by given scales";
        /// Events require hashed pages.
        EventsWithoutHashes {
            /// Pages of the event buffer.
            event_pages: u32,
        } => "events of {event_pages} pages need hashing";
        /// A group has an invalid reach. Group 0 must read all tokens; other groups that do are the last ones. A window
        /// is at least 1, and a chunk is a power of two.
        Reach { group: u32, reach: Reach } => "group {group} {} {reach}",
            if group == 0 { "keeps everything, and does not read" } else { "cannot read" };
        /// A layer names a group that does not exist.
        LayerGroup {
            layer: LayerId,
            group: u32,
            /// Number of groups.
            groups: u32,
        } => "layer {} is in group {group} of {}", layer.raw(), Count(groups, "group");
        /// A group has no layers.
        EmptyGroup { group: u32 } => "no layer is in group {group}";
        /// The number of layers in groups differs from the model's number of layers.
        GroupedLayers {
            /// Layers of the model.
            layers: u32,
            /// Layers in groups.
            grouped: u32,
        } => "groups of {} do not fit a model of {}", Count(grouped, "layer"), Count(layers, "layer");
        /// A shape is given for group 0, which always has the pool's shape, for a group that keeps a state, or for a
        /// group that does not exist.
        GroupShape {
            group: u32,
            /// Number of groups.
            groups: u32,
        } => "{}", match group {
            0 => "group 0 has the pool's shape, not one of its own".into(),
            _ if group < groups => format!("group {group} keeps a state, which has parts and no shape"),
            _ => format!("a shape is given for group {group} of {}", Count(groups, "group")),
        };
        /// Groups with a shape or a state of their own require the layout `PageFirst`.
        LayerFirst {
            /// The first such group.
            group: u32,
        } => "group {group} has a shape or a state of its own, which no LayerFirst pool holds";
        /// The parts of a state are given for a group that keeps none, or lack for one that keeps a state.
        StateGroup { group: u32 } => "group {group} keeps no state, or its state has no parts";
        /// A page is smaller than the state of one layer.
        StatePage {
            page_size: u32,
            /// The least page size whose pages hold the state of a layer.
            min: u32,
        } => "pages of {} do not hold the state of a layer, which takes at least {min}", Count(page_size, "token");
        /// The number of pages of a store's record is not a power of two up to the maximum.
        RecordPages {
            record_pages: u32,
            /// 64, or 1 if a group of layers reads a window or a chunk or keeps a state.
            max: u32,
        } => "record_pages {record_pages} is not a power of two up to {max}";
        /// The stage is smaller than a record of a store.
        StagePages {
            stage_pages: u32,
            /// The pages of the largest record.
            min: u32,
        } => "a stage of {} does not hold a record of {min}", Count(stage_pages, "page");
        /// The rank is not below the number of ranks.
        Rank { tp_rank: u32, tp_size: u32 } => "rank {tp_rank} is not below tp_size {tp_size}";
        /// The system cannot allocate the memory of the tables.
        OutOfMemory {
            /// Bytes of all tables together: [`EngineBytes::host`](crate::world::EngineBytes::host).
            bytes: u64,
        } => "the host has no memory for {}", Count(bytes, "byte");
        /// A number is above its maximum.
        Limit { name: &'static str, value: u64, max: u64 } => "{name} {value} is above {max}";
    }
}

impl std::error::Error for ConfigError {}
