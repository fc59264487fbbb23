//! Errors of an engine's configuration.

use std::error::Error as StdError;
use std::fmt;

use super::Count;
use crate::id::LayerId;
use crate::layout::{KvDtype, Reach};

/// The reason why a config is invalid, or why the engine cannot create its tables.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum ConfigError {
    /// A number that must be at least 1 is 0.
    Zero {
        /// Name of the number.
        name: &'static str,
    },
    /// A computed size exceeds 64 bits. The number of page table words, the number of cells and the length of a latent
    /// row must fit 32 bits.
    Overflow {
        /// Name of the size.
        name: &'static str,
    },
    /// A page has more tokens than the maximum.
    PageSize {
        /// The value.
        page_size: u32,
        /// The largest that is allowed.
        max: u32,
    },
    /// The pool has more than 2^32 - 2 pages.
    PageCount {
        /// The value.
        page_count: u64,
    },
    /// The byte budget is below one page.
    Budget {
        /// The budget.
        bytes: u64,
        /// Bytes of one page.
        page_bytes: u64,
    },
    /// Neither the number of heads nor the number of ranks divides the other.
    HeadSplit {
        /// The model's heads of K and V.
        kv_heads: u32,
        /// Number of ranks.
        tp_size: u32,
    },
    /// The config selects scales by token, but no element type of the pool or of its groups has scales.
    Scaling {
        /// Element type of the pool.
        dtype: KvDtype,
    },
    /// Quantised latent rows require scales by token, but the config selects static scales.
    LatentScaling {
        /// Element type of the latent rows.
        dtype: KvDtype,
    },
    /// Events require hashed pages.
    EventsWithoutHashes {
        /// Pages of the event buffer.
        event_pages: u32,
    },
    /// A group has an invalid reach. Group 0 must read all tokens and other groups must not. A window is at least 1,
    /// and a chunk is a power of two.
    Reach {
        /// The group.
        group: u32,
        /// Reach of the group.
        reach: Reach,
    },
    /// A layer names a group that does not exist.
    LayerGroup {
        /// The layer.
        layer: LayerId,
        /// Group of the layer.
        group: u32,
        /// Number of groups.
        groups: u32,
    },
    /// A group has no layers.
    EmptyGroup {
        /// The group.
        group: u32,
    },
    /// The number of layers in groups differs from the model's number of layers.
    GroupedLayers {
        /// Layers of the model.
        layers: u32,
        /// Layers in groups.
        grouped: u32,
    },
    /// A shape is given for group 0, which always has the pool's shape, or for a group that does not exist.
    GroupShape {
        /// The group.
        group: u32,
        /// Number of groups.
        groups: u32,
    },
    /// Groups with their own shapes require the layout `PageFirst`.
    LayerFirst {
        /// The first group with a shape of its own.
        group: u32,
    },
    /// The rank is not below the number of ranks.
    Rank {
        /// The rank.
        tp_rank: u32,
        /// Number of ranks.
        tp_size: u32,
    },
    /// The system cannot allocate the memory of the tables.
    OutOfMemory {
        /// Bytes of all tables together: [`EngineBytes::host`](crate::world::EngineBytes::host).
        bytes: u64,
    },
    /// A number is above its maximum.
    Limit {
        /// Name of the number.
        name: &'static str,
        /// The value.
        value: u64,
        /// The largest that is allowed.
        max: u64,
    },
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Zero { name } => write!(f, "{name} is 0 but must be at least 1"),
            Self::Overflow { name } => write!(f, "{name} overflows"),
            Self::PageSize { page_size, max } => write!(f, "page_size {page_size} is above {max}"),
            Self::PageCount { page_count } => {
                write!(f, "page_count {page_count} does not fit 32-bit page ids")
            }
            Self::Budget { bytes, page_bytes } => {
                write!(f, "a budget of {} is smaller than a page of {page_bytes}", Count(bytes, "byte"))
            }
            Self::HeadSplit { kv_heads, tp_size } => {
                let (heads, ranks) = (Count(kv_heads.into(), "kv head"), Count(tp_size.into(), "rank"));
                write!(f, "{heads} cannot be divided among {ranks}")
            }
            Self::Scaling { dtype } => write!(f, "numbers of {dtype:?} have no scales"),
            Self::LatentScaling { dtype } => {
                write!(f, "latent rows of {dtype:?} are scaled by token, not by given scales")
            }
            Self::EventsWithoutHashes { event_pages } => {
                write!(f, "events of {event_pages} pages need hashing")
            }
            Self::Reach { group: 0, reach } => {
                write!(f, "group 0 keeps everything, and does not read {reach}")
            }
            Self::Reach { group, reach } => {
                write!(f, "group {group} cannot read {reach}")
            }
            Self::LayerGroup { layer, group, groups } => {
                let groups = Count(groups.into(), "group");
                write!(f, "layer {} is in group {group} of {groups}", layer.raw())
            }
            Self::EmptyGroup { group } => write!(f, "no layer is in group {group}"),
            Self::GroupedLayers { layers, grouped } => {
                let (layers, grouped) = (Count(layers.into(), "layer"), Count(grouped.into(), "layer"));
                write!(f, "groups of {grouped} do not fit a model of {layers}")
            }
            Self::GroupShape { group: 0, .. } => {
                write!(f, "group 0 has the pool's shape, not one of its own")
            }
            Self::GroupShape { group, groups } => {
                write!(f, "a shape is given for group {group} of {}", Count(groups.into(), "group"))
            }
            Self::LayerFirst { group } => {
                write!(f, "group {group} has a shape of its own, which no LayerFirst pool holds")
            }
            Self::Rank { tp_rank, tp_size } => {
                write!(f, "rank {tp_rank} is not below tp_size {tp_size}")
            }
            Self::OutOfMemory { bytes } => {
                write!(f, "the host has no memory for {}", Count(bytes, "byte"))
            }
            Self::Limit { name, value, max } => write!(f, "{name} {value} is above {max}"),
        }
    }
}

impl StdError for ConfigError {}
