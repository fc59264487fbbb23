//! Attention: how a step is split over the device, and the launches of each variant.
//!
//! ```text
//! variants ---- split (decode, extend, selected)     query heads and windows over K and V
//!   shared ---- split/shared                         spans that several rows share, read once
//!   latent ---- split/latent, row_boxes              latent rows
//! graph_key                                          which steps replay a graph
//! ```
//!
//! Not here: selection of kernels (`kernels/selection.rs`), upload of a plan (`plan`).

pub(super) mod graph_key;
pub(super) mod latent;
mod row_boxes;
pub(super) mod shared;
pub(super) mod split;
mod variant;
pub(super) mod variants;
