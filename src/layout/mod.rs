//! The layout of K and V: [`PoolConfig::layout`] checks a config and returns an immutable [`PoolLayout`] of planes,
//! strides and byte ranges.
//!
//! A pool consists of [planes](Plane): a plane is one buffer of numbers that each token stores in each layer.
//! [`KvShape`] determines the planes of a model. One page of one plane of one layer is a *piece*, and a layout is an
//! order of pieces:
//!
//! ```text
//! LayerFirst  [plane, L, P, piece]   attention of one layer reads one region
//! PageFirst   [P, plane, L, piece]   a page is one contiguous range: all planes of all lanes
//! ```
//!
//! P are the pages. L are the *lanes* of a page: all layers of the model, or with [`Groups`] the layers of group 0. A
//! group with its own shape has its own planes, and as many lanes as fit a page.
//!
//! A model with H heads of D elements has planes K and V with pieces of `[S, H, D]`, for the S slots of a page. Scales
//! that are computed at the store have their own planes, with pieces of `[H, S]`. Labels for sparse reads have a plane
//! with pieces of `[S, H, channels]`. All offsets are in bytes, and the config's checks ensure that they fit 64 bits.

mod config;
mod dtype;
mod fingerprint;
mod format;
mod groups;
#[cfg(feature = "serde")]
mod hf;
mod labels;
mod limits;
mod plane;
mod planes;
mod pool;
mod scales;
mod shape;
mod state;
mod table;
#[cfg(test)]
mod tests;

pub use config::{Capacity, PAGE_SIZE_MAX, PoolConfig};
pub use dtype::{Dtype, KvDtype, Scaling};
pub use groups::{GROUPED_LAYERS_MAX, GROUPS_MAX, GroupShape, Groups, LayerPlace, Reach, STATE_PARTS_MAX, StatePart};
#[cfg(feature = "serde")]
pub use hf::HfError;
pub use labels::{LabelChannels, LabelError};
pub(crate) use limits::{HeldGroup, Limits, saturated};
pub use plane::{Plane, PlaneName, PlaneOrder};
pub use planes::PLANES_MAX;
pub use pool::{Layout, PoolLayout, Strides};
pub use scales::{KvScales, ScaleError};
pub use shape::KvShape;
pub use state::StateLayout;
pub use table::TableShape;
