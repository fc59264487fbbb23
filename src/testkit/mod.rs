//! The test oracle: one [`Op`] language, one seeded [`Workload`], one naive [`Model`], and [`replay()`], which drives
//! an engine and the model together. The module also contains the contract of backends.
//!
//! Tests, fuzz targets and benches share this generator and oracle. The model is as plain as possible: maps with one
//! entry for each page, without nodes to split and without bitmaps. If the model and the engine disagree, one of them
//! is wrong.

#[macro_use]
mod forward;

pub mod contract;
pub mod faults;
pub mod index;
pub mod late;
pub mod model;
pub mod op;
pub mod padded;
pub mod parallel;
pub mod planner;
pub mod poison;
pub mod posted;
pub mod quantised;
pub mod replay;
pub mod rng;
pub mod shrink;
pub mod spans;
pub mod store;
pub mod tiers;
pub mod workload;

pub use crate::memory::advise_huge_pages;
pub use faults::Failing;
pub use model::Model;
pub use op::{Op, SmallConfig};
pub use replay::{Mismatch, Summary, replay, replay_on};
pub use workload::{Family, Workload};
