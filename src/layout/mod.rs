//! The layout of K and V: [`PoolConfig`] is checked to an immutable [`PoolLayout`] of planes, strides and byte ranges.
//!
//! A pool is [planes](Plane). A plane is what each token stores in each layer; [`KvShape`] lists the planes of a model.
//! One page of one plane of one layer is a *piece*, and a layout is an order of pieces:
//!
//! ```text
//! LayerFirst  [plane, L, P, piece]   attention of one layer reads one region
//! PageFirst   [P, plane, L, piece]   a page is one contiguous piece: all planes of all lanes
//! ```
//!
//! L are the *lanes* of a page: all layers of the model, or where layers are in [`Groups`] as many as keep everything.
//! A group with a shape of its own has planes and lanes of its own, as many as fit a page.
//!
//! A model with heads has the planes K and V, pieces of `[S, H, D]`. Where scales are made at the store, each of them
//! has a plane of scales beside it, pieces of `[H, S]`. Sparse reads need a plane of labels, `[S, H, channels]`. All
//! positions are in bytes.
//!
//! Pure arithmetic, all of it checked. Not here: memory.

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
mod table;
#[cfg(test)]
mod tests;

pub use config::{Capacity, PAGE_SIZE_MAX, PoolConfig};
pub use dtype::{Dtype, KvDtype, Scaling};
pub use groups::{GROUPED_LAYERS_MAX, GROUPS_MAX, GroupShape, Groups, LayerPlace, Reach};
#[cfg(feature = "serde")]
pub use hf::HfError;
pub use labels::{LabelChannels, LabelError};
pub(crate) use limits::{HeldGroup, Limits};
pub use plane::{Plane, PlaneName, PlaneOrder};
pub use planes::PLANES_MAX;
pub use pool::{Layout, PoolLayout, Strides};
pub use scales::{KvScales, ScaleError};
pub use shape::KvShape;
pub use table::TableShape;
