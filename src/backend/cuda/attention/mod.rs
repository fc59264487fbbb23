//! Attention: splits each step over the device, and launches each variant.
//!
//! ```text
//! variants, variant ---- split (decode, extend, selected)   query heads and windows over K and V
//!   shared ------------- split/shared                       spans that several rows share, read once
//!   latent ------------- split/latent, row_boxes            latent rows
//! graph_key                                                 the steps that can replay a graph
//! ```
//!
//! `kernels/selection.rs` selects kernels, and `plan` uploads plans.

pub(super) mod graph_key;
pub(super) mod latent;
mod row_boxes;
pub(super) mod shared;
pub(super) mod split;
mod variant;
pub(super) mod variant_table;
